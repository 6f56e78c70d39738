"""Calling a model: rows of token ids to one number each, or to logits over the vocabulary at each token."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from trl_jax.core.packed import reads_of_rows
from trl_jax.data.layout.batch import last_real_token, padded_length
from trl_jax.hub.backend import Backend
from trl_jax.models.functional import merge


class ScoreOutput(NamedTuple):
    """The result of calling a model: `logits`, float32, by attribute, name or place; `[rows, 1]` of a score head, of a
    language model's `[rows, T, V]`, T with virtual tokens before each row that have embeddings, as in PEFT."""

    logits: jax.Array

    def __getitem__(self, key: str | int) -> jax.Array:
        return self.logits if key == "logits" else tuple.__getitem__(self, key)


def score_rows(
    backend: Backend, arrays: dict[str, Any], pad: int | None, input_ids: Any, attention_mask: Any, token_type_ids: Any
) -> ScoreOutput:
    """Scores or logits of rows; `pad` is the config's pad_token_id, the others as in `PreTrainedModel.__call__`."""
    tokens = np.asarray(input_ids)
    _check(backend, pad, tokens)
    if not backend.ignores_types and token_type_ids is not None and np.any(token_type_ids):
        raise ValueError("token_type_ids has other types than 0, but a single text is scored. Leave it out.")
    mask = np.ones(tokens.shape, bool) if attention_mask is None else np.asarray(attention_mask).astype(bool)
    at = [last_real_token(row, pad) if pad is not None else len(row) - 1 for row in tokens]
    as_is = pad is None and backend.infers_lengths
    extra = 0 if as_is else padded_length(tokens.shape[1], "auto") - tokens.shape[1]
    tokens = np.pad(tokens, ((0, 0), (0, extra)), constant_values=pad or 0).astype(np.int32)
    tokens = backend.virtual.before(tokens)
    mask = np.pad(np.pad(mask, ((0, 0), (0, extra))), ((0, 0), (backend.virtual.count, 0)), constant_values=True)
    with jax.default_matmul_precision("float32"):  # accelerators would round to fewer digits
        reads = None if backend.head == "lm" else reads_of_rows(np.asarray(at, np.int32), tokens.shape[1])
        # ropes that ask for the longest text take rows as they came, as transformers' do
        by_row = reads is None and not backend.infers_lengths
        lengths = np.asarray([tokens.shape[1] - extra], np.int32) if by_row else None
        outputs = compiled_scores(backend.graph, pad, arrays, tokens, mask, reads, lengths)
    if backend.head == "score":
        return ScoreOutput(outputs[:, None])
    first = 0 if backend.virtual.read else backend.virtual.count
    return ScoreOutput(outputs.reshape(*tokens.shape, backend.vocab_size)[:, first : tokens.shape[1] - extra])


def _check(backend: Backend, pad: int | None, tokens: np.ndarray) -> None:
    if tokens.ndim != 2 or tokens.dtype.kind not in "iu":
        raise ValueError(f"input_ids must be whole numbers [rows, T], got {tokens.dtype} {list(tokens.shape)}.")
    if not tokens.shape[1]:
        raise ValueError(f"input_ids is {list(tokens.shape)}: a row needs at least one token to be read at.")
    if len(tokens) > 1 and pad is None and backend.head == "score":
        raise ValueError(
            f"{len(tokens)} rows cannot be scored without config.pad_token_id: it tells where each one ends. "
            "Set model.config.get_text_config().pad_token_id = tokenizer.pad_token_id."
        )
    longest, size = backend.max_positions, backend.vocab_size
    if longest is not None and tokens.shape[1] > longest:
        raise ValueError(
            f"input_ids has {tokens.shape[1]:,} tokens a row, but the model has positions for {longest:,}. Cut them."
        )
    if tokens.size and not 0 <= tokens.min() <= tokens.max() < size:
        raise ValueError(f"input_ids run from {tokens.min()} to {tokens.max()}, the vocabulary from 0 to {size - 1}.")


@partial(jax.jit, static_argnums=(0, 1))
def compiled_scores(
    graph: nnx.GraphDef,
    pad: int | None,
    params: dict,
    tokens: jax.Array,
    mask: jax.Array,
    reads: jax.Array | None,
    lengths: jax.Array | None = None,
) -> jax.Array:
    """Scores `[N]` or logits `[N, V]` at `reads` `[N]` of rows `[R, T]`, at all places without reads. An exported
    program is made with `pad`: another one is another program. `lengths` as in `Decoder.__call__`."""
    del pad
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    options = {} if lengths is None else {"lengths": lengths}
    return merge(graph, params)(tokens, positions, reads, valid=mask, **options)
