"""Compare every model_type that the exporter supports with transformers: scores, gradients, seconds.

Each type runs in its own process, so that a failure does not affect the others.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import common
from compat_tests.exported import configs


def main() -> None:
    options = common.parser(__doc__)
    options.add_argument("--types", nargs="+", default=configs.TYPES, metavar="TYPE")
    args = options.parse_args()
    common.prepare(args.cpus)
    table = []
    for model_type in args.types:
        table.append(common.in_child(measure, model_type))
        print(*(f"{name} {value:.3g}" if isinstance(value, float) else value for name, value in table[-1].items()))
    common.write_json(args.json, table)
    bad = [row["type"] for row in table if not row["ok"]]
    print(f"{len(table) - len(bad)} of {len(table)} within 1e-5 (scores) and 1e-4 (gradients)", *bad)


def measure(model_type: str) -> dict[str, Any]:
    """A row of the table, with the error if there was one."""
    from compat_tests.exported.check import compare

    start = time.perf_counter()
    row: dict[str, Any] = {"type": model_type, "ok": False}
    with tempfile.TemporaryDirectory() as folder:
        try:
            gaps = compare(configs.build(Path(folder), model_type))
        except Exception as error:  # continue with the next type
            return row | {"error": f"{type(error).__name__}: {str(error)[:200]}"}
    row |= {"ok": gaps.scores < 1e-5 and gaps.gradients < 1e-4, "scores": float(gaps.scores)}
    return row | {"gradients": gaps.gradients, "at": gaps.parameter, "seconds": time.perf_counter() - start}


if __name__ == "__main__":
    main()
