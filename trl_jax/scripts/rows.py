"""Read and write the JSON lines of commands such as score and generate. An interrupted command can be resumed."""

from __future__ import annotations

import argparse
import codecs
import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from trl_jax.training.checkpoint_files import digest, locked, sync

ROWS = "FILE"  # key of the digest of the input rows in the mark
_FORMAT = 1  # version of the mark
# `Job.result` of the rows already written, and a function that writes a row.
Sink = tuple[list[Any], Callable[[dict[str, Any]], None]]


# Output: written to OUTPUT.partial and moved into place when complete


class Job(NamedTuple):
    """What a command does with rows.

    verb, done: for messages, such as "score" and "scored".
    read: reads and checks the rows of a file.
    added_columns: the columns that the command adds to a row.
    check: None if a value of an added column is valid, else what it must be.
    result: what to keep in memory of a written row.
    """

    command: str
    verb: str
    done: str
    read: Callable[[Path], Iterator[Row]]
    added_columns: Callable[[dict[str, Any]], tuple[str, ...]]
    check: Callable[[Any], str | None]
    result: Callable[[dict[str, Any]], Any]


def add_output_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags for the output of a command that reads rows."""
    parser.add_argument(
        "-o", "--output", help="file to write. Rows go to OUTPUT.partial until it is complete; after an interruption, "
        "the same command continues where it stopped"
    )  # fmt: skip
    parser.add_argument(
        "--overwrite", action="store_true", help="replace an existing OUTPUT once the new one is complete, and an "
        "OUTPUT.partial of another run"
    )  # fmt: skip
    parser.add_argument("--quiet", action="store_true", help="hide the progress bar")


class Output:
    """The output file of one run.

    Args:
        path: as the user wrote it.
        source: the file of input rows.
        overwrite: whether an existing file may be replaced.

    Raises:
        ValueError, OSError: the path cannot be written, or exists and may not be replaced.
    """

    def __init__(self, job: Job, path: str, source: Path, overwrite: bool):
        self.job = job
        self.path = Path(path).resolve()  # follow links, so that they are not replaced
        self.source, self.overwrite = source, overwrite
        self.partial = self.path.with_name(f"{self.path.name}.partial")
        self.sidecar = self.path.with_name(f"{self.path.name}.partial.mark")
        self._check()

    def _check(self) -> None:
        if not self.path.parent.is_dir():
            raise FileNotFoundError(f"--output {self.path}: there is no folder {self.path.parent}. Create it first.")
        if not self.path.exists():
            return
        if not self.path.is_file():
            raise ValueError(f"--output {self.path} is not a regular file. Omit --output to write to stdout.")
        if self.path.samefile(self.source):
            raise ValueError(f"--output {self.path} is the file of rows to {self.job.verb}. Choose another --output.")
        if not self.overwrite:
            raise FileExistsError(
                f"--output {self.path} already exists. Choose another --output, or pass --overwrite to "
                f"replace it when all rows are {self.job.done}."
            )

    @contextlib.contextmanager
    def running(self, mark: dict[str, Any]) -> Iterator[Sink]:
        """Start or resume a run.

        When the block ends, the file is moved into place. If the block raises, the rows are kept for the next run.

        Args:
            mark: settings that identify the run, by name.

        Raises:
            ValueError: the partial file belongs to another run.
            BlockingIOError: another process is writing the partial file.
        """
        mark = {"format": _FORMAT, ROWS: digest(self.source), **mark}
        self._check_ownership()
        try:
            lock = locked(self.sidecar)
        except BlockingIOError as error:
            raise BlockingIOError(
                f"--output {self.path}: another run is writing {self.partial}. Wait for it to end, or choose another "
                "--output."
            ) from error
        try:
            done = self._resume(mark)
            if not done:
                os.truncate(lock, 0)
                os.pwrite(lock, (json.dumps(mark, indent=2) + "\n").encode(), 0)
            yield from self._append(done)
            self._finish(mark)
        finally:
            os.close(lock)

    def _check_ownership(self) -> None:
        """Raise ValueError if this command did not write the files under our names, rather than overwrite them."""
        existing = [path for path in (self.partial, self.sidecar) if path.exists()]
        is_ours = self.sidecar.exists() and (not self.sidecar.stat().st_size or "format" in self._read_mark())
        if existing and not is_ours:
            raise ValueError(
                f"{existing[0]} is in the way: according to {self.sidecar.name}, it was not written by "
                f"`{self.job.command}`. Move it away, or choose another --output."
            )

    def _resume(self, mark: dict[str, Any]) -> list[Any]:
        """`Job.result` of the rows already written. Removes an incomplete last line, or the rows of another run."""
        done, end = [], 0
        if self.partial.exists() and self.partial.stat().st_size:
            changed = _differences(self._read_mark(), mark)
            if not changed:
                done, end = self._read_written()
            elif not self.overwrite:
                raise ValueError(
                    f"{self.partial} belongs to a run with a different {', '.join(changed)}. Use the same settings to "
                    "resume it, choose another --output, or pass --overwrite to start over."
                )
        with open(self.partial, "ab") as file:
            file.truncate(end)
        return done

    def _read_mark(self) -> dict[str, Any]:
        try:
            mark = json.loads(self.sidecar.read_bytes())
        except ValueError:
            mark = None  # truncated or edited
        return mark if isinstance(mark, dict) else {}

    def _read_written(self) -> tuple[list[Any], int]:
        """`Job.result` of each complete line, and the offset at which the last one ends."""
        done, end, rows = [], 0, self.job.read(self.source)
        with open(self.partial, "rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.endswith(b"\n"):
                    done.append(self._check_written(line, f"{self.partial}, line {number}", next(rows, None)))
                    end += len(line)
        return done, end

    def _check_written(self, line: bytes, where: str, row: Row | None) -> Any:
        advice = f"Remove {self.partial.name} to start over, or choose another --output."
        if row is None:
            raise ValueError(f"{where}: {self.source} has fewer rows. {advice}")
        result, columns = parse_row(line, where), self.job.added_columns(row.content)
        if encoded({name: result[name] for name in result if name not in columns}) != encoded(row.content):
            raise ValueError(f"{where} does not match {row.where}. {advice}")
        for column in columns:
            if requirement := self.job.check(result.get(column)):
                raise ValueError(f"{where}: {column} must be {requirement}, got {result.get(column)!r}. {advice}")
        return self.job.result(result)

    def _append(self, done: list[Any]) -> Iterator[Sink]:
        """Open the partial file for more rows. It is removed if the run fails before the first row."""
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
                message = f"{count} rows are {self.job.done} and kept in {self.partial}"
                print(f"{message}. Run the same command to continue.", file=sys.stderr)
            else:
                self.partial.unlink()
                self.sidecar.unlink()
            raise

    def _write(self, file: Any, line: bytes) -> None:
        remaining = memoryview(line)
        try:
            while remaining:
                remaining = remaining[file.write(remaining) :]
        except OSError as error:
            error.filename = str(self.partial)
            raise

    def _finish(self, mark: dict[str, Any]) -> None:
        if digest(self.source) != mark[ROWS]:
            raise ValueError(
                f"{self.source} changed while it was being {self.job.done}. The rows of the old file are in "
                f"{self.partial}. Pass --overwrite to start over with the new file."
            )
        self._check()  # a file may have appeared there meanwhile
        os.replace(self.partial, self.path)
        sync(self.path.parent)
        self.sidecar.unlink()


def _differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    return sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))


def to_stdout() -> Sink:
    """Write rows to stdout, in UTF-8 whatever the encoding of the terminal."""

    def write(row: dict[str, Any]) -> None:
        sys.stdout.buffer.write(encoded(row) + b"\n")
        sys.stdout.buffer.flush()

    sys.stdout.flush()
    return [], write


# Input: rows of a jsonl file; errors name the line


class Row(NamedTuple):
    """A row. `where` names its line in errors, such as "answers.jsonl, line 3"."""

    where: str
    content: dict[str, Any]


def read_rows(source: Path, added: Callable[[dict[str, Any]], tuple[str, ...]]) -> Iterator[Row]:
    """Iterate over the rows of a file. Only a newline ends a line; blank lines are skipped.

    Args:
        added: the columns that the command will add to a row.

    Raises:
        ValueError: a line is not a row, or already has one of these columns.
    """
    with open(source, "rb") as lines:
        for number, line in enumerate(lines, 1):
            line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if line.strip():
                where = f"{source}, line {number}"
                row = Row(where, parse_row(line, where))
                _check_columns(row, added(row.content))
                yield row


def parse_row(line: bytes, where: str) -> dict[str, Any]:
    """Parse the JSON object of a line, and check that it can be written as JSON again.

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
            f"{where} contains {ascii(error.object[error.start])}, an unpaired surrogate. Export the text again, or "
            "remove the row."
        ) from error
    except RecursionError as error:
        raise ValueError(f"{where} is nested too deeply for Python's JSON parser. Remove that column.") from error
    except ValueError as error:
        problem = f"{error.msg} in column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        nul = " It has NUL bytes: save the file as UTF-8." if b"\0" in line else ""
        raise ValueError(f"{where} is not JSON: {problem}. Expected one row per line.{nul}") from error
    if not isinstance(row, dict):
        raise ValueError(f'{where} must be a row, such as {{"text": "..."}}, got a {type(row).__name__}.')
    return row


def encoded(row: dict[str, Any]) -> bytes:
    """The row as JSON in UTF-8, without a newline."""
    return json.dumps(row, ensure_ascii=False).encode("utf-8")


def _check_columns(row: Row, added: tuple[str, ...]) -> None:
    for column in added:
        if column in row.content:
            raise ValueError(
                f"{row.where} already has a column {column!r}, where the result would go. Rename or remove that column."
            )
