"""GRPOTrainer and RLOOTrainer: all kinds of rewards, what they evaluate, log and save, and their errors."""

from __future__ import annotations

import asyncio
import logging
import math
import re
import threading

import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
import torch
from datasets import Dataset, IterableDataset
from transformers import AutoTokenizer, TrainerCallback
from transformers.trainer_pt_utils import AcceleratorConfig

import trl_jax
from compat_tests.effort import only_thorough, thorough
from compat_tests.parity.dpo_cases import CHAT, SMALL
from compat_tests.parity.grpo_cases import length_reward, prompt_rows, vowels
from compat_tests.parity.marks import timeless
from compat_tests.parity.reference import BASE, read_weights
from compat_tests.trainer.trainers import FACTS
from trl_jax.config.devices import accelerator_options
from trl_jax.rollout.tools import call_rollout_func
from trl_jax.trainer.grpo_trainer import GRPOTrainer
from trl_jax.trainer.rloo_trainer import RLOOTrainer
from trl_jax.training.rollout import CompletionLogps

CONFIG = {
    "max_steps": 1, "learning_rate": 3e-3, "num_generations": 4, "max_completion_length": 6, "pad_to_multiple_of": None,
    "per_device_train_batch_size": 8, "per_device_eval_batch_size": 8,
}  # fmt: skip
BOTH = pytest.mark.parametrize("kind", [GRPOTrainer, RLOOTrainer])


def table(n=8, kind="text"):
    return Dataset.from_list(prompt_rows(n, kind))


@pytest.fixture
def make(checkpoint, tmp_path):
    def made(rewards=length_reward, kind=GRPOTrainer, *, model=SMALL, train=None, config=None, **arguments):
        args = kind.config_class(str(tmp_path / "out"), **BASE | CONFIG | (config or {}))
        model = model if isinstance(model, trl_jax.PreTrainedModel) else str(checkpoint(**model))
        return kind(model, rewards, args, table() if train is None else train, **arguments)

    return made


def trained(trainer):
    trainer.train()
    return trainer.state.log_history[0]


# Errors


@BOTH
def test_there_are_no_batches_before_completions(kind, make):
    words = rf"get_train_dataloader\(\) of {kind.__name__}.*The prompts are in trainer.train_dataset"
    with pytest.raises(TypeError, match=words):
        make(kind=kind).get_train_dataloader()
    for name in ("get_train_dataloader", "_get_train_sampler"):
        with pytest.raises(TypeError, match=rf"overrides {name}, .*set shuffle_dataset=False\."):
            type("Own", (kind,), {name: lambda self: None})


@BOTH
def test_too_few_prompts_are_told_with_the_numbers(kind, make):
    with pytest.raises(ValueError, match="train_dataset has 1 prompts, and a generation takes 2"):
        make(kind=kind, train=table(1)).train()


@BOTH
def test_the_dataset_is_required(kind, make, checkpoint):
    with pytest.raises(ValueError, match="`train_dataset` is required"):
        kind(str(checkpoint(**SMALL)), length_reward, kind.config_class("out", use_cpu=True, bf16=False))


REFUSED = {
    "no reward functions": ({"rewards": None}, ValueError, "No reward source provided"),
    "weights": ({"config": {"reward_weights": [1.0, 2.0]}}, ValueError, r"Number of reward weights \(2\) must match"),
    "tokenizers": (
        {"reward_processing_classes": [None, None]}, ValueError, r"The number of reward processing classes \(2\)"),
    "no function": ({"rewards": 3}, TypeError, "reward_funcs must be functions, or .*, got a int"),
    "images": (
        {"train": table().add_column("image", [[0]] * 8)}, ValueError, "contains 'image' or 'images' keys"),
    "no prompts": (
        {"train": table().rename_column("prompt", "text")}, KeyError,
        "train_dataset must have the column 'prompt', got .'text'.*rename_column",
    ),
    "a stream without an end": (
        {"train": table().to_iterable_dataset(), "config": {"max_steps": -1}}, ValueError, "max_steps must be set"),
    "a stream in batches of the first process": (
        {"eval_dataset": table().to_iterable_dataset(), "config": {"accelerator_config": {"dispatch_batches": True}}},
        ValueError, "Iterable datasets require `dispatch_batches=False`"),
    "reference without beta": (
        {"config": {"sync_ref_model": True, "beta": 0.0}}, ValueError, "nothing to synchronize"),
    "group": ({"config": {"per_device_train_batch_size": 6}}, ValueError, "must be divisible by num_generations"),
    "tools": ({"tools": [length_reward]}, Exception, "tools"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("max_time", 2.5, "has max_time=2.5, which .*set model.generation_config.max_time = None and pass the model"),
        ("num_return_sequences", 2, "has num_return_sequences=2, which .*model.generation_config.num_return_sequences"),
        ("num_beam_groups", 2, "num_beam_groups=2 is not in this release"),
    ],
)
def test_a_generation_config_that_completions_cannot_follow(name, value, text, make, checkpoint):
    """Raised at construction, unless generation_kwargs overrides the value."""
    model = trl_jax.AutoModelForCausalLM.from_pretrained(checkpoint(**SMALL))
    setattr(model.generation_config, name, value)
    with pytest.raises(ValueError, match=text):
        make(model=model)
    if name != "max_time":
        make(model=model, config={"generation_kwargs": {name: 1}})


@pytest.mark.parametrize("config", [None, {"dispatch_batches": False}, AcceleratorConfig()])
def test_a_stream_of_prompts_with_what_transformers_leaves_in_the_config(make, monkeypatch, config):
    """transformers makes an AcceleratorConfig only if accelerate is installed."""
    monkeypatch.setattr("transformers.training_args.is_accelerate_available", lambda *versions: False)
    trainer = make(train=table().to_iterable_dataset(), config={"accelerator_config": config})
    assert type(trainer.args.accelerator_config) is type(config)
    assert not accelerator_options(trainer.args)["dispatch_batches"]


GIVEN = ("prompts", "completions", "trainer_state", "log_extra", "log_metric")


@BOTH
@pytest.mark.parametrize("column", GIVEN)
def test_a_column_with_the_name_of_what_reward_functions_are_given(kind, column, make, monkeypatch):
    """The error names the column and is raised before weights are read, also for a stream. Columns that are dropped may
    have any name."""
    rows = table().add_column(column, ["theirs"] * 8)
    make(kind=kind, train=rows, config={"remove_unused_columns": True})
    monkeypatch.setattr("trl_jax.trainer.base_trainer.model_loading.load_policy", None)
    words = f"has the column '{column}', .* would get multiple values for keyword argument '{column}'"
    for train in (rows, IterableDataset.from_generator(lambda: iter(rows.to_list()))):
        with pytest.raises(ValueError, match="train_dataset " + words):
            make(kind=kind, train=train)
    with pytest.raises(ValueError, match="eval_dataset " + words):
        make(kind=kind, eval_dataset=rows)


@only_thorough
def test_a_metric_of_the_scripts_does_not_mix_with_one_of_the_trainers(make):
    """A user's metric with the name of a logged number does not change that number."""
    config = {"beta": 0.1, "max_steps": 2, "shuffle_dataset": False}
    first = make(config=config)
    first.train()
    names = [name for name in first.state.log_history[0] if name != "step"]

    def judge(completions, log_metric, **columns):
        for name in names:
            log_metric(name, 1e6)
        return length_reward(completions)

    judge.__name__ = "length_reward"
    second = make(judge, config=config)
    second.train()
    for own, other in zip(first.state.log_history[:2], second.state.log_history[:2], strict=True):
        assert timeless(other) == timeless(own) | {f"{name}_2": 1e6 for name in names}


NEW = ["<new0>", "<new1>"]


@BOTH
def test_prompts_with_tokens_that_the_model_does_not_embed(kind, make, checkpoint):
    words = AutoTokenizer.from_pretrained(checkpoint(**SMALL))
    first = trl_jax.AutoModelForCausalLM.from_pretrained(checkpoint(**SMALL)).vocab_size
    words.add_tokens([f"<filler{number}>" for number in range(first - len(words))])
    words.add_tokens(NEW)
    rows = Dataset.from_list([{"prompt": f"{NEW[1]} What?", "answer": "a"}] * 8)
    text = rf"^The prompt '<new1> What\?', position 0: token id {first + 1} is outside .*\(vocab_size={first}\)"
    with pytest.raises(ValueError, match=text):
        make(kind=kind, train=rows, processing_class=words).train()


@pytest.mark.parametrize("name", REFUSED)
def test_refused_at_construction(name, make):
    given, error, text = REFUSED[name]
    with pytest.raises(error, match=text):
        make(**given)


def test_a_reference_of_an_adapter_cannot_follow(make):
    config = {"sync_ref_model": True, "beta": 0.1}
    with pytest.raises(NotImplementedError, match="sync_ref_model=True` while using a PEFT model"):
        make(config=config, peft_config=trl_jax.LoraConfig(r=2))


@BOTH
def test_processes_without_prompts_of_their_own_are_refused(kind, make, monkeypatch):
    monkeypatch.setattr("trl_jax.trainer.online.several", lambda: True)
    monkeypatch.setattr("trl_jax.trainer.online.jax.process_count", lambda: 2)
    with pytest.raises(ValueError, match=rf"{kind.__name__} divides its prompts over 1 devices.*mesh_shape='fsdp:2'"):
        make(kind=kind)


def test_vllm_is_told_of_in_one_line(make, recwarn, caplog):
    make(config={"use_vllm": True})
    told = [str(w.message) for w in recwarn if "use_vllm" in str(w.message)]
    told += [record.getMessage() for record in caplog.records if "use_vllm" in record.getMessage()]
    assert len(told) == 1 and "No vLLM server is contacted" in told[0] and "\n" not in told[0]


# Rewards


def test_rewards_of_all_kinds_in_one_run(make, checkpoint, tmp_path):
    folder = checkpoint(**FACTS, seed=3)
    loaded = trl_jax.AutoModelForSequenceClassification.from_pretrained(str(folder))
    running = []

    async def slow(completions, **columns):
        running.append("begun")
        await asyncio.sleep(0.01)
        assert running.count("begun") == 2  # both run concurrently
        return [0.5] * len(completions)

    async def slower(completions, **columns):
        running.append("begun")
        await asyncio.sleep(0.02)
        return [None] * len(completions)

    trainer = make([str(folder), loaded, slow, slower, vowels, lambda completions, **columns: [1.0] * len(completions)])
    logs, name = trained(trainer), folder.name
    assert trainer.reward_func_names[2:5] == ["slow", "slower", "vowels"]
    first, second = trainer.reward_func_names[:2]
    assert first == name and second != first and second.startswith(name)
    assert logs[f"rewards/{first}/mean"] == pytest.approx(logs[f"rewards/{second}/mean"])
    assert logs[f"rewards/{first}/std"] > 0
    assert logs["rewards/slow/mean"] == 0.5 and logs["rewards/slower/mean"] is None
    assert np.isfinite(logs["loss"]) and logs["reward"] > 1


@BOTH
def test_where_no_function_applies_nothing_is_learned_and_it_is_told(kind, make, caplog):
    def never(completions, **columns):
        return [None] * len(completions)

    with caplog.at_level(logging.INFO):
        logs = trained(make(never, kind, config={"beta": 0.0}))
    assert "All reward functions returned None for the following kwargs" in caplog.text
    assert caplog.text.count("Compiling the generation: the first one takes longer than the others.") == 1
    assert (logs["loss"], logs["grad_norm"], logs["rewards/never/mean"]) == (0.0, 0.0, None)


def test_functions_get_columns_and_the_state(make):
    given = {}

    def look(prompts, completions, completion_ids, answer, trainer_state, **others):
        given.update(prompts=prompts, answer=answer, step=trainer_state.global_step, others=sorted(others))
        return list(map(float, map(len, completion_ids)))

    logs = trained(make(look, config={"shuffle_dataset": False}))
    rows = [row for row in prompt_rows(2) for _ in range(4)]
    assert given["prompts"] == [row["prompt"] for row in rows] and given["answer"] == [row["answer"] for row in rows]
    assert given["step"] == 0 and given["others"] == ["log_extra", "log_metric"]
    assert logs["rewards/look/mean"] == logs["completions/mean_length"]


class Curriculum(TrainerCallback):
    """Counts steps for a reward function, as a curriculum does."""

    def __init__(self):
        self.begun, self.rewarded, self.modes = [], [], []

    def on_step_begin(self, args, state, control, model, **others):
        self.begun.append(state.global_step)
        self.modes.append(model.training)

    def reward(self, completions, **columns):
        self.rewarded.append(self.begun[-1] if self.begun else None)
        return [1.0 * len(text) for text in completions]


def test_a_step_begins_before_it_generates(make):
    curriculum = Curriculum()
    config = {"max_steps": 3, "num_iterations": 2, "logging_steps": 1}
    make(curriculum.reward, config=config, callbacks=[curriculum]).train()
    assert curriculum.begun == [0, 1, 2] and curriculum.rewarded == [0, 2]


class EvaluatesTwice(GRPOTrainer):
    def evaluate(self, *args, **kwargs):
        metrics = super().evaluate(*args, **kwargs)
        self.log({"eval_noted": 1.0})
        return metrics


def test_a_log_after_an_evaluation_leaves_the_metrics_of_training(make):
    curriculum = Curriculum()
    config = {"max_steps": 3, "logging_steps": 3, "eval_strategy": "steps", "eval_steps": 2}
    trainer = make(kind=EvaluatesTwice, config=config, eval_dataset=table(2), callbacks=[curriculum])
    trainer.train()
    noted, logged = (next(log for log in trainer.state.log_history if key in log) for key in ("eval_noted", "loss"))
    assert noted.keys() == {"eval_noted", "epoch", "step"}
    assert logged["reward"] is not None
    assert curriculum.modes == [False, True, False]  # as in TRL: set after this event


def test_a_rollout_func_writes_in_the_generators_place(make):
    given, seen = [], []

    def rollout(prompts, trainer):
        given.append((prompts, trainer.num_generations, trainer.model is not None))
        ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
        completions = [[5, 6, 7, 8 + number % 4] for number in range(len(prompts))]
        sampled = trainer.model.generate(np.asarray([ids[0]]), max_new_tokens=2, do_sample=False)
        assert sampled.shape == (1, len(ids[0]) + 2)
        masks = [[1, 0, 0, 1]] * len(prompts)
        extra = {"score": [float(number % 4) for number in range(len(prompts))], "kind": "made"}
        return {"prompt_ids": ids, "completion_ids": completions, "logprobs": None, "env_mask": masks, **extra}

    def look(completion_ids, score, kind, **columns):
        seen.append((completion_ids, kind))
        return score

    logs = trained(make(look, rollout_func=rollout, config={"shuffle_dataset": False, "beta": 0.0}))
    assert given == [([row["prompt"] for row in prompt_rows(2) for _ in range(4)], 4, True)]
    assert seen == [([[5, 6, 7, 8 + number % 4] for number in range(8)], ["made"] * 8)]
    assert logs["rewards/look/mean"] == 1.5 and logs["completions/mean_length"] == 2.0
    assert logs["completions/clipped_ratio"] == 1.0 and logs["grad_norm"] > 0


def test_nothing_is_learned_from_tokens_that_are_not_the_models(make, tmp_path):
    """Masked tokens at the start of a completion train like the end of a prompt: not at all.

    The completions are used for a second epoch, whose old log-probabilities are cached. Uses SGD, because rounding
    differs between the layouts and Adam would amplify it where gradients are almost zero.
    """

    def run(folder, moved):
        def rollout(prompts, trainer):
            ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
            own, tail = [5, 6, 7], [[8 + number % 4, 9] for number in range(len(prompts))]
            masks = [[1, 1] if moved else [0, 0, 0, 1, 1]] * len(prompts)
            ids = [one + own for one in ids] if moved else ids
            completions = tail if moved else [own + one for one in tail]
            made = {"prompt_ids": ids, "completion_ids": completions, "logprobs": None, "env_mask": masks}
            return made | {"score": [float(number % 4) for number in range(len(prompts))]}

        config = {"num_iterations": 2, "max_steps": 2, "beta": 0.1, "optim": "sgd", "learning_rate": 0.1}
        trainer = make(lambda completions, score, **columns: score, rollout_func=rollout, config=config)
        trainer.train()
        trainer.save_model(str(folder))
        return read_weights(folder)

    moved, masked = run(tmp_path / "moved", True), run(tmp_path / "masked", False)
    for name, values in moved.items():
        np.testing.assert_allclose(values, masked[name], rtol=0, atol=1e-6, err_msg=name)


FALSE_ROLLOUTS = {
    "no logprobs": ({"logprobs": ...}, r"must return keys \['logprobs'\] in its output dict"),
    "too few": ({"completion_ids": [[5]]}, "rollout_func got 8 prompts but returned 1 completion_ids"),
    "empty": (
        {"completion_ids": [[5], []] * 4},
        r"completion_ids\[1\]: must be a list of at least one token id, got \[\]",
    ),
    "mask": ({"env_mask": [[1]] * 8}, "env_mask without exactly one number per token"),
    "mask of another length": ({"env_mask": [[1, 1]] * 7}, "env_mask without exactly one number per token"),
    "mask of texts": ({"env_mask": [["0", "1"]] * 8}, r"env_mask\[0\] must be 0 or 1 for each token, got '0'"),
    "mask of fractions": (
        {"env_mask": [[1, 1]] * 7 + [[0.5, 1]]},
        r"env_mask\[7\] must be 0 or 1 for each token, got 0.5",
    ),
    "mask of other numbers": (
        {"env_mask": np.full((8, 2), 2)},
        r"env_mask\[0\] must be 0 or 1 for each token, got .*2",
    ),
    "mask of nothing": ({"env_mask": [[None, 1]] * 8}, r"env_mask\[0\] must be 0 or 1 for each token, got None"),
    "mask of no lists": ({"env_mask": [1] * 8}, r"must return a list as env_mask\[0\], got 1"),
    **{f"the key {key}": ({key: ["a"] * 8}, f"rollout_func returned the key '{key}', .* would get") for key in GIVEN},
    "one text": ({"completion_ids": "abcdefgh"}, "must return a list as completion_ids, got 'abcdefgh'"),
    "one number": ({"completion_ids": 5}, "must return a list as completion_ids, got 5"),
}
FALSE_IDS = {
    "too large": ([5, 10], "position 1: token id 10 is outside the model's vocabulary (vocab_size=10)"),
    "far too large": ([5, 2**70], f"position 1: token id {2**70} is outside"),
    "negative": ([-1, 5], "position 0: token id -1 is outside"),
    "unsigned": (np.asarray([2**63], np.uint64), f"position 0: token id {2**63} is outside"),
    "floats": ([5.0, 6.0], "position 0: must be a token id from 0 to 9, got 5.0 (float)."),
    "an array of floats": (np.ones(2), "position 0: must be a token id from 0 to 9, got 1.0 (float)"),
    "texts": (["5", "6"], "position 0: must be a token id from 0 to 9, got '5' (str)"),
    "a text among ints": ([5, "6"], "position 1: must be a token id from 0 to 9, got '6' (str)"),
    "bools": ([True, False], "position 0: must be a token id from 0 to 9, got True (bool)"),
    "a bool among ints": ([5, True], "position 1: must be a token id from 0 to 9, got True (bool)"),
    "an array of bools": (np.ones(2, bool), "position 0: must be a token id from 0 to 9, got True (bool)"),
    "None": ([5, None], "position 1: must be a token id from 0 to 9, got None (NoneType)"),
    "lists": ([[5], [6]], "must be a list of at least one token id, got [[5], [6]]"),
    "lists of different lengths": ([[5], [6, 7]], "must be a list of at least one token id, got [[5], [6, 7]]"),
    "a number": (5, "must be a list of at least one token id, got 5"),
    "nothing": (None, "must be a list of at least one token id, got None"),
}


@pytest.mark.parametrize("name", FALSE_ROLLOUTS)
def test_what_a_rollout_func_returns_is_checked(name):
    changed, text = FALSE_ROLLOUTS[name]
    output = {"prompt_ids": [[3]] * 8, "completion_ids": [[5, 6]] * 8, "logprobs": None} | changed
    output = {key: value for key, value in output.items() if value is not ...}
    with pytest.raises(ValueError, match=text):
        call_rollout_func(lambda prompts: output, ["a"] * 8, 10)


@pytest.mark.parametrize("name", FALSE_IDS)
@pytest.mark.parametrize("key", ["prompt_ids", "completion_ids"])
def test_ids_of_a_rollout_func_are_checked(key, name):
    ids, text = FALSE_IDS[name]
    output = {"prompt_ids": [[3]] * 2, "completion_ids": [[5, 6]] * 2, "logprobs": None}
    output[key] = [[5], ids]
    with pytest.raises(ValueError, match=re.escape(f"rollout_func's {key}[1]") + "(, |: )" + re.escape(text)):
        call_rollout_func(lambda prompts: output, ["a"] * 2, 10)


@pytest.mark.parametrize("given", [list, tuple, np.asarray, torch.tensor, jnp.asarray])
def test_ids_of_a_rollout_func_come_in_any_list(given):
    output = {"prompt_ids": given([[3], [4]]), "completion_ids": [given([5, 9]), given([0])], "logprobs": None}
    made = call_rollout_func(lambda prompts: output | {"env_mask": [given([0, 1]), given([1.0])]}, ["a"] * 2, 10)
    assert [own.tolist() for own in made.prompt_ids] == [[3], [4]]
    assert [own.tolist() for own in made.completion_ids] == [[5, 9], [0]] and made.completion_ids[0].dtype == np.int32
    assert [own.tolist() for own in made.by_model] == [[False, True], [True]]


def test_a_rollout_func_returns_a_dict():
    with pytest.raises(TypeError, match=r"^rollout_func must return a dict with prompt_ids, completion_ids"):
        call_rollout_func(lambda prompts: [], ["a"], 10)


def test_what_a_rollout_func_raises_is_named(make):
    def breaks(prompts, trainer):
        raise OSError("no server")

    with pytest.raises(OSError, match="^no server") as error:
        make(rollout_func=breaks).train()
    assert error.value.__notes__[0].startswith("Raised by rollout_func for 8 completions, the first with ")


def test_conversations(make):
    seen = []

    def look(prompts, completions, **columns):
        seen.extend(completions)
        return [float(len(own[0]["content"])) for own in completions]

    trained(make(look, model=CHAT, train=table(kind="chat")))
    assert len(seen) == 8 and all(own[0]["role"] == "assistant" for own in seen)


def test_long_prompts_are_cut_where_max_prompt_length_says_so(make, checkpoint):
    words = AutoTokenizer.from_pretrained(checkpoint(**SMALL))
    logs = {}
    for length in (None, 3):
        if length is None:
            trainer = make()
        else:
            with pytest.warns(FutureWarning, match="max_prompt_length=3 is deprecated"):
                trainer = make(config={"max_prompt_length": length})
        logs[length] = trained(trainer)
    written = {length: log["num_tokens"] - 8 * log["completions/mean_length"] for length, log in logs.items()}
    shortest = min(len(words(row["prompt"])["input_ids"]) for row in prompt_rows(8))
    assert written[3] == 8 * 3 and written[None] >= 8 * shortest > 8 * 3


# The model, and what a run saves


@only_thorough  # GRPO's curve with an adapter compares what is saved
def test_lora_trains_the_adapter_alone(make, checkpoint, tmp_path):
    trainer = make(peft_config=trl_jax.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]), config={"beta": 0.1})
    assert trainer.ref_model is None
    logs = trained(trainer)
    assert logs["kl"] == pytest.approx(0, abs=1e-6) and logs["grad_norm"] > 0
    trainer.save_model(str(tmp_path / "saved"))
    saved = read_weights(tmp_path / "saved")
    assert all("lora_" in name for name in saved)
    assert any(np.abs(array).max() > 0 for name, array in saved.items() if "lora_B" in name)


def test_a_model_object_and_a_tokenizer_are_taken(make, checkpoint):
    folder = str(checkpoint(**SMALL))
    words = AutoTokenizer.from_pretrained(folder, padding_side="right")
    trainer = make(model=trl_jax.AutoModelForCausalLM.from_pretrained(folder), processing_class=words)
    logs = trained(trainer)
    assert trainer.processing_class is words and words.padding_side == "right"
    other = trained(make())
    assert {k: v for k, v in logs.items() if "time" not in k} == {k: v for k, v in other.items() if "time" not in k}


def test_completions_are_written(make, tmp_path):
    def noting(completions, log_extra, **columns):
        log_extra("letters", [len(text) for text in completions])
        return list(map(float, map(len, completions)))

    config = {"log_completions": True, "num_completions_to_print": 1, "max_steps": 2}
    trainer = make(noting, config=config)
    trained(trainer)
    files = sorted((tmp_path / "out" / "completions").glob("*.parquet"))
    assert [file.name for file in files] == ["completions_00001.parquet", "completions_00002.parquet"]
    found = pd.read_parquet(files[0])
    assert list(found) == ["step", "prompt", "completion", "noting", "letters", "advantage"] and len(found) == 8
    assert (found["noting"] == found["letters"]).all() and (found["step"] == 1).all()
    assert abs(found["advantage"]).max() > 0.1
    kept, last = trainer._logs, pd.read_parquet(files[1])
    assert list(kept["prompt"]) == last["prompt"].tolist() and list(kept["completion"]) == last["completion"].tolist()
    assert list(kept["rewards"]["noting"]) == list(kept["extra"]["letters"]) == last["noting"].tolist()
    assert list(kept["advantages"]) == last["advantage"].tolist() and not kept["images"]
    kept["prompt"].clear()
    assert len(trainer._logs["prompt"]) == trainer._logs["prompt"].maxlen == 8
    with pytest.raises(AttributeError, match="this trainer does not keep. Set log_completions=True"):
        print(make()._logs)


@BOTH
def test_evaluate_predict_and_several_sets(kind, make):
    trainer = make(kind=kind, eval_dataset={"a": table(2), "b": table(3)}, config={"num_generations_eval": 2})
    found = trainer.evaluate()
    assert {"eval_a_reward", "eval_b_reward", "eval_a_loss", "eval_a_completions/mean_length"} <= found.keys()
    assert found["eval_a_reward"] != found["eval_b_reward"]
    one = trainer.evaluate(table(2))
    assert {"eval_loss", "eval_reward", "eval_rewards/length_reward/mean"} <= one.keys()
    out = trainer.predict(table(2))
    assert out.predictions is None and np.isfinite(out.metrics["test_reward"])


def test_an_evaluation_without_a_reward_or_a_row(make):
    def of_training(completions, trainer_state, **columns):
        return [None] * 4 if len(completions) == 4 else [float(len(text)) for text in completions]

    config = {
        "max_steps": 2, "eval_strategy": "steps", "eval_steps": 1, "num_generations_eval": 2,
        "per_device_eval_batch_size": 4, "metric_for_best_model": "eval_reward", "greater_is_better": True,
        "lr_scheduler_type": "reduce_lr_on_plateau",
    }  # fmt: skip
    trainer = make(of_training, eval_dataset=table(2), config=config)
    trainer.train()
    evaluations = [log["eval_reward"] for log in trainer.state.log_history if "eval_reward" in log]
    assert evaluations == [None, None] and trainer.state.best_metric == float("-inf")  # as at the start
    with pytest.raises(ValueError, match="^The evaluation set has no rows"):
        trainer.evaluate(table(2).to_iterable_dataset().take(0))


def test_the_best_model_by_reward(make):
    config = {
        "max_steps": 3, "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1,
        "metric_for_best_model": "eval_reward", "load_best_model_at_end": True,
    }  # fmt: skip
    trainer = make(eval_dataset=table(4), config=config)
    trainer.train()
    found = [log["eval_reward"] for log in trainer.state.log_history if "eval_reward" in log]
    assert len(found) == 3 and trainer.state.best_metric == max(found)


def test_prompts_in_their_order(make):
    seen = []

    def look(prompts, **columns):
        seen.extend(prompts[::4])
        return [0.0] * len(prompts)

    trained(make(look, config={"shuffle_dataset": False, "max_steps": 4}))
    assert seen == [row["prompt"] for row in prompt_rows(8)]


@pytest.mark.parametrize("removed", [False, True])
def test_reward_functions_get_the_other_columns_unless_they_are_removed(removed, make):
    seen = []

    def reward(completions, **given):
        seen.append("answer" in given)
        return [0.0] * len(completions)

    make(reward, config={"remove_unused_columns": removed}).train()
    assert seen == [not removed]


@only_thorough
@pytest.mark.parametrize("kind", [GRPOTrainer, thorough(RLOOTrainer)])
def test_completions_are_judged_while_their_log_probabilities_are_computed(kind, make, monkeypatch):
    begun, judged, call = threading.Event(), [], CompletionLogps.__call__

    def logps(self, *given):
        begun.set()
        assert judged or judging.wait(20)
        return call(self, *given)

    def judge(completions, **columns):
        judging.set()
        assert begun.wait(20) and threading.current_thread() is threading.main_thread()
        judged.append(len(completions))
        return length_reward(completions)

    judging = threading.Event()
    monkeypatch.setattr(CompletionLogps, "__call__", logps)
    trainer = make(judge, kind=kind, config={"beta": 0.1})
    trained(trainer)
    assert judged and all(math.isfinite(log["kl"]) for log in trainer.state.log_history if "kl" in log)


def test_a_function_that_fails_leaves_no_thread(make):
    def judge(**columns):
        raise RuntimeError("no judge today")

    with pytest.raises(RuntimeError, match="no judge today"):
        make(judge, config={"beta": 0.1}).train()
    for thread in threading.enumerate():
        if thread.name.startswith("trl_jax-logps"):
            thread.join(20)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("trl_jax-logps")]


@only_thorough
def test_a_script_reads_the_coefficient_and_the_tokenizers_of_reward_models(make, checkpoint):
    config = {"entropy_coef": 0.01, "use_adaptive_entropy": True, "entropy_target": 100.0, "max_steps": 2}
    trainer = make([length_reward, str(checkpoint(**FACTS))], config=config)
    assert trainer.entropy_coef == 0.01
    trainer.train()
    assert trainer.entropy_coef == pytest.approx(0.01 + 2 * 0.005)
    function, model = trainer.reward_processing_classes
    assert function is None and model.pad_token is not None
    assert make().entropy_coef == 0.0


@pytest.mark.parametrize("kind", [GRPOTrainer, thorough(RLOOTrainer)])
def test_prompts_of_a_stream_are_those_of_the_table(kind, make):
    config = {"shuffle_dataset": False, "max_steps": 6, "num_iterations": 2, "learning_rate": 1e-3}
    rows = table(5), table(5).to_iterable_dataset()
    runs = [make(kind=kind, train=train, config=config, eval_dataset=table(2)) for train in rows]
    assert runs[1].train_dataset is rows[1] and runs[1].args.accelerator_config.dispatch_batches is False
    for one in runs:
        one.train()
    wanted, found = ([timeless(log) for log in one.state.log_history[:-1]] for one in runs)
    for a, b in zip(wanted, found, strict=True):
        assert {**a, "epoch": 0} == {**b, "epoch": 0}  # the epoch of a stream is a fraction of max_steps
    stream = {"rows": table(2).to_iterable_dataset(), "others": table(2).to_iterable_dataset()}
    metrics = runs[1].evaluate(stream)
    assert {"eval_rows_reward", "eval_others_reward"} <= metrics.keys()


def test_the_shards_of_a_stream_are_shuffled_as_in_trl(checkpoint, tmp_path):
    trl, seen = pytest.importorskip("trl"), {}
    for package in (trl, trl_jax):
        read = seen[package] = []

        def look(prompts, completions, read=read, **columns):
            read.append(prompts)
            return length_reward(completions)

        args = package.GRPOConfig(str(tmp_path / package.__name__), **BASE | CONFIG | {"max_steps": 2})
        stream, rows = (table(n).to_iterable_dataset(num_shards=2) for n in (8, 4))
        trainer = package.GRPOTrainer(str(checkpoint(**SMALL)), look, args, stream, eval_dataset=rows)
        trainer.train()
        trainer.evaluate()
    assert seen[trl_jax] == seen[trl] and len(seen[trl]) == 4


def test_the_row_numbers_of_a_shuffled_stream_say_so(make):
    rows = IterableDataset.from_generator(lambda: iter([*table(1).to_list(), *[{"prompt": ""}] * 7]))
    with pytest.raises(ValueError, match=r"^Row \d of train_dataset, shuffled, has an empty prompt"):
        make(train=rows).train()


def test_a_later_row_of_a_stream_is_checked_when_it_comes(make):
    rows = IterableDataset.from_generator(lambda: iter([*table(4).to_list(), {"prompt": ""}, *table(3).to_list()]))
    with pytest.raises(ValueError, match="^Row 4 of train_dataset has an empty prompt"):
        make(train=rows, config={"shuffle_dataset": False, "max_steps": 8}).train()


def test_a_stream_with_too_few_prompts_is_told(make):
    with pytest.raises(
        ValueError, match="train_dataset, a stream, must have at least the 2 prompts of a generation .*, got 1"
    ):
        make(train=table(1).to_iterable_dataset()).train()
