"""Conversations of several turns: the completions of GRPO with tools, where each turn continues the texts of the last.

A turn ends with a tool call, and the next one begins with the tool's answer. TRL generates each turn from the whole
text with transformers; trl_jax does the same ("prefill"), or continues from the cache of the last turn ("reuse", the
default). Random weights, float32, no EOS tokens, so every turn has the same number of tokens. Sides alternate in one
process, after one warm-up; times are CPU seconds of all turns but the first, which is the same with and without reuse.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import common
from benchmarks.generate import MODELS

SEED = 0


class Work(NamedTuple):
    """Prompts of `longest` tokens, with `completions` each; turns of `new` tokens, and answers of `answer` tokens."""

    model: str
    prompts: int
    completions: int
    longest: int
    turns: int
    new: int
    answer: int


def main() -> None:
    args = _arguments()
    common.prepare(args.cpus)
    work = Work(**{name: vars(args)[name] for name in Work._fields})
    with tempfile.TemporaryDirectory() as scratch:
        common.build_llama(Path(scratch), **MODELS[args.model])
        rows = common.in_child(race, Path(scratch), work, args.rounds, args.sides)
        for row in rows:
            row["peak MB"] = common.in_child(peak, row["side"], Path(scratch), work)
    common.show(rows)
    common.write_json(args.json, {"rows": rows, "options": vars(args)})


def _arguments():
    options = common.parser(__doc__)
    options.add_argument("--model", choices=MODELS, default="small")
    options.add_argument("--prompts", type=int, default=4)
    options.add_argument("--completions", type=int, default=8, help="of each prompt")
    options.add_argument("--longest", type=int, default=512, help="tokens of a prompt")
    options.add_argument("--turns", type=int, default=4, help="turns of each completion")
    options.add_argument("--new", type=int, default=64, help="tokens of a turn")
    options.add_argument("--answer", type=int, default=32, help="tokens of a tool's answer")
    options.add_argument("--rounds", type=int, default=3, help="conversations measured on each side")
    options.add_argument("--sides", choices=SIDES, nargs="+", default=SIDES)
    return options.parse_args()


def options_of(work: Work) -> dict[str, Any]:
    return {"do_sample": True, "pad_token_id": 0, "eos_token_id": None, "max_new_tokens": work.new, "top_k": 0}


def talk(work: Work, generate: Callable[[list[list[int]], int], list[list[int]]]) -> list[list[int]]:
    """Hold the conversations; `generate` returns the next turn of each text, `completions` of each prompt at first."""
    import numpy as np

    rng = np.random.default_rng(0)

    def random_tokens(count: int) -> list[int]:
        return rng.integers(5, MODELS[work.model]["vocab_size"], count).tolist()

    prompts = [random_tokens(work.longest) for _ in range(work.prompts)]
    texts = [list(prompt) for prompt in prompts for _ in range(work.completions)]
    for turn in range(work.turns):
        answers = generate(texts if turn else prompts, 1 if turn else work.completions)
        texts = [text + answer + random_tokens(work.answer) for text, answer in zip(texts, answers, strict=True)]
    return texts


def ours(folder: Path, work: Work, *, reuse: bool) -> Callable[[int], Any]:
    """A function that holds conversations of a given number of turns."""
    from trl_jax.core.torch_random import TorchGenerator
    from trl_jax.generation.reuse import TurnCache
    from trl_jax.hub.auto import AutoModelForCausalLM
    from trl_jax.hub.generate import complete

    model = AutoModelForCausalLM.from_pretrained(folder)
    options = options_of(work)

    def run(turns: int) -> list[list[int]]:
        stream, cache = TorchGenerator(SEED), TurnCache() if reuse else None

        def generate(texts: list[list[int]], group: int) -> list[list[int]]:
            return complete(model, texts, options, group=group, stream=stream, logps=False, turns=cache).tokens.tolist()

        return talk(work._replace(turns=turns), generate)

    return run


def theirs(folder: Path, work: Work) -> Callable[[int], Any]:
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    options = options_of(work)

    def generate(texts: list[list[int]], group: int) -> list[list[int]]:
        ids = torch.tensor(texts).repeat_interleave(group, dim=0)
        output = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)
        return output[:, ids.shape[1] :].tolist()

    def run(turns: int) -> list[list[int]]:
        torch.manual_seed(SEED)
        return talk(work._replace(turns=turns), generate)

    return run


def _side(name: str, folder: Path, work: Work) -> Callable[[int], Any]:
    return theirs(folder, work) if name == "transformers" else ours(folder, work, reuse=name == "trl_jax, reuse")


SIDES = ("transformers", "trl_jax, prefill", "trl_jax, reuse")


def race(folder: Path, work: Work, rounds: int, sides: Sequence[str]) -> list[dict[str, Any]]:
    """Measure the sides; ratios compare with the first one."""
    runs, sizes = {side: _side(side, folder, work) for side in sides}, {"whole": work.turns, "first": 1}
    calls = {(side, part): partial(run, turns) for side, run in runs.items() for part, turns in sizes.items()}
    texts, cold, times = common.turn_about(calls, rounds)
    later = {
        side: [whole - first for whole, first in zip(times[side, "whole"], times[side, "first"], strict=True)]
        for side in sides
    }
    base, baseline = texts[sides[0], "whole"], later[sides[0]]
    return [
        {
            "side": side,
            "later turns s": common.spread(later[side]),
            "times": common.spread(base / ours for base, ours in zip(baseline, later[side], strict=True)),
            "first turn s": common.spread(times[side, "first"]),
            "warm-up s": cold[side, "whole"],
            "equal rows": f"{sum(map(list.__eq__, base, texts[side, 'whole']))} of {len(base)}",
        }
        for side in sides
    ]


def peak(side: str, folder: Path, work: Work) -> float:
    """Peak memory of the conversations in MB, including the model's weights."""
    import torch  # noqa: F401
    import transformers  # noqa: F401

    import trl_jax.hub.auto  # noqa: F401

    before = common.memory("VmRSS")
    _side(side, folder, work)(work.turns)
    return common.memory() - before


if __name__ == "__main__":
    main()
