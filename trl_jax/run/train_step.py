"""The optimizer step of a run: what it is compiled of, what it is given, and what becomes of the model."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import jax
import numpy as np
from datasets import Dataset

from trl_jax.data.order import RunLength, plan
from trl_jax.engine.compilation import Programs, compiler_options
from trl_jax.engine.optimizers import Optimizer, decays, from_optax
from trl_jax.engine.remat import RematFallback, room_of
from trl_jax.engine.sharding import distributed
from trl_jax.engine.step import make_step
from trl_jax.hub.freezing import stop_frozen_gradients, zero_frozen_updates
from trl_jax.run.devices import describe, run_device
from trl_jax.run.evaluation import Evaluating
from trl_jax.run.optimizer_choice import check_optax
from trl_jax.run.rng import run_key
from trl_jax.run.user_loss_step import HookedStep

logger = logging.getLogger(__name__)


class Stepping(Evaluating):
    """The part of a trainer that takes steps. A script's subclass may override `create_optimizer`."""

    def _plan(self) -> RunLength:
        args = self.args
        return plan(
            len(self.train_dataset) if isinstance(self.train_dataset, Dataset) else None,
            batch_size=self.micro_batch_pairs,
            accumulation=args.gradient_accumulation_steps,
            drop_last=args.dataloader_drop_last,
            epochs=args.num_train_epochs,
            max_steps=args.max_steps,
        )

    def compiled_step(self, tx: Any, *, remat: bool | str) -> Any:
        """A step of `train()`, jitted; arguments as of `make_step`'s. `remat`: layers are computed twice."""
        options = compiler_options(self.args.device.type, several=self.sharding_plan is not None)
        return make_step(self._held(partial(self.loss, remat=remat)), tx, self.sharded_step, options)

    def _held(self, loss: Any) -> Any:
        """The loss, without a gradient for what a script holds still."""
        moves = self.model.trainable_masks
        if not moves:
            return loss
        return lambda params, *rest, **how: loss(stop_frozen_gradients(params, moves), *rest, **how)

    def _step(self, tx: Any) -> Any:
        """The step of `train()`, in the quickest version that fits and that the arguments allow."""
        if "compute_loss" in self.overridden:
            return HookedStep(self, tx)
        steps = [self.compiled_step(tx, remat=remat) for remat in self.args.remats]
        room = room_of(run_device(self.args)) if len(steps) > 1 else 0
        return Programs(RematFallback(steps, room), "The step")

    def _advancer(self, step: Any, tx: Any) -> Any:
        """(step batch, learning rate) -> metrics. Replaces the model's parameters by their successors."""
        if self._optimizer_state is None:
            self._optimizer_state = self._new_optimizer_state(tx)
        if self.sharding_plan is not None:
            logger.info("%s", describe(self.sharding_plan, self.model.params, self._optimizer_state))
        key = run_key(self.args)
        flops_a_token = 6 * self.model.num_parameters(exclude_embeddings=True)

        def advance(batch, learning_rate):
            self._background.check()
            step_key = None if key is None else jax.random.fold_in(key, self.state.global_step)
            rate = np.float32(learning_rate)
            self.model.params, self._optimizer_state, metrics = step(
                self.model.params, self._optimizer_state, batch.arrays, rate, step_key, self.model.frozen
            )
            self._tokens_seen += batch.num_tokens
            self.state.num_input_tokens_seen += self._input_tokens(batch)
            self.state.total_flos += flops_a_token * batch.num_padded_tokens
            return metrics

        return advance

    def _place(self, batch: Any) -> Any:
        """The batch with its arrays on the devices. On a single one they are not bound to it: weights are not, and the
        step would compile for either."""
        if self.sharding_plan is not None:
            return batch._replace(arrays=distributed(batch.arrays, self.sharding_plan.batch))
        with jax.default_device(run_device(self.args)):
            return batch._replace(arrays=jax.device_put(batch.arrays))

    def create_optimizer(self) -> Any:
        """What turns gradients into updates; `optimizers` of the constructor, if given, or what `args.optim` names.

        Overriding it: return any optax transformation; its updates are scaled as torch's LambdaLR would, by the
        schedule of the arguments as a share of its peak.
        """
        backend = self.model.backend
        decayed = {
            path: decays(path) and decays(tensor) and path not in backend.undecayed
            for path, tensor in backend.tensors.items()
        }
        warmup = self.args.get_warmup_steps(self._plan().max_steps)
        return self._chosen.make(decayed, backend.torch_param_layout(), self.args.max_grad_norm, warmup)

    def _optimizer(self) -> Optimizer:
        made = self.create_optimizer()
        if not isinstance(made, Optimizer):
            check_optax(made)
            made = from_optax(made, peak=self._chosen.peak, max_grad_norm=self.args.max_grad_norm)
        moves = self.model.trainable_masks
        if not moves:
            return made

        def update(*given, **how):
            updates, state = made.update(*given, **how)
            return zero_frozen_updates(updates, moves), state

        return made._replace(update=update)

    def _input_tokens(self, batch: Any) -> int:
        """What `include_num_input_tokens_seen` counts of a step."""
        counted = {"all": batch.num_padded_tokens, "non_padding": batch.num_tokens, "no": 0}
        return counted[self.args.include_num_input_tokens_seen]
