"""The base of trainers that learn from completions which the policy writes itself: GRPO and RLOO."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import jax

from trl_jax.engine.devices import processes
from trl_jax.hub.generating.complete import check_generates
from trl_jax.hub.peft.backend import AdaptedBackend
from trl_jax.hub.pretrained import PreTrainedModel
from trl_jax.rollout.completions.log import CompletionsLog, trackers
from trl_jax.rollout.completions.repo import CompletionsRepo
from trl_jax.rollout.entropy import EntropyBonus
from trl_jax.rollout.environments import Environments
from trl_jax.rollout.rewards.arguments import reward_functions
from trl_jax.rollout.tools import Tools
from trl_jax.run import construction
from trl_jax.run.model import loading as model_loading
from trl_jax.run.model.reference import ReferenceModel, Sync, check_sync, given, initial_policy
from trl_jax.run.model.routers import balance_experts
from trl_jax.run.rollouts.parts import RolloutParts, Sampling
from trl_jax.run.state import RunState
from trl_jax.tasks.policy import Cycle
from trl_jax.trainer.shared.policy_attributes import PolicyAttributes
from trl_jax.trainer.shared.refusals import NEVER_CALLED_WITH_ROLLOUT, ONCE_CALLED_WITH_ROLLOUT


class TrainerWithRollout(PolicyAttributes):
    """A trainer whose rows are prompts, and which judges what the policy makes of them by reward functions.

    Attributes:
        reward_func_names: the reward functions' names in metrics.
    """

    def __init__(
        self,
        model: Any,
        reward_funcs: Any,
        reward_processing_classes: Any,
        *,
        peft_config: Any,
        environments: Environments | None = None,
        **arguments: Any,
    ):
        """
        Args:
            environments: that completions act in, of which some judge themselves; None: there are none.
            arguments: those of `BaseTrainer`.
        """
        functions = () if reward_funcs is None else reward_funcs
        self.reward_funcs = list(functions) if isinstance(functions, list | tuple) else [functions]
        self._reward_processing_classes, self._fresh_adapter = reward_processing_classes, peft_config is not None
        self._environments, self._own_rewards = environments, [] if environments is None else environments.rewards
        self.reward_funcs += self._own_rewards
        if isinstance(reward_processing_classes, list | tuple):
            self._reward_processing_classes = [*reward_processing_classes, *(None for _ in self._own_rewards)]
        made = {"reference": self._attach_reference, "rollout": self._rollout}
        super().__init__(model, peft_config=peft_config, **made, **arguments)
        balance_experts(self._run, self.args.router_aux_loss_coef)

    _tokenizer_sides = {"padding_side": "left", "truncation_side": "left"}  # as TRL loads and saves it
    _given_reference: Any = None  # RLOOTrainer(ref_policy=...)
    _writes_completions: ClassVar[bool] = True
    _parses_messages: ClassVar[bool] = True
    _never_called, _once_called = NEVER_CALLED_WITH_ROLLOUT, ONCE_CALLED_WITH_ROLLOUT

    @property
    def ref_model(self) -> PreTrainedModel | None:
        """The reference as it is now; None where beta is 0, and of an adapter: it is the model under it."""
        model, reference = self._run.model, self._run.reference
        if reference is None or (self._given_reference is None and isinstance(model.backend, AdaptedBackend)):
            return None
        return reference.as_model(model)

    def get_train_dataloader(self) -> Any:
        """Raises TypeError: there is none."""
        raise TypeError(
            f"get_train_dataloader() of {type(self).__name__}: batches are made of the completions that the model "
            "writes as it trains, so none is there beforehand. The prompts are trainer.train_dataset; what was written "
            "is in the tables of log_completions=True."
        )

    def _attach_reference(self, run: RunState) -> None:
        args = run.args
        if not args.beta:
            if args.sync_ref_model:
                raise ValueError(
                    "You passed `sync_ref_model=True` while `beta=0.0`, which means the reference model is not used "
                    "during training: there is nothing to synchronize. Please set `sync_ref_model=False`, or set "
                    "`beta` to a non-zero value."
                )
            return
        reference = self._reference(run)
        if args.sync_ref_model:
            check_sync(run.model)
            sync = Sync(args.ref_model_mixup_alpha, args.ref_model_sync_steps)
            reference = reference.following(sync, run.model.arrays)
        construction.attach_reference(run, reference)

    def _reference(self, run: RunState) -> ReferenceModel:
        if self._given_reference is None:
            return initial_policy(run.model, fresh_adapter=self._fresh_adapter)
        as_bits = run.sharding_plan is None and not run.args.sync_ref_model
        return given(model_loading.load_reference(self._given_reference, run.args), run.vocab_size, as_bits=as_bits)

    def _rollout(self, run: RunState) -> RolloutParts:
        args = run.args
        _check_processes(type(self).__name__, run.shards)
        rollout_func = self._rollout_func()
        if rollout_func is None:
            check_generates(run.model)
        rewards = reward_functions(
            self.reward_funcs, self._reward_processing_classes, weights=self._reward_weights(),
            trainer_state=lambda: run.state, timeout=args.reward_timeout, template_options=args.chat_template_kwargs,
            model_init_kwargs=args.model_init_kwargs, trust_remote_code=args.trust_remote_code, seed=args.seed,
        )  # fmt: skip
        self.reward_func_names, self.reward_processing_classes = list(rewards.names), rewards.tokenizers
        tools, template_options = self._tools(run)
        parses = self._parses_messages
        sampling = Sampling(template_options, args.max_prompt_length, _options(run), parses, tools)
        table = self._table(rewards.names) if args.log_completions else None
        return RolloutParts(
            sampling, rewards, args.mask_truncated_completions, args.shuffle_dataset, self._bonus(), table,
            rollout_func,
        )  # fmt: skip

    def _table(self, names: Sequence[str]) -> CompletionsLog:
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
        return None, run.args.chat_template_kwargs or {}

    def _rollout_func(self) -> Callable[[list], Mapping[str, Any]] | None:
        """The script's own way from prompts to completions, where it has one."""
        return None

    def _reward_weights(self) -> tuple[float, ...] | None:
        """Those of the arguments; environments that judge themselves weigh 1."""
        given = self.args.reward_weights
        return None if given is None else (*given, *(1.0 for _ in self._own_rewards))

    def _of_any_policy(self) -> dict[str, Any]:
        """The fields of a task that GRPO and RLOO share."""
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
            "beta": args.beta,
            "reward_weights": self._reward_weights(),
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
    ids = {"eos_token_id": _eos_token_ids(run), "pad_token_id": words.pad_token_id, "bos_token_id": words.bos_token_id}
    options |= {"max_new_tokens": args.max_completion_length, "do_sample": True} | ids
    options |= args.generation_kwargs or {}
    return options if options["eos_token_id"] is not None else options | {"eos_token_id": ids["eos_token_id"]}
