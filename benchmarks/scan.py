"""Compile and run time of a forward and backward pass with scanned layers, unrolled layers, and torch.

All sides use the same checkpoint and rows, in float32 and without an optimizer. Timed passes alternate.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks import common


def main() -> None:
    args = _arguments()
    common.prepare(args.cpus)
    with TemporaryDirectory() as folder:
        common.in_child(build, Path(folder), args.model_type, args.layers, args.width)
        rows = common.in_child(race, Path(folder), args.rows, args.length, args.turns)
    common.show(rows)
    common.write_json(args.json, {"rows": rows, "options": vars(args)})


def _arguments():
    options = common.parser(__doc__)
    options.add_argument("--model_type", default="llama")
    options.add_argument("--layers", type=int, default=8)
    options.add_argument("--width", type=int, default=256)
    options.add_argument("--rows", type=int, default=8)
    options.add_argument("--length", type=int, default=256, help="tokens a row")
    options.add_argument("--turns", type=int, default=5, help="passes measured on each side")
    return options.parse_args()


def build(folder: Path, model_type: str, layers: int, width: int) -> None:
    from compat_tests.tiny import tiny_model

    heads = width // 64
    tiny_model(
        folder, model_type, num_hidden_layers=layers, hidden_size=width, intermediate_size=3 * width,
        num_attention_heads=heads, num_key_value_heads=heads, head_dim=64, max_position_embeddings=4096,
    )  # fmt: skip


def race(folder: Path, rows: int, length: int, turns: int) -> list[dict[str, Any]]:
    import numpy as np

    ids = np.random.default_rng(0).integers(5, 500, (rows, length))
    passes, compiled = {}, {}
    for name, make in (("scanned", partial(ours, False)), ("unrolled", partial(ours, True)), ("torch", theirs)):
        start = time.perf_counter()
        passes[name] = make(folder, ids)
        passes[name]()
        compiled[name] = time.perf_counter() - start
    seconds: dict[str, list[float]] = {name: [] for name in passes}
    for _ in range(turns):
        for name, run in passes.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    ratios = {name: [a / b for a, b in zip(seconds["torch"], took, strict=True)] for name, took in seconds.items()}
    return [
        {
            "side": name,
            "first pass s": compiled[name],
            "pass s": common.spread(seconds[name]),
            "times faster than torch": common.spread(ratios[name]),
        }
        for name in passes
    ]


def ours(unrolled: bool, folder: Path, ids: Any) -> Any:
    """A compiled pass. `unrolled` uses the same scan with unroll=True."""
    import jax
    import jax.numpy as jnp

    from trl_jax.hub.auto import AutoModelForSequenceClassification
    from trl_jax.models.model import merge

    model = AutoModelForSequenceClassification.from_pretrained(folder)
    positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
    reads = jnp.arange(1, len(ids) + 1) * ids.shape[1] - 1

    def total(params):
        return merge(model.graph, params)(jnp.asarray(ids), positions, reads).sum()

    scan = jax.lax.scan
    jax.lax.scan = partial(scan, unroll=True) if unrolled else scan
    try:
        program = jax.jit(jax.grad(total)).lower(model.params).compile()
    finally:
        jax.lax.scan = scan
    return lambda: jax.block_until_ready(program(model.params))


def theirs(folder: Path, ids: Any) -> Any:
    import torch
    import transformers

    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float32)
    tokens = torch.tensor(ids)

    def run():
        model.zero_grad()
        model(input_ids=tokens, attention_mask=torch.ones_like(tokens)).logits.sum().backward()

    return run


if __name__ == "__main__":
    main()
