"""The base of trainers that learn from the rewards of completions which the policy writes itself: GRPO and RLOO."""

from __future__ import annotations

from typing import Any

from datasets import Dataset, IterableDataset

from trl_jax.data.rows.checks import argument
from trl_jax.rollout.environments import Environments
from trl_jax.rollout.rewards.arguments import reward_functions
from trl_jax.rollout.rewards.functions import RewardFunctions, check_columns
from trl_jax.run.state import RunState
from trl_jax.trainer.shared.held_reference import HeldReference
from trl_jax.trainer.shared.policy_attributes import PolicyAttributes
from trl_jax.trainer.shared.refusals import NEVER_CALLED_WITH_REWARDS, ONCE_CALLED_WITH_REWARDS


class TrainerWithRewards(HeldReference, PolicyAttributes):
    """A trainer that judges completions by reward functions, and holds the policy near a reference if it is to.

    Attributes:
        reward_func_names: the reward functions' names in metrics.
    """

    _never_called, _once_called = NEVER_CALLED_WITH_REWARDS, ONCE_CALLED_WITH_REWARDS

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
        super().__init__(model, peft_config=peft_config, **arguments)

    def prepare_dataset(self, dataset: Any, name: str, *, bounded: bool = True) -> Dataset | IterableDataset:
        prepared = super().prepare_dataset(dataset, name, bounded=bounded)
        if not self.args.remove_unused_columns:
            columns = prepared.column_names or next(iter(prepared.take(1)), {})
            more = () if self._environments is None else ("environments",)
            check_columns(columns, f"{argument(name)} has the column", *more)
        return prepared

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
        self._hold_reference(run)

    def _rewards(self, run: RunState) -> RewardFunctions:
        args = run.args
        rewards = reward_functions(
            self.reward_funcs, self._reward_processing_classes, weights=self._reward_weights(),
            trainer_state=lambda: run.state, timeout=args.reward_timeout, template_options=args.chat_template_kwargs,
            model_init_kwargs=args.model_init_kwargs, trust_remote_code=args.trust_remote_code, seed=args.seed,
            metrics_of_run=("kl",) if args.beta else (),
        )  # fmt: skip
        self.reward_func_names, self.reward_processing_classes = list(rewards.names), rewards.tokenizers
        return rewards

    def _reward_weights(self) -> tuple[float, ...] | None:
        """Those of the arguments; environments that judge themselves weigh 1."""
        given = self.args.reward_weights
        return None if given is None else (*given, *(1.0 for _ in self._own_rewards))

    def _of_any_policy(self) -> dict[str, Any]:
        """The fields of a task that GRPO and RLOO share."""
        return self._of_any_rollout() | {"beta": self.args.beta, "reward_weights": self._reward_weights()}
