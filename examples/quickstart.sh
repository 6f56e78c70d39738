#!/usr/bin/env bash
# Make a virtual environment, install this package into it, and train a tiny reward model on the CPU.
#
#   bash examples/quickstart.sh [options of quickstart.py]
#
# PYTHON=/path/to/python chooses the interpreter. Running it again reuses the environment.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="$root/.venv-quickstart"

fits() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; }

python=""
for candidate in ${PYTHON:+"$PYTHON"} python3 python3.13 python3.12 python3.11; do
    if fits "$candidate"; then
        python="$candidate"
        break
    elif [ "$candidate" = "${PYTHON:-}" ]; then
        break
    fi
done
if [ -z "$python" ]; then
    tried="${PYTHON:-python3}"
    found="$("$tried" --version 2>/dev/null || echo "not a Python that runs")"
    echo "quickstart: $tried is $found, wanted Python 3.11, 3.12 or 3.13." >&2
    echo "Install one of them, or name it: PYTHON=/path/to/python3.12 bash examples/quickstart.sh" >&2
    exit 1
fi

if [ -d "$venv" ] && ! fits "$venv/bin/python"; then
    echo "== $venv does not work any more: making it anew"
    rm -rf "$venv"
fi
if [ ! -d "$venv" ]; then
    echo "== Making $venv with $("$python" --version)"
    "$python" -m venv "$venv"
fi

echo "== Installing trl_jax and what it needs (no torch)"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$root"

echo "== Training on the CPU"
# The model and the pairs are here already, so nothing may be fetched from the Hub.
export JAX_PLATFORMS=cpu HF_HUB_OFFLINE=1
# Leaves the terminal to the table: no bars for 500 rows, no advice to install torch.
export HF_DATASETS_DISABLE_PROGRESS_BARS=1 TRANSFORMERS_NO_ADVISORY_WARNINGS=1
cd "$root"
"$venv/bin/python" examples/quickstart.py "$@"
