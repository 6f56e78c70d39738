"""The steps of a run on devices that are elsewhere: what they are called with, and what they compute."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from trl_jax.data.layout.batch import Batch
from trl_jax.data.windows import WINDOW
from trl_jax.dryrun.step_flops import Map, maps_of
from trl_jax.dryrun.step_memory import Given, Pass, on_device
from trl_jax.engine.sharding import make_mesh, placed
from trl_jax.hub.checkpoint.loading import Source
from trl_jax.hub.peft.backend import AdaptedBackend
from trl_jax.models.functional import abstract
from trl_jax.run.rng import run_key
from trl_jax.trainer.base_trainer import BaseTrainer

SURVEYED = 2_048  # steps of a dataset that are laid out to see how long they are


class Surveyed(NamedTuple):
    """The steps of a run: the largest, how many have rows or streams of each length, and means over them."""

    largest: Batch
    lengths: dict[int, int]
    places: float
    tokens: float


def batches(trainer: BaseTrainer) -> Surveyed:
    """What the first epoch's steps are computed on."""
    lengths, places, tokens, largest = Counter(), [], [], None
    for step, _ in zip(trainer.loader(trainer.train_dataset, training=True), range(SURVEYED), strict=False):
        lengths[step.arrays.tokens.shape[-1]] += 1
        places.append(step.num_places)
        tokens.append(step.num_tokens)
        if largest is None or step.num_places > largest.num_places:
            largest = step
    return Surveyed(largest.arrays, dict(sorted(lengths.items())), float(np.mean(places)), float(np.mean(tokens)))


def largest_evaluated(trainer: BaseTrainer) -> Batch:
    """The pass of the evaluation that has most tokens."""
    windows = trainer.parts.evaluator.windows(trainer.loader(trainer.eval_dataset, training=False))
    looked_at = itertools.islice(windows, SURVEYED // WINDOW)
    return max((arrays for window in looked_at for arrays, _ in window.passes), key=lambda one: one.tokens.size)


def given(trainer: BaseTrainer, tx: Any, batch: Batch) -> Given:
    """What the step is called with, for a batch of the trainer's loader."""
    params, frozen, sharding_plan = trainer.model.params, trainer.model.frozen, trainer.sharding_plan
    state = jax.eval_shape(tx.init, params)
    if sharding_plan is None:
        return Given(*_at(SingleDeviceSharding(trainer.args.jax_devices()[0]), (params, state, batch, frozen)))
    return Given(
        sharding_plan.placed(params),
        sharding_plan.placed_state(state, params),
        _at(sharding_plan.batch, batch),
        sharding_plan.placed(frozen),
    )


def given_evaluation(trainer: BaseTrainer, step: Given, batch: Batch) -> Given:
    """What is on a device during a pass of evaluation; `step` is what is there in training."""
    place = (
        SingleDeviceSharding(trainer.args.jax_devices()[0])
        if trainer.sharding_plan is None
        else trainer.sharding_plan.rows
    )
    return step._replace(batch=_at(place, batch))


def _at(place: Any, leaves: Any) -> Any:
    return jax.tree.map(lambda leaf: placed(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), place), leaves)


def traced(trainer: BaseTrainer, tx: Any, given: Given, *, remat: bool | str) -> jax.stages.Traced:
    """The step of `train()`, not yet for any kind of device."""
    key = jax.eval_shape(partial(run_key, trainer.args))
    rate = jax.ShapeDtypeStruct((), np.float32)
    with trainer.parts.run.on_device(), _platform(trainer):
        step = trainer.parts.train_step.compiled(tx, remat=remat)
        return step.trace(given.params, given.state, given.batch, rate, key, given.frozen)


def traced_evaluation(trainer: BaseTrainer, given: Given) -> jax.stages.Traced:
    """A pass of `evaluate()` in training; the optimizer's state has no part in it, but its place."""

    def scores(arrays: dict, state: Any, batch: Batch) -> jax.Array:
        del state
        return trainer.parts.evaluator.outputs(arrays, batch, dtype=trainer.args.compute_dtype)

    with trainer.parts.run.on_device(), _platform(trainer):
        return jax.jit(scores, keep_unused=True).trace(given.frozen | given.params, given.state, given.batch)


def _source(trainer: BaseTrainer) -> Source:
    backend = trainer.model.backend
    return backend.base.source if isinstance(backend, AdaptedBackend) else backend.source


def arch_of(trainer: BaseTrainer) -> Any:
    """The facts of the model, whether or not an adapter is on it."""
    return _source(trainer).config.arch


def maps(trainer: BaseTrainer) -> list[Map]:
    """The matrices of the model's layers, and of adapters beside them."""
    backend, trained, source = trainer.model.backend, trainer.model.params, _source(trainer)
    _, shapes = abstract(source.config.model)
    if isinstance(backend, AdaptedBackend):
        shapes = shapes | backend.plan.shapes
    return maps_of(shapes, source.config.arch, trained)


def _platform(trainer: BaseTrainer) -> AbstractContextManager:
    """What a single device's step is compiled for, as kernels ask it: of the mesh, where it isn't this machine's."""
    if trainer.sharding_plan is not None or trainer.args.platform == jax.default_backend():
        return nullcontext()
    return jax.sharding.use_abstract_mesh(make_mesh({}, trainer.args.jax_devices()).abstract_mesh)


def mesh_of(trainer: BaseTrainer) -> dict[str, int]:
    """The axes that have more than one device."""
    axes = {} if trainer.sharding_plan is None else trainer.sharding_plan.mesh.shape
    return {axis: size for axis, size in axes.items() if size > 1}


def one_pass(trainer: BaseTrainer, given: Given) -> Pass:
    """What a device computes at once."""
    tokens = given.batch.tokens
    passes, *rows, length = tokens.sharding.shard_shape(tokens.shape)
    mesh = mesh_of(trainer)
    return Pass(passes, math.prod(rows), length, mesh.get("tensor", 1), mesh.get("sequence", 1))


def gradients(trainer: BaseTrainer, given: Given) -> int:
    """Bytes that a device has of them."""
    params, sharding_plan = given.params, trainer.sharding_plan
    if sharding_plan is None:
        return on_device(params)
    return on_device({path: placed(params[path], place) for path, place in sharding_plan.gradients(params).items()})
