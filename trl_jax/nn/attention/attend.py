"""The one place that knows which computation of attention a layout takes."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from trl_jax.nn.attention import cudnn
from trl_jax.nn.attention.cached import attend_cached
from trl_jax.nn.attention.inputs import AttentionInputs
from trl_jax.nn.attention.key_ranges import SAVED
from trl_jax.nn.attention.packed import attend_by_text, attend_packed, attend_rows
from trl_jax.nn.attention.padded import attend_padded
from trl_jax.nn.attention.row_view import by_text, by_token
from trl_jax.nn.dropout import Dropout
from trl_jax.nn.platform import platform

_ROW_BLOCKS = 128  # tokens from which on a CPU computes rows in blocks, which is two to six times as fast


def attend(
    q_RTHC: jax.Array,
    k_RSKC: jax.Array,
    v_RSKC: jax.Array,
    inputs: AttentionInputs,
    *,
    causal: bool = True,
    bias: Callable[[int, int], jax.Array] | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    dropout: Dropout | None = None,
) -> jax.Array:
    """Results `[R, T, H, C]` of queries on keys and values; the keywords are those of `attend_padded`. Values may have
    fewer channels than keys, as many as the results.

    Packed rows are attended to as they lie, or text by text where they come with a view of their texts as rows: on TPUs
    keys and values alone are put in the order of texts, elsewhere queries, too. They know no bias and no dropout, and
    `inputs.packed` says what is seen: `causal` must be what it was made for. Nor does a cache: the tokens of
    `inputs.cache` are seen beside the one of each row.
    """
    if inputs.cache is not None:
        return attend_cached(q_RTHC, k_RSKC, v_RSKC, inputs, softcap=softcap, sinks=sinks)
    packed = inputs.packed
    if packed is None and causal and bias is None and dropout is None and _in_blocks(q_RTHC, inputs):
        return _as_wide(attend_rows, q_RTHC, k_RSKC, v_RSKC, inputs, softcap=softcap, sinks=sinks)
    if packed is None:
        options = {"causal": causal, "bias": bias, "softcap": softcap, "sinks": sinks, "dropout": dropout}
        return attend_padded(q_RTHC, k_RSKC, v_RSKC, inputs, **options)
    if packed.texts is None:
        return _as_wide(attend_packed, q_RTHC, k_RSKC, v_RSKC, inputs, softcap=softcap, sinks=sinks)
    if platform() == "tpu" and causal:
        return _as_wide(attend_by_text, q_RTHC, k_RSKC, v_RSKC, inputs, softcap=softcap, sinks=sinks)
    plain = causal and softcap is None and sinks is None and inputs.window is None and inputs.striped is None
    if plain and v_RSKC.shape == k_RSKC.shape and cudnn.attends_packed(q_RTHC, packed):
        return cudnn.attend_cudnn_packed(q_RTHC, k_RSKC, v_RSKC, packed, scale=inputs.scale)
    return _attend_as_rows(q_RTHC, k_RSKC, v_RSKC, inputs, causal=causal, softcap=softcap, sinks=sinks)


def _in_blocks(q_RTHC: jax.Array, inputs: AttentionInputs) -> bool:
    """Whether causal rows go block by block: on one CPU. The blocks of all rows are walked through one after the other,
    which several devices cannot share; GPUs and TPUs are quicker with whole rows."""
    mesh = jax.sharding.get_abstract_mesh()
    alone = platform() == "cpu" and jax.device_count() == 1 and (mesh.empty or mesh.size == 1)
    return alone and q_RTHC.shape[1] >= _ROW_BLOCKS and inputs.valid is None and inputs.striped is None


def _as_wide(attend_in_blocks: Callable, q_RTHC, k_RSKC, v_RSKC, inputs: AttentionInputs, **scores):
    channels = v_RSKC.shape[-1]
    missing = k_RSKC.shape[-1] - channels  # kernels of packed rows take values as wide as keys
    if missing:
        v_RSKC = jnp.pad(v_RSKC, [(0, 0)] * 3 + [(0, missing)])
    return attend_in_blocks(q_RTHC, k_RSKC, v_RSKC, inputs, **scores)[..., :channels]


def _attend_as_rows(q_RTHC, k_RSKC, v_RSKC, inputs: AttentionInputs, *, causal: bool, **scores):
    texts = inputs.packed.texts
    inside = (texts.places < q_RTHC.shape[1]).reshape(-1, texts.places.shape[2])
    lengths = jnp.maximum(jnp.sum(inside, axis=1, dtype=jnp.int32), 1)  # a row without a text is one of a zero
    rows = inputs._replace(valid=None if causal else inside.at[:, 0].set(True), striped=None)
    if inputs.window is not None and inputs.window.ndim:  # of each query
        of_text = by_text(jax.lax.stop_gradient(inputs.window[..., None].astype(jnp.float32)), texts)
        rows = rows._replace(window=of_text[..., 0].astype(jnp.int32))
    qkv = (by_text(y, texts) for y in (q_RTHC, k_RSKC, v_RSKC))
    out = attend_padded(*qkv, rows, causal=causal, lengths=lengths, **scores)
    return checkpoint_name(by_token(out, texts), SAVED)
