"""Prefix tuning, prompt tuning and p-tuning: virtual tokens before each text."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from trl_jax.core.outputs import VirtualTokens
from trl_jax.core.text import brief, listed
from trl_jax.core.torch_random import TorchGenerator, TorchParamLayout
from trl_jax.hub.backend import Locations
from trl_jax.hub.config import NativeConfig
from trl_jax.hub.formats import open_tensors
from trl_jax.hub.native_backend import NativeBackend
from trl_jax.hub.peft_backend import AdaptedBackend
from trl_jax.hub.peft_config import (
    ENCODER,
    PICKLED,
    VECTORS,
    WEIGHTS,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptLearningConfig,
    PromptTuningConfig,
    no_adapter_error,
)
from trl_jax.mesh.mesh import fetched, owned
from trl_jax.models.adapters import PREFIX, AsEmbeddings, AsKeysValues, Place, virtual_graph
from trl_jax.models.arch import LayerKind
from trl_jax.nn.virtual_tokens import EMBEDDING, Lstm, Mlp, Table, VectorMaker

logger = logging.getLogger(__name__)

# Adding virtual tokens to a model


def with_virtual(
    base: NativeBackend,
    arrays: dict[str, Any],
    config: PromptLearningConfig,
    generator: TorchGenerator,
    folder: Path | None,
) -> tuple[dict[str, jax.Array], VirtualBackend, dict[str, Any]]:
    """The trained arrays, the backend, and the frozen arrays; arguments are as in `hub.peft.adapt`."""
    backend = virtual_backend(base, config, folder)
    if folder is not None:
        return backend.load(folder, 0), backend, arrays
    embedded = partial(_embedded, base, arrays)
    drawn = initial(backend.config, backend.prompt_encoder, generator, embedded, base.traits.vocab_size)
    return {PREFIX + name: owned(array) for name, array in drawn.items()}, backend, arrays


def virtual_backend(base: NativeBackend, config: PromptLearningConfig, folder: Path | None) -> VirtualBackend:
    """The backend with new virtual tokens, or with those saved in a folder.

    Raises:
        ValueError: the config does not fit the model.
    """
    native = base.source.config
    if base.source.resized:
        raise ValueError(
            f"{type(config).__name__}: the model's vocabulary was resized to {base.traits.vocab_size} tokens, but the "
            "new rows are not saved with virtual tokens. Save the resized model with save_pretrained and pass its "
            "folder."
        )
    if folder is None and config.inference_mode:
        raise ValueError(f"{type(config).__name__}: inference_mode=True would leave nothing to train. Leave it out.")
    config = resolve_config(config, native)
    saved_alone = folder is not None and not (folder / ENCODER).is_file()
    trains = not (saved_alone and uses_network(config))
    virtual, prompt_encoder = virtual_tokens(config, native), prompt_encoder_of(config, trains=trains)
    return VirtualBackend(base, config, virtual, prompt_encoder, place_of(config, native), trains=trains)


def _embedded(base: NativeBackend, arrays: dict[str, Any], ids: np.ndarray) -> np.ndarray:
    """The model's embeddings of token ids, float32."""
    arch, path = base.source.config.arch, "decoder.embed.weight"
    stored = path if path in arrays else f"{path}.codes"
    rows = base.floats(stored, jnp.take(arrays[stored], jnp.asarray(ids), axis=0)).astype(jnp.float32)
    return np.asarray(fetched(rows * arch.embedding_scale if arch.scale_in_table else rows))


# The backend of a model with virtual tokens


class VirtualBackend(AdaptedBackend):
    """A native model that reads `virtual` tokens before each text; `prompt_encoder` computes their vectors from
    trained arrays.

    trains: False if the vectors were computed by a network that was not saved, so that they can only be used as they
        are.
    """

    prefix = "base_model."

    def __init__(
        self,
        base: NativeBackend,
        config: PromptLearningConfig,
        virtual: VirtualTokens,
        prompt_encoder: VectorMaker,
        place: Place,
        *,
        trains: bool = True,
    ):
        paths = {PREFIX + name: shape for name, shape in prompt_encoder.shapes.items()}
        super().__init__(base, config, {path: jax.ShapeDtypeStruct(s, jnp.float32) for path, s in paths.items()})
        self.name, self.virtual = f"{base.name} (with virtual tokens)", virtual
        self.prompt_encoder, self.trains = prompt_encoder, trains
        longest, drops_out = base.traits.max_positions, isinstance(prompt_encoder, Lstm) and prompt_encoder.rate > 0
        self.traits = replace(
            base.traits,
            max_positions=None if longest is None else longest - virtual.count,
            drops_out=base.traits.drops_out or drops_out,
        )
        self.graph = virtual_graph(base.make, prompt_encoder, place)
        self.tensors = dict(zip(self.shapes, self.shapes, strict=True))
        self.dtypes = {VECTORS: "float32"}

    def torch_param_layout(self) -> TorchParamLayout:
        return TorchParamLayout()

    @property
    def axes(self) -> Mapping[str, tuple[str, ...]]:
        return self.base.axes

    def save(
        self, folder: Path | None, params: dict[str, jax.Array], config: Any, max_shard_size: int | str | None = None
    ) -> None:
        """Write PEFT's files, and the weights of the network that computes the vectors, if there is one."""
        super().save(folder, params, config)
        if isinstance(self.prompt_encoder, Table):
            return
        arrays = {path.removeprefix(PREFIX): np.asarray(params[path], np.float32) for path in self.shapes}
        if folder is not None:
            save_file(arrays, folder / ENCODER, metadata={"format": "pt"})

    @property
    def trained_names(self) -> dict[str, None]:
        return dict.fromkeys(map(_peft_name, self.shapes))

    def trained_locations(self) -> Locations:
        return {_peft_name(path): [(path, ())] for path in self.shapes}

    def trained(self, arrays: dict[str, jax.Array]) -> Iterator[tuple[str, np.ndarray]]:
        return ((_peft_name(path), np.asarray(arrays[path], np.float32)) for path in self.shapes)

    def peft_name(self, module: str, parameter: str) -> str | None:
        return f"{self.prefix}{module}.{parameter}"

    def on_disk(self, params: dict[str, jax.Array]) -> Iterator[tuple[str, np.ndarray]]:
        arrays = {path.removeprefix(PREFIX): jnp.asarray(params[path], jnp.float32) for path in self.shapes}
        yield VECTORS, self._vectors(arrays)

    def _vectors(self, arrays: dict[str, Any]) -> np.ndarray:
        with jax.default_matmul_precision("float32"):
            return np.ascontiguousarray(np.asarray(self.prompt_encoder(arrays), np.float32))

    def read(self, folder: Path, defaults: dict[str, np.ndarray] | None) -> dict[str, jax.Array]:
        del defaults
        vectors = _read(folder, (self.prompt_encoder.count, self.prompt_encoder.width))
        if isinstance(self.prompt_encoder, Table):
            return {PREFIX + EMBEDDING: owned(vectors)}
        arrays = _checked(folder / ENCODER, self.prompt_encoder.shapes)
        if not np.allclose(self._vectors(arrays), vectors, rtol=1e-3, atol=1e-4):
            raise ValueError(
                f"{folder / ENCODER} does not produce the vectors in {WEIGHTS}, so the two files were not saved "
                f"together. Copy both from the same place, or remove {ENCODER} to use the saved vectors."
            )
        return {PREFIX + name: owned(array) for name, array in arrays.items()}


def _peft_name(path: str) -> str:
    return f"{PREFIX}default.{path.removeprefix(PREFIX)}"


def _read(folder: Path, shape: tuple[int, int]) -> np.ndarray:
    """Read the vectors from an adapter's folder.

    Raises:
        FileNotFoundError, ValueError: the vectors are missing, or belong to a different model.
    """
    if not (folder / WEIGHTS).is_file():
        raise no_adapter_error(str(folder), (folder / PICKLED).exists())
    return _checked(folder / WEIGHTS, {VECTORS: shape})[VECTORS]


def _checked(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """The tensors of a file, which must have exactly these names and shapes."""
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} does not exist. PEFT saves the vectors of virtual tokens but not the network that makes them, so "
            "training cannot continue. Cannot set a prompt learning adapter to trainable when loading pretrained "
            "adapter."
        )
    tensors = open_tensors(path)
    if set(tensors) != set(shapes):
        raise ValueError(f"{path} has {listed(sorted(tensors))}, but its config requires {listed(sorted(shapes))}.")
    for name, shape in shapes.items():
        if tuple(tensors[name].shape) != tuple(shape):
            raise ValueError(
                f"{path}: {name} is {brief(list(tensors[name].shape))}, but its config and this base model require "
                f"{list(shape)}. Pass the base model that the adapter was trained on."
            )
    return {name: np.array(tensors[name], np.float32) for name in shapes}


# Initial values, drawn with torch's generator as in PEFT


def initial(
    config: PromptLearningConfig,
    prompt_encoder: VectorMaker,
    generator: TorchGenerator,
    embedded: Callable[[np.ndarray], np.ndarray],
    vocab_size: int,
) -> dict[str, np.ndarray]:
    """The arrays of `prompt_encoder`, drawn as in torch. `embedded` returns the model's embeddings of token ids."""
    arrays, shapes = {}, prompt_encoder.shapes
    for name, shape in shapes.items():
        if name == EMBEDDING:
            arrays[name] = generator.normal(math.prod(shape), 1.0).reshape(shape)
            continue
        in_lstm = isinstance(prompt_encoder, Lstm) and name.startswith("lstm_head.")
        fan = prompt_encoder.hidden if in_lstm else _inputs(name, shapes)
        arrays[name] = generator.uniform(math.prod(shape), fan**-0.5).reshape(shape)
    if isinstance(config, PrefixTuningConfig) and config.init_weights == "zero":
        last = [name for name in arrays if name.startswith("transform.2.")] or [EMBEDDING]
        arrays |= {name: np.zeros_like(arrays[name]) for name in last}
    if isinstance(config, PromptTuningConfig) and config.prompt_tuning_init != "RANDOM":
        sampled = config.prompt_tuning_init == "SAMPLE_VOCAB"
        ids = generator.integers(prompt_encoder.count, vocab_size) if sampled else _ids_of(config)
        arrays[EMBEDDING] = np.array(embedded(ids), np.float32)
    return arrays


def _inputs(name: str, shapes: dict[str, tuple[int, ...]]) -> int:
    """Number of inputs of the linear layer that a weight or bias belongs to."""
    return shapes[name.rpartition(".")[0] + ".weight"][1]


def _ids_of(config: PromptTuningConfig) -> np.ndarray:
    """Token ids of the config's text, truncated or repeated to the number of virtual tokens."""
    from transformers import AutoTokenizer

    options: dict[str, Any] = dict(config.tokenizer_kwargs or {})
    options.pop("trust_remote_code", None)  # as in PEFT: a config must not be able to enable remote code
    tokenizer = AutoTokenizer.from_pretrained(config.tokenizer_name_or_path, trust_remote_code=False, **options)
    ids = tokenizer(config.prompt_tuning_init_text)["input_ids"]
    if not ids:
        text = brief(config.prompt_tuning_init_text)
        raise ValueError(f"PromptTuningConfig: prompt_tuning_init_text={text} has no tokens. Use a longer text.")
    return np.resize(np.asarray(ids, np.int64), config.num_virtual_tokens)


# Resolving a config for a model


_SCALES_ONLY_LOOKED_UP = ("falcon_h1",)


def resolve_config(config: PromptLearningConfig, native: NativeConfig) -> PromptLearningConfig:
    """The config with sizes filled in from a native model, as PEFT does.

    Raises:
        ValueError: a field does not fit the model or is not supported in this release; the message names it.
    """
    name = type(config).__name__
    _check_model(native, name)
    if config.num_virtual_tokens is None:
        raise ValueError(f"{name}: num_virtual_tokens is None. Set it to the number of virtual tokens.")
    for field, idle in {"modules_to_save": (None, []), "num_transformer_submodules": (None, 1)}.items():
        config.must(getattr(config, field) in idle, field, "None, since only virtual tokens are trained")
    if config.task_type not in (None, "CAUSAL_LM"):
        logger.warning("%s: changed task_type=%r to 'CAUSAL_LM', the task of this model.", name, config.task_type)
    config = replace(config, task_type="CAUSAL_LM", num_transformer_submodules=1)
    config = _of_keys(config, native) if isinstance(config, PrefixTuningConfig) else _of_embeddings(config, native)
    if isinstance(config, PromptEncoderConfig | PrefixTuningConfig):
        return replace(config, encoder_hidden_size=config.encoder_hidden_size or config.token_dim)
    return config


def _of_embeddings(config: PromptLearningConfig, native: NativeConfig) -> PromptLearningConfig:
    """The config with the sizes of the model's embeddings filled in."""
    arch, name = native.arch, type(config).__name__
    if arch.layer_embedding is not None:
        raise ValueError(
            f"{name}: each layer of {native.family.model_type} has its own table of token embeddings, in which virtual "
            "tokens have no row. Use a LoraConfig."
        )
    if native.family.model_type in _SCALES_ONLY_LOOKED_UP and arch.embedding_scale != 1.0:
        raise ValueError(
            f"{name}: transformers' {native.family.model_type} only scales embeddings that it looks up itself, not the "
            "ones that PEFT passes along with virtual tokens, so texts would be embedded differently than by the base "
            "model. Use a LoraConfig."
        )
    if arch.head_inputs != arch.hidden_size:
        raise ValueError(
            f"{name}: this model has {arch.head_inputs}-dimensional token embeddings, but PEFT's virtual tokens have "
            f"the hidden size {arch.hidden_size}. Use a LoraConfig."
        )
    config = _with_sizes(config, arch.hidden_size, arch.num_layers, arch.num_heads)
    config.must(config.token_dim == arch.hidden_size, "token_dim", f"{arch.hidden_size}, the size of embeddings")
    return config


def _of_keys(config: PrefixTuningConfig, native: NativeConfig) -> PrefixTuningConfig:
    """The config with the sizes of the model's keys filled in."""
    arch = native.arch
    plain = LayerKind()
    alike = all((run.kind.mixer, run.kind.heads, run.kind.reuses, run.kind.reused)
                == (plain.mixer, plain.heads, plain.reuses, plain.reused) for run in arch.runs)  # fmt: skip
    if not alike or arch.latent is not None or arch.chunks is not None:
        raise ValueError(
            f"PrefixTuningConfig: a prefix needs full attention with the same key heads in all layers, which "
            f"{native.family.model_type} does not have. Use a PromptTuningConfig or a LoraConfig."
        )
    heads, channels = arch.num_key_heads, arch.num_key_heads * arch.head_dim
    if heads != arch.num_heads:  # even if they are set, as in PEFT
        config = replace(config, token_dim=channels, num_attention_heads=heads)
    config = _with_sizes(config, channels, arch.num_layers, heads)
    config.must(config.token_dim == channels, "token_dim", f"{channels}, the size of a layer's keys")
    config.must(config.num_attention_heads == heads, "num_attention_heads", f"{heads}, the number of key heads")
    config.must(config.num_layers == arch.num_layers, "num_layers", f"{arch.num_layers}")
    return config


def _with_sizes(config: PromptLearningConfig, channels: int, layers: int, heads: int) -> PromptLearningConfig:
    sizes = {"token_dim": channels, "num_layers": layers, "num_attention_heads": heads}
    return replace(config, **{field: size for field, size in sizes.items() if getattr(config, field) is None})


def _check_model(native: NativeConfig, name: str) -> None:
    if native.head.kind != "lm":
        raise ValueError(
            f"{name}: virtual tokens are only supported for causal language models in this release of trl_jax. After "
            "virtual tokens, transformers' classifiers read the last position of a padded row even if it is padding, "
            "so that scores would depend on the other rows of the batch. Use a LoraConfig."
        )


def virtual_tokens(config: PromptLearningConfig, native: NativeConfig) -> VirtualTokens:
    """The virtual tokens of a resolved config."""
    read = not isinstance(config, PrefixTuningConfig)
    return VirtualTokens(native.arch.vocab_size, config.num_virtual_tokens, read)


def place_of(config: PromptLearningConfig, native: NativeConfig) -> Place:
    """Where the vectors of a resolved config are inserted."""
    arch = native.arch
    if isinstance(config, PrefixTuningConfig):
        return AsKeysValues(arch.vocab_size, arch.runs, arch.num_key_heads, arch.head_dim)
    return AsEmbeddings(arch.vocab_size, config.token_dim)


def prompt_encoder_of(config: PromptLearningConfig, *, trains: bool = True) -> VectorMaker:
    """The module that computes the vectors of a resolved config. If it is not trained, this is a table of the saved
    vectors."""
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


def uses_network(config: PromptLearningConfig) -> bool:
    """Whether the vectors are computed by a network."""
    return isinstance(config, PromptEncoderConfig) or (
        isinstance(config, PrefixTuningConfig) and config.prefix_projection
    )
