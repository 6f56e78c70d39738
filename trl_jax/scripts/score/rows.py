"""The rows that `trl-jax score` takes, and the columns that it adds."""

from __future__ import annotations

from typing import Any

from trl_jax.scripts.rows.reading import Row

ANSWERS = ("response", "completion", "answer")


def score_columns(row: dict[str, Any]) -> tuple[str, ...]:
    """Names of the columns for the row's scores."""
    return ("chosen_reward", "rejected_reward") if "chosen" in row and "rejected" in row else ("reward",)


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
