"""GKD: allowed students and teachers, errors, and what a user may set on the trainer."""

from __future__ import annotations

import random

import numpy as np
import pytest
from datasets import Dataset

import trl_jax
from compat_tests.parity.dpo_cases import CHAT
from compat_tests.parity.reference import BASE
from compat_tests.tiny import text_rows
from trl_jax.core.trainers import names_of_config
from trl_jax.data.batch import Example
from trl_jax.experimental.gkd import GKDConfig, GKDTrainer
from trl_jax.hub.auto import AutoModelForCausalLM
from trl_jax.hub.peft_config import PromptTuningConfig
from trl_jax.trainer.gkd_trainer import Mixture, prompt_of

ROWS = text_rows(8, "chat")
CONFIG = {"max_steps": 2, "max_new_tokens": 4, "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4}


@pytest.fixture
def make(checkpoint, tmp_path):
    def made(student=None, teacher=None, config=None, **given):
        folder = str(checkpoint(**CHAT))
        args = GKDConfig(str(tmp_path / "out"), **BASE | CONFIG | (config or {}))
        given = {"train_dataset": Dataset.from_list(ROWS), **given}
        return GKDTrainer(student or folder, teacher or folder, args, **given)

    return made


def test_a_time_limit_in_the_generation_config_is_refused(make, checkpoint):
    model = AutoModelForCausalLM.from_pretrained(checkpoint(**CHAT))
    model.generation_config.max_time = 1.0
    with pytest.raises(ValueError, match="has max_time=1.0, which is not in this release"):
        make(student=model)


def test_the_config_has_trls_fields_defaults_and_order(tmp_path):
    gkd = pytest.importorskip("trl.experimental.gkd")
    theirs, ours = (kind(str(tmp_path), use_cpu=True, bf16=False) for kind in (gkd.GKDConfig, GKDConfig))
    for name in ("temperature", "lmbda", "beta", "max_new_tokens", "seq_kd", "disable_dropout", "learning_rate"):
        assert vars(ours)[name] == vars(theirs)[name], name
    known = set(GKDConfig.__dataclass_fields__)
    positional = [name for name, field in GKDConfig.__dataclass_fields__.items() if not field.kw_only]
    assert [name for name in gkd.GKDConfig.__dataclass_fields__ if name in known] == positional
    assert names_of_config(ours).trainer == "GKDTrainer" and trl_jax.SFTConfig in GKDConfig.__mro__
    with pytest.warns(UserWarning, match="completion_only_loss=True has no effect in trl_jax: GKD reads conversations"):
        GKDConfig(str(tmp_path), completion_only_loss=True)


REFUSED = {
    "no teacher": ({"teacher": 0}, "teacher_model is missing: pass a checkpoint's folder"),
    "teacher's arguments": (
        {"loaded": True, "config": {"teacher_model_init_kwargs": {"dtype": "float32"}}},
        "You passed teacher_model_init_kwargs to the config, but your teacher_model is already instantiated.",
    ),
    "virtual tokens": (
        {"peft_config": PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")},
        "as an adapter, a weight-based one such as LoRA",
    ),
    "data_collator": ({"data_collator": print}, "data_collator is a builtin_function_or_method|data_collator="),
    "lmbda": ({"config": {"lmbda": 1.5}}, "lmbda must be at most 1.0, got 1.5"),
    "beta": ({"config": {"beta": -0.5}}, "beta must be a number of at least 0, got -0.5"),
    "packing": ({"config": {"packing": True}}, "packing=True is not in this release"),
    "texts divided": ({"config": {"mesh_shape": "sequence:2"}}, "GKDTrainer does not support sequence-dim"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_at_construction(name, make, checkpoint):
    given, text = REFUSED[name]
    given = dict(given)
    if given.pop("loaded", False):
        given["teacher"] = AutoModelForCausalLM.from_pretrained(checkpoint(**CHAT))
    if given.get("teacher") == 0:
        with pytest.raises(ValueError, match=text):
            GKDTrainer(str(checkpoint(**CHAT)), train_dataset=Dataset.from_list(ROWS))
        return
    with pytest.raises(ValueError, match=text):
        make(**given)


def test_a_teacher_of_another_vocabulary_is_refused_with_both_sizes(make, checkpoint):
    larger = AutoModelForCausalLM.from_pretrained(checkpoint(**CHAT))
    rows = larger.vocab_size
    larger.resize_token_embeddings(rows + 64)
    with pytest.raises(ValueError, match=f"student model has vocab_size {rows} but the teacher .* {rows + 64}"):
        make(teacher=larger)


def test_methods_that_are_never_called_cannot_be_overridden():
    for name in ("training_step", "compute_loss", "generalized_jsd_loss", "generate_on_policy_outputs"):
        with pytest.raises(TypeError, match=f"overrides {name}, which trl_jax never calls"):
            type("Own", (GKDTrainer,), {name: lambda self: None, "__module__": "script"})


def test_what_a_script_sets_counts_and_metrics_get_whole_logits(make, caplog):
    """Student and teacher are equal, so the loss is 0 whichever of them generates."""
    shapes = []

    def metrics(evaluated):
        shapes.append((evaluated.predictions.shape, evaluated.label_ids.shape))
        return {"labels": int((evaluated.label_ids != -100).sum())}

    config = {"lmbda": 1.0, "temperature": 1.0, "lr_scheduler_type": "constant"}
    given = {"compute_metrics": metrics, "eval_dataset": Dataset.from_list(ROWS[:4]), "formatting_func": str}
    trainer = make(config=config, **given)
    assert "is fully covered by `DistillationTrainer`" in caplog.text
    assert "formatting_func is never called by GKDTrainer, in TRL either" in caplog.text
    [shown, _] = trainer.get_train_dataloader()
    assert [ids[-1] for ids in shown["labels"]] and (shown["labels"] != -100).any(axis=1).all()
    teacher = trainer.teacher_model
    assert teacher.generation_config.eos_token_id == trainer.model.generation_config.eos_token_id
    with pytest.raises(AttributeError, match="Set temperature in GKDConfig"):
        trainer.temperature = 0.5
    trainer.seq_kd, trainer.lmbda = True, 0.0
    trainer.train()
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    assert len(losses) == 2 and max(map(abs, losses)) < 1e-5
    found = trainer.evaluate()
    assert abs(found["eval_loss"]) < 1e-4  # two steps of Adam on rounding errors
    assert shapes[-1][0][:2] == shapes[-1][1] and shapes[-1][0][2] == trainer.model.vocab_size
    counted = sum(len(row["input_ids"]) - row["labels"].count(-100) for row in trainer.eval_dataset)
    assert found["eval_labels"] == counted


def test_who_writes_is_drawn_for_each_micro_batch():
    example = Example((np.arange(6),), labels=(np.array([-100, -100, 2, 3, 4, 5]),))
    said = {"student": [7, 8, 9], "teacher": [1]}
    lmbda, seq_kd = 0.4, [False]

    def writer(name):
        return lambda prompts: [np.asarray(said[name], np.int32) for _ in prompts]

    mixture = Mixture(lambda: lmbda, lambda: seq_kd[0], writer("student"), writer("teacher"))
    random.seed(0)
    drawn = [random.random() <= lmbda for _ in range(20)]
    assert 3 < sum(drawn) < 17
    for other in ("dataset", "teacher"):
        seq_kd[0] = other == "teacher"
        random.seed(0)
        for by_student in drawn:
            [new] = mixture([example])
            completion = said.get("student" if by_student else other, [2, 3, 4, 5])
            assert new.texts[0].tolist() == [0, 1, *completion]
            assert new.labels[0].tolist() == [-100, -100, *completion]
            assert prompt_of(new).tolist() == [0, 1]
    assert prompt_of(Example((np.arange(3),), labels=([-100] * 3,))).tolist() == [0, 1, 2]


def test_router_fields_of_the_config_are_set_as_by_trls_sft_trainer(make, checkpoint):
    """TRL saves these values for the same arguments, and its loss has no load-balancing term."""
    student = str(checkpoint("qwen3_moe", **CHAT | {"num_hidden_layers": 1}))
    trainer = make(student, student, {"router_aux_loss_coef": 0.3})
    config = trainer.model.config
    assert (config.output_router_logits, config.router_aux_loss_coef) == (True, 0.3)
    assert trainer.router_aux_loss_coef == 0.0


def test_a_teacher_in_bfloat16_is_compared_in_float32(make, checkpoint, tmp_path):
    """TRL rounds its log-probabilities: the same weights have a loss of -0.002."""
    transformers = pytest.importorskip("transformers")
    folder, same = checkpoint(**CHAT), tmp_path / "same"
    transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="bfloat16").save_pretrained(same)
    transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(same)
    trainer = make(str(same), str(same), {"max_steps": 1, "lmbda": 0.0, "logging_steps": 1})
    trainer.train()
    assert abs(trainer.state.log_history[0]["loss"]) < 1e-5
