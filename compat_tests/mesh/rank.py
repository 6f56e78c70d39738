"""One process of a run of several: python -m compat_tests.mesh.rank ours|trl FOLDER OUT '{"seed": 1}'"""

from __future__ import annotations

import json
import os
import sys

ROWS = 44  # 6 micro-batches of 2 x 4 pairs, the last with four pairs of the first


def main(whose: str, folder: str, out: str, config: str) -> None:
    from compat_tests import tiny
    from compat_tests.parity import reference

    run = {"ours": reference.run_ours, "trl": reference.run_trl}[whose]
    first = os.environ.get("RANK", os.environ.get("JAX_PROCESS_ID")) == "0"
    if not first:  # whose save may not be there yet
        reference.read_weights = lambda folder: {}
    found = run(folder, tiny.preference_rows(ROWS, margin=True), f"{out}/{whose}", **json.loads(config))
    if first:
        with open(f"{out}/{whose}.json", "w", encoding="utf-8") as file:
            json.dump(found.logs, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
