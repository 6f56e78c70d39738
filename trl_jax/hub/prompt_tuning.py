"""Prefix tuning, prompt tuning and p-tuning: virtual tokens in front of each text."""

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
from trl_jax.hub.config import NativeConfig
from trl_jax.hub.formats import open_tensors
from trl_jax.hub.freezing import Locations
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
    no_adapter,
)
from trl_jax.mesh.mesh import fetched, owned
from trl_jax.models.adapters import PREFIX, AsEmbeddings, AsKeysValues, Place, virtual_graph
from trl_jax.models.arch import LayerKind
from trl_jax.nn.virtual_tokens import EMBEDDING, Lstm, Mlp, Table, VectorMaker

# ----------------------------------------------------------------------------------------------------
# Puts virtual tokens before the texts of a native model: new ones, or those that a folder has.


def with_virtual(
    base: NativeBackend,
    arrays: dict[str, Any],
    config: PromptLearningConfig,
    generator: TorchGenerator,
    folder: Path | None,
) -> tuple[dict[str, jax.Array], VirtualBackend, dict[str, Any]]:
    """The arrays that train, the backend, and the frozen arrays; arguments as of `hub.peft.adapted.adapt`."""
    backend = virtual_backend(base, config, folder)
    if folder is not None:
        return backend.load(folder, 0), backend, arrays
    embedded = partial(_embedded, base, arrays)
    drawn = initial(backend.config, backend.maker, generator, embedded, base.vocab_size)
    return {PREFIX + name: owned(array) for name, array in drawn.items()}, backend, arrays


def virtual_backend(base: NativeBackend, config: PromptLearningConfig, folder: Path | None) -> VirtualBackend:
    """The backend with new virtual tokens, or with those that a folder has.

    Raises:
        ValueError: the config does not go with the model.
    """
    native = base.source.config
    if base.source.resized:
        raise ValueError(
            f"{type(config).__name__}: the model's vocabulary was resized to {base.vocab_size} tokens, and the folder "
            "of virtual tokens would lack the new rows. Save the resized model with save_pretrained, and pass its "
            "folder."
        )
    if folder is None and config.inference_mode:
        raise ValueError(f"{type(config).__name__}: inference_mode=True, and nothing would train. Leave it out.")
    config = settled(config, native)
    saved_alone = folder is not None and not (folder / ENCODER).is_file()
    trains = not (saved_alone and is_made(config))
    virtual, maker = virtual_tokens(config, native), maker_of(config, trains=trains)
    return VirtualBackend(base, config, virtual, maker, place_of(config, native), trains=trains)


def _embedded(base: NativeBackend, arrays: dict[str, Any], ids: np.ndarray) -> np.ndarray:
    """The model's embeddings of ids, float32."""
    arch, path = base.source.config.arch, "decoder.embed.weight"
    stored = path if path in arrays else f"{path}.codes"
    rows = base.floats(stored, jnp.take(arrays[stored], jnp.asarray(ids), axis=0)).astype(jnp.float32)
    return np.asarray(fetched(rows * arch.embedding_scale if arch.scale_in_table else rows))


# ----------------------------------------------------------------------------------------------------
# The backend of a native model before whose texts virtual tokens stand.


class VirtualBackend(AdaptedBackend):
    """A native backend before whose texts the `virtual` tokens stand, whose vectors `maker` makes of arrays that train.

    trains: False of vectors that were made by a network which is not there.
    """

    def __init__(
        self,
        base: NativeBackend,
        config: PromptLearningConfig,
        virtual: VirtualTokens,
        maker: VectorMaker,
        place: Place,
        *,
        trains: bool = True,
    ):
        paths = {PREFIX + name: shape for name, shape in maker.shapes.items()}
        super().__init__(base, config, {path: jax.ShapeDtypeStruct(s, jnp.float32) for path, s in paths.items()})
        self.name, self.virtual, self.maker, self.trains = f"{base.name} (with virtual tokens)", virtual, maker, trains
        self.drops_out = base.drops_out or (isinstance(maker, Lstm) and maker.rate > 0)
        self.max_positions = None if base.max_positions is None else base.max_positions - virtual.count
        self.graph = virtual_graph(base.make, maker, place)
        self.tensors = dict(zip(self.shapes, self.shapes, strict=True))
        self.dtypes = {VECTORS: "float32"}

    def torch_param_layout(self) -> TorchParamLayout:
        return TorchParamLayout()

    @property
    def axes(self) -> Mapping[str, tuple[str, ...]]:
        return self.base.axes

    def save(self, folder: Path, params: dict[str, jax.Array], config: Any, *, writes: bool = True) -> None:
        """Write the files of PEFT, and what the vectors are made of, where they do not train themselves."""
        super().save(folder, params, config, writes=writes)
        if isinstance(self.maker, Table):
            return
        arrays = {path.removeprefix(PREFIX): np.asarray(params[path], np.float32) for path in self.shapes}
        if writes:
            save_file(arrays, folder / ENCODER, metadata={"format": "pt"})

    def locations(self, params: dict[str, jax.Array]) -> Locations:
        return {_named(path): [] for path in self.shapes}

    def named(self, params: dict[str, jax.Array]) -> Iterator[tuple[str, np.ndarray]]:
        """Of the arrays that train, which are not those on disk, under peft's names."""
        return ((_named(path), np.asarray(params[path], np.float32)) for path in self.shapes)

    def on_disk(self, params: dict[str, jax.Array]) -> Iterator[tuple[str, np.ndarray]]:
        arrays = {path.removeprefix(PREFIX): jnp.asarray(params[path], jnp.float32) for path in self.shapes}
        yield VECTORS, self._vectors(arrays)

    def _vectors(self, arrays: dict[str, Any]) -> np.ndarray:
        with jax.default_matmul_precision("float32"):
            return np.ascontiguousarray(np.asarray(self.maker(arrays), np.float32))

    def read(self, folder: Path, defaults: dict[str, np.ndarray] | None) -> dict[str, jax.Array]:
        del defaults
        vectors = _read(folder, (self.maker.count, self.maker.width))
        if isinstance(self.maker, Table):
            return {PREFIX + EMBEDDING: owned(vectors)}
        arrays = _checked(folder / ENCODER, self.maker.shapes)
        if not np.allclose(self._vectors(arrays), vectors, rtol=1e-3, atol=1e-4):
            raise ValueError(
                f"{folder / ENCODER} makes other vectors than {WEIGHTS} beside it has: one of the two is of another "
                "time. Copy both from one place, or take the first away, and the vectors are read as they are."
            )
        return {PREFIX + name: owned(array) for name, array in arrays.items()}


def _named(path: str) -> str:
    return f"{PREFIX}default.{path.removeprefix(PREFIX)}"


def _read(folder: Path, shape: tuple[int, int]) -> np.ndarray:
    """The vectors of an adapter's folder.

    Raises:
        FileNotFoundError, ValueError: there are none, or of another model.
    """
    if not (folder / WEIGHTS).is_file():
        raise no_adapter(str(folder), (folder / PICKLED).exists())
    return _checked(folder / WEIGHTS, {VECTORS: shape})[VECTORS]


def _checked(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """The tensors of a file, which must have these names and shapes."""
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is not there: PEFT saves the vectors of virtual tokens and not the network that makes them, so "
            "training cannot go on from it. Cannot set a prompt learning adapter to trainable when loading pretrained "
            "adapter."
        )
    tensors = open_tensors(path)
    if set(tensors) != set(shapes):
        raise ValueError(f"{path} has {listed(sorted(tensors))}, its config asks for {listed(sorted(shapes))}.")
    for name, shape in shapes.items():
        if tuple(tensors[name].shape) != tuple(shape):
            raise ValueError(
                f"{path}: {name} is {brief(list(tensors[name].shape))}, its config and this base model ask for "
                f"{list(shape)}. Pass the base model that it was trained on."
            )
    return {name: np.array(tensors[name], np.float32) for name in shapes}


# ----------------------------------------------------------------------------------------------------
# The first values of virtual tokens: PEFT's draws on torch's generator.


def initial(
    config: PromptLearningConfig,
    maker: VectorMaker,
    generator: TorchGenerator,
    embedded: Callable[[np.ndarray], np.ndarray],
    vocab_size: int,
) -> dict[str, np.ndarray]:
    """The arrays of `maker`, drawn as torch draws them. `embedded` gives the model's embeddings of ids."""
    arrays, shapes = {}, maker.shapes
    for name, shape in shapes.items():
        if name == EMBEDDING:
            arrays[name] = generator.normal(math.prod(shape), 1.0).reshape(shape)
            continue
        fan = maker.hidden if isinstance(maker, Lstm) and name.startswith("lstm_head.") else _inputs(name, shapes)
        arrays[name] = generator.uniform(math.prod(shape), fan**-0.5).reshape(shape)
    if isinstance(config, PrefixTuningConfig) and config.init_weights == "zero":
        last = [name for name in arrays if name.startswith("transform.2.")] or [EMBEDDING]
        arrays |= {name: np.zeros_like(arrays[name]) for name in last}
    if isinstance(config, PromptTuningConfig) and config.prompt_tuning_init != "RANDOM":
        sampled = config.prompt_tuning_init == "SAMPLE_VOCAB"
        ids = generator.integers(maker.count, vocab_size) if sampled else _ids_of(config)
        arrays[EMBEDDING] = np.array(embedded(ids), np.float32)
    return arrays


def _inputs(name: str, shapes: dict[str, tuple[int, ...]]) -> int:
    """The inputs of the linear map that a weight or bias belongs to."""
    return shapes[name.rpartition(".")[0] + ".weight"][1]


def _ids_of(config: PromptTuningConfig) -> np.ndarray:
    """The ids of the config's text, from its beginning on and as often as there are virtual tokens for it."""
    from transformers import AutoTokenizer

    options: dict[str, Any] = dict(config.tokenizer_kwargs or {})
    options.pop("trust_remote_code", None)  # as in PEFT: whoever wrote a config does not run code
    tokenizer = AutoTokenizer.from_pretrained(config.tokenizer_name_or_path, trust_remote_code=False, **options)
    ids = tokenizer(config.prompt_tuning_init_text)["input_ids"]
    if not ids:
        text = brief(config.prompt_tuning_init_text)
        raise ValueError(f"PromptTuningConfig: prompt_tuning_init_text={text} has no tokens. Write a text with some.")
    return np.resize(np.asarray(ids, np.int64), config.num_virtual_tokens)


# ----------------------------------------------------------------------------------------------------
# Virtual tokens on a model: which arrays train, and what makes their vectors.


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
