"""Inputs of `generate`: prompts as ids or text, and the settings of a call."""

from __future__ import annotations

import copy
import dataclasses
import logging
import math
import warnings
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Any

import numpy as np

from trl_jax.core.secrets import shown
from trl_jax.core.text import brief
from trl_jax.data.chat import PartsTokenizer, rendered
from trl_jax.data.checks import check_no_media
from trl_jax.data.images import TextImages
from trl_jax.generation.beams import Beams
from trl_jax.generation.sampling import Options, Processor, Renormalize, Text, logits_processors, sampling_processors
from trl_jax.hub.torch_bridge import as_tensors, is_tensor

# Prompts: token ids in any form to unpadded rows, and back


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prompts:
    """Rows of token ids.

    ids: int64 `[rows, T]`, as passed.
    rows: int32 ids of each row, without padding.
    in_torch: whether a torch tensor was passed.
    """

    ids: np.ndarray
    rows: list[np.ndarray]
    in_torch: bool = False

    @property
    def width(self) -> int:
        return self.ids.shape[1]

    def repeats(self, images: Sequence[TextImages] | None) -> int:
        """The number of adjacent rows in which each prompt is repeated, with equal images."""
        keys = [b""] * len(self.rows) if images is None else [text.key for text in images]
        both = zip((row.tobytes() for row in self.rows), keys, strict=True)
        return math.gcd(*(len(list(run)) for _, run in groupby(both)))

    def sequences(self, tokens: np.ndarray, completions: int) -> Any:
        """int64 `[rows * completions, T + new]`: the prompts as passed, followed by their tokens."""
        return self.back(np.concatenate([self.ids.repeat(completions, axis=0), tokens], axis=1))

    def back(self, array: np.ndarray) -> Any:
        """The array, as a torch tensor if the prompts were one."""
        return as_tensors(array) if self.in_torch else array


def read_prompts(input_ids: Any, attention_mask: Any, settings: Settings, vocabulary: int) -> Prompts:
    """Read lists of ids, or NumPy, JAX or torch arrays, with or without left padding.

    Args:
        input_ids: None means a single BOS token. Lists may have different lengths.
        attention_mask: 0 for padding. Without it, pad ids count as padding unless they are also an EOS.

    Raises:
        ValueError: input_ids are not rows of ids in the vocabulary, a row is empty, or the mask has another shape.
    """
    in_torch = is_tensor(input_ids)
    if _ragged(input_ids):
        visible = [[1] * len(row) for row in input_ids] if attention_mask is None else attention_mask
        input_ids, attention_mask = left_padded(input_ids, settings.pad), left_padded(visible, 0)
    ids = _ids(input_ids, settings)
    if ids.size and not 0 <= ids.min() <= ids.max() < vocabulary:
        outside = ids.max() if ids.max() >= vocabulary else ids.min()
        raise ValueError(
            f"input_ids has the id {outside}, but the model's ids run from 0 to {vocabulary - 1}. Use the model's own "
            "tokenizer."
        )
    mask = _deduced_mask(ids, settings) if attention_mask is None else _mask(attention_mask, ids)
    for row, visible in enumerate(mask):
        if not visible.any():
            raise ValueError(
                f"Row {row} of input_ids is all padding. Each prompt needs at least one token, such as the BOS."
            )
    if len(ids) > 1 and _padded_right(ids, mask, attention_mask is not None, settings.pad):
        logger.warning(
            "A decoder-only architecture is being used, but right-padding was detected! For correct generation "
            "results, please set `padding_side='left'` when initializing the tokenizer."
        )
    rows = [row[visible].astype(np.int32) for row, visible in zip(ids, mask, strict=True)]
    return Prompts(ids, rows, in_torch)


def left_padded(rows: Sequence[Sequence[int]], fill: int | None) -> np.ndarray:
    """Left-pad rows of any lengths, int64 `[rows, T]`."""
    padded = np.full((len(rows), max(map(len, rows))), 0 if fill is None else fill, np.int64)
    for row, padded_row in zip(rows, padded, strict=True):
        padded_row[len(padded_row) - len(row) :] = row
    return padded


def _ragged(input_ids: Any) -> bool:
    """Whether `input_ids` is a list of rows with different lengths."""
    if not isinstance(input_ids, list | tuple) or not all(isinstance(row, Sized) for row in input_ids):
        return False
    return len({len(row) for row in input_ids}) > 1


def _ids(input_ids: Any, settings: Settings) -> np.ndarray:
    if input_ids is None:
        if settings.config.bos_token_id is None:
            raise ValueError("`bos_token_id` has to be defined when no `input_ids` are provided.")
        input_ids = [[settings.config.bos_token_id]]
    ids = np.asarray(input_ids)
    if ids.ndim != 2 or not ids.size or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(
            f"input_ids must be integers [rows, tokens] with at least one token per row, got shape {ids.shape} and "
            f"dtype {ids.dtype}."
        )
    return ids.astype(np.int64)


def _mask(attention_mask: Any, ids: np.ndarray) -> np.ndarray:
    mask = np.asarray(attention_mask)
    if mask.ndim != 2:
        raise ValueError("`attention_mask` passed to `generate` must be 2D.")
    if mask.shape != ids.shape:
        raise ValueError(f"attention_mask must have the shape of input_ids, {ids.shape}, got {mask.shape}.")
    return mask != 0


def _deduced_mask(ids: np.ndarray, settings: Settings) -> np.ndarray:
    """False for pad ids; True everywhere if the pad id is also an EOS and thus may be a real token."""
    if len(ids) > 1 and settings.pad in settings.eos:
        logger.warning(
            "The attention mask is not set with a batched input, and cannot be inferred from input because pad token "
            "is same as eos token. As a consequence, you may observe unexpected behavior. Please pass your input's "
            "`attention_mask` to obtain reliable results."
        )
    if settings.pad is None or settings.pad in settings.eos:
        return np.ones(ids.shape, bool)
    return ids != settings.pad


def _padded_right(ids: np.ndarray, mask: np.ndarray, has_mask: bool, pad: int | None) -> bool:
    if pad is None:
        return False
    return bool((~mask[:, -1]).any() if has_mask else (ids[:, -1] == pad).any())


# Settings: a GenerationConfig, the model's own, transformers' defaults, and keyword arguments


_BOTH = (
    "Both `{new}` (={new_value}) and `{whole}`(={whole_value}) seem to have been set. `{new}` will take precedence. "
    "Please refer to the documentation for more information. "
    "(https://huggingface.co/docs/transformers/main/en/main_classes/text_generation)"
)


@dataclass(frozen=True)
class Settings:
    """A complete GenerationConfig, except for what depends on the prompts.

    config: a copy of transformers' object.
    eos: ids that end a text.
    pad: id that fills a row after its end; None if neither a pad id nor an EOS is known.
    default_max_length, default_min_length: whether neither the user nor the checkpoint set these values.
    """

    config: Any
    eos: tuple[int, ...]
    pad: int | None
    default_max_length: bool
    default_min_length: bool

    @property
    def completions(self) -> int:
        """Number of completions per prompt."""
        return self.config.num_return_sequences

    @property
    def beams(self) -> Beams | None:
        """Settings of the beam search; None if there is none."""
        config = self.config
        if (config.num_beams or 1) == 1:
            return None
        return Beams(config.num_beams, self.completions, float(config.length_penalty), config.early_stopping)


def resolve(model: Any, config: Any, keywords: Mapping[str, Any]) -> tuple[Settings, dict[str, Any]]:
    """Resolve the fields as transformers does. Later sources fill in fields that are None: `config`, the model's
    generation_config, transformers' defaults. Keyword arguments override all of them.

    Returns:
        The settings, and the keyword arguments that are not fields.

    Raises:
        ValueError: fields contradict each other (with transformers' message), or are not supported in this release.
    """
    from transformers import GenerationConfig

    lengths = [field.max_length for field in (config, model.generation_config) if field is not None]
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
        default_max_length=all(length is None for length in (keywords.get("max_length"), *lengths)),
        default_min_length=all(length is None for length in (keywords.get("min_length"), *given_least)),
    )
    return settings, unused


def max_length(settings: Settings, prompt_length: int, positions: int | None) -> int:
    """Maximum length of a prompt, including its padding, and its new tokens.

    Args:
        positions: `max_position_embeddings` of the model's config, which limits a default length.

    Raises:
        ValueError: there is no room for a new token.
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
    """The options of the score processors; warns if the minimum length exceeds the maximum."""
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
    """Processors by field: those applied before the user's own, and those applied after.

    Raises:
        ValueError: a value is out of range (with transformers' message).
    """
    options = options_of(settings, text.prompt_length, text.max_length)
    least = 1 if settings.beams is None else 1 + max(1, len(settings.eos))
    behind = sampling_processors(options, least) if settings.config.do_sample else {}
    if settings.config.renormalize_logits is True:
        behind["renormalize_logits"] = Renormalize()
    return logits_processors(options, text), behind


def _both(new: str, whole: str, config: Any) -> None:
    values = vars(config)
    logger.warning(_BOTH.format(new=new, new_value=values[new], whole=whole, whole_value=values[whole]))


# Unsupported arguments of transformers' `generate`, each with an alternative


_BEAMS = "beam groups are not supported. Leave it out and use num_beams only."
_ASSISTED = "there is no assisted decoding, which only affects speed. Leave it out."
_CONSTRAINED = "there is no constrained beam search. Pass your own logits_processor or prefix_allowed_tokens_fn."
_GUIDANCE = "there is no guidance, which runs the model twice. Leave it out."
_INNER = "intermediate values of the model are not kept. Get them from transformers' model."
_KEPT = "the cache always stores keys and values as computed, on the device. Leave it out."

# Field of GenerationConfig -> values that leave the feature off, and the error message for other values.
_FIELDS: dict[str, tuple[tuple[Any, ...], str]] = {
    "num_beam_groups": ((None, 1), _BEAMS),
    "diversity_penalty": ((None, 0.0), _BEAMS),
    "constraints": ((None,), _CONSTRAINED),
    "force_words_ids": ((None,), _CONSTRAINED),
    "dola_layers": ((None,), "there is no DoLa decoding. Leave it out."),
    "penalty_alpha": ((None, 0, 0.0), "there is no contrastive search. Sample with top_p and a repetition_penalty."),
    "use_mtp": ((None, False), _ASSISTED),
    "prompt_lookup_num_tokens": ((None,), _ASSISTED),
    "assistant_early_exit": ((None,), _ASSISTED),
    "guidance_scale": ((None, 1), _GUIDANCE),
    "watermarking_config": ((None,), "there are no watermarks. Pass a logits_processor that creates one."),
    "token_healing": ((None, False), "tokens are not healed. Remove the last token of the prompt yourself."),
    "output_attentions": ((None, False), _INNER),
    "output_hidden_states": ((None, False), _INNER),
    "cache_config": ((None,), _KEPT),
}
_CACHES = (None, "dynamic", "static", "hybrid", "sliding_window", "hybrid_chunked", "hybrid_chunked_static")

# Argument of `generate` -> the error message for any value but None.
_ARGUMENTS = {
    "assistant_model": _ASSISTED,
    "assistant_tokenizer": _ASSISTED,
    "negative_prompt_ids": _GUIDANCE,
    "negative_prompt_attention_mask": _GUIDANCE,
    "custom_generate": "transformers' decoding loops need torch. Leave it out.",
    "inputs_embeds": "prompts must be token ids. Pass input_ids.",
    "position_ids": "positions are counted from the first token of each row. Leave it out.",
    "past_key_values": "each call starts from its prompts. Pass complete input_ids.",
    "cache": "each call starts from its prompts. Pass complete input_ids.",
}


# Fields that cannot be combined with beam search -> values that leave them off.
_NOT_WITH_BEAMS: dict[str, tuple[Any, ...]] = {
    "stop_strings": (None,), "max_time": (None,), "return_dict_in_generate": (None, False), "top_h": (None,),
    "typical_p": (None, 1.0),
}  # fmt: skip


def _check_beams(values: Mapping[str, Any]) -> None:
    """Raise ValueError for fields that beam search does not support, or that contradict it (with transformers'
    message)."""
    beams, completions = values["num_beams"] or 1, values["num_return_sequences"] or 1
    if beams == 1:
        return
    if completions > beams:
        raise ValueError(f"`num_return_sequences` ({completions}) has to be smaller or equal to `num_beams` ({beams}).")
    refuse_with_beams(beams, [name for name, idle in _NOT_WITH_BEAMS.items() if values[name] not in idle])


def refuse_with_beams(beams: int, names: Sequence[str]) -> None:
    """Raise ValueError if there are options that cannot be combined with beam search."""
    if names:
        raise ValueError(
            f"generate: {names[0]} with num_beams={beams} is not in this release of trl_jax. Leave one of the two out."
        )


def refuse_fields(config: Any) -> None:
    """Raise ValueError if a GenerationConfig asks for something unsupported."""
    values = vars(config)
    _check_beams(values)
    refused = {name: why for name, (idle, why) in _FIELDS.items() if values.get(name) not in idle}
    if values["cache_implementation"] == "paged":
        refused["cache_implementation"] = "call generate_batch, which transformers uses in this case."
    elif values["cache_implementation"] not in _CACHES:
        refused["cache_implementation"] = _KEPT
    _refuse(refused, values)


def refuse_arguments(arguments: Mapping[str, Any]) -> None:
    """Raise ValueError if an unsupported argument was passed."""
    _refuse({name: why for name, why in _ARGUMENTS.items() if arguments.get(name) is not None}, arguments)


def _refuse(refused: dict[str, str], values: Mapping[str, Any]) -> None:
    for name, why in refused.items():
        raise ValueError(f"generate: {shown(name, values[name])} is not in this release of trl_jax: {why}")


# Stop strings, as transformers' `stop_strings`: checked at the last token


_PREFIX = "abcdef"  # tokenizers treat the first token of a text differently, so the token is decoded after a prefix


class StopStrings:
    """Whether the last token of a row completes one of the strings. Compares bytes if tokens can be parts of
    characters.

    Args:
        tokenizer: the tokenizer of the ids.
    """

    def __init__(self, strings: str | list[str], tokenizer: Any):
        if tokenizer is None:
            raise ValueError(
                "There are one or more stop strings, either in the arguments to `generate` or in the model's "
                "generation config, but we could not locate a tokenizer. When generating with stop strings, you must "
                "pass the model's tokenizer to the `tokenizer` argument of `generate`."
            )
        strings = [strings] if isinstance(strings, str) else list(strings)
        self._wanted = [string.encode() for string in strings]
        self._text = lru_cache(None)(_TokenTexts(tokenizer))

    def __call__(self, ids: np.ndarray, scores: Any = None) -> np.ndarray:
        """Whether each row ends, bool `[B]`, for int ids `[B, T]` that include the prompts."""
        return np.array([self._ends_at(row, len(row) - 1) for row in ids.tolist()])

    def end_of(self, prompt: Sequence[int], tokens: Sequence[int], first: int = 0) -> int | None:
        """The number of `tokens` up to and including the one that completes a string; None if none does.

        Args:
            first: the first of `tokens` to check.
        """
        row, start = [*map(int, prompt), *map(int, tokens)], len(prompt)
        return next((end - start + 1 for end in range(start + first, len(row)) if self._ends_at(row, end)), None)

    def _ends_at(self, row: list[int], last: int) -> bool:
        """Whether the token at index `last` completes a string."""
        return any(self._completes(row, last, stop) for stop in self._wanted)

    def _completes(self, row: list[int], last: int, stop: bytes) -> bool:
        text, missing = self._text(row[last]), len(stop) - 1
        while missing > 0 and last > 0:
            last -= 1
            before = self._text(row[last])[-missing:]
            text, missing = before + text, missing - len(before)
        return stop in text


class _TokenTexts:
    """The bytes of each token inside a text."""

    def __init__(self, tokenizer: Any):
        self._tokenizer, self._kind = tokenizer, _kind(tokenizer)
        self._begin = tokenizer.convert_ids_to_tokens(tokenizer(_PREFIX, add_special_tokens=False)["input_ids"])
        self._bytes = _bytes_of_characters() if self._kind == "ByteLevel" else {}

    def __call__(self, id_: int) -> bytes:
        token = self._tokenizer.convert_ids_to_tokens(id_)
        if token is None:  # the model's vocabulary is larger than the tokenizer's
            return b"\xff"
        if self._kind == "ByteLevel" and all(character in self._bytes for character in token):
            return bytes(self._bytes[character] for character in token)
        if self._kind == "ByteFallback" and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        text = self._tokenizer.convert_tokens_to_string([*self._begin, token])
        return text[text.index(_PREFIX) + len(_PREFIX) :].encode()


def _kind(tokenizer: Any) -> str | None:
    """The tokenizer type, if its tokens can be parts of characters."""
    from transformers import PreTrainedTokenizerFast

    if not isinstance(tokenizer, PreTrainedTokenizerFast) or tokenizer.backend_tokenizer.decoder is None:
        return None
    state = tokenizer.backend_tokenizer.decoder.__getstate__()
    return next((kind for kind in ("ByteFallback", "ByteLevel") if f'"{kind}"'.encode() in state), None)


def _bytes_of_characters() -> dict[str, int]:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {character: byte for byte, character in bytes_to_unicode().items()}


# Text in, text out


def encoded_prompt(
    prompt: str | Sequence[dict[str, Any]], tokenizer: Any, where: str = "The prompt", **template_kwargs: Any
) -> list[int]:
    """Token ids of a text with the tokenizer's special tokens, or of a conversation in the chat template.

    A conversation ends with a generation prompt. If its last message is from the assistant, that message is continued.

    Args:
        tokenizer: a `PartsTokenizer` for a model whose processor renders conversations.
        where: name of the prompt in errors.

    Raises:
        ValueError: the prompt is neither text nor messages, or has images, or the chat template is missing or fails.
    """
    if isinstance(prompt, str):
        return list(tokenizer(prompt)["input_ids"])
    messages = prompt if isinstance(prompt, Sequence) else ()
    if not messages or not all(isinstance(message, dict) and "role" in message for message in messages):
        raise ValueError(
            f"{where} must be a string, or messages such as [{{'role': 'user', 'content': 'Hi'}}], got {brief(prompt)}."
        )
    check_no_media(list(messages), "The prompt")
    if tokenizer.chat_template is None:
        raise ValueError(
            f"{where} is a conversation, but the tokenizer has no chat template. Pass text, or set "
            "tokenizer.chat_template."
        )
    continues = prompt[-1]["role"] == "assistant"
    options = {"add_generation_prompt": not continues, "continue_final_message": continues} | template_kwargs
    if isinstance(tokenizer, PartsTokenizer):
        return rendered(tokenizer, list(prompt), where, **options)["input_ids"]
    text = rendered(tokenizer, list(prompt), where, tokenize=False, **options)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def ids_of_tokenizer(model: Any, tokenizer: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """Add the tokenizer's EOS and pad ids if neither the fields nor the model's generation_config have them."""
    config_fields = vars(model.generation_config)
    eos = tokenizer.eos_token_id
    pad = eos if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    token_ids = {"eos_token_id": eos, "pad_token_id": pad}
    return {name: id_ for name, id_ in token_ids.items() if config_fields[name] is None and id_ is not None} | fields


def decoded(ids: Sequence[int], tokenizer: Any) -> str:
    """The text of new tokens, without special tokens."""
    return tokenizer.decode(ids, skip_special_tokens=True)
