"""Evaluation windows: every pair is computed once, and its scores come back to its place in its batch."""

from __future__ import annotations

import numpy as np
import pytest
from datasets import Dataset

from trl_jax.core.packed import BLOCK
from trl_jax.data import windows
from trl_jax.data.loader import PreferenceLoader
from trl_jax.data.windows import Windows

PAD, SIZE = 0, 3


def table(pairs, seed=0):
    dice = np.random.default_rng(seed)
    rows = []
    for number in range(pairs):
        prompt = dice.integers(1, 9, dice.integers(0, 40)).tolist()
        sides = {side: prompt + dice.integers(1, 9, dice.integers(1, 30)).tolist() for side in ("chosen", "rejected")}
        rows.append({f"{side}_ids": ids for side, ids in sides.items()} | {"margin": number / 2})
    return Dataset.from_list(rows)


def total(ids):
    """A score that tells texts apart."""
    return float(np.dot(ids, np.arange(1, len(ids) + 1)))


def score(batch):
    """Of each slot the total of its text, from what the token that is read sees."""
    batch = type(batch)(*(None if part is None or part is batch.packed else part[0] for part in batch))._replace(
        packed=None if batch.packed is None else type(batch.packed)(*(part[0, 0] for part in batch.packed[:2]), None)
    )
    if batch.packed is None:
        return np.array([total(row[: at + 1]) for row, at in zip(batch.tokens, batch.at, strict=True)])
    seen = batch.packed
    texts = (slice(seen.first[at], seen.end[at]) for at in batch.at)
    order = batch.positions[0]
    return np.array([total(batch.tokens[0, text][np.argsort(order[text])]) for text in texts])


LAYOUTS = [("padded", False), ("padded", True), ("packed", False), ("shared", False)]


@pytest.mark.parametrize("pairs", [1, 3, 11, 20])
@pytest.mark.parametrize(("layout", "sort"), LAYOUTS)
def test_every_pair_once_and_in_its_place(layout, sort, pairs, monkeypatch):
    monkeypatch.setattr(windows, "WINDOW", 4)
    data = table(pairs)
    loader = PreferenceLoader(data, batch_size=SIZE, pad_token_id=PAD, pad_to_multiple_of=None, layout=layout)
    found, computed = [], 0
    for window in Windows(loader, sort=sort):
        computed += sum(int((slots >= 0).sum()) for _, slots in window.passes)
        found += zip(window.restored([score(batch) for batch, _ in window.passes]), window.batches, strict=True)
    assert computed == pairs
    assert [batch.num_pairs for _, batch in found] == [min(SIZE, pairs - start) for start in range(0, pairs, SIZE)]
    for number, (scores, batch) in enumerate(found):
        rows = data[number * SIZE : (number + 1) * SIZE]
        count = batch.num_pairs
        for half, side in zip(scores.reshape(2, SIZE), ("chosen_ids", "rejected_ids"), strict=True):
            assert half[:count].tolist() == [total(ids) for ids in rows[side]]
        np.testing.assert_allclose(batch.weight, [1 / count] * count + [0] * (SIZE - count), rtol=1e-6)
        assert batch.margin[:count].tolist() == rows["margin"]


def test_streams_are_full_and_of_one_length():
    data = table(300)
    loader = PreferenceLoader(data, batch_size=SIZE, pad_token_id=PAD, pad_to_multiple_of=None, layout="shared")
    passes = [batch for window in Windows(loader, sort=False) for batch, _ in window.passes]
    length = passes[0].tokens.shape[-1]
    assert {batch.tokens.shape for batch in passes} == {(1, 1, length)} and length % BLOCK == 0
    filled = sum(int((batch.packed.first < length).sum()) for batch in passes)
    assert filled / (length * len(passes)) > 0.9


def test_sorted_rows_are_padded_less():
    loader = PreferenceLoader(table(60), batch_size=SIZE, pad_token_id=PAD, pad_to_multiple_of=None)
    places = {
        sort: sum(batch.tokens.size for window in Windows(loader, sort=sort) for batch, _ in window.passes)
        for sort in (False, True)
    }
    assert places[True] < 0.85 * places[False]


def test_the_longest_text_is_that_of_trls_batch():
    data = table(20)
    loader = PreferenceLoader(data, batch_size=SIZE, pad_token_id=PAD, pad_to_multiple_of=None, layout="shared")
    for window in Windows(loader, sort=False):
        for batch, slots in window.passes:
            for slot, pair in enumerate(slots[slots >= 0]):
                rows = data[pair // SIZE * SIZE : (pair // SIZE + 1) * SIZE]
                longest = max(len(ids) for side in ("chosen_ids", "rejected_ids") for ids in rows[side])
                assert batch.packed.longest[0, 0, batch.at[0, slot]] == longest
