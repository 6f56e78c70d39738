"""Plans of runs whose steps compute a reference beside the policy."""

from __future__ import annotations

from compat_tests.dryrun.planned import LENGTH, alike
from trl_jax import DPOTrainer

SIDES = {"chosen": 1, "rejected": 2}
PAIR = {f"{side}_{part}": [id] * LENGTH for side, id in SIDES.items() for part in ("input_ids", "labels")}


def test_the_programs_are_those_of_a_trainer_with_weights(checkpoint, tmp_path):
    """The parameters are the policy's and a copy of them, which computes a forward pass of its own."""
    found = alike(checkpoint(head="causal"), tmp_path, kind=DPOTrainer, row=PAIR, bf16=False)
    assert found.memory.parameters == 2 * 4 * found.parameters
    assert 0.8 < found.compiled.cost.flops / found.flops < 1.02
