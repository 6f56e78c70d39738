"""The SFT task: sums over texts, the loss of a step, and TRL's metrics."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from datasets import Dataset

from compat_tests.tiny import tiny_tokenizer
from trl_jax.core.outputs import TokenOutputs
from trl_jax.data.batch import Batch, Extras, LossBatch
from trl_jax.tasks.sft import SftTask

# Five reads of two texts, and one padding position.
OUTPUTS = TokenOutputs(
    logps=jnp.log(jnp.array([0.5, 0.25, 0.5, 0.1, 0.2, 1.0])),
    entropy=jnp.array([1.0, 2.0, 3.0, 4.0, 5.0, 0.0]),
    mean_logps=jnp.array([-2.0, -3.0, -2.0, -3.0, -2.0, 0.0]),
    correct=jnp.array([1.0, 0.0, 1.0, 0.0, 0.0, 0.0]),
)
TEXT = np.array([0, 0, 1, 1, 1, 3])  # no read belongs to the third example
WEIGHT = np.array([0.2, 0.2, 0.0], np.float32)


def batch(weight=WEIGHT, micro_batch=None):
    nothing = np.zeros(0, np.int32)
    lengths = np.zeros(7, np.int32)  # padded rows of documents can be more than examples
    return Batch(nothing, nothing, nothing, lengths, weight, micro_batch, {}, None, nothing, TEXT)


def test_the_sums_of_each_text():
    sums = SftTask().token_stats(OUTPUTS, batch())
    assert np.allclose(sums["loss"], [np.log(8), np.log(100), 0])
    assert sums["entropy"].tolist() == [3, 12, 0] and sums["correct"].tolist() == [1, 1, 0]
    assert sums["targets"].tolist() == [2, 3, 0]


@pytest.mark.parametrize(("task", "first", "second"), [
    (SftTask("dft"), 0.5 * np.log(2) + 0.25 * np.log(4), 0.5 * np.log(2) + 0.1 * np.log(10) + 0.2 * np.log(5)),
    (SftTask("nll", 0.1), 0.9 * np.log(8) + 0.5, 0.9 * np.log(100) + 0.7),
    (SftTask("dft", 0.1), 0.5 * np.log(2) + 0.25 * np.log(4), 0.5 * np.log(2) + 0.1 * np.log(10) + 0.2 * np.log(5)),
])  # fmt: skip
def test_other_losses(task, first, second):
    assert np.allclose(task.token_stats(OUTPUTS, batch())["loss"], [first, second, 0], rtol=1e-6)


def test_the_loss_is_a_mean_over_targets_where_weights_are_their_shares():
    task, micro_batch = SftTask(), np.array([[True, False, True], [False, True, False]])
    loss, sums = task.loss(task.token_stats(OUTPUTS, batch()), batch(micro_batch=micro_batch))
    assert np.isclose(loss, np.log(800) / 5)
    found = {name: values.tolist() for name, values in sums.items()}
    assert found == {"targets": [2, 3], "entropy": [3, 12], "correct": [1, 1], "examples": [1, 1]}


def test_entropy_is_only_a_metric():
    def loss(entropy):
        sums = SftTask().token_stats(OUTPUTS._replace(entropy=entropy), batch())
        return sums["entropy"].sum()

    assert not np.any(jax.grad(loss)(OUTPUTS.entropy))


def steps(targets, entropy, correct, examples):
    values = {"targets": targets, "entropy": entropy, "correct": correct, "examples": examples}
    return [{name: np.asarray(value, np.float32) for name, value in values.items()}]


def test_metrics_of_training_are_means_over_micro_batches():
    """The second has no target, which TRL counts as zeros; the third has no example and does not count."""
    sums = steps([4, 0, 0], [2, 0, 0], [3, 0, 0], [2, 1, 0])
    assert SftTask().metrics(sums, "train") == {"entropy": 0.25, "mean_token_accuracy": 0.375}


def test_metrics_of_an_evaluation_are_means_over_targets():
    sums = steps(4, 2, 3, 2) + steps(1, 3, 0, 1) + steps(0, 0, 0, 1)
    assert SftTask().metrics(sums, "eval") == {"entropy": 1.0, "mean_token_accuracy": 0.6}
    assert SftTask().metrics(steps(0, 0, 0, 0), "eval") == {}


def test_the_loss_of_an_evaluated_batch():
    task, weight = SftTask(), np.array([0.2, 0.2, 0.0], np.float32)
    loss, sums = task.loss(task.token_stats(OUTPUTS, batch()), LossBatch(weight, Extras(), 2))
    assert np.isclose(loss, np.log(800) / 5) and sums["targets"] == 5


@pytest.mark.parametrize(("name", "packed"), [("train", True), ("eval", False), ("eval_dataset['a']", False)])
def test_evaluation_sets_may_be_packed_otherwise(name, packed):
    task = SftTask(row_options={"packing": True}, eval_packing=False)
    rows = Dataset.from_dict({"text": ["a b", "c d"]})
    found = task.prepare(rows, tiny_tokenizer(), max_length=64, num_proc=None, name=name)
    assert ("seq_lengths" in found.column_names) is packed and len(found) == (1 if packed else 2)


def test_rows_to_predict_stay_one_by_one_and_in_order():
    task = SftTask(row_options={"packing": True, "shuffle_dataset": True, "seed": 3})
    rows = Dataset.from_dict({"text": [f"{n} words" for n in range(20)]})
    found = task.prepare(rows, tiny_tokenizer(), max_length=None, num_proc=None, name="test")
    assert found["text"][:] == rows["text"][:] and "seq_lengths" not in found.column_names
