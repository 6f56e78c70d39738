"""Exported causal language models with a tied head, whose weight has two names in torch."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import load_file

from compat_tests.effort import only_thorough, thorough
from compat_tests.exported import configs
from trl_jax.exported import program
from trl_jax.hub.auto import AutoModelForCausalLM

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TABLE = "transformer.word_embeddings.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    out = tmp_path_factory.mktemp("bloom")
    transformers.AutoModelForCausalLM.from_config(configs.config("bloom")).save_pretrained(out)
    return out


@pytest.fixture(scope="module")
def model(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype="float32")


@only_thorough
def test_its_logits_are_torchs_and_it_is_saved_once(model, folder, tmp_path):
    ids = np.array([[3, 4, 5, 6]])
    assert model.backend.name.startswith("exported") and TABLE in model.params
    with torch.no_grad():
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        wanted = theirs(torch.tensor(ids)).logits.numpy()
    np.testing.assert_allclose(model(ids).logits, wanted, atol=1e-5)
    model.save_pretrained(tmp_path / "out")
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "out"))
    assert before.keys() == after.keys() and "lm_head.weight" not in after
    for name, values in before.items():
        np.testing.assert_array_equal(after[name], values)


# By default, test_fake_pass covers what an exported program tells.
@pytest.mark.parametrize("passes", [True, thorough(False)])
def test_the_table_has_a_gradient_by_either_name(passes, model, monkeypatch):
    if not passes:  # determine it from an exported program instead
        monkeypatch.setattr(program, "fake_pass", lambda *args, **kwargs: None)
    assert model.backend._model._without_gradient() == frozenset()
