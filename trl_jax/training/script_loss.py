"""User-defined `compute_loss` and `prediction_step`, in JAX or torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from trl_jax.data.batch import IGNORED, Batch, Extras, LossBatch
from trl_jax.hub import torch_bridge
from trl_jax.training.data import ROW_IMAGES, averages_micro_batches, inputs_of, seen_by_scripts
from trl_jax.training.forward import Forward, aux_loss_sums, aux_loss_weight
from trl_jax.training.metrics import with_same_names
from trl_jax.training.reference import ReferenceInputs
from trl_jax.training.script_model import BoundModel, logged_sums, task_loss
from trl_jax.training.state import Setup
from trl_jax.training.torch_errors import (
    WrittenInTorch,
    found_in_torch,
    may_run_in_torch,
    outputs_alone,
    parameters_refused,
    read_in_jax_error,
    torch_explained,
    warn_of_torch,
)
from trl_jax.training.torch_loss import TorchLoss
from trl_jax.training.update import updated
from trl_jax.training.user_step import UserStep

# Steps and evaluations with a user-defined `compute_loss` or `prediction_step`.


class UserLossStep:
    """A step like that of `update.make_step`, for a loss that is a mean over the examples it gets.

    Micro-batches contain only real examples, so a shorter one is compiled as another program.
    """

    def __init__(self, user_loss: UserLoss, without_frozen: Callable, tx: Any):
        """
        Args:
            without_frozen: wraps a loss such that frozen parameters have no gradients.
        """
        self._user_loss, self._tx, self._point = user_loss, tx, tx.point
        self._loss = without_frozen(self._training_loss)
        self._grad = jax.jit(jax.value_and_grad(self._loss, has_aux=True), static_argnames="values")
        self._in_torch = TorchLoss(user_loss, without_frozen)
        self._apply = jax.jit(partial(_apply, tx), donate_argnums=(0, 1))

    def __call__(self, params: dict, opt_state: Any, arrays: Any, learning_rate: Any, key: Any, frozen: dict) -> tuple:
        micro = self._user_loss.inputs(arrays)
        parts, num_items, pass_weight = len(micro), None, np.float32(1)
        if self._user_loss.counts_targets:  # the loss itself divides by the targets of the whole step
            parts, pass_weight = 1, np.float32(1 / len(micro))
            num_items = np.float32(max(1, np.count_nonzero(np.asarray(arrays.targets) >= 0)))
        keys = [None] * len(micro) if key is None else jax.random.split(key, len(micro))
        total, shown, gradients, sums, at = 0.0, 0.0, None, [], self._point(params, opt_state)
        values, state = self._user_loss.values(), self._user_loss.state()
        for number, (inputs, micro_key) in enumerate(zip(micro, keys, strict=True), start=1):

            def computed(inputs: dict, micro_key: Any = micro_key) -> tuple:
                given = at, frozen, inputs, micro_key, num_items, pass_weight
                (loss, found), grads = self._value_and_grad(*given, state=state, values=values)
                return loss / parts, found, grads

            one, logged = self._user_loss.stepped(computed, inputs, num_items, last=number == len(micro))
            loss, found, grads = one
            total, shown, sums = total + loss, shown + logged, [*sums, found]
            gradients = grads if gradients is None else jax.tree.map(jnp.add, gradients, grads)
        gradients = jax.tree.map(lambda g: g / parts, gradients)
        params, opt_state, measured = self._apply(params, opt_state, gradients, total, learning_rate)
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *with_same_names(sums))
        return params, opt_state, stacked | {"loss": shown} | measured

    def in_one_program(self, options: Any) -> Any:
        """A jitted step with the arguments of `make_step`'s step, for planning: it scans over all micro-batches, while
        a call runs one program per micro-batch. The batch has the `inputs` of all micro-batches, stacked.

        Args:
            options: compiler options.
        """

        def step(params: dict, opt_state: Any, inputs: dict, learning_rate: Any, key: Any, frozen: dict) -> tuple:
            parts, at, state = len(inputs["input_ids"]), self._point(params, opt_state), self._user_loss.state()
            num_items = jnp.float32(1) if self._user_loss.counts_targets else None

            def one(total: Any, micro: dict) -> tuple[Any, jax.Array]:
                given = at, frozen, micro, key, num_items, jnp.float32(1 / parts)
                (loss, _), found = jax.value_and_grad(self._loss, has_aux=True)(*given, state=state, values=())
                return jax.tree.map(jnp.add, total, found), loss

            gradients, losses = jax.lax.scan(one, jax.tree.map(jnp.zeros_like, at), inputs)
            return _apply(self._tx, params, opt_state, gradients, losses.sum(), learning_rate)

        return jax.jit(step, donate_argnums=(0, 1), compiler_options=options)

    def _value_and_grad(self, *given: Any, state: dict, values: tuple) -> tuple:
        """`((loss, sums), gradient)` of a micro-batch. A loss in torch reads the trainer's state and values itself."""
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
        del values  # static: the loss reads them from the trainer while it is traced, so a change must recompile it
        args = self._user_loss.setup.args
        options = {"dtype": args.compute_dtype, "remat": args.remats[-1], "key": key, "pass_weight": pass_weight}
        bound = self._user_loss.bound(frozen | params, inputs, training=True, **options)
        return self._user_loss(bound, inputs, state, num_items)


def _apply(tx: Any, params: dict, opt_state: Any, gradients: dict, total: Any, learning_rate: Any) -> tuple:
    """Apply the update. As in `update.make_step`, nothing changes if loss, gradients or update are not finite."""
    norm = optax.global_norm(gradients)
    finite = jnp.isfinite(total) & jnp.isfinite(norm)
    params, opt_state, applied = updated(tx, finite, params, opt_state, gradients, norm, learning_rate)
    return params, opt_state, {"grad_norm": norm, "updated": applied}


class UserLossEvaluation:
    """Evaluates a batch with the user-defined `compute_loss`: `(params, arrays) -> (sums with "loss", outputs)`."""

    def __init__(self, user_loss: UserLoss):
        self._user_loss, self._in_torch = user_loss, TorchLoss(user_loss)
        self._loss = jax.jit(self._evaluation_loss, static_argnames=("dtype", "values"))

    def __call__(self, params: dict, arrays: Any, *, dtype: str) -> tuple:
        [inputs] = self._user_loss.inputs(arrays)
        inputs = self._user_loss.prepared(inputs)
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
        loss, sums = self._user_loss(bound, inputs, state, self._user_loss.num_items(inputs))
        outputs = jnp.concatenate(bound.outputs) if bound.outputs else jnp.zeros(len(inputs["input_ids"]))
        return sums | {"loss": loss}, outputs


class UserPrediction:
    """Evaluates a batch with the user-defined `prediction_step`, which is not compiled.

    Outputs are (logits, labels), with `()` for None.
    """

    def __init__(self, user_loss: UserLoss, prediction_step: Callable):
        self._user_loss, self._prediction_step = user_loss, prediction_step
        self._in_torch = TorchLoss(user_loss)

    def __call__(self, params: dict, arrays: Any, *, dtype: str) -> tuple:
        [inputs] = self._user_loss.inputs(arrays)
        prediction_loss_only = self._user_loss.setup.args.prediction_loss_only

        def predicted(model: Any, shown: dict) -> tuple:
            return self._prediction_step(model, shown, prediction_loss_only, None)

        if not self._user_loss.in_torch:
            bound = self._user_loss.bound(params, inputs, dtype=dtype)
            try:
                with torch_explained():
                    shown = {name: jnp.asarray(value) for name, value in seen_by_scripts(inputs).items()}
                    loss, *outputs = predicted(bound, shown)
                return _predicted(self._user_loss.sums(bound, inputs), loss, outputs)
            except WrittenInTorch as error:
                self._user_loss.to_torch(error)
        sums, (loss, *outputs) = self._in_torch.predicted(predicted, params, inputs, dtype=dtype)
        return _predicted(sums, loss, outputs)


def _predicted(sums: dict, loss: Any, outputs: list) -> tuple:
    loss, outputs = torch_bridge.as_arrays([loss, outputs])
    on_host = tuple(() if part is None else jax.tree.map(np.asarray, part) for part in outputs)
    return sums | {"loss": jnp.asarray(loss, jnp.float32)}, on_host


# Calls to a user-defined `compute_loss`.

_OF_MODEL = frozenset({"at_gradients", "name_or_path", "training", "writes"})  # attributes that trl_jax sets


def script_values(trainer: Any) -> tuple[tuple[str, Any], ...]:
    """The numbers and strings that a script set on its trainer and its model, by name. They are compiled into the loss
    with their current values."""
    kinds = (bool, int, float, str)
    found = vars(trainer) | {
        f"model.{name}": vars(trainer.model)[name] for name in vars(trainer.model).keys() - _OF_MODEL
    }
    return tuple((name, value) for name, value in sorted(found.items()) if type(value) in kinds)


class UserLoss:
    """Calls a user-defined loss with the model and the batch in TRL's form, and computes the sums to log.

    values: returns the numbers and strings on the script's trainer; the loss is recompiled when they change.
    in_torch: whether the loss was found to use torch.
    """

    def __init__(
        self,
        setup: Setup,
        forward: Forward,
        compute_loss: Callable,
        values: Callable[[], tuple[tuple[str, Any], ...]],
        user_step: UserStep | None = None,
        is_function: bool = False,
        functions: Sequence[Callable] = (),
    ):
        """
        Args:
            is_function: whether the loss is a `compute_loss_func`, which always gets the number of targets.
            functions: the user-defined functions that compute the loss, searched for torch code.
        """
        self.setup, self._forward, self.compute_loss, self.values = setup, forward, compute_loss, values
        self._is_function, self.in_torch, self._user_step = is_function, False, user_step
        if (error := found_in_torch(functions)) is not None:
            self.in_torch = True
            warn_of_torch(error)

    def __call__(
        self, bound: BoundModel, inputs: dict[str, Any], state: dict[str, Any], num_items: Any = None
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The loss and the sums of a batch.

        Args:
            state: from `state()`; the script reads it as `self.state`.
            num_items: the number of targets that a language model's loss is divided by: of the whole step, or of an
                evaluation batch; None unless `counts_targets`.

        Raises:
            TypeError: the script called torch, read parameters, or did not return a scalar.
        """
        options = {} if self.setup.task.head == "score" else {"num_items_in_batch": num_items}
        refused = parameters_refused(self.setup.model, read_in_jax_error)
        given = {name: jnp.asarray(value) for name, value in seen_by_scripts(inputs).items()}
        own = self.setup.script_loss
        if own is not None:
            given, own.current = bound.compared_inputs(given), bound
        try:
            with self.setup.events.state_replaced(state), outputs_alone(), torch_explained(), refused:
                result = self.compute_loss(bound, given, **options)
        finally:
            if own is not None:
                own.current = None
        loss = result[0] if isinstance(result, tuple) else result
        if not isinstance(loss, jax.Array) or loss.shape != ():
            raise TypeError(
                f"compute_loss returned {described(loss)}; expected a JAX scalar, as in "
                "-jax.nn.log_sigmoid(model(**inputs).logits).mean()."
            )
        return loss.astype(jnp.float32), self.sums(bound, inputs) | logged_sums(bound)

    @property
    def counts_targets(self) -> bool:
        """Whether the loss gets the number of targets to divide by, as in transformers. Otherwise the loss of a step is
        the mean over its micro-batches."""
        setup = self.setup
        if setup.task.head == "score" or setup.script_loss is not None:
            return False
        return self._is_function or not averages_micro_batches(setup.model)

    def num_items(self, inputs: dict[str, Any]) -> Any:
        """The number of targets in an evaluation batch; None if the loss does not get it."""
        if not self.counts_targets:
            return None
        counted = jnp.sum(jnp.asarray(inputs["labels"])[:, 1:] != IGNORED)
        return jnp.maximum(counted, 1).astype(jnp.float32)

    def to_torch(self, error: WrittenInTorch) -> None:
        """Continue with the loss in torch, if possible; otherwise raise the error."""
        if not may_run_in_torch(error):
            raise error
        self.in_torch = True
        warn_of_torch(error)

    def state(self) -> dict[str, np.ndarray]:
        """The step and epoch, passed to the compiled loss, which reads them as `self.state`."""
        state = self.setup.events.state
        return {"global_step": np.int32(state.global_step), "epoch": np.float32(state.epoch or 0)}

    def bound(
        self,
        params: dict,
        inputs: dict,
        *,
        dtype: str,
        remat: bool | str = False,
        key: jax.Array | None = None,
        pass_weight: Any = 1.0,
        first_call: int = 0,
        training: bool = False,
    ) -> BoundModel:
        """The model with these parameters, for one batch of `inputs`.

        Args:
            key: the batch's PRNG key in training.
            pass_weight: the batch's weight in the mean over the batches of the step.
            first_call: number of earlier calls of the model on this batch.
        """

        def random_options(call: int, lengths: jax.Array) -> dict[str, Any]:
            return self._forward.random_options(jax.random.fold_in(key, first_call + call), lengths)

        reference, compared = self.setup.reference, {}
        if reference is not None:
            params, compared = reference.split(params)
        return BoundModel(
            self.setup.model,
            params,
            comparing=None if self.setup.script_loss is None else ReferenceInputs(self.setup.task, reference, compared),
            dtype=dtype,
            remat=remat,
            random_options=None if key is None else random_options,
            ignored=frozenset(inputs),
            head=self.setup.task.head,
            aux_loss_weight=aux_loss_weight(self.setup.router_aux_loss_coef, pass_weight),
            training=training,
            images=inputs.get(ROW_IMAGES),
        )

    def sums(self, bound: BoundModel, inputs: dict[str, Any]) -> dict[str, jax.Array]:
        """The sums of the task's loss if the calls cover each row of the batch exactly once; otherwise sums over no
        examples."""
        task, rows = self.setup.task, len(inputs["input_ids"])
        if self.setup.script_loss is not None:
            return bound.default_sums or {}
        if task.head == "lm":
            covered = bound.outputs and bound.outputs[-1].shape[:2] == inputs["labels"].shape
            logits = bound.outputs[-1] if covered else jnp.zeros((*inputs["labels"].shape, 1))
            labels = jnp.asarray(inputs["labels"])
            sums = task_loss(task, logits, labels if covered else jnp.full_like(labels, IGNORED))[1]
            return sums | aux_loss_sums(bound.aux_losses[-1:])
        outputs, texts = jnp.concatenate(bound.outputs) if bound.outputs else jnp.zeros(0), len(task.columns.texts)
        complete = len(outputs) == rows
        outputs, examples = (outputs, rows // texts) if complete else (jnp.zeros(texts), 1)
        weight = jnp.ones(examples) if complete else jnp.zeros(examples)
        extras = {
            name: inputs[name] if complete else jnp.zeros(examples) for name in task.columns.numbers if name in inputs
        }
        return task.loss(outputs, LossBatch(weight, Extras(extras), examples))[1]

    def inputs(self, arrays: Batch) -> list[dict[str, np.ndarray]]:
        """The inputs of each micro-batch of a step of padded rows, from `inputs_of`."""
        return inputs_of(arrays, self.setup.task)

    def prepared(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """An evaluation batch's inputs after the user-defined `_prepare_inputs`."""
        return inputs if self._user_step is None else self._user_step.prepared(inputs)

    def stepped(self, computed: Callable, inputs: dict[str, Any], num_items: Any, *, last: bool) -> tuple[tuple, Any]:
        """`computed(inputs)` of a micro-batch, which is `(loss, sums, gradient)`, and the loss to log."""
        if self._user_step is None:
            one = computed(inputs)
            return one, one[0]
        return self._user_step(computed, inputs, num_items, last=last)


def described(value: Any) -> str:
    return f"an array {list(value.shape)}" if isinstance(value, jax.Array) else f"a {type(value).__qualname__}"
