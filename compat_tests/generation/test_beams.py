"""Beam search and beam sampling against transformers: the same sequences, and the same state of the random stream."""

from __future__ import annotations

import numpy as np
import pytest

from compat_tests.effort import usual
from compat_tests.generation.test_generate import EOS, assert_same, both, folder, ours, prompts, settled, theirs  # noqa: F401
from compat_tests.models import causal
from trl_jax.core.torch_random import TorchGenerator
from trl_jax.hub.auto import AutoModelForCausalLM
from trl_jax.hub.generate import complete

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SEARCHES = {
    "plain": {"num_beams": 3},
    "several": {"num_beams": 4, "num_return_sequences": 3, "length_penalty": 0.5},
    "early": {"num_beams": 3, "early_stopping": True, "length_penalty": 2.0},
    "never": {"num_beams": 2, "early_stopping": "never", "length_penalty": -0.5},
    "penalized": {"num_beams": 3, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "min_new_tokens": 6},
    "sampled": {"num_beams": 2, "do_sample": True, "top_k": 50, "length_penalty": -0.1},
    "sampled several": {"num_beams": 3, "num_return_sequences": 2, "do_sample": True, "top_p": 0.9, "temperature": 1.4},
    "few kept": {"num_beams": 2, "do_sample": True, "top_k": 2, "min_p": 0.3, "epsilon_cutoff": 3e-3},
    "endless": {"num_beams": 2, "do_sample": True, "top_k": 0, "eos_token_id": None, "pad_token_id": 3},
}


@usual("several", "early", "never", "sampled", "few kept")
@pytest.mark.parametrize("options", SEARCHES.values(), ids=SEARCHES)
def test_sequences_are_transformers(ours, theirs, options):  # noqa: F811
    options = {"max_new_tokens": 20, "eos_token_id": EOS, "pad_token_id": 0} | options
    assert_same(*both(ours, theirs, **prompts(), **options))


@usual("gemma2", "lfm2")
@pytest.mark.parametrize("model_type", ["gemma2", "lfm2", "qwen3_next", "deepseek_v3"])
def test_every_kind_of_cache_follows_the_beams(model_type, tmp_path):
    folder = causal.build(tmp_path, model_type, tie=False)  # noqa: F811
    ids = {name: torch.tensor(value) for name, value in prompts(2).items()}
    options = {"num_beams": 4, "max_new_tokens": 16, "eos_token_id": EOS, "pad_token_id": 0}
    expected = causal.reference(folder).generate(**ids, **options)
    np.testing.assert_array_equal(AutoModelForCausalLM.from_pretrained(folder).generate(**ids, **options), expected)


def test_a_groups_completions_are_searched_for_one_by_one(ours, theirs):  # noqa: F811
    """As in TRL's rollouts, which repeat each prompt; with log-probabilities."""
    rows = [[7, 8, 9], [10, 11, 12]]
    options = {
        "max_new_tokens": 12, "do_sample": True, "num_beams": 2, "top_k": 9, "eos_token_id": 50, "pad_token_id": 0,
    }  # fmt: skip
    transformers.set_seed(3)
    ids = torch.tensor(rows).repeat_interleave(3, dim=0)
    expected = theirs.generate(ids, attention_mask=torch.ones_like(ids), **options)[:, 3:]
    found = complete(ours, rows, options, group=3, stream=TorchGenerator(3))
    assert len({tuple(row) for row in found.tokens.tolist()}) > 2
    np.testing.assert_array_equal(found.tokens, expected)
    with torch.no_grad():
        logits = theirs(torch.cat([ids, expected], dim=1)).logits[:, 2:-1]
    logps = torch.log_softmax(logits, dim=-1).gather(-1, expected[..., None])[..., 0].numpy()
    for row, length in enumerate(found.lengths):
        np.testing.assert_allclose(found.logps[row, :length], logps[row, :length], atol=1e-5)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"num_return_sequences": 3}, "has to be smaller or equal to `num_beams`"),
        ({"typical_p": 0.5, "do_sample": True}, "typical_p with num_beams=2 is not in this release"),
        ({"stopping_criteria": [lambda ids, scores: False]}, "stopping_criteria with num_beams=2"),
        ({"return_dict_in_generate": True}, "return_dict_in_generate with num_beams=2"),
        ({"num_beam_groups": 2}, "beam groups are not supported"),
    ],
)
def test_what_beams_do_not_go_with_is_named(asked, words, ours):  # noqa: F811
    with pytest.raises(ValueError, match=words):
        ours.generate(**prompts(2), num_beams=2, max_new_tokens=4, **asked)
