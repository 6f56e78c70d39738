"""A loss on several devices: each has its own examples, and only parameters, gradients and sums go between them.

Everything is written out in one `jax.shard_map` over the axes that divide examples and texts. The batch of a device is
one as a single device would have it, so models know nothing of meshes, and XLA has nothing of a batch to gather. Along
the sequence axis devices have the same batch, of which a decoder takes its stripes of each text.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from trl_jax.core.layer_gather import SEQUENCE, layers_gathered_by
from trl_jax.engine.devices.sharding import BATCH, ShardingPlan


class ShardedStep:
    """Functions of trained and frozen parameters, flat by path, written out for each device of a plan's mesh."""

    def __init__(self, sharding_plan: ShardingPlan, trained: dict[str, Any], frozen: dict[str, Any]):
        shapes = trained | frozen
        self.sharding_plan, self._trained = sharding_plan, trained
        self._axes = tuple(axis for axis in BATCH if sharding_plan.size(axis) > 1)
        self._all_axes = self._axes + ((SEQUENCE,) if sharding_plan.size(SEQUENCE) > 1 else ())
        specs = {path: sharding_plan.spec(path, leaf.shape) for path, leaf in shapes.items()}
        after = {path: place.spec for path, place in sharding_plan.gradients(shapes).items()}
        self._specs = {path: _only(BATCH, spec) for path, spec in specs.items()}
        self._gradients = {path: _only(BATCH, spec) for path, spec in after.items()}
        self._tensor = {path: _only(("tensor",), spec) for path, spec in specs.items()}
        self._scanned = [path for path in shapes if sharding_plan.scanned(path)]

    def gradients(self, accumulate: Callable, loss: Callable) -> Callable:
        """`accumulate(value_and_grad(loss), params, frozen, batch, key)`, the batch's arrays `[passes, shards, ...]`
        or, of a single shard, `[passes, ...]`.

        The loss is a sum over shards, gradients lie as `ShardingPlan.gradients` says, metrics are
        `[passes x shards, ...]`.
        """
        grad = jax.value_and_grad(self._with_whole(self._once(loss), parameters=2), has_aux=True)

        def of_shard(params, frozen, batch, keys):
            batch = jax.tree.map(lambda leaf: leaf[:, 0], batch) if self.sharding_plan.shards > 1 else batch
            total, gradients, metrics = accumulate(grad, params, frozen, batch, None if keys is None else keys[0])
            gradients = {path: self._summed(path, gradient) for path, gradient in gradients.items()}
            return self._sum(total, self._all_axes), gradients, jax.tree.map(self._all_metrics, metrics)

        def run(params, frozen, batch, key):
            devices = self.sharding_plan.shards * self.sharding_plan.size(SEQUENCE)
            keys = None if key is None else jax.random.split(key, devices)
            of_batch, of_keys = PartitionSpec(None, self._axes), None if keys is None else PartitionSpec(self._all_axes)
            places = (self._of(params), self._of(frozen), of_batch, of_keys)
            results = (PartitionSpec(), {path: self._gradients[path] for path in params}, PartitionSpec())
            return self._mapped(of_shard, places, results)(params, frozen, batch, keys)

        return run

    def after_step(self, tx: Any) -> tuple:
        """Where a step leaves parameters, the optimizer's state and metrics."""
        state = jax.eval_shape(tx.init, self._trained)
        sharding_plan, shapes = self.sharding_plan, self._trained
        return sharding_plan.params(shapes), sharding_plan.state(state, shapes), sharding_plan.whole

    def scores(self, score: Callable) -> Callable:
        """`score(params, batch)` with the arrays of one pass a shard, `[shards, ...]`; its array, or arrays by name,
        `[shards, ...]`."""

        def of_shard(params, batch):
            return jax.tree.map(partial(self._all, axis=0), self._with_whole(score)(params, batch))

        def run(params, batch):
            places = (self._of(params), PartitionSpec(self._axes))
            return self._mapped(of_shard, places, PartitionSpec())(params, batch)

        return run

    def _once(self, loss: Callable) -> Callable:
        """The loss that several devices compute along the sequence axis, counted on the first of them alone."""
        if SEQUENCE not in self._all_axes:
            return loss

        def counted(*arguments):
            total, metrics = loss(*arguments)
            return jnp.where(jax.lax.axis_index(SEQUENCE) == 0, total, 0), metrics

        return counted

    def _mapped(self, function: Callable, places: Any, results: Any) -> Callable:
        if not self._all_axes:  # one shard, which computes as it would alone; products are divided by XLA
            return self._named(function)
        # Types of varying values are not checked: no gradient is taken through the map, only within.
        return jax.shard_map(
            function,
            mesh=self.sharding_plan.mesh,
            in_specs=places,
            out_specs=results,
            axis_names=set(self._all_axes),
            check_vma=False,
        )

    def _named(self, function: Callable) -> Callable:
        def run(*arguments):
            with jax.sharding.use_abstract_mesh(self.sharding_plan.mesh.abstract_mesh):
                return function(*arguments)

        return run

    def _of(self, params: dict[str, Any]) -> dict[str, PartitionSpec]:
        return {path: self._specs[path] for path in params}

    def _with_whole(self, function: Callable, parameters: int = 1) -> Callable:
        """The function, of whose arguments the first ones are `parameters`, of which a device holds a part."""

        def run(*arguments):
            whole = [
                {path: self._whole(path, array) for path, array in params.items()} for params in arguments[:parameters]
            ]
            with layers_gathered_by(self._whole_layer):
                return function(*whole, *arguments[parameters:])

        return run

    def _whole(self, path: str, array: jax.Array) -> jax.Array:
        if self.sharding_plan.scanned(path):  # gathered by the layer, in the turn of the scan that uses it
            return array
        return self._gathered(array, self._specs[path], self._tensor[path])

    def _whole_layer(self, path: str, array: jax.Array) -> jax.Array:
        """One layer's of the stacked parameter at `path` in a model, whichever of the step's models that is."""
        stacks = [stack for stack in self._scanned if stack == path or stack.endswith(f".{path}")]
        specs = {(self._specs[stack][1:], self._tensor[stack][1:]) for stack in stacks}
        if not specs:  # an adapter's, which came whole
            return array
        if len(specs) > 1:
            raise ValueError(f"{' and '.join(stacks)} are divided differently; a layer cannot tell which it has.")
        [(spec, tensor)] = specs
        return self._gathered(array, PartitionSpec(*spec), PartitionSpec(*tensor))

    def _gathered(self, array: jax.Array, spec: PartitionSpec, tensor: PartitionSpec) -> jax.Array:
        at = [(place, axis) for place, axis in enumerate(spec) if axis is not None]
        if not at:
            return array
        [(place, axis)] = at
        return self._each(tensor, lambda part: jax.lax.all_gather(part, axis, axis=place, tiled=True))(array)

    def _each(self, tensor: PartitionSpec, collective: Callable) -> Callable:
        """A collective over the axes of examples, for each part over `tensor` alone: XLA would gather that one, too."""
        if "tensor" not in tensor:
            return collective
        return jax.shard_map(
            collective, in_specs=tensor, out_specs=tensor, axis_names={"tensor"}, check_vma=False
        )

    def _summed(self, path: str, gradient: jax.Array) -> jax.Array:
        """A device's gradient, summed over all: over fsdp it is already where the parameter was gathered."""
        before, after = self._specs[path], self._gradients[path]
        left = [axis for axis in self._all_axes if axis not in before]
        for at, axis in enumerate(after):
            if axis is not None and axis in left:
                scatter = partial(jax.lax.psum_scatter, axis_name=axis, scatter_dimension=at, tiled=True)
                gradient = self._each(self._tensor[path], scatter)(gradient)
                left.remove(axis)
        return self._sum(gradient, tuple(left))

    def _sum(self, value: jax.Array, axes: tuple[str, ...]) -> jax.Array:
        return jax.lax.psum(value, axes) if axes else value

    def _all(self, value: jax.Array, axis: int) -> jax.Array:
        """Every shard's, on a new axis."""
        return jax.lax.all_gather(value, self._axes, axis=axis) if self._axes else jnp.expand_dims(value, axis)

    def _all_metrics(self, metric: jax.Array) -> jax.Array:
        """`[passes, ...]` of each shard as `[passes x shards, ...]` on all."""
        return self._all(metric, axis=1).reshape(-1, *metric.shape[1:])


def _only(axes: tuple[str, ...], spec: PartitionSpec) -> PartitionSpec:
    return PartitionSpec(*(axis if axis in axes else None for axis in spec))

