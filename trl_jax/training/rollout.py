"""Online training: assembles the source of steps, reads its rows, and lays out its steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np
from datasets import Dataset, IterableDataset

from trl_jax.core.torch_random import TorchGenerator, default_generator
from trl_jax.data import prompts as prompt_rows
from trl_jax.data.batch import Batch
from trl_jax.data.checks import has_transform
from trl_jax.data.loader import IndexedExample, StepBatch
from trl_jax.hub.generate import exact_draws, stop_rule
from trl_jax.mesh.mesh import fetched
from trl_jax.mesh.processes import is_first, several
from trl_jax.rollout.completions_log import CompletionsLog
from trl_jax.rollout.rewards import RewardFunctions
from trl_jax.rollout.rollout import (
    Experience,
    GeneratedCompletions,
    Logps,
    Rollout,
    Row,
    ScoredCompletion,
    Scorer,
    make_example,
    step_examples,
)
from trl_jax.rollout.steps import RepeatSampler, RolloutSteps, Sampler, StreamSampler
from trl_jax.rollout.tools import Environments
from trl_jax.rollout.user_methods import UserMethods
from trl_jax.tasks.policy import Cycle, EntropyBonus, RolloutTask
from trl_jax.tasks.task import metrics_by_micro_batch
from trl_jax.training import data
from trl_jax.training.devices import ShardedStep
from trl_jax.training.events import Events
from trl_jax.training.forward import Forward, PolicyEqualsReference
from trl_jax.training.logging import ProgressLine
from trl_jax.training.policy_generator import PolicyGenerator, Sampling, with_features
from trl_jax.training.rollout_processes import RankRewards, begin_local_part
from trl_jax.training.server import ServerParts, ServerPolicy
from trl_jax.training.state import Setup

# The steps of online training: their source, and their arrays.


def rollout_steps(
    setup: Setup, parts: RolloutParts, forward: Forward, sharded_step: ShardedStep | None
) -> RolloutSteps:
    """Assemble the source of steps for online training."""
    args, tools = setup.args, parts.sampling.tools
    streams, line = [TorchGenerator(args.seed + rank) for rank in range(setup.shards)], ProgressLine(setup.events)
    if parts.rollout_func is not None:
        streams[0] = default_generator()  # from which `model.generate` in the rollout_func samples, too, as in TRL
    seeds = None if parts.server is None else TorchGenerator(args.seed)
    alone = several() and _completes_alone(parts, args.compute_dtype)
    logps = CompletionLogps(setup, forward, sharded_step)
    generator = PolicyGenerator(
        setup, parts.sampling, streams, line, alone=alone, rollout_func=parts.rollout_func, user_methods=parts.own,
        server=None if parts.server is None else ServerPolicy(setup, parts.server, seeds), rewards=parts.rewards,
    )  # fmt: skip
    rollout = Rollout(
        generator=generator,
        scorer=None if parts.rewards is None else _scorer(setup, parts.rewards, logps, line),
        eos_token_ids=frozenset({*parts.sampling.ends, setup.processing_class.pad_token_id}),
        mask_truncated_completions=parts.drops_truncated,
        count_tokens=partial(_count_tokens, setup.events),
        table=parts.table if is_first() else None,
        report_progress=line,
        stop=stop_rule(setup.model, parts.sampling.options, setup.processing_class),
        reset_environments=list if tools is None or tools.environments is None else _reset(tools.environments),
        overrides=parts.own,
    )

    def make_sampler() -> Sampler:
        rows = readable(setup, setup.train_dataset, "train", shuffle=parts.shuffle)
        return _sampler(rows, setup.task.cycle, setup.args.seed, parts.shuffle)

    def measure(metrics: dict[str, np.ndarray]) -> dict[str, list[float]]:
        return metrics_by_micro_batch(setup.objective, metrics, "train")

    return RolloutSteps(
        rollout, setup.task.cycle, read_row=RowReader(setup, "train"), make_sampler=make_sampler,
        lay_out=StepMaker(setup), measure=measure, streams=streams, seeds=seeds, bonus=parts.bonus,
        needed_logps=setup.task.logps, num_steps_of_run=lambda: setup.state.max_steps,
        ahead=parts.server is not None and parts.server.ahead,
        sync_steps=1 if parts.server is None else parts.server.sync_steps,
    )  # fmt: skip


def _reset(environments: Environments) -> Callable[[Sequence[Row]], list[Row]]:
    return partial(begin_local_part, environments) if several() else environments.reset


def _completes_alone(parts: RolloutParts, dtype: str) -> bool:
    """Whether each of several processes completes only its own prompts: always with a `rollout_func`. A server
    completes the prompts of all processes together. Without a server, each calls tools a different number of times.
    """
    if parts.rollout_func is not None:
        return True
    return parts.server is None and (parts.sampling.tools is not None or exact_draws(dtype))


def _scorer(setup: Setup, rewards: RewardFunctions, logps: CompletionLogps, line: ProgressLine) -> Scorer:
    if several():  # processes compute together, so their calls must have the same order
        return Scorer(lambda: setup.task, RankRewards(rewards), logps, call_now, line)
    return Scorer(lambda: setup.task, rewards, logps, call_in_thread, line)


def readable(
    setup: Setup, dataset: Dataset | IterableDataset, name: str, *, shuffle: bool
) -> Dataset | IterableDataset:
    """The dataset. A stream is shuffled if asked, and its rows are checked as they are read."""
    if not isinstance(dataset, IterableDataset):
        return dataset
    # TRL shuffles the stream itself. Behind the `map` of the check, several shards would come in another order.
    dataset = dataset.shuffle(seed=setup.args.seed) if shuffle else dataset
    options = {"images": setup.encoder is not None, "shuffled": shuffle}
    return prompt_rows.checked_stream(dataset, name, setup.processing_class, **options)


def _sampler(dataset: Dataset | IterableDataset, cycle: Cycle, seed: int, shuffle: bool) -> Sampler:
    sizes = {"chunk": cycle.prompts, "repeats": cycle.repeats}
    if isinstance(dataset, IterableDataset):
        return StreamSampler(dataset, **sizes)
    return RepeatSampler(len(dataset), shuffle=shuffle, seed=seed, wraps=cycle.wraps, **sizes)


def call_in_thread(do: Callable[[], Any]) -> Callable[[], Any]:
    """Start a call in a thread. The returned function waits for it, and returns its result or raises its exception."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="trl_jax-logps")
    future = pool.submit(do)
    pool.shutdown(wait=False)
    return future.result


def call_now(do: Callable[[], Any]) -> Callable[[], Any]:
    """Make a call now, and return a function that returns its result; the interface of `call_in_thread`."""
    result = do()
    return lambda: result


class RowReader:
    """Reads rows, with all columns or only their prompts and images (see `args.keeps_columns`).

    Args:
        name: of the dataset in errors, "train" or "eval".
        dataset: None reads the current training set, because a script may replace it.
    """

    def __init__(self, setup: Setup, name: str, dataset: Dataset | IterableDataset | None = None):
        self._setup, self._dataset, self._name = setup, dataset, name
        self._last: tuple[Any, dict[str, Any]] = (None, {})

    def __call__(self, index: Any) -> dict[str, Any]:
        """Read a row.

        Args:
            index: index of the row; for a stream, the row itself.

        Raises:
            KeyError, ValueError: a transform returned a row that cannot be completed.
        """
        row = self._read(index)
        if self._setup.args.keeps_columns:
            return row
        return {name: row[name] for name in ("prompt", "image", "images") if name in row}

    def _read(self, index: Any) -> dict[str, Any]:
        setup = self._setup
        dataset = setup.train_dataset if self._dataset is None else self._dataset
        if isinstance(dataset, IterableDataset):
            return _copied(index)  # the completions of a prompt do not share it: reward functions may change it
        if has_transform(dataset):
            row = dataset[int(index)]
            prompt_rows.check_row(row, int(index), self._name, setup.processing_class, images=setup.encoder is not None)
            return row
        if setup.encoder is None:
            return dataset[int(index)]
        if self._last[0] != (id(dataset), index):  # the completions of a prompt decode its images only once
            self._last = (id(dataset), index), dataset[int(index)]
        return _copied(self._last[1])


def _copied(value: Any) -> Any:
    """Copy nested lists and dicts; other values, such as images, are shared."""
    if type(value) is list:
        return [_copied(entry) for entry in value]
    return {name: _copied(entry) for name, entry in value.items()} if type(value) is dict else value


def _count_tokens(events: Events, tokens: int) -> int:
    events.state.num_input_tokens_seen += tokens
    return events.state.num_input_tokens_seen


def shared_numbers(
    task: RolloutTask, entropy_coef: float | None, equals_reference: PolicyEqualsReference
) -> dict[str, float]:
    """The numbers that all completions of a step share. `entropy_coef` is None without an entropy bonus."""
    numbers = {} if entropy_coef is None else {"entropy_coef": entropy_coef}
    if task.diverges_in_loss:
        numbers["at_reference"] = float(equals_reference())
    return numbers


class StepMaker:
    """Converts micro-batches of completions to the arrays of a step."""

    def __init__(self, setup: Setup):
        self._setup, self._layout = setup, data.training_layout(setup)
        self._equals_reference = PolicyEqualsReference(setup)

    def __call__(
        self,
        micro_batches: list[list[ScoredCompletion]],
        generations: list[Experience],
        number: int,
        entropy_coef: float | None,
    ) -> StepBatch:
        setup, layout = self._setup, self._layout
        share = len(micro_batches) / setup.task.cycle.parts
        numbers = shared_numbers(setup.task, entropy_coef, self._equals_reference)
        with_images = [self._with_features(rows) for rows in micro_batches]
        groups = step_examples(setup.task, with_images, generations, share, layout.shards, numbers, setup.virtual)
        step = layout.step([[IndexedExample(example, 0) for example in group] for group in groups], number)
        if setup.completions_loss is None:
            return step
        return step._replace(arrays=setup.completions_loss.with_rows(step.arrays, micro_batches, generations))

    def _with_features(self, rows: list[ScoredCompletion]) -> list[ScoredCompletion]:
        """Add the features of their images to completions: checkpoints lack them."""
        images = with_features(self._setup, [row.images for row in rows])
        return [row._replace(images=row_images) for row, row_images in zip(rows, images, strict=True)]


# The parts of a rollout that its trainer chooses.


@dataclass(frozen=True)
class RolloutParts:
    """The parts of a rollout that its trainer chooses.

    rewards: the reward functions; None if completions are not judged.
    shuffle: whether to shuffle the prompts in each epoch.
    bonus: the coefficient of the entropy bonus; None without one.
    rollout_func: prompts -> completions, as `call_rollout_func` takes it; None: the policy completes them.
    server: the servers that complete prompts; None: this process does. With a rollout_func, they only get weights.
    own: user-defined methods that completions go through; None without any.
    """

    sampling: Sampling
    rewards: RewardFunctions | None
    drops_truncated: bool
    shuffle: bool
    bonus: EntropyBonus | None
    table: CompletionsLog | None
    rollout_func: Callable[[list], Mapping[str, Any]] | None = None
    server: ServerParts | None = None
    own: UserMethods | None = None


# Log-probabilities of completions under the policy that generated them, and under the reference.


class CompletionLogps:
    """Log-probabilities of completion tokens under the policy or the reference, in passes laid out like a step's."""

    def __init__(self, setup: Setup, forward: Forward, sharded_step: ShardedStep | None):
        self._setup = setup
        stats = {"policy": forward.policy_stats, "reference": forward.reference_stats}
        self._logps = {model: _compiled_logps(function, sharded_step) for model, function in stats.items()}

    def __call__(self, model: str, generated: GeneratedCompletions, completion_mask: Sequence[np.ndarray]) -> Logps:
        setup = self._setup
        layout = replace(data.training_layout(setup), accumulation=1)
        virtual = setup.virtual if model == "policy" else setup.reference.backend.virtual
        rows = zip(
            generated.prompt_ids, generated.completion_ids, completion_mask, generated.images_by_row, strict=True
        )
        examples = [
            make_example(*row, images=images).with_virtual_tokens(virtual, predicted=False) for *row, images in rows
        ]
        results = [np.zeros(len(ids), np.float32) for ids in generated.completion_ids]
        with setup.on_device():
            for start in range(0, len(examples), layout.batch_size):
                part = list(enumerate(examples))[start : start + layout.batch_size]
                step = layout.step([[IndexedExample(example, number) for number, example in part]], 0)
                logps = fetched(self._logps[model](setup.arrays, data.placed_pass(step.arrays, setup.sharding_plan)))
                for number, (values,) in step.values_by_row(logps.reshape(step.arrays.reads.shape)).items():
                    results[number][completion_mask[number]] = values
        return results


def _compiled_logps(stats: Callable, sharded_step: ShardedStep | None) -> Callable:
    """`(arrays, batch of one pass) -> log-probabilities of its reads, [shards, N]`."""

    def logps(arrays: dict, batch: Batch) -> jax.Array:
        return stats(arrays, data.first_pass(batch))["logps"]

    if sharded_step is not None:
        return jax.jit(sharded_step.scores(logps))
    return jax.jit(lambda arrays, batch: logps(arrays, batch)[None])
