"""Online trainers generate fewer completions at a time if an argument or the memory requires it: the rows are the
same."""

from __future__ import annotations

import numpy as np
import pytest
from datasets import Dataset

import trl_jax
from compat_tests.parity.dpo_cases import SMALL
from compat_tests.parity.grpo_cases import length_reward, prompt_rows
from compat_tests.parity.reference import BASE
from trl_jax.generation import generator
from trl_jax.plan.generation import start_first_epoch
from trl_jax.training import policy_generator

ENDS = {"eos_token_id": list(range(0, 500, 7))}
CONFIG = {"max_completion_length": 8, "per_device_train_batch_size": 8, "generation_kwargs": ENDS}


@pytest.fixture
def make(checkpoint, tmp_path):
    """make(kind, **config) -> a trainer on 20 prompts."""
    folder = str(checkpoint(**SMALL))

    def made(kind="GRPO", **config):
        args = getattr(trl_jax, f"{kind}Config")(str(tmp_path / "out"), **BASE | CONFIG | config)
        extra = {"teacher_model": folder} if kind == "Distillation" else {"reward_funcs": length_reward}
        rows = Dataset.from_list(prompt_rows(20))
        return getattr(trl_jax, f"{kind}Trainer")(folder, args=args, train_dataset=rows, **extra)

    return made


@pytest.fixture
def queues(monkeypatch):
    """The number of slots of each generation that did not generate all completions at once."""
    slots, queue = [], generator.generate_queue

    def generate_queue(*given, **options):
        slots.append(options["slots"])
        queue(*given, **options)

    monkeypatch.setattr(generator, "generate_queue", generate_queue)
    return slots


def completions(trainer):
    source = start_first_epoch(trainer.parts.rollout_steps)
    next(iter(source))
    return [row.completion.tolist() for row in source.generation.rows], source.streams[0].words(3).tolist()


@pytest.mark.parametrize(("kind", "sizes"), [("GRPO", {"num_generations": 4}), ("RLOO", {}), ("Distillation", {})])
def test_an_argument_bounds_them(kind, sizes, make, queues):
    wanted = completions(make(kind, **sizes))
    assert queues == [] and len({*map(len, wanted[0])}) > 1
    assert completions(make(kind, max_completions_per_device=2, **sizes)) == wanted
    assert queues == [2 if kind == "Distillation" else 1]
    assert completions(make(kind, max_completions_per_device=8, **sizes)) == wanted and len(queues) == 1


def test_memory_bounds_them(make, queues, monkeypatch):
    """The limit depends on what the run keeps, including the optimizer state, not on what happens to be free."""
    complete, free = policy_generator.complete, []

    def completed(*given, **options):
        free.append(options["limit"].memory)
        return complete(*given, **options)

    monkeypatch.setattr(policy_generator, "complete", completed)
    monkeypatch.setattr(policy_generator, "device_memory_limit", lambda device: 10**9)
    trainer = make(num_generations=4, beta=0.1)
    params, of_run = trainer.model.params, trainer.parts.setup.arrays
    held = sum(array.nbytes for array in of_run.values())
    assert held == 2 * sum(array.nbytes for array in params.values())  # including the reference
    wanted = completions(trainer)
    trainer.parts.setup.progress.optimizer_state = [params, np.zeros(10)]
    completions(trainer)
    assert free == [10**9 - held, 10**9 - 3 * held // 2] and queues == []
    monkeypatch.setattr(policy_generator, "device_memory_limit", lambda device: held + 1)
    assert completions(make(num_generations=4, beta=0.1)) == wanted and queues == [1]
    monkeypatch.setattr(policy_generator, "device_memory_limit", lambda device: 0)  # unknown
    assert completions(make(num_generations=4, beta=0.1)) == wanted and len(queues) == 1 and free[-1] is None
