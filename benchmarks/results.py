"""Train SmolLM2-135M-Instruct on one CPU core, with readable results before, during and after training.

`python -m benchmarks.smollm2 FOLDER` creates the weights. Every run evaluates on held-out rows. `--side trl` runs TRL
with the same arguments, for its curve.

  grpo          full fine-tuning on sums; the reward is 1 for the right number, otherwise 0
  dpo           LoRA on short pairs of a jsonl file of chosen and rejected dialogues, such as hh-rlhf
  sft           LoRA on sentences about people, to be converted to JSON
  distillation  the first layers of the model learn the distributions of the whole model, on the dialogues of `--data`
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import common, dpo_turns, sft_turns, turns

Message = dict[str, str]


@dataclasses.dataclass
class Run:
    """A trainer, with prompts that its model answers before and after training.

    Args:
        asked: held-out prompts.
        wanted: the correct answers, or None.
    """

    trainer: Any
    asked: Sequence[Sequence[Message]]
    wanted: Sequence[str] | None
    new_tokens: int


def main() -> None:
    options = common.parser(__doc__)
    options.add_argument("task", choices=TASKS)
    options.add_argument("--weights", type=Path, required=True, help="folder of the model")
    options.add_argument("--data", type=Path, help="jsonl of chosen and rejected dialogues, for dpo and distillation")
    options.add_argument("--side", default="trl_jax", choices=("trl_jax", "trl"))
    options.add_argument("--steps", type=int, help="stop after so many, at the same schedule; unset, all")
    options.add_argument("--seed", type=int, default=42)
    options.add_argument("--save", type=Path, help="keep the trained model in this folder")
    args = options.parse_args()
    if args.data is None and args.task in ("dpo", "distillation"):
        options.error(f"{args.task} reads dialogues: pass --data FILE, jsonl of chosen and rejected texts.")
    common.prepare(args.cpus)
    with tempfile.TemporaryDirectory() as folder:
        report = measure(args, Path(folder))
    common.show(report["curve"])
    common.show([{"figure": name, "value": value} for name, value in report["figures"].items()])
    for sample in report["samples"]:
        print(json.dumps(sample, ensure_ascii=False))
    common.write_json(args.json, report)


def measure(args: Any, folder: Path) -> dict[str, Any]:
    """Train. The curve has a row per evaluation, with the mean training loss or reward since the previous one."""
    package = turns.package_of(args.side)
    run = TASKS[args.task](package, args, folder)
    completes = args.side == "trl_jax"
    before = answers(run) if completes else None
    clock = _clock(args.steps)
    run.trainer.add_callback(clock)
    turns.silence(run.trainer)
    start, busy = time.perf_counter(), time.process_time()
    run.trainer.train()
    seconds, busy = time.perf_counter() - start, time.process_time() - busy
    after = answers(run) if completes else None
    if args.save is not None:
        run.trainer.save_model(str(args.save))
    logs = run.trainer.state.log_history
    figures = {
        "steps": clock.steps, "seconds of train()": seconds, "CPU seconds of train()": busy,
        "CPU seconds of a step": common.spread(clock.seconds),
        "peak MB": common.memory(),
    }  # fmt: skip
    samples = []
    if before and after:
        samples_of = zip(run.asked, before, after, strict=True)
        samples = [{"asked": prompt[-1]["content"], "before": old, "after": new} for prompt, old, new in samples_of]
        if run.wanted is not None:
            figures |= {"exact before": exact(before, run.wanted), "exact after": exact(after, run.wanted)}
    return {
        "options": vars(args), "curve": curve(logs, args.task), "figures": figures, "samples": samples[:8],
        "logs": logs,
    }  # fmt: skip


def answers(run: Run) -> list[str]:
    """Greedy completions of the run's prompts."""
    texts = run.trainer.model.generate_text(
        run.asked, run.trainer.processing_class, max_new_tokens=run.new_tokens, do_sample=False
    )
    return [text.strip() for text in texts]


def exact(answers: Sequence[str], expected: Sequence[str]) -> float:
    """The fraction of answers that are exactly the wanted text."""
    return sum(answer == text for answer, text in zip(answers, expected, strict=True)) / len(expected)


def curve(logs: Sequence[dict[str, Any]], task: str) -> list[dict[str, Any]]:
    key = "reward" if task == "grpo" else "loss"
    rows, since = [], []
    for entry in logs:
        if key in entry:
            since.append(entry[key])
        names = [name for name in EVALUATED[task] if f"eval_{name}" in entry]
        if names:
            mean = sum(since) / len(since) if since else None
            rows.append({"step": entry["step"], key: mean} | {f"eval {name}": entry[f"eval_{name}"] for name in names})
            since = []
    return rows


EVALUATED = {
    "grpo": ("reward",),
    "dpo": ("loss", "rewards/accuracies", "rewards/margins"),
    "sft": ("loss", "mean_token_accuracy"),
    "distillation": ("loss",),
}
SHOWN = ("loss", "reward", *dict.fromkeys(f"eval_{name}" for names in EVALUATED.values() for name in names))


def _clock(stop: int | None) -> Any:
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        """Measures CPU seconds between the logs of consecutive steps (logging waits for the step), except around
        evaluations. Stops training after `stop` steps."""

        def __init__(self):
            self.seconds, self.steps, self._start, self._last = [], 0, 0.0, None

        def on_evaluate(self, args, state, control, **kwargs):
            self._last = None

        def on_step_end(self, args, state, control, **kwargs):
            self.steps = state.global_step
            control.should_training_stop |= state.global_step == stop

        def on_log(self, args, state, control, logs, **kwargs):
            if "loss" in logs:
                now = time.process_time()
                self.seconds += [] if self._last is None else [now - self._last]
                self._last = now
            metrics = [f"{name} {logs[name]:.4g}" for name in SHOWN if name in logs]
            if metrics:
                elapsed = time.perf_counter() - self._start
                print(f"{elapsed:6.0f} s  step {state.global_step}: {', '.join(metrics)}", flush=True)

        def on_train_begin(self, args, state, control, **kwargs):
            self._start = time.perf_counter()

    return Clock()


def config_of(args: Any, folder: Path, **overrides: Any) -> dict[str, Any]:
    """The trainer arguments that all runs share, with `own` ones."""
    return {
        "output_dir": str(folder / "out"), "seed": args.seed, "logging_steps": 1, "eval_strategy": "steps",
        "eval_on_start": True, "bf16": False, "use_cpu": True, "gradient_checkpointing": False,
        "save_strategy": "no", "report_to": "none", "disable_tqdm": True,
    } | overrides  # fmt: skip


def grpo(package: Any, args: Any, folder: Path) -> Run:
    rows, held_out = sums(random.Random(args.seed))
    config = package.GRPOConfig(**config_of(
        args, folder, max_steps=60, eval_steps=15, per_device_train_batch_size=32, num_generations=8,
        max_completion_length=4, learning_rate=3e-5, lr_scheduler_type="constant", per_device_eval_batch_size=64,
        num_generations_eval=4,
    ))  # fmt: skip
    trainer = package.GRPOTrainer(
        model=str(args.weights), reward_funcs=is_right, args=config,
        train_dataset=_dataset(rows), eval_dataset=_dataset(held_out),
    )  # fmt: skip
    return Run(trainer, [row["prompt"] for row in held_out], [row["answer"] for row in held_out], 4)


def sums(dice: random.Random) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Prompts for sums of two numbers from 1 to 12, with an example, for training and held out. Both orders of a sum
    are in the same part."""
    pairs = [(first, second) for first in range(1, 13) for second in range(first, 13)]
    dice.shuffle(pairs)
    example = [{"role": "system", "content": "Add."}, user("2 + 3"), assistant("5")]
    parts = [
        [
            {"prompt": [*example, user(f"{first} + {second}")], "answer": str(first + second)}
            for pair in part for first, second in sorted({pair, pair[::-1]}) if sorted(pair) != [2, 3]
        ]
        for part in (pairs[14:], pairs[:14])
    ]  # fmt: skip
    return parts[0], parts[1]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def is_right(completions: Any, answer: Any, **columns: Any) -> list[float]:
    """1 for a completion that is exactly the number, else 0."""
    said = [messages[0]["content"].strip() for messages in completions]
    return [float(text == right) for text, right in zip(said, answer, strict=True)]


def dpo(package: Any, args: Any, folder: Path) -> Run:
    rows = [
        row for row in dpo_turns.pairs(args.data)
        if all(_tokens(args.weights, row["prompt"] + row[side]) <= 160 for side in ("chosen", "rejected"))
    ]  # fmt: skip
    rows, held_out = _parts(rows, 720, 240, lambda row: row["prompt"])
    config = package.DPOConfig(**config_of(
        args, folder, num_train_epochs=1, eval_steps=30, per_device_train_batch_size=8, max_length=160,
        learning_rate=3e-4, warmup_steps=9, per_device_eval_batch_size=16,
    ))  # fmt: skip
    trainer = package.DPOTrainer(
        model=str(args.weights), args=config, train_dataset=_dataset(rows), eval_dataset=_dataset(held_out),
        peft_config=_lora(args.side),
    )  # fmt: skip
    return Run(trainer, ASKED, None, 48)


def sft(package: Any, args: Any, folder: Path) -> Run:
    dice = random.Random(args.seed)
    rows = [person(dice, NAMES[:-12], CITIES[:-12]) for _ in range(320)]
    held_out = [person(dice, NAMES[-12:], CITIES[-12:]) for _ in range(48)]
    config = package.SFTConfig(**config_of(
        args, folder, num_train_epochs=1, eval_steps=10, per_device_train_batch_size=8, max_length=128,
        learning_rate=1e-3, warmup_steps=5,
    ))  # fmt: skip
    trainer = package.SFTTrainer(
        model=str(args.weights), args=config, train_dataset=_dataset(rows), eval_dataset=_dataset(held_out),
        peft_config=_lora(args.side),
    )  # fmt: skip
    return Run(trainer, [row["prompt"] for row in held_out], [row["completion"][0]["content"] for row in held_out], 32)


def person(dice: random.Random, names: Sequence[str], cities: Sequence[str]) -> dict[str, Any]:
    """A sentence about a person, and its content as JSON."""
    facts = {"name": dice.choice(names), "city": dice.choice(cities), "age": dice.randint(18, 90)}
    system = {"role": "system", "content": "Reply in JSON."}
    request = user(dice.choice(SENTENCES).format(**facts))
    return {"prompt": [system, request], "completion": [assistant(json.dumps(facts))]}


def _lora(side: str) -> Any:
    package = importlib.import_module("trl_jax" if side == "trl_jax" else "peft")
    return package.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")


NAMES = (
    "Ada Alan Bela Carla Chen Dora Elif Emil Fatima Finn Grace Hugo Ines Ivan Jana Jonas Kaito Lara Leo Lina Maria "
    "Milo Nadia Nils Olga Omar Paul Petra Quinn Rosa Samir Sofia Tara Theo Uma Viktor Wanda Xenia Yusuf Zoe"
).split()
CITIES = (
    "Accra Athens Berlin Bogota Boston Cairo Dakar Delhi Denver Dublin Geneva Hanoi Havana Helsinki Istanbul Jakarta "
    "Kyiv Lagos Lima Lisbon London Madrid Manila Milan Nairobi Oslo Paris Prague Quito Riga Rome Seoul Sofia Sydney "
    "Tallinn Tokyo Tunis Vienna Warsaw Zurich"
).split()
SENTENCES = (
    "{name} is {age} and lives in {city}.",
    "At {age}, {name} moved to {city}.",
    "In {city} I met {name}, who is {age}.",
    "My neighbor {name} from {city} turned {age} today.",
    "{city} is home to {name}, {age} years old.",
    "Next year {name}, {age}, will leave {city}.",
)


def distillation(package: Any, args: Any, folder: Path) -> Run:
    gkd = importlib.import_module(f"{package.__name__}.experimental.gkd")
    chats = [{"messages": row["prompt"] + row["chosen"]} for row in dpo_turns.pairs(args.data)]
    chats = [row for row in chats if _tokens(args.weights, row["messages"]) <= 96]
    rows, held_out = _parts(chats, 192, 32, lambda row: row["messages"][:-1])
    student = folder / "student"
    first_layers(args.weights, student, 20)
    config = gkd.GKDConfig(**config_of(
        args, folder, num_train_epochs=1, eval_steps=8, per_device_train_batch_size=8, max_length=96,
        learning_rate=5e-4, warmup_steps=3, per_device_eval_batch_size=16, lmbda=0.0, beta=0.0,
    ))  # fmt: skip
    trainer = gkd.GKDTrainer(
        model=str(student), teacher_model=str(args.weights), args=config, train_dataset=_dataset(rows),
        eval_dataset=_dataset(held_out), processing_class=_tokenizer(args.weights),
    )  # fmt: skip
    return Run(trainer, ASKED, None, 48)


ASKED = [
    [user(text)]
    for text in ("How do I bake bread?", "What is the capital of France?", "My friend is angry with me. What can I do?")
]


def first_layers(folder: Path, out: Path, layers: int) -> None:
    """Write a checkpoint with the model's first layers, its embeddings and its final norm."""
    import shutil

    from safetensors.numpy import load_file, save_file

    shutil.copytree(folder, out)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if layers >= config["num_hidden_layers"]:
        raise ValueError(f"{folder} has {config['num_hidden_layers']} layers; the student wants fewer, got {layers}.")
    (out / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}), encoding="utf-8")
    tensors = load_file(folder / "model.safetensors")
    first = {name: tensor for name, tensor in tensors.items() if _layer(name) < layers}
    save_file(first, out / "model.safetensors", metadata={"format": "pt"})


def _layer(name: str) -> int:
    """The layer that a tensor belongs to; -1 for tensors outside of layers."""
    parts = name.split(".")
    return int(parts[parts.index("layers") + 1]) if "layers" in parts else -1


def _parts(rows: Sequence[dict], train: int, held_out: int, prompt: Callable[[dict], Any]) -> tuple[list, list]:
    """The first `train` rows, and the last `held_out` rows whose prompts are not among them."""
    first = list(rows[:train])
    seen = [prompt(row) for row in first]
    others = [row for row in rows[train:] if prompt(row) not in seen]
    if len(others) < held_out:
        raise ValueError(f"--data has {len(others)} short dialogues to hold out, wanted {held_out}.")
    return first, others[-held_out:]


def _dataset(rows: Sequence[dict[str, Any]]) -> Any:
    from datasets import Dataset

    return Dataset.from_list(list(rows))


_TOKENIZERS: dict[Path, Any] = {}


def _tokenizer(folder: Path) -> Any:
    if folder not in _TOKENIZERS:
        _TOKENIZERS[folder] = sft_turns.tokenizer(folder)
    return _TOKENIZERS[folder]


def _tokens(folder: Path, messages: Sequence[Message]) -> int:
    """The number of tokens of a dialogue in the model's chat template."""
    return len(_tokenizer(folder).apply_chat_template(list(messages), tokenize=True, return_dict=False))


TASKS: dict[str, Callable[[Any, Any, Path], Run]] = {
    "grpo": grpo, "dpo": dpo, "sft": sft, "distillation": distillation,
}  # fmt: skip


if __name__ == "__main__":
    main()
