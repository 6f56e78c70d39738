"""Calls transformers' callbacks with the state and control that they expect."""

from __future__ import annotations

from typing import Any

from transformers.trainer_callback import CallbackHandler, TrainerControl, TrainerState


class Events:
    """The arguments of every callback; any of them may return another control."""

    def __init__(self, handler: CallbackHandler, args: Any, state: TrainerState, control: TrainerControl):
        self.handler, self.args, self.state, self.control = handler, args, state, control

    def fire(self, event: str, *extra: Any) -> None:
        """Call `event` ("on_step_end", ...) of every callback, in order."""
        control = getattr(self.handler, event)(self.args, self.state, self.control, *extra)
        if not isinstance(control, TrainerControl):
            raise TypeError(f"{event} of a callback returned a {type(control).__name__}: wanted its control, or None.")
        self.control = control
