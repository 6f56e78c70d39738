"""Environments that completions act in by calling their methods. TRL's `environment_factory` of GRPO."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trl_jax.rollout.coroutines import raised_by

Row = dict[str, Any]
_OWN = ("reset", "get_reward")  # which a model does not call


class Environments:
    """An environment for each completion of a generation; they are used again, reset, for the next one.

    current: those of the rows that were begun last, in their order.
    """

    def __init__(self, given: Callable[[], Any] | Mapping[str, Callable[[], Any]]):
        """`given` makes one; of several, by the names that the rows' column `environment` has.

        Raises:
            ValueError: an environment cannot be reset.
        """
        self._several = isinstance(given, Mapping)
        self._factories = dict(given) if isinstance(given, Mapping) else {None: given}
        self._made = {name: [factory()] for name, factory in self._factories.items()}
        self.current: list[Any] = []
        for [instance] in self._made.values():
            if not inspect.isfunction(getattr(type(instance), "reset", None)):
                raise ValueError(
                    "Each environment instance returned by `environment_factory` must define a callable `reset`."
                )

    @property
    def probes(self) -> list[Any]:
        """One of each kind."""
        return [made[0] for made in self._made.values()]

    @property
    def rewards(self) -> list[Callable]:
        """A reward function for each class that judges itself."""
        kinds = dict.fromkeys(type(probe) for probe in self.probes)
        return [_reward_of(kind) for kind in kinds if inspect.isfunction(getattr(kind, "get_reward", None))]

    def begin(self, rows: Sequence[Row]) -> list[Row]:
        """The rows with an environment each, in the column `environments`, which has been reset by the row; what it
        then tells stands behind the prompt's last message.

        Raises:
            ValueError: there is no environment of a row's name.
        """
        self.current, taken = [], dict.fromkeys(self._factories, 0)
        for row in rows:
            name = row.get("environment") if self._several else None
            if name not in self._factories:
                raise ValueError(
                    f"Example has `environment={name!r}`, which is not among the environments passed to "
                    f"`environment_factory`. Expected one of: {list(self._factories)}."
                )
            made = self._made[name]
            if taken[name] == len(made):
                made.append(self._factories[name]())
            self.current.append(made[taken[name]])
            taken[name] += 1
        return [self._reset(*pair) for pair in zip(rows, self.current, strict=True)]

    def _reset(self, row: Row, environment: Any) -> Row:
        columns = {name: row[name] for name in row if name != "environment" or not self._several}
        with raised_by(f"reset() of the environment {type(environment).__name__!r}", [row["prompt"]]):
            told = environment.reset(**columns)
        if told is not None:
            row = row | {"prompt": _with_observation(row["prompt"], told)}
        return row | {"environments": environment}


def methods_of(environment: Any) -> list[Callable]:
    """Those that a model may call."""
    names = [name for name, _ in inspect.getmembers(type(environment), inspect.isfunction)]
    return [getattr(environment, name) for name in names if name not in _OWN and not name.startswith("_")]


def _with_observation(prompt: list[dict], told: Any) -> list[dict]:
    """A text is added to a text, and blocks of content to blocks."""
    content = prompt[-1]["content"]
    if isinstance(told, list) and isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if isinstance(told, str) and isinstance(content, list):
        told = [{"type": "text", "text": told}]
    return [*prompt[:-1], {**prompt[-1], "content": content + told}]


def _reward_of(kind: type) -> Callable:
    """The reward of environments of this class, under its name; others are not judged by it."""

    async def later(environments: Sequence[Any], **columns: Any) -> list:
        return [await own.get_reward() if type(own) is kind else None for own in environments]

    def at_once(environments: Sequence[Any], **columns: Any) -> list:
        return [own.get_reward() if type(own) is kind else None for own in environments]

    reward = later if inspect.iscoroutinefunction(kind.get_reward) else at_once
    reward.__name__ = kind.__name__
    return reward
