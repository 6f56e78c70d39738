"""Online training with a real SGLang server. Set SGLANG=1 to run these tests; see sglang_env.sh for the environment."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from pathlib import Path
from typing import ClassVar

import pytest

import trl_jax
from compat_tests.rollout.real_server import RealServerTests, SeeingTests, Server, run, started, steps
from compat_tests.rollout.stub_server import SglangStub

pytestmark = pytest.mark.skipif(not os.environ.get("SGLANG"), reason="runs under SGLANG=1")

VENV = Path(__file__).parents[2] / os.environ.get("SGLANG_VENV", ".venv-sglang")


class SglangServer(Server):
    starts_with = "sglang serve --model-path"
    repeatable: ClassVar[dict[str, int]] = {"top_k": 1}  # it ignores seeds on a CPU
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
    yield from started(SglangServer, tmp_path_factory)


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    yield from started(SglangServer, tmp_path_factory, vision=True)


class TestSglang(RealServerTests):
    pass


class TestSglangSeeing(SeeingTests):
    pass


def test_an_adapter_reaches_a_server_that_takes_it_alone(server, tmp_path):
    """The server's log-probabilities match the policy's. The base model is loaded once per run, the adapter once per
    step; the run whose adapter SGLang does not compute loads a merged model instead."""
    taking = SglangServer(server.folder, tmp_path / "sglang.log")
    options = "--enable-lora", "--max-lora-rank", "8", "--lora-target-modules", "all", "--lora-backend", "torch_native"
    taking.start(*options)
    try:
        for number, more in enumerate(
            ({"target_modules": "all-linear"}, {"target_modules": ["q_proj", "v_proj"]}, {"use_rslora": True})
        ):
            peft = trl_jax.LoraConfig(r=4, init_lora_weights="gaussian", **more)
            trainer = run(
                taking, tmp_path / str(number), "GRPO", {"peft_config": peft}, max_steps=3, learning_rate=1e-2
            )
            assert max(steps(trainer, "sampling/sampling_logp_difference/mean")) < 1e-5
        log = taking.log.read_text()
        assert log.count("POST /update_weights_from_disk") == 5 and log.count("POST /load_lora_adapter") == 6
    finally:
        taking.kill()


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


SAMPLING = {"max_new_tokens": 3, "temperature": 1.0, "stop_token_ids": [0], "ignore_eos": True}
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
