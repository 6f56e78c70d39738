"""Online training in two real processes against two ranks of TRL, each with its part of the completions."""

from __future__ import annotations

import json

import numpy as np
import pytest

from compat_tests.effort import THOROUGH, only_thorough, usually
from compat_tests.mesh.launching import launch_both
from compat_tests.mesh.rank import rows_of
from compat_tests.parity import distillation_cases, golden, grpo_cases
from compat_tests.parity.dpo_cases import SMALL
from compat_tests.parity.marks import assert_same_weights, timeless
from compat_tests.parity.reference import Run, read_weights

PROMPTS = 20
CONFIG = grpo_cases.STEPS | {"max_steps": 3, "per_device_train_batch_size": 4, "writes": True}
RUNS = {
    "GRPO": {"trainer": "GRPO", "num_generations": 4, "gradient_accumulation_steps": 2, "steps_per_generation": 4},
    # The completions of a prompt are on both ranks.
    "across": {"trainer": "GRPO", "num_generations": 8, "beta": 0.04, "num_iterations": 2, "eval_rows": 8,
               "num_generations_eval": 2, "eval_strategy": "steps", "eval_steps": 2},
    "Distillation": {"trainer": "Distillation", "gradient_accumulation_steps": 2, "beta": 0.5},
    "RLOO": {"trainer": "RLOO", "num_generations": 4, "beta": 0.05, "normalize_advantages": True},
}  # fmt: skip
# By default, the most complete case.
USUAL = RUNS if THOROUGH else {"across": RUNS["across"]}

# Only for us: a run resumes within a generation, with every process's random state.
SAVES = {"save_strategy": "steps", "save_steps": 1}
AGAIN = {"GRPO": RUNS["GRPO"] | SAVES, "again": RUNS["GRPO"] | {"of": "oursGRPO/checkpoint-1"}} if THOROUGH else {}


@pytest.fixture(scope="module")
def out(checkpoint, tmp_path_factory):
    out = tmp_path_factory.mktemp("policies")
    teacher = {"teacher": str(checkpoint(**distillation_cases.TEACHER))}
    usual = {name: run | teacher if name == "Distillation" else run for name, run in USUAL.items()}
    ours = {"mesh_shape": "data:2", "runs": usual | AGAIN}
    launch_both(checkpoint(**SMALL), out, CONFIG | {"runs": usual, "pairs": PROMPTS}, ours=ours)
    return out


@only_thorough
@pytest.mark.parametrize("name", usually(USUAL.__contains__, RUNS))
def test_two_processes_are_two_ranks_of_trl(name, out, checkpoint):
    def run(whose):
        facts = [json.loads((out / f"{whose}{name}.{rank}.json").read_text()) for rank in (0, 1)]
        logs = json.loads((out / f"{whose}{name}.json").read_text())
        return Run(logs, None, read_weights(out / f"{whose}{name}" / "final"), facts={"ranks": facts})

    rows = rows_of(RUNS[name]["trainer"], PROMPTS)
    run_of = distillation_cases.run if name == "Distillation" else grpo_cases.run
    source = golden.digest(checkpoint(**SMALL), rows, ["two ranks", SMALL], CONFIG | RUNS[name], run_of)
    ours, theirs = run("ours"), golden.recorded_or(f"ranks/{name.lower()}_policy", source, lambda: run("trl"))
    assert ours.facts == theirs.facts  # each rank's completions, token by token
    assert len(ours.logs) == len(theirs.logs)
    for mine, other in zip(map(timeless, ours.logs), map(timeless, theirs.logs), strict=True):
        assert mine.keys() == other.keys()
        for key, wanted in other.items():
            mark = 3e-5 if key.endswith("kl") else 1e-5  # a difference of sums; newer JAX adds in another order
            assert mine[key] == pytest.approx(wanted, rel=1e-5, abs=mark, nan_ok=True), (key, mine["step"])
    assert_same_weights(ours.weights, theirs.weights, 2e-4)
    if name != "Distillation":
        assert np.mean([log["reward_std"] for log in ours.logs if "reward_std" in log]) > 0


@only_thorough
def test_a_run_that_goes_on_is_the_unbroken_one(out):
    runs = [json.loads((out / f"ours{name}.json").read_text()) for name in ("GRPO", "again")]
    assert list(map(timeless, runs[0][1:-1])) == list(map(timeless, runs[1][1:-1]))
    whole, again = (read_weights(out / f"ours{name}" / "final") for name in ("GRPO", "again"))
    assert all((whole[name] == again[name]).all() for name in whole)
