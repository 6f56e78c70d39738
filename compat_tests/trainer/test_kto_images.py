"""KTO on rows with images matches TRL in every layout; resuming and errors work as for text."""

from __future__ import annotations

import numpy as np
import pytest
from datasets import Dataset, IterableDataset

import trl_jax
from compat_tests import tiny
from compat_tests.effort import only_thorough, usually
from compat_tests.trainer.vision_models import logged, pairs, pictures, tiny_llava, trainer, unpaired

CASES = {
    "full": ({}, None),
    "lora": ({"max_length": 48}, {"r": 4, "target_modules": "all-linear"}),
    "apo": ({"loss_type": "apo_zero_unpaired"}, None),
}


def texts():
    rows = [
        {
            "prompt": f"<image> bake the {word}?",
            "completion": f" gladly {word}",
            "label": number % 2 == 1,
            "image": picture,
        }
        for number, (word, picture) in enumerate(zip(tiny.THINGS, pictures(6), strict=False))
    ]
    return Dataset.from_list(rows)


@pytest.fixture(scope="module")
def llava(tmp_path_factory):
    return str(tiny_llava(tmp_path_factory.mktemp("llava")))


@pytest.mark.parametrize("case", usually(lambda case: case == "full", CASES))
def test_losses_and_metrics_are_trls(case, llava, tmp_path):
    trl = pytest.importorskip("trl")
    options, adapter = CASES[case]
    rows = texts if case == "apo" else unpaired
    theirs = logged(trainer(trl, "KTO", llava, tmp_path / "trl", rows(), adapter, **options))
    ours = logged(trainer(trl_jax, "KTO", llava, tmp_path / "ours", rows(), adapter, **options))
    assert len(ours) == 3
    for own, their in zip(ours, theirs, strict=True):
        names = their.keys() & own.keys() - {"epoch"}
        assert {"loss", "grad_norm", "entropy", "num_tokens", "rewards/chosen", "logps/rejected"} <= names
        assert ("kl" in names) == (case != "apo") or own["kl"] == their["kl"] == 0
        for name in names:
            assert own[name] == pytest.approx(their[name], rel=2e-4, abs=1e-5 if name == "loss" else 2e-4), name


@only_thorough  # each of these is covered by default with another trainer
def test_layouts_streams_and_resumed_runs_have_the_same_numbers(llava, tmp_path):
    rows = unpaired()
    stream = IterableDataset.from_generator(lambda: iter(list(rows)))
    losses = {}
    for name, data in {"padded": rows, "packed": rows, "shared": rows, "stream": stream}.items():
        layout = "padded" if name == "stream" else name
        made = trainer(trl_jax, "KTO", llava, tmp_path / name, data, batch_layout=layout, save_strategy="steps",
                       save_steps=1, learning_rate=1e-2)  # fmt: skip
        losses[name] = [entry["loss"] for entry in logged(made)]
        if name == "padded":
            whole = made
    assert losses["stream"] == losses["padded"] and len({round(loss, 4) for loss in losses["padded"]}) == 3
    for layout in ("packed", "shared"):
        np.testing.assert_allclose(losses[layout], losses["padded"], atol=1e-5)
    half = trainer(trl_jax, "KTO", llava, tmp_path / "half", rows, batch_layout="padded", learning_rate=1e-2)
    half.train(resume_from_checkpoint=str(tmp_path / "padded" / "checkpoint-1"))
    for path, array in whole.model.params.items():
        assert np.array_equal(array, half.model.params[path]), path


@only_thorough
def test_an_evaluation_is_trls(llava, tmp_path):
    trl = pytest.importorskip("trl")
    rows, found = unpaired(), {}
    for package in (trl, trl_jax):
        made = trainer(package, "KTO", llava, tmp_path / package.__name__, rows, per_device_eval_batch_size=6,
                       learning_rate=1e-2)  # fmt: skip
        made.train()
        found[package] = made.evaluate(rows)
    theirs, ours = found.values()
    names = {name for name in theirs.keys() & ours.keys() if "per_second" not in name and "runtime" not in name}
    assert {"eval_loss", "eval_kl", "eval_rewards/margins"} <= names
    for name in names:
        assert ours[name] == pytest.approx(theirs[name], rel=5e-4, abs=5e-4), name


REFUSED = {
    "pairs": (pairs, {}, "Vision datasets must be in unpaired format"),
    "no label": (
        lambda: unpaired().remove_columns("label"),
        {},
        "train_dataset must have the column 'label'.*rename_column",
    ),
    "precomputed": (unpaired, {"precompute_ref_log_probs": True}, "`precompute_ref_log_probs=True` is not"),
    "prompts": (unpaired, {"max_prompt_length": 8}, "max_prompt_length=8 is not supported for rows with images"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_images_do_not_go_with(case, llava, tmp_path):
    rows, options, words = REFUSED[case]
    with pytest.raises(ValueError, match=words):
        trainer(trl_jax, "KTO", llava, tmp_path, rows(), **options)


def test_a_wrong_label_is_named(llava, tmp_path):
    rows = [{**row, "label": 2} for row in unpaired()]
    stream = IterableDataset.from_generator(lambda: iter(rows))
    with pytest.raises(ValueError, match="Row 0 of train_dataset: .*'label'"):
        trainer(trl_jax, "KTO", llava, tmp_path, stream).train()
