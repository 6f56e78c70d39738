"""Log-probabilities of completions under the policy that wrote them, and under the reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import jax
import numpy as np

from trl_jax.data.layout.batch import Batch
from trl_jax.data.step_layout import IndexedExample
from trl_jax.engine.devices.spmd import ShardedStep
from trl_jax.mesh.arrays import fetched
from trl_jax.rollout.examples import example_of
from trl_jax.rollout.judge import Logps
from trl_jax.rollout.written import Ids
from trl_jax.run import data
from trl_jax.run.state import RunState
from trl_jax.run.step.forward import Forward


class CompletionLogps:
    """Log-probabilities of completions' tokens under the policy or the reference, in passes as those of a step."""

    def __init__(self, run: RunState, forward: Forward, sharded_step: ShardedStep | None):
        self._run = run
        functions = {"policy": forward.of_policy, "reference": forward.of_reference}
        self._of = {name: _compiled(of_pass, sharded_step) for name, of_pass in functions.items()}

    def __call__(self, model: str, prompts: Ids, completions: Ids, completion_mask: Sequence[np.ndarray]) -> Logps:
        run = self._run
        layout = replace(data.step_layout(run, training=True), accumulation=1)
        virtual = run.virtual if model == "policy" else run.reference.backend.virtual
        rows = zip(prompts, completions, completion_mask, strict=True)
        examples = [example_of(*row).behind(virtual, predicted=False) for row in rows]
        found = [np.zeros(len(own), np.float32) for own in completions]
        with run.on_device():
            for start in range(0, len(examples), layout.batch_size):
                part = list(enumerate(examples))[start : start + layout.batch_size]
                step = layout.step([[IndexedExample(example, number) for number, example in part]], 0)
                logps = fetched(self._of[model](run.arrays, data.placed_pass(run, step.arrays)))
                for number, (own,) in step.of_reads(logps.reshape(step.arrays.reads.shape)).items():
                    found[number][completion_mask[number]] = own
        return found


def _compiled(of_pass: Callable, sharded_step: ShardedStep | None) -> Callable:
    """(arrays, batch of one pass) -> log-probabilities of its reads, `[shards, N]`."""

    def first(arrays: dict, batch: Batch) -> jax.Array:
        return of_pass(arrays, jax.tree.map(lambda leaf: leaf[0], batch))["logps"]

    if sharded_step is not None:
        return jax.jit(sharded_step.scores(first))
    return jax.jit(lambda arrays, batch: first(arrays, batch)[None])
