"""The command `trl-jax reward`: trains a reward model on preference pairs."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from trl_jax.scripts.train import parser_of, train

if TYPE_CHECKING:
    from trl_jax.scripts.data import DatasetMixtureConfig
    from trl_jax.scripts.utils import ScriptArguments, TrlParser
    from trl_jax.trainer.model_config import ModelConfig
    from trl_jax.trainer.reward_config import RewardConfig


def main(
    script_args: ScriptArguments,
    training_args: RewardConfig,
    model_args: ModelConfig,
    dataset_args: DatasetMixtureConfig | None = None,
) -> None:
    """Train, save to training_args.output_dir, and say so. Changes none of its arguments."""
    train("reward", script_args, training_args, model_args, dataset_args)


def make_parser(subparsers: argparse._SubParsersAction | None = None, prog: str | None = None) -> TrlParser:
    """Parser of (ScriptArguments, RewardConfig, ModelConfig, DatasetMixtureConfig), alone or as `reward`."""
    return parser_of("reward", subparsers, prog)


if __name__ == "__main__":
    main(*make_parser().parse_args_and_config())
