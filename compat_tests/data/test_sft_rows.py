"""Rows of every form become the same ids, labels and packed rows as in TRL's SFTTrainer."""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace

import numpy as np
import pytest
from datasets import Dataset, disable_caching, enable_caching

from compat_tests.effort import usual
from compat_tests.tiny import BAD, GOOD, preference_rows, tiny_model, tiny_tokenizer
from trl_jax.data.chat import PartsTokenizer
from trl_jax.data.sft import prepare

TEMPLATE = (
    "{% if tools %}tools: {{ tools | tojson }}\n{% endif %}{% for m in messages %}{{ m['role'] }}"
    "{% if loud %}!{% endif %}: {% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}{{ eos_token }}"
    "{% endgeneration %}{% else %}{{ m['content'] }}{{ eos_token }}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": "clock", "description": "the time", "parameters": {}}}]
STRATEGIES = ("bfd", "bfd_split", "wrapped")


@pytest.fixture(autouse=True)
def _no_cache():
    disable_caching()
    yield
    enable_caching()


@pytest.fixture(scope="module")
def tokenizer():
    made = tiny_tokenizer(bos="<s>", chat_template=True)
    made.chat_template = TEMPLATE
    return made


def words(n, seed=0):
    return " ".join(np.random.default_rng(seed).choice(GOOD + BAD, n).tolist())


def talks(n):
    """Conversations of one to three questions with answers; the last answer is missing in one row."""
    rows = [pair["chosen"] * (1 + i % 3) for i, pair in enumerate(preference_rows(n, "chat"))]
    return [{"messages": [{"role": "system", "content": "Be kind."}] * (i % 2) + row} for i, row in enumerate(rows)]


def completions(kind, n):
    return [{"prompt": row["prompt"], "completion": row["chosen"]} for row in preference_rows(n, kind)]


def sharegpt(rows):
    names = {"role": "from", "content": "value"}
    return [{"conversations": [{names[k]: v for k, v in m.items()} for m in row["messages"]]} for row in rows]


def tokenized(n, **more):
    rows = [{"input_ids": [10 + (i * j) % 50 for j in range(1, 2 + i % 9)]} for i in range(n)]
    return [row | {name: make(row["input_ids"]) for name, make in more.items()} for row in rows]


FORMS = {
    "text": [{"text": words(i % 17, i)} for i in range(40)],
    "text_ended": [{"text": "a b</s>"}, {"text": "</s> a"}, {"text": ""}],
    "text_foreign": [{"text": "żółć 漢字 🙂\n\n"}, {"text": "\t <s> <pad>"}],
    "messages": talks(12),
    "messages_tools": [row | {"tools": json.dumps(TOOLS) if i % 2 else "[]"} for i, row in enumerate(talks(6))],
    "messages_kwargs": [row | {"chat_template_kwargs": {"loud": i % 2 == 0}} for i, row in enumerate(talks(6))],
    "conversations": sharegpt(talks(8)),
    "completion": completions("prompt", 20),
    "completion_ended": [{"prompt": "why</s>", "completion": "so</s>"}, {"prompt": "", "completion": ""}],
    "completion_merged": [{"prompt": "gla", "completion": "dly"}, {"prompt": "care", "completion": "fully first"}],
    "completion_chat": completions("chat_prompt", 12),
    "completion_talk": [
        {"prompt": row["messages"][:-1], "completion": row["messages"][-1:] * 2, "tools": TOOLS if i % 2 else None}
        for i, row in enumerate(talks(9))
    ],
    "ids": tokenized(30),
    "ids_labels": tokenized(30, labels=lambda ids: [-100 if i % 3 else i for i in ids]),
    "ids_masks": tokenized(
        30, completion_mask=lambda ids: [i % 2 for i in ids], assistant_masks=lambda ids: [int(i > 20) for i in ids]
    ),
}
MASKED = {"messages", "messages_kwargs", "conversations", "completion_chat", "completion_talk"}


def theirs(dataset, tokenizer, name="train", **options):
    """TRL's own method, with the options that its constructor derives."""
    trl = pytest.importorskip("trl")
    first, func = next(iter(dataset)), options.pop("formatting_func", None)
    only = options.pop("completion_only_loss", None)
    if only is None:
        only = "prompt" in first and "completion" in first
    trainer = SimpleNamespace(_tokenizer=tokenizer, chat_template=None, completion_only_loss=only)
    facts = {"max_length": None, "truncation_mode": "keep_start", "dataset_num_proc": None, "seed": 0}
    facts |= {"assistant_only_loss": False, "packing": False, "packing_strategy": "bfd", "shuffle_dataset": False}
    args = SimpleNamespace(**facts | {"dataset_text_field": "text"} | options)
    return trl.SFTTrainer._prepare_dataset(trainer, dataset, tokenizer, args, args.packing, func, name)


def ours(dataset, tokenizer, name="train", dataset_num_proc=None, **options):
    options = {"max_length": None, "packing_parts": dataset_num_proc} | options
    return prepare(dataset, tokenizer, name=name, num_proc=dataset_num_proc, **options)


def columns(dataset):
    """The columns of each row that are trained on."""
    kept = ("input_ids", "labels", "seq_lengths")
    return [{name: list(row[name]) for name in kept if name in row} for row in dataset]


def assert_equal(dataset, tokenizer, **options):
    wanted = columns(theirs(dataset, tokenizer, **options))
    found = columns(ours(dataset, tokenizer, **options))
    assert wanted and found == wanted


def test_a_text_beside_takes_no_answers_end(tokenizer):
    """If rows also have an unused text column, TRL does not end answers with EOS."""
    rows = [row | {"text": "a text"} for row in FORMS["completion"]]
    plain = columns(ours(Dataset.from_list(FORMS["completion"]), tokenizer))
    assert columns(ours(Dataset.from_list(rows), tokenizer)) == plain
    without = columns(theirs(Dataset.from_list(rows), tokenizer))
    assert [row["input_ids"] + [tokenizer.eos_token_id] for row in without] == [row["input_ids"] for row in plain]


@pytest.mark.parametrize("streaming", [False, True], ids=["table", "stream"])
@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"max_length": 44},
        {"max_length": 44, "truncation_mode": "keep_end", "shuffle_dataset": True, "seed": 3},
        *({"max_length": 44, "packing": True, "packing_strategy": strategy} for strategy in STRATEGIES),
        {"max_length": 44, "packing": True, "shuffle_dataset": True, "seed": 3},
    ],
    ids=["long", "cut", "cut_end", *STRATEGIES, "shuffled"],
)
@pytest.mark.parametrize(
    ("form", "assistant"), [*((form, False) for form in FORMS), *((form, True) for form in sorted(MASKED))]
)
def test_rows_equal_trls(form, limits, assistant, streaming, tokenizer):
    dataset = Dataset.from_list(FORMS[form])
    dataset = dataset.to_iterable_dataset() if streaming else dataset
    assert_equal(dataset, tokenizer, assistant_only_loss=assistant, **limits)


@pytest.mark.parametrize("form", ["completion", "completion_chat", "ids_masks"])
def test_prompts_may_be_trained_on(form, tokenizer):
    assert_equal(Dataset.from_list(FORMS[form]), tokenizer, completion_only_loss=False)


def test_formatted_rows_equal_trls(tokenizer):
    rows = Dataset.from_list(preference_rows(9, "prompt")).rename_column("prompt", "asked")
    for dataset in (rows, rows.to_iterable_dataset()):
        assert_equal(dataset, tokenizer, formatting_func=_asked, max_length=12)


def _asked(row):
    return f"{row['asked']} -> {row['chosen']}"


@pytest.mark.parametrize("said", ["so because of that", "so"], ids=["makes a list of a row", "fails on a row"])
def test_functions_that_formatted_batches_still_do(said, tokenizer):
    """In earlier TRL, a formatting function returned a list for a dict of columns."""
    rows = [{"asked": f"why {i}", "said": said} for i in range(4)]

    def of_batch(batch):
        return [f"{batch['asked'][i]} -> {batch['said'][i]}" for i in range(len(batch["asked"]))]

    def twice(batch):
        return of_batch(batch) * 2

    found = ours(Dataset.from_list(rows), tokenizer, formatting_func=of_batch)
    wanted = tokenizer([f"{row['asked']} -> {row['said']}</s>" for row in rows])["input_ids"]
    assert [row["input_ids"] for row in found] == wanted
    error, text = (
        (IndexError, "out of range") if said == "so" else (ValueError, r"'formatting_func\(row\)': must be a string")
    )
    with pytest.raises(error, match=text):
        ours(Dataset.from_list(rows), tokenizer, formatting_func=twice)


def test_a_formatted_text_is_what_is_trained_on(tokenizer, caplog):
    """TRL writes it to the column "text", but reads another column, or the messages."""
    rows = [row | {"story": "another"} for row in talks(3)]
    wanted = tokenizer(["0</s>", "1</s>", "2</s>"])["input_ids"]
    options = {"formatting_func": lambda row: str(rows.index(row)), "dataset_text_field": "story"}
    assert [row["input_ids"] for row in ours(Dataset.from_list(rows), tokenizer, **options)] == wanted
    kept = ours(Dataset.from_list(tokenized(3)), tokenizer, **options)
    assert "`formatting_func` will be ignored" in caplog.text and kept[2]["input_ids"] == tokenized(3)[2]["input_ids"]


@usual("bfd_split-None")
@pytest.mark.parametrize("num_proc", [None, 2])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_blocks_of_rows_are_packed_apart(strategy, num_proc, tokenizer):
    lengths = np.random.default_rng(0).integers(1, 40, 2300)
    rows = [{"input_ids": list(range(n)), "labels": [-100] * (n // 2) + [7] * (n - n // 2)} for n in lengths]
    options = {"max_length": 44, "packing": True, "packing_strategy": strategy, "shuffle_dataset": True, "seed": 5}
    assert_equal(Dataset.from_list(rows), tokenizer, dataset_num_proc=num_proc, **options)


@pytest.mark.parametrize("form", ["text", "completion", "completion_chat", "messages", "ids_masks"])
def test_a_trainer_of_trl_makes_the_same_columns(form, tokenizer, tmp_path_factory):
    """Including the decisions of its constructor: completion-only loss if there are prompts."""
    trl = pytest.importorskip("trl")
    folder = tiny_model(tmp_path_factory.mktemp("model"), head="causal", tokenizer={"bos": "<s>"})
    from transformers import AutoModelForCausalLM

    args = trl.SFTConfig(str(folder / "out"), max_length=36, report_to="none", use_cpu=True, bf16=False)
    dataset = Dataset.from_list(FORMS[form])
    model = AutoModelForCausalLM.from_pretrained(folder)
    trainer = trl.SFTTrainer(model=model, args=args, train_dataset=dataset, processing_class=tokenizer)
    assert columns(ours(dataset, tokenizer, max_length=36)) == columns(trainer.train_dataset)


def test_packed_rows_are_not_packed_again(tokenizer):
    options = {"max_length": 44, "packing": True}
    packed = ours(Dataset.from_list(FORMS["text"]), tokenizer, **options)
    for again in (options, {"max_length": 44}, {"skip_prepare_dataset": True}):
        for dataset in (packed, packed.to_iterable_dataset()):
            assert columns(ours(dataset, tokenizer, **again)) == columns(packed)


def test_the_given_dataset_and_its_columns_stay(tokenizer):
    rows = [row | {"source": "web"} for row in FORMS["completion_chat"]]
    dataset = Dataset.from_list(rows)
    prepared = ours(dataset, tokenizer)
    assert dataset.to_list() == rows and prepared.remove_columns(["input_ids", "labels"]).to_list() == rows


def test_rows_without_a_target_are_counted(tokenizer, caplog):
    dataset = Dataset.from_list([{"prompt": words(30), "completion": "so"}, {"prompt": "a", "completion": "b"}])
    with caplog.at_level(logging.WARNING):
        assert len(ours(dataset, tokenizer, max_length=16)) == 1
    assert (
        "1 of 2 rows of train_dataset that have no token to train on: their labels are all -100 (first" in caplog.text
    )
    with caplog.at_level(logging.WARNING):
        assert len(list(ours(dataset.to_iterable_dataset(), tokenizer, max_length=16))) == 1
    assert "Row 0 of train_dataset has no token to train on and is dropped" in caplog.text


def test_unprepared_rows_get_their_ids_as_labels(tokenizer):
    rows = tokenized(4)
    for dataset in (Dataset.from_list(rows), Dataset.from_list(rows).to_iterable_dataset()):
        found = columns(ours(dataset, tokenizer, max_length=2, packing=True, skip_prepare_dataset=True))
        assert found == [row | {"labels": row["input_ids"]} for row in rows]


def test_conversations_as_parts_are_tokenized_together(monkeypatch):
    """Some of them begin with the BOS token."""
    counts, ids_of = [], PartsTokenizer.ids_of

    def counted(self, texts):
        counts.append(len(texts))
        return ids_of(self, texts)

    monkeypatch.setattr(PartsTokenizer, "ids_of", counted)
    made, rows = tiny_tokenizer(bos="<s>"), talks(9)
    made.chat_template = (
        "{% if messages | length > 2 %}<s>{% endif %}{% for m in messages %}"
        "{% for part in m['content'] %}{{ part['text'] }}{% endfor %} {% endfor %}"
    )
    found = prepare(Dataset.from_list(rows), PartsTokenizer(made), max_length=None, num_proc=None, name="train_dataset")
    texts = [" ".join([*(message["content"] for message in row["messages"]), ""]) for row in rows]
    assert list(found["input_ids"]) == made(text=texts)["input_ids"] and counts == [9]
