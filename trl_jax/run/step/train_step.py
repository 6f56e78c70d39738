"""The optimizer step of a run: compiling it, feeding it batches, and updating the model with its results."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from trl_jax.engine.devices.compilation import Programs, compiler_options
from trl_jax.engine.devices.remat import RematFallback, room_of
from trl_jax.engine.devices.spmd import ShardedStep
from trl_jax.engine.optimizers.optimizer import Optimizer, decays, from_optax
from trl_jax.engine.step import make_step
from trl_jax.hub.freezing import stop_frozen_gradients, zero_frozen_updates
from trl_jax.mesh.arrays import distributed
from trl_jax.run.arguments.optimizer_choice import OptimizerChoice, check_optax
from trl_jax.run.data import length_of
from trl_jax.run.devices import describe, run_device
from trl_jax.run.progress_line import CompilationUntimed
from trl_jax.run.state import RunState
from trl_jax.run.step.rng import run_key
from trl_jax.run.user_loss.bound_model import UserLoss
from trl_jax.run.user_loss.user_loss_step import UserLossStep

logger = logging.getLogger(__name__)


class TrainStep:
    """Builds and runs the step of `train()`."""

    def __init__(
        self, run: RunState, loss: Callable, sharded_step: ShardedStep | None, user_loss: UserLoss | None
    ):
        """
        Args:
            loss: `(params, batch, key, remat=) -> (loss, sums)`, as `Forward.loss`.
            sharded_step: divides the step over several devices; None on one.
            user_loss: a script's own compute_loss; the step then runs micro-batch by micro-batch.
        """
        self._run, self._loss, self.sharded_step, self._user_loss = run, loss, sharded_step, user_loss

    def compiled(self, tx: Any, *, remat: bool | str) -> Any:
        """The jitted step of `train()`, with the arguments of `make_step`'s. remat: whether layers are computed
        twice."""
        run = self._run
        options = compiler_options(run.args.device.type, several=run.sharding_plan is not None)

        def loss(params, *batch_and_key):
            return self._loss(params, *batch_and_key, remat=remat)

        return make_step(self._without_frozen(loss), tx, self.sharded_step, options)

    def _without_frozen(self, loss: Callable) -> Callable:
        """The loss, without a gradient for numbers that a script has frozen."""
        masks = self._run.model.trainable_masks
        if not masks:
            return loss
        return lambda params, *rest, **options: loss(stop_frozen_gradients(params, masks), *rest, **options)

    def made(self, tx: Any) -> Any:
        """The step of `train()`, in the quickest version that fits and that the arguments allow."""
        args = self._run.args
        if self._user_loss is not None:
            return UserLossStep(self._run, self._user_loss, self._without_frozen, tx)
        steps = [self.compiled(tx, remat=remat) for remat in args.remats]
        room = room_of(run_device(args)) if len(steps) > 1 else 0
        return Programs(RematFallback(steps, room), "The step")

    def advancer(
        self,
        step: Any,
        tx: Any,
        check: Callable[[], None],
        tell: Callable[[tuple[int, ...]], None],
        renewed: Callable[[], Any],
    ) -> Callable:
        """(step batch, learning rate) -> metrics. Replaces the model's parameters by their successors.

        Args:
            check: called before each step; raises the errors of background threads.
            renewed: called before each step; None, or the optimizer with which the step is made anew, as what it was
                made of has changed.
            tell: called before each step with the shape of its tokens: of the first one it says that it is compiled.
        """
        run, args = self._run, self._run.args
        if run.progress.optimizer_state is None:
            run.progress.optimizer_state = self.new_optimizer_state(tx)
        if run.sharding_plan is not None:
            logger.info("%s", describe(run.sharding_plan, run.model.params, run.progress.optimizer_state))
        key = run_key(args, run.model.backend)
        flops_a_token = 6 * run.model.num_parameters(exclude_embeddings=True)
        compilation = CompilationUntimed(run.events)

        def advance(batch, learning_rate):
            nonlocal step
            check()
            if (changed := renewed()) is not None:
                step = self.made(changed)
            step_key = None if key is None else jax.random.fold_in(key, run.state.global_step)
            rate, shape = np.float32(learning_rate), batch.arrays.tokens.shape
            tell(shape)
            run.model.params, run.progress.optimizer_state, metrics = step(
                run.model.params, run.progress.optimizer_state, batch.arrays, rate, step_key, run.frozen
            )
            compilation.done(shape)
            if run.reference is not None:
                run.reference.follow(run.state.global_step + 1, run.model.arrays)
            if run.rollout is not None:
                run.rollout.stepped(metrics)
            run.progress.tokens_seen += batch.num_primary_tokens
            run.state.num_input_tokens_seen += self._input_tokens(batch)
            run.state.total_flos += flops_a_token * batch.num_padded_tokens
            return metrics

        return advance

    def placed(self, batch: Any) -> Any:
        """Put the arrays of a batch on the devices.

        On a single device they are uncommitted, as weights are: committed ones would compile the step again.
        """
        run = self._run
        if run.sharding_plan is not None:
            return batch._replace(arrays=distributed(batch.arrays, run.sharding_plan.batch))
        with jax.default_device(run_device(run.args)):
            return batch._replace(arrays=jax.device_put(batch.arrays))

    def new_optimizer_state(self, tx: Any) -> Any:
        """The optimizer's state before the first step, sharded as the parameters are."""
        params, sharding_plan = self._run.model.params, self._run.sharding_plan
        if sharding_plan is None:
            return tx.init(params)
        return jax.jit(tx.init, out_shardings=sharding_plan.state(jax.eval_shape(tx.init, params), params))(params)

    def _input_tokens(self, batch: Any) -> int:
        """The tokens of a step that `include_num_input_tokens_seen` counts; completions were counted before."""
        if self._run.rollout is not None:
            return 0
        counted = {"all": batch.num_padded_tokens, "non_padding": batch.num_primary_tokens, "no": 0}
        return counted[self._run.args.include_num_input_tokens_seen]


def default_optimizer(run: RunState, choice: OptimizerChoice) -> Any:
    """Build the optimizer of this choice, with weight decay on the parameters that have it in transformers."""
    backend, args = run.model.backend, run.args
    decayed = {
        path: decays(path) and decays(tensor) and path not in backend.undecayed
        for path, tensor in backend.tensors.items()
    }
    warmup = args.get_warmup_steps(length_of(run).max_steps)
    most = max(args.max_grad_norm or 0.0, 0.0)  # as in transformers, a norm below 0 bounds nothing
    return choice.make(decayed, backend.torch_param_layout(), most, warmup)


def optimizer_of(run: RunState, made: Any, choice: OptimizerChoice) -> Optimizer:
    """The step's optimizer, which does not update what a script has frozen.

    Args:
        made: the result of the trainer's create_optimizer.

    Raises:
        TypeError: it is no optax transformation.
    """
    if not isinstance(made, Optimizer):
        check_optax(made)
        made = from_optax(made, peak=choice.peak, max_grad_norm=run.args.max_grad_norm)
    masks = run.model.trainable_masks
    if not masks:
        return made

    def update(*args, **options):
        updates, state = made.update(*args, **options)
        return zero_frozen_updates(updates, masks), state

    return made._replace(update=update)
