"""A script's own `compute_loss`: the model that it calls, and the sums to log beside it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trl_jax.core.packed import reads_of_rows
from trl_jax.data.example import IGNORED, LossBatch
from trl_jax.data.extras import Extras
from trl_jax.data.layout.batch import Batch
from trl_jax.hub.heads import HeadName
from trl_jax.losses.load_balancing import load_balancing_loss
from trl_jax.models.functional import merge
from trl_jax.run.state import RunState
from trl_jax.run.step.forward import Forward
from trl_jax.run.step.routers import aux_loss_sums, aux_loss_weight
from trl_jax.run.user_loss.default_loss import default_loss
from trl_jax.run.user_loss.inputs import inputs_of
from trl_jax.run.user_loss.parameters import parameters_refused, read_in_jax
from trl_jax.run.user_loss.token_logits import mean_loss, task_loss
from trl_jax.run.user_loss.torch_errors import WrittenInTorch, may_run_in_torch, torch_explained
from trl_jax.tasks.task import Task

logger = logging.getLogger(__name__)

def script_values(trainer: Any) -> tuple[tuple[str, Any], ...]:
    """The numbers and strings that a script set on its trainer, by name; a compiled loss contains their current
    values."""
    kinds = (bool, int, float, str)
    return tuple((name, value) for name, value in sorted(vars(trainer).items()) if type(value) in kinds)


class Outputs:
    """The result of calling the model, by attribute, key or index: `loss`, where labels were passed, then `logits`.

    loss: the mean over targets, or their sum divided by `num_items_in_batch`, as transformers' causal models give it.
    aux_loss: the load-balancing loss of a mixture of experts, not weighted; None where the run adds none.
    logits: float32, `[rows, 1]` of a score head, `[rows, T, V]` of a language model's.
    """

    def __init__(self, logits: jax.Array, loss: jax.Array | None = None, aux_loss: jax.Array | None = None):
        self.logits, self.loss, self.aux_loss = logits, loss, aux_loss

    def __getitem__(self, key: str | int) -> jax.Array:
        every = {"loss": self.loss, "aux_loss": self.aux_loss, "logits": self.logits}
        there = {name: value for name, value in every.items() if value is not None}
        return list(there.values())[key] if isinstance(key, int) else there[key]


class BoundModel:
    """The model with the parameters of this step, to be called on rows padded on the right.

    `outputs` and `aux_losses` are those of every call, in order; arguments that are `ignored` change nothing;
    `training` is False in an evaluation, as torch has it. Other attributes are the trainer's model's.
    """

    ignored = frozenset({"return_dict", "use_cache"})

    def __init__(
        self,
        model: Any,
        params: dict,
        *,
        dtype: str,
        remat: bool | str = False,
        random_options: Callable[[int, jax.Array], dict[str, Any]] | None = None,
        ignored: frozenset[str] = frozenset(),
        head: HeadName = "score",
        aux_loss_weight: Any = None,
        training: bool = False,
    ):
        """
        Args:
            random_options: `(number of the call, lengths of its rows) -> random options`; None for none.
            ignored: further names of a batch that a call may pass without effect.
            head: the model's.
            aux_loss_weight: what the load-balancing loss counts in the batch's; None where it is not asked for.
        """
        self._model, self._params, self._random_options = model, params, random_options
        self._options = {"dtype": jnp.dtype(dtype), "remat": remat}
        self._ignored = self.ignored | ignored
        self.config, self.outputs, self._head = model.config, [], head
        self.aux_losses, self.aux_loss_weight, self.training = [], aux_loss_weight, training

    def __call__(
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        labels: Any = None,
        num_items_in_batch: Any = None,
        **others: Any,
    ) -> Outputs:
        """Score rows of token ids `[rows, T]`, before which virtual tokens stand where the model has some.

        Args:
            labels: `[rows, T]`, of a language model, which then gives `loss`, too.
            others: `return_dict`, `use_cache` and other entries of a batch, which have no effect.

        Raises:
            TypeError: an unknown argument.
        """
        if labels is not None and self._head == "score" and "labels" not in self._ignored:
            others["labels"] = labels
        if unknown := others.keys() - self._ignored:
            raise TypeError(f"model(...) takes input_ids and attention_mask, not {', '.join(sorted(unknown))}.")
        tokens, virtual = jnp.asarray(input_ids), self._model.backend.virtual
        if virtual.count:
            ones = jnp.ones((len(tokens), virtual.count), int)
            tokens = jnp.hstack([jnp.broadcast_to(virtual.ids, ones.shape), tokens])
            attention_mask = None if attention_mask is None else jnp.hstack([ones, attention_mask])
        places = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
        options = dict(self._options)
        if self._random_options is not None:
            visible = jnp.ones(tokens.shape, int) if attention_mask is None else attention_mask
            options |= self._random_options(len(self.outputs), jnp.sum(visible, axis=1))
        model = merge(self._model.graph, self._params, options.get("dropout_key"))
        if model.needs_valid:
            options["valid"] = jnp.ones(tokens.shape, bool) if attention_mask is None else attention_mask.astype(bool)
        if self._head == "lm":
            logits, aux_loss = self._logits(model, tokens, places, attention_mask, options)
            self.outputs.append(logits.reshape(*tokens.shape, -1)[:, virtual.count :])
            loss = None if labels is None else mean_loss(self.outputs[-1], jnp.asarray(labels), num_items_in_batch)
            return Outputs(self.outputs[-1], None if loss is None else self.balanced(loss, aux_loss), aux_loss)
        at = jnp.max(jnp.where(tokens != self.config.pad_token_id, places, 0), axis=1)
        self.outputs.append(model(tokens, places, reads_of_rows(at, tokens.shape[1]), **options))
        return Outputs(self.outputs[-1][:, None])

    def _logits(
        self, model: Any, tokens: jax.Array, places: jax.Array, mask: Any, options: dict[str, Any]
    ) -> tuple[jax.Array, jax.Array | None]:
        if self.aux_loss_weight is None:
            return model(tokens, places, None, **options), None
        options["router_token_count"] = jnp.ones(tokens.shape, int) if mask is None else jnp.asarray(mask)
        logits, sums = model(tokens, places, None, **options)
        self.aux_losses.append(load_balancing_loss(sums))
        return logits, self.aux_losses[-1]

    def default_loss(self, task: Task, inputs: dict[str, jax.Array], num_items: Any) -> tuple[jax.Array, Outputs]:
        """The task's loss of a batch, and what the model gave; arguments as of `default_loss.default_loss`."""
        return default_loss(task, self, inputs, num_items)

    def balanced(self, loss: jax.Array, aux_loss: jax.Array | None) -> jax.Array:
        """The loss of a batch with the load-balancing loss of a call, if there is one."""
        return loss if aux_loss is None else loss + self.aux_loss_weight * aux_loss

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class UserLoss:
    """Calls a script's own loss with the model and the batch in TRL's form, and computes the sums to log.

    values: returns the numbers and strings on the script's trainer; the loss is compiled again when they change.
    in_torch: whether the loss was found to be written in torch.
    """

    def __init__(
        self, run: RunState, forward: Forward, compute_loss: Callable, values: Callable[[], tuple[tuple[str, Any], ...]]
    ):
        self._run, self._forward, self.compute_loss, self.values = run, forward, compute_loss, values
        self.in_torch = False

    def __call__(
        self, bound: BoundModel, inputs: dict[str, Any], state: dict[str, Any], num_items: Any = None
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The loss and the sums of a batch.

        Args:
            state: from `state()`; the script reads it as `self.state`.
            num_items: the targets of the whole step, for a language model's loss, which divides by them; None in an
                evaluation and under a score head.

        Raises:
            TypeError: the script called torch, read parameters, or did not return a scalar.
        """
        options = {} if self._run.task.head == "score" else {"num_items_in_batch": num_items}
        refused = parameters_refused(self._run.model, read_in_jax)
        with self._run.state_replaced(state), torch_explained(), refused:
            result = self.compute_loss(bound, {name: jnp.asarray(value) for name, value in inputs.items()}, **options)
        loss = result[0] if isinstance(result, tuple) else result
        if not isinstance(loss, jax.Array) or loss.shape != ():
            raise TypeError(
                f"compute_loss returned {_described(loss)}: wanted a JAX scalar, as in "
                "-jax.nn.log_sigmoid(model(**inputs).logits).mean()."
            )
        return loss.astype(jnp.float32), self.sums(bound, inputs)

    def to_torch(self, error: WrittenInTorch) -> None:
        """Go on with a loss in torch, if it can; else raise the error."""
        if not may_run_in_torch(error):
            raise error
        self.in_torch = True
        logger.warning(
            "compute_loss is written in torch (`%s`): JAX computes the model, and its outputs go to torch and their "
            "gradient back for each batch. In jax.numpy it is compiled with the model, and faster; %s.",
            error.line,
            error.instead,
        )

    def state(self) -> dict[str, np.ndarray]:
        """The step and epoch, for a compiled loss that reads `self.state`."""
        state = self._run.state
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
            key: that of the batch, in training.
            pass_weight: what the batch counts in a mean over those of the step.
            first_call: how many calls of the batch came before.
        """

        def random_options(call: int, lengths: jax.Array) -> dict[str, Any]:
            return self._forward.random_options(jax.random.fold_in(key, first_call + call), lengths)

        return BoundModel(
            self._run.model,
            params,
            dtype=dtype,
            remat=remat,
            random_options=None if key is None else random_options,
            ignored=frozenset(inputs),
            head=self._run.task.head,
            aux_loss_weight=aux_loss_weight(self._run, pass_weight),
            training=training,
        )

    def sums(self, bound: BoundModel, inputs: dict[str, Any]) -> dict[str, jax.Array]:
        """The sums of the task's loss, where the calls cover each row of the batch once; otherwise sums without
        examples."""
        task, rows = self._run.task, len(inputs["input_ids"])
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
        """Each micro-batch of a step of padded rows, as `inputs_of`."""
        return inputs_of(arrays, self._run.task)


def _described(value: Any) -> str:
    return f"an array {list(value.shape)}" if isinstance(value, jax.Array) else f"a {type(value).__qualname__}"
