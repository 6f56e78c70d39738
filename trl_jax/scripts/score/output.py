"""The file of scored rows: it appears when it is complete, and an interrupted run resumes where it stopped.

Until then rows are in `NAME.partial`, and `NAME.partial.mark` identifies the run that writes them; the process that
writes holds a lock on the mark.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from trl_jax.engine.checkpoints.lock import locked
from trl_jax.engine.checkpoints.manifest import digest, sync
from trl_jax.scripts.score.rows import encoded, is_right, parse_row, read_rows, score_columns

ROWS = "FILE"  # the mark's key of the digest of the rows to score
_FORMAT = 1
Sink = tuple[list[bool | None], Callable[[dict[str, Any]], None]]


class Output:
    """The output of one run.

    path: as the user named it. source: the file of rows. overwrite: whether an existing file may be replaced.

    Raises:
        ValueError, OSError: the path cannot be written, or exists and may not be replaced.
    """

    def __init__(self, path: str, source: Path, overwrite: bool):
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
            raise ValueError(f"--output {self.path} is the file of rows to score. Name another --output.")
        if not self.overwrite:
            raise FileExistsError(
                f"--output {self.path} is there already. Name another --output, or pass --overwrite to have it "
                "replaced when all rows are scored."
            )

    @contextlib.contextmanager
    def begun(self, mark: dict[str, Any]) -> Iterator[Sink]:
        """Begin or resume a run: a context with `is_right` of each row scored before, and a function that writes a row.

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
                f"{there[0]} is in the way, and {self.sidecar.name} does not say that a run of `trl-jax score` wrote "
                "it. Move it away, or name another --output."
            )

    def _taken_up(self, mark: dict[str, Any]) -> list[bool | None]:
        """`is_right` of the rows that are done; an incomplete line after them is removed, and all rows of another
        run."""
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

    def _done(self) -> tuple[list[bool | None], int]:
        """`is_right` of each complete line, and the byte at which the last one ends."""
        done, end, rows = [], 0, read_rows(self.source)
        with open(self.partial, "rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.endswith(b"\n"):
                    done.append(self._scored(line, f"{self.partial}, line {number}", next(rows, None)))
                    end += len(line)
        return done, end

    def _scored(self, line: bytes, where: str, row: Any) -> bool | None:
        advice = f"Remove {self.partial.name} to begin anew, or name another --output."
        if row is None:
            raise ValueError(f"{where}: {self.source} has fewer rows. {advice}")
        scored, columns = parse_row(line, where), score_columns(row.content)
        if encoded({name: scored[name] for name in scored if name not in columns}) != encoded(row.content):
            raise ValueError(f"{where} holds another row than {row.where}. {advice}")
        for column in columns:
            if not isinstance(scored.get(column), float):
                raise ValueError(f"{where}: {column} is {scored.get(column)!r}, wanted a score. {advice}")
        return is_right(scored)

    def _filled(self, done: list[bool | None]) -> Iterator[Sink]:
        """Open the partial file for further rows; it is removed where a failed run has scored none."""
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
                message = f"{count} rows are scored and stay in {self.partial}: the same command goes on behind them."
                print(message, file=sys.stderr)
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
                f"{self.source} was changed while it was scored. Of the file as it was, rows stand in {self.partial}; "
                "pass --overwrite to begin anew with the file as it is."
            )
        self._check()  # something may have come there meanwhile
        os.replace(self.partial, self.path)
        sync(self.path.parent)
        self.sidecar.unlink()


def _differences(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    return sorted(name for name in then.keys() | now.keys() if then.get(name) != now.get(name))
