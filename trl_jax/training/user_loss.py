"""User-defined losses: which methods a script may define, and who calls them.

    hook                               trainers                          called by
    compute_loss                       all but online                    UserLoss, for each micro-batch
    compute_loss_func (an argument)    SFT                               BaseTrainer.compute_loss
    _compute_loss                      DPO, KTO                          ReferenceTrainer.compute_loss
    training_step                      all but CPO, ORPO, online         UserStep, around each micro-batch
    _prepare_inputs                    all of these but DPO, KTO         UserStep, and UserLoss.evaluation
    prediction_step                    all but DPO, KTO, online          UserLoss.prediction, for each evaluation batch
    compute_loss, _compute_loss        GRPO, RLOO, distillation          UserCompletionsLoss, for each pass

The hooks of all rows but the last are `Setup.batch_methods`. With any of them, a script gets whole batches of padded
rows: a step runs one program for each micro-batch (`UserLossStep`) instead of the one of `update.make_step`, and
evaluation goes batch by batch. The loss calls a `BoundModel`, whose class depends on the task (`user_loss_model.py`).
The loss of the last row is `Setup.completions_loss`, a part of the usual step (`user_completions_loss.py`).

Each loss runs in one of two ways:

- compiled: a loss in jax.numpy is traced together with the model. It gets arrays without values.
- in torch: JAX computes the model's outputs, torch the loss and its gradient with respect to them, and JAX continues
  the backward pass (`TorchLoss` in `user_loss_torch.py`; `TorchCalls` for completions).

A run starts in torch if the source of the loss says so, and changes to it when tracing fails at a line in torch, or
at one that needs values (`user_loss_errors.py`). A `prediction_step` in JAX is not compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from trl_jax.core.text import brief
from trl_jax.data.batch import IGNORED, Batch
from trl_jax.hub import torch_bridge
from trl_jax.training.data import ROW_IMAGES, averages_micro_batches, inputs_of, seen_by_scripts
from trl_jax.training.forward import Forward, aux_loss_weight
from trl_jax.training.metrics import with_same_names
from trl_jax.training.state import Setup
from trl_jax.training.update import updated
from trl_jax.training.user_loss_errors import (
    WrittenInTorch,
    found_in_torch,
    may_run_in_torch,
    outputs_alone,
    parameters_refused,
    read_in_jax_error,
    torch_explained,
    warn_of_torch,
)
from trl_jax.training.user_loss_model import BoundModel, CutRows, kind_of_model, logged_sums, trl_inputs
from trl_jax.training.user_loss_torch import TorchLoss


class UserLoss:
    """Calls a user-defined loss with the model and the batch in TRL's form, and computes the sums to log.

    kind: the class of the model that the loss calls.
    name: of the loss, as the user knows it.
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
        functions: Sequence[Callable] = (),
    ):
        """
        Args:
            user_step: None if the script defines neither `training_step` nor `_prepare_inputs`.
            functions: the user-defined functions that compute the loss, searched for torch code.
        """
        self.setup, self._forward, self.compute_loss, self.values = setup, forward, compute_loss, values
        self.kind, self.user_step, self.in_torch = kind_of_model(setup), user_step, False
        names = "compute_loss", "compute_loss_func", "_compute_loss"
        self.name = next((name for name in names if name in setup.batch_methods), names[0])
        if (error := found_in_torch(self.name, functions)) is not None:
            if not torch_bridge.available():
                raise error
            self.in_torch = True
            warn_of_torch(error)

    def __call__(
        self, bound: BoundModel, inputs: dict[str, Any], state: dict[str, Any], num_items: Any = None
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The loss and the sums of a batch, in JAX.

        Args:
            state: from `state()`; the script reads it as `self.state`.
            num_items: the number of targets that a language model's loss is divided by: of the whole step, or of an
                evaluation batch; None unless `counts_targets`.

        Raises:
            TypeError: the script called torch, read parameters, or did not return a scalar.
        """
        script_inputs = bound.shown({name: jnp.asarray(value) for name, value in seen_by_scripts(inputs).items()})
        name = self.name
        refused = parameters_refused(name, self.setup.model, partial(read_in_jax_error, name))
        with self.setup.events.state_replaced(state), outputs_alone(name), torch_explained(name), refused:
            result = self.compute_loss(bound, script_inputs, **self.options(num_items))
        loss = result[0] if isinstance(result, tuple) else result
        if not isinstance(loss, jax.Array) or loss.shape != ():
            raise TypeError(
                f"{name} returned {described(loss)}; expected a JAX scalar, as in "
                "-jax.nn.log_sigmoid(model(**inputs).logits).mean()."
            )
        logged = logged_sums(bound.metrics, always=self.kind.always_logs)
        return loss.astype(jnp.float32), self.sums(bound, inputs) | logged

    def options(self, num_items: Any) -> dict[str, Any]:
        """The further arguments of compute_loss."""
        return {"num_items_in_batch": num_items} if self.kind.takes_labels else {}

    @property
    def counts_targets(self) -> bool:
        """Whether the loss gets the number of targets to divide by, as in transformers. Otherwise the loss of a step is
        the mean over its micro-batches."""
        if not self.kind.divides_by_targets:
            return False
        return "compute_loss_func" in self.setup.batch_methods or not averages_micro_batches(self.setup.model)

    def num_items(self, inputs: dict[str, Any]) -> Any:
        """The number of targets in an evaluation batch; None if the loss does not get it."""
        if not self.counts_targets:
            return None
        counted = jnp.sum(jnp.asarray(inputs["labels"])[:, 1:] != IGNORED)
        return jnp.maximum(counted, 1).astype(jnp.float32)

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
            call_key = jax.random.fold_in(key, first_call + call)
            return self._forward.random_options(call_key, lengths, devices=self.setup.shards)

        return self.kind.of_run(
            self.setup,
            params,
            dtype=dtype,
            remat=remat,
            random_options=None if key is None else random_options,
            ignored=frozenset(inputs),
            aux_loss_weight=aux_loss_weight(self.setup.router_aux_loss_coef, pass_weight),
            training=training,
            images=inputs.get(ROW_IMAGES),
        )

    def sums(self, calls: Any, inputs: dict[str, Any]) -> dict[str, jax.Array]:
        """The sums of the task's loss; see `BoundModel`."""
        return self.kind.task_sums(self.setup.task, calls, inputs)

    def inputs(self, arrays: Batch) -> list[dict[str, np.ndarray]]:
        """The inputs of each micro-batch of a step of padded rows, from `inputs_of`."""
        return inputs_of(arrays, self.setup.task)

    def in_jax_or_torch(self, in_jax: Callable[[], tuple], in_torch: Callable[[], tuple]) -> tuple:
        """The result of `in_jax`, or of `in_torch` if the loss is, or turns out to be, written in torch.

        Raises:
            WrittenInTorch: it is, and cannot run in torch.
        """
        if not self.in_torch:
            try:
                return in_jax()
            except WrittenInTorch as error:
                if not may_run_in_torch(error):
                    raise
                self.in_torch = True
                warn_of_torch(error)
        return in_torch()

    def evaluation(self) -> Callable[..., tuple]:
        """Returns a function that evaluates a batch with the user-defined `compute_loss`, compiled on its first call:
        `(params, arrays, dtype) -> (sums with "loss", outputs)`."""
        in_torch = TorchLoss(self)
        compiled = jax.jit(partial(self._evaluated), static_argnames=("dtype", "values"))

        def evaluate(params: dict, arrays: Batch, *, dtype: str) -> tuple:
            [inputs] = self.inputs(arrays)
            inputs = inputs if self.user_step is None else self.user_step.prepared(inputs)
            values, state = self.values(), self.state()
            return self.in_jax_or_torch(
                lambda: compiled(params, inputs, state, dtype=dtype, values=values),
                lambda: in_torch.evaluated(params, inputs, dtype=dtype),
            )

        return evaluate

    def _evaluated(self, params: dict, inputs: dict, state: dict, *, dtype: str, values: tuple) -> tuple:
        del values  # static: the loss reads them from the trainer while it is traced, so a change must recompile it
        bound = self.bound(params, inputs, dtype=dtype)
        loss, sums = self(bound, inputs, state, self.num_items(inputs))
        outputs = jnp.concatenate(bound.outputs) if bound.outputs else jnp.zeros(len(inputs["input_ids"]))
        return sums | {"loss": loss}, outputs

    def prediction(self, prediction_step: Callable) -> Callable[..., tuple]:
        """Returns a function that evaluates a batch with the user-defined `prediction_step`, which is not compiled:
        `(params, arrays, dtype) -> (sums with "loss", (logits, labels))`, with `()` for None."""
        in_torch = TorchLoss(self)

        def predicted(model: Any, script_inputs: dict) -> tuple:
            return prediction_step(model, script_inputs, self.setup.args.prediction_loss_only, None)

        def predicted_in_jax(params: dict, inputs: dict, dtype: str) -> tuple:
            bound = self.bound(params, inputs, dtype=dtype)
            with torch_explained("prediction_step"):
                script_inputs = {name: jnp.asarray(value) for name, value in seen_by_scripts(inputs).items()}
                results = predicted(bound, script_inputs)
            return self.sums(bound, inputs), results

        def predict(params: dict, arrays: Batch, *, dtype: str) -> tuple:
            [inputs] = self.inputs(arrays)
            sums, (loss, *outputs) = self.in_jax_or_torch(
                lambda: predicted_in_jax(params, inputs, dtype),
                lambda: in_torch.predicted(predicted, params, inputs, dtype=dtype),
            )
            loss, outputs = torch_bridge.as_arrays([loss, outputs])
            on_host = tuple(() if part is None else jax.tree.map(np.asarray, part) for part in outputs)
            return sums | {"loss": jnp.asarray(loss, jnp.float32)}, on_host

        return predict


class UserLossStep:
    """A step like `update.make_step`, for a loss that is a mean over its examples.

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
        user_loss, user_step = self._user_loss, self._user_loss.user_step
        micro_batches = user_loss.inputs(arrays)
        parts, num_items, pass_weight = len(micro_batches), None, np.float32(1)
        if user_loss.counts_targets:  # the loss itself divides by the targets of the whole step
            parts, pass_weight = 1, np.float32(1 / len(micro_batches))
            num_items = np.float32(max(1, np.count_nonzero(np.asarray(arrays.targets) >= 0)))
        keys = [None] * len(micro_batches) if key is None else jax.random.split(key, len(micro_batches))
        total, logged_total, gradients, sums, at = 0.0, 0.0, None, [], self._point(params, opt_state)
        values, state = user_loss.values(), user_loss.state()
        for number, (inputs, micro_key) in enumerate(zip(micro_batches, keys, strict=True), start=1):

            def computed(inputs: dict, micro_key: Any = micro_key) -> tuple:
                arguments = at, frozen, inputs, micro_key, num_items, pass_weight
                (loss, micro_sums), grads = user_loss.in_jax_or_torch(
                    lambda: self._grad(*arguments, state=state, values=values),
                    lambda: self._in_torch.value_and_grad(*arguments),
                )
                return loss / parts, micro_sums, grads

            if user_step is None:
                loss, micro_sums, grads = computed(inputs)
                logged = loss
            else:
                last = number == len(micro_batches)
                (loss, micro_sums, grads), logged = user_step(computed, inputs, num_items, last=last)
            total, logged_total, sums = total + loss, logged_total + logged, [*sums, micro_sums]
            gradients = grads if gradients is None else jax.tree.map(jnp.add, gradients, grads)
        gradients = jax.tree.map(lambda g: g / parts, gradients)
        params, opt_state, measured = self._apply(params, opt_state, gradients, total, learning_rate)
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *with_same_names(sums))
        return params, opt_state, stacked | {"loss": logged_total} | measured

    def in_one_program(self, options: Any) -> Any:
        """A jitted step with the arguments of `make_step`'s step, for planning: it scans over all micro-batches, while
        a call runs one program per micro-batch. The batch has the `inputs` of all micro-batches, stacked.

        Args:
            options: compiler options.
        """

        def step(params: dict, opt_state: Any, inputs: dict, learning_rate: Any, key: Any, frozen: dict) -> tuple:
            parts, at, state = len(inputs["input_ids"]), self._point(params, opt_state), self._user_loss.state()
            num_items = jnp.float32(1) if self._user_loss.counts_targets else None

            def add(total: Any, micro: dict) -> tuple[Any, jax.Array]:
                arguments = at, frozen, micro, key, num_items, jnp.float32(1 / parts)
                (loss, _), grads = jax.value_and_grad(self._loss, has_aux=True)(*arguments, state=state, values=())
                return jax.tree.map(jnp.add, total, grads), loss

            gradients, losses = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, at), inputs)
            return _apply(self._tx, params, opt_state, gradients, losses.sum(), learning_rate)

        return jax.jit(step, donate_argnums=(0, 1), compiler_options=options)

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
        del values  # as in `UserLoss._evaluated`
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


class UserStep:
    """Calls a user-defined `training_step` and `_prepare_inputs` around the computation of a micro-batch. They get the
    inputs of TRL's collator: tensors if torch is installed and the script does not use JAX, else NumPy arrays."""

    def __init__(self, setup: Callable[[], Setup], call: Callable, prepare: Callable, tensors: bool):
        """
        Args:
            call: `(compute, inputs, num_items_in_batch, last) -> loss`, the trainer's `training_step`, in which
                `super()` calls `compute(inputs) -> loss`. `last`: whether this is the step's last micro-batch.
            prepare: the trainer's `_prepare_inputs`.
            tensors: whether to pass torch tensors to the script's methods.
        """
        self._setup, self._call, self._prepare, self._tensors = setup, call, prepare, tensors

    def __call__(self, computed: Callable, inputs: dict[str, Any], num_items: Any, *, last: bool) -> tuple[tuple, Any]:
        """`computed(inputs)` of a micro-batch, which is `(loss, sums, gradient)`, and the loss to log.

        Raises:
            RuntimeError: the script's method did not call `super()` exactly once.
        """
        results, rows = [], self._rows(inputs)

        def compute(changed: Any) -> Any:
            results.append(computed(self._taken(inputs, rows, changed)))
            return self._for_script({"loss": np.asarray(results[0][0])})["loss"]

        count = None if num_items is None else self._for_script({"count": np.int64(num_items)})["count"]
        loss = self._call(compute, self._for_script(rows.shown), count, last)
        if len(results) != 1:
            raise RuntimeError(
                f"training_step called super().training_step(model, inputs, ...) {len(results)} times for a "
                "micro-batch; expected once: it computes the loss and its gradient."
            )
        return results[0], np.float32(torch_bridge.as_arrays(loss))

    def prepared(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """The inputs as `_prepare_inputs` changes them."""
        rows = self._rows(inputs)
        return self._taken(inputs, rows, self._prepare(self._for_script(rows.shown)))

    def _for_script(self, arrays: dict[str, Any]) -> dict[str, Any]:
        return torch_bridge.batch_tensors(arrays) if self._tensors else dict(arrays)

    def _rows(self, inputs: dict[str, Any]) -> CutRows:
        """The batch under TRL's names; for DPO and KTO without the reference log-probabilities."""
        arrays, setup = seen_by_scripts(inputs), self._setup()
        return CutRows(trl_inputs(setup.task, arrays) if setup.loss_compares else arrays, setup)

    def _taken(self, inputs: dict[str, Any], rows: CutRows, changed: dict[str, Any]) -> dict[str, Any]:
        """The step's inputs with the script's changes: arrays replaced, left out or added.

        Raises:
            TypeError: a value is not numeric, or the loss uses a reference and anything was changed.
        """
        before = rows.shown
        arrays = {name: np.asarray(value) for name, value in torch_bridge.as_arrays(dict(changed)).items()}
        if invalid := sorted(name for name, value in arrays.items() if value.dtype.kind not in "biuf"):
            raise TypeError(
                f"inputs[{invalid[0]!r}] is {brief(changed[invalid[0]])}; expected numbers: the loss is compiled."
            )
        if missing := sorted({"input_ids", "attention_mask", "labels"} & before.keys() - arrays.keys()):
            raise TypeError(f"inputs are without {', '.join(missing)}, which the loss reads.")
        arrays = {name: value.astype(before[name].dtype) if name in before else value for name, value in arrays.items()}
        if not self._setup().loss_compares:
            return rows.padded(arrays) | {name: inputs[name] for name in inputs.keys() - seen_by_scripts(inputs).keys()}
        if arrays.keys() != before.keys() or any(not np.array_equal(arrays[name], before[name]) for name in before):
            raise TypeError(
                "training_step changed inputs whose reference log-probabilities the step computes itself. Pass them to "
                "super().training_step as they are, or change the rows."
            )
        return inputs


_OF_MODEL = frozenset({"at_gradients", "name_or_path", "training", "writes"})  # attributes that trl_jax sets


def script_values(trainer: Any) -> tuple[tuple[str, Any], ...]:
    """The numbers and strings that a script set on its trainer and its model, by name. They are compiled into the loss
    with their current values."""
    kinds = (bool, int, float, str)
    of_model = {f"model.{name}": vars(trainer.model)[name] for name in vars(trainer.model).keys() - _OF_MODEL}
    values = vars(trainer) | of_model
    return tuple((name, value) for name, value in sorted(values.items()) if type(value) in kinds)


def described(value: Any) -> str:
    return f"an array {list(value.shape)}" if isinstance(value, jax.Array) else f"a {type(value).__qualname__}"
