"""Tiny multimodal language models (vision or audio), one for each type whose text part is a native family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from compat_tests.models import families
from compat_tests.tiny import SHAPE, tiny_tokenizer

QWEN_TOWER = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4, "out_hidden_size": 64,
    "num_position_embeddings": 16,
}  # fmt: skip
GEMMA_TOWER = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 8, "patch_size": 4, "position_embedding_size": 16, "pooling_kernel_size": 2,
}  # fmt: skip
TOWER = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
LLAMA4_TOWER = {"vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16}
CLIP, SIGLIP = TOWER | {"model_type": "clip_vision_model"}, TOWER | {"model_type": "siglip_vision_model"}
QUARTER = {"rope_parameters": families.QUARTER | {"mrope_section": [1, 1, 0], "mrope_interleaved": True}}
AXES = {"rope_parameters": families.ROPE | {"mrope_section": [2, 3, 3]}}
HALF = {"rope_parameters": families.ROPE | {"partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}}
GLM_TOWER = QWEN_TOWER | {"image_size": 28, "patch_size": 14, "in_channels": 3}
VISUAL, OLD_VISUAL, PROJECTED = "model.visual.", "visual.", ("model.vision_tower.", "model.multi_modal_projector.")
OLD_PROJECTED = ("vision_tower.", "multi_modal_projector.")


def _of(model_type: str, **facts: Any) -> dict[str, Any]:
    return {"model_type": model_type, **families.SHAPES.get(model_type, {}), **facts}


# The text part, the towers, and the prefixes of their tensor names.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str | tuple[str, ...]]] = {
    "aya_vision": (_of("cohere2", sliding_window=7), {"vision_config": SIGLIP}, OLD_PROJECTED),
    "cohere2_vision": (_of("cohere2", sliding_window=7), {"vision_config": SIGLIP}, PROJECTED),
    "exaone4_5": (_of("exaone4"), {"vision_config": QWEN_TOWER}, VISUAL),
    "gemma4": (
        _of("gemma4_text", sliding_window=7, final_logit_softcapping=4.0),
        {"vision_config": GEMMA_TOWER, "audio_config": None}, ("model.vision_tower.", "model.embed_vision."),
    ),
    "gemma4 with experts": (
        _of("gemma4_text", **families.VARIANTS["gemma4_text"]["experts"]),
        {"vision_config": GEMMA_TOWER, "audio_config": None}, ("model.vision_tower.", "model.embed_vision."),
    ),
    "glm46v": (HALF, {"vision_config": GLM_TOWER}, VISUAL),
    "glm4v": (HALF, {"vision_config": GLM_TOWER}, VISUAL),
    "idefics3": (_of("llama"), {"vision_config": TOWER}, ("model.vision_model.", "model.connector.")),
    "internvl": (
        _of("qwen2"), {"vision_config": TOWER | {"image_size": [28, 28], "patch_size": [14, 14]}}, OLD_PROJECTED
    ),
    "lfm2_vl": (_of("lfm2"), {"vision_config": TOWER | {"model_type": "siglip2_vision_model"}}, PROJECTED),
    "llama4": (
        _of("llama4_text"),
        {"vision_config": TOWER | LLAMA4_TOWER},
        ("vision_model.", "multi_modal_projector."),
    ),
    "llava": (_of("llama"), {"vision_config": CLIP}, OLD_PROJECTED),
    "llava_next": (_of("mistral", sliding_window=7), {"vision_config": CLIP}, (*OLD_PROJECTED, "image_newline")),
    "llava_next_video": (_of("llama"), {"vision_config": CLIP}, (*OLD_PROJECTED, "image_newline")),
    "llava_onevision": (_of("qwen2"), {"vision_config": SIGLIP}, (*OLD_PROJECTED, "image_newline")),
    "mistral3": (_of("mistral"), {"vision_config": TOWER | {"model_type": "pixtral"}}, OLD_PROJECTED),
    "mistral3 of ministral3": (_of("ministral3"), {"vision_config": TOWER | {"model_type": "pixtral"}}, OLD_PROJECTED),
    "ovis2": (_of("qwen2"), {"vision_config": TOWER}, ("model.vision_tower.", "model.visual_embeddings_table.")),
    "qwen2_5_vl": (AXES, {"vision_config": QWEN_TOWER | {"fullatt_block_indexes": [0]}}, OLD_VISUAL),
    "qwen2_vl": (AXES, {"vision_config": {"depth": 1, "embed_dim": 16, "hidden_size": 64, "num_heads": 2}}, OLD_VISUAL),
    "qwen3_5_moe": (families.SHAPES["qwen3_5_moe_text"] | QUARTER, {"vision_config": QWEN_TOWER}, VISUAL),
    "qwen3_vl": (AXES, {"vision_config": QWEN_TOWER | {"deepstack_visual_indexes": [0]}}, VISUAL),
    "qwen3_vl_moe": (
        families.EXPERTS | AXES, {"vision_config": QWEN_TOWER | {"deepstack_visual_indexes": [0]}}, VISUAL
    ),
    "smolvlm": (_of("llama"), {"vision_config": TOWER}, ("model.vision_model.", "model.connector.")),
    "vipllava": (_of("mistral"), {"vision_config": CLIP | {"num_hidden_layers": 12}}, OLD_PROJECTED),
}  # fmt: skip


def build(folder: Path, case: str, **facts: Any) -> Any:
    """Save transformers' model of a case with a tokenizer, and return it; `facts` are top-level config fields."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    text, parts, _ = CASES[case]
    model_type, words = case.partition(" ")[0], tiny_tokenizer(folder)
    text = SHAPE | text | {"vocab_size": len(words) + 8, "pad_token_id": words.pad_token_id}
    text = {key: value for key, value in text.items() if key not in families.ABSENT.get(f"{model_type}_text", ())}
    config = AutoConfig.for_model(model_type, text_config=text, **parts, **facts)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model.eval()
