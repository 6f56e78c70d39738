"""torch's stream of random numbers: its place that transformers' Trainer keeps in a checkpoint, and its seed."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from trl_jax.core.torch_random import GeneratorState

_WORDS, _LEFT, _NEXT, _FIRST = 624, 8, 16, 24  # of the twister, and where torch's generator has them, in bytes


def random_state(checkpoint: Path, rank: int, ranks: int) -> GeneratorState | None:
    """That of one of so many processes, of torch's generator on the CPU; None where its file is not there."""
    path = checkpoint / ("rng_state.pth" if ranks == 1 else f"rng_state_{rank}.pth")
    if not path.is_file():
        return None
    import torch
    from transformers.trainer_pt_utils import safe_globals

    with safe_globals():
        return place_of(torch.load(path, weights_only=True)["cpu"].numpy())


def seed_if_imported(seed: int) -> None:
    """Seed torch's generators where a script has imported torch, and may draw from them."""
    if "torch" in sys.modules:
        import torch

        torch.manual_seed(seed)


def place_of(state: np.ndarray) -> GeneratorState:
    """Of what `torch.get_rng_state()` gives, uint8 `[5056]`."""
    raw = state.tobytes()
    key = np.frombuffer(raw, np.uint64, _WORDS, _FIRST).astype(np.uint32)
    [left], [used] = np.frombuffer(raw, np.int32, 1, _LEFT), np.frombuffer(raw, np.uint64, 1, _NEXT)
    return GeneratorState(key, _WORDS if left == 1 else int(used), 0)
