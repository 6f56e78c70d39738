"""Tiny vision-language models (LLaVA, Qwen2.5-VL and others) with processors, and rows with images."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from datasets import Dataset
from PIL import Image

import trl_jax
from compat_tests import tiny
from compat_tests.hub.vision import processors
from compat_tests.hub.vision.models import CASES
from trl_jax.models.vision import Vision

SIZE, PATCH = 28, 7
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: "
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
# Like LLaVA's own: it skips contents that are strings, and does not begin with the BOS token.
BY_PARTS = (
    "{% for message in messages %}{{ message['role'] }}: "
    "{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ part['text'] }}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ part['text'] }} {% endif %}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def tiny_llava(folder: Path, seed: int = 0, **sizes: int) -> Path:
    """Write a LLaVA of two layers, whose CLIP tower has three, with its processor.

    Args:
        sizes: config fields of both parts, such as `hidden_size`.
    """
    import torch
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    tokenizer = tiny.tiny_tokenizer(bos="<s>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokenizer.chat_template = TEMPLATE
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4} | sizes
    vision = CLIPVisionConfig(**shape, num_hidden_layers=3, image_size=SIZE, patch_size=PATCH)
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    text = LlamaConfig(**shape, **ids, num_hidden_layers=2, vocab_size=len(tokenizer))
    image = tokenizer.convert_tokens_to_ids("<image>")
    torch.manual_seed(seed)
    model = LlavaForConditionalGeneration(
        LlavaConfig(vision_config=vision, text_config=text, image_token_index=image, **ids)
    )
    model.save_pretrained(folder)
    processor = CLIPImageProcessorPil(size={"shortest_edge": SIZE}, crop_size={"height": SIZE, "width": SIZE})
    LlavaProcessor(
        processor, tokenizer, patch_size=PATCH, vision_feature_select_strategy="default", image_token="<image>",
        num_additional_image_tokens=1, chat_template=TEMPLATE,
    ).save_pretrained(folder)  # fmt: skip
    return folder


def pictures(count: int) -> list[Image.Image]:
    """Images of random pixels, in four shapes of about the same area, so that few programs are compiled."""
    generator, shapes = np.random.default_rng(0), ((26, 34), (30, 30), (22, 38), (34, 26))
    return [
        Image.fromarray(generator.integers(0, 255, (*shapes[number % 4], 3), dtype=np.uint8)) for number in range(count)
    ]


def user(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


def assistant(text: str) -> list[dict]:
    return [{"role": "assistant", "content": text}]


def messages(count: int = 8) -> Dataset:
    """Conversations with zero to two images."""
    rows = [
        {"messages": user(f"bake the {word}?") + assistant(f"gladly {word}"), "images": [picture] * (number % 3)}
        for number, (word, picture) in enumerate(zip(tiny.THINGS, pictures(count), strict=False))
    ]
    return Dataset.from_list(rows)


def completions(count: int = 8) -> Dataset:
    rows = [
        {"prompt": user(f"bake the {word}?"), "completion": assistant(f"gladly {word}"), "image": picture}
        for word, picture in zip(tiny.THINGS, pictures(count), strict=False)
    ]
    return Dataset.from_list(rows)


def pairs(count: int = 8) -> Dataset:
    """Pairs with one image each, and one pair without."""
    rows = [
        {
            "prompt": user(f"bake the {word}?"), "chosen": assistant(f"gladly {word}"),
            "rejected": assistant(f"nobody {word} cares quit"), "images": [] if number == 5 else [picture],
        }
        for number, (word, picture) in enumerate(zip(tiny.THINGS, pictures(count), strict=False))
    ]  # fmt: skip
    return Dataset.from_list(rows)


def unpaired(count: int = 6) -> Dataset:
    """Prompts with an answer and its label; one of them has no image, and one has two."""
    rows = [
        {
            "prompt": user(f"bake the {word}?"), "completion": assistant(f"gladly {word}" + " quit" * (number % 3)),
            "label": number % 2 == 0, "images": [picture] * (1 if number < 4 else 2 * (number - 4)),
        }
        for number, (word, picture) in enumerate(zip(tiny.THINGS, pictures(count), strict=False))
    ]  # fmt: skip
    return Dataset.from_list(rows)


TEXT_ONLY = {"r": 4, "target_modules": r".*language_model.*(q|v)_proj"}  # LoRA options that leave the tower frozen


_ran: list[list[int]] = []  # programs add to the last of them


@contextlib.contextmanager
def counted_towers() -> Iterator[list[int]]:
    """Yields a list that gets the number of images of each forward pass of a vision tower, in whatever program."""
    forward = Vision.__call__

    def counted(self, images, **options):
        count = images.patches.shape[1]
        begins = (images.first == np.arange(count)) & (images.first < images.end)
        jax.debug.callback(lambda begins: _ran[-1].append(int(begins.sum())), begins)
        return forward(self, images, **options)

    _ran.append([])
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(action="ignore"):
        patch.setattr(Vision, "__call__", counted)
        # JAX traces anew where this option has another value. Clearing its caches would compile later tests again.
        jax.config.update("jax_numpy_rank_promotion", "warn")
        try:
            yield _ran[-1]
            jax.effects_barrier()
        finally:
            jax.config.update("jax_numpy_rank_promotion", "allow")


QWEN_TEMPLATE = TEMPLATE.replace("<image>", "<|vision_start|><|image_pad|><|vision_end|>")


def tiny_qwen(
    folder: Path,
    width: int = 32,
    heads: int = 4,
    patch: int = 4,
    sections: tuple[int, int, int] = (1, 1, 2),
    scale: float = 1.0,
) -> Path:
    """Write a Qwen2.5-VL of two layers with its tokenizer and image processor; its processor needs torchvision.

    Args:
        width, heads: of the language model and of the tower.
        sections: frequencies of each position axis, half a head together.
        scale: multiplies all matrices, so that images change the outputs.
    """
    import torch
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    tokenizer = tiny.tiny_tokenizer()
    tokens = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": tokens})
    tokenizer.chat_template = QWEN_TEMPLATE
    start, image, end, video = tokenizer.convert_tokens_to_ids(tokens)
    vision = {
        "hidden_size": width, "intermediate_size": 48, "depth": 2, "num_heads": 2, "patch_size": patch,
        "window_size": 4 * patch, "out_hidden_size": width, "fullatt_block_indexes": [1],
    }  # fmt: skip
    text = {
        "hidden_size": width, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": heads,
        "num_key_value_heads": heads // 2, "vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(sections)},
    }  # fmt: skip
    torch.manual_seed(0)
    config = Qwen2_5_VLConfig(
        vision_config=vision, text_config=text, image_token_id=image, vision_start_token_id=start,
        vision_end_token_id=end, video_token_id=video, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    model = Qwen2_5_VLForConditionalGeneration(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(scale if weight.dim() > 1 else 1.0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    size = {"shortest_edge": (4 * patch) ** 2, "longest_edge": (12 * patch) ** 2}
    Qwen2VLImageProcessorPil(patch_size=patch, merge_size=2, size=size).save_pretrained(folder)
    return folder


def tiny_tiled(folder: Path, name: str, monkeypatch: Any, template: str = TEMPLATE) -> Any:
    """Write a tiny model of a type in `processors.MADE_BY` with its tokenizer and image processor.

    Args:
        template: a chat template with `<image>` where the model's placeholder goes.

    Returns:
        transformers' processor.
    """
    import torch
    from transformers import AutoModelForImageTextToText

    template = template.replace("<image>", processors.placeholder(name))
    processor = processors.built_processor(name, monkeypatch, chat_template=template)
    tokenizer = processor.tokenizer
    tokenizer.chat_template = template
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = processors.config_for(name, processor, vocab_size=len(tokenizer), **ids)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config)
    for end, value in CASES[name].buffers.items():
        for path, buffer in model.named_buffers():
            if path.endswith(end):
                buffer.fill_(value)
    with torch.no_grad():
        for path, weight in model.named_parameters():
            if path.endswith("mm_input_projection_weight"):  # initialized to zeros, where gradients explode
                weight.normal_(std=0.02)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    processor.image_processor.save_pretrained(folder)
    return processor


PASSED = (
    "data_collator",
    "processing_class",
    "compute_metrics",
    "eval_dataset",
    "quantization_config",
)  # arguments of the trainer, not of its config
SAME = {"learning_rate": 1e-3, "per_device_train_batch_size": 2, "max_length": None, "logging_steps": 1}


def trainer(package, kind, model, out, rows, adapter=None, **options):
    config = {
        "max_steps": 3,
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "save_strategy": "no",
        **SAME,
        **options,
    }
    if package is not trl_jax:
        config["gradient_checkpointing"] = False
    extra = {name: config.pop(name) for name in PASSED if name in config}
    args = getattr(package, f"{kind}Config")(str(out), **config)
    if adapter is not None:
        peft = pytest.importorskip("peft") if package is not trl_jax else trl_jax
        extra["peft_config"] = peft.LoraConfig(**adapter)
    return getattr(package, f"{kind}Trainer")(model, args=args, train_dataset=rows, **extra)


def logged(made):
    made.train()
    return [entry for entry in made.state.log_history if "loss" in entry]
