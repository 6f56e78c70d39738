"""The model that a user-defined loss calls, and the default loss that `super().compute_loss` returns.

`user_loss.py` says who calls what. The class of the model is chosen once, by `kind_of_model`:

| class | head | a loss of |
| --- | --- | --- |
| `ScoreModel` | one number for each text | RewardTrainer |
| `TokenModel` | language model | SFTTrainer, and trainers without a reference |
| `ComparedModel` | language model | DPO and KTO: the inputs include the reference's log-probabilities |
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from trl_jax.core.outputs import Images, PrecomputedFeatures, TokenOutputs, reads_of_rows
from trl_jax.data.batch import IGNORED, Extras, LossBatch
from trl_jax.hub import torch_bridge
from trl_jax.losses.supervised import load_balancing_loss
from trl_jax.models.model import merge
from trl_jax.nn.head import outputs_of_logits
from trl_jax.tasks.task import Task, TokenTask
from trl_jax.training.data import RowImages
from trl_jax.training.forward import aux_loss_sums
from trl_jax.training.metrics import user_sums
from trl_jax.training.reference import ReferenceModel
from trl_jax.training.state import Setup
from trl_jax.training.user_loss_errors import NotGiven, check_same

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
        values = {name: vars(self)[name] for name in OUTPUTS if vars(self).get(name) is not None}
        return list(values.values())[key] if isinstance(key, int) else values[key]


class Call(NamedTuple):
    """One call of the model.

    run: `(positions to read or None, **further options) -> the model's output`.
    tokens, positions, mask: of its rows, `[rows, T]`, with virtual tokens.
    labels, num_items, others: as passed.
    """

    run: Callable
    tokens: jax.Array
    positions: jax.Array
    mask: Any
    labels: Any
    num_items: Any
    others: dict[str, Any]


class BoundModel:
    """The model with the parameters of this step, called on right-padded rows.

    `outputs` and `aux_losses` collect the results of all calls in order, and `metrics` what the script logs.
    `training` is False in evaluation, as in torch. All other attributes come from the trainer's model.

    Subclasses also have these methods:

    - `_outputs_of(call)`: the outputs of one call.
    - `default_loss(task, inputs, num_items)`: the task's loss, and the model's outputs. The inputs are those that were
      passed to compute_loss; `num_items` is the number of targets in the whole step, or None.
    - `task_sums(task, calls, inputs)`: the sums of the task's loss if the calls cover each row of the batch exactly
      once, otherwise sums over no examples. `calls` has `outputs`, `aux_losses` and `default_sums` of a bound model.

    takes_labels: whether calls take `labels`, and compute_loss takes `num_items_in_batch`.
    divides_by_targets: whether a loss may be divided by the number of targets in the step.
    always_logs: whether micro-batches are counted even if the script logs nothing.
    """

    ignored = frozenset({"return_dict", "use_cache"})  # arguments of calls that have no effect
    takes_labels = divides_by_targets = always_logs = False

    def __init__(
        self,
        model: Any,
        params: dict,
        *,
        dtype: str,
        remat: bool | str = False,
        random_options: Callable[[int, jax.Array], dict[str, Any]] | None = None,
        ignored: frozenset[str] = frozenset(),
        aux_loss_weight: Any = None,
        training: bool = False,
        images: RowImages | None = None,
    ):
        """
        Args:
            random_options: `(number of the call, lengths of its rows) -> random options`; None for none.
            ignored: further names in a batch that a call may pass without effect.
            aux_loss_weight: the weight of the load-balancing loss in the batch's loss; None disables it.
            images: of the batch's rows; None if they have none. A call uses them if it gets `pixel_values`, and always
                if their features are precomputed.
        """
        self._model, self._params, self._random_options = model, params, random_options
        self._options = {"dtype": jnp.dtype(dtype), "remat": remat}
        self._ignored, self._images = self.ignored | ignored, images
        self.config, self.outputs, self.training = model.config, [], training
        self.aux_losses, self.aux_loss_weight = [], aux_loss_weight
        self.metrics, self.default_sums = defaultdict(list), None

    @classmethod
    def of_run(cls, setup: Setup, params: dict, **options: Any) -> BoundModel:
        """The run's model with these parameters, which may include a reference's."""
        if setup.reference is not None:
            params, _ = setup.reference.split(params)
        return cls(setup.model, params, **options)

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
        passed = others.keys() | ({"labels"} if labels is not None and not self.takes_labels else set())
        passed |= {"pixel_values"} if pixel_values is not None and self._images is None else set()
        if unknown := passed - self._ignored:
            raise TypeError(f"model(...) takes input_ids and attention_mask, not {', '.join(sorted(unknown))}.")
        tokens, virtual = jnp.asarray(input_ids), self._model.backend.virtual
        if virtual.count:
            ones = jnp.ones((len(tokens), virtual.count), int)
            tokens = jnp.hstack([jnp.broadcast_to(virtual.ids, ones.shape), tokens])
            attention_mask = None if attention_mask is None else jnp.hstack([ones, attention_mask])
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
        options = dict(self._options)
        if self._images is not None and isinstance(self._images.images, PrecomputedFeatures):
            options["images"], positions = self._images.images._replace(of_reference=None), self._images.positions
        elif pixel_values is not None:
            options["images"], positions = self._with_images(tokens, pixel_values)
        if self._random_options is not None:
            visible = jnp.ones(tokens.shape, int) if attention_mask is None else attention_mask
            options |= self._random_options(len(self.outputs), jnp.sum(visible, axis=1))
        model = merge(self._model.graph, self._params, options.get("dropout_key"))
        if model.needs_valid:
            options["valid"] = jnp.ones(tokens.shape, bool) if attention_mask is None else attention_mask.astype(bool)

        def run(reads: jax.Array | None = None, **more: Any) -> Any:
            return model(tokens, positions, reads, **options | more)

        return self._outputs_of(Call(run, tokens, positions, attention_mask, labels, num_items_in_batch, others))

    forward = __call__

    def _with_images(self, tokens: jax.Array, pixel_values: Any) -> tuple[Images, jax.Array]:
        """The batch's images with these patches, and the positions of the tokens."""
        images, positions = self._images
        shape = images.patches.shape[1:]
        images = images._replace(patches=jnp.asarray(pixel_values)[None])
        images, positions = self._images_of_rows(tokens, images, positions)
        if tokens.shape != images.at.shape or jnp.shape(pixel_values) != shape:
            raise ValueError(
                f"model(...) got input_ids {list(tokens.shape)} and pixel_values {list(jnp.shape(pixel_values))}; "
                f"expected the shapes of the batch, {list(images.at.shape)} and {list(shape)}: "
                "images belong to the rows of inputs. Pass all rows in one call, and select among the logits."
            )
        return images, jnp.asarray(positions)

    def _images_of_rows(self, tokens: jax.Array, images: Images, positions: Any) -> tuple[Images, Any]:
        """The batch's images and positions, for the rows of a call."""
        del tokens
        return images, positions

    def shown(self, inputs: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """The inputs of the batch as the loss gets them."""
        return inputs

    def replayed(self, inputs: dict[str, jax.Array], arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """The inputs of `default_loss`, which a loss in torch called with `arrays`, in a batch of `inputs`."""
        return {name: arrays[name] for name in inputs if name in arrays}

    @staticmethod
    def of_texts(outputs: dict[str, jax.Array]) -> jax.Array:
        """The outputs of a call as an evaluation returns them."""
        return outputs["logits"]

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


class ScoreModel(BoundModel):
    """A model with a score head: `logits` `[rows, 1]`."""

    def _outputs_of(self, call: Call) -> Outputs:
        last = jnp.max(jnp.where(call.tokens != self.config.get_text_config().pad_token_id, call.positions, 0), axis=1)
        self.outputs.append(call.run(reads_of_rows(last, call.tokens.shape[1])))
        return Outputs(logits=self.outputs[-1][:, None])

    def default_loss(self, task: Task, inputs: dict[str, jax.Array], num_items: Any) -> tuple[jax.Array, Outputs]:
        del num_items
        outputs = self(**read_by_model(inputs))
        examples = len(outputs.logits) // len(task.columns.texts)
        extras = Extras({name: inputs[name] for name in task.columns.numbers if name in inputs})
        weight = jnp.full(examples, 1.0 / examples)
        return task.loss(outputs.logits[:, 0], LossBatch(weight, extras, examples))[0], outputs

    @staticmethod
    def task_sums(task: Task, calls: Any, inputs: dict[str, Any]) -> dict[str, jax.Array]:
        rows, texts = len(inputs["input_ids"]), len(task.columns.texts)
        outputs = jnp.concatenate(calls.outputs) if calls.outputs else jnp.zeros(0)
        complete = len(outputs) == rows
        outputs, examples = (outputs, rows // texts) if complete else (jnp.zeros(texts), 1)
        weight = jnp.ones(examples) if complete else jnp.zeros(examples)
        extras = {
            name: inputs[name] if complete else jnp.zeros(examples) for name in task.columns.numbers if name in inputs
        }
        return task.loss(outputs, LossBatch(weight, Extras(extras), examples))[1]

    @staticmethod
    def of_texts(outputs: dict[str, jax.Array]) -> jax.Array:
        return outputs["logits"][:, 0]


class TokenModel(BoundModel):
    """A language model: `logits` `[rows, T, V]`, and with labels `loss`."""

    takes_labels = divides_by_targets = True

    def _outputs_of(self, call: Call) -> Outputs:
        logits, aux_loss = self._with_aux_loss(call)
        self.outputs.append(logits.reshape(*call.tokens.shape, -1)[:, self._model.backend.virtual.count :])
        loss = None
        if call.labels is not None:
            loss = self.balanced(mean_loss(self.outputs[-1], jnp.asarray(call.labels), call.num_items), aux_loss)
        return Outputs(logits=self.outputs[-1], loss=loss, aux_loss=aux_loss)

    def _with_aux_loss(
        self, call: Call, reads: jax.Array | None = None, **options: Any
    ) -> tuple[Any, jax.Array | None]:
        """The model's output, and the load-balancing loss of the call."""
        if self.aux_loss_weight is None:
            return call.run(reads, **options), None
        counts = jnp.ones(call.tokens.shape, int) if call.mask is None else jnp.asarray(call.mask)
        output, router_sums = call.run(reads, **options, router_token_count=counts)
        self.aux_losses.append(load_balancing_loss(router_sums))
        return output, self.aux_losses[-1]

    def default_loss(self, task: TokenTask, inputs: dict[str, jax.Array], num_items: Any) -> tuple[jax.Array, Outputs]:
        outputs = self(**read_by_model(inputs))
        loss, _ = task_loss(task, outputs.logits, inputs["labels"], num_items)
        return self.balanced(loss, outputs.aux_loss), outputs

    def balanced(self, loss: jax.Array, aux_loss: jax.Array | None) -> jax.Array:
        """Add a call's load-balancing loss, if there is one, to the loss of a batch."""
        return loss if aux_loss is None else loss + self.aux_loss_weight * aux_loss

    @staticmethod
    def task_sums(task: TokenTask, calls: Any, inputs: dict[str, Any]) -> dict[str, jax.Array]:
        covered = calls.outputs and calls.outputs[-1].shape[:2] == inputs["labels"].shape
        logits = calls.outputs[-1] if covered else jnp.zeros((*inputs["labels"].shape, 1))
        labels = jnp.asarray(inputs["labels"])
        sums = task_loss(task, logits, labels if covered else jnp.full_like(labels, IGNORED))[1]
        return sums | aux_loss_sums(calls.aux_losses[-1:])


class ComparedModel(TokenModel):
    """A language model whose loss compares log-probabilities with the reference's, in DPO and KTO. With
    `fused_lm_head=True` and labels, calls return their log-probabilities without materializing the logits, as in TRL.
    """

    divides_by_targets, always_logs = False, True

    def __init__(
        self,
        model: Any,
        params: dict,
        task: Any,
        reference: ReferenceModel | None,
        reference_params: dict,
        **options: Any,
    ):
        """
        Args:
            reference: None if the inputs already contain its log-probabilities, or if the task needs none.
        """
        super().__init__(model, params, **options)
        self._ignored |= {"fused_lm_head", "output_router_logits"}
        self._task, self._reference, self._reference_params = task, reference, reference_params

    @classmethod
    def of_run(cls, setup: Setup, params: dict, **options: Any) -> ComparedModel:
        compared = {}
        if setup.reference is not None:
            params, compared = setup.reference.split(params)
        return cls(setup.model, params, setup.task, setup.reference, compared, **options)

    def _outputs_of(self, call: Call) -> Outputs:
        if not call.others.get("fused_lm_head", False):
            return super()._outputs_of(call)
        if call.labels is None:
            raise TypeError("model(..., fused_lm_head=True) returns log_probs of labels: pass labels=, too.")
        reads, targets = label_reads(call.labels)
        self._tokens, aux_loss = self._with_aux_loss(call, reads, targets=targets, temperature=1.0)
        names = {"log_probs": "logps", "is_top1": "correct"} | {name: name for name in OUTPUTS[4:-1]}
        values = {name: getattr(self._tokens, ours).reshape(len(call.tokens), -1) for name, ours in names.items()}
        return Outputs(aux_loss=aux_loss, **values | {"is_top1": values["is_top1"] > 0})

    def _images_of_rows(self, tokens: jax.Array, images: Images, positions: Any) -> tuple[Images, Any]:
        """A call may pass all rows, or one text of each example, such as KTO's `KL_input_ids`. Any other rows give NaN
        outputs, because their values are unknown while the loss is compiled and cannot be checked."""
        parts = jnp.split(self._rows["input_ids"], len(self._task.columns.texts))
        if len(parts) == 1 or tokens.shape != parts[0].shape:
            return images, positions
        same = [jnp.all(tokens == part) for part in parts]
        at, positions = (jnp.select(same, jnp.split(jnp.asarray(rows), len(parts))) for rows in (images.at, positions))
        valid = jnp.where(jnp.any(jnp.stack(same)), 1, jnp.nan)
        return images._replace(at=at, patches=images.patches * valid), positions

    def shown(self, inputs: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """TRL's inputs (see `trl_inputs`), with the reference's log-probabilities."""
        rows = "input_ids", "attention_mask", "labels"
        self._rows = {name: inputs[name] for name in (*rows, "pixel_values") if name in inputs}
        self._numbers = {name: value for name, value in inputs.items() if name not in self._rows}
        self._reference_sums = {} if self._reference is None else self._stats_of_reference()
        self._shown = trl_inputs(self._task, inputs)
        if self._reference is not None:
            texts = jnp.split(self._reference_sums["ref_logps"], len(self._task.columns.texts))
            self._shown |= dict(zip(self._task.columns.optional, texts, strict=True))
        self._ignored |= self._shown.keys()
        return dict(self._shown)

    def replayed(self, inputs: dict[str, jax.Array], arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
        del arrays  # the same values: see `check_same`
        return self.shown({name: jnp.asarray(value) for name, value in inputs.items()})

    def default_loss(self, task: TokenTask, inputs: dict[str, Any], num_items: Any) -> tuple[jax.Array, Outputs]:
        del num_items
        check_same(inputs, self._shown)
        outputs = self(**self._rows, fused_lm_head=True)
        examples = len(self._rows["labels"]) // len(task.columns.texts)
        batch = LossBatch(jnp.full(examples, 1 / examples), Extras(self._numbers), examples)
        loss, self.default_sums = task.loss(self._token_stats(self._tokens) | self._reference_sums, batch)
        if outputs.aux_loss is not None:
            self.default_sums = self.default_sums | aux_loss_sums([outputs.aux_loss])
        rows = read_by_model(inputs)
        return self.balanced(loss, outputs.aux_loss), outputs.with_logits(
            lambda: jax.lax.stop_gradient(self(**rows).logits)
        )

    @staticmethod
    def task_sums(task: TokenTask, calls: Any, inputs: dict[str, Any]) -> dict[str, jax.Array]:
        """Empty if the script does not call `super()`."""
        del task, inputs
        return calls.default_sums or {}

    def _stats_of_reference(self) -> dict[str, jax.Array]:
        ids = self._rows["input_ids"]
        reads, targets = label_reads(self._rows["labels"])
        positions = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32), ids.shape)
        options = {"dtype": self._options["dtype"]}
        if self._images is not None:
            options["images"], positions = self._images[0], jnp.asarray(self._images[1])
        batch = SimpleNamespace(tokens=ids, positions=positions, reads=reads)
        outputs = self._reference.outputs(self._reference_params, batch, targets=targets, temperature=1.0, **options)
        stats = self._token_stats(outputs)
        return {f"ref_{name}": stats[name] for name in self._task.compared}

    def _token_stats(self, outputs: TokenOutputs) -> dict[str, jax.Array]:
        labels = self._rows["labels"]
        return stats_of_rows(self._task, outputs, labels, len(labels) // len(self._task.columns.texts))


def kind_of_model(setup: Setup) -> type[BoundModel]:
    """The class of the model that the run's user-defined loss calls."""
    if setup.task.head == "score":
        return ScoreModel
    return ComparedModel if setup.loss_compares else TokenModel


def logged_sums(metrics: dict[str, list[Any]], *, always: bool) -> dict[str, jax.Array]:
    """The metrics that a user-defined loss logged for one micro-batch.

    Args:
        always: count the micro-batch even if nothing was logged.
    """
    if not (metrics or always):
        return {}
    logged = {name: values for name, values in metrics.items() if name != "num_tokens"}  # counted by the run
    return user_sums(torch_bridge.as_arrays(logged), jnp.bool_(True))


# The rows of a micro-batch as scripts see them.


def read_by_model(inputs: dict[str, Any]) -> dict[str, Any]:
    """The entries of a batch that the model takes."""
    return {name: inputs[name] for name in ("input_ids", "attention_mask", "pixel_values") if name in inputs}


def trl_inputs(task: Task, inputs: dict[str, Any]) -> dict[str, Any]:
    """TRL's inputs of DPO, with both texts of the pairs as rows, or of KTO, with mismatched texts as `KL_...`. They
    have the reference's log-probabilities only if these were precomputed."""
    batch = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    batch["completion_mask"] = (inputs["labels"] != IGNORED).astype(jnp.int32)
    if "label" in inputs:
        texts = len(task.columns.texts)
        parts = {name: jnp.split(value, texts) for name, value in batch.items()}
        batch = {name: part[0] for name, part in parts.items()} | {"label": inputs["label"]}
        batch |= {f"KL_{name}": part[1] for name, part in parts.items() if texts == 2}
    return batch | {name: inputs[name] for name in ("pixel_values", *task.columns.optional) if name in inputs}


class CutRows:
    """A batch's rows, cut to the longest text as TRL pads them. (The step's rows are padded to a compiled shape.)

    shown: the arrays with their rows cut.
    """

    def __init__(self, inputs: dict[str, Any], setup: Setup):
        multiple = setup.pad_to_multiple_of if isinstance(setup.pad_to_multiple_of, int) else 1
        self._length = inputs["input_ids"].shape[1]
        masks = [np.asarray(value) for name, value in inputs.items() if name.endswith("attention_mask")]
        longest = max(1, *(int(np.max(np.sum(mask, axis=1))) for mask in masks))
        self._cut_length = min(self._length, -(-longest // multiple) * multiple)
        self.shown = {name: self._cut(np.asarray(value)) for name, value in inputs.items()}
        fillers = {"input_ids": setup.processing_class.pad_token_id, "attention_mask": 0, "completion_mask": 0}
        self._fillers = fillers | {"labels": IGNORED}

    def padded(self, arrays: dict[str, Any]) -> dict[str, Any]:
        """Pad cut rows to the step's length again. Rows of another length or without attention mask are unchanged."""
        if "attention_mask" not in arrays or arrays["input_ids"].shape[1] != self._cut_length:
            return arrays
        missing = (0, 0), (0, self._length - self._cut_length)
        fillers = {name: self._fillers.get(name.removeprefix("KL_")) for name in arrays}
        return {
            name: value if fillers[name] is None else np.pad(value, missing, constant_values=fillers[name])
            for name, value in arrays.items()
        }

    def _cut(self, values: np.ndarray) -> np.ndarray:
        return values[:, : self._cut_length] if values.ndim == 2 and values.shape[1] == self._length else values


# Token statistics and losses from full logits, for scripts that use them. The regular step never materializes these.


def label_reads(labels: Any) -> tuple[jax.Array, jax.Array]:
    """The flat positions `[N]` that predict the labels `[rows, T]`, without each row's first one, and their targets; -1
    for labels of -100."""
    rows, length = labels.shape
    reads = jnp.arange(rows, dtype=jnp.int32)[:, None] * length + jnp.arange(length - 1, dtype=jnp.int32)
    return reads.reshape(-1), targets_of(labels)


def targets_of(labels: Any) -> jax.Array:
    """The labels `[rows, T]` without each row's first one, as a flat array; -1 for labels of -100."""
    return jnp.where(labels[:, 1:] == IGNORED, -1, labels[:, 1:]).reshape(-1)


def outputs_of_labels(logits: jax.Array, labels: jax.Array) -> TokenOutputs:
    """The outputs for each label `[rows, T]` after the first, from logits `[rows, T, V]`."""
    return outputs_of_logits(logits[:, :-1].reshape(-1, logits.shape[-1]), targets_of(labels))


def stats_of_rows(task: TokenTask, outputs: TokenOutputs, labels: jax.Array, examples: int) -> dict[str, jax.Array]:
    """`task.token_stats` for rows of one text each.

    Args:
        outputs: for each label `[rows, T]` after the first.
    """
    (rows, length), targets = labels.shape, targets_of(labels)
    text = jnp.where(targets < 0, rows, jnp.repeat(jnp.arange(rows), length - 1))
    weight = jnp.ones(examples)
    return task.token_stats(outputs, SimpleNamespace(text=text, targets=targets, weight=weight, extras=Extras()))


def task_loss(task: TokenTask, logits: jax.Array, labels: jax.Array, num_items: Any = None) -> tuple:
    """The task's `(loss, sums)` for rows of one text each, weighted equally, or by token if the task is per token.

    Args:
        logits, labels: as for `outputs_of_labels`.
        num_items: divisor of sums over tokens; None uses the number of targets in the rows.
    """
    rows, targets = len(labels), jnp.maximum(1, jnp.sum(labels[:, 1:] != IGNORED))
    weight = 1 / (targets if num_items is None else num_items) if task.per_token else 1 / rows
    batch = LossBatch(jnp.full(rows, weight), Extras(), rows)
    return task.loss(stats_of_rows(task, outputs_of_labels(logits, labels), labels, rows), batch)


def mean_loss(logits: jax.Array, labels: jax.Array, num_items: Any = None) -> jax.Array:
    """The cross-entropy of transformers' causal models: the mean over targets, or their sum divided by `num_items`.
    Arguments as for `outputs_of_labels`."""
    total = -jnp.sum(outputs_of_labels(logits, labels).logps)
    return total / (jnp.sum(targets_of(labels) >= 0) if num_items is None else num_items)
