"""The language model head: logits, log-probabilities, entropies and divergences, in chunks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from trl_jax.core.outputs import Divergences, TokenOutputs
from trl_jax.nn.platform import platform

# ----------------------------------------------------------------------------------------------------
# How far two language models' distributions over the next token are apart, at the places that are read.


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


class _DivergenceSaved(NamedTuple):
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


def _divergence_forward(compared, *primals):
    hidden, weight, bias, teacher, targets = jax.tree.map(lambda primal: primal.value, primals)
    saved = _DivergenceSaved((hidden, weight, bias), teacher, targets, differentiated(primals[:3]))
    return _divergences(compared, hidden, weight, bias, teacher, targets), saved


def _backward(compared, saved, cotangents):
    head, targets = compared.student, saved.targets
    of_divergence = column(targets, cotangents[0])  # the entropy is a metric, without gradient

    def d_logits(chunk, z):
        return compared.d_logits(*compared.log_probs(chunk, z, saved.teacher)) * head.take(chunk, of_divergence)

    return *gradients(head, saved.arrays, saved.asked, head.chunks(targets), d_logits), None, None


_divergences.defvjp(_divergence_forward, _backward, symbolic_zeros=True)


# ----------------------------------------------------------------------------------------------------
# Numbers of a language model's head about the ids that follow, at the places that are read: never an array `[N, V]`.


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


# ----------------------------------------------------------------------------------------------------
# A language model's head taken a chunk of hidden states at a time, so that there is never an array `[N, V]`.


# Numbers of a chunk, and the fewest rows: the weight's gradient is read and written once a chunk, which has to have
# rows enough to outweigh that, and more of them where products are quick. A CPU is faster with numbers that its caches
# hold, and asks the system for less memory.
LOGITS = {"cpu": 3 << 19, "gpu": 1 << 27, "tpu": 1 << 27}
FEWEST = {"cpu": 192, "gpu": 256, "tpu": 256}
_MULTIPLE = 64
product = partial(jnp.einsum, preferred_element_type=jnp.float32)


def chunk_rows(places: int, vocabulary: int) -> int:
    """The rows of a chunk, of so many places that are read."""
    rows = LOGITS[platform()] // vocabulary // _MULTIPLE * _MULTIPLE
    return max(1, min(places, max(FEWEST[platform()], rows)))


def divided() -> bool:
    """Whether the compiler divides products over the devices of a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    return any(mesh.shape[axis] > 1 for axis in mesh.auto_axes)


@dataclass(frozen=True)
class Head:
    """Rows of a chunk, and what becomes of the product: `softcap * tanh(product * scale / softcap) / temperature`.

    rounds: whether the product has no more bits than the hidden states, as where a layer gives it.
    """

    rows: int
    scale: float
    softcap: float | None
    temperature: float
    rounds: bool = True

    def logits(self, hidden: jax.Array, weight: jax.Array, bias: jax.Array | None) -> jax.Array:
        """Float32 `[rows, V]`; `weight` and `bias` are of hidden's dtype."""
        if self.rounds:
            z = rounded(jnp.einsum("nd,vd->nv", hidden, weight), hidden.dtype)
            z = z if bias is None else rounded(z + bias, hidden.dtype)
        else:
            z = product("nd,vd->nv", hidden, weight)
            z = z if bias is None else z + bias
        z = z * self.scale
        return tempered(z if self.softcap is None else self.softcap * jnp.tanh(z / self.softcap), self.temperature)

    def d_products(self, d_z: jax.Array, z: jax.Array) -> jax.Array:
        """The gradient of the product, of that of the logits."""
        slope = 1.0 if self.softcap is None else 1 - jnp.square(z * self.temperature / self.softcap)
        return d_z * slope * (self.scale / self.temperature)

    def chunks(self, targets: jax.Array) -> jax.Array:
        """How many chunks have a target.

        Written out for shards of the batch, each may have its own number. Where the compiler divides products as well,
        devices send to each other in every chunk, and all do as many as the longest, for which they would wait anyway:
        whether loops of different lengths may send is up to the platform.
        """
        count = (jnp.sum(targets >= 0, dtype=jnp.int32) + self.rows - 1) // self.rows
        axes = jax.sharding.get_abstract_mesh().manual_axes
        return jax.lax.pmax(count, axes) if axes and divided() else count

    def take(self, chunk: jax.Array, array: jax.Array) -> jax.Array:
        """The rows of a chunk."""
        return jax.lax.dynamic_slice_in_dim(array, chunk * self.rows, self.rows)

    def put(self, chunk: jax.Array, array: jax.Array, rows: jax.Array) -> jax.Array:
        """The array with the rows of a chunk in it."""
        return jax.lax.dynamic_update_slice_in_dim(array, rows.astype(array.dtype), chunk * self.rows, 0)


class Yes(NamedTuple):
    """A pytree without arrays: what is saved of a forward pass may not be a bool."""


def differentiated(primals: Sequence) -> tuple[Yes | None, ...]:
    """Of hidden states, weight and bias, as a custom_vjp with symbolic zeros gives them, those with a gradient."""
    return tuple(Yes() if primal is not None and primal.perturbed else None for primal in primals)


def gradients(
    head: Head,
    arrays: tuple[jax.Array, jax.Array, jax.Array | None],
    asked: Sequence[Yes | None],
    chunks: jax.Array,
    d_logits: Callable[[jax.Array, jax.Array], jax.Array],
) -> tuple[jax.Array | None, ...]:
    """The gradients of hidden states, weight and bias, of those that are asked for.

    Args:
        d_logits: (chunk, its logits) -> the gradient `[rows, V]` of these; zeros where there is no target.
    """
    hidden, weight, bias = arrays
    cast_weight, cast_bias = jax.tree.map(lambda array: array.astype(hidden.dtype), (weight, bias))

    def add(chunk, found):
        d_hidden, d_weight, d_bias = found
        hidden_rows = head.take(chunk, hidden)
        z = head.logits(hidden_rows, cast_weight, cast_bias)
        d_z = head.d_products(d_logits(chunk, z), z).astype(hidden.dtype)
        if d_hidden is not None:
            d_hidden = head.put(chunk, d_hidden, product("nv,vd->nd", d_z, cast_weight))
        if d_weight is not None:
            d_weight += product("nv,nd->vd", d_z, hidden_rows)
        if d_bias is not None:
            d_bias += jnp.sum(d_z, axis=0, dtype=jnp.float32)
        return d_hidden, d_weight, d_bias

    kinds = hidden.dtype, jnp.float32, jnp.float32
    zeros = tuple(
        None if one is None else jnp.zeros(array.shape, kind)
        for one, array, kind in zip(asked, arrays, kinds, strict=True)
    )
    d_hidden, d_weight, d_bias = jax.lax.fori_loop(0, chunks, add, zeros)
    return d_hidden, *(None if d is None else d.astype(a.dtype) for d, a in ((d_weight, weight), (d_bias, bias)))


def column(targets: jax.Array, cotangent: jax.Array | SymbolicZero) -> jax.Array:
    """Cotangents `[n, 1]`, without those of places that have no target."""
    if isinstance(cotangent, SymbolicZero):
        return jnp.zeros((len(targets), 1), jnp.float32)
    return jnp.where(targets >= 0, cotangent, 0)[:, None]


# ----------------------------------------------------------------------------------------------------
# The inputs of a language model's head, before it makes logits of them.


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


# ----------------------------------------------------------------------------------------------------
# Logits over the vocabulary, all at once, and what a language model's head says of them.


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
