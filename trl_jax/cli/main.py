"""The `trl-jax` command. Each subcommand has TRL's flags and YAML, and imports what it needs when it runs."""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import os
import select
import sys
import warnings
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from trl_jax.cli.torch_for_scripts import is_script_file
from trl_jax.core.secrets import CleanParser, cleaned, masked_flags
from trl_jax.core.text import FRAMES_HIDDEN, hide_frames
from trl_jax.core.trainers import TRAINERS

COMMANDS = {command: names.summary for command, names in TRAINERS.items()} | {
    "check": "report what works in a TRL script, without running it",
    "compare": "compare the first steps of a script under TRL and under trl_jax",
    "plan": "check whether a run fits on devices that you do not have",
    "generate": "complete the prompts of a file with a language model",
    "chat": "chat with a language model",
    "score": "score the completions of a file with a reward model",
    "example": "list the examples, or copy one into the current folder",
    "env": "print versions and devices",
}
_IN_CLI = ("check", "compare")  # these modules are in cli/, the others in scripts/
# Errors that a wrong flag, file or value causes are printed in one line. The line also says how to see the traceback,
# because a bug of ours may raise them too. Other errors keep their traceback.
USER_ERRORS = (ValueError, TypeError, KeyError, OSError)


def main(argv: list[str] | None = None) -> int:
    """Run a command. Exit status: 0 success, 2 user error (one line on stderr), 130 interrupted, 141 if the reader of
    stdout has closed the pipe (as `head` does)."""
    typed = argv is None
    argv = list(sys.argv[1:] if typed else argv)
    parser = _parser()
    command = parser.parse_args(argv[:1]).command
    if command is None:
        parser.print_help()
        return 0
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            _run(command, argv[1:], typed)
        sys.stdout.flush()
    except USER_ERRORS as error:
        if isinstance(error, BrokenPipeError) and _reader_is_gone():
            return 141
        if "trl_jax.mesh.processes" in sys.modules:
            sys.modules["trl_jax.mesh.processes"].announce_end(error)
        if os.environ.get("TRL_JAX_TRACEBACK") == "1":
            raise
        print(f"trl-jax: error: {_one_line(error)} (TRL_JAX_TRACEBACK=1 shows the traceback.)", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("trl-jax: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        hide_frames(error)
        raise
    return 0


def _reader_is_gone() -> bool:
    """Whether stdout is a pipe whose reader has closed it. If so, redirect stdout to /dev/null, because Python flushes
    it on exit and would report the broken pipe again."""
    pipe = select.poll()
    pipe.register(sys.stdout.fileno(), 0)
    if not any(event & select.POLLERR for _, event in pipe.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


def _run(command: str, argv: list[str], typed: bool) -> None:
    # Without this, transformers advises on import to install torch.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    if command not in _IN_CLI:
        _set_environment(argv)
    script = importlib.import_module(module_of(command))
    arguments = script.make_parser(prog=f"trl-jax {command}").parse_args_and_config(argv)
    if typed:  # trackers record the command line
        sys.argv[1:] = masked_flags(sys.argv[1:])
    script.main(*arguments)


def _set_environment(argv: list[str]) -> None:
    """Set the variables of the YAML file's `env` block before a library that reads them on import, such as HF_HOME, is
    imported. In TRL, the process that reads the file sets them for the process that trains."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", nargs="?")
    path = parser.parse_known_args(argv)[0].config
    if path is None:
        return
    import yaml

    try:
        config = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return  # the parser reads the file again and names the error
    env = config.get("env") if isinstance(config, dict) else None
    if isinstance(env, dict):
        os.environ.update({str(name): str(value) for name, value in env.items()})


def module_of(command: str) -> str:
    """The module of a command."""
    return f"trl_jax.{'cli' if command in _IN_CLI else 'scripts'}.{command}"


def _one_line(error: Exception) -> str:
    """The error's text and notes in one line, without the quotes of a KeyError's str()."""
    text = " ".join(map(str, error.args)) if isinstance(error, KeyError) else str(error)
    notes = [note for note in vars(error).get("__notes__", ()) if note != FRAMES_HIDDEN]
    return cleaned(" ".join(" ".join([text, *notes]).split()))


def _show_warning(message, category, filename, lineno, file=None, line=None) -> None:
    print(f"trl-jax: warning: {cleaned(' '.join(str(message).split()))}", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = CleanParser(
        prog="trl-jax",
        description="Train and use models in JAX, with TRL's flags.",
        epilog=(
            "`trl-jax COMMAND --help` lists a command's flags. TRL_JAX_TRACEBACK=1 shows the traceback of an error."
        ),
    )
    parser.add_argument("--version", action="version", version=f"trl-jax {_version()}")
    commands = parser.add_subparsers(parser_class=argparse.ArgumentParser, dest="command", metavar="COMMAND")
    for name, text in COMMANDS.items():
        commands.add_parser(name, help=text, add_help=False)
    return parser


def _version() -> str:
    try:
        return metadata.version("trl_jax")
    except metadata.PackageNotFoundError:
        return "(run from source, not installed)"


# A hint for scripts that fail because transformers 5 changed the result of apply_chat_template

_TEMPLATE = (
    "The script calls apply_chat_template without return_dict. Since transformers 5 this gives a dictionary of "
    "input_ids and attention_mask; return_dict=False gives the token ids alone, as it did before."
)
_hints: set[str] = set()  # to add to an error that ends the script


def watch_chat_template(original: Callable) -> Callable:
    """Wrap a tokenizer's apply_chat_template to notice a script that relies on its default result, which changed."""

    @functools.wraps(original)
    def apply_chat_template(self, *args: Any, **options: Any) -> Any:
        by_script = is_script_file(sys._getframe(1).f_code.co_filename)
        if by_script and options.get("tokenize", True) and "return_dict" not in options:
            _hints.add(_TEMPLATE)
        return original(self, *args, **options)

    return apply_chat_template


@contextlib.contextmanager
def adding_hints() -> Iterator[None]:
    """Add the hints to errors of the types that a result of an unexpected type causes."""
    try:
        yield
    except (AttributeError, LookupError, TypeError) as error:
        for hint in _hints:
            error.add_note(hint)
        raise


if __name__ == "__main__":
    raise SystemExit(main())
