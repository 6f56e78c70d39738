"""Matrix products of rows sorted into groups, each group with a matrix of its own."""

from __future__ import annotations

import jax
import jax.numpy as jnp

BLOCK = 64  # rows computed at a time; what a group lacks to a multiple of it is computed in vain


def grouped_dot(x: jax.Array, weight: jax.Array, sizes: jax.Array) -> jax.Array:
    """`[M, in]` with group g's `sizes[g]` rows times `weight[g].T`: `[M, out]`; weight `[E, out, in]`.

    Accelerators have a kernel for it. On a CPU, XLA would multiply every row with every matrix, so there blocks of
    rows of one group each go one after another.
    """
    return jax.lax.platform_dependent(x, weight, sizes, cpu=_blockwise, default=_ragged)


def _ragged(x: jax.Array, weight: jax.Array, sizes: jax.Array) -> jax.Array:
    return jax.lax.ragged_dot(x, weight.swapaxes(1, 2), sizes)


@jax.custom_vjp
def _blockwise(x: jax.Array, weight: jax.Array, sizes: jax.Array) -> jax.Array:
    return _products(x, weight, sizes)


def _products(x: jax.Array, weight: jax.Array, sizes: jax.Array) -> jax.Array:
    group, rows, used, place = _blocks(len(x), sizes)

    def product(block):
        return jax.lax.cond(
            block[2],
            lambda: x.at[block[1]].get(mode="fill", fill_value=0) @ weight[block[0]].T,
            lambda: jnp.zeros((BLOCK, weight.shape[1]), x.dtype),
        )

    return jax.lax.map(product, (group, rows, used)).reshape(-1, weight.shape[1])[place]


def _blocks(count: int, sizes: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """For each block its group, its rows `[BLOCK]` (`count` where there is none) and whether it has any; and for each
    row where it lies in the blocks, laid end to end."""
    blocks_of = -(-sizes // BLOCK)
    last_block, last_row = jnp.cumsum(blocks_of), jnp.cumsum(sizes)
    block = jnp.arange(count // BLOCK + len(sizes))
    group = jnp.minimum(jnp.searchsorted(last_block, block, side="right"), len(sizes) - 1)
    first_block, first_row = last_block - blocks_of, last_row - sizes
    rows = (first_row[group] + (block - first_block[group]) * BLOCK)[:, None] + jnp.arange(BLOCK)
    used = block < last_block[-1]
    rows = jnp.where((rows < last_row[group][:, None]) & used[:, None], rows, count)
    of_row = jnp.searchsorted(last_row, jnp.arange(count), side="right")
    return group, rows, used, first_block[of_row] * BLOCK + jnp.arange(count) - first_row[of_row]


def _forward(x, weight, sizes):
    return _products(x, weight, sizes), (x, weight, sizes)


def _backward(saved, gradient):
    x, weight, sizes = saved
    group, rows, used, _ = _blocks(len(x), sizes)

    def add(total, block):
        here, at, any_row = block
        x_block, g_block = (y.at[at].get(mode="fill", fill_value=0) for y in (x, gradient))
        return jax.lax.cond(any_row, lambda t: t.at[here].add(g_block.T @ x_block), lambda t: t, total), None

    to_weight, _ = jax.lax.scan(add, jnp.zeros_like(weight), (group, rows, used))
    return _products(gradient, weight.swapaxes(1, 2), sizes), to_weight, None


_blockwise.defvjp(_forward, _backward)
