"""Limits of waiting for the Hub: hooks on its client's own session, in force while a block of `limited` runs.

Each try has the time limit that the client gave it (HF_HUB_ETAG_TIMEOUT, HF_HUB_DOWNLOAD_TIMEOUT), and all tries of a
request together have `patience()`: the client alone would wait for some answers without end, and as long between two
tries as a server asks for.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import huggingface_hub
from huggingface_hub import constants
from huggingface_hub.errors import HTTPError
from huggingface_hub.utils import parse_ratelimit_headers

from trl_jax.core.secrets import scrubbed
from trl_jax.hub.network.leaving import leaving_told

logger = logging.getLogger(__name__)

VARIABLE = "TRL_JAX_HUB_TIMEOUT"
_DEFAULT = 60.0  # seconds
_TOLD_AFTER = 5.0  # seconds without an answer
_LOOKS = 0.25  # seconds between two looks at what is waited for
_TRIED_AGAIN = (408, 429, 500, 502, 503, 504)  # statuses after which the client tries again

_NOT_OURS = ("/datasets/", "/api/datasets/")  # rows that a script reads meanwhile, as its own library does
_UNLIMITED = "trl_jax.unlimited"  # an extension of their requests, which redirected ones inherit

_operations: list[str] = []  # under way: "fetching ..."
_waits: dict[str, float] = {}  # request without a good answer so far -> since when; inf while its body is sent
_sockets: list[weakref.ref] = []
_cut_off = False  # whether the process is about to leave


class HubSilentError(HTTPError):
    """Ends a request without a good answer within `patience()`; the Hub's client does not try it again."""


def patience() -> float:
    """The seconds in which a request must get a good answer, all tries together.

    Raises:
        ValueError: TRL_JAX_HUB_TIMEOUT is no such number.
    """
    value = os.environ.get(VARIABLE)
    if value is None:
        return max(_DEFAULT, constants.HF_HUB_DOWNLOAD_TIMEOUT, constants.HF_HUB_ETAG_TIMEOUT)
    with contextlib.suppress(ValueError):
        if 0 < float(value) < math.inf:
            return float(value)
    raise ValueError(f"{VARIABLE} is {value!r}, wanted a number of seconds, such as 60.")


@contextlib.contextmanager
def limited(operation: str) -> Iterator[None]:
    """Limit the requests of a block. `operation`, such as "fetching x", says in the log what is waited for.

    In the main thread a signal leaves at once, and says which operation it cut off.
    """
    patience()
    if threading.current_thread() is threading.main_thread():
        begin_again()
    _operations.append(operation)
    done = threading.Event()
    _hook()
    threading.Thread(target=_watch, args=(operation, done), name="waiting for the Hub", daemon=True).start()
    try:
        with leaving_told(under_way, cut_off):
            yield
        for request in [] if _cut_off or len(_operations) > 1 else list(_waits):
            logger.warning("%s had no good answer while %s.", request, operation)
    finally:
        done.set()
        _operations.remove(operation)
        if not _operations:
            _waits.clear()
            _sockets[:] = [known for known in _sockets if known() is not None]


def under_way() -> list[str]:
    """The operations that wait for the Hub now."""
    return list(_operations)


def cut_off() -> None:
    """Break off all requests under way, and refuse further ones until `begin_again`."""
    global _cut_off
    _cut_off = True
    for known in list(_sockets):
        with contextlib.suppress(OSError):  # it is closed
            if (end := known()) is not None:
                socket.socket.shutdown(end, socket.SHUT_RDWR)  # wakes the thread that reads from it


def begin_again() -> None:
    """Allow requests after `cut_off`."""
    global _cut_off
    _cut_off = False


def is_cut_off() -> bool:
    """Whether requests were broken off because the process is about to leave."""
    return _cut_off


def _hook() -> None:
    """Put our hooks on the client's session, unless they are there; it makes a new one after lost connections."""
    session = huggingface_hub.get_session()
    hooks = session.event_hooks
    if _before not in hooks["request"]:
        request, response = [*hooks["request"], _before], [*hooks["response"], _after]
        session.event_hooks = {"request": request, "response": response}


def _watch(operation: str, done: threading.Event) -> None:
    told = False
    while not done.wait(_LOOKS):
        _hook()
        late = [key for key, since in list(_waits.items()) if time.monotonic() - since > _TOLD_AFTER]
        if late and not told:
            told = True
            logger.warning(
                "Waiting for the Hub, which has not answered for %g seconds, while %s: %s. It is given up after %g "
                "seconds (%s).", _TOLD_AFTER, operation, late[0], patience(), VARIABLE,
            )  # fmt: skip


def _key(request: Any) -> str:
    """The request in messages; what follows the ? may be a signature."""
    return scrubbed(f"{request.method} {str(request.url).partition('?')[0]}")


def _before(request: Any) -> None:
    """Set the time limits of a request that is about to be sent, or refuse it."""
    if not _operations:
        return
    key, now, limit = _key(request), time.monotonic(), patience()
    if request.url.path.startswith(_NOT_OURS):
        request.extensions[_UNLIMITED] = True
    if _UNLIMITED in request.extensions:
        return
    if _cut_off:
        raise HubSilentError(f"{key} was broken off, as the process is leaving.")
    left = limit - max(0.0, now - _waits.setdefault(key, now))
    if left <= 0:
        _waits.pop(key, None)
        raise HubSilentError(f"{key}: no good answer within {limit:g} seconds ({VARIABLE}).")
    limits = request.extensions["timeout"]
    request.extensions["timeout"] = {
        kind: left if limits.get(kind) is None else min(limits[kind], left)
        for kind in ("connect", "read", "write", "pool")
    }
    request.extensions["trace"] = _traced(key, request.method == "PUT")


def _traced(key: str, uploads: bool) -> Callable[[str, dict], None]:
    """Note the sockets of a request, and of an upload when its body has gone: nobody waits before that."""

    def trace(event: str, info: dict) -> None:
        if event in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
            _sockets.append(weakref.ref(info["return_value"].get_extra_info("socket")))
        elif uploads and ".send_request_body." in event:
            stuck = "Timeout" in type(info.get("exception")).__name__
            sending = math.inf if event.endswith(".started") else time.monotonic()
            _waits[key] = -math.inf if stuck else sending

    return trace


def _after(response: Any) -> None:
    """Note a good answer. Before the client tries again, wait as long as the server asks for, within the limit."""
    if not _operations or _UNLIMITED in response.request.extensions:
        return
    key = _key(response.request)
    if response.status_code not in _TRIED_AGAIN:
        _waits.pop(key, None)
        return
    asked = _asked_wait(response)
    if asked is None:
        return
    end = time.monotonic() + asked
    if end - _waits.get(key, time.monotonic()) > patience():
        _waits.pop(key, None)
        raise HubSilentError(
            f"{key}: status {response.status_code}, and the server asks to wait {asked} seconds. That is more than "
            f"{patience():g} ({VARIABLE})."
        )
    if response.request.method == "POST":  # which some of the client's functions do not try again
        return
    while time.monotonic() < end and not _cut_off:
        time.sleep(min(_LOOKS, asked))
    response.headers["Retry-After"] = "0"
    response.headers.pop("ratelimit", None)


def _asked_wait(response: Any) -> int | None:
    """The seconds that the server asks to wait, by the headers that its client reads; None where it does not."""
    limit = parse_ratelimit_headers(response.headers) if response.status_code == 429 else None
    if limit is not None and limit.remaining == 0:
        return limit.reset_in_seconds
    asked = response.headers.get("Retry-After", "").strip()
    return int(asked) if asked.isdecimal() else None
