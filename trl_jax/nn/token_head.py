"""Outputs of a language model's head at the places that are read."""

from __future__ import annotations

import jax

from trl_jax.core.token_outputs import TokenOutputs
from trl_jax.nn.token_logits import head_logits, outputs_of_logits


def token_outputs(
    hidden: jax.Array,
    weight: jax.Array,
    targets: jax.Array,
    *,
    bias: jax.Array | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
) -> TokenOutputs:
    """The outputs for `targets` `[N]`, -1 where there is none, of hidden states `[N, D]` under a head `[V, D]`."""
    return outputs_of_logits(head_logits(hidden, weight, bias=bias, scale=scale, softcap=softcap), targets)
