"""Each trainer on each axis of a mesh: training, evaluation, prediction, saving and resuming give the results of one
device."""

from __future__ import annotations

import jax

jax.config.update("jax_num_cpu_devices", 8)

import numpy as np
import pytest
from datasets import Dataset
from transformers import AutoTokenizer

import trl_jax
from compat_tests.effort import only_thorough
from compat_tests.mesh.rank import rows_of
from compat_tests.parity.dpo_cases import SMALL
from compat_tests.parity.marks import timeless
from compat_tests.parity.reference import BASE, read_weights
from compat_tests.trainer.trainers import FACTS
from trl_jax.data import kto

ROWS = 4  # per step, over all devices
EVERY_STEP = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
MODELS = {"Reward": FACTS | {"num_key_value_heads": 2}, "SFT": SMALL, "DPO": SMALL, "KTO": SMALL}


@pytest.fixture(scope="module")
def make(checkpoint, tmp_path_factory):
    def made(kind: str, mesh: str, shards: int, out=None):
        sizes = {f"per_device_{split}_batch_size": ROWS // shards for split in ("train", "eval")}
        config = BASE | EVERY_STEP | sizes | {"mesh_shape": mesh, "max_length": 64}
        out = tmp_path_factory.mktemp("out") if out is None else out
        args, rows = getattr(trl_jax, f"{kind}Config")(str(out), **config), Dataset.from_list(rows_of(kind, 2 * ROWS))
        model = str(checkpoint(**MODELS[kind]))
        # The KL term uses other completions on the same device: prepare the rows with pairs, so that this is the same
        # on any mesh.
        if kind == "KTO":
            words = AutoTokenizer.from_pretrained(model)
            rows = kto.prepare(rows, words, max_length=64, block=2, num_proc=None, name="train")
        trainer = getattr(trl_jax, f"{kind}Trainer")
        return trainer(model, args=args, train_dataset=rows, eval_dataset=rows.select(range(ROWS + 1)))

    return made


def ends(trainer) -> dict:
    """The log, predictions and weights of a run, resumed or not."""
    predicted = trainer.predict(trainer.eval_dataset)
    logs = [timeless(log) for log in trainer.state.log_history if "train_runtime" not in log]
    return {"logs": logs, "predictions": predicted.predictions, "predicted": timeless(predicted.metrics)}


@pytest.fixture(scope="module")
def alone(make):
    made = {}

    def of(kind):
        if kind not in made:
            trainer = make(kind, "data:1", 1)
            trainer.train()
            made[kind] = ends(trainer), read_weights(f"{trainer.args.output_dir}/checkpoint-2")
        return made[kind]

    return of


def close(found, wanted):
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-5), found, wanted)


CASES = [
    ("Reward", "sequence:2"), ("Reward", "fsdp:2"), ("SFT", "tensor:2"), ("SFT", "sequence:2"), ("DPO", "tensor:2"),
    ("DPO", "fsdp:2"), ("KTO", "sequence:2"), ("KTO", "tensor:2"),
]  # fmt: skip


# By default, eight_devices.py covers one device's evaluations and predictions and resuming on another mesh,
# eight_experts.py the results of a language model, and eight_rollouts.py a bitwise equal resumed run.
@only_thorough
@pytest.mark.parametrize(("kind", "mesh"), CASES)
def test_a_run_from_its_first_step_to_its_resuming(kind, mesh, make, alone):
    wanted, weights = alone(kind)
    shards = 2 if mesh.startswith("fsdp") else 1
    whole = make(kind, mesh, shards)
    whole.train()
    found = ends(whole)
    assert [sorted(log) for log in found["logs"]] == [sorted(log) for log in wanted["logs"]]
    assert any("eval_loss" in log for log in found["logs"])
    close(found, wanted)
    out = whole.args.output_dir
    close(read_weights(f"{out}/checkpoint-2"), weights)
    resumed = make(kind, mesh, shards, out)
    resumed.train(resume_from_checkpoint=f"{out}/checkpoint-1")
    jax.tree.map(np.testing.assert_array_equal, ends(resumed), found)
