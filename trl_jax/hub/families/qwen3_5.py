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
    for key in OF_IMAGES:
        config.value(key)
    text = read_text_arch(config, "qwen3_5_text", qwen3_5_text.arch)
    head = {"tied_embeddings": config.flag("tie_word_embeddings"), "initializer_range": config.number("initializer_range", 0.02)}
    return replace(text, **head)


def names(arch: Arch) -> Names:
    def renamed(name):
        whole = isinstance(name, str)
        moved = PREFIX + (name if whole else name[0]).removeprefix("model.")
        return moved if whole else (moved, *name[1:])

    return {path: renamed(name) for path, name in qwen3_5_text.names(arch).items()}


FAMILY = Family(
    "qwen3_5",
    "Qwen3_5",
    arch,
    names,
    base_prefix=PREFIX,
    ignored=(*qwen3_next.IGNORED, r"^lm_head\."),
    carried=r"^model\.visual\.",
)
