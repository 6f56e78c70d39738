"""Failing steps: skip those with NaN or infinite values, find the first one, explain what does not fit in memory."""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Callable, Iterator
from functools import partial
from math import prod
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core, source_info_util

from trl_jax.config.base import BaseConfig
from trl_jax.hub.pretrained import PreTrainedModel
from trl_jax.mesh.mesh import ShardingPlan, fetched

logger = logging.getLogger(__name__)


# Find NaN and infinite values: in loaded weights, or where in the model a step computes the first one.


def explain(params: dict, frozen: dict, loss: Callable, batch: Any, *, sharded: bool) -> str:
    """Describe where the first NaN or infinite value arises, in the loss or in its gradient.

    Args:
        params, frozen: the trained arrays, and the other arrays of the step.
        loss: `(params, one pass of a batch, key) -> (loss, sums)`.
        batch: the step's `StepBatch`.
        sharded: whether the arrays are sharded over several devices.
    """
    arrays = batch.arrays
    if sharded:
        params, frozen = ({path: jnp.asarray(fetched(a)) for path, a in part.items()} for part in (params, frozen))
        arrays = jax.tree.map(lambda leaf: fetched(leaf).reshape(-1, *leaf.shape[2:]), arrays)
    bad = [path for path, array in params.items() if not np.isfinite(jax.device_get(array)).all()]
    if bad:
        return f"The weights {', '.join(bad[:8])} contain NaN or infinite values."

    def of_trained(frozen, params, micro):
        return loss(frozen | params, micro, None)

    for number, rows in enumerate(batch.passes):
        if not rows:
            continue
        micro_batch = jax.tree.map(lambda leaf, number=number: leaf[number], arrays)
        for function in (of_trained, jax.grad(of_trained, argnums=1, has_aux=True)):
            trace = nan_trace(partial(function, frozen), params, micro_batch)
            if trace is not None:
                return f"{trace} It is computed from rows {', '.join(map(str, rows))}."
    return "With dropout off, no value is NaN or infinite."


def check_weights(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model, unless a tensor of its checkpoint has NaN or infinite values.

    Raises:
        ValueError: lists the names of such tensors.
    """
    readable, bad = model.readable, []
    if not all(map(_finite, readable.values())):
        bad = [tensor for tensor, values in model.backend.on_disk(readable) if not np.isfinite(values).all()]
    bad += [path for path, array in model.frozen.items() if not _finite(model.backend.floats(path, array))]
    if bad:
        raise ValueError(
            f"{model.name_or_path}: {', '.join(bad[:8])}{' and others' if len(bad) > 8 else ''} hold NaN or infinite "
            "values, so the loss would be NaN, too. Use another checkpoint; to train this one anyway, load "
            "it with AutoModelForSequenceClassification.from_pretrained and pass the model."
        )
    return model


def _finite(values: Any) -> bool:
    """Whether all values are finite. Checks host memory with NumPy, so that no program is compiled for each shape."""
    on_cpu = not isinstance(values, jax.Array) or [device.platform for device in values.devices()] == ["cpu"]
    return bool(np.isfinite(np.asarray(values)).all() if on_cpu else jnp.isfinite(values).all())


# Find the first operation of a computation that produces a non-finite value.


# Primitives that contain a jaxpr -> the parameter that holds it. Loops over layers are run by `_scan`.
_INNER = {"jit": "jaxpr", "pjit": "jaxpr", "remat2": "jaxpr", "checkpoint": "jaxpr", "custom_jvp_call": "call_jaxpr",
          "custom_vjp_call": "call_jaxpr", "closed_call": "call_jaxpr"}  # fmt: skip


class _Found(Exception):
    pass


def nan_trace(function: Callable, *arguments: Any) -> str | None:
    """Name the first operation of `function(*arguments)` that makes NaN or +inf from inputs without them, if any.

    Runs the operations one by one. -inf does not count, because attention masks contain it. The text names the loop
    iteration (the layer, if layers are scanned), the operation, and its line in the source.
    """
    closed = jax.make_jaxpr(function)(*arguments)
    try:
        _run(closed.jaxpr, closed.consts, jax.tree.leaves(arguments), "")
    except _Found as found:
        return str(found)
    return None


def _run(jaxpr: Any, consts: list, inputs: list, where: str) -> list:
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *inputs], strict=True))

    def read(atom):
        return atom.val if isinstance(atom, core.Literal) else values[atom]

    for equation in jaxpr.eqns:
        inputs = [read(atom) for atom in equation.invars]
        results = _apply(equation, inputs, where)
        if any(map(_bad, results)) and not any(map(_bad, inputs)):
            raise _Found(f"The first one arises {where}in {_line(equation)}.")
        values |= zip(equation.outvars, results, strict=True)
    return [read(atom) for atom in jaxpr.outvars]


def _apply(equation: Any, inputs: list, where: str) -> list:
    name, params = equation.primitive.name, equation.params
    if name == "scan":
        return _scan(equation, inputs, where)
    if name in _INNER:
        return _run(*_opened(params[_INNER[name]]), inputs, where)
    results = equation.primitive.bind(*inputs, **params)
    return list(results) if equation.primitive.multiple_results else [results]


def _opened(inner: Any) -> tuple[Any, list]:
    return (inner.jaxpr, inner.consts) if isinstance(inner, core.ClosedJaxpr) else (inner, [])


def _scan(equation: Any, inputs: list, where: str) -> list:
    length, reverse = equation.params["length"], equation.params["reverse"]
    body, constants = _opened(equation.params["jaxpr"])
    # JAX releases name the numbers of constants, carry and scanned inputs differently. In all of them, the body's
    # slices lack the axis of the loop, so they can be recognized by their ranks.
    carried = sum(map(_same_rank, equation.outvars, body.outvars))
    whole = sum(map(_same_rank, equation.invars, body.invars))
    consts, carry, slices, rows = inputs[: whole - carried], inputs[whole - carried : whole], inputs[whole:], []
    for turn in reversed(range(length)) if reverse else range(length):
        inner = f"{where}in iteration {turn} of {length} of a scan (over layers or blocks) "
        outputs = _run(body, constants, [*consts, *carry, *(part[turn] for part in slices)], inner)
        carry = outputs[:carried]
        rows.append(outputs[carried:])
    rows = rows[::-1] if reverse else rows
    return [*carry, *(jnp.stack(column) for column in zip(*rows, strict=True))]


def _same_rank(outer: Any, inner: Any) -> bool:
    return outer.aval.ndim == inner.aval.ndim


def _bad(value: Any) -> bool:
    if not jnp.issubdtype(jnp.result_type(value), jnp.inexact):
        return False
    array = np.asarray(value, np.float32)
    return bool(np.isnan(array).any() or np.isposinf(array).any())


def _line(equation: Any) -> str:
    return f"{equation.primitive.name} ({source_info_util.summarize(equation.source_info)})"


# Report skipped steps (those with non-finite numbers), and end a run with too many of them in a row.


PATIENCE = 3  # skipped steps in a row that end a run
_OF_FINITE_GRADIENTS = (
    "The gradient is finite, but the optimizer's update is not: learning_rate is too high, or adam_epsilon lets it "
    "divide by zero."
)


class NonFiniteGuard:
    """Checks each step's metrics while the device computes the next step; after a bad step, it waits for each step.

    A bad step does not change weights and moments (`update.make_step`), so `explain` can still find the cause.

    Args:
        first_step: number of the first step to check.
        explain: batch of a bad step -> a sentence on where the first non-finite value arises.
        patience: number of bad steps in a row that end the run.
    """

    def __init__(self, first_step: int, explain: Callable[[Any], str], patience: int = PATIENCE):
        self._step, self._explain, self._patience = first_step - 1, explain, patience
        self._pending: tuple[Any, dict[str, Any]] | None = None
        self._bad_steps: list[int] = []

    def check(self, batch: Any, metrics: dict[str, Any]) -> None:
        """Check the previous step; this one was just dispatched to the device. `batch.rows` are its rows.

        Raises:
            FloatingPointError: there were `patience` bad steps in a row, up to this one or the previous one.
        """
        self.settle()
        self._pending = (batch, metrics)
        if self._bad_steps:
            self.settle()

    def settle(self) -> None:
        """Wait for the pending step, if any, and check it."""
        if self._pending is None:
            return
        (batch, metrics), self._pending = self._pending, None
        self._step += 1
        loss, norm, updated = jax.device_get([metrics[name] for name in ("loss", "grad_norm", "updated")])
        if updated:
            self._bad_steps = []
            return
        self._bad_steps.append(self._step)
        finite = bool(np.isfinite(loss) and np.isfinite(norm))
        values = f"loss {float(loss)}, grad_norm {float(norm)}{', update not finite' if finite else ''}"
        what = f"Step {self._step}: {values}, on rows {_some(batch.rows)} of train_dataset."
        if len(self._bad_steps) < self._patience:
            logger.warning(
                "%s The update was skipped. After %d such steps in a row the run ends.", what, self._patience
            )
            return
        raise FloatingPointError(
            f"{what} Steps {_some(self._bad_steps)} in a row were not finite. "
            f"{_OF_FINITE_GRADIENTS if finite else self._explain(batch)} Their updates were skipped, so the "
            "weights and all checkpoints are finite. Lower learning_rate or max_grad_norm, or inspect these rows, and "
            "resume."
        )


def _some(numbers: list[int]) -> str:
    listed = ", ".join(map(str, numbers[:16]))
    return listed + (f" and {len(numbers) - 16:,} more" if len(numbers) > 16 else "")


# Out-of-memory errors: explain what needs how much memory and how to need less, or retry with smaller batches.

T = TypeVar("T")


class StepTooLarge(MemoryError):
    """A training step did not fit in memory; one with fewer examples may."""


def retried(run: Callable[[], T], size: Callable[[], int], again: Callable[[int], None]) -> T:
    """Return `run()`, retried with fewer examples while a step does not fit in memory.

    Each attempt has 0.9 times the examples, rounded down, as in accelerate's `find_executable_batch_size`.

    Args:
        size: returns the current number of examples in a micro-batch.
        again: resets the run to start with this number.

    Raises:
        StepTooLarge: not even a single example fits.
    """
    while True:
        try:
            return run()
        except StepTooLarge as error:
            smaller = int(0.9 * size())
            if smaller == 0:
                raise
            reason = str(error).partition(".")[0]
        logger.warning("%s with per_device_train_batch_size=%d: starting again with %d.", reason, size(), smaller)
        gc.collect()  # frees the arrays of the failed run
        again(smaller)


@contextlib.contextmanager
def explain_memory(explanation: Callable[[], str]) -> Iterator[None]:
    """Convert an out-of-memory error to a StepTooLarge with this `explanation` (see `step_memory`)."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise StepTooLarge(f"{explanation()} XLA says: {str(error).strip().splitlines()[0]}") from error


@contextlib.contextmanager
def explain_evaluation_memory(args: BaseConfig, step: int, params: dict[str, jax.Array]) -> Iterator[None]:
    """Convert an evaluation's out-of-memory error during training to a MemoryError: smaller steps would not help."""
    jax.block_until_ready(params)  # steps run asynchronously: one that did not fit may only fail here
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise MemoryError(
            f"The evaluation after step {step} does not fit into memory. Lower "
            f"per_device_eval_batch_size={args.per_device_eval_batch_size}, which auto_find_batch_size does not "
            f"change. XLA says: {str(error).strip().splitlines()[0]}"
        ) from error


def step_memory(
    args: BaseConfig,
    model: PreTrainedModel,
    arrays: dict,
    plan: ShardingPlan | None,
    *,
    step: int,
    size: int,
    texts: int,
) -> str:
    """Explain what takes the memory of a step that does not fit, and how to need less.

    Args:
        arrays: all arrays that the step computes with.
        size: examples in a micro-batch on each device.
        texts: texts in an example.
    """
    weights, gradients = _on_device(model, arrays, plan)
    settings = [
        f"per_device_train_batch_size={size} (with gradient_accumulation_steps raised to "
        "match, the steps stay the same)",
        "max_length" + ("" if args.max_length is None else f"={args.max_length}"),
    ]
    lower = f"Lower {' or '.join(settings)}"
    if not args.gradient_checkpointing:
        lower += ", or set gradient_checkpointing=True"
    if plan is not None and plan.size("fsdp") == 1:
        lower += ", or divide the model as well, with fsdp='full_shard'"
    return (
        f"Step {step} does not fit into memory. Weights take {_bytes(weights)}, "
        f"AdamW's moments {_bytes(2 * gradients)}, gradients {_bytes(gradients)}; the rest is activations of "
        f"{texts * size} texts. {lower}."
    )


def _on_device(model: PreTrainedModel, arrays: dict, plan: ShardingPlan | None) -> tuple[int, int]:
    """Bytes of weights, including frozen ones, and of gradients, on one device."""
    if plan is None:
        return sum(array.nbytes for array in arrays.values()), 4 * model.num_parameters(only_trainable=True)

    def on_device(array: jax.Array, sharding: Any) -> int:
        return array.dtype.itemsize * prod(sharding.shard_shape(array.shape))

    gradients = plan.gradients(model.params)
    return (
        sum(on_device(array, array.sharding) for array in arrays.values()),
        sum(on_device(array, gradients[path]) for path, array in model.params.items()),
    )


def _bytes(count: int) -> str:
    return f"{count / 1e9:,.2f} GB"
