"""Secrets: what of a value may be written or shown anywhere, and access tokens as they are read.

Everything that leaves the process (files, logs, errors, trackers, cards) goes through `masked` or `scrubbed`; the
objects that a run works with keep the real values.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
from collections.abc import Iterable, Mapping
from enum import Enum
from functools import lru_cache
from typing import Any, NoReturn
from urllib.parse import quote

from trl_jax.core.text import printable

_SHORTEST = 8  # of the known secrets that are looked for in texts: shorter ones are found in ordinary words
_SECRET = re.compile(
    r"(?:^|_)(?:token|(?:api|access|auth|hf|hub|refresh|session)_tokens|secrets?|passwords?|passwd|passphrase|pwd"
    r"|credentials?|authorization|auth|bearer|cookies?|jwt"
    r"|(?:api|access|secret|private|signing|encryption|account|auth|license)_?keys?)$"
)
_VOCABULARY = re.compile(  # tokens of a vocabulary, and numbers of them
    r"(?:^|_)(?:bos|eos|pad|unk|sep|cls|mask|image|audio|video|vision|start|end|stop|prefix|middle|suffix|special|added"
    r"|extra|per|num|max|min|first|last|next|new|scored|boi|eoi)_token$"
)
_START = r"(?:\b|(?<=[\[\d;]m))"  # of a word, which the escape code of a colour may come before
_SHAPES = re.compile(
    rf"{_START}(?:hf_(?:[a-z]+_)?[A-Za-z0-9]{{30,}}\b|api_org_[A-Za-z0-9]{{30,}}\b"  # Hugging Face
    r"|sk-(?=[\w-]*[0-9])(?=[\w-]*[A-Z])[\w-]{20,}"  # OpenAI and its like
    r"|(?:AKIA|ASIA)[0-9A-Z]{16}\b|AIza[\w-]{35}\b"  # AWS, Google
    r"|gh[pousr]_[A-Za-z0-9]{36,}\b|github_pat_\w{22,}|glpat-[\w-]{20,}|xox[abprs]-[\w-]{10,}"
    r"|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]{10,})"  # JSON web tokens
    r"|(?<=://)[^/\s:@?#]*:[^/\s@?#]+(?=@)"  # user:password of a URL
    r"|(?<=[?&])(?:X-(?:Amz|Goog)-)?(?:Signature|Security-Token|sig)=[^&\s]+"
    r"|(?<=\bBearer )(?=\S*[0-9_])[\w.~+/=-]{8,}",
)
# name=, "name": and their like, then the value: where quotes or brackets open, to the end of the line if need be.
_NAME = re.compile(r"""(?:\\*["'])?\b(?P<name>[A-Za-z][\w.-]{0,80})(?P<closed>\\*["'])?\s*(?P<sign>[=:])\s*""")
_VALUE = re.compile(r"""\\*(?P<mark>["']).*?(?P=mark)|["'\[({][^\n]*|(?:(?:Bearer|Basic) )?[^\s"'&,;}\])]+""")
_NO_SECRET = re.compile(r"(?i)none|null|true|false|<[A-Z0-9_]+>")
_FOLDERS = ("PWD", "OLDPWD")  # of the environment: where a shell is, and was
_Forms = list[tuple[str, str]]
_known: dict[str, list[str]] = {}  # secrets that were read -> what stands for them, by each of their names


@lru_cache(4096)
def is_secret(name: str) -> bool:
    """Whether what goes by this name is a secret: hub_token, HF_TOKEN, apiKey, password; not eos_token."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).replace("-", "_").replace(".", "_").lower()
    return _SECRET.search(words) is not None and _VOCABULARY.search(words) is None


def placeholder(name: str) -> str:
    """Stands for the secret of that name wherever it is written; hub_token's is transformers' own, <HUB_TOKEN>."""
    return f"<{re.sub('[^A-Z0-9]', '_', name.upper())}>"


def masked(value: Any, name: str = "") -> Any:
    """A copy of a value to write or show, in which no secret is left.

    Secrets are told by the names of keys and fields, at any depth and in JSON in strings, too; by their shapes (hf_...,
    Bearer ..., user:password in URLs); and by having been read as one.
    """
    return _masked(value, name, _known_forms())


def scrubbed(text: str) -> str:
    """A text without secrets: those that are known, those of a secret's shape, and those that stand behind a name."""
    return _scrubbed(text, _known_forms())


def cleaned(text: str) -> str:
    """A text for a terminal: without secrets, and with control characters written out."""
    return printable(scrubbed(text))


class CleanParser(argparse.ArgumentParser):
    """A parser whose errors, which quote the command line, are `cleaned`."""

    def error(self, message: str) -> NoReturn:
        super().error(cleaned(message))


def _masked(value: Any, name: str, known: _Forms) -> Any:
    hidden = is_secret(name)
    if value is None or isinstance(value, bool | Enum):
        return value
    if isinstance(value, Mapping):
        return {_text(key, known): _masked(entry, name if hidden else str(key), known) for key, entry in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        entries = [_masked(entry, name if hidden else "", known) for entry in value]
        named = isinstance(value, tuple) and type(value) is not tuple
        return type(value)(*entries) if named else type(value)(entries)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: vars(value).get(f.name) for f in dataclasses.fields(value)}
        shown = _masked(fields, name if hidden else "", known)
        return value if shown == fields else shown
    if hidden and value != "" and not (isinstance(value, int | float) and name.lower().endswith("token")):
        return placeholder(name)
    return _text(value, known)


def _scrubbed(text: str, known: _Forms) -> str:
    if text.lstrip()[:1] in ("{", "["):
        try:
            held = json.loads(text)
        except (ValueError, RecursionError):
            pass
        else:
            shown = _masked(held, "", known)
            return text if shown == held else json.dumps(shown, ensure_ascii=False)
    for form, instead in known:
        text = text.replace(form, instead)
    return _SHAPES.sub("<SECRET>", _without_named(text))


def _known_forms() -> _Forms:
    """How each secret of the environment, and each that was read, may be written, the longest secrets first; with what
    is written in its place. Made once for a whole value: an environment has many variables, a run many arguments."""
    secrets = {os.environ.get(key, "").strip(): placeholder(key) for key in os.environ if _hides(key)}
    secrets |= {value: names[0] for value, names in _known.items()}
    return [
        (form, instead)
        for secret, instead in sorted(secrets.items(), key=lambda item: -len(item[0]))
        if len(secret) >= _SHORTEST
        for form in dict.fromkeys((secret, repr(secret)[1:-1], quote(secret, safe="")))
    ]


def _hides(key: str) -> bool:
    """Whether a variable of the environment is a secret."""
    return key not in _FOLDERS and is_secret(key)


def shown(name: str, value: Any) -> str:
    """name=value for an error's text."""
    return f"{name}={masked(value, name)!r}"


def learn(value: Any, name: str = "") -> None:
    """Keep in mind the secrets in what was read: no text through `scrubbed` shows them from now on."""
    if isinstance(value, Mapping):
        for key, entry in value.items():
            learn(entry, name if is_secret(name) else str(key))
    elif isinstance(value, list | tuple):
        for entry in value:
            learn(entry, name)
    elif isinstance(value, str) and is_secret(name) and not _NO_SECRET.fullmatch(value.strip()):
        names = _known.setdefault(value.strip(), [])
        names += [] if placeholder(name) in names else [placeholder(name)]
    elif isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            learn(json.loads(value), name)
        except (ValueError, RecursionError):
            return


def as_token(name: str, value: Any) -> str | bool | None:
    """An access token as it was meant, without the white space around it; True, False and None as they are.

    What `masked` put in its place means the token that it stands for, if this process has read only one of that name;
    None for hub_token, where transformers writes the same of no token.

    Raises:
        TypeError, ValueError: it cannot be a token. The text does not show it.
    """
    if value is None or isinstance(value, bool):
        return value
    if not isinstance(value, str):
        raise TypeError(f"{name} is a {type(value).__name__}: wanted an access token as text, or None.")
    token = value.strip()
    if token == placeholder(name):
        return _meant(name, token)
    if not token.isascii() or not token.isprintable() or " " in token:
        raise ValueError(
            f"{name} holds white space or characters that no access token has (it is not shown here). Copy it again."
        )
    learn(token, name)
    return token or None


def masked_flags(flags: Iterable[str]) -> list[str]:
    """A command line to show: --hub_token <HUB_TOKEN>."""
    told, name = [], ""
    for flag in flags:
        key, sign, value = flag.partition("=")
        if flag.startswith("--"):
            told.append(f"{key}={masked(value, key[2:])}" if sign else flag)
            name = "" if sign else key[2:]
        else:
            told.append(masked(flag, name))
            name = ""
    return told


def learn_flags(flags: Iterable[str]) -> None:
    """`learn` of a command line."""
    name = ""
    for flag in flags:
        key, sign, value = flag.partition("=")
        if flag.startswith("--"):
            learn(value, key[2:])
            name = "" if sign else key[2:]
        else:
            learn(flag, name)


def _meant(name: str, token: str) -> str | None:
    stood_for = [secret for secret, names in _known.items() if token in names]
    if name == "hub_token" or not stood_for:
        return None
    if len(stood_for) > 1:
        raise ValueError(f"{name}={token!r} stands for one of {len(stood_for)} tokens: pass the token itself.")
    return stood_for[0]


def _text(value: Any, known: _Forms) -> Any:
    """Scrubbed where it is text; the object itself where nothing is to hide."""
    if not isinstance(value, str):
        return value
    told = _scrubbed(value, known)
    return value if told == value else told


def _without_named(text: str) -> str:
    """Without what stands behind the name of a secret, in a text that may be anything."""
    parts, done = [], 0
    for found in _NAME.finditer(text):
        value = _VALUE.match(text, found.end())
        if found.start() < done or value is None or not _tells(found, value[0]):
            continue
        mark = value["mark"] or ""
        parts += [text[done : found.end()], mark, placeholder(found["name"]), mark]
        done = value.end()
    return "".join([*parts, text[done:]])


def _tells(found: re.Match, value: str) -> bool:
    """Whether the value behind a name is a secret; a word of a sentence with a colon behind it is no name."""
    name, bare, before = found["name"], value.strip("\\\"'"), found.string[: found.start()].rstrip(" ")
    if not is_secret(name) or bare == "" or _NO_SECRET.fullmatch(bare):
        return False
    if name.lower().endswith("token") and bare.replace(".", "", 1).isdigit():
        return False
    return found["sign"] == "=" or bool(found["closed"]) or before[-1:] in ("", "\n", "{", ",") or _is_header(name)


def _is_header(name: str) -> bool:
    return name.lower() == "authorization"
