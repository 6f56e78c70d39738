import numpy as np
import pytest

from trl_jax.core.torch_random import TorchGenerator

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("count", [0, 1, 2, 3, 17, 2000, 60_000])
@pytest.mark.parametrize("seed", [0, 42, 2**32 + 5])
def test_permutation_is_torchs(count, seed):
    expected = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).numpy()
    np.testing.assert_array_equal(TorchGenerator(seed).permutation(count), expected)


@pytest.mark.parametrize("count", [1, 2, 7, 15, 16, 17, 31, 48, 64, 577, 4096])
@pytest.mark.parametrize("seed", [0, 42, 123456789])
def test_normal_is_torchs_to_the_ulp(count, seed):
    expected = torch.empty(count).normal_(0, 0.02, generator=torch.Generator().manual_seed(seed)).numpy()
    one_ulp = np.spacing(np.float32(0.02))  # an ulp of the scale: where a cosine is near 0 its own ulp is finer
    np.testing.assert_allclose(TorchGenerator(seed).normal(count, 0.02), expected, rtol=2.4e-7, atol=one_ulp)


def test_a_second_draw_continues_the_stream():
    generator, torch_generator = TorchGenerator(3), torch.Generator().manual_seed(3)
    for count in (10, 5, 100):
        expected = torch.randperm(count, generator=torch_generator).numpy()
        np.testing.assert_array_equal(generator.permutation(count), expected)


def test_a_dataset_too_long_to_shuffle_is_refused():
    with pytest.raises(ValueError, match=r"at most 214,748,363 rows, got 300,000,000.*sequential"):
        TorchGenerator(0).permutation(300_000_000)
