"""Griffe extension: list the arguments of config classes on the API page, from the fields themselves.

Each has its type, default and `help=`, and an anchor: `api.md#trl_jax.DPOConfig--beta`.

Read from the source, which is not imported.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import griffe

PACKAGE = Path(__file__).parent.parent / "trl_jax"


class Arguments(griffe.Extension):
    def on_class(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        if cls.name in configs():
            lines = [entry(name, *facts) for name, facts in arguments(cls.name).items()]
            cls.docstring = griffe.Docstring("\n".join([cls.docstring.value, "", *lines]), parent=cls)


def entry(name: str, kind: str, text: str, default: str) -> str:
    """A list item of the argument, whose name links to itself; mkdocstrings puts the class in front of the anchor."""
    return f"- [`{name}`](#{name}){{ #{name} }} (`{kind}`, default `{default}`): {text}"


@cache
def configs() -> dict[str, ast.ClassDef]:
    paths = [
        PACKAGE / "config" / "base.py",
        PACKAGE / "trainer" / "online.py",
        PACKAGE / "trainer" / "reference.py",
        *(PACKAGE / "trainer").glob("*_config.py"),
    ]
    return classes(paths)


def classes(paths: Iterable[Path]) -> dict[str, ast.ClassDef]:
    """The files' classes that declare arguments, by name."""
    nodes = (node for path in paths for node in ast.parse(path.read_text(encoding="utf-8")).body)
    return {node.name: node for node in nodes if isinstance(node, ast.ClassDef) and own_arguments(node)}


def arguments(name: str) -> dict[str, tuple[str, str, str]]:
    """field -> type, help and default. Includes inherited fields, except BaseConfig's, which have their own entry."""
    node, found = configs()[name], {}
    for base in node.bases:
        if isinstance(base, ast.Name) and base.id in configs() and base.id != "BaseConfig":
            found |= arguments(base.id)
    return found | {
        name: (kind, text.replace("%%", "%"), default)  # argparse wants %%
        for name, (kind, text, default) in own_arguments(node).items()
    }


def own_arguments(node: ast.ClassDef) -> dict[str, tuple[str, str, str]]:
    fields = [line for line in node.body if isinstance(line, ast.AnnAssign) and isinstance(line.value, ast.Call)]
    found = {line.target.id: (ast.unparse(line.annotation), *help_and_default(line.value)) for line in fields}
    return {name: facts for name, facts in found.items() if None not in facts}


def help_and_default(call: ast.Call) -> tuple[str | None, str | None]:
    """Of `arg(default, help=...)`, or of `shared("name")` and its like, where these keywords are changes."""
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    text, default = None, None
    match call.func:
        case ast.Name("arg"):
            default = ast.unparse(call.args[0])
        case ast.Name("shared" | "online"):
            _, text, default = shared()[ast.literal_eval(call.args[0])]
        case ast.Name("_of_vllm"):  # of OnlineDPOConfig
            text, default = "A vLLM option, without effect.", shared()[ast.literal_eval(call.args[0])][2]
    if "help" in keywords:
        text = ast.literal_eval(keywords["help"])
    if "default" in keywords:
        default = ast.unparse(keywords["default"])
    return text, default


@cache
def shared() -> dict[str, tuple[str | None, str | None, str | None]]:
    """The fields that several configs have. Those that only say how a field of BaseConfig is handled have no help."""
    found = defaultdict(lambda: (None, None, None))
    for node in classes(PACKAGE / "config" / file for file in ("shared.py", "generation.py")).values():
        found |= own_arguments(node)
    return found
