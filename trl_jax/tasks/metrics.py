"""From the sums that losses return to the numbers that are logged."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np


def joined(
    batches: Sequence[Mapping[str, np.ndarray]], joins: Mapping[str, Callable], count: str
) -> dict[str, np.ndarray]:
    """The sums of all micro-batches that had an example, `[micro-batches]` each, in float64.

    A step gives `[passes, micro-batches]`: where micro-batches were laid out together, a pass has a part of each. A
    batch of an evaluation gives single numbers.

    Args:
        batches: sums by name, of each step or batch.
        joins: how the parts of a micro-batch become one, np.sum or np.min, by the name of a sum.
        count: the name of the sum that counts examples.
    """
    found = {
        name: np.concatenate([join(np.atleast_2d(batch[name]).astype(np.float64), axis=0) for batch in batches])
        for name, join in joins.items()
    }
    real = found[count] > 0
    return {name: values[real] for name, values in found.items()}
