"""llava_next: llava with a whole picture and tiles of it (Liu et al. 2024, "LLaVA-NeXT").

The features of the tiles form one large picture. Padding is cut off, and a learned separator follows each row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from trl_jax.data.images import ImagePatches, spans_of
from trl_jax.hub.config_reader import ConfigReader
from trl_jax.hub.tensor_map import Names
from trl_jax.hub.vision import VisionFamily, clip
from trl_jax.models.arch import VisionArch

_SEPARATOR = -2  # its number in `ImagePatches.tokens`


def _arch(config: ConfigReader, whole: Any) -> VisionArch:
    base = clip.arch(config, whole)
    expected = "default" if base.class_token else "full"
    if whole.vision_feature_select_strategy != expected:
        raise ValueError(
            f"{config.source}: vision_feature_select_strategy is {whole.vision_feature_select_strategy!r}, wanted "
            f"{expected!r} for a {whole.vision_config.model_type}: the features of a tile must form a square."
        )
    return replace(base, connector=replace(base.connector, separators=1))


def best_resolution(size: Sequence[int], choices: Sequence[Sequence[int]]) -> tuple[int, int]:
    """The height and width among `choices` that keep most pixels of a picture of this height and width; of several, the
    one with the least padding."""

    def rating(choice: Sequence[int]) -> tuple[int, int]:
        scale = min(choice[1] / size[1], choice[0] / size[0])
        effective = min(int(size[1] * scale) * int(size[0] * scale), size[0] * size[1])
        return effective, effective - choice[0] * choice[1]

    height, width = max(choices, key=rating)
    return height, width


def without_padding(size: Sequence[int], rows: int, columns: int) -> tuple[slice, slice]:
    """The rows and columns of a grid that a picture of this height and width fills, centred, without distortion."""
    height, width = size
    if width / height > columns / rows:
        margin = (rows - int(round(height * (columns / width), 7))) // 2
        return slice(margin, rows - margin), slice(0, columns)
    margin = (columns - int(round(width * (rows / height), 7))) // 2
    return slice(0, rows), slice(margin, columns - margin)


def _patches(processed: Mapping[str, np.ndarray], whole: Any) -> list[ImagePatches]:
    vision = whole.vision_config
    return [
        _image(pixels, size, whole, vision.image_size, vision.patch_size)
        for pixels, size in zip(processed["pixel_values"], processed["image_sizes"].tolist(), strict=True)
    ]


def _image(pixels: np.ndarray, size: Sequence[int], whole: Any, tile: int, patch: int) -> ImagePatches:
    """An image from the padded pixels of a picture and its tiles `[N, C, H, W]`, and its original height and width."""
    height, width = best_resolution(size, whole.image_grid_pinpoints)
    down, across, side = height // tile, width // tile, tile // patch
    classes = int(whole.vision_config.model_type == clip.CLIP)  # a class token in front of each tile
    patches = np.pad(clip.patches_of(pixels[: 1 + down * across], patch), ((0, 0), (classes, 0), (0, 0)))
    tiles, length, channels = patches.shape
    numbers = np.arange(tiles * length, dtype=np.int32).reshape(tiles, length)[:, classes:]
    grid = numbers[1:].reshape(down, across, side, side).swapaxes(1, 2).reshape(down * side, across * side)
    grid = grid[without_padding(size, *grid.shape)]
    groups = np.concatenate([numbers[0], grid.reshape(-1)])
    of_grid = np.arange(side**2, len(groups), dtype=np.int32).reshape(grid.shape)
    lines = np.pad(of_grid, ((0, 0), (0, 1)), constant_values=_SEPARATOR)
    return ImagePatches(
        patches.reshape(-1, channels), np.zeros((tiles * length, 2), np.int32), spans_of([length] * tiles),
        groups[:, None], np.concatenate([np.arange(side**2, dtype=np.int32), lines.reshape(-1)]),
        table=np.tile(np.arange(length, dtype=np.int32), tiles)[:, None],
    )  # fmt: skip


def _names(arch: VisionArch) -> Names:
    return clip.names(arch) | {"vision.connector.separators": "image_newline"}


FAMILIES = (
    VisionFamily(
        "llava_next", _arch, _names, _patches, pixels=("pixel_values", "image_sizes"),
        prefixes=(*clip.PREFIXES, ("image_newline", "model.image_newline")),
        modules=(*clip.MODULES, ("image_newline", "model.image_newline")),
        options=lambda config: {"do_pad": True}, image_token="image_token_index",
    ),
)  # fmt: skip
