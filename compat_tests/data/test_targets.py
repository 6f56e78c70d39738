"""Examples with labels: each layout reads every target once, from the token before it, with the right weight."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from datasets import Dataset, IterableDataset
from hypothesis import given, settings
from hypothesis import strategies as st

from compat_tests.data.loaders import example_loader
from compat_tests.effort import drawn
from trl_jax.data.batch import IGNORED, Columns, Example, Extras, loss_batch
from trl_jax.data.checks import check_labels
from trl_jax.data.layout_plan import Buckets, ViewBuckets
from trl_jax.data.loader import EvalChunks, fingerprint, row_digest

SINGLE = Columns(("input_ids",), labels=("labels",), documents="seq_lengths")
PAIR = Columns(("chosen", "rejected"), labels=("chosen_labels", "rejected_labels"))
SIZE, ACCUMULATION = 4, 2
ids = st.lists(st.integers(0, 9), min_size=1, max_size=12)


def labeled(texts: list[list[int]], ignored: list[bool]) -> list[list[int]]:
    mask = iter(ignored * 20)
    return [[IGNORED if next(mask) else token for token in text] for text in texts]


@st.composite
def singles(draw) -> Example:
    documents = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    text = draw(st.lists(st.integers(0, 9), min_size=sum(documents), max_size=sum(documents)))
    return Example((text,), Extras(), tuple(labeled([text], draw(st.lists(st.booleans(), min_size=4)))), documents)


@st.composite
def pairs(draw) -> Example:
    prompt, ends = draw(ids), (draw(ids), draw(ids))
    texts = [prompt + end for end in ends]
    return Example(tuple(texts), Extras(), tuple(labeled(texts, draw(st.lists(st.booleans(), min_size=4)))))


def rows_of(examples: list[Example], columns: Columns) -> list[dict]:
    return [
        dict(zip(columns.texts, example.texts, strict=True))
        | dict(zip(columns.labels, example.labels, strict=True))
        | ({columns.documents: example.documents} if columns.documents else {})
        for example in examples
    ]


def loader(examples: list[Example], columns: Columns, **more):
    dataset = Dataset.from_list(rows_of(examples, columns))
    known = {"batch_size": SIZE, "accumulation": ACCUMULATION, "pad_token_id": 7, "pad_to_multiple_of": None}
    return example_loader(dataset, columns, **(known | more))


def wanted(examples: list[Example]) -> Counter:
    """A count of (the tokens of a document up to a read, its target)."""
    found = Counter()
    for example in examples:
        spans = example.spans_of(max(example.texts, key=len))
        for text, labels in zip(example.texts, example.labels, strict=True):
            for start, end in spans:
                own, targets = text[start:end], labels[start:end]
                found.update((tuple(own[:t]), targets[t]) for t in range(1, len(own)) if targets[t] != IGNORED)
    return found


def seen_by(batch, index: tuple[int, ...], row: int, place: int) -> tuple[int, ...]:
    """The tokens that a token of a row attends to, in the order of their positions."""
    tokens, positions = batch.tokens[index][row], batch.positions[index][row]
    if batch.packed is None:
        return tuple(tokens[: place + 1].tolist())
    span = np.arange(batch.packed.first[index][row, place], batch.packed.end[index][row, place])
    return tuple(tokens[span[np.argsort(positions[span])]].tolist())


def found_in(batch) -> Counter:
    found, examples = Counter(), batch.weight.shape[-1]
    for index in np.ndindex(batch.reads.shape[:-1]):
        length = batch.tokens.shape[-1]
        real = batch.targets[index] >= 0
        assert not real[np.argmin(real) :].any() or real.all(), "reads with targets come first"
        reads = (array[index][real] for array in (batch.reads, batch.targets, batch.text))
        for place, target, text in zip(*reads, strict=True):
            assert batch.weight[index][text % examples] > 0
            found[seen_by(batch, index, *divmod(int(place), length)), int(target)] += 1
    return found


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("layout", ["padded", "packed", "shared"])
@settings(deadline=None, max_examples=drawn(30))
@given(st.data())
def test_every_target_is_read_once_from_what_comes_before_it(layout, shards, data):
    for examples, columns in ((singles(), SINGLE), (pairs(), PAIR)):
        rows = data.draw(st.lists(examples, min_size=1, max_size=2 * SIZE * ACCUMULATION))
        steps = loader(rows, columns, layout=layout, shards=shards, fill_last=False)
        found = sum((found_in(step.arrays) for step in steps), Counter())
        assert found == wanted(rows)


@settings(deadline=None, max_examples=drawn(20))
@given(st.lists(singles(), min_size=1, max_size=SIZE * ACCUMULATION), st.booleans())
def test_views_of_texts_as_rows_have_a_row_for_each_document(rows, packed):
    views = ViewBuckets()
    [step] = loader(rows, SINGLE, layout="packed" if packed else "shared", views=views)
    batch = step.arrays
    view, length = batch.packed.texts, batch.tokens.shape[-1]
    found = Counter()
    for index in np.ndindex(view.places.shape[:3]):
        own = view.places[index][view.places[index] < length]
        found[tuple(batch.tokens[index[0], index[1]][own].tolist())] += 1
    del found[()]
    assert found == Counter(tuple(row.texts[0][a:b]) for row in rows for a, b in row.spans_of(row.texts[0]))


@settings(deadline=None, max_examples=drawn(20))
@given(st.lists(singles(), min_size=1, max_size=SIZE * ACCUMULATION))
def test_weights_are_shares_of_the_targets_of_the_step_or_of_a_shard(rows):
    targets = sum(row.num_targets for row in rows)
    [step] = loader(rows, SINGLE, layout="packed", weighting="tokens")
    real = step.arrays.weight[step.arrays.weight > 0]
    assert len(real) == len(rows) and np.allclose(real, 1 / max(1, targets))
    [step] = loader(rows, SINGLE, layout="padded", weighting="shards", shards=2, fill_last=False)
    for shard in range(2):
        weight, predicted = step.arrays.weight[:, shard], step.arrays.targets[:, shard] >= 0
        assert np.allclose(weight[weight > 0], 1 / (2 * max(1, int(predicted.sum()))))


def test_the_first_token_of_a_document_is_never_a_target():
    example = Example(([5, 6, 7, 8],), Extras(), ([5, 6, 7, 8],), (1, 3))
    places, targets = example.targets(0)
    assert places.tolist() == [1, 2] and targets.tolist() == [7, 8] and example.num_targets == 2


def test_the_loss_of_an_evaluation_batch_is_a_mean_over_its_targets():
    examples = [Example(([1] * n,), Extras(), ([1] * n,)) for n in (3, 5)]
    batch = loss_batch(examples, 4, per_token=True)
    assert batch.divisor == 6 and np.allclose(batch.weight, [1 / 6, 1 / 6, 0, 0])
    steps = loader(examples, SINGLE._replace(documents=None), weighting="tokens")
    chunk = next(iter(EvalChunks(steps, sort=True)))
    assert [part.divisor for part in chunk.batches] == [6]


def test_outputs_by_name_are_put_back_into_the_order_of_the_set():
    rows = [Example(([1] * n,), Extras(), ([1] * n,)) for n in (5, 2, 9, 4, 3)]
    for layout in ("padded", "packed"):
        columns = SINGLE._replace(documents=None)
        chunk = next(iter(EvalChunks(loader(rows, columns, layout=layout, accumulation=1), sort=True)))
        lengths = [{"tokens": arrays.lengths[0].astype(np.float32)} for arrays, _ in chunk.passes]
        found = np.concatenate([batch["tokens"] for batch in chunk.restored(lengths)])
        assert found[:5].tolist() == [5, 2, 9, 4, 3]


def test_digests_see_labels_and_documents():
    row = {"input_ids": [1, 2, 3], "labels": [-100, 2, 3], "seq_lengths": [3]}
    others = [row | {"labels": [1, 2, 3]}, row | {"seq_lengths": [1, 2]}]
    for digest in (lambda one: fingerprint(Dataset.from_list([one]), SINGLE), lambda one: row_digest(one, SINGLE, 0)):
        assert len({digest(one) for one in (row, *others)}) == 3


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (
            [1, 2],
            r"Row 1 of the prepared train_dataset, .*'labels': must have 3 labels, one for each id of input_ids, got 2",
        ),
        ([1, 2, 10], r"Row 1 .*column 'labels': must be token ids from 0 to 9, or -100 .*, got 10"),
        ([1, -1, 2], r"column 'labels': must be token ids from 0 to 9, or -100 .*, got -1"),
    ],
)
def test_labels_that_cannot_be_are_named(labels, message):
    rows = [{"input_ids": [1, 2, 3], "labels": [-100, 2, 9]}, {"input_ids": [1, 2, 3], "labels": labels}]
    for dataset in (Dataset.from_list(rows), IterableDataset.from_generator(lambda: iter(rows))):
        with pytest.raises(ValueError, match=message):
            list(check_labels(dataset, SINGLE, 10, "train"))


def test_buckets_hold_a_row_and_its_reads():
    row = Example(([1] * 100,), Extras(), ([1] * 100,))
    [step] = loader([row], SINGLE._replace(documents=None), layout="packed", buckets=Buckets((128,)))
    assert step.arrays.tokens.shape[-1] == step.arrays.reads.shape[-1] == 128
