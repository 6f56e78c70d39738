"""Tiny vision-language models by model_type, and random images as their processors return them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

IMAGE = 5  # id of the image token
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

    config_class, values: the name of the config class in transformers, and its arguments. processed: what the processor
    returns for each image. tokens: the number of image tokens of each image. options: further inputs of transformers'
    model, from the token ids `[R, T]`. buffers: values of transformers' buffers, by the end of their names.
    """

    config_class: str
    values: dict[str, Any]
    processed: list[dict[str, np.ndarray]]
    tokens: list[int]
    options: Any = None
    buffers: dict[str, float] = field(default_factory=dict)


def pixels(*shape: int) -> np.ndarray:
    """Random pixel values; the same for the same shape."""
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def _types(ids: np.ndarray) -> dict[str, np.ndarray]:
    return {"mm_token_type_ids": (ids == IMAGE).astype(np.int64)}


def _token_types(ids: np.ndarray) -> dict[str, np.ndarray]:
    return {"token_type_ids": (ids == IMAGE).astype(np.int64)}


def _tiled(count: int, height: int, width: int) -> dict[str, np.ndarray]:
    """`count` tiles of 28 x 28 pixels, one of them the whole image, padded to 5 tiles."""
    tiles = np.pad(pixels(1, count, 3, 28, 28), ((0, 0), (0, 5 - count), (0, 0), (0, 0), (0, 0)))
    return {"pixel_values": tiles, "image_sizes": np.array([[height, width]])}


def _placed(rows: int, columns: int) -> dict[str, np.ndarray]:
    """Patches of 4 x 4 pixels with their column and row indices, padded to 32."""
    places = np.stack(np.meshgrid(np.arange(columns), np.arange(rows)), axis=-1).reshape(1, -1, 2)
    missing = ((0, 0), (0, 32 - rows * columns), (0, 0))
    return {
        "pixel_values": np.pad(np.abs(pixels(1, rows * columns, 48)), missing),
        "image_position_ids": np.pad(places, missing, constant_values=-1),
    }


def _grid(frames: int, rows: int, columns: int, channels: int) -> dict[str, np.ndarray]:
    return {
        "pixel_values": pixels(frames * rows * columns, channels),
        "image_grid_thw": np.array([[frames, rows, columns]]),
    }


def _masked(*sizes: tuple[int, int], side: int = 46) -> dict[str, np.ndarray]:
    """Tiles of `side` x `side` pixels, each with an unpadded area of the given height and width; padded to 3 tiles."""
    tiles, masks = np.zeros((1, 3, 3, side, side), np.float32), np.zeros((1, 3, side, side), np.int64)
    for number, (height, width) in enumerate(sizes):
        masks[0, number, :height, :width] = 1
        tiles[0, number, :, :height, :width] = pixels(3, height, width)
    return {"pixel_values": tiles, "pixel_attention_mask": masks}


def _sized(height: int, width: int) -> dict[str, np.ndarray]:
    """An image of this size, padded to 40 x 40 pixels."""
    padding = ((0, 0), (0, 0), (0, 40 - height), (0, 40 - width))
    return {"pixel_values": np.pad(pixels(1, 3, height, width), padding), "image_sizes": np.array([[height, width]])}


def _counted(tiles: int) -> dict[str, np.ndarray]:
    """Tiles of 28 x 28 pixels, and their number."""
    return {"pixel_values": pixels(tiles, 3, 28, 28), "num_patches": np.array([tiles])}


_INTERLEAVED = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
_DELTA = {
    "num_hidden_layers": 4, "head_dim": 16, "layer_types": ["linear_attention", "full_attention"] * 2,
    "rope_parameters": _INTERLEAVED | {"partial_rotary_factor": 0.5}, "linear_conv_kernel_dim": 3,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_QWEN3_TOWER = {
    "hidden_size": 32, "intermediate_size": 48, "depth": 4, "num_heads": 2, "patch_size": 4, "out_hidden_size": 32,
    "num_position_embeddings": 26,  # a 5 x 5 table and one row that is never read
}  # fmt: skip
_QWEN3_IMAGES = [_grid(1, 6, 8, 96), _grid(1, 10, 4, 96), _grid(1, 2, 2, 96)]
SIGLIP = {
    "model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "image_size": 28, "patch_size": 7,
}  # fmt: skip
GEMMA4_TOWER = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "patch_size": 4, "position_embedding_size": 32, "pooling_kernel_size": 2,
}  # fmt: skip
GEMMA4_TEXT = TEXT | {
    "head_dim": 8, "global_head_dim": 16, "sliding_window": 5,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "hidden_size_per_layer_input": 0,
}  # fmt: skip
_IDEFICS3_TOWER = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "image_size": 28,
    "patch_size": 7,
}  # fmt: skip
INTERNVL_TOWER = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "image_size": 28,
    "patch_size": 7,
}  # fmt: skip
PIXTRAL_TOWER = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": 40,
    "patch_size": 4,
}  # fmt: skip

CASES = {
    "gemma3": Case(
        "Gemma3Config",
        {
            "vision_config": SIGLIP | {"image_size": 42, "vision_use_head": False},
            "text_config": TEXT | {
                "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 4,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            "mm_tokens_per_image": 9,
            "image_token_index": IMAGE,
        },
        [{"pixel_values": pixels(1, 3, 42, 42) + number} for number in range(3)],
        [9, 9, 9],
        _token_types,
    ),
    "gemma4": Case(
        "Gemma4Config",
        {
            "vision_config": GEMMA4_TOWER | {"use_clipped_linears": True, "standardize": True},
            "text_config": GEMMA4_TEXT | {"use_bidirectional_attention": "vision"},
            "image_token_id": IMAGE,
        },
        [_placed(8, 4), _placed(2, 6), _placed(4, 4)],
        [8, 3, 4],
        _types,
        {"input_min": -1.5, "input_max": 1.2, "output_min": -0.3, "output_max": 0.4, "std_bias": 0.3, "std_scale": 1.7},
    ),
    "gemma4 with embeddings of layers": Case(
        "Gemma4Config",
        {
            "vision_config": GEMMA4_TOWER,
            "text_config": GEMMA4_TEXT | {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64},
            "image_token_id": IMAGE,
        },
        [_placed(8, 4), _placed(2, 6), _placed(4, 4)],
        [8, 3, 4],
        _types,
    ),
    "idefics3": Case(
        "Idefics3Config",
        {
            "vision_config": _IDEFICS3_TOWER,
            "text_config": {"model_type": "llama", **TEXT},
            "image_token_id": IMAGE,
        },
        # full tiles with more patches than the table has rows, and padding that covers patches fully or partly
        [_masked((46, 46), (46, 46), (46, 46)), _masked((46, 30), (14, 42)), _masked((29, 36))],
        [27, 18, 9],
    ),
    "internvl": Case(
        "InternVLConfig",
        {
            "vision_config": INTERNVL_TOWER | {
                "attention_bias": True, "use_qk_norm": True, "norm_type": "rms_norm", "use_mask_token": True,
            },
            "text_config": {"model_type": "qwen2", **TEXT},
            "image_token_id": IMAGE,
        },
        [_counted(3), _counted(1), _counted(4)],
        [12, 4, 16],
    ),
    "internvl with a last norm": Case(
        "InternVLConfig",
        {
            "vision_config": INTERNVL_TOWER | {"use_mean_pooling": False, "use_absolute_position_embeddings": False},
            "text_config": {"model_type": "llama", **TEXT},
            "image_token_id": IMAGE,
            "downsample_ratio": 0.25,
        },
        [_counted(3), _counted(1), _counted(4)],
        [3, 1, 4],
    ),
    "internvl with an earlier layer": Case(
        "InternVLConfig",
        {
            "vision_config": INTERNVL_TOWER | {"use_mean_pooling": False},
            "text_config": {"model_type": "qwen2", **TEXT},
            "image_token_id": IMAGE,
            "vision_feature_layer": -2,
        },
        [_counted(3), _counted(1), _counted(4)],
        [12, 4, 16],
    ),
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
    "llava with siglip": Case(
        "LlavaConfig",
        {
            "vision_config": SIGLIP,
            "text_config": {"model_type": "llama", **TEXT},
            "image_token_index": IMAGE,
            "vision_feature_select_strategy": "full",
        },
        [{"pixel_values": pixels(1, 3, 28, 28) + number} for number in range(3)],
        [16, 16, 16],
    ),
    "llava_next": Case(
        "LlavaNextConfig",
        {
            "vision_config": SIGLIP | {"model_type": "clip_vision_model"},
            "text_config": {"model_type": "mistral", "sliding_window": None, **TEXT},
            "image_token_index": IMAGE,
            "image_grid_pinpoints": [[28, 56], [56, 28], [56, 56]],
        },
        [_tiled(3, 20, 100), _tiled(3, 100, 30), _tiled(5, 60, 60)],
        [16 + 2 * 9, 16 + 8 * 3, 16 + 8 * 9],
    ),
    "mistral3": Case(
        "Mistral3Config",
        {
            "vision_config": PIXTRAL_TOWER,
            "text_config": {"model_type": "mistral", "head_dim": 8, "sliding_window": None, **TEXT},
            "image_token_index": IMAGE,
        },
        [_sized(40, 24), _sized(16, 40), _sized(21, 37)],  # the last is not a multiple of patches or merged squares
        [15, 10, 8],
    ),
    "mistral3 with biases": Case(
        "Mistral3Config",
        {
            "vision_config": PIXTRAL_TOWER | {"hidden_act": "silu", "rope_parameters": {"rope_theta": 500.0}},
            "text_config": {"model_type": "ministral3", "head_dim": 8, **TEXT},
            "image_token_index": IMAGE,
            "vision_feature_layer": -2,
            "multimodal_projector_bias": True,
            "spatial_merge_size": 3,
        },
        [_sized(40, 24), _sized(16, 40), _sized(24, 40)],
        [6, 3, 6],
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
            "vision_config": {  # published files have the last two, which nothing reads
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
    "smolvlm": Case(
        "SmolVLMConfig",
        {
            "vision_config": _IDEFICS3_TOWER | {"image_size": 46},
            "text_config": {"model_type": "llama", **TEXT},
            "image_token_id": IMAGE,
            "scale_factor": 3,
        },
        [_masked((46, 46), (46, 46), (46, 46)), _masked((46, 46)), _masked((29, 36), (46, 46))],
        [12, 4, 8],
    ),
}  # fmt: skip
