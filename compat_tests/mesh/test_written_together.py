"""Online training in two real processes with two devices each: the same completions as in one process with four."""

from __future__ import annotations

import json

import pytest

from compat_tests.effort import THOROUGH
from compat_tests.mesh.launching import launch
from compat_tests.parity import grpo_cases
from compat_tests.parity.dpo_cases import SMALL
from compat_tests.parity.marks import assert_same_weights, timeless
from compat_tests.parity.reference import read_weights

CONFIG = grpo_cases.STEPS | {
    "max_steps": 1, "per_device_train_batch_size": 2, "num_generations": 4, "trainer": "GRPO", "writes": True,
    "pairs": 20, "mesh_shape": "data:2,fsdp:2",
}  # fmt: skip
if THOROUGH:
    CONFIG |= {
        "max_steps": 2, "eval_rows": 6, "eval_strategy": "steps", "eval_steps": 2, "num_generations_eval": 2,
    }  # fmt: skip


@pytest.fixture(scope="module")
def runs(checkpoint, tmp_path_factory):
    """The folder of each run, by number of processes."""
    out = {processes: tmp_path_factory.mktemp(str(processes)) for processes in (1, 2)}
    for processes, folder in out.items():
        config = [CONFIG | {"devices": 4 // processes}] * processes
        ended = launch("ours", checkpoint(**SMALL), folder, config=config)
        assert all(code == 0 for code, _ in ended), "\n".join(text[-3000:] for _, text in ended)
    return out


def test_completions_numbers_and_weights_are_those_of_one_process(runs):
    seen = {
        (number, rank): json.loads((folder / f"ours.{rank}.json").read_text())["completion_ids"]
        for number, folder in runs.items() for rank in range(number)
    }  # fmt: skip
    # Each process calls reward functions with its own rows.
    assert seen[1, 0] == [first + second for first, second in zip(seen[2, 0], seen[2, 1], strict=True)]
    alone, both = (json.loads((folder / "ours.json").read_text()) for folder in runs.values())
    for mine, other in zip(map(timeless, both), map(timeless, alone), strict=True):
        assert mine == pytest.approx(other, rel=1e-5, abs=1e-6, nan_ok=True)
    assert_same_weights(*(read_weights(folder / "ours" / "final") for folder in runs.values()), 1e-5)
