"""Each operation against torch's operation of that name: values, and gradients if it has any."""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")

import transformers.integrations.moe  # noqa: E402, F401 - it registers an operation

from trl_jax.exported.aten import OPERATIONS, RANDOM  # noqa: E402

QUICKLY = {"xla_backend_optimization_level": 0}
DICE = np.random.default_rng(0)
X = DICE.normal(size=(3, 4)).astype(np.float32)
Y = DICE.normal(size=(3, 4)).astype(np.float32)
CUBE = DICE.normal(size=(2, 3, 4)).astype(np.float32)
POSITIVE = np.abs(X) + 0.5
INSIDE = np.clip(X, -0.9, 0.9)
KINKS = np.array([-2.0, -1.0, 0.0, 1.0, 1.0, 2.0, 25.0], np.float32)  # points where the derivative is a convention
WHOLE = np.array([[7, -7, 2], [-2, 5, 0]], np.int64)
TIES = np.array([[1.0, 3.0, 3.0], [2.0, 2.0, 0.0]], np.float32)
BITS = np.array([[True, False, True], [False, False, True]])
PLACES = np.array([[0, 2, 1], [1, 0, 0]], np.int64)
IDS = np.array([[0, 2, 1], [2, 2, 0]], np.int64)
TABLE = DICE.normal(size=(5, 4)).astype(np.float32)
WEIGHTS = DICE.normal(size=(3, 4, 2)).astype(np.float32)
ENDS = np.array([2, 2, 6], np.int32)
ROWS = DICE.normal(size=(6, 4)).astype(np.float32)
SIGNAL, KERNEL = DICE.normal(size=(2, 4, 9)).astype(np.float32), DICE.normal(size=(6, 2, 3)).astype(np.float32)
BIAS = DICE.normal(size=6).astype(np.float32)

ONE = {
    KINKS.tobytes(): (KINKS, "abs relu sign ceil floor trunc round clone _to_copy alias detach sigmoid tanh silu gelu "
                             "softplus leaky_relu elu zeros_like ones_like isnan isinf"),
    POSITIVE.tobytes(): (POSITIVE, "log log1p log2 log10 sqrt rsqrt reciprocal"),
    INSIDE.tobytes(): (INSIDE, "acos asin atan cos cosh erf exp expm1 neg sin sinh square tan"),
    BITS.tobytes(): (BITS, "bitwise_not logical_not"),
}  # fmt: skip
CASES = [(f"aten.{name}.default", (array,), {}) for array, names in ONE.values() for name in names.split()] + [
    ("aten.gelu.default", (X,), {"approximate": "tanh"}),
    ("aten.clamp.default", (KINKS, -1.0, 1.0), {}),
    ("aten.clamp.default", (KINKS, None, 1.0), {}),
    ("aten.clamp.Tensor", (X, Y - 0.5, Y + 0.5), {}),
    ("aten.clamp_min.default", (KINKS, 1.0), {}),
    ("aten.clamp_max.default", (KINKS, 1.0), {}),
    ("aten.hardtanh.default", (KINKS,), {}),
    ("aten.add.Tensor", (X, Y), {"alpha": 2}),
    ("aten.sub.Tensor", (X, Y), {"alpha": 2}),
    ("aten.rsub.Scalar", (X, 3, 2), {}),
    ("aten.mul.Tensor", (X, 2**40), {}),
    ("aten.div.Tensor", (WHOLE, 2), {}),
    ("aten.div.Tensor_mode", (WHOLE, 2), {"rounding_mode": "floor"}),
    ("aten.div.Tensor_mode", (WHOLE, 2), {"rounding_mode": "trunc"}),
    ("aten.div.Tensor_mode", (X, 0.3), {"rounding_mode": "trunc"}),
    ("aten.remainder.Scalar", (WHOLE, 3), {}),
    ("aten.fmod.Scalar", (WHOLE, 3), {}),
    ("aten.pow.Tensor_Scalar", (X, 2), {}),
    ("aten.pow.Tensor_Scalar", (POSITIVE, 0.5), {}),
    ("aten.pow.Tensor_Scalar", (POSITIVE, 1.7), {}),
    ("aten.pow.Tensor_Tensor", (POSITIVE, Y), {}),
    ("aten.pow.Scalar", (2.0, X), {}),
    ("aten.minimum.default", (X, Y), {}),
    ("aten.maximum.default", (X, Y), {}),
    ("aten.bitwise_and.Tensor", (BITS, ~BITS), {}),
    ("aten.bitwise_or.Tensor", (BITS, ~BITS), {}),
    ("aten.logical_and.default", (X, BITS[:1, :1]), {}),
    ("aten.eq.Scalar", (WHOLE, 2), {}),
    ("aten.lt.Tensor", (X, Y), {}),
    ("aten.le.Scalar", (WHOLE, 2**62), {}),
    ("aten.where.self", (BITS, TIES, -TIES), {}),
    ("aten.masked_fill.Scalar", (TIES, BITS, -5.0), {}),
    ("aten.view.default", (CUBE, [6, -1]), {}),
    ("aten.expand.default", (X[:, None], [2, 3, -1, 4]), {}),
    ("aten.permute.default", (CUBE, [2, 0, 1]), {}),
    ("aten.transpose.int", (CUBE, -1, 0), {}),
    ("aten.unsqueeze.default", (X, -1), {}),
    ("aten.squeeze.dims", (X[None, :, None], [0, 2, 3]), {}),
    ("aten.slice.Tensor", (CUBE, 2, -3, 2**63 - 1, 2), {}),
    ("aten.slice.Tensor", (CUBE, 1, 1, -1), {}),
    ("aten.slice_scatter.default", (X, X[:, :2], 1, 1, 3), {}),
    ("aten.select.int", (CUBE, 1, -1), {}),
    ("aten.select_scatter.default", (X, Y[0], 0, 1), {}),
    ("aten.split.Tensor", (CUBE, 3, -1), {}),
    ("aten.split_with_sizes.default", (X, [1, 3], 1), {}),
    ("aten.unbind.int", (X, 1), {}),
    ("aten.cat.default", ([X, Y], -1), {}),
    ("aten.stack.default", ([X, Y], 1), {}),
    ("aten.repeat.default", (X, [2, 1, 3]), {}),
    ("aten.roll.default", (X, [1, -2], [0, 1]), {}),
    ("aten.flip.default", (X, [1]), {}),
    ("aten.constant_pad_nd.default", (X, [1, -2, 0, 3], 7.0), {}),
    ("aten.unfold.default", (CUBE, 2, 2, 2), {}),
    ("aten.diagonal.default", (CUBE, 1, 1, 2), {}),
    ("aten.tril.default", (X, 1), {}),
    ("aten.triu.default", (X, -1), {}),
    ("aten.arange.start_step", (2, 9, 3), {}),
    ("aten.full.default", ([2, 3], 2**63 - 1), {}),
    ("aten.full_like.default", (X, 0.5), {}),
    ("aten.scalar_tensor.default", (-3.5,), {}),
    ("aten.embedding.default", (TABLE, IDS, 2), {}),
    ("aten.embedding.default", (TABLE, IDS), {}),
    ("aten.index.Tensor", (CUBE, [None, IDS[0]]), {}),
    ("aten.index.Tensor", (CUBE, [IDS[:, :1] // 2, None, IDS]), {}),
    ("aten.index_put.default", (TABLE, [np.array([0, 2])], TABLE[:2]), {}),
    ("aten.index_put.default", (TABLE, [np.array([2, 2])], TABLE[:2], True), {}),
    ("aten.index_select.default", (X, 1, IDS[0]), {}),
    ("aten.index_add.default", (TABLE, 0, IDS[0], ROWS[:3]), {"alpha": 2}),
    ("aten.gather.default", (X, 1, PLACES), {}),
    ("aten.gather.default", (X, 0, PLACES), {}),
    ("aten.scatter.src", (X, 1, np.array([[3, 1], [0, 2]]), Y[:2, :2].copy()), {}),
    ("aten.scatter.value", (X, 0, np.array([[2, 1]]), 5.0), {}),
    ("aten.scatter_add.default", (X, 1, np.array([[1, 1], [0, 2]]), Y[:2, :2].copy()), {}),
    ("aten.sort.default", (TIES, -1, True), {}),
    ("aten.sort.stable", (TIES,), {"stable": True, "dim": 0}),
    ("aten.topk.default", (X, 2), {}),
    ("aten.topk.default", (X, 2, 0, False), {}),
    ("aten.histc.default", (np.float32([0, 1, 1, 3, 3, 3, 9]), 4, 0, 3), {}),
    ("aten.histc.default", (np.float32([2, 1, 1, 3, 3, 3, 9]), 4), {}),
    ("aten.histc.default", (np.float32([2, 2]), 4), {}),
    ("aten.sum.default", (X,), {}),
    ("aten.sum.dim_IntList", (CUBE, [0, -1], True), {}),
    ("aten.mean.dim", (CUBE, [1]), {}),
    ("aten.var.correction", (CUBE, [2]), {"correction": 1, "keepdim": True}),
    ("aten.view_as_real.default", (X + 1j * Y,), {}),
    ("aten.view_as_complex.default", (np.stack([X, Y], -1),), {}),
    ("aten.polar.default", (X, Y), {}),
    ("aten.mul.Tensor", (X + 1j * Y, Y + 1j * X), {}),
    ("aten._fft_c2c.default", (X + 1j * Y, [0, 1], 0, True), {}),
    ("aten.amax.default", (TIES, [1]), {}),
    ("aten.amin.default", (TIES, [-1], True), {}),
    ("aten.max.dim", (TIES, 1), {}),
    ("aten.min.dim", (TIES, 1, True), {}),
    ("aten.max.default", (X,), {}),
    ("aten.argmax.default", (X, -1), {}),
    ("aten.argmin.default", (X, 0), {}),
    ("aten.any.dim", (BITS, 1), {}),
    ("aten.all.dim", (BITS, 0), {}),
    ("aten.prod.dim_int", (X, 1), {}),
    ("aten.linalg_vector_norm.default", (X, 2, [1], True), {}),
    ("aten.linalg_vector_norm.default", (X, float("inf"), [1]), {}),
    ("aten.linalg_vector_norm.default", (X, -float("inf")), {}),
    ("aten.linalg_vector_norm.default", (TIES, 0, [1]), {}),
    ("aten.linalg_vector_norm.default", (np.stack([X[0], 0 * X[0]]), 2, [1]), {}),
    ("aten.cumsum.default", (CUBE, 1), {}),
    ("aten.cumprod.default", (CUBE, -1), {}),
    ("aten.logsumexp.default", (X, [1]), {}),
    ("aten.logcumsumexp.default", (X, -1), {}),
    ("aten._softmax.default", (CUBE, -1, False), {}),
    ("aten._log_softmax.default", (CUBE, 1, False), {}),
    ("aten.mm.default", (X, Y.T.copy()), {}),
    ("aten.bmm.default", (CUBE, CUBE.swapaxes(1, 2).copy()), {}),
    ("aten.addmm.default", (X[:, :3].copy(), X, Y.T.copy()), {"beta": 2, "alpha": 3}),
    ("aten.convolution.default", (SIGNAL, KERNEL, BIAS, [2], [1], [2], False, [0], 2), {}),
    ("aten.convolution.default", (SIGNAL, KERNEL, None, [1], [0], [1], False, [0], 2), {}),
    ("aten.native_layer_norm.default", (CUBE, [4], Y[0], Y[1], 1e-5), {}),
    ("aten.native_layer_norm.default", (CUBE, [3, 4], None, None, 1e-5), {}),
    ("transformers.grouped_mm_fallback.default", (ROWS, WEIGHTS, ENDS), {}),
]


TOGETHER = 16


def named(case) -> str:
    return case[0].removeprefix("aten.")


@pytest.mark.parametrize("number", range(len(CASES)), ids=map(named, CASES))
def test_an_operation_is_torchs(number):
    wanted, wanted_gradients = theirs(*CASES[number])
    gradients, found = ours(number // TOGETHER)[number % TOGETHER]
    gradients = gradients if wanted_gradients else []
    assert len(found) == len(wanted)
    for mine, other in zip(found, wanted, strict=True):
        other = other.astype(np.int64).clip(-(2**31), 2**31 - 1) if other.dtype == np.int64 else other
        np.testing.assert_allclose(mine, other, rtol=2e-5, atol=2e-6)
    for mine, other in zip(gradients, wanted_gradients, strict=True):
        np.testing.assert_allclose(mine, other, rtol=2e-5, atol=2e-6)


def pull(shape) -> np.ndarray:
    return np.linspace(-1, 2, int(np.prod(shape)), dtype=np.float32).reshape(shape)


def theirs(op, args, kwargs):
    """Results, and the gradient of their weighted sum for each float array among the arguments."""
    room, name, overload = op.split(".")
    given = jax.tree.map(lambda x: torch.tensor(x) if isinstance(x, np.ndarray) else x, args)
    floats = [x for x in jax.tree.leaves(given) if isinstance(x, torch.Tensor) and x.dtype == torch.float32]
    for x in floats:
        x.requires_grad_()
    results = getattr(getattr(getattr(torch.ops, room), name), overload)(*given, **kwargs)
    results = [x for x in jax.tree.leaves(results) if x is not None]
    smooth = [x for x in results[: 1 if "layer_norm" in op else None] if x.requires_grad and x.dtype == torch.float32]
    gradients = []
    if smooth:
        total = sum((x * torch.tensor(pull(x.shape))).sum() for x in smooth)
        found = torch.autograd.grad(total, floats, allow_unused=True)
        pairs = zip(found, floats, strict=True)
        gradients = [np.zeros(x.shape, np.float32) if g is None else g.numpy() for g, x in pairs]
    return [x.detach().numpy() for x in results], gradients


@cache
def ours(group):
    """(gradients, results) of a group of cases in one program, because XLA's overhead per program exceeds a single
    operation."""
    totals, floats = zip(*(total_of(*case) for case in CASES[group * TOGETHER : (group + 1) * TOGETHER]), strict=True)

    def run(floats):
        return [jax.grad(total, has_aux=True)(own) for total, own in zip(totals, floats, strict=True)]

    return jax.jit(run, compiler_options=QUICKLY)(floats)


def total_of(op, args, kwargs):
    """A function from the float arrays among the arguments to their weighted sum and the results; and those arrays."""
    leaves, tree = jax.tree.flatten(args, is_leaf=lambda x: x is None)
    places = [i for i, x in enumerate(leaves) if isinstance(x, np.ndarray) and x.dtype == np.float32]

    def total(floats):
        filled = [jnp.asarray(x) if isinstance(x, np.ndarray) else x for x in leaves]
        for place, value in zip(places, floats, strict=True):
            filled[place] = value
        given = jax.tree.unflatten(tree, filled)
        given = [tuple(x) if isinstance(x, list) else x for x in given]
        made = jax.tree.leaves(OPERATIONS[op](*given, **kwargs))
        smooth = [x for x in made[: 1 if "layer_norm" in op else None] if x.dtype == jnp.float32]
        return sum((jnp.sum(x * pull(x.shape)) for x in smooth), jnp.zeros(())), made

    return total, [leaves[place] for place in places]


def test_every_operation_is_held_against_torch():
    """Except for those on plain numbers, random ones, and aliases of what is tested under another name."""
    tested = {case[0].split(".")[1] for case in CASES}
    names = {op.split(".")[1] for op in OPERATIONS if op.startswith("aten.") and op not in RANDOM}
    untested = names - tested
    assert untested <= set(
        "_assert_scalar _grouped_mm _fused_rms_norm _unsafe_index _unsafe_view baddbmm copy dot empty empty_like "
        "empty_permuted eye floor_divide lift_fresh_copy matmul mv ne new_empty new_full new_ones new_zeros norm "
        "ones reshape std squeeze sym_numel sym_size t zeros argsort atan2 __lshift__ __rshift__ bitwise_left_shift "
        "bitwise_right_shift bitwise_xor ge gt logical_or logical_xor".split()
    )
