"""Arms of a benchmark: live trainers in processes of their own that take turns, so that all meet the same machine."""

from __future__ import annotations

import contextlib
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks import common


@dataclass
class Lane:
    """One arm's process, as seen from here: `seconds` of each of its segments."""

    name: str
    pipe: Connection
    facts: dict[str, Any]
    seconds: list[float] = field(default_factory=list)

    def turn(self) -> None:
        self.pipe.send("go")
        self.seconds.append(self.pipe.recv())


def start(name: str, take: Callable[..., None], *work: Any, checkout: Path | None = None) -> Lane:
    """Start an arm, `take(pipe, *work)`, and wait until its trainer is built.

    Args:
        checkout: another one of the repository that the arm is of.
    """
    with _importing_from(checkout):
        pipe = begin(take, *work)
    return Lane(name, pipe, pipe.recv())


def begin(take: Callable[..., None], *work: Any) -> Connection:
    """Start an arm, and do not wait: its facts come through the pipe."""
    context = get_context("spawn")
    here, there = context.Pipe()
    context.Process(target=take, args=(there, *work), daemon=True).start()
    there.close()
    return here


@contextlib.contextmanager
def _importing_from(checkout: Path | None) -> Iterator[None]:
    """A process that is started meanwhile looks for its modules in that folder first: it is handed our sys.path."""
    kept = sys.path.copy()
    sys.path[:0] = [] if checkout is None else [str(checkout.absolute())]
    yield
    sys.path[:] = kept


def race(lanes: Sequence[Lane], segments: int) -> None:
    """Run every segment in each arm, the first to go changing; then add what the arms say at their end."""
    for segment in range(segments):
        first = segment % len(lanes)
        for lane in [*lanes[first:], *lanes[:first]]:
            lane.turn()
    for lane in lanes:
        lane.facts |= lane.pipe.recv()


def apart(base: Lane, lane: Lane, key: str) -> float:
    """The largest difference between two arms of a logged figure."""
    pairs = zip(base.facts["logs"], lane.facts["logs"], strict=True)
    return max(abs(theirs[key] - ours[key]) for theirs, ours in pairs)


def add_options(options: ArgumentParser, texts: str) -> None:
    """The options of every benchmark of arms; `texts` says which the file of data has."""
    options.add_argument("--data", type=Path, required=True, help=f"jsonl of {texts} texts")
    options.add_argument("--model", type=Path, help="checkpoint; unset, a llama of --layers and --width")
    options.add_argument("--layers", type=int, default=8)
    options.add_argument("--width", type=int, default=256, help="a multiple of 64")
    options.add_argument("--control_length", type=int, default=256, help="tokens of every row of the control")
    options.add_argument("--batch", type=int, default=8)
    options.add_argument("--segment", type=int, default=4, help="steps a turn")
    options.add_argument("--max_length", type=int, default=1024)


def add_steps(options: ArgumentParser, warm_up: int, steps: int) -> None:
    options.add_argument("--warm_up", type=int, default=warm_up)
    options.add_argument("--steps", type=int, default=steps)


def config_of(name: str, args: Any, folder: Path) -> dict[str, Any]:
    """The arguments of an arm that is told how many steps it has, in which each segment is logged."""
    return {
        "output_dir": str(folder / name), "per_device_train_batch_size": args.batch, "max_length": args.max_length,
        "max_steps": args.warm_up + args.steps, "bf16": False, "train_sampling_strategy": "sequential",
        "use_cpu": True, "report_to": "none", "save_strategy": "no", "disable_tqdm": True,
        "logging_steps": args.segment,
    }  # fmt: skip


def table(lanes: Sequence[Lane], args: Any, other_steps: Sequence[str] = ()) -> list[dict[str, Any]]:
    """A row an arm, of the steps behind the warm-up; ratios are those of segments.

    Args:
        other_steps: the arms whose steps are of other rows.
    """
    base, warm = lanes[0], args.warm_up // args.segment
    rates = {lane.name: rates_of(lane, warm, _that_counts(lane, lanes)) for lane in lanes}
    return [
        {
            "arm": lane.name,
            "step s": common.spread(seconds / args.segment for seconds in lane.seconds[warm:]),
            "tokens/s": common.spread(rates[lane.name]),
            f"times {base.name}": common.spread(
                own / other for own, other in zip(rates[lane.name], rates[base.name], strict=True)
            ),
            "compile s": lane.facts["compile s"],
            "first step s": lane.facts["first step s"],
            "peak MB": lane.facts["peak MB"],
            "loss apart": None if lane.name in other_steps else apart(base, lane, "loss"),
        }
        for lane in lanes
    ]


def _that_counts(lane: Lane, lanes: Sequence[Lane]) -> Lane:
    """The arm whose count of tokens is a lane's: its own, or another's of the same rows where its trainer has none."""
    return next(one for one in (lane, *lanes) if "num_tokens" in one.facts["logs"][0])


def rates_of(lane: Lane, warm: int, counting: Lane | None = None) -> list[float]:
    """Tokens of text a second of each measured segment, by the trainer's own count, or by that of `counting`."""
    totals = [entry["num_tokens"] for entry in (counting or lane).facts["logs"]]
    tokens = [after - before for before, after in zip([0, *totals], totals, strict=False)]
    return [count / seconds for count, seconds in zip(tokens[warm:], lane.seconds[warm:], strict=True)]
