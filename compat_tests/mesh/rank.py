"""One process of a run of several, as `launching` starts them."""

from __future__ import annotations

import json
import os
import signal

HEARTBEAT = 10  # seconds, a third of what users wait
ROWS = 44  # 6 micro-batches of 2 x 4 pairs, the last with four pairs of the first


def main(whose: str, folder: str, out: str, given: dict) -> None:
    from compat_tests.parity import reference

    if whose == "ours":
        from trl_jax.engine.devices import processes

        processes.HEARTBEAT = HEARTBEAT
    first = os.environ.get("RANK", os.environ.get("JAX_PROCESS_ID")) == "0"
    if "resume" in given:
        go_on(folder, rows_of("Reward", given.pop("pairs", ROWS)), f"{out}/{whose}", **given)
        return
    if not first:  # whose save may not be there yet
        reference.read_weights = lambda folder: {}
    run = {"ours": reference.run_ours, "trl": reference.run_trl}[whose]
    count = given.pop("pairs", ROWS)
    for name, more in given.pop("runs", {"": {}}).items():  # one after the other
        place, config = f"{out}/{whose}{name}", given | more
        found = run(folder, rows_of(config.get("trainer", "Reward"), count), place, **config)
        if first:
            with open(f"{place}.json", "w", encoding="utf-8") as file:
                json.dump(found.logs, file)


def rows_of(trainer: str, count: int) -> list[dict]:
    """Rows in the form that this trainer takes."""
    from compat_tests.parity.kto_cases import kto_rows
    from compat_tests.tiny import preference_rows, text_rows

    if trainer == "Reward":
        return preference_rows(count, margin=True)
    return {"SFT": text_rows, "DPO": preference_rows, "KTO": kto_rows}[trainer](count, kind="prompt")


def go_on(folder: str, rows: list[dict], out: str, *, resume: str | bool, dies: int | None = None, **config):
    """The trainer, when it went on from a checkpoint; the first process `dies` in the middle of this step's save."""
    from datasets import Dataset

    from compat_tests.parity.reference import BASE
    from trl_jax import RewardConfig, RewardTrainer

    trainer = RewardTrainer(folder, RewardConfig(out, **(BASE | config)), train_dataset=Dataset.from_list(rows))
    if dies is not None and os.environ["JAX_PROCESS_ID"] == "0":
        die_saving(trainer, dies)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def die_saving(trainer, step: int) -> None:
    """Weights are in the unfinished folder then, moments on their way."""
    from trl_jax.run.output import checkpointing

    write = checkpointing.write_progress

    def fatal(*given, **more):
        if trainer.state.global_step == step:
            os.kill(os.getpid(), signal.SIGKILL)
        write(*given, **more)

    checkpointing.write_progress = fatal
