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

from trl_jax.core.layer_gather import SEQUENCE
from trl_jax.mesh.gathering import Parts, each_part, only
from trl_jax.mesh.sharding import BATCH, ShardingPlan


class ShardedStep:
    """Functions of trained and frozen parameters, flat by path, written out for each device of a plan's mesh."""

    def __init__(self, sharding_plan: ShardingPlan, trained: dict[str, Any], frozen: dict[str, Any]):
        shapes = trained | frozen
        self.sharding_plan, self._trained = sharding_plan, trained
        self._axes = tuple(axis for axis in BATCH if sharding_plan.size(axis) > 1)
        self._all_axes = self._axes + ((SEQUENCE,) if sharding_plan.size(SEQUENCE) > 1 else ())
        specs = {path: sharding_plan.spec(path, leaf.shape) for path, leaf in shapes.items()}
        after = {path: place.spec for path, place in sharding_plan.gradients(shapes).items()}
        self._gradients = {path: only(BATCH, spec) for path, spec in after.items()}
        self._parts = Parts(specs, filter(sharding_plan.scanned, shapes))

    def gradients(self, accumulate: Callable, loss: Callable) -> Callable:
        """`accumulate(value_and_grad(loss), params, frozen, batch, key)`, the batch's arrays `[passes, shards, ...]`
        or, of a single shard, `[passes, ...]`.

        The loss is a sum over shards, gradients lie as `ShardingPlan.gradients` says, metrics are
        `[passes x shards, ...]`.
        """
        grad = jax.value_and_grad(self._parts.with_whole(self._once(loss), parameters=2), has_aux=True)

        def of_shard(params, frozen, batch, keys):
            batch = jax.tree.map(lambda leaf: leaf[:, 0], batch) if self.sharding_plan.shards > 1 else batch
            total, gradients, metrics = accumulate(grad, params, frozen, batch, None if keys is None else keys[0])
            gradients = {path: self._summed(path, gradient) for path, gradient in gradients.items()}
            return self._sum(total, self._all_axes), gradients, jax.tree.map(self._all_metrics, metrics)

        def run(params, frozen, batch, key):
            devices = self.sharding_plan.shards * self.sharding_plan.size(SEQUENCE)
            keys = None if key is None else jax.random.split(key, devices)
            of_batch, of_keys = PartitionSpec(None, self._axes), None if keys is None else PartitionSpec(self._all_axes)
            places = (self._parts.of(params), self._parts.of(frozen), of_batch, of_keys)
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
            return jax.tree.map(partial(self._all, axis=0), self._parts.with_whole(score)(params, batch))

        def run(params, batch):
            places = (self._parts.of(params), PartitionSpec(self._axes))
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

    def _summed(self, path: str, gradient: jax.Array) -> jax.Array:
        """A device's gradient, summed over all: over fsdp it is already where the parameter was gathered."""
        before, after = self._parts.own[path], self._gradients[path]
        left = [axis for axis in self._all_axes if axis not in before]
        for at, axis in enumerate(after):
            if axis is not None and axis in left:
                scatter = partial(jax.lax.psum_scatter, axis_name=axis, scatter_dimension=at, tiled=True)
                gradient = each_part(self._parts.tensor[path], scatter)(gradient)
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

