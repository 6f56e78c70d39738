"""Models with adapters: LoRA, and virtual tokens (prompt tuning, prefix tuning, P-tuning)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from trl_jax.models.arch import Run
from trl_jax.models.decoder import Decoder
from trl_jax.nn.linear import ExpertsLora, Lora, Stream, stream_keys
from trl_jax.nn.virtual_tokens import Prefix, VectorMaker, VirtualRows

# Frozen models with trainable adapters


class Part(Protocol):
    """Selects the rows of a checkpoint matrix that make up one of our parameters."""

    def rows(self, array: jax.Array) -> jax.Array: ...


@dataclass(frozen=True)
class Adapter:
    """The LoRA adapter of one checkpoint matrix, or of the matrices with one name in all layers, stacked along axis L.

    Attributes:
        name: the name of the matrix. The arrays are `<name>.lora_A` `[L, r, in]` etc., zero-padded to the largest rank,
            and all zero in a layer without an adapter.
        parts: our modules that the checkpoint matrix contains, each with the `Part` that selects its rows from an array
            `[out, ...]`, or None if it is the whole matrix.
        scales, exists: the scale of B A, and whether an adapter exists; one entry per layer if stacked.
        has: the optional arrays that exist: magnitude, bias.
        experts: how many experts' matrices each array holds, 0 for none: A is `[E r, in]`, expert by expert; B is
            `[out, r E]`, with experts varying fastest.
        swapped: the expert matrices are stored as (in, out), so A and B are swapped.
    """

    name: str
    parts: tuple[tuple[str, Part | None], ...]
    scales: tuple[float, ...]
    exists: tuple[bool, ...]
    stacked: bool
    has: tuple[str, ...] = ()
    experts: int = 0
    swapped: bool = False

    def place(self, path: str) -> tuple[str, str]:
        """(module path, attribute) of the adapter for our module `path` or, for experts, for our parameter `path`."""
        if self.experts:
            owner, _, name = path.rpartition(".")
            return owner, f"{name}_lora"
        return path, "lora"

    def matrices(self, a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
        """A `[..., r, in]` and B `[..., out, r]`; for experts, with an expert axis after the layer axis."""
        if not self.experts:
            return a, b
        a = a.reshape(*a.shape[:-2], self.experts, -1, a.shape[-1])
        b = jnp.moveaxis(b.reshape(*b.shape[:-1], -1, self.experts), -1, -3)
        return (b.swapaxes(-1, -2), a.swapaxes(-1, -2)) if self.swapped else (a, b)

    def matrices_of(self, part: Part | None, a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
        """As `matrices`, for one part of the experts' matrices."""
        a, b = self.matrices(a, b)
        return a, b if part is None else jnp.moveaxis(part.rows(jnp.moveaxis(b, -2, 0)), 0, -2)


_KINDS = {"a": "lora_A", "b": "lora_B", "magnitude": "lora_magnitude_vector", "bias": "lora_B.bias"}


def leaf(name: str, kind: str) -> str:
    """The parameter name of an adapter's array; kind is a, b, magnitude or bias."""
    return f"{name}.{_KINDS[kind]}"


@dataclass(frozen=True)
class Layers:
    """Train only the layers `where` of the stack at `path`, or only these rows of a table.

    The trained values are `params["<path>@trained"]`.
    """

    path: str
    where: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"{self.path}@trained"


@dataclass(frozen=True)
class AdaptedGraph:
    """A graph for `models.model.merge` with frozen and trained arrays.

    `plain` and `dropping` are the graphs of the adapted model without and with dropout before the adapters.
    """

    plain: nnx.GraphDef
    dropping: nnx.GraphDef
    adapters: tuple[Adapter, ...]
    layers: tuple[Layers, ...]
    rate: float

    def installed(self, params: dict[str, Any], key: jax.Array | None) -> tuple[nnx.GraphDef, dict[str, Any]]:
        """A graph and its parameters, with the arrays of each adapter moved to the modules that it adapts."""
        drops = key is not None and self.rate > 0
        trained = {leaf(a.name, kind) for a in self.adapters for kind in _KINDS} | {part.name for part in self.layers}
        arrays = {path: array for path, array in params.items() if path not in trained}
        for part in self.layers:
            whole = arrays[part.path]
            arrays[part.path] = whole.at[jnp.asarray(part.where)].set(params[part.name].astype(whole.dtype))
        keys = stream_keys(key, Stream.ADAPTERS, len(self.adapters))
        for number, adapter in enumerate(self.adapters):
            adapter_key = keys[number] if drops else None
            for path, part in adapter.parts:
                leaves = _lora_arrays(
                    adapter, part, {kind: params[leaf(adapter.name, kind)] for kind in _kinds(adapter)}
                )
                if drops:
                    leaves["key"] = (
                        jax.random.split(adapter_key, len(adapter.scales)) if adapter.stacked else adapter_key
                    )
                where = ".".join(adapter.place(path))
                arrays |= {f"{where}.{name}": value for name, value in leaves.items()}
        return self.dropping if drops else self.plain, arrays


def _kinds(adapter: Adapter) -> tuple[str, ...]:
    return ("a", "b", *adapter.has)


def _lora_arrays(adapter: Adapter, part: Part | None, arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """The arrays of the `Lora` module of one part."""

    if adapter.experts:
        a, b = adapter.matrices_of(part, arrays["a"], arrays["b"])
        return {"a": a, "b": jnp.asarray(adapter.scales, b.dtype).reshape(-1, *[1] * (b.ndim - 1)) * b}

    def of_part(kind: str, array: jax.Array) -> jax.Array:
        if part is None or kind == "a":
            return array
        return jax.vmap(part.rows)(array) if adapter.stacked else part.rows(array)

    leaves = {kind: of_part(kind, array) for kind, array in arrays.items()}
    leaves["scale"] = jnp.asarray(adapter.scales if adapter.stacked else adapter.scales[0], jnp.float32)
    if "magnitude" in leaves:
        leaves["exists"] = jnp.asarray(adapter.exists if adapter.stacked else adapter.exists[0])
    return leaves


def adapted_graph(
    make: Callable[[], nnx.Module],
    adapters: tuple[Adapter, ...],
    shapes: dict[str, jax.ShapeDtypeStruct],
    layers: tuple[Layers, ...],
    rate: float,
) -> AdaptedGraph:
    """The graph of the model that `make` builds, with adapters whose arrays have these `shapes`."""

    def build(drops: bool) -> nnx.GraphDef:
        def whole():
            model = make()
            for adapter in adapters:
                for path, part in adapter.parts:
                    arrays = {k: jnp.zeros(shapes[leaf(adapter.name, k)].shape) for k in _kinds(adapter)}
                    leaves = _lora_arrays(adapter, part, arrays)
                    if drops:
                        keys = jax.random.split(jax.random.key(0), len(adapter.scales))
                        leaves["key"] = keys if adapter.stacked else keys[0]
                    owner, name = adapter.place(path)
                    lora = ExpertsLora(leaves) if adapter.experts else Lora(leaves, rate)
                    setattr(module_at(model, owner), name, lora)
            return model

        return nnx.split(nnx.eval_shape(whole))[0]

    plain = build(False)
    return AdaptedGraph(plain, build(True) if rate else plain, adapters, layers, rate)


def module_at(model: nnx.Module, path: str) -> Any:
    for name in path.split("."):
        model = vars(model)[name]
    return model


# Frozen models with trainable virtual tokens

PREFIX = "prompt_encoder."  # prefix of the trained arrays


class Place(Protocol):
    """Where the vectors of virtual tokens go in the decoder."""

    def prepare(self, decoder: Decoder, count: int) -> None:
        """Give the decoder the modules that hold the vectors of `count` virtual tokens."""

    def arrays(self, vectors: jax.Array) -> dict[str, jax.Array]:
        """The parameters of these modules, by path in the decoder, for vectors `[n, width]`."""


@dataclass(frozen=True)
class AsEmbeddings:
    """The vectors are embeddings of the ids from `first` on."""

    first: int
    width: int

    def prepare(self, decoder: Decoder, count: int) -> None:
        decoder.virtual = VirtualRows(jnp.zeros((count, self.width)), self.first)

    def arrays(self, vectors: jax.Array) -> dict[str, jax.Array]:
        return {"virtual.rows": vectors}


@dataclass(frozen=True)
class AsKeysValues:
    """The vectors are keys and values of the ids from `first` on: `heads` keys of `channels` channels for the first
    layer, then as many values, then the keys and values of the next layer, and so on."""

    first: int
    runs: tuple[Run, ...]
    heads: int
    channels: int

    def prepare(self, decoder: Decoder, count: int) -> None:
        decoder.first_virtual = self.first
        for run in self.runs:
            zeros = jnp.zeros((run.count, count, self.heads, self.channels))
            vars(decoder)[run.name].attention.prefix = Prefix(zeros, zeros)

    def arrays(self, vectors: jax.Array) -> dict[str, jax.Array]:
        by_layer = jnp.moveaxis(vectors.reshape(len(vectors), -1, 2, self.heads, self.channels), 0, 2)
        return {
            f"{run.name}.attention.prefix.{name}": by_layer[run.first : run.first + run.count, number]
            for run in self.runs
            for number, name in enumerate(("keys", "values"))
        }


@dataclass(frozen=True)
class VirtualGraph:
    """A graph for `models.model.merge`: `plain` is the graph of the model with virtual tokens, `maker` computes their
    vectors, and `place` determines where they go."""

    plain: nnx.GraphDef
    maker: VectorMaker
    place: Place

    def installed(self, params: dict[str, Any], key: jax.Array | None) -> tuple[nnx.GraphDef, dict[str, Any]]:
        """A graph and its parameters, with the vectors in place of the arrays from which they are computed."""
        trained = {path.removeprefix(PREFIX): array for path, array in params.items() if path.startswith(PREFIX)}
        arrays = {path: array for path, array in params.items() if not path.startswith(PREFIX)}
        placed = self.place.arrays(self.maker(trained, key))
        return self.plain, arrays | {f"{Decoder.NAME}.{path}": array for path, array in placed.items()}


def virtual_graph(make: Callable[[], nnx.Module], maker: VectorMaker, place: Place) -> VirtualGraph:
    """The graph of the model that `make` builds (it must have a decoder), with virtual tokens."""

    def whole() -> nnx.Module:
        model = make()
        place.prepare(vars(model)[Decoder.NAME], maker.count)
        return model

    return VirtualGraph(nnx.split(nnx.eval_shape(whole))[0], maker, place)
