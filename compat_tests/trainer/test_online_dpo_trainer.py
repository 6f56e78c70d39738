"""Online DPO: errors, the arguments of reward functions and judges, and which completion is chosen."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
from datasets import Dataset

from compat_tests.parity.dpo_cases import CHAT
from compat_tests.parity.grpo_cases import length_reward, prompt_rows
from compat_tests.parity.test_online_dpo_curve import STEPS
from trl_jax.core.trainers import names_of_config
from trl_jax.data.batch import IGNORED
from trl_jax.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer
from trl_jax.hub.auto import AutoModelForCausalLM
from trl_jax.hub.peft_config import PromptTuningConfig
from trl_jax.tasks.dpo import OnlineDpoTask
from trl_jax.trainer.online_dpo_trainer import _cut, _pair, beta_of

CONFIG = {"max_steps": 1, "max_new_tokens": 4, "per_device_train_batch_size": 4}


@pytest.fixture
def make(checkpoint, tmp_path):
    def made(config=None, model=None, kind="text", **given):
        args = OnlineDPOConfig(str(tmp_path / "out"), **STEPS | CONFIG | (config or {}))
        given = {"reward_funcs": length_reward, "train_dataset": Dataset.from_list(prompt_rows(8, kind)), **given}
        return OnlineDPOTrainer(model or str(checkpoint(**CHAT)), args=args, **given)

    return made


def test_config_and_constructor_are_trls(tmp_path):
    theirs = pytest.importorskip("trl.experimental.online_dpo")
    ours, other = (kind(str(tmp_path), use_cpu=True, bf16=False) for kind in (OnlineDPOConfig, theirs.OnlineDPOConfig))
    fields = theirs.OnlineDPOConfig.__dataclass_fields__
    assert [name for name, field in fields.items() if field.init and vars(ours)[name] != vars(other)[name]] == []
    own, trls = (
        [one.name for one in inspect.signature(kind.__init__).parameters.values() if one.kind is not one.KEYWORD_ONLY]
        for kind in (OnlineDPOTrainer, theirs.OnlineDPOTrainer)
    )
    assert own == trls
    assert names_of_config(ours).trainer == "OnlineDPOTrainer"
    assert OnlineDPOConfig(str(tmp_path), beta=[0.2, 0.1]).beta == [0.2, 0.1]
    with pytest.warns(UserWarning, match="cause prompts to be truncated or completely removed in the forward pass"):
        OnlineDPOConfig(str(tmp_path), max_new_tokens=600)
    with pytest.warns(UserWarning, match="use_vllm=True: completions come from trl_jax's own generator"):
        OnlineDPOConfig(str(tmp_path), use_vllm=True)


class Rater:
    """A judge that prefers longer completions."""

    def __init__(self):
        self.seen = []

    def judge(self, prompts, completions):
        self.seen.append((prompts, completions))
        return [int(len(second) > len(first)) for first, second in completions]


def test_weights_of_rewards_count_as_a_script_sets_them(make):
    """In place too, as in TRL; without EOS penalty, the logged score is the weighted reward."""
    seen = []

    def reward(completions, **columns):
        seen.extend(length_reward(completions))
        return seen[-len(completions) :]

    trainer = make({"missing_eos_penalty": None}, reward_funcs=reward)
    trainer.args.reward_weights = [9.0]  # read once, as in TRL
    trainer.reward_weights[0] = -2.0
    trainer.train()
    assert trainer.state.log_history[0]["objective/scores"] == pytest.approx(-2 * np.mean(seen))
    trainer.reward_weights = [0.5]
    assert trainer.reward_weights.tolist() == [0.5]


REFUSED = {
    "no rewards": ({"reward_funcs": None}, ValueError, "`reward_funcs` must be provided"),
    "two sources": ({"judge": Rater()}, ValueError, "Pass only one of them"),
    "no judge": ({"reward_funcs": None, "judge": len}, TypeError, "builtin_function_or_method, which has no method ju"),
    "metrics": ({"compute_metrics": len}, ValueError, "compute_metrics=.* is not in this release"),
    "evaluation": ({"config": {"eval_strategy": "steps"}}, ValueError, "has no evaluation, as in TRL"),
    "server": ({"config": {"use_vllm": True, "vllm_mode": "server"}}, ValueError, "vllm_mode='server' is not in this"),
    "pattern": ({"config": {"vllm_structured_outputs_regex": "a"}}, ValueError, "cannot constrain completions"),
    "beta": ({"config": {"beta": [0.1, 0.0]}}, ValueError, "beta must be a number above 0, or a list of them"),
    "loss": ({"config": {"loss_type": "hinge"}}, ValueError, "loss_type"),
    "penalty": ({"config": {"missing_eos_penalty": -1.0}}, ValueError, "missing_eos_penalty must be"),
    "weights": ({"config": {"reward_weights": [1.0, 1.0]}}, ValueError, "must match number of reward functions"),
    "virtual tokens": (
        {"peft_config": PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")},
        ValueError,
        "an adapter of virtual tokens. Use a weight-based one such as LoRA",
    ),
    "no column": (
        {"reward_funcs": lambda completions, label, **columns: []}, TypeError, "needs label, and train_dataset has",
    ),
    "images": (
        {"train_dataset": Dataset.from_list([{"prompt": "a", "image": None}])}, ValueError, "image",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused_at_construction(name, make):
    given, kind, text = REFUSED[name]
    with pytest.raises(kind, match=text):
        make(**given)


def test_a_time_limit_in_the_generation_config_is_refused(make, checkpoint):
    model = AutoModelForCausalLM.from_pretrained(checkpoint(**CHAT))
    model.generation_config.max_time = 1.0
    with pytest.raises(ValueError, match="has max_time=1.0, which is not in this release"):
        make(model=model)


def test_a_model_is_not_its_own_reference(make, checkpoint):
    model = AutoModelForCausalLM.from_pretrained(checkpoint(**CHAT))
    with pytest.raises(ValueError, match="`model` and `ref_model` cannot be the same object"):
        make(model=model, ref_model=model)


def test_methods_that_are_never_called_cannot_be_overridden():
    for name in ("training_step", "compute_loss", "_generate", "_forward", "_calculate_rewards_from_functions"):
        with pytest.raises(TypeError, match=f"overrides {name}, which trl_jax never calls"):
            type("Own", (OnlineDPOTrainer,), {name: lambda self: None, "__module__": "script"})


def test_reward_functions_get_what_trls_get_and_beta_follows_the_epochs(make):
    seen = []

    def reward(prompts, completions, completion_ids, answer, trainer_state):
        seen.append((prompts, completions, completion_ids, answer, trainer_state.global_step))
        return [None, *range(1, len(prompts))]  # the second completion of each prompt is better

    config = {"max_steps": 4, "beta": [0.1, 0.5], "gradient_accumulation_steps": 1, "reward_weights": [0.5]}
    trainer = make(config, reward_funcs=[reward])
    [first, second] = trainer.get_train_dataloader()
    assert set(first) == {"prompt", "answer"} and len(second["prompt"]) == 4
    before = trainer.ref_model.arrays if trainer.ref_model is not None else None
    assert before is not None and trainer.reward_func_names == ["reward"] and trainer.reward_weights.tolist() == [0.5]
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert [log["beta"] for log in logs] == pytest.approx([0.1, 0.1, 0.5, 0.5]) and trainer.beta == 0.5
    assert {log["objective/scores_margin"] for log in logs} == {2.0}
    assert {log["objective/scores"] for log in logs} == {1.75}
    assert logs[0]["rewards/accuracies"] == 0 and logs[0]["objective/kl"] == pytest.approx(0, abs=1e-5)
    prompts, completions, ids, answers, _ = seen[0]
    assert prompts[:4] == prompts[4:] and answers[:4] == answers[4:] and len({len(own) for own in ids}) == 1
    decoded = trainer.processing_class.batch_decode(ids, skip_special_tokens=True)
    assert decoded == completions and [step for *_, step in seen] == [0, 1, 2, 3]
    for refused in (trainer.evaluate, lambda: trainer.predict(trainer.train_dataset), trainer.get_eval_dataloader):
        with pytest.raises(TypeError, match="OnlineDPOTrainer has no evaluation"):
            refused()
    with pytest.raises(AttributeError, match="Set temperature in OnlineDPOConfig"):
        trainer.temperature = 0.5


def test_a_judge_chooses_between_two_texts(make):
    rater = Rater()
    trainer = make({"loss_type": "ipo", "logging_steps": 2}, kind="chat", reward_funcs=None, judge=rater)
    trainer.train()
    [(prompts, pairs)] = rater.seen
    assert len(prompts) == len(pairs) == 4
    assert all(prompt.startswith("User: How do I") and prompt.endswith("?\n\n") for prompt in prompts)
    assert all(len(pair) == 2 and pair[0].startswith("Assistant: ") for pair in pairs)
    [log] = trainer.state.log_history  # the final log entry, which has no metrics in TRL
    assert "train_loss" in log
    assert "rewards/margins" in log and not [
        key for key in log if "score" in key and key != "objective/non_score_reward"
    ]
    rater.judge = lambda prompts, completions: [0]
    with pytest.raises(ValueError, match="The judge returned 1 ranks for 4 prompts"):
        trainer.train()


def test_prompts_are_cut_as_trls_padded_columns_are():
    ids = [[1, 2, 3], [4, 5, 6, 7, 8]]
    assert _cut(ids, 4, 9) == ids
    assert _cut(ids, 4, 8) == [[1, 2, 3], [5, 6, 7, 8]]
    assert _cut(ids, 4, 5) == [[3], [8]]
    with pytest.raises(ValueError, match="max_length=4 leaves no token of the prompts before a completion of 4 tokens"):
        _cut(ids, 4, 4)
    pair = _pair([1, 2], [np.array([3]), np.array([4, 5])], {"beta": 0.1})
    assert [own.tolist() for own in pair.texts] == [[1, 2, 3], [1, 2, 4, 5]]
    assert [own.tolist() for own in pair.labels] == [[IGNORED, IGNORED, 3], [IGNORED, IGNORED, 4, 5]]
    assert [beta_of([0.3, 0.2], epoch) for epoch in range(3)] == [0.3, 0.2, 0.2] and beta_of(0.1, 7) == 0.1
    with pytest.raises(TypeError, match="cannot be made into examples before they have completions"):
        OnlineDpoTask().example({})
