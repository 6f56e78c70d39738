"""Every operation there is, by the name it has in a program."""

from __future__ import annotations

from trl_jax.nn.aten import indexing, numbers, pointwise, products, recurrences, reductions, rng, shapes

RANDOM = rng.OPERATIONS  # these want a `key` beside their arguments
OPERATIONS = (
    pointwise.OPERATIONS
    | shapes.OPERATIONS
    | indexing.OPERATIONS
    | reductions.OPERATIONS
    | recurrences.OPERATIONS
    | products.OPERATIONS
    | numbers.OPERATIONS
    | rng.OPERATIONS
)
