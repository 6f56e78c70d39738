"""What user scripts do with a trainer after constructing it: honored as in TRL, or refused by name."""

from __future__ import annotations

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from transformers import TrainerCallback

import trl_jax
from compat_tests.effort import only_thorough, thorough, usual
from compat_tests.parity.reference import read_weights
from compat_tests.trainer.trainers import FACTS, make, table
from trl_jax.trainer.collators import RewardDataCollator
from trl_jax.training.user_loss import script_values


@pytest.fixture(scope="session")
def folder(checkpoint):
    return checkpoint(**FACTS)


def losses(trainer):
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


def annealed(package, minimum):
    class Annealed(package.RewardTrainer):
        share = 1.0

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            loss, outputs = super().compute_loss(model, inputs, return_outputs=True)
            loss = loss * minimum(self.state.global_step + self.state.epoch, 2.5) * self.share
            return (loss, outputs) if return_outputs else loss

    return Annealed


class Doubling(TrainerCallback):
    def __init__(self):
        self.trainer = None

    def on_step_end(self, args, state, control, **kwargs):
        self.trainer.share = 2.0 * (state.global_step == 2) + 1.0


def test_a_loss_that_asks_how_far_the_run_is_is_trls(folder, tmp_path):
    trl = pytest.importorskip("trl")
    found = []
    for package, minimum in ((trl, min), (trl_jax, jnp.minimum)):
        kind, callback = annealed(package, minimum), Doubling()
        args = make(package, folder, tmp_path / package.__name__, config={"max_steps": 4}).args
        callback.trainer = kind(str(folder), args=args, train_dataset=table(16), callbacks=[callback])
        callback.trainer.train()
        found.append(losses(callback.trainer))
    assert found[1] == pytest.approx(found[0], abs=1e-5) and found[0][0] == 0


VALUES = ["float(loss)", "loss.item()", "1 if loss > 0 else 2", "self.state.global_step > 1 and 1"]


@pytest.mark.parametrize("line", VALUES)
def test_a_value_that_a_compiled_loss_has_not_is_explained(folder, tmp_path, line):
    scope = {}
    source = "def compute_loss(self, model, inputs, **how):\n    loss = model(**inputs).logits.sum()\n    return "
    exec(compile(source + line, str(tmp_path / "script.py"), "exec"), scope)
    kind = type("Mine", (trl_jax.RewardTrainer,), {"compute_loss": scope["compute_loss"]})
    trainer = kind(str(folder), make(trl_jax, folder, tmp_path).args, train_dataset=table(16))
    with pytest.raises(TypeError, match=r"compute_loss is traced and compiled, so.*jnp\.where.*self\.state"):
        trainer.train()


def test_a_whole_batch_may_be_passed_on(folder, tmp_path):
    class Mine(trl_jax.RewardTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            outputs = model(**inputs)
            chosen, rejected = jnp.split(outputs.logits[:, 0], 2)
            loss = -jax.nn.log_sigmoid(chosen - rejected).mean()
            return (loss, outputs) if return_outputs else loss

    plain = make(trl_jax, folder, tmp_path)
    own = Mine(str(folder), plain.args, train_dataset=table(16))
    for trainer in (plain, own):
        trainer.train()
    assert losses(own) == pytest.approx(losses(plain), abs=1e-5)


HOOKS = {
    "_clip_grad_norm": r"compute_loss\(self", "evaluation_loop": "predict", "_save": "save_model",
    "create_scheduler": "create_optimizer", "_get_eval_sampler": "train_sampling_strategy",
}  # fmt: skip


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_that_nobody_calls_is_refused_from_a_mixin_too(hook):
    own = {hook: lambda self: None}
    for bases, body in (((trl_jax.RewardTrainer,), own), ((type("Mixin", (), own), trl_jax.RewardTrainer), {})):
        with pytest.raises(TypeError, match=f"Mine overrides {hook}, which trl_jax never calls.*{HOOKS[hook]}"):
            type("Mine", bases, body)


def head_alone(model):
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "score" in name


def head_by_parts(model):
    model.requires_grad_(False)
    model.score.weight.requires_grad_(True)


def first_layer_still(model):
    model.model.layers[0].requires_grad_(False)
    model.model.embed_tokens.weight.requires_grad = False
    model.model.layers[1].self_attn.q_proj.requires_grad_(False)


def test_parameters_cast_to_float32(checkpoint):
    """Scripts do this with adapters before training in 16 bits: values do not change, and assigning others is
    refused."""
    torch = pytest.importorskip("torch")
    model = trl_jax.AutoModelForSequenceClassification.from_pretrained(checkpoint())
    before = {name: parameter.numpy() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.is_floating_point():
            parameter.data = parameter.data.to(torch.float32)
            parameter.data = parameter.data.float()
        with pytest.raises(ValueError, match="Cannot set other values for .*: these are a copy. Change model.params"):
            parameter.data = parameter.data + 1
        with pytest.raises(ValueError, match="was cast to bfloat16, which rounds it.* Leave the cast out"):
            parameter.data = parameter.data.to(torch.bfloat16)
    assert all((parameter.numpy() == before[name]).all() for name, parameter in model.named_parameters())


@usual("theirs-first_layer_still")
@pytest.mark.parametrize("freeze", [head_alone, head_by_parts, first_layer_still])
@pytest.mark.parametrize("loss", ["theirs", "a script's"])
def test_what_is_frozen_stays_and_the_rest_trains_as_in_trl(checkpoint, tmp_path, freeze, loss):
    trl = pytest.importorskip("trl")
    folder, logs, weights = checkpoint(**FACTS | {"num_hidden_layers": 2}), [], []
    for package in (trl, trl_jax):
        args = make(package, folder, tmp_path / package.__name__, config={"weight_decay": 0.3}).args
        minimum = min if package is trl else jnp.minimum
        kind = package.RewardTrainer if loss == "theirs" else annealed(package, minimum)
        trainer = kind(str(folder), args=args, train_dataset=table(16))
        freeze(trainer.model)
        trainer.train()
        trainer.save_model(str(tmp_path / package.__name__ / "saved"))
        logs.append([(log["loss"], log["grad_norm"]) for log in trainer.state.log_history if "loss" in log])
        weights.append(read_weights(tmp_path / package.__name__ / "saved"))
        logs[-1].append((trainer.get_num_trainable_parameters(), 0))
    np.testing.assert_allclose(logs[1], logs[0], rtol=0, atol=2e-4)
    for name, wanted in weights[0].items():
        np.testing.assert_allclose(weights[1][name], wanted, rtol=0, atol=2e-4, err_msg=name)
    before = read_weights(folder)
    still = {name for name in before if (weights[1][name] == before[name]).all()}
    assert still == {name for name in before if (weights[0][name] == before[name]).all()} and len(still) > 5


def test_what_is_frozen_in_a_torch_model_stays(folder, tmp_path):
    torch = pytest.importorskip("torch")
    from transformers import LlamaForSequenceClassification

    model = LlamaForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float32)
    model.model.requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    trainer = make(trl_jax, model, tmp_path)
    assert trainer.get_num_trainable_parameters() == before["score.weight"].numel()
    trainer.train()
    assert [name for name, tensor in model.state_dict().items() if (tensor != before[name]).any()] == ["score.weight"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_torchs_functions_take_parameters(folder, dtype):
    torch = pytest.importorskip("torch")
    model = trl_jax.AutoModelForSequenceClassification.from_pretrained(folder)
    parameter = model.get_parameter("score.weight")
    held = parameter.detach().to(getattr(torch, dtype))
    tensor = torch.from_numpy(parameter.numpy().copy()).to(getattr(torch, dtype))
    assert torch.equal(held, tensor) and torch.equal(tensor, held.clone())
    assert not torch.equal(held, torch.zeros_like(input=held))
    assert torch.equal(torch.cat([held, tensor]), torch.cat([tensor, tensor]))


def test_writing_into_a_parameter_is_refused(folder):
    torch = pytest.importorskip("torch")
    model = trl_jax.AutoModelForSequenceClassification.from_pretrained(folder)
    parameter, refused = model.get_parameter("score.weight"), "Cannot write into score.weight: these are a copy"
    with pytest.raises(ValueError, match=refused):
        parameter.data[0] = 0
    with pytest.raises(ValueError, match=refused):
        parameter *= 2
    with pytest.raises(ValueError, match=refused):
        torch.nn.init.normal_(parameter)
    with pytest.raises(ValueError, match=refused):
        torch.mul(parameter, 2, out=parameter)
    with pytest.raises(ValueError, match="Cannot write into model.embed_tokens.weight"):
        model.get_input_embeddings().weight[-1] = 0
    own = parameter.detach().clone()
    own[0], own[1:] = 1, 0
    own *= 3
    assert own.sum() == 3 * own.shape[1] and (np.maximum(own, 1) >= 1).all()


def test_a_run_is_as_long_as_the_scripts_own_dataloader(folder, tmp_path):
    trl = pytest.importorskip("trl")
    found = []
    for package in (trl, trl_jax):

        class Fewer(package.RewardTrainer):
            def get_train_dataloader(self):
                self.train_dataset = self.train_dataset.select(range(6))
                return super().get_train_dataloader()

        args = make(package, folder, tmp_path / package.__name__, config={"num_train_epochs": 2}).args
        trainer = Fewer(str(folder), args=args, train_dataset=table(16))
        trainer.train()
        found.append([(log["learning_rate"], log["epoch"]) for log in trainer.state.log_history if "loss" in log])
    np.testing.assert_allclose(found[1], found[0], rtol=0, atol=1e-9)
    assert len(found[0]) == 4


def test_flags_that_mean_nothing_are_refused(folder, tmp_path):
    model = make(trl_jax, folder, tmp_path).model
    for set_flag in (lambda one: setattr(one, "requires_grad", False), lambda one: one.requires_grad_(False)):
        with pytest.raises(ValueError, match="not on a copy"):
            set_flag(model.get_parameter("score.weight").data)
    with pytest.raises(AttributeError, match="has no attribute 'decoder'"):
        model.decoder.requires_grad_(False)
    assert model.score and not hasattr(model.score, "_other")
    adapted = make(trl_jax, folder, tmp_path / "b", peft_config=trl_jax.LoraConfig(r=2)).model
    for name, parameter in adapted.named_parameters():
        parameter.requires_grad = ".lora_" in name or name.startswith("base_model.model.score.")
    for wanted in (True, False):
        with pytest.raises(
            ValueError, match=rf"requires_grad cannot be set to {wanted} on a model with an adapter. Use target_modules"
        ):
            adapted.requires_grad_(wanted)


def test_a_torch_model_whose_code_would_be_passed_over_is_refused(folder, tmp_path):
    torch = pytest.importorskip("torch")
    from transformers import LlamaForSequenceClassification

    class Mine(LlamaForSequenceClassification):
        pass

    model = Mine.from_pretrained(folder, num_labels=1, dtype=torch.float32)
    with pytest.raises(TypeError, match=r"Mine, whose own code would not run.*compute_loss"):
        make(trl_jax, model, tmp_path)


def test_a_collator_of_ones_own_is_refused(folder, tmp_path):
    class Swapped(RewardDataCollator):
        pass

    with pytest.raises(ValueError, match="data_collator=.*Swapped.*Leave it out"):
        make(trl_jax, folder, tmp_path, data_collator=Swapped(0))


def test_arguments_changed_before_training_count(folder, tmp_path):
    trl = pytest.importorskip("trl")
    found = []
    for package in (trl, trl_jax):
        trainer = make(package, folder, tmp_path / package.__name__)
        trainer.args.learning_rate, trainer.args.weight_decay = 2e-3, 0.5
        trainer.train()
        found.append([(log["loss"], log["learning_rate"]) for log in trainer.state.log_history if "loss" in log])
    np.testing.assert_allclose(found[1], found[0], rtol=0, atol=1e-5)
    assert found[0][0][1] == 2e-3


class Rates(TrainerCallback):
    def __init__(self):
        self.seen = []

    def on_step_begin(self, args, state, control, lr_scheduler=None, **kwargs):
        self.seen.append(lr_scheduler.get_last_lr()[0])

    on_step_end = on_step_begin


def test_the_schedule_moves_on_before_a_step_ends(folder, tmp_path):
    trl = pytest.importorskip("trl")
    found = []
    for package in (trl, trl_jax):
        trainer = make(package, folder, tmp_path / package.__name__, callbacks=[watch := Rates()])
        trainer.train()
        found.append([*watch.seen, trainer.lr_scheduler.get_last_lr()[0]])
    assert found[1] == pytest.approx(found[0], abs=1e-9) and found[0][-1] == 0


def test_saving_takes_transformers_arguments(folder, tmp_path):
    trainer = make(trl_jax, folder, tmp_path, config={"model_init_kwargs": {"use_cache": False}})
    trainer.model.save_pretrained(tmp_path / "saved", safe_serialization=True, push_to_hub=False)
    assert read_weights(tmp_path / "saved").keys() == read_weights(folder).keys() | {"score.weight"}
    with pytest.raises(TypeError, match=r"save_pretrained: push_to_hub=True is not supported.*call push_to_hub\(\)"):
        trainer.model.save_pretrained(tmp_path / "saved", push_to_hub=True)
    assert not trainer.is_fsdp_enabled and str(trainer.model.device) == "cpu"


@pytest.mark.parametrize("layout", [thorough("padded"), thorough("packed"), "shared"])
def test_two_texts_that_are_the_same_score_the_same(folder, tmp_path, layout):
    rows = table(12).map(lambda row: {"rejected": row["chosen"]})
    trainer = make(trl_jax, folder, tmp_path, train=rows, config={"batch_layout": layout})
    metrics = trainer.evaluate(rows)
    assert metrics["eval_accuracy"] == 0 and metrics["eval_margin"] == 0
    trainer.train()
    norms = [log["grad_norm"] for log in trainer.state.log_history if "loss" in log]
    assert max(norms) < 1e-6


def ids(*lengths):
    from datasets import Dataset

    sides = {"chosen_ids": 7, "rejected_ids": 8}
    return Dataset.from_dict({side: [[id + i % 5 for i in range(n)] for n in lengths] for side, id in sides.items()})


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_predictions_are_of_every_pair_however_long(tmp_path, family):
    """A sliding window that max_length makes irrelevant matters again for a longer text."""
    from compat_tests.tiny import tiny_model

    trl = pytest.importorskip("trl")
    facts = {"sliding_window": 16} if family == "mistral" else {}
    folder, rows, scores = tiny_model(tmp_path / "model", family, **facts), ids(9, 40, 12, 33, 5), []
    for package in (trl, trl_jax):
        config = {"max_length": 16, "per_device_eval_batch_size": 2}
        trainer = make(package, folder, tmp_path / package.__name__, train=ids(9, 12, 5, 8), config=config)
        scores.append(trainer.predict(rows if package is trl_jax else rows.select(range(4))).predictions)
    assert scores[1].shape == (10, 1)
    np.testing.assert_allclose(scores[1][:8], scores[0], rtol=0, atol=2e-5)


def test_predictions_may_be_made_into_several(folder, tmp_path):
    def two(logits, labels):
        return logits, 2 * logits

    trainer = make(trl_jax, folder, tmp_path, preprocess_logits_for_metrics=two)
    first, second = trainer.predict(table(10)).predictions
    assert first.shape == (20, 1)
    np.testing.assert_array_equal(second, 2 * first)


def test_lengths_are_planned_for_the_order_of_grouped_rows(folder, tmp_path, caplog):
    """Its steps have the longest rows together, which no other order does."""
    dice = np.random.default_rng(0)
    rows = ids(*dice.lognormal(3.5, 0.8, 160).astype(int).clip(3, 300))
    config = {"train_sampling_strategy": "group_by_length", "num_train_epochs": 2}
    with caplog.at_level(logging.INFO, "trl_jax"):
        trainer = make(trl_jax, folder, tmp_path, train=rows, config=config)
        steps = trainer.get_train_dataloader().steps
    met = set()
    for epoch in range(2):
        steps.set_epoch(epoch)
        met |= {step.arrays.tokens.shape[-1] for step in steps}
    assert met <= set(steps.step_layout.buckets.lengths)


def test_values_of_the_trainers_own_are_told_from_a_scripts(folder, tmp_path):
    """Some of the trainer's own attributes change from step to step, and each change would recompile a user-defined
    loss."""
    trainer = make(trl_jax, folder, tmp_path, config={"eval_strategy": "steps", "eval_steps": 2}, eval_dataset=table(4))
    trainer.train()
    assert script_values(trainer) == ()
    trainer.share, trainer.name = 0.5, "a"
    assert script_values(trainer) == (("name", "a"), ("share", 0.5))


@only_thorough
def test_where_tokens_after_a_resume_and_a_prefix_differ_from_trl(folder, tmp_path):
    """Two rows of README's table, checked on both sides."""
    trl = pytest.importorskip("trl")
    tokens, names = {}, {}
    for package in (trl, trl_jax):
        out, config = tmp_path / package.__name__, {"save_strategy": "steps", "save_steps": 2}
        make(package, folder, out, config=config | {"max_steps": 2}).train()
        resumed = make(package, folder, out, config=config | {"max_steps": 4}, eval_dataset=table(8))
        resumed.train(resume_from_checkpoint=True)
        tokens[package] = [log["num_tokens"] for log in resumed.state.log_history if "loss" in log]
        names[package] = {name for name in resumed.evaluate(metric_key_prefix="test") if "accuracy" in name}
    assert tokens[trl][:2] == tokens[trl_jax][:2]
    assert tokens[trl_jax][2:] == [tokens[trl][1] + more for more in tokens[trl][2:]]
    assert names == {trl: {"eval_accuracy"}, trl_jax: {"test_accuracy"}}


def test_a_scripts_own_dataloader_of_a_stream(folder, tmp_path):
    class Own(trl_jax.RewardTrainer):
        def get_train_dataloader(self):
            return super().get_train_dataloader()

    args = make(trl_jax, folder, tmp_path, config={"max_steps": 2}).args
    trainer = Own(str(folder), args, train_dataset=table(16).to_iterable_dataset())
    assert trainer.train().global_step == 2
