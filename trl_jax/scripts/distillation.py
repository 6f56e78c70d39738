"""The command `trl-jax distillation`: trains a language model to predict as its teacher does, on its own answers."""

from __future__ import annotations

import argparse
import copy
from typing import TYPE_CHECKING, Any

from trl_jax.scripts.train import parser_of, train

if TYPE_CHECKING:
    from trl_jax.scripts.data import DatasetMixtureConfig
    from trl_jax.scripts.utils import ScriptArguments, TrlParser
    from trl_jax.trainer.distillation_config import DistillationConfig
    from trl_jax.trainer.model_config import ModelConfig


def main(
    script_args: ScriptArguments,
    training_args: DistillationConfig,
    model_args: ModelConfig,
    dataset_args: DatasetMixtureConfig | None = None,
) -> None:
    """Train, save to training_args.output_dir, and say so. Changes none of its arguments.

    Raises:
        ValueError: there is no teacher.
    """
    args = copy.copy(training_args)
    args.teacher_model_init_kwargs = teacher_init_kwargs(training_args, model_args)
    teacher = args.teacher_model_name_or_path
    train("distillation", script_args, args, model_args, dataset_args, teacher_model=teacher)


def teacher_init_kwargs(training_args: DistillationConfig, model_args: ModelConfig) -> dict[str, Any]:
    """The model's flags that are the teacher's, too, and --teacher_model_init_kwargs, which beats them.

    Raises:
        ValueError: there is no teacher.
    """
    if training_args.teacher_model_name_or_path is None:
        raise ValueError(
            "A teacher model is required for distillation training. Set it with `--teacher_model_name_or_path`."
        )
    flags = {"dtype": model_args.dtype, "attn_implementation": model_args.attn_implementation}
    passed = {name: value for name, value in flags.items() if value is not None}
    return passed | (training_args.teacher_model_init_kwargs or {})


def make_parser(subparsers: argparse._SubParsersAction | None = None, prog: str | None = None) -> TrlParser:
    """Parser of (ScriptArguments, DistillationConfig, ModelConfig, DatasetMixtureConfig), alone or as a command."""
    example = "--teacher_model_name_or_path Qwen/Qwen3-8B"
    return parser_of("distillation", subparsers, prog, example=example)


if __name__ == "__main__":
    main(*make_parser().parse_args_and_config())
