"""ORPO and CPO against TRL: each logged number of each step, and the final weights."""

from __future__ import annotations

import pytest

from compat_tests.effort import usually
from compat_tests.parity import golden, reference, reference_free_cases
from compat_tests.parity.marks import assert_same_weights
from compat_tests.parity.sketch import gap
from compat_tests.parity.test_dpo_curve import assert_same
from compat_tests.tiny import preference_rows

KEYS = (
    "loss grad_norm learning_rate rewards/chosen rewards/rejected rewards/accuracies rewards/margins logps/rejected "
    "logps/chosen logits/rejected logits/chosen nll_loss epoch step"
).split()
OF_ORPO = ["log_odds_ratio", "log_odds_chosen"]
# The other cases are parts of these; losses/test_reference_free.py compares each loss with its formula.
OFTEN = {("ORPO", name) for name in ("default", "conversations_with_bos", "accumulated", "evaluated", "experts")}
OFTEN |= {("CPO", name) for name in ("default", "truncated", "evaluated")}
CASES = {"ORPO": reference_free_cases.ORPO, "CPO": reference_free_cases.CPO}
USUAL = usually(lambda *case: case in OFTEN, [(trainer, name) for trainer, cases in CASES.items() for name in cases])


@pytest.fixture(scope="module")
def both(both_of):
    """both(trainer, case) -> (our run, TRL's run); TRL's trainers are in trl.experimental."""
    runs = {trainer: both_of(trainer, cases, preference_rows) for trainer, cases in CASES.items()}
    with pytest.MonkeyPatch.context() as patch:
        if golden.live():
            trl = pytest.importorskip("trl", reason="parity is measured against real TRL")
            from trl.experimental import cpo, orpo

            for name, place in (("ORPO", orpo), ("CPO", cpo)):
                patch.setattr(trl, f"{name}Trainer", vars(place)[f"{name}Trainer"], raising=False)
                patch.setattr(trl, f"{name}Config", _without_pads(vars(place)[f"{name}Config"]), raising=False)
        yield lambda trainer, name: runs[trainer](name)


def _without_pads(config_class):
    """The class, called without an argument that TRL's two configs do not have."""
    return lambda pad_to_multiple_of, **config: config_class(**config)


def without(entry):
    """The entry without keys that differ on purpose: TRL's means of logits include padding and prompts, and it does not
    count tokens."""
    return {
        key: value
        for key, value in entry.items()
        if "logits/" not in key and "num_tokens" not in key and key != "total_flos"
    }


@pytest.mark.parametrize(("trainer", "name"), USUAL)
def test_the_curve_is_trls(both, trainer, name):
    ours, theirs = both(trainer, name)
    steps = [entry for entry in theirs.logs if "loss" in entry]
    wanted = KEYS if trainer == "CPO" else [*KEYS[:-2], *OF_ORPO, *KEYS[-2:]]
    assert all(list(entry) == wanted for entry in steps) and len(steps) >= 2
    mine = [[key for key in entry if key != "num_tokens"] for entry in ours.logs if "loss" in entry]
    assert mine == [wanted] * len(steps)
    assert len(ours.logs) == len(theirs.logs)
    for own, other in zip(ours.logs, theirs.logs, strict=True):
        assert_same(without(own), without(other))
    if theirs.evaluate_metrics is not None:
        assert_same(without(ours.evaluate_metrics), without(theirs.evaluate_metrics))


@pytest.mark.parametrize(("trainer", "name"), USUAL)
def test_the_weights_after_the_run_are_trls(both, checkpoint, trainer, name):
    ours, theirs = both(trainer, name)
    assert_same_weights(ours.weights, theirs.weights, 1e-3)
    before, tensor = reference.read_weights(checkpoint(**CASES[trainer][name].model)), "model.norm.weight"
    assert gap(tensor, before[tensor], theirs.weights[tensor]) > 2e-3
