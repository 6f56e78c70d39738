"""Prompts of online trainers: all rows are checked before the first step, and each is rendered within limits."""

from __future__ import annotations

import ast
import time
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pytest
from datasets import Dataset, IterableDataset

import trl_jax
from compat_tests.tiny import tiny_tokenizer
from trl_jax.data import chat_templates, prompts

TALK = [{"role": "user", "content": "hi"}]
CALL = [{"id": "1", "function": {"name": "look"}}]
CALLED = [*TALK, {"role": "assistant", "content": None, "tool_calls": CALL}, {"role": "tool", "content": "seen"}]
TEXTS = {
    "none": (None, "must be a string, or messages such as"),
    "empty": ("", "has an empty prompt. A completion needs at least one token"),
}
TALKS = {
    "none": (None, "must be a string, or messages such as"),
    "empty": ([], r"must be a string, or messages such as"),
    "no message": ([*TALK, None], "must be messages, each a dict with role and content"),
    "no role": ([*TALK, {"role": None, "content": "a"}], "must be messages, each a dict with role and content"),
    "no content": ([*TALK, {"role": "user", "content": None}], r"must be a message with content \('' if it is empty\)"),
    "no calls": ([{"role": "user", "content": None, "tool_calls": []}], "must be a message with content"),
}
HALVES = (("a\ud800", "found a lone surrogate"), ([{"role": "user", "content": "\udfff"}], "found a lone surrogate"))
CASES = [("good", *case) for case in TEXTS.values()] + [(TALK, *case) for case in TALKS.values()]


def table(values):
    return Dataset.from_list([{"prompt": value, "number": number} for number, value in enumerate(values)])


def stream(values):
    return IterableDataset.from_generator(lambda: ({"prompt": value} for value in values))


def checked(dataset, name="train", **tokenizer):
    tokenizer = tiny_tokenizer(**tokenizer)
    found = prompts.check_prompts(dataset, name, tokenizer)
    assert found is dataset
    if isinstance(found, Dataset):
        return found
    return prompts.checked_stream(found, name, tokenizer, images=False)


@pytest.mark.parametrize(("good", "bad", "text"), CASES)
@pytest.mark.parametrize("place", [1, 2500])
def test_a_later_row_is_named_before_the_first_step(good, bad, text, place):
    values = [good] * 2600
    values[place] = bad
    with pytest.raises(ValueError, match=f"^Row {place} of train_dataset.*{text}"):
        checked(table(values))
    assert checked(table(values[:place])).num_rows == place
    picked = table(values).select(range(place, len(values)))  # indices are relative to the dataset that is passed
    with pytest.raises(ValueError, match=f"^Row 0 of eval_dataset.*{text}"):
        checked(picked, "eval")


@pytest.mark.parametrize(("good", "bad", "text"), CASES + [("good", *case) for case in HALVES])
def test_rows_of_a_stream_are_named_when_they_come(good, bad, text):
    found = checked(stream([good] * 3 + [bad, good]))
    assert [row["prompt"] for row in islice(found, 3)] == [good] * 3
    with pytest.raises(ValueError, match=f"^Row 3 of train_dataset.*{text}"):
        list(found)
    with pytest.raises(ValueError, match=f"^Row 0 of train_dataset.*{text}"):
        checked(stream([bad]))


def test_rows_of_a_stream_without_a_prompt():
    found = checked(IterableDataset.from_generator(lambda: iter([{"prompt": "a"}, {"text": "b"}])))
    with pytest.raises(ValueError, match=r"Row 1 of train_dataset lacks the columns \['prompt'\]"):
        list(found)


def test_right_prompts_stay_as_they_are():
    for values in (["a", "b"], [TALK, CALLED], [[{"role": "user", "content": ""}], TALK]):
        dataset = table(values)
        assert checked(dataset) is dataset
        streamed = checked(dataset.to_iterable_dataset())
        assert list(streamed) == list(dataset) and streamed.features == dataset.features
    assert checked(table(["a", ""]), bos="<s>").num_rows == 2  # the BOS alone is a token
    parts = [[{"role": "user", "content": [{"type": "text", "text": "a"}]}], TALK]
    mixed = Dataset.from_list([{"prompt": talk} for talk in parts], on_mixed_types="use_json")
    assert checked(mixed) is mixed
    parts[1] = [{"role": "user", "content": None}]
    with pytest.raises(ValueError, match="^Row 1 of train_dataset.*must be a message with content"):
        checked(Dataset.from_list([{"prompt": talk} for talk in [*parts, TALK]], on_mixed_types="use_json"))


@pytest.mark.parametrize("values", [[3, 4], [["a"], ["b"]], [{"role": "user"}] * 2, [[{"content": "a"}]] * 2])
def test_columns_of_another_type(values):
    with pytest.raises(ValueError, match="^Row 0 of train_dataset, column 'prompt': must be a string, or messages"):
        checked(table(values))


def test_many_rows_are_checked_at_once():
    """Rows are not converted to Python values: 100,000 conversations take 0.1 seconds."""
    some = pa.Table.from_pylist([{"prompt": TALK}] * 1000)
    dataset = Dataset(pa.concat_tables([some] * 100))
    start = time.process_time()
    checked(dataset)
    assert time.process_time() - start < 2


# Rendering


def test_prompts_are_rendered_as_the_tokenizer_does_it():
    tokenizer = tiny_tokenizer(chat_template=True)
    talks = [TALK, TALK, [{"role": "user", "content": "a longer one"}], TALK]
    options = {"add_generation_prompt": True, "tokenize": True, "return_dict": True}
    assert prompts.prompt_ids(talks, tokenizer) == tokenizer.apply_chat_template(talks, **options)["input_ids"]


def test_texts_and_messages_in_one_generation():
    with pytest.raises(ValueError, match="must be all strings or all messages, got 'a' and "):
        prompts.prompt_ids(["a", TALK], tiny_tokenizer(chat_template=True))


def test_a_template_that_makes_too_much_shows_the_prompt(monkeypatch):
    monkeypatch.setattr(chat_templates, "MAX_CHARACTERS", 10**6)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ 'a' * 10**7 }}"
    with pytest.raises(ValueError, match=r"^The prompt \[\{'content': 'hi', .*chat template produces a text .* too l"):
        prompts.prompt_ids([TALK], tokenizer)


def test_an_error_of_a_template_shows_the_prompt():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(Exception, match="roles must alternate") as caught:
        prompts.prompt_ids([TALK], tokenizer)
    [note] = caught.value.__notes__
    assert note.startswith("The prompt [{") and note.endswith("raised by the tokenizer's chat template.")


def calls_of_templates(source):
    """The lines on which a tokenizer's own `apply_chat_template` is called or referenced."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute) and node.attr == "apply_chat_template" and isinstance(node.ctx, ast.Load)
    ]


def test_the_package_renders_templates_in_one_place():
    """Without its limits, an untrusted template could use all memory and time."""
    package = Path(trl_jax.__file__).parent
    found = {
        str(path.relative_to(package)): lines
        for path in package.rglob("*.py")
        if (lines := calls_of_templates(path.read_text(encoding="utf-8")))
    }
    assert {name: len(lines) for name, lines in found.items()} == {
        "data/chat_templates.py": 1,
        "cli/trl_alias.py": 1,  # wraps transformers' method for user scripts
        "trainer/collators.py": 1,  # TRL's collators, which only scripts call: with their processor, as in TRL
    }
    assert calls_of_templates("a = f(tokenizer.apply_chat_template)\nb = tokenizer.apply_chat_template([])") == [1, 2]
