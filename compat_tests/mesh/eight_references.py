"""DPO on meshes of simulated CPU devices: the numbers of one device, with the reference in the step or before it."""

from __future__ import annotations

import jax

jax.config.update("jax_num_cpu_devices", 8)

import numpy as np  # noqa: E402
import pytest  # noqa: E402
from datasets import Dataset  # noqa: E402

from compat_tests.parity.dpo_cases import SMALL  # noqa: E402
from compat_tests.parity.reference import BASE  # noqa: E402
from compat_tests.tiny import preference_rows  # noqa: E402
from trl_jax import DPOConfig, DPOTrainer  # noqa: E402

PAIRS = 8  # of a batch, on all devices together
MEASURED = ("loss", "grad_norm", "rewards/margins", "logps/chosen", "entropy", "eval_loss", "eval_rewards/margins")


@pytest.fixture(scope="module")
def run(checkpoint, tmp_path_factory):
    def measured(mesh: str, shards: int, **config) -> np.ndarray:
        sizes = {f"per_device_{split}_batch_size": PAIRS // shards for split in ("train", "eval")}
        out, steps = str(tmp_path_factory.mktemp("out")), {"max_steps": 3, "eval_strategy": "steps", "eval_steps": 3}
        args = DPOConfig(out, mesh_shape=mesh, **BASE | steps | sizes | config)
        rows = Dataset.from_list(preference_rows(3 * PAIRS, "prompt"))
        model = str(checkpoint(**SMALL))
        trainer = DPOTrainer(model, args=args, train_dataset=rows, eval_dataset=rows.select(range(PAIRS + 3)))
        trainer.train()
        return np.asarray([log[key] for key in MEASURED for log in trainer.state.log_history if key in log])

    return measured


@pytest.fixture(scope="module")
def alone(run):
    return run("data:1", 1)


@pytest.mark.parametrize(
    ("mesh", "shards", "config"),
    [
        ("data:2,fsdp:2,tensor:2", 4, {}),
        ("fsdp:4,tensor:2", 4, {"precompute_ref_log_probs": True}),
        ("data:8", 8, {"batch_layout": "padded"}),
    ],
)
def test_the_numbers_of_one_device(mesh, shards, config, run, alone):
    assert len(alone) == 5 * 3 + 2
    np.testing.assert_allclose(run(mesh, shards, **config), alone, rtol=2e-4, atol=1e-5)
