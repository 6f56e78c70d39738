"""Rows of reward modeling: chosen and rejected texts as token ids."""

from __future__ import annotations

import logging
import warnings
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, Features, IterableDataset, LargeList, Value

from trl_jax.core.text import brief, is_panic
from trl_jax.data import chat, checks, tokenize
from trl_jax.data.chat_templates import apply_chat_template
from trl_jax.data.checks import argument, check_no_media, check_numbers, drop_long, id_lists, numbers_of
from trl_jax.data.tokenize import StreamState, check_has, first_row, is_long, warn_once, without_long

logger = logging.getLogger(__name__)

IDS = ("chosen_ids", "rejected_ids")
TEXTS = ("chosen", "rejected")
LEGACY_IDS = (("chosen_input_ids", "rejected_input_ids"), ("input_ids_chosen", "input_ids_rejected"))


def prepare(
    dataset: Dataset | IterableDataset,
    tokenizer: Any,
    *,
    max_length: int | None,
    num_proc: int | None,
    name: str,
) -> Dataset | IterableDataset:
    """Add `chosen_ids` and `rejected_ids` to a dataset and drop pairs that are too long.

    A pair is dropped if either answer with its prompt has more than `max_length` tokens; nothing is truncated. Rows
    that already have token ids are not tokenized.

    Args:
        num_proc: number of processes for tokenization.
        name: "train", "eval", "test", or the dataset's name in errors, such as "eval_dataset['key']".

    Raises:
        TypeError, ValueError: the dataset, a column or a row is invalid; a stream raises when it reaches the row.
    """
    checks.check_type(dataset, name)
    plain = dataset.with_format(None)  # rows as Python values, regardless of the user's format
    if isinstance(plain, IterableDataset):
        first = first_row(plain, checks.argument(name), ("prompt", "chosen", "rejected"))
        plain, used_columns = resolve_columns(plain, list(first), name)
        needed = IDS if used_columns.tokenized else TEXTS
        needed += ("margin",) if "margin" in first else ()
        return prepare_stream(plain, tokenizer, needed, used_columns.masks, max_length, checks.argument(name))
    if len(plain) == 0:
        raise ValueError(f"{checks.argument(name)} is empty")
    plain, used_columns = resolve_columns(plain, plain.column_names, name)
    _check_margins(plain, checks.argument(name))
    if used_columns.masks:
        plain = _drop_padding(plain, used_columns.masks, num_proc, checks.argument(name))
    max_characters = None
    if not used_columns.tokenized:
        max_characters = tokenize.character_bound_of_table(plain, tokenizer, max_length)
        plain = _tokenize(plain, tokenizer, num_proc, name, max_characters)
    lengths = _check_pairs(plain, max_length, checks.argument(name))
    about = "" if max_characters is None else "at least "
    return drop_long(plain, lengths, max_length, checks.argument(name), "pair", about)


def _check_margins(dataset: Dataset, where: str) -> None:
    if "margin" in dataset.column_names:
        for first, block in checks.blocks(dataset, ("margin",)):
            check_margin(block, first, where)


def _drop_padding(dataset: Dataset, masks_of: dict[str, str], num_proc: int | None, where: str) -> Dataset:
    shorter = drop_padding(dataset, masks_of, num_proc, where)
    padded = _tokens(dataset, tuple(masks_of)) != _tokens(shorter, tuple(masks_of))
    _warn_count(padded.any(axis=0), f"rows of {where} have padding according to {list(masks_of.values())}: removed")
    return shorter


def _tokens(dataset: Dataset, columns: tuple[str, ...]) -> np.ndarray:
    """Number of tokens in each row of these checked id columns: `[columns, rows]`."""
    counts = [[checks.list_lengths(b, column)[1] for _, b in checks.blocks(dataset, columns)] for column in columns]
    return np.stack([np.concatenate(column) for column in counts])


def _tokenize(dataset: Dataset, tokenizer: Any, num_proc: int | None, name: str, max_characters: int | None) -> Dataset:
    where = checks.argument(name)
    dataset = dataset.map(
        tokenize_batch,
        with_indices=True,
        batched=True,
        num_proc=num_proc,
        fn_kwargs={
            "tokenizer": tokenizer,
            "where": where,
            "max_characters": max_characters,
        },  # not a closure, so that the cache recognizes the call
        desc=f"Tokenizing {where.replace('_', ' ', 1)}",
    )
    empty = [empty_texts(block) for _, block in checks.blocks(dataset, TEXTS)]
    _warn_count(np.concatenate(empty), f"rows of {where} have an empty chosen or rejected text")
    return dataset


def _check_pairs(dataset: Dataset, max_length: int | None, where: str) -> np.ndarray:
    """Check the ids of all pairs and warn about identical answers.

    Returns:
        Number of tokens of each pair's longer answer, `[rows]`; for texts that were cut before tokenizing, some number
        above `max_length`.
    """
    checked_blocks = [check_ids(block, first, where) for first, block in checks.blocks(dataset, IDS)]
    lengths, identical = (np.concatenate(part) for part in zip(*checked_blocks, strict=True))
    if max_length is not None:
        identical &= lengths <= max_length
    _warn_count(identical, f"rows of {where} have identical chosen and rejected tokens: no preference")
    return lengths


def _warn_count(flags: np.ndarray, what: str) -> None:
    if flags.any():
        logger.warning(f"{flags.sum():,} of {len(flags):,} {what} (first: row {np.argmax(flags)})")


# Streams


def prepare_stream(
    dataset: IterableDataset,
    tokenizer: Any,
    columns: tuple[str, ...],
    masks: dict[str, str],
    max_length: int | None,
    where: str,
) -> IterableDataset:
    """`prepare` for a stream: rows are tokenized, stripped of padding, checked and filtered as they arrive.

    Warnings name the first row of each kind instead of a count, because the number of rows is unknown.

    Args:
        columns: columns that every row must have, in addition to those of the masks.
        masks: maps an id column to the column of its mask.
        where: the dataset's name in messages.
    """
    max_characters = None if IDS[0] in columns else tokenize.character_bound(tokenizer, max_length)
    options = {"where": where, "state": StreamState(), "max_characters": max_characters, "max_length": max_length}
    arguments = {"tokenizer": tokenizer, "columns": columns, "masks": masks}
    mask_columns = list(masks.values())
    dataset = dataset.map(_read_row, with_indices=True, fn_kwargs=arguments | options, remove_columns=mask_columns)
    return without_long(dataset, columns=IDS, **options)


def _read_row(
    row: dict[str, Any],
    index: int,
    tokenizer: Any,
    columns: tuple[str, ...],
    masks: dict[str, str],
    where: str,
    state: StreamState,
    max_characters: int | None,
    max_length: int | None,
) -> dict[str, Any]:
    _check_columns(row, index, (*columns, *masks.values()), where)
    if "margin" in columns:
        check_margin(checks.row_block(row, ("margin",), f"Row {index} of {where}"), index, where)
    ids = {column: row[column] for column in columns if column in IDS}
    if not ids:
        rows = {key: [value] for key, value in row.items()}
        batch = tokenize_batch(rows, [index], tokenizer, where, max_characters)
        ids = {column: values[0] for column, values in batch.items()}
        if "" in (row["chosen"], row["rejected"]):
            warn_once(f"Row {index} of {where} has an empty chosen or rejected text", "empty", state)
    ids |= _unmasked(row, index, masks, where, state)
    block = checks.row_block(ids, IDS, f"Row {index} of {where}")
    tokens, identical = check_ids(block, index, where)
    if identical[0] and (max_length is None or tokens[0] <= max_length):
        what = f"Row {index} of {where} has identical chosen and rejected tokens: no preference"
        warn_once(what, "identical", state)
    return ids


def _unmasked(row: dict[str, Any], index: int, masks: dict[str, str], where: str, state: StreamState) -> dict[str, Any]:
    """The unmasked ids of a row, by column."""
    ids = {}
    for column, mask in masks.items():
        block = checks.row_block(row, (column, mask), f"Row {index} of {where}")
        ids[column] = unmasked(block, index, column, mask, where)[0].as_py()
        if len(ids[column]) < len(row[column]):
            warn_once(f"Row {index} of {where} has padding according to {mask!r}: removed", "padding", state)
    return ids


def _check_columns(row: dict[str, Any], index: int, columns: tuple[str, ...], where: str) -> None:
    check_has(row, index, columns, where)
    if "margin" in row and "margin" not in columns:
        raise ValueError(
            f"Row {index} of {where} has a margin, but the first row has none. Give every row a margin, or no row."
        )


# Tokenizing pairs

_READ = ("prompt", "chosen", "rejected", "tools", "chat_template_kwargs")
_TWICE = "If 'chosen' and 'rejected' already start with the prompt, drop it: dataset.remove_columns(\"prompt\")."


class Pair(NamedTuple):
    """The chosen and rejected answers, each including the prompt.

    options: chat template arguments, empty for text.
    where: the row's name in errors.
    """

    chosen: str | list[dict]
    rejected: str | list[dict]
    options: dict[str, Any]
    where: str


def tokenize_batch(
    batch: Any, indices: list[int], tokenizer: Any, where: str, max_characters: int | None = None
) -> dict[str, list[list[int]]]:
    """Tokenize a batch of `Dataset.map` to `chosen_ids` and `rejected_ids`.

    Only the ids are returned, so the user's own columns are kept. `indices` and `where` name the rows in errors. Texts
    are cut at `max_characters` before tokenizing; those are certainly longer than `max_length`.

    Raises:
        ValueError: a row is neither text nor a conversation, or a conversation has no template.
    """
    columns = [column for column in _READ if column in batch]
    cells = zip(*(batch[column] for column in columns), strict=True)
    rows = [dict(zip(columns, row, strict=True)) for row in cells]
    pairs = [read_pair(row, f"Row {i} of {where}", tokenizer) for i, row in zip(indices, rows, strict=True)]
    chosen, rejected = zip(*tokenize_pairs(pairs, tokenizer, max_characters), strict=True)
    return {"chosen_ids": list(chosen), "rejected_ids": list(rejected)}


def read_pair(row: dict[str, Any], where: str, tokenizer: Any) -> Pair:
    """Prepend an explicit prompt to both answers and append EOS to texts; conversations are ended by the template.

    `where` names the row in errors. Whether a text already ends with EOS is checked on the answer without the prompt.
    """
    columns = [column for column in ("prompt", "chosen", "rejected") if column in row]
    chat.check_contents(row, columns, where, _TWICE)
    chosen, rejected = row["chosen"], row["rejected"]
    options = {}
    if chat.is_messages(chosen):
        options = chat.template_options(row, where)
        chat.check_template(tokenizer, options, where)
    else:
        chosen, rejected = (chat.with_eos(text, tokenizer, where) for text in (chosen, rejected))
    if "prompt" in row:
        chosen, rejected = row["prompt"] + chosen, row["prompt"] + rejected
    for column in columns:
        chat.check_unicode(row[column], column, where)
        check_no_media(row[column], f"{where}, column {column!r}")
    return Pair(chosen, rejected, options, where)


def tokenize_pairs(
    pairs: list[Pair], tokenizer: Any, max_characters: int | None = None
) -> list[tuple[list[int], list[int]]]:
    """Token ids (chosen, rejected) of each pair; pairs must be all texts or all conversations.

    Args:
        max_characters: see `tokenize_batch`.
    """
    if isinstance(pairs[0].chosen, str):
        texts = [_truncate_characters(text, max_characters) for pair in pairs for text in (pair.chosen, pair.rejected)]
        ids = _ids(tokenizer, texts, pairs)
        return list(zip(ids[::2], ids[1::2], strict=True))
    return [_render(pair, tokenizer, max_characters) for pair in pairs]


def _ids(tokenizer: Any, texts: list[str], pairs: list[Pair]) -> list[list[int]]:
    """Tokenize the texts, two per pair; if the tokenizer panics, find the pair and name its row."""
    try:
        return tokenizer(text=texts)["input_ids"]
    except BaseException as error:
        if not is_panic(error):
            raise
        if len(pairs) == 1:
            raise ValueError(f"{pairs[0].where}: the tokenizer failed on this text: {str(error)[:200]}.") from None
    return [ids for i, pair in enumerate(pairs) for ids in _ids(tokenizer, texts[2 * i : 2 * i + 2], [pair])]


def _truncate_characters(text: str, max_characters: int | None) -> str:
    return text if max_characters is None else text[: max_characters + 1]


def _render(pair: Pair, tokenizer: Any, max_characters: int | None) -> tuple[list[int], list[int]]:
    with chat.errors_of_template(pair.where):
        return tuple(
            _render_side(side, pair.options, tokenizer, max_characters) for side in (pair.chosen, pair.rejected)
        )


def _render_side(
    messages: list[dict], options: dict[str, Any], tokenizer: Any, max_characters: int | None
) -> list[int]:
    if is_long(messages, max_characters) and chat.ABOUT_TOKENS.isdisjoint(options):
        text = apply_chat_template(tokenizer, messages, tokenize=False, **options)
        return tokenizer(_truncate_characters(text, max_characters), add_special_tokens=False)["input_ids"]
    return apply_chat_template(tokenizer, messages, tokenize=True, return_dict=True, **options)["input_ids"]


# Attention masks from early TRL releases: masked tokens are padding and are removed

MASKS = {"chosen_ids": "attention_mask_chosen", "rejected_ids": "attention_mask_rejected"}


def drop_padding(dataset: Dataset, masks: dict[str, str], num_proc: int | None, where: str) -> Dataset:
    """Remove masked tokens from a table, and then the masks.

    Args:
        masks: maps an id column to the column of its mask, as in `MASKS`.
        where: the dataset's name in errors.

    Raises:
        ValueError: see `unmasked`.
    """
    kept_features = {column: kind for column, kind in dataset.features.items() if column not in masks.values()}
    shorter = dataset.with_format("arrow").map(
        _unmasked_batch,
        with_indices=True,
        batched=True,
        num_proc=num_proc,
        features=Features(kept_features | {column: LargeList(Value("int64")) for column in masks}),
        fn_kwargs={"masks": masks, "where": where},
        desc=f"Dropping padding of {where.replace('_', ' ', 1)}",
    )
    return shorter.with_format(None)


def _unmasked_batch(block: pa.Table, indices: list[int], masks: dict[str, str], where: str) -> pa.Table:
    for column, mask in masks.items():
        ids = unmasked(block, indices[0], column, mask, where)
        block = block.set_column(block.column_names.index(column), column, ids).drop_columns(mask)
    return block


def unmasked(block: pa.Table, first: int, column: str, mask: str, where: str) -> pa.Array:
    """The ids of a column where its mask is 1.

    Raises:
        ValueError: a mask has the wrong length, values other than 0 and 1, or zeros between ones. (Removing tokens in
            the middle would change the positions of those after them.)
    """
    lists = checks.id_lists(block, column, first, where)
    lengths = pc.list_value_length(lists).to_numpy(zero_copy_only=False)
    is_text = mask_to_bool(block, first, mask, lengths, f"of {column!r}", where)
    rows = np.repeat(np.arange(len(lengths)), lengths)
    continues = np.append(False, is_text[:-1] & (rows[1:] == rows[:-1]))
    runs = np.bincount(rows[is_text & ~continues], minlength=len(lengths))
    if (runs != 1).any():
        row = int(np.argmax(runs != 1))
        problem = "zeros between ones" if runs[row] else "nothing but zeros"
        raise ValueError(
            f"Row {first + row} of {where}, column {mask!r}: must be ones for the text and zeros for padding "
            f"before or after it, got {problem}. Remove everything that is not text from {column!r}."
        )
    ends = np.append(0, np.cumsum(np.bincount(rows[is_text], minlength=len(lengths))))
    values = lists.flatten().cast(pa.int64()).filter(pa.array(is_text))
    return pa.LargeListArray.from_arrays(pa.array(ends), values)


def mask_to_bool(block: pa.Table, first: int, mask: str, lengths: np.ndarray, tokens_of: str, where: str) -> np.ndarray:
    """Whether the mask keeps each token of a block: bool `[tokens]`, rows concatenated."""
    valid, lists = f"a list of 0 and 1, one for each token {tokens_of}", block.column(mask).combine_chunks()
    if not checks.is_list(lists.type):
        raise checks.cell_error(f"Row {first} of {where}", mask, lists[0].as_py(), valid)
    mask_lengths = pc.list_value_length(lists).fill_null(-1).to_numpy(zero_copy_only=False)
    if (mask_lengths != lengths).any():
        row = int(np.argmax(mask_lengths != lengths))
        if mask_lengths[row] < 0:
            raise checks.cell_error(f"Row {first + row} of {where}", mask, None, valid)
        raise ValueError(
            f"Row {first + row} of {where}, column {mask!r}: must have {lengths[row]:,} values, one for each "
            f"token {tokens_of}, got {mask_lengths[row]:,}."
        )
    values = lists.flatten()
    is_valid = np.zeros(len(values), bool)
    if pa.types.is_integer(values.type) or pa.types.is_boolean(values.type) or pa.types.is_floating(values.type):
        marks = values.to_numpy(zero_copy_only=False)
        is_valid = (marks == 0) | (marks == 1)
    if not is_valid.all():
        bad = int(np.argmin(is_valid))
        row = first + int(np.searchsorted(np.cumsum(lengths), bad, side="right"))
        raise checks.cell_error(f"Row {row} of {where}", mask, values[bad].as_py(), valid)
    return marks == 1


# Column names, current and legacy

_EARLY_IDS = ("input_ids_chosen", "input_ids_rejected")  # from releases whose collator used masks
_PADDING = "every token of 'chosen_ids' and 'rejected_ids' is trained on, as in TRL. Remove padding from them"
_WEIGHT = "all pairs have the same weight"
_LABEL = "the chosen answer counts as the better one in every pair"
_TEXTS = "the text is used instead, as in TRL. To train on these ids, name them 'chosen_ids' and 'rejected_ids'"
_PROMPT = "the prompt column must be named 'prompt'"
# Columns that TRL silently ignores although a user may expect an effect -> explanation for the warning.
_UNREAD = {
    **dict.fromkeys([*MASKS.values(), "chosen_attention_mask", "rejected_attention_mask"], _PADDING),
    **dict.fromkeys(["weight", "weights", "sample_weight", "sample_weights"], _WEIGHT),
    **dict.fromkeys(["label", "labels"], _LABEL),
    **dict.fromkeys(["question", "instruction", "query"], _PROMPT),
    **dict.fromkeys(_EARLY_IDS, _TEXTS),
    "margins": "the column must be named 'margin'",
}


class Columns(NamedTuple):
    """The columns that are used.

    tokenized: whether rows have token ids.
    masks: the entries of `MASKS` that apply to them.
    """

    tokenized: bool
    masks: dict[str, str]


def resolve_columns(dataset: Any, column_names: list[str], name: str) -> tuple[Any, Columns]:
    """Rename legacy columns and determine which are used. If there are both texts and ids under the earliest names, the
    texts are used, as in TRL.

    Warns about legacy names, and about columns that have no effect although a user might expect one.

    Args:
        column_names: the dataset's columns; a stream may not know its own.
        name: name of the dataset, as passed to `prepare`.

    Raises:
        ValueError: there are neither texts nor ids.
    """
    legacy_ids = None
    if not set(IDS) <= set(column_names):
        legacy_ids = next((pair for pair in LEGACY_IDS if set(pair) <= set(column_names)), None)
        legacy_ids = None if legacy_ids == _EARLY_IDS and set(TEXTS) <= set(column_names) else legacy_ids
    masks = {ids: mask for ids, mask in MASKS.items() if legacy_ids == _EARLY_IDS and mask in column_names}
    tokenized = legacy_ids is not None or set(IDS) <= set(column_names)
    if legacy_ids is not None:
        _warn_of_legacy_names(legacy_ids, name)
        dataset = dataset.rename_columns(dict(zip(legacy_ids, IDS, strict=True)))
    elif not tokenized and not set(TEXTS) <= set(column_names):
        raise missing_columns(column_names, name)
    other_columns = [column for column in column_names if column not in masks.values()]
    _warn_of_unread_columns(other_columns, tokenized, checks.argument(name))
    return dataset, Columns(tokenized, masks)


def _warn_of_legacy_names(names: tuple[str, str], name: str) -> None:
    warnings.warn(
        f"{checks.argument(name)}: the columns {names[0]!r} and {names[1]!r} are now called 'chosen_ids' and "
        "'rejected_ids'. They were renamed for this run. Rename them in the data: the old names are deprecated and "
        "will not be supported in v1 of TRL.",
        FutureWarning,
        stacklevel=4,
    )


def _warn_of_unread_columns(column_names: list[str], tokenized: bool, where: str) -> None:
    has_prompt = tokenized or "prompt" in column_names
    columns_by_reason: dict[str, list[str]] = {}
    for column in column_names:
        reason = _UNREAD.get(column)
        is_used = (reason == _TEXTS and tokenized) or (reason == _PROMPT and has_prompt)
        if reason is None or is_used or (reason == _PADDING and not tokenized):
            continue
        if column == "margins" and "margin" in column_names:
            continue
        columns_by_reason.setdefault(reason, []).append(column)
    for reason, columns in columns_by_reason.items():
        logger.warning(f"{where}: the columns {columns} are ignored: {reason}.")


# Checks of Arrow blocks


def missing_columns(columns: list[str], name: str) -> ValueError:
    """The error for a dataset with neither texts nor ids."""
    accepted = ", or ".join(f"{chosen!r} and {rejected!r}" for chosen, rejected in (TEXTS, IDS, *LEGACY_IDS))
    return ValueError(
        f"{argument(name)} must have the columns {accepted}, got {brief(columns, 500)}. Rename columns "
        "with dataset.rename_column."
    )


def check_ids(block: pa.Table, first: int, where: str) -> tuple[np.ndarray, np.ndarray]:
    """Number of tokens of the longer answer, and whether both answers are equal, each `[rows]`.

    Raises:
        ValueError: a value is not a list of at least one int.
    """
    chosen, rejected = (id_lists(block, column, first, where) for column in IDS)
    chosen_lengths, rejected_lengths = (numbers_of(pc.list_value_length(side)) for side in (chosen, rejected))
    identical = chosen_lengths == rejected_lengths
    rows = np.flatnonzero(identical)
    if rows.size:
        values = [numbers_of(side.take(pa.array(rows)).flatten()) for side in (chosen, rejected)]
        starts = np.cumsum(chosen_lengths[rows]) - chosen_lengths[rows]
        identical[rows] = np.logical_and.reduceat(values[0] == values[1], starts)
    return np.maximum(chosen_lengths, rejected_lengths), identical


def check_margin(block: pa.Table, first: int, where: str) -> None:
    """Raise ValueError for a row without a finite margin."""
    check_numbers(block, "margin", first, where, "a finite number in every row (or drop the column)")


def empty_texts(block: pa.Table) -> np.ndarray:
    """Whether the chosen or rejected text of each row is the empty string, `[rows]`; conversations never are."""
    empty = np.zeros(block.num_rows, dtype=bool)
    for column in TEXTS:
        texts = block.column(column)
        if pa.types.is_string(texts.type) or pa.types.is_large_string(texts.type):
            empty |= numbers_of(pc.equal(texts, "").fill_null(False))
    return empty
