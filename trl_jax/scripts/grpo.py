"""The command `trl-jax grpo`: trains a language model on its own completions, by rewards relative to their group."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trl_jax.scripts.train import EXAMPLE, RewardSources, parser_of, reward_sources, train

if TYPE_CHECKING:
    from trl_jax.scripts.data import DatasetMixtureConfig
    from trl_jax.scripts.utils import TrlParser
    from trl_jax.trainer.grpo_config import GRPOConfig
    from trl_jax.trainer.model_config import ModelConfig


@dataclass
class GRPOScriptArguments(RewardSources):
    """The data, and the rewards of completions."""


def main(
    script_args: GRPOScriptArguments,
    training_args: GRPOConfig,
    model_args: ModelConfig,
    dataset_args: DatasetMixtureConfig | None = None,
) -> None:
    """Train, save to training_args.output_dir, and say so. Changes none of its arguments.

    Raises:
        ValueError: there is no reward, or one that is no function.
    """
    rewards = reward_sources(script_args)
    train("grpo", script_args, training_args, model_args, dataset_args, reward_funcs=rewards)


def make_parser(subparsers: argparse._SubParsersAction | None = None, prog: str | None = None) -> TrlParser:
    """Parser of (GRPOScriptArguments, GRPOConfig, ModelConfig, DatasetMixtureConfig), alone or as `grpo`."""
    return parser_of("grpo", subparsers, prog, script_arguments=GRPOScriptArguments, example=EXAMPLE)


if __name__ == "__main__":
    main(*make_parser().parse_args_and_config())
