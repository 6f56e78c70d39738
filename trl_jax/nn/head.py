"""Language model heads: log-probabilities, entropies and divergences, computed in chunks without an `[N, V]` array."""

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
from trl_jax.mesh.mesh import platform

# Inputs of heads


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class HeadInputs:
    """Inputs of a language model head. Logits `[N, V]` are `softcap * tanh((hidden @ weight.T + bias) * scale /
    softcap)`.

    hidden: `[N, D]`, of the tokens that are read. weight: `[V, D]`. bias: `[V]` or None.
    scale, softcap: numbers; None for no softcap.
    """

    hidden: jax.Array
    weight: jax.Array
    bias: Any = None
    scale: float = field(default=1.0, metadata={"static": True})
    softcap: float | None = field(default=None, metadata={"static": True})


class Distributions(NamedTuple):
    """Head inputs of two models at the same N reads.

    targets: int32 `[N]`, the id that each read predicts, -1 for none.
    """

    model: HeadInputs
    reference: HeadInputs
    targets: jax.Array


# Log-probabilities and entropies of targets


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
    """Outputs `[N]` for hidden states `[N, D]`, a weight `[V, D]` and a bias `[V]`, float32.

    Logits are `z = softcap * tanh((hidden @ weight.T + bias) * scale / softcap) / temperature`; all outputs refer to
    their softmax distribution. The matrix product and bias are in the dtype of `hidden`, the rest is float32. `targets`
    `[N]` are ids, negative for reads without a target, which must come last and get zeros. No gradient is computed for
    inputs that are not differentiated, such as a frozen weight.
    """
    places, rows = len(targets), chunk_rows(len(targets), len(weight))
    filled = -places % rows
    head = Head(rows, float(scale), None if softcap is None else float(softcap), float(temperature))
    hidden, targets = jnp.pad(hidden, ((0, filled), (0, 0))), jnp.pad(targets, (0, filled), constant_values=-1)
    outputs = TokenOutputs(*(output[:places] for output in _outputs(head, hidden, weight, bias, targets)))
    mean_logits, squares = jax.lax.stop_gradient((outputs.mean_logits, outputs.log_sum_sq_probs))
    return outputs._replace(mean_logits=mean_logits, log_sum_sq_probs=squares)


class _Saved(NamedTuple):
    """What the backward pass needs. differentiated: which of hidden, weight and bias need a gradient."""

    arrays: tuple[jax.Array, jax.Array, jax.Array | None, jax.Array]
    entropy: jax.Array
    log_sum: jax.Array
    chunks: jax.Array
    d_hidden: jax.Array | None
    differentiated: tuple[Perturbed | None, ...]


def _token_outputs(head, hidden, weight, bias, targets, with_d_hidden=False):
    """TokenOutputs, log-sum-exp `[N]`, number of chunks, and on request the derivatives `[N, D]` of log-probabilities
    with respect to hidden states."""
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
        logps = _target_logits(z, target, at_target) - log_sum
        entropy = log_sum - jnp.sum(weights * z, axis=1) / total
        mean, squares = jnp.mean(z, axis=1), jnp.log(jnp.sum(jnp.square(weights), axis=1)) - 2 * jnp.log(total)
        found = logps, entropy, mean - log_sum, first == target, mean, squares
        found = (*(jnp.where(target >= 0, output, 0) for output in found), log_sum)
        if d_hidden is not None:
            d_z = head.d_products(at_target - weights / total[:, None], z).astype(hidden.dtype)
            d_hidden = head.put(chunk, d_hidden, einsum_f32("nv,vd->nd", d_z, weight))
        return tuple(head.put(chunk, array, rows) for array, rows in zip(outputs, found, strict=True)), d_hidden

    zeros, d_hidden = jnp.zeros(len(targets), jnp.float32), jnp.zeros_like(hidden) if with_d_hidden else None
    (*outputs, log_sum), d_hidden = jax.lax.fori_loop(0, chunks, compute, ((zeros,) * 7, d_hidden))
    return TokenOutputs(*outputs), log_sum, chunks, d_hidden


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _outputs(head, hidden, weight, bias, targets):
    return _token_outputs(head, hidden, weight, bias, targets)[0]


def _outputs_forward(head, *primals):
    arrays, perturbed = jax.tree.map(lambda primal: primal.value, primals), differentiated(primals[:3])
    # With a frozen weight, only hidden states need a gradient: the derivative saved here, times a cotangent per row.
    outputs, *saved = _token_outputs(head, *arrays, with_d_hidden=perturbed == (Perturbed(), None, None))
    return outputs, _Saved(arrays, outputs.entropy, *saved, perturbed)


def _outputs_backward(head, saved, cotangents):
    *arrays, targets = saved.arrays
    no_others = isinstance(cotangents.entropy, SymbolicZero) and isinstance(cotangents.mean_logps, SymbolicZero)
    if saved.d_hidden is not None and no_others:
        of_logps = column(targets, cotangents.logps)
        return (saved.d_hidden * of_logps).astype(arrays[0].dtype), None, None, None
    d_logits = partial(_d_logits, head, saved=saved, cotangents=cotangents)
    return *gradients(head, tuple(arrays), saved.differentiated, saved.chunks, d_logits), None


def _d_logits(head, chunk, z, saved, cotangents):
    """Gradient `[rows, V]` of the chunk's logits; zero in rows without a target."""
    target = head.take(chunk, saved.arrays[3])
    columns = [column(saved.arrays[3], cotangent) for cotangent in cotangents[:3]]
    of_logps, of_entropy, of_mean = (head.take(chunk, one) for one in columns)
    log_p = z - head.take(chunk, saved.log_sum)[:, None]
    of_p = of_logps + of_mean
    if not isinstance(cotangents.entropy, SymbolicZero):
        of_p = of_p + of_entropy * (log_p + head.take(chunk, saved.entropy)[:, None])
    at_target = jnp.arange(z.shape[1]) == target[:, None]
    return jnp.where(at_target, of_logps, 0) + of_mean / z.shape[1] - jnp.exp(log_p) * of_p


def _target_logits(z, target, at_target):
    """Logits of the targets, `[rows]`; arbitrary in rows without a target."""
    if divided():
        return jnp.sum(jnp.where(at_target, z, 0), axis=1)
    return jnp.take_along_axis(z, jnp.maximum(target, 0)[:, None], axis=1)[:, 0]


_outputs.defvjp(_outputs_forward, _outputs_backward, symbolic_zeros=True)


# Divergence between two models


def divergences(
    student: HeadInputs, teacher: HeadInputs, targets: jax.Array, *, beta: float, temperature: float = 1.0
) -> Divergences:
    r"""Generalized Jensen-Shannon divergence of two models at N reads, and the student's entropy.

    With $p_s$ and $p_t$ the softmax distributions at the temperature and $m = (1 - \beta) p_s + \beta p_t$, it is
    $\beta\, KL(p_t \| m) + (1 - \beta)\, KL(p_s \| m)$. At $\beta = 0$ it is the forward $KL(p_t \| p_s)$ and at
    $\beta = 1$ the reverse $KL(p_s \| p_t)$, the limits after division by $\beta$ and $1 - \beta$ (Agarwal et al. 2023,
    arXiv:2306.13649, section 2). In nats, float32, from products that are summed in float32.

    Args:
        student, teacher: hidden states `[N, D]` and heads over the same vocabulary; widths may differ.
        targets: int32 `[N]`; negative for reads to ignore, which must come last and get zeros.
        beta: from 0 to 1.
    """
    places, rows = len(targets), chunk_rows(len(targets), len(student.weight))
    filled = -places % rows

    def padded(inputs: HeadInputs) -> tuple[Head, tuple]:
        head = Head(rows, inputs.scale, inputs.softcap, float(temperature), rounds=False)
        return head, (jnp.pad(inputs.hidden, ((0, filled), (0, 0))), inputs.weight, inputs.bias)

    (own, arrays), (other, teacher_arrays) = padded(student), padded(jax.lax.stop_gradient(teacher))
    compared = _Comparison(own, other, float(beta))
    found = _divergences(compared, *arrays, teacher_arrays, jnp.pad(targets, (0, filled), constant_values=-1))
    return Divergences(*(values[:places] for values in found))


class _Comparison(NamedTuple):
    """Two heads, and the divergence between their distributions for a chunk."""

    student: Head
    teacher: Head
    beta: float

    def log_probs(self, chunk: jax.Array, z: jax.Array, teacher: tuple) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Log-probabilities `[rows, V]` of a chunk: of the student (from its logits `z`), of the teacher, and of the
        distribution to compare with."""
        hidden, weight, bias = teacher
        weight, bias = jax.tree.map(lambda array: array.astype(hidden.dtype), (weight, bias))
        own = jax.nn.log_softmax(z)
        other = jax.nn.log_softmax(self.teacher.logits(self.teacher.take(chunk, hidden), weight, bias))
        if self.beta in (0.0, 1.0):
            return own, other, other
        return own, other, jnp.logaddexp(own + math.log(1 - self.beta), other + math.log(self.beta))

    def divergence(self, own: jax.Array, other: jax.Array, mixed: jax.Array) -> jax.Array:
        """The divergence of each row, from the results of `log_probs`."""
        if self.beta == 0.0:
            return _expectation(other, other - own)
        if self.beta == 1.0:
            return _expectation(own, own - other)
        return self.beta * _expectation(other, other - mixed) + (1 - self.beta) * _expectation(own, own - mixed)

    def d_logits(self, own: jax.Array, other: jax.Array, mixed: jax.Array) -> jax.Array:
        """Derivative of each row's divergence with respect to the student's logits, `[rows, V]`."""
        p = jnp.exp(own)
        if self.beta == 0.0:
            return p - jnp.exp(other)
        part = 1.0 if self.beta == 1.0 else 1 - self.beta
        return part * p * (own - mixed - _expectation(own, own - mixed)[:, None])


def _expectation(log_p: jax.Array, values: jax.Array) -> jax.Array:
    """Expectation of values under each row's distribution."""
    return jnp.sum(jnp.exp(log_p) * values, axis=-1)


class _DivergenceSaved(NamedTuple):
    """What the backward pass needs."""

    arrays: tuple[jax.Array, jax.Array, jax.Array | None]
    teacher: tuple[jax.Array, jax.Array, jax.Array | None]
    targets: jax.Array
    perturbed: tuple[Perturbed | None, ...]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _divergences(compared, hidden, weight, bias, teacher, targets):
    head = compared.student
    weight, bias = jax.tree.map(lambda array: array.astype(hidden.dtype), (weight, bias))

    def compute(chunk, found):
        z = head.logits(head.take(chunk, hidden), weight, bias)
        own, other, mixed = compared.log_probs(chunk, z, teacher)
        values = compared.divergence(own, other, mixed), -_expectation(own, own)
        counts = head.take(chunk, targets) >= 0
        return tuple(head.put(chunk, a, jnp.where(counts, b, 0)) for a, b in zip(found, values, strict=True))

    zeros = jnp.zeros(len(targets), jnp.float32)
    return jax.lax.fori_loop(0, head.chunks(targets), compute, (zeros, zeros))


def _divergences_forward(compared, *primals):
    hidden, weight, bias, teacher, targets = jax.tree.map(lambda primal: primal.value, primals)
    saved = _DivergenceSaved((hidden, weight, bias), teacher, targets, differentiated(primals[:3]))
    return _divergences(compared, hidden, weight, bias, teacher, targets), saved


def _divergences_backward(compared, saved, cotangents):
    head, targets = compared.student, saved.targets
    of_divergence = column(targets, cotangents[0])  # the entropy is a metric and has no gradient

    def d_logits(chunk, z):
        return compared.d_logits(*compared.log_probs(chunk, z, saved.teacher)) * head.take(chunk, of_divergence)

    return *gradients(head, saved.arrays, saved.perturbed, head.chunks(targets), d_logits), None, None


_divergences.defvjp(_divergences_forward, _divergences_backward, symbolic_zeros=True)


# Chunks

# Logits per chunk, and minimum rows per chunk. The weight's gradient is read and written once per chunk, so a chunk
# needs enough rows to amortize that, and more rows on devices with fast matrix products. CPUs are faster, and allocate
# less memory, if the logits fit into their caches.
LOGITS_PER_CHUNK = {"cpu": 3 << 19, "gpu": 1 << 27, "tpu": 1 << 27}
MIN_ROWS_PER_CHUNK = {"cpu": 192, "gpu": 256, "tpu": 256}
_MULTIPLE = 64
einsum_f32 = partial(jnp.einsum, preferred_element_type=jnp.float32)


def chunk_rows(places: int, vocabulary: int) -> int:
    """Rows per chunk, given the number of reads."""
    rows = LOGITS_PER_CHUNK[platform()] // vocabulary // _MULTIPLE * _MULTIPLE
    return max(1, min(places, max(MIN_ROWS_PER_CHUNK[platform()], rows)))


def divided() -> bool:
    """Whether the compiler partitions products over the devices of a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    return any(mesh.shape[axis] > 1 for axis in mesh.auto_axes)


@dataclass(frozen=True)
class Head:
    """Computes chunks of logits: `softcap * tanh(product * scale / softcap) / temperature`.

    rounds: whether the product is rounded to the dtype of the hidden states, as a linear layer would.
    """

    rows: int
    scale: float
    softcap: float | None
    temperature: float
    rounds: bool = True

    def logits(self, hidden: jax.Array, weight: jax.Array, bias: jax.Array | None) -> jax.Array:
        """Logits `[rows, V]`, float32; `weight` and `bias` have the dtype of `hidden`."""
        if self.rounds:
            z = rounded(jnp.einsum("nd,vd->nv", hidden, weight), hidden.dtype)
            z = z if bias is None else rounded(z + bias, hidden.dtype)
        else:
            z = einsum_f32("nd,vd->nv", hidden, weight)
            z = z if bias is None else z + bias
        z = z * self.scale
        return tempered(z if self.softcap is None else self.softcap * jnp.tanh(z / self.softcap), self.temperature)

    def d_products(self, d_z: jax.Array, z: jax.Array) -> jax.Array:
        """Gradient of the product, from the gradient of the logits."""
        slope = 1.0 if self.softcap is None else 1 - jnp.square(z * self.temperature / self.softcap)
        return d_z * slope * (self.scale / self.temperature)

    def chunks(self, targets: jax.Array) -> jax.Array:
        """The number of chunks that contain a target.

        Inside a shard_map over the batch, each device may have its own number. If the compiler also partitions
        products, devices communicate in every chunk, so all of them run the maximum over devices: they would wait for
        the longest loop anyway, and not every platform supports communication in loops of different lengths.
        """
        count = (jnp.sum(targets >= 0, dtype=jnp.int32) + self.rows - 1) // self.rows
        axes = jax.sharding.get_abstract_mesh().manual_axes
        return jax.lax.pmax(count, axes) if axes and divided() else count

    def take(self, chunk: jax.Array, array: jax.Array) -> jax.Array:
        """Read the rows of a chunk."""
        return jax.lax.dynamic_slice_in_dim(array, chunk * self.rows, self.rows)

    def put(self, chunk: jax.Array, array: jax.Array, rows: jax.Array) -> jax.Array:
        """Write the rows of a chunk."""
        return jax.lax.dynamic_update_slice_in_dim(array, rows.astype(array.dtype), chunk * self.rows, 0)


class Perturbed(NamedTuple):
    """True, as a pytree without arrays: residuals of a custom_vjp cannot contain a bool."""


def differentiated(primals: Sequence) -> tuple[Perturbed | None, ...]:
    """Which of hidden states, weight and bias need a gradient, given the primals of a custom_vjp with symbolic
    zeros."""
    return tuple(Perturbed() if primal is not None and primal.perturbed else None for primal in primals)


def gradients(
    head: Head,
    arrays: tuple[jax.Array, jax.Array, jax.Array | None],
    perturbed: Sequence[Perturbed | None],
    chunks: jax.Array,
    d_logits: Callable[[jax.Array, jax.Array], jax.Array],
) -> tuple[jax.Array | None, ...]:
    """Gradients of hidden states, weight and bias; None for those not in `perturbed`.

    Args:
        d_logits: (chunk, its logits) -> their gradient `[rows, V]`, zero in rows without a target.
    """
    hidden, weight, bias = arrays
    cast_weight, cast_bias = jax.tree.map(lambda array: array.astype(hidden.dtype), (weight, bias))

    def add(chunk, found):
        d_hidden, d_weight, d_bias = found
        hidden_rows = head.take(chunk, hidden)
        z = head.logits(hidden_rows, cast_weight, cast_bias)
        d_z = head.d_products(d_logits(chunk, z), z).astype(hidden.dtype)
        if d_hidden is not None:
            d_hidden = head.put(chunk, d_hidden, einsum_f32("nv,vd->nd", d_z, cast_weight))
        if d_weight is not None:
            d_weight += einsum_f32("nv,nd->vd", d_z, hidden_rows)
        if d_bias is not None:
            d_bias += jnp.sum(d_z, axis=0, dtype=jnp.float32)
        return d_hidden, d_weight, d_bias

    kinds = hidden.dtype, jnp.float32, jnp.float32
    zeros = tuple(
        None if one is None else jnp.zeros(array.shape, kind)
        for one, array, kind in zip(perturbed, arrays, kinds, strict=True)
    )
    d_hidden, d_weight, d_bias = jax.lax.fori_loop(0, chunks, add, zeros)
    return d_hidden, *(None if d is None else d.astype(a.dtype) for d, a in ((d_weight, weight), (d_bias, bias)))


def column(targets: jax.Array, cotangent: jax.Array | SymbolicZero) -> jax.Array:
    """Cotangents `[n, 1]`, zero in rows without a target."""
    if isinstance(cotangent, SymbolicZero):
        return jnp.zeros((len(targets), 1), jnp.float32)
    return jnp.where(targets >= 0, cotangent, 0)[:, None]


# Whole logits


def head_logits(
    hidden: jax.Array,
    weight: jax.Array,
    *,
    bias: jax.Array | None,
    scale: float,
    softcap: float | None,
    temperature: float = 1.0,
) -> jax.Array:
    """Logits `[N, V]`, float32, for hidden states `[N, D]` and a weight `[V, D]`; arguments as in `token_outputs`."""
    logits = rounded(jnp.einsum("nd,vd->nv", hidden, weight.astype(hidden.dtype)), hidden.dtype)
    if bias is not None:
        logits = rounded(logits + bias.astype(hidden.dtype), hidden.dtype)
    logits *= scale
    return tempered(logits if softcap is None else softcap * jnp.tanh(logits / softcap), temperature)


def tempered(logits: jax.Array, temperature: float) -> jax.Array:
    """Divide logits by a temperature, unless it is 1."""
    return logits if temperature == 1.0 else logits / temperature


def rounded(array: jax.Array, kind: jnp.dtype) -> jax.Array:
    """Round to the precision of `kind`, in float32. XLA may elide a cast to fewer bits and back, but not this."""
    if kind == jnp.float32:
        return array  # on CPUs, the no-op cast would be a pass over all logits
    bits = jnp.finfo(kind)
    return jax.lax.reduce_precision(array.astype(jnp.float32), bits.nexp, bits.nmant)


def outputs_of_logits(logits: jax.Array, targets: jax.Array) -> TokenOutputs:
    """The outputs `[N]` for `targets` `[N]`, -1 for none, given logits `[N, V]`."""
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
