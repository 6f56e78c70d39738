"""Rows and templates that are too expensive, or that print control characters: errors name the row."""

from __future__ import annotations

import itertools
import re

import pytest
from datasets import Dataset, IterableDataset
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers

from compat_tests.effort import drawn
from compat_tests.tiny import preference_rows, tiny_tokenizer
from trl_jax.core.text import printable
from trl_jax.data import tokenize
from trl_jax.data.reward import prepare

CHAT = [{"role": "user", "content": "hi"}]
GOOD = {"chosen": "a", "rejected": "b"}


def table(rows):
    return Dataset.from_list(rows)


def stream(rows):
    return IterableDataset.from_generator(lambda: iter(rows))


both = pytest.mark.parametrize("form", [table, stream])


def ready(dataset, tokenizer=None, max_length=None):
    tokenizer = tiny_tokenizer() if tokenizer is None else tokenizer
    return prepare(dataset, tokenizer, max_length=max_length, num_proc=None, name="train")


# ---- streams whose rows are all removed ----


def lengths(*each):
    """A stream of pairs with these numbers of tokens."""
    return stream([{"chosen_ids": [5] * length, "rejected_ids": [6]} for length in each])


def test_a_stream_without_end_of_which_max_length_removes_every_row(monkeypatch, caplog):
    monkeypatch.setattr(tokenize, "MAX_REMOVED", 1_200)

    def rows():
        return ({"chosen_ids": [5] * (9 + i % 3), "rejected_ids": [6]} for i in itertools.count())

    text = (
        "max_length=4 removed 1,200 consecutive rows of train_dataset, up to row 1199; the shortest of these has "
        "9 tokens. Raise max_length, pass max_length=None, or filter such rows out of the stream"
    )
    with pytest.raises(ValueError, match=re.escape(text)):
        next(iter(ready(IterableDataset.from_generator(rows), max_length=4)))
    assert caplog.messages[1:] == [
        "max_length=4 removed 1,000 consecutive rows of train_dataset, up to row 999; the shortest of these has "
        "9 tokens. Training stops after 1,200 such rows."
    ]


def test_rows_are_counted_from_the_last_that_was_kept(monkeypatch):
    monkeypatch.setattr(tokenize, "MAX_REMOVED", 4)
    assert len(list(ready(lengths(9, 9, 9, 2, 9, 9, 9, 2, 9), max_length=4))) == 2
    with pytest.raises(ValueError, match="removed 4 consecutive rows of train_dataset, up to row 5; .* has 7 tokens"):
        list(ready(lengths(5, 2, 9, 8, 7, 9, 2), max_length=4))


# ---- control characters ----


def test_control_characters_of_a_template_are_not_printed():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('\x1b[2Jgone\x9b31m\x07\u202e ' ~ messages[0].content) }}"
    row = {"chosen": [{"role": "user", "content": "line\n\x1b]0;title\x07é漢🙂"}], "rejected": CHAT}
    with pytest.raises(Exception, match="gone") as caught:
        list(ready(stream([row]), tokenizer))
    assert str(caught.value) == r"\x1b[2Jgone\x9b31m\x07\u202e line" + "\n" + r"\x1b]0;title\x07é漢🙂"
    assert caught.value.__notes__ == ["Row 0 of train_dataset: raised by the tokenizer's chat template."]


def test_nor_are_those_of_values_that_no_column_can_hold():
    row = {"chosen_ids": [5, "\x1b[2J"], "rejected_ids": [6]}
    with pytest.raises(ValueError, match="Row 0 of train_dataset, columns") as caught:
        list(ready(stream([row])))
    assert printable(str(caught.value)) == str(caught.value)


@pytest.mark.parametrize(
    ("text", "shown"),
    [("a\tb\nc", "a\tb\nc"), ("\x00\r\x7f", r"\x00\r\x7f"), ("\u200b\ud800", r"\u200b\ud800"), ("\xa0é", "\xa0é")],
)
def test_what_an_error_may_show(text, shown):
    assert printable(text) == shown


def test_half_a_character_names_its_row_and_column():
    half = "good \ud83d"
    text = (
        r"column 'rejected': found a lone surrogate at character 5, at the end of 'good \ud83d', which is not valid U"
    )
    with pytest.raises(ValueError, match=re.escape(f"Row 1 of train_dataset, {text}")):
        list(ready(stream([GOOD, {"chosen": "a", "rejected": half}])))
    messages = [{"role": "user", "content": half}]
    with pytest.raises(ValueError, match=re.escape(f"Row 0 of train_dataset, {text}")):
        list(ready(stream([{"chosen": CHAT, "rejected": messages}]), tiny_tokenizer(chat_template=True)))


# ---- overlong texts ----


def long_text(characters):
    return "bread soup garden " * (characters // 18)


class Counting:
    """Counts the characters passed to a tokenizer."""

    def __init__(self, monkeypatch, tokenizer):
        self.seen, call = 0, type(tokenizer).__call__

        def counted(own, text, **how):
            self.seen += sum(map(len, text)) if isinstance(text, list) else len(text)
            return call(own, text, **how)

        monkeypatch.setattr(type(tokenizer), "__call__", counted)


@both
@pytest.mark.parametrize("kind", ["text", "prompt", "chat"])
def test_of_a_text_that_is_certainly_too_long_the_beginning_is_tokenized(form, kind, monkeypatch):
    tokenizer = tiny_tokenizer(chat_template=True)
    rows = preference_rows(6, "chat" if kind == "chat" else kind)
    wanted = list(ready(form(rows), tokenizer, max_length=60))
    text = long_text(10**6)
    long = dict(rows[0])
    if kind == "prompt":
        long["prompt"] = text
    else:
        long["chosen"] = text if kind == "text" else [*rows[0]["chosen"], {"role": "user", "content": text}]
    counting = Counting(monkeypatch, tokenizer)
    found = list(ready(form([*rows[:3], long, *rows[3:]]), tokenizer, max_length=60))
    assert found == wanted and counting.seen < 20_000


@both
def test_without_max_length_all_of_it_is_tokenized(form):
    text = long_text(50_000)
    [row] = ready(form([{"chosen": text, "rejected": "b"}]))
    assert row["chosen_ids"] == tiny_tokenizer()(text + "</s>")["input_ids"]
    assert len(list(ready(form([{"chosen": text, "rejected": "b"}]), max_length=len(row["chosen_ids"])))) == 1


def test_lengths_of_texts_that_were_cut_are_told_as_what_they_are(caplog):
    rows = [{"chosen": long_text(10_000), "rejected": "b"}, {"chosen": long_text(10_000), "rejected": "b"}]
    text = r"max_length=5 removes all 2 rows .*: the shortest pair has at least \d+ tokens"
    with pytest.raises(ValueError, match=text):
        ready(table(rows), max_length=5)
    assert list(ready(stream(rows), max_length=5)) == []
    assert re.fullmatch(r"max_length=5 removes row 0 of train_dataset \(at least \d+ tokens\); .*", caplog.messages[-1])


def test_two_texts_with_one_beginning_are_not_told_to_be_the_same(caplog):
    text = long_text(10_000)
    list(ready(stream([{"chosen": text + "a", "rejected": text + "b"}, GOOD]), max_length=5))
    ready(table([{"chosen": text + "a", "rejected": text + "b"}, GOOD]), max_length=5)
    assert not [message for message in caplog.messages if "identical" in message]


def _with(change):
    tokenizer = tiny_tokenizer()
    change(tokenizer)
    return tokenizer


UNSURE = {
    "drops_spaces": lambda t: setattr(t.backend_tokenizer, "normalizer", normalizers.Strip()),
    "drops_marks": lambda t: setattr(t.backend_tokenizer, "normalizer", normalizers.NFKC()),
    "drops_between": lambda t: setattr(t.backend_tokenizer, "pre_tokenizer", pre_tokenizers.Whitespace()),
    "drops_pieces": lambda t: setattr(
        t.backend_tokenizer,
        "pre_tokenizer",
        pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel()]),
    ),
    "takes_spaces": lambda t: t.add_tokens([AddedToken("<x>", lstrip=True)]),
    "unigram": lambda t: setattr(t.backend_tokenizer, "model", models.Unigram([("a", 0.0)])),
    "other_bytes": lambda t: setattr(t.backend_tokenizer, "model", models.BPE({"a": 0}, [])),
}


@pytest.mark.parametrize("kind", UNSURE)
def test_where_a_long_text_may_have_few_tokens_nothing_is_cut(kind):
    assert tokenize.character_bound(_with(UNSURE[kind]), 10) is None


@settings(deadline=None, max_examples=drawn(60))
@given(
    st.text(st.sampled_from(" ae\u0301\u0344\u1f82漢🙂\n</s>bread"), min_size=1, max_size=400),
    st.sampled_from([None, normalizers.NFC()]),
)
def test_no_text_has_fewer_tokens_than_that(text, normalizer):
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizer
    tokens = len(tokenizer(text)["input_ids"])
    assert len(text) <= tokenize.character_bound(tokenizer, tokens)
