"""The parts of a run, made in order, each with what it needs."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

from trl_jax.mesh.processes import check_alike, several
from trl_jax.training import data, setup
from trl_jax.training.devices import ShardedStep
from trl_jax.training.evaluate import CompletionEvaluator, Evaluator
from trl_jax.training.forward import Forward
from trl_jax.training.optimizer_choice import OptimizerChoice
from trl_jax.training.push import HubPublisher
from trl_jax.training.resume import Checkpointer, arguments_text
from trl_jax.training.rollout import RolloutParts, rollout_steps
from trl_jax.training.script_loss import UserLoss
from trl_jax.training.state import RunState, TrainerHooks
from trl_jax.training.step import TrainStep
from trl_jax.training.train import Training


class Parts(NamedTuple):
    """The parts of a trainer, for tools that look at a run without training it."""

    run: RunState
    forward: Forward
    evaluator: Evaluator | CompletionEvaluator
    train_step: TrainStep
    checkpointer: Checkpointer
    publisher: HubPublisher
    training: Training


def assemble(
    run: RunState,
    hooks: TrainerHooks,
    publisher: HubPublisher,
    choose: Callable[[], OptimizerChoice],
    torch_model: Any,
    rollout: RolloutParts | None = None,
) -> Parts:
    """Make the parts of a run whose model, data and callbacks are there.

    Args:
        choose: what the arguments and the constructor say of the optimizer, as they are now.
        torch_model: the torch model that was passed, which gets the trained weights; None without one.
        rollout: how a run makes its rows itself; None where they are a dataset's.

    Raises:
        ValueError: the run has no end; what cannot be written should not cost one either.
        TypeError: a script computes a loss itself whose task asks for numbers of reads.
    """
    _check_own_loss(run)
    arguments = arguments_text(run.args)
    setup.set_log_level(run.args.get_process_log_level(), asked=run.args.log_level != "passive")
    setup.warn_of_idle_devices(run.args)
    os.makedirs(run.args.output_dir, exist_ok=True)
    checkpointer, forward = Checkpointer(run, arguments, hooks), Forward(run)
    plan = run.sharding_plan
    sharded_step = None if plan is None else ShardedStep(plan, run.model.params, run.frozen)
    user_loss = UserLoss(run, forward, hooks.compute_loss, hooks.script_values) if run.own_loss else None
    if rollout is None:
        evaluator = Evaluator(run, forward, sharded_step, user_loss, hooks.prediction_step)
    else:
        run.rollout = rollout_steps(run, rollout, forward, sharded_step)
        evaluator = CompletionEvaluator(run, forward, sharded_step, run.rollout)
    trained_by_script = user_loss if "compute_loss" in run.overridden else None
    train_step = TrainStep(run, hooks.loss, sharded_step, trained_by_script)
    training = Training(run, hooks, train_step, checkpointer, publisher, choose, torch_model)
    data.length_of(run)
    if several():
        check_alike(checkpointer.digests())
    return Parts(run, forward, evaluator, train_step, checkpointer, publisher, training)


def _check_own_loss(run: RunState) -> None:
    if run.own_loss and run.virtual.count:
        raise TypeError(
            f"The trainer's own {' and '.join(sorted(run.own_loss))} would be given logits of the texts alone, and the "
            "first token of a text is predicted by the virtual tokens before it. Leave it out, or take a LoraConfig."
        )
    if run.own_loss and run.task.head == "lm" and run.task.axis == "read":
        raise TypeError(
            f"The trainer's own {' and '.join(sorted(run.own_loss))} would be given whole logits, and the loss of "
            f"{type(run.task).__name__} asks for numbers of each token beside them. Leave the method out, and write a "
            "task with another loss."
        )
