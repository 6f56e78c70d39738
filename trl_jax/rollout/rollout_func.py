"""Completions by a function of the script's own, TRL's `rollout_func`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from trl_jax.rollout.written import Written, all_written

_REQUIRED = ("prompt_ids", "completion_ids", "logprobs")


def written_by(function: Callable[[list], Mapping[str, Any]], prompts: list) -> Written:
    """The completions that a function returns for these prompts, of which those that are alike stand side by side.

    Args:
        function: gives, for each prompt, `prompt_ids` and `completion_ids`, lists of token ids, and `logprobs`, whose
            values change nothing: the policy's own are computed where the loss wants them. `env_mask` has 0 for tokens
            of a completion that are not the model's. All else goes to the reward functions.

    Raises:
        ValueError: a key is missing, or a list is not as long as it must be.
    """
    output = function(copy.deepcopy(prompts))
    if missing := sorted(set(_REQUIRED) - output.keys()):
        raise ValueError(f"rollout_func must return keys {missing} in its output dict.")
    ids, completions = ([np.asarray(own, np.int32) for own in output[name]] for name in _REQUIRED[:2])
    for name, found in (("prompt_ids", ids), ("completion_ids", completions)):
        _check(name, [len(own) for own in found], prompts)
    columns = {name: values for name, values in output.items() if name not in (*_REQUIRED, "env_mask")}
    masks = output.get("env_mask")
    if masks is None:
        return Written(ids, completions, all_written(completions), columns)
    by_model = [np.asarray(own, bool) for own in masks]
    if [len(own) for own in by_model] != [len(own) for own in completions]:
        raise ValueError("rollout_func returned an env_mask that has not one number for each token of completion_ids.")
    return Written(ids, completions, by_model, columns)


def _check(name: str, lengths: Sequence[int], prompts: list) -> None:
    if len(lengths) != len(prompts):
        raise ValueError(
            f"rollout_func was given {len(prompts)} prompts and returned {len(lengths)} {name}: one for each prompt is "
            "wanted. A prompt is given as often as it is to be completed."
        )
    if not all(lengths):
        raise ValueError(f"rollout_func returned no token in {name}[{list(lengths).index(0)}]; one at least is wanted.")
