"""Reward functions: how they are named, called, and what is made of what they return."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence, Set, Sized
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from trl_jax.core.arguments.values import show
from trl_jax.core.secrets import scrubbed
from trl_jax.rollout.coroutines import EventLoop, TookTooLong, is_async, raised_by, unwrapped
from trl_jax.rollout.rewards.models import RewardModel, is_model

logger = logging.getLogger(__name__)

_OWN = ("prompt", "completion", "completion_ids")  # columns that functions are given under other names
_OF_TRAINER = ("trainer_state", "log_extra", "log_metric")


@dataclass
class RewardFunctions:
    """Reward functions and reward models, as one call.

    A function is called as `f(prompts=, completions=, completion_ids=, **columns, trainer_state=, log_extra=,
    log_metric=)` with lists, and returns a number or None for each completion. None, which is NaN here, says that it
    does not apply.

    Attributes:
        names: of metrics and of columns of the completions' table.
        functions: in the order of the names.
        trainer_state: gives the state that functions are handed.
        timeout: seconds that asynchronous functions may take; None: any.
        given: the script's own list of them, into which it may put other functions at any time, as in TRL; None: it
            keeps none.
    """

    names: list[str]
    functions: list[Callable[..., Any] | RewardModel]
    trainer_state: Callable[[], Any]
    timeout: float | None = None
    given: list[Any] | None = None
    _taken: list[Any] = field(init=False)
    _loop: EventLoop = field(default_factory=EventLoop)
    _columns: dict[str, list] = field(default_factory=lambda: defaultdict(list))
    _numbers: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    _completions: int = 0

    def __call__(
        self, rows: Sequence[Mapping[str, Any]], prompts: list, completions: list, completion_ids: list[list[int]]
    ) -> np.ndarray:
        """The reward of each completion by each function, float32 `[B, F]`, NaN where one does not apply.

        Synchronous functions are called one after another, then the asynchronous ones together. Each gets lists of its
        own, which it may change.

        Args:
            rows: of the dataset, one a completion; their columns but prompt, completion and completion_ids are passed
                on.
            prompts: texts or messages, one a completion.
            completions: texts, or lists of messages.

        Raises:
            ValueError, TypeError: a function returned something else than a finite reward or None for each completion.
            TimeoutError: an asynchronous function took longer than `timeout`.
            Exception: whatever a function raises, with a note that names it and the first prompt.
        """
        self._follow()
        self._columns.clear()
        self._numbers.clear()
        columns = {name: [row[name] for row in rows] for name in rows[0] if name not in _OWN}
        given = {"prompts": prompts, "completions": completions, "completion_ids": completion_ids, **columns}
        helpers = {"trainer_state": self.trainer_state(), "log_extra": self._log_extra, "log_metric": self._log_metric}
        rewards = np.full((len(prompts), len(self.functions)), np.nan, np.float32)
        later = []
        for number, function in enumerate(self.functions):
            if isinstance(function, RewardModel):
                with raised_by(f"the reward function {self.names[number]!r}", prompts):
                    rewards[:, number] = _finite_scores(self.names[number], function(prompts, completions))
            elif is_async(function):
                later.append(number)
            else:
                with raised_by(f"the reward function {self.names[number]!r}", prompts):
                    found = function(**_copied(given), **helpers)
                    rewards[:, number] = _checked(self.names[number], found, len(prompts))
        if later:
            rewards[:, later] = np.stack(self._all_awaited(later, given, helpers), axis=1)
        _warn_of_none(rewards, given)
        self._completions = len(prompts)
        return rewards

    def __post_init__(self):
        self._taken = list(self.given or ())

    def _follow(self) -> None:
        """Take over functions that were put into the script's list since the last call."""
        given = self._taken if self.given is None else self.given
        if len(given) != len(self._taken):
            raise ValueError(
                f"reward_funcs has {len(given)} functions now, and had {len(self._taken)} when the trainer was made: "
                "others may take their places, but their number stays. Make a trainer with these."
            )
        for number, (now, then) in enumerate(zip(given, self._taken, strict=True)):
            if now is then:
                continue
            if is_model(now) or not callable(now):
                raise TypeError(
                    f"reward_funcs[{number}] is a {type(now).__name__} now: wanted a function. Reward models are "
                    "loaded when a trainer is made."
                )
            self.functions[number] = self._taken[number] = now

    @property
    def tokenizers(self) -> list[Any]:
        """Those of reward models; None for functions."""
        return [one.tokenizer if isinstance(one, RewardModel) else None for one in self.functions]

    def sums(self) -> dict[str, tuple[float, int]]:
        """The sums of the numbers that functions gave to `log_metric` in the last call, and how many, by name."""
        return {name: (float(np.sum(values, dtype=np.float32)), len(values)) for name, values in self._numbers.items()}

    def metrics(self) -> dict[str, float]:
        """The means of these numbers, sorted by name."""
        return {name: total / count for name, (total, count) in sorted(self.sums().items())}

    def extra(self) -> dict[str, list]:
        """The columns that functions gave to `log_extra` in the last call, sorted by name.

        Raises:
            ValueError: one has not a value for each completion.
        """
        self._check_columns(self._completions)
        return {name: list(values) for name, values in sorted(self._columns.items())}

    def _log_extra(self, column: str, values: list) -> None:
        self._columns[column].extend(values)

    def _log_metric(self, name: str, value: float) -> None:
        try:
            self._numbers[name].append(float(value))
        except (TypeError, ValueError) as error:
            raise TypeError(f"log_metric({name!r}, value) got {show('value', value)}: wanted a number.") from error

    def _check_columns(self, completions: int) -> None:
        for name, values in self._columns.items():
            if len(values) != completions:
                raise ValueError(
                    f"log_extra({name!r}, values) got {len(values)} values for {completions} completions: wanted one "
                    "for each. Call it once, with a list as long as completions."
                )

    def _all_awaited(self, numbers: list[int], given: dict[str, Any], helpers: dict[str, Any]) -> list[np.ndarray]:
        try:
            return self._loop.run([self._awaited(number, given, helpers) for number in numbers], self.timeout)
        except TookTooLong as error:
            name = self.names[numbers[error.number]]
            way = "have the function return None in time"
            if error.blocks:
                way = (
                    "let the function wait with await: it blocks the event loop, so that no other function runs. "
                    "asyncio.to_thread(function, ...) awaits one that cannot"
                )
            with raised_by(f"the reward function {name!r}", given["prompts"]):
                raise TimeoutError(
                    f"The reward function {name!r} took longer than reward_timeout={self.timeout:g} seconds. Raise it, "
                    f"or {way}."
                ) from error

    async def _awaited(self, number: int, given: dict[str, Any], helpers: dict[str, Any]) -> np.ndarray:
        name, prompts = self.names[number], given["prompts"]
        with raised_by(f"the reward function {name!r}", prompts):
            found = await self.functions[number](**_copied(given), **helpers)
            return _checked(name, found, len(prompts))


def callable_name(function: Callable) -> str:
    """TRL's name of a reward function: its own, that of the function in a partial, or that of its class."""
    function = unwrapped(function)
    try:
        return function.__name__
    except AttributeError:
        return type(function).__name__


def numbered(names: Sequence[str]) -> list[str]:
    """The names, each different: a second "f" is "f_2"."""
    found: list[str] = []
    for name in names:
        number, own = 1, name
        while own in found:
            number += 1
            own = f"{name}_{number}"
        found.append(own)
    return found


def _checked(name: str, found: Any, completions: int) -> np.ndarray:
    """Rewards as a function returned them, float32 `[B]`, NaN for None."""
    wrong = TypeError(
        f"The reward function {name!r} returned {show('rewards', found)}: wanted a list of {completions} rewards, "
        "numbers or None."
    )
    if isinstance(found, Mapping | Set | str | bytes):  # which have no order, or are no numbers
        raise wrong
    try:
        rewards = iter(found)
    except TypeError as error:
        raise wrong from error
    values = list(islice(rewards, completions + 1))  # a generator may have no end
    if len(values) != completions:
        count = len(found) if isinstance(found, Sized) else len(values)
        more = "more than " if count > completions and not isinstance(found, Sized) else ""
        raise ValueError(
            f"The reward function '{name}' returned {more}{completions if more else count} rewards, but {completions} "
            "were expected (one per prompt-completion pair). Make sure the reward function returns exactly one reward "
            "per completion."
        )
    try:
        numbers = [_number(value) for value in values]
    except (TypeError, ValueError, OverflowError) as error:
        raise TypeError(
            f"The reward function {name!r} returned {show('rewards', values)}: wanted numbers or None."
        ) from error
    with np.errstate(over="ignore"):
        array = np.asarray(numbers, np.float32)
    if (bad := np.flatnonzero(np.isinf(array))).size:
        raise ValueError(
            f"The reward function {name!r} returned {numbers[bad[0]]} for completion {bad[0]}: wanted a finite number "
            "of float32, or None where it does not apply."
        )
    return array


def _finite_scores(name: str, scores: np.ndarray) -> np.ndarray:
    """A reward model's, `[B]`. Of a function NaN says that it does not apply; a model has no such case."""
    bad = np.flatnonzero(~np.isfinite(scores))
    if bad.size:
        raise ValueError(
            f"The reward model {name!r} gave completion {bad[0]} the score {scores[bad[0]]}: wanted a finite number. "
            "Its weights are at fault, or too large for their dtype."
        )
    return scores


def _number(value: Any) -> float:
    if isinstance(value, (str, bytes)):  # also one that spells a number
        raise TypeError("a text")
    return np.nan if value is None else float(value)


def _copied(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a function in lists and dicts of its own; what these hold else, as environments, is shared."""
    copies: dict[int, Any] = {}  # by id: a tool's answer may contain itself

    def copy(value: Any) -> Any:
        if type(value) not in (list, dict):
            return value
        if id(value) not in copies:
            own = copies[id(value)] = type(value)()
            if isinstance(value, list):
                own.extend(map(copy, value))
            else:
                own.update((key, copy(entry)) for key, entry in value.items())
        return copies[id(value)]

    return {name: copy(value) for name, value in given.items()}


def _warn_of_none(rewards: np.ndarray, given: Mapping[str, Any]) -> None:
    none = np.flatnonzero(np.isnan(rewards).all(axis=1))
    if not len(none):
        return
    apart = (*_OF_TRAINER, "prompts", "completions")
    row = {name: values[none[0]] for name, values in given.items() if name not in apart}
    row |= {"prompt": given["prompts"][none[0]], "completion": given["completions"][none[0]]}
    logger.warning(
        f"All reward functions returned None for the following kwargs:\n{scrubbed(str(row))}\n"
        "Please ensure that at least one reward function returns a valid reward."
    )
