"""Branches of a shared context on two of eight simulated devices, against plain jnp in float64."""

from __future__ import annotations

import jax

jax.config.update("jax_num_cpu_devices", 8)

import numpy as np
import pytest

from compat_tests.effort import thorough
from compat_tests.training import branches


@pytest.fixture(scope="module")
def models(checkpoint):
    return [checkpoint("mistral", sliding_window=8, **branches.MODEL, seed=seed) for seed in (0, 1)]


@pytest.fixture(scope="module")
def wanted(models):
    rows = branches.rows()
    return branches.exact(*models, rows, [row["weight"] for row in rows])


@pytest.mark.parametrize(
    ("mesh", "layout"), [thorough("data:2", "padded"), thorough("data:2", "shared"), ("fsdp:2", "shared")]
)
def test_a_run_trains_and_evaluates_them(mesh, layout, models, wanted, tmp_path):
    sizes = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2, "per_device_eval_batch_size": 6}
    trainer = branches.trainer(*models, tmp_path, branches.rows(), mesh_shape=mesh, batch_layout=layout, **sizes)
    evaluated = trainer.evaluate()
    np.testing.assert_allclose([evaluated["eval_loss"], evaluated["eval_kl"]], wanted[:2], rtol=1e-5)
    trainer.train()
    [log] = [entry for entry in trainer.state.log_history if "loss" in entry]
    norm = np.sqrt(sum(np.sum(np.square(gradient)) for gradient in wanted[2].values()))
    np.testing.assert_allclose([log[name] for name in ("loss", "kl", "grad_norm")], [*wanted[:2], norm], rtol=1e-5)
