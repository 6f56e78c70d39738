"""Choose the lengths of packed rows from the text lengths of a dataset. Pure NumPy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from datasets import Dataset

from trl_jax.core.outputs import BLOCK
from trl_jax.data.checks import blocks, list_lengths
from trl_jax.data.packed import greedy_bins

# Buckets

EARLY = 100  # steps during which a run may compile
_LEAST_ROW = 256
_LONGEST_ROUND = 2048
_ONE_IN = 4  # a length is rounded up if the padding costs at most 1/_ONE_IN of a compilation


@dataclass(frozen=True)
class Buckets:
    """The lengths that packed rows may have; each is compiled once.

    Beyond the last of `lengths`, or if it is empty, lengths grow by 128 tokens, and from about 2,000 tokens by 6%.
    `serves_from` is the step of the run from which each length can be used; empty: all lengths from the first step.
    """

    lengths: tuple[int, ...] = ()
    serves_from: tuple[int, ...] = ()

    def __call__(self, tokens: int, step: int = EARLY) -> int:
        """The smallest length >= `tokens` available at this step; the smallest of all if none is available yet."""
        fitting = [index for index, length in enumerate(self.lengths) if tokens <= length]
        for index in fitting:
            if not self.serves_from or self.serves_from[index] <= step:
                return self.lengths[index]
        if fitting:
            return self.lengths[fitting[0]]
        length = 128
        while length < tokens:
            length = -(-max(length + 128, int(1.06 * length)) // 128) * 128
        return length


@dataclass(frozen=True)
class ViewBuckets:
    """The shapes that a run compiles if the texts of packed rows are also viewed as rows.

    Each of `shapes` is (length of packed rows, length of view rows). If none fits, the packed length comes from
    `Buckets()` and the view length is rounded up to a power of two.
    """

    shapes: tuple[tuple[int, int], ...] = ()

    def __call__(self, tokens: int, longest: int) -> tuple[int, int]:
        """The smallest shape for packed rows of `tokens` tokens and a longest text of `longest` tokens."""
        fitting = [shape for shape in self.shapes if tokens <= shape[0] and longest <= shape[1]]
        return min(fitting, default=(Buckets()(tokens), max(_LEAST_ROW, 1 << (longest - 1).bit_length())))


def fitted(lengths: Sequence[int], bucket_cost: int) -> Buckets:
    """The buckets that minimize the total number of tokens, padding included, plus `bucket_cost` per bucket.

    Solved by dynamic programming over the sorted lengths.
    """
    needed, counts = np.unique(-(-np.asarray(lengths) // BLOCK) * BLOCK, return_counts=True)
    below = np.concatenate([[0], np.cumsum(counts)])
    cheapest, previous = [0.0], [0]  # for the `end` shortest lengths: cost, and how many are in lower buckets
    for end in range(1, len(needed) + 1):
        # The longest bucket holds the lengths from `start` to `end`.
        costs = [cheapest[start] + (below[end] - below[start]) * needed[end - 1] + bucket_cost for start in range(end)]
        previous.append(int(np.argmin(costs)))
        cheapest.append(min(costs))
    lengths, end = [], len(needed)
    while end:
        lengths.append(int(needed[end - 1]))
        end = previous[end]
    return Buckets(tuple(reversed(lengths)))


def rounded(buckets: Buckets, lengths: Sequence[int], bucket_cost: int) -> Buckets:
    """Round bucket lengths up to 2^n or 3 * 2^n if the padding is cheap compared to a compilation, so that runs on
    other texts hit the compilation cache. Long rows are not rounded, to save memory."""
    counts = np.bincount(np.searchsorted(buckets.lengths, lengths), minlength=len(buckets.lengths))
    rounded_lengths = [_round(length) for length in buckets.lengths]
    return Buckets(tuple(sorted({
        longer if count * (longer - length) * _ONE_IN <= bucket_cost else length
        for length, longer, count in zip(buckets.lengths, rounded_lengths, counts, strict=True)
    })))  # fmt: skip


def _round(length: int) -> int:
    if length > _LONGEST_ROUND:
        return length
    power = 1 << (length - 1).bit_length()
    return power * 3 // 4 if length <= power * 3 // 4 and power * 3 // 4 % BLOCK == 0 else power


def without_late(buckets: Buckets, lengths: Sequence[int]) -> Buckets:
    """Keep the buckets that early steps use and the longest one, so that nothing compiles late in the run."""
    early = {buckets(int(length)) for length in lengths[:EARLY]} | {*buckets.lengths[-1:]}
    return Buckets(tuple(length for length in buckets.lengths if length in early))


def compiled_while_training(buckets: Buckets, lengths: Sequence[int], bucket_cost: int, at_once: int) -> Buckets:
    """The buckets of a run that compiles in the background, `at_once` programs at a time, in order of first use.

    Until a length is compiled, the next longer one is used. The step from which a length is available is estimated from
    token counts rather than measured, so that results are reproducible, also after resuming.
    """
    step_lengths = [buckets(int(length)) for length in lengths[:EARLY]]
    tokens_before, serves_from = np.cumsum([0, *step_lengths]), {}
    for index, length in enumerate(dict.fromkeys(step_lengths)):
        serves_from[length] = min(EARLY, int(np.searchsorted(tokens_before, index // at_once * bucket_cost)))
    for step, length in enumerate(step_lengths):
        if not any(available >= length and serves_from[available] <= step for available in serves_from):
            serves_from[length] = step  # training waits for this compilation
    return Buckets(buckets.lengths, tuple(serves_from.get(length, EARLY) for length in buckets.lengths))


# Layout plans

_EPOCHS = 8  # maximum number of epochs to simulate
_PLACE = 0.1  # cost of a padding token in a view row relative to a computed token, because it is only copied


@dataclass(frozen=True)
class LayoutPlan:
    """A layout with the lengths of its packed rows.

    padded, real, computed: mean tokens per step: with TRL's padding, without padding, and in this layout.
    views: replaces `buckets` if the texts of packed rows are also viewed as rows.
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
    whole_micro_batches: bool = False,
    by_rows: bool = False,
    at_once: int | None = None,
    documents: str | None = None,
    virtual: int = 0,
) -> LayoutPlan:
    """Plan the lengths of packed rows by simulating the steps of the first epochs, each with its own order.

    Args:
        columns: the token columns of the dataset, one per text.
        order_of: maps an epoch to the order of its examples.
        bucket_cost: cost of a compilation, in tokens of a packed row.
        run_steps: number of steps in the run, over which compilations are amortized.
        whole_micro_batches: whether each micro-batch has its own packed row.
        by_rows: whether the texts of packed rows are also viewed as rows.
        at_once: number of programs compiled concurrently in the background; None if steps wait for compilation.
        documents, virtual: see `survey`.
    """
    first = order_of(0)
    survey_of_epoch = survey(dataset, first, columns, documents, virtual)
    survey_index = np.argsort(first)  # row -> its index in the survey
    steps = []
    for epoch in range(max(1, min(_EPOCHS, SURVEYED // len(first)))):
        examples = survey_of_epoch if epoch == 0 else survey_of_epoch.visited(survey_index[order_of(epoch)])
        steps += examples.steps(batch_size, accumulation, layout, whole_micro_batches=whole_micro_batches)
    sizes = StepSize(*(np.asarray(column) for column in zip(*steps, strict=True)))
    cost = int(bucket_cost * len(steps) / max(1, run_steps))
    buckets, views = rounded(without_late(fitted(sizes.packed, cost), sizes.packed), sizes.packed, cost), None
    computed = [buckets(int(length)) for length in sizes.packed]
    if by_rows:
        views = _views(buckets, sizes.packed, sizes.text, cost, rows=len(columns) * batch_size)
        computed = [views(int(step.packed), int(step.text))[0] for step in steps]
    elif at_once is not None:
        buckets = compiled_while_training(buckets, sizes.packed, bucket_cost, at_once)
    return LayoutPlan(
        layout,
        buckets,
        padded=float(sizes.padded.mean()),
        real=float(sizes.real.mean()),
        computed=float(accumulation * np.mean(computed)),
        views=views,
    )


def _views(buckets: Buckets, lengths: Sequence[int], texts: Sequence[int], bucket_cost: int, rows: int) -> ViewBuckets:
    """The shapes that early steps use, and the largest one. A view length may be compiled once per packed length."""
    view_buckets = fitted(texts, int(bucket_cost * len(buckets.lengths) / (_PLACE * rows)))
    early = zip(lengths[:EARLY], texts[:EARLY], strict=True)
    shapes = {(buckets(int(length)), view_buckets(int(text))) for length, text in early}
    return ViewBuckets(tuple(sorted(shapes | {(buckets.lengths[-1], view_buckets.lengths[-1])})))


# Text lengths and shared prefixes of a dataset

SURVEYED = 16_384  # number of examples to measure, over several epochs if the dataset is smaller


class StepSize(NamedTuple):
    """Token counts of one step: with TRL's padding, without padding, in the longest packed row, in the longest text."""

    padded: int
    real: int
    packed: int
    text: int


@dataclass(frozen=True)
class Survey:
    """Token counts of examples in training order: `[n, texts]` per text, and `[n]` of the shared prefix."""

    texts: np.ndarray
    shared: np.ndarray

    def visited(self, order: np.ndarray) -> Survey:
        return Survey(self.texts[order], self.shared[order])

    def steps(
        self, batch_size: int, accumulation: int, layout: str, *, whole_micro_batches: bool = False
    ) -> list[StepSize]:
        """The sizes of each step.

        Args:
            whole_micro_batches: whether each micro-batch has its own packed row.
        """
        tokens, longest = self.texts.sum(axis=1), self.texts.max(axis=1)
        packed = tokens - self.shared if layout == "shared" else tokens
        steps, size = [], batch_size * accumulation
        for start in range(0, len(tokens), size):
            step = slice(start, start + size)
            costs = packed[step].tolist()
            row_of = np.arange(len(costs)) // batch_size if whole_micro_batches else greedy_bins(costs, accumulation)
            longest_texts = np.split(longest[step], range(batch_size, len(costs), batch_size))  # by micro-batch
            steps.append(
                StepSize(
                    padded=sum(self.texts.shape[1] * len(rows) * int(rows.max()) for rows in longest_texts),
                    real=int(tokens[step].sum()),
                    packed=int(np.bincount(row_of, costs).max()),
                    text=int(longest[step].max()),
                )
            )
        return steps


def survey(
    dataset: Dataset, order: np.ndarray, columns: tuple[str, ...], documents: str | None = None, virtual: int = 0
) -> Survey:
    """Measure the examples of a prepared dataset at the indices `order`; `columns` are its token columns.

    Args:
        documents: the column with the document lengths of the only text; may be missing from the dataset.
        virtual: number of virtual tokens added before each text, or document.
    """
    lengths, shared, documents = [], [], documents if documents in dataset.column_names else None
    for _, block in blocks(dataset.select(order[:SURVEYED]), columns if documents is None else (*columns, documents)):
        texts = [list_lengths(block, column) for column in columns]
        num_documents = 1 if documents is None else list_lengths(block, documents)[1][:, None]
        lengths.append(np.stack([text_lengths for _, text_lengths in texts], axis=1) + virtual * num_documents)
        shared.append(_shared(*texts) + virtual if len(texts) == 2 else np.zeros(block.num_rows, np.int64))
    return Survey(np.concatenate(lengths), np.concatenate(shared))


def _shared(first: tuple[np.ndarray, np.ndarray], second: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    """Vectorized `packed.shared_tokens`; each text is (concatenated ids, length of each row)."""
    limit = np.minimum(first[1], second[1]) - 1
    starts = np.cumsum(limit) - limit
    offsets = np.arange(limit.sum()) - np.repeat(starts, limit)
    texts = first, second
    ids, other_ids = (ids[np.repeat(np.cumsum(lengths) - lengths, limit) + offsets] for ids, lengths in texts)
    shared, nonempty = limit.copy(), limit > 0
    if nonempty.any():
        differing = np.where(ids == other_ids, np.iinfo(np.int64).max, offsets)
        shared[nonempty] = np.minimum(np.minimum.reduceat(differing, starts[nonempty]), limit[nonempty])
    return shared
