"""The package stays readable: how many files a run executes, how many files there are, and how long they and their
functions are."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import trl_jax
from compat_tests.effort import THOROUGH

PACKAGE = Path(trl_jax.__file__).parent


def test_a_run_enters_few_files():
    most = {"grpo": 110} | ({"dpo": 100} if THOROUGH else {})
    command = [sys.executable, "-m", "compat_tests.trace_run", *most, "--list"]
    ran = subprocess.run(command, cwd=PACKAGE.parent, capture_output=True, text=True, check=True)
    lines = [line.partition(": ") for line in ran.stdout.splitlines()]
    found = {name: int(counts.split()[0]) for name, _, counts in lines if name in most}
    assert found.keys() == most.keys() and all(found[name] <= most[name] for name in most), ran.stdout
    assert " training/train.py" in ran.stdout and " legacy/" not in ran.stdout and " exported/" not in ran.stdout


def test_the_package_has_few_files_of_a_readable_size():
    lines = {path: path.read_text(encoding="utf-8").count("\n") for path in PACKAGE.rglob("*.py")}
    assert len(lines) <= 290
    assert {path.name: count for path, count in lines.items() if count > 1_000} == {}


def test_functions_have_at_most_70_lines_without_docstring():
    long = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = node.body[0]
                docstring = 0 if ast.get_docstring(node) is None else first.end_lineno - first.lineno + 1
                lines = node.end_lineno - node.lineno + 1 - docstring
                long |= {f"{path.name}: {node.name}": lines} if lines > 70 else {}
    assert long == {}


def test_nothing_depends_on_the_class_of_a_task():
    """A task of a user's own is treated like the package's: its methods and attributes decide."""
    found = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
                names = {name.id for name in ast.walk(node.args[1]) if isinstance(name, ast.Name)}
                found += [f"{path.name}: {name}" for name in names if name.endswith("Task") or name == "Task"]
    assert found == []
