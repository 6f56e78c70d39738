"""A folder that already holds a model holds only the new one after saving."""

from __future__ import annotations

import numpy as np
import pytest

from trl_jax import AutoModelForSequenceClassification
from trl_jax.hub.files import INDEX, SINGLE, CheckpointFiles, write_checkpoint

load = AutoModelForSequenceClassification.from_pretrained


def write(folder, names, value):
    """One tensor a file, named after the file."""
    shards = {name: [f"{name} tensor"] for name in names}
    write_checkpoint(folder, shards, lambda tensor: np.full(3, value, np.float32))


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
