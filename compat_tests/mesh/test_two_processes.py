"""Two real processes on the loopback: against two ranks of TRL, resumed by one or two processes, killed, and with
different arguments."""

from __future__ import annotations

import json

import pytest

from compat_tests import tiny
from compat_tests.effort import only_thorough
from compat_tests.mesh.launching import launch, launch_both
from compat_tests.mesh.rank import ROWS, go_on, rows_of
from compat_tests.mesh.test_faults import LOST
from compat_tests.parity import golden
from compat_tests.parity.marks import assert_same_curve, assert_same_weights, steps_of
from compat_tests.parity.reference import Run, read_weights

CONFIG = {"gradient_accumulation_steps": 2, "max_steps": 5, "lr_scheduler_type": "constant"}
SAVING = {"save_strategy": "steps", "save_steps": 1}
MODEL = {"model_type": "llama", "num_hidden_layers": 2}
TWO = {"mesh_shape": "fsdp:2"}


@pytest.fixture(scope="module")
def folder(checkpoint):
    return checkpoint(**MODEL)


@pytest.fixture(scope="module")
def pair(folder, tmp_path_factory):
    """The folder where two processes, and two ranks of TRL unless they are recorded, have trained for five steps."""
    out = tmp_path_factory.mktemp("pair")
    launch_both(folder, out, CONFIG, ours=TWO | {"save_strategy": "no", "save_minutes": 0})  # saves every step
    return out


@only_thorough
def test_two_processes_are_two_ranks_of_trl(pair, folder):
    def run(whose):
        return Run(json.loads((pair / f"{whose}.json").read_text()), None, read_weights(pair / whose / "final"))

    source = golden.digest(folder, rows_of("Reward", ROWS), ["two ranks", MODEL], CONFIG)
    ours, theirs = run("ours"), golden.recorded_or("ranks/Reward", source, lambda: run("trl"))
    assert_same_curve(ours.logs, theirs.logs)
    assert_same_weights(ours.weights, theirs.weights)


def alone(folder, out, resume):
    """Resume in this process, with one device and the same number of pairs per step."""
    one = CONFIG | SAVING | {"per_device_train_batch_size": 8, "mesh_shape": "data:1"}
    return go_on(str(folder), tiny.preference_rows(ROWS, margin=True), str(out), resume=str(resume), **one)


def test_row19_another_number_of_processes_and_row47_a_kill_in_the_middle_of_a_save(pair, folder, tmp_path):
    wanted = steps_of(json.loads((pair / "ours.json").read_text()))
    one = alone(folder, tmp_path / "one", pair / "ours" / "checkpoint-2")  # written by two
    assert_same_curve(steps_of(one.state.log_history), wanted)

    two = CONFIG | TWO | SAVING | {"resume": str(tmp_path / "one" / "checkpoint-3"), "dies": 5, "grace": 3}  # by one
    codes, texts = zip(*launch("ours", folder, tmp_path, config=[two] * 2), strict=True)
    assert codes == (-9, 1), texts[1][-3000:]
    assert f"Process 0 of 2 {LOST}, so this process, number 1" in texts[1], texts[1][-3000:]
    left = tmp_path / "ours"
    assert sorted(path.name for path in left.glob("*checkpoint*")) == [".checkpoint-5.unfinished", "checkpoint-4"]
    assert (left / ".checkpoint-5.unfinished" / "model.safetensors").is_file()
    state = json.loads((left / "checkpoint-4" / "trainer_state.json").read_text())
    assert_same_curve(steps_of(state["log_history"]), wanted[:4])

    last = alone(folder, left, left / "checkpoint-4")
    assert_same_curve(steps_of(last.state.log_history), wanted)
    assert sorted(path.name for path in left.glob("*checkpoint*")) == ["checkpoint-4", "checkpoint-5"]
    assert_same_weights(*(read_weights(run / "checkpoint-5") for run in (left, pair / "ours")))


@only_thorough  # by default, the test above and test_faults.py name a process that died
def test_row47_a_process_that_has_gone_is_named(folder, tmp_path):
    endless = CONFIG | TWO | {"max_steps": 100_000, "heartbeat": 5}
    results = launch("ours", folder, tmp_path, config=[endless] * 2, killed=1)
    code, text = results[0]
    assert code == 1 and f"RuntimeError: Process 1 of 2 {LOST}, so this process, number 0" in text
    assert "restart all processes with resume_from_checkpoint=True" in text


def test_row48_processes_with_other_arguments_are_told_at_the_start(folder, tmp_path):
    results = launch("ours", folder, tmp_path, config=[{"seed": 1}, {"seed": 2}])
    for code, text in results:
        assert code == 1
        assert "ValueError: The processes of this run have different arguments: 1 (on " in text, text[-3000:]
        assert "from process 0. Start the same script with the same arguments, data and package versions" in text
