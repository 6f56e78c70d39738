"""Rewards for the length and the repetitiveness of a completion."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RepetitionPenalty:
    """`max_penalty` times the fraction of repeated n-grams of token ids.

    Yeo et al. 2025, "Demystifying Long Chain-of-Thought Reasoning", appendix C.2 (arXiv:2502.03373).
    """

    ngram_size: int
    max_penalty: float
    __name__ = "repetition_penalty_reward"

    def __call__(self, completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        return [self._penalty(ids) for ids in completion_ids]

    def _penalty(self, ids: list[int]) -> float:
        ngrams = [tuple(ids[i : i + self.ngram_size]) for i in range(len(ids) - self.ngram_size + 1)]
        repeated = 1 - len(set(ngrams)) / len(ngrams) if ngrams else 0
        return repeated * self.max_penalty if repeated else 0.0


def get_repetition_penalty_reward(ngram_size: int = 3, max_penalty: float = -1.0) -> RepetitionPenalty:
    """Make a reward function of token ids; `max_penalty` must be at most 0."""
    if max_penalty > 0:
        raise ValueError(f"max_penalty={max_penalty} is above 0, which would reward repetition. Pass 0 or less.")
    return RepetitionPenalty(ngram_size, max_penalty)


@dataclass(frozen=True)
class SoftOverlongPunishment:
    """0 up to `max_completion_len - soft_punish_cache` tokens, then linear down to -1 at `max_completion_len`.

    DAPO, arXiv:2503.14476, equation 13.
    """

    max_completion_len: int
    soft_punish_cache: int
    __name__ = "soft_overlong_punishment_reward"

    def __call__(self, completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        return [self._punishment(len(ids)) for ids in completion_ids]

    def _punishment(self, length: int) -> float:
        free = self.max_completion_len - self.soft_punish_cache
        if length <= free:
            return 0.0
        return (free - length) / self.soft_punish_cache if length <= self.max_completion_len else -1.0


def get_soft_overlong_punishment(max_completion_len: int, soft_punish_cache: int) -> SoftOverlongPunishment:
    """Make a reward function of token ids."""
    return SoftOverlongPunishment(max_completion_len, soft_punish_cache)
