"""The command `trl-jax check`: reads a TRL script without running it, and says what works, what is otherwise here, and
what is refused."""

from __future__ import annotations

import argparse
from pathlib import Path

from trl_jax.cli.check.judging import Finding, findings
from trl_jax.cli.check.reading import read
from trl_jax.core.secrets import CleanParser, cleaned


class Parser(CleanParser):
    def parse_args_and_config(self, argv: list[str]) -> tuple[argparse.Namespace]:
        return (self.parse_args(argv),)


def make_parser(prog: str | None = None) -> Parser:
    parser = Parser(
        prog=prog,
        description="Read a TRL script, run nothing of it, and say of every name it takes from trl, every argument and "
        "every method it overrides whether it works, means something else here, or is refused.",
        epilog="Values that only a run would know, rows and checkpoints among them, are not judged: "
        "`trl-jax compare` runs the first steps.",
    )
    parser.add_argument("script", help="a script that imports trl, or trl_jax")
    return parser


def main(args: argparse.Namespace) -> None:
    """Print the findings, a line each, and what they come to.

    Raises:
        FileNotFoundError: there is no such script.
        ValueError: it is no Python.
    """
    if not Path(args.script).is_file():
        raise FileNotFoundError(f"there is no script {args.script!r}.")
    try:
        uses = read(Path(args.script).read_text(encoding="utf-8"))
    except (SyntaxError, ValueError) as error:  # not UTF-8, or null bytes
        raise ValueError(f"{args.script} is no Python: {error}") from None
    except (RecursionError, MemoryError):
        raise ValueError(f"{args.script}: its expressions are nested too deeply to be read.") from None
    print("\n".join(map(cleaned, report(findings(uses)))))


def report(found: list[Finding]) -> list[str]:
    """A line for each finding, in the order of the script, and the verdict."""
    if not found:
        return ["It takes nothing from trl."]
    lines = [f"{one.line:5}  {one.what}: {one.kind}" + (f". {one.text}" if one.text else "") for one in found]
    changed, refused = (sum(one.kind == kind for one in found) for kind in ("changed", "refused"))
    if refused:
        are, them = ("is", "it") if refused == 1 else ("are", "them")
        verdict = f"{refused} of {len(found)} {are} refused: change {them} as it says, then run it."
    elif changed:
        verdict = f"It runs as it is; {changed} of {len(found)} {'is' if changed == 1 else 'are'} otherwise here."
    else:
        verdict = "It runs as it is."
    return [*lines, "", verdict]
