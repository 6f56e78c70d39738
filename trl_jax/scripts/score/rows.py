"""Read the rows of a jsonl file to score; errors name the line."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ANSWERS = ("response", "completion", "answer")


class Row(NamedTuple):
    """A row; `where` names its line in errors, as in "answers.jsonl, line 3"."""

    where: str
    content: dict[str, Any]


def read_rows(source: Path) -> Iterator[Row]:
    """Iterate over the rows in order. Lines end with a newline only; blank ones are skipped.

    Raises:
        ValueError: a line is not a row, or has a column that its scores would replace.
    """
    with open(source, "rb") as lines:
        for number, line in enumerate(lines, 1):
            line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if line.strip():
                row = Row(where := f"{source}, line {number}", parse_row(line, where))
                _check_columns(row)
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
        raise ValueError(f"{where} holds a {type(row).__name__}: wanted a row, as in {{\"text\": \"...\"}}.")
    return row


def encoded(row: dict[str, Any]) -> bytes:
    """The row as JSON in UTF-8, without an end of line."""
    return json.dumps(row, ensure_ascii=False).encode("utf-8")


def score_columns(row: dict[str, Any]) -> tuple[str, ...]:
    """Names of the columns for the row's scores."""
    return ("chosen_reward", "rejected_reward") if "chosen" in row and "rejected" in row else ("reward",)


def _check_columns(row: Row) -> None:
    for column in score_columns(row.content):
        if column in row.content:
            raise ValueError(
                f"{row.where} has a column {column!r} already, where its score would go. Rename that column or leave "
                "it out."
            )


def as_pair(row: Row) -> dict[str, Any]:
    """Turn any row into a pair; a single answer becomes a pair with itself, of which one side is scored.

    Raises:
        ValueError: the row has no column to score.
    """
    content = row.content
    if "chosen" in content and "rejected" in content:
        return content
    kept = {name: content[name] for name in ("prompt", "tools", "chat_template_kwargs") if name in content}
    scored = [name for name in (*ANSWERS, "messages", "text") if name in content]
    if not scored:
        raise ValueError(
            f"{row.where} holds {', '.join(content) or 'nothing'}: wanted text, messages, chosen and rejected, or "
            f"prompt and one of {', '.join(ANSWERS)}."
        )
    answer = content[scored[0]]
    if scored[0] in ("messages", "text"):
        kept.pop("prompt", None)
    elif isinstance(kept.get("prompt"), list) and isinstance(answer, str):
        answer = [{"role": "assistant", "content": answer}]
    return kept | {"chosen": answer, "rejected": answer}


def is_right(scored: dict[str, Any]) -> bool | None:
    """Whether the chosen answer of a pair has the higher score; None where the row is no pair."""
    columns = score_columns(scored)
    return scored[columns[0]] > scored[columns[1]] if len(columns) == 2 else None
