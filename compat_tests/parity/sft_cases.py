"""Cases of SFT that are compared with TRL: a checkpoint, rows and a config each, for 30 steps."""

from __future__ import annotations

from compat_tests.parity.cases import Case

# Marks the assistant's text, including the end of its turn.
MARKED = (
    "{% for message in messages %}{{ message['role'] }}: "
    "{% if message['role'] == 'assistant' %}{% generation %}"
    "{{ message['content'] }}{{ eos_token }}{% endgeneration %}\n"
    "{% else %}{{ message['content'] }}{{ eos_token }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
# Two layers, because tied and untied heads, and adapters, only differ outside of them.
SMALL = {"head": "causal", "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48}
CHAT = SMALL | {"tokenizer": {"chat_template": MARKED}}
STEPS = {"max_steps": 30, "max_length": 64, "learning_rate": 3e-3}
# Without padding, which TRL counts as tokens in packed rows.
PACKED = STEPS | {"packing": True, "pad_to_multiple_of": None}

CASES = {
    "text": Case(STEPS, model=SMALL),
    "tied": Case(STEPS | {"weight_decay": 0.3}, model=SMALL | {"tie": True}),
    "messages": Case(STEPS, {"n": 60, "kind": "chat"}, CHAT),
    "assistant_only": Case(STEPS | {"assistant_only_loss": True}, {"n": 60, "kind": "chat"}, CHAT),
    "completions": Case(STEPS, {"n": 60, "kind": "prompt"}, SMALL),
    "whole_prompts": Case(STEPS | {"completion_only_loss": False}, {"n": 60, "kind": "prompt"}, SMALL),
    "chat_completions": Case(STEPS, {"n": 60, "kind": "chat_prompt"}, CHAT),
    "both_masks": Case(STEPS | {"assistant_only_loss": True}, {"n": 60, "kind": "chat_prompt"}, CHAT),
    "truncated": Case(STEPS | {"max_length": 12}, {"n": 60, "kind": "prompt"}, SMALL),
    # Adam divides small gradients by small gradients: single elements differ by a fifth of a step.
    "bfd": Case(PACKED, {"n": 150, "kind": "prompt"}, SMALL, weights=1e-3),
    "bfd_split": Case(PACKED | {"packing_strategy": "bfd_split", "max_length": 24}, model=SMALL),
    "wrapped": Case(PACKED | {"packing_strategy": "wrapped"}, {"n": 150, "kind": "chat"}, CHAT),
    "padding_free": Case(STEPS | {"padding_free": True, "max_length": None, "pad_to_multiple_of": None}, model=SMALL),
    "shuffled": Case(PACKED | {"shuffle_dataset": True, "seed": 7}, {"n": 150}, SMALL),
    "dft": Case(STEPS | {"loss_type": "dft"}, {"n": 60, "kind": "prompt"}, SMALL),
    "smoothed": Case(STEPS | {"label_smoothing_factor": 0.1}, {"n": 60, "kind": "prompt"}, SMALL),
    # 15 micro-batches per epoch, the last with 2 rows: steps of two micro-batches, and of one.
    "accumulated": Case({"num_train_epochs": 4, "gradient_accumulation_steps": 2}, {"n": 58}, SMALL),
    "accumulated_by_four": Case(
        {"num_train_epochs": 8, "gradient_accumulation_steps": 4}, {"n": 58, "kind": "prompt"}, SMALL
    ),
    "sparse_logs": Case(STEPS | {"logging_steps": 4, "gradient_accumulation_steps": 2}, {"n": 90}, SMALL),
    "evaluated": Case(
        STEPS | {"eval_strategy": "steps", "eval_steps": 10, "per_device_eval_batch_size": 16},
        {"n": 60, "kind": "prompt"}, SMALL, eval_rows={"n": 16, "kind": "prompt", "seed": 9},
    ),
}  # fmt: skip
