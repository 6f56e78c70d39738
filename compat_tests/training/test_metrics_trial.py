"""Before training, compute_metrics is called on two rows to find errors early."""

from __future__ import annotations

import random

import jax
import numpy as np
import pytest
from datasets import Dataset

import trl_jax
from compat_tests.effort import usual
from compat_tests.parity.reference import BASE
from compat_tests.trainer.trainers import FACTS, make, stream, table
from trl_jax.training import user_loss_errors
from trl_jax.training.user_loss_errors import ArraysOrTensors


@pytest.fixture(scope="session")
def folder(checkpoint):
    return checkpoint(**FACTS)


def of_three_labels(found):
    first, second, third = found.predictions.T
    return {"best": first.max()}


@pytest.mark.parametrize("several", [False, True])
def test_one_for_another_shape_fails_before_the_first_step(folder, tmp_path, several):
    rows = {"a": table(6), "b": table(6)} if several else table(6)
    trainer = make(trl_jax, folder, tmp_path, eval_dataset=rows, compute_metrics=of_three_labels)
    before = jax.device_get(trainer.model.params)
    with pytest.raises(ValueError, match="not enough values to unpack") as error:
        trainer.train()
    note, *_ = error.value.__notes__
    text = "tried before training on 2 rows of the evaluation set: predictions (4, 1), label_ids (), numbers drawn."
    assert note == f"compute_metrics was {text}"
    assert trainer.state.global_step == 0 and trainer.state.log_history == []
    assert all(np.array_equal(before[name], value) for name, value in trainer.model.params.items())


def test_one_that_fits_is_tried_once_and_changes_nothing(folder, tmp_path, capsys):
    seen = []

    def compute_metrics(found, compute_result=True):
        seen.append((found.predictions.shape, found.inputs.shape[0], found.losses.shape, compute_result))
        print("seen", random.random(), np.random.random())
        return {"count": len(seen)}

    asked = {"include_for_metrics": ["inputs", "loss"], "batch_eval_metrics": True}
    logs = []
    for metrics, more in ((None, {}), (compute_metrics, asked)):
        how = {"eval_dataset": table(6), "compute_metrics": metrics, "config": {"max_steps": 1} | more}
        trainer = make(trl_jax, folder, tmp_path, **how)
        random.seed(1)
        np.random.seed(1)
        drawn = random.Random(1).random(), np.random.RandomState(1).random()
        trainer.train()
        assert (random.random(), np.random.random()) == drawn
        logs.append([log["loss"] for log in trainer.state.log_history if "loss" in log])
    assert logs[0] == logs[1] and "seen" not in capsys.readouterr().out
    assert seen == [((4, 1), 4, (2,), True)]
    trainer.train()
    assert len(seen) == 1
    trainer.evaluate()
    assert len(seen) > 1


def likeliest(logits, labels):
    return logits.argmax(-1)


FOR_TENSORS = """
def of_method(logits, labels):
    return logits.argmax(dim=-1)

def of_torch(logits, labels):
    import torch
    values, places = torch.topk(logits.softmax(dim=-1), 2)
    return places, values.float().sum(-1) * labels.clone().ne(-100)

def of_pair(logits, labels):
    import torch
    return logits.max(-1)[1]
"""


@pytest.mark.parametrize("name", ["of_method", "of_torch", "of_pair"])
def test_preprocessing_may_be_written_for_tensors(name, checkpoint, tmp_path):
    pytest.importorskip("torch")
    found, rows = [], Dataset.from_dict({"prompt": ["a", "b b"], "completion": ["good", "fine it is"]})
    (tmp_path / "own.py").write_text(FOR_TENSORS)  # this file imports jax, so it has no torch code
    space = {"__name__": "own"}
    exec(compile(FOR_TENSORS, str(tmp_path / "own.py"), "exec"), space)

    def compute_metrics(evaluated):
        found.append(evaluated)
        return {}

    for preprocess in (None, space[name]):
        args = trl_jax.SFTConfig(str(tmp_path), **BASE | {"max_steps": 1})
        trl_jax.SFTTrainer(
            str(checkpoint(**FACTS, head="causal")), args, train_dataset=rows, eval_dataset=rows,
            compute_metrics=compute_metrics, preprocess_logits_for_metrics=preprocess,
        ).evaluate()  # fmt: skip
    logits, made, real = found[0].predictions, found[1].predictions, found[0].label_ids != -100
    order = np.argsort(-logits, axis=-1)
    if name != "of_torch":
        assert isinstance(made, np.ndarray) and (made == order[..., 0]).all()
        return
    assert (made[0] == order[..., :2]).all()
    shares = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    np.testing.assert_allclose(made[1], np.sort(shares, -1)[..., -2:].sum(-1) * real, rtol=1e-5)


def test_preprocessing_for_tensors_without_torch_is_explained(monkeypatch):
    monkeypatch.setattr(user_loss_errors, "available", lambda: False)
    with pytest.raises(
        TypeError, match="preprocess_logits_for_metrics receives arrays: `return logits.argmax.dim=-1.`"
    ):
        ArraysOrTensors(lambda logits: of_keyword(logits), "preprocess_logits_for_metrics")(np.zeros((1, 2)))


def of_keyword(logits):
    return logits.argmax(dim=-1)


@usual("SFT-likeliest", "DPO-None")
@pytest.mark.parametrize("preprocess", [None, likeliest], ids=["None", "likeliest"])
@pytest.mark.parametrize("name", ["SFT", "DPO", "KTO"])
def test_what_it_is_given_has_the_shapes_of_an_evaluation(name, preprocess, checkpoint, tmp_path):
    folder, seen = checkpoint(**FACTS, head="causal"), []

    def compute_metrics(found):
        seen.append(jax.tree.map(lambda part: (part.shape, part.dtype), (found.predictions, found.label_ids)))
        return {}

    prompts, chosen, rejected = (["a", "b b"], ["good", "fine it is"], ["bad", "poor"])
    texts = Dataset.from_dict({"text": [f"{a} {b}" for a, b in zip(prompts, chosen, strict=True)]})
    pairs = Dataset.from_dict({"prompt": prompts, "chosen": chosen, "rejected": rejected})
    ids = Dataset.from_dict({"prompt": prompts, "completion": chosen, "label": [True, False]})
    rows = {"SFT": texts, "DPO": pairs, "KTO": ids}[name]
    how = BASE | {"max_steps": 1, "per_device_train_batch_size": 2}
    args = getattr(trl_jax, f"{name}Config")(str(tmp_path), **how)
    trainer = getattr(trl_jax, f"{name}Trainer")(
        str(folder), args=args, train_dataset=rows, eval_dataset=rows, compute_metrics=compute_metrics
    )
    trainer.preprocess_logits_for_metrics = preprocess
    trainer.train()
    trainer.evaluate()
    assert seen[0] == seen[1] and len(seen) == 2, seen


def test_too_few_rows_for_it_and_streams_do_not_end_a_run(folder, tmp_path, caplog):
    def of_many(found):
        return {"ratio": 1 / (len(found.predictions) - 4)}

    make(trl_jax, folder, tmp_path, config={"max_steps": 1}, eval_dataset=table(6), compute_metrics=of_many).train()
    assert "compute_metrics fails on 2 rows of the evaluation set" in caplog.text and "ZeroDivisionError" in caplog.text
    rows = stream(4)
    make(trl_jax, folder, tmp_path, config={"max_steps": 1}, eval_dataset=rows, compute_metrics=of_three_labels).train()
