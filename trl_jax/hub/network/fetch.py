"""A checkpoint's folder on this machine. From the Hub it comes in two steps: the small files, then the weights."""

from __future__ import annotations

import contextlib
import glob
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import huggingface_hub
from huggingface_hub.errors import (
    EntryNotFoundError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from trl_jax.core.secrets import as_token, learn, scrubbed, shown
from trl_jax.hub.formats.gguf import unpack
from trl_jax.hub.formats.pickles import only_pickled
from trl_jax.hub.formats.safetensors import INDEX, SINGLE, indexed_shards, no_weights, unconverted
from trl_jax.hub.network.digests import check_digest
from trl_jax.hub.network.limits import HubSilentError, limited
from trl_jax.hub.peft.lora_config import CONFIG as ADAPTER
from trl_jax.hub.peft.lora_config import PICKLED, no_adapter
from trl_jax.hub.peft.lora_config import WEIGHTS as _ADAPTER_WEIGHTS
from trl_jax.hub.peft.virtual.config import ENCODER as _ENCODER_WEIGHTS
from trl_jax.hub.torch import bridge

SMALL = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")
_UNREACHED = (RepositoryNotFoundError, LocalEntryNotFoundError, OfflineModeIsEnabled, HFValidationError)


@dataclass(frozen=True)
class Repository:
    """One commit of a Hub repository (or of a subfolder in it), and the cached `folder` of its files.

    `access` has the token, cache_dir and local_files_only for requests to the Hub.
    """

    name: str
    subfolder: str
    commit: str
    folder: Path
    access: dict[str, Any] = field(repr=False)

    def fetch_small_files(self, *, code: bool) -> None:
        """Fetch config and tokenizer, with `code` `*.py` too; of deeper folders only the named chat templates."""
        patterns = (*SMALL, "*.py") if code else SMALL
        ignored = [f"*/{pattern}" for pattern in patterns if pattern != "*.jinja"]
        self._snapshot(patterns, ignored)

    def fetch_weights(self) -> None:
        """Fetch the single file or the shards that the index lists, never both; pytorch_model.bin where that is all.

        Raises:
            ValueError: the weights are in another format.
            FileNotFoundError: there are none, or they cannot be fetched.
            ConnectionError: they did not arrive as a whole.
        """
        try:
            _download(self.name, SINGLE, self.subfolder, self.commit, self.access)
        except EntryNotFoundError as error:
            if (self.folder / INDEX).is_file():
                self._snapshot([glob.escape(shard) for shard in indexed_shards(self.folder)], [])
            elif not self._fetch_pickled(error):
                raise self._without_weights(error) from safe_cause(error)

    def fetch_adapter(self) -> None:
        """Fetch the weights of an adapter.

        Raises:
            FileNotFoundError: there are none, or only as a pickle.
        """
        self._snapshot([_ADAPTER_WEIGHTS, _ENCODER_WEIGHTS], [])
        if (self.folder / _ADAPTER_WEIGHTS).is_file():
            return
        raise no_adapter(f"model={self.name!r}", _prefix(self.subfolder) + PICKLED in self._listed())

    def _fetch_pickled(self, error: EntryNotFoundError) -> bool:
        """Fetch pytorch_model.bin, if there is one and torch can read it; returns whether."""
        if isinstance(error, LocalEntryNotFoundError) or not bridge.available():
            return False
        self._snapshot(["pytorch_model*.bin"], [])
        return only_pickled(self.folder)

    def _snapshot(self, patterns, ignored) -> None:
        prefix = _prefix(self.subfolder)
        with _fetching(self.name, ", ".join(patterns)):
            huggingface_hub.snapshot_download(
                self.name,
                revision=self.commit,
                allow_patterns=[prefix + pattern for pattern in patterns],
                ignore_patterns=[prefix + pattern for pattern in ignored],
                **self.access,
            )
        for pattern in patterns:
            for file in self.folder.glob(pattern):
                check_digest(file, self.name)

    def _listed(self) -> list[str]:
        """The files of the repository."""
        with _fetching(self.name, "the list of its files"):
            api = huggingface_hub.HfApi()
            return api.list_repo_files(self.name, revision=self.commit, token=self.access["token"])

    def _without_weights(self, error: EntryNotFoundError) -> Exception:
        if isinstance(error, LocalEntryNotFoundError):
            return FileNotFoundError(
                f"model={self.name!r}: the weights are not in the cache ({self.folder}) and could not be fetched. "
                f"The Hub's client said: {client_said(error)}"
            )
        names = self._listed()
        pickled = _prefix(self.subfolder) + "pytorch_model"
        where = f"model={self.name!r}"
        if any(name.startswith(pickled) and name.endswith(".bin") for name in names):
            return unconverted(where, repr(self.name))
        return no_weights(where)


def checkpoint_folder(
    name: str,
    *,
    revision: str | None = None,
    subfolder: str = "",
    token: str | bool | None = None,
    cache_dir: str | None = None,
    local_files_only: bool = False,
    gguf_file: str | None = None,
    code: bool = False,
) -> tuple[Path, Repository | None]:
    """The folder of the config and the tokenizer of `name`, and the repository that has the weights.

    A folder is taken as it is, with no repository, and so is a GGUF file: `name` itself, or `gguf_file` in it. Other
    names are looked up on the Hub; `code` fetches `*.py` too.

    Raises:
        FileNotFoundError: neither a folder nor a repository that can be fetched, or it lacks `subfolder`.
        ConnectionError: a file did not arrive as a whole.
        TypeError, ValueError: the token cannot be one.
    """
    token = as_token("token", token)
    folder = Path(name).expanduser()
    if folder.is_file() and folder.suffix == ".gguf":
        return unpack(folder), None
    access = {"token": token, "cache_dir": cache_dir, "local_files_only": local_files_only}
    if gguf_file is not None:
        return unpack(_gguf(folder, name, gguf_file, revision, subfolder, access)), None
    if not folder.is_dir():
        if folder.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
            raise FileNotFoundError(
                f"{shown('model', name)}: there is no such folder, and it is not a Hub repository's name."
            )
        repository = _fetched(name, revision, subfolder, access, code)
        return repository.folder, repository
    if subfolder and not (folder / subfolder).is_dir():
        raise FileNotFoundError(f"model={name!r} has no subfolder {subfolder!r}.")
    return folder / subfolder, None


def client_said(error: Exception) -> str:
    """The text of an error of the Hub's client, with its cause and without the tokens that it asks with."""
    learn(huggingface_hub.get_token(), "hub_token")
    return scrubbed(_text(error))


def safe_cause(error: Exception) -> Exception | None:
    """The error as the cause of another; None where its text, which tracebacks print, holds a secret."""
    return error if client_said(error) == _text(error) else None


def _text(error: BaseException) -> str:
    """The error's text, the request where a transport's error says nothing of it, and the cause."""
    text = str(error)
    if isinstance(error, HTTPError) and not isinstance(error, HfHubHTTPError | HubSilentError):
        text = f"{type(error).__name__}: {text} ({error.request.method} {str(error.request.url).partition('?')[0]})"
    return text if error.__cause__ is None else f"{text} {_text(error.__cause__)}"


@contextlib.contextmanager
def _fetching(name: str, files: str) -> Iterator[None]:
    """Limit a block that asks the Hub for files of a model; an error that breaks it off names both.

    Raises:
        ConnectionError: the Hub did not send them as a whole.
    """
    with limited(f"fetching {files} of model={name!r}"):
        try:
            yield
        except (*_UNREACHED, EntryNotFoundError, RevisionNotFoundError):
            raise
        except (HTTPError, OSError) as error:
            if not isinstance(error, HTTPError) and error.errno is not None:  # of the disk
                raise
            raise ConnectionError(
                f"model={name!r}: {files} could not be fetched from the Hub, whose client said: {client_said(error)} "
                "Start again: what has arrived as a whole is not fetched twice."
            ) from safe_cause(error)


def _gguf(folder, name, file, revision, subfolder, access) -> Path:
    """A GGUF file of a folder or a repository."""
    if not folder.is_dir():
        try:
            return _download(name, file, subfolder, revision, access)
        except (*_UNREACHED, EntryNotFoundError) as error:
            text = f"{shown('model', name)}: gguf_file={file!r} could not be fetched: {client_said(error)}"
            raise FileNotFoundError(text) from safe_cause(error)
    if not (folder / subfolder / file).is_file():
        raise FileNotFoundError(f"model={name!r} has no file {file!r} (gguf_file).")
    return folder / subfolder / file


def _fetched(name, revision, subfolder, access, code) -> Repository:
    """The repository, its small files in the cache. A config comes first: its path names the commit of the others."""
    try:
        config = _config(name, subfolder, revision, access)
        commit = config.parents[len(PurePosixPath(subfolder).parts)].name
        repository = Repository(name, subfolder, commit, config.parent, access)
        repository.fetch_small_files(code=code)
    except _UNREACHED as error:
        raise FileNotFoundError(
            f"{shown('model', name)}: there is no such folder in {Path.cwd()}, and no such repository could be fetched "
            f"from the Hub, whose client said: {client_said(error)}"
        ) from safe_cause(error)
    except EntryNotFoundError as error:
        text = f"{shown('model', name)} has no {_prefix(subfolder)}config.json on the Hub: {client_said(error)}"
        raise FileNotFoundError(text) from safe_cause(error)
    return repository


def _config(name, subfolder, revision, access) -> Path:
    """config.json, or that of an adapter, which has no other."""
    try:
        return _download(name, "config.json", subfolder, revision, access)
    except LocalEntryNotFoundError:
        raise
    except EntryNotFoundError as error:
        try:
            return _download(name, ADAPTER, subfolder, revision, access)
        except EntryNotFoundError:
            raise error from None


def _download(name, file, subfolder, revision, access) -> Path:
    """Fetch one file unless the cache has it.

    Raises:
        ValueError: its digest is not the Hub's.
    """
    with _fetching(name, file):
        path = huggingface_hub.hf_hub_download(name, file, subfolder=subfolder or None, revision=revision, **access)
    check_digest(Path(path), name)
    return Path(path)


def _prefix(subfolder: str) -> str:
    """The beginning of the names of a subfolder's files in the repository's list."""
    return f"{PurePosixPath(subfolder)}/" if subfolder else ""
