"""How the time of a step grows with tokens, pairs and layers; and which steps of a long run compile a shape.

One of the three is varied at a time, with the others at their minimum. Pairs are random tokens of one length without a
common prefix, so that the layout has no influence. Each point runs in its own process; times are medians over the steps
after the first two. Exponents are fitted to all points on a log-log scale, and computed for the last doubling, which
shows the asymptotic growth.

    python -m benchmarks.scaling --picture scaling.svg
    python -m benchmarks.scaling --data PAIRS.jsonl.gz --steps 300    # which steps of a real run compile
"""

from __future__ import annotations

import logging
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import common, turns

AXES = {
    "tokens": [256, 512, 1024, 2048, 4096, 8192],
    "pairs": [4, 8, 16, 32, 64, 128],
    "layers": [4, 8, 16, 32],
}
VOCABULARY = 1024


def main() -> None:
    args = _arguments()
    common.prepare(args.cpus)
    with tempfile.TemporaryDirectory() as folder:
        if args.data is not None:
            turns.build_small(Path(folder) / "real", args.data, 2, 64)
            shapes = common.in_child(compiling, Path(folder) / "real", args.data, args.steps)
            print(f"{args.steps} steps of 8 real pairs; these compiled a shape: {shapes}")
            return
        rows = [row for axis in args.axes for row in _along(axis, args, Path(folder))]
    common.show(rows)
    fits = [fit(axis, [row for row in rows if row["axis"] == axis]) for axis in args.axes]
    common.show(fits)
    common.write_json(args.json, {"points": rows, "fits": fits})
    if args.picture is not None:
        draw(args.picture, rows)


def _arguments():
    options = common.parser(__doc__)
    options.add_argument("--axes", nargs="+", default=list(AXES), choices=AXES)
    options.add_argument("--width", type=int, default=128, help="a multiple of 64")
    options.add_argument("--repeats", type=int, default=3, help="steps that are timed at each point")
    options.add_argument("--most", type=int, help="leave out what is larger than this")
    options.add_argument("--picture", type=Path, help="draw the points into this file; wants matplotlib")
    options.add_argument("--data", type=Path, help="jsonl of chosen and rejected texts, for --steps")
    options.add_argument("--steps", type=int, default=300, help="of the run that is watched compiling")
    return options.parse_args()


def _along(axis: str, args: Any, folder: Path) -> list[dict]:
    points = []
    for size in AXES[axis]:
        if args.most is not None and size > args.most:
            continue
        sizes = {name: values[0] for name, values in AXES.items()} | {axis: size}
        model = folder / f"layers-{sizes['layers']}"
        if not model.exists():
            common.build_llama(model, layers=sizes["layers"], width=args.width, vocab_size=VOCABULARY)
        seconds, peak = common.in_child(timed, model, sizes["tokens"], sizes["pairs"], args.repeats)
        points.append({"axis": axis, "size": size, "step s": median(seconds), "peak MB": peak})
    return points


def timed(model: Path, tokens: int, pairs: int, repeats: int) -> tuple[list[float], float]:
    """Seconds of each step except the first two, and the process's peak memory in MB."""
    import jax
    import numpy as np
    from datasets import Dataset
    from transformers import PrinterCallback, TrainerCallback

    from trl_jax.trainer.reward_config import RewardConfig
    from trl_jax.trainer.reward_trainer import RewardTrainer

    ends = []

    class Clock(TrainerCallback):
        def on_step_end(self, args, state, control, model, **kwargs):
            jax.block_until_ready(model.params)
            ends.append(time.perf_counter())

    ids = np.random.default_rng(0).integers(10, VOCABULARY, (pairs, 2, tokens)).tolist()
    rows = Dataset.from_list([{"chosen_ids": chosen, "rejected_ids": rejected} for chosen, rejected in ids])
    args = RewardConfig(
        tempfile.mkdtemp(), per_device_train_batch_size=pairs, max_steps=repeats + 2, bf16=False, use_cpu=True,
        report_to="none", save_strategy="no", disable_tqdm=True, max_length=None, logging_steps=100,
    )  # fmt: skip
    tokenizer = _words()
    trainer = RewardTrainer(str(model), args, train_dataset=rows, processing_class=tokenizer, callbacks=[Clock()])
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return [after - before for before, after in zip(ends[1:], ends[2:], strict=False)], common.memory()


def _words() -> Any:
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as folder:
        common.build_tokenizer(Path(folder), ["a b"], 300)
        return AutoTokenizer.from_pretrained(folder)


def compiling(model: Path, data: Path, steps: int) -> list[int]:
    """The steps, counted from 1, that compiled a shape."""
    from transformers import TrainerCallback

    from trl_jax.trainer.reward_config import RewardConfig
    from trl_jax.trainer.reward_trainer import RewardTrainer

    lines, seen = [], []
    logger = logging.getLogger("trl_jax.training.devices")
    logger.addHandler(type("Lines", (logging.Handler,), {"emit": lambda self, record: lines.append(record)})())

    class NonFiniteGuard(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            seen.extend([state.global_step] * (len(lines) - len(seen)))

    config = {"max_length": 512}
    rows = turns.dataset(model, config, kind="real", data=data, pairs=1600, length=0, batch=8, grouped=False)
    args = RewardConfig(
        tempfile.mkdtemp(), max_steps=steps, use_cpu=True, bf16=False, report_to="none", save_strategy="no",
        disable_tqdm=True, logging_steps=100, log_level="info", **config,
    )  # fmt: skip
    RewardTrainer(str(model), args, train_dataset=rows, callbacks=[NonFiniteGuard()]).train()
    return seen


def fit(axis: str, rows: list[dict]) -> dict[str, Any]:
    """Fit the exponent in `seconds ~ size**exponent`."""
    import numpy as np

    size, seconds = (np.log([row[key] for row in rows]) for key in ("size", "step s"))
    last = float((seconds[-1] - seconds[-2]) / (size[-1] - size[-2]))
    return {"axis": axis, "exponent": float(np.polyfit(size, seconds, 1)[0]), "of the last doubling": last}


def draw(path: Path, rows: list[dict]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, plots = pyplot.subplots(1, len(AXES), figsize=(9, 3), sharey=True, layout="constrained")
    for plot, axis in zip(plots, AXES, strict=True):
        points = [row for row in rows if row["axis"] == axis]
        plot.loglog([row["size"] for row in points], [row["step s"] for row in points], "o-")
        plot.set_xticks([row["size"] for row in points], [f"{row['size']:,}" for row in points], fontsize=7)
        plot.minorticks_off()
        plot.set_xlabel({"tokens": "tokens a text", "pairs": "pairs a step", "layers": "layers"}[axis])
        plot.grid(True, which="both", alpha=0.3)
    plots[0].set_ylabel("seconds a step")
    figure.savefig(path)


if __name__ == "__main__":
    main()
