"""Tolerances ("marks") for comparing two runs, and assertions that say where the runs first differ."""

from __future__ import annotations

import math
from dataclasses import dataclass

from compat_tests.parity.sketch import gap

TRAIN_KEYS = (
    "loss grad_norm learning_rate num_tokens min_reward mean_reward max_reward accuracy margin epoch step"
).split()
# Wall-clock figures and a timing of torch's wrapping of the model: not compared, whether present or not.
CLOCK = ("runtime", "samples_per_second", "steps_per_second", "model_preparation_time", "total_flos", "step_time")
EXACT = ("num_tokens", "step")
REWARDS = ("min_reward", "mean_reward", "max_reward", "margin")


@dataclass(frozen=True)
class Marks:
    """Absolute tolerances."""

    loss: float = 1e-5
    rewards: float = 2e-4
    grad_norm: float = 2e-4
    accuracy: float = 1e-7
    entropy: float = 1e-5


def allowed(key: str, value: float, marks: Marks) -> float:
    """The tolerance for this logged key, given TRL's `value`."""
    bare = key.removeprefix("eval_")
    if bare in EXACT:
        return 0.0
    if bare == "epoch":
        return 1e-9
    if bare == "learning_rate":
        return 1e-12 * abs(value)
    if bare in ("accuracy", "mean_token_accuracy"):
        return marks.accuracy
    if bare == "entropy":
        return marks.entropy
    if bare == "grad_norm":
        return marks.grad_norm
    if bare in ("loss", "train_loss", "aux_loss"):
        return marks.loss
    if bare in REWARDS:
        return marks.rewards
    raise AssertionError(f"no mark is set for the logged key {key!r}")


def assert_same_curve(ours, theirs, **marks) -> None:
    """Assert that two log histories agree: the same entries with the same keys in the same order, and every value.

    Training, evaluation and the final summary are compared; wall-clock figures are not. `marks` are fields of `Marks`.
    """
    kinds = [_kind(entry) for entry in ours], [_kind(entry) for entry in theirs]
    assert kinds[0] == kinds[1], f"the logs differ in their entries: ours {kinds[0]}, TRL's {kinds[1]}"
    for mine, other in zip(ours, theirs, strict=True):
        assert_same_entry(mine, other, **marks)


def assert_same_entry(mine: dict, other: dict, **marks) -> None:
    """Assert that two log entries have the same keys in the same order and that values agree; a NaN never does."""
    mine, other = timeless(mine), timeless(other)
    where = f"step {other['step']}" if "step" in other else "after training"
    assert list(mine) == list(other), f"{where}: our keys {list(mine)}, TRL's keys {list(other)}"
    for key, value in other.items():
        mark = allowed(key, value, Marks(**marks))
        apart = abs(mine[key] - value)
        assert apart <= mark, (
            f"{where}, {key}: ours {mine[key]!r}, TRL's {value!r}, apart {apart:.3g}, allowed {mark:.3g}"
        )


def assert_same_weights(ours: dict, theirs: dict, mark: float = 2e-4) -> None:
    """Assert that two checkpoints have the same names, shapes and dtypes, and that no element differs by more than
    `mark`.

    A recorded run has a sketch of each tensor instead, whose numbers must meet the same mark.
    """
    assert sorted(ours) == sorted(theirs), f"names on one side only: {sorted(set(ours) ^ set(theirs))}"
    for name, tensor in theirs.items():
        mine = ours[name]
        found, wanted = (mine.dtype, mine.shape), (tensor.dtype, tensor.shape)
        assert found == wanted, f"{name}: ours is {found}, TRL's {wanted}"
        apart = gap(name, mine, tensor)
        assert apart <= mark, f"{name}: apart by {apart:.3g} at most, allowed {mark:.3g}"


def steps_of(logs: list[dict]) -> list[dict]:
    """The training entries of a log history."""
    return [entry for entry in logs if "loss" in entry]


def worst(ours, theirs) -> dict[str, float]:
    """The largest difference of every key over two log histories, for a report; NaN if any is NaN."""
    gaps: dict[str, float] = {}
    for mine, other in zip(ours, theirs, strict=True):
        for key, value in timeless(other).items():
            apart = abs(mine[key] - value)
            gaps[key] = apart if math.isnan(apart) else max(gaps.get(key, 0.0), apart)
    return gaps


def timeless(entry: dict) -> dict:
    """The entry without its wall-clock figures."""
    return {key: value for key, value in entry.items() if not key.endswith(CLOCK)}


def _kind(entry: dict) -> tuple[str, int]:
    return next(iter(timeless(entry))), entry["step"]
