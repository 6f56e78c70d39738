"""Overridden rollout methods: subclasses of GRPOTrainer and RLOOTrainer that call super()."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from datasets import Dataset

from compat_tests.parity.dpo_cases import SMALL
from compat_tests.parity.grpo_cases import length_reward, prompt_rows, vowels
from compat_tests.parity.reference import BASE
from trl_jax.trainer.grpo_trainer import GRPOTrainer
from trl_jax.trainer.rloo_trainer import RLOOTrainer

CONFIG = {
    "max_steps": 2, "learning_rate": 3e-3, "num_generations": 2, "max_completion_length": 6, "pad_to_multiple_of": None,
    "per_device_train_batch_size": 4, "num_iterations": 2, "scale_rewards": "none", "save_strategy": "steps",
    "save_steps": 1,
}  # fmt: skip


@pytest.fixture
def trained(checkpoint, tmp_path):
    def run(kind, *, resume=None, rewards=length_reward, **config):
        given = {name: value for name, value in (CONFIG | config).items() if hasattr(kind.config_class, name)}
        args = kind.config_class(str(tmp_path / kind.__name__), **BASE | given)
        trainer = kind(str(checkpoint(**SMALL)), rewards, args, Dataset.from_list(prompt_rows(4)))
        trainer.train(resume_from_checkpoint=resume)
        return trainer, {name: np.asarray(array) for name, array in trainer.model.params.items()}

    return run


class Looking(GRPOTrainer):
    """Each method records the result of super(); rewards are doubled, and advantages halved in turn."""

    def __init__(self, *given, **options):
        self.seen = {}
        super().__init__(*given, **options)

    def _tokenize_prompts(self, prompts):
        self.seen["prompts"] = prompts
        self.seen["tokenized"] = found = super()._tokenize_prompts(prompts)
        return found

    def _generate(self, prompts):
        self.seen["generated"] = found = super()._generate(prompts)
        return found

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        self.seen["judged"] = rewards, len(inputs), set(inputs[0]), [len(prompts), len(completions)]
        self._metrics["train" if self.model.training else "eval"]["own/most"].append(float(np.nanmax(rewards)))
        return 2 * rewards

    def _generate_and_score_completions(self, inputs):
        outputs = super()._generate_and_score_completions(inputs)
        self.seen["scored"] = dict(outputs)
        return outputs | {"advantages": outputs["advantages"] / 2}


def same(found, wanted):
    for name, value in wanted[1].items():
        np.testing.assert_array_equal(found[1][name], value, err_msg=name)


def test_methods_that_call_super_see_trls_results_and_change_what_is_trained_on(trained):
    config = {"beta": 0.1, "rewards": [length_reward, vowels]}  # scale_rewards is "none"
    wanted, looked = trained(GRPOTrainer, **config), trained(Looking, **config)
    for name, value in wanted[1].items():  # the reference's log-probabilities are those that the class returned
        np.testing.assert_allclose(looked[1][name], value, rtol=1e-4, atol=1e-6, err_msg=name)
    logged, reference = looked[0].state.log_history[0], wanted[0].state.log_history[0]
    assert logged["reward"] == pytest.approx(2 * reference["reward"])
    seen = looked[0].seen
    # The result that a rollout_func gets.
    assert wanted[0]._tokenize_prompts(seen["prompts"]) == (seen["tokenized"][0], None, {})
    assert seen["prompts"][0] == seen["prompts"][1] and len(seen["prompts"]) == 4
    ids, images, fields = seen["tokenized"]
    assert images is None and fields == {} and ids == looked[0].processing_class(text=seen["prompts"])["input_ids"]
    prompt_ids, completion_ids, tool_mask, completions, logprobs, extra, images, tool_images = seen["generated"]
    assert prompt_ids == ids and tool_mask is logprobs is images is None and extra == {} and tool_images == []
    assert completions == looked[0].processing_class.batch_decode(completion_ids, skip_special_tokens=True)
    rewards, *sizes = seen["judged"]
    assert rewards.shape == (4, 2) and sizes == [4, {"prompt", "answer"}, [4, 4]]
    assert logged["own/most"] == np.nanmax(rewards)
    np.testing.assert_array_equal(rewards[:, 0], length_reward(completions))
    scored = seen["scored"]
    assert scored["prompt_mask"].sum(axis=1).tolist() == list(map(len, ids))
    assert scored["completion_mask"].sum(axis=1).tolist() == list(map(len, completion_ids))
    assert {name: value.shape for name, value in scored.items() if name.endswith("logps")} == dict.fromkeys(
        ("old_per_token_logps", "ref_per_token_logps"), scored["completion_ids"].shape
    )
    assert scored["num_items_in_batch"] == sum(map(len, completion_ids)) and scored["advantages"].shape == (4,)


class Weighted(GRPOTrainer):
    """The weights of tokens in the outputs reach the loss, also after resuming in the middle of a generation."""

    def _generate_and_score_completions(self, inputs):
        outputs = super()._generate_and_score_completions(inputs)
        mask = outputs["completion_mask"]
        outputs["weights"] = np.cumsum(mask, axis=1) / 10
        outputs["advantages"] = outputs["advantages"][:, None] * mask
        outputs["turns"] = np.arange(len(mask))
        return outputs

    def _compute_loss(self, model, inputs):
        assert inputs["turns"].shape == (4,) and inputs["advantages"].shape == inputs["weights"].shape
        ids = jnp.concatenate([inputs["prompt_ids"], inputs["completion_ids"]], axis=1)
        keep = inputs["completion_ids"].shape[1]
        logps, _, _ = self._get_per_token_logps_and_entropies(model, ids, None, keep)
        ratio = jnp.exp(logps - inputs["old_per_token_logps"])
        self._metrics["train"]["own/weight"].append((inputs["weights"] * inputs["completion_mask"]).sum())
        return -(ratio * inputs["advantages"] * inputs["weights"]).sum() * (1 + inputs["turns"].max())


def test_further_outputs_reach_the_loss_and_a_checkpoint(trained, tmp_path):
    whole = trained(Weighted)
    expected = 4 * sum(range(1, 7)) / 10  # 4 completions of six tokens each
    assert whole[0].state.log_history[0]["own/weight"] == pytest.approx(expected)
    same(trained(Weighted, resume=str(tmp_path / "Weighted" / "checkpoint-1")), whole)


class Shortened(RLOOTrainer):
    def _tokenize_prompts(self, prompts):
        ids, images, fields = super()._tokenize_prompts(prompts)
        return [own[:3] for own in ids], images, fields

    def _generate(self, prompts):
        prompt_ids, completion_ids, completions = super()._generate(prompts)
        assert all(len(own) == 3 for own in prompt_ids) and len(completions[0]) > 0
        return prompt_ids, [own[:2] for own in completion_ids], ["a" * (1 + n) for n in range(len(completions))]

    def _generate_and_score_completions(self, inputs):
        self.outputs = super()._generate_and_score_completions(inputs)
        return self.outputs


def lengths(completions, **columns):
    return list(map(float, map(len, completions)))


def test_what_a_subclass_generates_is_judged_and_learned_from(trained):
    trainer, _ = trained(Shortened, rewards=lengths, max_steps=1)
    shapes = {name: value.shape for name, value in trainer.outputs.items()}
    assert shapes["prompt_ids"] == (4, 3) and shapes["completion_ids"] == (4, 2) and shapes["old_logps"] == (4,)
    assert trainer.state.log_history[0]["reward"] == 2.5  # lengths 1 to 4


MISTAKES = {
    "_calculate_rewards": (lambda self, found: found[:1], r"numbers \[1, 1\]; expected \[4, 1\]"),
    "_generate": (lambda self, found: found[:2], "expected a tuple of 8, as TRL's"),
    "_generate_and_score_completions": (
        lambda self, found: found | {"completion_ids": found["completion_ids"] + 1}, "other completion_ids than super",
    ),
    "_tokenize_prompts": (lambda self, found: (found[0][:1], None, {}), "returned 1 prompts for 4"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_result_of_another_form_is_named(name, trained):
    change, words = MISTAKES[name]

    def method(self, *given):
        return change(self, getattr(super(own, self), name)(*given))

    own = type("Own", (GRPOTrainer,), {name: method})
    with pytest.raises((TypeError, ValueError), match=words):
        trained(own)
    if name != "_calculate_rewards":
        without = type("Own", (GRPOTrainer,), {name: lambda self, *given: None})
        with pytest.raises(RuntimeError, match=rf"Own\.{name} did not call super\(\)\.{name}"):
            trained(without)
