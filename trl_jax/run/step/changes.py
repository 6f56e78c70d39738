"""Steps that are made anew, where a callback has changed what they are made of."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from trl_jax.engine.optimizers.optimizer import Optimizer
from trl_jax.hub.freezing import check_unfrozen
from trl_jax.run.state import RunState

logger = logging.getLogger(__name__)


class StepParts(NamedTuple):
    """The parts of a step that a callback may change.

    frozen: names on disk of the parameters that a script has frozen.
    """

    loss: Any
    max_grad_norm: float | None
    frozen: frozenset[str]
    accumulation: int

    @classmethod
    def now(cls, run: RunState) -> StepParts:
        args, frozen = run.args, frozenset(run.model.frozen_names)
        return cls(run.task, args.max_grad_norm, frozen, args.gradient_accumulation_steps)

    def changed_since(self, before: StepParts) -> str:
        """The differences, in words."""
        words = "the loss", "max_grad_norm", "what is frozen", "gradient_accumulation_steps"
        return " and ".join(word for word, then, now in zip(words, before, self, strict=True) if then != now)


class Changes:
    """Asked before each step: the optimizer of a step that is made anew.

    settle: takes what a script has set into the run's task. made_optimizer: of the arguments as they are now.
    """

    def __init__(self, run: RunState, settle: Callable[[], None], made_optimizer: Callable[[], Optimizer]):
        self._run, self._settle, self._made_optimizer = run, settle, made_optimizer
        self._before = StepParts.now(run)

    def __call__(self) -> Optimizer | None:
        """None where nothing has changed since the last step was made.

        Raises:
            ValueError: the optimizer would have another state, or steps another layout.
        """
        run, before = self._run, self._before
        self._settle()
        found = self._before = StepParts.now(run)
        if found == before:
            return None
        if found.accumulation != before.accumulation:
            raise ValueError(
                f"gradient_accumulation_steps was changed from {before.accumulation} to {found.accumulation} while the "
                "run trains, and its steps are laid out. Change it between calls of train()."
            )
        check_unfrozen(before.frozen - found.frozen)
        what = found.changed_since(before)
        logger.warning(
            "After step %d, %s was changed: the step is compiled again, as it is after every such change.",
            run.state.global_step,
            what,
        )
        tx = self._made_optimizer()
        state = jax.eval_shape(tx.init, run.model.params)
        if jax.tree.structure(state) != jax.tree.structure(run.progress.optimizer_state):
            raise ValueError(
                f"max_grad_norm was changed from {before.max_grad_norm} to {found.max_grad_norm} while the run trains, "
                "and the optimizer's state has no place for that. Let a large max_grad_norm stand for none."
            )
        return tx
