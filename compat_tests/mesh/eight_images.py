"""Rows with images give the results of one device on a mesh with every axis; each shard has its own images."""

from __future__ import annotations

import jax

jax.config.update("jax_num_cpu_devices", 8)

import numpy as np
import pytest

import trl_jax
from compat_tests.effort import thorough
from compat_tests.hub.vision.test_generate import inputs
from compat_tests.trainer.vision_models import messages, pairs, tiny_llava


@pytest.fixture(scope="module")
def losses(tmp_path_factory):
    folder = str(tiny_llava(tmp_path_factory.mktemp("llava")))

    def run(kind: str, rows, mesh: str, size: int):
        args = getattr(trl_jax, f"{kind}Config")(
            str(tmp_path_factory.mktemp("out")), mesh_shape=mesh, per_device_train_batch_size=size, max_steps=2,
            learning_rate=1e-3, logging_steps=1, max_length=None, bf16=False, use_cpu=True, report_to="none",
            save_strategy="no", fsdp_config={"min_num_params": 1},
        )  # fmt: skip
        made = getattr(trl_jax, f"{kind}Trainer")(folder, args=args, train_dataset=rows)
        made.train()
        logs = [log for log in made.state.log_history if "loss" in log]
        return np.array([[log["loss"], log["grad_norm"]] for log in logs])

    return run


@pytest.mark.parametrize(("kind", "rows"), [("SFT", messages), thorough("DPO", pairs)])
def test_the_numbers_are_those_of_one_device(kind, rows, losses):
    alone = losses(kind, rows(4), "data:1", 4)
    np.testing.assert_allclose(losses(kind, rows(4), "data:2,fsdp:2,tensor:2", 1), alone, rtol=1e-5)


def test_prompts_with_images_are_completed_as_on_one_device(tmp_path):
    """Three prompts over eight shards: the other five get dummy prompts."""
    folder = tiny_llava(tmp_path)
    given = {name: np.asarray(value) for name, value in inputs(folder, (1, 0, 2)).items()}
    options = {"max_new_tokens": 8, "do_sample": False}
    load = trl_jax.AutoModelForImageTextToText.from_pretrained
    alone = load(folder).generate(**given, **options)
    np.testing.assert_array_equal(load(folder, mesh_shape="fsdp:8").generate(**given, **options), alone)
