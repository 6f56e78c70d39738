"""Qwen's vision-language models: positions on three axes, real images, tensor names on disk, and refused configs."""

from __future__ import annotations

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from compat_tests.effort import usual
from compat_tests.hub.vision.models import CASES, IMAGE
from compat_tests.hub.vision.test_families import built, of_transformers, padded, texts
from trl_jax.data.images import grid_positions
from trl_jax.hub.config import read_native_config
from trl_jax.hub.native_backend import load_native
from trl_jax.hub.vision import vision_families
from trl_jax.models.model import merge

torch = pytest.importorskip("torch")
QWEN = [name for name in CASES if name.startswith("qwen")]
GRIDS = [(1, 6, 8), (1, 10, 4), (1, 2, 2), (3, 2, 4)]  # frames, rows and columns of patches


def write_config(folder, name, **sections):
    """Write a case's config.json with some keys of its sections replaced."""
    import transformers

    config = getattr(transformers, CASES[name].config_class)(**CASES[name].values)
    raw = json.loads(config.to_json_string())
    for section, values in sections.items():
        raw[section] |= values
    (folder / "config.json").write_text(json.dumps(raw))
    return config


# Positions


@pytest.mark.parametrize("name", QWEN)
def test_positions_are_those_of_transformers(name):
    import transformers

    config = getattr(transformers, CASES[name].config_class)(**CASES[name].values)
    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(config).model
    spans = [  # lengths of text spans, and indices into GRIDS
        [7], [4, (0,), 3], [(0,), 5], [5, (1,)], [(2,)], [(3,)], [(1,), 2, (0,), 1, (2,)], [(3,), 1, (3,), 4, (1,)],
        [1, (2,), 1, (3,), 2, (0,), 6],
    ]  # fmt: skip
    family = vision_families()[name]
    assert family.positions is grid_positions
    for text in spans:
        grids = np.array([GRIDS[span[0]] for span in text if isinstance(span, tuple)]).reshape(-1, 3)
        pixels = np.zeros((int(grids.prod(axis=1).sum()), 96), np.float32)
        images = family.patches({"pixel_values": pixels, "image_grid_thw": grids}, config)
        tokens = iter([len(image.tokens) for image in images])
        ids = np.concatenate([[IMAGE] * next(tokens) if isinstance(span, tuple) else [9] * span for span in text])
        theirs, _ = model.get_rope_index(
            torch.tensor(ids[None]), mm_token_type_ids=torch.tensor((ids == IMAGE).astype(int)[None]),
            image_grid_thw=torch.tensor(grids) if images else None,
        )  # fmt: skip
        np.testing.assert_array_equal(family.positions(ids, IMAGE, images), theirs[:, 0].T)


# Images


def pictures():
    """Images of several sizes and modes; the processor shrinks the first and enlarges the last."""
    from PIL import Image

    draws = np.random.default_rng(7)
    modes = {"RGB": (90, 61, 3), "L": (31, 44), "RGBA": (6, 9, 4)}
    return [Image.fromarray(draws.integers(0, 256, shape, np.uint8), mode) for mode, shape in modes.items()]


@usual("qwen2_5_vl")  # test_families.py compares logits of the others
@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_pictures_of_the_processor_give_the_logits_of_transformers(name, tmp_path):
    from transformers import Qwen2VLImageProcessorPil

    processor = Qwen2VLImageProcessorPil(patch_size=4, size={"shortest_edge": 300, "longest_edge": 2000})
    processed = [dict(processor(picture, return_tensors="np")) for picture in pictures()]
    assert all(one.keys() == set(vision_families()[name].pixels) for one in processed)
    grids = [tuple(one["image_grid_thw"][0].tolist()) for one in processed]
    assert len(set(grids)) == 3
    case = replace(CASES[name], processed=processed, tokens=[rows * columns // 4 for _, rows, columns in grids])
    case, model, _, native, params, backend = built(case, tmp_path)
    rows = texts(case)
    theirs = np.concatenate(of_transformers(case, model, rows))
    tokens, positions, reads, images = padded(native, case, model, rows)
    module = merge(backend.graph, params)
    ours = module(tokens, positions, reads, images=jax.tree.map(jnp.asarray, images))
    np.testing.assert_allclose(ours, theirs, atol=1e-5)


@pytest.mark.parametrize("sections", [[2, 2], [1, 1, 1, 1]])
def test_any_number_of_sections_is_read_as_in_transformers(sections, tmp_path):
    """TRL's tiny models have two."""
    case = CASES["qwen2_5_vl"]
    text = case.values["text_config"] | {
        "num_hidden_layers": 1, "rope_parameters": {"rope_theta": 1e4, "mrope_section": sections},
    }  # fmt: skip
    case, model, _, native, params, backend = built(replace(case, values=case.values | {"text_config": text}), tmp_path)
    rows = texts(case)
    theirs = np.concatenate(of_transformers(case, model, rows))
    tokens, positions, reads, images = padded(native, case, model, rows)
    ours = merge(backend.graph, params)(tokens, positions, reads, images=jax.tree.map(jnp.asarray, images))
    np.testing.assert_allclose(ours, theirs, atol=1e-5)


# Files


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl"])
@pytest.mark.parametrize("tower, text", [("visual.", "model."), ("model.visual.", "model.language_model.")])
def test_names_of_older_and_newer_files_are_read_and_kept(name, tower, text, tmp_path):
    import transformers

    config = write_config(tmp_path, name)
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    renamed = {
        key.replace("model.visual.", tower).replace("model.language_model.", text): value.numpy()
        for key, value in model.state_dict().items()
    }
    save_file(renamed, tmp_path / "model.safetensors")
    params, backend = load_native(read_native_config(tmp_path, "lm").with_images(), dtype="float32", seed=0)
    found = np.asarray(params["vision.tower.patches.weight"])
    np.testing.assert_array_equal(found, renamed[tower + "patch_embed.proj.weight"].reshape(found.shape))
    backend.save(tmp_path / "saved", params, config)
    after = load_file(tmp_path / "saved" / "model.safetensors")
    assert after.keys() == renamed.keys() and all(np.array_equal(after[key], renamed[key]) for key in renamed)


# Configs


@pytest.mark.parametrize(
    ("name", "section", "values", "message"),
    [
        ("qwen3_vl", "vision_config", {"head_dim": 8}, "head_dim=8"),
        ("qwen2_vl", "vision_config", {"num_heads": 3}, "must be a multiple of 4 x num_heads 3"),
        ("qwen3_5", "vision_config", {"deepstack_visual_indexes": [1]}, r"_indexes must be \[\], .* got \[1\]"),
        ("qwen3_vl", "vision_config", {"deepstack_visual_indexes": [2, 0]}, "must be increasing layers of the 4"),
        ("qwen3_vl", "vision_config", {"deepstack_visual_indexes": [4]}, "must be increasing layers of the 4"),
        ("qwen3_vl", "vision_config", {"patch_size": [4, 4]}, r"patch_size must be a whole number .* got \[4, 4\]"),
        ("qwen3_vl", "vision_config", {"rope_parameters": {"rope_theta": 5.0, "factor": 2.0}}, "factor=2.0"),
        ("qwen3_vl", "vision_config", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "'axial'"),
        ("qwen3_vl", "text_config", {"rope_parameters": {"mrope_section": [2, 2]}}, "mrope_section"),
        ("qwen2_vl", "text_config", {"rope_parameters": {"mrope_section": [1, 1, 1]}}, "sum to half"),
        ("qwen2_vl", "text_config", {"rope_parameters": {"mrope_section": 4}}, "a list of whole numbers, got 4"),
    ],
)  # fmt: skip
def test_what_is_not_computed_is_refused_by_name(name, section, values, message, tmp_path):
    write_config(tmp_path, name, **{section: values})
    with pytest.raises(ValueError, match=message):
        read_native_config(tmp_path, "lm").with_images()


def test_keys_of_published_configs_that_nothing_reads_are_logged(tmp_path, caplog):
    write_config(tmp_path, "qwen2_vl", vision_config={"in_chans": 3, "spatial_patch_size": 14})
    assert read_native_config(tmp_path, "lm").with_images().arch.vision.kernel == (3, 2, 4, 4)
    assert "ignoring in_chans, spatial_patch_size, which neither" in caplog.text


def test_values_of_the_text_outside_text_config_are_not_read(tmp_path, caplog):
    """transformers 4.52 to 4.57 wrote them twice; transformers 5 reads only those in text_config."""
    from transformers import AutoConfig

    write_config(tmp_path, "qwen2_5_vl")
    arch = read_native_config(tmp_path, "lm").with_images().arch
    raw = json.loads((tmp_path / "config.json").read_text())
    copies = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
    (tmp_path / "config.json").write_text(json.dumps(raw | copies))
    assert read_native_config(tmp_path, "lm").with_images().arch == arch and "outside" not in caplog.text
    other = {"rms_norm_eps": 0.5, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    (tmp_path / "config.json").write_text(json.dumps(raw | copies | other))
    theirs = AutoConfig.from_pretrained(tmp_path).text_config
    assert theirs.rms_norm_eps == raw["text_config"]["rms_norm_eps"]
    assert theirs.rope_parameters["rope_type"] == "default"
    assert read_native_config(tmp_path, "lm").with_images().arch == arch
    assert "ignoring rms_norm_eps=0.5, rope_scaling={" in caplog.text and "outside text_config" in caplog.text
