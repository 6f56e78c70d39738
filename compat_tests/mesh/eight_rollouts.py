"""Online training on meshes of simulated CPU devices: training, evaluation, saving, resuming, and the same completions
for the same seed on every mesh."""

from __future__ import annotations

import jax

jax.config.update("jax_num_cpu_devices", 8)

import numpy as np
import pytest
from datasets import Dataset

from compat_tests.effort import THOROUGH, only_thorough, thorough
from compat_tests.parity.dpo_cases import SMALL
from compat_tests.parity.grpo_cases import length_reward, prompt_rows, vowels
from compat_tests.parity.reference import BASE
from compat_tests.trainer.test_own_policy_loss import Dapo
from trl_jax.generation import weights
from trl_jax.hub.auto import AutoModelForCausalLM
from trl_jax.trainer.distillation_config import DistillationConfig
from trl_jax.trainer.distillation_trainer import DistillationTrainer
from trl_jax.trainer.grpo_config import GRPOConfig
from trl_jax.trainer.grpo_trainer import GRPOTrainer
from trl_jax.trainer.rloo_trainer import RLOOTrainer

ROWS = 16  # per micro-batch, over all devices
CONFIG = {
    "max_steps": 4, "learning_rate": 3e-3, "num_generations": 4, "num_iterations": 2, "max_completion_length": 8,
    "beta": 0.05, "eval_strategy": "steps", "eval_steps": 2, "num_generations_eval": 4, "pad_to_multiple_of": None,
    "gradient_accumulation_steps": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def make(checkpoint, tmp_path_factory):
    def made(kind, mesh: str, shards: int, out=None, model=SMALL, **config):
        sizes = {f"per_device_{split}_batch_size": ROWS // shards for split in ("train", "eval")}
        out, seen = out or tmp_path_factory.mktemp("out"), []

        def spy(completion_ids, **columns):
            seen.append([list(ids) for ids in completion_ids])
            return [0.0] * len(completion_ids)

        args = kind.config_class(str(out), mesh_shape=mesh, **BASE | CONFIG | sizes | config)
        functions, rows = [length_reward, vowels, spy], prompt_rows(20)
        data = Dataset.from_list(rows), Dataset.from_list(rows[:5])  # the last batch has one prompt: four rows
        return kind(str(checkpoint(**model)), functions, args, *data), seen

    return made


def train(made, resume=None):
    trainer, seen = made
    trainer.train(resume_from_checkpoint=resume)
    return trainer, seen


CLOCK = ("runtime", "per_second", "step_time")


def history(trainer):
    return [{k: v for k, v in log.items() if not k.endswith(CLOCK)} for log in trainer.state.log_history]


@pytest.fixture(scope="module")
def first(make):
    """With data and fsdp, where each shard has a quarter of the rows, and tensor."""
    return train(make(GRPOTrainer, "data:2,fsdp:2,tensor:2", 4))


def test_a_run_learns_and_evaluates(first):
    trainer, seen = first
    logs = history(trainer)
    steps, evaluations = [log for log in logs if "loss" in log], [log for log in logs if "eval_loss" in log]
    assert len(steps) == 4 and len(evaluations) == 2
    assert all(np.isfinite(log["loss"]) and log["grad_norm"] > 0 for log in steps)
    assert [len(rows) for rows in seen] == [32, 16, 4, 32, 16, 4]
    assert steps[-1]["kl"] > 0 and all(np.isfinite(log["eval_reward"]) for log in evaluations)


def same_numbers(mine, other):
    for name in ("loss", "grad_norm", "reward", "kl", "entropy", "eval_loss", "eval_reward"):
        if name in other:
            assert mine[name] == pytest.approx(other[name], rel=5e-4, abs=2e-5), name


@only_thorough
@pytest.mark.parametrize("mesh", ["fsdp:4,tensor:2", "data:4,tensor:2"])
def test_the_same_completions_and_numbers_on_other_meshes(mesh, make, first):
    trainer, seen = train(make(GRPOTrainer, mesh, 4))
    assert seen == first[1]
    for mine, other in zip(history(trainer), history(first[0]), strict=True):
        same_numbers(mine, other)


@only_thorough
@pytest.mark.parametrize(("mesh", "shards"), [("data:8", 8), ("data:1,fsdp:8", 8), ("tensor:2", 1)])
def test_the_same_completions_of_the_same_policy_by_more_or_fewer_shards(mesh, shards, make, first):
    """Generations are cut into other micro-batches, and each shard gets its part of its own completions."""
    trainer, seen = train(make(GRPOTrainer, mesh, shards, max_steps=1))
    assert seen[0] == first[1][0]
    mine, other = history(trainer)[0], history(first[0])[0]
    for name in mine:
        if name.startswith(("completions/", "reward")):
            assert mine[name] == pytest.approx(other[name], rel=1e-6), name


def test_texts_are_not_divided(make):
    with pytest.raises(ValueError, match="leave the axis sequence out of mesh_shape"):
        make(GRPOTrainer, "data:2,fsdp:2,sequence:2", 4)


def test_generations_are_of_all_shards_together(make):
    args = make(GRPOTrainer, "data:2,fsdp:2,tensor:2", 4)[0].args
    assert (args.world_size, args.data_parallel_size, args.generation_batch_size) == (8, 4, 2 * ROWS)


def test_a_config_s_generation_is_that_of_all_devices(tmp_path):
    args = GRPOConfig(str(tmp_path), use_cpu=True, per_device_train_batch_size=2, num_generations=4)
    assert (args.generation_batch_size, args.steps_per_generation) == (16, 1)
    with pytest.raises(ValueError, match=r"divisible by the global batch size \(16\)"):
        GRPOConfig(str(tmp_path), use_cpu=True, per_device_train_batch_size=2, generation_batch_size=8)


@pytest.mark.parametrize(
    ("kind", "mesh"), [(GRPOTrainer, "data:2,fsdp:2,tensor:2"), thorough(RLOOTrainer, "fsdp:4,tensor:2")]
)
def test_a_run_goes_on_to_the_bit(kind, mesh, make, tmp_path):
    options = {"save_strategy": "steps", "save_steps": 1, "max_steps": 3, "eval_strategy": "no"}
    whole, seen = train(make(kind, mesh, 4, tmp_path, **options))
    again, more = train(make(kind, mesh, 4, tmp_path, **options), str(tmp_path / "checkpoint-1"))
    assert len(seen) == 2 and more == seen[1:]
    jax.tree.map(np.testing.assert_array_equal, whole.model.params, again.model.params)
    assert history(whole) == history(again)


@only_thorough
def test_a_loss_of_the_script_is_the_built_in_one_on_each_device(first, make):
    """Micro-batches are sharded, and an evaluation's last batch has one row per device."""
    own, seen = train(make(Dapo, "data:2,fsdp:2,tensor:2", 4))
    trainer, completions = first
    assert seen == completions
    for one, other in zip(history(own), history(trainer), strict=True):
        for name in {"loss", "grad_norm", "eval_loss", "reward"} & set(other):
            assert one[name] == pytest.approx(other[name], rel=1e-4, abs=1e-6), name
        for name in {"kl", "eval_kl"} & set(other):
            assert one[name.replace("kl", "own/kl")] == pytest.approx(other[name], rel=0.1, abs=1e-4)  # per device


@only_thorough  # by default, eight_references.py covers a sharded reference, and other tests online training
def test_a_student_and_its_teacher_are_divided(checkpoint, tmp_path):
    """The same completions and divergences as on two devices with half of each model. Their widths differ, so that
    their layers are sharded differently."""
    rows, found = Dataset.from_list(prompt_rows(20)), []
    for mesh, shards in (("tensor:2", 1), ("data:2,fsdp:2,tensor:2", 4)):
        sizes = {f"per_device_{split}_batch_size": ROWS // shards for split in ("train", "eval")}
        options = CONFIG | {"max_steps": 1, "eval_steps": 1, "beta": 0.3, "gradient_accumulation_steps": 1} | sizes
        if shards == 1 and not THOROUGH:
            options["eval_strategy"] = "no"
        for name in ("num_generations", "num_iterations", "num_generations_eval"):
            del options[name]
        args = DistillationConfig(str(tmp_path), mesh_shape=mesh, **BASE | options)
        folders = (str(checkpoint(**SMALL | {"hidden_size": size})) for size in (32, 64))
        trainer = DistillationTrainer(*folders, args, rows, rows.take(5))
        trainer.train()
        found.append(history(trainer))
        divided = trainer.parts.setup.reference.arrays["reference.decoder.embed.weight"]
        assert divided.addressable_shards[0].data.nbytes == divided.nbytes // (2 * min(shards, 2))
    for name in ("loss", "grad_norm", "entropy", "completions/mean_length"):
        assert found[0][0][name] == pytest.approx(found[1][0][name], rel=1e-5), name
    evaluated = [log["eval_loss"] for logs in found for log in logs if "eval_loss" in log]
    assert len(evaluated) == 1 + THOROUGH and np.isfinite(evaluated).all()


@only_thorough
@pytest.mark.parametrize("by_layer", [False, True])
def test_layers_with_windows_complete_as_on_one_device(by_layer, make, monkeypatch):
    """Once in a scan over the stack, whose layers' caches come from several parts, and once layer by layer."""
    monkeypatch.setattr(weights, "_LARGEST", 2**30 if by_layer else 0)
    windows = {"model_type": "gemma2", "sliding_window": 6, "num_hidden_layers": 3}
    options = {"model": windows, "max_steps": 1, "eval_strategy": "no", "generation_batch_size": 32}
    meshes = ("data:1", 1), ("data:2,fsdp:2,tensor:2", 4)
    found, wanted = (train(make(GRPOTrainer, *mesh, **options))[1] for mesh in meshes)
    assert found == wanted and sum(map(len, found[0])) == 256


@only_thorough
def test_many_prompts_are_completed_as_on_one_device(first, tmp_path):
    """Waiting prompts take the slots of finished ones; parameters and caches are sharded."""
    trainer, _ = first
    trainer.save_model(str(tmp_path))
    alone, dice = AutoModelForCausalLM.from_pretrained(tmp_path), np.random.default_rng(0)
    prompts = [dice.integers(5, 60, length).tolist() for length in dice.integers(1, 30, 20)]
    options = {"seed": 3, "do_sample": True, "max_new_tokens": 20, "eos_token_id": list(range(30, 60)), "batch_size": 4}
    done, wanted = (model.generate_batch(prompts, **options) for model in (trainer.model, alone))
    assert done.keys() == wanted.keys() and len({len(one.generated_tokens) for one in wanted.values()}) > 5
    for name, one in wanted.items():
        assert done[name].generated_tokens == one.generated_tokens
        np.testing.assert_allclose(done[name].logprobs, one.logprobs, atol=2e-5)
