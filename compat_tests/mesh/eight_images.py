"""Rows with images give the results of one device on a mesh with every axis; each shard has its own images."""

from __future__ import annotations

import jax

jax.config.update("jax_num_cpu_devices", 8)

import numpy as np
import pytest
from datasets import Dataset

import trl_jax
from compat_tests.effort import thorough
from compat_tests.hub.vision.test_generate import inputs
from compat_tests.trainer.test_image_rollouts import prompts
from compat_tests.trainer.vision_models import assistant, messages, pairs, pictures, tiny_llava, tiny_qwen, user

MESH = "data:2,fsdp:2,tensor:2"


def answered(count: int) -> Dataset:
    """Rows with equal texts: as transformers does for Qwen, a step is the mean over devices of means over targets."""
    texts = {"prompt": user("bake the cake?"), "completion": assistant("gladly quit")}
    return Dataset.from_list([texts | {"image": picture} for picture in pictures(count)])


def length(completions, **_):
    """A reward."""
    return [len(own[0]["content"]) % 7 for own in completions]


@pytest.fixture(scope="module")
def losses(tmp_path_factory):
    folders = {build: str(build(tmp_path_factory.mktemp(build.__name__))) for build in (tiny_llava, tiny_qwen)}

    def run(build, kind: str, rows, mesh: str, size: int):
        own = {"max_length": None, "max_steps": 2}
        if kind == "GRPO":  # each shard has its own order of later prompts
            own = {"num_generations": 2, "max_completion_length": 4, "max_steps": 1}
        args = getattr(trl_jax, f"{kind}Config")(
            str(tmp_path_factory.mktemp("out")), mesh_shape=mesh, per_device_train_batch_size=size,
            learning_rate=1e-3, logging_steps=1, bf16=False, use_cpu=True, report_to="none", save_strategy="no",
            fsdp_config={"min_num_params": 1}, **own,
        )  # fmt: skip
        given = {"reward_funcs": length} if kind == "GRPO" else {}
        made = getattr(trl_jax, f"{kind}Trainer")(folders[build], args=args, train_dataset=rows, **given)
        made.train()
        tower = [array for path, array in made.model.params.items() if path.startswith("vision.")]
        divided = [array for array in tower if array.addressable_shards[0].data.size < array.size]
        assert tower and bool(divided) == (mesh == MESH)
        logs = [log for log in made.state.log_history if "loss" in log]
        return np.array([[log["loss"], log["grad_norm"]] for log in logs])

    return run


@pytest.mark.parametrize(
    ("build", "kind", "rows"),
    [
        (tiny_llava, "SFT", messages),
        thorough(tiny_llava, "DPO", pairs),
        thorough(tiny_qwen, "SFT", answered),
        thorough(tiny_llava, "GRPO", prompts),
    ],
)
def test_the_numbers_are_those_of_one_device(build, kind, rows, losses):
    alone = losses(build, kind, rows(4), "data:1", 4)
    np.testing.assert_allclose(losses(build, kind, rows(4), MESH, 1), alone, rtol=1e-5, atol=1e-6)


def test_prompts_with_images_are_completed_as_on_one_device(tmp_path):
    """Three prompts over eight shards: the other five get dummy prompts."""
    folder = tiny_llava(tmp_path)
    given = {name: np.asarray(value) for name, value in inputs(folder, (1, 0, 2)).items()}
    options = {"max_new_tokens": 8, "do_sample": False}
    load = trl_jax.AutoModelForImageTextToText.from_pretrained
    alone = load(folder).generate(**given, **options)
    np.testing.assert_array_equal(load(folder, mesh_shape="fsdp:8").generate(**given, **options), alone)
