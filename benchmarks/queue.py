"""Generate for many prompts with `--batch` slots: fixed batches, against refilling slots with waiting prompts.

The model has random weights in float32, and one in --mean ids is an EOS token, so that completion lengths vary as in
practice, where a batch waits for its longest completion. Both ways sample the same tokens. Calls alternate in one
process, after one warm-up call each; times are CPU seconds.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import common
from benchmarks.generate import MODELS


def main() -> None:
    options = common.parser(__doc__)
    options.add_argument("--model", choices=MODELS, default="small")
    options.add_argument("--prompts", type=int, default=128)
    options.add_argument("--longest", type=int, default=128, help="tokens of the longest prompt")
    options.add_argument("--new", type=int, default=256, help="tokens of a completion at most")
    options.add_argument("--mean", type=int, default=64, help="tokens of a completion that nothing cuts off")
    options.add_argument("--batch", type=int, default=16)
    options.add_argument("--turns", type=int, default=5, help="calls measured of each")
    args = options.parse_args()
    common.prepare(args.cpus)
    with tempfile.TemporaryDirectory() as scratch:
        common.build_llama(Path(scratch), **MODELS[args.model])
        rows = common.in_child(race, Path(scratch), args)
    common.show(rows)
    common.write_json(args.json, {"rows": rows, "options": vars(args)})


def race(folder: Path, args: Any) -> list[dict[str, Any]]:
    import numpy as np

    from trl_jax.core.torch_random import TorchGenerator
    from trl_jax.hub.auto import AutoModelForCausalLM
    from trl_jax.hub.generate import Batches
    from trl_jax.hub.generation_inputs import resolve

    model, dice = AutoModelForCausalLM.from_pretrained(folder), np.random.default_rng(0)
    prompts = [dice.integers(5, 2000, length).tolist() for length in dice.integers(1, args.longest, args.prompts)]
    ends = list(range(0, model.vocab_size, args.mean))
    fields = {"do_sample": True, "top_k": 0, "max_new_tokens": args.new, "eos_token_id": ends, "pad_token_id": 0}
    settings, _ = resolve(model, None, fields)
    by_length = np.argsort([-len(ids) for ids in prompts], kind="stable")

    def completed(*, refilled: bool) -> dict[int, list[int]]:
        batches, done = Batches(model, settings, prompts, stream=TorchGenerator(0), batch_size=args.batch), {}

        def take(completions: Any) -> None:
            done.update({completion.number: completion.generated_tokens for completion in completions})

        batches(take) if refilled else batches.in_batches(by_length, take)
        return done

    ways = {"whole batches": partial(completed, refilled=False), "refilled": partial(completed, refilled=True)}
    first, _, times = common.turn_about(ways, args.turns)
    tokens = sum(map(len, first["refilled"].values()))
    equal = sum(first["refilled"][number] == ids for number, ids in first["whole batches"].items())
    return [
        {
            "way": name, "call s": common.spread(times[name]), "tokens": tokens,
            "tokens/s": tokens / median(times[name]),
            "times": median(times["whole batches"]) / median(times[name]), "equal": f"{equal} of {len(prompts)}",
        }
        for name in ways
    ]  # fmt: skip


if __name__ == "__main__":
    main()
