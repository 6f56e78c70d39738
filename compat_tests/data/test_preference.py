"""Rows of every form become the same ids as in TRL, in TRL's order."""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace

import pytest
from datasets import Dataset, IterableDataset, disable_caching, enable_caching, load_dataset
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from compat_tests.effort import drawn, only_thorough
from compat_tests.tiny import preference_rows, tiny_tokenizer
from trl_jax.data import preference, reward
from trl_jax.data.reward import prepare

TEMPLATE = (
    "{% if tools is not none %}tools: {{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}{{ m['role'] }}{% if loud %}!{% endif %}: "
    "{{ m['content'] }}{{ eos_token }}{% endfor %}"
)
IDS = ("chosen_ids", "rejected_ids")
TOOLS = [{"type": "function", "function": {"name": "clock", "description": "the time", "parameters": {}}}]


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


def ours(dataset, tokenizer, max_length=None, name="train", num_proc=None):
    return prepare(dataset, tokenizer, max_length=max_length, num_proc=num_proc, name=name)


def theirs(dataset, tokenizer, max_length=None):
    trl = pytest.importorskip("trl")
    args = SimpleNamespace(max_length=max_length, dataset_num_proc=None)
    return trl.RewardTrainer._prepare_dataset(None, dataset, tokenizer, args, "train")


def pairs(dataset):
    return [tuple(list(row[column]) for column in IDS) for row in dataset]


def _with(rows, **columns):
    return [row | {key: values[i % len(values)] for key, values in columns.items()} for i, row in enumerate(rows)]


def _ended(rows):
    """Every other chosen text already ends with EOS."""
    return [row | {"chosen": row["chosen"] + "</s>" * (i % 2)} for i, row in enumerate(rows)]


FORMS = {
    "text": preference_rows(20, "text"),
    "text_ended": _ended(preference_rows(20, "text")),
    "text_eos_inside": [
        {"chosen": "a</s> b", "rejected": "</s>"},
        {"chosen": "a </s> ", "rejected": "b</s></s>"},
    ],
    "text_empty": [{"chosen": "", "rejected": "b"}, {"chosen": "a", "rejected": ""}],
    "text_foreign": [{"chosen": "żółć 漢字 🙂\n\n", "rejected": "\t <s> <pad>"}],
    "prompt": preference_rows(20, "prompt"),
    "prompt_ends_with_eos": [{"prompt": "why</s>", "chosen": "", "rejected": "because"}],
    "chat": preference_rows(20, "chat"),
    "chat_prompt": preference_rows(20, "chat_prompt"),
    "margin": preference_rows(20, "text", margin=True),
    "tools": _with(preference_rows(4, "chat"), tools=[TOOLS]),
    "tools_json": _with(preference_rows(4, "chat_prompt"), tools=[json.dumps(TOOLS), "[]"]),
    "tools_some": _with(preference_rows(4, "chat"), tools=[TOOLS, None]),
    "template_kwargs": _with(preference_rows(4, "chat"), chat_template_kwargs=[{"loud": True}, {"loud": False}]),
    "other_columns": _with(preference_rows(4, "text"), source=["web", "book"], score=[1.5]),
    "tokenized": [
        {"chosen_ids": [5, 6, 7], "rejected_ids": [8]},
        {"chosen_ids": [5], "rejected_ids": [9, 9]},
    ],
}


@pytest.mark.parametrize("streaming", [False, True], ids=["table", "stream"])
@pytest.mark.parametrize("limited", [False, True], ids=["all", "limited"])
@pytest.mark.parametrize("form", FORMS)
def test_rows_equal_trls(form, limited, streaming, tokenizer):
    rows = FORMS[form]
    dataset = Dataset.from_list(rows)
    dataset = dataset.to_iterable_dataset() if streaming else dataset
    trls = list(theirs(dataset, tokenizer))
    if limited:
        max_length = sorted(max(len(ids) for ids in pair) for pair in pairs(trls))[len(trls) // 2]
        trls = list(theirs(dataset, tokenizer, max_length))
    mine = list(ours(dataset, tokenizer, max_length if limited else None))
    assert trls and pairs(mine) == pairs(trls)
    assert [row.keys() for row in mine] == [row.keys() for row in trls]
    for column in set(rows[0]) - {
        "chosen",
        "rejected",
    }:  # TRL writes EOS and the prompt into these two; we leave them unchanged
        assert [row[column] for row in mine] == [row[column] for row in trls], column


@settings(max_examples=drawn(40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    texts=st.lists(st.tuples(st.text(max_size=20), st.text(max_size=20)), min_size=1, max_size=4),
    prompt=st.text(),
)
def test_any_text_equals_trls(texts, prompt, tokenizer):
    rows = [{"prompt": prompt, "chosen": a, "rejected": b + "</s>"} for a, b in texts]
    assert pairs(ours(Dataset.from_list(rows), tokenizer)) == pairs(theirs(Dataset.from_list(rows), tokenizer))


def test_the_given_dataset_and_its_text_stay_as_they_were(tokenizer):
    rows = FORMS["chat_prompt"] + FORMS["chat_prompt"]
    dataset = Dataset.from_list(rows)
    prepared = ours(dataset, tokenizer)
    assert dataset.column_names == ["prompt", "chosen", "rejected"] and dataset.to_list() == rows
    assert prepared.remove_columns(list(IDS)).to_list() == rows


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    "legacy", [("chosen_input_ids", "rejected_input_ids"), ("input_ids_chosen", "input_ids_rejected")]
)
def test_older_column_names_are_renamed(legacy, streaming, tokenizer):
    dataset = Dataset.from_list([{legacy[0]: [4, 5], legacy[1]: [6], "margin": 0.5}])
    dataset = dataset.to_iterable_dataset() if streaming else dataset
    text = f"train_dataset: the columns '{legacy[0]}' and '{legacy[1]}' .* deprecated .*will not be supported in v1"
    with pytest.warns(FutureWarning, match=text):
        prepared = ours(dataset, tokenizer)
    assert list(prepared) == [{"chosen_ids": [4, 5], "rejected_ids": [6], "margin": 0.5}]


@pytest.mark.parametrize("streaming", [False, True])
def test_preparing_twice_is_preparing_once(streaming, tokenizer):
    dataset = Dataset.from_list(preference_rows(30, "prompt", margin=True))
    dataset = dataset.to_iterable_dataset() if streaming else dataset
    once = ours(dataset, tokenizer, 30)
    assert list(ours(once, tokenizer, 30)) == list(once)
    fewer = list(ours(once, tokenizer, 20))
    assert fewer == [row for row in once if max(len(row[column]) for column in IDS) <= 20]
    assert 0 < len(fewer) < len(list(once))


def test_a_stream_that_does_not_know_its_columns(tokenizer):
    rows = preference_rows(6, "chat_prompt", margin=True)
    stream = IterableDataset.from_generator(lambda: iter(rows))
    assert stream.column_names is None
    assert pairs(ours(stream, tokenizer)) == pairs(theirs(Dataset.from_list(rows), tokenizer))


def test_selected_and_shuffled_rows_keep_their_order(tokenizer):
    dataset = Dataset.from_list(preference_rows(40, margin=True)).shuffle(seed=3).select(range(5, 35))
    assert pairs(ours(dataset, tokenizer, 30)) == pairs(theirs(dataset, tokenizer, 30))


def test_more_rows_than_one_block(tokenizer):
    rows = [{"chosen_ids": [7] * (1 + i % 50), "rejected_ids": [8] * (1 + i % 7)} for i in range(2500)]
    prepared = ours(Dataset.from_list(rows), tokenizer, 20)
    assert pairs(prepared) == [pair for pair in pairs(rows) if len(pair[0]) <= 20]


def test_a_display_format_changes_nothing(tokenizer):
    rows = preference_rows(6, "chat", margin=True)
    dataset = Dataset.from_list(rows)
    assert list(ours(dataset.with_format("numpy"), tokenizer)) == list(ours(dataset, tokenizer))


@only_thorough
def test_several_processes_give_the_same_rows(tokenizer):
    dataset = Dataset.from_list(preference_rows(12, "prompt"))
    assert pairs(ours(dataset, tokenizer, num_proc=2)) == pairs(ours(dataset, tokenizer))


def test_the_cache_is_found_again(tokenizer, tmp_path, monkeypatch):
    enable_caching()
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in preference_rows(10)))
    dataset = load_dataset("json", data_files=str(file), split="train", cache_dir=str(tmp_path / "cache"))
    first = ours(dataset, tokenizer)
    monkeypatch.setattr(reward, "read_pair", lambda *_: pytest.fail("tokenized again"))
    second = ours(dataset, tokenizer)
    assert first.cache_files == second.cache_files and pairs(first) == pairs(second)


def test_what_max_length_removed_is_reported(tokenizer, caplog):
    rows = [{"chosen_ids": [5] * length, "rejected_ids": [6]} for length in (3, 9, 4, 12) * 300]
    with caplog.at_level(logging.WARNING, "trl_jax"):
        assert len(ours(Dataset.from_list(rows), tokenizer, 4)) == 600
        ours(Dataset.from_list(rows), tokenizer, 12)
    assert caplog.messages == ["max_length=4 removed 600 of 1,200 pairs of train_dataset (longest kept: 4 tokens)"]


def test_a_stream_reports_the_first_pair_that_max_length_removes(tokenizer, caplog):
    rows = [{"chosen_ids": [5] * length, "rejected_ids": [6]} for length in (3, 9, 4, 12)]
    stream = ours(Dataset.from_list(rows).to_iterable_dataset(), tokenizer, 4)
    assert len(list(stream)) == len(list(stream)) == 2
    assert caplog.messages == [
        "max_length=4 removes row 1 of train_dataset (9 tokens); further rows like it are not reported."
    ]


def test_progress_is_described_as_trl_does(tokenizer, monkeypatch):
    seen = []
    real = Dataset.map
    monkeypatch.setattr(Dataset, "map", lambda self, *a, **k: (seen.append(k["desc"]), real(self, *a, **k))[1])
    for name in ("train", "eval", "eval_dataset['a_b']"):
        ours(Dataset.from_list(preference_rows(2)), tokenizer, name=name)
    assert seen == ["Tokenizing train dataset", "Tokenizing eval dataset", "Tokenizing eval dataset['a_b']"]


@pytest.mark.parametrize("rejected", ["ab c d", "ab c", "ab d", "ab", "a", "ad", "ab  c"])
def test_the_prompt_that_two_answers_share_is_trls(rejected):
    trl = pytest.importorskip("trl")
    wanted = trl.extract_prompt({"chosen": "ab c", "rejected": rejected})
    assert preference.extract_prompt("ab c", rejected, "Row 0") == wanted
