"""Vision-language model types: the vision tower and connector, the names of their tensors on disk, and how processed
images become patches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, NamedTuple

import numpy as np

from trl_jax.data.images import ImagePatches
from trl_jax.hub.config_reader import ConfigReader, config_object, is_unread
from trl_jax.hub.tensor_map import Names
from trl_jax.models.arch import Arch, VisionArch


class Pictures(NamedTuple):
    """The pictures of a text after the image processor.

    processed: what the processor returned, as NumPy arrays by name.
    images: the images made from it. One picture may become several.
    tokenizer, config: of the checkpoint.
    image_token: the token that each feature of an image replaces.
    """

    processed: Mapping[str, np.ndarray]
    images: Sequence[ImagePatches]
    tokenizer: Any
    config: Any
    image_token: str

    def token(self, name: str) -> str:
        """Like the function `special_token`."""
        return special_token(self.tokenizer, name)


def special_token(tokenizer: Any, name: str) -> str:
    """A special token of a vision-language model, which is an attribute of transformers' tokenizer.

    Raises:
        ValueError: the tokenizer has none of this name.
    """
    try:
        return getattr(tokenizer, name)
    except AttributeError:
        raise ValueError(
            f"the tokenizer has no {name}, which the text around an image is written with. Use the tokenizer of the "
            "checkpoint."
        ) from None


def image_tokens(pictures: Pictures) -> list[str]:
    """For each picture, one image token per feature, if a picture is a single image."""
    return [pictures.image_token * len(image.tokens) for image in pictures.images]


@dataclass(frozen=True)
class VisionFamily:
    """What the rest of the hub needs to know about a vision-language model type, apart from its text part.

    Attributes:
        model_type: as in config.json.
        arch: reads the tower and the connector from the `vision_config` section and transformers' config object.
        names: our modules -> names on disk, as `Family.names`, without prefixes of older checkpoints.
        patches: what the processor returned for the images of a text, as NumPy arrays by name, and transformers' config
            object -> the images.
        pixels: the names of the arrays that the processor returns for images.
        optional: names in `pixels` that `patches` does not need, because transformers' processors drop them.
        other_outputs: the names of other values that the processor returns, which only `expansion` reads.
        options: transformers' config object -> the arguments that transformers' processor passes to the image
            processor.
        nested: whether the image processor takes a list of lists, here with one picture each.
        text: adapts the architecture of the text part for steps with images; None: it is unchanged.
        positions: token ids `[T]`, the id of image tokens and the images of a text -> positions `[T, A]`; None: tokens
            are counted.
        prefixes: (prefix in `names`, the prefix that some checkpoints have instead); kept on save.
        modules: (prefix in `names`, the prefix in transformers' modules).
        placeholder: the tokenizer's attribute for the token that stands for a picture in a text; None: the image token.
        expansion: the pictures of a text -> for each, the text that replaces its placeholder.
        connector_last: whether the connector follows the text model in transformers' model.
        image_token: the config's attribute for the id of image tokens.
    """

    model_type: str
    arch: Callable[[ConfigReader, Any], VisionArch]
    names: Callable[[VisionArch], Names]
    patches: Callable[[Mapping[str, np.ndarray], Any], list[ImagePatches]]
    pixels: tuple[str, ...] = ("pixel_values",)
    optional: tuple[str, ...] = ()
    other_outputs: tuple[str, ...] = ()
    options: Callable[[Any], dict[str, Any]] = lambda config: {}
    nested: bool = False
    text: Callable[[Arch, Any], Arch] | None = None
    positions: Callable[[np.ndarray, int, Sequence[ImagePatches]], np.ndarray] | None = None
    prefixes: tuple[tuple[str, str], ...] = ()
    modules: tuple[tuple[str, str], ...] = ()
    placeholder: str | None = None
    expansion: Callable[[Pictures], list[str]] = image_tokens
    connector_last: bool = False
    image_token: str = "image_token_id"

    def module(self, name: str) -> str:
        """transformers' name of a module or parameter of the tower or connector, by its name on disk."""
        for prefix, current in self.modules:
            if name.startswith(prefix):
                return current + name.removeprefix(prefix)
        return name

    def with_vision(self, arch: Arch, raw: dict[str, Any], source: str) -> Arch:
        """The architecture of the whole model, given its text part.

        Raises:
            ValueError: a key or a value of `vision_config` is not supported; the message names it.
        """
        whole = config_object(raw, source)
        if whole.vision_config is None:
            raise ValueError(f"{source}: vision_config is null, so the model has no vision tower. Train it on texts.")
        section = {key: value for key, value in whole.vision_config.to_dict().items() if key not in _OF_ANY_CONFIG}
        reader = ConfigReader(section, f"{source}: vision_config")
        vision = self.arch(reader, whole)
        kind = type(whole.vision_config)
        reader.skip(*_UNUSED)
        reader.finish(lambda key: is_unread(kind, key))
        return replace(arch if self.text is None else self.text(arch, whole), vision=vision)


# Keys that every config has, and keys that do not affect any tower.
_OF_ANY_CONFIG = frozenset(
    "architectures chunk_size_feed_forward dtype id2label is_encoder_decoder label2id model_type _name_or_path "
    "output_attentions output_hidden_states problem_type return_dict transformers_version".split()
)
_UNUSED = frozenset({"initializer_range", "initializer_factor", "projection_dim", "vocab_size"})


@cache
def vision_families() -> dict[str, VisionFamily]:
    """The vision families, by model_type."""
    modules = [vars(import_module(f"{__name__}.{module.name}")) for module in iter_modules(__path__)]
    every = [family for module in modules for family in module.get("FAMILIES", ())]
    return {family.model_type: family for family in sorted(every, key=lambda family: family.model_type)}
