"""Cases of GRPO and RLOO that are compared with TRL (a checkpoint, prompts and a config each), and how they are run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from compat_tests.parity import reference
from compat_tests.parity.cases import Case
from compat_tests.parity.dpo_cases import CHAT, SMALL

STEPS = {
    "max_steps": 4, "learning_rate": 3e-3, "per_device_train_batch_size": 8, "max_completion_length": 12,
    "pad_to_multiple_of": None,
}  # fmt: skip
PROMPTS, CHATS = {"n": 20}, {"n": 20, "kind": "chat"}
EVALUATED = {"eval_rows": {"n": 4}, "eval_strategy": "steps", "eval_steps": 2}  # no short last batch


def prompt_rows(n: int, kind: str = "text") -> list[dict]:
    """The first `n` of 20 prompts, as text or as conversations ("chat"), with a column for reward functions."""
    verbs, things = "bake repair paint carry".split(), "bread soup garden engine river".split()
    texts = [(f"How do I {verb} the {thing}?", thing) for verb in verbs for thing in things][:n]
    if kind == "chat":
        return [{"prompt": [{"role": "user", "content": ask}], "answer": thing} for ask, thing in texts]
    return [{"prompt": ask, "answer": thing} for ask, thing in texts]


def length_reward(completions, **columns):
    return [float(len(_text(own)) % 7) for own in completions]


def vowels(completions, answer, **columns):
    """None for every third length."""
    texts = [_text(own) for own in completions]
    return [
        None if len(text) % 3 == 0 else sum(letter in "aeiou" for letter in text) / 10 + len(thing) / 10
        for text, thing in zip(texts, answer, strict=True)
    ]


def _text(completion: Any) -> str:
    return completion if isinstance(completion, str) else completion[0]["content"]


def run(package: Any, trainer: str, folder, rows, out, *, eval_rows=None, peft_config=None, **config) -> reference.Run:
    """Train with trl or trl_jax; the Run's facts are the ids of all completions, `[generations][rows][tokens]`."""
    from datasets import Dataset

    seen = []

    def spy(completion_ids, **columns):
        seen.append([list(map(int, ids)) for ids in completion_ids])
        return [0.0] * len(completion_ids)

    args = getattr(package, f"{trainer}Config")(output_dir=str(out), **(reference.BASE | config))
    made = getattr(package, f"{trainer}Trainer")(
        str(folder),
        reward_funcs=[length_reward, vowels, spy],
        args=args,
        train_dataset=Dataset.from_list(rows),
        eval_dataset=None if eval_rows is None else Dataset.from_list(eval_rows),
        peft_config=peft_config,
    )
    made.train()
    logs, final = list(made.state.log_history), Path(out) / "final"
    metrics = None if eval_rows is None else made.evaluate()
    made.save_model(str(final))
    return reference.Run(logs, final, reference.read_weights(final), metrics, facts={"completion_ids": seen})


def case(rows=PROMPTS, model=SMALL, eval_rows=None, **config) -> Case:
    return Case(STEPS | {"num_generations": 4} | config, rows, model, eval_rows)


def _lora() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


# Each generation is used for two steps in two parts, so that the policy differs from the one that sampled.
AGAIN = {"num_iterations": 2, "steps_per_generation": 2, "beta": 0.02}
GRPO = {
    "default": case(),
    "reference": case(beta=0.04, gradient_accumulation_steps=2, steps_per_generation=4),
    **{name: case(loss_type=name, **AGAIN) for name in ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo")},
    "luspo": case(loss_type="luspo", importance_sampling_level="sequence", **AGAIN),
    "clipped": case(
        delta=1.02, epsilon=0.01, use_bias_correction_kl=False, loss_type="grpo", **AGAIN | {"num_iterations": 3}
    ),
    "masked": case(
        top_entropy_quantile=0.5, off_policy_mask_threshold=0.001, mask_truncated_completions=True,
        max_completion_length=20, **AGAIN,
    ),
    "entropy_bonus": case(
        use_adaptive_entropy=True, entropy_target=5.69, entropy_coef=0.01, gradient_accumulation_steps=2
    ),
    "normalized_first": case(multi_objective_aggregation="normalize_then_sum", reward_weights=[1.0, 0.5, 2.0]),
    "sampling": case(
        temperature=0.7, top_k=50, top_p=0.9, repetition_penalty=1.1, scale_rewards="batch",
        generation_kwargs={"min_new_tokens": 5}, beta=0.1,
    ),
    "following": case(beta=0.05, sync_ref_model=True, ref_model_sync_steps=2, ref_model_mixup_alpha=0.3, max_steps=5),
    # Five generations per epoch; the second epoch has other prompts in another order.
    "epochs": case(max_steps=12, logging_steps=3, num_iterations=2, per_device_train_batch_size=16),
    "conversations": case(rows=CHATS, model=CHAT, scale_rewards=False, shuffle_dataset=False),
    "evaluated": case(per_device_eval_batch_size=4, num_generations_eval=2, **EVALUATED),
    "experts": case(model=SMALL | {"model_type": "qwen3_moe"}, gradient_accumulation_steps=2),
    "convolutions": case(
        model=SMALL | {"model_type": "lfm2", "num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
        gradient_accumulation_steps=2,
    ),
    "states": case(
        model=SMALL | {"model_type": "qwen3_5_text", "num_hidden_layers": 2, "full_attention_interval": 2},
        gradient_accumulation_steps=2,
    ),
    "mamba": case(
        model=SMALL | {"model_type": "nemotron_h", "layers_block_type": ["linear_attention", "full_attention", "mlp"]},
        gradient_accumulation_steps=2,
    ),
    "adapter": case(beta=0.05, num_iterations=2, peft_config=_lora),
}  # fmt: skip
RLOO = {
    "default": case(num_generations=2),
    "clipped": case(normalize_advantages=True, reward_clip_range=(0.0, 2.0), beta=0.1),
    "again": case(num_iterations=2, steps_per_generation=2, epsilon=0.01),
    "masked": case(
        gradient_accumulation_steps=2, beta=0.0, mask_truncated_completions=True, max_completion_length=20
    ),
    "evaluated": case(per_device_eval_batch_size=4, **EVALUATED),
}  # fmt: skip
