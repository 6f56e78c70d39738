"""The base of trainers that learn from completions which the model writes itself."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import jax

from trl_jax.engine.devices import processes
from trl_jax.hub.generating.complete import check_generates
from trl_jax.rollout.completions.log import CompletionsLog, trackers
from trl_jax.rollout.completions.repo import CompletionsRepo
from trl_jax.rollout.entropy import EntropyBonus
from trl_jax.rollout.environments import Environments
from trl_jax.rollout.judge import Rewards
from trl_jax.rollout.rewards.functions import reward_columns
from trl_jax.rollout.tools import Tools
from trl_jax.run.model.routers import balance_experts
from trl_jax.run.rollouts.parts import RolloutParts, Sampling
from trl_jax.run.state import RunState
from trl_jax.tasks.rollout import Cycle
from trl_jax.trainer.shared.rollout_attributes import RolloutAttributes
from trl_jax.trainer.shared.tools import tools_of


class TrainerWithRollout(RolloutAttributes):
    """A trainer whose rows are prompts, and which learns from what the model makes of them.

    Attributes:
        tools: functions that the model may call in its completions.
    """

    tools: Sequence[Callable] = ()
    _environments: Environments | None = None
    _tokenizer_sides = {"padding_side": "left", "truncation_side": "left"}  # as TRL loads and saves it
    _writes_completions: ClassVar[bool] = True
    _parses_messages: ClassVar[bool] = True

    def __init__(self, model: Any, **arguments: Any):
        """`arguments` are those of `BaseTrainer`."""
        super().__init__(model, reference=self._attach_reference, rollout=self._rollout, **arguments)

    def _balance_experts(self) -> None:
        balance_experts(self._run, self.args.router_aux_loss_coef)

    def get_train_dataloader(self) -> Any:
        """Raises TypeError: there is none."""
        raise TypeError(
            f"get_train_dataloader() of {type(self).__name__}: batches are made of the completions that the model "
            "writes as it trains, so none is there beforehand. The prompts are trainer.train_dataset; what was written "
            "is in the tables of log_completions=True."
        )

    @abc.abstractmethod
    def _attach_reference(self, run: RunState) -> None:
        """Give the run the model that its own is compared with, if there is one."""

    def _rewards(self, run: RunState) -> Rewards | None:
        """The reward functions; None where completions are learned from alike."""
        return None

    def _rollout(self, run: RunState) -> RolloutParts:
        args = run.args
        _check_processes(type(self).__name__, run.shards)
        rollout_func = self._rollout_func()
        if rollout_func is None:
            check_generates(run.model)
        rewards, (tools, template_options) = self._rewards(run), self._tools(run)
        parses = self._parses_messages
        sampling = Sampling(template_options, args.max_prompt_length, _options(run), parses, tools)
        columns = None if rewards is None else reward_columns(rewards.names)
        table = self._table(columns) if args.log_completions else None
        return RolloutParts(
            sampling, rewards, args.mask_truncated_completions, args.shuffle_dataset, self._bonus(), table,
            rollout_func,
        )  # fmt: skip

    def _table(self, names: Sequence[str] | None) -> CompletionsLog:
        args = self.args
        return CompletionsLog(
            names, args.generation_batch_size, args.num_completions_to_print, args.log_unique_prompts,
            Path(args.output_dir) / "completions" if self._writes_completions else None, trackers(args.report_to or ()),
            self._completions_repo(),
        )  # fmt: skip

    def _completions_repo(self) -> CompletionsRepo | None:
        """The dataset on the Hub that gets the tables; None without one."""
        return None

    def _bonus(self) -> EntropyBonus | None:
        """The coefficient of the entropy bonus, where the loss has one."""
        return None

    def _tools(self, run: RunState) -> tuple[Tools | None, dict[str, Any]]:
        """The tools that the model may call, and the further arguments of the chat template of prompts."""
        args = run.args
        if not self.tools and self._environments is None:
            return None, args.chat_template_kwargs or {}
        if self._environments is not None:
            self._environments.check(run.train_dataset, "train_dataset")
        return tools_of(
            self.tools, self._environments, run.processing_class, args.chat_template_kwargs or {},
            most_turns=args.max_tool_calling_iterations, longest=args.max_completion_length,
            positions=getattr(run.model.config.get_text_config(), "max_position_embeddings", None),
            vocab_size=run.vocab_size,
        )  # fmt: skip

    def _rollout_func(self) -> Callable[[list], Mapping[str, Any]] | None:
        """The script's own way from prompts to completions, where it has one."""
        return None

    def _of_any_rollout(self) -> dict[str, Any]:
        """The fields of a task that all of these trainers share."""
        args = self.args
        cycle = Cycle(
            group=args.num_generations,
            prompts=args.generation_batch_size // args.num_generations,
            parts=args.steps_per_generation,
            iterations=args.num_iterations,
            accumulation=args.gradient_accumulation_steps,
        )
        return {
            "num_generations": args.num_generations,
            "num_generations_eval": args.num_generations_eval or args.num_generations,
            "temperature": args.temperature,
            "cycle": cycle,
        }


def _check_processes(trainer: str, shards: int) -> None:
    """Raise ValueError where processes would not have prompts of their own."""
    count = jax.process_count() if processes.several() else 1
    if shards % count:
        raise ValueError(
            f"{trainer} divides its prompts over {shards} devices (data x fsdp of the mesh), and this run has {count} "
            f"processes: wanted a multiple of {count}, so that each has prompts of its own. Set mesh_shape, as in "
            f"mesh_shape='fsdp:{count}'."
        )


def _eos_token_ids(run: RunState) -> list[int]:
    """The model's ids that end a text, the tokenizer's before them if it is none of these."""
    own, found = run.processing_class.eos_token_id, run.model.generation_config.eos_token_id
    ids = [found] if isinstance(found, int) else list(found or ())
    return ids if own in ids or own is None else [own, *ids]


def _options(run: RunState) -> dict[str, Any]:
    """The fields of the GenerationConfig that completions are sampled with."""
    args, words = run.args, run.processing_class
    options = {name: vars(args)[name] for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}
    options["top_k"] = 0 if args.top_k == -1 else args.top_k
    ids = {"eos_token_id": _eos_token_ids(run), "pad_token_id": words.pad_token_id, "bos_token_id": words.bos_token_id}
    options |= {"max_new_tokens": args.max_completion_length, "do_sample": True} | ids
    options |= args.generation_kwargs or {}
    return options if options["eos_token_id"] is not None else options | {"eos_token_id": ids["eos_token_id"]}
