"""idefics3 and smolvlm: a SigLIP-like tower for tiles of a picture, and one linear layer over squares of patches.

A tile may be padded. Its patches take the learned position at the nearest row and column of a whole tile.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from trl_jax.data.images import ImagePatches
from trl_jax.hub.config_reader import ConfigReader
from trl_jax.hub.tensor_map import Names
from trl_jax.hub.vision import Pictures, VisionFamily, clip
from trl_jax.hub.vision.gemma3 import squares
from trl_jax.models.arch import Connector, VisionArch

_FAKE_IMAGE, _GLOBAL_IMAGE = "<fake_token_around_image>", "<global-img>"


def _arch(config: ConfigReader, whole: Any) -> VisionArch:
    config.refuse("attention_dropout", 0.0)
    config.skip("max_image_size", "size")  # of the image processor
    patch, image, channels = (config.size(key) for key in ("patch_size", "image_size", "num_channels"))
    if patch > image:
        raise config.wrong("patch_size", patch, f"at most image_size {image}")
    connector = Connector(whole.text_config.hidden_size, group=whole.scale_factor**2, bias=False)
    return VisionArch(
        clip.tower(config), connector, (channels, patch, patch), patch_bias=True, position_rows=(image // patch) ** 2,
        post_norm=True,
    )  # fmt: skip


def _patches(processed: Mapping[str, np.ndarray], whole: Any) -> list[ImagePatches]:
    """One image from each row of tiles `[N, tiles, C, H, W]`. Rows are padded with tiles of zeros."""
    images = []
    for pixels, masks in zip(processed["pixel_values"], processed["pixel_attention_mask"], strict=True):
        is_tile = pixels.any(axis=(1, 2, 3))
        images.append(_image(pixels[is_tile], masks[is_tile], whole))
    return images


def _image(pixels: np.ndarray, masks: np.ndarray, whole: Any) -> ImagePatches:
    """An image from the pixels of its tiles `[N, C, H, W]`, and masks `[N, H, W]` that are 0 for padding."""
    vision, scale = whole.vision_config, whole.scale_factor
    size, side = vision.patch_size, vision.image_size // vision.patch_size
    rows, columns = (length // size for length in pixels.shape[2:])
    if rows != columns or rows % scale:
        raise ValueError(
            f"a tile has {rows} x {columns} patches, wanted a square whose side is a multiple of scale_factor {scale}. "
            "Use the image processor of the checkpoint."
        )
    masks = masks[:, : rows * size, : columns * size].reshape(-1, rows, size, columns, size).any(axis=(2, 4))
    patches, squared = clip.patches_of(pixels, size), squares(rows, columns, scale)
    parts = {"patches": [], "places": [], "spans": [], "groups": [], "table": []}
    for number, mask in enumerate(masks):
        first, seen = number * rows * columns, mask.reshape(-1)
        order = np.argsort(~seen, kind="stable")  # so that the patches that others attend to are in one range
        down, across = nearest(mask[:, 0].sum(), rows, side), nearest(mask[0].sum(), columns, side)
        table = np.where(mask, down[:, None] * side + across, 0).reshape(-1, 1)
        parts["patches"].append(patches[number][order])
        parts["places"].append(np.stack(np.divmod(order, columns), axis=1))
        parts["spans"].append(np.tile([first, first + seen.sum()], (len(order), 1)))
        parts["groups"].append(first + np.argsort(order)[squared])
        parts["table"].append(table[order])
    patches, *others = (np.concatenate(arrays) for arrays in parts.values())
    places, spans, groups, table = (array.astype(np.int32) for array in others)
    return ImagePatches(patches, places, spans, groups, np.arange(len(groups), dtype=np.int32), table=table)


def nearest(count: int, padded: int, side: int) -> np.ndarray:
    """The nearest row of a table of `side` rows for each row of patches of a picture, of which `count` are not padding:
    int `[padded]`.

    Rounds as transformers does, in float32.
    """
    limits = np.arange(1 / side, 1.0, 1 / side).astype(np.float32)
    shares = np.arange(padded, dtype=np.float32) * (np.float32(1) / np.float32(count))
    return np.searchsorted(limits, np.minimum(shares, np.float32(1 - 1e-6)), side="right")


def _names(arch: VisionArch) -> Names:
    return clip.tower_names(arch, "model.vision_model.") | {
        "vision.connector.down": "model.connector.modality_projection.proj"
    }


def _idefics3(pictures: Pictures) -> list[str]:
    return _expansion(pictures, _FAKE_IMAGE, _GLOBAL_IMAGE)


def _smolvlm(pictures: Pictures) -> list[str]:
    # Older tokenizers have these tokens without an attribute.
    fake = getattr(pictures.tokenizer, "fake_image_token", _FAKE_IMAGE)
    return _expansion(pictures, fake, getattr(pictures.tokenizer, "global_image_token", _GLOBAL_IMAGE))


def _expansion(pictures: Pictures, fake: str, whole: str) -> list[str]:
    """The tiles of each picture, named by row and column with a line for each row, and then the whole picture."""
    config, texts = pictures.config, []
    side = pictures.processed["pixel_values"].shape[-1] // config.vision_config.patch_size // config.scale_factor
    tokens = pictures.image_token * side**2
    for rows, columns in zip(*(np.ravel(pictures.processed[name]).tolist() for name in ("rows", "cols")), strict=True):
        lines = [
            "".join(f"{fake}<row_{row}_col_{column}>{tokens}" for column in range(1, columns + 1)) + "\n"
            for row in range(1, rows + 1)
        ]
        if lines:
            lines.append("\n")
        texts.append("".join(lines) + f"{fake}{whole}{tokens}{fake}")
    return texts


FAMILIES = tuple(
    VisionFamily(
        name, _arch, _names, _patches, pixels=("pixel_values", "pixel_attention_mask"), other_outputs=("rows", "cols"),
        options=lambda config: {"return_row_col_info": True}, nested=True, expansion=expansion,
    )
    for name, expansion in (("idefics3", _idefics3), ("smolvlm", _smolvlm))
)  # fmt: skip
