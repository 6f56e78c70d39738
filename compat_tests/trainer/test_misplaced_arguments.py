"""An argument passed in the position of another one raises an error that names it, before the model is loaded."""

from __future__ import annotations

import pytest
from datasets import Dataset

import trl_jax
from compat_tests.tiny import tiny_tokenizer
from trl_jax.core.trainers import TRAINERS

ROWS = Dataset.from_list([{"prompt": "p", "chosen": "c", "rejected": "r"}])


def score(completions, **columns):
    return [0.0 for _ in completions]


@pytest.mark.parametrize("names", TRAINERS.values(), ids=TRAINERS)
def test_configs_datasets_and_tokenizers_in_other_places(names, tmp_path):
    trainer, config = names.load_trainer(), names.load_config()
    args = config(str(tmp_path), use_cpu=True, bf16=False)
    second = {"dpo": "ref_model", "kto": "ref_model", "grpo": "reward_funcs", "rloo": "reward_funcs"}
    second = second.get(names.command, "teacher_model" if names.command == "distillation" else "args")
    if second != "args":
        with pytest.raises(TypeError, match=f"{second} of {trainer.__name__} is a {config.__name__}. Pass it as args="):
            trainer("nowhere", args, train_dataset=ROWS)
    with pytest.raises(TypeError, match=f"{second} of {trainer.__name__} is a Dataset. Pass it as train_dataset="):
        trainer("nowhere", ROWS)
    tokenizer = tiny_tokenizer()
    with pytest.raises(TypeError, match=f"{second} of {trainer.__name__} is a .*Pass it as processing_class="):
        trainer("nowhere", tokenizer, train_dataset=ROWS)
    given = {} if second in ("args", "ref_model") else {second: score}
    with pytest.raises(TypeError, match=f"processing_class of {trainer.__name__} is a Dataset"):
        trainer("nowhere", args=args, train_dataset=ROWS, processing_class=ROWS, **given)
    with pytest.raises(TypeError, match=rf"args is the class {config.__name__} itself: pass args={config.__name__}"):
        trainer("nowhere", args=config, train_dataset=ROWS, **given)


@pytest.mark.parametrize("kind", ["GRPO", "RLOO"])
def test_a_reward_function_is_checked_before_the_model_is_looked_for(kind, tmp_path):
    args = getattr(trl_jax, f"{kind}Config")
    trainer = getattr(trl_jax, f"{kind}Trainer")
    wanted = (
        r"The reward function by_place\(completions\) does not take prompts, completion_ids, .*write def by_place\("
    )
    with pytest.raises(TypeError, match=wanted):
        trainer("nowhere", [score, by_place], args=args(str(tmp_path), use_cpu=True, bf16=False), train_dataset=ROWS)


def by_place(completions):
    return [0.0 for _ in completions]
