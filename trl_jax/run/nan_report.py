"""Find NaN and infinite values: in loaded weights, or where in the model a step computes the first one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from trl_jax.engine.nan_trace import nan_trace
from trl_jax.mesh.arrays import fetched

if TYPE_CHECKING:
    from trl_jax.hub.pretrained import PreTrainedModel
    from trl_jax.run.state import RunState


def explain(run: RunState, loss: Callable, batch: Any) -> str:
    """A sentence on where the first NaN or infinite value arises, in the loss or in its gradient.

    Args:
        loss: `(params, one pass of a batch, key) -> (loss, sums)`.
        batch: the step's `StepBatch`.
    """
    params, frozen, arrays = run.model.params, run.frozen, batch.arrays
    if run.sharding_plan is not None:
        params, frozen = ({path: jnp.asarray(fetched(a)) for path, a in part.items()} for part in (params, frozen))
        arrays = jax.tree.map(lambda leaf: fetched(leaf).reshape(-1, *leaf.shape[2:]), arrays)
    bad = [path for path, array in params.items() if not np.isfinite(jax.device_get(array)).all()]
    if bad:
        return f"The weights {', '.join(bad[:8])} hold values that are none."

    def of_trained(frozen, params, micro):
        return loss(frozen | params, micro, None)

    for number, rows in enumerate(batch.passes):
        if not rows:
            continue
        one = jax.tree.map(lambda leaf, number=number: leaf[number], arrays)
        for function in (of_trained, jax.grad(of_trained, argnums=1, has_aux=True)):
            found = nan_trace(partial(function, frozen), params, one)
            if found is not None:
                return f"{found} It is computed from rows {', '.join(map(str, rows))}."
    return "With dropout off no value is at fault."


def check_weights(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model, unless a tensor of its checkpoint has NaN or infinite values.

    Raises:
        ValueError: some tensors have; their names on disk are listed.
    """
    readable, bad = model.readable, []
    if not all(map(_finite, readable.values())):
        bad = [tensor for tensor, values in model.backend.on_disk(readable) if not np.isfinite(values).all()]
    bad += [path for path, array in model.frozen.items() if not _finite(model.backend.floats(path, array))]
    if bad:
        raise ValueError(
            f"{model.name_or_path}: {', '.join(bad[:8])}{' and others' if len(bad) > 8 else ''} hold NaN or infinite "
            "values, so training could give nothing else. Take another checkpoint; to train this one all the same, "
            "load it with AutoModelForSequenceClassification.from_pretrained and pass the model."
        )
    return model


def _finite(values: Any) -> bool:
    """Whether all are; where the host has them, without a program that would be compiled for their shape."""
    there = not isinstance(values, jax.Array) or [device.platform for device in values.devices()] == ["cpu"]
    return bool(np.isfinite(np.asarray(values)).all() if there else jnp.isfinite(values).all())
