"""What a run would need of devices that are not there: what `trl-jax plan` runs."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_jax.core.chips import known, topology

if TYPE_CHECKING:
    from trl_jax.scripts.utils import DatasetMixtureConfig, ScriptArguments, TrlParser
    from trl_jax.trainer.model_config import ModelConfig
    from trl_jax.trainer.reward_config import RewardConfig


@dataclass
class PlanArguments:
    """Where the run would be, and what to tell of it."""

    _argument_group_name = "plan"

    topology: str = field(metadata={"help": f"The devices to plan for. {known()}"})
    json: str | None = field(default=None, metadata={"help": "File to write the figures to, as JSON."})
    levers: bool = field(
        default=True, metadata={"help": "Where it does not fit, compile what might make it fit, one by one."}
    )


def main(
    plan_args: PlanArguments,
    script_args: ScriptArguments,
    training_args: RewardConfig,
    model_args: ModelConfig,
    dataset_args: DatasetMixtureConfig,
) -> None:
    """Print the plan, and write it where asked for. Trains nothing, fetches no weights."""
    from trl_jax.engine.ahead import prepare
    from trl_jax.scripts.plan_text import levers_text, text
    from trl_jax.trainer.plan import plan
    from trl_jax.trainer.plan_levers import pulled

    place = topology(plan_args.topology)
    prepare(place)
    checkpoint, rows, tokenizer = _given(script_args, training_args, model_args, dataset_args)

    def planned(args: RewardConfig, compiles: bool = True) -> Any:
        return plan(checkpoint, args, place, rows, tokenizer, compiles=compiles)

    found = planned(training_args)
    print(text(found), flush=True)
    tried = []
    if found.fits is False and plan_args.levers:
        for lever in pulled(training_args, found, planned):
            tried.append(lever)
            print(levers_text(lever), flush=True)
    if plan_args.json is not None:
        written = found.as_dict() | {"levers": [lever.as_dict() for lever in tried]}
        Path(plan_args.json).write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")


def _given(
    script_args: ScriptArguments,
    training_args: RewardConfig,
    model_args: ModelConfig,
    dataset_args: DatasetMixtureConfig,
) -> tuple:
    """The checkpoint, the rows to train on and their tokenizer; no rows where no dataset is named."""
    if model_args.use_peft:
        raise ValueError("--use_peft: a plan is of the whole model; adapters are not planned yet. Leave it out.")
    from trl_jax.hub.auto import find_checkpoint
    from trl_jax.scripts.reward import check_flags, datasets_of, model_init_kwargs, split_of

    mixture = dataset_args if dataset_args.datasets else None
    anything = script_args.dataset_name is not None or mixture is not None
    check_flags(script_args, training_args, model_args, mixes=mixture is not None or not anything)
    checkpoint = find_checkpoint(model_args.model_name_or_path, **model_init_kwargs(training_args, model_args))
    if not anything:
        return checkpoint, None, None
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint.folder, trust_remote_code=training_args.trust_remote_code)
    rows = split_of(datasets_of(script_args, mixture), script_args, "dataset_train_split")
    return checkpoint, rows, tokenizer


def make_parser(prog: str | None = None) -> TrlParser:
    """Parser of (PlanArguments, ScriptArguments, RewardConfig, ModelConfig, DatasetMixtureConfig)."""
    from trl_jax.scripts.reward import fit_to_release
    from trl_jax.scripts.utils import DatasetMixtureConfig, ScriptArguments, TrlParser
    from trl_jax.trainer.model_config import ModelConfig
    from trl_jax.trainer.reward_config import RewardConfig

    kinds = (PlanArguments, ScriptArguments, RewardConfig, ModelConfig, DatasetMixtureConfig)
    parser = TrlParser(kinds, prog=prog)
    parser.usage = "%(prog)s --model_name_or_path MODEL --topology v5e:4x4\n       [--config FILE.yaml] [flags]"
    parser.description = (
        "Compile the training step for devices that are not there, from config.json alone: memory, collectives and a "
        "bound on the time of a step, and whether it fits. Flags are those of `trl-jax reward`; without --dataset_name "
        "every text is taken to be as long as --max_length and to share nothing."
    )
    fit_to_release(parser)
    return parser


if __name__ == "__main__":
    main(*make_parser().parse_args_and_config())
