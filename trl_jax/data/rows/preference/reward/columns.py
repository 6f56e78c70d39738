"""Find the columns of a dataset that are read, under today's or older names, and warn of those that are not."""

from __future__ import annotations

import logging
import warnings
from typing import Any, NamedTuple

from trl_jax.data.rows import checks
from trl_jax.data.rows.masks import MASKS
from trl_jax.data.rows.preference.reward import pair_checks

logger = logging.getLogger(__name__)

_EARLY_IDS = ("input_ids_chosen", "input_ids_rejected")  # of the releases whose collator read masks
_PADDING = "every token of 'chosen_ids' and 'rejected_ids' is trained on, as in TRL. Leave padding out of them"
_WEIGHT = "all pairs weigh the same"
_LABEL = "the chosen answer is the better one of every pair"
_TEXTS = "the texts are, as in TRL. To train on these ids, call them 'chosen_ids' and 'rejected_ids'"
_PROMPT = "the prompt's column is called 'prompt'"
# Column that TRL silently ignores -> the reason, for the warning: a script that has it may expect something of it.
_UNREAD = {
    **dict.fromkeys([*MASKS.values(), "chosen_attention_mask", "rejected_attention_mask"], _PADDING),
    **dict.fromkeys(["weight", "weights", "sample_weight", "sample_weights"], _WEIGHT),
    **dict.fromkeys(["label", "labels"], _LABEL),
    **dict.fromkeys(["question", "instruction", "query"], _PROMPT),
    **dict.fromkeys(_EARLY_IDS, _TEXTS),
    "margins": "the column is called 'margin'",
}


class Columns(NamedTuple):
    """The columns that are read. tokenised: rows have token ids. masks: the entries of `MASKS` that are read with
    them."""

    tokenised: bool
    masks: dict[str, str]


def settle(dataset: Any, column_names: list[str], name: str) -> tuple[Any, Columns]:
    """Rename older columns to today's names, and find those that are read. Where texts and ids of an early release's
    names are there, it is the texts, as in TRL.

    Warns of older names, and of columns that look as if they changed the training but don't.

    Args:
        column_names: the dataset's columns; a stream may not know them itself.
        name: of the dataset, as `preference.prepare` takes it.

    Raises:
        ValueError: there are neither texts nor ids.
    """
    older = None
    if not set(pair_checks.IDS) <= set(column_names):
        older = next((pair for pair in pair_checks.LEGACY_IDS if set(pair) <= set(column_names)), None)
        older = None if older == _EARLY_IDS and set(pair_checks.TEXTS) <= set(column_names) else older
    masks = {ids: mask for ids, mask in MASKS.items() if older == _EARLY_IDS and mask in column_names}
    tokenised = older is not None or set(pair_checks.IDS) <= set(column_names)
    if older is not None:
        _warn_older(older, name)
        dataset = dataset.rename_columns(dict(zip(older, pair_checks.IDS, strict=True)))
    elif not tokenised and not set(pair_checks.TEXTS) <= set(column_names):
        raise pair_checks.missing_columns(column_names, name)
    _warn_unread([column for column in column_names if column not in masks.values()], tokenised, checks.argument(name))
    return dataset, Columns(tokenised, masks)


def _warn_older(names: tuple[str, str], name: str) -> None:
    warnings.warn(
        f"{checks.argument(name)}: the columns {names[0]!r} and {names[1]!r} are now called 'chosen_ids' and "
        "'rejected_ids'. They were renamed for this run; rename them in the data: in TRL, they will not be supported "
        "in v1.",
        FutureWarning,
        stacklevel=4,
    )


def _warn_unread(column_names: list[str], tokenised: bool, where: str) -> None:
    prompted = tokenised or "prompt" in column_names
    why: dict[str, list[str]] = {}
    for column in column_names:
        reason = _UNREAD.get(column)
        idle = (reason == _TEXTS and tokenised) or (reason == _PROMPT and prompted)
        if reason is None or idle or (reason == _PADDING and not tokenised):
            continue
        if column == "margins" and "margin" in column_names:
            continue
        why.setdefault(reason, []).append(column)
    for reason, columns in why.items():
        logger.warning(f"{where}: the columns {columns} are not read: {reason}.")
