"""qwen3_vl, qwen3_vl_moe, qwen3_5 and qwen3_5_moe: Qwen towers with rotary positions and, interpolated from a table,
learned ones. The towers of qwen3_vl also add features to the first layers of the decoder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from trl_jax.data.images import ImagePatches, grid_positions
from trl_jax.hub.config_reader import ConfigReader
from trl_jax.hub.tensor_map import Names
from trl_jax.hub.vision import VisionFamily
from trl_jax.hub.vision.qwen import PIXELS, blocks, kernel, merged_images, merger, read_sections, tower_names, with_axes
from trl_jax.models.arch import Arch, VisionArch


def _arch(config: ConfigReader, whole: Any) -> VisionArch:
    config.refuse("deepstack_visual_indexes", [])
    return _tower(config)


def _deepstack_arch(config: ConfigReader, whole: Any) -> VisionArch:
    indexes = config.value("deepstack_visual_indexes")
    base = _tower(config)
    possible = range(base.layers.num_layers)
    if not all(type(index) is int and index in possible for index in indexes) or list(indexes) != sorted({*indexes}):
        raise config.wrong(
            "deepstack_visual_indexes", indexes, f"increasing layers of the {len(possible)} of the tower"
        )
    if not indexes:
        return base
    connector = replace(base.connector, norm_grouped=True)
    return replace(base, deepstack=tuple(indexes), deepstack_connector=connector)


def _tower(config: ConfigReader) -> VisionArch:
    size = config.size("hidden_size")
    mlp_size = config.size("intermediate_size")
    layers = blocks(config, size, mlp_size, "gelu_pytorch_tanh", norm="layer", gated=False)
    return VisionArch(
        layers, merger(config, size, config.size("out_hidden_size"), "layer"), kernel(config), patch_bias=True,
        position_rows=config.size("num_position_embeddings"),
    )  # fmt: skip


def _names(arch: VisionArch) -> Names:
    def of_merger(ours: str, theirs: str) -> Names:
        parts = {"norm": "norm", "up": "linear_fc1", "down": "linear_fc2"}
        return {f"vision.{ours}.{part}": f"model.visual.{theirs}.{name}" for part, name in parts.items()}

    names = tower_names(arch, {"up": "linear_fc1", "down": "linear_fc2"}) | of_merger("connector", "merger")
    return names | (of_merger("deep_connectors", "deepstack_merger_list.{}") if arch.deepstack else {})


def _patches(processed: Mapping[str, np.ndarray], whole: Any) -> list[ImagePatches]:
    vision, images = whole.vision_config, []
    side = int(vision.num_position_embeddings**0.5)
    for image, (_, rows, columns) in merged_images(processed, vision.spatial_merge_size):
        table, weights = interpolated(image.places, (rows, columns), side)
        images.append(image._replace(table=table, table_weights=weights))
    return images


def interpolated(places: np.ndarray, size: tuple[int, int], side: int) -> tuple[np.ndarray, np.ndarray]:
    """Bilinear interpolation of a table of `side` x `side` positions at the patches of an image of `size` rows and
    columns, whose corners are those of the table.

    Args:
        places: int `[P, 2]`, row and column of each patch.

    Returns:
        Indices into the flattened table, int32 `[P, 4]`, and their weights, float32 `[P, 4]`.
    """
    last = np.maximum(np.asarray(size) - 1, 1).astype(np.float32)
    exact = places.astype(np.float32) * np.float32(side - 1) / last
    below = np.floor(exact)
    share = exact - below
    corners = np.minimum(np.stack([below, below + 1], axis=-1), side - 1).astype(np.int32)  # [P, axis, 2]
    weights = np.stack([1 - share, share], axis=-1)
    rows, columns = corners[:, 0, :, None], corners[:, 1, None, :]
    both = weights[:, 0, :, None] * weights[:, 1, None, :]
    return (rows * side + columns).reshape(-1, 4), both.reshape(-1, 4)


def _text(arch: Arch, whole: Any, *, default: list[int]) -> Arch:
    """The sections are interleaved: channel pairs rotate with frame, row, column, frame, ... until the sections of row
    and column are used up. All other pairs rotate with the frame."""
    sections, axes = read_sections(whole, default), [0] * ((arch.rotary_dim + 1) // 2)
    if len(sections) < 3:
        raise ValueError(f"text_config.rope_parameters.mrope_section must be three whole numbers, got {sections}.")
    for axis in (1, 2):
        for pair in range(axis, min(3 * sections[axis], len(axes)), 3):
            axes[pair] = axis
    return with_axes(arch, tuple(axes))


def _family(model_type: str, arch: Any, default: list[int]) -> VisionFamily:
    text = partial(_text, default=default)
    return VisionFamily(model_type, arch, _names, _patches, pixels=PIXELS, text=text, positions=grid_positions)


FAMILIES = (
    _family("qwen3_5", _arch, [11, 11, 10]),
    _family("qwen3_5_moe", _arch, [11, 11, 10]),
    _family("qwen3_vl", _deepstack_arch, [24, 20, 20]),
    _family("qwen3_vl_moe", _deepstack_arch, [24, 20, 20]),
)
