"""Language model heads: log-probabilities, entropies and divergences, computed in chunks without an `[N, V]` array."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from trl_jax.core.outputs import Divergences, TokenOutputs
from trl_jax.mesh.mesh import platform

# Inputs of heads


class HeadArrays(NamedTuple):
    """The arrays of logits `[N, V]`, which are `hidden @ weight.T + inner @ outer.T + bias`.

    hidden: `[N, D]`, of the tokens that are read. weight: `[V, D]`. bias: `[V]` or None.
    inner, outer: `[N, r]` and `[V, r]`, what a LoRA adapter of the weight adds, or None. Kept apart from hidden and
        weight, because `[V, D + r]` would be a copy of the weight, with a gradient.
    """

    hidden: Any
    weight: Any
    bias: Any = None
    inner: Any = None
    outer: Any = None

    def cast(self) -> HeadArrays:
        """All arrays in the dtype of the hidden states."""
        return jax.tree.map(lambda array: array.astype(self.hidden.dtype), self)

    def padded(self, rows: int) -> HeadArrays:
        """With this many rows of zeros more."""
        hidden, inner = jax.tree.map(lambda array: jnp.pad(array, ((0, rows), (0, 0))), (self.hidden, self.inner))
        return self._replace(hidden=hidden, inner=inner)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class HeadInputs:
    """Inputs of a language model head. Logits `[N, V]` are `softcap * tanh((hidden @ weight.T + inner @ outer.T + bias)
    * scale / softcap)`.

    hidden, weight, bias, inner, outer: as in `HeadArrays`.
    scale, softcap: numbers; None for no softcap.
    """

    hidden: jax.Array
    weight: jax.Array
    bias: Any = None
    scale: float = field(default=1.0, metadata={"static": True})
    softcap: float | None = field(default=None, metadata={"static": True})
    inner: Any = None
    outer: Any = None

    @property
    def arrays(self) -> HeadArrays:
        return HeadArrays(self.hidden, self.weight, self.bias, self.inner, self.outer)

    def token_outputs(self, targets: jax.Array, temperature: float = 1.0) -> TokenOutputs:
        """Log-probabilities and entropies, float32 `[N]`, of the softmax distributions of logits / temperature.

        The matrix product and bias are in the dtype of `hidden`, the rest is float32. `targets` `[N]` are ids, negative
        for reads without a target, which must come last and get zeros. No gradient is computed for inputs that are not
        differentiated, such as a frozen weight.
        """
        count, rows = len(targets), chunk_rows(len(targets), len(self.weight))
        padding = -count % rows
        head = Head.of(self, rows, temperature)
        targets = jnp.pad(targets, (0, padding), constant_values=-1)
        outputs = TokenOutputs(*(output[:count] for output in _outputs(head, self.arrays.padded(padding), targets)))
        mean_logits, squares = jax.lax.stop_gradient((outputs.mean_logits, outputs.log_sum_sq_probs))
        return outputs._replace(mean_logits=mean_logits, log_sum_sq_probs=squares)

    def logits(self, temperature: float = 1.0) -> jax.Array:
        """All logits / temperature, float32 `[N, V]`."""
        return Head.of(self, len(self.hidden), temperature).logits(self.arrays.cast())


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
    """`HeadInputs.token_outputs` for a head without an adapter."""
    return HeadInputs(hidden, weight, bias, scale, softcap).token_outputs(targets, temperature)


@jax.tree_util.register_static
@dataclass(frozen=True)
class Differentiated:
    """Names of the fields of `HeadArrays` that need a gradient."""

    names: frozenset[str]

    @classmethod
    def of(cls, primals: HeadArrays) -> Differentiated:
        """From the primals of a custom_vjp with symbolic zeros."""
        perturbed = (name for name, primal in primals._asdict().items() if primal is not None and primal.perturbed)
        return cls(frozenset(perturbed))


class _Saved(NamedTuple):
    """What the backward pass needs."""

    arrays: HeadArrays
    targets: jax.Array
    differentiated: Differentiated
    entropy: jax.Array
    log_sum: jax.Array
    chunks: jax.Array
    d_hidden: jax.Array | None


def _token_outputs(head, arrays: HeadArrays, targets, with_d_hidden=False):
    """TokenOutputs, log-sum-exp `[N]`, number of chunks, and on request the derivatives `[N, D]` of log-probabilities
    with respect to hidden states."""
    arrays = arrays.cast()
    ids, chunks = jnp.arange(len(arrays.weight)), head.chunks(targets)

    def compute(chunk, carried):
        outputs, d_hidden = carried
        target, z = head.take(chunk, targets), head.logits(head.of_chunk(chunk, arrays))
        at_target = ids == target[:, None]
        largest = jnp.max(z, axis=1)
        weights = jnp.exp(z - largest[:, None])
        total = jnp.sum(weights, axis=1)
        log_sum = largest + jnp.log(total)
        first = jnp.min(jnp.where(z == largest[:, None], ids, len(ids)), axis=1)
        logps = _target_logits(z, target, at_target) - log_sum
        entropy = log_sum - jnp.sum(weights * z, axis=1) / total
        mean, squares = jnp.mean(z, axis=1), jnp.log(jnp.sum(jnp.square(weights), axis=1)) - 2 * jnp.log(total)
        rows = logps, entropy, mean - log_sum, first == target, mean, squares
        rows = (*(jnp.where(target >= 0, output, 0) for output in rows), log_sum)
        if d_hidden is not None:
            d_z = head.d_products(at_target - weights / total[:, None], z).astype(arrays.hidden.dtype)
            d_hidden = head.put(chunk, d_hidden, einsum_f32("nv,vd->nd", d_z, arrays.weight))
        return tuple(head.put(chunk, array, values) for array, values in zip(outputs, rows, strict=True)), d_hidden

    zeros, d_hidden = jnp.zeros(len(targets), jnp.float32), jnp.zeros_like(arrays.hidden) if with_d_hidden else None
    (*outputs, log_sum), d_hidden = jax.lax.fori_loop(0, chunks, compute, ((zeros,) * 7, d_hidden))
    return TokenOutputs(*outputs), log_sum, chunks, d_hidden


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _outputs(head, arrays, targets):
    return _token_outputs(head, arrays, targets)[0]


def _outputs_forward(head, *primals):
    (arrays, targets), differentiated = (
        jax.tree.map(lambda primal: primal.value, primals),
        Differentiated.of(primals[0]),
    )
    # With a frozen weight, only hidden states need a gradient: the derivative saved here, times a cotangent per row.
    only_hidden = differentiated.names == {"hidden"}
    outputs, *saved = _token_outputs(head, arrays, targets, with_d_hidden=only_hidden)
    return outputs, _Saved(arrays, targets, differentiated, outputs.entropy, *saved)


def _outputs_backward(head, saved, cotangents):
    no_others = isinstance(cotangents.entropy, SymbolicZero) and isinstance(cotangents.mean_logps, SymbolicZero)
    if saved.d_hidden is not None and no_others:
        d_hidden = (saved.d_hidden * column(saved.targets, cotangents.logps)).astype(saved.arrays.hidden.dtype)
        return HeadArrays(d_hidden, None), None
    d_logits = partial(_d_logits, head, saved=saved, cotangents=cotangents)
    return gradients(head, saved.arrays, saved.differentiated, saved.chunks, d_logits), None


def _d_logits(head, chunk, z, saved, cotangents):
    """Gradient `[rows, V]` of the chunk's logits; zero in rows without a target."""
    target = head.take(chunk, saved.targets)
    columns = [column(saved.targets, cotangent) for cotangent in cotangents[:3]]
    of_logps, of_entropy, of_mean = (head.take(chunk, values) for values in columns)
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
    count, rows = len(targets), chunk_rows(len(targets), len(student.weight))
    padding = -count % rows
    teacher = jax.lax.stop_gradient(teacher)
    heads = (Head.of(inputs, rows, temperature, rounds=False) for inputs in (student, teacher))
    arrays = (inputs.arrays.padded(padding) for inputs in (student, teacher))
    targets = jnp.pad(targets, (0, padding), constant_values=-1)
    values = _divergences(_Comparison(*heads, float(beta)), *arrays, targets)
    return Divergences(*(value[:count] for value in values))


class _Comparison(NamedTuple):
    """Two heads, and the divergence between their distributions for a chunk."""

    student: Head
    teacher: Head
    beta: float

    def log_probs(self, chunk: jax.Array, z: jax.Array, teacher: HeadArrays) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Log-probabilities `[rows, V]` of a chunk: of the student (from its logits `z`), of the teacher, and of the
        distribution to compare with."""
        of_student = jax.nn.log_softmax(z)
        of_teacher = jax.nn.log_softmax(self.teacher.logits(self.teacher.of_chunk(chunk, teacher.cast())))
        if self.beta in (0.0, 1.0):
            return of_student, of_teacher, of_teacher
        mixed = jnp.logaddexp(of_student + math.log(1 - self.beta), of_teacher + math.log(self.beta))
        return of_student, of_teacher, mixed

    def divergence(self, student: jax.Array, teacher: jax.Array, mixed: jax.Array) -> jax.Array:
        """The divergence of each row, from the results of `log_probs`."""
        if self.beta == 0.0:
            return _expectation(teacher, teacher - student)
        if self.beta == 1.0:
            return _expectation(student, student - teacher)
        of_teacher, of_student = _expectation(teacher, teacher - mixed), _expectation(student, student - mixed)
        return self.beta * of_teacher + (1 - self.beta) * of_student

    def d_logits(self, student: jax.Array, teacher: jax.Array, mixed: jax.Array) -> jax.Array:
        """Derivative of each row's divergence with respect to the student's logits, `[rows, V]`."""
        p = jnp.exp(student)
        if self.beta == 0.0:
            return p - jnp.exp(teacher)
        part = 1.0 if self.beta == 1.0 else 1 - self.beta
        return part * p * (student - mixed - _expectation(student, student - mixed)[:, None])


def _expectation(log_p: jax.Array, values: jax.Array) -> jax.Array:
    """Expectation of values under each row's distribution."""
    return jnp.sum(jnp.exp(log_p) * values, axis=-1)


class _DivergenceSaved(NamedTuple):
    """What the backward pass needs."""

    arrays: HeadArrays
    teacher: HeadArrays
    targets: jax.Array
    differentiated: Differentiated


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _divergences(compared, arrays, teacher, targets):
    head, arrays = compared.student, arrays.cast()

    def compute(chunk, outputs):
        z = head.logits(head.of_chunk(chunk, arrays))
        log_probs = compared.log_probs(chunk, z, teacher)
        values = compared.divergence(*log_probs), -_expectation(log_probs[0], log_probs[0])
        counts = head.take(chunk, targets) >= 0
        return tuple(head.put(chunk, a, jnp.where(counts, b, 0)) for a, b in zip(outputs, values, strict=True))

    zeros = jnp.zeros(len(targets), jnp.float32)
    return jax.lax.fori_loop(0, head.chunks(targets), compute, (zeros, zeros))


def _divergences_forward(compared, *primals):
    arrays, teacher, targets = jax.tree.map(lambda primal: primal.value, primals)
    saved = _DivergenceSaved(arrays, teacher, targets, Differentiated.of(primals[0]))
    return _divergences(compared, arrays, teacher, targets), saved


def _divergences_backward(compared, saved, cotangents):
    head, targets = compared.student, saved.targets
    of_divergence = column(targets, cotangents[0])  # the entropy is a metric and has no gradient

    def d_logits(chunk, z):
        return compared.d_logits(*compared.log_probs(chunk, z, saved.teacher)) * head.take(chunk, of_divergence)

    return gradients(head, saved.arrays, saved.differentiated, head.chunks(targets), d_logits), None, None


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

    @classmethod
    def of(cls, inputs: HeadInputs, rows: int, temperature: float, *, rounds: bool = True) -> Head:
        softcap = None if inputs.softcap is None else float(inputs.softcap)
        return cls(rows, float(inputs.scale), softcap, float(temperature), rounds)

    def logits(self, arrays: HeadArrays) -> jax.Array:
        """Logits `[rows, V]`, float32; all arrays have the dtype of `hidden`."""
        hidden, weight, bias, inner, outer = arrays
        rounds = partial(rounded, kind=hidden.dtype) if self.rounds else lambda z: z
        product = jnp.einsum if self.rounds else einsum_f32
        z = rounds(product("nd,vd->nv", hidden, weight))
        if inner is not None:
            z = rounds(z + product("nr,vr->nv", inner, outer))
        if bias is not None:
            z = rounds(z + bias)
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

    def of_chunk(self, chunk: jax.Array, arrays: HeadArrays) -> HeadArrays:
        """The arrays with the rows of a chunk."""
        hidden, inner = jax.tree.map(partial(self.take, chunk), (arrays.hidden, arrays.inner))
        return arrays._replace(hidden=hidden, inner=inner)

    def take(self, chunk: jax.Array, array: jax.Array) -> jax.Array:
        """Read the rows of a chunk."""
        return jax.lax.dynamic_slice_in_dim(array, chunk * self.rows, self.rows)

    def put(self, chunk: jax.Array, array: jax.Array, rows: jax.Array) -> jax.Array:
        """Write the rows of a chunk."""
        return jax.lax.dynamic_update_slice_in_dim(array, rows.astype(array.dtype), chunk * self.rows, 0)


def gradients(
    head: Head,
    arrays: HeadArrays,
    differentiated: Differentiated,
    chunks: jax.Array,
    d_logits: Callable[[jax.Array, jax.Array], jax.Array],
) -> HeadArrays:
    """Gradients of the `differentiated` arrays, None for others.

    Args:
        d_logits: (chunk, its logits) -> their gradient `[rows, V]`, zero in rows without a target.
    """
    cast = arrays.cast()

    def add(chunk: jax.Array, sums: HeadArrays) -> HeadArrays:
        rows = head.of_chunk(chunk, cast)
        z = head.logits(rows)
        d_z = head.d_products(d_logits(chunk, z), z).astype(cast.hidden.dtype)

        def put(array, matrix):
            return None if array is None else head.put(chunk, array, einsum_f32("nv,vd->nd", d_z, matrix))

        def summed(array, rows):
            return None if array is None else array + einsum_f32("nv,nd->vd", d_z, rows)

        d_bias = None if sums.bias is None else sums.bias + jnp.sum(d_z, axis=0, dtype=jnp.float32)
        return HeadArrays(
            hidden=put(sums.hidden, cast.weight),
            weight=summed(sums.weight, rows.hidden),
            bias=d_bias,
            inner=put(sums.inner, cast.outer),
            outer=summed(sums.outer, rows.inner),
        )

    def zeros(name: str, array: jax.Array | None) -> jax.Array | None:
        if name not in differentiated.names:
            return None
        return jnp.zeros(array.shape, cast.hidden.dtype if name in ("hidden", "inner") else jnp.float32)

    sums = jax.lax.fori_loop(0, chunks, add, HeadArrays(*map(zeros, HeadArrays._fields, arrays)))
    return HeadArrays(*(None if d is None else d.astype(a.dtype) for d, a in zip(sums, arrays, strict=True)))


def column(targets: jax.Array, cotangent: jax.Array | SymbolicZero) -> jax.Array:
    """Cotangents `[n, 1]`, zero in rows without a target."""
    if isinstance(cotangent, SymbolicZero):
        return jnp.zeros((len(targets), 1), jnp.float32)
    return jnp.where(targets >= 0, cotangent, 0)[:, None]


# Logits


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
    outputs = (
        jnp.take_along_axis(logps, jnp.maximum(targets, 0)[:, None], axis=-1)[:, 0],
        -jnp.sum(jnp.exp(logps) * logps, axis=-1),
        jnp.mean(logps, axis=-1),
        (jnp.argmax(logits, axis=-1) == targets).astype(jnp.float32),
        jax.lax.stop_gradient(jnp.mean(logits, axis=-1)),
        jax.lax.stop_gradient(jax.nn.logsumexp(2 * logps, axis=-1)),
    )
    return TokenOutputs(*(jnp.where(real, values, 0) for values in outputs))
