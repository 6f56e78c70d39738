"""Secrets: masking them in everything that is shown or written, and reading access tokens.

Everything that leaves the process (files, logs, errors, trackers, model cards) goes through `masked` or `scrubbed`.
The objects used during training keep the real values.
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

_MIN_LENGTH = 8  # shorter secrets are not searched for in texts, because they would match ordinary words
_SECRET = re.compile(
    r"(?:^|_)(?:token|(?:api|access|auth|hf|hub|refresh|session)_tokens|secrets?|passwords?|passwd|passphrase|pwd"
    r"|credentials?|authorization|auth|bearer|cookies?|jwt"
    r"|(?:api|access|secret|private|signing|encryption|account|auth|license)_?keys?)$"
)
_VOCABULARY = re.compile(  # vocabulary tokens and token counts, which are not secrets
    r"(?:^|_)(?:bos|eos|pad|unk|sep|cls|mask|image|audio|video|vision|start|end|stop|prefix|middle|suffix|special|added"
    r"|extra|per|num|max|min|first|last|next|new|scored|boi|eoi)_token$"
)
_START = r"(?:\b|(?<=[\[\d;]m))"  # start of a word, possibly after a terminal color code
_SHAPES = re.compile(
    rf"{_START}(?:hf_(?:[a-z]+_)?[A-Za-z0-9]{{30,}}\b|api_org_[A-Za-z0-9]{{30,}}\b"  # Hugging Face
    r"|sk-(?=[\w-]*[0-9])(?=[\w-]*[A-Z])[\w-]{20,}"  # OpenAI and similar
    r"|(?:AKIA|ASIA)[0-9A-Z]{16}\b|AIza[\w-]{35}\b"  # AWS, Google
    r"|gh[pousr]_[A-Za-z0-9]{36,}\b|github_pat_\w{22,}|glpat-[\w-]{20,}|xox[abprs]-[\w-]{10,}"
    r"|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]{10,})"  # JSON web tokens
    r"|(?<=://)[^/\s:@?#]*:[^/\s@?#]+(?=@)"  # user:password of a URL
    r"|(?<=[?&])(?:X-(?:Amz|Goog)-)?(?:Signature|Security-Token|sig)=[^&\s]+"
    r"|(?<=\bBearer )(?=\S*[0-9_])[\w.~+/=-]{8,}",
)
# name= or "name": and the like, then the value. A value that opens a quote or bracket may extend to the end of the
# line.
_NAME = re.compile(r"""(?:\\*["'])?\b(?P<name>[A-Za-z][\w.-]{0,80})(?P<closed>\\*["'])?\s*(?P<sign>[=:])\s*""")
_VALUE = re.compile(r"""\\*(?P<mark>["']).*?(?P=mark)|["'\[({][^\n]*|(?:(?:Bearer|Basic) )?[^\s"'&,;}\])]+""")
_NOT_SECRET = re.compile(r"(?i)none|null|true|false|<[A-Z0-9_]+>")
_DIRECTORIES = ("PWD", "OLDPWD")  # environment variables for directories, despite the "pwd" in their names
_Forms = list[tuple[str, str]]
_known: dict[str, list[str]] = {}  # secret -> its placeholders, one per name under which it was read


@lru_cache(4096)
def is_secret(name: str) -> bool:
    """Whether a value with this name is a secret: hub_token, HF_TOKEN, apiKey, password; but not eos_token."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).replace("-", "_").replace(".", "_").lower()
    return _SECRET.search(words) is not None and _VOCABULARY.search(words) is None


def placeholder(name: str) -> str:
    """The text that replaces a secret of this name; for hub_token it is <HUB_TOKEN>, as in transformers."""
    return f"<{re.sub('[^A-Z0-9]', '_', name.upper())}>"


def masked(value: Any, name: str = "") -> Any:
    """A copy of a value that is safe to write or show.

    Secrets are recognized by the names of keys and fields, at any depth and also in JSON strings; by their shape
    (hf_..., Bearer ..., user:password in URLs); and by having been read as a secret before (`learn`).
    """
    return _mask(value, name, _secret_forms())


def scrubbed(text: str) -> str:
    """Text without secrets: known ones, anything shaped like one, and values after the name of a secret."""
    return _scrub(text, _secret_forms())


def cleaned(text: str) -> str:
    """Text that is safe to print to a terminal: scrubbed, with control characters escaped."""
    return printable(scrubbed(text))


class CleanParser(argparse.ArgumentParser):
    """An argument parser that scrubs its error messages, which quote the command line."""

    def error(self, message: str) -> NoReturn:
        super().error(cleaned(message))


def _mask(value: Any, name: str, forms: _Forms) -> Any:
    hidden = is_secret(name)
    if value is None or isinstance(value, bool | Enum):
        return value
    if isinstance(value, Mapping):
        return {
            _scrub_string(key, forms): _mask(entry, name if hidden else str(key), forms) for key, entry in value.items()
        }
    if isinstance(value, list | tuple | set | frozenset):
        entries = [_mask(entry, name if hidden else "", forms) for entry in value]
        is_namedtuple = isinstance(value, tuple) and type(value) is not tuple
        return type(value)(*entries) if is_namedtuple else type(value)(entries)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: vars(value).get(f.name) for f in dataclasses.fields(value)}
        masked_fields = _mask(fields, name if hidden else "", forms)
        return value if masked_fields == fields else masked_fields
    if hidden and value != "" and not (isinstance(value, int | float) and name.lower().endswith("token")):
        return placeholder(name)
    return _scrub_string(value, forms)


def _scrub(text: str, forms: _Forms) -> str:
    if text.lstrip()[:1] in ("{", "["):
        try:
            parsed = json.loads(text)
        except (ValueError, RecursionError):
            pass
        else:
            masked_value = _mask(parsed, "", forms)
            return text if masked_value == parsed else json.dumps(masked_value, ensure_ascii=False)
    for form, replacement in forms:
        text = text.replace(form, replacement)
    return _SHAPES.sub("<SECRET>", _mask_named_values(text))


def _secret_forms() -> _Forms:
    """(form, replacement) for each way a known secret may be written, longest secrets first. Called once per value to
    mask, because the environment may have many variables."""
    secrets = {os.environ.get(key, "").strip(): placeholder(key) for key in os.environ if _is_secret_variable(key)}
    secrets |= {value: names[0] for value, names in _known.items()}
    return [
        (form, replacement)
        for secret, replacement in sorted(secrets.items(), key=lambda item: -len(item[0]))
        if len(secret) >= _MIN_LENGTH
        for form in dict.fromkeys((secret, repr(secret)[1:-1], quote(secret, safe="")))
    ]


def _is_secret_variable(key: str) -> bool:
    """Whether an environment variable holds a secret."""
    return key not in _DIRECTORIES and is_secret(key)


def shown(name: str, value: Any) -> str:
    """name=value for an error message, with secrets masked."""
    return f"{name}={masked(value, name)!r}"


def learn(value: Any, name: str = "") -> None:
    """Remember the secrets in a value that was read, so that `scrubbed` removes them from now on."""
    if isinstance(value, Mapping):
        for key, entry in value.items():
            learn(entry, name if is_secret(name) else str(key))
    elif isinstance(value, list | tuple):
        for entry in value:
            learn(entry, name)
    elif isinstance(value, str) and is_secret(name) and not _NOT_SECRET.fullmatch(value.strip()):
        names = _known.setdefault(value.strip(), [])
        names += [] if placeholder(name) in names else [placeholder(name)]
    elif isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            learn(json.loads(value), name)
        except (ValueError, RecursionError):
            return


def as_token(name: str, value: Any) -> str | bool | None:
    """Normalize an access token: strip whitespace; True, False and None pass through.

    A placeholder written by `masked` is resolved to the token it stands for, if this process has read exactly one
    token of that name. For hub_token it becomes None, since transformers writes the same placeholder without a token.

    Raises:
        TypeError, ValueError: the value cannot be a token. The message does not show it.
    """
    if value is None or isinstance(value, bool):
        return value
    if not isinstance(value, str):
        raise TypeError(f"{name} is a {type(value).__name__}: an access token must be a string or None.")
    token = value.strip()
    if token == placeholder(name):
        return _resolve_placeholder(name, token)
    if not token.isascii() or not token.isprintable() or " " in token:
        raise ValueError(
            f"{name} contains whitespace or characters that no access token has (value not shown). Copy it again."
        )
    learn(token, name)
    return token or None


def masked_flags(flags: Iterable[str]) -> list[str]:
    """A command line that is safe to show: --hub_token <HUB_TOKEN>."""
    shown_flags, name = [], ""
    for flag in flags:
        key, sign, value = flag.partition("=")
        if flag.startswith("--"):
            shown_flags.append(f"{key}={masked(value, key[2:])}" if sign else flag)
            name = "" if sign else key[2:]
        else:
            shown_flags.append(masked(flag, name))
            name = ""
    return shown_flags


def learn_flags(flags: Iterable[str]) -> None:
    """`learn` for a command line."""
    name = ""
    for flag in flags:
        key, sign, value = flag.partition("=")
        if flag.startswith("--"):
            learn(value, key[2:])
            name = "" if sign else key[2:]
        else:
            learn(flag, name)


def _resolve_placeholder(name: str, token: str) -> str | None:
    candidates = [secret for secret, names in _known.items() if token in names]
    if name == "hub_token" or not candidates:
        return None
    if len(candidates) > 1:
        raise ValueError(f"{name}={token!r} is a placeholder for {len(candidates)} tokens: pass the token itself.")
    return candidates[0]


def _scrub_string(value: Any, forms: _Forms) -> Any:
    """Scrubbed if it is a string; the object itself if nothing changes."""
    if not isinstance(value, str):
        return value
    clean = _scrub(value, forms)
    return value if clean == value else clean


def _mask_named_values(text: str) -> str:
    """Replace values that follow the name of a secret, in arbitrary text."""
    parts, end = [], 0
    for match in _NAME.finditer(text):
        value = _VALUE.match(text, match.end())
        if match.start() < end or value is None or not _is_named_secret(match, value[0]):
            continue
        mark = value["mark"] or ""
        parts += [text[end : match.end()], mark, placeholder(match["name"]), mark]
        end = value.end()
    return "".join([*parts, text[end:]])


def _is_named_secret(match: re.Match, value: str) -> bool:
    """Whether a matched name and value are a secret; in prose, a word before a colon is not a name."""
    name, bare, prefix = match["name"], value.strip("\\\"'"), match.string[: match.start()].rstrip(" ")
    if not is_secret(name) or bare == "" or _NOT_SECRET.fullmatch(bare):
        return False
    if name.lower().endswith("token") and bare.replace(".", "", 1).isdigit():
        return False
    return match["sign"] == "=" or bool(match["closed"]) or prefix[-1:] in ("", "\n", "{", ",") or _is_header(name)


def _is_header(name: str) -> bool:
    return name.lower() == "authorization"
