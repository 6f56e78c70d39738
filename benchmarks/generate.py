"""Generation with transformers and trl_jax: the same prompts, seed and random model, float32, without EOS tokens.

Calls alternate in one process, after one warm-up call each. Times are CPU seconds, which are more reliable than wall
time on a busy machine. "prefill" is a call for one token, "step" the remaining time of a call per token. Peak memory is
measured in a separate process per side, relative to the memory before its model is loaded.

`--axis` repeats the benchmark for several numbers of prompts, completions, prompt tokens or new tokens.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks import common

MODELS = {
    "small": {"layers": 8, "width": 256, "vocab_size": 2000},
    "medium": {"layers": 12, "width": 512, "vocab_size": 2000},
    "windowed": {"layers": 12, "width": 256, "vocab_size": 2000, "windows": ((128,) * 5 + (None,)) * 2},
    "smollm2": {"layers": 30, "width": 576, "vocab_size": 49152, "head": 64, "group": 3, "inner": 1536},
}
SEED = 0


class Work(NamedTuple):
    """The size of a call: prompts of `shortest` to `longest` tokens, completions per prompt, tokens per completion."""

    model: str
    prompts: int
    completions: int
    shortest: int
    longest: int
    new: int
    top_k: int
    top_p: float

    @property
    def tokens(self) -> int:
        return self.prompts * self.completions * self.new


def main() -> None:
    args = _arguments()
    common.prepare(args.cpus)
    fields = {name: vars(args)[name] for name in Work._fields}
    works = [Work(**(fields | ({args.axis: size} if args.axis else {}))) for size in args.sizes or [None]]
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        common.build_llama(folder, **MODELS[args.model])
        weights, speed = (folder / "model.safetensors").stat().st_size, common.in_child(bandwidth, folder)
        for work in works:
            measured = common.in_child(race, folder, work, args.turns)
            for row in measured:
                row["limit tokens/s"] = limit(work, weights, speed)
                row["peak MB"] = common.in_child(peak, row["side"], folder, work)
            rows += measured
            common.show(measured)
    if args.axis:
        common.show(rows)
    common.write_json(args.json, {"rows": rows, "options": vars(args)})


def _arguments():
    options = common.parser(__doc__)
    options.add_argument("--model", choices=MODELS, default="small")
    options.add_argument("--prompts", type=int, default=8)
    options.add_argument("--completions", type=int, default=8, help="of each prompt")
    options.add_argument("--shortest", type=int, default=64, help="tokens of the shortest prompt")
    options.add_argument("--longest", type=int, default=256, help="tokens of the longest prompt")
    options.add_argument("--new", type=int, default=128, help="tokens of each completion")
    options.add_argument("--top_k", type=int, default=0)
    options.add_argument("--top_p", type=float, default=1.0)
    options.add_argument("--turns", type=int, default=5, help="calls measured on each side")
    options.add_argument("--axis", choices=("prompts", "completions", "longest", "new"), help="what grows")
    options.add_argument("--sizes", type=int, nargs="+", help="its values")
    args = options.parse_args()
    if (args.axis is None) != (args.sizes is None):
        options.error("--axis and --sizes go together")
    return args


def inputs(work: Work) -> dict[str, Any]:
    """Left-padded ids and mask, each prompt repeated once per completion."""
    import numpy as np

    dice = np.random.default_rng(0)
    ids = dice.integers(5, MODELS[work.model]["vocab_size"], (work.prompts, work.longest))
    lengths = np.linspace(min(work.shortest, work.longest), work.longest, work.prompts).astype(int)
    mask = (np.arange(work.longest) >= work.longest - lengths[:, None]).astype(np.int64)
    return {
        "input_ids": (ids * mask).repeat(work.completions, axis=0),
        "attention_mask": mask.repeat(work.completions, axis=0),
    }


def options_of(work: Work, new: int) -> dict[str, Any]:
    options = {"do_sample": True, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": new}
    return options | {"top_k": work.top_k, "top_p": work.top_p}


def ours(folder: Path, work: Work) -> Callable[[int], Any]:
    """A function that generates a given number of tokens."""
    from trl_jax.hub.auto import AutoModelForCausalLM

    model, prompts = AutoModelForCausalLM.from_pretrained(folder), inputs(work)
    return lambda new: model.generate(**prompts, seed=SEED, **options_of(work, new))


def theirs(folder: Path, work: Work) -> Callable[[int], Any]:
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompts = {name: torch.tensor(array) for name, array in inputs(work).items()}

    def run(new: int) -> Any:
        torch.manual_seed(SEED)
        return model.generate(**prompts, **options_of(work, new)).numpy()

    return run


SIDES = {"transformers": theirs, "trl_jax": ours}


def race(folder: Path, work: Work, turns: int) -> list[dict[str, Any]]:
    runs, sizes = {side: make(folder, work) for side, make in SIDES.items()}, {"whole": work.new, "prefill": 1}
    calls = {(side, part): partial(run, new) for side, run in runs.items() for part, new in sizes.items()}
    tokens, cold, times = common.turn_about(calls, turns)
    whole, prefill = ({side: times[side, part] for side in SIDES} for part in sizes)
    equal = (tokens["transformers", "whole"] == tokens["trl_jax", "whole"]).all(axis=1)
    return [_row(side, work, cold[side, "whole"], whole, prefill, int(equal.sum())) for side in SIDES]


def _row(side: str, work: Work, cold: float, whole: dict, prefill: dict, equal: int) -> dict[str, Any]:
    def step(arm: str) -> float:
        return (median(whole[arm]) - median(prefill[arm])) / max(1, work.new - 1) * 1e3

    shapes = _compiled() if side == "trl_jax" else None
    return {
        "side": side,
        "call s": common.spread(whole[side]),
        "prefill s": median(prefill[side]),
        "step ms": step(side),
        "step tokens/s": work.prompts * work.completions / step(side) * 1e3 if work.new > 1 else None,
        "tokens/s": work.tokens / median(whole[side]),
        "times": median(whole["transformers"]) / median(whole[side]),
        "prefill times": median(prefill["transformers"]) / median(prefill[side]),
        "step times": step("transformers") / step(side) if work.new > 1 else None,
        "first call s": cold,
        "programs": shapes,
        "equal rows": f"{equal} of {work.prompts * work.completions}",
        **{name: size for name, size in work._asdict().items() if name in ("prompts", "completions", "longest", "new")},
    }


def _compiled() -> int:
    """Number of compiled programs for generation: prefills, first tokens, chunks of steps."""
    from trl_jax.generation.decode import first_tokens, next_tokens, prefill

    return sum(program._cache_size() for program in (prefill, first_tokens, next_tokens))


def peak(side: str, folder: Path, work: Work) -> float:
    """Peak memory of a call in MB, including the model's weights."""
    import torch  # noqa: F401
    import transformers  # noqa: F401

    import trl_jax.hub.auto  # noqa: F401

    before = common.memory("VmRSS")
    SIDES[side](folder, work)(work.new)
    return common.memory() - before


def bandwidth(folder: Path) -> float:
    """Memory bandwidth of this process in bytes per second, measured with a matrix-vector product."""
    import numpy as np

    matrix, vector = np.ones((2**13, 2**13), np.float32), np.ones(2**13, np.float32)
    matrix @ vector
    start = time.process_time()
    for _ in range(10):
        matrix @ vector
    return 10 * matrix.nbytes / (time.process_time() - start)


def limit(work: Work, weights: int, bytes_a_second: float) -> float:
    """Tokens per second if a step only read the weights and the KV cache once. A prompt's cache is read once for all of
    its completions, completions are half full, and both are limited by the attention window."""
    shape = MODELS[work.model]
    keys = 2 * 4 * shape["width"] // shape.get("group", 2)  # bytes of a token's keys and values in a layer
    mean, seen = (min(work.shortest, work.longest) + work.longest) / 2, shape.get("windows", (None,) * shape["layers"])
    seen = [math.inf if window is None else window for window in seen]
    cache = keys * work.prompts * sum(min(most, mean) + work.completions * min(most, work.new / 2) for most in seen)
    return work.prompts * work.completions * bytes_a_second / (weights + cache)


if __name__ == "__main__":
    main()
