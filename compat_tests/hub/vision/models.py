"""Tiny vision-language models by model_type, and images as their processors return them (random pixels)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

IMAGE = 5  # id of image tokens
TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "pad_token_id": 0,
}


@dataclass(frozen=True)
class Case:
    """A tiny model and three images for it.

    config_class, values: the class of the config in transformers, and what it is made with.
    processed: what the processor returns for each image.
    tokens: the number of image tokens of each image.
    options: more inputs of transformers' model, from the token ids `[R, T]`.
    """

    config_class: str
    values: dict[str, Any]
    processed: list[dict[str, np.ndarray]]
    tokens: list[int]
    options: Any = None


def pixels(*shape: int) -> np.ndarray:
    """Random pixel values, the same each time."""
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def _types(ids: np.ndarray) -> dict[str, np.ndarray]:
    return {"mm_token_type_ids": (ids == IMAGE).astype(np.int64)}


def _grid(frames: int, rows: int, columns: int, channels: int) -> dict[str, np.ndarray]:
    return {
        "pixel_values": pixels(frames * rows * columns, channels),
        "image_grid_thw": np.array([[frames, rows, columns]]),
    }


CASES = {
    "llava": Case(
        "LlavaConfig",
        {
            "vision_config": {
                "model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
                "num_attention_heads": 4, "image_size": 28, "patch_size": 7,
            },
            "text_config": {"model_type": "llama", **TEXT},
            "image_token_index": IMAGE,
        },
        [{"pixel_values": pixels(1, 3, 28, 28) + number} for number in range(3)],
        [16, 16, 16],
    ),
    "qwen2_5_vl": Case(
        "Qwen2_5_VLConfig",
        {
            "vision_config": {
                "hidden_size": 32, "intermediate_size": 48, "depth": 3, "num_heads": 2, "patch_size": 4,
                "window_size": 16, "out_hidden_size": 32, "fullatt_block_indexes": [1],
            },
            "text_config": TEXT | {
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
            },
            "image_token_id": IMAGE,
            "vision_start_token_id": 6,
        },
        [_grid(1, 6, 8, 96), _grid(1, 10, 4, 96), _grid(1, 2, 2, 96)],
        [12, 10, 1],
        _types,
    ),
}  # fmt: skip
