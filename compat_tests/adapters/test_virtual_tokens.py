"""Prompt tuning, P-tuning and prefix tuning beside TRL with PEFT: curves, files, generation, resuming."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from datasets import Dataset
from safetensors.numpy import load_file

import trl_jax
from compat_tests.effort import usual
from compat_tests.mesh.rank import rows_of
from compat_tests.parity.dpo_cases import SMALL
from compat_tests.parity.marks import assert_same_curve, steps_of
from compat_tests.parity.reference import BASE
from compat_tests.tiny import text_rows

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
trl = pytest.importorskip("trl")

RATE = {"learning_rate": 1e-2, "max_length": 64, "weight_decay": 0.1, "seed": 7}
MLP = {"encoder_hidden_size": 24}
# Name -> trainer, config of the adapter and its fields, arguments.
CASES = {
    "drawn": ("SFT", "PromptTuning", {}, {}),
    "sampled": ("SFT", "PromptTuning", {"prompt_tuning_init": "SAMPLE_VOCAB"}, {"loss_type": "dft"}),
    "text": ("KTO", "PromptTuning", {"prompt_tuning_init": "TEXT", "prompt_tuning_init_text": "take notes"}, {}),
    "mlp": ("DPO", "PromptEncoder", {}, {}),
    "lstm": ("SFT", "PromptEncoder", MLP | {"encoder_reparameterization_type": "LSTM"},
             {"gradient_accumulation_steps": 2}),
    "three": ("SFT", "PromptEncoder", {"encoder_reparameterization_type": "LSTM", "encoder_num_layers": 3}, {}),
    "prefix": ("SFT", "PrefixTuning", {}, {}),
    "projected": ("DPO", "PrefixTuning", {"prefix_projection": True}, {"precompute_ref_log_probs": True}),
    "zero": ("KTO", "PrefixTuning", {"init_weights": "zero", "prefix_projection": True} | MLP, {}),
}  # fmt: skip
IDS = np.array([[5, 9, 11, 7, 30, 31], [8, 40, 41, 42, 10, 3]])


def config_of(package, name, folder):
    _, kind, fields, _ = CASES[name]
    fields = fields | ({"tokenizer_name_or_path": str(folder)} if "prompt_tuning_init_text" in fields else {})
    return getattr(package, f"{kind}Config")(task_type="CAUSAL_LM", num_virtual_tokens=5, **fields)


def rows(kind, count=32):
    return Dataset.from_list(text_rows(count) if kind == "SFT" else rows_of(kind, count))


def trainer(package, name, folder, out, *, model=None, new=True, **config):
    kind, _, _, arguments = CASES[name]
    args = getattr(package, f"{kind}Config")(str(out), **(BASE | RATE | {"max_steps": 6} | arguments | config))
    adapter = config_of(peft if package is trl else trl_jax, name, folder) if new else None
    model = str(folder) if model is None else model
    sets = {"train_dataset": rows(kind), "eval_dataset": rows(kind, 8)}
    return getattr(package, f"{kind}Trainer")(model, args=args, peft_config=adapter, **sets)


@pytest.fixture(scope="module")
def runs(checkpoint, tmp_path_factory):
    """runs(package, name) -> a trainer after six steps, and the folder that it saved its adapter to."""
    done = {}

    def of(package, name):
        key = package.__name__, name
        if key not in done:
            out = tmp_path_factory.mktemp("-".join(key))
            made = trainer(package, name, checkpoint(**SMALL), out, eval_strategy="steps", eval_steps=3)
            made.train()
            made.save_model(str(out / "saved"))
            done[key] = made, out / "saved"
        return done[key]

    return of


@usual("drawn", "mlp", "lstm", "prefix", "zero")
@pytest.mark.parametrize("name", CASES)
def test_the_curve_and_the_adapter_are_trls(name, runs):
    (ours, mine), (theirs, other) = runs(trl_jax, name), runs(trl, name)
    assert len(steps_of(ours.state.log_history)) >= 6
    for log in (ours.state.log_history, theirs.state.log_history):
        for entry in log:
            for key in [key for key in entry if key.removeprefix("eval_").startswith(("logps/", "logits/", "rewards/", "kl"))]:
                entry.pop(key)
    assert_same_curve(ours.state.log_history, theirs.state.log_history)
    found, wanted = (load_file(folder / "adapter_model.safetensors") for folder in (mine, other))
    assert set(found) == set(wanted) == {"prompt_embeddings"}
    np.testing.assert_allclose(found["prompt_embeddings"], wanted["prompt_embeddings"], atol=1e-4)
    assert (mine / "adapter_config.json").read_text() == (other / "adapter_config.json").read_text()
    assert ours.get_num_trainable_parameters() == theirs.get_num_trainable_parameters()
