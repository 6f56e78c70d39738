"""A run on devices that are elsewhere: the trainer's own step, from a config.json and shapes."""

from __future__ import annotations

import copy
import math
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import numpy as np
from datasets import Dataset, IterableDataset
from jax.sharding import SingleDeviceSharding
from transformers.trainer_utils import SaveStrategy

from trl_jax.core.chips import Topology
from trl_jax.data.layout import PairBatch
from trl_jax.engine.ahead import devices
from trl_jax.engine.mesh import make_mesh, placed
from trl_jax.hub.pretrained import PreTrainedModel
from trl_jax.trainer.base_config import Device
from trl_jax.trainer.plan_arithmetic import Pass, on_device
from trl_jax.trainer.reward_config import RewardConfig
from trl_jax.trainer.reward_trainer import RewardTrainer

SIDES = {"chosen": 1, "rejected": 2}  # made-up pairs, of one id each
SURVEYED = 2_048  # steps of a dataset that are laid out to see how long they are


@dataclass(frozen=True)
class Elsewhere(Device):
    """A device of this kind, wherever."""

    platform: str = "cpu"

    @property
    def type(self) -> str:
        return "cuda" if self.platform == "gpu" else self.platform


class PlannedConfig(RewardConfig):
    """A RewardConfig of a run on devices of another machine."""

    platform: ClassVar[str]
    devices: ClassVar[list]

    @property
    def device(self) -> Device:
        return Elsewhere(self.use_cpu, self.platform)

    def jax_devices(self) -> list:
        return self.devices


class NoText:
    """In the place of a tokenizer where pairs come as ids."""

    pad_token, pad_token_id, eos_token, eos_token_id = "<pad>", 0, "</s>", 0

    def get_vocab(self) -> dict[str, int]:
        return {self.pad_token: 0, self.eos_token: 0}


class Batches(NamedTuple):
    """The steps of a run: the largest, how many have rows or streams of each length, and means over them."""

    largest: PairBatch
    lengths: dict[int, int]
    places: float
    tokens: float


def planned(args: RewardConfig, topology: Topology, output_dir: str) -> PlannedConfig:
    """The arguments for a run on `topology` that saves, evaluates, reports and pushes nothing."""
    args = copy.copy(args)
    place = {"platform": topology.platform, "devices": devices(topology)}
    args.__class__ = type("PlannedConfig", (PlannedConfig,), place)
    quiet = {"output_dir": output_dir, "report_to": [], "push_to_hub": False, "eval_strategy": "no", "use_cpu": False}
    quiet |= {"save_strategy": SaveStrategy.NO, "load_best_model_at_end": False, "eval_on_start": False}
    for name, value in quiet.items():
        setattr(args, name, value)
    return args


def trainer_of(
    model: PreTrainedModel, args: PlannedConfig, rows: Dataset | IterableDataset | None, processing_class: Any = None
) -> RewardTrainer:
    """The trainer of the run; without `rows`, of pairs as long as max_length that have nothing in common.

    Raises:
        ValueError: there are neither rows nor a max_length.
    """
    if rows is None:
        if args.max_length is None:
            raise ValueError("max_length=None bounds no text: pass --max_length, or --dataset_name for real lengths.")
        rows, processing_class = _longest_pairs(args), NoText()
        args = copy.copy(args)
        args.eos_token = args.pad_token = args.chat_template_path = None
    return RewardTrainer(model=model, args=args, train_dataset=rows, processing_class=processing_class)


def _longest_pairs(args: PlannedConfig) -> Dataset:
    pairs = args.per_device_train_batch_size * args.gradient_accumulation_steps * len(args.devices)
    return Dataset.from_dict({f"{side}_ids": [[id] * args.max_length] * pairs for side, id in SIDES.items()})


def batches(trainer: RewardTrainer) -> Batches:
    """What the first epoch's steps are computed on."""
    lengths, places, tokens, largest = Counter(), [], [], None
    for step, _ in zip(trainer.loader(trainer.train_dataset, training=True), range(SURVEYED), strict=False):
        lengths[step.arrays.tokens.shape[-1]] += 1
        places.append(step.num_places)
        tokens.append(step.num_tokens)
        if largest is None or step.num_places > largest.num_places:
            largest = step
    return Batches(largest.arrays, dict(sorted(lengths.items())), float(np.mean(places)), float(np.mean(tokens)))


class Shapes(NamedTuple):
    """What the step is called with: shapes, each with the places where its array would lie."""

    params: dict[str, jax.ShapeDtypeStruct]
    state: Any
    batch: PairBatch


def shapes(trainer: RewardTrainer, tx: Any, batch: PairBatch) -> Shapes:
    """Of the step with a batch of the trainer's loader."""
    params, division = trainer.model.params, trainer.division
    state = jax.eval_shape(tx.init, params)
    if division is None:
        alone = SingleDeviceSharding(trainer.args.jax_devices()[0])
        return Shapes(*jax.tree.map(lambda leaf: placed(_shape(leaf), alone), (params, state, batch)))
    return Shapes(
        division.placed(params),
        division.placed_state(state, params),
        jax.tree.map(lambda leaf: placed(_shape(leaf), division.batch), batch),
    )


def _shape(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def traced(trainer: RewardTrainer, tx: Any, given: Shapes, *, remat: bool | str) -> jax.stages.Traced:
    """The step of `train()`, not yet for any kind of device."""
    key = None if trainer.args.disable_dropout else jax.eval_shape(lambda: jax.random.key(0))
    rate = jax.ShapeDtypeStruct((), np.float32)
    with trainer._on_device(), _platform(trainer):
        return trainer.compiled_step(tx, remat=remat).trace(*given, rate, key)


def _platform(trainer: RewardTrainer) -> AbstractContextManager:
    """What a single device's step is compiled for, as kernels ask it: of the mesh, where it isn't this machine's."""
    if trainer.division is not None or trainer.args.platform == jax.default_backend():
        return nullcontext()
    return jax.sharding.use_abstract_mesh(make_mesh({}, trainer.args.jax_devices()).abstract_mesh)


def mesh_of(trainer: RewardTrainer) -> dict[str, int]:
    """The axes that have more than one device."""
    axes = {} if trainer.division is None else trainer.division.mesh.shape
    return {axis: size for axis, size in axes.items() if size > 1}


def one_pass(trainer: RewardTrainer, given: Shapes) -> Pass:
    """What a device computes at once."""
    tokens = given.batch.tokens
    passes, *rows, length = tokens.sharding.shard_shape(tokens.shape)
    mesh = mesh_of(trainer)
    return Pass(passes, math.prod(rows), length, mesh.get("tensor", 1), mesh.get("sequence", 1))


def gradients(trainer: RewardTrainer, given: Shapes) -> int:
    """Bytes that a device has of them."""
    params, division = given.params, trainer.division
    if division is None:
        return on_device(params)
    return on_device({path: placed(params[path], place) for path, place in division.gradients(params).items()})
