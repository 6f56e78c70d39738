"""Score answers with a reward model: what `trl-jax score MODEL FILE` runs."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

ANSWERS = ("response", "completion", "answer")


@dataclass
class ScoreArguments:
    """model: folder or Hub name. file: jsonl. output: jsonl, None means stdout."""

    model: str
    file: str
    output: str | None = None
    batch_size: int = 8
    dtype: str = "auto"
    quiet: bool = False


class Parser(argparse.ArgumentParser):
    def parse_args_and_config(self, argv: list[str]) -> tuple[ScoreArguments]:
        return (ScoreArguments(**vars(self.parse_args(argv))),)


def make_parser(prog: str | None = None) -> Parser:
    parser = Parser(
        prog=prog,
        description="Score the answers of a jsonl file. A row holds `text`, or `messages`, or `prompt` and `response` "
        "(text or conversations), or a pair with `chosen` and `rejected`; it comes out with its `reward`, a pair with "
        "`chosen_reward` and `rejected_reward`, and pairs get an accuracy at the end.",
    )
    parser.add_argument("model", help="folder or Hub name of the reward model")
    parser.add_argument("file", help="rows to score, jsonl")
    parser.add_argument("-o", "--output", help="file to write; if it is there, scoring goes on where it ends")
    parser.add_argument("--batch_size", type=int, default=8, help="answers scored at once (default: 8)")
    parser.add_argument("--dtype", default="auto", help="type to load weights in (default: as they are stored)")
    parser.add_argument("--quiet", action="store_true", help="show no progress")
    return parser


def main(args: ScoreArguments) -> None:
    """Score every row; what is written stays written when the run is cut off.

    Raises:
        ValueError: a line that is no row, or an output of other rows.
    """
    if args.batch_size < 1:
        raise ValueError(f"--batch_size {args.batch_size}: wanted at least 1.")
    source = Path(args.file)
    if not source.is_file():
        raise FileNotFoundError(f"{args.file}: there is no such file of rows to score.")
    done = _take_up(Path(args.output), source) if args.output else []
    scorer = Scorer(args.model, args.dtype)
    seen = [right for row in done if (right := _is_right(row)) is not None]
    with _opened(args.output) as out:
        for row in _shown(_scored(scorer, source, len(done), args.batch_size), source, len(done), args.quiet):
            out.write(json.dumps(row, ensure_ascii=False) + "\n")
            out.flush()
            if (right := _is_right(row)) is not None:
                seen.append(right)
    if seen:
        print(f"accuracy {sum(seen) / len(seen):.4f} over {len(seen)} pairs", file=sys.stderr)


def _opened(output: str | None) -> Any:
    return contextlib.nullcontext(sys.stdout) if output is None else open(output, "a", encoding="utf-8")


class Scorer:
    """A model with its tokenizer: texts to scores."""

    def __init__(self, model: str, dtype: str):
        from transformers import AutoTokenizer

        from trl_jax.hub.auto import AutoModelForSequenceClassification

        self.model = AutoModelForSequenceClassification.from_pretrained(model, dtype=dtype)
        self.tokenizer = AutoTokenizer.from_pretrained(self.model.folder)
        if self.model.config.pad_token_id is None:
            self.model.config.pad_token_id = self.tokenizer.pad_token_id

    def __call__(self, rows: list[dict[str, Any]], first: int) -> list[dict[str, Any]]:
        """The rows with their scores; the first is row number `first` of the file."""
        import numpy as np

        ids = [side for i, row in enumerate(rows, first) for side in self._ids(row, f"Row {i}")]
        length = max(map(len, ids))
        pad = self.model.config.pad_token_id or 0
        tokens = np.full((len(ids), length), pad, np.int64)
        mask = np.zeros((len(ids), length), np.int64)
        for row, one in enumerate(ids):
            tokens[row, : len(one)], mask[row, : len(one)] = one, 1
        scores = iter(np.asarray(self.model(tokens, mask).logits)[:, 0].tolist())
        return [row | {name: next(scores) for name in _names(row)} for row in rows]

    def _ids(self, row: dict[str, Any], where: str) -> list[list[int]]:
        """Token ids of what is to be scored, as in training: texts end with EOS, conversations as templates do."""
        from trl_jax.data.rows.chat import read_pair, tokenise

        pair = read_pair(_as_pair(row, where), where, self.tokenizer)
        return list(tokenise([pair], self.tokenizer)[0][: len(_names(row))])


def _names(row: dict[str, Any]) -> tuple[str, ...]:
    return ("chosen_reward", "rejected_reward") if "chosen" in row and "rejected" in row else ("reward",)


def _as_pair(row: dict[str, Any], where: str) -> dict[str, Any]:
    """A single answer is a pair with itself, of which one side is scored."""
    if "chosen" in row and "rejected" in row:
        return row
    kept = {name: row[name] for name in ("prompt", "tools", "chat_template_kwargs") if name in row}
    found = [name for name in (*ANSWERS, "messages", "text") if name in row]
    if not found:
        raise ValueError(
            f"{where} holds {', '.join(row)}: wanted text, messages, chosen and rejected, or prompt and one of "
            f"{', '.join(ANSWERS)}."
        )
    answer = row[found[0]]
    if found[0] in ("messages", "text"):
        kept.pop("prompt", None)
    elif isinstance(kept.get("prompt"), list) and isinstance(answer, str):
        answer = [{"role": "assistant", "content": answer}]
    return kept | {"chosen": answer, "rejected": answer}


def _is_right(row: dict[str, Any]) -> bool | None:
    return row["chosen_reward"] > row["rejected_reward"] if "chosen_reward" in row else None


def _rows(source: Path) -> Iterator[dict[str, Any]]:
    with open(source, encoding="utf-8") as lines:
        for number, line in enumerate(lines):
            if line.strip():
                yield _row(line, f"{source}, line {number + 1}")


def _row(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON: {error}.") from error
    if not isinstance(row, dict):
        raise ValueError(f"{where} holds a {type(row).__name__}: wanted a row, as in {{\"text\": \"...\"}}.")
    return row


def _scored(scorer: Scorer, source: Path, first: int, batch_size: int) -> Iterator[dict[str, Any]]:
    rows = islice(_rows(source), first, None)
    while batch := list(islice(rows, batch_size)):
        yield from scorer(batch, first)
        first += len(batch)


def _take_up(output: Path, source: Path) -> list[dict[str, Any]]:
    """The rows that an earlier run wrote, which must be the file's first; a line that was cut off is removed."""
    if not output.is_file():
        return []
    whole = output.read_bytes()
    whole = whole[: whole.rfind(b"\n") + 1]
    done = [_row(line, f"{output}, line {i + 1}") for i, line in enumerate(whole.decode("utf-8").splitlines())]
    for number, (old, row) in enumerate(zip(done, _rows(source), strict=False)):
        if {name: value for name, value in old.items() if name not in _names(row)} != row:
            raise ValueError(f"{output} is not of {source}: row {number} is another. Name another --output.")
    with open(output, "r+b") as file:
        file.truncate(len(whole))
    return done


def _shown(rows: Iterator[dict[str, Any]], source: Path, done: int, quiet: bool) -> Iterator[dict[str, Any]]:
    from tqdm import tqdm

    with open(source, "rb") as lines:
        total = sum(bool(line.strip()) for line in lines)
    return tqdm(rows, total=total, initial=done, unit=" rows", disable=quiet, file=sys.stderr)
