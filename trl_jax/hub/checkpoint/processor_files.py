"""Files of what prepares images and sounds, which vLLM and transformers want beside a model that sees or hears."""

from __future__ import annotations

import shutil
from pathlib import Path

_NAMES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


def keep_processor_files(before: Path, folder: Path) -> None:
    """Copy those that a checkpoint came with, from the folder `before`, into the one that it is saved to."""
    for name in _NAMES:
        if (before / name).is_file() and not (folder / name).exists():
            shutil.copyfile(before / name, folder / name)
