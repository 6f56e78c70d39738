"""The rows of a run that writes them itself, made up: all completions are as long as they may be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from datasets import Dataset

from trl_jax.dryrun.generation import Size
from trl_jax.hub.pretrained import PreTrainedModel
from trl_jax.rollout.judge import Logps
from trl_jax.rollout.source import RolloutSteps
from trl_jax.rollout.written import Ids, Written, all_written
from trl_jax.run.arguments.base_config import BaseConfig
from trl_jax.run.state import RunState
from trl_jax.trainer.base_trainer import BaseTrainer

TOKEN = 0  # that completions are made of


class LongestWriter:
    """Gives every prompt completions of `tokens` tokens.

    Attributes:
        longest: tokens of the longest prompt so far.
    """

    def __init__(self, ids_of: Any, tokens: int):
        self._ids_of, self._tokens, self.longest = ids_of, tokens, 0

    def write(self, prompts: list, group: int) -> Written:
        del group
        ids = self._ids_of(prompts)
        self.longest = max(self.longest, *map(len, ids))
        completions = [np.full(self._tokens, TOKEN, np.int32) for _ in ids]
        return Written(ids, completions, all_written(completions))

    def completions(self, prompts: list, prompt_ids: Ids, completion_ids: Ids) -> list:
        del prompt_ids, completion_ids
        return prompts


def further_arguments(args: BaseConfig, teacher: PreTrainedModel | None) -> dict[str, Any]:
    """The trainer's teacher, or its reward functions, as many as there are weights of them; each gives 0."""
    if "reward_weights" not in vars(args):
        return {"teacher_model": teacher}

    def nothing(completions: list, **columns: Any) -> list[float]:
        del columns
        return [0.0] * len(completions)

    return {"reward_funcs": [nothing] * len(args.reward_weights or (1.0,))}


def longest_prompts(args: BaseConfig, count: int) -> Dataset:
    """So many prompts, which `with_longest_completions` takes for texts of `args.max_prompt_length` tokens that begin
    differently.

    Raises:
        ValueError: nothing bounds prompts.
    """
    if args.max_prompt_length is None:
        raise ValueError(
            "max_prompt_length=None bounds no prompt: pass --max_prompt_length, or --dataset_name for real lengths."
        )
    return Dataset.from_dict({"prompt": list(map(str, range(count)))})


def with_longest_completions(trainer: BaseTrainer, *, made_up: bool) -> LongestWriter:
    """Have a trainer's rollout take made-up completions, of no reward, in the place of the policy's.

    Args:
        made_up: whether prompts are those of `longest_prompts`.

    Returns:
        The writer that the rollout has now.
    """
    run = trainer.parts.run
    source, args = run.rollout, run.args
    ids_of = partial(_longest_ids, args.max_prompt_length) if made_up else source.rollout.writer.prompt_ids
    writer = LongestWriter(ids_of, most_new_tokens(run))
    judge = None if source.rollout.judge is None else replace(source.rollout.judge, logps=_no_logps)
    source.rollout = replace(source.rollout, writer=writer, judge=judge, table=None)
    return writer


def most_new_tokens(run: RunState) -> int:
    """Tokens of the longest completion."""
    return (run.args.generation_kwargs or {}).get("max_new_tokens") or run.args.max_completion_length


def sizes(run: RunState, *, evaluates: bool) -> list[Size]:
    """The generation of training and, where there is one, that of an evaluation's batch."""
    task, prompt_length = run.task, run.virtual.count + run.rollout.rollout.writer.longest
    groups = [(task.cycle.prompts, task.num_generations)]
    if evaluates:
        group = task.num_generations_eval
        groups.append((run.args.per_device_eval_batch_size * run.shards // group, group))
    return [Size.of(prompts, group, prompt_length, most_new_tokens(run)) for prompts, group in groups]


def begun(source: RolloutSteps) -> RolloutSteps:
    """The steps of the first epoch."""
    source.begin()
    source.set_epoch(0)
    return source


def _longest_ids(length: int, prompts: list[str]) -> list[list[int]]:
    return [[int(prompt)] * length for prompt in prompts]


def _no_logps(model: str, prompts: Ids, completions: Ids, completion_mask: Sequence[np.ndarray]) -> Logps:
    return [np.zeros(len(own), np.float32) for own in completions]
