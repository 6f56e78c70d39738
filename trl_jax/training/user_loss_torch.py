"""Losses of a `UserLoss` in torch: JAX computes the model's outputs, torch the loss and its gradient with respect to
them, and JAX continues the backward pass from there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trl_jax.hub import torch_bridge
from trl_jax.training.data import seen_by_scripts
from trl_jax.training.user_loss_errors import NotGiven, check_same, outputs_alone, parameters_refused, torch_scalar
from trl_jax.training.user_loss_model import FIXED, OUTPUTS, CutRows, Outputs, logged_sums, read_by_model


class TorchModel:
    """The model as a loss in torch calls it. Each call is recorded for the backward pass.

    leaves, backwards, outputs: of the calls, in order: leaf tensors that collect gradients, VJP functions, and the
        arrays that JAX computed.
    """

    def __init__(
        self, compute: Callable, model: Any, known: frozenset[str], training: bool, rows: CutRows, compares: bool
    ):
        """
        Args:
            compute: `(kind of call, arrays, number of the call) -> (outputs by name, their VJP function)`. A kind of
                its own makes jit trace calls in `disable_adapter` apart.
            known: the names that a call may pass, with or without effect.
            training: False in evaluation.
            rows: as the script sees them.
            compares: whether the loss uses a reference, whose log-probabilities belong to the unchanged rows.
        """
        self._compute, self._model, self._known, self.training = compute, model, known, training
        self._rows, self.tensors, self._compares = rows, torch_bridge.batch_tensors(rows.shown), compares
        self.metrics = defaultdict(list)
        self.leaves, self.backwards, self.outputs = [], [], []

    def __call__(
        self, input_ids: Any = None, attention_mask: Any = None, fused_lm_head: bool = False, **others: Any
    ) -> Outputs:
        """Like `BoundModel.__call__`, with tensors."""
        if unknown := others.keys() - self._known:
            raise NotGiven(f"model(...) with {', '.join(sorted(unknown))}")
        passed = {"input_ids": input_ids, "attention_mask": attention_mask} | others
        tensors = {name: value for name, value in passed.items() if value is not None and not isinstance(value, bool)}
        kind = "fused" if fused_lm_head else "call"
        if self._in_base:  # no parameter of the base model is trained
            *_, outputs = self._padded(f"base {kind}", tensors)
            return Outputs(**torch_bridge.batch_tensors(outputs))
        return self._outputs(kind, tensors)

    forward = __call__

    @property
    def _in_base(self) -> bool:
        return self._model.active is not self._model

    def default_loss(self, task: Any, inputs: dict[str, Any], num_items: Any) -> tuple[Any, Outputs]:
        """The task's loss of a batch, and the model's outputs."""
        del task  # `compute` uses the run's
        if self._in_base:
            raise TypeError(
                "super().compute_loss cannot be called in disable_adapter(): call the model, as model(...)."
            )
        if self._compares:
            check_same(inputs, self._rows.shown, in_torch=True)
        outputs = self._outputs("default", inputs | ({} if num_items is None else {"num_items": num_items}))
        if self._compares:
            rows = read_by_model(inputs)
            outputs.with_logits(lambda: self._outputs("call", rows).logits.detach())
        return outputs.loss, outputs

    def _outputs(self, kind: str, tensors: dict[str, Any]) -> Outputs:
        outputs, back, cut = self._padded(kind, tensors)
        leaves, values = torch_bridge.as_leaves({name: value for name, value in cut.items() if name not in FIXED})
        values |= torch_bridge.batch_tensors({name: value for name, value in cut.items() if name in FIXED})
        self.leaves.append(leaves)
        self.backwards.append(back)
        self.outputs.append(outputs)
        return Outputs(**values)

    def _padded(self, kind: str, tensors: dict[str, Any]) -> tuple[dict, Any, dict]:
        """The outputs of a call on padded rows, their VJP function, and the outputs cut to the script's rows."""
        arrays = {name: np.asarray(value) for name, value in tensors.items()}
        outputs, back = self._compute(kind, self._rows.padded(arrays), len(self.outputs))
        length = arrays["input_ids"].shape[1]
        return outputs, back, {name: _cut(name, value, length) for name, value in outputs.items() if name != SUMS}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


# Number of positions in these outputs for a text of T tokens, minus T.
_POSITIONS = {"logits": 0} | dict.fromkeys(OUTPUTS[3:], -1)
SUMS = "sums"  # the entry in a call's outputs with the sums of the task's loss


def _cut(name: str, values: Any, length: int) -> Any:
    """Cut outputs to the first `length` tokens of each text; outputs per text are unchanged."""
    whole = name not in _POSITIONS or name == "logits" and np.ndim(values) < 3
    return values if whole else values[:, : length + _POSITIONS[name]]


class TorchLoss:
    """Computes a user-defined loss in torch, and its gradient with respect to the parameters; the counterpart of a
    compiled `UserLoss`."""

    def __init__(self, user_loss: Any, without_frozen: Callable = lambda loss: loss):
        """
        Args:
            user_loss: the `user_loss.UserLoss` whose loss turned out to be in torch.
            without_frozen: wraps a function of the parameters such that frozen ones have no gradients.
        """
        self._setup, self._user_loss, self._kind = user_loss.setup, user_loss, user_loss.kind
        static = ("kind", "call", "dtype", "remat")
        outputs = without_frozen(self._outputs)
        self._forward = jax.jit(lambda *args, **options: _joined(outputs(*args, **options)), static_argnames=static)
        self._both = jax.jit(partial(_with_vjp, outputs), static_argnames=static)
        self._back = jax.jit(lambda back, gradient: back(gradient)[0])
        self._sums, self._shown = jax.jit(self._task_sums), jax.jit(self._shown_inputs, static_argnames="dtype")

    def value_and_grad(
        self, params: dict, frozen: dict, inputs: dict, key: Any, num_items: Any, pass_weight: Any
    ) -> tuple[tuple[Any, dict], dict]:
        """`((loss, sums), gradient)` of a micro-batch, like the compiled loss."""
        args = self._setup.args
        options = {"dtype": args.compute_dtype, "remat": args.remats[-1]}

        def compute(kind: str, arrays: dict, call: int) -> tuple[dict, Any]:
            return self._both(params, frozen, inputs, arrays, key, pass_weight, kind=kind, call=call, **options)

        model = self._model(compute, params | frozen, inputs, options["dtype"], training=True)
        loss = self._loss(model, num_items)
        if not (loss.requires_grad and model.leaves):
            raise TypeError(
                f"{self._user_loss.name} returned a tensor without a gradient; expected a loss of model(...).logits."
            )
        of_calls = map(_of_whole_rows, torch_bridge.gradients(loss, model.leaves), model.outputs)
        parts = [self._back(back, gradient) for back, gradient in zip(model.backwards, of_calls, strict=True)]
        gradient = jax.tree.map(lambda *of_calls: sum(of_calls[1:], of_calls[0]), *parts)
        return (np.float32(loss.item()), self._sums_of(model, inputs)), gradient

    def predicted(self, call: Callable, params: dict, inputs: dict, *, dtype: str) -> tuple[dict, Any]:
        """The sums of a batch, and the result of `call(model, tensors)`."""
        model = self._evaluating(params, inputs, dtype)
        with torch_bridge.without_gradient(), outputs_alone("prediction_step"):
            results = call(model, model.tensors)
        return self._sums(model.outputs, inputs), results

    def evaluated(self, params: dict, inputs: dict, *, dtype: str) -> tuple[dict, Any]:
        """`(sums with "loss", outputs)` of a batch."""
        model = self._evaluating(params, inputs, dtype)
        with torch_bridge.without_gradient():
            loss = self._loss(model, self._user_loss.num_items(inputs))
        of_calls = [self._kind.of_texts(outputs) for outputs in model.outputs if "logits" in outputs]
        outputs = jnp.concatenate(of_calls) if of_calls else jnp.zeros(len(inputs["input_ids"]))
        return self._sums_of(model, inputs) | {"loss": jnp.float32(loss.item())}, outputs

    def _evaluating(self, params: dict, inputs: dict, dtype: str) -> TorchModel:
        def compute(kind: str, arrays: dict, call: int) -> tuple[dict, None]:
            return self._forward(params, {}, inputs, arrays, None, 1.0, kind=kind, call=call, dtype=dtype), None

        return self._model(compute, params, inputs, dtype, training=False)

    def _model(self, compute: Callable, params: dict, inputs: dict, dtype: str, *, training: bool) -> TorchModel:
        batch = self._shown(params, inputs, dtype=dtype) if self._setup.loss_compares else seen_by_scripts(inputs)
        accepted = frozenset(inputs) | batch.keys() | self._kind.ignored
        if self._kind.takes_labels:
            accepted |= {"labels", "num_items_in_batch", "output_router_logits"}
        rows = CutRows(batch, self._setup)
        return TorchModel(compute, self._setup.model, accepted, training, rows, self._setup.loss_compares)

    def _shown_inputs(self, params: dict, inputs: dict, *, dtype: str) -> dict[str, jax.Array]:
        """The inputs of a loss that uses a reference, whose log-probabilities are computed."""
        rows = {name: jnp.asarray(value) for name, value in seen_by_scripts(inputs).items()}
        return self._user_loss.bound(params, inputs, dtype=dtype).shown(rows)

    def _loss(self, model: TorchModel, num_items: Any) -> Any:
        """The user-defined loss, as a scalar tensor."""
        options = self._user_loss.options(num_items)
        options = options if num_items is None else torch_bridge.batch_tensors(options)
        name = self._user_loss.name
        refused = parameters_refused(name, self._setup.model, lambda: NotGiven("the model's parameters"))
        with refused, outputs_alone(name):
            return torch_scalar(name, self._user_loss.compute_loss(model, model.tensors, **options))

    def _outputs(
        self,
        params: dict,
        frozen: dict,
        inputs: dict,
        arrays: dict,
        key: Any,
        pass_weight: Any,
        *,
        kind: str,
        call: int,
        **options: Any,
    ) -> tuple[dict[str, jax.Array], dict[str, Any]]:
        """The outputs of one call of the model, by name, and separately those without gradients."""
        options |= {"key": key, "pass_weight": pass_weight, "first_call": call}
        bound, sums = self._user_loss.bound(frozen | params, inputs, **options), {}
        replayed = bound.replayed(seen_by_scripts(inputs), arrays)
        if kind == "default":
            loss, outputs = bound.default_loss(self._setup.task, replayed, arrays.get("num_items"))
            sums = {} if bound.default_sums is None else {SUMS: bound.default_sums}
        else:
            outputs = bound(**arrays, **({"fused_lm_head": True} if kind.endswith("fused") else {}))
            loss = outputs.loss
        of_call = {name: vars(outputs).get(name) for name in OUTPUTS} | {"loss": loss}
        values = {name: value for name, value in of_call.items() if value is not None}
        sums |= {name: values.pop(name) for name in FIXED if name in values}
        return values, sums

    def _sums_of(self, model: TorchModel, inputs: dict) -> dict[str, jax.Array]:
        logged = logged_sums(model.metrics, always=self._kind.always_logs)
        return self._sums(model.outputs, inputs) | logged

    def _task_sums(self, outputs: list[dict], inputs: dict) -> dict[str, jax.Array]:
        calls = SimpleNamespace(
            outputs=[self._kind.of_texts(of_call) for of_call in outputs if "logits" in of_call],
            aux_losses=[of_call["aux_loss"] for of_call in outputs if "aux_loss" in of_call],
            default_sums=next((of_call[SUMS] for of_call in reversed(outputs) if SUMS in of_call), None),
        )
        return self._user_loss.sums(calls, inputs)


def _of_whole_rows(gradient: dict[str, np.ndarray], outputs: dict[str, Any]) -> dict[str, np.ndarray]:
    """Pad gradients with zeros to the length of the outputs, because the script only saw their first positions."""

    return {name: torch_bridge.padded_gradient(value, np.shape(outputs[name])) for name, value in gradient.items()}


def _with_vjp(outputs: Callable, params: dict, *rest: Any, **options: Any) -> tuple[dict, Any]:
    """The outputs, and the VJP function, which maps gradients of the differentiable outputs to parameter gradients."""
    values, back, fixed = jax.vjp(lambda params: outputs(params, *rest, **options), params, has_aux=True)
    return values | fixed, back


def _joined(parts: tuple[dict, dict]) -> dict:
    return parts[0] | parts[1]
