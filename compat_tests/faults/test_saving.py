"""What can happen to checkpoints: kills, full disks, flipped bits, two runs at once.

The number in a test's name is that of the case in the project's table of faults.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.flips import unnoticed
from compat_tests.effort import only_thorough
from compat_tests.faults.killed_saves import check, events_of, save
from compat_tests.trainer.trainers import checkpoints
from trl_jax.training import checkpoint_files
from trl_jax.training.checkpoint_files import (
    FORMAT,
    LOCK,
    MANIFEST,
    BrokenCheckpoint,
    _rendered,
    only_run,
    read_manifest,
    sweep,
    verify,
)
from trl_jax.training.resume import find

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def saved(tmp_path):
    for step in (2, 4):
        save(tmp_path, step)
    return tmp_path


def python(*arguments):
    done = subprocess.run(
        [sys.executable, "-m", "compat_tests.light", *arguments], capture_output=True, text=True, cwd=ROOT, timeout=500
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_row13_killed_at_every_point_of_a_save(tmp_path):
    """The process checks after each kill that a complete checkpoint is found and nothing is left over."""
    told = python("compat_tests.faults.killed_saves", "--folder", str(tmp_path))
    new = told["a new step"]
    assert len(new) > 40 and len(told["a step that is there already"]) > 30
    assert set(new.values()) == {4, 6} and [*new.values()] == sorted(new.values())  # once the new step exists, it stays
    for point in ("the middle of model.safetensors", "open manifest.json", "os.rename", "os.rename checkpoint-2"):
        assert any(point in name for name in new), point


@only_thorough
@pytest.mark.parametrize("trainer", ["reward", "grpo", "server"])
def test_row13_runs_killed_at_random_instants_end_as_if_they_had_not_been(trainer, tmp_path):
    assert python("benchmarks.kills", "--trainer", trainer, "--kills", "1")["different"] == 0


def test_row13_what_is_left_of_a_save_is_no_checkpoint_and_goes(saved):
    (saved / ".checkpoint-6.unfinished").mkdir()
    (saved / ".checkpoint-6.unfinished" / "model.safetensors").write_bytes(b"half")
    (saved / ".checkpoint-1.gone").mkdir()
    (saved / "checkpoint-4").rename(saved / ".checkpoint-4.replaced")
    assert find(True, str(saved)).state.global_step == 2
    assert check(saved, {4}, "") == 4
    assert checkpoints(saved) == ["checkpoint-2", "checkpoint-4"]


def full(at):
    """Simulate a disk that is full from its `at`-th write on."""
    left = [at]

    def fails(real):
        def write(*given, **how):
            left[0] -= 1
            if left[0] < 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(*given, **how)

        return write

    return fails


@pytest.mark.parametrize("at", range(6))
def test_row14_a_disk_that_is_full(at, saved, monkeypatch):
    fails = full(at)
    for name in ("mkdir", "write_text", "rename"):
        monkeypatch.setattr(Path, name, fails(getattr(Path, name)))
    with pytest.raises(OSError, match="No space left on device: it takes 0 bytes and [0-9,]+ are free.*") as error:
        save(saved, 6)
    assert error.value.errno == errno.ENOSPC and error.value.filename == str(saved / "checkpoint-6")
    assert "earlier ones are untouched. Free space" in str(error.value)
    monkeypatch.undo()
    assert checkpoints(saved) == ["checkpoint-2", "checkpoint-4"]
    assert check(saved, {4}, "") == 4


def test_row14_too_little_room_is_seen_before_anything_is_written(saved, monkeypatch):
    monkeypatch.setattr(checkpoint_files.shutil, "rmtree", lambda *given, **how: None)
    needed = shutil.disk_usage(saved).free + 2**40
    with pytest.raises(OSError, match=f"it takes {needed:,} bytes and "):
        checkpoint_files.save_checkpoint(str(saved), lambda folder: pytest.fail("written"), events_of(6), {}, needed)


def test_row14_safetensors_own_words_for_a_full_disk(saved):
    from safetensors import SafetensorError

    def write(folder):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    with pytest.raises(OSError) as error:
        checkpoint_files.save_checkpoint(str(saved), write, events_of(6), {})
    assert error.value.errno == errno.ENOSPC
    assert checkpoints(saved) == ["checkpoint-2", "checkpoint-4"]


def test_row14_a_folder_that_vanished_is_made_again(saved):
    shutil.rmtree(saved)
    save(saved, 6)
    assert check(saved, {6}, "") == 6


def test_row14_nothing_is_removed_for_a_checkpoint_that_does_not_verify(saved, monkeypatch):
    def write_manifest(folder, facts):
        real(folder, facts)
        (folder / "model.safetensors").write_bytes(bytes((folder / "model.safetensors").stat().st_size))

    real = checkpoint_files.write_manifest
    monkeypatch.setattr(checkpoint_files, "write_manifest", write_manifest)
    with pytest.raises(BrokenCheckpoint, match="checkpoint-6/model.safetensors is damaged"):
        save(saved, 6)
    assert verify(saved / "checkpoint-2") and verify(saved / "checkpoint-4")


def test_row16_every_flipped_bit_is_noticed_by_file_name(saved):
    assert unnoticed(saved / "checkpoint-4", flips=300, seed=7) == ([], 5)


def test_row16_a_path_says_which_other_checkpoint_is_whole(saved):
    path = saved / "checkpoint-4" / "trainer_state.json"
    path.write_bytes(path.read_bytes().replace(b"4", b"5", 1))
    with pytest.raises(BrokenCheckpoint) as error:
        find(str(saved / "checkpoint-4"), str(saved))
    why, other = f"{path} is damaged: its contents have changed since it was written.", saved / "checkpoint-2"
    assert str(error.value) == f"{why} {other} is complete: resume from that one."


def test_row16_only_true_falls_back(saved, caplog):
    path = saved / "checkpoint-4" / "model.safetensors"
    path.write_bytes(path.read_bytes()[::-1])
    with caplog.at_level(logging.WARNING):
        assert find(True, str(saved)).folder == saved / "checkpoint-2"
    assert f"{saved / 'checkpoint-4'} is passed over: {path} is damaged: its contents have changed" in caplog.text
    with pytest.raises(BrokenCheckpoint, match="checkpoint-2 is complete: resume from that one"):
        find(str(saved / "checkpoint-4"), str(saved))


DAMAGE = {
    "cut": (lambda path: path.write_bytes(path.read_bytes()[:100]), "has 100 bytes, and had "),
    "gone": (lambda path: path.unlink(), "is missing: manifest.json lists it."),
    "empty": (lambda path: path.write_bytes(b""), "has 0 bytes, and had "),
}
FILES = ["model.safetensors", "trainer_state.json", "training_state/arrays.safetensors", "training_state/facts.json"]


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("file", FILES)
def test_row17_a_file_that_is_cut_or_gone(file, kind, saved):
    damage, text = DAMAGE[kind]
    damage(saved / "checkpoint-4" / file)
    with pytest.raises(BrokenCheckpoint) as error:
        find(saved / "checkpoint-4", str(saved))
    assert f"{saved / 'checkpoint-4' / file} {text}" in str(error.value)
    assert str(error.value).endswith(f"{saved / 'checkpoint-2'} is complete: resume from that one.")


def test_row17_weights_that_nobody_listed(saved):
    shutil.copy(saved / "checkpoint-2" / "model.safetensors", saved / "checkpoint-4" / "model-00001-of-1.safetensors")
    with pytest.raises(BrokenCheckpoint, match="model-00001-of-1.safetensors is not among the files that manifest"):
        find(saved / "checkpoint-4", str(saved))


def test_row18_an_empty_newest_checkpoint(saved, caplog):
    (saved / "checkpoint-9").mkdir()
    assert find(True, str(saved)).state.global_step == 4
    text = f"{saved / 'checkpoint-9'} is passed over: {saved / 'checkpoint-9' / MANIFEST} does not exist"
    assert text in caplog.text


@pytest.mark.parametrize("there", ["nothing", "broken"])
def test_row18_nothing_to_resume_from(there, tmp_path):
    if there == "broken":
        (tmp_path / "checkpoint-3").mkdir()
    with pytest.raises(ValueError) as error:
        find(True, str(tmp_path))
    why = "the checkpoint was never completed." if there == "broken" else "There is no checkpoint-<step> in it."
    assert str(error.value).startswith(f"No valid checkpoint found in output directory ({tmp_path}).")
    assert f"{why} To train from the start, leave resume_from_checkpoint out." in str(error.value)
    with pytest.raises(ValueError, match="resume_from_checkpoint='nowhere' is not a folder. Pass a checkpoint's, or"):
        find("nowhere", str(tmp_path))


@pytest.mark.parametrize("there", ["nothing", "model"])
def test_row18_a_folder_that_is_no_checkpoint(there, saved):
    folder = saved / "final"
    folder.mkdir()
    if there == "model":
        (folder / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=f"Can't find a valid checkpoint at {folder}: .* pass its folder as model"):
        find(folder, str(saved))


@pytest.mark.parametrize(
    ("step", "written"), [(1, "a newer one wrote it. Upgrade trl_jax"), (-1, "an older one wrote it. Resume with that")]
)
def test_row22_another_format(step, written, saved):
    path = saved / "checkpoint-4" / MANIFEST
    body = read_manifest(path.parent) | {"format": FORMAT + step}
    path.write_text(_rendered(body))
    with pytest.raises(BrokenCheckpoint) as error:
        find(path.parent, str(saved))
    assert f"{path} has format {FORMAT + step}, this release of trl_jax reads {FORMAT}: {written}" in str(error.value)


def test_row44_two_runs_in_one_folder(tmp_path):
    with only_run(str(tmp_path)):
        with pytest.raises(RuntimeError) as error, only_run(str(tmp_path)):
            pass
        assert f"output_dir={str(tmp_path)!r} is being written by another run" in str(error.value)
        assert f'"pid": {os.getpid()}' in str(error.value)
    assert os.listdir(tmp_path) == []
    (tmp_path / LOCK).write_text("of a run that was killed")
    with only_run(str(tmp_path)):
        pass
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["with spaces", "пиво 🍺", "[a]*?", "back\\slash"])
def test_row52_odd_paths(name, tmp_path):
    folder = tmp_path / name
    for step in (4, 10):
        save(folder, step)
    os.utime(folder / "checkpoint-4", (2e9, 2e9))
    assert check(folder, {10}, name) == 10


def test_row52_a_folder_behind_a_link_and_times_that_lie(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for step in (9, 10):
        save(tmp_path / "link", step)
    os.utime(tmp_path / "real" / "checkpoint-9", (2e9, 2e9))
    save(tmp_path / "link", 11)  # the two with the highest numbers are kept, not the newest files
    assert checkpoints(tmp_path / "real") == ["checkpoint-10", "checkpoint-11"]
    sweep(tmp_path / "link")
    assert find(True, str(tmp_path / "link")).state.global_step == 11
