"""What `generate` is given: prompts as ids or text, and the settings of one call."""

from __future__ import annotations

import copy
import dataclasses
import logging
import math
import sys
import warnings
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Any

import numpy as np

from trl_jax.core.secrets import shown
from trl_jax.core.text import brief
from trl_jax.data.chat import rendered
from trl_jax.data.checks import check_no_media
from trl_jax.generation.sampling import Options, Processor, Renormalize, Text, logits_processors, sampling_processors
from trl_jax.hub.torch_bridge import as_tensors

# ----------------------------------------------------------------------------------------------------
# Prompts as callers have them, as rows without padding, and sequences as callers get them back.


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prompts:
    """Rows of token ids.

    ids: int64 `[rows, T]`, as they came. rows: of each, the tokens that are no padding, int32. in_torch: whether they
    came as torch's tensor.
    """

    ids: np.ndarray
    rows: list[np.ndarray]
    in_torch: bool = False

    @property
    def width(self) -> int:
        return self.ids.shape[1]

    def grouped(self, completions: int) -> tuple[list[np.ndarray], int]:
        """Each prompt once where rows that are equal follow each other, and how many completions each then has."""
        runs = [len(list(run)) for _, run in groupby(row.tobytes() for row in self.rows)]
        repeats = math.gcd(*runs)
        return self.rows[::repeats], repeats * completions

    def sequences(self, tokens: np.ndarray, completions: int) -> Any:
        """int64 `[rows x completions, T + new]`, the prompts as they came with their tokens behind them."""
        return self.back(np.concatenate([self.ids.repeat(completions, axis=0), tokens], axis=1))

    def back(self, array: np.ndarray) -> Any:
        """An array, as torch's tensor where the prompts came so."""
        return as_tensors(array) if self.in_torch else array


def is_torch(value: Any) -> bool:
    """Whether it is torch's tensor; torch is not imported to find out."""
    return "torch" in sys.modules and isinstance(value, sys.modules["torch"].Tensor)


def read_prompts(input_ids: Any, attention_mask: Any, settings: Settings, vocabulary: int) -> Prompts:
    """Take lists of ids, NumPy's, JAX's or torch's arrays, padded on the left or not.

    Args:
        input_ids: None is the BOS alone. Lists may be of different lengths.
        attention_mask: 0 where a token is padding; without it, pad ids are where they are no EOS.

    Raises:
        ValueError: no rows of ids of the vocabulary, a row without any, or a mask of another shape.
    """
    in_torch = is_torch(input_ids)
    if _ragged(input_ids):
        visible = [[1] * len(row) for row in input_ids] if attention_mask is None else attention_mask
        input_ids, attention_mask = left_padded(input_ids, settings.pad), left_padded(visible, 0)
    ids = _ids(input_ids, settings)
    if ids.size and not 0 <= ids.min() <= ids.max() < vocabulary:
        outside = ids.max() if ids.max() >= vocabulary else ids.min()
        raise ValueError(
            f"input_ids has the id {outside}, but the model embeds the ids 0 to {vocabulary - 1}. Use the tokenizer "
            "that goes with it."
        )
    mask = _deduced_mask(ids, settings) if attention_mask is None else _mask(attention_mask, ids)
    for row, visible in enumerate(mask):
        if not visible.any():
            raise ValueError(
                f"Row {row} of input_ids has no token but padding. Give each prompt at least one, such as the BOS."
            )
    if len(ids) > 1 and _padded_right(ids, mask, attention_mask is not None, settings.pad):
        logger.warning(
            "A decoder-only architecture is being used, but right-padding was detected! For correct generation "
            "results, please set `padding_side='left'` when initializing the tokenizer."
        )
    rows = [row[visible].astype(np.int32) for row, visible in zip(ids, mask, strict=True)]
    return Prompts(ids, rows, in_torch)


def left_padded(rows: Sequence[Sequence[int]], fill: int | None) -> np.ndarray:
    """Rows of any lengths side by side, int64 `[rows, T]`."""
    padded = np.full((len(rows), max(map(len, rows))), 0 if fill is None else fill, np.int64)
    for row, own in zip(rows, padded, strict=True):
        own[len(own) - len(row) :] = row
    return padded


def _ragged(input_ids: Any) -> bool:
    """Whether it is a list of rows of different lengths."""
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
            f"input_ids has the shape {ids.shape} and the type {ids.dtype}: wanted whole numbers, [rows, tokens], with "
            "at least one token a row."
        )
    return ids.astype(np.int64)


def _mask(attention_mask: Any, ids: np.ndarray) -> np.ndarray:
    mask = np.asarray(attention_mask)
    if mask.ndim != 2:
        raise ValueError("`attention_mask` passed to `generate` must be 2D.")
    if mask.shape != ids.shape:
        raise ValueError(f"attention_mask has the shape {mask.shape}: wanted that of input_ids, {ids.shape}.")
    return mask != 0


def _deduced_mask(ids: np.ndarray, settings: Settings) -> np.ndarray:
    """True but at pad ids; everywhere where the pad id ends texts, too, and so may be meant."""
    if len(ids) > 1 and settings.pad in settings.eos:
        logger.warning(
            "The attention mask is not set with a batched input, and cannot be inferred from input because pad token "
            "is same as eos token. As a consequence, you may observe unexpected behavior. Please pass your input's "
            "`attention_mask` to obtain reliable results."
        )
    if settings.pad is None or settings.pad in settings.eos:
        return np.ones(ids.shape, bool)
    return ids != settings.pad


def _padded_right(ids: np.ndarray, mask: np.ndarray, given: bool, pad: int | None) -> bool:
    if pad is None:
        return False
    return bool((~mask[:, -1]).any() if given else (ids[:, -1] == pad).any())


# ----------------------------------------------------------------------------------------------------
# Resolves what a generation is asked for: a GenerationConfig, the model's own, transformers' defaults and keywords.


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


# ----------------------------------------------------------------------------------------------------
# Arguments of transformers' `generate` that this release does not have, each with what to do instead.


_BEAMS = (
    "there are no beams. Sample with do_sample=True and num_return_sequences, and rank the answers by their logprobs."
)
_ASSISTED = "there is no assisted decoding, which gives the same text sooner. Leave it out."
_CONSTRAINED = "there are no beams, which it needs. Pass a logits_processor or prefix_allowed_tokens_fn of your own."
_GUIDANCE = "there is no guidance, which runs the model twice. Leave it out."
_INNER = "a step keeps none of the model's inner values. Take them from transformers' own model."
_KEPT = "keys and values are kept as they are computed, on the device. Leave it out."

# Field of GenerationConfig -> the values that ask for nothing, and what is said of others.
_FIELDS: dict[str, tuple[tuple[Any, ...], str]] = {
    "num_beams": ((None, 1), _BEAMS),
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
    "watermarking_config": ((None,), "there are no watermarks. Pass a logits_processor that makes one."),
    "token_healing": ((None, False), "prompts are not healed. Cut the last token off the prompt yourself."),
    "output_attentions": ((None, False), _INNER),
    "output_hidden_states": ((None, False), _INNER),
    "cache_config": ((None,), _KEPT),
}
_CACHES = (None, "dynamic", "static", "hybrid", "sliding_window", "hybrid_chunked", "hybrid_chunked_static")

# Argument of `generate` -> what is said of any value but None.
_ARGUMENTS = {
    "assistant_model": _ASSISTED,
    "assistant_tokenizer": _ASSISTED,
    "negative_prompt_ids": _GUIDANCE,
    "negative_prompt_attention_mask": _GUIDANCE,
    "custom_generate": "transformers' decoding loops are torch's. Leave it out.",
    "inputs_embeds": "prompts are token ids. Pass input_ids.",
    "position_ids": "positions are counted from each row's first token on. Leave it out.",
    "past_key_values": "each call begins with its prompts. Pass whole input_ids.",
    "cache": "each call begins with its prompts. Pass whole input_ids.",
}


def refuse_fields(config: Any) -> None:
    """Raises ValueError where a GenerationConfig asks for something that is not there."""
    values = vars(config)
    asked = {name: why for name, (idle, why) in _FIELDS.items() if values.get(name) not in idle}
    if values["cache_implementation"] == "paged":
        asked["cache_implementation"] = "call generate_batch, which is what transformers does then."
    elif values["cache_implementation"] not in _CACHES:
        asked["cache_implementation"] = _KEPT
    _refuse(asked, values)


def refuse_arguments(arguments: Mapping[str, Any]) -> None:
    """Raises ValueError where one of these was passed."""
    _refuse({name: why for name, why in _ARGUMENTS.items() if arguments.get(name) is not None}, arguments)


def _refuse(asked: dict[str, str], values: Mapping[str, Any]) -> None:
    for name, why in asked.items():
        raise ValueError(f"generate: {shown(name, values[name])} is not in this release of trl_jax: {why}")


# ----------------------------------------------------------------------------------------------------
# Strings that end a text, as transformers' `stop_strings`: looked for where the last token ends or completes them.


_PREFIX = "abcdef"  # tokenizers treat the first token of a text differently


class StopStrings:
    """Whether a row's last token completes one of the strings; bytes are compared where tokens are parts of
    characters.

    Args:
        tokenizer: the one that the ids are of.
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
        """Of int `[B, T]`, prompts and all: bool `[B]`."""
        return np.array([any(self._completes(row, wanted) for wanted in self._wanted) for row in ids.tolist()])

    def _completes(self, row: list[int], wanted: bytes) -> bool:
        text, missing = self._text(row[-1]), len(wanted) - 1
        for id_ in reversed(row[:-1]):
            if missing <= 0:
                break
            before = self._text(id_)[-missing:]
            text, missing = before + text, missing - len(before)
        return wanted in text


class _TokenTexts:
    """The bytes of a token within a text."""

    def __init__(self, tokenizer: Any):
        self._tokenizer, self._kind = tokenizer, _kind(tokenizer)
        self._begin = tokenizer.convert_ids_to_tokens(tokenizer(_PREFIX, add_special_tokens=False)["input_ids"])
        self._bytes = _bytes_of_characters() if self._kind == "ByteLevel" else {}

    def __call__(self, id_: int) -> bytes:
        token = self._tokenizer.convert_ids_to_tokens(id_)
        if token is None:  # the model has more ids than the tokenizer
            return b"\xff"
        if self._kind == "ByteLevel" and all(character in self._bytes for character in token):
            return bytes(self._bytes[character] for character in token)
        if self._kind == "ByteFallback" and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        text = self._tokenizer.convert_tokens_to_string([*self._begin, token])
        return text[text.index(_PREFIX) + len(_PREFIX) :].encode()


def _kind(tokenizer: Any) -> str | None:
    """The kind of tokens that may be parts of characters, if they are of one."""
    from transformers import PreTrainedTokenizerFast

    if not isinstance(tokenizer, PreTrainedTokenizerFast) or tokenizer.backend_tokenizer.decoder is None:
        return None
    state = tokenizer.backend_tokenizer.decoder.__getstate__()
    return next((kind for kind in ("ByteFallback", "ByteLevel") if f'"{kind}"'.encode() in state), None)


def _bytes_of_characters() -> dict[str, int]:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {character: byte for byte, character in bytes_to_unicode().items()}


# ----------------------------------------------------------------------------------------------------
# Text in, text out: prompts as strings or conversations, completions as strings.


def encoded_prompt(
    prompt: str | Sequence[dict[str, Any]], tokenizer: Any, where: str = "The prompt", **template_kwargs: Any
) -> list[int]:
    """Token ids of a text as the tokenizer begins one, or of a conversation in its chat template.

    A conversation is left open for an answer; one that ends with the assistant's message is gone on with.

    Args:
        where: names the prompt in errors.

    Raises:
        ValueError: neither of them, a conversation and no chat template, one that makes too much, or one with images.
    """
    if isinstance(prompt, str):
        return list(tokenizer(prompt)["input_ids"])
    messages = prompt if isinstance(prompt, Sequence) else ()
    if not messages or not all(isinstance(message, dict) and "role" in message for message in messages):
        raise ValueError(
            f"{where} is {brief(prompt)}: wanted a string, or messages as in [{{'role': 'user', 'content': 'Hi'}}]."
        )
    check_no_media(list(messages), "The prompt")
    if tokenizer.chat_template is None:
        raise ValueError(
            f"{where} is a conversation, but the tokenizer has no chat template. Pass text, or set "
            "tokenizer.chat_template."
        )
    continues = prompt[-1]["role"] == "assistant"
    text = rendered(
        tokenizer, list(prompt), where, tokenize=False, add_generation_prompt=not continues,
        continue_final_message=continues, **template_kwargs,
    )  # fmt: skip
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def ids_of_tokenizer(model: Any, tokenizer: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """Fields with the tokenizer's EOS and pad ids where neither they nor the model's generation_config have one."""
    own = vars(model.generation_config)
    eos = tokenizer.eos_token_id
    pad = eos if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    known = {"eos_token_id": eos, "pad_token_id": pad}
    return {name: id_ for name, id_ in known.items() if own[name] is None and id_ is not None} | fields


def decoded(ids: Sequence[int], tokenizer: Any) -> str:
    """The text of new tokens, without special ones."""
    return tokenizer.decode(ids, skip_special_tokens=True)
