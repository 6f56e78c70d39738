"""Batches from a background thread: the same ones in order, errors raised when their batch is requested, no thread
left."""

from __future__ import annotations

import threading
import time
from itertools import islice

import pytest

from trl_jax.training import data
from trl_jax.training.data import Prefetched


class Source:
    """Records what is requested; raises at number `fails`."""

    def __init__(self, fails=None):
        self.made, self.fails, self.epochs = [], fails, []

    def set_epoch(self, *given):
        self.epochs.append(given)

    def __iter__(self):
        for number in range(10):
            if number == self.fails:
                raise ValueError(f"row {number} is bad")
            self.made.append(threading.current_thread().name)
            yield number


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "trl_jax-batches"]


def test_order_and_placing():
    source = Source()
    assert list(Prefetched(source, lambda number: number * 2)) == list(range(0, 20, 2))
    assert set(source.made) == {"trl_jax-batches"} and not threads()


def test_no_more_than_a_few_ahead():
    source = Source()
    batches = iter(Prefetched(source))
    next(batches)
    time.sleep(0.1)
    assert len(source.made) <= 4
    batches.close()


def test_who_stops_early_leaves_no_thread():
    for _ in range(3):
        assert list(islice(Prefetched(Source()), 2)) == [0, 1]
    assert not threads()


def test_an_error_comes_after_the_batches_before_it():
    found = []
    with pytest.raises(ValueError, match="^row 4 is bad$"):
        for number in Prefetched(Source(fails=4)):
            found.append(number)
    assert found == [0, 1, 2, 3] and not threads()


def test_the_epoch_is_passed_on():
    source = Source()
    Prefetched(source).set_epoch(2, 5, 77)
    assert source.epochs == [(2, 5, 77)]


class Stalled(Source):
    """Three batches; the fourth waits until it is released."""

    def __init__(self):
        super().__init__()
        self.let = threading.Event()

    def __iter__(self):
        yield from islice(super().__iter__(), 3)
        self.let.wait(60)
        yield 3


def test_what_is_to_be_done_is_done_while_no_batch_comes(monkeypatch):
    monkeypatch.setattr(data, "_LONGEST_WAIT", 0.2)

    def leave():
        raise SystemExit(143)

    source, found = Stalled(), []
    with pytest.raises(SystemExit):
        for number in Prefetched(source, waiting=leave):
            found.append(number)
    assert found == [0, 1, 2] and len(threads()) == 1
    source.let.set()
    threads()[0].join(10)
    assert not threads()


def test_a_stream_that_stalls_does_not_hold_up_who_has_enough(monkeypatch):
    monkeypatch.setattr(data, "_LONGEST_WAIT", 0.2)
    source, start = Stalled(), time.monotonic()
    assert list(islice(Prefetched(source), 3)) == [0, 1, 2]
    assert time.monotonic() - start < 30
    source.let.set()
