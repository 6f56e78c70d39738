"""Operations that treat every element alike. At a kink, gradients are those of torch."""

from __future__ import annotations

import jax
import jax.numpy as jnp

_LARGEST = jnp.iinfo(jnp.int32).max


def number(value, beside=None):
    """A Python number as JAX can hold it: whole ones lie within 32 bits, or are floats beside floats."""
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    if beside is not None and jnp.issubdtype(jnp.result_type(beside), jnp.floating):
        return float(value)
    return max(-_LARGEST - 1, min(_LARGEST, value))


def _add(a, b, *, alpha=1):
    return a + number(b, a) if alpha == 1 else a + alpha * number(b, a)


def _sub(a, b, *, alpha=1):
    return a - number(b, a) if alpha == 1 else a - alpha * number(b, a)


def _rsub(a, b, alpha=1):
    return number(b, a) - (a if alpha == 1 else alpha * a)


def _div(a, b, *, rounding_mode=None):
    if rounding_mode is None:
        return jnp.true_divide(a, b)
    if rounding_mode == "floor":
        return jnp.floor_divide(a, b)
    whole = jnp.issubdtype(jnp.result_type(a, b), jnp.integer)
    return jax.lax.div(*jnp.broadcast_arrays(a, jnp.asarray(b, a.dtype))) if whole else jnp.trunc(a / b)


def _power(base, exponent):
    if isinstance(exponent, int | float) and float(exponent).is_integer() and abs(exponent) < 16:
        return jax.lax.integer_pow(base, int(exponent))
    return jnp.sqrt(base) if exponent == 0.5 else jnp.power(base, exponent)


def _array_power(base, exponent):
    return jnp.power(base, exponent)


def _clamp(x, low=None, high=None):
    """The bounds themselves pass the gradient on, as torch's do."""
    if low is not None:
        x = jnp.where(x < low, low, x)
    return x if high is None else jnp.where(x > high, high, x)


def _gelu(x, *, approximate="none"):
    return jax.nn.gelu(x.astype(jnp.float32), approximate=approximate == "tanh")


def _silu(x):
    return jax.nn.silu(x.astype(jnp.float32))


def _softplus(x, beta=1, threshold=20):
    return jnp.where(x * beta > threshold, x, jax.nn.softplus(x * beta) / beta)


def _leaky_relu(x, slope=0.01):
    return jnp.where(x > 0, x, slope * x)


def _elu(x, alpha=1, scale=1, input_scale=1):
    return jnp.where(x > 0, scale * x, scale * alpha * jnp.expm1(jnp.minimum(x, 0) * input_scale))


def _polar(length, angle):
    return jax.lax.complex(length * jnp.cos(angle), length * jnp.sin(angle))


def _logical(function):
    return lambda *arrays: function(*(jnp.asarray(x).astype(bool) for x in arrays))


def _where(condition, yes, no):
    return jnp.where(condition, number(yes), number(no))


def _sign(x):
    return jax.lax.stop_gradient(jnp.sign(x))


def _with_overloads(name: str, function, overloads: str) -> dict:
    return {f"aten.{name}.{overload}": function for overload in overloads.split()}


_ONE = {  # of one array
    "abs": jnp.abs, "acos": jnp.arccos, "asin": jnp.arcsin, "atan": jnp.arctan, "bitwise_not": jnp.invert,
    "ceil": jnp.ceil, "cos": jnp.cos, "cosh": jnp.cosh, "erf": jax.scipy.special.erf, "exp": jnp.exp,
    "expm1": jnp.expm1, "floor": jnp.floor, "isinf": jnp.isinf, "isnan": jnp.isnan, "log": jnp.log,
    "log1p": jnp.log1p, "log2": jnp.log2, "log10": jnp.log10, "logical_not": _logical(jnp.logical_not),
    "neg": jnp.negative, "reciprocal": jnp.reciprocal, "relu": jax.nn.relu, "round": jnp.round,
    "rsqrt": jax.lax.rsqrt, "sigmoid": jax.nn.sigmoid, "sign": _sign, "silu": _silu, "sin": jnp.sin,
    "sinh": jnp.sinh, "sqrt": jnp.sqrt, "square": jnp.square, "tan": jnp.tan, "tanh": jnp.tanh, "trunc": jnp.trunc,
    "gelu": _gelu, "softplus": _softplus, "leaky_relu": _leaky_relu, "elu": _elu, "clamp": _clamp,
    "hardtanh": lambda x, low=-1.0, high=1.0: jnp.where(x <= low, low, jnp.where(x >= high, high, x)),
    "clamp_min": _clamp, "clamp_max": lambda x, high: _clamp(x, None, high),
    "clone": lambda x: x, "_to_copy": lambda x: x, "alias": lambda x: x, "lift_fresh_copy": lambda x: x,
    "detach": jax.lax.stop_gradient, "zeros_like": jnp.zeros_like, "ones_like": jnp.ones_like,
    "empty_like": jnp.zeros_like,
}  # fmt: skip
_TWO = {  # of two arrays, or an array and a number
    "mul": lambda a, b: a * number(b, a), "eq": lambda a, b: jnp.equal(a, number(b, a)),
    "ne": lambda a, b: jnp.not_equal(a, number(b, a)), "lt": lambda a, b: jnp.less(a, number(b, a)),
    "le": lambda a, b: jnp.less_equal(a, number(b, a)), "gt": lambda a, b: jnp.greater(a, number(b, a)),
    "ge": lambda a, b: jnp.greater_equal(a, number(b, a)), "remainder": jnp.mod, "fmod": jnp.fmod,
    "bitwise_and": lambda a, b: jnp.bitwise_and(a, number(b, a)), "bitwise_or": jnp.bitwise_or,
    "bitwise_xor": jnp.bitwise_xor, "__rshift__": jnp.right_shift, "__lshift__": jnp.left_shift,
    "bitwise_left_shift": jnp.left_shift, "bitwise_right_shift": jnp.right_shift,
}  # fmt: skip
OPERATIONS = {
    **{name: function for op, f in _ONE.items() for name, function in _with_overloads(op, f, "default").items()},
    **{
        name: function
        for op, f in _TWO.items()
        for name, function in _with_overloads(op, f, "Tensor Scalar Tensor_Scalar").items()
    },
    **_with_overloads("add", _add, "Tensor Scalar"),
    **_with_overloads("sub", _sub, "Tensor Scalar"),
    **_with_overloads("rsub", _rsub, "Tensor Scalar"),
    **_with_overloads("div", _div, "Tensor Scalar Tensor_mode Scalar_mode"),
    **_with_overloads("floor_divide", jnp.floor_divide, "default Scalar"),
    **_with_overloads("pow", _power, "Tensor_Scalar"),
    **_with_overloads("pow", _array_power, "Tensor_Tensor Scalar"),
    **_with_overloads("clamp", _clamp, "Tensor"),
    **_with_overloads("minimum", jnp.minimum, "default"),
    **_with_overloads("maximum", jnp.maximum, "default"),
    **_with_overloads("polar", _polar, "default"),
    **_with_overloads("atan2", jnp.arctan2, "default"),
    **_with_overloads("logical_and", _logical(jnp.logical_and), "default"),
    **_with_overloads("logical_or", _logical(jnp.logical_or), "default"),
    **_with_overloads("logical_xor", _logical(jnp.logical_xor), "default"),
    **_with_overloads("where", _where, "self ScalarSelf ScalarOther Scalar"),
    **_with_overloads("masked_fill", lambda x, mask, value: jnp.where(mask, number(value), x), "Scalar Tensor"),
    **_with_overloads("copy", lambda x, source: jnp.broadcast_to(source, x.shape), "default"),
}
