"""internvl: an InternViT tower for tiles of a picture, and two linear layers over squares of patches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from trl_jax.data.images import ImagePatches, spans_of
from trl_jax.hub.config_reader import ConfigReader
from trl_jax.hub.tensor_map import Kernel, Names, OneRow
from trl_jax.hub.vision import Pictures, VisionFamily, clip, image_tokens
from trl_jax.hub.vision.gemma3 import squares
from trl_jax.models.arch import Arch, Connector, VisionArch
from trl_jax.nn.layers import ACTIVATIONS

_QK_EPS = 1e-6  # of the norms of queries and keys
_NORMS = {"layer_norm": "layer", "rms_norm": "rms"}


def _arch(config: ConfigReader, whole: Any) -> VisionArch:
    clip.require_tower(config, whole, "internvl_vision")
    image, patch = _square(config, "image_size"), _square(config, "patch_size")
    side, merge = image // patch, _merge(config, whole)
    if side < 1 or side % merge:
        raise ValueError(
            f"{config.source}: image_size is {image}, which has {side} patches along a side, wanted a multiple of "
            f"{merge} (downsample_ratio {whole.downsample_ratio})."
        )
    if whole.vision_feature_select_strategy != "default":
        raise ValueError(
            f"{config.source}: vision_feature_select_strategy is {whole.vision_feature_select_strategy!r}, wanted "
            "'default': the features of a tile must form a square."
        )
    config.skip("use_mask_token")  # for images with masked patches
    config.skip("layer_scale_init_value")
    layers, text = _blocks(config, whole), whole.text_config.hidden_size
    last_norm = not config.flag("use_mean_pooling", True) and whole.vision_feature_layer == -1
    if last_norm and layers.norm != "layer":
        raise config.wrong("use_mean_pooling", False, "true with norm_type rms_norm")
    connector = Connector(
        text, group=merge**2, norm="layer", norm_eps=1e-5, norm_grouped=True, hidden_size=text,
        activation=whole.projector_hidden_act,
    )  # fmt: skip
    positions = config.flag("use_absolute_position_embeddings", True)
    return VisionArch(
        layers, connector, (config.size("num_channels"), patch, patch), patch_bias=True, class_token=True,
        position_rows=side**2 + 1 if positions else None, post_norm=last_norm,
    )  # fmt: skip


def _square(config: ConfigReader, key: str) -> int:
    """The side of an image or a patch, whose height and width are equal."""
    value = config.value(key)
    if len(value) != 2 or value[0] != value[1] or type(value[0]) is not int or value[0] < 1:
        raise config.wrong(key, value, "an equal height and width")
    return value[0]


def _merge(config: ConfigReader, whole: Any) -> int:
    """How many patches along each side make up one feature."""
    merge = round(1 / whole.downsample_ratio) if whole.downsample_ratio > 0 else 0
    if merge < 1 or merge * whole.downsample_ratio != 1:
        raise ValueError(f"{config.source}: downsample_ratio is {whole.downsample_ratio}, wanted 1, 1/2, 1/4, ...")
    return merge


def _blocks(config: ConfigReader, whole: Any) -> Arch:
    """The blocks before the hidden states that features are computed from."""
    config.fix(dict.fromkeys(("attention_dropout", "hidden_dropout_prob", "projection_dropout"), 0.0))
    size, heads, eps = config.size("hidden_size"), config.size("num_attention_heads"), config.number("layer_norm_eps")
    if size % heads:
        raise config.wrong("hidden_size", size, f"a multiple of num_attention_heads {heads}")
    normed = config.flag("use_qk_norm")
    if normed and eps != _QK_EPS:
        raise config.wrong("layer_norm_eps", eps, f"{_QK_EPS} with use_qk_norm")
    layers = clip.layers_read(config, whole.vision_feature_layer)
    return Arch(
        vocab_size=1, hidden_size=size, mlp_size=config.size("intermediate_size"), num_layers=layers, num_heads=heads,
        num_key_heads=heads, head_dim=size // heads, norm_eps=eps, ropes=(None,) * layers, windows=(None,) * layers,
        rotary_dim=0, norm=_NORMS[config.one_of("norm_type", _NORMS)],
        activation=config.one_of("hidden_act", ACTIVATIONS), gated=False, qkv_bias=config.flag("attention_bias"),
        o_bias=True, mlp_bias=True, qk_norm="full" if normed else None, layer_scale=True,
    )  # fmt: skip


def _patches(processed: Mapping[str, np.ndarray], whole: Any) -> list[ImagePatches]:
    """One image per picture, from its `num_patches` consecutive tiles in `pixel_values`; if these numbers are not
    known, one per tile."""
    height, width = whole.vision_config.image_size
    if processed["pixel_values"].shape[2:] != (height, width):
        raise ValueError(
            f"tiles have {' x '.join(map(str, processed['pixel_values'].shape[2:]))} pixels, wanted {height} x {width} "
            "(image_size). Use the image processor of the checkpoint."
        )
    patch, merge = whole.vision_config.patch_size[0], round(1 / whole.downsample_ratio)
    tiles_of_each = processed.get("num_patches", np.ones(len(processed["pixel_values"]), np.int32))
    side, ends = height // patch, np.cumsum(tiles_of_each).tolist()
    images = []
    for start, end in zip([0, *ends], ends, strict=False):
        patches = clip.patches_of(processed["pixel_values"][start:end], patch)
        patches = np.pad(patches, ((0, 0), (1, 0), (0, 0)))  # a class token in front of each tile
        tiles, length, channels = patches.shape
        firsts = 1 + length * np.arange(tiles, dtype=np.int32)
        groups = (firsts[:, None, None] + squares(side, side, merge)).reshape(-1, merge**2)
        image = ImagePatches(
            patches.reshape(-1, channels), np.zeros((tiles * length, 2), np.int32), spans_of([length] * tiles), groups,
            np.arange(len(groups), dtype=np.int32),
            table=np.tile(np.arange(length, dtype=np.int32), tiles)[:, None],
        )  # fmt: skip
        images.append(image)
    return images


def _names(arch: VisionArch) -> Names:
    embeddings, layer = "vision_tower.embeddings.", "vision_tower.encoder.layer.{}."
    return {
        "vision.tower.class_embed": (embeddings + "cls_token", OneRow(2)),
        "vision.tower.position_embed.weight": (embeddings + "position_embeddings", OneRow()),
        "vision.tower.patches.weight": (embeddings + "patch_embeddings.projection.weight", Kernel(arch.kernel)),
        "vision.tower.patches.bias": embeddings + "patch_embeddings.projection.bias",
        "vision.tower.layers.attention_scale": layer + "lambda_1",
        "vision.tower.layers.mlp_scale": layer + "lambda_2",
        "vision.tower.layers.attention.q": layer + "attention.q_proj",
        "vision.tower.layers.attention.k": layer + "attention.k_proj",
        "vision.tower.layers.attention.v": layer + "attention.v_proj",
        "vision.tower.layers.attention.o": layer + "attention.projection_layer",
        "vision.tower.layers.attention.q_norm": layer + "attention.q_norm",
        "vision.tower.layers.attention.k_norm": layer + "attention.k_norm",
        "vision.tower.layers.mlp.up": layer + "mlp.fc1",
        "vision.tower.layers.mlp.down": layer + "mlp.fc2",
        "vision.tower.layers.attention_norm": layer + "layernorm_before",
        "vision.tower.layers.mlp_norm": layer + "layernorm_after",
        "vision.tower.post_norm": "vision_tower.layernorm",
        "vision.connector.norm": "multi_modal_projector.layer_norm",
        "vision.connector.up": "multi_modal_projector.linear_1",
        "vision.connector.down": "multi_modal_projector.linear_2",
    }


def _expansion(pictures: Pictures) -> list[str]:
    start, end = pictures.token("start_image_token"), pictures.token("end_image_token")
    return [f"{start}{tokens}{end}" for tokens in image_tokens(pictures)]


FAMILIES = (
    VisionFamily(
        "internvl", _arch, _names, _patches, pixels=("pixel_values", "num_patches"), optional=("num_patches",),
        prefixes=clip.NEWER_PREFIXES,
        modules=clip.MODULES, options=lambda config: {"crop_to_patches": True}, expansion=_expansion,
    ),
)  # fmt: skip
