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
from trl_jax.data.chat_templates import prepare_multimodal_messages
from trl_jax.data.checks import check_no_media, has_transform, token_ids
from trl_jax.data.image_rows import Encoder, pictures_in
from trl_jax.data.images import ImagePatches, TextImages
from trl_jax.data.prompts import parsed_message
from trl_jax.rollout.rewards import EventLoop, check_columns, is_async, raised_by
from trl_jax.rollout.rollout import EncodedTexts, Written, all_written

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
        """The images, in the places of the whole text."""
        return self.images.before(len(self.text) - len(self.images.features))

    def answered(self, answers: list[Message], tokens: list[int]) -> None:
        self.messages += answers
        self.tokens, self.by_model = self.tokens + tokens, self.by_model + [False] * len(tokens)
        self._add(np.full(len(tokens), np.nan, np.float32))

    def written(self, tokens: list[int], message: Message | None, logps: np.ndarray | None) -> None:
        self.messages += [] if message is None else [message]
        self.tokens, self.by_model = self.tokens + tokens, self.by_model + [True] * len(tokens)
        self._add(logps)

    def _add(self, logps: np.ndarray | None) -> None:
        self.logps = None if self.logps is None else np.concatenate([self.logps, logps])


@dataclass
class Calls:
    """Runs the model's tool calls and counts calls and failures."""

    calls: int = 0
    failures: int = 0
    _loop: EventLoop = field(default_factory=EventLoop)

    def answers(self, calls: Sequence[Any], functions: Functions) -> list[Message]:
        """Run the tool calls of one message and return one tool message per call; those of async functions come last.

        Async functions run concurrently. An exception is returned to the model as the result.
        """
        done: list[tuple[str, Any]] = []
        waiting: list[tuple[str, Coroutine]] = []
        for call in calls:
            self.calls += 1
            name = _name(call)
            try:
                function = _called(call, name, functions)
                result = function(**call["function"]["arguments"])
                (waiting if is_async(function) else done).append((name, result))
            except Exception as error:  # tools may raise any exception
                done.append((name, self._failed(error)))
        results = self._loop.run([_outcome(coroutine) for _, coroutine in waiting]) if waiting else []
        for (name, _), result in zip(waiting, results, strict=True):
            done.append((name, self._failed(result) if isinstance(result, Exception) else result))
        return [{"role": "tool", "name": _whole(name), "content": _content(result)} for name, result in done]

    def taken(self) -> tuple[int, int]:
        """The number of calls and of failed calls since the last call of this method."""
        calls, failures, self.calls, self.failures = self.calls, self.failures, 0, 0
        return calls, failures

    def _failed(self, error: Exception) -> dict[str, str]:
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
    calls: Calls = field(default_factory=Calls)
    chat_tokenizer: Any = None

    @property
    def of_each(self) -> list[Functions] | None:
        """The tools of each completion of the current rows; None if they are the same for all."""
        if self.environments is None:
            return None
        return [self.functions | by_name(methods_of(environment)) for environment in self.environments.current]

    def completed(
        self,
        prompts: EncodedTexts,
        completion_ids: Sequence[np.ndarray],
        complete: Callable[[EncodedTexts, Sequence[int]], tuple[Sequence, Sequence | None]],
        logps: Sequence[np.ndarray] | None = None,
        url_of: Callable[[Any], str] | None = None,
    ) -> Written:
        """Run all further turns of these completions.

        Args:
            completion_ids: the first turn of each completion.
            complete: called with texts and the maximum number of further tokens for each; returns the next tokens of
                each, int32 arrays, and their log-probabilities (None if `logps` is None).
            logps: the sampler's log-probabilities of each first turn; None if it does not report them.
            url_of: encodes a picture in an answer for servers; None: no server needs it.
        """
        functions = self.of_each or [self.functions] * len(completion_ids)
        facts = [prompts.images, prompts.urls, logps]
        facts = [[None] * len(completion_ids) if each is None else each for each in facts]
        first = zip(functions, prompts.ids, completion_ids, *facts, strict=True)
        every = [self._begun(of_one, list(prompt), own.tolist(), *more) for of_one, prompt, own, *more in first]
        waiting, turn = [dialog for dialog in every if dialog.calls], 0
        while waiting and (self.most_turns is None or turn < self.most_turns):
            waiting = [dialog for dialog in waiting if self._answer(dialog, url_of)]
            if waiting:
                self._continue(waiting, complete)
            waiting, turn = [dialog for dialog in waiting if dialog.calls], turn + 1
        ids = [np.asarray(dialog.tokens, np.int32) for dialog in every]
        by_model = [np.asarray(dialog.by_model, bool) for dialog in every]
        return Written(
            prompts.ids, ids, by_model, messages=[dialog.messages for dialog in every], calls=self.calls.taken(),
            sampling_logps=None if logps is None else [dialog.logps for dialog in every],
            images=None if prompts.images is None else [dialog.images for dialog in every],
        )  # fmt: skip

    def _continue(self, waiting: Sequence[Conversation], complete: Callable) -> None:
        """Let the model generate its next message in each of these conversations."""
        texts, rooms = [dialog.text for dialog in waiting], [self.longest - len(dialog.tokens) for dialog in waiting]
        images, urls = None, None
        if waiting[0].images is not None:
            images, urls = [dialog.images_of_text for dialog in waiting], [dialog.urls for dialog in waiting]
        completions, logps = complete(EncodedTexts(texts, images, urls), rooms)
        logps = [None] * len(waiting) if logps is None else logps
        for dialog, text, room, tokens, own in zip(waiting, texts, rooms, completions, logps, strict=True):
            tokens, own = tokens[:room].tolist(), None if own is None else own[:room]
            dialog.written(tokens, self._message(dialog.functions, tokens, text) if tokens else None, own)

    def _begun(
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

    def _message(self, functions: Functions, tokens: list[int], before: list[int]) -> Message:
        return parsed_message(tokens, before, self.tokenizer, list(functions.values()))

    def _answer(self, dialog: Conversation, url_of: Callable[[Any], str] | None) -> bool:
        """Run the tool calls of the last message and append the results.

        Returns False if the results do not fit; the completion then ends with the tool calls.
        """
        answers = self.calls.answers(dialog.calls, dialog.functions)
        for answer in answers:
            where = f"The answer of the tool {answer['name']!r}"
            check_no_media([answer], where, images=self.encoder is not None)
        tokens, images, pictures = self._tokens_of(answers)
        if tokens:
            token_ids(tokens, self.vocab_size, f"The answer of {', '.join(repr(own['name']) for own in answers)}")
        length = len(dialog.tokens) + len(tokens)
        if length > self.longest or (self.positions is not None and len(dialog.prompt) + length >= self.positions):
            return False
        dialog.answered(answers, tokens)
        if images:
            dialog.images = self.encoder.placed(dialog.text, [*dialog.images.images, *images])
            # At once, because the tool may draw on the same picture again.
            dialog.urls = [*dialog.urls, *([] if url_of is None else map(url_of, pictures))]
        return True

    def _tokens_of(self, answers: list[Message]) -> tuple[list[int], Sequence[ImagePatches], Sequence[Any]]:
        """The tokens from the end of a message with tool calls to the start of the model's next message, and the images
        in between, with their pictures."""
        call = {"type": "function", "function": {"name": answers[0]["name"], "arguments": {}}}
        talk = [{"role": "user", "content": "-"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        before, *_ = self._rendered(talk, add_generation_prompt=False)
        ends = [place for place, token in enumerate(before) if token == self.tokenizer.eos_token_id]
        before = before[: ends[-1] + 1] if ends else before  # some templates render a newline after the EOS token
        whole, images, pictures = self._rendered(talk + answers, add_generation_prompt=True)
        if whole[: len(before)] != before:
            raise ValueError(
                "The chat template renders a message with tool calls differently once the answers follow, so the "
                "answers cannot be tokenized separately. Use a template that renders each message independently of "
                "later ones."
            )
        return whole[len(before) :], images, pictures

    def _rendered(self, talk: list[Message], **options: Any) -> tuple[list[int], Sequence[ImagePatches], Sequence[Any]]:
        where = f"The answers of tools {brief(talk[2:], 300)}"
        if self.encoder is None:
            options |= {"tokenize": True, "return_dict": True, **self.template_options}
            tokenizer = self.tokenizer if self.chat_tokenizer is None else self.chat_tokenizer
            return list(rendered(tokenizer, talk, where, **options)["input_ids"]), (), ()
        talk = prepare_multimodal_messages(talk)
        text = rendered(self.tokenizer, talk, where, tokenize=False, **options, **self.template_options)
        pictures = pictures_in(talk)
        try:
            found = self.encoder.encode(text, pictures)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        return found.ids.tolist(), found.images.images, pictures


def by_name(functions: Sequence[Callable]) -> dict[str, Callable]:
    """Functions by name, as the model calls them."""
    return {function.__name__: function for function in functions}


def _called(call: Any, name: str, functions: Functions) -> Callable[..., Any]:
    if call.get("type", "function") != "function":
        raise ValueError(f"Unsupported tool call type: {call['type']}")
    if name not in functions:
        raise ValueError(f"Tool {name} not found.")
    return functions[name]


def _name(call: Any) -> str:
    """The name of the called function."""
    return call["function"]["name"] if "function" in call else call.get("name", "unknown")


async def _outcome(coroutine: Coroutine) -> Any:
    """Await a coroutine; return its result, or the exception that it raised."""
    try:
        return await coroutine
    except Exception as error:  # tools may raise any exception
        return error


def _content(result: Any) -> Any:
    """Convert a result to message content: lists are content blocks, anything else becomes text."""
    return result if isinstance(result, list) else _whole(str(result))


def _whole(text: str) -> str:
    """Escape lone surrogates: a model can generate them in JSON, but no tokenizer accepts them."""
    return text.encode(errors="backslashreplace").decode()


# Environments: `environment_factory` of TRL's GRPOTrainer

Row = dict[str, Any]
_OWN = ("reset", "get_reward")  # methods that the model cannot call


_EMPTY = [{"role": "user", "content": ""}]  # a prompt, to which `reset` of an environment adds


class Environments:
    """The environments of a generation, one per completion. They are reset and reused for the next generation.

    current: the environments of the current rows, in order.
    sees: whether the model has a vision tower, so that `reset` may return images.
    """

    sees: bool = False
    _supplies_prompts: bool = False  # whether there are rows without a prompt

    def __init__(self, given: Callable[[], Any] | Mapping[str, Callable[[], Any]]):
        """
        Args:
            given: a factory, or factories by the name in the rows' `environment` column.

        Raises:
            ValueError: an environment has no `reset` method.
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
        """One environment of each kind."""
        return [made[0] for made in self._made.values()]

    @property
    def rewards(self) -> list[Callable]:
        """A reward function for each environment class that defines `get_reward`."""
        kinds = dict.fromkeys(type(probe) for probe in self.probes)
        return [_reward_of(kind) for kind in kinds if inspect.isfunction(getattr(kind, "get_reward", None))]

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
        return Dataset.from_dict({"prompt": [_EMPTY] * (args.generation_batch_size // args.num_generations)})

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
            return dataset.add_column("prompt", [_EMPTY] * len(dataset))
        return dataset.map(lambda row: row | {"prompt": _EMPTY})

    def check(self, dataset: Any, where: str) -> None:
        """Raise ValueError for the first row of a table without a known environment. Streams, and tables with a
        transform, are checked in `begin`."""
        if not self._several or not isinstance(dataset, Dataset) or has_transform(dataset):
            return
        has = "environment" in dataset.column_names
        for name in dataset.unique("environment") if has else [None]:
            if name not in self._factories:
                row = list(dataset["environment"]).index(name) if has else 0
                raise self._unknown(name, f" Found in row {row} of {where}.")

    def _unknown(self, name: Any, place: str = "") -> ValueError:
        return ValueError(
            f"Example has `environment={name!r}`, which is not among the environments passed to "
            f"`environment_factory`. Expected one of: {list(self._factories)}.{place}"
        )

    def begin(self, rows: Sequence[Row]) -> list[Row]:
        """Reset an environment for each row, and return the rows with their environment in the column `environments`.

        The result of `reset` is appended to the last message of the prompt.

        Raises:
            ValueError: a row names an unknown environment or already has a column `environments`, or `reset` returns
                an image and the model has no vision tower.
        """
        self.current, taken = [], dict.fromkeys(self._factories, 0)
        for row in rows:
            if "environments" in row:
                raise ValueError(
                    "A row has the column 'environments', but the trainer passes its environments to reward functions "
                    "under that name. Rename the column."
                )
            name = row.get("environment") if self._several else None
            if name not in self._factories:
                raise self._unknown(name)
            made = self._made[name]
            if taken[name] == len(made):
                made.append(self._factories[name]())
            self.current.append(made[taken[name]])
            taken[name] += 1
        return [self._reset(*pair) for pair in zip(rows, self.current, strict=True)]

    def _reset(self, row: Row, environment: Any) -> Row:
        columns = {name: row[name] for name in row if name != "environment" or not self._several}
        if self._supplies_prompts and row["prompt"] == _EMPTY:
            del columns["prompt"]
        with raised_by(f"reset() of the environment {type(environment).__name__!r}", [row["prompt"]]):
            told = environment.reset(**columns)
        if told is not None:
            where = f"reset() of the environment {type(environment).__name__}"
            check_no_media([{"role": "user", "content": told}], where, images=self.sees)
            row = row | {"prompt": _with_observation(row["prompt"], told)}
        return row | {"environments": environment}


def methods_of(environment: Any) -> list[Callable]:
    """The public methods of an environment, which the model may call."""
    names = [name for name, _ in inspect.getmembers(type(environment), inspect.isfunction)]
    return [getattr(environment, name) for name in names if name not in _OWN and not name.startswith("_")]


def _with_observation(prompt: list[dict], told: Any) -> list[dict]:
    """Append an observation to the last message. If either of them has content blocks, the other's text becomes a
    block."""
    content = prompt[-1]["content"]
    if isinstance(told, list) and isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if isinstance(told, str) and isinstance(content, list):
        told = [{"type": "text", "text": told}]
    return [*prompt[:-1], {**prompt[-1], "content": content + told}]


def _reward_of(kind: type) -> Callable:
    """A reward function, named after the class, that returns None for environments of other classes."""

    async def later(environments: Sequence[Any], **columns: Any) -> list:
        return [await own.get_reward() if type(own) is kind else None for own in environments]

    def at_once(environments: Sequence[Any], **columns: Any) -> list:
        return [own.get_reward() if type(own) is kind else None for own in environments]

    reward = later if inspect.iscoroutinefunction(kind.get_reward) else at_once
    reward.__name__ = kind.__name__
    return reward


# `rollout_func`

_REQUIRED = ("prompt_ids", "completion_ids", "logprobs")


def written_by(function: Callable[[list], Mapping[str, Any]], prompts: list, vocab_size: int) -> Written:
    """Generate completions with the user's `rollout_func`; equal prompts are adjacent.

    Args:
        function: returns a dict with one item per prompt: `prompt_ids` and `completion_ids`, lists of token ids, and
            `logprobs`, the sampler's log-probability of each completion token (None where it has none), or None for all
            prompts. An optional `env_mask` is 0 for completion tokens that the model did not generate. All other keys
            are passed to the reward functions.
        vocab_size: rows of the model's embedding.

    Raises:
        TypeError: it returns something other than a dict.
        ValueError: a key is missing or clashes with an argument of reward functions, a list has the wrong length, an id
            is out of range, a mask value is not 0 or 1, or a log-probability is not a number up to 0.
    """
    output = function(copy.deepcopy(prompts))
    if not isinstance(output, Mapping):
        raise TypeError(f"rollout_func must return a dict with {', '.join(_REQUIRED)}, got {brief(output)}.")
    if missing := sorted(set(_REQUIRED) - output.keys()):
        raise ValueError(f"rollout_func must return keys {missing} in its output dict.")
    ids, completions = (_ids(name, output[name], prompts, vocab_size) for name in _REQUIRED[:2])
    columns = {name: values for name, values in output.items() if name not in (*_REQUIRED, "env_mask")}
    check_columns(columns, "rollout_func returned the key")
    masks, logps = output.get("env_mask"), output["logprobs"]
    by_model = all_written(completions) if masks is None else _masks(masks, completions)
    sampling = None if logps is None else _logps(logps, completions)
    return Written(ids, completions, by_model, columns, sampling_logps=sampling)


def _ids(name: str, texts: Any, prompts: list, vocab_size: int) -> list[np.ndarray]:
    """The token ids returned under this key, int32 `[tokens]` each."""
    found = _listed(name, texts)
    if len(found) != len(prompts):
        raise ValueError(
            f"rollout_func got {len(prompts)} prompts but returned {len(found)} {name}: return one per prompt. "
            "A prompt with several completions is passed several times."
        )
    return [token_ids(own, vocab_size, f"rollout_func's {name}[{number}]") for number, own in enumerate(found)]


def _masks(masks: Any, completions: Sequence[np.ndarray]) -> list[np.ndarray]:
    """`env_mask` as bool `[tokens]` for each completion."""
    found = _listed("env_mask", masks)
    if [len(_listed(f"env_mask[{number}]", own)) for number, own in enumerate(found)] != list(map(len, completions)):
        raise ValueError("rollout_func returned an env_mask without exactly one number per token of completion_ids.")
    for number, own in enumerate(found):
        if bad := [value for value in own if isinstance(value, str | bytes) or value not in (0, 1)]:
            raise ValueError(f"rollout_func's env_mask[{number}] must be 0 or 1 for each token, got {brief(bad[0])}.")
    return [np.asarray(own).astype(bool) for own in found]


def _logps(logps: Any, completions: Sequence[np.ndarray]) -> list[np.ndarray]:
    """`logprobs` as float32 `[tokens]` for each completion, NaN where there is none."""
    found = [_listed(f"logprobs[{number}]", own) for number, own in enumerate(_listed("logprobs", logps))]
    if list(map(len, found)) != list(map(len, completions)):
        raise ValueError(
            "rollout_func returned logprobs without exactly one number per token of completion_ids: return None where "
            "the sampler has none, or logprobs=None."
        )
    arrays = []
    for number, own in enumerate(found):
        try:
            arrays.append(np.asarray([np.nan if value is None else value for value in own], np.float32))
        except (TypeError, ValueError) as error:
            raise ValueError(f"rollout_func's logprobs[{number}] must be numbers or None, got {brief(own)}.") from error
        if arrays[-1].ndim != 1 or (arrays[-1] > 0).any():
            raise ValueError(
                f"rollout_func's logprobs[{number}] must be one number up to 0 per token, got {brief(own)}."
            )
    return arrays


def _listed(name: str, values: Any) -> list:
    if isinstance(values, str | bytes | Mapping):
        raise ValueError(f"rollout_func must return a list as {name}, got {brief(values)}.")
    try:
        return list(values)
    except TypeError as error:
        raise ValueError(f"rollout_func must return a list as {name}, got {brief(values)}.") from error
