"""Attributes and arguments that a user changes on an existing trainer: they take effect as in TRL, or are refused."""

from __future__ import annotations

import ast
import copy
import inspect
import textwrap
from types import SimpleNamespace

import pytest
from datasets import Dataset
from transformers import TrainerCallback

import trl_jax
from compat_tests import shared_programs
from compat_tests.effort import usual, usually
from compat_tests.mesh.rank import rows_of
from compat_tests.parity.dpo_cases import SMALL
from compat_tests.parity.reference import BASE
from compat_tests.parity.test_dpo_curve import assert_same
from compat_tests.trainer.trainers import FACTS
from trl_jax.trainer.arguments import InitOnlyAttribute, MirroredArg
from trl_jax.training.optimizer_choice import LearningRate, OptimizerChoice, ShownOptimizer
from trl_jax.training.optimizers import Hyperparameters, Optimizer

KINDS = ("Reward", "SFT", "DPO", "KTO")


@pytest.fixture(autouse=True)
def nothing_shared():
    with shared_programs.nothing_shared():
        yield


class After(TrainerCallback):
    """Calls `change(trainer)` after this many steps."""

    def __init__(self, step, change):
        self.step, self.change, self.trainer = step, change, None

    def on_step_end(self, args, state, control, **rest):
        if state.global_step == self.step:
            self.change(self.trainer)


@pytest.fixture
def make(checkpoint, tmp_path):
    def made(package, kind, after=None, **config):
        config = {"max_steps": 4, "max_length": 64, "learning_rate": 3e-3} | config
        args = getattr(package, f"{kind}Config")(str(tmp_path / package.__name__), **BASE | config)
        rows, callbacks = Dataset.from_list(rows_of(kind, 8)), [] if after is None else [after]
        trainer = getattr(package, f"{kind}Trainer")(
            str(checkpoint(**FACTS if kind == "Reward" else SMALL)), args=args, train_dataset=rows,
            eval_dataset=rows.select(range(4)), callbacks=callbacks,
        )  # fmt: skip
        if after is not None:
            after.trainer = trainer
        return trainer

    return made


def of_dpo(trainer):
    trainer.loss_types, trainer.loss_weights, trainer.ld_alpha = ["sigmoid", "apo_zero"], [0.7, 0.4], 0.5
    trainer.args.beta, trainer.args.label_smoothing = 9.0, 0.4  # already read, so no longer used


def of_dpo_later(trainer):
    trainer.beta, trainer.args.max_grad_norm, trainer.f_divergence_type = 0.6, 0.05, "reverse_kl"


def of_kto(trainer):
    trainer.args.beta, trainer.desirable_weight = 9.0, 0.4


def of_kto_later(trainer):
    trainer.beta, trainer.undesirable_weight = 0.7, 1.6


def of_sft(trainer):
    trainer.args.label_smoothing_factor, trainer.args.per_device_train_batch_size = 0.2, 2


def of_sft_later(trainer):
    trainer.args.loss_type = "dft"
    for group in trainer.optimizer.param_groups:
        group["lr"] *= 10.0  # for the next step


def of_reward(trainer):
    trainer.args = copy.copy(trainer.args)
    trainer.args.center_rewards_coefficient, trainer.args.learning_rate = 0.1, 1e-3


def of_reward_later(trainer):
    trainer.args.center_rewards_coefficient, trainer.args.max_grad_norm = 0.4, 0.3
    for name, parameter in trainer.model.named_parameters():
        parameter.requires_grad_("mlp" not in name)


CHANGES = {
    "Reward": (of_reward, of_reward_later, "the loss and max_grad_norm and what is frozen"),
    "SFT": (of_sft, of_sft_later, "the loss"),
    "DPO": (of_dpo, of_dpo_later, "the loss and max_grad_norm"),
    "KTO": (of_kto, of_kto_later, "the loss"),
}  # fmt: skip


@usual("DPO")
@pytest.mark.parametrize("kind", usually({"SFT", "DPO"}.__contains__, CHANGES))  # KTO shares a base class with DPO
def test_what_is_changed_before_and_while_a_run_trains_counts_as_in_trl(kind, make, caplog):
    """An evaluation is compiled before the change; its program must not be reused afterwards."""
    trl, (before, later, words) = pytest.importorskip("trl"), CHANGES[kind]
    logs = []
    for package in (trl_jax, trl):
        trainer = make(package, kind, After(2, later), eval_strategy="steps", eval_steps=2, eval_on_start=True)
        before(trainer)
        trainer.train()
        logs.append(trainer.state.log_history)
    for mine, other in zip(*logs, strict=True):
        assert_same(mine, other)
    told = [record.message for record in caplog.records if "compiled again" in record.message]
    said = "was changed: the step is compiled again, which happens after every such change."
    assert told == [f"After step 2, {words} {said}"]


def test_a_loss_that_is_set_while_a_run_trains_counts(make, caplog):
    def doubled(trainer):
        loss = trainer.loss
        trainer.loss = lambda *given, **options: (2 * loss(*given, **options)[0], loss(*given, **options)[1])

    plain, changed = (make(trl_jax, "SFT", after, learning_rate=0.0) for after in (None, After(2, doubled)))
    for trainer in (plain, changed):
        trainer.train()
    before, after = ([log["loss"] for log in one.state.log_history if "loss" in log] for one in (plain, changed))
    assert after == pytest.approx([before[0], before[1], 2 * before[2], 2 * before[3]])
    assert "After step 2, trainer.loss was changed: the step is compiled again" in caplog.text


ANYWHERE = {"accelerator", "args", "model", "ref_model", "_metrics", "_total_train_tokens", "_tp_size"}
OF_RUNS = ANYWHERE | {"get_tp_size", "_compute_kl_logps", "current_gradient_accumulation_steps"}
READ_ONCE = {"precompute_ref_logps", "calculate_KL", "compute_loss_func"}  # read once, because they determine the rows


@pytest.mark.parametrize("kind", KINDS)
def test_every_attribute_that_trls_loss_reads_counts_or_is_refused(kind):
    trl, ours = pytest.importorskip("trl"), getattr(trl_jax, f"{kind}Trainer")
    theirs = getattr(trl, f"{kind}Trainer")
    read = set()
    for name in {"compute_loss", "_compute_loss"} & vars(theirs).keys():
        source = ast.parse(textwrap.dedent(inspect.getsource(vars(theirs)[name])))
        read |= {
            node.attr for node in ast.walk(source)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
        }  # fmt: skip
    known = {
        name for name in dir(ours) if isinstance(inspect.getattr_static(ours, name), MirroredArg | InitOnlyAttribute)
    }
    assert len(read) > 3
    assert read - OF_RUNS - READ_ONCE - {"_compute_loss"} <= known | ours._traits.refused.never_read.keys()


REFUSED = {
    "other rows": ("KTO", {"loss_type": "apo_zero_unpaired"}, ValueError, "needs rows with the columns .*KTOConfig"),
    "no such loss": ("DPO", {"loss_types": ["best"]}, ValueError, "Unknown loss type: best"),
    "too few weights": ("DPO", {"loss_weights": [0.2, 0.3]}, ValueError, "must have the same length as `loss_type`"),
    "beta": ("DPO", {"beta": -1}, ValueError, "beta must be a number of at least 1e-09, got -1"),
    "smoother": ("SFT", {"label_smoother": object()}, TypeError, "label_smoother was set.*label_smoothing_factor"),
    "noise": ("Reward", {"neftune_noise_alpha": 5.0}, TypeError, "neftune_noise_alpha was set.*in the arguments"),
    "divisor": (
        "SFT",
        {"model_accepts_loss_kwargs": False},
        TypeError,
        "follows from the model type, as in transformers",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_count_is_refused_before_a_step(name, make):
    kind, values, error, words = REFUSED[name]
    trainer = make(trl_jax, kind)
    for attribute, value in values.items():
        setattr(trainer, attribute, value)
    with pytest.raises(error, match=words):
        trainer.train()
    with pytest.raises(error, match=words):
        trainer.evaluate()


SETTLED = {
    "compute_loss_func": (lambda outputs, labels, num_items_in_batch: 0.0, "Pass it to the constructor"),
    "router_aux_loss_coef": (0.1, "Set router_aux_loss_coef in the arguments"),
    "aux_loss_enabled": (True, "Set router_aux_loss_coef in the arguments"),
}


def test_what_is_settled_at_construction_is_refused_at_once(make):
    trainer = make(trl_jax, "SFT")
    for name, (value, words) in SETTLED.items():
        setattr(trainer, name, getattr(trainer, name))  # no change
        with pytest.raises(AttributeError, match=f"{name} was set on the trainer.*{words}"):
            setattr(trainer, name, value)


def test_another_layout_is_refused_while_the_run_trains(make):
    def sort(trainer):
        trainer.loss_types = ["aot"]

    with pytest.raises(ValueError, match=r"needs another layout of its steps\. Set it before train\(\)"):
        make(trl_jax, "DPO", After(1, sort)).train()


def unfreeze(trainer):
    trainer.model.requires_grad_(True)


LATER = {
    "clipping": ({"max_grad_norm": 0.0}, lambda trainer: vars(trainer.args).update(max_grad_norm=1.0),
                 "max_grad_norm was changed while the run trains"),
    "passes": ({}, lambda trainer: vars(trainer.args).update(gradient_accumulation_steps=2),
               "gradient_accumulation_steps was changed from 1 to 2 while the run trains"),
    "unfrozen": ({}, unfreeze, r"layernorm.weight was unfrozen during training \(2 parameters in total\)"),
}  # fmt: skip


@usual("unfrozen")
@pytest.mark.parametrize("name", LATER)
def test_what_a_step_that_is_under_way_cannot_follow_is_refused(name, make):
    config, change, words = LATER[name]
    trainer = make(trl_jax, "Reward", After(1, change), **config)
    if name == "unfrozen":
        for name, parameter in trainer.model.named_parameters():
            parameter.requires_grad_("layers.0.input_layernorm" not in name and "layers.0.post" not in name)
    with pytest.raises(ValueError, match=words):
        trainer.train()


def test_what_is_unfrozen_between_two_runs_trains(make):
    """In TRL, it stays frozen: the second run keeps the optimizer of the first."""
    pytest.importorskip("trl")
    import trl

    def changed(package):
        trainer = make(package, "SFT", max_steps=1)
        norm = dict(trainer.model.named_parameters())["model.norm.weight"]
        norm.requires_grad_(False)
        trainer.train()
        before = norm.detach().clone()
        norm.requires_grad_(True)
        trainer.train()
        return float(abs(norm.detach() - before).max())

    assert changed(trl) == 0 and changed(trl_jax) > 1e-3


def test_a_learning_rate_that_is_set_between_two_runs(make):
    """In TRL, the second run keeps the optimizer of the first, and its rate."""
    pytest.importorskip("trl")
    import trl

    def rates(package):
        trainer = make(package, "SFT", max_steps=1, learning_rate=1e-2, lr_scheduler_type="constant")
        trainer.train()
        trainer.args.learning_rate = 1e-3
        trainer.train()
        return [log["learning_rate"] for log in trainer.state.log_history if "loss" in log][-1]

    assert (rates(trl), rates(trl_jax)) == (1e-2, 1e-3)


def test_groups_of_parameters_have_the_rate_of_the_next_step():
    steps = SimpleNamespace(finished=0)
    rates = LearningRate(lambda step: 0.1 * (step + 1), lambda: steps.finished)
    choice = OptimizerChoice(0.5, "adamw_torch", Hyperparameters(weight_decay=0.3))
    decayed, other = ShownOptimizer.of(Optimizer(None, None), choice, rates).param_groups
    assert decayed["lr"] == 0.1 and (decayed["weight_decay"], other["weight_decay"]) == (0.3, 0.0)
    assert dict(other) == {"lr": 0.1, "initial_lr": 0.5, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
    decayed["lr"] = 7
    with pytest.raises(ValueError, match=r"lr was set to \[7.0, 0.1\].*Set the lr of every group"):
        rates.take_next(2)
    steps.finished = 1  # a rate that was set applies to one step
    assert rates.take_next(2) == decayed["lr"] == 0.2 and rates.last_epoch == 1
    with pytest.raises(ValueError, match="Set it in on_step_begin or on_step_end"):
        decayed["lr"] = 7
    steps.finished = 2
    decayed["lr"], other["lr"] = 7, 7
    assert rates.take_next(2) == 7 and rates.get_last_lr() == [pytest.approx(0.3)] * 2
    with pytest.raises(ValueError, match=r"param_groups\[1\]\['weight_decay'\] cannot be set.*in the arguments"):
        other["weight_decay"] = 0.1
    with pytest.raises(AttributeError, match="lr_scheduler.base_lrs was set, which no step reads"):
        rates.base_lrs = [0.1, 0.1]


def test_what_was_read_once_is_told_of_when_it_is_changed(make):
    trainer = make(trl_jax, "DPO", max_steps=1)
    trainer.args.beta = 0.7
    with pytest.warns(UserWarning, match=r"^beta: the arguments were changed.*set trainer\.beta instead\."):
        trainer.train()
    with pytest.raises(AttributeError, match="gradient_accumulation_steps cannot be set on trainer.accelerator"):
        trainer.accelerator.gradient_accumulation_steps = 2


def test_a_collator_that_is_set_later_is_taken_or_refused(make):
    trainer = make(trl_jax, "DPO", pad_to_multiple_of=None)
    collator = trainer.data_collator
    collator.pad_to_multiple_of = 32
    trainer.data_collator = collator
    assert trainer.data_collator is collator and trainer._setup.pad_to_multiple_of == 32
    with pytest.raises(ValueError, match=r"data_collator=.*\.dict\(\.\.\.\) is not in this release"):
        trainer.data_collator = {}
    collator.max_length = 7
    with pytest.raises(ValueError, match="data_collator has max_length=7, the arguments max_length=64"):
        trainer.data_collator = collator


def test_what_a_subclass_sets_before_the_constructor_is_overwritten_as_in_trl(checkpoint, tmp_path):
    class Own(trl_jax.KTOTrainer):
        def __init__(self, *given, **options):
            self.beta = 7.0
            super().__init__(*given, **options)

    rows = Dataset.from_list(rows_of("KTO", 4))
    trainer = Own(str(checkpoint(**SMALL)), args=trl_jax.KTOConfig(str(tmp_path), **BASE), train_dataset=rows)
    assert trainer.beta == trainer.args.beta == 0.1


def test_a_scripts_log_may_ask_whether_the_model_is_in_training(checkpoint, tmp_path):
    seen = []

    class Own(trl_jax.KTOTrainer):
        def log(self, logs, start_time=None):
            seen.append((self.model.training, any(name.startswith("eval_") for name in logs)))
            super().log(logs, start_time)

    rows = Dataset.from_list(rows_of("KTO", 8))
    config = {"max_steps": 2, "eval_strategy": "steps", "eval_steps": 1}
    trainer = Own(str(checkpoint(**SMALL)), args=trl_jax.KTOConfig(str(tmp_path), **BASE | config), train_dataset=rows,
                  eval_dataset=rows)  # fmt: skip
    assert trainer.model.training is False
    trainer.train()
    # TRL's, too: the last evaluation leaves the model in evaluation mode.
    assert seen == [(True, False), (False, True)] * 2 + [(False, False)] and not trainer.model.training
    trainer.evaluate()
    assert seen[-1] == (False, True)


def test_a_seed_set_in_the_arguments_orders_the_rows(checkpoint, tmp_path):
    """In TRL the rows keep the order of the first seed."""

    def trained(seed, later):
        args = trl_jax.SFTConfig(str(tmp_path), **BASE | {"max_steps": 2, "seed": seed})
        rows = Dataset.from_list(rows_of("SFT", 16))
        trainer = trl_jax.SFTTrainer(str(checkpoint(**SMALL)), args=args, train_dataset=rows)
        trainer.args.seed = later
        trainer.train()
        return [log["grad_norm"] for log in trainer.state.log_history if "grad_norm" in log]

    assert trained(1, 2) == trained(2, 2) != trained(1, 1)


def test_a_term_of_supers_logits_is_trained_on(checkpoint, tmp_path):
    """TRL computes these logits without gradients."""

    class Own(trl_jax.SFTTrainer):
        share = 1.0

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
            loss = loss + self.share * outputs.logits.mean()
            return (loss, outputs) if return_outputs else loss

    found = []
    for share in (0.0, 10.0):
        args = trl_jax.SFTConfig(str(tmp_path), **BASE | {"max_steps": 1})
        trainer = Own(str(checkpoint(**SMALL)), args=args, train_dataset=Dataset.from_list(rows_of("SFT", 4)))
        trainer.share = share
        trainer.train()
        found.append(trainer.state.log_history[0]["grad_norm"])
    assert abs(found[1] - found[0]) > 1e-2
