"""A run that makes its rows itself: the rollout, of the run's model, tokenizer and task, and judges of completions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np
from datasets import Dataset, IterableDataset

from trl_jax.core.printable import brief
from trl_jax.core.torch_random import TorchGenerator
from trl_jax.data.layout.batch import Batch
from trl_jax.data.rows import prompts as rows
from trl_jax.data.step_layout import IndexedExample, StepBatch
from trl_jax.engine.devices.processes import is_first, several
from trl_jax.engine.devices.spmd import ShardedStep
from trl_jax.hub.generating.complete import complete, exact_draws
from trl_jax.mesh.arrays import fetched
from trl_jax.rollout.completions.log import CompletionsLog
from trl_jax.rollout.entropy import EntropyBonus
from trl_jax.rollout.examples import example_of, step_examples
from trl_jax.rollout.experience import Completed, Experience
from trl_jax.rollout.rollout import Ids, Logps, Rewards, Rollout
from trl_jax.rollout.rollout_func import written_by
from trl_jax.rollout.sampler import RepeatSampler, Sampler, StreamSampler
from trl_jax.rollout.source import RolloutSteps
from trl_jax.rollout.tools import Tools
from trl_jax.rollout.written import Written, all_written
from trl_jax.run import data
from trl_jax.run.model.at_reference import AtReference
from trl_jax.run.progress_line import GenerationProgress, ProgressLine
from trl_jax.run.rank_rollouts import RankRewards, RankWriter, local_copy, own_rank
from trl_jax.run.state import RunState
from trl_jax.run.step.forward import Forward


@dataclass(frozen=True)
class Sampling:
    """How the policy completes prompts.

    template_options: further arguments of the chat template. max_prompt_length: the last tokens of a prompt that stay;
    None: all. options: fields of a GenerationConfig, of which eos_token_id, or each of these, ends a completion.
    parses_messages: completions of conversations are parsed where the tokenizer knows how. tools: which the model may
    call; None: there are none.
    """

    template_options: dict[str, Any]
    max_prompt_length: int | None
    options: dict[str, Any]
    parses_messages: bool
    tools: Tools | None = None

    @property
    def ends(self) -> list[int]:
        """The ids that end a completion."""
        ids = self.options["eos_token_id"]
        return [ids] if isinstance(ids, int) else list(ids)


@dataclass(frozen=True)
class RolloutParts:
    """The part of a rollout that its trainer decides.

    shuffle: whether prompts come in another order each epoch.
    bonus: the coefficient of the entropy bonus; None without one.
    rollout_func: prompts -> completions, as `written_by` takes it; None: the policy completes them.
    """

    sampling: Sampling
    rewards: Rewards
    drops_truncated: bool
    shuffle: bool
    bonus: EntropyBonus | None
    table: CompletionsLog | None
    rollout_func: Callable[[list], Mapping[str, Any]] | None = None


def rollout_steps(
    run: RunState, parts: RolloutParts, forward: Forward, sharded_step: ShardedStep | None
) -> RolloutSteps:
    """The source of a run's steps."""
    cycle, args = run.task.cycle, run.args
    streams, line = [TorchGenerator(args.seed + rank) for rank in range(run.shards)], ProgressLine(run.events)
    alone = several() and (parts.rollout_func is not None or exact_draws(args.compute_dtype))
    writer = PolicyWriter(run, parts, streams[own_rank(run.shards) if alone else 0], line, alone)
    writer = RankWriter(writer, streams) if alone else writer
    rewards = RankRewards(parts.rewards) if several() else parts.rewards
    environments = None if parts.sampling.tools is None else parts.sampling.tools.environments
    rollout = Rollout(
        run.task,
        writer,
        rewards,
        CompletionLogps(run, forward, sharded_step),
        frozenset({*parts.sampling.ends, run.processing_class.pad_token_id}),
        parts.drops_truncated,
        lambda tokens: _seen(run, tokens),
        at_once if several() else in_a_thread,  # processes compute together, in one order
        parts.table if is_first() else None,
        line,
        **({} if environments is None else {"begin": environments.begin}),
    )
    sampler = partial(_sampler, run, parts.shuffle)
    return RolloutSteps(
        rollout, cycle, lambda index: row_of(run, run.train_dataset, index), sampler(), StepMaker(run), streams,
        parts.bonus, sampler,
    )  # fmt: skip


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


class PolicyWriter:
    """Completes prompts with the run's model as it is; the random numbers are those of `stream`. A `rollout_func` of
    the script's does it in its place.

    Args:
        alone: whether this process completes prompts of its own, on one device, and not those of all with the others.
    """

    def __init__(self, run: RunState, parts: RolloutParts, stream: TorchGenerator, line: ProgressLine, alone: bool):
        self._run, self._sampling, self._stream, self._line = run, parts.sampling, stream, line
        self._alone = alone
        self._rollout_func = parts.rollout_func

    def write(self, prompts: list, group: int) -> Written:
        if self._rollout_func is not None:
            return written_by(self._rollout_func, prompts)
        tools = self._sampling.tools
        if tools is not None and not rows.is_messages(prompts[0]):
            raise ValueError(
                f"tools= answer in messages, and a prompt is the text {brief(prompts[0])}. Make prompts of messages, "
                'as in [{"role": "user", "content": "..."}].'
            )
        ids = self.prompt_ids(prompts)
        alike = all(own == ids[place - place % group] for place, own in enumerate(ids))  # not of every environment
        completions = self.complete(ids, group if alike else 1)
        if tools is not None:
            return tools.completed(ids, completions, partial(self.complete, group=1))
        return Written(ids, completions, all_written(completions))

    def prompt_ids(self, prompts: list) -> list[list[int]]:
        sampling = self._sampling
        own = None if sampling.tools is None else sampling.tools.of_each
        if own is None:
            return self._rendered(prompts, sampling.template_options)
        tools = [list(functions.values()) or None for functions in own]
        each = zip(prompts, tools, strict=True)
        return [self._rendered([prompt], sampling.template_options | {"tools": some})[0] for prompt, some in each]

    def _rendered(self, prompts: list, template_options: dict[str, Any]) -> list[list[int]]:
        options = {"template_options": template_options, "max_prompt_length": self._sampling.max_prompt_length}
        return rows.prompt_ids(prompts, self._run.processing_class, **options)

    def complete(self, prompt_ids: Ids, group: int) -> list[np.ndarray]:
        run, options = self._run, self._sampling.options
        how = {"group": group, "stream": self._stream, "dtype": run.args.compute_dtype, "logps": False}
        how["head_dtype"] = "float32" if run.args.cast_lm_head_to_fp32 else None
        how["progress"] = GenerationProgress(self._line, len(prompt_ids))
        with run.on_device():
            model = local_copy(run.model, jax.numpy.asarray) if self._alone else run.model
            out = complete(model, prompt_ids[::group], options, **how)
        return [tokens[:length] for tokens, length in zip(out.tokens, out.lengths, strict=True)]

    def completions(self, prompts: list, prompt_ids: Ids, completion_ids: Ids) -> list:
        known = prompt_ids if self._sampling.parses_messages else None
        return rows.completion_texts(prompts, completion_ids, self._run.processing_class, known)


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


class CompletionLogps:
    """Log-probabilities of completions' tokens under the policy or the reference, in passes as those of a step."""

    def __init__(self, run: RunState, forward: Forward, sharded_step: ShardedStep | None):
        self._run = run
        functions = {"policy": forward.of_policy, "reference": forward.of_reference}
        self._of = {name: _compiled(of_pass, sharded_step) for name, of_pass in functions.items()}

    def __call__(self, model: str, prompts: Ids, completions: Ids, completion_mask: Sequence[np.ndarray]) -> Logps:
        run = self._run
        layout = replace(data.step_layout(run, training=True), accumulation=1)
        virtual = run.virtual if model == "policy" else run.reference.backend.virtual
        rows = zip(prompts, completions, completion_mask, strict=True)
        examples = [example_of(*row).behind(virtual, predicted=False) for row in rows]
        found = [np.zeros(len(own), np.float32) for own in completions]
        with run.on_device():
            for start in range(0, len(examples), layout.batch_size):
                part = list(enumerate(examples))[start : start + layout.batch_size]
                step = layout.step([[IndexedExample(example, number) for number, example in part]], 0)
                logps = fetched(self._of[model](run.arrays, data.placed_pass(run, step.arrays)))
                for number, (own,) in step.of_reads(logps.reshape(step.arrays.reads.shape)).items():
                    found[number][completion_mask[number]] = own
        return found


def _compiled(of_pass: Callable, sharded_step: ShardedStep | None) -> Callable:
    """(arrays, batch of one pass) -> log-probabilities of its reads, `[shards, N]`."""

    def first(arrays: dict, batch: Batch) -> jax.Array:
        return of_pass(arrays, jax.tree.map(lambda leaf: leaf[0], batch))["logps"]

    if sharded_step is not None:
        return jax.jit(sharded_step.scores(first))
    return jax.jit(lambda arrays, batch: first(arrays, batch)[None])
