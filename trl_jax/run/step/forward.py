"""The model's outputs and the task's loss, as pure functions of parameters and a batch."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from trl_jax.data.example import LossBatch
from trl_jax.data.layout.batch import Batch, without_virtual
from trl_jax.hub.backend import Backend
from trl_jax.losses.load_balancing import load_balancing_loss
from trl_jax.models.functional import merge
from trl_jax.nn.head.inputs import Distributions
from trl_jax.run.model.reference import PREFIX
from trl_jax.run.state import RunState
from trl_jax.run.step.rng import random_options
from trl_jax.run.step.routers import AUX_LOSS, with_aux_loss


class Forward:
    """The functions from which a step and an evaluation are compiled."""

    def __init__(self, run: RunState):
        self._run = run

    def outputs(
        self, params: dict, batch: Batch, *, dtype: str, bounded: bool = True, **options: Any
    ) -> Any:
        """The numbers of a pass that the task's loss gets: outputs of a score head, float32 `[X]`, or, under a language
        model's head, the task's `of_pass` by name, with `ref_<name>` of those that it compares with the reference,
        where the run has one, and `aux_loss` `[X]`, the load-balancing loss of this pass, where the run adds it.

        Args:
            dtype: of the layers' computation.
            bounded: whether no text is longer than max_length.
            options: further arguments of the model's call: remat, dropout_key, router_key, noise.
        """
        run, reference = self._run, self._run.reference
        common, max_tokens = self._common(batch, dtype), run.max_tokens if bounded else None
        if reference is not None:
            params, compared = reference.split(params)
        model = merge(run.model.graph, params, options.get("dropout_key"))
        options |= common | _windows(run.model.backend, max_tokens)
        if run.router_aux_loss_coef:
            count, virtual = batch.router_token_count, run.virtual
            options["router_token_count"] = count if virtual.read else jnp.where(batch.tokens < virtual.first, count, 0)
        outputs = model(batch.tokens, batch.positions, batch.reads, **options)
        if run.task.head == "score":
            return outputs
        sums = {}
        if run.router_aux_loss_coef:
            outputs, router_sums = outputs
            sums[AUX_LOSS] = jnp.broadcast_to(load_balancing_loss(router_sums), batch.lengths.shape)
        if run.task.compares_distributions:
            beside = reference.outputs(compared, batch, **common, **_windows(reference.backend, max_tokens))
            return sums | run.task.of_pass(Distributions(outputs, beside, batch.targets), batch)
        sums |= run.task.of_pass(outputs, batch)
        if reference is None or not run.task.compared:
            return sums
        if run.virtual.count and not reference.backend.virtual.count:
            batch = without_virtual(batch, run.virtual.count)
            common["lengths"] = batch.lengths
        found = self._of_reference(compared, batch, max_tokens, common)
        return sums | {f"ref_{name}": found[name] for name in run.task.compared}

    def of_policy(self, params: dict, batch: Batch) -> dict[str, jax.Array]:
        """The numbers of a pass under the model alone; arguments as of `outputs`."""
        params = {path: array for path, array in params.items() if not path.startswith(PREFIX)}
        options = self._common(batch) | _windows(self._run.model.backend, self._run.max_tokens)
        model = merge(self._run.model.graph, params)
        return self._run.task.of_pass(model(batch.tokens, batch.positions, batch.reads, **options), batch)

    def of_reference(self, params: dict, batch: Batch) -> dict[str, jax.Array]:
        """The numbers of a pass under the run's reference, laid out as that reads it; arguments as of `outputs`."""
        _, compared = self._run.reference.split(params)
        return self._of_reference(compared, batch, self._run.max_tokens, self._common(batch))

    def _of_reference(
        self, arrays: dict, batch: Batch, max_tokens: int | None, options: dict[str, Any]
    ) -> dict[str, jax.Array]:
        reference, task = self._run.reference, self._run.task
        outputs = reference.outputs(arrays, batch, **options, **_windows(reference.backend, max_tokens))
        return task.of_pass(outputs, batch)

    def _common(self, batch: Batch, dtype: str | None = None) -> dict[str, Any]:
        """The options of every model's call; dtype=None is that of training."""
        options: dict[str, Any] = {"dtype": jnp.dtype(dtype or self._run.args.compute_dtype)}
        options |= {"lengths": batch.lengths} if batch.packed is None else {"packed": batch.packed}
        task = self._run.task
        if task.head == "score":
            return options
        if self._run.args.cast_lm_head_to_fp32:
            options["head_dtype"] = jnp.dtype("float32")
        if task.compares_distributions:
            return options | {"before_head": True}
        return options | {"targets": batch.targets, "temperature": task.temperature}

    def loss(
        self, params: dict, batch: Batch, key: jax.Array | None, *, remat: bool | str = False
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The loss of one pass, and sums over its micro-batches.

        Args:
            params: all parameters, trained and frozen ones.
            key: for dropout, routers and noise; None without them.
            remat: whether the backward pass computes layers again instead of keeping their activations.
        """
        options = {"remat": remat} | self.random_options(key, batch.lengths)
        outputs = self.outputs(params, batch, dtype=self._run.args.compute_dtype, **options)
        return self._loss(outputs, batch)

    def _loss(self, outputs: Any, batch: Batch | LossBatch) -> tuple[jax.Array, dict[str, jax.Array]]:
        run = self._run
        loss, sums = run.task.loss(outputs, batch)
        if not run.router_aux_loss_coef:
            return loss, sums
        return with_aux_loss(loss, sums, outputs[AUX_LOSS], batch, run.router_aux_loss_coef)

    def measure(self, outputs: Any, batch: Batch | LossBatch) -> dict[str, jax.Array]:
        """The sums of an evaluated batch, and its `loss`, a mean."""
        loss, sums = self._loss(outputs, batch)
        return sums | {"loss": loss}

    def random_options(self, key: jax.Array | None, lengths: jax.Array) -> dict[str, Any]:
        """The random options of `outputs` in training, for a pass with this key over texts of these `lengths`."""
        run = self._run
        return random_options(run.args, run.model.backend, key, lengths, run.pad_to_multiple_of)


def _windows(backend: Backend, max_tokens: int | None) -> dict[str, int | None]:
    """The option of a model that has attention windows: the length of the longest text."""
    return {} if backend.window is None else {"max_tokens": max_tokens}
