#!/usr/bin/env bash
# Create a virtual environment with this package and the reference (TRL with torch for the CPU), and run the tests.
#
#   bash compat_tests/run.sh [options of pytest]      with LIVE=1 or THOROUGH=1: more tests, see CONTRIBUTING.md
#   bash compat_tests/run.sh --install                only create the environment
#
# PYTHON=/path/to/python selects the interpreter, VENV=.venv-other the environment's folder, and
# TORCH="torch==2.13.0 --index-url ..." the source of torch: the default package may install gigabytes of CUDA libraries
# that no test needs.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=${VENV:-.venv-test}
"${PYTHON:-python3}" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || {
    echo "run.sh: ${PYTHON:-python3} is $("${PYTHON:-python3}" --version), wanted Python 3.11, 3.12 or 3.13." >&2
    exit 1
}
[ -d "$venv" ] || "${PYTHON:-python3}" -m venv "$venv"

echo "== Installing trl_jax, torch for the CPU, and TRL"
# shellcheck disable=SC2086  # TORCH may contain options of pip
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check ${TORCH:-torch==2.13.0}
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --editable ".[test]"

[ "${1:-}" != --install ] || exit 0

echo "== Testing"
exec "$venv/bin/python" -m pytest -n auto --maxprocesses 4 "$@"
