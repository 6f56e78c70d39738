"""Every processor against transformers', on scores with ties and -inf and on ragged rows with padding."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compat_tests.effort import usual
from trl_jax.generation import sampling
from trl_jax.generation.sampling import History, among_largest, leading_mask, until_mask

torch = pytest.importorskip("torch")
theirs = pytest.importorskip("transformers.generation.logits_process")

ROWS, PROMPT, VOCABULARY = 6, 9, 400
LENGTHS = (1, PROMPT, PROMPT + 1, PROMPT + 3, 15, 41)
PADS = np.array([0, 3, 8, 0, 1, 5])
EOS = [7, 11]
BAN = {(5,): float("-inf"), (3, 4): float("-inf"), (1, 2, 6): float("-inf"), (9, 9): float("-inf")}
BIAS = {(5,): 1.5, (8,): -2.0, (3, 4): 0.25, (2, 4): 4.0, (1, 2, 6): -1.25, tuple(range(40)): 9.0}


def scores_of(seed: int) -> np.ndarray:
    """Coarse numbers, so that there are many ties, and some -inf; row 3 has one almost certain id, row 5 only ties."""
    random = np.random.default_rng(seed)
    scores = np.round(random.normal(0, 2, (ROWS, VOCABULARY)) * 4).astype(np.float32) / 4
    scores[:4][random.random((4, VOCABULARY)) < 0.2] = -np.inf
    scores[4] = random.normal(0, 2, VOCABULARY)
    scores[3, 17] = 30
    scores[5] = np.where(np.arange(VOCABULARY) % 3, 1.25, -np.inf)
    return scores


def ids_of(seed: int, length: int) -> np.ndarray:
    """Few distinct ids, so that n-grams repeat; padding is 0."""
    ids = np.random.default_rng(seed + 100).integers(0, 12, (ROWS, length))
    ids[np.arange(length) < PADS[:, None]] = 0
    return ids


def history_of(ids: np.ndarray, width: int = 64) -> History:
    """The rest of the buffer has values that must not be read."""
    buffer = np.full((ROWS, width), 3)
    buffer[:, : ids.shape[1]] = ids
    return History(*map(jnp.asarray, (buffer.astype(np.int32), ids.shape[1], PROMPT, PADS)))


processed = jax.jit(sampling.process)


def pairs(prompt: np.ndarray | None = None) -> dict:
    """Name -> (our processor, transformers'); `prompt` is int64 `[ROWS, PROMPT]`."""
    prompt = ids_of(0, PROMPT) if prompt is None else prompt
    eos, numbers = jnp.array(EOS), jnp.float32
    decay = np.log(1.07)
    return {
        "sequence_bias": (sampling.SequenceBias.of(BIAS), theirs.SequenceBiasLogitsProcessor(BIAS)),
        "bias_of_single_ids": (
            sampling.SequenceBias.of({(5,): -1.0}),
            theirs.SequenceBiasLogitsProcessor({(5,): -1.0}),
        ),
        "bad_words_ids": (
            sampling.SequenceBias.of(BAN),
            theirs.NoBadWordsLogitsProcessor([list(ids) for ids in BAN] + [[7]], EOS),
        ),
        "repetition_penalty": (
            sampling.RepetitionPenalty(numbers(1.3)),
            theirs.RepetitionPenaltyLogitsProcessor(1.3, torch.tensor(PADS)),
        ),
        **{
            f"no_repeat_ngram_size_{n}": (sampling.NoRepeatNGram(n), theirs.NoRepeatNGramLogitsProcessor(n))
            for n in (1, 2, 3, 12)
        },
        "encoder_repetition_penalty": (
            sampling.PromptRepetitionPenalty(numbers(1 / 1.3)),
            theirs.EncoderRepetitionPenaltyLogitsProcessor(1.3, torch.from_numpy(prompt)),
        ),
        "encoder_no_repeat_ngram_size": (
            sampling.NoRepeatNGram(2, of_prompt=True),
            theirs.EncoderNoRepeatNGramLogitsProcessor(2, torch.from_numpy(prompt)),
        ),
        "min_length": (sampling.MinLength(14, eos), theirs.MinLengthLogitsProcessor(14, EOS)),
        "min_new_tokens": (
            sampling.MinNewTokens(3, eos),
            theirs.MinNewTokensLengthLogitsProcessor(PROMPT, 3, EOS),
        ),
        "forced_bos": (sampling.ForcedTokens(1, jnp.array([4])), theirs.ForcedBOSTokenLogitsProcessor(4)),
        "forced_eos": (sampling.ForcedTokens(16 - 1, eos), theirs.ForcedEOSTokenLogitsProcessor(16, EOS)),
        "remove_invalid_values": (sampling.RemoveInvalidValues(), theirs.InfNanRemoveLogitsProcessor()),
        "exponential_decay": (
            sampling.ExponentialDecay(2, numbers(decay), eos),
            theirs.ExponentialDecayLengthPenalty((2, 1.07), EOS, PROMPT),
        ),
        "suppress_tokens": (
            sampling.SuppressTokens(jnp.array([1, 399, 400])),
            theirs.SuppressTokensLogitsProcessor([1, 399, 400]),
        ),
        "begin_suppress_tokens": (
            sampling.SuppressTokensAtBegin(jnp.array([2, 17]), True),
            theirs.SuppressTokensAtBeginLogitsProcessor([2, 17], PROMPT),
        ),
        "temperature": (sampling.Temperature(numbers(0.7)), theirs.TemperatureLogitsWarper(0.7)),
        **{f"top_k_{k}": (sampling.TopK(k), theirs.TopKLogitsWarper(k)) for k in (1, 2, 20, 399, 400, 5000)},
        **{
            f"top_p_{p}": (sampling.TopP(numbers(1 - p)), theirs.TopPLogitsWarper(p))
            for p in (0.0, 0.1, 0.5, 0.9, 0.99)
        },
        **{f"min_p_{p}": (sampling.MinP(numbers(p)), theirs.MinPLogitsWarper(p)) for p in (0.0, 0.04, 0.3, 1.0)},
        **{f"typical_p_{p}": (sampling.TypicalP(numbers(p)), theirs.TypicalLogitsWarper(p)) for p in (0.1, 0.5, 0.93)},
        **{
            f"epsilon_{e}": (sampling.EpsilonCutoff(numbers(e)), theirs.EpsilonLogitsWarper(e))
            for e in (3e-4, 0.004, 0.5)
        },
        **{f"eta_{e}": (sampling.EtaCutoff(numbers(e)), theirs.EtaLogitsWarper(e)) for e in (3e-4, 0.02, 0.5)},
        "renormalize_logits": (sampling.Renormalize(), theirs.LogitNormalization()),
    }


def assert_equal(found, expected: np.ndarray):
    """The same ids are kept, and their scores are equal up to two roundings."""
    found = np.asarray(found)
    np.testing.assert_array_equal(np.isneginf(found), np.isneginf(expected))
    np.testing.assert_allclose(found, expected, rtol=3e-7, atol=1e-6)


@pytest.fixture(autouse=True)
def stable_sort(monkeypatch):
    """Order ties by id: in transformers, the platform's sort decides which of them top_p removes."""
    monkeypatch.setattr(torch, "sort", functools.partial(torch.sort, stable=True))


def both(names: list[str], length: int, seed: int) -> tuple[jax.Array, np.ndarray]:
    """The scores after these processors: ours, and transformers'."""
    scores, ids = scores_of(seed), ids_of(seed, length)
    mine, others = zip(*(pairs(ids[:, :PROMPT])[name] for name in names), strict=True)
    expected = torch.from_numpy(scores)
    for processor in others:
        expected = processor(torch.from_numpy(ids), expected)
    return processed(mine, history_of(ids), scores), expected.numpy()


@pytest.mark.parametrize("name", list(pairs()))
def test_one(name):
    changed = False
    for length in LENGTHS[name.startswith("encoder") :]:  # these need the original prompt
        for seed in range(3):
            found, expected = both([name], length, seed)
            assert_equal(found, expected)
            changed |= (expected != scores_of(seed)).any()
    assert changed or name in ("top_k_400", "top_k_5000", "min_p_0.0", "no_repeat_ngram_size_12")


SEVERAL = {
    "usual": ["temperature", "top_k_20", "top_p_0.9"],
    "penalties": ["sequence_bias", "repetition_penalty", "no_repeat_ngram_size_3", "bad_words_ids", "min_length"],
    "lengths": ["min_new_tokens", "forced_bos", "forced_eos", "exponential_decay", "begin_suppress_tokens"],
    "cutoffs": ["temperature", "min_p_0.04", "typical_p_0.93", "epsilon_0.004", "eta_0.02", "renormalize_logits"],
    "invalid": ["bad_words_ids", "remove_invalid_values", "temperature", "top_k_399", "top_p_0.99"],
    "all": [
        "sequence_bias", "repetition_penalty", "no_repeat_ngram_size_2", "bad_words_ids", "min_length",
        "min_new_tokens", "forced_bos", "forced_eos", "exponential_decay", "suppress_tokens",
        "begin_suppress_tokens", "temperature", "top_k_20", "top_p_0.9", "min_p_0.04", "typical_p_0.93",
        "epsilon_0.0003", "eta_0.0003", "renormalize_logits",
    ],
}  # fmt: skip


@usual("usual")
@pytest.mark.parametrize("names", SEVERAL.values(), ids=SEVERAL)
def test_several(names):
    for length in LENGTHS:
        for seed in range(3):
            assert_equal(*both(names, length, seed))


def test_top_h():
    """The order of ties in transformers' topk is undefined, so there are none except -inf."""
    for seed, top_h in enumerate((0.05, 0.3, 0.7, 0.95)):
        scores = np.random.default_rng(seed).normal(0, 2, (ROWS, VOCABULARY)).astype(np.float32)
        scores[1, 60:] = -np.inf
        scores[2, 3] = 40
        expected = theirs.TopHLogitsWarper(top_h)(None, torch.from_numpy(scores)).numpy()
        assert_equal(processed((sampling.TopH(jnp.float32(top_h)),), None, scores), expected)


def test_numbers_ids_and_lengths_compile_nothing_anew():
    count = processed._cache_size()
    for length, (temperature, top_k, top_p, penalty) in zip(
        range(3, 40, 9),
        [(0.5, 3, 0.1, 1.1), (1.5, 20, 0.9, 0.9), (2.5, 300, 0.5, 2.0), (9.0, 1, 0.0, 1.0)],
        strict=False,
    ):
        numbers = map(jnp.float32, (penalty, temperature, 1 - top_p))
        penalty, temperature, tail = numbers
        chain = (
            sampling.RepetitionPenalty(penalty),
            sampling.MinLength(jnp.int32(length), jnp.array([length])),
            sampling.Temperature(temperature),
            sampling.TopK(jnp.int32(top_k)),
            sampling.TopP(tail),
        )
        processed(chain, history_of(ids_of(0, length)), scores_of(0))
    assert processed._cache_size() == count + 1


def test_rows_of_different_lengths_are_each_as_alone():
    """With refilled slots, each row has its own prompt length and number of new tokens."""
    names = ["sequence_bias", "repetition_penalty", "no_repeat_ngram_size_2", "min_length", "min_new_tokens"]
    names += ["exponential_decay", "begin_suppress_tokens"]
    chain = tuple(pairs()[name][0] for name in names)
    lengths, prompts = np.array([1, 5, 9, 20, 40, 64]), np.array([1, 3, 9, 18, 11, 63])
    ids, scores = ids_of(0, 64), scores_of(0)
    history = History(*map(jnp.asarray, (ids, lengths, prompts, np.zeros(ROWS, np.int32))))
    together = np.asarray(processed(chain, history, scores))
    for row in range(ROWS):
        one = History(*map(jnp.asarray, (ids[row : row + 1], lengths[row], prompts[row], np.zeros(1, np.int32))))
        np.testing.assert_array_equal(processed(chain, one, scores[row : row + 1])[0], together[row])


@pytest.mark.parametrize("k", [1, 7, 399, 400, 401])
def test_the_largest_of_a_row(k):
    for seed in range(5):
        scores = scores_of(seed)
        scores[0, :9] = [-0.0, 0.0, np.inf, 1e-45, -1e-45, 3.4e38, -3.4e38, 2.0, -2.0]
        least = np.sort(scores, axis=1)[:, -min(k, VOCABULARY)]
        np.testing.assert_array_equal(jax.jit(among_largest)(scores, k), scores >= least[:, None])


LARGE = 20_011  # so large that only those blocks of ids are examined that matter


def large_scores(seed: int) -> np.ndarray:
    """Rows without ties, with ties, with the largest values in a few blocks, and with all equal."""
    random = np.random.default_rng(seed)
    scores = random.normal(0, 3, (4, LARGE)).astype(np.float32)
    scores[1] = np.round(scores[1] * 8) / 8
    scores[2, 5000:5100] = np.linspace(20, 21, 100)
    scores[3] = -1.5 if seed % 2 else scores[3]
    return scores


@pytest.mark.parametrize("k", [1, 50, 78, 79, 5000, LARGE])
def test_the_largest_of_a_large_vocabulary(k):
    for seed in range(4):
        scores = large_scores(seed)
        least = np.sort(scores, axis=1)[:, -k]
        np.testing.assert_array_equal(jax.jit(among_largest)(scores, k), scores >= least[:, None])


@pytest.mark.parametrize("names", [["top_k_20", "top_p_0.9"], ["top_p_0.9"], ["top_k_20", "typical_p_0.93"]])
def test_a_large_vocabulary(names):
    mine, others = zip(*(pairs()[name] for name in names), strict=True)
    for seed in range(4):
        expected = torch.from_numpy(large_scores(seed)[:3])
        for processor in others:
            expected = processor(None, expected)
        assert_equal(processed(mine, None, large_scores(seed)[:3]), expected.numpy())


@pytest.mark.parametrize("large", [False, True])
def test_prefixes_by_weight(large):
    """Multiples of 1/64 add up exactly, so that some sums reach a limit exactly."""
    random = np.random.default_rng(0)
    for limit in (0.0, 1 / 64, 0.25, 0.5, 63 / 64, 1.0):
        weights = random.multinomial(64, np.ones(20) / 20, size=5).astype(np.float32) / 64
        order = np.round(weights * random.choice([1, -1], (5, 1)) * 64)
        if large:
            weights, order = (np.pad(array, ((0, 0), (0, 9000))) for array in (weights, order))
        places = np.argsort(order, axis=1, kind="stable")
        sums = np.cumsum(np.take_along_axis(weights, places, axis=1), axis=1)
        within, first = np.zeros(weights.shape, bool), np.zeros(weights.shape, bool)
        np.put_along_axis(within, places, sums <= limit, axis=1)
        reached = np.minimum((sums < limit).sum(axis=1), weights.shape[1] - 1)
        last = np.take_along_axis(np.take_along_axis(order, places, axis=1), reached[:, None], axis=1)
        first = order <= last
        heavy = weights > 0
        np.testing.assert_array_equal(jax.jit(leading_mask)(order, weights, limit) & heavy, within & heavy)
        if limit > 0:
            np.testing.assert_array_equal(jax.jit(until_mask)(order, weights, limit) & heavy, first & heavy)
