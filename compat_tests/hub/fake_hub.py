"""A fake Hub with one repository: a local folder behind patched download functions of huggingface_hub."""

from __future__ import annotations

import hashlib
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import EntryNotFoundError
from huggingface_hub.utils import filter_repo_objects

NAME, COMMIT = "somebody/judge", "c0ffee" * 6 + "cafe"


@dataclass
class FakeHub:
    """`upstream` is the repository's content, `cache` the local cache, `fetched` the downloaded files in order."""

    upstream: Path
    cache: Path
    fetched: list[str] = field(default_factory=list)
    asked: list[dict] = field(default_factory=list)

    def install(self, monkeypatch) -> FakeHub:
        monkeypatch.setattr(huggingface_hub, "hf_hub_download", self.download)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", self.snapshot)
        monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", lambda api, name, **how: self.files(name, how))
        return self

    def files(self, name: str, how: dict) -> list[str]:
        assert name == NAME
        self.asked.append(how)
        return sorted(str(path.relative_to(self.upstream)) for path in self.upstream.rglob("*") if path.is_file())

    def download(self, name: str, file: str, *, subfolder: str | None, **how) -> str:
        file = file if subfolder is None else f"{subfolder}/{file}"
        if file not in self.files(name, how):
            raise EntryNotFoundError(f"404: no {file}")
        return str(self._bring(file))

    def snapshot(self, name: str, *, allow_patterns, ignore_patterns, **how) -> str:
        files = self.files(name, how)
        chosen = filter_repo_objects(files, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns)
        for file in chosen:
            self._bring(file)
        return str(self.cache / "snapshots" / COMMIT)

    def _bring(self, file: str) -> Path:
        place = self.cache / "snapshots" / COMMIT / file
        if not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            kind = "sha256" if file.endswith((".safetensors", ".bin")) else "sha1"
            blob = self.cache / "blobs" / hashlib.new(kind, (self.upstream / file).read_bytes()).hexdigest()
            blob.parent.mkdir(exist_ok=True)
            shutil.copy(self.upstream / file, blob)
            place.symlink_to(os.path.relpath(blob, place.parent))
            self.fetched.append(file)
        return place
