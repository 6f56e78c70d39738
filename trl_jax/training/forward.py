"""The model's outputs and the task's loss as pure functions, and a step's random numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from trl_jax.core.outputs import Images, PrecomputedFeatures
from trl_jax.data.batch import Batch, LossBatch, without_virtual
from trl_jax.hub.backend import Backend
from trl_jax.hub.peft_backend import LoraBackend
from trl_jax.hub.pretrained import PreTrainedModel
from trl_jax.losses.supervised import load_balancing_loss, real_examples, summed
from trl_jax.models.model import merge
from trl_jax.nn.head import Distributions, outputs_of_logits, tempered
from trl_jax.nn.layers import Noise
from trl_jax.nn.linear import Stream
from trl_jax.training.reference import PREFIX, ReferenceModel
from trl_jax.training.state import Setup

if TYPE_CHECKING:
    from trl_jax.config.base import BaseConfig

LOGITS = "logits"


class TraceAgain(BaseException):
    """A user-defined loss needs values, such as logits, which the function that is being traced, or was compiled, does
    not compute. It will if it is traced again. Not an Exception, which the script may catch."""


class Forward:
    """The model's outputs and the task's loss as pure functions of parameters and a batch, from which steps and
    evaluations are compiled."""

    def __init__(self, setup: Setup):
        self._setup = setup

    def outputs(self, params: dict, batch: Batch, *, dtype: str, bounded: bool = True, **options: Any) -> Any:
        """The inputs of the task's loss for one pass.

        With a score head: its outputs, float32 `[X]`. With a language model's head: a dict with the results of the
        task's `token_stats`, `ref_<name>` for those in `task.compared` (if the run has a reference), and `aux_loss`
        `[X]`, the load-balancing loss of this pass (if the run adds it), and `logits` `[N, V]`, before the division by
        the temperature (if a user-defined loss needs them).

        Args:
            dtype: the compute dtype of the layers.
            bounded: whether all texts are within max_length.
            options: further arguments of the model's call: remat, dropout_key, router_key, noise.
        """
        setup, reference = self._setup, self._setup.reference
        common, max_tokens = self._common(batch, dtype), setup.max_tokens if bounded else None
        if reference is not None:
            params, compared = reference.split(params)
        model = merge(setup.model.graph, params, options.get("dropout_key"))
        options |= common | _windows(setup.model.backend, max_tokens)
        if setup.router_aux_loss_coef:
            count, virtual = batch.router_token_count, setup.virtual
            options["router_token_count"] = count if virtual.read else jnp.where(batch.tokens < virtual.first, count, 0)
        if batch.images is not None:
            options["images"] = model.features(**options)
            common["images"] = _reference_images(batch.images)
            if isinstance(batch.images, Images) and self.reference_shares_tower():
                common["images"] = jax.lax.stop_gradient(options["images"])
        if setup.computes_logits:
            del options["targets"], options["temperature"]
        outputs = model(batch.tokens, batch.positions, batch.reads, **options)
        if setup.task.head == "score":
            return outputs
        sums = {}
        if setup.router_aux_loss_coef:
            outputs, router_sums = outputs
            sums[AUX_LOSS] = jnp.broadcast_to(load_balancing_loss(router_sums), batch.lengths.shape)
        if setup.task.compares_distributions:
            others = reference.outputs(compared, batch, **common, **_windows(reference.backend, max_tokens))
            return sums | setup.task.token_stats(Distributions(outputs, others, batch.targets), batch)
        if setup.computes_logits:
            sums[LOGITS] = outputs
            outputs = outputs_of_logits(tempered(outputs, setup.task.temperature), batch.targets)
        sums |= setup.task.token_stats(outputs, batch)
        if reference is None or not setup.task.compared:
            return sums
        if setup.virtual.count and not reference.backend.virtual.count:
            batch = without_virtual(batch, setup.virtual.count)
            common["lengths"] = batch.lengths
        ref_stats = self._reference_stats(compared, batch, max_tokens, common)
        return sums | {f"ref_{name}": ref_stats[name] for name in setup.task.compared}

    def reference_shares_tower(self) -> bool:
        """Whether the policy and the reference currently share the vision tower, so its features are computed once."""
        model, reference = self._setup.model, self._setup.reference
        if reference is None:
            return False
        base = model.backend.base if isinstance(model.backend, LoraBackend) else model.backend
        tower = {path for path in base.tensors if path.startswith("vision.")}
        return tower <= reference.shared and not model.backend.of_vision(model.params)

    def policy_stats(self, params: dict, batch: Batch) -> dict[str, jax.Array]:
        """The task's `token_stats` under the policy, without the reference; arguments as in `outputs`."""
        params = {path: array for path, array in params.items() if not path.startswith(PREFIX)}
        options = self._common(batch) | _windows(self._setup.model.backend, self._setup.max_tokens)
        model = merge(self._setup.model.graph, params)
        return self._setup.task.token_stats(model(batch.tokens, batch.positions, batch.reads, **options), batch)

    def reference_stats(self, params: dict, batch: Batch) -> dict[str, jax.Array]:
        """The task's `token_stats` under the reference, for a batch in its layout; arguments as in `outputs`."""
        _, compared = self._setup.reference.split(params)
        options = self._common(batch)
        if batch.images is not None:
            options["images"] = _reference_images(batch.images)
        return self._reference_stats(compared, batch, self._setup.max_tokens, options)

    def _reference_stats(
        self, arrays: dict, batch: Batch, max_tokens: int | None, options: dict[str, Any]
    ) -> dict[str, jax.Array]:
        reference, task = self._setup.reference, self._setup.task
        outputs = reference.outputs(arrays, batch, **options, **_windows(reference.backend, max_tokens))
        return task.token_stats(outputs, batch)

    def _common(self, batch: Batch, dtype: str | None = None) -> dict[str, Any]:
        """The options of every model call; dtype=None means the compute dtype of training."""
        options: dict[str, Any] = {"dtype": jnp.dtype(dtype or self._setup.args.compute_dtype)}
        options |= {"lengths": batch.lengths} if batch.packed is None else {"packed": batch.packed}
        if batch.images is not None:
            options["images"] = batch.images
        task = self._setup.task
        if task.head == "score":
            return options
        if self._setup.args.cast_lm_head_to_fp32:
            options["head_dtype"] = jnp.dtype("float32")
        if task.compares_distributions:
            return options | {"before_head": True}
        return options | {"targets": batch.targets, "temperature": task.temperature}

    def loss(
        self, params: dict, batch: Batch, key: jax.Array | None, *, remat: bool | str = False
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The loss of one pass, and the sums for its metrics.

        Args:
            params: all parameters, trained and frozen.
            key: for dropout, routers and noise; None without them.
            remat: whether the backward pass recomputes layers instead of keeping their activations.
        """
        options = {"remat": remat} | self.random_options(key, batch.lengths)

        def computed() -> tuple[jax.Array, dict[str, jax.Array]]:
            outputs = self.outputs(params, batch, dtype=self._setup.args.compute_dtype, **options)
            return self._with_aux_loss(*self._setup.objective.loss(outputs, batch), outputs, batch)

        try:
            return computed()
        except TraceAgain:  # XLA removes the first trace
            return computed()

    def _with_aux_loss(
        self, loss: jax.Array, sums: dict[str, jax.Array], outputs: Any, batch: Batch | LossBatch
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        setup = self._setup
        if (
            not setup.router_aux_loss_coef or setup.completions_loss is not None
        ):  # a user-defined loss adds it, as in TRL
            return loss, sums
        return with_aux_loss(loss, sums, outputs[AUX_LOSS], batch, setup.router_aux_loss_coef)

    def measure(self, outputs: Any, batch: Batch | LossBatch) -> dict[str, jax.Array]:
        """The metric sums of an evaluated batch, and its mean `loss`."""
        loss, sums = self._with_aux_loss(*self._setup.objective.loss(outputs, batch), outputs, batch)
        return sums | {"loss": loss}

    def random_options(self, key: jax.Array | None, lengths: jax.Array, *, devices: int = 1) -> dict[str, Any]:
        """The random options of `outputs` in training, for one pass over texts of these `lengths`.

        Args:
            devices: the number of devices whose texts these are. Each device's part of a divided step is a pass.
        """
        setup = self._setup
        concatenated = devices if setup.task.padding_free else None
        return random_options(setup.args, setup.model.backend, key, lengths, setup.pad_to_multiple_of, concatenated)


def _reference_images(images: Images | PrecomputedFeatures) -> Images | PrecomputedFeatures:
    """The images in the form that the reference takes."""
    if not isinstance(images, PrecomputedFeatures) or images.of_reference is None:
        return images
    return images.of_reference._replace(at=images.at)


def _windows(backend: Backend, max_tokens: int | None) -> dict[str, int | None]:
    """The extra option for models with sliding-window attention: the maximum text length."""
    return {} if backend.traits.window is None else {"max_tokens": max_tokens}


# Detects whether the policy still equals its reference. If so, their divergence and its gradient are exactly 0. But two
# programs differ in the last digits of log-probabilities, and Adam turns such tiny gradients into full-size updates.


class PolicyEqualsReference:
    """Called before each step and evaluation of a run with a reference. Compares the weights until they differ; after
    that it assumes that they stay different, unless the reference's arrays are replaced. False if a script may change
    the reference's log-probabilities."""

    def __init__(self, setup: Setup):
        self._setup, self._compared, self._parted = setup, None, False  # _compared: the reference arrays last compared

    def __call__(self) -> bool:
        setup = self._setup
        if setup.reference is None or "_generate_and_score_completions" in setup.overridden:
            return False
        if setup.reference.arrays is not self._compared:
            self._compared, self._parted = setup.reference.arrays, False
        if not self._parted:
            with setup.on_device():
                self._parted = not _is_reference(setup.reference, setup.model)
        return not self._parted


def _is_reference(reference: ReferenceModel, policy: PreTrainedModel) -> bool:
    backend, params = policy.backend, policy.params
    ref_params = {path.removeprefix(PREFIX): array for path, array in reference.arrays.items()}
    if any(path not in params or _kind(params[path]) != _kind(array) for path, array in ref_params.items()):
        return False
    if any(isinstance(array, jax.ShapeDtypeStruct) for array in params.values()):
        return False  # planning uses shapes without values
    if reference.backend is backend:
        added = []
    elif isinstance(backend, LoraBackend) and reference.backend is backend.base:
        added = [{kind: params[path] for kind, path in module.paths.items()} for module in backend.plan.modules]
    else:
        return False
    return bool(_same(ref_params, {path: params[path] for path in ref_params}, added))


def _kind(array: Any) -> tuple:
    return array.shape, array.dtype


@jax.jit
def _same(reference: dict[str, Any], policy: dict[str, Any], added: list[dict[str, Any]]) -> jax.Array:
    """Whether the arrays are equal, and the adapters (dicts of arrays by kind) add nothing."""
    equal = [jnp.all(array == policy[path]) for path, array in reference.items()]
    for adapter in added:
        equal.append(~(jnp.any(adapter["a"] != 0) & jnp.any(adapter["b"] != 0)))
        equal.extend(jnp.all(adapter[kind] == 0) for kind in ("bias",) if kind in adapter)
    return jnp.all(jnp.stack(equal)) if equal else jnp.bool_(True)


def balance_experts(model: PreTrainedModel, coefficient: float | None, *, in_config: bool = False) -> float:
    """The weight of the load-balancing loss of a mixture of experts; 0.0 disables it.

    Args:
        coefficient: `router_aux_loss_coef` of the arguments; None uses the value in the model's config, or 0.0.
        in_config: write the weight into the model's config, as TRL's SFTTrainer does.

    Raises:
        ValueError: the weight is not 0, and the model does not return its router logits.
    """
    config = model.config.get_text_config()
    values, name = config.to_dict(), model.config.architectures[0]
    coef = values.get("router_aux_loss_coef", 0.0) if coefficient is None else coefficient
    if "output_router_logits" not in values:
        if coefficient:
            raise ValueError(
                f"`router_aux_loss_coef` is set to {coefficient} but {name} is not a Mixture-of-Experts model "
                "that returns its router logits, so there is no auxiliary loss to weight. Leave it out."
            )
        return 0.0
    if coef and not model.backend.traits.has_routers:
        raise ValueError(
            f"router_aux_loss_coef={coef} of {name}: this model runs on the {model.backend.name} backend, which "
            "has no load-balancing loss. Pass router_aux_loss_coef=0.0 to train without it."
        )
    if in_config and "router_aux_loss_coef" in values:
        config.output_router_logits, config.router_aux_loss_coef = coef != 0, coef
    return coef


# The random numbers of a training step: dropout, routers that sample experts, and noise on the embeddings.


def run_key(args: BaseConfig, backend: Backend) -> jax.Array | None:
    """A run's PRNG key; None if nothing is random. Each step folds in its number, so a resumed run draws the same."""
    drawn = not args.disable_dropout or args.neftune_noise_alpha or backend.traits.draws_experts
    return jax.random.key(args.seed) if drawn else None


def random_options(
    args: BaseConfig,
    backend: Backend,
    key: jax.Array | None,
    lengths: jax.Array,
    multiple: int | str | None,
    concatenated: int | None = None,
) -> dict[str, Any]:
    """The random options of the model's call in training.

    Routers that sample experts do so even with `disable_dropout`, because it is how they learn.

    Args:
        lengths: of the texts. As in TRL, the strength of the noise depends on the padded length: the longest text,
            rounded up to the next `multiple`.
        concatenated: the number of rows that TRL would concatenate the texts to, one per device, if it does so.
    """
    if key is None:
        return {}
    options = {} if args.disable_dropout else {"dropout_key": key}
    options |= {"router_key": key} if backend.traits.draws_experts else {}
    if not args.neftune_noise_alpha:
        return options
    multiple = multiple if isinstance(multiple, int) else 1
    lengths = (lengths - backend.virtual.count).clip(0)
    longest = jnp.max(lengths) if concatenated is None else jnp.sum(lengths) // concatenated
    longest = -(-longest // multiple) * multiple
    length = jnp.maximum(longest, 1)  # a micro-batch may be empty in the last step of an epoch
    return options | {"noise": Noise(args.neftune_noise_alpha, jax.random.fold_in(key, Stream.NOISE), length)}


def check_noise(args: BaseConfig, backend: Backend) -> None:
    """Raise ValueError if neftune_noise_alpha is set and the model's backend cannot add noise."""
    if args.neftune_noise_alpha and not backend.traits.takes_noise:
        raise ValueError(
            f"neftune_noise_alpha={args.neftune_noise_alpha}: this model runs on the {backend.name} backend, whose "
            "embedding is part of a program that noise cannot be put into. Leave neftune_noise_alpha out."
        )


# The load-balancing loss of a mixture of experts, over all tokens of a pass.

AUX_LOSS = "aux_loss"


def with_aux_loss(
    loss: jax.Array, sums: dict[str, jax.Array], aux_loss: jax.Array, batch: Batch | LossBatch, coefficient: float
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Add the weighted load-balancing loss to a task's loss, and its sums to the task's sums.

    Args:
        aux_loss: `[X]`, for each text the load-balancing loss of its pass.
        batch: `batch.pass_weight` holds each example's weight in the mean over passes.
    """
    of_examples, real = aux_loss[: len(batch.weight)], real_examples(batch.weight, batch.micro_batch)
    sums = sums | {AUX_LOSS: summed(of_examples, real), f"{AUX_LOSS}_examples": summed(1.0, real)}
    return loss + coefficient * jnp.sum(batch.pass_weight * of_examples), sums


def aux_loss_weight(coefficient: float, pass_weight: Any) -> Any:
    """The weight of a batch's load-balancing loss, if the batch is this share of a step; None if the run adds none."""
    return coefficient * pass_weight if coefficient else None


def aux_loss_sums(aux_losses: Sequence[jax.Array]) -> dict[str, jax.Array]:
    """The sums for the `aux_loss` metric from batches that were computed one by one; empty without any."""
    if not aux_losses:
        return {}
    return {AUX_LOSS: sum(aux_losses), f"{AUX_LOSS}_examples": jnp.float32(len(aux_losses))}
