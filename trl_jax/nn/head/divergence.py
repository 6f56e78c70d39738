"""How far two language models' distributions over the next token are apart, at the places that are read.

A chunk of places at a time: neither model's logits are ever an array `[N, V]`. The backward pass makes a chunk's
logits again; the gradient is the student's alone.
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from trl_jax.core.token_outputs import Divergences
from trl_jax.nn.head.chunks import Head, Yes, chunk_rows, column, differentiated, gradients
from trl_jax.nn.head.inputs import HeadInputs


def divergences(
    student: HeadInputs, teacher: HeadInputs, targets: jax.Array, *, beta: float, temperature: float = 1.0
) -> Divergences:
    r"""The generalised Jensen-Shannon divergence of two models at N places, and the student's entropy.

    With $p_s$ and $p_t$ the softmaxes of logits over the temperature and $m = (1 - \beta) p_s + \beta p_t$ it is
    $\beta\, KL(p_t \| m) + (1 - \beta)\, KL(p_s \| m)$; at $\beta = 0$ the forward $KL(p_t \| p_s)$, at $\beta = 1$ the
    reverse $KL(p_s \| p_t)$, its limits over $\beta$ and over $1 - \beta$ (Agarwal et al. 2023, arXiv:2306.13649,
    section 2). In nats, float32, of products that are summed in float32.

    Args:
        student, teacher: hidden states `[N, D]` and heads, of any widths, over the same vocabulary.
        targets: int32 `[N]`; below 0, a place does not count, and such places come last: theirs are zeros.
        beta: from 0 to 1.
    """
    places, rows = len(targets), chunk_rows(len(targets), len(student.weight))
    filled = -places % rows

    def padded(inputs: HeadInputs) -> tuple[Head, tuple]:
        head = Head(rows, inputs.scale, inputs.softcap, float(temperature), rounds=False)
        return head, (jnp.pad(inputs.hidden, ((0, filled), (0, 0))), inputs.weight, inputs.bias)

    (own, arrays), (other, beside) = padded(student), padded(jax.lax.stop_gradient(teacher))
    compared = _Compared(own, other, float(beta))
    found = _divergences(compared, *arrays, beside, jnp.pad(targets, (0, filled), constant_values=-1))
    return Divergences(*(values[:places] for values in found))


class _Compared(NamedTuple):
    """Two heads and the divergence of what they make of a chunk."""

    student: Head
    teacher: Head
    beta: float

    def log_probs(self, chunk: jax.Array, z: jax.Array, teacher: tuple) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Of a chunk the logarithms `[rows, V]` of the student's probabilities, of its logits `z`, of the teacher's,
        and of those that the student's are compared with."""
        hidden, weight, bias = teacher
        weight, bias = jax.tree.map(lambda array: array.astype(hidden.dtype), (weight, bias))
        own = jax.nn.log_softmax(z)
        other = jax.nn.log_softmax(self.teacher.logits(self.teacher.take(chunk, hidden), weight, bias))
        if self.beta in (0.0, 1.0):
            return own, other, other
        return own, other, jnp.logaddexp(own + math.log(1 - self.beta), other + math.log(self.beta))

    def divergence(self, own: jax.Array, other: jax.Array, mixed: jax.Array) -> jax.Array:
        """Of each row, of what `log_probs` gives."""
        if self.beta == 0.0:
            return _mean(other, other - own)
        if self.beta == 1.0:
            return _mean(own, own - other)
        return self.beta * _mean(other, other - mixed) + (1 - self.beta) * _mean(own, own - mixed)

    def d_logits(self, own: jax.Array, other: jax.Array, mixed: jax.Array) -> jax.Array:
        """The derivative of each row's divergence by the student's logits, `[rows, V]`."""
        p = jnp.exp(own)
        if self.beta == 0.0:
            return p - jnp.exp(other)
        part = 1.0 if self.beta == 1.0 else 1 - self.beta
        return part * p * (own - mixed - _mean(own, own - mixed)[:, None])


def _mean(log_p: jax.Array, values: jax.Array) -> jax.Array:
    """The mean of values over each row's distribution."""
    return jnp.sum(jnp.exp(log_p) * values, axis=-1)


class _Saved(NamedTuple):
    """The forward pass's for the backward."""

    arrays: tuple[jax.Array, jax.Array, jax.Array | None]
    teacher: tuple[jax.Array, jax.Array, jax.Array | None]
    targets: jax.Array
    asked: tuple[Yes | None, ...]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _divergences(compared, hidden, weight, bias, teacher, targets):
    head = compared.student
    weight, bias = jax.tree.map(lambda array: array.astype(hidden.dtype), (weight, bias))

    def compute(chunk, found):
        z = head.logits(head.take(chunk, hidden), weight, bias)
        own, other, mixed = compared.log_probs(chunk, z, teacher)
        values = compared.divergence(own, other, mixed), -_mean(own, own)
        counts = head.take(chunk, targets) >= 0
        return tuple(head.put(chunk, a, jnp.where(counts, b, 0)) for a, b in zip(found, values, strict=True))

    zeros = jnp.zeros(len(targets), jnp.float32)
    return jax.lax.fori_loop(0, head.chunks(targets), compute, (zeros, zeros))


def _forward(compared, *primals):
    hidden, weight, bias, teacher, targets = jax.tree.map(lambda primal: primal.value, primals)
    saved = _Saved((hidden, weight, bias), teacher, targets, differentiated(primals[:3]))
    return _divergences(compared, hidden, weight, bias, teacher, targets), saved


def _backward(compared, saved, cotangents):
    head, targets = compared.student, saved.targets
    of_divergence = column(targets, cotangents[0])  # the entropy is a metric, without gradient

    def d_logits(chunk, z):
        return compared.d_logits(*compared.log_probs(chunk, z, saved.teacher)) * head.take(chunk, of_divergence)

    return *gradients(head, saved.arrays, saved.asked, head.chunks(targets), d_logits), None, None


_divergences.defvjp(_forward, _backward, symbolic_zeros=True)
