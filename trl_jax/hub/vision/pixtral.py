"""mistral3: a Pixtral tower for images of any size, whose neighboring patches are merged into one feature."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from trl_jax.data.images import ImagePatches, spans_of
from trl_jax.hub.config_reader import ConfigReader
from trl_jax.hub.tensor_map import Kernel, Names
from trl_jax.hub.vision import Pictures, VisionFamily, clip
from trl_jax.hub.vision.gemma3 import squares
from trl_jax.models.arch import Arch, Connector, VisionArch
from trl_jax.nn.layers import ACTIVATIONS
from trl_jax.nn.rope import Rope

_EPS = 1e-5  # of the norms of the tower


def _arch(config: ConfigReader, whole: Any) -> VisionArch:
    clip.require_tower(config, whole, "pixtral")
    patch, channels, text = config.size("patch_size"), config.size("num_channels"), whole.text_config.hidden_size
    config.skip("image_size")  # transformers' tower has no limit
    connector = Connector(
        text, group=whole.spatial_merge_size**2, by_channel=True, norm="rms", norm_eps=whole.text_config.rms_norm_eps,
        merged=True, hidden_size=text, activation=whole.projector_hidden_act, bias=whole.multimodal_projector_bias,
    )  # fmt: skip
    return VisionArch(_blocks(config, whole), connector, (channels, patch, patch), pre_norm=True)


def _blocks(config: ConfigReader, whole: Any) -> Arch:
    """The blocks before the hidden states that features are computed from."""
    config.refuse("attention_dropout", 0.0)
    size, heads = config.size("hidden_size"), config.size("num_attention_heads")
    if size % (4 * heads):
        raise config.wrong("hidden_size", size, f"a multiple of 4 x num_attention_heads {heads}")
    channels, layers = size // heads, clip.layers_read(config, whole.vision_feature_layer)
    config.refuse("head_dim", channels)
    rope = ConfigReader(config.section("rope_parameters"), f"{config.source}: rope_parameters")
    rope.one_of("rope_type", ("axial",), "axial")
    theta = rope.number("rope_theta", 10_000.0, minimum=1.001)
    rope.finish()
    axes = (0,) * (channels // 4) + (1,) * (channels // 4)
    return Arch(
        vocab_size=1, hidden_size=size, mlp_size=config.size("intermediate_size"), num_layers=layers, num_heads=heads,
        num_key_heads=heads, head_dim=channels, norm_eps=_EPS,
        ropes=(Rope(theta, "axial_in_turn", axes=axes),) * layers, windows=(None,) * layers, rotary_dim=channels,
        activation=config.one_of("hidden_act", ACTIVATIONS, "gelu"),
    )  # fmt: skip


def _patches(processed: Mapping[str, np.ndarray], whole: Any) -> list[ImagePatches]:
    size, merge, images = whole.vision_config.patch_size, whole.spatial_merge_size, []
    for pixels, (height, width) in zip(processed["pixel_values"], processed["image_sizes"].tolist(), strict=True):
        rows, columns = height // size, width // size
        if min(rows, columns) < merge:
            raise ValueError(
                f"an image has {rows} x {columns} patches, wanted at least {merge} (spatial_merge_size) rows and "
                "columns. Use the image processor of the checkpoint."
            )
        [patches] = clip.patches_of(pixels[None, :, :height, :width], size)
        groups = squares(rows, columns, merge)
        places = np.stack(np.divmod(np.arange(rows * columns, dtype=np.int32), columns), axis=1)
        tokens = np.arange(len(groups), dtype=np.int32)
        images.append(ImagePatches(patches, places, spans_of([len(patches)]), groups, tokens))
    return images


def _names(arch: VisionArch) -> Names:
    layer = "vision_tower.transformer.layers.{}."
    mlp = {f"vision.tower.layers.mlp.{name}": f"{layer}feed_forward.{name}_proj" for name in ("gate", "up", "down")}
    attention = {f"vision.tower.layers.attention.{name}": f"{layer}attention.{name}_proj" for name in "kvqo"}
    return {
        "vision.tower.patches.weight": ("vision_tower.patch_conv.weight", Kernel(arch.kernel)),
        "vision.tower.pre_norm": "vision_tower.ln_pre",
        "vision.tower.layers.attention_norm": layer + "attention_norm",
        **mlp,
        **attention,
        "vision.tower.layers.mlp_norm": layer + "ffn_norm",
        "vision.connector.norm": "multi_modal_projector.norm",
        "vision.connector.merge": "multi_modal_projector.patch_merger.merging_layer",
        "vision.connector.up": "multi_modal_projector.linear_1",
        "vision.connector.down": "multi_modal_projector.linear_2",
    }


def _square(config: Any) -> int:
    """The side in pixels of the square that each feature is computed from."""
    return config.vision_config.patch_size * config.spatial_merge_size


def _expansion(pictures: Pictures) -> list[str]:
    """The features of each picture row by row, with a token between rows and another at the end."""
    texts = []
    for rows, columns in (pictures.processed["image_sizes"] // _square(pictures.config)).tolist():
        texts.append("[IMG_BREAK]".join([pictures.image_token * columns] * rows) + "[IMG_END]")
    return texts


FAMILIES = (
    VisionFamily(
        "mistral3", _arch, _names, _patches, pixels=("pixel_values", "image_sizes"), prefixes=clip.NEWER_PREFIXES,
        modules=clip.MODULES, options=lambda config: {"patch_size": _square(config)}, expansion=_expansion,
        image_token="image_token_index",
    ),
)  # fmt: skip
