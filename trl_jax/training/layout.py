"""Choose the memory layout of a run's examples: the requested one if it is exact, otherwise another, with a reason."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from datasets import Dataset, IterableDataset

from trl_jax.data.layout_plan import LayoutPlan, ViewBuckets, plan_layout
from trl_jax.data.loader import epoch_order
from trl_jax.training.devices import PROGRAMS_AT_ONCE, compiles_ahead

if TYPE_CHECKING:
    from trl_jax.config.base import BaseConfig
    from trl_jax.hub.backend import Backend


logger = logging.getLogger(__name__)

# FLOPs that a device could compute in the time that it takes to compile a step: 4 s on a CPU, 20 s at the rate that a
# large model reaches on an accelerator. Compiling during steps (on TPUs) costs as much.
_ON_CPUS, _ON_ACCELERATORS = 2e11, 2e15


def exact_layout(
    args: BaseConfig, backend: Backend, *, striped: bool = False, branches: bool = False, compares: bool = False
) -> tuple[str, str]:
    """The layout of a run, and the reason if it is not the requested one, else "".

    Args:
        striped: whether a mesh splits texts over devices.
        branches: whether any number of texts share a context, as completions of a prompt do.
        compares: whether each pass is also computed with a reference that has no virtual tokens.
    """
    requested = args.batch_layout
    if requested == "padded":
        return "padded", ""
    if not backend.traits.takes_packed:
        return "padded", "this model does not support several texts in one row"
    if compares and backend.virtual.count:
        return "padded", "the reference model does not see the virtual tokens before each text"
    if backend.traits.drops_out and not args.disable_dropout:
        return "padded", "packed attention does not support dropout, which the model or its adapter uses"
    if args.neftune_noise_alpha:
        return "padded", "with neftune_noise_alpha each text gets its own noise, even if two have the same beginning"
    if requested == "auto" and args.device.type == "cuda" and striped:
        reason = "there is no GPU kernel for packed rows split over devices; batch_layout='shared' uses XLA's"
        return "padded", reason
    if not backend.traits.causal:
        reason = "this model's attention is bidirectional, so a shared prompt depends on what follows it"
        return "packed", reason if requested == "shared" else ""
    by_text = by_rows(args, striped=striped, branches=branches)
    if requested == "auto" and args.device.type == "tpu" and not by_text and windowed(args, backend):
        return (
            "packed",
            "the TPU kernel does not support windows with shared prompts; batch_layout='shared' shares them",
        )
    if backend.traits.draws_experts:
        reason = "this model's routers sample experts for each text, even if two have the same beginning"
        return "packed", reason if requested == "shared" else ""
    return ("shared" if requested == "auto" else requested), ""


def windowed(args: BaseConfig, backend: Backend) -> bool:
    """Whether the model has an attention window that is shorter than the longest possible text."""
    longest = longest_text(args)
    if backend.traits.window is None or longest is None:
        return backend.traits.window is not None
    return backend.traits.window < longest + backend.virtual.count


def longest_text(args: BaseConfig) -> int | None:
    """Maximum tokens in a text, without virtual tokens; None without a limit. Includes `max_new_tokens`, because
    generated completions may replace those of the dataset."""
    return None if args.max_length is None else args.max_length + _new_tokens(args)


def _new_tokens(args: BaseConfig) -> int:
    return vars(args).get("max_new_tokens", 0)


def by_rows(args: BaseConfig, *, striped: bool, branches: bool = False) -> bool:
    """Whether attention gets packed texts as separate rows: on GPUs, whose kernel reads rows, and on TPUs for branches,
    because the TPU kernel takes a single range of keys per query."""
    return not striped and (args.device.type == "cuda" or (args.device.type == "tpu" and branches))


def unplanned(
    args: BaseConfig, backend: Backend, *, striped: bool, branches: bool = False, compares: bool = False
) -> LayoutPlan:
    """The layout without a survey of lengths: for evaluation sets, streams and, with branches, rollouts."""
    options = {"striped": striped, "branches": branches}
    layout, _ = exact_layout(args, backend, **options, compares=compares)
    return LayoutPlan(layout, views=ViewBuckets() if by_rows(args, **options) else None)


def check_layout(args: BaseConfig, backend: Backend, *, compares: bool = False) -> None:
    """Warn if a layout that was requested by name is not exact, so that another is used."""
    layout, reason = exact_layout(args, backend, compares=compares)
    if args.batch_layout not in ("auto", layout):
        logger.warning("batch_layout=%r is not exact here, so rows are %s: %s.", args.batch_layout, layout, reason)


def plan(
    args: BaseConfig,
    backend: Backend,
    dataset: Dataset | IterableDataset,
    columns: tuple[str, ...],
    *,
    parameters: int,
    batch_size: int,
    steps: int,
    shards: int = 1,
    striped: bool = False,
    documents: str | None = None,
    whole_micro_batches: bool = False,
    compares: bool = False,
    lengths: np.ndarray | None = None,
    tell: Callable[[str], None] = logger.info,
) -> LayoutPlan:
    """The layout of a run's training `steps`. Logs a line with the layout, the reason and the savings.

    Args:
        columns: the dataset's token columns, one for each text of an example.
        documents: the column with the lengths of a text's documents.
        whole_micro_batches: whether each micro-batch has a packed row of its own.
        compares: whether each pass is also computed with a reference that has no virtual tokens.
        lengths: by which rows are grouped, `[rows]`; None if they are not grouped.
        tell: logs the line.
    """
    layout, reason = exact_layout(args, backend, striped=striped, compares=compares)
    if layout == "padded":
        tell(f"Layout padded{f': {reason}' if reason else ''}.")
        return LayoutPlan("padded")
    if isinstance(dataset, IterableDataset) or _new_tokens(args):
        rows = "a stream of rows" if isinstance(dataset, IterableDataset) else "completions that a model writes"
        tell(f"Layout {layout}: how much it saves on {rows} is not known beforehand.")
        return unplanned(args, backend, striped=striped)
    order = partial(
        epoch_order,
        len(dataset),
        seed=args.seed if args.data_seed is None else args.data_seed,
        shuffle=args.train_sampling_strategy != "sequential",
        lengths=lengths,
        group=batch_size * shards * args.gradient_accumulation_steps,
    )
    compilation = _ON_CPUS if args.device.type == "cpu" else _ON_ACCELERATORS
    result = plan_layout(
        dataset,
        columns,
        lambda epoch: order(epoch=epoch),
        layout,
        batch_size=batch_size,
        accumulation=args.gradient_accumulation_steps * shards,  # packed rows in a step
        bucket_cost=int(compilation / (6 * max(parameters, 1) * args.gradient_accumulation_steps)),
        run_steps=steps,
        whole_micro_batches=whole_micro_batches,
        by_rows=by_rows(args, striped=striped),
        at_once=PROGRAMS_AT_ONCE if compiles_ahead(args.device.type) else None,
        documents=documents,
        virtual=backend.virtual.count,
    )
    tell(line(result))
    return result


def line(plan: LayoutPlan) -> str:
    """The log line: layout, tokens of a step (computed, padded and real), and lengths of packed rows."""
    computed, padded, real = (_thousands(tokens) for tokens in (plan.computed, plan.padded, plan.real))
    lengths = plan.buckets.lengths if plan.views is None else sorted({row for row, _ in plan.views.shapes})
    rows = "" if plan.views is None else f", rows of {_listed(sorted({row for _, row in plan.views.shapes}))}"
    packed = f"for {real} tokens of text; packed rows of {_listed(lengths)} tokens{rows}"
    if plan.computed < plan.padded:
        less = f"{1 - plan.computed / plan.padded:.0%} less"
        return f"Layout {plan.layout}: {computed} of {padded} padded tokens a step ({less}), {packed}."
    return (
        f"Layout {plan.layout}: {computed} tokens a step, {packed}. Their length is rounded up, so steps with so "
        "little text gain nothing over padding."
    )


def _listed(lengths: Sequence[int]) -> str:
    return ", ".join(f"{length:,}" for length in lengths)


def _thousands(tokens: float) -> str:
    return f"{tokens / 1000:.1f}k" if tokens >= 1000 else f"{tokens:.0f}"
