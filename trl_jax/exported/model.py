"""A model whose computation is a program that was exported elsewhere."""

from __future__ import annotations

import abc
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from trl_jax.core.outputs import TokenOutputs
from trl_jax.exported.aten import Program, run
from trl_jax.models.encoder import valid_tokens
from trl_jax.nn.head import outputs_of_logits, tempered


class Programs(Protocol):
    """The programs of a model, by shape."""

    def program(self, rows: int, length: int, *, dtype: str, training: bool) -> Program:
        """The program for R rows of T tokens, its matrix products in `dtype`; with dropout where `training`."""


class ExportedModel(nnx.Module):
    """A model that is called as `Model` is: whose program gives rows `[R, T]` of tokens their logits.

    Parameters keep the names they have in the model that was exported.
    """

    needs_valid = True  # its attention may see pads

    def __init__(self, shapes: dict[str, tuple[int, ...]], programs: Programs):
        self._programs, self._names = programs, tuple(shapes)
        for name, part in _nested(shapes).items():
            setattr(self, name, part)

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        reads: jax.Array | None,
        *,
        targets: jax.Array | None = None,
        valid: jax.Array | None = None,
        lengths: jax.Array | None = None,
        dtype: jnp.dtype = jnp.float32,
        remat: bool = False,
        dropout_key: jax.Array | None = None,
        temperature: float = 1.0,
    ) -> Any:
        """The outputs at each read. `positions` are not used: the program works them out from the ids.

        Args:
            tokens: int32 `[R, T]`.
            reads: int32 `[N]`, the places that are read, row * T + place in the row; None: all.
            targets: int32 `[N]`, as in `Model`.
            valid: bool `[R, T]`, False at pads; None means the first `lengths` of each row.
            lengths: int32 `[R]`, the tokens of each row's text; None means all.
            dtype: what matrix products are computed in.
            remat: the backward pass recomputes each layer from its input.
            dropout_key: turns dropout on, at the rates in the config.
            temperature: divides the logits of a language model's head.
        """
        del positions
        if not len(tokens):
            return jnp.zeros(0)
        rows = jnp.stack([tokens.astype(jnp.int32), valid_tokens(tokens, valid, lengths).astype(jnp.int32)])
        training = dropout_key is not None
        program = self._programs.program(*tokens.shape, dtype=jnp.dtype(dtype).name, training=training)
        logits = run(program, self._params(), rows, remat=remat, key=dropout_key)
        return self.outputs(tempered(logits.astype(jnp.float32), temperature), reads, targets, tokens.shape[1])

    @abc.abstractmethod
    def outputs(
        self, logits: jax.Array, reads: jax.Array | None, targets: jax.Array | None, length: int
    ) -> TokenOutputs | jax.Array:
        """The outputs at `reads` `[N]` of rows of `length` tokens."""

    def _params(self) -> dict[str, jax.Array]:
        return {name: _at(self, name.split("."))[...] for name in self._names}


class ExportedScorer(ExportedModel):
    """A model with a score head: its program itself finds the token that a row is read at, and gives `[R, 1]`."""

    def outputs(self, logits: jax.Array, reads: jax.Array | None, targets: jax.Array | None, length: int) -> jax.Array:
        return logits[:, 0][reads // length]


class ExportedLm(ExportedModel):
    """A causal language model: its program gives `[R, T, V]`."""

    def outputs(
        self, logits: jax.Array, reads: jax.Array | None, targets: jax.Array | None, length: int
    ) -> TokenOutputs | jax.Array:
        flat = logits.reshape(-1, logits.shape[-1])
        flat = flat if reads is None else flat[reads]
        return flat if targets is None else outputs_of_logits(flat, targets)


def _nested(shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    """`{"a.0.b": shape}` -> `{"a": nnx.Dict({"0": nnx.Dict({"b": Param})})}`."""
    groups: dict[str, Any] = {}
    for name, shape in shapes.items():
        first, _, rest = name.partition(".")
        if rest:
            groups.setdefault(first, {})[rest] = shape
        else:
            groups[first] = nnx.Param(jax.ShapeDtypeStruct(shape, jnp.float32))
    return {name: nnx.Dict(_nested(part)) if isinstance(part, dict) else part for name, part in groups.items()}


def _at(part: Any, path: list[str]) -> Any:
    top, *rest = path
    part = vars(part)[top]
    for name in rest:
        part = part[name]
    return part
