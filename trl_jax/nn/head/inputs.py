"""The inputs of a language model's head, before it makes logits of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

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


class Distributions(NamedTuple):
    """Those of two models over the next token, at the same N places.

    model, reference: what their heads make logits of. targets: int32 `[N]`, the id that each place predicts, -1 for
    none.
    """

    model: HeadInputs
    reference: HeadInputs
    targets: jax.Array
