"""A checkpoint's folder on this machine, downloaded from the Hub if the name is not a folder already."""

from __future__ import annotations

from pathlib import Path

_PATTERNS = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


def checkpoint_folder(
    name: str,
    *,
    revision: str | None = None,
    subfolder: str = "",
    token: str | bool | None = None,
    cache_dir: str | None = None,
    local_files_only: bool = False,
) -> Path:
    """Where the files of `name` lie: itself if it is a folder, else the Hub's snapshot of that repository.

    Raises:
        FileNotFoundError: it looks like a path and no such folder exists, or the repository lacks `subfolder`.
    """
    folder = Path(name).expanduser()
    if not folder.is_dir():
        if folder.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
            raise FileNotFoundError(f"model={name!r}: there is no such folder, and it is not a Hub repository's name.")
        folder = _snapshot(name, revision, subfolder, token, cache_dir, local_files_only)
    if subfolder and not (folder / subfolder).is_dir():
        raise FileNotFoundError(f"model={name!r} has no subfolder {subfolder!r}.")
    return folder / subfolder


def _snapshot(name, revision, subfolder, token, cache_dir, local_files_only) -> Path:
    from huggingface_hub import snapshot_download

    patterns = [f"{subfolder}/{pattern}" for pattern in _PATTERNS] if subfolder else _PATTERNS
    return Path(
        snapshot_download(
            name,
            revision=revision,
            token=token,
            cache_dir=cache_dir,
            local_files_only=local_files_only,
            allow_patterns=patterns,
        )
    )
