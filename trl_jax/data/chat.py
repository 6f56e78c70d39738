"""Tokenizers and conversations: loading, special tokens, and chat templates for rows."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from trl_jax.core import files
from trl_jax.core.text import brief, printable
from trl_jax.data.chat_templates import (
    ITEM,
    MAX_CHARACTERS,
    MAX_WORK,
    TooLarge,
    apply_chat_template,
    prepare_multimodal_messages,
    render,
)
from trl_jax.data.checks import cell_error

logger = logging.getLogger(__name__)

_EMBEDDING_MULTIPLE = 64  # TRL rounds resized embeddings up to a multiple of this
# Arguments of apply_chat_template in a row that change the tokens but not the text.
ABOUT_TOKENS = {"padding", "truncation", "max_length", "return_tensors", "tokenizer_kwargs", "sanitize_control_tokens"}
_MAX_ERROR_LENGTH = 2000  # characters kept of an error message from a template
_VALID_CONTENT = "a string, or a non-empty list of messages, each with a 'role' and a 'content'"


# Special tokens


def set_special_tokens(tokenizer: Any, *, eos_token: str | None = None, pad_token: str | None = None) -> Any:
    """Set `eos_token` and `pad_token` on the tokenizer and return it.

    The tokenizer is modified in place, as in TRL: scripts read `tokenizer.pad_token` after building the trainer, and it
    is saved with the model. The pad token is `pad_token`, else the tokenizer's own, else the EOS token.

    Raises:
        ValueError: a token is not in the vocabulary, or there is neither a pad nor an EOS token.
    """
    if eos_token is not None:
        _check_in_vocabulary(tokenizer, "eos_token", eos_token)
    pad = pad_token or tokenizer.pad_token or eos_token or tokenizer.eos_token
    if pad is None:
        raise ValueError(
            f"The tokenizer ({type(tokenizer).__name__}) has neither a pad nor an EOS token, so rows cannot be padded. "
            "Pass a token of its vocabulary as pad_token=... in the trainer's config, or as eos_token=... to use it "
            "for both."
        )
    _check_in_vocabulary(tokenizer, "pad_token", pad)
    if eos_token is not None:
        tokenizer.eos_token = eos_token
    tokenizer.pad_token = pad
    return tokenizer


def set_chat_template(tokenizer: Any, path: str, *, rows: int, can_resize: bool = False) -> tuple[int, list[int]]:
    """Set the tokenizer's chat template from a .jinja or .j2 file (UTF-8), or from another tokenizer (folder or name).

    Another tokenizer's added tokens and EOS token are copied with its template.

    Args:
        rows: rows of the model's embedding.
        can_resize: whether the model's embedding can be resized.

    Returns:
        The number of embedding rows that are needed, and the ids of the new tokens. The number is `rows`, unless
        another tokenizer's template is used and the embedding can be resized: then it is the number of tokens, rounded
        up to a multiple of 64, as in TRL.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the tokenizer cannot be loaded, or has more new tokens than the model has spare rows.
    """
    file = Path(path)
    if not is_template_file(path):
        new = clone_into(tokenizer, str(path), rows=rows, multiple=_EMBEDDING_MULTIPLE if can_resize else 0)
        return len(tokenizer.get_vocab()) if can_resize else rows, new
    if not file.is_file():
        raise FileNotFoundError(f"chat_template_path={str(path)!r}: no such file.")
    tokenizer.chat_template = file.read_text(encoding="utf-8")
    return rows, []


def is_template_file(path: str) -> bool:
    """Whether `chat_template_path` names a template; otherwise it names a tokenizer."""
    return Path(path).suffix in (".jinja", ".j2")


def clone_into(tokenizer: Any, source_path: str, *, rows: int, multiple: int = 0) -> list[int]:
    """Copy another tokenizer's chat template, added tokens and EOS token into this one; returns the new tokens' ids.

    The vocabulary is then padded with tokens <extra_id_0> and so on, as in TRL: to a multiple of `multiple`, or, if
    `multiple` is 0 because the embedding cannot be resized, to `rows`.

    Raises:
        ValueError: there are more new tokens than spare rows.
    """
    source, vocabulary = _load_source(source_path), tokenizer.get_vocab()
    new = [token for token in source.added_tokens_decoder.values() if token.content not in vocabulary]
    needed = len(vocabulary) + len(new)
    if multiple:
        rows = -(-needed // multiple) * multiple
    elif needed > rows:
        raise ValueError(
            f"{source_path} adds {len(new)} new tokens ({', '.join(token.content for token in new[:8])}), but the "
            f"model's embedding has {rows} rows and the tokenizer already uses {len(vocabulary)} of them. Resize the "
            "checkpoint's embedding with transformers' resize_token_embeddings first."
        )
    tokenizer.chat_template = source.get_chat_template()
    tokenizer.add_tokens(new)
    tokenizer.eos_token = source.eos_token
    return tokenizer.convert_tokens_to_ids([token.content for token in new] + _add_extra_tokens(tokenizer, rows))


def _load_source(path: str) -> Any:
    try:
        return load_tokenizer(path)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path!r} is neither a .jinja or .j2 file nor a folder or Hub name of a tokenizer that loads without "
            "remote code. To use a template string, save it to a file: "
            "Path('template.jinja').write_text(template)."
        ) from error


def _add_extra_tokens(tokenizer: Any, size: int) -> list[str]:
    """Add <extra_id_n> tokens until the vocabulary has `size`; returns the new ones."""
    added, number = [], 0
    while len(tokenizer.get_vocab()) < size:
        name = f"<extra_id_{number}>"
        if tokenizer.add_tokens(name):
            added.append(name)
        number += 1
    return added


def _check_in_vocabulary(tokenizer: Any, argument: str, token: str) -> None:
    vocabulary = tokenizer.get_vocab()
    if token not in vocabulary:
        raise ValueError(
            f"The specified `{argument}` ('{token}') is not found in the vocabulary of the given `processing_class` "
            f"({type(tokenizer).__name__}, {len(vocabulary):,} tokens). Pass a token of the vocabulary, or first add "
            "this one to the tokenizer and the model."
        )


def warn_of_shared_pad(tokenizer: Any) -> None:
    """If the pad token is the EOS token, warn about the position at which scores are read."""
    if tokenizer.pad_token == tokenizer.eos_token:
        _warn_of_shared_pad_once(tokenizer.pad_token)


@cache
def _warn_of_shared_pad_once(token: str) -> None:
    """Warn once per process and token (cached)."""
    logger.warning(
        "pad_token and eos_token are both %r, so the score is read at the last token before the EOS, as in TRL. Set "
        "RewardConfig(pad_token=...) to another token to read the score at the EOS.",
        token,
    )


def copy_special_ids(config: Any, tokenizer: Any, *, eos: bool) -> None:
    """Copy the tokenizer's pad id into the model's text config and, if `eos`, its EOS id."""
    text = config.get_text_config()
    text.pad_token_id = tokenizer.pad_token_id
    if eos:
        text.eos_token_id = tokenizer.eos_token_id


def copy_ids_to_generation_config(config: Any, tokenizer: Any, *, eos: bool, replaces: bool = False) -> None:
    """Copy the pad id into a generation_config and, if `eos`, insert the EOS id at the front of its EOS ids or, if
    `replaces`, let it replace them, as `clone_chat_template` does."""
    config.pad_token_id = tokenizer.pad_token_id
    eos_ids = _as_list(config.eos_token_id)
    if replaces:
        config.eos_token_id = tokenizer.eos_token_id
    elif eos and tokenizer.eos_token_id not in eos_ids:
        config.eos_token_id = [tokenizer.eos_token_id, *eos_ids]


def align(config: Any, generation_config: Any, tokenizer: Any) -> dict[str, int]:
    """Copy the tokenizer's special tokens into a model's configs, as transformers' Trainer does before training.

    If a config lists several EOS ids, the tokenizer's is inserted at the front. A generation_config always keeps its
    other EOS ids.

    Args:
        generation_config: None for a model that does not generate.

    Returns:
        The ids that changed, by name.
    """
    text, updated = config.get_text_config(), {}
    text_values, generation_values = text.to_dict(), {} if generation_config is None else generation_config.to_dict()
    for name in ("eos_token_id", "bos_token_id", "pad_token_id"):
        token_id = getattr(tokenizer, name)
        ids, generation_ids = _as_list(text_values.get(name)), _as_list(generation_values.get(name))
        if token_id is None or (token_id in ids and (generation_config is None or token_id in generation_ids)):
            continue
        updated[name], is_eos = token_id, name == "eos_token_id"
        is_list = is_eos and isinstance(text_values.get(name), list)
        setattr(text, name, _move_to_front(token_id, ids) if is_list else token_id)
        if generation_config is not None:
            setattr(generation_config, name, _move_to_front(token_id, generation_ids) if is_eos else token_id)
    return updated


def _as_list(ids: int | list[int] | None) -> list[int]:
    return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)


def _move_to_front(token_id: int, ids: list[int]) -> list[int]:
    return [token_id, *(other for other in ids if other != token_id)]


def check_pad(tokenizer: Any, vocab_size: int) -> None:
    """Raise ValueError if the model has no embedding for the pad token."""
    if tokenizer.pad_token_id >= vocab_size:
        raise ValueError(
            f"The pad token {tokenizer.pad_token!r} has id {tokenizer.pad_token_id}, but the model has embeddings only "
            f"for ids 0 to {vocab_size - 1}. Use a token that the model knows, such as tokenizer.pad_token = "
            "tokenizer.eos_token, or resize the checkpoint's embedding first."
        )


# Texts and conversations in rows


def is_messages(value: Any) -> bool:
    """Whether a value is a non-empty list of messages, each with a role."""
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict) and "role" in value[0]


def with_eos(text: str, tokenizer: Any, where: str) -> str:
    """Append the tokenizer's EOS token unless the text already ends with it, as TRL does.

    Raises:
        ValueError: the tokenizer has no EOS token; `where` names the row.
    """
    if tokenizer.eos_token is None:
        raise ValueError(
            f"{where} is plain text, to which the EOS token is appended, but the tokenizer "
            f"({_class_name(tokenizer)}) has none. Pass a token of its vocabulary as eos_token=... in the trainer's "
            "config."
        )
    return text if text.endswith(tokenizer.eos_token) else text + tokenizer.eos_token


def template_options(row: dict[str, Any], where: str) -> dict[str, Any]:
    """The chat template arguments in a row: its `tools` and its `chat_template_kwargs`.

    Raises:
        ValueError: they have the wrong type; `where` names the row.
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


def prompt_options(prompt: list[dict[str, Any]]) -> dict[str, bool]:
    """The template options with which a prompt is rendered so that the answer can follow.

    Raises:
        ValueError: the role of its last message is not user, tool or assistant.
    """
    role = prompt[-1]["role"]
    if role not in ("user", "tool", "assistant"):
        raise ValueError(f"Invalid role in the last message: {role}. It must be user, tool or assistant.")
    continues = role == "assistant"
    return {"add_generation_prompt": not continues, "continue_final_message": continues}


def check_unicode(content: Any, column: str, where: str) -> None:
    """Raise ValueError for a lone surrogate (from broken JSON escapes), which no tokenizer accepts, and for an invalid
    message."""
    messages = [{"role": "", "content": content}] if isinstance(content, str) else content
    for message in messages:
        if not isinstance(message, dict) or message.get("role") is None is message.get("from"):
            raise cell_error(where, column, message, "messages, each a dict with role and content")
    for text in (value for message in messages for value in message.values()):
        try:
            str(text).encode()
        except UnicodeEncodeError as error:
            excerpt = ascii(text[max(0, error.start - 20) : error.start + 1])
            raise ValueError(
                f"{where}, column {column!r}: found a lone surrogate at character {error.start:,}, at the end of "
                f'{excerpt}, which is not valid Unicode. Drop surrogates with text.encode(errors="ignore").decode().'
            ) from error


def check_template(tokenizer: Any, options: dict[str, Any], where: str) -> None:
    """Raise ValueError if there is no chat template for a conversation; `where` names the row."""
    if tokenizer.chat_template is None and "chat_template" not in options:
        raise ValueError(
            f"{where} is a conversation, but the tokenizer ({_class_name(tokenizer)}) has no chat template. "
            'Pass one with chat_template_path="template.jinja" in the config, or set tokenizer.chat_template.'
        )


def _class_name(tokenizer: Any) -> str:
    """The class of the user's tokenizer, for errors."""
    return type(tokenizer.tokenizer if isinstance(tokenizer, ProcessorTokenizer) else tokenizer).__name__


def rendered(tokenizer: Any, messages: list[dict[str, Any]], where: str, **options: Any) -> Any:
    """Call `tokenizer.apply_chat_template(messages, **options)` with limits; `where` names the row in errors.

    Raises:
        ValueError: the template exceeds the limits of `data.chat_templates`.
    """
    with errors_of_template(where):
        return apply_chat_template(tokenizer, messages, **options)


def rendered_spans(
    tokenizer: Any, messages: list[dict[str, Any]], where: str, chat_template: str | None = None
) -> tuple[str, list[tuple[int, int]]]:
    """A conversation as text, and the spans of characters that its template marks as assistant content.

    Raises:
        ValueError: as `rendered`.
    """
    template = tokenizer.get_chat_template(chat_template)
    with errors_of_template(where):
        return render(template, messages, spans=True, **tokenizer.special_tokens_map)


class ProcessorTokenizer:
    """A tokenizer that reads conversations as the processor of a vision-language model does.

    The tokens that the tokenizer adds to texts are added, unless the conversation begins with the BOS token. Everything
    else comes from the tokenizer.
    """

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        if name == "tokenizer" or name.startswith("__"):  # unpickling asks before there is a tokenizer
            raise AttributeError(name)
        return getattr(self.tokenizer, name)

    def __call__(self, *texts: Any, **options: Any) -> Any:
        return self.tokenizer(*texts, **options)

    def apply_chat_template(
        self, messages: list[dict[str, Any]], *, tokenize: bool = True, return_dict: bool = True, **options: Any
    ) -> Any:
        """The conversation as text, as token ids, or as a dict with `input_ids` and, if requested, `assistant_masks`.

        Raises:
            ValueError: masks are requested, and special tokens change how the tokenizer splits the text.
        """
        messages = self._prepare(messages)
        if not tokenize:
            return apply_chat_template(self.tokenizer, messages, tokenize=False, **options)
        encoded = self._tokenize(messages, **options)
        return encoded if return_dict else encoded["input_ids"]

    def _tokenize(
        self, messages: list[dict[str, Any]], *, return_assistant_tokens_mask: bool = False, **options: Any
    ) -> dict[str, list[int]]:
        text_options = {name: options[name] for name in options.keys() - ABOUT_TOKENS}
        text = apply_chat_template(self.tokenizer, messages, tokenize=False, **text_options)
        if ABOUT_TOKENS.isdisjoint(options) and not return_assistant_tokens_mask:
            return {"input_ids": self.ids_of([text])[0]}
        options |= {"return_dict": True, "return_assistant_tokens_mask": return_assistant_tokens_mask}
        encoded = apply_chat_template(self.tokenizer, messages, tokenize=True, **options)
        prefix, suffix = self._special_tokens_around(text)
        ids = {"input_ids": [*prefix, *encoded["input_ids"], *suffix]}
        if not return_assistant_tokens_mask:
            return ids
        return ids | {"assistant_masks": [0] * len(prefix) + list(encoded["assistant_masks"]) + [0] * len(suffix)}

    def ids_of(self, texts: list[str]) -> list[list[int]]:
        """Token ids of rendered conversations. They are tokenized together, which is faster."""
        bos, ids = self.tokenizer.bos_token, [[]] * len(texts)
        has_bos = [bos is not None and text.startswith(bos) for text in texts]
        for special in (False, True):
            indices = [index for index, starts_with_bos in enumerate(has_bos) if starts_with_bos != special]
            if indices:
                encoded = self.tokenizer(text=[texts[index] for index in indices], add_special_tokens=special)
                for index, token_ids in zip(indices, encoded["input_ids"], strict=True):
                    ids[index] = token_ids
        return ids

    def _prepare(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return messages

    def _special_tokens_around(self, text: str) -> tuple[list[int], list[int]]:
        """The special tokens before and after the tokens of a rendered conversation."""
        [with_special], plain = self.ids_of([text]), self.tokenizer(text=text, add_special_tokens=False)["input_ids"]
        for start in range(len(with_special) - len(plain) + 1):
            if with_special[start : start + len(plain)] == plain:
                return with_special[:start], with_special[start + len(plain) :]
        raise ValueError(
            f"The tokenizer ({type(self.tokenizer).__name__}) splits {brief(text)} differently when it adds special "
            "tokens, so the tokens of the assistant cannot be found. Use a fast tokenizer, or a chat template that "
            "begins with the BOS token."
        )


class PartsTokenizer(ProcessorTokenizer):
    """A `ProcessorTokenizer` that makes message contents lists of parts, because templates of vision-language models
    may skip plain strings."""

    def _prepare(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return prepare_multimodal_messages(messages)


def check_contents(row: dict[str, Any], columns: list[str], where: str, hint: str) -> None:
    """Raise ValueError unless these columns of a row are all texts or all conversations; `hint` ends the error."""
    for column in columns:
        if not isinstance(row[column], str) and not is_messages(row[column]):
            raise cell_error(where, column, row[column], _VALID_CONTENT)
    kinds = {column: "a conversation" if is_messages(row[column]) else "text" for column in columns}
    if len(set(kinds.values())) > 1:
        described = ", ".join(f"{column!r} is {kind}" for column, kind in kinds.items())
        raise ValueError(f"{where}: {described}; all must have the same form. {hint}")


@contextmanager
def errors_of_template(where: str) -> Iterator[None]:
    """Name the row, given by `where`, in any exception that its chat template raises.

    Raises:
        ValueError: the template exceeds the limits of `data.chat_templates`.
    """
    try:
        yield
    except TooLarge as error:
        raise ValueError(
            f"{where}: the tokenizer's chat template produces a text or number that is too large, or runs too many "
            f"steps; the limits are {MAX_CHARACTERS:,} characters and {MAX_WORK // ITEM:,} steps. Fix the template, "
            "or leave the row out."
        ) from error
    except Exception as error:  # templates may raise any exception
        error.args = tuple(printable(arg[:_MAX_ERROR_LENGTH]) if isinstance(arg, str) else arg for arg in error.args)
        error.add_note(f"{where}: raised by the tokenizer's chat template.")
        raise


# Loading


def load_tokenizer(
    path: str | Path,
    config: Any = None,
    *,
    trust_remote_code: bool = False,
    revision: str | None = None,
    sides: Mapping[str, str] | None = None,
    with_processor: bool = False,
) -> Any:
    """Load a tokenizer from a folder or Hub repository. Remote code only runs if the user allows it.

    Args:
        config: transformers' config of the model. With `trust_remote_code` it determines the tokenizer class, because
            AutoTokenizer would otherwise run the remote code of the config to find it.
        trust_remote_code: allow the code that `auto_map` in tokenizer_config.json names.
        revision: revision of the repository; None: the main branch.
        sides: `padding_side` and `truncation_side`; None keeps the tokenizer's own.
        with_processor: the chat template in files of the folder's processor, if any, replaces the tokenizer's, as in
            TRL, which loads the processor.

    Raises:
        ValueError: the tokenizer needs remote code and `trust_remote_code` is False, or its files are nested too
            deeply.
    """
    from transformers import AutoTokenizer

    # With trust_remote_code=None, transformers would prompt on the terminal, or read the answer from a pipe.
    options = {"config": config} if trust_remote_code else {}
    options |= {} if revision is None else {"revision": revision}
    options |= sides or {}
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=bool(trust_remote_code), **options)
    except RecursionError as error:
        raise ValueError(f"{path}: a JSON file of the tokenizer is nested too deeply. Download it again.") from error
    template = getattr(tokenizer, "chat_template", "")  # mistral_common's tokenizers lack the field
    if template is None or (template and with_processor):
        tokenizer.chat_template = _processor_template(Path(path)) or template
    return tokenizer


def _processor_template(folder: Path) -> str | None:
    """The chat template in files that only processors read; they prefer it to chat_template.jinja."""
    config, older_file = folder / "processor_config.json", folder / "chat_template.json"
    template = files.read(config).get("chat_template") if config.is_file() else None
    if template is None and older_file.is_file():
        template = files.read(older_file)["chat_template"]
    return default_template(template)


def default_template(template: str | Mapping[str, str] | None) -> str | None:
    """The template that a processor uses of its `chat_template`, which may be several by name."""
    return template.get("default") if isinstance(template, Mapping) else template
