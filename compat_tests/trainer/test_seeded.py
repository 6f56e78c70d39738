"""The trainer seeds random numbers for the user's functions, as TRL does; the run's own random streams are separate."""

from __future__ import annotations

import random

import numpy as np
import pytest
from datasets import Dataset

import trl_jax
from compat_tests.mesh.rank import rows_of
from compat_tests.parity.dpo_cases import SMALL
from compat_tests.parity.grpo_cases import STEPS, prompt_rows
from compat_tests.parity.reference import BASE
from compat_tests.trainer.trainers import FACTS


def draws():
    return random.random(), float(np.random.rand())


@pytest.mark.parametrize("kind", ["SFT", "Reward"])
def test_a_script_draws_what_it_draws_beside_trls_trainer(kind, checkpoint, tmp_path):
    trl, found = pytest.importorskip("trl"), []
    for package in (trl, trl_jax):
        draws()  # put the generators into other states
        args = getattr(package, f"{kind}Config")(str(tmp_path), seed=7, **BASE)
        model = str(checkpoint(**FACTS if kind == "Reward" else SMALL))
        getattr(package, f"{kind}Trainer")(model, args=args, train_dataset=Dataset.from_list(rows_of(kind, 4)))
        found.append([draws(), draws()])
    assert found[0] == found[1]


def trained(package, folder, out, reward):
    args = package.GRPOConfig(str(out), **BASE | STEPS | {"num_generations": 4, "max_steps": 2})
    trainer = package.GRPOTrainer(str(folder), reward, args, Dataset.from_list(prompt_rows(8)))
    trainer.train()
    return [log["grad_norm"] for log in trainer.state.log_history if "grad_norm" in log]


def test_a_reward_function_draws_what_it_draws_in_trls_run(checkpoint, tmp_path):
    trl, found = pytest.importorskip("trl"), []

    def dice(completions, **columns):
        found.append(draws())
        return [sum(draws()) for _ in completions]

    theirs, ours = (trained(package, checkpoint(**SMALL), tmp_path, dice) for package in (trl, trl_jax))
    assert found[:2] == found[2:]
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)


def test_torchs_draws_repeat_and_leave_a_run_as_it_is(checkpoint, tmp_path):
    torch, seen = pytest.importorskip("torch"), []

    def dice(completions, **columns):
        seen.append(completions)
        return torch.rand(len(completions))

    def no_dice(completions, **columns):
        seen.append(completions)
        return [0.0] * len(completions)

    folder = checkpoint(**SMALL)
    assert trained(trl_jax, folder, tmp_path, dice) == trained(trl_jax, folder, tmp_path, dice)
    trained(trl_jax, folder, tmp_path, no_dice)
    assert seen[0] == seen[2] == seen[4] and seen[1] == seen[3]


def test_generate_after_a_seed_of_torch_samples_transformers_tokens(checkpoint):
    """Seeding torch in any way counts, the same seed a second time, too; drawing from torch does not."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    folder, found = checkpoint(**SMALL), []
    for package in (transformers, trl_jax):
        model = package.AutoModelForCausalLM.from_pretrained(folder)

        def sampled(model=model):
            out = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=6, do_sample=True, top_k=0)
            return np.asarray(out)[0].tolist()

        seen = []
        for seeds in (transformers.set_seed, torch.manual_seed):
            seeds(11)
            seen += [sampled(), sampled()]
        seeds(12)
        torch.rand(3)
        found.append([*seen, sampled()])
    assert found[1] == found[0]
    assert found[1][0] == found[1][2] != found[1][1] == found[1][3]
    trl_jax.set_seed(11)
    torch.rand(1)
    assert sampled() == found[1][0]
