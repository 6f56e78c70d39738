"""AsyncGRPO: TRL's arguments, its loss and advantages, and runs against a stub of a vLLM server."""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections import defaultdict
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from datasets import Dataset

from compat_tests.parity.dpo_cases import SMALL
from compat_tests.parity.grpo_cases import length_reward, prompt_rows
from compat_tests.parity.reference import BASE
from compat_tests.rollout.stub_server import StubServer
from compat_tests.trainer import vision_models
from compat_tests.trainer.test_reward_config import declared
from trl_jax.core.trainers import names_of_config
from trl_jax.data.batch import Batch, Extras
from trl_jax.data.prompts import prompt_ids
from trl_jax.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
from trl_jax.losses.policy_gradient import PolicyLoss
from trl_jax.rollout.completions_log import group_reward_metrics
from trl_jax.rollout.server import Limits, Requirements, ServerError
from trl_jax.tasks.policy import AsyncGrpoTask
from trl_jax.training.server import connect

OWN = {"batch_layout", "remat_policy", "mesh_shape", "coordinator_address", "num_processes", "process_id",
       "initialization_timeout", "max_minutes", "save_minutes", "log_json", "pad_to_multiple_of", "vllm_weights_dir",
       "reward_timeout", "vllm_server_restart_timeout"}  # fmt: skip
CONFIG = {"num_generations": 4, "max_completion_length": 6, "per_device_train_batch_size": 8, "learning_rate": 3e-3}


@pytest.fixture(scope="module")
def folder(checkpoint):
    return checkpoint(**SMALL)


@pytest.fixture
def stub(folder):
    made = StubServer(folder)
    yield made
    made.stop()


@pytest.fixture
def make(folder, stub, tmp_path):
    def made(reward=length_reward, rows=5, arguments=None, **config):
        options = BASE | CONFIG | {"vllm_server_base_url": stub.url, "vllm_weights_dir": str(tmp_path)} | config
        args = AsyncGRPOConfig(str(tmp_path / "out"), **options)
        given = {"train_dataset": Dataset.from_list(prompt_rows(rows))} | (arguments or {})
        return AsyncGRPOTrainer(str(folder), reward, args, **given)

    return made


def test_arguments_are_trls(tmp_path):
    theirs = pytest.importorskip("trl.experimental.async_grpo")

    def facts(kind):
        found = [fact for fact in declared(kind) if fact[0] not in OWN]
        return [fact for fact in found if fact[0] != "dtype"], [fact for fact in found if fact[0] == "dtype"]

    assert facts(AsyncGRPOConfig) == facts(theirs.AsyncGRPOConfig)
    places = [list(inspect.signature(kind).parameters) for kind in (AsyncGRPOTrainer, theirs.AsyncGRPOTrainer)]
    assert places[0] == places[1]
    ours, other = (kind(str(tmp_path), use_cpu=True) for kind in (AsyncGRPOConfig, theirs.AsyncGRPOConfig))
    for name in ("bf16", "lr_scheduler_type", "logging_steps", "gradient_checkpointing"):
        assert vars(ours)[name] == vars(other)[name], name
    assert names_of_config(ours).trainer == "AsyncGRPOTrainer"


REFUSED = {
    "token_budget": ({"token_budget": 4096}, "token_budget=4096 is not in this release of trl_jax: micro-batches have"),
    "forks": ({"fork_threshold_tokens": 8}, "fork_threshold_tokens=8 is not in this release of trl_jax: the turns of"),
    "in flight": ({"max_inflight_tasks": 3}, r"max_inflight_tasks must be -1 or at least num_generations \(4\)"),
    "no group": ({"num_generations": 1}, "num_generations must be .* at least 2, got 1"),
    "worker": ({"arguments": {"rollout_worker": object()}}, "rollout_worker=.* is not in this release of trl_jax"),
    "transfer": ({"arguments": {"weight_transfer": object()}}, "weight_transfer=.* is not in this release of trl_jax"),
    "stale": (
        {"per_device_train_batch_size": 2, "max_staleness": 0},
        "a generation trains for 2 steps, .* up to 1 times, more than max_staleness=0. Make per_device_train_batch",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_at_construction(name, make):
    config, text = REFUSED[name]
    with pytest.raises(ValueError, match=text):
        make(**config)


def test_an_own_loss_is_refused():
    with pytest.raises(TypeError, match="overrides compute_loss, which trl_jax never calls.*of GRPOTrainer"):
        type("Own", (AsyncGRPOTrainer,), {"compute_loss": lambda self: None, "__module__": "script"})


# Losses, gradients and metrics


def test_losses_gradients_and_metrics_are_trls():
    """Two micro-batches of three completions; the policy has moved so far that ratios are clipped on both sides."""
    torch = pytest.importorskip("torch")
    trainer = pytest.importorskip("trl.experimental.async_grpo.async_grpo_trainer").AsyncGRPOTrainer
    draw = np.random.default_rng(0)
    lengths = np.asarray([3, 1, 4, 2, 5, 2])
    text = np.repeat(np.arange(6), lengths)
    old = draw.normal(-2, 0.5, len(text)).astype(np.float32)
    logps = (old + draw.normal(0, 0.4, len(text))).astype(np.float32)
    entropy = draw.uniform(1, 2, len(text)).astype(np.float32)
    advantages = np.asarray([1.5, -0.5, -1.0, 0.3, 0.0, -2.0], np.float32)
    epsilons = {"epsilon": 0.1, "epsilon_high": 0.3}

    fake = SimpleNamespace(
        aux_loss_enabled=False, epsilon_low=0.1, epsilon_high=0.3, current_gradient_accumulation_steps=2,
        accelerator=SimpleNamespace(num_processes=1, reduce=lambda x, reduction: x, gather=lambda x: x),
        _metrics={"train": defaultdict(list)}, _step_forward_tokens=0, _step_trained_tokens=0,
        _step_seq_len_weighted=0, _step_samples=0, _step_forward_s=0,
    )  # fmt: skip
    found, losses = torch.tensor(logps, requires_grad=True), []
    for rows in ([0, 1, 2], [3, 4, 5]):
        here = np.isin(text, rows)
        count = int(here.sum())
        whole = {"input_ids": np.zeros(count, int), "position_ids": np.arange(count), "attention_mask": np.ones(count),
                 "shift_labels": np.zeros(count, int), "token_index": np.arange(count), "old_log_probs": old[here],
                 "advantages": advantages[text[here]], "segment_id": text[here] - rows[0],
                 "tree_kv_index": np.zeros(count, int), "tree_cu_seqlens_q": np.zeros(2, int),
                 "tree_cu_seqlens_k": np.zeros(2, int), "tree_max_seqlens": np.ones(2, int)}  # fmt: skip
        inputs = {name: torch.tensor(values)[None] for name, values in whole.items()}
        inputs |= {name: torch.tensor([float(count)]) for name in ("global_n_tokens", "global_n_forward_tokens")}
        inputs["mean_seq_len"] = torch.tensor([count / 3])
        outputs = SimpleNamespace(log_probs=found[torch.tensor(here)], entropy=torch.tensor(entropy[here]))
        losses.append(trainer.compute_loss(fake, lambda outputs=outputs, **inputs: outputs, inputs))
    torch.stack(losses).sum().backward()

    task = AsyncGrpoTask(objective=PolicyLoss(loss_type="bnpo", **epsilons), sampled_elsewhere=True)
    each = np.full(3, 1 / 6, np.float32)
    weights = [task.token_weights(lengths[part], each, None) for part in (slice(3), slice(3, 6))]
    extras = Extras({"advantage": advantages, "token_weight": np.concatenate(weights)}, {}, {"sampling_logps": old})
    batch = Batch(None, None, None, None, np.full(6, 1 / 6, np.float32), np.repeat(np.eye(2, dtype=bool), 3, axis=1),
                  extras, text=text)  # fmt: skip
    batch = jax.tree.map(jnp.asarray, batch)

    def loss(logps):
        return task.loss({"logps": logps, "entropy": jnp.asarray(entropy)}, batch)

    (value, sums), gradient = jax.value_and_grad(loss, has_aux=True)(jnp.asarray(logps))
    assert float(value) == pytest.approx(sum(map(torch.Tensor.item, losses)), abs=1e-6)
    np.testing.assert_allclose(gradient, found.grad.numpy(), atol=1e-7)
    assert np.any(gradient == 0)  # some tokens are clipped
    metrics = task.metrics([{name: np.asarray(values)[None] for name, values in sums.items()}], "train")
    wanted = {name: np.mean(values) for name, values in fake._metrics["train"].items()}
    assert metrics.keys() == wanted.keys()
    assert wanted["clip_ratio/low_mean"] > 0 and wanted["clip_ratio/high_max"] > 0
    for name, number in wanted.items():
        assert metrics[name] == pytest.approx(number, abs=1e-6), name


def test_a_token_that_the_sampler_has_no_number_for_has_the_ratio_one():
    task = AsyncGrpoTask(objective=PolicyLoss(loss_type="bnpo"))
    extras = Extras({"advantage": np.ones(1), "token_weight": np.ones(1)}, {}, {"sampling_logps": np.float32([np.nan])})
    batch = Batch(None, None, None, None, np.ones(1), np.ones((1, 1), bool), extras, text=np.zeros(1, int))
    batch = jax.tree.map(jnp.asarray, batch)

    def loss(logps):
        return task.loss({"logps": logps, "entropy": logps}, batch)[0]

    assert jax.value_and_grad(loss)(jnp.float32([-3.0])) == (-1.0, -1.0)


def test_advantages_and_reward_metrics_are_trls(monkeypatch):
    worker = pytest.importorskip("trl.experimental.async_grpo.async_rollout_worker")
    monkeypatch.setattr(worker, "logger", logging.getLogger("theirs"))  # accelerate's logger needs a process group
    rewards = [[1.0, None, 0.5, 3.0, 2.0, 2.0, 2.0, 2.0], [0.5, None, None, -1.0, 0.1, 0.1, 0.1, 0.1]]
    samples = []
    for part in (slice(4), slice(4, 8)):
        functions = [lambda own=own[part], **columns: own for own in rewards]
        fake = SimpleNamespace(reward_funcs=functions, reward_func_names=["first", "second"], _env_reward_types=[],
                               _provides_rollout_reward=False)  # fmt: skip
        rows = [[worker.TrainingSequence([1, 2], [0, 1], [0.0, -1.0], "")] for _ in range(4)]
        group = worker.RolloutGroup([[]] * 4, {}, [[]] * 4, [[2]] * 4, rows, [0] * 4, [0] * 4, 0, 0, [], [])
        samples += asyncio.run(worker._AsyncRolloutLoop._score_group(fake, group))
    given = np.asarray([[np.nan if value is None else value for value in own] for own in rewards], np.float32).T
    made = AsyncGrpoTask().advantages(given, 4, None)
    np.testing.assert_allclose(made.advantages, [sample.advantage for sample in samples], atol=1e-6)
    assert made.zero_std.tolist() == 4 * [False] + 4 * [True]
    metrics = dict(group_reward_metrics(["first", "second"], given, made, 4))
    for name, value in metrics.items():
        each = [sample.metrics[name] for sample in samples]
        assert value == pytest.approx(np.nanmean(each), abs=1e-6), name
    assert metrics.keys() == samples[0].metrics.keys()


# Runs


def test_a_run_generates_ahead_counts_epochs_by_prompts_and_resumes(make, stub, tmp_path):
    """Five prompts, two epochs, two prompts per step: the third step has the last prompt of an epoch and the first of
    the next."""
    asked, completed = [], []

    def reward(prompts, completions, completion_ids, answer):  # no other arguments, as in TRL
        asked.append(prompts[0] != prompts[4] and [answer[0], answer[4]])
        completed.append(completion_ids)
        return length_reward(completions)

    config = {"num_train_epochs": 2, "save_strategy": "steps", "save_steps": 1, "max_staleness": 1}
    whole = make(reward, **config)
    whole.train()
    logs = [log for log in whole.state.log_history if "loss" in log]
    assert len(logs) == whole.state.global_step == whole.state.max_steps == 5 and stub.loads == 4
    names = [row["answer"] for row in prompt_rows(5)] * 2
    assert asked == [names[number : number + 2] for number in range(0, 10, 2)]
    assert [log["sample/staleness_mean"] for log in logs] == [0, 1, 1, 1, 1]
    assert logs[0]["ratio"] == pytest.approx(1, abs=1e-5) and abs(logs[1]["ratio"] - 1) > 1e-5
    assert {"kl", "entropy", "reward", "reward_std", "rewards/reward", "clip_ratio/low_min"} <= logs[0].keys()
    seeds = [body["seed"] for _, body in stub.seen if "stop_token_ids" in (body or {})]
    assert len(seeds) == len(set(seeds)) == 10

    resumed, before = make(reward, **config), len(completed)
    resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    assert completed[before:] == completed[2:5]
    assert [log["loss"] for log in resumed.state.log_history if "loss" in log] == [log["loss"] for log in logs]


def test_weights_are_updated_every_few_steps_and_requests_are_limited(make, stub):
    peak, active, answer = 0, 0, stub.answer

    def counted(path, body, *, posted):
        nonlocal peak, active
        if path != "/v1/completions" or "seed" not in body:
            return answer(path, body, posted=posted)
        active += 1
        peak = max(peak, active)
        time.sleep(0.05)
        try:
            return answer(path, body, posted=posted)
        finally:
            active -= 1

    stub.answer = counted
    trainer = make(weight_sync_steps=2, max_inflight_tasks=7, max_steps=5)
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert [log["sample/staleness_mean"] for log in logs] == [0, 0, 1, 0, 1]
    assert stub.loads == 2 and peak == 1  # one generation for steps 0 to 2, one for 3 and 4


def test_a_step_without_whole_groups_and_what_is_not_generated_ahead(make):
    """A generation of 4 completions is used for two steps of 2, during which the weights are updated once."""
    half = make(per_device_train_batch_size=2, max_staleness=3)
    assert half.parts.rollout_steps.ahead and half.args.generation_batch_size == 4
    assert half._setup.task.cycle.parts == 2 and half._setup.length.max_steps == 10
    assert not make(per_device_train_batch_size=2, max_staleness=2).parts.rollout_steps.ahead
    assert not make(max_staleness=0).parts.rollout_steps.ahead
    assert not make(queue_maxsize=7).parts.rollout_steps.ahead
    assert make(queue_maxsize=0).parts.rollout_steps.ahead


def test_slow_servers_end_the_run_with_the_argument_that_allows_more(stub, folder):
    needs = Requirements(str(folder), stub.model.vocab_size, 16, True)
    given = {"group": 1, "seeds": [1]}
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0, "max_tokens": 2,
                "stop_token_ids": [0]}  # fmt: skip
    limits = Limits(0.3, request=0.2), Limits(30.0, load=0.2)
    impatient, servers = (connect([stub.url], needs, own) for own in limits)
    stub.before, stub.seen = lambda path: time.sleep(1.0), []
    words = r"did not answer for 0\.8 s \(request_timeout; no completions within request_timeout=0\.2 s, 4 times\)\. "
    words += "Raise request_timeout, or lower max_completion_length or max_inflight_tasks"
    with pytest.raises(ServerError, match=words):
        impatient.begin([[1]], sampling, **given).result()
    assert len(stub.seen) == 4
    with pytest.raises(ServerError, match=r"did not load the weights in .* within 0\.2 s \(weight_sync_timeout\)"):
        servers.load(str(folder), "1")


def test_a_server_may_start_later_than_a_generation_may_be_silent(folder):
    """`alive` limits only a generation; without a server, the run fails after vllm_server_timeout."""
    needs = Requirements(str(folder), vocab_size=16, max_tokens=8, processed_logps=True)
    began = time.monotonic()
    with pytest.raises(ServerError, match=r"did not answer for 0\.8 s \(vllm_server_timeout;"):
        connect(["http://127.0.0.1:9"], needs, Limits(0.8, alive=0.1))
    assert time.monotonic() - began > 0.8


def test_prompts_for_vision_language_models_are_tokenized_by_the_tokenizer(tmp_path, monkeypatch):
    """TRL's AsyncGRPOTrainer has no processor: contents stay strings, and no special tokens are added."""
    from transformers import AutoTokenizer

    monkeypatch.setattr(vision_models, "TEMPLATE", vision_models.BY_PARTS)
    folder = vision_models.tiny_llava(tmp_path / "model")
    prompts = [vision_models.user("bake the bread?")]
    rows = Dataset.from_list([{"prompt": prompt} for prompt in prompts])
    server = StubServer(folder)
    try:
        options = BASE | CONFIG | {"vllm_server_base_url": server.url, "vllm_weights_dir": str(tmp_path)}
        args = AsyncGRPOConfig(str(tmp_path / "out"), **options)
        made = AsyncGRPOTrainer(str(folder), length_reward, args, train_dataset=rows)
    finally:
        server.stop()
    theirs = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        prompts, add_generation_prompt=True, return_dict=False
    )
    assert prompt_ids(prompts, made._setup.chat_tokenizer) == theirs
