"""The sampler's log-probabilities in the loss, the metrics and the checkpoint, as in TRL."""

from __future__ import annotations

import numpy as np
import pytest
import trl
from datasets import Dataset

import trl_jax
from compat_tests.effort import usual
from compat_tests.parity.dpo_cases import SMALL
from compat_tests.parity.grpo_cases import prompt_rows
from compat_tests.parity.reference import BASE
from trl_jax.rollout.tools import written_by

CONFIG = {
    "max_steps": 2, "learning_rate": 3e-3, "num_generations": 4, "per_device_train_batch_size": 8,
    "max_completion_length": 8, "pad_to_multiple_of": None, "shuffle_dataset": False, "logging_steps": 1,
}  # fmt: skip
CORRECTED = {
    "token_truncate": {"loss_type": "vespo", "vllm_importance_sampling_clip_max": 1.2},
    "token_mask": {"loss_type": "cispo", "vllm_importance_sampling_clip_min": 0.8, "mask_truncated_completions": True},
    "sequence_truncate": {
        "loss_type": "grpo", "vllm_importance_sampling_clip_min": 0.5, "vllm_importance_sampling_clip_max": 1.5},
    "sequence_mask": {"loss_type": "dapo", "vllm_importance_sampling_clip_max": 1.3, "off_policy_mask_threshold": 0.05},
}  # fmt: skip


class NoEngine:
    """Replaces TRL's vLLM engine: completions come from a rollout_func."""

    def __init__(self, **options):
        self.options = options

    def sync_weights(self):
        pass


def rollout(prompts, trainer):
    """Deterministic random completions; every third is truncated (no EOS token). Their log-probabilities are close to
    those of the tiny model, -log(vocabulary size), and one is missing."""
    random = np.random.default_rng(len(prompts))
    made = {"prompt_ids": [], "completion_ids": [], "logprobs": []}
    for number, prompt in enumerate(prompts):
        ids = random.integers(5, 200, 3 + number % 4).tolist()
        made["prompt_ids"].append(trainer.processing_class(text=prompt)["input_ids"])
        made["completion_ids"].append(ids + ([trainer.processing_class.eos_token_id] if number % 3 else []))
        vocabulary = trainer.model.config.vocab_size
        logps = -np.log(vocabulary) + random.normal(0, 0.2, len(made["completion_ids"][-1]))
        made["logprobs"].append(logps.tolist())
    made["logprobs"][1][1] = None
    return made


def reward(completion_ids, **columns):
    return [float(sum(ids) % 7) for ids in completion_ids]


def logs_of(package, model, out, **config):
    args = package.GRPOConfig(str(out), **BASE | CONFIG | config)
    rows = Dataset.from_list(prompt_rows(8))
    trainer = package.GRPOTrainer(str(model), reward, args, rows, rollout_func=rollout)
    trainer.train()
    return trainer.state.log_history[: CONFIG["max_steps"]]


@pytest.fixture
def with_rollouts_in_trl(monkeypatch):
    monkeypatch.setattr("trl.trainer.grpo_trainer.VLLMGeneration", NoEngine)


@usual("token_mask", "sequence_truncate")
@pytest.mark.parametrize("mode", CORRECTED)
def test_reported_logps_correct_the_loss_as_in_trl(mode, checkpoint, tmp_path, with_rollouts_in_trl):
    config = {"use_vllm": True, "vllm_importance_sampling_mode": mode} | CORRECTED[mode]
    model = checkpoint(**SMALL)
    theirs = logs_of(trl, model, tmp_path / "trl", **config)
    ours = logs_of(trl_jax, model, tmp_path / "ours", **config)
    for mine, other in zip(ours, theirs, strict=True):
        sampling = [name for name in other if name.startswith("sampling/")]
        assert len(sampling) == 5 and sampling == [name for name in mine if name.startswith("sampling/")]
        assert 0.05 < other["sampling/sampling_logp_difference/mean"] < 2
        for name in ("loss", *sampling):
            assert mine[name] == pytest.approx(other[name], abs=1e-5, rel=1e-5), (mode, name)
        assert mine["grad_norm"] == pytest.approx(other["grad_norm"], rel=2e-4)
    plain = logs_of(trl_jax, model, tmp_path / "plain", **config | {"use_vllm": False})
    assert abs(plain[0]["grad_norm"] - ours[0]["grad_norm"]) > 1e-3 * ours[0]["grad_norm"]


@pytest.mark.parametrize("given, text", {
    "too few": ([[-1.0]], "without exactly one number per token"),
    "texts": ([[-1.0, "a"]], "must be numbers or None, got"),
    "probabilities": ([[-1.0, 0.5]], "must be one number up to 0 per token"),
    "nested": ([[[-1.0], [-1.0]]], "must be one number up to 0 per token"),
}.values())  # fmt: skip
def test_reported_logps_are_checked(given, text):
    with pytest.raises(ValueError, match=text):
        written_by(lambda prompts: {"prompt_ids": [[3]], "completion_ids": [[5, 6]], "logprobs": given}, ["a"], 10)


def test_a_correction_without_logps_is_refused(checkpoint, tmp_path):
    def silent(prompts, trainer):
        return rollout(prompts, trainer) | {"logprobs": None}

    args = trl_jax.GRPOConfig(str(tmp_path), **BASE | CONFIG, use_vllm=True)
    trainer = trl_jax.GRPOTrainer(
        str(checkpoint(**SMALL)), reward, args, Dataset.from_list(prompt_rows(8)), rollout_func=silent
    )
    with pytest.raises(ValueError, match="rollout_func returned logprobs=None.*vllm_importance_sampling_correction"):
        trainer.train()
    args.loss_type = "vespo"
    with pytest.raises(ValueError, match="VESPO loss requires `vllm_importance_sampling_mode`.*sequence_mask"):
        trl_jax.GRPOTrainer(
            str(checkpoint(**SMALL)), reward, args, Dataset.from_list(prompt_rows(8)), rollout_func=silent
        )
