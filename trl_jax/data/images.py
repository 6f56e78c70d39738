"""Inputs of vision towers, in NumPy: batches of image patches, the images of texts and prompts, and their checkpoint
format."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np

from trl_jax.core.outputs import BLOCK, Images, PrecomputedFeatures


def is_array(value: Any) -> bool:
    """Whether the value is a NumPy array or a torch tensor."""
    return isinstance(value, np.ndarray) or ("torch" in sys.modules and isinstance(value, sys.modules["torch"].Tensor))


def as_array(value: Any) -> np.ndarray:
    """A NumPy array from an array or a torch tensor."""
    return value if isinstance(value, np.ndarray) else value.detach().cpu().numpy()


class Features(NamedTuple):
    """The features of one image, computed by one tower.

    values: `[F, D]`, followed by the separators.
    deep: `[L, F, D]`, for models that add features after some layers; None for others.
    """

    values: np.ndarray
    deep: np.ndarray | None

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + (0 if self.deep is None else self.deep.nbytes)


class ImagePatches(NamedTuple):
    """One image of P patches, whose F features replace the embeddings of N tokens.

    patches: float32 `[P, C]`, as in `Images`.
    places: int32 `[P, 2]`, row and column of each patch.
    spans: int32 `[P, 2]`, start and end of the patches that each patch attends to.
    groups: int32 `[F, K]`, the patches of each feature.
    tokens: int32 `[N]`, the feature of each image token, in the order of the text; -2 - i is separator i.
    windows: like `spans`, for layers with windowed attention; None without such layers.
    table, table_weights: as in `Images`, `[P, N]`, or None.
    grid: `(frames, rows, columns)` of the image tokens, for positions with several axes; None for other models.
    features: from the policy's tower and, if the reference has its own, the reference's tower; empty if the step
        computes them.
    """

    patches: np.ndarray
    places: np.ndarray
    spans: np.ndarray
    groups: np.ndarray
    tokens: np.ndarray
    windows: np.ndarray | None = None
    table: np.ndarray | None = None
    table_weights: np.ndarray | None = None
    grid: tuple[int, int, int] | None = None
    features: tuple[Features, ...] = ()


def spans_of(lengths: Sequence[int]) -> np.ndarray:
    """Start and end of consecutive spans of these lengths, repeated for each of their patches: int32 `[sum, 2]`."""
    ends = np.cumsum(lengths)
    return np.repeat(np.stack([ends - lengths, ends], axis=1), lengths, axis=0).astype(np.int32)


class Sizes(NamedTuple):
    """Numbers of patches and features in a shard, padding included."""

    patches: int
    features: int


def sizes_of(shards: Sequence[Sequence[ImagePatches]]) -> Sizes:
    """The smallest sizes that fit the images of each shard, rounded up to limit compilations."""
    patches = max(sum(len(image.patches) for image in images) for images in shards)
    features = max(sum(len(image.groups) for image in images) for images in shards)
    return Sizes(rounded_up(patches, BLOCK), rounded_up(features, 16))


def rounded_up(count: int, unit: int) -> int:
    """The smallest of `unit` x 1, 2, 3, 4, 6, 8, 12, 16, ... that is at least `count`."""
    size = unit
    while size < count:
        size = size * 3 // 2 if size % 3 else size // 3 * 4
        if size == unit * 3 // 2:
            size = unit * 2
    return size


def join_images(shards: Sequence[Sequence[ImagePatches]], at: np.ndarray) -> Images | PrecomputedFeatures:
    """Join the images of each shard of a batch: their precomputed features if they have any, else their patches.

    Args:
        shards: the images of each shard, in order; at least one image must exist.
        at: int32 `[R, T]`, the feature of each token, as returned by `feature_index`, counted within each shard.
    """
    sizes = sizes_of(shards)
    example = next(image for images in shards for image in images)
    at = np.where(at < -1, sizes.features - 2 - at, at).astype(np.int32)
    if example.features:
        policy, *reference = (_joined_features(shards, at, sizes, tower) for tower in range(len(example.features)))
        return policy._replace(of_reference=reference[0]._replace(at=None)) if reference else policy
    joined = [_joined(images, sizes, example) for images in shards]
    stacked = {name: np.stack([arrays[name] for arrays in joined]) for name in joined[0]}
    return Images(at=at, **stacked)


def _joined_features(
    shards: Sequence[Sequence[ImagePatches]], at: np.ndarray, sizes: Sizes, tower: int
) -> PrecomputedFeatures:
    """The precomputed features of each shard, for one tower."""
    example = next(image for images in shards for image in images)
    example_features, count = example.features[tower], len(example.groups)
    separators = example_features.values[count:]

    def join_values(images: Sequence[ImagePatches]) -> np.ndarray:
        values = [image.features[tower].values[: len(image.groups)] for image in images]
        return np.concatenate([_pad(values, sizes.features, example_features.values), separators])

    def join_deep(images: Sequence[ImagePatches]) -> np.ndarray:
        deep = [image.features[tower].deep.swapaxes(0, 1) for image in images]
        return _pad(deep, sizes.features, example_features.deep.swapaxes(0, 1)).swapaxes(0, 1)

    deep = None if example_features.deep is None else np.stack(list(map(join_deep, shards)))
    return PrecomputedFeatures(np.stack(list(map(join_values, shards))), deep, at)


def _joined(images: Sequence[ImagePatches], sizes: Sizes, example: ImagePatches) -> dict[str, Any]:
    """The arrays of one shard. Fields that are None in `example` are left out."""
    starts = np.cumsum([0, *(len(image.patches) for image in images)])[:-1].tolist()
    images_with_starts = list(zip(images, starts, strict=True))
    arrays = {
        "patches": _pad([image.patches for image in images], sizes.patches, example.patches),
        "places": _pad([image.places for image in images], sizes.patches, example.places),
        "groups": _pad([image.groups + start for image, start in images_with_starts], sizes.features, example.groups),
    }
    for names, field in ((("first", "end"), "spans"), (("window_first", "window_end"), "windows")):
        sample = getattr(example, field)
        if sample is not None:
            spans = [getattr(image, field) + start for image, start in images_with_starts]
            limits = _pad(spans, sizes.patches, sample, fill=sizes.patches)
            arrays |= dict(zip(names, limits.T, strict=True))
    for field in ("table", "table_weights"):
        sample = getattr(example, field)
        if sample is not None:
            arrays[field] = _pad([getattr(image, field) for image in images], sizes.patches, sample)
    return arrays


def _pad(arrays: list[np.ndarray], length: int, example: np.ndarray, fill: int = 0) -> np.ndarray:
    padded = np.full((length, *example.shape[1:]), fill, example.dtype)
    if arrays:
        joined = np.concatenate(arrays)
        padded[: len(joined)] = joined
    return padded


def feature_index(tokens: np.ndarray, image_token: int, images: Sequence[ImagePatches], first: int = 0) -> np.ndarray:
    """The feature of each token of a text, int32 `[T]`; -1 for text tokens, -2 - i for separator i.

    Args:
        tokens: ids `[T]`, with an `image_token` for each feature.
        images: the images of the text, in order.
        first: the number of features that precede them in their shard.

    Raises:
        ValueError: the number of image tokens in the text differs from the number that its images need.
    """
    places = np.flatnonzero(np.asarray(tokens) == image_token)
    count = sum(len(image.tokens) for image in images)
    if len(places) != count:
        raise ValueError(
            f"the text has {len(places)} image tokens, but its {len(images)} images have {count} features. Check that "
            "the chat template writes one placeholder per image, and that max_length cuts none."
        )
    indices = np.full(len(tokens), -1, np.int32)
    starts = np.cumsum([first, *(len(image.groups) for image in images)])[:-1]
    if images:
        parts = [_shift(image.tokens, start) for image, start in zip(images, starts, strict=True)]
        indices[places] = np.concatenate(parts)
    return indices


def _shift(features: np.ndarray, first: int) -> np.ndarray:
    """Shift feature indices by `first`; negative values (text and separators) are unchanged."""
    return np.where(features >= 0, features + first, features)


def grid_positions(tokens: np.ndarray, image_token: int, images: Sequence[ImagePatches]) -> np.ndarray:
    """Positions of a text with images on three axes (frame, row, column), int32 `[T, 3]` (Wang et al. 2024,
    arXiv:2409.12191, section 2.1).

    Text tokens advance on all axes at once. Image tokens have the image's frame, row and column, offset by the end of
    the preceding text. The following text continues after the larger of the last row and the last column.
    """
    tokens = np.asarray(tokens)
    positions, index, next_position = np.zeros((len(tokens), 3), np.int32), 0, 0
    image_tokens = np.flatnonzero(tokens == image_token)
    for image in images:
        start = int(image_tokens[np.searchsorted(image_tokens, index)])
        length = start - index
        positions[index:start] = (next_position + np.arange(length))[:, None]
        next_position += length
        size, end = image.grid, start + len(image.tokens)
        positions[start:end] = np.stack(np.unravel_index(np.arange(len(image.tokens)), size), axis=1) + next_position
        next_position, index = next_position + max(size[1:]), end
    positions[index:] = (next_position + np.arange(len(tokens) - index))[:, None]
    return positions


# Images of passes


def position_axes(positions: Iterable[Sequence[np.ndarray]]) -> int | None:
    """The number of position axes in a step, from the `positions` of its examples; None if positions are plain token
    indices."""
    return next((texts[0].shape[-1] for texts in positions if texts), None)


class PassImages:
    """Collects the images of the passes of a step while its tokens are written.

    Images that several texts of a pass share are stored once.
    """

    def __init__(self, like: np.ndarray):
        """`like`: an array with the shape of the tokens of all passes, `[passes, R, T]`."""
        self._at = np.full(like.shape, -1, np.int32)
        self._images: list[list[ImagePatches]] = [[] for _ in like]
        self._first: dict[tuple, int] = {}
        self._count = [0] * len(like)

    def add(self, number: int, images: Sequence[ImagePatches], key: Hashable) -> int:
        """Add an example's images to a pass, unless images with the same key were added; returns the index of their
        first feature."""
        if (number, key) not in self._first:
            self._first[number, key] = self._count[number]
            self._images[number] += images
            self._count[number] += sum(len(image.groups) for image in images)
        return self._first[number, key]

    def write(self, index: tuple, features: np.ndarray, first: int) -> None:
        """Write the feature indices `[n]` of tokens at `index`, an index into the tokens of all passes."""
        self._at[index] = _shift(features, first)

    def joined(self) -> Images | PrecomputedFeatures | None:
        """The images of all passes, with a leading axis of passes; None if there are none."""
        if not any(self._images):
            return None
        return _map_image_leaves(lambda leaf: leaf[:, None], join_images(self._images, self._at))


def _map_image_leaves(
    function: Callable[[np.ndarray], np.ndarray], images: Images | PrecomputedFeatures
) -> Images | PrecomputedFeatures:
    """Apply `function` to all arrays except `at`, which has the axes of tokens."""
    fields = {name: leaf for name, leaf in images._asdict().items() if leaf is not None and name != "at"}
    nested = (Images, PrecomputedFeatures)
    changed = {
        name: _map_image_leaves(function, leaf) if isinstance(leaf, nested) else function(leaf)
        for name, leaf in fields.items()
    }
    return images._replace(**changed)


# Images of texts


class TextImages(NamedTuple):
    """The images of a text of T tokens.

    images: in the order of the text.
    features: int32 `[T]`, the index, among the features of all `images`, of the one that replaces each token's
        embedding; -1 for text.
    positions: int32 `[T, A]` if the model's positions have several axes; None if they are plain token indices.
    key: a digest of the images, for deduplication.
    """

    images: tuple[ImagePatches, ...]
    features: np.ndarray
    positions: np.ndarray | None
    key: bytes

    @property
    def next_position(self) -> int:
        """The position of the token after the text, on every axis."""
        return len(self.features) if self.positions is None else int(self.positions.max(initial=-1)) + 1

    def before(self, tokens: int) -> TextImages:
        """The same images, with this many text tokens appended to the text."""
        features = np.concatenate([self.features, np.full(tokens, -1, np.int32)])
        if self.positions is None:
            return self._replace(features=features)
        next_positions = np.repeat(
            self.next_position + np.arange(tokens, dtype=np.int32)[:, None], self.positions.shape[1], 1
        )
        return self._replace(features=features, positions=np.concatenate([self.positions, next_positions]))

    def cut(self, tokens: int | None) -> TextImages:
        """The same images, with the text truncated to its first `tokens` tokens; None: no truncation."""
        positions = None if self.positions is None else self.positions[:tokens]
        return self._replace(features=self.features[:tokens], positions=positions)


Positions = Callable[[np.ndarray, int, Sequence[ImagePatches]], np.ndarray]  # as `VisionFamily.positions`


def text_images(
    ids: np.ndarray, image_token: int, images: Sequence[ImagePatches], positions: Positions | None = None
) -> TextImages:
    """Assign images to a text with the ids `[T]`.

    Raises:
        ValueError: the number of image tokens in the text differs from the number that its images need.
    """
    features = feature_index(ids, image_token, images)
    placed = None if positions is None else positions(ids, image_token, images)
    return TextImages(tuple(images), features, placed, digest_of(images))


def digest_of(images: Sequence[ImagePatches]) -> bytes:
    """A 16-byte digest of all fields of the images except `features`."""
    digest = hashlib.blake2b(digest_size=16)
    for image in images:
        for leaf in image[:-1]:  # images with equal patches may still differ in `groups` or `tokens`
            digest.update(b"-" if leaf is None else np.ascontiguousarray(leaf).tobytes())
    return digest.digest()


# Batches of prompts


class PromptImages(NamedTuple):
    """The images of P right-padded prompts of S tokens.

    images: as in `Images`; None if no prompt has images.
    positions: int32 `[P, S, A]`; None if positions are plain token indices.
    offsets: int32 `[P]`, the position of the token after each prompt minus the prompt's length; None if `positions` is.
    """

    images: Images | PrecomputedFeatures | None
    positions: np.ndarray | None = None
    offsets: np.ndarray | None = None


TEXT_ALONE = PromptImages(None)


def prompt_images(texts: Sequence[TextImages], tokens: int, shards: int = 1) -> PromptImages:
    """Join the images of prompts that are padded to `tokens`. Each shard has an equal number of consecutive prompts;
    images that several prompts of a shard share are stored once."""
    prompts_per_shard = len(texts) // shards
    passes = PassImages(np.zeros((shards, prompts_per_shard, tokens), np.int32))
    axes = next((text.positions.shape[1] for text in texts if text.positions is not None), None)
    positions = None if axes is None else np.zeros((len(texts), tokens, axes), np.int32)
    for index, text in enumerate(texts):
        shard, row = divmod(index, prompts_per_shard)
        if text.images:
            first = passes.add(shard, text.images, text.key)
            passes.write((shard, row, np.arange(len(text.features))), text.features, first)
        if positions is not None:
            positions[index, : len(text.features)] = text.positions
    images = passes.joined()
    if images is not None:
        images = _map_image_leaves(lambda leaf: leaf[:, 0], images)._replace(at=images.at.reshape(len(texts), tokens))
        if isinstance(images, PrecomputedFeatures):
            images = images._replace(of_reference=None)
    if positions is None:
        return PromptImages(images)
    offsets = np.asarray([text.next_position - len(text.features) for text in texts], np.int32)
    return PromptImages(images, positions, offsets)


# Checkpoints

_FIELDS_BY_AXIS = {  # the array fields of ImagePatches, grouped by the meaning of their first axis
    "patches": ("patches", "places", "spans", "windows", "table", "table_weights"),
    "groups": ("groups",),
    "tokens": ("tokens",),
}


def images_to_arrays(texts: Sequence[TextImages | None]) -> dict[str, np.ndarray]:
    """The images of texts as a few flat arrays, by name. Images that several texts share are stored once."""
    unique = {text.key: text for text in texts if text is not None}
    unique_texts = list(unique.values())
    numbers = {key: number for number, key in enumerate(unique)}
    arrays = {"text": np.asarray([-1 if text is None else numbers[text.key] for text in texts], np.int32)}
    arrays["keys"] = np.frombuffer(b"".join(unique), np.uint8)
    arrays["images"] = np.asarray([len(text.images) for text in unique_texts], np.int32)
    with_images = [text for text in texts if text is not None]
    arrays["features"] = np.concatenate([text.features for text in with_images])
    arrays["features_length"] = np.asarray([len(text.features) for text in with_images], np.int32)
    if with_images[0].positions is not None:
        arrays["positions"] = np.concatenate([text.positions for text in with_images])
    images = [image for text in unique_texts for image in text.images]
    fields = [image._asdict() for image in images]
    for kind, names in _FIELDS_BY_AXIS.items():
        arrays[f"num_{kind}"] = np.asarray([len(values[kind]) for values in fields], np.int32)
        for name in names:
            if fields and fields[0][name] is not None:
                arrays[f"image_{name}"] = np.concatenate([values[name] for values in fields])
    if images and images[0].grid is not None:
        arrays["grid"] = np.asarray([image.grid for image in images], np.int32)
    return arrays


def images_from_arrays(arrays: Mapping[str, np.ndarray]) -> list[TextImages | None]:
    """The inverse of `images_to_arrays`."""
    columns: dict[str, list[Any]] = {}
    for kind, names in _FIELDS_BY_AXIS.items():
        ends = np.cumsum(arrays[f"num_{kind}"])[:-1]
        columns |= {name: np.split(arrays[f"image_{name}"], ends) for name in names if f"image_{name}" in arrays}
    if "grid" in arrays:
        columns["grid"] = [tuple(map(int, grid)) for grid in arrays["grid"]]
    count = len(arrays["num_patches"])
    images = [ImagePatches(**{name: values[index] for name, values in columns.items()}) for index in range(count)]
    spans = pairwise(accumulate(arrays["images"].tolist(), initial=0))
    groups = [tuple(images[start:end]) for start, end in spans]
    keys = arrays["keys"].tobytes()
    ends = np.cumsum(arrays["features_length"])[:-1]
    features = iter(np.split(arrays["features"], ends))
    positions = iter(np.split(arrays["positions"], ends)) if "positions" in arrays else None
    return [
        None if number < 0 else TextImages(
            groups[number], next(features), None if positions is None else next(positions),
            keys[16 * number : 16 * number + 16],
        )
        for number in arrays["text"].tolist()
    ]  # fmt: skip
