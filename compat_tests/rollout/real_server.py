"""Runs and tests that real servers of every engine share; see test_vllm.py and test_sglang.py."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from datasets import Dataset

import trl_jax
from compat_tests import tiny
from compat_tests.parity.grpo_cases import length_reward, prompt_rows
from compat_tests.parity.reference import BASE
from trl_jax.rollout.server import ServerError

# vLLM's CPU kernels need a head_dim of at least 32.
FACTS = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "num_hidden_layers": 2}
CONFIG = BASE | {
    "learning_rate": 1e-3, "num_generations": 4, "max_completion_length": 16, "per_device_train_batch_size": 8,
    "pad_to_multiple_of": None, "use_vllm": True, "vllm_mode": "server", "vllm_server_timeout": 60.0,
}  # fmt: skip


class Server:
    """Runs a server of an engine on a model folder. Restarts use the same port."""

    environment: ClassVar[dict[str, str]] = {}
    starts_with: str  # how the command begins that errors propose

    def __init__(self, folder: Path, log: Path):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url, self.folder, self.log = f"http://127.0.0.1:{self.port}", folder, log
        self.process: subprocess.Popen | None = None

    def start(self, *options: str, **variables: str) -> None:
        environment = os.environ | self.environment | variables | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
        command = [*self.command(), "--port", str(self.port), *options]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        until = time.monotonic() + 300
        while True:
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{self.url}/health", timeout=1)
                return
            assert time.monotonic() < until, self.log.read_text()[-3000:]
            time.sleep(1)

    def command(self) -> list[str]:
        """The command that starts it, without the port."""
        raise NotImplementedError

    def kill(self) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, 9)
            self.process.wait()


def started(kind: type[Server], tmp_path_factory) -> Iterator[Server]:
    """A server of a new model, for the time of a fixture."""
    folder = tiny.tiny_model(tmp_path_factory.mktemp("model"), head="causal", **FACTS)
    made = kind(folder, tmp_path_factory.mktemp("log") / "server.log")
    made.start()
    yield made
    made.kill()


def run(server, out, kind="GRPO", arguments=None, **config):
    options = CONFIG | {"vllm_server_base_url": server.url} | config
    given = {"reward_funcs": length_reward}
    if kind == "Distillation":
        options.pop("num_generations")
        given = {}
    args = getattr(trl_jax, f"{kind}Config")(str(out), **options)
    trainer = getattr(trl_jax, f"{kind}Trainer")(
        str(server.folder), args=args, train_dataset=Dataset.from_list(prompt_rows(8)), **given | (arguments or {})
    )
    trainer.train()
    return trainer


def steps(trainer, name):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


class RealServerTests:
    """What holds for every engine. A subclass in a module with a fixture `server` runs these tests."""

    @pytest.mark.parametrize(
        "sampling", [{}, {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1}]
    )
    def test_sampler_and_policy_agree_after_20_pushes(self, sampling, server, tmp_path):
        trainer = run(server, tmp_path, max_steps=20, **sampling)
        apart = steps(trainer, "sampling/sampling_logp_difference/mean")
        assert len(apart) == 20
        if not sampling:  # filters only remove tokens from the sampler's distribution, not the policy's
            assert max(apart) < 1e-5
        assert all(np.isfinite(steps(trainer, "loss"))) and len(steps(trainer, "perf/weight_sync_s")) == 20

    @pytest.mark.parametrize("kind", ["GRPO", "RLOO", "Distillation"])
    def test_an_adapter_reaches_the_server_merged(self, kind, server, tmp_path):
        peft = trl_jax.LoraConfig(r=4, target_modules="all-linear", init_lora_weights="gaussian")
        arguments = {"peft_config": peft}
        if kind == "Distillation":
            arguments["teacher_model"] = str(server.folder)
        trainer = run(server, tmp_path, kind, arguments, max_steps=3, learning_rate=1e-2)
        assert len(steps(trainer, "loss")) == 3
        if kind == "GRPO":
            assert max(steps(trainer, "sampling/sampling_logp_difference/mean")) < 1e-5

    def test_a_server_generates_while_a_step_trains(self, server, tmp_path):
        trainer = run(server, tmp_path, max_steps=4, generate_ahead=True)
        assert max(steps(trainer, "sample/staleness_mean")) == 1

    def test_completions_match_a_pattern(self, server, tmp_path):
        seen = []

        def reward(completions, **columns):
            seen.extend(completions)
            return length_reward(completions)

        run(server, tmp_path, arguments={"reward_funcs": reward}, max_steps=1, vllm_structured_outputs_regex="(a|b)+")
        assert seen and all(set(text) <= {"a", "b"} for text in seen)

    def test_a_server_that_dies_ends_the_run_and_one_that_comes_back_gets_the_weights(self, server, tmp_path):
        def dies(completions, **columns):
            server.kill()
            return length_reward(completions)

        began = time.monotonic()
        with pytest.raises(ServerError, match=f"did not answer for 5 s .*Start it with: {server.starts_with}"):
            run(server, tmp_path, arguments={"reward_funcs": dies}, max_steps=3, vllm_server_timeout=5.0)
        assert time.monotonic() - began < 60
        server.start()

        def returns(completions, **columns):
            if not again:
                again.append(server.kill())
                server.start()
            return length_reward(completions)

        again = []
        trainer = run(server, tmp_path, arguments={"reward_funcs": returns}, max_steps=3)
        assert max(steps(trainer, "sampling/sampling_logp_difference/mean")) < 1e-5
