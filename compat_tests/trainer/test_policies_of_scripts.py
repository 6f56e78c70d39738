"""Uses of GRPOTrainer and RLOOTrainer that the recorded cases lack, against TRL; and their errors."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback

import trl_jax
from compat_tests import shared_programs
from compat_tests.effort import thorough, usual, usually
from compat_tests.parity import grpo_cases
from compat_tests.parity.dpo_cases import CHAT, SMALL
from compat_tests.parity.grpo_cases import EVALUATED, length_reward, prompt_rows
from compat_tests.parity.marks import timeless
from compat_tests.parity.reference import BASE
from compat_tests.parity.test_grpo_curve import assert_same, assert_same_runs
from compat_tests.tiny import tiny_tokenizer
from trl_jax.data.prompts import check_prompts, completion_texts, prompt_ids
from trl_jax.trainer.overrides import check_generate

STEPS = grpo_cases.STEPS | {"num_generations": 4, "max_steps": 2}
# Both share the code, and RLOO would compile another program.
BOTH = pytest.mark.parametrize("kind", ["GRPO", thorough("RLOO")])


@pytest.fixture
def make(checkpoint, tmp_path):
    def made(kind="GRPO", *, model=SMALL, rows=None, rewards=length_reward, **config):
        args = getattr(trl_jax, f"{kind}Config")(str(tmp_path / "out"), **BASE | STEPS | config)
        rows = Dataset.from_list(prompt_rows(8) if rows is None else rows)
        return getattr(trl_jax, f"{kind}Trainer")(str(checkpoint(**model)), rewards, args, rows)

    return made


# Compared with TRL

RUNS = {
    # None means the value of the model's generation_config, or transformers' default: top_k is 50 then.
    "unset": {"top_k": None, "top_p": None, "repetition_penalty": None},
    "the likeliest": {"top_p": 0.0},
    "idle": {"generation_kwargs": {"num_return_sequences": 1, "num_beams": 1, "use_cache": True, "top_k": 9}},
    "beams": {"generation_kwargs": {"do_sample": True, "top_k": 50, "num_beams": 2, "length_penalty": -0.1}},
    "renormalized": {"generation_kwargs": {"renormalize_logits": True}, "top_p": 0.7},
    # Checks where the bonus' coefficient comes among the keys, and that an evaluation's loss includes the bonus.
    "bonus": EVALUATED | {"entropy_coef": 0.01, "beta": 0.1, "per_device_eval_batch_size": 16},
    "adaptive bonus": EVALUATED | {
        "entropy_coef": 0.01, "use_adaptive_entropy": True, "entropy_target": 5.7, "eval_steps": 1, "max_steps": 3,
        "per_device_eval_batch_size": 16,
    },
    # The tokenizer's EOS (id 1) ends a completion, although generate() goes on.
    "other ends": {
        "generation_kwargs": {"eos_token_id": [300], "suppress_tokens": [300], "sequence_bias": [[[1], 4.0]]},
        "mask_truncated_completions": True,
    },
    # Two generations per step; the first one determines the order of the keys.
    "twice a step": {"gradient_accumulation_steps": 2, "steps_per_generation": 1},
}  # fmt: skip


# By default, the curve of `entropy_bonus` is covered by the one with the adaptive bonus.
@usual("the likeliest", "idle", "beams", "bonus", "other ends")
@pytest.mark.parametrize("name", usually("adaptive bonus".__ne__, RUNS))
def test_runs_are_trls(name, checkpoint, tmp_path):
    trl, config = pytest.importorskip("trl"), STEPS | RUNS[name]
    if "eval_strategy" in config:
        config["eval_rows"] = prompt_rows(4)
    folder, rows = checkpoint(**SMALL), prompt_rows(20)
    ours, theirs = (
        grpo_cases.run(package, "GRPO", folder, rows, tmp_path / package.__name__, **config)
        for package in (trl_jax, trl)
    )
    assert_same_runs(ours, theirs, same_order=True)
    folders = ours.folder, theirs.folder
    names = "tokenizer_config.json", "generation_config.json", "config.json"
    for mine, other in ([json.loads((one / name).read_text()) for one in folders] for name in names):
        assert mine == other


class Shaped:
    """A mixin for TRL's trainer or ours: methods written for tensors, in a script that imports torch."""

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        import torch

        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        self.longest = torch.tensor([len(ids) for ids in completion_ids_list], device=self.accelerator.device).max()
        return rewards.clamp(max=3.0).to(self.accelerator.device)

    def _generate_and_score_completions(self, inputs):
        import torch

        outputs = super()._generate_and_score_completions(inputs)
        lengths = outputs["completion_mask"].sum(dim=1).float()
        groups = lengths.view(-1, self.num_generations)
        shaped = (groups - groups.mean(dim=1, keepdim=True)).view(-1).to(outputs["advantages"])
        if "num_items_in_batch" in outputs:  # only GRPO's loss divides by a number of tokens, which outputs may change
            ends = torch.zeros_like(outputs["completion_ids"]).scatter_(1, (lengths.long() - 1).unsqueeze(1), 1)
            outputs["completion_mask"] = outputs["completion_mask"] * (1 - ends)
            outputs["num_items_in_batch"] = outputs["num_items_in_batch"] + self.state.global_step
        outputs["advantages"] = outputs["advantages"] + 0.1 * shaped + 0.01 * outputs["completion_ids"][:, 0] / 300
        self._logs["advantages"][-1] = 7.0  # even without log_completions
        return outputs

    def log(self, logs, start_time=None):
        mode = "train" if self.model.training else "eval"
        self._metrics[mode]["longest"].append(float(self.longest))
        self._metrics[mode]["kept"].append(sum(map(abs, self._logs["advantages"])))
        return super().log(logs, start_time)


@pytest.mark.parametrize("kind", ["GRPO", thorough("RLOO")])
def test_methods_written_in_torch_are_given_tensors_as_in_trl(kind, checkpoint, tmp_path, monkeypatch):
    trl, config = pytest.importorskip("trl"), STEPS | {"top_k": 5, "generation_kwargs": {"eos_token_id": [300, 310]}}
    runs = []
    for package in (trl_jax, trl):
        name = f"{kind}Trainer"
        monkeypatch.setattr(package, name, type(name, (Shaped, getattr(package, name)), {}))
        runs.append(
            grpo_cases.run(package, kind, checkpoint(**SMALL), prompt_rows(8), tmp_path / package.__name__, **config)
        )
    assert_same_runs(*runs, same_order=True)


# Ends of completions


@pytest.mark.parametrize("kind", ["GRPO", thorough("RLOO")])
def test_a_completion_ends_where_generation_kwargs_say_so(kind, make):
    """TRL keeps generating afterwards: the padding up to the longest completion counts as this one's tokens."""
    seen = []

    def look(completion_ids, **columns):
        seen.extend(completion_ids)
        return [0.0] * len(completion_ids)

    ends = [300, 310, 320, 330, 340, 350]
    make(kind, rewards=look, generation_kwargs={"eos_token_id": ends}, max_completion_length=20).train()
    assert any(own[-1] in ends for own in seen) and not any({0, *ends} & {*own[:-1]} for own in seen)
    trainer = make(kind, rewards=look, generation_kwargs={"eos_token_id": 300})
    own = trainer.processing_class
    assert trainer.parts.rollout_steps.rollout.eos_token_ids == {300, own.pad_token_id, own.eos_token_id}
    trainer = make(kind, generation_kwargs={"eos_token_id": None})
    assert trainer.processing_class.eos_token_id in trainer.parts.rollout_steps.rollout.eos_token_ids


@pytest.mark.parametrize("kind", ["GRPO", thorough("RLOO")])
def test_a_completion_ends_with_a_stop_string(kind, make, checkpoint, tmp_path):
    """As TRL would if it passed transformers the tokenizer. The completion counts as finished, and its padding does not
    count."""
    trl = pytest.importorskip("trl")
    strings, seen = ["e", "ing"], {trl: [], trl_jax: []}
    config = {"max_completion_length": 8, "max_steps": 1, "generation_kwargs": {"stop_strings": strings}}

    def look(package):
        def reward(completion_ids, **columns):
            seen[package] += [list(map(int, own)) for own in completion_ids]
            return [0.0] * len(completion_ids)

        return reward

    ours = make(kind, rewards=look(trl_jax), **config)
    ours.train()
    args = getattr(trl, f"{kind}Config")(str(tmp_path / "trl"), **BASE | STEPS | config)
    rows = Dataset.from_list(prompt_rows(8))
    theirs = getattr(trl, f"{kind}Trainer")(str(checkpoint(**SMALL)), look(trl), args, rows)
    own = theirs.model.generate
    theirs.model.generate = lambda *a, **k: own(*a, **k, tokenizer=theirs.processing_class)
    theirs.train()
    decode, pad = ours.processing_class.decode, ours.processing_class.pad_token_id
    for mine, other in zip(seen[trl_jax], seen[trl], strict=True):
        assert mine == other[: len(mine)] and set(other[len(mine) :]) <= {pad}
    ended = [any(decode(row).endswith(string) for string in strings) for row in seen[trl_jax]]
    cut = [len(row) == 8 and not end for row, end in zip(seen[trl_jax], ended, strict=True)]
    assert sum(ended) > 1 and any(cut)
    assert ours.state.log_history[0]["completions/clipped_ratio"] == pytest.approx(np.mean(cut))


def test_top_k_of_a_script_for_vllm(make):
    logs = []
    for top_k in (-1, 0, 5):
        trainer = make(top_k=top_k, use_vllm=True, max_steps=1)
        trainer.train()
        logs.append([trainer.state.log_history[0][name] for name in ("reward", "grad_norm", "num_tokens")])
    assert logs[0] == logs[1] != logs[2]


# Attributes


@BOTH
def test_a_script_reads_the_arguments_on_the_trainer(kind, checkpoint, tmp_path):
    trl, found = pytest.importorskip("trl"), []
    for package in (trl, trl_jax):
        config = {"epsilon_high": 0.3, "beta": 0.1, "reward_weights": [0.5, 2.0], "chat_template_kwargs": {"a": 1}}
        args = getattr(package, f"{kind}Config")(str(tmp_path), **BASE | STEPS | config)
        rewards, rows = [length_reward, grpo_cases.vowels], Dataset.from_list(prompt_rows(8))
        found.append(getattr(package, f"{kind}Trainer")(str(checkpoint(**SMALL)), rewards, args, rows))
    theirs, ours = found
    # Except for those of vLLM and torch.
    names = {name for name, value in vars(theirs).items() if value is vars(theirs.args).get(name, ...)}
    names = {name for name in names if not name.startswith("vllm_")} - {
        "use_transformers_continuous_batching", "_train_batch_size", "deepspeed",
        "neftune_noise_alpha",
    }  # fmt: skip
    names |= {"epsilon_low", "epsilon_high", "num_generations_eval", "chat_template_kwargs"}
    assert len(names) > 15
    assert {name: getattr(ours, name) for name in names} == {name: vars(theirs)[name] for name in names}
    np.testing.assert_array_equal(ours.reward_weights, theirs.reward_weights.numpy())
    ours.temperature = 1.0  # no change
    correction = ("vllm_importance_sampling_mode", "vllm_importance_sampling_clip_max") if kind == "GRPO" else ()
    for name in ("num_generations", "temperature", "mask_truncated_completions", *correction):
        with pytest.raises(AttributeError, match=f"was set on the trainer.* in {kind}Config"):
            setattr(ours, name, 0.5)
    with pytest.raises(AttributeError, match="generation_config of .*Set generation_kwargs"):
        ours.generation_config.temperature = 0.5


def test_the_number_of_completions_that_a_script_sets_twice(checkpoint, tmp_path):
    """TRL's next generation has that many. Ours is compiled for the first number, so it stops; setting it back, as an
    evaluation of a script's own does, changes nothing."""

    class Sets(TrainerCallback):
        def on_step_end(self, args, state, control, **options):
            for number in (4, last):
                args.num_generations = trainer.num_generations = number

    args = trl_jax.GRPOConfig(str(tmp_path), **BASE | STEPS | {"max_steps": 2, "num_generations": 2})
    rows = Dataset.from_list(prompt_rows(8))
    trainer = trl_jax.GRPOTrainer(str(checkpoint(**SMALL)), length_reward, args, rows, callbacks=[Sets()])
    last = 2
    trainer.train()
    last = 4
    with pytest.raises(AttributeError, match="num_generations was set on the trainer.* in GRPOConfig"):
        trainer.train()


SET_IN_STEPS = {  # what a callback sets before each step
    "GRPO loss": [
        {
            "beta": 0.5 - 0.1 * step,
            "epsilon_low": 0.01 * step + 0.1,
            "epsilon_high": 0.02 * step + 0.1,
            "loss_type": loss_type,
        }
        for step, loss_type in enumerate(("grpo", "bnpo", "dr_grpo", "dapo"))
    ],
    "GRPO sequences": [
        {"scale_rewards": scale, "importance_sampling_level": level, "top_entropy_quantile": quantile}
        for scale, level, quantile in (("batch", "sequence", 1.0), ("batch", "token", 0.5), ("none", "token", 0.5))
    ],
    "RLOO": [{"beta": 0.1 * step, "epsilon_low": 0.01 * step, "epsilon_high": 0.02} for step in range(1, 4)],
}


@usual("GRPO loss")
@pytest.mark.parametrize("name", SET_IN_STEPS)
def test_what_a_callback_sets_counts_from_this_step_on(name, checkpoint, tmp_path):
    trl, changes, found = pytest.importorskip("trl"), SET_IN_STEPS[name], []

    class Sets(TrainerCallback):
        def on_step_begin(self, args, state, control, **options):
            for attribute, value in changes[state.global_step].items():
                setattr(trainer, attribute, value)

    for package in (trl, trl_jax):
        config = {"max_steps": len(changes), "num_iterations": 2, "beta": 0.5, "learning_rate": 1e-2}
        args = getattr(package, f"{name.split()[0]}Config")(str(tmp_path), **BASE | STEPS | config)
        rows = Dataset.from_list(prompt_rows(8))
        kind = getattr(package, f"{name.split()[0]}Trainer")
        trainer = kind(str(checkpoint(**SMALL)), length_reward, args, rows, callbacks=[Sets()])
        with shared_programs.nothing_shared():
            trainer.train()
        found.append(trainer.state.log_history)
    theirs, ours = found
    assert len(theirs) == len(ours) == len(changes) + 1
    for mine, other in zip(ours, theirs, strict=True):
        assert_same(mine, other, same_order=True)
    with pytest.raises(ValueError, match=r"trainer.beta was set to 0.0, but the run began with a reference model"):
        trainer.beta = 0.0
        trainer.train()


@BOTH
def test_weights_of_rewards_that_a_callback_sets_count_from_the_next_generation_on(kind, checkpoint, tmp_path):
    import torch

    trl, found = pytest.importorskip("trl"), []

    class Later(TrainerCallback):
        def on_step_end(self, args, state, control, **options):
            trainer.reward_weights = torch.tensor([0.0, float(state.global_step)])

    for package in (trl, trl_jax):
        args = getattr(package, f"{kind}Config")(str(tmp_path), **BASE | STEPS | {"max_steps": 3})
        rewards, rows = [length_reward, grpo_cases.vowels], Dataset.from_list(prompt_rows(8))
        trainer = getattr(package, f"{kind}Trainer")(str(checkpoint(**SMALL)), rewards, args, rows, callbacks=[Later()])
        trainer.train()
        found.append([log["reward"] for log in trainer.state.log_history if "reward" in log])
    theirs, ours = found
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    with pytest.raises(ValueError, match=r"Number of reward weights \(1\) must match"):
        trainer.reward_weights = [1.0]


def replaced(trainer):
    trainer.reward_funcs[0] = grpo_cases.vowels


def another_list(trainer):
    trainer.reward_funcs = [grpo_cases.vowels]


def other_rows(trainer):
    trainer.train_dataset = Dataset.from_list(prompt_rows(12)[8:])


def other_arguments(trainer):
    trainer.args.beta, trainer.args.reward_weights = 0.5, [3.0]
    trainer.args.learning_rate = 1e-2


def weights_in_place(trainer):
    trainer.reward_weights[0] = 3.0


def arguments_of_each_step(trainer):
    trainer.args.delta = 0.9


def arguments_between_steps(trainer):
    class Between(TrainerCallback):
        def on_step_end(self, args, state, control, **options):
            args.delta = 0.9

    trainer.add_callback(Between())


CHANGES = [
    replaced, another_list, other_rows, other_arguments, weights_in_place, arguments_of_each_step,
    arguments_between_steps,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_script_changes_before_training_counts_as_in_trl(change, checkpoint, tmp_path):
    trl, found = pytest.importorskip("trl"), []
    for package in (trl, trl_jax):
        args = package.GRPOConfig(str(tmp_path), **BASE | STEPS)
        rows = Dataset.from_list(prompt_rows(8))
        trainer = package.GRPOTrainer(str(checkpoint(**SMALL)), length_reward, args, rows)
        change(trainer)
        trainer.train()
        keys = "reward", "num_tokens", "grad_norm", "entropy", "learning_rate"
        found.append([[log[key] for key in keys] for log in trainer.state.log_history if "reward" in log])
    theirs, ours = found
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)


def test_names_of_rewards_that_a_script_sets(make):
    """They count in metrics and in the table, as in TRL."""
    trainer = make(max_steps=1, log_completions=True)
    trainer.reward_func_names[0] = "length"
    trainer.train()
    assert "rewards/length/mean" in trainer.state.log_history[0]
    assert list(trainer._logs["rewards"]) == ["length"]
    trainer.reward_func_names = ["other"]
    assert trainer.reward_func_names == ["other"]
    with pytest.raises(ValueError, match=r"Number of reward names \(2\) must match number of reward functions \(1\)"):
        trainer.reward_func_names = ["one", "two"]
    with pytest.raises(TypeError, match="reward_weights must be a sequence with one weight .*, got None"):
        trainer.reward_weights = None


def test_what_make_task_of_a_subclass_sets_is_kept(checkpoint, tmp_path, recwarn):
    """Also the fields that follow the arguments, and the weights of rewards."""

    class Own(trl_jax.GRPOTrainer):
        def make_task(self):
            task = super().make_task()
            return replace(task, objective=replace(task.objective, delta=0.9), reward_weights=(3.0,))

    args = trl_jax.GRPOConfig(str(tmp_path), **BASE | STEPS | {"max_steps": 1})
    trainer = Own(str(checkpoint(**SMALL)), length_reward, args, Dataset.from_list(prompt_rows(8)))
    trainer.train()
    objective, log = trainer._setup.task.objective, trainer.state.log_history[0]
    assert objective.delta == 0.9 and not [one for one in recwarn if "Arguments that decide" in str(one.message)]
    assert log["reward"] == pytest.approx(3 * log["rewards/length_reward/mean"])


def test_completions_of_a_stream_do_not_share_their_prompt(checkpoint, tmp_path):
    """As in TRL: a reward function that changes the prompts changes each one once."""
    trl, found = pytest.importorskip("trl"), []

    def changes(prompts, **columns):
        for prompt in prompts:
            prompt[0]["content"] += "!"
        return [0.0] * len(prompts)

    def sees(prompts, **columns):
        found.append([prompt[0]["content"] for prompt in prompts])
        return [float(len(text)) for text in found[-1]]

    for package in (trl, trl_jax):
        args = package.GRPOConfig(str(tmp_path / package.__name__), **BASE | STEPS | {"max_steps": 1})
        rows = Dataset.from_list(prompt_rows(8, "chat")).to_iterable_dataset()
        package.GRPOTrainer(str(checkpoint(**CHAT)), [changes, sees], args, rows).train()
    assert found[0] == found[1] and found[0][0].count("!") == 1


def test_the_entropy_bonus_follows_the_arguments(make):
    """TRL reads them in each step."""
    trainer = make(
        max_steps=1, use_adaptive_entropy=True, entropy_target=5.0, entropy_coef=0.1, entropy_coef_delta=0.05
    )
    trainer.args.entropy_target, trainer.args.entropy_coef_delta = 9.0, 0.3
    trainer.train()
    assert trainer.entropy_coef == pytest.approx(0.4)  # raised, because the entropy is below the new target


def test_what_cannot_be_changed_is_told(make):
    trainer = make()
    trainer.args.beta = 0.5
    with pytest.warns(
        UserWarning, match="beta: the arguments were changed .* As in TRL, this has no effect; set trainer.beta"
    ):
        trainer.train()
    trainer.reward_funcs.append(length_reward)
    with pytest.raises(ValueError, match="reward_funcs now has 2 functions, but had 1"):
        trainer.train()
    trainer.reward_funcs[:] = ["folder"]
    with pytest.raises(TypeError, match=r"reward_funcs\[0\] must be replaced by a function, got a str"):
        trainer.train()
    trainer.args.gradient_accumulation_steps = 4
    with pytest.raises(ValueError, match="sizes of a generation were changed after the trainer was made"):
        trainer.train()


# Metrics that a script reads


def test_metrics_are_where_scripts_of_trl_read_them(checkpoint, tmp_path):
    """After a step `_metrics` has the numbers of its loss; `log` gets the loss, and `super().log` adds the metrics.
    They are cleared after `on_log`, and the dict stays the same."""
    trl, found = pytest.importorskip("trl"), []
    config = {"logging_steps": 2, "gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 2}

    class After(TrainerCallback):
        def on_step_end(self, args, state, control, **options):
            seen.append({name: list(values) for name, values in trainer._metrics["train"].items()})
            if state.global_step == 1:
                trainer.log({"own": 1.0})

        def on_log(self, args, state, control, **options):
            kept.append(trainer._metrics["train"])
            for metrics in trainer._metrics.values():
                seen.append({name: list(values) for name, values in metrics.items()})

    for package in (trl, trl_jax):
        seen, kept = [], []

        class Own(package.GRPOTrainer):
            def log(self, logs, start_time=None, seen=seen):
                metrics = self._metrics["train" if self.model.training else "eval"]
                seen.extend([dict(logs), {name: list(values) for name, values in metrics.items()}])
                if "entropy" in metrics:
                    logs["last"] = metrics["entropy"][-1]
                super().log(logs, start_time)

        args = package.GRPOConfig(str(tmp_path / package.__name__), **BASE | STEPS | config | {"max_steps": 3})
        rows = Dataset.from_list(prompt_rows(8))
        given = {"eval_dataset": Dataset.from_list(prompt_rows(4)), "callbacks": [After()]}
        trainer = Own(str(checkpoint(**SMALL)), length_reward, args, rows, **given)
        trainer.train()
        assert all(metrics is trainer._metrics["train"] for metrics in kept)
        found.append([timeless(entry) for entry in [*seen, *trainer.state.log_history]])
    for theirs, ours in zip(*found, strict=True):
        assert list(ours) == list(theirs)
        for name, value in theirs.items():
            np.testing.assert_allclose(ours[name], value, rtol=2e-4, atol=2e-5, err_msg=name)


# Counts and configs


def test_tokens_are_counted_once(make):
    logs = {}
    for counted in ("no", "all"):
        trainer = make(include_num_input_tokens_seen=counted)
        trainer.train()
        logs[counted] = [log["num_tokens"] for log in trainer.state.log_history if "num_tokens" in log]
        assert trainer.state.num_input_tokens_seen == logs[counted][-1]
    assert logs["no"] == logs["all"]


def test_the_config_of_a_mixture_of_experts_stays_as_it_was(make, tmp_path):
    experts = SMALL | {"model_type": "qwen3_moe"}
    trainer = make(model=experts, router_aux_loss_coef=0.05)
    assert trainer.aux_loss_enabled
    config = trainer.model.config
    assert (config.output_router_logits, config.router_aux_loss_coef) == (False, 0.001)


# Errors before the first step


def test_a_model_that_writes_no_completions(make):
    with pytest.raises(ValueError, match="cannot generate: it runs on the exported"):
        make(model={"model_type": "bloom", "head": "causal", "hidden_size": 32, "n_head": 2, "n_layer": 1})


@BOTH
def test_an_empty_prompt(kind, make):
    rows = prompt_rows(8)
    rows[5]["prompt"] = ""
    with pytest.raises(ValueError, match="Row 5 of train_dataset has an empty prompt. A completion needs at"):
        make(kind, rows=rows)
    make(kind, rows=rows, model=SMALL | {"tokenizer": {"bos": "<s>"}})
    with pytest.raises(ValueError, match="The prompt '' is empty"):
        prompt_ids(["a", ""], tiny_tokenizer())


def test_rows_that_are_no_dataset(make):
    trainer = make()
    with pytest.raises(TypeError, match="must be a Dataset or IterableDataset of datasets, got a list"):
        trainer.evaluate(prompt_rows(4))
    rows = Dataset.from_list([{"prompt": ""}, {"prompt": "a"}]).select([1])
    assert check_prompts(rows, "train", tiny_tokenizer()) is rows


# Messages

QWEN = {
    "defaults": {"role": "assistant"},
    "start_anchor": "assistant:",
    "fields": {
        "reasoning_content": {"open": "<think>", "close_pattern": "</think>\\s*", "content": "text"},
        "tool_calls": {
            "open": "<tool_call>", "close_pattern": "</tool_call>\\s*", "repeats": True, "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": "</s>\\s*", "content": "text"},
    },
}  # fmt: skip
ANSWERS = (
    "<think>so</think>river</s>", "river", '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call></s>',
    '<tool_call>{"name": "f"}</tool_call>', '<tool_call>{"na</tool_call>', '<tool_call>{"name": 3}</tool_call>', "</s>",
)  # fmt: skip


@pytest.mark.parametrize("text", ANSWERS)
def test_messages_are_parsed_where_the_tokenizer_knows_how(text):
    parse = pytest.importorskip("trl.chat_template_utils").parse_response
    tokenizer = tiny_tokenizer(chat_template=True)
    tokenizer.response_template = QWEN
    prompt = [{"role": "user", "content": "How?"}]
    [before], ids = prompt_ids([prompt], tokenizer), tokenizer(text)["input_ids"]
    wanted = parse(tokenizer, ids, prefix=before)
    assert completion_texts([prompt], [ids], tokenizer, [before]) == [[wanted]]
    plain = [{"role": "assistant", "content": text.removesuffix("</s>")}]
    assert completion_texts([prompt], [ids], tokenizer) == [plain]
    assert completion_texts(["How?"], [ids], tokenizer, [before]) == [plain[0]["content"]]


@BOTH
def test_rewards_see_parsed_messages_under_grpo_as_in_trl(kind, checkpoint, tmp_path):
    folder, seen = str(checkpoint(**CHAT)), []
    words = AutoTokenizer.from_pretrained(folder)
    words.response_template = QWEN | {"defaults": {"role": "assistant", "by": "template"}}

    def look(completions, **columns):
        seen.extend(own[0].get("by") for own in completions)
        return list(np.arange(len(completions)))

    args = getattr(trl_jax, f"{kind}Config")(str(tmp_path / "out"), **BASE | STEPS | {"max_steps": 1})
    rows = Dataset.from_list(prompt_rows(8, "chat"))
    getattr(trl_jax, f"{kind}Trainer")(folder, look, args, rows, processing_class=words).train()
    assert set(seen) == ({"template"} if kind == "GRPO" else {None})


class ResetsReference(TrainerCallback):
    """Makes the policy the reference after the second step."""

    trainer = None

    def on_step_end(self, args, state, control, **rest):
        if state.global_step == 2:
            self.trainer.ref_model.load_state_dict(self.trainer.model.state_dict())


class ReplacesReference(ResetsReference):
    def on_step_end(self, args, state, control, **rest):
        if state.global_step == 2:
            self.trainer.ref_model = copy.deepcopy(self.trainer.model).eval()


def written_by_generate(prompts, trainer):
    """A rollout_func that samples with `generate`."""
    import torch

    ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
    done = [trainer.model.generate(torch.tensor([own]), max_new_tokens=4, do_sample=True, top_k=0) for own in ids]
    written = [row[0, len(own) :].tolist() for row, own in zip(done, ids, strict=True)]
    return {"prompt_ids": ids, "completion_ids": written, "logprobs": None}


# name -> (the steps, beta, a rollout_func, a callback)
OWN_WAYS = {
    "a reference that is reset": (4, 0.5, None, ResetsReference),
    "a reference that is replaced": (4, 0.5, None, ReplacesReference),
    "completions of generate": (3, 0.0, written_by_generate, None),
}


@pytest.mark.parametrize("name", usually("a reference that is reset".__ne__, OWN_WAYS))
def test_what_a_script_does_with_its_models_counts_as_in_trl(name, checkpoint, tmp_path):
    import torch

    trl, (steps, beta, rollout_func, callback) = pytest.importorskip("trl"), OWN_WAYS[name]
    torch.set_num_threads(1)
    runs = []
    for package in (trl_jax, trl):
        config = BASE | STEPS | {"max_steps": steps, "beta": beta}
        trainer = package.GRPOTrainer(
            str(checkpoint(**SMALL)), length_reward, package.GRPOConfig(str(tmp_path / package.__name__), **config),
            Dataset.from_list(prompt_rows(8)), rollout_func=rollout_func,
        )  # fmt: skip
        if callback is not None:
            trainer.add_callback(callback)
            trainer.callback_handler.callbacks[-1].trainer = trainer
        trainer.train()
        runs.append([timeless(log) for log in trainer.state.log_history])
    for mine, other in zip(*runs, strict=True):
        assert_same(mine, other, same_order=True)
    if beta:
        divergences = [log["kl"] for log in runs[0][:4]]
        assert divergences[::2] == [0.0, 0.0] and min(divergences[1::2]) > 0


@pytest.mark.parametrize("config", [{}, {"beta": 0.1}], ids=["no reference", "a reference"])
def test_a_reference_that_cannot_be_set_is_refused(config, make):
    trainer = make(**config)
    trainer.ref_model = trainer.ref_model  # no change
    if trainer.ref_model is not None:
        with pytest.raises(TypeError, match="ref_model was set to a str; expected a model"):
            trainer.ref_model = "gpt2"
    with pytest.raises(AttributeError, match="Set beta in the arguments|set beta in the arguments"):
        trainer.ref_model = None if config else trainer.model


@pytest.mark.parametrize("where", ["the torch model", "its class", "trainer.model"])
def test_a_replaced_generate_is_refused(where, checkpoint, tmp_path, monkeypatch):
    """It would never be called: such scripts constrain completions, for example with a logits processor."""
    transformers, folder = pytest.importorskip("transformers"), str(checkpoint(**SMALL))
    args = trl_jax.GRPOConfig(str(tmp_path), **BASE | STEPS)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    trainer = trl_jax.GRPOTrainer(model, length_reward, args, Dataset.from_list(prompt_rows(8)))
    patched = {"the torch model": model, "its class": type(model), "trainer.model": trainer.model}[where]
    before = patched.generate
    monkeypatch.setattr(patched, "generate", lambda *given, **options: before(*given, **options))
    with pytest.raises(ValueError, match="generate of the .* was replaced by the script.*rollout_func"):
        trainer.train()
    trainer.rollout_func = written_by_generate  # which may call it
    trainer._refresh_task()


def test_only_a_generate_of_the_script_is_refused(checkpoint, monkeypatch):
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    model = transformers.AutoModelForCausalLM.from_pretrained(str(checkpoint(**SMALL)))
    model.generate = partial(model.generate)  # as a mock leaves it
    check_generate(model)
    del model.generate
    monkeypatch.setattr(type(model), "generate", torch.no_grad()(lambda *given: given))
    with pytest.raises(ValueError, match="generate of the .* was replaced by the script"):
        check_generate(model)
