"""SFT and DPO of language models on simulated devices against TRL on one."""

from __future__ import annotations

import jax

jax.config.update("jax_num_cpu_devices", 8)

import pytest

from compat_tests.effort import thorough
from compat_tests.mesh.rank import rows_of
from compat_tests.parity import golden, reference
from compat_tests.parity.dpo_cases import SMALL
from compat_tests.parity.marks import assert_same_weights, steps_of
from compat_tests.parity.test_dpo_curve import assert_same

CONFIG = {"max_length": 64, "max_steps": 6, "learning_rate": 3e-3}
ROWS = 4  # per step, over all devices


@pytest.fixture(scope="module")
def trl(checkpoint, tmp_path_factory):
    """TRL's run of a trainer, once per trainer."""
    made = {}

    def of(trainer):
        if trainer not in made:
            out = tmp_path_factory.mktemp("trl")
            made[trainer] = golden.run_trl(
                f"meshes/{trainer}", checkpoint(**SMALL), rows_of(trainer, 24), out, model=SMALL, trainer=trainer,
                per_device_train_batch_size=ROWS, **CONFIG,
            )  # fmt: skip
        return made[trainer]

    return of


@pytest.mark.parametrize(
    ("trainer", "mesh", "shards", "layout"),
    [
        thorough("SFT", "data:2", 2, "padded"),
        thorough("SFT", "fsdp:2", 2, "packed"),
        thorough("SFT", "tensor:2", 1, "packed"),
        thorough("SFT", "fsdp:2,sequence:2", 2, "packed"),
        thorough("DPO", "fsdp:2", 2, "shared"),
        thorough("DPO", "tensor:2", 1, "shared"),
    ],
)
def test_the_curve_is_trls(trainer, mesh, shards, layout, trl, checkpoint, tmp_path):
    config = {"mesh_shape": mesh, "batch_layout": layout, "per_device_train_batch_size": ROWS // shards}
    ours = reference.run_ours(checkpoint(**SMALL), rows_of(trainer, 24), tmp_path, trainer=trainer, **CONFIG | config)
    theirs = trl(trainer)
    assert len(steps_of(theirs.logs)) == 6
    for mine, other in zip(ours.logs, theirs.logs, strict=True):
        assert_same(mine, other)
    assert_same_weights(ours.weights, theirs.weights, 1e-3)
