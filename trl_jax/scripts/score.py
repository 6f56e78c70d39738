"""The command `trl-jax score`: score the completions of a file with a reward model."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from trl_jax.core.secrets import CleanParser
from trl_jax.scripts.loaded_model import LoadedModel, add_loading_flags
from trl_jax.scripts.rows import Job, Output, Row, add_output_flags, read_rows, to_stdout

ANSWERS = ("response", "completion", "answer")
_SEED = 42  # initializes a missing score head, as AutoModelForSequenceClassification does


def score_columns(row: dict[str, Any]) -> tuple[str, ...]:
    """The columns that are added to a row."""
    return ("chosen_reward", "rejected_reward") if "chosen" in row and "rejected" in row else ("reward",)


def as_pair(row: Row) -> dict[str, Any]:
    """Turn a row into a pair. A single answer becomes both sides, of which one is scored.

    Raises:
        ValueError: the row has no column to score.
    """
    content = row.content
    if "chosen" in content and "rejected" in content:
        return content
    pair = {name: content[name] for name in ("prompt", "tools", "chat_template_kwargs") if name in content}
    present = [name for name in (*ANSWERS, "messages", "text") if name in content]
    if not present:
        raise ValueError(
            f"{row.where} must have the columns text, messages, chosen and rejected, or prompt and one of "
            f"{', '.join(ANSWERS)}, got {', '.join(content) or 'no columns'}."
        )
    answer = content[present[0]]
    if present[0] in ("messages", "text"):
        pair.pop("prompt", None)
    elif isinstance(pair.get("prompt"), list) and isinstance(answer, str):
        answer = [{"role": "assistant", "content": answer}]
    return pair | {"chosen": answer, "rejected": answer}


def is_correct(scored: dict[str, Any]) -> bool | None:
    """Whether the chosen answer of a pair has the higher score; None if the row is not a pair."""
    columns = score_columns(scored)
    return scored[columns[0]] > scored[columns[1]] if len(columns) == 2 else None


# The command


_JOB = Job(
    command="trl-jax score",
    verb="score",
    done="scored",
    read=lambda source: read_rows(source, score_columns),
    added_columns=score_columns,
    check=lambda value: None if isinstance(value, float) else "a score",
    result=is_correct,
)


@dataclass
class ScoreArguments:
    """Arguments of the command.

    model: folder or Hub name.
    file: jsonl.
    output: jsonl; None means stdout.
    """

    model: str
    file: str
    output: str | None = None
    overwrite: bool = False
    batch_size: int = 8
    dtype: str = "auto"
    trust_remote_code: bool = False
    quiet: bool = False


class Parser(CleanParser):
    def parse_args_and_config(self, argv: list[str]) -> tuple[ScoreArguments]:
        return (ScoreArguments(**vars(self.parse_args(argv))),)


def make_parser(prog: str | None = None) -> Parser:
    parser = Parser(
        prog=prog,
        description="Score the completions of a jsonl file. A row has `text`, or `messages`, or `prompt` and "
        "`response` (text or conversations), or is a pair with `chosen` and `rejected`. A `reward` is added, or "
        "`chosen_reward` and `rejected_reward` for pairs, whose accuracy is printed at the end.",
    )
    parser.add_argument("model", help="folder or Hub name of the reward model")
    parser.add_argument("file", help="jsonl file of rows to score")
    add_output_flags(parser)
    parser.add_argument("--batch_size", type=int, default=8, help="rows scored at once (default: 8)")
    add_loading_flags(parser)
    return parser


def main(args: ScoreArguments) -> None:
    """Score every row. If interrupted, scored rows are kept.

    Raises:
        ValueError: a line is not a row, or the output belongs to another run.
    """
    if args.batch_size < 1:
        raise ValueError(f"--batch_size must be at least 1, got {args.batch_size}.")
    source = Path(args.file)
    if not source.is_file():
        raise FileNotFoundError(f"{args.file}: no such file.")
    output = None if args.output is None else Output(_JOB, args.output, source, args.overwrite)
    scorer, total = _load_scorer(args, source)
    running = contextlib.nullcontext(to_stdout()) if output is None else output.running(_settings(args, scorer))
    with running as (done, write):
        results = list(done)
        rows = islice(_JOB.read(source), len(done), None)
        for row in _progress_bar(_score_batches(scorer, rows, args.batch_size), total, len(done), args.quiet):
            write(row)
            results.append(is_correct(row))
    pairs = [right for right in results if right is not None]
    if pairs:
        print(f"accuracy {sum(pairs) / len(pairs):.4f} over {len(pairs)} pairs", file=sys.stderr)


def _load_scorer(args: ScoreArguments, source: Path) -> tuple[Scorer, int]:
    """The scorer and the number of rows. An invalid row raises before the weights are read."""
    model = LoadedModel.find(args.model, args.dtype, trust_remote_code=args.trust_remote_code, head="score")
    total = sum(1 for row in _JOB.read(source) if _read(row, model.tokenizer))
    return Scorer(model), total


def _read(row: Row, tokenizer: Any) -> Any:
    from trl_jax.data.reward import read_pair

    return read_pair(as_pair(row), row.where, tokenizer)


class Scorer:
    """Scores rows with a model and its tokenizer."""

    def __init__(self, loaded: LoadedModel):
        self.checkpoint, self.tokenizer, self.digests = loaded.checkpoint, loaded.tokenizer, loaded.digests
        self.model = self.checkpoint.load(_SEED)
        self._config = self.model.config.get_text_config()
        if self._config.pad_token_id is None:
            self._config.pad_token_id = self.tokenizer.pad_token_id

    def __call__(self, rows: list[Row]) -> list[dict[str, Any]]:
        """Add the scores to the rows.

        Raises:
            ValueError: a text is longer than the model's maximum length, or a score is not finite.
        """
        import numpy as np

        ids = [side for row in rows for side in self._ids(row)]
        length = max(map(len, ids))
        pad = self._config.pad_token_id or 0
        tokens = np.full((len(ids), length), pad, np.int64)
        mask = np.zeros((len(ids), length), np.int64)
        for row, token_ids in enumerate(ids):
            tokens[row, : len(token_ids)], mask[row, : len(token_ids)] = token_ids, 1
        scores = iter(np.asarray(self.model(tokens, mask).logits)[:, 0].tolist())
        return [row.content | self._check_finite(row, {name: next(scores) for name in _names(row)}) for row in rows]

    def _ids(self, row: Row) -> list[list[int]]:
        """Token ids of the texts to score, as in training: texts end with EOS, conversations as in their template."""
        from trl_jax.data.reward import tokenize_pairs

        ids = list(tokenize_pairs([_read(row, self.tokenizer)], self.tokenizer)[0][: len(_names(row))])
        limit = self.model.max_positions
        if limit is not None and max(map(len, ids)) > limit:
            raise ValueError(
                f"{row.where} has {max(map(len, ids)):,} tokens, but the model supports at most {limit:,}. Shorten "
                "the text, or remove the row."
            )
        return ids

    def _check_finite(self, row: Row, scores: dict[str, float]) -> dict[str, float]:
        for name, score in scores.items():
            if not math.isfinite(score):
                raise ValueError(
                    f"{row.where}: {name} must be finite, got {score}. The weights of {self.checkpoint.name} are "
                    "broken, or too large for the dtype. Use another checkpoint or dtype."
                )
        return scores


def _names(row: Row) -> tuple[str, ...]:
    return score_columns(row.content)


def _settings(args: ScoreArguments, scorer: Scorer) -> dict[str, Any]:
    """What the scores depend on besides the rows: settings, and a digest of each file of the model."""
    return {"--dtype": args.dtype, "--trust_remote_code": args.trust_remote_code, **scorer.digests()}


def _score_batches(scorer: Scorer, rows: Iterator[Row], batch_size: int) -> Iterator[dict[str, Any]]:
    while batch := list(islice(rows, batch_size)):
        yield from scorer(batch)


def _progress_bar(rows: Iterator[dict[str, Any]], total: int, done: int, quiet: bool) -> Iterator[dict[str, Any]]:
    from tqdm import tqdm

    return tqdm(rows, total=total, initial=done, unit=" rows", disable=quiet, file=sys.stderr)
