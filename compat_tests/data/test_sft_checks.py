"""Datasets and options that SFT does not support: errors name the option or the row, and the way out."""

from __future__ import annotations

import logging
import re
from functools import partial

import pytest
from datasets import Dataset, disable_caching, enable_caching

from compat_tests.tiny import tiny_tokenizer
from trl_jax.data.sft import prepare

ASK, ANSWER = [{"role": "user", "content": "why"}], [{"role": "assistant", "content": "because"}]
TEXT, TALK = {"text": "gladly"}, {"messages": ASK + ANSWER}
PAIR, IDS = {"prompt": "why", "completion": " because"}, {"input_ids": [5, 6, 7]}
MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)


@pytest.fixture(autouse=True)
def _no_cache():
    disable_caching()
    yield
    enable_caching()


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer(chat_template=True)


def only(row):
    return row["text"]


def number(row):
    return 3


def prepared(rows, tokenizer, streaming=False, **options):
    dataset = Dataset.from_list(rows)
    dataset = dataset.to_iterable_dataset() if streaming else dataset
    name = options.pop("name", "train")
    found = prepare(dataset, tokenizer, **{"max_length": 16, "num_proc": None, "name": name} | options)
    return list(found) if streaming else found


REFUSED = {
    "a prompt beside messages": (
        [{"prompt": "a", "prompt_id": "b", "messages": [{"role": "user", "content": "a"}]}], {},
        "train_dataset has the columns 'prompt' and 'messages', but no 'completion', which 'prompt' goes with, as in "
        "TRL. To train on 'messages', call dataset.remove_columns('prompt') first.",
    ),
    "no text": ([{"story": "a"}], {}, "train_dataset must have one of: 'text' (dataset_text_field) with a text; 'mess"),
    "another field": ([TEXT], {"dataset_text_field": "story"}, "must have one of: 'story' (dataset_text_field)"),
    "prompts alone": ([{"prompt": "why"}], {}, "'prompt' and 'completion'; 'conversations' whose messages have 'from"),
    "no roles": ([{"messages": [{"content": "a"}]}], {}, "with a 'role' and a 'content'; 'prompt'"),
    "images": ([TEXT | {"image": "a"}], {}, "The dataset appears to be vision-related (contains 'image' or 'images' k"),
    "formatted": ([PAIR], {"formatting_func": only}, "function was provided while `completion_only_loss=True`, which "),
    "formatted too": (
        [TEXT], {"formatting_func": only, "completion_only_loss": True}, "provided while `completion_only_loss=True`"
    ),
    "formatted to": ([TEXT], {"formatting_func": number}, "'formatting_func(row)': must be a string, got 3 (int)."),
    "assistants": (
        [TEXT], {"assistant_only_loss": True},
        "You set `assistant_only_loss=True`, but the dataset is not conversational. This option is only supported for",
    ),
    "completions": (
        [TEXT], {"completion_only_loss": True}, "completion_only_loss=True requires rows with 'prompt' and 'completion'"
    ),
    "completions of talks": ([TALK], {"completion_only_loss": True}, "use assistant_only_loss=True"),
    "completions of ids": ([IDS], {"completion_only_loss": True}, "or with 'input_ids' and 'completion_mask' or 'labe"),
    "packing": ([TEXT], {"packing": True, "max_length": None}, "When packing is enabled, `max_length` can't be `None`"),
    "strategy": ([TEXT], {"packing": True, "packing_strategy": "best"}, "packing_strategy must be one of bfd, "),
    "truncation": (
        [TEXT], {"truncation_mode": "middle"}, "Unsupported truncation mode: middle, expected 'keep_start' or 'keep_end"
    ),
    "masks": (
        [IDS | {"completion_mask": [0, 1, 1]}], {"skip_prepare_dataset": True},
        "The train dataset has mask columns but no 'labels', and `skip_prepare_dataset=True` skips label building"
        ", so it would train on the full sequence. Add a 'labels' column (-100 for non-loss tokens) or drop",
    ),
    "nothing": (
        [TEXT], {"skip_prepare_dataset": True}, "train_dataset must have the column 'input_ids', got ['text']. Tokenize"
    ),
    "number": ([{"text": 3}], {}, "Row 0 of train_dataset, column 'text': must be a string, got 3 (int)"),
    "none": ([TEXT, {"text": None}], {}, "Row 1 of train_dataset, column 'text': must be a string, got None"),
    "surrogate": ([{"prompt": "a", "completion": "a"}, PAIR | {"prompt": None}], {}, "Row 1 of train_dataset, column "),
    "no messages": (
        [TALK, {"messages": []}], {},
        "Row 1 of train_dataset, column 'messages': must be a non-empty list of messages, each with a 'role', got []",
    ),
    "no completion": ([{"prompt": ASK, "completion": ANSWER}, {"prompt": ASK, "completion": []}], {}, "'completion': "),
    "tools": ([TALK | {"tools": "{"}], {}, "column 'tools': must be a list, or a list in JSON, got '{' (str)"),
    "kwargs": (
        [TALK | {"chat_template_kwargs": "a"}], {}, "column 'chat_template_kwargs': must be a dict, got 'a' (str)"
    ),
    "mixed": ([{"prompt": "a", "completion": ANSWER}], {}, "'prompt' is text, 'completion' is a conversation; all mus"),
    "words": ([{"input_ids": ["a"]}], {}, "Row 0 of train_dataset, column 'input_ids': must be a list of ints"),
    "empty ids": (
        [IDS, {"input_ids": []}], {},
        "Row 1 of train_dataset, column 'input_ids': must be a list of at least one token id, got [] (list)",
    ),
    "fewer labels": (
        [IDS | {"labels": [5, 6, 7]}, IDS | {"labels": [5]}], {},
        "Row 1 of train_dataset, column 'labels': must have 3 values, one per token of 'input_ids'",
    ),
    "fewer marks": (
        [IDS | {"completion_mask": [0, 1]}], {"completion_only_loss": True},
        "column 'completion_mask': must have 3 values, one for each token of 'input_ids', got 2.",
    ),
    "other marks": (
        [IDS | {"assistant_masks": [0, 1, 2]}], {},
        "column 'assistant_masks': must be a list of 0 and 1, one for each token of 'input_ids', got 2 (int)",
    ),
    "documents": (
        [IDS | {"seq_lengths": [1, 1]}], {}, "'seq_lengths': must be the number of tokens of each"
    ),
    "long packed": ([IDS | {"seq_lengths": [1, 2]}], {"max_length": 2}, "is already packed (it has 'seq_lengths') and"),
    "masked": (
        [{"prompt": "gladly first " * 9, "completion": "b"}], {},
        "have no token to train on: their labels are all -100. If prompts fill max_length, raise it or pass trunca",
    ),
}  # fmt: skip


@pytest.mark.parametrize("streaming", [False, True], ids=["table", "stream"])
@pytest.mark.parametrize("case", REFUSED)
def test_the_mistake_is_named(case, streaming, tokenizer):
    rows, options, text = REFUSED[case]
    if streaming and case == "masked":
        assert prepared(rows, tokenizer, streaming, **options) == []  # the next row might have a target
        return
    with pytest.raises((ValueError, TypeError), match=re.escape(text)):
        prepared(rows, tokenizer, streaming, **options)


def test_prompts_of_two_kinds(tokenizer):
    """A table's column cannot mix the two, but a stream can."""
    from datasets import IterableDataset

    rows = [PAIR, {"prompt": ASK, "completion": ANSWER}]
    stream = IterableDataset.from_generator(lambda: iter(rows))
    with pytest.raises(ValueError, match="Row 1 of train_dataset is a conversation, but the first row is text"):
        list(prepare(stream, tokenizer, max_length=9, num_proc=None, name="train"))


def test_a_transform_is_refused_in_trls_words(tokenizer):
    dataset = Dataset.from_list([TEXT]).with_transform(lambda batch: batch)
    with pytest.raises(ValueError, match=r"Dataset\.with_transform\(\).*skip_prepare_dataset.*trainer-ready"):
        prepare(dataset, tokenizer, max_length=9, num_proc=None, name="train")


def test_templates_and_assistants(tokenizer, caplog):
    talk = partial(prepared, [TALK], assistant_only_loss=True)
    bare, marked = tiny_tokenizer(), tiny_tokenizer()
    with pytest.raises(ValueError, match="Row 0 of train_dataset is a conversation, but the tokenizer .* no chat temp"):
        talk(bare)
    marked.chat_template = MARKED
    assert talk(marked)[0]["labels"][0] == -100
    with pytest.raises(RuntimeError, match="assistant_only_loss=True`, but at least one example has no assistant toke"):
        prepared([{"messages": ASK}], marked, assistant_only_loss=True)
    caplog.clear()
    marked.chat_template = MARKED.replace("{{ eos_token }}", "")
    talk(marked)
    assert "does not include the assistant turn's end-of-turn token in the loss mask" in caplog.text
    marked.chat_template = "{{ messages | tojson }}"
    with pytest.raises(ValueError, match="The chat template is not training-compatible"):
        talk(marked)


def test_a_column_of_labels_beside_texts_is_not_read(tokenizer, caplog):
    with caplog.at_level(logging.WARNING):
        found = prepared([TEXT | {"labels": 1}], tokenizer)
    assert found[0]["labels"] == found[0]["input_ids"] and "the column 'labels' is ignored" in caplog.text


def test_a_prompt_that_is_no_prefix_is_warned_of(tokenizer, caplog):
    from trl_jax.data import sft as sft_rows

    sft_rows.warn_of_prefix.cache_clear()
    prepared([{"prompt": "gla", "completion": "dly"}] * 2, tokenizer)
    assert caplog.text.count("The tokenized prompt is not a prefix of the tokenized prompt+completion") == 1


def test_eval_sets_are_named(tokenizer):
    with pytest.raises(ValueError, match=r"eval_dataset\['a'\] must have one of"):
        prepared([{"story": "a"}], tokenizer, name="eval_dataset['a']")
