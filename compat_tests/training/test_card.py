"""The model card describes the run (arguments, last metrics, curve) without secrets or broken sentences."""

from __future__ import annotations

import xml.dom.minidom

import pytest
import yaml
from datasets import Dataset

import trl_jax
from compat_tests.mesh.rank import rows_of
from compat_tests.parity.dpo_cases import SMALL
from compat_tests.parity.reference import BASE
from compat_tests.trainer.trainers import FACTS, make, table


def test_the_card_tells_what_was_done(checkpoint, tmp_path):
    config = {"max_steps": 3, "eval_strategy": "steps", "eval_steps": 3, "weight_decay": 0.125}
    trainer = make(trl_jax, checkpoint(**FACTS), tmp_path / "judge", config=config, eval_dataset=table(4))
    trainer.args.hub_token = "hf_secret"
    trainer.create_model_card()
    before = (tmp_path / "judge" / "README.md").read_text()
    assert "# judge" in before and "Arguments" not in before and "None" not in before
    ours = "will overwrite it; remove this line to keep your changes. -->"
    earlier = before.replace(ours, "will write it anew; remove this line to keep your own. -->")
    assert earlier != before
    (tmp_path / "judge" / "README.md").write_text(earlier)  # as an earlier release wrote it
    trainer.train()
    trainer.create_model_card(dataset_name="some/pairs")
    card = (tmp_path / "judge" / "README.md").read_text()
    assert ours in card and "anew" not in card
    assert "| weight_decay | 0.125 |" in card and "| max_steps | 3 |" in card and "hf_secret" not in card
    assert "| eval_accuracy | " in card and "runtime" not in card and "on some/pairs" in card
    assert "![Training loss](training_loss.svg)" in card and "| adam_beta1 |" not in card
    assert str(tmp_path) not in card
    drawn = (tmp_path / "judge" / "training_loss.svg").read_text()
    xml.dom.minidom.parseString(drawn)
    assert drawn.count("<circle") == 3


PAPERS = {"SFT": None, "DPO": "2305.18290", "KTO": "2402.01306"}


@pytest.mark.parametrize("kind", PAPERS)
def test_a_card_has_trls_tags_and_names_the_methods_paper(kind, checkpoint, tmp_path):
    trl = pytest.importorskip("trl")
    args = getattr(trl_jax, f"{kind}Config")(str(tmp_path), **BASE)
    rows = Dataset.from_list(rows_of(kind, 4))
    trainer = getattr(trl_jax, f"{kind}Trainer")(str(checkpoint(**SMALL)), args=args, train_dataset=rows)
    trainer.create_model_card()
    card = (tmp_path / "README.md").read_text()
    theirs = getattr(trl, f"{kind}Trainer")
    assert {*theirs._tag_names, "trl_jax"} <= set(yaml.safe_load(card.split("---")[1])["tags"])
    if PAPERS[kind] is not None:
        assert theirs._paper["id"] == PAPERS[kind]
        assert f"[{theirs._paper['title']}](https://huggingface.co/papers/{PAPERS[kind]})" in card


def test_each_checkpoint_brings_the_card_up_to_date_and_leaves_a_users_alone(checkpoint, tmp_path):
    config = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1, "logging_steps": 1}
    make(trl_jax, checkpoint(**FACTS), tmp_path / "run", config=config).train()
    assert (tmp_path / "run" / "training_loss.svg").read_text().count("<circle") == 2
    assert "| save_steps | 1 |" in (tmp_path / "run" / "README.md").read_text()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "README.md").write_text("mine")
    make(trl_jax, checkpoint(**FACTS), tmp_path / "mine", config=config).train()
    assert (tmp_path / "mine" / "README.md").read_text() == "mine"
