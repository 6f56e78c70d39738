"""An nnx module that runs an exported program as its forward pass."""

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
        """The program for `[rows, length]` tokens, with matrix products in `dtype`, and with dropout if `training`."""


class ExportedModel(nnx.Module):
    """A model with the call signature of `Model`, whose program computes the logits of rows `[R, T]` of tokens.

    Parameters have the names of the exported model.
    """

    needs_valid = True  # its attention may otherwise see pads

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
        """The outputs at each read. `positions` is not used: the program computes them from the ids.

        Args:
            tokens: int32 `[R, T]`.
            reads: int32 `[N]`, flat indices (row * T + place) of the tokens to read; None means all.
            targets: int32 `[N]`, as in `Model`.
            valid: bool `[R, T]`, False at pads; None means the first `lengths` of each row.
            lengths: int32 `[R]`, the length of each row's text; None means T.
            dtype: of matrix products.
            remat: recompute each layer from its input in the backward pass.
            dropout_key: turns on dropout, at the config's rates.
            temperature: the logits are divided by it.
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
    """A model with a score head. Its program finds the token to read in each row and returns `[R, 1]`."""

    def outputs(self, logits: jax.Array, reads: jax.Array | None, targets: jax.Array | None, length: int) -> jax.Array:
        return logits[:, 0][reads // length]


class ExportedLm(ExportedModel):
    """A causal language model. Its program returns `[R, T, V]`."""

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
