"""gemma4: a tower with positions in two dimensions for images of any shape, whose outputs are averaged over squares of
patches. In some models, the tokens of an image attend to each other in both directions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from trl_jax.data.images import ImagePatches, spans_of
from trl_jax.hub.config_reader import ConfigReader
from trl_jax.hub.tensor_map import Names, Tables
from trl_jax.hub.vision import Pictures, VisionFamily, image_tokens
from trl_jax.models.arch import Arch, Connector, VisionArch
from trl_jax.nn.layers import ACTIVATIONS
from trl_jax.nn.rope import Rope

_LIMITS = ("input_min", "input_max", "output_min", "output_max")


def _arch(config: ConfigReader, whole: Any) -> VisionArch:
    size, heads, layers = (config.size(key) for key in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    key_heads, channels, patch = (config.size(key) for key in ("num_key_value_heads", "head_dim", "patch_size"))
    if heads % key_heads:
        raise config.wrong("num_attention_heads", heads, f"a multiple of num_key_value_heads {key_heads}")
    if channels % 4:
        raise config.wrong("head_dim", channels, "a multiple of 4: two axes turn pairs of channels")
    # transformers' tower has no biases and no limit; TRL trains with the default dropout, 0
    config.skip("attention_bias", "attention_dropout", "max_position_embeddings")
    rope = ConfigReader(config.section("rope_parameters"), f"{config.source}: rope_parameters")
    rope.one_of("rope_type", ("axial",), "axial")
    theta, eps = rope.number("rope_theta", 100.0), config.number("rms_norm_eps", 1e-6)
    rope.finish()
    axes = (1,) * (channels // 4) + (0,) * (channels // 4)  # columns first
    blocks = Arch(
        vocab_size=1, hidden_size=size, mlp_size=config.size("intermediate_size"), num_layers=layers, num_heads=heads,
        num_key_heads=key_heads, head_dim=channels, norm_eps=eps, ropes=(Rope(theta, "axial", axes=axes),) * layers,
        windows=(None,) * layers, rotary_dim=channels, rope_sections=2, block="sandwich", norm="rms_float32",
        qk_norm="head", qk_norm_kind="rms_float32", v_norm=True, attention_scales=(1.0,) * layers,
        activation=config.one_of("hidden_activation", ACTIVATIONS, "gelu_pytorch_tanh"),
        clipped_maps=config.flag("use_clipped_linears"),
    )  # fmt: skip
    connector = Connector(
        whole.text_config.hidden_size, group=config.size("pooling_kernel_size") ** 2, pooled=True, scale=size**0.5,
        standardized=config.flag("standardize"), norm="rms_plain", norm_eps=eps, norm_grouped=True, bias=False,
    )  # fmt: skip
    return VisionArch(blocks, connector, (patch, patch, 3), position_rows=2 * config.size("position_embedding_size"))


def _patches(processed: Mapping[str, np.ndarray], whole: Any) -> list[ImagePatches]:
    vision, images = whole.vision_config, []
    for pixels, positions in zip(processed["pixel_values"], processed["image_position_ids"], strict=True):
        inside = (positions != -1).any(axis=-1)
        across, down = positions[inside].T.astype(np.int32)
        if positions.max() >= vision.position_embedding_size:
            raise ValueError(
                f"an image has {positions.max() + 1} rows or columns of patches, but vision_config."
                f"position_embedding_size is {vision.position_embedding_size}. Resize the image."
            )
        groups = _groups(across, down, vision.pooling_kernel_size)
        images.append(
            ImagePatches(
                2 * (pixels[inside].astype(np.float32) - np.float32(0.5)),
                np.stack([down, across], axis=1),
                spans_of([len(across)]),
                groups,
                np.arange(len(groups), dtype=np.int32),
                table=np.stack([across, vision.position_embedding_size + down], axis=1),
            )
        )
    return images


def _groups(across: np.ndarray, down: np.ndarray, size: int) -> np.ndarray:
    """The patches of each square of `size` x `size` patches, row by row, for patches at these columns and rows."""
    columns, rows = across.max() + 1, down.max() + 1
    if columns % size or rows % size or len(across) != columns * rows:
        raise ValueError(
            f"image_position_ids has {len(across)} patches in {rows} rows and {columns} columns, wanted whole squares "
            f"of pooling_kernel_size {size}. Use the image processor of the checkpoint."
        )
    square = down // size * (columns // size) + across // size
    return np.argsort(square, kind="stable").reshape(-1, size**2).astype(np.int32)


def _names(arch: VisionArch) -> Names:
    layer, layers = "model.vision_tower.encoder.layers.{}.", {}
    maps = {f"attention.{name}": f"self_attn.{name}_proj" for name in "qkvo"}
    maps |= {f"mlp.{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")}
    for ours, name in maps.items():
        layers[f"vision.tower.layers.{ours}"] = f"{layer}{name}.linear"
        if arch.layers.clipped_maps:
            layers |= {f"vision.tower.layers.{ours}.{limit}": f"{layer}{name}.{limit}" for limit in _LIMITS}
    return {
        "vision.tower.position_embed.weight": (
            "model.vision_tower.patch_embedder.position_embedding_table", Tables(2)
        ),
        "vision.tower.patches": "model.vision_tower.patch_embedder.input_proj",
        **layers,
        "vision.tower.layers.attention.q_norm": layer + "self_attn.q_norm",
        "vision.tower.layers.attention.k_norm": layer + "self_attn.k_norm",
        "vision.tower.layers.attention_norm": layer + "input_layernorm",
        "vision.tower.layers.attention_out_norm": layer + "post_attention_layernorm",
        "vision.tower.layers.mlp_norm": layer + "pre_feedforward_layernorm",
        "vision.tower.layers.mlp_out_norm": layer + "post_feedforward_layernorm",
        "vision.connector.shift": "model.vision_tower.std_bias",
        "vision.connector.scale": "model.vision_tower.std_scale",
        "vision.connector.down": "model.embed_vision.embedding_projection",
    }  # fmt: skip


def _text(arch: Arch, whole: Any) -> Arch:
    """The same decoder. With use_bidirectional_attention="vision", the tokens of an image attend to each other in
    layers with a window."""
    if arch.layer_embedding is not None and arch.padding_idx is None:
        raise ValueError("text_config.pad_token_id is null; with hidden_size_per_layer_input, images need it.")
    if whole.text_config.use_bidirectional_attention != "vision":
        return arch
    return replace(arch, image_attention=tuple(window is not None for window in arch.windows))


def _expansion(pictures: Pictures) -> list[str]:
    start, end = pictures.token("boi_token"), pictures.token("eoi_token")
    return [f"{start}{tokens}{end}" for tokens in image_tokens(pictures)]


FAMILIES = (
    VisionFamily(
        "gemma4",
        _arch,
        _names,
        _patches,
        pixels=("pixel_values", "image_position_ids"),
        text=_text,
        expansion=_expansion,
        connector_last=True,
    ),
)
