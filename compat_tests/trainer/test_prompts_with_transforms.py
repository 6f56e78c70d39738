"""Online trainers on datasets with a transform that creates the prompts on each read."""

from __future__ import annotations

import random

import pytest
from datasets import Dataset

import trl_jax
from compat_tests.effort import usual
from compat_tests.parity.dpo_cases import SMALL
from compat_tests.parity.grpo_cases import prompt_rows
from compat_tests.parity.reference import BASE

CONFIG = {
    "max_steps": 2, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "num_generations": 2,
    "max_completion_length": 3, "pad_to_multiple_of": None,
}  # fmt: skip


def asked(batch):
    """Rows as a script's transform makes them: the template is drawn on each read."""
    return {"prompt": [random.choice(("{}?", "{}!")).format(text) for text in batch["question"]], "row": batch["row"]}


def table(transform=asked):
    rows = [{"question": row["prompt"], "row": number} for number, row in enumerate(prompt_rows(6))]
    return Dataset.from_list(rows).with_transform(transform)


def trainer_of(package, folder, out, name="GRPO", data=None, **config):
    seen = []

    def reward(prompts, completions, row, **others):
        seen.extend(zip(row, prompts, strict=True))
        return [float(len(text) % 5) for text in completions]

    args = getattr(package, f"{name}Config")(str(out), **BASE | CONFIG | config)
    random.seed(7)
    kind = getattr(package, f"{name}Trainer")
    rows = table() if data is None else data
    return kind(model=str(folder), reward_funcs=reward, args=args, train_dataset=rows), seen


@usual("GRPO")
@pytest.mark.parametrize("name", ["GRPO", "RLOO"])
def test_prompts_are_those_of_trl(name, checkpoint, tmp_path):
    """The same rows in the same order; their texts may differ in the drawn template."""
    trl, found = pytest.importorskip("trl"), {}
    for package in (trl_jax, trl):
        trainer, found[package] = trainer_of(package, checkpoint(**SMALL), tmp_path / package.__name__, name)
        trainer.train()
    assert [row for row, _ in found[trl_jax]] == [row for row, _ in found[trl]]
    questions = [row["prompt"] for row in prompt_rows(6)]
    assert {prompt[:-1] for _, prompt in found[trl_jax]} <= set(questions)
    assert len({prompt[-1] for _, prompt in found[trl_jax]}) == 2


def test_a_resumed_run_goes_on_as_with_a_plain_table(checkpoint, tmp_path):
    def same(batch):
        return {"prompt": [f"{text}?" for text in batch["question"]], "row": batch["row"]}

    plain = Dataset.from_list([table(same)[number] for number in range(6)])
    logs, often = [], {"save_strategy": "steps", "save_steps": 1}
    for name, data in (("plain", plain), ("made", table(same))):
        trainer, _ = trainer_of(trl_jax, checkpoint(**SMALL), tmp_path / name, data=data, **often)
        trainer.train()
        logs.append([log["loss"] for log in trainer.state.log_history if "loss" in log])
    point = str(tmp_path / "made" / "checkpoint-1")
    again, _ = trainer_of(trl_jax, checkpoint(**SMALL), tmp_path / "again", data=table(same))
    again.train(resume_from_checkpoint=point)
    logs.append([log["loss"] for log in again.state.log_history if "loss" in log])
    assert logs[0] == logs[1] == logs[2] and len(logs[0]) == 2
    fewer = table(same).select(range(5))
    other, _ = trainer_of(trl_jax, checkpoint(**SMALL), tmp_path / "other", data=fewer)
    with pytest.raises(ValueError, match="train_dataset is not the one"):
        other.train(resume_from_checkpoint=point)


@pytest.mark.parametrize(("made", "kind", "words"), [
    ({"prompt": None}, ValueError, r"Row \d of train_dataset, column 'prompt': must be a string.*, got None"),
    ({"prompt": "\ud800"}, ValueError, r"Row \d of train_dataset"),
    ({"text": "a"}, ValueError, r"Row \d of train_dataset.*'prompt'"),
])  # fmt: skip
@pytest.mark.parametrize("name", ["GRPO", "Distillation"])
def test_a_row_is_checked_when_it_comes(made, kind, words, name, checkpoint, tmp_path):
    read = []

    def bad(batch):
        read.append(batch)
        return {column: [value] * len(batch["row"]) for column, value in made.items()}

    folder = checkpoint(**SMALL)
    if name == "Distillation":
        args = trl_jax.DistillationConfig(
            str(tmp_path), **BASE | {name: value for name, value in CONFIG.items() if name != "num_generations"}
        )
        trainer = trl_jax.DistillationTrainer(str(folder), str(folder), args=args, train_dataset=table(bad))
    else:
        trainer, _ = trainer_of(trl_jax, folder, tmp_path, name, table(bad))
    assert not read
    with pytest.raises(kind, match=words):
        trainer.train()
