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
    found = []
    for name, how in HOW.items():
        exact = {packed: _exact(args, how, packed) for packed in ((False, True) if name == "plain" else (False,))}
        for path in PATHS if name == "plain" else PATHS[:2]:
            for kind in ("float32", "bfloat16"):
                facts = {"what": name, "path": path, "kind": kind}
                found.append(facts | _compared(args, how, path, kind, exact[path == "packed"]))
                print(found[-1], flush=True)
    common.show(found)
    common.write_json(args.json, {"options": vars(args), "rows": found})


def _drawn(args: Any, apart: bool) -> tuple:
    from compat_tests.nn import test_packed_attention as layouts

    laid = _apart(args) if apart else layouts.drawn(0, args.length, args.rows, longest=args.longest)
    return layouts, laid, layouts.inputs(args.rows, args.length, *args.heads, args.channels)


def _apart(args: Any) -> tuple:
    """As `drawn` of the tests, but with texts that share no prefix."""
    import numpy as np

    from trl_jax.core.outputs import Packed

    dice, shape = np.random.default_rng(0), (args.rows, args.length)
    positions, who = np.zeros(shape, np.int32), np.full((*shape, 2), -1)
    first, end = (np.full(shape, args.length, np.int32) for _ in range(2))
    for row in range(args.rows):
        start, number = 0, 0
        while start + args.longest < args.length:
            at = np.arange(start, start + int(dice.integers(1, args.longest)))
            first[row, at], end[row, at], positions[row, at] = start, at + 1, at - start
            who[row, at], start, number = (number, 1), int(at[-1]) + 1, number + 1
    return Packed(first, end, np.zeros_like(first)), positions, who


def _exact(args: Any, how: dict, apart: bool) -> tuple:
    import jax

    layouts, (_, positions, who), arrays = _drawn(args, apart)
    *qkv, weight = arrays

    def run(q, k, v, sinks=None):
        return layouts.formula(q, k, v, sinks, who, positions, how["scale"], how.get("softcap"), how.get("window"))

    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        return layouts.with_gradients(run, [*qkv, *layouts.sinks_of(how, args.heads[0]), weight])


def _compared(args: Any, how: dict, path: str, kind: str, exact: tuple) -> dict[str, Any]:
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
    window = None if "window" not in how else np.int32(how["window"])
    attention = AttentionInputs(how["scale"], window=window, packed=jax.tree.map(jnp.asarray, packed))

    def run(q, k, v, sinks=None):
        return attend(q, k, v, attention, softcap=how.get("softcap"), sinks=sinks)

    def total(weight, *given):
        out = run(*given)
        return jnp.sum(out.astype(jnp.float32) * weight), out

    given = [jnp.asarray(x, kind) for x in qkv]
    given += [jnp.asarray(x, jnp.float32) for x in layouts.sinks_of(how, args.heads[0])]
    step = jax.jit(jax.grad(total, argnums=tuple(range(1, 1 + len(given))), has_aux=True))
    patched = mock.patch.object(cudnn, "supports", lambda q: False) if path == "padded" else contextlib.nullcontext()
    with patched, jax.default_matmul_precision("float32"):
        compiled = step.lower(jnp.asarray(weight, jnp.float32), *given).compile()
    gradients, out = compiled(jnp.asarray(weight, jnp.float32), *given)
    apart = [
        float(np.abs(np.asarray(mine, np.float64) - wanted).max() / np.abs(wanted).max())
        for mine, wanted in zip((out, *gradients), exact, strict=True)
    ]
    times = []
    for _ in range(args.turns):
        start = time.perf_counter()
        jax.block_until_ready(compiled(jnp.asarray(weight, jnp.float32), *given))
        times.append(1e3 * (time.perf_counter() - start))
    program = compiled.as_text()
    packs = any(int(count) > 1 for count in re.findall(r'"max_seg_per_batch":\s*(\d+)', program))
    kernel = "XLA" if "cudnn" not in program else "cuDNN packed" if packs else "cuDNN"
    return {"kernel": kernel, "results": apart[0], "gradients": max(apart[1:]), "ms": median(times)}


if __name__ == "__main__":
    main()
