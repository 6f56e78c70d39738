"""Check whether two checkouts of trl_jax give bitwise identical results in small named runs.

    python -m benchmarks.digests --write base.json        # in one checkout
    python -m benchmarks.digests --compare base.json      # in the other; exits with 1 on a difference

A run trains a tiny model for 6 to 8 steps on the CPU, evaluates, predicts and saves. The file has all logged numbers
except times, and for each saved tensor and the predictions a digest and a few evenly spaced elements, which show
roughly how different two tensors are. Runs named "mesh ..." use eight simulated devices. Files are only comparable for
the same processor, jaxlib and XLA_FLAGS, because rounding may differ otherwise.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import traceback
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from benchmarks.digest_runs import RUNS, measured

EIGHT_DEVICES = "--xla_force_host_platform_device_count=8"


def differences(ours: dict, theirs: dict) -> str | None:
    """A description of the differences of two results; None if they are equal. NaN equals NaN."""
    logs = _log_differences(ours["logs"], theirs["logs"])
    return "; ".join([*logs, *_tensor_differences(ours["tensors"], theirs["tensors"])]) or None


def _log_differences(ours: list[dict], theirs: list[dict]) -> Iterator[str]:
    if len(ours) != len(theirs):
        yield f"{len(ours)} log entries, were {len(theirs)}"
    pairs = list(zip(ours, theirs, strict=False))
    messages = [
        f"first in log entry {number}, {key}: {our_entry.get(key)!r}, was {their_entry.get(key)!r}"
        for number, (our_entry, their_entry) in enumerate(pairs)
        for key in dict.fromkeys([*their_entry, *our_entry])
        if repr(our_entry.get(key)) != repr(their_entry.get(key))
    ]
    if messages:
        losses = [(a[key], b[key]) for a, b in pairs for key in a.keys() & b.keys() if "loss" in key]
        gap = _distance([a for a, _ in losses], [b for _, b in losses])
        yield f"{messages[0]}; {len(messages)} figures in all, losses up to {gap:.3g} apart"


def _tensor_differences(ours: dict, theirs: dict) -> Iterator[str]:
    if ours.keys() != theirs.keys():
        yield f"tensors on one side only: {sorted(ours.keys() ^ theirs.keys())}"
    distances = {
        name: _distance(ours[name]["samples"], theirs[name]["samples"])
        for name in sorted(ours.keys() & theirs.keys())
        if ours[name]["sha256"] != theirs[name]["sha256"]
    }
    if distances:
        worst = max(distances, key=distances.get)
        yield f"{len(distances)} of {len(ours)} tensors, samples up to {distances[worst]:.3g} apart, in {worst}"


def _distance(ours: list[float], theirs: list[float]) -> float:
    gaps = (abs(a - b) for a, b in zip(ours, theirs, strict=True) if repr(a) != repr(b))
    return max((math.inf if math.isnan(gap) else gap for gap in gaps), default=0.0)


def _results(names: list[str]) -> Iterator[tuple[str, dict | None]]:
    """Yield (name, results, or None if it failed), with one process for single-device runs and one for meshes."""
    os.environ |= {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    os.environ |= {"HF_DATASETS_DISABLE_PROGRESS_BARS": "1", "TORCH_COMPILE_DISABLE": "1", "TQDM_DISABLE": "1"}
    flags = os.environ.get("XLA_FLAGS", "")
    for devices in ("", EIGHT_DEVICES):
        os.environ["XLA_FLAGS"] = f"{flags} {devices}".strip()
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            for name in names:
                if name.startswith("mesh ") == bool(devices):
                    try:
                        yield name, pool.submit(measured, name).result()
                    except Exception:  # continue with the other runs
                        traceback.print_exc()
                        yield name, None


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    mode = options.add_mutually_exclusive_group(required=True)
    mode.add_argument("--write", type=Path, help="file to write the results to")
    mode.add_argument("--compare", type=Path, help="file of results to compare with")
    options.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS), metavar="NAME", help=", ".join(RUNS))
    args = options.parse_args()
    recorded = {} if args.compare is None else json.loads(args.compare.read_text(encoding="utf-8"))
    results, bad = {}, 0
    for name, result in _results(args.only):
        results[name] = result
        verdict = "FAILED" if result is None else "done" if args.write else _verdict(result, recorded.get(name))
        bad += verdict not in ("same", "done")
        print(f"{name}: {verdict}", flush=True)
    if args.write and not bad:
        args.write.write_text(json.dumps(results) + "\n", encoding="utf-8")
    if bad:
        raise SystemExit(f"{bad} of {len(results)} runs " + ("failed, nothing written" if args.write else "differ"))


def _verdict(result: dict, recorded: dict | None) -> str:
    difference = "the file has no such run" if recorded is None else differences(result, recorded)
    return "same" if difference is None else f"DIFFERENT: {difference}"


if __name__ == "__main__":
    main()
