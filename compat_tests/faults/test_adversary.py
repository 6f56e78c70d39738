"""Regression tests for attacks that once succeeded; docs/pages/reliability.md lists them all."""

from __future__ import annotations

import json
import os
import resource
import signal
import time

import pytest
from datasets import Dataset
from transformers.trainer_callback import ExportableState, TrainerCallback

import trl_jax
from compat_tests.faults.broken import copied, trainer
from compat_tests.faults.killed_saves import save
from compat_tests.trainer.trainers import FACTS, checkpoints, make
from trl_jax.scripts.data import load_splits
from trl_jax.scripts.utils import TrlParser
from trl_jax.training.checkpoint_files import BrokenCheckpoint, _rendered, read_manifest, write_manifest
from trl_jax.training.resume import find

SAVES = {"save_strategy": "steps", "save_steps": 2}


@pytest.fixture(scope="module")
def good(checkpoint):
    return checkpoint(**FACTS)


def test_a_tokenizer_file_that_is_nested_too_deeply_is_named(good, tmp_path):
    folder = copied(good, tmp_path)
    (folder / "tokenizer.json").write_text("[" * 200_000)
    with pytest.raises(ValueError, match="broken: a JSON file of the tokenizer is nested too deeply"):
        trainer(folder, tmp_path)


def test_a_pattern_that_never_ends_on_one_text_names_its_row(good, tmp_path):
    """tokenizers raises a panic (not an Exception) once the pattern has backtracked too often."""
    folder = copied(good, tmp_path)
    words = json.loads((folder / "tokenizer.json").read_text())
    words["pre_tokenizer"] = {
        "type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(words))
    rows = [{"chosen": "a", "rejected": "b"}] * 5
    rows[3] = {"chosen": "b", "rejected": "a" * 40 + "b"}
    with pytest.raises(ValueError, match="Row 3 of train_dataset: the tokenizer failed on this text: "):
        trainer(folder, tmp_path, rows=Dataset.from_list(rows))


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "a/../../outside"])
def test_a_manifest_that_lists_files_elsewhere_reads_none(name, tmp_path):
    save(tmp_path, 4)
    folder = tmp_path / "checkpoint-4"
    body = read_manifest(folder)
    body["files"][name] = {"bytes": 1, "xxh3_128": "0"}
    (folder / "manifest.json").write_text(_rendered(body))
    with pytest.raises(BrokenCheckpoint, match="it lists .*, which is outside its folder"):
        find(folder, str(tmp_path))


@pytest.fixture(scope="module")
def saved(good, tmp_path_factory):
    out = tmp_path_factory.mktemp("saved") / "run"
    make(trl_jax, good, out, config=SAVES).train()
    return out


@pytest.mark.parametrize(
    ("name", "value"),
    [("order", 5), ("random", {}), ("random", {"python": [3, [1], None], "numpy": []}), ("schedule", None),
     ("tokens_seen", "x"), ("shards", None), ("step_examples", []), ("fills", "no"), ("tokens_seen", True)],
)  # fmt: skip
def test_facts_of_another_kind_are_named_though_their_digest_is_right(name, value, good, saved):
    folder = saved / "checkpoint-2"
    path, body = folder / "training_state" / "facts.json", read_manifest(folder)
    before = path.read_text()
    path.write_text(json.dumps(json.loads(before) | {name: value}))
    kept = {key: body[key] for key in ("step", "run", "dataset")}
    try:
        (folder / "manifest.json").unlink()
        write_manifest(folder, kept)
        with pytest.raises(BrokenCheckpoint, match=f"facts.json: {name} (must be of type|is) "):
            make(trl_jax, good, saved, config=SAVES).train(resume_from_checkpoint=str(folder))
    finally:
        path.write_text(before)
        (folder / "manifest.json").unlink()
        write_manifest(folder, kept)


class Junk(TrainerCallback, ExportableState):
    """Does one thing that a callback must not do."""

    def __init__(self, kind):
        self.kind = kind

    def on_step_end(self, args, state, control, **kwargs):
        return "junk" if self.kind == "control" else None

    def on_log(self, args, state, control, logs=None, **kwargs):
        if self.kind == "log":
            state.log_history[-1]["tags"] = {"a", "b"}

    def state(self):
        return {"args": {}, "attributes": {"kind": object() if self.kind == "state" else self.kind}}


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("control", "on_step_end of a callback returned a str; expected its control, or None"),
        ("state", "trainer_state.json cannot be written: Object of type object is not JSON .* state.. of a callback"),
        ("log", "trainer_state.json cannot be written: Object of type set is not JSON serializable"),
    ],
)
def test_a_callback_that_leaves_what_cannot_be_kept_is_told_so(kind, text, good, tmp_path):
    with pytest.raises(TypeError, match=text):
        make(trl_jax, good, tmp_path / "run", callbacks=[Junk(kind)], config=SAVES).train()
    assert [name for name in os.listdir(tmp_path / "run") if name.startswith("checkpoint")] == []


def test_a_limit_of_file_sizes_leaves_no_half_checkpoint(good, tmp_path):
    run = make(trl_jax, good, tmp_path / "run", config=SAVES)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(OSError, match=r"^\[Errno 27\] File too large. The checkpoint was not written; "):
            run.train()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert checkpoints(tmp_path / "run") == []


def test_a_configuration_of_aliases_is_refused_at_once(tmp_path):
    lines = ["a: &a [x, x, x, x, x, x, x, x, x, x]"]
    for one, other in zip("abcdefghijk", "bcdefghijkl", strict=True):
        lines.append(f"{other}: &{other} [{', '.join([f'*{one}'] * 10)}]")
    path = tmp_path / "bomb.yaml"
    for text in ("\n".join(lines), "a: &a [*a]"):
        path.write_text(text)
        start = time.process_time()
        with pytest.raises(ValueError, match="bomb.yaml has more than 100,000 values once its aliases"):
            TrlParser([trl_jax.RewardConfig]).parse_args_and_config(["--config", str(path)])
        assert time.process_time() - start < 20


@pytest.mark.parametrize("content", [bytes(1000), b"\xff\xfe{}", b"PAR1"])
def test_a_dataset_file_without_rows_is_named(content, tmp_path):
    for suffix in ("jsonl", "parquet"):
        path = tmp_path / f"rows.{suffix}"
        path.write_bytes(content)
        with pytest.raises(ValueError, match=f"rows.{suffix} cannot be read as .{suffix}"):
            load_splits(str(path))


def test_a_folder_whose_name_is_no_text_is_refused_at_once(tmp_path):
    """Command-line bytes that are not UTF-8 become lone surrogates, which safetensors cannot encode in a path."""
    with pytest.raises(ValueError, match=r"output_dir='.*x.udcff' is not valid Unicode. Choose another output_dir"):
        trl_jax.RewardConfig(str(tmp_path / "x\udcff"), use_cpu=True)
