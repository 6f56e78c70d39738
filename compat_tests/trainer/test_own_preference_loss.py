"""User-defined preference losses: `_compute_loss` of subclasses of DPOTrainer and KTOTrainer."""

from __future__ import annotations

import inspect
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import trl
from datasets import Dataset

import trl_jax
from compat_tests.effort import THOROUGH, only_thorough, usually
from compat_tests.parity.dpo_cases import SMALL
from compat_tests.parity.kto_cases import kto_rows
from compat_tests.parity.marks import timeless
from compat_tests.parity.reference import BASE
from compat_tests.tiny import preference_rows
from trl_jax.trainer.dpo_trainer import DPOTrainer
from trl_jax.trainer.kto_trainer import KTOTrainer

CONFIG = {
    "max_steps": 2, "learning_rate": 0.05, "optim": "sgd", "per_device_train_batch_size": 2,
    "per_device_eval_batch_size": 2, "gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 2,
    "save_strategy": "steps", "save_steps": 1, "batch_layout": "padded",
}  # fmt: skip


def rows_of(kind, count):
    return preference_rows(count, "prompt") if issubclass(kind, DPOTrainer) else kto_rows(count)


@pytest.fixture
def trained(checkpoint, tmp_path):
    def run(kind, *, resume=None, peft_config=None, model=SMALL, **config):
        args = kind.config_class(str(tmp_path / kind.__name__), **BASE | CONFIG | config)
        train, evaluation = (Dataset.from_list(rows_of(kind, count)) for count in (7, 3))  # short last batches
        trainer = kind(
            str(checkpoint(**model)), args=args, train_dataset=train, eval_dataset=evaluation, peft_config=peft_config
        )
        trainer.train(resume_from_checkpoint=resume)
        return trainer, {name: np.asarray(array) for name, array in trainer.model.params.items()}

    return run


def log_probs(model, inputs, prefix=""):
    """Calls the model as TRL does and sums log-probabilities over completion tokens."""
    ids, mask = inputs[f"{prefix}input_ids"], inputs[f"{prefix}completion_mask"]
    labels = jnp.where(mask == 0, -100, ids)
    outputs = model(
        input_ids=ids, attention_mask=inputs[f"{prefix}attention_mask"], use_cache=False, labels=labels,
        fused_lm_head=True,
    )  # fmt: skip
    assert outputs.log_probs.shape == (len(ids), ids.shape[1] - 1) == outputs.entropy.shape and outputs.logits is None
    return outputs.log_probs.sum(axis=1), outputs


class Sigmoid(DPOTrainer):
    """The DPO loss, from per-token log-probabilities."""

    def _compute_loss(self, model, inputs, return_outputs):
        logps, outputs = log_probs(model, inputs)
        chosen, rejected = jnp.split(logps, 2)
        margin = chosen - inputs["ref_chosen_logps"] - (rejected - inputs["ref_rejected_logps"])
        mode = "train" if self.model.training else "eval"
        self._metrics[mode]["own/margins"].append((self.beta * margin).mean())
        loss = -jax.nn.log_sigmoid(self.beta * margin).mean()
        return (loss, outputs) if return_outputs else loss


class Half(DPOTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        assert num_items_in_batch is None
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True)
        return (0.5 * loss, outputs) if return_outputs else 0.5 * loss


class Same(DPOTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return super().compute_loss(model, inputs, return_outputs)


class Kto(KTOTrainer):
    """The KTO loss; `jnp.where` replaces TRL's selection of rows."""

    def _compute_loss(self, model, inputs, return_outputs):
        ratio = log_probs(model, inputs)[0] - inputs["ref_logps"]
        kl = jax.lax.stop_gradient(log_probs(model, inputs, "KL_")[0] - inputs["ref_KL_logps"]).mean()
        kl = jnp.maximum(kl, 0)
        desirable = 1 - jax.nn.sigmoid(self.beta * (ratio - kl))
        undesirable = 1 - jax.nn.sigmoid(self.beta * (kl - ratio))
        return jnp.where(inputs["label"] > 0, desirable, undesirable).mean()


def compared(found, wanted, names=("loss", "grad_norm", "eval_loss")):
    for name, value in wanted[1].items():
        np.testing.assert_allclose(found[1][name], value, rtol=1e-5, atol=2e-6, err_msg=name)
    for one, other in zip(found[0].state.log_history, wanted[0].state.log_history, strict=True):
        for name in set(one) & set(other) & set(names):
            assert one[name] == pytest.approx(other[name], rel=1e-5, abs=1e-6), name


def test_dpo_in_jax_numpy_is_the_built_in_one(trained):
    wanted, found = trained(DPOTrainer), trained(Sigmoid)
    compared(found, wanted)
    for own, other in zip(found[0].state.log_history[:2], wanted[0].state.log_history[:2], strict=True):
        assert own["own/margins"] == pytest.approx(other["rewards/margins"], rel=1e-4, abs=1e-6)
        assert "rewards/margins" not in own
    assert found[0].state.log_history[2]["eval_own/margins"] > 0

    own = trained(Half, max_steps=1, eval_strategy="no")[0].state.log_history[0]
    first = wanted[0].state.log_history[0]
    assert own["grad_norm"] == pytest.approx(0.5 * first["grad_norm"], rel=1e-4) and own["grad_norm"] > 0
    assert own["loss"] == pytest.approx(0.5 * first["loss"], rel=1e-5) and set(own) == set(first)
    assert own["logps/chosen"] == pytest.approx(first["logps/chosen"])


def test_the_load_balancing_loss_counts_once_whatever_the_micro_batches(trained):
    experts = {"model_type": "mixtral", "head": "causal", "num_hidden_layers": 1, "hidden_size": 32}
    config = {"router_aux_loss_coef": 0.5, "max_steps": 1, "eval_strategy": "no", "model": experts}
    [logged] = trained(Same, **config)[0].state.log_history[:1]
    # Policy and reference are equal.
    assert logged["loss"] == pytest.approx(np.log(2) + 0.5 * logged["aux_loss"], rel=1e-5)
    assert logged["aux_loss"] > 1


@only_thorough
def test_a_run_with_a_loss_of_its_own_resumes_bit_for_bit(trained, tmp_path):
    whole = trained(Sigmoid)
    again = trained(Sigmoid, resume=str(tmp_path / "Sigmoid" / "checkpoint-1"))
    for name, value in whole[1].items():
        np.testing.assert_array_equal(again[1][name], value, err_msg=name)


@only_thorough
def test_an_adapter_is_compared_with_its_base_model(trained):
    config = {"peft_config": trl_jax.LoraConfig(r=2, task_type="CAUSAL_LM"), "eval_strategy": "no"}
    compared(trained(Sigmoid, **config), trained(DPOTrainer, **config))


@only_thorough
def test_kto_in_jax_numpy_is_the_built_in_one(trained):
    config = {"eval_strategy": "no"}
    compared(trained(Kto, precompute_ref_log_probs=True, **config), trained(KTOTrainer, **config))


def test_what_a_loss_of_preferences_cannot_do_is_said(checkpoint, tmp_path):
    class Own(DPOTrainer):
        def _compute_loss(self, model, inputs, return_outputs):
            return self.chosen(model, inputs)

    train = Dataset.from_list(rows_of(DPOTrainer, 4))
    args = trl_jax.DPOConfig(str(tmp_path), **BASE | {"max_steps": 1})
    trainer = Own(str(checkpoint(**SMALL)), args=args, train_dataset=train)
    changed = {"ref_chosen_logps": jnp.zeros(2)}
    for chosen, words in (
        (lambda self, model, inputs: self.ref_model(**inputs).logits.sum(), "_compute_loss reads ref_model"),
        (
            lambda self, model, inputs: DPOTrainer._compute_loss(self, model, inputs | changed, False),
            "another ref_chosen",
        ),
        (lambda self, model, inputs: float(log_probs(model, inputs)[0].sum()), r"append the array to self\._metrics"),
    ):
        Own.chosen = chosen
        with pytest.raises(TypeError, match=words):
            trainer.train()
    with pytest.raises(ValueError, match="compute_metrics gets whole logits"):
        Own(str(checkpoint(**SMALL)), args=args, train_dataset=train, compute_metrics=dict)


# Losses in torch


def trls_loss(kind, folder):
    """The `_compute_loss` of TRL's trainer, from its own file, as in a script that copied it."""
    file = folder / f"{kind.__name__}_loss.py"
    file.write_text(textwrap.dedent(inspect.getsource(kind._compute_loss)))
    names = {name: value for name, value in vars(inspect.getmodule(kind)).items() if not name.startswith("__")}
    exec(compile(file.read_text(), str(file), "exec"), names)
    return names["_compute_loss"]


def steps_alike(found, wanted):
    """The logs of training steps agree; logs of evaluations are means over batches, as in TRL. Accuracies are left out,
    because rounding decides between equal rewards."""
    for one, other in zip(found[0].state.log_history[:2], wanted[0].state.log_history[:2], strict=True):
        one, other = (
            {name: log[name] for name in timeless(log) if name != "rewards/accuracies"} for log in (one, other)
        )
        assert one == pytest.approx(other, rel=1e-4, abs=1e-5)


DPO_VARIANTS = {
    "weighted": {"use_weighting": True},
    "several": {"loss_type": ["sigmoid", "ipo"], "loss_weights": [1.0, 0.5]},
    "desensitized": {"ld_alpha": 0.5},
}


@pytest.mark.parametrize("name", usually(lambda name: name == "weighted", DPO_VARIANTS))
def test_the_loss_of_trls_dpo_in_torch_is_the_built_in_one(trained, tmp_path, name):
    kind = type("Own", (DPOTrainer,), {"_compute_loss": trls_loss(trl.DPOTrainer, tmp_path)})
    found, wanted = trained(kind, **DPO_VARIANTS[name]), trained(DPOTrainer, **DPO_VARIANTS[name])
    compared(found, wanted)
    steps_alike(found, wanted)


def test_the_loss_of_trls_kto_in_torch_is_the_built_in_one(trained, tmp_path):
    kind = type("Own", (KTOTrainer,), {"_compute_loss": trls_loss(trl.KTOTrainer, tmp_path)})
    found, wanted = trained(kind), trained(KTOTrainer)
    compared(found, wanted)
    steps_alike(found, wanted)  # including numbers that only some micro-batches log
    evaluated = found[0].state.log_history[2]
    assert evaluated["eval_logps/rejected"] == pytest.approx(wanted[0].state.log_history[2]["eval_logps/rejected"])


class FromLogits(DPOTrainer):
    def _compute_loss(self, model, inputs, return_outputs):
        ids, mask = inputs["input_ids"], inputs["completion_mask"]
        logits = model(input_ids=ids, attention_mask=inputs["attention_mask"], use_cache=False).logits
        logps = torch.gather(logits[:, :-1].log_softmax(-1), 2, ids[:, 1:, None])[..., 0] * mask[:, 1:]
        assert ids.shape[1] == inputs["attention_mask"].sum(-1).max() and logits.shape[:2] == ids.shape
        chosen, rejected = logps.sum(-1).chunk(2)
        margin = chosen - inputs["ref_chosen_logps"] - (rejected - inputs["ref_rejected_logps"])
        self._metrics["train" if self.model.training else "eval"]["own/margins"].append(margin.mean().item())
        return -torch.nn.functional.logsigmoid(self.beta * margin).mean()


class AroundTheDefault(DPOTrainer):
    def _compute_loss(self, model, inputs, return_outputs):
        loss, outputs = super()._compute_loss(model, inputs, return_outputs=True)
        loss = loss * torch.tensor(1.0)
        return (loss, outputs) if return_outputs else loss


@pytest.mark.parametrize("kind", usually(lambda kind: kind is FromLogits, [FromLogits, AroundTheDefault]))
def test_a_loss_of_pairs_in_torch_is_the_built_in_one(trained, kind):
    few = {} if THOROUGH else {"eval_strategy": "no"}  # unpadded, each batch compiles its own shapes
    found, wanted = (trained(one, pad_to_multiple_of=None, **few) for one in (kind, DPOTrainer))
    compared(found, wanted)
    if kind is AroundTheDefault:
        steps_alike(found, wanted)
    else:
        assert found[0].state.log_history[0].keys() - wanted[0].state.log_history[0].keys() == {"own/margins"}


def test_a_loss_in_torch_gets_no_other_inputs_from_super(checkpoint, tmp_path):
    class Own(DPOTrainer):
        def _compute_loss(self, model, inputs, return_outputs):
            assert torch.relu(inputs["completion_mask"]).sum() > 0
            same = inputs | {"attention_mask": inputs["attention_mask"] * 1}
            loss, outputs = super()._compute_loss(model, same, return_outputs=True)
            assert outputs.logits.shape[:2] == inputs["input_ids"].shape and not outputs.logits.requires_grad
            inputs["completion_mask"][:] = 0  # modifies its input in place
            return loss + super()._compute_loss(model, inputs, return_outputs)

    args = trl_jax.DPOConfig(str(tmp_path), **BASE | CONFIG | {"eval_strategy": "no"})
    rows = Dataset.from_list(preference_rows(4, "prompt"))
    with pytest.raises(TypeError, match="got another completion_mask than the inputs have"):
        Own(str(checkpoint(**SMALL)), args=args, train_dataset=rows).train()
