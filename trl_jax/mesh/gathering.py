"""Parameters of which a device holds a part, whole again where it computes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
from jax.sharding import PartitionSpec

from trl_jax.core.layer_gather import layers_gathered_by, model_prefix
from trl_jax.mesh.sharding import BATCH


class Parts:
    """Parameters, flat by path, that devices with rows of their own divide among them. What follows is called within a
    `jax.shard_map` over the axes of BATCH.

    Args:
        specs: where each lies. stacked: the paths of those that have an axis of layers in front, which are gathered by
            the layer, in the turn of the scan that uses it.

    Attributes:
        own, tensor: of each, the axes of BATCH alone, and `tensor` alone.
    """

    def __init__(self, specs: Mapping[str, PartitionSpec], stacked: Iterable[str]):
        self.own = {path: only(BATCH, spec) for path, spec in specs.items()}
        self.tensor = {path: only(("tensor",), spec) for path, spec in specs.items()}
        self._stacked = frozenset(stacked)

    def of(self, params: Mapping[str, Any]) -> dict[str, PartitionSpec]:
        """How these are divided."""
        return {path: self.own[path] for path in params}

    def with_whole(self, function: Callable, parameters: int = 1) -> Callable:
        """The function, of whose arguments the first ones are `parameters`, of which a device holds a part."""

        def run(*arguments):
            whole = [
                {path: self._whole(path, array) for path, array in params.items()} for params in arguments[:parameters]
            ]
            with layers_gathered_by(self._whole_layer):
                return function(*whole, *arguments[parameters:])

        return run

    def _whole(self, path: str, array: jax.Array) -> jax.Array:
        return array if path in self._stacked else _gathered(array, self.own[path], self.tensor[path])

    def _whole_layer(self, path: str, array: jax.Array) -> jax.Array:
        """One layer's of the stacked parameter at `path` in the model that is traced: its own, or one that it shares
        with the model that trains."""
        for stack in (model_prefix() + path, path):
            if stack in self._stacked:
                return _gathered(array, *(PartitionSpec(*spec[stack][1:]) for spec in (self.own, self.tensor)))
        return array  # an adapter's, which came whole


def only(axes: tuple[str, ...], spec: PartitionSpec) -> PartitionSpec:
    """The spec without other axes."""
    return PartitionSpec(*(axis if axis in axes else None for axis in spec))


def each_part(tensor: PartitionSpec, collective: Callable) -> Callable:
    """A collective over the axes of examples, for each part over `tensor` alone: XLA would gather that one, too."""
    if "tensor" not in tensor:
        return collective
    return jax.shard_map(collective, in_specs=tensor, out_specs=tensor, axis_names={"tensor"}, check_vma=False)


def _gathered(array: jax.Array, own: PartitionSpec, tensor: PartitionSpec) -> jax.Array:
    at = [(place, axis) for place, axis in enumerate(own) if axis is not None]
    if not at:
        return array
    [(place, axis)] = at
    return each_part(tensor, lambda part: jax.lax.all_gather(part, axis, axis=place, tiled=True))(array)
