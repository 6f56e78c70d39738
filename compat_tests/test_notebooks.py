"""Runs the notebooks from top to bottom in a kernel, without a browser, on the models that they create."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "examples" / "notebooks"


@pytest.fixture
def executed(tmp_path, monkeypatch):
    """executed(name, first="", last="") -> the output of each code cell, with two more cells around them; it stops at
    the first error."""
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", paths)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")

    def run(name: str, first: str = "", last: str = "") -> list[str]:
        notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
        first, last = map(nbformat.v4.new_code_cell, (first, last))
        notebook.cells = [first, *notebook.cells, last]
        options = {"timeout": 500, "kernel_name": "python3", "resources": {"metadata": {"path": str(tmp_path)}}}
        NotebookClient(notebook, **options).execute()
        outputs = ["".join(map(shown, cell.outputs)) for cell in notebook.cells if cell.cell_type == "code"]
        assert not any("PyTorch was not found" in output for output in outputs)
        return outputs

    return run


def shown(output: nbformat.NotebookNode) -> str:
    if output.output_type == "stream":
        return output.text
    if output.output_type == "error":
        return "\n".join(output.traceback)
    data = output.data
    return data.get("text/html") or data.get("image/svg+xml") or data["text/plain"]


WITHOUT_TORCH = """
import sys
from importlib.machinery import PathFinder


class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        wanted = name.partition(".")[0] not in ("torch", "trl", "peft", "accelerate")
        return super().find_spec(name, path, target) if wanted else None


sys.meta_path[sys.meta_path.index(PathFinder)] = Without
"""
MISTAKE = """
try:
    SFTTrainer(MODEL, Dataset.from_list(rows))
except TypeError:
    get_ipython().showtraceback()
"""


def test_fine_tuning_with_lora_and_a_chat(executed):
    *_, trained, talk, error = executed("sft_lora", WITHOUT_TORCH, MISTAKE)
    headers = re.findall(r"<th>(.*?)</th>", trained)
    assert headers[:3] == ["Step", "Training Loss", "Validation Loss"]
    assert re.findall(r"<td>(\d+)</td>", trained) == ["40", "80"]
    assert talk.splitlines()[-3:-1] == [
        "What is the capital of France?  Paris is the capital of France.",
        "Name the capital of Japan.  Tokyo is the capital of Japan.",
    ]
    plain = re.sub(r"\x1b\[[0-9;]*m", "", error)
    assert "args of SFTTrainer is a Dataset. Pass it as train_dataset=" in plain
    assert "SFTTrainer(MODEL, Dataset.from_list(rows))" in plain and "trl_jax/" not in plain


def test_grpo_with_two_rewards(executed):
    *_, trained, table, picture, _, _ = executed("grpo_rewards", WITHOUT_TORCH)
    assert re.findall(r"<th>(.*?)</th>", trained) == ["Step", "Training Loss"]
    vowels = [float(number) for number in re.findall(r"vowels (\d\.\d+)", table)]
    assert len(vowels) == 6 and vowels[0] < 0.3 and vowels[-1] > 0.7
    assert picture.startswith("<svg") and "reward" in picture


def test_porting_a_script(executed):
    *_, checked, compared, picture, ran, module, _ = executed("port_a_script")
    assert "The script runs unchanged, if its data and checkpoints fit; " in checked and "refused" not in checked
    assert re.search(r"loss", compared) and "error" not in compared.lower()
    assert picture.startswith("<svg")
    assert "The model is in dpo/final. Next: trl-jax chat dpo/final" in ran
    assert module.endswith("'trl_jax.trainer.dpo_trainer'")  # libraries may log before it


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_is_kept_without_outputs_and_names_a_real_model(path):
    cells = nbformat.read(path, as_version=4).cells
    assert not any(cell.outputs or cell.execution_count for cell in cells if cell.cell_type == "code")
    assert sum("**For a real model**" in cell.source for cell in cells) == 1
    assert any("%pip install" in cell.source for cell in cells)
