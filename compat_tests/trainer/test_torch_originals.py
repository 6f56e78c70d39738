"""Torch models that a script changes, or uses, after the trainer has copied their weights, as in TRL it may."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest
from datasets import Dataset
from safetensors.torch import load_file
from transformers import TrainerCallback

import trl_jax
from compat_tests.effort import usual
from compat_tests.parity.reference import BASE, read_weights
from compat_tests.tiny import preference_rows, text_rows
from compat_tests.trainer.trainers import FACTS, make, table

torch = pytest.importorskip("torch")
trl = pytest.importorskip("trl")


@pytest.fixture(scope="module")
def folder(checkpoint):
    return checkpoint(**FACTS)


@pytest.fixture(scope="module")
def causal(checkpoint):
    return checkpoint(**FACTS | {"head": "causal"})


def classifier(folder):
    from transformers import AutoModelForSequenceClassification

    return AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)


def causal_model(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder)


def words(folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def logged(trainer):
    return [(log["loss"], log["grad_norm"]) for log in trainer.state.log_history if "loss" in log]


@torch.no_grad()
def scaled(model):
    model.model.layers[0].mlp.up_proj.weight.mul_(0.5)


def loaded(model):
    model.load_state_dict({name: 0.9 * tensor for name, tensor in model.state_dict().items()})


def through_data(model):
    model.model.layers[0].mlp.up_proj.weight.data *= 0.5


def frozen(model):
    model.model.layers.requires_grad_(False)


@usual("through_data", "frozen")
@pytest.mark.parametrize("change", [scaled, loaded, through_data, frozen])
def test_what_changes_before_train_counts_as_in_trl(folder, tmp_path, change):
    found = []
    for package in (trl, trl_jax):
        model = classifier(folder)
        trainer = make(package, model, tmp_path / package.__name__, processing_class=words(folder))
        change(model)
        trainer.train()
        with torch.no_grad():
            model.score.weight.zero_()  # afterwards, too
        found.append([*logged(trainer), (trainer.evaluate(table(4))["eval_mean_reward"], 0)])
        trainer.save_model(str(tmp_path / package.__name__ / "saved"))
        found[-1].append((np.abs(read_weights(tmp_path / package.__name__ / "saved")["score.weight"]).max(), 0))
    np.testing.assert_allclose(found[1], found[0], rtol=0, atol=3e-4)
    assert found[1][-1] == (0, 0)


@pytest.mark.parametrize("cast", ["bfloat16", "half"])
def test_a_cast_decides_the_dtype_that_is_saved(folder, tmp_path, cast):
    found = []
    for package in (trl, trl_jax):
        model, out = classifier(folder), tmp_path / package.__name__
        trainer = make(package, model, out, processing_class=words(folder))
        if cast == "half":
            trainer.model.half()
        else:
            model.to(torch.bfloat16)
        trainer.save_model(str(out))
        trainer.model.to(torch.float32).save_pretrained(out / "again")
        for saved in (out, out / "again"):
            found.append({str(tensor.dtype) for tensor in load_file(saved / "model.safetensors").values()})
            found.append(json.loads((saved / "config.json").read_text())["dtype"])
    assert found[4:] == found[:4] and found[0] != found[2]


class Watching(TrainerCallback):
    """Uses the script's own torch model between steps, not the one that callbacks get."""

    def __init__(self, model, out):
        self.model, self.out, self.scores = model, out, []

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 2:
            copy.deepcopy(self.model).save_pretrained(self.out)
        with torch.no_grad():
            self.scores.append(self.model(torch.tensor([[5, 6, 7]])).logits.item())


def test_callbacks_that_use_the_torch_model_see_the_weights_of_their_step(folder, tmp_path):
    seen, saved = [], []
    for package in (trl, trl_jax):
        model, out = classifier(folder), tmp_path / package.__name__
        watching = Watching(model, out / "second")
        make(package, model, out, processing_class=words(folder), callbacks=[watching]).train()
        seen.append([*watching.scores, model(torch.tensor([[5, 6, 7]])).logits.item()])
        saved.append(read_weights(out / "second")["score.weight"])
        assert not model._forward_pre_hooks and not model._state_dict_pre_hooks
    np.testing.assert_allclose(seen[1], seen[0], rtol=0, atol=5e-4)
    np.testing.assert_allclose(saved[1], saved[0], rtol=0, atol=2e-4)
    assert len(set(seen[1])) == 4


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_a_script_that_catches_an_error_of_the_run_has_the_trained_weights_in_its_model(folder, tmp_path, error):
    class Failing(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2:
                raise error

    found = []
    for package in (trl, trl_jax):
        model = classifier(folder)
        trainer = make(package, model, tmp_path / "run", processing_class=words(folder), callbacks=[Failing()])
        with pytest.raises(error):
            trainer.train()
        found.append(model.score.weight.detach().numpy())
    assert np.abs(found[0] - classifier(folder).score.weight.detach().numpy()).max() > 5e-4
    np.testing.assert_allclose(found[1], found[0], rtol=0, atol=1e-4)


def test_a_torch_model_cannot_become_the_trainers(folder, tmp_path):
    trainer = make(trl_jax, folder, tmp_path)
    with pytest.raises(
        TypeError, match="trainer.model must be a model of trl_jax, got a LlamaForSequenceClassification"
    ):
        trainer.model = classifier(folder)


def test_a_change_during_training_is_named(folder, tmp_path, caplog):
    class Meddling(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            scaled(model)

    model = classifier(folder)
    config = {"max_steps": 1}
    make(trl_jax, model, tmp_path, config=config, processing_class=words(folder), callbacks=[Meddling()]).train()
    assert "changed during training: model.layers.0.mlp.up_proj.weight. This has no effect" in caplog.text


def test_two_trainers_on_one_model_train_and_save_it_together(folder, tmp_path):
    found = []
    for package in (trl, trl_jax):
        model, out = classifier(folder), tmp_path / package.__name__
        first = make(package, model, out / "first", processing_class=words(folder))
        second = make(package, model, out / "second", processing_class=words(folder), train=table(8, seed=1))
        first.train()
        second.train()
        first.save_model(str(out / "saved"))
        found.append((logged(second), read_weights(out / "saved")))
    np.testing.assert_allclose(found[1][0], found[0][0], rtol=0, atol=3e-4)
    for name, wanted in found[0][1].items():
        np.testing.assert_allclose(found[1][1][name], wanted, rtol=0, atol=3e-4, err_msg=name)


def test_a_reference_that_was_changed_is_refused(causal, tmp_path):
    reference = causal_model(causal)
    args = trl_jax.DPOConfig(str(tmp_path), **BASE)
    rows = Dataset.from_list(preference_rows(8, "prompt"))
    trainer = trl_jax.DPOTrainer(str(causal), reference, args, train_dataset=rows)
    scaled(reference)
    with pytest.raises(ValueError, match=r"ref_model: its model.layers.0.mlp.up_proj.weight was changed after"):
        trainer.train()


def sft(model, folder, out, **arguments):
    args = trl_jax.SFTConfig(str(out), **BASE, max_steps=1)
    rows = Dataset.from_list(text_rows(8))
    return trl_jax.SFTTrainer(model, args, train_dataset=rows, processing_class=words(folder), **arguments)


def test_models_that_cannot_be_taken_over_are_refused_in_train_alone(causal, tmp_path, caplog):
    peft = pytest.importorskip("peft")

    model = causal_model(causal)
    trainer = sft(model, causal, tmp_path, peft_config=peft.LoraConfig(task_type="CAUSAL_LM"))
    assert trainer.model.generation_config is model.generation_config  # what is set there later is saved
    scaled(model)
    with pytest.raises(ValueError, match=r"changed after the trainer was made: model.layers.0.mlp.up_proj.weight"):
        trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    assert "because the trainer's own copy has an adapter" in caplog.text


def test_flags_that_contradict_an_adapters_config(causal, tmp_path, caplog):
    peft = pytest.importorskip("peft")

    def adapted():
        return peft.get_peft_model(causal_model(causal), peft.LoraConfig(task_type="CAUSAL_LM"))

    adapted().save_pretrained(tmp_path / "adapter")
    model = adapted()
    model.get_input_embeddings().weight.requires_grad_(True)
    with pytest.raises(ValueError, match=r"embed_tokens.weight has requires_grad=True, which was set by hand"):
        sft(model, causal, tmp_path)
    model = adapted()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_B" in name)
    with pytest.raises(ValueError, match=r"lora_A.default.weight has requires_grad=False, which was set by hand"):
        sft(model, causal, tmp_path)
    sft(peft.PeftModel.from_pretrained(causal_model(causal), tmp_path / "adapter"), causal, tmp_path)
    assert "loaded without is_trainable=True, so TRL would train nothing" in caplog.text


def edited(model):
    model.peft_config["default"].lora_alpha = 40


def dropping(model):
    for name, layer in model.named_modules():
        if name.endswith("q_proj"):
            layer.lora_dropout["default"] = torch.nn.Dropout(0.5)


@pytest.mark.parametrize(
    "change, found",
    [
        (lambda model: model.merge_adapter(), "q_proj is merged"),
        (lambda model: model.base_model.disable_adapter_layers(), "q_proj is disabled"),
        (edited, r"q_proj is scaled by 1.0, but by 5.0 according to its config"),
        (dropping, r"q_proj has a dropout of 0.5, but 0.0 according to its config"),
    ],
)
def test_adapters_that_compute_something_else_than_their_config_are_refused(causal, tmp_path, change, found):
    peft = pytest.importorskip("peft")

    model = peft.get_peft_model(causal_model(causal), peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]))
    change(model)
    with pytest.raises(ValueError, match=f"modified after it was created: the adapter of .*{found}"):
        sft(model, causal, tmp_path)


def test_a_merged_model_trains_further_and_says_so(causal, tmp_path, caplog):
    adapted = sft(str(causal), causal, tmp_path, peft_config=trl_jax.LoraConfig(r=2))
    sft(adapted.model.merge_and_unload(), causal, tmp_path)
    assert "model comes from merge_and_unload, after which PEFT leaves all parameters frozen" in caplog.text


def test_a_layer_frozen_before_an_evaluation_stays_frozen(folder, tmp_path):
    model = classifier(folder)
    trainer = make(trl_jax, model, tmp_path, processing_class=words(folder), config={"max_steps": 1})
    before = model.model.layers[0].mlp.up_proj.weight.detach().clone()
    frozen(model)
    trainer.evaluate(table(4))
    trainer.train()
    assert torch.equal(model.model.layers[0].mlp.up_proj.weight, before)


def test_a_changed_reference_only_warns_in_an_evaluation(causal, tmp_path, caplog):
    reference, rows = causal_model(causal), Dataset.from_list(preference_rows(8, "prompt"))
    args = trl_jax.DPOConfig(str(tmp_path), **BASE | {"max_steps": 1})
    made = trl_jax.DPOTrainer(str(causal), reference, args, train_dataset=rows, eval_dataset=rows)
    reference.half()
    made.evaluate()
    assert "was changed" not in caplog.text
    scaled(reference.float())
    made.evaluate()
    assert "ref_model: its " in caplog.text and "was changed after the trainer was made" in caplog.text
    with pytest.raises(ValueError, match="ref_model: its .* was changed after the trainer was made"):
        made.train()


def test_the_model_of_a_trainer_has_the_tokenizer_of_its_torch_model(folder, tmp_path):
    first = make(trl_jax, classifier(folder), tmp_path / "first")
    second = make(trl_jax, first.model, tmp_path / "second")
    assert second.processing_class("Tell me")["input_ids"] == first.processing_class("Tell me")["input_ids"]


def test_hooks_that_are_set_after_the_trainer_is_made_are_refused(folder, tmp_path, caplog):
    model = classifier(folder)
    trainer = make(trl_jax, model, tmp_path, processing_class=words(folder))
    hook = model.score.weight.register_hook(lambda gradient: 0 * gradient)
    with pytest.raises(ValueError, match=r"the gradient of score\.weight has a hook"):
        trainer.train()
    hook.remove()
    model.score.register_forward_hook(lambda module, given, outputs: 0 * outputs)
    trainer.evaluate(table(2))
    assert "score has a hook set by the script" in caplog.text
