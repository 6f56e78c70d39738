#!/usr/bin/env bash
# Create a virtual environment, install this package into it, and train a tiny reward model on the CPU.
#
#   bash examples/quickstart.sh [options of quickstart.py]
#
# PYTHON=/path/to/python selects the interpreter. Another run reuses the environment.
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
    found="$("$tried" --version 2>/dev/null || echo "not a working Python")"
    echo "quickstart: $tried is $found, expected Python 3.11, 3.12 or 3.13." >&2
    echo "Install one of them, or pass its path: PYTHON=/path/to/python3.12 bash examples/quickstart.sh" >&2
    exit 1
fi

if [ -d "$venv" ] && ! fits "$venv/bin/python"; then
    echo "== $venv no longer works: creating it again"
    rm -rf "$venv"
fi
if [ ! -d "$venv" ]; then
    echo "== Creating $venv with $("$python" --version)"
    "$python" -m venv "$venv"
fi

echo "== Installing trl_jax and its dependencies (no torch); the first time takes a few minutes"
# One line per package as it is fetched; errors are on stderr.
"$venv/bin/python" -m pip install --disable-pip-version-check "$root" |
    sed -un -e 's/^Collecting \([^][ ;<>=!~(]*\).*/   \1/p' -e 's/^Installing collected packages.*/   installing .../p'

echo "== Training on the CPU"
# The model and the data are local, so nothing is downloaded from the Hub.
export JAX_PLATFORMS=cpu HF_HUB_OFFLINE=1
# Keep the terminal clear for the table.
export HF_DATASETS_DISABLE_PROGRESS_BARS=1
cd "$root"
"$venv/bin/python" examples/quickstart.py "$@"
