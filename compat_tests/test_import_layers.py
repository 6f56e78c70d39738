"""Imports only point down the layers. Read from the source, including imports inside functions and for typing."""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path
from typing import NamedTuple

import pytest

import trl_jax

PACKAGE = Path(trl_jax.__file__).parent
FLOORS = {
    "core": 0,
    "rewards": 0,
    "mesh": 1,
    "config": 2,
    "nn": 3,
    "losses": 3,
    "data": 3,
    "models": 4,
    "tasks": 4,
    "generation": 5,
    "hub": 5,
    "exported": 5,
    "rollout": 6,
    "training": 7,
    "trainer": 8,
    "legacy": 8,
    "plan": 9,
    "experimental": 9,
    "scripts": 10,
    "cli": 10,
}
# These pairs are on the same layer and may import each other in the given direction.
NEIGHBORS = {("cli", "scripts"), ("hub", "generation"), ("hub", "exported"), ("exported", "hub")}
NEIGHBORS |= {("trainer", "legacy"), ("legacy", "trainer")}
NEVER = {
    "core": "jax jaxlib flax optax transformers",
    "rewards": "jax jaxlib flax optax transformers core",
    "data": "jax jaxlib flax optax",
    "losses": "flax optax",
    "mesh": "flax optax transformers safetensors",
    "nn": "transformers safetensors optax",
    "config": "flax optax",
    "models": "transformers safetensors optax",
    "hub": "optax",
    "exported": "optax",
    "generation": "transformers safetensors optax hub training tasks",
}
# These files of training/ must not depend on models or text.
_PURE = "update checkpoint_files optimizers schedules devices events"
PURE = {Path("training") / f"{name}.py" for name in _PURE.split()}
PURE_NEVER = {"flax", "models", "nn", "hub", "data", "tasks", "rollout"}
# Used only if the user passes such objects: imported only in these files, inside functions.
BROUGHT = {"torch", "trl", "peft", "accelerate"}
BRIDGES = (
    "exported/program.py",
    "hub/torch_bridge.py",
    "hub/torch_objects.py",
    "hub/torch_state.py",
    "cli/torch_for_scripts.py",
)
RUNS_TRL = "cli/compare_child.py"  # runs a script under TRL itself; also inside functions
# "llama3" as a whole word is not a family: it is the name of a RoPE scaling type that any config may use.
FAMILIES = re.compile(
    r"(?<![a-z])(llama(?!3$)|qwen|mistral|mixtral|gemma|olmo|smollm|granite|cohere|falcon|phi[0-9]|gpt2"
    r"|gpt_?neox?|bert|roberta|deberta|bloom)",
    re.IGNORECASE,
)
FAMILY_FREE = ("mesh", "nn", "models", "training", "losses", "data", "core")


class Import(NamedTuple):
    module: str
    line: int
    in_function: bool


class _Reader(ast.NodeVisitor):
    """Collects the full name of every module a file imports; `package` resolves relative ones."""

    def __init__(self, package: str):
        self.package, self.found = package.split("."), []
        self.depth = 0

    def visit_FunctionDef(self, node):
        self.depth += 1
        self.generic_visit(node)
        self.depth -= 1

    visit_AsyncFunctionDef = visit_Lambda = visit_FunctionDef

    def visit_Import(self, node):
        for alias in node.names:
            self._add(alias.name, node)

    def visit_ImportFrom(self, node):
        base = self.package[: len(self.package) - node.level + 1] if node.level else []
        module = ".".join([*base, *([node.module] if node.module else [])])
        for alias in node.names:
            self._add(f"{module}.{alias.name}", node)

    def visit_Call(self, node):
        called = ast.unparse(node.func)
        if called in ("__import__", "import_module", "importlib.import_module") and node.args:
            [first, *_] = node.args
            if isinstance(first, ast.Constant):
                self._add(first.value, node)
        self.generic_visit(node)

    def _add(self, module, node):
        self.found.append(Import(module, node.lineno, self.depth > 0))


def imports(source: str, file: str) -> list[Import]:
    """The imports of a file; `file` is its path relative to the package, e.g. "nn/layers.py"."""
    reader = _Reader(".".join(["trl_jax", *Path(file).parts[:-1]]))
    reader.visit(ast.parse(source))
    return reader.found


def wrong_imports(source: str, file: str) -> list[str]:
    """The imports that the file may not have, one line each."""
    return [f"{file}:{i.line}: {why}" for i in imports(source, file) if (why := _objection(i, file))]


def _objection(found: Import, file: str) -> str | None:
    room, (top, *below) = Path(file).parts[0], found.module.split(".")
    if top in BROUGHT:
        allowed = found.in_function and (file in BRIDGES or (top, file) == ("trl", RUNS_TRL))
        return None if allowed else f"{found.module}: only inside functions of {', '.join(BRIDGES)}"
    if top != "trl_jax":
        never = top in NEVER.get(room, "").split() or (Path(file) in PURE and top in PURE_NEVER)
        return f"{room} must never import {top}" if never else None
    if not below or below[0] not in FLOORS:
        return f"{found.module}: rooms do not import the door"
    return _own(found, file, room, below)


def _own(found: Import, file: str, room: str, below: list[str]) -> str | None:
    other = below[0]
    if Path(file) in PURE and other in PURE_NEVER:
        return f"{file} must never import {other}"
    if room == other:
        return _between_trainers(file, below) if room == "trainer" else None
    if other in NEVER.get(room, "").split():
        return f"{room} must never import {other}"
    if FLOORS[other] < FLOORS[room] or (room, other) in NEIGHBORS:
        return None
    return f"{room} (floor {FLOORS[room]}) must not import {other} (floor {FLOORS[other]})"


def _between_trainers(file: str, below: list[str]) -> str | None:
    def trainer(name):
        return name.endswith("_trainer") and name != "base_trainer"

    me, other = Path(file).stem, below[1]
    if trainer(me) and trainer(other):
        return f"one trainer must never import another: {me} imports {other}"
    if me in ("base_trainer", "reference", "online", "overrides") and trainer(other):
        return f"{me} must not import {other}"
    return None


def family_names(source: str) -> list[str]:
    """Model families named in identifiers or in strings that are not docstrings, as "line: text"."""
    tree = ast.parse(source)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and ast.get_docstring(node, clean=False) is not None
    }
    found = []
    for node in ast.walk(tree):
        if id(node) in docstrings:
            continue
        words = [value for _, value in ast.iter_fields(node) if isinstance(value, str)]
        found += [f"{node.lineno}: {word}" for word in words if FAMILIES.search(word)]
    return found


def files(*rooms: str) -> list[str]:
    return sorted(str(path.relative_to(PACKAGE)) for room in rooms for path in (PACKAGE / room).rglob("*.py"))


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


def imported(name: str, path: Path, modules: dict[str, Path]) -> set[str]:
    """The modules of the package that module `name` imports, including imports inside functions and for typing."""
    found = {i.module for i in imports(path.read_text(), str(path.relative_to(PACKAGE)))}
    names = {module if module in modules else module.rpartition(".")[0] for module in found}
    return (names & modules.keys()) - {name, "trl_jax"}


@pytest.mark.parametrize("file", files(*FLOORS))
def test_imports_go_down(file):
    assert wrong_imports((PACKAGE / file).read_text(), file) == []


@pytest.mark.parametrize("file", files(*FAMILY_FREE))
def test_no_family_is_named(file):
    assert family_names((PACKAGE / file).read_text()) == []


def test_no_files_import_each_other_in_a_circle():
    modules = {module_of(path): path for path in PACKAGE.rglob("*.py")}
    left = {name: imported(name, path, modules) for name, path in modules.items()}
    while leaves := {name for name, needed in left.items() if not needed & left.keys()}:
        left = {name: needed for name, needed in left.items() if name not in leaves}
    assert left == {}


def test_private_parts_of_jax_are_used_in_one_file():
    """They change without notice: code that depends on them should be easy to find."""
    used = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if "jax._src" in path.read_text()}
    assert used == {"mesh/jax_internals.py"}


def test_every_room_has_a_floor():
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert rooms <= set(FLOORS) and {"core", "nn", "hub", "training", "trainer"} <= rooms


# The checker itself must be able to fail.


@pytest.mark.parametrize(
    ("file", "source", "why"),
    [
        (
            "nn/attention/attention.py",
            "if TYPE_CHECKING:\n    from trl_jax.models.arch import Arch",
            "nn (floor 3) must not import models (floor 4)",
        ),
        (
            "nn/layers.py",
            "from trl_jax.models.arch import Arch",
            "nn (floor 3) must not import models (floor 4)",
        ),
        ("nn/layers.py", "from trl_jax.data import order", "nn (floor 3) must not import data (floor 3)"),
        ("nn/layers.py", "import optax", "nn must never import optax"),
        ("core/a.py", "def f():\n    import jax.numpy as jnp", "core must never import jax"),
        ("core/a.py", "from .. import data", "core (floor 0) must not import data (floor 3)"),
        ("data/a.py", "from ..hub.files import x", "data (floor 3) must not import hub (floor 5)"),
        ("data/a.py", "import jax", "data must never import jax"),
        ("losses/a.py", "from flax import nnx", "losses must never import flax"),
        ("models/a.py", "import safetensors.numpy", "models must never import safetensors"),
        ("hub/families/a.py", "from ...training import step", "hub (floor 5) must not import training (floor 7)"),
        ("training/update.py", "def f():\n    from trl_jax.data import batch", "update.py must never import data"),
        ("training/devices.py", "from trl_jax import hub", "devices.py must never import hub"),
        ("training/checkpoint_files.py", "from flax import nnx", "training must never import flax"),
        ("training/a.py", "from trl_jax import RewardTrainer", "rooms do not import the door"),
        ("training/a.py", "import trl_jax", "rooms do not import the door"),
        ("trainer/a.py", "import importlib\nimportlib.import_module('torch')", "only inside functions of"),
        ("trainer/a.py", "from trl_jax.scripts import utils", "trainer (floor 8) must not import scripts"),
        ("trainer/sft_trainer.py", "from .reward_trainer import x", "one trainer must never import another"),
        ("trainer/base_trainer.py", "from . import reward_trainer", "base_trainer must not import"),
        ("trainer/online.py", "from trl_jax.trainer import grpo_trainer", "online must not import"),
        ("exported/program.py", "import torch", "only inside functions of exported/program.py"),
        ("hub/model.py", "def f():\n    import peft.utils", "only inside functions of exported/program.py"),
        ("scripts/a.py", "from trl_jax.cli import main", "scripts (floor 10) must not import cli (floor 10)"),
    ],
)
def test_the_checker_objects(file, source, why):
    [found] = wrong_imports(source, file)
    assert why in found


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("hub/a.py", "from trl_jax.data.batch import last_real_token"),
        ("exported/program.py", "def f():\n    import torch"),
        ("training/update.py", "import transformers, jax, optax"),
        ("cli/main.py", "from trl_jax.scripts import reward"),
        ("trainer/sft_trainer.py", "from .base_trainer import BaseTrainer"),
    ],
)
def test_the_checker_allows(file, source):
    assert wrong_imports(source, file) == []


def test_an_import_for_typing_counts():
    source = "if TYPE_CHECKING:\n    from trl_jax.data.batch import Batch\nelse:\n    import flax"
    assert len(wrong_imports(source, "training/update.py")) == 2


def test_family_names_are_found_in_code_and_strings_but_not_in_docstrings():
    source = textwrap.dedent('''
        """As in Llama 2."""
        def f(qwen3, x):
            """Mistral's."""
            if x.model_type == "gemma2" or x.rope_type == "llama3":
                return is_llama
    ''')
    assert sorted(family_names(source)) == ["3: qwen3", "5: gemma2", "6: is_llama"]
