"""Reward training against TRL: every case compares each logged number of each step, and the final weights."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from compat_tests.effort import only_thorough, usual, usually
from compat_tests.parity import golden, reference
from compat_tests.parity.cases import CASES
from compat_tests.parity.marks import TRAIN_KEYS, assert_same_curve, assert_same_weights, steps_of
from compat_tests.parity.sketch import flat, gap
from compat_tests.tiny import preference_rows

# Most of these are covered by cases of other trainers; centering and layouts by ragged_margin and by
# training/test_layouts.py.
SELDOM = {
    "plain", "margin", "data_seed", "constant_with_warmup", "pad_is_eos", "causal", "base", "qwen2", "max_steps",
    "chat_prompt", "sparse_logs", "max_length", "causal_bfloat16", "cosine", "drop_last", "qwen3",
    "ragged_accumulation", "centered_hard", "layouts",
}  # fmt: skip
USUAL = usually(lambda name: name not in SELDOM, CASES)


@usual("ragged_margin", "pad_is_eos_chat")
@pytest.mark.parametrize("name", USUAL)
def test_the_curve_is_trls(runs, name):
    assert_same_curve(runs.ours(name).logs, runs.theirs(name).logs, **CASES[name].marks)


@pytest.mark.parametrize("name", USUAL)
def test_the_weights_after_the_run_are_trls(runs, name):
    assert_same_weights(runs.ours(name).weights, runs.theirs(name).weights, CASES[name].weights)


@only_thorough
@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_fifty_steps_in_a_layout_that_is_not_of_choice(runs, layout):
    case, theirs = CASES["layouts"], runs.theirs("layouts")
    assert theirs.logs[-1]["step"] == 50 and case.rows["n"] % 8 == 3
    ours = runs.ours_afresh("layouts", batch_layout=layout)
    assert_same_curve(ours.logs, theirs.logs)
    assert_same_weights(ours.weights, theirs.weights)


def test_padding_to_the_longest_gives_the_same_curve(checkpoint, tmp_path):
    """TRL's default. Only a few steps, because each new width may compile again."""
    given, config = (checkpoint(), preference_rows(20, seed=4)), {"pad_to_multiple_of": None}
    ours = reference.run_ours(*given, tmp_path / "ours", **config)
    theirs = golden.run_trl("reward/as wide as the longest", *given, tmp_path / "theirs", model={}, **config)
    assert_same_curve(ours.logs, theirs.logs)
    assert_same_weights(ours.weights, theirs.weights)


def test_bf16_keeps_float32_masters(runs):
    """Weights kept in bfloat16 during training would be saved as values that bfloat16 represents exactly."""
    for name, tensor in runs.ours("bf16").weights.items():
        rounded = tensor.astype(ml_dtypes.bfloat16).astype(np.float32)
        assert tensor.dtype == np.float32 and (tensor != rounded).any(), f"{name} holds nothing finer than bfloat16"


def test_bf16_moves_the_weights_the_way_trl_does(runs):
    """With Adam, single elements may differ by as much as they move, so the directions of the whole updates are
    compared: against TRL's bf16 run, TRL in float32 or with eager attention is 0.03 apart, another order of the rows
    0.67."""
    wanted = runs.theirs("bf16").weights
    start, ours, theirs = (
        flat(weights, like=wanted)
        for weights in (reference.read_weights(runs.folder("bf16")), runs.ours("bf16").weights, wanted)
    )
    assert np.linalg.norm(ours - theirs) < 0.1 * np.linalg.norm(theirs - start)


# Checks on TRL's runs that each case exercises what it is meant to; otherwise the comparison would be empty.


@pytest.mark.parametrize("name", USUAL)
def test_a_case_trains_thirty_steps(runs, name):
    logs = runs.theirs(name).logs
    assert logs[-1]["step"] >= 30
    assert all(list(entry) == TRAIN_KEYS for entry in steps_of(logs))


@pytest.mark.parametrize("name", usually(lambda name: name not in SELDOM, [name for name in CASES if name != "bf16"]))
def test_a_case_moves_the_weights_much_further_than_its_mark(runs, name):
    """Otherwise an optimizer that does nothing would pass. For bf16, the test of the direction above does this."""
    tensor = "layers.0.mlp.up_proj.weight"
    before, after = reference.read_weights(runs.folder(name)), runs.theirs(name).weights
    # The prefix of the trunk varies by model.
    [old], [new] = ([full for full in weights if full.endswith(tensor)] for weights in (before, after))
    assert gap(new, before[old].astype(np.float32), after[new]) > 10 * 2e-4


def test_clipping_is_active_where_the_case_says_so(runs):
    norms = [entry["grad_norm"] for entry in steps_of(runs.theirs("cosine").logs)]
    assert min(norms) > CASES["cosine"].config["max_grad_norm"]


@pytest.mark.parametrize(("name", "per_epoch", "last"), [("ragged_accumulation", 15, 7), ("ragged_margin", 11, 6)])
def test_the_last_step_of_an_epoch_is_ragged(runs, name, per_epoch, last):
    config, pairs = CASES[name].config, CASES[name].rows["n"]
    per_step = 4 * config["gradient_accumulation_steps"]
    assert pairs - (per_epoch - 1) * per_step == last and last % 4 != 0
    assert runs.theirs(name).logs[-1]["step"] == per_epoch * config["num_train_epochs"]


def test_a_pad_row_that_is_also_eos_is_frozen_in_trls_run(runs):
    """The embedding of the pad token is not trained, although the same token, as EOS, is part of the scored text."""
    name = "pad_is_eos_chat"
    before = reference.read_weights(runs.folder(name))["model.embed_tokens.weight"]
    after = runs.theirs(name).weights["model.embed_tokens.weight"]
    assert np.array_equal(before[0], after[0]) and not np.array_equal(before, after)


def test_max_length_drops_some_rows_and_keeps_most(runs):
    steps = runs.theirs("max_length").logs[-1]["step"]
    assert 30 <= steps < CASES["max_length"].rows["n"] // 4


def test_drawn_heads_differ_by_seed(runs):
    """Otherwise the cases without a head on disk would not show how it is initialized."""
    names = ("causal", "causal_bfloat16")
    one, two = (flat(*[{"score": runs.theirs(name).weights["score.weight"]}] * 2) for name in names)
    assert np.abs(one - two).max() > 0.1
