"""gemma4: gemma4_text beside towers for images and sounds, which are carried along unused."""

from __future__ import annotations

from dataclasses import replace

from trl_jax.hub.checkpoint.tensor_map import Names
from trl_jax.hub.config.reader import ConfigReader
from trl_jax.hub.families import Family, gemma4_text, qwen3_5, read_text_arch
from trl_jax.models.arch import Arch

OF_OTHERS = (
    "vision_config", "audio_config", "boi_token_id", "eoi_token_id", "image_token_id", "video_token_id",
    "boa_token_id", "eoa_token_id", "eoa_token_index", "audio_token_id", "vision_soft_tokens_per_image",
)  # fmt: skip
PREFIX = "model.language_model."


def arch(config: ConfigReader) -> Arch:
    for key in OF_OTHERS:
        config.value(key)
    text = read_text_arch(config, "gemma4_text", gemma4_text.arch)
    std = config.number("initializer_range", 0.02)  # of the head
    return replace(text, tied_embeddings=config.flag("tie_word_embeddings"), initializer_range=std)


def names(arch: Arch) -> Names:
    return qwen3_5.with_prefix(PREFIX, gemma4_text.names(arch))


FAMILY = Family(
    "gemma4",
    "Gemma4",
    arch,
    names,
    base_prefix=PREFIX,
    ignored=(*gemma4_text.FAMILY.ignored, r"^lm_head\."),
    carried=r"^model\.(vision_tower|embed_vision|audio_tower|embed_audio)\.",
    in_transformers=False,
)
