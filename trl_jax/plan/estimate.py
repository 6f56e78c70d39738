"""Estimate memory and FLOPs of a step from shapes. `trl-jax plan` prints them next to the compiler's figures."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding

from trl_jax.data.batch import Batch
from trl_jax.models.decoder import in_a_stack
from trl_jax.nn.attention.attention import QUERY_BLOCK
from trl_jax.nn.recurrent import CHUNK
from trl_jax.plan.chips import Chip
from trl_jax.plan.compile import Compiled

FLOAT32 = 4  # bytes


# Memory


class Memory(NamedTuple):
    """Bytes per device.

    gradients: doubled if a step sums several passes.
    copies: the layers' weights cast to the compute dtype.
    gathered: one layer's weights all-gathered over fsdp, and their gradients.
    kept: activations saved for the backward pass, and inputs shared by all layers.
    working: activations of one layer during its backward pass, including recomputed ones.
    outside: all-gathered weights outside the layers (embedding, head). Nothing of the layers is alive at that time.
    """

    parameters: int
    moments: int
    batch: int
    gradients: int
    copies: int
    gathered: int
    kept: int
    working: int
    outside: int

    @property
    def arguments(self) -> int:
        return self.parameters + self.moments + self.batch

    @property
    def activations(self) -> int:
        return self.kept + self.working

    @property
    def temporary(self) -> int:
        return self.gradients + max(self.copies + self.gathered + self.activations, self.outside)

    @property
    def peak(self) -> int:
        """Peak bytes."""
        return self.arguments + self.temporary


class StepArguments(NamedTuple):
    """The arguments of a step, as shapes with shardings."""

    params: dict[str, jax.ShapeDtypeStruct]
    state: Any
    batch: Batch
    frozen: dict[str, jax.ShapeDtypeStruct]

    @property
    def layers(self) -> list[tuple[str, jax.ShapeDtypeStruct]]:
        return [(path, leaf) for path, leaf in (self.frozen | self.params).items() if in_a_stack(path)]


class Pass(NamedTuple):
    """The (packed) rows that one device computes at once, `[rows, length]`.

    passes: per step.
    sharing: number of devices that heads and channels are sharded over.
    striped: number of devices that tokens are sharded over.
    """

    passes: int
    rows: int
    length: int
    sharing: int = 1
    striped: int = 1

    @property
    def tokens(self) -> int:
        """Tokens of a pass that one device computes."""
        return self.rows * self.length // self.striped


def on_device(leaves: Any) -> int:
    """Bytes per device of shapes with shardings."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(leaves)
    )


def memory(
    arguments: StepArguments,
    gradients: int,
    one: Pass,
    arch: Any,
    maps: Sequence[Map],
    *,
    dtype: str,
    remat: bool | str,
    platform: str,
) -> Memory:
    """The memory of a step. gradients: bytes per device. remat: as in `models.stack`."""
    width = 2 if dtype == "bfloat16" else FLOAT32
    outputs = outputs_of_layer(maps, arch) // one.sharing  # activations per token and layer
    products = one.tokens * outputs * width
    kept = one.tokens * arch.hidden_size * FLOAT32 + (0 if remat else products)
    alone = _weights(arguments.batch, one, arch, width) + (
        products if remat else 0
    )  # of a layer that is not recomputed
    outside = {path: leaf for path, leaf in arguments.params.items() if not in_a_stack(path)}
    return _common(arguments, one, arch, maps, width)._replace(
        gradients=gradients * min(one.passes, 2),
        gathered=gathered(arguments, arch, width, gradients=True),
        kept=(2 if remat == "offloaded" else arch.num_layers)
        * kept  # one being copied to the host, one being copied back
        + (layers_alone(arch) if platform == "cpu" else 0) * alone
        + 2 * _between_layers(one, arch, width),
        working=2 * (products + _texts(arguments.batch, one, arch, width))
        + _scores(arguments.batch, one, arch, width)
        + _keys(one, arch, width),
        outside=_whole(outside.values()),
    )


def evaluation_memory(arguments: StepArguments, one: Pass, arch: Any, maps: Sequence[Map], *, dtype: str) -> Memory:
    """The memory of an evaluation pass during training, including the optimizer state."""
    width = 2 if dtype == "bfloat16" else FLOAT32
    outputs = outputs_of_layer(maps, arch) // one.sharing
    outside = {path: leaf for path, leaf in (arguments.frozen | arguments.params).items() if not in_a_stack(path)}
    return _common(arguments, one, arch, maps, width)._replace(
        gathered=gathered(arguments, arch, width, gradients=False),
        kept=_between_layers(one, arch, width),
        working=one.tokens * outputs * width
        + _texts(arguments.batch, one, arch, width)
        + _block(arguments.batch, one, arch, width)
        + _keys(one, arch, width),
        outside=_whole(outside.values()),
    )


def outputs_of_layer(maps: Sequence[Map], arch: Any) -> int:
    """Outputs of a layer's matrices per token, averaged over layers."""
    return sum(each.layers * each.used * each.outputs for each in maps) // arch.num_layers


def layers_alone(arch: Any) -> int:
    """Number of layers whose neighbors are of a different kind, so that their scan has one iteration.

    XLA unrolls such a loop. On CPUs it then merges the recomputation that `jax.checkpoint` asks for with the forward
    pass, so that all activations of these layers are saved, including attention weights.
    """
    counts = [run.count for run in arch.runs] if "kinds" in vars(arch) else [arch.num_layers]
    return sum(count == 1 for count in counts)


def _between_layers(one: Pass, arch: Any, width: int) -> int:
    """Bytes of what layers read besides the residual stream: per-layer embeddings, computed for all layers at once, and
    keys and values that later layers reuse."""
    if "kinds" not in vars(arch):
        return 0
    own = 0 if arch.layer_embedding is None else arch.num_layers * arch.layer_embedding.channels
    heads = [arch.heads_of(kind) for kind in arch.kinds or () if kind.reused]
    reused = sum(2 * each.count * each.channels for each in heads) // one.sharing
    return one.tokens * (own + reused) * width


def _common(arguments: StepArguments, one: Pass, arch: Any, maps: Sequence[Map], width: int) -> Memory:
    """The memory that a step and an evaluation have in common; the other fields are zero."""
    floats = [leaf for _, leaf in arguments.layers if leaf.dtype == np.float32]
    return Memory(
        parameters=on_device((arguments.params, arguments.frozen)),
        moments=on_device(arguments.state),
        batch=on_device(arguments.batch),
        gradients=0,
        copies=on_device(floats) * width // FLOAT32 if width < FLOAT32 else 0,
        gathered=0,
        kept=0,
        working=0,
        outside=0,
    )


def gathered(arguments: StepArguments, arch: Any, width: int, *, gradients: bool) -> int:
    """Bytes of one layer's all-gathered weights, and of the gradients of those that train."""
    total = 0
    for path, leaf in arguments.layers:
        stored = leaf.dtype.itemsize
        of_each = min(stored, width) + (FLOAT32 if gradients and path in arguments.params else 0)
        total += _whole([leaf]) // stored * of_each
    return total // arch.num_layers


def _whole(leaves: Iterable[Any]) -> int:
    """Bytes of the weights that are sharded over fsdp, after all-gathering."""
    return sum(
        on_device(leaf) * leaf.sharding.mesh.shape["fsdp"]
        for leaf in leaves
        if isinstance(leaf.sharding, NamedSharding) and "fsdp" in leaf.sharding.spec
    )


def _weights(batch: Batch, one: Pass, arch: Any, width: int) -> int:
    """Bytes of one layer's attention weights on padded rows, in float32 and in the compute dtype.

    Zero if attention runs along packed rows, where only one block is in memory at a time.
    """
    rows, length = _rows(batch, one)
    heads = rows * arch.num_heads // one.sharing // one.striped
    return heads * keys_of_row(length, causal=True) * (FLOAT32 + width)


def _scores(batch: Batch, one: Pass, arch: Any, width: int) -> int:
    """Bytes of one layer's attention weights on padded rows, and of the gradients of one block of queries."""
    rows, length = _rows(batch, one)
    heads = rows * arch.num_heads // one.sharing // one.striped
    return _weights(batch, one, arch, width) + 2 * heads * QUERY_BLOCK * length * FLOAT32


def _block(batch: Batch, one: Pass, arch: Any, width: int) -> int:
    """Bytes of the scores of one block of queries on padded rows, in a forward pass."""
    rows, length = _rows(batch, one)
    return row_block(rows * arch.num_heads // one.sharing // one.striped, length, width)


def row_block(heads: int, length: int, width: int) -> int:
    """Bytes of the scores of one block of queries. heads: of all rows together."""
    return heads * min(QUERY_BLOCK, length) * length * (FLOAT32 + width)


def _rows(batch: Batch, one: Pass) -> tuple[int, int]:
    """Number and length of the rows that attention reads on a device; (0, 0) if it runs along packed rows."""
    if batch.packed is None:
        return one.rows, one.length
    if batch.packed.texts is None:
        return 0, 0
    *_, count, length = batch.packed.texts.places.shape
    return one.rows * count, length


def _texts(batch: Batch, one: Pass, arch: Any, width: int) -> int:
    """Bytes of one layer's queries, keys, values and outputs, if packed texts are unpacked to rows for attention."""
    if batch.packed is None or batch.packed.texts is None:
        return 0
    heads = arch.num_heads + arch.num_key_heads
    return 2 * math.prod(_rows(batch, one)) * heads * channels_of(arch) // arch.num_heads // one.sharing * width


def _keys(one: Pass, arch: Any, width: int) -> int:
    """Bytes of one layer's keys and values of all tokens, and their gradients, if tokens are sharded."""
    if one.striped == 1:
        return 0
    return 4 * one.rows * one.length * arch.num_key_heads // one.sharing * arch.head_dim * width


# FLOPs


class Map(NamedTuple):
    """A matrix `[outputs, inputs]` of each of `layers` layers.

    used: how many copies a token goes through; top_k for experts, else 1.
    trains: whether it has a gradient.
    """

    outputs: int
    inputs: int
    used: int
    trains: bool
    layers: int

    @property
    def size(self) -> int:
        """Multiplications per token, in all layers."""
        return self.layers * self.used * self.outputs * self.inputs


def maps_of(shapes: Mapping[str, Any], arch: Any, trained: Collection[str]) -> list[Map]:
    """The matrices of the layers: stacked weights `[L, out, in]` or, for experts, `[L, E, out, in]`; and the projection
    that computes per-layer embeddings.

    Args:
        arch: the model's `Arch`.
        shapes: path -> array or shape.
        trained: paths of the parameters that train.
    """
    stacked = [(path, leaf) for path, leaf in shapes.items() if in_a_stack(path) and leaf.ndim in (3, 4)]
    matrices = [
        (path, leaf) for path, leaf in stacked if not path.endswith("_bias")
    ]  # biases of experts have three axes too
    maps = [Map(*leaf.shape[-2:], _used(path, leaf, arch), path in trained, leaf.shape[0]) for path, leaf in matrices]
    before = [(path, leaf) for path, leaf in shapes.items() if path.endswith(".layer_embed.projection.weight")]
    return maps + [Map(*leaf.shape, 1, path in trained, 1) for path, leaf in before]


def _used(path: str, leaf: Any, arch: Any) -> int:
    of_experts = leaf.ndim == 4 and (
        ".mlp." in path or ".moe." in path
    )  # other weights with four axes belong to convolutions
    return arch.experts.top_k if of_experts else 1


def flops(maps: Sequence[Map], batch: Batch, arch: Any, *, causal: bool, remat: bool | str) -> int:
    """FLOPs of a step's matrix products on all devices together.

    Forward: two per weight and token (Kaplan et al. 2020), and two per product of a query with a key or a value.
    Backward: twice that, or once for frozen weights; and the forward pass again with remat. Attention is always
    recomputed because its weights are never saved: all of it on padded rows, only the scores on packed rows. Scans of
    recurrent layers are always recomputed too.
    """
    times = sum(((3 if each.trains else 2) + bool(remat)) * each.size for each in maps)
    forward = 2 * times * math.prod(batch.tokens.shape)
    attended, forward = _attention_flops(batch, arch, causal), forward + 4 * _recurrent_flops(batch, arch)
    if batch.packed is None:
        return forward + 4 * attended
    return forward + (9 if remat else 7) * attended // 2


def reference_flops(maps: Sequence[Map], batch: Batch, arch: Any, *, causal: bool, heads: int = 1) -> int:
    """FLOPs of a reference model's forward pass over the batch of a step, on all devices together.

    Args:
        maps, arch, causal: of the reference model.
        heads: how often its head is computed.
    """
    times = sum(each.size for each in maps)
    layers = 2 * times * math.prod(batch.tokens.shape) + _attention_flops(batch, arch, causal)
    layers += _recurrent_flops(batch, arch)
    return layers + 2 * heads * _targets(batch) * arch.vocab_size * arch.head_inputs


def _attention_flops(batch: Batch, arch: Any, causal: bool) -> int:
    """FLOPs of attention in a forward pass, without projections."""
    return 4 * attended_keys(batch, causal) * _attending_channels(arch)


def _attending_channels(arch: Any) -> int:
    """Channels of all query heads, summed over the layers with attention."""
    if "kinds" not in vars(arch) or arch.kinds is None:
        return arch.num_layers * channels_of(arch)
    attending = (kind for kind in arch.kinds if attends(kind))
    return sum(arch.num_heads * arch.heads_of(kind).channels for kind in attending)


def _recurrent_flops(batch: Batch, arch: Any) -> int:
    """FLOPs of the scans of recurrent layers in a forward pass."""
    packed, chunk = batch.packed, min(CHUNK, batch.tokens.shape[-1])
    states = 1 if packed is None or (packed.prompt is None and packed.context is None) else 2
    tokens = math.prod(batch.tokens.shape) // batch.tokens.shape[-1] * (-(-batch.tokens.shape[-1] // chunk) * chunk)
    delta, space = (vars(arch).get(name) for name in ("gated_delta", "state_space"))
    of_token = 0 if delta is None else layers_with(arch, "delta_net") * _of_delta(delta, chunk, states)
    return tokens * (of_token if space is None else layers_with(arch, "mamba") * _of_state_space(space, chunk, states))


def _of_delta(facts: Any, chunk: int, states: int) -> int:
    """FLOPs per token of the gated delta rule: products within a chunk, the triangular solve of each head (half a
    product), and reads of the state by keys and queries and its update."""
    within = chunk * (3 * facts.value_dim + states * facts.key_dim)
    of_value_head = within + states * 6 * facts.key_dim * facts.value_dim
    return facts.key_heads * 4 * chunk * facts.key_dim + facts.value_heads * of_value_head


def _of_state_space(facts: Any, chunk: int, states: int) -> int:
    """FLOPs per token of a state space layer: products within a chunk, and reading and updating the state."""
    of_head = 2 * facts.head_dim * (chunk + 2 * states * facts.state_dim)
    return facts.groups * 2 * chunk * facts.state_dim + facts.heads * of_head


def _targets(batch: Batch) -> int:
    return int(np.sum(np.asarray(batch.targets) >= 0))


def head_flops(batch: Batch, arch: Any, trained: Mapping[str, Any]) -> int:
    """FLOPs of a language model's head in a step, on all devices together; 0 for a score head, which is negligible.

    Each target takes four products with the vocabulary: logits, their recomputation in the backward pass, the gradient
    of the hidden state and, unless the head is frozen, the gradient of its weights.

    Args:
        trained: path -> parameter, of those that train.
    """
    if batch.targets is None:
        return 0
    table = (arch.vocab_size, arch.head_inputs)
    products = 4 if any(leaf.shape == table for leaf in trained.values()) else 3
    return 2 * products * _targets(batch) * math.prod(table)


def attention_layers(arch: Any) -> int:
    """Number of layers with attention."""
    if "kinds" not in vars(arch) or arch.kinds is None:
        return arch.num_layers
    return layers_with(arch, "attention")


def attends(kind: Any) -> bool:
    """Whether a layer of this kind has attention, alone or together with another mixer."""
    return kind.mixer is not None and "attention" in kind.mixer.split("+")


def layers_with(arch: Any, mixer: str) -> int:
    """Number of layers with this mixer, alone or together with another. `arch.kinds` must not be None."""
    return sum(kind.mixer is not None and mixer in kind.mixer.split("+") for kind in arch.kinds)


def channels_of(arch: Any) -> int:
    """Channels of all query heads together."""
    return arch.hidden_size if "head_dim" not in vars(arch) else arch.num_heads * arch.head_dim


def attended_keys(batch: Batch, causal: bool) -> int:
    """Number of (query, key) products in a step: per block of queries on padded rows, exact on packed rows."""
    *rows, length = batch.tokens.shape
    if batch.packed is not None:
        products = np.asarray(batch.packed.end) - np.asarray(batch.packed.first)
        if batch.packed.context is not None:
            products = products + np.asarray(batch.packed.context_end) - np.asarray(batch.packed.context)
        if not causal:  # every token attends to all n, not only to those up to itself
            return int(2 * products.sum() - (products > 0).sum())
        return int(products.sum())
    return math.prod(rows) * keys_of_row(length, causal)


def keys_of_row(length: int, causal: bool) -> int:
    """Number of (query, key) products of one padded row, per block of queries."""
    ends = [min(start + QUERY_BLOCK, length) for start in range(0, length, QUERY_BLOCK)]
    return sum((end - start) * (end if causal else length) for start, end in zip([0, *ends], ends, strict=False))


class Bound(NamedTuple):
    """Lower bounds in seconds on the time of a step, from the chip's peak compute, memory bandwidth and links."""

    compute: float
    memory: float
    links: float

    @property
    def step(self) -> float:
        return max(self)


def bound(chip: Chip, compiled: Compiled, outputs: int) -> Bound:
    """The bound of a compiled step whose results take `outputs` bytes per device.

    It assumes products at peak bfloat16 speed; that arguments are read once, results written once, and temporaries
    both; and collectives that use all links at once, in one direction.
    """
    moved = compiled.arguments + outputs + 2 * compiled.temporary
    sent = sum(one.sent for one in compiled.cost.collectives)
    return Bound(compiled.cost.flops / chip.flops, moved / chip.bandwidth, sent / (chip.links / 2))
