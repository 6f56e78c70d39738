"""Completions in turns: the model calls functions, reads what they answer, and goes on. TRL's `tools` and
`environment_factory` of GRPO."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trl_jax.core.printable import brief
from trl_jax.data.rows.chat import rendered
from trl_jax.data.rows.checks import check_no_media, token_ids
from trl_jax.data.rows.prompts import parsed_message
from trl_jax.rollout.coroutines import EventLoop, is_async
from trl_jax.rollout.environments import Environments, methods_of
from trl_jax.rollout.written import Written

Message = dict[str, Any]
Functions = Mapping[str, Callable[..., Any]]


@dataclass
class Turns:
    """A completion that is being written.

    functions: which the model may call, by name. prompt: its token ids. tokens: those behind it, answers among them.
    by_model: of each of these, whether the model wrote it. messages: the model's and the tools', in turn.
    """

    functions: Functions
    prompt: list[int]
    tokens: list[int]
    by_model: list[bool]
    messages: list[Message]

    @property
    def calls(self) -> list[Any]:
        """Of tools, in the last message."""
        return self.messages[-1].get("tool_calls") or []

    def answered(self, answers: list[Message], tokens: list[int]) -> None:
        self.messages += answers
        self.tokens, self.by_model = self.tokens + tokens, self.by_model + [False] * len(tokens)

    def written(self, tokens: list[int], message: Message | None) -> None:
        self.messages += [] if message is None else [message]
        self.tokens, self.by_model = self.tokens + tokens, self.by_model + [True] * len(tokens)


@dataclass
class Calls:
    """Calls functions for a model, and counts how often it did and failed."""

    calls: int = 0
    failures: int = 0
    _loop: EventLoop = field(default_factory=EventLoop)

    def answers(self, calls: Sequence[Any], functions: Functions) -> list[Message]:
        """A message for each call of a model's message, those of async functions last, which run beside each other.
        What goes wrong is an answer, too."""
        done: list[tuple[str, Any]] = []
        waiting: list[tuple[str, Coroutine]] = []
        for call in calls:
            self.calls += 1
            name = _name(call)
            try:
                function = _called(call, name, functions)
                result = function(**call["function"]["arguments"])
                (waiting if is_async(function) else done).append((name, result))
            except Exception as error:  # whatever a script's own function raises
                done.append((name, self._failed(error)))
        results = self._loop.run([_outcome(coroutine) for _, coroutine in waiting]) if waiting else []
        for (name, _), result in zip(waiting, results, strict=True):
            done.append((name, self._failed(result) if isinstance(result, Exception) else result))
        return [{"role": "tool", "name": _whole(name), "content": _content(result)} for name, result in done]

    def metrics(self, completions: int) -> dict[str, float]:
        """Calls of a completion and the part of them that failed, since this was asked last."""
        calls, failures, self.calls, self.failures = self.calls, self.failures, 0, 0
        frequency = np.float32(calls) / np.float32(completions)
        failed = np.float32(failures) / np.float32(calls) if calls else 0.0
        return {"tools/call_frequency": float(frequency), "tools/failure_frequency": float(failed)}

    def _failed(self, error: Exception) -> dict[str, str]:
        self.failures += 1
        return {"error": str(error)}


@dataclass(frozen=True)
class Tools:
    """How completions go on behind calls of tools.

    functions: by name. environments: whose methods are tools of the completions in them; None: there are none.
    template_options: further arguments of the chat template. most_turns: in which tools are called; None: any number.
    longest: tokens of a completion, answers included. positions: what a text has fewer tokens than before a turn; None:
    any number. vocab_size: rows of the model's embedding.
    """

    functions: Functions
    environments: Environments | None
    tokenizer: Any
    template_options: Mapping[str, Any]
    most_turns: int | None
    longest: int
    positions: int | None
    vocab_size: int
    calls: Calls = field(default_factory=Calls)

    @property
    def of_each(self) -> list[Functions] | None:
        """The functions of each completion of the rows that were begun last; None where they are the same of all."""
        if self.environments is None:
            return None
        return [self.functions | by_name(methods_of(environment)) for environment in self.environments.current]

    def completed(
        self, prompt_ids: Sequence[list[int]], completion_ids: Sequence[np.ndarray], complete: Callable
    ) -> Written:
        """The completions with all their turns.

        Args:
            completion_ids: the first turn of each.
            complete: token ids -> the model's next tokens, int32 arrays.
        """
        functions = self.of_each or [self.functions] * len(completion_ids)
        first = zip(functions, prompt_ids, completion_ids, strict=True)
        every = [self._begun(of_one, list(prompt), own.tolist()) for of_one, prompt, own in first]
        waiting, turn = [turns for turns in every if turns.calls], 0
        while waiting and (self.most_turns is None or turn < self.most_turns):
            waiting = [turns for turns in waiting if self._answer(turns)]
            if waiting:
                texts = [turns.prompt + turns.tokens for turns in waiting]
                for turns, text, tokens in zip(waiting, texts, complete(texts), strict=True):
                    tokens = tokens[: self.longest - len(turns.tokens)].tolist()
                    turns.written(tokens, self._message(turns.functions, tokens, text) if tokens else None)
            waiting, turn = [turns for turns in waiting if turns.calls], turn + 1
        ids = [np.asarray(turns.tokens, np.int32) for turns in every]
        by_model = [np.asarray(turns.by_model, bool) for turns in every]
        messages = [turns.messages for turns in every]
        return Written(prompt_ids, ids, by_model, messages=messages, metrics=self.calls.metrics(len(every)))

    def _begun(self, functions: Functions, prompt: list[int], tokens: list[int]) -> Turns:
        return Turns(functions, prompt, tokens, [True] * len(tokens), [self._message(functions, tokens, prompt)])

    def _message(self, functions: Functions, tokens: list[int], before: list[int]) -> Message:
        return parsed_message(tokens, before, self.tokenizer, list(functions.values()))

    def _answer(self, turns: Turns) -> bool:
        """Call the tools of the last message; whether there is room for what they answer. Without, the completion ends
        where it called them."""
        answers = self.calls.answers(turns.calls, turns.functions)
        for answer in answers:
            check_no_media([answer], f"The answer of the tool {answer['name']!r}")
        tokens = self._tokens_of(answers)
        if tokens:
            token_ids(tokens, self.vocab_size, f"The answer of {', '.join(repr(own['name']) for own in answers)}")
        length = len(turns.tokens) + len(tokens)
        if length > self.longest or (self.positions is not None and len(turns.prompt) + length >= self.positions):
            return False
        turns.answered(answers, tokens)
        return True

    def _tokens_of(self, answers: list[Message]) -> list[int]:
        """The tokens between the end of a message that calls tools and the beginning of the model's next one."""
        call = {"type": "function", "function": {"name": answers[0]["name"], "arguments": {}}}
        talk = [{"role": "user", "content": "-"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        before = self._rendered(talk, add_generation_prompt=False)
        ends = [place for place, token in enumerate(before) if token == self.tokenizer.eos_token_id]
        before = before[: ends[-1] + 1] if ends else before  # some templates have a line's end behind it
        whole = self._rendered(talk + answers, add_generation_prompt=True)
        if whole[: len(before)] != before:
            raise ValueError(
                "The chat template writes a message that calls tools otherwise once their answers follow, so these "
                "have no tokens of their own. Pass a template whose messages do not depend on those behind them."
            )
        return whole[len(before) :]

    def _rendered(self, talk: list[Message], **options: Any) -> list[int]:
        options |= {"tokenize": True, "return_dict": False, **self.template_options}
        return list(rendered(self.tokenizer, talk, f"The answers of tools {brief(talk[2:], 300)}", **options))


def by_name(functions: Sequence[Callable]) -> dict[str, Callable]:
    """Functions by the names that a model calls them by."""
    return {function.__name__: function for function in functions}


def _called(call: Any, name: str, functions: Functions) -> Callable[..., Any]:
    if call.get("type", "function") != "function":
        raise ValueError(f"Unsupported tool call type: {call['type']}")
    if name not in functions:
        raise ValueError(f"Tool {name} not found.")
    return functions[name]


def _name(call: Any) -> str:
    """The name of the function that is called."""
    return call["function"]["name"] if "function" in call else call.get("name", "unknown")


async def _outcome(coroutine: Coroutine) -> Any:
    """The result, or the exception that was raised."""
    try:
        return await coroutine
    except Exception as error:  # whatever a script's own function raises
        return error


def _content(result: Any) -> Any:
    """A list is content in blocks, all else text."""
    return result if isinstance(result, list) else _whole(str(result))


def _whole(text: str) -> str:
    """The text with halves of UTF-16 pairs as escapes: a model can write them in JSON, and no tokenizer takes them."""
    return text.encode(errors="backslashreplace").decode()
