"""One process of a run with several, as started by `launching`."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from functools import partial, partialmethod

HEARTBEAT = 10  # seconds, a third of the default
ROWS = 44  # 6 micro-batches of 2 x 4 pairs; the last is filled with the first four pairs


def main(whose: str, folder: str, out: str, given: dict) -> None:
    from compat_tests.parity import reference

    if "devices" in given:
        import jax

        jax.config.update("jax_num_cpu_devices", given.pop("devices"))
    if whose == "ours":
        from trl_jax.mesh import processes, watch

        processes.HEARTBEAT = given.pop("heartbeat", HEARTBEAT)
        watch.GRACE = given.pop("grace", watch.GRACE)
    first = os.environ.get("RANK", os.environ.get("JAX_PROCESS_ID")) == "0"
    if "resume" in given:
        go_on(folder, rows_of("Reward", given.pop("pairs", ROWS)), f"{out}/{whose}", **given)
        return
    if not first:  # the first process may not have saved yet
        reference.read_weights = lambda folder: {}
    run = {"ours": reference.run_ours, "trl": reference.run_trl}[whose]
    if given.pop("writes", False):
        run = partial(policy_run, whose)
    count = given.pop("pairs", ROWS)
    for name, more in given.pop("runs", {"": {}}).items():  # one after the other
        place, config = f"{out}/{whose}{name}", given | more
        found = run(folder, rows_of(config.get("trainer", "Reward"), count), place, **config)
        if found.facts is not None:  # each process has its own
            with open(f"{place}.{os.environ.get('RANK', os.environ.get('JAX_PROCESS_ID'))}.json", "w") as file:
                json.dump(found.facts, file)
        if first:
            with open(f"{place}.json", "w", encoding="utf-8") as file:
                json.dump(found.logs, file)


def policy_run(
    whose: str, folder: str, rows: list[dict], out: str, *, trainer: str,
    eval_rows=None, of=None, teacher=None, kind=None, **config,
):  # fmt: skip
    """A run of GRPO, RLOO or distillation.

    Args:
        kind: a kind of run in `served`, which has its own rows.
        eval_rows: the number of evaluation prompts.
        of: the folder, next to `out`, from which this run and all later ones resume.
        teacher: the teacher's folder, for distillation.
    """
    import importlib

    from compat_tests.mesh import served
    from compat_tests.parity import distillation_cases, grpo_cases

    if kind is not None:
        return served.run(kind, folder, out, **config)

    if whose == "trl":
        import torch

        torch.set_num_threads(1)
    package = importlib.import_module({"ours": "trl_jax", "trl": "trl"}[whose])
    evaluated = None if eval_rows is None else grpo_cases.prompt_rows(eval_rows)
    if of is not None:
        kind, place = getattr(package, f"{trainer}Trainer"), os.path.join(os.path.dirname(out), of)
        kind.train = partialmethod(kind.train, resume_from_checkpoint=place)
    if trainer == "Distillation":
        found = distillation_cases.run(package, folder, teacher, rows, out, eval_rows=evaluated, **config)
        first = os.environ.get("RANK", os.environ.get("JAX_PROCESS_ID")) == "0"
        return found if first else replace(found, facts={})  # which writes the files
    return grpo_cases.run(package, trainer, folder, rows, out, eval_rows=evaluated, **config)


def rows_of(trainer: str, count: int) -> list[dict]:
    """Rows in this trainer's format."""
    from compat_tests.parity.grpo_cases import prompt_rows
    from compat_tests.parity.kto_cases import kto_rows
    from compat_tests.tiny import preference_rows, text_rows

    if trainer == "Reward":
        return preference_rows(count, margin=True)
    if trainer in ("GRPO", "RLOO", "Distillation"):
        return prompt_rows(count)
    return {"SFT": text_rows, "DPO": preference_rows, "KTO": kto_rows}[trainer](count, kind="prompt")


def go_on(folder: str, rows: list[dict], out: str, *, resume: str | bool, dies: int | None = None, **config):
    """Resume a trainer from a checkpoint and return it; the first process `dies` in the middle of this step's save."""
    from datasets import Dataset

    from compat_tests.parity.reference import BASE
    from trl_jax.trainer.reward_config import RewardConfig
    from trl_jax.trainer.reward_trainer import RewardTrainer

    trainer = RewardTrainer(folder, RewardConfig(out, **(BASE | config)), train_dataset=Dataset.from_list(rows))
    if dies is not None and os.environ["JAX_PROCESS_ID"] == "0":
        die_saving(trainer, dies)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def die_saving(trainer, step: int) -> None:
    """At that point the unfinished folder has the weights, and the moments are being written."""
    from trl_jax.training import checkpointer as checkpointing

    write = checkpointing.write_progress

    def fatal(*given, **more):
        if trainer.state.global_step == step:
            os.kill(os.getpid(), signal.SIGKILL)
        write(*given, **more)

    checkpointing.write_progress = fatal
