"""Which rows a run visits: torch's order exactly, and transformers' number of steps and epochs."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_jax.data.loader import epoch_order, micro_batches, run_length


@pytest.mark.parametrize("rows", [1, 2, 17, 1000])
@pytest.mark.parametrize(("seed", "epoch"), [(42, 0), (42, 3), (0, 0), (2**32 - 1, 1)])
def test_an_epochs_order_is_torchs(rows, seed, epoch):
    torch = pytest.importorskip("torch")
    wanted = torch.randperm(rows, generator=torch.Generator().manual_seed(seed + epoch)).numpy()
    np.testing.assert_array_equal(epoch_order(rows, seed=seed, epoch=epoch, shuffle=True), wanted)


def test_without_shuffling_rows_come_as_they_are():
    np.testing.assert_array_equal(epoch_order(5, seed=1, epoch=2, shuffle=False), [0, 1, 2, 3, 4])


@given(st.lists(st.integers(), max_size=30), st.integers(1, 7), st.booleans())
def test_micro_batches_are_runs_of_the_items(items, size, drop_last):
    batches = list(micro_batches(iter(items), size, drop_last=drop_last))
    kept = len(items) - len(items) % size if drop_last else len(items)
    assert [item for batch in batches for item in batch] == items[:kept]
    assert all(len(batch) == size for batch in batches[:-1])
    assert all(0 < len(batch) <= size for batch in batches[-1:])


@settings(deadline=None)
@given(
    rows=st.integers(1, 60),
    batch_size=st.integers(1, 9),
    accumulation=st.integers(1, 5),
    drop_last=st.booleans(),
    epochs=st.sampled_from([0.3, 1, 1.5, 2, 3]),
    max_steps=st.sampled_from([-1, 1, 5, 12]),
)
def test_the_length_of_a_run_is_what_happens(rows, batch_size, accumulation, drop_last, epochs, max_steps):
    """Compared with a count batch by batch; a ragged last step is a step."""
    arguments = {"batch_size": batch_size, "accumulation": accumulation, "drop_last": drop_last}
    batches = list(micro_batches(range(rows), batch_size, drop_last=drop_last))
    if not batches:
        with pytest.raises(ValueError, match="leaves no batch"):
            run_length(rows, **arguments, epochs=epochs, max_steps=max_steps)
        return
    run = run_length(rows, **arguments, epochs=epochs, max_steps=max_steps)
    steps = len(list(micro_batches(batches, accumulation, drop_last=False)))
    assert run.micro_batches_per_epoch == len(batches)
    assert run.max_steps == (max_steps if max_steps > 0 else math.ceil(epochs * steps))
    assert (run.num_epochs - 1) * steps < run.max_steps <= run.num_epochs * steps


def test_a_stream_needs_max_steps():
    sizes = {"batch_size": 4, "accumulation": 2, "drop_last": False, "epochs": 3}
    run = run_length(None, **sizes, max_steps=7)
    assert (run.max_steps, run.micro_batches_per_epoch) == (7, 14)
    with pytest.raises(ValueError) as error:
        run_length(None, **sizes, max_steps=-1)
    assert str(error.value) == (
        "train_dataset has no length, so max_steps must be set, but it is -1. Set it in the config."
    )


def test_drop_last_may_not_drop_everything():
    with pytest.raises(ValueError) as error:
        run_length(3, batch_size=4, accumulation=1, drop_last=True, epochs=1, max_steps=-1)
    assert str(error.value) == (
        "dataloader_drop_last=True leaves no batch: 3 rows with a batch size of 4. Lower the batch size."
    )
