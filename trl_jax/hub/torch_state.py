"""torch's optimizers, schedulers, data loaders and random generators.

A script passes or seeds them, and TRL's checkpoints contain the states of optimizers and generators.
"""

from __future__ import annotations

import copy
import math
import shutil
import sys
import warnings
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import save_file

from trl_jax.core import text
from trl_jax.core.text import brief
from trl_jax.core.torch_random import GeneratorState, TorchGenerator, default_generator
from trl_jax.hub.formats import SINGLE
from trl_jax.hub.heads import HeadName
from trl_jax.hub.peft_config import CONFIG as ADAPTER
from trl_jax.hub.peft_config import VECTORS, WEIGHTS
from trl_jax.hub.torch_bridge import auto_class, function_name

# Optimizer states saved by torch, which is only imported to read one


OPTIMIZER = "optimizer.pt"  # of transformers' Trainer


def write_adamw_moments(
    checkpoint: Path, folder: Path, config: Any, head: HeadName, decays: Callable[[str], bool]
) -> int:
    """Write the moments in a Trainer checkpoint to `folder`/mu and `folder`/nu as weight files, which `Backend.load`
    reads.

    torch numbers an optimizer's tensors. Their names follow from the order of the model's parameters, with those that
    have weight decay first. For an adapter, peft is needed to know that order.

    Args:
        config: transformers' config object of the model, or of an adapter's base model.
        head: the model's head.

    Returns:
        The number of steps that AdamW has taken.

    Raises:
        ValueError: the file is not an AdamW state for this model, or cannot be read without running code.
    """
    saved = _read(checkpoint / OPTIMIZER)
    names, files = _parameter_names(checkpoint, config, head), (checkpoint / ADAPTER, checkpoint / "config.json")
    described, weights = (files[0], WEIGHTS) if files[0].is_file() else (files[1], SINGLE)
    groups = [[name for name in names if decays(name)], [name for name in names if not decays(name)]]
    groups = [group for group in groups if group]
    try:
        sizes = [len(group["params"]) for group in saved["param_groups"] if group["params"]]
        states = [saved["state"][index] for index in range(len(names))]
        parts = {"mu": "exp_avg", "nu": "exp_avg_sq"}
        moments = {part: [state[key].float().contiguous().numpy() for state in states] for part, key in parts.items()}
        [count] = {int(state["step"]) for state in states}
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        reason = brief(error, 300)
        raise ValueError(f"{checkpoint / OPTIMIZER} is not an AdamW state for this model: {reason}.") from error
    if sizes != [len(group) for group in groups]:
        raise ValueError(
            f"{checkpoint / OPTIMIZER} has groups of {sizes} tensors, but the model {[len(group) for group in groups]}."
        )
    order = [name for group in groups for name in group]
    for part, values in moments.items():
        (folder / part).mkdir()
        shutil.copy(described, folder / part)
        save_file({_on_disk(name): value for name, value in zip(order, values, strict=True)}, folder / part / weights)
    return count


def _read(path: Path) -> Any:
    import torch

    try:
        with text.out_of_memory_names(path):
            return torch.load(path, map_location="cpu", weights_only=True)  # does not run code from the file
    except MemoryError:
        raise
    except Exception as error:  # torch.load raises many types of errors for a damaged file
        said = " ".join([f"{type(error).__name__}:", *str(error).splitlines()[:1]])
        raise ValueError(
            f"{path} ({path.stat().st_size:,} bytes) cannot be read ({said[:200]}). Copy it again, or pass the folder "
            "as model= to start a new run from its weights."
        ) from error


def _parameter_names(checkpoint: Path, config: Any, head: HeadName) -> list[str]:
    """The names of the trained parameters in torch's order."""
    import torch

    with torch.device("meta"):
        model = auto_class(head).from_config(config, attn_implementation="eager", trust_remote_code=False)
        if (checkpoint / ADAPTER).is_file():
            model = _adapted(model, checkpoint)
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def _adapted(model: Any, checkpoint: Path) -> Any:
    from peft import PeftConfig, get_peft_model

    config = PeftConfig.from_pretrained(checkpoint)
    config.inference_mode = config.init_lora_weights = False  # no need to initialize values
    config.prompt_tuning_init = "RANDOM"
    return get_peft_model(model, config)


def _on_disk(name: str) -> str:
    """The name under which PEFT saves an adapter's parameter; other names are unchanged."""
    if name == "prompt_encoder.default.embedding.weight":
        return VECTORS
    name = name.replace("lora_magnitude_vector.default.weight", "lora_magnitude_vector")
    return name.replace(".modules_to_save.default", "").replace(".default", "")


# Optimizers and schedulers that a script passes


class ParamGroup(NamedTuple):
    """A parameter group of a torch optimizer.

    names: of its parameters in the model.
    options: its other entries.
    foreign: number of parameters that are not the model's.
    """

    names: frozenset[str]
    options: dict[str, Any]
    foreign: int


def is_torch_optimizer(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.optim.Optimizer)


def optimizer_class(args: Any) -> tuple[type, dict[str, Any]]:
    """The torch class of `args.optim`, and its arguments, as transformers' Trainer chooses them."""
    from transformers import Trainer
    from transformers.training_args import OptimizerNames

    chosen = copy.copy(args)
    vars(chosen)["optim"] = OptimizerNames(args.optim)
    return Trainer.get_optimizer_cls_and_kwargs(chosen)


def param_groups(optimizer: Any, *models: Any) -> list[ParamGroup]:
    """The groups of a torch optimizer that has parameters of these models, which have the same names."""
    names: dict[int, list[str]] = {}
    for name, parameter in chain.from_iterable(model.named_parameters(remove_duplicate=False) for model in models):
        names.setdefault(id(parameter), []).append(name)
    return [
        ParamGroup(
            frozenset(name for parameter in group["params"] for name in names.get(id(parameter), ())),
            {key: value for key, value in group.items() if key not in ("params", "param_names")},
            sum(id(parameter) not in names for parameter in group["params"]),
        )
        for group in optimizer.param_groups
    ]


def check_unused(optimizer: Any) -> None:
    """Raise ValueError for a torch optimizer with hooks, with a `step` of the script or with averages of earlier steps,
    which JAX would ignore."""
    step = vars(optimizer).get("step", type(optimizer).step)
    if "_wrapped_by_lr_sched" in dir(step):  # a scheduler notes in it that it was called
        step = step.__wrapped__
    if step is not type(optimizer).step:
        raise ValueError(
            f"optimizers: the step of the {type(optimizer).__name__} was replaced by the script's "
            f"{function_name(step)}, which would never be called. Use a TrainerCallback, or an optax transformation."
        )
    hooks = [*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values()]
    if hooks:
        raise ValueError(
            f"optimizers: the {type(optimizer).__name__} has a hook of the script, {function_name(hooks[0])}, which "
            "would never be called. Use a TrainerCallback."
        )
    if any(value is not None for averages in optimizer.state.values() for value in averages.values()):
        raise ValueError(
            f"optimizers: the {type(optimizer).__name__} has taken steps, and its state is not read. "
            "Create a new optimizer, or resume with train(resume_from_checkpoint=...)."
        )


def rates_of(scheduler: Any, optimizer: Any) -> Callable[[int], float]:
    """Number of finished steps -> the learning rate that a torch scheduler gives the first parameter group.

    Raises:
        TypeError: it is not a scheduler whose rates depend on the step only, and are the same multiple of each group's
            learning rate.
        ValueError: it is the scheduler of another optimizer.
    """
    from torch.optim import lr_scheduler as schedulers

    if isinstance(scheduler, schedulers.LRScheduler) and scheduler.optimizer is not optimizer:
        raise ValueError(
            f"optimizers: the {type(scheduler).__name__} was made for another optimizer, whose learning rate it sets. "
            "Make it for the optimizer that is passed with it."
        )
    if replaced := [name for name in ("step", "get_lr", "get_last_lr") if name in vars(scheduler)]:
        raise ValueError(
            f"optimizers: {replaced[0]} of the {type(scheduler).__name__} was replaced by the script, which would "
            "never be called. Use a LambdaLR with one function for all groups."
        )
    first = _rate_of_first_step(scheduler, optimizer)
    if type(scheduler) is schedulers.LambdaLR:
        base, factor, done = float(scheduler.base_lrs[0]), scheduler.lr_lambdas[0], scheduler.last_epoch
        if all(fn is factor for fn in scheduler.lr_lambdas):
            return lambda step: base * factor(done + step) if step else first
    if not all(map(_can_be_replayed, _parts_of(scheduler))):
        raise TypeError(
            f"optimizers: the scheduler is a {type(scheduler).__module__}.{type(scheduler).__qualname__}; supported "
            "are transformers' schedules, such as get_cosine_schedule_with_warmup(...), a LambdaLR with one function "
            f"for all groups, and, if all groups have the same learning rate, {', '.join(_REPLAYED)}, and SequentialLR "
            "of these. Or pass a function of the step, as in optimizers=(optax.adamw(1.0), lambda step: 1e-4)."
        )
    replayed, rates = _with_optimizer_of_its_own(scheduler), [first]

    def rate(step: int) -> float:
        while len(rates) <= step:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that the scheduler is ahead of its optimizer
                replayed.step()
            rates.append(float(replayed.get_last_lr()[0]))
        return rates[step]

    return rate


_REPLAYED = (
    "StepLR", "MultiStepLR", "ConstantLR", "LinearLR", "ExponentialLR", "PolynomialLR", "CosineAnnealingLR",
    "CosineAnnealingWarmRestarts",
)  # fmt: skip


def _parts_of(scheduler: Any) -> list[Any]:
    """The schedulers that a SequentialLR consists of; any other scheduler by itself."""
    from torch.optim import lr_scheduler as schedulers

    if type(scheduler) is not schedulers.SequentialLR:
        return [scheduler]
    return [part for child in scheduler._schedulers for part in _parts_of(child)]


def _can_be_replayed(scheduler: Any) -> bool:
    """Whether a scheduler's rates depend on the step only and are the same for all groups."""
    from torch.optim import lr_scheduler as schedulers

    if len(set(getattr(scheduler, "base_lrs", ()))) > 1:
        return False
    if type(scheduler) is schedulers.LambdaLR:
        return all(function is scheduler.lr_lambdas[0] for function in scheduler.lr_lambdas)
    return type(scheduler) in {getattr(schedulers, name) for name in _REPLAYED}


def _rate_of_first_step(scheduler: Any, optimizer: Any) -> float:
    """The `lr` of the first parameter group: torch's first step takes it as it is, also if the script set it later.

    Raises:
        ValueError: the groups' rates are not the same multiples of their initial ones.
    """
    groups = optimizer.param_groups
    initial = [float(group.get("initial_lr", group["lr"])) for group in groups]
    rates = {"lr": [float(group["lr"]) for group in groups]}
    if "base_lrs" in vars(scheduler):
        rates["base_lrs"] = list(map(float, scheduler.base_lrs))
    for name, values in rates.items():
        pairs = zip(values, initial, strict=True)
        if not all(math.isclose(rate * initial[0], values[0] * at_first, rel_tol=1e-9) for rate, at_first in pairs):
            raise ValueError(
                f"optimizers: {name} of the parameter groups is {values} and initial_lr is {initial}. The ratio "
                "between the groups is fixed here: set lr where the optimizer is created, before its scheduler."
            )
    return rates["lr"][0]


def _with_optimizer_of_its_own(scheduler: Any) -> Any:
    """A copy of a torch scheduler whose steps leave the script's optimizer unchanged."""
    import torch

    first = scheduler.optimizer.param_groups[0]
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=float(first["lr"]))
    optimizer.param_groups[0]["initial_lr"] = first["initial_lr"]

    def copied(scheduler: Any) -> Any:
        replayed = copy.copy(scheduler)
        replayed.optimizer = optimizer
        for per_group in {"base_lrs", "lr_lambdas"} & vars(replayed).keys():
            setattr(replayed, per_group, getattr(replayed, per_group)[:1])
        if "_schedulers" in vars(replayed):
            replayed._schedulers = list(map(copied, replayed._schedulers))
        return replayed

    return copied(scheduler)


# Data loaders of a script, and their samplers


def is_data_loader(value: Any) -> bool:
    """Whether `value` is a torch DataLoader, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.utils.data.DataLoader)


def with_seed(sampler: Any, seed: int, *, replaces: bool) -> Any:
    """A copy of torch's RandomSampler with this seed, as accelerate's SeedableRandomSampler is seeded in each epoch;
    other samplers as they are.

    Args:
        replaces: whether the seed replaces the generator of a sampler that has one.
    """
    torch = sys.modules.get("torch")
    if torch is None or type(sampler) is not torch.utils.data.RandomSampler:
        return sampler
    if sampler.generator is not None and not replaces:
        return sampler
    seeded = copy.copy(sampler)
    seeded.generator = torch.Generator()
    seeded.generator.manual_seed(seed)
    return seeded


def draw_base_seed(generator: Any) -> None:
    """Advance a generator as torch's DataLoader does at the start of an epoch, where it draws the seed of workers."""
    import torch

    torch.empty((), dtype=torch.int64).random_(generator=generator)


# torch's random state in a checkpoint, and seeding torch


_WORDS, _LEFT, _NEXT, _FIRST = 624, 8, 16, 24  # words of the Mersenne twister; byte offsets in torch's generator state


def random_state(checkpoint: Path, rank: int, ranks: int) -> GeneratorState | None:
    """The state of torch's CPU generator in one of `ranks` processes; None if the file does not exist."""
    path = checkpoint / ("rng_state.pth" if ranks == 1 else f"rng_state_{rank}.pth")
    if not path.is_file():
        return None
    import torch
    from transformers.trainer_pt_utils import safe_globals

    with safe_globals():
        return place_of(torch.load(path, weights_only=True)["cpu"].numpy())


def seed_if_imported(seed: int) -> None:
    """Seed torch's generators if a script has imported torch and may use them."""
    if "torch" in sys.modules:
        import torch

        torch.manual_seed(seed)
    _note_seeds(default_generator())


_UNSEEDED = 67280421310721  # the seed of torch's global generator before a script seeds it
# How often our stream had been seeded, and the state of torch's global generator, when the two were last compared.
_noted: tuple[int, Any] | None = None


def follow_torch_seed(stream: TorchGenerator) -> None:
    """Continue `stream`, the process-wide one, where torch's global generator is, if a script has seeded the latter and
    not ours since the two were last compared.

    A script that seeds torch with the same seed again is noticed if it has not drawn from it yet: torch's generator
    therefore moves on by one number.
    """
    if "torch" not in sys.modules:
        return
    import torch

    state, seed = torch.get_rng_state(), torch.initial_seed()
    seedings, before = (1, None) if _noted is None else _noted
    if before is not None and torch.equal(state, before):
        return
    saved_seed = _UNSEEDED if before is None else int(np.frombuffer(before.numpy().tobytes(), np.uint64, 1)[0])
    fresh = before is not None and torch.equal(state, torch.Generator().manual_seed(seed).get_state())
    if stream.seedings == seedings and (seed != saved_seed or fresh):
        stream.restore(place_of(state.numpy()))
        torch.rand(1)
    _note_seeds(stream)


def _note_seeds(stream: TorchGenerator) -> None:
    global _noted
    _noted = stream.seedings, sys.modules["torch"].get_rng_state() if "torch" in sys.modules else None


def place_of(state: np.ndarray) -> GeneratorState:
    """Parse the uint8 `[5056]` array that `torch.get_rng_state()` returns."""
    raw = state.tobytes()
    key = np.frombuffer(raw, np.uint64, _WORDS, _FIRST).astype(np.uint32)
    [left], [used] = np.frombuffer(raw, np.int32, 1, _LEFT), np.frombuffer(raw, np.uint64, 1, _NEXT)
    return GeneratorState(key, _WORDS if left == 1 else int(used), 0)
