"""The model that a user-defined `compute_loss` calls, and the default loss that `super().compute_loss` returns."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp

from trl_jax.core.outputs import Images, PrecomputedFeatures, reads_of_rows
from trl_jax.data.batch import IGNORED, Extras, LossBatch
from trl_jax.hub import torch_bridge
from trl_jax.hub.heads import HeadName
from trl_jax.losses.supervised import load_balancing_loss
from trl_jax.models.model import merge
from trl_jax.nn.head import outputs_of_logits
from trl_jax.tasks.task import Task, TokenTask
from trl_jax.training.data import RowImages
from trl_jax.training.forward import aux_loss_sums
from trl_jax.training.metrics import user_sums
from trl_jax.training.reference import ReferenceInputs, label_reads
from trl_jax.training.torch_errors import NotGiven, check_same

OUTPUTS = ("loss", "aux_loss", "logits", "log_probs", "entropy", "mean_logits", "log_sum_sq_probs", "is_top1")
FIXED = OUTPUTS[-3:]  # without gradients


class Outputs:
    """The model's outputs, by attribute, key or index: `loss`, if labels were passed, then `logits`.

    loss: the mean over targets, or their sum divided by `num_items_in_batch`, as in transformers' causal models.
    aux_loss: the unweighted load-balancing loss of a mixture of experts; None if the run adds none.
    logits: float32, `[rows, 1]` from a score head, `[rows, T, V]` from a language model; None with `fused_lm_head`.
    log_probs, entropy, mean_logits, log_sum_sq_probs: only with `fused_lm_head`; float32 `[rows, T - 1]` for each label
        after the first, 0 where the label is -100.
    is_top1: only with `fused_lm_head`; bool, whether the label is the most likely token.

    mean_logits, log_sum_sq_probs and is_top1 have no gradients.
    """

    loss = aux_loss = None
    _again: Callable[[], Any] | None = None

    def __init__(self, **values: Any):
        vars(self).update(values)

    def __getattr__(self, name: str) -> Any:
        raise NotGiven(f"the model's {name}")

    @property
    def logits(self) -> Any:
        if "logits" not in vars(self) and self._again is not None:
            vars(self)["logits"] = self._again()
        return vars(self).get("logits")

    def with_logits(self, again: Callable[[], Any]) -> Outputs:
        """The same, with logits that are computed on first access, as TRL's `super()` returns them."""
        self._again = again
        return self

    def __getitem__(self, key: str | int) -> jax.Array:
        found = {name: vars(self)[name] for name in OUTPUTS if vars(self).get(name) is not None}
        return list(found.values())[key] if isinstance(key, int) else found[key]


class BoundModel:
    """The model with the parameters of this step, called on right-padded rows.

    `outputs` and `aux_losses` collect the results of all calls in order; `ignored` arguments have no effect; `training`
    is False in evaluation, as in torch. Other attributes are those of the trainer's model.
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
        images: RowImages | None = None,
        comparing: ReferenceInputs | None = None,
    ):
        """
        Args:
            comparing: for a loss that uses a reference; None for others.
            random_options: `(number of the call, lengths of its rows) -> random options`; None for none.
            ignored: further names in a batch that a call may pass without effect.
            head: the model's.
            aux_loss_weight: the weight of the load-balancing loss in the batch's loss; None disables it.
            images: of the batch's rows; None if they have none. A call uses them if it gets `pixel_values`, and always
                if their features are precomputed.
        """
        self._model, self._params, self._random_options = model, params, random_options
        self._options = {"dtype": jnp.dtype(dtype), "remat": remat}
        self._ignored = self.ignored | ignored
        self.config, self.outputs, self._head = model.config, [], head
        self.aux_losses, self.aux_loss_weight, self.training = [], aux_loss_weight, training
        self._images = images
        self.comparing, self.metrics, self.default_sums = comparing, defaultdict(list), None

    def __call__(
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        labels: Any = None,
        num_items_in_batch: Any = None,
        pixel_values: Any = None,
        **others: Any,
    ) -> Outputs:
        """Run the model on rows of token ids `[rows, T]`, with its virtual tokens, if any, prepended.

        Args:
            labels: `[rows, T]`, for a language model, which then also returns `loss`.
            pixel_values: `[P, C]`, the patches of the batch's images; with None, rows are read as text only.
            others: `return_dict`, `use_cache` and other entries of a batch, which have no effect.

        Raises:
            TypeError: an unknown argument.
            ValueError: `pixel_values` with rows other than the batch's.
        """
        if self._model.active is not self._model:
            with self._as_base():
                return self(input_ids, attention_mask, labels, num_items_in_batch, pixel_values, **others)
        if labels is not None and self._head == "score" and "labels" not in self._ignored:
            others["labels"] = labels
        if pixel_values is not None and self._images is None:
            others["pixel_values"] = pixel_values
        fused = self.comparing is not None and others.pop("fused_lm_head", False)
        if unknown := others.keys() - self._ignored:
            raise TypeError(f"model(...) takes input_ids and attention_mask, not {', '.join(sorted(unknown))}.")
        tokens, virtual = jnp.asarray(input_ids), self._model.backend.virtual
        if virtual.count:
            ones = jnp.ones((len(tokens), virtual.count), int)
            tokens = jnp.hstack([jnp.broadcast_to(virtual.ids, ones.shape), tokens])
            attention_mask = None if attention_mask is None else jnp.hstack([ones, attention_mask])
        places = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
        options = dict(self._options)
        if self._images is not None and isinstance(self._images.images, PrecomputedFeatures):
            options["images"], places = self._images.images._replace(of_reference=None), self._images.positions
        elif pixel_values is not None:
            options["images"], places = self._with_images(tokens, pixel_values)
        if self._random_options is not None:
            visible = jnp.ones(tokens.shape, int) if attention_mask is None else attention_mask
            options |= self._random_options(len(self.outputs), jnp.sum(visible, axis=1))
        model = merge(self._model.graph, self._params, options.get("dropout_key"))
        if model.needs_valid:
            options["valid"] = jnp.ones(tokens.shape, bool) if attention_mask is None else attention_mask.astype(bool)
        if fused:
            if labels is None:
                raise TypeError("model(..., fused_lm_head=True) returns log_probs of labels: pass labels=, too.")
            reads, targets = label_reads(labels)
            self.tokens, aux_loss = self._logits(
                model, tokens, places, attention_mask, options | {"targets": targets, "temperature": 1.0}, reads
            )
            names = {"log_probs": "logps", "is_top1": "correct"} | {name: name for name in OUTPUTS[4:-1]}
            found = {name: getattr(self.tokens, own).reshape(len(tokens), -1) for name, own in names.items()}
            return Outputs(aux_loss=aux_loss, **found | {"is_top1": found["is_top1"] > 0})
        if self._head == "lm":
            logits, aux_loss = self._logits(model, tokens, places, attention_mask, options)
            self.outputs.append(logits.reshape(*tokens.shape, -1)[:, virtual.count :])
            loss = None if labels is None else mean_loss(self.outputs[-1], jnp.asarray(labels), num_items_in_batch)
            loss = None if loss is None else self.balanced(loss, aux_loss)
            return Outputs(logits=self.outputs[-1], loss=loss, aux_loss=aux_loss)
        at = jnp.max(jnp.where(tokens != self.config.pad_token_id, places, 0), axis=1)
        self.outputs.append(model(tokens, places, reads_of_rows(at, tokens.shape[1]), **options))
        return Outputs(logits=self.outputs[-1][:, None])

    forward = __call__

    def _with_images(self, tokens: jax.Array, pixel_values: Any) -> tuple[Images, jax.Array]:
        """The batch's images with these patches, and the positions of the tokens."""
        images, positions = self._images
        shape, given = images.patches.shape[1:], images._replace(patches=jnp.asarray(pixel_values)[None])
        if self.comparing is not None:
            given, positions = self.comparing.images_of(tokens, given, positions)
        if tokens.shape != given.at.shape or jnp.shape(pixel_values) != shape:
            raise ValueError(
                f"model(...) got input_ids {list(tokens.shape)} and pixel_values {list(jnp.shape(pixel_values))}; "
                f"expected the shapes of the batch, {list(given.at.shape)} and {list(shape)}: "
                "images belong to the rows of inputs. Pass all rows in one call, and select among the logits."
            )
        return given, jnp.asarray(positions)

    def compared_inputs(self, inputs: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """The inputs of a loss that uses a reference, under TRL's names."""
        options = {"dtype": self._options["dtype"]}
        self._shown = self.comparing.inputs(inputs, options, self._images)
        self._ignored |= self._shown.keys() | {"output_router_logits"}
        return dict(self._shown)

    def compared_loss(self, inputs: dict[str, Any]) -> tuple[jax.Array, Outputs]:
        """The task's loss of the inputs that `compared_inputs` returned, and the model's outputs."""
        check_same(inputs, self._shown)
        outputs = self(**self.comparing.rows, fused_lm_head=True)
        loss, self.default_sums = self.comparing.loss(self.tokens)
        if outputs.aux_loss is not None:
            self.default_sums = self.default_sums | aux_loss_sums([outputs.aux_loss])
        rows = read_by_model(inputs)
        return self.balanced(loss, outputs.aux_loss), outputs.with_logits(
            lambda: jax.lax.stop_gradient(self(**rows).logits)
        )

    def _logits(
        self, model: Any, tokens: jax.Array, places: jax.Array, mask: Any, options: dict[str, Any], reads: Any = None
    ) -> tuple[Any, jax.Array | None]:
        if self.aux_loss_weight is None:
            return model(tokens, places, reads, **options), None
        options["router_token_count"] = jnp.ones(tokens.shape, int) if mask is None else jnp.asarray(mask)
        logits, sums = model(tokens, places, reads, **options)
        self.aux_losses.append(load_balancing_loss(sums))
        return logits, self.aux_losses[-1]

    def default_loss(self, task: Task, inputs: dict[str, jax.Array], num_items: Any) -> tuple[jax.Array, Outputs]:
        """The task's loss of a batch, and the model's outputs; see the function `default_loss`."""
        return default_loss(task, self, inputs, num_items)

    def balanced(self, loss: jax.Array, aux_loss: jax.Array | None) -> jax.Array:
        """Add a call's load-balancing loss, if there is one, to the loss of a batch."""
        return loss if aux_loss is None else loss + self.aux_loss_weight * aux_loss

    @contextlib.contextmanager
    def _as_base(self) -> Iterator[None]:
        """A context in which calls use the base model, in `disable_adapter`. Their outputs have no gradient, and the
        loss logs nothing of them."""
        before = self._model, self._params, self.outputs, self.aux_losses
        self._model, self.outputs, self.aux_losses = self._model.active, [], []
        self._params = {path: jax.lax.stop_gradient(self._params[path]) for path in self._model.arrays}
        try:
            yield
        finally:
            self._model, self._params, self.outputs, self.aux_losses = before

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def logged_sums(model: Any) -> dict[str, jax.Array]:
    """The metrics that a user-defined loss logged for one micro-batch, in `metrics` of the model that it called.

    A loss that uses a reference always counts its micro-batches.
    """
    if not (model.metrics or isinstance(model, BoundModel) and model.comparing is not None):
        return {}
    logged = {name: values for name, values in model.metrics.items() if name != "num_tokens"}  # counted by the run
    return user_sums(torch_bridge.as_arrays(logged), jnp.bool_(True))


# The default loss, for `super().compute_loss` in a user-defined method.


def read_by_model(inputs: dict[str, Any]) -> dict[str, Any]:
    """The entries of a batch that the model takes."""
    return {name: inputs[name] for name in ("input_ids", "attention_mask", "pixel_values") if name in inputs}


def default_loss(task: Task, model: Any, inputs: dict[str, jax.Array], num_items: Any) -> tuple[jax.Array, Any]:
    """The task's loss of a batch, and the model's outputs.

    Args:
        model: a `BoundModel`.
        inputs: as passed to `compute_loss`.
        num_items: number of targets in the whole step, for a language model; None uses the batch's own.
    """
    if model.comparing is not None:
        return model.compared_loss(inputs)
    outputs = model(**read_by_model(inputs))
    if task.head == "lm":
        loss, _ = task_loss(task, outputs.logits, inputs["labels"], num_items)
        return model.balanced(loss, outputs.aux_loss), outputs
    examples = len(outputs.logits) // len(task.columns.texts)
    extras = Extras({name: inputs[name] for name in task.columns.numbers if name in inputs})
    weight = jnp.full(examples, 1.0 / examples)
    return task.loss(outputs.logits[:, 0], LossBatch(weight, extras, examples))[0], outputs


# Token statistics from full logits, for scripts that use them. The regular step never materializes full logits.


def pass_of_logits(task: TokenTask, logits: jax.Array, labels: jax.Array) -> dict[str, jax.Array]:
    """`task.token_stats` for rows of one text each.

    Args:
        logits: `[rows, T, V]`.
        labels: `[rows, T]`, as in transformers.
    """
    rows, length = labels.shape
    targets = jnp.where(labels[:, 1:] == IGNORED, -1, labels[:, 1:]).reshape(-1)
    text = jnp.where(targets < 0, rows, jnp.repeat(jnp.arange(rows), length - 1))
    outputs = outputs_of_logits(logits[:, :-1].reshape(-1, logits.shape[-1]), targets)
    return task.token_stats(
        outputs, SimpleNamespace(text=text, targets=targets, weight=jnp.ones(rows), extras=Extras())
    )


def task_loss(task: TokenTask, logits: jax.Array, labels: jax.Array, num_items: Any = None) -> tuple:
    """The task's `(loss, sums)` for rows of one text each, weighted equally, or by token if the task is per token.

    Args:
        logits, labels: as in `pass_of_logits`.
        num_items: divisor of sums over tokens; None uses the number of targets in the rows.
    """
    rows, targets = len(labels), jnp.maximum(1, jnp.sum(labels[:, 1:] != IGNORED))
    weight = 1 / (targets if num_items is None else num_items) if task.per_token else 1 / rows
    batch = LossBatch(jnp.full(rows, weight), Extras(), rows)
    return task.loss(pass_of_logits(task, logits, labels), batch)


def mean_loss(logits: jax.Array, labels: jax.Array, num_items: Any = None) -> jax.Array:
    """The cross-entropy of transformers' causal models: the mean over targets, or their sum divided by `num_items`.

    Args:
        logits: `[rows, T, V]`.
        labels: `[rows, T]`, -100 where nothing is predicted.
    """
    targets = jnp.where(labels[:, 1:] == IGNORED, -1, labels[:, 1:]).reshape(-1)
    outputs = outputs_of_logits(logits[:, :-1].reshape(-1, logits.shape[-1]), targets)
    return -jnp.sum(outputs.logps) / (jnp.sum(targets >= 0) if num_items is None else num_items)
