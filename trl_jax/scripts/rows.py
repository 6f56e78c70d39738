"""Read and write the JSON lines of commands; an interrupted command resumes."""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from trl_jax.training.checkpoint import digest, locked, sync

# ----------------------------------------------------------------------------------------------------
# The file of rows that a command writes: it appears when it is complete, and an interrupted run is resumed.


ROWS = "FILE"  # the mark's key of the digest of the rows
_FORMAT = 1
Sink = tuple[list[Any], Callable[[dict[str, Any]], None]]


class Job(NamedTuple):
    """The work of a command on rows.

    verb, done: of messages, as in "score", "scored". read: the rows of a file, each checked. added: the columns that a
    row gets. check: None where a value may stand in one; otherwise the kind that is wanted. kept: what a run remembers
    of a row that it wrote.
    """

    command: str
    verb: str
    done: str
    read: Callable[[Path], Iterator[Row]]
    added: Callable[[dict[str, Any]], tuple[str, ...]]
    check: Callable[[Any], str | None]
    kept: Callable[[dict[str, Any]], Any]


class Output:
    """The output of one run.

    job: of the command. path: as the user named it. source: the file of rows. overwrite: whether an existing file may
    be replaced.

    Raises:
        ValueError, OSError: the path cannot be written, or exists and may not be replaced.
    """

    def __init__(self, job: Job, path: str, source: Path, overwrite: bool):
        self.job = job
        self.path, self.source, self.overwrite = Path(path).resolve(), source, overwrite  # through links, to the file
        self.partial = self.path.with_name(f"{self.path.name}.partial")
        self.sidecar = self.path.with_name(f"{self.path.name}.partial.mark")
        self._check()

    def _check(self) -> None:
        if not self.path.parent.is_dir():
            raise FileNotFoundError(f"--output {self.path}: there is no folder {self.path.parent}. Make it first.")
        if not self.path.exists():
            return
        if not self.path.is_file():
            raise ValueError(f"--output {self.path} is no regular file. Leave --output out to write to stdout.")
        if self.path.samefile(self.source):
            raise ValueError(f"--output {self.path} is the file of rows to {self.job.verb}. Name another --output.")
        if not self.overwrite:
            raise FileExistsError(
                f"--output {self.path} is there already. Name another --output, or pass --overwrite to have it "
                f"replaced when all rows are {self.job.done}."
            )

    @contextlib.contextmanager
    def begun(self, mark: dict[str, Any]) -> Iterator[Sink]:
        """Begin or resume a run: a context with what is kept of each row done before, and a function that writes a row.

        At its end the file is moved into place. Where the block raises, rows are kept for the next run.

        Args:
            mark: settings that identify the run, by name.

        Raises:
            ValueError: the partial file is of another run.
            BlockingIOError: another process is writing it.
        """
        mark = {"format": _FORMAT, ROWS: digest(self.source), **mark}
        self._check_ours()
        try:
            lock = locked(self.sidecar)
        except BlockingIOError as error:
            raise BlockingIOError(
                f"--output {self.path}: another run is writing {self.partial}. Wait for it to end, or name another "
                "--output."
            ) from error
        try:
            done = self._taken_up(mark)
            if not done:
                os.truncate(lock, 0)
                os.pwrite(lock, (json.dumps(mark, indent=2) + "\n").encode(), 0)
            yield from self._filled(done)
            self._finish(mark)
        finally:
            os.close(lock)

    def _check_ours(self) -> None:
        """Raise ValueError where files under our names are not of such a run: a file of the user's own is left
        alone."""
        there = [path for path in (self.partial, self.sidecar) if path.exists()]
        ours = self.sidecar.exists() and (not self.sidecar.stat().st_size or "format" in self._mark())
        if there and not ours:
            raise ValueError(
                f"{there[0]} is in the way, and {self.sidecar.name} does not say that a run of "
                f"`{self.job.command}` wrote it. Move it away, or name another --output."
            )

    def _taken_up(self, mark: dict[str, Any]) -> list[Any]:
        """Read what is kept of the rows that are done; an incomplete line after them goes, and all of another run."""
        done, end = [], 0
        if self.partial.exists() and self.partial.stat().st_size:
            others = _differences(self._mark(), mark)
            if not others:
                done, end = self._done()
            elif not self.overwrite:
                raise ValueError(
                    f"{self.partial} was begun by another run, which differs in {', '.join(others)}. Run with what it "
                    "was begun with to go on, name another --output, or pass --overwrite to begin anew."
                )
        with open(self.partial, "ab") as file:
            file.truncate(end)
        return done

    def _mark(self) -> dict[str, Any]:
        try:
            mark = json.loads(self.sidecar.read_bytes())
        except ValueError:
            mark = None  # cut off or changed
        return mark if isinstance(mark, dict) else {}

    def _done(self) -> tuple[list[Any], int]:
        """Read what is kept of each complete line, and the byte at which the last one ends."""
        done, end, rows = [], 0, self.job.read(self.source)
        with open(self.partial, "rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.endswith(b"\n"):
                    done.append(self._kept(line, f"{self.partial}, line {number}", next(rows, None)))
                    end += len(line)
        return done, end

    def _kept(self, line: bytes, where: str, row: Row | None) -> Any:
        advice = f"Remove {self.partial.name} to begin anew, or name another --output."
        if row is None:
            raise ValueError(f"{where}: {self.source} has fewer rows. {advice}")
        found, columns = parse_row(line, where), self.job.added(row.content)
        if encoded({name: found[name] for name in found if name not in columns}) != encoded(row.content):
            raise ValueError(f"{where} holds another row than {row.where}. {advice}")
        for column in columns:
            if wanted := self.job.check(found.get(column)):
                raise ValueError(f"{where}: {column} is {found.get(column)!r}, wanted {wanted}. {advice}")
        return self.job.kept(found)

    def _filled(self, done: list[Any]) -> Iterator[Sink]:
        """Open the partial file for further rows; it is removed where a failed run has done none."""
        count = len(done)

        def write(row: dict[str, Any]) -> None:
            nonlocal count
            self._write(file, encoded(row) + b"\n")
            count += 1

        try:
            with open(self.partial, "ab", buffering=0) as file:
                yield done, write
                os.fsync(file.fileno())
        except BaseException:
            if count:
                kept = f"{count} rows are {self.job.done} and stay in {self.partial}"
                print(f"{kept}: the same command goes on behind them.", file=sys.stderr)
            else:
                self.partial.unlink()
                self.sidecar.unlink()
            raise

    def _write(self, file: Any, line: bytes) -> None:
        left = memoryview(line)
        try:
            while left:
                left = left[file.write(left) :]
        except OSError as error:
            error.filename = str(self.partial)
            raise

    def _finish(self, mark: dict[str, Any]) -> None:
        if digest(self.source) != mark[ROWS]:
            raise ValueError(
                f"{self.source} was changed while it was {self.job.done}. Of the file as it was, rows stand in "
                f"{self.partial}; pass --overwrite to begin anew with the file as it is."
            )
        self._check()  # something may have come there meanwhile
        os.replace(self.partial, self.path)
        sync(self.path.parent)
        self.sidecar.unlink()


def _differences(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    return sorted(name for name in then.keys() | now.keys() if then.get(name) != now.get(name))


def to_stdout() -> Sink:
    """Write rows to stdout in UTF-8, whatever the terminal's encoding."""

    def write(row: dict[str, Any]) -> None:
        sys.stdout.buffer.write(encoded(row) + b"\n")
        sys.stdout.buffer.flush()

    sys.stdout.flush()
    return [], write


# ----------------------------------------------------------------------------------------------------
# Read the rows of a jsonl file; errors name the line.


class Row(NamedTuple):
    """A row; `where` names its line in errors, as in "answers.jsonl, line 3"."""

    where: str
    content: dict[str, Any]


def read_rows(source: Path, added: Callable[[dict[str, Any]], tuple[str, ...]]) -> Iterator[Row]:
    """Iterate over the rows in order. Lines end with a newline only; blank ones are skipped.

    Args:
        added: the columns that a command writes beside a row's own.

    Raises:
        ValueError: a line is not a row, or has a column that would be replaced.
    """
    with open(source, "rb") as lines:
        for number, line in enumerate(lines, 1):
            line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if line.strip():
                row = Row(where := f"{source}, line {number}", parse_row(line, where))
                _check_columns(row, added(row.content))
                yield row


def parse_row(line: bytes, where: str) -> dict[str, Any]:
    """Parse the JSON object of a line, which can be written as JSON again.

    Raises:
        ValueError: the line is not such an object.
    """
    try:
        row = json.loads(line.decode("utf-8"))
        encoded(row)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{where} is not UTF-8: byte 0x{line[error.start]:02x} in column {error.start + 1}. Save the file as "
            "UTF-8, as `iconv -f UTF-16 -t UTF-8` does."
        ) from error
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{where} holds {ascii(error.object[error.start])}, half of a character: wanted whole ones. Write the "
            "text again from where it came from, or leave the row out."
        ) from error
    except RecursionError as error:
        raise ValueError(f"{where} is nested deeper than Python reads JSON. Leave out the column that is.") from error
    except ValueError as error:
        problem = f"{error.msg} in column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        nul = " It has NUL bytes: save the file as UTF-8." if b"\0" in line else ""
        raise ValueError(f"{where} is not JSON: {problem}. Wanted one row a line.{nul}") from error
    if not isinstance(row, dict):
        raise ValueError(f'{where} holds a {type(row).__name__}: wanted a row, as in {{"text": "..."}}.')
    return row


def encoded(row: dict[str, Any]) -> bytes:
    """The row as JSON in UTF-8, without an end of line."""
    return json.dumps(row, ensure_ascii=False).encode("utf-8")


def _check_columns(row: Row, added: tuple[str, ...]) -> None:
    for column in added:
        if column in row.content:
            raise ValueError(
                f"{row.where} has a column {column!r} already, where the result would go. Rename that column or leave "
                "it out."
            )
