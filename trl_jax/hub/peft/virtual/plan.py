"""Virtual tokens on a model: which arrays train, and what makes their vectors."""

from __future__ import annotations

import logging
from dataclasses import replace

from trl_jax.core.virtual_tokens import VirtualTokens
from trl_jax.hub.config.native import NativeConfig
from trl_jax.hub.peft.virtual.config import PromptEncoderConfig, PromptLearningConfig
from trl_jax.nn.virtual_tokens import Lstm, Mlp, Table, VectorMaker

logger = logging.getLogger(__name__)


def settled(config: PromptLearningConfig, native: NativeConfig) -> PromptLearningConfig:
    """The config with the sizes of a native model, as PEFT writes them.

    Raises:
        ValueError: it does not go with the model, or asks for what is not in this release; by field.
    """
    arch, name = native.arch, type(config).__name__
    _check_model(native, name)
    if config.num_virtual_tokens is None:
        raise ValueError(f"{name}: num_virtual_tokens is None: say how many virtual tokens stand before each text.")
    for field, idle in {"modules_to_save": (None, []), "num_transformer_submodules": (None, 1)}.items():
        config.must(getattr(config, field) in idle, field, "None: virtual tokens alone train before a language model")
    if config.task_type not in (None, "CAUSAL_LM"):
        logger.warning("%s: task_type=%r becomes 'CAUSAL_LM': the model predicts tokens.", name, config.task_type)
    sizes = {"token_dim": arch.hidden_size, "num_layers": arch.num_layers, "num_attention_heads": arch.num_heads}
    given = {field: size for field, size in sizes.items() if getattr(config, field) is None}
    config = replace(config, task_type="CAUSAL_LM", num_transformer_submodules=1, **given)
    config.must(config.token_dim == arch.hidden_size, "token_dim", f"{arch.hidden_size}, those of the embeddings")
    if isinstance(config, PromptEncoderConfig):
        hidden = config.encoder_hidden_size or config.token_dim
        return replace(config, encoder_hidden_size=hidden)
    return config


def _check_model(native: NativeConfig, name: str) -> None:
    arch = native.arch
    if native.head.kind != "lm":
        raise ValueError(
            f"{name}: virtual tokens stand before the texts of causal language models in this release of trl_jax. "
            "Behind them, transformers' classifiers read the last place of a padded row, pad or not, so that a score "
            "would depend on the rows beside it. Take a LoraConfig."
        )
    if arch.layer_embedding is not None:
        raise ValueError(
            f"{name}: the layers of a {native.family.model_type} look up the ids of tokens in tables of their own, "
            "where virtual tokens have no row. Take a LoraConfig."
        )
    if arch.head_inputs != arch.hidden_size:
        raise ValueError(
            f"{name}: this model embeds tokens in {arch.head_inputs} channels and has {arch.hidden_size}, which PEFT's "
            "virtual tokens have. Take a LoraConfig."
        )


def virtual_tokens(config: PromptLearningConfig, native: NativeConfig) -> VirtualTokens:
    """The virtual tokens of a settled config."""
    return VirtualTokens(native.arch.vocab_size, config.num_virtual_tokens)


def maker_of(config: PromptLearningConfig, *, trains: bool = True) -> VectorMaker:
    """What makes the vectors of a settled config; where it does not train, they are as they were saved."""
    count, width = config.num_virtual_tokens, config.token_dim
    if not trains or not isinstance(config, PromptEncoderConfig):
        return Table(count, width)
    hidden = config.encoder_hidden_size
    if config.encoder_reparameterization_type == "LSTM":
        return Lstm(count, width, hidden, config.encoder_num_layers, config.encoder_dropout)
    if config.encoder_num_layers != PromptEncoderConfig.encoder_num_layers:
        logger.warning("for MLP, the argument `encoder_num_layers` is ignored. Exactly 2 MLP layers are used.")
    return Mlp(count, width, (hidden, hidden, width), "mlp_head")
