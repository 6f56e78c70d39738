"""The training commands: from flags and a YAML file to a trained and saved model."""

from __future__ import annotations

import argparse
import copy
import importlib
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trl_jax import rewards
from trl_jax.config.arguments import Handling
from trl_jax.core.trainers import TRAINERS
from trl_jax.scripts.utils import ScriptArguments

if TYPE_CHECKING:
    from trl_jax.config.base import BaseConfig
    from trl_jax.scripts.data import DatasetMixtureConfig
    from trl_jax.scripts.utils import TrlParser
    from trl_jax.trainer.model_config import ModelConfig

_REWARDS: dict[str, Callable] = {
    "accuracy_reward": rewards.accuracy_reward,
    "reasoning_accuracy_reward": rewards.reasoning_accuracy_reward,
    "think_format_reward": rewards.think_format_reward,
    "get_soft_overlong_punishment": rewards.get_soft_overlong_punishment(1280, 256),
}


# Script arguments


@dataclass
class RewardSources(ScriptArguments):
    """The dataset and the rewards: TRL's fields, defaults and order."""

    reward_model_name_or_path: str | None = field(
        default=None,
        metadata={"help": "Folder or Hub id of a reward model. Its reward comes before those of reward_funcs."},
    )
    reward_funcs: list[str] | None = field(
        default=None,
        metadata={
            "help": f"Reward functions: any of {', '.join(_REWARDS)} (for at most 1,280 tokens, with a rising penalty "
            "on the last 256), or the import path of a function, such as my_rewards.brevity. The current folder is "
            "searched, too."
        },
    )


@dataclass
class GRPOScriptArguments(RewardSources):
    """The dataset and the rewards."""


@dataclass
class RLOOScriptArguments(RewardSources):
    """The dataset and the rewards."""


# Command -> its class of script arguments. The other commands have ScriptArguments.
SCRIPT_ARGUMENTS: dict[str, type[ScriptArguments]] = {"grpo": GRPOScriptArguments, "rloo": RLOOScriptArguments}
# Command -> flags of the example in --help.
_EXAMPLES = {
    "distillation": "--teacher_model_name_or_path Qwen/Qwen3-8B",
    "grpo": "--reward_funcs my_rewards.brevity",
    "rloo": "--reward_funcs my_rewards.brevity",
}


# Training


def train(
    command: str,
    script_args: ScriptArguments,
    training_args: BaseConfig,
    model_args: ModelConfig,
    dataset_args: DatasetMixtureConfig | None = None,
) -> None:
    """Train, save to training_args.output_dir, and push to the Hub if asked. Does not modify its arguments.

    Args:
        command: a key of `core.trainers.TRAINERS`.

    Raises:
        ValueError: a flag is missing or wrong, or flags contradict each other.
    """
    training_args, inputs = _trainer_inputs(script_args, training_args, model_args)
    mixture = dataset_args if dataset_args is not None and dataset_args.datasets else None
    rows = TRAINERS[command].rows
    check_flags(script_args, model_args, rows=rows, mixes=mixture is not None)
    training_args.model_init_kwargs = model_init_kwargs(training_args, model_args)

    splits = load_datasets(script_args, mixture)
    train_rows = get_split(splits, script_args, "dataset_train_split")
    test_rows = None
    if training_args.eval_strategy != "no":
        test_rows = get_split(splits, script_args, "dataset_test_split")

    from trl_jax.trainer.utils import get_peft_config, get_quantization_config

    trainer = TRAINERS[command].load_trainer()(
        model=model_args.model_name_or_path,
        args=training_args,
        train_dataset=train_rows,
        eval_dataset=test_rows,
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
        **inputs,
    )
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    print("Training completed.")
    trainer.save_model(training_args.output_dir)
    print(f"Model saved to {training_args.output_dir}.")
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)
        print(f"Model pushed to {trainer.hub_model_id}.")


def _trainer_inputs(
    script_args: ScriptArguments, training_args: BaseConfig, model_args: ModelConfig
) -> tuple[BaseConfig, dict[str, Any]]:
    """A copy of the config, and the inputs that only some trainers take: reward functions, a teacher."""
    args, inputs = copy.copy(training_args), {}
    if isinstance(script_args, RewardSources):
        inputs["reward_funcs"] = reward_sources(script_args)
    if "teacher_model_name_or_path" in vars(args):
        args.teacher_model_init_kwargs = teacher_init_kwargs(training_args, model_args)
        inputs["teacher_model"] = args.teacher_model_name_or_path
    return args, inputs


def check_flags(
    script_args: ScriptArguments, model_args: ModelConfig, *, rows: str = "rows", mixes: bool = False
) -> None:
    """Check for flags that are missing or contradict each other, before anything is loaded.

    Args:
        rows: what the trainer calls the rows of a dataset.
        mixes: whether a mixture of datasets is given.

    Raises:
        ValueError: the error names the flag.
    """
    if (model_args.load_in_4bit or model_args.load_in_8bit) and not model_args.use_peft:
        raise ValueError("--load_in_4bit and --load_in_8bit need --use_peft: quantized weights cannot be trained.")
    if model_args.model_name_or_path is None:
        raise ValueError("--model_name_or_path is missing: pass the folder or the Hub id of a checkpoint.")
    if mixes and script_args.dataset_name is not None:
        text = "--dataset_name has no effect: `datasets` defines the mixture to train on."
        warnings.warn(text, stacklevel=3)
    if script_args.dataset_name is None and not mixes:
        raise ValueError(f"--dataset_name is missing: pass a Hub id, a folder, or a jsonl or parquet file of {rows}.")
    if script_args.ignore_bias_buffers:
        text = "--ignore_bias_buffers has no effect in trl_jax: there are no buffers to synchronize."
        warnings.warn(text, stacklevel=3)


def load_datasets(script_args: ScriptArguments, mixture: DatasetMixtureConfig | None) -> Mapping[str, Any]:
    """Load the splits of the mixture or, if it is None, of --dataset_name."""
    from trl_jax.scripts.data import get_dataset, load_splits

    if mixture is not None:
        return get_dataset(mixture)
    return load_splits(script_args.dataset_name, script_args.dataset_config, script_args.dataset_streaming)


def get_split(splits: Mapping[str, Any], script_args: ScriptArguments, flag: str) -> Any:
    """The rows of the split that a flag names.

    Raises:
        ValueError: the dataset has no such split.
    """
    split = vars(script_args)[flag]
    if split not in splits:
        raise ValueError(
            f"--{flag} {split}: {script_args.dataset_name or 'the mixture'} has {', '.join(splits)}. Use one of these"
            + (", or train with --eval_strategy no." if flag == "dataset_test_split" else ".")
        )
    return splits[split]


def model_init_kwargs(training_args: BaseConfig, model_args: ModelConfig) -> dict[str, Any]:
    """Arguments of from_pretrained from the model flags that are set; --model_init_kwargs takes precedence."""
    flags = {
        "revision": model_args.model_revision,
        "dtype": model_args.dtype,
        "attn_implementation": model_args.attn_implementation,
    }
    kwargs = {key: value for key, value in flags.items() if value is not None}
    return kwargs | (training_args.model_init_kwargs or {})


def teacher_init_kwargs(training_args: BaseConfig, model_args: ModelConfig) -> dict[str, Any]:
    """Like `model_init_kwargs`, from the flags that apply to the teacher, too; --teacher_model_init_kwargs takes
    precedence.

    Raises:
        ValueError: there is no teacher.
    """
    if training_args.teacher_model_name_or_path is None:
        raise ValueError(
            "A teacher model is required for distillation training. Set it with `--teacher_model_name_or_path`."
        )
    flags = {"dtype": model_args.dtype, "attn_implementation": model_args.attn_implementation}
    kwargs = {name: value for name, value in flags.items() if value is not None}
    return kwargs | (training_args.teacher_model_init_kwargs or {})


def reward_sources(args: RewardSources) -> list[str | Callable]:
    """The name of the reward model, if any, followed by the reward functions.

    Raises:
        ValueError: there is neither, or a name cannot be resolved to a function.
    """
    model = args.reward_model_name_or_path
    sources = [*([model] if model else []), *(_reward_function(name) for name in args.reward_funcs or ())]
    if not sources:
        raise ValueError(
            "No reward source provided: pass functions with --reward_funcs, a reward model with "
            "--reward_model_name_or_path, or both."
        )
    return sources


def _reward_function(name: str) -> Callable:
    if name in _REWARDS:
        return _REWARDS[name]
    module, _, attribute = name.rpartition(".")
    if not module:
        raise ValueError(
            f"Could not load reward function {name!r}. Expected one of {list(_REWARDS)} or a valid import path, such "
            "as my_rewards.brevity."
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    names = vars(importlib.import_module(module))
    if not callable(names.get(attribute)):
        raise ValueError(f"Could not load reward function {name!r}: the module {module} has no function {attribute}.")
    return names[attribute]


# Parsers


def parser_of(command: str, subparsers: argparse._SubParsersAction | None = None, prog: str | None = None) -> TrlParser:
    """A parser of (script arguments, the trainer's config, ModelConfig, DatasetMixtureConfig).

    Args:
        command: a key of `core.trainers.TRAINERS`.
        subparsers: if given, the parser is added to them under the name of the command.
    """
    from trl_jax.scripts.data import DatasetMixtureConfig
    from trl_jax.scripts.utils import TrlParser
    from trl_jax.trainer.model_config import ModelConfig

    names = TRAINERS[command]
    config = names.load_config()
    types = (SCRIPT_ARGUMENTS.get(command, ScriptArguments), config, ModelConfig, DatasetMixtureConfig)
    if subparsers is not None:
        parser = subparsers.add_parser(command, help=names.summary, dataclass_types=types)
    else:
        parser = TrlParser(types, prog=prog)
    parser.usage = "%(prog)s --model_name_or_path MODEL --dataset_name DATA\n       [--config FILE.yaml] [flags]"
    parser.description = (
        f"{names.summary.capitalize()}, for example:\n\n"
        f"  trl-jax {command} --model_name_or_path Qwen/Qwen3-0.6B \\\n"
        f"      --dataset_name {names.rows}.jsonl --output_dir out \\\n"
        f"      {_EXAMPLES.get(command, '--num_train_epochs 1')} --learning_rate 1e-5\n\n"
        "Any flag can also be a key of the YAML file."
    )
    fit_to_release(parser, config.argument_table())
    return parser


def fit_to_release(parser: TrlParser, table: Mapping[str, Handling]) -> None:
    """Hide flags without effect and refused flags from the list of --help, and name them at its end.

    Args:
        table: how the parser's config class handles its arguments.
    """
    no_effect, refused = ["ignore_bias_buffers", "bnb_4bit_quant_storage"], []
    for action in parser._actions:
        handling = table.get(action.dest, Handling())
        if action.const is False and action.nargs == 0:  # --no_NAME, which has the help of --NAME
            action.help = f"Set {action.dest} to False."
        if handling.how in ("silent", "warned"):
            no_effect.append(action.dest)
        elif handling.how == "refused":
            refused.append(action.dest)
        elif handling.supported:
            # transformers lists its own names as choices; the config knows those of this release.
            action.choices, action.metavar = None, "NAME"
            action.help = f"One of {', '.join(handling.supported)}."
        elif handling.help and action.const is not False:
            action.help = handling.help
        if action.dest in (*no_effect, *refused):
            action.help = argparse.SUPPRESS
    parser.epilog = (
        f"Accepted without effect: {', '.join(dict.fromkeys(no_effect))}. "
        f"Refused in this release: {', '.join(dict.fromkeys(refused))}."
    )
