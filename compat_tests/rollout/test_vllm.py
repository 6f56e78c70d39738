"""Online training with a real vLLM server. Set VLLM=1 to run these tests; see vllm_env.sh for the environment."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import trl_jax
from compat_tests.rollout.real_server import RealServerTests, SeeingTests, Server, run, started, steps

pytestmark = pytest.mark.skipif(not os.environ.get("VLLM"), reason="runs under VLLM=1")

VENV = Path(__file__).parents[2] / os.environ.get("VLLM_VENV", ".venv-vllm")


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
