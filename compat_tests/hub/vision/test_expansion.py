"""Texts with images are expanded to the same token ids and patches as by transformers' processors."""

from __future__ import annotations

import types

import numpy as np
import pytest

from compat_tests.hub.vision.processors import (
    IMAGE_PROCESSORS,
    TOKENS,
    built_processor,
    config_for,
    placeholder,
    tokenizer_with,
)
from trl_jax.data.image_rows import prompt_with_answers
from trl_jax.hub.vision import vision_families
from trl_jax.hub.vision.processor import VisionProcessor

pytest.importorskip("torch")
Image = pytest.importorskip("PIL.Image")

TEXTS = {0: "bake the bread?", 1: "bake {} the bread?", 3: "{}bake{} the\n{}\nbread?"}
SIZES = ((50, 31), (90, 27))


def both_processors(name, monkeypatch):
    """Our processor and transformers'."""
    theirs = built_processor(name, monkeypatch)
    native = types.SimpleNamespace(vision=vision_families()[name.split()[0]], path="config.json")
    changed = theirs.images_kwargs if name == "gemma3 with crops" else {}
    return VisionProcessor(
        native, config_for(name, theirs), theirs.tokenizer, theirs.image_processor, **changed
    ), theirs


def pictures_of(count):
    dice = np.random.default_rng(0)
    sizes = (SIZES + SIZES[::-1])[:count]
    return [Image.fromarray(dice.integers(0, 256, (*size[::-1], 3), np.uint8)) for size in sizes]


@pytest.mark.parametrize("name", IMAGE_PROCESSORS)
def test_ids_and_patches_are_those_of_transformers(name, monkeypatch):
    ours, theirs = both_processors(name, monkeypatch)
    lengths = {}
    for count, text in TEXTS.items():
        pictures, text = pictures_of(count), text.format(*[placeholder(name)] * count)
        options = {"return_tensors": "np", "add_special_tokens": False}
        wanted = theirs(images=pictures or None, text=[text], **options)
        found = ours.encode(text, pictures)
        np.testing.assert_array_equal(found.ids, wanted["input_ids"][0])
        assert wanted["attention_mask"].all()
        np.testing.assert_array_equal(found.images.features != -1, found.ids == ours.image_token_id)
        if name.startswith("gemma") and count:
            types_of = wanted["token_type_ids" if name.startswith("gemma3") else "mm_token_type_ids"]
            np.testing.assert_array_equal(found.images.features >= 0, types_of[0] == 1)
        lengths[count] = len(found.ids)
        if count:
            processed = {key: np.asarray(wanted[key]) for key in ours.family.pixels if key in wanted}
            if "num_patches" in ours.family.pixels:  # transformers' processor drops it
                processed["num_patches"] = np.array([len(wanted["pixel_values"])])
            images = ours.family.patches(processed, ours.config)
            for part in ("patches", "table"):
                if getattr(images[0], part) is not None:
                    made, given = ([getattr(one, part) for one in some] for some in (found.images.images, images))
                    np.testing.assert_array_equal(np.concatenate(made), np.concatenate(given))
    assert lengths[0] < lengths[1] < lengths[3]


def test_a_cut_separator_is_refused(monkeypatch):
    ours, _ = both_processors("llava_next", monkeypatch)
    [picture] = pictures_of(1)
    row = {"prompt": "<image>", "completion": "gladly", "image": picture}
    length = len(ours.encode("<image>", [picture]).ids)
    assert len(prompt_with_answers(row, ["completion"], ours, length).texts[0]) == length
    with pytest.raises(ValueError, match=f"max_length={length - 1} cuts an image"):
        prompt_with_answers(row, ["completion"], ours, length - 1)


def test_a_wrong_number_of_placeholders_is_refused(monkeypatch):
    ours, _ = both_processors("gemma3", monkeypatch)
    with pytest.raises(ValueError, match=r"\(1\) does not match number of image placeholders \(2\)"):
        ours.encode(placeholder("gemma3") * 2, pictures_of(1))


def test_a_tokenizer_without_the_tokens_of_images_is_refused(monkeypatch):
    ours, _ = both_processors("gemma3", monkeypatch)
    native = types.SimpleNamespace(vision=ours.family, path="config.json")
    with pytest.raises(ValueError, match="the tokenizer has no boi_token"):
        VisionProcessor(native, ours.config, tokenizer_with([*TOKENS["gemma3"].values()]), ours.image_processor)
