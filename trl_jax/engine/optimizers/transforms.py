"""Update rules as optax transformations, with torch's conventions where optax has others."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

_CHUNK = 4096  # elements that fit into the first cache


class RunningState(NamedTuple):
    """Steps taken, and averages by name, each a tree like the parameters."""

    count: jax.Array
    averages: dict[str, Any]


def global_norm(tree: Any) -> jax.Array:
    """The global norm of arrays on one device. On CPUs it takes a tenth of the time of optax's, has a digit more and
    keeps no squares in memory: XLA sums an array element by element, and here rows are added to rows."""
    return jax.lax.platform_dependent(tree, cpu=_norm_by_rows, default=optax.global_norm)


def _norm_by_rows(tree: Any) -> jax.Array:
    leaves = jax.tree.leaves(tree)
    return jnp.sqrt(sum(map(_sum_of_squares, leaves))).astype(jnp.result_type(*leaves))  # as optax has it


def _sum_of_squares(x: jax.Array) -> jax.Array:
    rows, dtype = x.reshape(-1, x.shape[-1] if x.ndim else 1), jnp.promote_types(x.dtype, jnp.float32)
    many = min(len(rows), max(1, _CHUNK // rows.shape[1]))
    turns = len(rows) // many

    def squares(some):
        return jnp.square(some.astype(dtype))

    def add(turn, sums):
        return sums + squares(jax.lax.dynamic_slice_in_dim(rows, turn * many, many))

    sums = jax.lax.fori_loop(0, turns, add, jnp.zeros((many, rows.shape[1]), dtype))
    return jnp.sum(sums) + jnp.sum(squares(rows[turns * many :]))


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformationExtraArgs:
    """torch's clip_grad_norm_: scale by `max_norm / (norm + 1e-6)` where that is below 1.

    optax's own divides by the norm alone, which differs in the seventh digit. `grad_norm` saves computing the norm.
    """

    def update(updates, state, params=None, *, grad_norm=None, **extra):
        del params, extra
        norm = optax.global_norm(updates) if grad_norm is None else grad_norm
        scale = jnp.minimum(1.0, max_norm / (norm + 1e-6))
        return jax.tree.map(lambda g: g * scale, updates), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def bias(decay: float, count: jax.Array) -> jax.Array:
    """`1 - decay**count` with all its digits: from float32's 0.999, the first steps would lose four of seven."""
    return -jnp.expm1(count * math.log(decay)) if decay > 0 else jnp.ones(())


def scale_by_adam(
    b1: float, b2: float, eps: float, mu_dtype: str = "float32", nu_dtype: str = "float32"
) -> optax.GradientTransformation:
    """Adam (Kingma and Ba 2015, arXiv:1412.6980), eps outside the root; moments have dtypes of their own."""

    def init(params):
        mu, nu = (
            jax.tree.map(lambda p, dtype=dtype: jnp.zeros(p.shape, dtype), params) for dtype in (mu_dtype, nu_dtype)
        )
        return optax.ScaleByAdamState(count=jnp.zeros((), jnp.int32), mu=mu, nu=nu)

    def update(updates, state, params=None):
        del params
        count = optax.safe_increment(state.count)
        mu = jax.tree.map(lambda m, g: b1 * m.astype(g.dtype) + (1 - b1) * g, state.mu, updates)
        nu = jax.tree.map(lambda v, g: b2 * v.astype(g.dtype) + (1 - b2) * jnp.square(g), state.nu, updates)
        first, second = bias(b1, count), bias(b2, count)
        updates = jax.tree.map(lambda m, v: (m / first) / (jnp.sqrt(v / second) + eps), mu, nu)
        mu, nu = optax.tree.cast(mu, jnp.dtype(mu_dtype)), optax.tree.cast(nu, jnp.dtype(nu_dtype))
        return updates, optax.ScaleByAdamState(count=count, mu=mu, nu=nu)

    return optax.GradientTransformation(init, update)


def with_momentum(momentum: float, dampening: float = 0.0, nesterov: bool = False) -> optax.GradientTransformation:
    """torch's momentum: `1 - dampening` scales the gradients of all steps but the first."""

    def init(params):
        return RunningState(jnp.zeros((), jnp.int32), {"momentum": jax.tree.map(jnp.zeros_like, params)})

    def update(updates, state, params=None):
        del params
        share = jnp.where(state.count == 0, 1.0, 1.0 - dampening)
        kept = jax.tree.map(lambda m, g: momentum * m + share * g, state.averages["momentum"], updates)
        ahead = jax.tree.map(lambda g, m: g + momentum * m, updates, kept) if nesterov else kept
        return ahead, RunningState(optax.safe_increment(state.count), {"momentum": kept})

    return optax.GradientTransformation(init, update)


def scale_by_adagrad(lr_decay: float = 0.0, eps: float = 1e-10) -> optax.GradientTransformation:
    """torch's Adagrad: the squares' sum starts at 0, eps is outside the root, the rate falls as 1 / (1 + t decay)."""

    def init(params):
        return RunningState(jnp.zeros((), jnp.int32), {"squares": jax.tree.map(jnp.zeros_like, params)})

    def update(updates, state, params=None):
        del params
        squares = jax.tree.map(lambda s, g: s + jnp.square(g), state.averages["squares"], updates)
        rate = 1.0 / (1.0 + state.count * lr_decay)
        updates = jax.tree.map(lambda g, s: rate * g / (jnp.sqrt(s) + eps), updates, squares)
        return updates, RunningState(optax.safe_increment(state.count), {"squares": squares})

    return optax.GradientTransformation(init, update)


def scale_by_rms(alpha: float = 0.99, eps: float = 1e-8, centered: bool = False) -> optax.GradientTransformation:
    """torch's RMSprop: eps outside the root; `centered` takes the squared mean off the mean square."""

    def init(params):
        zeros = jax.tree.map(jnp.zeros_like, params)
        means = {"mean": jax.tree.map(jnp.copy, zeros)} if centered else {}
        return RunningState(jnp.zeros((), jnp.int32), {"squares": zeros} | means)

    def update(updates, state, params=None):
        del params
        kept = {"squares": _towards(state.averages["squares"], jax.tree.map(jnp.square, updates), alpha)}
        squares = kept["squares"]
        if centered:
            kept["mean"] = _towards(state.averages["mean"], updates, alpha)
            squares = jax.tree.map(lambda s, m: jnp.maximum(s - jnp.square(m), 0.0), squares, kept["mean"])
        updates = jax.tree.map(lambda g, s: g / (jnp.sqrt(s) + eps), updates, squares)
        return updates, RunningState(optax.safe_increment(state.count), kept)

    return optax.GradientTransformation(init, update)


def scale_by_ademamix(
    b1: float, b2: float, b3: float, alpha: float, eps: float, t_alpha: int | None = None, t_beta3: int | None = None
) -> optax.GradientTransformation:
    """AdEMAMix (Pagliardini et al. 2024, arXiv:2409.03137): Adam with a second, slow momentum of weight `alpha`.

    Over the first `t_alpha` and `t_beta3` steps alpha rises from 0, and b3 from b1, as the paper's appendix has it.
    """

    def init(params):
        averages = {name: jax.tree.map(jnp.zeros_like, params) for name in ("fast", "slow", "squares")}
        return RunningState(jnp.zeros((), jnp.int32), averages)

    def update(updates, state, params=None):
        del params
        count, old = optax.safe_increment(state.count), state.averages
        kept = {
            "fast": _towards(old["fast"], updates, b1),
            "slow": _towards(old["slow"], updates, _slow_decay(b1, b3, count, t_beta3)),
            "squares": _towards(old["squares"], jax.tree.map(jnp.square, updates), b2),
        }
        mix = alpha if t_alpha is None else jnp.minimum(alpha, alpha * count / t_alpha)
        first, second = bias(b1, count), bias(b2, count)
        updates = jax.tree.map(
            lambda fast, slow, squares: (fast / first + mix * slow) / (jnp.sqrt(squares / second) + eps),
            kept["fast"],
            kept["slow"],
            kept["squares"],
        )
        return updates, RunningState(count, kept)

    return optax.GradientTransformation(init, update)


def _slow_decay(b1: float, b3: float, count: jax.Array, steps: int | None) -> jax.Array | float:
    """The decay on its way from b1 to b3, with which the average's half-life grows linearly."""
    if steps is None:
        return b3
    share = jnp.minimum(count / steps, 1.0)
    start, end = math.log(b1), math.log(b3)
    return jnp.exp(start * end / ((1 - share) * end + share * start))


def _towards(average: Any, values: Any, decay: Any) -> Any:
    return jax.tree.map(lambda a, v: decay * a + (1 - decay) * v, average, values)
