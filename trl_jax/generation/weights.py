"""The weights of a generation: the model's own arrays and, where it is quicker, copies for the time of the call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from trl_jax.generation.shards import Shards, gathered_once, on_their_mesh, shards_of
from trl_jax.models.arch.cache_parts import cache_parts
from trl_jax.models.functional import merge
from trl_jax.models.stack import in_a_stack
from trl_jax.nn.platform import platform
from trl_jax.nn.quantized import Quantized

_LARGEST = 512 * 2**20  # bytes of layers that are copied to be decoded one by one on a CPU


class Weights(NamedTuple):
    """A model's graph, its arrays, each layer's by itself (`layers_for_decoding`), what it and its head compute in, and
    the devices that have rows of their own; None where all have all rows."""

    graph: Any
    arrays: dict[str, jax.Array]
    layers: list[nnx.State] | None
    dtype: Any
    head_dtype: Any
    shards: Shards | None = None

    @classmethod
    def of(
        cls, graph: Any, arrays: dict[str, jax.Array], dtype: Any = jnp.float32, head_dtype: Any = None
    ) -> Weights:
        """head_dtype: None: `dtype`."""
        dtype = jnp.dtype(dtype)
        head_dtype = dtype if head_dtype is None else jnp.dtype(head_dtype)
        arrays = matrices_in(graph, arrays, dtype, head_dtype)
        arrays, shards = divided(arrays, device_memory())
        layers = layers_for_decoding(graph, arrays, shards, platform())
        shards = None if shards is None else replace(shards, by_layer=layers is not None)
        return cls(graph, arrays, layers, dtype, head_dtype, shards)


def divided(arrays: dict[str, Any], memory: int | None) -> tuple[dict[str, Any], Shards | None]:
    """The devices that have rows of their own, and the arrays as these hold them; `memory` and shapes as in
    `gathered_once`."""
    stacked = frozenset(filter(in_a_stack, arrays))
    shards = shards_of(arrays, stacked)
    if shards is None:
        return arrays, None
    arrays = on_their_mesh(gathered_once(arrays, shards, memory), shards)
    return arrays, shards_of(arrays, stacked)


def device_memory() -> int | None:
    """Bytes of a device; None where it does not say."""
    return (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")


def length_of_turn(weights: Weights) -> int | None:
    """The tokens of a text behind which ropes turn all of them otherwise (LongRoPE); None where none does."""
    ropes = trunk_of(merge(weights.graph, weights.arrays)).arch.ropes
    turns = [rope.turn for rope in ropes if rope is not None]
    return min((turn for turn in turns if turn is not None), default=None)


def with_head_in(graph: Any, arrays: dict[str, jax.Array], dtype: jnp.dtype) -> nnx.Module:
    """The model that is asked for outputs in each of many steps: a tied head's table is in the head's `dtype` once, not
    anew in each. Its trunk is not the one that looks tokens up."""
    model = merge(graph, arrays)
    embed = trunk_of(model).embed
    if model.lm_head.weight is None and not isinstance(embed.weight, Quantized):
        embed.weight = nnx.Param(embed.weight[...].astype(dtype))
    return model


def trunk_of(model: nnx.Module) -> nnx.Module:
    """The decoder of a model."""
    return vars(model)[model.trunk_name]


@partial(jax.jit, static_argnums=0)
def _unstacked(graph: Any, arrays: dict[str, jax.Array]) -> list[nnx.State]:
    trunk = trunk_of(merge(graph, arrays))
    return [layer for run in trunk.arch.runs for layer in unstacked(nnx.split(vars(trunk)[run.name])[1], run.count)]


def unstacked(stack: Any, count: int) -> list[Any]:
    """Each layer's of arrays with a leading axis L of `count` layers."""
    return [jax.tree.map(lambda leaf: leaf[i], stack) for i in range(count)]  # noqa: B023


def by_layers(parts: list[Any], arch: Any) -> list[Any]:
    """Of each layer that keeps something, from the parts of several (models/arch/cache_parts.py)."""
    of_layer = {}
    for part, (layers, _) in zip(parts, cache_parts(arch), strict=True):
        of_layer |= zip(layers, unstacked(part, len(layers)), strict=True)
    return [of_layer[layer] for layer in sorted(of_layer)]


def layers_for_decoding(
    graph: Any, arrays: dict[str, jax.Array], shards: Shards | None, platform: str
) -> list[nnx.State] | None:
    """Each layer's parameters by themselves, on a CPU and where they are small; None: decode along the stack.

    On a CPU a scan copies a layer's weights and cache out of the stacks in every turn, which takes a small model half
    of its time. Elsewhere it does not, and a large model has no room for another copy.
    """
    return _unstacked(graph, arrays) if decodes_by_layer(arrays, shards, platform) else None


def decodes_by_layer(arrays: Mapping[str, Any], shards: Shards | None, platform: str) -> bool:
    """Whether layers are decoded one by one; `arrays` may be shapes."""
    if shards is not None and not shards.undivided:
        return False
    stacked = [array for path, array in arrays.items() if in_a_stack(path)]
    return platform == "cpu" and sum(array.size * array.dtype.itemsize for array in stacked) <= _LARGEST


def layer_shapes(graph: Any, arrays: Mapping[str, jax.ShapeDtypeStruct]) -> list[nnx.State]:
    """The shapes of each layer's parameters by themselves."""
    return jax.eval_shape(partial(_unstacked, graph), arrays)


def matrices_in(
    graph: Any, arrays: dict[str, jax.Array], dtype: jnp.dtype, head_dtype: jnp.dtype | None = None
) -> dict[str, jax.Array]:
    """The arrays, of which the matrices that layers multiply by are in `dtype` already: the products are the same, and
    each step reads half the bytes. Norms, biases, adapters and the table of tokens stay as they are."""
    names = cast_matrices(graph, arrays, dtype, head_dtype)
    return arrays | _cast({path: arrays[path] for path in names}, dtype) if names else arrays


def cast_matrices(
    graph: Any, arrays: Mapping[str, Any], dtype: jnp.dtype, head_dtype: jnp.dtype | None
) -> list[str]:
    """The paths of the matrices that `matrices_in` casts; `arrays` may be shapes."""
    if dtype == jnp.float32:
        return []
    names = [path for path, axes in _axes(graph, arrays).items() if _is_matrix(path, axes) and path in arrays]
    if head_dtype == jnp.float32:
        names = [path for path in names if not path.startswith("lm_head.")]
    return [path for path in names if arrays[path].dtype == jnp.float32]


@partial(jax.jit, static_argnums=1)
def _cast(arrays: dict[str, jax.Array], dtype: jnp.dtype) -> dict[str, jax.Array]:
    return jax.tree.map(lambda array: array.astype(dtype), arrays)


def _axes(graph: Any, arrays: dict[str, jax.Array]) -> dict[str, tuple[str, ...]]:
    """The logical axes of the parameters of a model, by path."""
    state = nnx.to_flat_state(nnx.split(nnx.eval_shape(lambda: merge(graph, _shapes(arrays))))[1])
    named = ((".".join(map(str, path)), leaf.get_metadata()) for path, leaf in state)
    return {path: metadata["axes"] for path, metadata in named if "axes" in metadata}


def _shapes(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {path: jnp.zeros(array.shape, array.dtype) for path, array in arrays.items()}


def _is_matrix(path: str, axes: tuple[str, ...]) -> bool:
    """Whether layers, or an untied head, multiply by it and do nothing else with it."""
    if "norm" in axes:
        return False
    return axes == ("vocab", "embed") if path.startswith("lm_head.") else axes[0] == "layers" and len(axes) >= 3
