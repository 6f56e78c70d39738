"""Reads README.md and the pages under docs/ for their tests: code blocks, tables, headings and links."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "pages"
README = ROOT / "README.md"
PAGES = [README, *sorted(FOLDER.glob("*.md"))]


class Block(NamedTuple):
    """A fenced code block; `line` is the number of its first line of code."""

    language: str
    code: str
    line: int


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(page: Path, *languages: str) -> list[Block]:
    text = read(page)
    found = re.finditer(r"^```(\w*)\n(.*?)^```$", text, flags=re.M | re.S)
    every = [Block(one[1], one[2], text.count("\n", 0, one.start()) + 2) for one in found]
    return [block for block in every if block.language in languages]


def prose(page: Path) -> str:
    """The page without its code blocks, which become empty lines."""
    return re.sub(r"^```.*?^```$", lambda one: "\n" * one[0].count("\n"), read(page), flags=re.M | re.S)


def sections(page: Path) -> dict[str, str]:
    """First- or second-level heading -> the text below it, including code blocks."""
    parts = re.split(r"^##? (.+)$", _without_comments_in_code(read(page)), flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def _without_comments_in_code(text: str) -> str:
    return re.sub(r"^```.*?^```$", lambda one: one[0].replace("\n# ", "\n#"), text, flags=re.M | re.S)


def tables(text: str) -> list[list[dict[str, str]]]:
    """Each table as a list of rows (dicts); a column without a name is ''. Raises ValueError if a row has too many or
    too few cells."""
    found, rows = [], []
    for line in [*text.splitlines(), ""]:
        if line.startswith("|"):
            rows.append([cell.strip() for cell in line.strip("|").split("|")])
        elif rows:
            names, _, *rest = rows
            found.append([dict(zip(names, row, strict=True)) for row in rest])
            rows = []
    return found


def table(page: str, heading: str) -> dict[str, dict[str, str]]:
    """The first table of a section of docs/pages: the first column's cell -> the row."""
    rows = tables(sections(FOLDER / page)[heading])[0]
    return {row[next(iter(row))]: row for row in rows}


def anchors(page: Path) -> set[str]:
    """The anchors of a page, as mkdocs and GitHub derive them from its headings."""
    titles = re.findall(r"^#+ (.+)$", prose(page), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles}


def links(page: Path) -> list[str]:
    return re.findall(r"\]\(([^)\s]+)\)", prose(page))
