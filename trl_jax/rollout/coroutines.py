"""Runs asynchronous functions beside each other, from code that is not asynchronous."""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any


def unwrapped(function: Callable) -> Callable:
    """The function that a functools.partial calls in the end."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def is_async(function: Callable) -> bool:
    """Whether calling it gives a coroutine: an `async def`, a partial of one, or an object with such a `__call__`."""
    function = unwrapped(function)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


class EventLoop:
    """One event loop, in a thread that begins with the first call. It is the same for all calls, so that what
    functions keep open between them, as connections, stays open."""

    def __init__(self):
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self, coroutines: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
        """The results, in order. Where one raises, the others are cancelled and its exception is raised."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="rewards", daemon=True).start()
        future = asyncio.run_coroutine_threadsafe(_together(coroutines), self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # an interrupt of this thread
            raise


async def _together(coroutines: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
