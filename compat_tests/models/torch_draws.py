"""Makes torch draw the random numbers that our layers draw."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np

_SELECTIONS, _INPUTS = (0, 1), (2, 3)  # numbers folded into the key by nn/moe.py


class TorchDraws:
    """A queue of arrays that torch's next draws return: `exponential_`, `rand_like` and `uniform_` between two
    bounds."""

    def __init__(self, monkeypatch):
        import torch

        self._queue: list[tuple[str, np.ndarray]] = []

        def taken(kind: str, shape: tuple[int, ...]) -> torch.Tensor:
            wanted, array = self._queue.pop(0)
            assert (kind, tuple(shape)) == (wanted, array.shape), (kind, shape, wanted, array.shape)
            return torch.tensor(array)

        def filled(kind: str) -> Callable:
            return lambda tensor, *bounds: tensor.copy_(taken(f"{kind}{list(bounds) if bounds else ''}", tensor.shape))

        monkeypatch.setattr(torch.Tensor, "exponential_", filled("exponential"))
        monkeypatch.setattr(torch.Tensor, "uniform_", filled("uniform"))
        monkeypatch.setattr(torch, "rand_like", lambda tensor: taken("rand", tensor.shape))

    @property
    def used_up(self) -> bool:
        return not self._queue

    def of_sparse_mixer(self, key: jax.Array, shape: tuple[int, int]) -> None:
        """Queue the draws with which a sparse mixer selects two experts from scores of this shape."""
        for place in _SELECTIONS:
            gumbel, uniform = (jax.random.fold_in(jax.random.fold_in(key, place), number) for number in (0, 1))
            gumbel = np.asarray(jax.random.gumbel(gumbel, shape, np.float32))
            self._queue.append(("exponential", np.exp(-gumbel)))
            uniform = np.asarray(jax.random.uniform(uniform, (shape[0], 1)))
            # for the second expert, transformers draws twice and uses the second draw
            self._queue += [("rand", uniform)] if place == _SELECTIONS[0] else [("rand", uniform), ("uniform", uniform)]

    def of_jittered_input(self, key: jax.Array, shape: tuple[int, int, int], jitter: float) -> None:
        """Queue the factors on the experts' input `[R, T, D]`."""
        low, high = 1.0 - jitter, 1.0 + jitter
        for place, as_drawn in zip(_INPUTS, (shape, (shape[0] * shape[1], shape[2])), strict=True):
            factors = jax.random.uniform(jax.random.fold_in(key, place), shape, np.float32, low, high)
            self._queue.append((f"uniform{[low, high]}", np.asarray(factors).reshape(as_drawn)))
