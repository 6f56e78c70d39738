"""User-defined policy losses: `_compute_loss` of subclasses of GRPOTrainer and RLOOTrainer."""

from __future__ import annotations

import inspect
import random
import textwrap
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import trl
from datasets import Dataset

import trl_jax
from compat_tests.effort import only_thorough, thorough, usually
from compat_tests.parity.dpo_cases import SMALL
from compat_tests.parity.grpo_cases import length_reward, prompt_rows
from compat_tests.parity.marks import timeless
from compat_tests.parity.reference import BASE, read_weights
from trl_jax.trainer.grpo_trainer import GRPOTrainer
from trl_jax.trainer.rloo_trainer import RLOOTrainer
from trl_jax.training.user_completions_loss import TorchCalls, UserCompletionsLoss, check_mask, check_threads
from trl_jax.training.user_loss_errors import found_in_torch

CONFIG = {
    "max_steps": 2, "learning_rate": 3e-3, "num_generations": 2, "max_completion_length": 6, "pad_to_multiple_of": None,
    "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "gradient_accumulation_steps": 2,
    "num_iterations": 2,
}  # fmt: skip


@pytest.fixture
def trained(checkpoint, tmp_path):
    def run(kind, name="out", *, resume=None, rows=4, evaluated=None, peft_config=None, **config):
        args = kind.config_class(str(tmp_path / name), **BASE | CONFIG | config)
        own = Dataset.from_list(prompt_rows(rows))
        evaluation = None if evaluated is None else Dataset.from_list(prompt_rows(evaluated))
        trainer = kind(
            str(checkpoint(**SMALL)), length_reward, args, own, eval_dataset=evaluation, peft_config=peft_config
        )
        trainer.train(resume_from_checkpoint=resume)
        trainer.save_model()
        return trainer, read_weights(tmp_path / name)

    return run


def logps_of(trainer, model, inputs):
    ids = jnp.concatenate([inputs["prompt_ids"], inputs["completion_ids"]], axis=1)
    mask = jnp.concatenate([inputs["prompt_mask"], inputs["completion_mask"]], axis=1)
    return trainer._get_per_token_logps_and_entropies(
        model, ids, mask, inputs["completion_ids"].shape[1], compute_entropy=True
    )


class Dapo(GRPOTrainer):
    """TRL's GRPOTrainer._compute_loss with loss_type="dapo", with jax.numpy instead of torch."""

    def _compute_loss(self, model, inputs):
        mask = inputs["completion_mask"]
        per_token_logps, entropies, aux_loss = logps_of(self, model, inputs)
        assert aux_loss is None
        advantages = inputs["advantages"][:, None]
        old_per_token_logps = inputs.get("old_per_token_logps")
        if old_per_token_logps is None:
            old_per_token_logps = jax.lax.stop_gradient(per_token_logps)
        coef_1 = jnp.exp(per_token_logps - old_per_token_logps)
        coef_2 = jnp.clip(coef_1, 1 - self.epsilon_low, 1 + self.epsilon_high)
        per_token_loss = -jnp.minimum(coef_1 * advantages, coef_2 * advantages)
        log_ratio = inputs["ref_per_token_logps"] - per_token_logps
        per_token_kl = jnp.exp(log_ratio) - log_ratio - 1
        if self.args.use_bias_correction_kl:
            per_token_kl = per_token_kl * coef_1
        per_token_loss = per_token_loss + self.beta * per_token_kl
        mode = "train" if self.model.training else "eval"
        normalizer = jnp.maximum(inputs["num_items_in_batch"], 1.0) / self.accelerator.num_processes
        if mode == "train":
            normalizer = normalizer * self.current_gradient_accumulation_steps / self.args.steps_per_generation
        self._metrics[mode]["own/kl"].append((per_token_kl * mask).sum() / mask.sum())
        self._metrics[mode]["own/entropy"].append(self.accelerator.gather((entropies * mask).sum() / mask.sum()))
        return (per_token_loss * mask).sum() / normalizer


class FromLogits(GRPOTrainer):
    """GRPO without a clipped ratio, from the model's logits; with `from_logps`, from its log-probabilities."""

    from_logps = False

    def _compute_loss(self, model, inputs):
        completion_ids, mask = inputs["completion_ids"], inputs["completion_mask"]
        if self.from_logps:
            logps, entropies, _ = logps_of(self, model, inputs)
        else:
            ids = jnp.concatenate([inputs["prompt_ids"], completion_ids], axis=1)
            logits = model(input_ids=ids, logits_to_keep=completion_ids.shape[1] + 1).logits[:, :-1] / self.temperature
            log_probs = jax.nn.log_softmax(logits)
            logps = jnp.take_along_axis(log_probs, completion_ids[..., None], axis=-1)[..., 0]
            entropies = -(jnp.exp(log_probs) * log_probs).sum(-1)
        ratio = jnp.exp(logps - inputs.get("old_per_token_logps", jax.lax.stop_gradient(logps)))
        losses = -ratio * inputs["advantages"][:, None] - 0.1 * entropies
        return (losses * mask).sum() / mask.sum() / self.current_gradient_accumulation_steps


class FromLogps(FromLogits):
    from_logps = True


class Quarter(GRPOTrainer):
    """Half of super()'s loss with halved advantages. Replaces two of the inputs, one of them by an equal mask."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        inputs = inputs | {"advantages": inputs["advantages"] * 0.5, "completion_mask": inputs["completion_mask"] * 1}
        return 0.5 * super().compute_loss(model, inputs, return_outputs, num_items_in_batch)


class Gmpo(GRPOTrainer):
    """The geometric mean of a completion's clipped ratios (https://huggingface.co/papers/2507.20673)."""

    def _compute_loss(self, model, inputs):
        mask, advantages = inputs["completion_mask"], inputs["advantages"]
        logps, _, _ = logps_of(self, model, inputs)
        log_ratio = logps - inputs.get("old_per_token_logps", jax.lax.stop_gradient(logps))
        bounded = jnp.clip(log_ratio, -self.epsilon_low, self.epsilon_high)
        chosen = jnp.where(advantages[:, None] > 0, jnp.minimum(log_ratio, bounded), jnp.maximum(log_ratio, bounded))
        lengths = jnp.maximum(mask.sum(axis=-1), 1)
        coef = jnp.exp((chosen * mask).sum(axis=-1) / lengths)
        return (-coef * advantages).mean() / self.current_gradient_accumulation_steps


class Rloo(RLOOTrainer):
    """TRL's RLOOTrainer._compute_loss, with jax.numpy instead of torch."""

    def _compute_loss(self, model, inputs):
        per_token_logps, _, _ = logps_of(self, model, inputs)
        logps = (per_token_logps * inputs["completion_mask"]).sum(axis=1)
        coef_1 = jnp.exp(logps - inputs["old_logps"])
        coef_2 = jnp.clip(coef_1, 1 - self.epsilon_low, 1 + self.epsilon_high)
        return -jnp.minimum(coef_1 * inputs["advantages"], coef_2 * inputs["advantages"]).mean()


def same(found, wanted, rtol=1e-5, atol=1e-6):
    for name, value in wanted[1].items():
        np.testing.assert_allclose(found[1][name], value, rtol=rtol, atol=atol, err_msg=name)
    for one, other in zip(found[0].state.log_history, wanted[0].state.log_history, strict=True):
        for name in set(one) & set(other) & {"loss", "grad_norm", "eval_loss", "reward", "num_tokens"}:
            assert one[name] == pytest.approx(other[name], rel=rtol, abs=atol), name


def test_the_surrogate_in_jax_numpy_is_the_built_in_one(trained):
    config = {"beta": 0.1, "evaluated": 3, "eval_strategy": "steps", "eval_steps": 2}  # a short last batch
    wanted, found = trained(GRPOTrainer, "built-in", **config), trained(Dapo, "own", **config)
    same(found, wanted)
    logged, history = found[0].state.log_history, wanted[0].state.log_history
    for own, other in zip(logged, history, strict=True):
        for name in {"kl", "eval_kl", "entropy", "eval_entropy"} & set(other):
            prefix = "eval_" if name.startswith("eval_") else ""
            assert own[f"{prefix}own/{name.removeprefix('eval_')}"] == pytest.approx(other[name], rel=1e-4, abs=1e-6)
            assert name not in own
    assert sum("own/kl" in entry for entry in logged) == 2 and sum("eval_own/kl" in entry for entry in logged) == 1

    quarter = trained(Quarter, "quarter", **config | {"max_steps": 1, "eval_strategy": "no"})[0].state.log_history[0]
    assert quarter["grad_norm"] == pytest.approx(0.25 * history[0]["grad_norm"], rel=1e-5)
    assert quarter["grad_norm"] > 0.01 and set(quarter) == set(history[0])
    assert quarter["entropy"] == pytest.approx(history[0]["entropy"])


def test_a_loss_on_logits_in_jax_numpy_is_the_one_on_log_probabilities(trained, monkeypatch):
    computed = []  # whether a pass has computed logits

    def spied(self, *given, loss=UserCompletionsLoss.loss):
        computed.append("logits" in given[0])
        return loss(self, *given)

    monkeypatch.setattr(UserCompletionsLoss, "loss", spied)
    config = {"temperature": 0.8, "evaluated": 4, "eval_strategy": "steps", "eval_steps": 2}
    found, first = trained(FromLogits, "logits", **config), computed.copy()
    computed.clear()
    same(found, trained(FromLogps, "logps", **config), rtol=1e-4, atol=1e-5)
    assert first[:2] == [False, True] and all(first[1:]) and computed and not any(computed)


@only_thorough
def test_the_loss_of_rloo_is_averaged_over_micro_batches(trained):
    same(trained(Rloo, "own"), trained(RLOOTrainer, "built-in"))


@only_thorough
def test_a_geometric_mean_trains_an_adapter_and_resumes_bit_for_bit(trained, tmp_path):
    config = {"peft_config": trl_jax.LoraConfig(r=2, task_type="CAUSAL_LM"), "save_strategy": "steps", "save_steps": 1}
    whole, weights = trained(Gmpo, "whole", **config)
    history = whole.state.log_history
    assert all(np.isfinite(entry["grad_norm"]) for entry in history[:2])
    again, resumed = trained(Gmpo, "whole", resume=str(tmp_path / "whole" / "checkpoint-1"), **config)
    assert list(map(timeless, again.state.log_history[1:2])) == list(map(timeless, history[1:2]))
    for name, value in weights.items():
        np.testing.assert_array_equal(resumed[name], value, err_msg=name)


REFUSED = {
    "another model": (lambda self, model, inputs: logps_of(self, self.model, inputs)[0].sum(), "not with self.model"),
    "a call with other ids": (
        lambda self, model, inputs: model(inputs["prompt_ids"]).logits.sum(),
        r"model\(...\) was called with input_ids \[4, 32\], which are not the ids of the inputs, \[4, 64\]",
    ),
    "a call with labels": (
        lambda self, model, inputs: model(inputs["prompt_ids"], labels=inputs["prompt_ids"]).loss,
        r"model\(...\) got labels; in a loss on completions it takes input_ids, attention_mask and logits_to_keep",
    ),
    "no scalar": (lambda self, model, inputs: logps_of(self, model, inputs)[0], r"an array \[4, 32\]; expected a JAX"),
    "a number": (
        lambda self, model, inputs: float(inputs["advantages"].sum()),
        r"arrays have no concrete values.*self\._metrics",
    ),
    "torch": (
        lambda self, model, inputs: inputs["advantages"].sum(dim=0),
        "torch functions do not accept them, and their methods follow NumPy",
    ),
    "other ids": (
        lambda self, model, inputs: GRPOTrainer._compute_loss(self, model, inputs | {"prompt_ids": 0}),
        "got another prompt_ids than the inputs have",
    ),
}


def test_a_loss_on_completions_cannot_disable_the_adapter(checkpoint, tmp_path):
    """As for the reference's log-probabilities: the step has only computed the policy's."""

    class Own(GRPOTrainer):
        of_trainer = False

        def _compute_loss(self, model, inputs):
            with (self.model if self.of_trainer else model).disable_adapter():
                return logps_of(self, model, inputs)[0].mean()

    args = trl_jax.GRPOConfig(str(tmp_path), **BASE | CONFIG | {"max_steps": 1})
    lora = trl_jax.LoraConfig(r=2, task_type="CAUSAL_LM")
    trainer = Own(str(checkpoint(**SMALL)), length_reward, args, Dataset.from_list(prompt_rows(4)), peft_config=lora)
    for Own.of_trainer in (False, True):
        with pytest.raises(TypeError, match=r"The loss disables the adapter.*in inputs\['ref_per_token_logps'\]"):
            trainer.train()


def test_what_a_compiled_loss_cannot_do_is_said(checkpoint, tmp_path):
    class Own(GRPOTrainer):
        def _compute_loss(self, model, inputs):
            return self.chosen(model, inputs)

    args = trl_jax.GRPOConfig(str(tmp_path), **BASE | CONFIG | {"max_steps": 1})
    trainer = Own(str(checkpoint(**SMALL)), length_reward, args, Dataset.from_list(prompt_rows(4)))
    for chosen, words in REFUSED.values():
        Own.chosen = chosen
        with pytest.raises(TypeError, match=words):
            trainer.train()
    with pytest.raises(RuntimeError, match="_compute_loss of Own can be called within its own _compute_loss only"):
        GRPOTrainer._compute_loss(trainer, None, {})
    trainer._compute_loss = None
    with pytest.raises(TypeError, match="_compute_loss was set on the trainer instance"):
        trainer.train()


class Shorter(GRPOTrainer):
    """Removes the last two tokens of completions from the mask that super() gets."""

    def _compute_loss(self, model, inputs):
        mask = inputs["completion_mask"]
        return super()._compute_loss(
            model, inputs | {"completion_mask": jnp.where(jnp.arange(mask.shape[1]) < 4, mask, 0)}
        )


class ShorterByHand(GRPOTrainer):
    def _compute_loss(self, model, inputs):
        mask, advantages = inputs["completion_mask"], inputs["advantages"][:, None]
        mask = jnp.where(jnp.arange(mask.shape[1]) < 4, mask, 0)
        logps, _, _ = logps_of(self, model, inputs)
        ratio = jnp.exp(logps - inputs.get("old_per_token_logps", jax.lax.stop_gradient(logps)))
        losses = -jnp.minimum(ratio * advantages, jnp.clip(ratio, 0.8, 1.2) * advantages)
        return ((losses * mask).sum(-1) / mask.sum(-1)).mean() / self.current_gradient_accumulation_steps


@only_thorough
def test_a_mask_of_the_script_is_taken_by_super(trained):
    config = {"loss_type": "grpo", "rows": 6}  # the last step of the epoch is short
    same(trained(ShorterByHand, "by-hand", **config, max_steps=3), trained(Shorter, "super", **config, max_steps=3))


# Losses in torch


def trls_loss(kind, folder):
    """The `_compute_loss` of TRL's trainer, from its own file, as in a script that copied it."""
    module = inspect.getmodule(kind)
    file = folder / f"{kind.__name__}_loss.py"
    file.write_text(textwrap.dedent(inspect.getsource(kind._compute_loss)))
    names = {name: vars(module)[name] for name in ("torch", "nanmax", "nanmin")}
    exec(compile(file.read_text(), str(file), "exec"), names)
    return names["_compute_loss"]


VARIANTS = {
    "dapo": {"beta": 0.1, "evaluated": 3, "eval_strategy": "steps", "eval_steps": 2},
    "cispo": {"loss_type": "cispo"},
    "vespo": {"loss_type": "vespo"},
    "sapo": {"loss_type": "sapo", "beta": 0.1},
    "entropy": {"loss_type": "grpo", "top_entropy_quantile": 0.5},
    "off-policy": {"off_policy_mask_threshold": 0.001},
}


@pytest.mark.parametrize("name", usually("dapo".__eq__, VARIANTS))
def test_the_loss_of_trl_in_torch_is_the_built_in_one(trained, tmp_path, name):
    kind = type("Own", (GRPOTrainer,), {"_compute_loss": trls_loss(trl.GRPOTrainer, tmp_path)})
    wanted, found = trained(GRPOTrainer, "built-in", **VARIANTS[name]), trained(kind, "own", **VARIANTS[name])
    same(found, wanted, rtol=1e-4)
    for one, other in zip(found[0].state.log_history, wanted[0].state.log_history, strict=True):
        assert timeless(one) == pytest.approx(timeless(other), rel=1e-4, abs=1e-6)


def test_the_loss_of_rloo_in_torch_is_the_built_in_one(trained, tmp_path):
    kind = type("Own", (RLOOTrainer,), {"_compute_loss": trls_loss(trl.RLOOTrainer, tmp_path)})
    # Sums over rows padded to another width round differently, and Adam divides by tiny gradients.
    same(trained(kind, "own", max_steps=1), trained(RLOOTrainer, "built-in", max_steps=1), atol=1e-4)


SCRIPT = """
import torch

class Own(Trainer):
    def _generate_and_score_completions(self, inputs):
        outputs = super()._generate_and_score_completions(inputs)
        outputs["right"] = outputs["advantages"] > 0
        outputs["group"] = torch.arange(len(outputs["right"])) // 2
        return outputs

    def _logps(self, model, inputs):
        ids, mask = (torch.cat([inputs[f"prompt_{name}"], inputs[f"completion_{name}"]], 1) for name in ("ids", "mask"))
        return self._get_per_token_logps_and_entropies(model, ids, mask, inputs["completion_ids"].size(1))[0]

    def _compute_loss(self, model, inputs):
        inputs["completion_mask"][:, -1] = 0
        with torch.no_grad():
            old = self._logps(model, inputs)
        advantages = torch.where(inputs["right"], inputs["advantages"], 0.5 * inputs["advantages"])
        logps = self._logps(model, inputs)
        losses = -torch.exp(logps - old) * advantages[:, None] * inputs["completion_mask"]
        logps[inputs["completion_mask"] == 0] = 0.0
        self._metrics["train"]["own/groups"].append(len(inputs["group"].unique()))
        return losses.mean() + 0.1 * self._spread(logps)

    def _spread(self, logps):
        return logps.std()
"""


def by_both(script, checkpoint, tmp_path, kind="GRPO", rows=4, **config):
    """The trained trainer and its weights, of the script's class `Own` under TRL and here."""
    path, runs = tmp_path / "script.py", []
    path.write_text(script)
    for package in (trl, trl_jax):
        names = {"Trainer": getattr(package, f"{kind}Trainer"), "__name__": "script"}
        exec(compile(script, str(path), "exec"), names)
        args = getattr(package, f"{kind}Config")(str(tmp_path / package.__name__), **config or BASE | CONFIG)
        data = Dataset.from_list(prompt_rows(rows))
        trainer = names["Own"](str(checkpoint(**SMALL)), reward_funcs=length_reward, args=args, train_dataset=data)
        trainer.train()
        trainer.save_model()
        runs.append((trainer, read_weights(tmp_path / package.__name__)))
    return runs


def test_a_script_in_torch_is_the_run_of_trl(checkpoint, tmp_path):
    """Its means include padding, its masks are bool, and it writes into its inputs."""
    runs = by_both(SCRIPT, checkpoint, tmp_path)
    same(runs[1], runs[0], rtol=1e-4, atol=1e-5)
    groups = [[log["own/groups"] for log in run[0].state.log_history[:2]] for run in runs]
    assert groups[0] == groups[1]


CHANGING = """
import torch

class Own(Trainer):
    def _compute_loss(self, model, inputs):
        mask = inputs["completion_mask"]
        lengths = mask.sum(1)
        weights = lengths / lengths.float().mean()
        inputs = dict(inputs, advantages=inputs["advantages"] * weights)
        inputs["completion_mask"] = mask * (torch.arange(mask.size(1)) < 4)
        loss = super()._compute_loss(model, inputs)
        self._metrics["train" if self.model.training else "eval"]["own/weight"].append(weights.max().item())
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        full = torch.cat([inputs["prompt_mask"], mask], 1)
        logps, *_ = self._get_per_token_logps_and_entropies(model, ids, full, mask.size(1))
        return loss + 0.01 * (logps * mask).sum() / mask.sum() / self.current_gradient_accumulation_steps
"""


OTHERS = """
import torch

class Own(Trainer):
    def _compute_loss(self, model, inputs):
        inputs = inputs | {"old_per_token_logps": inputs["old_per_token_logps"] - 0.1}
        if self.state.global_step != 1:
            inputs["ref_per_token_logps"] = inputs["ref_per_token_logps"] * 1.1
        seen = torch.ones_like(inputs["completion_mask"])
        seen[:, 1] = 0
        return super()._compute_loss(model, inputs | {"tool_mask": seen})
"""


GENERATING = """
import torch

class Own(Trainer):
    def _generate_and_score_completions(self, inputs):
        outputs = super()._generate_and_score_completions(inputs)
        outputs["ref_per_token_logps"] = outputs["ref_per_token_logps"] * 1.1
        outputs["tool_mask"] = torch.ones_like(outputs["completion_mask"])
        outputs["tool_mask"][:, 1] = 0
        return outputs
"""


def test_other_reference_logps_and_a_tool_mask_of_generated_completions_are_those_of_trl(checkpoint, tmp_path):
    trained = by_both(GENERATING, checkpoint, tmp_path, **BASE | CONFIG | {"beta": 0.1})
    logs = [trainer.state.log_history[:2] for trainer, _ in trained]
    runs = [[(log["kl"], log["loss"], log["grad_norm"]) for log in of_run] for of_run in logs]
    assert np.array(runs[1]) == pytest.approx(np.array(runs[0]), rel=1e-3, abs=1e-6) and runs[0][0][0] > 0.1


def test_a_mask_that_super_takes_has_fewer_tokens_at_the_end():
    given, last = np.array([[1, 1, 1, 0], [1, 0, 1, 1]]), np.array([[1, 1, 0, 0], [1, 0, 0, 0]])
    for mask in (given, last, 0 * last):
        check_mask(mask, mask, given, tool_mask=True)
    with pytest.raises(TypeError, match="is 1 for tokens that do not count in the inputs, such as padding"):
        check_mask(0 * given + 1, given, given, tool_mask=True)
    first = np.array([[0, 1, 1, 0], [0, 0, 0, 0]])
    with pytest.raises(TypeError, match=r"would also hide this token from them.* Write the loss in the method itself"):
        check_mask(first, first, given, tool_mask=False)
    check_mask(given, first, given, tool_mask=True)


class Random(GRPOTrainer):
    """Changes what super() gets in place, by numbers that are the same in the two calls of a micro-batch."""

    drawn = ()

    def _compute_loss(self, model, inputs):
        factor = torch.rand(1) + np.random.rand() + random.random()
        self.drawn = (*self.drawn, factor.item())
        inputs["advantages"] *= factor
        return super()._compute_loss(model, inputs)


def test_what_super_gets_may_be_random(trained):
    found = trained(Random, max_steps=2)[0]
    drawn = found.drawn[-6:]  # of the last three micro-batches
    assert drawn[::2] == drawn[1::2] and len(set(drawn)) == 3
    assert all(log["grad_norm"] > 0 for log in found.state.log_history if "grad_norm" in log)


@pytest.mark.parametrize("kind, script", [("GRPO", CHANGING), thorough("RLOO", CHANGING), ("GRPO", OTHERS)])
def test_a_script_in_torch_that_changes_what_super_gets_is_the_run_of_trl(checkpoint, tmp_path, kind, script):
    """The advantages and the mask; it also adds to the loss, and logs. Or log-probabilities, and it adds a mask."""
    config = BASE | CONFIG | {"max_steps": 3} | ({"beta": 0.1} if script is OTHERS else {})
    if kind == "RLOO":
        config = {name: value for name, value in config.items() if name not in ("loss_type", "delta")}
    runs = by_both(script, checkpoint, tmp_path, kind, rows=6, **config)
    same(runs[1], runs[0], rtol=1e-4, atol=1e-4)
    name = "kl" if script is OTHERS else "own/weight"
    weights = [[log[name] for log in run[0].state.log_history if "loss" in log] for run in runs]
    assert weights[1] == pytest.approx(weights[0], rel=1e-4 if script is OTHERS else 1e-5) and len(weights[0]) == 3


CALLING = """
import torch
import torch.nn.functional as F

class Own(Trainer):
    def _compute_loss(self, model, inputs):
        ids, mask = (torch.cat([inputs[f"prompt_{name}"], inputs[f"completion_{name}"]], 1) for name in ("ids", "mask"))
        C, mask_C = inputs["completion_ids"].size(1), inputs["completion_mask"]
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False, return_dict=True).logits
        assert logits.shape[:2] == ids.shape and logits.dtype == torch.float32
        logits = logits[:, :-1, :][:, -C:, :] / self.temperature
        log_probs = F.log_softmax(logits, dim=-1)
        logps = log_probs.gather(-1, inputs["completion_ids"].unsqueeze(-1)).squeeze(-1)
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        confident = F.softmax(logits, -1).topk(3, dim=-1).values.sum(-1)
        with torch.no_grad():  # in two parts, as TRL's batch_size
            parts = [model(ids[i : i + 2], mask[i : i + 2], logits_to_keep=C + 1)[0] for i in range(0, len(ids), 2)]
        old = F.log_softmax(torch.cat(parts)[:, :-1] / self.temperature, -1)
        old = old.gather(-1, inputs["completion_ids"].unsqueeze(-1)).squeeze(-1)
        ratio, advantages = torch.exp(logps - old), inputs["advantages"].unsqueeze(1)
        losses = -torch.min(ratio * advantages, torch.clamp(ratio, 0.8, 1.2) * advantages)
        losses = losses - 0.01 * entropy + 0.1 * confident
        if "ref_per_token_logps" in inputs:
            log_ratio = inputs["ref_per_token_logps"] - logps
            losses = losses + self.beta * (torch.exp(log_ratio) - log_ratio - 1)
        mode = "train" if self.model.training else "eval"
        self._metrics[mode]["own/entropy"].append(((entropy * mask_C).sum() / mask_C.sum()).item())
        loss = ((losses * mask_C).sum(-1) / mask_C.sum(-1).clamp(min=1.0)).mean()
        return loss / 2 if mode == "train" else loss
"""


@pytest.mark.parametrize("kind", usually("GRPO".__eq__, ("GRPO", "RLOO")))
def test_a_script_in_torch_that_calls_the_model_is_the_run_of_trl(checkpoint, tmp_path, caplog, kind):
    (tmp_path / "script.py").write_text(CALLING)
    runs = []
    for package in (trl, trl_jax):
        names = {"Trainer": getattr(package, f"{kind}Trainer"), "__name__": "script"}
        exec(compile(CALLING, str(tmp_path / "script.py"), "exec"), names)
        own = CONFIG | {"max_steps": 3, "max_completion_length": 16, "temperature": 0.8, "beta": 0.1}
        args = getattr(package, f"{kind}Config")(str(tmp_path / package.__name__), **BASE | own)
        rows, ends = Dataset.from_list(prompt_rows(8)), []

        def reward(completions, completion_ids, ends=ends, **columns):
            ends += map(len, completion_ids)
            return length_reward(completions)

        trainer = names["Own"](str(checkpoint(**SMALL)), reward_funcs=reward, args=args, train_dataset=rows)
        trainer.train()
        trainer.save_model()
        runs.append((trainer, read_weights(tmp_path / package.__name__), ends))
    assert runs[0][2] == runs[1][2] and len(set(ends)) > 1
    same(runs[1], runs[0], rtol=1e-4, atol=1e-5)
    entropies = [[log["own/entropy"] for log in run[0].state.log_history[:3]] for run in runs]
    assert entropies[1] == pytest.approx(entropies[0], rel=1e-4)
    sizes = [record.getMessage() for record in caplog.records if "logits of completions" in record.getMessage()]
    assert len(sizes) == 1 and "float32 [4, 32, 520]" in sizes[0]


def test_logits_on_more_cpu_devices_than_cores_are_refused(monkeypatch):
    def on(devices):
        return SimpleNamespace(sharding_plan=SimpleNamespace(mesh=SimpleNamespace(devices=np.zeros(devices))))

    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1})
    with pytest.raises(ValueError, match="would wait forever on 2 CPU devices with 2 cores"):
        check_threads(on(2))
    check_threads(SimpleNamespace(sharding_plan=None))
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1, 2})
    check_threads(on(2))


def test_a_method_that_arrays_have_with_another_meaning_makes_a_loss_one_in_torch(tmp_path):
    text = "def own(logps):\n    return logps.mean() + helper(logps)\n\ndef helper(x):\n    y = {}\n    return y\n"
    for imported, call, found in (
        ("import torch", "x.std()", "y = x.std()"),
        ("import torch", "x.mean()", None),
        ("import torch, jax", "x.std()", None),
        ("", "x.std()", None),
        ("import torch\ndef other(x):\n    return x.std()\n", "x.other()", None),  # an attribute of the same name
        ("import torch\ndef other(x):\n    return x.std()\n", "other(x)", "return x.std()"),
    ):
        file, names = tmp_path / f"{len(list(tmp_path.iterdir()))}.py", {}
        file.write_text(f"{imported}\n{text.format(call)}")
        exec(compile(file.read_text(), str(file), "exec"), names)
        error = found_in_torch("compute_loss", [names["own"]])
        assert (error and error.line) == found


class Penalized(GRPOTrainer):
    """The built-in loss plus a penalty on confident tokens, using torch operations that jax.numpy does not have."""

    weights, steps = {"penalty": 0.01}, ()

    def _compute_loss(self, model, inputs):
        loss, mask = super()._compute_loss(model, inputs), inputs["completion_mask"]
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        _, entropies, _ = self._get_per_token_logps_and_entropies(model, ids, None, mask.size(1), compute_entropy=True)
        mean = (entropies * mask).sum() / mask.sum()
        if mean.item() > 0:
            self._metrics["train"]["own/entropy"].append(mean.item())
        self.steps = (*self.steps, self.state.global_step)
        return loss - self.weights["penalty"] * mean / self.current_gradient_accumulation_steps


class PenalizedInJax(GRPOTrainer):
    def _compute_loss(self, model, inputs):
        loss, mask = super()._compute_loss(model, inputs), inputs["completion_mask"]
        _, entropies, _ = logps_of(self, model, inputs)
        return loss - 0.01 * (entropies * mask).sum() / mask.sum() / self.current_gradient_accumulation_steps


def test_torch_may_add_to_the_built_in_loss(trained, caplog):
    found, wanted = trained(Penalized, "torch"), trained(PenalizedInJax, "jax")
    same(found, wanted)
    logs, others = found[0].state.log_history[:-1], wanted[0].state.log_history[:-1]
    for one, other in zip(logs, others, strict=True):
        assert one["own/entropy"] == pytest.approx(other["entropy"], rel=1e-5)
        assert one.keys() - {"own/entropy"} == other.keys()
    assert found[0].steps == (0, 0, 1, 1)  # one per micro-batch
    assert sum("is written in torch" in record.getMessage() for record in caplog.records) == 1


class Clamped(GRPOTrainer):
    """With old log-probabilities so far away that the built-in loss has no finite gradient; this clamped ratio has
    one."""

    def _generate_and_score_completions(self, inputs):
        outputs = super()._generate_and_score_completions(inputs)
        return outputs | {"old_per_token_logps": outputs["old_per_token_logps"] - 200}

    def _compute_loss(self, model, inputs):
        ids, mask = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1), inputs["completion_mask"]
        logps = self._get_per_token_logps_and_entropies(model, ids, None, mask.size(1))[0]
        ratio = torch.exp((logps - inputs["old_per_token_logps"]).clamp(max=300.0) - 200)
        if self.state.global_step > 0:
            self._metrics["train"]["own/ratio"].append((ratio * mask).sum().item() / mask.sum().item())
        return -(ratio * inputs["advantages"][:, None] * mask).sum() / mask.sum()


def test_a_built_in_loss_that_is_not_asked_for_changes_nothing(trained):
    trainer, _ = trained(Clamped)
    first, second = trainer.state.log_history[:2]
    assert np.isfinite(first["grad_norm"]) and first["grad_norm"] > 0
    assert "own/ratio" not in first and second["own/ratio"] == pytest.approx(1, abs=0.3)
    assert not {"clip_ratio/low_mean", "entropy"} & first.keys()


def raises(self, inputs, ids):
    raise KeyError("of the script")


def with_advantages(of):
    def loss(self, inputs, ids):
        return super(Failing, self)._compute_loss(self.given, inputs | {"advantages": of(self, inputs, ids)})

    return loss


def with_mask(of):
    def loss(self, inputs, ids):
        mask = of(inputs["completion_mask"].clone())
        return super(Failing, self)._compute_loss(self.given, inputs | {"completion_mask": mask})

    return loss


def with_old(self, inputs, ids):
    old = logps_in_torch(self, inputs, ids).detach()
    return super(Failing, self)._compute_loss(self.given, inputs | {"old_per_token_logps": old})


def logps_in_torch(self, inputs, ids):
    return self._get_per_token_logps_and_entropies(self.given, ids, None, inputs["completion_ids"].size(1))[0]


def twice(self, inputs, ids):
    super(Failing, self)._compute_loss(self.given, inputs | {"advantages": 2 * inputs["advantages"]})
    return super(Failing, self)._compute_loss(self.given, inputs | {"advantages": 3 * inputs["advantages"]})


def other_ids(self, inputs, ids):
    return super(Failing, self)._compute_loss(self.given, inputs | {"completion_ids": 0 * inputs["completion_ids"]})


def other_tokens(self, inputs, ids):
    length = inputs["completion_ids"].size(1)
    return self._get_per_token_logps_and_entropies(self.given, ids * 0, None, length)[0].sum()


def many_numbers(self, inputs, ids):
    for number in range(33):
        self._metrics["train"][f"number{number}"].append(1.0)
    return super(Failing, self)._compute_loss(self.given, inputs)


def backwards(self, inputs, ids):
    logps = self._get_per_token_logps_and_entropies(self.given, ids, None, inputs["completion_ids"].size(1))[0]
    logps.sum().backward()
    return logps.mean()


class Failing(GRPOTrainer):
    def _compute_loss(self, model, inputs):
        self.given = model
        return type(self).chosen(self, inputs, torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1))


class Done(Exception):
    pass


def test_what_a_loss_in_torch_cannot_do_is_said(checkpoint, tmp_path, monkeypatch):
    """All refusals within the first micro-batch of a run, so that a step is not compiled for each."""
    few = {"max_steps": 1, "gradient_accumulation_steps": 1, "num_iterations": 1}
    args = trl_jax.GRPOConfig(str(tmp_path), **BASE | CONFIG | few)
    trainer = Failing(str(checkpoint(**SMALL)), length_reward, args, Dataset.from_list(prompt_rows(4)))
    before = read_params(trainer)
    Failing.chosen = staticmethod(raises)
    with pytest.raises(KeyError, match="of the script"):
        trainer.train()
    cases = [
        (lambda self, inputs, ids: self.given(ids).logits.mean(), ValueError, "predict no token of the completion"),
        (other_ids, TypeError, "got another completion_ids than the inputs have. It takes other advantages"),
        (
            with_advantages(lambda self, inputs, ids: inputs["advantages"][:, None] * inputs["completion_mask"]),
            TypeError,
            r"advantages has the shape \[4, \d+\]; super\(\)._compute_loss takes \[4\]",
        ),
        (
            with_advantages(lambda self, inputs, ids: inputs["advantages"] + logps_in_torch(self, inputs, ids).mean(1)),
            TypeError,
            "advantages depends on the parameters",
        ),
        (with_mask(lambda mask: torch.mul(mask, 0.5)), TypeError, "takes no weights of tokens"),
        (with_mask(lambda mask: mask.index_fill(1, torch.tensor(1), 0)), TypeError, r"pass 0 in inputs\['tool_mask'\]"),
        (with_old, TypeError, "got old_per_token_logps, which the inputs do not have"),
        (backwards, TypeError, r"calls \.backward\(\), which trl_jax does itself"),
        (lambda self, inputs, ids: self.model(ids).logits.mean(), TypeError, "calls self.model, whose outputs"),
        (
            lambda self, inputs, ids: self.given(ids, output_hidden_states=True).logits.mean(),
            TypeError,
            r"model\(...\) got output_hidden_states; in a loss on completions it takes input_ids",
        ),
        (lambda self, inputs, ids: self.given(ids.flip(1)).logits.mean(), TypeError, "not the ids of the inputs"),
        (
            lambda self, inputs, ids: self.given(ids, torch.zeros_like(ids)).logits.mean(),
            TypeError,
            "with another attention_mask than prompt_mask and completion_mask of the inputs",
        ),
        (other_tokens, TypeError, "with other token ids than prompt_ids and completion_ids"),
        (many_numbers, ValueError, "logs more than 32 numbers"),
        (lambda self, inputs, ids: ids.float().mean(), TypeError, "a tensor without a gradient"),
        (twice, TypeError, "got another advantages than in the method's first call"),
    ]
    computed = TorchCalls._computed

    def refused(self, *given):
        while cases:  # the step is traced again for the case that calls the model first, and for `twice`
            chosen, error, words = cases[0]
            Failing.chosen = staticmethod(chosen)
            with pytest.raises(error, match=words):
                computed(self, *given)
            del cases[0]
        raise Done

    monkeypatch.setattr(TorchCalls, "_computed", refused)
    with pytest.raises(Done):
        trainer.train()
    assert all(np.array_equal(value, before[name]) for name, value in read_params(trainer).items())


def read_params(trainer):
    return {name: np.asarray(value) for name, value in trainer.model.params.items()}


def test_the_helpers_of_losses_take_arrays_and_tensors():
    random = np.random.default_rng(0)
    entropies, logps, sampled = random.normal(size=(3, 4, 6)).astype(np.float32)
    mask = (np.arange(6) < random.integers(1, 7, (4, 1))).astype(np.int32)
    advantages = np.array([[1.0], [-1.0], [-0.5], [0.0]], np.float32)
    calls = {
        "get_high_entropy_mask": (abs(entropies), mask, 0.8),
        "get_off_policy_mask": (advantages, logps, sampled, mask, 0.2),
        "get_gamma_weights": (advantages, logps - sampled, mask, np.exp(0.1 * sampled)),
    }
    ours, theirs = object.__new__(GRPOTrainer), object.__new__(trl.GRPOTrainer)
    theirs.accelerator = SimpleNamespace(pad_across_processes=lambda values, **_: values, gather=lambda values: values)
    for name, given in calls.items():
        tensors = [torch.tensor(value) if isinstance(value, np.ndarray) else value for value in given]
        wanted = getattr(theirs, name)(*tensors)
        found = getattr(ours, name)(*tensors)
        assert torch.is_tensor(found) and found.dtype == wanted.dtype
        arrays = [jnp.asarray(value) if isinstance(value, np.ndarray) else value for value in given]
        for one in (found.numpy(), getattr(ours, name)(*arrays)):
            np.testing.assert_allclose(np.asarray(one), wanted.numpy(), rtol=1e-5, atol=1e-30, err_msg=name)
