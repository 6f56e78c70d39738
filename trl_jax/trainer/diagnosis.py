"""Why a step gave no number: which weights, which rows, and where in the model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from trl_jax.engine.first_bad import first_bad

if TYPE_CHECKING:
    from trl_jax.trainer.task import Task


def explain(trainer: Task, batch: Any) -> str:
    """A sentence on where the first value that is no number arises, in `trainer.loss` or in its gradient."""
    params = trainer.model.params
    bad = [path for path, array in params.items() if not np.isfinite(jax.device_get(array)).all()]
    if bad:
        return f"The weights {', '.join(bad[:8])} hold values that are none."
    size = trainer.args.per_device_train_batch_size
    for number in range(batch.num_micro_batches):
        micro = jax.tree.map(lambda leaf, number=number: leaf[number], batch.arrays)
        for function in (trainer.loss, jax.grad(trainer.loss, has_aux=True)):
            found = first_bad(lambda p, b, function=function: function(p, b, None), params, micro)
            if found is not None:
                rows = batch.rows[number * size : (number + 1) * size]
                return f"{found} It is computed from rows {', '.join(map(str, rows))}."
    return "With dropout off no value is at fault."
