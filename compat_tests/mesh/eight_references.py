"""DPO and KTO on meshes of simulated CPU devices: the results of one device, with the reference computed in the step or
before it."""

from __future__ import annotations

import jax

jax.config.update("jax_num_cpu_devices", 8)

import numpy as np
import pytest
from datasets import Dataset

from compat_tests.effort import only_thorough
from compat_tests.parity.kto_cases import SMALL, kto_rows
from compat_tests.parity.reference import BASE
from compat_tests.tiny import preference_rows
from trl_jax.trainer.dpo_config import DPOConfig
from trl_jax.trainer.dpo_trainer import DPOTrainer
from trl_jax.trainer.kto_config import KTOConfig
from trl_jax.trainer.kto_trainer import KTOTrainer

ROWS = 8  # per batch, over all devices
MEASURED = ("loss", "grad_norm", "rewards/margins", "logps/chosen", "entropy", "eval_loss", "eval_rewards/margins")
DPO = (DPOConfig, DPOTrainer, Dataset.from_list(preference_rows(3 * ROWS, "prompt")))
KTO = (KTOConfig, KTOTrainer, Dataset.from_list(kto_rows(3 * ROWS)))
QUICK = {"learning_rate": 1e-2, "beta": 0.3}  # so that the KL divergence is not 0


@pytest.fixture(scope="module")
def make(checkpoint, tmp_path_factory):
    def made(kinds, mesh: str, shards: int, rows=None, **config):
        args_of, trainer_of, own = kinds
        sizes = {f"per_device_{split}_batch_size": ROWS // shards for split in ("train", "eval")}
        out, steps = str(tmp_path_factory.mktemp("out")), {"max_steps": 3, "eval_strategy": "steps", "eval_steps": 3}
        args, train = args_of(out, mesh_shape=mesh, **BASE | steps | sizes | config), own if rows is None else rows
        held_out = train.select(range(ROWS + 2))  # the last batch has fewer rows than devices
        return trainer_of(str(checkpoint(**SMALL)), args=args, train_dataset=train, eval_dataset=held_out)

    return made


def numbers(trainer, keys=MEASURED) -> np.ndarray:
    trainer.train()
    return np.asarray([log[key] for key in keys for log in trainer.state.log_history if key in log])


@pytest.fixture(scope="module")
def alone(make):
    return numbers(make(DPO, "data:1", 1))


@only_thorough  # by default, eight_branches.py covers a sharded reference, and eight_rollouts.py a teacher
@pytest.mark.parametrize(
    ("mesh", "shards", "config"),
    [
        ("data:2,fsdp:2,tensor:2", 4, {}),
        ("fsdp:4,tensor:2", 4, {"precompute_ref_log_probs": True}),
        ("data:8", 8, {"batch_layout": "padded"}),
    ],
)
def test_the_numbers_of_one_device(mesh, shards, config, make, alone):
    assert len(alone) == 5 * 3 + 2
    np.testing.assert_allclose(numbers(make(DPO, mesh, shards, **config)), alone, rtol=2e-4, atol=1e-5)


@pytest.fixture(scope="module")
def alone_in_blocks(make):
    """One device with all rows of a micro-batch, but completions for the KL term matched as on each of four devices."""
    rows = make(KTO, "data:1", 4).train_dataset
    return numbers(make(KTO, "data:1", 1, rows, **QUICK), ("kl", *MEASURED))


@only_thorough  # by default, test_two_language_models.py covers two ranks of TRL
@pytest.mark.parametrize(
    ("mesh", "config"),
    [
        ("data:2,fsdp:2,tensor:2", {}),
        ("fsdp:4,sequence:2", {"precompute_ref_log_probs": True}),
        ("data:4,tensor:2", {"batch_layout": "padded"}),
    ],
)
def test_the_divergence_is_estimated_by_the_rows_of_all_devices(mesh, config, make, alone_in_blocks):
    assert alone_in_blocks[:3].max() > 0.1
    found = numbers(make(KTO, mesh, 4, **QUICK, **config), ("kl", *MEASURED))
    np.testing.assert_allclose(found, alone_in_blocks, rtol=5e-4, atol=5e-5)
