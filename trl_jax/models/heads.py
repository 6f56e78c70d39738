"""What stands on top of a trunk."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from trl_jax.models.arch import Arch
from trl_jax.models.decoder import Decoder
from trl_jax.nn.linear import Linear


class SequenceScorer(nnx.Module):
    """A decoder that gives each row one number, read at one of its tokens."""

    needs_valid = False  # pads stand to the right of every token that is read

    def __init__(self, arch: Arch):
        self.decoder = Decoder(arch)
        self.score = Linear(arch.hidden_size, 1)

    def __call__(self, tokens: jax.Array, positions: jax.Array, *, at: jax.Array, **how) -> jax.Array:
        """Scores `[R]`, float32 from the head on: the last step of a bfloat16 run is not rounded.

        Args:
            tokens, positions: int32 `[R, T]`.
            at: int32 `[R]`, where each row is read.
            how: the options of `Decoder.__call__`.
        """
        return self.score(self.decoder(tokens, positions, at=at, **how).astype(jnp.float32))[:, 0]
