"""The script of one trainer, as in TRL: `main`, `make_parser` and, for GRPO and RLOO, the class of script arguments.

Loaded as `trl_jax.scripts.sft`, `trl_jax.scripts.dpo` and so on; the module's name says which command it is.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from trl_jax.scripts.train import SCRIPT_ARGUMENTS, parser_of, train

if TYPE_CHECKING:
    from trl_jax.config.base import BaseConfig
    from trl_jax.scripts.data import DatasetMixtureConfig
    from trl_jax.scripts.utils import ScriptArguments, TrlParser
    from trl_jax.trainer.model_config import ModelConfig

_COMMAND = __spec__.name.rpartition(".")[2]  # __name__ is "__main__" under `python -m`
if _COMMAND in SCRIPT_ARGUMENTS:  # GRPOScriptArguments, RLOOScriptArguments
    globals()[SCRIPT_ARGUMENTS[_COMMAND].__name__] = SCRIPT_ARGUMENTS[_COMMAND]


def main(
    script_args: ScriptArguments,
    training_args: BaseConfig,
    model_args: ModelConfig,
    dataset_args: DatasetMixtureConfig | None = None,
) -> None:
    """Train and save to training_args.output_dir. See `trl_jax.scripts.train.train`."""
    train(_COMMAND, script_args, training_args, model_args, dataset_args)


def make_parser(subparsers: argparse._SubParsersAction | None = None, prog: str | None = None) -> TrlParser:
    """A parser of (script arguments, the trainer's config, ModelConfig, DatasetMixtureConfig).

    Args:
        subparsers: if given, the parser is added to them under the name of the command.
    """
    return parser_of(_COMMAND, subparsers, prog)


if __name__ == "__main__":
    main(*make_parser(prog=f"python -m {__spec__.name}").parse_args_and_config())
