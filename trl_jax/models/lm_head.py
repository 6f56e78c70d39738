"""The head of a causal language model, and the model that has it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from trl_jax.core.token_outputs import TokenOutputs
from trl_jax.models.arch import Arch
from trl_jax.models.decoder import Decoder
from trl_jax.models.model import Model
from trl_jax.nn.head.inputs import HeadInputs
from trl_jax.nn.head.logits import head_logits
from trl_jax.nn.head.outputs import token_outputs
from trl_jax.nn.linear import stored
from trl_jax.nn.lora import Lora
from trl_jax.nn.quantized import Quantized


class LmHead(nnx.Module):
    """Hidden states to log-probabilities of targets, or to logits over the vocabulary.

    A tied head has no weight of its own: it is given the table of tokens. `lora` is an adapter beside its weight.
    """

    NAME = "lm_head"
    lora: Lora | None

    def __init__(self, arch: Arch):
        shape = (arch.vocab_size, arch.head_inputs)
        tied = arch.tied_embeddings
        self.weight = None if tied else nnx.Param(jnp.zeros(shape, jnp.float32), axes=("vocab", "embed"))
        self.bias = nnx.Param(jnp.zeros(shape[:1], jnp.float32), axes=("vocab",)) if arch.head_bias else None
        self.lora = nnx.data(None)
        self.scale, self.softcap = arch.logit_scale, arch.logit_softcap

    def __call__(
        self, hidden: jax.Array, table: nnx.Param | Quantized, targets: jax.Array | None, temperature: float = 1.0
    ) -> TokenOutputs | jax.Array:
        """The outputs `[N]` for each of the `targets` `[N]`; without targets, logits `[N, V]`, float32.

        Args:
            hidden: `[N, D]`, in the dtype that the product is computed in.
            table: the tokens' `[V, D]`, for a tied head.
            temperature: divides the logits, after all else.
        """
        inputs = self.inputs(hidden, table)
        facts = {"bias": inputs.bias, "scale": inputs.scale, "softcap": inputs.softcap, "temperature": temperature}
        if targets is None:
            return head_logits(inputs.hidden, inputs.weight, **facts)
        return token_outputs(inputs.hidden, inputs.weight, targets, **facts)

    def inputs(self, hidden: jax.Array, table: nnx.Param | Quantized) -> HeadInputs:
        """The arrays that logits are made of, an adapter's part in them; arguments as in the call."""
        weight = stored(table if self.weight is None else self.weight)
        bias = None if self.bias is None else self.bias[...]
        if self.lora is not None:
            hidden, weight, bias = self.lora.joined(hidden, weight, bias)
        return HeadInputs(hidden, weight, bias, self.scale, self.softcap)


class CausalLm(Model):
    """A decoder that gives each token that is read the log-probability of the one after it."""

    needs_valid = False  # pads stand to the right of every token that is read

    def __init__(self, arch: Arch):
        super().__init__(Decoder(arch), LmHead(arch))

    def outputs(
        self,
        hidden: jax.Array,
        targets: jax.Array | None,
        dtype: jnp.dtype,
        dropout_key: jax.Array | None,
        temperature: float,
    ) -> TokenOutputs | jax.Array:
        del dropout_key  # its head has none
        return self.lm_head(hidden.astype(dtype), self.decoder.embed.weight, targets, temperature)

    def head_inputs(self, hidden: jax.Array, dtype: jnp.dtype) -> HeadInputs:
        return self.lm_head.inputs(hidden.astype(dtype), self.decoder.embed.weight)
