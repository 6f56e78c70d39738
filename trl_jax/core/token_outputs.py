"""Numbers of a language model's logits at the places that are read. Arrays are of NumPy or JAX."""

from __future__ import annotations

from typing import Any, NamedTuple


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
