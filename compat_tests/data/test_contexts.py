"""Contexts of examples: placed once per micro-batch and packed row, together with the examples that share them."""

from __future__ import annotations

import numpy as np
import pytest

from trl_jax.data.batch import IGNORED, Context, Example
from trl_jax.data.loader import IndexedExample, StepLayout
from trl_jax.data.packed import assign_rows, greedy_bins, place

SIZE, GROUP = 6, 3


def examples(count=24, prompt=20):
    """Groups of GROUP examples; each group has its own context."""
    made = []
    for number in range(count):
        group = number // GROUP
        ids = [100 + group] * prompt + [1 + number] * (1 + number % 4)
        made.append(Example((ids,), labels=([IGNORED] * prompt + ids[prompt:],), context=Context(group, prompt)))
    return made


def step(made, layout="shared", **options):
    batches = [made[at : at + SIZE] for at in range(0, len(made), SIZE)]
    groups = [[IndexedExample(one, number) for number, one in enumerate(batch)] for batch in batches]
    known = {"pad_token_id": 0, "pad_to_multiple_of": None, "accumulation": len(batches)}
    return StepLayout(SIZE, layout=layout, **known | options).step(groups, 0)


@pytest.mark.parametrize("options", [{}, {"whole_micro_batches": True}, {"shards": 2}], ids=str)
def test_a_context_lies_once(options):
    made = examples()
    arrays = step(made, **options).arrays
    tokens = [arrays.tokens[index] for index in np.ndindex(arrays.weight.shape[:-1])]
    for group in range(len(made) // GROUP):
        assert sum(int(np.sum(row == 100 + group)) for row in tokens) == 20, "all of a group are in one row"
    for number, one in enumerate(made):
        assert sum(int(np.sum(row == 1 + number)) for row in tokens) == len(one.texts[0]) - 20
    counts = sorted(set(np.unique(arrays.router_token_count).tolist()) - {0})
    assert counts == [1, GROUP]


def test_a_plan_counts_the_keys_of_both_ranges():
    made = examples(2 * GROUP)
    lengths = [(20, len(one.texts[0])) for one in made]
    own = sum(sum(range(prompt + 1, length + 1)) for prompt, length in lengths)
    packed = step(made).arrays.packed
    attended = packed.end - packed.first + packed.context_end - packed.context
    assert attended.sum() == own + 2 * sum(range(1, 21))


def test_other_layouts_have_it_in_each_text():
    made = examples(6)
    for layout in ("padded", "packed"):
        arrays = step(made, layout).arrays
        assert int(np.sum(arrays.tokens >= 100)) == 6 * 20
        assert layout == "padded" or arrays.packed.context is None


def test_a_group_of_two_micro_batches_lies_in_each():
    """TRL's result may depend on the longest text in the same micro-batch."""
    made = [one._replace(context=Context(0, 20)) for one in examples(2 * SIZE)]
    made = [one._replace(texts=([100] * 20 + one.texts[0][20:],)) for one in made]
    arrays = step(made).arrays
    assert int(np.sum(arrays.tokens == 100)) == 2 * 20


def test_rows_are_filled_evenly_by_what_lies_in_them():
    placed = place([examples(6), examples(6)], examples=6, share_prefix=True)
    into = assign_rows(placed, 2)
    for row in range(2):
        own = [one for one, at in zip(placed, into, strict=True) if at == row]
        assert len(own) == 6 and len({one.context for one in own}) == 2


@pytest.mark.parametrize("seed", range(20))
def test_bins_have_room_for_as_many_as_they_are_said_to(seed):
    """Groups of at most a micro-batch (SIZE), three micro-batches in total, in rows with room for twice SIZE."""
    dice, bins = np.random.default_rng(seed), 3
    sizes = dice.integers(1, SIZE + 1, 20)
    sizes = sizes[np.cumsum(sizes) <= bins * SIZE].tolist()
    into = greedy_bins(dice.integers(1, 50, len(sizes)).tolist(), bins, 2 * SIZE, sizes)
    assert np.bincount(into, sizes).max() <= 2 * SIZE


def test_a_key_stands_for_one_beginning():
    first, other, *_ = examples(2)
    other = other._replace(texts=([7] * 20 + [1],), labels=([IGNORED] * 20 + [1],))
    with pytest.raises(ValueError, match="have the context key 0 but begin with different tokens"):
        step([first, other])


@pytest.mark.parametrize(
    "change",
    [
        {"context": Context("it", 30)},
        {"context": Context("it", 0)},
        {"texts": ([1, 2], [1, 3]), "labels": ([1, 2], [1, 3])},
        {"documents": [10, 11]},
    ],
    ids=str,
)
def test_an_example_with_a_context_is_one_text_that_begins_with_it(change):
    with pytest.raises(ValueError, match="must have exactly one text, without documents, that starts with the "):
        step([examples(1)[0]._replace(**change)])
