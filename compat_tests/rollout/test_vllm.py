"""Online training with a real vLLM server. Set VLLM=1 to run these tests; see vllm_env.sh for the environment."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from datasets import Dataset
from transformers import AutoConfig

import trl_jax
from compat_tests.parity.grpo_cases import length_reward, prompt_rows
from compat_tests.rollout import recorded
from compat_tests.rollout.real_server import CONFIG, PICTURES, RealServerTests, SeeingTests, Server, run, started, steps
from trl_jax.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
from trl_jax.rollout.server import data_url

pytestmark = pytest.mark.skipif(not os.environ.get("VLLM"), reason="runs under VLLM=1")

VENV = Path(__file__).parents[2] / os.environ.get("VLLM_VENV", ".venv-vllm")


GRPO_ONLY = ("pad_to_multiple_of", "use_vllm", "vllm_mode")


class VllmServer(Server):
    starts_with = "VLLM_SERVER_DEV_MODE=1 vllm serve"
    environment = {
        "VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
    }  # fmt: skip

    def command(self) -> list[str]:
        return [
            str(VENV / "bin" / "vllm"), "serve", str(self.folder), "--dtype", "float32", "--enforce-eager",
            "--logprobs-mode", "processed_logprobs", "--max-model-len", "256",
        ]  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    yield from started(VllmServer, tmp_path_factory)


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    yield from started(VllmServer, tmp_path_factory, "--enable-scale-out", vision=True)


class TestVllm(RealServerTests):
    pass


class TestVllmSeeing(SeeingTests):
    pass


def test_an_adapter_reaches_a_server_that_takes_it_alone(server, tmp_path):
    """The server's log-probabilities match the policy's, also with rsLoRA and a rank pattern. The base model is loaded
    once per run, the adapter once per step."""
    taking = VllmServer(server.folder, tmp_path / "vllm.log")
    taking.start("--enable-lora", "--max-lora-rank", "8", VLLM_ALLOW_RUNTIME_LORA_UPDATING="1")
    try:
        for number, more in enumerate(
            ({"target_modules": "all-linear"}, {"use_rslora": True, "rank_pattern": {"q_proj": 8}})
        ):
            peft = trl_jax.LoraConfig(r=4, init_lora_weights="gaussian", **more)
            trainer = run(
                taking, tmp_path / str(number), "GRPO", {"peft_config": peft}, max_steps=3, learning_rate=1e-2
            )
            assert max(steps(trainer, "sampling/sampling_logp_difference/mean")) < 1e-5
        log = taking.log.read_text()
        assert log.count("POST /collective_rpc") == 2 and log.count("POST /v1/load_lora_adapter") == 6
    finally:
        taking.kill()


def test_async_grpo(server, tmp_path):
    args = AsyncGRPOConfig(str(tmp_path), **{name: value for name, value in CONFIG.items() if name not in GRPO_ONLY},
                           vllm_server_base_url=server.url, max_steps=4)  # fmt: skip
    rows = Dataset.from_list(prompt_rows(8))
    trainer = AsyncGRPOTrainer(str(server.folder), length_reward, args, train_dataset=rows)
    trainer.train()
    assert len(steps(trainer, "loss")) == 4 and max(steps(trainer, "sample/staleness_mean")) == 1
    assert steps(trainer, "ratio")[0] == pytest.approx(1, abs=1e-5)  # the policy generated with the same weights


def test_a_rollout_func_gets_the_completions_of_the_server(server, tmp_path):
    def rollout(prompts, trainer):
        ids, images, fields = trainer._tokenize_prompts(prompts)
        completions, logprobs = trainer._generate_single_turn(ids, images, fields, trainer.num_generations)
        return {"prompt_ids": ids, "completion_ids": completions, "logprobs": logprobs}

    trainer = run(server, tmp_path, arguments={"rollout_func": rollout}, max_steps=3)
    apart = steps(trainer, "sampling/sampling_logp_difference/mean")
    assert len(apart) == 3 and max(apart) < 1e-5


def test_servers_reply_as_recorded(server, seeing, tmp_path):
    """With RECORD=1, their replies are written to the file."""
    taking = VllmServer(server.folder, tmp_path / "vllm.log")
    taking.start("--enable-lora", "--max-lora-rank", "8", VLLM_ALLOW_RUNTIME_LORA_UPDATING="1")
    try:
        adapter = recorded.adapter(str(server.folder), tmp_path / "adapter")
        found = {"text": recorded.replies(taking.url, server.folder, adapter)}
    finally:
        taking.kill()
    token = AutoConfig.from_pretrained(seeing.folder).image_token_id
    found["image"] = recorded.replies_about_an_image(seeing.url, seeing.folder, data_url(PICTURES[0]), token)
    if os.environ.get("RECORD"):
        recorded.FILE.write_text(json.dumps(found, indent=1) + "\n")
    known = json.loads(recorded.FILE.read_text())
    assert recorded.differences(known, found) == recorded.differences(found, known) == []
