"""Texts and conversations of any task's rows: what they must be, EOS, and chat templates with a row's options."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from trl_jax.core.printable import printable
from trl_jax.data.rows.checks import cell_error
from trl_jax.data.rows.templates.limits import ITEM, MAX_CHARACTERS, MAX_WORK, TooLarge
from trl_jax.data.rows.templates.rendering import apply_chat_template

# Arguments of apply_chat_template that a row may pass and that change the tokens, not the text.
ABOUT_TOKENS = {"padding", "truncation", "max_length", "return_tensors", "tokenizer_kwargs", "sanitize_control_tokens"}
_SHOWN = 2000  # characters of what a template raises
_WANTED = "a string, or a non-empty list of messages, each with a 'role' and a 'content'"


def is_messages(value: Any) -> bool:
    """Whether a value is a non-empty list of messages, each with a role."""
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict) and "role" in value[0]


def with_eos(text: str, tokenizer: Any, where: str) -> str:
    """End a text with the tokenizer's EOS token, unless it ends so already, as TRL does.

    Raises:
        ValueError: the tokenizer has no EOS token; `where` names the row.
    """
    if tokenizer.eos_token is None:
        raise ValueError(
            f"{where} is plain text, which ends with the EOS token, and the tokenizer "
            f"({type(tokenizer).__name__}) has none. Name a token of its vocabulary with "
            "eos_token=... in the trainer's config."
        )
    return text if text.endswith(tokenizer.eos_token) else text + tokenizer.eos_token


def template_options(row: dict[str, Any], where: str) -> dict[str, Any]:
    """Keyword arguments of the chat template that a row has: its tools, and its `chat_template_kwargs`.

    Raises:
        ValueError: they are no list and no dict; `where` names the row.
    """
    tools = row.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except json.JSONDecodeError as error:
            raise cell_error(where, "tools", tools, "a list, or a list in JSON") from error
    options = row.get("chat_template_kwargs")
    if not isinstance(options, dict | None):
        raise cell_error(where, "chat_template_kwargs", options, "a dict")
    return {"tools": tools, **(options or {})}


def opening(prompt: list[dict[str, Any]]) -> dict[str, bool]:
    """The template's options that leave a prompt open for its answer.

    Raises:
        ValueError: the role of its last message is not user, tool or assistant.
    """
    role = prompt[-1]["role"]
    if role not in ("user", "tool", "assistant"):
        raise ValueError(f"Invalid role in the last message: {role}; wanted user, tool or assistant.")
    continues = role == "assistant"
    return {"add_generation_prompt": not continues, "continue_final_message": continues}


def check_unicode(found: Any, column: str, where: str) -> None:
    """Raise ValueError for a lone surrogate (half a UTF-16 pair, from broken JSON escapes), which no tokenizer
    takes, and for a message that is none."""
    messages = [{"role": "", "content": found}] if isinstance(found, str) else found
    for message in messages:
        if not isinstance(message, dict) or message.get("role") is None is message.get("from"):
            raise cell_error(where, column, message, "messages alone, each a dict with role and content")
    for text in (value for message in messages for value in message.values()):
        try:
            str(text).encode()
        except UnicodeEncodeError as error:
            shown = ascii(text[max(0, error.start - 20) : error.start + 1])
            raise ValueError(
                f"{where}, column {column!r}: character {error.start:,} is half of one, at the end of {shown}, wanted "
                'Unicode text. Drop such halves: text.encode(errors="ignore").decode().'
            ) from error


def check_template(tokenizer: Any, options: dict[str, Any], where: str) -> None:
    """Raise ValueError for a conversation, named `where`, without a chat template."""
    if tokenizer.chat_template is None and "chat_template" not in options:
        raise ValueError(
            f"{where} is a conversation and the tokenizer ({type(tokenizer).__name__}) has no chat template. "
            'Pass one with chat_template_path="template.jinja" in the config, or set tokenizer.chat_template.'
        )


def rendered(tokenizer: Any, messages: list[dict[str, Any]], where: str, **options: Any) -> Any:
    """Call `tokenizer.apply_chat_template(messages, **options)` within limits; errors name what is rendered by `where`.

    Raises:
        ValueError: the template makes more than `rendering` allows.
    """
    with errors_of_template(where):
        return apply_chat_template(tokenizer, messages, **options)


def check_contents(row: dict[str, Any], columns: list[str], where: str, hint: str) -> None:
    """Raise ValueError unless these columns of a row are all texts, or all conversations; `hint` says the way out."""
    for column in columns:
        if not isinstance(row[column], str) and not is_messages(row[column]):
            raise cell_error(where, column, row[column], _WANTED)
    kinds = {column: "a conversation" if is_messages(row[column]) else "text" for column in columns}
    if len(set(kinds.values())) > 1:
        found = ", ".join(f"{column!r} is {kind}" for column, kind in kinds.items())
        raise ValueError(f"{where}: {found}; they must be the same. {hint}")


@contextmanager
def errors_of_template(where: str) -> Iterator[None]:
    """Name the row, by `where`, in whatever its chat template raises.

    Raises:
        ValueError: the template makes more than `rendering` allows.
    """
    try:
        yield
    except TooLarge as error:
        raise ValueError(
            f"{where}: the tokenizer's chat template makes a text or a number that is too large, or takes too many "
            f"steps: wanted at most {MAX_CHARACTERS:,} characters and {MAX_WORK // ITEM:,} steps. Correct the "
            "template, or leave the row out."
        ) from error
    except Exception as error:  # a template may raise anything; the row's name is added
        error.args = tuple(printable(part[:_SHOWN]) if isinstance(part, str) else part for part in error.args)
        error.add_note(f"{where}: raised by the tokenizer's chat template.")
        raise
