"""Takes callbacks, their state and the random generators back to an earlier moment."""

from __future__ import annotations

import copy
import random

import numpy as np
from transformers.trainer_callback import ExportableState

from trl_jax.engine.events import Events


class Snapshot:
    """All that an evaluation or a log line changes of what a checkpoint holds, as it was when this was made."""

    def __init__(self, events: Events):
        self._events, self._control = events, copy.copy(events.control)
        self._state = vars(events.state) | {"log_history": list(events.state.log_history)}
        stateful = [callback for callback in events.handler.callbacks if isinstance(callback, ExportableState)]
        self._callbacks = [(callback, copy.deepcopy(callback.state()["attributes"])) for callback in stateful]
        self._random = random.getstate(), np.random.get_state()

    def restore(self) -> None:
        """Make it so again."""
        self._events.control = self._control
        vars(self._events.state).update(self._state)
        for callback, attributes in self._callbacks:
            for name, value in attributes.items():
                setattr(callback, name, value)
        ours, numpys = self._random
        random.setstate(ours)
        np.random.set_state(numpys)
