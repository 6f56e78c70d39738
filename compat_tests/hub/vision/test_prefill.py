"""Prefilling prompts with images into a cache gives the logits of a full forward pass."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compat_tests.effort import only_thorough
from compat_tests.hub.vision.models import CASES
from compat_tests.hub.vision.test_families import built, padded, texts
from trl_jax.core.outputs import reads_of_rows
from trl_jax.models.arch import cache_parts
from trl_jax.models.cached_decoder import with_keys
from trl_jax.models.model import merge
from trl_jax.nn.cache import Cache, CacheFill, CacheSize

pytest.importorskip("torch")
NEW = 4


@only_thorough
@pytest.mark.parametrize("name", ["gemma3", "gemma4", "gemma4 with embeddings of layers"])
def test_a_prompt_with_images_and_a_cache_give_the_logits_of_whole_texts(name, tmp_path):
    case, theirs, _, native, params, backend = built(CASES[name], tmp_path)
    rows = texts(case)[1:]
    tokens, positions, _, images = padded(native, case, theirs, rows)
    more = np.random.default_rng(1).integers(7, 60, (len(rows), NEW)).astype(np.int32)
    lengths = np.array([len(ids) for ids, _ in rows], np.int32)
    whole = np.pad(tokens, ((0, 0), (0, NEW)))
    for row, length in enumerate(lengths):
        whole[row, length : length + NEW] = more[row]
    model = merge(backend.graph, params)
    features = model.features(jax.tree.map(jnp.asarray, images))
    at = jnp.pad(features.at, ((0, 0), (0, NEW)), constant_values=-1)
    places = np.broadcast_to(np.arange(whole.shape[1]), whole.shape)
    reads = np.arange(whole.size)
    wanted = model(whole, places, reads, images=features._replace(at=at)).reshape(*whole.shape, -1)

    hidden, new = with_keys(
        model.decoder, tokens, positions, reads_of_rows(lengths - 1, tokens.shape[1]), lengths.max(), features=features
    )
    sizes = [CacheSize(1, 16, part.window) for part in cache_parts(model.decoder.arch)]
    parts = [
        tuple(entry.cache(jnp.asarray(lengths), size) for entry in entries)
        for entries, size in zip(new, sizes, strict=True)
    ]
    cache = Cache(parts, CacheFill(jnp.asarray(lengths), jnp.zeros_like(lengths), jnp.int32(0)))
    for number in range(NEW + 1):
        place = lengths - 1 + number
        found = model.outputs(hidden, None, jnp.float32, None, 1.0)
        np.testing.assert_allclose(found, wanted[np.arange(len(rows)), place], atol=1e-5)
        if number < NEW:
            ids = more[:, number, None]
            hidden, new = with_keys(model.decoder, ids, place[:, None] + 1, None, place.max() + 2, cache=cache)
            cache = cache.appended(new, after=jnp.asarray(ids[:, 0]))


def test_what_image_features_add_after_layers_is_in_the_cache(tmp_path):
    case, theirs, _, native, params, backend = built(CASES["llava"], tmp_path)
    rows = texts(case)[1:]
    tokens, positions, _, images = padded(native, case, theirs, rows)
    reads = reads_of_rows(np.array([len(ids) - 1 for ids, _ in rows]), tokens.shape[1])
    model = merge(backend.graph, params)
    features = model.features(jax.tree.map(jnp.asarray, images))
    deep = features._replace(deep=jnp.stack([features.values, -0.5 * features.values]))
    wanted = model.decoder(tokens, positions, reads, features=deep)
    found, _ = with_keys(model.decoder, tokens, positions, reads, tokens.shape[1], features=deep)
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    assert np.abs(wanted - model.decoder(tokens, positions, reads, features=features)).max() > 0.01
