"""What is saved: folders that transformers and we can load, and that contain no secrets."""

from __future__ import annotations

import json

import numpy as np
import pytest

import trl_jax
from compat_tests.parity.marks import assert_same_weights
from compat_tests.parity.reference import read_weights
from compat_tests.trainer.trainers import FACTS, make, table

IDS = [[5, 6, 7, 8, 9, 4]]
SAVES = {"save_strategy": "steps", "save_steps": 2, "num_train_epochs": 1}


@pytest.fixture(scope="module")
def folder(checkpoint):
    return checkpoint(**FACTS, tokenizer={"chat_template": True})


@pytest.fixture(scope="module")
def run(folder, tmp_path_factory):
    """A trained trainer whose folder has checkpoint-2 and checkpoint-4, and that folder."""
    out = tmp_path_factory.mktemp("out")
    trainer = make(trl_jax, folder, out, config=SAVES)
    trainer.train()
    return trainer, out


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_saved_model_is_complete(run, tmp_path):
    trainer, _ = run
    trainer.save_model(str(tmp_path / "final"))
    assert names(tmp_path / "final") == [
        "chat_template.jinja",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "training_args.json",
    ]


def test_trls_files_are_all_there(run, folder, tmp_path):
    """Except that the pickled arguments are JSON here."""
    trl = pytest.importorskip("trl")
    run[0].save_model(str(tmp_path / "ours"))
    make(trl, folder, tmp_path).save_model(str(tmp_path / "theirs"))
    assert {*names(tmp_path / "theirs")} - {"training_args.bin"} == {*names(tmp_path / "ours")} - {"training_args.json"}


def test_without_a_folder_it_goes_to_output_dir(folder, tmp_path):
    make(trl_jax, folder, tmp_path / "here").save_model()
    assert "model.safetensors" in names(tmp_path / "here")


def test_checkpoints_hold_the_model_and_the_state(run):
    _, out = run
    assert names(out) == ["README.md", "checkpoint-2", "checkpoint-4", "training_loss.svg"]
    assert {"config.json", "model.safetensors", "tokenizer.json", "trainer_state.json"} <= {
        *names(out / "checkpoint-4")
    }
    state = json.loads((out / "checkpoint-2" / "trainer_state.json").read_text())
    assert state["global_step"] == 2 and len(state["log_history"]) == 2


def test_transformers_scores_a_checkpoint_as_we_do(run):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForSequenceClassification

    trainer, out = run
    theirs = AutoModelForSequenceClassification.from_pretrained(out / "checkpoint-4").eval()
    with torch.no_grad():
        wanted = theirs(input_ids=torch.tensor(IDS)).logits.numpy()
    np.testing.assert_allclose(trainer.model(IDS).logits, wanted, rtol=0, atol=1e-5)
    half_way = trl_jax.AutoModelForSequenceClassification.from_pretrained(out / "checkpoint-2")
    assert abs(float(half_way(IDS).logits[0, 0]) - wanted[0, 0]) > 1e-4


def test_a_checkpoint_is_a_model_to_go_on_from(run, tmp_path):
    trainer, out = run
    again = make(trl_jax, out / "checkpoint-4", tmp_path)
    np.testing.assert_array_equal(again.model(IDS).logits, trainer.model(IDS).logits)
    assert again.processing_class.chat_template == trainer.processing_class.chat_template
    again.save_model(str(tmp_path / "same"))
    assert_same_weights(read_weights(tmp_path / "same"), read_weights(out / "checkpoint-4"), 0.0)


def test_the_arguments_are_readable_and_keep_no_token(folder, tmp_path):
    secret = "hf_abcdefgh"
    config = {"model_init_kwargs": {"token": secret, "dtype": "float32"}}
    trainer = make(trl_jax, folder, tmp_path / "out", train=table(4), config=config)
    trainer.save_model(str(tmp_path / "final"))
    saved = json.loads((tmp_path / "final" / "training_args.json").read_text())
    assert saved["learning_rate"] == 5e-4 and saved["model_init_kwargs"]["dtype"] == "float32"
    for path in (tmp_path / "final").iterdir():
        assert secret.encode() not in path.read_bytes(), path.name
    assert trainer.args.model_init_kwargs["token"] == secret, "what the user gave was written to"
