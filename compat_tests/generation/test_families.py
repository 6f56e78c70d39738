"""Every native decoder family gives transformers' tokens: ragged prompts, several completions, windows exceeded."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from compat_tests.effort import only_thorough, thorough, usual, usually
from compat_tests.generation.near_ties import flips, least_margin, weights_of
from compat_tests.models import causal
from compat_tests.models.families import GENERATED
from trl_jax.hub.auto import AutoModelForCausalLM
from trl_jax.hub.pretrained import PreTrainedModel

torch = pytest.importorskip("torch")

SEED = 3
# Longer texts that exceed buckets and windows, both greedy and with processors.
LONG_FAMILIES = (
    "cohere2", "exaone4", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "gpt_oss", "granite", "llama", "mixtral",
    "olmoe", "phi3", "phimoe", "qwen3",
)  # fmt: skip
CONFIGURATIONS = {
    "greedy": {"repetition_penalty": 1.3},
    "sampled": {"do_sample": True, "temperature": 1.1, "top_k": 60, "top_p": 0.95, "no_repeat_ngram_size": 4},
}
# Two layers cover these models; each layer is compiled.
FEW = dict.fromkeys(("falcon_h1", "gemma2", "gpt_oss", "ministral3", "opt", "smollm3"), {"num_hidden_layers": 2})
FEW["nemotron_h"] = {"layers_block_type": ["linear_attention", "moe", "full_attention"]}
LONG = usually(lambda *pair: pair == ("gemma2", "greedy"), itertools.product(LONG_FAMILIES, CONFIGURATIONS))


def rows(vocabulary: int) -> dict[str, np.ndarray]:
    ids = np.random.default_rng(0).integers(5, vocabulary - 8, (4, 13))
    mask = np.ones_like(ids)
    for row, pads in enumerate((0, 5, 12, 2)):
        ids[row, :pads], mask[row, :pads] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def loaded(folder, family: str, *, tie: bool = False, **facts) -> tuple[PreTrainedModel, object]:
    causal.build(folder, family, tie=tie, **FEW.get(family, {}) | facts)
    return AutoModelForCausalLM.from_pretrained(folder), causal.reference(folder)


def compared(ours, theirs, **options) -> tuple[int, float, int]:
    """The number of rows that differ by near ties, the smallest lead of a token, and the number of tokens."""
    prompts = rows(ours.vocab_size)
    width = prompts["input_ids"].shape[1]
    torch.manual_seed(SEED)
    wanted = theirs.generate(
        **{name: torch.tensor(array) for name, array in prompts.items()}, return_dict_in_generate=True,
        output_scores=True, pad_token_id=0, **options,
    )  # fmt: skip
    found = ours.generate(**prompts, seed=SEED, pad_token_id=0, **options)[:, width:]
    scores, seed = [step.numpy() for step in wanted.scores], SEED if options.get("do_sample") else None
    return flips(found, wanted.sequences[:, width:].numpy(), scores, seed), least_margin(scores, seed), found.size


SAMPLED = {"do_sample": True, "top_k": 0, "temperature": 0.8, "num_return_sequences": 2, "max_new_tokens": 24}


@usual("falcon_h1", "gemma3_text", "gemma4_text", "gpt_oss")
@pytest.mark.parametrize("family", usually(GENERATED.__contains__, causal.DECODERS))
def test_every_family_samples_transformers_tokens(tmp_path, family):
    flipped, margin, tokens = compared(*loaded(tmp_path, family), eos_token_id=[50, 60, 70], **SAMPLED)
    assert flipped == 0 and margin > 1e-5 and tokens > 24


@pytest.mark.parametrize("tie", [False, thorough(True)])
def test_a_narrow_table_under_normed_sums_samples_transformers_tokens(tmp_path, tie):
    model = loaded(tmp_path, "opt", tie=tie, **causal.NORMED_SUMS)
    flipped, margin, tokens = compared(*model, eos_token_id=[50, 60, 70], **SAMPLED)
    assert flipped == 0 and margin > 1e-5 and tokens > 24


@pytest.mark.parametrize(("family", "configuration"), LONG)
def test_long_texts(tmp_path, family, configuration):
    """2,000 tokens if sampled."""
    options = CONFIGURATIONS[configuration]
    group = 8 if "do_sample" in options else 1
    flipped, _, tokens = compared(
        *loaded(tmp_path, family), eos_token_id=None, max_new_tokens=70, num_return_sequences=group, **options
    )
    assert flipped == 0 and tokens == 4 * group * 70


def test_near_ties_are_told_from_other_differences():
    scores = [np.random.default_rng(step).normal(0, 2, (3, 40)).astype(np.float32) for step in range(4)]
    order = np.stack([np.argsort(step, axis=1) for step in weights_of(scores, 5)])
    expected, other = order[:, :, -1].T, order[:, :, -1].T.copy()
    assert flips(expected, expected, scores, 5) == 0
    other[1, 2] = order[2, 1, -2]
    with pytest.raises(AssertionError, match="row 1, step 2: .* which led by"):
        flips(other, expected, scores, 5)
    lead = weights_of(scores, 5)[2][1]
    scores[2][1, other[1, 2]] += lead[expected[1, 2]] - lead[other[1, 2]] - 1e-6
    assert flips(other, expected, scores, 5) == 1 and least_margin(scores, 5) < 1e-5
    with pytest.raises(AssertionError, match="equal as far as both go"):
        flips(expected[:, :3], expected, scores, 5)


@only_thorough
def test_steps_of_time_are_limited_in_generation_as_in_training(tmp_path):
    """transformers does so only without a cache."""
    folder = causal.build(
        tmp_path, "granitemoehybrid", tie=False, num_hidden_layers=2, time_step_limit=[0.6, 0.7],
        layer_types=["linear_attention", "full_attention"],
    )  # fmt: skip
    ours, theirs = AutoModelForCausalLM.from_pretrained(folder), causal.reference(folder)
    options = {"eos_token_id": None, "max_new_tokens": 20}
    assert compared(ours, theirs, use_cache=False, **options)[0] == 0
    with pytest.raises(AssertionError, match="which led by"):
        compared(ours, theirs, **options)
