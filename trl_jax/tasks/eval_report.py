"""What `eval_report=True` adds to an evaluation of pairs: accuracy by subset, calibration, a histogram of margins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from trl_jax.core.files import write_whole

_BINS = 10
_WIDTH, _HEIGHT, _BARS = 480, 200, 24


def report(margins: np.ndarray, subsets: list[Any] | None, *, prefix: str, folder: Path) -> dict[str, float]:
    """Compute metrics of an evaluation's pairs, and write `<prefix>_margins.svg` to the folder if any margin is finite.

    Args:
        margins: `[N]`, chosen score minus rejected score.
        subsets: `[N]`, the subset of each pair; None if there are no subsets.

    Returns:
        `ece` and, with subsets, `accuracy_<subset>` of each and their mean `accuracy_of_subsets`, as in RewardBench.
    """
    folder.mkdir(parents=True, exist_ok=True)
    finite = margins[np.isfinite(margins)]
    if len(finite):
        write_whole(folder / f"{prefix}_margins.svg", histogram(finite))
    metrics = {"ece": calibration_error(margins)}
    if subsets is not None:
        names = np.asarray(list(map(str, subsets)))
        parts = {name: float(np.mean(margins[names == name] > 0)) for name in sorted(set(names))}
        metrics |= {f"accuracy_{name}": value for name, value in parts.items()}
        metrics["accuracy_of_subsets"] = float(np.mean(list(parts.values())))
    return metrics


def calibration_error(margins: np.ndarray) -> float:
    """Expected calibration error (Guo et al. 2017, arXiv:1706.04599, equation 3) in ten bins from 0.5 to 1.

    The confidence of a Bradley-Terry model in the completion it prefers is sigmoid(|margin|).

    Args:
        margins: `[N]`; a NaN among them makes the result NaN.
    """
    if np.isnan(margins).any():
        return float("nan")
    confidence, right = 1 / (1 + np.exp(-np.abs(margins))), margins > 0
    bins = np.minimum(((confidence - 0.5) * 2 * _BINS).astype(int), _BINS - 1)
    gaps = [
        abs(np.mean(confidence[bins == b]) - np.mean(right[bins == b])) * np.mean(bins == b) for b in np.unique(bins)
    ]
    return float(sum(gaps))


def histogram(margins: np.ndarray) -> str:
    """A histogram of finite margins `[N]`, N > 0, as SVG; negative margins (wrong pairs) are red."""
    edge = float(np.max(np.abs(margins))) or 1.0
    counts, edges = np.histogram(margins, bins=_BARS, range=(-edge, edge))
    width, highest = _WIDTH / _BARS, max(counts.max(), 1)
    bars = [
        f'<rect x="{i * width:.1f}" y="{_HEIGHT - count * _HEIGHT / highest:.1f}" width="{width - 1:.1f}" '
        f'height="{count * _HEIGHT / highest:.1f}" fill="{"#c44" if edges[i + 1] <= 1e-12 else "#48a"}"/>'
        for i, count in enumerate(counts)
    ]
    labels = [
        f'<text x="{x}" y="{_HEIGHT + 16}" text-anchor="{anchor}">{text}</text>'
        for x, anchor, text in (
            (0, "start", f"{-edge:.2f}"),
            (_WIDTH / 2, "middle", f"margin of {len(margins)} pairs, {np.mean(margins > 0):.1%} above 0"),
            (_WIDTH, "end", f"{edge:.2f}"),
        )
    ]
    size = f'width="{_WIDTH}" height="{_HEIGHT + 24}" font-family="sans-serif" font-size="12"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{"".join(bars)}{"".join(labels)}</svg>\n'
