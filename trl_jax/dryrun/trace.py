"""Trace the steps of a planned run: the shapes they are called with and the programs they become."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from trl_jax.data.eval_chunks import CHUNK_BATCHES
from trl_jax.data.layout.batch import Batch
from trl_jax.data.step_layout import StepBatch
from trl_jax.dryrun import step_memory
from trl_jax.dryrun.made_completions import begun
from trl_jax.dryrun.step_flops import Map, maps_of, reference_flops
from trl_jax.dryrun.step_memory import Pass, StepArguments
from trl_jax.hub.backend import Backend
from trl_jax.hub.checkpoint.loading import Source
from trl_jax.hub.peft.backend import AdaptedBackend, LoraBackend
from trl_jax.mesh.arrays import placed
from trl_jax.mesh.sharding import make_mesh
from trl_jax.run import data
from trl_jax.run.evaluation.completions import CompletionEvaluator
from trl_jax.run.step.rng import run_key
from trl_jax.trainer.base_trainer import BaseTrainer

MAX_SURVEYED = 2_048  # steps of a dataset that are laid out for their lengths
MAX_OF_PROMPTS = 64  # the same, of completions that are all as long as they may be


class Survey(NamedTuple):
    """The steps of a run.

    largest: the batch with most tokens. lengths: length of its (packed) rows -> how many steps have it. places, tokens:
    means over steps of tokens computed on, padding included, and of tokens of real text. layout: of their rows.
    """

    largest: Batch
    lengths: dict[int, int]
    places: float
    tokens: float
    layout: str


def batches(trainer: BaseTrainer) -> Survey:
    """Survey the first batches of the first epoch."""
    lengths, places, tokens, largest = Counter(), [], [], None
    steps, layout = _steps(trainer)
    for step in steps:
        lengths[step.arrays.tokens.shape[-1]] += 1
        places.append(step.num_places)
        tokens.append(step.num_tokens)
        if largest is None or step.num_places > largest.num_places:
            largest = step
    means = float(np.mean(places)), float(np.mean(tokens))
    return Survey(largest.arrays, dict(sorted(lengths.items())), *means, layout)


def _steps(trainer: BaseTrainer) -> tuple[Iterable[StepBatch], str]:
    """The steps of the first epoch, and their layout."""
    run = trainer.parts.run
    if run.rollout is not None:
        steps = itertools.islice(begun(run.rollout), MAX_OF_PROMPTS)
        return steps, data.step_layout(run, training=True).layout
    loader = trainer.loader(trainer.train_dataset, training=True)
    return itertools.islice(loader, MAX_SURVEYED), loader.step_layout.layout


def largest_evaluated(trainer: BaseTrainer) -> Batch:
    """The batch of the evaluation that has most tokens."""
    evaluator = trainer.parts.evaluator
    if isinstance(evaluator, CompletionEvaluator):
        rows = itertools.islice(evaluator.batches(trainer.eval_dataset), MAX_OF_PROMPTS)
        return data.only_pass(trainer.parts.run, max(map(evaluator.arrays, rows), key=lambda one: one.tokens.size))
    chunks = trainer.parts.evaluator.chunks(trainer.loader(trainer.eval_dataset, training=False))
    surveyed = itertools.islice(chunks, MAX_SURVEYED // CHUNK_BATCHES)
    return max((arrays for chunk in surveyed for arrays, _ in chunk.passes), key=lambda one: one.tokens.size)


def step_arguments(trainer: BaseTrainer, tx: Any, batch: Batch) -> StepArguments:
    """The arguments of the compiled step, for a batch of the trainer's loader."""
    params, frozen, sharding_plan = trainer.model.params, trainer.parts.run.frozen, trainer.sharding_plan
    state = jax.eval_shape(tx.init, params)
    if sharding_plan is None:
        return StepArguments(*_at(SingleDeviceSharding(trainer.args.jax_devices()[0]), (params, state, batch, frozen)))
    return StepArguments(
        sharding_plan.placed(params),
        sharding_plan.placed_state(state, params),
        _at(sharding_plan.batch, batch),
        sharding_plan.placed(frozen),
    )


def evaluation_arguments(trainer: BaseTrainer, step: StepArguments, batch: Batch) -> StepArguments:
    """The arguments of an evaluation's pass: those of the training `step` with this batch."""
    sharding = (
        SingleDeviceSharding(trainer.args.jax_devices()[0])
        if trainer.sharding_plan is None
        else trainer.sharding_plan.rows
    )
    return step._replace(batch=_at(sharding, batch))


def _at(sharding: Any, leaves: Any) -> Any:
    """Shapes and dtypes of these arrays, with this sharding."""
    return jax.tree.map(lambda leaf: placed(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), sharding), leaves)


def traced(trainer: BaseTrainer, tx: Any, arguments: StepArguments, *, remat: bool | str) -> jax.stages.Traced:
    """Trace the step of `train()`; it is lowered for a platform later."""
    key = jax.eval_shape(partial(run_key, trainer.args, trainer.parts.run.model.backend))
    rate = jax.ShapeDtypeStruct((), np.float32)
    with on_device(trainer):
        step = trainer.parts.train_step.compiled(tx, remat=remat)
        return step.trace(arguments.params, arguments.state, arguments.batch, rate, key, arguments.frozen)


def traced_evaluation(trainer: BaseTrainer, arguments: StepArguments) -> jax.stages.Traced:
    """Trace a pass of `evaluate()` during training; the optimizer's state is an argument that only takes memory."""

    evaluator = trainer.parts.evaluator

    def scores(arrays: dict, state: Any, batch: Batch) -> Any:
        del state
        if isinstance(evaluator, CompletionEvaluator):
            return evaluator.sums(arrays, batch)
        return evaluator.outputs(arrays, batch, dtype=trainer.args.compute_dtype)

    params = arguments.frozen | arguments.params
    with on_device(trainer):
        return jax.jit(scores, keep_unused=True).trace(params, arguments.state, arguments.batch)


def _source(backend: Backend) -> Source:
    return backend.base.source if isinstance(backend, AdaptedBackend) else backend.source


def arch_of(trainer: BaseTrainer) -> Any:
    """The `Arch` of the model, under an adapter that of its base."""
    return _source(trainer.model.backend).config.arch


def maps(trainer: BaseTrainer) -> list[Map]:
    """The matrices of the model's layers, and those of adapters on them."""
    return _maps(trainer.model.backend, trainer.model.params)


def _maps(backend: Backend, trained: Collection[str]) -> list[Map]:
    source = _source(backend)
    _, shapes = source.config.abstract
    if isinstance(backend, LoraBackend):
        shapes = shapes | backend.plan.shapes
    return maps_of(shapes, source.config.arch, trained)


def reference_flops_of(trainer: BaseTrainer, batch: Batch) -> int:
    """FLOPs of the reference that a step computes beside the model; 0 without one."""
    if trainer.parts.run.reference is None:
        return 0
    backend = trainer.parts.run.reference.backend
    arch = _source(backend).config.arch
    heads = 2 if trainer.parts.run.task.compares_distributions else 1  # in the backward pass again
    return reference_flops(_maps(backend, ()), batch, arch, causal=backend.causal, heads=heads)


@contextmanager
def on_device(trainer: BaseTrainer) -> Iterator[None]:
    """Trace and compile as on the run's device."""
    with trainer.parts.run.on_device(), _platform(trainer):
        yield


def _platform(trainer: BaseTrainer) -> AbstractContextManager:
    """Tell kernels the platform of a single device, by an abstract mesh, where it isn't this machine's."""
    if trainer.sharding_plan is not None or trainer.args.platform == jax.default_backend():
        return nullcontext()
    return jax.sharding.use_abstract_mesh(make_mesh({}, trainer.args.jax_devices()).abstract_mesh)


def mesh_of(trainer: BaseTrainer) -> dict[str, int]:
    """Axis -> size, of the axes that have more than one device."""
    axes = {} if trainer.sharding_plan is None else trainer.sharding_plan.mesh.shape
    return {axis: size for axis, size in axes.items() if size > 1}


def one_pass(trainer: BaseTrainer, arguments: StepArguments) -> Pass:
    """The rows that one device computes at once."""
    tokens = arguments.batch.tokens
    passes, *rows, length = tokens.sharding.shard_shape(tokens.shape)
    mesh = mesh_of(trainer)
    return Pass(passes, math.prod(rows), length, mesh.get("tensor", 1), mesh.get("sequence", 1))


def gradients(trainer: BaseTrainer, arguments: StepArguments) -> int:
    """Bytes of gradients on one device."""
    params, sharding_plan = arguments.params, trainer.sharding_plan
    if sharding_plan is None:
        return step_memory.on_device(params)
    places = sharding_plan.gradients(params)
    return step_memory.on_device({path: placed(params[path], place) for path, place in places.items()})
