"""What a processor returns for the images of prompts, as `generate` takes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from trl_jax.data.text_images import TextImages, text_images
from trl_jax.hub.config import NativeConfig
from trl_jax.hub.native_backend import NativeBackend
from trl_jax.hub.peft_backend import AdaptedBackend


def native_of(model: Any) -> NativeConfig | None:
    """The parsed config of a loaded model, or of its base under an adapter; None for an exported program."""
    backend = model.backend.base if isinstance(model.backend, AdaptedBackend) else model.backend
    return backend.source.config if isinstance(backend, NativeBackend) else None


def split_images(model: Any, given: Mapping[str, Any]) -> tuple[dict[str, np.ndarray] | None, dict[str, Any]]:
    """Split the arguments of `generate` into the arrays of images (None without any), and the rest.

    Raises:
        TypeError: there are images, and the model was loaded without its vision tower.
        ValueError: an array is missing.
    """
    if given.get("pixel_values") is None:
        return None, dict(given)
    native = native_of(model)
    if native is None or native.vision_arch is None:
        raise TypeError(
            f"pixel_values were passed, and {model.name_or_path} was loaded without a vision tower. Load it with "
            "AutoModelForImageTextToText."
        )
    names = native.vision.pixels
    missing = [name for name in names if given.get(name) is None]
    if missing:
        raise ValueError(
            f"generate must get {', '.join(names)} with images of a {native.vision.model_type}, got no {missing[0]}. "
            "Pass all that the processor returns."
        )
    return {name: np.asarray(given[name]) for name in names}, {n: v for n, v in given.items() if n not in names}


def images_of_rows(model: Any, rows: Sequence[np.ndarray], arrays: Mapping[str, np.ndarray]) -> list[TextImages]:
    """The images of each row of ids, in the order of the rows.

    Raises:
        ValueError: the rows have another number of image tokens than the images have features.
    """
    family = native_of(model).vision
    token = getattr(model.config, family.image_token)
    waiting, found = family.patches(arrays, model.config), []
    for ids in rows:
        wanted, taken = int((ids == token).sum()), []
        while waiting and sum(len(image.tokens) for image in taken) < wanted:
            taken.append(waiting.pop(0))
        found.append(text_images(ids, token, taken, family.positions))
    if waiting:
        raise ValueError(
            f"There are {len(waiting)} more images than the image tokens of input_ids have room for. Pass the ids that "
            "the processor returned with them."
        )
    return found
