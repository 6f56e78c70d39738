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
from trl_jax.models.model import merge

torch = pytest.importorskip("torch")
Image = pytest.importorskip("PIL.Image")


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
