"""The flags of `trl-jax plan`: its own, and those of the trainer that is planned."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from trl_jax.core.chips import known
from trl_jax.core.trainers import DEFAULT, TRAINERS
from trl_jax.scripts.reward_sources import RewardSources
from trl_jax.scripts.training import fit_to_release
from trl_jax.scripts.utils import DatasetMixtureConfig, ScriptArguments, TrlParser, read_config, take_config
from trl_jax.trainer.model_config import ModelConfig

_REWARDED = ("grpo", "rloo")  # whose flags name rewards, too


@dataclass
class PlanArguments:
    """The devices to plan for, and what to report."""

    _argument_group_name = "plan"

    topology: str = field(metadata={"help": f"The devices to plan for. {known()}"})
    json: str | None = field(default=None, metadata={"help": "File to write the figures to, as JSON."})
    suggestions: bool = field(
        default=True,
        metadata={
            "help": "Where it does not fit, plan settings that might make it fit, one by one.",
            "aliases": ["--levers"],  # its former name
        },
    )
    generate: str | None = field(
        default=None,
        metadata={
            "help": "Plan a generation, too, as 64x256+128: 64 prompts of 256 tokens, and 128 new ones for each. Of "
            "grpo and rloo theirs is planned."
        },
    )
    trainer: str = field(
        default=DEFAULT, metadata={"help": "The command that trains, for whose run to plan; flags are its own."}
    )


class PlanParser(TrlParser):
    """Parser of (PlanArguments, ScriptArguments, the trainer's config, ModelConfig, DatasetMixtureConfig).

    The flags are those of the trainer that `--trainer` names, on the command line or in the YAML file; where neither
    does, those of `trainer`.
    """

    def __init__(self, trainer: str, prog: str | None = None):
        self.trainer, config = trainer, TRAINERS[trainer].load_config()
        script = RewardSources if trainer in _REWARDED else ScriptArguments
        kinds = (PlanArguments, script, _elsewhere(config), ModelConfig, DatasetMixtureConfig)
        super().__init__(kinds, prog=prog)
        self.usage = "%(prog)s --model_name_or_path MODEL --topology v5e:4x4\n       [--config FILE.yaml] [flags]"
        self.description = (
            "Will my run fit on these devices? For example:\n\n"
            "  trl-jax plan --model_name_or_path meta-llama/Llama-3.1-8B --topology v5e:4x4 \\\n"
            "      --fsdp full_shard --max_length 1024 --per_device_train_batch_size 1\n\n"
            "The training step is compiled for devices you do not have, from config.json alone: memory, collectives, a "
            f"lower bound on the time of a step, and whether it fits. Flags are those of `trl-jax {trainer}`; without "
            "--dataset_name every text is taken to be as long as --max_length and to share nothing. --trainer plans "
            f"the run of another command: {', '.join(TRAINERS)}."
        )
        fit_to_release(self, config.argument_table)

    def parse_args_and_config(self, args: Iterable[str] | None = None, **options: Any) -> tuple[Any, ...]:
        args = list(sys.argv[1:] if args is None else args)
        named = _trainer_in(args)
        if named in (None, self.trainer):
            return super().parse_args_and_config(args, **options)
        if named not in tuple(TRAINERS):
            raise ValueError(f"--trainer {named} is unknown: wanted one of {', '.join(TRAINERS)}.")
        return PlanParser(named, self.prog).parse_args_and_config(args, **options)


def _elsewhere(config: type) -> type:
    """The config of a run on other devices than this machine's."""
    return type(config.__name__, (config,), {"counts_devices": False, "__module__": config.__module__})


def _trainer_in(args: list[str]) -> str | None:
    """The trainer that the flags or, where they say nothing of it, their YAML file name."""
    flags, path = take_config(args)
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--trainer", nargs="?")
    named = parser.parse_known_args(flags)[0].trainer
    return read_config(path).get("trainer") if named is None and path is not None else named
