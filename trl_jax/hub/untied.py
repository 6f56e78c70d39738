"""A language model's head that is tied to the table of tokens gets a weight of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trl_jax.hub.checkpoint.tensor_map import TensorEntry
from trl_jax.hub.native_backend import NativeBackend

_HEAD = "lm_head.weight"


def untied(backend: NativeBackend, arrays: dict[str, Any]) -> tuple[NativeBackend, dict[str, Any]]:
    """The backend and the arrays of a tied model whose head has the table's numbers for its own."""
    source = backend.source
    [table] = [entry.path for entry in source.tensor_map if entry.path.split(".")[1:] == ["embed", "weight"]]
    entry = TensorEntry(_HEAD, source.config.family.language_heads[0])
    of_table = next(tensor.tensor for tensor in source.tensor_map if tensor.path == table)
    dtypes = source.dtypes | {entry.tensor: source.dtypes[of_table]} if of_table in source.dtypes else source.dtypes
    config, tensor_map = source.config.untied(), [*source.tensor_map, entry]
    head = {
        _HEAD + path.removeprefix(table): array for path, array in arrays.items() if path in (table, f"{table}.codes")
    }
    formats = backend.formats | ({_HEAD: backend.formats[table]} if table in backend.formats else {})
    made = NativeBackend(replace(source, config=config, tensor_map=tensor_map, dtypes=dtypes), formats)
    return made, arrays | head
