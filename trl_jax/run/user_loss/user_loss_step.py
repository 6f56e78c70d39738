"""A step and an evaluation with a script's own `compute_loss` or `prediction_step`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from trl_jax.engine.step import updated
from trl_jax.run.state import RunState
from trl_jax.run.user_loss.bound_model import UserLoss
from trl_jax.run.user_loss.torch_errors import WrittenInTorch, torch_explained
from trl_jax.run.user_loss.torch_loss import TorchLoss


class UserLossStep:
    """A step as `engine.step.make_step` makes it, for a loss that is a mean over the examples it gets.

    A micro-batch has only its real examples, so a shorter one is compiled as another program.
    """

    def __init__(self, run: RunState, user_loss: UserLoss, without_frozen: Callable, tx: Any):
        """
        Args:
            without_frozen: turns a loss into one without gradients of frozen parameters.
        """
        self._run, self._user_loss, self._point = run, user_loss, tx.point
        loss = without_frozen(self._training_loss)
        self._grad = jax.jit(jax.value_and_grad(loss, has_aux=True), static_argnames="values")
        self._in_torch = TorchLoss(run, user_loss, without_frozen)
        self._apply = jax.jit(partial(_apply, tx), donate_argnums=(0, 1))

    def __call__(
        self, params: dict, opt_state: Any, arrays: Any, learning_rate: Any, key: Any, frozen: dict
    ) -> tuple:
        micro = self._user_loss.inputs(arrays)
        parts, num_items = len(micro), None
        if arrays.targets is not None:  # such a loss divides by the targets of the whole step itself
            parts, num_items = 1, np.float32(max(1, np.count_nonzero(np.asarray(arrays.targets) >= 0)))
        keys = [None] * len(micro) if key is None else jax.random.split(key, len(micro))
        total, gradients, sums, at = 0.0, None, [], self._point(params, opt_state)
        values, state, pass_weight = self._user_loss.values(), self._user_loss.state(), np.float32(1 / len(micro))
        for inputs, micro_key in zip(micro, keys, strict=True):
            given = at, frozen, inputs, micro_key, num_items, pass_weight
            (loss, found), grads = self._value_and_grad(*given, state=state, values=values)
            total, sums = total + loss / parts, [*sums, found]
            gradients = grads if gradients is None else jax.tree.map(jnp.add, gradients, grads)
        gradients = jax.tree.map(lambda g: g / parts, gradients)
        params, opt_state, measured = self._apply(params, opt_state, gradients, total, learning_rate)
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *sums)
        return params, opt_state, stacked | {"loss": total} | measured

    def _value_and_grad(self, *given: Any, state: dict, values: tuple) -> tuple:
        """`((loss, sums), gradient)` of a micro-batch; a loss in torch reads the trainer's state and values itself."""
        if not self._user_loss.in_torch:
            try:
                return self._grad(*given, state=state, values=values)
            except WrittenInTorch as error:
                self._user_loss.to_torch(error)
        return self._in_torch.value_and_grad(*given)

    def _training_loss(
        self,
        params: dict,
        frozen: dict,
        inputs: dict,
        key: Any,
        num_items: Any,
        pass_weight: Any,
        *,
        state: dict,
        values: tuple,
    ) -> tuple:
        del values  # read from the trainer while this is traced; other values are another program
        args = self._run.args
        options = {"dtype": args.compute_dtype, "remat": args.remats[-1], "key": key, "pass_weight": pass_weight}
        bound = self._user_loss.bound(frozen | params, inputs, training=True, **options)
        return self._user_loss(bound, inputs, state, num_items)


def _apply(tx: Any, params: dict, opt_state: Any, gradients: dict, total: Any, learning_rate: Any) -> tuple:
    """Apply the update; as in `engine.step`, nothing changes where loss, gradient or update is not finite."""
    norm = optax.global_norm(gradients)
    finite = jnp.isfinite(total) & jnp.isfinite(norm)
    params, opt_state, applied = updated(tx, finite, params, opt_state, gradients, norm, learning_rate)
    return params, opt_state, {"grad_norm": norm, "updated": applied}


class UserLossEvaluation:
    """Evaluates a batch by the script's `compute_loss`: `(params, arrays) -> (sums with "loss", outputs)`."""

    def __init__(self, run: RunState, user_loss: UserLoss):
        self._user_loss, self._in_torch = user_loss, TorchLoss(run, user_loss)
        self._loss = jax.jit(self._evaluation_loss, static_argnames=("dtype", "values"))

    def __call__(self, params: dict, arrays: Any, *, dtype: str) -> tuple:
        [inputs] = self._user_loss.inputs(arrays)
        values, state = self._user_loss.values(), self._user_loss.state()
        if not self._user_loss.in_torch:
            try:
                return self._loss(params, inputs, state, dtype=dtype, values=values)
            except WrittenInTorch as error:
                self._user_loss.to_torch(error)
        return self._in_torch.evaluated(params, inputs, dtype=dtype)

    def _evaluation_loss(self, params: dict, inputs: dict, state: dict, *, dtype: str, values: tuple) -> tuple:
        del values
        bound = self._user_loss.bound(params, inputs, dtype=dtype)
        loss, sums = self._user_loss(bound, inputs, state)
        outputs = jnp.concatenate(bound.outputs) if bound.outputs else jnp.zeros(len(inputs["input_ids"]))
        return sums | {"loss": loss}, outputs


class UserPrediction:
    """Evaluates a batch by the script's `prediction_step`, which is not compiled; outputs are (logits, labels), `()` in
    the place of None."""

    def __init__(self, run: RunState, user_loss: UserLoss, prediction_step: Callable):
        self._run, self._user_loss, self._prediction_step = run, user_loss, prediction_step

    def __call__(self, params: dict, arrays: Any, *, dtype: str) -> tuple:
        [inputs] = self._user_loss.inputs(arrays)
        bound = self._user_loss.bound(params, inputs, dtype=dtype)
        with torch_explained():
            inputs = {name: jnp.asarray(value) for name, value in inputs.items()}
            loss, logits, labels = self._prediction_step(bound, inputs, self._run.args.prediction_loss_only, None)
        sums = self._user_loss.sums(bound, inputs)
        on_host = tuple(() if part is None else jax.tree.map(np.asarray, part) for part in (logits, labels))
        return sums | {"loss": jnp.asarray(loss, jnp.float32)}, on_host
