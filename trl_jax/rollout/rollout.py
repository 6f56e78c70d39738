"""Online training: turn prompts into completions, rewards and training examples."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple, Protocol

import numpy as np

from trl_jax.core.outputs import NO_VIRTUAL_TOKENS, VirtualTokens
from trl_jax.data.batch import IGNORED, Context, Example, Extras
from trl_jax.data.images import TextImages, images_from_arrays, images_to_arrays
from trl_jax.data.packed import by_shard
from trl_jax.generation.generator import StopRule
from trl_jax.hub.vision.processor import picture_from_json, picture_to_json
from trl_jax.losses.advantages import Advantages
from trl_jax.rollout.completions_log import (
    CompletionsLog,
    MetricLog,
    group_reward_metrics,
    length_metrics,
    reward_metrics,
    sampling_metrics,
)
from trl_jax.tasks.policy import PolicyTask, RolloutTask

# Generations

Row = dict[str, Any]


class CompletionGenerator(Protocol):
    """The policy with its tokenizer: generates completions, and converts ids to text."""

    def prompts_of(self, rows: Sequence[Row]) -> list:
        """The prompts of rows, with the images of their image columns inserted into the messages."""

    def generate(self, prompts: list, group: int) -> GeneratedCompletions:
        """Generate one completion per prompt; each prompt occurs `group` times in a row."""

    def start(self, prompts: list, group: int) -> Callable[[], GeneratedCompletions]:
        """Start a `generate` on the servers and return immediately; the returned function waits for the completions."""

    def with_image_features(self, completions: GeneratedCompletions) -> GeneratedCompletions:
        """Add the image features to completions from `start` or from a checkpoint.

        Raises:
            ValueError: a completion has an image token without an image.
        """

    def completion_texts(self, prompts: list, prompt_ids: Ids, completion_ids: Ids) -> list:
        """Completions as reward functions see them: messages if the prompts are messages, else texts."""

    def encode(self, prompts: list) -> EncodedTexts:
        """The token ids of prompts, with their images."""

    def decode(self, ids: Ids) -> list[str]:
        """Texts without special tokens."""


class Overrides(Protocol):
    """A script's methods that are called in place of a rollout's, with the rollout; see `user_methods.UserMethods`."""

    def generate_and_score(self, rollout: Rollout, rows: Sequence[Row], group: int, mode: str) -> Experience: ...

    def generate_completions(self, rollout: Rollout, prompts: list, group: int, mode: str) -> GeneratedCompletions: ...


@dataclass
class Rollout:
    """Generates completions with the current policy and scores them.

    scorer: computes rewards and advantages; None if training uses no rewards.
    eos_token_ids: a completion that does not end with one of these was truncated, unless `stop` ended it.
    mask_truncated_completions: whether truncated completions are excluded from the loss.
    count_tokens: adds a number of tokens (read and generated, in training) to the run's total, and returns the total.
    table: the completions table, or None.
    report_progress: shows a line of text to the user.
    reset_environments: resets the environments of a batch of rows and returns the rows with their observations.
    overrides: user-defined methods that generate or score completions, or None.
    stop: also ends completions, at stop strings; None without any.
    """

    generator: CompletionGenerator
    scorer: Scorer | None
    eos_token_ids: frozenset[int]
    mask_truncated_completions: bool
    count_tokens: Callable[[int], int]
    table: CompletionsLog | None = None
    report_progress: Callable[[str], None] = lambda text: None
    reset_environments: Callable[[Sequence[Row]], Sequence[Row]] = list
    overrides: Overrides | None = None
    stop: StopRule | None = None
    metrics: dict[str, MetricLog] = field(
        default_factory=lambda: {"train": MetricLog(), "eval": MetricLog(prefix="eval_")}
    )
    _generated_ahead: GeneratedCompletions | None = None  # completions of the rows that are scored next

    def start_generating(self, rows: Sequence[Row], group: int) -> Callable[[], GeneratedCompletions]:
        """Start completing rows; the returned function waits for the completions."""
        return self.generator.start(self.generator.prompts_of(rows), group)

    def generate_and_score(
        self, rows: Sequence[Row], group: int, mode: str, generated_ahead: GeneratedCompletions | None = None
    ) -> Experience:
        """Generate completions for the prompts of these rows and score them.

        Args:
            rows: each one is repeated `group` times.
            mode: "train" or "eval", under which metrics are collected.
            generated_ahead: the completions, if they were generated ahead.
        """
        self._generated_ahead = generated_ahead
        if self.overrides is None:
            return self.default_generate_and_score(rows, group, mode)
        return self.overrides.generate_and_score(self, rows, group, mode)

    def default_generate_and_score(self, rows: Sequence[Row], group: int, mode: str) -> Experience:
        """`generate_and_score` without a user-defined `_generate_and_score_completions`."""
        rows = self.reset_environments(rows)
        prompts, next_phase = self.generator.prompts_of(rows), "training" if mode == "train" else "evaluating"
        if self.overrides is None:
            completions = self.default_generate(prompts, group, mode)
        else:
            completions = self.overrides.generate_completions(self, prompts, group, mode)
        prompt_ids, completion_ids = completions.prompt_ids, completions.completion_ids
        masked = self._is_truncated(completions) & self.mask_truncated_completions
        masks = [by_model & (not is_masked) for by_model, is_masked in zip(completions.by_model, masked, strict=True)]
        scored = [
            ScoredCompletion(np.asarray(prompt, np.int32), np.asarray(ids, np.int32), mask, 0.0, images=images)
            for prompt, ids, mask, images in zip(
                prompt_ids, completion_ids, masks, completions.images_by_row, strict=True
            )
        ]
        if self.scorer is None:
            self.report_progress(next_phase)
            if self.table is not None:
                self.table.add(mode, self.generator.decode(prompt_ids), self.generator.decode(completion_ids))
            return Experience(scored)
        texts = completions.messages
        if texts is None:
            texts = self.generator.completion_texts(prompts, prompt_ids, completion_ids)
        result = self.scorer(rows, prompts, texts, completions, masks, group, self.metrics[mode])
        self.report_progress(f"{result}, {next_phase}")
        advantages = result.advantages.advantages
        if self.table is not None:
            rewards = self.scorer.rewards
            self.table.add(mode, prompts, texts, result.rewards, advantages, rewards.extra(), rewards.columns)
        scores = zip(advantages.tolist(), result.old_logps, result.ref_logps, result.sampling_logps, strict=True)
        return Experience([
            row._replace(advantage=advantage, old_logps=old, ref_logps=ref, sampling_logps=sampling)
            for row, (advantage, old, ref, sampling) in zip(scored, scores, strict=True)
        ])  # fmt: skip

    def default_generate(self, prompts: list, group: int, mode: str) -> GeneratedCompletions:
        """Generate one completion per prompt, and add length and token metrics."""
        ahead, self._generated_ahead = self._generated_ahead, None
        generator = self.generator
        completions = generator.generate(prompts, group) if ahead is None else generator.with_image_features(ahead)
        metrics = self.metrics[mode]
        lengths = [int(by_model.sum()) for by_model in completions.by_model]
        tokens = sum(map(len, completions.prompt_ids)) + sum(lengths)
        metrics.set("num_tokens", self.count_tokens(tokens if mode == "train" else 0))
        metrics.add(length_metrics(lengths, self._is_truncated(completions)))
        metrics.add(completions.metrics.items())
        return completions

    def _is_truncated(self, completions: GeneratedCompletions) -> np.ndarray:
        """Whether each completion was truncated, bool `[B]`."""
        return np.asarray([
            int(ids[-1]) not in self.eos_token_ids and not (self.stop and self.stop(prompt, ids, len(ids) - 1))
            for prompt, ids in zip(completions.prompt_ids, completions.completion_ids, strict=True)
        ])  # fmt: skip

    def show(self, mode: str, step: int) -> None:
        """Show the completions table, if there is one."""
        if self.table is not None:
            self.table.log(mode, step)


# Rewards and advantages

Logps = Sequence[np.ndarray]


class Rewards(Protocol):
    """Reward functions.

    names: their names in metrics.
    columns: their columns in the completions table.
    current_weights: float32 `[F]`.
    """

    names: Sequence[str]
    columns: Sequence[str]
    current_weights: np.ndarray

    def __call__(self, rows: Sequence[dict], prompts: list, completions: list, completion_ids: list) -> np.ndarray:
        """Compute rewards, float32 `[B, F]`; NaN where a function does not apply."""

    def metrics(self) -> dict[str, float]:
        """The metrics that functions logged in the last call, sorted by name."""

    def extra(self) -> dict[str, list]:
        """The columns that functions logged in the last call, sorted by name."""


class ScoringResult(NamedTuple):
    """Rewards and log-probabilities of B completions.

    rewards: float32 `[B, F]`.
    advantages: the result of `PolicyTask.advantages`.
    old_logps, ref_logps, sampling_logps: for each completion, the log-probabilities of its tokens from the policy that
        generated it, the reference, and the sampler; None for each if not needed.
    """

    rewards: np.ndarray
    advantages: Advantages
    old_logps: Sequence[np.ndarray | None]
    ref_logps: Sequence[np.ndarray | None]
    sampling_logps: Sequence[np.ndarray | None]

    def __str__(self) -> str:
        """The mean reward, for the progress line."""
        rewards = self.advantages.rewards[~np.isnan(self.advantages.rewards)]
        return f"reward {rewards.mean():.3g}" if len(rewards) else "reward unknown"


@dataclass
class Scorer:
    """Calls the reward functions and turns rewards into advantages.

    current_task: returns the run's task, whose coefficients a script may change.
    logps: ("policy" or "reference", completions, completion_mask) -> that model's log-probabilities of the completions'
        tokens, float32 `[tokens]` each.
    start: starts a call in the background and returns a function that waits for its result, so that log-probabilities
        are computed while reward functions run. Reward functions run in this thread because some use signals.
    report_progress: shows a line of text to the user.
    """

    current_task: Callable[[], PolicyTask]
    rewards: Rewards
    logps: Callable[[str, GeneratedCompletions, Sequence[np.ndarray]], Logps]
    start: Callable[[Callable[[], Any]], Callable[[], Any]]
    report_progress: Callable[[str], None] = lambda text: None

    @property
    def task(self) -> PolicyTask:
        return self.current_task()

    def __call__(
        self,
        rows: Sequence[Row],
        prompts: list,
        texts: list,
        completions: GeneratedCompletions,
        completion_mask: Sequence[np.ndarray],
        group: int,
        metrics: MetricLog,
    ) -> ScoringResult:
        """Score completions; each prompt is repeated `group` times.

        Args:
            texts: the completions as reward functions see them.
            metrics: receives the reward metrics.
        """
        completion_ids = completions.completion_ids
        wait_for_logps = self.start(lambda: self._logps(completions, completion_mask))
        self.report_progress(f"rewards of {len(rows)} completions")
        columns = completions.with_columns(rows)
        rewards = self.rewards(columns, prompts, texts, [ids.tolist() for ids in completion_ids])
        old, ref = wait_for_logps()
        needs_sampling = "sampling_logps" in self.task.logps
        sampling = completions.sampling_logps if needs_sampling else [None] * len(completion_ids)
        kl = _divergence(old, ref, completion_mask)
        if self.task.divergence_in_reward and self.task.beta:
            metrics.add([("kl", float(kl.sum() / max(1, sum(mask.sum() for mask in completion_mask))))])
        task = replace(self.task, reward_weights=tuple(self.rewards.current_weights.tolist()))
        advantages = task.advantages(rewards, group, kl)
        if self.task.metrics_by_group:
            metrics.add(group_reward_metrics(self.rewards.names, rewards, advantages, group))
        else:
            metrics.add(reward_metrics(self.rewards.names, rewards, advantages))
        metrics.add(self.rewards.metrics().items())
        if self.task.correction is not None:
            metrics.add(sampling_metrics(self.task.correction, old, sampling, completion_mask))
        return ScoringResult(rewards, advantages, old, ref, sampling)

    def _logps(self, completions: GeneratedCompletions, masks: Sequence[np.ndarray]) -> tuple[Sequence, Sequence]:
        """The policy's and the reference's log-probabilities; None for each completion if not needed."""
        no_logps = [None] * len(completions.completion_ids)
        old = self.logps("policy", completions, masks) if self.task.keeps_old_logps else no_logps
        return old, self.logps("reference", completions, masks) if self.task.beta else no_logps


def _divergence(old: Logps, ref: Logps, masks: Sequence[np.ndarray]) -> np.ndarray | None:
    """The sum of log pi_old - log pi_ref over each completion's unmasked tokens, float32 `[B]`."""
    if old[0] is None or ref[0] is None:
        return None
    return np.asarray([np.sum((a - b) * mask) for a, b, mask in zip(old, ref, masks, strict=True)], np.float32)


# Training examples


def make_example(
    prompt: Sequence[int],
    completion: Sequence[int],
    completion_mask: np.ndarray,
    row_extras: Mapping[str, float] | None = None,
    token_extras: Mapping[str, np.ndarray] | None = None,
    images: TextImages | None = None,
) -> Example:
    """A prompt and its completion as one text. The loss covers the unmasked completion tokens; the prompt is a context
    that other completions of it can share.

    Args:
        completion_mask: bool, one per token of the completion.
        row_extras: extras per completion.
        token_extras: extras per unmasked token.
        images: images of the prompt, or of the whole text.
    """
    ids = np.concatenate([prompt, completion]).astype(np.int32)
    labels = np.full(len(ids), IGNORED, np.int32)
    labels[len(prompt) :][completion_mask] = np.asarray(completion)[completion_mask]
    extras = Extras(dict(row_extras or {}), {}, {name: (values,) for name, values in (token_extras or {}).items()})
    context = Context(ids[: len(prompt)].tobytes(), len(prompt))
    example = Example((ids,), extras, (labels,), context=context)
    if images is None:
        return example
    text_images = images.before(len(ids) - len(images.features))
    return example._replace(
        context=context._replace(key=context.key + images.key),
        images=text_images.images,
        features=(text_images.features,),
        positions=() if text_images.positions is None else (text_images.positions,),
    )


def step_examples(
    task: RolloutTask,
    micro_batches: Sequence[Sequence[ScoredCompletion]],
    generations: Sequence[Experience],
    share: float,
    ranks: int,
    numbers: Mapping[str, float],
    virtual: VirtualTokens = NO_VIRTUAL_TOKENS,
) -> list[list[Example]]:
    """The examples of each micro-batch of a step.

    Args:
        generations: for each micro-batch, the generation that it is a slice of.
        share: micro-batches of the step / micro-batches of a generation.
        ranks: number of ranks over which a micro-batch is divided.
        numbers: extras with the same value for all completions.
        virtual: virtual tokens before each text.
    """
    groups = []
    for rows, generation in zip(micro_batches, generations, strict=True):
        lengths = np.asarray([row.num_tokens for row in rows], np.float32)
        completion_weight = np.full(len(rows), 1 / (len(micro_batches) * len(rows)), np.float32)
        rank_mask = np.zeros((ranks, len(rows)), bool)
        for rank, indices in enumerate(by_shard([range(len(rows))], ranks)):
            rank_mask[rank, indices] = True
        tokens = generation.num_tokens
        weights = task.token_weights(lengths, completion_weight, rank_mask, generated_tokens=tokens, part=share)
        examples = []
        for row, weight in zip(rows, weights.tolist(), strict=True):
            row_numbers, token_extras = task.numbers(row)
            extras = {**row_numbers, "token_weight": weight, **numbers}
            example = make_example(row.prompt, row.completion, row.completion_mask, extras, token_extras, row.images)
            examples.append(example.with_virtual_tokens(virtual, predicted=False))
        groups.append(examples)
    return groups


# Completions with advantages, as trained on and checkpointed


class ScoredCompletion(NamedTuple):
    """A prompt with one completion.

    prompt, completion: token ids, int32.
    completion_mask: bool, whether each token of the completion contributes to the loss.
    advantage: computed from its reward relative to the prompt's other completions.
    old_logps, ref_logps: float32, log-probabilities of the completion's tokens from the policy that generated it and
        from the reference; None if not needed.
    sampling_logps: float32, the sampler's log-probabilities, NaN where it reported none; None if not needed.
    images: images of the prompt, or of the text up to the last image in the completion; None if there are none.
    extras: numbers that a script added to the outputs of `_generate_and_score_completions`, by name: float32, int32 or
        bool, a scalar or one number per token of the completion; None if there are none.
    """

    prompt: np.ndarray
    completion: np.ndarray
    completion_mask: np.ndarray
    advantage: float
    old_logps: np.ndarray | None = None
    ref_logps: np.ndarray | None = None
    sampling_logps: np.ndarray | None = None
    images: TextImages | None = None
    extras: Mapping[str, np.ndarray] | None = None

    @property
    def num_tokens(self) -> int:
        """Number of tokens that contribute to the loss."""
        return int(self.completion_mask.sum())


TRL_LOGPS = {
    "old_per_token_logps": "old_logps",
    "ref_per_token_logps": "ref_logps",
    "sampling_per_token_logps": "sampling_logps",
}
_LOGPS = tuple(TRL_LOGPS.values())
_SAVED_AS = {"completion_mask": "counted"}  # the name used in checkpoints
_EXTRAS, _PER_TOKEN = "extras/", "of_tokens/"  # prefixes of user-defined numbers, and of whether they are per token


@dataclass(frozen=True)
class Experience:
    """The completions of one generation, in training order. Micro-batches are slices of it.

    num_items: the `num_items_in_batch` that a script returned; None: the number of tokens that contribute to the loss.
    """

    rows: Sequence[ScoredCompletion]
    num_items: float | None = None

    @property
    def num_tokens(self) -> float:
        """The divisor of token-level losses: the number of tokens that contribute to the loss, or `num_items`."""
        return sum(row.num_tokens for row in self.rows) if self.num_items is None else self.num_items

    @property
    def logps(self) -> frozenset[str]:
        """Which of "old_logps", "ref_logps" and "sampling_logps" the completions have."""
        first = self.rows[0]._asdict()
        return frozenset(name for name in _LOGPS if first[name] is not None)

    def reordered(self, order: Iterable[int]) -> Experience:
        """The same completions in another order."""
        return replace(self, rows=[self.rows[index] for index in order])

    def part(self, number: int, parts: int, ranks: int) -> list[ScoredCompletion]:
        """Micro-batch `number` of `parts`: the rows are divided into `ranks` equal runs, and each run contributes its
        part with this number."""
        rows_per_rank = len(self.rows) // ranks
        rows_per_part = rows_per_rank // parts
        starts = (rank * rows_per_rank + number * rows_per_part for rank in range(ranks))
        return [row for start in starts for row in self.rows[start : start + rows_per_part]]

    def arrays(self) -> dict[str, np.ndarray]:
        """All completions as a few flat arrays, by name."""
        rows = self.rows
        arrays = {"advantage": np.asarray([row.advantage for row in rows], np.float32)}
        for name in ("prompt", "completion"):
            arrays[f"{name}_length"] = np.asarray([len(row._asdict()[name]) for row in rows], np.int32)
        for name in ("prompt", "completion", "completion_mask", *_LOGPS):
            values = [row._asdict()[name] for row in rows]
            if values[0] is not None:
                arrays[_SAVED_AS.get(name, name)] = np.concatenate(values)
        if any(row.images is not None for row in rows):
            arrays |= prefixed("images", images_to_arrays([row.images for row in rows]))
        for name, values in (rows[0].extras or {}).items():
            row_values = [row.extras[name] for row in rows]
            arrays[f"{_EXTRAS}{name}"] = np.concatenate(row_values) if values.ndim else np.asarray(row_values)
            arrays[f"{_PER_TOKEN}{name}"] = np.bool_(values.ndim)
        return arrays if self.num_items is None else arrays | {"num_items": np.float32(self.num_items)}

    @classmethod
    def from_arrays(cls, arrays: dict[str, np.ndarray]) -> Experience:
        """Inverse of `arrays`."""

        def split(name: str, lengths_of: str) -> list:
            array_name = _SAVED_AS.get(name, name)
            return _split(arrays, array_name, lengths_of) if array_name in arrays else [None] * len(arrays["advantage"])

        columns = [split("prompt", "prompt"), split("completion", "completion"), split("completion_mask", "completion")]
        logps = [split(name, "completion") for name in _LOGPS]
        images = under_prefix("images", arrays)
        images = images_from_arrays(images) if images else [None] * len(arrays["advantage"])
        extras = [{} for _ in arrays["advantage"]]
        for name in (name.removeprefix(_PER_TOKEN) for name in arrays if name.startswith(_PER_TOKEN)):
            flat = arrays[f"{_EXTRAS}{name}"]
            row_values = split(f"{_EXTRAS}{name}", "completion") if arrays[f"{_PER_TOKEN}{name}"] else list(flat)
            for row_extras, values in zip(extras, row_values, strict=True):
                row_extras[name] = np.asarray(values)
        extras = [row_extras or None for row_extras in extras]
        fields = *columns, arrays["advantage"].tolist(), *logps, images, extras
        num_items = float(arrays["num_items"]) if "num_items" in arrays else None
        return cls([ScoredCompletion(*row) for row in zip(*fields, strict=True)], num_items)


# Completions before scoring

Ids = Sequence[Sequence[int]]


class EncodedTexts(NamedTuple):
    """B texts that the model continues.

    ids: token ids.
    images: the images of each text, placed in its ids; None if the run has no images.
    urls: the same images as data URLs, for servers; None without images, or if this process generates.
    """

    ids: list[list[int]]
    images: list[TextImages] | None = None
    urls: list[list[str]] | None = None

    def at(self, indices: Sequence[int]) -> EncodedTexts:
        """The texts at these indices."""
        return EncodedTexts(*(column and [column[index] for index in indices] for column in self))

    def equal_runs(self, group: int) -> int:
        """`group` if each run of `group` texts is equal, else 1: environments may give a group different prompts."""
        images = self.urls if self.images is None else [text_images.key for text_images in self.images]
        keys = self.ids if images is None else list(zip(self.ids, images, strict=True))
        all_equal = len(keys) % group == 0 and all(key == keys[index - index % group] for index, key in enumerate(keys))
        return group if all_equal else 1


@dataclass(frozen=True)
class GeneratedCompletions:
    """B prompts with their completions, before scoring.

    prompt_ids, completion_ids: token ids; a completion includes its EOS token.
    by_model: bool, whether the model generated each token of a completion. The other tokens are tool results, which are
        neither trained on nor counted.
    columns: extra columns for the reward functions. A list has one value per row; any other value applies to all rows.
    messages: each completion as reward functions see it; None: its tokens are decoded.
    calls: number of tool calls, and of failed ones; None without tools.
    sampling_logps: float32, the sampler's log-probability of each token of a completion, NaN where it has none; None if
        the sampler does not report them.
    images: images of each prompt, or of its text up to the last image in its completion; None if there are none.
    seconds: times that servers took, by the names under which they are logged.
    """

    prompt_ids: Sequence[Sequence[int]]
    completion_ids: Sequence[np.ndarray]
    by_model: Sequence[np.ndarray]
    columns: Mapping[str, Any] = field(default_factory=dict)
    messages: Sequence[list[dict[str, Any]]] | None = None
    calls: tuple[int, int] | None = None
    sampling_logps: Sequence[np.ndarray] | None = None
    images: Sequence[TextImages] | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def metrics(self) -> dict[str, float]:
        """The servers' times, tool calls per completion and the fraction that failed, under TRL's names."""
        if self.calls is None:
            return dict(self.seconds)
        calls, failures = map(np.float32, self.calls)
        frequency = calls / np.float32(len(self.completion_ids))
        failed = failures / calls if calls else 0.0
        tool_metrics = {"tools/call_frequency": float(frequency), "tools/failure_frequency": float(failed)}
        return tool_metrics | self.seconds

    def arrays(self) -> dict[str, np.ndarray]:
        """The completions, which must come from servers, as a few flat arrays, by name, for `from_arrays`."""
        parts = {"prompt": self.prompt_ids, "completion": self.completion_ids}
        arrays = {f"{name}_length": np.asarray(list(map(len, ids)), np.int32) for name, ids in parts.items()}
        arrays |= {name: np.concatenate(ids).astype(np.int32) for name, ids in parts.items()}
        arrays["sampling_logps"] = np.concatenate(self.sampling_logps)
        if self.images is not None:
            arrays |= prefixed("images", images_to_arrays(self.images))
        if self.calls is None:
            return arrays
        text = _messages_to_json(_map_pictures(self.messages, picture_to_json))
        arrays |= {"by_model": np.concatenate(self.by_model), "messages": np.frombuffer(text.encode(), np.uint8)}
        return arrays | {"calls": np.asarray(self.calls)}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> GeneratedCompletions:
        """Inverse of `arrays`."""
        prompt_ids = [ids.tolist() for ids in _split(arrays, "prompt", "prompt")]
        completion_ids = _split(arrays, "completion", "completion")
        images = under_prefix("images", arrays)
        completions = cls(
            prompt_ids, completion_ids, all_by_model(completion_ids),
            images=images_from_arrays(images) if images else None,
            sampling_logps=_split(arrays, "sampling_logps", "completion"),
        )  # fmt: skip
        if "calls" not in arrays:
            return completions
        messages = _map_pictures(json.loads(arrays["messages"].tobytes()), picture_from_json)
        calls = tuple(arrays["calls"].tolist())
        return replace(completions, by_model=_split(arrays, "by_model", "completion"), messages=messages, calls=calls)

    @property
    def images_by_row(self) -> Sequence[TextImages | None]:
        """The images of each row; None for rows without images."""
        if self.images is None:
            return [None] * len(self.prompt_ids)
        return [images if images.images else None for images in self.images]

    def with_columns(self, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The rows with the extra columns. If a list is too short, the last rows lack that column, as in TRL."""
        return [{**row, **self._columns_at(index)} for index, row in enumerate(rows)]

    def _columns_at(self, index: int) -> dict[str, Any]:
        lists = {name: values for name, values in self.columns.items() if isinstance(values, list)}
        columns = {name: values[index] for name, values in lists.items() if index < len(values)}
        return columns | {name: value for name, value in self.columns.items() if name not in lists}


def _messages_to_json(messages: list[list[dict[str, Any]]]) -> str:
    for message in chain.from_iterable(messages):
        try:
            json.dumps(message)
        except TypeError as error:
            raise TypeError(
                f"The answer of the tool {message.get('name')!r} cannot be saved in a checkpoint: {error}. Return "
                "text, numbers of Python, lists, dicts and images."
            ) from error
    return json.dumps(messages)


def _map_pictures(messages: Sequence[Sequence[Mapping]], convert: Callable[[Any], Any]) -> list[list[dict[str, Any]]]:
    """Convert the pictures (see `open_picture`) in messages."""

    def convert_part(part: Any) -> Any:
        is_image = isinstance(part, Mapping) and part.get("type") == "image" and "image" in part
        return {**part, "image": convert(part["image"])} if is_image else part

    def convert_message(message: Mapping[str, Any]) -> dict[str, Any]:
        has_parts = isinstance(message.get("content"), list | tuple)
        return {**message, "content": list(map(convert_part, message["content"]))} if has_parts else dict(message)

    return [list(map(convert_message, conversation)) for conversation in messages]


def all_by_model(completions: Sequence[np.ndarray]) -> list[np.ndarray]:
    """`by_model` for completions that the model generated without tools."""
    return [np.ones(len(ids), bool) for ids in completions]


def _split(arrays: Mapping[str, np.ndarray], name: str, lengths_of: str) -> list[np.ndarray]:
    """The rows of a flat array, whose lengths are in `<of>_length`."""
    return np.split(arrays[name], np.cumsum(arrays[f"{lengths_of}_length"])[:-1])


def prefixed(prefix: str, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {f"{prefix}/{name}": array for name, array in arrays.items()}


def under_prefix(prefix: str, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    start = f"{prefix}/"
    return {name.removeprefix(start): array for name, array in arrays.items() if name.startswith(start)}
