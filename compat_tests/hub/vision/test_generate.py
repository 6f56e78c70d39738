"""Completions of prompts with images match transformers', with inputs of its processor and with torch models."""

from __future__ import annotations

import numpy as np
import pytest

import trl_jax
from compat_tests.effort import usual, usually
from compat_tests.hub.vision.processors import placeholder
from compat_tests.trainer.vision_models import pictures, tiny_llava, tiny_qwen, tiny_tiled

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


def inputs(folder, counts):
    """What a processor returns for left-padded texts with these numbers of images."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    config = transformers.AutoConfig.from_pretrained(folder)
    found = processor(images=pictures(sum(counts)), return_tensors="pt")
    grids = found.get("image_grid_thw")
    sizes = [16] * sum(counts) if grids is None else (grids.prod(1) // 4).tolist()
    token = tokenizer.convert_ids_to_tokens(getattr(config, "image_token_id", None) or config.image_token_index)
    sizes, texts = iter(sizes), []
    for number, count in enumerate(counts):
        texts.append(
            "bake the bread " * number + "".join(f"{token * next(sizes)} cake " for _ in range(count)) + "gladly"
        )
    ids = tokenizer(texts, padding=True, padding_side="left", return_tensors="pt")
    given = {"input_ids": ids["input_ids"], "attention_mask": ids["attention_mask"], **found}
    if grids is not None:
        given["mm_token_type_ids"] = (given["input_ids"] == config.image_token_id).int()
    return given


@pytest.mark.parametrize("make", [tiny_llava, tiny_qwen])
def test_tokens_are_transformers(make, tmp_path):
    folder = make(tmp_path)
    given = inputs(folder, (1, 0, 2))
    options = {"max_new_tokens": 8, "do_sample": False}
    wanted = transformers.AutoModelForImageTextToText.from_pretrained(folder).eval().generate(**given, **options)
    model = trl_jax.AutoModelForImageTextToText.from_pretrained(folder)
    assert model.generate(**given, **options).tolist() == wanted.tolist()
    arrays = {name: np.asarray(value) for name, value in given.items()}
    twice = {name: np.repeat(value, 2, axis=0) for name, value in arrays.items() if len(value) == 3}
    if make is tiny_llava:
        twice["pixel_values"] = arrays["pixel_values"][[0, 0, 1, 2, 1, 2]]
        assert model.generate(**twice, **options).tolist() == np.repeat(wanted.numpy(), 2, axis=0).tolist()
    missing = {name: value for name, value in arrays.items() if name != "image_grid_thw"}
    if make is tiny_qwen:
        with pytest.raises(ValueError, match="got no image_grid_thw"):
            model.generate(**missing, **options)
    with pytest.raises(TypeError, match="was loaded without a vision tower"):
        trl_jax.AutoModelForCausalLM.from_pretrained(folder).generate(**arrays, **options)
    with pytest.raises(ValueError, match="3 more images than the image tokens of input_ids have room for"):
        model.generate(**arrays | {"input_ids": np.full((3, 9), 9), "attention_mask": np.ones((3, 9))}, **options)


TILED = ("gemma3", "gemma4", "idefics3", "internvl", "llava_next", "mistral3", "smolvlm")


@usual("internvl")
@pytest.mark.parametrize("name", usually(lambda name: name in ("gemma3", "internvl"), TILED))
def test_tokens_of_what_processors_return(name, tmp_path, monkeypatch):
    processor, marker, some = tiny_tiled(tmp_path, name, monkeypatch), placeholder(name), pictures(3)
    model = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path).eval()
    ours = trl_jax.AutoModelForImageTextToText.from_pretrained(tmp_path)
    options = {"max_new_tokens": 6, "do_sample": False}
    for images in (some[:1], some[1:]):
        text = "bake ".join(["", *[f"{marker} the bread"] * len(images)])
        given = processor(images=[images], text=[text], return_tensors="pt")
        wanted = model.generate(**given, **options)
        assert ours.generate(**given, **options).tolist() == wanted.tolist()


def test_a_text_model_has_no_tower(checkpoint):
    with pytest.raises(ValueError, match="has no vision tower"):
        trl_jax.AutoModelForImageTextToText.from_pretrained(str(checkpoint(head="causal")))
