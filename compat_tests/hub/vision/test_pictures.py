"""Pictures that go through transformers' image processors give transformers' logits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compat_tests.hub.vision.models import CASES, IMAGE
from compat_tests.hub.vision.test_families import built
from trl_jax.data.images import feature_index, join_images
from trl_jax.models.model import merge

torch = pytest.importorskip("torch")
Image = pytest.importorskip("PIL.Image")

SQUARE = {"size": {"height": 28, "width": 28}}
CROPPED = {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}
SPLIT = {"size": {"longest_edge": 84}, "max_image_size": {"longest_edge": 28}}
# The case, the processor's class, its arguments, and the sizes of the pictures.
PROCESSORS = {
    "clip": ("llava", "CLIPImageProcessorPil", CROPPED, [(50, 31)]),
    "gemma3": ("gemma3", "Gemma3ImageProcessorPil", {"size": {"height": 42, "width": 42}}, [(50, 31), (42, 42)]),
    "gemma3 with crops": (
        "gemma3", "Gemma3ImageProcessorPil",
        {"size": {"height": 42, "width": 42}, "do_pan_and_scan": True, "pan_and_scan_min_crop_size": 8,
         "pan_and_scan_max_num_crops": 3, "pan_and_scan_min_ratio_to_activate": 1.2}, [(90, 31)],
    ),
    "gemma4": (
        "gemma4", "Gemma4ImageProcessorPil", {"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 70},
        [(50, 31), (20, 60)],
    ),
    "idefics3": ("idefics3", "Idefics3ImageProcessorPil", SPLIT, [(50, 31), (28, 90)]),
    "idefics3 without tiles": (
        "idefics3", "Idefics3ImageProcessorPil", SPLIT | {"do_image_splitting": False}, [(50, 31), (28, 90)],
    ),
    "internvl": (
        "internvl", "GotOcr2ImageProcessorPil", SQUARE | {"crop_to_patches": True, "max_patches": 4},
        [(90, 31), (30, 30)],
    ),
    "llava_next": (
        "llava_next", "LlavaNextImageProcessorPil",
        CROPPED | {"image_grid_pinpoints": [[28, 56], [56, 28], [56, 56]]}, [(90, 20), (31, 60)],
    ),
    "mistral3": (
        "mistral3", "PixtralImageProcessorPil", {"patch_size": 8, "size": {"longest_edge": 40}}, [(50, 31), (20, 33)],
    ),
    "smolvlm": (
        "smolvlm", "SmolVLMImageProcessorPil",
        {"size": {"longest_edge": 92}, "max_image_size": {"longest_edge": 46}}, [(90, 31), (50, 50)],
    ),
    "siglip": ("llava with siglip", "SiglipImageProcessorPil", SQUARE, [(50, 31)]),
}  # fmt: skip


@pytest.mark.parametrize("name", PROCESSORS)
def test_logits_of_pictures_are_those_of_transformers(name, tmp_path):
    import transformers

    key, class_name, options, sizes = PROCESSORS[name]
    case = CASES[key]
    processor = getattr(transformers, class_name)(**options)
    dice = np.random.default_rng(0)
    pictures = [Image.fromarray(dice.integers(0, 256, (*size[::-1], 3), np.uint8)) for size in sizes]
    processed = dict(processor(images=pictures, return_tensors="np"))
    _, theirs, _, native, params, backend = built(case, tmp_path)
    images = native.vision.patches(processed, theirs.config)
    ids = np.concatenate([[7, *[IMAGE] * len(image.tokens), 8] for image in images])
    given = {one: torch.tensor(processed[one]) for one in native.vision.pixels}
    given |= {one: torch.tensor(array) for one, array in (case.options(ids[None]) if case.options else {}).items()}
    with torch.no_grad():
        wanted = theirs(input_ids=torch.tensor(ids[None]), **given).logits[0].numpy()
    joined = join_images([images], feature_index(ids, IMAGE, images)[None])
    places = np.arange(len(ids))
    model = merge(backend.graph, params)
    found = model(jnp.asarray(ids[None]), places[None], places, images=jax.tree.map(jnp.asarray, joined))
    np.testing.assert_allclose(found, wanted, atol=1e-5)
