"""A generation on several devices: each writes completions of its own, with the parameters that they divide."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from trl_jax.core.layer_gather import SEQUENCE, TENSOR
from trl_jax.mesh.gathering import Parts, only
from trl_jax.nn.cache.cache import Cache
from trl_jax.nn.cache.places import CachePlaces

_WHOLE = 1 / 4  # of a device's memory, for parameters that are gathered once and not in each step


@dataclass(frozen=True)
class Shards:
    """Devices, or groups of them along `tensor`, of which each has an equal run of the prompts and all completions of
    these.

    mesh: its axes but `tensor` count them. specs: by path, where parameters lie. stacked: paths of those with an axis
    of layers in front. by_layer: the cache has a part for each layer, not for several.
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
        """Of what each has all of."""
        return PartitionSpec()

    @property
    def rows(self) -> PartitionSpec:
        """Of arrays of prompts, or of completions."""
        return PartitionSpec(self.axes)

    @property
    def cache(self) -> Cache:
        """Of a cache."""
        parts = self.rows if self.by_layer else PartitionSpec(None, self.axes)
        return Cache(parts, CachePlaces(self.rows, self.rows, self.whole))

    @property
    def params(self) -> dict[str, PartitionSpec]:
        """Of parameters, by path."""
        return self._parts.own

    @property
    def undivided(self) -> bool:
        """Whether each has all parameters, or its part over `tensor` of all."""
        return not any(axis for spec in self.params.values() for axis in spec)

    @property
    def _parts(self) -> Parts:
        return Parts(dict(self.specs), self.stacked)

    def mapped(self, body: Callable, of_arguments: Any, of_results: Any, *, parameters: bool) -> Callable:
        """The function as each shard computes it, of its own rows.

        Args:
            of_arguments, of_results: what `rows`, `cache`, `params` and `whole` say of each. parameters: whether the
                first argument are parameters by path, of which each device has its part.
        """
        body = self._parts.with_whole(body) if parameters else body
        if not self.axes:  # one, which computes as it would alone; products are divided by XLA
            return self._named(body)
        places = {"in_specs": of_arguments, "out_specs": of_results}
        # Types of varying values are not checked: there are no gradients.
        return jax.shard_map(body, mesh=self.mesh, **places, axis_names=set(self.axes), check_vma=False)

    def _named(self, body: Callable) -> Callable:
        def run(*arguments):
            with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
                return body(*arguments)

        return run


def shards_of(arrays: Mapping[str, Any], stacked: frozenset[str]) -> Shards | None:
    """The devices that a model's parameters lie on; None where that is one. Arrays may be shapes with shardings.

    Devices that share texts along the sequence axis, where training has one, have prompts of their own, too.
    """
    places = {path: array.sharding for path, array in arrays.items()}
    mesh = next((place.mesh for place in places.values() if isinstance(place, NamedSharding)), None)
    if mesh is None or mesh.size == 1:
        return None
    names = ["copies" if axis == SEQUENCE and size > 1 else axis for axis, size in mesh.shape.items()]
    mesh = Mesh(mesh.devices, names, axis_types=mesh.axis_types)
    whole = PartitionSpec()
    specs = ((path, place.spec if isinstance(place, NamedSharding) else whole) for path, place in places.items())
    return Shards(mesh, tuple(specs), stacked)


def on_their_mesh(arrays: dict[str, Any], shards: Shards) -> dict[str, Any]:
    """The arrays where they are, but as those of the shards' mesh: JAX lowers a kernel that it may have to divide, as
    cuDNN's, for one mesh alone."""
    return {path: _named(array, shards.mesh) for path, array in arrays.items()}


def _named(array: Any, mesh: Mesh) -> Any:
    place = array.sharding
    if not isinstance(place, NamedSharding) or place.mesh == mesh:
        return array
    place = NamedSharding(mesh, place.spec)
    if not isinstance(array, jax.Array):
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=place)
    parts = [shard.data for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, place, parts)


def gathered_once(arrays: dict[str, Any], shards: Shards, memory: int | None) -> dict[str, Any]:
    """The parameters, each device with all of them, or where `tensor` divides them with its part of all; or as they
    are, if that takes more than a quarter of a device's `memory`: each step then gathers a layer at a time.

    Args:
        memory: bytes of a device; None where that is not known. arrays: may be shapes with shardings.
    """
    places = {path: NamedSharding(shards.mesh, only((TENSOR,), spec)) for path, spec in shards.specs}
    numbers = {path: prod(place.shard_shape(arrays[path].shape)) for path, place in places.items()}
    taken = sum(number * arrays[path].dtype.itemsize for path, number in numbers.items())
    if memory is not None and taken > _WHOLE * memory:
        return arrays
    divided = {path: place for path, place in places.items() if any(shards.params[path])}
    own = {path: arrays[path] for path in divided}
    if not all(isinstance(array, jax.Array) for array in own.values()):
        shapes = {path: (array.shape, array.dtype) for path, array in own.items()}
        return arrays | {path: jax.ShapeDtypeStruct(*of, sharding=divided[path]) for path, of in shapes.items()}
    return arrays | _at(own, tuple(divided.items()))


@partial(jax.jit, static_argnums=1)
def _at(arrays: dict[str, jax.Array], places: tuple[tuple[str, NamedSharding], ...]) -> dict[str, jax.Array]:
    return {path: jax.lax.with_sharding_constraint(arrays[path], place) for path, place in places}


def on_each(
    shards: Shards | None, body: Callable, places: Callable[[Shards], tuple[Any, Any]], *, parameters: bool = False
) -> Callable:
    """`Shards.mapped`, with the `places` of arguments and of results; the function itself where there are no shards."""
    return body if shards is None else shards.mapped(body, *places(shards), parameters=parameters)


def anywhere(shards: Shards | None, flag: jax.Array) -> jax.Array:
    """Whether it is so on any of them."""
    return flag if shards is None or not shards.axes else jax.lax.pmax(flag.astype(jnp.int32), shards.axes) > 0


def of_all(shards: Shards | None, rows: jax.Array) -> jax.Array:
    """The rows of all of them, on each."""
    return rows if shards is None or not shards.axes else jax.lax.all_gather(rows, shards.axes, tiled=True)


def part_of_group(prompts: int, group: int, shards: int) -> int:
    """Into how many parts the completions of each prompt are divided, so that shards have the fewest; of equals the
    fewest parts, as each of them computes the prompt."""
    parts = [number for number in range(1, group + 1) if group % number == 0]
    return min(parts, key=lambda number: -(-prompts * number // shards) * (group // number))
