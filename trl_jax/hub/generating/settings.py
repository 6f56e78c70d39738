"""Resolves what a generation is asked for: a GenerationConfig, the model's own, transformers' defaults and keywords."""

from __future__ import annotations

import copy
import dataclasses
import logging
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from trl_jax.generation.options import Options, Text, logits_processors, sampling_processors
from trl_jax.generation.processors import Processor
from trl_jax.generation.warpers import Renormalize
from trl_jax.hub.generating.refusals import refuse_fields

logger = logging.getLogger(__name__)
_BOTH = (
    "Both `{new}` (={new_value}) and `{whole}`(={whole_value}) seem to have been set. `{new}` will take precedence. "
    "Please refer to the documentation for more information. "
    "(https://huggingface.co/docs/transformers/main/en/main_classes/text_generation)"
)


@dataclass(frozen=True)
class Settings:
    """A GenerationConfig in which nothing is open but what depends on the prompts.

    config: transformers' object, a copy. eos: ids that end a text. pad: the id behind its end; None where neither it
    nor an EOS is known. default_max_length, default_min_length: nobody chose them.
    """

    config: Any
    eos: tuple[int, ...]
    pad: int | None
    default_max_length: bool
    default_min_length: bool

    @property
    def completions(self) -> int:
        """Of each prompt."""
        return self.config.num_return_sequences


def resolve(model: Any, config: Any, keywords: Mapping[str, Any]) -> tuple[Settings, dict[str, Any]]:
    """Settle the fields as transformers does: those of `config`, where they are None the model's generation_config,
    then transformers' defaults; last of all the keywords, whatever they are.

    Returns the settings, and the keywords that are no field.

    Raises:
        ValueError: fields that contradict each other, in transformers' words, or are not in this release.
    """
    from transformers import GenerationConfig

    given = [field.max_length for field in (config, model.generation_config) if field is not None]
    given_least = [field.min_length for field in (config, model.generation_config) if field is not None]
    resolved = GenerationConfig() if config is None else copy.deepcopy(config)
    resolved.update(**model.generation_config.to_dict(), defaults_only=True, allow_custom_entries=True)
    resolved.update(**GenerationConfig._get_default_generation_params(), defaults_only=True)
    unused = resolved.update(**keywords)
    refuse_fields(resolved)
    eos = () if resolved.eos_token_id is None else tuple(np.atleast_1d(np.asarray(resolved.eos_token_id)).tolist())
    pad = resolved.pad_token_id if resolved.pad_token_id is not None else next(iter(eos), None)
    settings = Settings(
        resolved,
        eos,
        None if pad is None else int(pad),
        default_max_length=all(length is None for length in (keywords.get("max_length"), *given)),
        default_min_length=all(length is None for length in (keywords.get("min_length"), *given_least)),
    )
    return settings, unused


def max_length(settings: Settings, prompt_length: int, positions: int | None) -> int:
    """The longest that a prompt and its new tokens may be, the padding of the prompt counted.

    Args:
        positions: `max_position_embeddings` of the model's config, which ends a length that nobody chose.

    Raises:
        ValueError: no room for a new token.
    """
    config, longest = settings.config, settings.config.max_length
    if config.max_new_tokens is not None:
        if not settings.default_max_length and config.max_length is not None:
            _both("max_new_tokens", "max_length", config)
        longest = config.max_new_tokens + prompt_length
    elif settings.default_max_length:
        longest = min(config.max_length + prompt_length, positions or config.max_length + prompt_length)
        warnings.warn(
            f"Using the model-agnostic default `max_length` (={longest}) to control the generation length. We "
            "recommend setting `max_new_tokens` to control the maximum length of the generation.",
            UserWarning,
            stacklevel=4,
        )
    if prompt_length >= longest:
        raise ValueError(
            f"Input length of input_ids is {prompt_length}, but `max_length` is set to {longest}. This can lead to "
            "unexpected behavior. You should consider increasing `max_length` or, better yet, setting "
            "`max_new_tokens`."
        )
    return longest


def options_of(settings: Settings, prompt_length: int, longest: int) -> Options:
    """The fields that change scores."""
    config = settings.config
    options = Options(**{field.name: vars(config)[field.name] for field in dataclasses.fields(Options)})
    if config.min_new_tokens is None:
        least = config.min_length
    else:
        if not settings.default_min_length:
            _both("min_new_tokens", "min_length", config)
        least = config.min_new_tokens + prompt_length
    if least > longest:
        name = "min_length" if config.min_new_tokens is None else "min_new_tokens"
        warnings.warn(
            f"Unfeasible length constraints: `{name}` ({vars(config)[name]}) is larger than the maximum possible "
            f"length ({longest}). Generation will stop at the defined maximum length. You should decrease the minimum "
            "length and/or increase the maximum length.",
            UserWarning,
            stacklevel=4,
        )
    return dataclasses.replace(options, min_length=least)


def processors_of(settings: Settings, text: Text) -> tuple[dict[str, Processor], dict[str, Processor]]:
    """Processors by their field: those before the caller's own, and those behind.

    Raises:
        ValueError: a value out of its range, in transformers' words.
    """
    options = options_of(settings, text.prompt_length, text.max_length)
    behind = sampling_processors(options) if settings.config.do_sample else {}
    if settings.config.renormalize_logits is True:
        behind["renormalize_logits"] = Renormalize()
    return logits_processors(options, text), behind


def _both(new: str, whole: str, config: Any) -> None:
    values = vars(config)
    logger.warning(_BOTH.format(new=new, new_value=values[new], whole=whole, whole_value=values[whole]))
