"""Builds the optimizer that the arguments name from optax, with torch's conventions where the two differ."""

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
from trl_jax.engine.optimizers.adafactor import scale_by_adafactor
from trl_jax.engine.optimizers.schedule_free import over_root_mean_square, point, rectified, schedule_free, warm
from trl_jax.engine.optimizers.transforms import (
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

    Attributes:
        point: (params, state) -> the parameters at which the gradient for `update` is taken.
        safe_rate: a learning rate up to which a finite gradient always gives a finite update. Without one, the step
            checks each update, which costs a pass over the parameters.
    """

    init: Callable
    update: Callable
    point: Callable[[Any, Any], Any] = _where_they_are
    safe_rate: float | None = None


@dataclass(frozen=True)
class Hyperparameters:
    """The arguments of an optimizer; rules take those they know.

    Attributes:
        optim_args: the argument of this name, parsed.
        warmup_steps: for rules that warm up by themselves.
        layout: of the tensors that torch's rules see, for those that look at whole tensors.
    """

    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    optim_args: dict[str, Any] = field(default_factory=dict)
    warmup_steps: int = 0
    layout: TorchParamLayout = TorchParamLayout()


def _adam(hyper: Hyperparameters) -> optax.GradientTransformation:
    dtypes = (hyper.optim_args.get(f"{name}_dtype", "float32") for name in ("momentum", "variance"))
    return scale_by_adam(hyper.b1, hyper.b2, hyper.eps, *dtypes)


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
# Schedule-free rules: the decay of the average, the transformation of gradients, the factor of the rate.
_SCHEDULE_FREE = {
    "schedule_free_adamw": lambda hyper: (
        hyper.b1, over_root_mean_square(hyper.b2, hyper.eps), warm(hyper.warmup_steps)),
    "schedule_free_radam": lambda hyper: (hyper.b1, over_root_mean_square(hyper.b2, hyper.eps), rectified(hyper.b2)),
    "schedule_free_sgd": lambda hyper: (0.9, optax.identity(), warm(hyper.warmup_steps)),
}  # fmt: skip
_COUPLED = {"sgd", "adagrad", "rmsprop"}  # torch adds their weight decay to the gradient


def make_optimizer(
    name: str, hyper: Hyperparameters, *, decayed: dict[str, bool], max_grad_norm: float | None
) -> Optimizer:
    """Build the optimizer that `optim` names: clipping where `max_grad_norm` > 0, its rule, weight decay, the rate.

    Args:
        decayed: for each parameter, whether it decays.
    """
    named = OPTIMIZERS[name]
    hyper = replace(hyper, optim_args=named.fixed | hyper.optim_args)
    if named.kind in _SCHEDULE_FREE:
        return _schedule_free(named.kind, hyper, decayed=decayed, max_grad_norm=max_grad_norm)
    steps = [_RULES[named.kind](hyper)]
    if hyper.weight_decay:
        decay = optax.add_decayed_weights(hyper.weight_decay, mask=decayed)
        steps.insert(0 if named.kind in _COUPLED else 1, decay)
    return _chained(steps, max_grad_norm, _safe_rate_of_adam(hyper) if named.kind == "adamw" else None)


def _safe_rate_of_adam(hyper: Hyperparameters) -> float | None:
    """With these betas and epsilon, |mean / (root of square + epsilon)| is at most |gradient| / epsilon. A gradient
    with a finite norm is below 2e19, so that the update is finite in float32 up to this rate."""
    return 1e3 if max(hyper.b1, hyper.b2) < 1 and hyper.eps >= 1e-16 else None


def _schedule_free(
    kind: str, hyper: Hyperparameters, *, decayed: dict[str, bool], max_grad_norm: float | None
) -> Optimizer:
    b1, direction, factor = _SCHEDULE_FREE[kind](hyper)
    if hyper.weight_decay:  # of the point where the gradient is taken, behind the gradient's transformation
        direction = optax.chain(direction, optax.add_decayed_weights(hyper.weight_decay, mask=decayed))
    r, power = hyper.optim_args.get("r", 0.0), hyper.optim_args.get("weight_lr_power", 2.0)
    clip = clip_by_global_norm(max_grad_norm) if max_grad_norm else optax.identity()
    chain = optax.chain(clip, schedule_free(direction, factor, b1=b1, r=r, power=power))
    return Optimizer(chain.init, chain.update, lambda params, state: point(b1, params, state[1]))


def from_optax(tx: optax.GradientTransformation, *, peak: float, max_grad_norm: float | None) -> Optimizer:
    """A user's transformation, which contains its rate: its updates are scaled by the schedule's rate over `peak`.

    torch's LambdaLR scales the rate with which an optimizer was made in the same way.
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
    """Multiplies by minus the `learning_rate` handed to `update`."""

    def update(updates, state, params=None, *, learning_rate, **extra):
        del params, extra
        return jax.tree.map(lambda u: -learning_rate * u, updates), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def with_adam_moments(state: Any, count: int, mu: dict[str, jax.Array], nu: dict[str, jax.Array]) -> Any:
    """AdamW's state with these moments in it, as after `count` steps.

    Raises:
        ValueError: `state` is another optimizer's.
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
