"""Which layout a run takes and which lengths its packed rows have: from how long the texts are. Pure NumPy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from datasets import Dataset

from trl_jax.data.layout.buckets import (
    EARLY,
    Buckets,
    ViewBuckets,
    compiled_while_training,
    fitted,
    rounded,
    without_late,
)  # fmt: skip
from trl_jax.data.layout.survey import SURVEYED, survey

_EPOCHS = 8  # at most
_PLACE = 0.1  # what a token's place in a row costs of what the token does: it is copied there and back, not computed


@dataclass(frozen=True)
class LayoutPlan:
    """A layout, the lengths of its packed rows, and means over steps: tokens that TRL pads to, real, computed ones.

    views: in place of the buckets where texts in packed rows are viewed as rows, too.
    """

    layout: str
    buckets: Buckets = Buckets()
    padded: float = 0.0
    real: float = 0.0
    computed: float = 0.0
    views: ViewBuckets | None = None


def plan_layout(
    dataset: Dataset,
    columns: tuple[str, ...],
    order_of: Callable[[int], np.ndarray],
    layout: str,
    *,
    batch_size: int,
    accumulation: int,
    bucket_cost: int,
    run_steps: int,
    by_micro_batch: bool = False,
    by_rows: bool = False,
    at_once: int | None = None,
    documents: str | None = None,
    virtual: int = 0,
) -> LayoutPlan:
    """How steps lie as packed rows, from those of the first epochs: another order may make a longer one.

    Args:
        columns: the token columns of the dataset, a text each.
        order_of: from an epoch to the order of its examples.
        bucket_cost: what a compilation costs, in tokens of a packed row.
        run_steps: how many steps the run has, over which that is paid.
        by_micro_batch: whether each micro-batch has a packed row to itself.
        by_rows: texts are viewed as rows, too.
        at_once: how many programs are compiled at a time beside the steps; None where steps wait for theirs.
        documents, virtual: as of `survey`.
    """
    first = order_of(0)
    known, steps = survey(dataset, first, columns, documents, virtual), []
    epochs = max(1, min(_EPOCHS, SURVEYED // len(first)))
    place = np.argsort(first)
    for epoch in range(epochs):
        part = known if epoch == 0 else known.visited(place[order_of(epoch)])
        steps += part.steps(batch_size, accumulation, layout, by_micro_batch=by_micro_batch)
    padded, real, lengths, texts = (np.asarray(column) for column in zip(*steps, strict=True))
    cost = int(bucket_cost * len(lengths) / max(1, run_steps))
    buckets = rounded(without_late(fitted(lengths, cost), lengths), lengths, cost)
    found, views = [buckets(int(length)) for length in lengths], None
    if by_rows:
        views = _views(buckets, lengths, texts, cost, rows=len(columns) * batch_size)
        found = [views(*map(int, step))[0] for step in zip(lengths, texts, strict=True)]
    elif at_once is not None:
        buckets = compiled_while_training(buckets, lengths, bucket_cost, at_once)
    computed = float(accumulation * np.mean(found))
    return LayoutPlan(layout, buckets, float(padded.mean()), float(real.mean()), computed, views)


def _views(
    buckets: Buckets, lengths: Sequence[int], texts: Sequence[int], bucket_cost: int, rows: int
) -> ViewBuckets:
    """Those that early steps take, and the largest: a further length of rows may compile with each packed row's."""
    of_rows = fitted(texts, int(bucket_cost * len(buckets.lengths) / (_PLACE * rows)))
    early = zip(lengths[:EARLY], texts[:EARLY], strict=True)
    shapes = {(buckets(int(length)), of_rows(int(text))) for length, text in early}
    return ViewBuckets(tuple(sorted(shapes | {(buckets.lengths[-1], of_rows.lengths[-1])})))
