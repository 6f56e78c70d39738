"""Turns that reuse the cache of earlier turns give the tokens and log-probabilities of a prefill."""

from __future__ import annotations

import gc

import jax
import numpy as np
import pytest

from compat_tests.effort import usually
from compat_tests.generation.test_at_once import with_pictures
from compat_tests.models import causal
from compat_tests.trainer.vision_models import tiny_qwen
from trl_jax.core.torch_random import TorchGenerator
from trl_jax.generation import reuse
from trl_jax.generation import weights as generation_weights
from trl_jax.generation.generator import SHARE, Lengths, Limit, cache_bytes, device_bytes
from trl_jax.generation.reuse import TurnCache, can_keep
from trl_jax.generation.weights import Weights
from trl_jax.hub.auto import AutoModelForCausalLM, AutoModelForImageTextToText
from trl_jax.hub.generate import complete
from trl_jax.nn.cache import CachedTexts, TokenCache

OPTIONS = {"max_new_tokens": 40, "do_sample": True, "pad_token_id": 0, "eos_token_id": list(range(5, 500, 40))}
FEW = {"max_new_tokens": 4, "do_sample": True, "pad_token_id": 0, "eos_token_id": None}
GROUP = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return of("qwen3", tmp_path_factory, num_hidden_layers=1)


def of(kind, tmp_path_factory, **facts):
    folder = causal.build(tmp_path_factory.mktemp(kind), kind, tie=False, **facts)
    return AutoModelForCausalLM.from_pretrained(folder)


class Talk:
    """Conversations with the model. After each turn some end, and the others get answers of 1 to 70 tokens; the longest
    take two calls of the model."""

    def __init__(self, model, monkeypatch, turns=2, new=FEW, **options):
        self.model, self.turns, self.new, self.options = model, turns, new, options
        self.steps, self.prompts = [], [ids.tolist() for ids in self.drawn(0, (90, 200, 31, 170, 64))]
        step = reuse._append_tokens
        monkeypatch.setattr(
            reuse, "_append_tokens", lambda *given, **own: self.steps.append(given[4]) or step(*given, **own)
        )

    def drawn(self, seed, lengths):
        dice = np.random.default_rng(seed)
        return [dice.integers(5, 500, length) for length in lengths]

    def held(self, turns, images=None):
        """The tokens and log-probabilities of each turn."""
        stream, texts, group, made = TorchGenerator(3), self.prompts, GROUP, []
        for turn in range(self.turns):
            out = complete(
                self.model, texts, self.new, group=group, stream=stream, turns=turns, images=images, **self.options
            )
            own = [tokens[:length].tolist() for tokens, length in zip(out.tokens, out.lengths, strict=True)]
            made.append((own, [logps[: len(ids)] for ids, logps in zip(own, out.logps, strict=True)]))
            answers = self.drawn(turn + 1, np.resize((70, 1, 12), len(own)))
            kept = [row for row in range(len(own)) if (row + turn) % 3]
            texts = [texts[row // group] + own[row] + answers[row].tolist() for row in kept]
            if images is not None:
                new = [len(own[row]) + len(answers[row]) for row in kept]
                images = [images[row // group].before(more) for row, more in zip(kept, new, strict=True)]
            group = 1
        return made

    def check(self, images=None, tolerance=5e-6):
        """Compare with prefills; returns how many calls of the model continued cached texts."""
        assert not self.steps
        wanted, found = self.held(None, images), self.held(TurnCache(), images)
        for (tokens, logps), (others, other_logps) in zip(wanted, found, strict=True):
            assert tokens == others
            np.testing.assert_allclose(np.concatenate(other_logps), np.concatenate(logps), atol=tolerance)
        return len(self.steps)


def test_turns(model, monkeypatch):
    """Completions end at different times, so the batch is compacted, and the cache is in several pieces."""
    pieces, begin = [], TurnCache.begin
    monkeypatch.setattr(
        TurnCache,
        "begin",
        lambda self, *given: pieces.append(len(self._last.pieces) if self._last else 0) or begin(self, *given),
    )
    talk = Talk(model, monkeypatch, 3, OPTIONS)
    assert talk.check() == 3
    assert pieces[0] == 0 and max(pieces) > 1
    assert max(more.max() for more in talk.steps) == 64 and min(more.min() for more in talk.steps) == 0


# With a layer of each kind, because each compiles by itself: dense and experts, with a window and without, ...
USUAL = {kind: {"num_hidden_layers": 2} for kind in ("deepseek_v3", "gemma2")}
USUAL["qwen3_next"] = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
RARER = "opt mixtral cohere2 smollm3 llama4_text gemma4_text gpt_oss lfm2 falcon_h1 nemotron_h qwen3_5_text".split()


@pytest.mark.parametrize("kind", usually(USUAL.__contains__, [*USUAL, *RARER]))
def test_families(kind, monkeypatch, tmp_path_factory):
    """Windows of 7 tokens, recurrent layers, latents: what a completion had at its end outlives longer ones."""
    model = of(kind, tmp_path_factory, **USUAL.get(kind, {}))
    talk = Talk(model, monkeypatch, new=FEW | {"eos_token_id": list(range(0, 500, 3))})
    assert talk.check() == 1


@pytest.mark.parametrize("kind, rest", [("qwen3", True), ("gemma2", False), ("qwen3_next", False)])
def test_completions_that_a_stop_rule_ends(kind, rest, tmp_path_factory):
    """Tokens after the end overwrite what layers with windows and recurrent layers had."""
    model = of(kind, tmp_path_factory)
    assert can_keep(Weights.of(model.graph, model.arrays), stopped=True) == rest
    assert can_keep(Weights.of(model.graph, model.arrays), stopped=False)


def test_longrope_is_not_kept(tmp_path_factory):
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "rope_theta": 10000.0,
            "original_max_position_embeddings": 32}  # fmt: skip
    model = of("phi3", tmp_path_factory, rope_parameters=rope, max_position_embeddings=64)
    assert not can_keep(Weights.of(model.graph, model.arrays), stopped=False)


def test_layers_in_a_stack(model, monkeypatch):
    monkeypatch.setattr(generation_weights, "decodes_by_layer", lambda *given: False)
    assert Talk(model, monkeypatch).check() == 1


def test_the_cache_of_the_last_turn_alone_is_held(model, monkeypatch):
    turns, held = TurnCache(), []
    for numbers in ((), ("forget",)):
        gc.collect()
        before = jax.live_arrays()  # kept, so that their ids are not used again
        known = set(map(id, before))
        Talk(model, monkeypatch).held(turns)
        for name in numbers:
            getattr(turns, name)()
        held.append(sum(array.nbytes for array in jax.live_arrays() if id(array) not in known))
    assert held[1] < held[0] / 4 and 0 < held[0] <= whole_cache(model, 14, 288)


def whole_cache(model, prompts, prompt, group=1):
    return cache_bytes(Weights.of(model.graph, model.arrays), prompts, group, Lengths(prompt, 32, prompt + 32))


def of_prompts(model, lengths, turns, group=GROUP, new=FEW, **options):
    prompts = [list(range(9, 9 + length)) for length in lengths]
    return complete(model, prompts, new, group=group, stream=TorchGenerator(0), turns=turns, **options)


def limit_of(model, size):
    """A limit that leaves `size` bytes for caches."""
    return Limit(None, int(size / SHARE) + device_bytes(Weights.of(model.graph, model.arrays).layers) + 8)


@pytest.mark.parametrize("caches", [3.4, 3.5])
def test_nothing_is_kept_without_memory_for_a_turn(model, caches):
    """Two caches, and two more of the prompts: the batch can be compacted twice with all prompts in it."""
    turns = TurnCache()
    limit = limit_of(model, caches * whole_cache(model, 5, 224, GROUP))
    of_prompts(model, (90, 200, 31, 170, 64), turns, limit=limit)
    assert turns.keeps == (caches > 3.45)


def test_compacted_batches_keep_all_prompts(model):
    """What is kept is more than two caches if prompts are long, and fits into the memory that is required."""
    turns = TurnCache()
    new = {**OPTIONS, "max_new_tokens": 64, "eos_token_id": list(range(5, 500, 15))}
    of_prompts(model, (480, 470), turns, 8, new)
    kept, whole = turns.device_bytes, cache_bytes(Weights.of(model.graph, model.arrays), 2, 8, Lengths(512, 64, 576))
    assert kept > 2 * whole
    of_prompts(model, (480, 470), turns, 8, new, limit=limit_of(model, kept))
    assert not turns.keeps


def test_a_turn_without_memory_for_the_last_one_begins_with_a_prefill(model, monkeypatch):
    talk, turns = Talk(model, monkeypatch), TurnCache()
    out = complete(model, talk.prompts, FEW, group=1, stream=TorchGenerator(0), turns=turns)
    texts = [ids + tokens.tolist() + [7] for ids, tokens in zip(talk.prompts, out.tokens, strict=True)]
    limit = limit_of(model, 1.1 * whole_cache(model, 6, 224))
    complete(model, texts, FEW, group=1, stream=TorchGenerator(0), turns=turns, limit=limit)
    assert not talk.steps and turns.device_bytes == 0


@pytest.mark.parametrize("at_once", [5, 6])
def test_later_turns_are_padded_within_the_limit(model, at_once, monkeypatch):
    """The number of texts in later turns varies, that of prompts does not."""
    talk, turns = Talk(model, monkeypatch), TurnCache()
    texts, options = talk.prompts, {"group": 1, "turns": turns, "limit": Limit(at_once)}
    for prompts in (5, at_once):
        out = complete(model, texts, FEW, stream=TorchGenerator(0), **options)
        assert [len(piece.request_rows) for piece in turns._last.pieces] == [prompts]
        texts = [ids + tokens.tolist() + [7] for ids, tokens in zip(texts, out.tokens, strict=True)]
    assert len(talk.steps) == 1


def test_texts_are_moved_without_a_copy_of_the_cache():
    def keys_and_values(prompts, length, group):
        shape = jax.ShapeDtypeStruct((2, prompts, 2, length, 8), np.float32)
        k_T = jax.ShapeDtypeStruct((2, prompts, group, 2, 8, 32), np.float32)
        v = jax.ShapeDtypeStruct((2, prompts, group, 2, 32, 8), np.float32)
        return TokenCache(shape, k_T, token_axis=-1), TokenCache(shape, v)

    old, new = keys_and_values(4, 64, 2), keys_and_values(8, 128, 1)
    number, here = jax.ShapeDtypeStruct((8,), np.int32), jax.ShapeDtypeStruct((8,), bool)
    compiled = reuse._with_texts.lower(new, old, CachedTexts(number, number, number, number, here)).compile()
    size = compiled.memory_analysis()
    assert size.temp_size_in_bytes < 0.1 * size.output_size_in_bytes


def test_a_generation_within_another_does_not_mix_up_texts(model):
    """As in the threads of a rollout_func."""
    turns, calls = TurnCache(), []
    new = {**OPTIONS, "max_new_tokens": 64, "eos_token_id": list(range(5, 500, 15))}

    def generate(ids, group, turns=None, **options):
        return complete(model, ids, new, group=group, stream=TorchGenerator(0), turns=turns, **options)

    def progress(*given):
        calls.append(given)
        if len(calls) == 4:  # after ended completions were dropped
            generate([list(range(300, 390))] * 5, GROUP, turns)

    prompts = [list(range(9 + number, 99 + number)) for number in range(5)]
    out = generate(prompts, GROUP, turns, progress=progress)
    rows = zip(range(5 * GROUP), out.tokens, out.lengths, strict=True)
    texts = [prompts[row // GROUP] + tokens[:length].tolist() + [7] for row, tokens, length in rows]
    found, wanted = generate(texts, 1, turns), generate(texts, 1)
    np.testing.assert_array_equal(found.tokens, wanted.tokens)
    np.testing.assert_allclose(found.logps, wanted.logps, atol=5e-6)


def test_other_texts_begin_anew(model, monkeypatch):
    """Texts that do not continue those of the last turn, or have mostly new tokens."""
    talk, turns = Talk(model, monkeypatch), TurnCache()
    complete(model, talk.prompts, FEW, group=1, stream=TorchGenerator(0), turns=turns)
    others = [ids[::-1] for ids in talk.prompts]
    complete(model, others, FEW, group=1, stream=TorchGenerator(0), turns=turns)
    out = complete(model, others, FEW, group=1, stream=TorchGenerator(0), turns=turns)
    long = [ids + tokens.tolist() + [7] * 300 for ids, tokens in zip(others, out.tokens, strict=True)]
    complete(model, long, FEW, group=1, stream=TorchGenerator(0), turns=turns)
    assert not talk.steps


def test_images(monkeypatch, tmp_path):
    """Later turns continue the cached texts, at positions after the images; equal texts with other images do not."""
    model = AutoModelForImageTextToText.from_pretrained(tiny_qwen(tmp_path))
    rows, images = with_pictures(model, tmp_path)
    talk = Talk(model, monkeypatch)
    talk.prompts = [row.tolist() for row in rows]
    monkeypatch.setattr(talk, "drawn", lambda seed, lengths: [np.full(7, 9)] * len(lengths))
    assert talk.check(images) == 1
    talk.steps.clear()
    other = [text._replace(key=b"other") for text in images]
    turns = TurnCache()
    out = complete(model, talk.prompts, FEW, group=1, stream=TorchGenerator(0), images=images, turns=turns)
    texts = [ids + tokens.tolist() for ids, tokens in zip(talk.prompts, out.tokens, strict=True)]
    longer = [text.before(out.tokens.shape[1]) for text in other]
    complete(model, texts, FEW, group=1, stream=TorchGenerator(0), images=longer, turns=turns)
    assert not talk.steps
