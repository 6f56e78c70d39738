"""gemma3: gemma3_text beside a tower for images, which is carried along unused."""

from __future__ import annotations

from dataclasses import replace

from trl_jax.hub.checkpoint.tensor_map import Names
from trl_jax.hub.config.reader import ConfigReader
from trl_jax.hub.families import Family, gemma3_text, read_text_arch
from trl_jax.hub.heads import lm_head
from trl_jax.models.arch import Arch

OF_IMAGES = ("vision_config", "boi_token_index", "eoi_token_index", "image_token_index", "mm_tokens_per_image")
PREFIX, CURRENT_PREFIX = "language_model.model.", "model.language_model."


def arch(config: ConfigReader) -> Arch:
    for key in OF_IMAGES:
        config.value(key)
    text = read_text_arch(config, "gemma3_text", gemma3_text.arch)
    return replace(text, initializer_range=config.number("initializer_range", 0.02))  # of the head


def names(arch: Arch) -> Names:
    own = gemma3_text.FAMILY.names(arch)
    return {path: PREFIX + name.removeprefix("model.") for path, name in own.items()}


FAMILY = Family(
    "gemma3",
    "Gemma3",
    arch,
    names,
    base_prefix=PREFIX,
    other_prefixes=(CURRENT_PREFIX,),
    lm_head=lm_head("language_model.lm_head"),
    ignored=(r"^(language_model\.)?lm_head\.",),
    carried=r"^(model\.)?(vision_tower|multi_modal_projector)\.",
)
