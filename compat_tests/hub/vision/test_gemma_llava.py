"""gemma3, gemma4, llava and llava_next: older tensor names, and unsupported configs, refused by name."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from compat_tests.hub.vision.models import CASES
from compat_tests.hub.vision.test_families import built
from trl_jax.hub.config import read_native_config
from trl_jax.hub.native_backend import load_native

pytest.importorskip("torch")

# Prefixes of tensor names in older files, in those of transformers 4.52 and later, and in those of transformers 5.
OLDEST = {
    "text": "language_model.model.", "head": "language_model.lm_head.", "tower": "vision_tower.vision_model.",
    "projector": "multi_modal_projector.", "separator": "image_newline",
}  # fmt: skip
LATER = {
    "text": "model.language_model.", "head": "lm_head.", "tower": "model.vision_tower.vision_model.",
    "projector": "model.multi_modal_projector.", "separator": "model.image_newline",
}  # fmt: skip
NEWEST = LATER | {"tower": "model.vision_tower."}


def renamed(name, wanted):
    for names in (OLDEST, LATER, NEWEST, {"tower": "vision_tower."}):
        for part, prefix in names.items():
            if name.startswith(prefix):
                return wanted[part] + name.removeprefix(prefix)
    raise AssertionError(name)


@pytest.mark.parametrize("name", ["gemma3", "llava_next"])
def test_names_of_older_and_newer_files_are_read_and_kept(name, tmp_path):
    _, model, folder, _, params, _ = built(CASES[name], tmp_path / "first")
    tensors = load_file(folder / "model.safetensors")
    for number, wanted in enumerate((OLDEST, LATER, NEWEST)):
        other, saved = tmp_path / f"other{number}", tmp_path / f"saved{number}"
        other.mkdir()
        (other / "config.json").write_text((folder / "config.json").read_text())
        stored = {renamed(name, wanted): tensor for name, tensor in tensors.items()}
        save_file(stored, other / "model.safetensors", metadata={"format": "pt"})
        found, backend = load_native(read_native_config(other, "lm").with_images(), dtype="float32", seed=0)
        assert found.keys() == params.keys() and all(np.array_equal(found[path], params[path]) for path in params)
        backend.save(saved, found, model.config)
        again = load_file(saved / "model.safetensors")
        assert again.keys() == stored.keys() and all(np.array_equal(again[name], stored[name]) for name in stored)


REFUSED = {
    "another tower": ("gemma3", {"vision_config": {"model_type": "clip_vision_model"}}, "must be .* got 'clip_vision"),
    "too many tokens": ("gemma3", {"mm_tokens_per_image": 49}, "mm_tokens_per_image is 49, wanted a square of 1 to 6"),
    "another rope": (
        "gemma4", {"vision_config": {"rope_parameters": {"rope_type": "axial", "rope_theta": 100.0, "factor": 2.0}}},
        "rope_parameters has keys .* factor=2.0",
    ),
    "odd channels": ("gemma4", {"vision_config": {"head_dim": 6}}, "head_dim must be a multiple of 4"),
    "no tower": ("gemma4", {"vision_config": None}, "vision_config is null"),
    "a class token in each tile": (
        "llava_next", {"vision_feature_select_strategy": "full"},
        "vision_feature_select_strategy is 'full', wanted 'default' for a clip_vision_model",
    ),
    "several layers": ("llava_next", {"vision_feature_layer": [-2, -1]}, "vision_feature_layer must be one whole"),
    "an unknown key": ("gemma3", {"vision_config": {"image_std_scale": 2}}, None),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_computed_is_refused_by_name(name, tmp_path, caplog):
    import transformers

    key, changes, message = REFUSED[name]
    case = CASES[key]
    getattr(transformers, case.config_class)(**case.values).save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    for part, value in changes.items():
        raw[part] = raw[part] | value if isinstance(value, dict) else value
    (tmp_path / "config.json").write_text(json.dumps(raw))
    if message is None:
        read_native_config(tmp_path, "lm").with_images()
        assert "ignoring image_std_scale" in caplog.text
        return
    with pytest.raises(ValueError, match=message):
        read_native_config(tmp_path, "lm").with_images()
