"""A step and an evaluation by way of a script's own `compute_loss` or `prediction_step`."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from trl_jax.engine.step import updated
from trl_jax.run.user_loss import BoundModel, inputs_of, loss_of, numbers_of, reached_by, torch_explained


class HookedStep:
    """What `engine.step.make_step` gives, for a loss that takes a mean over the pairs it sees.

    Each micro-batch has its real pairs only, so one that is short is a program of its own.
    """

    def __init__(self, trainer: Any, tx: Any):
        self._trainer = trainer
        loss = trainer._held(partial(_training_loss, trainer))
        self._grad = jax.jit(jax.value_and_grad(loss, has_aux=True), static_argnames="told")
        self._apply = jax.jit(partial(_apply, tx), donate_argnums=(0, 1))
        self._point = tx.point

    def __call__(
        self, params: dict, opt_state: Any, arrays: Any, learning_rate: Any, key: Any, frozen: dict
    ) -> tuple:
        micro = inputs_of(arrays)
        keys = [None] * len(micro) if key is None else jax.random.split(key, len(micro))
        total, gradients, sums, at = 0.0, None, [], self._point(params, opt_state)
        told, reached = numbers_of(self._trainer), reached_by(self._trainer.state)
        for inputs, micro_key in zip(micro, keys, strict=True):
            (loss, found), grads = self._grad(at, frozen, inputs, micro_key, reached, told=told)
            total, sums = total + loss / len(micro), [*sums, found]
            gradients = grads if gradients is None else jax.tree.map(jnp.add, gradients, grads)
        gradients = jax.tree.map(lambda g: g / len(micro), gradients)
        params, opt_state, measured = self._apply(params, opt_state, gradients, total, learning_rate)
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *sums)
        return params, opt_state, stacked | {"loss": total} | measured


def _training_loss(
    trainer: Any, params: dict, frozen: dict, inputs: dict, key: Any, reached: dict, *, told: tuple
) -> tuple:
    del told  # read from the trainer while this is traced; other numbers are another program
    args = trainer.args
    arrays, how = frozen | params, {"dtype": args.compute_dtype, "remat": args.remats[-1]}
    bound = BoundModel(trainer.model, arrays, **how, key=key, chances=trainer.chances)
    with trainer.seen_at(reached):
        return loss_of(trainer, bound, inputs)


def _apply(tx: Any, params: dict, opt_state: Any, gradients: dict, total: Any, learning_rate: Any) -> tuple:
    """As in `engine.step`, everything stays as it was where loss, gradient or update is not finite."""
    norm = optax.global_norm(gradients)
    finite = jnp.isfinite(total) & jnp.isfinite(norm)
    params, opt_state, applied = updated(tx, finite, params, opt_state, gradients, norm, learning_rate)
    return params, opt_state, {"grad_norm": norm, "updated": applied}


class HookedEvaluation:
    """(parameters, a batch's arrays) -> metrics with `loss`, and scores, by the script's `compute_loss`."""

    def __init__(self, trainer: Any):
        self._trainer = trainer
        self._loss = jax.jit(partial(_evaluation_loss, trainer), static_argnames=("dtype", "told"))

    def __call__(self, params: dict, arrays: Any, *, dtype: str) -> tuple:
        [inputs] = inputs_of(arrays)
        told, reached = numbers_of(self._trainer), reached_by(self._trainer.state)
        return self._loss(params, inputs, reached, dtype=dtype, told=told)


def _evaluation_loss(trainer: Any, params: dict, inputs: dict, reached: dict, *, dtype: str, told: tuple) -> tuple:
    del told
    bound = BoundModel(trainer.model, params, dtype=dtype)
    with trainer.seen_at(reached):
        loss, sums = loss_of(trainer, bound, inputs)
    scores = jnp.concatenate(bound.scores) if bound.scores else jnp.zeros(len(inputs["input_ids"]))
    return sums | {"loss": loss}, scores


class OwnPrediction:
    """The same by the script's `prediction_step`, outside of any compiled program; scores come with labels."""

    def __init__(self, trainer: Any):
        self._trainer = trainer

    def __call__(self, params: dict, arrays: Any, *, dtype: str) -> tuple:
        trainer, [inputs] = self._trainer, inputs_of(arrays)
        bound = BoundModel(trainer.model, params, dtype=dtype)
        with torch_explained():
            inputs = {name: jnp.asarray(value) for name, value in inputs.items()}
            loss, logits, labels = trainer.prediction_step(bound, inputs, trainer.args.prediction_loss_only, None)
        sums = bound.sums(len(inputs["input_ids"]) // 2)
        return sums | {"loss": jnp.asarray(loss, jnp.float32)}, _on_host((logits, labels))


def _on_host(found: Any) -> Any:
    return jax.tree.map(np.asarray, found)
