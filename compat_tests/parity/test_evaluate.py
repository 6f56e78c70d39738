"""evaluate() and predict() against TRL: equal if TRL is right, the true value if it is not."""

from __future__ import annotations

import numpy as np
import pytest

from compat_tests.parity import reference
from compat_tests.parity.marks import Marks, assert_same_entry, timeless
from compat_tests.tiny import preference_rows

CENTER = 0.1
BATCH = 4
PAIRS = 10  # two full batches and one of two pairs


@pytest.fixture(scope="module")
def ragged(checkpoint, tmp_path_factory):
    """(ours, TRL's): a few steps, then evaluation and prediction with a number of pairs that the batch size does not
    divide."""
    pytest.importorskip("trl")
    train, test = preference_rows(20, margin=True), preference_rows(PAIRS, margin=True, seed=5)
    config = {"eval_rows": test, "predict_rows": test, "center_rewards_coefficient": CENTER}
    sides = {"ours": reference.run_ours, "theirs": reference.run_trl}
    return tuple(run(checkpoint(), train, tmp_path_factory.mktemp(side), **config) for side, run in sides.items())


@pytest.fixture(scope="module")
def truth(ragged, checkpoint):
    """Scores of the evaluated pairs by TRL's trained model, one text at a time: (chosen [N], rejected [N])."""
    rows = preference_rows(PAIRS, margin=True, seed=5)
    return reference.true_scores(ragged[1].folder, reference.tokenised(checkpoint(), rows))


def test_a_size_the_batch_divides_gives_trls_metrics(runs):
    assert_same_entry(runs.ours("evaluated").evaluate_metrics, runs.theirs("evaluated").evaluate_metrics)


def test_evaluation_in_the_middle_is_logged(runs):
    logs = [entry for entry in runs.ours("evaluated").logs if "eval_loss" in entry]
    assert [entry["step"] for entry in logs] == [0, 10, 20, 30]


def test_a_ragged_size_has_trls_keys(ragged):
    ours, theirs = (list(timeless(run.evaluate_metrics)) for run in ragged)
    assert ours == theirs


@pytest.mark.parametrize("key", ["eval_loss", "eval_min_reward", "eval_max_reward", "eval_num_tokens", "epoch"])
def test_a_ragged_size_gives_trls_value(ragged, key):
    ours, theirs = (run.evaluate_metrics[key] for run in ragged)
    mark = Marks.loss if key == "eval_loss" else Marks.rewards
    assert abs(ours - theirs) <= mark, f"{key}: ours {ours}, TRL's {theirs}"


@pytest.mark.parametrize("key", ["accuracy", "margin", "mean_reward"])
def test_a_ragged_size_gives_the_mean_over_all_pairs(ragged, truth, key):
    """TRL averages the means of batches, which gives pairs in a short last batch more weight."""
    chosen, rejected = truth
    values = {
        "accuracy": chosen > rejected,
        "margin": chosen - rejected,
        "mean_reward": (chosen + rejected) / 2,
    }[key]
    batches = np.mean([values[start : start + BATCH].mean() for start in range(0, PAIRS, BATCH)])
    ours, theirs = (run.evaluate_metrics[f"eval_{key}"] for run in ragged)
    assert abs(theirs - batches) <= Marks.rewards, "TRL's value is not what its difference from ours is said to be"
    assert abs(batches - values.mean()) > 10 * Marks.rewards, "the two means agree: these rows tell nothing"
    assert abs(ours - values.mean()) <= (Marks.accuracy if key == "accuracy" else Marks.rewards)


def test_the_loss_is_that_of_all_pairs(ragged, truth):
    chosen, rejected = truth
    margins = np.array([row["margin"] for row in preference_rows(PAIRS, margin=True, seed=5)])
    loss = np.logaddexp(0, -(chosen - rejected - margins)) + CENTER * (chosen + rejected) ** 2
    assert abs(ragged[0].evaluate_metrics["eval_loss"] - loss.mean()) <= 1e-4


def test_predict_keeps_every_row_in_trls_order(ragged, truth):
    """Batch by batch, first the chosen scores, then the rejected. TRL truncates its last batch of 2 pairs to 2 rows."""
    ours, theirs = (run.predictions for run in ragged)
    starts = range(0, PAIRS, BATCH)
    wanted = np.concatenate([side[start : start + BATCH] for start in starts for side in truth])
    assert theirs.shape == (2 * PAIRS - 2, 1) and ours.shape == (2 * PAIRS, 1)
    np.testing.assert_allclose(ours[: len(theirs)], theirs, rtol=0, atol=Marks.rewards)
    np.testing.assert_allclose(ours[:, 0], wanted, rtol=0, atol=Marks.rewards)
