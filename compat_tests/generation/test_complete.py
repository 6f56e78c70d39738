"""`complete`, the function for rollouts: fields of the config and the model, one random stream, log-probabilities."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from compat_tests.effort import only_thorough, thorough, usual
from compat_tests.models import causal
from compat_tests.tiny import tiny_tokenizer
from trl_jax.core.torch_random import TorchGenerator
from trl_jax.generation import generator, noise
from trl_jax.generation.noise import random_key
from trl_jax.hub import generate
from trl_jax.hub.auto import AutoModelForCausalLM
from trl_jax.hub.generate import ExactDrawing, KeyedDrawing, complete, drawing_of
from trl_jax.hub.generation_inputs import resolve

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

# The fields set by TRL's GRPOTrainer; the others are None.
FIELDS = {
    "max_new_tokens": 20, "do_sample": True, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": [50, 60, 70],
    "temperature": 0.8, "top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0,
    "cache_implementation": None,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return causal.build(tmp_path_factory.mktemp("qwen3"), "qwen3", tie=False, num_hidden_layers=1)


@pytest.fixture
def model(folder):
    return AutoModelForCausalLM.from_pretrained(folder)


def prompts() -> list[list[int]]:
    return [np.random.default_rng(0).integers(5, 100, length).tolist() for length in (4, 9, 6)]


# By default, GRPO's curve covers a checkpoint without fields of its own.
@pytest.mark.parametrize(
    "own", [thorough({}), {"no_repeat_ngram_size": 2, "typical_p": 0.9, "suppress_tokens": [7, 8, 9]}]
)
def test_rollouts_are_those_of_transformers(folder, model, own):
    """A checkpoint's own fields apply where the trainer's are None."""
    reference, group = causal.reference(folder), 4
    for one in (model, reference):
        one.generation_config.update(**own)
    width = max(map(len, prompts()))
    ids = np.array([[0] * (width - len(row)) + row for row in prompts()]).repeat(group, axis=0)
    stream = TorchGenerator(5)
    torch.manual_seed(5)
    for _ in range(2):
        expected = reference.generate(
            torch.tensor(ids), attention_mask=torch.tensor(ids > 0).long(),
            generation_config=transformers.GenerationConfig(**FIELDS),
        )[:, width:].numpy()  # fmt: skip
        done = complete(model, prompts(), FIELDS, group=group, stream=stream)
        np.testing.assert_array_equal(done.tokens, expected)
    assert stream.uniform(1, 0.5)[0] + 0.5 == pytest.approx(torch.rand(1).item(), abs=1e-7)
    ended = np.isin(expected, FIELDS["eos_token_id"])
    np.testing.assert_array_equal(done.lengths, np.where(ended.any(1), ended.argmax(1) + 1, ended.shape[1]))


@usual("all at once")
@pytest.mark.parametrize("at_once", [None, 4], ids=["all at once", "a few at a time"])
def test_stop_strings_are_those_of_transformers(folder, model, at_once):
    """Tokens sampled after the end of a text, before the host checks it, belong neither to it nor to the random
    stream."""
    tokenizer = tiny_tokenizer()
    reference, group, width = causal.reference(folder), 4, max(map(len, prompts()))
    ids = np.array([[0] * (width - len(row)) + row for row in prompts()]).repeat(group, axis=0)
    fields = FIELDS | {"max_new_tokens": 40, "eos_token_id": [50]}
    plain = complete(model, prompts(), fields, group=group, stream=TorchGenerator(5)).tokens
    # Of one and two tokens, at the start, in the middle and at the end of the 16 steps after which the host checks.
    cuts = [(0, 0, 1), (1, 5, 6), (2, 14, 16), (5, 15, 17), (7, 31, 33), (9, 20, 22)]
    fields["stop_strings"] = [tokenizer.decode(plain[row, first:last]) for row, first, last in cuts]
    stream = TorchGenerator(5)
    torch.manual_seed(5)
    expected = reference.generate(
        torch.tensor(ids), attention_mask=torch.tensor(ids > 0).long(), tokenizer=tokenizer,
        generation_config=transformers.GenerationConfig(**fields),
    )[:, width:].numpy()  # fmt: skip
    limit = generator.Limit(at_once)
    done = complete(model, prompts(), fields, group=group, stream=stream, tokenizer=tokenizer, limit=limit)
    np.testing.assert_array_equal(done.tokens, expected)
    assert stream.uniform(1, 0.5)[0] + 0.5 == pytest.approx(torch.rand(1).item(), abs=1e-7)
    assert (done.lengths < 40).sum() > 4 and len(set(done.lengths.tolist())) > 4
    with pytest.raises(ValueError, match="we could not locate a tokenizer"):
        complete(model, prompts(), fields, group=group, stream=stream)


def test_log_probabilities_are_of_all_ids_at_the_temperature(model):
    """Processors, such as top_k here, do not affect log-probabilities."""
    done = complete(model, prompts(), FIELDS | {"top_k": 5}, group=2, stream=TorchGenerator(1))
    for row, (tokens, length) in enumerate(zip(done.tokens, done.lengths, strict=True)):
        prompt = prompts()[row // 2]
        logits = np.asarray(model(np.array([prompt + tokens[:length].tolist()])).logits)[0, len(prompt) - 1 : -1] / 0.8
        expected = np.take_along_axis(logits, tokens[:length, None], 1)[:, 0] - np.logaddexp.reduce(logits, axis=1)
        np.testing.assert_allclose(done.logps[row, :length], expected, atol=2e-5)
    assert complete(model, prompts(), FIELDS, group=2, stream=TorchGenerator(1), logps=False).logps is None


def test_draws_are_torchs_on_a_cpu_in_float32_alone(model):
    settings, _ = resolve(model, None, FIELDS)
    assert isinstance(drawing_of(settings, TorchGenerator(1), "float32"), ExactDrawing)
    stream = TorchGenerator(1)
    keyed = drawing_of(settings, stream, "bfloat16")
    assert isinstance(keyed, KeyedDrawing) and stream.position == 2
    assert (random_key(TorchGenerator(1)) == keyed.key).all()
    assert drawing_of(resolve(model, None, FIELDS | {"do_sample": False})[0], stream, "float32") is None
    first, again, other = (
        complete(model, prompts(), FIELDS, group=2, stream=TorchGenerator(seed), dtype="bfloat16") for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(first.tokens, again.tokens)
    assert first.tokens.tolist() != other.tokens.tolist()


def test_a_failure_leaves_the_stream_where_it_was(model):
    stream = TorchGenerator(3)
    stream.words(7)
    broken = {path: array * np.nan for path, array in model.params.items() if "norm" in path}
    with pytest.raises(ValueError, match="`temperature`"):
        complete(model, prompts(), FIELDS | {"temperature": 0}, group=1, stream=stream)
    assert stream.position == 7
    model.params = model.params | broken
    with pytest.raises(RuntimeError, match="probability tensor contains either `inf`, `nan` or element < 0"):
        complete(model, prompts(), FIELDS, group=1, stream=stream)


@pytest.mark.parametrize(("how", "calls"), [({}, 19), ({"do_sample": False}, 2), ({"dtype": "bfloat16"}, 2)])
def test_only_torchs_words_bound_the_steps_of_a_chunk(model, monkeypatch, how, calls):
    """With key-based noise, which each step computes itself, the host checks every 16 steps whatever the vocabulary
    size."""
    monkeypatch.setattr(noise, "_CHUNK_BYTES", 1)
    of, taken = generator.next_tokens, []
    monkeypatch.setattr(generator, "next_tokens", lambda *a, **k: (taken.append(1), of(*a, **k))[1])
    fields = FIELDS | {name: value for name, value in how.items() if name != "dtype"} | {"eos_token_id": 0}
    options = {name: value for name, value in how.items() if name == "dtype"}
    assert complete(model, prompts(), fields, group=1, stream=TorchGenerator(1), **options).tokens.shape[1] == 20
    assert len(taken) == calls


@only_thorough
def test_a_tied_heads_table_is_rounded_once_and_not_in_each_step(tmp_path, monkeypatch):
    model = AutoModelForCausalLM.from_pretrained(causal.build(tmp_path, "llama", tie=True))
    of, traced = generator.next_tokens, []
    monkeypatch.setattr(generator, "next_tokens", lambda *a, **k: (traced.append(of.trace(*a, **k)), of(*a, **k))[1])
    complete(model, prompts(), FIELDS, group=1, stream=TorchGenerator(1), dtype="bfloat16")
    table = model.params["decoder.embed.weight"].shape

    def casts(jaxpr):
        made = (eqn.outvars[0].aval for eqn in jaxpr.eqns if eqn.primitive.name == "convert_element_type")
        return sum(array.shape == table for array in made)

    (loop,) = [eqn for eqn in traced[0].jaxpr.eqns if eqn.primitive.name == "while"]
    assert (casts(traced[0].jaxpr), casts(loop.params["body_jaxpr"].jaxpr)) == (1, 0)


@pytest.mark.parametrize(
    ("platform", "said", "expected"),
    [("cpu", None, "float32"), ("gpu", None, "bfloat16"), ("gpu", "float32", "float32")],
)
def test_what_a_generation_computes_in(folder, monkeypatch, platform, said, expected):
    monkeypatch.setattr(generate, "platform", lambda: platform)
    stored = AutoModelForCausalLM.from_pretrained(folder, dtype="bfloat16")
    assert generate.computing_dtype(stored, said) == expected
    exact = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    assert generate.computing_dtype(exact, said) == (said or "float32")


@only_thorough
def test_generate_computes_in_it(folder, monkeypatch):
    model, ids = AutoModelForCausalLM.from_pretrained(folder, dtype="bfloat16"), [prompts()[1]]
    options = {"attention_mask": [[1] * len(ids[0])], "return_dict_in_generate": True, "output_logits": True}
    found = {}
    for platform in ("cpu", "gpu"):
        monkeypatch.setattr(generate, "platform", lambda platform=platform: platform)
        logits = model.generate(ids, max_new_tokens=1, **options).logits[0]
        found[platform] = bool((logits == logits.astype(jnp.bfloat16).astype(np.float32)).all())
    assert found == {"cpu": False, "gpu": True}
