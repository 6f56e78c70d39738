"""Find and download checkpoints on the Hub: time limits, digests, and signals while waiting."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import logging
import math
import os
import re
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from types import FrameType
from typing import Any

import huggingface_hub
from huggingface_hub import constants
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
from huggingface_hub.utils import parse_ratelimit_headers

from trl_jax.core.secrets import as_token, learn, scrubbed, shown
from trl_jax.core.signals import Handler, handle, restore
from trl_jax.core.text import say
from trl_jax.hub import torch_bridge
from trl_jax.hub.formats import INDEX, SINGLE, indexed_shards, no_weights_error, only_pickled, unconverted_error
from trl_jax.hub.gguf import unpack
from trl_jax.hub.peft_config import CONFIG as ADAPTER
from trl_jax.hub.peft_config import ENCODER as _ENCODER_WEIGHTS
from trl_jax.hub.peft_config import PICKLED, no_adapter_error
from trl_jax.hub.peft_config import WEIGHTS as _ADAPTER_WEIGHTS

logger = logging.getLogger(__name__)

# Checkpoint folders. A repository is downloaded in two steps: first the small files, then the weights.


SMALL = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")
_UNREACHED = (RepositoryNotFoundError, LocalEntryNotFoundError, OfflineModeIsEnabled, HFValidationError)


@dataclass(frozen=True)
class Remote:
    """A Hub repository, or a subfolder in it, at a revision (None: the default branch).

    `access` holds the token, cache_dir and local_files_only for requests to the Hub.
    """

    name: str
    revision: str | None
    subfolder: str
    access: dict[str, Any] = field(repr=False)

    @property
    def prefix(self) -> str:
        """The prefix of its files in the repository's file list."""
        return f"{PurePosixPath(self.subfolder)}/" if self.subfolder else ""

    def download(self, file: str) -> Path:
        """Download a file unless it is in the cache.

        Raises:
            ValueError: the file's digest differs from the Hub's.
        """
        options = {"subfolder": self.subfolder or None, "revision": self.revision, **self.access}
        with _fetching(self.name, file):
            path = Path(huggingface_hub.hf_hub_download(self.name, file, **options))
        check_digest(path, self.name)
        return path


@dataclass(frozen=True)
class Repository:
    """A Hub repository at one commit, `remote.revision`, and the cache `folder` with its files."""

    remote: Remote
    folder: Path

    def fetch_small_files(self, *, code: bool) -> None:
        """Download the config and tokenizer files, plus `*.py` with `code`; from subfolders only chat templates."""
        patterns = (*SMALL, "*.py") if code else SMALL
        ignored = [f"*/{pattern}" for pattern in patterns if pattern != "*.jinja"]
        self._snapshot(patterns, ignored)

    def fetch_weights(self) -> None:
        """Download the single weights file or the shards in the index, never both; pytorch_model.bin as a last resort.

        Raises:
            ValueError: the weights are in another format.
            FileNotFoundError: there are no weights, or they cannot be downloaded.
            ConnectionError: the download was interrupted.
        """
        try:
            self.remote.download(SINGLE)
        except EntryNotFoundError as error:
            if (self.folder / INDEX).is_file():
                self._snapshot([glob.escape(shard) for shard in indexed_shards(self.folder)], [])
            elif not self._fetch_pickled(error):
                raise self._without_weights(error) from safe_cause(error)

    def fetch_adapter(self) -> None:
        """Download the weights of an adapter.

        Raises:
            FileNotFoundError: the adapter has no weights, or only a pickle.
        """
        self._snapshot([_ADAPTER_WEIGHTS, _ENCODER_WEIGHTS], [])
        if (self.folder / _ADAPTER_WEIGHTS).is_file():
            return
        raise no_adapter_error(f"model={self.remote.name!r}", self.remote.prefix + PICKLED in self._listed())

    def _fetch_pickled(self, error: EntryNotFoundError) -> bool:
        """Download pytorch_model.bin if it exists and torch can read it; return whether it did."""
        if isinstance(error, LocalEntryNotFoundError) or not torch_bridge.available():
            return False
        self._snapshot(["pytorch_model*.bin"], [])
        return only_pickled(self.folder)

    def _snapshot(self, patterns: Sequence[str], ignored: Sequence[str]) -> None:
        remote = self.remote
        with _fetching(remote.name, ", ".join(patterns)):
            huggingface_hub.snapshot_download(
                remote.name,
                revision=remote.revision,
                allow_patterns=[remote.prefix + pattern for pattern in patterns],
                ignore_patterns=[remote.prefix + pattern for pattern in ignored],
                **remote.access,
            )
        for pattern in patterns:
            for file in self.folder.glob(pattern):
                check_digest(file, remote.name)

    def _listed(self) -> list[str]:
        """Names of the files in the repository."""
        remote = self.remote
        with _fetching(remote.name, "the list of its files"):
            api = huggingface_hub.HfApi()
            return api.list_repo_files(remote.name, revision=remote.revision, token=remote.access["token"])

    def _without_weights(self, error: EntryNotFoundError) -> Exception:
        where = f"model={self.remote.name!r}"
        if isinstance(error, LocalEntryNotFoundError):
            return FileNotFoundError(
                f"{where}: the weights are not in the cache ({self.folder}) and could not be downloaded. "
                f"The Hub client reported: {error_message(error)}"
            )
        pickled = self.remote.prefix + "pytorch_model"
        if any(name.startswith(pickled) and name.endswith(".bin") for name in self._listed()):
            return unconverted_error(where, repr(self.remote.name))
        return no_weights_error(where)


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
    """The folder with the config and tokenizer of `name`, and the repository that holds its weights.

    A local folder is used as it is, without a repository; so is a GGUF file, which is `name` itself or `gguf_file` in
    the folder. Other names are looked up on the Hub. `code` also downloads `*.py`.

    Raises:
        FileNotFoundError: there is no such folder or repository, or it has no such `subfolder`.
        ConnectionError: a download was interrupted.
        TypeError, ValueError: the token is invalid.
    """
    token = as_token("token", token)
    folder = Path(name).expanduser()
    if folder.is_file() and folder.suffix == ".gguf":
        return unpack(folder), None
    access = {"token": token, "cache_dir": cache_dir, "local_files_only": local_files_only}
    remote = Remote(name, revision, subfolder, access)
    if gguf_file is not None:
        return unpack(_gguf_file(folder, remote, gguf_file)), None
    if not folder.is_dir():
        if folder.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
            raise FileNotFoundError(
                f"{shown('model', name)}: there is no such folder, and it is not a valid name of a Hub repository."
            )
        repository = _fetched(remote, code=code)
        return repository.folder, repository
    if subfolder and not (folder / subfolder).is_dir():
        raise FileNotFoundError(f"model={name!r} has no subfolder {subfolder!r}.")
    return folder / subfolder, None


def error_message(error: Exception) -> str:
    """The message of a Hub client error including its cause, without tokens."""
    learn(huggingface_hub.get_token(), "hub_token")
    return scrubbed(_text(error))


def safe_cause(error: Exception) -> Exception | None:
    """The error, to be chained as a cause; None if its message, which tracebacks print, contains a secret."""
    return error if error_message(error) == _text(error) else None


def _text(error: BaseException) -> str:
    """The error's message, the request if a transport error omits it, and the cause."""
    text = str(error)
    if isinstance(error, HTTPError) and not isinstance(error, HfHubHTTPError | HubSilentError):
        text = f"{type(error).__name__}: {text} ({error.request.method} {str(error.request.url).partition('?')[0]})"
    return text if error.__cause__ is None else f"{text} {_text(error.__cause__)}"


@contextlib.contextmanager
def _fetching(name: str, files: str) -> Iterator[None]:
    """Apply the time limit to the Hub requests of a block, and name the model and the files in errors.

    Raises:
        ConnectionError: the Hub did not send the files completely.
    """
    with limited(f"fetching {files} of model={name!r}"):
        try:
            yield
        except (*_UNREACHED, EntryNotFoundError, RevisionNotFoundError):
            raise
        except (HTTPError, OSError) as error:
            if not isinstance(error, HTTPError) and error.errno is not None:  # a disk error
                raise
            raise ConnectionError(
                f"model={name!r}: {files} could not be downloaded from the Hub; its client reported: "
                f"{error_message(error)} Start again: complete files are not downloaded twice."
            ) from safe_cause(error)


def _gguf_file(folder: Path, remote: Remote, file: str) -> Path:
    """Path of a GGUF file in a local folder or, if there is none, in a repository."""
    if not folder.is_dir():
        try:
            return remote.download(file)
        except (*_UNREACHED, EntryNotFoundError) as error:
            text = f"{shown('model', remote.name)}: gguf_file={file!r} could not be downloaded: {error_message(error)}"
            raise FileNotFoundError(text) from safe_cause(error)
    if not (folder / remote.subfolder / file).is_file():
        raise FileNotFoundError(f"model={remote.name!r} has no file {file!r} (gguf_file).")
    return folder / remote.subfolder / file


def _fetched(remote: Remote, *, code: bool) -> Repository:
    """The repository with its small files in the cache. config.json comes first because its path names the commit."""
    try:
        config = _config_file(remote)
        commit = config.parents[len(PurePosixPath(remote.subfolder).parts)].name
        repository = Repository(replace(remote, revision=commit), config.parent)
        repository.fetch_small_files(code=code)
    except _UNREACHED as error:
        raise FileNotFoundError(
            f"{shown('model', remote.name)}: there is no such folder in {Path.cwd()}, and no such repository could be "
            f"downloaded from the Hub; its client reported: {error_message(error)}"
        ) from safe_cause(error)
    except EntryNotFoundError as error:
        text = f"{shown('model', remote.name)} has no {remote.prefix}config.json on the Hub: {error_message(error)}"
        raise FileNotFoundError(text) from safe_cause(error)
    return repository


def _config_file(remote: Remote) -> Path:
    """config.json, or the adapter's config, since an adapter has no config.json."""
    try:
        return remote.download("config.json")
    except LocalEntryNotFoundError:
        raise
    except EntryNotFoundError as error:
        try:
            return remote.download(ADAPTER)
        except EntryNotFoundError:
            raise error from None


# Time limits: hooks on the Hub client's own session, active while a block of `limited` runs


VARIABLE = "TRL_JAX_HUB_TIMEOUT"
_DEFAULT = 60.0  # seconds
_WARN_AFTER = 5.0  # seconds without an answer
_POLL = 0.25  # seconds between checks
_RETRIED = (408, 429, 500, 502, 503, 504)  # HTTP statuses that make the client retry

_NOT_OURS = ("/datasets/", "/api/datasets/")  # user code may load datasets meanwhile; their library has its own limits
_UNLIMITED = "trl_jax.unlimited"  # extension that marks these requests; redirected requests inherit it

_operations: list[str] = []  # in progress: "fetching ..."
_waits: dict[str, float] = {}  # request without a successful answer -> waiting since; inf while its body is being sent
_sockets: list[weakref.ref] = []
_cut_off = False  # whether the process is about to exit


class HubSilentError(HTTPError):
    """Ends a request that was not answered successfully within `patience()`; the Hub client does not retry it."""


def patience() -> float:
    """Seconds within which a request must succeed, including all retries.

    Raises:
        ValueError: TRL_JAX_HUB_TIMEOUT is not a positive number.
    """
    value = os.environ.get(VARIABLE)
    if value is None:
        return max(_DEFAULT, constants.HF_HUB_DOWNLOAD_TIMEOUT, constants.HF_HUB_ETAG_TIMEOUT)
    with contextlib.suppress(ValueError):
        if 0 < float(value) < math.inf:
            return float(value)
    raise ValueError(f"{VARIABLE} must be a number of seconds, such as 60, got {value!r}.")


@contextlib.contextmanager
def limited(operation: str) -> Iterator[None]:
    """Limit the duration of the requests in a block. `operation`, such as "fetching x", appears in the log.

    In the main thread, a signal exits immediately and reports which operation was interrupted.
    """
    patience()
    if threading.current_thread() is threading.main_thread():
        begin_again()
    _operations.append(operation)
    done = threading.Event()
    _hook()
    threading.Thread(target=_watch, args=(operation, done), name="waiting for the Hub", daemon=True).start()
    try:
        with reporting_interruption(pending_operations, cut_off):
            yield
        for request in [] if _cut_off or len(_operations) > 1 else list(_waits):
            logger.warning("%s did not succeed while %s.", request, operation)
    finally:
        done.set()
        _operations.remove(operation)
        if not _operations:
            _waits.clear()
            _sockets[:] = [ref for ref in _sockets if ref() is not None]


def pending_operations() -> list[str]:
    """The operations that are waiting for the Hub."""
    return list(_operations)


def cut_off() -> None:
    """Abort all requests in progress and refuse new ones until `begin_again` is called."""
    global _cut_off
    _cut_off = True
    for ref in list(_sockets):
        with contextlib.suppress(OSError):  # already closed
            if (end := ref()) is not None:
                socket.socket.shutdown(end, socket.SHUT_RDWR)  # wakes up the thread that reads from it


def begin_again() -> None:
    """Allow requests again after `cut_off`."""
    global _cut_off
    _cut_off = False


def is_cut_off() -> bool:
    """Whether requests were aborted because the process is about to exit."""
    return _cut_off


def _hook() -> None:
    """Install our hooks on the client's session if needed; the client creates a new session after connection errors."""
    session = huggingface_hub.get_session()
    hooks = session.event_hooks
    if _before not in hooks["request"]:
        request, response = [*hooks["request"], _before], [*hooks["response"], _after]
        session.event_hooks = {"request": request, "response": response}


def _watch(operation: str, done: threading.Event) -> None:
    told = False
    while not done.wait(_POLL):
        _hook()
        late = [key for key, since in list(_waits.items()) if time.monotonic() - since > _WARN_AFTER]
        if late and not told:
            told = True
            logger.warning(
                "The Hub has not answered for %g seconds while %s: %s. The request will be aborted after %g seconds "
                "(%s).", _WARN_AFTER, operation, late[0], patience(), VARIABLE,
            )  # fmt: skip


def _key(request: Any) -> str:
    """The request as shown in messages, without the query string, which may contain a signature."""
    return scrubbed(f"{request.method} {str(request.url).partition('?')[0]}")


def _before(request: Any) -> None:
    """Set the timeouts of a request that is about to be sent, or refuse it."""
    if not _operations:
        return
    key, now, limit = _key(request), time.monotonic(), patience()
    if request.url.path.startswith(_NOT_OURS):
        request.extensions[_UNLIMITED] = True
    if _UNLIMITED in request.extensions:
        return
    if _cut_off:
        raise HubSilentError(f"{key} was aborted because the process is exiting.")
    left = limit - max(0.0, now - _waits.setdefault(key, now))
    if left <= 0:
        _waits.pop(key, None)
        raise HubSilentError(f"{key} did not succeed within {limit:g} seconds ({VARIABLE}).")
    limits = request.extensions["timeout"]
    request.extensions["timeout"] = {
        kind: left if limits.get(kind) is None else min(limits[kind], left)
        for kind in ("connect", "read", "write", "pool")
    }
    request.extensions["trace"] = _traced(key, request.method == "PUT")


def _traced(key: str, uploads: bool) -> Callable[[str, dict], None]:
    """A trace hook that records the sockets of a request and, for an upload, when its body has been sent: the time
    limit starts then."""

    def trace(event: str, info: dict) -> None:
        if event in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
            _sockets.append(weakref.ref(info["return_value"].get_extra_info("socket")))
        elif uploads and ".send_request_body." in event:
            stuck = "Timeout" in type(info.get("exception")).__name__
            sending = math.inf if event.endswith(".started") else time.monotonic()
            _waits[key] = -math.inf if stuck else sending

    return trace


def _after(response: Any) -> None:
    """Record a successful answer. Before the client retries, wait as long as the server asks, within the limit."""
    if not _operations or _UNLIMITED in response.request.extensions:
        return
    key = _key(response.request)
    if response.status_code not in _RETRIED:
        _waits.pop(key, None)
        return
    delay = asked_wait(response)
    if delay is None:
        return
    end = time.monotonic() + delay
    if end - _waits.get(key, time.monotonic()) > patience():
        _waits.pop(key, None)
        raise HubSilentError(
            f"{key}: the server answered with status {response.status_code} and asks to wait {delay} seconds, which is "
            f"more than {patience():g} ({VARIABLE})."
        )
    if response.request.method == "POST":  # some client functions do not retry these
        return
    while time.monotonic() < end and not _cut_off:
        time.sleep(min(_POLL, delay))
    response.headers["Retry-After"] = "0"
    response.headers.pop("ratelimit", None)


def asked_wait(response: Any) -> int | None:
    """Seconds that the server asks to wait, from the headers that the client reads; None if it does not ask."""
    limit = parse_ratelimit_headers(response.headers) if response.status_code == 429 else None
    if limit is not None and limit.remaining == 0:
        return limit.reset_in_seconds
    delay = response.headers.get("Retry-After", "").strip()
    return int(delay) if delay.isdecimal() else None


# Digests: compare cached files with the sha256 from the Hub


_SHA256 = re.compile(r"[0-9a-f]{64}")


def check_digest(file: Path, model: str) -> None:
    """Check the digest of a cached file, and remember the result until the file changes.

    The cache names the content of a large file by its sha256 on the Hub and links to it. Other files, and caches
    without links, are not checked.

    Raises:
        ValueError: the content differs. The file is removed from the cache, so that it is downloaded again next time.
    """
    expected = Path(os.readlink(file)).name if file.is_symlink() else ""
    if _SHA256.fullmatch(expected) is None or not file.is_file():
        return
    content = file.resolve()
    stat = content.stat()
    state = f"{expected} {stat.st_size} {stat.st_mtime_ns}"
    mark = _mark(content)
    if mark is not None and mark.is_file() and mark.read_text(encoding="utf-8") == state:
        return
    with content.open("rb") as opened:
        actual = hashlib.file_digest(opened, "sha256").hexdigest()
    if actual != expected:
        for part in (file, file.parent / os.readlink(file), content):
            part.unlink(missing_ok=True)
        raise ValueError(
            f"model={model!r}: {file.name} is corrupted: its sha256 is {actual}, but {expected} on the Hub. It was "
            f"removed from the cache ({file}). Start again to download it again. If that does not help, something "
            "between here and the Hub (a proxy, a mirror, the disk) modifies files."
        )
    if mark is not None:
        with contextlib.suppress(OSError):  # if the result cannot be stored, the file is checked again next time
            mark.write_text(state, encoding="utf-8")


def _mark(content: Path) -> Path | None:
    """The file that records a successful check; None if it cannot be created."""
    try:
        folder = huggingface_hub.cached_assets_path("trl_jax", "digests", "compared")
    except OSError:
        return None
    return Path(folder) / hashlib.sha256(str(content).encode()).hexdigest()[:32]


# Signals while waiting for the Hub outside of train(), which handles signals itself


_ENDING = {signal.SIGTERM: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL}
_ALL = _ENDING | {signal.SIGINT: signal.default_int_handler}


@contextlib.contextmanager
def reporting_interruption(operations: Callable[[], list[str]], cut_off: Callable[[], None]) -> Iterator[None]:
    """Within the block, report which operations are interrupted if a signal ends the process.

    SIGINT calls `cut_off` first, because Python would otherwise wait for the client's threads, and then raises
    KeyboardInterrupt. Other signals end the process with status 128 + n as usual. Handlers installed by the script or
    by a training run are kept.
    """
    before = _handled(_ALL, operations, cut_off)
    try:
        yield
    finally:
        restore(before)


def report_interruptions(operations: Callable[[], list[str]]) -> None:
    """Like `reporting_interruption`, but permanent, and without SIGINT: after a SIGINT, Python still waits for the
    script's threads."""
    _handled(_ENDING, operations, lambda: None)


def _handled(
    defaults: dict[int, Handler], operations: Callable[[], list[str]], cut_off: Callable[[], None]
) -> dict[int, Handler]:
    """Install handlers for signals that have these defaults and return the old ones; only in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        return {}

    def leave(number: int, frame: FrameType | None) -> None:
        for operation in operations():
            say(f"{signal.Signals(number).name}: exiting while {operation}, which is interrupted.")
        if number == signal.SIGINT:
            cut_off()
            raise KeyboardInterrupt
        os._exit(128 + number)

    taken = [number for number, default in defaults.items() if signal.getsignal(number) == default]
    return handle(taken, leave)
