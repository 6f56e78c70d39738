"""Attention layers and the choice of kernel, attention over padded rows, and attention over a cache."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from trl_jax.core.outputs import RowView
from trl_jax.mesh.mesh import platform
from trl_jax.nn.attention import cudnn
from trl_jax.nn.attention.inputs import SAVED, AttentionInputs, cached_masks, continued_mask, padded_mask
from trl_jax.nn.attention.packed import attend_by_text, attend_packed, attend_rows
from trl_jax.nn.cache import NewTokens
from trl_jax.nn.layers import Norm
from trl_jax.nn.linear import ClippedLinear, Dropout, Linear
from trl_jax.nn.rope import rotate
from trl_jax.nn.text_order import by_text, by_token
from trl_jax.nn.virtual_tokens import Prefix

# Decoder attention


class Attention(nnx.Module):
    """Grouped-query self-attention with rotary positions; `arch` is a models.arch.Arch, `kind` a LayerKind.

    `prefix` holds the keys and values of virtual tokens, if an adapter prepends virtual tokens to each text.
    """

    prefix: Prefix | None

    def __init__(self, arch, kind):
        heads, makes, linear = arch.heads_of(kind), not kind.reuses, ClippedLinear if arch.clipped_maps else Linear
        size_q, size_k = arch.num_heads * heads.channels, heads.count * heads.channels
        self.q = linear(arch.hidden_size, size_q, bias=arch.qkv_bias, axes=("heads", "embed"))
        gate = Linear(arch.hidden_size, size_q, bias=arch.qkv_bias, axes=("heads", "embed"))
        self.gate = gate if arch.gated_attention else None
        k, v = (linear(arch.hidden_size, size_k, bias=arch.qkv_bias, axes=("kv", "embed")) for _ in range(2))
        self.k, self.v = k if makes else None, v if makes and not heads.values_are_keys else None
        self.o = linear(size_q, arch.hidden_size, bias=arch.o_bias, axes=("embed", "heads"))
        self.sinks = nnx.Param(jnp.zeros(arch.num_heads, jnp.float32), axes=("heads",)) if arch.sinks else None
        self.q_norm = _head_norm(arch, arch.num_heads, heads.channels)
        self.k_norm = _head_norm(arch, heads.count, heads.channels) if makes else None
        self.v_norm = Norm(heads.channels, kind="rms_plain", eps=arch.norm_eps) if arch.v_norm and makes else None
        self.prefix = nnx.data(None)
        self.arch, self.channels, self.no_rope = arch, heads.channels, kind.no_rope

    def __call__(
        self, x_RTD: jax.Array, inputs: AttentionInputs, dropout: Dropout | None = None
    ) -> tuple[jax.Array, tuple[NewTokens, NewTokens]]:
        """`[R, T, D]` to `[R, T, D]`, and the keys and values for the cache; dropout is only supported for padded
        rows."""
        q_RTHC = self._queries(x_RTD, inputs)
        if inputs.reused is None:
            k_RTKC, v_RTKC = self._keys_values(x_RTD, inputs)
        else:
            k_RTKC, v_RTKC = (tokens.array for tokens in inputs.reused)
        if inputs.query_scale is not None and (self.no_rope or not self.arch.query_growth.no_rope):
            q_RTHC = q_RTHC * inputs.query_scale.astype(q_RTHC.dtype)
        scores = {"softcap": self.arch.softcap, "sinks": None if self.sinks is None else self.sinks[...]}
        out = attend(q_RTHC, k_RTKC, v_RTKC, inputs, **scores, dropout=dropout)
        out = out.reshape(*x_RTD.shape[:-1], -1)
        if self.gate is not None:
            out = out * jax.nn.sigmoid(self.gate(x_RTD))
        return self.o(out), (NewTokens(k_RTKC, token_axis=-1), NewTokens(v_RTKC))

    def _queries(self, x_RTD: jax.Array, inputs: AttentionInputs) -> jax.Array:
        """Queries, normed and rotated."""
        return self._norm_and_rotate(self._split_heads(self.q(x_RTD), self.q_norm), self.q_norm, inputs)

    def _keys_values(self, x_RTD: jax.Array, inputs: AttentionInputs) -> tuple[jax.Array, jax.Array]:
        """Keys and values, gathered from all devices if tokens are striped."""
        k = self.k(x_RTD)
        v_RTKC = self._split_heads(k if self.v is None else self.v(x_RTD))
        k_RTKC = self._norm_and_rotate(self._split_heads(k, self.k_norm), self.k_norm, inputs)
        v_RTKC = v_RTKC if self.v_norm is None else self.v_norm(v_RTKC)
        if self.prefix is not None and inputs.cache is None:  # tokens after the prefill are not virtual
            k_RTKC, v_RTKC = self.prefix(k_RTKC, v_RTKC, inputs.virtual)
        if inputs.striped is not None:
            return inputs.striped.gathered(k_RTKC), inputs.striped.gathered(v_RTKC)
        return k_RTKC, v_RTKC

    def _split_heads(self, y: jax.Array, norm: Norm | None = None) -> jax.Array:
        """Norm over all heads (if the arch has one), clip, and split into heads."""
        if self.arch.qk_norm == "full" and norm is not None:
            y = norm(y)
        if self.arch.clip_qkv is not None:
            y = jnp.clip(y, -self.arch.clip_qkv, self.arch.clip_qkv)
        return y.reshape(*y.shape[:-1], -1, self.channels)

    def _norm_and_rotate(self, y: jax.Array, norm: Norm | None, inputs: AttentionInputs) -> jax.Array:
        """Norm per head (if the arch has one) and apply the rope, to queries or keys."""
        arch, per_head = self.arch, self.arch.qk_norm in ("head", "each_head") and not self.no_rope
        if per_head and not arch.qk_norm_after_rope:
            y = norm(y)
        if inputs.cos is not None:
            cos, sin = (angle[..., : self.channels // 2] for angle in (inputs.cos, inputs.sin))
            y = rotate(y, cos, sin, interleaved=arch.rope_interleaved, sections=arch.rope_sections)
        return norm(y) if per_head and arch.qk_norm_after_rope else y


def _head_norm(arch, heads: int, channels: int) -> Norm | None:
    shapes = {"head": (channels,), "each_head": (heads, channels), "full": (heads * channels,)}
    return Norm(*shapes[arch.qk_norm], kind=arch.qk_norm_kind, eps=arch.norm_eps) if arch.qk_norm else None


# Encoder attention


class BidirectionalAttention(nnx.Module):
    """Every token attends to every other. `bias` applies to all four linear maps."""

    def __init__(self, features: int, heads: int, *, bias: bool):
        self.q = Linear(features, features, bias=bias, axes=("heads", "embed"))
        self.k, self.v = (Linear(features, features, bias=bias, axes=("kv", "embed")) for _ in range(2))
        self.o = Linear(features, features, bias=bias, axes=("embed", "heads"))
        self.head_dim = features // heads

    def __call__(self, x_RTD: jax.Array, inputs: AttentionInputs, dropout: Dropout | None = None) -> jax.Array:
        """`[R, T, D]` to `[R, T, D]`; dropout is only supported for padded rows."""
        heads = (*x_RTD.shape[:-1], -1, self.head_dim)
        q_RTHC, k_RTHC, v_RTHC = (linear(x_RTD).reshape(heads) for linear in (self.q, self.k, self.v))
        if inputs.cos is not None:
            q_RTHC, k_RTHC = (rotate(y, inputs.cos, inputs.sin) for y in (q_RTHC, k_RTHC))
        out = attend(q_RTHC, k_RTHC, v_RTHC, inputs, causal=False, dropout=dropout)
        return self.o(out.reshape(x_RTD.shape))


# Choice of kernel

_ROW_BLOCKS = 128  # from this length on, computing rows in blocks is two to six times faster on a CPU


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
    """Choose and run a kernel: `[R, T, H, C]`. Keyword arguments as in `attend_padded`. Values (and results) may have
    fewer channels than keys.

    Packed rows are computed in place or, if `packed.texts` is set, as one row per text: on TPUs, only keys and values
    are rearranged, elsewhere queries, too. `inputs.packed` determines what is visible; `causal` must match it. With
    `inputs.cache`, a row's only token attends to the cache and itself; rows with more tokens continue the prompts of
    the cache (`attend_continued`). Packed rows and caches do not support bias and dropout.
    """
    if inputs.cache is not None:
        over_cache = attend_cached if q_RTHC.shape[1] == 1 else attend_continued
        return over_cache(q_RTHC, k_RSKC, v_RSKC, inputs, softcap=softcap, sinks=sinks)
    packed = inputs.packed
    if packed is None and causal and bias is None and dropout is None and _runs_in_blocks(q_RTHC, inputs):
        return _with_wide_values(attend_rows, q_RTHC, k_RSKC, v_RSKC, inputs, softcap=softcap, sinks=sinks)
    if packed is None:
        options = {"causal": causal, "bias": bias, "softcap": softcap, "sinks": sinks, "dropout": dropout}
        return attend_padded(q_RTHC, k_RSKC, v_RSKC, inputs, **options)
    if packed.texts is None:
        return _with_wide_values(attend_packed, q_RTHC, k_RSKC, v_RSKC, inputs, softcap=softcap, sinks=sinks)
    if platform() == "tpu" and causal:
        return _with_wide_values(attend_by_text, q_RTHC, k_RSKC, v_RSKC, inputs, softcap=softcap, sinks=sinks)
    plain = causal and softcap is None and sinks is None and inputs.window is None and inputs.striped is None
    plain = plain and inputs.ahead is None
    if plain and v_RSKC.shape == k_RSKC.shape and cudnn.supports_packed(q_RTHC, packed):
        return cudnn.attend_cudnn_packed(q_RTHC, k_RSKC, v_RSKC, packed, scale=inputs.scale)
    return _attend_text_rows(q_RTHC, k_RSKC, v_RSKC, inputs, causal=causal, softcap=softcap, sinks=sinks)


def _runs_in_blocks(q_RTHC: jax.Array, inputs: AttentionInputs) -> bool:
    """Whether to compute causal rows block by block: only on a single CPU device. The loop over the blocks of all rows
    is sequential, so it cannot be sharded; GPUs and TPUs are faster with whole rows."""
    mesh = jax.sharding.get_abstract_mesh()
    alone = platform() == "cpu" and jax.device_count() == 1 and (mesh.empty or mesh.size == 1)
    return alone and q_RTHC.shape[1] >= _ROW_BLOCKS and inputs.valid is None and inputs.striped is None


def _with_wide_values(attend_in_blocks: Callable, q_RTHC, k_RSKC, v_RSKC, inputs: AttentionInputs, **scores):
    channels = v_RSKC.shape[-1]
    missing = k_RSKC.shape[-1] - channels  # packed kernels need values as wide as keys
    if missing:
        v_RSKC = jnp.pad(v_RSKC, [(0, 0)] * 3 + [(0, missing)])
    return attend_in_blocks(q_RTHC, k_RSKC, v_RSKC, inputs, **scores)[..., :channels]


def _attend_text_rows(q_RTHC, k_RSKC, v_RSKC, inputs: AttentionInputs, *, causal: bool, **scores):
    texts = inputs.packed.texts
    inside = (texts.places < q_RTHC.shape[1]).reshape(-1, texts.places.shape[2])
    lengths = jnp.maximum(jnp.sum(inside, axis=1, dtype=jnp.int32), 1)  # a row without a text gets one zero token
    rows = inputs._replace(valid=None if causal else inside.at[:, 0].set(True), striped=None)
    if inputs.window is not None and inputs.window.ndim:  # a window per query
        rows = rows._replace(window=_numbers_by_text(inputs.window, texts))
    if inputs.ahead is not None:
        rows = rows._replace(ahead=_numbers_by_text(inputs.ahead, texts))
    qkv = (by_text(y, texts) for y in (q_RTHC, k_RSKC, v_RSKC))
    out = attend_padded(*qkv, rows, causal=causal, lengths=lengths, **scores)
    return checkpoint_name(by_token(out, texts), SAVED)


def _numbers_by_text(numbers: jax.Array, texts: RowView) -> jax.Array:
    """Integers per token, int32 `[R, T]`, rearranged like `by_text`."""
    return by_text(jax.lax.stop_gradient(numbers[..., None].astype(jnp.float32)), texts)[..., 0].astype(jnp.int32)


# Decoding with a cache. M = (completions per prompt) x (query heads per key head).


def attend_cached(
    q_RTHC: jax.Array,
    k_RTKC: jax.Array,
    v_RTKC: jax.Array,
    inputs: AttentionInputs,
    *,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Attention of one query per row over the cache `inputs.cache` and its own key and value: `[R, 1, H, C]`.

    Reads scale, window, cache and fill of `inputs`; `sinks` as in `attend_padded`. The softmax spans three parts, the
    shared prompt, the completion and the token itself, combined by their maximum and sum (Milakov and Gimelshein 2018,
    arXiv:1805.02867).
    """
    keys, values = inputs.cache
    prompts, heads, places, channels = keys.prompts.shape
    group, capacity = values.completions.shape[1], values.completions.shape[3]
    q_PGKMC = q_RTHC.reshape(prompts, group, heads, -1, channels)
    own_k, own_v = (y.reshape(prompts, group, heads, 1, -1) for y in (k_RTKC, v_RTKC))
    seen_PS, seen_PT = cached_masks(inputs, places, capacity)
    q_PKMC = q_PGKMC.swapaxes(1, 2).reshape(prompts, heads, -1, channels)  # batch the queries of a prompt's completions
    of_prompt = _dot("pkmc,pksc->pkms", q_PKMC, keys.prompts).reshape(prompts, heads, group, -1, places)
    of_own = _dot("pgkmc,pgkct->pgkmt", q_PGKMC, keys.completions)
    scores = [
        _masked(_scaled_and_capped(of_prompt.swapaxes(1, 2), inputs.scale, softcap), seen_PS[:, None, None, None]),
        _masked(_scaled_and_capped(of_own, inputs.scale, softcap), seen_PT[:, None, None, None]),
        _scaled_and_capped(_dot("pgkmc,pgktc->pgkmt", q_PGKMC, own_k), inputs.scale, softcap),
    ]
    sinks_KM1 = None if sinks is None else sinks.astype(jnp.float32).reshape(heads, -1, 1)
    weights = _joint_softmax(scores, sinks_KM1, v_RTKC.dtype)
    by_prompt = weights[0].swapaxes(1, 2).reshape(prompts, heads, -1, places)
    out_prompt = _dot("pkms,pksc->pkmc", by_prompt, values.prompts)
    out_prompt = out_prompt.reshape(prompts, heads, group, -1, own_v.shape[-1])
    out = out_prompt.swapaxes(1, 2) + _dot("pgkmt,pgktc->pgkmc", weights[1], values.completions) + weights[2] * own_v
    return out.astype(v_RTKC.dtype).reshape(*q_RTHC.shape[:-1], -1)


def attend_continued(
    q_RTHC: jax.Array,
    k_RTKC: jax.Array,
    v_RTKC: jax.Array,
    inputs: AttentionInputs,
    *,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Attention of tokens that continue the prompts of the cache `inputs.cache`, which has no completions yet:
    `[R, T, H, C]`. Each token attends to its row's prompt, and to the tokens of its row up to itself.

    Reads scale, window, cache and fill of `inputs`; `sinks` as in `attend_padded`.
    """
    keys, values = inputs.cache
    rows, length, heads, channels = q_RTHC.shape
    num_kv, places = keys.prompts.shape[1:3]
    k_RSKC, v_RSKC = (
        jnp.concatenate([cache.prompts.swapaxes(1, 2).astype(new.dtype), new], axis=1)
        for cache, new in ((keys, k_RTKC), (values, v_RTKC))
    )
    mask = continued_mask(inputs, places, length)
    q_RTKGC = q_RTHC.reshape(rows, length, num_kv, heads // num_kv, channels)
    sinks_KG11 = None if sinks is None else sinks.reshape(*q_RTKGC.shape[2:4], 1, 1)
    out = _softmax_average(q_RTKGC, k_RSKC, v_RSKC, mask[:, None, None], inputs.scale, None, softcap, sinks_KG11, None)
    return out.reshape(rows, length, heads, -1)


def _dot(form: str, left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.einsum(form, left, right, preferred_element_type=jnp.float32)


def _scaled_and_capped(scores: jax.Array, scale: float | jax.Array, softcap: float | None) -> jax.Array:
    scores = scores * scale
    return scores if softcap is None else softcap * jnp.tanh(scores / softcap)


def _masked(scores: jax.Array, seen: jax.Array) -> jax.Array:
    return jnp.where(seen, scores, -jnp.inf)


def _joint_softmax(parts: list[jax.Array], sinks: jax.Array | None, dtype: jnp.dtype) -> list[jax.Array]:
    """Joint softmax over the last axes of all parts, rounded to `dtype`. The last part is never masked."""
    highest = parts[-1] if sinks is None else jnp.maximum(parts[-1], sinks)
    for part in parts[:-1]:
        highest = jnp.maximum(highest, jnp.max(part, axis=-1, keepdims=True))
    weights = [jnp.exp(part - highest) for part in parts]
    total = sum(jnp.sum(part, axis=-1, keepdims=True) for part in weights)
    if sinks is not None:
        total += jnp.exp(sinks - highest)
    return [(part / total).astype(dtype) for part in weights]


# Padded rows

QUERY_BLOCK = 256


def attend_padded(
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
    lengths: jax.Array | None = None,
) -> jax.Array:
    """Attention `[R, T, H, C]` on rows of one text each. S = T, or the tokens of all devices if they are striped.

    Queries are processed in blocks. Causal blocks use only the keys up to their own end, so the upper triangle is never
    computed, except with `inputs.ahead`. GPUs use a cuDNN kernel for plain causal attention.

    Args:
        inputs: scale, window, ahead, valid and striped are used.
        causal: queries attend to themselves, earlier tokens, and tokens that `ahead` adds; otherwise in both
            directions.
        bias: (start, end of a block of queries) -> `[R, K, G, T, S]`, added to the scores before scaling.
        softcap: scores become `softcap * tanh(scores / softcap)` before masking.
        sinks: float32 `[H]`, an extra score per head that joins the softmax's sum but carries no value (OpenAI 2025,
            arXiv:2508.10925).
        dropout: applied to the probabilities, as in transformers.
        lengths: int32 `[R]`; results past these lengths are not used, and the GPU kernel does not compute them.
    """
    scale, striped = inputs.scale, inputs.striped
    plain = causal and bias is None and softcap is None and sinks is None and v_RSKC.shape == k_RSKC.shape
    plain = plain and inputs.valid is None and inputs.window is None and inputs.ahead is None
    if plain and dropout is None and striped is None and cudnn.supports(q_RTHC):
        return cudnn.attend_cudnn(q_RTHC, k_RSKC, v_RSKC, scale=scale, lengths=lengths)
    rows, length, heads, channels = q_RTHC.shape
    q_RTKGC = q_RTHC.reshape(rows, length, k_RSKC.shape[2], heads // k_RSKC.shape[2], channels)
    sinks_KG11 = None if sinks is None else sinks.reshape(*q_RTKGC.shape[2:4], 1, 1)
    blocks = []
    for start in range(0, length, QUERY_BLOCK):
        end = min(start + QUERY_BLOCK, length)
        places_T = jnp.arange(start, end) if striped is None else striped.places(start, end)
        last = end * (1 if striped is None else striped.devices) if causal else k_RSKC.shape[1]
        last = last if inputs.ahead is None else k_RSKC.shape[1]
        window, ahead = (_of_queries(array, start, end) for array in (inputs.window, inputs.ahead))
        mask = padded_mask(inputs._replace(window=window, ahead=ahead), places_T, last, causal=causal)
        block_dropout, block_bias = dropout and dropout.fold(start), bias and bias(start, end)
        qkv = q_RTKGC[:, start:end], k_RSKC[:, :last], v_RSKC[:, :last]
        blocks.append(_softmax_average(*qkv, mask, scale, block_bias, softcap, sinks_KG11, block_dropout))
    return jnp.concatenate(blocks, axis=1).reshape(rows, length, heads, -1)


def _of_queries(numbers: jax.Array | None, start: int, end: int) -> jax.Array | None:
    """The numbers of these queries, broadcastable to `[R, K, G, T, S]`; scalars and None are returned unchanged."""
    return numbers if numbers is None or numbers.ndim == 0 else numbers[:, None, None, start:end, None]


def _softmax_average(q_RTKGC, k_RSKC, v_RSKC, mask, scale, bias, softcap, sinks_KG11, dropout):
    scores = jnp.einsum("rtkgc,rskc->rkgts", q_RTKGC, k_RSKC, preferred_element_type=jnp.float32)
    scores = (scores if bias is None else scores + bias) * scale
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    scores = jnp.where(mask, scores, jnp.finfo(jnp.float32).min)
    weights_RKGTS = _softmax_with_sinks(scores, sinks_KG11).astype(v_RSKC.dtype)
    if dropout is not None:
        weights_RKGTS = dropout(weights_RKGTS)
    return jnp.einsum("rkgts,rskc->rtkgc", weights_RKGTS, v_RSKC)


def _softmax_with_sinks(scores: jax.Array, sinks: jax.Array | None) -> jax.Array:
    """Softmax over the last axis; with sinks, the probabilities of a row add up to less than 1."""
    if sinks is None:
        return jax.nn.softmax(scores, axis=-1)
    log_sum = jax.nn.logsumexp(scores, axis=-1, keepdims=True)
    return jnp.exp(scores - jnp.logaddexp(log_sum, sinks.astype(scores.dtype)))
