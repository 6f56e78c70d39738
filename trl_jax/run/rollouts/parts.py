"""The parts of a rollout that its trainer decides."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from trl_jax.rollout.completions.log import CompletionsLog
from trl_jax.rollout.entropy import EntropyBonus
from trl_jax.rollout.judge import Rewards
from trl_jax.rollout.tools import Tools


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

    rewards: the reward functions; None: completions are not judged.
    shuffle: whether prompts come in another order each epoch.
    bonus: the coefficient of the entropy bonus; None without one.
    rollout_func: prompts -> completions, as `written_by` takes it; None: the policy completes them.
    """

    sampling: Sampling
    rewards: Rewards | None
    drops_truncated: bool
    shuffle: bool
    bonus: EntropyBonus | None
    table: CompletionsLog | None
    rollout_func: Callable[[list], Mapping[str, Any]] | None = None
