"""A GRPO run with tools and environments, in one process or in each of several: `python tools_run.py MODEL OUT`."""

import json
import os
import sys
from pathlib import Path

import jax
import numpy as np

if "JAX_PROCESS_ID" not in os.environ:
    jax.config.update("jax_num_cpu_devices", 2)

from datasets import Dataset

from compat_tests.mesh.tools import FIRST, Shop, add, conversations, words
from compat_tests.parity.reference import BASE
from trl_jax import GRPOConfig, GRPOTrainer
from trl_jax.training.policy_generator import PolicyGenerator

model, out = sys.argv[1:]


def first_turns(policy, ids, group, *more):
    """First turns of completions are scripted per row; the model samples the others."""
    if group == 1:
        return complete(policy, ids, group, *more)
    texts = [policy.decode([own])[0] for own in ids]
    found = [FIRST[int("You have 1" in text)][place % 2] for place, text in enumerate(texts)]
    return [np.asarray(words()(text)["input_ids"], np.int32) for text in found]


def reward(completions, completion_ids, environments, start, **columns):
    seen.extend(zip(start, completions, [list(map(int, own)) for own in completion_ids], strict=True))
    return [len(ids) % 7 + own.bought / 2 for ids, own in zip(completion_ids, environments, strict=True)]


seen, complete = [], PolicyGenerator.complete
rows = conversations(4)
CONFIG = BASE | {
    "max_steps": 2, "learning_rate": 3e-3, "num_generations": 2, "shuffle_dataset": False, "top_k": 1,
    "per_device_train_batch_size": 2, "max_completion_length": 120, "pad_to_multiple_of": None, "mesh_shape": "fsdp:2",
}  # fmt: skip
folder = "one" if "JAX_PROCESS_ID" not in os.environ else "two"
args = GRPOConfig(f"{out}/{folder}", **CONFIG)
trainer = GRPOTrainer(
    model, reward, args, Dataset.from_list(rows), processing_class=words(), tools=[add], environment_factory=Shop
)
PolicyGenerator.complete = first_turns
trainer.train()
found = {"seen": seen, "logs": [entry for entry in trainer.state.log_history if "loss" in entry]}
Path(out, f"{os.environ.get('JAX_PROCESS_ID', 'one')}.json").write_text(json.dumps(found))
