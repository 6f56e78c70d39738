"""Datasets that TRL's trainers refuse: each of ours raises TRL's error message."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import pytest
from datasets import Dataset, IterableDataset

import trl_jax
from compat_tests.effort import usually
from compat_tests.mesh.rank import rows_of
from compat_tests.parity.dpo_cases import CHAT, SMALL
from compat_tests.parity.grpo_cases import vowels
from compat_tests.parity.reference import BASE
from compat_tests.trainer.trainers import FACTS
from trl_jax.training import data

KINDS = ("Reward", "SFT", "DPO", "KTO")
ALL = (*KINDS, "ORPO", "CPO", "GRPO", "RLOO", "Distillation")
SEEING = ("SFT", "DPO", "KTO", "GRPO", "RLOO", "Distillation")  # trainers that accept rows with images
YET = "and rows with images are not supported yet"
_OPTIONS = {"dataset_num_proc", "max_length", "packing", "padding_free"}


@pytest.fixture
def make(checkpoint, tmp_path):
    def made(package, kind, rows, chat=False, **arguments):
        options = {name: arguments.pop(name) for name in _OPTIONS & arguments.keys()}
        options |= {"num_generations": 2, "max_completion_length": 4} if kind in ("GRPO", "RLOO") else {}
        args = getattr(package, f"{kind}Config")(str(tmp_path), max_steps=1, **BASE | options)
        facts = FACTS if kind == "Reward" else SMALL
        model = str(checkpoint(**facts | ({"tokenizer": CHAT["tokenizer"]} if chat else {})))
        others = {"Distillation": [model], "GRPO": [vowels], "RLOO": [vowels]}.get(kind, [])
        return getattr(package, f"{kind}Trainer")(model, *others, args=args, train_dataset=rows, **arguments)

    return made


def talk(role, *parts):
    return [{"role": role, "content": [{"type": "text", "text": "a"}, *parts]}]


def messages(kind, *parts):
    """A row whose messages have content parts, including these."""
    asked, told = talk("user", *parts), talk("assistant")
    if kind == "SFT":
        return {"messages": asked + told}
    if kind in ("GRPO", "RLOO", "Distillation"):
        return {"prompt": asked}
    if kind == "KTO":
        return {"prompt": asked, "completion": told, "label": True}
    return {"prompt": asked, "chosen": told, "rejected": told}


PARTS = {"images": {"type": "image"}, "videos": {"type": "video", "video": "a.mp4"}}
PARTS |= {"audio": {"type": "input_audio", "input_audio": "a.wav"}}


@pytest.mark.parametrize("kind", ALL)
def test_messages_with_images(kind, make, monkeypatch):
    """Raised before weights are read. The error names the row, also in a stream, whose later rows are checked as they
    are read."""
    plain = [messages(kind, {"type": "text", "text": "b"}) for _ in range(4)]
    bad = messages(kind, PARTS["images"])

    def stream(*rows):
        return IterableDataset.from_generator(lambda: iter(rows))

    trainer = make(trl_jax, kind, stream(plain[0], bad, bad, bad), chat=True)
    with pytest.raises(ValueError, match="'type': 'image'.*, and rows with images are not supported yet"):
        trainer.train()
    monkeypatch.setattr("trl_jax.trainer.base_trainer.model_loading.load_policy", None)
    words = ".*'type': 'image'.*, and rows with images are not supported yet"
    with pytest.raises(ValueError, match="Row 2 of train_dataset" + words):
        make(trl_jax, kind, Dataset.from_list([*plain[:2], bad, plain[3]]), chat=True)
    first = "does not seem to be a vision-language model" if kind in SEEING else "Row 0 of train_dataset" + words
    with pytest.raises(ValueError, match=first):
        make(trl_jax, kind, stream(bad), chat=True)
    with pytest.raises(ValueError, match="Row 1 of eval_dataset" + words):
        make(trl_jax, kind, Dataset.from_list(plain), eval_dataset=Dataset.from_list([plain[0], bad]), chat=True)


@pytest.mark.parametrize("media", PARTS)
def test_media_are_named(media, make):
    rows = Dataset.from_list([messages("Reward", PARTS[media])] * 4)
    with pytest.raises(ValueError, match=f"rows with {media} are not supported yet"):
        make(trl_jax, "Reward", rows, chat=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("column", ["image", "images"])
def test_rows_with_images(kind, column, make):
    plain = rows_of(kind, 4)
    rows, words = [row | {column: "cat.png"} for row in plain], r"The dataset appears to be vision-related \(contains "
    own = words + f".*train_dataset has the column '{column}', {YET}"
    if kind in SEEING:
        own = words + ".*but the provided model does not seem to be a vision-language model"
    with pytest.raises(ValueError, match=own):
        make(trl_jax, kind, Dataset.from_list(rows))
    with pytest.raises(ValueError, match=words):
        make(trl_jax, kind, IterableDataset.from_generator(lambda: iter(rows)))
    with pytest.raises(ValueError, match=words + f".*eval_dataset has the column '{column}'"):
        make(trl_jax, kind, Dataset.from_list(plain), eval_dataset=Dataset.from_list(rows))
    if kind != "Reward" and column == "image":
        trl = pytest.importorskip("trl")
        with pytest.raises(ValueError, match=words):
            make(trl, kind, Dataset.from_list(rows))


IDS_TOO = {
    "Reward": ("input_ids_chosen", "input_ids_rejected"),
    "DPO": ("chosen_input_ids", "rejected_input_ids", "chosen_labels", "rejected_labels"),
    "KTO": ("completion_input_ids", "completion_labels", "KL_completion_input_ids", "KL_completion_labels"),
}
READ = {"Reward": ("chosen_ids",), "DPO": ("prompt_ids", "chosen_ids"), "KTO": ("prompt_ids", "completion_ids")}


@pytest.mark.parametrize("kind", IDS_TOO)
def test_of_texts_and_ids_in_the_columns_of_early_releases_the_texts_are_read(kind, make):
    trl = pytest.importorskip("trl")
    rows = [row | dict.fromkeys(IDS_TOO[kind], [5, 6, 7]) for row in rows_of(kind, 4)]
    for row in rows:
        row.pop("margin", None)
    ours, theirs = (make(package, kind, Dataset.from_list(rows)).train_dataset for package in (trl_jax, trl))
    for column in READ[kind]:
        assert ours[column] == theirs[column]


def told(caplog, words):
    return [one for one in caplog.messages if words in one]


NOTHING = {
    "SFT": ({"max_length": 1}, lambda row: {"text": "bread soup"}),
    "DPO": ({}, lambda row: {"prompt_ids": [5], "chosen_ids": [], "rejected_ids": []}),
    "KTO": ({}, lambda row: {"prompt_ids": [5, 6], "completion_ids": [], "label": True}),
}  # fmt: skip


@pytest.mark.parametrize("kind", NOTHING)
def test_rows_in_which_nothing_is_predicted(kind, checkpoint, tmp_path, caplog):
    options, changed = NOTHING[kind]
    rows = Dataset.from_list([changed(row) for row in rows_of(kind, 4)])
    args = getattr(trl_jax, f"{kind}Config")(str(tmp_path), **(BASE | {"max_steps": 1} | options))
    trainer = getattr(trl_jax, f"{kind}Trainer")(str(checkpoint(**SMALL)), args=args, train_dataset=rows)
    [one] = told(caplog, "every loss will be 0.0")
    assert "train_dataset" in one and "in all 4 rows" in one
    assert trainer.args.max_steps == 1


def test_rows_without_a_prompt_and_with_equal_answers_are_counted_once(make, caplog):
    pairs = {"prompt": ["", "bread:", "bread:"], "chosen": ["yes", "soup", "yes"], "rejected": ["no", "soup", "no"]}
    make(trl_jax, "DPO", Dataset.from_dict(pairs))
    assert told(caplog, "prompt: the first") == [
        "1 of 3 rows of train_dataset (first: row 0) have no prompt: the first token of their answers has no context "
        "and is not scored."
    ]
    assert told(caplog, "equal chosen") == [
        "1 of 3 rows of train_dataset (first: row 1) have equal chosen and rejected answers: no preference."
    ]
    caplog.clear()
    answers = {"prompt": ["", "bread:"], "completion": ["yes", "no"], "label": [True, False]}
    make(trl_jax, "KTO", Dataset.from_dict(answers))
    assert len(told(caplog, "1 of 2 rows of train_dataset (first: row 0) have no prompt")) == 1


def test_what_is_no_tokenizer_and_a_collator_in_one_line(make):
    from transformers import DataCollatorForSeq2Seq

    trl, rows = pytest.importorskip("trl"), Dataset.from_list(rows_of("SFT", 4))
    for kind in KINDS:
        with pytest.raises(TypeError, match="`processing_class` must be either a `PreTrainedTokenizerBase`"):
            make(trl_jax, kind, Dataset.from_list(rows_of(kind, 4)), processing_class="x")
    with pytest.raises(TypeError, match="`ProcessorMixin`, found a SimpleNamespace: load it with"):
        make(trl_jax, "SFT", rows, processing_class=SimpleNamespace(pad_token_id=0))  # such as a config
    with pytest.raises(TypeError, match="`ProcessorMixin`, found a function: load it with"):
        make(trl_jax, "SFT", rows, processing_class=lambda text: text)
    with pytest.raises(TypeError, match="`processing_class` must be either a `PreTrainedTokenizerBase`"):
        make(trl, "SFT", rows, processing_class="x")
    words = make(trl_jax, "SFT", rows).processing_class
    pairs = Dataset.from_list(rows_of("DPO", 4))
    with pytest.raises(ValueError, match=r"DataCollatorForSeq2Seq\(\.\.\.\) is not .*Leave it out") as told:
        make(trl_jax, "DPO", pairs, data_collator=DataCollatorForSeq2Seq(words))
    assert len(str(told.value)) < 250


def test_a_message_without_a_role_is_named_by_its_row(checkpoint, tmp_path):
    good = [{"role": "user", "content": "bread"}, {"role": "assistant", "content": "soup"}]
    rows = [{"messages": good}, {"messages": [good[0], {"role": None, "content": "soup"}]}]
    with pytest.raises(ValueError, match="Row 1 of train_dataset, column 'messages'.*role and content"):
        args = trl_jax.SFTConfig(str(tmp_path), **BASE)
        trl_jax.SFTTrainer(str(checkpoint(**CHAT)), args=args, train_dataset=Dataset.from_list(rows))


def test_rows_that_a_transform_makes_ready(checkpoint, tmp_path):
    trl, found = pytest.importorskip("trl"), {}
    plain = Dataset.from_dict({"number": [5, 6, 7, 8]})

    def made(rows):
        ids = [[number, 9, 10] for number in rows["number"]]
        return {"input_ids": ids, "labels": ids}

    options = {"dataset_kwargs": {"skip_prepare_dataset": True}, "remove_unused_columns": False, "max_steps": 2}
    for package in (trl_jax, trl):
        args = package.SFTConfig(str(tmp_path / package.__name__), **(BASE | options))
        trainer = package.SFTTrainer(str(checkpoint(**SMALL)), args=args, train_dataset=plain.with_transform(made))
        trainer.train()
        found[package] = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert found[trl_jax] == pytest.approx(found[trl], abs=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_prepared_before_jax_starts(kind, make, monkeypatch):
    """Processes for dataset_num_proc are forked before JAX starts threads, which could deadlock them."""
    order, config, trainer = [], getattr(trl_jax, f"{kind}Config"), getattr(trl_jax, f"{kind}Trainer")
    devices, prepare = config.jax_devices, trainer.prepare_dataset
    monkeypatch.setattr(config, "jax_devices", lambda self: (order.append("devices"), devices(self))[1])
    rows = lambda self, *given, **options: (order.append("rows"), prepare(self, *given, **options))[1]  # noqa: E731
    monkeypatch.setattr(trainer, "prepare_dataset", rows)
    make(trl_jax, kind, Dataset.from_list(rows_of(kind, 4)))
    assert order[0] == "rows" and "devices" in order


@pytest.mark.parametrize("kind", usually({"Reward", "SFT"}.__contains__, KINDS))
def test_nothing_forks_beside_jax(kind, make, recwarn, caplog, monkeypatch):
    """Rows are the same as with two processes, and one log line says why only one is used; few rows need no line."""
    jax.block_until_ready(jax.numpy.zeros(1))
    rows = Dataset.from_list(rows_of(kind, 8) * 2)
    alone = make(trl_jax, kind, rows)
    again = make(trl_jax, kind, rows, dataset_num_proc=2)
    assert again.train_dataset.to_list() == alone.train_dataset.to_list() and "dataset_num_proc" not in caplog.text
    monkeypatch.setattr(data, "_FEW_ROWS", 10)
    again.evaluate(rows)
    again.evaluate(rows)
    assert not [warned for warned in recwarn if "os.fork()" in str(warned.message)]
    assert caplog.text.count("dataset_num_proc=2: eval_dataset is tokenized in this process only") == 1


def test_rows_are_packed_apart_by_dataset_num_proc_beside_jax(make):
    trl = pytest.importorskip("trl")
    jax.block_until_ready(jax.numpy.zeros(1))
    rows = Dataset.from_dict({"input_ids": [[5] * length for length in (9, 6, 3, 2, 9, 4, 7, 5, 1, 8, 3)]})
    options = {"packing": True, "max_length": 12, "dataset_num_proc": 3, "padding_free": True}
    ours, theirs = (make(package, "SFT", rows, **options).train_dataset for package in (trl_jax, trl))
    assert ours["seq_lengths"] == theirs["seq_lengths"] and len(ours) > len(make(
        trl_jax, "SFT", rows, **options | {"dataset_num_proc": None}).train_dataset)  # fmt: skip
