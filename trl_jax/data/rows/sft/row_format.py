"""The form of a dataset for supervised fine-tuning, by its first row, and whether the options fit it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from trl_jax.core.printable import brief
from trl_jax.data.rows import chat

logger = logging.getLogger(__name__)

STRATEGIES = ("bfd", "bfd_split", "wrapped")
_MASKS = ("completion_mask", "assistant_masks")


class RowFormat(NamedTuple):
    """The form of a dataset's rows, which its first row decides; the other rows must have it too.

    kind: what is tokenised: nothing, as there are `input_ids`; the text of a column or of `formatting_func`;
        `messages`; `conversations` in the form of ShareGPT; or `prompt` and `completion`.
    conversational: whether there are messages, for a chat template.
    column: the column of the text.
    formatting_func: makes the text of a row.
    masks: columns of masks that rows of ids bring along and that labels are built from; empty where they have labels.
    """

    kind: Literal["ids", "text", "messages", "conversations", "completion"]
    conversational: bool = False
    column: str = ""
    formatting_func: Callable[[dict[str, Any]], str] | None = None
    masks: tuple[str, ...] = ()

    @property
    def needed(self) -> tuple[str, ...]:
        """The columns that every row must have."""
        columns = {"ids": ("input_ids", *self.masks), "completion": ("prompt", "completion"), "text": (self.column,)}
        return () if self.formatting_func else columns.get(self.kind, (self.kind,))


class Masking(NamedTuple):
    """The tokens that are left out of the labels, and the template that marks them.

    completion: prompts are left out. assistant: all but what the assistant says. chat_template: in the place of the
    tokenizer's own; None is that.
    """

    completion: bool
    assistant: bool
    chat_template: str | None


def settle(
    first: dict[str, Any],
    where: str,
    *,
    column: str,
    formatting_func: Callable[[dict[str, Any]], str] | None,
    completion_only_loss: bool | None,
    assistant_only_loss: bool,
) -> tuple[RowFormat, bool]:
    """The form of rows like the first one, and whether prompts are left out of the labels.

    Args:
        where: the dataset's name in messages.
        column: of the text, where rows are texts.
        completion_only_loss: None: where rows have a prompt and a completion.

    Raises:
        ValueError: there is nothing to train on, or an option has no meaning for such rows.
    """
    only = {"prompt", "completion"} <= first.keys() if completion_only_loss is None else completion_only_loss
    if only and formatting_func:
        raise ValueError(
            "A formatting function was provided while `completion_only_loss=True`, which is incompatible: its text has "
            "no prompt and no completion. Apply the formatting function to the dataset before, so that it has the "
            "columns 'prompt' and 'completion', or disable `completion_only_loss`."
        )
    if "input_ids" in first:
        row_format = _of_ids(first, only, formatting_func)
    else:
        row_format = _format(first, where, column, formatting_func)
    if assistant_only_loss and row_format.kind != "ids" and not row_format.conversational:
        raise ValueError(
            "You set `assistant_only_loss=True`, but the dataset is not conversational. This option is only supported "
            f"for conversational datasets: {where} has the columns {brief(list(first), 500)}."
        )
    _check_completions(row_format, first, where, completion_only_loss)
    if "labels" in first and row_format.kind != "ids":
        logger.warning(
            f"{where}: the column 'labels' is not read: it goes with 'input_ids', which are missing. It is replaced by "
            "the labels of the tokens."
        )
    return row_format, only


def _of_ids(first: dict[str, Any], only: bool, formatting_func: Any) -> RowFormat:
    if formatting_func:
        logger.warning(
            "You passed a dataset that is already processed (contains an `input_ids` field) together with a formatting "
            "function. Therefore `formatting_func` will be ignored. Leave out one of them."
        )
    read = () if "labels" in first else _MASKS[0 if only else 1 :]
    return RowFormat("ids", masks=tuple(column for column in read if column in first))


def _format(first: dict[str, Any], where: str, column: str, formatting_func: Any) -> RowFormat:
    if formatting_func:
        return RowFormat("text", column=column, formatting_func=formatting_func)
    if "prompt" in first:
        if "completion" in first:
            return RowFormat("completion", conversational=chat.is_messages(first["prompt"]))
    elif _is_sharegpt(first.get("conversations")):
        return RowFormat("conversations", conversational=True)
    elif chat.is_messages(first.get("messages")):
        return RowFormat("messages", conversational=True)
    elif column in first:
        return RowFormat("text", column=column)
    raise ValueError(
        f"{where} needs one of: {column!r} (dataset_text_field) with a text, 'messages' with a list of messages, each "
        "with a 'role' and a 'content', 'prompt' and 'completion', 'conversations' with messages of 'from' and "
        f"'value', or 'input_ids'. Found the columns {brief(list(first), 500)}. Rename columns with "
        "dataset.rename_column, or pass dataset_text_field or a formatting_func."
    )


def _is_sharegpt(value: Any) -> bool:
    first = value[0] if isinstance(value, list) and value else None
    return isinstance(first, dict) and {"from", "value"} <= first.keys()


def _check_completions(
    row_format: RowFormat, first: dict[str, Any], where: str, completion_only_loss: bool | None
) -> None:
    """Raise ValueError where a script asks for completions only, and rows do not tell them from prompts."""
    told = row_format.kind == "completion" or row_format.kind == "ids" and bool({"labels", _MASKS[0]} & first.keys())
    if completion_only_loss and not told:
        raise ValueError(
            f"completion_only_loss=True needs rows with 'prompt' and 'completion', or with 'input_ids' and "
            f"'completion_mask' or 'labels': {where} has the columns {brief(list(first), 500)}, so every token would "
            "be trained on. Split the rows, use assistant_only_loss=True for conversations, or leave the option out."
        )


def check_lengths(packing: bool, strategy: str, max_length: int | None, truncation_mode: str) -> None:
    """Raise ValueError for options of packing and truncation that do not go together."""
    if packing and max_length is None:
        raise ValueError("When packing is enabled, `max_length` can't be `None`. Pass the length of a packed row.")
    if packing and strategy not in STRATEGIES:
        raise ValueError(f"packing_strategy={strategy!r}: wanted one of {', '.join(STRATEGIES)}.")
    if truncation_mode not in ("keep_start", "keep_end"):
        raise ValueError(f"Unsupported truncation mode: {truncation_mode}, expected 'keep_start' or 'keep_end'")


def check_masks(first: dict[str, Any], name: str) -> None:
    """Raise ValueError for rows whose masks would have to become labels, where nothing is prepared."""
    if "labels" not in first and set(_MASKS) & first.keys():
        raise ValueError(
            f"The {name} dataset has mask columns but no 'labels', and `skip_prepare_dataset=True` skips label "
            "building, so it would train on the full sequence. Add a 'labels' column (-100 for non-loss tokens) or "
            "drop `skip_prepare_dataset`."
        )
