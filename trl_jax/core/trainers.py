"""The trainers by name, and modules whose names are imported on first use."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

# ----------------------------------------------------------------------------------------------------
# Lets a package import its names when they are first used.


def fetching(package: str, where: Mapping[str, str]) -> Callable[[str], Any]:
    """Make the `__getattr__` of `package`.

    Args:
        where: name -> the module that defines it.
    """

    def fetch(name: str) -> Any:
        if name in where:
            value = getattr(importlib.import_module(where[name]), name)
            vars(importlib.import_module(package))[name] = value
            return value
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return fetch


# ----------------------------------------------------------------------------------------------------
# The table of trainers. One line here gives a trainer its names on all doors, its command and its plans.


class TrainerNames(NamedTuple):
    """The names of a trainer, whose modules are called as in TRL.

    command: as in `trl-jax sft`; its script is scripts/<command>.py, its classes are in trainer/<command>_trainer.py
        and trainer/<command>_config.py.
    trainer, config: the classes.
    rows: what the command calls the rows of a dataset.
    summary: the line of `trl-jax --help`.
    """

    command: str
    trainer: str
    config: str
    rows: str
    summary: str

    @property
    def where(self) -> dict[str, str]:
        """The module that defines each of the classes, by name."""
        start = f"trl_jax.trainer.{self.command}"
        return {self.trainer: f"{start}_trainer", self.config: f"{start}_config"}

    def load(self, name: str) -> type:
        """Import one of the classes."""
        return vars(importlib.import_module(self.where[name]))[name]

    def load_trainer(self) -> type:
        return self.load(self.trainer)

    def load_config(self) -> type:
        return self.load(self.config)


_TABLE = (
    TrainerNames("reward", "RewardTrainer", "RewardConfig", "pairs", "train a reward model on preference pairs"),
    TrainerNames("sft", "SFTTrainer", "SFTConfig", "rows", "fine-tune a language model on texts or conversations"),
    TrainerNames("dpo", "DPOTrainer", "DPOConfig", "pairs", "train a language model on preference pairs, directly"),
    TrainerNames("kto", "KTOTrainer", "KTOConfig", "rows", "train a language model on answers that are good or bad"),
    TrainerNames("orpo", "ORPOTrainer", "ORPOConfig", "pairs", "the same without a reference, by the ratio of odds"),
    TrainerNames("cpo", "CPOTrainer", "CPOConfig", "pairs", "the same without a reference: CPO, SimPO or AlphaPO"),
    TrainerNames("grpo", "GRPOTrainer", "GRPOConfig", "prompts", "train a language model by rewards it earns"),
    TrainerNames("rloo", "RLOOTrainer", "RLOOConfig", "prompts", "the same, by REINFORCE leave-one-out"),
    TrainerNames(
        "distillation",
        "DistillationTrainer",
        "DistillationConfig",
        "prompts",
        "train a language model to predict as a larger one does, on its own answers",
    ),
)
TRAINERS: dict[str, TrainerNames] = {names.command: names for names in _TABLE}
EXPERIMENTAL = ("cpo", "orpo")  # commands of trainers that TRL has in trl.experimental
DEFAULT = "reward"  # of `trl-jax plan`
WHERE: dict[str, str] = {name: module for names in _TABLE for name, module in names.where.items()}


def names_of_config(args: object) -> TrainerNames:
    """The trainer whose arguments these are.

    Raises:
        TypeError: they are no trainer's of the table.
    """
    kinds = {(kind.__module__, kind.__qualname__) for kind in type(args).__mro__}
    for names in TRAINERS.values():
        if (names.where[names.config], names.config) in kinds:
            return names
    wanted = ", ".join(names.config for names in TRAINERS.values())
    raise TypeError(
        f"args is a {type(args).__module__}.{type(args).__qualname__}: wanted one of {wanted}, or pass its trainer."
    )
