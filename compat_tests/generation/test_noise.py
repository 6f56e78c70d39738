"""The random numbers used for sampling: torch's stream, and key-based ones per row and position."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trl_jax.core.torch_random import TorchGenerator
from trl_jax.generation import noise
from trl_jax.generation.noise import (
    KeyedNoise,
    PrefetchedWords,
    RowWords,
    TorchNoise,
    chunk_steps,
    exponential,
    random_key,
    sample,
)

ROWS, VOCABULARY = 4, 300


@jax.jit
def drawn(noise, scores, step):
    return sample(scores, noise.exponentials(step, scores.shape[-1]))


def scores_of(seed: int, shape=(ROWS, VOCABULARY)) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 3, shape).astype(np.float32)


def keyed(seed, rows, positions=None) -> KeyedNoise:
    positions = np.zeros(len(rows)) if positions is None else positions
    return KeyedNoise(random_key(TorchGenerator(seed)), jnp.asarray(rows, jnp.int32), jnp.asarray(positions, jnp.int32))


@pytest.mark.parametrize("seed", [0, 1, 42])
def test_exponentials_are_near_torchs(seed):
    generator = TorchGenerator(seed)
    state, exact = generator.state(), generator.exponential(1_000_000).astype(np.float64)
    generator.restore(state)
    words = generator.words(2_000_000).reshape(-1, 2)
    found = np.asarray(jax.jit(exponential)(words[:, 0], words[:, 1]), np.float64)
    assert np.abs(found / exact - 1).max() < 6e-7


def test_exponentials_at_the_ends_of_their_range():
    full = np.uint32(2**32 - 1)
    words = np.array([(0, 0), (0, 1), (0, full), (2**17 - 1, full), (2**17, 0), (full, full)], np.uint32)
    bits = [((int(high) << 32) | int(low)) & (2**53 - 1) for high, low in words]
    exact = -np.log1p(-np.array(bits, np.float64) * 2.0**-53)
    np.testing.assert_allclose(exponential(words[:, 0], words[:, 1]), exact, rtol=6e-7)


def test_tokens_of_many_steps_are_torchs():
    """Chunks of 3 steps, of which 8 are used; the generator's state then equals torch's."""
    torch = pytest.importorskip("torch")
    reference, generator = torch.Generator().manual_seed(5), TorchGenerator(5)
    words = PrefetchedWords(generator, rows=ROWS, vocabulary=VOCABULARY, steps=3, max_steps=8)
    chunks = [words.noise(np.arange(ROWS), np.full(ROWS, 3 * i)) for i in range(3)]
    for step in range(8):
        scores = scores_of(step)
        expected = torch.multinomial(torch.softmax(torch.from_numpy(scores), -1), 1, generator=reference)[:, 0]
        np.testing.assert_array_equal(drawn(chunks[step // 3], scores, step % 3), expected)
    words.close(8)
    assert generator.position == 8 * 2 * ROWS * VOCABULARY
    np.testing.assert_array_equal(generator.permutation(50), torch.randperm(50, generator=reference).numpy())


@pytest.mark.parametrize("steps", range(8))
def test_the_stream_goes_on_behind_the_steps_that_were_used(steps):
    generator, expected = TorchGenerator(9), TorchGenerator(9)
    words = PrefetchedWords(generator, rows=2, vocabulary=5, steps=3, max_steps=20)
    for _ in range(-(-steps // 3)):
        words.noise(np.arange(2), np.zeros(2))
    words.close(steps)
    expected.words(steps * 2 * 2 * 5)
    assert generator.position == expected.position
    np.testing.assert_array_equal(generator.words(7), expected.words(7))


def test_rows_that_have_ended_leave_the_others_their_numbers():
    def chunk(rows):
        words = PrefetchedWords(TorchGenerator(2), rows=ROWS, vocabulary=VOCABULARY, steps=2, max_steps=4)
        words.noise(np.arange(ROWS), np.zeros(ROWS))
        noise = words.noise(rows, np.full(len(rows), 2))
        words.close(4)
        return noise

    alive = np.array([0, 3])
    scores = scores_of(0)
    of_all = drawn(chunk(np.arange(ROWS)), scores, 1)
    np.testing.assert_array_equal(drawn(chunk(alive), scores[alive], 1), of_all[alive])


@pytest.mark.parametrize("block", [1, 3])
@pytest.mark.parametrize("used", [0, 5, 9])
def test_rows_that_start_later_read_the_same_words(block, used, monkeypatch):
    """Rows at different steps, some inactive; the generator ends in the same state as with all rows in step."""
    generator, expected = TorchGenerator(4), TorchGenerator(4)
    all_words = TorchGenerator(4).words(9 * 7 * 5 * 2).reshape(9, 7, 5, 2)
    states = 7 * 9 * noise._STATE_BYTES
    monkeypatch.setattr(noise, "_MOST_STATES_BYTES", states // block)
    words = RowWords(generator, rows=7, vocabulary=5, steps=3, max_steps=9)
    read = [((0, 1, 2), (0, 0, 0)), ((0, -1, 2), (3, 3, 3)), ((5, 4, 0), (0, 0, 6)), ((6, 5, 4), (8, 3, 3))]
    for rows, drawn in read[: max(1, used)]:
        chunk = words.noise(np.array(rows), np.array(drawn)).words
        for place, (row, first) in enumerate(zip(rows, drawn, strict=True)):
            wanted = np.zeros((3, 5, 2), np.uint32) if row < 0 else all_words[first : first + 3, row]
            np.testing.assert_array_equal(chunk[: len(wanted), place], wanted)
            assert not chunk[len(wanted) :, place].any()
        np.testing.assert_array_equal(words.first(np.array([3, 6])).words, all_words[:1, [3, 6]])
    words.close(used)
    expected.words(used * 7 * 5 * 2)
    assert generator.position == expected.position
    np.testing.assert_array_equal(generator.words(7), expected.words(7))


def test_a_row_draws_the_same_whatever_is_beside_it():
    scores = np.broadcast_to(scores_of(0, (1, VOCABULARY)), (6, VOCABULARY)) / 3
    together = [drawn(keyed(1, range(6)), scores, step) for step in range(40)]
    alone = [drawn(keyed(1, [4]), scores[:1], step)[0] for step in range(40)]
    refilled = [drawn(keyed(1, [9, 4], [30, step]), scores[:2], 0)[1] for step in range(40)]
    assert [tokens[4] for tokens in together] == alone == refilled
    assert len({tuple(np.asarray(tokens).tolist()) for tokens in together}) == 40
    assert drawn(keyed(2, range(6)), scores, 0).tolist() != together[0].tolist()


def test_keyed_tokens_are_distributed_as_the_probabilities():
    scores = jnp.broadcast_to(jnp.log(jnp.array([0.5, 0.3, 0.15, 0.0499, 0.0001])), (1000, 5))
    draw = jax.jit(jax.vmap(lambda step: drawn(keyed(0, range(1000)), scores, step)))
    counts = np.bincount(np.asarray(draw(jnp.arange(300))).reshape(-1), minlength=5)
    expected = 300_000 * np.array([0.5, 0.3, 0.15, 0.0499, 0.0001])
    assert ((counts - expected) ** 2 / expected).sum() < 18.5  # chi-square, 4 degrees of freedom, 0.1 %


def test_a_key_goes_on_with_the_stream():
    generator = TorchGenerator(3)
    first, second = (jax.random.key_data(random_key(generator)).tolist() for _ in range(2))
    assert first != second and generator.position == 4
    assert first == jax.random.key_data(random_key(TorchGenerator(3))).tolist()


def test_removed_ids_are_not_drawn_and_of_equals_the_first_is():
    noise = TorchNoise(TorchGenerator(0).words(2 * VOCABULARY).reshape(1, 1, VOCABULARY, 2))
    scores = np.full((1, VOCABULARY), -np.inf, np.float32)
    scores[0, [17, 200]] = 1.5
    assert drawn(noise, scores, 0)[0] in (17, 200)
    assert sample(jnp.zeros((1, 9)), jnp.full((1, 9), 0.25)).tolist() == [0]


@pytest.mark.parametrize("broken", [[np.nan, 1, 2], [np.inf, 1, 2], [-np.inf, -np.inf, -np.inf]])
def test_scores_that_torch_refuses_give_no_token(broken):
    scores = jnp.array([[1.0, 2.0, 3.0], broken], jnp.float32)
    found = sample(scores, jnp.ones((2, 3)))
    assert found[0] == 2 and found[1] == -1


def test_a_chunk_of_words_has_a_bound():
    assert chunk_steps(64, 49_152, 16) == 5 and chunk_steps(512, 151_936, 16) == 1 and chunk_steps(1, 100, 16) == 16
