"""Longrope rotates all tokens differently once a text is long: generations that cross that length."""

from __future__ import annotations

import numpy as np
import pytest

from compat_tests.effort import only_thorough, thorough, usual
from compat_tests.models import causal, families
from trl_jax.core.torch_random import set_seed
from trl_jax.hub.auto import AutoModelForCausalLM

torch = pytest.importorskip("torch")

ORIGINAL, EOS = 40, [50, 60]


# phi3's factors change after 40 tokens; for phimoe only the scale changes.
FACTS = {
    "phi3": {"rope_parameters": families.LONGROPE, "original_max_position_embeddings": ORIGINAL},
    "phimoe": {"rope_parameters": families.SCALED_LONGROPE | {"original_max_position_embeddings": ORIGINAL}},
}


def loaded(folder, family):
    """Our model and transformers'."""
    folder = causal.build(folder, family, tie=False, sliding_window=None, num_hidden_layers=1, **FACTS[family])
    return AutoModelForCausalLM.from_pretrained(folder), causal.reference(folder)


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    return loaded(tmp_path_factory.mktemp("phi3"), "phi3")


@pytest.fixture(scope="module")
def scaled(tmp_path_factory):
    return loaded(tmp_path_factory.mktemp("phimoe"), "phimoe")


def batch(lengths):
    dice = np.random.default_rng(0)
    ids, mask = np.zeros((2, len(lengths), max(lengths)), np.int64)
    for row, length in enumerate(lengths):
        ids[row, -length:], mask[row, -length:] = dice.integers(5, 500, length), 1
    return {"input_ids": ids, "attention_mask": mask}


# By default, models/test_layouts covers texts that are long from the start, and this test one that crosses the length.
@usual("True-(39, 3)")
@pytest.mark.parametrize("lengths", [(11, 30, 4), (39, 3), (40, 7, 9), (41, 5), (17,)], ids=str)
@pytest.mark.parametrize("sampled", [False, True])
def test_tokens_are_transformers(lengths, sampled, both):
    """From before, at and after that length; the longest row may have ended while others continue."""
    compare(*both, lengths, sampled)


@only_thorough
@pytest.mark.parametrize("lengths", [(39, 3), *map(thorough, [(11, 30, 4), (40, 7, 9), (41, 5)])], ids=str)
def test_tokens_are_transformers_where_the_scale_changes(lengths, scaled):
    compare(*scaled, lengths, sampled=True)


def compare(ours, theirs, lengths, sampled):
    options = {"max_new_tokens": 45, "do_sample": sampled, "num_return_sequences": 2 if sampled else 1}
    options |= {"eos_token_id": EOS, "pad_token_id": 0}
    torch.manual_seed(3)
    with torch.no_grad():
        wanted = theirs.generate(**{name: torch.tensor(x) for name, x in batch(lengths).items()}, **options).numpy()
    set_seed(3)
    np.testing.assert_array_equal(ours.generate(**batch(lengths), **options), wanted)


@only_thorough
def test_log_probabilities_are_those_of_whole_texts(both):
    """For a single text: up to the crossing they use the short factors, afterwards those of the whole text."""
    ours, _ = both
    prompt = batch((30,))["input_ids"]
    found = ours.generate(prompt, max_new_tokens=20, pad_token_id=0, return_dict_in_generate=True)
    for length in (35, ORIGINAL, ORIGINAL + 1, 50):
        text = np.asarray(found.sequences)[:, :length]
        logits = np.asarray(ours(text[:, :-1]).logits)[0, -1].astype(np.float64)
        wanted = logits[text[0, -1]] - np.logaddexp.reduce(logits)
        assert np.asarray(found.logprobs)[0, length - 31] == pytest.approx(wanted, abs=2e-5)


@only_thorough
def test_prompts_of_a_queue_on_either_side(both):
    """If all texts are on one side, each completion equals that of its prompt alone; greedy, so that seeds do not
    matter."""
    ours, _ = both
    for low, high, new in ((3, 20, 12), (45, 60, 12)):
        texts = [batch((length,))["input_ids"][0].tolist() for length in np.linspace(low, high, 9).astype(int)]
        done = ours.generate_batch(texts, max_new_tokens=new, batch_size=3, eos_token_id=list(range(100)))
        for text, one in zip(texts, done.values(), strict=True):
            alone = ours.generate([text], max_new_tokens=new, pad_token_id=0, eos_token_id=list(range(100)))
            assert one.generated_tokens == alone[0, len(text) :].tolist()


def test_prompts_of_a_queue_that_cross(both):
    """When long prompts come and go, the run ends, and every completion exists and is finite."""
    ours, _ = both
    lengths = (8, 60, 9, 10, 39, 11, 70, 12, 13)
    prompts = [batch((n,))["input_ids"][0].tolist() for n in lengths]
    done = ours.generate_batch(prompts, max_new_tokens=20, batch_size=2, eos_token_id=None)
    assert len(done) == 9 and all(len(one.generated_tokens) == 20 for one in done.values())
    assert np.isfinite([one.logprobs for one in done.values()]).all()
