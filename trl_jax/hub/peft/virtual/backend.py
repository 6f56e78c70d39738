"""The backend of a native model before whose texts virtual tokens stand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from trl_jax.core.printable import brief, listed
from trl_jax.core.torch_param_layout import TorchParamLayout
from trl_jax.core.virtual_tokens import VirtualTokens
from trl_jax.hub.formats.safetensors import open_tensors
from trl_jax.hub.freezing import Locations
from trl_jax.hub.native_backend import NativeBackend
from trl_jax.hub.peft.backend import AdaptedBackend
from trl_jax.hub.peft.lora_config import PICKLED, WEIGHTS, no_adapter
from trl_jax.hub.peft.virtual.config import ENCODER, VECTORS, PromptLearningConfig
from trl_jax.mesh.arrays import owned
from trl_jax.models.virtual import PREFIX, Place, virtual_graph
from trl_jax.nn.virtual_tokens import EMBEDDING, Lstm, Table, VectorMaker


class VirtualBackend(AdaptedBackend):
    """A native backend before whose texts the `virtual` tokens stand, whose vectors `maker` makes of arrays that train.

    trains: False of vectors that were made by a network which is not there.
    """

    def __init__(
        self,
        base: NativeBackend,
        config: PromptLearningConfig,
        virtual: VirtualTokens,
        maker: VectorMaker,
        place: Place,
        *,
        trains: bool = True,
    ):
        paths = {PREFIX + name: shape for name, shape in maker.shapes.items()}
        super().__init__(base, config, {path: jax.ShapeDtypeStruct(s, jnp.float32) for path, s in paths.items()})
        self.name, self.virtual, self.maker, self.trains = f"{base.name} (with virtual tokens)", virtual, maker, trains
        self.drops_out = base.drops_out or (isinstance(maker, Lstm) and maker.rate > 0)
        self.max_positions = None if base.max_positions is None else base.max_positions - virtual.count
        self.graph = virtual_graph(base.make, maker, place)
        self.tensors = dict(zip(self.shapes, self.shapes, strict=True))
        self.dtypes = {VECTORS: "float32"}

    def torch_param_layout(self) -> TorchParamLayout:
        return TorchParamLayout()

    @property
    def axes(self) -> Mapping[str, tuple[str, ...]]:
        return self.base.axes

    def save(self, folder: Path, params: dict[str, jax.Array], config: Any, *, writes: bool = True) -> None:
        """Write the files of PEFT, and what the vectors are made of, where they do not train themselves."""
        super().save(folder, params, config, writes=writes)
        if isinstance(self.maker, Table):
            return
        arrays = {path.removeprefix(PREFIX): np.asarray(params[path], np.float32) for path in self.shapes}
        if writes:
            save_file(arrays, folder / ENCODER, metadata={"format": "pt"})

    def locations(self, params: dict[str, jax.Array]) -> Locations:
        return {_named(path): [] for path in self.shapes}

    def named(self, params: dict[str, jax.Array]) -> Iterator[tuple[str, np.ndarray]]:
        """Of the arrays that train, which are not those on disk, under peft's names."""
        return ((_named(path), np.asarray(params[path], np.float32)) for path in self.shapes)

    def on_disk(self, params: dict[str, jax.Array]) -> Iterator[tuple[str, np.ndarray]]:
        arrays = {path.removeprefix(PREFIX): jnp.asarray(params[path], jnp.float32) for path in self.shapes}
        yield VECTORS, self._vectors(arrays)

    def _vectors(self, arrays: dict[str, Any]) -> np.ndarray:
        with jax.default_matmul_precision("float32"):
            return np.ascontiguousarray(np.asarray(self.maker(arrays), np.float32))

    def read(self, folder: Path, defaults: dict[str, np.ndarray] | None) -> dict[str, jax.Array]:
        del defaults
        vectors = _read(folder, (self.maker.count, self.maker.width))
        if isinstance(self.maker, Table):
            return {PREFIX + EMBEDDING: owned(vectors)}
        arrays = _checked(folder / ENCODER, self.maker.shapes)
        if not np.allclose(self._vectors(arrays), vectors, rtol=1e-3, atol=1e-4):
            raise ValueError(
                f"{folder / ENCODER} makes other vectors than {WEIGHTS} beside it has: one of the two is of another "
                "time. Copy both from one place, or take the first away, and the vectors are read as they are."
            )
        return {PREFIX + name: owned(array) for name, array in arrays.items()}


def _named(path: str) -> str:
    return f"{PREFIX}default.{path.removeprefix(PREFIX)}"


def _read(folder: Path, shape: tuple[int, int]) -> np.ndarray:
    """The vectors of an adapter's folder.

    Raises:
        FileNotFoundError, ValueError: there are none, or of another model.
    """
    if not (folder / WEIGHTS).is_file():
        raise no_adapter(str(folder), (folder / PICKLED).exists())
    return _checked(folder / WEIGHTS, {VECTORS: shape})[VECTORS]


def _checked(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """The tensors of a file, which must have these names and shapes."""
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is not there: PEFT saves the vectors of virtual tokens and not the network that makes them, so "
            "training cannot go on from it. Cannot set a prompt learning adapter to trainable when loading pretrained "
            "adapter."
        )
    tensors = open_tensors(path)
    if set(tensors) != set(shapes):
        raise ValueError(f"{path} has {listed(sorted(tensors))}, its config asks for {listed(sorted(shapes))}.")
    for name, shape in shapes.items():
        if tuple(tensors[name].shape) != tuple(shape):
            raise ValueError(
                f"{path}: {name} is {brief(list(tensors[name].shape))}, its config and this base model ask for "
                f"{list(shape)}. Pass the base model that it was trained on."
            )
    return {name: np.array(tensors[name], np.float32) for name in shapes}
