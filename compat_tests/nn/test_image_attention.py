"""Attention in which an image's tokens attend to each other in both directions, against full masks per text."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compat_tests.effort import usual
from compat_tests.nn.test_branch_attention import laid_out
from compat_tests.nn.test_packed_attention import as_rows, drawn
from trl_jax.core.outputs import BLOCK
from trl_jax.nn.attention import packed as packed_attention
from trl_jax.nn.attention import splash
from trl_jax.nn.attention.attention import attend
from trl_jax.nn.attention.inputs import AttentionInputs
from trl_jax.nn.text_order import tokens_ahead

LENGTH, SCALE = 5 * BLOCK, 0.3
IMAGE, APART = 11, 7  # tokens of an image, and of text before it


def texts_of(layout):
    """(what tokens see, the positions of each text with its row, each token's image number or -1).

    There are images in shared prefixes and in texts' own parts, also at their ends.
    """
    if layout == "branches":
        packed, texts = laid_out()
        begins = packed.first
        place = np.arange(LENGTH)[None]
    else:
        packed, positions, who = drawn(3, LENGTH, rows=2)
        view = as_rows(positions, who, LENGTH)
        packed = packed._replace(texts=view)
        texts = [(row, at[at < LENGTH]) for row in range(2) for at in view.places[row] if (at < LENGTH).any()]
        begins, place = np.zeros_like(positions), positions.copy()
        for row in range(2):
            for pair in range(who[row, :, 0].max() + 1):
                for part in range(3):
                    own = (who[row] == (pair, part)).all(axis=-1)
                    begins[row, own] = positions[row, own].min(initial=LENGTH)
    number, within = np.divmod(place - begins, IMAGE + APART)
    inside = np.zeros((2, LENGTH), bool)
    for row, at in texts:
        inside[row, at] = True
    return packed, texts, np.where(inside & (within >= APART), number, -1)


def whole_texts(q, k, v, texts, images, window):
    """Each text alone with a full mask; a new image starts where the image number changes."""
    longest, group = max(len(at) for _, at in texts), q.shape[2] // k.shape[2]
    apart = np.arange(longest)[:, None] - np.arange(longest)
    rows, places, seen = np.array([row for row, _ in texts])[:, None], [], []
    for row, at in texts:
        places.append(np.pad(at, (0, longest - len(at)), constant_values=LENGTH))
        number = np.pad(images[row, at], (0, longest - len(at)), constant_values=-1)
        ids = np.cumsum(np.diff(number, prepend=-2) != 0)  # ids of images, and of text between them
        both = (ids[:, None] == ids) & (number >= 0)
        seen.append(((apart >= 0) | both) & (apart < (window or longest)))
    places = np.stack(places)
    q, k, v = (x.at[rows, places].get(mode="fill", fill_value=0) for x in map(jnp.asarray, (q, k, v)))
    k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
    scores = jnp.where(np.stack(seen)[:, None], jnp.einsum("xthc,xshc->xhts", q, k) * SCALE, -jnp.inf)
    found = jnp.einsum("xhts,xshc->xthc", jax.nn.softmax(scores, axis=-1), v)
    return jnp.zeros((2, LENGTH, *q.shape[2:])).at[rows, places].set(found, mode="drop")


def with_gradients(run, qkv, weight):
    def loss(*qkv):
        out = run(*qkv)
        return jnp.sum(out * weight), out

    gradients, out = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(*qkv)
    return out, *gradients


@functools.cache
def exactly(layout, window):
    """Arrays for a layout, and the outputs and gradients for its texts."""
    _, texts, images = texts_of(layout)
    dice = np.random.default_rng(0)
    *qkv, weight = (dice.standard_normal((2, LENGTH, heads, 8)).astype(np.float32) for heads in (4, 2, 2, 4))
    return qkv, weight, with_gradients(lambda *qkv: whole_texts(*qkv, texts, images, window), qkv, weight)


@usual(
    "pairs-None-rows",
    "pairs-None-splash",
    "pairs-5-blocks",
    "pairs-5-rows",
    "branches-None-blocks",
    "branches-None-rows",
    "branches-5-rows",
    "branches-5-splash",
)
@pytest.mark.parametrize("kernel", ["blocks", "rows", "splash"])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("layout", ["pairs", "branches"])
def test_packed_texts_are_whole_texts(layout, window, kernel, monkeypatch):
    packed, _, images = texts_of(layout)
    packed = jax.tree.map(jnp.asarray, packed)
    qkv, weight, wanted = exactly(layout, window)
    if kernel == "splash":
        monkeypatch.setattr("trl_jax.nn.attention.attention.platform", lambda: "tpu")
        monkeypatch.setattr(packed_attention, "platform", lambda: "tpu")
        monkeypatch.setattr(splash, "BLOCK", 128)
        monkeypatch.setattr(packed_attention, "attend_blocks", None)
    ahead = tokens_ahead(jnp.asarray(images >= 0), packed)
    packed = packed._replace(texts=None) if kernel == "blocks" else packed
    inputs = AttentionInputs(SCALE, window=window and jnp.int32(window), packed=packed, ahead=ahead)
    found = with_gradients(lambda *qkv: attend(*qkv, inputs), qkv, weight)
    for ours, exact in zip(found, wanted, strict=True):
        np.testing.assert_allclose(ours, exact, atol=1e-5)


@pytest.mark.parametrize("in_blocks", [False, True])
@pytest.mark.parametrize("window", [None, 5])
def test_padded_texts_are_whole_texts(window, in_blocks, monkeypatch):
    monkeypatch.setattr("trl_jax.nn.attention.attention._runs_in_blocks", lambda q, inputs: in_blocks)
    monkeypatch.setattr("trl_jax.nn.attention.attention.QUERY_BLOCK", 128)
    place, lengths = np.arange(LENGTH), np.array([90, 281])
    inside = place < lengths[:, None]
    images = np.where(inside & (place % 18 >= APART), place // 18, -1)
    dice = np.random.default_rng(1)
    *qkv, weight = (dice.standard_normal((2, LENGTH, heads, 8)).astype(np.float32) for heads in (4, 2, 2, 4))
    weight *= inside[..., None, None]
    ahead = tokens_ahead(jnp.asarray(images >= 0), None)
    inputs = AttentionInputs(SCALE, window=window and jnp.int32(window), ahead=ahead)
    texts = [(row, np.arange(lengths[row])) for row in range(2)]
    found = with_gradients(lambda *qkv: attend(*qkv, inputs), qkv, weight)
    wanted = with_gradients(lambda *qkv: whole_texts(*qkv, texts, images, window), qkv, weight)
    for ours, exact in zip(found, wanted, strict=True):
        np.testing.assert_allclose(ours[inside], exact[inside], atol=1e-5)
