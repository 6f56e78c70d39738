"""README.md and docs/ show code that runs, commands that parse, and links that resolve."""

from __future__ import annotations

import argparse
import ast
import builtins
import dataclasses
import functools
import importlib
import inspect
import itertools
import json
import re
import runpy
import shlex
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from transformers import TrainingArguments

import trl_jax
from compat_tests import pages
from compat_tests.pages import FOLDER, PAGES, README, ROOT
from trl_jax.cli import main
from trl_jax.core.trainers import EXPERIMENTAL, TRAINERS
from trl_jax.rollout.server import Limits, Requirements
from trl_jax.rollout.sglang import Sglang
from trl_jax.rollout.vllm import Vllm

EVERY = pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
A_READER_HAS = ("pairs", "rows", "held_out", "trainer")  # names that a page may use without defining them
CONFIGS = (trl_jax.RewardConfig, trl_jax.SFTConfig, trl_jax.LoraConfig, trl_jax.BitsAndBytesConfig)
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """An empty working directory with the YAML file that the pages show; examples can be imported."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    [shown] = pages.blocks(FOLDER / "getting-started.md", "yaml")
    Path("reward.yaml").write_text(shown.code)


@EVERY
def test_python_has_its_names_and_its_arguments(page):
    known: dict[str, Any] = dict.fromkeys(A_READER_HAS)
    for block in pages.blocks(page, "python", "diff"):
        code = block.code if block.language == "python" else _after(block.code)
        try:
            check_python(ast.parse(code), known)
        except Exception as error:
            raise AssertionError(f"{page.name}, the block at line {block.line}: {error!r}") from error


@EVERY
def test_trl_jax_is_imported_before_transformers(page):
    """Otherwise transformers first says that PyTorch was not found."""
    code = "\n".join(block.code for block in pages.blocks(page, "python"))
    order = re.findall(r"^(?:import|from) (transformers|trl_jax)\b", code, flags=re.M)
    assert order[:1] != ["transformers"], page.name


def _after(diff: str) -> str:
    """The code after applying a diff."""
    return "\n".join(line[1:] for line in diff.splitlines() if not line.startswith("-"))


def check_python(tree: ast.Module, known: dict[str, Any]) -> None:
    """Run imports and definitions, and check calls against the signatures of what they call. `known` gets the names."""
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom | ast.ClassDef | ast.FunctionDef):
            exec(compile(ast.Module([node], []), "page", "exec"), known)
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    made = {node.id for node in names if isinstance(node.ctx, ast.Store)}
    made |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    made |= {one.asname or one.name for node in imports for one in node.names}
    unknown = {node.id for node in names} - made - set(known) - set(vars(builtins))
    assert not unknown, f"{sorted(unknown)} come from nowhere"
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        dotted = re.fullmatch(r"[\w.]+", ast.unparse(call.func))
        called = _meant(dotted[0].split("."), known) if dotted else None
        if called is not None:
            inspect.signature(called).bind_partial(*call.args, **{one.arg: None for one in call.keywords if one.arg})
        if called in CONFIGS:
            called(**{one.arg: ast.literal_eval(one.value) for one in call.keywords})
    known |= dict.fromkeys(made - set(known))


def _meant(path: list[str], known: dict[str, Any]) -> Any:
    """The callable with this dotted name; None if only a run could tell."""
    if path[0] == "trainer" and len(path) == 2:
        return functools.partial(getattr(trl_jax.RewardTrainer, path[1]), None)
    if path[:2] == ["trainer", "model"] and len(path) == 3:
        return functools.partial(getattr(trl_jax.PreTrainedModel, path[2]), None)
    found = known.get(path[0])
    return None if found is None else functools.reduce(getattr, path[1:], found)


class Parsed(BaseException):
    """Raised once a command has parsed its arguments."""


PARSE_ARGS = argparse.ArgumentParser.parse_args


def parse_and_stop(self, *args, **kwargs):
    raise Parsed(PARSE_ARGS(self, *args, **kwargs))


def stop(*configs):
    raise Parsed(configs)


@EVERY
def test_commands_are_taken(page, monkeypatch):
    for words in commands(page):
        with monkeypatch.context() as patched:
            try:
                check_command(words, patched)
            except (Exception, SystemExit, pytest.fail.Exception) as error:
                raise AssertionError(f"{page.name}: {shlex.join(words)}: {error!r}") from error


def commands(page: Path) -> list[list[str]]:
    """Commands in code blocks, and those in the text that have a flag."""
    lines = [line for block in pages.blocks(page, "bash") for line in block.code.replace("\\\n", " ").splitlines()]
    lines += re.findall(r"`((?:trl-jax|python -m|bash) [^`]+)`", pages.prose(page))
    split = [shlex.split(line, comments=True) for line in lines]
    return [without_variables(words) for words in split if words]


def without_variables(words: list[str]) -> list[str]:
    return list(itertools.dropwhile(re.compile(r"sudo$|[A-Z_]+=").match, words))


def check_command(words: list[str], patched: pytest.MonkeyPatch) -> None:
    """Parse the command's arguments as it would, and stop there.

    Raises what the command's own parser raises, or AssertionError if there is no such command, file or extra.
    """
    match words:
        case ["vllm", "serve", model, "--port", port, *_]:
            needs = Requirements(model, vocab_size=1, max_tokens=1, processed_logps=True, adapter_rank=16)
            engine = Vllm([], needs, Limits(1.0))
            engine.takes_adapters = "--enable-lora" in words
            assert words == without_variables(shlex.split(engine.command(f"http://host:{port}")))
        case ["sglang", "serve", "--model-path", model, "--port", port, *_]:
            needs = Requirements(model, vocab_size=1, max_tokens=1, processed_logps=True, adapter_rank=16)
            engine = Sglang([], needs, Limits(1.0))
            engine.takes_adapters = "--enable-lora" in words
            assert words == shlex.split(engine.command(f"http://localhost:{port}"))
        case ["pip", "install", what]:
            extra = re.fullmatch(r"\.(?:\[(\w+)\])?", what)
            assert extra and (extra[1] is None or extra[1] in EXTRAS), f"there is no {what}"
        case ["bash", script, *rest]:
            assert all((ROOT / path).exists() for path in (script, *rest)), "there is no such file"
        case ["trl-jax", command, *flags]:
            assert command in main.COMMANDS, f"there is no {command}"
            if flags and flags != ["--help"]:
                patched.setattr(f"{main.module_of(command)}.main", stop)
                with pytest.raises(Parsed):
                    assert main.main([command, *flags]) == 0, "it exits with an error"
        case ["python", "-m", "trl_jax", *_]:
            pass
        case ["python", "-m", module, *flags]:
            assert (ROOT / f"{module.replace('.', '/')}.py").is_file(), f"there is no {module}"
            if module != "compat_tests.readme_table":
                patched.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
                patched.setattr(sys, "argv", [module, *flags])
                with pytest.raises(Parsed):
                    importlib.import_module(module).main()
        case ["python", script]:
            assert (ROOT / script).is_file(), f"there is no {script}"
        case ["mkdocs", "build" | "serve", *_, "-f", file]:
            assert (ROOT / file).is_file()
        case ["docker", "build", "-f", file, *_]:
            assert (ROOT / file).is_file(), f"there is no {file}"
        case ["docker", "run", *_, image, command] if image.startswith("trl_jax:"):
            assert (ROOT / "docker" / f"{image.partition(':')[2]}.Dockerfile").is_file() and command in main.COMMANDS
        case ["ls", _]:
            pass
        case _:
            raise AssertionError("a command that no test knows")


@EVERY
def test_json_is_json(page):
    for block in pages.blocks(page, "json"):
        rest = block.code
        while rest:
            row, end = json.JSONDecoder().raw_decode(rest)
            assert row
            rest = rest[end:].lstrip()


@EVERY
def test_links_lead_somewhere(page):
    for link in pages.links(page):
        if link.startswith("http"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.is_file(), f"{page.name} links to {link}"
        assert not anchor or anchor in pages.anchors(target), f"{page.name} links to {link}"


@EVERY
def test_every_screen_has_something_to_look_at(page):
    """A table, a picture or a code block at least every 30 lines."""
    plain, code = 0, False
    for number, line in enumerate(pages.read(page).splitlines(), start=1):
        code ^= line.startswith("```")
        plain = 0 if code or line.startswith(("|", "```", "![", ":::")) else plain + 1
        assert plain <= 30 or page.name == "api.md", f"{page.name} is nothing but text up to line {number}"


FOLDERS = ("trl_jax", "compat_tests", "benchmarks", "examples", "docs")
FILES = {str(path.relative_to(ROOT)) for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}
PACKAGE = {path: ast.parse((ROOT / path).read_text(encoding="utf-8")) for path in FILES if path.startswith("trl_jax/")}


@EVERY
def test_files_are_where_a_page_says(page):
    for file in re.findall(r"`((?:\w+/)*\w+\.py)`", pages.prose(page)):
        ours = any(path == file or path.endswith(f"/{file}") for path in FILES)
        of_transformers = file.startswith("modeling_")
        of_trl = file.startswith("test_") and page.name == "differences.md"
        assert ours or of_transformers or of_trl, f"{page.name} names {file}"


@functools.cache
def class_names() -> dict[str, set[str]]:
    """Class of the package -> every name in its body, its own ones and those of its bases."""
    own, bases = {}, {}
    for node in itertools.chain.from_iterable(map(ast.walk, PACKAGE.values())):
        if isinstance(node, ast.ClassDef):
            parts = list(ast.walk(node))
            found = {getattr(part, "name", getattr(part, "attr", getattr(part, "id", None))) for part in parts}
            own.setdefault(node.name, set()).update(found)
            bases.setdefault(node.name, set()).update(
                ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases
            )

    def inherited(name: str) -> set[str]:
        return own.get(name, {name}).union(*map(inherited, bases.get(name, ())))

    return {name: inherited(name) for name in own}


def members(text: str) -> list[tuple[str, str]]:
    """`Class.name` in backticks, for classes of the package that inherit from no other package."""
    quoted = " ".join(re.findall(r"`([^`\n]+)`", text))
    return [pair for pair in re.findall(r"\b([A-Z]\w+)\.([a-z_]\w*)", quoted) if pair[0] in class_names()]


@EVERY
def test_members_are_where_a_page_says(page):
    for owner, name in members(pages.prose(page)):
        assert name in class_names()[owner], f"{page.name} names {owner}.{name}"


def test_members_are_where_a_docstring_says():
    for path, tree in PACKAGE.items():
        nodes = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module))
        for owner, name in members(" ".join(ast.get_docstring(node) or "" for node in nodes)):
            assert name in class_names()[owner], f"{path} names {owner}.{name}"


WIDEST = 88  # columns of code that fit next to the navigation without scrolling


@EVERY
def test_code_fits_the_column(page):
    languages = ("python", "diff", "bash", "json", "yaml", "text", "pycon")
    lines = [
        (block.line + number, line)
        for block in pages.blocks(page, *languages)
        for number, line in enumerate(block.code.splitlines())
    ]
    assert [(number, len(line)) for number, line in lines if len(line) > WIDEST] == [], page.name


@EVERY
def test_tables_are_whole(page):
    """A header with names, a rule below it, rows with the same number of cells, and no blank line within."""
    lines = pages.prose(page).splitlines()
    tables = [list(rows) for is_table, rows in itertools.groupby(lines, lambda line: line.startswith("|")) if is_table]
    for head, *rest in tables:
        assert rest and re.fullmatch(r"\|( ?:?-+:? ?\|)+", rest[0]), f"{page.name}: not the head of a table: {head}"
        assert all(cell.strip() for cell in head.strip("|").split("|")), f"{page.name}: a column without a name: {head}"
        cells = {len(re.findall(r"(?<!\\)\|", row)) for row in (head, *rest)}
        assert len(cells) == 1, f"{page.name}: rows of different lengths below {head}"


@EVERY
def test_languages_of_code_are_those_that_are_checked(page):
    found = re.findall(r"^```(\w*)\n(?:.*?)^```$", pages.read(page), flags=re.M | re.S)
    assert set(found) <= {"python", "diff", "bash", "json", "yaml", "text", "pycon"}


def test_every_page_is_in_the_table_of_contents():
    nav = yaml.safe_load((ROOT / "docs" / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    named = re.findall(r"[\w-]+\.md", json.dumps(nav))
    assert sorted(named) == sorted(page.name for page in PAGES if page != README)


def test_the_api_has_every_public_name():
    named = re.findall(r"^::: trl_jax\.(\w+)$", pages.read(FOLDER / "api.md"), flags=re.M)
    assert sorted(named) == trl_jax.__all__


def test_members_that_the_api_lists_are_there():
    text = pages.read(FOLDER / "api.md")
    listed = re.findall(r"^::: trl_jax\.(\w+)\n    options:\n      members: \[(.+)\]$", text, flags=re.M)
    assert {name for name, _ in listed} == {"RewardTrainer", "PreTrainedModel", "BaseTrainer", "OnlineTrainer"}
    for name, members in listed:
        assert set(members.split(", ")) <= set(dir(getattr(trl_jax, name)))


@pytest.fixture
def listed(monkeypatch):
    """The extension that lists arguments on the API page; only building the page needs griffe."""
    monkeypatch.setitem(sys.modules, "griffe", SimpleNamespace(Extension=object, Class=object))
    return SimpleNamespace(**runpy.run_path(ROOT / "docs" / "arguments.py"))


def test_every_argument_of_a_config_has_an_entry_with_an_anchor(listed):
    named = re.findall(r"^::: (trl_jax[\w.]*\.)(\w+Config)$", pages.read(FOLDER / "api.md"), flags=re.M)
    kinds = [getattr(importlib.import_module(at.rstrip(".")), name) for at, name in named]
    kinds = [kind for kind in kinds if issubclass(kind, TrainingArguments)]
    trainers = (*TRAINERS.values(), *EXPERIMENTAL.values())
    assert {names.load_config() for names in trainers} | {trl_jax.BaseConfig} <= set(kinds)
    common = {field.name for field in dataclasses.fields(TrainingArguments)}
    for kind in kinds:
        own = listed.arguments(kind.__name__)
        inherited = set() if kind is trl_jax.BaseConfig else set(listed.arguments("BaseConfig"))
        added = {field.name for field in dataclasses.fields(kind)} - common
        assert added <= own.keys() | inherited, kind.__name__
        for name, facts in own.items():
            assert f"](#{name}){{ #{name} }} (`" in listed.entry(name, *facts)
    from trl_jax.experimental.online_dpo import OnlineDPOConfig

    unused = listed.arguments("OnlineDPOConfig")["vllm_server_port"]
    assert unused == ("int", OnlineDPOConfig.__dataclass_fields__["vllm_server_port"].metadata["help"], "8000")


def test_what_a_trainer_that_is_not_here_says():
    [shown] = pages.blocks(FOLDER / "faq.md", "pycon")
    imported, used, *answer = shown.code.splitlines()
    with pytest.raises(NotImplementedError) as error:
        exec(f"{imported}\n{used}".replace(">>> ", ""))
    assert f"NotImplementedError: {error.value}" == " ".join(answer)  # the page wraps the line


def test_extras_are_all_told():
    assert set(pages.table("getting-started.md", "Install")) == {f"`{name}`" for name in EXTRAS}


def test_scripts_of_other_people_are_counted():
    text = (FOLDER / "public-scripts.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (reward|SFT|DPO|KTO|GRPO|RLOO) \| .* \| (.*) \| (.*) \|$", text, re.MULTILINE)
    unchanged = sum(row[1].startswith("unchanged") for row in rows)
    with_trl = sum(row[2].startswith("runs,") for row in rows)
    assert f"{unchanged} of {len(rows)} run unchanged" in text and with_trl == 12 and "TRL runs twelve to" in text
    by_style = r"^\| (\d+) (?:reward|SFT|DPO|KTO|GRPO|RLOO) \| .* \| (\d+) \| (\d*) ?\| (\d*) ?\|$"
    more = re.findall(by_style, text, re.MULTILINE)
    counts = [[int(number or 0) for number in row] for row in more]
    assert len(counts) == 12 and all(row[0] == sum(row[1:]) for row in counts)
    second, third = (sum(row[0] for row in counts[part]) for part in (slice(6), slice(6, 12)))
    assert f"Another {second}," in text and f"A third round, of {third} scripts" in text
    subclasses = re.findall(r"^\| \w+Trainer: .* \| (runs|refused).* \| (runs|stops).* \|$", text, re.MULTILINE)
    assert f"so {len(subclasses)} more of these" in text and {*subclasses} == {("runs", "runs"), ("refused", "stops")}
    assert f"# {len(rows) + second + third + len(subclasses)} public scripts" in text
    of_each = [row[0] for row in rows]
    assert min(of_each.count(name) for name in set(of_each)) >= 5
