"""The README's table of what is supported says what the code says."""

from pathlib import Path

import pytest

from compat_tests import readme_table
from trl_jax.core.arguments.base import SUPPORTED
from trl_jax.hub.config.rope import KINDS

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def listed(what: str) -> set[str]:
    row = next(line for line in README.splitlines() if line.startswith(f"| {what} |"))
    return set(row.split("|")[2].strip().split(", "))


@pytest.mark.parametrize(
    ("what", "built"),
    [
        ("rope types", set(KINDS)),
        ("optimizers", set(SUPPORTED["optim"])),
        ("schedules", set(SUPPORTED["lr_scheduler_type"])),
        ("sampling", set(SUPPORTED["train_sampling_strategy"])),
    ],
)
def test_the_table_of_what_is_supported_is_the_codes(what, built):
    assert listed(what) == built


def test_the_table_of_model_types_is_the_codes():
    [start] = [at for at, line in enumerate(README.splitlines()) if line.startswith("| model type |")]
    rows = README.splitlines()[start + 2 :]
    assert rows[: rows.index("")] == readme_table.lines()


def test_the_family_shown_is_the_one_that_runs():
    shown = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert f"```python\n{(ROOT / 'trl_jax/hub/families/arcee.py').read_text(encoding='utf-8')}```" in shown
