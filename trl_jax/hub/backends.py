"""What computes a model: our own decoder, or a program exported from transformers."""

from __future__ import annotations

import abc
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from trl_jax.core.torch_param_layout import TorchParamLayout
from trl_jax.core.torch_random import TorchGenerator
from trl_jax.hub.checkpoint.loading import Source, load, outline
from trl_jax.hub.checkpoint.resizing import resized_source
from trl_jax.hub.checkpoint.saving import places_of, read_tensor, save
from trl_jax.hub.checkpoint.sharded_reading import Place
from trl_jax.hub.checkpoint.tensor_map import TensorEntry
from trl_jax.hub.exported.model import TorchModel
from trl_jax.models.adapted import module_at
from trl_jax.models.exported import ExportedScorer
from trl_jax.models.functional import abstract, logical_axes
from trl_jax.models.stack import narrowest_window
from trl_jax.nn.quantized import HALVES, TABLES, Format, Quantized, dequantized


class Backend(abc.ABC):
    """Everything about a loaded model but its numbers.

    Attributes:
        name: what the trainer's log calls it, at `log_level`.
        graph: of the scorer that `models.functional.merge` makes of it and a dict of parameters.
        vocab_size: ids run below it.
        most_tokens: the length of the longest text that has positions; None where any has.
        embeddings: paths of the tables that tokens and positions are looked up in.
        tensors: path of a parameter -> a name it has on disk.
        dtypes: tensor on disk -> the dtype it is saved in.
        undecayed: paths of parameters without weight decay whose names do not tell.
        finds_end: it reads a row before the pads itself; without a pad id, at the very end.
        ignores_types: token_type_ids mean nothing to it.
        takes_streams: it computes texts laid end to end as if each were alone.
        causal: what comes after a token changes nothing of it, so two texts may share what both begin with.
        window: how many tokens before them, and themselves, those of the narrowest layer see; None: all.
        drops_out: it has dropout that training may turn on.
        takes_noise: noise may be added to its embeddings.
        grows: it can embed more tokens than its checkpoint did.
        sortable: a text's score does not depend on the rows beside it.
        saves_aside: `save` may run in a thread while the model trains.
        holds_still: a script may freeze parameters; beside an adapter it says so in its config.
        heads: how many of each kind attention has, which the tensor axis of a mesh must divide; None cannot be divided.
    """

    name: str
    log_level: int
    graph: nnx.GraphDef
    vocab_size: int
    max_positions: int | None
    embeddings: frozenset[str]
    tensors: Mapping[str, str]
    dtypes: Mapping[str, str]
    undecayed: frozenset[str]
    infers_lengths: bool
    ignores_types: bool
    takes_packed: bool
    causal: bool
    window: int | None
    drops_out: bool
    takes_noise: bool
    can_resize: bool
    batch_invariant: bool
    saves_aside: bool
    holds_still: bool = True
    heads: Mapping[str, int] | None

    @property
    def axes(self) -> Mapping[str, tuple[str, ...]]:
        """By path what the axes of a parameter count, for `engine.sharding`; a path that is not there has none."""
        return {}

    @abc.abstractmethod
    def save(self, folder: Path, params: dict[str, jax.Array], config: Any, *, writes: bool = True) -> None:
        """Write config.json and safetensors that transformers loads; not `writes`: only read every parameter."""

    @abc.abstractmethod
    def load(self, folder: Path, seed: int, place: Place | None = None) -> dict[str, jax.Array]:
        """The parameters of what `save` wrote; on several devices where `place` says, or not yet."""

    @abc.abstractmethod
    def resized(self, rows: int) -> Backend:
        """The engine of this model with another number of tokens. Raises ValueError where that cannot be."""

    @abc.abstractmethod
    def on_disk(self, params: dict[str, jax.Array]) -> Iterator[tuple[str, np.ndarray]]:
        """Each tensor as it is called on disk, float32."""

    def torch_param_layout(self) -> TorchParamLayout:
        """How what trains is cut from torch's tensors."""
        return TorchParamLayout()

    def places(self, params: dict[str, jax.Array]) -> dict[str, list[tuple[str, tuple[int, ...]]]]:
        """Name on disk -> the paths of the arrays that it lies in, each with its index there."""
        return {name: [(name, ())] for name in params}

    def size_of(self, path: str, array: jax.Array) -> int:
        """How many of the model's numbers this array stands for."""
        return array.size

    def numbers(self, path: str, array: jax.Array) -> jax.Array:
        """The array, as floats where it holds the bits of some."""
        return array

    def weight(self, arrays: dict[str, jax.Array], path: str) -> jax.Array:
        """The parameter at a path, float32, however it is held."""
        return arrays[path]


class NativeBackend(Backend):
    """The configurable decoder or encoder; `source` is what the checkpoint was."""

    name, log_level, undecayed, infers_lengths, saves_aside = "native", logging.INFO, frozenset(), False, True
    takes_noise = can_resize = True

    def __init__(self, source: Source, formats: dict[str, Format] | None = None):
        self.source, self.dtypes, self.formats = source, source.dtypes, formats or {}
        self.vocab_size, self.max_positions = source.arch.vocab_size, source.arch.max_positions
        self.graph, _ = abstract(self.make)
        self.tensors = {entry.path: entry.tensor for entry in source.tensor_map}
        self.embeddings = frozenset(path for path in self.tensors if path.endswith("embed.weight"))
        arch, causal = source.arch, not source.family.scorer.needs_valid
        self.ignores_types = self.causal = causal
        self.takes_packed, self.drops_out = causal or arch.takes_packed, arch.drops_out
        self.window = narrowest_window(arch.windows)
        self.heads = {"heads": arch.num_heads} | ({"key heads": arch.num_key_heads} if causal else {})
        self.batch_invariant = not causal  # some ropes of decoders ask for the longest text of a batch

    @property
    def axes(self) -> Mapping[str, tuple[str, ...]]:
        return logical_axes(self.make)

    def make(self) -> nnx.Module:
        """The module, to be looked at abstractly."""
        model = self.source.family.scorer(self.source.arch)
        for path, form in self.formats.items():
            owner, _, name = path.rpartition(".")
            module = module_at(model, owner)
            weight = vars(module)[name]
            setattr(module, name, Quantized(form, weight.shape[:-2], weight.get_metadata()["axes"]))
        return model

    def torch_param_layout(self) -> TorchParamLayout:
        # transformers keeps what experts begin with in one tensor, which on disk are several
        experts = {path: path.rpartition(".")[0] for path in self.tensors if path.endswith(("mlp.gate", "mlp.up"))}
        tensor_map = self.source.tensor_map
        joined = {entry.path: entry.tensor for entry in tensor_map if entry.part is not None} | experts
        return TorchParamLayout(frozenset(entry.path for entry in tensor_map if entry.stacked), joined)

    def places(self, params: dict[str, jax.Array]) -> dict[str, list[tuple[str, tuple[int, ...]]]]:
        found: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
        for entry in self.source.tensor_map:
            if entry.path in params:  # what is held in few bits has no array of this name
                for name, index in entry.tensors(params[entry.path].shape):
                    found.setdefault(name, []).append((entry.path, index))
        return found

    def size_of(self, path: str, array: jax.Array) -> int:
        weight, _, leaf = path.rpartition(".")
        if weight not in self.formats:
            return array.size
        return array.size * (2 if self.formats[weight].kind in TABLES else 1) if leaf == "codes" else 0

    def numbers(self, path: str, array: jax.Array) -> jax.Array:
        form = self.formats.get(path.removesuffix(".codes"))
        halves = form is not None and form.kind in HALVES
        return jax.lax.bitcast_convert_type(array, jnp.dtype(form.kind)) if halves else array

    def weight(self, arrays: dict[str, jax.Array], path: str) -> jax.Array:
        if path not in self.formats:
            return jnp.asarray(arrays[path], jnp.float32)
        form = self.formats[path]
        leaves = {name: arrays[f"{path}.{name}"] for name in form.leaves()}
        unpack = partial(dequantized, form)
        stacked = form.kind not in HALVES and leaves["codes"].ndim > len(form.leaves()["codes"][0])
        return jax.vmap(unpack)(leaves) if stacked else unpack(leaves)

    def replaced(self, arrays: dict[str, jax.Array], path: str, values: np.ndarray) -> dict[str, jax.Array]:
        """Other numbers for the array at a path, held and placed as it is.

        Raises:
            ValueError: it is quantised.
        """
        form = self.formats.get(path)
        if form is not None and form.kind not in HALVES:
            raise ValueError(
                f"LoraConfig: init_lora_weights='pissa' puts other numbers into {path}, which is quantised to "
                f"{form.kind}. Leave quantization_config out, or take init_lora_weights=True."
            )
        name = path if form is None else f"{path}.codes"
        kind = arrays[path].dtype if form is None else jnp.dtype(form.kind)
        held = values.astype(kind) if form is None else values.astype(kind).view(np.uint16)
        return {name: jax.device_put(held, arrays[name].sharding)}

    def weights(self, arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """All of them, as an engine without quantised weights has them."""
        plain = {path: array for path, array in arrays.items() if path.rpartition(".")[0] not in self.formats}
        return {path: self.weight(arrays, path) for path in (*plain, *self.formats)}

    def save(self, folder: Path, params: dict[str, jax.Array], config: Any, *, writes: bool = True) -> None:
        text = config.get_text_config()
        ids = {"pad_token_id": text.pad_token_id, "eos_token_id": text.eos_token_id}
        save(folder, params, self.source, writes=writes, **ids)

    def load(self, folder: Path, seed: int, place: Place | None = None) -> dict[str, jax.Array]:
        return load(folder, dtype="auto", seed=seed, place=place)[0]

    def resized(self, rows: int) -> NativeBackend:
        return NativeBackend(resized_source(self.source, rows))

    def on_disk(self, params: dict[str, jax.Array]) -> Iterator[tuple[str, np.ndarray]]:
        for tensor, places in places_of(params, self.source).items():
            yield tensor, read_tensor(params, places)


class ExportedBackend(Backend):
    """transformers' own model, exported with torch once a kind of shape and run on JAX."""

    log_level, infers_lengths, ignores_types = logging.WARNING, True, False
    takes_packed, drops_out, takes_noise, batch_invariant, causal, heads = False, True, False, False, False, None
    window = None
    can_resize = saves_aside = False  # torch's own module is what it saves, and what programs are exported from

    def __init__(self, model: TorchModel):
        self._model, self.dtypes, self.embeddings = model, model.dtypes, model.embeddings
        self.name = f"exported (model_type {model.config.model_type!r}, transformers' code by way of torch.export)"
        self.vocab_size, self.max_positions = model.config.get_text_config().vocab_size, model.max_positions
        self.tensors = {name: name for name in model.shapes}
        self.graph, _ = nnx.split(nnx.eval_shape(lambda: ExportedScorer(model.shapes, model)))

    @property
    def undecayed(self) -> frozenset[str]:
        return self._model.undecayed

    def save(self, folder: Path, params: dict[str, jax.Array], config: Any, *, writes: bool = True) -> None:
        del config  # the one it has: transformers writes it whole
        whole = {name: np.asarray(params[name]) for name in self.tensors}
        if writes:
            self._model.save(folder, whole)

    def load(self, folder: Path, seed: int, place: Place | None = None) -> dict[str, jax.Array]:
        return taken(TorchModel(folder, dtype="auto", seed=seed))

    def resized(self, rows: int) -> Backend:
        raise ValueError(
            f"This model runs on the {self.name} engine and embeds {self.vocab_size} tokens, wanted {rows}. Resize the "
            "checkpoint with transformers' resize_token_embeddings and load it again."
        )

    def on_disk(self, params: dict[str, jax.Array]) -> Iterator[tuple[str, np.ndarray]]:
        return ((name, np.asarray(array)) for name, array in params.items())


def load_native(
    folder: Path,
    *,
    dtype: str,
    seed: int | TorchGenerator,
    as_stored: bool = False,
    formats: dict[str, Format] | None = None,
    bits: Collection[str] = (),
    place: Place | None = None,
) -> tuple[dict[str, jax.Array], NativeBackend]:
    params, source = load(folder, dtype=dtype, seed=seed, as_stored=as_stored, formats=formats, bits=bits, place=place)

    def kind(entry: TensorEntry, codes: jax.Array) -> str:
        return source.dtypes[entry.tensors(codes.shape)[0][0]]

    return params, NativeBackend(source, _held(params, source, formats, kind))


def outline_native(
    folder: Path, *, dtype: str, formats: dict[str, Format] | None = None, **how: Any
) -> tuple[dict[str, jax.ShapeDtypeStruct], NativeBackend]:
    """The same from config.json alone, `how` as in `loading.outline`."""
    shapes, source = outline(folder, dtype=dtype, formats=formats, **how)
    return shapes, NativeBackend(source, _held(shapes, source, formats, lambda *_: source.dtype))


def _held(
    params: Mapping[str, Any],
    source: Source,
    formats: dict[str, Format] | None,
    kind: Callable[[TensorEntry, Any], str],
) -> dict[str, Format]:
    """How each array is held that is none of floats; `kind` says of which sixteen bits there are."""
    held = {} if formats is None else dict(formats)
    for entry in source.tensor_map:
        codes = params.get(f"{entry.path}.codes")
        if codes is not None and entry.path not in held:
            held[entry.path] = Format(kind(entry, codes), codes.shape[-2:])
    return held


def load_exported(folder: Path, *, dtype: str, seed: int) -> tuple[dict[str, jax.Array], ExportedBackend, Any]:
    """The parameters, the engine, and the config object that decides what is exported and saved."""
    model = TorchModel(folder, dtype=dtype, seed=seed)
    return taken(model), ExportedBackend(model), model.config


def taken(model: TorchModel) -> dict[str, jax.Array]:
    """float32 arrays of our own: torch's memory is given back one by one."""
    return {name: jax.block_until_ready(jnp.array(values)) for name, values in model.take()}
