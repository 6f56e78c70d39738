"""The random stream of the process, from which tokens are sampled where no seed is given."""

from __future__ import annotations

import random
import secrets

import numpy as np

from trl_jax.core.torch_random import TorchGenerator

_default = TorchGenerator(secrets.randbits(64))  # as torch's: another in each process until a seed is set


def default_generator() -> TorchGenerator:
    """The process's stream; whoever draws from it goes on where the last one stopped."""
    return _default


def set_seed(seed: int) -> None:
    """Seed `random`, NumPy and the process's stream, as `transformers.set_seed` seeds `random`, NumPy and torch.

    `generate` then samples the tokens that transformers samples after its `set_seed`. torch itself is left alone.
    """
    random.seed(seed)
    np.random.seed(seed)
    _default.manual_seed(seed)
