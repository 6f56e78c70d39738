"""The examples do what README says. Without THOROUGH=1 they are shortened, with lower expectations."""

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from compat_tests.effort import THOROUGH, only_thorough

ROOT = Path(__file__).resolve().parents[1]
PAIRS = ROOT / "examples" / "data" / "preferences_train.jsonl"


def run(script: Path, *arguments: object) -> str:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'examples'}", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def _epochs(few: int) -> list:
    return [] if THOROUGH else ["--epochs", few]


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "examples").glob("*.py")))
def test_what_an_example_imports_is_there(name, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    assert runpy.run_path(str(ROOT / "examples" / f"{name}.py"))["__doc__"]


@only_thorough
def test_the_quickstart_learns(tmp_path):
    shown = run(ROOT / "examples" / "quickstart.py", "--output_dir", tmp_path, *_epochs(1))
    first, last = map(float, re.search(r"From (\d\.\d+) to (\d\.\d+)", shown).groups())
    assert first < 0.7 and last > (0.9 if THOROUGH else 0.85)
    helpful, dismissive = map(float, re.findall(r"^  ([+-]\d+\.\d+)  ", shown, flags=re.M))
    assert helpful > dismissive
    assert (tmp_path / "curve.svg").read_text().startswith("<svg")


@only_thorough  # by default covered by the rewards example, which starts with it
def test_fine_tuning_learns(tmp_path):
    shown = run(ROOT / "examples" / "sft.py", "--output_dir", tmp_path, *_epochs(10))
    first, last, wrong, right = map(float, re.search(
        r"loss went from (\d\.\d+) to (\d\.\d+), and the token accuracy from (\d\.\d+) to (\d\.\d+)\.", shown
    ).groups())  # fmt: skip
    assert first > 5 and last < (1 if THOROUGH else 2) and wrong < 0.1 and right > (0.85 if THOROUGH else 0.5)
    assert int(re.search(r"^(\d) of 4 answers are correct\.$", shown, flags=re.M)[1]) >= 3 * THOROUGH
    assert (tmp_path / "final" / "generation_config.json").is_file()


@only_thorough
def test_a_student_learns_what_its_teacher_knows(tmp_path):
    shown = run(ROOT / "examples" / "distillation.py", "--output_dir", tmp_path)
    first, last = map(float, re.search(r"went from (\d\.\d+) to (\d\.\d+)\.", shown).groups())
    known, before, after = map(float, re.search(
        r"teacher (\d\.\d+), student (\d\.\d+) before and (\d\.\d+) after\.", shown
    ).groups())  # fmt: skip
    assert last < 0.3 * first and before < 0.25 and known > 0.8 and after > 0.5
    assert (tmp_path / "divergence.svg").read_text().startswith("<svg")


@only_thorough
def test_preferences_are_learned(tmp_path):
    shown = run(ROOT / "examples" / "dpo.py", "--output_dir", tmp_path)
    assert int(re.search(r"^(\d) of 4 answers are correct\.$", shown, flags=re.M)[1]) >= 3
    assert "Questions that were brushed off: 4 before, 0 after." in shown
    first, last = map(float, re.search(r"The margin went from (\d\.\d+) to (\d\.\d+)\.", shown).groups())
    assert first == 0 and last > 0.1
    picture = (tmp_path / "rewards.svg").read_text()
    assert picture.startswith("<svg") and picture.count("<polyline") == 3
    assert (tmp_path / "final" / "generation_config.json").is_file()


@only_thorough
def test_pictures_are_read(tmp_path):
    shown = run(ROOT / "examples" / "vision.py", "--output_dir", tmp_path)
    color, digit = (int(found) for found in re.findall(r"On 50 new pictures, (\d+)% of answers", shown))
    assert color == 100 and digit > 60
    assert (tmp_path / "curve.svg").read_text().startswith("<svg") and (tmp_path / "picture.png").is_file()


@pytest.fixture(scope="module")
def of_grpo(tmp_path_factory):
    """The folder that the GRPO example writes, and its output."""
    folder = tmp_path_factory.mktemp("grpo")
    return folder, run(ROOT / "examples" / "grpo.py", "--output_dir", folder, *([] if THOROUGH else ["--steps", 60]))


@only_thorough
def test_rewards_are_learned(of_grpo):
    folder, shown = of_grpo
    first, last = map(float, re.search(r"correct answers went from (\d\.\d+) to (\d\.\d+)\.", shown).groups())
    assert first < 0.2 and last > 0.8
    picture = (folder / "rewards.svg").read_text()
    assert picture.startswith("<svg") and picture.count("<polyline") == 2
    assert len(re.findall(r"before: .+ after: .+", shown)) == 4
    assert (folder / "final" / "generation_config.json").is_file()


@only_thorough
def test_a_reward_model_picks_better_answers(of_grpo, tmp_path):
    own = [] if THOROUGH else ["--policy", of_grpo[0] / "fine-tuned"]
    shown = run(ROOT / "examples" / "best_of_n.py", "--output_dir", tmp_path, *own)
    first, last = map(float, re.search(r"correct answers went from (\d\.\d+) to (\d\.\d+)\.", shown).groups())
    assert first < 0.2 and last > 0.3  # in a short training, results depend on rounding
    assert len(re.findall(r"first: .+ best of 16: .+", shown)) == 4
    assert (tmp_path / "judge" / "model.safetensors").is_file()


@only_thorough
def test_a_script_ported_by_its_import_prints_trls_losses(tmp_path):
    pytest.importorskip("trl")
    sys.path.insert(0, str(ROOT / "examples"))
    import tiny_model

    model = tiny_model.build(tmp_path / "model", [row["chosen"][0]["content"] for row in rows()])
    ours = ROOT / "examples" / "reward.py"
    theirs = tmp_path / "reward.py"
    theirs.write_text(ours.read_text().replace("from trl_jax import", "from trl import"))
    for script, out in ((ours, tmp_path / "ours"), (theirs, tmp_path / "theirs")):
        run(script, model, PAIRS, out)
    losses = [losses_of(tmp_path / name / "trainer_state.json") for name in ("ours", "theirs")]
    assert len(losses[0]) >= 4
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def losses_of(state: Path) -> list[float]:
    return [entry["loss"] for entry in json.loads(state.read_text())["log_history"] if "loss" in entry]


def rows() -> list[dict]:
    return [json.loads(line) for line in PAIRS.read_text().splitlines()]
