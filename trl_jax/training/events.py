"""Callback events, and signals that stop a run."""

from __future__ import annotations

import contextlib
import copy
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

from jax.experimental import multihost_utils
from transformers.trainer_callback import CallbackHandler, TrainerControl, TrainerState

from trl_jax.core import signals
from trl_jax.core.text import say
from trl_jax.mesh.processes import several
from trl_jax.mesh.watch import AgreedExit


class Events:
    """Fires callback events; a callback may return another control, which replaces the current one."""

    def __init__(self, handler: CallbackHandler, args: Any, state: TrainerState, control: TrainerControl):
        self.handler, self.args, self.state, self.control = handler, args, state, control

    def fire(self, event: str, *extra: Any) -> None:
        """Call `event` ("on_step_end", ...) of every callback, in order."""
        control = getattr(self.handler, event)(self.args, self.state, self.control, *extra)
        if not isinstance(control, TrainerControl):
            raise TypeError(
                f"{event} of a callback returned a {type(control).__name__}; expected its control, or None."
            )
        self.control = control

    @contextlib.contextmanager
    def at_gradients(self) -> Iterator[None]:
        """A context for the events at which callbacks could read gradients in torch."""
        model = self.handler.model
        if model is None:  # a loop without a model
            yield
            return
        model.at_gradients = True
        try:
            yield
        finally:
            model.at_gradients = False

    @contextlib.contextmanager
    def state_replaced(self, values: dict[str, Any]) -> Iterator[None]:
        """A context in which `state` has these values: tracers, while a loss is traced."""
        real = self.state
        self.state = copy.copy(real)
        vars(self.state).update(values)
        try:
            yield
        finally:
            self.state = real


# SIGTERM, SIGINT and SIGHUP: the first one lets the step finish, a second one ends the process at once.

_HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Interrupted(BaseException):
    """Raised where a signal may interrupt. Not an `Exception`, because user code might catch that."""


class Interrupts:
    """The signals of a run; `received` is the first one, or None."""

    def __init__(self):
        self.received: signal.Signals | None = None
        self._evaluating = self._waiting = False

    @contextlib.contextmanager
    def handling_signals(self, promise: str) -> Iterator[None]:
        """Handle signals within the block. `promise` tells the user what happens after the first one.

        A process that is forked within the block continues after the first SIGINT or SIGHUP, so that the step can
        finish; SIGTERM ends it. A signal that the process ignores, as under nohup, stays ignored. If that is SIGINT,
        which shells make background jobs ignore, a warning is logged. Outside of the main thread, signals are left
        alone, because Python cannot set handlers there. With several processes, JAX handles them (see `agree`).
        """
        if several() or threading.current_thread() is not threading.main_thread():
            yield
            return
        self._promise = promise
        handled = [number for number in _HANDLED if signal.getsignal(number) != signal.SIG_IGN]
        if signal.SIGINT not in handled:
            say(
                "SIGINT is ignored by this process, as in the background of a shell, and will not stop the run. "
                f"kill -TERM {os.getpid()} ends it: finishing the step, then {promise}."
            )
        self._process = os.getpid()
        before = signals.handle(handled, self._take, children_too=(signal.SIGINT, signal.SIGHUP))
        try:
            yield
        finally:
            signals.restore(before)

    def _take(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if os.getpid() != self._process:  # a worker of a reward function's pool, which the terminal also signals
            if self.received is not None:
                os._exit(128 + number)
            self.received = signal.Signals(number)
            return
        if number == signal.SIGHUP:
            _do_without_terminal()
        if self.received is not None:
            say(f"{name} again: leaving at once, without saving.")
            os._exit(128 + number)
        self.received = signal.Signals(number)
        if self._waiting:
            raise Interrupted
        doing = "ending the evaluation" if self._evaluating else "finishing this step"
        say(f"{name}: {doing}, then {self._promise}. Send it again to leave at once.")

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Within the block, `check` raises Interrupted after a signal."""
        self._evaluating = True
        try:
            yield
        finally:
            self._evaluating = False

    def check(self) -> None:
        """Interrupt an evaluation of the loop. A no-op outside of `evaluating`: a script's own evaluations finish.

        Raises:
            Interrupted: a signal was received.
        """
        if self._evaluating and self.received is not None:
            raise Interrupted

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Within the block, a signal raises Interrupted immediately; one received earlier raises at the start."""
        self._waiting = True
        try:
            if self.received is not None:
                raise Interrupted
            yield
        finally:
            self._waiting = False

    def agree(self, step: int) -> None:
        """Let several processes stop after the same step: JAX announces a SIGTERM of one to the others."""
        if several() and multihost_utils.reached_preemption_sync_point(step):
            self.received = signal.SIGTERM

    def leave(self) -> None:
        """Raise SystemExit with the exit code that shells expect for this signal: 143, 130 or 129."""
        say(f"{self.received.name}: leaving.")
        raise AgreedExit(128 + self.received)


def _do_without_terminal() -> None:
    """Redirect output to /dev/null if its terminal is gone: the next progress bar would raise before a save."""
    for handle in (1, 2):
        try:
            os.write(handle, b"")
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, handle)
            os.close(nowhere)
