"""Layers are recomputed in the backward pass, including one in a scan of length one, which XLA unrolls."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compat_tests.effort import thorough
from compat_tests.models import causal
from trl_jax.hub.auto import AutoModelForCausalLM
from trl_jax.models.model import merge

pytest.importorskip("torch")


@pytest.mark.parametrize(("family", "alone"), [("gemma4_text", 4), ("llama", 0)])
@pytest.mark.parametrize("remat", [thorough(False), True])
def test_a_layer_alone_is_kept_apart_from_its_recomputation(family, alone, remat, tmp_path):
    """Barriers protect recomputed layers from common-subexpression elimination; within a loop none are needed."""
    model = AutoModelForCausalLM.from_pretrained(causal.build(tmp_path, family, tie=False))
    assert sum(run.count == 1 for run in model.source.config.arch.runs) == alone
    tokens, positions = (np.ones((2, 8), np.int32) * place for place in (7, np.arange(8)))

    def total(arrays):
        whole = merge(model.graph, arrays)
        return jnp.sum(whole(tokens, positions.astype(np.int32), None, remat=remat))

    barriers = jax.jit(jax.grad(total)).lower(model.arrays).as_text().count("stablehlo.optimization_barrier")
    assert barriers >= alone if alone else not barriers
