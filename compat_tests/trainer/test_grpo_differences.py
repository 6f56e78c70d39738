"""Differences from TRL in online training that docs/pages/differences.md lists and no other test checks."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from datasets import Dataset
from peft import LoraConfig
from transformers import TrainerCallback

import trl_jax
from compat_tests.effort import only_thorough, usual
from compat_tests.parity.dpo_cases import SMALL
from compat_tests.parity.grpo_cases import length_reward, prompt_rows
from compat_tests.parity.reference import BASE
from compat_tests.tiny import tiny_tokenizer
from trl_jax.data.prompts import prompt_ids
from trl_jax.trainer.grpo_trainer import GRPOTrainer
from trl_jax.training.evaluate import CompletionEvaluator
from trl_jax.training.optimizers import point
from trl_jax.training.policy_generator import PolicyGenerator
from trl_jax.training.reference import _mixed

GREEDY = {"generation_kwargs": {"do_sample": False}}
CONFIG = {
    "max_steps": 1, "num_generations": 4, "max_completion_length": 6, "per_device_train_batch_size": 8,
    "pad_to_multiple_of": None, "num_iterations": 2, "learning_rate": 0.1, "max_grad_norm": 0.0,
}  # fmt: skip
GPT2 = {"head": "causal", "n_layer": 1, "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}


@pytest.fixture
def make(checkpoint, tmp_path):
    def made(model=None, rows=None, reward=length_reward, options=None, **config):
        args = GRPOTrainer.config_class(str(tmp_path / "out"), **BASE | CONFIG | config)
        model = str(checkpoint("gpt2", **GPT2)) if model is None else model
        return GRPOTrainer(model, reward, args, Dataset.from_list(rows or prompt_rows(8)), **options or {})

    return made


def rows_of(trainer):
    """The completions of the last generation."""
    return trainer.parts.rollout_steps.generation.rows


@only_thorough
def test_positions_begin_with_the_first_token(make):
    """With two prompts, one of them far longer, each completion equals what the model generates for its prompt
    alone."""
    short, long = prompt_rows(2)
    long["prompt"] = 5 * long["prompt"]
    trainer = make(rows=[short, long], learning_rate=0.0, **GREEDY)
    trainer.train()
    found = rows_of(trainer)
    assert len({len(row.prompt) for row in found}) == 2
    for row in found:
        ids = np.concatenate([row.prompt, row.completion])[None]
        logits = np.asarray(trainer.model(ids, np.ones_like(ids)).logits[0, len(row.prompt) - 1 : -1], np.float64)
        logps = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        np.testing.assert_array_equal(logits.argmax(-1), row.completion)
        np.testing.assert_allclose(logps[np.arange(len(row.completion)), row.completion], row.old_logps, atol=2e-5)


@usual("noisy1")
@pytest.mark.parametrize("noisy", [{"disable_dropout": False}, {"disable_dropout": True, "neftune_noise_alpha": 5.0}])
def test_dropout_and_noise_act_in_the_step_alone(noisy, make, checkpoint):
    model = None if "neftune_noise_alpha" not in noisy else str(checkpoint(**SMALL))  # this model has no dropout
    plain, other = make(model, disable_dropout=True, batch_layout="padded"), make(model, batch_layout="padded", **noisy)
    for trainer in (plain, other):
        trainer.train()
    for mine, theirs in zip(rows_of(plain), rows_of(other), strict=True):
        np.testing.assert_array_equal(mine.completion, theirs.completion)
        np.testing.assert_array_equal(mine.old_logps, theirs.old_logps)
    moved = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), plain.model.params, other.model.params)
    assert max(moved.values()) > 1e-3


def test_the_reference_of_a_changed_model_is_the_changed_one(make, checkpoint):
    model = trl_jax.AutoModelForCausalLM.from_pretrained(str(checkpoint(**SMALL)))
    model.params = {path: 1.5 * array for path, array in model.params.items()}
    changed, kwargs = {path: np.asarray(array) for path, array in model.params.items()}, {"dtype": "float32"}
    trainer = make(model, beta=0.1, model_init_kwargs=kwargs, num_iterations=1)
    assert kwargs == {"dtype": "float32"}
    trainer.train()
    assert trainer.state.log_history[0]["kl"] == 0.0
    jax.tree.map(np.testing.assert_array_equal, dict(trainer.ref_model.params), changed)


@pytest.mark.parametrize("alpha", [0.9, 0.6, 0.3])
def test_a_reference_that_equals_the_policy_stays_equal(alpha):
    policy = {"weight": np.random.default_rng(0).normal(size=1000).astype(np.float32)}
    found = _mixed(jax.tree.map(jax.numpy.array, policy), policy, alpha)["weight"]
    np.testing.assert_array_equal(found, policy["weight"])
    other = _mixed(jax.tree.map(jax.numpy.zeros_like, policy), policy, alpha)["weight"]
    np.testing.assert_allclose(other, np.float32(alpha) * policy["weight"], rtol=1e-6)


def test_an_evaluation_drops_what_dataloader_drop_last_says(make, checkpoint):
    """As in TRL, whose later completions depend on it; an evaluation set smaller than a batch is kept."""
    trainer = make(str(checkpoint(**SMALL)), dataloader_drop_last=True, per_device_eval_batch_size=8)
    for prompts, wanted in ((5, [8, 8]), (4, [8, 8]), (1, [4])):
        batches = trainer.parts.evaluator.batches(Dataset.from_list(prompt_rows(prompts)))
        assert list(map(len, batches)) == wanted


@only_thorough
def test_a_schedule_free_optimizer_generates_where_gradients_are_taken(make, checkpoint, monkeypatch):
    """As in TRL. Evaluations and saved files use the averages, which differ from the second step on."""
    averages, wanted, written, complete = [], [], [], PolicyGenerator.complete

    def recorded(writer, *given, **more):
        written.append(jax.tree.map(np.asarray, dict(trainer.model.params)))
        return complete(writer, *given, **more)

    class Watch(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            params, optimizer_state = trainer.model.params, trainer.parts.setup.progress.optimizer_state
            averages.append(jax.tree.map(np.asarray, dict(params)))
            wanted.append(jax.tree.map(np.asarray, point(0.9, params, optimizer_state[1])))

    monkeypatch.setattr(PolicyGenerator, "complete", recorded)
    config = {"optim": "schedule_free_adamw", "learning_rate": 0.02, "num_iterations": 1, "max_steps": 3}
    trainer = make(str(checkpoint(**SMALL)), options={"callbacks": [Watch()]}, **config)
    trainer.train()
    assert len(written) == 3
    for iterates, used in zip(wanted, written[1:], strict=False):
        jax.tree.map(np.testing.assert_array_equal, used, iterates)
    apart = jax.tree.map(lambda own, other: float(np.abs(own - other).max()), averages[1], written[2])
    assert max(apart.values()) > 1e-4


@only_thorough
def test_an_evaluations_loss_weighs_rows_alike(make, checkpoint, monkeypatch):
    config = {"beta": 0.5, "loss_type": "grpo", "num_iterations": 1, "per_device_eval_batch_size": 8} | GREEDY
    trainer = make(str(checkpoint(**SMALL)), **config)
    trainer.train()
    # Different from the reference.
    trainer.model.params = {path: 1.05 * array for path, array in trainer.model.params.items()}
    of_batches, batch = [], CompletionEvaluator._batch

    def spied(self, rows):
        found = batch(self, rows)
        of_batches.append((len(rows), float(np.sum(found["loss"]))))
        return found

    monkeypatch.setattr(CompletionEvaluator, "_batch", spied)
    losses, rows = {}, Dataset.from_list(prompt_rows(5))
    for size in (20, 8):  # of 20 completions: one batch, or two and a half batches
        of_batches.clear()
        trainer.args.per_device_eval_batch_size = size
        losses[size] = trainer.evaluate(rows)["eval_loss"]
    counts, found = zip(*of_batches, strict=True)
    assert counts == (8, 8, 4) and losses[8] == pytest.approx(losses[20], rel=1e-5)
    assert abs(np.mean(found) - losses[8]) > 1e-5  # an unweighted mean would differ


@only_thorough
def test_metrics_come_in_the_order_in_which_they_first_came_up(make, checkpoint):
    """As in TRL: a log may begin with a step that reuses completions, or one that generates halfway through."""
    config = {"max_steps": 6, "logging_steps": 2, "gradient_accumulation_steps": 2, "steps_per_generation": 3}
    trainer = make(str(checkpoint(**SMALL)), num_iterations=1, per_device_train_batch_size=4, **config)
    trainer.train()
    first = {"num_tokens": "generation", "entropy": "micro-batch", "step_time": "step"}
    orders = [[first[name] for name in log if name in first] for log in trainer.state.log_history[:3]]
    assert orders == [
        ["generation", "micro-batch", "step"], ["micro-batch", "step", "generation"],
        ["micro-batch", "generation", "step"],
    ]  # fmt: skip


def test_a_prompt_that_ends_with_the_assistant_is_warned_of():
    tokenizer, [row] = tiny_tokenizer(chat_template=True), prompt_rows(1, "chat")
    asked = prompt_ids([row["prompt"]], tokenizer)
    with pytest.warns(UserWarning, match="ends with an assistant message. As in TRL, that message is not contin"):
        [ids] = prompt_ids([[*row["prompt"], {"role": "assistant", "content": "Well,"}]], tokenizer)
    assert len(ids) > len(asked[0])


def equal_rewards(completions, **columns):
    return [0.5] * len(completions)


@usual("True")
@pytest.mark.parametrize("adapter", [False, True])
def test_a_policy_that_has_learned_nothing_is_its_reference(make, checkpoint, adapter):
    """Log-probabilities of two programs differ in their last digits, which Adam would turn into full-size steps."""
    options = {"peft_config": LoraConfig(task_type="CAUSAL_LM")} if adapter else {}
    config = {"beta": 0.1, "max_steps": 4, "steps_per_generation": 2}
    trainer = make(str(checkpoint(**SMALL)), reward=equal_rewards, options=options, **config)
    before = {path: np.asarray(array) for path, array in trainer.model.params.items()}
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "kl" in entry]
    assert [(entry["kl"], entry["grad_norm"]) for entry in steps] == [(0.0, 0.0)] * 4
    for path, array in trainer.model.params.items():
        np.testing.assert_array_equal(array, before[path], path)


@only_thorough
def test_a_policy_that_has_moved_is_compared_with_its_reference(make):
    trainer = make(beta=0.1, max_steps=2)
    trainer.train()
    first, second = (entry["kl"] for entry in trainer.state.log_history if "kl" in entry)
    assert first == 0.0 and second > 1e-3
