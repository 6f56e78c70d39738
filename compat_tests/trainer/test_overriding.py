"""Overridden methods of a user's subclass: those that TRL's trainers call on themselves are called, or refused."""

from __future__ import annotations

import ast
import inspect
from types import SimpleNamespace

import pytest

import trl_jax
from compat_tests.parity.reference import BASE
from compat_tests.trainer.trainers import FACTS, make, table
from trl_jax.cli.transformers_patches import redirect_trainer_methods

KINDS = (
    "RewardTrainer", "SFTTrainer", "DPOTrainer", "KTOTrainer", "GRPOTrainer", "RLOOTrainer", "DistillationTrainer",
)  # fmt: skip
WRITERS = ("GRPOTrainer", "RLOOTrainer", "DistillationTrainer")
# Called in the other trainers.
REFUSED = dict.fromkeys(("DPOTrainer", "KTOTrainer"), {"prediction_step", "_prepare_inputs"})
OF_ROWS = {"get_train_dataloader", "prediction_step", "training_step", "_get_train_sampler", "_prepare_dataset"}
REFUSED |= dict.fromkeys(("GRPOTrainer", "RLOOTrainer", "DistillationTrainer"), {*OF_ROWS, "_prepare_inputs"})
OF_POLICIES = {  # called in some trainers
    "_compute_loss", "_calculate_rewards", "_generate", "_generate_and_score_completions", "_tokenize_prompts",
}  # fmt: skip
HONORED = dict.fromkeys(("GRPOTrainer", "RLOOTrainer"), OF_POLICIES)
HONORED |= dict.fromkeys(("DPOTrainer", "KTOTrainer", "DistillationTrainer"), {"_compute_loss"})
CALLED = frozenset(
    "_get_train_sampler _prepare_dataset _prepare_inputs _save_checkpoint _set_signature_columns_if_needed "
    "compute_loss create_model_card create_optimizer evaluate get_decay_parameter_names get_eval_dataloader "
    "get_test_dataloader get_train_dataloader init_hf_repo log prediction_step push_to_hub save_model "
    "training_step".split()
)


def called_on_self(cls: type) -> set[str]:
    """The methods that a TRL trainer calls on itself, found in its source and that of its bases."""
    names = set()
    for kind in cls.__mro__[:-1]:
        for node in ast.walk(ast.parse(inspect.getsource(kind))):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
                names.add(node.attr)
    methods = {name: inspect.getattr_static(cls, name, None) for name in names}
    return {name for name, own in methods.items() if inspect.isfunction(own) or isinstance(own, staticmethod)}


@pytest.mark.parametrize("kind", KINDS)
def test_every_method_of_trls_trainers_is_called_or_refused(kind):
    trl = pytest.importorskip("trl")
    ours, wanted = getattr(trl_jax, kind), called_on_self(getattr(trl, kind))
    refused = ours._traits.refused.never_called.keys()
    assert len(wanted) > 80 and {"_prepare_dataset", "_generate"} & wanted
    honored = HONORED.get(kind, set())
    assert wanted <= CALLED | refused | honored and honored <= wanted and not honored & refused
    assert CALLED & refused == REFUSED.get(kind, set())
    everywhere = {name for kind in KINDS for name in dir(getattr(trl, kind))}
    assert refused <= everywhere  # so refusing them does not hit a name that a script uses for something else


@pytest.mark.parametrize("kind", ["DPOTrainer", "KTOTrainer"])
@pytest.mark.parametrize("name", ["_compute_kl_logps", "_prepare_inputs", "prediction_step"])
def test_what_is_not_the_loss_itself_is_refused(kind, name):
    words = rf"Own overrides {name}, which trl_jax never calls.*: choose a loss_type, or override _compute_loss"
    with pytest.raises(TypeError, match=words):
        type("Own", (getattr(trl_jax, kind),), {name: lambda self: None})


ONCE = [
    ("DPOTrainer", "dpo_loss", "choose a loss_type"), ("KTOTrainer", "kto_loss", "choose a loss_type"),
    ("DPOTrainer", "tokenize_row", "train_dataset.map"), ("SFTTrainer", "_prepare_packed_dataloader", "map"),
    ("GRPOTrainer", "_get_per_token_logps", "override _compute_loss"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "name", "instead"), ONCE)
def test_what_trls_trainers_called_once_is_refused_too(kind, name, instead):
    with pytest.raises(TypeError, match=rf"Own overrides {name}, which trl_jax never calls\. .*{instead}"):
        type("Own", (getattr(trl_jax, kind),), {name: lambda self: None})


REFUSED_OF_POLICIES = {
    "_log_metric": "Override _calculate_rewards, or write a reward function",
    "training_step": r"on_step_end of a TrainerCallback.*override _compute_loss\(self, model, inputs\)",
    "prediction_step": "choose loss_type",
    "_get_per_token_logps_and_entropies": "choose loss_type",
    "_generate_single_turn": "rollout_func",
    "_tool_call_loop": r"Override _generate\(self, prompts\)",
    "_prepare_inputs": "order the rows",
}


@pytest.mark.parametrize("kind", ["GRPOTrainer", "RLOOTrainer"])
@pytest.mark.parametrize("name", REFUSED_OF_POLICIES)
def test_what_a_script_writes_in_the_place_of_a_policys_method_is_said(kind, name):
    with pytest.raises(
        TypeError, match=rf"Own overrides {name}, which trl_jax never calls\. .*{REFUSED_OF_POLICIES[name]}"
    ):
        type("Own", (getattr(trl_jax, kind),), {name: lambda self: None})


OF_STUDENTS = {
    "training_step": "choose beta",
    "_get_last_hidden_state": r"with self._get_per_token_divergences\(model\)",
    "_generate": "generation_kwargs",
    "_tokenize_prompts": "train_dataset.map",
}


@pytest.mark.parametrize("name", OF_STUDENTS)
def test_what_a_script_writes_in_the_place_of_a_students_method_is_said(name):
    text = rf"Own overrides {name}, which trl_jax never calls\. .*{OF_STUDENTS[name]}"
    with pytest.raises(TypeError, match=text):
        type("Own", (trl_jax.DistillationTrainer,), {name: lambda self: None})


def test_a_name_that_trl_does_not_know_is_the_scripts():
    for name in ("_compute_loss", "_compute_kl_logps", "compute_ref_log_probs"):
        own = type("Own", (trl_jax.SFTTrainer,), {name: lambda self: None})
        assert name in vars(own) and name not in own._traits.refused.never_called


def overridden(kind, names, seen):
    """A subclass whose methods record that they are called."""

    def noting(name):
        def method(self, *given, **options):
            seen.add(name)
            return getattr(super(own, self), name)(*given, **options)

        return method

    own = type("Own", (kind,), {name: noting(name) for name in names})
    return own


def test_what_may_be_overridden_is_called(checkpoint, tmp_path, monkeypatch):
    seen, folder = set(), checkpoint(**FACTS)
    config = {"max_steps": 1, "save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    args = trl_jax.RewardConfig(str(tmp_path), **BASE | config)
    kind = overridden(trl_jax.RewardTrainer, CALLED, seen)
    trainer = kind(str(folder), args=args, train_dataset=table(8), eval_dataset=table(4))
    trainer.train()
    trainer.predict(table(4))
    assert CALLED - seen == {"init_hf_repo", "push_to_hub"}  # these need the Hub
    hub = SimpleNamespace(opened=False, **dict.fromkeys(("open", "write_card", "push"), lambda *given, **options: None))
    monkeypatch.setattr(trainer, "_publisher", hub)
    args.push_to_hub = True
    trainer.save_model()
    assert seen == CALLED
    assert (tmp_path / "checkpoint-1" / "model.safetensors").exists()
    assert trainer._get_output_dir(trial=None) == str(tmp_path)  # where such a _save_checkpoint writes its own files


def test_a_checkpoint_out_of_turn_is_refused(checkpoint, tmp_path):
    with pytest.raises(RuntimeError, match="_save_checkpoint is called by train"):
        make(trl_jax, checkpoint(**FACTS), tmp_path)._save_checkpoint(None, None)


@pytest.fixture(scope="module")
def by_name(checkpoint, tmp_path_factory):
    """(a trainer whose class has transformers' methods by name, transformers' Trainer)"""
    transformers = pytest.importorskip("transformers.trainer")
    redirect_trainer_methods(transformers.Trainer)  # as under python -m trl_jax

    class Own(trl_jax.RewardTrainer):
        def evaluate(self, *args, **kwargs):
            return transformers.Trainer.evaluate(self, *args, **kwargs)

        def log(self, logs, start_time=None):
            transformers.Trainer.log(self, logs | {"mine": 1.0}, start_time)

        def save_model(self, output_dir=None, _internal_call=False):
            transformers.Trainer.save_model(self, output_dir, _internal_call)

    package = SimpleNamespace(RewardTrainer=Own, RewardConfig=trl_jax.RewardConfig)
    out, config = tmp_path_factory.mktemp("out"), {"max_steps": 1}
    trainer = make(package, checkpoint(**FACTS), out, config=config, eval_dataset=table(8))
    return trainer, transformers.Trainer


def test_transformers_methods_called_by_name_are_ours(by_name, tmp_path):
    trainer, kind = by_name
    trainer.train()
    metrics = trainer.evaluate()
    assert metrics["eval_loss"] == trl_jax.RewardTrainer.evaluate(trainer)["eval_loss"] > 0
    assert all(entry["mine"] == 1.0 for entry in trainer.state.log_history) and len(trainer.state.log_history) == 4
    assert kind.predict(trainer, trainer.eval_dataset).metrics["test_loss"] == metrics["eval_loss"]
    trainer.save_model(str(tmp_path / "saved"))
    assert (tmp_path / "saved" / "model.safetensors").is_file()


def test_those_that_our_trainers_lack_are_refused_with_what_to_write(by_name):
    trainer, kind = by_name
    with pytest.raises(TypeError, match=r"Trainer.evaluation_loop was called with a Own; .*Override eval"):
        kind.evaluation_loop(trainer, None, "")
    with pytest.raises(TypeError, match=r"^transformers.Trainer.get_optimizer_group was called with a Own; .*Leave it"):
        kind.get_optimizer_group(trainer)
    with pytest.raises(TypeError, match=r"called by name with a Own of trl_jax\. Call super"):
        trainer._memory_tracker  # noqa: B018


def test_a_method_replaced_in_transformers_trainer_is_named(checkpoint, tmp_path, monkeypatch, caplog):
    kind, folder = pytest.importorskip("transformers.trainer").Trainer, checkpoint(**FACTS)
    make(trl_jax, folder, tmp_path)
    assert "transformers.Trainer" not in caplog.text
    monkeypatch.setattr(kind, "log", lambda self, logs, start_time=None: None)
    make(trl_jax, folder, tmp_path)
    assert "The script replaces log of transformers.Trainer" in caplog.text and "RewardTrainer.log" in caplog.text


def test_of_other_trainers_nothing_changes():
    class Trainer:
        def evaluate(self, *args, **kwargs):
            return self, args, kwargs

    plain = Trainer.evaluate
    redirect_trainer_methods(Trainer)
    redirect_trainer_methods(Trainer)
    assert Trainer.evaluate.__wrapped__ is plain and inspect.signature(Trainer.evaluate) == inspect.signature(plain)
    own = Trainer()
    assert own.evaluate(1, a=2) == (own, (1,), {"a": 2})


@pytest.mark.parametrize("kind", ["CPOTrainer", "ORPOTrainer"])
@pytest.mark.parametrize("name, instead", [
    ("get_batch_loss_metrics", "derive a trainer from ReferenceTrainer"), ("tokenize_row", "train_dataset.map"),
])  # fmt: skip
def test_methods_that_trls_experimental_trainers_call_on_themselves(kind, name, instead):
    with pytest.raises(TypeError, match=rf"Own overrides {name}, which trl_jax never calls\. .*{instead}"):
        type("Own", (getattr(trl_jax, kind),), {name: lambda self: None})
