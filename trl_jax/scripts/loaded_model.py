"""Parts that `trl-jax generate`, `chat` and `score` share: flags and the loaded model."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trl_jax.core.secrets import CleanParser

if TYPE_CHECKING:
    from trl_jax.hub.auto import Checkpoint
    from trl_jax.hub.generation_inputs import Settings
    from trl_jax.hub.heads import HeadName
    from trl_jax.hub.pretrained import PreTrainedModel
    from trl_jax.hub.vision.processor import VisionProcessor
    from trl_jax.mesh.mesh import ShardingPlan


_SWITCHES = ("do_sample", "renormalize_logits", "remove_invalid_values", "use_cache")  # flags that need no value
_NEW_TOKENS = 256  # default of max_new_tokens if neither the user nor the checkpoint sets a length


# Fields of transformers' GenerationConfig as flags


class FieldsParser(CleanParser):
    """A parser that accepts every field of GenerationConfig as a flag, in addition to its own flags."""

    def __init__(self, **options: Any):
        example = "--do_sample --temperature 0.7 --max_new_tokens 256 --stop_strings '[\"END\"]'"
        epilog = f"Every field of transformers' GenerationConfig is a flag too, for example {example}."
        super().__init__(epilog=epilog, allow_abbrev=False, **options)

    def parse_both(self, argv: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Parse the command's own arguments, and the fields of GenerationConfig.

        Raises:
            ValueError: a flag is neither.
        """
        fields, rest = _split_fields(argv, self._option_string_actions)
        return vars(self.parse_args(rest)), fields


def _split_fields(argv: Sequence[str], own_flags: Iterable[str]) -> tuple[dict[str, Any], list[str]]:
    """Split the arguments into fields, with parsed values, and the rest. A value is JSON or plain text."""
    from transformers import GenerationConfig

    names = [name for name in vars(GenerationConfig()) if not name.startswith("_")]
    fields, rest, remaining = {}, [], list(argv)
    while remaining:
        argument = remaining.pop(0)
        flag, equals, value = argument.partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        if not flag.startswith("--") or flag in own_flags:
            rest.append(argument)
            continue
        if name not in names:
            raise ValueError(f"{flag} is neither a flag nor a field of GenerationConfig.{_suggestion(name, names)}")
        if name in _SWITCHES and not equals and (not remaining or remaining[0].lower() not in ("true", "false")):
            value = "true"
        elif not equals:
            if not remaining:
                raise ValueError(f"{flag} has no value.")
            value = remaining.pop(0)
        fields[name] = _value(name, value)
    return fields, rest


def _value(name: str, text: str) -> Any:
    if text.lower() in ("true", "false", "none", "null"):
        return {"true": True, "false": False}.get(text.lower())
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return float(value) if isinstance(value, int) and name in _float_fields() else value


def _float_fields() -> set[str]:
    """Fields that transformers requires to be floats, such as temperature."""
    from trl_jax.generation.sampling import Options

    return {field.name for field in dataclasses.fields(Options) if field.type == "float | None"}


def _suggestion(name: str, names: Sequence[str]) -> str:
    matches = difflib.get_close_matches(name, names, n=1)
    return f" Did you mean --{matches[0]}?" if matches else ""


# Model


def add_loading_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags for loading a model and its tokenizer."""
    parser.add_argument("--dtype", default="auto", help="dtype to load weights in (default: as stored)")
    parser.add_argument(
        "--trust_remote_code", action="store_true", help="allow a tokenizer's repository to run its own code; a "
        "model's code is never run"
    )  # fmt: skip


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags for loading and running a language model."""
    add_loading_flags(parser)
    parser.add_argument(
        "--bf16", action="store_true", help="compute in bfloat16 (default: float32 on a CPU; elsewhere the 16-bit "
        "dtype of the stored weights, if they have one)"
    )  # fmt: skip
    parser.add_argument(
        "--mesh_shape", help="devices to generate on, such as data:4, or fsdp:4,tensor:2 to shard the weights as well "
        "(default: one device)"
    )  # fmt: skip


@dataclass
class LoadedModel:
    """A model and its tokenizer. `load` reads the weights, so settings and prompts can be checked before."""

    checkpoint: Checkpoint
    tokenizer: Any
    plan: ShardingPlan | None = None
    model: PreTrainedModel | None = None

    @classmethod
    def find(
        cls,
        name: str,
        dtype: str,
        *,
        trust_remote_code: bool,
        mesh_shape: str | None = None,
        head: HeadName = "lm",
        images: bool = False,
    ) -> LoadedModel:
        """Find a checkpoint; with `images`, the model gets its vision tower."""
        from trl_jax.data.chat import load_tokenizer
        from trl_jax.hub.auto import find_checkpoint, sharding_plan
        from trl_jax.hub.vision.processor import has_processor
        from trl_jax.training.devices import enable_compilation_cache
        from trl_jax.training.model import tokenizer_folder

        enable_compilation_cache()
        plan = sharding_plan(mesh_shape)
        checkpoint = find_checkpoint(name, head=head, dtype=dtype, trust_remote_code=trust_remote_code)
        checkpoint = checkpoint.with_images() if images else checkpoint
        options = {"trust_remote_code": trust_remote_code, "with_processor": has_processor(checkpoint.folder)}
        return cls(checkpoint, load_tokenizer(tokenizer_folder(checkpoint), checkpoint.config, **options), plan)

    def load(self) -> PreTrainedModel:
        """The model; an adapter is merged into its weights."""
        if self.model is None:
            sharding_of = self.checkpoint.sharding_rule(self.plan)
            self.model = self.checkpoint.load(seed=0, sharding_of=sharding_of).merge_and_unload()
        return self.model

    def vision_processor(self) -> VisionProcessor:
        """The processor that turns texts with pictures into ids and patches."""
        from trl_jax.hub.vision.processor import VisionProcessor, load_image_processor

        checkpoint, image_processor = self.checkpoint, load_image_processor(self.checkpoint.folder)
        return VisionProcessor(checkpoint.native, checkpoint.config, self.tokenizer, image_processor)

    def prompt_tokenizer(self) -> Any:
        """The tokenizer that renders conversations without pictures as the model's processor does, if it has one."""
        from trl_jax.hub.vision.processor import prompt_tokenizer

        return prompt_tokenizer(self.tokenizer, self.checkpoint.folder)

    def settings(self, fields: dict[str, Any]) -> Settings:
        """The generation settings with these fields of GenerationConfig."""
        from trl_jax.hub.generation_inputs import ids_of_tokenizer, resolve

        model = self.load()
        open_length = model.generation_config.max_length is None and model.generation_config.max_new_tokens is None
        if open_length and not {"max_length", "max_new_tokens"} & fields.keys():
            fields = fields | {"max_new_tokens": _NEW_TOKENS}
        settings, _ = resolve(model, None, ids_of_tokenizer(model, self.tokenizer, fields))
        return settings

    def digests(self) -> dict[str, str]:
        """A digest of each file that the model and its tokenizer are read from."""
        from trl_jax.hub.fetch import SMALL
        from trl_jax.training.checkpoint_files import digest

        patterns = (*SMALL, "*.py", "*.safetensors", "pytorch_model*.bin", "*.gguf")
        folders = {"MODEL": self.checkpoint.folder, "ADAPTER": self.checkpoint.adapter}
        return {
            f"{name}/{path.name}": digest(path)
            for name, folder in folders.items()
            if folder is not None
            for pattern in patterns
            for path in folder.glob(pattern)
            if path.is_file()
        }
