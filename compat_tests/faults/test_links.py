"""Links, pipes and other odd files in output_dir: not followed, not deleted through, not pushed, and no reason to
fail."""

from __future__ import annotations

import json
import logging
import os
from argparse import Namespace

import numpy as np
import pytest
from transformers import TrainerCallback

import trl_jax
from compat_tests.faults.killed_saves import check, save
from compat_tests.hub.loopback import TOKEN, serving
from compat_tests.trainer.trainers import FACTS, make, table
from trl_jax.hub.push import Run, write_card
from trl_jax.rollout.completions_log import CompletionsLog
from trl_jax.trainer.reward_trainer import eval_report
from trl_jax.training.checkpoint_files import BrokenCheckpoint, files_below, read_manifest, sweep
from trl_jax.training.metrics import save_metrics
from trl_jax.training.push import sweep_stages
from trl_jax.training.resume import find

HUB = {"push_to_hub": True, "hub_model_id": "judge", "hub_token": TOKEN, "hub_strategy": "all_checkpoints"}


@pytest.fixture
def elsewhere(tmp_path):
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "precious").write_text("precious")
    return folder


@pytest.fixture
def run_dir(tmp_path):
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def test_a_checkpoint_that_is_a_link_is_passed_over_by_all(run_dir, elsewhere, tmp_path, caplog):
    save(tmp_path / "moved", 1)
    (run_dir / "checkpoint-1").symlink_to(tmp_path / "moved" / "checkpoint-1")
    (run_dir / "checkpoint-9").symlink_to(elsewhere)
    (run_dir / "checkpoint-8").symlink_to("nowhere")
    os.mkfifo(run_dir / "checkpoint-7")
    for step in (2, 3, 4):  # save_total_limit is two
        save(run_dir, step)
    assert sorted(os.listdir(run_dir)) == [f"checkpoint-{step}" for step in (1, 3, 4, 7, 8, 9)]
    assert find(True, str(run_dir)).state.global_step == 4
    assert (tmp_path / "moved/checkpoint-1/model.safetensors").exists() and (elsewhere / "precious").exists()
    told = [record.message for record in caplog.records]
    assert told.count(f"{run_dir / 'checkpoint-9'} is a link, so it is ignored: neither read, pushed nor removed.") == 1
    assert len([text for text in told if "checkpoint-7 is neither a file nor a folder, so it is ignored" in text]) == 1
    assert find(run_dir / "checkpoint-1", str(run_dir)).state.global_step == 1  # requested by path


def test_a_link_where_a_checkpoint_is_to_be_is_renamed(run_dir, elsewhere):
    (run_dir / "checkpoint-4").symlink_to(elsewhere)
    save(run_dir, 4)
    assert (run_dir / "checkpoint-4" / "manifest.json").is_file() and not (run_dir / "checkpoint-4").is_symlink()
    assert (run_dir / "checkpoint-4-run-unknown").is_symlink() and os.listdir(elsewhere) == ["precious"]


@pytest.mark.parametrize("kind", ["link", "dangling", "pipe", "file"])
@pytest.mark.parametrize("word", ["unfinished", "replaced", "gone"])
def test_hidden_names_that_are_no_folders(word, kind, run_dir, elsewhere):
    path = run_dir / f".checkpoint-4.{word}"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "file":
        path.write_text("no folder")
    else:
        path.symlink_to(elsewhere if kind == "link" else "nowhere")
    for step in (4, 4, 6, 8):  # written, replaced, added, and at last the first one is removed
        save(run_dir, step)
    assert check(run_dir, {8}, "") == 8
    assert sorted(os.listdir(run_dir)) == ["checkpoint-6", "checkpoint-8"]
    assert os.listdir(elsewhere) == ["precious"]


@pytest.mark.parametrize("name", [*(f".checkpoint-4.{word}" for word in ("unfinished", "replaced", "gone")), ".push-4"])
def test_sweeping_goes_through_no_link(name, run_dir, elsewhere):
    save(run_dir, 4)
    (run_dir / name).symlink_to(elsewhere)
    sweep_stages(str(run_dir))
    sweep(run_dir)
    assert (run_dir / name).is_symlink() and os.listdir(elsewhere) == ["precious"]


def test_a_manifest_that_is_a_pipe_is_not_waited_for(run_dir):
    (run_dir / "checkpoint-3").mkdir()
    os.mkfifo(run_dir / "checkpoint-3" / "manifest.json")
    with pytest.raises(BrokenCheckpoint, match="manifest.json is not a file, so the checkpoint cannot be verified"):
        read_manifest(run_dir / "checkpoint-3")
    save(run_dir, 2)
    assert find(True, str(run_dir)).state.global_step == 2


def test_files_below_a_folder(run_dir, elsewhere):
    (run_dir / "a").mkdir()
    for name in ("b", "a/c", "a/.d"):
        (run_dir / name).touch()
    (run_dir / "a" / "loop").symlink_to(run_dir)
    (run_dir / "out").symlink_to(elsewhere)
    assert list(files_below(run_dir)) == ["a/.d", "a/c", "b"]
    assert list(files_below(run_dir, lambda name: name != "a")) == ["b"]


@pytest.mark.parametrize("name", ["training_loss.svg", "training_loss.svg.part", "README.md", "README.md.part"])
def test_a_card_is_not_written_through_links(name, run_dir, elsewhere):
    (run_dir / name).symlink_to(elsewhere / "precious")
    write_card(run_dir, model_name="mine", base_model=None, datasets=[], tags=[], run=Run({}, {}, [(1, 2.0), (2, 1.0)]))
    assert (elsewhere / "precious").read_text() == "precious"
    assert (run_dir / "README.md").is_symlink() == (name == "README.md")
    assert not (run_dir / "training_loss.svg").is_symlink()


def test_metrics_are_neither_read_nor_written_through_links(run_dir, elsewhere):
    (elsewhere / "precious").write_text('{"secret": 1}')
    for name in ("all_results.json", "eval_results.json", "eval_margins.svg"):
        (run_dir / name).symlink_to(elsewhere / "precious")
    save_metrics(run_dir, "eval", {"loss": 1.0})
    eval_report(np.ones(3), None, prefix="eval", folder=run_dir)
    assert (elsewhere / "precious").read_text() == '{"secret": 1}'
    assert json.loads((run_dir / "all_results.json").read_text()) == {"loss": 1.0}


def test_completions_are_not_written_through_a_link(run_dir, elsewhere, caplog):
    (run_dir / "completions").symlink_to(elsewhere)
    log = CompletionsLog(None, 4, folder=run_dir / "completions")
    log.add("train", ["a"], ["b"])
    log.log("train", 1)
    assert os.listdir(elsewhere) == ["precious"]
    assert "completions is a symlink and is not followed: completions are not written to files." in caplog.text


def test_averaged_weights_are_not_written_through_a_link(run_dir, elsewhere):
    (run_dir / "bema").symlink_to(elsewhere)
    with pytest.raises(ValueError, match="bema is a link, which is not followed: remove it"):
        trl_jax.BEMACallback().on_train_begin(Namespace(output_dir=str(run_dir)), None, None, model=None)


class Wait(TrainerCallback):
    def on_save(self, args, state, control, **kwargs):
        self.trainer.parts.publisher.wait()


def fill(folder, elsewhere):
    """Create odd and plain entries; returns the names of those that may be pushed."""
    folder.mkdir()
    (folder / "dangling").symlink_to("nowhere")
    (folder / "linked.txt").symlink_to(elsewhere / "precious")
    (folder / "linked").symlink_to(elsewhere)
    (folder / "checkpoint-1").symlink_to(elsewhere)
    os.mkfifo(folder / "pipe")
    for name in ("notes.txt", "[a]*?.txt", "logs/events", "logs/_private", "logs/.hidden", ".hidden", "_mine",
                 "_more/x", ".git/config", "logs/.cache/x"):  # fmt: skip
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(name)
    (folder / "logs" / "back").symlink_to(folder)
    return {"notes.txt", "[a]*?.txt", "logs/events", "logs/_private"}


def test_what_is_pushed_is_the_same_either_way(checkpoint, tmp_path, elsewhere, monkeypatch, caplog):
    wanted, waits = fill(tmp_path / "run", elsewhere), Wait()
    config = HUB | {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 1}
    with serving(monkeypatch) as hub, caplog.at_level(logging.WARNING):
        trainer = make(trl_jax, checkpoint(**FACTS), tmp_path / "run", train=table(16), config=config,
                       callbacks=[waits])  # fmt: skip
        waits.trainer = trainer
        trainer.train()
        model = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "training_args.json"}
        files = set(hub.files("somebody/judge"))
        pushed = {name for name in files if not name.startswith("checkpoint-")} - {".gitattributes"}
        assert pushed == wanted | model | {"README.md", "training_loss.svg"}
        assert {f"checkpoint-{step}/manifest.json" for step in (2, 4)} <= files
        trainer.push_to_hub()
        after = {name for name in hub.files("somebody/judge") if not name.startswith("checkpoint-")}
    assert after - {".gitattributes"} == wanted | model | {"README.md", "training_loss.svg"}
    assert (elsewhere / "precious").read_text() == "precious" and (tmp_path / "run" / "checkpoint-1").is_symlink()
    assert caplog.text.count(f"{tmp_path / 'run' / 'linked'} is a link, so it is ignored") == 1
