"""Tools and environments that a model uses in its completions, and user-defined `rollout_func`s."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from datasets import Dataset, IterableDataset

from trl_jax.core.text import brief
from trl_jax.data.chat import rendered
from trl_jax.data.chat_templates import (
    is_chat_template_prefix_preserving,
    prepare_multimodal_messages,
    response_template,
    supports_tool_calling,
    template_for_training,
)
from trl_jax.data.checks import check_no_media, has_transform, token_ids
from trl_jax.data.image_rows import Encoder, pictures_in
from trl_jax.data.images import ImagePatches, TextImages
from trl_jax.data.prompts import parsed_message
from trl_jax.rollout.rewards import EventLoop, check_columns, is_async, raised_by
from trl_jax.rollout.rollout import EncodedTexts, GeneratedCompletions, all_by_model

Message = dict[str, Any]
Functions = Mapping[str, Callable[..., Any]]

# Multi-turn completions with tool calls: `tools` and `environment_factory` of TRL's GRPOTrainer


@dataclass
class Conversation:
    """A completion in progress, with the tool calls and tool results in it.

    functions: the tools that the model may call, by name.
    prompt: token ids of the prompt.
    tokens: token ids after the prompt, including tool results.
    by_model: whether the model generated each of `tokens`.
    messages: messages of the model and its tools, in order.
    images: images of the prompt, or of the text up to the last tool result with an image; None if the run has none.
    urls: these images as data URLs; empty if no server needs them.
    logps: the sampler's log-probability of each of `tokens`, NaN for tool results; None if the sampler does not report
        them.
    """

    functions: Functions
    prompt: list[int]
    tokens: list[int]
    by_model: list[bool]
    messages: list[Message]
    images: TextImages | None
    urls: Sequence[str] = ()
    logps: np.ndarray | None = None

    @property
    def calls(self) -> list[Any]:
        """The tool calls in the last message."""
        return self.messages[-1].get("tool_calls") or []

    @property
    def text(self) -> list[int]:
        """The prompt and the tokens after it."""
        return self.prompt + self.tokens

    @property
    def images_of_text(self) -> TextImages:
        """The images, at their positions in the whole text."""
        return self.images.before(len(self.text) - len(self.images.features))

    def add_answers(self, answers: list[Message], tokens: list[int]) -> None:
        self.messages += answers
        self.tokens, self.by_model = self.tokens + tokens, self.by_model + [False] * len(tokens)
        self._add_logps(np.full(len(tokens), np.nan, np.float32))

    def add_model_tokens(self, tokens: list[int], message: Message | None, logps: np.ndarray | None) -> None:
        self.messages += [] if message is None else [message]
        self.tokens, self.by_model = self.tokens + tokens, self.by_model + [True] * len(tokens)
        self._add_logps(logps)

    def _add_logps(self, logps: np.ndarray | None) -> None:
        self.logps = None if self.logps is None else np.concatenate([self.logps, logps])


@dataclass
class ToolCaller:
    """Runs the model's tool calls, and counts calls and failures."""

    calls: int = 0
    failures: int = 0
    _loop: EventLoop = field(default_factory=EventLoop)

    def run(self, calls: Sequence[Any], functions: Functions) -> list[Message]:
        """Run the tool calls of one message and return one tool message per call; those of async functions come last.

        Async functions run concurrently. An exception is returned to the model as the result.
        """
        results: list[tuple[str, Any]] = []
        coroutines: list[tuple[str, Coroutine]] = []
        for call in calls:
            self.calls += 1
            name = _function_name(call)
            try:
                function = _function_of(call, name, functions)
                result = function(**call["function"]["arguments"])
                (coroutines if is_async(function) else results).append((name, result))
            except Exception as error:  # tools may raise any exception
                results.append((name, self._count_failure(error)))
        names, waiting = [name for name, _ in coroutines], [_result_or_exception(c) for _, c in coroutines]
        for name, result in zip(names, self._loop.run(waiting) if waiting else [], strict=True):
            results.append((name, self._count_failure(result) if isinstance(result, Exception) else result))
        return [{"role": "tool", "name": _escaped(name), "content": _to_content(result)} for name, result in results]

    def take_counts(self) -> tuple[int, int]:
        """The number of calls and of failed calls since the last call of this method."""
        calls, failures, self.calls, self.failures = self.calls, self.failures, 0, 0
        return calls, failures

    def _count_failure(self, error: Exception) -> dict[str, str]:
        self.failures += 1
        return {"error": str(error)}


@dataclass(frozen=True)
class Tools:
    """Continues completions after tool calls.

    functions: tools by name.
    environments: their methods are additional tools for their own completion; None without environments.
    template_options: extra arguments for the chat template.
    most_turns: maximum number of turns with tool calls; None means no limit.
    longest: maximum number of tokens of a completion, including tool results.
    positions: another turn only starts while prompt and completion have fewer tokens than this; None means no limit.
    vocab_size: rows of the model's embedding.
    encoder: encodes the images in tool results; None if the model has no vision tower.
    chat_tokenizer: tokenizes conversations without images; None: `tokenizer` does.
    """

    functions: Functions
    environments: Environments | None
    tokenizer: Any
    template_options: Mapping[str, Any]
    most_turns: int | None
    longest: int
    positions: int | None
    vocab_size: int
    encoder: Encoder | None = None
    calls: ToolCaller = field(default_factory=ToolCaller)
    chat_tokenizer: Any = None

    @property
    def functions_by_completion(self) -> list[Functions] | None:
        """The tools of each completion of the current rows; None if they are the same for all."""
        if self.environments is None:
            return None
        return [self.functions | by_name(methods_of(environment)) for environment in self.environments.current]

    def run_turns(
        self,
        prompts: EncodedTexts,
        completion_ids: Sequence[np.ndarray],
        complete: Callable[[EncodedTexts, Sequence[int]], tuple[Sequence, Sequence | None]],
        logps: Sequence[np.ndarray] | None = None,
        url_of: Callable[[Any], str] | None = None,
    ) -> GeneratedCompletions:
        """Run all further turns of these completions.

        Args:
            completion_ids: the first turn of each completion.
            complete: called with texts and the maximum number of further tokens for each; returns the next tokens of
                each, int32 arrays, and their log-probabilities (None if `logps` is None).
            logps: the sampler's log-probabilities of each first turn; None if it does not report them.
            url_of: encodes a picture in an answer for servers; None: no server needs it.
        """
        functions_by_row = self.functions_by_completion or [self.functions] * len(completion_ids)
        optional = [prompts.images, prompts.urls, logps]
        optional = [[None] * len(completion_ids) if values is None else values for values in optional]
        rows = zip(functions_by_row, prompts.ids, completion_ids, *optional, strict=True)
        dialogs = [self._start(functions, list(prompt), ids.tolist(), *rest) for functions, prompt, ids, *rest in rows]
        unfinished, turn = [dialog for dialog in dialogs if dialog.calls], 0
        while unfinished and (self.most_turns is None or turn < self.most_turns):
            unfinished = [dialog for dialog in unfinished if self._add_tool_results(dialog, url_of)]
            if unfinished:
                self._generate_next_messages(unfinished, complete)
            unfinished, turn = [dialog for dialog in unfinished if dialog.calls], turn + 1
        ids = [np.asarray(dialog.tokens, np.int32) for dialog in dialogs]
        by_model = [np.asarray(dialog.by_model, bool) for dialog in dialogs]
        return GeneratedCompletions(
            prompts.ids, ids, by_model, messages=[dialog.messages for dialog in dialogs],
            calls=self.calls.take_counts(),
            sampling_logps=None if logps is None else [dialog.logps for dialog in dialogs],
            images=None if prompts.images is None else [dialog.images for dialog in dialogs],
        )  # fmt: skip

    def _generate_next_messages(self, unfinished: Sequence[Conversation], complete: Callable) -> None:
        """Let the model generate its next message in each of these conversations."""
        texts = [dialog.text for dialog in unfinished]
        limits = [self.longest - len(dialog.tokens) for dialog in unfinished]
        images, urls = None, None
        if unfinished[0].images is not None:
            images, urls = [dialog.images_of_text for dialog in unfinished], [dialog.urls for dialog in unfinished]
        completions, logps = complete(EncodedTexts(texts, images, urls), limits)
        logps = [None] * len(unfinished) if logps is None else logps
        for dialog, text, limit, ids, row_logps in zip(unfinished, texts, limits, completions, logps, strict=True):
            tokens = ids[:limit].tolist()
            message = self._message(dialog.functions, tokens, text) if tokens else None
            dialog.add_model_tokens(tokens, message, None if row_logps is None else row_logps[:limit])

    def _start(
        self,
        functions: Functions,
        prompt: list[int],
        tokens: list[int],
        images: TextImages | None,
        urls: Sequence[str] | None,
        logps: np.ndarray | None,
    ) -> Conversation:
        message = self._message(functions, tokens, prompt)
        return Conversation(functions, prompt, tokens, [True] * len(tokens), [message], images, urls or (), logps)

    def _message(self, functions: Functions, tokens: list[int], prompt: list[int]) -> Message:
        return parsed_message(tokens, prompt, self.tokenizer, list(functions.values()))

    def _add_tool_results(self, dialog: Conversation, url_of: Callable[[Any], str] | None) -> bool:
        """Run the tool calls of the last message and append the results.

        Returns False if the results do not fit; the completion then ends with the tool calls.
        """
        answers = self.calls.run(dialog.calls, dialog.functions)
        for answer in answers:
            where = f"The answer of the tool {answer['name']!r}"
            check_no_media([answer], where, images=self.encoder is not None)
        tokens, images, pictures = self._encode_answers(answers)
        if tokens:
            token_ids(tokens, self.vocab_size, f"The answer of {', '.join(repr(answer['name']) for answer in answers)}")
        length = len(dialog.tokens) + len(tokens)
        if length > self.longest or (self.positions is not None and len(dialog.prompt) + length >= self.positions):
            return False
        dialog.add_answers(answers, tokens)
        if images:
            dialog.images = self.encoder.placed(dialog.text, [*dialog.images.images, *images])
            # At once, because the tool may draw on the same picture again.
            dialog.urls = [*dialog.urls, *([] if url_of is None else map(url_of, pictures))]
        return True

    def _encode_answers(self, answers: list[Message]) -> tuple[list[int], Sequence[ImagePatches], Sequence[Any]]:
        """The tokens from the end of a message with tool calls to the start of the model's next message, and the images
        in between, with their pictures."""
        call = {"type": "function", "function": {"name": answers[0]["name"], "arguments": {}}}
        messages = [{"role": "user", "content": "-"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        prefix, *_ = self._encode(messages, add_generation_prompt=False)
        ends = [index for index, token in enumerate(prefix) if token == self.tokenizer.eos_token_id]
        prefix = prefix[: ends[-1] + 1] if ends else prefix  # some templates render a newline after the EOS token
        tokens, images, pictures = self._encode(messages + answers, add_generation_prompt=True)
        if tokens[: len(prefix)] != prefix:
            raise ValueError(
                "The chat template renders a message with tool calls differently once the answers follow, so the "
                "answers cannot be tokenized separately. Use a template that renders each message independently of "
                "later ones."
            )
        return tokens[len(prefix) :], images, pictures

    def _encode(self, messages: list[Message], **options: Any) -> tuple[list[int], Sequence[ImagePatches], Sequence]:
        where = f"The answers of tools {brief(messages[2:], 300)}"
        if self.encoder is None:
            options |= {"tokenize": True, "return_dict": True, **self.template_options}
            tokenizer = self.tokenizer if self.chat_tokenizer is None else self.chat_tokenizer
            return list(rendered(tokenizer, messages, where, **options)["input_ids"]), (), ()
        messages = prepare_multimodal_messages(messages)
        text = rendered(self.tokenizer, messages, where, tokenize=False, **options, **self.template_options)
        pictures = pictures_in(messages)
        try:
            encoded = self.encoder.encode(text, pictures)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        return encoded.ids.tolist(), encoded.images.images, pictures


def by_name(functions: Sequence[Callable]) -> dict[str, Callable]:
    """Functions by name, as the model calls them."""
    return {function.__name__: function for function in functions}


def _function_of(call: Any, name: str, functions: Functions) -> Callable[..., Any]:
    if call.get("type", "function") != "function":
        raise ValueError(f"Unsupported tool call type: {call['type']}")
    if name not in functions:
        raise ValueError(f"Tool {name} not found.")
    return functions[name]


def _function_name(call: Any) -> str:
    """The name of the called function."""
    return call["function"]["name"] if "function" in call else call.get("name", "unknown")


async def _result_or_exception(coroutine: Coroutine) -> Any:
    """Await a coroutine; return its result, or the exception that it raised."""
    try:
        return await coroutine
    except Exception as error:  # tools may raise any exception
        return error


def _to_content(result: Any) -> Any:
    """Convert a result to message content: lists are content blocks, anything else becomes text."""
    return result if isinstance(result, list) else _escaped(str(result))


def _escaped(text: str) -> str:
    """Escape lone surrogates: a model can generate them in JSON, but no tokenizer accepts them."""
    return text.encode(errors="backslashreplace").decode()


# Environments: `environment_factory` of TRL's GRPOTrainer

Row = dict[str, Any]
_TRAINER_METHODS = ("reset", "get_reward")  # methods that the model cannot call
_EMPTY_PROMPT = [{"role": "user", "content": ""}]  # `reset` of an environment adds to it


class Environments:
    """The environments of a generation, one per completion. They are reset and reused for the next generation.

    current: the environments of the current rows, in order.
    has_vision: whether the model has a vision tower, so that `reset` may return images.
    """

    has_vision: bool = False
    _supplies_prompts: bool = False  # whether there are rows without a prompt

    def __init__(self, factories: Callable[[], Any] | Mapping[str, Callable[[], Any]]):
        """
        Args:
            factories: a factory, or factories by the name in the rows' `environment` column.

        Raises:
            ValueError: an environment has no `reset` method.
        """
        self._several = isinstance(factories, Mapping)
        self._factories = dict(factories) if isinstance(factories, Mapping) else {None: factories}
        self._pools = {name: [factory()] for name, factory in self._factories.items()}
        self.current: list[Any] = []
        for [instance] in self._pools.values():
            if not inspect.isfunction(getattr(type(instance), "reset", None)):
                raise ValueError(
                    "Each environment instance returned by `environment_factory` must define a callable `reset`."
                )

    @property
    def probes(self) -> list[Any]:
        """One environment of each kind."""
        return [pool[0] for pool in self._pools.values()]

    @property
    def rewards(self) -> list[Callable]:
        """A reward function for each environment class that defines `get_reward`."""
        classes = dict.fromkeys(type(environment) for environment in self.probes)
        return [_reward_function(cls) for cls in classes if inspect.isfunction(getattr(cls, "get_reward", None))]

    def training_rows(self, dataset: Any, args: Any) -> Any:
        """The training rows, with prompts. Without a dataset, they are empty prompts for one generation: `reset`
        returns the prompts.

        Args:
            args: the trainer's arguments, or None.

        Raises:
            ValueError: there is no dataset, but several environments, or no `max_steps`.
        """
        if dataset is not None:
            return self.with_prompts(dataset)
        if self._several:
            raise ValueError(
                "A `dict` `environment_factory` (multiple environments) requires a `train_dataset` with an "
                "`environment` column to route each example to its environment. Provide a dataset, or pass a single "
                "environment factory."
            )
        if args is None or args.max_steps <= 0:
            raise ValueError(
                "When training without a `train_dataset` (the environment owns the data and returns the prompt from "
                "`reset()`), `max_steps` must be set to a positive value to define the training length. Set it via "
                "`GRPOConfig(max_steps=...)`."
            )
        return Dataset.from_dict({"prompt": [_EMPTY_PROMPT] * (args.generation_batch_size // args.num_generations)})

    def with_prompts(self, dataset: Any) -> Any:
        """The rows, with an empty message as their prompt if they have none: `reset` returns it."""
        if isinstance(dataset, dict):
            return {name: self.with_prompts(rows) for name, rows in dataset.items()}
        if not isinstance(dataset, Dataset | IterableDataset) or has_transform(dataset):
            return dataset
        if dataset.column_names is None or "prompt" in dataset.column_names:
            return dataset
        self._supplies_prompts = True
        if isinstance(dataset, Dataset):
            return dataset.add_column("prompt", [_EMPTY_PROMPT] * len(dataset))
        return dataset.map(lambda row: row | {"prompt": _EMPTY_PROMPT})

    def check(self, dataset: Any, where: str) -> None:
        """Raise ValueError for the first row of a table without a known environment. Streams, and tables with a
        transform, are checked in `reset`."""
        if not self._several or not isinstance(dataset, Dataset) or has_transform(dataset):
            return
        has_column = "environment" in dataset.column_names
        for name in dataset.unique("environment") if has_column else [None]:
            if name not in self._factories:
                row = list(dataset["environment"]).index(name) if has_column else 0
                raise self._unknown_environment(name, f" Found in row {row} of {where}.")

    def _unknown_environment(self, name: Any, place: str = "") -> ValueError:
        return ValueError(
            f"Example has `environment={name!r}`, which is not among the environments passed to "
            f"`environment_factory`. Expected one of: {list(self._factories)}.{place}"
        )

    def reset(self, rows: Sequence[Row]) -> list[Row]:
        """Reset an environment for each row, and return the rows with their environment in the column `environments`.

        The result of `reset` is appended to the last message of the prompt.

        Raises:
            ValueError: a row names an unknown environment or already has a column `environments`, or `reset` returns
                an image and the model has no vision tower.
        """
        self.current, used = [], dict.fromkeys(self._factories, 0)
        for row in rows:
            if "environments" in row:
                raise ValueError(
                    "A row has the column 'environments', but the trainer passes its environments to reward functions "
                    "under that name. Rename the column."
                )
            name = row.get("environment") if self._several else None
            if name not in self._factories:
                raise self._unknown_environment(name)
            pool = self._pools[name]
            if used[name] == len(pool):
                pool.append(self._factories[name]())
            self.current.append(pool[used[name]])
            used[name] += 1
        return [self._reset(*pair) for pair in zip(rows, self.current, strict=True)]

    def _reset(self, row: Row, environment: Any) -> Row:
        columns = {name: row[name] for name in row if name != "environment" or not self._several}
        if self._supplies_prompts and row["prompt"] == _EMPTY_PROMPT:
            del columns["prompt"]
        with raised_by(f"reset() of the environment {type(environment).__name__!r}", [row["prompt"]]):
            observation = environment.reset(**columns)
        if observation is not None:
            where = f"reset() of the environment {type(environment).__name__}"
            check_no_media([{"role": "user", "content": observation}], where, images=self.has_vision)
            row = row | {"prompt": _with_observation(row["prompt"], observation)}
        return row | {"environments": environment}


def methods_of(environment: Any) -> list[Callable]:
    """The public methods of an environment, which the model may call."""
    names = [name for name, _ in inspect.getmembers(type(environment), inspect.isfunction)]
    return [getattr(environment, name) for name in names if name not in _TRAINER_METHODS and not name.startswith("_")]


def _with_observation(prompt: list[dict], observation: Any) -> list[dict]:
    """Append an observation to the last message. If either of them has content blocks, the other's text becomes a
    block."""
    content = prompt[-1]["content"]
    if isinstance(observation, list) and isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if isinstance(observation, str) and isinstance(content, list):
        observation = [{"type": "text", "text": observation}]
    return [*prompt[:-1], {**prompt[-1], "content": content + observation}]


def _reward_function(cls: type) -> Callable:
    """A reward function, named after the class, that returns None for environments of other classes."""

    async def call_async(environments: Sequence[Any], **columns: Any) -> list:
        return [await environment.get_reward() if type(environment) is cls else None for environment in environments]

    def call(environments: Sequence[Any], **columns: Any) -> list:
        return [environment.get_reward() if type(environment) is cls else None for environment in environments]

    reward = call_async if inspect.iscoroutinefunction(cls.get_reward) else call
    reward.__name__ = cls.__name__
    return reward


# `rollout_func`

_REQUIRED = ("prompt_ids", "completion_ids", "logprobs")


def call_rollout_func(
    func: Callable[[list], Mapping[str, Any]], prompts: list, vocab_size: int
) -> GeneratedCompletions:
    """Generate completions with the user's `rollout_func`; equal prompts are adjacent.

    Args:
        func: returns a dict with one item per prompt: `prompt_ids` and `completion_ids`, lists of token ids, and
            `logprobs`, the sampler's log-probability of each completion token (None where it has none), or None for all
            prompts. An optional `env_mask` is 0 for completion tokens that the model did not generate. All other keys
            are passed to the reward functions.
        vocab_size: rows of the model's embedding.

    Raises:
        TypeError: it returns something other than a dict.
        ValueError: a key is missing or clashes with an argument of reward functions, a list has the wrong length, an id
            is out of range, a mask value is not 0 or 1, or a log-probability is not a number up to 0.
    """
    output = func(copy.deepcopy(prompts))
    if not isinstance(output, Mapping):
        raise TypeError(f"rollout_func must return a dict with {', '.join(_REQUIRED)}, got {brief(output)}.")
    if missing := sorted(set(_REQUIRED) - output.keys()):
        raise ValueError(f"rollout_func must return keys {missing} in its output dict.")
    prompt_ids, completion_ids = (_to_token_ids(name, output[name], prompts, vocab_size) for name in _REQUIRED[:2])
    columns = {name: values for name, values in output.items() if name not in (*_REQUIRED, "env_mask")}
    check_columns(columns, "rollout_func returned the key")
    masks, logps = output.get("env_mask"), output["logprobs"]
    by_model = all_by_model(completion_ids) if masks is None else _to_masks(masks, completion_ids)
    logps = None if logps is None else _to_logps(logps, completion_ids)
    return GeneratedCompletions(prompt_ids, completion_ids, by_model, columns, sampling_logps=logps)


def _to_token_ids(name: str, ids: Any, prompts: list, vocab_size: int) -> list[np.ndarray]:
    """The token ids returned under this key, int32 `[tokens]` each."""
    rows = _as_list(name, ids)
    if len(rows) != len(prompts):
        raise ValueError(
            f"rollout_func got {len(prompts)} prompts but returned {len(rows)} {name}: return one per prompt. "
            "A prompt with several completions is passed several times."
        )
    return [token_ids(row, vocab_size, f"rollout_func's {name}[{index}]") for index, row in enumerate(rows)]


def _to_masks(masks: Any, completions: Sequence[np.ndarray]) -> list[np.ndarray]:
    """`env_mask` as bool `[tokens]` for each completion."""
    rows = _as_list("env_mask", masks)
    if [len(_as_list(f"env_mask[{index}]", row)) for index, row in enumerate(rows)] != list(map(len, completions)):
        raise ValueError("rollout_func returned an env_mask without exactly one number per token of completion_ids.")
    for index, row in enumerate(rows):
        if bad := [value for value in row if isinstance(value, str | bytes) or value not in (0, 1)]:
            raise ValueError(f"rollout_func's env_mask[{index}] must be 0 or 1 for each token, got {brief(bad[0])}.")
    return [np.asarray(row).astype(bool) for row in rows]


def _to_logps(logps: Any, completions: Sequence[np.ndarray]) -> list[np.ndarray]:
    """`logprobs` as float32 `[tokens]` for each completion, NaN where there is none."""
    rows = [_as_list(f"logprobs[{index}]", row) for index, row in enumerate(_as_list("logprobs", logps))]
    if list(map(len, rows)) != list(map(len, completions)):
        raise ValueError(
            "rollout_func returned logprobs without exactly one number per token of completion_ids: return None where "
            "the sampler has none, or logprobs=None."
        )
    arrays = []
    for index, row in enumerate(rows):
        try:
            arrays.append(np.asarray([np.nan if value is None else value for value in row], np.float32))
        except (TypeError, ValueError) as error:
            raise ValueError(f"rollout_func's logprobs[{index}] must be numbers or None, got {brief(row)}.") from error
        if arrays[-1].ndim != 1 or (arrays[-1] > 0).any():
            raise ValueError(
                f"rollout_func's logprobs[{index}] must be one number up to 0 per token, got {brief(row)}."
            )
    return arrays


def _as_list(name: str, values: Any) -> list:
    if isinstance(values, str | bytes | Mapping):
        raise ValueError(f"rollout_func must return a list as {name}, got {brief(values)}.")
    try:
        return list(values)
    except TypeError as error:
        raise ValueError(f"rollout_func must return a list as {name}, got {brief(values)}.") from error


# The tools of a run.


def tools_of(
    functions: Sequence[Callable],
    environments: Environments | None,
    tokenizer: Any,
    template_options: Mapping[str, Any],
    *,
    most_turns: int | None,
    longest: int,
    positions: int | None,
    vocab_size: int,
    encoder: Encoder | None = None,
) -> tuple[Tools, dict[str, Any]]:
    """The tools of a run, and the extra arguments for rendering prompts with the chat template.

    Args:
        environments: their methods are tools as well; may be None.
        tokenizer: its `response_template` is set if it has none.
        most_turns, longest, positions, vocab_size, encoder: as in `Tools`.

    Raises:
        TypeError: a tool is not callable, or lacks annotations or a docstring that describes its arguments.
        ValueError: two tools have the same name; or the chat template does not render tool calls or tool results, or
            renders calls in an unknown format.
    """
    by_name = _described(functions)
    for environment in () if environments is None else environments.probes:
        _described([*functions, *methods_of(environment)])
    if not supports_tool_calling(tokenizer):
        raise ValueError(
            "The provided chat template does not support tool calling. The template must be able to render a full "
            "tool-calling conversation (user -> assistant with tool_calls -> tool)."
        )
    if vars(tokenizer).get("response_template") is None:
        tokenizer.response_template = response_template(tokenizer)
    options = dict(template_options)
    if not is_chat_template_prefix_preserving(tokenizer):
        options["chat_template"] = template_for_training(tokenizer)
    tools = Tools(by_name, environments, tokenizer, options, most_turns, longest, positions, vocab_size, encoder)
    return tools, options if environments is not None else options | {"tools": list(by_name.values())}


def _described(functions: Sequence[Callable]) -> dict[str, Callable]:
    """The functions by the name by which the model calls them, after checking that each can be described to it."""
    from transformers.utils import get_json_schema

    by_name: dict[str, Callable] = {}
    for function in functions:
        if not callable(function):
            raise TypeError(f"tools must be functions, got {function!r}.")
        try:
            name = get_json_schema(function)["function"]["name"]
        except Exception as error:  # transformers raises its own exception classes
            name = getattr(function, "__name__", type(function).__name__)
            raise TypeError(
                f"tools: {name} cannot be described to the model: {error}. Annotate its arguments, and describe each "
                "under Args: in its docstring."
            ) from error
        if name in by_name:
            raise ValueError(f"tools has two functions {name!r}, and the model calls them by name. Rename one.")
        by_name[name] = function
    return by_name
