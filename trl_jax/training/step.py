"""Compile the optimizer step, feed it batches, and apply its results."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from datasets import IterableDataset

from trl_jax.config.base import BaseConfig
from trl_jax.data.layout_plan import EARLY
from trl_jax.data.loader import ExampleLoader
from trl_jax.hub.backend import Backend, check_unfrozen, stop_frozen_gradients, zero_frozen_updates
from trl_jax.mesh.mesh import distributed
from trl_jax.tasks.task import Task
from trl_jax.training.checkpoint_files import LoopProgress
from trl_jax.training.devices import (
    PROGRAMS_AT_ONCE,
    Programs,
    RematFallback,
    ShardedStep,
    compile_ahead,
    compiler_options,
    compiles_ahead,
    describe,
    device_memory_limit,
    run_device,
)
from trl_jax.training.forward import Forward, TraceAgain, run_key
from trl_jax.training.logging import CompilationUntimed
from trl_jax.training.optimizer_choice import OptimizerChoice, check_optax
from trl_jax.training.optimizers import Optimizer, decays, from_optax
from trl_jax.training.state import Setup
from trl_jax.training.update import make_step
from trl_jax.training.user_loss import UserLoss, UserLossStep

logger = logging.getLogger(__name__)

# Compile ahead: on devices that leave the host idle, threads compile programs while steps run.


def compiling_ahead(
    setup: Setup, train_step: TrainStep, steps: ExampleLoader, progress: LoopProgress
) -> contextlib.AbstractContextManager:
    """A context in which threads compile the step for the shapes of the loader's first steps after `progress`.

    They compile the best-fitting bucket of each step; until a program is ready, steps use longer buckets.
    """
    step = train_step.step
    predictable = isinstance(steps, ExampleLoader) and isinstance(step, Programs)
    predictable = predictable and not isinstance(steps.dataset, IterableDataset)
    if not predictable or not compiles_ahead(setup.args.device.type):
        return contextlib.nullcontext()
    coming = steps.with_layout(buckets=replace(steps.step_layout.buckets, serves_from=()))
    coming.set_epoch(progress.epoch + progress.epoch_over, 0 if progress.epoch_over else progress.examples)
    arrays = setup.model.params, setup.progress.optimizer_state, setup.frozen
    params, state, frozen = (_shapes(part, placed=setup.sharding_plan is not None) for part in arrays)
    key = run_key(setup.args, setup.model.backend)

    def make(batch: Any) -> None:
        with setup.on_device():
            step.program_for(params, state, batch, np.float32(0), key, frozen)

    left = setup.state.max_steps - setup.state.global_step
    return compile_ahead(
        make, (train_step.placed(batch).arrays for batch in islice(coming, min(EARLY, left))), PROGRAMS_AT_ONCE
    )


def _shapes(arrays: Any, *, placed: bool) -> Any:
    """The arrays' `ShapeDtypeStruct`s: the arrays themselves are donated to the step, so threads cannot keep them."""
    return jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding if placed else None), arrays
    )


# Recompile the step after a callback has changed something that is compiled into it.


class StepParts(NamedTuple):
    """What is compiled into a step and may be changed by a callback.

    loss: the task.
    frozen: names of the parameters that a script has frozen.
    values: numbers and strings set on the trainer, if the step contains a user-defined loss.
    trainer_loss: the trainer's `loss` if a script defines it.
    """

    loss: Task
    max_grad_norm: float | None
    frozen: frozenset[str]
    accumulation: int
    values: tuple[tuple[str, Any], ...] = ()
    trainer_loss: Callable | None = None

    @classmethod
    def now(cls, setup: Setup, trainer_loss: Callable | None) -> StepParts:
        args, values = setup.args, () if setup.completions_loss is None else setup.completions_loss.values()
        frozen = frozenset(setup.model.frozen_names)
        return cls(setup.task, args.max_grad_norm, frozen, args.gradient_accumulation_steps, values, trainer_loss)

    def changed_since(self, before: StepParts) -> str:
        """The differences, in words."""
        words = "the loss", "max_grad_norm", "what is frozen", "gradient_accumulation_steps"
        values = ", ".join(sorted({f"trainer.{name}" for name, _ in {*self.values} ^ {*before.values}}))
        words = *words, values, "trainer.loss"
        return " and ".join(word for word, old, now in zip(words, before, self, strict=True) if old != now)


class RecompileCheck:
    """Called before each step: returns a new optimizer if the step must be recompiled.

    settle: updates the run's task from attributes that a script has set.
    build_optimizer: creates an optimizer from the current arguments.
    trainer_loss: returns the trainer's `loss` if a script defines it, else None.
    """

    def __init__(
        self,
        setup: Setup,
        settle: Callable[[], None],
        build_optimizer: Callable[[], Optimizer],
        trainer_loss: Callable[[], Callable | None],
    ):
        self._setup, self._settle, self._build_optimizer = setup, settle, build_optimizer
        self._trainer_loss, self._before = trainer_loss, StepParts.now(setup, trainer_loss())

    def __call__(self) -> Optimizer | None:
        """None if nothing has changed since the last step was compiled.

        Raises:
            ValueError: the change would alter the optimizer's state or the layout of steps.
        """
        setup, before = self._setup, self._before
        self._settle()
        parts = self._before = StepParts.now(setup, self._trainer_loss())
        if parts == before:
            return None
        if parts.accumulation != before.accumulation:
            raise ValueError(
                f"gradient_accumulation_steps was changed from {before.accumulation} to {parts.accumulation} while the "
                "run trains, but its steps are already laid out. Change it between calls of train()."
            )
        check_unfrozen(before.frozen - parts.frozen)
        what = parts.changed_since(before)
        logger.warning(
            "After step %d, %s was changed: the step is compiled again, which happens after every such change.",
            setup.state.global_step,
            what,
        )
        tx = self._build_optimizer()
        state = jax.eval_shape(tx.init, setup.model.params)
        if jax.tree.structure(state) != jax.tree.structure(setup.progress.optimizer_state):
            raise ValueError(
                f"{what} was changed while the run trains, which changes the structure of the optimizer's state. "
                "Change it between calls of train(); for max_grad_norm, a very large number also turns clipping off."
            )
        return tx


class TrainStep:
    """Compiles the step of `train()`, feeds it batches, and updates the model with its results.

    step: built by `start`.
    """

    def __init__(
        self,
        setup: Setup,
        forward: Forward,
        trainer_loss: Callable[[], Callable | None],
        sharded_step: ShardedStep | None,
        user_loss: UserLoss | None,
        after_step: Callable[[dict[str, jax.Array]], None] | None,
    ):
        """
        Args:
            trainer_loss: returns a user-defined `loss` that replaces `Forward.loss`; None if there is none.
            sharded_step: divides the step over several devices; None on a single device.
            user_loss: a user-defined compute_loss; the step then runs one micro-batch at a time.
            after_step: gets the metrics of each step; None without rollouts.
        """
        self._setup, self._forward, self._trainer_loss, self._after_step = setup, forward, trainer_loss, after_step
        self.sharded_step, self.user_loss = sharded_step, user_loss

    @property
    def loss(self) -> Callable:
        """A subclass's `loss` if it defines one, otherwise `Forward.loss`."""
        return self._trainer_loss() or self._forward.loss

    def reference_shares_tower(self) -> bool:
        """As `Forward.reference_shares_tower`."""
        return self._forward.reference_shares_tower()

    def compiled(self, tx: Any, *, remat: bool | str) -> Any:
        """The jitted step of `train()`, with the arguments of `make_step`'s step. With a user-defined compute_loss this
        is for planning only: training runs one program per micro-batch instead.

        Args:
            remat: whether layers are recomputed in the backward pass.
        """
        setup = self._setup
        options = compiler_options(setup.args.device.type, several=setup.sharding_plan is not None)
        if self.user_loss is not None:
            return UserLossStep(self.user_loss, self._without_frozen, tx).in_one_program(options)
        loss = self._without_frozen(partial(self.loss, remat=remat))
        return make_step(loss, tx, self.sharded_step, options)

    def _without_frozen(self, loss: Callable) -> Callable:
        """Wrap the loss so that parameters frozen by a script have zero gradients."""
        masks = self._setup.model.trainable_masks
        if not masks:
            return loss
        return lambda params, *rest, **options: loss(stop_frozen_gradients(params, masks), *rest, **options)

    def build(self, tx: Any) -> Any:
        """The step of `train()`, compiled on demand as the fastest version that the arguments allow and that fits."""
        args = self._setup.args
        if self.user_loss is not None:
            return UserLossStep(self.user_loss, self._without_frozen, tx)
        steps = [self.compiled(tx, remat=remat) for remat in args.remats]
        room = device_memory_limit(run_device(args)) if len(steps) > 1 else 0
        return Programs(RematFallback(steps, room), "The step")

    def start(self, tx: Any) -> None:
        """Prepare for `run` with this optimizer. Its state is a new one unless the run has one."""
        setup = self._setup
        if setup.progress.optimizer_state is None:
            setup.progress.optimizer_state = self.new_optimizer_state(tx)
        if setup.sharding_plan is not None:
            logger.info("%s", describe(setup.sharding_plan, setup.model.params, setup.progress.optimizer_state))
        self._key = run_key(setup.args, setup.model.backend)
        self._flops_per_token = 6 * setup.model.num_parameters(exclude_embeddings=True)
        self._compilation = CompilationUntimed(setup.events)
        self.recompile(tx)

    def recompile(self, tx: Any) -> None:
        """Build the step again, with this optimizer."""
        self.step, self._tx = self.build(tx), tx

    def run(self, batch: Any, rate: float) -> dict[str, jax.Array]:
        """Run the step on a batch: update the model's parameters, and return the step's metrics."""
        setup = self._setup
        key = None if self._key is None else jax.random.fold_in(self._key, setup.state.global_step)
        metrics = None
        while metrics is None:
            try:
                metrics = self._computed(batch, np.float32(rate), key)
            except TraceAgain:  # the loss was NaN, so the step has changed nothing
                self.recompile(self._tx)
        self._compilation.done(batch.arrays.tokens.shape)
        if setup.reference is not None and setup.reference.moves_after(setup.state.global_step + 1):
            # A schedule-free optimizer takes gradients at other points than its averages (the model's params).
            now = self._tx.point(setup.model.params, setup.progress.optimizer_state)
            setup.reference.follow(setup.model.frozen | now)
        if self._after_step is not None:
            self._after_step(metrics)
        setup.progress.tokens_seen += batch.num_primary_tokens
        setup.state.num_input_tokens_seen += self._input_tokens(batch)
        setup.state.total_flos += self._flops_per_token * batch.num_padded_tokens
        return metrics

    def _computed(self, batch: Any, rate: np.float32, key: jax.Array | None) -> dict[str, jax.Array]:
        setup = self._setup
        setup.model.params, setup.progress.optimizer_state, metrics = self.step(
            setup.model.params, setup.progress.optimizer_state, batch.arrays, rate, key, setup.frozen
        )
        return metrics if setup.completions_loss is None else setup.completions_loss.finish(metrics)

    @contextlib.contextmanager
    def at_iterates(self) -> Iterator[None]:
        """A context in which the model has the parameters at which the next gradient is taken. With a schedule-free
        optimizer, these differ from the averages that it has otherwise."""
        model = self._setup.model
        averages = model.params
        model.params = self._tx.point(averages, self._setup.progress.optimizer_state)
        try:
            yield
        finally:
            model.params = averages

    def placed(self, batch: Any) -> Any:
        """Put the batch's arrays on the devices.

        On a single device they are uncommitted, like the weights: committed arrays would cause a recompilation.
        """
        setup = self._setup
        if setup.sharding_plan is not None:
            return batch._replace(arrays=distributed(batch.arrays, setup.sharding_plan.batch))
        with jax.default_device(run_device(setup.args)):
            return batch._replace(arrays=jax.device_put(batch.arrays))

    def new_optimizer_state(self, tx: Any) -> Any:
        """The initial optimizer state, sharded like the parameters."""
        params, sharding_plan = self._setup.model.params, self._setup.sharding_plan
        if sharding_plan is None:
            return tx.init(params)
        return jax.jit(tx.init, out_shardings=sharding_plan.state(jax.eval_shape(tx.init, params), params))(params)

    def _input_tokens(self, batch: Any) -> int:
        """The step's tokens for `include_num_input_tokens_seen`; 0 online, where the rollout has counted them."""
        if self._setup.online:
            return 0
        counted = {"all": batch.num_padded_tokens, "non_padding": batch.num_primary_tokens, "no": 0}
        return counted[self._setup.args.include_num_input_tokens_seen]


def default_optimizer(choice: OptimizerChoice, backend: Backend, args: BaseConfig, max_steps: int) -> Any:
    """Build the chosen optimizer, with weight decay on the same parameters as transformers."""
    return _optimizer(choice, backend, args, max_steps, _decayed(backend))


def optimizer_with_decay(
    choice: OptimizerChoice,
    backend: Backend,
    args: BaseConfig,
    max_steps: int,
    params: dict[str, jax.Array],
    names: Iterable[str],
) -> Any:
    """Build the chosen optimizer, with weight decay on the parameters with these names.

    Raises:
        ValueError: one array contains several parameters, and only some of them have weight decay.
    """
    returned, decayed = set(names), {}
    for path, of_path in _names(backend, params).items():
        decayed[path] = returned.issuperset(of_path)
        if not decayed[path] and (some := sorted(returned.intersection(of_path))):
            raise ValueError(
                f"get_decay_parameter_names returned {some[0]} but not {sorted(set(of_path) - returned)[0]}, which "
                "trl_jax stores in one array. Return both or neither."
            )
    return _optimizer(choice, backend, args, max_steps, decayed)


def optimizer_of_groups(
    choice: OptimizerChoice, backend: Backend, args: BaseConfig, max_steps: int, params: dict[str, jax.Array]
) -> Any:
    """Build the optimizer of a choice with groups. Parameters in no group are not updated, as in torch.

    Raises:
        ValueError: none of `params` is in a group, or groups divide an array otherwise than by layers.
    """
    groups = {name: group for group in choice.groups for name in group.names}
    if not any(name in groups for names in _names(backend, params).values() for name in names):
        raise ValueError(
            "optimizers: no parameter that trains is in the optimizer. With peft_config, the adapter is added after it "
            "was created: pass get_peft_model(model, peft_config) as model, and create the optimizer from it."
        )
    factors: dict[str, Any] = {}
    decays: dict[str, Any] = {}
    places: dict[str, list] = {path: [] for path in params}
    for name, entries in backend.locations(params).items():
        for path, index in entries:
            places[path].append((index, groups.get(name)))
    for path, array in params.items():
        entries = places[path] or [((), groups.get(backend.tensors[path]))]
        factors[path] = _by_layer(path, array, entries, "factor")
        decays[path] = _by_layer(path, array, entries, "weight_decay")
    return _optimizer(choice, backend, args, max_steps, decays, factors)


def _by_layer(path: str, array: jax.Array, places: list, field: str) -> Any:
    """The value of a parameter group's field for an array: a number, or one for each layer, in the array's rank."""
    values = [(index, 0.0 if group is None else vars(group)[field]) for index, group in places]
    if len({value for _, value in values}) <= 1:
        return values[0][1]
    per_layer = np.full(array.shape[0], np.nan, np.float32)
    for index, value in values:
        layer = index[0] if index and isinstance(index[0], int) else slice(None)
        if not (np.isnan(per_layer[layer]) | (per_layer[layer] == np.float32(value))).all():
            raise ValueError(
                f"optimizers: parameter groups with different {'lr' if field == 'factor' else field} divide {path}, "
                "which trl_jax stores in one array. Put the parameters of this kind into one group in each layer."
            )
        per_layer[layer] = value
    return per_layer.reshape(-1, *[1] * (array.ndim - 1))


def decay_names(backend: Backend, params: dict[str, jax.Array]) -> list[str]:
    """The names of the parameters to which transformers applies weight decay, in torch's order."""
    decayed = _decayed(backend)
    decayed_names = {name for path, names in _names(backend, params).items() if decayed[path] for name in names}
    return [name for name in backend.locations(params) if name in decayed_names]


def _optimizer(
    choice: OptimizerChoice,
    backend: Backend,
    args: BaseConfig,
    max_steps: int,
    decayed: dict[str, Any],
    factors: dict[str, Any] | None = None,
) -> Any:
    warmup = args.get_warmup_steps(max_steps)
    most = max(args.max_grad_norm or 0.0, 0.0)  # as in transformers, a negative norm disables clipping
    options = {} if factors is None else {"factors": factors}
    return choice.make(decayed, backend.torch_param_layout(), most, warmup, **options)


def _decayed(backend: Backend) -> dict[str, bool]:
    """Parameter path -> whether it has weight decay."""
    by_name, skipped = backend.decays_by_name, backend.undecayed | backend.buffers
    return {
        path: (path in by_name or decays(path)) and decays(tensor) and path not in skipped
        for path, tensor in backend.tensors.items()
    }


def _names(backend: Backend, params: dict[str, jax.Array]) -> dict[str, list[str]]:
    """Path -> the names (as in `named_parameters()`) of the parameters in its array."""
    by_path: dict[str, list[str]] = {path: [] for path in backend.tensors}
    for name, places in backend.locations(params).items():
        for path, _ in places:
            by_path[path].append(name)
    return {path: names or [backend.tensors[path]] for path, names in by_path.items()}


def optimizer_of(
    created: Any, choice: OptimizerChoice, max_grad_norm: float | None, masks: dict, vision: frozenset[str]
) -> Optimizer:
    """The step's optimizer. It skips parameters frozen by a script, and the vision tower in steps without images.

    Args:
        created: the result of the trainer's create_optimizer.
        masks: the model's `trainable_masks`.
        vision: paths of the trained parameters of a vision tower.

    Raises:
        TypeError: `created` is not an optax transformation.
    """
    if not isinstance(created, Optimizer):
        check_optax(created)
        created = from_optax(created, peak=choice.peak, max_grad_norm=max_grad_norm)
    if vision:
        created = _idle_without_images(created, vision)
    if not masks:
        return created

    def update(*args, **options):
        updates, state = created.update(*args, **options)
        return zero_frozen_updates(updates, masks), state

    return created._replace(update=update)


class TowerState(NamedTuple):
    """Optimizer state of a model with a vision tower.

    whole: the wrapped optimizer's state, with the moments of all parameters.
    scalars: the tower's own copies of the leaves that belong to no parameter (step counts): it skips some steps. Empty
        if the optimizer counts for all parameters.
    """

    whole: Any
    scalars: list[jax.Array]


def _idle_without_images(inner: Optimizer, vision: frozenset[str]) -> Optimizer:
    """Wrap an optimizer so that it skips the vision parameters, their moments and their step counts in steps without
    images, as torch skips parameters that took no part in a step. A tower that took part moves even if its gradients
    are all 0, for example because all rewards are equal.

    Without `idle`, gradients that are all 0 say that the tower took no part: a script's loss may leave out images.
    """

    def init(params: Any) -> TowerState:
        whole = inner.init(params)
        return TowerState(whole, [] if inner.counts_for_all else [jnp.copy(leaf) for leaf in _scalars(whole)])

    def update(
        gradients: dict[str, jax.Array], state: TowerState, params: Any, *, idle: Any = None, **options: Any
    ) -> tuple[Any, Any]:
        updates, new = inner.update(gradients, state.whole, params, **options)
        of_tower, new_tower = updates, new
        if state.scalars:
            of_tower, new_tower = inner.update(gradients, _with_scalars(state.whole, state.scalars), params, **options)
        if idle is None:
            idle = jnp.all(jnp.stack([jnp.all(gradients[path] == 0) for path in sorted(vision)]))
        updates = {path: jnp.where(idle, 0, of_tower[path]) if path in vision else updates[path] for path in updates}

        def kept(where: tuple, before: jax.Array, after: jax.Array, after_tower: jax.Array) -> jax.Array:
            return after if _keys(where).isdisjoint(vision) else jnp.where(idle, before, after_tower)

        whole = jax.tree_util.tree_map_with_path(kept, state.whole, new, new_tower)
        after = _scalars(new_tower) if state.scalars else []
        scalars = [jnp.where(idle, *both) for both in zip(state.scalars, after, strict=True)]
        return updates, TowerState(whole, scalars)

    return inner._replace(
        init=init,
        update=update,
        point=lambda params, state: inner.point(params, state.whole),
        options_for=lambda batch: {"idle": batch.images is None},
    )


def _keys(where: tuple) -> set[str]:
    return {key.key for key in where if isinstance(key, jax.tree_util.DictKey)}


def _scalars(state: Any) -> list[jax.Array]:
    """The leaves of an optimizer state that are under no dict key, i.e. belong to no parameter (step counts)."""
    return [leaf for where, leaf in jax.tree_util.tree_leaves_with_path(state) if not _keys(where)]


def _with_scalars(state: Any, scalars: list[jax.Array]) -> Any:
    rest = iter(scalars)
    return jax.tree_util.tree_map_with_path(lambda where, leaf: leaf if _keys(where) else next(rest), state)
