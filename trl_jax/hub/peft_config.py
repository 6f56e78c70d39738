"""PEFT's adapter configs: LoRA, prefix tuning, prompt tuning and p-tuning.

They have PEFT's fields and JSON keys, but do not import peft.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from trl_jax.config.rules import MOST_FLOAT32, bool_fields
from trl_jax.core import files
from trl_jax.core.files import write_whole
from trl_jax.core.text import brief, listed

# What all configs have


CONFIG, WEIGHTS, PICKLED = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
PEFT = "0.21.2"  # the PEFT release whose format is implemented


class TaskType(str, Enum):  # noqa: UP042 - like PEFT's; format() behaves differently for StrEnum
    """PEFT's names for the tasks of models with an adapter."""

    SEQ_CLS = "SEQ_CLS"
    SEQ_2_SEQ_LM = "SEQ_2_SEQ_LM"
    CAUSAL_LM = "CAUSAL_LM"
    TOKEN_CLS = "TOKEN_CLS"
    QUESTION_ANS = "QUESTION_ANS"
    FEATURE_EXTRACTION = "FEATURE_EXTRACTION"


@dataclass
class PeftConfig:
    """The fields that all PEFT configs start with, and how they are checked and saved.

    kind: PEFT's name of the type, which is the value of `peft_type`.
    method: what the type is called in text.
    """

    task_type: str | TaskType | None = None
    peft_type: str | None = None
    auto_mapping: dict | None = None
    peft_version: str | None = None
    base_model_name_or_path: str | None = None
    revision: str | None = None
    inference_mode: bool = False
    kind: ClassVar[str]
    method: ClassVar[str]
    is_adaption_prompt: ClassVar[bool] = False

    def __post_init__(self):
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, np.ndarray):
                raise ValueError(f"{type(self).__name__}: {f.name} must not be an array, got {brief(value)}.")
            if isinstance(value, np.generic):
                setattr(self, f.name, value.item())
        self.peft_type, self.peft_version = self.kind, self.peft_version or PEFT
        if self.task_type is not None:
            self.task_type = task_of(self.task_type)

    @property
    def is_prompt_learning(self) -> bool:
        return isinstance(self, PromptLearningConfig)

    def must(self, good: bool, name: str, requirement: str) -> None:
        """Raise ValueError unless `good`; `requirement` describes a valid value of the field."""
        if not good:
            raise ValueError(f"{type(self).__name__}: {name} must be {requirement}, got {brief(getattr(self, name))}.")

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON types."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def save_pretrained(self, save_directory: str | Path) -> None:
        """Write adapter_config.json, creating the folder if needed."""
        Path(save_directory).mkdir(parents=True, exist_ok=True)
        write_whole(Path(save_directory) / CONFIG, json.dumps(self.to_dict(), indent=2, sort_keys=True))

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> Any:
        """Read the adapter_config.json of a folder. Raises like `read_keys`, or ValueError for another type."""
        keys, source = read_keys(Path(folder)), str(Path(folder) / CONFIG)
        if kind_of(keys) != cls.kind:
            raise ValueError(f"{source}: peft_type must be {cls.kind}, got {brief(kind_of(keys))}.")
        return config_of(cls, keys, source)


# LoraConfig


@dataclass
class LoraConfig(PeftConfig):
    """PEFT's fields, defaults and order. Unsupported options are refused when the adapter is added to a model.

    r, lora_alpha: the rank, and the numerator of the scale: lora_alpha / r, or lora_alpha / sqrt(r) with `use_rslora`.
    target_modules: module names or suffixes of them, a regular expression for full names, or "all-linear".
    modules_to_save: suffixes of the names of modules to train fully; the head is always one of them.
    rank_pattern, alpha_pattern: regular expressions for suffixes of names -> a different rank or alpha.
    """

    r: int = 8
    target_modules: list[str] | set[str] | str | None = None
    exclude_modules: list[str] | set[str] | str | None = None
    lora_alpha: int = 8
    lora_dropout: float = 0.0
    fan_in_fan_out: bool = False
    bias: str = "none"
    use_rslora: bool = False
    modules_to_save: list[str] | None = None
    init_lora_weights: bool | str = True
    layers_to_transform: list[int] | int | None = None
    layers_pattern: list[str] | str | None = None
    rank_pattern: dict[str, int] | None = field(default_factory=dict)
    alpha_pattern: dict[str, int] | None = field(default_factory=dict)
    megatron_config: dict | None = None
    megatron_core: str | None = "megatron.core"
    trainable_token_indices: list[int] | dict[str, list[int]] | None = None
    loftq_config: dict = field(default_factory=dict)
    eva_config: Any = None
    corda_config: Any = None
    lora_ga_config: Any = None
    use_dora: bool = False
    velora_config: Any = None
    alora_invocation_tokens: list[int] | None = None
    use_qalora: bool = False
    qalora_group_size: int = 16
    monteclora_config: Any = None
    layer_replication: list[tuple[int, int]] | None = None
    runtime_config: Any = None
    lora_bias: bool = False
    target_parameters: list[str] | None = None
    use_bdlora: Any = None
    arrow_config: Any = None
    kasa_config: Any = None
    ensure_weight_tying: bool = False

    kind: ClassVar[str] = "LORA"
    method: ClassVar[str] = "LoRA"

    def __post_init__(self):
        super().__post_init__()
        _check(self)
        for name in ("target_modules", "exclude_modules"):
            if isinstance(vars(self)[name], list):
                setattr(self, name, set(vars(self)[name]))
        self.rank_pattern, self.alpha_pattern = dict(self.rank_pattern or {}), dict(self.alpha_pattern or {})

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON types. Sets are sorted, so that equal configs give equal files."""
        values = {name: value for name, value in super().to_dict().items() if name != "runtime_config"}
        return {name: sorted(value) if isinstance(value, set) else value for name, value in values.items()}


def task_of(task: Any) -> str:
    """PEFT's name of a task. Raises ValueError for an unknown task."""
    name = task.value if isinstance(task, Enum) else task
    if not isinstance(name, str) or name not in TaskType.__members__:
        raise ValueError(f"task_type must be one of {', '.join(TaskType.__members__)}, got {brief(name)}.")
    return name


def _whole(value: Any, minimum: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= minimum


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MOST_FLOAT32


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _pattern(value: Any) -> bool:
    """Whether `value` is a valid regular expression."""
    try:
        return isinstance(value, str) and bool(re.compile(value))
    except (re.error, OverflowError, RecursionError):
        return False


def _inner_pattern(value: Any) -> bool:
    """Whether `value` is a valid regular expression that can be embedded in another."""
    return _pattern(value) and _pattern(f"(?P<number>.)({value})")


def _patterns(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_inner_pattern, value))


def _list(value: Any, is_valid: Callable[[Any], bool]) -> bool:
    return isinstance(value, list | set | tuple) and all(map(is_valid, value))


def _check(config: LoraConfig) -> None:
    """Raise ValueError for the first field with an invalid value."""
    values, must = vars(config), config.must
    for name in bool_fields(LoraConfig):
        must(isinstance(values[name], bool), name, "True or False")
    for name in ("peft_version", "base_model_name_or_path", "revision"):
        must(isinstance(values[name], str | None), name, "a text or None")
    must(isinstance(config.auto_mapping, dict | None), "auto_mapping", "a dictionary or None")
    must(_whole(config.r, 1), "r", "an integer of at least 1")
    must(_number(config.lora_alpha), "lora_alpha", "a number")
    must(_number(config.lora_dropout) and 0 <= config.lora_dropout < 1, "lora_dropout", "at least 0 and below 1")
    must(config.bias in ("none", "all", "lora_only"), "bias", "none, all or lora_only")
    ranks, alphas = config.rank_pattern or {}, config.alpha_pattern or {}
    must(_patterns(ranks) and all(_whole(r, 1) for r in ranks.values()), "rank_pattern", "ranks of at least 1")
    must(_patterns(alphas) and all(map(_number, alphas.values())), "alpha_pattern", "numbers")
    _check_names(config)


def _check_names(config: LoraConfig) -> None:
    """Check the fields that select modules and layers."""
    must = config.must
    for name, is_valid in (("modules_to_save", _inner_pattern), ("target_parameters", _text)):
        value = vars(config)[name]
        must(value is None or _list(value, is_valid), name, "a list of names")
    for name in ("target_modules", "exclude_modules"):
        value = vars(config)[name]
        must(value is None or _pattern(value) or _list(value, _text), name, "a list of names or a single pattern")
    tokens = config.trainable_token_indices
    lists = list(tokens.values()) if isinstance(tokens, dict) else [tokens]
    good = tokens is None or all(_list(ids, lambda token: _whole(token, 0)) for ids in lists)
    must(good, "trainable_token_indices", "a list of ids, or a dictionary of such lists by embedding name")
    layers, patterns = config.layers_to_transform, config.layers_pattern
    good = layers is None or _whole(layers, 0) or _list(layers, lambda layer: _whole(layer, 0))
    must(good, "layers_to_transform", "a layer index of at least 0, or a list of them")
    good = patterns is None or _inner_pattern(patterns) or _list(patterns, _inner_pattern)
    must(good, "layers_pattern", "a pattern, or a list of patterns")
    if isinstance(config.target_modules, str):
        for name in ("layers_to_transform", "layers_pattern"):
            must(not vars(config)[name], name, "None if target_modules is a pattern, which can select layers itself")
    must(not patterns or layers is not None, "layers_pattern", "None without layers_to_transform")


# Fields for variants other than LoRA and DoRA, with the values that leave these variants off.
_BEYOND = {
    "megatron_config": (None,), "loftq_config": ({}, None), "eva_config": (None,),
    "corda_config": (None,), "lora_ga_config": (None,), "velora_config": (None,), "alora_invocation_tokens": (None,),
    "use_qalora": (False,), "monteclora_config": (None,), "layer_replication": (None,), "use_bdlora": (None,),
    "arrow_config": (None,), "kasa_config": (None,), "ensure_weight_tying": (False,),
}  # fmt: skip
PISSA = "pissa"
_INITIAL = (True, False, "gaussian", PISSA)


def refuse_beyond(config: LoraConfig) -> None:
    """Raise ValueError for the first unsupported option; the message suggests an alternative."""
    for name, idle in _BEYOND.items():
        value = vars(config)[name]
        if value not in idle:
            raise ValueError(f"LoraConfig: {name}={brief(value)} is not in this release of trl_jax. Leave it out.")
    if config.init_lora_weights not in _INITIAL:
        raise ValueError(
            f"LoraConfig: init_lora_weights={brief(config.init_lora_weights)} modifies the base model or needs data, "
            "which is not in this release of trl_jax. Use True, False, 'gaussian' or 'pissa'. Alternatively, "
            "initialize the adapter with PEFT, save it along with the modified base model, and set init_lora_weights "
            "to true in its adapter_config.json."
        )
    if config.lora_bias and (config.use_dora or config.init_lora_weights not in (True, False)):
        raise ValueError(
            "LoraConfig: lora_bias=True cannot be combined with use_dora or with init_lora_weights='gaussian' or "
            "'pissa'. Leave one out."
        )


def already_initialized(config: LoraConfig) -> LoraConfig:
    """The config of an adapter that is already initialized: without the options that would modify the base model
    again."""
    began = {"init_lora_weights": True, "loftq_config": {}}
    return replace(config, **began, **dict.fromkeys(("eva_config", "corda_config", "lora_ga_config")))


def no_adapter_error(where: str, pickled: bool) -> FileNotFoundError:
    """The error for an adapter whose weights are missing, or only available as a pickle."""
    way_out = "Save it with safe_serialization=True."
    note = f" It has {PICKLED}, but pickles are not read. {way_out}" if pickled else ""
    return FileNotFoundError(f"{where} has no {WEIGHTS}.{note}")


def read_keys(folder: Path) -> dict[str, Any]:
    """Read the adapter_config.json of a folder.

    Raises:
        FileNotFoundError, ValueError: the file is missing, or not a JSON object.
    """
    path = folder / CONFIG
    try:
        keys = files.read(path)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}.") from error
    if not isinstance(keys, dict):
        raise ValueError(f"{path} must hold an object with peft_type, got a {type(keys).__name__}.")
    return keys


def kind_of(keys: dict[str, Any]) -> Any:
    """PEFT's name for the type of an adapter."""
    kind = keys.get("peft_type")
    return kind.value if isinstance(kind, Enum) else kind


def config_of(cls: type, keys: dict[str, Any], source: str) -> Any:
    """The config of class `cls` with these keys. Raises ValueError for unknown keys, which a later PEFT release may
    use."""
    names = {f.name for f in fields(cls)}
    unknown = sorted(key for key, value in keys.items() if key not in names and value not in (None, False, {}, []))
    if unknown:
        raise ValueError(
            f"{source} has {listed(unknown)}, which PEFT {PEFT} does not know (peft_version is "
            f"{brief(keys.get('peft_version'))}). They may change what the adapter computes. Save it with that release."
        )
    return cls(**{key: _copied(value) for key, value in keys.items() if key in names})


def _copied(value: Any) -> Any:
    return type(value)(value) if isinstance(value, list | set | dict) else value


# Configs of virtual tokens (prompt learning)


VECTORS = "prompt_embeddings"  # PEFT's name for the vectors in an adapter's file
ENCODER = "prompt_encoder.safetensors"  # weights of the network that computes the vectors; PEFT does not save them


class PromptTuningInit(str, Enum):  # noqa: UP042 - like PEFT's
    """PEFT's names for the initializations of prompt tuning."""

    TEXT = "TEXT"
    SAMPLE_VOCAB = "SAMPLE_VOCAB"
    RANDOM = "RANDOM"


class PromptEncoderReparameterizationType(str, Enum):  # noqa: UP042
    """PEFT's names for the networks of p-tuning."""

    MLP = "MLP"
    LSTM = "LSTM"


@dataclass
class PromptLearningConfig(PeftConfig):
    """The fields shared by all kinds of virtual tokens. Sizes that are None are taken from the model.

    num_virtual_tokens: number of virtual tokens before each text.
    token_dim: size of a virtual token's vector.
    """

    num_virtual_tokens: int | None = None
    token_dim: int | None = None
    num_transformer_submodules: int | None = None
    num_attention_heads: int | None = None
    num_layers: int | None = None
    modules_to_save: list[str] | None = None

    positive: ClassVar[tuple[str, ...]] = ("num_virtual_tokens", "token_dim", "num_attention_heads", "num_layers")

    def __post_init__(self):
        super().__post_init__()
        for f in fields(self):
            if isinstance(value := getattr(self, f.name), Enum):
                setattr(self, f.name, value.value)
        for name in self.positive:
            value = getattr(self, name)
            self.must(value is None or _whole(value, 1), name, "an integer of at least 1")


@dataclass
class PromptTuningConfig(PromptLearningConfig):
    """PEFT's PromptTuningConfig: trains one vector per virtual token.

    prompt_tuning_init: initialize from RANDOM numbers, or from embeddings of random tokens (SAMPLE_VOCAB) or of a TEXT.
    prompt_tuning_init_text, tokenizer_name_or_path, tokenizer_kwargs: that text and its tokenizer.
    """

    prompt_tuning_init: str | PromptTuningInit = "RANDOM"
    prompt_tuning_init_text: str | None = None
    tokenizer_name_or_path: str | None = None
    tokenizer_kwargs: dict | None = None

    kind: ClassVar[str] = "PROMPT_TUNING"
    method: ClassVar[str] = "prompt tuning"

    def __post_init__(self):
        super().__post_init__()
        self.must(str(self.prompt_tuning_init) in PromptTuningInit.__members__, "prompt_tuning_init",
                  " or ".join(PromptTuningInit.__members__))  # fmt: skip
        if self.prompt_tuning_init == PromptTuningInit.TEXT:
            for name in ("tokenizer_name_or_path", "prompt_tuning_init_text"):
                if getattr(self, name) is None:
                    raise ValueError(f"When prompt_tuning_init='TEXT', {name} can't be None.")
        elif self.tokenizer_kwargs:
            raise ValueError("tokenizer_kwargs only valid when using prompt_tuning_init='TEXT'.")


@dataclass
class PrefixTuningConfig(PromptLearningConfig):
    """PEFT's PrefixTuningConfig: trains the keys and values of virtual tokens in each layer.

    token_dim, num_attention_heads: size of a layer's keys over all heads, and number of key heads.
    init_weights: "zero" initializes with zeros.
    prefix_projection: compute the vectors with a network with `encoder_hidden_size` hidden units.
    """

    init_weights: str | None = None
    encoder_hidden_size: int | None = None
    prefix_projection: bool = False

    kind: ClassVar[str] = "PREFIX_TUNING"
    method: ClassVar[str] = "prefix tuning"
    positive: ClassVar[tuple[str, ...]] = (*PromptLearningConfig.positive, "encoder_hidden_size")

    def __post_init__(self):
        super().__post_init__()
        self.must(self.init_weights in (None, "zero"), "init_weights", "None or 'zero'")
        self.must(isinstance(self.prefix_projection, bool), "prefix_projection", "True or False")


@dataclass
class PromptEncoderConfig(PromptLearningConfig):
    """PEFT's PromptEncoderConfig (p-tuning): trains a small network that computes the vectors of the virtual tokens.

    encoder_reparameterization_type: MLP or LSTM.
    encoder_hidden_size: its hidden size; None uses the model's.
    encoder_num_layers, encoder_dropout: only for an LSTM.
    """

    encoder_reparameterization_type: str | PromptEncoderReparameterizationType = "MLP"
    encoder_hidden_size: int | None = None
    encoder_num_layers: int = 2
    encoder_dropout: float = 0.0

    kind: ClassVar[str] = "P_TUNING"
    method: ClassVar[str] = "P-tuning"
    positive: ClassVar[tuple[str, ...]] = (
        *PromptLearningConfig.positive, "encoder_hidden_size", "encoder_num_layers",
    )  # fmt: skip

    def __post_init__(self):
        super().__post_init__()
        names = PromptEncoderReparameterizationType.__members__
        self.must(
            str(self.encoder_reparameterization_type) in names, "encoder_reparameterization_type", " or ".join(names)
        )
        rate = self.encoder_dropout
        self.must(_number(rate) and 0 <= rate < 1, "encoder_dropout", "at least 0 and below 1")


# Configs of any adapter type, from our objects, peft's objects or folders


AdapterConfig = LoraConfig | PromptLearningConfig
CONFIGS = {cls.kind: cls for cls in (LoraConfig, PromptTuningConfig, PromptEncoderConfig, PrefixTuningConfig)}
# Other PEFT types -> the nearest supported one.
_NEAREST = {
    "ADALORA": "LoraConfig with rank_pattern", "LOHA": "LoraConfig", "LOKR": "LoraConfig", "IA3": "LoraConfig(r=1)",
    "OFT": "LoraConfig(use_dora=True)", "BOFT": "LoraConfig(use_dora=True)", "HRA": "LoraConfig(use_dora=True)",
    "DELORA": "LoraConfig(use_dora=True)", "LN_TUNING": "LoraConfig(r=1, modules_to_save=['norm'])",
    "CPT": "PromptTuningConfig", "MULTITASK_PROMPT_TUNING": "PromptTuningConfig",
    "TRAINABLE_TOKENS": "LoraConfig(modules_to_save=['embed_tokens'])",
}  # fmt: skip


def as_adapter_config(config: Any) -> AdapterConfig:
    """Convert an adapter config, of our classes or peft's, to a new config of our classes.

    Raises:
        TypeError, ValueError: `config` is not an adapter config, or its type is not supported.
    """
    if isinstance(config, AdapterConfig):
        return replace(config)
    if not type(config).__module__.startswith("peft."):
        names = ", ".join(f"trl_jax.{cls.__name__}" for cls in CONFIGS.values())
        raise TypeError(f"peft_config must be {names}, from trl_jax or peft, got a {type(config).__qualname__}.")
    return _from_keys(config.to_dict(), "peft_config")


def read_adapter_config(folder: Path) -> AdapterConfig:
    """Read the adapter_config.json of a folder.

    Raises:
        FileNotFoundError, ValueError: the file is missing, not valid JSON, or from a later PEFT release, or its
            type is not supported.
    """
    return _from_keys(read_keys(folder), str(folder / CONFIG))


def _from_keys(keys: dict[str, Any], source: str) -> AdapterConfig:
    kind = kind_of(keys)
    if kind not in CONFIGS:
        nearest = _NEAREST.get(str(kind), "LoraConfig")
        kind = brief(kind)
        raise ValueError(f"{source}: peft_type={kind} is not in this release of trl_jax; the closest is {nearest}.")
    return config_of(CONFIGS[kind], keys, source)


def positions_left(max_positions: int | None, config: AdapterConfig | None) -> int | None:
    """The number of positions that virtual tokens leave for the text; None if there is no limit."""
    taken = config.num_virtual_tokens if isinstance(config, PromptLearningConfig) else None
    return max_positions if max_positions is None else max_positions - (taken or 0)
