"""Figures and lists in README.md and docs/ match the code, or the tables of measurements."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import re
import tomllib

import pytest

import trl_jax
from benchmarks import division, meshes, pods
from compat_tests import pages, readme_table
from compat_tests import test_import_layers as layers
from compat_tests.hub.peft import test_targets
from compat_tests.models.test_layouts import CASES as LAYOUTS
from compat_tests.pages import FOLDER, PAGES, README, ROOT, table
from compat_tests.parity import test_mutants
from compat_tests.parity.cases import CASES
from compat_tests.parity.marks import Marks
from trl_jax.cli import main
from trl_jax.hub.config_reader import KINDS
from trl_jax.plan.chips import CHIPS

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def section(page: str, heading: str) -> str:
    return " ".join(pages.sections(FOLDER / page)[heading].split())


# README


def test_the_readme_is_read_to_the_end():
    assert len(pages.read(README).splitlines()) <= 150


def test_the_trainers_are_those_of_trl_and_two_experimental_ones():
    [shown] = [found for found in pages.tables(pages.read(README)) if "trainer" in found[0]]
    trl = pytest.importorskip("trl")
    theirs = {name for name in trl.__all__ if name.endswith("Trainer")} | {"ORPOTrainer", "CPOTrainer"}
    assert len(shown) == len(theirs) and {row["trainer"].strip("`") for row in shown} == theirs
    for row in shown:
        assert row["trainer"].strip("`") in trl_jax.__all__, row
        assert row["command"].strip("`").removeprefix("trl-jax ") in main.COMMANDS, row


@pytest.mark.parametrize("page", [README, FOLDER / "getting-started.md"], ids=lambda page: page.name)
def test_the_pythons_are_the_projects(page):
    first, end = re.fullmatch(r">=3\.(\d+),<3\.(\d+)", PROJECT["requires-python"]).groups()
    versions = [f"3.{minor}" for minor in range(int(first), int(end))]
    assert f"Python {', '.join(versions[:-1])} or {versions[-1]}." in pages.read(page)


# Lists from the code


SUPPORTED = {name: line.supported for name, line in trl_jax.RewardConfig.argument_table().items() if line.supported}


@pytest.mark.parametrize("argument", ["optim", "lr_scheduler_type", "train_sampling_strategy"])
def test_what_an_argument_may_be(argument):
    assert tuple(table("reward.md", "Arguments")[f"`{argument}`"]["values"].split(", ")) == SUPPORTED[argument]


def test_arguments_that_trl_does_not_have():
    trl = pytest.importorskip("trl")
    told = pages.tables(pages.sections(FOLDER / "reward.md")["Arguments"])[1]
    names = {name for row in told for name in re.findall(r"`(\w+)`", row["argument"])}
    ours, theirs = ({field.name for field in dataclasses.fields(side.RewardConfig)} for side in (trl_jax, trl))
    assert names == ours - theirs


def test_rope_types():
    [shown] = [row for found in pages.tables(pages.read(FOLDER / "models.md")) for row in found
               if row.get("property of a checkpoint") == "rope types"]  # fmt: skip
    assert set(shown["supported"].split(", ")) == set(KINDS)


def test_model_types():
    lines = pages.read(FOLDER / "models.md").splitlines()
    start = next(at for at, line in enumerate(lines) if line.startswith("| model type |")) + 2
    assert lines[start : lines.index("", start)] == readme_table.lines()


def test_devices_that_a_plan_knows():
    shown = re.findall(r"`(\w+):[ABC](x[ABC])*`", table("plans.md", "Flags")["`--topology`"]["meaning"])
    assert {kind for kind, _ in shown} == {*CHIPS, "cpu"}


def test_flags_that_a_plan_adds():
    """Flags in the table exist for `plan`, and some only for `plan`."""
    flags = {command: _flags(command) for command in ("plan", "reward")}
    named = {name for cell in table("plans.md", "Flags") for name in re.findall(r"`(--\w+)`", cell)}
    added = {"--topology", "--json", "--suggestions", "--trainer", "--generate"}
    assert named <= flags["plan"] and added == named - flags["reward"]


def _flags(command: str) -> set[str]:
    script = importlib.import_module(f"trl_jax.scripts.{command}")
    return set(script.make_parser(prog=command)._option_string_actions)


@pytest.mark.parametrize("command", ["reward", "plan"])
def test_help_begins_with_an_example(command, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    text = importlib.import_module(f"trl_jax.scripts.{command}").make_parser(prog=f"trl-jax {command}").format_help()
    example = re.match(r"usage: .*?\n\n.*?\n\n  (trl-jax .*?)\n\n", text, flags=re.S)[1].replace("\\\n", " ").split()
    seen = []
    monkeypatch.setattr(f"trl_jax.scripts.{command}.main", lambda *configs: seen.append(configs))
    assert example[:2] == ["trl-jax", command] and main.main(example[1:]) == 0 and len(seen) == 1


def test_plan_says_what_it_is_for():
    text = importlib.import_module("trl_jax.scripts.plan").make_parser(prog="plan").format_help()
    assert "whether a run fits on devices" in text and "whether a run fits" in main.COMMANDS["plan"]


# Figures from the code


def test_tolerances():
    allowed, marks = table("exactness.md", "Side by side with TRL"), Marks()
    assert float(allowed["loss"]["tolerance"]) == marks.loss
    assert float(allowed["rewards, margin, gradient norm"]["tolerance"]) == marks.rewards == marks.grad_norm
    assert float(allowed["the saved weights"]["tolerance"]) == CASES["plain"].weights
    told = " ".join(pages.sections(README)["Exactness"].split())
    assert f"losses agree within {allowed['loss']['tolerance']};" in told and "saved weights within 2e-4" in told


def test_counts():
    broken = len(test_mutants.MUTANTS) + sum(
        name.startswith("test_") and name != "test_a_broken_part_is_noticed" for name in vars(test_mutants)
    )
    parity = section("exactness.md", "Side by side with TRL")
    assert f" {len(CASES)} runs of at least 30 steps" in parity and f"in {broken} ways" in parity
    assert f"In {len(LAYOUTS)} variants of the decoders" in section("performance.md", "Layouts")
    adapters = section("adapters.md", "How close to PEFT")
    assert f"On {len(test_targets.FAMILIES)} native types" in adapters
    assert f"the {len(trl_jax.LoraConfig().to_dict())} keys of" in adapters
    several = section("exactness.md", "Several devices")
    assert len(meshes.MESHES) == 15 and "on fifteen meshes" in several
    assert table("exactness.md", "Several devices")["llama"]["runs"] == str(len(meshes.MESHES) * len(meshes.LAYOUTS))


def test_devices_share_what_one_holds():
    """With fsdp and tensor everything is sharded, with data nothing, with ZeRO everything except the weights."""
    shown = table("devices.md", "Memory and communication per device")
    names = {name.replace("ZeRO 1 or 2 over 8", "zero1:8") for name in shown}
    assert names == {*division.MESHES} - {"data:1", "zero2:8"}
    for name, row in shown.items():
        share = 1.0
        for size in re.findall(r"(?:fsdp|tensor):(\d)", name):
            share /= int(size)
        moments = 1 / 8 if name.startswith("ZeRO") else share
        for column, whole, part in (("weights", 117.5, share), ("optimizer state", 235.0, moments)):
            assert float(row[column]) == pytest.approx(whole * part, abs=0.2), (name, column)


def test_rows_of_published_models_are_those_of_the_script():
    told = pages.tables(pages.sections(FOLDER / "plans.md")["Published models"])
    rows = [(row["model"], row["slice, mesh"]) for found in told for row in found]
    assert rows == [(pods.ROWS[at][0], ", ".join(pods.ROWS[at][1:3])) for at in (3, 4, 5, 0, 1, 2, 6)]


# Figures derived from measurements


def _times(heading: str, column: int = 0) -> tuple[float, float]:
    """Pairs per second relative to TRL: both with default settings, and both tuned."""
    rows = [line for line in pages.sections(FOLDER / "performance.md")[heading].splitlines() if line.startswith("|")]
    at = [place for place, name in enumerate(rows[0].split("|")) if name.strip() == "pairs/s"][column]
    value = {line.split("|")[1].strip(): line.split("|")[at] for line in rows[2:]}
    return tuple(float(value[f"trl_jax, {arm}"]) / float(value[f"TRL, {arm}"]) for arm in ("default", "tuned"))


def test_times_faster_follow_from_the_tables():
    real, single, same = _times("Real pairs"), _times("Other data"), _times("Other data", 1)
    assert "that is {:.1f}x TRL with default settings and {:.1f}x TRL tuned".format(*real) in section(
        "performance.md", "Real pairs"
    )
    told = section("performance.md", "Other data")
    assert "that is {:.1f}x TRL with default settings and {:.1f}x TRL tuned on single turns".format(*single) in told
    assert "{:.2f}x and {:.2f}x on equal-length pairs".format(*same) in told
    shown = _readme_speeds()
    assert shown["2 CPU cores (AMD EPYC)", "reward model, hh-rlhf pairs"] == tuple(f"{times:.1f}x" for times in real)
    equal = shown["2 CPU cores (AMD EPYC)", "reward model, equal-length pairs, no shared prompt"]
    assert equal == tuple(f"{times:.2f}x" for times in same)


def _readme_speeds() -> dict[tuple[str, str], tuple[str, str]]:
    """(hardware, task) -> README's factors against TRL's defaults and against tuned TRL."""
    [shown] = [found for found in pages.tables(pages.sections(README)["Speed"]) if "hardware" in found[0]]
    return {(row["hardware"], row["task"]): (row["vs TRL default"], row["vs TRL tuned"]) for row in shown}


def test_the_home_page_shows_the_speeds_of_the_readme():
    [here], [there] = (
        [found for found in pages.tables(text) if "hardware" in found[0]]
        for text in (pages.read(FOLDER / "index.md"), pages.read(README))
    )
    assert here == there


def test_every_measured_speed_names_its_hardware_and_dtype():
    [shown] = pages.tables(pages.sections(README)["Speed"])
    assert {"hardware", "dtype", "task", "vs TRL default", "vs TRL tuned"} == set(shown[0])
    assert all(all(row.values()) for row in shown)
    assert re.findall(r"\d[.\d]*(?:x|×| times)", pages.read(FOLDER / "images" / "shared_prompt.svg")) == []


def test_times_faster_on_a_gpu_follow_from_the_table():
    rows, shown = table("performance.md", "On a GPU"), _readme_speeds()
    rates = {name: float(row["tokens of text/s"].replace(",", "")) for name, row in rows.items()}
    times = {name: row["speedup"].split()[0] for name, row in rows.items()}
    tasks = {
        "reward": "reward model, hh-rlhf pairs",
        "SFT on conversations": "SFT on conversations",
        "SFT on long rows": "SFT on rows of 2,048 tokens",
        "LoRA of Llama-3.1-8B, long rows": "LoRA of Llama-3.1-8B on rows of 2,048 tokens",
        "GRPO": "GRPO",
    }
    assert {task for hardware, task in shown if hardware == "NVIDIA H200"} == set(tasks.values())
    for name, task in tasks.items():
        tuned = f"{name}: TRL, tuned"
        factor = f"{rates[f'{name}: trl_jax'] / rates[tuned]:.1f}x" if tuned in rates else "not measured"
        assert shown["NVIDIA H200", task] == (times[f"{name}: trl_jax"], factor), name
        # The speedup is a median over alternating turns, which this ratio is not.
        ratio = rates[f"{name}: trl_jax"] / rates[f"{name}: TRL, default"]
        assert ratio == pytest.approx(float(times[f"{name}: trl_jax"].rstrip("x")), rel=0.1), name


def test_times_faster_of_the_larger_model():
    rows = table("performance.md", "A larger model")
    for arm in ("default", "tuned"):
        for kind, told in list(rows[f"speedup in pairs/s, {arm}"].items())[1:]:
            theirs, ours = (float(rows[f"{side}, {arm}"][kind].split()[0]) for side in ("TRL", "trl_jax"))
            # Seconds are medians, while the speedup is of pairs per second.
            assert float(told.rstrip("x")) == pytest.approx(theirs / ours, rel=0.04), (arm, kind)


@pytest.mark.parametrize(
    "picture",
    ["cost", "folders", "generation", "results_distillation", "results_dpo", "results_grpo", "results_sft", "speed"],
)
def test_pictures_are_those_of_their_tables(picture):
    spec = importlib.util.spec_from_file_location("pictures", ROOT / "docs" / "pictures.py")
    pictures = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pictures)
    assert pages.read(FOLDER / "images" / f"{picture}.svg") == vars(pictures)[picture]()


def test_folders_are_those_whose_imports_are_read():
    rows = table("architecture.md", "Folders")
    folders = {name.strip("`"): row for name, row in rows.items()}
    assert {folder: int(row["layer"]) for folder, row in folders.items()} == layers.FLOORS
    for folder, row in folders.items():
        assert row["must not import"].replace(",", "").split() == layers.NEVER.get(folder, "").split(), folder


FILES_NAMED = {
    FOLDER / "architecture.md": 25,
    FOLDER / "design-notes.md": 60,
    FOLDER / "add-a-family.md": 6,
    ROOT / "CONTRIBUTING.md": 10,
}


@pytest.mark.parametrize("page", FILES_NAMED, ids=lambda page: page.name)
def test_files_that_are_named_are_there(page):
    named = re.findall(r"`(?:bash |python )?((?:[\w.*]+/)+(?:[\w*.]+\.(?:py|sh|md))?)", pages.read(page))
    places = [ROOT, ROOT / "trl_jax", ROOT / "compat_tests", ROOT / "trl_jax" / "nn" / "attention"]
    missing = [name for name in named if "NAME" not in name and not any([*place.glob(name)] for place in places)]
    assert len(named) > FILES_NAMED[page] and not missing


def test_contributing_is_short():
    assert len(pages.read(ROOT / "CONTRIBUTING.md").splitlines()) <= 90


@pytest.mark.parametrize(
    ("name", "heading", "count"),
    [
        ("custom_preference_loss", "A preference loss", 1),
        ("custom_policy_loss", "A policy gradient loss", 1),
        ("pointwise", "A score head", 3),
    ],
)
def test_the_trainer_shown_is_the_example(name, heading, count):
    """Except for line breaks, because code blocks on the pages are narrower."""
    page = pages.read(FOLDER / "write-a-trainer.md")
    section = page.split(f"## {heading}\n")[1].split("\n## ")[0]
    imports, *parts = re.findall(r"```python\n(.*?)```", section, flags=re.S)
    code = (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8")
    assert _imported(imports) <= _imported(code)
    statements = [ast.unparse(node) for node in ast.parse(code).body]
    shown = [ast.unparse(node) for node in ast.parse("\n".join(parts)).body]
    start = statements.index(shown[0])
    assert len(parts) == count and statements[start : start + len(shown)] == shown
    assert name != "pointwise" or f"{len(code.splitlines())} lines" in section


def _imported(code: str) -> set[tuple[str, str]]:
    """(module, name) of each import; the module is "" for `import name`."""
    nodes = [node for node in ast.parse(code).body if isinstance(node, ast.Import | ast.ImportFrom)]
    return {(node.module if isinstance(node, ast.ImportFrom) else "", one.name) for node in nodes for one in node.names}


# The numbers in releases.md are versions, and those in the other two are defaults.
MEASURED = [page for page in PAGES if page.name not in ("releases.md", "from-easydel.md", "from-tunix.md")]


@pytest.mark.parametrize("page", MEASURED, ids=[page.name for page in MEASURED])
def test_a_table_of_measurements_names_its_command(page):
    """In its section, or through a link to the section with the method."""
    for heading, text in pages.sections(page).items():
        cells = [cell for found in pages.tables(text) for row in found for cell in row.values()]
        if sum(bool(re.search(r"\d\.\d\d|\d\.\de-\d", cell)) for cell in cells) >= 3:
            named = re.search(
                r"python -m (benchmarks|compat_tests)\.|compat_tests/[\w/]+\.py|trl-jax plan --|\(#method\)", text
            )
            assert named, (page.name, heading)


def test_the_family_shown_is_the_one_that_runs():
    shown = (FOLDER / "add-a-family.md").read_text(encoding="utf-8")
    assert f"```python\n{(ROOT / 'trl_jax/hub/families/starcoder2.py').read_text(encoding='utf-8')}```" in shown
