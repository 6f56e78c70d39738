"""Online training with stub servers that speak vLLM's and SGLang's protocols."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from threading import Semaphore, Timer

import numpy as np
import pytest
import trl
from datasets import Dataset

import trl_jax
from compat_tests.effort import only_thorough, thorough, usual
from compat_tests.parity.dpo_cases import CHAT, SMALL
from compat_tests.parity.grpo_cases import length_reward, prompt_rows
from compat_tests.parity.reference import BASE
from compat_tests.rollout.stub_server import SglangStub, StubServer
from trl_jax.rollout.server import Limits, Requirements, SamplingOptions, ServerError, is_local, server_urls
from trl_jax.rollout.sglang import Sglang
from trl_jax.rollout.vllm import Vllm
from trl_jax.training.server import WeightFolders, connect

CONFIG = {
    "max_steps": 2, "learning_rate": 3e-3, "num_generations": 4, "max_completion_length": 6, "pad_to_multiple_of": None,
    "per_device_train_batch_size": 8, "shuffle_dataset": False,
}  # fmt: skip


SAMPLED = {
    "max_tokens": 4, "temperature": 0.7, "top_p": None, "top_k": None, "min_p": None, "repetition_penalty": None,
    "eos_token_ids": [0], "regex": None, "suppressed_ids": (), "generation_kwargs": {},
}  # fmt: skip


@pytest.fixture
def folder(checkpoint):
    return checkpoint(**SMALL)


@pytest.fixture
def serve(folder):
    """Starts stub servers of the model and stops them after the test."""
    made = []

    def start(kind=StubServer, **options):
        made.append(kind(folder, **options))
        return made[-1]

    yield start
    for stub in made:
        stub.stop()


@pytest.fixture
def make(folder, tmp_path):
    def made(stubs, rewards=length_reward, kind="GRPO", arguments=None, **config):
        if stubs:
            urls = ",".join(stub.url for stub in stubs)
            config = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": urls,
                      "vllm_weights_dir": str(tmp_path / "weights")} | config  # fmt: skip
        options = BASE | CONFIG | config
        if kind == "Distillation":
            del options["num_generations"]
        args = getattr(trl_jax, f"{kind}Config")(**{"output_dir": str(tmp_path / "out")} | options)
        rows = Dataset.from_list(prompt_rows(8))
        given = {} if rewards is None else {"reward_funcs": rewards}
        return getattr(trl_jax, f"{kind}Trainer")(
            str(folder), args=args, train_dataset=rows, **given, **(arguments or {})
        )

    return made


def recorder(seen):
    def reward(completions, completion_ids, **columns):
        seen.append([list(map(int, ids)) for ids in completion_ids])
        return length_reward(completions)

    return reward


def test_replayed_completions_train_as_those_of_this_process(serve, make, tmp_path):
    """GRPO and RLOO get the same losses and gradients as with local generation. The servers load the weights once per
    generation, and the last two versions stay on disk."""
    for kind, more in (("GRPO", {"num_iterations": 2, "max_steps": 6}), ("RLOO", {"beta": 0.0, "max_steps": 3})):
        seen = []
        own = make([], recorder(seen), kind, **more)
        own.train()
        stubs = [serve(), serve()]
        queue = [ids for generation in seen for ids in generation]

        def replay(prompt, n, queue=queue, texts=own.train_dataset["prompt"], words=own.processing_class):
            place = [words(text)["input_ids"] for text in texts].index(prompt)
            return queue[4 * place : 4 * place + n]

        for stub in stubs:
            stub.replay = replay
        server = make(stubs, recorder(again := []), kind, vllm_weights_dir=str(tmp_path / kind), **more)
        server.train()
        assert again == seen
        for mine, other in zip(server.state.log_history[:-1], own.state.log_history[:-1], strict=True):
            names = [name for name in mine if not name.startswith(("sampling/", "perf/"))]
            assert names == list(other) and "loss" in names
            for name in names[: names.index("step_time")]:
                exact = 5e-6 if kind == "RLOO" else 1e-6  # it sums log-probabilities over completions: -35 +- 4e-6
                assert mine[name] == pytest.approx(other[name], abs=exact, rel=1e-5), (kind, name)
            assert (kind == "GRPO" and "reward" in mine) == ("sampling/sampling_logp_difference/max" in mine)
            if "sampling/sampling_logp_difference/max" in mine:
                assert mine["sampling/importance_sampling_ratio/mean"] == pytest.approx(1, abs=1e-5)
                assert mine["sampling/sampling_logp_difference/max"] < 1e-5
        for stub in stubs:
            assert stub.loads == len(seen) == 3 and not stub.paused
            names = [path for path, _ in stub.seen if path not in ("/v1/completions", "/weight_info")]
            cycle = ["/pause", "/collective_rpc", "/reset_prefix_cache", "/update_weight_version", "/resume"]
            assert names == ["/v1/models", "/server_info", "/resume", *3 * cycle]
        (run,) = (tmp_path / kind).iterdir()
        assert sorted(path.name for path in run.iterdir()) == ["000002", "000003"]
        asked = [body for path, body in stubs[0].seen if "stop_token_ids" in (body or {})]
        assert len(asked) == 3 and {body["n"] for body in asked} == {4}
        assert len({body["seed"] for body in asked}) == 3


def test_completions_do_not_depend_on_the_number_of_servers(serve, make):
    """Nor on a server that loses the weights during a generation, by a restart or because another run loads its own."""
    runs = {}
    for name in ("one", "two", "restarted"):
        stubs, seen = [serve() for _ in range(1 + (name == "two"))], []
        if name == "restarted":

            def lose(path, stub=stubs[0]):
                if reached(stub, "completing", path) and stub.version.endswith("/2"):
                    stub.version = "default"

            stubs[0].before = lose
        trainer = make(stubs, recorder(seen), top_k=50, top_p=0.9)
        trainer.train()
        runs[name] = seen
        assert stubs[0].loads == 2 + (name == "restarted")
        assert trainer.state.log_history[0]["sampling/sampling_logp_difference/mean"] < 1e-4
    assert runs["one"] == runs["two"] == runs["restarted"]
    assert runs["one"][0] != runs["one"][1] and len({tuple(ids) for ids in runs["one"][0]}) > 4


@only_thorough
def test_a_resumed_run_goes_on_with_the_same_completions(serve, make, tmp_path):
    """The checkpoint is between two iterations on one generation and has its log-probabilities. The new server gets the
    weights for the next one."""
    config = {"num_iterations": 2, "max_steps": 4, "save_strategy": "steps", "save_steps": 1}
    whole = make([serve()], recorder(seen := []), **config)
    whole.train()
    stub = serve()
    resumed = make([stub], recorder(again := []), **config)
    resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-1"))
    assert again == seen[1:] and stub.loads == 1
    logs = [[log["loss"] for log in run.state.log_history if "loss" in log] for run in (whole, resumed)]
    assert logs[0] == logs[1] and len(logs[0]) == 4


def test_servers_generate_ahead(serve, make, tmp_path):
    """They generate with the previous weights while a step trains, and nothing that is not trained on. The checkpoint
    contains the completions generated ahead."""
    config = {"generate_ahead": True, "max_steps": 6, "save_strategy": "steps", "save_steps": 1, "logging_steps": 1}
    stub, seen, asked = serve(), [], Semaphore(0)
    stub.before = lambda path: path == "/v1/completions" and asked.release()

    def reward(completions, completion_ids, **columns):
        seen.append([list(map(int, ids)) for ids in completion_ids])
        if len(seen) != 6:  # the run's last generation
            # The two prompts of the next generation are requested before this generation's rewards are computed.
            assert asked.acquire(timeout=30) and asked.acquire(timeout=30)
        return length_reward(completions)

    def requests(stub):
        return [body for path, body in stub.seen if "stop_token_ids" in (body or {})]

    whole = make([stub], reward, **config)
    whole.train()
    logs = [log for log in whole.state.log_history if "loss" in log]
    assert len(requests(stub)) == 12 and len(seen) == 6
    assert [log["sample/staleness_mean"] for log in logs] == [0, 1, 1, 1, 1, 1]
    assert all(log[f"perf/{name}_s"] >= 0 for log in logs for name in ("generation", "weight_sync", "rollout_wait"))
    apart = [log["sampling/sampling_logp_difference/mean"] for log in logs]
    assert all((value < 1e-5) == (number == 0) for number, value in enumerate(apart)), apart
    for begun, after in ((2, 2), (4, 4)):  # mid-epoch, and at the end of an epoch
        other = serve()
        resumed = make([other], recorder(again := []), **config)
        resumed.train(resume_from_checkpoint=str(tmp_path / "out" / f"checkpoint-{begun}"))
        assert again == seen[after:]
        losses = [log["loss"] for log in resumed.state.log_history if "loss" in log]
        assert losses == [log["loss"] for log in logs]
        assert len(requests(other)) == 12 - 2 * after - 2


def test_a_server_that_dies_while_it_generates_ahead_ends_the_run(serve, make):
    stub = serve()

    def reward(completions, **columns):
        stub.stop()
        return length_reward(completions)

    # Not shorter, because the stub runs in this process and does not answer while its first generation compiles.
    trainer = make([stub], reward, generate_ahead=True, vllm_server_timeout=2.5)
    with pytest.raises(ServerError, match=r"did not answer for 2\.5 s"):
        trainer.train()
    assert trainer.state.global_step == 1


def test_adapters_are_merged_and_distillation_completes(serve, make, folder):
    stub, other = serve(), serve()
    lora = {"peft_config": trl_jax.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])}
    trainer = make([stub], arguments=lora)
    trainer.train()
    assert stub.loads == 2
    for name, array in trainer.model.merge_and_unload().params.items():
        assert array.shape == stub.model.params[name].shape
    assert trainer.state.log_history[1]["sampling/sampling_logp_difference/max"] < 1e-5
    student = make([other], None, "Distillation", {"teacher_model": str(folder)})
    student.train()
    assert other.loads == 2 and student.state.log_history[0]["completions/mean_length"] > 0


@only_thorough
def test_servers_that_take_adapters_get_the_adapter_alone(serve, make):
    """Training gives the same losses as with merged weights. A restarted server gets the base model and the adapter."""
    runs, stubs = [], [serve(), serve(max_lora_rank=8)]
    for stub in stubs:
        lora = {"peft_config": trl_jax.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])}
        runs.append(make([stub], arguments=lora, max_steps=3, temperature=0.7))
        runs[-1].train()
    whole, alone = ([log["loss"] for log in run.state.log_history if "loss" in log] for run in runs)
    assert alone == pytest.approx(whole, abs=1e-6) and len(alone) == 3
    loads = [path for path, _ in stubs[1].seen if "load" in path or path == "/collective_rpc"]
    unload, load = "/v1/unload_lora_adapter", "/v1/load_lora_adapter"
    assert loads == ["/collective_rpc", load, load, unload, load, unload] and len(stubs[1].adapters) == 1
    assert runs[1].state.log_history[2]["sampling/sampling_logp_difference/max"] < 1e-5

    asked = iter((False, True, *[False] * 8))  # the first request scores a text

    def forget(path):
        if path == "/v1/completions" and stubs[1].loads == 5 and next(asked):
            stubs[1].version = "default"
            stubs[1].adapters.clear()

    stubs[1].before, stubs[1].seen, stubs[1].loads = forget, [], 3
    lora = {"peft_config": trl_jax.LoraConfig(r=4, target_modules="all-linear")}
    make([stubs[1]], arguments=lora, max_steps=1).train()
    assert [path for path, _ in stubs[1].seen if path in (load, "/collective_rpc")] == ["/collective_rpc", load] * 2

    with pytest.raises(ServerError, match="has --max-lora-rank 8, and the adapter that is trained 16. Start it with:.*"
                       "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 .* --enable-lora --max-lora-rank 16"):  # fmt: skip
        make([stubs[1]], arguments={"peft_config": trl_jax.LoraConfig(r=16)})
    stubs[1].missing.add(load)
    with pytest.raises(ServerError, match="could not load the adapter in .* lacks VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"):
        make([stubs[1]], arguments=lora).train()
    dora = {"peft_config": trl_jax.LoraConfig(r=4, use_dora=True)}
    make([stubs[1]], arguments=dora, max_steps=1).train()  # merged: vLLM does not support DoRA


@pytest.mark.parametrize("kind", [StubServer, SglangStub])
def test_a_request_whose_reply_is_lost_runs_again(kind, serve, make):
    """The adapter is already loaded then, or already unloaded."""
    stub = serve(kind, max_lora_rank=8)
    paths = {StubServer: ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
             SglangStub: ("/load_lora_adapter", "/unload_lora_adapter")}[kind]  # fmt: skip
    stub.lost = set(paths)
    lora = {"peft_config": trl_jax.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])}
    trainer = make([stub], arguments=lora, max_steps=2)
    trainer.train()
    assert trainer.state.log_history[1]["sampling/sampling_logp_difference/max"] < 1e-5
    asked = [path for path, _ in stub.seen if path in paths]
    assert asked == [paths[0]] * 3 + [paths[1]] * 2 and not stub.lost and len(stub.adapters) == 1


@pytest.mark.parametrize("kind", [StubServer, SglangStub])
def test_a_refusal_that_is_not_json_is_an_error_of_the_server(kind, serve, folder):
    """As of a proxy."""
    stub = serve(kind, max_lora_rank=8)
    needs = Requirements(str(folder), stub.model.vocab_size, 16, True, adapter_rank=4, fused_adapter=True)
    servers = connect([stub.url], needs, Limits(30.0))
    stub.page = "<html>Bad Request</html>"
    with pytest.raises(
        ServerError, match=r"could not load the adapter in /nowhere \(400\): '<html>Bad Request</html>'"
    ):
        servers.load_adapter("/nowhere", "1")


@pytest.fixture
def turns():
    """A rollout_func that calls `trainer._generate_single_turn`, and a list of the (completion ids, logps) it got."""

    class Turns(list):
        def __call__(self, prompts, trainer):
            ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
            rewarded = isinstance(trainer, trl_jax.GRPOTrainer)
            found = trainer._generate_single_turn(ids, None, {}, *([4] if rewarded else []))
            self.append(found if rewarded else (found, None))
            return {"prompt_ids": ids, "completion_ids": self[-1][0], "logprobs": self[-1][1]}

    return Turns()


def test_a_rollout_func_has_turns_generated(serve, make, turns):
    """The run equals one without a rollout_func, with local generation and with a server."""
    plain = make([], recorder(seen := []), max_steps=1)
    plain.train()
    trainer = make([], recorder(again := []), arguments={"rollout_func": turns}, max_steps=1)
    trainer.train()
    assert again == seen and turns == [(seen[0], None)]
    assert trainer.state.log_history[0]["loss"] == plain.state.log_history[0]["loss"]
    with pytest.raises(ValueError, match="_generate_single_turn completes texts, and this run has images"):
        trainer._generate_single_turn([[1]], [["image"]], {}, 1)
    with pytest.raises(AttributeError, match="no attribute 'vllm_client'. Call trainer._generate_single_turn"):
        trainer.vllm_client  # noqa: B018
    assert not hasattr(trainer, "vllm_generation")
    stub = serve()
    texts = [plain.processing_class(text)["input_ids"] for text in plain.train_dataset["prompt"]]
    stub.replay = lambda ids, n: seen[0][4 * texts.index(ids) :][:n]
    trainer = make([stub], recorder(again := []), arguments={"rollout_func": turns}, max_steps=1)
    trainer.train()
    assert again == seen and stub.loads == 1
    log = trainer.state.log_history[0]
    assert log["loss"] == pytest.approx(plain.state.log_history[0]["loss"], abs=1e-6)
    assert 0 < log["sampling/sampling_logp_difference/max"] < 1e-5


@only_thorough
def test_a_rollout_func_of_rloo_and_distillation(make, folder, turns):
    for kind, more in (("RLOO", {}), ("Distillation", {"teacher_model": str(folder)})):
        rewards = None if kind == "Distillation" else length_reward
        plain = make([], rewards, kind, more, max_steps=1)
        trainer = make([], rewards, kind, more | {"rollout_func": turns}, max_steps=1)
        plain.train(), trainer.train()
        assert trainer.state.log_history[0]["loss"] == plain.state.log_history[0]["loss"]
    assert len(turns) == 2
    with pytest.raises(ValueError, match="^tools= together with a rollout_func"):
        make([], None, "Distillation", more | {"rollout_func": turns, "tools": [len]})


@only_thorough
def test_replayed_completions_distill_as_those_of_this_process(serve, make, checkpoint, turns):
    teacher = {"teacher_model": str(checkpoint(**SMALL | {"num_hidden_layers": 2}))}
    own = make([], None, "Distillation", teacher | {"rollout_func": turns}, max_steps=3, logging_steps=1)
    own.train()
    stub, seen = serve(), [completions for completions, _ in turns]
    texts = [own.processing_class(text)["input_ids"] for text in own.train_dataset["prompt"]]
    stub.replay = lambda ids, n: [seen[stub.loads - 1][texts.index(ids)]]
    server = make([stub], None, "Distillation", teacher, max_steps=3, logging_steps=1)
    server.train()
    losses = [[log["loss"] for log in run.state.log_history if "loss" in log] for run in (own, server)]
    assert losses[1] == pytest.approx(losses[0], abs=1e-6) and len(losses[0]) == 3 and min(losses[0]) > 1e-3
    assert stub.loads == 3 and len({str(completions) for completions in seen}) == 3


SCRIPT = """
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

args = GRPOConfig({out!r}, use_vllm=True, vllm_mode="server", vllm_server_port={port}, max_steps=2, num_generations=4,
                  per_device_train_batch_size=8, max_completion_length=6, use_cpu=True, bf16=False, report_to="none",
                  generation_kwargs={{"min_tokens": 2}}, log_completions=True, logging_steps=1)
rows = Dataset.from_list([{{"prompt": f"What is {{n}} and {{n}}?"}} for n in range(8)])

def reward(completions, **columns):
    return list(map(len, completions))

GRPOTrainer({model!r}, reward, args=args, train_dataset=rows).train()
"""


def ran(*command):
    """The process of a command that ended well, and its output."""
    command = [sys.executable, "-m", "trl_jax", *map(str, command)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    said, _ = process.communicate(timeout=240)
    assert process.returncode == 0, said
    assert "own generator" not in said
    return process, said


@only_thorough
def test_a_script_in_the_manner_of_trl_runs_unmodified(serve, folder, tmp_path):
    stub, script = serve(), tmp_path / "script.py"
    script.write_text(SCRIPT.format(out=str(tmp_path / "out"), port=stub.port, model=str(folder)))
    process, said = ran(script)
    assert "sampling/importance_sampling_ratio/mean" in said
    assert stub.loads == 2 and [body["min_tokens"] for _, body in stub.seen if body and "seed" in body] == [2] * 4
    (loaded, *_) = {body["kwargs"]["weights_path"] for path, body in stub.seen if path == "/collective_rpc"}
    assert f"trl_jax-weights-{process.pid}-" in loaded and not Path(loaded).parent.exists()
    assert not os.access("/dev/shm", os.W_OK) or Path(loaded).parents[1] == Path("/dev/shm")


@pytest.mark.parametrize("name", ["grpo", thorough("rloo")])
def test_scripts_of_trl_run_unmodified(name, checkpoint, tmp_path):
    folder, script = checkpoint(**CHAT), Path(trl.__file__).parent / "scripts" / f"{name}.py"
    rows = tmp_path / "rows"
    rows.mkdir()
    prompts = ([{"role": "user", "content": f"What is {number} and {number}?"}] for number in range(8))
    lines = (json.dumps({"prompt": prompt}) + "\n" for prompt in prompts)
    (rows / "train.jsonl").write_text("".join(lines))
    options = {
        "model_name_or_path": folder, "dataset_name": rows, "reward_funcs": "think_format_reward", "use_vllm": True,
        "vllm_mode": "server", "max_steps": 2, "num_generations": 4, "per_device_train_batch_size": 8,
        "max_completion_length": 6, "output_dir": tmp_path / "out", "use_cpu": True, "bf16": False,
        "report_to": "none", "logging_steps": 1, "save_strategy": "no",
    }  # fmt: skip
    stub = StubServer(folder, max_model_len=2048)
    try:
        _, said = ran(script, "--vllm_server_port", stub.port, *(
            word for option, value in options.items() for word in (f"--{option}", value)
        ))  # fmt: skip
    finally:
        stub.stop()
    assert stub.loads == 2 and said.count("rewards/think_format_reward/mean") == 2
    asked = [body for path, body in stub.seen if "seed" in (body or {})]
    assert len(asked) == 4 and {body["n"] for body in asked} == {4} and len({body["seed"] for body in asked}) == 4


# Servers that cannot be used


REFUSED = {
    "no development mode": ({"missing": {"/server_info"}}, r"has no /server_info, .*VLLM_SERVER_DEV_MODE=1"),
    "an older vLLM": ({"missing": {"/weight_info"}}, r"has no /weight_info, which vLLM 0\.32 and later"),
    "raw log-probabilities": ({"logprobs_mode": "raw_logprobs"}, "runs with --logprobs-mode raw_logprobs, whose"),
    "too short": ({"max_model_len": 6}, r"has --max-model-len 6, but .* 7 tokens.*--max-model-len 7"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_servers_that_do_not_fit_are_refused_with_the_command(name, serve, make, folder):
    options, text = dict(REFUSED[name][0]), REFUSED[name][1]
    missing = options.pop("missing", set())
    stub = serve(**options)
    stub.missing = missing
    command = rf"Start it with: VLLM_SERVER_DEV_MODE=1 vllm serve {folder} --port {stub.port} --logprobs-mode processed"
    with pytest.raises(ServerError, match=f"(?s){text}") as error:
        make([stub])
    assert re.search(command, str(error.value))
    if name == "raw log-probabilities":  # RLOO does not use them
        make([stub], kind="RLOO")


def test_another_model_is_refused(serve, make, folder):
    stub = serve()
    stub.model = stub.model.with_params(stub.model.params)
    stub.model.backend = stub.model.backend.resized(50)
    with pytest.raises(ServerError, match="does not take the token id .*out of vocabulary"):
        make([stub])
    stub = serve()
    trainer = make([stub])
    stub._load = lambda folder: None
    stub.model.params = {name: 1.5 * array for name, array in stub.model.params.items()}
    with pytest.raises(ServerError, match="loaded the weights, but its log-probabilities .* nats per token from"):
        trainer.train()


@pytest.mark.parametrize("since", [1, 3])
def test_a_server_that_ignores_weights_is_refused(serve, make, since):
    """It reports each version as loaded."""
    stub = serve()
    load = stub._load
    stub._load = lambda folder: load(folder) if stub.loads + 1 < since else None
    trainer = make([stub], learning_rate=1e-4, max_steps=8)
    with pytest.raises(ServerError, match="says that it loaded the weights, but .* do not follow the policy's: "):
        trainer.train()
    assert since <= trainer.state.global_step <= since + 2 and stub.loads == trainer.state.global_step + 1


@pytest.mark.parametrize("rounding", [thorough("bfloat16"), "noise", "still"])
def test_servers_that_round_are_not_refused(serve, make, rounding, caplog):
    """As in 16-bit types, with quantized weights, and with steps that are smaller than the rounding errors."""
    stub, noise = serve(), np.random.default_rng(0)
    scores = stub._scores

    def rounded(*given, **more):
        found = scores(*given, **more)
        return found + noise.normal(0, {"noise": 0.05, "still": 1e-5, "bfloat16": 0}[rounding], len(found))

    def load(folder):
        stub.model = trl_jax.AutoModelForCausalLM.from_pretrained(str(folder))
        if rounding == "bfloat16":
            stub.model.params = {
                name: array.astype("bfloat16").astype("float32") for name, array in stub.model.params.items()
            }

    stub._scores, stub._load = rounded, load
    trainer = make([stub], learning_rate=1e-9 if rounding == "still" else 3e-3, max_steps=4)
    trainer.train()
    assert trainer.state.global_step == 4 and stub.loads == 4  # test_a_server_that_ignores_weights ends by then
    assert "Before the first weights are loaded" not in caplog.text


def test_a_server_with_another_model_is_named_before_the_first_load(serve, make, caplog):
    stub = serve()
    stub.model.params = {name: 3 * array for name, array in stub.model.params.items()}
    make([stub], max_steps=1).train()
    (line,) = [one.getMessage() for one in caplog.records if "Before the first weights" in one.getMessage()]
    assert "nats per token from the policy on a prompt, expected about 0" in line and "start it with: VLLM" in line


def reached(stub, moment, path):
    """Whether the POST request that `stub` has got to `path` is the first of the second generation at a moment."""
    if moment == "pushing":
        return path == "/collective_rpc" and stub.loads == 1
    return path == "/v1/completions" and stub.loads == 2 and "seed" in stub.seen[-1][1]  # not that which scores a text


# The timeouts are not shorter, because the stub runs in this process and does not answer while a program compiles.


@usual("dies-pushing", "hangs-completing")
@pytest.mark.parametrize("moment", ["completing", "pushing"])
@pytest.mark.parametrize("how", ["dies", "hangs"])
def test_a_server_that_dies_or_hangs_ends_the_run_within_the_timeout(how, moment, serve, make, tmp_path):
    stub = serve()
    trainer = make([stub], vllm_server_timeout=2.5, save_strategy="steps", save_steps=1)

    def fail(path):
        if reached(stub, moment, path):
            struck.append(time.monotonic())
            if how == "dies":
                stub.stop()
                raise ConnectionAbortedError
            stub.answer = lambda *given, **more: time.sleep(60)
            time.sleep(60)

    struck, stub.before = [], fail
    with pytest.raises(ServerError, match=r"did not answer for 2\.5 s .*Start it with: VLLM_SERVER_DEV_MODE=1"):
        trainer.train()
    assert time.monotonic() - struck[0] < 40 and trainer.state.global_step == 1
    assert [path.name for path in (tmp_path / "out").glob("checkpoint-*")] == ["checkpoint-1"]


@pytest.mark.parametrize("moment", [thorough("completing"), "pushing"])
def test_a_server_that_is_restarted_gets_the_weights(moment, serve, make):
    """The run goes on with the completions of a server that was not restarted."""
    make([serve()], recorder(seen := []), logging_steps=1).train()
    stub, restarted = serve(), []

    def restart(path):
        if reached(stub, moment, path):
            if not restarted:
                stub.stop()
                restarted.append(serve(port=stub.port))
            raise ConnectionAbortedError

    stub.before = restart
    trainer = make([stub], recorder(again := []), logging_steps=1)
    trainer.train()
    (other,) = restarted
    assert again == seen and len(seen) == 2
    assert (stub.loads, other.loads) == ((1, 1) if moment == "pushing" else (2, 1))
    assert trainer.state.log_history[1]["sampling/sampling_logp_difference/max"] < 1e-5


@pytest.mark.parametrize(
    "limits,seconds,argument",
    [
        (Limits(240.0), 45, "vllm_server_restart_timeout"),
        (Limits(5.0), 5, "vllm_server_timeout"),
        (Limits(5.0, restart=300.0), 300, "vllm_server_restart_timeout"),
    ],
)
def test_a_server_that_answered_before_is_waited_for_45_s_by_default(limits, seconds, argument):
    transport = Vllm(["http://127.0.0.1:9"], Requirements("model", 100, 16, True), limits).transport
    assert transport._outage_limit("http://127.0.0.1:9") == (limits.answer, "vllm_server_timeout")
    transport._answered.add("http://127.0.0.1:9")
    assert transport._outage_limit("http://127.0.0.1:9") == (seconds, argument)


@pytest.mark.parametrize("hangs", [False, True])
def test_a_server_that_answered_before_ends_the_run_sooner_than_one_that_starts(hangs, serve, folder):
    stub = serve()
    needs = Requirements(str(folder), stub.model.vocab_size, 16, True)
    servers = connect([stub.url], needs, Limits(240.0, restart=1.0))
    stub.stop()
    with contextlib.ExitStack() as stack:
        if hangs:
            stack.enter_context(socket.create_server(("127.0.0.1", stub.port)))  # never replies
        began = time.monotonic()
        with pytest.raises(ServerError, match=r"for 1 s \(vllm_server_restart_timeout; .* raise vllm_server_r"):
            servers.begin([[1]], {"max_tokens": 2}, group=1, seeds=[1]).result()
    assert time.monotonic() - began < 20


def test_a_request_that_ran_for_longer_than_the_timeout_is_sent_again(serve, folder):
    """The server restarts after the request has run for twice the timeout."""
    stub, posts = serve(), []

    def drop(path):
        posts.append(path)
        if len(posts) == 1:
            time.sleep(2)
            raise ConnectionAbortedError

    servers = Vllm([stub.url], Requirements(str(folder), 100, 16, True), Limits(240.0, restart=1.0))
    servers.transport.request_all("GET", "/v1/models")
    stub.before = drop
    assert servers.transport.request_all("POST", "/resume") == [{"status": "resumed"}] and len(posts) == 2


def test_a_server_that_is_down_is_named_within_the_timeout(serve, make):
    stub = serve()
    stub.stop()
    began = time.monotonic()
    with pytest.raises(ServerError, match=r"did not answer for 0\.5 s .*Start it with: VLLM_SERVER_DEV_MODE=1"):
        make([stub], vllm_server_timeout=0.5)
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("steps", [{"steps_per_generation": 1}, thorough({"generate_ahead": True})])
@pytest.mark.parametrize("dies_at", [thorough(3), 5])  # within the first epoch, and at the start of the second
def test_a_run_whose_server_dies_is_resumed(serve, make, tmp_path, steps, dies_at):
    """With the completions and losses of an undisturbed run. The checkpoint is that of the last finished step."""
    config = {
        "max_steps": 6,
        "save_strategy": "steps",
        "save_steps": 100,
        "logging_steps": 1,
        "vllm_server_timeout": 1.5,
    }
    config |= steps
    whole = make([serve()], recorder(seen := []), **config, output_dir=str(tmp_path / "whole"))
    whole.train()
    stub = serve()

    def die(path):
        if path == "/v1/completions" and stub.loads == dies_at:
            stub.stop()
            raise ConnectionAbortedError

    stub.before = die
    config |= {"output_dir": str(tmp_path / "out")}
    folder = tmp_path / "out" / f"checkpoint-{dies_at - 1}"
    with pytest.raises(
        ServerError, match=f"(?s)did not answer .*\nThe checkpoint of step {dies_at - 1} is in {folder}: co"
    ):
        make([stub], recorder(before := []), **config).train()
    assert before == seen[: dies_at - 1]
    resumed = make([serve()], recorder(again := []), **config)
    resumed.train(resume_from_checkpoint=True)
    logs = [[log["loss"] for log in run.state.log_history if "loss" in log] for run in (whole, resumed)]
    assert len(again) == 7 - dies_at and len(logs[1]) == 6
    if not steps.get("generate_ahead"):  # else the failed generation is repeated with newer weights
        assert again == seen[dies_at - 1 :] and logs[0] == logs[1]


def test_a_server_that_starts_late_is_waited_for(serve, make, caplog, monkeypatch):
    monkeypatch.setattr("trl_jax.rollout.server._WARN_AFTER", 0.1)
    stub, port = serve(), None
    port = stub.port
    stub.stop()
    Timer(0.8, lambda: serve(port=port)).start()
    make([stub], vllm_server_timeout=60)
    (line,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith("Waiting up to")]
    assert f"http://127.0.0.1:{port} (ConnectError" in line


def test_arguments_that_servers_do_not_take(serve, make):
    for config, error, text in (
        ({"generation_kwargs": {"seed": 3}}, ValueError, r"generation_kwargs has the keys \['seed'\]"),
        ({"vllm_server_base_url": "10.0.0.2:8000"}, ValueError, "must be URLs such as .* got '10.0.0.2:8000'"),
        ({"vllm_server_base_url": "http://10.0.0.2:8000", "vllm_weights_dir": None}, ValueError,
         "http://10.0.0.2:8000 is on another machine: set vllm_weights_dir"),
    ):  # fmt: skip
        with pytest.raises(error, match=text):
            make([serve()], **config)
    prompts = {"peft_config": trl_jax.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")}
    with pytest.raises(ValueError, match="vllm_mode='server' together with an adapter of virtual tokens is not"):
        make([serve()], arguments=prompts)


# Units


def test_a_server_that_was_left_paused_is_resumed_and_aborted_completions_are_errors(serve, folder):
    stub, needs = serve(), Requirements(str(folder), 100, 16, True)
    stub.paused = True
    servers = connect([stub.url], needs, Limits(30.0))
    assert not stub.paused and servers.engine.context_length == 512
    reply = stub._post_completions
    stub._post_completions = lambda body: (200, {"choices": [{"index": 0, "token_ids": [1], "finish_reason": "abort"}]})
    with pytest.raises(ServerError, match="aborted a completion"):
        servers.begin([[1]], {"max_tokens": 1}, group=1, seeds=[0]).result()
    stub._post_completions, stub._get_models = reply, lambda: {"data": []}
    with pytest.raises(ServerError, match=r"serves a model of None \(owned_by in /v1/models\)"):
        connect([stub.url], needs, Limits(30.0))


def test_prompts_with_images(serve, folder):
    """A prompt with two images of three tokens each, and one without images."""
    stub, needs = serve(), Requirements(str(folder), 100, 16, True, image_token=5)
    servers, sampling = connect([stub.url], needs, Limits(30.0)), {"max_tokens": 4, "stop_token_ids": [0]}
    sampling |= {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0}
    stub.image_tokens, stub.replay = 3, lambda ids, n: [[len(ids), number] for number in range(n)]
    prompts, images = [[1, 5, 5, 5, 2, 5, 5, 5], [1, 2]], [["data:a", "data:b"], []]
    found = servers.begin(prompts, sampling, group=2, seeds=[3, 4], images=images).result()
    assert [own.tolist() for own in found.completions] == [[8, 0], [8, 1], [2, 0], [2, 1]]
    assert [logps.tolist() for logps in found.logps[:2]] == [[0.0, 0.0]] * 2 and found.logps[2][0] < 0
    (body,) = [body for path, body in stub.seen if path == "/inference/v1/generate"]
    assert body["features"]["mm_placeholders"] == {"image": [{"offset": 1, "length": 3}, {"offset": 5, "length": 3}]}
    given = body["sampling_params"]
    assert (given["seed"], given["n"], given["max_tokens"]) == (3, 2, 4) and "prompt" not in given
    found = servers.begin([[1, 5, 5, 5, 5, 5, 5]], sampling, group=1, seeds=[3], images=[["data:a", "data:b"]])
    found.result()  # nothing between the images
    (_, body) = [body for path, body in stub.seen if path == "/inference/v1/generate"]
    assert body["features"]["mm_placeholders"] == {"image": [{"offset": 1, "length": 3}, {"offset": 4, "length": 3}]}
    stub.image_tokens = 4
    with pytest.raises(ServerError, match=r"has images of \[4, 4\] tokens, and the prompt of \[3, 3\]: it processes"):
        servers.begin(prompts, sampling, group=2, seeds=[3, 4], images=images).result()
    stub.missing = {"/v1/chat/completions/render"}
    with pytest.raises(ServerError, match="prompts with images need. Start it with: .* --enable-scale-out"):
        servers.begin(prompts, sampling, group=2, seeds=[3, 4], images=images).result()


def test_parameters_of_requests():
    given = {"max_tokens": 5, "temperature": 0.7, "top_p": None, "top_k": -1, "min_p": None, "repetition_penalty": 1.1,
             "eos_token_ids": [2, 3], "suppressed_ids": ()}  # fmt: skip
    engine = Vllm([], Requirements("model", 100, 16, True), Limits(1.0))
    found = engine.parameters(SamplingOptions(**given, regex="a+", generation_kwargs={"min_tokens": 2, "top_p": 0.5}))
    assert found == {
        "max_tokens": 5, "temperature": 0.7, "top_p": 0.5, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.1,
        "stop_token_ids": [2, 3], "min_tokens": 2, "structured_outputs": {"regex": "a+"},
    }  # fmt: skip
    given |= {"suppressed_ids": (7,), "regex": None}
    found = engine.parameters(
        SamplingOptions(**given, generation_kwargs={"stop_strings": ["END"], "logit_bias": {"1": 2.0}})
    )
    assert (found["stop"], found["include_stop_str_in_output"], "stop_strings" in found) == (["END"], True, False)
    assert found["logit_bias"] == {"1": 2.0, "7": -100.0} and "structured_outputs" not in found
    assert server_urls(None, "::1", 8000) == ["http://[::1]:8000"]
    assert server_urls("http://a:1/, https://b", "", 0) == ["http://a:1", "https://b"]
    for wrong in ("http://[::1", "http://a:99999", "ftp://a", "http://"):
        with pytest.raises(ValueError, match="vllm_server_base_url must be URLs such as"):
            server_urls(wrong, "", 0)
    here = ["http://localhost:1", "http://0.0.0.0:1", "http://127.0.0.2", "http://[::1]:1"]
    assert all(map(is_local, here)) and not any(map(is_local, ["http://10.0.0.2", "http://node7:8000"]))


# SGLang


def test_sglang_servers_train_as_this_process(serve, make):
    """Two servers replay the completions of local generation; one of them restarts meanwhile. The LoRA adapter is
    merged."""
    lora = {"peft_config": trl_jax.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])}
    own = make([], recorder(seen := []), arguments=lora, temperature=0.7)
    own.train()
    stubs, texts = [serve(SglangStub), serve(SglangStub)], own.train_dataset["prompt"]
    place = [own.processing_class(text)["input_ids"] for text in texts]
    queue = [ids for generation in seen for ids in generation]

    def lose(path):
        if path == "/generate" and stubs[0].loads == 2 and stubs[0].version.endswith("/2"):
            stubs[0].version = "default"

    stubs[0].before = lose
    for stub in stubs:
        stub.replay = lambda ids, n: queue[4 * place.index(ids) :][:n]
    server = make(stubs, recorder(again := []), arguments=lora, temperature=0.7)
    server.train()
    assert again == seen
    for mine, other in zip(server.state.log_history[:-1], own.state.log_history[:-1], strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], abs=1e-6)
        assert mine["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
        assert mine["sampling/sampling_logp_difference/max"] < 1e-5
    load, asked = "/update_weights_from_disk", [body for path, body in stubs[0].seen if path == "/generate"]
    names = [path for path, _ in stubs[1].seen]
    cycle = [load, "/model_info", "/generate", "/generate", "/model_info"]
    assert names == ["/v1/models", "/server_info", "/generate", "/generate", *3 * cycle] and stubs[0].loads == 3
    assert [one["max_new_tokens"] for one in asked[3]["sampling_params"]] == [6] * 4
    assert len({one["sampling_seed"] for one in asked[3]["sampling_params"]}) == 4
    assert [asked[number]["sampling_params"] for number in (5, 7)] == [asked[5]["sampling_params"]] * 2


def test_log_probabilities_of_sglang_after_filters(serve, make, folder):
    stub = serve(SglangStub)
    needs = Requirements(str(folder), stub.model.vocab_size, 16, True)
    servers = pickle.loads(pickle.dumps(connect([stub.url], needs, Limits(30.0))))  # as in the other processes
    parameters = servers.engine.parameters(SamplingOptions(**SAMPLED | {"top_k": 3, "top_p": 0.6}))
    found = servers.begin([[1, 2], [3]], parameters, group=2, seeds=[3, 4], most=[4, 2]).result()
    assert [len(own) for own in found.completions] == [4, 4, 2, 2]
    (first, *_), own = found.completions[0], parameters | {"temperature": 0.7}
    assert found.logps[0][0] == pytest.approx(stub._filtered([1, 2], own)[first], abs=1e-5)
    assert found.logps[0][0] > stub._logps([1, 2], 0.7)[first] + 0.1
    stub.deterministic = False
    for config, text in (({"top_p": 0.9}, "top_p"), ({"min_p": 0.1}, "min_p"), ({"top_k": 5000}, "top_k")):
        with pytest.raises(ValueError, match=f"take {text} into account only with a top_k below 4096"):
            make([stub], **config)
    make([stub], kind="RLOO", top_p=0.9)  # RLOO does not use them
    stub.deterministic = True
    with pytest.raises(ValueError, match=r"min_p=0\.1 ends an SGLang server that runs with --enable-deterministic-inf"):
        make([stub], kind="RLOO", min_p=0.1)


def test_sglang_servers_that_do_not_fit_are_refused(serve, make, folder):
    stub = serve(SglangStub)
    for change, text in (
        ({"missing": {"/server_info"}}, "has no /server_info like that of SGLang 0.5.23"),
        ({"original": True}, "runs with SGLANG_RETURN_ORIGINAL_LOGPROB=1, whose log-probabilities ignore temperature"),
        ({"_max_model_len": 6}, "has --context-length 6, but a prompt with its completion may have 7 tokens"),
        ({"owner": "triton"}, r"serves a model of 'triton' \(owned_by in /v1/models\)"),
    ):
        other = serve(SglangStub)
        vars(other).update(change)
        with pytest.raises(ServerError, match=text) as error:
            make([other])
        assert f"sglang serve --model-path {folder} --port {other.port}" in str(error.value)
    with pytest.raises(ServerError, match="is of sglang, and the one at .* of vllm.*Give the URLs of servers of one"):
        make([stub, serve()])
    stub.speculative = "EAGLE"
    with pytest.raises(ValueError, match="top_k=3: an SGLang server that runs with --speculative-algorithm EAGLE does"):
        make([stub], top_k=3)
    make([stub])  # without filters, it returns log-probabilities
    stub.speculative = None
    needs = Requirements(str(folder), stub.model.vocab_size, 16, True)
    with pytest.raises(ServerError, match="does not take the token id 9999 .*out-of-vocabulary"):
        connect([stub.url], replace(needs, vocab_size=10_000), Limits(30.0))
    servers = connect([stub.url], needs, Limits(30.0))
    with pytest.raises(ServerError, match=r"could not load the weights in /nowhere \(400\)"):
        servers.load("/nowhere", "1")
    stub._post_load_lora_adapter = lambda body: (400, {"error_message": "rank 16", "loaded_adapters": None})
    with pytest.raises(
        ServerError, match=r"could not load the adapter in /nowhere \('rank 16'\). Start it with: sglang"
    ):
        servers.load_adapter("/nowhere", "1")
    del stub._post_load_lora_adapter
    impatient = connect([stub.url], needs, Limits(30.0, load=0.5))
    servers.engine._unload("another")  # of a server that was restarted
    stub._post_unload_lora_adapter = lambda body: (400, {"success": False, "error_message": "in use"})
    with pytest.raises(ServerError, match=r"could not unload the adapter another \(400\): 'in use'"):
        servers.engine._unload("another")
    stub._post_unload_lora_adapter = lambda body: (time.sleep(2.0), (200, {}))[1]
    with pytest.raises(ServerError, match=r"did not unload the adapter another within 0.5 s \(weight_sync_timeout\)"):
        impatient.engine._unload("another")
    stub.answer = lambda path, body, *, posted: (200, [{"meta_info": {"finish_reason": {"type": "abort"}}}])
    with pytest.raises(ServerError, match="aborted a completion"):
        servers.begin([[1]], servers.engine.parameters(SamplingOptions(**SAMPLED)), group=1, seeds=[1]).result()


@only_thorough
def test_sglang_servers_that_take_adapters_get_the_adapter_alone(serve, make):
    """Training gives the same losses as with merged weights. An adapter that SGLang does not compute is merged."""
    runs, stubs = [], [serve(SglangStub), serve(SglangStub, max_lora_rank=8)]
    for stub in stubs:
        lora = {"peft_config": trl_jax.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj", "gate_proj"])}
        runs.append(make([stub], arguments=lora, max_steps=3, temperature=0.7))
        runs[-1].train()
    whole, alone = ([log["loss"] for log in run.state.log_history if "loss" in log] for run in runs)
    assert alone == pytest.approx(whole, abs=1e-6) and len(alone) == 3
    load, unload, update = "/load_lora_adapter", "/unload_lora_adapter", "/update_weights_from_disk"
    loads = [path for path, _ in stubs[1].seen if path in (load, unload, update)]
    assert loads == [update, load, load, unload, load, unload] and len(stubs[1].adapters) == 1
    assert runs[1].state.log_history[2]["sampling/sampling_logp_difference/max"] < 1e-5

    def forget(path):
        if path == "/generate" and stubs[1].loads == 2 and next(asked):
            stubs[1].version = "default"
            stubs[1].adapters.clear()

    asked = iter((False, True, *[False] * 8))  # the first request scores a text
    stubs[1].before, stubs[1].seen, stubs[1].loads = forget, [], 0
    make([stubs[1]], arguments=lora, max_steps=1).train()
    assert [path for path, _ in stubs[1].seen if path in (load, update)] == [update, load] * 2
    with pytest.raises(ServerError, match="has --max-lora-rank 8, and the adapter that is trained 16. Start it with: .*"
                       "--enable-lora --max-lora-rank 16 --lora-target-modules all"):  # fmt: skip
        make([stubs[1]], arguments={"peft_config": trl_jax.LoraConfig(r=16)})
    for merged in ({"target_modules": ["k_proj"]}, {"target_modules": ["up_proj"]}, {"use_rslora": True},
                   {"rank_pattern": {"q_proj": 2}}, {"alpha_pattern": {"q_proj": 2}}):  # fmt: skip
        trainer = make([stubs[1]], arguments={"peft_config": trl_jax.LoraConfig(r=4, **merged)})
        assert not trainer.parts.rollout_steps.rollout.generator._server._servers.engine.takes_adapters


def test_prompts_with_images_of_sglang(serve, folder):
    """A prompt with two images of three tokens each, which the server writes, and one without images."""
    stub, needs = serve(SglangStub), Requirements(str(folder), 100, 16, True, image_token=5)
    stub.image_token, stub.image_tokens = 5, 3
    servers = connect([stub.url], needs, Limits(30.0))
    sampling = servers.engine.parameters(SamplingOptions(**SAMPLED | {"suppressed_ids": (5, 9)}))
    stub.replay = lambda ids, n: [[len(ids), number] for number in range(n)]
    prompts, images = [[1, 5, 5, 5, 2, 5, 5, 5], [1, 2]], [["data:a", "data:b"], []]
    found = servers.begin(prompts, sampling, group=2, seeds=[3, 4], images=images).result()
    assert [own.tolist() for own in found.completions] == [[8, 0], [8, 1], [2, 0], [2, 1]]
    bodies = [body for path, body in stub.seen if path == "/generate" and "image_data" in body]
    assert [(body["input_ids"], body["image_data"]) for body in bodies] == [([[1, 5, 2, 5]] * 2, [images[0]] * 2)]
    assert bodies[0]["sampling_params"][0]["logit_bias"] == {"5": -100.0, "9": -100.0}
    servers.load(str(folder), "2")
    servers.begin(prompts[:1], sampling, group=2, seeds=[3], images=images[:1]).result()
    hashes = [body["mm_hashes"] for path, body in stub.seen if path == "/generate" and "image_data" in body]
    assert len({own for by_image in hashes for own in by_image[0]}) == 4  # of each image and version
    stub.image_tokens = 4
    with pytest.raises(
        ServerError, match="has 8 image tokens for a prompt with 2 images, and the trainer 6: the server"
    ):
        servers.begin(prompts, sampling, group=2, seeds=[3, 4], images=images).result()
    with pytest.raises(ServerError, match="A prompt has 2 images and 1 run of image tokens, and the SGLang server at"):
        servers.begin([[1, 5, 5, 5, 5]], sampling, group=1, seeds=[3], images=images[:1]).result()


def test_texts_with_images_that_sglang_changes_or_refuses(serve, folder):
    stub = serve(SglangStub)
    needs = Requirements(str(folder), 100, 16, True, image_token=5, other_media=[9])
    stub.image_token, stub.image_tokens, stub.replay = 5, 3, lambda ids, n: [[7]] * n
    servers = connect([stub.url], needs, Limits(30.0))
    sampling = servers.engine.parameters(SamplingOptions(**SAMPLED))

    def complete(ids):
        return servers.begin([ids], sampling, group=1, seeds=[3], images=[["data:a"]]).result()

    expand = stub._with_images
    stub._with_images = lambda ids, urls: [6 if token == 2 else token for token in expand(ids, urls)]
    with pytest.raises(
        ServerError, match=r"tokenized the text .* from token 4 on: \[6, 3\], and \[2, 3\] in the request"
    ):
        complete([1, 5, 5, 5, 2, 3])
    stub._with_images = lambda ids, urls: [*expand(ids, urls), 3]
    with pytest.raises(ServerError, match=r"again, and it differs from token 5 on: \[3\], and \[\] in the request"):
        complete([1, 5, 5, 5, 2])
    stub._post_generate = lambda body: (400, {"error": {"message": "no data"}})
    with pytest.raises(
        ServerError, match=r"no data'? The prompt has 1 image and has the tokens \[9\], placeholders of"
    ):
        complete([1, 5, 5, 5, 9])
    with pytest.raises(ServerError, match=r"no data'? The prompt has 1 image and may have text .* a literal <image>"):
        complete([1, 5, 5, 5])


def test_parameters_of_requests_to_sglang(caplog):
    engine = Sglang([], Requirements("model", 100, 16, False), Limits(1.0))
    found = engine.parameters(
        SamplingOptions(**SAMPLED | {"regex": "a+", "generation_kwargs": {"min_tokens": 2, "top_k": 0}})
    )
    assert found == {
        "max_new_tokens": 4, "temperature": 0.7, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0,
        "stop_token_ids": [0], "min_new_tokens": 2, "regex": "a+",
    }  # fmt: skip
    others = {"stop_strings": ["END"], "max_tokens": 3, "structured_outputs": {"json": {"type": "object"}}}
    found = engine.parameters(SamplingOptions(**SAMPLED | {"generation_kwargs": others, "repetition_penalty": 1.5}))
    assert found.keys() <= SglangStub.fields and (found["stop"], found["no_stop_trim"]) == (["END"], True)
    assert (found["max_new_tokens"], found["json_schema"]) == (3, '{"type": "object"}')
    assert "repetition_penalty=1.5: SGLang penalizes the tokens of a completion, not those of its pr" in caplog.text
    for others, text in (
        ({"bad_words": ["a"]}, r"has \['bad_words'\], which SGLang does not have"),
        ({"structured_outputs": {"choice": ["a"]}}, r"has \['choice'\], .* It has: regex, json, grammar"),
    ):
        with pytest.raises(ValueError, match=text):
            engine.parameters(SamplingOptions(**SAMPLED | {"generation_kwargs": others}))
    assert Sglang([], Requirements("m", 9, 9, False), Limits(1.0)).command("http://10.0.0.2:80").endswith("0.0.0.0")


def test_weights_are_whole_or_absent(tmp_path):
    def save(folder):
        (folder / "half").write_text("")
        if broken:
            raise OSError(28, "No space left on device")

    broken, folders = False, WeightFolders(tmp_path, save)
    versions = [folders.write() for _ in range(3)]
    assert [Path(folder).exists() for folder, _ in versions] == [False, True, True]
    assert len({version for _, version in versions} | {WeightFolders(tmp_path, save).write()[1]}) == 4
    broken = True
    with pytest.raises(OSError, match="No space left on device.*Set vllm_weights_dir to a folder with space"):
        folders.write()
    assert not folders.folder.exists()


def test_only_folders_of_processes_that_ended_on_this_machine_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr("trl_jax.training.server._MEMORY", tmp_path)
    own = WeightFolders(tmp_path, lambda folder: None)
    own.write()
    ended = subprocess.Popen(["true"])
    ended.wait()
    _, here, _ = own.folder.name.removeprefix("trl_jax-weights-").split("-")
    orphan, other = (tmp_path / f"trl_jax-weights-{ended.pid}-{where}-abcd" for where in (here, "0123456789ab"))
    orphan.mkdir()
    other.mkdir()  # of a container that counts its own processes
    WeightFolders(tmp_path, lambda folder: None)
    assert not orphan.exists() and other.exists() and own.folder.exists()
