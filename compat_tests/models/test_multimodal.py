"""Multimodal checkpoints for reward models: the text part is computed, trained and saved; other tensors are saved
unchanged."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from compat_tests.models import families, variants
from compat_tests.parity import reference
from compat_tests.parity.marks import assert_same_curve, assert_same_weights
from compat_tests.tiny import SHAPE, preference_rows, tiny_tokenizer
from trl_jax.hub.auto import AutoModelForSequenceClassification

torch = pytest.importorskip("torch")

TEXT = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 7, "query_pre_attn_scalar": 24,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}  # fmt: skip
VISION = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 28, "patch_size": 14,
}  # fmt: skip
IMAGES = ("vision_tower", "multi_modal_projector")


def build(folder, *, dtype="float32", head=True, **text):
    from transformers import AutoConfig, Gemma3ForConditionalGeneration, Gemma3ForSequenceClassification

    words = tiny_tokenizer(folder)
    text = {**TEXT, "vocab_size": len(words) + 9, "pad_token_id": words.pad_token_id, **text}
    config = AutoConfig.for_model(
        "gemma3", text_config=text, vision_config=VISION, mm_tokens_per_image=4, num_labels=1, initializer_range=0.3
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = (Gemma3ForSequenceClassification if head else Gemma3ForConditionalGeneration)(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    return folder


def of_images(folder) -> dict[str, np.ndarray]:
    return {name: values for name, values in load_file(folder / "model.safetensors").items() if name.startswith(IMAGES)}


def rename(folder, prefixes: dict[str, str]) -> None:
    path, tensors = folder / "model.safetensors", {}
    for name, values in load_file(path).items():
        old = next((prefix for prefix in prefixes if name.startswith(prefix)), "")
        tensors[prefixes.get(old, "") + name.removeprefix(old)] = values
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scores_and_an_export_byte_for_byte(dtype, tmp_path):
    from transformers import AutoModelForSequenceClassification as Theirs

    folder = build(tmp_path / "there", dtype=dtype)
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    ids, mask = variants.rows()
    ids = np.where(ids < 60, ids, ids % 60)
    theirs = variants.reference(folder).float()
    with torch.no_grad():
        wanted = theirs(input_ids=torch.tensor(ids), attention_mask=torch.tensor(mask)).logits.numpy()
    assert wanted.std() > 0.05
    variants.assert_close(model(ids, mask).logits, wanted, 1e-5)
    model.save_pretrained(tmp_path / "back")
    back, there = ((tmp_path / side / "model.safetensors").read_bytes() for side in ("back", "there"))
    assert back == there
    Theirs.from_pretrained(folder).save_pretrained(tmp_path / "theirs")  # its config also has the dtype of both parts
    ours, wanted = (json.loads((tmp_path / side / "config.json").read_text()) for side in ("back", "theirs"))
    assert ours == wanted | {"use_cache": False}


@pytest.mark.parametrize(("stored", "dtype"), [("float16", "float32"), ("float32", "bfloat16")])
def test_a_tower_that_is_not_read_is_saved_in_the_dtype_of_the_model(stored, dtype, tmp_path):
    """As by transformers."""
    from transformers import AutoModelForSequenceClassification as Theirs

    folder = build(tmp_path / "there", dtype=stored)
    Theirs.from_pretrained(folder, dtype=dtype).save_pretrained(tmp_path / "theirs")
    AutoModelForSequenceClassification.from_pretrained(folder, dtype=dtype).save_pretrained(tmp_path / "ours")
    found, wanted = (load_file(tmp_path / side / "model.safetensors") for side in ("ours", "theirs"))
    assert {name: values.dtype for name, values in found.items()} == dict.fromkeys(wanted, np.dtype(dtype))
    assert all(found[name].tobytes() == wanted[name].tobytes() for name in wanted)


def test_gated_delta_nets_beside_a_tower(tmp_path):
    """qwen3_5: scores, and a byte-for-byte export."""
    from transformers import AutoConfig, Qwen3_5ForSequenceClassification

    words = tiny_tokenizer(tmp_path / "there")
    text = SHAPE | families.DELTA | {"vocab_size": len(words) + 8, "pad_token_id": words.pad_token_id}
    rope = families.QUARTER | {"mrope_section": [1, 1, 0], "mrope_interleaved": True}
    tower = {
        "depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4, "out_hidden_size": 64,
        "num_position_embeddings": 16,
    }  # fmt: skip
    parts = {"text_config": text | {"rope_parameters": rope}, "vision_config": tower}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        theirs = Qwen3_5ForSequenceClassification(AutoConfig.for_model("qwen3_5", num_labels=1, **parts))
        with torch.no_grad():
            for parameter in theirs.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
    theirs.save_pretrained(tmp_path / "there")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "there")
    ids, mask = variants.rows()
    with torch.no_grad():
        wanted = theirs.eval()(input_ids=torch.tensor(ids), attention_mask=torch.tensor(mask)).logits.numpy()
    assert wanted.std() > 0.05
    variants.assert_close(model(ids, mask).logits, wanted, 1e-5)
    model.save_pretrained(tmp_path / "back")
    back, there = ((tmp_path / side / "model.safetensors").read_bytes() for side in ("back", "there"))
    assert back == there


def test_names_of_another_time_are_kept(tmp_path):
    folder, today = build(tmp_path / "there"), tmp_path / "today"
    shutil.copytree(folder, today)
    images = {f"{prefix}.": f"model.{prefix}." for prefix in IMAGES}
    rename(today, {"language_model.model.": "model.language_model."} | images)
    one, other = (AutoModelForSequenceClassification.from_pretrained(place) for place in (folder, today))
    for path, array in one.params.items():
        np.testing.assert_array_equal(other.params[path], array, err_msg=path)
    other.save_pretrained(tmp_path / "back")
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == (today / "model.safetensors").read_bytes()
    ids, mask = np.full((1, 9), 7), np.ones((1, 9), int)
    wanted = variants.reference_logits(tmp_path / "back", ids, mask)
    variants.assert_close(other(ids, mask).logits, wanted, 1e-5)


def test_training_moves_the_text_alone_and_as_trl_does(tmp_path):
    """Starts from a generative model; weight decay would change a tower that is trained."""
    folder = build(tmp_path / "there", head=False)
    config = {"max_steps": 4, "weight_decay": 0.3}
    ours = reference.run_ours(folder, preference_rows(24), tmp_path / "ours", **config)
    theirs = reference.run_trl(folder, preference_rows(24), tmp_path / "theirs", **config)
    assert_same_curve(ours.logs, theirs.logs)
    assert_same_weights(ours.weights, theirs.weights)
    before, after = of_images(folder), of_images(ours.folder)
    assert before.keys() == after.keys() and len(before) > 10
    for name, values in before.items():
        np.testing.assert_array_equal(after[name], values, err_msg=name)
    start = reference.read_weights(folder)
    moved = {name: np.abs(ours.weights[name] - values).max() for name, values in start.items() if name not in before}
    assert min(moved.values()) > 0


def test_sizes_may_be_left_to_the_class(tmp_path, monkeypatch):
    """As in google/gemma-3-4b-it, whose text_config only has values that differ from the defaults."""
    from trl_jax.hub import families
    from trl_jax.hub.families import read_arch

    text = {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    }  # fmt: skip
    raw = {"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 1152}}
    _, arch = read_arch(raw, tmp_path / "config.json")
    assert (arch.vocab_size, arch.num_heads, arch.num_key_heads, arch.head_dim) == (262_208, 8, 4, 256)
    assert [arch.ropes[i].theta for i in (4, 5)] == [1e4, 1e6] and arch.windows[4:6] == (1024, None)
    monkeypatch.setattr(families, "is_unread", lambda config_class, key: False)
    with pytest.raises(ValueError, match=r"text_config has keys that trl_jax does not know .*: new_fact=3"):
        read_arch(raw | {"text_config": text | {"new_fact": 3}}, tmp_path / "config.json")
