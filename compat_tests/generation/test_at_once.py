"""Generating a few completions at a time gives the same completions as all at once, with a smaller cache."""

from __future__ import annotations

import gc

import jax
import numpy as np
import pytest

from compat_tests.effort import only_thorough
from compat_tests.hub.vision.test_generate import inputs
from compat_tests.models import causal
from compat_tests.trainer.vision_models import tiny_qwen
from trl_jax.core.torch_random import TorchGenerator
from trl_jax.generation import decode, generator
from trl_jax.generation.generator import Lengths, Limit, Queue, cache_bytes, queue_of
from trl_jax.generation.weights import Weights
from trl_jax.hub.auto import AutoModelForCausalLM, AutoModelForImageTextToText
from trl_jax.hub.generate import complete
from trl_jax.hub.vision.processor import images_of_rows, split_images
from trl_jax.nn.cache import grown_ring

NEW, PROMPTS, GROUP = 40, 16, 4
OPTIONS = {"max_new_tokens": NEW, "do_sample": True, "pad_token_id": 0, "eos_token_id": list(range(5, 500, 40))}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = causal.build(tmp_path_factory.mktemp("qwen3"), "qwen3", tie=False, num_hidden_layers=1)
    return AutoModelForCausalLM.from_pretrained(folder)


@pytest.fixture(scope="module")
def prompts():
    dice = np.random.default_rng(0)
    return [dice.integers(5, 500, length).tolist() for length in dice.integers(1, 30, PROMPTS)]


class Caches:
    """Records the bytes of the cache after each decoding call; and after each copy of a cache array, the bytes of all
    live arrays and those of the larger one."""

    def __init__(self, monkeypatch):
        self.begin()
        monkeypatch.setattr(generator, "next_tokens", self.around(generator.next_tokens, self.decoded))
        for name in ("_grown_ring", "_selected_array"):
            monkeypatch.setattr(decode, name, self.around(getattr(decode, name), self.copied))

    def begin(self):
        self.sizes, self.alive = [], []
        gc.collect()
        self.others = jax.live_arrays()  # left over from earlier tests

    def around(self, function, see):
        def called(*given, **options):
            found = function(*given, **options)
            see(given, found)
            return found

        return called

    def decoded(self, given, found):
        self.sizes.append(sum(leaf.nbytes for leaf in jax.tree.leaves(found[0].cache.parts)))

    def copied(self, given, new):
        if new.ndim >= 4:
            gc.collect()
            others = set(map(id, self.others))
            alive = [array.nbytes for array in jax.live_arrays() if array.ndim >= 4 and id(array) not in others]
            self.alive.append((sum(alive), max(given[0].nbytes, new.nbytes)))


@pytest.fixture
def caches(monkeypatch):
    return Caches(monkeypatch)


def completed(model, prompts, limit, **options):
    stream = TorchGenerator(7)
    done = complete(model, prompts, OPTIONS | options, group=GROUP, stream=stream, limit=limit)
    return done, stream.words(5).tolist()


def test_64_completions_16_at_a_time(model, prompts, caches):
    """The tokens of torch's random stream, and its position afterwards, with a quarter of the cache."""
    whole, after = completed(model, prompts, Limit())
    lengths = whole.lengths.tolist()
    assert len({*lengths}) > 10 and lengths.count(NEW) > 10 and min(lengths) < 8
    biggest = max(caches.sizes)
    weights = Weights.of(model.graph, model.arrays)
    assert biggest == cache_bytes(weights, PROMPTS, GROUP, Lengths(32, 64, 96))
    assert all(alive <= biggest + one for alive, one in caches.alive)

    caches.begin()
    found, after_queue = completed(model, prompts, Limit(16))
    np.testing.assert_array_equal(found.tokens, whole.tokens)
    np.testing.assert_array_equal(found.lengths, whole.lengths)
    np.testing.assert_allclose(found.logps, whole.logps, rtol=1e-6)
    assert after_queue == after
    assert max(caches.sizes) == biggest / 4
    assert caches.alive and all(alive <= biggest / 4 + one for alive, one in caches.alive)


def test_as_many_as_fit(model):
    """All at once if it fits exactly; otherwise as many slots as fit, with one completion each if prompts are short."""
    weights, short, long = Weights.of(model.graph, model.arrays), Lengths(32, 1024, 1056), Lengths(1024, 64, 1088)

    def queue(lengths, limit, group=8):
        return queue_of(weights, 8, group, lengths, limit)

    for lengths, size in ((short, 1), (long, 8)):
        whole = cache_bytes(weights, 8, 8, lengths)
        enough = int(-(-whole // generator.SHARE))
        assert queue(lengths, Limit(None, enough)) is None
        slot = cache_bytes(weights, 1, size, lengths)
        assert queue(lengths, Limit(None, enough - 1)) == Queue(int(generator.SHARE * (enough - 1) // slot), 8 // size)
        assert queue(lengths, Limit(None, int(2.5 * slot / generator.SHARE))) == Queue(2, 8 // size)
        assert queue(lengths, Limit(None, 0)) == Queue(1, 8)
    assert queue(long, Limit(None, int(cache_bytes(weights, 1, 4, long) * 1.1 / generator.SHARE))) == Queue(1, 2)
    assert queue(short, Limit()) is None and queue(short, Limit(64)) is None
    assert queue(short, Limit(63)) == Queue(63, 8) and queue(long, Limit(63)) == Queue(7, 1)
    assert queue(long, Limit(7)) == Queue(1, 2) and queue(long, Limit(1, 10**15)) == Queue(1, 8)


@pytest.mark.parametrize("written", [3, 10, 29, 64])
@pytest.mark.parametrize(("places", "size"), [(10, 20), (10, 13), (8, 32), (9, 9)])
def test_a_ring_grows(places, size, written):
    """The last tokens, which are in the smaller ring, get their positions in the larger one."""
    steps = np.arange(max(written - places, 0), written)
    ring, expected = np.full(places, -1), np.full(size, -1)
    ring[steps % places], expected[steps % size] = steps, steps
    found = np.asarray(grown_ring(ring[None], np.int32(written), 1, size))[0]
    np.testing.assert_array_equal(found[steps % size], expected[steps % size])


def with_pictures(model, folder):
    """Token ids of a prompt with an image and of one without, and their images."""
    arrays, others = split_images(model, {name: np.asarray(value) for name, value in inputs(folder, (1, 0)).items()})
    masks = others["attention_mask"].astype(bool)
    rows = [ids[mask].astype(np.int32) for ids, mask in zip(others["input_ids"], masks, strict=True)]
    return rows, images_of_rows(model, rows, arrays)


@only_thorough
def test_prompts_with_images(tmp_path):
    """The images and positions of prompts move into the slots with them."""
    model = AutoModelForImageTextToText.from_pretrained(tiny_qwen(tmp_path))
    rows, images = with_pictures(model, tmp_path)
    options = OPTIONS | {"max_new_tokens": 8, "eos_token_id": list(range(1, 500, 3))}
    whole, found = (
        complete(model, rows, options, group=2, stream=TorchGenerator(1), images=images, limit=limit)
        for limit in (Limit(None, 10**9), Limit(2))
    )
    assert len({*whole.lengths.tolist()}) > 1
    np.testing.assert_array_equal(found.tokens, whole.tokens)
    np.testing.assert_allclose(found.logps, whole.logps, rtol=1e-6, atol=1e-6)
