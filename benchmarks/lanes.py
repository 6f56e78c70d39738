"""Arms of a benchmark: trainers in separate processes that alternate, so that all see the same machine load."""

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
    """The parent's view of an arm's process. `seconds` are those of each segment so far."""

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
        checkout: the arm imports trl_jax from this other checkout of the repository.
    """
    with _importing_from(checkout):
        pipe = begin(take, *work)
    return Lane(name, pipe, pipe.recv())


def begin(take: Callable[..., None], *work: Any) -> Connection:
    """Start an arm without waiting; its facts arrive through the pipe."""
    context = get_context("spawn")
    parent, child = context.Pipe()
    context.Process(target=take, args=(child, *work), daemon=True).start()
    child.close()
    return parent


@contextlib.contextmanager
def _importing_from(checkout: Path | None) -> Iterator[None]:
    """Processes started in this context look for modules in that folder first, because they inherit sys.path."""
    path = sys.path.copy()
    sys.path[:0] = [] if checkout is None else [str(checkout.absolute())]
    yield
    sys.path[:] = path


def race(lanes: Sequence[Lane], segments: int) -> None:
    """Run all segments in all arms, rotating which arm is first; then collect the arms' final facts."""
    for segment in range(segments):
        first = segment % len(lanes)
        for lane in [*lanes[first:], *lanes[:first]]:
            lane.turn()
    for lane in lanes:
        lane.facts |= lane.pipe.recv()


def apart(base: Lane, lane: Lane, key: str) -> float:
    """The largest difference of a logged number between two arms."""
    pairs = zip(base.facts["logs"], lane.facts["logs"], strict=True)
    return max(abs(theirs[key] - ours[key]) for theirs, ours in pairs)


def add_options(options: ArgumentParser, texts: str) -> None:
    """Add the options that benchmarks with arms share; `texts` describes the data file."""
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
    """The trainer arguments of an arm with a fixed number of steps, logged once per segment."""
    return {
        "output_dir": str(folder / name), "per_device_train_batch_size": args.batch, "max_length": args.max_length,
        "max_steps": args.warm_up + args.steps, "bf16": False, "train_sampling_strategy": "sequential",
        "use_cpu": True, "report_to": "none", "save_strategy": "no", "disable_tqdm": True,
        "logging_steps": args.segment,
    }  # fmt: skip


def table(lanes: Sequence[Lane], args: Any, other_steps: Sequence[str] = ()) -> list[dict[str, Any]]:
    """A row per arm, for the steps after the warm-up; ratios are computed per segment.

    Args:
        other_steps: the arms whose steps train on different rows, so that losses cannot be compared.
    """
    base, warm = lanes[0], args.warm_up // args.segment
    rates = {lane.name: rates_of(lane, warm, _that_counts(lane, lanes)) for lane in lanes}
    return [
        {
            "arm": lane.name,
            "step s": common.spread(seconds / args.segment for seconds in lane.seconds[warm:]),
            "tokens/s": common.spread(rates[lane.name]),
            f"times {base.name}": common.spread(
                ours / base_rate for ours, base_rate in zip(rates[lane.name], rates[base.name], strict=True)
            ),
            "compile s": lane.facts["compile s"],
            "first step s": lane.facts["first step s"],
            "peak MB": lane.facts["peak MB"],
            "loss apart": None if lane.name in other_steps else apart(base, lane, "loss"),
        }
        for lane in lanes
    ]


def _that_counts(lane: Lane, lanes: Sequence[Lane]) -> Lane:
    """The arm that provides a lane's token counts: itself, or, if its trainer does not log them, another one."""
    return next(arm for arm in (lane, *lanes) if "num_tokens" in arm.facts["logs"][0])


def rates_of(lane: Lane, warm: int, counting: Lane | None = None) -> list[float]:
    """Text tokens per second in each measured segment, as counted by the trainer of the lane, or of `counting`."""
    totals = [entry["num_tokens"] for entry in (counting or lane).facts["logs"]]
    tokens = [after - before for before, after in zip([0, *totals], totals, strict=False)]
    return [count / seconds for count, seconds in zip(tokens[warm:], lane.seconds[warm:], strict=True)]
