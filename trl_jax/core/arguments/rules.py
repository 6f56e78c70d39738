"""Rules: small functions that check one argument's value.

A rule is called as rule(name, value, values), with `values` the whole configuration. It returns None where the value is
good, else one line that names the argument, the value found, the value wanted and the way out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from numbers import Real
from os import PathLike
from typing import Any

from trl_jax.core.arguments.values import as_dict, as_pad_multiple, as_words, is_whole, plain, show

Rule = Callable[[str, Any, Mapping[str, Any]], str | None]

HERE = "in this release of trl_jax"
# Beyond these a value cannot work: steps are counted in 32 bits, rates are float32, a step's pairs are all in memory.
MOST_STEPS = 2**31 - 1
MOST_FLOAT32 = 3.4028234663852886e38
MOST_EXAMPLES = 2**20  # of a step
MOST_MICRO_BATCHES = 2**16  # of a step
MOST_PADDED = 2**20  # tokens that a row's length may be a multiple of
MOST_PROCESSES = 2**22  # that Linux can number


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


def bounded(most: float = math.inf, optional: bool = False) -> Rule:
    """Of a number whose other values transformers judges, or that may be below zero: not NaN, and not above `most`."""

    def rule(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
        if value is None and optional:
            return None
        if not isinstance(value, Real) or isinstance(value, bool) or math.isnan(value):
            return f"{show(name, value)}: wanted a number{_or_none(optional)}."
        return too_large(name, value, most) if value > most else None

    return rule


def path(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    if isinstance(value, str | PathLike | None):
        return None
    return f"{show(name, value)}: wanted a path or a name, or None."


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


def _or_none(optional: bool) -> str:
    return " or None" if optional else ""


def epochs(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    # Scripts that count in max_steps often leave num_train_epochs at -1.
    counted = isinstance(values["max_steps"], Real) and values["max_steps"] > 0
    return None if counted else number(0, most=MOST_STEPS)(name, value, values)


def a_dict(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    try:
        as_dict(name, value)
    except ValueError as error:
        return str(error)
    return None


def template_arguments(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    """A dict without the arguments of apply_chat_template that the trainer passes itself."""
    if fault := a_dict(name, value, values):
        return fault
    own = ("conversation", "tools", "chat_template", "add_generation_prompt", "tokenize", "return_dict")
    if found := [key for key in as_dict(name, value) if key in own]:
        return (
            f"{name} has {found[0]!r}, which the trainer passes itself: apply_chat_template would get multiple values "
            f"for keyword argument {found[0]!r}. Leave it out: chat_template_path= and tools= are for the template and "
            "the tools."
        )
    return None


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
