"""Completions by a function of the script's own, TRL's `rollout_func`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from trl_jax.core.printable import brief
from trl_jax.data.rows.checks import token_ids
from trl_jax.rollout.rewards.functions import check_columns
from trl_jax.rollout.written import Written, all_written

_REQUIRED = ("prompt_ids", "completion_ids", "logprobs")


def written_by(function: Callable[[list], Mapping[str, Any]], prompts: list, vocab_size: int) -> Written:
    """The completions that a function returns for these prompts, of which those that are alike stand side by side.

    Args:
        function: gives, for each prompt, `prompt_ids` and `completion_ids`, lists of token ids, and `logprobs`, whose
            values change nothing: the policy's own are computed where the loss wants them. `env_mask` has 0 for tokens
            of a completion that are not the model's. All else goes to the reward functions.
        vocab_size: rows of the model's embedding.

    Raises:
        TypeError: it returns something other than a dict.
        ValueError: a key is missing or has the name of something that reward functions get from the trainer, a list has
            the wrong length, or a value is not a token id or not 0 or 1.
    """
    output = function(copy.deepcopy(prompts))
    if not isinstance(output, Mapping):
        raise TypeError(f"rollout_func returned {brief(output)}, wanted a dict with {', '.join(_REQUIRED)}.")
    if missing := sorted(set(_REQUIRED) - output.keys()):
        raise ValueError(f"rollout_func must return keys {missing} in its output dict.")
    ids, completions = (_ids(name, output[name], prompts, vocab_size) for name in _REQUIRED[:2])
    columns = {name: values for name, values in output.items() if name not in (*_REQUIRED, "env_mask")}
    check_columns(columns, "rollout_func returned the key")
    masks = output.get("env_mask")
    if masks is None:
        return Written(ids, completions, all_written(completions), columns)
    return Written(ids, completions, _masks(masks, completions), columns)


def _ids(name: str, texts: Any, prompts: list, vocab_size: int) -> list[np.ndarray]:
    """The texts that were returned under this key, int32 `[tokens]` each."""
    found = _listed(name, texts)
    if len(found) != len(prompts):
        raise ValueError(
            f"rollout_func was given {len(prompts)} prompts and returned {len(found)} {name}: one for each prompt is "
            "wanted. A prompt is given as often as it is to be completed."
        )
    return [token_ids(own, vocab_size, f"rollout_func's {name}[{number}]") for number, own in enumerate(found)]


def _masks(masks: Any, completions: Sequence[np.ndarray]) -> list[np.ndarray]:
    """`env_mask` as bool `[tokens]` of each completion."""
    found = _listed("env_mask", masks)
    if [len(_listed(f"env_mask[{number}]", own)) for number, own in enumerate(found)] != list(map(len, completions)):
        raise ValueError("rollout_func returned an env_mask that has not one number for each token of completion_ids.")
    for number, own in enumerate(found):
        if bad := [value for value in own if isinstance(value, str | bytes) or value not in (0, 1)]:
            raise ValueError(f"rollout_func's env_mask[{number}] has {brief(bad[0])}, wanted 0 or 1 for each token.")
    return [np.asarray(own).astype(bool) for own in found]


def _listed(name: str, values: Any) -> list:
    if isinstance(values, str | bytes | Mapping):
        raise ValueError(f"rollout_func returned {brief(values)} as {name}, wanted a list.")
    try:
        return list(values)
    except TypeError as error:
        raise ValueError(f"rollout_func returned {brief(values)} as {name}, wanted a list.") from error
