"""Forward and backward pass of only the language model head: ours, in chunks, and torch's log_softmax of all logits.

Both sides use the same hidden states, weight and targets, in float32. Timed passes alternate in one process; peak
memory is measured in a separate process per side, relative to the memory before the first pass.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from benchmarks import common


def main() -> None:
    args = _arguments()
    common.prepare(args.cpus)
    sizes = args.places, args.vocabulary, args.width
    rows = common.in_child(race, sizes, args.fillers, args.turns)
    for row in rows:
        row["peak MB"] = common.in_child(peak, row["side"], sizes, args.fillers)
    common.show(rows)
    common.write_json(args.json, {"rows": rows, "options": vars(args)})


def _arguments():
    options = common.parser(__doc__)
    options.add_argument("--places", type=int, default=2048, help="places that are read")
    options.add_argument("--fillers", type=int, default=0, help="of them, without a target; torch is spared these")
    options.add_argument("--vocabulary", type=int, default=49152)
    options.add_argument("--width", type=int, default=576)
    options.add_argument("--turns", type=int, default=5, help="passes measured on each side")
    return options.parse_args()


def race(sizes: tuple[int, int, int], fillers: int, turns: int) -> list[dict[str, Any]]:
    passes = {side: make(*drawn(sizes, fillers)) for side, make in SIDES.items()}
    for run in passes.values():
        run()
    seconds: dict[str, list[float]] = {side: [] for side in passes}
    for _ in range(turns):
        for side, run in passes.items():
            start = time.perf_counter()
            run()
            seconds[side].append(time.perf_counter() - start)
    sides = {"trained": "torch", "frozen": "torch, frozen"}
    against = {side: seconds[sides.get(side, side)] for side in passes}
    return [
        {
            "side": side,
            "pass s": common.spread(took),
            "times faster than torch": common.spread(b / a for a, b in zip(took, against[side], strict=True)),
        }
        for side, took in seconds.items()
    ]


def peak(side: str, sizes: tuple[int, int, int], fillers: int) -> float:
    """Peak memory of a pass in MB."""
    run = SIDES[side](*drawn(sizes, fillers))
    before = common.memory("VmRSS")
    run()
    return common.memory() - before


def drawn(sizes: tuple[int, int, int], fillers: int) -> tuple:
    """Hidden states, weight and targets."""
    import numpy as np

    places, vocabulary, width = sizes
    draw = np.random.default_rng(0)
    hidden = draw.standard_normal((places, width), np.float32)
    weight = draw.standard_normal((vocabulary, width), np.float32) / width**0.5
    targets = draw.integers(0, vocabulary, places).astype(np.int32)
    return hidden, weight, np.where(np.arange(places) < places - fillers, targets, -1)


def ours(trained: bool, hidden: Any, weight: Any, targets: Any) -> Any:
    """A compiled pass."""
    import jax
    import jax.numpy as jnp

    from trl_jax.nn.head import token_outputs

    def loss(hidden, weight):
        return -jnp.sum(token_outputs(hidden, weight, targets).logps)

    arrays = jnp.asarray(hidden), jnp.asarray(weight)
    program = jax.jit(jax.grad(loss, argnums=(0, 1) if trained else 0)).lower(*arrays).compile()
    return lambda: jax.block_until_ready(program(*arrays))


def theirs(trained: bool, hidden: Any, weight: Any, targets: Any) -> Any:
    import torch

    states = torch.tensor(hidden[targets >= 0], requires_grad=True)
    matrix, of_targets = torch.tensor(weight, requires_grad=trained), torch.tensor(targets[targets >= 0]).long()

    def run():
        states.grad = matrix.grad = None
        logps = torch.log_softmax(states @ matrix.T, -1).gather(1, of_targets[:, None])
        (-logps.sum()).backward()

    return run


SIDES = {
    "trained": partial(ours, True), "frozen": partial(ours, False),
    "torch": partial(theirs, True), "torch, frozen": partial(theirs, False),
}  # fmt: skip


if __name__ == "__main__":
    main()
