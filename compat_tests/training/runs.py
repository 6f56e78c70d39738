"""The same run twice: our Loop over callables that compute nothing, and transformers' Trainer over a single
parameter."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from transformers.trainer_callback import (
    CallbackHandler,
    DefaultFlowCallback,
    ExportableState,
    TrainerCallback,
    TrainerControl,
    TrainerState,
)

from trl_jax.data.loader import micro_batches, run_length
from trl_jax.trainer.reward_config import RewardConfig
from trl_jax.training.checkpoint_files import forget_all_but_best, save_checkpoint
from trl_jax.training.events import Events, Interrupts
from trl_jax.training.failures import NonFiniteGuard
from trl_jax.training.optimizer_choice import LearningRate
from trl_jax.training.train import Loop

EVENTS = [name for name in dir(TrainerCallback) if name.startswith("on_") and "push" not in name]
QUIET = {"use_cpu": True, "report_to": "none", "bf16": False, "disable_tqdm": True, "save_strategy": "no"}
BATCH = 2
EVAL_ROWS = 3


class Recorder(TrainerCallback):
    """Records every event with its step and epoch."""

    def __init__(self):
        self.events = []


def _record(name):
    def note(self, args, state, control, **kwargs):
        self.events.append((name, state.global_step, state.epoch))

    return note


for _name in EVENTS:
    setattr(Recorder, _name, _record(_name))


@dataclass
class Outcome:
    """What can be observed of a run."""

    events: list[tuple[str, int, float]]
    state: TrainerState
    folders: list[str]
    logs: list[dict] = field(default_factory=list)

    def facts(self) -> dict:
        state = self.state
        best = state.best_model_checkpoint
        return {
            "folders": self.folders,
            "global_step": state.global_step,
            "best_metric": state.best_metric,
            "best_global_step": state.best_global_step,
            "best_model_checkpoint": None if best is None else Path(best).name,
            "stateful_callbacks": state.stateful_callbacks,
        }


def run_loop(out, *, rows=10, metrics=(), callbacks=(), write_model=None, empty_from=sys.maxsize, **config) -> Outcome:
    """Train on `rows` rows that are never read; the k-th evaluation reports `metrics[k]` as eval_m.

    From epoch `empty_from` on there are no batches.
    """
    args = RewardConfig(str(out), **(QUIET | {"per_device_train_batch_size": BATCH, "logging_steps": 2} | config))
    run = run_length(
        rows,
        batch_size=BATCH,
        accumulation=args.gradient_accumulation_steps,
        drop_last=False,
        epochs=args.num_train_epochs,
        max_steps=args.max_steps,
    )
    recorder, values = Recorder(), iter(metrics)
    handler = CallbackHandler([DefaultFlowCallback(), *callbacks, recorder], None, None, None, None)
    control = TrainerControl()
    stateful = [c for c in [*handler.callbacks, control] if isinstance(c, ExportableState)]
    events = Events(handler, args, TrainerState(stateful_callbacks=stateful), control)
    events.state.max_steps = run.max_steps
    events.state.compute_steps(args, run.max_steps)
    logs = []

    class Work:
        def begin_step(self):
            events.fire("on_step_begin")

        def advance(self, batch):
            loss = np.float32(events.state.global_step)
            return {"loss": loss, "grad_norm": np.float32(1.0), "updated": np.bool_(True)}

        def report(self, found, steps):
            logs.append(found | {"steps": len(steps)})
            events.fire("on_log", found)

        def evaluate(self):
            for _ in range(-(-EVAL_ROWS // BATCH)):
                events.fire("on_prediction_step")
            found = {"eval_loss": 0.5} | _next("eval_m", values)
            events.fire("on_log", found)
            events.fire("on_evaluate", found)
            return found

        def save(self, progress):
            save_checkpoint(args.output_dir, write_model or _write, events, {})

    loop = Loop(
        work=Work(),
        events=events,
        batches=_Batches(rows, args.gradient_accumulation_steps, empty_from),
        length=run,
        schedule=LearningRate(lambda step: 1.0 - step / run.max_steps, lambda: events.state.global_step),
        nonfinite_guard=NonFiniteGuard(1, lambda batch: ""),
        interrupts=Interrupts(),
    )
    mean, unreported = loop.run()
    logs.append({"train_loss": mean, "steps": len(unreported)})
    if args.save_total_limit == 1 and events.state.best_model_checkpoint is not None:  # as our trainer does
        forget_all_but_best(args.output_dir, events.state.best_model_checkpoint)
    return Outcome(recorder.events, events.state, _folders(out), logs)


class _Batches:
    def __init__(self, rows, accumulation, empty_from):
        self.rows, self.accumulation, self.empty_from = rows, accumulation, empty_from

    def set_epoch(self, epoch, skip, skipped_digest):
        assert skip == 0
        self.epoch = epoch

    def __iter__(self):
        rows = range(self.rows if self.epoch < self.empty_from else 0)
        parts = micro_batches(rows, BATCH, drop_last=False)
        for group in micro_batches(parts, self.accumulation, drop_last=False):
            examples = sum(map(len, group))
            yield SimpleNamespace(num_micro_batches=len(group), num_examples=examples, rows=[], rows_digest=None)


def run_transformers(out, *, rows=10, metrics=(), callbacks=(), **config) -> Outcome:
    """The same with transformers' Trainer, without its final log and on_train_end."""
    import torch
    from transformers import Trainer, TrainingArguments

    class Number(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.number = torch.nn.Parameter(torch.zeros(1))

        def forward(self, x, labels=None):
            return {"loss": ((self.number - x) ** 2).mean(), "logits": x[:, None]}

    sizes = {"per_device_train_batch_size": BATCH, "per_device_eval_batch_size": BATCH, "logging_steps": 2}
    values, recorder = iter(metrics), Recorder()
    trainer = Trainer(
        Number(),
        TrainingArguments(str(out), **(QUIET | sizes | config)),
        train_dataset=[{"x": 1.0, "labels": 0.0}] * rows,
        eval_dataset=[{"x": 1.0, "labels": 0.0}] * EVAL_ROWS,
        compute_metrics=lambda _: _next("m", values),
        callbacks=[*callbacks, recorder],
    )
    trainer.train()
    assert [name for name, *_ in recorder.events[-2:]] == ["on_log", "on_train_end"]
    return Outcome(recorder.events[1:-2], trainer.state, _folders(out))


def _next(name, values):
    """The next value under this name; empty once the values are used up."""
    value = next(values, None)
    return {} if value is None else {name: value}


def _write(folder):
    (folder / "weights").write_text("complete")


def _folders(out) -> list[str]:
    return sorted(path.name for path in Path(out).iterdir()) if Path(out).exists() else []
