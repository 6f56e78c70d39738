import hashlib
import random

import numpy as np
import pytest

import trl_jax
from trl_jax.core.torch_random import TorchGenerator, default_generator

# Recorded with torch 2.13: seed, shape, digests of two tensors of exponential_(1), then randint(0, 2**20).
EXPONENTIALS = [
    (0, (1, 64), "6ece7fe8f1cc1d5c", "b1328b33fa5961f1", 74253),
    (42, (4, 500), "5106392db46144d3", "af11839b0df3f034", 938601),
    (123456789, (8, 32000), "4cb1c4ac721727ff", "39c9ddecca9c36e5", 986720),
    (2**32 + 5, (3, 7), "611b3bab982b9d29", "ac9ad0b4b64419a7", 522969),
]


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch")


def digest(array: np.ndarray) -> str:
    return hashlib.sha256(array.tobytes()).hexdigest()[:16]


@pytest.mark.parametrize("count", [0, 1, 2, 3, 17, 2000, 60_000])
@pytest.mark.parametrize("seed", [0, 42, 2**32 + 5])
def test_permutation_is_torchs(torch, count, seed):
    expected = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).numpy()
    np.testing.assert_array_equal(TorchGenerator(seed).permutation(count), expected)


@pytest.mark.parametrize("count", [1, 2, 7, 15, 16, 17, 31, 48, 64, 577, 4096])
@pytest.mark.parametrize("seed", [0, 42, 123456789])
def test_normal_is_torchs_to_the_ulp(torch, count, seed):
    expected = torch.empty(count).normal_(0, 0.02, generator=torch.Generator().manual_seed(seed)).numpy()
    one_ulp = np.spacing(np.float32(0.02))  # an ulp of the scale: where a cosine is near 0, its own ulp is finer
    np.testing.assert_allclose(TorchGenerator(seed).normal(count, 0.02), expected, rtol=2.4e-7, atol=one_ulp)


def test_a_second_draw_continues_the_stream(torch):
    generator, torch_generator = TorchGenerator(3), torch.Generator().manual_seed(3)
    for count in (10, 5, 100):
        expected = torch.randperm(count, generator=torch_generator).numpy()
        np.testing.assert_array_equal(generator.permutation(count), expected)


def test_a_dataset_too_long_to_shuffle_is_refused():
    with pytest.raises(ValueError, match=r"at most 214,748,363 rows, got 300,000,000.*sequential"):
        TorchGenerator(0).permutation(300_000_000)


@pytest.mark.parametrize(("seed", "shape", "first", "second", "after"), EXPONENTIALS)
def test_exponentials_are_those_recorded_of_torch(seed, shape, first, second, after):
    generator = TorchGenerator(seed)
    assert [digest(generator.exponential(np.prod(shape))) for _ in range(2)] == [first, second]
    assert generator.words(1)[0] % 2**20 == after
    assert generator.position == 4 * np.prod(shape) + 1


@pytest.mark.parametrize("shape", [(1, 64), (4, 500), (8, 32_000), (3, 151_936)])
@pytest.mark.parametrize("seed", [0, 42, 123456789, 2**32 + 5])
def test_exponentials_and_drawn_tokens_are_torchs(torch, seed, shape):
    generator, reference = TorchGenerator(seed), torch.Generator().manual_seed(seed)
    probabilities = torch.softmax(torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 3, -1)
    expected = torch.empty(shape).exponential_(1, generator=reference).numpy().reshape(-1)
    np.testing.assert_array_equal(generator.exponential(expected.size), expected)
    drawn = torch.multinomial(probabilities, 1, generator=reference)[:, 0].numpy()
    np.testing.assert_array_equal(generator.multinomial(probabilities.numpy()), drawn)
    np.testing.assert_array_equal(generator.permutation(9), torch.randperm(9, generator=reference).numpy())


def test_a_state_is_gone_back_to_and_words_are_left_out():
    generator = TorchGenerator(7)
    generator.words(1000)
    state, expected = generator.state(), generator.words(2_100_000)
    assert (state.position, generator.position) == (1000, 2_101_000)
    generator.restore(state)
    generator.skip(2_099_990)
    np.testing.assert_array_equal(generator.words(10), expected[-10:])
    elsewhere = TorchGenerator(0)
    elsewhere.restore(state)
    np.testing.assert_array_equal(elsewhere.words(500), expected[:500])


def test_set_seed_seeds_the_process():
    trl_jax.set_seed(11)
    first = (random.random(), np.random.rand(), default_generator().exponential(3).tolist())
    assert first[2] == TorchGenerator(11).exponential(3).tolist()
    default_generator().words(5)
    trl_jax.set_seed(11)
    assert first == (random.random(), np.random.rand(), default_generator().exponential(3).tolist())


def test_set_seed_seeds_as_transformers_does(torch):
    from transformers import set_seed

    drawn = []
    for seed in (set_seed, trl_jax.set_seed):
        seed(2**31 + 3)
        drawn.append((random.random(), np.random.rand()))
    assert drawn[0] == drawn[1]
    assert default_generator().exponential(4).tolist() == torch.empty(4).exponential_(1).tolist()
