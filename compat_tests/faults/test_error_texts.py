"""Errors and logs: none shows a file's content or is pages long, and what they say is true."""

from __future__ import annotations

import importlib.util
import json
import shutil
import time

import numpy as np
import pytest
from datasets import Dataset, IterableDataset
from safetensors.numpy import load_file, save_file

import trl_jax
from compat_tests.effort import THOROUGH, only_thorough
from compat_tests.faults.broken import INDEX, WEIGHTS, copied, header_of, trainer, write_header
from compat_tests.faults.killed_saves import save
from compat_tests.tiny import preference_rows
from compat_tests.trainer.trainers import FACTS, make
from trl_jax.core import files, text
from trl_jax.core.text import brief, listed
from trl_jax.hub.config_reader import read_config
from trl_jax.hub.formats import CheckpointFiles, PickledFiles, open_tensors
from trl_jax.hub.peft_config import read_adapter_config
from trl_jax.hub.push import CARD, write_card
from trl_jax.training.checkpoint_files import MANIFEST, BrokenCheckpoint, digest
from trl_jax.training.metrics import save_metrics, speed_metrics
from trl_jax.training.resume import find

MILLIONS = [0] * 3_000_000
MANY = MILLIONS if THOROUGH else [0] * 100_000


@pytest.fixture(scope="module")
def good(checkpoint):
    return checkpoint(**FACTS)


# ---- how much of a value is shown ----


@pytest.mark.parametrize(
    "value", [MILLIONS, "x" * 10**8, {"a" * 10**6: MILLIONS}, [MILLIONS] * 1000, dict.fromkeys(range(10**6))]
)
def test_of_a_long_value_the_beginning_is_shown_and_read(value):
    start = time.process_time()
    assert len(brief(value)) == 80 and len(listed(["x" * 10**6] * 10**5)) < 1100
    assert time.process_time() - start < 1


def test_of_a_short_value_all_is_shown():
    assert [brief(value) for value in ({"a": [1, "x"]}, None, 1.5, "y" * 78)] == [
        "{'a': [1, 'x']}", "None", "1.5", repr("y" * 78)
    ]  # fmt: skip
    assert listed(list("abc"), 2) == "a, b, and 1 more" and listed([]) == "" and listed(["a\x1b"]) == r"a\x1b"
    assert brief("\ud800\x1b") == r"'\ud800\x1b'"


@pytest.mark.parametrize("key", ["hidden_size", "model_type", "quantization_config"])
def test_a_config_of_many_entries(key, good, tmp_path):
    value = {"quant_method": MANY} if key == "quantization_config" else MANY
    with pytest.raises(ValueError, match=r"0, 0, 0.*\.\.\.") as error:
        trainer(copied(good, tmp_path, **{key: value}), tmp_path)
    assert len(str(error.value)) < 2500


def test_a_header_of_many_axes(good, tmp_path):
    folder = copied(good, tmp_path)
    header, data = header_of(folder / WEIGHTS)
    header["score.weight"]["shape"] = [1] * len(MANY)
    write_header(folder / WEIGHTS, header, data)
    with pytest.raises(ValueError, match="score.weight") as error:
        CheckpointFiles(folder)
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize("axis", [[0], "axis"])
def test_a_header_with_an_axis_that_is_no_number(axis, good, tmp_path):
    """Its product with the other axis would be a list or a text of a trillion entries."""
    folder = copied(good, tmp_path)
    header, data = header_of(folder / WEIGHTS)
    header["score.weight"]["shape"] = [axis, 10**12]
    write_header(folder / WEIGHTS, header, data)
    with pytest.raises(ValueError, match="score.weight has shape .* instead of integers"):
        CheckpointFiles(folder)


@only_thorough
def test_an_index_of_a_million_places(good, tmp_path):
    folder = copied(good, tmp_path)
    (folder / WEIGHTS).unlink()
    for name, words in (("a/{}", "outside its folder"), ("{}.safetensors", "lacks 100000 of the 100000 shards")):
        places = {str(number): name.format(number) for number in range(10**5)}
        (folder / INDEX).write_text(json.dumps({"weight_map": places}))
        with pytest.raises((ValueError, FileNotFoundError), match=words) as error:
            CheckpointFiles(folder)
        assert len(str(error.value)) < 4000


def test_a_state_of_many_entries(tmp_path):
    save(tmp_path, 4)
    folder = tmp_path / "checkpoint-4"
    (folder / MANIFEST).unlink()
    (folder / "optimizer.pt").touch()
    state = json.loads((folder / "trainer_state.json").read_text())
    for key in ("global_step", "epoch"):
        (folder / "trainer_state.json").write_text(json.dumps(state | {key: MANY}))
        with pytest.raises(BrokenCheckpoint, match="cannot be read") as error:
            find(folder, str(tmp_path))
        assert len(str(error.value)) < 1000


def test_a_row_of_many_entries(good, tmp_path):
    long = {"role": "user", "content": MANY}
    for rows in ([{"chosen": MANY, "rejected": MANY}], [{"chosen_ids": [5, "x" * 10**7], "rejected_ids": [6]}]):
        with pytest.raises(ValueError, match="Row 0 of train_dataset") as error:
            trainer(good, tmp_path, rows=stream_of(rows), max_steps=1).train()
        assert len(str(error.value)) < 1000
    words = trainer(good, tmp_path).processing_class
    words.chat_template = "{{ raise_exception(messages | string) }}"
    with pytest.raises(Exception, match="0, 0") as error:
        rows = [{"chosen": [long], "rejected": [long]}]
        trainer(good, tmp_path, rows=stream_of(rows), processing_class=words, max_steps=1).train()
    assert len(str(error.value)) < 4000


def stream_of(rows):
    return IterableDataset.from_generator(lambda: iter(rows))


# ---- how much of a file is shown ----


def test_a_link_to_a_file_of_the_system_shows_nothing_of_it(good, tmp_path):
    secret = tmp_path / "shadow"
    secret.write_text("root:$6$verysecret:19000:0:99999:7:::\n" * 9)
    folder = copied(good, tmp_path)
    for name in (WEIGHTS, "config.json"):
        content = (folder / name).read_bytes()
        (folder / name).unlink()
        (folder / name).symlink_to(secret)
        with pytest.raises(ValueError, match=name) as error:
            trainer(folder, tmp_path)
        shown = "".join(map(str, (error.value, error.value.__cause__, error.value.__context__)))
        assert "$6$" not in shown and "secret" not in shown
        (folder / name).unlink()
        (folder / name).write_bytes(content)


# ---- duplicate names ----


def test_a_tensor_that_is_in_a_header_twice(tmp_path):
    for name in (WEIGHTS, "adapter_model.safetensors"):
        save_file({"a": np.ones(1, np.float32), "b": np.ones(1, np.float32)}, tmp_path / name)
        text = json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}})[:-1]
        text += ', "a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}'
        text += ', "b": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}'
        (tmp_path / name).write_bytes(len(text).to_bytes(8, "little") + text.encode() + bytes(8))
    assert set(load_file(tmp_path / WEIGHTS)) == {"a", "b"}  # safetensors itself does not complain
    for read in (lambda: CheckpointFiles(tmp_path), lambda: open_tensors(tmp_path / "adapter_model.safetensors")):
        with pytest.raises(ValueError, match="not a readable safetensors file: .*duplicate name 'a' in a JSON object"):
            read()


def test_a_name_that_is_in_a_json_file_twice(good, tmp_path):
    folder = copied(good, tmp_path)
    text = (folder / "config.json").read_text().rstrip()[:-1]
    (folder / "config.json").write_text(text + ', "vocab_size": 7}')
    with pytest.raises(ValueError, match="config.json is not valid JSON .duplicate name 'vocab_size' in a JSON object"):
        trainer(folder, tmp_path)
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 8, "r": 64}')
    with pytest.raises(ValueError, match="adapter_config.json is not valid JSON: duplicate name 'r' in a JSON object"):
        read_adapter_config(folder)
    (folder / WEIGHTS).unlink()
    (folder / INDEX).write_text('{"weight_map": {"a": "1.safetensors", "a": "2.safetensors"}}')
    with pytest.raises(ValueError, match="is not a valid index.*duplicate name 'a' in a JSON object"):
        CheckpointFiles(folder)


def test_a_tensor_that_is_in_two_pickled_shards(tmp_path):
    torch = pytest.importorskip("torch")
    for number in (1, 2):
        torch.save({"a": torch.ones(2)}, tmp_path / f"{number}.bin")
    places = {"weight_map": {"a": "1.bin", "b": "2.bin"}}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(places))
    with pytest.raises(ValueError, match="2.bin holds the tensor a, which is also in an earlier shard"):
        PickledFiles(tmp_path)


# ---- memory ----


class PanicException(BaseException):
    """Like pyo3's exception of that name, which safetensors raises if a tensor does not fit in memory."""


@pytest.mark.parametrize(
    "error", [MemoryError(), MemoryError("Unable to allocate 1 TiB"), OSError(12, "Cannot allocate memory"),
              RuntimeError("RESOURCE_EXHAUSTED: Out of memory"), PanicException("PyObject pointer is null")]
)  # fmt: skip
def test_what_does_not_fit_is_named(error, good, tmp_path, monkeypatch):
    def fails(*given, **options):
        raise error

    save(tmp_path, 4)
    path = tmp_path / "checkpoint-4" / WEIGHTS
    for module, call, name in (
        ("trl_jax.training.checkpoint_files.mmap.mmap", lambda: digest(path), path),
        ("trl_jax.hub.formats.safe_open", lambda: CheckpointFiles(path.parent), path),
        ("trl_jax.core.files.loads", lambda: read_config(good), good / "config.json"),
        ("trl_jax.hub.checkpoint.ArrayReader.array", lambda: trainer(good, tmp_path), good),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(module, fails)
            with pytest.raises(MemoryError) as caught:
                call()
        assert str(name) in str(caught.value) and "does not fit into free memory" in str(caught.value)


def test_other_errors_stay_what_they_are(tmp_path):
    for error in (OSError(5, "I/O"), RuntimeError("INTERNAL"), KeyboardInterrupt(), ValueError()):
        with pytest.raises(type(error)) as caught, text.out_of_memory_names(tmp_path):
            raise error
        assert caught.value is error


# ---- checkpoints of TRL ----


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="reads torch's files")
@pytest.mark.parametrize("content", ["empty", "list", "none", "text"])
def test_an_optimizer_file_of_trls_that_is_none(content, good, tmp_path):
    import torch

    first = make(trl_jax, good, tmp_path / "run", config={"save_strategy": "steps", "save_steps": 2})
    first.train()
    folder = tmp_path / "run" / "checkpoint-2"
    (folder / MANIFEST).unlink()
    shutil.rmtree(folder / "training_state")
    path = folder / "optimizer.pt"
    names = first.model.params
    if content == "list":
        torch.save([1, 2], path)
    elif content == "none":
        state = {"step": torch.tensor(2.0), "exp_avg": None, "exp_avg_sq": None}
        torch.save({"state": dict.fromkeys(range(len(names) * 9), state), "param_groups": [{"params": [0]}]}, path)
    else:
        path.write_bytes(b"" if content == "empty" else b"root:x:0:0\n")
    with pytest.raises(ValueError, match="optimizer.pt") as error:
        make(trl_jax, good, tmp_path / "new").train(resume_from_checkpoint=str(folder))
    said = {"list": "is not an AdamW state", "none": "is not an AdamW state", "empty": " (0 bytes) cannot be read"}
    assert said.get(content, " (11 bytes) cannot be read (IndexError: ") in str(error.value)
    assert "x:0" not in str(error.value)


# ---- what is said about earlier checkpoints ----


def test_no_earlier_checkpoint_is_promised_where_there_is_none(tmp_path, monkeypatch):
    from trl_jax.training import checkpoint_files as engine

    def full(*given):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(engine, "write_manifest", full)
    run = tmp_path / "run"
    with pytest.raises(OSError, match=f"The checkpoint was not written; {run} has no earlier one. Free space"):
        save(run, 2)
    monkeypatch.undo()
    save(run, 2)
    monkeypatch.setattr(engine, "write_manifest", full)
    with pytest.raises(OSError, match="The checkpoint was not written; earlier ones are untouched. Free space"):
        save(run, 4)

    def gone(*given):
        shutil.rmtree(run)
        full()

    monkeypatch.setattr(engine, "write_manifest", gone)
    with pytest.raises(OSError, match="has no earlier one"):
        save(run, 4)


# ---- the clock ----


def test_a_clock_that_is_set_back_makes_no_negative_rate(good, tmp_path, monkeypatch):
    clock = iter(range(2_000_000_000, 0, -3600))
    monkeypatch.setattr(time, "time", lambda: float(next(clock)))
    run = make(trl_jax, good, tmp_path, eval_dataset=make_rows(), config={"eval_strategy": "steps", "eval_steps": 2})
    run.train()
    run.predict(make_rows())
    speeds = [(name, value) for log in run.state.log_history for name, value in log.items()
              if name.endswith(("_runtime", "_per_second"))]  # fmt: skip
    assert len(speeds) > 6 and all(value > 0 for _, value in speeds), speeds
    assert speed_metrics("train", time.monotonic() + 100, 1, 1).keys() == {"train_runtime"}


def make_rows():
    return Dataset.from_list(preference_rows(8))


# ---- files of other tools ----


@pytest.mark.parametrize("kind", ["latin-1", "utf-16", "folder", "bytes"])
def test_a_readme_that_is_not_ours_is_left_alone(kind, tmp_path):
    path = tmp_path / CARD
    if kind == "folder":
        path.mkdir()
    else:
        path.write_bytes(bytes(range(256)) if kind == "bytes" else "Gästebuch".encode(kind))
    before = None if kind == "folder" else path.read_bytes()
    facts = {"model_name": "judge", "base_model": None, "datasets": [], "tags": []}
    write_card(tmp_path, **facts)
    assert path.is_dir() if before is None else path.read_bytes() == before
    (tmp_path / "new").mkdir()
    write_card(tmp_path / "new", **facts)
    first = (tmp_path / "new" / CARD).read_text()
    write_card(tmp_path / "new", **facts | {"model_name": "other"})
    assert "judge" in first and "other" in (tmp_path / "new" / CARD).read_text()


@pytest.mark.parametrize("content", [b"\xff\xfe", b"[1]", b"", b"[" * 10**5, "folder"])
def test_results_that_are_none_are_named(content, tmp_path):
    path = tmp_path / "all_results.json"
    if content == "folder":
        path.mkdir()
    else:
        path.write_bytes(content)
    with pytest.raises(ValueError, match="all_results.json holds no metrics to add to .* or pass combined=False"):
        save_metrics(tmp_path, "eval", {"eval_loss": 1.0})
    assert json.loads((tmp_path / "eval_results.json").read_text()) == {"eval_loss": 1.0}


def test_json_is_read_as_before_where_every_name_is_there_once():
    text = json.dumps({"a": [{"b": 1}, {"b": 2}], "c": None})
    assert files.loads(text) == json.loads(text)
