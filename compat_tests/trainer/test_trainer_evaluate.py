"""evaluate() and predict(): every form of dataset, with TRL's keys in TRL's order and TRL's shapes."""

from __future__ import annotations

import numpy as np
import pytest
from transformers import TrainerCallback

import trl_jax
from compat_tests.parity.marks import assert_same_entry, timeless
from compat_tests.parity.reference import BASE, tokenised
from compat_tests.tiny import preference_rows
from compat_tests.trainer.trainers import FACTS, make, stream, table

OWN = ["loss", "num_tokens", "min_reward", "mean_reward", "max_reward", "accuracy", "margin"]


@pytest.fixture(scope="module")
def folder(checkpoint):
    return checkpoint(**FACTS)


@pytest.fixture(scope="module")
def sets():
    return {"a": table(8, seed=1), "b": table(4, seed=2)}


@pytest.fixture(scope="module")
def trainer(folder, sets, tmp_path_factory):
    return make(trl_jax, folder, tmp_path_factory.mktemp("ours"), eval_dataset=sets)


@pytest.fixture(scope="module")
def trls(folder, sets, tmp_path_factory):
    trl = pytest.importorskip("trl")
    return make(trl, folder, tmp_path_factory.mktemp("theirs"), eval_dataset=sets)


def own(metrics, prefix):
    return [metrics[f"{prefix}_{name}"] for name in OWN]


def test_a_dict_of_sets(trainer, trls):
    """TRL logs its own metrics of all sets under the same names, so that only those of the last set remain."""
    ours, theirs = trainer.evaluate(), trls.evaluate()
    assert_same_entry(by_one_name(ours, "eval_b"), by_one_name(theirs, "eval_b"))
    logged, first = trainer.state.log_history[-2], trls.state.log_history[-2]
    assert_same_entry(by_one_name(logged, "eval_a"), by_one_name(first, "eval_a"))
    assert "eval_accuracy" in theirs and "eval_a_accuracy" not in theirs
    assert ours["eval_a_mean_reward"] != ours["eval_b_mean_reward"]


def test_an_evaluation_after_a_prediction_counts_its_own_pairs(trainer):
    before = own(trainer.evaluate(), "eval_a")
    trainer.predict(trainer.eval_dataset["b"])
    assert own(trainer.evaluate(), "eval_a")[2:] == before[2:]


def test_an_overridden_evaluate_is_called_for_each_set_too(folder, sets, tmp_path):
    trl, found = pytest.importorskip("trl"), []
    for package in (trl_jax, trl):

        class Own(package.RewardTrainer):
            def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval"):
                metrics = super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
                self.calls.append((eval_dataset if isinstance(eval_dataset, str) else None, metric_key_prefix))
                return metrics | {f"{metric_key_prefix}_own": 1.0}

        args = package.RewardConfig(str(tmp_path), **BASE)
        trainer = Own(str(folder), args, train_dataset=table(8), eval_dataset=sets)
        trainer.calls = []
        found.append(({name for name in trainer.evaluate() if name.endswith("_own")}, trainer.calls))
    assert (
        found[0]
        == found[1]
        == ({"eval_a_own", "eval_b_own", "eval_own"}, [("a", "eval_a"), ("b", "eval_b"), (None, "eval")])
    )


def by_one_name(metrics, prefix):
    """One set's metrics, renamed as if it were the only set."""
    mine = {key: value for key, value in metrics.items() if not key.startswith(("eval_a_", "eval_b_"))}
    return {
        f"eval_{key.removeprefix(f'{prefix}_')}": metrics[key] for key in metrics if key.startswith(f"{prefix}_")
    } | mine


def test_a_set_by_its_name(trainer, trls):
    named = trainer.evaluate("a")
    assert_same_entry(named, trls.evaluate("a"))
    assert own(named, "eval") == own(trainer.evaluate(), "eval_a")
    assert len(trainer.get_eval_dataloader("a")) == 2 and len(trainer.get_eval_dataloader(table(9))) == 3


def test_raw_rows_a_stream_and_a_dict_of_them(trainer, sets, folder):
    wanted = own(trainer.evaluate("a"), "eval")
    prepared = tokenised(folder, preference_rows(8, seed=1))
    for rows in (sets["a"], sets["a"].to_iterable_dataset(), prepared):
        assert own(trainer.evaluate(rows), "eval") == wanted
    assert own(trainer.evaluate({"mine": sets["a"]}), "eval_mine") == wanted
    odd = sets["a"].select(range(7))  # with an incomplete last batch, which TRL weights as a whole one in a stream
    assert own(trainer.evaluate(odd.to_iterable_dataset()), "eval") == own(trainer.evaluate(odd), "eval")


def test_a_prefix(trainer, trls, folder):
    rows = tokenised(folder, preference_rows(4, seed=1))
    ours, theirs = (t.evaluate(rows, metric_key_prefix="held") for t in (trainer, trls))
    assert abs(ours["held_loss"] - theirs["held_loss"]) < 1e-5
    assert abs(ours["held_margin"] - theirs["eval_margin"]) < 1e-5  # TRL's own metrics keep the default prefix
    ours, theirs = (list(timeless(t.predict(rows, metric_key_prefix="x").metrics)) for t in (trainer, trls))
    assert ours == theirs == ["x_loss"]


def test_a_name_that_is_none_of_the_sets(trainer):
    with pytest.raises(ValueError, match="no evaluation set 'c': the trainer's eval_dataset has a, b."):
        trainer.evaluate("c")


def test_no_set(folder, tmp_path):
    with pytest.raises(ValueError, match=r"^evaluate\(\) needs an eval_dataset: pass one to it or to the trainer."):
        make(trl_jax, folder, tmp_path).evaluate()


def test_evaluation_is_logged(trainer):
    metrics = trainer.evaluate("b")
    assert trainer.state.log_history[-1] == metrics | {"step": 0}


def test_predict_takes_raw_and_prepared_rows(trainer, trls, folder):
    rows = preference_rows(8, seed=3)
    ours, theirs = trainer.predict(tokenised(folder, rows)), trls.predict(tokenised(folder, rows))
    np.testing.assert_allclose(ours.predictions, theirs.predictions, rtol=0, atol=2e-6)
    assert ours.predictions.dtype == np.float32 and ours.label_ids == theirs.label_ids == ()
    assert abs(ours.metrics["test_loss"] - theirs.metrics["test_loss"]) < 1e-6
    raw = trainer.predict(table(8, seed=3))
    np.testing.assert_array_equal(raw.predictions, ours.predictions)
    np.testing.assert_array_equal(trainer.predict(stream(8)).predictions.shape, (16, 1))


def test_predict_scores_what_the_model_scores(trainer, folder):
    """Batch by batch: 4 chosen, 4 rejected scores; then the remaining pair."""
    rows = tokenised(folder, preference_rows(5, seed=3))
    found = trainer.predict(rows).predictions[:, 0]
    sides = [[float(trainer.model([ids]).logits[0, 0]) for ids in rows[f"{s}_ids"]] for s in ("chosen", "rejected")]
    wanted = np.concatenate([*(side[:4] for side in sides), *(side[4:] for side in sides)])
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-6)


class NonFiniteGuard:
    """Records the arguments of compute_metrics and preprocess_logits_for_metrics, and returns a metric of each kind of
    name."""

    def __init__(self):
        self.seen = []

    def metrics(self, prediction):
        predictions, labels, inputs = prediction.predictions, prediction.label_ids, prediction.inputs
        self.seen.append((tuple(predictions.shape), labels, inputs))
        return {
            "mean": float(predictions.mean()),
            "eval_spread": float(predictions.max() - predictions.min()),
        }

    def logits(self, logits, labels):
        self.seen.append((tuple(logits.shape), labels))
        return 2 * logits


@pytest.fixture(scope="module")
def watched(folder, tmp_path_factory):
    """(what TRL's functions got and returned, the same for ours), for set sizes where TRL does not drop rows."""
    trl = pytest.importorskip("trl")
    found = []
    for package in (trl_jax, trl):
        watch = NonFiniteGuard()
        functions = {"compute_metrics": watch.metrics, "preprocess_logits_for_metrics": watch.logits}
        trainer = make(package, folder, tmp_path_factory.mktemp("watched"), eval_dataset=table(8), **functions)
        rows = tokenised(folder, preference_rows(8))
        found.append((watch.seen, trainer.evaluate(), trainer.predict(rows)))
    return found


def test_the_users_functions_get_trls_shapes(watched):
    (ours, *_), (theirs, *_) = watched
    assert ours == theirs
    assert ours[:3] == [((8, 1), ()), ((8, 1), ()), ((16, 1), (), None)]


def test_the_users_metrics_stand_where_trl_puts_them(watched):
    (_, ours, predicted), (_, theirs, their_predicted) = watched
    drop = ("eval_mean", "eval_spread")
    assert list(timeless(ours)) == list(timeless(theirs))
    assert list(timeless(predicted.metrics)) == list(timeless(their_predicted.metrics))
    assert_same_entry(*({k: v for k, v in m.items() if k not in drop} for m in (ours, theirs)))
    assert all(abs(ours[name] - theirs[name]) < 1e-5 for name in drop)


def test_what_the_user_made_of_the_scores_is_what_is_predicted(watched, trainer, folder):
    plain = trainer.predict(tokenised(folder, preference_rows(8))).predictions
    np.testing.assert_allclose(watched[0][2].predictions, 2 * plain, rtol=1e-6)


def test_loss_only(folder, tmp_path):
    trl = pytest.importorskip("trl")
    for package in (trl_jax, trl):
        watch = NonFiniteGuard()
        trainer = make(
            package, folder, tmp_path, config={"prediction_loss_only": True}, eval_dataset=table(4),
            compute_metrics=watch.metrics,
        )  # fmt: skip
        metrics = trainer.evaluate()
        assert watch.seen == [] and "eval_mean" not in metrics and "eval_margin" in metrics


def test_bf16_full_eval_computes_in_bfloat16_and_leaves_the_weights(folder, tmp_path):
    trainer = make(trl_jax, folder, tmp_path, config={"bf16_full_eval": True}, eval_dataset=table(8, seed=1))
    exact = make(trl_jax, folder, tmp_path, eval_dataset=table(8, seed=1)).evaluate()
    before = {path: np.asarray(array) for path, array in trainer.model.params.items()}
    rounded = trainer.evaluate()
    assert 1e-5 < abs(rounded["eval_mean_reward"] - exact["eval_mean_reward"]) < 0.05
    assert all(np.array_equal(before[path], array) for path, array in trainer.model.params.items())


def test_drop_last_costs_an_evaluation_no_pair(folder, tmp_path):
    """TRL drops the rows of a ragged last batch and reports the loss of the others."""
    trl = pytest.importorskip("trl")
    rows = {"eval_dataset": table(10)}
    ours = make(trl_jax, folder, tmp_path, config={"dataloader_drop_last": True}, **rows)
    theirs = make(trl, folder, tmp_path, config={"dataloader_drop_last": False}, **rows)
    assert ours.evaluate()["eval_loss"] == pytest.approx(theirs.evaluate()["eval_loss"], abs=1e-5)
    assert ours.predict(table(10)).predictions.shape == (20, 1)
    assert ours.predict(stream(10)).predictions.shape == (20, 1)


def test_what_is_added_to_a_log_is_returned_too_as_in_trl(folder, tmp_path):
    """Added by the trainer, which counts tokens, and by callbacks; the progress callback removes total_flos."""

    class Adds(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **rest):
            logs["own"] = len(state.log_history)

    found = []
    for package in (trl_jax, pytest.importorskip("trl")):
        config = {"max_steps": 2, "include_num_input_tokens_seen": "all", "per_device_eval_batch_size": 4}
        trainer = make(
            package, folder, tmp_path / package.__name__, config=config, eval_dataset=table(4), callbacks=[Adds()]
        )
        found.append([timeless(metrics) for metrics in (trainer.train().metrics, trainer.evaluate())])
    for mine, other in zip(*found, strict=True):
        assert mine.keys() == other.keys() and {"own", "num_input_tokens_seen"} < mine.keys()
        assert [mine[name] for name in ("own", "num_input_tokens_seen")] == [
            other[name] for name in ("own", "num_input_tokens_seen")
        ]
