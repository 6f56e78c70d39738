"""Count the files and functions of the package that a two-step run executes: python -m compat_tests.trace_run dpo grpo

Prints a line of totals for each run; --list also prints each file with the number of its functions that ran.
"""

from __future__ import annotations

import argparse
import inspect
import multiprocessing
import sys
import tempfile
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any


def dpo(model: str, folder: str) -> Any:
    from datasets import Dataset

    import trl_jax

    rows = [{"prompt": f"say {i}", "chosen": f"yes {i}", "rejected": f"no {i}"} for i in range(4)]
    args = trl_jax.DPOConfig(max_length=32, **_common(folder))
    return trl_jax.DPOTrainer(model=model, args=args, train_dataset=Dataset.from_list(rows))


def grpo(model: str, folder: str) -> Any:
    from datasets import Dataset

    import trl_jax

    rows = [{"prompt": f"say {i}"} for i in range(4)]
    args = trl_jax.GRPOConfig(num_generations=2, max_completion_length=4, **_common(folder))
    return trl_jax.GRPOTrainer(model, _lengths, args=args, train_dataset=Dataset.from_list(rows))


def _lengths(completions: list[str], **columns: Any) -> list[float]:
    return [float(len(text)) for text in completions]


def _common(folder: str) -> dict[str, Any]:
    return {
        "output_dir": f"{folder}/out", "max_steps": 2, "per_device_train_batch_size": 2, "logging_steps": 1,
        "save_strategy": "no", "report_to": "none", "use_cpu": True, "bf16": False, "disable_tqdm": True,
    }  # fmt: skip


RUNS = {"dpo": dpo, "grpo": grpo}


def traced(name: str) -> dict[str, set[str]]:
    """File (relative to the package) -> its functions that ran from importing the package to the end of train()."""
    import trl_jax
    from compat_tests.tiny import tiny_model

    package = f"{Path(trl_jax.__file__).parent}/"
    seen: set[Any] = set()

    def called(frame: Any, event: str, arg: Any) -> None:  # returning None turns line events off
        seen.add(frame.f_code)

    with tempfile.TemporaryDirectory() as folder:
        model = str(tiny_model(Path(folder) / "model", "llama", head="causal", num_hidden_layers=1))
        threading.settrace(called)
        sys.settrace(called)
        try:
            RUNS[name](model, folder).train()
        finally:
            sys.settrace(None)
            threading.settrace(None)
    found: dict[str, set[str]] = defaultdict(set)
    for code in seen:
        function = code.co_flags & inspect.CO_OPTIMIZED  # not the body of a module or a class
        if function and code.co_filename.startswith(package):
            found[code.co_filename.removeprefix(package)].add(f"{code.co_name}:{code.co_firstlineno}")
    return dict(found)


def import_others() -> None:
    """Import the third-party libraries that the package uses, which is slow under a tracer, then forget the package."""
    import datasets  # noqa: F401
    import flax.nnx  # noqa: F401

    from trl_jax.cli.transformers_patches import import_without_models

    import_without_models()
    for name in [name for name in sys.modules if name.partition(".")[0] == "trl_jax"]:
        del sys.modules[name]


def report(name: str, *, lists: bool) -> None:
    found = traced(name)
    if lists:
        for file, functions in sorted(found.items()):
            print(f"{len(functions):4} {file}")
    print(f"{name}: {len(found)} files, {sum(map(len, found.values()))} functions", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", choices=RUNS)
    parser.add_argument("--list", action="store_true", help="name the files and how many of their functions ran")
    given = parser.parse_args()
    import_others()
    for name in given.runs:  # each in a forked process that has not imported the package
        run = multiprocessing.get_context("fork").Process(target=report, args=(name,), kwargs={"lists": given.list})
        run.start()
        run.join()
        if run.exitcode:
            sys.exit(run.exitcode)


if __name__ == "__main__":
    main()
