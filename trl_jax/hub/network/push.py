"""Uploads to a repository on the Hub: retried, in the background where asked; failures are kept and logged."""

from __future__ import annotations

import glob
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError

from trl_jax.core.secrets import as_token, scrubbed
from trl_jax.hub.network import limits
from trl_jax.hub.network.fetch import client_said
from trl_jax.hub.network.leaving import told_from_now_on

logger = logging.getLogger(__name__)

_WAITS = (1.0, 2.0, 4.0, 8.0)  # seconds before the second try, the third, ...
_LONGEST_WAIT = 60.0  # however long the Hub asks for
_HOPELESS = (400, 401, 403, 404, 413)  # statuses that another try would not change


class _UploadError(Exception):
    """A file did not arrive; its cause is the client's."""


@dataclass(frozen=True)
class Upload:
    """One commit: these files of a folder, by their paths in it, to a path in the repository."""

    folder: Path
    message: str
    files: list[str]
    path_in_repo: str = ""


class Publisher:
    """One repository. `failures` are the texts of the background pushes that failed, `running` says whether one runs,
    `uploading` which one.

    The token is passed to the client and to nothing else: errors do not show it.

    Raises:
        TypeError, ValueError: the token cannot be one.
    """

    def __init__(
        self, name: str, *, token: str | None, private: bool | None, revision: str | None, repo_type: str = "model"
    ):
        self._token, self._revision = as_token("hub_token", token), revision
        self.repo_id, self.failures = name, []
        self._private, self._repo_type, self._opened = private, repo_type, False
        self.uploading: str | None = None
        # Of the last background push. No join, which in Python 3.11 takes a thread for ended that a signal came by.
        self._ended: threading.Event | None = None

    def open(self) -> str:
        """Make the repository (and the branch) if there is none, and return its full name.

        Raises:
            PermissionError: the token is missing, wrong, or may not write there.
            ConnectionError: the Hub cannot be reached, or answers with an error.
        """
        if not self._opened:
            api = huggingface_hub.HfApi(token=self._token)
            try:
                with limits.limited(f"opening the repository {self.repo_id!r} on the Hub"):
                    url = api.create_repo(
                        self.repo_id, private=self._private, exist_ok=True, repo_type=self._repo_type
                    )
                    if self._revision is not None:
                        api.create_branch(url.repo_id, branch=self._revision, exist_ok=True)
            except (HTTPError, HFValidationError, OSError) as error:
                raise self._failure(error, "cannot be opened") from None
            self.repo_id, self._opened = url.repo_id, True
        return self.repo_id

    @property
    def running(self) -> bool:
        return self._ended is not None and not self._ended.is_set()

    def wait(self) -> None:
        if self._ended is not None:
            self._ended.wait()

    def push(self, uploads: list[Upload], *, revision: str | None = None) -> Any:
        """Upload now, and return the last commit.

        Raises:
            PermissionError, ConnectionError: not even the last try succeeded.
        """
        self.open()
        return [self._upload(upload, revision or self._revision) for upload in uploads][-1]

    def push_in_background(
        self, uploads: list[Upload], *, done: Callable[[bool], None], revision: str | None = None, daemon: bool = True
    ) -> Future:
        """Upload after the uploads under way. At the end `done` is called with True or False; a failure is logged.

        A daemon's upload is cut off when the process ends. Other uploads the process waits for at its end; a signal
        that ends it says what that cuts off.
        """
        future, before, ended = Future(), self._ended, threading.Event()
        limits.begin_again()
        if not daemon:
            told_from_now_on(limits.under_way)

        def run():
            if before is not None:
                before.wait()
            try:
                self._push_told(uploads, revision, done, future)
            finally:
                ended.set()

        self._ended = ended
        threading.Thread(target=run, name="push to the Hub", daemon=daemon).start()
        return future

    def _push_told(
        self, uploads: list[Upload], revision: str | None, done: Callable[[bool], None], future: Future
    ) -> None:
        """Push, and tell `done` and `future` what came of it."""
        try:
            result = self.push(uploads, revision=revision)
        except Exception as error:  # of a thread: whoever waits for `future` gets it, whatever it is
            self.failures.append(str(error))
            done(False)
            future.set_exception(error)
            if not isinstance(error, OSError):  # none of the Hub's: shown with its traceback
                raise
            if not limits.is_cut_off():
                logger.warning("%s", error)
        else:
            done(True)
            future.set_result(result)

    def cut_off(self) -> None:
        """Break off what is under way, because the process is leaving."""
        limits.cut_off()

    def _upload(self, upload: Upload, revision: str | None) -> Any:
        self.uploading = upload.message
        try:
            for wait in (*_WAITS, None):
                try:
                    return self._try(upload, revision)
                except (HTTPError, OSError, _UploadError) as error:
                    if wait is None or not _may_pass(error) or limits.is_cut_off():
                        raise self._failure(error, f'did not take "{upload.message}"') from None
                    wait = _retry_after(error) or wait
                    logger.info("%s Trying again in %g seconds.", self._failure(error, "did not answer"), wait)
                time.sleep(wait)
        finally:
            self.uploading = None

    def _try(self, upload: Upload, revision: str | None) -> Any:
        """Upload once.

        Raises:
            _UploadError: the client names a file that it could not upload.
        """
        with limits.limited(f'uploading "{upload.message}" to {self.repo_id}'):
            try:
                return huggingface_hub.HfApi(token=self._token).upload_folder(
                    repo_id=self.repo_id,
                    folder_path=upload.folder,
                    path_in_repo=upload.path_in_repo,
                    commit_message=upload.message,
                    allow_patterns=[glob.escape(name) for name in upload.files],
                    revision=revision,
                    repo_type=self._repo_type,
                )
            except RuntimeError as error:  # as which the client raises errors of its transport, in threads of its own
                if isinstance(error.__cause__, HTTPError | OSError):
                    raise _UploadError(str(error)) from error.__cause__
                raise

    def _failure(self, error: Exception, problem: str) -> OSError:
        """The error of a request that failed; `problem` says which one."""
        status = _status(error)
        text = f"{type(error).__name__}: {' '.join(client_said(error).split())}"
        kind = PermissionError if status in (401, 403) else ConnectionError
        way_out = (
            "Log in with `hf auth login`, or pass a hub_token that may write there."
            if kind is PermissionError
            else "What is saved here is complete: push again later."
        )
        return kind(scrubbed(f"The repository {self.repo_id!r} on the Hub {problem}: {text} {way_out}"))


def _status(error: Exception) -> int | None:
    """The status that the Hub answered with; None where it did not."""
    answered = error.__cause__ if isinstance(error, _UploadError) else error
    return answered.response.status_code if isinstance(answered, HfHubHTTPError) else None


def _may_pass(error: Exception) -> bool:
    """Whether another try may succeed: not after a refusal, nor for a file that cannot be read, nor in time."""
    cause = error.__cause__ if isinstance(error, _UploadError) else error
    if isinstance(cause, limits.HubSilentError):
        return False
    if isinstance(cause, HTTPError):
        return _status(cause) not in _HOPELESS
    return isinstance(cause, ConnectionError | TimeoutError)


def _retry_after(error: Exception) -> float | None:
    """The seconds that the Hub asks to wait; None where it does not."""
    if not isinstance(error, HfHubHTTPError):
        return None
    asked = error.response.headers.get("Retry-After", "")
    return min(float(asked), _LONGEST_WAIT) if asked.isdecimal() else None
