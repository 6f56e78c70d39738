"""Compare each attention implementation on this machine's device with the formula in float64 on the host: the largest
error of results and gradients, relative to the largest value, and milliseconds of a forward and backward pass.

Packed rows are filled with pairs of texts that share a prefix: `rows` computes them text by text (cuDNN in bfloat16 on
NVIDIA GPUs), `blocks` on packed rows in plain XLA, `padded` one text per row in plain XLA. In `packed`, texts share
nothing, so that cuDNN reads the packed rows directly.
"""

from __future__ import annotations

import contextlib
import re
import time
from statistics import median
from typing import Any
from unittest import mock

from benchmarks import common

HOW = {
    "plain": {"scale": 0.088},
    "window": {"scale": 0.088, "window": 100},
    "softcap": {"scale": 0.088, "softcap": 5.0},
    "sinks": {"scale": 0.088, "sinks": True},
}
PATHS = ("rows", "blocks", "padded", "packed")


def main() -> None:
    options = common.parser(__doc__)
    options.add_argument("--length", type=int, default=1024, help="tokens of a packed row")
    options.add_argument("--longest", type=int, default=300, help="tokens of a prompt or an answer, at most")
    options.add_argument("--heads", type=int, nargs=2, default=(8, 2), help="of queries, and of keys")
    options.add_argument("--channels", type=int, default=128)
    options.add_argument("--rows", type=int, default=2, help="packed rows that are compared with the formula")
    options.add_argument("--turns", type=int, default=10)
    args = options.parse_args()
    rows = []
    for name, attention in HOW.items():
        exact = {packed: _exact(args, attention, packed) for packed in ((False, True) if name == "plain" else (False,))}
        for path in PATHS if name == "plain" else PATHS[:2]:
            for kind in ("float32", "bfloat16"):
                labels = {"what": name, "path": path, "kind": kind}
                rows.append(labels | _compared(args, attention, path, kind, exact[path == "packed"]))
                print(rows[-1], flush=True)
    common.show(rows)
    common.write_json(args.json, {"options": vars(args), "rows": rows})


def _drawn(args: Any, disjoint: bool) -> tuple:
    from compat_tests.nn import test_packed_attention as layouts

    layout = _apart(args) if disjoint else layouts.drawn(0, args.length, args.rows, longest=args.longest)
    return layouts, layout, layouts.inputs(args.rows, args.length, *args.heads, args.channels)


def _apart(args: Any) -> tuple:
    """As `drawn` of the tests, but with texts that share no prefix."""
    import numpy as np

    from trl_jax.core.outputs import Packed

    rng, shape = np.random.default_rng(0), (args.rows, args.length)
    positions, owners = np.zeros(shape, np.int32), np.full((*shape, 2), -1)
    first, end = (np.full(shape, args.length, np.int32) for _ in range(2))
    for row in range(args.rows):
        start, number = 0, 0
        while start + args.longest < args.length:
            span = np.arange(start, start + int(rng.integers(1, args.longest)))
            first[row, span], end[row, span], positions[row, span] = start, span + 1, span - start
            owners[row, span], start, number = (number, 1), int(span[-1]) + 1, number + 1
    return Packed(first, end, np.zeros_like(first)), positions, owners


def _exact(args: Any, attention: dict, disjoint: bool) -> tuple:
    import jax

    layouts, (_, positions, who), arrays = _drawn(args, disjoint)
    *qkv, weight = arrays

    def run(q, k, v, sinks=None):
        softcap, window = attention.get("softcap"), attention.get("window")
        return layouts.formula(q, k, v, sinks, who, positions, attention["scale"], softcap, window)

    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        return layouts.with_gradients(run, [*qkv, *layouts.sinks_of(attention, args.heads[0]), weight])


def _compared(args: Any, options: dict, path: str, kind: str, exact: tuple) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp
    import numpy as np

    from trl_jax.nn.attention import cudnn
    from trl_jax.nn.attention.attention import attend
    from trl_jax.nn.attention.inputs import AttentionInputs

    layouts, (packed, positions, who), arrays = _drawn(args, path == "packed")
    *qkv, weight = arrays
    if path != "blocks":
        packed = packed._replace(texts=layouts.as_rows(positions, who, 2 * args.longest))
    window = None if "window" not in options else np.int32(options["window"])
    attention = AttentionInputs(options["scale"], window=window, packed=jax.tree.map(jnp.asarray, packed))

    def run(q, k, v, sinks=None):
        return attend(q, k, v, attention, softcap=options.get("softcap"), sinks=sinks)

    def total(weight, *inputs):
        out = run(*inputs)
        return jnp.sum(out.astype(jnp.float32) * weight), out

    inputs = [jnp.asarray(x, kind) for x in qkv]
    inputs += [jnp.asarray(x, jnp.float32) for x in layouts.sinks_of(options, args.heads[0])]
    step = jax.jit(jax.grad(total, argnums=tuple(range(1, 1 + len(inputs))), has_aux=True))
    patched = mock.patch.object(cudnn, "supports", lambda q: False) if path == "padded" else contextlib.nullcontext()
    with patched, jax.default_matmul_precision("float32"):
        compiled = step.lower(jnp.asarray(weight, jnp.float32), *inputs).compile()
    gradients, out = compiled(jnp.asarray(weight, jnp.float32), *inputs)
    errors = [
        float(np.abs(np.asarray(actual, np.float64) - expected).max() / np.abs(expected).max())
        for actual, expected in zip((out, *gradients), exact, strict=True)
    ]
    times = []
    for _ in range(args.turns):
        start = time.perf_counter()
        jax.block_until_ready(compiled(jnp.asarray(weight, jnp.float32), *inputs))
        times.append(1e3 * (time.perf_counter() - start))
    program = compiled.as_text()
    packs = any(int(count) > 1 for count in re.findall(r'"max_seg_per_batch":\s*(\d+)', program))
    kernel = "XLA" if "cudnn" not in program else "cuDNN packed" if packs else "cuDNN"
    return {"kernel": kernel, "results": errors[0], "gradients": max(errors[1:]), "ms": median(times)}


if __name__ == "__main__":
    main()
