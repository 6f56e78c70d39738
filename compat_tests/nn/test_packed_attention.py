"""Attention along packed rows against the formula in float64: outputs and gradients, on random layouts."""

from __future__ import annotations

import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from compat_tests.effort import usual
from trl_jax.core.outputs import BLOCK, Packed, RowView
from trl_jax.mesh.mesh import make_mesh
from trl_jax.nn.attention import packed, splash
from trl_jax.nn.attention.attention import attend
from trl_jax.nn.attention.inputs import AttentionInputs
from trl_jax.nn.attention.packed import attend_packed
from trl_jax.plan.chips import topology
from trl_jax.plan.compile import devices


def drawn(seed, length, rows=1, longest=150):
    """Pairs with and without a common prompt until the rows are almost full: (packed rows, positions, who).

    who: the pair and the branch (0 prompt, 1 chosen, 2 rejected) of each token; -1 for padding.
    """
    dice = np.random.default_rng(seed)
    positions, who = np.zeros((rows, length), np.int32), np.full((rows, length, 2), -1)
    first, end, begin = (np.full((rows, length), length, np.int32) for _ in range(3))
    for row in range(rows):
        at, pair = 0, 0
        while at < length - 3:
            left = length - at
            shared = int(dice.integers(0, min(longest, left - 2)))
            chosen, rejected = (int(dice.integers(1, max(2, min(longest, (left - shared) // 2)))) for _ in "cr")
            prompt, branch = at + chosen, at + chosen + shared
            before, behind = np.arange(at, prompt), np.arange(prompt, branch + rejected)
            first[row, before], end[row, before] = before, branch
            first[row, behind], end[row, behind] = prompt, behind + 1
            begin[row, at : branch + rejected] = prompt
            positions[row, before], positions[row, behind] = branch - 1 - before, behind - prompt
            who[row, at : behind[-1] + 1, 0] = pair
            who[row, at : behind[-1] + 1, 1] = [1] * chosen + [0] * shared + [2] * rejected
            at, pair = branch + rejected, pair + 1
    return Packed(first, end, np.zeros_like(first), begin), positions, who


def as_rows(positions, who, length):
    """The same texts as rows of this length; the last row is empty."""
    found = [
        [
            at[np.argsort(positions[row][at])]
            for pair in range(who[row, :, 0].max() + 1)
            for side in (1, 2)
            if len(at := np.flatnonzero((who[row, :, 0] == pair) & np.isin(who[row, :, 1], (0, side))))
        ]
        for row in range(len(who))
    ]
    count, total = max(map(len, found)) + 1, who.shape[1]
    places = np.full((len(who), count, length), total, np.int32)
    rows = np.full((len(who), 2, total), count * length, np.int32)
    for row, texts in enumerate(found):
        for number, at in enumerate(texts):
            places[row, number, : len(at)], own = at, number * length + np.arange(len(at), dtype=np.int32)
            taken = rows[row, 0, at] < count * length
            rows[row, 0, at[~taken]], rows[row, 1, at[taken]] = own[~taken], own[taken]
    return RowView(places, rows)


def formula(q, k, v, sinks, who, positions, scale, softcap, window):
    """Softmax attention over all tokens with a mask from `who`; a sink is an additional key without a value."""
    group = q.shape[2] // k.shape[2]
    k, v = jnp.repeat(k, group, axis=2), jnp.repeat(v, group, axis=2)
    scores = jnp.einsum("rthc,rshc->rhts", q, k) * scale
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    pair, branch = who[..., 0], who[..., 1]
    apart = positions[:, :, None] - positions[:, None]
    seen = (pair[:, :, None] == pair[:, None]) & (pair[:, :, None] >= 0) & (apart >= 0)
    seen &= (branch[:, :, None] == branch[:, None]) | (branch[:, None] == 0)
    if window is not None:
        seen &= apart < window
    scores = jnp.where(seen[:, None], scores, -1e300)
    highest = scores.max(axis=-1, keepdims=True) if sinks is None else 3.0
    weights = jnp.where(seen[:, None], jnp.exp(scores - highest), 0)
    total = weights.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total += jnp.exp(sinks[:, None, None] - highest)
    return jnp.einsum("rhts,rshc->rthc", weights / jnp.where(total > 0, total, 1), v)


def inputs(rows, length, heads, key_heads, channels=8, seed=0):
    draw = np.random.default_rng(seed).normal
    sizes = heads, key_heads, key_heads, heads
    return [draw(size=(rows, length, count, channels)) for count in sizes]


def ours(packed, arrays, how):
    """Our outputs and gradients in float32."""
    *qkv, weight = arrays
    attention = AttentionInputs(how["scale"], window=how.get("window"), packed=jax.tree.map(jnp.asarray, packed))

    def run(q, k, v, sinks=None):
        return attend(q, k, v, attention, softcap=how.get("softcap"), sinks=sinks)

    return with_gradients(run, [x.astype(np.float32) for x in (*qkv, *sinks_of(how, qkv[0].shape[2]), weight)])


@functools.cache
def exactly(name, heads, rows, length):
    """The same from the formula in float64, computed once for all kernels."""
    (_, positions, who), (*qkv, weight), how = drawn(length, length, rows), inputs(rows, length, *heads), FACTS[name]

    def run(q, k, v, sinks=None):
        return formula(q, k, v, sinks, who, positions, how["scale"], how.get("softcap"), how.get("window"))

    with jax.enable_x64(True):
        return with_gradients(run, [*qkv, *sinks_of(how, heads[0]), weight])


def with_gradients(run, arrays):
    """The outputs of `run` for all arrays except the last, which weights the outputs, and the gradients of those
    arrays."""
    *given, weight = arrays

    def total(*given):
        out = run(*given)
        return jnp.sum(out * weight), out

    gradients, out = jax.jit(jax.grad(total, argnums=tuple(range(len(given))), has_aux=True))(*given)
    return tuple(map(np.asarray, (out, *gradients)))


def sinks_of(how, heads):
    """One sink per head, some below all scores, some above."""
    return [np.linspace(-3, 3, heads)] if how.get("sinks") else []


FACTS = {
    "plain": {"scale": 0.4},
    "window": {"scale": 0.4, "window": np.int32(7)},
    "wide_window": {"scale": 0.4, "window": np.int32(BLOCK + 9)},
    "softcap": {"scale": 0.9, "softcap": 1.5},
    "softcap_window": {"scale": 0.9, "softcap": 1.5, "window": np.int32(33)},
    "sinks": {"scale": 0.4, "sinks": True},
    "sinks_window": {"scale": 0.9, "sinks": True, "window": np.int32(33)},
}


CASES = [(name, (4, 2), 2, 3 * BLOCK) for name in FACTS]
CASES += [("plain", (4, 4), 1, BLOCK), ("plain", (3, 1), 1, 5 * BLOCK)]


@pytest.fixture(params=["blocks", "splash", "rows"])
def kernel(request, monkeypatch):
    """Each of the kernels; those for accelerators run in interpret mode, or are computed by XLA."""
    if request.param == "splash":
        monkeypatch.setattr(packed, "platform", lambda: "tpu")
        monkeypatch.setattr(splash, "BLOCK", 128)  # several blocks, so that some are skipped
    return request.param


@usual(
    "blocks-softcap_window-heads4-2-192",
    "blocks-sinks_window-heads6-2-192",
    "blocks-plain-heads7-1-64",
    "blocks-plain-heads8-1-320",
    "splash-softcap_window-heads4-2-192",
    "splash-sinks_window-heads6-2-192",
    "splash-plain-heads8-1-320",
    "rows-softcap_window-heads4-2-192",
    "rows-plain-heads8-1-320",
)
@pytest.mark.parametrize(("name", "heads", "rows", "length"), CASES)
def test_the_formula(name, heads, rows, length, kernel):
    packed, positions, who = drawn(length, length, rows)
    if kernel == "rows":
        packed = packed._replace(texts=as_rows(positions, who, 320))
    found = ours(packed, inputs(rows, length, *heads), FACTS[name])
    wanted = exactly(name, heads, rows, length)
    for mine, exact in zip(found, wanted, strict=True):
        np.testing.assert_allclose(mine, exact, atol=3e-6 * np.abs(exact).max())


def test_what_only_fills_gets_and_gives_nothing(kernel):
    length = 2 * BLOCK
    packed, positions, _ = drawn(0, length)
    nothing = Packed(*[np.full_like(packed.first, length)] * 4)
    arrays = inputs(1, length, 4, 2)
    who = np.full((1, length, 2), -1)
    if kernel == "rows":
        nothing = nothing._replace(texts=as_rows(positions, who, 64))
    for mine in ours(nothing, arrays, FACTS["plain"]):
        np.testing.assert_array_equal(mine, 0)


def test_blocks_that_nobody_sees_are_not_computed(kernel):
    """Otherwise a NaN there would spread: zero times NaN."""
    length = 8 * BLOCK  # four blocks of splash attention, in tests
    packed, positions, who = drawn(3, length, longest=20)
    if kernel == "rows":
        packed = packed._replace(texts=as_rows(positions, who, 64))
    q, k, v, _ = (jnp.asarray(x, jnp.float32) for x in inputs(1, length, 2, 2))
    run = jax.jit(lambda k, v: attend(q, k, v, AttentionInputs(0.4, packed=packed)))
    wanted = run(k, v)
    others = who[0, :, 0] >= who[0, 4 * BLOCK, 0]
    first = int(np.argmax(others))
    assert 0 < first <= 4 * BLOCK
    k, v = (x.at[:, 6 * BLOCK :].set(jnp.nan) for x in (k, v))
    found = run(k, v)
    np.testing.assert_array_equal(found[:, :first], wanted[:, :first])


def test_no_square_of_the_length_is_held():
    length = 64 * BLOCK
    shapes = [jax.ShapeDtypeStruct((1, length, heads, 32), jnp.float32) for heads in (4, 2, 2)]
    tokens = jax.ShapeDtypeStruct((1, length), jnp.int32)

    def total(q, k, v, packed):
        return attend_packed(q, k, v, AttentionInputs(0.2, packed=packed)).sum()

    compiled = jax.jit(jax.grad(total, argnums=(0, 1, 2))).lower(*shapes, Packed(*[tokens] * 4)).compile()
    inside = compiled.memory_analysis().temp_size_in_bytes
    assert inside < 4 * length * length / 4, f"{inside:,} bytes"


def test_bfloat16_stays_close_and_keeps_its_type():
    layout = drawn(1, 3 * BLOCK)
    q, k, v, _ = (jnp.asarray(x, jnp.bfloat16) for x in inputs(1, 3 * BLOCK, 4, 2))

    def total(*qkv):
        return attend_packed(*qkv, AttentionInputs(0.4, packed=layout[0])).astype(jnp.float32).sum()

    run = jax.jit(jax.value_and_grad(total))
    value, gradient = run(q, k, v)
    exact, exact_gradient = run(*(x.astype(jnp.float32) for x in (q, k, v)))
    assert gradient.dtype == jnp.bfloat16
    np.testing.assert_allclose(value, exact, atol=0.5)
    np.testing.assert_allclose(gradient.astype(np.float32), exact_gradient, atol=0.05)


def test_a_length_between_blocks_is_refused():
    packed, _, _ = drawn(0, BLOCK + 1)
    q, k, v, _ = inputs(1, BLOCK + 1, 2, 2)
    with pytest.raises(ValueError, match=f"^A packed row of {BLOCK + 1} tokens is not a multiple of {BLOCK}"):
        attend_packed(q, k, v, AttentionInputs(1.0, packed=packed))


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed; trl_jax[tpu] has it")
@pytest.mark.parametrize("channels", [64, 80, 128])
def test_tpus_compile_the_kernels_and_gather_nothing(channels):
    """Forward and backward, with heads sharded, at the trainer's matmul precision."""
    mesh = make_mesh({"data": 2, "tensor": 2}, devices(topology("v6e:2x2")))
    rows, heads = (NamedSharding(mesh, PartitionSpec("data", None, *axes)) for axes in ((), ("tensor",)))
    length, shape = 20 * BLOCK, jax.ShapeDtypeStruct
    qkv = [shape((2, length, count, channels), jnp.bfloat16, sharding=heads) for count in (8, 4, 4)]
    tokens = shape((2, length), jnp.int32, sharding=rows)

    def total(q, k, v, *packed):
        return attend_packed(q, k, v, AttentionInputs(0.1, packed=Packed(*packed))).astype(jnp.float32).sum()

    def of_shard(*given):
        return jax.grad(total, argnums=(0, 1, 2))(*given)

    data = PartitionSpec("data")
    sharded_step = jax.shard_map(
        of_shard, mesh=mesh, in_specs=data, out_specs=data, axis_names={"data"}, check_vma=False
    )
    with jax.default_matmul_precision("float32"):
        traced = jax.jit(sharded_step).trace(*qkv, *[tokens] * 4)
    program = traced.lower(lowering_platforms=("tpu",)).compile().as_text()
    assert program.count("tpu_custom_call") == 3 and "all-gather" not in program
