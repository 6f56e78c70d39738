"""Broken weights, configs, arguments and rows: each error names the culprit and the way out.

The number in a test's name is that of the case in the project's table of faults.
"""

from __future__ import annotations

import json
import pickle
import re
import struct
import sys
import tracemalloc

import numpy as np
import pytest
from datasets import Dataset, IterableDataset

from compat_tests.faults.broken import INDEX, PICKLE, WEIGHTS, ZIP, copied, edit_tensor, edit_tensors, trainer
from compat_tests.tiny import preference_rows, tiny_tokenizer
from trl_jax.data import chat
from trl_jax.hub import torch_bridge
from trl_jax.hub.auto import AutoModelForCausalLM, AutoModelForSequenceClassification
from trl_jax.hub.families import families
from trl_jax.trainer.reward_config import RewardConfig

pytest.importorskip("torch")  # builds the checkpoints to break

load = AutoModelForSequenceClassification.from_pretrained
IDS = {"chosen_ids": [5, 6], "rejected_ids": [7]}


@pytest.fixture
def good(checkpoint):
    return checkpoint("llama")


def refuses(text, *parts, error=ValueError):
    """Expects an error whose text contains `text` and all `parts`."""
    return pytest.raises(error, match="(?s)" + "".join(f"(?=.*{re.escape(str(part))})" for part in (text, *parts)))


# ---- weights ----

OPENINGS = {
    "empty": (b"", "it has 0 bytes, perhaps because a download was interrupted: download it again"),
    "short": (b"\x08\0\0", "it has 3 bytes, perhaps because a download was interrupted: download it again"),
    "html": (b"<!DOCTYPE html><html>404</html>", "this is an HTML or XML page"),
    "xml": (b'<?xml version="1.0"?><Error/>', "this is an HTML or XML page"),
    "lfs": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n",
        "this is a git-LFS pointer instead of the weights: run `git lfs pull`",
    ),
    "not_found": (b"Entry not found", "this is an error message of the Hub, which has no such file"),
    "text": (b"root:x:0:0:root:/root:/bin/bash", "it is a text file: download it again"),
    "zeros": (bytes(1000), "its header is not a JSON object of tensors"),
}  # fmt: skip


@pytest.mark.parametrize("kind", OPENINGS)
def test_row01_what_is_no_safetensors_file(kind, good, tmp_path):
    content, text = OPENINGS[kind]
    folder = copied(good, tmp_path)
    (folder / WEIGHTS).write_bytes(content)
    with refuses(f"{folder / WEIGHTS} is not a readable safetensors file: {text}"):
        trainer(folder, tmp_path)


def test_row01_in_a_shard(checkpoint, tmp_path):
    folder = copied(checkpoint("llama", shards=True), tmp_path)
    shard = sorted(folder.glob("*.safetensors"))[2]
    shard.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with refuses(f"{shard} is not", "git lfs pull"):
        trainer(folder, tmp_path)


HEADERS = {
    "too_long": (
        struct.pack("<Q", 2**60) + bytes(50),
        "its header should have 1,152,921,504,606,846,976 bytes, but the file has 58",
    ),
    "negative": (b"\xff" * 60, "its header should have 18,446,744,073,709,551,615 bytes"),
    "no_json": (struct.pack("<Q", 16) + b"x" * 50, "its header is not a JSON object of tensors"),
    "a_list": (struct.pack("<Q", 2) + b"[]" + bytes(50), "its header is not a JSON object of tensors"),
    "no_offsets": (struct.pack("<Q", 17) + b'{"a":{"shape":1}}', "its header is not a JSON object of"),
    "deep": (struct.pack("<Q", 200_000) + b"[" * 200_000, "its header is not a JSON object of tensors"),
}  # fmt: skip


@pytest.mark.parametrize("kind", HEADERS)
def test_row02_a_header_that_is_none(kind, good, tmp_path):
    content, text = HEADERS[kind]
    folder = copied(good, tmp_path)
    (folder / WEIGHTS).write_bytes(content)
    with refuses(f"{folder / WEIGHTS} is not a readable safetensors file: {text}"):
        trainer(folder, tmp_path)


ENTRIES = {
    "shape": (
        {"shape": [1, 63]},
        "tensor score.weight of dtype F32 and shape [1, 63] needs 252 bytes, but has 256",
    ),
    "overflow": (
        {"shape": [2**62, 2**62]},
        "tensor score.weight of dtype F32 and shape [4611686018427387904, ",
    ),
    "overlap": ({"data_offsets": [0, 256]}, "begins at byte 0, but the previous tensor ends at 256"),
    "hole": (
        {"data_offsets": [600_000, 600_256]},
        "tensor score.weight begins at byte 600,000, but the previous tensor",
    ),
    "dtype": ({"dtype": "Q4"}, "tensor score.weight has dtype Q4, which safetensors does not know"),
}


@pytest.mark.parametrize("kind", ENTRIES)
def test_row02_an_entry_that_contradicts_itself(kind, good, tmp_path):
    entry, text = ENTRIES[kind]
    folder = copied(good, tmp_path)
    edit_tensor(folder, "score.weight", **entry)
    with refuses(str(folder / WEIGHTS), text):
        trainer(folder, tmp_path)


def test_row02_data_cut_short_or_too_long(good, tmp_path):
    folder = copied(good, tmp_path)
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[:-100])
    with refuses(str(folder / WEIGHTS), "tensor score.weight ends at byte", "the file is truncated, download it again"):
        trainer(folder, tmp_path)
    (folder / WEIGHTS).write_bytes(content + b"xx")
    with refuses(str(folder / WEIGHTS), "2 bytes after the last tensor are unused"):
        trainer(folder, tmp_path)
    (folder / WEIGHTS).write_bytes(content[:1000])
    with refuses(str(folder / WEIGHTS), "its header should have", "the file has 1,000: download it again"):
        trainer(folder, tmp_path)


@pytest.mark.parametrize(
    ("dtype", "width"), [("F8_E4M3", 256), ("F8_E5M2", 256), ("I64", 32), ("F64", 32), ("BOOL", 256)]
)
def test_row03_a_dtype_that_is_not_read(dtype, width, good, tmp_path):
    folder = copied(good, tmp_path)
    edit_tensor(folder, "score.weight", dtype=dtype, shape=[1, width])
    text = f"{folder / WEIGHTS}: tensor score.weight has dtype {dtype}; trl_jax reads F32, BF16, F16. Dequantize"
    with refuses(text):
        trainer(folder, tmp_path)


def test_row03_a_quantized_checkpoint(good, tmp_path):
    folder = copied(good, tmp_path, quantization_config={"quant_method": "fp8"})
    with refuses(f"{folder / 'config.json'}: the weights are quantized (quant_method='fp8')", "Use the unquantized"):
        trainer(folder, tmp_path)


def test_row04_every_missing_shard_is_listed(checkpoint, tmp_path):
    folder = copied(checkpoint("llama", shards=True), tmp_path)
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    for name in (shards[0], shards[3]):
        (folder / name).unlink()
    text = f"{folder} lacks 2 of the {len(shards)} shards in {INDEX}: {shards[0]}, {shards[3]}. Download them."
    with refuses(text, error=FileNotFoundError):
        trainer(folder, tmp_path)


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/etc/passwd", "a/b.safetensors", "..", ".", "", "a\\b", "a\0b", 5, "9" * 300]
)
def test_row05_an_index_that_points_elsewhere(name, checkpoint, tmp_path, monkeypatch):
    folder = copied(checkpoint("llama", shards=True), tmp_path)
    weight_map = {"model.norm.weight": name}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    monkeypatch.setattr("trl_jax.hub.formats.safe_open", lambda *how, **more: pytest.fail("opened"))
    with refuses(f"{folder / INDEX} names shards outside its folder, or none at all: {[name]!r}. Nothing was opened."):
        trainer(folder, tmp_path)


NO_INDEX = [
    "{nope",
    "[]",
    "{}",
    '{"weight_map": 5}',
    '{"weight_map": {"a": ["b"]}}',
    '{"weight_map": {"a": 1, "b": "c"}}',
    "[" * 100_000,
]


@pytest.mark.parametrize("content", NO_INDEX)
def test_row05_an_index_that_is_none(content, checkpoint, tmp_path):
    folder = copied(checkpoint("llama", shards=True), tmp_path)
    (folder / INDEX).write_text(content)
    with refuses(f"{folder / INDEX} is not a valid index, which is a JSON object with a weight_map"):
        trainer(folder, tmp_path)


def test_row05_one_tensor_in_two_shards(checkpoint, tmp_path):
    folder = copied(checkpoint("llama", shards=True), tmp_path)
    first, second = sorted(folder.glob("*.safetensors"))[:2]
    second.write_bytes(first.read_bytes())
    with refuses(f"{second} holds the tensor model.", "which is also in an earlier shard"):
        trainer(folder, tmp_path)


def test_row06_missing_and_unexpected_tensors(good, tmp_path):
    folder = copied(good, tmp_path)
    missing = "model.layers.1.mlp.up_proj.weight"
    edit_tensors(folder, drop=[missing], model__layers__1__extra__weight=np.ones(3, np.float32))
    text = f"{folder}: the weights do not fit config.json (model_type 'llama'). Missing: {missing}."
    with refuses(text, "Unexpected: model.layers.1.extra.weight. Use the config.json of this checkpoint."):
        trainer(folder, tmp_path)


def test_row06_wrong_shapes_and_two_labels(good, checkpoint, tmp_path):
    folder = copied(good, tmp_path)
    edit_tensors(folder, score__weight=np.ones((2, 64), np.float32))
    text = f"{folder}: wrong shapes: score.weight is [2, 64], but config.json requires [1, 64]."
    with refuses(text, "A reward model has a single score per text"):
        trainer(folder, tmp_path)


def test_row06_a_new_head_and_a_language_head_are_no_fault(checkpoint, tmp_path, caplog):
    caplog.set_level("INFO", logger="trl_jax")
    folder = checkpoint("llama", head="causal")
    trainer(folder, tmp_path, seed=11)
    assert f"{folder} has no score.weight: initialized from a normal distribution with seed 11." in caplog.text


def test_row07_tied_but_with_a_head_of_its_own(checkpoint, tmp_path, caplog):
    """As in transformers, the head is used whatever config.json says; a reward model has no such head."""
    import torch
    from transformers import AutoModelForCausalLM as Theirs

    folder = copied(checkpoint("llama", head="causal"), tmp_path, tie_word_embeddings=True)
    assert "score.weight" in trainer(folder, tmp_path).model.params
    assert "differs" not in caplog.text
    model, ids = AutoModelForCausalLM.from_pretrained(folder), [[5, 6, 7]]
    assert f"{folder}: config.json says tie_word_embeddings=true, but lm_head.weight differs from" in caplog.text
    model.save_pretrained(tmp_path / "back")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["tie_word_embeddings"] is False
    assert (tmp_path / "back" / WEIGHTS).read_bytes() == (folder / WEIGHTS).read_bytes()
    wanted = Theirs.from_pretrained(folder)(input_ids=torch.tensor(ids)).logits.detach().numpy()
    np.testing.assert_allclose(model(ids).logits, wanted, atol=1e-4)


def test_row07_not_tied_but_without_a_head(checkpoint, tmp_path):
    folder = copied(checkpoint("llama", head="causal", tie=True), tmp_path, tie_word_embeddings=False)
    with refuses(
        f"{folder}: config.json says",
        "tie_word_embeddings=false, but the weights have no lm_head.weight. Set",
    ):
        trainer(folder, tmp_path)


def test_row07_tied_with_an_equal_head_is_no_fault(checkpoint, tmp_path):
    folder = copied(checkpoint("llama", head="causal", tie=True), tmp_path)
    from safetensors.numpy import load_file

    edit_tensors(folder, lm_head__weight=load_file(folder / WEIGHTS)["model.embed_tokens.weight"])
    assert "score.weight" not in load_file(folder / WEIGHTS)
    assert load(folder).params.keys() == load(checkpoint("llama", head="causal", tie=True)).params.keys()


class Malicious:
    """Creates a file when it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return open, (str(self.mark), "w")


def test_row08_a_malicious_bin_file_is_not_run(good, tmp_path):
    folder, mark = copied(good, tmp_path), tmp_path / "mark"
    (folder / WEIGHTS).unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Malicious(mark)))
    text = f"{folder / 'pytorch_model.bin'} is not a PyTorch file that only holds tensors"
    with refuses(text, "no code in it was run"):
        trainer(folder, tmp_path)
    assert not mark.exists()


def test_row08_a_bin_file_is_neither_read_nor_run_without_torch(good, tmp_path, monkeypatch):
    monkeypatch.setattr(torch_bridge, "available", lambda: False)
    folder, mark = copied(good, tmp_path), tmp_path / "mark"
    (folder / WEIGHTS).unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Malicious(mark)))
    text = f"{folder} only has pytorch_model.bin"
    with refuses(
        text,
        "pip install 'trl_jax[torch]'. Or convert it: AutoModel.from_pretrained(folder).save_pretrained(folder)",
    ):
        trainer(folder, tmp_path)
    assert not mark.exists()
    pickle.loads((folder / "pytorch_model.bin").read_bytes()).close()
    assert mark.exists()  # unpickling would have run it


def test_row08_a_bin_file_beside_safetensors_is_not_touched(good, tmp_path):
    folder, mark = copied(good, tmp_path), tmp_path / "mark"
    for name in ("pytorch_model.bin", "training_args.bin", "optimizer.pt"):
        (folder / name).write_bytes(pickle.dumps(Malicious(mark)))
    trainer(folder, tmp_path)
    assert not mark.exists()


def test_row08_no_weights_at_all(good, tmp_path):
    folder = copied(good, tmp_path)
    (folder / WEIGHTS).unlink()
    text = f"{folder} has no weights: neither {WEIGHTS} nor {INDEX} exists."
    with refuses(text, error=FileNotFoundError):
        trainer(folder, tmp_path)


@pytest.mark.parametrize(("content", "found"), [(PICKLE, "a pickle"), (ZIP, "a zip archive")])
def test_row09_a_bin_file_under_another_name(content, found, good, tmp_path):
    folder = copied(good, tmp_path)
    (folder / WEIGHTS).write_bytes(content)
    with refuses(f"{folder / WEIGHTS}", f"this is {found}, probably a renamed PyTorch .bin: convert it"):
        trainer(folder, tmp_path)


# ---- arguments ----


def test_row15_output_dir_is_or_goes_through_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    for name in ("file", "file/run"):
        with refuses(
            f"output_dir={str(tmp_path / name)!r}: {tmp_path / 'file'} is a file. Choose another",
            error=NotADirectoryError,
        ):
            RewardConfig(str(tmp_path / name), bf16=False, use_cpu=True)


def test_row15_output_dir_is_not_writable(tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write anywhere
    with refuses(f"output_dir={str(tmp_path / 'run')!r}: {tmp_path} is not writable. Choose", error=PermissionError):
        RewardConfig(str(tmp_path / "run"), bf16=False, use_cpu=True)


# ---- rows ----


EMPTY = {
    "table": Dataset.from_dict({"chosen": [], "rejected": []}),
    "stream": IterableDataset.from_generator(lambda: iter(())),
}


@pytest.mark.parametrize("kind", EMPTY)
def test_row23_an_empty_dataset(kind, good, tmp_path):
    with refuses("train_dataset is empty"):
        trainer(good, tmp_path, rows=EMPTY[kind], max_steps=3)


def test_row24_every_row_is_too_long(good, tmp_path):
    rows = [{"chosen_ids": [5] * 90, "rejected_ids": [6]}, {"chosen_ids": [5], "rejected_ids": [6] * 81}]
    text = "max_length=64 removes all 2 rows of train_dataset: the shortest pair has 81 tokens. Raise"
    with refuses(text):
        trainer(good, tmp_path, rows=rows, max_length=64)


def test_row25_a_text_that_is_none(good, tmp_path):
    rows = preference_rows(3)
    rows[2]["rejected"] = None
    with refuses(
        "Row 2 of train_dataset, column 'rejected': must be a string, or a non-empty list of messages, each "
        "with a 'role' and a 'content', got None"
    ):
        trainer(good, tmp_path, rows=rows)


def test_row26_empty_texts_are_warned_of(good, tmp_path, caplog):
    rows = preference_rows(3)
    rows[1]["chosen"] = ""
    trainer(good, tmp_path, rows=rows)
    assert "1 of 3 rows of train_dataset have an empty chosen or rejected text (first: row 1)" in caplog.text


def test_row26_no_ids(good, tmp_path):
    with refuses(
        "Row 1 of train_dataset, column 'rejected_ids': must be a list of at least one token id, got [] (list)"
    ):
        trainer(good, tmp_path, rows=[IDS, {**IDS, "rejected_ids": []}])


def test_row27_missing_columns(good, tmp_path):
    text = "train_dataset must have the columns 'chosen' and 'rejected', or 'chosen_ids' and 'rejected_ids'"
    with refuses(text, "got ['chosen', 'note']"):
        trainer(good, tmp_path, rows=[{"chosen": "a", "note": "b"}])


def test_row28_a_conversation_without_a_template(good, tmp_path):
    text = "Row 0 of train_dataset is a conversation, but the tokenizer"
    with refuses(text, "has no chat template. Pass one with chat_template_path="):
        trainer(good, tmp_path, rows=preference_rows(2, "chat"))


@pytest.mark.parametrize(
    ("margin", "found"), [(None, "got None"), (float("nan"), "got nan"), (float("inf"), "got inf")]
)
def test_row29_a_margin_that_is_no_number(margin, found, good, tmp_path):
    rows = preference_rows(3, margin=True)
    rows[1]["margin"] = margin
    text = "Row 1 of train_dataset, column 'margin': must be a finite number in every row (or drop the column), "
    with refuses(text + found):
        trainer(good, tmp_path, rows=rows)


def test_row29_a_margin_in_words(good, tmp_path):
    rows = [{**row, "margin": "a lot"} for row in preference_rows(2)]
    with refuses(
        "Row 0 of train_dataset, column 'margin': must be a finite number in every row (or drop the column), "
        "got 'a lot' (str)"
    ):
        trainer(good, tmp_path, rows=rows)


@pytest.mark.parametrize("token", [520, 10**6, -1])
def test_row30_a_token_outside_the_vocabulary(token, good, tmp_path):
    text = f"Row 1 of the prepared train_dataset, column 'chosen_ids': token id {token} is outside the model's"
    with refuses(
        text,
        "vocabulary (vocab_size=520). Pass the model's own tokenizer, or resize",
    ):
        trainer(good, tmp_path, rows=[IDS, {**IDS, "chosen_ids": [5, token]}])


def test_row30_a_tokenizer_of_another_model(good, tmp_path):
    words = tiny_tokenizer()
    words.add_tokens([f"<extra{i}>" for i in range(30)])
    with refuses("Row 0 of the prepared train_dataset", "Pass the model's own tokenizer"):
        trainer(good, tmp_path, rows=[{"chosen": "good <extra29>", "rejected": "bad"}], processing_class=words)


def test_row31_a_tokenizer_without_eos(good, tmp_path):
    words = tiny_tokenizer(eos=None)
    text = "Row 0 of train_dataset is plain text, to which the EOS token is appended, but the tokenizer"
    with refuses(text, "has none. Pass a token of its vocabulary as eos_token=... in the trainer"):
        trainer(good, tmp_path, processing_class=words)


def test_row31_an_eos_token_that_is_unknown(good, tmp_path):
    with refuses("The specified `eos_token` ('<nope>') is not found in the vocabulary", "a token of the vocabulary"):
        trainer(good, tmp_path, eos_token="<nope>")


def test_row32_a_tokenizer_without_pad_and_eos(good, tmp_path):
    words = tiny_tokenizer(pad=None, eos=None)
    with refuses("has neither a pad nor an EOS token", "pad_token=... in the trainer's config, or as eos_token="):
        trainer(good, tmp_path, processing_class=words)


def test_row33_pad_equal_to_eos_is_warned_of_once(good, tmp_path, caplog):
    chat._warn_of_shared_pad_once.cache_clear()
    for _ in range(2):
        trainer(good, tmp_path, processing_class=tiny_tokenizer(pad="</s>"))
    text = "pad_token and eos_token are both '</s>', so the score is read at the last token before the EOS"
    assert caplog.text.count(text) == 1


# ---- model and config ----


def test_row34_more_than_one_label(good, tmp_path):
    with refuses("num_labels is 2, but reward models require `num_labels=1`, one score per text."):
        trainer(good, tmp_path, model_init_kwargs={"num_labels": 2})


@pytest.mark.parametrize("model_type", ["mamba", None, 5, ["llama"]])
def test_row35_an_unknown_architecture(model_type, good, tmp_path):
    folder = copied(good, tmp_path, model_type=model_type)
    text = f"{folder / 'config.json'}: model_type {model_type!r} is not supported by this release of trl_jax."
    with refuses(text, f"Supported: {', '.join(sorted(families()))}."):
        trainer(folder, tmp_path)


def test_row35_the_code_of_a_repository_is_never_run(good, tmp_path, caplog):
    mark = tmp_path / "mark"
    auto_map = {"AutoConfig": "modeling.Config", "AutoModelForSequenceClassification": "modeling.Model"}
    folder = copied(good, tmp_path, model_type="homemade", auto_map=auto_map)
    (folder / "modeling.py").write_text(f"open({str(mark)!r}, 'w')\nclass Config: ...\nclass Model: ...\n")
    for trust in (False, True):
        with refuses("model_type 'homemade' is not supported", "Its custom code (auto_map) is never run."):
            trainer(folder, tmp_path, trust_remote_code=trust)
    folder = copied(folder, tmp_path / "known", model_type="llama")
    load(folder, trust_remote_code=True)
    assert "trust_remote_code has no effect on models" in caplog.text
    assert not mark.exists() and not any(name.endswith("modeling") for name in sys.modules if "broken" in name)


def test_row36_no_config(good, tmp_path):
    folder = copied(good, tmp_path)
    (folder / "config.json").unlink()
    text = f"{folder / 'config.json'} does not exist. A checkpoint folder must hold config.json and *.safetensors."
    with refuses(text, error=FileNotFoundError):
        trainer(folder, tmp_path)
    with refuses(
        "gone'", "there is no such folder, and it is not a valid name of a Hub repository", error=FileNotFoundError
    ):
        trainer(tmp_path / "gone", tmp_path)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"{nope", "is not valid JSON (Expecting property name"),
        (b"", "is not valid JSON"),
        (b"\xff\xfe{}", "is not valid JSON"),
        (b"[" * 100_000, "is not valid JSON"),
        (b'{"vocab_size": ' + b"9" * 5000 + b"}", "is not valid JSON"),
        (b"[]", "must hold a JSON object, got a list."),
    ],
)
def test_row36_a_config_that_is_no_json(content, text, good, tmp_path):
    folder = copied(good, tmp_path)
    (folder / "config.json").write_bytes(content)
    with refuses(f"{folder / 'config.json'} {text}"):
        trainer(folder, tmp_path)


HUGE = [
    ("num_hidden_layers", 10**9, "num_hidden_layers must be a whole number from 1 to 4,096, got 1000000000."),
    (
        "num_hidden_layers",
        4096,
        "the weights do not fit config.json (model_type 'llama'). Missing: model.layers.",
    ),
    ("hidden_size", 10**9, "model.embed_tokens.weight is [520, 64], but config.json requires [520, 1000000000]"),
    ("intermediate_size", 10**9, "config.json requires [1000000000, 64]"),
    ("vocab_size", 10**9, "model.embed_tokens.weight is [520, 64], but config.json requires [1000000000, 64]"),
    ("vocab_size", 10**12, "vocab_size must be a whole number from 1 to 2,147,483,647, got 1000000000000."),
    ("head_dim", 10**9, "config.json requires [4000000000, 64]"),
    ("num_attention_heads", 10**9, "transformers rejects this config: Class validation error for validator"),
]


@pytest.mark.parametrize(("key", "size", "text"), HUGE)
def test_row36_huge_sizes_are_refused_before_anything_is_allocated(key, size, text, good, tmp_path):
    folder = copied(good, tmp_path, **{key: size})
    tracemalloc.start()
    with refuses(str(folder), text):
        trainer(folder, tmp_path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 300e6


WRONG = {
    "hidden_size": [0, -64, 64.0, "64", True, [64]],
    "num_attention_heads": [0, "x", 3],
    "num_key_value_heads": [0, 3, {}],
    "head_dim": [15, -2],
    "rms_norm_eps": ["x", -1.0, float("nan"), float("inf"), []],
    "hidden_act": ["magic", [], {}],
    "attention_bias": [1, "true"],
    "attention_dropout": [1.5, -0.1],
    "pad_token_id": ["x", 520, -600, []],
    "tie_word_embeddings": ["yes"],
    "architectures": [5, "LlamaForCausalLM", [1]],
    "dtype": ["float8", 5],
    "quantization_config": ["x"],
    "rope_parameters": [
        "x",
        [],
        {"rope_type": "dynamic"},
        {"rope_type": []},
        {"factor": 2.0},
        {"rope_theta": 0},
    ],
    "rope_scaling": [5, {"type": "linear"}, {"type": "linear", "factor": "x"}, {"type": "yarn", "factor": 0}],
    "rope_theta": ["x", float("nan"), -5],
    "use_cache": [[]],
    "id2label": [5],
    "label2id": [["a"]],
    "max_position_embeddings": [[]],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in WRONG.items() for value in values])
def test_row36_a_wrong_value_is_named(key, value, good, tmp_path):
    """Never a crash, and always an error that names the file and the key."""
    folder = copied(good, tmp_path, **{key: value})
    with refuses(str(folder / "config.json"), key):
        load(folder)


def test_row36_heads_that_do_not_divide_the_width(good, tmp_path):
    folder = copied(good, tmp_path, hidden_size=66, head_dim=None)
    with refuses(f"{folder / 'config.json'}: hidden_size must be a multiple of num_attention_heads 4, got 66."):
        load(folder)


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("layer_types", 5, "layer_types must be a list of names, got 5"),
        ("layer_types", [[1]], "layer_types must be a list of names, got [[1]]"),
        (
            "layer_types",
            ["full_attention"],
            "layer_types must be 3 entries of full_attention or sliding_attention",
        ),
        (
            "layer_types",
            ["linear_attention"] * 3,
            "layer_types must be 3 entries of full_attention or sliding_attention, got 3 entries of "
            "['linear_attention']",
        ),
        (
            "layer_types",
            ["sliding_attention"] * 3,
            "layer_types names sliding_attention but use_sliding_window is",
        ),
        ("max_window_layers", "x", "max_window_layers must be a whole number from 0"),
        ("use_sliding_window", 1, "use_sliding_window must be true or false, got 1"),
        ("num_key_value_heads", 0, "num_key_value_heads must be a whole number from 1 to 2,147,483,647, got 0"),
    ],
)
def test_row36_a_wrong_value_of_qwen2(key, value, text, checkpoint, tmp_path):
    folder = copied(checkpoint("qwen2"), tmp_path, **{key: value})
    with refuses(f"{folder / 'config.json'}: {text}"):
        load(folder)


def test_row37_a_stream_without_max_steps(good, tmp_path):
    rows = preference_rows(4)
    stream = IterableDataset.from_generator(lambda: iter(rows))
    with refuses("train_dataset has no length, so max_steps must be set, but it is -1. Set it in the config"):
        trainer(good, tmp_path, rows=stream).train()
