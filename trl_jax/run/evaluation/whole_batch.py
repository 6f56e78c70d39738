"""Evaluation of a batch in one pass, for tasks whose loss asks for numbers of reads."""

from __future__ import annotations

from typing import Any

import jax

from trl_jax.data.layout.batch import Batch
from trl_jax.engine.devices.spmd import ShardedStep
from trl_jax.run import data
from trl_jax.run.evaluation.divisor import divisor_of
from trl_jax.run.state import RunState
from trl_jax.run.step.forward import Forward


class WholeBatchEvaluation:
    """Evaluates a batch as a step lays it out: `(params, arrays) -> (sums with "loss", {})`.

    On several devices each computes its share of the batch: the loss is their sum, and sums for metrics have a leading
    axis of shards.
    """

    def __init__(self, run: RunState, forward: Forward, sharded_step: ShardedStep | None):
        self._run, self._forward, self._sharded_step = run, forward, sharded_step
        self._sums = jax.jit(self._of_batch, static_argnames="dtype")

    def __call__(self, params: dict, arrays: Batch, *, dtype: str) -> tuple[dict[str, jax.Array], dict]:
        return self._sums(params, data.placed_pass(self._run, arrays), dtype=dtype), {}

    def divisor(self, batch: Any) -> float:
        """The number that the loss of a batch is a mean over."""
        return divisor_of(self._run.task, batch)

    def _of_batch(self, params: dict, batch: Batch, *, dtype: str) -> dict[str, jax.Array]:
        def of_pass(params: dict, batch: Batch) -> dict[str, jax.Array]:
            batch = jax.tree.map(lambda leaf: leaf[0], batch)
            return self._forward.measure(self._forward.outputs(params, batch, dtype=dtype), batch)

        if self._sharded_step is None:
            return of_pass(params, batch)
        sums = self._sharded_step.scores(of_pass)(params, batch)
        return sums | {"loss": sums["loss"].sum()}
