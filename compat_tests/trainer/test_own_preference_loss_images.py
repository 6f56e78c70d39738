"""User-defined preference losses on rows with images get TRL's inputs and yield its numbers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import trl_jax
from compat_tests.effort import only_thorough, usually
from compat_tests.trainer.test_own_preference_loss import trls_loss
from compat_tests.trainer.vision_models import TEXT_ONLY, logged, pairs, tiny_llava, tiny_tiled, trainer, unpaired

NOT_READ = {"completion_mask", "label", "ref_logps", "ref_KL_logps", "ref_chosen_logps", "ref_rejected_logps"}
SAME = ("loss", "grad_norm", "eval_loss")


def log_probs(model, inputs, prefix=""):
    """Calls the model as TRL does, with every entry of the batch that the loss does not read itself."""
    names = {name for name in inputs if name not in NOT_READ and not name.startswith("KL_")}
    tokens = {name: inputs[f"{prefix}{name}"] for name in ("input_ids", "attention_mask")}
    read = {name: inputs[name] for name in names} | tokens
    labels = jnp.where(inputs[f"{prefix}completion_mask"] == 0, -100, read["input_ids"])
    return model(**read, labels=labels, use_cache=False, output_router_logits=True, fused_lm_head=True).log_probs.sum(1)


class Sigmoid(trl_jax.DPOTrainer):
    def _compute_loss(self, model, inputs, return_outputs):
        chosen, rejected = jnp.split(log_probs(model, inputs), 2)
        margin = chosen - inputs["ref_chosen_logps"] - (rejected - inputs["ref_rejected_logps"])
        return -jax.nn.log_sigmoid(self.beta * margin).mean()


class ByHalves(Sigmoid):
    """Calls the model separately for chosen and rejected texts."""

    def _compute_loss(self, model, inputs, return_outputs):
        named = ("input_ids", "attention_mask", "completion_mask")
        halves = [{name: jnp.split(inputs[name], 2)[half] for name in named} for half in range(2)]
        chosen, rejected = (log_probs(model, half | {"pixel_values": inputs["pixel_values"]}) for half in halves)
        margin = chosen - inputs["ref_chosen_logps"] - (rejected - inputs["ref_rejected_logps"])
        return -jax.nn.log_sigmoid(self.beta * margin).mean()


class Backwards(Sigmoid):
    """Calls the model with rows that are not in the batch."""

    def _compute_loss(self, model, inputs, return_outputs):
        named = ("input_ids", "attention_mask", "completion_mask")
        rows = {name: inputs[name][::-2] for name in named} | {"pixel_values": inputs["pixel_values"]}
        return log_probs(model, rows).mean()


class Half(trl_jax.DPOTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return 0.5 * super().compute_loss(model, inputs)


class Kto(trl_jax.KTOTrainer):
    def _compute_loss(self, model, inputs, return_outputs):
        ratio = log_probs(model, inputs) - inputs["ref_logps"]
        kl = jax.lax.stop_gradient(log_probs(model, inputs, "KL_") - inputs["ref_KL_logps"]).mean()
        kl = jnp.maximum(kl, 0)
        signed = jnp.where(inputs["label"] > 0, ratio - kl, kl - ratio)
        return (1 - jax.nn.sigmoid(self.beta * signed)).mean()


ROWS = {"DPO": pairs, "KTO": unpaired}


@pytest.fixture(scope="module")
def llava(tmp_path_factory):
    return str(tiny_llava(tmp_path_factory.mktemp("llava")))


def run(package, kind, model, folder, own=None, adapter=None, **options):
    """The log entries of two steps on rows with zero to two images, and for pairs of their evaluation."""
    rows = ROWS[kind]()
    options = {"learning_rate": 1e-2, "eval_dataset": rows, "per_device_eval_batch_size": 4, "max_steps": 2, **options}
    if own is not None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(package, f"{kind}Trainer", own)
            made = trainer(package, kind, model, folder, rows, adapter, **options)
    else:
        made = trainer(package, kind, model, folder, rows, adapter, **options)
    return [*logged(made), *([made.evaluate()] if kind == "DPO" else ())]


def assert_same(ours, theirs):
    assert len(ours) == len(theirs) >= 2
    for own, their in zip(ours, theirs, strict=True):
        names = [name for name in SAME if name in their]
        assert names
        for name in names:
            assert own[name] == pytest.approx(their[name], rel=2e-4, abs=1e-5), name


@pytest.mark.parametrize("kind", ["DPO", "KTO"])
def test_a_loss_in_jax_numpy_is_trls(kind, llava, tmp_path):
    theirs = run(pytest.importorskip("trl"), kind, llava, tmp_path / "trl")
    ours = run(trl_jax, kind, llava, tmp_path / "ours", Sigmoid if kind == "DPO" else Kto)
    assert_same(ours, theirs)


TILED = [(kind, frozen) for kind in ROWS for frozen in (False, True)]


@pytest.mark.parametrize(("kind", "frozen"), usually(lambda *case: False, TILED))
def test_positions_on_three_axes_and_a_frozen_tower_are_trls(kind, frozen, tmp_path, monkeypatch):
    """For the built-in loss, the features of a frozen tower are cached."""
    processor = tiny_tiled(tmp_path / "model", "qwen2_5_vl", monkeypatch)
    options = {"adapter": TEXT_ONLY if frozen else None, "processing_class": processor, "num_train_epochs": 2}
    theirs = run(pytest.importorskip("trl"), kind, str(tmp_path / "model"), tmp_path / "trl", **options)
    own = Sigmoid if kind == "DPO" else Kto
    ours = run(trl_jax, kind, str(tmp_path / "model"), tmp_path / "ours", own, **options)
    assert_same(ours, theirs)


@only_thorough
@pytest.mark.parametrize("kind", ROWS)
def test_the_loss_of_trl_in_torch_is_trls(kind, llava, tmp_path):
    trl = pytest.importorskip("trl")
    own = {"_compute_loss": trls_loss(getattr(trl, f"{kind}Trainer"), tmp_path)}
    theirs = run(trl, kind, llava, tmp_path / "trl")
    ours = run(trl_jax, kind, llava, tmp_path / "ours", type("Own", (getattr(trl_jax, f"{kind}Trainer"),), own))
    assert_same(ours, theirs)


@only_thorough
def test_other_calls_of_the_model(llava, tmp_path):
    plain = run(trl_jax, "DPO", llava, tmp_path / "plain")
    assert_same(run(trl_jax, "DPO", llava, tmp_path / "by_halves", ByHalves), plain)
    half = run(trl_jax, "DPO", llava, tmp_path / "half", Half)[0]
    assert half["grad_norm"] == pytest.approx(0.5 * plain[0]["grad_norm"], rel=1e-4)


@only_thorough
def test_rows_that_the_batch_does_not_have_give_no_number(llava, tmp_path):
    with pytest.raises(FloatingPointError, match="With dropout off, no value is NaN"):
        run(trl_jax, "DPO", llava, tmp_path, Backwards, max_steps=3)
