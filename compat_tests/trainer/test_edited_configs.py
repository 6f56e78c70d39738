"""What a script writes into `trainer.model.config` is in the config.json that is saved, as TRL's is."""

from __future__ import annotations

import json

import pytest
from datasets import Dataset

import trl_jax
from compat_tests.mesh.rank import rows_of
from compat_tests.parity.dpo_cases import SMALL
from compat_tests.parity.reference import BASE
from compat_tests.trainer.trainers import FACTS

EDITS = {"bos_token_id": 7, "max_position_embeddings": 99, "of_the_script": {"a": [1, "b"]}, "id2label": {0: "good"}}


def saved(package, kind, model, out, edits):
    args = getattr(package, f"{kind}Config")(str(out), **BASE)
    trainer = getattr(package, f"{kind}Trainer")(model, args=args, train_dataset=Dataset.from_list(rows_of(kind, 4)))
    for name, value in edits.items():
        setattr(trainer.model.config, name, value)
    trainer.save_model(str(out))
    return json.loads((out / "config.json").read_text())


@pytest.mark.parametrize("door", ["folder", "torch"])
@pytest.mark.parametrize(("kind", "edits"), [("SFT", EDITS | {"use_cache": True}), ("Reward", EDITS), ("DPO", {})])
def test_the_config_is_saved_as_the_script_left_it(kind, edits, door, checkpoint, tmp_path):
    trl, transformers = pytest.importorskip("trl"), pytest.importorskip("transformers")
    folder = str(checkpoint(**FACTS if kind == "Reward" else SMALL))
    auto = transformers.AutoModelForSequenceClassification if kind == "Reward" else transformers.AutoModelForCausalLM
    found = []
    for package in (trl, trl_jax):
        model = folder if door == "folder" else auto.from_pretrained(folder, dtype="float32")
        found.append(saved(package, kind, model, tmp_path / package.__name__, edits))
    theirs, ours = found
    assert {name: ours[name] for name in theirs if name != "transformers_version"} == {
        name: value for name, value in theirs.items() if name != "transformers_version"
    }
    assert ours["use_cache"] is edits.get("use_cache", False) and ours.get("bos_token_id") == edits.get("bos_token_id")


def test_a_torch_model_and_the_trainers_share_a_config(checkpoint, tmp_path):
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint(**SMALL), dtype="float32")
    args = trl_jax.SFTConfig(str(tmp_path), **BASE)
    trainer = trl_jax.SFTTrainer(model, args=args, train_dataset=Dataset.from_list(rows_of("SFT", 4)))
    model.config.of_the_script = 3
    trainer.save_model()
    assert json.loads((tmp_path / "config.json").read_text())["of_the_script"] == 3
