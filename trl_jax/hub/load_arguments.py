"""The arguments of `from_pretrained`: those that say what to fetch, those without effect, and values of the config."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from trl_jax.core.arguments.values import as_bool

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
