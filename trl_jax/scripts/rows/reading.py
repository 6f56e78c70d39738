"""Read the rows of a jsonl file; errors name the line."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple


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
