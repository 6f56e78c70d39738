"""The decode loop gives transformers' tokens, whatever the buckets, chunks and compaction."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from compat_tests.effort import only_thorough, thorough, usual
from compat_tests.models import causal
from trl_jax.core.torch_random import TorchGenerator
from trl_jax.generation import generator
from trl_jax.generation.decode import prefill
from trl_jax.generation.generator import Request, generate
from trl_jax.generation.noise import PrefetchedWords
from trl_jax.generation.sampling import Temperature
from trl_jax.generation.weights import Weights, matrices_in
from trl_jax.hub.auto import AutoModelForCausalLM

torch = pytest.importorskip("torch")

EOS, GROUP, NEW, SEED = (1, 50, 60, 70, 80), 4, 70, 3  # more tokens than fit in the first two buckets


@pytest.fixture(scope="module", params=[thorough("llama"), "gemma2", thorough("gpt2")])
def case(request, tmp_path_factory):
    """A model, ragged prompts, and transformers' completions of them, sampled and greedy."""
    folder = causal.build(tmp_path_factory.mktemp(request.param), request.param, tie=False, num_hidden_layers=2)
    model, dice = AutoModelForCausalLM.from_pretrained(folder), np.random.default_rng(0)
    prompts = [dice.integers(5, model.vocab_size - 8, n).astype(np.int32) for n in (11, 7, 3)]
    ids, mask = np.zeros((2, GROUP * 3, 11), np.int64)
    for row in range(len(ids)):
        prompt = prompts[row // GROUP]
        ids[row, 11 - len(prompt) :], mask[row, 11 - len(prompt) :] = prompt, 1
    reference, wanted = causal.reference(folder), {}
    for sampled, options in {False: {}, True: {"temperature": 0.7, "top_k": 0}}.items():
        torch.manual_seed(SEED)
        wanted[sampled] = reference.generate(
            torch.tensor(ids), attention_mask=torch.tensor(mask), max_new_tokens=NEW, eos_token_id=list(EOS),
            pad_token_id=0, do_sample=sampled, **options,
        )[:, 11:].numpy()  # fmt: skip
    return model, prompts, wanted, torch.rand(1).item()


def completed(model, prompts, sampled, *, steps=16, logps=False):
    """Our completions, and the state of the random generator afterwards."""
    processors = (Temperature(jnp.float32(0.7)),) if sampled else ()
    temperature = 0.7 if sampled else 1.0
    request = Request(prompts, GROUP, EOS, 0, NEW, processors, temperature=temperature, logps=logps)
    weights, stream = Weights.of(model.graph, model.arrays), TorchGenerator(SEED)
    if not sampled:
        return generate(weights, request, steps=steps), stream
    rows = {"rows": request.rows, "vocabulary": model.vocab_size}
    words = PrefetchedWords(stream, **rows, steps=steps, max_steps=NEW)
    out = generate(weights, request, words, steps=steps)
    words.close(out.tokens.shape[1])
    return out, stream


# By default, test_generate covers llama, and test_families long greedy texts of gemma2.
@pytest.mark.parametrize("sampled", [thorough(False), True])
def test_tokens_are_those_of_transformers(case, sampled):
    model, prompts, wanted, after = case
    out, stream = completed(model, prompts, sampled)
    np.testing.assert_array_equal(out.tokens, wanted[sampled])
    ended = np.isin(wanted[sampled], EOS)
    np.testing.assert_array_equal(out.lengths, np.where(ended.any(1), ended.argmax(1) + 1, ended.shape[1]))
    if sampled:
        assert stream.uniform(1, 0.5)[0] + 0.5 == pytest.approx(after, abs=1e-7)


@only_thorough
def test_one_step_a_call_and_no_compaction_change_nothing(case, monkeypatch):
    model, prompts, wanted, _ = case
    monkeypatch.setattr(generator._Generation, "_compacted", lambda self, state, alive: (state, alive))
    out, _ = completed(model, prompts, True, steps=5)
    np.testing.assert_array_equal(out.tokens, wanted[True])


@usual("gemma2")
def test_log_probabilities_are_those_of_whole_texts(case):
    model, prompts, _, _ = case
    out, _ = completed(model, prompts, True, logps=True)
    own = [out.tokens[row, :length] for row, length in enumerate(out.lengths)]
    texts = [np.concatenate([prompts[row // GROUP], tokens]) for row, tokens in enumerate(own)]
    rows = np.zeros((len(texts), max(map(len, texts))), np.int32)
    for row, text in zip(rows, texts, strict=True):
        row[: len(text)] = text  # what follows a text is not visible
    every = np.asarray(model(rows).logits) / 0.7
    for row, length in enumerate(out.lengths):
        logits = every[row, len(prompts[row // GROUP]) - 1 : len(texts[row]) - 1]
        wanted = np.take_along_axis(logits, own[row][:, None], 1)[:, 0] - np.logaddexp.reduce(logits, axis=1)
        np.testing.assert_allclose(out.logps[row, :length], wanted, atol=2e-5)
        assert not out.logps[row, length:].any()


@usual("llama")
@pytest.mark.parametrize("family", ["llama", thorough("qwen3"), "mixtral", thorough("olmo2")])
def test_matrices_in_sixteen_bits_change_no_logit(family, tmp_path):
    """Products are in 16 bits either way; norms stay in float32."""
    model = AutoModelForCausalLM.from_pretrained(causal.build(tmp_path, family, tie=False, num_hidden_layers=1))
    halves = matrices_in(model.graph, model.arrays, jnp.dtype(jnp.bfloat16))
    cast = {path for path, array in halves.items() if array.dtype == jnp.bfloat16}
    assert "lm_head.weight" in cast and not any("norm" in path or "embed" in path for path in cast)
    assert sum(".layers." in path for path in cast) >= 7
    tokens = np.arange(5, 29, dtype=np.int32).reshape(2, 12)
    sizes, dtype = {"group": 1, "capacity": 4, "max_tokens": 100}, jnp.dtype(jnp.bfloat16)
    both = (Weights(model.graph, arrays, None, dtype, dtype) for arrays in (model.arrays, halves))
    found = (prefill(weights, tokens, np.array([12, 9]), np.int32(12), **sizes)[0] for weights in both)
    np.testing.assert_array_equal(*found)
