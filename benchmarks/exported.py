"""The same llama on both backends: seconds to export and compile, and seconds of a step's loss and gradients."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import common

VOCABULARY = 8192


def main() -> None:
    options = common.parser(__doc__)
    options.add_argument("--layers", type=int, default=4)
    options.add_argument("--width", type=int, default=256, help="a multiple of 64")
    options.add_argument("--pairs", type=int, default=4)
    options.add_argument("--length", type=int, default=256)
    options.add_argument("--rounds", type=int, default=10)
    args = options.parse_args()
    common.prepare(args.cpus)
    table = []
    with tempfile.TemporaryDirectory() as folder:
        common.build_llama(Path(folder), layers=args.layers, width=args.width, vocab_size=VOCABULARY)
        for remat in (True, False):
            table += race(Path(folder), args, remat)
    common.show(table)
    common.write_json(args.json, {"table": table, "options": vars(args)})


def race(folder: Path, args: Any, remat: bool) -> list[dict[str, Any]]:
    """Each round runs both backends, alternating which one is first; ratios are computed per round."""
    from trl_jax.exported.program import load_exported
    from trl_jax.hub.config import read_native_config
    from trl_jax.hub.native_backend import load_native

    engines = {
        "native": load_native(read_native_config(folder), dtype="float32", seed=0),
        "exported": load_exported(folder, dtype="float32", seed=0, head="score")[:2],
    }
    steps, ready = {}, {}
    for name, (params, backend) in engines.items():
        start = time.perf_counter()
        steps[name] = partial(step(backend.graph, args, remat), params)
        run(steps[name])
        ready[name] = time.perf_counter() - start
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for turn in range(args.rounds):
        for name in sorted(engines, reverse=turn % 2 == 0):
            seconds[name].append(run(steps[name]))
    return [
        {
            "engine": name,
            "remat": remat,
            "export and compile s": ready[name],
            "step s": common.spread(times),
            "times native": median(mine / base for mine, base in zip(times, seconds["native"], strict=True)),
        }
        for name, times in seconds.items()
    ]


def step(graph: Any, args: Any, remat: bool) -> Callable:
    """A jitted function from params to gradients of the pairwise loss on random rows of one length."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from trl_jax.losses.supervised import pairwise_loss
    from trl_jax.models.model import merge

    tokens = np.random.default_rng(0).integers(10, VOCABULARY, (2 * args.pairs, args.length)).astype(np.int32)
    positions = jnp.broadcast_to(jnp.arange(args.length, dtype=jnp.int32), tokens.shape)
    reads = jnp.arange(1, 2 * args.pairs + 1) * args.length - 1
    weight = jnp.full(args.pairs, 1 / args.pairs)

    def loss(params):
        scores = merge(graph, params)(jnp.asarray(tokens), positions, reads, remat=remat)
        return pairwise_loss(*jnp.split(scores, 2), weight=weight)[0]

    return jax.jit(jax.grad(loss))


def run(compute: Callable) -> float:
    import jax

    start = time.perf_counter()
    jax.block_until_ready(compute())
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
