"""The losses of preference pairs by hand in NumPy float64, and which inputs get a gradient."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from trl_jax.losses.dpo import PER_PAIR, WHOLE_BATCH, PairLogps, PreferenceLoss, length_desensitised

PAIRS = PairLogps(
    *np.asarray(
        [
            [-9.0, -4.0, -7.5, -1.0],  # chosen
            [-8.0, -7.0, -6.0, -2.0],  # rejected
            [-9.5, -5.5, -6.0, -3.0],  # ref_chosen
            [-9.0, -6.0, -6.5, -4.0],  # ref_rejected
            [3, 2, 5, 1],  # chosen_tokens
            [4, 3, 2, 1],  # rejected_tokens
            [-9.9, -4.4, -7.7, -1.1],  # chosen_sum
            [0.9, 0.2, 0.5, 0.7],  # preference
            [3, 2, 4, 1],  # chosen_targets
        ],
        np.float32,
    )
)
WEIGHT = np.asarray([1 / 3, 1 / 3, 1 / 3, 0], np.float32)  # the last pair is padding
BETA, SMOOTHING, TAU = 0.3, 0.1, 0.05

# log(policy / reference) of the first three pairs, from the numbers above.
CHOSEN, REJECTED = np.asarray([0.5, 1.5, -1.5]), np.asarray([1.0, -1.0, 0.5])
MARGIN = np.asarray([-0.5, 2.5, -2.0])
A_TOKEN = np.asarray([0.5 / 3 - 1.0 / 4, 1.5 / 2 + 1.0 / 3, -1.5 / 5 - 0.5 / 2])
# Sorted values of chosen - rejected: policy -1.5, -1, 3; reference -0.5, 0.5, 0.5; ratios -1.5 .5 1.5 and -1 .5 1.
AOT, AOT_UNPAIRED = np.asarray([-1.0, -1.5, 2.5]), np.asarray([-0.5, 0.0, 0.5])


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def log_sigmoid(x):
    return -np.log1p(np.exp(-x))


def smoothed(lead):
    return -(1 - SMOOTHING) * log_sigmoid(lead) - SMOOTHING * log_sigmoid(-lead)


def cross_entropies(lead):
    wins, loses = sigmoid(lead), 1 - sigmoid(lead)
    return wins * np.log(wins / (1 - SMOOTHING)) + loses * np.log(loses / SMOOTHING)


LOSSES = {
    "sigmoid": -log_sigmoid(BETA * MARGIN),
    "hinge": np.maximum(0, 1 - BETA * MARGIN),
    "ipo": (A_TOKEN - 1 / (2 * BETA)) ** 2,
    "exo_pair": cross_entropies(BETA * MARGIN),
    "nca_pair": -log_sigmoid(BETA * CHOSEN) - (log_sigmoid(-BETA * CHOSEN) + log_sigmoid(-BETA * REJECTED)) / 2,
    "robust": (-0.9 * log_sigmoid(BETA * MARGIN) + 0.1 * log_sigmoid(-BETA * MARGIN)) / 0.8,
    "bco_pair": -log_sigmoid(BETA * CHOSEN) - log_sigmoid(-BETA * REJECTED),
    "sppo_hard": (CHOSEN - 1 / (2 * BETA)) ** 2 + (REJECTED + 1 / (2 * BETA)) ** 2,
    "aot": smoothed(BETA * AOT),
    "aot_unpaired": smoothed(BETA * AOT_UNPAIRED),
    "apo_zero": 1 - sigmoid(BETA * CHOSEN) + sigmoid(BETA * REJECTED),
    "apo_down": sigmoid(BETA * CHOSEN) + 1 - sigmoid(BETA * MARGIN),
    "discopop": -log_sigmoid(BETA * MARGIN) * (1 - sigmoid(BETA * MARGIN / TAU))
    + np.exp(-BETA * MARGIN) * sigmoid(BETA * MARGIN / TAU),
    "sft": np.full(3, (9.9 + 4.4 + 7.7) / 9),
    "sigmoid_norm": -log_sigmoid(BETA * A_TOKEN),
}


def loss(*names, **options):
    weights = options.pop("weights", (1.0,) * len(names))
    return PreferenceLoss(names, weights, BETA, label_smoothing=SMOOTHING, tau=TAU, **options)


def test_every_loss_has_its_formula_here():
    assert LOSSES.keys() == PER_PAIR.keys() | WHOLE_BATCH.keys()


@pytest.mark.parametrize("name", LOSSES)
def test_the_formula(name):
    assert loss(name)(PAIRS, WEIGHT) == pytest.approx(LOSSES[name].mean(), rel=1e-5)


def test_losses_are_added_with_their_weights():
    wanted = (0.8 * LOSSES["sigmoid"] - 0.5 * LOSSES["sft"]).mean()
    assert loss("sigmoid", "sft", weights=(0.8, -0.5))(PAIRS, WEIGHT) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize(
    ("divergence", "alpha", "score"),
    [
        ("reverse_kl", 0.5, lambda ratio: ratio),
        ("forward_kl", 0.5, lambda ratio: -np.exp(-ratio)),
        ("js_divergence", 0.5, log_sigmoid),
        ("alpha_divergence", 0.3, lambda ratio: np.exp(-0.7 * ratio) / -0.7),
        ("alpha_divergence", 1.0, lambda ratio: ratio),  # its limit
    ],
)
def test_scores_of_a_divergence(divergence, alpha, score):
    """Up to a constant, which cancels in the margin; these losses depend only on the margin."""
    wanted = -log_sigmoid(BETA * (score(CHOSEN) - score(REJECTED))).mean()
    assert loss("sigmoid", divergence=divergence, alpha=alpha)(PAIRS, WEIGHT) == pytest.approx(wanted, rel=1e-5)


def test_a_pair_counts_by_how_likely_the_policy_is_to_write_it():
    weighted = loss("sigmoid", weighted=True)
    wanted = np.dot([0.9, 0.2, 0.5], LOSSES["sigmoid"]) / 3
    assert weighted(PAIRS, WEIGHT) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize(("alpha", "wanted"), [(None, -5.0), (1.0, -5.0), (0.0, -3.0), (0.25, -3.5)])
def test_tokens_beyond_the_shorter_answer(alpha, wanted):
    assert length_desensitised(-3.0, -2.0, alpha) == wanted


@pytest.mark.parametrize("name", LOSSES)
def test_what_only_fills_the_shape_is_in_neither_loss_nor_gradient(name):
    wild = PairLogps(*(np.append(values[:3], np.float32(1e4)) for values in PAIRS))
    assert loss(name)(wild, WEIGHT) == pytest.approx(LOSSES[name].mean(), rel=1e-5)
    slopes = jax.jit(jax.grad(lambda chosen: loss(name)(PAIRS._replace(chosen=chosen, chosen_sum=chosen), WEIGHT)))(
        PAIRS.chosen
    )
    assert np.isfinite(slopes).all() and slopes[3] == 0 and slopes[:3].any()
