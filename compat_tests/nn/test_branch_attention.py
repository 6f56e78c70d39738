"""Attention of branches after a shared context against each text alone in float64: values and gradients."""

from __future__ import annotations

import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from compat_tests.effort import usual
from compat_tests.nn.test_packed_attention import FACTS, inputs, sinks_of
from trl_jax.core.outputs import BLOCK, Packed, RowView
from trl_jax.data.batch import Context, Example
from trl_jax.data.packed import PackingSpec, RowViewShape, longest_in_batch, pack_examples, place, step_slots
from trl_jax.mesh.mesh import make_mesh
from trl_jax.nn.attention import packed as packed_attention
from trl_jax.nn.attention import splash
from trl_jax.nn.attention.attention import attend
from trl_jax.nn.attention.inputs import AttentionInputs
from trl_jax.plan.chips import topology
from trl_jax.plan.compile import devices

LENGTH, ROWS, LONGEST = 5 * BLOCK, 2, 3 * BLOCK


def laid_out(seed=0):
    """(what tokens see, the positions of each text by packed row): contexts with one to many branches, some longer than
    a block, one that is a whole text, and a text without a context."""
    dice = np.random.default_rng(seed)
    texts, into = [], []
    for row in range(ROWS):
        for group, (prompt, branches) in enumerate(((70, 5), (1, 3), (40, 1), (90, 2))):
            begin = dice.integers(1, 9, prompt).tolist()
            lengths = [0 if (group, branch) == (3, 1) else int(dice.integers(1, 9)) for branch in range(branches)]
            texts += [
                Example((begin + dice.integers(1, 9, own).tolist(),), context=Context((row, group), prompt))
                for own in lengths
            ]
        texts.append(Example((dice.integers(1, 9, 30).tolist(),)))
        into += [row] * (len(texts) - len(into))
    order = np.random.default_rng(seed + 1).permutation(len(texts))  # branches of a context need not be adjacent
    placed = place([[texts[at] for at in order]], examples=len(texts), share_prefix=True)
    spec = PackingSpec(0, True, LENGTH, RowViewShape(len(texts), LONGEST))
    slots, longest = step_slots(ROWS, 1, len(texts)), longest_in_batch(placed, len(texts))
    batch = pack_examples(placed, [into[at] for at in order], spec, micro_batch=slots, longest_texts=longest)
    packed = jax.tree.map(lambda leaf: leaf[:, 0], batch.packed)
    places = packed.texts.places
    found = [(row, at[at < LENGTH]) for row in range(ROWS) for at in places[row] if (at < LENGTH).any()]
    assert sorted(len(at) for _, at in found) == sorted(len(text.texts[0]) for text in texts)
    return packed, found


def one_by_one(q, k, v, sinks, texts, scale, softcap=None, window=None):
    """Each text alone, right-padded to `LONGEST` tokens, so that they share one program."""
    group = q.shape[2] // k.shape[2]
    apart = np.arange(LONGEST)[:, None] - np.arange(LONGEST)
    seen = (apart >= 0) & (apart < (LONGEST if window is None else window))

    def alone(q, k, v):
        scores = jnp.einsum("thc,shc->hts", q, jnp.repeat(k, group, axis=1)) * scale
        scores = scores if softcap is None else softcap * jnp.tanh(scores / softcap)
        scores = jnp.where(seen, scores, -jnp.inf)
        if sinks is not None:
            scores = jnp.concatenate([scores, jnp.broadcast_to(sinks[:, None, None], (*scores.shape[:2], 1))], axis=-1)
        weights = jax.nn.softmax(scores, axis=-1)[..., : len(k)]
        return jnp.einsum("hts,shc->thc", weights, jnp.repeat(v, group, axis=1))

    rows = np.asarray([row for row, _ in texts])[:, None]
    places = np.stack([np.pad(at, (0, LONGEST - len(at)), mode="edge") for _, at in texts])
    real = np.arange(LONGEST) < np.asarray([len(at) for _, at in texts])[:, None]
    done = jax.vmap(alone)(*(x[rows, places] for x in (q, k, v)))
    return jnp.zeros_like(q).at[rows, np.where(real, places, LENGTH)].set(done, mode="drop")


def with_gradients(loss, arrays):
    return jax.grad(loss, argnums=tuple(range(len(arrays))), has_aux=True)(*arrays)


@functools.cache
def exactly(name):
    """The gradients and outputs of the plain formula in float64."""
    _, texts = laid_out()
    *qkv, weight = inputs(ROWS, LENGTH, 4, 2)
    how = {key: value for key, value in FACTS[name].items() if key != "sinks"}

    def theirs(q, k, v, sinks=None):
        out = one_by_one(q, k, v, sinks, texts, **how)
        return jnp.sum(out * weight), out

    with jax.enable_x64(True):
        return jax.jit(functools.partial(with_gradients, theirs))(qkv + sinks_of(FACTS[name], 4))


@usual(
    "plain-blocks", "plain-rows", "plain-splash", "softcap_window-by text", "sinks_window-rows", "sinks_window-splash"
)
@pytest.mark.parametrize("kernel", ["blocks", "where splash would be", "rows", "splash", "by text"])
@pytest.mark.parametrize("name", FACTS)
def test_the_texts_one_by_one(name, kernel, monkeypatch):
    packed, _ = laid_out()
    *qkv, weight = inputs(ROWS, LENGTH, 4, 2)
    how, wanted = FACTS[name], exactly(name)
    if kernel == "where splash would be":  # splash needs one key range per query, so blocks are used
        monkeypatch.setattr(packed_attention, "platform", lambda: "tpu")
        monkeypatch.setattr(packed_attention, "attend_splash", None)
    if kernel in ("splash", "by text"):  # keys and values ordered by text; the kernel runs in interpret mode
        monkeypatch.setattr("trl_jax.nn.attention.attention.platform", lambda: "tpu")
        monkeypatch.setattr(packed_attention, "platform", lambda: "tpu" if kernel == "splash" else "cpu")
        monkeypatch.setattr(splash, "BLOCK", 128)
        monkeypatch.setattr(packed_attention, "attend_blocks" if kernel == "splash" else "attend_splash", None)
    if kernel in ("blocks", "where splash would be"):
        packed = packed._replace(texts=None)
    attention = AttentionInputs(how["scale"], window=how.get("window"), packed=jax.tree.map(jnp.asarray, packed))

    def ours(q, k, v, sinks=None):
        out = attend(q, k, v, attention, softcap=how.get("softcap"), sinks=sinks)
        return jnp.sum(out * weight.astype(np.float32)), out

    qkv += sinks_of(how, 4)
    found = jax.jit(functools.partial(with_gradients, ours))([x.astype(np.float32) for x in qkv])
    for mine, exact in zip((found[1], *found[0]), (wanted[1], *wanted[0]), strict=True):
        np.testing.assert_allclose(mine, exact, atol=3e-6 * np.abs(exact).max())


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed; trl_jax[tpu] has it")
def test_tpus_compile_the_kernel_by_text_and_walk_no_blocks():
    """Forward and backward, with completions sharded over `data`, heads over `tensor`, and more than 65,536 keys."""
    mesh = make_mesh({"data": 2, "tensor": 2}, devices(topology("v6e:2x2")))
    length, count, longest, shape = 20 * BLOCK, 32, 4096, jax.ShapeDtypeStruct
    rows, heads = (NamedSharding(mesh, PartitionSpec("data", None, *axes)) for axes in ((), ("tensor",)))
    qkv = [shape((2, length, number, 128), jnp.bfloat16, sharding=heads) for number in (8, 4, 4)]
    sizes = [(2, length)] * 5 + [(2, count, longest), (2, 8, length)]
    seen = [shape(size, jnp.int32, sharding=rows) for size in sizes]

    def total(q, k, v, first, end, context, context_end, longest, *view):
        packed = Packed(first, end, longest, None, RowView(*view), context, context_end)
        return attend(q, k, v, AttentionInputs(0.1, packed=packed)).astype(jnp.float32).sum()

    spec = PartitionSpec("data")
    step = jax.shard_map(
        jax.grad(total, argnums=(0, 1, 2)), mesh=mesh, in_specs=spec, out_specs=spec, axis_names={"data"},
        check_vma=False,
    )  # fmt: skip
    program = jax.jit(step).trace(*qkv, *seen).lower(lowering_platforms=("tpu",)).compile().as_text()
    assert program.count("tpu_custom_call") == 3 and " while(" not in program and "all-gather" not in program
