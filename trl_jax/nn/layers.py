"""MLPs, norms, convolutions, NEFTune noise and per-layer embeddings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from trl_jax.nn.linear import ClippedLinear, Dropout, Embedding, Linear

# MLPs


@jax.custom_jvp
def tanh(x: jax.Array) -> jax.Array:
    """tanh(x), off by at most 1.4 ulp for |x| > 0.55, and by 0.6 ulp for |x| > 2; XLA's can be off by four ulps.

    Near |t| = 1 the gradient (1 - t)(1 + t) is tiny, so one ulp of t is a large relative error. If the gradients of an
    example's texts cancel for a weight, only this error is left, and Adam scales it up to a full step.
    """
    size = jnp.abs(x.astype(jnp.promote_types(x.dtype, jnp.float32)))
    far = 1 - 2 / (jnp.exp(2 * size) + 1)
    return (jnp.where(size < 0.55, jnp.tanh(size), far) * jnp.sign(x)).astype(x.dtype)


tanh.defjvps(lambda change, t, x: change * (1 - t) * (1 + t))


def _gelu_tanh(x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x, approximate=True)


ACTIVATIONS = {
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_pytorch_tanh": _gelu_tanh,
    "gelu_new": _gelu_tanh,
    "gelu_fast": _gelu_tanh,
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "relu": jax.nn.relu,
    "tanh": tanh,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}


def _gelu_accurate_tanh(x: jax.Array) -> jax.Array:
    return 0.5 * x * (1 + tanh((2 / jnp.pi) ** 0.5 * (x + 0.044715 * x**3)))


# Slower; for gates whose gradient comes from a single token, where rounding errors do not average out.
ACCURATE_ACTIVATIONS = ACTIVATIONS | dict.fromkeys(
    (name for name, function in ACTIVATIONS.items() if function is _gelu_tanh), _gelu_accurate_tanh
)
XIELU_NAME = "xielu"  # an activation with parameters


@dataclass(frozen=True)
class ClampedSwiGLU:
    """`(up + 1) * gate * sigmoid(alpha * gate)`, with gate clipped to at most `limit` and up to +-`limit` (OpenAI 2025,
    arXiv:2508.10925)."""

    alpha: float
    limit: float

    def __call__(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        gate, up = jnp.minimum(gate, self.limit), jnp.clip(up, -self.limit, self.limit)
        return (up + 1) * gate * jax.nn.sigmoid(self.alpha * gate)


class MLP(nnx.Module):
    """`down(activation(up(x)))`, or gated: `down(activation(gate(x)) * up(x))` (Shazeer 2020, arXiv:2002.05202).
    `scales` multiply the outputs of gate and down; `clipped` as in `Arch.clipped_maps`."""

    def __init__(
        self,
        features: int,
        hidden: int,
        *,
        activation: str,
        gated: bool = True,
        bias: bool = False,
        scales: tuple[float, float] = (1.0, 1.0),
        clipped: bool = False,
    ):
        linear = ClippedLinear if clipped else Linear
        self.gate = linear(features, hidden, bias=bias, axes=("mlp", "embed")) if gated else None
        self.up = linear(features, hidden, bias=bias, axes=("mlp", "embed"))
        self.down = linear(hidden, features, bias=bias, axes=("embed", "mlp"))
        self.activation, self.scales = XIELU() if activation == XIELU_NAME else ACTIVATIONS[activation], scales

    def __call__(self, x: jax.Array, *, dropout: Dropout | None = None) -> jax.Array:
        """`[..., D]` to `[..., D]`; `dropout` is applied to the hidden activations."""
        of_gate, of_down = self.scales
        if self.gate is None:
            hidden = self.activation(self.up(x))
        else:
            gate = self.gate(x)
            hidden = self.activation(gate if of_gate == 1.0 else gate * of_gate) * self.up(x)
        out = self.down(hidden if dropout is None else dropout(hidden))
        return out if of_down == 1.0 else out * of_down


# xIELU


class XIELU(nnx.Module):
    """xIELU (Huang and Schlag 2024, arXiv:2411.13010): `a x^2 + beta x` above 0 and
    `b (exp(min(x, eps)) - 1 - x) + beta x` below, with `a = softplus(alpha_p)` and `b = beta + softplus(alpha_n)`.

    `alpha_p` and `alpha_n` `[1]` are trained; `beta` and `eps` are constants.
    """

    def __init__(self):
        self.alpha_p, self.alpha_n = (nnx.Param(jnp.zeros((1,), jnp.float32), axes=("",)) for _ in range(2))
        self.beta, self.eps = (nnx.Param(jnp.zeros((), jnp.float32), axes=()) for _ in range(2))

    def __call__(self, x: jax.Array) -> jax.Array:
        """`[..., F]` to `[..., F]`, computed in float32."""
        y, dtype = x.astype(jnp.float32), x.dtype
        beta, eps = jax.lax.stop_gradient((self.beta[...], self.eps[...]))
        above, below = jax.nn.softplus(self.alpha_p[...]), beta + jax.nn.softplus(self.alpha_n[...])
        curve = jnp.where(y > 0, above * y * y, (jnp.expm1(jnp.minimum(y, eps)) - y) * below)
        return (curve + beta * y).astype(dtype)


# Norms


@dataclass(frozen=True)
class NormKind:
    """A norm over the last axis, with statistics in float32.

    centered: subtract the mean first. weighted, biased: it has these parameters. one_plus: it scales by 1 + weight.
    scales_rounded: the normed value is rounded to the dtype of the input before scaling.
    """

    centered: bool
    weighted: bool = True
    biased: bool = False
    one_plus: bool = False
    scales_rounded: bool = False


# RMS norm: Zhang and Sennrich 2019, arXiv:1910.07467. Layer norm: Ba, Kiros and Hinton 2016, arXiv:1607.06450.
NORMS = {
    "rms": NormKind(centered=False, scales_rounded=True),
    "rms_float32": NormKind(centered=False),
    "rms_plain": NormKind(centered=False, weighted=False),
    "rms_one_plus": NormKind(centered=False, one_plus=True),
    "layer": NormKind(centered=True, biased=True),
    "layer_one_plus": NormKind(centered=True, biased=True, one_plus=True),
    "layer_unbiased": NormKind(centered=True),
    "layer_plain": NormKind(centered=True, weighted=False),
}


class Norm(nnx.Module):
    """One of `NORMS`. Parameters have `shape`; the norm is over the last axis, separately for each of `groups` equal
    parts of it."""

    def __init__(self, *shape: int, kind: str, eps: float, groups: int = 1):
        self.kind, self.eps, self.groups = NORMS[kind], eps, groups
        axes = ("norm",) * len(shape)
        self.weight = nnx.Param(jnp.ones(shape, jnp.float32), axes=axes) if self.kind.weighted else None
        self.bias = nnx.Param(jnp.zeros(shape, jnp.float32), axes=axes) if self.kind.biased else None

    def __call__(self, x: jax.Array) -> jax.Array:
        y = x.astype(jnp.float32)
        if self.groups > 1:
            y = y.reshape(*x.shape[:-1], self.groups, -1)
        if self.kind.centered:
            y = y - jnp.mean(y, axis=-1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + self.eps)
        y = y.reshape(x.shape)
        if self.kind.scales_rounded:
            y = y.astype(x.dtype)
        if self.weight is not None:
            weight = self.weight[...].astype(y.dtype)
            y = y * (1 + weight if self.kind.one_plus else weight)
        if self.bias is not None:
            y = y + self.bias[...].astype(y.dtype)
        return y.astype(x.dtype)


# Convolution


class Convolution(nnx.Module):
    """`[R, T, D]` to `[R, T, D]`: a convolution over `width` (odd) neighboring tokens, zero-padded at the ends of the
    row.

    The weight is stored as on disk, (out, in / groups, width).
    """

    def __init__(self, features: int, width: int, groups: int):
        self.weight = nnx.Param(jnp.zeros((features, features // groups, width), jnp.float32), axes=("", "", ""))
        self.bias = nnx.Param(jnp.zeros((features,), jnp.float32), axes=("",))
        self.groups = groups

    def __call__(self, x: jax.Array) -> jax.Array:
        y = jax.lax.conv_general_dilated(
            x,
            self.weight[...].astype(x.dtype),
            window_strides=(1,),
            padding="SAME",
            dimension_numbers=("NWC", "OIW", "NWC"),
            feature_group_count=self.groups,
        )
        return y + self.bias[...].astype(x.dtype)


# NEFTune


class Noise(NamedTuple):
    """Adds uniform noise in [-a, a] to embeddings `[R, T, D]`, a = alpha / sqrt(length * D) (NEFTune: Jain et al. 2023,
    arXiv:2310.05914).

    `length` is the length of the longest text, not of the padded row.
    """

    alpha: float
    key: jax.Array
    length: jax.Array | int

    def __call__(self, x: jax.Array) -> jax.Array:
        bound = self.alpha / jnp.sqrt(self.length * x.shape[-1])
        return x + (bound * jax.random.uniform(self.key, x.shape, jnp.float32, -1.0, 1.0)).astype(x.dtype)


# Per-layer embeddings


class LayerEmbeddings(nnx.Module):
    """Token embeddings for each layer (Gemma 3n, Google 2025); `arch` is a models.arch.Arch.

    The sum of a table, which holds the embeddings of all layers side by side, and a projection of the model's own
    embeddings, normed per layer.
    """

    def __init__(self, arch):
        spec = arch.layer_embedding
        width = arch.num_layers * spec.channels
        self.table = Embedding(spec.rows, width, padding_idx=arch.padding_idx, axes=("vocab", "embed"))
        self.projection = Linear(arch.hidden_size, width, axes=("", "embed"))
        self.norm = Norm(spec.channels, kind=arch.norm, eps=arch.norm_eps)
        self.layers, self.channels = arch.num_layers, spec.channels

    def __call__(self, tokens: jax.Array, h: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """From tokens `[R, T]` and their embeddings `h` `[R, T, D]`: `[L, R, T, P]`, in `dtype`."""
        by_layer = (*tokens.shape, self.layers, self.channels)
        projected = self.projection(h.astype(dtype)) * h.shape[-1] ** -0.5
        looked_up = self.table(tokens, jnp.float32) * self.channels**0.5
        embedded = (self.norm(projected.reshape(by_layer)) + looked_up.reshape(by_layer)) * 2**-0.5
        return jnp.moveaxis(embedded.astype(dtype), 2, 0)


class LayerInput(nnx.Module):
    """Feeds a layer's own token embeddings into the residual stream: gated by the stream, then projected to its width.
    `arch` is a models.arch.Arch."""

    def __init__(self, arch):
        channels = arch.layer_embedding.channels
        self.gate = Linear(arch.hidden_size, channels, axes=("", "embed"))
        self.projection = Linear(channels, arch.hidden_size, axes=("embed", ""))
        self.norm = Norm(arch.hidden_size, kind=arch.norm, eps=arch.norm_eps)
        self.activation = ACCURATE_ACTIVATIONS[arch.activation]

    def __call__(self, h: jax.Array, embedded: jax.Array) -> jax.Array:
        """From `h` `[R, T, D]` and the layer's embeddings `[R, T, P]`: `[R, T, D]`, to be added to `h`."""
        return self.norm(self.projection(self.activation(self.gate(h)) * embedded))
