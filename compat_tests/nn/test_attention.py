"""Attention against its formula in float64, its masks, and its dropout."""

from __future__ import annotations

import functools
import re
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trl_jax.core.outputs import Packed, RowView
from trl_jax.models.decoder import checkpointed
from trl_jax.nn.attention import cudnn
from trl_jax.nn.attention.attention import attend
from trl_jax.nn.attention.inputs import AttentionInputs
from trl_jax.nn.linear import Dropout

QUICKLY = {"xla_backend_optimization_level": 0}


def formula(q, k, v, scale, seen, xp=np):
    """Softmax attention in NumPy (float64) or jax.numpy; `seen` [R, T, S] is the mask."""
    q, k, v = (x if xp is jnp else x.astype(np.float64) for x in (q, k, v))
    k, v = (xp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    scores = xp.einsum("rthc,rshc->rhts", q, k) * scale
    scores = xp.where(seen[:, None], scores, -np.inf)
    weights = xp.exp(scores - scores.max(axis=-1, keepdims=True))
    return xp.einsum("rhts,rshc->rthc", weights / weights.sum(axis=-1, keepdims=True), v)


def drawn(length, rows=2, heads=4, key_heads=2, channels=8):
    draw = np.random.default_rng(length).normal
    sizes = heads, key_heads, key_heads
    return [draw(size=(rows, length, count, channels)).astype(np.float32) for count in sizes]


@pytest.fixture(params=[True, False], ids=["blocks", "rows"])
def one_cpu(request, monkeypatch):
    """Whether causal rows are computed in blocks, as on one CPU, or whole, as elsewhere."""
    in_blocks = vars(sys.modules["trl_jax.nn.attention.attention"])["_runs_in_blocks"]
    assert in_blocks(np.zeros((1, 128, 1, 1)), AttentionInputs(1.0))
    if not request.param:
        monkeypatch.setattr("trl_jax.nn.attention.attention._runs_in_blocks", lambda q, inputs: False)
    return request.param


def test_sinks_are_keys_without_values(one_cpu):
    """With more than one block of queries; sinks below and above all scores."""
    q, k, v = drawn(300)
    sinks = np.asarray([-40.0, -1.0, 2.0, 40.0], np.float32)
    seen = np.tril(np.ones((2, 300, 300), bool))
    weights = np.einsum("rthc,rshc->rhts", q.astype(np.float64), np.repeat(k, 2, axis=2)) * 0.3
    weights = np.where(seen[:, None], np.exp(weights), 0)
    total = weights.sum(axis=-1, keepdims=True) + np.exp(sinks.astype(np.float64))[:, None, None]
    wanted = np.einsum("rhts,rshc->rthc", weights / total, np.repeat(v, 2, axis=2))
    found = jax.jit(lambda *qkv: attend(*qkv, AttentionInputs(0.3), sinks=jnp.asarray(sinks)))(q, k, v)
    np.testing.assert_allclose(found, wanted, atol=1e-6)
    np.testing.assert_allclose(found[:, :, 0], formula(q, k, v, 0.3, seen)[:, :, 0], atol=1e-6)
    assert np.abs(found[:, :, 3]).max() < 1e-12


@functools.partial(jax.jit, static_argnames="one_cpu")
def attended(q, k, v, valid, window, *, one_cpu):
    """Compiled once for all windows; `one_cpu` (static) distinguishes what was patched while tracing."""
    del one_cpu
    return attend(q, k, v, AttentionInputs(0.3, window=window, valid=valid))


@pytest.mark.parametrize("window", [None, 5, 140])
@pytest.mark.parametrize("length", [1, 20, 150])
def test_the_formula(length, window, one_cpu):
    """With one block of queries and several; windows that end within a block and across blocks."""
    q, k, v = drawn(length)
    valid = np.random.default_rng(0).random((2, length)) < 0.8
    distance = np.arange(length)[:, None] - np.arange(length)
    causal = (distance >= 0) & (distance < (window or length))
    seen = causal & (valid[:, None] | (distance == 0))
    window = None if window is None else jnp.int32(window)
    found = attended(q, k, v, valid, window, one_cpu=one_cpu)
    np.testing.assert_allclose(found, formula(q, k, v, 0.3, seen), atol=1e-6)
    free = np.broadcast_to(causal, seen.shape)
    found = attended(q, k, v, None, window, one_cpu=one_cpu)
    np.testing.assert_allclose(found, formula(q, k, v, 0.3, free), atol=1e-6)


def test_blocks_are_whole_rows(monkeypatch):
    """Forward and backward: lengths within blocks, a window per query, values with fewer channels, a soft cap."""
    (q, k, v), lengths = drawn(200, channels=12), jnp.asarray([200, 131])
    windows = jnp.asarray(np.random.default_rng(0).integers(1, 200, (2, 200)), jnp.int32)
    inputs, read = AttentionInputs(0.3, window=windows, lengths=lengths), np.arange(200)[:, None] < np.asarray(lengths)

    def results(q, k, v):
        return attend(q, k, v[..., :8], inputs, softcap=2.0) * read.T[..., None, None]

    def both():
        out, pull = jax.vjp(results, q, k, v)
        return out, *pull(jnp.cos(out))

    in_blocks = jax.jit(both, compiler_options=QUICKLY)()
    monkeypatch.setattr("trl_jax.nn.attention.attention._runs_in_blocks", lambda q, inputs: False)
    for ours, whole in zip(in_blocks, jax.jit(lambda: both(), compiler_options=QUICKLY)(), strict=True):
        np.testing.assert_allclose(ours, whole, rtol=1e-6, atol=2e-6)


def ones_seen(length, rate, seed=0, rows=16):
    """The output of each query if all values are one: 1 on average, with dropout or without."""
    q, k, _ = drawn(length, rows=rows, heads=8)
    v = np.ones_like(k)
    dropout = None if rate is None else Dropout(rate, jax.random.key(seed))
    run = jax.jit(lambda *qkv: attend(*qkv, AttentionInputs(0.01), dropout=dropout), compiler_options=QUICKLY)
    return np.asarray(run(q, k, v))


def test_dropout_keeps_the_mean():
    kept = ones_seen(150, 0.25)[:, 20:]
    assert kept.mean() == pytest.approx(1.0, abs=0.01)
    assert kept.std() > 0.02


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_dropout_drops_at_its_rate(rate):
    """The first query sees a single key: its output is that value rescaled, or zero."""
    first = ones_seen(2, rate, rows=500)[:, 0, :, 0]
    np.testing.assert_allclose(np.unique(first), [0.0, 1 / (1 - rate)], rtol=1e-6)
    assert (first == 0).mean() == pytest.approx(rate, abs=0.03)


def test_dropout_follows_its_key():
    np.testing.assert_array_equal(ones_seen(20, 0.3, seed=1), ones_seen(20, 0.3, seed=1))
    assert not np.array_equal(ones_seen(20, 0.3, seed=1), ones_seen(20, 0.3, seed=2))


def test_blocks_of_queries_drop_differently():
    kept = ones_seen(256, 0.5, rows=2)
    assert not np.array_equal(kept[:, 1:128] == 0, kept[:, 129:] == 0)
    assert not np.allclose(kept[:, 100], kept[:, 228])


def test_without_dropout_nothing_is_dropped():
    np.testing.assert_allclose(ones_seen(20, None), 1.0, rtol=1e-6)


@pytest.fixture
def hopper(monkeypatch):
    """Pretend to have a Hopper GPU, as far as lowering goes on a machine without one."""
    from jax._src.cudnn import fused_attention_stablehlo as kernels

    monkeypatch.setattr("trl_jax.nn.attention.attention.platform", lambda: "gpu")
    monkeypatch.setattr(cudnn, "platform", lambda: "gpu")
    monkeypatch.setattr(cudnn, "_capability", lambda: 9.0)
    monkeypatch.setattr(kernels, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(kernels, "check_compute_capability", lambda *wanted: True)
    monkeypatch.setattr(kernels, "is_cuda_compute_capability_equal", lambda *wanted: False)


def lowered(length, channels, *, valid=None, window=None, **options):
    """The lowered GPU program of attention gradients in bfloat16."""
    inputs = AttentionInputs(0.5, valid=valid, window=window)
    shapes = [jax.ShapeDtypeStruct((2, length, heads, channels), jnp.bfloat16) for heads in (4, 2, 2)]

    def total(*qkv):
        return attend(*qkv, inputs, **options).astype(jnp.float32).sum()

    return jax.jit(jax.grad(total, argnums=(0, 1, 2))).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("length", [64, 96, 1000])
@pytest.mark.parametrize("channels", [64, 128])
def test_gpus_get_cudnns_kernels(hopper, length, channels):
    program = lowered(length, channels)
    assert "fmhaSoftmax(" in program and "fmhaSoftmaxBackward(" in program and '"CAUSAL' in program.replace("\\22", '"')


@pytest.mark.parametrize(("capability", "fits"), [("7.5", False), ("8.0", True), ("10.0", True), ("gfx942", False)])
def test_only_gpus_that_have_the_kernel_get_it(monkeypatch, capability, fits):
    device = SimpleNamespace(compute_capability=capability)
    monkeypatch.setattr(jax, "local_devices", lambda backend: [device])
    monkeypatch.setattr(cudnn, "platform", lambda: "gpu")
    assert cudnn.supports(jnp.zeros((1, 64, 2, 64), jnp.bfloat16)) == fits


def test_gpus_read_the_texts_of_packed_rows_as_rows(hopper):
    """With the length of each text, and gathers in both directions: scatter-adds are not deterministic."""
    shapes = [jax.ShapeDtypeStruct((1, 640, heads, 64), jnp.bfloat16) for heads in (4, 2, 2)]
    tokens, of_texts = (jax.ShapeDtypeStruct((1, *size), jnp.int32) for size in ((640,), (6, 128)))
    packed = Packed(*[tokens] * 4, RowView(of_texts, jax.ShapeDtypeStruct((1, 2, 640), jnp.int32)))

    def total(q, k, v, packed):
        return attend(q, k, v, AttentionInputs(0.5, packed=packed)).astype(jnp.float32).sum()

    traced = jax.jit(jax.grad(total, argnums=(0, 1, 2))).trace(*shapes, packed)
    program = traced.lower(lowering_platforms=("cuda",)).as_text().replace("\\22", '"')
    assert "fmhaSoftmax(" in program and "fmhaSoftmaxBackward(" in program and '"PADDING_CAUSAL"' in program
    assert "stablehlo.gather" in program and "scatter" not in program


TEXTS = [[(0, 100), (130, 61)], [(5, 3), (70, 122)]]  # (start, number of tokens) of the texts in two packed rows


def of_texts(length, longest):
    """Packed rows of TEXTS, numbered in another order than they are placed; and the text of each token."""
    places, view = np.full((2, 3, longest), length, np.int32), np.full((2, 2, length), 3 * longest, np.int32)
    first, end, text = (np.full((2, length), value, np.int32) for value in (length, length, -1))
    for row, texts in enumerate(TEXTS):
        for number, (start, count) in zip((2, 0), texts, strict=True):
            at = np.arange(start, start + count)
            places[row, number, :count], view[row, 0, at] = at, number * longest + np.arange(count)
            first[row, at], end[row, at], text[row, at] = start, at + 1, number
    return Packed(first, end, np.ones_like(first), None, RowView(places, view)), text


PACKS = pytest.mark.skipif(jax.__version_info__ < (0, 11, 2), reason="older releases of JAX do not say where texts lie")


def lowered_packed(packed, channels=64, values=None, dtype=jnp.bfloat16, layers=0, **options):
    """The lowered GPU program of attention gradients along packed rows of TEXTS; `layers` puts it into a scan with the
    models' remat policy."""
    shapes = [(2, 192, heads, wide) for heads, wide in ((4, channels), (2, channels), (2, values or channels))]
    shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    inputs = AttentionInputs(0.5, window=options.pop("window", None))

    def attended(packed, *qkv):
        return attend(*qkv, inputs._replace(packed=packed), **options)

    def total(q, k, v, packed):
        if not layers:
            return attended(packed, q, k, v).astype(jnp.float32).sum()

        def layer(h, _):
            return jnp.sin(attended(packed, jnp.sin(h), k, v)), None

        body = checkpointed(layer, remat=False, length=layers)
        return jax.lax.scan(body, q, None, length=layers)[0].astype(jnp.float32).sum()

    traced = jax.jit(jax.grad(total, argnums=(0, 1, 2))).trace(*shapes, packed)
    return traced.lower(lowering_platforms=("cuda",)).as_text().replace("\\22", '"')


@PACKS
def test_gpus_read_texts_that_share_nothing_where_they_lie(hopper):
    program = lowered_packed(of_texts(192, 128)[0])
    assert "fmhaSoftmax(" in program and "fmhaSoftmaxBackward(" in program and '"max_seg_per_batch": 3' in program
    assert "x128x4x64xbf16" not in program  # as rows with one text each


@PACKS
@pytest.mark.parametrize("texts", [3, 40])
def test_the_kernel_runs_once_where_its_sums_are_smaller_than_its_results(hopper, texts):
    packed = of_texts(192, 128)[0]
    places, rows = packed.texts
    places = np.pad(places, ((0, 0), (0, texts - 3), (0, 0)), constant_values=192)
    program = lowered_packed(packed._replace(texts=RowView(places, rows)), layers=2)
    assert program.count("fmhaSoftmaxBackward(") == 1 and f'"max_seg_per_batch": {texts}' in program
    assert program.count("fmhaSoftmax(") == (1 if 2 * texts <= 64 else 2)


@pytest.mark.parametrize(
    "asked",
    [
        {"window": jnp.int32(9)}, {"softcap": 5.0}, {"sinks": jnp.zeros(4)}, {"causal": False}, {"values": 32},
        {"channels": 256}, {"dtype": jnp.float32}, {"prompt": True}, {"context": True}, {"alone": True},
        {"capability": 8.0}, {"release": (0, 10, 2)}, {"release": (0, 13, 0)},
    ],
    ids=str,
)  # fmt: skip
def test_what_it_does_not_compute_along_packed_rows_is_laid_out_as_rows(hopper, asked, monkeypatch):
    packed, options = of_texts(192, 128)[0], dict(asked)
    if options.pop("prompt", False):
        packed = packed._replace(prompt=packed.first)
    if options.pop("context", False):
        packed = packed._replace(context=packed.first, context_end=packed.first)
    if options.pop("alone", False):
        places, rows = packed.texts
        packed = packed._replace(texts=RowView(places[:, :1], rows))
    capability = options.pop("capability", 9.0)
    monkeypatch.setattr(cudnn, "_capability", lambda: capability)
    monkeypatch.setattr(jax, "__version_info__", options.pop("release", jax.__version_info__))
    program = lowered_packed(packed, **options)
    found = [int(count) for count in re.findall(r'"max_seg_per_batch": (\d+)', program)]
    assert set(found) <= {1} and "stablehlo.gather" in program


def test_the_kernel_is_told_where_texts_lie(monkeypatch):
    """A stand-in computes from cuDNN's arguments, with NaN wherever cuDNN would write nothing; compares outputs and
    gradients."""

    def told(q, k, v, bias, mask, sizes, _, starts, __, *, scale, mask_type):
        assert mask_type == "causal to the end of texts" and starts.shape[1] == sizes.shape[1] + 1
        at = jnp.arange(q.shape[1])
        inside = (at >= starts[:, :-1, None]) & (at < (starts[:, :-1] + sizes)[..., None]) & (sizes > 0)[..., None]
        number = jnp.where(inside.any(axis=1), inside.argmax(axis=1), -1)  # [R, T]
        seen = (number[:, :, None] == number[:, None]) & np.tril(np.ones((192, 192), bool))
        return jnp.where((number >= 0)[..., None, None], formula(q, k, v, scale, seen, jnp), jnp.nan)

    kernel = SimpleNamespace(
        dot_product_attention=told, MaskType=SimpleNamespace(PADDING_CAUSAL="causal to the end of texts")
    )
    monkeypatch.setattr(cudnn, "_packing", lambda: kernel)
    packed, text = of_texts(192, 128)
    q, k, v = drawn(192)
    seen = (text[:, :, None] == text[:, None]) & np.tril(np.ones((192, 192), bool))
    inside = (text >= 0)[..., None, None]

    def total(attend, q, k, v):
        out = attend(q, k, v)
        return jnp.sum(jnp.sin(out)), out

    def wanted(q, k, v):
        return jnp.where(inside, formula(q, k, v, 0.3, seen, jnp), 0)

    for scale in (0.3, jnp.float32(0.3)):

        def ours(q, k, v, scale=scale):
            return cudnn.attend_cudnn_packed(q, k, v, packed, scale=scale)

        found, expected = (
            jax.grad(functools.partial(total, attend), argnums=(0, 1, 2), has_aux=True)(q, k, v)
            for attend in (ours, wanted)
        )
        for mine, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(mine, theirs, atol=3e-6)


@pytest.mark.parametrize(
    "asked",
    [
        {"softcap": 5.0},
        {"sinks": jnp.zeros(4)},
        {"window": jnp.int32(9)},
        {"causal": False},
        {"valid": jnp.ones((2, 64), bool)},
    ],
    ids=str,
)
def test_what_cudnn_does_not_compute_is_left_to_xla(hopper, asked):
    assert "fmha" not in lowered(64, 64, **asked)
    assert "fmha" not in lowered(64, 256) and "fmha" not in lowered(65, 64)


def test_the_kernel_is_told_the_formula(monkeypatch):
    """The same call computed by XLA: grouped heads, the scale, causality."""
    told, xla = jax.nn.dot_product_attention, {"implementation": "xla"}
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda *qkv, **how: told(*qkv, **how | xla))
    q, k, v = drawn(40)
    seen = np.tril(np.ones((2, 40, 40), bool))
    for scale in (0.3, jnp.float32(0.3)):
        np.testing.assert_allclose(cudnn.attend_cudnn(q, k, v, scale=scale), formula(q, k, v, 0.3, seen), atol=2e-6)
    found = cudnn.attend_cudnn(q, k, v, scale=0.3, lengths=jnp.asarray([40, 17], jnp.int32))
    np.testing.assert_allclose(found[1, :17], formula(q, k, v, 0.3, seen)[1, :17], atol=2e-6)
