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
from compat_tests.rollout.stub_server import StubServer
from trl_jax.rollout.tools import call_rollout_func

CONFIG = {
    "max_steps": 2, "learning_rate": 3e-3, "num_generations": 4, "per_device_train_batch_size": 8,
    "max_completion_length": 8, "pad_to_multiple_of": None, "shuffle_dataset": False, "logging_steps": 1,
}  # fmt: skip
MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


def caps_of(mode):
    low, high = (0.8, 1.2) if mode.startswith("token") else (0.5, 1.5)
    return {"max": (None, high), "min": (low, None), "both": (low, high)}


def case(mode, low, high, loss, **more):
    mode = {"vllm_importance_sampling_mode": mode, "loss_type": loss}
    return mode | {"vllm_importance_sampling_clip_min": low, "vllm_importance_sampling_clip_max": high} | more


# VESPO is refused with the sequence modes.
CORRECTED = {
    f"{mode}-{cap}-{loss}": case(mode, *bounds, loss)
    for mode in MODES for cap, bounds in caps_of(mode).items() for loss in ("dapo", "grpo", "cispo", "vespo")
    if loss != "vespo" or mode.startswith("token")
} | {
    "truncated": case("token_mask", 0.8, 3.0, "cispo", mask_truncated_completions=True),
    "off_policy": case("sequence_mask", None, 1.3, "dapo", off_policy_mask_threshold=0.05),
}  # fmt: skip


class NoEngine:
    """Replaces TRL's vLLM engine: completions come from a rollout_func."""

    def __init__(self, **options):
        self.options = options

    def sync_weights(self):
        pass

    def generate(self, prompts, images, num_generations, profiler):
        """What a server replied to the same prompts, in `replies`."""
        found = [pair for ids in prompts[::num_generations] for pair in self.replies[tuple(ids)]]
        return prompts, [ids for ids, _ in found], [[[logp] for logp in logps] for _, logps in found], None


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


def logs_of(package, model, out, rollout_func=rollout, **config):
    args = package.GRPOConfig(str(out), **BASE | CONFIG | config)
    rows = Dataset.from_list(prompt_rows(8))
    trainer = package.GRPOTrainer(str(model), reward, args, rows, rollout_func=rollout_func)
    trainer.train()
    return trainer.state.log_history[: CONFIG["max_steps"]]


@pytest.fixture
def with_rollouts_in_trl(monkeypatch):
    monkeypatch.setattr("trl.trainer.grpo_trainer.VLLMGeneration", NoEngine)


@usual("token_truncate-max-vespo", "truncated", "off_policy")  # with a server below, sequence_truncate-both-grpo
@pytest.mark.parametrize("name", CORRECTED)
def test_reported_logps_correct_the_loss_as_in_trl(name, checkpoint, tmp_path, with_rollouts_in_trl):
    config = {"use_vllm": True} | CORRECTED[name]
    model = checkpoint(**SMALL)
    theirs = logs_of(trl, model, tmp_path / "trl", **config)
    ours = logs_of(trl_jax, model, tmp_path / "ours", **config)
    for mine, other in zip(ours, theirs, strict=True):
        sampling = [name for name in other if name.startswith("sampling/")]
        assert len(sampling) == 5 and sampling == [name for name in mine if name.startswith("sampling/")]
        assert 0.05 < other["sampling/sampling_logp_difference/mean"] < 2
        for metric in ("loss", *sampling):
            assert mine[metric] == pytest.approx(other[metric], abs=1e-5, rel=1e-5), metric
        assert mine["grad_norm"] == pytest.approx(other["grad_norm"], rel=2e-4)
    plain = logs_of(trl_jax, model, tmp_path / "plain", **config | {"use_vllm": False})
    assert abs(plain[0]["grad_norm"] - ours[0]["grad_norm"]) > 1e-3 * ours[0]["grad_norm"]


def test_logps_of_a_server_correct_the_loss_as_in_trl(checkpoint, tmp_path, monkeypatch):
    """TRL's engine replays the completions of the server and its log-probabilities, which are 0.1 too low."""
    model, replies = checkpoint(**SMALL), {}
    config = {"use_vllm": True, "temperature": 0.7} | CORRECTED["sequence_truncate-both-grpo"]
    stub = StubServer(model)
    stub.shift, complete = -0.1, stub._post_completions

    def recorded(body):
        status, reply = complete(body)
        if "seed" in body:
            choices = sorted(reply["choices"], key=lambda choice: choice["index"])
            found = [(choice["token_ids"], choice["logprobs"]["token_logprobs"]) for choice in choices]
            assert replies.setdefault(tuple(body["prompt"]), found) is found  # each prompt is asked once
        return status, reply

    stub._post_completions = recorded
    try:
        served = {"vllm_mode": "server", "vllm_server_port": stub.port, "vllm_weights_dir": str(tmp_path)}
        ours = logs_of(trl_jax, model, tmp_path / "ours", None, **config | served)
    finally:
        stub.stop()
    monkeypatch.setattr("trl.trainer.grpo_trainer.VLLMGeneration", NoEngine)
    monkeypatch.setattr(NoEngine, "replies", replies, raising=False)
    theirs = logs_of(trl, model, tmp_path / "trl", None, **config)
    for mine, other in zip(ours, theirs, strict=True):
        sampling = [name for name in other if name.startswith("sampling/")]
        assert len(sampling) == 5 and other["sampling/sampling_logp_difference/mean"] == pytest.approx(0.1, abs=1e-4)
        assert other["sampling/importance_sampling_ratio/max"] == 1.5  # the upper cap
        for metric in ("loss", "reward", *sampling):
            assert mine[metric] == pytest.approx(other[metric], abs=1e-5, rel=1e-5), metric
        assert mine["grad_norm"] == pytest.approx(other["grad_norm"], rel=2e-4)


@pytest.mark.parametrize("given, text", {
    "too few": ([[-1.0]], "without exactly one number per token"),
    "texts": ([[-1.0, "a"]], "must be numbers or None, got"),
    "probabilities": ([[-1.0, 0.5]], "must be one number up to 0 per token"),
    "nested": ([[[-1.0], [-1.0]]], "must be one number up to 0 per token"),
}.values())  # fmt: skip
def test_reported_logps_are_checked(given, text):
    with pytest.raises(ValueError, match=text):
        call_rollout_func(
            lambda prompts: {"prompt_ids": [[3]], "completion_ids": [[5, 6]], "logprobs": given}, ["a"], 10
        )


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
