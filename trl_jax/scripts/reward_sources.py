"""The flags that name reward functions and a reward model, and what they name."""

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

from trl_jax import rewards
from trl_jax.scripts.utils import ScriptArguments

EXAMPLE = "--reward_funcs my_rewards.brevity"  # of --help
_FUNCTIONS: dict[str, Callable] = {
    "accuracy_reward": rewards.accuracy_reward,
    "reasoning_accuracy_reward": rewards.reasoning_accuracy_reward,
    "think_format_reward": rewards.think_format_reward,
    "get_soft_overlong_punishment": rewards.get_soft_overlong_punishment(1280, 256),
}


@dataclass
class RewardSources(ScriptArguments):
    """The data of a script and the rewards of completions: TRL's fields, defaults and order."""

    reward_model_name_or_path: str | None = field(
        default=None, metadata={"help": "Folder or Hub name of a reward model; it comes before the functions."}
    )
    reward_funcs: list[str] | None = field(
        default=None,
        metadata={
            "help": f"Reward functions: any of {', '.join(_FUNCTIONS)} (of at most 1,280 tokens, the last 256 of them "
            "punished more and more), or the dotted path of a function, as in my_rewards.brevity; the current folder "
            "is looked in."
        },
    )


def reward_sources(args: RewardSources) -> list[str | Callable]:
    """The name of the reward model, if any, and the functions.

    Raises:
        ValueError: there is neither, or a name is that of no function.
    """
    model = args.reward_model_name_or_path
    found = [*([model] if model else []), *(_function(name) for name in args.reward_funcs or ())]
    if not found:
        raise ValueError(
            "No reward source provided: name functions by --reward_funcs, a reward model by "
            "--reward_model_name_or_path, or both."
        )
    return found


def _function(name: str) -> Callable:
    if name in _FUNCTIONS:
        return _FUNCTIONS[name]
    module, _, attribute = name.rpartition(".")
    if not module:
        raise ValueError(
            f"Could not load reward function {name!r}. Expected one of {list(_FUNCTIONS)} or a valid import path, as "
            "in my_rewards.brevity."
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    names = vars(importlib.import_module(module))
    if not callable(names.get(attribute)):
        raise ValueError(f"Could not load reward function {name!r}: the module {module} has no function {attribute}.")
    return names[attribute]
