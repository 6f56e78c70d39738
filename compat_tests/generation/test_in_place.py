"""A decoding step writes keys and values in place: its compiled program does not copy the cache."""

from __future__ import annotations

import re
from dataclasses import replace

import jax
import numpy as np
import pytest

from compat_tests.models import causal
from trl_jax.generation import generator
from trl_jax.generation.generator import Request
from trl_jax.generation.reuse import TurnCache
from trl_jax.generation.weights import Weights
from trl_jax.hub.auto import AutoModelForCausalLM


@pytest.mark.parametrize(
    ("family", "by_layer", "keeps"),
    [("llama", True, False), ("gemma3_text", False, False), ("gemma3_text", False, True), ("deepseek_v3", True, True)],
)
def test_no_step_copies_the_cache(family, by_layer, keeps, monkeypatch, tmp_path):
    facts = {"num_hidden_layers": 1} if by_layer else {}  # each layer is compiled with its own cache
    model = AutoModelForCausalLM.from_pretrained(causal.build(tmp_path, family, tie=False, **facts))
    weights = Weights.of(model.graph, model.arrays)
    weights = weights if by_layer else replace(weights, layers=None)
    compute, programs = generator.next_tokens, []

    def next_tokens(*args, **options):
        text = compute.lower(*args, **options).compile().as_text()
        parts = {",".join(map(str, leaf.shape)) for leaf in jax.tree.leaves(args[1].cache.parts)}
        programs.append([line for line in text.splitlines() if _copied(line) in parts])
        assert any(f"f32[{shape}]" in text for shape in parts)
        return compute(*args, **options)

    monkeypatch.setattr(generator, "next_tokens", next_tokens)
    prompts = [np.arange(5, 9, dtype=np.int32), np.arange(5, 12, dtype=np.int32)]
    request = Request(prompts, 3, (1,), 0, 8, (), temperature=1.0, logps=False)
    generator.generate(weights, request, turns=TurnCache(keeps))
    assert programs and not any(programs), programs


def _copied(line: str) -> str | None:
    """The shape that a line of a compiled program copies, or None."""
    found = re.search(r"= f32\[([\d,]*)\]\S* copy\(", line)
    return found and found.group(1)
