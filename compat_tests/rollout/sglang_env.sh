#!/usr/bin/env bash
# Create a virtual environment with SGLang on the CPU, for the tests against a real server (SGLANG=1):
#
#   bash compat_tests/rollout/sglang_env.sh
#   SGLANG=1 bash compat_tests/run.sh compat_tests/rollout/test_sglang.py
#
# Set SGLANG_VENV=.venv-other for another folder, and PYTHON=/path/to/python for another interpreter.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

venv=${SGLANG_VENV:-.venv-sglang}
[ -d "$venv" ] || "${PYTHON:-python3}" -m venv "$venv"
echo "== Installing sglang and what it imports on a CPU, 3 GB with torch for the CPU"
pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check)
"${pip[@]}" torch==2.13.0 torchvision==0.28.0
# The dependencies of sglang, except CUDA kernels.
"${pip[@]}" aiohttp anthropic "apache-tvm-ffi<0.2" build datasets distro easydict einops fastapi gguf interegular IPython \
    "llguidance>=1.7.6,<2" loguru "mistral_common>=1.11.5" msgspec ninja numpy openai openai-harmony orjson \
    partial_json_parser pillow prometheus-client psutil pybase64 pydantic python-multipart pyzmq regex requests scipy \
    sentencepiece setproctitle soundfile tiktoken transformers==5.19.0 tqdm uvicorn uvloop watchfiles xgrammar==0.2.7 xxhash \
    zstandard
"${pip[@]}" --no-deps sglang==0.5.23 compressed-tensors==0.18.0
# sgl_kernel has no CPU wheel. The functions and operators that sglang looks up are never called here, so stubs suffice.
site=$("$venv/bin/python" -c "import sysconfig; print(sysconfig.get_path('purelib'))")
mkdir -p "$site/sgl_kernel"
cat > "$site/sgl_kernel/__init__.py" <<'KERNEL'
def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name}")

    return absent


import torch  # noqa: E402

operators = torch.library.Library("sgl_kernel", "DEF")
for name in open(f"{__path__[0]}/operators.txt").read().split():
    operators.define(f"{name}(Tensor x) -> Tensor")
KERNEL
grep -rhoE "torch\.ops\.sgl_kernel\.[a-z0-9_]+" --include="*.py" "$site/sglang" | sed "s/.*\.//" | sort -u \
    > "$site/sgl_kernel/operators.txt"
# Adapters (--lora-backend torch_native) allocate pinned memory, which needs a GPU.
lora=$site/sglang/srt/lora
sed -i "s/pin_memory=True/pin_memory=False/; s/\.pin_memory()//" "$lora/layers.py" "$lora/lora.py" \
    "$lora/backend/torch_backend.py"
# A torchvision built for CUDA cannot load its operators with a CPU build of torch. The models of the tests do not need
# them.
"$venv/bin/python" -c "import torchvision" 2> /dev/null ||
    : | tee "$site/torchvision/_meta_registrations.py" > "$site/torchvision/_autograd_registrations.py"
"$venv/bin/python" -c "import importlib.metadata as found; print('sglang', found.version('sglang'))"
