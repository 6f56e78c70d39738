"""The text part of vision-language models, one table row per model_type. Each is a model of another family.

The weights of vision and audio towers are kept and saved unchanged. `hub.vision` has the towers that are supported.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from trl_jax.core.text import brief, listed
from trl_jax.hub.config_reader import ConfigReader, config_object
from trl_jax.hub.families import (
    Family,
    cohere,
    exaone4,
    gemma,
    gemma4,
    glm,
    lfm2,
    llama,
    llama4,
    mistral,
    olmo,
    qwen,
    qwen3_next,
    read_section,
)
from trl_jax.hub.heads import lm_head
from trl_jax.hub.tensor_map import Names
from trl_jax.models.arch import Arch

logger = logging.getLogger(__name__)

Texts = Mapping[str, Callable[[ConfigReader], Arch]]  # by model_type
# Unused by texts, which have the same position on all axes; "type" is the old name of rope_type.
_PASSED_OVER = ("mrope_section", "mrope_interleaved", "type")


@dataclass(frozen=True)
class _Layout:
    """The names of the tensors in a checkpoint; fields as in `Family`."""

    base_prefix: str = "model.language_model."
    carried: str = r"^model\.visual\."
    other_prefixes: tuple[str, ...] = ()
    head: str = "lm_head"
    other_head: str | None = None


_VISUAL = _Layout()
_QWEN2 = _Layout("model.", r"^(model\.)?visual\.", ("model.language_model.",))
_LLAVA = _Layout(
    "language_model.model.", r"^(model\.)?(vision_tower|multi_modal_projector|image_newline)\b",
    ("model.language_model.",), "language_model.lm_head", "lm_head",
)  # fmt: skip
_PROJECTED = _Layout(carried=r"^model\.(vision_tower|multi_modal_projector)\.")
_OVIS = _Layout(carried=r"^model\.(vision_tower|visual_embeddings_table)\.")
_IDEFICS = _Layout("model.text_model.", r"^model\.(vision_model|connector)\.")
_LLAMA4 = _Layout("language_model.model.", r"^(vision_model|multi_modal_projector)\.", head="language_model.lm_head")
_GEMMA4 = _Layout(carried=r"^model\.(vision_tower|embed_vision|audio_tower|embed_audio)\.")


def _arch(config: ConfigReader, texts: Texts) -> Arch:
    """The architecture of the text part. transformers' config class of the whole model determines which values belong
    to the text, because some files have all values in one section."""
    whole = config_object(config.raw, config.source)
    config.skip(*whole.__dataclass_fields__, *whole.attribute_map)
    text = whole.text_config.to_dict()
    if text["model_type"] not in texts:
        supported = " or ".join(map(repr, texts))
        raise config.wrong("model_type of text_config", text["model_type"], f"{supported} for this model_type")
    of_text = {*text, "rope_scaling", "rope_theta"}
    config.skip(*of_text)
    if config.section("text_config"):
        _warn_of_copies(config, of_text - whole.__dataclass_fields__.keys(), text)
    rope = text.get("rope_parameters") or {}
    text["rope_parameters"] = {key: value for key, value in rope.items() if key not in _PASSED_OVER}
    decoder = read_section(text, f"{config.source}: text_config", text["model_type"], texts[text["model_type"]])
    std = config.number("initializer_range", 0.02)  # for the head
    return replace(decoder, tied_embeddings=whole.tie_word_embeddings, initializer_range=std)


def _warn_of_copies(config: ConfigReader, keys: set[str], text: Mapping[str, Any]) -> None:
    """transformers before 5 also wrote the text's values outside text_config, where nothing reads them."""
    values = dict(text) | config.raw["text_config"]
    differing = [key for key in sorted(keys & config.raw.keys()) if config.raw[key] != values.get(key)]
    if differing:
        logger.warning(
            "%s: ignoring %s outside text_config, as transformers does. Set them in text_config to use them.",
            config.source, listed([f"{key}={brief(config.raw[key])}" for key in differing]),
        )  # fmt: skip


def _with_prefix(prefix: str, names: Names) -> Names:
    """The names of a text model, with `prefix` instead of `model.`."""

    def renamed(name):
        whole = isinstance(name, str)
        moved = prefix + (name if whole else name[0]).removeprefix("model.")
        return moved if whole else (moved, *name[1:])

    return {path: renamed(name) for path, name in names.items()}


def _family(
    model_type: str, class_prefix: str, texts: Texts, names: Callable[[Arch], Names], layout: _Layout, **options: Any
) -> Family:
    """A row of the table. texts: the possible text models, which all have these `names`."""
    options = {
        "in_transformers": False, "lm_head": lm_head(layout.head),
        "mean_of_micro_batches": model_type in _MEAN_OF_MICRO_BATCHES,
        "has_text_class": model_type in {"qwen3_5", "qwen3_5_moe"},
    } | options  # fmt: skip
    return Family(
        model_type, class_prefix, lambda config: _arch(config, texts),
        lambda arch: _with_prefix(layout.base_prefix, names(arch)), base_prefix=layout.base_prefix,
        other_prefixes=layout.other_prefixes, other_head=layout.other_head, carried=layout.carried, **options,
    )  # fmt: skip


def _renormalized(config: ConfigReader) -> Arch:
    """qwen3_moe with weights of experts that always sum to 1."""
    base = qwen.arch_v3_moe(config)
    return replace(base, experts=replace(base.experts, renormalized=True))


def _unscaled(config: ConfigReader) -> Arch:
    """cohere2 without logit scaling, which transformers applies only in the text-only model."""
    return replace(cohere.arch_v2(config), logit_scale=1.0)


def _biased(config: ConfigReader) -> Arch:
    """glm4 with biases on q, k and v."""
    return replace(glm.arch_v4(config), qkv_bias=True)


_GATED_DELTA = {"ignored": qwen3_next.IGNORED, **qwen3_next.HEADS}
_LLAMAS = {"llama": llama.arch, "mistral": mistral.arch, "qwen2": qwen.arch_v2, "qwen3": qwen.arch_v3}
_COHERE2 = {"cohere2": _unscaled}
_GLM4V = {"glm4v_text": _biased}
_MEAN_OF_MICRO_BATCHES = {
    "exaone4_5", "gemma4", "glm46v", "glm4v", "qwen2_5_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe",
}  # fmt: skip

FAMILIES = (
    _family("aya_vision", "AyaVision", _COHERE2, llama.names, _LLAVA),
    _family("cohere2_vision", "Cohere2Vision", _COHERE2, llama.names, _PROJECTED),
    _family("exaone4_5", "Exaone4_5_", {"exaone4": exaone4.arch}, olmo.names_v2, _VISUAL),
    _family("gemma3", "Gemma3", {"gemma3_text": gemma.arch_v3}, gemma.names_v2, _LLAVA, in_transformers=True),
    _family(
        "gemma4", "Gemma4", {"gemma4_text": gemma4.arch}, gemma4.names, _GEMMA4, ignored=gemma4.FAMILY.ignored
    ),
    _family("glm46v", "Glm46V", _GLM4V, glm.names_v4, _VISUAL),
    _family("glm4v", "Glm4v", _GLM4V, glm.names_v4, _VISUAL),
    _family("idefics3", "Idefics3", _LLAMAS, llama.names, _IDEFICS),
    _family("internvl", "InternVL", _LLAMAS, llama.names, _LLAVA),
    _family("lfm2_vl", "Lfm2Vl", {"lfm2": lfm2.arch}, lfm2.names, _PROJECTED),
    _family("llama4", "Llama4", {"llama4_text": llama4.arch}, llama4.names, _LLAMA4),
    _family("llava", "Llava", _LLAMAS, llama.names, _LLAVA),
    _family("llava_next", "LlavaNext", _LLAMAS, llama.names, _LLAVA),
    _family("llava_next_video", "LlavaNextVideo", _LLAMAS, llama.names, _LLAVA),
    _family("llava_onevision", "LlavaOnevision", _LLAMAS, llama.names, _LLAVA),
    _family("mistral3", "Mistral3", _LLAMAS | {"ministral3": mistral.arch_ministral3}, llama.names, _LLAVA),
    _family("ovis2", "Ovis2", _LLAMAS, llama.names, _OVIS),
    _family("qwen2_5_vl", "Qwen2_5_VL", {"qwen2_5_vl_text": qwen.arch_v2}, llama.names, _QWEN2),
    _family("qwen2_vl", "Qwen2VL", {"qwen2_vl_text": qwen.arch_v2}, llama.names, _QWEN2),
    _family(
        "qwen3_5", "Qwen3_5", {"qwen3_5_text": qwen3_next.arch_v3_5}, qwen3_next.names_v3_5, _VISUAL,
        in_transformers=True, **_GATED_DELTA,
    ),
    _family(
        "qwen3_5_moe", "Qwen3_5Moe", {"qwen3_5_moe_text": qwen3_next.arch_v3_5_moe}, qwen3_next.names_v3_5, _VISUAL,
        **_GATED_DELTA,
    ),
    _family("qwen3_vl", "Qwen3VL", {"qwen3_vl_text": qwen.arch_v3}, llama.names, _VISUAL),
    _family("qwen3_vl_moe", "Qwen3VLMoe", {"qwen3_vl_moe_text": _renormalized}, qwen.names_v3_moe, _VISUAL),
    _family("smolvlm", "SmolVLM", _LLAMAS, llama.names, _IDEFICS),
    _family("vipllava", "VipLlava", _LLAMAS, llama.names, _LLAVA),
)  # fmt: skip
