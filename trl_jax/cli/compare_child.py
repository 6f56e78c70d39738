"""Run a script under TRL or trl_jax until its first train() has taken some steps, and record their numbers.

python -m trl_jax.cli.compare_child SIDE RECORD.json STEPS SCRIPT.py [flags of the script]
"""

from __future__ import annotations

import functools
import json
import os
import resource
import runpy
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trl_jax.cli.compare import Record

# Overrides the script's arguments, so that it writes nothing outside the temporary folder and logs every step.
FORCED = {
    "push_to_hub": False, "report_to": "none", "save_strategy": "no", "eval_strategy": "no", "eval_on_start": False,
    "max_minutes": None, "save_minutes": None, "log_json": None,
    "load_best_model_at_end": False, "logging_strategy": "steps", "logging_steps": 1, "logging_first_step": False,
    "disable_tqdm": True, "include_num_input_tokens_seen": "no",
}  # fmt: skip
_RATES = ("_runtime", "_per_second", "step_time")  # suffixes of times and rates, which are not compared


def main(side: str, record: str, steps: str, script: str, *flags: str) -> None:
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    write = functools.partial(_write, Path(record))
    if side == "trl_jax":
        from trl_jax.cli.trl_alias import install

        install()
        from trl_jax.config.base import BaseConfig
        from trl_jax.trainer.base_trainer import BaseTrainer

        _force_arguments(BaseConfig, Path(record).parent)
        _watch(BaseTrainer, int(steps), write, _our_rows)
    else:
        _watch_trl(int(steps), write, Path(record).parent)
    sys.argv, sys.path[0] = [script, *flags], str(Path(script).parent.absolute())
    runpy.run_path(script, run_name="__main__")


def _watch_trl(steps: int, write: Callable[[Record], None], folder: Path) -> None:
    """Watch transformers' Trainer, and let `import trl_jax` return trl."""
    import transformers
    import trl

    _force_arguments(transformers.TrainingArguments, folder)
    seen: list[list[list[int]]] = []
    training_step = transformers.Trainer.training_step

    @functools.wraps(training_step)
    def step(self, model, inputs, *args, **kwargs):
        if not seen:
            seen.append(rows_of(inputs))
        return training_step(self, model, inputs, *args, **kwargs)

    transformers.Trainer.training_step = step
    _watch(transformers.Trainer, steps, write, lambda trainer: seen[0] if seen else [])
    for name in [name for name in sys.modules if name.partition(".")[0] == "trl_jax" and name != __name__]:
        del sys.modules[name]
    sys.modules["trl_jax"] = trl


def _force_arguments(arguments: type, folder: Path) -> None:
    """Patch a class of training arguments so that `FORCED` overrides what the script sets."""
    original = arguments.__post_init__

    @functools.wraps(original)
    def post_init(self):
        vars(self).update(FORCED | {"output_dir": str(folder / "out")})
        original(self)

    arguments.__post_init__ = post_init


def _watch(trainer: type, steps: int, write: Callable[[Record], None], rows: Callable[[Any], list]) -> None:
    """Patch a trainer class so that its first train() takes `steps` steps, writes the record and ends the process."""
    from transformers import TrainerCallback

    original = trainer.train

    class Watch(TrainerCallback):
        def __init__(self):
            self.begun, self.ends, self.logs = time.monotonic(), [], []

        def on_step_end(self, args, state, control, **_):
            control.should_training_stop |= state.global_step >= steps

        def on_log(self, args, state, control, logs=None, **_):
            if logs and "loss" in logs:
                self.ends.append(time.monotonic())
                self.logs.append({"step": state.global_step} | _numbers(logs))

    @functools.wraps(original)
    def train(self, *args, **kwargs):
        watch = Watch()
        self.add_callback(watch)
        original(self, *args, **kwargs)
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1e6 if sys.platform == "darwin" else 1e3)
        seconds = [end - start for start, end in zip([watch.begun, *watch.ends], watch.ends, strict=False)]
        write(Record(type(self).__name__, watch.logs, seconds, memory, rows(self)))
        sys.stdout.flush()
        os._exit(0)

    trainer.train = train


def _numbers(logs: dict[str, Any]) -> dict[str, float]:
    return {
        name: float(value) for name, value in logs.items()
        if isinstance(value, int | float) and not name.endswith(_RATES)
    }  # fmt: skip


def _our_rows(trainer: Any) -> list[list[int]]:
    """Token ids of the first batch of the dataset; none in online training."""
    from trl_jax.trainer.online import RolloutTrainer

    return [] if isinstance(trainer, RolloutTrainer) else rows_of(next(iter(trainer.get_train_dataloader())))


def rows_of(inputs: Any) -> list[list[int]]:
    """The token ids of a batch, without padding."""
    if not isinstance(inputs, dict) or "input_ids" not in inputs or "attention_mask" not in inputs:
        return []
    rows = zip(inputs["input_ids"].tolist(), inputs["attention_mask"].tolist(), strict=True)
    return [[token for token, real in zip(ids, mask, strict=True) if real] for ids, mask in rows]


def _write(path: Path, record: Record) -> None:
    path.write_text(json.dumps(record._asdict()), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
