"""Small containers shared by NumPy and JAX code. Fields annotated `Any` are NumPy or JAX arrays."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

# Packed rows: several texts concatenated in one row

BLOCK = 64  # the length of a packed row is a multiple of this; on a CPU, 64 is faster than 128 or 256


class RowView(NamedTuple):
    """Int32 indices that convert packed rows to one padded row of L tokens per text (X texts per packed row), and back.

    places: `[R, X, L]`, the position in the packed row of each token of a text, in order; T after the end of the text.
    rows: `[R, S, T]`, for each token of the packed row its index among the X * L tokens of the padded rows. A token
        shared by several texts has up to S indices, one per text; X * L marks unused entries.
    """

    places: Any
    rows: Any


class Packed(NamedTuple):
    """The range of tokens that each token of a packed row attends to; int32 arrays `[R, T]`.

    A token attends to the tokens `first <= t < end` of its row. If two completions share a prompt, one of them precedes
    the prompt in reverse order and the other follows it, so that one contiguous range is enough for each token. Padding
    attends to nothing: `first` and `end` are both the row length.

    Any number of branches may share a context, which is stored once, before them. A token of a branch attends to a
    second range, `context <= t < context_end`, in addition to its own range within the branch. Branches do not see each
    other. Tokens without a context have an empty one.

    longest: length of the longest text in TRL's batch with this token, for ropes that depend on it.
    prompt: start of the prompt that a token belongs to or follows; None if no two completions share a prompt, in which
        case all texts are in their natural order.
    texts: indices for kernels that need one text per row, or None.
    context, context_end: None if no branches share a context.
    """

    first: Any
    end: Any
    longest: Any
    prompt: Any = None
    texts: RowView | None = None
    context: Any = None
    context_end: Any = None


def reads_of_rows(places: Any, length: int) -> Any:
    """Flat int32 indices `[R]`, row * T + column, of one token per row of `length` tokens."""
    return places + np.arange(len(places), dtype=np.int32) * length


# Outputs of models


class RouterSums(NamedTuple):
    """Sums over the tokens seen by the MoE routers, float32: `[L, E]` per layer and expert, or `[L]` per layer.

    selected: `[L, E]`, how many tokens have the expert among their `top_k` most probable ones.
    probabilities: `[L, E]`, the sum of the expert's router probabilities.
    tokens: `[L]`, the number of tokens.
    """

    selected: Any
    probabilities: Any
    tokens: Any


class TokenOutputs(NamedTuple):
    """Outputs of a language model head at N reads, float32 `[N]` each; 0 for reads without a target.

    logps: log p(target).
    entropy: of the distribution, -sum p log p, in nats.
    mean_logps: the mean of log p over the vocabulary, used by label smoothing.
    correct: 1 if the target is the argmax (the first one, if there are ties).
    mean_logits: the mean logit over the vocabulary; no gradient.
    log_sum_sq_probs: log sum p^2; no gradient.
    """

    logps: Any
    entropy: Any
    mean_logps: Any
    correct: Any
    mean_logits: Any = None
    log_sum_sq_probs: Any = None


class Divergences(NamedTuple):
    """Divergence between two models at N reads, float32 `[N]` each; 0 for reads without a target.

    divergence: of the model's distribution from the other model's, in nats.
    entropy: of the model's distribution, in nats; no gradient.
    """

    divergence: Any
    entropy: Any


# Images


class Images(NamedTuple):
    """The images of a batch: the patches of all images, concatenated, and the tokens that their features replace.

    S is the number of shards of the batch (1 on one device); the rows of a shard only refer to its own images. P counts
    patches and F features of a shard, both padded.

    patches: float32 `[S, P, C]`, the pixel values of each patch, in the order of the tower's convolution weights.
    places: int32 `[S, P, 2]`, row and column of each patch in its image, for towers with ropes.
    first, end: int32 `[S, P]`, the range of patches that each patch attends to, which is its image. Padding attends to
        nothing: both are P.
    groups: int32 `[S, F, K]`, the patches from which the connector computes each feature.
    at: int32 `[R, T]`, the index of the feature that replaces each token's embedding; -1 for other tokens.
    window_first, window_end: as `first` and `end`, for layers that attend within windows; None without such layers.
    table: int32 `[S, P, N]`, the rows of the learned position table that are summed for each patch; None for towers
        without such a table.
    table_weights: float32 `[S, P, N]`, their weights (interpolation); None: 1.
    """

    patches: Any
    places: Any
    first: Any
    end: Any
    groups: Any
    at: Any
    window_first: Any = None
    window_end: Any = None
    table: Any = None
    table_weights: Any = None


class PrecomputedFeatures(NamedTuple):
    """Precomputed features of a batch's images, in place of `Images`; S, F and `at` as there.

    values: `[S, F, D]` in any float dtype, in each shard followed by the separators.
    deep: `[S, L, F, D]`, features to add to the residual stream after each of the first L layers, or None.
    of_reference: the features from the reference's tower, without `at`; None if it shares the policy's tower.
    """

    values: Any
    deep: Any
    at: Any
    of_reference: PrecomputedFeatures | None = None


# Virtual tokens


class VirtualTokens(NamedTuple):
    """The virtual tokens that an adapter (prompt tuning, prefix tuning, P-tuning) prepends to each text.

    first: the id of the first virtual token, which is the vocabulary size; the others follow.
    count: number of virtual tokens; 0 for none.
    read: whether the last one predicts the first token of the text; False if they only exist as keys and values.
    """

    first: int = 0
    count: int = 0
    read: bool = True

    @property
    def ids(self) -> np.ndarray:
        """Ids of the virtual tokens, int32 `[count]`."""
        return np.arange(self.first, self.first + self.count, dtype=np.int32)

    def before(self, rows: Any) -> np.ndarray:
        """Prepend the virtual tokens to rows of ids `[R, T]`: int32 `[R, count + T]`."""
        rows = np.asarray(rows, np.int32)
        return np.concatenate([np.broadcast_to(self.ids, (len(rows), self.count)), rows], axis=1)


NO_VIRTUAL_TOKENS = VirtualTokens()
