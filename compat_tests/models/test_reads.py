"""Hidden states and scores at the requested reads: any number per row, in padded and packed rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compat_tests.models import encoders
from compat_tests.tiny import tiny_model
from trl_jax.core.outputs import Packed
from trl_jax.hub.auto import AutoModelForSequenceClassification
from trl_jax.models.model import merge

LENGTHS, ROW = (5, 9, 3, 7), 64


def texts():
    return [np.random.default_rng(number).integers(1, 500, length) for number, length in enumerate(LENGTHS)]


def padded():
    tokens = np.zeros((len(LENGTHS), ROW), np.int32)
    for row, ids in zip(tokens, texts(), strict=True):
        row[: len(ids)] = ids
    positions = np.broadcast_to(np.arange(ROW, dtype=np.int32), tokens.shape)
    return {"tokens": jnp.asarray(tokens), "positions": positions, "valid": jnp.asarray(tokens != 0)}


def packed():
    """The texts packed into two rows, two each, and the flat index at which each starts."""
    tokens, positions = np.zeros((2, ROW), np.int32), np.zeros((2, ROW), np.int32)
    first, end = np.full((2, ROW), ROW, np.int32), np.full((2, ROW), ROW, np.int32)
    starts = []
    for number, ids in enumerate(texts()):
        row, start = divmod(number, 2)[0], 0 if number % 2 == 0 else LENGTHS[number - 1]
        span, count = slice(start, start + len(ids)), np.arange(len(ids))
        tokens[row, span], positions[row, span] = ids, count
        first[row, span], end[row, span] = start, start + count + 1
        starts.append(row * ROW + start)
    given = {"tokens": jnp.asarray(tokens), "positions": jnp.asarray(positions)}
    return given | {"packed": Packed(first, end, np.full_like(first, max(LENGTHS)))}, np.asarray(starts)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    model = AutoModelForSequenceClassification.from_pretrained(tiny_model(tmp_path_factory.mktemp("model") / "llama"))
    return merge(model.graph, model.params)


def test_a_decoder_gives_the_places_that_are_read_whatever_the_layout(decoder):
    """Several reads per text, unordered and repeated: the same from padded rows, from packed rows and from all hidden
    states."""
    of_text = [(4, 0), (8, 8, 2), (), (6, 1, 0)]
    reads = np.concatenate([row * ROW + np.asarray(at, int) for row, at in enumerate(of_text)])
    given, starts = packed()
    along = np.concatenate([start + np.asarray(at, int) for start, at in zip(starts, of_text, strict=True)])

    @jax.jit
    def run(reads, rows):
        return decoder.decoder(reads=reads, **rows), None if reads is None else decoder(reads=reads, **rows)

    everything, at_reads = (np.asarray(run(places, padded())[0]) for places in (None, reads))
    of_packed, scores = map(np.asarray, run(along, given))
    assert everything.shape == (len(LENGTHS) * ROW, decoder.decoder.arch.hidden_size)
    np.testing.assert_allclose(at_reads, everything[reads], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(of_packed, at_reads, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(scores, of_packed @ np.asarray(decoder.score.weight[...])[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_an_encoder_scores_the_text_that_a_place_belongs_to(family, tmp_path):
    """bert reads a text's first token, modernbert its mean."""
    model = AutoModelForSequenceClassification.from_pretrained(encoders.build(tmp_path, family, "plain"))
    scorer, order, within = merge(model.graph, model.params), np.asarray([3, 1, 1, 0]), np.asarray([6, 0, 8, 2])
    given, starts = packed()
    run = jax.jit(lambda reads, rows: scorer(reads=reads, **rows))
    wanted = np.asarray(run(np.arange(len(LENGTHS)) * ROW, padded()))
    of_rows = np.asarray(run(order * ROW + within, padded()))
    of_packed = np.asarray(run(starts[order] + within, given))
    assert np.ptp(wanted) > 1e-3 * np.abs(wanted).max()
    np.testing.assert_allclose(of_rows, wanted[order], rtol=1e-5)
    np.testing.assert_allclose(of_packed, wanted[order], rtol=1e-4, atol=1e-5)
