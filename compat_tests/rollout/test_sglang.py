"""Online training with a real SGLang server. Set SGLANG=1 to run these tests; see sglang_env.sh for the environment."""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest

import trl_jax
from compat_tests import tiny
from compat_tests.parity.grpo_cases import length_reward
from compat_tests.rollout.stub_server import SglangStub
from compat_tests.rollout.test_vllm import FACTS, Server, run, steps
from trl_jax.rollout.server import ServerError

pytestmark = pytest.mark.skipif(not os.environ.get("SGLANG"), reason="runs under SGLANG=1")

VENV = Path(__file__).parents[2] / os.environ.get("SGLANG_VENV", ".venv-sglang")


class SglangServer(Server):
    """Runs `sglang serve` on a model folder. Restarts use the same port."""

    environment = {"SGLANG_USE_CPU_ENGINE": "1", "CUDA_VISIBLE_DEVICES": ""}

    def command(self) -> list[str]:
        return [
            str(VENV / "bin" / "sglang"), "serve", "--model-path", str(self.folder), "--dtype", "float32",
            "--device", "cpu", "--attention-backend", "torch_native", "--disable-overlap-schedule",
            "--cuda-graph-backend-decode=disabled", "--cuda-graph-backend-prefill=disabled", "--skip-server-warmup",
            "--max-total-tokens", "8192", "--context-length", "256",
        ]  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tiny.tiny_model(tmp_path_factory.mktemp("model"), head="causal", **FACTS)
    made = SglangServer(folder, tmp_path_factory.mktemp("log") / "sglang.log")
    made.start()
    yield made
    made.kill()


def reply(url: str, path: str, body: dict | None):
    """Send a request; returns the status and the parsed JSON."""
    data = None if body is None else json.dumps(body).encode()
    asked = urllib.request.Request(url + path, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(asked, timeout=60) as found:
            return found.status, json.load(found)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def form(found):
    """The structure of a reply: keys and types. Lists are represented by their first element, and ints as floats."""
    if isinstance(found, dict):
        return {name: form(value) for name, value in found.items()}
    if isinstance(found, list):
        return [form(found[0])] if found else []
    return float if isinstance(found, int) and not isinstance(found, bool) else type(found)


def within(mine, real) -> bool:
    """Whether `real` has everything in the form `mine`, with the same types."""
    if isinstance(mine, dict):
        return isinstance(real, dict) and all(name in real and within(mine[name], real[name]) for name in mine)
    if isinstance(mine, list):
        return isinstance(real, list) and all(within(*pair) for pair in zip(mine, real, strict=True))
    return mine is real


SAMPLING = {"max_new_tokens": 3, "temperature": 1.0, "stop_token_ids": [0]}
REQUESTS = [
    ("/v1/models", None), ("/server_info", None), ("/model_info", None),
    ("/generate", {"input_ids": [[5, 6]] * 2, "sampling_params": [SAMPLING] * 2, "return_logprob": True}),
    ("/generate", {"input_ids": [[5, 6]], "sampling_params": [SAMPLING | {"top_k": 3, "top_p": 0.9}],
                   "return_logprob": True, "return_sampling_mask": True}),
    ("/generate", {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 0}, "return_logprob": True,
                   "logprob_start_len": 0}),
    ("/generate", {"input_ids": [[0]], "sampling_params": [{"max_new_tokens": 1}], "return_logprob": True,
                   "top_logprobs_num": 1, "token_ids_logprob": [7]}),
    ("/generate", {"input_ids": [[0]], "sampling_params": [{"max_new_tokens": 1}], "return_logprob": True,
                   "token_ids_logprob": [70000]}),
    ("/generate", {"input_ids": [[0]], "sampling_params": [{"max_new_tokens": 1, "nonsense": 1}]}),
    ("/generate", {"input_ids": [[0]], "sampling_params": [{"max_new_tokens": 1, "top_k": 0}]}),
    ("/generate", {"input_ids": [[0] * 10], "sampling_params": [{"max_new_tokens": 250}]}),
]  # fmt: skip


def test_the_stub_replies_as_the_server(server):
    stub = SglangStub(server.folder, max_model_len=256)
    try:
        for path, body in REQUESTS:
            (status, mine), (wanted, real) = reply(stub.url, path, body), reply(server.url, path, body)
            assert status == wanted and within(form(mine), form(real)), (path, body, mine, real)
        for asked in REQUESTS[5][1], REQUESTS[4][1]:
            mine, real = (reply(url, "/generate", asked)[1] for url in (stub.url, server.url))
            if isinstance(mine, dict):  # log-probabilities of a text
                scores = [[value for value, *_ in one["meta_info"]["input_token_logprobs"][1:]] for one in (mine, real)]
                assert scores[0] == pytest.approx(scores[1], abs=1e-5)
            else:  # the tokens that pass the filters
                masks = [one[0]["meta_info"]["output_token_sampling_mask"][0] for one in (mine, real)]
                assert set(masks[0]) == set(masks[1])
    finally:
        stub.stop()


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1}])
def test_sampler_and_policy_agree_after_20_pushes(sampling, server, tmp_path):
    trainer = run(server, tmp_path, max_steps=20, **sampling)
    apart = steps(trainer, "sampling/sampling_logp_difference/mean")
    assert len(apart) == 20
    if not sampling:  # filters only remove tokens from the sampler's distribution, not the policy's
        assert max(apart) < 1e-5
    assert all(np.isfinite(steps(trainer, "loss"))) and len(steps(trainer, "perf/weight_sync_s")) == 20


@pytest.mark.parametrize("kind", ["GRPO", "RLOO", "Distillation"])
def test_an_adapter_reaches_the_server_merged(kind, server, tmp_path):
    peft = trl_jax.LoraConfig(r=4, target_modules="all-linear", init_lora_weights="gaussian")
    arguments = {"peft_config": peft}
    if kind == "Distillation":
        arguments["teacher_model"] = str(server.folder)
    trainer = run(server, tmp_path, kind, arguments, max_steps=3, learning_rate=1e-2)
    assert len(steps(trainer, "loss")) == 3
    if kind == "GRPO":
        assert max(steps(trainer, "sampling/sampling_logp_difference/mean")) < 1e-5


def test_a_server_generates_while_a_step_trains(server, tmp_path):
    trainer = run(server, tmp_path, max_steps=4, generate_ahead=True)
    assert max(steps(trainer, "sample/staleness_mean")) == 1


def test_completions_match_a_pattern(server, tmp_path):
    seen = []

    def reward(completions, **columns):
        seen.extend(completions)
        return length_reward(completions)

    run(server, tmp_path, arguments={"reward_funcs": reward}, max_steps=1, vllm_structured_outputs_regex="(a|b)+")
    assert seen and all(set(text) <= {"a", "b"} for text in seen)


def test_a_server_that_dies_ends_the_run_and_one_that_comes_back_gets_the_weights(server, tmp_path):
    def dies(completions, **columns):
        server.kill()
        return length_reward(completions)

    began = time.monotonic()
    with pytest.raises(ServerError, match=r"did not answer for 5 s .*Start it with: sglang serve --model-path"):
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
