"""transformers' image processors for tiny vision-language models, and complete processors, built without
torchvision."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from transformers.utils import PushToHubMixin

from compat_tests import tiny
from compat_tests.hub.vision.models import CASES
from trl_jax.hub.vision import vision_families

SQUARE = {"size": {"height": 28, "width": 28}}
CROPPED = {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}
PATCHED = {"patch_size": 4, "merge_size": 2, "size": {"shortest_edge": 16 * 16, "longest_edge": 48 * 48}}
SPLIT = {"size": {"longest_edge": 84}, "max_image_size": {"longest_edge": 28}}
# Name -> the case, the processor's class, its arguments, and the sizes of the images.
PROCESSORS = {
    "clip": ("llava", "CLIPImageProcessorPil", CROPPED, [(50, 31)]),
    "gemma3": ("gemma3", "Gemma3ImageProcessorPil", {"size": {"height": 42, "width": 42}}, [(50, 31), (42, 42)]),
    "gemma3 with crops": (
        "gemma3", "Gemma3ImageProcessorPil",
        {"size": {"height": 42, "width": 42}, "do_pan_and_scan": True, "pan_and_scan_min_crop_size": 8,
         "pan_and_scan_max_num_crops": 3, "pan_and_scan_min_ratio_to_activate": 1.2}, [(90, 31)],
    ),
    "gemma4": (
        "gemma4", "Gemma4ImageProcessorPil", {"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 70},
        [(50, 31), (20, 60)],
    ),
    "idefics3": ("idefics3", "Idefics3ImageProcessorPil", SPLIT, [(50, 31), (28, 90)]),
    "idefics3 without tiles": (
        "idefics3", "Idefics3ImageProcessorPil", SPLIT | {"do_image_splitting": False}, [(50, 31), (28, 90)],
    ),
    "internvl": (
        "internvl", "GotOcr2ImageProcessorPil", SQUARE | {"crop_to_patches": True, "max_patches": 4},
        [(90, 31), (30, 30)],
    ),
    "llava_next": (
        "llava_next", "LlavaNextImageProcessorPil",
        CROPPED | {"image_grid_pinpoints": [[28, 56], [56, 28], [56, 56]]}, [(90, 20), (31, 60)],
    ),
    "mistral3": (
        "mistral3", "PixtralImageProcessorPil", {"patch_size": 8, "size": {"longest_edge": 40}}, [(50, 31), (20, 33)],
    ),
    "smolvlm": (
        "smolvlm", "SmolVLMImageProcessorPil",
        {"size": {"longest_edge": 92}, "max_image_size": {"longest_edge": 46}}, [(90, 31), (50, 50)],
    ),
    "siglip": ("llava with siglip", "SiglipImageProcessorPil", SQUARE, [(50, 31)]),
}  # fmt: skip
GEMMA = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
TILED = {
    "image_token": "<image>",
    "fake": "<fake_token_around_image>",
    "whole": "<global-img>",
    "end_of_utterance_token": "<end_of_utterance>",
} | {f"row_{row}_{column}": f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)}
QWEN = {
    "image_token": "<|image_pad|>", "video_token": "<|video_pad|>", "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
}  # fmt: skip
TOKENS = {
    "gemma3": GEMMA,
    "gemma4": GEMMA | {"audio_token": "<audio>", "boa_token": "<boa>", "eoa_token": "<eoa>"},
    "idefics3": TILED,
    "internvl": {
        "start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    },
    "llava_next": {"image_token": "<image>"},
    "mistral3": {"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"},
    "qwen2_5_vl": QWEN,
    "qwen3_vl": QWEN,
    "smolvlm": TILED | {"fake_image_token": TILED["fake"], "global_image_token": TILED["whole"]},
}  # fmt: skip
# The attribute with the image placeholder, the class of transformers' processor and its own arguments, by model type.
MADE_BY = {
    "gemma3": ("boi_token", "gemma3.Gemma3Processor", {"image_seq_length": 9}),
    "gemma4": ("image_token", "gemma4.Gemma4Processor", {"feature_extractor": None}),
    "idefics3": ("image_token", "idefics3.Idefics3Processor", {"image_seq_len": 4}),
    "internvl": ("context_image_token", "internvl.InternVLProcessor", {"image_seq_length": 4}),
    "llava_next": (
        "image_token", "llava_next.LlavaNextProcessor",
        {"patch_size": 7, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    ),
    "mistral3": ("image_token", "pixtral.PixtralProcessor", {"patch_size": 4, "spatial_merge_size": 2}),
    "qwen2_5_vl": ("image_token", "qwen2_5_vl.Qwen2_5_VLProcessor", {}),
    "qwen3_vl": ("image_token", "qwen3_vl.Qwen3VLProcessor", {}),
    "smolvlm": ("image_token", "smolvlm.SmolVLMProcessor", {"image_seq_len": 4}),
}  # fmt: skip
# The image processors of `PROCESSORS`, without arguments that transformers' processors pass themselves.
IMAGE_PROCESSORS = {
    name: PROCESSORS[name][1:3] for name in ("gemma3", "gemma3 with crops", "gemma4", "idefics3", "llava_next")
} | {
    "idefics3 without tiles": ("Idefics3ImageProcessorPil", SPLIT | {"do_image_splitting": False}),
    "internvl": ("GotOcr2ImageProcessorPil", {"size": {"height": 28, "width": 28}, "max_patches": 4}),
    "internvl without tiles": ("GotOcr2ImageProcessorPil", {"size": {"height": 28, "width": 28}, "max_patches": 1}),
    "llava_next with more tiles": (
        "LlavaNextImageProcessorPil",
        CROPPED | {"image_grid_pinpoints": [[28, 56], [56, 28], [56, 56], [28, 84], [84, 28]]},
    ),
    "mistral3": ("PixtralImageProcessorPil", {"patch_size": 4, "size": {"longest_edge": 40}}),
    "qwen2_5_vl": ("Qwen2VLImageProcessorPil", PATCHED),
    "qwen3_vl": ("Qwen2VLImageProcessorPil", PATCHED),
    "smolvlm": PROCESSORS["smolvlm"][1:3],
}


def tokenizer_with(named: Any) -> Any:
    """A tokenizer with these special tokens; named ones become attributes."""
    from transformers import PreTrainedTokenizerFast

    backend = tiny.tiny_tokenizer().backend_tokenizer
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="</s>", pad_token="<pad>", extra_special_tokens=named
    )


def placeholder(name: str) -> str:
    """The placeholder for an image in a text."""
    key = name.split()[0]
    token = TOKENS[key][MADE_BY[key][0]]
    return f"<|vision_start|>{token}<|vision_end|>" if key.startswith("qwen") else token


class _NoVideos(PushToHubMixin):
    """In place of a video processor; it can be saved."""

    model_input_names, num_frames, fps = (), 1, 1

    def to_dict(self) -> dict[str, Any]:
        return {}


def built_processor(name: str, monkeypatch: Any, **options: Any) -> Any:
    """transformers' processor for one of `IMAGE_PROCESSORS`, with further arguments."""
    import transformers
    from transformers.models.pixtral import image_processing_pil_pixtral

    key = name.split()[0]
    folder, class_name = MADE_BY[key][1].split(".")
    module = f"transformers.models.{folder}."
    # PixtralProcessor's module imports one function from here.
    monkeypatch.setitem(sys.modules, f"{module}image_processing_pixtral", image_processing_pil_pixtral)
    found = importlib.import_module(f"{module}processing_{folder}")
    processor_class = getattr(found, class_name)
    if key == "smolvlm":
        monkeypatch.setattr(found, "num2words", str)  # only for videos
    # Video processors need torchvision.
    monkeypatch.setattr(processor_class, "check_argument_for_proper_class", lambda self, name, argument: None)
    if key in ("gemma4", "internvl", "qwen2_5_vl", "qwen3_vl", "smolvlm"):
        options["video_processor"] = _NoVideos()
    image_class, arguments = IMAGE_PROCESSORS[name]
    processor = processor_class(
        image_processor=getattr(transformers, image_class)(**arguments), tokenizer=tokenizer_with(TOKENS[key]),
        **MADE_BY[key][2], **options,
    )  # fmt: skip
    if arguments.get("do_pan_and_scan"):  # a processor's own arguments override those of its image processor
        processor.images_kwargs = {name: value for name, value in arguments.items() if "pan_and_scan" in name}
    return processor


def config_for(name: str, processor: Any, **text: Any) -> Any:
    """A tiny config for a processor of `built_processor`; `text` are values for its text part."""
    import transformers

    key = name.split()[0]
    case, values = CASES[key], dict(CASES[key].values)
    token = TOKENS[key]["context_image_token" if key == "internvl" else "image_token"]
    values[vision_families()[key].image_token] = processor.tokenizer.convert_tokens_to_ids(token)
    if key.startswith("qwen"):
        values["vision_start_token_id"] = processor.tokenizer.convert_tokens_to_ids(QWEN["vision_bos_token"])
    values["text_config"] = values["text_config"] | text
    if key == "llava_next":
        values["image_grid_pinpoints"] = IMAGE_PROCESSORS[name][1]["image_grid_pinpoints"]
    return getattr(transformers, case.config_class)(**values)
