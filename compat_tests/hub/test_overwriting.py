"""After saving to a folder that already has a model, it contains only the new one."""

from __future__ import annotations

import weakref
from pathlib import Path

import numpy as np
import pytest

from trl_jax.core.files import Pieces, write_whole
from trl_jax.hub.auto import AutoModelForSequenceClassification
from trl_jax.hub.formats import INDEX, SINGLE, CheckpointFiles, read_checkpoint, write_checkpoint
from trl_jax.training.metrics import save_metrics

load = AutoModelForSequenceClassification.from_pretrained


def write(folder, names, value):
    """One tensor per file, named after the file."""
    shards = {name: [f"{name} tensor"] for name in names}
    write_checkpoint(folder, shards, lambda tensor: of(lambda: np.full(3, value, np.float32)))


def of(read):
    return Pieces((3,), np.dtype(np.float32), lambda: [read()])


def shard_names(count):
    return [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]


LAYOUTS = [[SINGLE], shard_names(2), shard_names(3)]


@pytest.mark.parametrize("before", LAYOUTS)
@pytest.mark.parametrize("after", LAYOUTS)
def test_nothing_stale_is_left(before, after, tmp_path):
    (tmp_path / "model-card-of-mine.safetensors").write_text("not ours")
    write(tmp_path, before, 1.0)
    write(tmp_path, after, 2.0)
    wanted = {*after, "model-card-of-mine.safetensors"} | ({INDEX} if len(after) > 1 else set())
    assert {path.name for path in tmp_path.iterdir()} == wanted
    files = CheckpointFiles(tmp_path)
    assert {files.read(tensor)[0] for tensor in files.shapes} == {2.0}


def test_what_is_there_goes_only_when_the_new_one_is_written(tmp_path):
    write(tmp_path, [SINGLE], 1.0)
    with pytest.raises(KeyError):
        write_checkpoint(tmp_path, dict.fromkeys(shard_names(2), ["gone"]), {}.__getitem__)
    assert (tmp_path / SINGLE).exists()


def test_one_tensor_is_in_memory_at_a_time_and_all_processes_read_in_one_order(tmp_path):
    alive, order = [], []

    def tensor(name):
        def read():
            assert not [ref for ref in alive if ref() is not None]
            values = np.full(3, 1.0, np.float32)
            alive.append(weakref.ref(values))
            order.append(name)
            return values

        return of(read)

    shards = dict(zip(shard_names(2), (["b", "c", "a"], ["d"]), strict=True))
    write_checkpoint(tmp_path, shards, tensor)
    read_checkpoint(shards, tensor)
    assert order == ["a", "b", "c", "d"] * 2


def test_a_file_that_breaks_off_leaves_the_old_one(tmp_path):
    """The old file may be the source of what is written: a vision tower is copied from file to file."""

    def broken():
        raise OSError("no space left")

    write(tmp_path, [SINGLE], 1.0)
    old = CheckpointFiles(tmp_path)
    with pytest.raises(OSError, match="no space left"):
        write_checkpoint(tmp_path, {SINGLE: ["x"]}, lambda name: of(broken))
    write_checkpoint(tmp_path, {SINGLE: ["x"]}, lambda name: of(lambda: 2 * old.read(f"{SINGLE} tensor")))
    assert [path.name for path in tmp_path.iterdir()] == [SINGLE]
    assert CheckpointFiles(tmp_path).read("x").tolist() == [2.0, 2.0, 2.0]


def test_a_text_that_breaks_off_leaves_the_old_one(tmp_path):
    (tmp_path / "old.json").write_text("{}")
    with pytest.raises(UnicodeEncodeError):
        write_whole(tmp_path / "old.json", "whole, then half of a character: \ud800")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["{}"]


def test_a_config_takes_its_place_when_it_is_whole(checkpoint, tmp_path, monkeypatch):
    """All text files of a run are written to a temporary name and then renamed."""
    seen = []
    plain = Path.write_text

    def spied(path, text, **how):
        seen.append(path.name)
        return plain(path, text, **how)

    monkeypatch.setattr(Path, "write_text", spied)
    load(checkpoint("llama", shards=True)).save_pretrained(tmp_path)
    save_metrics(tmp_path, "eval", {"eval_loss": 1.0})
    assert seen == [f"{name}.part" for name in (INDEX, "config.json", "eval_results.json", "all_results.json")]
    assert not list(tmp_path.glob("*.part"))


def test_the_single_file_is_read_where_both_are(tmp_path):
    write(tmp_path, shard_names(2), 1.0)
    kept = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    write(tmp_path, [SINGLE], 2.0)
    for name, content in kept.items():
        (tmp_path / name).write_bytes(content)
    assert list(CheckpointFiles(tmp_path).shards) == [SINGLE]


def test_transformers_reads_what_was_saved_last(checkpoint, tmp_path):
    pytest.importorskip("torch")
    from transformers import AutoModelForSequenceClassification as Theirs

    ids = np.asarray([[5, 6, 7]])
    load(checkpoint("llama")).save_pretrained(tmp_path)
    model = load(checkpoint("llama", shards=True, head="base"), seed=3)
    model.save_pretrained(tmp_path)
    theirs = Theirs.from_pretrained(tmp_path).score.weight.detach().numpy()
    np.testing.assert_array_equal(theirs, model.params["score.weight"])
    np.testing.assert_array_equal(load(tmp_path)(ids).logits, model(ids).logits)


def test_a_model_saved_where_it_came_from(checkpoint, tmp_path):
    pytest.importorskip("torch")
    load(checkpoint("llama", shards=True)).save_pretrained(tmp_path)
    model = load(tmp_path)
    wanted = {path: np.array(values) for path, values in model.params.items()}
    model.save_pretrained(tmp_path)
    for path, values in load(tmp_path).params.items():
        np.testing.assert_array_equal(values, wanted[path], err_msg=path)
