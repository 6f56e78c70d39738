"""Speed of full GRPO or distillation steps (generation, rewards and training) with trl_jax, and with TRL using
transformers' generate.

Trainers alternate, as in `dpo`. Prompts are random letters, one token each, all of the same length; completions end
after `--completion` tokens or when EOS is sampled. "tuned" means without gradient checkpointing. Speeds are compared in
tokens of prompts and completions per second, as counted by the trainer.
"""

from __future__ import annotations

import os
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks import common, generate, lanes, turns

ARMS = {
    "TRL as it comes": ("trl", {}),
    "TRL tuned": ("trl", {"gradient_checkpointing": False}),
    "trl_jax as it comes": ("trl_jax", {}),
}


def main() -> None:
    args = _arguments()
    common.prepare(args.cpus)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder / "compiled")
        common.build_tokenizer(folder / "model", [], vocab_size=0)
        common.build_llama(folder / "model", **generate.MODELS[args.model])
        if args.trainer == "Distillation":
            common.build_llama(folder / "teacher", **generate.MODELS[args.teacher])
        started, stop = [], args.warm_up + args.steps
        for name in args.arms:
            side, arguments = ARMS[name]
            config = _config(name, args, folder) | arguments
            work = (side, args.trainer, folder, args.prompt, config, args.segment, stop)
            started.append(lanes.start(name, take, *work))
        lanes.race(started, stop // args.segment)
        rows = lanes.table(started, args)
    common.show(rows)
    common.write_json(args.json, {"options": vars(args), "rows": rows})


def _arguments() -> Any:
    options = common.parser(__doc__)
    options.add_argument("--trainer", choices=("GRPO", "Distillation"), default="GRPO")
    options.add_argument("--teacher", choices=generate.MODELS, default="medium", help="of distillation")
    options.add_argument("--model", choices=generate.MODELS, default="small")
    options.add_argument("--prompts", type=int, default=8, help="of a step")
    options.add_argument("--completions", type=int, default=8, help="of each prompt")
    options.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    options.add_argument("--completion", type=int, default=128, help="most tokens of a completion")
    options.add_argument("--segment", type=int, default=1, help="steps a turn")
    options.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS)
    lanes.add_steps(options, warm_up=2, steps=5)
    return options.parse_args()


def _config(name: str, args: Any, folder: Path) -> dict[str, Any]:
    of_grpo = {"num_generations": args.completions} if args.trainer == "GRPO" else {}
    return of_grpo | {
        "output_dir": str(folder / name), "per_device_train_batch_size": args.prompts * args.completions,
        "max_completion_length": args.completion,
        "max_steps": args.warm_up + args.steps, "bf16": False, "use_cpu": True, "report_to": "none",
        "save_strategy": "no", "disable_tqdm": True, "logging_steps": args.segment,
    }  # fmt: skip


def take(
    pipe: Connection, side: str, trainer_name: str, folder: Path, length: int, config: dict, segment: int, stop: int
) -> None:
    """Build the trainer, report it, then train as `turns.train` does."""
    package = turns.package_of(side)
    compiling = turns.count_compilation() if side == "trl_jax" else []
    count = config["max_steps"] * config["per_device_train_batch_size"] // config.get("num_generations", 1)
    learned = {"reward_funcs": variety} if trainer_name == "GRPO" else {"teacher_model": str(folder / "teacher")}
    trainer = getattr(package, f"{trainer_name}Trainer")(
        model=str(folder / "model"),
        args=getattr(package, f"{trainer_name}Config")(**config),
        train_dataset=prompts(count, length),
        **learned,
    )
    turns.train(pipe, trainer, side, segment, stop, {"prompts": count}, compiling)


def prompts(count: int, length: int) -> Any:
    import numpy as np
    from datasets import Dataset

    letters = np.random.default_rng(0).choice(list("abcdefghijklmnopqrstuvwxyz"), (count, length))
    return Dataset.from_list([{"prompt": "".join(row)} for row in letters])


def variety(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """The reward: the number of distinct tokens."""
    return [float(len(set(ids))) for ids in completion_ids]


if __name__ == "__main__":
    main()
