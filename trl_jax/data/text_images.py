"""The images of texts: where their features go, the arrays of a batch of prompts, and the arrays of a checkpoint."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np

from trl_jax.core.outputs import Images
from trl_jax.data.images import ImagePatches, PassImages, feature_index


class TextImages(NamedTuple):
    """The images of a text of T tokens.

    images: in the order of the text.
    features: int32 `[T]`, the index among the features of all `images` that takes the place of each token's embedding;
        -1 for text.
    positions: int32 `[T, A]`, where the model has positions on several axes; None where tokens are only counted.
    key: a digest of the patches, equal for equal images.
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
        """The same images in the text that continues with this many tokens of text."""
        features = np.concatenate([self.features, np.full(tokens, -1, np.int32)])
        if self.positions is None:
            return self._replace(features=features)
        more = np.repeat(self.next_position + np.arange(tokens, dtype=np.int32)[:, None], self.positions.shape[1], 1)
        return self._replace(features=features, positions=np.concatenate([self.positions, more]))

    def cut(self, tokens: int | None) -> TextImages:
        """The same images in the first `tokens` of the text; None: all."""
        positions = None if self.positions is None else self.positions[:tokens]
        return self._replace(features=self.features[:tokens], positions=positions)


Positions = Callable[[np.ndarray, int, Sequence[ImagePatches]], np.ndarray]  # as `VisionFamily.positions`


def text_images(
    ids: np.ndarray, image_token: int, images: Sequence[ImagePatches], positions: Positions | None = None
) -> TextImages:
    """The images of a text, by its ids `[T]`.

    Raises:
        ValueError: the text has another number of image tokens than the images have features.
    """
    features = feature_index(ids, image_token, images)
    placed = None if positions is None else positions(ids, image_token, images)
    return TextImages(tuple(images), features, placed, _digest(images))


def _digest(images: Sequence[ImagePatches]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for image in images:
        for leaf in (image.patches, image.places):
            digest.update(np.ascontiguousarray(leaf).view(np.uint8))
    return digest.digest()


# Batches of prompts


class PromptImages(NamedTuple):
    """The images of P right-padded prompts of S tokens.

    images: as in `Images`; None if none of these prompts has any.
    positions: int32 `[P, S, A]`; None where tokens are only counted.
    offsets: int32 `[P]`, the position of the token after each prompt, minus the prompt's length; None likewise.
    """

    images: Images | None
    positions: np.ndarray | None = None
    offsets: np.ndarray | None = None


TEXT_ALONE = PromptImages(None)


def prompt_images(texts: Sequence[TextImages], tokens: int, shards: int = 1) -> PromptImages:
    """Join the images of prompts that are padded to `tokens`. Each shard has an equal run of them; an image that
    several prompts of a shard share is there once."""
    each = len(texts) // shards
    passes = PassImages(np.zeros((shards, each, tokens), np.int32))
    axes = next((text.positions.shape[1] for text in texts if text.positions is not None), None)
    positions = None if axes is None else np.zeros((len(texts), tokens, axes), np.int32)
    for number, text in enumerate(texts):
        shard, row = divmod(number, each)
        if text.images:
            first = passes.enter(shard, text.images, text.key)
            passes.write((shard, row, np.arange(len(text.features))), text.features, first)
        if positions is not None:
            positions[number, : len(text.features)] = text.positions
    images = passes.joined()
    if images is not None:
        flat = {name: leaf[:, 0] for name, leaf in images._asdict().items() if leaf is not None and name != "at"}
        images = Images(**flat, at=images.at.reshape(len(texts), tokens))
    if positions is None:
        return PromptImages(images)
    offsets = np.asarray([text.next_position - len(text.features) for text in texts], np.int32)
    return PromptImages(images, positions, offsets)


# Checkpoints

_COUNTED = {  # the fields of ImagePatches that are arrays, by what their first axis counts
    "patches": ("patches", "places", "spans", "windows", "table", "table_weights"),
    "groups": ("groups",),
    "tokens": ("tokens",),
}


def images_to_arrays(texts: Sequence[TextImages | None]) -> dict[str, np.ndarray]:
    """The images of texts as a few flat arrays, by name. Images that several texts share are there once."""
    unique = {text.key: text for text in texts if text is not None}
    found = list(unique.values())
    numbers = {key: number for number, key in enumerate(unique)}
    arrays = {"text": np.asarray([-1 if text is None else numbers[text.key] for text in texts], np.int32)}
    arrays["keys"] = np.frombuffer(b"".join(unique), np.uint8)
    arrays["images"] = np.asarray([len(text.images) for text in found], np.int32)
    of_texts = [text for text in texts if text is not None]
    arrays["features"] = np.concatenate([text.features for text in of_texts])
    arrays["features_length"] = np.asarray([len(text.features) for text in of_texts], np.int32)
    if of_texts[0].positions is not None:
        arrays["positions"] = np.concatenate([text.positions for text in of_texts])
    images = [image for text in found for image in text.images]
    for counted, names in _COUNTED.items():
        arrays[f"num_{counted}"] = np.asarray([len(getattr(image, counted)) for image in images], np.int32)
        for name in names:
            if images and getattr(images[0], name) is not None:
                arrays[f"image_{name}"] = np.concatenate([getattr(image, name) for image in images])
    if images and images[0].grid is not None:
        arrays["grid"] = np.asarray([image.grid for image in images], np.int32)
    return arrays


def images_from_arrays(arrays: Mapping[str, np.ndarray]) -> list[TextImages | None]:
    """The inverse of `images_to_arrays`."""
    columns: dict[str, list[Any]] = {}
    for counted, names in _COUNTED.items():
        ends = np.cumsum(arrays[f"num_{counted}"])[:-1]
        columns |= {n: np.split(arrays[f"image_{n}"], ends) for n in names if f"image_{n}" in arrays}
    if "grid" in arrays:
        columns["grid"] = [tuple(map(int, grid)) for grid in arrays["grid"]]
    count = len(arrays["num_patches"])
    images = [ImagePatches(**{name: values[n] for name, values in columns.items()}) for n in range(count)]
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
