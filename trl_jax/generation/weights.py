"""A model's arrays as generation uses them: cast, split by layer, and sharded over devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from trl_jax.mesh.mesh import SEQUENCE, TENSOR, ShardedParams, only, platform
from trl_jax.models.arch import Arch
from trl_jax.models.decoder import in_a_stack
from trl_jax.models.model import logical_axes, merge
from trl_jax.nn.cache import Cache, CacheFill
from trl_jax.nn.linear import EncodedWeight

_LARGEST = 512 * 2**20  # most bytes of layers that are unstacked for decoding on a CPU


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["arrays", "layers"],
    meta_fields=["graph", "dtype", "head_dtype", "shards"],
)
@dataclass(frozen=True)
class Weights:
    """The model's arrays as generation uses them, including copies that make a call faster.

    layers: each layer's arrays, separately (see `layers_for_decoding`); None decodes along the stack.
    dtype, head_dtype: compute dtypes of the decoder and of the head.
    shards: the devices that rows are sharded over; None on a single device.
    """

    graph: Any
    arrays: dict[str, jax.Array]
    layers: list[nnx.State] | None
    dtype: Any
    head_dtype: Any
    shards: Shards | None = None

    @classmethod
    def of(cls, graph: Any, arrays: dict[str, jax.Array], dtype: Any = jnp.float32, head_dtype: Any = None) -> Weights:
        """Prepare a model's arrays; `head_dtype` None means `dtype`."""
        dtype = jnp.dtype(dtype)
        head_dtype = dtype if head_dtype is None else jnp.dtype(head_dtype)
        arrays = matrices_in(graph, arrays, dtype, head_dtype)
        arrays, shards = shard_for_generation(arrays, device_memory())
        layers = layers_for_decoding(graph, arrays, shards, platform())
        shards = None if shards is None else replace(shards, by_layer=layers is not None)
        return cls(graph, arrays, layers, dtype, head_dtype, shards)

    def model(self) -> nnx.Module:
        return merge(self.graph, self.arrays)

    def model_with_cast_head(self) -> nnx.Module:
        """The model for computing logits, with the table of a tied head cast to the head's dtype once instead of in
        every step. Do not use its trunk for embedding lookups."""
        model = self.model()
        embed = trunk_of(model).embed
        if model.lm_head.weight is None and not isinstance(embed.weight, EncodedWeight):
            embed.weight = nnx.Param(embed.weight[...].astype(self.head_dtype))
        return model

    def logits(self, model: nnx.Module, hidden: jax.Array) -> jax.Array:
        """Float32 logits `[N, V]` of hidden states `[N, D]`."""
        return model.outputs(hidden.astype(self.dtype), None, self.head_dtype, None, 1.0).astype(jnp.float32)

    @property
    def arch(self) -> Arch:
        return trunk_of(self.model()).arch

    @property
    def num_shards(self) -> int:
        return 1 if self.shards is None else self.shards.count

    @property
    def longrope_switch_length(self) -> int | None:
        """The text length above which LongRoPE rotates all tokens differently; None without LongRoPE."""
        lengths = [rope.switch_length for rope in self.arch.ropes if rope is not None]
        return min((length for length in lengths if length is not None), default=None)


def shard_for_generation(arrays: dict[str, Any], memory: int | None) -> tuple[dict[str, Any], Shards | None]:
    """The arrays as sharded for generation, and the devices that rows are sharded over. For `memory` and for shapes
    instead of arrays, see `gathered_once`."""
    stacked = frozenset(filter(in_a_stack, arrays))
    shards = shards_of(arrays, stacked)
    if shards is None:
        return arrays, None
    arrays = on_their_mesh(gathered_once(arrays, shards, memory), shards)
    return arrays, shards_of(arrays, stacked)


def device_memory() -> int | None:
    """Memory of a device in bytes; None if the backend does not report it."""
    return (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")


def trunk_of(model: nnx.Module) -> nnx.Module:
    """The decoder of a model."""
    return vars(model)[model.trunk_name]


@partial(jax.jit, static_argnums=0)
def _unstacked(graph: Any, arrays: dict[str, jax.Array]) -> list[nnx.State]:
    trunk = trunk_of(merge(graph, arrays))
    return [layer for run in trunk.arch.runs for layer in unstacked(nnx.split(vars(trunk)[run.name])[1], run.count)]


def unstacked(stack: Any, count: int) -> list[Any]:
    """Split arrays with a leading axis of `count` layers into a list, one entry per layer."""
    return [jax.tree.map(lambda leaf: leaf[i], stack) for i in range(count)]  # noqa: B023


def layers_for_decoding(
    graph: Any, arrays: dict[str, jax.Array], shards: Shards | None, platform: str
) -> list[nnx.State] | None:
    """Each layer's parameters, separately, for small models on a CPU; None decodes along the stack.

    On a CPU, a scan copies each layer's weights and cache out of the stacks in every iteration, which takes half of a
    small model's time. Other backends do not copy, and a large model has no memory for another copy.
    """
    return _unstacked(graph, arrays) if decodes_by_layer(arrays, shards, platform) else None


def decodes_by_layer(arrays: Mapping[str, Any], shards: Shards | None, platform: str) -> bool:
    """Whether `layers_for_decoding` unstacks the layers; `arrays` may be shapes."""
    if shards is not None and not shards.params_replicated:
        return False
    stacked = [array for path, array in arrays.items() if in_a_stack(path)]
    return platform == "cpu" and sum(array.size * array.dtype.itemsize for array in stacked) <= _LARGEST


def layer_shapes(graph: Any, arrays: Mapping[str, jax.ShapeDtypeStruct]) -> list[nnx.State]:
    """The shapes that `layers_for_decoding` would return."""
    return jax.eval_shape(partial(_unstacked, graph), arrays)


def matrices_in(
    graph: Any, arrays: dict[str, jax.Array], dtype: jnp.dtype, head_dtype: jnp.dtype | None = None
) -> dict[str, jax.Array]:
    """Cast the weight matrices to `dtype` once. The products are the same, but each step reads half the bytes.

    Norms, biases, adapters and the embedding table are not cast.
    """
    names = cast_matrices(graph, arrays, dtype, head_dtype)
    return arrays | _cast({path: arrays[path] for path in names}, dtype) if names else arrays


def cast_matrices(graph: Any, arrays: Mapping[str, Any], dtype: jnp.dtype, head_dtype: jnp.dtype | None) -> list[str]:
    """Paths of the matrices that `matrices_in` casts; `arrays` may be shapes."""
    if dtype == jnp.float32:
        return []
    axes_of = logical_axes(lambda: merge(graph, _zeros_like(arrays)))
    names = [path for path, axes in axes_of.items() if _is_matrix(path, axes) and path in arrays]
    if head_dtype == jnp.float32:
        names = [path for path in names if not path.startswith("lm_head.")]
    return [path for path in names if arrays[path].dtype == jnp.float32]


@partial(jax.jit, static_argnums=1)
def _cast(arrays: dict[str, jax.Array], dtype: jnp.dtype) -> dict[str, jax.Array]:
    return jax.tree.map(lambda array: array.astype(dtype), arrays)


def _zeros_like(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {path: jnp.zeros(array.shape, array.dtype) for path, array in arrays.items()}


def _is_matrix(path: str, axes: tuple[str, ...]) -> bool:
    """Whether the parameter is only used as a matrix, by a layer or an untied head."""
    if "norm" in axes:
        return False
    return axes == ("vocab", "embed") if path.startswith("lm_head.") else axes[0] == "layers" and len(axes) >= 3


# Several devices

_WHOLE = 1 / 4  # fraction of a device's memory up to which parameters are gathered once instead of in every step


@dataclass(frozen=True)
class Shards:
    """How generation is sharded: each device (or group of devices along `tensor`) gets an equal contiguous run of the
    prompts with all their completions.

    mesh: the product of its axes other than `tensor` is the number of shards.
    specs: partition spec of each parameter, by path.
    stacked: paths of parameters with a leading layer axis.
    by_layer: whether the cache has one part per layer instead of one per stack of layers.
    """

    mesh: Mesh
    specs: tuple[tuple[str, PartitionSpec], ...]
    stacked: frozenset[str]
    by_layer: bool = False

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(axis for axis, size in self.mesh.shape.items() if axis != TENSOR and size > 1)

    @property
    def count(self) -> int:
        return prod(self.mesh.shape[axis] for axis in self.axes)

    @property
    def whole(self) -> PartitionSpec:
        """Spec of replicated arrays."""
        return PartitionSpec()

    @property
    def rows(self) -> PartitionSpec:
        """Spec of arrays whose first axis is prompts or completions."""
        return PartitionSpec(self.axes)

    @property
    def cache(self) -> Cache:
        """Specs of a cache."""
        parts = self.rows if self.by_layer else PartitionSpec(None, self.axes)
        return Cache(parts, CacheFill(self.rows, self.rows, self.whole, self.rows))

    @property
    def params(self) -> dict[str, PartitionSpec]:
        """Specs of parameters, by path."""
        return self._parts.own

    @property
    def params_replicated(self) -> bool:
        """Whether each shard has all parameters (sharded over `tensor` at most)."""
        return not any(axis for spec in self.params.values() for axis in spec)

    @property
    def _parts(self) -> ShardedParams:
        return ShardedParams(dict(self.specs), self.stacked)

    def mapped(self, body: Callable, of_arguments: Any, of_results: Any, *, parameters: bool) -> Callable:
        """Wrap `body` in a shard_map, so that each shard computes its own rows.

        Args:
            of_arguments, of_results: partition specs: `rows`, `cache`, `params` or `whole`.
            parameters: whether the first argument is a dict of parameters by path, which must be all-gathered.
        """
        body = self._parts.with_whole(body) if parameters else body
        if not self.axes:  # a single shard; XLA partitions the products over `tensor`
            return self._named(body)
        specs = {"in_specs": of_arguments, "out_specs": of_results}
        # check_vma only matters for gradients.
        return jax.shard_map(body, mesh=self.mesh, **specs, axis_names=set(self.axes), check_vma=False)

    def _named(self, body: Callable) -> Callable:
        def run(*arguments):
            with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
                return body(*arguments)

        return run


def shards_of(arrays: Mapping[str, Any], stacked: frozenset[str]) -> Shards | None:
    """The devices that a model's parameters are placed on; None for a single device.

    `arrays` may be shapes with shardings. The sequence axis of training, if any, also shards prompts here.
    """
    shardings = {path: array.sharding for path, array in arrays.items()}
    mesh = next((sharding.mesh for sharding in shardings.values() if isinstance(sharding, NamedSharding)), None)
    if mesh is None or mesh.size == 1:
        return None
    names = ["copies" if axis == SEQUENCE and size > 1 else axis for axis, size in mesh.shape.items()]
    mesh = Mesh(mesh.devices, names, axis_types=mesh.axis_types)
    whole = PartitionSpec()
    specs = tuple((path, at.spec if isinstance(at, NamedSharding) else whole) for path, at in shardings.items())
    return Shards(mesh, specs, stacked)


def on_their_mesh(arrays: dict[str, Any], shards: Shards) -> dict[str, Any]:
    """The same arrays, relabeled with the shards' mesh: JAX lowers custom-partitioned kernels such as cuDNN's for a
    single mesh only."""
    return {path: _named(array, shards.mesh) for path, array in arrays.items()}


def _named(array: Any, mesh: Mesh) -> Any:
    sharding = array.sharding
    if not isinstance(sharding, NamedSharding) or sharding.mesh == mesh:
        return array
    sharding = NamedSharding(mesh, sharding.spec)
    if not isinstance(array, jax.Array):
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)
    parts = [shard.data for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, sharding, parts)


def gathered_once(arrays: dict[str, Any], shards: Shards, memory: int | None) -> dict[str, Any]:
    """All-gather the parameters on every device (they stay sharded over `tensor`) unless that takes more than a quarter
    of a device's memory, in which case each step gathers one layer at a time.

    Args:
        arrays: may be shapes with shardings.
        memory: bytes per device; None if unknown.
    """
    shardings = {path: NamedSharding(shards.mesh, only((TENSOR,), spec)) for path, spec in shards.specs}
    numbers = {path: prod(sharding.shard_shape(arrays[path].shape)) for path, sharding in shardings.items()}
    taken = sum(number * arrays[path].dtype.itemsize for path, number in numbers.items())
    if memory is not None and taken > _WHOLE * memory:
        return arrays
    partitioned = {path: sharding for path, sharding in shardings.items() if any(shards.params[path])}
    moved = {path: arrays[path] for path in partitioned}
    if all(isinstance(array, jax.Array) for array in moved.values()):
        return arrays | _at(moved, tuple(partitioned.items()))
    return arrays | {
        path: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=partitioned[path])
        for path, array in moved.items()
    }


@partial(jax.jit, static_argnums=1)
def _at(arrays: dict[str, jax.Array], shardings: tuple[tuple[str, NamedSharding], ...]) -> dict[str, jax.Array]:
    return {path: jax.lax.with_sharding_constraint(arrays[path], sharding) for path, sharding in shardings}


def shard_mapped(
    shards: Shards | None, body: Callable, specs: Callable[[Shards], tuple[Any, Any]], *, parameters: bool = False
) -> Callable:
    """`Shards.mapped` with the partition specs that `specs` returns; `body` itself without shards."""
    return body if shards is None else shards.mapped(body, *specs(shards), parameters=parameters)


def any_shard(shards: Shards | None, flag: jax.Array) -> jax.Array:
    """Whether `flag` is True on any shard."""
    return flag if shards is None or not shards.axes else jax.lax.pmax(flag.astype(jnp.int32), shards.axes) > 0


def all_gather_rows(shards: Shards | None, rows: jax.Array) -> jax.Array:
    """All-gather rows over the shards."""
    return rows if shards is None or not shards.axes else jax.lax.all_gather(rows, shards.axes, tiled=True)


def part_of_group(prompts: int, group: int, shards: int) -> int:
    """How many copies of each prompt to make, so that completions spread over the shards with the fewest rows on each.
    Among equal choices the smallest, because each copy prefills the prompt."""
    parts = [number for number in range(1, group + 1) if group % number == 0]
    return min(parts, key=lambda number: -(-prompts * number // shards) * (group // number))
