"""Read config.json strictly: every key that transformers reads must be read here or refused."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import logging
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from trl_jax.core import files
from trl_jax.core.files import WEIGHT_DTYPES
from trl_jax.core.text import brief, listed
from trl_jax.hub.gguf import METHOD as MXFP4
from trl_jax.models.arch import Arch
from trl_jax.nn.rope import Rope

logger = logging.getLogger(__name__)

# Layer types: full or sliding-window attention


FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"


def read_layer_types(config: ConfigReader, default: list[str]) -> list[str]:
    """`layer_types`: FULL or SLIDING for each layer."""
    types = config.names("layer_types") or default
    if len(types) != len(default) or set(types) - {FULL, SLIDING}:
        raise ValueError(
            f"{config.source}: layer_types must be {len(default)} entries of {FULL} or {SLIDING}, got {len(types)} "
            f"entries of {sorted(set(types))}."
        )
    return types


def read_window(config: ConfigReader) -> int | None:
    """`sliding_window` in tokens; None if it is null, or absent without a default for the model_type."""
    return None if config.value("sliding_window") is None else config.size("sliding_window")


def windows_of(types: list[str], window: int | None) -> tuple[int | None, ...]:
    """The attention window of each layer; None for full attention."""
    return tuple(window if kind == SLIDING else None for kind in types)


# transformers' config objects


def config_class(model_type: str) -> Any:
    """transformers' config class for a model_type."""
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[model_type]


def config_object(raw: dict[str, Any], source: str, **values: Any) -> Any:
    """transformers' config object for a config.json; `values` override some of its values.

    Raises:
        ValueError: the config class rejects a value.
    """
    content = with_floats(copy.deepcopy(raw))  # config classes modify their input
    try:
        return config_class(raw["model_type"]).from_dict(content, **values)
    except Exception as error:  # config classes validate with errors of many types, none of which names the file
        raise ValueError(f"{source}: transformers rejects this config: {error}. Correct that key.") from error


# Rope: older configs have `rope_theta` and `rope_scaling`, newer ones `rope_parameters`


_NEEDED = {
    "default": set(),
    "linear": {"factor"},
    "proportional": set(),
    "llama3": {"factor", "low_freq_factor", "high_freq_factor"},
    "yarn": {"factor"},
    "longrope": {"short_factor", "long_factor"},
}
_TAKEN = {
    "default": set(),
    "linear": set(),
    "proportional": {"factor"},
    "llama3": {"original_max_position_embeddings"},
    "yarn": {
        "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale",
        "mscale_all_dim", "truncate",
    },
    "longrope": {"original_max_position_embeddings", "attention_factor", "factor"},
}  # fmt: skip
_ALWAYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
KINDS = tuple(_NEEDED)
_OF_ALL = tuple(kind for kind in KINDS if kind != "proportional")  # which needs the head size of each layer type
_TINY = 1e-9  # lower bound for divisors
_LEAST_THETA = 1.001  # keeps log(theta), a divisor, above 0


def read_rope(config: ConfigReader, *, partial: bool = False, extra_keys: frozenset[str] = frozenset()) -> Rope:
    """The rope of a decoder whose layers all share it.

    Args:
        partial: whether this model_type supports `partial_rotary_factor` (see `read_rotary_dim`); otherwise refuse it.
        extra_keys: keys of the rope section that the family reads itself.

    Raises:
        ValueError: the rope type is not supported, or a key is unknown or missing; the message names it.
    """
    theta = config.number("rope_theta", 10_000.0, minimum=_LEAST_THETA)
    return _rope(config, _section(config), theta, partial=partial, extra_keys=extra_keys)


def read_ropes(
    config: ConfigReader, types: list[str], *, local_theta: float, channels: Mapping[str, int] | None = None
) -> tuple[Rope, ...]:
    """The rope of each layer, if `rope_parameters` has a section for each layer type.

    In older configs, `rope_scaling` applies to full attention only, and `rope_local_base_freq` is the theta of sliding
    attention.

    Args:
        types: the type of each layer.
        channels: head size by layer type, if they differ; only these ropes may be proportional.
    """
    theta = config.number("rope_theta", 10_000.0, minimum=_LEAST_THETA)
    thetas = {FULL: theta, SLIDING: config.number("rope_local_base_freq", local_theta, minimum=_LEAST_THETA)}
    nested, legacy = config.section("rope_parameters"), config.section("rope_scaling")
    unknown = sorted(set(nested) - {FULL, SLIDING})
    if unknown:
        raise config.wrong("rope_parameters", unknown, f"sections for {FULL} and {SLIDING}")
    ropes = {}
    for kind, default in thetas.items():
        section = {"rope_type": "default", **(nested.get(kind) or {})}  # `type` alone has no effect here
        section = section | legacy if kind == FULL else section
        source = f"{config.source}: rope_parameters.{kind}"
        rope = ConfigReader(_without_null(section), source)
        if channels is not None and section["rope_type"] == "proportional":
            ropes[kind] = _proportional(rope, default)
        else:
            ropes[kind] = _rope(config, rope, default, partial=False)
        ropes[kind] = ropes[kind] if channels is None else replace(ropes[kind], channels=channels[kind])
    return tuple(ropes[kind] for kind in types)


def read_rotary_dim(
    config: ConfigReader, head_dim: int, default: float, key: str = "partial_rotary_factor", *, whole: bool = False
) -> int:
    """Number of rotated channels per head, from `partial_rotary_factor` of the rope section or `key` of the config.

    `whole`: accept any integer that transformers can compute, including odd ones (see `Rope.frequencies`).
    """
    fraction = config.number(key, default, maximum=1.0)
    fraction = _section(config).number("partial_rotary_factor", fraction, maximum=1.0)
    channels = int(head_dim * fraction)
    if not whole and (channels < 2 or channels % 2):
        raise config.wrong(key, fraction, f"a fraction of the {head_dim} channels per head that is even and at least 2")
    return channels


def rotated(config: ConfigReader, arch: Arch, default: float, key: str = "partial_rotary_factor") -> Arch:
    """`arch` with the number of rotated channels set, which can be odd or zero in very small models; arguments are as
    in `read_rotary_dim`."""
    whole = arch.ropes[0].kind in ("default", "linear")
    rotary_dim = read_rotary_dim(config, arch.head_dim, default, key, whole=whole)
    return replace(arch, rotary_dim=rotary_dim, ropes=arch.ropes if rotary_dim else (None,) * arch.num_layers)


def with_scales_by_length(config: ConfigReader, rope: Rope) -> Rope:
    """phimoe's rope: all kinds except the default are scaled by `short_mscale`, or by `long_mscale` for long texts. The
    frequencies are always the short ones, regardless of the text's length, as in transformers 5.23."""
    if rope.kind == "default":
        return rope
    section, length = _section(config), config.value("original_max_position_embeddings")
    length = config.size("max_position_embeddings") if length is None else length
    return replace(
        rope,
        original_length=section.size("original_max_position_embeddings", length),
        attention_factor=section.number("short_mscale"),
        long_attention_factor=section.number("long_mscale"),
        long_factors=rope.short_factors,
    )


def read_score_scale(config: ConfigReader) -> float:
    """DeepSeek's factor on attention scores if yarn has `mscale_all_dim`, as in transformers; otherwise 1."""
    section = _section(config)
    kind = section.value("rope_type", section.value("type", "default"))
    mscale = section.number("mscale_all_dim", 0.0)
    if kind == "default" or not mscale:
        return 1.0
    factor = section.number("factor")
    return (0.1 * mscale * math.log(factor) + 1.0) ** 2 if factor > 1 else 1.0


def _section(config: ConfigReader) -> ConfigReader:
    """`rope_scaling` or else `rope_parameters`: the older key takes precedence, as in transformers."""
    legacy, current = config.section("rope_scaling"), config.section("rope_parameters")
    name = "rope_scaling" if legacy else "rope_parameters"
    return ConfigReader(_without_null(legacy or current), f"{config.source}: {name}")


def _without_null(section: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in section.items() if value is not None}


def _rope(
    config: ConfigReader, rope: ConfigReader, theta: float, *, partial: bool, extra_keys: frozenset[str] = frozenset()
) -> Rope:
    kind = rope.one_of("rope_type", _OF_ALL, rope.one_of("type", _OF_ALL, "default"))
    if not partial and rope.number("partial_rotary_factor", 1.0) != 1.0:
        raise rope.wrong("partial_rotary_factor", rope.raw["partial_rotary_factor"], "1.0 for this model_type")
    _check_keys(rope, kind, extra_keys)
    theta = rope.number("rope_theta", theta, minimum=_LEAST_THETA)
    if kind == "default":
        return Rope(theta=theta)
    if kind == "longrope":
        return Rope(theta=theta, kind=kind, **_longrope_details(config, rope))
    return Rope(theta=theta, kind=kind, factor=rope.number("factor", minimum=_TINY), **_details(config, rope, kind))


def _proportional(rope: ConfigReader, theta: float) -> Rope:
    """A rope that rotates only a fraction of the channel pairs."""
    _check_keys(rope, "proportional", frozenset())
    theta = rope.number("rope_theta", theta, minimum=_LEAST_THETA)
    fraction = rope.number("partial_rotary_factor", 1.0, maximum=1.0)
    return Rope(theta=theta, kind="proportional", factor=rope.number("factor", 1.0, minimum=_TINY), fraction=fraction)


def _check_keys(rope: ConfigReader, kind: str, extra_keys: frozenset[str]) -> None:
    keys = set(rope.raw) - _ALWAYS - extra_keys
    unknown, missing = sorted(keys - _NEEDED[kind] - _TAKEN[kind]), sorted(_NEEDED[kind] - keys)
    if unknown:
        raise ValueError(f"{rope.source}: rope_type {kind!r} does not accept {listed(unknown)}.")
    if missing:
        raise ValueError(f"{rope.source}: rope_type {kind!r} requires {', '.join(missing)}.")


def _details(config: ConfigReader, rope: ConfigReader, kind: str) -> dict[str, Any]:
    """The fields of Rope that this type needs in addition to `factor`."""
    if kind == "linear":
        return {}
    length = rope.size("original_max_position_embeddings", config.value("max_position_embeddings"))
    if kind == "llama3":
        low = rope.number("low_freq_factor")
        high = rope.number("high_freq_factor", minimum=low + _TINY)
        return {"original_length": length, "low_freq_factor": low, "high_freq_factor": high}
    factor = rope.number("factor", minimum=_TINY)
    mscale, mscale_all = rope.number("mscale", 0.0), rope.number("mscale_all_dim", 0.0)
    return {
        "original_length": length,
        "attention_factor": rope.number("attention_factor", _yarn_attention(factor, mscale, mscale_all)),
        "beta_fast": rope.number("beta_fast", 32.0) or 32.0,
        "beta_slow": rope.number("beta_slow", 1.0) or 1.0,
        "truncate": rope.flag("truncate", True),
    }


def _yarn_attention(factor: float, mscale: float, mscale_all: float) -> float:
    """YaRN's temperature for cosines and sines (arXiv:2309.00071, eq. 22); a scale of 0 counts as absent."""

    def temperature(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    if mscale and mscale_all:
        return temperature(mscale) / temperature(mscale_all)
    return temperature(1.0)


def _longrope_details(config: ConfigReader, rope: ConfigReader) -> dict[str, Any]:
    longest = config.size("max_position_embeddings")
    original = config.size("original_max_position_embeddings", longest)
    original = rope.size("original_max_position_embeddings", original, minimum=2)
    stretch = rope.number("factor", longest / original, minimum=_TINY)
    temperature = 1.0 if stretch <= 1 else math.sqrt(1 + math.log(stretch) / math.log(original))
    return {
        "original_length": original,
        "attention_factor": rope.number("attention_factor", temperature),
        "short_factors": rope.numbers("short_factor"),
        "long_factors": rope.numbers("long_factor"),
    }


# ConfigReader: every key is read, declared inert, logged as unread by transformers, or refused


# Keys that do not affect the computation: bookkeeping, labels, token ids, generation settings.
INERT = frozenset(
    """
    add_cross_attention architectures attn_implementation auto_map bad_words_ids begin_suppress_tokens bos_token_id
    cache_implementation chunk_size_feed_forward cross_attention_hidden_size decoder_start_token_id diversity_penalty
    do_sample dtype early_stopping encoder_no_repeat_ngram_size eod_token_id eos_token_id
    exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id id2label is_decoder
    is_encoder_decoder is_llama_config label2id length_penalty mask_token_id max_length max_position_embeddings
    max_sequence_length min_length model_type name no_repeat_ngram_size num_beam_groups num_beams num_labels
    num_return_sequences output_attentions output_hidden_states output_scores pad_token_id prefix pretraining_tp
    problem_type pruned_heads remove_invalid_values repetition_penalty return_dict return_dict_in_generate
    sep_token_id suppress_tokens task_specific_params temperature tf_legacy_loss tie_encoder_decoder tokenizer_class
    top_k top_p torch_dtype torchscript transformers.js_config transformers_version typical_p unk_token_id
    unsloth_fixed unsloth_version use_bfloat16 use_cache
    """.split()
)


class ConfigReader:
    """Typed access to the values of a config.json; records which keys were read.

    `defaults` are those of transformers' config class; they take precedence over defaults passed along with a key.
    """

    def __init__(self, raw: dict[str, Any], source: str, defaults: dict[str, Any] | None = None):
        self.raw, self.source = raw, source
        self._defaults = defaults or {}
        self._asked = {"tie_word_embeddings"}

    def value(self, key: str, default: Any = None) -> Any:
        """The value; `default` if it is null, or if it is absent and the config class has no default."""
        self._asked.add(key)
        if key not in self.raw:
            return self._defaults.get(key, default)
        return default if self.raw[key] is None else self.raw[key]

    def with_values(self, **values: Any) -> ConfigReader:
        """A reader of the same config with some values replaced; both readers share the record of keys read."""
        reader = ConfigReader({**self.raw, **values}, self.source, self._defaults)
        reader._asked = self._asked
        return reader

    def is_null(self, key: str) -> bool:
        """Whether the key is present and null, which for some keys differs from their default."""
        return key in self.raw and self.raw[key] is None

    def size(self, key: str, default: int | None = None, *, minimum: int = 1, maximum: int = 2**31 - 1) -> int:
        """An integer from `minimum` to `maximum`."""
        value = self.value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
            raise self.wrong(key, value, f"a whole number from {minimum:,} to {maximum:,}")
        return value

    def number(self, key: str, default: float | None = None, *, minimum: float = 0.0, maximum: float = 1e30) -> float:
        """A finite number from `minimum` to `maximum`."""
        value = self.value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not minimum <= value <= maximum:
            raise self.wrong(key, value, f"a number from {minimum:g}" + ("" if maximum == 1e30 else f" to {maximum:g}"))
        return float(value)

    def optional_number(self, key: str) -> float | None:
        """A finite number; None if the key is null, or absent without a default."""
        return None if self.value(key) is None else self.number(key)

    def dropout(self, key: str, default: float = 0.0) -> float:
        return self.number(key, default, maximum=0.99)

    def skip(self, *keys: str) -> None:
        """Accept any value of these keys: they have no effect, at least not by themselves."""
        self._asked.update(keys)

    def fix(self, values: Mapping[str, Any]) -> None:
        """Refuse all values of these keys other than the given ones."""
        for key, value in values.items():
            self.refuse(key, value)

    def refuse(self, key: str, *allowed: Any) -> None:
        """Refuse all values except those allowed, because the others request something that is not implemented."""
        value = self.value(key, allowed[0])
        if value not in allowed:
            supported = " or ".join(map(repr, allowed))
            raise self.wrong(key, value, f"{supported}, the only value supported for this model_type")

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.value(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, value, "true or false")
        return value

    def one_of(self, key: str, choices: Any, default: Any = None) -> Any:
        value = self.value(key, default)
        if value not in list(choices):
            raise self.wrong(key, value, f"one of {', '.join(sorted(map(str, choices)))}")
        return value

    def section(self, key: str) -> dict[str, Any]:
        """A nested object; empty if the key is absent or null."""
        value = self.value(key, {})
        if not isinstance(value, dict):
            raise self.wrong(key, value, "an object")
        return value

    def numbers(self, key: str) -> tuple[float, ...]:
        """A list of finite numbers above 0."""
        value = self.value(key)
        number = int | float
        if not isinstance(value, list) or not all(isinstance(x, number) and 0 < x <= 1e30 for x in value):
            raise self.wrong(key, value, "a list of numbers above 0")
        return tuple(map(float, value))

    def limits(self, key: str) -> tuple[float, float]:
        """A lower and an upper limit, both at least 0; the upper one may be infinite."""
        value = with_floats(self.value(key))
        two = isinstance(value, list | tuple) and len(value) == 2 and all(isinstance(x, int | float) for x in value)
        if not two or not 0 <= value[0] <= value[1]:
            raise self.wrong(key, value, "a lower and an upper limit")
        return float(value[0]), float(value[1])

    def names(self, key: str) -> list[str] | None:
        """A list of strings; None if the key is absent or null."""
        value = self.value(key)
        if value is not None and not (isinstance(value, list) and all(isinstance(name, str) for name in value)):
            raise self.wrong(key, value, "a list of names")
        return value

    def wrong(self, key: str, value: Any, valid: str) -> ValueError:
        return ValueError(f"{self.source}: {key} must be {valid}, got {brief(value)}.")

    def finish(self, unread: Callable[[str], bool] = lambda key: False) -> None:
        """Refuse keys that have not been read: an unknown key may change what the model computes.

        Args:
            unread: whether transformers ignores a key too; such keys are only logged.
        """
        private = {key for key in self.raw if key.startswith("_")}  # transformers' internal notes
        unknown = sorted(set(self.raw) - self._asked - INERT - private)
        passed_over = [key for key in unknown if unread(key)]
        if passed_over:
            keys = listed(passed_over)
            logger.warning("%s: ignoring %s, which neither trl_jax nor transformers reads.", self.source, keys)
        unknown = [key for key in unknown if key not in passed_over]
        if unknown:
            kind, keys = brief(self.raw.get("model_type")), listed([f"{key}={brief(self.raw[key])}" for key in unknown])
            raise ValueError(
                f"{self.source} has keys that trl_jax does not know for model_type {kind}: "
                f"{keys}. They are not ignored because they might change what the model computes. Remove them if they "
                "have no effect."
            )


def with_floats(value: Any) -> Any:
    """Replace transformers' encoding of numbers that JSON lacks, such as {"__float__": "Infinity"}, by the numbers."""
    if isinstance(value, dict):
        if value.keys() == {"__float__"} and value["__float__"] in ("Infinity", "-Infinity", "NaN"):
            return float(value["__float__"])
        return {key: with_floats(part) for key, part in value.items()}
    return [with_floats(part) for part in value] if isinstance(value, list) else value


def read_config(folder: Path) -> dict[str, Any]:
    """Read `folder/config.json`. MXFP4 weights are loaded and saved as bfloat16, so their quantization config is
    dropped.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: it is not a JSON object, or the checkpoint is quantized by another method.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist. A checkpoint folder must hold config.json and *.safetensors.")
    try:
        raw = files.read(path)
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or beyond Python's limits on digits or nesting
        raise ValueError(f"{path} is not valid JSON ({error}). Download the checkpoint again.") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{path} must hold a JSON object, got a {type(raw).__name__}.")
    reader = ConfigReader(raw, str(path))
    reader.names("architectures")
    for key in ("id2label", "label2id"):
        reader.section(key)
    for key in ("dtype", "torch_dtype"):
        reader.one_of(key, WEIGHT_DTYPES, "float32")
    if not reader.section("quantization_config"):
        return raw
    method = raw["quantization_config"].get("quant_method")
    if method != MXFP4:
        raise ValueError(
            f"{path}: the weights are quantized (quant_method={brief(method)}), which this release of trl_jax cannot "
            f"read. Use the unquantized checkpoint, or one with quant_method={MXFP4!r}."
        )
    return {key: value for key, value in raw.items() if key != "quantization_config"}


# Keys that transformers ignores


_SHARED = ("cache_utils.py", "masking_utils.py", "modeling_rope_utils.py")


def is_unread(config_class: Any, key: str) -> bool:
    """Whether transformers ignores a key: neither the config class, nor the model code in its module, nor code shared
    by all models mentions it. False if that code is not available."""
    if key in config_class.attribute_map or any(key == field.name for field in dataclasses.fields(config_class)):
        return False
    code = _code(config_class)
    return bool(code) and not re.search(rf"""(\.{re.escape(key)}\b|["']{re.escape(key)}["'])""", code)


@cache
def _code(config_class: Any) -> str:
    folder = Path(inspect.getfile(config_class)).parent
    files = [*folder.glob("*.py"), *(folder.parent.parent / name for name in _SHARED)]
    texts = {file.name: file.read_text(encoding="utf-8") for file in files if file.is_file()}
    # In a model's own code, an attribute of self is not one of the config.
    return "\n".join(
        text if name.startswith("configuration") or name in _SHARED else re.sub(r"\bself\.", "self ", text)
        for name, text in texts.items()
    )
