"""Texts with images to token ids and patches, as transformers' processors make them, without torch."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trl_jax.core.text import brief
from trl_jax.data.images import ImagePatches, feature_index
from trl_jax.hub.config import NativeConfig


class EncodedText(NamedTuple):
    """The token ids of a text, and its images.

    ids: int32 `[T]`.
    images: in the order of the text.
    features: int32 `[T]`, the feature that takes the place of each token's embedding (see `Example.features`).
    positions: int32 `[T, A]`; None where tokens are only counted.
    marked: bool `[T]`, the tokens of the asked spans; None without.
    """

    ids: np.ndarray
    images: tuple[ImagePatches, ...]
    features: np.ndarray
    positions: np.ndarray | None
    marked: np.ndarray | None = None


class VisionProcessor:
    """A tokenizer and an image processor, for the model of a config.

    transformers' processor of the model need not exist: those of models with videos need torchvision.
    """

    def __init__(self, native: NativeConfig, config: Any, tokenizer: Any, image_processor: Any):
        """
        Args:
            native, config: the parsed config.json, and transformers' config object.
            image_processor: transformers'; only its calls with NumPy results are used.

        Raises:
            ValueError: images of this model type are not supported, or the tokenizer has no image token.
        """
        self.family, self.config = native.vision, config
        self.tokenizer, self.image_processor = tokenizer, image_processor
        self.image_token_id = getattr(config, self.family.image_token)
        self.image_token = tokenizer.convert_ids_to_tokens(self.image_token_id)
        if self.image_token is None:
            raise ValueError(
                f"{native.path}: {self.family.image_token} is {self.image_token_id}, which the tokenizer does not "
                "have. Use the tokenizer of this checkpoint."
            )

    def patches(self, pictures: Sequence[Any]) -> list[ImagePatches]:
        """The images of these pictures (see `open_picture`), resized and normalized by the image processor."""
        if not pictures:
            return []
        processed = self.image_processor(images=list(map(open_picture, pictures)), return_tensors="np")
        return self.family.patches({name: processed[name] for name in self.family.pixels}, self.config)

    def encode(
        self,
        text: str,
        pictures: Sequence[Any] = (),
        *,
        max_length: int | None = None,
        spans: Sequence[tuple[int, int]] | None = None,
    ) -> EncodedText:
        """Tokenize a text in which each picture has one placeholder, without adding special tokens.

        Args:
            max_length: cuts the ids; image tokens may not be cut.
            spans: first and end of parts of the text, in characters, whose tokens are `marked`; None marks nothing.

        Raises:
            ValueError: the text has another number of placeholders than there are pictures, or images are cut.
        """
        *before, last = text.split(self.image_token)
        if len(before) != len(pictures):
            raise ValueError(
                f"Number of images provided ({len(pictures)}) does not match number of image placeholders "
                f"({len(before)})."
            )
        images = self.patches(pictures)
        expanded = [self.family.expansion(image, self.image_token, self.config) for image in images]
        whole = "".join(part + own for part, own in zip(before, expanded, strict=True)) + last
        tokens = self.tokenizer(text=whole, add_special_tokens=False, return_offsets_mapping=spans is not None)
        ids = np.asarray(tokens["input_ids"], np.int32)[:max_length]
        features, positions = feature_index(ids, self.image_token_id, images), None
        if self.family.positions is not None:
            positions = self.family.positions(ids, self.image_token_id, images)
        marked = None
        if spans is not None:
            starts = np.cumsum([len(part) + len(self.image_token) for part in before])
            grown = np.cumsum([0, *(len(own) - len(self.image_token) for own in expanded)])
            moved = [[at + grown[np.searchsorted(starts, at, side="right")] for at in span] for span in spans]
            marked = _overlapping(np.asarray(tokens["offset_mapping"]), moved)[:max_length]
        return EncodedText(ids, tuple(images), features, positions, marked)


def _overlapping(offsets: np.ndarray, spans: Sequence[Sequence[int]]) -> np.ndarray:
    """Whether each token, whose characters are `offsets` `[T, 2]`, has characters of a span: bool `[T]`."""
    found = np.zeros(len(offsets), bool)
    for start, end in spans:
        found |= (offsets[:, 0] < end) & (offsets[:, 1] > start)
    return found


def open_picture(value: Any) -> Any:
    """A PIL image from a PIL image, a path, the bytes of a file, an array `[H, W, C]`, or what datasets' Image feature
    gives without decoding (`{"bytes": ..., "path": ...}`).

    Raises:
        ValueError: it cannot be read as a picture.
    """
    from PIL import Image

    if isinstance(value, Image.Image):
        return value
    if isinstance(value, Mapping) and value.keys() <= {"bytes", "path"}:
        value = value.get("path") if value.get("bytes") is None else value["bytes"]
    try:
        if isinstance(value, np.ndarray):
            return Image.fromarray(value)
        if isinstance(value, bytes | str | Path):
            picture = Image.open(io.BytesIO(value) if isinstance(value, bytes) else value)
            picture.load()
            return picture
    except (OSError, ValueError, TypeError, SyntaxError) as error:  # Pillow's errors for damaged files
        raise ValueError(f"{brief(value)} cannot be read as a picture: {error}") from error
    raise ValueError(
        f"{brief(value)} is no picture: pass a PIL image, a path, the bytes of a file or an array of pixels."
    )


def load_image_processor(folder: Path) -> Any:
    """The image processor in a folder, on its PIL backend.

    Raises:
        ValueError: the folder has none.
        ImportError: Pillow is not installed.
    """
    try:
        import PIL  # noqa: F401
    except ImportError as error:
        raise ImportError('Rows with images need Pillow: pip install "trl_jax[vision]".') from error
    from transformers import AutoImageProcessor

    if not any((folder / name).is_file() for name in ("preprocessor_config.json", "processor_config.json")):
        raise ValueError(
            f"{folder}: there is no preprocessor_config.json, which says how images are resized. Save the model's "
            "processor there with save_pretrained, or pass it as processing_class."
        )
    return AutoImageProcessor.from_pretrained(folder, backend="pil", trust_remote_code=False)
