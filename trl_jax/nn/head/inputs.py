"""The inputs of a language model's head, before it makes logits of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class HeadInputs:
    """Logits `[N, V]` are `softcap * tanh((hidden @ weight.T + bias) * scale / softcap)`.

    hidden: `[N, D]`, of the tokens that are read. weight: `[V, D]`. bias: `[V]` or None.
    scale, softcap: numbers; a softcap of None does nothing.
    """

    hidden: jax.Array
    weight: jax.Array
    bias: Any = None
    scale: float = field(default=1.0, metadata={"static": True})
    softcap: float | None = field(default=None, metadata={"static": True})
