"""Rewrite a chat template so that it marks what the assistant says with `{% generation %}`, as transformers wants it.

The template's own words stay. Its text between tags becomes string literals, so that tags can be put anywhere without
changing the whitespace that jinja2 trims around them. Each loop gets two bodies: for messages of the assistant, one
that collects what its own renders, and marks it behind the header of the turn; for all else, its own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import NamedTuple

from jinja2 import Environment

SEPARATOR = "\x00"
_TURN = "turn_of_assistant"
# Whether the message is the last, or stands behind a place that was found before: the last question, mostly.
_PLACE = re.compile(r"\bloop\.last\b|\bloop\.index0?\s*>=?\s*\w+(?:\.\w+)?")
_END = (
    "{% if messages[-1]['role'] == 'assistant' %}{% generation %}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ eos_token }}{% endif %}"
)


class _Piece(NamedTuple):
    """A tag, an expression or a text of a template, as source. words: of a tag or an expression; of a text none."""

    source: str
    tag: str = ""
    words: tuple[str, ...] = ()


def separated(template: str) -> str:
    """The template with `SEPARATOR` behind each text and each expression that it renders."""
    behind = "{{ " + json.dumps(SEPARATOR) + " }}"
    return "".join(piece.source + behind * (not piece.tag) for piece in _pieces(template))


def marked(template: str, header: str, *, as_last: bool = False) -> str:
    """The template with `{% generation %}` around all of an assistant's turn but its header.

    So is the EOS token that ends a conversation behind the last turn.

    Args:
        header: what is rendered before the assistant says something.
        as_last: each turn of the assistant is rendered as the last of its conversation is: thoughts of earlier turns
            stay where the template leaves them out.

    Raises:
        ValueError: a loop does not end.
    """
    found, parts, at = list(_pieces(template)), [], 0
    while at < len(found):
        piece = found[at]
        if piece.tag == "for" and piece.words[2] == "in":  # over one variable
            end = _end_of_body(found, at)
            body = found[at + 1 : end]
            own = [_as_last(one) for one in body] if as_last else body
            parts += [piece.source, _two_bodies(piece.words[1], own, body, header)]
            at = end
            continue
        parts.append(_END if parts and piece.words == ("eos_token",) else piece.source)
        at += 1
    return "".join(parts)


def _pieces(template: str) -> Iterator[_Piece]:
    """Split a template at its tags; whitespace that they trim is gone, and so are comments."""
    environment, inside = Environment(trim_blocks=True, lstrip_blocks=True), []
    for _, kind, value in environment.lex(template):
        words = tuple(word for name, word in inside if name != "whitespace")
        source = " " + "".join(word for _, word in inside).strip() + " "
        if kind in ("block_begin", "variable_begin"):
            inside = []
        elif kind == "block_end":
            yield _Piece("{%" + source + "%}", words[0], words)
        elif kind == "variable_end":
            yield _Piece("{{" + source + "}}", words=words)
        elif kind == "data":
            yield _Piece("{{ " + json.dumps(value, ensure_ascii=False) + " }}")
        else:
            inside.append((kind, value))


def _end_of_body(found: list[_Piece], start: int) -> int:
    """The place of the tag that ends the body of the loop which starts at a place: its `endfor` or its `else`."""
    opened = ["for"]
    for at in range(start + 1, len(found)):
        tag = found[at].tag
        if tag in ("if", "for"):
            opened.append(tag)
        elif tag in ("endif", "endfor"):
            opened.pop()
        if not opened or tag == "else" and opened == ["for"]:
            return at
    raise ValueError("a loop of the chat template does not end")


def _as_last(piece: _Piece) -> _Piece:
    """A tag whose conditions on the message's place in the conversation are those of the last message."""
    if piece.tag not in ("if", "elif"):
        return piece
    return piece._replace(source=_PLACE.sub("true", piece.source))


def _two_bodies(message: str, own: list[_Piece], body: list[_Piece], header: str) -> str:
    """A loop's body for what the assistant says, its `own`, and for all else; one that leaves early would lose what it
    said."""
    leaves = "{{ raise_exception('the turn of the assistant ends within its loop') }}"
    collected = "".join(leaves * (piece.tag in ("break", "continue")) + piece.source for piece in own)
    start = json.dumps(header, ensure_ascii=False)
    return (
        f"{{% if {message} is mapping and {message}['role'] == 'assistant' %}}"
        f"{{% set {_TURN} %}}{collected}{{% endset %}}"
        f"{{% if {_TURN} and {_TURN}.startswith({start}) %}}{{{{ {start} }}}}"
        f"{{% generation %}}{{{{ {_TURN}[{len(header)}:] }}}}{{% endgeneration %}}"
        f"{{% elif {_TURN} %}}{{{{ raise_exception('a turn of the assistant has another header') }}}}{{% endif %}}"
        f"{{% else %}}{''.join(piece.source for piece in body)}{{% endif %}}"
    )
