"""A parsed config.json, and the arguments of `from_pretrained`."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
from flax import nnx

from trl_jax.config.rules import as_bool
from trl_jax.core.files import WEIGHT_DTYPES
from trl_jax.hub.config_reader import config_object, read_config
from trl_jax.hub.families import Family, read_arch
from trl_jax.hub.heads import CONFIG_VALUES, Draw, Head, HeadName
from trl_jax.hub.tensor_map import Names
from trl_jax.hub.vision import VisionFamily, vision_families
from trl_jax.models.arch import VisionArch
from trl_jax.models.model import abstract

logger = logging.getLogger(__name__)

# NativeConfig: a parsed config.json


IGNORED_IF_UNKNOWN = {"use_cache"}  # scripts pass these for any model; accepted even if the config does not have them
# Keys that are determined by what is saved, not by the config object.
_OF_FILES = {
    "architectures", "dtype", "tie_word_embeddings", "torch_dtype", "transformers_version", "vocab_size",
    "vocab_size_per_layer_input",
}  # fmt: skip


@dataclass(frozen=True)
class NativeConfig:
    """A config.json of a supported family, parsed once and passed to the code that loads, saves or adapts a checkpoint.

    Attributes:
        path: path of the file.
        raw: its content.
        family, arch: the parsed architecture; every key has been accounted for.
        head: the head of the model.
    """

    path: Path
    raw: dict[str, Any] = field(repr=False)
    family: Family
    arch: Any
    head: Head

    @property
    def names(self) -> Names:
        """Our module names -> names on disk, for the vision tower, the trunk and the head, in transformers' order."""
        text, head = self.family.names(self.arch), dict(self.head.names)
        if self.vision_arch is None:
            return text | head
        vision = self.vision.names(self.vision_arch)
        if not self.vision.connector_last:
            return vision | text | head
        tower = {ours: name for ours, name in vision.items() if ours.startswith("vision.tower.")}
        return tower | text | vision | head  # the rest of `vision`, the connector, follows the text

    @property
    def vision_arch(self) -> VisionArch | None:
        """The vision tower; None if only texts are computed, as in every encoder."""
        return vars(self.arch).get("vision")

    @property
    def vision(self) -> VisionFamily:
        """The vision family of this model_type. Raises ValueError if its images are not supported."""
        family = vision_families().get(self.family.model_type)
        if family is None:
            supported = ", ".join(vision_families())
            raise ValueError(
                f"{self.path}: images are not supported for model_type {self.family.model_type!r}, only text. They are "
                f"supported for {supported}."
            )
        return family

    def with_images(self) -> NativeConfig:
        """The config of the same model with its vision tower, which is otherwise left out.

        Raises:
            ValueError: images of this model_type are not supported.
        """
        return replace(self, arch=self.vision.with_vision(self.arch, self.raw, str(self.path)))

    def model(self) -> nnx.Module:
        """A new module; use it under `abstract` to avoid allocating its parameters."""
        return self.head.model(self.arch)

    @property
    def abstract(self) -> tuple[nnx.GraphDef, dict[str, jax.ShapeDtypeStruct]]:
        """The module graph and the shape of each parameter."""
        graph, shapes = _abstract(self.head.model, self.arch)
        return graph, dict(shapes)

    def draws(self) -> list[Draw]:
        """Tensors that a checkpoint may lack and that are then initialized."""
        return self.head.draws(self.arch)

    @property
    def is_tied(self) -> bool:
        """Whether the head shares the weights of the token embedding."""
        return self.head.kind == "lm" and self.arch.tied_embeddings

    def untied(self) -> NativeConfig:
        """The same config with untied embeddings; returns itself if they are untied already."""
        if not self.is_tied:
            return self
        raw = self.raw | {"tie_word_embeddings": False}
        return replace(self, raw=raw, arch=replace(self.arch, tied_embeddings=False))


@cache
def _abstract(model: Callable[[Any], nnx.Module], arch: Any) -> tuple[nnx.GraphDef, dict[str, jax.ShapeDtypeStruct]]:
    """Cached because loading, adapters, reference models and plans each ask for it."""
    return abstract(lambda: model(arch))


def native_config(raw: dict[str, Any], path: Path, head: HeadName = "score") -> NativeConfig:
    """Parse a config.json that has been read.

    Raises:
        ValueError: the model_type, a key or a value is not supported; the message names it.
    """
    family, arch = read_arch(raw, path)
    return NativeConfig(path, raw, family, arch, _head_of(family, head, path))


def read_native_config(folder: Path, head: HeadName = "score") -> NativeConfig:
    """Read and parse the config.json of a folder.

    Raises:
        FileNotFoundError, ValueError: the file is missing, or something in it is not supported.
    """
    return native_config(read_config(folder), folder / "config.json", head)


def transformers_config(raw: dict[str, Any], path: Path, head: HeadName) -> Any:
    """transformers' config object, which tokenizers, trackers and scripts expect as `model.config`.

    Raises:
        ValueError: the config class rejects a value.
    """
    config = config_object(raw, str(path), name_or_path=path.parent, **CONFIG_VALUES[head])
    if head == "score":
        config.use_cache = False
    return config


def with_values(raw: dict[str, Any], values: dict[str, Any], path: Path, head: HeadName) -> dict[str, Any]:
    """A copy of config.json with some `values` replaced, as transformers' from_pretrained does with extra arguments.

    Values in IGNORED_IF_UNKNOWN are dropped if the config object does not have them.

    Raises:
        TypeError: the config object has no such value.
    """
    if not values:
        return raw
    config = transformers_config(raw, path, head)
    keys = config.to_dict().keys() | config.attribute_map.keys()
    values = {name: value for name, value in values.items() if name in keys or name not in IGNORED_IF_UNKNOWN}
    if unknown := values.keys() - keys:
        raise unknown_arguments_error(unknown)
    named = {config.attribute_map.get(name, name): value for name, value in values.items()}
    older = ("rope_theta", "rope_scaling") if "rope_parameters" in named else ()  # old names of the same values
    merged = {name: value for name, value in raw.items() if name not in older} | named
    if "num_hidden_layers" in named and isinstance(merged.get("layer_types"), list):
        merged["layer_types"] = merged["layer_types"][: named["num_hidden_layers"]]
    return merged


def changes(config: Any, raw: dict[str, Any], path: Path, head: HeadName) -> dict[str, Any]:
    """What training or user code changed in a config object, compared to the config.json it was read from. Changes in a
    nested config are nested in the same way."""
    loaded = transformers_config(raw, path, head)
    return _different(*(json.loads(c.to_json_string(use_diff=False)) for c in (loaded, config)))


def _different(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    differences: dict[str, Any] = {}
    for key, value in now.items():
        if key in _OF_FILES or key.startswith("_") or (key in before and before[key] == value):
            continue
        parts = isinstance(value, dict) and isinstance(before.get(key), dict)
        differences[key] = _different(before[key], value) if parts else value
    return differences


def _head_of(family: Family, head: HeadName, path: Path) -> Head:
    """The head of a family. Raises ValueError if it has none of this kind."""
    head_of_family = {"score": family.score_head, "lm": family.lm_head}[head]
    if head_of_family is None:
        raise ValueError(
            f"{path}: model_type {family.model_type!r} is bidirectional and has no causal language model. Pass a "
            "decoder checkpoint such as llama, qwen3 or gpt2."
        )
    return head_of_family


# Arguments of from_pretrained


_DTYPES = (*WEIGHT_DTYPES, "auto")
_PLACEMENT = ("device_map", "low_cpu_mem_usage", "max_memory", "offload_folder")
_WITHOUT_EFFECT = ("use_safetensors", "ignore_mismatched_sizes", "use_flash_attention_2")
_ATTENTION = (None, "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")
_HUB_KERNEL = re.compile(r"[\w.-]+/[\w.-]+(@[\w.-]+)?(:\w+)?")  # a torch kernel; it computes the same attention
_FETCH = ("revision", "subfolder", "token", "cache_dir", "local_files_only", "gguf_file")


class LoadArguments(NamedTuple):
    """The checked arguments of `from_pretrained`.

    fetch: arguments of `fetch.checkpoint_folder`.
    dtype: "float32", "bfloat16", "float16" or "auto".
    values: all others, which may be values of the config (see `with_values`).
    """

    fetch: dict[str, Any]
    dtype: str
    values: dict[str, Any]


def checked_dtype(dtype: Any) -> str:
    """The name of a dtype of torch, NumPy or JAX; "auto" for None. Raises ValueError if it is not supported."""
    name = "auto" if dtype is None else str(dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(_DTYPES)}, got {name!r}.")
    return name


def checked_arguments(arguments: Mapping[str, Any], dtype: Any) -> LoadArguments:
    """Check the arguments of `from_pretrained`."""
    kwargs = dict(arguments)
    dtype = checked_dtype(kwargs.pop("torch_dtype", dtype))
    attention = kwargs.pop("attn_implementation", None)
    if attention not in _ATTENTION and not (isinstance(attention, str) and _HUB_KERNEL.fullmatch(attention)):
        choices = ", ".join(map(str, _ATTENTION))
        raise ValueError(f"attn_implementation must be one of {choices}, or a kernel as owner/name, got {attention!r}.")
    for key in _WITHOUT_EFFECT:
        kwargs.pop(key, None)
    for key in _PLACEMENT:
        if kwargs.pop(key, None) is not None:
            logger.warning(
                "%s has no effect in trl_jax. Arrays go to JAX's default device, or to a mesh set with mesh_shape=.",
                key,
            )
    code = as_bool("trust_remote_code", kwargs.pop("trust_remote_code", False), optional=True)
    if code:
        logger.warning(
            "trust_remote_code has no effect on models, whose code is never run. It only allows a tokenizer to run "
            "the code that its tokenizer_config.json names (auto_map)."
        )
    fetch = {key: kwargs.pop(key) for key in _FETCH if key in kwargs}
    fetch = {key: value for key, value in fetch.items() if value is not None}
    if "local_files_only" in fetch:
        fetch["local_files_only"] = as_bool("local_files_only", fetch["local_files_only"])
    return LoadArguments(fetch | {"code": bool(code)}, dtype, values=kwargs)


def unknown_arguments_error(names: Iterable[str], why: str = "") -> TypeError:
    """The error for unknown arguments of from_pretrained."""
    return TypeError(
        f"from_pretrained (model_init_kwargs) does not accept {', '.join(sorted(names))}. It accepts num_labels, "
        f"dtype, attn_implementation, {', '.join(_FETCH)}, and values of the checkpoint's config.json{why}."
    )


@contextmanager
def naming_argument(argument: str) -> Iterator[None]:
    """Within this block, rewrite errors that mention `model=` to name `argument` instead."""
    try:
        yield
    except (FileNotFoundError, ValueError, TypeError) as error:
        text = re.sub(r"\bmodel=", f"{argument}=", str(error))
        if text == str(error) or type(error) not in (FileNotFoundError, ValueError, TypeError):
            raise
        raise type(error)(text) from error.__cause__
