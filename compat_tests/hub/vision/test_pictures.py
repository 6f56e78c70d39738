"""Images preprocessed by transformers' image processors give transformers' logits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compat_tests.effort import usual
from compat_tests.hub.vision.models import CASES, IMAGE
from compat_tests.hub.vision.processors import PROCESSORS
from compat_tests.hub.vision.test_families import built
from trl_jax.data.images import feature_index, join_images
from trl_jax.hub.vision.processor import open_picture
from trl_jax.models.model import merge

torch = pytest.importorskip("torch")
Image = pytest.importorskip("PIL.Image")


@pytest.mark.parametrize("kind", ["path", "string", "bytes", "undecoded"])
def test_files_are_read_as_by_transformers_and_datasets(kind, tmp_path):
    """Upright, as cameras note in the file; strings give RGB."""
    from datasets import Image as Feature
    from transformers.image_utils import load_image

    pixels = np.random.default_rng(0).integers(0, 256, (4, 6, 4), np.uint8)
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    Image.fromarray(pixels).save(tmp_path / "a.png", exif=exif)
    data = {"bytes": (tmp_path / "a.png").read_bytes(), "path": None}
    given = {"path": tmp_path / "a.png", "string": str(tmp_path / "a.png"), "bytes": data["bytes"], "undecoded": data}
    wanted = load_image(given["string"]) if kind == "string" else Feature().decode_example(data)
    found = open_picture(given[kind])
    assert found.size == (4, 6) and found.mode == wanted.mode == ("RGB" if kind == "string" else "RGBA")
    np.testing.assert_array_equal(np.asarray(found), np.asarray(wanted))


@usual("gemma3", "gemma4", "llava_next")
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


ARRAYS = {
    "rows, columns, channels": lambda pixels: pixels,
    "channels first": lambda pixels: pixels.transpose(2, 0, 1),
    "three rows": lambda pixels: pixels[:3],  # read as channels
    "one channel": lambda pixels: pixels[..., :1],
    "floats": lambda pixels: (pixels / 255).astype(np.float32),
    "floats to 255": lambda pixels: pixels.astype(np.float32),
    "integers": lambda pixels: pixels.astype(np.int64),
    "tensor": lambda pixels: torch.tensor(pixels.transpose(2, 0, 1).copy()),
}


@pytest.mark.parametrize("kind", ARRAYS)
def test_arrays_of_pixels_are_read_as_by_transformers(kind):
    """Also in the nested lists in which a table holds them."""
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    image_processor = CLIPImageProcessorPil(**PROCESSORS["clip"][2])
    array = ARRAYS[kind](np.random.default_rng(0).integers(0, 256, (30, 34, 3), np.uint8))

    def seen(pictures):
        return image_processor(images=pictures, return_tensors="np")["pixel_values"]

    wanted = seen([array])
    nested = np.asarray(array).tolist()
    np.testing.assert_array_equal(seen([open_picture(array, keep_arrays=True)]), wanted)
    np.testing.assert_allclose(seen([open_picture(nested, keep_arrays=True)]), wanted, atol=1e-6)
    if kind != "floats":  # transformers divides them by 255 again
        np.testing.assert_array_equal(seen([open_picture(array)]), wanted)
