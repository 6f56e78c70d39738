"""Reward functions as a script passes them: functions, names and models, one or several."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trl_jax.rollout.rewards.functions import RewardFunctions, callable_name, numbered
from trl_jax.rollout.rewards.models import RewardModel, is_model, reward_model


def reward_functions(
    reward_funcs: Any,
    processing_classes: Any = None,
    *,
    weights: Sequence[float] | None = None,
    trainer_state: Callable[[], Any],
    timeout: float | None = None,
    metrics_of_run: tuple[str, ...] = (),
    **models: Any,
) -> RewardFunctions:
    """One call of all reward functions.

    Args:
        reward_funcs: a function, asynchronous or not, an object that can be called, a reward model by name, folder or
            object; or a list of these, which stays as it is.
        processing_classes: the tokenizers of the models among them, as a list with None for functions; None loads each
            model's own.
        weights: their number is compared.
        trainer_state, timeout, metrics_of_run: as in `RewardFunctions`.
        models: options of `reward_model`.

    Raises:
        ValueError: there is no function, or as many weights or tokenizers as functions were wanted.
        TypeError: one is neither function nor model.
    """
    given = _listed(reward_funcs)
    if not given:
        raise ValueError(
            "No reward source provided. Pass `reward_funcs`, or an `environment_factory` whose environment defines a "
            "`get_reward` method."
        )
    if weights is not None and len(weights) != len(given):
        raise ValueError(
            f"Number of reward weights ({len(weights)}) must match number of reward functions ({len(given)})"
        )
    tokenizers = [None] * len(given) if processing_classes is None else _listed(processing_classes)
    if len(tokenizers) != len(given):
        raise ValueError(
            f"The number of reward processing classes ({len(tokenizers)}) must match the number of reward functions "
            f"({len(given)})."
        )
    made = [_made(function, tokenizer, models) for function, tokenizer in zip(given, tokenizers, strict=True)]
    names = [function.name if isinstance(function, RewardModel) else callable_name(function) for function in made]
    own = reward_funcs if isinstance(reward_funcs, list) else None
    return RewardFunctions(numbered(names), made, trainer_state, timeout, own, metrics_of_run)


def _listed(value: Any) -> list:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def _made(function: Any, tokenizer: Any, options: Mapping[str, Any]) -> Callable[..., Any] | RewardModel:
    if is_model(function):
        return reward_model(function, tokenizer, **options)
    if not callable(function):
        raise TypeError(
            f"reward_funcs holds a {type(function).__name__}: wanted functions, or reward models by name or object."
        )
    return function
