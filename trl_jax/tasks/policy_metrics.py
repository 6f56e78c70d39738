"""TRL's metrics of a policy's loss, of the sums that `losses.policy_gradient` returns. On the host, float64."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from trl_jax.losses.policy_gradient.settings import CLIPPED, PER_GENERATION, PolicyLoss
from trl_jax.tasks.metrics import joined

Sums = dict[str, np.ndarray]
_JOINS = {"low_min": np.min, "high_max": np.max}  # the others are added
_OF_STEPS = {"loss", "grad_norm", "updated", "aux_loss", "aux_loss_examples"}  # beside the sums of a policy's loss


def grpo_metrics(settings: PolicyLoss, sums: Sequence[Sums]) -> dict[str, np.ndarray]:
    """The metrics of each micro-batch, `[M]` by TRL's names and in its order; NaN where nothing counts.

    Args:
        sums: of `grpo_loss`, of steps, `[passes, micro-batches]` each, or of the batches of an evaluation.
    """
    totals = _totals(sums)
    return dict(_grpo(settings, totals)) if totals else {}


def rloo_metrics(sums: Sequence[Sums]) -> dict[str, np.ndarray]:
    """The same of `rloo_loss`."""
    totals = _totals(sums)
    if not totals:
        return {}
    entropy = {"entropy": totals["entropy"] / np.maximum(totals["tokens"], 1)}
    clipped = dict(_clipped(totals, totals["completions"]))
    names = ("low_mean", "low_min", "high_mean", "high_max", "region_mean")
    return entropy | {f"clip_ratio/{name}": clipped[f"clip_ratio/{name}"] for name in names}


def means(metrics: dict[str, np.ndarray]) -> dict[str, float | None]:
    """The mean of each over the micro-batches where it is not NaN; None without any."""
    real = {name: values[~np.isnan(values)] for name, values in metrics.items()}
    return {name: float(values.mean()) if len(values) else None for name, values in real.items()}


def _totals(sums: Sequence[Sums]) -> Sums:
    """The sums of all micro-batches that have a completion, `[M]`; nothing where there is none."""
    names = [name for name in (sums[0] if sums else ()) if name not in _OF_STEPS]
    totals = joined(sums, {name: _JOINS.get(name, np.sum) for name in names}, count="completions") if names else {}
    return totals if names and totals["completions"].size else {}


def _grpo(settings: PolicyLoss, totals: Sums) -> Iterator[tuple[str, np.ndarray]]:
    tokens = np.maximum(totals["tokens"], 1)
    ratios = totals["completions"] if settings.of_sequences else tokens
    if "bonus_tokens" in totals:
        of_generation = settings.loss_type in PER_GENERATION
        yield "policy_loss", totals["policy_loss"] / (1 if of_generation else totals["completion_weight"])
    for name in ("kl", "entropy"):
        if name in totals:
            yield name, totals[name] / tokens
    if settings.loss_type in CLIPPED:
        yield from _clipped(totals, ratios)
    elif settings.loss_type == "cispo":
        yield "cispo_clip_ratio", totals["cispo_clipped"] / ratios
    elif settings.loss_type == "vespo":
        yield "vespo/phi_seq_mean", totals["phi"] / totals["completions"]


def _clipped(totals: Sums, ratios: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    yield "clip_ratio/low_mean", totals["clipped_low"] / ratios
    yield "clip_ratio/high_mean", totals["clipped_high"] / ratios
    yield "clip_ratio/region_mean", totals["clipped"] / ratios
    for name in ("low_min", "high_max"):
        yield f"clip_ratio/{name}", np.where(np.isinf(totals[name]), np.nan, totals[name])
