"""Suggestions of settings that make a run fit: each is planned anew, none is guessed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from trl_jax.dryrun.plan import Plan
from trl_jax.run.arguments.base_config import BaseConfig

Planned = Callable[[BaseConfig, bool], Plan]  # compiled, or by arithmetic alone
_SLACK = 1.1  # by what factor arithmetic may still be off once it is scaled to the peak that the compiler found


class Suggestion(NamedTuple):
    """Arguments to change, by name, and the plan of the run with them."""

    settings: dict[str, Any]
    plan: Plan

    @property
    def name(self) -> str:
        """The settings as flags."""
        return " ".join(f"--{name} {value}" for name, value in self.settings.items())

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"settings": self.settings, "plan": self.plan.as_dict()}


def suggestions_for(args: BaseConfig, plan: Plan, planned: Planned) -> Iterator[Suggestion]:
    """Plan each suggestion alone; where none is enough, all of them together at the end.

    Of batch sizes and of max_length the largest that fits is suggested, or the smallest where none fits.

    Args:
        plan: of `args`, which does not fit.
        planned: plans these arguments, with the compiler (True) or by arithmetic alone (False).
    """
    together: dict[str, Any] = {}
    enough = False
    for settings in switches(args, plan):
        together |= settings
        suggestion = _suggest(args, settings, planned)
        enough |= bool(suggestion.plan.fits)
        yield suggestion
    sizes_of = {"a step": batch_sizes(args), "evaluation": eval_batch_sizes(args)}
    sizes_of["generation"] = generations(args, plan)
    for sizes in (*(sizes_of[phase.name] for phase in plan.phases if phase.fits is False), max_lengths(args)):
        suggestion = _largest(args, plan, sizes, planned)
        if suggestion is not None:
            together |= suggestion.settings
            enough |= bool(suggestion.plan.fits)
            yield suggestion
    if not enough and together:
        yield _suggest(args, together, planned)


def switches(args: BaseConfig, plan: Plan) -> list[dict[str, Any]]:
    """Settings that keep the examples of every step, are not set yet and help the phase that does not fit."""
    settings, step = [], plan.phases[0].fits is False
    if step and not args.gradient_checkpointing:
        settings.append({"gradient_checkpointing": True})
    if args.compute_dtype != "bfloat16":
        settings.append({"bf16": True})
    if plan.mesh.get("data", 1) > 1:
        others = [f"{axis}:{size}" for axis, size in plan.mesh.items() if axis not in ("data", "fsdp")]
        shards = plan.mesh["data"] * plan.mesh.get("fsdp", 1)
        settings.append({"mesh_shape": ",".join([f"fsdp:{shards}", *others])})
    if step and args.gradient_checkpointing and not args.activation_offloading and plan.topology.platform == "tpu":
        settings.append({"activation_offloading": True})
    return settings


def batch_sizes(args: BaseConfig) -> list[dict[str, Any]]:
    """Halved per_device_train_batch_size down to one, with gradient_accumulation_steps doubled: the same steps."""
    size, passes = args.per_device_train_batch_size, args.gradient_accumulation_steps
    divisors = [2**power for power in range(1, size.bit_length()) if size % 2**power == 0]
    parts = vars(args).get("steps_per_generation")  # of as many micro-batches, a generation would be smaller
    return [
        {"per_device_train_batch_size": size // by, "gradient_accumulation_steps": passes * by}
        | ({} if parts is None else {"steps_per_generation": parts * by})
        for by in divisors
    ]


def eval_batch_sizes(args: BaseConfig) -> list[dict[str, Any]]:
    """Halved per_device_eval_batch_size, down to one."""
    size = args.per_device_eval_batch_size
    return [{"per_device_eval_batch_size": size >> power} for power in range(1, size.bit_length())]


def generations(args: BaseConfig, plan: Plan) -> list[dict[str, Any]]:
    """Halved generations of whole micro-batches and whole groups, where the largest one is of training; else smaller
    batches of an evaluation."""
    own = plan.generation
    if own is None or "generation_batch_size" not in vars(args):
        return []
    if own.evaluates:
        return eval_batch_sizes(args)
    micro = args.per_device_train_batch_size * plan.mesh.get("data", 1) * plan.mesh.get("fsdp", 1)
    halves = [own.size.completions / 2**power for power in range(1, own.size.completions.bit_length())]
    sizes = [int(size) for size in halves if size % micro == 0 and size % args.num_generations == 0]
    if args.generation_batch_size is not None and args.steps_per_generation is None:
        return [{"generation_batch_size": size} for size in sizes]
    return [{"steps_per_generation": size // micro} for size in sizes]


def max_lengths(args: BaseConfig) -> list[dict[str, Any]]:
    """Halved max_length, down to 256, or max_completion_length; what is longer does not train."""
    name = "max_completion_length" if "max_completion_length" in vars(args) else "max_length"
    longest = vars(args).get(name)
    lengths = [] if longest is None else [longest >> power for power in range(1, 16)]
    return [{name: length} for length in lengths if length >= 256]


def _largest(args: BaseConfig, plan: Plan, sizes: list[dict[str, Any]], planned: Planned) -> Suggestion | None:
    """The suggestion of the first of these that fits, else of the last; None of none."""
    suggestion, room, phase = None, plan.topology.chip.memory, plan.largest
    if phase.compiled is not None and phase.compiled.room is not None:
        room = phase.compiled.room
    for settings in sizes:
        scaled = planned(_changed(args, settings), False).largest.estimated * phase.peak / phase.estimated
        if settings is sizes[-1] or scaled < room * _SLACK:
            suggestion = _suggest(args, settings, planned)
            if suggestion.plan.fits:
                return suggestion
    return suggestion


def _suggest(args: BaseConfig, settings: dict[str, Any], planned: Planned) -> Suggestion:
    return Suggestion(settings, planned(_changed(args, settings), True))


def _changed(args: BaseConfig, settings: dict[str, Any]) -> BaseConfig:
    changed = copy.copy(args)
    for name, value in settings.items():
        setattr(changed, name, value)
    return changed
