"""Small containers that NumPy and JAX code share."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

# ----------------------------------------------------------------------------------------------------
# Packed rows: texts laid end to end in one row, and the tokens that each of its tokens attends to.


BLOCK = 64  # a packed row's length is a multiple of it; 64 is faster on a CPU than 128 and 256


class RowView(NamedTuple):
    """Indices that turn the X texts of each packed row into rows of L tokens, and back; int32, of NumPy or JAX.

    places: `[R, X, L]`, the place in its packed row of each token of a text, in order; T after the text's end. rows:
    `[R, S, T]`, the place among the X * L tokens of these rows of each token of the packed row: in its text, or in
        each of the up to S texts that share it; X * L where there is none.
    """

    places: Any
    rows: Any


class Packed(NamedTuple):
    """The range of tokens that each token of a packed row attends to; int32 arrays `[R, T]`, of NumPy or JAX.

    A token attends to the range of its row from `first` up to, but not including, `end`. So that one range is enough
    for both answers to a shared prompt, one answer lies before the prompt in reverse order, the other after it. Padding
    attends to nothing: both are the row's length.

    Any number of branches may share a context, which lies once, before them: a token of a branch attends to a second
    range, its context, from `context` up to, but not including, `context_end`, beside its own range in the branch.
    Branches do not see each other. What has no context has an empty one.

    longest: length of the longest text that TRL would have run in one batch with the token's. prompt: where the prompt
        begins that a token belongs to or follows; None where no two answers share one, and each range is in
        the order of its text.
    texts: indices for kernels that read rows, else None.
    context, context_end: None where no branches share one.
    """

    first: Any
    end: Any
    longest: Any
    prompt: Any = None
    texts: RowView | None = None
    context: Any = None
    context_end: Any = None


def reads_of_rows(places: Any, length: int) -> Any:
    """Flat places int32 `[R]`, row * T + place, of one token in each row of `length` tokens; of NumPy or JAX."""
    return places + np.arange(len(places), dtype=np.int32) * length


# ----------------------------------------------------------------------------------------------------
# Sums over the tokens that a router of experts saw. Arrays are of NumPy or JAX.


class RouterSums(NamedTuple):
    """Float32, of each layer and expert `[L, E]`, and of each layer `[L]`.

    selected: how many tokens were sent to the expert.
    probabilities: the sum of the probabilities that the router gave it.
    tokens: how many tokens were counted.
    """

    selected: Any
    probabilities: Any
    tokens: Any


# ----------------------------------------------------------------------------------------------------
# Numbers of a language model's logits at the places that are read. Arrays are of NumPy or JAX.


class TokenOutputs(NamedTuple):
    """Float32 `[N]` each, of every read; zeros where there is no target.

    logps: the log-probability of the target, log p(target).
    entropy: of the distribution, -sum p log p, in nats.
    mean_logps: the mean of log p over the vocabulary, which label smoothing asks for.
    correct: 1 where the target is the likeliest id, the first of several that are equally likely.
    mean_logits: the mean of the logits over the vocabulary. This and the next have no gradient.
    log_sum_sq_probs: log sum p^2, the log-probability that a token drawn from the distribution has, in the mean.
    """

    logps: Any
    entropy: Any
    mean_logps: Any
    correct: Any
    mean_logits: Any = None
    log_sum_sq_probs: Any = None


class Divergences(NamedTuple):
    """Float32 `[N]` each, of every read; zeros where there is no target.

    divergence: of the model's distribution from another model's, in nats.
    entropy: of the model's, in nats; without a gradient.
    """

    divergence: Any
    entropy: Any


# ----------------------------------------------------------------------------------------------------
# Virtual tokens: what stands before each text that a model reads, and is no part of the text.


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
