"""The command `trl-jax example`: list the examples, or copy one into the current folder."""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import shutil
from pathlib import Path

from trl_jax.core.secrets import CleanParser

_HELPERS = ("capitals", "plot", "tiny_model")  # imported by examples; copied with them, and on request


class Parser(CleanParser):
    def parse_args_and_config(self, argv: list[str]) -> tuple[argparse.Namespace]:
        return (self.parse_args(argv),)


def make_parser(prog: str | None = None) -> Parser:
    parser = Parser(prog=prog, description="List the examples, or copy one into the current folder.")
    parser.add_argument("name", nargs="?", help="the example to copy, with the files that it needs")
    return parser


def main(args: argparse.Namespace) -> None:
    """List the examples, or copy one into the current folder.

    Raises:
        ValueError: there is no such example.
        FileExistsError: the current folder has a file of the same name with other content.
    """
    paths = examples()
    if args.name is None:
        for name, path in paths.items():
            if name not in _HELPERS:
                print(f"{name:<26} {_summary(path)}")
        print("\nCopy one into the current folder: trl-jax example NAME")
        return
    name = args.name.removesuffix(".py").removesuffix(".ipynb")
    if name not in paths:
        close = difflib.get_close_matches(name, paths, n=1)
        hint = f"; did you mean {close[0]}?" if close else "; `trl-jax example` lists them."
        raise ValueError(f"There is no example {name!r}{hint}")
    copied = _copy(required_files(paths[name]))
    print(f"Copied {', '.join(copied)}.")
    if paths[name].suffix == ".py" and name not in _HELPERS:
        print(f"Next: python {name}.py")


def examples() -> dict[str, Path]:
    """Name -> file: scripts, then notebooks. From the installed package, or from the repository it runs from."""
    package = Path(__file__).parents[1]
    folders = filter(Path.is_dir, (package / "examples", package.parent / "examples"))
    if (folder := next(folders, None)) is None:
        raise FileNotFoundError("This installation of trl_jax has no examples; install it again from a wheel or clone.")
    return {path.stem: path for path in (*sorted(folder.glob("*.py")), *sorted(folder.glob("notebooks/*.ipynb")))}


def required_files(example: Path) -> list[Path]:
    """The example, the modules next to it that it imports, and the data folder if one of them reads it."""
    if example.suffix != ".py":
        return [example]
    paths, pending = {}, [example]
    while pending:
        path = pending.pop(0)
        code = path.read_text(encoding="utf-8")
        paths[path] = None
        if '/ "data"' in code:
            paths[path.parent / "data"] = None
        for node in ast.walk(ast.parse(code)):
            names = [node.module] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            siblings = [path.with_name(f"{name}.py") for name in names if name]
            pending += [module for module in siblings if module.is_file() and module not in paths]
    return list(paths)


def _copy(paths: list[Path]) -> list[str]:
    """Copy into the current folder. Raises FileExistsError, before copying, for a file there with other content."""
    files = {file: path.parent for path in paths for file in (_files(path) if path.is_dir() else [path])}
    targets = {file: file.relative_to(parent) for file, parent in files.items()}
    for file, target in targets.items():
        if target.exists() and target.read_bytes() != file.read_bytes():
            raise FileExistsError(f"{target} is already here, with other content. Run this in another folder.")
    for file, target in targets.items():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)
    return [str(target) for target in targets.values()]


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file())


def _summary(path: Path) -> str:
    """The first sentence of a script's docstring, or the title of a notebook."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        return "".join(json.loads(text)["cells"][0]["source"]).splitlines()[0].lstrip("# ") + " (notebook)"
    return (ast.get_docstring(ast.parse(text)) or "").partition(". ")[0].splitlines()[0].rstrip(".") + "."
