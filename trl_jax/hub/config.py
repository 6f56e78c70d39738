"""A config.json as one value, and the arguments of `from_pretrained`."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from trl_jax.config.rules import as_bool
from trl_jax.hub.config_reader import config_object, read_config
from trl_jax.hub.families import Family, read_arch
from trl_jax.hub.heads import CONFIG_VALUES, Draw, Head, HeadName
from trl_jax.hub.tensor_map import Names
from trl_jax.models.model import abstract

# ----------------------------------------------------------------------------------------------------
# A config.json that has been read: one value, handed along, so that nobody reads the file again.


PASSED_OVER = {"use_cache"}  # values that scripts give any model, also one whose config has none: nothing reads them
# What is saved decides them, whatever the config object says.
_OF_FILES = {
    "architectures", "dtype", "tie_word_embeddings", "torch_dtype", "transformers_version", "vocab_size",
    "vocab_size_per_layer_input",
}  # fmt: skip


@dataclass(frozen=True)
class NativeConfig:
    """A config.json of a family: read once, and handed to whatever loads, saves or adapts the checkpoint.

    Attributes:
        path: the file.
        raw: its content.
        family, arch: its meaning; every key has been accounted for.
        head: the head that the trunk gets.
    """

    path: Path
    raw: dict[str, Any] = field(repr=False)
    family: Family
    arch: Any
    head: Head

    @property
    def names(self) -> Names:
        """Our modules, trunk and head -> theirs."""
        return self.family.names(self.arch) | dict(self.head.names)

    def model(self) -> nnx.Module:
        """The module that computes it; to be looked at abstractly."""
        return self.head.model(self.arch)

    @property
    def abstract(self) -> tuple[nnx.GraphDef, dict[str, jax.ShapeDtypeStruct]]:
        """The module's graph and the shape of each of its parameters."""
        graph, shapes = _abstract(self.head.model, self.arch)
        return graph, dict(shapes)

    def draws(self) -> list[Draw]:
        """The tensors that a checkpoint may lack."""
        return self.head.draws(self.arch)

    @property
    def is_tied(self) -> bool:
        """Whether its head is the table of tokens."""
        return self.head.kind == "lm" and self.arch.tied_embeddings

    def untied(self) -> NativeConfig:
        """The same model with a head of its own; itself where it has one."""
        if not self.is_tied:
            return self
        raw = self.raw | {"tie_word_embeddings": False}
        return replace(self, raw=raw, arch=replace(self.arch, tied_embeddings=False))


@cache
def _abstract(model: Callable[[Any], nnx.Module], arch: Any) -> tuple[nnx.GraphDef, dict[str, jax.ShapeDtypeStruct]]:
    """Made once for an architecture: loading, an adapter, a reference and a plan each ask for it."""
    return abstract(lambda: model(arch))


def native_config(raw: dict[str, Any], path: Path, head: HeadName = "score") -> NativeConfig:
    """The meaning of a config.json that has been read.

    Raises:
        ValueError: a model_type, key or value that is not supported, by name.
    """
    family, arch = read_arch(raw, path)
    return NativeConfig(path, raw, family, arch, _head_of(family, head, path))


def read_native_config(folder: Path, head: HeadName = "score") -> NativeConfig:
    """The config.json of a folder.

    Raises:
        FileNotFoundError, ValueError: there is none, or it says what is not supported.
    """
    return native_config(read_config(folder), folder / "config.json", head)


def transformers_config(raw: dict[str, Any], path: Path, head: HeadName) -> Any:
    """The config object of transformers: what tokenizers, trackers and scripts ask `model.config` for.

    Raises:
        ValueError: its class refuses a value.
    """
    config = config_object(raw, str(path), name_or_path=path.parent, **CONFIG_VALUES[head])
    if head == "score":
        config.use_cache = False
    return config


def with_values(raw: dict[str, Any], values: dict[str, Any], path: Path, head: HeadName) -> dict[str, Any]:
    """A config.json in which `values` that its config object has stand in the place of its own, as transformers'
    from_pretrained takes them among its arguments.

    A value of PASSED_OVER is left out where the config object has none.

    Raises:
        TypeError: the config object has no such value.
    """
    if not values:
        return raw
    config = transformers_config(raw, path, head)
    known = config.to_dict().keys() | config.attribute_map.keys()
    values = {name: value for name, value in values.items() if name in known or name not in PASSED_OVER}
    if unknown := values.keys() - known:
        raise not_taken(unknown)
    named = {config.attribute_map.get(name, name): value for name, value in values.items()}
    older = ("rope_theta", "rope_scaling") if "rope_parameters" in named else ()  # which say the same
    found = {name: value for name, value in raw.items() if name not in older} | named
    if "num_hidden_layers" in named and isinstance(found.get("layer_types"), list):
        found["layer_types"] = found["layer_types"][: named["num_hidden_layers"]]
    return found


def changes(config: Any, raw: dict[str, Any], path: Path, head: HeadName) -> dict[str, Any]:
    """The keys of a config object that are not as in the config.json that it was made of, those of a part of it under
    its name: what a run and its script have set."""
    loaded = transformers_config(raw, path, head)
    return _different(*(json.loads(one.to_json_string(use_diff=False)) for one in (loaded, config)))


def _different(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in now.items():
        if key in _OF_FILES or key.startswith("_") or (key in before and before[key] == value):
            continue
        parts = isinstance(value, dict) and isinstance(before.get(key), dict)
        found[key] = _different(before[key], value) if parts else value
    return found


def _head_of(family: Family, head: HeadName, path: Path) -> Head:
    """The head of that name for a family."""
    found = {"score": family.score_head, "lm": family.lm_head}[head]
    if found is None:
        raise ValueError(
            f"{path}: model_type {family.model_type!r} reads in both directions and has no causal language model. Pass "
            "a checkpoint of a decoder: llama, qwen3, gpt2."
        )
    return found


# ----------------------------------------------------------------------------------------------------
# The arguments of `from_pretrained`: those that say what to fetch, those without effect, and values of the config.


logger = logging.getLogger(__name__)

_DTYPES = ("float32", "bfloat16", "float16", "auto")
_PLACEMENT = ("device_map", "low_cpu_mem_usage", "max_memory", "offload_folder")
_WITHOUT_EFFECT = ("use_safetensors", "ignore_mismatched_sizes", "use_flash_attention_2")
_ATTENTION = (None, "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")
_HUB_KERNEL = re.compile(r"[\w.-]+/[\w.-]+(@[\w.-]+)?(:\w+)?")  # torch's, which computes the same attention
_FETCH = ("revision", "subfolder", "token", "cache_dir", "local_files_only", "gguf_file")


def checked_arguments(kwargs: dict[str, Any], dtype: Any) -> tuple[dict[str, Any], str, dict[str, Any]]:
    """The arguments that say where to fetch from, the dtype's name, and those that may be values of the config
    (`config.native.with_values`); the others are checked by name."""
    dtype = kwargs.pop("torch_dtype", dtype)
    dtype = str(dtype).removeprefix("torch.") if dtype is not None else "auto"
    if dtype not in _DTYPES:
        raise ValueError(f"dtype is {dtype!r}, wanted one of {', '.join(_DTYPES)}.")
    attention = kwargs.pop("attn_implementation", None)
    if attention not in _ATTENTION and not (isinstance(attention, str) and _HUB_KERNEL.fullmatch(attention)):
        known = ", ".join(map(str, _ATTENTION))
        raise ValueError(f"attn_implementation is {attention!r}, wanted one of {known}, or a kernel as owner/name.")
    for key in _WITHOUT_EFFECT:
        kwargs.pop(key, None)
    for key in _PLACEMENT:
        if kwargs.pop(key, None) is not None:
            logger.warning(
                "%s has no effect in trl_jax: arrays go to JAX's default device, or to all of a mesh with mesh_shape=.",
                key,
            )
    code = as_bool("trust_remote_code", kwargs.pop("trust_remote_code", False), optional=True)
    if code:
        logger.warning(
            "trust_remote_code has no effect on models, whose own code is never run. It lets the code of a tokenizer "
            "run, where its tokenizer_config.json names some (auto_map)."
        )
    fetch = {key: kwargs.pop(key) for key in _FETCH if key in kwargs}
    fetch = {key: value for key, value in fetch.items() if value is not None}
    if "local_files_only" in fetch:
        fetch["local_files_only"] = as_bool("local_files_only", fetch["local_files_only"])
    return fetch | {"code": bool(code)}, dtype, kwargs


def not_taken(names: Iterable[str], why: str = "") -> TypeError:
    """The error of arguments that are none of from_pretrained's, and no values of the config."""
    return TypeError(
        f"from_pretrained (model_init_kwargs) does not take {', '.join(sorted(names))}. It takes num_labels, dtype, "
        f"attn_implementation, {', '.join(_FETCH)}, and values of the checkpoint's config.json{why}."
    )


@contextmanager
def told_of(argument: str) -> Iterator[None]:
    """Let errors of a block that loads a model call it by the `argument` that names it, where they say model=."""
    try:
        yield
    except (FileNotFoundError, ValueError, TypeError) as error:
        text = re.sub(r"\bmodel=", f"{argument}=", str(error))
        if text == str(error) or type(error) not in (FileNotFoundError, ValueError, TypeError):
            raise
        raise type(error)(text) from error.__cause__
