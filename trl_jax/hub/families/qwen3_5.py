"""qwen3_5: qwen3_5_text beside a tower for images, which is carried along unused."""

from __future__ import annotations

from dataclasses import replace

from trl_jax.hub.checkpoint.tensor_map import Names
from trl_jax.hub.config.reader import ConfigReader
from trl_jax.hub.families import Family, qwen3_5_text, qwen3_next, read_text_arch
from trl_jax.models.arch import Arch

OF_IMAGES = (
    "vision_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id",
)  # fmt: skip
PREFIX = "model.language_model."


def arch(config: ConfigReader) -> Arch:
    return arch_of_text(config, qwen3_5_text.FAMILY)


def arch_of_text(config: ConfigReader, text: Family) -> Arch:
    """The facts of the text part of a model with this text family."""
    for key in OF_IMAGES:
        config.value(key)
    found = read_text_arch(config, text.model_type, text.arch)
    std = config.number("initializer_range", 0.02)  # of the head
    return replace(found, tied_embeddings=config.flag("tie_word_embeddings"), initializer_range=std)


def names(arch: Arch) -> Names:
    return with_prefix(PREFIX, qwen3_5_text.names(arch))


def with_prefix(prefix: str, names: Names) -> Names:
    """The names of a text model, with this prefix in the place of `model.`."""

    def renamed(name):
        whole = isinstance(name, str)
        moved = prefix + (name if whole else name[0]).removeprefix("model.")
        return moved if whole else (moved, *name[1:])

    return {path: renamed(name) for path, name in names.items()}


BESIDE_A_TOWER = {
    "base_prefix": PREFIX,
    "ignored": (*qwen3_next.IGNORED, r"^lm_head\."),
    "carried": r"^model\.visual\.",
    **qwen3_next.HEADS,
}
FAMILY = Family("qwen3_5", "Qwen3_5", arch, names, **BESIDE_A_TOWER)
