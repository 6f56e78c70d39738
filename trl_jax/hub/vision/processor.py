"""Convert texts with images to token ids and patches as transformers' processors do, without torch."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trl_jax.core import files
from trl_jax.core.text import brief
from trl_jax.data.chat import PartsTokenizer
from trl_jax.data.images import ImagePatches, TextImages, as_array, is_array, text_images
from trl_jax.hub.config import NativeConfig
from trl_jax.hub.native_backend import NativeBackend
from trl_jax.hub.peft_backend import AdaptedBackend
from trl_jax.hub.vision import Pictures, special_token

_KIND = "trl_jax.kind"  # in the JSON of a picture that is not JSON itself
_PNG = ("1", "L", "LA", "P", "RGB", "RGBA")  # Pillow's modes that PNG keeps
_TIFF = ("CMYK", "F", "I", "I;16", "LAB", "YCbCr")  # and TIFF
_CONVERTED = {"La": "LA", "RGBa": "RGBA", "PA": "RGBA"}  # the others become RGB


class EncodedText(NamedTuple):
    """The token ids of a text, int32 `[T]`, and its images.

    marked: bool `[T]`, True for tokens of the requested spans; None if no spans were requested.
    """

    ids: np.ndarray
    images: TextImages
    marked: np.ndarray | None = None


class VisionProcessor:
    """A tokenizer and an image processor, for the model of a config.

    It does not use transformers' processor of the model, which needs torchvision if the model also takes videos.
    """

    def __init__(self, native: NativeConfig, config: Any, tokenizer: Any, image_processor: Any, **options: Any):
        """
        Args:
            native, config: the parsed config.json, and transformers' config object.
            image_processor: transformers'; only its calls with NumPy results are used.
            options: arguments of the image processor that override those that transformers' processor passes.

        Raises:
            ValueError: images of this model type are not supported, or the tokenizer has no image token.
        """
        self.family, self.config = native.vision, config
        self.tokenizer, self.image_processor = tokenizer, image_processor
        self.options = self.family.options(config) | options | {"return_tensors": "np"}
        self.image_token_id = getattr(config, self.family.image_token)
        fields = config.to_dict()
        ids = (fields.get("video_token_id"), fields.get("audio_token_id"))
        self.other_media_ids = [id_ for id_ in ids if id_ is not None]  # placeholders for videos and audio
        self.image_token = tokenizer.convert_ids_to_tokens(self.image_token_id)
        if self.image_token is None:
            raise ValueError(
                f"{native.path}: {self.family.image_token} is {self.image_token_id}, which the tokenizer does not "
                "have. Use the tokenizer of this checkpoint."
            )
        self.placeholder = self.image_token
        if self.family.placeholder is not None:
            self.placeholder = special_token(tokenizer, self.family.placeholder)

    def patches(self, pictures: Sequence[Any]) -> list[ImagePatches]:
        """The images of these pictures (see `open_picture`), resized and normalized by the image processor."""
        return list(self._seen(pictures).images)

    def arrays(self, pictures: Sequence[Any]) -> dict[str, np.ndarray]:
        """What the image processor returns for these pictures, in the form that `generate` takes."""
        processed = self._seen(pictures).processed
        return {name: processed[name] for name in self.family.pixels}

    def _seen(self, pictures: Sequence[Any]) -> Pictures:
        processed, images, family = {}, [], self.family
        if pictures:
            opened = [open_picture(picture, keep_arrays=True) for picture in pictures]
            if family.nested:
                opened = [[picture] for picture in opened]
            features = self.image_processor(images=opened, **self.options)
            processed = {name: features[name] for name in (*family.pixels, *family.other_outputs)}
            images = family.patches(processed, self.config)
        return Pictures(processed, images, self.tokenizer, self.config, self.image_token)

    def encode(
        self,
        text: str,
        pictures: Sequence[Any] = (),
        *,
        max_length: int | None = None,
        add_special_tokens: bool = False,
        spans: Sequence[tuple[int, int]] | None = None,
    ) -> EncodedText:
        """Tokenize a text in which each picture has one placeholder.

        Args:
            max_length: truncates the ids, but must not cut off image tokens.
            add_special_tokens: whether the tokenizer adds its own.
            spans: start and end of parts of the text, in characters, whose tokens are `marked`; None marks nothing.

        Raises:
            ValueError: the numbers of placeholders and pictures differ, or image tokens are cut off.
        """
        *before, last = text.split(self.placeholder)
        if len(before) != len(pictures):
            raise ValueError(
                f"Number of images provided ({len(pictures)}) does not match number of image placeholders "
                f"({len(before)})."
            )
        seen = self._seen(pictures)
        images, expanded = seen.images, self.family.expansion(seen) if pictures else []
        whole = "".join(part + expansion for part, expansion in zip(before, expanded, strict=True)) + last
        options = {"add_special_tokens": add_special_tokens, "return_offsets_mapping": spans is not None}
        tokens = self.tokenizer(text=whole, **options)
        ids = np.asarray(tokens["input_ids"], np.int32)[:max_length]
        marked = None
        if spans is not None:
            starts = np.cumsum([len(part) + len(self.placeholder) for part in before])
            grown = np.cumsum([0, *(len(expansion) - len(self.placeholder) for expansion in expanded)])
            moved = [[at + grown[np.searchsorted(starts, at, side="right")] for at in span] for span in spans]
            marked = _overlapping(np.asarray(tokens["offset_mapping"]), moved)[:max_length]
        return EncodedText(ids, self.placed(ids, images), marked)

    def place(self, ids: Sequence[int], pictures: Sequence[Any]) -> TextImages:
        """Assign pictures to the image tokens of a tokenized text.

        Raises:
            ValueError: the number of image tokens differs from the number of features of the pictures.
        """
        return self.placed(ids, self.patches(pictures))

    def placed(self, ids: Sequence[int], images: Sequence[ImagePatches]) -> TextImages:
        """Like `place`, for images that have already been processed."""
        return text_images(np.asarray(ids, np.int32), self.image_token_id, images, self.family.positions)


def _overlapping(offsets: np.ndarray, spans: Sequence[Sequence[int]]) -> np.ndarray:
    """Whether each token overlaps a span, bool `[T]`. `offsets` `[T, 2]` are the start and end of each token in
    characters."""
    overlaps = np.zeros(len(offsets), bool)
    for start, end in spans:
        overlaps |= (offsets[:, 0] < end) & (offsets[:, 1] > start)
    return overlaps


def open_picture(value: Any, *, keep_arrays: bool = False) -> Any:
    """A PIL image from a PIL image, a path, a URL, a base64 string, the bytes of a file, an array, a torch tensor or
    nested lists (`[H, W, C]`, `[C, H, W]` or `[H, W]`; floats reach from 0 to 1 or to 255), or what datasets' Image
    feature returns without decoding (`{"bytes": ..., "path": ...}`).

    As in transformers and datasets, pictures that are read are turned upright by their EXIF orientation, and strings
    give RGB pictures.

    Args:
        keep_arrays: return arrays of three axes as arrays, as an image processor takes them.

    Raises:
        ValueError: `value` cannot be read as a picture.
    """
    from PIL import Image

    if isinstance(value, Image.Image):
        return value
    if isinstance(value, Mapping) and value.keys() <= {"bytes", "path"}:
        value = value.get("path") if value.get("bytes") is None else value["bytes"]
        value = Path(value) if isinstance(value, str) else value
    try:
        if isinstance(value, list) and value and isinstance(value[0], list):  # an array in a table
            value = np.asarray(value)
        if is_array(value):
            from transformers.image_transforms import to_pil_image

            pixels = as_array(value)
            if pixels.ndim != 3:
                return Image.fromarray(pixels)
            return pixels if keep_arrays else to_pil_image(pixels)
        if isinstance(value, str):
            from transformers.image_utils import load_image

            return load_image(value)
        if isinstance(value, bytes | Path):
            from PIL import ImageOps

            return ImageOps.exif_transpose(Image.open(io.BytesIO(value) if isinstance(value, bytes) else value))
    except (OSError, ValueError, TypeError, SyntaxError) as error:  # Pillow's errors for damaged files
        raise ValueError(f"{brief(value)} cannot be read as a picture: {error}") from error
    raise ValueError(
        f"{brief(value)} is no picture: pass a PIL image, a path, a URL, the bytes of a file or an array of pixels."
    )


def picture_to_json(value: Any) -> Any:
    """A picture that `open_picture` takes, in JSON, for `picture_from_json`."""
    if isinstance(value, Mapping):
        return {name: picture_to_json(item) for name, item in value.items()}
    if value is None or isinstance(value, str):
        return value
    buffer, value = io.BytesIO(), as_array(value) if is_array(value) else value
    if isinstance(value, bytes | Path):
        kind = "bytes" if isinstance(value, bytes) else "path"
        buffer.write(value if kind == "bytes" else str(value).encode())
    elif isinstance(value, np.ndarray):
        kind = "array"
        np.save(buffer, value, allow_pickle=False)
    else:
        kind = "picture"
        picture = open_picture(value)
        if picture.mode in _TIFF:
            picture.save(buffer, "TIFF", compression="raw")
        else:
            picture = picture if picture.mode in _PNG else picture.convert(_CONVERTED.get(picture.mode, "RGB"))
            picture.save(buffer, "PNG")
    return {_KIND: kind, "data": base64.b64encode(buffer.getvalue()).decode()}


def picture_from_json(value: Any) -> Any:
    """Inverse of `picture_to_json`: the same form and, except in modes that no file has, the same pixels."""
    if not isinstance(value, dict):
        return value
    if _KIND not in value:
        return {name: picture_from_json(item) for name, item in value.items()}
    data = base64.b64decode(value["data"])
    if value[_KIND] == "array":
        return np.load(io.BytesIO(data), allow_pickle=False)
    if value[_KIND] == "path":
        return Path(data.decode())
    return data if value[_KIND] == "bytes" else open_picture(data)


def has_image_processor(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("preprocessor_config.json", "processor_config.json"))


def has_processor(folder: Path) -> bool:
    """Whether the folder has a vision-language model with a processor."""
    config = folder / "config.json"
    return config.is_file() and "vision_config" in files.read(config) and has_image_processor(folder)


def prompt_tokenizer(tokenizer: Any, folder: Path) -> Any:
    """The tokenizer, as a `PartsTokenizer` if the folder has a vision-language model with a processor."""
    return PartsTokenizer(tokenizer) if has_processor(folder) else tokenizer


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

    if not has_image_processor(folder):
        raise ValueError(
            f"{folder}: there is no preprocessor_config.json, which says how images are resized. Save the model's "
            "processor there with save_pretrained, or pass it as processing_class."
        )
    return AutoImageProcessor.from_pretrained(folder, backend="pil", trust_remote_code=False)


# Image arguments of `generate`, as transformers' processors return them


def native_of(model: Any) -> NativeConfig | None:
    """The parsed config of a loaded model, or of its base under an adapter; None for an exported program."""
    backend = model.backend.base if isinstance(model.backend, AdaptedBackend) else model.backend
    return backend.source.config if isinstance(backend, NativeBackend) else None


def split_images(model: Any, arguments: Mapping[str, Any]) -> tuple[dict[str, np.ndarray] | None, dict[str, Any]]:
    """Split the arguments of `generate` into the arrays of images (None without any), and the rest.

    Raises:
        TypeError: there are images, but the model was loaded without its vision tower.
        ValueError: an array is missing.
    """
    if arguments.get("pixel_values") is None:
        return None, dict(arguments)
    native = native_of(model)
    if native is None or native.vision_arch is None:
        raise TypeError(
            f"pixel_values were passed, and {model.name_or_path} was loaded without a vision tower. Load it with "
            "AutoModelForImageTextToText."
        )
    names = native.vision.pixels
    missing = [name for name in names if arguments.get(name) is None and name not in native.vision.optional]
    if missing:
        raise ValueError(
            f"generate must get {', '.join(names)} with images of a {native.vision.model_type}, got no {missing[0]}. "
            "Pass all that the processor returns."
        )
    arrays = {name: np.asarray(arguments[name]) for name in names if arguments.get(name) is not None}
    return arrays, {name: value for name, value in arguments.items() if name not in names}


def images_of_rows(model: Any, rows: Sequence[np.ndarray], arrays: Mapping[str, np.ndarray]) -> list[TextImages]:
    """The images of each row of ids, in the order of the rows.

    Raises:
        ValueError: the rows have fewer or more image tokens than the images have features.
    """
    family = native_of(model).vision
    token = getattr(model.config, family.image_token)
    waiting, images = family.patches(arrays, model.config), []
    for ids in rows:
        count, taken = int((ids == token).sum()), []
        while waiting and sum(len(image.tokens) for image in taken) < count:
            taken.append(waiting.pop(0))
        images.append(text_images(ids, token, taken, family.positions))
    if waiting:
        raise ValueError(
            f"There are {len(waiting)} more images than the image tokens of input_ids have room for. Pass the ids that "
            "the processor returned with them."
        )
    return images
