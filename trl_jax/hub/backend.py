"""The interface of a model backend: the code that computes, saves and loads one model."""

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
    """Everything about a loaded model except its parameters.

    Attributes:
        name: name of the backend in the trainer's log, logged at `log_level`.
        head: which head the model has.
        graph: module graph that `models.model.merge` combines with a dict of parameters.
        vocab_size: token ids are below this number.
        max_positions: longest supported text in tokens; None if there is no limit.
        embeddings: paths of the token and position embeddings.
        tensors: path of a parameter -> a name of it on disk.
        dtypes: tensor on disk -> dtype that it is saved in.
        undecayed: paths of parameters without weight decay that cannot be recognized by their names.
        buffers: paths of arrays that are saved but never trained.
        infers_lengths: whether it finds the end of a row by its padding; without a pad id, the last token is the end.
        ignores_types: whether token_type_ids have no effect.
        takes_packed: whether several texts can be packed into a row without influencing each other.
        takes_stripes: whether the tokens of a text can be split over devices.
        causal: whether tokens do not depend on later ones, so that texts can share a common prefix.
        window: attention window of the narrowest layer in tokens, including the current one; None for full attention.
        drops_out: whether it has dropout that training may enable.
        draws_experts: whether its routers sample experts during training.
        takes_noise: whether noise can be added to its embeddings.
        has_routers: whether it has expert routers whose loads can be summed.
        can_resize: whether the token embedding can be resized.
        batch_invariant: whether the output of a text is independent of the other rows in the batch.
        saves_in_background: whether `save` may run in a thread while the model trains.
        can_freeze: whether a script may freeze parameters; with an adapter, the adapter's config decides that.
        virtual: virtual tokens that an adapter puts before each text.
        heads: number of attention heads by kind, which the tensor axis of a mesh must divide; None if the model cannot
            be split along that axis.
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
        """The dtype that its first tensor is saved in."""
        return next(iter(self.dtypes.values()))

    @property
    def axes(self) -> Mapping[str, tuple[str, ...]]:
        """Logical axes of parameters, by path; parameters without any are left out."""
        return {}

    @abc.abstractmethod
    def save(self, folder: Path, params: dict[str, jax.Array], config: Any, *, writes: bool = True) -> None:
        """Write config.json and safetensors that transformers loads. With `writes=False`, only read the parameters."""

    @abc.abstractmethod
    def load(self, folder: Path, seed: int, place: Placement | None = None) -> dict[str, jax.Array]:
        """Read the parameters that `save` wrote, placed on several devices if `place` is given."""

    @abc.abstractmethod
    def resized(self, rows: int) -> Backend:
        """The backend of this model with a vocabulary of `rows` tokens. Raises ValueError if it cannot be resized."""

    @abc.abstractmethod
    def on_disk(self, params: dict[str, jax.Array]) -> Iterator[tuple[str, np.ndarray]]:
        """Yield each tensor with its name on disk, in float32."""

    def named(self, params: dict[str, jax.Array]) -> Iterator[tuple[str, np.ndarray]]:
        """Yield each parameter with its name in PyTorch, in float32; by default the same as `on_disk`."""
        return self.on_disk(params)

    def torch_param_layout(self) -> TorchParamLayout:
        """Where trained arrays are located in torch's tensors."""
        return TorchParamLayout()

    def locations(self, params: dict[str, jax.Array]) -> Locations:
        """Name on disk -> the paths of the arrays that hold the tensor, each with the tensor's index in that array."""
        return {name: [(name, ())] for name in params}

    def size_of(self, path: str, array: jax.Array) -> int:
        """Number of model parameters in this array."""
        return array.size

    def floats(self, path: str, array: jax.Array) -> jax.Array:
        """The array as floats, converted if it stores their raw bits."""
        return array

    def weight(self, arrays: dict[str, jax.Array], path: str) -> jax.Array:
        """The parameter at a path in float32, whatever format it is stored in."""
        return arrays[path]
