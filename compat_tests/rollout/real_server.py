"""Runs and tests that real servers of every engine share; see test_vllm.py and test_sglang.py."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import jax
import numpy as np
import pytest
import torch
from datasets import Dataset
from PIL import Image
from transformers import AutoModelForImageTextToText, GenerationConfig

import trl_jax
from compat_tests import tiny
from compat_tests.mesh.launching import launch
from compat_tests.mesh.served import called
from compat_tests.mesh.test_two_with_server import CONFIG as SERVED
from compat_tests.mesh.test_two_with_server import assert_same_logs
from compat_tests.mesh.tools import Shop, add, conversations, words
from compat_tests.parity.grpo_cases import length_reward, prompt_rows
from compat_tests.parity.reference import BASE
from compat_tests.trainer.test_tool_images import TEMPLATE
from compat_tests.trainer.vision_models import tiny_qwen
from trl_jax.rollout import tools
from trl_jax.rollout.server import ServerError

# vLLM's CPU kernels need a head_dim of at least 32.
FACTS = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "num_hidden_layers": 2}
ENDS = [1, *range(8, 512, 12)]  # every 12th token ends a completion, so that turns leave room for answers
CONFIG = BASE | {
    "learning_rate": 1e-3, "num_generations": 4, "max_completion_length": 16, "per_device_train_batch_size": 8,
    "pad_to_multiple_of": None, "use_vllm": True, "vllm_mode": "server", "vllm_server_timeout": 60.0,
}  # fmt: skip


class Server:
    """Runs a server of an engine on a model folder. Restarts use the same port."""

    environment: ClassVar[dict[str, str]] = {}
    starts_with: str  # how the command begins that errors propose
    repeatable: ClassVar[dict[str, Any]] = {}  # sampling arguments with which equal requests get equal tokens

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


def started(kind: type[Server], tmp_path_factory, *options: str, vision: bool = False) -> Iterator[Server]:
    """A server of a new model, for the time of a fixture."""
    folder = tmp_path_factory.mktemp("model")
    if vision:
        tiny_qwen(folder, width=64, heads=2, patch=14, sections=(4, 6, 6), scale=5.0)
        template = TEMPLATE.replace("<image>", "<|vision_start|><|image_pad|><|vision_end|>")
        (folder / "chat_template.jinja").write_text(template)
    else:
        tiny.tiny_model(folder, head="causal", **FACTS)
    GenerationConfig(eos_token_id=ENDS, pad_token_id=0).save_pretrained(folder)
    made = kind(folder, tmp_path_factory.mktemp("log") / "server.log")
    made.start(*options)
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


class Watched(trl_jax.GRPOTrainer):
    """Keeps the results of `_generate`."""

    def _generate(self, prompts):
        found = super()._generate(prompts)
        vars(self).setdefault("generations", []).append(found)
        return found


def logps_of(model, prompt: list[int], completion: list[int]) -> np.ndarray:
    """The policy's log-probabilities of a completion."""
    ids = np.asarray([*prompt, *completion], np.int32)
    logps = jax.nn.log_softmax(model(ids[None]).logits[0, len(prompt) - 1 : -1], axis=-1)
    return np.asarray(logps)[np.arange(len(completion)), completion]


def pictures_in(messages: list) -> list:
    parts = [part for message in messages for part in message["content"] if isinstance(message["content"], list)]
    return [part["image"] for part in parts if part["type"] == "image"]


def draw(number: int) -> list:
    """Draw a picture.

    Args:
        number: which one.
    """
    return [{"type": "image", "image": PICTURES[number]}, {"type": "text", "text": "Look."}]


class Gallery:
    """Shows a picture at the start, and others when asked."""

    def reset(self, number, **row):
        return [{"type": "image", "image": PICTURES[number]}, {"type": "text", "text": "Another?"}]

    def draw(self, number: int) -> list:
        """Draw a picture.

        Args:
            number: which one.
        """
        return draw(number)


# Their sides are multiples of 28 pixels, so that no image processor resizes them: those of the servers do it with
# torchvision, ours with Pillow.
PICTURES = [
    Image.fromarray(np.random.default_rng(number).integers(0, 255, (height, width, 3), dtype=np.uint8))
    for number, (height, width) in enumerate(((56, 84), (84, 56), (56, 56), (84, 84)))
]


class SeeingTests:
    """What holds for every engine and a model with a vision tower; see RealServerTests."""

    @pytest.mark.parametrize("given", ["images", "tools", "environments"])
    def test_a_server_sees_the_pictures_of_the_policy(self, given, seeing, tmp_path, monkeypatch):
        """Also after the vision tower has changed: the prompts of all steps have the same images."""
        monkeypatch.setattr(tools, "parsed_message", called)
        video = 515  # is never sampled either: SGLang refuses texts with this token
        options = {"max_completion_length": 120, "max_steps": 3, "max_tool_calling_iterations": 2, "save_steps": 1,
                   "save_strategy": "steps", "learning_rate": 1e-2, "shuffle_dataset": False,
                   "vllm_server_base_url": seeing.url}  # fmt: skip
        content = [{"type": "text", "text": "What is it?"}]
        if given != "environments":
            content = [{"type": "image"}, *content]
        rows = [
            {"prompt": [{"role": "user", "content": content}], "number": number}
            | ({"images": [PICTURES[number]]} if given != "environments" else {})
            for number in range(2)
        ]
        functions = {"images": {}, "tools": {"tools": [draw]}, "environments": {"environment_factory": Gallery}}[given]
        args = trl_jax.GRPOConfig(str(tmp_path), **CONFIG | options)
        trainer = Watched(
            str(seeing.folder), length_reward, args=args, train_dataset=Dataset.from_list(rows), **functions
        )
        trainer.train()
        if given != "images":
            assert min(steps(trainer, "tools/call_frequency")) > 0
        encoder, drawn = trainer._setup.encoder, []
        for step, generation in enumerate(trainer.generations):
            folder, apart = tmp_path / f"checkpoint-{step}" if step else seeing.folder, []
            policy = AutoModelForImageTextToText.from_pretrained(folder)
            ids, written, masks, texts, logps, *_ = generation
            masks = masks or [[1] * len(own) for own in written]  # None without answers
            of_each = zip(ids, written, masks, texts, logps, strict=True)
            for row, (prompt, completion, mask, messages, sampled) in enumerate(of_each):
                by_model = np.asarray(mask, bool)
                seen = [PICTURES[row // 4], *pictures_in(messages)]
                drawn.append(len(seen) - 1)
                exact = logps_with_images(policy, encoder, seen, prompt, completion, video)
                apart.append(np.abs(sampled - exact)[by_model])
            assert np.concatenate(apart).mean() < 1e-5, step
        assert len(trainer.generations) == 3 and (max(drawn) > 0) == (given != "images")


def logps_with_images(model, encoder, seen: list, prompt: list[int], completion: list[int], never: int) -> np.ndarray:
    """The log-probabilities of a completion by a model of torch that cannot write image tokens and another token."""
    ids = torch.tensor([[*prompt, *completion]])
    images = {name: torch.tensor(array) for name, array in encoder.arrays(seen).items()}
    with torch.no_grad():
        logits = model(input_ids=ids, mm_token_type_ids=(ids == encoder.image_token_id).int(), **images).logits[0]
    logits[:, [encoder.image_token_id, never]] -= 100
    logps = torch.log_softmax(logits[len(prompt) - 1 : -1], dim=-1).numpy()
    return logps[np.arange(len(completion)), completion]


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

    @pytest.mark.parametrize("given", [{"tools": [add]}, {"environment_factory": Shop}], ids=["tools", "environments"])
    def test_turns_continue_after_answers(self, given, server, tmp_path, monkeypatch):
        """The tokens of answers are masked, and all others have the policy's log-probabilities."""
        monkeypatch.setattr(tools, "parsed_message", called)
        options = {"max_completion_length": 120, "max_steps": 3, "max_tool_calling_iterations": 3}
        args = trl_jax.GRPOConfig(str(tmp_path), **CONFIG | options | {"vllm_server_base_url": server.url})
        rows, tokenizer = Dataset.from_list(conversations(8)), words()
        trainer = Watched(
            str(server.folder), length_reward, args=args, train_dataset=rows, processing_class=tokenizer, **given
        )
        trainer.train()
        assert min(steps(trainer, "tools/call_frequency")) > 0
        assert max(steps(trainer, "sampling/sampling_logp_difference/mean")) < 1e-5
        policy, apart, turns = trl_jax.AutoModelForCausalLM.from_pretrained(str(server.folder)), [], []
        for prompt, completion, mask, messages, sampled in zip(*trainer.generations[0][:5], strict=True):
            by_model = np.asarray(mask, bool)
            assert np.isnan(np.asarray(sampled)[~by_model]).all()
            apart.append(np.abs(sampled - logps_of(policy, prompt, completion))[by_model])
            answers = [message["content"] for message in messages if message["role"] == "tool"]
            wanted = (f"\n<|im_start|>tool\n{answer}<|im_end|>\n<|im_start|>assistant\n" for answer in answers)
            assert tokenizer.decode(np.asarray(completion)[~by_model]) == "".join(wanted)
            turns.append(len(answers))
        assert np.concatenate(apart).mean() < 1e-5 and len(set(turns)) > 1

    def test_processes_and_servers_share_the_same_rows(self, server, tmp_path):
        """Two processes with one server, and one process with two servers, train as one process with one server."""
        other, found = type(server)(server.folder, tmp_path / "server.log"), {}
        other.start()
        runs = {"1": (1, server.url), "2": (2, server.url), "servers": (1, f"{server.url},{other.url}")}
        try:
            for name, (count, urls) in runs.items():
                config = SERVED | {
                    "kind": "called", "num_generations": 2, "max_completion_length": 120, "shuffle_dataset": False,
                    "max_tool_calling_iterations": 3, "per_device_train_batch_size": 8 // count,
                    "mesh_shape": f"data:{count}", "vllm_server_base_url": urls,
                } | server.repeatable  # fmt: skip
                ended = launch("ours", server.folder, tmp_path / name, config=[config] * count)
                assert all(code == 0 for code, _ in ended), "\n".join(text[-3000:] for _, text in ended)
                own = [json.loads((tmp_path / name / f"ours.{number}.json").read_text()) for number in range(count)]
                found[name] = own[0] if count == 1 else [
                    row for start in (0, 4) for rows in own for row in rows[start : start + 4]
                ]  # fmt: skip
        finally:
            other.kill()
        assert len(found["1"]) == 16 and any(len(messages) > 1 for _, messages, _ in found["1"])
        assert found["1"] == found["2"] == found["servers"]
        assert_same_logs(tmp_path, "")

    def test_completions_match_a_pattern(self, server, tmp_path):
        seen = []

        def reward(completions, completion_ids, **columns):
            seen.extend(ids[:-1] if ids[-1] in ENDS else ids for ids in map(list, completion_ids))
            return length_reward(completions)

        run(server, tmp_path, arguments={"reward_funcs": reward}, max_steps=1, vllm_structured_outputs_regex="(a|b)+")
        texts = words().batch_decode(seen)
        assert texts and all(set(text) <= {"a", "b"} for text in texts)

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
