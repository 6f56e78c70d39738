"""`activation_offloading`: a warning on CPUs, and an error for exported models."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

import trl_jax
from compat_tests.trainer.trainers import FACTS, make
from trl_jax.training.setup import check_offloading


def test_a_cpu_has_it_offloaded_already_and_is_told_so(checkpoint, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "trl_jax"):
        trainer = make(trl_jax, checkpoint(**FACTS), tmp_path, config={"activation_offloading": True})
    assert trainer.args.remats == ["offloaded"]
    assert "activation_offloading has no effect on a CPU: its activations are in the host's memory." in caplog.messages
    plain = make(trl_jax, checkpoint(**FACTS), tmp_path)
    assert plain.args.remats == [False, True]


def test_an_exported_program_is_refused():
    args = SimpleNamespace(activation_offloading=True, device=SimpleNamespace(type="tpu"))
    check_offloading(args, SimpleNamespace(traits=SimpleNamespace(heads={"heads": 4}), name="native"))
    with pytest.raises(ValueError, match="runs on the exported backend, whose activations stay on the device"):
        check_offloading(args, SimpleNamespace(traits=SimpleNamespace(heads=None), name="exported"))
