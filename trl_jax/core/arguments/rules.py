"""Rules: small functions that check one argument's value.

A rule is called as rule(name, value, values), with `values` the whole configuration. It returns None where the value is
good, else one line that names the argument, the value found, the value wanted and the way out.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

from trl_jax.core.arguments import deepspeed
from trl_jax.core.arguments.optimizers import NEAREST, OPTIMIZERS, parsed
from trl_jax.core.arguments.values import as_dict, as_dict_or_file, as_pad_multiple, as_words, is_whole, plain, show

Rule = Callable[[str, Any, Mapping[str, Any]], str | None]

HERE = "in this release of trl_jax"
DETERMINISTIC_FLAG = "--xla_gpu_deterministic_ops=true"
# accelerate's AcceleratorConfig: key -> its default, and what to do instead where another value would change the run.
ACCELERATOR = {
    "split_batches": (False, ""),
    "dispatch_batches": (None, ""),
    "even_batches": (True, ""),
    "use_seedable_sampler": (True, "the order of rows follows data_seed; leave it out."),
    "non_blocking": (False, ""),
    "gradient_accumulation_kwargs": (None, "set gradient_accumulation_steps."),
    "use_configured_state": (False, "there is no accelerate here to configure; leave it out."),
}
FSDP_WORDS = ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2", "offload", "auto_wrap")
# Schedule -> the keys of lr_scheduler_kwargs that it takes.
SCHEDULES = {
    "linear": "",
    "cosine": "num_cycles",
    "cosine_with_restarts": "num_cycles",
    "polynomial": "lr_end power",
    "constant": "",
    "constant_with_warmup": "",
    "inverse_sqrt": "timescale",
    "reduce_lr_on_plateau": "mode factor patience threshold threshold_mode cooldown min_lr eps",
    "cosine_with_min_lr": "num_cycles min_lr min_lr_rate",
    "cosine_warmup_with_min_lr": "num_cycles min_lr min_lr_rate warmup_lr_rate",
    "warmup_stable_decay": "num_decay_steps num_stable_steps warmup_type decay_type min_lr_ratio num_cycles",
    "greedy": "mode factor patience threshold threshold_mode cooldown warmup min_lr max_lr eps smooth window_size "
              "reset_start",
}  # fmt: skip
# Beyond these a value cannot work: steps are counted in 32 bits, rates are float32, a step's pairs are all in memory.
MOST_STEPS = 2**31 - 1
MOST_FLOAT32 = 3.4028234663852886e38
MOST_EXAMPLES = 2**20  # of a step
MOST_MICRO_BATCHES = 2**16  # of a step
MOST_PADDED = 2**20  # tokens that a row's length may be a multiple of
MOST_PROCESSES = 2**22  # that Linux can number
ADAPTIVE = ("reduce_lr_on_plateau", "greedy")


def one_of(*supported: str) -> Rule:
    def rule(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
        if plain(value) in supported:
            return None
        return f"{show(name, value)} is not {HERE}; supported: {', '.join(supported)}."

    return rule


def too_large(name: str, value: Any, most: float) -> str:
    return f"{show(name, value)}: wanted at most {most if isinstance(most, float) else format(most, ',')}. Lower it."


def whole(minimum: int, optional: bool = False, *, most: float = math.inf) -> Rule:
    def rule(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
        if value is None and optional:
            return None
        if is_whole(value, minimum):
            return too_large(name, value, most) if value > most else None
        return f"{show(name, value)}: wanted a whole number of at least {minimum}{_or_none(optional)}."

    return rule


def number(minimum: float, optional: bool = False, *, most: float = math.inf) -> Rule:
    def rule(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
        if value is None and optional:
            return None
        if isinstance(value, Real) and not isinstance(value, bool) and minimum <= value < math.inf:
            return too_large(name, value, most) if value > most else None
        return f"{show(name, value)}: wanted a number of at least {minimum:g}{_or_none(optional)}."

    return rule


def bounded(most: float = math.inf) -> Rule:
    """Of a number whose other values transformers judges, or that may be below zero: not NaN, and not above `most`."""

    def rule(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
        if isinstance(value, Real) and math.isnan(value):
            return f"{show(name, value)}: wanted a number."
        return too_large(name, value, most) if isinstance(value, Real) and value > most else None

    return rule


def accumulation(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    if problem := whole(1, most=MOST_MICRO_BATCHES)(name, value, values):
        return problem
    pairs = values["per_device_train_batch_size"]
    if whole(1, most=MOST_EXAMPLES)("", pairs, values) is not None or value * pairs <= MOST_EXAMPLES:
        return None  # or said of the batch size
    return (
        f"{show(name, value)} times per_device_train_batch_size={pairs} makes steps of {value * pairs:,} pairs: wanted "
        f"at most {MOST_EXAMPLES:,}. Lower either."
    )


def beta(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    """Adam divides by one less a power of it; torch refuses it, too."""
    if problem := number(0)(name, value, values):
        return problem
    if value >= 1 and "adam" in str(plain(values["optim"])):
        return f"{show(name, value)}: wanted a number of at least 0 and below 1."
    return None


def _or_none(optional: bool) -> str:
    return " or None" if optional else ""


def epochs(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    # Scripts that count in max_steps often leave num_train_epochs at -1.
    return None if values["max_steps"] > 0 else number(0, most=MOST_STEPS)(name, value, values)


def a_dict(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    try:
        as_dict(name, value)
    except ValueError as error:
        return str(error)
    return None


def scheduler(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    if problem := one_of(*SCHEDULES)(name, value, values):
        return problem
    if plain(value) in ADAPTIVE and plain(values["eval_strategy"]) == "no":
        return f"{show(name, value)} follows a metric of the evaluation, and eval_strategy is 'no'. Set eval_strategy."
    return None


def scheduler_kwargs(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    schedule = plain(values["lr_scheduler_type"])
    if problem := a_dict(name, value, values):
        return problem
    if schedule not in SCHEDULES:
        return None  # `scheduler` refuses it
    kwargs, known = as_dict(name, value), SCHEDULES[schedule].split()
    if unknown := [key for key in kwargs if key not in known]:
        takes = ", ".join(known) or "no keys"
        return f"{name} holds {unknown}: lr_scheduler_type={schedule!r} takes {takes}. Leave {unknown} out."
    if schedule == "warmup_stable_decay" and "num_decay_steps" not in kwargs:
        return f"lr_scheduler_type={schedule!r} needs {name}={{'num_decay_steps': STEPS}}."
    if "min_lr_rate" in known and (kwargs.get("min_lr") is None) == (kwargs.get("min_lr_rate") is None):
        return f"lr_scheduler_type={schedule!r} needs {name} with one of min_lr and min_lr_rate, and found {kwargs}."
    if none := [key for key, found in kwargs.items() if isinstance(found, float) and math.isnan(found)]:
        return f"{name} holds {none[0]}=nan: wanted a number."
    return _known_words(name, kwargs)


_WORDS = {
    "warmup_type": ("linear", "cosine", "1-sqrt"), "decay_type": ("linear", "cosine", "1-sqrt"),
    "mode": ("min", "max"), "threshold_mode": ("rel", "abs"),
}  # fmt: skip


def _known_words(name: str, kwargs: Mapping[str, Any]) -> str | None:
    for key, words in _WORDS.items():
        if key in kwargs and kwargs[key] not in words:
            return f"{name} holds {key}={kwargs[key]!r}: wanted one of {', '.join(words)}."
    return None


def optimizer(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    value = plain(value)
    if value in NEAREST:
        return f"{show(name, value)} is not {HERE}; the nearest that is: {NEAREST[value]}."
    return one_of(*OPTIMIZERS)(name, value, values)


def optimizer_note(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    note = OPTIMIZERS[plain(value)].note
    return f"{show(name, value)}: {note}" if note else None


def optimizer_args(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    optim = plain(values["optim"])
    if optim not in OPTIMIZERS:
        return None  # `optimizer` refuses it
    try:
        parsed(optim, value)
    except ValueError as error:
        return str(error)
    return None


def checkpointing_kwargs(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    if problem := a_dict(name, value, values):
        return problem
    unknown = [key for key in as_dict(name, value) if key != "use_reentrant"]
    if not unknown:
        return None
    return f"{name} holds {unknown}, which are not {HERE}: it takes use_reentrant only. Leave {unknown} out."


def offloading(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    if not value:
        return None
    if values["remat_policy"] not in ("auto", "nothing_saveable"):
        return f"{name}=True goes with remat_policy='auto' or 'nothing_saveable', not {values['remat_policy']!r}."
    if values["gradient_checkpointing"] or values["activation_checkpointing"]:
        return None
    return (
        f"{name}=True has the host keep what gradient_checkpointing=True keeps, and gradient_checkpointing is "
        f"{values['gradient_checkpointing']!r}. Set it to True."
    )


def deterministic(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    # A GPU is deterministic only if XLA was told so before it started; CPU and TPU always are.
    if not value or values["use_cpu"] or DETERMINISTIC_FLAG in os.environ.get("XLA_FLAGS", ""):
        return None
    return (
        f"{name}=True needs XLA_FLAGS={DETERMINISTIC_FLAG} in the environment before Python starts, and found"
        f" XLA_FLAGS={os.environ.get('XLA_FLAGS', '')!r}. Set it, or pass use_cpu=True."
    )


def accelerator(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    """Refuses keys that would change the run; how batches reach several processes means nothing to one."""
    try:
        config = as_dict_or_file(name, value)
    except ValueError as error:
        return str(error)
    for key, found in config.items():
        if key not in ACCELERATOR:
            return f"{name} holds {key!r}: wanted {', '.join(ACCELERATOR)}."
        default, instead = ACCELERATOR[key]
        if instead and found != default:
            return f"{name} sets {key}={found!r}, which is not {HERE}: {instead}"
    return None


def fsdp_words(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    unknown = [word for word in as_words(value) if word not in FSDP_WORDS]
    return f"{name} holds {unknown}: wanted some of {', '.join(FSDP_WORDS)}." if unknown else None


def deepspeed_config(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    if not value:
        return None
    try:
        return " ".join(deepspeed.conflicts(as_dict_or_file(name, value), values)) or None
    except ValueError as error:
        return str(error)


def debug_words(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    unknown = [word for word in as_words(value) if word not in ("underflow_overflow", "tpu_metrics_debug")]
    return f"{name} holds {unknown}: wanted underflow_overflow or tpu_metrics_debug." if unknown else None


def debug_note(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    note = f"{name}: tpu_metrics_debug has no effect in trl_jax: XLA has no such log."
    return note if "tpu" in str(as_words(value)) else None


def metric_inputs(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    unknown = [word for word in value or () if word not in ("inputs", "loss")]
    return f"{name} holds {unknown}: wanted some of inputs, loss." if unknown else None


def tokens_seen(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    known = ("all", "non_padding", "no", True, False)
    return None if value in known else f"{show(name, value)}: wanted 'all', 'non_padding' or 'no'."


def pad_multiple(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    try:
        multiple = as_pad_multiple(name, value)
    except ValueError as error:
        return str(error)
    return too_large(name, value, MOST_PADDED) if isinstance(multiple, int) and multiple > MOST_PADDED else None
