"""What would make a run fit: each lever is pulled and planned anew, none is guessed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from trl_jax.dryrun.plan import Plan
from trl_jax.trainer.reward_config import RewardConfig

Planned = Callable[[RewardConfig, bool], Plan]  # compiled, or by arithmetic alone
_SLACK = 1.1  # what arithmetic may be off by, once the run itself has shown by how much it is


class Lever(NamedTuple):
    """`settings`: what it changes of the arguments."""

    settings: dict[str, Any]
    plan: Plan

    @property
    def name(self) -> str:
        return " ".join(f"--{name} {value}" for name, value in self.settings.items())

    def as_dict(self) -> dict[str, Any]:
        return {"settings": self.settings, "plan": self.plan.as_dict()}


def pulled(args: RewardConfig, plan: Plan, planned: Planned) -> Iterator[Lever]:
    """Each lever alone, of the batch and of max_length the longest pull that is enough; where none is, all at once.

    Args:
        plan: of `args`, which does not fit.
        planned: plans arguments, by the compiler or by arithmetic alone.
    """
    together: dict[str, Any] = {}
    enough = False
    for settings in switches(args, plan):
        together |= settings
        lever = _pull(args, settings, planned)
        enough |= bool(lever.plan.fits)
        yield lever
    pulls = {"a step": batch_sizes(args), "evaluation": eval_batch_sizes(args)}
    for sizes in (*(pulls[part.name] for part in plan.parts if part.fits is False), max_lengths(args)):
        lever = _largest(args, plan, sizes, planned)
        if lever is not None:
            together |= lever.settings
            enough |= bool(lever.plan.fits)
            yield lever
    if not enough and together:
        yield _pull(args, together, planned)


def switches(args: RewardConfig, plan: Plan) -> list[dict[str, Any]]:
    """What is not on yet of what changes no step's pairs, and helps what does not fit."""
    found, step = [], plan.parts[0].fits is False
    if step and not args.gradient_checkpointing:
        found.append({"gradient_checkpointing": True})
    if args.compute_dtype != "bfloat16":
        found.append({"bf16": True})
    if plan.mesh.get("data", 1) > 1:
        others = [f"{axis}:{size}" for axis, size in plan.mesh.items() if axis not in ("data", "fsdp")]
        shards = plan.mesh["data"] * plan.mesh.get("fsdp", 1)
        found.append({"mesh_shape": ",".join([f"fsdp:{shards}", *others])})
    if step and args.gradient_checkpointing and not args.activation_offloading and plan.topology.platform == "tpu":
        found.append({"activation_offloading": True})
    return found


def batch_sizes(args: RewardConfig) -> list[dict[str, Any]]:
    """Half the pairs at once, and a half of that: twice the passes, the same steps."""
    size, passes = args.per_device_train_batch_size, args.gradient_accumulation_steps
    halves = [2**power for power in range(1, size.bit_length()) if size % 2**power == 0]
    return [
        {"per_device_train_batch_size": size // part, "gradient_accumulation_steps": passes * part} for part in halves
    ]


def eval_batch_sizes(args: RewardConfig) -> list[dict[str, Any]]:
    """Half the pairs of a pass of evaluation, and a half of that."""
    size = args.per_device_eval_batch_size
    return [{"per_device_eval_batch_size": size >> power} for power in range(1, size.bit_length())]


def max_lengths(args: RewardConfig) -> list[dict[str, Any]]:
    """Half the tokens, down to 256: longer pairs are left out."""
    lengths = [] if args.max_length is None else [args.max_length >> power for power in range(1, 16)]
    return [{"max_length": length} for length in lengths if length >= 256]


def _largest(args: RewardConfig, plan: Plan, sizes: list[dict[str, Any]], planned: Planned) -> Lever | None:
    """The first of these that fits, or the last."""
    lever, room, part = None, plan.topology.chip.memory, plan.largest
    if part.compiled is not None and part.compiled.room is not None:
        room = part.compiled.room
    for settings in sizes:
        alike = planned(_changed(args, settings), False).largest.reckoned * part.peak / part.reckoned
        if settings is sizes[-1] or alike < room * _SLACK:
            lever = _pull(args, settings, planned)
            if lever.plan.fits:
                return lever
    return lever


def _pull(args: RewardConfig, settings: dict[str, Any], planned: Planned) -> Lever:
    return Lever(settings, planned(_changed(args, settings), True))


def _changed(args: RewardConfig, settings: dict[str, Any]) -> RewardConfig:
    changed = copy.copy(args)
    for name, value in settings.items():
        setattr(changed, name, value)
    return changed
