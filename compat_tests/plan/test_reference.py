"""Plans of runs whose steps also compute a reference."""

from __future__ import annotations

import pytest

from compat_tests.effort import only_thorough, thorough
from compat_tests.plan.planned import LENGTH, alike
from trl_jax.trainer.dpo_trainer import DPOTrainer
from trl_jax.trainer.kto_trainer import KTOTrainer


def row(*sides: str) -> dict[str, list[int]]:
    return {f"{side}_{part}": [id] * LENGTH for id, side in enumerate(sides, 1) for part in ("input_ids", "labels")}


@only_thorough
@pytest.mark.parametrize(
    ("kind", "row", "before"),
    [
        thorough(DPOTrainer, row("chosen", "rejected"), False),
        thorough(DPOTrainer, row("chosen", "rejected"), True),
        (KTOTrainer, row("completion", "KL_completion") | {"label": 0.0}, False),
    ],
)
def test_the_programs_are_those_of_a_trainer_with_weights(checkpoint, tmp_path, kind, row, before):
    """The parameters are the policy's plus a copy for the reference, unless its log-probabilities are precomputed."""
    weights, how = checkpoint(head="causal"), {"precompute_ref_log_probs": before, "bf16": False}
    found = alike(weights, tmp_path, kind=kind, row=row, **how)
    assert found.memory.parameters == (1 if before else 2) * 4 * found.parameters
