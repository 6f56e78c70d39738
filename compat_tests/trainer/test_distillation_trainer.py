"""On-policy distillation: allowed students and teachers, errors, and that a student learns."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest
from datasets import Dataset, IterableDataset
from transformers import AutoTokenizer

import trl_jax
from compat_tests.effort import only_thorough, thorough
from compat_tests.parity.distillation_cases import TEACHER
from compat_tests.parity.dpo_cases import SMALL
from compat_tests.parity.grpo_cases import prompt_rows
from compat_tests.parity.reference import BASE
from trl_jax.hub.auto import AutoModelForCausalLM
from trl_jax.hub.peft_config import LoraConfig, PromptTuningConfig
from trl_jax.trainer.distillation_config import DistillationConfig
from trl_jax.trainer.distillation_trainer import DistillationTrainer

CONFIG = {
    "max_steps": 2, "per_device_train_batch_size": 8, "max_completion_length": 8, "learning_rate": 3e-3,
    "pad_to_multiple_of": None,
}  # fmt: skip
ROWS = prompt_rows(16)


@pytest.fixture
def make(checkpoint, tmp_path):
    def made(model=None, teacher=None, rows=ROWS, config=None, **given):
        args = DistillationConfig(str(tmp_path / "out"), **BASE | CONFIG | (config or {}))
        teacher = str(checkpoint(**TEACHER)) if teacher is None else teacher
        rows = Dataset.from_list(rows) if isinstance(rows, list) else rows
        return DistillationTrainer(model or str(checkpoint(**SMALL)), teacher, args, rows, **given)

    return made


def numbers(trainer, *names):
    return [tuple(log[name] for name in names) for log in trainer.state.log_history if "loss" in log]


async def ask(question: str) -> str:
    """Ask.

    Args:
        question: it.
    """
    return question


REFUSED = {
    "no teacher": ({"teacher": 0}, "teacher_model is missing: pass a checkpoint's folder or Hub name"),
    "teachers's arguments": (
        {"loaded": True, "config": {"teacher_model_init_kwargs": {"dtype": "float32"}}},
        "You passed teacher_model_init_kwargs to the config, but your teacher_model is already instantiated.",
    ),
    "no folder": ({"teacher": "./nowhere"}, r"teacher_model='\./nowhere'"),
    "a tool that waits": ({"tools": [ask]}, "Async tools are not yet supported by `DistillationTrainer`"),
    "virtual tokens": (
        {"peft_config": PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")},
        "Prompt-learning PEFT methods",
    ),
    "beta": ({"config": {"beta": 1.5}}, "beta must be at most 1.0, got 1.5"),
    "texts divided": ({"config": {"mesh_shape": "sequence:2"}}, "DistillationTrainer does not support sequence-dim"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_at_construction(name, make, checkpoint):
    given, text = REFUSED[name]
    given = dict(given)
    if given.pop("loaded", False):
        given["teacher"] = AutoModelForCausalLM.from_pretrained(checkpoint(**TEACHER))
    if given.get("teacher") == 0:
        with pytest.raises(ValueError, match=text):
            DistillationTrainer(str(checkpoint(**SMALL)), train_dataset=Dataset.from_list(ROWS))
        return
    with pytest.raises((ValueError, FileNotFoundError), match=text):
        make(**given)


def test_prompts_with_tokens_that_the_student_does_not_embed(make, checkpoint):
    words = AutoTokenizer.from_pretrained(checkpoint(**SMALL))
    size = AutoModelForCausalLM.from_pretrained(checkpoint(**SMALL)).vocab_size
    words.add_tokens([f"<new{number}>" for number in range(size + 1 - len(words))])
    last = words.convert_ids_to_tokens(size)
    with pytest.raises(ValueError, match=rf"^The prompt '{last}', position 0: token id {size} is outside the model's"):
        make(rows=[{"prompt": last}] * 8, processing_class=words).train()


def test_a_teacher_of_another_vocabulary_is_refused_with_both_sizes(make, checkpoint):
    larger = AutoModelForCausalLM.from_pretrained(checkpoint(**TEACHER))
    rows = larger.vocab_size
    larger.resize_token_embeddings(rows + 64)
    with pytest.raises(ValueError, match=f"student model has vocab_size {rows} but the teacher .* {rows + 64}"):
        make(teacher=larger)


def test_a_student_learns_and_its_teacher_stays(make, checkpoint):
    trainer = make(config={"max_steps": 15, "learning_rate": 1e-2, "logging_steps": 5, "beta": 0.5})
    before = jax.tree.map(np.asarray, trainer.teacher_model.params)
    trainer.train()
    losses = [loss for (loss,) in numbers(trainer, "loss")]
    assert losses[-1] < 0.7 * losses[0]
    jax.tree.map(np.testing.assert_array_equal, before, trainer.teacher_model.params)
    with pytest.raises(AttributeError, match="Set beta in DistillationConfig"):
        trainer.beta = 0.1
    assert (trainer.beta, trainer.max_tool_calling_iterations, trainer.tools) == (0.5, None, [])


def test_equal_models_have_nothing_to_learn(make, checkpoint):
    trainer = make(teacher=str(checkpoint(**SMALL)), config={"max_steps": 1})
    trainer.train()
    [(loss, grad_norm)] = numbers(trainer, "loss", "grad_norm")
    assert abs(loss) < 1e-5 and grad_norm < 1e-4


@only_thorough
@pytest.mark.parametrize(
    "kwargs", [thorough({"dtype": "bfloat16"}), {"quantization_config": trl_jax.BitsAndBytesConfig(load_in_8bit=True)}]
)
def test_a_teacher_is_held_in_few_bits(kwargs, make):
    whole = make(config={"max_steps": 1})
    few = make(config={"max_steps": 1, "teacher_model_init_kwargs": kwargs})
    sizes = [sum(array.nbytes for array in one.parts.setup.reference.arrays.values()) for one in (whole, few)]
    assert sizes[1] < 0.7 * sizes[0]  # embeddings stay in float in 8 bits
    for trainer in (whole, few):
        trainer.train()
    [(exact,)], [(coarse,)] = (numbers(trainer, "loss") for trainer in (whole, few))
    assert coarse == pytest.approx(exact, rel=0.1) and coarse != exact


def test_torch_models_and_an_adapter(make, checkpoint):
    from transformers import AutoModelForCausalLM as FromTorch

    by_name = make(config={"max_steps": 1})
    by_name.train()
    student, teacher = (FromTorch.from_pretrained(checkpoint(**shape)) for shape in (SMALL, TEACHER))
    before = student.lm_head.weight.detach().clone()
    by_object = make(student, teacher, config={"max_steps": 1})
    by_object.train()
    assert numbers(by_object, "loss", "grad_norm") == numbers(by_name, "loss", "grad_norm")
    assert (student.lm_head.weight - before).abs().max() > 1e-4
    head = make(peft_config=LoraConfig(r=2, target_modules=["q_proj", "lm_head"]), config={"max_steps": 1})
    head.train()  # TRL refuses an adapter on the head, because it does not read it
    added = {path: array for path, array in head.model.params.items() if path.startswith("lm_head.")}
    assert len(added) == 2 and all(np.any(array) for array in added.values())


def test_tokens_are_counted_over_a_step_whatever_the_model_type(make, checkpoint):
    """TRL's loss of distillation is a mean over the tokens of the step, also for model types whose loss transformers
    averages over micro-batches."""
    runs = []
    for accepts in (None, False):
        model = AutoModelForCausalLM.from_pretrained(checkpoint(**SMALL))
        model.accepts_loss_kwargs = accepts
        config = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "max_steps": 1}
        trainer = make(model, config=config | {"max_completion_length": 64})
        trainer.train()
        runs.append(numbers(trainer, "loss", "grad_norm"))
        log = trainer.state.log_history[0]
        assert log["completions/min_length"] < log["completions/max_length"]  # else both means are equal
    assert runs[0] == runs[1]


def test_a_stream_of_prompts(make):
    def rows():
        yield from ROWS

    trainer = make(rows=IterableDataset.from_generator(rows), config={"shuffle_dataset": False})
    wanted = make(config={"shuffle_dataset": False})
    for one in (trainer, wanted):
        one.train()
    assert numbers(trainer, "loss", "entropy") == numbers(wanted, "loss", "entropy")


def test_a_run_goes_on_to_the_bit(make):
    config = {"max_steps": 4, "save_strategy": "steps", "save_steps": 1, "gradient_accumulation_steps": 2,
              "per_device_train_batch_size": 2}  # fmt: skip
    whole, again = make(config=config), make(config=config)
    whole.train()
    again.train(resume_from_checkpoint=f"{whole.args.output_dir}/checkpoint-2")
    jax.tree.map(np.testing.assert_array_equal, whole.model.params, again.model.params)
    names = ("loss", "grad_norm", "num_tokens", "completions/mean_length", "entropy")
    assert numbers(whole, *names) == numbers(again, *names) and len(numbers(whole, *names)) == 4


@only_thorough
def test_rows_are_laid_out_in_any_way(make):
    found = []
    for layout in ("padded", "shared"):
        trainer = make(config={"batch_layout": layout, "max_steps": 2, "gradient_accumulation_steps": 2})
        trainer.train()
        found.append(numbers(trainer, "loss", "grad_norm", "entropy"))
    for other in found[1:]:
        np.testing.assert_allclose(other, found[0], rtol=2e-5)


def test_a_card_names_the_method(make):
    trainer = make(config={"max_steps": 1})
    trainer.train()
    trainer.create_model_card()
    text = Path(trainer.args.output_dir, "README.md").read_text(encoding="utf-8")
    assert "2306.13649" in text and "- distillation" in text
