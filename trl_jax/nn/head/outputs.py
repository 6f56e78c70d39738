"""Numbers of a language model's head about the ids that follow, at the places that are read: never an array `[N, V]`.

The backward pass makes a chunk's logits again, from the logarithm of the softmax's sum; under a frozen weight it need
not: the forward pass keeps the derivatives of log-probabilities by hidden states, `[N, D]`. Chunks of which no place
has a target are not computed.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from trl_jax.core.token_outputs import TokenOutputs
from trl_jax.nn.head.chunks import Head, Yes, chunk_rows, column, differentiated, divided, gradients, product


def token_outputs(
    hidden: jax.Array,
    weight: jax.Array,
    targets: jax.Array,
    *,
    bias: jax.Array | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
) -> TokenOutputs:
    """Outputs `[N]` of hidden states `[N, D]` under a weight `[V, D]` and a bias `[V]`, float32.

    Logits are `z = softcap * tanh((hidden @ weight.T + bias) * scale / softcap) / temperature`, and all outputs are of
    their softmax. The product and the bias are of hidden's dtype, what follows is float32. `targets` `[N]` are ids;
    below 0, a place has none, and such places come last: their outputs are zeros. What takes no part in
    differentiation, as a frozen weight, gets no gradient computed.
    """
    places, rows = len(targets), chunk_rows(len(targets), len(weight))
    filled = -places % rows
    head = Head(rows, float(scale), None if softcap is None else float(softcap), float(temperature))
    hidden, targets = jnp.pad(hidden, ((0, filled), (0, 0))), jnp.pad(targets, (0, filled), constant_values=-1)
    outputs = TokenOutputs(*(output[:places] for output in _outputs(head, hidden, weight, bias, targets)))
    mean_logits, squares = jax.lax.stop_gradient((outputs.mean_logits, outputs.log_sum_sq_probs))
    return outputs._replace(mean_logits=mean_logits, log_sum_sq_probs=squares)


class _Saved(NamedTuple):
    """The forward pass's for the backward. `differentiated`: of hidden, weight and bias, those with a gradient."""

    arrays: tuple[jax.Array, jax.Array, jax.Array | None, jax.Array]
    entropy: jax.Array
    log_sum: jax.Array
    chunks: jax.Array
    d_hidden: jax.Array | None
    differentiated: tuple[Yes | None, ...]


def _forward(head, hidden, weight, bias, targets, with_d_hidden=False):
    """TokenOutputs, the logarithms of the softmax's sums `[N]`, the number of chunks; the derivatives `[N, D]` of
    log-probabilities by hidden states, if they are asked for."""
    weight, bias = jax.tree.map(lambda array: array.astype(hidden.dtype), (weight, bias))
    ids, chunks = jnp.arange(len(weight)), head.chunks(targets)

    def compute(chunk, carried):
        outputs, d_hidden = carried
        target, z = head.take(chunk, targets), head.logits(head.take(chunk, hidden), weight, bias)
        at_target = ids == target[:, None]
        largest = jnp.max(z, axis=1)
        weights = jnp.exp(z - largest[:, None])
        total = jnp.sum(weights, axis=1)
        log_sum = largest + jnp.log(total)
        first = jnp.min(jnp.where(z == largest[:, None], ids, len(ids)), axis=1)
        logps = _picked(z, target, at_target) - log_sum
        entropy = log_sum - jnp.sum(weights * z, axis=1) / total
        mean, squares = jnp.mean(z, axis=1), jnp.log(jnp.sum(jnp.square(weights), axis=1)) - 2 * jnp.log(total)
        found = logps, entropy, mean - log_sum, first == target, mean, squares
        found = (*(jnp.where(target >= 0, output, 0) for output in found), log_sum)
        if d_hidden is not None:
            d_z = head.d_products(at_target - weights / total[:, None], z).astype(hidden.dtype)
            d_hidden = head.put(chunk, d_hidden, product("nv,vd->nd", d_z, weight))
        return tuple(head.put(chunk, array, rows) for array, rows in zip(outputs, found, strict=True)), d_hidden

    zeros, d_hidden = jnp.zeros(len(targets), jnp.float32), jnp.zeros_like(hidden) if with_d_hidden else None
    (*outputs, log_sum), d_hidden = jax.lax.fori_loop(0, chunks, compute, ((zeros,) * 7, d_hidden))
    return TokenOutputs(*outputs), log_sum, chunks, d_hidden


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _outputs(head, hidden, weight, bias, targets):
    return _forward(head, hidden, weight, bias, targets)[0]


def _outputs_forward(head, *primals):
    arrays, asked = jax.tree.map(lambda primal: primal.value, primals), differentiated(primals[:3])
    # Of a frozen weight nothing but the hidden states' gradient is wanted: a row is its derivative times a cotangent.
    outputs, *saved = _forward(head, *arrays, with_d_hidden=asked == (Yes(), None, None))
    return outputs, _Saved(arrays, outputs.entropy, *saved, asked)


def _outputs_backward(head, saved, cotangents):
    *arrays, targets = saved.arrays
    no_others = isinstance(cotangents.entropy, SymbolicZero) and isinstance(cotangents.mean_logps, SymbolicZero)
    if saved.d_hidden is not None and no_others:
        of_logps = column(targets, cotangents.logps)
        return (saved.d_hidden * of_logps).astype(arrays[0].dtype), None, None, None
    d_logits = partial(_d_logits, head, saved=saved, cotangents=cotangents)
    return *gradients(head, tuple(arrays), saved.differentiated, saved.chunks, d_logits), None


def _d_logits(head, chunk, z, saved, cotangents):
    """The gradient `[rows, V]` of the chunk's logits, zeros where there is no target."""
    target = head.take(chunk, saved.arrays[3])
    columns = [column(saved.arrays[3], cotangent) for cotangent in cotangents[:3]]
    of_logps, of_entropy, of_mean = (head.take(chunk, one) for one in columns)
    log_p = z - head.take(chunk, saved.log_sum)[:, None]
    of_p = of_logps + of_mean
    if not isinstance(cotangents.entropy, SymbolicZero):
        of_p = of_p + of_entropy * (log_p + head.take(chunk, saved.entropy)[:, None])
    at_target = jnp.arange(z.shape[1]) == target[:, None]
    return jnp.where(at_target, of_logps, 0) + of_mean / z.shape[1] - jnp.exp(log_p) * of_p


def _picked(z, target, at_target):
    """The logits of the targets, `[rows]`, whatever where there is none."""
    if divided():
        return jnp.sum(jnp.where(at_target, z, 0), axis=1)
    return jnp.take_along_axis(z, jnp.maximum(target, 0)[:, None], axis=1)[:, 0]


_outputs.defvjp(_outputs_forward, _outputs_backward, symbolic_zeros=True)
