"""Changes that a user makes to a model's config: they are saved in config.json, as in TRL, and do not change a model
that torch has already built."""

from __future__ import annotations

import json

import numpy as np
import pytest
from datasets import Dataset

import trl_jax
from compat_tests.effort import usual
from compat_tests.mesh.rank import rows_of
from compat_tests.parity.dpo_cases import SMALL
from compat_tests.parity.reference import BASE
from compat_tests.tiny import text_rows
from compat_tests.trainer.trainers import FACTS
from trl_jax.hub.torch_objects import as_checkpoint

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


def test_model_init_kwargs_reach_the_generation_config_as_in_trl(checkpoint, tmp_path):
    trl, found = pytest.importorskip("trl"), []
    given = {"use_cache": False, "eos_token_id": 5}
    for package in (trl, trl_jax):
        args = package.SFTConfig(str(tmp_path), model_init_kwargs=given, **BASE)
        trainer = package.SFTTrainer(str(checkpoint(**SMALL)), args=args, train_dataset=Dataset.from_list(text_rows(4)))
        found.append((trainer.model.generation_config.to_dict(), trainer.model.config.eos_token_id))
    assert found[1] == found[0]
    assert found[1][0]["use_cache"] is False and found[1][0]["eos_token_id"] == 5


def test_a_torch_model_and_the_trainers_share_a_config(checkpoint, tmp_path):
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint(**SMALL), dtype="float32")
    args = trl_jax.SFTConfig(str(tmp_path), **BASE)
    trainer = trl_jax.SFTTrainer(model, args=args, train_dataset=Dataset.from_list(rows_of("SFT", 4)))
    model.config.of_the_script = 3
    trainer.save_model()
    assert json.loads((tmp_path / "config.json").read_text())["of_the_script"] == 3


PADLESS = SMALL | {"tokenizer": {"pad": None, "chat_template": True}}
PADDED = SMALL | {"tokenizer": {"pad": "</s>", "chat_template": True}}


@usual("padless-True", "padded-False")
@pytest.mark.parametrize("adapter", [False, True])
@pytest.mark.parametrize(("facts", "named"), [(PADLESS, True), (PADDED, False)], ids=["padless", "padded"])
def test_a_pad_token_that_a_torch_model_got_later_trains_like_any_other(facts, named, adapter, checkpoint, tmp_path):
    trl, transformers = pytest.importorskip("trl"), pytest.importorskip("transformers")
    folder, found = checkpoint(**facts), []
    for package in (trl, trl_jax):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
        words = transformers.AutoTokenizer.from_pretrained(folder)
        words.pad_token = words.eos_token  # EOS ends each turn
        model.config.pad_token_id = words.pad_token_id if named else None
        if adapter:
            peft, torch = pytest.importorskip("peft"), pytest.importorskip("torch")
            torch.manual_seed(0)
            given = {"target_modules": ["q_proj", "embed_tokens"], "task_type": "CAUSAL_LM"}
            model = peft.get_peft_model(model, peft.LoraConfig(r=4, init_lora_weights=False, **given))
        args = package.SFTConfig(str(tmp_path), **BASE | {"max_steps": 1})
        rows = Dataset.from_list(text_rows(4, "chat"))
        trainer = package.SFTTrainer(model, args=args, train_dataset=rows, processing_class=words)
        trainer.train()
        found.append(trainer.state.log_history[0]["grad_norm"])
    assert found[1] == pytest.approx(found[0], rel=1e-5)


def test_positions_of_an_encoder_are_counted_from_the_pad_token_it_was_made_with(checkpoint):
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    folder = checkpoint("roberta", head="classifier")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    ids = [[5, 9, 11, 7]]
    with torch.no_grad():
        wanted = model(torch.tensor(ids)).logits.numpy()
    model.config.pad_token_id = 9
    with as_checkpoint(model, "score", dropout=False) as found:
        scores = found.load(0)(ids, [[1, 1, 1, 1]]).logits
    np.testing.assert_allclose(scores, wanted, atol=1e-5)


IDS = ("eos_token_id", "bos_token_id", "pad_token_id")
OTHER_WORDS = {
    "another end": lambda words, config: setattr(words, "eos_token", "Ġbread"),
    "another beginning": lambda words, config: setattr(words, "bos_token", "Ġsoup"),
    "several ends": lambda words, config: setattr(config, "eos_token_id", [300, 301]),
}


@pytest.mark.parametrize("kind", ["SFT", "Reward"])
@pytest.mark.parametrize("change", OTHER_WORDS)
def test_training_writes_the_tokenizers_special_tokens_into_the_configs(kind, change, checkpoint, tmp_path, caplog):
    trl, transformers = pytest.importorskip("trl"), pytest.importorskip("transformers")
    folder, found = checkpoint(**FACTS if kind == "Reward" else SMALL), []
    auto = transformers.AutoModelForSequenceClassification if kind == "Reward" else transformers.AutoModelForCausalLM
    for package in (trl, trl_jax):
        model, out = auto.from_pretrained(folder, dtype="float32"), tmp_path / package.__name__
        words = transformers.AutoTokenizer.from_pretrained(folder)
        OTHER_WORDS[change](words, model.config)
        args = getattr(package, f"{kind}Config")(str(out), **BASE | {"max_steps": 1})
        rows = Dataset.from_list(rows_of(kind, 4))
        trainer = getattr(package, f"{kind}Trainer")(model, args=args, train_dataset=rows, processing_class=words)
        trainer.train()
        trainer.save_model()
        files = [json.loads(path.read_text()) for path in sorted(out.glob("*config.json")) if "tok" not in path.name]
        found.append([[file.get(name) for name in IDS] for file in files])
        found[-1].append([vars(model.config).get(name) for name in IDS])
    assert found[0] == found[1] and len(found[0]) == (2 if kind == "Reward" else 3)
    assert "The tokenizer has new PAD/BOS/EOS tokens" in caplog.text
