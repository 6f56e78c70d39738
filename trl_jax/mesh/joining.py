"""The roll call: the processes of a run meet at the coordinator's address before JAX connects them.

JAX's coordination service does not report while it waits, treats a second process with the same number as a restart of
the first, and aborts processes after a timeout. The first process therefore listens at the address itself until all
others have reported with their number and their `num_processes`, and then leaves the port to JAX. A report is one line
of JSON, and so is each reply: {"missing": [2, 3]}, {"refused": "why"} or {"go": true}.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from trl_jax.core.text import say

TELL = 25  # seconds between two lines that say which processes are missing; polled, so that 30 s are never silent
_RETRY = 0.5  # seconds between two attempts to connect
_LAST_WORD = 5  # seconds that a process with an invalid number, or past its timeout, lets the first process explain
_OTHER = "another program answers there, or a run that has started without this process"
_LINE = 4096  # bytes: no report or reply is longer


@dataclass(frozen=True)
class Report:
    """What a process says about itself: its number, the number of processes it expects, its host and its pid."""

    number: int
    count: int
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)

    def where(self) -> str:
        return f"process_id={self.number} on {self.host}, pid {self.pid}"


def call_roll(address: str, count: int, number: int, timeout: float) -> None:
    """Wait until all processes of the run have reported, and check that their numbers fit together.

    Args:
        address: "host:port" of the first process.
        count: number of processes of the run.
        number: number of this process, from 0.
        timeout: seconds to wait for the others. Every TELL seconds, a line says who is missing.

    Raises:
        ValueError: a wrong address or number, two processes with the same number, or with different `num_processes`.
            All processes that have reported raise it.
        TimeoutError: processes are missing, or the first one does not answer.
    """
    report, (host, port) = Report(number, count), _parse(address)
    if not 0 <= number < count:
        text = _invalid_number(report)
        with contextlib.suppress(TimeoutError):  # the first process may not run yet
            _Guest(report, address, host, port, _LAST_WORD).attend()
        raise ValueError(text)
    end = time.monotonic() + timeout
    if number == 0:
        listener = _listen(report, address, host, port, end, timeout)
        _Host(report, address, listener, timeout).attend((host, port), end)
    else:
        _Guest(report, address, host, port, timeout).attend()


def _parse(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"coordinator_address must be 'host:port' of the first process, got {address!r}.")
    return host.strip("[]"), int(port)


def _invalid_number(report: Report) -> str:
    return (
        f"process_id must be between 0 and {report.count - 1} with num_processes={report.count}, got "
        f"{report.number} (on {report.host}, pid {report.pid}). Give each process its own process_id, starting at 0."
    )


def _names(numbers: Sequence[int]) -> str:
    """For example "process 1", or "processes 1, 2 and 5"."""
    *first, last = map(str, numbers)
    return f"processes {', '.join(first)} and {last}" if first else f"process {last}"


def _reply(line: bytes) -> dict[str, Any]:
    """The content of the line; empty if it is not a reply of the first process."""
    try:
        values = json.loads(line)
    except ValueError:
        return {}
    return values if isinstance(values, dict) and values.keys() <= {"go", "refused", "missing"} else {}


def _encode(values: dict[str, Any]) -> bytes:
    return json.dumps(values).encode() + b"\n"


def _reason(error: OSError) -> str:
    return os.strerror(error.errno) if error.errno and not isinstance(error, socket.gaierror) else str(error)


class _Patience:
    """Says what is being waited for: after a third of TELL seconds, and then every TELL seconds."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._next = self._began + TELL / 3

    def tell(self, text: str) -> None:
        now = time.monotonic()
        if now >= self._next:
            self._next += TELL
            say(f"{text} ({now - self._began:.0f} s so far).")


# The first process


def _listen(report: Report, address: str, host: str, port: int, end: float, timeout: float) -> socket.socket:
    """A listening socket at the port of the address.

    If another process 0 has the port, both raise ValueError. If another program has it, such as the last process of an
    earlier run, wait until it is free.
    """
    bind, bind_port = _parse(os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", f"[::]:{port}"))
    patience = _Patience()
    while True:
        try:
            if bind == "::" and socket.has_dualstack_ipv6():
                return socket.create_server((bind, bind_port), family=socket.AF_INET6, dualstack_ipv6=True)
            family = socket.AF_INET6 if ":" in bind and bind != "::" else socket.AF_INET
            return socket.create_server(("" if bind == "::" else bind, bind_port), family=family)
        except OSError as error:
            problem = f"process 0 of {report.count} cannot listen at {address}: {_reason(error)}"
        with contextlib.suppress(TimeoutError):  # what has the port is not waiting for this run
            _Guest(report, address, host, port, _RETRY).attend()
        patience.tell(problem)
        if time.monotonic() > end:
            raise TimeoutError(
                f"{problem[0].upper()}{problem[1:]}, after {timeout:g} s. End the program that uses the port, or "
                "choose another port for coordinator_address in all processes."
            )
        time.sleep(_RETRY)


class _Host:
    """The first process, which takes the reports."""

    def __init__(self, report: Report, address: str, listener: socket.socket, timeout: float):
        self._report, self._address, self._listener, self._timeout = report, address, listener, timeout
        self._present = {0: report}
        self._connections: dict[socket.socket, tuple[bytes, Report | None]] = {}  # what was read, and the report

    def attend(self, endpoint: tuple[str, int], end: float) -> None:
        patience, mirror = _Patience(), self._mirror(endpoint)
        with self._listener, mirror, selectors.DefaultSelector() as selector:
            for source in (self._listener, mirror):
                selector.register(source, selectors.EVENT_READ)
            try:
                while self._missing():
                    for key, _ in selector.select(0.5):
                        if key.fileobj is self._listener:
                            connection, _ = self._listener.accept()
                            connection.settimeout(5)
                            self._connections[connection] = b"", None
                            selector.register(connection, selectors.EVENT_READ)
                        elif key.fileobj is mirror:
                            selector.unregister(mirror)
                            self._check_mirror(mirror)
                        elif not self._read(key.fileobj):
                            selector.unregister(key.fileobj)
                            self._forget(key.fileobj)
                    if self._missing():
                        patience.tell(
                            f"process 0 of {self._report.count} waits at {self._address} for {_names(self._missing())}"
                        )
                        self._check_time(end)
                self._reply(go=True)
            finally:
                for connection in list(self._connections):
                    self._forget(connection)

    def _mirror(self, endpoint: tuple[str, int]) -> socket.socket:
        """A connection to the run's own address. It leads to this process, unless another host also has a process 0,
        which then refuses it."""
        try:
            mirror = socket.create_connection(endpoint, timeout=2)
            mirror.sendall(_encode(vars(self._report)))
        except OSError:  # in some networks, a host cannot connect to its own public address
            return socket.socket()
        return mirror

    def _check_mirror(self, mirror: socket.socket) -> None:
        reply = b""
        with contextlib.suppress(OSError):
            reply = mirror.recv(_LINE)
        text = _reply(reply.partition(b"\n")[0]).get("refused")
        if text is not None:
            self._reply(refused=text)
            raise ValueError(text)

    def _missing(self) -> list[int]:
        return [number for number in range(self._report.count) if number not in self._present]

    def _check_time(self, end: float) -> None:
        if time.monotonic() > end:
            text = (
                f"{_names(self._missing()).capitalize()} of {self._report.count} did not join the run at "
                f"{self._address} within {self._timeout:g} s. Start every process with the same coordinator_address "
                "and num_processes and with its own process_id. To wait longer, increase initialization_timeout."
            )
            self._reply(refused=text)
            raise TimeoutError(text)

    def _read(self, connection: socket.socket) -> bool:
        """Read what arrived; returns False if the connection is of no more use."""
        buffer, report = self._connections[connection]
        try:
            data = connection.recv(_LINE)
        except OSError:
            return False
        if not data or report is not None or len(buffer) + len(data) > _LINE:
            return False
        line, newline, _ = (buffer + data).partition(b"\n")
        if newline:
            try:
                values = json.loads(line)
                report = Report(int(values["number"]), int(values["count"]), str(values["host"]), int(values["pid"]))
            except (ValueError, KeyError, TypeError):
                return False  # not a process of this program
        if report == self._report:  # the connection of `_mirror`
            return False
        self._connections[connection] = buffer + data, report
        if report is not None:
            self._check(report)
            self._present[report.number] = report
            if self._missing():
                self._reply(missing=self._missing())
        return True

    def _check(self, report: Report) -> None:
        ours, other = self._report, self._present.get(report.number)
        if report.count != ours.count:
            text = (
                f"The processes of this run have different num_processes: {report.count} on "
                f"{report.where()}, but {ours.count} on {ours.where()}. Start all processes with the same number."
            )
        elif not 0 <= report.number < ours.count:
            text = _invalid_number(report)
        elif other is not None:
            text = (
                f"Two processes of this run have process_id={report.number}: pid {other.pid} on {other.host}, and pid "
                f"{report.pid} on {report.host}. Give each process its own process_id from 0 to {ours.count - 1}."
            )
        else:
            return
        self._reply(refused=text)
        raise ValueError(text)

    def _reply(self, **values: Any) -> None:
        for connection in self._connections:
            with contextlib.suppress(OSError):  # closed; the next read notices
                connection.sendall(_encode(values))

    def _forget(self, connection: socket.socket) -> None:
        _, report = self._connections.pop(connection)
        if report is not None and self._present.get(report.number) == report:
            del self._present[report.number]  # it may restart
        connection.close()


# The other processes


class _Guest:
    """A process that reports at the address."""

    def __init__(self, report: Report, address: str, host: str, port: int, timeout: float):
        self._report, self._address, self._place, self._timeout = report, address, (host, port), timeout
        self._end = time.monotonic() + timeout
        self._patience = _Patience()
        self._state = "nothing answers there"

    def attend(self) -> None:
        while True:
            try:
                with socket.create_connection(self._place, timeout=5) as connection:
                    connection.sendall(_encode(vars(self._report)))
                    if self._go_ahead(connection):
                        return
            except OSError as error:
                self._state = f"nothing answers there ({_reason(error)})"
            self._check_time()
            time.sleep(_RETRY)

    def _go_ahead(self, connection: socket.socket) -> bool:
        """Whether the first process replied "go"; False if the connection ends before.

        If the first process is waiting, too, this one waits _LAST_WORD seconds longer, to be told who is missing.
        """
        connection.settimeout(0.5)
        buffer, end = b"", self._end
        while True:
            try:
                data = connection.recv(_LINE)
            except TimeoutError:
                if time.monotonic() > end:
                    return False
                self._tell()
                continue
            if not data:
                self._state = _OTHER
                return False
            *lines, buffer = (buffer + data).split(b"\n")
            for line in lines:
                reply = _reply(line)
                if reply.get("go"):
                    return True
                if "refused" in reply:
                    raise ValueError(reply["refused"])
                self._state = f"process 0 is there, and waits for {_names(reply['missing'])}" if reply else _OTHER
                end = self._end + _LAST_WORD if reply else end
            if len(buffer) > _LINE:
                self._state = _OTHER
                return False

    def _tell(self) -> None:
        self._patience.tell(
            f"process {self._report.number} of {self._report.count} waits for the run at {self._address}: {self._state}"
        )

    def _check_time(self) -> None:
        self._tell()
        if time.monotonic() > self._end:
            raise TimeoutError(
                f"Process {self._report.number} of {self._report.count} could not join the run at {self._address} "
                f"within {self._timeout:g} s: {self._state}. Start process 0 on that host, with the same "
                "coordinator_address; to wait longer, increase initialization_timeout."
            )
