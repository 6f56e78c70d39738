"""qwen2_vl and qwen2_5_vl: towers with rotary positions in two dimensions and a merger of neighbouring patches. Most
layers of the latter attend within windows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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

EPS = 1e-6  # of all norms
PIXELS = ("pixel_values", "image_grid_thw")

# Towers


def blocks(config: ConfigReader, size: int, mlp_size: int, activation: str, **fields: Any) -> Arch:
    """The blocks of a tower of this width, whose queries and keys are rotated by row and column.

    Args:
        activation: the default of `hidden_act`.
        fields: more fields of the Arch.
    """
    heads, layers = config.size("num_heads"), config.size("depth")
    if size % (4 * heads):
        raise ValueError(f"{config.source}: the tower's width {size} must be a multiple of 4 x num_heads {heads}.")
    channels = size // heads
    return Arch(
        vocab_size=1, hidden_size=size, mlp_size=mlp_size, num_layers=layers, num_heads=heads, num_key_heads=heads,
        head_dim=channels, norm_eps=EPS, ropes=(_rope(config, channels),) * layers, windows=(None,) * layers,
        rotary_dim=channels, activation=config.one_of("hidden_act", ACTIVATIONS, activation), qkv_bias=True,
        o_bias=True, mlp_bias=True, **fields,
    )  # fmt: skip


def _rope(config: ConfigReader, channels: int) -> Rope:
    """Half of the channel pairs rotate with the row, the other half with the column."""
    source = f"{config.source}: rope_parameters"
    section = ConfigReader(config.section("rope_parameters"), source)
    section.refuse("rope_type", "axial")
    theta = section.number("rope_theta", 10_000.0, minimum=1.001)
    section.finish()
    return Rope(theta, "axial", axes=(0,) * (channels // 4) + (1,) * (channels // 4))


def kernel(config: ConfigReader) -> tuple[int, int, int, int]:
    """Channels, frames, rows and columns of a patch."""
    patch = config.size("patch_size")
    return config.size("in_channels"), config.size("temporal_patch_size"), patch, patch


def merger(config: ConfigReader, size: int, out_size: int, norm: str) -> Connector:
    """Two linear maps of the concatenated patches of a square, for a tower of width `size`."""
    group = config.size("spatial_merge_size") ** 2
    return Connector(out_size, group=group, norm=norm, norm_eps=EPS, hidden_size=size * group)


def _whole_image_arch(config: ConfigReader, whole: Any) -> VisionArch:
    size = config.size("embed_dim")
    mlp_size = int(size * config.number("mlp_ratio"))
    layers = blocks(config, size, mlp_size, "quick_gelu", norm="layer", gated=False)
    return VisionArch(layers, merger(config, size, config.size("hidden_size"), "layer"), kernel(config))


def _windowed_arch(config: ConfigReader, whole: Any) -> VisionArch:
    size = config.size("hidden_size")
    config.size("window_size"), config.value("tokens_per_second")  # read in `_windowed_patches`; only for videos
    layers = blocks(config, size, config.size("intermediate_size"), "silu")
    full = config.value("fullatt_block_indexes")
    return VisionArch(
        layers, merger(config, size, config.size("out_hidden_size"), "rms"), kernel(config),
        full_layers=tuple(layer in full for layer in range(layers.num_layers)),
    )  # fmt: skip


def tower_names(arch: VisionArch, mlp: dict[str, str]) -> Names:
    """The names of a tower on disk; `mlp` maps our linear maps of a block's MLP to theirs."""
    layer, size = "model.visual.blocks.{}.", arch.layers.hidden_size
    fused = concatenated(layer + "attn.qkv", dict.fromkeys("qkv", size))
    return {
        "vision.tower.patches.weight": ("model.visual.patch_embed.proj.weight", Kernel(arch.kernel)),
        "vision.tower.patches.bias": "model.visual.patch_embed.proj.bias",
        "vision.tower.position_embed": "model.visual.pos_embed",
        "vision.tower.layers.attention_norm": layer + "norm1",
        "vision.tower.layers.mlp_norm": layer + "norm2",
        **{f"vision.tower.layers.attention.{ours}": name for ours, name in fused.items()},
        "vision.tower.layers.attention.o": layer + "attn.proj",
        **{f"vision.tower.layers.mlp.{ours}": f"{layer}mlp.{name}" for ours, name in mlp.items()},
    }


def _with_merger(names: Names) -> Names:
    return names | {
        "vision.connector.norm": "model.visual.merger.ln_q",
        "vision.connector.up": "model.visual.merger.mlp.0",
        "vision.connector.down": "model.visual.merger.mlp.2",
    }


def _whole_image_names(arch: VisionArch) -> Names:
    return _with_merger(tower_names(arch, {"up": "fc1", "down": "fc2"}))


def _windowed_names(arch: VisionArch) -> Names:
    return _with_merger(tower_names(arch, {name: f"{name}_proj" for name in ("gate", "up", "down")}))


# Patches


def merged_order(grid: tuple[int, int, int], merge: int) -> np.ndarray:
    """Row and column of the patches of a picture in the order of Qwen's image processor, which keeps the `merge` x
    `merge` patches of a feature together: int32 `[P, 2]`."""
    frames, rows, columns = grid
    places = np.stack(np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij"), axis=-1)
    squares = places.reshape(rows // merge, merge, columns // merge, merge, 2).swapaxes(1, 2)
    return np.tile(squares.reshape(-1, 2), (frames, 1)).astype(np.int32)


def merged_images(processed: Mapping[str, np.ndarray], merge: int) -> Iterator[tuple[ImagePatches, tuple]]:
    """The images of Qwen's image processor, whose patches attend to all patches of their frame, and the frames, rows
    and columns of their patches."""
    start = 0
    for frames, rows, columns in processed["image_grid_thw"].tolist():
        count, grid = frames * rows * columns, (frames, rows, columns)
        groups = np.arange(count, dtype=np.int32).reshape(-1, merge**2)
        image = ImagePatches(
            processed["pixel_values"][start : start + count], merged_order(grid, merge),
            spans_of([rows * columns] * frames), groups, np.arange(len(groups), dtype=np.int32),
            grid=(frames, rows // merge, columns // merge),
        )  # fmt: skip
        yield image, grid
        start += count


def _whole_image_patches(processed: Mapping[str, np.ndarray], whole: Any) -> list[ImagePatches]:
    return [image for image, _ in merged_images(processed, whole.vision_config.spatial_merge_size)]


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


def _windowed_patches(processed: Mapping[str, np.ndarray], whole: Any) -> list[ImagePatches]:
    vision, images = whole.vision_config, []
    merge = vision.spatial_merge_size
    window = vision.window_size // merge // vision.patch_size
    for image, grid in merged_images(processed, merge):
        order, lengths = window_order(grid, merge, window)
        by_patch = image.groups[order].reshape(-1)
        moved = image._replace(
            patches=image.patches[by_patch], places=image.places[by_patch], groups=image.groups[np.argsort(order)],
            windows=spans_of([length * merge**2 for length in lengths]),
        )  # fmt: skip
        images.append(moved)
    return images


# The text part


def with_axes(arch: Arch, axes: tuple[int, ...]) -> Arch:
    """The same decoder, whose channel pairs rotate with these axes: 0 frame, 1 row, 2 column."""
    return replace(arch, ropes=tuple(None if rope is None else replace(rope, axes=axes) for rope in arch.ropes))


def read_sections(whole: Any, default: list[int]) -> list[int]:
    """`mrope_section`: numbers of channel pairs that rotate with the frame, the row, the column, the frame, ..."""
    sections = whole.text_config.rope_parameters.get("mrope_section", default)
    if not isinstance(sections, list) or not all(type(n) is int and n >= 0 for n in sections):
        raise ValueError(
            f"text_config.rope_parameters.mrope_section must be a list of whole numbers, got {sections!r}."
        )
    return sections


def _text(arch: Arch, whole: Any) -> Arch:
    """The sections are contiguous."""
    sections = read_sections(whole, [16, 24, 24])
    if sum(sections) != arch.head_dim // 2:
        raise ValueError(
            f"text_config.rope_parameters.mrope_section must be numbers that sum to half of head_dim "
            f"({arch.head_dim // 2}), got {sections}."
        )
    return with_axes(arch, tuple(number % 3 for number, count in enumerate(sections) for _ in range(count)))


_COMMON = {"pixels": PIXELS, "text": _text, "positions": grid_positions, "prefixes": (("model.visual.", "visual."),)}
FAMILIES = (
    VisionFamily("qwen2_5_vl", _windowed_arch, _windowed_names, _windowed_patches, **_COMMON),
    VisionFamily("qwen2_vl", _whole_image_arch, _whole_image_names, _whole_image_patches, **_COMMON),
)
