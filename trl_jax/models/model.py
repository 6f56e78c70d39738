"""Models: a trunk with a head, and conversion between modules and flat parameter dicts."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from trl_jax.core.outputs import Images, PrecomputedFeatures, TokenOutputs
from trl_jax.models.adapters import AdaptedGraph, VirtualGraph
from trl_jax.models.arch import Arch, EncoderArch
from trl_jax.models.decoder import Decoder, Features, apply
from trl_jax.models.encoder import Encoder
from trl_jax.models.vision import Vision
from trl_jax.nn.head import HeadInputs
from trl_jax.nn.layers import ACTIVATIONS, Norm
from trl_jax.nn.linear import EncodedWeight, Linear, Lora, Stream, dropout_or_none, stored

# Modules as a static graph and a flat dict of arrays, keyed by dotted path


def abstract(make: Callable[[], nnx.Module]) -> tuple[nnx.GraphDef, dict[str, jax.ShapeDtypeStruct]]:
    """The graph of a module and the shape of each parameter, without allocating parameters."""
    graph, state = nnx.split(nnx.eval_shape(make))
    return graph, {
        ".".join(map(str, path)): jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        for path, leaf in nnx.to_flat_state(state)
    }


def logical_axes(make: Callable[[], nnx.Module]) -> dict[str, tuple[str, ...]]:
    """The logical axes of each parameter, by path (see `trl_jax.nn`). Parameters without logical axes are omitted."""
    state = nnx.to_flat_state(nnx.split(nnx.eval_shape(make))[1])
    named = ((".".join(map(str, path)), leaf.get_metadata()) for path, leaf in state)
    return {path: metadata["axes"] for path, metadata in named if "axes" in metadata}


Graph = nnx.GraphDef | AdaptedGraph | VirtualGraph


def merge(graph: Graph, params: dict[str, jax.Array], dropout_key: jax.Array | None = None) -> nnx.Module:
    """Build the module from its graph and parameters. `dropout_key` enables dropout in adapters."""
    if isinstance(graph, AdaptedGraph | VirtualGraph):
        graph, params = graph.installed(params, dropout_key)
    nested: dict = {}
    for path, array in params.items():
        *parents, name = path.split(".")
        level = nested
        for parent in parents:
            level = level.setdefault(parent, {})
        level[name] = array
    return nnx.merge(graph, nested)


# Models


class Model(nnx.Module):
    """A trunk, which computes hidden states at the `reads`, and a head, which maps them to outputs.

    Parameter paths begin with the NAME of the trunk or head.
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
        """The outputs of the head: scores `[N]`, or for a language model `TokenOutputs` if there are targets,
        `HeadInputs` with `before_head`, and logits `[N, V]` otherwise.

        Args:
            tokens, positions: int32 `[R, T]`; positions may be `[R, T, A]` if ropes have A axes.
            reads: int32 `[N]`, flat indices (row * T + column) of the tokens whose outputs are computed.
            targets: int32 `[N]`, the next-token id at each read, -1 for none; ignored by score heads.
            dtype: compute dtype of the layers and the language model head.
            dropout_key: enables dropout, at the rates of the config.
            temperature: divides the logits of a language model head; ignored by score heads.
            head_dtype: compute dtype of the language model head; None: `dtype`.
            before_head: return the inputs of the language model head instead of computing logits.
            options: more options of the trunk. With `router_token_count` `[R, T]`, a model with experts returns
                `(outputs, RouterSums)`.
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
        """The outputs of the head for hidden states `[N, D]`; arguments as in `__call__`."""

    def head_inputs(self, hidden: jax.Array, dtype: jnp.dtype) -> HeadInputs:
        """The inputs of the language model head, in this dtype; TypeError if the model has a score head."""
        raise TypeError(f"A {type(self).__name__} has no logits over a vocabulary: it has a score head.")


# Reward models


class ScoreHead(Linear):
    """Hidden states `[N, D]` to scores `[N]`, in float32, so that scores are not rounded in bfloat16 training."""

    NAME = "score"

    def __init__(self, features: int):
        super().__init__(features, 1, axes=("", "embed"))

    def __call__(self, hidden: jax.Array, dropout_key: jax.Array | None = None) -> jax.Array:
        del dropout_key  # no dropout here
        return super().__call__(hidden.astype(jnp.float32))[:, 0]


class EncoderHead(nnx.Module):
    """Pooled texts `[N, D]` to scores `[N]`, in the dtype of the input: a dense layer and an output, configured by
    `arch.head`."""

    NAME = "head"

    def __init__(self, arch: EncoderArch):
        self.facts = arch.head
        self.dense = Linear(arch.hidden_size, arch.hidden_size, bias=arch.head.dense_bias)
        self.norm = Norm(arch.hidden_size, kind=arch.norm, eps=arch.norm_eps) if arch.head.normed else None
        self.out = Linear(arch.hidden_size, 1, bias=True, axes=("", "embed"))

    def __call__(self, pooled: jax.Array, dropout_key: jax.Array | None = None) -> jax.Array:
        spec = self.facts
        pooled = apply(dropout_or_none(spec.dropout_before, dropout_key, Stream.BEFORE_HEAD), pooled)
        pooled = apply(self.norm, ACTIVATIONS[spec.activation](self.dense(pooled)))
        return self.out(apply(dropout_or_none(spec.dropout_after, dropout_key, Stream.AFTER_HEAD), pooled))[:, 0]


class Scorer(Model):
    """A trunk with a score head."""

    def outputs(
        self,
        hidden: jax.Array,
        targets: jax.Array | None,
        dtype: jnp.dtype,
        dropout_key: jax.Array | None,
        temperature: float,
    ) -> jax.Array:
        del targets, dtype, temperature
        return vars(self)[self.head_name](hidden, dropout_key)


class SequenceScorer(Scorer):
    """A decoder with a score head: one score per read."""

    needs_valid = False  # causal: no token attends to right-padding

    def __init__(self, arch: Arch):
        super().__init__(Decoder(arch), ScoreHead(arch.head_inputs))


class EncoderScorer(Scorer):
    """An encoder with a score head: one score per text that is read."""

    needs_valid = True  # bidirectional: without a mask, tokens would attend to right-padding

    def __init__(self, arch: EncoderArch):
        super().__init__(Encoder(arch), EncoderHead(arch))


# Causal language models


class LmHead(nnx.Module):
    """Hidden states to log-probabilities of targets, or to logits over the vocabulary.

    A tied head has no weight and uses the embedding table. `lora` is an adapter of the weight.
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
        self, hidden: jax.Array, table: nnx.Param | EncodedWeight, targets: jax.Array | None, temperature: float = 1.0
    ) -> TokenOutputs | jax.Array:
        """`TokenOutputs` for the `targets` `[N]`; without targets, logits `[N, V]`, float32.

        Args:
            hidden: `[N, D]`, in the dtype in which to compute the matrix product.
            table: the embedding table `[V, D]`, used by a tied head.
            temperature: divides the final logits.
        """
        inputs = self.inputs(hidden, table)
        return inputs.logits(temperature) if targets is None else inputs.token_outputs(targets, temperature)

    def inputs(self, hidden: jax.Array, table: nnx.Param | EncodedWeight) -> HeadInputs:
        """The arrays from which logits are computed, including the adapter; arguments as in `__call__`."""
        weight = stored(table if self.weight is None else self.weight)
        bias = None if self.bias is None else self.bias[...]
        inner = outer = None
        if self.lora is not None:
            bias = self.lora.with_bias(bias)
            if self.lora.magnitude is None:
                inner, outer = self.lora.factors(hidden)
            else:
                hidden, weight = self.lora.joined(hidden, weight)
        return HeadInputs(hidden, weight, bias, self.scale, self.softcap, inner, outer)


class CausalLm(Model):
    """A decoder that predicts the next token at each read."""

    needs_valid = False  # causal: no token attends to right-padding

    def __init__(self, arch: Arch):
        super().__init__(Decoder(arch), LmHead(arch))
        self.vision = None if arch.vision is None else Vision(arch.vision)

    def __call__(
        self, *inputs: Any, images: Images | PrecomputedFeatures | Features | None = None, **options: Any
    ) -> Any:
        """As `Model.__call__`.

        Args:
            images: the images of the batch or their precomputed features; None for text-only batches.
        """
        if images is None:
            return super().__call__(*inputs, **options)
        return super().__call__(*inputs, features=self.features(images, **options), **options)

    def features(
        self,
        images: Images | PrecomputedFeatures | Features,
        *,
        dtype: jnp.dtype = jnp.float32,
        remat: bool | str = False,
        **options: Any,
    ) -> Features:
        """The features of images; options as in `Model.__call__`."""
        del options
        if isinstance(images, PrecomputedFeatures):
            values, deep = (None if array is None else array.astype(jnp.float32) for array in images[:2])
            return Features(values, images.at, None if deep is None else deep.swapaxes(0, 1))
        return images if isinstance(images, Features) else self.vision(images, dtype=dtype, remat=remat)

    def outputs(
        self,
        hidden: jax.Array,
        targets: jax.Array | None,
        dtype: jnp.dtype,
        dropout_key: jax.Array | None,
        temperature: float,
    ) -> TokenOutputs | jax.Array:
        del dropout_key  # no dropout in this head
        return self.lm_head(hidden.astype(dtype), self.decoder.embed.weight, targets, temperature)

    def head_inputs(self, hidden: jax.Array, dtype: jnp.dtype) -> HeadInputs:
        return self.lm_head.inputs(hidden.astype(dtype), self.decoder.embed.weight)
