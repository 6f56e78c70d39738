"""The command `trl-jax rloo`: trains a language model on its own completions, by REINFORCE leave-one-out."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from trl_jax.scripts.training import parser_of, train

if TYPE_CHECKING:
    from trl_jax.scripts.utils import DatasetMixtureConfig, ScriptArguments, TrlParser
    from trl_jax.trainer.model_config import ModelConfig
    from trl_jax.trainer.rloo_config import RLOOConfig


def main(
    script_args: ScriptArguments,
    training_args: RLOOConfig,
    model_args: ModelConfig,
    dataset_args: DatasetMixtureConfig | None = None,
) -> None:
    """Train, save to training_args.output_dir, and say so. Changes none of its arguments."""
    train("rloo", script_args, training_args, model_args, dataset_args)


def make_parser(subparsers: argparse._SubParsersAction | None = None, prog: str | None = None) -> TrlParser:
    """Parser of (ScriptArguments, RLOOConfig, ModelConfig, DatasetMixtureConfig), alone or as `rloo`."""
    return parser_of("rloo", subparsers, prog)


if __name__ == "__main__":
    main(*make_parser().parse_args_and_config())
