"""A script's own `compute_loss` and `prediction_step`, in JAX or torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from trl_jax.core.outputs import Images, KeptFeatures, reads_of_rows
from trl_jax.data.batch import IGNORED, Batch, Extras, LossBatch
from trl_jax.hub import torch_objects
from trl_jax.hub.heads import HeadName
from trl_jax.losses.supervised import load_balancing_loss
from trl_jax.models.model import merge
from trl_jax.nn.head import outputs_of_logits
from trl_jax.tasks.policy import means
from trl_jax.tasks.task import STEP_SUMS, Task, TokenTask, joined
from trl_jax.training.data import ROW_IMAGES, RowImages, averages_micro_batches, inputs_of, seen_by_scripts
from trl_jax.training.forward import Forward, aux_loss_sums, aux_loss_weight
from trl_jax.training.own_step import CutRows, OwnStep
from trl_jax.training.reference import Comparing, label_reads
from trl_jax.training.state import Setup
from trl_jax.training.torch_errors import (
    NotGiven,
    WrittenInTorch,
    check_same,
    found_in_torch,
    may_run_in_torch,
    outputs_alone,
    parameters_refused,
    read_in_jax,
    torch_explained,
    torch_scalar,
    warn_of_torch,
)
from trl_jax.training.update import updated

# Steps and evaluations with a script's own `compute_loss` or `prediction_step`.


class UserLossStep:
    """A step like that of `update.make_step`, for a loss that is a mean over the examples it gets.

    A micro-batch has only its real examples, so a shorter one is compiled as another program.
    """

    def __init__(self, user_loss: UserLoss, without_frozen: Callable, tx: Any):
        """
        Args:
            without_frozen: turns a loss into one without gradients of frozen parameters.
        """
        self._user_loss, self._tx, self._point = user_loss, tx, tx.point
        self._loss = without_frozen(self._training_loss)
        self._grad = jax.jit(jax.value_and_grad(self._loss, has_aux=True), static_argnames="values")
        self._in_torch = TorchLoss(user_loss, without_frozen)
        self._apply = jax.jit(partial(_apply, tx), donate_argnums=(0, 1))

    def __call__(self, params: dict, opt_state: Any, arrays: Any, learning_rate: Any, key: Any, frozen: dict) -> tuple:
        micro = self._user_loss.inputs(arrays)
        parts, num_items, pass_weight = len(micro), None, np.float32(1)
        if self._user_loss.counts_targets:  # it divides by the targets of the whole step itself
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
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *evened(sums))
        return params, opt_state, stacked | {"loss": shown} | measured

    def in_one_program(self, options: Any) -> Any:
        """A jitted step with the arguments of `make_step`'s, for a plan: what a call does in a program for each
        micro-batch, with one after another in a loop. The batch has the `inputs` of all micro-batches, stacked.

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
        args = self._user_loss.setup.args
        options = {"dtype": args.compute_dtype, "remat": args.remats[-1], "key": key, "pass_weight": pass_weight}
        bound = self._user_loss.bound(frozen | params, inputs, training=True, **options)
        return self._user_loss(bound, inputs, state, num_items)


def _apply(tx: Any, params: dict, opt_state: Any, gradients: dict, total: Any, learning_rate: Any) -> tuple:
    """Apply the update; as in `update`, nothing changes where loss, gradient or update is not finite."""
    norm = optax.global_norm(gradients)
    finite = jnp.isfinite(total) & jnp.isfinite(norm)
    params, opt_state, applied = updated(tx, finite, params, opt_state, gradients, norm, learning_rate)
    return params, opt_state, {"grad_norm": norm, "updated": applied}


class UserLossEvaluation:
    """Evaluates a batch by the script's `compute_loss`: `(params, arrays) -> (sums with "loss", outputs)`."""

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
    """Evaluates a batch by the script's `prediction_step`, which is not compiled. Outputs are (logits, labels), with
    `()` for None."""

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
    loss, outputs = torch_objects.as_arrays([loss, outputs])
    on_host = tuple(() if part is None else jax.tree.map(np.asarray, part) for part in outputs)
    return sums | {"loss": jnp.asarray(loss, jnp.float32)}, on_host


# A script's own `compute_loss`: the model that it calls, and the sums to log with its loss.

_OF_MODEL = frozenset({"at_gradients", "name_or_path", "training", "writes"})  # of ours


def script_values(trainer: Any) -> tuple[tuple[str, Any], ...]:
    """The numbers and strings that a script set on its trainer and its model, by name; a compiled loss contains their
    current values."""
    kinds = (bool, int, float, str)
    found = vars(trainer) | {
        f"model.{name}": vars(trainer.model)[name] for name in vars(trainer.model).keys() - _OF_MODEL
    }
    return tuple((name, value) for name, value in sorted(found.items()) if type(value) in kinds)


OUTPUTS = ("loss", "aux_loss", "logits", "log_probs", "entropy", "mean_logits", "log_sum_sq_probs", "is_top1")
_FIXED = OUTPUTS[-3:]  # without a gradient


class Outputs:
    """The result of calling the model, by attribute, key or index: `loss`, where labels were passed, then `logits`.

    loss: the mean over targets, or their sum divided by `num_items_in_batch`, as transformers' causal models give it.
    aux_loss: the load-balancing loss of a mixture of experts, not weighted; None where the run adds none.
    logits: float32, `[rows, 1]` of a score head, `[rows, T, V]` of a language model's; None with `fused_lm_head`.
    log_probs, entropy, mean_logits, log_sum_sq_probs: float32 `[rows, T - 1]` of each label after the first one, 0
        where it is -100; only with `fused_lm_head`, as `is_top1`, whether the label is the most likely token. The last
        three have no gradient.
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
        """The same, with logits that are computed when they are read, as TRL's `super()` returns them."""
        self._again = again
        return self

    def __getitem__(self, key: str | int) -> jax.Array:
        found = {name: vars(self)[name] for name in OUTPUTS if vars(self).get(name) is not None}
        return list(found.values())[key] if isinstance(key, int) else found[key]


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
        images: RowImages | None = None,
        comparing: Comparing | None = None,
    ):
        """
        Args:
            comparing: for a loss that compares with a reference; None for others.
            random_options: `(number of the call, lengths of its rows) -> random options`; None for none.
            ignored: further names of a batch that a call may pass without effect.
            head: the model's.
            aux_loss_weight: what the load-balancing loss counts in the batch's; None where it is not asked for.
            images: of the batch's rows, which a call reads with their `pixel_values` or always, if their features are
                kept; None where these have none.
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
        """Score rows of token ids `[rows, T]`; virtual tokens are put before them if the model has some.

        Args:
            labels: `[rows, T]`, of a language model, which then gives `loss`, too.
            pixel_values: `[P, C]`, the patches of the batch's images; None reads the rows as text alone.
            others: `return_dict`, `use_cache` and other entries of a batch, which have no effect.

        Raises:
            TypeError: an unknown argument.
            ValueError: `pixel_values` with other rows than the batch's.
        """
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
        if self._images is not None and isinstance(self._images.images, KeptFeatures):
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

    def _with_images(self, tokens: jax.Array, pixel_values: Any) -> tuple[Images, jax.Array]:
        """The batch's images with these patches, and the positions of its tokens."""
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
        """The inputs of a loss that compares with a reference, under TRL's names."""
        options = {"dtype": self._options["dtype"]}
        self._shown = self.comparing.inputs(inputs, options, self._images)
        self._ignored |= self._shown.keys() | {"output_router_logits"}
        return dict(self._shown)

    def compared_loss(self, inputs: dict[str, Any]) -> tuple[jax.Array, Outputs]:
        """The task's loss of these inputs, which are those of `compared_inputs`."""
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
        self,
        setup: Setup,
        forward: Forward,
        compute_loss: Callable,
        values: Callable[[], tuple[tuple[str, Any], ...]],
        own_step: OwnStep | None = None,
        is_function: bool = False,
        functions: Sequence[Callable] = (),
    ):
        """
        Args:
            is_function: whether the script passed a `compute_loss_func`, which always gets the number of targets.
            functions: the script's own that compute the loss.
        """
        self.setup, self._forward, self.compute_loss, self.values = setup, forward, compute_loss, values
        self._is_function, self.in_torch, self._own_step = is_function, False, own_step
        if (error := found_in_torch(functions)) is not None:
            self.in_torch = True
            warn_of_torch(error)

    def __call__(
        self, bound: BoundModel, inputs: dict[str, Any], state: dict[str, Any], num_items: Any = None
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The loss and the sums of a batch.

        Args:
            state: from `state()`; the script reads it as `self.state`.
            num_items: the targets that a language model's loss is divided by, of the whole step or of a batch of an
                evaluation; None unless it `counts_targets`.

        Raises:
            TypeError: the script called torch, read parameters, or did not return a scalar.
        """
        options = {} if self.setup.task.head == "score" else {"num_items_in_batch": num_items}
        refused = parameters_refused(self.setup.model, read_in_jax)
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
        """Whether the loss gets the number of targets that it is a mean over, as in transformers; otherwise the loss of
        a step is the mean over its micro-batches."""
        setup = self.setup
        if setup.task.head == "score" or setup.script_loss is not None:
            return False
        return self._is_function or not averages_micro_batches(setup.model)

    def num_items(self, inputs: dict[str, Any]) -> Any:
        """The targets of a batch of an evaluation; None where the loss gets no number."""
        if not self.counts_targets:
            return None
        counted = jnp.sum(jnp.asarray(inputs["labels"])[:, 1:] != IGNORED)
        return jnp.maximum(counted, 1).astype(jnp.float32)

    def to_torch(self, error: WrittenInTorch) -> None:
        """Go on with a loss in torch, if it can; else raise the error."""
        if not may_run_in_torch(error):
            raise error
        self.in_torch = True
        warn_of_torch(error)

    def state(self) -> dict[str, np.ndarray]:
        """The step and epoch, for a compiled loss that reads `self.state`."""
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
            key: that of the batch, in training.
            pass_weight: what the batch counts in a mean over those of the step.
            first_call: how many calls of the batch came before.
        """

        def random_options(call: int, lengths: jax.Array) -> dict[str, Any]:
            return self._forward.random_options(jax.random.fold_in(key, first_call + call), lengths)

        reference, compared = self.setup.reference, {}
        if reference is not None:
            params, compared = reference.split(params)
        return BoundModel(
            self.setup.model,
            params,
            comparing=None if self.setup.script_loss is None else Comparing(self.setup.task, reference, compared),
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
        """The sums of the task's loss, where the calls cover each row of the batch once; otherwise sums without
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
        """Each micro-batch of a step of padded rows, as `inputs_of`."""
        return inputs_of(arrays, self.setup.task)

    def prepared(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """The inputs of an evaluation's batch, after the script's own `_prepare_inputs`."""
        return inputs if self._own_step is None else self._own_step.prepared(inputs)

    def stepped(self, computed: Callable, inputs: dict[str, Any], num_items: Any, *, last: bool) -> tuple[tuple, Any]:
        """What `computed(inputs)` gives of a micro-batch, `(loss, sums, gradient)`, and the loss to log."""
        if self._own_step is None:
            one = computed(inputs)
            return one, one[0]
        return self._own_step(computed, inputs, num_items, last=last)


def described(value: Any) -> str:
    return f"an array {list(value.shape)}" if isinstance(value, jax.Array) else f"a {type(value).__qualname__}"


# What a script's own loss logs.


class ScriptMetrics(defaultdict):
    """Numbers that a script logs outside of its own loss, as lists by name, as TRL's trainers keep them."""

    def __init__(self):
        super().__init__(list)
        self._appended = set()

    def __missing__(self, name: str) -> list:
        self._appended.add(name)
        return super().__missing__(name)

    def taken(self, logs: dict[str, Any], before: str) -> dict[str, float]:
        """The mean of each by its name with `before`, which are forgotten.

        Raises:
            ValueError: a number was appended to one that `logs` has.
        """
        found = {before + name: float(sum(values) / len(values)) for name, values in self.items() if values}
        if own := sorted(name for name in self._appended if before + name in found.keys() & logs.keys()):
            raise ValueError(
                f"A script appended to _metrics[mode][{own[0]!r}] outside of its loss, and trl_jax logs {own[0]!r} "
                "itself. Use another name, or replace it: self._metrics[mode][name] = [value]."
            )
        self.clear()
        self._appended.clear()
        return found


OWN_METRIC = "script/"  # before the names of sums that a script's own loss logs
_PARTS = "parts/"


def own_metrics(task: Task, sums: list[dict[str, np.ndarray]], split: str) -> dict[str, float | None]:
    """The task's metrics, where the sums have those of its loss, and those of `own_sums`: the mean of each over the
    micro-batches where it is not NaN."""
    names = [name for name in (sums[0] if sums else ()) if name.startswith(OWN_METRIC)]
    of_task = [{name: value for name, value in step.items() if name not in names} for step in sums]
    found = task.metrics(of_task, split) if of_task and of_task[0].keys() - STEP_SUMS else {}
    if not names:
        return found
    logged = [name for name in names if name != OWN_METRIC]
    parts = [  # a micro-batch's parts, on the devices that share it, where each number was logged
        step | {_PARTS + name: np.where(np.isnan(step[name]), 0, step[OWN_METRIC]) for name in logged} for step in sums
    ]
    totals = joined(parts, dict.fromkeys([*names, *(_PARTS + name for name in logged)], np.nansum), count=OWN_METRIC)
    with np.errstate(invalid="ignore"):  # 0 of 0: logged in no part
        shares = {name.removeprefix(OWN_METRIC): totals[name] / totals[_PARTS + name] for name in logged}
    return found | means(shares)


def evened(sums: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same sums, with NaN for what a script has logged of others of them alone."""
    names = dict.fromkeys(name for one in sums for name in one if name.startswith(OWN_METRIC))

    def missing(one: dict[str, Any], name: str) -> np.ndarray:
        return np.full(np.shape(one.get(OWN_METRIC, 0)), 0 if name == OWN_METRIC else np.nan, np.float32)

    return [{name: missing(one, name) for name in names if name not in one} | one for one in sums]


def own_sums(metrics: dict[str, list[Any]], members: jax.Array) -> dict[str, jax.Array]:
    """What a script's loss has logged, by name, as sums over micro-batches.

    Args:
        members: bool `[M]`, whether the pass is of a micro-batch; or a scalar, where it is a micro-batch itself.
    """
    own = {OWN_METRIC: members.astype(jnp.float32)}
    for name, values in metrics.items():
        value = jnp.mean(jnp.stack([jnp.asarray(value, jnp.float32).reshape(()) for value in values]))
        own[OWN_METRIC + name] = jnp.where(members, jax.lax.stop_gradient(value), 0)
    return own


def logged_sums(model: Any) -> dict[str, jax.Array]:
    """What a script's loss of one micro-batch has logged, in `metrics` of the model that it was given.

    A loss that is compared with a reference always counts its micro-batches.
    """
    if not (model.metrics or isinstance(model, BoundModel) and model.comparing is not None):
        return {}
    logged = {name: values for name, values in model.metrics.items() if name != "num_tokens"}  # the run counts them
    return own_sums(torch_objects.as_arrays(logged), jnp.bool_(True))


class OwnMetrics:
    """What a script's own loss of DPO or KTO logs; the loss itself is computed by `UserLoss`.

    current: the `BoundModel` of the loss that is being traced; None outside.
    """

    def __init__(self, setup: Callable[[], Setup]):
        self._setup, self.current = setup, None

    def values(self) -> tuple:
        return ()

    def finish(self, results: dict[str, Any]) -> dict[str, Any]:
        """The results of a step, which are complete."""
        return results

    def loss(self, outputs: Any, batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The task's, in whose computation the first value is searched that is not finite."""
        return self._setup().task.loss(outputs, batch)

    def metrics(self, sums: list[dict[str, np.ndarray]], split: str) -> dict[str, float | None]:
        return own_metrics(self._setup().task, sums, split)


# What `super().compute_loss` of a script's own method computes.


def read_by_model(inputs: dict[str, Any]) -> dict[str, Any]:
    """What the model reads of a batch."""
    return {name: inputs[name] for name in ("input_ids", "attention_mask", "pixel_values") if name in inputs}


def default_loss(task: Task, model: Any, inputs: dict[str, jax.Array], num_items: Any) -> tuple[jax.Array, Any]:
    """The task's loss of a batch, and the outputs that the model gave.

    Args:
        model: a `BoundModel`.
        inputs: as `compute_loss` gets them.
        num_items: the targets of the whole step, for a language model; None means the batch's own.
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


# A language model's numbers from whole logits, for scripts that ask for them. The step itself never holds them.


def pass_of_logits(task: TokenTask, logits: jax.Array, labels: jax.Array) -> dict[str, jax.Array]:
    """`task.of_pass` of rows of a text each.

    Args:
        logits: `[rows, T, V]`.
        labels: transformers', `[rows, T]`.
    """
    rows, length = labels.shape
    targets = jnp.where(labels[:, 1:] == IGNORED, -1, labels[:, 1:]).reshape(-1)
    text = jnp.where(targets < 0, rows, jnp.repeat(jnp.arange(rows), length - 1))
    outputs = outputs_of_logits(logits[:, :-1].reshape(-1, logits.shape[-1]), targets)
    return task.of_pass(outputs, SimpleNamespace(text=text, targets=targets, weight=jnp.ones(rows), extras=Extras()))


def task_loss(task: TokenTask, logits: jax.Array, labels: jax.Array, num_items: Any = None) -> tuple:
    """The task's `(loss, sums)` of rows of a text each, which weigh the same: by token where the task weighs tokens.

    Args:
        logits, labels: as in `pass_of_logits`.
        num_items: what a sum over tokens is divided by; None means the rows' own targets.
    """
    rows, targets = len(labels), jnp.maximum(1, jnp.sum(labels[:, 1:] != IGNORED))
    weight = 1 / (targets if num_items is None else num_items) if task.per_token else 1 / rows
    batch = LossBatch(jnp.full(rows, weight), Extras(), rows)
    return task.loss(pass_of_logits(task, logits, labels), batch)


def mean_loss(logits: jax.Array, labels: jax.Array, num_items: Any = None) -> jax.Array:
    """The cross-entropy of transformers' causal models: the mean over targets, or their sum over `num_items`.

    Args:
        logits: `[rows, T, V]`.
        labels: `[rows, T]`, -100 where nothing is predicted.
    """
    targets = jnp.where(labels[:, 1:] == IGNORED, -1, labels[:, 1:]).reshape(-1)
    outputs = outputs_of_logits(logits[:, :-1].reshape(-1, logits.shape[-1]), targets)
    return -jnp.sum(outputs.logps) / (jnp.sum(targets >= 0) if num_items is None else num_items)


# A script's own loss in torch: JAX computes the model's outputs, torch the loss and its gradient with respect to them,
# and JAX continues the backward pass from there.


class TorchModel:
    """The model as a loss in torch calls it; each call is kept with what its gradient goes back through.

    leaves, backwards, outputs: of the calls, in order: leaf tensors that collect gradients, their VJP functions, and
        the arrays that JAX computed.
    """

    def __init__(
        self, compute: Callable, model: Any, known: frozenset[str], training: bool, rows: CutRows, compares: bool
    ):
        """
        Args:
            compares: whether the loss compares with a reference, whose numbers belong to the rows as they are.
            rows: as the script has them.
            compute: `(kind of call, arrays, number of the call) -> (outputs by name, their VJP function)`.
            known: the names that a call may pass, with or without effect.
            training: False in an evaluation.
        """
        self._compute, self._model, self._known, self.training = compute, model, known, training
        self._rows, self.tensors, self._compares = rows, torch_objects.batch_tensors(rows.shown), compares
        self.metrics = defaultdict(list)
        self.leaves, self.backwards, self.outputs = [], [], []

    def __call__(
        self, input_ids: Any = None, attention_mask: Any = None, fused_lm_head: bool = False, **others: Any
    ) -> Outputs:
        """As `BoundModel`'s, of tensors."""
        if unknown := others.keys() - self._known:
            raise NotGiven(f"model(...) with {', '.join(sorted(unknown))}")
        found = {"input_ids": input_ids, "attention_mask": attention_mask} | others
        given = {name: value for name, value in found.items() if value is not None and not isinstance(value, bool)}
        return self._outputs("fused" if fused_lm_head else "call", given)

    def default_loss(self, task: Any, inputs: dict[str, Any], num_items: Any) -> tuple[Any, Outputs]:
        """The task's loss of a batch, and what the model gave."""
        del task  # the run's
        if self._compares:
            check_same(inputs, self._rows.shown, in_torch=True)
        found = self._outputs("default", inputs | ({} if num_items is None else {"num_items": num_items}))
        if self._compares:
            rows = read_by_model(inputs)
            found.with_logits(lambda: self._outputs("call", rows).logits.detach())
        return found.loss, found

    def _outputs(self, kind: str, tensors: dict[str, Any]) -> Outputs:
        arrays = {name: np.asarray(value) for name, value in tensors.items()}
        outputs, back = self._compute(kind, self._rows.whole(arrays), len(self.outputs))
        length = arrays["input_ids"].shape[1]
        cut = {name: _cut(name, value, length) for name, value in outputs.items() if name != SUMS}
        leaves, shown = torch_objects.asking({name: value for name, value in cut.items() if name not in _FIXED})
        shown |= torch_objects.batch_tensors({name: value for name, value in cut.items() if name in _FIXED})
        self.leaves.append(leaves)
        self.backwards.append(back)
        self.outputs.append(outputs)
        return Outputs(**shown)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


# How many positions of a text of T tokens these outputs have, less T.
_POSITIONS = {"logits": 0} | dict.fromkeys(OUTPUTS[3:], -1)
SUMS = "sums"  # of the task's loss, among the outputs of a call


def _cut(name: str, values: Any, length: int) -> Any:
    """Outputs of the first `length` tokens of each text; outputs of whole texts as they are."""
    whole = name not in _POSITIONS or name == "logits" and np.ndim(values) < 3
    return values if whole else values[:, : length + _POSITIONS[name]]


class TorchLoss:
    """Computes a script's loss in torch, and its gradient by the parameters; as `UserLoss` in a compiled step."""

    def __init__(self, user_loss: UserLoss, without_frozen: Callable = lambda loss: loss):
        """
        Args:
            without_frozen: turns a function of the parameters into one without gradients of frozen ones.
        """
        self._setup, self._user_loss = user_loss.setup, user_loss
        static = ("kind", "call", "dtype", "remat")
        outputs = without_frozen(self._outputs)
        self._forward = jax.jit(lambda *given, **options: _joined(outputs(*given, **options)), static_argnames=static)
        self._both = jax.jit(partial(_with_vjp, outputs), static_argnames=static)
        self._back = jax.jit(lambda back, gradient: back(gradient)[0])
        self._sums, self._compared = jax.jit(self._task_sums), jax.jit(self._compared_inputs, static_argnames="dtype")

    def value_and_grad(
        self, params: dict, frozen: dict, inputs: dict, key: Any, num_items: Any, pass_weight: Any
    ) -> tuple[tuple[Any, dict], dict]:
        """`((loss, sums), gradient)` of a micro-batch, as of the compiled loss."""
        args = self._setup.args
        options = {"dtype": args.compute_dtype, "remat": args.remats[-1]}

        def compute(kind: str, arrays: dict, call: int) -> tuple[dict, Any]:
            return self._both(params, frozen, inputs, arrays, key, pass_weight, kind=kind, call=call, **options)

        model = self._model(compute, params | frozen, inputs, options["dtype"], training=True)
        loss = self._loss(model, num_items)
        if not (loss.requires_grad and model.leaves):
            raise TypeError("compute_loss returned a tensor without a gradient; expected a loss of model(...).logits.")
        found = map(_of_whole_rows, torch_objects.gradients(loss, model.leaves), model.outputs)
        parts = [self._back(back, gradient) for back, gradient in zip(model.backwards, found, strict=True)]
        gradient = jax.tree.map(lambda *of_calls: sum(of_calls[1:], of_calls[0]), *parts)
        return (np.float32(loss.item()), self._sums(model.outputs, inputs) | logged_sums(model)), gradient

    def predicted(self, call: Callable, params: dict, inputs: dict, *, dtype: str) -> tuple[dict, Any]:
        """The sums of a batch, and what `call(model, tensors)` gives."""
        model = self._evaluating(params, inputs, dtype)
        with torch_objects.without_gradient(), outputs_alone():
            found = call(model, model.tensors)
        return self._sums(model.outputs, inputs), found

    def evaluated(self, params: dict, inputs: dict, *, dtype: str) -> tuple[dict, Any]:
        """`(sums with "loss", outputs)` of a batch."""
        model = self._evaluating(params, inputs, dtype)
        with torch_objects.without_gradient():
            loss = self._loss(model, self._user_loss.num_items(inputs))
        outputs = [_of_texts(found, self._setup.task.head) for found in model.outputs if "logits" in found]
        found = jnp.concatenate(outputs) if outputs else jnp.zeros(len(inputs["input_ids"]))
        return self._sums(model.outputs, inputs) | logged_sums(model) | {"loss": jnp.float32(loss.item())}, found

    def _evaluating(self, params: dict, inputs: dict, dtype: str) -> TorchModel:
        def compute(kind: str, arrays: dict, call: int) -> tuple[dict, None]:
            return self._forward(params, {}, inputs, arrays, None, 1.0, kind=kind, call=call, dtype=dtype), None

        return self._model(compute, params, inputs, dtype, training=False)

    def _model(self, compute: Callable, params: dict, inputs: dict, dtype: str, *, training: bool) -> TorchModel:
        known, shown = frozenset(inputs) | BoundModel.ignored, seen_by_scripts(inputs)
        if self._setup.script_loss is not None:
            shown = self._compared(params, inputs, dtype=dtype)
        if self._setup.task.head == "lm":
            known |= {"labels", "num_items_in_batch", "output_router_logits"}
        rows = CutRows(shown, self._setup)
        compares = self._setup.script_loss is not None
        return TorchModel(compute, self._setup.model, known | frozenset(shown), training, rows, compares)

    def _compared_inputs(self, params: dict, inputs: dict, *, dtype: str) -> dict[str, jax.Array]:
        """The inputs of a loss that compares with a reference."""
        given = {name: jnp.asarray(value) for name, value in seen_by_scripts(inputs).items()}
        return self._user_loss.bound(params, inputs, dtype=dtype).compared_inputs(given)

    def _loss(self, model: TorchModel, num_items: Any) -> Any:
        """The script's loss, a tensor of one number."""
        options, own = {}, self._setup.script_loss
        if self._setup.task.head == "lm":
            options = {"num_items_in_batch": num_items}
            options = options if num_items is None else torch_objects.batch_tensors(options)
        refused = parameters_refused(self._setup.model, lambda: NotGiven("the model's parameters"))
        if own is not None:
            own.current = model
        try:
            with refused, outputs_alone():
                return torch_scalar(self._user_loss.compute_loss(model, model.tensors, **options))
        finally:
            if own is not None:
                own.current = None

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
        """The outputs of one call of the model, by name, and those that have no gradient."""
        options |= {"key": key, "pass_weight": pass_weight, "first_call": call}
        bound, sums = self._user_loss.bound(frozen | params, inputs, **options), {}
        of_batch = {name: arrays[name] for name in seen_by_scripts(inputs) if name in arrays}
        if bound.comparing is not None:
            of_batch = bound.compared_inputs(
                {name: jnp.asarray(value) for name, value in seen_by_scripts(inputs).items()}
            )
        if kind == "default":
            loss, outputs = default_loss(self._setup.task, bound, of_batch, arrays.get("num_items"))
            sums = {} if bound.default_sums is None else {SUMS: bound.default_sums}
        else:
            outputs = bound(**arrays, **({"fused_lm_head": True} if kind == "fused" else {}))
            loss = outputs.loss
        of_call = {name: vars(outputs).get(name) for name in OUTPUTS} | {"loss": loss}
        found = {name: value for name, value in of_call.items() if value is not None}
        sums |= {name: found.pop(name) for name in _FIXED if name in found}
        return found, sums

    def _task_sums(self, outputs: list[dict], inputs: dict) -> dict[str, jax.Array]:
        aux_losses = [found["aux_loss"] for found in outputs if "aux_loss" in found]
        sums = next((found[SUMS] for found in reversed(outputs) if SUMS in found), None)
        found = [_of_texts(one, self._setup.task.head) for one in outputs if "logits" in one]
        made = SimpleNamespace(outputs=found, aux_losses=aux_losses, default_sums=sums)
        return self._user_loss.sums(made, inputs)


def _of_whole_rows(gradient: dict[str, np.ndarray], outputs: dict[str, Any]) -> dict[str, np.ndarray]:
    """Pad gradients with zeros to the length of the outputs: the script saw only their first positions."""

    def whole(name: str, value: np.ndarray) -> np.ndarray:
        missing = np.shape(outputs[name])[1] - value.shape[1]
        return np.pad(value, [(0, 0), (0, missing), *[(0, 0)] * (value.ndim - 2)])

    return {name: whole(name, value) if name in _POSITIONS else value for name, value in gradient.items()}


def _with_vjp(outputs: Callable, params: dict, *given: Any, **options: Any) -> tuple[dict, Any]:
    """The outputs, and the VJP function: it maps gradients of the differentiable outputs to those of the parameters."""
    found, back, fixed = jax.vjp(lambda params: outputs(params, *given, **options), params, has_aux=True)
    return found | fixed, back


def _joined(parts: tuple[dict, dict]) -> dict:
    return parts[0] | parts[1]


def _of_texts(outputs: dict[str, jax.Array], head: str) -> jax.Array:
    return outputs["logits"] if head == "lm" else outputs["logits"][:, 0]
