"""The optimizer as callbacks are given it: with torch's `param_groups`, of which a script may read and set the rate."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any

from trl_jax.engine.optimizers.optimizer import Hyperparameters, Optimizer
from trl_jax.run.arguments.optimizer_choice import GROUPS, LearningRate, OptimizerChoice


class ShownOptimizer(Optimizer):
    """An optimizer whose `param_groups` are a list of two mappings, as transformers makes them."""

    param_groups: list[ParamGroup]

    @classmethod
    def of(cls, tx: Optimizer, choice: OptimizerChoice, rates: LearningRate) -> ShownOptimizer:
        """
        Args:
            rates: what the groups read their `lr` from, and set it in.
        """
        shown, hyper = cls(*tx), choice.hyperparameters or Hyperparameters()
        facts = {"initial_lr": choice.peak, "betas": (hyper.b1, hyper.b2), "eps": hyper.eps}
        decays = [hyper.weight_decay] + [0.0] * (GROUPS - 1)
        shown.param_groups = [
            ParamGroup(rates, number, facts | {"weight_decay": decay}) for number, decay in enumerate(decays)
        ]
        return shown


class ParamGroup(MutableMapping):
    """A group of torch's: `lr` is the rate of the next step. One that is set counts for that step alone, as with
    torch, whose schedule sets the next.

    Raises:
        ValueError: anything else is set.
    """

    def __init__(self, rates: LearningRate, number: int, facts: dict[str, Any]):
        self._rates, self._number, self._facts = rates, number, facts

    def __getitem__(self, name: str) -> Any:
        return self._rates.of_group(self._number) if name == "lr" else self._facts[name]

    def __setitem__(self, name: str, value: Any) -> None:
        if name == "lr":
            self._rates.set_for_group(self._number, float(value))
        elif name not in self._facts or self._facts[name] != value:
            raise ValueError(
                f"param_groups[{self._number}][{name!r}] was set: the step is compiled from what the optimizer was "
                "made with, and reads only 'lr' anew. Say it in the arguments."
            )

    def __delitem__(self, name: str) -> None:
        raise ValueError(f"param_groups[{self._number}][{name!r}] cannot be deleted.")

    def __iter__(self) -> Iterator[str]:
        return iter(("lr", *self._facts))

    def __len__(self) -> int:
        return 1 + len(self._facts)
