"""Changes the number of rows in the table of tokens, and in the head of a language model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import jax
import jax.numpy as jnp

from trl_jax.hub.checkpoint.loading import Source
from trl_jax.hub.config.native import NativeConfig

_TABLES = ("embed.weight", "layer_embed.table.weight")  # of a trunk


def resized_source(source: Source, rows: int) -> Source:
    """The source of a checkpoint that has so many rows."""
    return replace(source, config=resized_config(source.config, rows), resized=True)


def resized_config(config: NativeConfig, rows: int) -> NativeConfig:
    """The config of a model that has so many rows."""
    raw, changed, facts = dict(config.raw), {"vocab_size": rows}, {"vocab_size": rows}
    if vars(config.arch).get("layer_embedding") is not None:
        changed["vocab_size_per_layer_input"] = rows
        facts["layer_embedding"] = replace(config.arch.layer_embedding, rows=rows)
    if "text_config" in raw:  # of a model that reads images too
        changed = {"text_config": raw["text_config"] | changed}
    return replace(config, raw=raw | changed, arch=replace(config.arch, **facts))


def resized_table(table: jax.Array, rows: int) -> jax.Array:
    """`[V, D]` to `[rows, D]`, or a bias `[V]` to `[rows]`: new rows are the mean of the old ones.

    transformers draws them around that mean with a billionth of the rows' covariance (`mean_resizing`).
    """
    new = max(rows - len(table), 0)
    return jnp.concatenate([table[:rows], jnp.broadcast_to(jnp.mean(table, axis=0), (new, *table.shape[1:]))])


def tables_of_tokens(params: Iterable[str]) -> list[str]:
    """The paths of the arrays with a row for each token, whichever trunk they belong to."""
    return [path for path in params if path.partition(".")[2] in _TABLES or path.startswith("lm_head.")]
