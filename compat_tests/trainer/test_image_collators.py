"""TRL's collators for rows with images configure how rows are read; other collators are refused."""

from __future__ import annotations

import importlib
from dataclasses import fields
from functools import partial

import numpy as np
import pytest

import trl_jax
from compat_tests.hub.vision import processors
from compat_tests.trainer.vision_models import (
    TEMPLATE,
    completions,
    logged,
    messages,
    pairs,
    tiny_llava,
    trainer,
    unpaired,
)

COLLATORS = {
    "SFT": ("sft", "DataCollatorForVisionLanguageModeling", completions),
    "DPO": ("dpo", "DataCollatorForVisionPreference", pairs),
    "KTO": ("kto", "DataCollatorForVisionUnpairedPreference", unpaired),
}


@pytest.fixture(scope="module")
def llava(tmp_path_factory):
    return str(tiny_llava(tmp_path_factory.mktemp("llava")))


@pytest.fixture(scope="module")
def processor(llava):
    from transformers import AutoProcessor

    return AutoProcessor.from_pretrained(llava)


def collator(kind, package="trl_jax"):
    module, name, _ = COLLATORS[kind]
    return vars(importlib.import_module(f"{package}.trainer.{module}_trainer"))[name]


@pytest.mark.parametrize("kind", COLLATORS)
def test_options_are_trls(kind):
    pytest.importorskip("trl")
    ours, theirs = (
        {field.name: field.default for field in fields(collator(kind, package))} for package in ("trl_jax", "trl")
    )
    assert list(ours) == list(theirs)
    assert ours | {"return_tensors": "pt"} == theirs


@pytest.mark.parametrize("kind", COLLATORS)
def test_its_options_replace_those_of_the_arguments(kind, llava, processor, tmp_path):
    rows = COLLATORS[kind][2]()
    own = collator(kind)(processor, max_length=31, pad_to_multiple_of=16)
    made = trainer(trl_jax, kind, llava, tmp_path, rows, data_collator=own, pad_to_multiple_of=None)
    task, encoder = made._setup.task, made._setup.encoder
    row = task.image_rows([rows[1], rows[0]])[0]
    example = task.image_example(row, encoder, None)
    assert max(map(len, example.texts)) == 31 and made._setup.pad_to_multiple_of == 16
    assert made.data_collator is own and encoder.image_processor is processor.image_processor
    if kind == "SFT":  # completion_only_loss is False by default, as in TRL
        np.testing.assert_array_equal(example.labels[0], example.texts[0])
        with pytest.raises(ValueError, match="only supported for conversational language modeling"):
            own = collator(kind)(processor, assistant_only_loss=True)
            trainer(trl_jax, kind, llava, tmp_path, rows, data_collator=own)


def test_a_run_with_one_is_trls(llava, processor, tmp_path):
    trl = pytest.importorskip("trl")
    losses = [
        [
            entry["loss"]
            for entry in logged(
                trainer(
                    package,
                    "SFT",
                    llava,
                    tmp_path / name,
                    completions(),
                    max_length=8,
                    data_collator=collator("SFT", name)(processor),
                )  # fmt: skip
            )
        ]
        for name, package in {"trl": trl, "trl_jax": trl_jax}.items()
    ]
    np.testing.assert_allclose(losses[1], losses[0], atol=1e-5)


def test_what_is_refused(llava, processor, tmp_path):
    from transformers import AutoProcessor

    def collate(examples):
        return processor(text=[example["text"] for example in examples])

    make = partial(trainer, trl_jax, "SFT", llava, tmp_path, messages())
    for own in (collate, partial(collate), lambda examples: examples):
        with pytest.raises(ValueError, match="Leave data_collator out and train on the columns directly"):
            make(data_collator=own)
    with pytest.raises(ValueError, match="data_collator has a different processor than processing_class"):
        make(data_collator=collator("SFT")(processor), processing_class=AutoProcessor.from_pretrained(llava))
    with pytest.raises(ValueError, match="for rows with images, but train_dataset has no images"):
        texts = messages().remove_columns("images")
        trainer(trl_jax, "SFT", llava, tmp_path, texts, data_collator=collator("SFT")(processor))
    with pytest.raises(ValueError, match="calculate_kl=False, and loss_type='kto' needs calculate_kl=True"):
        own = collator("KTO")(processor, calculate_kl=False)
        trainer(trl_jax, "KTO", llava, tmp_path, unpaired(), data_collator=own)
    with pytest.raises(NotImplementedError, match="Padding to a multiple of a value is not yet implemented"):
        collator("DPO")(processor, pad_to_multiple_of=8)(list(pairs()))
    with pytest.raises(TypeError, match="wanted a processor with a tokenizer"):
        collator("DPO")(processor.tokenizer)


OPTIONS = {
    "SFT": [
        (messages, {"pad_to_multiple_of": 16}),
        (messages, {"assistant_only_loss": True}),
        (completions, {"completion_only_loss": True, "max_length": 30}),
    ],
    "DPO": [(pairs, {}), (pairs, {"max_length": 26})],
    "KTO": [(unpaired, {}), (unpaired, {"calculate_kl": False})],
}


@pytest.mark.parametrize("name", ["gemma3", "llava_next", "qwen2_5_vl"])
@pytest.mark.parametrize(
    ("kind", "rows", "options"), [(kind, *case) for kind, cases in OPTIONS.items() for case in cases]
)
def test_its_batches_are_trls(kind, rows, options, name, monkeypatch):
    pytest.importorskip("trl")
    template = TEMPLATE.replace("<image>", processors.placeholder(name))
    processor = processors.built_processor(name, monkeypatch, chat_template=template)
    processor.tokenizer.chat_template = template
    if "assistant_only_loss" in options:
        marked = template.replace("{{ part['text'] }}", "{% generation %}{{ part['text'] }}{% endgeneration %}")
        options = options | {"chat_template": marked}
    examples = list(rows(4))
    ours, theirs = (
        collator(kind, package)(processor, **options)([dict(row) for row in examples]) for package in ("trl_jax", "trl")
    )
    assert ours.keys() == theirs.keys()
    for key in theirs:
        prefix = "KL_" * key.startswith("KL_")
        padding = theirs[f"{prefix}attention_mask"] == 0
        blank = key.removeprefix("KL_") == "input_ids"  # TRL pads with one of two tokens
        wanted, found = (batch[key].masked_fill(padding, 0) if blank else batch[key] for batch in (theirs, ours))
        assert found.dtype == wanted.dtype, key
        np.testing.assert_array_equal(found, wanted, key)
