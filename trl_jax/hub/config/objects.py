"""Config objects of transformers, made of what a config.json says."""

from __future__ import annotations

import copy
from typing import Any

from trl_jax.hub.config.reader import with_floats


def config_class(model_type: str) -> Any:
    """transformers' class of a config."""
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[model_type]


def config_object(raw: dict[str, Any], source: str, **values: Any) -> Any:
    """The object of a config.json, with further values.

    Raises:
        ValueError: its class refuses a value.
    """
    content = with_floats(copy.deepcopy(raw))  # its classes change what they are given
    try:
        return config_class(raw["model_type"]).from_dict(content, **values)
    except Exception as error:  # its classes check their keys with errors of many types, none of which names the file
        raise ValueError(f"{source}: transformers refuses it: {error}. Correct that key.") from error
