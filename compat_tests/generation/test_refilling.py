"""Prompts that refill the slots of finished ones: each completion equals that of its prompt alone."""

from __future__ import annotations

import numpy as np
import pytest

from compat_tests.effort import THOROUGH, only_thorough, thorough
from compat_tests.models import causal
from trl_jax.core.torch_random import TorchGenerator
from trl_jax.generation import generator
from trl_jax.generation.generator import Request, generate, generate_queue
from trl_jax.generation.noise import KeyedSource, random_key
from trl_jax.generation.sampling import RepetitionPenalty
from trl_jax.generation.weights import Weights
from trl_jax.hub.auto import AutoModelForCausalLM

EOS, COUNT = (50, 60, 70, 80, 90, 100, 110), 23
KEY = random_key(TorchGenerator(3))


@pytest.fixture(
    scope="module",
    params=[
        "gemma2",
        thorough("qwen3_next"),
        thorough("lfm2"),
        thorough("falcon_h1"),
        thorough("gemma4_text"),
        thorough("llama4_text"),
        thorough("nemotron_h"),
        thorough("gpt_oss"),
        thorough("deepseek_v3"),
    ],
)
def model(request, tmp_path_factory):
    """Windows of 7 tokens, convolution windows, recurrent states, sinks, latent attention."""
    facts = {"num_hidden_layers": 2} if request.param == "gemma2" else {}
    folder = causal.build(tmp_path_factory.mktemp("m"), request.param, tie=False, **facts)
    return AutoModelForCausalLM.from_pretrained(folder)


def prompts(seed: int = 0, most: int = 30) -> list[np.ndarray]:
    dice = np.random.default_rng(seed)
    return [dice.integers(5, 500, length).astype(np.int32) for length in dice.integers(1, most, COUNT)]


def asked(texts, new, group=1, eos=EOS):
    penalty = RepetitionPenalty(np.float32(1.3))
    return Request(texts, group, eos, 0, new, (penalty,), width=max(map(len, texts)), logps=True)


def alone(model, request):
    """Row -> (tokens, log-probabilities), with each prompt alone."""
    weights, done = Weights.of(model.graph, model.arrays), {}
    for number, prompt in enumerate(request.prompts):
        rows = np.arange(request.group) + number * request.group
        one = Request(**(vars(request) | {"prompts": [prompt]}))
        completions = generate(weights, one, KeyedSource(KEY, numbers=rows))
        done |= {int(row): (own.tokens, own.logps) for row, own in zip(rows, completions.rows(), strict=True)}
    return done


def queued(model, request, *, slots, steps=16):
    done = {}
    source = KeyedSource(KEY, numbers=np.arange(request.rows))
    take = lambda completed: done.update({one.row: (one.tokens, one.logps) for one in completed})  # noqa: E731
    generate_queue(Weights.of(model.graph, model.arrays), request, source, take, slots=slots, steps=steps)
    return done


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    for row, (tokens, logps) in wanted.items():
        np.testing.assert_array_equal(found[row][0], tokens, err_msg=str(row))
        np.testing.assert_allclose(found[row][1], logps, atol=2e-5, err_msg=str(row))


@pytest.mark.parametrize(("slots", "group", "steps"), [(3, 2, 5), thorough(4, 1, 16)])
def test_completions_are_those_of_each_prompt_alone(model, slots, group, steps, monkeypatch):
    """Slots are reused, so that the ring of 32 positions wraps several times, and then grows for a longer
    completion."""
    request = asked(prompts(), 50, group, eos=tuple(range(50, 500, 9)))
    wanted = alone(model, request)
    lengths = [len(tokens) for tokens, _ in wanted.values()]
    assert min(lengths) < 8 and sum(lengths) / slots > 32 * group
    grow, written = generator.grow, []
    monkeypatch.setattr(generator, "grow", lambda state, **to: (written.append(int(state.count)), grow(state, **to))[1])
    assert_same(queued(model, request, slots=slots, steps=steps), wanted)
    if model.config.model_type == "gemma2" and slots == 3:  # lengths depend on the random weights
        assert written and min(written) > 32


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = causal.build(tmp_path_factory.mktemp("llama"), "llama", tie=False, num_hidden_layers=1)
    return AutoModelForCausalLM.from_pretrained(folder)


@only_thorough
@pytest.mark.parametrize("new", [thorough(1), thorough(2), 33])
def test_completions_that_end_at_once(llama, new):
    """Half of all ids are EOS: whole rounds of prompts start and end between two checks by the host."""
    request = asked(prompts(1), new, eos=tuple(range(0, 510, 2)))
    wanted = alone(llama, request)
    assert sum(len(tokens) == 1 for tokens, _ in wanted.values()) > 5
    assert_same(queued(llama, request, slots=4), wanted)


@pytest.mark.skipif(not THOROUGH, reason="twenty orders of prompts and numbers of slots: THOROUGH=1")
@pytest.mark.parametrize("seed", range(20))
def test_any_number_of_slots(llama, seed):
    dice = np.random.default_rng(seed)
    request = asked(prompts(seed, 200), int(dice.integers(1, 90)), int(dice.integers(1, 4)))
    found = queued(llama, request, slots=int(dice.integers(1, 24)), steps=int(dice.integers(1, 17)))
    assert_same(found, alone(llama, request))


def test_few_programs_are_compiled(llama):
    """However many prompts there are: neither their number nor the order of refills is part of a shape."""
    from trl_jax.generation.decode import first_tokens, next_tokens, prefill, refilled

    programs = prefill, first_tokens, next_tokens, refilled
    before = [program._cache_size() for program in programs]
    queued(llama, asked(prompts() * 3, 40), slots=16)
    made = [program._cache_size() - count for program, count in zip(programs, before, strict=True)]
    assert all(0 < count <= most for count, most in zip(made, (3, 3, 6, 4), strict=True)), made
