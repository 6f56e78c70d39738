"""Chat templates that mark what the assistant says: TRL's where trl is installed, else derived and tried on talks."""

from __future__ import annotations

import importlib.util
import os
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from trl_jax.data.rows.templates.marked import SEPARATOR, marked, separated
from trl_jax.data.rows.templates.rendering import apply_chat_template, render

_THINK = "<think>"
# Words that stand in no template, by who says them; an argument of a tool is the assistant's.
_ASKED, _TOLD, _RULE = "user_asks_{}_4c1d", "tool_tells_{}_9b2d", "system_rules_1e8f"
_SAID, _THOUGHT, _VALUE = "assistant_says_{}_7f3a", "assistant_thinks_{}_5c1e", "assistant_calls_3d2b"
_OTHERS = re.compile(r"(?:user_asks|tool_tells|system_rules)_\w+")
_OWN = re.compile(r"assistant_(?:says|thinks|calls)_\w+")
_UNENDED = re.compile(rf"(?:{_OWN.pattern})\s*\Z")  # the assistant would not learn to stop
_TOKENS = {f"{name}_token": f"\x02{name}\x03" for name in ("bos", "eos", "pad", "unk")}


_PLAIN = ("user", "assistant")
_TALKS = (
    (*_PLAIN, *_PLAIN),
    ("system", *_PLAIN, *_PLAIN, "user"),
    ("user", "thinking", "user", "thinking"),
    ("user", "tagged", "user", "tagged"),
    ("user", "calling", "tool", "assistant", *_PLAIN),
)


def has_generation_markers(chat_template: str | dict[str, str]) -> bool:
    """Whether a template marks what the assistant says; of several by name, the one called "default"."""
    text = chat_template["default"] if isinstance(chat_template, dict) else chat_template
    return re.search(r"\{%-?\s*generation\s*-?%\}", text) is not None


def training_template(chat_template: str | dict[str, str]) -> str:
    """A template that renders an assistant's turn as this one, and marks what the assistant says.

    TRL has one beside each template that it knows, and some of them keep thoughts that the template itself leaves out
    of earlier turns. Others are derived by `derived`.

    Raises:
        ValueError: TRL has none, or is not installed, and none can be derived.
    """
    text = chat_template["default"] if isinstance(chat_template, dict) else chat_template
    found = _of_trl(text) or derived(text)
    if found is None:
        raise ValueError(
            "The chat template is not training-compatible (missing prefix-preservation or `{% generation %}` markers) "
            "and patching is not supported for this template. Change it by hand: put what the assistant says, and the "
            "token that ends its turn, between `{% generation %}` and `{% endgeneration %}`, and pass it with "
            "chat_template_path. (With trl installed, its training templates are found.)"
        )
    return found


def stop_token_is_trained(tokenizer: Any, chat_template: str | None) -> bool:
    """Whether the last token that a template marks, but for whitespace, is an added one, which ends the turn.

    None is the tokenizer's own template. One that takes no plain talk is taken to leave the token out, as in TRL.
    """
    talk = _talk("str", "user", "assistant", "user")
    options = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
    try:
        found = apply_chat_template(tokenizer, talk, chat_template=chat_template, **options)
    except (TemplateError, TypeError, ValueError):
        return False
    said = [token for token, own in zip(found["input_ids"], found["assistant_masks"], strict=True) if own]
    last = next((token for token in reversed(said) if tokenizer.decode([token]).strip()), None)
    return last in tokenizer.get_added_vocab().values()


def _of_trl(chat_template: str) -> str | None:
    """TRL has a template for training beside each that it knows: `NAME.jinja` and `NAME_training.jinja`."""
    trl = importlib.util.find_spec("trl")
    folders = [] if trl is None else [Path(place) / "chat_templates" for place in trl.submodule_search_locations or ()]
    for known in (file for folder in folders for file in folder.glob("*.jinja")):
        better = known.with_name(f"{known.stem}_training.jinja")
        if better.is_file() and known.read_text(encoding="utf-8") == chat_template:
            return better.read_text(encoding="utf-8")
    return None


def derived(chat_template: str) -> str | None:
    """The template with what the assistant says marked; None unless it is unmarked and stands the test of a few talks.

    In each of them it must render the same text, mark all that the assistant says and nothing that others do, and
    render the beginning of a talk in the same way when the talk goes on. Of a template that leaves thoughts out of
    earlier turns, or puts them into the last one alone, every turn is rendered as the last: the same text where there
    is one turn.
    """
    if has_generation_markers(chat_template):
        return None
    try:
        kind = next(kind for kind in ("str", "parts") if _SAID.format(1) in _text(chat_template, _talk(kind, *_PLAIN)))
        header = _header(chat_template, kind)
        if header is None:
            return None
        tried = ((marked(chat_template, header, as_last=as_last), as_last) for as_last in (False, True))
        return next((found for found, as_last in tried if _stands(chat_template, found, kind, as_last)), None)
    except Exception:  # a template may raise anything, and then it is none that we know how to mark
        return None


def _talk(kind: str, *roles: str) -> list[dict[str, Any]]:
    """A talk in which every message has words of its own; content is a text, or a list of parts."""
    return [_message(kind, role, number) for number, role in enumerate(roles)]


def _message(kind: str, role: str, number: int) -> dict[str, Any]:
    contents = {"user": _ASKED, "tool": _TOLD, "system": _RULE, "tagged": f"{_THINK}\n{_THOUGHT}\n</think>\n\n{_SAID}"}
    content: Any = contents.get(role, _SAID).format(*[number] * 2)
    if kind == "parts":
        content = [{"type": "text", "text": content}]
    message = {"role": role if role in ("user", "tool", "system") else "assistant", "content": content}
    if role == "thinking":
        message["reasoning_content"] = _THOUGHT.format(number)
    if role == "calling":
        call = {"name": "look", "arguments": {"at": _VALUE}}
        message["tool_calls"] = [{"type": "function", "function": call}]
    return message | ({"name": "look"} if role == "tool" else {})


def _text(template: str, talk: list[dict[str, Any]], **options: Any) -> str:
    return render(template, talk, **_TOKENS, **options)[0]


def _header(template: str, kind: str) -> str | None:
    """The text that a template renders before the assistant says something; None where turns begin in several ways.

    It is what the generation prompt adds, without the tag that opens a thought. Where a turn has it again in its
    middle, the assistant writes it itself, and it is no header. Where an expression writes its end along with what the
    assistant says, only what is before that expression is the header: so TRL's templates have it.
    """
    asked = _text(template, _talk(kind, "user"))
    prompted = _text(template, _talk(kind, "user"), add_generation_prompt=True)
    start = len(os.path.commonprefix([asked, prompted]))
    prompt, answered = prompted[start:], _text(template, _talk(kind, *_PLAIN))
    header = prompt.split(_THINK)[0]
    same = answered.startswith(_THINK if _THINK in prompt else "", start + len(header))
    if asked[start:] not in ("", _TOKENS["eos_token"]) or not header or not same:
        return None
    if not answered.startswith(asked[:start] + header):
        return None
    if _text(template, _talk(kind, "user", "thinking"))[start:].count(header) > 1:
        return ""
    ends = [_content_starts(template, _talk(kind, "user", role)) - start for role in ("assistant", "calling")]
    return header[: min([end for end in ends if end > 0], default=len(header))]


def _content_starts(template: str, talk: list[dict[str, Any]]) -> int:
    """The place in the text where the expression starts that writes what the assistant says first; 0: it cannot be
    said."""
    try:
        parts = _text(separated(template), talk).split(SEPARATOR)
    except Exception:  # no tools in this template
        return 0
    before = 0
    for part in parts:
        if _OWN.search(part):
            return before
        before += len(part)
    return 0


def _stands(template: str, found: str, kind: str, as_last: bool) -> bool:
    return all(_stands_in(template, found, _talk(kind, *roles), as_last) for roles in _TALKS)


def _stands_in(template: str, found: str, talk: list[dict[str, Any]], as_last: bool) -> bool:
    """Whether a marked template is right in a talk, or the template itself takes no such talk."""
    try:
        text = _text(template, talk)
    except Exception:  # a template may raise anything where it takes no such talk
        return _TALKS[0] != tuple(message["role"] for message in talk)
    other, spans = render(found, talk, spans=True, **_TOKENS)
    if as_last:  # earlier turns may differ
        text = other
        if _UNENDED.search("".join(text[start:end] for start, end in spans)):
            return False
    edges = [0, *(edge for span in spans for edge in span), len(text)]
    outside = "".join(text[start:end] for start, end in list(pairwise(edges))[::2])
    inside = "".join(text[start:end] for start, end in spans)
    said = {word for message in talk if "tool_calls" not in message for word in _OWN.findall(str(message["content"]))}
    ends = [i + 1 for i, message in enumerate(talk) if message["role"] == "assistant"]
    begun = [_text(template, talk[: ends[0]]), *(_text(found, talk[:end]) for end in ends)]
    goes_on = all(text.startswith(start.removesuffix(_TOKENS["eos_token"])) for start in begun)
    right = other == text and goes_on and said <= set(_OWN.findall(inside))
    return right and not _OWN.search(outside) and not _OTHERS.search(inside)
