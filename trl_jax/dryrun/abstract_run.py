"""A trainer on devices that this machine does not have: shapes in the place of weights and, if need be, of data."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from datasets import Dataset, IterableDataset
from transformers.trainer_utils import SaveStrategy

from trl_jax.core.chips import Topology
from trl_jax.dryrun.compiler import devices
from trl_jax.hub.pretrained import PreTrainedModel
from trl_jax.run.arguments.jax_arguments import Device
from trl_jax.trainer.reward_config import RewardConfig
from trl_jax.trainer.reward_trainer import RewardTrainer

SIDES = {"chosen": 1, "rejected": 2}  # the token id that fills a made-up answer of this column


@dataclass(frozen=True)
class PlannedDevice(Device):
    """The `args.device` of a planned run: of the planned platform, whatever this machine has."""

    platform: str = "cpu"

    @property
    def type(self) -> str:
        return "cuda" if self.platform == "gpu" else self.platform


class PlannedConfig(RewardConfig):
    """A RewardConfig whose device and mesh are those planned for; see `planned`."""

    platform: ClassVar[str]
    devices: ClassVar[list]

    @property
    def device(self) -> Device:
        return PlannedDevice(self.use_cpu, self.platform)

    def jax_devices(self) -> list:
        return self.devices


class PlaceholderTokenizer:
    """Stands in for a tokenizer where pairs come as token ids."""

    pad_token, pad_token_id, eos_token, eos_token_id = "<pad>", 0, "</s>", 0

    def get_vocab(self) -> dict[str, int]:
        return {self.pad_token: 0, self.eos_token: 0}


def planned(args: RewardConfig, topology: Topology, output_dir: str) -> PlannedConfig:
    """Copy the arguments for a run on `topology` that saves, reports and pushes nothing and is handed its model."""
    args = copy.copy(args)
    target = {"platform": topology.platform, "devices": devices(topology)}
    args.__class__ = type("PlannedConfig", (PlannedConfig,), target)
    quiet = {"output_dir": output_dir, "report_to": [], "push_to_hub": False, "use_cpu": False}
    quiet |= {"save_strategy": SaveStrategy.NO, "load_best_model_at_end": False, "model_init_kwargs": None}
    for name, value in quiet.items():
        setattr(args, name, value)
    return args


def evaluates(args: RewardConfig) -> bool:
    """Whether the run evaluates on the way."""
    return args.eval_strategy != "no" or args.eval_on_start


class Rows(NamedTuple):
    """The pairs of a run and their tokenizer. None as `train` stands for made-up pairs of max_length tokens each, which
    share no prefix."""

    train: Dataset | IterableDataset | None = None
    test: Any = None
    tokenizer: Any = None


def trainer_of(model: PreTrainedModel, args: PlannedConfig, rows: Rows) -> RewardTrainer:
    """Build the trainer of the run.

    Raises:
        ValueError: rows.train and args.max_length are both None, or RewardTrainer refuses the arguments.
    """
    if rows.train is None:
        if args.max_length is None:
            raise ValueError("max_length=None bounds no text: pass --max_length, or --dataset_name for real lengths.")
        rows = _longest_pairs(args)
        args = copy.copy(args)
        args.eos_token = args.pad_token = args.chat_template_path = None
    return RewardTrainer(
        model=model,
        args=args,
        train_dataset=rows.train,
        eval_dataset=rows.test if evaluates(args) else None,
        processing_class=rows.tokenizer,
    )


def _longest_pairs(args: PlannedConfig) -> Rows:
    def pairs(count: int) -> Dataset:
        ids = {f"{side}_ids": [[id] * args.max_length] * count * len(args.devices) for side, id in SIDES.items()}
        return Dataset.from_dict(ids)

    train = pairs(args.per_device_train_batch_size * args.gradient_accumulation_steps)
    return Rows(train, pairs(args.per_device_eval_batch_size), PlaceholderTokenizer())
