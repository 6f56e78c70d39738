"""PEFT's configs of virtual tokens (prompt learning), field by field and key by key, without peft."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar

from trl_jax.core.printable import brief
from trl_jax.hub.peft.lora_config import PEFT, PeftConfig, read_config_of, task_of, write_config

VECTORS = "prompt_embeddings"  # PEFT's name of the vectors in an adapter's file
ENCODER = "prompt_encoder.safetensors"  # the arrays that they are made of, which PEFT does not save


class PromptTuningInit(str, Enum):  # noqa: UP042 - PEFT's own is such a mixture
    """PEFT's names for the first values of prompt tuning."""

    TEXT = "TEXT"
    SAMPLE_VOCAB = "SAMPLE_VOCAB"
    RANDOM = "RANDOM"


class PromptEncoderReparameterizationType(str, Enum):  # noqa: UP042
    """PEFT's names for the networks of P-tuning."""

    MLP = "MLP"
    LSTM = "LSTM"


@dataclass
class PromptLearningConfig(PeftConfig):
    """The fields that all kinds of virtual tokens have. Sizes of the model that are None are taken from it.

    num_virtual_tokens: how many stand before each text.
    token_dim: channels of a virtual token.
    """

    num_virtual_tokens: int | None = None
    token_dim: int | None = None
    num_transformer_submodules: int | None = None
    num_attention_heads: int | None = None
    num_layers: int | None = None
    modules_to_save: list[str] | None = None

    kind: ClassVar[str]  # PEFT's name of it
    positive: ClassVar[tuple[str, ...]] = ("num_virtual_tokens", "token_dim", "num_attention_heads", "num_layers")

    def __post_init__(self):
        self.peft_type, self.peft_version = self.kind, self.peft_version or PEFT
        for field in fields(self):
            if isinstance(value := getattr(self, field.name), Enum):
                setattr(self, field.name, value.value)
        if self.task_type is not None:
            self.task_type = task_of(self.task_type)
        for name in self.positive:
            value = getattr(self, name)
            whole = isinstance(value, int) and not isinstance(value, bool) and value > 0
            self.must(value is None or whole, name, "a whole number from 1 on")

    def must(self, good: bool, name: str, wanted: str) -> None:
        """Raise ValueError where the value of a field is not good."""
        if not good:
            raise ValueError(f"{type(self).__name__}: {name}={brief(getattr(self, name))}, wanted {wanted}.")

    def to_dict(self) -> dict[str, Any]:
        """The fields as types of JSON."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def save_pretrained(self, save_directory: str | Path) -> None:
        """Write adapter_config.json."""
        write_config(self.to_dict(), save_directory)

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> Any:
        """Read the adapter_config.json of a folder. Raises as `read_keys`, or for another type of adapter."""
        return read_config_of(cls, Path(folder), cls.kind)


@dataclass
class PromptTuningConfig(PromptLearningConfig):
    """PEFT's PromptTuningConfig: a vector for each virtual token trains.

    prompt_tuning_init: RANDOM numbers, the vectors of ids that are drawn (SAMPLE_VOCAB), or those of a TEXT.
    prompt_tuning_init_text, tokenizer_name_or_path, tokenizer_kwargs: that text, and the tokenizer that reads it.
    """

    prompt_tuning_init: str | PromptTuningInit = "RANDOM"
    prompt_tuning_init_text: str | None = None
    tokenizer_name_or_path: str | None = None
    tokenizer_kwargs: dict | None = None

    kind: ClassVar[str] = "PROMPT_TUNING"

    def __post_init__(self):
        super().__post_init__()
        self.must(self.prompt_tuning_init in PromptTuningInit.__members__, "prompt_tuning_init",
                  " or ".join(PromptTuningInit.__members__))  # fmt: skip
        if self.prompt_tuning_init == PromptTuningInit.TEXT:
            for name in ("tokenizer_name_or_path", "prompt_tuning_init_text"):
                if getattr(self, name) is None:
                    raise ValueError(f"When prompt_tuning_init='TEXT', {name} can't be None.")
        elif self.tokenizer_kwargs:
            raise ValueError("tokenizer_kwargs only valid when using prompt_tuning_init='TEXT'.")


@dataclass
class PrefixTuningConfig(PromptLearningConfig):
    """PEFT's PrefixTuningConfig: keys and values of virtual tokens train, in each layer.

    token_dim, num_attention_heads: channels and heads of keys.
    init_weights: "zero" begins with zeros.
    prefix_projection: a network with `encoder_hidden_size` inner channels makes them.
    """

    init_weights: str | None = None
    encoder_hidden_size: int | None = None
    prefix_projection: bool = False

    kind: ClassVar[str] = "PREFIX_TUNING"
    positive: ClassVar[tuple[str, ...]] = (*PromptLearningConfig.positive, "encoder_hidden_size")

    def __post_init__(self):
        super().__post_init__()
        self.must(self.init_weights in (None, "zero"), "init_weights", "None or 'zero'")
        self.must(isinstance(self.prefix_projection, bool), "prefix_projection", "True or False")


@dataclass
class PromptEncoderConfig(PromptLearningConfig):
    """PEFT's PromptEncoderConfig (P-tuning): a small network, which trains, makes the vectors of the virtual tokens.

    encoder_reparameterization_type: MLP or LSTM.
    encoder_hidden_size: its inner channels; None: as many as the model's.
    encoder_num_layers, encoder_dropout: of an LSTM.
    """

    encoder_reparameterization_type: str | PromptEncoderReparameterizationType = "MLP"
    encoder_hidden_size: int | None = None
    encoder_num_layers: int = 2
    encoder_dropout: float = 0.0

    kind: ClassVar[str] = "P_TUNING"
    positive: ClassVar[tuple[str, ...]] = (
        *PromptLearningConfig.positive, "encoder_hidden_size", "encoder_num_layers",
    )  # fmt: skip

    def __post_init__(self):
        super().__post_init__()
        names = PromptEncoderReparameterizationType.__members__
        self.must(self.encoder_reparameterization_type in names, "encoder_reparameterization_type", " or ".join(names))
        rate = self.encoder_dropout
        number = isinstance(rate, int | float) and not isinstance(rate, bool)
        self.must(number and 0 <= rate < 1, "encoder_dropout", "a number from 0 to below 1")
