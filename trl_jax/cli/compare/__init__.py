"""The command `trl-jax compare`: a script's first steps under TRL and under trl_jax, and how far they are apart."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from trl_jax.cli.compare.verdict import Record, picture, report
from trl_jax.core.files.whole_file import write_whole
from trl_jax.core.secrets import CleanParser, cleaned

SIDES = ("trl", "trl_jax")
_OWN = ("--steps", "--json", "--picture")


class Parser(CleanParser):
    def parse_args_and_config(self, argv: list[str]) -> tuple[argparse.Namespace]:
        """Its own flags may stand right behind the script, too, before the script's; a first `--` ends them."""
        own, ended, rest = self._own(argv)
        if not rest or (rest[0].startswith("-") and not ended):
            return (self.parse_args(argv),)  # --help, or what is wrong
        script, *flags = rest
        behind, _, flags = ([], True, flags) if ended else self._own(flags)
        args = self.parse_args([*own, *behind, "--", script])
        args.flags = flags
        return (args,)

    def _own(self, argv: list[str]) -> tuple[list[str], bool, list[str]]:
        """The flags of the command that a line begins with, whether `--` ends them, and the rest of the line."""
        end = 0
        while end < len(argv) and argv[end].partition("=")[0] in _OWN:
            end += 1 if "=" in argv[end] else 2
        if end > len(argv):
            self.error(f"argument {argv[-1]}: expected one argument")
        ended = argv[end : end + 1] == ["--"]
        return argv[:end], ended, argv[end + ended :]


def make_parser(prog: str | None = None) -> Parser:
    parser = Parser(
        prog=prog,
        description="Run the first steps of a TRL script under TRL and under trl_jax, with the same seed, and show how "
        "far their numbers are apart, how long a step takes, and how much memory.",
        epilog="Flags of the script stand behind it, after those of this command or after `--`. Nothing is saved, "
        "evaluated, tracked or pushed: output_dir is a temporary folder. The script ends after those steps of its "
        "first train().",
    )
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps (default: 10)")
    parser.add_argument("--json", metavar="FILE", help="write all numbers there")
    parser.add_argument("--picture", metavar="FILE.svg", help="draw loss and gradient norm of both there")
    parser.add_argument("script", help="a script that imports trl, or trl_jax")
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="its own flags")
    return parser


def main(args: argparse.Namespace) -> None:
    """Print the comparison.

    Raises:
        FileNotFoundError: there is no such script.
        ValueError: steps below 1, or the script trains under neither of the two.
    """
    if not Path(args.script).is_file():
        raise FileNotFoundError(f"there is no script {args.script!r}.")
    if args.steps < 1:
        raise ValueError(f"--steps {args.steps}: wanted 1 or more.")
    records = {}
    for side in SIDES:
        print(f"{args.steps} steps under {side} ...", file=sys.stderr, flush=True)
        records[side] = run(side, args.script, args.flags, args.steps)
    if all(record.error for record in records.values()):
        raise ValueError(" ".join(f"{side}: {record.error}" for side, record in records.items()))
    print("\n".join(map(cleaned, report(*records.values()))))
    if args.json:
        write_whole(Path(args.json), json.dumps({side: record._asdict() for side, record in records.items()}, indent=2))
    if args.picture:
        drawn = picture(*records.values())
        if drawn is None:
            print(f"{args.picture} was not written: no loss of either run is a finite number.", file=sys.stderr)
        else:
            write_whole(Path(args.picture), drawn)


def run(side: str, script: str, flags: list[str], steps: int) -> Record:
    """Run the script's first steps in a process of their own."""
    with tempfile.TemporaryDirectory(prefix="trl-jax-compare-") as folder:
        out = Path(folder) / "record.json"
        command = [sys.executable, "-m", "trl_jax.cli.compare.child", side, str(out), str(steps), script, *flags]
        env = {**os.environ, "WANDB_MODE": "disabled"}
        done = subprocess.run(command, capture_output=True, text=True, env=env)
        if out.is_file():
            return Record(**json.loads(out.read_text(encoding="utf-8")))
    lines = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
    said = cleaned(lines[-1]) if lines else f"it ended with status {done.returncode} and trained nothing"
    return Record(error=said if done.returncode else "the script ended and called no train()")
