"""What `eval_report=True` adds to an evaluation: accuracy of each subset, calibration, and a picture of the margins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

_BINS = 10
_WIDTH, _HEIGHT, _BARS = 480, 200, 24


def report(
    margins: np.ndarray, subsets: list[Any] | None, *, prefix: str, folder: Path
) -> dict[str, float]:
    """Metrics of an evaluation's pairs; writes `<prefix>_margins.svg` into the folder.

    Args:
        margins: `[N]`, chosen score less rejected score.
        subsets: to which part of the evaluation set each pair belongs; None where it has no parts.

    Returns:
        `ece`; with subsets `accuracy_<subset>` of each and `accuracy_of_subsets`, their mean, as RewardBench reports.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{prefix}_margins.svg").write_text(histogram(margins), encoding="utf-8")
    found = {"ece": calibration_error(margins)}
    if subsets is not None:
        names = np.asarray(list(map(str, subsets)))
        parts = {name: float(np.mean(margins[names == name] > 0)) for name in sorted(set(names))}
        found |= {f"accuracy_{name}": value for name, value in parts.items()}
        found["accuracy_of_subsets"] = float(np.mean(list(parts.values())))
    return found


def calibration_error(margins: np.ndarray) -> float:
    """Expected calibration error (Guo et al. 2017, arXiv:1706.04599, equation 3) in ten bins from 0.5 to 1.

    A Bradley-Terry model is sigmoid(|margin|) sure of the answer it prefers.
    """
    sure, right = 1 / (1 + np.exp(-np.abs(margins))), margins > 0
    bins = np.minimum(((sure - 0.5) * 2 * _BINS).astype(int), _BINS - 1)
    gaps = [abs(np.mean(sure[bins == b]) - np.mean(right[bins == b])) * np.mean(bins == b) for b in np.unique(bins)]
    return float(sum(gaps))


def histogram(margins: np.ndarray) -> str:
    """SVG: how many pairs have which margin; those that the model gets wrong stand left of zero, in red."""
    edge = float(np.max(np.abs(margins))) or 1.0
    counts, edges = np.histogram(margins, bins=_BARS, range=(-edge, edge))
    width, most = _WIDTH / _BARS, max(counts.max(), 1)
    bars = [
        f'<rect x="{i * width:.1f}" y="{_HEIGHT - count * _HEIGHT / most:.1f}" width="{width - 1:.1f}" '
        f'height="{count * _HEIGHT / most:.1f}" fill="{"#c44" if edges[i + 1] <= 1e-12 else "#48a"}"/>'
        for i, count in enumerate(counts)
    ]
    words = [
        f'<text x="{x}" y="{_HEIGHT + 16}" text-anchor="{anchor}">{text}</text>'
        for x, anchor, text in (
            (0, "start", f"{-edge:.2f}"),
            (_WIDTH / 2, "middle", f"margin of {len(margins)} pairs, {np.mean(margins > 0):.1%} above 0"),
            (_WIDTH, "end", f"{edge:.2f}"),
        )
    ]
    size = f'width="{_WIDTH}" height="{_HEIGHT + 24}" font-family="sans-serif" font-size="12"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{"".join(bars)}{"".join(words)}</svg>\n'
