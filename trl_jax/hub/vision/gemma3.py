"""gemma3: a SigLIP tower with square images of one size, whose outputs are averaged over squares of patches. The tokens
of an image attend to each other in both directions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from trl_jax.data.images import ImagePatches, spans_of
from trl_jax.hub.config_reader import ConfigReader
from trl_jax.hub.tensor_map import Names, Rows
from trl_jax.hub.vision import Pictures, VisionFamily, clip
from trl_jax.models.arch import Arch, Connector, VisionArch

# Null in published files. transformers' processor always sets these values.
_OPTIONS = {"do_convert_rgb": True, "do_pan_and_scan": False}


def _arch(config: ConfigReader, whole: Any) -> VisionArch:
    clip.require_tower(config, whole, clip.SIGLIP)
    layers = clip.tower(config)
    patch, image, channels = config.size("patch_size"), config.size("image_size"), config.size("num_channels", 3)
    config.skip("vision_use_head")  # for a pooled output, which is not used
    side, pooled = _sides(whole)
    if not 0 < pooled <= side:
        raise ValueError(
            f"{config.source}: mm_tokens_per_image is {whole.mm_tokens_per_image}, wanted a square of 1 to {side}, the "
            "patches along a side of an image."
        )
    connector = Connector(
        whole.text_config.hidden_size, group=(side // pooled) ** 2, pooled=True, norm="rms_one_plus",
        norm_eps=layers.norm_eps, norm_grouped=True, bias=False,
    )  # fmt: skip
    return VisionArch(
        layers, connector, (channels, patch, patch), patch_bias=True, position_rows=(image // patch) ** 2,
        post_norm=True,
    )  # fmt: skip


def _sides(whole: Any) -> tuple[int, int]:
    """The numbers of patches and of features along a side of an image."""
    return whole.vision_config.image_size // whole.vision_config.patch_size, int(whole.mm_tokens_per_image**0.5)


def squares(rows: int, columns: int, size: int) -> np.ndarray:
    """The patches of each square of `size` x `size` patches in a picture of `rows` x `columns`, row by row: int32
    `[N, size x size]`. Patches that fill no square are left out."""
    numbers = np.arange(rows * columns, dtype=np.int32).reshape(rows, columns)
    down, across = rows // size, columns // size
    blocks = numbers[: down * size, : across * size].reshape(down, size, across, size)
    return blocks.swapaxes(1, 2).reshape(-1, size**2)


def _patches(processed: Mapping[str, np.ndarray], whole: Any) -> list[ImagePatches]:
    side, pooled = _sides(whole)
    groups = squares(side, side, side // pooled)
    tokens, numbers = np.arange(len(groups), dtype=np.int32), np.arange(side**2, dtype=np.int32)
    places = np.stack(np.divmod(numbers, side), axis=1)
    return [
        ImagePatches(patches, places, spans_of([side**2]), groups, tokens, table=numbers[:, None])
        for patches in clip.patches_of(processed["pixel_values"], whole.vision_config.patch_size)
    ]


def _names(arch: VisionArch) -> Names:
    size = arch.connector.out_size
    return clip.siglip_names(arch, "vision_tower.") | {
        "vision.connector.down.weight": (
            "multi_modal_projector.mm_input_projection_weight", Rows(0, size, size, transposed=True)
        ),
        "vision.connector.norm": "multi_modal_projector.mm_soft_emb_norm",
    }  # fmt: skip


def _text(arch: Arch, whole: Any) -> Arch:
    """The same decoder, but in all layers the tokens of an image attend to each other. As in transformers, a window
    shorter than the image hides tokens of the image that are too far before a token, but none that follow it."""
    return replace(arch, image_attention=(True,) * arch.num_layers)


def _expansion(pictures: Pictures) -> list[str]:
    """Each picture between two markers, and then its crops (pan and scan)."""
    side = _sides(pictures.config)[1]
    inside = pictures.token("boi_token") + pictures.image_token * side**2 + pictures.token("eoi_token")
    whole, texts = f"\n\n{inside}\n\n", []
    for crops in np.ravel(pictures.processed["num_crops"]).tolist():
        more = f"Here is the original image {whole} and here are some crops to help you see better "
        texts.append(more + " ".join([whole] * crops) if crops else whole)
    return texts


FAMILIES = (
    VisionFamily(
        "gemma3", _arch, _names, _patches, other_outputs=("num_crops",), options=lambda config: _OPTIONS, text=_text,
        prefixes=clip.PREFIXES, modules=clip.MODULES, placeholder="boi_token", expansion=_expansion,
        image_token="image_token_index",
    ),
)  # fmt: skip
