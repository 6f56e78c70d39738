"""Arguments to optax, with torch's conventions where the two differ."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from trl_jax.core.arguments.optimizers import OPTIMIZERS
from trl_jax.core.torch_param_layout import TorchParamLayout
from trl_jax.engine.adafactor import scale_by_adafactor
from trl_jax.engine.schedule_free import over_root_mean_square, point, rectified, schedule_free, warm
from trl_jax.engine.transforms import (
    clip_by_global_norm,
    scale_by_adagrad,
    scale_by_adam,
    scale_by_ademamix,
    scale_by_rms,
    with_momentum,
)

# transformers' Trainer.get_decay_parameter_names: neither biases nor any kind of norm decay.
_UNDECAYED = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")


def decays(tensor: str) -> bool:
    """Whether weight decay applies to the parameter of this name on disk."""
    return not _UNDECAYED.search(tensor.lower())


def _where_they_are(params: Any, state: Any) -> Any:
    del state
    return params


class Optimizer(NamedTuple):
    """An optax transformation whose `update` takes the `learning_rate` of its step: the schedule stays on the host.

    `point(params, state)` is where the gradient for `update` is taken.
    """

    init: Callable
    update: Callable
    point: Callable[[Any, Any], Any] = _where_they_are


@dataclass(frozen=True)
class Hyperparameters:
    """What the arguments say of an optimiser; `own` is `optim_args`, read; `warmup_steps` is for those that warm up
    by themselves, `cut` for those that look at tensors whole."""

    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    own: dict[str, Any] = field(default_factory=dict)
    warmup_steps: int = 0
    layout: TorchParamLayout = TorchParamLayout()


def _adam(given: Hyperparameters) -> optax.GradientTransformation:
    dtypes = (given.own.get(f"{name}_dtype", "float32") for name in ("momentum", "variance"))
    return scale_by_adam(given.b1, given.b2, given.eps, *dtypes)


def _adafactor(given: Hyperparameters) -> optax.GradientTransformation:
    return scale_by_adafactor(given.layout)


def _sgd(given: Hyperparameters) -> optax.GradientTransformation:
    return with_momentum(**given.own) if given.own.get("momentum") else optax.identity()


def _adagrad(given: Hyperparameters) -> optax.GradientTransformation:
    return scale_by_adagrad(**given.own)


def _rmsprop(given: Hyperparameters) -> optax.GradientTransformation:
    own = dict(given.own)
    momentum = own.pop("momentum", 0.0)
    rms = scale_by_rms(**own)
    return optax.chain(rms, with_momentum(momentum)) if momentum else rms


def _lion(given: Hyperparameters) -> optax.GradientTransformation:
    return optax.scale_by_lion(given.b1, given.b2)


def _ademamix(given: Hyperparameters) -> optax.GradientTransformation:
    own = dict(given.own)
    b1, b2, b3 = own.pop("beta1", given.b1), own.pop("beta2", given.b2), own.pop("beta3", 0.9999)
    return scale_by_ademamix(b1, b2, b3, own.pop("alpha", 5.0), own.pop("eps", given.eps), **own)


_RULES = {
    "adamw": _adam,
    "adafactor": _adafactor,
    "sgd": _sgd,
    "adagrad": _adagrad,
    "rmsprop": _rmsprop,
    "lion": _lion,
    "ademamix": _ademamix,
}
# Of those that need no schedule: the decay of the average, what gradients become, what the rate is multiplied by.
_FREE = {
    "schedule_free_adamw": lambda given: (
        given.b1, over_root_mean_square(given.b2, given.eps), warm(given.warmup_steps)),
    "schedule_free_radam": lambda given: (given.b1, over_root_mean_square(given.b2, given.eps), rectified(given.b2)),
    "schedule_free_sgd": lambda given: (0.9, optax.identity(), warm(given.warmup_steps)),
}  # fmt: skip
_COUPLED = {"sgd", "adagrad", "rmsprop"}  # torch adds their weight decay to the gradient


def make_optimizer(
    name: str, given: Hyperparameters, *, decayed: dict[str, bool], max_grad_norm: float | None
) -> Optimizer:
    """The optimiser that `optim` names: clipping where `max_grad_norm` > 0, its rule, weight decay, the rate.

    Args:
        decayed: for each parameter, whether it decays.
    """
    meant = OPTIMIZERS[name]
    given = replace(given, own=meant.fixed | given.own)
    if meant.kind in _FREE:
        return _schedule_free(meant.kind, given, decayed=decayed, max_grad_norm=max_grad_norm)
    steps = [_RULES[meant.kind](given)]
    if given.weight_decay:
        decay = optax.add_decayed_weights(given.weight_decay, mask=decayed)
        steps.insert(0 if meant.kind in _COUPLED else 1, decay)
    return _chained(steps, max_grad_norm)


def _schedule_free(
    kind: str, given: Hyperparameters, *, decayed: dict[str, bool], max_grad_norm: float | None
) -> Optimizer:
    b1, direction, share = _FREE[kind](given)
    if given.weight_decay:  # where the gradient is taken, after what becomes of it
        direction = optax.chain(direction, optax.add_decayed_weights(given.weight_decay, mask=decayed))
    r, power = given.own.get("r", 0.0), given.own.get("weight_lr_power", 2.0)
    clip = clip_by_global_norm(max_grad_norm) if max_grad_norm else optax.identity()
    chain = optax.chain(clip, schedule_free(direction, share, b1=b1, r=r, power=power))
    return Optimizer(chain.init, chain.update, lambda params, state: point(b1, params, state[1]))


def adamw(
    *, b1: float, b2: float, eps: float, weight_decay: float, decayed: dict[str, bool], max_grad_norm: float | None
) -> Optimizer:
    """torch's AdamW: decoupled decay, eps outside the square root; clipping before it where `max_grad_norm` > 0."""
    given = Hyperparameters(b1, b2, eps, weight_decay)
    return make_optimizer("adamw_torch", given, decayed=decayed, max_grad_norm=max_grad_norm)


def from_optax(tx: optax.GradientTransformation, *, peak: float, max_grad_norm: float | None) -> Optimizer:
    """A user's transformation, which has its rate in it: what it gives is scaled by the schedule's rate over `peak`.

    So does torch's LambdaLR with the rate an optimizer was made with.
    """
    whole = optax.chain(tx, optax.scale(-1.0 / peak))
    return _chained([whole], max_grad_norm)


def _chained(steps: list[optax.GradientTransformation], max_grad_norm: float | None) -> Optimizer:
    clip = [clip_by_global_norm(max_grad_norm)] if max_grad_norm else []
    chain = optax.chain(*clip, *steps, _scale_by_given_learning_rate())
    return Optimizer(chain.init, chain.update)


def _scale_by_given_learning_rate() -> optax.GradientTransformationExtraArgs:
    """Multiplies by minus the `learning_rate` handed to `update`."""

    def update(updates, state, params=None, *, learning_rate, **extra):
        del params, extra
        return jax.tree.map(lambda u: -learning_rate * u, updates), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def with_adam_moments(state: Any, count: int, mu: dict[str, jax.Array], nu: dict[str, jax.Array]) -> Any:
    """The state of `adamw` with these moments in it, as after `count` steps.

    Raises:
        ValueError: it is another optimiser's.
    """
    found = []

    def moments(node):
        if not isinstance(node, optax.ScaleByAdamState):
            return node
        found.append(node)
        return optax.ScaleByAdamState(jnp.asarray(count, jnp.int32), mu, nu)

    filled = jax.tree.map(moments, state, is_leaf=lambda node: isinstance(node, optax.ScaleByAdamState))
    if not found:
        raise ValueError("The checkpoint holds AdamW's moments, but optim names another rule. Resume with adamw_torch.")
    return filled
