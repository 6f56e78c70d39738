"""Generation speed of transformers and trl_jax on one GPU: the shape of Qwen3-0.6B in bfloat16, without EOS tokens.

"step" is the time per token of a call, minus the time of a call for one token. The limit is the time that a step takes
to read the weights and the KV cache once at the GPU's published bandwidth.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import accelerator_turns, common

BANDWIDTH = {"H100": 3.35e12, "H200": 4.8e12}


def main() -> None:
    options = common.parser(__doc__)
    options.add_argument("--data", type=Path, required=True, help="jsonl of chosen and rejected texts")
    options.add_argument("--models", type=Path, help="folder where the model is, or is left for the next time")
    options.add_argument("--prompts", type=int, default=8)
    options.add_argument("--completions", type=int, nargs="+", default=[1, 8, 32], help="of each prompt")
    options.add_argument("--prompt", type=int, default=256, help="tokens of a prompt")
    options.add_argument("--new", type=int, default=128)
    options.add_argument("--turns", type=int, default=3)
    options.add_argument("--sides", nargs="+", default=["transformers", "trl_jax"])
    options.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    options.add_argument("--prefix", default="", choices=("", "tiny-"), help="of the model, to try the command")
    args = options.parse_args()
    accelerator_turns.prepare(args.device, 0.5)
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        model = (args.models or Path(scratch)) / "qwen3"
        if not (model / "config.json").is_file():
            common.in_child(accelerator_turns.build_model, model, args.data, f"{args.prefix}qwen3")
        for side in args.sides:
            rows += common.in_child(measured, side, model, args)
    common.show(rows)
    common.write_json(args.json, {"options": vars(args), "rows": rows})


def measured(side: str, model: Path, args: Any) -> list[dict[str, Any]]:
    import numpy as np

    run, rows = _SIDES[side](model, args.device), []
    for count in args.completions:
        ids = np.random.default_rng(0).integers(5, 8000, (args.prompts, args.prompt)).repeat(count, axis=0)
        mask, times = np.ones_like(ids), {}
        for new in (args.new, 1):
            first, *times[new] = [_timed(run, ids, mask, new) for _ in range(1 + args.turns)]
            times[new] = median(times[new])
        step = (times[args.new] - times[1]) / max(1, args.new - 1)
        rows.append(
            {
                "side": side, "rows": len(ids), "call s": times[args.new], "prefill s": times[1], "step ms": 1e3 * step,
                "tokens/s": len(ids) * args.new / times[args.new], "of the limit": _limit(model, args, count) / step,
            }
        )  # fmt: skip
        print(rows[-1], flush=True)
    return rows


def _timed(run: Callable, ids: Any, mask: Any, new: int) -> float:
    start = time.perf_counter()
    run(ids, mask, new)
    return time.perf_counter() - start


def _options(new: int) -> dict[str, Any]:
    return {"do_sample": True, "top_k": 0, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": new}


def _ours(model: Path, device: str) -> Callable:
    from trl_jax.hub.auto import AutoModelForCausalLM

    loaded, options = AutoModelForCausalLM.from_pretrained(model), {"seed": 0, "dtype": "bfloat16"}
    return lambda ids, mask, new: loaded.generate(input_ids=ids, attention_mask=mask, **options, **_options(new))


def _theirs(model: Path, device: str) -> Callable:
    import torch
    import transformers

    loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).to(device).eval()

    def run(ids, mask, new):
        inputs = {"input_ids": torch.tensor(ids, device=device), "attention_mask": torch.tensor(mask, device=device)}
        return loaded.generate(**inputs, **_options(new)).cpu()

    return run


_SIDES = {"transformers": _theirs, "trl_jax": _ours}


def _limit(model: Path, args: Any, completions: int) -> float:
    """Seconds per step at the published bandwidth, with half-full completions; 0 if the device is unknown."""
    import json

    import jax

    kind = jax.local_devices()[0].device_kind
    speed = next((bytes_a_second for name, bytes_a_second in BANDWIDTH.items() if name in kind), None)
    config = json.loads((model / "config.json").read_text())
    keys = 2 * 2 * config["num_key_value_heads"] * config["head_dim"] * config["num_hidden_layers"]
    cache = keys * args.prompts * (args.prompt + completions * args.new / 2)
    return 0.0 if speed is None else ((model / "model.safetensors").stat().st_size + cache) / speed


if __name__ == "__main__":
    main()
