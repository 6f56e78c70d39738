"""A user's script in two processes, of which one raises an exception: `python one_raises.py FAULT WHO MODEL OUT`."""

import errno
import os
import sys
import threading

from datasets import Dataset
from transformers import TrainerCallback

from compat_tests import tiny
from trl_jax.mesh import watch
from trl_jax.trainer.reward_config import RewardConfig
from trl_jax.trainer.reward_trainer import RewardTrainer

fault, who, model, out = sys.argv[1:]
SENTENCE = " ".join(("the", "very", "sentence"))  # not a literal, because tracebacks quote this file
mine = os.environ["JAX_PROCESS_ID"] == who
if fault != "alike":  # where both have to raise it in time
    watch.GRACE = 3  # seconds


def fail(*given, **options):
    if mine:
        raise RuntimeError(SENTENCE)


class Callback(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        if state.global_step == 2:
            if fault == "exit" and mine:
                sys.exit(SENTENCE)
            fail()


def full_disk():
    from trl_jax.training import checkpointer as checkpointing

    def write(*given, **options):
        raise OSError(errno.ENOSPC, SENTENCE)

    checkpointing.write_progress = write


args = RewardConfig(
    out, use_cpu=True, bf16=False, report_to="none", max_steps=4, logging_steps=1, disable_tqdm=True,
    per_device_train_batch_size=4, save_strategy="steps" if fault == "save" else "no", save_steps=2,
)  # fmt: skip
args.join_processes()
if fault == "before":
    fail()
rows = Dataset.from_list(tiny.preference_rows(16))
callbacks = [Callback()] if fault in ("callback", "exit", "caught") else []
trainer = RewardTrainer(model, args, train_dataset=rows, eval_dataset=rows, callbacks=callbacks)
if fault == "log":
    trainer.log = fail
if fault == "save" and mine:
    full_disk()
try:
    trainer.train()
except RuntimeError:
    if fault != "caught":
        raise
    threading.Event().wait()  # as if the script went on with something else
if fault == "between":
    fail()
    trainer.evaluate()
if fault == "alike":  # all processes raise it and continue
    for _ in range(2):
        try:
            trainer.evaluate("nowhere")
        except (KeyError, ValueError, TypeError):
            continue
    trainer.evaluate()
    print("went on")
