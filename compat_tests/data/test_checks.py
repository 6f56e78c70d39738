"""Rows that cannot be trained on are refused; errors name the argument, the row, the column, and the way out."""

from __future__ import annotations

import re

import numpy as np
import pytest
from datasets import Dataset, DatasetDict, Features, IterableDataset, List, Value

from compat_tests.tiny import preference_rows, tiny_tokenizer
from trl_jax.data import checks, reward
from trl_jax.data.reward import prepare

CHAT = [{"role": "user", "content": "hi"}]
GOOD = {"chosen": "a", "rejected": "b"}
IDS = {"chosen_ids": [5, 6], "rejected_ids": [7]}
NUMBER = "must be a finite number in every row (or drop the column)"
IDS_WANTED = "must be a list of at least one token id"
TEXT_OR_MESSAGES = "a string, or a non-empty list of messages, each with a 'role' and a 'content'"


def ready(dataset, tokenizer=None, max_length=None, name="train", num_proc=None):
    tokenizer = tiny_tokenizer(chat_template=True) if tokenizer is None else tokenizer
    return list(prepare(dataset, tokenizer, max_length=max_length, num_proc=num_proc, name=name))


def table(rows):
    return Dataset.from_list(rows)


def stream(rows):
    return IterableDataset.from_generator(lambda: iter(rows))


def refuses(dataset, text, **asked):
    with pytest.raises(ValueError, match=re.escape(text)):
        ready(dataset, **asked)


both = pytest.mark.parametrize("form", [table, stream])


@pytest.mark.parametrize(
    ("name", "text"),
    [("train", "train_dataset"), ("eval", "eval_dataset"), ("test", "test_dataset")]
    + [(f"eval_dataset[{key!r}]", f"eval_dataset[{key!r}]") for key in ("code", "train", "eval", "test")],
)
def test_an_empty_dataset(name, text):
    refuses(Dataset.from_list([]), f"{text} is empty", name=name)
    refuses(Dataset.from_dict({"chosen": [], "rejected": []}), f"{text} is empty", name=name)
    refuses(IterableDataset.from_generator(lambda: iter(())), f"{text} is empty", name=name)


def test_max_length_that_removes_every_row():
    dataset = table([{"chosen_ids": [1] * 90, "rejected_ids": [2]}, {"chosen_ids": [1], "rejected_ids": [2] * 81}])
    refuses(
        dataset,
        "max_length=64 removes all 2 rows of train_dataset: the shortest pair has 81 tokens. "
        "Raise max_length or pass max_length=None.",
        max_length=64,
    )


@both
@pytest.mark.parametrize(
    ("row", "column"),
    [
        ({"chosen": None, "rejected": "b"}, "chosen"),
        ({"chosen": "a", "rejected": None}, "rejected"),
        ({"chosen": "a", "rejected": None, "prompt": "p"}, "rejected"),
        ({"chosen": "a", "rejected": "b", "prompt": None}, "prompt"),
    ],
)
def test_text_that_is_none(form, row, column):
    good = GOOD | {key: "p" for key in row if key == "prompt"}
    text = f"Row 2 of train_dataset, column '{column}': must be {TEXT_OR_MESSAGES}, got None."
    refuses(form([good, good, row]), text)


@both
def test_what_is_neither_text_nor_messages(form):
    refuses(
        form([{"chosen": 5, "rejected": 6}]),
        f"Row 0 of train_dataset, column 'chosen': must be {TEXT_OR_MESSAGES}, got 5 (int).",
    )
    refuses(
        form([{"chosen": CHAT, "rejected": []}]),
        f"column 'rejected': must be {TEXT_OR_MESSAGES}, got [] (list).",
    )
    unknown = [{"from": "human", "value": "hi"}]
    refuses(form([{"chosen": unknown, "rejected": unknown}]), "each with a 'role' and a 'content'")


@both
def test_text_and_conversation_in_one_row(form):
    row = {"prompt": "hi", "chosen": CHAT, "rejected": CHAT}
    text = "Row 0 of train_dataset: 'prompt' is text, 'chosen' is a conversation, 'rejected' is a conversation"
    refuses(form([row]), text)
    refuses(form([row]), 'dataset.remove_columns("prompt")')


def test_rows_are_counted_across_processes():
    rows = preference_rows(7) + [{"chosen": None, "rejected": "b"}]
    refuses(table(rows), "Row 7 of train_dataset, column 'chosen': must be a string", num_proc=2)


@both
def test_missing_columns(form):
    refuses(
        form([{"prompt": "a", "chosen": "b"}]),
        "train_dataset must have the columns 'chosen' and 'rejected', or 'chosen_ids' and 'rejected_ids', or "
        "'chosen_input_ids' and 'rejected_input_ids', or 'input_ids_chosen' and 'input_ids_rejected', "
        "got ['prompt', 'chosen']. Rename columns with dataset.rename_column.",
    )


def test_a_stream_that_loses_a_column():
    refuses(stream([GOOD, {"chosen": "a"}]), "Row 1 of train_dataset lacks the columns ['rejected']")


@both
@pytest.mark.parametrize("margin", [None, float("nan"), float("inf"), -float("inf"), 1e39])
def test_margins_that_are_no_numbers(form, margin):
    text = f"Row 1 of train_dataset, column 'margin': {NUMBER}, got {margin!r}"
    refuses(form([GOOD | {"margin": 1.0}, GOOD | {"margin": margin}]), text)
    refuses(
        form([IDS | {"margin": 1.0}, IDS | {"margin": margin}]),
        "must be a finite number in every row (or drop the column)",
    )


@both
@pytest.mark.parametrize("margin", ["1.5", [1.0], None])
def test_margins_of_another_type(form, margin):
    refuses(form([GOOD | {"margin": margin}]), f"Row 0 of train_dataset, column 'margin': {NUMBER}, got {margin!r}")


def test_a_margin_in_some_rows_only():
    refuses(table([GOOD | {"margin": 1.0}, GOOD]), "Row 1 of train_dataset, column 'margin': must be a finite number")
    refuses(stream([GOOD | {"margin": 1.0}, GOOD]), "Row 1 of train_dataset lacks the columns ['margin']")
    refuses(
        stream([GOOD, GOOD | {"margin": 1.0}]),
        "Row 1 of train_dataset has a margin, but the first row has none",
    )


@both
@pytest.mark.parametrize("margin", [2, 0.5, True])
def test_margins_that_are_numbers(form, margin):
    assert [row["margin"] for row in ready(form([GOOD | {"margin": margin}]))] == [margin]


@both
@pytest.mark.parametrize("column", reward.IDS)
def test_rows_without_ids(form, column):
    for found in ([], None):
        rows = [IDS, IDS, IDS | {column: found}]
        refuses(form(rows), f"Row 2 of train_dataset, column '{column}': {IDS_WANTED}, got {found}")
        refuses(form(rows), "must be a list of at least one token id")


@both
def test_ids_that_are_no_ints(form):
    where = "Row 0 of train_dataset, column 'chosen_ids': must be a list of "
    refuses(form([IDS | {"chosen_ids": "abc"}]), where + "at least one token id, got 'abc' (str)")
    refuses(form([IDS | {"chosen_ids": [1.5, 2.0]}]), where + "ints, got 1.5 (float)")
    refuses(form([IDS | {"chosen_ids": [3, None]}]), where + "ints, got None")
    refuses(form([IDS | {"chosen_ids": [[3], [4]]}]), where + "ints, got [3] (list)")


def test_a_stream_row_that_no_column_can_hold():
    refuses(
        stream([IDS, IDS | {"rejected_ids": [1, "a"]}]),
        "Row 1 of train_dataset, columns ['chosen_ids', 'rejected_ids']",
    )


def test_a_template_that_renders_nothing():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ '' }}"
    text = "Row 0 of train_dataset, column 'chosen_ids': must be a list of at least one token id, got [] (list)"
    refuses(table([{"chosen": CHAT, "rejected": CHAT}]), text, tokenizer=tokenizer)


@both
def test_a_conversation_without_a_chat_template(form):
    text = "Row 0 of train_dataset is a conversation, but the tokenizer (TokenizersBackend) has no chat template"
    tokenizer = tiny_tokenizer()
    text = text.replace("TokenizersBackend", type(tokenizer).__name__)
    dataset = form([{"chosen": CHAT, "rejected": CHAT}])
    refuses(dataset, text, tokenizer=tokenizer)
    refuses(dataset, 'with chat_template_path="template.jinja"', tokenizer=tokenizer)


@both
def test_an_error_of_the_template_names_its_row(form):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% if messages|length > 1 %}{{ raise_exception('one only') }}{% endif %}hi"
    rows = [{"chosen": CHAT, "rejected": CHAT}, {"chosen": CHAT, "rejected": CHAT * 2}]
    with pytest.raises(Exception, match="one only") as caught:
        ready(form(rows), tokenizer)
    assert caught.value.__notes__ == ["Row 1 of train_dataset: raised by the tokenizer's chat template."]


@both
def test_text_without_an_eos_token(form):
    refuses(
        form([GOOD]),
        "has none. Pass a token of its vocabulary as eos_token=... in the trainer",
        tokenizer=tiny_tokenizer(eos=None),
    )
    tokenizer = tiny_tokenizer(eos=None, chat_template=True)
    assert ready(form([{"chosen": CHAT, "rejected": CHAT}]), tokenizer)


@both
def test_tools_and_template_options_of_the_wrong_kind(form):
    row = {"chosen": CHAT, "rejected": CHAT}
    refuses(
        form([row | {"tools": "[{"}]),
        "Row 0 of train_dataset, column 'tools': must be a list, or a list in JSON, got '[{' (str)",
    )
    refuses(
        form([row | {"chat_template_kwargs": "x"}]),
        "column 'chat_template_kwargs': must be a dict, got 'x' (str)",
    )


@pytest.mark.parametrize(
    ("dataset", "found", "fix"),
    [
        (
            DatasetDict(train=table([GOOD]), test=table([GOOD])),
            "DatasetDict with splits ['train', 'test']",
            'dataset["train"]',
        ),
        ([GOOD], "list", "datasets.Dataset.from_list(rows)"),
        ({"chosen": ["a"]}, "dict", "datasets.Dataset.from_dict(columns)"),
        (table([GOOD]).to_pandas(), "DataFrame", "datasets.Dataset.from_pandas(frame)"),
        (np.zeros(3), "ndarray", "see datasets.Dataset.from_list"),
        (None, "NoneType", "see datasets.Dataset.from_list"),
    ],
)
def test_what_is_no_dataset(dataset, found, fix):
    text = f"train_dataset must be a Dataset or IterableDataset, got a {found}: "
    with pytest.raises(TypeError, match=re.escape(text) + ".*" + re.escape(fix)):
        ready(dataset)


def test_a_torch_subset():
    data = pytest.importorskip("torch.utils.data")
    with pytest.raises(TypeError, match=r"got a Subset: select the rows with dataset.select\(indices\)"):
        ready(data.Subset(table([GOOD]), [0]))


def test_a_transform_is_refused():
    refuses(table([GOOD]).with_transform(lambda batch: batch), "train_dataset has a transform")


def test_empty_text_is_warned_of_once_with_its_count(caplog):
    ready(table([GOOD, {"chosen": "", "rejected": "b"}, GOOD, {"chosen": "a", "rejected": ""}]))
    text = "2 of 4 rows of train_dataset have an empty chosen or rejected text (first: row 1)"
    assert caplog.messages == [text]


def test_equal_pairs_are_warned_of_once_with_their_count(caplog):
    same = {"chosen_ids": [5, 6], "rejected_ids": [5, 6]}
    close = {"chosen_ids": [5, 6], "rejected_ids": [5, 7]}
    ready(table([close, same, close, same, IDS, same]))
    text = "3 of 6 rows of train_dataset have identical chosen and rejected tokens: no preference (first: row 1)"
    assert caplog.messages == [text]


def test_a_stream_warns_of_its_first_empty_text_and_equal_pair(caplog):
    ready(stream([GOOD, {"chosen": "", "rejected": "b"}, {"chosen": "a", "rejected": "a"}] * 3))
    assert caplog.messages == [
        "Row 1 of train_dataset has an empty chosen or rejected text; further rows like it are not reported.",
        "Row 2 of train_dataset has identical chosen and rejected tokens: no preference; "
        "further rows like it are not reported.",
    ]


@pytest.mark.parametrize("column", reward.IDS)
@pytest.mark.parametrize("token", [-1, 32, 10**9])
@both
def test_token_ids_outside_the_vocabulary(form, column, token):
    dataset = form([IDS | {"chosen_ids": [0, 31]}] * 1500 + [IDS | {column: [3, token, 4]}])
    text = (
        f"Row 1500 of the prepared train_dataset, column '{column}': token id {token} is outside the model's "
        "vocabulary (vocab_size=32). Pass the model's own tokenizer, or resize the model's embeddings."
    )
    with pytest.raises(ValueError, match=re.escape(text)):
        list(checks.check_token_ids(dataset, reward.IDS, 32, "train"))


@both
def test_token_ids_inside_the_vocabulary_pass(form):
    rows = [IDS, {"chosen_ids": [0, 31], "rejected_ids": [31]}]
    assert list(checks.check_token_ids(form(rows), reward.IDS, 32, "train")) == rows


@both
@pytest.mark.parametrize("columns", [("prompt",), ("prompt", "chosen_ids", "rejected_ids")])
def test_token_ids_of_those_columns_alone_that_are_read(form, columns):
    """Whichever and however many columns there are, also for texts longer than the model's positions."""
    rows = [IDS | {"prompt": [1, 2, 3], "other": [99]}]
    assert list(checks.check_token_ids(form(rows), columns, 8, "train", 3)) == rows
    with pytest.raises(ValueError, match="column 'prompt': token id 3 is outside the model's vocabulary"):
        list(checks.check_token_ids(form(rows), columns, 3, "train"))
    with pytest.raises(ValueError, match="column 'prompt': has 3 tokens, but the model has positions for 2. Pass max_"):
        list(checks.check_token_ids(form(rows), columns, 8, "train", 2))


def test_lists_of_every_arrow_kind():
    rows = [{"chosen_ids": [5, 6], "rejected_ids": [7, 8]}] * 3
    for kind in (List(Value("int32")), List(Value("uint16"), length=2)):
        dataset = Dataset.from_list(rows, features=Features({"chosen_ids": kind, "rejected_ids": kind}))
        assert ready(dataset) == rows
        refuses(dataset, "max_length=1 removes all 3 rows", max_length=1)


def test_rows_in_another_order_without_columns_of_tokens():
    """Such as shuffled prompts, or those from train_test_split: datasets cannot index a table that has no columns."""
    rows = Dataset.from_dict({"prompt": list("abcdef")}).train_test_split(2, seed=1)["train"]
    assert checks.check_token_ids(rows, (), 10, "train") is rows and not list(checks.blocks(rows, ()))
