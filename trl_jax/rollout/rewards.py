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
    sources = _as_list(reward_funcs)
    if not sources:
        raise ValueError(
            "No reward source provided. Pass `reward_funcs`, or an `environment_factory` whose environment defines a "
            "`get_reward` method."
        )
    if weights is not None and len(weights) != len(sources):
        raise ValueError(
            f"Number of reward weights ({len(weights)}) must match number of reward functions ({len(sources)})"
        )
    tokenizers = [None] * len(sources) if processing_classes is None else _as_list(processing_classes)
    if len(tokenizers) != len(sources):
        raise ValueError(
            f"The number of reward processing classes ({len(tokenizers)}) must match the number of reward functions "
            f"({len(sources)})."
        )
    functions = [_reward_function(*pair, models) for pair in zip(sources, tokenizers, strict=True)]
    for function in functions:
        if not isinstance(function, RewardModel):
            check_signature(function, columns, helpers)
    names = [function.name if isinstance(function, RewardModel) else callable_name(function) for function in functions]
    user_list = reward_funcs if isinstance(reward_funcs, list) else None
    weights = np.ones(len(functions), np.float32) if weights is None else np.asarray(weights, np.float32)
    return RewardFunctions(
        numbered(names), functions, weights, trainer_state, timeout, user_list, metrics_of_run, helpers=helpers
    )


def _as_list(value: Any) -> list:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def _reward_function(source: Any, tokenizer: Any, options: Mapping[str, Any]) -> Callable[..., Any] | RewardModel:
    if is_model(source):
        return reward_model(source, tokenizer, **options)
    if not callable(source):
        raise TypeError(
            f"reward_funcs must be functions, or reward models by name or object, got a {type(source).__name__}."
        )
    return source


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
    trainer_arguments = ("prompts", "completions", "completion_ids", *helpers)
    name = callable_name(function)
    described = f"The reward function {name}{signature}"
    arguments = ", ".join(("prompts", "completions", "completion_ids", "the columns of the dataset", *helpers))
    advice = f"Reward functions are called by name, with {arguments}: write def {name}(prompts, completions, **kwargs)."
    parameters = signature.parameters.values()
    mandatory = [parameter for parameter in parameters if parameter.default is parameter.empty]
    if positional := [parameter.name for parameter in mandatory if parameter.kind is parameter.POSITIONAL_ONLY]:
        raise TypeError(f"{described} takes {positional[0]} by position only. {advice}")
    keywords = [p.name for p in mandatory if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    needed_columns = [name for name in keywords if name not in trainer_arguments]
    passed_columns = needed_columns if columns is None else [name for name in columns if name not in _EXCLUDED_COLUMNS]
    if missing := [name for name in needed_columns if name not in passed_columns]:
        there = f"has the columns {', '.join(passed_columns)}" if passed_columns else "only has prompts"
        raise TypeError(f"{described} needs {', '.join(missing)}, and train_dataset {there}. {advice}")
    takes_any_keyword = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    unexpected = [name for name in (*trainer_arguments, *passed_columns) if name not in signature.parameters]
    if unexpected and not takes_any_keyword:
        raise TypeError(f"{described} does not take {', '.join(unexpected)}. {advice}")


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
def raised_by(source: str, prompts: list) -> Iterator[None]:
    """Add a note to any exception that names the user function that raised it and the first of its prompts."""
    count, first = len(prompts), prompts[0]  # the function may clear the list
    try:
        yield
    except Exception as error:
        error.add_note(
            f"Raised by {source} for {count} completions, the first with {scrubbed(show('prompt', first))}. "
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
            running_task = asyncio.current_task(loop)
            unfinished = [number for number, task in enumerate(tasks) if task is running_task or not task.done()]
            number = tasks.index(running_task) if running_task in tasks else min(unfinished, default=0)
            self._loop = None  # its thread is stuck; the next call starts a new one
            raise TookTooLong(number, blocks=running_task is not None) from error
        except BaseException:
            future.cancel()  # this thread was interrupted
            raise


async def _together(
    coroutines: Sequence[Coroutine[Any, Any, Any]], timeout: float | None, tasks: list[asyncio.Task]
) -> list[Any]:
    """Run the coroutines; append a task for each to `tasks`."""
    tasks += [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        done, unfinished = await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks:
            task.cancel()
        finished, _ = await asyncio.wait(tasks, timeout=_GRACE)
        errors = {task: task.exception() for task in finished if not task.cancelled()}
    for task in tasks:
        if task in done and errors.get(task) is not None:
            raise errors[task]
    if unfinished:
        raise TookTooLong(min(map(tasks.index, unfinished)), blocks=False)
    return [task.result() for task in tasks]


# Reward functions

_EXCLUDED_COLUMNS = ("prompt", "completion", "completion_ids")  # dataset columns that are not passed to functions
_RESERVED_ARGUMENTS = ("prompts", "completions", *HELPERS)  # that the trainer passes in addition to the columns
_TABLE_COLUMNS = ("step", "prompt", "completion", "advantage")  # columns of the completions table
_TRAINER_METRICS = (
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
        user_list: the user's list of functions, whose entries may be replaced at any time, as in TRL; None if the user
            did not pass a list.
        metrics_of_run: metrics that the trainer logs in this run in addition to `_TRAINER_METRICS`.
        override: a user-defined `_calculate_rewards`, with the signature of `calculate`, or None.
        helpers: those of `HELPERS` that are passed to functions.
    """

    names: list[str]
    functions: list[Callable[..., Any] | RewardModel]
    weights: Any
    trainer_state: Callable[[], Any]
    timeout: float | None = None
    user_list: list[Any] | None = None
    metrics_of_run: tuple[str, ...] = ()
    override: Callable[..., Any] | None = None
    helpers: Sequence[str] = HELPERS
    _last_user_list: list[Any] = field(init=False)
    _loop: EventLoop = field(default_factory=EventLoop)
    _columns: dict[str, list] = field(default_factory=lambda: defaultdict(list))
    _numbers: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    _completions: int = 0
    _skipped_columns: set[str] = field(default_factory=set)  # columns of log_extra that were warned about
    _renamed_calls: set[str] = field(default_factory=set)

    def set_weights(self, weights: Any) -> None:
        """Raises TypeError or ValueError if there is not one weight per function."""
        self._check_count("reward_weights", "weight", weights)
        self.weights = np.asarray(weights, np.float32) if isinstance(weights, list | tuple) else weights

    def set_names(self, names: Sequence[str]) -> None:
        """Raises TypeError or ValueError if there is not one name per function."""
        self._check_count("reward_func_names", "name", names)
        self.names = list(names)

    def _check_count(self, attribute: str, what: str, values: Any) -> None:
        error = TypeError(f"{attribute} must be a sequence with one {what} per reward function, got {values!r}.")
        if isinstance(values, str):
            raise error
        try:
            count = len(values)
        except TypeError as cause:  # None, a number, or an array or tensor without axes
            raise error from cause
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
        may change the result of `calculate`.

        Raises:
            TypeError: the user-defined method did not return `[B, F]` numbers.
        """
        if self.override is None:
            return self.calculate(rows, prompts, completions, completion_ids)
        shape = len(prompts), len(self.functions)
        with _restored_lists({"prompts": prompts, "completions": completions, "completion_ids": completion_ids}):
            rewards = np.asarray(as_arrays(self.override(rows, prompts, completions, completion_ids)), np.float32)
        if rewards.shape != shape or np.isinf(rewards).any():
            raise TypeError(
                f"The trainer's own _calculate_rewards returned {'infinite ' * bool(np.isinf(rewards).any())}numbers "
                f"{list(rewards.shape)}; expected {list(shape)}, a row for each completion and "
                "a column for each reward function."
            )
        return rewards

    def calculate(
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
        self._update_functions()
        self._columns.clear()
        self._numbers.clear()
        columns = {name: [row[name] for row in rows] for name in rows[0] if name not in _EXCLUDED_COLUMNS}
        check_columns(columns, "A row has the column")
        arguments = {"prompts": prompts, "completions": completions, "completion_ids": completion_ids, **columns}
        helpers = {"trainer_state": self.trainer_state(), "log_extra": self._log_extra, "log_metric": self._log_metric}
        helpers = {name: helpers[name] for name in self.helpers}
        rewards = np.full((len(rows), len(self.functions)), np.nan, np.float32)
        async_numbers = []
        for number, function in enumerate(self.functions):
            if isinstance(function, RewardModel):
                with raised_by(f"the reward function {self.names[number]!r}", prompts):
                    rewards[:, number] = _finite_scores(self.names[number], function(prompts, completions))
            elif is_async(function):
                async_numbers.append(number)
            else:
                with raised_by(f"the reward function {self.names[number]!r}", prompts), _restored_lists(arguments):
                    returned = function(**arguments, **helpers)
                    rewards[:, number] = _to_rewards(self.names[number], returned, len(rows))
        if async_numbers:
            with _restored_lists(arguments) as copies:
                async_rewards = self._await_all(async_numbers, arguments, helpers, copies["prompts"])
                rewards[:, async_numbers] = np.stack(async_rewards, axis=1)
        _warn_if_all_none(rewards, arguments)
        self._completions = len(rows)
        return rewards

    def __post_init__(self):
        self._last_user_list = list(self.user_list or ())

    def _update_functions(self) -> None:
        """Pick up functions that the user has replaced in their list since the last call."""
        functions = self._last_user_list if self.user_list is None else self.user_list
        if len(functions) != len(self._last_user_list):
            raise ValueError(
                f"reward_funcs now has {len(functions)} functions, but had {len(self._last_user_list)} when the "
                "trainer was built: functions may be replaced, but not added or removed. Create a new trainer with "
                "these functions."
            )
        for number, (function, previous) in enumerate(zip(functions, self._last_user_list, strict=True)):
            if function is previous:
                continue
            if is_model(function) or not callable(function):
                raise TypeError(
                    f"reward_funcs[{number}] must be replaced by a function, got a {type(function).__name__}. Reward "
                    "models can only be passed when the trainer is built."
                )
            self.functions[number] = self._last_user_list[number] = function

    @property
    def tokenizers(self) -> list[Any]:
        """The tokenizer of each reward model; None for functions."""
        return [function.tokenizer if isinstance(function, RewardModel) else None for function in self.functions]

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
            count = len(self._columns.pop(name))
            if name not in self._skipped_columns:
                self._skipped_columns.add(name)
                logger.warning(
                    f"log_extra({name!r}, values) got {count} values for {self._completions} completions, so the "
                    "column is left out. Call it once, with one value per completion."
                )
        return {name: list(values) for name, values in sorted(self._columns.items(), key=lambda item: str(item[0]))}

    def _log_extra(self, column: str, values: list) -> None:
        reserved = (*_TABLE_COLUMNS, *reward_columns(self.names))
        self._columns[self._free_name(column, reserved, f"log_extra({column!r}, ...)")].extend(values)

    def _log_metric(self, name: str, value: float) -> None:
        function_metrics = (f"rewards/{function}/{kind}" for function in self.names for kind in ("mean", "std"))
        reserved = (*_TRAINER_METRICS, *self.metrics_of_run, *function_metrics)
        try:
            number = float(value)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"The value of log_metric({name!r}, value) must be a number, got {show('value', value)}."
            ) from error
        self._numbers[self._free_name(name, reserved, f"log_metric({name!r}, ...)")].append(number)

    def _free_name(self, name: str, reserved: Sequence[str], call: str) -> str:
        """The name, or name_2 if the trainer already logs that name; warns the first time."""
        if name not in reserved:
            return name
        free = numbered([*reserved, name])[-1]
        if call not in self._renamed_calls:
            self._renamed_calls.add(call)
            logger.warning(f"{call}: the trainer logs {name!r} itself, so this is logged as {free!r}.")
        return free

    def _await_all(
        self, numbers: list[int], arguments: dict[str, Any], helpers: dict[str, Any], prompts: list
    ) -> list[np.ndarray]:
        """Call the async functions with `arguments`; `prompts` is a list that they cannot change."""
        try:
            calls = [self._call(number, arguments, helpers, prompts) for number in numbers]
            return self._loop.run(calls, self.timeout)
        except TookTooLong as error:
            name = self.names[numbers[error.number]]
            advice = "make the function return None in time"
            if error.blocks:
                advice = (
                    "use await for waiting inside the function: it blocks the event loop, so no other function can "
                    "run. Wrap blocking calls as await asyncio.to_thread(function, ...)"
                )
            with raised_by(f"the reward function {name!r}", prompts):
                raise TimeoutError(
                    f"The reward function {name!r} took longer than reward_timeout={self.timeout:g} seconds. Raise it, "
                    f"or {advice}."
                ) from error

    async def _call(self, number: int, arguments: dict[str, Any], helpers: dict[str, Any], prompts: list) -> np.ndarray:
        name = self.names[number]
        with raised_by(f"the reward function {name!r}", prompts):
            returned = await self.functions[number](**arguments, **helpers)
            return _to_rewards(name, returned, len(prompts))


def check_columns(names: Iterable[str], prefix: str, *more_reserved: str) -> None:
    """Raise ValueError if a column has the name of an argument that the trainer passes to reward functions.

    Args:
        prefix: start of the error, such as "train_dataset has the column".
        more_reserved: names of additional arguments.
    """
    reserved = (*_RESERVED_ARGUMENTS, *more_reserved)
    if (name := next((name for name in names if name in reserved), None)) is not None:
        raise ValueError(
            f"{prefix} {name!r}, but the trainer itself passes {', '.join(reserved)} to reward functions, which would "
            f"get multiple values for keyword argument {name!r}. Rename it."
        )


def reward_columns(names: Sequence[str]) -> list[str]:
    """The names of the reward columns in the completions table, made distinct from its own columns."""
    return numbered([*_TABLE_COLUMNS, *names])[len(_TABLE_COLUMNS) :]


def callable_name(function: Callable) -> str:
    """TRL's name for a reward function: `__name__` (of a partial's innermost function), else its class name."""
    function = unwrapped(function)
    try:
        return function.__name__
    except AttributeError:
        return type(function).__name__


def numbered(names: Sequence[str]) -> list[str]:
    """Make names unique: a second "f" becomes "f_2"."""
    unique: list[str] = []
    for name in names:
        number, candidate = 1, name
        while candidate in unique:
            number += 1
            candidate = f"{name}_{number}"
        unique.append(candidate)
    return unique


def _to_rewards(name: str, returned: Any, completions: int) -> np.ndarray:
    """Check the rewards that a function returned, and convert them to float32 `[B]`, with NaN for None."""
    error = TypeError(
        f"The reward function {name!r} must return a list of {completions} rewards (numbers or None), got "
        f"{show('rewards', returned)}."
    )
    if isinstance(returned, Mapping | Set | str | bytes):  # iterable, but unordered or not numbers
        raise error
    try:
        rewards = iter(returned)
    except TypeError as cause:
        raise error from cause
    values = list(islice(rewards, completions + 1))  # a generator may be infinite
    if len(values) != completions:
        count = len(returned) if isinstance(returned, Sized) else len(values)
        at_least = "more than " if count > completions and not isinstance(returned, Sized) else ""
        raise ValueError(
            f"The reward function '{name}' returned {at_least}{completions if at_least else count} rewards, but "
            f"{completions} were expected (one per prompt-completion pair). Make sure the reward function returns "
            "exactly one reward per completion."
        )
    try:
        numbers = [_number(value) for value in values]
    except (TypeError, ValueError, OverflowError) as cause:
        raise TypeError(
            f"The rewards of the reward function {name!r} must be numbers or None, got {show('rewards', values)}."
        ) from cause
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
def _restored_lists(lists: Mapping[str, list]) -> Iterator[dict[str, list]]:
    """Restore lists whose length changes inside, as by `pop`; yields copies of all of them."""
    copies = {name: list(values) for name, values in lists.items()}
    try:
        yield copies
    finally:
        for name, values in lists.items():
            if len(values) != len(copies[name]):
                values[:] = copies[name]


def _warn_if_all_none(rewards: np.ndarray, arguments: Mapping[str, Any]) -> None:
    unscored = np.flatnonzero(np.isnan(rewards).all(axis=1))
    if not len(unscored):
        return
    excluded = (*HELPERS, "prompts", "completions")
    first = unscored[0]
    row = {name: values[first] for name, values in arguments.items() if name not in excluded}
    row |= {"prompt": arguments["prompts"][first], "completion": arguments["completions"][first]}
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
        texts = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
        if is_messages(prompts[0]):
            options = {**self.template_options, "tokenize": False}
            names = [f"The completion {brief(conversation[-1:], 300)}" for conversation in texts]
            texts = [rendered(self.tokenizer, *pair, **options) for pair in zip(texts, names, strict=True)]
        ids = self.tokenizer(text=texts, add_special_tokens=False)["input_ids"]
        return self.scores(ids)

    def scores(self, ids: list[list[int]]) -> np.ndarray:
        """Score tokenized texts: float32 `[B]`."""
        return np.concatenate([self._scores(ids[start : start + _ROWS]) for start in range(0, len(ids), _ROWS)])

    def _scores(self, ids: list[list[int]]) -> np.ndarray:
        lengths = np.asarray([len(row) for row in ids])
        mask = np.arange(lengths.max()) < lengths[:, None]
        tokens = np.full(mask.shape, self.tokenizer.pad_token_id, np.int64)
        tokens[mask] = np.concatenate([np.asarray(row, np.int64) for row in ids])
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
        name_or_path, config = model.config._name_or_path, model.config
        _check_labels(config)
        with as_checkpoint(model, "score", dropout=False) as checkpoint:
            loaded = checkpoint.load(seed)
    elif isinstance(model, PreTrainedModel):
        loaded, name_or_path, config = model, model.name_or_path, model.config
    else:
        with naming_argument("reward_funcs"):
            loaded = find_checkpoint(str(model), **options).load(seed)
        name_or_path, config = str(model), loaded.config
    if loaded.backend.head != "score":
        raise TypeError(
            f"reward_funcs contains the model {loaded.name_or_path}, which has no score head: load it with "
            "trl_jax.AutoModelForSequenceClassification.from_pretrained, or pass its name."
        )
    if tokenizer is None:
        tokenizer = load_tokenizer(name_or_path, config, trust_remote_code=trust_remote_code, revision=revision)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    loaded.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    return RewardModel(loaded, tokenizer, dict(template_options or {}))


def _check_labels(config: Any) -> None:
    if config.num_labels != 1:
        labels = ", ".join(f"{number} {name!r}" for number, name in sorted(config.id2label.items()))
        raise ValueError(
            f"reward_funcs contains the model {config._name_or_path} with {config.num_labels} labels ({labels}), but a "
            "reward is a single number; TRL would use the score of the first label, whatever it means. Pass a function "
            "that returns the score you want, such as "
            "lambda completions, **columns: scores_of(completions)[:, 1].tolist()."
        )
