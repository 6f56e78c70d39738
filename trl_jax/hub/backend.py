"""The backend of a model: the code that computes, saves and loads it."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from trl_jax.core.outputs import NONE, VirtualTokens
from trl_jax.core.torch_random import TorchParamLayout
from trl_jax.hub.checkpoint import Placement
from trl_jax.hub.freezing import Locations
from trl_jax.hub.heads import HeadName


class Backend(abc.ABC):
    """Everything about a loaded model but its numbers.

    Attributes:
        name: its name in the trainer's log, at `log_level`.
        head: the head that the model has.
        graph: of the module that `models.functional.merge` makes of it and a dict of parameters.
        vocab_size: ids run below it.
        max_positions: the length of the longest text that has positions; None where any has.
        embeddings: paths of the tables that tokens and positions are looked up in.
        tensors: path of a parameter -> a name it has on disk.
        dtypes: tensor on disk -> the dtype it is saved in.
        undecayed: paths of parameters without weight decay whose names do not tell.
        buffers: paths of arrays that are saved but no parameters: they never train.
        infers_lengths: it finds the end of a row by its pads; without a pad id, the end is the last token.
        ignores_types: token_type_ids have no effect.
        takes_packed: it computes texts laid end to end as if each were alone.
        takes_stripes: a text's tokens may be divided over devices.
        causal: tokens do not depend on later ones, so two texts may share what both begin with.
        window: the number of tokens that one sees in the narrowest layer, itself among them; None: all.
        drops_out: it has dropout that training may turn on.
        draws_experts: its routers draw experts at random while it trains.
        takes_noise: noise may be added to its embeddings.
        has_routers: it has routers of experts, whose loads can be summed.
        can_resize: it can embed more tokens than its checkpoint did.
        batch_invariant: the output of a text does not depend on the rows beside it.
        saves_in_background: `save` may run in a thread while the model trains.
        can_freeze: a script may freeze parameters; beside an adapter it says so in its config.
        virtual: the tokens that an adapter puts before each text.
        heads: how many of each kind attention has, which the tensor axis of a mesh must divide; None cannot be divided.
    """

    name: str
    head: HeadName
    log_level: int
    graph: nnx.GraphDef
    vocab_size: int
    max_positions: int | None
    embeddings: frozenset[str]
    tensors: Mapping[str, str]
    dtypes: Mapping[str, str]
    undecayed: frozenset[str]
    infers_lengths: bool
    ignores_types: bool
    takes_packed: bool
    causal: bool
    window: int | None
    drops_out: bool
    takes_noise: bool
    has_routers: bool
    can_resize: bool
    batch_invariant: bool
    saves_in_background: bool
    buffers: frozenset[str] = frozenset()
    takes_stripes: bool = False
    draws_experts: bool = False
    can_freeze: bool = True
    virtual: VirtualTokens = NONE
    heads: Mapping[str, int] | None

    @property
    def main_dtype(self) -> str:
        """The dtype that the first of its tensors is saved in."""
        return next(iter(self.dtypes.values()))

    @property
    def axes(self) -> Mapping[str, tuple[str, ...]]:
        """The logical axes of parameters, by path; a parameter without any is left out."""
        return {}

    @abc.abstractmethod
    def save(self, folder: Path, params: dict[str, jax.Array], config: Any, *, writes: bool = True) -> None:
        """Write config.json and safetensors that transformers loads; not `writes`: only read every parameter."""

    @abc.abstractmethod
    def load(self, folder: Path, seed: int, place: Placement | None = None) -> dict[str, jax.Array]:
        """Read the parameters that `save` wrote; on several devices where `place` says, or not yet."""

    @abc.abstractmethod
    def resized(self, rows: int) -> Backend:
        """The backend of this model with another number of tokens. Raises ValueError where that cannot be."""

    @abc.abstractmethod
    def on_disk(self, params: dict[str, jax.Array]) -> Iterator[tuple[str, np.ndarray]]:
        """Each tensor under its name on disk, float32."""

    def named(self, params: dict[str, jax.Array]) -> Iterator[tuple[str, np.ndarray]]:
        """Each parameter under its name in PyTorch, float32: by default that on disk."""
        return self.on_disk(params)

    def torch_param_layout(self) -> TorchParamLayout:
        """The places in torch's tensors of the arrays that train."""
        return TorchParamLayout()

    def locations(self, params: dict[str, jax.Array]) -> Locations:
        """Name on disk -> the paths of the arrays that it lies in, each with its index there."""
        return {name: [(name, ())] for name in params}

    def size_of(self, path: str, array: jax.Array) -> int:
        """The number of the model's parameters that this array stands for."""
        return array.size

    def floats(self, path: str, array: jax.Array) -> jax.Array:
        """The array; as floats where it holds their bits."""
        return array

    def weight(self, arrays: dict[str, jax.Array], path: str) -> jax.Array:
        """The parameter at a path, float32, in whichever format it is held."""
        return arrays[path]
