"""Rows of texts, and every form of packed rows, for layers that process each text from its first token."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from compat_tests.nn import test_branch_attention as branches
from compat_tests.nn import test_packed_attention as pairs
from trl_jax.core.outputs import BLOCK, Packed
from trl_jax.nn.text_order import TextOrder, text_order

BEFORE = 3  # preceding tokens that convolutions see


def plain(length):
    """One text per row."""
    return None, [(row, np.arange(length)) for row in range(2)], length, length


def of_pairs():
    """Two answers to a prompt, which is stored once before them."""
    length, longest = 6 * BLOCK, 3 * BLOCK
    packed, positions, who = pairs.drawn(0, length, 2, longest=80)
    rows = enumerate(pairs.as_rows(positions, who, length).places)
    return packed, [(row, at[at < length]) for row, texts in rows for at in texts if at[0] < length], length, longest


def of_branches():
    """Any number of answers to a shared context."""
    packed, texts = branches.laid_out()
    return packed, texts, branches.LENGTH, branches.LONGEST


def end_to_end():
    """Texts without shared parts; the row's end is padding."""
    length, ends = 3 * BLOCK, [5, 64, 70, 150]
    first, end = (np.full((1, length), length, np.int32) for _ in "fe")
    texts = [np.arange(*pair) for pair in zip([0, *ends], ends, strict=False)]
    for at in texts:
        first[0, at], end[0, at] = at[0], at + 1
    return Packed(first, end, np.ones_like(first)), [(0, at) for at in texts], length, length


# (packed rows or None, texts as (row, positions), tokens of a row, tokens of the longest text).
LAYOUTS = {
    "a short row": lambda: plain(10), "rows": lambda: plain(150), "end to end": end_to_end, "pairs": of_pairs,
    "branches": of_branches,
}  # fmt: skip


_ordered = jax.jit(partial(text_order, count=BEFORE))


def order_of(packed: Packed | None) -> TextOrder | None:
    return None if packed is None else _ordered(jax.tree.map(jnp.asarray, packed._replace(texts=None)))
