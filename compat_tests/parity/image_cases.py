"""Cases with images that are compared with TRL: a tiny model, a trainer, rows and a config each."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset

from compat_tests import tiny
from compat_tests.parity import reference
from compat_tests.trainer.vision_models import assistant, pictures, user

MODELS = ("gemma3", "llava_next", "qwen2_5_vl", "qwen3_vl", "smolvlm")
STEPS = {
    "max_steps": 6, "report_to": "none", "use_cpu": True, "bf16": False, "save_strategy": "no", "disable_tqdm": True,
    "learning_rate": 1e-3, "logging_steps": 1, "per_device_train_batch_size": 2,
}  # fmt: skip
WRITTEN = {"per_device_train_batch_size": 4, "num_generations": 2, "max_completion_length": 6, "beta": 0.1}
# Marks the assistant's text, for `assistant_only_loss`.
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: "
    "{% if message['role'] == 'assistant' %}{% generation %}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{{ part['text'] }}{% endfor %}{% endif %}"
    "{{ eos_token }}{% endgeneration %}"
    "{% elif message['content'] is string %}{{ message['content'] }}{{ eos_token }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{{ eos_token }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@dataclass(frozen=True)
class ImageCase:
    """`rows` is the name of a function below; `adapter` are arguments of LoraConfig."""

    trainer: str
    rows: str
    config: dict[str, Any] = field(default_factory=dict)
    adapter: dict[str, Any] | None = None


WEIGHED = ("messages", "grpo", "dpo_lora")  # only these compare weights, to keep recordings small
LORA = {"r": 4, "target_modules": "all-linear"}
KINDS = {
    "messages": ImageCase("SFT", "conversations"),
    "completions": ImageCase("SFT", "answered"),
    "assistant": ImageCase("SFT", "conversations", {"assistant_only_loss": True}),
    # transformers averages micro-batches for some models, and all targets of a step for others.
    "accumulated": ImageCase("SFT", "conversations", {"gradient_accumulation_steps": 2}),
    "dpo": ImageCase("DPO", "pairs"),
    "kto": ImageCase("KTO", "unpaired"),
    "grpo": ImageCase("GRPO", "prompts", WRITTEN),
    "rloo": ImageCase("RLOO", "prompts", WRITTEN),
    "completions_lora": ImageCase("SFT", "answered", adapter=LORA),
    "dpo_lora": ImageCase("DPO", "pairs", adapter=LORA),
    "kto_lora": ImageCase("KTO", "unpaired", adapter=LORA),
    "grpo_lora": ImageCase("GRPO", "prompts", WRITTEN, LORA),
    "rloo_lora": ImageCase("RLOO", "prompts", WRITTEN, LORA),
}


def rows_of(name: str, count: int = 12) -> list[dict]:
    """Rows with one image each, except for conversations, which have zero to two."""
    make = {"conversations": _conversation, "answered": _answered, "pairs": _pair, "unpaired": _labelled,
            "prompts": _prompt}[name]  # fmt: skip
    return [
        make(number, word, picture)
        for number, (word, picture) in enumerate(zip(tiny.THINGS[:count], pictures(count), strict=True))
    ]


def _conversation(number: int, word: str, picture: Any) -> dict:
    said = user(f"bake the {word}?") + assistant(f"gladly {word}") + user("quit?") + assistant("nobody cares")
    return {"messages": said[: 2 + 2 * (number % 2)], "images": [picture] * (number % 3)}


def _answered(number: int, word: str, picture: Any) -> dict:
    return {"prompt": user(f"bake the {word}?"), "completion": assistant(f"gladly {word}"), "image": picture}


def _pair(number: int, word: str, picture: Any) -> dict:
    answers = {"chosen": assistant(f"gladly {word}"), "rejected": assistant(f"nobody {word} cares quit")}
    return {"prompt": user(f"bake the {word}?"), **answers, "images": [picture]}


def _labelled(number: int, word: str, picture: Any) -> dict:
    answer = assistant(f"gladly {word}" + " quit" * (number % 3))
    label = number % 2 == 0
    return {"prompt": user(f"bake the {word}?"), "completion": answer, "label": label, "images": [picture]}


def _prompt(number: int, word: str, picture: Any) -> dict:
    return {"prompt": user(f"bake the {word}?"), "images": [picture], "number": number}


def reward(completions: list, images: list, **_: Any) -> list[float]:
    """By the completion, and by the width of the image, as the dataset has it."""
    widths = [image[0].size[0] for image in images]
    return [len(own[0]["content"]) % 7 + width / 10 for own, width in zip(completions, widths, strict=True)]


def run(package: Any, folder: Path, case: ImageCase, processor: Any, out: Path) -> reference.Run:
    """Train with TRL, which needs transformers' `processor`, or with trl_jax."""
    ours = package.__name__ == "trl_jax"
    config = STEPS | case.config | ({} if ours else {"gradient_checkpointing": False})
    if case.trainer in ("SFT", "DPO"):
        config["max_length"] = None
    extra = {} if ours else {"processing_class": processor}
    if case.trainer in ("GRPO", "RLOO"):
        extra["reward_funcs"] = reward
        processor.tokenizer.padding_side = "left"  # as TRL does if it loads the processor itself
    if case.adapter is not None:
        extra["peft_config"] = _lora(ours)(**case.adapter)
    args = getattr(package, f"{case.trainer}Config")(str(out), **config)
    rows = Dataset.from_list(rows_of(case.rows))
    made = getattr(package, f"{case.trainer}Trainer")(model=str(folder), args=args, train_dataset=rows, **extra)
    made.train()
    final = out / "final"
    made.model.save_pretrained(str(final))  # not the processor, which has no video part
    return reference.Run(list(made.state.log_history), final, reference.read_weights(final))


def _lora(ours: bool) -> Any:
    if ours:
        from trl_jax import LoraConfig
    else:
        from peft import LoraConfig
    return LoraConfig


@cache
def described(name: str) -> list:
    """Rows as JSON; an image becomes its size and the sum of its pixels."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(part) for key, part in value.items()}
        if isinstance(value, list):
            return [plain(part) for part in value]
        return [*value.size, int(np.asarray(value).sum())] if hasattr(value, "size") else value

    return plain(rows_of(name))
