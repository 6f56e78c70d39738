"""Which differences benchmarks.meshes may leave out of a comparison, and which not."""

import numpy as np
import pytest

from benchmarks.gaps import beyond, gaps
from compat_tests.parity.reference import Run

LOG = {"loss": 0.7, "grad_norm": 1.0, "learning_rate": 1e-4, "num_tokens": 9, "min_reward": -1.0, "mean_reward": 0.0,
       "max_reward": 1.0, "accuracy": 1.0, "margin": 0.1, "epoch": 1.0, "step": 1}  # fmt: skip
GRADIENTS = {"a.weight": np.array([1e-3, 9e-9, 2e-8]), "key.bias": np.zeros(3)}


def run(log=(), **off):
    weights = {"a.weight": np.zeros(3), "key.bias": np.zeros(3)}
    for name, (place, gap) in off.items():
        weights[name.replace("_", ".")][place] = gap
    return Run([LOG | dict(log)], None, weights)


def found(mine):
    other = run()
    return beyond(gaps(mine, other), mine, other, lambda: GRADIENTS)


def test_what_is_within_the_marks_asks_for_no_gradients():
    mine, other = run(a_weight=(0, 1.9e-4), key_bias=(1, 0.1)), run()
    assert beyond(gaps(mine, other), mine, other, None) == {"beyond": [], "below eps": []}


@pytest.mark.parametrize(("place", "kind"), [(0, "beyond"), (1, "below eps"), (2, "beyond")])
def test_a_weight_is_left_out_only_where_its_first_gradient_is_below_eps(place, kind):
    [said] = found(run(a_weight=(place, 3e-4))).pop(kind)
    assert said == f"a.weight (1 of 3, whose first gradient is up to {GRADIENTS['a.weight'][place]:.1e})"


def test_one_element_with_a_gradient_is_enough():
    mine = run(a_weight=(slice(None), np.nan))
    assert found(mine)["beyond"] == ["a.weight (3 of 3, whose first gradient is up to 1.0e-03)"]


@pytest.mark.parametrize(("key", "gap"), [("loss", 2e-5), ("grad_norm", 3e-4), ("margin", 3e-4)])
def test_what_is_logged_has_no_such_excuse(key, gap):
    assert found(run(log={key: LOG[key] + gap}, a_weight=(1, 3e-4)))["beyond"] == [key]
