"""Notice that another process of the run has failed, died or fallen behind, and exit with a line that names it.

A process that raised or died never reaches the collective in which the others wait, and Python code cannot interrupt
that wait. A thread therefore watches the other processes in three ways:

- what they announce through the key-value store of JAX's coordination service: exceptions, and their progress;
- a TCP connection from each process to the first one (`_Lifelines`), which the kernel closes when a process dies;
- SIGABRT: without the coordination service, which the first process hosts, JAX aborts the process.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import re
import secrets
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax

from trl_jax.core.text import say
from trl_jax.mesh.jax_internals import coordination_state
from trl_jax.mesh.joining import TELL

GRACE = 8  # seconds this process gets to raise an exception by itself after another process raised or died
LAST = 15  # seconds to wait for the other processes when exiting
WAIT = 60  # seconds of waiting at one point, after which a line names the processes that have not arrived
_PUBLISH = 5  # seconds between two announcements of this process's progress
_NOTICE = 5  # seconds to wait for the news of a death after a collective failed
_RESUME = "Checkpoints are never partial: restart all processes with resume_from_checkpoint=True."
_FAILED = re.compile(r"Gloo|NCCL|UNAVAILABLE|[Cc]onnection (reset|closed|refused)|[Ss]ocket closed")


class AgreedExit(SystemExit):
    """All processes exit after the same step; this is not a failure."""


class Watch:
    """Exits this process if another one raised an exception in a block of `together`, died, or exited.

    All processes run the same code, so they number their blocks alike. A process that raises an exception by itself
    within GRACE seconds is left alone.
    """

    def __init__(self) -> None:
        self.blocks: list[int] = []  # numbers of the blocks this process is in
        self.raising = False  # whether an exception is propagating out of them
        self.lost: int | None = None  # number of a process that died
        self._state: Any = None  # JAX's: number and count of processes, and the client of its coordination service
        self._client: Any = None  # of that service, from the first block on
        self._joining: Callable[[], str] | None = None  # why JAX would abort this process now
        self._thread: threading.Thread | None = None  # started with the first block: until then, scripts may fork
        self._count, self._over = 0, threading.Event()
        self._position = _Position(0, "its start", time.monotonic())
        self._published, self._warned = (0, 0.0), 0
        self._lifelines: _Lifelines | None = None
        self._devices_started = False

    @property
    def number(self) -> int:
        return self._state.process_id

    @property
    def count(self) -> int:
        return self._state.num_processes

    def start(self) -> None:
        """From now on, explain why JAX aborts this process. Call this before or after JAX connects the processes."""
        if self._state is None:
            self._state = coordination_state()
            _explain_abort(self._why_aborted)
            atexit.register(self._stop)  # runs before JAX's own exit handler waits for all processes

    @contextlib.contextmanager
    def joining(self, timeout: float) -> Iterator[None]:
        """A block of at most `timeout` seconds in which JAX connects the processes; says so while JAX is waiting."""
        self.start()
        over = threading.Event()

        def what() -> str:
            return f"process {self.number} of {self.count} to the run at {self._state.coordinator_address}"

        def tell() -> None:
            while not over.wait(TELL):
                say(f"JAX is still connecting {what()}.")

        threading.Thread(target=tell, daemon=True).start()
        self._joining = lambda: (
            f"JAX could not connect {what()} within {timeout:g} s (its own message is above): a process is missing, or "
            "the address cannot be reached. Start all processes; to wait longer, increase initialization_timeout."
        )
        try:
            yield
        finally:
            over.set()
            self._joining = None

    def start_devices(self) -> None:
        """Start JAX's devices, if they have not been started. Processes wait for each other while doing so."""
        if not self._devices_started:
            self._devices_started = True
            with self.block("starting JAX's devices"):
                jax.devices()

    def reached(self, name: str) -> None:
        """Note that this process begins this part of the run, which all processes reach at some time."""
        self._position = _Position(self._position.number + 1, name, time.monotonic())

    @contextlib.contextmanager
    def block(self, name: str) -> Iterator[None]:
        """A block of `together`.

        Raises:
            RuntimeError: a collective failed, because a process died or the network failed.
        """
        if self._thread is None:
            self.start()
            self._client = self._state.client
            self._lifelines = _Lifelines(self._state, self._client)
            self._thread = threading.Thread(target=self._watch_others, name="trl_jax-processes", daemon=True)
            self._thread.start()
        self._count += 1
        number, self.raising = self._count, False
        self.blocks.append(number)
        self.reached(name)
        try:
            yield
        except AgreedExit:
            raise
        except BaseException as error:  # re-raised
            self.raising = True
            explanation = self._explanation(error, name)
            self.announce(f"left/{number}", error)
            if explanation is not None:
                raise RuntimeError(explanation) from error
            raise
        finally:
            self.blocks.remove(number)
            self.reached(f"what follows {name}")

    def announce(self, event: str, error: BaseException) -> None:
        client = None if self._state is None else self._client or self._state.client
        if client is not None and self.lost is None:
            self._publish(client, event, type(error).__name__)

    def _publish(self, client: Any, event: str, text: str) -> None:
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # the first process, which hosts the service, is gone
            client.key_value_set(f"trl_jax/{event}/{self.number}", text, allow_overwrite=True)

    def _published_by_others(self, event: str) -> dict[int, str]:
        """Number of another process -> what it published."""
        entries = self._client.key_value_dir_get(f"trl_jax/{event}/")
        values = {int(key.rpartition("/")[2]): text for key, text in entries}
        return {number: text for number, text in values.items() if number != self.number}

    def _explanation(self, error: BaseException, name: str) -> str | None:
        """Why a collective failed; None for other errors. Waits up to _NOTICE seconds for the news of a death."""
        if not isinstance(error, jax.errors.JaxRuntimeError | ValueError) or not _FAILED.search(str(error)):
            return None
        end = time.monotonic() + _NOTICE
        while self.lost is None and time.monotonic() < end:
            time.sleep(0.05)
        if self.lost is not None:
            return self._loss_message()
        others = "though all of them are alive" if self._lifelines.hold(self.count) else "or one of them has died"
        return (
            f"The connection between the processes of this run failed in {name}, {others} (this is process "
            f"{self.number} of {self.count}). Look at their logs and at the network between their hosts. {_RESUME}"
        )

    def _loss_message(self) -> str:
        return (
            f"Process {self.lost} of {self.count} has died or cannot be reached (see its own log), so this process, "
            f"number {self.number}, cannot continue. {_RESUME}"
        )

    def _watch_others(self) -> None:
        failure, since = None, 0.0
        while not self._over.is_set():
            lost = self._lifelines.wait(1)
            self.lost = lost if self.lost is None else self.lost
            try:
                latest = self._find_failure()
                if self.lost is None:
                    self._tell_position()
            except jax.errors.JaxRuntimeError:  # the first process is gone, and the lifelines notice it
                continue
            if latest != failure:
                failure, since = latest, time.monotonic()
            if failure is not None and time.monotonic() >= since + GRACE:
                self._exit(failure[1])

    def _find_failure(self) -> tuple[int, str] | None:
        """The block in which this process waits for a failed one, and a sentence about the failure."""
        for number in [] if self.raising else tuple(self.blocks):
            if self.lost is not None:
                return number, self._loss_message()
            for event in (f"left/{number}", "ended"):
                for process, name in self._published_by_others(event).items():
                    return number, (
                        f"Process {process} of {self.count} ended with {name} (see its own log), so this process, "
                        f"number {self.number}, exits too. {_RESUME}"
                    )
        return None

    def _tell_position(self) -> None:
        """Publish this process's position; if it has waited long, say which processes have not arrived."""
        position, now = self._position, time.monotonic()
        published_number, published_at = self._published
        if position.number != published_number and now >= published_at + _PUBLISH:
            self._published, self._warned = (position.number, now), 0
            self._publish(self._client, "at", f"{position.number} {position.name}")
        if self.blocks and now >= position.since + WAIT * (self._warned + 1):
            self._warned = int((now - position.since) // WAIT)
            lagging = self._lagging(position.number)
            if lagging:
                say(
                    f"process {self.number} of {self.count} has waited {now - position.since:.0f} s in {position.name} "
                    f"for {'; '.join(lagging)}."
                )

    def _lagging(self, position: int) -> list[str]:
        positions = {number: text.partition(" ") for number, text in self._published_by_others("at").items()}
        return [
            f"process {number}, which is in {positions[number][2]}" if number in positions else f"process {number}"
            for number in range(self.count)
            if number != self.number and (number not in positions or int(positions[number][0]) < position)
        ]

    def _exit(self, text: str) -> None:
        say(text)
        _flush()
        if self.lost is None:
            # Processes wait for each other here. If this one just exited, JAX would abort the others.
            shutdown = threading.Thread(target=jax.distributed.shutdown, daemon=True)
            shutdown.start()
            shutdown.join(LAST)
        os._exit(1)  # the main thread is stuck in a collective

    def _stop(self) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join(2)
        if self.lost is not None:  # JAX would wait for the process that died, and abort
            _flush()
            os._exit(1)
        if "last_value" in vars(sys):  # an unhandled exception, which Python has printed, ends this process
            self.announce("ended", sys.last_value)
        if self._lifelines is not None:
            self._lifelines.close()

    def _why_aborted(self) -> str | None:
        """Why JAX aborts this process; None if unknown. Runs in the thread that JAX aborts."""
        if self._joining is not None:
            return self._joining()
        end = time.monotonic() + 2
        while self.lost is None and self._thread is not None and time.monotonic() < end:
            time.sleep(0.05)
        if self.lost is None and self.number != 0 and not _answers(self._state.coordinator_address):
            self.lost = 0
        return None if self.lost is None else self._loss_message()


class _Position:
    """The position of a process in the run: an increasing number, a name, and the time of arrival."""

    def __init__(self, number: int, name: str, since: float):
        self.number, self.name, self.since = number, name, since


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed
            stream.flush()


class _Lifelines:
    """A TCP connection between the first process and each other one, which shows that both are alive.

    Only three messages are sent: the number of a process that connects ("hello"), the number of one that died ("lost"),
    which the first process passes on, and "bye" from a process that exits normally. The kernel closes the connections
    of a process that dies; those to a host that is down fail within 12 seconds, before JAX aborts this process because
    heartbeats are missing (15 to 30 seconds). Connecting requires the coordination service, which knows the port and a
    secret.
    """

    def __init__(self, state: Any, client: Any):
        """
        Args:
            state: JAX's, with this process's number and the address of the first one.
            client: of the coordination service.
        """
        self._number, self._address, self._client = state.process_id, state.coordinator_address, client
        self._selector = selectors.DefaultSelector()
        self._peers: dict[socket.socket, tuple[bytes, int | None]] = {}  # what was read, and the number
        self._secret, self._pid = secrets.token_hex(16), os.getpid()
        self._listener: socket.socket | None = None
        self._connected, self._attempts = False, 0
        os.register_at_fork(after_in_child=self._close_sockets)  # otherwise a child would keep the connections open

    def wait(self, seconds: float) -> int | None:
        """Wait for up to this many seconds. Returns the number of a process that died, or None."""
        if not self._connected:
            self._connect()
        if not self._selector.get_map():
            time.sleep(seconds)
            return None
        for key, _ in self._selector.select(seconds):
            if key.fileobj is self._listener:
                connection, _ = self._listener.accept()
                self._add(connection, None)
            elif (lost := self._read(key.fileobj)) is not None:
                self._send(f"lost {lost}")
                return lost
        return None

    def hold(self, count: int) -> bool:
        """Whether this process, one of `count`, has all connections that it should have."""
        numbers = {number for _, number in list(self._peers.values())}  # the thread may change it
        return numbers >= (set(range(1, count)) if self._number == 0 else {0})

    def _connect(self) -> None:
        """Open the port in the first process; in the others, connect to it once it is known."""
        try:
            if self._number == 0:
                if socket.has_dualstack_ipv6():
                    self._listener = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
                else:
                    self._listener = socket.create_server(("", 0))
                self._selector.register(self._listener, selectors.EVENT_READ)
                port = self._listener.getsockname()[1]
                self._client.key_value_set("trl_jax/lifelines/0", f"{port} {self._secret}", allow_overwrite=True)
                self._connected = True
                return
            entries = self._client.key_value_dir_get("trl_jax/lifelines/")
            if entries:
                port, self._secret = entries[0][1].split(" ")
                self._attempts += 1
                host = self._address.rpartition(":")[0].strip("[]")
                connection = socket.create_connection((host, int(port)), timeout=5)
                self._add(connection, 0)
                self._send(f"hello {self._secret} {self._number}")
                self._connected = True
        except (OSError, jax.errors.JaxRuntimeError):
            self._connected = self._attempts == 3  # give up, as behind a firewall: JAX's own heartbeats must suffice

    def _add(self, connection: socket.socket, number: int | None) -> None:
        connection.settimeout(5)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if sys.platform == "linux":
            for option, value in ((socket.TCP_KEEPIDLE, 4), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 4)):
                connection.setsockopt(socket.IPPROTO_TCP, option, value)
        self._peers[connection] = b"", number
        self._selector.register(connection, selectors.EVENT_READ)

    def _read(self, connection: socket.socket) -> int | None:
        """Read what arrived. Returns the number of a process that died, or None."""
        buffer, number = self._peers[connection]
        try:
            data = connection.recv(256)
        except OSError:
            data = b""
        *lines, rest = (buffer + data).split(b"\n")
        lost = None
        for line in lines:
            word, *values = line.decode(errors="replace").split(" ")
            if word == "hello" and number is None and values[:1] == [self._secret]:
                number = int(values[1])
            elif word == "lost" and number == 0:
                lost = int(values[0])
            elif word == "bye":
                data, number = b"", None
        self._peers[connection] = rest, number
        if not data or (number is None and len(rest) > 128):
            self._selector.unregister(connection)
            del self._peers[connection]
            connection.close()
            lost = number if lost is None else lost
        return lost

    def _send(self, text: str) -> None:
        for connection in self._peers:
            with contextlib.suppress(OSError):  # closed; the next read notices
                connection.sendall(f"{text}\n".encode())

    def close(self) -> None:
        """Tell the others that this process exits normally, and close the connections."""
        if os.getpid() == self._pid:
            self._send("bye")
            self._close_sockets()

    def _close_sockets(self) -> None:
        for connection in [*self._peers, *([] if self._listener is None else [self._listener])]:
            connection.close()


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with contextlib.suppress(OSError):
        socket.create_connection((host.strip("[]"), int(port)), timeout=3).close()
        return True
    return False


_abort: list[Any] = []  # the handler, which C code calls: it must not be garbage-collected


def _explain_abort(explain: Callable[[], str | None]) -> None:
    """If C++ code aborts this process and `explain` knows the reason, print it and exit with code 1.

    Python's own signal handlers would run too late: its C handler only sets a flag, and then the process is aborted.
    """
    if sys.platform == "win32":
        return
    library, pid = ctypes.CDLL(None), os.getpid()
    library.signal.argtypes, library.signal.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p

    def handle(number: int) -> None:
        text = explain() if os.getpid() == pid else None
        if text is not None:
            say(text)
            _flush()
            os._exit(1)
        library.signal(signal.SIGABRT, previous)
        os.kill(os.getpid(), signal.SIGABRT)

    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(handle)
    _abort.append(handler)
    previous = library.signal(signal.SIGABRT, ctypes.cast(handler, ctypes.c_void_p))
