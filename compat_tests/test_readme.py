"""The README's table of what is supported says what the code says."""

from pathlib import Path

import pytest

from trl_jax.core.arguments import SUPPORTED
from trl_jax.hub.families import families
from trl_jax.hub.rope import KINDS

README = (Path(__file__).resolve().parents[1] / "README.md").read_text(encoding="utf-8")


def listed(what: str) -> set[str]:
    row = next(line for line in README.splitlines() if line.startswith(f"| {what} |"))
    return set(row.split("|")[2].strip().split(", "))


@pytest.mark.parametrize(
    ("what", "built"),
    [
        ("model types", set(families())),
        ("rope types", set(KINDS)),
        ("optimizers", set(SUPPORTED["optim"])),
        ("schedules", set(SUPPORTED["lr_scheduler_type"])),
        ("sampling", set(SUPPORTED["train_sampling_strategy"])),
    ],
)
def test_the_table_of_what_is_supported_is_the_codes(what, built):
    assert listed(what) == built
