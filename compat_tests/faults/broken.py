"""Builds checkpoints with one defect, and trainers on them, for the tests of errors."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

from datasets import Dataset

from compat_tests.tiny import preference_rows
from trl_jax.trainer.reward_config import RewardConfig
from trl_jax.trainer.reward_trainer import RewardTrainer

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLE = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19." + bytes(100)
ZIP = b"PK\x03\x04" + bytes(100)


def copied(good: Path, out: Path, **config) -> Path:
    """A copy of a checkpoint with these keys changed in its config.json."""
    folder = Path(shutil.copytree(good, out / "broken"))
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return folder


def trainer(model, out, *, rows=None, **config) -> RewardTrainer:
    """A RewardTrainer as users construct it; `rows` is a list or a dataset."""
    words = config.pop("processing_class", None)
    settled = {
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    args = RewardConfig(str(out / "run"), **(settled | config))
    rows = preference_rows(4) if rows is None else rows
    dataset = Dataset.from_list(rows) if isinstance(rows, list) else rows
    return RewardTrainer(str(model), args, train_dataset=dataset, processing_class=words)


def header_of(path: Path) -> tuple[dict, bytes]:
    """A safetensors file's header and its data."""
    content = path.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def write_header(path: Path, header: dict, data: bytes) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def edit_tensor(folder: Path, tensor: str, **entry) -> None:
    """Change a tensor's entry in the header."""
    header, data = header_of(folder / WEIGHTS)
    header[tensor] |= entry
    write_header(folder / WEIGHTS, header, data)


def edit_tensors(folder: Path, *, drop=(), **add) -> None:
    """Remove tensors from the file and add others; `__` in a name stands for a dot."""
    from safetensors.numpy import load_file, save_file

    tensors = {name: values for name, values in load_file(folder / WEIGHTS).items() if name not in drop}
    tensors |= {name.replace("__", "."): values for name, values in add.items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
