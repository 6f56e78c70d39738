"""A strict reader of config.json: every key is read, declared inert, passed over with a line, or refused."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trl_jax.core.files import strict_json
from trl_jax.core.printable import brief, listed
from trl_jax.hub.formats.mxfp4 import METHOD as MXFP4

logger = logging.getLogger(__name__)

# Keys without effect on what is computed: bookkeeping, labels, token ids, generation settings.
INERT = frozenset(
    """
    add_cross_attention architectures attn_implementation auto_map bad_words_ids begin_suppress_tokens bos_token_id
    cache_implementation chunk_size_feed_forward cross_attention_hidden_size decoder_start_token_id diversity_penalty
    do_sample dtype early_stopping encoder_no_repeat_ngram_size eod_token_id eos_token_id
    exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id id2label is_decoder
    is_encoder_decoder is_llama_config label2id length_penalty mask_token_id max_length max_position_embeddings
    max_sequence_length min_length model_type name no_repeat_ngram_size num_beam_groups num_beams num_labels
    num_return_sequences output_attentions output_hidden_states output_scores pad_token_id prefix pretraining_tp
    problem_type pruned_heads remove_invalid_values repetition_penalty return_dict return_dict_in_generate
    sep_token_id suppress_tokens task_specific_params temperature tf_legacy_loss tie_encoder_decoder tokenizer_class
    top_k top_p torch_dtype torchscript transformers.js_config transformers_version typical_p unk_token_id
    unsloth_fixed unsloth_version use_bfloat16 use_cache
    """.split()
)


class ConfigReader:
    """The values of a config.json; it remembers which keys were asked for.

    `defaults` are those of transformers' class for the model_type; they come before the ones passed with a key.
    """

    def __init__(self, raw: dict[str, Any], source: str, defaults: dict[str, Any] | None = None):
        self.raw, self.source = raw, source
        self._defaults = defaults or {}
        self._asked = {"tie_word_embeddings"}

    def value(self, key: str, default: Any = None) -> Any:
        """The value; `default` where it is null, or where the key is absent and the class has no default."""
        self._asked.add(key)
        if key not in self.raw:
            return self._defaults.get(key, default)
        return default if self.raw[key] is None else self.raw[key]

    def with_values(self, **values: Any) -> ConfigReader:
        """A reader of the same config with other values; a key that either is asked for counts as read in both."""
        other = ConfigReader({**self.raw, **values}, self.source, self._defaults)
        other._asked = self._asked
        return other

    def is_null(self, key: str) -> bool:
        """Whether the key is there and null: for some keys, that is not their default."""
        return key in self.raw and self.raw[key] is None

    def size(self, key: str, default: int | None = None, *, minimum: int = 1, maximum: int = 2**31 - 1) -> int:
        """A whole number from `minimum` to `maximum`."""
        value = self.value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
            raise self.wrong(key, value, f"a whole number from {minimum:,} to {maximum:,}")
        return value

    def number(self, key: str, default: float | None = None, *, minimum: float = 0.0, maximum: float = 1e30) -> float:
        """A finite number from `minimum` to `maximum`."""
        value = self.value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not minimum <= value <= maximum:
            raise self.wrong(key, value, f"a number from {minimum:g}" + ("" if maximum == 1e30 else f" to {maximum:g}"))
        return float(value)

    def optional_number(self, key: str, *, minimum: float = 0.0) -> float | None:
        """A finite number, or None where the key is null, or absent and without a default."""
        return None if self.value(key) is None else self.number(key, minimum=minimum)

    def refuse(self, key: str, *allowed: Any) -> None:
        """Refuse every value but those allowed: others ask for what is not computed here."""
        value = self.value(key, allowed[0])
        if value not in allowed:
            wanted = " or ".join(map(repr, allowed))
            raise self.wrong(key, value, f"{wanted}, the only value computed for this model_type")

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.value(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, value, "true or false")
        return value

    def one_of(self, key: str, choices: Any, default: Any = None) -> Any:
        value = self.value(key, default)
        if value not in list(choices):
            raise self.wrong(key, value, f"one of {', '.join(sorted(map(str, choices)))}")
        return value

    def section(self, key: str) -> dict[str, Any]:
        """An object of its own; empty where the key is absent or null."""
        value = self.value(key, {})
        if not isinstance(value, dict):
            raise self.wrong(key, value, "an object")
        return value

    def numbers(self, key: str) -> tuple[float, ...]:
        """A list of finite numbers above 0."""
        value = self.value(key)
        number = int | float
        if not isinstance(value, list) or not all(isinstance(x, number) and 0 < x <= 1e30 for x in value):
            raise self.wrong(key, value, "a list of numbers above 0")
        return tuple(map(float, value))

    def limits(self, key: str) -> tuple[float, float]:
        """Two numbers from 0 on, the second one no smaller, and infinite where it is no limit."""
        value = with_floats(self.value(key))
        two = isinstance(value, list | tuple) and len(value) == 2 and all(isinstance(x, int | float) for x in value)
        if not two or not 0 <= value[0] <= value[1]:
            raise self.wrong(key, value, "a lower and an upper limit")
        return float(value[0]), float(value[1])

    def names(self, key: str) -> list[str] | None:
        """A list of strings; None where the key is absent or null."""
        value = self.value(key)
        if value is not None and not (isinstance(value, list) and all(isinstance(name, str) for name in value)):
            raise self.wrong(key, value, "a list of names")
        return value

    def wrong(self, key: str, value: Any, wanted: str) -> ValueError:
        return ValueError(f"{self.source}: {key} is {brief(value)}, wanted {wanted}.")

    def finish(self, unread: Callable[[str], bool] = lambda key: False) -> None:
        """Refuse keys that nobody read: an unknown one may change what the model computes.

        Args:
            unread: whether transformers does not read a key, either. The log names those.
        """
        private = {key for key in self.raw if key.startswith("_")}  # notes that transformers takes for itself
        unknown = sorted(set(self.raw) - self._asked - INERT - private)
        passed_over = [key for key in unknown if unread(key)]
        if passed_over:
            keys = listed(passed_over)
            logger.warning("%s: neither trl_jax nor transformers reads %s: without effect.", self.source, keys)
        unknown = [key for key in unknown if key not in passed_over]
        if unknown:
            kind, keys = brief(self.raw.get("model_type")), listed([f"{key}={brief(self.raw[key])}" for key in unknown])
            raise ValueError(
                f"{self.source} has keys that trl_jax does not know for model_type {kind}: "
                f"{keys}. They might change what the model computes, so they are not ignored. Remove them if they "
                "have no effect."
            )


def with_floats(value: Any) -> Any:
    """Numbers that JSON does not have in the place of what transformers writes for them: {"__float__": "Infinity"}."""
    if isinstance(value, dict):
        if value.keys() == {"__float__"} and value["__float__"] in ("Infinity", "-Infinity", "NaN"):
            return float(value["__float__"])
        return {key: with_floats(part) for key, part in value.items()}
    return [with_floats(part) for part in value] if isinstance(value, list) else value


def read_config(folder: Path) -> dict[str, Any]:
    """The content of `folder/config.json`. Weights in MXFP4 are read as bfloat16, and saved so: what it says of them is
    left out.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is not a JSON object, or the checkpoint is quantised in another way.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: a checkpoint folder holds config.json and *.safetensors.")
    try:
        raw = strict_json.read(path)
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, a number or a nest beyond Python's limits
        raise ValueError(f"{path} is not valid JSON ({error}). Download the checkpoint again.") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{path} holds a JSON {type(raw).__name__}, wanted an object.")
    reader = ConfigReader(raw, str(path))
    reader.names("architectures")
    for key in ("id2label", "label2id"):
        reader.section(key)
    for key in ("dtype", "torch_dtype"):
        reader.one_of(key, ("float32", "bfloat16", "float16"), "float32")
    if not reader.section("quantization_config"):
        return raw
    method = raw["quantization_config"].get("quant_method")
    if method != MXFP4:
        raise ValueError(
            f"{path}: the weights are quantised (quant_method={brief(method)}), which this release of trl_jax cannot "
            f"read. Pass the unquantised checkpoint, or one with quant_method={MXFP4!r}."
        )
    return {key: value for key, value in raw.items() if key != "quantization_config"}
