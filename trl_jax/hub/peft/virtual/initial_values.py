"""The first values of virtual tokens: PEFT's draws on torch's generator."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from trl_jax.core.printable import brief
from trl_jax.core.torch_random import TorchGenerator
from trl_jax.hub.peft.virtual.config import PrefixTuningConfig, PromptLearningConfig, PromptTuningConfig
from trl_jax.nn.virtual_tokens import EMBEDDING, Lstm, VectorMaker


def initial(
    config: PromptLearningConfig,
    maker: VectorMaker,
    generator: TorchGenerator,
    embedded: Callable[[np.ndarray], np.ndarray],
    vocab_size: int,
) -> dict[str, np.ndarray]:
    """The arrays of `maker`, drawn as torch draws them. `embedded` gives the model's embeddings of ids."""
    arrays, shapes = {}, maker.shapes
    for name, shape in shapes.items():
        if name == EMBEDDING:
            arrays[name] = generator.normal(math.prod(shape), 1.0).reshape(shape)
            continue
        fan = maker.hidden if isinstance(maker, Lstm) and name.startswith("lstm_head.") else _inputs(name, shapes)
        arrays[name] = generator.uniform(math.prod(shape), fan**-0.5).reshape(shape)
    if isinstance(config, PrefixTuningConfig) and config.init_weights == "zero":
        last = [name for name in arrays if name.startswith("transform.2.")] or [EMBEDDING]
        arrays |= {name: np.zeros_like(arrays[name]) for name in last}
    if isinstance(config, PromptTuningConfig) and config.prompt_tuning_init != "RANDOM":
        sampled = config.prompt_tuning_init == "SAMPLE_VOCAB"
        ids = generator.integers(maker.count, vocab_size) if sampled else _ids_of(config)
        arrays[EMBEDDING] = np.array(embedded(ids), np.float32)
    return arrays


def _inputs(name: str, shapes: dict[str, tuple[int, ...]]) -> int:
    """The inputs of the linear map that a weight or bias belongs to."""
    return shapes[name.rpartition(".")[0] + ".weight"][1]


def _ids_of(config: PromptTuningConfig) -> np.ndarray:
    """The ids of the config's text, from its beginning on and as often as there are virtual tokens for it."""
    from transformers import AutoTokenizer

    options: dict[str, Any] = dict(config.tokenizer_kwargs or {})
    options.pop("trust_remote_code", None)  # as in PEFT: whoever wrote a config does not run code
    tokenizer = AutoTokenizer.from_pretrained(config.tokenizer_name_or_path, trust_remote_code=False, **options)
    ids = tokenizer(config.prompt_tuning_init_text)["input_ids"]
    if not ids:
        text = brief(config.prompt_tuning_init_text)
        raise ValueError(f"PromptTuningConfig: prompt_tuning_init_text={text} has no tokens. Write a text with some.")
    return np.resize(np.asarray(ids, np.int64), config.num_virtual_tokens)
