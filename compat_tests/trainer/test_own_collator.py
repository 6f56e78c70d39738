"""Collate functions of scripts in SFTTrainer: they are called for each row, and the run is TRL's."""

from __future__ import annotations

import pytest
from datasets import Dataset, IterableDataset

import trl_jax
from compat_tests.effort import usual
from compat_tests.parity.reference import BASE
from compat_tests.tiny import text_rows
from compat_tests.trainer.trainers import FACTS

torch, trl, transformers = map(pytest.importorskip, ("torch", "trl", "transformers"))
RAW = {"remove_unused_columns": False, "dataset_kwargs": {"skip_prepare_dataset": True}}


def answers(words):
    """Alpaca's: prompts have no labels."""

    def collate(rows):
        prompts, texts = ([words(row[name])["input_ids"] for row in rows] for name in ("prompt", "completion"))
        ids = [torch.tensor([*prompt, *text]) for prompt, text in zip(prompts, texts, strict=True)]
        labels = [torch.tensor([-100] * len(prompt) + text) for prompt, text in zip(prompts, texts, strict=True)]
        ids = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=words.pad_token_id)
        labels = torch.nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=-100)
        return {"input_ids": ids, "labels": labels, "attention_mask": ids.ne(words.pad_token_id)}

    return collate


def fixed(words):
    """Notebooks': padded to a fixed length."""

    def collate(rows):
        texts = [row["prompt"] + row["completion"] for row in rows]
        batch = words(texts, padding="max_length", truncation=True, max_length=20, return_tensors="pt")
        return {**batch, "labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}

    return collate


def transformers_own(words):
    return transformers.DataCollatorForLanguageModeling(words, mlm=False)


@usual("answers", "transformers_own")
@pytest.mark.parametrize(("kind", "config", "streams"), [
    pytest.param(answers, RAW, False, id="answers"),
    pytest.param(answers, RAW, True, id="answers of a stream"),
    pytest.param(fixed, RAW, False, id="fixed"),
    pytest.param(transformers_own, {"per_device_train_batch_size": 1}, False, id="transformers_own"),
])  # fmt: skip
def test_a_scripts_collator_trains_as_in_trl(kind, config, streams, checkpoint, tmp_path):
    folder, found = str(checkpoint(**FACTS, head="causal")), []
    words = transformers.AutoTokenizer.from_pretrained(folder)
    rows = text_rows(8, "prompt") if config is RAW else [{"text": row["prompt"]} for row in text_rows(8, "prompt")]
    for package in (trl, trl_jax):
        train = IterableDataset.from_generator(lambda: iter(rows)) if streams else Dataset.from_list(rows)
        args = package.SFTConfig(str(tmp_path), **BASE | {"max_steps": 2, "per_device_eval_batch_size": 8} | config)
        evaluation = Dataset.from_list(rows[:1] if config is not RAW else rows)
        trainer = package.SFTTrainer(folder, args, kind(words), train, evaluation, processing_class=words)
        trainer.train()
        logs = [log | trainer.evaluate() for log in trainer.state.log_history[:2]]
        names = ("loss", "grad_norm", "num_tokens", "entropy", "eval_loss")
        found.append([[log[name] for name in names] for log in logs])
    assert found[1] == [pytest.approx(log, rel=1e-4) for log in found[0]]


MOST = 0  # tokens of a row


class Short:
    def __init__(self, words):
        self.words = words

    def __call__(self, rows):
        assert all(type(row) is dict for row in rows)
        for row in rows:
            row["parts"].append("gladly")  # in a fresh row, as in each of TRL's batches
        texts = ["".join(row["parts"]) for row in rows]
        batch = self.words(texts, padding=True, truncation=True, max_length=MOST, return_tensors="pt")
        return {**batch, "labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}


def test_rows_are_dicts_and_are_not_cached(checkpoint, tmp_path, monkeypatch):
    """The cache knows a function of a module by its name only."""
    folder = str(checkpoint(**FACTS, head="causal"))
    words = transformers.AutoTokenizer.from_pretrained(folder)
    Dataset.from_list([{"parts": [row["prompt"]]} for row in text_rows(4, "prompt")]).save_to_disk(
        str(tmp_path / "rows")
    )
    rows = Dataset.load_from_disk(str(tmp_path / "rows"))
    args = trl_jax.SFTConfig(str(tmp_path / "out"), **BASE | RAW)
    for most in (40, 5, 3):
        monkeypatch.setitem(globals(), "MOST", most)
        trainer = trl_jax.SFTTrainer(folder, args, Short(words), rows, processing_class=words)
        trainer.data_collator = trainer.data_collator  # no change
        for collate in (answers(words), trl_jax.trainer.sft_trainer.DataCollatorForLanguageModeling(0)):
            with pytest.raises(ValueError, match="was set on the trainer, but .* Pass it to the constructor"):
                trainer.data_collator = collate
        lengths = list(map(len, trainer.train_dataset["input_ids"]))
        assert max(lengths) < 40 if most == 40 else lengths == [most] * 4


def test_a_collator_that_does_more_than_that_is_refused(checkpoint, tmp_path):
    folder = str(checkpoint(**FACTS, head="causal"))
    words = transformers.AutoTokenizer.from_pretrained(folder)
    plain, left = answers(words), transformers.AutoTokenizer.from_pretrained(folder, padding_side="left")

    def calls(rows, seen=[]):  # noqa: B006
        seen.append(rows)
        batch = plain(rows)
        return batch | {"input_ids": batch["input_ids"] + len(seen)}

    cases = (
        (lambda rows: plain(rows) | {"weights": torch.ones(len(rows))}, "returned weights for train_dataset, which no"),
        (lambda rows: {"input_ids": plain(rows)["input_ids"]}, r"returned \['input_ids'\] for train_dataset; expected"),
        (lambda rows: plain(rows[:1]), "expected 2 rows each"),
        (lambda rows: plain(rows) | {"labels": plain(rows)["input_ids"]}, "labels other than -100"),
        (lambda rows: plain(rows) | {"input_ids": plain(rows)["input_ids"] + len(rows)}, "in a batch and on its own"),
        (calls, "different ids or labels for a row of .* when called again"),
        (fixed(left), "with a 0 before a 1. Pad on the right"),
    )
    rows = Dataset.from_list(text_rows(4, "prompt"))
    args = trl_jax.SFTConfig(str(tmp_path), **BASE | RAW | {"per_device_train_batch_size": 2})
    for collate, words_of in cases:
        with pytest.raises((TypeError, ValueError), match=words_of):
            trl_jax.SFTTrainer(folder, args, collate, rows, processing_class=words)
    for config, told in (
        ({"remove_unused_columns": True}, "No columns of train_dataset"),
        ({"packing": True}, "collat"),
    ):
        args = trl_jax.SFTConfig(str(tmp_path), **BASE | RAW | config)
        with pytest.raises(ValueError, match=told):
            trl_jax.SFTTrainer(folder, args, plain, rows, processing_class=words)
