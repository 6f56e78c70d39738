"""idefics3, smolvlm, mistral3 and internvl: positions of padded tiles, older tensor names, and errors."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from compat_tests.hub.vision.models import CASES, pixels
from compat_tests.hub.vision.test_families import built
from trl_jax.hub.config import read_native_config
from trl_jax.hub.native_backend import load_native
from trl_jax.hub.vision import vision_families
from trl_jax.hub.vision.idefics3 import nearest

torch = pytest.importorskip("torch")


def config_of(name, folder, changes=None):
    """A case's config of transformers, saved with some keys replaced."""
    import transformers

    case = CASES[name]
    config = getattr(transformers, case.config_class)(**case.values)
    config.save_pretrained(folder)
    raw = json.loads((folder / "config.json").read_text())
    for part, value in (changes or {}).items():
        raw[part] = raw[part] | value if isinstance(value, dict) else value
    (folder / "config.json").write_text(json.dumps(raw))
    return config


# Positions


@pytest.mark.parametrize("side", [4, 26, 27, 70])
def test_positions_of_padded_tiles_are_those_of_transformers(side):
    from transformers import Idefics3VisionConfig
    from transformers.models.idefics3.modeling_idefics3 import Idefics3VisionEmbeddings

    module = Idefics3VisionEmbeddings(Idefics3VisionConfig(image_size=side, patch_size=1, hidden_size=1))
    module.patch_embedding.weight.data.zero_(), module.patch_embedding.bias.data.zero_()
    module.position_embedding.weight.data = torch.arange(side**2, dtype=torch.float32)[:, None]
    padded = side + 3
    for count in range(1, padded + 1):
        mask = torch.zeros(1, padded, padded, dtype=torch.bool)
        mask[:, :count] = True
        wanted = module(torch.zeros(1, 3, padded, padded), mask).reshape(padded, padded)
        rows, columns = nearest(count, padded, side), nearest(padded, padded, side)
        np.testing.assert_array_equal(rows[:count, None] * side + columns, wanted[:count].detach().numpy())


# Files


@pytest.mark.parametrize("name", ["internvl", "mistral3"])
def test_names_of_newer_files_are_read_and_kept(name, tmp_path):
    _, model, folder, _, params, _ = built(CASES[name], tmp_path / "first")
    tensors, newer = load_file(folder / "model.safetensors"), tmp_path / "newer"
    assert all(one.startswith(("language_model.", "vision_tower.", "multi_modal_projector.")) for one in tensors)
    replaced = {"language_model.model.": "model.language_model.", "language_model.lm_head.": "lm_head."}
    replaced |= {one: f"model.{one}" for one in ("vision_tower.", "multi_modal_projector.")}
    stored = {
        next(new + one.removeprefix(old) for old, new in replaced.items() if one.startswith(old)): tensor
        for one, tensor in tensors.items()
    }
    newer.mkdir()
    (newer / "config.json").write_text((folder / "config.json").read_text())
    save_file(stored, newer / "model.safetensors", metadata={"format": "pt"})
    found, backend = load_native(read_native_config(newer, "lm").with_images(), dtype="float32", seed=0)
    assert found.keys() == params.keys() and all(np.array_equal(found[path], params[path]) for path in params)
    backend.save(tmp_path / "saved", found, model.config)
    again = load_file(tmp_path / "saved" / "model.safetensors")
    assert again.keys() == stored.keys() and all(np.array_equal(again[one], stored[one]) for one in stored)


def test_keys_of_published_configs_are_read(tmp_path, caplog):
    known = {"max_image_size": {"longest_edge": 384}, "size": {"longest_edge": 1536}, "use_base_siglip": False}
    config_of("smolvlm", tmp_path, {"vision_config": known})
    assert read_native_config(tmp_path, "lm").with_images().arch.vision.position_rows == 36
    assert "ignoring use_base_siglip, which neither" in caplog.text


# Adapters


# Errors

REFUSED = {
    "dropout of idefics3": ("idefics3", {"vision_config": {"attention_dropout": 0.1}}, "attention_dropout must be 0.0"),
    "a patch larger than the image": ("smolvlm", {"vision_config": {"patch_size": 64}}, "at most image_size 46"),
    "another tower": ("mistral3", {"vision_config": {"model_type": "clip_vision_model"}}, "must be 'pixtral'"),
    "dropout of mistral3": ("mistral3", {"vision_config": {"attention_dropout": 0.1}}, "attention_dropout must be 0.0"),
    "another width of heads": ("mistral3", {"vision_config": {"head_dim": 8}}, "head_dim must be 16"),
    "odd pairs": ("mistral3", {"vision_config": {"num_attention_heads": 16}}, "a multiple of 4 x num_attention_heads"),
    "another rope": (
        "mistral3", {"vision_config": {"rope_parameters": {"rope_type": "axial", "rope_theta": 9.0, "factor": 2.0}}},
        "factor=2.0",
    ),
    "several layers": ("mistral3", {"vision_feature_layer": [-2, -1]}, "vision_feature_layer must be one whole"),
    "dropout of internvl": (
        "internvl", {"vision_config": {"hidden_dropout_prob": 0.1}}, "hidden_dropout_prob must be 0.0"
    ),
    "an oblong image": ("internvl", {"vision_config": {"image_size": [28, 56]}}, "must be an equal height"),
    "an odd ratio": ("internvl", {"downsample_ratio": 0.4}, "downsample_ratio is 0.4, wanted 1, 1/2"),
    "patches left over": ("internvl", {"vision_config": {"image_size": 35}}, "5 patches along a side, wanted"),
    "class tokens": ("internvl", {"vision_feature_select_strategy": "full"}, "strategy is 'full'"),
    "eps of queries": ("internvl", {"vision_config": {"layer_norm_eps": 1e-5}}, "layer_norm_eps must be 1e-06 with"),
    "a last norm without mean": ("internvl", {"vision_config": {"use_mean_pooling": False}}, "true with norm_type rms"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_computed_is_refused_by_name(name, tmp_path):
    key, changes, message = REFUSED[name]
    config_of(key, tmp_path, changes)
    with pytest.raises(ValueError, match=message):
        read_native_config(tmp_path, "lm").with_images()


def whole_tile(height, width):
    return {
        "pixel_values": pixels(1, 1, 3, height, width),
        "pixel_attention_mask": np.ones((1, 1, height, width), np.int64),
    }


@pytest.mark.parametrize(
    ("name", "processed", "message"),
    [
        ("idefics3", whole_tile(28, 35), "4 x 5 patches, wanted a square"),
        ("smolvlm", whole_tile(28, 28), "4 x 4 patches, wanted a square whose side is a multiple of scale_factor 3"),
        ("mistral3", {"pixel_values": pixels(1, 3, 40, 40), "image_sizes": np.array([[40, 4]])}, "10 x 1 patches"),
        ("internvl", {"pixel_values": pixels(1, 3, 28, 56), "num_patches": np.array([1])}, "28 x 56 pixels, wanted 28"),
    ],
)  # fmt: skip
def test_images_that_another_processor_made_are_refused(name, processed, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        vision_families()[name].patches(processed, config_of(name, tmp_path))
