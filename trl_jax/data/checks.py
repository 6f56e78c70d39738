"""Check datasets before training. Errors name the argument, the row and the column."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from numbers import Integral
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, IterableDataset

from trl_jax.core.text import brief, printable
from trl_jax.data.batch import IGNORED, Columns

logger = logging.getLogger(__name__)

ROWS_PER_BLOCK = 1000

_OUTSIDE = (
    "token id {id} is outside the model's vocabulary (vocab_size={size}). Pass the model's own tokenizer, or resize "
    "the model's embeddings."
)
_MEDIA = {
    "image": "images", "image_url": "images", "input_image": "images",
    "video": "videos", "video_url": "videos",
    "audio": "audio", "audio_url": "audio", "input_audio": "audio",
}  # fmt: skip

_FIXES = {
    "DatasetDict": 'pass one of its splits: dataset["train"]',
    "IterableDatasetDict": 'pass one of its splits: dataset["train"]',
    "dict": 'pass one split, dataset["train"], or build one with datasets.Dataset.from_dict(columns)',
    "list": "build one with datasets.Dataset.from_list(rows)",
    "DataFrame": "build one with datasets.Dataset.from_pandas(frame)",
    "Subset": "select the rows with dataset.select(indices)",
}


# Labels


def check_labels(
    dataset: Dataset | IterableDataset, columns: Columns, vocab_size: int, name: str
) -> Dataset | IterableDataset:
    """Raise ValueError unless each text has one label per token, a token id or -100. Warn if a table has no targets.

    Returns the same dataset; for a stream, with the check mapped over its rows.
    """
    where = f"the prepared {argument(name)}"
    if isinstance(dataset, IterableDataset):
        arguments = {"columns": columns, "vocab_size": vocab_size, "where": where}
        return dataset.map(_check_stream_labels, with_indices=True, fn_kwargs=arguments)
    num_targets = 0
    for first, block in blocks(dataset, (*columns.texts, *columns.labels)):
        _check_label_block(block, first, columns, vocab_size, where)
        num_targets += _num_targets(block, columns)
    if len(dataset) and not num_targets:
        longest = max(len(row) for column in columns.texts for row in dataset[column])
        logger.warning(
            f"{where} has no token to train on, so every loss will be 0.0: in all {len(dataset):,} rows, every label "
            f"after the first token is {IGNORED}. The longest row has {longest} tokens. Check whether max_length cuts "
            "off the answers, whether texts are empty, and whether a mask excludes every token."
        )
    return dataset


def _num_targets(block: pa.Table, columns: Columns) -> int:
    """Number of targets: tokens with a label, except the first of each text, which has no context."""
    count = 0
    for column in columns.labels:
        labels, lengths = list_lengths(block, column)
        real = labels != IGNORED
        firsts = (np.cumsum(lengths) - lengths)[lengths > 0]
        count += np.count_nonzero(real) - np.count_nonzero(real[firsts])
    return int(count)


def _check_stream_labels(
    row: dict[str, Any], index: int, columns: Columns, vocab_size: int, where: str
) -> dict[str, Any]:
    block = row_block(row, (*columns.texts, *columns.labels), f"Row {index} of {where}")
    _check_label_block(block, index, columns, vocab_size, where)
    return row


def _check_label_block(block: pa.Table, first: int, columns: Columns, vocab_size: int, where: str) -> None:
    for text, column in zip(columns.texts, columns.labels, strict=True):
        (_, lengths), (labels, label_lengths) = list_lengths(block, text), list_lengths(block, column)
        if (lengths != label_lengths).any():
            row = int(np.argmax(lengths != label_lengths))
            raise ValueError(
                f"Row {first + row} of {where}, column {column!r}: must have {lengths[row]:,} labels, one for each id "
                f"of {text}, got {label_lengths[row]:,}."
            )
        wrong = (labels != IGNORED) & ((labels < 0) | (labels >= vocab_size))
        if wrong.any():
            index = int(np.argmax(wrong))
            row = int(np.searchsorted(np.cumsum(label_lengths), index, side="right"))
            valid = f"token ids from 0 to {vocab_size - 1:,}, or {IGNORED} for tokens without a target"
            raise cell_error(f"Row {first + row} of {where}", column, int(labels[index]), valid)


# Types, columns and values


def argument(name: str) -> str:
    """The dataset's name in errors: "train" becomes train_dataset; other names, such as eval_dataset['key'], stay."""
    return f"{name}_dataset" if name in ("train", "eval", "test") else name


def materialize(dataset: Any, name: str) -> Any:
    """Apply a table's transform (`Dataset.with_transform`) once to every row. Other datasets, or dicts of them, are
    returned unchanged."""
    if isinstance(dataset, dict):
        return {key: materialize(part, f"{name}[{key!r}]") for key, part in dataset.items()}
    if not has_transform(dataset):
        return dataset
    logger.warning(f"{argument(name)} has a transform: it is applied once, before training, instead of in every epoch.")
    return Dataset.from_list([dataset[index] for index in range(len(dataset))])


def materialize_images(dataset: Any, name: str) -> Any:
    """Apply `materialize` to tables whose transform yields images for the first row; return others unchanged."""
    if isinstance(dataset, dict):
        return {key: materialize_images(part, f"{name}[{key!r}]") for key, part in dataset.items()}
    has_image_columns = has_transform(dataset) and len(dataset) and not {"image", "images"}.isdisjoint(dataset[0])
    return materialize(dataset, name) if has_image_columns else dataset


def has_transform(dataset: Any) -> bool:
    """Whether a table applies a transform when rows are read (`Dataset.with_transform` or `set_transform`). Its
    `column_names` are then the inputs of the transform, not its outputs."""
    return isinstance(dataset, Dataset) and dataset.format["type"] == "custom"


def check_type(dataset: Any, name: str, *, transforms: bool = False, images: bool = False) -> None:
    """Check a dataset's type.

    Args:
        transforms: whether the dataset may have a transform.
        images: whether it may have images.

    Raises:
        TypeError: it is neither a Dataset nor an IterableDataset.
        ValueError: it has a transform or images that are not allowed.
    """
    if has_transform(dataset):
        if transforms:
            return  # its rows are checked when they are read
        raise ValueError(
            f"{argument(name)} has a transform (`Dataset.set_transform()` or `Dataset.with_transform()`), which runs "
            "whenever a row is read, but rows are read only once, before training. Apply it with dataset.map, or "
            "remove it with dataset.with_format(None). With dataset_kwargs={'skip_prepare_dataset': True}, SFTTrainer "
            "accepts a transform whose rows are trainer-ready."
        )
    if isinstance(dataset, Dataset | IterableDataset):
        if not images:
            check_no_images(dataset.column_names or (), argument(name))
        return
    type_name = type(dataset).__name__
    splits = f" with splits {list(dataset)}" if type_name.endswith("DatasetDict") else ""
    fix = _FIXES.get(type_name, "see datasets.Dataset.from_list and datasets.Dataset.from_generator")
    raise TypeError(f"{argument(name)} must be a Dataset or IterableDataset, got a {type_name}{splits}: {fix}.")


def has_images(dataset: Dataset | IterableDataset) -> bool:
    """Whether the first row of a dataset has images: an image column, or image parts in a conversation. If a table has
    a transform, which may be random, no row is read; only the names of the transform's input columns are checked."""
    if has_transform(dataset):
        return not {"image", "images"}.isdisjoint(dataset.column_names)
    rows = dataset.take(1) if isinstance(dataset, IterableDataset) else dataset.select(range(min(1, len(dataset))))
    row = next(iter(rows), {})
    if "image" in row or "images" in row:
        return True
    messages = [message for value in row.values() if isinstance(value, list) for message in value]
    contents = [message.get("content") for message in messages if isinstance(message, Mapping)]
    return any(_media_of(part) == "images" for parts in contents if isinstance(parts, list) for part in parts)


def check_no_images(columns: Collection[str], where: str) -> None:
    """Raise ValueError for a dataset with an image column if only its text would be trained on."""
    if image_columns := sorted({"image", "images", "pixel_values"}.intersection(columns)):
        raise ValueError(
            "The dataset appears to be vision-related (contains 'image' or 'images' keys): "
            f"{where} has the column {image_columns[0]!r}, and rows with images are not supported yet. To train on the "
            f"text only, remove the column {image_columns[0]!r} and every image part of the messages."
        )


def check_no_media(messages: Any, where: str, *, images: bool = False) -> None:
    """Raise ValueError for a message with an image, video or audio, which a template would render as a placeholder.

    Args:
        images: whether images are allowed.
        messages: a conversation; anything that is not a list passes.
        where: name of the messages in errors, such as "Row 3 of train_dataset, column 'prompt'".
    """
    for message in messages if isinstance(messages, list | tuple) else ():
        content = message.get("content") if isinstance(message, Mapping) else None
        for part in content if isinstance(content, list | tuple) else ():
            if (kind := _media_of(part)) is not None and not (images and kind == "images"):
                raise ValueError(
                    f"{where}: a message with role {message.get('role')!r} contains {brief(part)}, and rows with "
                    f"{kind} are not supported yet. Leave such rows out, or reduce their messages to text."
                )


def _media_of(part: Any) -> str | None:
    """The kind of media in a content part; None for text. (Datasets fill missing keys with None.)"""
    if not isinstance(part, Mapping):
        return None
    names = [part.get("type"), *(key for key, value in part.items() if value is not None)]
    return next((_MEDIA[name] for name in names if isinstance(name, str) and name in _MEDIA), None)


def cell_error(where: str, column: str, value: Any, valid: str) -> ValueError:
    """The error for one value; `where` is its row, such as "Row 3 of train_dataset"."""
    kind = "" if value is None else f" ({type(value).__name__})"
    return ValueError(f"{where}, column {column!r}: must be {valid}, got {brief(value, 60)}{kind}.")


def check_token_ids(
    dataset: Dataset | IterableDataset,
    columns: tuple[str, ...],
    vocab_size: int,
    name: str,
    max_positions: int | None = None,
) -> Dataset | IterableDataset:
    """Raise ValueError for an id or position without an embedding, which an accelerator would silently clamp.

    Returns the same dataset; for a stream, with the check mapped over its rows.

    Args:
        columns: columns of token ids.
        max_positions: number of positions that the model has; None means no limit.
    """
    where = f"the prepared {argument(name)}"
    if not columns:  # prompts, which are not tokenized yet
        return dataset
    if isinstance(dataset, IterableDataset):
        arguments = {"columns": columns, "vocab_size": vocab_size, "max_positions": max_positions, "where": where}
        return dataset.map(_check_stream_ids, with_indices=True, fn_kwargs=arguments)
    for first, block in blocks(dataset, columns):
        _check_vocabulary(block, first, vocab_size, where)
        _check_lengths(block, first, max_positions, where)
    return dataset


def blocks(dataset: Dataset, columns: tuple[str, ...]) -> Iterator[tuple[int, pa.Table]]:
    """Iterate over these columns as (index of the first row, block of at most ROWS_PER_BLOCK rows)."""
    if not columns:
        return  # a table without columns has no rows either
    arrow = dataset.select_columns(list(columns)).with_format("arrow")
    for index, block in enumerate(arrow.iter(batch_size=ROWS_PER_BLOCK)):
        yield index * ROWS_PER_BLOCK, block


def list_lengths(block: pa.Table, column: str) -> tuple[np.ndarray, np.ndarray]:
    """The ids of a checked column, concatenated `[tokens]`, and the length of each row `[rows]`, int64."""
    lists = block.column(column).combine_chunks()
    return numbers_of(lists.flatten()), numbers_of(pc.list_value_length(lists)).astype(np.int64)


def token_ids(values: Any, vocab_size: int, where: str) -> np.ndarray:
    """Check the token ids of one text; int32 `[tokens]`.

    Args:
        values: a list or array of ints.
        vocab_size: rows of the model's embedding.
        where: name of the text in errors, such as "rollout_func's completion_ids[3]".

    Raises:
        ValueError: the list is empty, or a value is not an int or is out of range.
    """
    try:
        ids = np.asarray(values)
    except ValueError:  # lists of different lengths
        ids = np.asarray(None)
    if ids.ndim != 1 or not ids.size:
        raise ValueError(f"{where}: must be a list of at least one token id, got {brief(values)}.")
    has_bools = isinstance(values, list | tuple) and not {bool, np.bool_}.isdisjoint(map(type, values))
    if not has_bools and ids.dtype.kind in "iu" and ids.min() >= 0 and ids.max() < vocab_size:
        return ids.astype(np.int32)
    values = ids.tolist() if isinstance(values, np.ndarray) else list(values)
    for index, value in enumerate(values):
        if not isinstance(value, Integral) or isinstance(value, bool | np.bool_):
            raise ValueError(
                f"{where}, position {index}: must be a token id from 0 to {vocab_size - 1}, got {brief(value)} "
                f"({type(value).__name__})."
            )
        if not 0 <= value < vocab_size:
            raise ValueError(f"{where}, position {index}: {_OUTSIDE.format(id=value, size=vocab_size)}")
    return np.asarray(values, np.int32)


def row_block(row: dict[str, Any], columns: tuple[str, ...], where: str) -> pa.Table:
    """Convert one row to a block; ValueError, naming `where`, for a value that Arrow cannot represent."""
    try:
        return pa.table({column: pa.array([row[column]]) for column in columns})
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
        raise ValueError(f"{where}, columns {list(columns)}: {printable(str(error)[:500])}") from error


def check_numbers(block: pa.Table, column: str, first: int, where: str, valid: str = "a finite number") -> None:
    """Raise ValueError for a row without a number, or with one that is not finite in float32."""
    numbers = block.column(column).combine_chunks()
    dtype = numbers.type
    if numbers.null_count:
        bad = numbers_of(numbers.is_null())
    elif pa.types.is_integer(dtype) or pa.types.is_floating(dtype) or pa.types.is_boolean(dtype):
        with np.errstate(over="ignore"):  # the loss computes in float32
            bad = ~np.isfinite(numbers_of(numbers).astype(np.float32))
    else:
        bad = np.ones(len(numbers), dtype=bool)
    if bad.any():
        row = int(np.argmax(bad))
        raise cell_error(f"Row {first + row} of {where}", column, numbers[row].as_py(), valid)


def is_list(kind: pa.DataType) -> bool:
    """Whether an Arrow type is a list of any kind."""
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def id_lists(block: pa.Table, column: str, first: int, where: str) -> pa.Array:
    """A column of token id lists; ValueError for a value that is not a list of at least one int."""
    lists = block.column(column).combine_chunks()
    kind = lists.type
    if not is_list(kind):
        raise cell_error(f"Row {first} of {where}", column, lists[0].as_py(), "a list of at least one token id")
    lengths = numbers_of(pc.list_value_length(lists).fill_null(0))
    if not lengths.all():
        row = int(np.argmin(lengths))
        raise cell_error(f"Row {first + row} of {where}", column, lists[row].as_py(), "a list of at least one token id")
    values = lists.flatten()
    if not pa.types.is_integer(kind.value_type) or values.null_count:
        bad = int(np.argmax(numbers_of(values.is_null())))
        row = first + pc.list_parent_indices(lists)[bad].as_py()
        raise cell_error(f"Row {row} of {where}", column, values[bad].as_py(), "a list of ints")
    return lists


def _check_vocabulary(block: pa.Table, first: int, vocab_size: int, where: str) -> None:
    for column in block.column_names:
        lists = block.column(column).combine_chunks()
        ids = numbers_of(lists.flatten())
        bad = np.flatnonzero((ids < 0) | (ids >= vocab_size))
        if bad.size:
            row = first + pc.list_parent_indices(lists)[int(bad[0])].as_py()
            raise ValueError(
                f"Row {row} of {where}, column {column!r}: {_OUTSIDE.format(id=ids[bad[0]], size=vocab_size)}"
            )


def _check_lengths(block: pa.Table, first: int, max_positions: int | None, where: str) -> None:
    for column in block.column_names if max_positions is not None else ():
        lengths = numbers_of(pc.list_value_length(block.column(column)))
        row = int(np.argmax(lengths))
        if lengths[row] > max_positions:
            raise ValueError(
                f"Row {first + row} of {where}, column {column!r}: has {lengths[row]:,} tokens, but the model has "
                f"positions for {max_positions:,}. Pass max_length={max_positions} to leave longer rows out."
            )


def _check_stream_ids(
    row: dict[str, Any], index: int, columns: tuple[str, ...], vocab_size: int, max_positions: int | None, where: str
) -> dict[str, Any]:
    block = row_block(row, columns, f"Row {index} of {where}")
    _check_vocabulary(block, index, vocab_size, where)
    _check_lengths(block, index, max_positions, where)
    return {}


def numbers_of(array: pa.Array | pa.ChunkedArray) -> np.ndarray:
    return array.to_numpy(zero_copy_only=False) if isinstance(array, pa.Array) else array.to_numpy()


# Length filter (for streams, see `tokenize.without_long`)


def drop_long(
    dataset: Dataset, lengths: np.ndarray, max_length: int | None, where: str, unit: str, qualifier: str = ""
) -> Dataset:
    """Drop the rows with more than `max_length` tokens and warn; None keeps all.

    Args:
        lengths: tokens of the longest text of each row, `[rows]`.
        where, unit: names of the dataset and of one row in messages, such as "train_dataset" and "pair".
        qualifier: "at least " if long texts were only tokenized in part.

    Raises:
        ValueError: no row is left.
    """
    if max_length is None or lengths.max() <= max_length:
        return dataset
    short_rows = np.flatnonzero(lengths <= max_length)
    total = len(lengths)
    if not short_rows.size:
        raise ValueError(
            f"max_length={max_length} removes all {total:,} rows of {where}: the shortest {unit} has "
            f"{qualifier}{lengths.min():,} tokens. Raise max_length or pass max_length=None."
        )
    logger.warning(
        f"max_length={max_length} removed {total - len(short_rows):,} of {total:,} {unit}s of {where} "
        f"(longest kept: {lengths[short_rows].max():,} tokens)"
    )
    return dataset.select(short_rows)
