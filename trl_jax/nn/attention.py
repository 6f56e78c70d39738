"""Attention: the one place that knows how tokens of a layout may see each other."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from trl_jax.core.packed import Packed
from trl_jax.nn import cudnn
from trl_jax.nn.dropout import Dropout
from trl_jax.nn.key_ranges import SAVED
from trl_jax.nn.linear import Linear
from trl_jax.nn.norm import Norm
from trl_jax.nn.packed_attention import attend_packed
from trl_jax.nn.rope import rotate
from trl_jax.nn.row_view import by_text, by_token
from trl_jax.nn.striped import Striped

QUERY_BLOCK = 256


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    scale: float | jax.Array,
    causal: bool = True,
    bias: Callable[[int, int], jax.Array] | None = None,
    softcap: float | None = None,
    valid: jax.Array | None = None,
    window: jax.Array | None = None,
    dropout: Dropout | None = None,
    striped: Striped | None = None,
    lengths: jax.Array | None = None,
) -> jax.Array:
    """Attention on padded rows, queries `[R, T, H, C]` on keys and values `[R, T, K, C]`.

    Queries go in blocks; where they are causal, each against the keys up to its own end: the upper triangle is never
    computed. GPUs have a kernel for what is causal and nothing else.

    Args:
        scale: multiplies the scores before the softmax, which is taken in float32.
        causal: a query sees itself and what is before it; otherwise both sides.
        bias: from where a block of queries starts and ends, what is added to its scores before they are scaled,
            `[R, K, G, T, S]`.
        softcap: scores are bounded by it before masking: `softcap * tanh(scores / softcap)`.
        valid: `[R, T]` bool, keys that may be seen; None where causal and every pad stands to the right of the text.
        window: int32 scalar; a query at t sees keys s with |t - s| < window. None sees everything.
        dropout: applied to the probabilities, as transformers' attention does.
        dealt: how queries are, one by one; keys and values are those of all. None: there is every query.
        lengths: int32 `[R]`, behind which nobody reads the results: the GPUs' kernel leaves it out.
    """
    plain = causal and bias is None and softcap is None and valid is None and window is None
    if plain and dropout is None and striped is None and cudnn.attends(q):
        return cudnn.attend_cudnn(q, k, v, scale=scale, lengths=lengths)
    rows, length, heads, channels = q.shape
    grouped = q.reshape(rows, length, k.shape[2], heads // k.shape[2], channels)
    blocks = []
    for start in range(0, length, QUERY_BLOCK):
        end = min(start + QUERY_BLOCK, length)
        places = jnp.arange(start, end) if striped is None else striped.places(start, end)
        last = end * (1 if striped is None else striped.devices) if causal else k.shape[1]
        seen = _visible(places, last, causal, valid, window)
        part, added = dropout and dropout.fold(start), bias and bias(start, end)
        rows_of_block = grouped[:, start:end], k[:, :last], v[:, :last]
        blocks.append(_softmax_average(*rows_of_block, seen, scale, added, softcap, part))
    return jnp.concatenate(blocks, axis=1).reshape(q.shape)


def _visible(
    places: jax.Array, last: int, causal: bool, valid: jax.Array | None, window: jax.Array | None
) -> jax.Array:
    """Which of the keys `[0, last)` the queries at `places` see: bool, broadcasting to `[R, K, G, T, S]`."""
    distance = places[:, None] - jnp.arange(last)
    seen = distance >= 0 if causal else jnp.ones_like(distance, bool)
    if window is not None:
        seen &= jnp.abs(distance) < window
    if valid is not None:
        visible = valid[:, None, None, None, :last]
        # A pad sees itself, so that no softmax is empty; where both sides are seen, any token of the text will do.
        seen = seen & (visible | (distance == 0) if causal else visible)
    return seen


def _softmax_average(q, k, v, seen, scale, bias, softcap, dropout):
    scores = jnp.einsum("rtkgc,rskc->rkgts", q, k, preferred_element_type=jnp.float32)
    scores = (scores if bias is None else scores + bias) * scale
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    scores = jnp.where(seen, scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    if dropout is not None:
        weights = dropout(weights)
    return jnp.einsum("rkgts,rskc->rtkgc", weights, v)


def attend_texts(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    packed: Packed,
    *,
    causal: bool = True,
    striped: Striped | None = None,
    **how: float | jax.Array | None,
) -> jax.Array:
    """Attention of the texts in streams, queries `[R, T, H, C]` on keys and values `[R, T, K, C]`: along the stream, or
    row by row where it has `texts`. `how` is what both take: scale, softcap and window."""
    texts = packed.texts
    if texts is None:
        return attend_packed(q, k, v, packed, striped=striped, **how)
    own = (texts.places < q.shape[1]).reshape(-1, texts.places.shape[2])
    lengths = jnp.maximum(jnp.sum(own, axis=1, dtype=jnp.int32), 1)  # a row without a text is one of a zero
    valid = None if causal else own.at[:, 0].set(True)
    rows = (by_text(y, texts) for y in (q, k, v))
    return checkpoint_name(by_token(attend(*rows, causal=causal, valid=valid, lengths=lengths, **how), texts), SAVED)


class Attention(nnx.Module):
    """Grouped-query self-attention with rotary positions; `arch` is a models.arch.Arch."""

    def __init__(self, arch):
        size_q, size_k = arch.num_heads * arch.head_dim, arch.num_key_heads * arch.head_dim
        self.q = Linear(arch.hidden_size, size_q, bias=arch.qkv_bias)
        self.k = Linear(arch.hidden_size, size_k, bias=arch.qkv_bias)
        self.v = Linear(arch.hidden_size, size_k, bias=arch.qkv_bias)
        self.o = Linear(size_q, arch.hidden_size, bias=arch.o_bias)
        self.q_norm, self.k_norm = _norm_of_heads(arch, arch.num_heads), _norm_of_heads(arch, arch.num_key_heads)
        self.arch = arch

    def __call__(
        self, x, *, cos, sin, scale, growth=None, valid=None, window=None, dropout=None, packed=None, striped=None
    ):  # fmt: skip
        """`[R, T, D]` to the same.

        Args:
            cos, sin: as `rotate` takes them; None leaves positions out.
            scale, valid, window, dropout: as `attend` takes them.
            growth: float32 `[R, T, 1, 1]`, what queries are multiplied by; None does not.
            stream: as `attend_texts` takes it, where the rows are streams; without dropout.
            dealt: how tokens are; None where this device has all.
        """
        arch = self.arch
        q, k, v = self.q(x), self.k(x), self.v(x)
        if arch.qk_norm == "full":
            q, k = self.q_norm(q), self.k_norm(k)
        if arch.clip_qkv is not None:
            q, k, v = (jnp.clip(y, -arch.clip_qkv, arch.clip_qkv) for y in (q, k, v))
        q_RTHC, k_RTKC, v_RTKC = self._heads(q), self._heads(k), self._heads(v)
        per_head = arch.qk_norm in ("head", "each_head")
        if per_head and not arch.qk_norm_after_rope:
            q_RTHC, k_RTKC = self.q_norm(q_RTHC), self.k_norm(k_RTKC)
        if cos is not None:
            q_RTHC, k_RTKC = (rotate(y, cos, sin, interleaved=arch.rope_interleaved) for y in (q_RTHC, k_RTKC))
        if per_head and arch.qk_norm_after_rope:
            q_RTHC, k_RTKC = self.q_norm(q_RTHC), self.k_norm(k_RTKC)
        if growth is not None:
            q_RTHC = q_RTHC * growth.astype(q_RTHC.dtype)
        if striped is not None:
            k_RTKC, v_RTKC = striped.gathered(k_RTKC), striped.gathered(v_RTKC)
        how = {"scale": scale, "softcap": arch.softcap, "window": window, "striped": striped}
        if packed is None:
            out = attend(q_RTHC, k_RTKC, v_RTKC, valid=valid, dropout=dropout, **how)
        else:
            out = attend_texts(q_RTHC, k_RTKC, v_RTKC, packed, **how)
        return self.o(out.reshape(q.shape))

    def _heads(self, x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:-1], -1, self.arch.head_dim)


def _norm_of_heads(arch, heads: int) -> Norm | None:
    shapes = {"head": (arch.head_dim,), "each_head": (heads, arch.head_dim), "full": (heads * arch.head_dim,)}
    return Norm(*shapes[arch.qk_norm], kind=arch.qk_norm_kind, eps=arch.norm_eps) if arch.qk_norm else None
