"""llava: a CLIP or SigLIP tower with square images of one size, and a connector of two linear maps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from trl_jax.data.images import ImagePatches, spans_of
from trl_jax.hub.config_reader import ConfigReader
from trl_jax.hub.tensor_map import Kernel, Names, ordered
from trl_jax.hub.vision import VisionFamily
from trl_jax.models.arch import Arch, Connector, VisionArch
from trl_jax.nn.layers import ACTIVATIONS

CLIP, SIGLIP = "clip_vision_model", "siglip_vision_model"


def tower(config: ConfigReader, *, layers: int | None = None) -> Arch:
    """The blocks of a CLIP or SigLIP tower. Only the first `layers` are computed; None: all."""
    size, heads = config.size("hidden_size"), config.size("num_attention_heads")
    if size % heads:
        raise config.wrong("hidden_size", size, f"a multiple of num_attention_heads {heads}")
    config.number("attention_dropout", 0.0)  # TRL trains with the tower's default, 0
    count = config.size("num_hidden_layers")
    layers = count if layers is None else layers
    return Arch(
        vocab_size=1, hidden_size=size, mlp_size=config.size("intermediate_size"), num_layers=layers, num_heads=heads,
        num_key_heads=heads, head_dim=size // heads, norm_eps=config.number("layer_norm_eps", 1e-5),
        ropes=(None,) * layers, windows=(None,) * layers, rotary_dim=0, norm="layer",
        activation=config.one_of("hidden_act", ACTIVATIONS, "quick_gelu"), gated=False, qkv_bias=True, o_bias=True,
        mlp_bias=True,
    )  # fmt: skip


def layers_read(config: ConfigReader, selected: Any) -> int:
    """How many layers precede the hidden states that `vision_feature_layer` selects: 0 is the embedding, -1 the output
    of the last layer."""
    count = config.size("num_hidden_layers")
    if isinstance(selected, bool) or not isinstance(selected, int) or not -count <= selected <= count or selected == 0:
        raise ValueError(
            f"{config.source}: vision_feature_layer must be one whole number from {-count} to {count} except 0, got "
            f"{selected!r}."
        )
    return selected if selected > 0 else count + 1 + selected


def require_tower(config: ConfigReader, whole: Any, *known: str) -> None:
    """Raise ValueError unless the tower is one of these model types."""
    model_type = whole.vision_config.model_type
    if model_type not in known:
        raise config.wrong("model_type", model_type, f"{' or '.join(map(repr, known))}, which are computed here")


def arch(config: ConfigReader, whole: Any) -> VisionArch:
    require_tower(config, whole, CLIP, SIGLIP)
    clip = whole.vision_config.model_type == CLIP
    patch, image, channels = config.size("patch_size"), config.size("image_size"), config.size("num_channels", 3)
    text = whole.text_config.hidden_size
    connector = Connector(
        text, hidden_size=text, activation=whole.projector_hidden_act, bias=whole.multimodal_projector_bias
    )
    config.skip("vision_use_head")  # for a pooled output, which is not used
    return VisionArch(
        tower(config, layers=layers_read(config, whole.vision_feature_layer)), connector, (channels, patch, patch),
        patch_bias=not clip, class_token=clip, position_rows=(image // patch) ** 2 + clip, pre_norm=clip,
    )  # fmt: skip


def patches_of(pixels: np.ndarray, size: int) -> np.ndarray:
    """Split images `[N, C, H, W]` into patches `[N, H / size x W / size, C x size x size]`, row by row. Pixels at the
    bottom and on the right that fill no patch are left out."""
    count, channels, height, width = pixels.shape
    rows, columns = height // size, width // size
    whole = pixels[:, :, : rows * size, : columns * size]
    parts = whole.reshape(count, channels, rows, size, columns, size)
    return parts.transpose(0, 2, 4, 1, 3, 5).reshape(count, -1, channels * size**2)


def _patches(processed: Mapping[str, np.ndarray], whole: Any) -> list[ImagePatches]:
    vision, clip = whole.vision_config, whole.vision_config.model_type == CLIP
    default = whole.vision_feature_select_strategy == "default"
    images = []
    for patches in patches_of(processed["pixel_values"], vision.patch_size):
        patches = np.pad(patches, ((int(clip), 0), (0, 0)))  # a class token in front
        numbers = np.arange(len(patches), dtype=np.int32)
        groups = numbers[int(default) :, None]
        places, tokens = np.zeros((len(patches), 2), np.int32), np.arange(len(groups), dtype=np.int32)
        images.append(ImagePatches(patches, places, spans_of([len(patches)]), groups, tokens, table=numbers[:, None]))
    return images


def tower_names(arch: VisionArch, prefix: str) -> Names:
    """The names of a CLIP tower on disk, under this prefix."""
    layer = f"{prefix}encoder.layers.{{}}."
    return {
        "vision.tower.class_embed": f"{prefix}embeddings.class_embedding",
        "vision.tower.patches.weight": (f"{prefix}embeddings.patch_embedding.weight", Kernel(arch.kernel)),
        "vision.tower.patches.bias": f"{prefix}embeddings.patch_embedding.bias",
        "vision.tower.position_embed": f"{prefix}embeddings.position_embedding",
        "vision.tower.pre_norm": f"{prefix}pre_layrnorm",
        "vision.tower.layers.attention.k": layer + "self_attn.k_proj",
        "vision.tower.layers.attention.v": layer + "self_attn.v_proj",
        "vision.tower.layers.attention.q": layer + "self_attn.q_proj",
        "vision.tower.layers.attention.o": layer + "self_attn.out_proj",
        "vision.tower.layers.attention_norm": layer + "layer_norm1",
        "vision.tower.layers.mlp.up": layer + "mlp.fc1",
        "vision.tower.layers.mlp.down": layer + "mlp.fc2",
        "vision.tower.layers.mlp_norm": layer + "layer_norm2",
        "vision.tower.post_norm": f"{prefix}post_layernorm",
    }


def siglip_names(arch: VisionArch, prefix: str) -> Names:
    """The same for a SigLIP tower, which registers its norms first."""
    ours = "vision.tower.layers."
    unordered = ordered(tower_names(arch, prefix), ours + "attention_norm", before=ours + "attention.k")
    return ordered(unordered, ours + "mlp_norm", before=ours + "mlp.up")


def names(arch: VisionArch) -> Names:
    return (tower_names if arch.class_token else siglip_names)(arch, "vision_tower.") | {
        "vision.connector.up": "multi_modal_projector.linear_1",
        "vision.connector.down": "multi_modal_projector.linear_2",
    }


MODULES = (("vision_tower.", "model.vision_tower."), ("multi_modal_projector.", "model.multi_modal_projector."))
# Older files, files of transformers 4.52 and later, and files of transformers 5.
PREFIXES = (
    ("vision_tower.", "vision_tower.vision_model."),
    ("vision_tower.", "model.vision_tower."),
    ("model.vision_tower.", "model.vision_tower.vision_model."),
    ("multi_modal_projector.", "model.multi_modal_projector."),
)
# For towers with the same names in all files.
NEWER_PREFIXES = (
    ("vision_tower.", "model.vision_tower."),
    ("multi_modal_projector.", "model.multi_modal_projector."),
)

FAMILIES = (
    VisionFamily("llava", arch, names, _patches, prefixes=PREFIXES, modules=MODULES, image_token="image_token_index"),
)
