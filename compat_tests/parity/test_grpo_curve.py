"""GRPO and RLOO against TRL: the tokens of each completion, each logged number, and the final weights. Mutants must be
noticed."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from compat_tests.effort import usual, usually
from compat_tests.parity import golden, grpo_cases, reference
from compat_tests.parity.grpo_cases import GRPO, RLOO, prompt_rows
from compat_tests.parity.marks import assert_same_weights, timeless
from compat_tests.parity.sketch import gap
from trl_jax.tasks import policy
from trl_jax.training.policy_generator import PolicyGenerator

# Each loss is compared with TRL's by losses/test_policy_gradient.py, each kind of layer by the generation tests of its
# family, conversations and the entropy bonus by trainer/test_policies_of_scripts.py.
SELDOM = {
    "bnpo", "cispo", "clipped", "conversations", "convolutions", "dapo", "dr_grpo", "entropy_bonus", "experts",
    "following", "grpo", "luspo", "mamba", "sapo", "states", "vespo",
}  # fmt: skip
NAMES = usually(
    lambda trainer, name: name not in SELDOM and (trainer, name) not in {("RLOO", "evaluated"), ("RLOO", "masked")},
    [*(("GRPO", name) for name in GRPO), *(("RLOO", name) for name in RLOO)],
)
# Tolerances, relative to TRL's number and absolute.
RELATIVE, ABSOLUTE, WEIGHTS = 1e-5, 1e-5, 1e-4
GRAD_NORM = 2e-4  # absolute; the norm sums many small numbers, which processors round differently
COMPLETE, ADVANTAGES, TOKEN_WEIGHTS = PolicyGenerator.complete, policy.group_advantages, policy.token_weights
# For means over several steps, and if the entropy coefficient is logged, TRL's keys are in the order in which its lists
# were created.
OTHER_ORDER = ("epochs", "entropy_bonus")


class Curves:
    """The runs of the cases, each made once."""

    def __init__(self, checkpoint, new_folder):
        self._checkpoint, self._new_folder, self._done = checkpoint, new_folder, {}

    def both(self, trainer, name):
        if (trainer, name) not in self._done:
            self._done[trainer, name] = self.ours(trainer, name), self.theirs(trainer, name)
        return self._done[trainer, name]

    def ours(self, trainer, name):
        import trl_jax

        return self._run(trl_jax, trainer, name)

    def theirs(self, trainer, name):
        case, (rows, config) = _case(trainer, name), self._given(trainer, name)
        key = golden.digest(self.folder(trainer, name), rows, case.model, config, grpo_cases.run, grpo_cases.vowels)
        return golden.recorded_or(f"{trainer.lower()}/{name}", key, lambda: self._by_trl(trainer, name))

    def folder(self, trainer, name):
        return self._checkpoint(**_case(trainer, name).model)

    def _by_trl(self, trainer, name):
        import torch
        import trl

        torch.set_num_threads(1)
        return self._run(trl, trainer, name)

    def _run(self, package, trainer, name):
        rows, config = self._given(trainer, name)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            return grpo_cases.run(
                package, trainer, self.folder(trainer, name), rows, self._new_folder.mktemp(name), **config
            )

    def _given(self, trainer, name):
        case = _case(trainer, name)
        config = dict(case.config)
        if "peft_config" in config:
            config["peft_config"] = config["peft_config"]()
        eval_rows = None if case.eval_rows is None else prompt_rows(**case.eval_rows)
        return prompt_rows(**case.rows), {"eval_rows": eval_rows, **config}


def _case(trainer, name):
    return {"GRPO": GRPO, "RLOO": RLOO}[trainer][name]


@pytest.fixture(scope="module")
def curves(checkpoint, tmp_path_factory):
    return Curves(checkpoint, tmp_path_factory)


def assert_same_runs(ours, theirs, same_order: bool) -> None:
    """The same completions, logged numbers and weights."""
    assert ours.facts == theirs.facts, "other tokens were drawn"
    assert len(ours.logs) == len(theirs.logs)
    for mine, other in zip(ours.logs, theirs.logs, strict=True):
        assert_same(mine, other, same_order)
    assert (ours.evaluate_metrics is None) == (theirs.evaluate_metrics is None)
    if theirs.evaluate_metrics is not None:
        assert_same(ours.evaluate_metrics, theirs.evaluate_metrics, same_order)
    assert_same_weights(ours.weights, theirs.weights, WEIGHTS)


def assert_same(ours, theirs, same_order):
    ours, theirs = timeless(ours), timeless(theirs)
    keys = list if same_order else sorted
    assert keys(ours) == keys(theirs)
    # The loss is a sum of advantages that cancel each other, so its rounding error scales with them.
    scale = max(1.0, theirs.get("reward_std", 0.0))
    for key, value in theirs.items():
        absolute = GRAD_NORM if key == "grad_norm" else ABSOLUTE * (scale if key == "loss" else 1)
        close = value is ours[key] or ours[key] == pytest.approx(value, rel=RELATIVE, abs=absolute, nan_ok=True)
        assert close, f"step {theirs.get('step')}, {key}: ours {ours[key]!r}, TRL's {value!r}"


@usual(
    "GRPO-default",
    "GRPO-reference",
    "GRPO-masked",
    "GRPO-normalized_first",
    "GRPO-evaluated",
    "GRPO-adapter",
    "RLOO-default",
)
@pytest.mark.parametrize(("trainer", "name"), NAMES)
def test_completions_curve_and_weights_are_trls(curves, trainer, name):
    ours, theirs = curves.both(trainer, name)
    steps = [entry for entry in ours.logs if "loss" in entry]
    assert len(steps) >= 4 and all("step_time" in entry for entry in steps)
    assert sum(map(len, theirs.facts["completion_ids"])) >= 16
    assert_same_runs(ours, theirs, name not in OTHER_ORDER)


@pytest.mark.parametrize(("trainer", "name"), [("GRPO", "default"), ("RLOO", "default"), ("GRPO", "evaluated")])
def test_the_runs_are_such_as_could_differ(curves, trainer, name):
    _, theirs = curves.both(trainer, name)
    before, tensor = reference.read_weights(curves.folder(trainer, name)), "model.layers.0.mlp.up_proj.weight"
    assert gap(tensor, before[tensor], theirs.weights[tensor]) > 20 * WEIGHTS
    drawn = [tuple(ids) for rows in theirs.facts["completion_ids"] for ids in rows]
    assert len(set(drawn)) > len(drawn) / 2
    lengths = {len(ids) for ids in drawn}
    assert len(lengths) > 1, "no completion ended by itself"


# Mutants: one part broken at a time.


def no_permutation(self, prompts):
    rows = [self.read_row(index) for index in prompts for _ in range(self.cycle.group)]
    return self.rollout.generate_and_score(rows, self.cycle.group, "train")


def a_little_smaller(rewards, group, **options):
    judged = ADVANTAGES(rewards, group, **options)
    return judged._replace(advantages=judged.advantages * np.float32(1 - 1e-3))


def one_token_more(*given, generated_tokens, **of_generation):
    return TOKEN_WEIGHTS(*given, generated_tokens=generated_tokens + 1, **of_generation)


def the_same_order_each_epoch(self):
    self._order, self._num_yielded = self._stream.permutation(self._rows), 0
    self._stream = type(self._stream)(self._seed)


def without_the_last_token(self, prompt_ids, group, *more):
    return [own[:-1] if len(own) > 1 else own for own in COMPLETE(self, prompt_ids, group, *more)]


MUTANTS = [
    ("default", "trl_jax.rollout.steps.RolloutSteps._generate", no_permutation, "tokens were drawn"),
    ("default", "trl_jax.rollout.steps.BASE_SEED_WORDS", 0, "tokens were drawn"),
    (
        "default",
        "trl_jax.training.policy_generator.PolicyGenerator.complete",
        without_the_last_token,
        "tokens were drawn",
    ),
    ("epochs", "trl_jax.rollout.steps.RepeatSampler.next_epoch", the_same_order_each_epoch, "tokens were drawn"),
    ("default", "trl_jax.tasks.policy.group_advantages", a_little_smaller, "ours|drawn"),
    ("reference", "trl_jax.tasks.policy.token_weights", one_token_more, "ours|drawn"),
]


@usual("group_advantages")
@pytest.mark.parametrize(
    ("name", "place", "broken", "match"), MUTANTS, ids=[str(place).rsplit(".", 1)[-1] for _, place, *_ in MUTANTS]
)
def test_a_broken_part_is_noticed(curves, monkeypatch, name, place, broken, match):
    monkeypatch.setattr(place, broken)
    mutant = curves.ours("GRPO", name)
    with pytest.raises(AssertionError, match=match):
        assert_same_runs(mutant, curves.theirs("GRPO", name), name not in OTHER_ORDER)
