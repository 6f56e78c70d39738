"""Thirty steps of TRL with PEFT and of ours, nothing injected; and each reads what the other wrote."""

from __future__ import annotations

import re

import numpy as np
import pytest

import trl_jax
from compat_tests.adapters.runs import CASES
from compat_tests.parity.marks import assert_same_curve, assert_same_weights, steps_of

IDS = np.array([[5, 6, 7, 8, 9, 10], [11, 12, 13, 14, 15, 16]])
SCORED = ("llama", "phi3", "gpt2", "bert")  # parts of layers, DoRA on fused, Conv1D and a table, an encoder
ADRIFT = re.compile(r"(k_proj|c_attn|key)\.(base_layer\.)?bias")  # without gradient but rounding


@pytest.mark.parametrize("name", CASES)
def test_the_curve_is_trls(adapted, name):
    assert len(steps_of(adapted.theirs(name).logs)) == 30
    assert_same_curve(adapted.ours(name).logs, adapted.theirs(name).logs)


@pytest.mark.parametrize("name", CASES)
def test_the_adapter_is_pefts(adapted, name):
    ours, theirs = adapted.ours(name).weights, adapted.theirs(name).weights
    assert set(ours) == set(theirs)
    held = [tensor for tensor in theirs if not ADRIFT.search(tensor)]
    assert_same_weights({t: ours[t] for t in held}, {t: theirs[t] for t in held})


@pytest.mark.parametrize("name", CASES)
def test_adapter_config_is_pefts_key_by_key(adapted, name):
    ours, theirs = adapted.ours(name).config, adapted.theirs(name).config
    listed = {"target_modules"} & {key for key, value in theirs.items() if isinstance(value, list)}  # of a set there
    assert len(theirs) == 41
    assert {key: sorted(v) if key in listed else v for key, v in ours.items()} == {
        key: sorted(v) if key in listed else v for key, v in theirs.items()
    }


@pytest.mark.parametrize("name", SCORED)
def test_peft_and_transformers_score_as_we_do(adapted, name):
    import torch
    from peft import AutoPeftModelForSequenceClassification
    from transformers import AutoModelForSequenceClassification

    run = adapted.ours(name)
    model = run.trainer.model
    ours = np.asarray(model(IDS).logits)
    folder = run.folder.parent / "merged"
    model.merge_and_unload().save_pretrained(folder)
    for theirs in (
        AutoPeftModelForSequenceClassification.from_pretrained(run.folder, num_labels=1),
        AutoModelForSequenceClassification.from_pretrained(folder),
    ):
        theirs.config.pad_token_id = model.config.pad_token_id
        with torch.no_grad():
            found = theirs.eval()(input_ids=torch.tensor(IDS)).logits.numpy()
        assert np.abs(found - ours).max() < 1e-5


@pytest.mark.parametrize("name", SCORED)
def test_we_score_as_peft_does_what_it_wrote(adapted, name):
    import torch

    theirs = adapted.theirs(name)
    ours = trl_jax.AutoModelForSequenceClassification.from_pretrained(theirs.folder)
    ours.config.pad_token_id = theirs.trainer.model.config.pad_token_id
    with torch.no_grad():
        wanted = theirs.trainer.model.eval()(input_ids=torch.tensor(IDS)).logits.numpy()
    assert np.abs(np.asarray(ours(IDS).logits) - wanted).max() < 1e-5


def test_a_peft_model_is_trained_further_and_has_the_result(adapted, tmp_path):
    import torch
    from peft import AutoPeftModelForSequenceClassification
    from transformers import AutoTokenizer

    from compat_tests.trainer.trainers import make

    folder = adapted.ours("gpt2").folder
    brought = AutoPeftModelForSequenceClassification.from_pretrained(folder, num_labels=1, is_trainable=True).eval()
    words = AutoTokenizer.from_pretrained(folder)
    trainer = make(trl_jax, brought, tmp_path, processing_class=words, config={"max_steps": 2})
    before = np.asarray(trainer.model(IDS).logits)
    trainer.train()
    with torch.no_grad():
        after = brought(input_ids=torch.tensor(IDS)).logits.numpy()
    assert np.abs(after - np.asarray(trainer.model(IDS).logits)).max() < 1e-5 < np.abs(after - before).max()


def test_what_is_frozen_stays_and_padding_stays_zero(adapted):
    """llama's ranks differ by layer, and one layer has no adapter: what fills the stacks must never move."""
    trainer, start = adapted.ours("llama").trainer, trl_jax.AutoModelForSequenceClassification
    base = start.from_pretrained(adapted.model("llama"))
    for path, array in trainer.model.frozen.items():
        assert (np.asarray(array) == np.asarray(base.params[path])).all(), path
    a = np.asarray(trainer.model.params["model.layers.{}.self_attn.q_proj.lora_A"])
    b = np.asarray(trainer.model.params["model.layers.{}.self_attn.q_proj.lora_B"])
    assert a.shape == (3, 7, 64) and not a[0].any() and not a[2, 4:].any() and a[1].all() and not b[2, :, 4:].any()
    state = trainer._optimizer_state
    assert not set(trainer.model.frozen) & {str(path[-1].key) for path, _ in _leaves(state) if hasattr(path[-1], "key")}


def _leaves(tree):
    import jax

    return jax.tree_util.tree_flatten_with_path(tree)[0]
