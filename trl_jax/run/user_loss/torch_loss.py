"""A script's own loss that is written in torch: JAX computes the model's outputs, torch the loss of them and its
derivative by them, and JAX goes on backwards from there."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trl_jax.hub.torch import losses
from trl_jax.run.state import RunState
from trl_jax.run.user_loss.bound_model import BoundModel, Outputs, UserLoss
from trl_jax.run.user_loss.default_loss import default_loss
from trl_jax.run.user_loss.parameters import parameters_refused
from trl_jax.run.user_loss.torch_errors import NotGiven, outputs_alone


class TorchOutputs(Outputs):
    """`Outputs` of torch's tensors; what else a model of torch's has is not given."""

    def __getattr__(self, name: str) -> Any:
        raise NotGiven(f"the model's {name}")


class TorchModel:
    """The model as a loss in torch calls it; each call is kept with what its gradient goes back through.

    leaves, backwards, outputs: of the calls, in order: tensors that take up a gradient, the way back from them, and
        the arrays that JAX computed.
    """

    def __init__(self, compute: Callable, model: Any, known: frozenset[str], training: bool):
        """
        Args:
            compute: `(kind of call, arrays, number of the call) -> (outputs by name, the way back)`.
            known: the names that a call may pass, with or without effect.
            training: False in an evaluation.
        """
        self._compute, self._model, self._known, self.training = compute, model, known, training
        self.leaves, self.backwards, self.outputs = [], [], []

    def __call__(self, input_ids: Any = None, attention_mask: Any = None, **others: Any) -> TorchOutputs:
        """As `BoundModel`'s, of tensors."""
        if unknown := others.keys() - self._known:
            raise NotGiven(f"model(...) with {', '.join(sorted(unknown))}")
        found = {"input_ids": input_ids, "attention_mask": attention_mask} | others
        given = {name: value for name, value in found.items() if value is not None and not isinstance(value, bool)}
        return self._outputs("call", given)[1]

    def default_loss(self, task: Any, inputs: dict[str, Any], num_items: Any) -> tuple[Any, TorchOutputs]:
        """The task's loss of a batch, and what the model gave."""
        del task  # the run's
        return self._outputs("default", inputs | ({} if num_items is None else {"num_items": num_items}))

    def _outputs(self, kind: str, tensors: dict[str, Any]) -> tuple[Any, TorchOutputs]:
        arrays = {name: np.asarray(value) for name, value in tensors.items()}
        outputs, back = self._compute(kind, arrays, len(self.outputs))
        leaves, shown = losses.asking(outputs)
        self.leaves.append(leaves)
        self.backwards.append(back)
        self.outputs.append(outputs)
        return shown.get("loss"), TorchOutputs(shown["logits"], shown.get("loss"), shown.get("aux_loss"))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class TorchLoss:
    """Computes a script's loss in torch, and its gradient by the parameters; as `UserLoss` in a compiled step."""

    def __init__(self, run: RunState, user_loss: UserLoss, without_frozen: Callable = lambda loss: loss):
        """
        Args:
            without_frozen: turns a function of the parameters into one without gradients of frozen ones.
        """
        self._run, self._user_loss = run, user_loss
        static = ("kind", "call", "dtype", "remat")
        outputs = without_frozen(self._outputs)
        self._forward = jax.jit(outputs, static_argnames=static)
        self._both = jax.jit(partial(_with_way_back, outputs), static_argnames=static)
        self._back = jax.jit(lambda back, gradient: back(gradient)[0])
        self._sums = jax.jit(self._task_sums)

    def value_and_grad(
        self, params: dict, frozen: dict, inputs: dict, key: Any, num_items: Any, pass_weight: Any
    ) -> tuple[tuple[Any, dict], dict]:
        """`((loss, sums), gradient)` of a micro-batch, as of the compiled loss."""
        args = self._run.args
        options = {"dtype": args.compute_dtype, "remat": args.remats[-1]}

        def compute(kind: str, arrays: dict, call: int) -> tuple[dict, Any]:
            return self._both(params, frozen, inputs, arrays, key, pass_weight, kind=kind, call=call, **options)

        model = self._model(compute, inputs, training=True)
        loss = self._loss(model, inputs, num_items)
        if not (loss.requires_grad and model.leaves):
            raise TypeError("compute_loss returned a tensor without a gradient: wanted a loss of model(...).logits.")
        backwards = zip(model.backwards, losses.gradients(loss, model.leaves), strict=True)
        parts = [self._back(back, gradient) for back, gradient in backwards]
        gradient = jax.tree.map(lambda *of_calls: sum(of_calls[1:], of_calls[0]), *parts)
        return (np.float32(loss.item()), self._sums(model.outputs, inputs)), gradient

    def evaluated(self, params: dict, inputs: dict, *, dtype: str) -> tuple[dict, Any]:
        """`(sums with "loss", outputs)` of a batch."""

        def compute(kind: str, arrays: dict, call: int) -> tuple[dict, None]:
            return self._forward(params, {}, inputs, arrays, None, 1.0, kind=kind, call=call, dtype=dtype), None

        model = self._model(compute, inputs, training=False)
        with losses.without_gradient():
            loss = self._loss(model, inputs, None)
        outputs = [_of_texts(found, self._run.task.head) for found in model.outputs]
        found = jnp.concatenate(outputs) if outputs else jnp.zeros(len(inputs["input_ids"]))
        return self._sums(model.outputs, inputs) | {"loss": jnp.float32(loss.item())}, found

    def _model(self, compute: Callable, inputs: dict, training: bool) -> TorchModel:
        known = frozenset(inputs) | BoundModel.ignored
        if self._run.task.head == "lm":
            known |= {"labels", "num_items_in_batch"}
        return TorchModel(compute, self._run.model, known, training)

    def _loss(self, model: TorchModel, inputs: dict, num_items: Any) -> Any:
        """The script's loss, a tensor of one number."""
        tensors = losses.batch_tensors(inputs)
        options = {}
        if self._run.task.head == "lm":
            options = {"num_items_in_batch": num_items}
            options = options if num_items is None else losses.batch_tensors(options)
        refused = parameters_refused(self._run.model, lambda: NotGiven("the model's parameters"))
        with refused, outputs_alone():
            result = self._user_loss.compute_loss(model, tensors, **options)
        loss = result[0] if isinstance(result, tuple) else result
        if not losses.is_tensor(loss) or loss.numel() != 1:
            what = f"a tensor {list(loss.shape)}" if losses.is_tensor(loss) else f"a {type(loss).__qualname__}"
            raise TypeError(f"compute_loss returned {what}: wanted a tensor of one number, as in loss.mean().")
        return loss.reshape(())

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
    ) -> dict[str, jax.Array]:
        """The outputs of one call of the model, by name."""
        options |= {"key": key, "pass_weight": pass_weight, "first_call": call}
        bound = self._user_loss.bound(frozen | params, inputs, **options)
        if kind == "default":
            of_batch = {name: arrays[name] for name in inputs}
            loss, outputs = default_loss(self._run.task, bound, of_batch, arrays.get("num_items"))
        else:
            outputs = bound(**arrays)
            loss = outputs.loss
        found = {"loss": loss, "aux_loss": outputs.aux_loss, "logits": outputs.logits}
        return {name: value for name, value in found.items() if value is not None}

    def _task_sums(self, outputs: list[dict], inputs: dict) -> dict[str, jax.Array]:
        aux_losses = [found["aux_loss"] for found in outputs if "aux_loss" in found]
        found = [_of_texts(one, self._run.task.head) for one in outputs]
        return self._user_loss.sums(SimpleNamespace(outputs=found, aux_losses=aux_losses), inputs)


def _with_way_back(outputs: Callable, params: dict, *given: Any, **options: Any) -> tuple[dict, Any]:
    """The outputs, and the function that takes their gradient to that of the parameters."""
    return jax.vjp(lambda params: outputs(params, *given, **options), params)


def _of_texts(outputs: dict[str, jax.Array], head: str) -> jax.Array:
    return outputs["logits"] if head == "lm" else outputs["logits"][:, 0]
