"""Cases of on-policy distillation that are compared with TRL: a student, its teacher, prompts and a config each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from compat_tests.parity import reference
from compat_tests.parity.cases import Case
from compat_tests.parity.dpo_cases import CHAT, SMALL
from compat_tests.parity.grpo_cases import CHATS, EVALUATED, PROMPTS, STEPS

TEACHER = {"head": "causal", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96}


def run(package: Any, folder, teacher, rows, out, *, eval_rows=None, peft_config=None, **config) -> reference.Run:
    """Train with trl or trl_jax; the Run's facts are the texts of all completions of each step."""
    import pandas as pd
    from datasets import Dataset

    args = package.DistillationConfig(output_dir=str(out), log_completions=True, **(reference.BASE | config))
    made = package.DistillationTrainer(
        str(folder),
        str(teacher),
        args=args,
        train_dataset=Dataset.from_list(rows),
        eval_dataset=None if eval_rows is None else Dataset.from_list(eval_rows),
        peft_config=peft_config,
    )
    made.train()
    logs, final = list(made.state.log_history), Path(out) / "final"
    files = [] if eval_rows else sorted((Path(out) / "completions").glob("completions_*.parquet"))
    facts = {"completions": [pd.read_parquet(path).to_dict("list") for path in files]}
    metrics = None if eval_rows is None else made.evaluate()
    made.save_model(str(final))
    return reference.Run(logs, final, reference.read_weights(final), metrics, facts=facts)


def case(rows=PROMPTS, model=SMALL, eval_rows=None, teacher=TEACHER, **config) -> Case:
    return Case(STEPS | {"teacher": teacher} | config, rows, model, eval_rows)


def _lora() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


CASES = {
    "default": case(),
    "forward": case(beta=0.0, temperature=0.7, top_k=40, gradient_accumulation_steps=2),
    "mixed": case(beta=0.3, gradient_accumulation_steps=2, per_device_train_batch_size=4, max_completion_length=20),
    "conversations": case(rows=CHATS, model=CHAT, shuffle_dataset=False, beta=0.5),
    "epochs": case(max_steps=6, logging_steps=3),
    "evaluated": case(per_device_eval_batch_size=4, **EVALUATED),
    "lora": case(peft_config=_lora, beta=0.5),
    "capped": case(
        model=SMALL | {"model_type": "gemma2", "num_hidden_layers": 2, "head_dim": 16},
        teacher=TEACHER | {"model_type": "cohere"}, beta=0.5,
    ),
}  # fmt: skip
