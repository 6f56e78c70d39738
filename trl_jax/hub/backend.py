"""The interface of a model backend: the code that computes, saves and loads one model."""

from __future__ import annotations

import abc
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from trl_jax.core.outputs import NO_VIRTUAL_TOKENS, VirtualTokens
from trl_jax.core.torch_random import TorchParamLayout
from trl_jax.hub.checkpoint import ShardingRule
from trl_jax.hub.heads import HeadName

Locations = dict[str, list[tuple[str, tuple[int, ...]]]]  # name in PyTorch -> (path of our array, index in it)


@dataclass(frozen=True, kw_only=True)
class Traits:
    """What a model can do, and its limits.

    Attributes:
        vocab_size: token ids are below this number.
        max_positions: longest supported text in tokens; None if there is no limit.
        embeddings: paths of the token and position embeddings.
        causal: whether tokens do not depend on later ones, so that texts can share a common prefix.
        window: attention window of the narrowest layer in tokens, including the current one; None for full attention.
        batch_invariant: whether the output of a text is independent of the other rows in the batch.
        infers_lengths: whether the end of a row is inferred from its padding; without a pad id, it is the last token.
        ignores_types: whether token_type_ids have no effect.
        takes_packed: whether several texts can be packed into a row without influencing each other.
        takes_stripes: whether the tokens of a text can be split over devices.
        takes_noise: whether noise can be added to its embeddings.
        drops_out: whether it has dropout that training may enable.
        has_routers: whether it has expert routers whose loads can be summed.
        draws_experts: whether its routers sample experts during training.
        heads: number of attention heads by kind, which the tensor axis of a mesh must divide; None if the model cannot
            be split along that axis.
    """

    vocab_size: int
    max_positions: int | None
    embeddings: frozenset[str]
    causal: bool = False
    window: int | None = None
    batch_invariant: bool = False
    infers_lengths: bool = False
    ignores_types: bool = False
    takes_packed: bool = False
    takes_stripes: bool = False
    takes_noise: bool = False
    drops_out: bool = False
    has_routers: bool = False
    draws_experts: bool = False
    heads: Mapping[str, int] | None = None


class Backend(abc.ABC):
    """Everything about a loaded model except its parameters.

    Attributes:
        name: name of the backend in the trainer's log, logged at `log_level`.
        head: which head the model has.
        graph: module graph that `models.model.merge` combines with a dict of parameters.
        traits: what the model can do, and its limits.
        token_table: name in PyTorch of the token embedding's weight.
        tied: another name in PyTorch of a parameter -> its first name, by which it is listed.
        originals: sizes of arrays, by path, that PEFT counts in addition: those whose copies an adapter trains.
        tensors: path of a parameter -> one of its names on disk.
        dtypes: tensor on disk -> dtype that it is saved in.
        undecayed: paths of parameters without weight decay that cannot be recognized by their names.
        decays_by_name: paths of norms that transformers recognizes by their names alone, so that some decay.
        buffers: paths of arrays that are saved but never trained.
        can_resize: whether the token embedding can be resized.
        saves_in_background: whether `save` may run in a thread while the model trains.
        can_freeze: whether user code may freeze parameters; with an adapter, the adapter's config decides that.
        virtual: virtual tokens that an adapter puts before each text.
    """

    name: str
    head: HeadName
    log_level: int
    graph: nnx.GraphDef
    traits: Traits
    tensors: Mapping[str, str]
    dtypes: Mapping[str, str]
    undecayed: frozenset[str]
    can_resize: bool
    saves_in_background: bool
    token_table: str
    tied: Mapping[str, str] = {}
    originals: Mapping[str, int] = {}
    buffers: frozenset[str] = frozenset()
    decays_by_name: frozenset[str] = frozenset()
    can_freeze: bool = True
    virtual: VirtualTokens = NO_VIRTUAL_TOKENS

    @property
    def main_dtype(self) -> str:
        """The dtype that its first tensor is saved in."""
        return next(iter(self.dtypes.values()))

    def save_in(self, dtype: str) -> None:
        """Save the weights in another dtype from now on.

        Raises:
            ValueError: it cannot save in this dtype.
        """
        if set(self.dtypes.values()) == {dtype}:
            return
        raise ValueError(
            f"model.to({dtype}): the {self.name} backend saves weights in the dtype of their checkpoint. Load it with "
            f'model_init_kwargs={{"dtype": {dtype!r}}}.'
        )

    @property
    def axes(self) -> Mapping[str, tuple[str, ...]]:
        """Logical axes of parameters, by path; parameters without any are left out."""
        return {}

    @abc.abstractmethod
    def save(
        self, folder: Path | None, params: dict[str, jax.Array], config: Any, max_shard_size: int | str | None = None
    ) -> None:
        """Write config.json and safetensors that transformers loads.

        Args:
            folder: None only reads the parameters, which may be a collective operation: all processes take part, and
                one of them writes.
            max_shard_size: most bytes per file, as in transformers; None keeps the checkpoint's shards. An adapter is
                always a single file.
        """

    @abc.abstractmethod
    def load(self, folder: Path, seed: int, sharding_of: ShardingRule | None = None) -> dict[str, jax.Array]:
        """Read the parameters that `save` wrote, sharded over several devices if `sharding_of` is given."""

    @abc.abstractmethod
    def resized(self, rows: int) -> Backend:
        """The backend of this model with a vocabulary of `rows` tokens. Raises ValueError if it cannot be resized."""

    @abc.abstractmethod
    def on_disk(self, params: dict[str, jax.Array]) -> Iterator[tuple[str, np.ndarray]]:
        """Yield each tensor with its name on disk, in float32."""

    def named(
        self, arrays: dict[str, jax.Array], names: Collection[str] | None = None
    ) -> Iterator[tuple[str, np.ndarray]]:
        """Yield each parameter with its name in PyTorch, in float32; by default the same as `on_disk`.

        Args:
            arrays: all arrays of the model, trained and frozen.
            names: the only names to yield; None means all.
        """
        return (tensor for tensor in self.on_disk(arrays) if names is None or tensor[0] in names)

    @property
    def file_names(self) -> Mapping[str, str]:
        """Names of parameters in an adapter's file -> their names in PyTorch. Other names are the same in both."""
        return {}

    def with_values(self, arrays: Mapping[str, Any], values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The arrays that change if trained parameters, by their names in PyTorch, get these values.

        Raises:
            ValueError: this backend cannot set values.
        """
        return dict(values)

    def is_trained(self, name: str) -> bool:
        """Whether a parameter, by its name in PyTorch, is trained unless user code freezes it."""
        return True

    @property
    def layers(self) -> Mapping[str, str]:
        """The name of a module in PyTorch -> its kind: one of `modules.QUANTIZED` if its weight is quantized, otherwise
        `Module.kind`."""
        return {}

    def torch_param_layout(self) -> TorchParamLayout:
        """Where trained arrays are located in torch's tensors."""
        return TorchParamLayout()

    def locations(self, params: dict[str, jax.Array]) -> Locations:
        """Name in PyTorch -> the paths of the arrays that hold the tensor, each with the tensor's index there."""
        return {name: [(name, ())] for name in params}

    def size_of(self, path: str, array: jax.Array) -> int:
        """Number of model parameters in this array."""
        return array.size

    def of_vision(self, params: Collection[str]) -> frozenset[str]:
        """The paths among `params`, the trained arrays, that only take part in steps with images."""
        return frozenset(path for path in params if path.startswith("vision."))

    def floats(self, path: str, array: jax.Array) -> jax.Array:
        """The array as floats, converted if it stores their raw bits."""
        return array

    def weight(self, arrays: dict[str, jax.Array], path: str) -> jax.Array:
        """The parameter at a path in float32, whatever format it is stored in."""
        return arrays[path]


def fixed_values_error(instead: str) -> ValueError:
    return ValueError(f"load_state_dict: only float32 weights and LoRA adapters can be set. {instead}.")


# Parameters that user code freezes with torch's flag, `requires_grad = False`


def trainable_masks(frozen: Collection[str], locations: Locations, params: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """For each partly or fully frozen array, by path, which layers are trained: bool `[L]` or `[]`.

    Args:
        frozen: names in PyTorch.
        locations: where our arrays hold these parameters.
    """
    masks: dict[str, np.ndarray] = {}
    for name in frozen:
        for path, index in locations.get(name, ()):  # quantized weights have none and never train
            masks.setdefault(path, np.ones(params[path].shape[: len(index)], bool))[index] = False
    return masks


def stop_frozen_gradients(params: Mapping[str, jax.Array], masks: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
    """The same values, with gradients stopped for frozen layers."""
    return dict(params) | {
        path: _select(mask, params[path], jax.lax.stop_gradient(params[path]))
        for path, mask in masks.items()
        if path in params
    }


def zero_frozen_updates(updates: Mapping[str, jax.Array], masks: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
    """Updates with zeros for frozen layers, which weight decay would change even without a gradient."""
    zeros = {path: jnp.zeros_like(updates[path]) for path in masks}
    return dict(updates) | {path: _select(mask, updates[path], zeros[path]) for path, mask in masks.items()}


def _select(mask: np.ndarray, trained: jax.Array, frozen: jax.Array) -> jax.Array:
    if not mask.any():
        return frozen
    return jnp.where(mask.reshape(*mask.shape, *[1] * (trained.ndim - mask.ndim)), trained, frozen)


def frozen_size(masks: Mapping[str, np.ndarray], params: Mapping[str, Any]) -> int:
    """Number of frozen parameters."""
    return sum(params[path].size * int((~mask).sum()) // max(mask.size, 1) for path, mask in masks.items())


def check_unfrozen(names: Collection[str]) -> None:
    """Raise ValueError if parameters were unfrozen during training: the optimizer has no state for them, or its step
    count includes steps that they did not take part in."""
    if names:
        raise ValueError(
            f"{sorted(names)[0]} was unfrozen during training ({len(names)} parameters in total). The optimizer has no "
            "state for the steps in which it was frozen. Unfreeze between calls of train()."
        )
