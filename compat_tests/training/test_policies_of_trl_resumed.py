"""Resuming from checkpoints of TRL's online trainers: the next completions and steps match TRL's."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from datasets import Dataset

import trl_jax
from compat_tests.parity.distillation_cases import TEACHER
from compat_tests.parity.dpo_cases import SMALL
from compat_tests.parity.grpo_cases import STEPS, length_reward, prompt_rows
from compat_tests.parity.reference import BASE
from compat_tests.parity.test_grpo_curve import assert_same
from trl_jax.core.torch_random import TorchGenerator
from trl_jax.hub.torch_state import place_of

SAVED = STEPS | {"num_generations": 4, "max_steps": 3, "save_strategy": "steps", "save_steps": 2}
ADAPTIVE = {
    "use_adaptive_entropy": True, "entropy_target": 5.8, "entropy_coef": 0.01, "entropy_coef_delta": 0.1,
    "gradient_accumulation_steps": 2,
}  # fmt: skip


def steps(package, kind, folder, out, resume=None, **config):
    args = getattr(package, f"{kind}Config")(str(out), **BASE | SAVED | config)
    rows, seen = Dataset.from_list(prompt_rows(20)), []

    def look(completion_ids, **columns):
        seen.append([list(map(int, ids)) for ids in completion_ids])
        return [0.0] * len(completion_ids)

    trainer = getattr(package, f"{kind}Trainer")(str(folder), [length_reward, look], args, rows)
    trainer.train(resume_from_checkpoint=resume)
    return seen, [log for log in trainer.state.log_history if "loss" in log]


@pytest.mark.parametrize(("kind", "config"), [("GRPO", ADAPTIVE), ("RLOO", {})])
def test_the_next_completions_and_steps_are_trls(kind, config, checkpoint, tmp_path, caplog):
    trl, folder = pytest.importorskip("trl"), checkpoint(**SMALL)
    written, theirs = steps(trl, kind, folder, tmp_path / "trl", **config)
    saved = tmp_path / "trl" / "checkpoint-2"
    seen, ours = steps(trl_jax, kind, folder, tmp_path / "ours", str(saved), **config)
    assert seen == written[2:] and len(ours) == 3
    assert_same(ours[-1], theirs[-1], same_order=False)
    if kind == "RLOO":
        (saved / "rng_state.pth").unlink()
        with caplog.at_level(logging.WARNING, logger="trl_jax"):
            again, _ = steps(trl_jax, kind, folder, tmp_path / "again", str(saved), **config)
        assert "completions are sampled with new ones" in caplog.text and again != seen


def test_a_students_next_steps_are_trls_in_the_second_epoch_too(checkpoint, tmp_path):
    trl, found = pytest.importorskip("trl"), {}
    models, rows = (str(checkpoint(**shape)) for shape in (SMALL, TEACHER)), Dataset.from_list(prompt_rows(20))
    student, teacher = models
    for package, name, resume in ((trl, "theirs", None), (trl_jax, "ours", str(tmp_path / "theirs" / "checkpoint-3"))):
        config = BASE | STEPS | {"max_steps": 5, "save_strategy": "steps", "save_steps": 3}  # two steps per epoch
        args = package.DistillationConfig(str(tmp_path / name), **config)
        trainer = package.DistillationTrainer(student, teacher, args, rows)
        trainer.train(resume_from_checkpoint=resume)
        found[name] = [log for log in trainer.state.log_history if "loss" in log]
    assert len(found["ours"]) == 5
    for mine, other in zip(found["ours"][3:], found["theirs"][3:], strict=True):
        assert_same(mine, other, same_order=True)


@pytest.mark.parametrize("drawn", [0, 1, 623, 624, 625, 2000])
def test_the_place_in_torchs_stream(drawn):
    torch = pytest.importorskip("torch")
    theirs, ours = torch.Generator().manual_seed(7), TorchGenerator(0)
    for _ in range(drawn):
        torch.rand(1, generator=theirs)
    ours.restore(place_of(theirs.get_state().numpy()))
    np.testing.assert_array_equal(ours.permutation(900), torch.randperm(900, generator=theirs).numpy())
