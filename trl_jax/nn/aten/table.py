"""Every operation there is, by the name it has in a program."""

from __future__ import annotations

from trl_jax.nn.aten import chance, indexing, numbers, pointwise, products, reductions, shapes

RANDOM = chance.OPERATIONS  # these want a `key` beside their arguments
OPERATIONS = (
    pointwise.OPERATIONS
    | shapes.OPERATIONS
    | indexing.OPERATIONS
    | reductions.OPERATIONS
    | products.OPERATIONS
    | numbers.OPERATIONS
    | chance.OPERATIONS
)
