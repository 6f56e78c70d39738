"""Import times of trl_jax and TRL, alternately in fresh interpreters."""

from __future__ import annotations

import json
import subprocess
import sys

from benchmarks import common

STATEMENTS = (
    "import trl_jax",
    "import trl",
    "from trl_jax import RewardConfig",
    "from trl import RewardConfig",
    "from trl_jax import RewardTrainer",
    "from trl import RewardTrainer",
)
HEAVY = ("torch", "jax", "transformers", "datasets", "accelerate")
PROBE = """
import json, sys, time
start = time.perf_counter()
{statement}
seconds = time.perf_counter() - start
print(json.dumps([seconds, [name for name in {heavy} if name in sys.modules]]))
"""


def main() -> None:
    options = common.parser(__doc__)
    options.add_argument("--rounds", type=int, default=5)
    args = options.parse_args()
    common.prepare(args.cpus)
    for statement in STATEMENTS:  # warm the disk cache
        probe(statement)
    measured: dict[str, list] = {statement: [] for statement in STATEMENTS}
    for _ in range(args.rounds):
        for statement in STATEMENTS:
            measured[statement].append(probe(statement))
    rows = [
        {
            "statement": statement,
            "median s (least to most)": common.spread(seconds for seconds, _ in times),
            "loads": " ".join(times[0][1]) or "none of them",
        }
        for statement, times in measured.items()
    ]
    common.show(rows)
    common.write_json(args.json, measured)


def probe(statement: str) -> tuple[float, list[str]]:
    """The seconds that a statement takes in a fresh interpreter, and the heavy packages that it imports."""
    code = PROBE.format(statement=statement, heavy=HEAVY)
    python = [sys.executable, "-W", "ignore", "-c", code]
    out = subprocess.run(python, check=True, capture_output=True, text=True)
    seconds, loaded = json.loads(out.stdout.splitlines()[-1])
    return seconds, loaded


if __name__ == "__main__":
    main()
