"""Torch optimizers that scripts pass, set or create: rates, weight decay and schedules as in TRL."""

from __future__ import annotations

import pytest
from datasets import Dataset
from transformers import TrainerCallback, get_cosine_schedule_with_warmup

import trl_jax
from compat_tests.effort import usual
from compat_tests.parity.reference import BASE
from compat_tests.tiny import text_rows
from compat_tests.trainer.trainers import FACTS, make, table
from trl_jax.hub.torch_state import rates_of

torch, trl = pytest.importorskip("torch"), pytest.importorskip("trl")
peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
CONFIG = BASE | {"per_device_train_batch_size": 4, "max_steps": 3, "weight_decay": 0.0}


@pytest.fixture(scope="module")
def folder(checkpoint):
    return str(checkpoint(**FACTS | {"num_hidden_layers": 2}))


class Rates(TrainerCallback):
    def __init__(self):
        self.seen = []

    def on_step_end(self, args, state, control, optimizer=None, lr_scheduler=None, **kwargs):
        groups = [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
        self.seen.append([*map(list, groups), lr_scheduler.get_last_lr()])


def by_layer(model):
    """The lower layer learns slowly, and the head has weight decay; norms and embeddings are left out."""
    lower, upper = (list(layer.self_attn.parameters()) for layer in model.model.layers)
    head = {"params": list(model.score.parameters()), "lr": 1e-2, "weight_decay": 0.3}
    return torch.optim.AdamW([{"params": upper}, {"params": lower, "lr": 1e-4}, head], lr=2e-3, betas=(0.8, 0.9))


OPTIMIZERS = {
    "by_layer": (by_layer, lambda tx: get_cosine_schedule_with_warmup(tx, 1, 3)),
    "plain": (lambda model: torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1), None),
    "sgd": (
        lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5, weight_decay=0.1),
        lambda tx: warmup_and_cosine(tx),
    ),
    "adam": (
        lambda model: torch.optim.Adam(model.parameters(), lr=2e-3),
        lambda tx: torch.optim.lr_scheduler.StepLR(tx, 2, 0.1),
    ),
}


@usual("by_layer", "sgd")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_of_torch_trains_as_in_trl(name, folder, tmp_path):
    optimizer_of, schedule_of = OPTIMIZERS[name]
    found = []
    for package in (trl, trl_jax):
        model, rates = transformers.AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1), Rates()
        tx = optimizer_of(model)
        optimizers = tx, None if schedule_of is None else schedule_of(tx)
        trainer = make(
            package, model, tmp_path, config=CONFIG, optimizers=optimizers, callbacks=[rates],
            processing_class=transformers.AutoTokenizer.from_pretrained(folder),
        )  # fmt: skip
        trainer.train()
        logs = [(log["loss"], log["grad_norm"], log["learning_rate"]) for log in trainer.state.log_history[:3]]
        found.append((logs, rates.seen, {n: p.detach().cpu().numpy() for n, p in trainer.model.named_parameters()}))
    (theirs, their_rates, wanted), (ours, our_rates, weights) = found
    assert ours == [pytest.approx(log, rel=2e-4, abs=2e-5) for log in theirs]
    flat = [[value for group in step for value in group] for step in their_rates]
    assert [[value for group in step for value in group] for step in our_rates] == [pytest.approx(one) for one in flat]
    for name, values in wanted.items():
        assert weights[name] == pytest.approx(values, abs=1e-4), name


def test_create_optimizer_may_make_one_of_torch(checkpoint, tmp_path):
    """LoRA+, by PEFT's function, in two calls of train()."""
    from peft.optimizers import create_loraplus_optimizer

    found, rows = [], Dataset.from_list(text_rows(12))
    for package in (trl, trl_jax):

        class Plus(package.SFTTrainer):
            def create_optimizer(self):
                if self.optimizer is None:
                    self.optimizer = create_loraplus_optimizer(
                        self.model, torch.optim.AdamW, lr=self.args.learning_rate, loraplus_lr_ratio=16
                    )
                return self.optimizer

        rates = Rates()
        args = package.SFTConfig(str(tmp_path), **CONFIG | {"learning_rate": 1e-3})
        trainer = Plus(
            str(checkpoint(**FACTS, head="causal")), args, train_dataset=rows, callbacks=[rates],
            peft_config=peft.LoraConfig(r=2, target_modules=["q_proj"]),
        )  # fmt: skip
        trainer.train()
        found.append(([log["loss"] for log in trainer.state.log_history[:3]], rates.seen))
    assert found[1][0] == pytest.approx(found[0][0], abs=1e-5)
    assert [step[-1] for step in found[1][1]] == [pytest.approx(step[-1]) for step in found[0][1]]
    trainer.train()  # keeps the groups
    assert rates.seen[3:] == rates.seen[:3]


def test_create_optimizer_may_group_parameters_as_transformers_does(folder, tmp_path):
    found = []
    for package in (trl, trl_jax):

        class Grouped(package.RewardTrainer):
            def create_optimizer(self):
                if self.optimizer is None:
                    cls, options = self.get_optimizer_cls_and_kwargs(self.args, self.model)
                    decayed, groups = self.get_decay_parameter_names(self.model), ([], [])
                    for name, parameter in self.model.named_parameters():
                        groups[name in decayed].append(parameter)
                    slow, other = groups
                    self.optimizer = cls(
                        [{"params": other, "weight_decay": 0.3}, {"params": slow, "lr": 1e-4}], **options
                    )
                return self.optimizer

        args = package.RewardConfig(str(tmp_path), **CONFIG)
        trainer = Grouped(folder, args, train_dataset=table(16))
        trainer.train()
        found.append([log["loss"] for log in trainer.state.log_history[:3]])
    assert found[1] == pytest.approx(found[0], abs=1e-5)


def test_a_scheduler_continues_where_it_is(folder, tmp_path):
    """It has taken two steps before, and continues in a second train()."""
    found = []
    for package in (trl, trl_jax):
        model, rates = transformers.AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1), Rates()
        tx = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=0.1, decoupled_weight_decay=True)
        schedule = transformers.get_linear_schedule_with_warmup(tx, 0, 10)
        tx.step(), schedule.step(), schedule.step()
        trainer = make(
            package, model, tmp_path, config=CONFIG | {"max_steps": 2}, optimizers=(tx, schedule), callbacks=[rates],
            processing_class=transformers.AutoTokenizer.from_pretrained(folder),
        )  # fmt: skip
        trainer.train()
        trainer.train()
        found.append((rates.seen, [log["loss"] for log in trainer.state.log_history[:2]]))
    assert [step[-1] for step in found[1][0]] == [pytest.approx(step[-1]) for step in found[0][0]]
    assert found[1][0][-1][-1] == [pytest.approx(4e-4)]
    assert found[1][1] == pytest.approx(found[0][1], abs=1e-5)


def test_the_first_step_takes_a_rate_that_is_set_after_the_scheduler_was_made(folder, tmp_path):
    """As torch's does; the scheduler sets the later ones."""
    for schedule_of in (lambda tx: get_cosine_schedule_with_warmup(tx, 0, 4), by_half):
        found = []
        for package in (trl, trl_jax):
            model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
            tx, rates = torch.optim.AdamW(model.parameters(), lr=1e-3), Rates()
            schedule = schedule_of(tx)
            tx.param_groups[0]["lr"] = 1e-2
            trainer = make(
                package, model, tmp_path, config=CONFIG, optimizers=(tx, schedule), callbacks=[rates],
                processing_class=transformers.AutoTokenizer.from_pretrained(folder),
            )  # fmt: skip
            trainer.train()
            found.append((rates.seen, [log["loss"] for log in trainer.state.log_history[:3]]))
        assert [step[-1] for step in found[1][0]] == [pytest.approx(step[-1]) for step in found[0][0]]
        assert found[1][1] == pytest.approx(found[0][1], abs=1e-4)


def warmup_and_cosine(tx):
    parts = [
        torch.optim.lr_scheduler.LinearLR(tx, 0.1, total_iters=2),
        torch.optim.lr_scheduler.CosineAnnealingLR(tx, 6, eta_min=1e-3),
    ]
    return torch.optim.lr_scheduler.SequentialLR(tx, parts, milestones=[2])


def restarts(tx):
    return torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(tx, 2, T_mult=2, eta_min=1e-5)


def nested(tx):
    constant = torch.optim.lr_scheduler.LambdaLR(tx, lambda step: 0.5 + 0.1 * step)
    parts = [constant, restarts(tx), torch.optim.lr_scheduler.StepLR(tx, 2, 0.5)]
    return torch.optim.lr_scheduler.SequentialLR(tx, parts, milestones=[2, 8])


@pytest.mark.parametrize("schedule_of", [warmup_and_cosine, restarts, nested])
@pytest.mark.parametrize("done", [0, 2])
def test_rates_are_those_of_a_scheduler_of_torch(schedule_of, done):
    """Also of one that has taken steps. Neither it nor its optimizer changes."""
    parameters = [torch.zeros(1, requires_grad=True) for _ in range(2)]
    tx = torch.optim.SGD([{"params": [parameter]} for parameter in parameters], lr=1e-2)
    schedule = schedule_of(tx)
    for _ in range(done):
        tx.step()
        schedule.step()
    rate, theirs = rates_of(schedule, tx), []
    ours = [rate(step) for step in range(14)]
    for _ in range(14):
        theirs.append(tx.param_groups[1]["lr"])
        tx.step()
        schedule.step()
    assert ours == pytest.approx(theirs, rel=1e-12) and len(set(ours)) > 3


def by_half(tx):
    return torch.optim.lr_scheduler.StepLR(tx, 1, 0.5)


class ReplacedStep(TrainerCallback):
    def on_train_begin(self, args, state, control, optimizer=None, **kwargs):
        optimizer.step = print


def test_a_step_that_a_script_replaces_is_refused(folder, tmp_path):
    trainer = make(trl_jax, folder, tmp_path, config=CONFIG, callbacks=[ReplacedStep()])
    with pytest.raises(AttributeError, match="optimizer.step was set, which no step reads: the step is compiled"):
        trainer.train()


class OneGroup(TrainerCallback):
    def on_step_begin(self, args, state, control, optimizer=None, **kwargs):
        optimizer.param_groups[1]["lr"] = 0.5


def test_the_rate_of_a_single_group_cannot_be_set(folder, tmp_path):
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    groups = [{"params": model.model.parameters()}, {"params": model.score.parameters(), "lr": 1e-2}]
    trainer = make(
        trl_jax, model, tmp_path, config=CONFIG, optimizers=(torch.optim.AdamW(groups, lr=1e-3), None),
        callbacks=[OneGroup()], processing_class=transformers.AutoTokenizer.from_pretrained(folder),
    )  # fmt: skip
    with pytest.raises(
        ValueError, match=r"lr was set to \[0.001, 0.5\], and the ratio .* is fixed here: \[1.0, 10.0\]"
    ):
        trainer.train()


def test_an_optimizer_that_is_set_on_the_trainer_trains(folder, tmp_path):
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    trainer = make(
        trl_jax, model, tmp_path, config=CONFIG | {"max_steps": 1, "lr_scheduler_type": "constant"},
        processing_class=transformers.AutoTokenizer.from_pretrained(folder),
    )  # fmt: skip
    trainer.lr_scheduler = None  # of scripts that train in stages
    with pytest.raises(AttributeError, match="Pass optimizers=.optimizer, scheduler. to the constructor"):
        trainer.lr_scheduler = get_cosine_schedule_with_warmup(torch.optim.SGD(model.parameters(), lr=1), 1, 2)
    before = {name: values.detach().clone() for name, values in model.named_parameters()}
    trainer.optimizer = torch.optim.SGD(model.score.parameters(), lr=0.5)
    trainer.train()
    assert trainer.state.log_history[0]["learning_rate"] == 0.5
    changed = {name for name, values in model.named_parameters() if (values - before[name]).abs().max() > 0}
    assert changed == {"score.weight"}


def test_what_it_cannot_follow_is_refused(folder, tmp_path):
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    other, parameters = torch.nn.Linear(1, 1).parameters(), list(model.parameters())
    plain = torch.optim.AdamW(parameters)
    halves = [{"params": parameters[:3]}, {"params": parameters[3:], "eps": 1e-3}]
    hooked, used = torch.optim.SGD(parameters, lr=1), torch.optim.AdamW(parameters)
    hooked.register_step_post_hook(print)
    parameters[0].grad = torch.ones_like(parameters[0])
    used.step()
    wrapped, waiting = torch.optim.AdamW(parameters), torch.optim.AdamW(parameters)
    wrapped.step, stays = print, get_cosine_schedule_with_warmup(waiting, 1, 3)
    stays.step = print
    two = torch.optim.AdamW([{"params": parameters[:3]}, {"params": parameters[3:]}])
    both = get_cosine_schedule_with_warmup(two, 1, 3)
    two.param_groups[0]["lr"] = 1.0
    cases = (
        (wrapped, None, "the step of the AdamW was replaced by the script's print"),
        (waiting, stays, "step of the LambdaLR was replaced by the script"),
        (two, both, r"lr of the parameter groups is \[1.0, 0.0\] and initial_lr is \[0.001, 0.001\]"),
        (hooked, None, "the SGD has a hook of the script, print"),
        (used, None, "the AdamW has taken steps, and its state is not read"),
        (plain, get_cosine_schedule_with_warmup(used, 1, 3), "the LambdaLR was made for another optimizer"),
        (torch.optim.AdamW(other), None, "no parameter of the AdamW belongs to the model"),
        (
            torch.optim.AdamW([*parameters, torch.nn.Parameter(torch.ones(1))]),
            None,
            "1 parameters of group 0 of the AdamW",
        ),
        (torch.optim.AdamW(parameters, amsgrad=True), None, r"AdamW\(amsgrad=True\) is not supported"),
        (torch.optim.AdamW(halves), None, "the parameter groups differ in eps; only lr and weight_decay may differ"),
        (torch.optim.Adam(parameters, weight_decay=0.1), None, "Adam with weight_decay adds it to the gradient"),
        (torch.optim.Adadelta(parameters), None, "a torch.optim.adadelta.Adadelta cannot update JAX arrays"),
        (plain, torch.optim.lr_scheduler.OneCycleLR(plain, 0.1, 9), "the scheduler is a torch.*OneCycleLR"),
    )
    for tx, schedule, words in cases:
        with pytest.raises((TypeError, ValueError), match=words):
            make(
                trl_jax, model, tmp_path, config=CONFIG, optimizers=(tx, schedule), train=table(4),
                processing_class=transformers.AutoTokenizer.from_pretrained(folder),
            )  # fmt: skip
