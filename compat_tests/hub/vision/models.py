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


_INTERLEAVED = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
_DELTA = {
    "num_hidden_layers": 4, "head_dim": 16, "layer_types": ["linear_attention", "full_attention"] * 2,
    "rope_parameters": _INTERLEAVED | {"partial_rotary_factor": 0.5}, "linear_conv_kernel_dim": 3,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_QWEN3_TOWER = {
    "hidden_size": 32, "intermediate_size": 48, "depth": 4, "num_heads": 2, "patch_size": 4, "out_hidden_size": 32,
    "num_position_embeddings": 26,  # a table of 5 x 5 and a row that is never read
}  # fmt: skip
_QWEN3_IMAGES = [_grid(1, 6, 8, 96), _grid(1, 10, 4, 96), _grid(1, 2, 2, 96)]

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
    "qwen2_vl": Case(
        "Qwen2VLConfig",
        {
            "vision_config": {  # the last two are in published files, and nothing reads them
                "embed_dim": 32, "hidden_size": 32, "mlp_ratio": 2, "depth": 3, "num_heads": 2, "patch_size": 4,
                "in_chans": 3, "spatial_patch_size": 4,
            },
            "text_config": TEXT | {
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
            },
            "image_token_id": IMAGE,
            "vision_start_token_id": 6,
        },
        [_grid(1, 6, 8, 96), _grid(1, 10, 4, 96), _grid(2, 2, 4, 96)],
        [12, 10, 4],
        _types,
    ),
    "qwen3_5": Case(
        "Qwen3_5Config",
        {
            "vision_config": _QWEN3_TOWER | {"deepstack_visual_indexes": []},
            "text_config": TEXT | _DELTA,
            "image_token_id": IMAGE,
            "vision_start_token_id": 6,
        },
        _QWEN3_IMAGES,
        [12, 10, 1],
        _types,
    ),
    "qwen3_5_moe": Case(
        "Qwen3_5MoeConfig",
        {
            "vision_config": _QWEN3_TOWER,
            "text_config": TEXT | _DELTA | _EXPERTS | {"shared_expert_intermediate_size": 40},
            "image_token_id": IMAGE,
            "vision_start_token_id": 6,
        },
        _QWEN3_IMAGES,
        [12, 10, 1],
        _types,
    ),
    "qwen3_vl": Case(
        "Qwen3VLConfig",
        {
            "vision_config": _QWEN3_TOWER | {"deepstack_visual_indexes": [0, 2]},
            "text_config": TEXT | {"head_dim": 16, "rope_parameters": _INTERLEAVED},
            "image_token_id": IMAGE,
            "vision_start_token_id": 6,
        },
        _QWEN3_IMAGES,
        [12, 10, 1],
        _types,
    ),
    "qwen3_vl_moe": Case(
        "Qwen3VLMoeConfig",
        {
            "vision_config": _QWEN3_TOWER | {"deepstack_visual_indexes": [1, 3]},
            "text_config": TEXT | _EXPERTS | {"rope_parameters": _INTERLEAVED},
            "image_token_id": IMAGE,
            "vision_start_token_id": 6,
        },
        _QWEN3_IMAGES,
        [12, 10, 1],
        _types,
    ),
}  # fmt: skip
