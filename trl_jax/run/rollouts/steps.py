"""The source of the steps of a run that makes its rows itself, and the arrays of a step."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from datasets import Dataset, IterableDataset

from trl_jax.core.torch_random import TorchGenerator
from trl_jax.data.step_layout import IndexedExample, StepBatch
from trl_jax.engine.devices.processes import is_first, several
from trl_jax.engine.devices.spmd import ShardedStep
from trl_jax.hub.generating.complete import exact_draws
from trl_jax.rollout.examples import step_examples
from trl_jax.rollout.experience import Completed, Experience
from trl_jax.rollout.judge import Judge, Rewards
from trl_jax.rollout.rollout import Rollout
from trl_jax.rollout.sampler import RepeatSampler, Sampler, StreamSampler
from trl_jax.rollout.source import RolloutSteps
from trl_jax.run import data
from trl_jax.run.model.at_reference import AtReference
from trl_jax.run.progress_line import ProgressLine
from trl_jax.run.rollouts.logps import CompletionLogps
from trl_jax.run.rollouts.parts import RolloutParts
from trl_jax.run.rollouts.ranks import RankRewards, RankWriter, own_rank
from trl_jax.run.rollouts.writer import PolicyWriter
from trl_jax.run.state import RunState
from trl_jax.run.step.forward import Forward


def rollout_steps(
    run: RunState, parts: RolloutParts, forward: Forward, sharded_step: ShardedStep | None
) -> RolloutSteps:
    """The source of a run's steps."""
    cycle, args = run.task.cycle, run.args
    streams, line = [TorchGenerator(args.seed + rank) for rank in range(run.shards)], ProgressLine(run.events)
    alone = several() and (parts.rollout_func is not None or exact_draws(args.compute_dtype))
    writer = PolicyWriter(run, parts, streams[own_rank(run.shards) if alone else 0], line, alone)
    writer = RankWriter(writer, streams) if alone else writer
    environments = None if parts.sampling.tools is None else parts.sampling.tools.environments
    logps = CompletionLogps(run, forward, sharded_step)
    rollout = Rollout(
        writer,
        None if parts.rewards is None else _judge(run, parts.rewards, logps, line),
        frozenset({*parts.sampling.ends, run.processing_class.pad_token_id}),
        parts.drops_truncated,
        lambda tokens: _seen(run, tokens),
        parts.table if is_first() else None,
        line,
        **({} if environments is None else {"begin": environments.begin}),
    )
    sampler = partial(_sampler, run, parts.shuffle)
    return RolloutSteps(
        rollout, cycle, lambda index: row_of(run, run.train_dataset, index), sampler(), StepMaker(run), streams,
        parts.bonus, run.task.logps, sampler,
    )  # fmt: skip


def _judge(run: RunState, rewards: Rewards, logps: CompletionLogps, line: ProgressLine) -> Judge:
    if several():  # processes compute together, in one order
        return Judge(run.task, RankRewards(rewards), logps, at_once, line)
    return Judge(run.task, rewards, logps, in_a_thread, line)


def _sampler(run: RunState, shuffle: bool) -> Sampler:
    dataset, cycle, seed = run.train_dataset, run.task.cycle, run.args.seed
    sizes = {"chunk": cycle.prompts, "repeats": cycle.repeats}
    if isinstance(dataset, IterableDataset):
        return StreamSampler(dataset.shuffle(seed=seed) if shuffle else dataset, **sizes)
    return RepeatSampler(len(dataset), shuffle=shuffle, seed=seed, **sizes)


def in_a_thread(do: Callable[[], Any]) -> Callable[[], Any]:
    """Begin a call in a thread of its own; the function that is returned waits for it, and raises what it raised."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="trl_jax-logps")
    future = pool.submit(do)
    pool.shutdown(wait=False)
    return future.result


def at_once(do: Callable[[], Any]) -> Callable[[], Any]:
    """Do the call, and return a function that gives what it gave."""
    found = do()
    return lambda: found


def row_of(run: RunState, dataset: Dataset | IterableDataset, index: Any) -> dict[str, Any]:
    """A row with all that completions are judged by, or its prompt alone with `remove_unused_columns`.

    Args:
        index: of the row; of a stream, the row itself.
    """
    row = index if isinstance(dataset, IterableDataset) else dataset[int(index)]
    return {"prompt": row["prompt"]} if run.args.remove_unused_columns else row


def _seen(run: RunState, tokens: int) -> int:
    run.state.num_input_tokens_seen += tokens
    return run.state.num_input_tokens_seen


class CommonNumbers:
    """The numbers that all completions of a step have alike."""

    def __init__(self, run: RunState):
        self._task, self._at_reference = run.task, AtReference(run)

    def __call__(self, coef: float | None) -> dict[str, float]:
        """`coef` is the coefficient of the entropy bonus; None without one."""
        numbers = {} if coef is None else {"entropy_coef": coef}
        if self._task.diverges_in_loss:
            numbers["at_reference"] = float(self._at_reference())
        return numbers


class StepMaker:
    """Micro-batches of completions -> the arrays of a step."""

    def __init__(self, run: RunState):
        self._run, self._layout = run, data.step_layout(run, training=True)
        self._numbers = CommonNumbers(run)

    def __call__(
        self, parts: list[list[Completed]], generations: list[Experience], number: int, coef: float | None
    ) -> StepBatch:
        task, layout = self._run.task, self._layout
        part = len(parts) / task.cycle.parts
        numbers = self._numbers(coef)
        groups = step_examples(task, parts, generations, part, layout.shards, numbers, self._run.virtual)
        return layout.step([[IndexedExample(example, 0) for example in group] for group in groups], number)
