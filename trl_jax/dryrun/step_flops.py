"""FLOPs of a step by arithmetic, which `trl-jax plan` prints next to the compiler's figures."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from trl_jax.core.chips import Chip
from trl_jax.data.layout.batch import Batch
from trl_jax.dryrun.compiler import Compiled
from trl_jax.models.stack import in_a_stack
from trl_jax.nn.attention.padded import QUERY_BLOCK
from trl_jax.nn.recurrent.chunks import CHUNK


class Map(NamedTuple):
    """A matrix `[outputs, inputs]` of so many layers. used: how many of it a token goes through, top_k for experts.
    trains: whether it has a gradient."""

    outputs: int
    inputs: int
    used: int
    trains: bool
    layers: int

    @property
    def size(self) -> int:
        """Numbers that a token is multiplied by, in all layers."""
        return self.layers * self.used * self.outputs * self.inputs


def maps_of(shapes: Mapping[str, Any], arch: Any, trained: Collection[str]) -> list[Map]:
    """The layers' matrices among these shapes by path: stacked weights `[L, out, in]` or, of experts, `[L, E, out,
    in]`; and the one that makes the embeddings of all layers.

    Args:
        arch: the model's `Arch`.
        trained: the paths that train.
    """
    stacked = [(path, leaf) for path, leaf in shapes.items() if in_a_stack(path) and leaf.ndim in (3, 4)]
    matrices = [(path, leaf) for path, leaf in stacked if not path.endswith("_bias")]  # those that experts have
    maps = [Map(*leaf.shape[-2:], _used(path, leaf, arch), path in trained, leaf.shape[0]) for path, leaf in matrices]
    before = [(path, leaf) for path, leaf in shapes.items() if path.endswith(".layer_embed.projection.weight")]
    return maps + [Map(*leaf.shape, 1, path in trained, 1) for path, leaf in before]


def _used(path: str, leaf: Any, arch: Any) -> int:
    of_experts = leaf.ndim == 4 and (".mlp." in path or ".moe." in path)  # others with four axes are of convolutions
    return arch.experts.top_k if of_experts else 1


def flops(maps: Sequence[Map], batch: Batch, arch: Any, *, causal: bool, remat: bool | str) -> int:
    """FLOPs of a step's matrix products on all devices together.

    Forward, two for each weight and token (Kaplan et al. 2020) and two for each product of a query with a key or a
    value. Backward, twice that, or once for frozen weights; and once more where layers are computed again. Attention is
    always computed again, because its weights are never kept: wholly on padded rows, the scores alone on packed rows.
    Scans of layers with a state are, too.
    """
    times = sum(((3 if each.trains else 2) + bool(remat)) * each.size for each in maps)
    forward = 2 * times * math.prod(batch.tokens.shape)
    attended, forward = _attention_flops(batch, arch, causal), forward + 4 * _recurrent_flops(batch, arch)
    if batch.packed is None:
        return forward + 4 * attended
    return forward + (9 if remat else 7) * attended // 2


def reference_flops(maps: Sequence[Map], batch: Batch, arch: Any, *, causal: bool, heads: int = 1) -> int:
    """FLOPs of a reference's forward pass with its head over the batch of a step, on all devices together.

    Args:
        maps, arch, causal: the reference's.
        heads: how often its head is computed.
    """
    times = sum(each.size for each in maps)
    layers = 2 * times * math.prod(batch.tokens.shape) + _attention_flops(batch, arch, causal)
    layers += _recurrent_flops(batch, arch)
    return layers + 2 * heads * _targets(batch) * arch.vocab_size * arch.head_inputs


def _attention_flops(batch: Batch, arch: Any, causal: bool) -> int:
    """FLOPs of a forward pass's products of queries with keys and values."""
    return 4 * attended_keys(batch, causal) * _attending_channels(arch)


def _attending_channels(arch: Any) -> int:
    """Channels of all query heads of all layers."""
    if "kinds" not in vars(arch) or arch.kinds is None:
        return arch.num_layers * channels_of(arch)
    attending = (kind for kind in arch.kinds if attends(kind))
    return sum(arch.num_heads * arch.heads_of(kind).channels for kind in attending)


def _recurrent_flops(batch: Batch, arch: Any) -> int:
    """FLOPs of a forward pass's scans of layers with a state."""
    packed, chunk = batch.packed, min(CHUNK, batch.tokens.shape[-1])
    states = 1 if packed is None or (packed.prompt is None and packed.context is None) else 2
    tokens = math.prod(batch.tokens.shape) // batch.tokens.shape[-1] * (-(-batch.tokens.shape[-1] // chunk) * chunk)
    delta, space = (vars(arch).get(name) for name in ("gated_delta", "state_space"))
    of_token = 0 if delta is None else layers_with(arch, "delta_net") * _of_delta(delta, chunk, states)
    return tokens * (of_token if space is None else layers_with(arch, "mamba") * _of_state_space(space, chunk, states))


def _of_delta(facts: Any, chunk: int, states: int) -> int:
    """FLOPs a token of a gated delta rule: products within a chunk, the triangular system of each head (half of a
    product), and the states that are read by keys and queries and written."""
    within = chunk * (3 * facts.value_dim + states * facts.key_dim)
    of_value_head = within + states * 6 * facts.key_dim * facts.value_dim
    return facts.key_heads * 4 * chunk * facts.key_dim + facts.value_heads * of_value_head


def _of_state_space(facts: Any, chunk: int, states: int) -> int:
    """FLOPs a token of a state space: products within a chunk, and the states that are read and written."""
    of_head = 2 * facts.head_dim * (chunk + 2 * states * facts.state_dim)
    return facts.groups * 2 * chunk * facts.state_dim + facts.heads * of_head


def _targets(batch: Batch) -> int:
    return int(np.sum(np.asarray(batch.targets) >= 0))


def head_flops(batch: Batch, arch: Any, trained: Mapping[str, Any]) -> int:
    """FLOPs of a language model's head in a step, on all devices together; 0 under a score head, which has one row.

    At each target four products with the vocabulary: logits, the same again in the backward pass, the gradient of the
    hidden state and, unless the table is frozen, that of the table.

    Args:
        trained: the parameters that train, by path.
    """
    if batch.targets is None:
        return 0
    table = (arch.vocab_size, arch.head_inputs)
    products = 4 if any(leaf.shape == table for leaf in trained.values()) else 3
    return 2 * products * _targets(batch) * math.prod(table)


def attention_layers(arch: Any) -> int:
    """Layers that attend."""
    if "kinds" not in vars(arch) or arch.kinds is None:
        return arch.num_layers
    return layers_with(arch, "attention")


def attends(kind: Any) -> bool:
    """Whether a layer of this kind attends, alone or beside another mixer."""
    return kind.mixer is not None and "attention" in kind.mixer.split("+")


def layers_with(arch: Any, mixer: str) -> int:
    """Layers with this mixer, alone or beside another, of a model that names the kinds of its layers."""
    return sum(kind.mixer is not None and mixer in kind.mixer.split("+") for kind in arch.kinds)


def channels_of(arch: Any) -> int:
    """Channels of all query heads together."""
    return arch.hidden_size if "head_dim" not in vars(arch) else arch.num_heads * arch.head_dim


def attended_keys(batch: Batch, causal: bool) -> int:
    """Number of (query, key) products of a step: on padded rows by blocks of queries, on packed rows exactly."""
    *rows, length = batch.tokens.shape
    if batch.packed is not None:
        products = np.asarray(batch.packed.end) - np.asarray(batch.packed.first)
        if batch.packed.context is not None:
            products = products + np.asarray(batch.packed.context_end) - np.asarray(batch.packed.context)
        if not causal:  # each of n tokens attends to all n, not only to those up to itself
            return int(2 * products.sum() - (products > 0).sum())
        return int(products.sum())
    return math.prod(rows) * keys_of_row(length, causal)


def keys_of_row(length: int, causal: bool) -> int:
    """Number of (query, key) products of one padded row, block by block of queries."""
    ends = [min(start + QUERY_BLOCK, length) for start in range(0, length, QUERY_BLOCK)]
    return sum((end - start) * (end if causal else length) for start, end in zip([0, *ends], ends, strict=False))


class Bound(NamedTuple):
    """Lower bounds on the seconds of a step by a chip's published figures: of compute, memory and links."""

    compute: float
    memory: float
    links: float

    @property
    def step(self) -> float:
        return max(self)


def bound(chip: Chip, compiled: Compiled, outputs: int) -> Bound:
    """The bound of a compiled step whose results take `outputs` bytes a device.

    Products run at the peak of bfloat16; arguments are read once, results written once, temporaries both; collectives
    use all links at once, one direction each.
    """
    moved = compiled.arguments + outputs + 2 * compiled.temporary
    sent = sum(one.sent for one in compiled.cost.collectives)
    return Bound(compiled.cost.flops / chip.flops, moved / chip.bandwidth, sent / (chip.links / 2))
