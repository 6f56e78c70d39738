"""A small GRPO run that tests interrupt and resume. Run as a program, it kills itself while computing rewards: python
-m compat_tests.training.rollout_run CHECKPOINT OUT GENERATION."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
from datasets import Dataset

from compat_tests.parity.grpo_cases import length_reward, prompt_rows, vowels
from compat_tests.parity.reference import BASE
from trl_jax.trainer.grpo_trainer import GRPOTrainer

# Each generation lasts four steps: it has four parts and is trained on twice. There are two generations per epoch, and
# step ten is in the second epoch. The reference is synchronized, and the entropy coefficient adapts.
CONFIG = {
    "max_steps": 10, "learning_rate": 3e-3, "save_strategy": "steps", "save_steps": 1, "logging_steps": 3,
    "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "steps_per_generation": 4,
    "num_iterations": 2, "num_generations": 4, "max_completion_length": 8, "beta": 0.05, "sync_ref_model": True,
    "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.3, "log_completions": True, "num_completions_to_print": 1,
    "use_adaptive_entropy": True, "entropy_coef": 0.01, "entropy_target": 5.6,
    "pad_to_multiple_of": None,
}  # fmt: skip


def trainer_of(checkpoint, out, *, kind=GRPOTrainer, judged=lambda number: None, rows=5, eval_rows=0, **config):
    """A trainer, and a list that gets the completion ids of each generation.

    judged: called with the number of each generation, from 1, while its rewards are computed.
    """
    seen = []

    def spy(completion_ids, log_metric, log_extra, **columns):
        seen.append([list(ids) for ids in completion_ids])
        judged(len(seen))
        log_metric("tokens", float(np.sum(list(map(len, completion_ids)))))
        log_extra("length", list(map(len, completion_ids)))
        return [0.0] * len(completion_ids)

    functions = [length_reward, vowels, spy]
    given = {name: value for name, value in (BASE | CONFIG | config).items() if value is not None}
    args = kind.config_class(str(out), **given)
    evaluation = Dataset.from_list(prompt_rows(eval_rows)) if eval_rows else None
    return kind(str(checkpoint), functions, args, Dataset.from_list(prompt_rows(rows)), evaluation), seen


def kill(number: int) -> Callable[[int], None]:
    """Kill this process during its `number`-th generation, as a power failure would."""

    def judged(generation: int) -> None:
        if generation == number:
            os.kill(os.getpid(), signal.SIGKILL)

    return judged


if __name__ == "__main__":
    checkpoint, out, number = sys.argv[1:]
    made, _ = trainer_of(Path(checkpoint), out, judged=kill(int(number)))
    made.train()
