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
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence, Set, Sized
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from trl_jax.config.rules import show
from trl_jax.core.secrets import scrubbed
from trl_jax.core.text import brief
from trl_jax.data.chat import is_messages, load_tokenizer, rendered
from trl_jax.hub.auto import find_checkpoint
from trl_jax.hub.config import told_of
from trl_jax.hub.pretrained import PreTrainedModel
from trl_jax.hub.torch_objects import as_checkpoint, is_torch_model

# ----------------------------------------------------------------------------------------------------
# Reward functions as a script passes them: functions, names and models, one or several.


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


# ----------------------------------------------------------------------------------------------------
# Calls functions of a script: asynchronous ones together and within a time, with a note on what they raise.


def unwrapped(function: Callable) -> Callable:
    """The function that a functools.partial calls in the end."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def is_async(function: Callable) -> bool:
    """Whether calling it gives a coroutine: an `async def`, a partial of one, or an object with such a `__call__`."""
    function = unwrapped(function)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


@contextlib.contextmanager
def raised_by(who: str, prompts: list) -> Iterator[None]:
    """Add to an exception which of the script's functions raised it, and for which completions."""
    try:
        yield
    except Exception as error:
        error.add_note(
            f"This was raised by {who}, for {len(prompts)} completions, the first of them of "
            f"{scrubbed(show('prompt', prompts[0]))}. The run can go on from its last checkpoint: "
            "train(resume_from_checkpoint=True)."
        )
        raise


_GRACE = 1.0  # seconds for a coroutine to end after it was cancelled; one that does not is left to itself


class TookTooLong(Exception):
    """A coroutine did not end in time.

    number: its place among the coroutines.
    blocks: whether it kept the whole event loop from running, so that it could not even be cancelled.
    """

    def __init__(self, number: int, *, blocks: bool):
        super().__init__(number, blocks)
        self.number, self.blocks = number, blocks


class EventLoop:
    """An event loop in a thread of its own, which starts with the first call. All calls share it, so connections that
    functions keep open between calls stay open."""

    def __init__(self):
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self, coroutines: Sequence[Coroutine[Any, Any, Any]], timeout: float | None = None) -> list[Any]:
        """The results, in order. Where one raises, the others are cancelled and its exception is raised.

        Args:
            timeout: seconds that they may take; None is no limit.

        Raises:
            TookTooLong: one was not done by then, whether or not it lets itself be cancelled.
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
                raise  # a function's own
            blocking = asyncio.current_task(loop)
            late = [number for number, task in enumerate(tasks) if task is blocking or not task.done()]
            number = tasks.index(blocking) if blocking in tasks else min(late, default=0)
            self._loop = None  # its thread is lost; the next call starts another
            raise TookTooLong(number, blocks=blocking is not None) from error
        except BaseException:
            future.cancel()  # an interrupt of this thread
            raise


async def _together(
    coroutines: Sequence[Coroutine[Any, Any, Any]], timeout: float | None, tasks: list[asyncio.Task]
) -> list[Any]:
    """Run them as `tasks`, a list that gets a task for each."""
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


# ----------------------------------------------------------------------------------------------------
# Reward functions: how they are named, called, and what is made of what they return.


logger = logging.getLogger(__name__)

_OWN = ("prompt", "completion", "completion_ids")  # columns that functions are given under other names
_OF_TRAINER = ("trainer_state", "log_extra", "log_metric")
_GIVEN = ("prompts", "completions", *_OF_TRAINER)  # what the trainer passes, beside the columns
_TABLE = ("step", "prompt", "completion", "advantage")  # columns of the completions' table
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
        metrics_of_run: names that the trainer logs in this run, in addition to those that it may log in any.
    """

    names: list[str]
    functions: list[Callable[..., Any] | RewardModel]
    trainer_state: Callable[[], Any]
    timeout: float | None = None
    given: list[Any] | None = None
    metrics_of_run: tuple[str, ...] = ()
    _taken: list[Any] = field(init=False)
    _loop: EventLoop = field(default_factory=EventLoop)
    _columns: dict[str, list] = field(default_factory=lambda: defaultdict(list))
    _numbers: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    _completions: int = 0
    _left_out: set[str] = field(default_factory=set)  # columns of log_extra that were warned of
    _renamed: set[str] = field(default_factory=set)

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
        check_columns(columns, "A row has the column")
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

        A column that does not have one value for each completion is left out with a warning.
        """
        for name in [name for name, values in self._columns.items() if len(values) != self._completions]:
            found = len(self._columns.pop(name))
            if name not in self._left_out:
                self._left_out.add(name)
                logger.warning(
                    f"log_extra({name!r}, values) got {found} values for {self._completions} completions, and the "
                    "column is left out: wanted one for each. Call it once, with a list as long as completions."
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
            raise TypeError(f"log_metric({name!r}, value) got {show('value', value)}: wanted a number.") from error
        self._numbers[self._free(name, taken, f"log_metric({name!r}, ...)")].append(number)

    def _free(self, name: str, taken: Sequence[str], call: str) -> str:
        """The name, or name_2 where the trainer logs something else under it, with a warning the first time."""
        if name not in taken:
            return name
        free = numbered([*taken, name])[-1]
        if call not in self._renamed:
            self._renamed.add(call)
            logger.warning(f"{call}: the trainer logs {name!r} itself, so this is logged as {free!r}.")
        return free

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


def check_columns(names: Iterable[str], found: str, *more: str) -> None:
    """Raise ValueError for a column with the name of something that the trainer passes to reward functions.

    Args:
        found: where the column is, as in "train_dataset has the column".
        more: further names that are passed.
    """
    given = (*_GIVEN, *more)
    if (name := next((name for name in names if name in given), None)) is not None:
        raise ValueError(
            f"{found} {name!r}, and the trainer passes {', '.join(given)} to reward functions, which would get "
            f"multiple values for keyword argument {name!r}. Rename it."
        )


def reward_columns(names: Sequence[str]) -> list[str]:
    """The columns of reward functions of these names in the completions' table, apart from its own."""
    return numbered([*_TABLE, *names])[len(_TABLE) :]


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


# ----------------------------------------------------------------------------------------------------
# Reward models: models with a score head that judge completions.


_ROWS = 32  # that are scored at once


@dataclass
class RewardModel:
    """Scores prompts with their completions.

    model: with a score head.
    tokenizer: the model's own, whose chat template renders conversations.
    template_options: further arguments of that template.
    """

    model: PreTrainedModel
    tokenizer: Any
    template_options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The last part of the model's name or path."""
        return str(self.model.name_or_path).rstrip("/").rpartition("/")[2]

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any]) -> np.ndarray:
        """The score of each prompt with its completion, float32 `[B]`."""
        whole = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
        if is_messages(prompts[0]):
            options = {**self.template_options, "tokenize": False}
            names = [f"The completion {brief(talk[-1:], 300)}" for talk in whole]
            whole = [rendered(self.tokenizer, *pair, **options) for pair in zip(whole, names, strict=True)]
        ids = self.tokenizer(text=whole, add_special_tokens=False)["input_ids"]
        return self.scores(ids)

    def scores(self, ids: list[list[int]]) -> np.ndarray:
        """The score of each text, float32 `[B]`, by its tokens."""
        return np.concatenate([self._scores(ids[start : start + _ROWS]) for start in range(0, len(ids), _ROWS)])

    def _scores(self, ids: list[list[int]]) -> np.ndarray:
        lengths = np.asarray([len(own) for own in ids])
        mask = np.arange(lengths.max()) < lengths[:, None]
        tokens = np.full(mask.shape, self.tokenizer.pad_token_id, np.int64)
        tokens[mask] = np.concatenate([np.asarray(own, np.int64) for own in ids])
        return np.asarray(self.model(tokens, mask).logits[:, 0], np.float32)


def is_model(value: Any) -> bool:
    """Whether it is a reward model and not a function: a name or folder, a model of ours, or one of torch's."""
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
    """The reward model that a script passes in the place of a function.

    Args:
        model: a folder or name on the Hub; a model of ours, as `RewardTrainer.model`; or one of transformers'.
        tokenizer: None loads the model's own. Where it has no pad token, that becomes its eos token, as in TRL.
        model_init_kwargs: how a model given by name is loaded; the type of its weights is the checkpoint's, unless it
            says another.
        seed: draws a score head where the checkpoint has none.

    Raises:
        TypeError, ValueError: the model has another head, or cannot be loaded.
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
        with told_of("reward_funcs"):
            ours = find_checkpoint(str(model), **options).load(seed)
        place, config = str(model), ours.config
    if ours.backend.head != "score":
        raise TypeError(
            f"reward_funcs has the model {ours.name_or_path}, which has no score head: load it with "
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
            f"reward_funcs has the model {config._name_or_path} with {config.num_labels} labels ({labels}), and a "
            "reward is one number; TRL takes the first label's score, whatever it means. Pass a function that gives "
            "the score you mean, as in lambda completions, **columns: scores_of(completions)[:, 1].tolist()."
        )
