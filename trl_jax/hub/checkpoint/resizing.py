"""Changes the number of rows in the table of tokens, and in the head of a language model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import jax
import jax.numpy as jnp

from trl_jax.hub.checkpoint.loading import Source
from trl_jax.hub.config.native import NativeConfig


def resized_source(source: Source, rows: int) -> Source:
    """The source of a checkpoint that has so many rows."""
    return replace(source, config=resized_config(source.config, rows))


def resized_config(config: NativeConfig, rows: int) -> NativeConfig:
    """The config of a model that has so many rows."""
    raw = dict(config.raw)
    if "text_config" in raw:  # of a model that reads images too
        raw["text_config"] = raw["text_config"] | {"vocab_size": rows}
    else:
        raw["vocab_size"] = rows
    return replace(config, raw=raw, arch=replace(config.arch, vocab_size=rows))


def resized_table(table: jax.Array, rows: int) -> jax.Array:
    """`[V, D]` to `[rows, D]`, or a bias `[V]` to `[rows]`: new rows are the mean of the old ones.

    transformers draws them around that mean with a billionth of the rows' covariance (`mean_resizing`).
    """
    new = max(rows - len(table), 0)
    return jnp.concatenate([table[:rows], jnp.broadcast_to(jnp.mean(table, axis=0), (new, *table.shape[1:]))])


def tables_of_tokens(params: Iterable[str]) -> list[str]:
    """The paths of the arrays with a row for each token, whichever trunk they belong to."""
    return [path for path in params if path.split(".")[1:] == ["embed", "weight"] or path.startswith("lm_head.")]
