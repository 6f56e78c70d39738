"""Choose the optimizer: by name, an optax transformation, or the equivalent of a torch class."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import optax

from trl_jax.config.base import BaseConfig
from trl_jax.config.optimizers import OPTIMIZERS, parse_optim_args
from trl_jax.config.rules import as_dict, plain
from trl_jax.core.torch_random import TorchParamLayout
from trl_jax.hub.torch_state import check_unused, is_torch_optimizer, param_groups, rates_of
from trl_jax.training.optimizers import Hyperparameters, Optimizer, from_optax, make_optimizer
from trl_jax.training.schedules import ADAPTIVE, Plateau, learning_rates

# The optimizer as callbacks see it: with torch's `param_groups`, whose `lr` a script may read and set.


class ShownOptimizer(Optimizer):
    """An optimizer with `param_groups`: two mappings as in transformers, or one for each group of a torch optimizer."""

    param_groups: list[ParamGroup]
    choice: OptimizerChoice

    @classmethod
    def of(cls, tx: Optimizer, choice: OptimizerChoice, rates: LearningRate) -> ShownOptimizer:
        """
        Args:
            rates: where the groups read and set their `lr`.
        """
        optimizer, hyper = cls(*tx), choice.hyperparameters or Hyperparameters()
        optimizer.choice = choice
        defaults = {"betas": (hyper.b1, hyper.b2), "eps": hyper.eps}
        groups = choice.groups or (Group(hyper.weight_decay), *(Group(0.0) for _ in range(GROUPS - 1)))
        optimizer.param_groups = [
            ParamGroup(
                rates,
                number,
                defaults | {"initial_lr": choice.peak * group.factor, "weight_decay": group.weight_decay},
                group.factor,
            )
            for number, group in enumerate(groups)
        ]
        return optimizer

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in ("choice", "param_groups"):
            raise AttributeError(
                f"optimizer.{name} was set, which no step reads: the step is compiled. Change gradients in the loss, "
                "weights in a TrainerCallback, or pass an optax transformation as in optimizers=(optax.sgd(1.0), None)."
            )
        super().__setattr__(name, value)


class ParamGroup(MutableMapping):
    """One of torch's parameter groups. `lr` is the rate of the next step. Setting it affects that step only, as in
    torch, where the scheduler then sets it again.

    Raises:
        ValueError: any other key is set.
    """

    def __init__(self, rates: LearningRate, number: int, options: dict[str, Any], factor: float):
        self._rates, self._number, self._options, self._factor = rates, number, options, factor

    def __getitem__(self, name: str) -> Any:
        return self._rates.of_group(self._number) * self._factor if name == "lr" else self._options[name]

    def __setitem__(self, name: str, value: Any) -> None:
        if name == "lr" and not self._factor:
            raise ValueError(f"param_groups[{self._number}]['lr'] was set, but the group was made with lr=0.")
        if name == "lr":
            self._rates.set_for_group(self._number, float(value) / self._factor)
        elif name not in self._options or self._options[name] != value:
            raise ValueError(
                f"param_groups[{self._number}][{name!r}] cannot be set: once the step is compiled, only 'lr' is "
                "read again. Set it in the arguments."
            )

    def __delitem__(self, name: str) -> None:
        raise ValueError(f"param_groups[{self._number}][{name!r}] cannot be deleted.")

    def __iter__(self) -> Iterator[str]:
        return iter(("lr", *self._options))

    def __len__(self) -> int:
        return 1 + len(self._options)


# Choose the optimizer: one named by the arguments, an optax transformation, or the equivalent of a torch class.


# Class names of torch, transformers and bitsandbytes -> name of the optimizer in `optim`.
_CLASSES = {
    "AdamW": "adamw_torch", "Adam": "adamw_torch", "SGD": "sgd", "Adagrad": "adagrad", "RMSprop": "rmsprop",
    "Adafactor": "adafactor", "Lion": "lion_32bit",
}  # fmt: skip
_KERNELS = ("fused", "foreach", "capturable", "differentiable", "maximize", "is_paged", "optim_bits")
GROUPS = 2  # parameter groups in transformers: with and without weight decay
_SHOW = "optimizers=(optax.adamw(1e-4), None)"


@dataclass(frozen=True)
class Group:
    """A parameter group of the torch optimizer that a script passes.

    factor: its learning rate, relative to the first group's.
    names: of its parameters in torch.
    """

    weight_decay: float
    factor: float = 1.0
    names: frozenset[str] = frozenset()


@dataclass(frozen=True)
class OptimizerChoice:
    """The optimizer and the schedule of a run. Either name and hyperparameters are set, or tx.

    peak: the highest learning rate.
    name: of a built-in optimizer, as in `optim`.
    hyperparameters: of the built-in optimizer.
    tx: an optax transformation.
    schedule: step -> learning rate; None uses the schedule of the arguments.
    groups: parameter groups of a torch optimizer, with their learning rates and weight decay; empty for others.
    """

    peak: float
    name: str | None = None
    hyperparameters: Hyperparameters | None = None
    tx: optax.GradientTransformation | None = None
    schedule: Callable[[int], float] | None = None
    groups: tuple[Group, ...] = ()

    def make(
        self,
        decayed: dict[str, Any],
        layout: TorchParamLayout,
        max_grad_norm: float | None,
        warmup_steps: int,
        factors: dict[str, Any] | None = None,
    ) -> Optimizer | optax.GradientTransformation:
        """Build the optimizer.

        Args:
            decayed: parameter path -> whether it has weight decay; with factors, its weight decay.
            factors: parameter path -> factor of its learning rate.
        """
        if self.tx is not None:
            return from_optax(self.tx, peak=self.peak, max_grad_norm=max_grad_norm)
        hyperparameters = replace(self.hyperparameters, warmup_steps=warmup_steps, layout=layout)
        return make_optimizer(self.name, hyperparameters, decayed=decayed, max_grad_norm=max_grad_norm, factors=factors)

    def rates(self, args: BaseConfig, max_steps: int) -> Callable[[int], float]:
        """The schedule: number of finished steps -> rate of the next step. A `Plateau` also observes a metric."""
        if self.schedule is not None:
            return lambda step: float(self.schedule(step))
        name, kwargs = plain(args.lr_scheduler_type), as_dict("lr_scheduler_kwargs", args.lr_scheduler_kwargs)
        if name in ADAPTIVE:
            return ADAPTIVE[name](self.peak, **kwargs)
        warmup = args.get_warmup_steps(max_steps)
        return learning_rates(name, peak=self.peak, warmup_steps=warmup, max_steps=max_steps, kwargs=kwargs)


def choose(args: BaseConfig, optimizers: Any, cls_and_kwargs: Any, torch_model: Any = None) -> OptimizerChoice:
    """Choose from the constructor's `optimizers` or `optimizer_cls_and_kwargs`, or else from `args.optim`.

    Args:
        torch_model: the torch model that is trained, if there is one; `optimizers` may have its parameters.

    Raises:
        TypeError, ValueError: an optimizer or schedule is not supported, or a class does not accept its arguments.
    """
    tx, schedule = optimizers
    if tx is None and schedule is not None:
        raise ValueError(f"optimizers=(None, schedule): a schedule comes with its optimizer, as in {_SHOW}.")
    if tx is not None and cls_and_kwargs is not None:
        raise ValueError("optimizers and optimizer_cls_and_kwargs both name an optimizer. Leave one out.")
    if cls_and_kwargs is not None:
        return _of_class(args, *cls_and_kwargs)
    if tx is None:
        options = parse_optim_args(plain(args.optim), args.optim_args)
        return OptimizerChoice(args.learning_rate, plain(args.optim), _hyperparameters(args, options))
    if torch_model is not None and is_torch_optimizer(tx):
        return of_torch(tx, schedule, torch_model)
    check_optax(tx)
    if schedule is not None and (not callable(schedule) or _root(type(schedule)) in ("torch", "transformers")):
        raise TypeError(
            f"optimizers: the schedule is a {_full_name(type(schedule))}; expected a function of the step, as in "
            "optax.linear_schedule(1e-4, 0.0, 1000), which scales what the optimizer gives."
        )
    return OptimizerChoice(args.learning_rate or 1.0 if schedule is None else 1.0, tx=tx, schedule=schedule)


def check_optax(tx: Any) -> None:
    """Raise TypeError unless `tx` is an optax transformation."""
    if not isinstance(tx, optax.GradientTransformation):
        raise TypeError(
            f"optimizers: a {_full_name(type(tx))} cannot update JAX arrays; pass an optax transformation, as in "
            f"{_SHOW}, or name the optimizer by the config's optim. torch's AdamW, Adam and SGD are accepted with "
            "the parameters of the torch model that is passed as model, or from create_optimizer with self.model's."
        )


_OF_GROUPS = ("lr", "initial_lr", "weight_decay")  # entries that may differ between parameter groups
_NOT_HERE = ("amsgrad", "maximize")


def of_torch(optimizer: Any, scheduler: Any, *models: Any) -> OptimizerChoice:
    """The equivalent of a torch optimizer over the parameters of one of these models, and of its scheduler.

    Raises:
        TypeError, ValueError: it is not AdamW, Adam without weight decay, or SGD, or one of their options is not
            supported, or it has other parameters.
    """
    groups, kind = param_groups(optimizer, *models), type(optimizer)
    if _full_name(kind) not in ("torch.optim.adamw.AdamW", "torch.optim.adam.Adam", "torch.optim.sgd.SGD"):
        check_optax(optimizer)
    if not any(group.names for group in groups):
        raise ValueError(
            f"optimizers: no parameter of the {kind.__name__} belongs to the model that is trained. Create it with "
            "model.parameters() of the model that is passed, after changes such as get_peft_model(model, ...)."
        )
    if foreign := [(number, group.foreign) for number, group in enumerate(groups) if group.foreign]:
        number, count = foreign[0]
        raise ValueError(
            f"optimizers: {count} parameters of group {number} of the {kind.__name__} do not belong to the model that "
            "is trained, and no step would change them. Leave them out."
        )
    check_unused(optimizer)
    first = groups[0].options
    shared = {key: value for key, value in first.items() if key not in _OF_GROUPS}
    for key in shared:
        if any(group.options[key] != first[key] for group in groups):
            raise ValueError(f"optimizers: the parameter groups differ in {key}; only lr and weight_decay may differ.")
        if key in _NOT_HERE and first[key]:
            raise ValueError(f"optimizers: {kind.__name__}({key}=True) is not supported. Leave it out.")
    rates = [float(group.options.get("initial_lr", group.options["lr"])) for group in groups]
    decays = [float(group.options["weight_decay"]) for group in groups]
    if not shared.get("decoupled_weight_decay", True) and any(decays):
        raise ValueError("optimizers: Adam with weight_decay adds it to the gradient; use AdamW, or weight_decay=0.")
    if not rates[0]:
        raise ValueError("optimizers: the first parameter group has lr=0. Put a group that trains first.")
    b1, b2 = shared.get("betas", (0.9, 0.999))
    momentum = {key: shared[key] for key in ("momentum", "dampening", "nesterov") if key in shared}
    return OptimizerChoice(
        rates[0],
        "sgd" if momentum else "adamw_torch",
        Hyperparameters(b1, b2, shared.get("eps", 1e-8), decays[0], momentum),
        schedule=None if scheduler is None else rates_of(scheduler, optimizer),
        groups=tuple(
            Group(decay, rate / rates[0], group.names) for group, rate, decay in zip(groups, rates, decays, strict=True)
        ),
    )


def _of_class(args: BaseConfig, cls: Any, kwargs: dict[str, Any]) -> OptimizerChoice:
    if _root(cls) not in ("torch", "transformers", "bitsandbytes"):
        optimizer = cls(**kwargs)
        check_optax(optimizer)
        return OptimizerChoice(args.learning_rate or 1.0, tx=optimizer)
    if cls.__name__ not in _CLASSES or (cls.__name__ == "Adam" and args.weight_decay):
        raise ValueError(
            f"optimizer_cls_and_kwargs: {_full_name(cls)} is not supported; supported optimizers of torch: "
            f"{', '.join(_CLASSES)} (Adam without weight decay). Or pass an optax factory and its arguments."
        )
    name, options = _CLASSES[cls.__name__], {key: value for key, value in kwargs.items() if key not in _KERNELS}
    b1, b2 = options.pop("betas", (args.adam_beta1, args.adam_beta2))
    eps, peak = options.pop("eps", 1e-8), options.pop("lr", 1e-3)
    if name in ("adagrad", "rmsprop"):
        options["eps"] = eps if "eps" in kwargs else {"adagrad": 1e-10, "rmsprop": 1e-8}[name]
    if name == "adafactor":
        _check_adafactor(options)
    if options.pop("weight_decay", args.weight_decay) != args.weight_decay:
        raise ValueError(
            f"optimizer_cls_and_kwargs: weight_decay={kwargs['weight_decay']}, but the trainer groups parameters by "
            f"args.weight_decay={args.weight_decay}, which wins in TRL too. Set weight_decay in the config."
        )
    if unknown := sorted(options.keys() - OPTIMIZERS[name].takes.keys()):
        raise ValueError(f"optimizer_cls_and_kwargs: {cls.__name__} does not take {', '.join(unknown)} here.")
    return OptimizerChoice(peak, name, Hyperparameters(b1, b2, eps, args.weight_decay, options))


def _check_adafactor(options: dict[str, Any]) -> None:
    for key in ("scale_parameter", "relative_step"):
        if options.pop(key, True):
            raise ValueError(f"optimizer_cls_and_kwargs: Adafactor is built here with {key}=False only. Set it so.")


def _hyperparameters(args: BaseConfig, options: dict[str, Any]) -> Hyperparameters:
    return Hyperparameters(args.adam_beta1, args.adam_beta2, args.adam_epsilon, args.weight_decay, options)


def _root(kind: Any) -> str:
    return kind.__module__.partition(".")[0]


def _full_name(kind: Any) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


class LearningRate:
    """The run's schedule, like torch's `lr_scheduler`.

    `finished` returns the number of finished steps. `factors` are the learning rates of the parameter groups, relative
    to the run's.
    """

    def __init__(
        self, rate: Callable[[int], float], finished: Callable[[], int], factors: Sequence[float] = (1.0,) * GROUPS
    ):
        self._rate, self._finished, self._factors = rate, finished, factors
        self._start = 0  # step of the run at which the schedule starts
        self._last_taken = -1  # the step whose rate was taken last
        self._override_step, self._overrides = -1, {}  # a step, and the rates that a script set for it, by group

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_"):
            raise AttributeError(
                f"lr_scheduler.{name} was set, which no step reads. Set the schedule in the arguments, or set 'lr' in "
                "every one of optimizer.param_groups before a step."
            )
        super().__setattr__(name, value)

    def __call__(self, step: int) -> float:
        """The learning rate of the step after `step` finished ones."""
        return self._rate(max(step - self._start, 0))

    def begin_at(self, step: int) -> None:
        """Start the schedule after this many steps of the run, where the optimizer was restarted. A negative number
        continues the schedule of an earlier run with so many steps."""
        self._start = step

    def get_last_lr(self) -> list[float]:
        """The learning rate of the next step for each group, as in transformers' Trainer after a step."""
        return [self(self._finished()) * factor for factor in self._factors]

    @property
    def last_epoch(self) -> int:
        """Number of steps since the schedule started, as in torch."""
        return self._finished() - self._start

    def of_group(self, number: int) -> float:
        """The learning rate of a parameter group in the next step, divided by the group's factor."""
        step = self._finished()
        if self._override_step == step and number in self._overrides:
            return self._overrides[number]
        return self(step)

    def set_for_group(self, number: int, rate: float) -> None:
        """Override the schedule's rate, which the group's factor multiplies, in the next step only.

        Raises:
            ValueError: the step was already taken, or the schedule follows a metric.
        """
        step = self._finished()
        if self._last_taken == step or isinstance(self._rate, Plateau):
            raise ValueError(
                "param_groups: lr was set where it has no effect. Set it in on_step_begin or on_step_end, with a "
                "schedule that is a function of the step."
            )
        if self._override_step != step:
            self._override_step, self._overrides = step, {}
        self._overrides[number] = rate

    def take_next(self, groups: int) -> float:
        """Return the learning rate of the next step, and mark that step as taken.

        Args:
            groups: number of parameter groups.

        Raises:
            ValueError: the groups' rates are not in the ratio of their factors.
        """
        rates = [self.of_group(number) for number in range(groups)]
        self._last_taken = self._finished()
        if any(not math.isclose(rate, rates[0], rel_tol=1e-12) for rate in rates):
            raise ValueError(
                "param_groups: lr was set to "
                f"{[rate * factor for rate, factor in zip(rates, self._factors, strict=True)]}, and the ratio between "
                f"the groups is fixed here: {list(self._factors)}. Set the lr of every group."
            )
        return rates[0]

    def after_evaluation(self, metrics: dict[str, float], metric_for_best_model: str | None) -> None:
        """Pass the metric of this name to a schedule that follows one.

        Raises:
            KeyError: the evaluation did not report this metric.
        """
        if not isinstance(self._rate, Plateau):
            return
        name = f"eval_{str(metric_for_best_model).removeprefix('eval_')}"
        if name not in metrics:
            raise KeyError(f"metric_for_best_model: {name!r} is not one of {', '.join(metrics)}.")
        self._rate.observe(float("nan") if metrics[name] is None else metrics[name])

    def state_dict(self) -> dict[str, Any]:
        """The state as JSON values; empty unless the schedule was restarted or follows a metric."""
        state = self._rate.state() if isinstance(self._rate, Plateau) else {}
        return state | ({"first": self._start} if self._start else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._start = state.get("first", 0)
        if isinstance(self._rate, Plateau):
            self._rate.restore({name: value for name, value in state.items() if name != "first"})
