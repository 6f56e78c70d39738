"""The command `trl-jax rloo`: trains a language model on its own completions, by REINFORCE leave-one-out."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trl_jax.scripts.train import EXAMPLE, RewardSources, parser_of, reward_sources, train

if TYPE_CHECKING:
    from trl_jax.scripts.data import DatasetMixtureConfig
    from trl_jax.scripts.utils import TrlParser
    from trl_jax.trainer.model_config import ModelConfig
    from trl_jax.trainer.rloo_config import RLOOConfig


@dataclass
class RLOOScriptArguments(RewardSources):
    """The data, and the rewards of completions."""


def main(
    script_args: RLOOScriptArguments,
    training_args: RLOOConfig,
    model_args: ModelConfig,
    dataset_args: DatasetMixtureConfig | None = None,
) -> None:
    """Train, save to training_args.output_dir, and say so. Changes none of its arguments.

    Raises:
        ValueError: there is no reward, or one that is no function.
    """
    rewards = reward_sources(script_args)
    train("rloo", script_args, training_args, model_args, dataset_args, reward_funcs=rewards)


def make_parser(subparsers: argparse._SubParsersAction | None = None, prog: str | None = None) -> TrlParser:
    """Parser of (RLOOScriptArguments, RLOOConfig, ModelConfig, DatasetMixtureConfig), alone or as `rloo`."""
    return parser_of("rloo", subparsers, prog, script_arguments=RLOOScriptArguments, example=EXAMPLE)


if __name__ == "__main__":
    main(*make_parser().parse_args_and_config())
