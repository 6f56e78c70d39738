"""Logits over the vocabulary, all at once, and what a language model's head says of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from trl_jax.core.token_outputs import TokenOutputs


def head_logits(
    hidden: jax.Array,
    weight: jax.Array,
    *,
    bias: jax.Array | None,
    scale: float,
    softcap: float | None,
    temperature: float = 1.0,
) -> jax.Array:
    """Logits `[N, V]`, float32, of hidden states `[N, D]` under a head `[V, D]`; arguments as in `token_outputs`."""
    logits = rounded(jnp.einsum("nd,vd->nv", hidden, weight.astype(hidden.dtype)), hidden.dtype)
    if bias is not None:
        logits = rounded(logits + bias.astype(hidden.dtype), hidden.dtype)
    logits *= scale
    return tempered(logits if softcap is None else softcap * jnp.tanh(logits / softcap), temperature)


def tempered(logits: jax.Array, temperature: float) -> jax.Array:
    """Logits over a temperature; those over 1 are not divided."""
    return logits if temperature == 1.0 else logits / temperature


def rounded(array: jax.Array, kind: jnp.dtype) -> jax.Array:
    """Float32 of the numbers that `kind` has. XLA leaves out casts to fewer bits and back, but not this."""
    if kind == jnp.float32:
        return array  # on CPUs the cast that changes nothing is a pass over all logits
    bits = jnp.finfo(kind)
    return jax.lax.reduce_precision(array.astype(jnp.float32), bits.nexp, bits.nmant)


def outputs_of_logits(logits: jax.Array, targets: jax.Array) -> TokenOutputs:
    """The outputs `[N]` for `targets` `[N]`, -1 where there is none, of logits `[N, V]`."""
    logits = logits.astype(jnp.float32)
    logps, real = jax.nn.log_softmax(logits, axis=-1), targets >= 0
    found = (
        jnp.take_along_axis(logps, jnp.maximum(targets, 0)[:, None], axis=-1)[:, 0],
        -jnp.sum(jnp.exp(logps) * logps, axis=-1),
        jnp.mean(logps, axis=-1),
        (jnp.argmax(logits, axis=-1) == targets).astype(jnp.float32),
        jax.lax.stop_gradient(jnp.mean(logits, axis=-1)),
        jax.lax.stop_gradient(jax.nn.logsumexp(2 * logps, axis=-1)),
    )
    return TokenOutputs(*(jnp.where(real, values, 0) for values in found))
