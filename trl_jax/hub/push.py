"""Model cards, and uploads to the Hub during training."""

from __future__ import annotations

import glob
import logging
import math
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import huggingface_hub
import yaml
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError

from trl_jax.core.curves import Curve, svg
from trl_jax.core.files import write_whole
from trl_jax.core.secrets import as_token, masked, scrubbed
from trl_jax.hub import fetch
from trl_jax.hub.fetch import error_message, report_interruptions
from trl_jax.hub.heads import HeadName
from trl_jax.hub.peft_config import CONFIGS, LoraConfig

logger = logging.getLogger(__name__)

# Model cards (README.md)

CARD, CURVE = "README.md", "training_loss.svg"
_MARK = "<!-- trl_jax wrote this card and will overwrite it; remove this line to keep your changes. -->"
# Written by earlier releases, so it must stay as it is.
_EARLIER_MARK = "<!-- trl_jax wrote this card and will write it anew; remove this line to keep your own. -->"
_TAGS = ("generated_from_trainer", "trl_jax")
_LIBRARIES = ("transformers", "datasets", "jax", "flax", "optax")


class _Kind(NamedTuple):
    """Wording of the card for models with a certain head."""

    subject: str
    meaning: str
    loader: str
    pipeline: str


_KINDS: dict[str, _Kind] = {
    "score": _Kind(
        "a reward model", ": one score per text, the higher the better", "ForSequenceClassification",
        "text-classification",
    ),
    "lm": _Kind("a language model", "", "ForCausalLM", "text-generation"),
}  # fmt: skip


@dataclass(frozen=True)
class Run:
    """The training run of a model.

    Attributes:
        arguments: arguments that were set, by name.
        metrics: last value of each metric.
        losses: (step, loss) of each log entry.
    """

    arguments: dict[str, object]
    metrics: dict[str, float]
    losses: list[tuple[int, float]]


def write_card(
    folder: Path,
    *,
    model_name: str,
    base_model: str | None,
    datasets: list[str],
    tags: list[str],
    run: Run | None = None,
    adapter: str | None = None,
    head: HeadName = "score",
    paper: tuple[str, str] | None = None,
    **metadata: object,
) -> None:
    """Write README.md unless a card exists that this function did not write.

    Args:
        base_model: name of a repository; None if training started from a local folder.
        adapter: PEFT's type of the adapter if the repository only holds an adapter; None for a full model.
        head: head of the model.
        paper: title and arXiv number of the method's paper.
        run: the training run to describe; None for a model that has not been trained.
        metadata: further metadata of the card, under the Hub's names (language, license, ...); None values are omitted.
    """
    path = folder / CARD
    replaceable = not path.is_symlink() and path.is_file() and _is_ours(path.read_bytes())
    if os.path.lexists(path) and not replaceable:
        return
    metadata = {
        "library_name": "peft" if adapter else "transformers",
        "model_name": model_name,
        "base_model": base_model,
        "datasets": datasets or None,
        "tags": list(dict.fromkeys([*_TAGS, *tags, *(_adapter_tags(base_model, adapter) if adapter else ())])),
        "pipeline_tag": _KINDS[head].pipeline,
        **metadata,
    }
    present = {key: masked(value, key) for key, value in metadata.items() if value is not None}
    front = yaml.safe_dump(present, sort_keys=False, allow_unicode=True)
    text = f"---\n{front}---\n\n{_MARK}\n\n{_text(model_name, base_model, datasets, adapter, head, paper)}"
    text += _run_section(folder, run)
    write_whole(path, scrubbed(text))


def _is_ours(card: bytes) -> bool:  # bytes, because a user's card may have any encoding
    return any(mark.encode() in card for mark in (_MARK, _EARLIER_MARK))


def _adapter_tags(base_model: str | None, adapter: str) -> list[str]:
    tags = ["lora"] if adapter == LoraConfig.kind else []  # PEFT adds no tag for other types
    return [*tags, *([f"base_model:adapter:{base_model}"] if base_model else [])]


def _text(
    model_name: str,
    base_model: str | None,
    datasets: list[str],
    adapter: str | None,
    head: HeadName,
    paper: tuple[str, str] | None,
) -> str:
    library, loader = ("peft", "AutoPeftModel") if adapter else ("transformers", "AutoModel")
    kind = _KINDS[head]
    subject = f"An adapter ({CONFIGS[adapter].method}) that makes {kind.subject}" if adapter else f"A{kind.subject[1:]}"
    options = ", num_labels=1" if adapter and head == "score" else ""
    origin = f", trained from [{base_model}](https://huggingface.co/{base_model})" if base_model else ""
    data = f" on {', '.join(datasets)}" if datasets else ""
    method = f"\n\nThe method is from [{paper[0]}](https://huggingface.co/papers/{paper[1]})." if paper else ""
    libraries = "\n".join(f"- {name} {version(name)}" for name in _LIBRARIES)
    return f"""# {model_name}

{subject}{origin}{data} with trl_jax{kind.meaning}.{method}

```python
from {library} import {loader}{kind.loader}

model = {loader}{kind.loader}.from_pretrained("{model_name}"{options})
```

Trained with

{libraries}
"""


def _run_section(folder: Path, run: Run | None) -> str:
    """The arguments, the last metrics, and a plot of the loss, which is saved in the same folder."""
    if run is None:
        return ""
    sections = [_table("Arguments", run.arguments), _table("Last metrics", run.metrics)]
    losses = [(step, loss) for step, loss in run.losses if math.isfinite(loss)]
    if len(losses) > 1:
        write_whole(folder / CURVE, svg({"Training loss": [Curve("#48a", losses)]}))
        sections.insert(0, f"![Training loss]({CURVE})\n")
    return "\n" + "\n".join(section for section in sections if section)


def _table(title: str, rows: dict[str, object]) -> str:
    if not rows:
        return ""
    lines = "\n".join(f"| {name} | {_short(value)} |" for name, value in rows.items())
    return f"{title}\n\n| | |\n| --- | --- |\n{lines}\n"


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "\\|")


# Uploads: retried, optionally in the background; failures are recorded and logged


_WAITS = (1.0, 2.0, 4.0, 8.0)  # seconds before each retry
_LONGEST_WAIT = 60.0  # even if the Hub asks for more
_PERMANENT = (400, 401, 403, 404, 413)  # HTTP statuses that are not worth retrying


class _UploadError(Exception):
    """A file was not uploaded; the client's error is the cause."""


@dataclass(frozen=True)
class Upload:
    """One commit: files of a folder, by relative path, and where to put them in the repository."""

    folder: Path
    message: str
    files: list[str]
    path_in_repo: str = ""


class Publisher:
    """Uploads to one repository.

    `failures` are the error messages of failed background pushes, `running` says whether a push is in progress, and
    `uploading` is its commit message. The token is only passed to the Hub client; error messages do not contain it.

    Raises:
        TypeError, ValueError: the token is invalid.
    """

    def __init__(
        self, name: str, *, token: str | None, private: bool | None, revision: str | None, repo_type: str = "model"
    ):
        self._token, self._revision = as_token("hub_token", token), revision
        self.repo_id, self.failures = name, []
        self._private, self._repo_type, self._opened = private, repo_type, False
        self.uploading: str | None = None
        # Event of the last background push; Thread.join in Python 3.11 may return early if a signal arrives.
        self._ended: threading.Event | None = None

    def open(self) -> str:
        """Create the repository (and the branch) if needed, and return its full name.

        Raises:
            PermissionError: the token is missing, invalid, or has no write access.
            ConnectionError: the Hub cannot be reached or answers with an error.
        """
        if not self._opened:
            api = huggingface_hub.HfApi(token=self._token)
            try:
                with fetch.limited(f"opening the repository {self.repo_id!r} on the Hub"):
                    url = api.create_repo(self.repo_id, private=self._private, exist_ok=True, repo_type=self._repo_type)
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
        """Upload now and return the last commit.

        Raises:
            PermissionError, ConnectionError: all attempts failed.
        """
        self.open()
        return [self._upload(upload, revision or self._revision) for upload in uploads][-1]

    def push_in_background(
        self, uploads: list[Upload], *, done: Callable[[bool], None], revision: str | None = None, daemon: bool = True
    ) -> Future:
        """Upload after any uploads in progress. `done` is called with True or False at the end; failures are logged.

        With `daemon`, the upload is interrupted when the process ends. Otherwise the process waits for it, and a signal
        that ends the process reports the interrupted upload.
        """
        future, before, ended = Future(), self._ended, threading.Event()
        fetch.begin_again()
        if not daemon:
            report_interruptions(fetch.pending_operations)

        def run():
            if before is not None:
                before.wait()
            try:
                self._push_and_report(uploads, revision, done, future)
            finally:
                ended.set()

        self._ended = ended
        threading.Thread(target=run, name="push to the Hub", daemon=daemon).start()
        return future

    def _push_and_report(
        self, uploads: list[Upload], revision: str | None, done: Callable[[bool], None], future: Future
    ) -> None:
        """Push, and report the outcome to `done` and `future`."""
        try:
            result = self.push(uploads, revision=revision)
        except Exception as error:  # passed on to whoever waits for `future`
            self.failures.append(str(error))
            done(False)
            future.set_exception(error)
            if not isinstance(error, OSError):  # not an error of the Hub: show its traceback
                raise
            if not fetch.is_cut_off():
                logger.warning("%s", error)
        else:
            done(True)
            future.set_result(result)

    def cut_off(self) -> None:
        """Abort uploads in progress because the process is exiting."""
        fetch.cut_off()

    def _upload(self, upload: Upload, revision: str | None) -> Any:
        self.uploading = upload.message
        try:
            for wait in (*_WAITS, None):
                try:
                    return self._try(upload, revision)
                except (HTTPError, OSError, _UploadError) as error:
                    if wait is None or not _may_pass(error) or fetch.is_cut_off():
                        raise self._failure(error, f'did not accept "{upload.message}"') from None
                    wait = _retry_after(error) or wait
                    logger.info("%s Retrying in %g seconds.", self._failure(error, "did not answer"), wait)
                time.sleep(wait)
        finally:
            self.uploading = None

    def _try(self, upload: Upload, revision: str | None) -> Any:
        """Upload once.

        Raises:
            _UploadError: the client reports a file that it could not upload.
        """
        with fetch.limited(f'uploading "{upload.message}" to {self.repo_id}'):
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
            except RuntimeError as error:  # the client raises it for connection errors in its own threads
                if isinstance(error.__cause__, HTTPError | OSError):
                    raise _UploadError(str(error)) from error.__cause__
                raise

    def _failure(self, error: Exception, problem: str) -> OSError:
        """The error for a failed request; `problem` describes what failed."""
        status = _status(error)
        text = f"{type(error).__name__}: {' '.join(error_message(error).split())}"
        kind = PermissionError if status in (401, 403) else ConnectionError
        way_out = (
            "Log in with `hf auth login`, or pass a hub_token with write access."
            if kind is PermissionError
            else "The local copy is complete, so you can push again later."
        )
        return kind(scrubbed(f"The repository {self.repo_id!r} on the Hub {problem}: {text} {way_out}"))


def _status(error: Exception) -> int | None:
    """HTTP status of the Hub's answer; None if there was no answer."""
    answered = error.__cause__ if isinstance(error, _UploadError) else error
    return answered.response.status_code if isinstance(answered, HfHubHTTPError) else None


def _may_pass(error: Exception) -> bool:
    """Whether a retry may succeed: not if the Hub refused, a file is unreadable, or the time limit was reached."""
    cause = error.__cause__ if isinstance(error, _UploadError) else error
    if isinstance(cause, fetch.HubSilentError):
        return False
    if isinstance(cause, HTTPError):
        return _status(cause) not in _PERMANENT
    return isinstance(cause, ConnectionError | TimeoutError)


def _retry_after(error: Exception) -> float | None:
    """Seconds that the Hub asks to wait; None if it does not ask."""
    if not isinstance(error, HfHubHTTPError):
        return None
    delay = fetch.asked_wait(error.response)
    return None if delay is None else min(delay, _LONGEST_WAIT)
