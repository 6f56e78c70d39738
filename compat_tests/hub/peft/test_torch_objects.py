"""Torch models with new or existing adapters: results match TRL's, and the objects get the trained weights."""

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
from compat_tests.trainer.trainers import FACTS

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
trl = pytest.importorskip("trl")
transformers = pytest.importorskip("transformers")

STEPS = {"max_steps": 2, "learning_rate": 3e-3, "max_length": 64}
IDS = torch.tensor([[5, 9, 11, 7, 30, 31]])


def base_of(folder, kind="SFT"):
    if kind == "Reward":
        return transformers.AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype="float32")
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32")


def made(package, kind, model, out, **arguments):
    args = getattr(package, f"{kind}Config")(str(out), **BASE | STEPS)
    rows = Dataset.from_list(rows_of(kind, 16))
    return getattr(package, f"{kind}Trainer")(model, args=args, train_dataset=rows, **arguments)


def trained(package, kind, model, out, **arguments):
    trainer = made(package, kind, model, out, **arguments)
    trainer.train()
    trainer.save_model(str(out / "saved"))
    return trainer


def losses(trainer):
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


def logits(model):
    with torch.no_grad():
        return model.eval()(IDS).logits.numpy()


def begun_by_peft(folder, how):
    torch.manual_seed(0)
    lora = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=how)
    return peft.get_peft_model(base_of(folder), lora)


@usual("pissa")
@pytest.mark.parametrize("begun", ["pissa", "olora", "gaussian"])
def test_an_adapter_that_changed_its_base_trains_as_in_trl(begun, checkpoint, tmp_path):
    """The base of such an object is PEFT's modified one; the saved adapter is for the base model it names."""
    folder, found = checkpoint(**SMALL), []
    for package in (trl, trl_jax):
        model, out = begun_by_peft(folder, begun), tmp_path / package.__name__
        found.append((losses(trained(package, "SFT", model, out)), logits(model)))
        config = json.loads((out / "saved" / "adapter_config.json").read_text())
        assert config["init_lora_weights"] == begun
    np.testing.assert_allclose(found[1][0], found[0][0], atol=2e-5)
    np.testing.assert_allclose(found[1][1], found[0][1], atol=2e-3)
    loaded = peft.PeftModel.from_pretrained(base_of(folder), tmp_path / "trl_jax" / "saved")
    np.testing.assert_allclose(logits(loaded), found[1][1], atol=1e-4)


@pytest.mark.parametrize("begun", ["pissa", "olora"])
@pytest.mark.parametrize("kind", ["DPO", "KTO"])
def test_beside_a_reference_the_base_is_changed_once(kind, begun, checkpoint, tmp_path):
    """In TRL, PEFT creates a second adapter for the reference, which modifies the shared base again."""
    model = begun_by_peft(checkpoint(**SMALL), begun)
    trainer = made(trl_jax, kind, model, tmp_path)
    np.testing.assert_allclose(np.asarray(trainer.model(IDS.numpy()).logits), logits(model), atol=1e-4)


NEW = {
    "linear": {"target_modules": "all-linear"},
    "dora": {"target_modules": ["q_proj"], "use_dora": True},
    "pissa": {"target_modules": ["q_proj", "down_proj"], "init_lora_weights": "pissa"},
}


@usual("SFT-linear", "Reward-linear")
@pytest.mark.parametrize(("kind", "how"), [("SFT", "linear"), ("DPO", "dora"), ("KTO", "pissa"), ("Reward", "linear")])
def test_a_model_gets_the_adapter_that_was_trained_on_it(kind, how, checkpoint, tmp_path):
    """TRL wraps the model in place, so a script that generates with the object it passed uses the adapter, too."""
    folder = checkpoint(**FACTS) if kind == "Reward" else checkpoint(**SMALL)
    task, extra = ("SEQ_CLS", {"modules_to_save": ["score"]}) if kind == "Reward" else ("CAUSAL_LM", {})
    lora, model = trl_jax.LoraConfig(r=4, task_type=task, **NEW[how] | extra), base_of(folder, kind)
    before = logits(model)
    trainer = trained(trl_jax, kind, model, tmp_path, peft_config=lora)
    after = logits(model)
    loaded = peft.PeftModel.from_pretrained(base_of(folder, kind), tmp_path / "saved")
    assert np.abs(after - before).max() > 1e-2
    np.testing.assert_allclose(after, logits(loaded), atol=1e-4)
    with pytest.raises(ValueError, match="whose layers already contain a PEFT adapter"):
        made(trl_jax, kind, model, tmp_path)
    trainer.train()  # a second time: the layers already have the adapter
    assert np.abs(logits(model) - after).max() > 1e-3
    ours = np.asarray(trainer.model(IDS.numpy()).logits)
    np.testing.assert_allclose(logits(model), ours, atol=1e-4)


def test_without_peft_a_line_says_where_the_adapter_is(checkpoint, tmp_path, monkeypatch, caplog):
    import importlib.util

    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "peft" else found(name))
    lora, model = trl_jax.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"), base_of(checkpoint(**SMALL))
    before = logits(model)
    trained(trl_jax, "SFT", model, tmp_path, peft_config=lora)
    assert [text for text in caplog.messages if "was not changed. The adapter is in trainer.model" in text]
    np.testing.assert_array_equal(logits(model), before)


def test_a_second_adapter_is_refused_by_name(checkpoint, tmp_path):
    model = peft.get_peft_model(base_of(checkpoint(**SMALL)), peft.LoraConfig(r=2, task_type="CAUSAL_LM"))
    model.add_adapter("other", peft.LoraConfig(r=2, task_type="CAUSAL_LM"))
    with pytest.raises(ValueError, match="2 adapters: default, other.*remove the others with model.delete_adapter"):
        made(trl_jax, "SFT", model, tmp_path)
    model.delete_adapter("other")
    made(trl_jax, "SFT", model, tmp_path)
