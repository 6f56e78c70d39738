"""The model's outputs and the task's loss, as pure functions of parameters and a batch."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from trl_jax.data.example import Measured
from trl_jax.data.layout.batch import Batch
from trl_jax.models.functional import merge
from trl_jax.run.rng import random_options
from trl_jax.run.state import RunState


class Forward:
    """The functions from which a step and an evaluation are compiled."""

    def __init__(self, run: RunState):
        self._run = run

    def outputs(
        self, params: dict, batch: Batch, *, dtype: str, bounded: bool = True, **options: Any
    ) -> Any:
        """The outputs of each text, float32 `[X]`: those of a score head or, under a language model's head, the task's
        `per_text` by name.

        Args:
            dtype: of the layers' computation.
            bounded: whether no text is longer than max_length.
            options: further arguments of the model's call: remat, dropout_key, noise.
        """
        run = self._run
        model = merge(run.model.graph, params, options.get("dropout_key"))
        if run.model.backend.window is not None:
            options["max_tokens"] = run.args.max_length if bounded else None
        options |= {"lengths": batch.lengths} if batch.packed is None else {"packed": batch.packed}
        if run.task.head == "score":
            return model(batch.tokens, batch.positions, batch.reads, dtype=jnp.dtype(dtype), **options)
        options["targets"] = batch.targets
        outputs = model(batch.tokens, batch.positions, batch.reads, dtype=jnp.dtype(dtype), **options)
        return run.task.per_text(outputs, batch)

    def loss(
        self, params: dict, batch: Batch, key: jax.Array | None, *, remat: bool | str = False
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The loss of one pass, and sums over its micro-batches.

        Args:
            params: all parameters, trained and frozen ones.
            key: for dropout and noise; None without them.
            remat: whether the backward pass computes layers again instead of keeping their activations.
        """
        options = {"remat": remat} | self.random_options(key, batch.lengths)
        outputs = self.outputs(params, batch, dtype=self._run.args.compute_dtype, **options)
        return self._run.task.loss(outputs, batch)

    def measure(self, outputs: Any, batch: Measured) -> dict[str, jax.Array]:
        """The sums of an evaluated batch, and its `loss`, a mean."""
        loss, sums = self._run.task.loss(outputs, batch)
        return sums | {"loss": loss}

    def random_options(self, key: jax.Array | None, lengths: jax.Array) -> dict[str, Any]:
        """The random options of `outputs` in training, for a pass with this key over texts of these `lengths`."""
        return random_options(self._run.args, key, lengths, self._run.pad_to_multiple_of)
