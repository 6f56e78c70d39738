"""Tasks of online training: GRPO and RLOO."""

from __future__ import annotations

import abc
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from datasets import Dataset, IterableDataset

from trl_jax.core.outputs import TokenOutputs
from trl_jax.data.batch import Batch, Columns, Example
from trl_jax.data.prompts import as_prompts, check_prompts
from trl_jax.losses.advantages import Advantages, group_advantages, population_advantages, rloo_advantages
from trl_jax.losses.policy_gradient import (
    CLIPPED,
    PER_GENERATION,
    PolicyLoss,
    TokenGroups,
    grpo_loss,
    next_entropy_coef,
    rloo_loss,
    token_groups,
    token_weights,
)
from trl_jax.losses.supervised import real_examples
from trl_jax.tasks.task import STEP_SUMS, Sums, TokenTask, aux_loss, joined

# ----------------------------------------------------------------------------------------------------
# What all tasks have in common that train on the policy's own completions


@dataclass(frozen=True)
class Cycle:
    """The schedule of generations and steps.

    group: completions per prompt. prompts: per generation. parts: micro-batches that a generation is split into.
    iterations: how often each generation is trained on. accumulation: micro-batches per step.
    wraps: whether prompts that do not fill a generation at the end of an epoch start the next epoch; otherwise they are
        dropped.
    """

    group: int = 8
    prompts: int = 1
    parts: int = 1
    iterations: int = 1
    accumulation: int = 1
    wraps: bool = False

    @property
    def repeats(self) -> int:
        """Micro-batches between two generations."""
        return self.parts * self.iterations

    @property
    def keeps_policy(self) -> bool:
        """Whether the training policy is always the one that sampled: each generation is used up within one step."""
        return self.accumulation % self.repeats == 0

    def micro_batches(self, rows: int) -> int:
        """The number of micro-batches in an epoch over `rows` prompts. Only full generations are included.

        Raises:
            ValueError: there are not enough prompts for one generation, and they do not wrap.
        """
        if self.wraps and rows:
            return max(rows // self.prompts, 1) * self.repeats
        if rows < self.prompts:
            raise ValueError(
                f"train_dataset has {rows} prompts, and a generation takes {self.prompts} (generation_batch_size / "
                "num_generations): there would be no step. Pass more prompts, or lower generation_batch_size."
            )
        return rows // self.prompts * self.repeats

    def steps_of_passes(self, rows: int, passes: float) -> int:
        """The number of steps that `passes` passes over `rows` wrapping prompts take."""
        generations = math.ceil(math.ceil(passes * rows) / self.prompts)
        return math.ceil(generations * self.repeats / self.accumulation)


@dataclass(frozen=True)
class RolloutTask(TokenTask):
    """Completions of a dataset's prompts.

    num_generations, num_generations_eval: completions per prompt, in training and in an evaluation.
    temperature: divides the logits, both for sampling completions and in the loss.
    cycle: the schedule of generations and steps.
    """

    num_generations: int = 1
    num_generations_eval: int = 1
    temperature: float = 1.0
    cycle: Cycle = Cycle()

    head: ClassVar[Literal["lm"]] = "lm"
    online: ClassVar[bool] = True
    entropy_bonus: ClassVar[bool] = False
    num_tokens_after: ClassVar[str | None] = None  # num_tokens is one of the metrics of a generation
    columns: ClassVar[Columns] = Columns((), prompts="prompt")

    def prepare(
        self, dataset: Dataset | IterableDataset, tokenizer: Any, *, name: str, **limits: Any
    ) -> Dataset | IterableDataset:
        """Return the rows unchanged; prompts are tokenized when they are completed."""
        return check_prompts(dataset, name, tokenizer)

    def prepare_images(
        self, dataset: Dataset | IterableDataset, tokenizer: Any, *, name: str
    ) -> Dataset | IterableDataset:
        return check_prompts(dataset, name, tokenizer, images=True)

    def example(self, row: dict[str, Any]) -> Example:
        raise TypeError("Rows of prompts cannot be made into examples before they have completions.")

    @property
    def logps(self) -> frozenset[str]:
        """The log-probabilities that completions need, by the names of `ScoredCompletion`'s fields."""
        return frozenset()

    @property
    def diverges_in_loss(self) -> bool:
        """Whether the loss includes the divergence from a reference that the policy starts from."""
        return False

    def numbers(self, row: Any) -> tuple[dict[str, float], dict[str, np.ndarray]]:
        """The numbers that the loss needs of a completion and of its unmasked tokens, by name.

        Args:
            row: a `ScoredCompletion` of `rollout`.
        """
        del row
        return {}, {}

    def token_weights(
        self,
        lengths: np.ndarray,
        completion_weight: np.ndarray,
        micro_batch: np.ndarray,
        *,
        generated_tokens: int,
        part: float,
    ) -> np.ndarray:
        """The weight of each completion's tokens in the step's loss; see `losses.policy_gradient.token_weights`."""
        del lengths, micro_batch, generated_tokens, part
        return completion_weight

    def following(self, make_task: Callable[[], RolloutTask]) -> RolloutTask:
        """This task, with the current values of the arguments that TRL reads in each step.

        Args:
            make_task: makes the trainer's task from its current arguments.
        """
        del make_task
        return self


def micro_batches_of(batch: Batch) -> jax.Array:
    """The real completions in each micro-batch of a pass, bool `[M, X]`."""
    return real_examples(batch.weight, jnp.atleast_2d(batch.micro_batch))


def ref_logps_of(batch: Batch, logps: jax.Array) -> jax.Array:
    """The log-probabilities under the reference, `[N]`; while the two models are equal, the policy's own."""
    equal = jnp.max(batch.extras.example["at_reference"]) > 0
    return jnp.where(equal, jax.lax.stop_gradient(logps), batch.extras.read["ref_logps"])


def check_changes(old: RolloutTask, new: RolloutTask) -> None:
    """Warn about arguments that were changed after the trainer was created: as in TRL, they have no effect.

    Raises:
        ValueError: the number of completions or micro-batches was changed, which cannot be ignored.
    """
    if old.cycle != new.cycle:
        raise ValueError(
            f"The sizes of a generation were changed after the trainer was made: {old.cycle} is {new.cycle} now. Make "
            "a trainer with these arguments."
        )
    names = [field.name for field in fields(old) if vars(old)[field.name] != vars(new)[field.name]]
    if names:
        warnings.warn(
            f"Arguments that decide {', '.join(names)} were changed after the trainer was made. As in TRL, this has "
            "no effect: create a new trainer.",
            stacklevel=4,  # the user's line: train() is wrapped by api_boundary
        )


# ----------------------------------------------------------------------------------------------------
# What GRPO and RLOO have in common: tasks that train on the rewards of the policy's own completions


@dataclass(frozen=True)
class PolicyTask(RolloutTask):
    """Completions in groups of one prompt each, whose rewards are compared with each other.

    beta: coefficient of the divergence from the reference; 0.0: no reference.
    reward_weights: weights of the reward functions, in their order; None: 1.0 each.
    """

    num_generations: int = 8
    num_generations_eval: int = 8
    beta: float = 0.0
    reward_weights: tuple[float, ...] | None = None

    axis: ClassVar[Literal["read"]] = "read"
    whole_micro_batches: ClassVar[bool] = True
    divergence_in_reward: ClassVar[bool] = False  # whether the divergence from the reference is part of the reward
    metrics_by_group: ClassVar[bool] = False  # whether rewards are logged as in TRL's AsyncGRPO

    def following(self, make_task: Callable[[], PolicyTask]) -> PolicyTask:
        """As in `RolloutTask`, also with the values that a script set on the trainer.

        Raises:
            ValueError: beta was set to 0, or from 0 to another value.
        """
        task = self._updated(make_task())
        if bool(task.beta) != bool(self.beta):
            advice = "a small value, such as 1e-9" if self.beta else "beta in the config"
            raise ValueError(
                f"trainer.beta was set to {task.beta}, but the run began {'with' if self.beta else 'without'} a "
                f"reference model, because beta was {self.beta}. Set {advice}."
            )
        return task

    def _updated(self, current: PolicyTask) -> PolicyTask:
        """This task with the values of `current` that may change."""
        return replace(self, beta=current.beta)

    @property
    def diverges_in_loss(self) -> bool:
        return bool(self.beta) and not self.divergence_in_reward

    @property
    def logps(self) -> frozenset[str]:
        old, sampling = self.keeps_old_logps, self.keeps_sampling_logps
        needed = {"old_logps": old, "sampling_logps": sampling, "ref_logps": self.beta}
        return frozenset(name for name, is_needed in needed.items() if is_needed)

    @property
    def keeps_sampling_logps(self) -> bool:
        """Whether the loss needs the log-probabilities that the sampler reported."""
        return False

    @property
    def correction(self) -> PolicyLoss | None:
        """The loss whose `sampler_correction` is applied; None for no correction."""
        return None

    def token_stats(self, outputs: TokenOutputs, batch: Batch) -> Sums:
        """The log-probability and the entropy of each read, `[N]`."""
        return {"logps": outputs.logps, "entropy": outputs.entropy}

    @property
    @abc.abstractmethod
    def keeps_old_logps(self) -> bool:
        """Whether to record the log-probabilities under the policy that sampled the completions."""

    @abc.abstractmethod
    def advantages(self, rewards: np.ndarray, group: int, kl: np.ndarray | None) -> Advantages:
        """Advantages `[B]` of completions.

        Args:
            rewards: float32 `[B, F]`, NaN where a function does not apply; the `group` completions of a prompt are
                consecutive.
            kl: `[B]`, policy minus reference log-probability, summed over a completion's tokens; None without a
                reference.
        """


# ----------------------------------------------------------------------------------------------------
# The base of policy gradient objectives, also for user-defined ones


class CompletionTokens(NamedTuple):
    """The sampled tokens of a pass, `[N]`, and the X completions that they belong to.

    logps: log-probabilities under the policy being trained; the only field with a gradient.
    old_logps: under the policy that sampled the tokens. ref_logps: under the reference; None without a reference.
    entropies: of the policy's predictions, in nats.
    advantages: of each token's completion.
    places: sums over completions: `places.mean` and `places.total` reduce `[N]` to `[X]`, `places.spread` expands `[X]`
        to `[N]`.
    """

    logps: jax.Array
    old_logps: jax.Array
    ref_logps: jax.Array | None
    entropies: jax.Array
    advantages: jax.Array
    places: TokenGroups


@dataclass(frozen=True)
class OnlineTask(PolicyTask):
    """A policy gradient objective on rollouts. A subclass implements `loss`, from `tokens` to `weighted_loss`.

    scale_rewards: the standard deviation that divides advantages: of the "group", of the "batch", or "none".
    """

    scale_rewards: str = "group"

    @property
    def keeps_old_logps(self) -> bool:
        """Only if the policy may have changed since it sampled; otherwise they equal its current log-probabilities."""
        return not self.cycle.keeps_policy

    def numbers(self, row: Any) -> tuple[dict[str, float], dict[str, np.ndarray]]:
        logps = {"old_logps": row.old_logps, "ref_logps": row.ref_logps, "sampling_logps": row.sampling_logps}
        token_values = {name: values[row.completion_mask] for name, values in logps.items() if values is not None}
        return {"advantage": row.advantage}, token_values

    def advantages(self, rewards: np.ndarray, group: int, kl: np.ndarray | None) -> Advantages:
        """Rewards relative to the mean of the group, as in GRPO."""
        return group_advantages(rewards, group, weights=self.reward_weights, scale_rewards=self.scale_rewards)

    def tokens(self, outputs: Sums, batch: Batch) -> CompletionTokens:
        """The unmasked tokens of this pass; arguments as in `loss`."""
        micro_batch = micro_batches_of(batch)
        groups = token_groups(outputs["logps"], None, batch.text, micro_batch, len(batch.weight))

        def counted(values: jax.Array) -> jax.Array:
            return jnp.where(groups.mask, values, 0)

        logps = counted(outputs["logps"])
        old_logps, ref_logps = batch.extras.read.get("old_logps"), batch.extras.read.get("ref_logps")
        if self.diverges_in_loss:
            ref_logps = ref_logps_of(batch, logps)
        return CompletionTokens(
            logps,
            jax.lax.stop_gradient(logps) if old_logps is None else counted(old_logps),
            None if ref_logps is None else counted(ref_logps),
            jax.lax.stop_gradient(counted(outputs["entropy"])),
            groups.spread(batch.extras.example["advantage"]),
            groups,
        )


# ----------------------------------------------------------------------------------------------------
# Group relative policy optimization and its variants

_READ_IN_EACH_STEP = (  # of `args`, by TRL's loss; it reads all other arguments at construction
    "delta", "use_bias_correction_kl", "sapo_temperature_neg", "sapo_temperature_pos", "vespo_k_pos",
    "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg",
)  # fmt: skip
_SET_ON_TRAINER = ("beta", "epsilon", "epsilon_high", "loss_type", "importance_sampling_level", "top_entropy_quantile")


@dataclass(frozen=True)
class GrpoTask(OnlineTask):
    """TRL's GRPO.

    objective: the loss, with its options.
    multi_objective_aggregation: as in `group_advantages`.
    entropy_bonus: whether the numbers of examples include the coefficient of an entropy bonus.
    sampled_elsewhere: whether completions come from a sampler that reports its own log-probabilities.
    """

    objective: PolicyLoss = PolicyLoss()
    multi_objective_aggregation: str = "sum_then_normalize"
    entropy_bonus: bool = False
    sampled_elsewhere: bool = False

    @property
    def keeps_old_logps(self) -> bool:
        return super().keeps_old_logps or self.correction is not None

    @property
    def keeps_sampling_logps(self) -> bool:
        masks = self.sampled_elsewhere and self.objective.off_policy_mask_threshold is not None
        return masks or self.correction is not None

    @property
    def correction(self) -> PolicyLoss | None:
        return None if self.objective.sampler_correction is None else self.objective

    def advantages(self, rewards: np.ndarray, group: int, kl: np.ndarray | None) -> Advantages:
        """Relative to the group's mean; the divergence is part of the loss."""
        options = {"aggregation": self.multi_objective_aggregation, "scale_rewards": self.scale_rewards}
        return group_advantages(rewards, group, weights=self.reward_weights, **options)

    def token_weights(
        self, lengths: np.ndarray, completion_weight: np.ndarray, micro_batch: np.ndarray, **generation: Any
    ) -> np.ndarray:
        return token_weights(self.objective, lengths, completion_weight, micro_batch, **generation)

    def loss(self, outputs: dict[str, jax.Array], batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The step's loss of the completions of a pass, and sums over micro-batches."""
        numbers, reads = batch.extras.example, batch.extras.read
        entropy_coef = jnp.max(numbers["entropy_coef"]) if self.entropy_bonus else None
        ref_logps = ref_logps_of(batch, outputs["logps"]) if self.diverges_in_loss else None
        return grpo_loss(
            outputs["logps"],
            numbers["advantage"],
            old_logps=reads.get("old_logps"),
            ref_logps=ref_logps,
            entropies=outputs["entropy"],
            sampling_logps=reads.get("sampling_logps"),
            text=batch.text,
            token_weight=numbers["token_weight"],
            completion_weight=batch.weight,
            micro_batch=micro_batches_of(batch),
            entropy_coef=entropy_coef,
            settings=self.objective,
        )

    def _updated(self, current: GrpoTask) -> GrpoTask:
        values = {name: vars(current.objective)[name] for name in (*_READ_IN_EACH_STEP, *_SET_ON_TRAINER)}
        task = super()._updated(current)
        return replace(task, scale_rewards=current.scale_rewards, objective=replace(self.objective, **values))

    def metrics(self, sums: Sequence[dict[str, np.ndarray]], split: str) -> dict[str, float | None]:
        """TRL's metrics of the policy: means over micro-batches."""
        metrics = means(grpo_metrics(self.objective, sums))
        first = {name: metrics.pop(name) for name in ("policy_loss",) if name in metrics}
        return first | aux_loss(sums) | metrics


@dataclass(frozen=True)
class AsyncGrpoTask(GrpoTask):
    """TRL's AsyncGRPO: clips the ratio of the policy to the sampler, whose weights are from an earlier step."""

    metrics_by_group: ClassVar[bool] = True

    @property
    def keeps_old_logps(self) -> bool:
        return False

    @property
    def keeps_sampling_logps(self) -> bool:
        return True

    def advantages(self, rewards: np.ndarray, group: int, kl: np.ndarray | None) -> Advantages:
        """Relative to the group's mean, divided by its standard deviation with n in the denominator."""
        return population_advantages(rewards, group)

    def token_weights(
        self, lengths: np.ndarray, completion_weight: np.ndarray, micro_batch: np.ndarray, **generation: Any
    ) -> np.ndarray:
        """Equal weights, so that the loss of a micro-batch is the mean over its tokens on all devices."""
        weight = np.sum(completion_weight) / max(float(np.sum(lengths)), 1.0)
        return np.full(len(lengths), weight, np.float32)

    def loss(self, outputs: dict[str, jax.Array], batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The step's loss of the completions of a pass, and sums over micro-batches, including `ratio` and `kl` of the
        policy to the sampler. A token without a log-probability from the sampler has ratio 1."""
        numbers, logps = batch.extras.example, jax.lax.stop_gradient(outputs["logps"])
        sampling = batch.extras.read["sampling_logps"]
        sampling = jnp.where(jnp.isnan(sampling), logps, sampling)
        micro_batch = micro_batches_of(batch)
        loss, sums = grpo_loss(
            outputs["logps"],
            numbers["advantage"],
            old_logps=sampling,
            entropies=outputs["entropy"],
            text=batch.text,
            token_weight=numbers["token_weight"],
            completion_weight=batch.weight,
            micro_batch=micro_batch,
            settings=self.objective,
        )
        groups = token_groups(logps, None, batch.text, micro_batch, len(batch.weight))
        log_ratio = groups.difference(logps, sampling)
        ratio = jnp.exp(log_ratio)
        return loss, sums | {"ratio": groups.by_token(ratio), "kl": groups.by_token(ratio - 1 - log_ratio)}


# ----------------------------------------------------------------------------------------------------
# REINFORCE leave-one-out


@dataclass(frozen=True)
class RlooTask(PolicyTask):
    """TRL's RLOO: a completion is one action, and the divergence from the reference is part of its reward.

    epsilon, epsilon_high: how far the policy ratio may move below and above 1; epsilon_high=None means epsilon.
    reward_clip_range: bounds of the weighted reward sum; None: no bounds.
    normalize_advantages: subtract the mean of all advantages and divide by their standard deviation.
    """

    epsilon: float = 0.2
    epsilon_high: float | None = None
    reward_clip_range: tuple[float, float] | None = None
    normalize_advantages: bool = False

    divergence_in_reward: ClassVar[bool] = True

    def prepare(
        self, dataset: Dataset | IterableDataset, tokenizer: Any, *, name: str, **limits: Any
    ) -> Dataset | IterableDataset:
        """Return the rows unchanged, except that tokenized prompts (TRL up to 0.21) are decoded to text."""
        return super().prepare(as_prompts(dataset, name, tokenizer), tokenizer, name=name, **limits)

    @property
    def keeps_old_logps(self) -> bool:
        return True

    def numbers(self, row: Any) -> tuple[dict[str, float], dict[str, np.ndarray]]:
        old = float(np.sum(row.old_logps[row.completion_mask], dtype=np.float32))
        return {"advantage": row.advantage, "old_logps": old}, {}

    def advantages(self, rewards: np.ndarray, group: int, kl: np.ndarray | None) -> Advantages:
        """Relative to the mean of the group's other completions."""
        options = {"reward_clip_range": self.reward_clip_range, "normalize": self.normalize_advantages}
        return rloo_advantages(rewards, group, weights=self.reward_weights, kl=kl, beta=self.beta, **options)

    def _updated(self, current: RlooTask) -> RlooTask:
        return replace(super()._updated(current), epsilon=current.epsilon, epsilon_high=current.epsilon_high)

    def loss(self, outputs: dict[str, jax.Array], batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The step's loss of the completions of a pass, and sums over micro-batches."""
        return rloo_loss(
            outputs["logps"],
            batch.extras.example["old_logps"],
            batch.extras.example["advantage"],
            entropies=outputs["entropy"],
            text=batch.text,
            completion_weight=batch.weight,
            micro_batch=micro_batches_of(batch),
            epsilon=self.epsilon,
            epsilon_high=self.epsilon_high,
        )

    def metrics(self, sums: Sequence[dict[str, np.ndarray]], split: str) -> dict[str, float | None]:
        """TRL's metrics of the policy: means over micro-batches."""
        return aux_loss(sums) | means(rloo_metrics(sums))


# ----------------------------------------------------------------------------------------------------
# TRL's metrics of a policy loss, from the sums that `losses.policy_gradient` returns; on the host, in float64


HostSums = dict[str, np.ndarray]
_JOINS = {"low_min": np.min, "high_max": np.max}  # the others are summed


def grpo_metrics(settings: PolicyLoss, sums: Sequence[HostSums]) -> dict[str, np.ndarray]:
    """The metrics of each micro-batch, `[M]`, with TRL's names and in its order; NaN if there is nothing to average.

    Args:
        sums: from `grpo_loss`, of steps (`[passes, micro-batches]` each) or of the batches of an evaluation.
    """
    totals = _totals(sums)
    return dict(_grpo_metrics(settings, totals)) if totals else {}


def rloo_metrics(sums: Sequence[HostSums]) -> dict[str, np.ndarray]:
    """As `grpo_metrics`, for sums from `rloo_loss`."""
    totals = _totals(sums)
    if not totals:
        return {}
    entropy = {"entropy": totals["entropy"] / np.maximum(totals["tokens"], 1)}
    clipped = dict(_clip_metrics(totals, totals["completions"]))
    names = ("low_mean", "low_min", "high_mean", "high_max", "region_mean")
    return entropy | {f"clip_ratio/{name}": clipped[f"clip_ratio/{name}"] for name in names}


def means(metrics: dict[str, np.ndarray]) -> dict[str, float | None]:
    """The mean of each metric over the micro-batches in which it is not NaN; None if there are none."""
    real = {name: values[~np.isnan(values)] for name, values in metrics.items()}
    return {name: float(values.mean()) if len(values) else None for name, values in real.items()}


def _totals(sums: Sequence[HostSums]) -> HostSums:
    """The sums of all micro-batches that have completions, `[M]`; empty if none has."""
    names = [name for name in (sums[0] if sums else ()) if name not in STEP_SUMS]
    totals = joined(sums, {name: _JOINS.get(name, np.sum) for name in names}, count="completions") if names else {}
    return totals if names and totals["completions"].size else {}


def _grpo_metrics(settings: PolicyLoss, totals: HostSums) -> Iterator[tuple[str, np.ndarray]]:
    tokens = np.maximum(totals["tokens"], 1)
    ratios = totals["completions"] if settings.of_sequences else tokens
    if "bonus_tokens" in totals:
        of_generation = settings.loss_type in PER_GENERATION
        yield "policy_loss", totals["policy_loss"] / (1 if of_generation else totals["completion_weight"])
    for name in ("ratio", "kl", "entropy"):
        if name in totals:
            yield name, totals[name] / tokens
    if settings.loss_type in CLIPPED:
        yield from _clip_metrics(totals, ratios)
    elif settings.loss_type == "cispo":
        yield "cispo_clip_ratio", totals["cispo_clipped"] / ratios
    elif settings.loss_type == "vespo":
        yield "vespo/phi_seq_mean", totals["phi"] / totals["completions"]


def _clip_metrics(totals: HostSums, ratios: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    yield "clip_ratio/low_mean", totals["clipped_low"] / ratios
    yield "clip_ratio/high_mean", totals["clipped_high"] / ratios
    yield "clip_ratio/region_mean", totals["clipped"] / ratios
    for name in ("low_min", "high_max"):
        yield f"clip_ratio/{name}", np.where(np.isinf(totals[name]), np.nan, totals[name])


# Entropy bonus


class EntropySettings(NamedTuple):
    """How an adaptive entropy bonus follows the entropy of the last step.

    target: in nats. If the entropy is at most the target, the bonus is applied and its coefficient raised by `delta`;
        otherwise it is not applied and the coefficient is lowered, within [`least`, `most`].
    """

    target: float
    delta: float
    least: float
    most: float


@dataclass
class EntropyBonus:
    """The coefficient of the entropy bonus, fixed or adapted after each step.

    coef: the current coefficient.
    read_settings: returns the current settings, which TRL reads in each step; None keeps `coef` fixed.
    """

    coef: float
    read_settings: Callable[[], EntropySettings] | None = None
    entropy: float = math.inf  # of the last step
    logged: list[float] = field(default_factory=list)  # coefficient after each step since the last log
    _metrics: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        self._settings = None if self.read_settings is None else self.read_settings()

    def next(self) -> float:
        """The coefficient for the next step; 0 if an adaptive bonus is not applied."""
        self._adapt()
        if self.read_settings is None:
            return self.coef
        self._settings = self.read_settings()
        return self.coef if self.entropy <= self._settings.target else 0.0

    @property
    def now(self) -> float:
        """The coefficient after all steps so far."""
        self._adapt()
        return self.coef

    def stepped(self, metrics: dict[str, Any]) -> None:
        self._metrics = metrics

    def _adapt(self) -> None:
        """Update the coefficient from the metrics of the last step, which are fetched from the device only here."""
        if self._metrics is None:
            return
        total, tokens = (np.asarray(self._metrics[f"bonus_{name}"], np.float64).sum() for name in ("entropy", "tokens"))
        self._metrics, self.entropy = None, float(total / max(tokens, 1))
        if self._settings is not None:
            self.coef = next_entropy_coef(self.coef, self.entropy, **self._settings._asdict())
        self.logged.append(self.coef)

    def taken(self) -> list[float]:
        """The coefficients after the steps since the last call."""
        self._adapt()
        logged, self.logged = self.logged, []
        return logged

    def state(self) -> dict[str, Any]:
        """JSON values for `restore`."""
        self._adapt()
        return {"coef": self.coef, "entropy": None if math.isinf(self.entropy) else self.entropy, "logged": self.logged}

    def restore(self, state: dict[str, Any]) -> None:
        entropy = state["entropy"]
        self.coef, self.entropy, self.logged = state["coef"], math.inf if entropy is None else entropy, state["logged"]
