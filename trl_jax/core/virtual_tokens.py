"""Virtual tokens: what stands before each text that a model reads, and is no part of the text."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np


class VirtualTokens(NamedTuple):
    """The tokens that an adapter puts before each text.

    first: the id of the first one, as many as the vocabulary has; the others follow it.
    count: how many there are, 0 for none.
    read: whether the last of them predicts a text's first token; not where they are keys and values alone.
    """

    first: int = 0
    count: int = 0
    read: bool = True

    @property
    def ids(self) -> np.ndarray:
        """int32 `[count]`."""
        return np.arange(self.first, self.first + self.count, dtype=np.int32)

    def before(self, rows: Any) -> np.ndarray:
        """Rows of ids `[R, T]` behind the virtual tokens, int32 `[R, count + T]`."""
        rows = np.asarray(rows, np.int32)
        return np.concatenate([np.broadcast_to(self.ids, (len(rows), self.count)), rows], axis=1)


NONE = VirtualTokens()
