"""Calls functions of a script: asynchronous ones together and within a time, with a note on what they raise."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

from trl_jax.core.arguments.values import show
from trl_jax.core.secrets import scrubbed


def unwrapped(function: Callable) -> Callable:
    """The function that a functools.partial calls in the end."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def is_async(function: Callable) -> bool:
    """Whether calling it gives a coroutine: an `async def`, a partial of one, or an object with such a `__call__`."""
    function = unwrapped(function)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


@contextlib.contextmanager
def raised_by(who: str, prompts: list) -> Iterator[None]:
    """Add to an exception which of the script's functions raised it, and for which completions."""
    try:
        yield
    except Exception as error:
        error.add_note(
            f"This was raised by {who}, for {len(prompts)} completions, the first of them of "
            f"{scrubbed(show('prompt', prompts[0]))}. The run can go on from its last checkpoint: "
            "train(resume_from_checkpoint=True)."
        )
        raise


_GRACE = 1.0  # seconds for a coroutine to end after it was cancelled; one that does not is left to itself


class TookTooLong(Exception):
    """A coroutine did not end in time.

    number: its place among the coroutines.
    blocks: whether it kept the whole event loop from running, so that it could not even be cancelled.
    """

    def __init__(self, number: int, *, blocks: bool):
        super().__init__(number, blocks)
        self.number, self.blocks = number, blocks


class EventLoop:
    """An event loop in a thread of its own, which starts with the first call. All calls share it, so connections that
    functions keep open between calls stay open."""

    def __init__(self):
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self, coroutines: Sequence[Coroutine[Any, Any, Any]], timeout: float | None = None) -> list[Any]:
        """The results, in order. Where one raises, the others are cancelled and its exception is raised.

        Args:
            timeout: seconds that they may take; None is no limit.

        Raises:
            TookTooLong: one was not done by then, whether or not it lets itself be cancelled.
        """
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="rewards", daemon=True).start()
        loop, tasks = self._loop, []
        future = asyncio.run_coroutine_threadsafe(_together(coroutines, timeout, tasks), loop)
        try:
            return future.result(None if timeout is None else timeout + 2 * _GRACE)
        except TimeoutError as error:
            if future.done():
                raise  # a function's own
            blocking = asyncio.current_task(loop)
            late = [number for number, task in enumerate(tasks) if task is blocking or not task.done()]
            number = tasks.index(blocking) if blocking in tasks else min(late, default=0)
            self._loop = None  # its thread is lost; the next call starts another
            raise TookTooLong(number, blocks=blocking is not None) from error
        except BaseException:
            future.cancel()  # an interrupt of this thread
            raise


async def _together(
    coroutines: Sequence[Coroutine[Any, Any, Any]], timeout: float | None, tasks: list[asyncio.Task]
) -> list[Any]:
    """Run them as `tasks`, a list that gets a task for each."""
    tasks += [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        done, late = await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks:
            task.cancel()
        ended, _ = await asyncio.wait(tasks, timeout=_GRACE)
        errors = {task: task.exception() for task in ended if not task.cancelled()}
    for task in tasks:
        if task in done and errors.get(task) is not None:
            raise errors[task]
    if late:
        raise TookTooLong(min(map(tasks.index, late)), blocks=False)
    return [task.result() for task in tasks]
