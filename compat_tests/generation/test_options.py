"""Fields of a GenerationConfig as processors: the ones that transformers creates, in its order, with its errors."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compat_tests.effort import usual
from trl_jax.generation.sampling import History, Options, Text, logits_processors, process, sampling_processors

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TEXT = Text(eos=(7, 11), prompt_length=4, max_length=9, vocabulary=50)
IDS = np.array([[1, 2, 3, 1, 2, 9, 1, 2], [0, 0, 5, 6, 5, 6, 5, 5]])
ALL = {
    "sequence_bias": [[[5], 1.5], [[1, 2], -0.5]],
    "encoder_repetition_penalty": 1.2,
    "repetition_penalty": 1.3,
    "no_repeat_ngram_size": 3,
    "encoder_no_repeat_ngram_size": 2,
    "bad_words_ids": [[8], [7], [5, 5]],
    "min_length": 9,
    "min_new_tokens": 5,
    "forced_bos_token_id": 4,
    "forced_eos_token_id": [7, 11],
    "remove_invalid_values": True,
    "exponential_decay_length_penalty": (1, 1.5),
    "suppress_tokens": [2, 3],
    "begin_suppress_tokens": [6],
    "temperature": 0.7,
    "top_h": 0.9,
    "top_k": 20,
    "top_p": 0.9,
    "min_p": 0.02,
    "typical_p": 0.9,
    "epsilon_cutoff": 0.001,
    "eta_cutoff": 0.001,
}


class Generation(transformers.GenerationMixin):
    """The minimal model for transformers to create its list of processors."""

    class config:
        is_encoder_decoder = False


def theirs(**fields) -> list:
    config = transformers.GenerationConfig(**{"num_beams": 1, "max_length": 9, "do_sample": True} | fields)
    config._eos_token_tensor = torch.tensor(TEXT.eos)
    return Generation()._get_logits_processor(
        config, 4, torch.from_numpy(IDS[:, :4]), model_kwargs={"attention_mask": torch.from_numpy(IDS[:, :4] > 0)}
    )


def ours(**fields) -> list:
    options = Options(**fields)
    return [*logits_processors(options, TEXT).values(), *sampling_processors(options).values()]


@usual(
    "4-sequence_bias", "4-encoder_repetition_penalty", "4-repetition_penalty", "4-no_repeat_ngram_size",
    "4-encoder_no_repeat_ngram_size", "4-bad_words_ids", "4-min_length", "4-min_new_tokens", "4-forced_bos_token_id",
    "4-forced_eos_token_id", "4-remove_invalid_values", "4-exponential_decay_length_penalty", "4-suppress_tokens",
    "4-begin_suppress_tokens", "4-temperature", "4-top_h", "4-top_k", "4-top_p", "4-min_p", "4-typical_p",
    "4-epsilon_cutoff", "4-eta_cutoff", "4-None", "5-None", "8-None",
)  # fmt: skip
@pytest.mark.parametrize("name", [*ALL, None])
@pytest.mark.parametrize("length", [4, 5, 8])
def test_scores_are_transformers(name, length):
    fields = ALL if name is None else {name: ALL[name]}
    scores = np.random.default_rng(length).normal(0, 2, (2, 50)).astype(np.float32)
    expected = theirs(**fields)(torch.from_numpy(IDS[:, :length]), torch.from_numpy(scores.copy())).numpy()
    history = History(jnp.asarray(IDS), jnp.int32(length), jnp.int32(4), jnp.array([0, 2]))
    made = ours(**fields)
    found = np.asarray(jax.jit(lambda *given: process(made, *given))(history, scores))
    np.testing.assert_array_equal(np.isneginf(found), np.isneginf(expected))
    np.testing.assert_allclose(found, expected, rtol=2e-6)


def test_each_field_is_a_processor_in_transformers_order():
    assert vars(Options()).keys() == ALL.keys()
    options = Options(**ALL)
    assert [*logits_processors(options, TEXT), *sampling_processors(options)] == list(ALL)
    assert len(theirs(**ALL)) == len(ALL)


OFF = {
    "repetition_penalty": 1.0, "encoder_repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "min_length": 0,
    "min_new_tokens": 0, "remove_invalid_values": False, "temperature": 1.0, "top_k": 0, "top_p": 1.0,
    "typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "encoder_no_repeat_ngram_size": 0,
    "bad_words_ids": [[7]],
}  # fmt: skip


def test_values_that_are_off():
    assert ours(**OFF) == []
    scores = torch.rand(2, 50)
    assert torch.equal(theirs(**OFF)(torch.from_numpy(IDS), scores.clone()), scores)


WRONG = [
    {"temperature": 2}, {"temperature": 0.0}, {"temperature": -1.0}, {"top_k": -1}, {"top_k": 2.5}, {"top_p": -0.1},
    {"min_p": 1.5}, {"typical_p": 0.0}, {"top_h": 0.0}, {"repetition_penalty": 2}, {"repetition_penalty": -1.0},
    {"encoder_repetition_penalty": 0.0}, {"bad_words_ids": []}, {"bad_words_ids": [3]}, {"bad_words_ids": [[-3]]},
    {"sequence_bias": {}}, {"sequence_bias": {5: 1.0}}, {"sequence_bias": {(5,): 1}},
    {"sequence_bias": {(-5,): 1.0}}, {"sequence_bias": [[5, 1.0]]}, {"sequence_bias": {(50,): 1.0}},
    {"min_length": 2.5},
]  # fmt: skip


@pytest.mark.parametrize("fields", WRONG, ids=str)
def test_errors_have_transformers_words(fields):
    ids, scores = torch.from_numpy(IDS), torch.zeros(2, 50)
    with pytest.raises(ValueError) as expected:
        theirs(**fields)(ids, scores)
    with pytest.raises(ValueError) as found:
        ours(**fields)
    assert str(found.value) == str(expected.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"forced_eos_token_id": 50}, "`forced_eos_token_id` must be token ids from 0 to 49, got 50"),
        ({"forced_bos_token_id": -1}, "`forced_bos_token_id` must be token ids from 0 to 49, got -1"),
        ({"exponential_decay_length_penalty": (3, 0.0)}, "must have a factor above 0"),
        ({"bad_words_ids": [[]]}, "Each list in `bad_words_ids` has to be a list of positive integers"),
    ],
)
def test_errors_where_transformers_has_none(fields, message):
    with pytest.raises(ValueError, match=message):
        ours(**fields)


def test_min_lengths_need_an_id_that_ends_texts():
    options = Options(min_length=5, min_new_tokens=5)
    assert logits_processors(options, TEXT._replace(eos=())) == {}
