"""Trainers do not form a deep class hierarchy: each is at most three levels below BaseTrainer."""

from __future__ import annotations

import pytest

from trl_jax.core.trainers import EXPERIMENTAL, TRAINERS

ALL = TRAINERS | EXPERIMENTAL


@pytest.mark.parametrize("names", ALL.values(), ids=list(ALL))
def test_a_trainer_has_at_most_four_classes_of_the_package(names):
    own = [kind.__name__ for kind in names.load_trainer().__mro__ if kind.__module__.startswith("trl_jax.")]
    assert own[-1] == "BaseTrainer" and len(own) <= 4
