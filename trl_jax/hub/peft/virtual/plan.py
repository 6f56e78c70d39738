"""Virtual tokens on a model: which arrays train, and what makes their vectors."""

from __future__ import annotations

import logging
from dataclasses import replace

from trl_jax.core.virtual_tokens import VirtualTokens
from trl_jax.hub.config.native import NativeConfig
from trl_jax.hub.peft.virtual.config import PrefixTuningConfig, PromptEncoderConfig, PromptLearningConfig
from trl_jax.models.arch import LayerKind
from trl_jax.models.virtual import AsEmbeddings, AsKeysValues, Place
from trl_jax.nn.virtual_tokens import Lstm, Mlp, Table, VectorMaker

logger = logging.getLogger(__name__)
_SCALES_IDS_ALONE = ("falcon_h1",)


def settled(config: PromptLearningConfig, native: NativeConfig) -> PromptLearningConfig:
    """The config with the sizes of a native model, as PEFT writes them.

    Raises:
        ValueError: it does not go with the model, or asks for what is not in this release; by field.
    """
    name = type(config).__name__
    _check_model(native, name)
    if config.num_virtual_tokens is None:
        raise ValueError(f"{name}: num_virtual_tokens is None: say how many virtual tokens stand before each text.")
    for field, idle in {"modules_to_save": (None, []), "num_transformer_submodules": (None, 1)}.items():
        config.must(getattr(config, field) in idle, field, "None: virtual tokens alone train before a language model")
    if config.task_type not in (None, "CAUSAL_LM"):
        logger.warning("%s: task_type=%r becomes 'CAUSAL_LM': the model predicts tokens.", name, config.task_type)
    config = replace(config, task_type="CAUSAL_LM", num_transformer_submodules=1)
    config = _of_keys(config, native) if isinstance(config, PrefixTuningConfig) else _of_embeddings(config, native)
    if isinstance(config, PromptEncoderConfig | PrefixTuningConfig):
        return replace(config, encoder_hidden_size=config.encoder_hidden_size or config.token_dim)
    return config


def _of_embeddings(config: PromptLearningConfig, native: NativeConfig) -> PromptLearningConfig:
    """The config with the sizes of the model's embeddings."""
    arch, name = native.arch, type(config).__name__
    if arch.layer_embedding is not None:
        raise ValueError(
            f"{name}: the layers of a {native.family.model_type} look up the ids of tokens in tables of their own, "
            "where virtual tokens have no row. Take a LoraConfig."
        )
    if native.family.model_type in _SCALES_IDS_ALONE and arch.embedding_scale != 1.0:
        raise ValueError(
            f"{name}: transformers' {native.family.model_type} scales embeddings that it looks up itself, and none "
            "where PEFT puts virtual tokens before them: texts would be read as the base model does not read them. "
            "Take a LoraConfig."
        )
    if arch.head_inputs != arch.hidden_size:
        raise ValueError(
            f"{name}: this model embeds tokens in {arch.head_inputs} channels and has {arch.hidden_size}, which PEFT's "
            "virtual tokens have. Take a LoraConfig."
        )
    config = _with_sizes(config, arch.hidden_size, arch.num_layers, arch.num_heads)
    config.must(config.token_dim == arch.hidden_size, "token_dim", f"{arch.hidden_size}, those of the embeddings")
    return config


def _of_keys(config: PrefixTuningConfig, native: NativeConfig) -> PrefixTuningConfig:
    """The config with the sizes of the model's keys."""
    arch = native.arch
    plain = LayerKind()
    alike = all((run.kind.mixer, run.kind.heads, run.kind.reuses, run.kind.reused)
                == (plain.mixer, plain.heads, plain.reuses, plain.reused) for run in arch.runs)  # fmt: skip
    if not alike or arch.latent is not None or arch.chunks is not None:
        raise ValueError(
            f"PrefixTuningConfig: not all layers of a {native.family.model_type} attend to whole texts by keys and "
            "values of the same heads, which a prefix would go before. Take a PromptTuningConfig or a LoraConfig."
        )
    heads, channels = arch.num_key_heads, arch.num_key_heads * arch.head_dim
    if heads != arch.num_heads:  # as PEFT does, whatever is there
        config = replace(config, token_dim=channels, num_attention_heads=heads)
    config = _with_sizes(config, channels, arch.num_layers, heads)
    config.must(config.token_dim == channels, "token_dim", f"{channels}, those of the keys of a layer")
    config.must(config.num_attention_heads == heads, "num_attention_heads", f"{heads}, those of keys")
    config.must(config.num_layers == arch.num_layers, "num_layers", f"{arch.num_layers}")
    return config


def _with_sizes(config: PromptLearningConfig, channels: int, layers: int, heads: int) -> PromptLearningConfig:
    sizes = {"token_dim": channels, "num_layers": layers, "num_attention_heads": heads}
    return replace(config, **{field: size for field, size in sizes.items() if getattr(config, field) is None})


def _check_model(native: NativeConfig, name: str) -> None:
    if native.head.kind != "lm":
        raise ValueError(
            f"{name}: virtual tokens stand before the texts of causal language models in this release of trl_jax. "
            "Behind them, transformers' classifiers read the last place of a padded row, pad or not, so that a score "
            "would depend on the rows beside it. Take a LoraConfig."
        )


def virtual_tokens(config: PromptLearningConfig, native: NativeConfig) -> VirtualTokens:
    """The virtual tokens of a settled config."""
    read = not isinstance(config, PrefixTuningConfig)
    return VirtualTokens(native.arch.vocab_size, config.num_virtual_tokens, read)


def place_of(config: PromptLearningConfig, native: NativeConfig) -> Place:
    """Where the vectors of a settled config go."""
    arch = native.arch
    if isinstance(config, PrefixTuningConfig):
        return AsKeysValues(arch.vocab_size, arch.runs, arch.num_key_heads, arch.head_dim)
    return AsEmbeddings(arch.vocab_size, config.token_dim)


def maker_of(config: PromptLearningConfig, *, trains: bool = True) -> VectorMaker:
    """The maker of the vectors of a settled config; where it does not train, they are as they were saved."""
    count, width, inner = config.num_virtual_tokens, config.token_dim, config.token_dim
    if isinstance(config, PrefixTuningConfig):
        width = 2 * config.num_layers * inner
        if trains and config.prefix_projection:
            return Mlp(count, inner, (config.encoder_hidden_size, width), "transform", "tanh")
    if not trains or not isinstance(config, PromptEncoderConfig):
        return Table(count, width)
    hidden = config.encoder_hidden_size
    if config.encoder_reparameterization_type == "LSTM":
        return Lstm(count, width, hidden, config.encoder_num_layers, config.encoder_dropout)
    if config.encoder_num_layers != PromptEncoderConfig.encoder_num_layers:
        logger.warning("for MLP, the argument `encoder_num_layers` is ignored. Exactly 2 MLP layers are used.")
    return Mlp(count, width, (hidden, hidden, width), "mlp_head")


def is_made(config: PromptLearningConfig) -> bool:
    """Whether a network makes the vectors."""
    return isinstance(config, PromptEncoderConfig) or (
        isinstance(config, PrefixTuningConfig) and config.prefix_projection
    )
