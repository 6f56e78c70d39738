"""`assistant_only_loss` on rows with images: labels match those of transformers' processor, and losses match TRL's."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset

import trl_jax
from compat_tests import tiny
from compat_tests.trainer.vision_models import TEMPLATE, assistant, logged, pictures, tiny_llava, trainer, user
from trl_jax.data.image_rows import SftImageRows, pictures_of

MARKED = (
    "{% for message in messages %}{{ message['role'] }}: {% if message['role'] == 'assistant' %}{% generation %}"
    "{% for part in message['content'] %}{{ part['text'] }}{% endfor %}{{ eos_token }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{{ eos_token }}\n{% endif %}{% endfor %}"
)


def dialogues():
    """Conversations of two turns with zero to two images."""
    rows = [
        {
            "messages": user(f"bake the {word}?") + assistant(f"gladly {word}") + user("quit") + assistant("nobody"),
            "images": [picture] * (number % 3),
        }
        for number, (word, picture) in enumerate(zip(tiny.THINGS, pictures(6), strict=False))
    ]
    return Dataset.from_list(rows)


@pytest.fixture(scope="module")
def llava(tmp_path_factory):
    """A tiny LLaVA whose chat template marks the assistant's text."""
    folder = tiny_llava(tmp_path_factory.mktemp("llava"))
    for path in folder.iterdir():
        if path.suffix == ".json" and "chat_template" in (values := json.loads(path.read_text())):
            path.write_text(json.dumps(values | {"chat_template": MARKED}))
    for path in folder.glob("*.jinja"):
        path.write_text(MARKED)
    return str(folder)


@pytest.mark.parametrize("max_length", [None, 40])
def test_labels_are_those_of_transformers(max_length, llava, tmp_path):
    from transformers import AutoProcessor

    from trl_jax.data.chat_templates import prepare_multimodal_messages

    made = trainer(trl_jax, "SFT", llava, tmp_path, dialogues(), assistant_only_loss=True)
    encoder, processor = made._setup.encoder, AutoProcessor.from_pretrained(llava)
    rows, seen = SftImageRows(assistant_only=True), 0
    for row in dialogues():
        example = rows.example(row, encoder, max_length)
        wanted = processor.apply_chat_template(
            [prepare_multimodal_messages(row["messages"], pictures_of(row))],
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
            processor_kwargs={"add_special_tokens": False, "truncation": max_length is not None,
                              "max_length": max_length},
        )  # fmt: skip
        ids, mask = (np.asarray(wanted[name][0]) for name in ("input_ids", "assistant_masks"))
        np.testing.assert_array_equal(example.texts[0], ids)
        np.testing.assert_array_equal(example.labels[0], np.where(mask == 1, ids, -100))
        seen += mask.sum()
    assert seen


def test_losses_are_trls(llava, tmp_path):
    trl = pytest.importorskip("trl")
    theirs, ours = (
        logged(trainer(package, "SFT", llava, tmp_path / package.__name__, dialogues(), assistant_only_loss=True))
        for package in (trl, trl_jax)
    )
    assert len(ours) == 3
    for own, their in zip(ours, theirs, strict=True):
        for name in their.keys() & own.keys() - {"epoch"}:
            assert own[name] == pytest.approx(their[name], rel=2e-4, abs=1e-5 if name == "loss" else 2e-4), name


def test_a_template_without_markers_gets_them(llava, tmp_path):
    plain = tiny_llava(tmp_path / "plain")
    assert TEMPLATE in "".join(path.read_text() for path in Path(plain).glob("*.jinja"))
    marked = trainer(trl_jax, "SFT", llava, tmp_path / "marked", dialogues(), assistant_only_loss=True)
    derived = trainer(trl_jax, "SFT", str(plain), tmp_path / "derived", dialogues(), assistant_only_loss=True)
    own, other = (
        made._setup.task.image_example(dialogues()[1], made._setup.encoder, None) for made in (marked, derived)
    )
    np.testing.assert_array_equal(own.texts[0], other.texts[0])
    newline = own.texts[0][-1]
    said, found = (example.labels[0][example.labels[0] != -100] for example in (own, other))
    np.testing.assert_array_equal(found[found != newline], said)  # a derived template ends a turn after the newline


def test_a_row_without_an_answer_is_named(llava, tmp_path):
    rows = Dataset.from_list([{"messages": user("bake?"), "images": pictures(1)}] * 2)
    with pytest.raises(ValueError, match="Row . of train_dataset: the chat template marks no assistant content"):
        trainer(trl_jax, "SFT", llava, tmp_path, rows, assistant_only_loss=True).train()
