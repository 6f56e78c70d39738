"""The model card tells the run: its arguments, its last metrics, its curve; no secrets, no broken sentences."""

from __future__ import annotations

import xml.dom.minidom

import trl_jax
from compat_tests.trainer.trainers import FACTS, make, table


def test_the_card_tells_what_was_done(checkpoint, tmp_path):
    config = {"max_steps": 3, "eval_strategy": "steps", "eval_steps": 3, "weight_decay": 0.125}
    trainer = make(trl_jax, checkpoint(**FACTS), tmp_path / "judge", config=config, eval_dataset=table(4))
    trainer.args.hub_token = "hf_secret"
    trainer.create_model_card()
    before = (tmp_path / "judge" / "README.md").read_text()
    assert "# judge" in before and "Arguments" not in before and "None" not in before
    trainer.train()
    trainer.create_model_card(dataset_name="some/pairs")
    card = (tmp_path / "judge" / "README.md").read_text()
    assert "| weight_decay | 0.125 |" in card and "| max_steps | 3 |" in card and "hf_secret" not in card
    assert "| eval_accuracy | " in card and "runtime" not in card and "on some/pairs" in card
    assert "![Training loss](training_loss.svg)" in card and "| adam_beta1 |" not in card
    assert str(tmp_path) not in card
    drawn = (tmp_path / "judge" / "training_loss.svg").read_text()
    xml.dom.minidom.parseString(drawn)
    assert "steps 1 to 3" in drawn
