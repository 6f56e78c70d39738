"""Call reward functions and reward models on completions."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import logging
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence, Set, Sized
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from trl_jax.config.rules import show
from trl_jax.core.secrets import scrubbed
from trl_jax.core.text import brief
from trl_jax.data.chat import is_messages, load_tokenizer, rendered
from trl_jax.hub.auto import find_checkpoint
from trl_jax.hub.config import naming_argument
from trl_jax.hub.pretrained import PreTrainedModel
from trl_jax.hub.torch_bridge import as_arrays
from trl_jax.hub.torch_objects import as_checkpoint, is_torch_model

logger = logging.getLogger(__name__)

HELPERS = ("trainer_state", "log_extra", "log_metric")  # arguments that the trainer adds, as in TRL


def reward_functions(
    reward_funcs: Any,
    processing_classes: Any = None,
    *,
    weights: Sequence[float] | None = None,
    trainer_state: Callable[[], Any],
    timeout: float | None = None,
    metrics_of_run: tuple[str, ...] = (),
    columns: Collection[str] | None = None,
    helpers: Sequence[str] = HELPERS,
    **models: Any,
) -> RewardFunctions:
    """Combine the user's `reward_funcs` into one callable.

    Args:
        reward_funcs: a sync or async function, a callable object, a reward model (name, folder or object), or a list
            of these. The list is not modified.
        processing_classes: the tokenizers of the reward models, as a list with None for functions. None loads each
            model's own tokenizer.
        weights: one per function; None: 1.0 each.
        trainer_state, timeout, metrics_of_run, helpers: see `RewardFunctions`.
        columns: columns of the rows, which are passed to functions by name; None if they are not known beforehand.
        models: options for `reward_model`.

    Raises:
        ValueError: there is no reward function, or the number of weights or tokenizers does not match.
        TypeError: an entry is neither a function nor a model, or a function does not take the arguments that it would
            be called with.
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
    for function in made:
        if not isinstance(function, RewardModel):
            check_signature(function, columns, helpers)
    names = [function.name if isinstance(function, RewardModel) else callable_name(function) for function in made]
    own = reward_funcs if isinstance(reward_funcs, list) else None
    weights = np.ones(len(made), np.float32) if weights is None else np.asarray(weights, np.float32)
    return RewardFunctions(numbered(names), made, weights, trainer_state, timeout, own, metrics_of_run, helpers=helpers)


def _listed(value: Any) -> list:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def _made(function: Any, tokenizer: Any, options: Mapping[str, Any]) -> Callable[..., Any] | RewardModel:
    if is_model(function):
        return reward_model(function, tokenizer, **options)
    if not callable(function):
        raise TypeError(
            f"reward_funcs must be functions, or reward models by name or object, got a {type(function).__name__}."
        )
    return function


def check_signature(
    function: Callable, columns: Collection[str] | None = None, helpers: Sequence[str] = HELPERS
) -> None:
    """Raise TypeError for a reward function that does not take the arguments that it would be called with.

    Args:
        columns: columns of the rows, which are passed by name; None if they are not known.
        helpers: see `RewardFunctions`.
    """
    try:
        signature = inspect.signature(function, follow_wrapped=False)  # a wrapper may take more than what it wraps
    except (TypeError, ValueError):  # callables implemented in C may have no signature
        return
    parameters, always = signature.parameters.values(), ("prompts", "completions", "completion_ids", *helpers)
    named = [one for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    found = f"The reward function {callable_name(function)}{signature}"
    given = ", ".join(("prompts", "completions", "completion_ids", "the columns of the dataset", *helpers))
    wanted = (
        f"Reward functions are called by name, with {given}: write def {callable_name(function)}(prompts, completions, "
        "**kwargs)."
    )
    if positional := [one for one in parameters if one.kind is one.POSITIONAL_ONLY and one.default is one.empty]:
        raise TypeError(f"{found} takes {positional[0].name} by position only. {wanted}")
    needed = [one.name for one in named if one.default is one.empty and one.name not in always]
    passed = needed if columns is None else [name for name in columns if name not in _OWN]
    if missing := [name for name in needed if name not in passed]:
        raise TypeError(
            f"{found} needs {', '.join(missing)}, and train_dataset has no such column; functions get its columns "
            f"{', '.join(passed) or 'other than prompt, of which there are none'}. {wanted}"
        )
    open_ended = any(one.kind is one.VAR_KEYWORD for one in parameters)
    if not open_ended and (refused := [name for name in (*always, *passed) if name not in signature.parameters]):
        raise TypeError(f"{found} does not take {', '.join(refused)}. {wanted}")


# Calling user functions


def unwrapped(function: Callable) -> Callable:
    """The innermost function of a functools.partial; any other function unchanged."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def is_async(function: Callable) -> bool:
    """Whether calling it returns a coroutine: an async function, a partial of one, or an object with async __call__."""
    function = unwrapped(function)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


@contextlib.contextmanager
def raised_by(who: str, prompts: list) -> Iterator[None]:
    """Add a note to any exception that names the user function that raised it and the first of its prompts."""
    count, first = len(prompts), prompts[0]  # the function may clear the list
    try:
        yield
    except Exception as error:
        error.add_note(
            f"Raised by {who} for {count} completions, the first with {scrubbed(show('prompt', first))}. "
            "To resume from the last checkpoint, call train(resume_from_checkpoint=True)."
        )
        raise


_GRACE = 1.0  # seconds that a cancelled coroutine may take before it is abandoned


class TookTooLong(Exception):
    """A coroutine did not finish in time.

    number: its index among the coroutines.
    blocks: whether it blocked the event loop and therefore could not be cancelled.
    """

    def __init__(self, number: int, *, blocks: bool):
        super().__init__(number, blocks)
        self.number, self.blocks = number, blocks


class EventLoop:
    """An event loop in a background thread, started by the first call.

    All calls share it, so that functions can keep connections open between calls.
    """

    def __init__(self):
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self, coroutines: Sequence[Coroutine[Any, Any, Any]], timeout: float | None = None) -> list[Any]:
        """Run coroutines concurrently and return their results in order.

        If one raises, the others are cancelled and its exception is re-raised.

        Args:
            timeout: seconds for all of them; None means no limit.

        Raises:
            TookTooLong: one did not finish in time, whether or not it could be cancelled.
        """
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="rewards", daemon=True).start()
        loop, tasks = self._loop, []
        future = asyncio.run_coroutine_threadsafe(_together(coroutines, timeout, tasks), loop)
        try:
            return future.result(None if timeout is None else timeout + 2 * _GRACE)
        except TimeoutError as error:
            if future.done():
                raise  # raised by a user function
            blocking = asyncio.current_task(loop)
            late = [number for number, task in enumerate(tasks) if task is blocking or not task.done()]
            number = tasks.index(blocking) if blocking in tasks else min(late, default=0)
            self._loop = None  # its thread is stuck; the next call starts a new one
            raise TookTooLong(number, blocks=blocking is not None) from error
        except BaseException:
            future.cancel()  # this thread was interrupted
            raise


async def _together(
    coroutines: Sequence[Coroutine[Any, Any, Any]], timeout: float | None, tasks: list[asyncio.Task]
) -> list[Any]:
    """Run the coroutines; append a task for each to `tasks`."""
    tasks += [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        done, late = await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks:
            task.cancel()
        ended, _ = await asyncio.wait(tasks, timeout=_GRACE)
        errors = {task: task.exception() for task in ended if not task.cancelled()}
    for task in tasks:
        if task in done and errors.get(task) is not None:
            raise errors[task]
    if late:
        raise TookTooLong(min(map(tasks.index, late)), blocks=False)
    return [task.result() for task in tasks]


# Reward functions

_OWN = ("prompt", "completion", "completion_ids")  # dataset columns that are not passed to functions
_GIVEN = ("prompts", "completions", *HELPERS)  # arguments that the trainer passes in addition to the columns
_TABLE = ("step", "prompt", "completion", "advantage")  # columns of the completions table
_METRICS = (
    "loss", "grad_norm", "learning_rate", "epoch", "step", "num_tokens", "step_time", "reward", "reward_std",
    "frac_reward_zero_std", "entropy", "entropy_coef", "policy_loss", "aux_loss", "runtime", "samples_per_second",
    "steps_per_second", "tools/call_frequency", "tools/failure_frequency", "completions/clipped_ratio",
    *(f"completions/{kind}_{what}" for kind in ("mean", "min", "max") for what in ("length", "terminated_length")),
    *(f"clip_ratio/{name}" for name in ("low_mean", "low_min", "high_mean", "high_max", "region_mean")),
    "cispo_clip_ratio", "vespo/phi_seq_mean",
)  # fmt: skip


@dataclass
class RewardFunctions:
    """Reward functions and reward models, as one callable.

    A function is called with lists, as `f(prompts=, completions=, completion_ids=, **columns, trainer_state=,
    log_extra=, log_metric=)`, and returns a number or None per completion. None (here NaN) means that the function does
    not apply to this completion.

    Attributes:
        names: names in metrics and in the completions table. A script may replace entries at any time.
        functions: in the order of `names`.
        weights: float32 `[F]`, or a script's own array or tensor. A script may change its values at any time.
        trainer_state: returns the trainer state that is passed to functions.
        timeout: seconds that async functions may take; None means no limit.
        given: the user's own list of functions, whose entries may be replaced at any time, as in TRL; None if the user
            did not pass a list.
        metrics_of_run: metrics that the trainer logs in this run in addition to `_METRICS`.
        own: a user-defined `_calculate_rewards`, with the signature of `calculated`, or None.
        helpers: those of `HELPERS` that are passed to functions.
    """

    names: list[str]
    functions: list[Callable[..., Any] | RewardModel]
    weights: Any
    trainer_state: Callable[[], Any]
    timeout: float | None = None
    given: list[Any] | None = None
    metrics_of_run: tuple[str, ...] = ()
    own: Callable[..., Any] | None = None
    helpers: Sequence[str] = HELPERS
    _taken: list[Any] = field(init=False)
    _loop: EventLoop = field(default_factory=EventLoop)
    _columns: dict[str, list] = field(default_factory=lambda: defaultdict(list))
    _numbers: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    _completions: int = 0
    _left_out: set[str] = field(default_factory=set)  # columns of log_extra that were warned about
    _renamed: set[str] = field(default_factory=set)

    def set_weights(self, weights: Any) -> None:
        """Raises TypeError or ValueError if there is not one weight per function."""
        self._check_count("reward_weights", "weight", weights)
        self.weights = np.asarray(weights, np.float32) if isinstance(weights, list | tuple) else weights

    def set_names(self, names: Sequence[str]) -> None:
        """Raises TypeError or ValueError if there is not one name per function."""
        self._check_count("reward_func_names", "name", names)
        self.names = list(names)

    def _check_count(self, attribute: str, what: str, found: Any) -> None:
        wrong = TypeError(f"{attribute} must be a sequence with one {what} per reward function, got {found!r}.")
        if isinstance(found, str):
            raise wrong
        try:
            count = len(found)
        except TypeError as error:  # None, a number, or an array or tensor without axes
            raise wrong from error
        if count != len(self.functions):
            raise ValueError(
                f"Number of reward {what}s ({count}) must match number of reward functions ({len(self.functions)})"
            )

    @property
    def current_weights(self) -> np.ndarray:
        """The weights as they are now, float32 `[F]`."""
        return np.asarray(as_arrays(self.weights), np.float32)

    @property
    def columns(self) -> list[str]:
        """The columns of the completions table that have the rewards."""
        return reward_columns(self.names)

    @property
    def arrays(self) -> list[dict[str, Any]]:
        """The arrays of each reward model."""
        return [function.model.arrays for function in self.functions if isinstance(function, RewardModel)]

    def __call__(
        self, rows: Sequence[Mapping[str, Any]], prompts: list, completions: list, completion_ids: list[list[int]]
    ) -> np.ndarray:
        """Compute rewards, float32 `[B, F]`; NaN where a function does not apply. A user-defined `_calculate_rewards`
        may change the result of `calculated`.

        Raises:
            TypeError: the user-defined method did not return `[B, F]` numbers.
        """
        if self.own is None:
            return self.calculated(rows, prompts, completions, completion_ids)
        wanted = len(prompts), len(self.functions)
        with _refilled({"prompts": prompts, "completions": completions, "completion_ids": completion_ids}):
            found = np.asarray(as_arrays(self.own(rows, prompts, completions, completion_ids)), np.float32)
        if found.shape != wanted or np.isinf(found).any():
            raise TypeError(
                f"The trainer's own _calculate_rewards returned {'infinite ' * bool(np.isinf(found).any())}numbers "
                f"{list(found.shape)}; expected {list(wanted)}, a row for each completion and "
                "a column for each reward function."
            )
        return found

    def calculated(
        self, rows: Sequence[Mapping[str, Any]], prompts: list, completions: list, completion_ids: list[list[int]]
    ) -> np.ndarray:
        """Call the reward functions: float32 `[B, F]`, NaN where one does not apply.

        Sync functions run one after another, then the async ones concurrently. All get the same lists, as in TRL. The
        next functions and the completions table see what a function changes. Lists that it shortens are restored.

        Args:
            rows: dataset rows, one per completion; all columns except prompt, completion and completion_ids are passed
                on.
            prompts: texts or lists of messages, one per completion.
            completions: texts or lists of messages.

        Raises:
            ValueError, TypeError: a function did not return one finite reward or None per completion.
            TimeoutError: an async function took longer than `timeout`.
            Exception: whatever a function raises, with a note that names the function and the first prompt.
        """
        self._follow()
        self._columns.clear()
        self._numbers.clear()
        columns = {name: [row[name] for row in rows] for name in rows[0] if name not in _OWN}
        check_columns(columns, "A row has the column")
        given = {"prompts": prompts, "completions": completions, "completion_ids": completion_ids, **columns}
        every = {"trainer_state": self.trainer_state(), "log_extra": self._log_extra, "log_metric": self._log_metric}
        helpers = {name: every[name] for name in self.helpers}
        rewards = np.full((len(rows), len(self.functions)), np.nan, np.float32)
        later = []
        for number, function in enumerate(self.functions):
            if isinstance(function, RewardModel):
                with raised_by(f"the reward function {self.names[number]!r}", prompts):
                    rewards[:, number] = _finite_scores(self.names[number], function(prompts, completions))
            elif is_async(function):
                later.append(number)
            else:
                with raised_by(f"the reward function {self.names[number]!r}", prompts), _refilled(given):
                    found = function(**given, **helpers)
                    rewards[:, number] = _checked(self.names[number], found, len(rows))
        if later:
            with _refilled(given) as before:
                rewards[:, later] = np.stack(self._all_awaited(later, given, helpers, before["prompts"]), axis=1)
        _warn_of_none(rewards, given)
        self._completions = len(rows)
        return rewards

    def __post_init__(self):
        self._taken = list(self.given or ())

    def _follow(self) -> None:
        """Pick up functions that the user has replaced in their list since the last call."""
        given = self._taken if self.given is None else self.given
        if len(given) != len(self._taken):
            raise ValueError(
                f"reward_funcs now has {len(given)} functions, but had {len(self._taken)} when the trainer was built: "
                "functions may be replaced, but not added or removed. Create a new trainer with these functions."
            )
        for number, (now, then) in enumerate(zip(given, self._taken, strict=True)):
            if now is then:
                continue
            if is_model(now) or not callable(now):
                raise TypeError(
                    f"reward_funcs[{number}] must be replaced by a function, got a {type(now).__name__}. Reward models "
                    "can only be passed when the trainer is built."
                )
            self.functions[number] = self._taken[number] = now

    @property
    def tokenizers(self) -> list[Any]:
        """The tokenizer of each reward model; None for functions."""
        return [one.tokenizer if isinstance(one, RewardModel) else None for one in self.functions]

    def sums(self) -> dict[str, tuple[float, int]]:
        """(sum, count) of the values passed to `log_metric` in the last call, by name."""
        return {name: (float(np.sum(values, dtype=np.float32)), len(values)) for name, values in self._numbers.items()}

    def metrics(self) -> dict[str, float]:
        """The mean of the values passed to `log_metric` in the last call, sorted by name."""
        return {name: total / count for name, (total, count) in sorted(self.sums().items())}

    def extra(self) -> dict[str, list]:
        """The columns passed to `log_extra` in the last call, sorted by name.

        A column without exactly one value per completion is left out with a warning.
        """
        for name in [name for name, values in self._columns.items() if len(values) != self._completions]:
            found = len(self._columns.pop(name))
            if name not in self._left_out:
                self._left_out.add(name)
                logger.warning(
                    f"log_extra({name!r}, values) got {found} values for {self._completions} completions, so the "
                    "column is left out. Call it once, with one value per completion."
                )
        return {name: list(values) for name, values in sorted(self._columns.items(), key=lambda item: str(item[0]))}

    def _log_extra(self, column: str, values: list) -> None:
        taken = (*_TABLE, *reward_columns(self.names))
        self._columns[self._free(column, taken, f"log_extra({column!r}, ...)")].extend(values)

    def _log_metric(self, name: str, value: float) -> None:
        of_functions = (f"rewards/{function}/{kind}" for function in self.names for kind in ("mean", "std"))
        taken = (*_METRICS, *self.metrics_of_run, *of_functions)
        try:
            number = float(value)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"The value of log_metric({name!r}, value) must be a number, got {show('value', value)}."
            ) from error
        self._numbers[self._free(name, taken, f"log_metric({name!r}, ...)")].append(number)

    def _free(self, name: str, taken: Sequence[str], call: str) -> str:
        """The name, or name_2 if the trainer already logs that name; warns the first time."""
        if name not in taken:
            return name
        free = numbered([*taken, name])[-1]
        if call not in self._renamed:
            self._renamed.add(call)
            logger.warning(f"{call}: the trainer logs {name!r} itself, so this is logged as {free!r}.")
        return free

    def _all_awaited(
        self, numbers: list[int], given: dict[str, Any], helpers: dict[str, Any], prompts: list
    ) -> list[np.ndarray]:
        """Call the async functions with `given`; `prompts` is a list that they cannot change."""
        try:
            return self._loop.run([self._awaited(number, given, helpers, prompts) for number in numbers], self.timeout)
        except TookTooLong as error:
            name = self.names[numbers[error.number]]
            way = "make the function return None in time"
            if error.blocks:
                way = (
                    "use await for waiting inside the function: it blocks the event loop, so no other function can "
                    "run. Wrap blocking calls as await asyncio.to_thread(function, ...)"
                )
            with raised_by(f"the reward function {name!r}", prompts):
                raise TimeoutError(
                    f"The reward function {name!r} took longer than reward_timeout={self.timeout:g} seconds. Raise it, "
                    f"or {way}."
                ) from error

    async def _awaited(self, number: int, given: dict[str, Any], helpers: dict[str, Any], prompts: list) -> np.ndarray:
        name = self.names[number]
        with raised_by(f"the reward function {name!r}", prompts):
            found = await self.functions[number](**given, **helpers)
            return _checked(name, found, len(prompts))


def check_columns(names: Iterable[str], found: str, *more: str) -> None:
    """Raise ValueError if a column has the name of an argument that the trainer passes to reward functions.

    Args:
        found: start of the error, such as "train_dataset has the column".
        more: names of additional arguments.
    """
    given = (*_GIVEN, *more)
    if (name := next((name for name in names if name in given), None)) is not None:
        raise ValueError(
            f"{found} {name!r}, but the trainer itself passes {', '.join(given)} to reward functions, which would get "
            f"multiple values for keyword argument {name!r}. Rename it."
        )


def reward_columns(names: Sequence[str]) -> list[str]:
    """The names of the reward columns in the completions table, made distinct from its own columns."""
    return numbered([*_TABLE, *names])[len(_TABLE) :]


def callable_name(function: Callable) -> str:
    """TRL's name for a reward function: `__name__` (of a partial's innermost function), else its class name."""
    function = unwrapped(function)
    try:
        return function.__name__
    except AttributeError:
        return type(function).__name__


def numbered(names: Sequence[str]) -> list[str]:
    """Make names unique: a second "f" becomes "f_2"."""
    found: list[str] = []
    for name in names:
        number, own = 1, name
        while own in found:
            number += 1
            own = f"{name}_{number}"
        found.append(own)
    return found


def _checked(name: str, found: Any, completions: int) -> np.ndarray:
    """Check the rewards that a function returned, and convert them to float32 `[B]`, with NaN for None."""
    wrong = TypeError(
        f"The reward function {name!r} must return a list of {completions} rewards (numbers or None), got "
        f"{show('rewards', found)}."
    )
    if isinstance(found, Mapping | Set | str | bytes):  # iterable, but unordered or not numbers
        raise wrong
    try:
        rewards = iter(found)
    except TypeError as error:
        raise wrong from error
    values = list(islice(rewards, completions + 1))  # a generator may be infinite
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
            f"The rewards of the reward function {name!r} must be numbers or None, got {show('rewards', values)}."
        ) from error
    with np.errstate(over="ignore"):
        array = np.asarray(numbers, np.float32)
    if (bad := np.flatnonzero(np.isinf(array))).size:
        raise ValueError(
            f"The rewards of the reward function {name!r} must be finite in float32, or None where it does not apply, "
            f"got {numbers[bad[0]]} for completion {bad[0]}."
        )
    return array


def _finite_scores(name: str, scores: np.ndarray) -> np.ndarray:
    """Raise ValueError for NaN and infinity from a reward model; only functions may return NaN for "does not apply"."""
    bad = np.flatnonzero(~np.isfinite(scores))
    if bad.size:
        raise ValueError(
            f"The scores of the reward model {name!r} must be finite, got {scores[bad[0]]} for completion {bad[0]}. "
            "Its weights contain NaN or overflow their dtype."
        )
    return scores


def _number(value: Any) -> float:
    if isinstance(value, (str, bytes)):  # float() would accept "1.0"
        raise TypeError("a text")
    return np.nan if value is None else float(value)


@contextlib.contextmanager
def _refilled(given: Mapping[str, list]) -> Iterator[dict[str, list]]:
    """Restore lists whose length changes inside, as by `pop`; yields copies of all of them."""
    before = {name: list(values) for name, values in given.items()}
    try:
        yield before
    finally:
        for name, values in given.items():
            if len(values) != len(before[name]):
                values[:] = before[name]


def _warn_of_none(rewards: np.ndarray, given: Mapping[str, Any]) -> None:
    none = np.flatnonzero(np.isnan(rewards).all(axis=1))
    if not len(none):
        return
    apart = (*HELPERS, "prompts", "completions")
    row = {name: values[none[0]] for name, values in given.items() if name not in apart}
    row |= {"prompt": given["prompts"][none[0]], "completion": given["completions"][none[0]]}
    logger.warning(
        f"All reward functions returned None for the following kwargs:\n{scrubbed(str(row))}\n"
        "Please ensure that at least one reward function returns a valid reward."
    )


# Reward models

_ROWS = 32  # rows per forward pass


@dataclass
class RewardModel:
    """A model with a score head, which scores prompts with their completions.

    tokenizer: the model's own; its chat template renders conversations.
    template_options: extra arguments for that template.
    """

    model: PreTrainedModel
    tokenizer: Any
    template_options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The last part of the model's name or path."""
        return str(self.model.name_or_path).rstrip("/").rpartition("/")[2]

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any]) -> np.ndarray:
        """Score each prompt with its completion: float32 `[B]`."""
        whole = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
        if is_messages(prompts[0]):
            options = {**self.template_options, "tokenize": False}
            names = [f"The completion {brief(talk[-1:], 300)}" for talk in whole]
            whole = [rendered(self.tokenizer, *pair, **options) for pair in zip(whole, names, strict=True)]
        ids = self.tokenizer(text=whole, add_special_tokens=False)["input_ids"]
        return self.scores(ids)

    def scores(self, ids: list[list[int]]) -> np.ndarray:
        """Score tokenized texts: float32 `[B]`."""
        return np.concatenate([self._scores(ids[start : start + _ROWS]) for start in range(0, len(ids), _ROWS)])

    def _scores(self, ids: list[list[int]]) -> np.ndarray:
        lengths = np.asarray([len(own) for own in ids])
        mask = np.arange(lengths.max()) < lengths[:, None]
        tokens = np.full(mask.shape, self.tokenizer.pad_token_id, np.int64)
        tokens[mask] = np.concatenate([np.asarray(own, np.int64) for own in ids])
        return np.asarray(self.model(tokens, mask).logits[:, 0], np.float32)


def is_model(value: Any) -> bool:
    """Whether `value` is a reward model rather than a function: a name, a folder, or a trl_jax or torch model."""
    return isinstance(value, str | os.PathLike | PreTrainedModel) or is_torch_model(value)


def reward_model(
    model: Any,
    tokenizer: Any = None,
    *,
    template_options: Mapping[str, Any] | None = None,
    model_init_kwargs: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
    seed: int = 42,
) -> RewardModel:
    """Load a reward model that the user passed among `reward_funcs`.

    Args:
        model: a folder or Hub name, a trl_jax model such as `RewardTrainer.model`, or a transformers model.
        tokenizer: None loads the model's own. A missing pad token is set to the EOS token, as in TRL.
        model_init_kwargs: loading options for a model given by name; by default its weights keep the checkpoint's
            dtype.
        seed: for initializing the score head if the checkpoint has none.

    Raises:
        TypeError, ValueError: the model has no score head, or cannot be loaded.
    """
    options = {"trust_remote_code": True, **(model_init_kwargs or {})} if trust_remote_code else model_init_kwargs or {}
    revision = options.get("revision") if isinstance(model, str | os.PathLike) else None
    if is_torch_model(model):
        place, config = model.config._name_or_path, model.config
        _check_labels(config)
        with as_checkpoint(model, "score", dropout=False) as checkpoint:
            ours = checkpoint.load(seed)
    elif isinstance(model, PreTrainedModel):
        ours, place, config = model, model.name_or_path, model.config
    else:
        with naming_argument("reward_funcs"):
            ours = find_checkpoint(str(model), **options).load(seed)
        place, config = str(model), ours.config
    if ours.backend.head != "score":
        raise TypeError(
            f"reward_funcs contains the model {ours.name_or_path}, which has no score head: load it with "
            "trl_jax.AutoModelForSequenceClassification.from_pretrained, or pass its name."
        )
    if tokenizer is None:
        tokenizer = load_tokenizer(place, config, trust_remote_code=trust_remote_code, revision=revision)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    ours.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    return RewardModel(ours, tokenizer, dict(template_options or {}))


def _check_labels(config: Any) -> None:
    if config.num_labels != 1:
        labels = ", ".join(f"{number} {name!r}" for number, name in sorted(config.id2label.items()))
        raise ValueError(
            f"reward_funcs contains the model {config._name_or_path} with {config.num_labels} labels ({labels}), but a "
            "reward is a single number; TRL would use the score of the first label, whatever it means. Pass a function "
            "that returns the score you want, such as "
            "lambda completions, **columns: scores_of(completions)[:, 1].tolist()."
        )
