"""A model: a trunk and the head on it."""

from __future__ import annotations

import abc
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from trl_jax.nn.head.inputs import HeadInputs


class Model(nnx.Module):
    """A trunk gives the hidden states of the tokens that are read, its head makes results of them.

    The paths of their parameters begin with the NAME that each has.
    """

    def __init__(self, trunk: nnx.Module, head: nnx.Module):
        self.trunk_name, self.head_name = trunk.NAME, head.NAME
        setattr(self, trunk.NAME, trunk)
        setattr(self, head.NAME, head)

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        reads: jax.Array,
        *,
        targets: jax.Array | None = None,
        dtype: jnp.dtype = jnp.float32,
        dropout_key: jax.Array | None = None,
        temperature: float = 1.0,
        head_dtype: jnp.dtype | None = None,
        before_head: bool = False,
        **options: Any,
    ) -> Any:
        """The outputs of the head: of a score head `[N]`; of a language model's head `TokenOutputs` where there are
        targets, else logits `[N, V]`, or `HeadInputs`.

        Args:
            tokens, positions: int32 `[R, T]`.
            reads: int32 `[N]`, the places that are read, row * T + place in the row.
            targets: int32 `[N]`, the id that each read predicts, -1 for none; a score head has no use for them.
            dtype: what layers and a language model's head compute in.
            dropout_key: turns dropout on, at the rates in the config.
            temperature: divides the logits of a language model's head; a score head has none.
            head_dtype: what a language model's head computes in; None: `dtype`.
            before_head: give what a language model's head makes logits of, and compute none.
            options: the trunk's others. With `router_token_count`, `[R, T]`, a model with experts gives beside its
                outputs the `RouterSums` over those tokens.
        """
        trunk = vars(self)[self.trunk_name]
        hidden = trunk(tokens, positions, reads, dtype=dtype, dropout_key=dropout_key, **options)
        hidden, *sums = hidden if isinstance(hidden, tuple) else (hidden,)
        if head_dtype is not None:
            hidden, dtype = hidden.astype(dtype), head_dtype
        if before_head:
            outputs = self.head_inputs(hidden, dtype)
        else:
            outputs = self.outputs(hidden, targets, dtype, dropout_key, temperature)
        return (outputs, *sums) if sums else outputs

    @abc.abstractmethod
    def outputs(
        self,
        hidden: jax.Array,
        targets: jax.Array | None,
        dtype: jnp.dtype,
        dropout_key: jax.Array | None,
        temperature: float,
    ) -> Any:
        """The outputs of the head for hidden states `[N, D]`; arguments as in the call."""

    def head_inputs(self, hidden: jax.Array, dtype: jnp.dtype) -> HeadInputs:
        """The inputs that the head makes logits of, in this dtype; TypeError of a head that makes none."""
        raise TypeError(f"A {type(self).__name__} has no logits over a vocabulary.")
