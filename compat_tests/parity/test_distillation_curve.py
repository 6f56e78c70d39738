"""On-policy distillation against TRL: completions, each logged number, and the final weights. Mutants must be
noticed."""

from __future__ import annotations

import warnings

import pytest

from compat_tests.effort import usual, usually
from compat_tests.parity import distillation_cases, golden, reference
from compat_tests.parity.distillation_cases import CASES
from compat_tests.parity.grpo_cases import prompt_rows
from compat_tests.parity.sketch import gap
from compat_tests.parity.test_grpo_curve import WEIGHTS, assert_same_runs
from trl_jax.nn import head
from trl_jax.rollout.steps import RolloutSteps
from trl_jax.training.policy_generator import PolicyGenerator

SELDOM = {"capped", "conversations", "epochs"}
NAMES = usually(lambda name: name not in SELDOM, list(CASES))
COMPLETE = PolicyGenerator.complete
# Means over several steps: TRL's keys are in the order in which its lists were created.
OTHER_ORDER = ("epochs",)


class Curves:
    """The runs of the cases, each made once."""

    def __init__(self, checkpoint, new_folder):
        self._checkpoint, self._new_folder, self._done = checkpoint, new_folder, {}

    def both(self, name):
        if name not in self._done:
            self._done[name] = self.ours(name), self.theirs(name)
        return self._done[name]

    def ours(self, name):
        import trl_jax

        return self._run(trl_jax, name)

    def theirs(self, name):
        (folder, _), (rows, config) = self.folders(name), self._given(name)
        key = golden.digest(folder, rows, CASES[name].model, config, distillation_cases.run)
        return golden.recorded_or(f"distillation/{name}", key, lambda: self._by_trl(name))

    def folders(self, name):
        case = CASES[name]
        return self._checkpoint(**case.model), self._checkpoint(**case.config["teacher"])

    def _by_trl(self, name):
        import torch
        import trl

        torch.set_num_threads(1)
        return self._run(trl, name)

    def _run(self, package, name):
        rows, config = self._given(name)
        config.pop("teacher")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            return distillation_cases.run(package, *self.folders(name), rows, self._new_folder.mktemp(name), **config)

    def _given(self, name):
        case = CASES[name]
        config = dict(case.config)
        if "peft_config" in config:
            config["peft_config"] = config["peft_config"]()
        eval_rows = None if case.eval_rows is None else prompt_rows(**case.eval_rows)
        return prompt_rows(**case.rows), {"eval_rows": eval_rows, **config}


@pytest.fixture(scope="module")
def curves(checkpoint, tmp_path_factory):
    return Curves(checkpoint, tmp_path_factory)


@usual("default", "mixed", "evaluated")
@pytest.mark.parametrize("name", NAMES)
def test_completions_curve_and_weights_are_trls(curves, name):
    ours, theirs = curves.both(name)
    steps = [entry for entry in ours.logs if "loss" in entry]
    assert len(steps) >= 2 and all("entropy" in entry and "step_time" in entry for entry in steps)
    assert name == "evaluated" or len(theirs.facts["completions"]) >= 2
    assert_same_runs(ours, theirs, name not in OTHER_ORDER)


def test_the_runs_are_such_as_could_differ(curves):
    _, theirs = curves.both("mixed")
    before, tensor = reference.read_weights(curves.folders("mixed")[0]), "model.layers.0.mlp.up_proj.weight"
    assert gap(tensor, before[tensor], theirs.weights[tensor]) > 20 * WEIGHTS
    drawn = [text for step in theirs.facts["completions"] for text in step["completion"]]
    assert len(set(drawn)) > len(drawn) / 2
    assert len({entry["completions/mean_length"] for entry in theirs.logs if "loss" in entry}) > 1


# Mutants: one part broken at a time.


def no_permutation(self, prompts):
    rows = [self.read_row(index) for index in prompts for _ in range(self.cycle.group)]
    return self.rollout.generate_and_score(rows, self.cycle.group, "train")


def the_other_way_round(student, teacher, targets, *, beta, temperature):
    return head.divergences(student, teacher, targets, beta=1 - beta, temperature=temperature)


def at_temperature_one(student, teacher, targets, *, beta, temperature):
    del temperature
    return head.divergences(student, teacher, targets, beta=beta)


def the_first_word_left_out(self, prompt_ids, group, *more):
    return [ids[1:] if len(ids) > 1 else ids for ids in COMPLETE(self, prompt_ids, group, *more)]


BROKEN = {
    "order of the micro-batches": ("mixed", RolloutSteps, "_generate", no_permutation),
    "direction of the divergence": ("mixed", "trl_jax.tasks.distillation", "divergences", the_other_way_round),
    "temperature of the loss": ("forward", "trl_jax.tasks.distillation", "divergences", at_temperature_one),
    "what is learned from": ("default", PolicyGenerator, "complete", the_first_word_left_out),
}


# The temperature is read in the same place as the direction.
@usual("what is learned from")
@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_run_is_noticed(curves, monkeypatch, what):
    name, place, attribute, instead = BROKEN[what]
    theirs = curves.theirs(name)
    if isinstance(place, str):
        monkeypatch.setattr(f"{place}.{attribute}", instead)
    else:
        monkeypatch.setattr(place, attribute, instead)
    with pytest.raises(AssertionError):
        assert_same_runs(curves.ours(name), theirs, same_order=True)
