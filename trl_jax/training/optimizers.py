"""Optimizers built from optax, following torch's conventions where the two differ."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from trl_jax.config.optimizers import OPTIMIZERS
from trl_jax.core.torch_random import TorchParamLayout
from trl_jax.mesh.mesh import platform

# As in transformers' Trainer.get_decay_parameter_names, biases and all kinds of norms have no weight decay.
_UNDECAYED = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")


def decays(tensor: str) -> bool:
    """Whether weight decay applies to the parameter of this name on disk."""
    return not _UNDECAYED.search(tensor.lower())


def _identity(params: Any, state: Any) -> Any:
    del state
    return params


def _no_options(_: Any) -> dict[str, Any]:
    return {}


class Optimizer(NamedTuple):
    """An optax transformation whose `update` takes the `learning_rate` of its step: the schedule stays on the host.

    Attributes:
        point: (params, state) -> the parameters at which the gradient for `update` is taken.
        safe_rate: a learning rate up to which a finite gradient always gives a finite update. Without one, the step
            checks each update, which costs a pass over the parameters.
        options_for: batch -> further arguments of `update`, if it depends on what the batch has.
        counts_for_all: its step counts and sums also grow for parameters that take no part in a step.
    """

    init: Callable
    update: Callable
    point: Callable[[Any, Any], Any] = _identity
    safe_rate: float | None = None
    options_for: Callable[[Any], dict[str, Any]] = _no_options
    counts_for_all: bool = False


@dataclass(frozen=True)
class Hyperparameters:
    """The hyperparameters of an optimizer; each rule uses those it knows.

    Attributes:
        optim_args: the parsed `optim_args` argument.
        warmup_steps: for rules that warm up inside the optimizer.
        layout: how arrays map to torch's tensors, for rules that use whole tensors (Adafactor).
    """

    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    optim_args: dict[str, Any] = field(default_factory=dict)
    warmup_steps: int = 0
    layout: TorchParamLayout = TorchParamLayout()


def _adam(hyper: Hyperparameters) -> optax.GradientTransformation:
    mu_dtype = hyper.optim_args.get("momentum_dtype", "float32")
    nu_dtype = hyper.optim_args.get("variance_dtype", "float32")
    return scale_by_adam(hyper.b1, hyper.b2, hyper.eps, mu_dtype, nu_dtype)


def _adafactor(hyper: Hyperparameters) -> optax.GradientTransformation:
    return scale_by_adafactor(hyper.layout)


def _sgd(hyper: Hyperparameters) -> optax.GradientTransformation:
    return with_momentum(**hyper.optim_args) if hyper.optim_args.get("momentum") else optax.identity()


def _adagrad(hyper: Hyperparameters) -> optax.GradientTransformation:
    return scale_by_adagrad(**hyper.optim_args)


def _rmsprop(hyper: Hyperparameters) -> optax.GradientTransformation:
    args = dict(hyper.optim_args)
    momentum = args.pop("momentum", 0.0)
    rms = scale_by_rms(**args)
    return optax.chain(rms, with_momentum(momentum)) if momentum else rms


def _lion(hyper: Hyperparameters) -> optax.GradientTransformation:
    return optax.scale_by_lion(hyper.b1, hyper.b2)


def _ademamix(hyper: Hyperparameters) -> optax.GradientTransformation:
    args = dict(hyper.optim_args)
    b1, b2, b3 = args.pop("beta1", hyper.b1), args.pop("beta2", hyper.b2), args.pop("beta3", 0.9999)
    return scale_by_ademamix(b1, b2, b3, args.pop("alpha", 5.0), args.pop("eps", hyper.eps), **args)


_RULES = {
    "adamw": _adam,
    "adafactor": _adafactor,
    "sgd": _sgd,
    "adagrad": _adagrad,
    "rmsprop": _rmsprop,
    "lion": _lion,
    "ademamix": _ademamix,
}
_COUPLED = {"sgd", "adagrad", "rmsprop"}  # torch adds their weight decay to the gradient


def make_optimizer(
    name: str,
    hyper: Hyperparameters,
    *,
    decayed: dict[str, Any],
    max_grad_norm: float | None,
    factors: dict[str, Any] | None = None,
) -> Optimizer:
    """Build the optimizer named by `optim`: clipping if `max_grad_norm` > 0, update rule, weight decay, learning rate.

    Args:
        decayed: parameter path -> whether it has weight decay; with factors, its weight decay.
        factors: parameter path -> factor of its learning rate, a number or an array that broadcasts.
    """
    named = OPTIMIZERS[name]
    hyper = replace(hyper, optim_args=named.fixed | hyper.optim_args)
    if named.kind not in _RULES:
        return _schedule_free(named.kind, hyper, decayed=decayed, max_grad_norm=max_grad_norm)
    steps = [_RULES[named.kind](hyper)]
    if factors is not None:
        decay = optax.stateless(lambda updates, params: _weighted_sum(updates, params, decayed))
        steps.insert(0 if named.kind in _COUPLED else 1, decay)
        steps.append(optax.stateless(lambda updates, _: {path: factors[path] * u for path, u in updates.items()}))
    elif hyper.weight_decay:
        decay = optax.add_decayed_weights(hyper.weight_decay, mask=decayed)
        steps.insert(0 if named.kind in _COUPLED else 1, decay)
    largest = 1.0 if factors is None else max(1.0, *(float(np.max(factor)) for factor in factors.values()))
    return _chained(steps, max_grad_norm, _safe_rate_of_adam(hyper, largest) if named.kind == "adamw" else None)


def _weighted_sum(updates: dict[str, jax.Array], params: dict[str, jax.Array], weights: dict[str, Any]) -> dict:
    return {path: u + weights[path] * params[path] if np.any(weights[path]) else u for path, u in updates.items()}


def _safe_rate_of_adam(hyper: Hyperparameters, factor: float) -> float | None:
    """A learning rate up to which every update is finite in float32, if it is multiplied by at most `factor`.

    |mean / (sqrt(square) + eps)| is at most |gradient| / eps, and the elements of a gradient with a finite norm are
    below 2e19. None if the betas or eps are out of range.
    """
    return 1e3 / factor if max(hyper.b1, hyper.b2) < 1 and hyper.eps >= 1e-16 else None


def _schedule_free(
    kind: str, hyper: Hyperparameters, *, decayed: dict[str, bool], max_grad_norm: float | None
) -> Optimizer:
    b1, direction, factor = hyper.b1, over_root_mean_square(hyper.b2, hyper.eps), warm(hyper.warmup_steps)
    if kind == "schedule_free_sgd":
        b1, direction = 0.9, optax.identity()
    elif kind == "schedule_free_radam":
        factor = rectified(hyper.b2)
    if hyper.weight_decay:  # of y, added after the gradient's transformation
        direction = optax.chain(direction, optax.add_decayed_weights(hyper.weight_decay, mask=decayed))
    r, power = hyper.optim_args.get("r", 0.0), hyper.optim_args.get("weight_lr_power", 2.0)
    clip = clip_by_global_norm(max_grad_norm) if max_grad_norm else optax.identity()
    chain = optax.chain(clip, schedule_free(direction, factor, b1=b1, r=r, power=power))
    return Optimizer(chain.init, chain.update, lambda params, state: point(b1, params, state[1]), counts_for_all=True)


def from_optax(tx: optax.GradientTransformation, *, peak: float, max_grad_norm: float | None) -> Optimizer:
    """Wrap a user's optax transformation that includes its learning rate: its updates are scaled by the schedule's rate
    divided by `peak`, as torch's LambdaLR scales the rate that an optimizer was created with.
    """
    unscaled = optax.chain(tx, optax.scale(-1.0 / peak))
    return _chained([unscaled], max_grad_norm)


def _chained(
    steps: list[optax.GradientTransformation], max_grad_norm: float | None, safe_rate: float | None = None
) -> Optimizer:
    clip = [clip_by_global_norm(max_grad_norm)] if max_grad_norm else []
    chain = optax.chain(*clip, *steps, _scale_by_learning_rate())
    return Optimizer(chain.init, chain.update, safe_rate=safe_rate)


def _scale_by_learning_rate() -> optax.GradientTransformationExtraArgs:
    """Multiply by minus the `learning_rate` that is passed to `update`."""

    def update(updates, state, params=None, *, learning_rate, **extra):
        del params, extra
        return jax.tree.map(lambda u: -learning_rate * u, updates), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def with_adam_moments(state: Any, count: int, mu: dict[str, jax.Array], nu: dict[str, jax.Array]) -> Any:
    """AdamW's state with these moments, as after `count` steps.

    Raises:
        ValueError: `state` belongs to another optimizer.
    """
    replaced = []

    def moments(node):
        if not isinstance(node, optax.ScaleByAdamState):
            return node
        replaced.append(node)
        return optax.ScaleByAdamState(jnp.asarray(count, jnp.int32), mu, nu)

    filled = jax.tree.map(moments, state, is_leaf=lambda node: isinstance(node, optax.ScaleByAdamState))
    if not replaced:
        raise ValueError("The checkpoint holds AdamW's moments, but optim names another rule. Resume with adamw_torch.")
    return filled


# Schedule-free optimizers (Defazio et al. 2024, arXiv:2405.15682), with the paper's three sequences x, y and z.


_TABLE = 4096  # steps whose rectification is computed in float64


class ScheduleFreeState(NamedTuple):
    """The state, without the parameters x.

    Attributes:
        count: number of steps.
        weights: sum of the averaging weights so far.
        highest: highest learning rate so far.
        fast: z.
        direction: state of the transformation of gradients.
    """

    count: jax.Array
    weights: jax.Array
    highest: jax.Array
    fast: dict[str, jax.Array]
    direction: Any


def point(b1: float, params: dict[str, jax.Array], state: ScheduleFreeState) -> dict[str, jax.Array]:
    """y, the point at which the next gradient is taken."""
    return jax.tree.map(lambda x, z: b1 * x + (1 - b1) * z, params, state.fast)


def schedule_free(
    direction: optax.GradientTransformation, factor: Callable[[jax.Array], Any], *, b1: float, r: float, power: float
) -> optax.GradientTransformationExtraArgs:
    """Move z by `-rate * direction`, and average z into x with the weights `(t + 1)**r * highest_rate**power`.

    Args:
        direction: transforms the gradients before the learning rate is applied; gets y as the parameters.
        factor: number of finished steps -> factor of the learning rate.
    """

    def init(params):
        zero = jnp.zeros(())
        fast = jax.tree.map(jnp.copy, params)  # params and state are both donated, so they cannot share buffers
        return ScheduleFreeState(jnp.zeros((), jnp.int32), zero, jnp.copy(zero), fast, direction.init(params))

    def update(updates, state, params, *, learning_rate, **extra):
        del extra
        rate = learning_rate * factor(state.count)
        directed, successor = direction.update(updates, state.direction, point(b1, params, state))
        fast = jax.tree.map(lambda z, d: z - rate * d, state.fast, directed)
        highest = jnp.maximum(state.highest, rate)
        weight = (state.count + 1.0) ** r * highest**power
        weights = state.weights + weight
        new = jnp.where(weights > 0, weight / jnp.where(weights > 0, weights, 1.0), 0.0)
        moved = jax.tree.map(lambda x, z: new * (z - x), params, fast)
        return moved, ScheduleFreeState(state.count + 1, weights, highest, fast, successor)

    return optax.GradientTransformationExtraArgs(init, update)


def over_root_mean_square(b2: float, eps: float) -> optax.GradientTransformation:
    """Adam without the first moment, which is replaced by the average x."""

    def init(params):
        return RunningState(jnp.zeros((), jnp.int32), {"squares": jax.tree.map(jnp.zeros_like, params)})

    def update(updates, state, params=None):
        del params
        count = optax.safe_increment(state.count)
        squares = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * jnp.square(g), state.averages["squares"], updates)
        second = bias(b2, count)
        updates = jax.tree.map(lambda g, v: g / (jnp.sqrt(v / second) + eps), updates, squares)
        return updates, RunningState(count, {"squares": squares})

    return optax.GradientTransformation(init, update)


def warm(steps: int) -> Callable[[jax.Array], Any]:
    """A factor that rises from 1 / steps to 1: a warmup inside the optimizer."""
    return lambda count: jnp.minimum((count + 1) / steps, 1.0) if steps else 1.0


def rectified(b2: float) -> Callable[[jax.Array], Any]:
    """RAdam's factor (Liu et al. 2020, arXiv:1908.03265): 0 in the first steps, whose variance is intractable."""
    longest = 2 / (1 - b2) - 1

    def shares(steps, decayed, numbers):
        length = longest - 2 * steps * decayed / (1 - decayed)
        tractable = length > 4
        length = numbers.where(tractable, length, 5.0)
        squared = (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)
        return numbers.where(tractable, numbers.sqrt(squared), 0.0)

    steps = np.arange(1, _TABLE + 1, dtype=np.float64)
    table = shares(steps, b2**steps, np).astype(np.float32)  # the first steps subtract nearly equal numbers

    def share(count):
        later = shares(count + 1.0, 1 - bias(b2, count + 1), jnp)
        return jnp.where(count < _TABLE, jnp.asarray(table)[jnp.minimum(count, _TABLE - 1)], later)

    return share


# transformers' Adafactor. For a matrix, it stores only the mean squares of rows and of columns.


_EPS = 1e-30  # added to squares
_DECAY = 0.8  # step t has the weight t**-0.8 in the running averages
_LARGEST = 1.0  # maximum root mean square of an update


class FactoredState(NamedTuple):
    """Attributes:
    count: number of steps.
    rows: for each of torch's tensors, mean squares of its rows `[..., out]`; for a vector, of each element.
    columns: for each matrix, mean squares of its columns `[..., in]`.
    """

    count: jax.Array
    rows: dict[str, jax.Array]
    columns: dict[str, jax.Array]


def scale_by_adafactor(layout: TorchParamLayout) -> optax.GradientTransformation:
    """Adafactor (Shazeer and Stern 2018, arXiv:1804.04235), without relative steps and parameter scaling.

    As in torch, averages and bounds are per tensor; `layout` says which arrays form a tensor. optax's rule works per
    array instead.
    """

    def init(params):
        tensors = _joined(params, layout)
        matrices = {name: x for name, x in tensors.items() if _is_matrix(name, x, layout)}
        rows = {name: jnp.zeros(x.shape[:-1] if name in matrices else x.shape) for name, x in tensors.items()}
        columns = {name: jnp.zeros((*x.shape[:-2], x.shape[-1])) for name, x in matrices.items()}
        return FactoredState(jnp.zeros((), jnp.int32), rows, columns)

    def update(updates, state, params=None):
        del params
        count = optax.safe_increment(state.count)
        share = count.astype(jnp.float32) ** -_DECAY
        rows, columns, steps = {}, {}, {}
        for name, g in _joined(updates, layout).items():
            square = jnp.square(g) + _EPS
            if name in state.columns:
                rows[name] = _moving_average(state.rows[name], jnp.mean(square, axis=-1), 1 - share, share)
                columns[name] = _moving_average(state.columns[name], jnp.mean(square, axis=-2), 1 - share, share)
                of_row = rows[name] / jnp.mean(rows[name], axis=-1, keepdims=True)
                step = g * jax.lax.rsqrt(of_row)[..., None] * jax.lax.rsqrt(columns[name])[..., None, :]
            else:
                rows[name] = _moving_average(state.rows[name], square, 1 - share, share)
                step = g * jax.lax.rsqrt(rows[name])
            steps[name] = _bounded(step, first=name in layout.stacked)
        return _split(steps, updates, layout), FactoredState(count, rows, columns)

    return optax.GradientTransformation(init, update)


def _bounded(step: jax.Array, first: int) -> jax.Array:
    """Scale to a root mean square of at most _LARGEST over the axes from `first` on."""
    size = jnp.sqrt(jnp.mean(jnp.square(step), axis=tuple(range(first, step.ndim)), keepdims=True))
    return step / jnp.maximum(size / _LARGEST, 1)


def _is_matrix(path: str, array: jax.Array, layout: TorchParamLayout) -> bool:
    return array.ndim - (path in layout.stacked) >= 2


def _axis(path: str, array: jax.Array, layout: TorchParamLayout) -> int:
    """The output axis, along which arrays are concatenated to a torch tensor."""
    return layout.axes.get(path, -2 if _is_matrix(path, array, layout) else -1)


def _members(paths: Iterable[str], layout: TorchParamLayout) -> dict[str, list[str]]:
    """For each of torch's tensors: its first path -> all of its paths."""
    groups: dict[str, list[str]] = {}
    for path in paths:
        groups.setdefault(layout.joined.get(path, path), []).append(path)
    return {paths[0]: paths for paths in groups.values()}


def _joined(arrays: Mapping[str, jax.Array], layout: TorchParamLayout) -> dict[str, jax.Array]:
    fused = {
        name: jnp.concatenate([arrays[path] for path in paths], _axis(name, arrays[name], layout))
        for name, paths in _members(arrays, layout).items()
    }
    return fused | {name: fused[name].reshape(-1, *kernel) for name, kernel in layout.kernels.items() if name in fused}


def _split(
    tensors: Mapping[str, jax.Array], arrays: Mapping[str, jax.Array], layout: TorchParamLayout
) -> dict[str, jax.Array]:
    """Split torch's tensors into arrays of the shapes of `arrays`."""
    parts = {}
    for name, paths in _members(arrays, layout).items():
        axis = _axis(name, arrays[name], layout)
        ends = list(itertools.accumulate(arrays[path].shape[axis] for path in paths))
        tensor = tensors[name]
        if name in layout.kernels:
            tensor = tensor.reshape(len(tensor), -1)
        parts |= dict(zip(paths, jnp.split(tensor, ends[:-1], axis), strict=True))
    return parts


# Update rules as optax transformations, following torch where optax differs.


_CHUNK = 4096  # elements that fit into the L1 cache


class RunningState(NamedTuple):
    """The number of steps, and running averages by name, each a pytree like the parameters."""

    count: jax.Array
    averages: dict[str, Any]


def global_norm(tree: Any) -> jax.Array:
    """The global norm of arrays on one device. On CPUs, this takes a tenth of the time of optax's, is a digit more
    precise, and does not store the squares: it adds rows to rows, while XLA would sum an array element by element."""
    return _norm_by_rows(tree) if platform() == "cpu" else optax.global_norm(tree)


def _norm_by_rows(tree: Any) -> jax.Array:
    leaves = jax.tree.leaves(tree)
    return jnp.sqrt(sum(map(_sum_of_squares, leaves))).astype(jnp.result_type(*leaves))  # optax's result dtype


def _sum_of_squares(x: jax.Array) -> jax.Array:
    rows, dtype = x.reshape(-1, x.shape[-1] if x.ndim else 1), jnp.promote_types(x.dtype, jnp.float32)
    many = min(len(rows), max(1, _CHUNK // rows.shape[1]))
    steps = len(rows) // many

    def squares(some):
        return jnp.square(some.astype(dtype))

    def add(step, sums):
        return sums + squares(jax.lax.dynamic_slice_in_dim(rows, step * many, many))

    sums = jax.lax.fori_loop(0, steps, add, jnp.zeros((many, rows.shape[1]), dtype))
    return jnp.sum(sums) + jnp.sum(squares(rows[steps * many :]))


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformationExtraArgs:
    """torch's clip_grad_norm_: scale by `max_norm / (norm + 1e-6)` if that is below 1.

    optax's version lacks the 1e-6, which changes the seventh digit. Passing `grad_norm` saves computing the norm again.
    """

    def update(updates, state, params=None, *, grad_norm=None, **extra):
        del params, extra
        norm = optax.global_norm(updates) if grad_norm is None else grad_norm
        scale = jnp.minimum(1.0, max_norm / (norm + 1e-6))
        return jax.tree.map(lambda g: g * scale, updates), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def bias(decay: float, count: jax.Array) -> jax.Array:
    """`1 - decay**count` in full precision: computed directly in float32, it loses four of seven digits at first."""
    return -jnp.expm1(count * math.log(decay)) if decay > 0 else jnp.ones(())


def scale_by_adam(
    b1: float, b2: float, eps: float, mu_dtype: str = "float32", nu_dtype: str = "float32"
) -> optax.GradientTransformation:
    """Adam (Kingma and Ba 2015, arXiv:1412.6980) with eps outside the square root and separate dtypes for moments."""

    def init(params):
        mu = jax.tree.map(lambda p: jnp.zeros(p.shape, mu_dtype), params)
        nu = jax.tree.map(lambda p: jnp.zeros(p.shape, nu_dtype), params)
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
    """torch's momentum: gradients are scaled by `1 - dampening` in all steps but the first."""

    def init(params):
        return RunningState(jnp.zeros((), jnp.int32), {"momentum": jax.tree.map(jnp.zeros_like, params)})

    def update(updates, state, params=None):
        del params
        share = jnp.where(state.count == 0, 1.0, 1.0 - dampening)
        trace = jax.tree.map(lambda m, g: momentum * m + share * g, state.averages["momentum"], updates)
        ahead = jax.tree.map(lambda g, m: g + momentum * m, updates, trace) if nesterov else trace
        return ahead, RunningState(optax.safe_increment(state.count), {"momentum": trace})

    return optax.GradientTransformation(init, update)


def scale_by_adagrad(lr_decay: float = 0.0, eps: float = 1e-10) -> optax.GradientTransformation:
    """torch's Adagrad: squares are summed from 0, eps is outside the square root, and `1 + t * lr_decay` divides the
    learning rate."""

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
    """torch's RMSprop: eps is outside the square root; `centered` subtracts the squared mean from the mean square."""

    def init(params):
        zeros = jax.tree.map(jnp.zeros_like, params)
        means = {"mean": jax.tree.map(jnp.copy, zeros)} if centered else {}
        return RunningState(jnp.zeros((), jnp.int32), {"squares": zeros} | means)

    def update(updates, state, params=None):
        del params
        averages = {"squares": _moving_average(state.averages["squares"], jax.tree.map(jnp.square, updates), alpha)}
        squares = averages["squares"]
        if centered:
            averages["mean"] = _moving_average(state.averages["mean"], updates, alpha)
            squares = jax.tree.map(lambda s, m: jnp.maximum(s - jnp.square(m), 0.0), squares, averages["mean"])
        updates = jax.tree.map(lambda g, s: g / (jnp.sqrt(s) + eps), updates, squares)
        return updates, RunningState(optax.safe_increment(state.count), averages)

    return optax.GradientTransformation(init, update)


def scale_by_ademamix(
    b1: float, b2: float, b3: float, alpha: float, eps: float, t_alpha: int | None = None, t_beta3: int | None = None
) -> optax.GradientTransformation:
    """AdEMAMix (Pagliardini et al. 2024, arXiv:2409.03137): Adam with a second, slow momentum of weight `alpha`.

    Over the first `t_alpha` and `t_beta3` steps, alpha rises from 0 and b3 from b1, as in the paper's appendix.
    """

    def init(params):
        averages = {name: jax.tree.map(jnp.zeros_like, params) for name in ("fast", "slow", "squares")}
        return RunningState(jnp.zeros((), jnp.int32), averages)

    def update(updates, state, params=None):
        del params
        count, old = optax.safe_increment(state.count), state.averages
        averages = {
            "fast": _moving_average(old["fast"], updates, b1),
            "slow": _moving_average(old["slow"], updates, _slow_decay(b1, b3, count, t_beta3)),
            "squares": _moving_average(old["squares"], jax.tree.map(jnp.square, updates), b2),
        }
        mix = alpha if t_alpha is None else jnp.minimum(alpha, alpha * count / t_alpha)
        first, second = bias(b1, count), bias(b2, count)
        updates = jax.tree.map(
            lambda fast, slow, squares: (fast / first + mix * slow) / (jnp.sqrt(squares / second) + eps),
            averages["fast"],
            averages["slow"],
            averages["squares"],
        )
        return updates, RunningState(count, averages)

    return optax.GradientTransformation(init, update)


def _slow_decay(b1: float, b3: float, count: jax.Array, steps: int | None) -> jax.Array | float:
    """The slow momentum's decay on its way from b1 to b3, such that the half-life of the average grows linearly."""
    if steps is None:
        return b3
    share = jnp.minimum(count / steps, 1.0)
    start, end = math.log(b1), math.log(b3)
    return jnp.exp(start * end / ((1 - share) * end + share * start))


def _moving_average(average: Any, values: Any, decay: Any, weight: Any = None) -> Any:
    """The exponential moving average after `values`, whose weight is 1 - decay unless it is known more exactly."""
    weight = 1 - decay if weight is None else weight
    return jax.tree.map(lambda a, v: decay * a + weight * v, average, values)
