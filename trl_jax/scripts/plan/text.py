"""A plan as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trl_jax.dryrun.compiler import Compiled
    from trl_jax.dryrun.plan import Plan
    from trl_jax.dryrun.suggestions import Suggestion

_GIB = 2**30


def text(plan: Plan) -> str:
    """The whole plan: head, table of memory, collectives, FLOPs, evaluation, generation and verdict, a few lines
    each."""
    parts = [_head(plan), _memory(plan), _collectives(plan), _work(plan), _evaluation(plan), _generation(plan)]
    parts.append(verdict(plan))
    return "\n".join(part for part in parts if part)


_KEPT = {False: "matrix products kept", True: "layers computed twice", "offloaded": "layers' inputs on the host"}


def _head(plan: Plan) -> str:
    chip, kinds = plan.topology.chip, plan.settings
    memory = "simulated, of no size" if chip is None else f"{_size(chip.memory)} each"
    many = f"{plan.topology.devices} device(s), {memory}"
    mesh = ",".join(f"{axis}:{size}" for axis, size in plan.mesh.items()) or "none"
    kept = _KEPT[plan.remat]
    lengths = ", ".join(f"{length:,} (x{count})" for length, count in plan.lengths.items())
    one, trained = plan.one, "" if plan.trained == plan.parameters else f" ({plan.trained:,} train)"
    return (
        f"{plan.model}: {plan.parameters:,} parameters{trained} on {plan.topology.name}: {many}; mesh {mesh}.\n"
        f"A step: {plan.layout}, {one.passes} pass(es) of {one.rows} x {one.length:,} tokens a device; "
        f"{kinds['compute']} over float32 weights, {kept}. Lengths of steps: {lengths}.\n"
        f"Attention: {plan.attention}."
    )


def _memory(plan: Plan) -> str:
    compiled, memory = plan.compiled, plan.memory
    sizes = {name: _size(value) for name, value in memory._asdict().items()}
    rows = [
        ("bytes a device", "arithmetic", "compiler"),
        *((f"  {name}", sizes[name], "") for name in ("parameters", "moments", "batch")),
        ("what the step is given", _size(memory.arguments), _size(compiled and compiled.arguments)),
        *((f"  {name}", sizes[name], "") for name in ("gradients", "copies", "gathered", "kept", "working", "outside")),
        ("what it needs besides", _size(memory.temporary), _size(compiled and compiled.temporary)),
        ("peak", _size(memory.peak), _size(compiled and compiled.peak)),
    ]
    return "\n".join(f"{name:<26}{one:>12}{other:>12}".rstrip() for name, one, other in rows)


def _collectives(plan: Plan) -> str:
    return "" if plan.topology.devices == 1 else _sent(plan.compiled, "a step")


def _sent(compiled: Compiled | None, of: str) -> str:
    """A line for each kind of collective; empty where the compiler gave no cost, as where a step does not fit."""
    if compiled is None or compiled.cost is None:
        return ""
    collectives = compiled.cost.collectives
    lines = [
        f"  {one.kind:<20}{f'{one.group} devices':<12}{one.dtype:<6}{one.count:>6,} x{_size(one.bytes):>12}"
        f"{_size(one.sent):>12} sent"
        for one in collectives
    ]
    total = f"collectives {of}, {_size(sum(one.bytes for one in collectives))}:"
    return "\n".join([total, *lines]) if collectives else f"No collectives {of}."


def _work(plan: Plan) -> str:
    cost, bound = plan.compiled and plan.compiled.cost, plan.bound
    lines = [f"Matrix products: {_flops(plan.flops)} a device by arithmetic"]
    if cost is not None:
        least = f" (at least: {cost.unknown} loops of unknown length are counted once)" if cost.unknown else ""
        lines[0] += f", {_flops(cost.flops)} by the compiler{least}"
    lines[0] += f"; {plan.places:,.0f} tokens a step are computed for {plan.tokens:,.0f} of text."
    if bound is not None:
        parts = ", ".join(f"{name} {_seconds(value)}" for name, value in bound._asdict().items())
        least = f"A step takes at least {_seconds(bound.step)} by the chip's published figures"
        lines.append(f"{least} ({parts}): a bound, no forecast.")
    if plan.compiled is not None:
        lines.append(f"Compiled in {plan.compiled.seconds:,.0f} s.")
    return "\n".join(lines)


def _evaluation(plan: Plan) -> str:
    if plan.evaluation is None:
        return ""
    one, phase = plan.evaluation.one, plan.phases[1]
    measured = "" if phase.compiled is None else f", {_size(phase.peak)} by the compiler"
    return (
        f"Evaluation: a pass of {one.rows} x {one.length:,} tokens a device, beside the optimizer's state: peak "
        f"{_size(phase.estimated)} by arithmetic{measured}."
    )


def _generation(plan: Plan) -> str:
    if plan.generation is None:
        return ""
    (size, memory, *_), phase = plan.generation, plan.phases[-1]
    measured = "" if phase.compiled is None else f", {_size(phase.peak)} by the compiler"
    scorer = f" and {_size(plan.scorer)} of the model that scores" if plan.scorer else ""
    told = (
        f"Generation: {size.completions} completions of {size.prompts} prompt(s), with room for "
        f"{size.prompt_places:,} and {size.new_places:,} tokens: a cache of {_size(memory.cache)} a device, beside the "
        f"optimizer's state{scorer}: peak {_size(phase.estimated)} by arithmetic{measured}."
    )
    sent = "" if plan.topology.devices == 1 else _sent(plan.generation.decode, "a token of each completion")
    return f"{told}\n{sent}" if sent else told


def verdict(plan: Plan) -> str:
    """Whether the run fits, and how much of the memory it takes: one sentence."""
    chip, compiled = plan.topology.chip, plan.largest.compiled
    if plan.fits is None:
        return "Whether it fits: simulated devices have no memory of their own to compare with."
    word = "It fits" if plan.fits else "It does not fit"
    word += f" in {plan.largest.name}" if not plan.fits and plan.largest.name != "a step" else ""
    if compiled is None:
        return f"{word} by arithmetic alone, {_size(plan.peak)} of {_size(chip.memory)}: {plan.why}."
    room = f"{_size(chip.memory)}" if compiled.room is None else f"the {_size(compiled.room)} that the compiler may use"
    return f"{word}: {_size(plan.peak)} of {room}."


def suggestions_text(suggestion: Suggestion) -> str:
    """A line for one suggestion: its flags and the verdict."""
    plan = suggestion.plan
    took = f", compiled in {plan.compiled.seconds:,.0f} s" if plan.compiled else ""
    return f"- {suggestion.name}: {verdict(plan)[:-1]}{took}."


def _size(count: int | None) -> str:
    return "" if count is None else f"{count / _GIB:,.2f} GiB" if count >= _GIB / 10 else f"{count / 2**20:,.2f} MiB"


def _flops(count: float) -> str:
    return f"{count / 1e12:,.2f} TFLOP" if count >= 1e10 else f"{count / 1e9:,.3f} GFLOP"


def _seconds(value: float) -> str:
    return f"{value:,.2f} s" if value >= 1 else f"{1000 * value:,.2f} ms"
