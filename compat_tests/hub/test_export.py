"""Saved checkpoints equal what transformers would write, byte for byte if nothing was trained."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from compat_tests.models import variants
from compat_tests.tiny import tiny_model
from trl_jax.hub.auto import AutoModelForSequenceClassification
from trl_jax.hub.checkpoint import architecture

torch = pytest.importorskip("torch")

FAMILIES = variants.COMMON
INDEX = "model.safetensors.index.json"


def saved_again(folder, out, **how):
    AutoModelForSequenceClassification.from_pretrained(folder, **how).save_pretrained(out)
    return out


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


def files_of(folder):
    return sorted(path.name for path in folder.iterdir())


def assert_same_bytes(folder, out):
    weights = sorted(path.name for path in folder.glob("*.safetensors*"))
    assert files_of(out) == ["config.json", *weights]
    for name in weights:
        if name == INDEX:
            assert json.loads((out / name).read_text()) == json.loads((folder / name).read_text())
        else:
            assert (out / name).read_bytes() == (folder / name).read_bytes(), name


@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_untouched_classifier_is_byte_identical(family, dtype, shards, checkpoint, tmp_path):
    folder = checkpoint(family, dtype=dtype, shards=shards)
    assert (folder / INDEX).exists() == shards
    assert_same_bytes(folder, saved_again(folder, tmp_path, dtype="auto"))
    changed = {key for key, value in config_of(tmp_path).items() if config_of(folder).get(key) != value}
    assert changed <= {"use_cache"}


def test_shards_have_the_size_that_is_asked_for(checkpoint, tmp_path):
    import transformers

    folder = checkpoint("llama")
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    model.save_pretrained(tmp_path / "ours", max_shard_size="40KB")
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="40KB")
    indices = [json.loads((tmp_path / side / INDEX).read_text()) for side in ("ours", "theirs")]
    assert indices[0]["metadata"] == indices[1]["metadata"]
    assert indices[0]["weight_map"].keys() == indices[1]["weight_map"].keys()
    files = [load_file(path) for path in (tmp_path / "ours").glob("*.safetensors")]
    assert len(files) > 2 and all(len(one) == 1 or sum(a.nbytes for a in one.values()) <= 40_000 for one in files)
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "ours")
    for name, values in theirs.state_dict().items():
        assert torch.equal(values, loaded.state_dict()[name])
    model.save_pretrained(tmp_path / "ours")
    assert_same_bytes(folder, tmp_path / "ours")


@pytest.mark.parametrize("name", ["attention_bias", "both_biases", "old_yarn"])
def test_biases_and_an_older_config_too(name, tmp_path):
    folder = variants.build(tmp_path / "in", "llama", name)
    assert_same_bytes(folder, saved_again(folder, tmp_path / "out"))


def test_tensors_of_several_dtypes_keep_their_own(checkpoint, tmp_path):
    from safetensors.torch import load_file, save_file

    folder = tiny_model(tmp_path / "in", "llama")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].bfloat16()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert_same_bytes(folder, saved_again(folder, tmp_path / "out"))


@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("head", "tie"), [("causal", False), ("causal", True), ("base", False)])
def test_a_causal_or_bare_model_becomes_a_classifier(head, tie, family, shards, checkpoint, tmp_path):
    """transformers finds every tensor and no others; both compute the same scores; the trunk is unchanged."""
    from transformers import AutoModelForSequenceClassification as Theirs

    folder = checkpoint(family, head=head, tie=tie, shards=shards)
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    model.save_pretrained(tmp_path)
    theirs, report = Theirs.from_pretrained(tmp_path, output_loading_info=True)
    assert {key: list(found) for key, found in report.items() if found} == {}
    assert (
        type(theirs).__name__
        == config_of(tmp_path)["architectures"][0]
        == architecture(model.source.config.family, "score")
    )
    ids, mask = variants.rows()
    variants.assert_close(model(ids, mask).logits, variants.reference_logits(tmp_path, ids, mask), 1e-5)
    before, after = _tensors(folder), _tensors(tmp_path)
    assert set(after) == {_full(name) for name in before if name != "lm_head.weight"} | {"score.weight"}
    assert all(np.array_equal(after[_full(name)], values) for name, values in before.items() if _full(name) in after)


def _full(name):
    return name if name.startswith(("model.", "lm_head.", "score.")) else f"model.{name}"


def _tensors(folder):
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
        with safe_open(path, "numpy") as file:
            assert file.metadata() == {"format": "pt"}
    return found


@pytest.mark.parametrize("name", ["plain", "old_llama3", "old_default", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_config_keeps_its_keys(family, name, built, tmp_path):
    """Old keys stay as they were; only those change that TRL's save changes."""
    folder = built(family, name)
    before, after = config_of(folder), config_of(saved_again(folder, tmp_path))
    if name.startswith("old"):
        assert "rope_theta" in after and "rope_parameters" not in after
    changed = {key for key in {*before, *after} if before.get(key) != after.get(key)}
    assert changed <= {"architectures", "dtype", "id2label", "label2id", "use_cache"}
    assert after["id2label"] == {"0": "LABEL_0"} and after["label2id"] == {"LABEL_0": 0}
    assert after["use_cache"] is False and "num_labels" not in after
    assert after["tie_word_embeddings"] is before["tie_word_embeddings"]


def test_the_ids_of_the_tokenizer_are_written(checkpoint, tmp_path):
    folder = checkpoint("llama")
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    model.config.pad_token_id, model.config.eos_token_id = 7, [1, 9]
    model.save_pretrained(tmp_path)
    before, after = config_of(folder), config_of(tmp_path)
    assert {key for key in after if after[key] != before[key]} == {
        "pad_token_id",
        "eos_token_id",
        "use_cache",
    }
    assert (after["pad_token_id"], after["eos_token_id"]) == (7, [1, 9])


@pytest.mark.parametrize("old_key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize(
    ("stored", "asked", "written"),
    [
        ("bfloat16", {}, "bfloat16"),
        ("bfloat16", {"dtype": "auto"}, "bfloat16"),
        ("bfloat16", {"dtype": "float32"}, "float32"),
        ("float32", {"dtype": "bfloat16"}, "bfloat16"),
        ("float32", {"dtype": torch.bfloat16}, "bfloat16"),
        ("float32", {"torch_dtype": "float16"}, "float16"),
    ],
)
def test_the_dtype_asked_for_is_the_dtype_written(stored, asked, written, old_key, tmp_path):
    folder = tiny_model(tmp_path / "in", "qwen2", head="causal", dtype=stored)
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace('"dtype"', f'"{old_key}"'))
    out = saved_again(folder, tmp_path / "out", **asked)
    assert {str(values.dtype) for values in _tensors(out).values()} == {written}
    assert config_of(out)["dtype"] == written and "torch_dtype" not in config_of(out)
    before, after = _tensors(folder), _tensors(out)
    name = "model.layers.1.mlp.down_proj.weight"
    np.testing.assert_array_equal(after[name], before[name].astype(after[name].dtype))


@pytest.mark.parametrize(
    ("init", "written"),
    [({}, "float32"), ({"dtype": "bfloat16"}, "bfloat16"), ({"dtype": "auto"}, "bfloat16")],
)
def test_the_trainer_writes_the_dtype_of_model_init_kwargs(init, written, checkpoint, tmp_path):
    from datasets import Dataset

    from compat_tests.tiny import preference_rows
    from trl_jax.trainer.reward_config import RewardConfig
    from trl_jax.trainer.reward_trainer import RewardTrainer

    folder = checkpoint("llama", dtype="bfloat16")
    args = RewardConfig(str(tmp_path), model_init_kwargs=init, use_cpu=True, bf16=False, report_to="none")
    trainer = RewardTrainer(str(folder), args, train_dataset=Dataset.from_list(preference_rows(4)))
    trainer.save_model(str(tmp_path / "final"))
    weights = [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "training_args.json",
    ]
    assert files_of(tmp_path / "final") == weights
    assert {str(values.dtype) for values in _tensors(tmp_path / "final").values()} == {written}
    before, after = config_of(folder), config_of(tmp_path / "final")
    assert {key for key in after if after[key] != before.get(key)} <= {"dtype", "use_cache"}


def test_saving_leaves_the_given_config_alone(checkpoint, tmp_path):
    model = AutoModelForSequenceClassification.from_pretrained(checkpoint("llama", head="causal"))
    raw = json.dumps(model.source.config.raw)
    model.save_pretrained(tmp_path)
    assert json.dumps(model.source.config.raw) == raw
