"""qwen2_5_vl: a tower with rotary positions in two dimensions, windows, and a merger of neighboring patches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from trl_jax.data.images import ImagePatches, grid_positions, spans_of
from trl_jax.hub.config_reader import ConfigReader
from trl_jax.hub.tensor_map import Kernel, Names, concatenated
from trl_jax.hub.vision import VisionFamily
from trl_jax.models.arch import Arch, Connector, VisionArch
from trl_jax.nn.layers import ACTIVATIONS
from trl_jax.nn.rope import Rope

_EPS = 1e-6  # of all norms


def _arch(config: ConfigReader, whole: Any) -> VisionArch:
    size, heads, layers = config.size("hidden_size"), config.size("num_heads"), config.size("depth")
    if size % (4 * heads):
        raise config.wrong("hidden_size", size, f"a multiple of 4 x num_heads {heads}")
    patch, merge, frames = (config.size(f"{of}_size") for of in ("patch", "spatial_merge", "temporal_patch"))
    config.size("window_size"), config.value("tokens_per_second")
    theta, channels = config.section("rope_parameters")["rope_theta"], size // heads
    axes = (0,) * (channels // 4) + (1,) * (channels // 4)
    full = config.value("fullatt_block_indexes")
    blocks = Arch(
        vocab_size=1, hidden_size=size, mlp_size=config.size("intermediate_size"), num_layers=layers, num_heads=heads,
        num_key_heads=heads, head_dim=channels, norm_eps=_EPS, ropes=(Rope(theta, "axial", axes=axes),) * layers,
        windows=(None,) * layers, rotary_dim=channels, activation=config.one_of("hidden_act", ACTIVATIONS, "silu"),
        qkv_bias=True, o_bias=True, mlp_bias=True,
    )  # fmt: skip
    connector = Connector(
        config.size("out_hidden_size"), group=merge**2, norm="rms", norm_eps=_EPS, hidden_size=size * merge**2
    )
    return VisionArch(
        blocks, connector, (config.size("in_channels"), frames, patch, patch),
        full_layers=tuple(layer in full for layer in range(layers)),
    )  # fmt: skip


def _names(arch: VisionArch) -> Names:
    layer, size = "model.visual.blocks.{}.", arch.layers.hidden_size
    fused = concatenated(layer + "attn.qkv", dict.fromkeys("qkv", size))
    return {
        "vision.tower.patches.weight": ("model.visual.patch_embed.proj.weight", Kernel(arch.kernel)),
        "vision.tower.layers.attention_norm": layer + "norm1",
        **{f"vision.tower.layers.attention.{ours}": name for ours, name in fused.items()},
        "vision.tower.layers.attention.o": layer + "attn.proj",
        "vision.tower.layers.mlp_norm": layer + "norm2",
        "vision.tower.layers.mlp.gate": layer + "mlp.gate_proj",
        "vision.tower.layers.mlp.up": layer + "mlp.up_proj",
        "vision.tower.layers.mlp.down": layer + "mlp.down_proj",
        "vision.connector.norm": "model.visual.merger.ln_q",
        "vision.connector.up": "model.visual.merger.mlp.0",
        "vision.connector.down": "model.visual.merger.mlp.2",
    }


def merged_order(grid: tuple[int, int, int], merge: int) -> np.ndarray:
    """Row and column of the patches of a picture in the order of Qwen's image processor, which keeps the `merge` x
    `merge` patches of a feature together: int32 `[P, 2]`."""
    frames, rows, columns = grid
    places = np.stack(np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij"), axis=-1)
    blocks = places.reshape(rows // merge, merge, columns // merge, merge, 2).swapaxes(1, 2)
    return np.tile(blocks.reshape(-1, 2), (frames, 1)).astype(np.int32)


def window_order(grid: tuple[int, int, int], merge: int, window: int) -> tuple[np.ndarray, list[int]]:
    """The features of a picture in the order of its windows of `window` x `window` features, and the number of features
    in each window."""
    frames, rows, columns = grid[0], grid[1] // merge, grid[2] // merge
    numbers = np.arange(frames * rows * columns).reshape(frames, rows, columns)
    parts = [
        numbers[frame, row : row + window, column : column + window].reshape(-1)
        for frame in range(frames)
        for row in range(0, rows, window)
        for column in range(0, columns, window)
    ]
    return np.concatenate(parts), [len(part) for part in parts]


def _patches(processed: Mapping[str, np.ndarray], whole: Any) -> list[ImagePatches]:
    vision, start, found = whole.vision_config, 0, []
    merge = vision.spatial_merge_size
    unit, window = merge**2, vision.window_size // merge // vision.patch_size
    for grid in processed["image_grid_thw"].tolist():
        frames, rows, columns = grid
        count = frames * rows * columns
        order, lengths = window_order(grid, merge, window)
        by_patch = (order[:, None] * unit + np.arange(unit)).reshape(-1)
        found.append(
            ImagePatches(
                processed["pixel_values"][start : start + count][by_patch],
                merged_order(grid, merge)[by_patch],
                spans_of([rows * columns] * frames),
                (np.argsort(order)[:, None] * unit + np.arange(unit)).astype(np.int32),
                np.arange(count // unit, dtype=np.int32),
                windows=spans_of([length * unit for length in lengths]),
                grid=(frames, rows // merge, columns // merge),
            )
        )
        start += count
    return found


def _text(arch: Arch, whole: Any) -> Arch:
    """The same decoder, whose pairs of channels turn with frame, row and column in the sections of the config."""
    sections = whole.text_config.rope_parameters.get("mrope_section") or [16, 24, 24]
    if sum(sections) != arch.head_dim // 2 or len(sections) != 3:
        raise ValueError(
            f"text_config.rope_parameters.mrope_section must be three numbers that sum to half of head_dim "
            f"({arch.head_dim // 2}), got {sections}."
        )
    axes = tuple(axis for axis, count in enumerate(sections) for _ in range(count))
    return replace(arch, ropes=tuple(replace(rope, axes=axes) for rope in arch.ropes))


FAMILIES = (
    VisionFamily(
        "qwen2_5_vl", _arch, _names, _patches, pixels=("pixel_values", "image_grid_thw"), text=_text,
        positions=grid_positions, prefixes=(("model.visual.", "visual."),),
    ),
)  # fmt: skip
