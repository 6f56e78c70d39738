"""Image features of a vision tower that is not trained: computed once, and cached in host memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from threading import Lock
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from trl_jax.config.base import BaseConfig
from trl_jax.data.images import Features, ImagePatches, TextImages, digest_of, join_images
from trl_jax.hub.backend import Backend
from trl_jax.hub.native_backend import NativeBackend
from trl_jax.hub.peft_backend import AdaptedBackend
from trl_jax.hub.pretrained import PreTrainedModel
from trl_jax.models.model import abstract, merge
from trl_jax.models.vision import Vision
from trl_jax.training.devices import available_host_memory, on_device
from trl_jax.training.reference import PREFIX, ReferenceModel

Arrays = dict[str, Any]

_MEMORY_DIVISOR = 4  # features use at most this fraction (1/4) of the free memory
_ROOM = 2**30  # bytes, if the free memory is unknown
_TOWER = f"{Vision.NAME}."


class FeatureStore:
    """Computes image features with the towers that are not trained: the policy's and, if it has its own, the
    reference's.

    Each image is computed alone, so that its features do not depend on the other images of a batch, and a resumed run
    gets the same bits. Features are cached until they fill a quarter of the host's free memory; those of further images
    are computed each time.
    """

    def __init__(self, args: BaseConfig):
        self._args, self._towers = args, []
        self._kept: dict[bytes, tuple[Features, ...]] = {}
        self._lock = Lock()  # threads lay out batches and compile ahead
        free = available_host_memory()
        self._room = _ROOM if free is None else free // _MEMORY_DIVISOR

    def follow(self, policy: PreTrainedModel, reference: ReferenceModel | None) -> None:
        """Use the current towers, and drop cached features of other ones.

        Call this before `filled`, while no step runs. The arrays of parameters that a script has frozen are copied,
        because a step donates them.
        """
        towers = _towers(policy, reference, self._args.compute_dtype)
        if len(towers) == len(self._towers) and all(map(_same, self._towers, towers)):
            return
        with self._lock:
            self._room += sum(array.nbytes for arrays in self._kept.values() for array in arrays)
            self._kept.clear()
        self._towers = [tower._replace(arrays=_copied(tower.arrays, policy.params)) for tower in towers]

    def filled(self, images: Sequence[ImagePatches]) -> tuple[ImagePatches, ...]:
        """Add features to the images; remove them if the policy's tower is trained."""
        if not self._towers:
            return tuple(image._replace(features=()) for image in images)
        return tuple(image if image.features else image._replace(features=self._of(image)) for image in images)

    def filled_texts(
        self, texts: Sequence[TextImages | None], policy: PreTrainedModel, reference: ReferenceModel | None
    ) -> list[TextImages | None]:
        """Call `follow`, then add features to the images of texts; equal images share the same objects."""
        self.follow(policy, reference)
        unique = {text.key: text for text in texts if text is not None}
        unique = {key: text._replace(images=self.filled(text.images)) for key, text in unique.items()}
        return [None if text is None else text._replace(images=unique[text.key].images) for text in texts]

    def _of(self, image: ImagePatches) -> tuple[Features, ...]:
        key = digest_of([image])
        if key in self._kept:
            return self._kept[key]
        with on_device(self._args):
            features = tuple(tower.features(image) for tower in self._towers)
        size = sum(array.nbytes for array in features)
        with self._lock:
            if size <= self._room and key not in self._kept:
                self._room -= size
                self._kept[key] = features
        return features


class Tower(NamedTuple):
    """A vision tower with its connectors.

    arrays: by path within the tower.
    dtype: the compute dtype.
    """

    graph: Any
    arrays: Arrays
    dtype: jnp.dtype

    def features(self, image: ImagePatches) -> Features:
        """The features, in the compute dtype, or in float32 if they include learned separators."""
        joined = join_images([[image]], np.zeros((1, 0), np.int32))
        compute = partial(_computed, self.graph, dtype=self.dtype)
        if any(isinstance(array, jax.ShapeDtypeStruct) for array in self.arrays.values()):  # planning has no values
            shapes = jax.eval_shape(compute, self.arrays, joined)
            values, deep = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
        else:
            values, deep = jax.device_get(compute(self.arrays, joined))
        real = np.r_[: len(image.groups), joined.groups.shape[1] : values.shape[1]]  # without padding
        return Features(values[0, real], None if deep is None else deep[:, 0, : len(image.groups)])


@partial(jax.jit, static_argnames=("graph", "dtype"))
def _computed(graph: Any, arrays: Arrays, images: Any, *, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array | None]:
    vision = merge(graph, arrays)
    features = vision(images, dtype=dtype)
    out_dtype = jnp.float32 if vision.connector.separators is not None else dtype
    return features.values.astype(out_dtype), None if features.deep is None else features.deep.astype(out_dtype)


def _towers(policy: PreTrainedModel, reference: ReferenceModel | None, dtype: str) -> list[Tower]:
    """The towers that compute images; none if features of the policy or the reference may change."""
    masks, trained = policy.trainable_masks, policy.backend.of_vision(policy.params)
    if any(path not in masks or masks[path].any() for path in trained):
        return []
    towers = [tower_of(policy.backend, policy.arrays, dtype)]
    if reference is None:
        return towers
    arrays = {path.removeprefix(PREFIX): array for path, array in reference.arrays.items()}
    if not any(path.startswith(_TOWER) for path in arrays):
        shared = {path.removeprefix(_TOWER) for path in reference.shared}
        return towers if towers[0].arrays.keys() <= shared else []
    if reference.sync is not None or isinstance(reference.backend, AdaptedBackend):
        return []
    narrow = reference.dtype is not None and dtype == "float32"
    return [*towers, tower_of(reference.backend, arrays, reference.dtype if narrow else dtype)]


def tower_of(backend: Backend, arrays: Arrays, dtype: str) -> Tower:
    base = backend.base if isinstance(backend, AdaptedBackend) else backend
    assert isinstance(base, NativeBackend)
    tower_arrays = {path.removeprefix(_TOWER): array for path, array in arrays.items() if path.startswith(_TOWER)}
    return Tower(_graph(base), tower_arrays, jnp.dtype(dtype))


def _graph(base: NativeBackend) -> Any:
    return abstract(lambda: base.make().vision)[0]


def _same(a: Tower, b: Tower) -> bool:
    if a.graph != b.graph or a.dtype != b.dtype or a.arrays.keys() != b.arrays.keys():
        return False
    changed = [path for path, array in a.arrays.items() if array is not b.arrays[path]]
    return all(_equal(a.arrays[path], b.arrays[path]) for path in changed)


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, jax.ShapeDtypeStruct) or isinstance(b, jax.ShapeDtypeStruct):
        return a == b
    return bool(jnp.array_equal(a, b))


def _copied(arrays: Arrays, trained: Arrays) -> Arrays:
    """The arrays, with copies of those that a step donates."""
    tower_paths = {path.removeprefix(_TOWER) for path in trained}
    return {
        path: jnp.copy(array) if path in tower_paths and not isinstance(array, jax.ShapeDtypeStruct) else array
        for path, array in arrays.items()
    }
