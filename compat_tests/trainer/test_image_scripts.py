"""Predictions for rows with images match TRL's; user-defined losses get images with the rows."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import trl_jax
from compat_tests.effort import THOROUGH, only_thorough
from compat_tests.trainer.vision_models import (
    TEXT_ONLY,
    completions,
    logged,
    messages,
    pairs,
    tiny_llava,
    tiny_qwen,
    trainer,
    unpaired,
)

KINDS = {
    "messages": ("SFT", messages),
    "completions": ("SFT", completions),
    "pairs": ("DPO", pairs),
    "kto": ("KTO", unpaired),
}


@pytest.fixture(scope="module")
def llava(tmp_path_factory):
    return str(tiny_llava(tmp_path_factory.mktemp("llava")))


def shares(found):
    """Metrics as user scripts write them, from logits and token ids. TRL pads answers with EOS if the pad id is 0."""
    logits, ids = found.predictions[:, :-1], found.label_ids[:, 1:]
    real = ids > 1
    return {
        "right": float((np.argmax(logits, -1) == ids)[real].mean()),
        "targets": int(real.sum()),
        "ids": int(found.inputs[found.inputs > 1].sum()),
    }


@pytest.mark.parametrize("case", KINDS)
def test_compute_metrics_and_predict_are_trls(case, llava, tmp_path):
    trl, found = pytest.importorskip("trl"), {}
    kind, rows = KINDS[case]
    for package in (trl_jax, trl):
        made = trainer(
            package, kind, llava, tmp_path / package.__name__, rows(), compute_metrics=shares, eval_dataset=rows(6),
            per_device_eval_batch_size=6, include_for_metrics=["inputs"],
        )  # fmt: skip
        found[package] = made.evaluate(), made.predict(made.eval_dataset)
    (mine, ours), (other, theirs) = found[trl_jax], found[trl]
    names = {name for name in other.keys() & mine.keys() if "per_second" not in name and "runtime" not in name}
    assert {"eval_loss", "eval_right", "eval_targets", "eval_ids"} <= names
    for name in names:
        assert mine[name] == pytest.approx(other[name], rel=2e-4, abs=2e-4), name
    real = ours.label_ids > 0
    assert real.sum() > 40 and ours.predictions.shape == theirs.predictions.shape
    assert np.array_equal(ours.label_ids[real], theirs.label_ids[real])
    assert np.abs(ours.predictions[real] - theirs.predictions[real]).max() < 1e-4
    assert ours.metrics["test_loss"] == pytest.approx(theirs.metrics["test_loss"], abs=1e-5)


def mean_loss(outputs, labels, num_items_in_batch=None):
    """The trainer's built-in loss, as a user would write it."""
    labels = labels[:, 1:]
    losses = optax.softmax_cross_entropy_with_integer_labels(outputs.logits[:, :-1], labels.clip(0))
    count = (labels != -100).sum() if num_items_in_batch is None else num_items_in_batch
    return jnp.where(labels != -100, losses, 0).sum() / count


class InJax(trl_jax.SFTTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = mean_loss(outputs, labels, num_items_in_batch)
        return (loss, outputs) if return_outputs else loss


class InTorch(trl_jax.SFTTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        import torch

        images = {name: inputs[name] for name in ("pixel_values",) if name in inputs}
        outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], **images)
        logits, labels = outputs.logits[:, :-1], inputs["labels"][:, 1:]
        logits, labels = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
        loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
        loss = loss / ((labels != -100).sum() if num_items_in_batch is None else num_items_in_batch)
        return (loss, outputs) if return_outputs else loss


def untimed(metrics):
    return {name: value for name, value in metrics.items() if not name.endswith(("runtime", "per_second"))}


def test_a_loss_of_a_script_gets_the_images(llava, tmp_path):
    """One row at a time, with and without an image."""
    rows = messages(6).select([0, 1, 3, 4])
    options = {
        "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "max_steps": 2,
        "train_sampling_strategy": "sequential", "pad_to_multiple_of": 64,
    }  # fmt: skip
    found = {}
    for kind in (trl_jax.SFTTrainer, InJax, *((InTorch,) if THOROUGH else ())):
        args = trainer(trl_jax, "SFT", llava, tmp_path / kind.__name__, rows, **options).args
        found[kind] = logged(kind(llava, args=args, train_dataset=rows))
    plain, *others = found.values()
    for own in others:
        for entry, wanted in zip(own, plain, strict=True):
            assert untimed(entry) == pytest.approx(untimed(wanted), rel=2e-4, abs=1e-5)


class Counted(InJax):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        assert num_items_in_batch is None
        return super().compute_loss(model, inputs, return_outputs)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_loss_of_a_script_is_averaged_over_micro_batches_where_transformers_averages(tmp_path):
    """For example Qwen2.5-VL: `compute_loss` gets no number of targets, only a `compute_loss_func` does."""
    folder, rows, counts = str(tiny_qwen(tmp_path / "qwen")), messages(4), []
    options = {
        "per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, "max_steps": 1, "pad_to_multiple_of": 64,
    }  # fmt: skip

    def passed(outputs, labels, num_items_in_batch):
        counts.append(num_items_in_batch)
        return 2 * (mean_loss(outputs, labels) / 4)

    args = trainer(trl_jax, "SFT", folder, tmp_path / "out", rows, **options).args
    [plain] = logged(trl_jax.SFTTrainer(folder, args, train_dataset=rows))
    [own] = logged(Counted(folder, args, train_dataset=rows))
    [doubled] = logged(trl_jax.SFTTrainer(folder, args, train_dataset=rows, compute_loss_func=passed))
    for name in ("loss", "grad_norm"):
        assert own[name] == pytest.approx(plain[name], rel=2e-4)
        assert doubled[name] == pytest.approx(2 * plain[name], rel=2e-4)
    assert counts and None not in counts


def test_features_that_are_kept_change_nothing_that_a_script_sees(llava, tmp_path):
    """The tower is frozen, and every row is used twice."""
    rows, found = messages(6), []
    for kind in (trl_jax.SFTTrainer, InJax):
        adapter = trl_jax.LoraConfig(**TEXT_ONLY)
        args = trainer(
            trl_jax, "SFT", llava, tmp_path / kind.__name__, rows, max_steps=2, num_train_epochs=2,
            per_device_train_batch_size=6, per_device_eval_batch_size=6, pad_to_multiple_of=64,
        ).args  # fmt: skip
        made = kind(llava, args=args, train_dataset=rows, eval_dataset=rows, peft_config=adapter)
        found.append([*map(untimed, logged(made)), untimed(made.evaluate())])
    for own, wanted in zip(*found, strict=True):
        names = own.keys() & wanted.keys() & {"loss", "grad_norm", "eval_loss"}
        assert names and [own[name] for name in names] == pytest.approx([wanted[name] for name in names], rel=2e-4)
    plain = trl_jax.SFTTrainer(llava, args=args, train_dataset=rows, eval_dataset=rows, peft_config=adapter)
    predicted = plain.predict(rows)
    [batch] = plain.get_eval_dataloader()  # with image patches
    assert batch["pixel_values"].shape[0] >= 6 * 16 and predicted.predictions.shape[:2] == batch["input_ids"].shape
    whole = trl_jax.SFTTrainer(llava, args=args, train_dataset=rows).predict(rows)  # here the tower trains
    np.testing.assert_allclose(predicted.predictions, whole.predictions, atol=1e-4)


class Doubled(trl_jax.SFTTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return 2 * super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)


class Half(trl_jax.SFTTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return model(input_ids=inputs["input_ids"][:1], pixel_values=inputs["pixel_values"]).logits.mean()


class Predicting(trl_jax.SFTTrainer):
    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        logits = model(**inputs).logits
        return logits.mean(), logits, inputs["labels"]


@only_thorough
def test_predictions_of_a_script_and_rows_without_their_images(llava, tmp_path):
    args = trainer(
        trl_jax, "SFT", llava, tmp_path, messages(), per_device_eval_batch_size=6, pad_to_multiple_of=64
    ).args
    rows = messages(6)
    plain, own = (kind(llava, args=args, train_dataset=rows).predict(rows) for kind in (trl_jax.SFTTrainer, Predicting))
    real = own.label_ids >= 0
    np.testing.assert_allclose(own.predictions[real], plain.predictions[real], atol=1e-5)
    kinds = (trl_jax.SFTTrainer, InTorch, Doubled)
    found = [untimed(kind(llava, args=args, train_dataset=rows).evaluate(rows)) for kind in kinds]
    passed = trl_jax.SFTTrainer(llava, args=args, train_dataset=rows, compute_loss_func=mean_loss)
    for own in (found[1], untimed(passed.evaluate(rows))):
        assert own == pytest.approx(found[0], rel=1e-5)
    assert found[2]["eval_loss"] == pytest.approx(2 * found[0]["eval_loss"], rel=1e-5)
    with pytest.raises(ValueError, match=r"input_ids \[1, \d+\] and .* expected the shapes of the batch, \[2, "):
        Half(llava, args=args, train_dataset=completions()).train()
