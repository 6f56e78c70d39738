"""TRL's data collators, and what a trainer accepts as one."""

from __future__ import annotations

import abc
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import numpy as np

from trl_jax.data.batch import IGNORED
from trl_jax.data.chat import prompt_options
from trl_jax.data.chat_templates import apply_chat_template, prepare_multimodal_messages
from trl_jax.hub import torch_bridge

# TRL's collators of prompts with completions, for scripts that build their own batches.


@dataclass
class DataCollatorForPreference:
    """TRL's collator of DPOTrainer: pads rows with `prompt_ids`, `chosen_ids` and `rejected_ids`.

    Returns `input_ids`, `attention_mask` and `completion_mask`, int64 `[2P, T]`: the P chosen texts, then the P
    rejected ones. If the rows have them, also `ref_chosen_logps` and `ref_rejected_logps`, float32 `[P]`.

    Args:
        pad_token_id: the id that rows are padded with, on the right.
        max_length: maximum number of tokens of prompt and completion together; None: no truncation.
        truncation_mode: "keep_start" truncates the end, "keep_end" the start.
        pad_to_multiple_of: T is rounded up to a multiple of it.
        return_tensors: "pt" for torch tensors, "np" for NumPy arrays; None: "pt" if torch is installed.

    Raises:
        ValueError: `truncation_mode` or `return_tensors` is invalid.
    """

    pad_token_id: int
    max_length: int | None = None
    truncation_mode: str = "keep_start"
    pad_to_multiple_of: int | None = None
    return_tensors: str | None = None

    def __post_init__(self):
        check_kind(self.return_tensors)
        if self.truncation_mode not in ("keep_start", "keep_end"):
            raise ValueError(
                f"Unsupported truncation mode: {self.truncation_mode}, expected 'keep_start' or 'keep_end'"
            )

    def __call__(self, examples: list[dict[str, Any]], return_tensors: str | None = None) -> dict[str, Any]:
        part = slice(self.max_length)
        if self.truncation_mode == "keep_end" and self.max_length is not None:
            part = slice(-self.max_length, None)
        rows = [(row["prompt_ids"], row[f"{side}_ids"]) for side in ("chosen", "rejected") for row in examples]
        batch = _joined(rows, part, self.pad_token_id, self.pad_to_multiple_of)
        batch |= _numbers(examples, ("ref_chosen_logps", "ref_rejected_logps"))
        return as_kind(return_tensors or self.return_tensors, batch)


@dataclass
class DataCollatorForUnpairedPreference:
    """TRL's collator of KTOTrainer: pads rows with `prompt_ids`, `completion_ids`, `label` and, optionally,
    `KL_completion_ids`.

    Returns `input_ids`, `attention_mask` and `completion_mask`, int64 `[B, T]`; the same for the prompts with their
    `KL_completion_ids` as `KL_input_ids` and so on, whose T may differ; `ref_logps` and `ref_KL_logps`, float32 `[B]`,
    if the rows have them; and `label` `[B]`.

    Args:
        pad_token_id: the id that rows are padded with, on the right.
        max_length: maximum number of tokens of prompt and completion together; the end is truncated. None: no
            truncation.
        pad_to_multiple_of: T is rounded up to a multiple of it.
        return_tensors: "pt" for torch tensors, "np" for NumPy arrays; None: "pt" if torch is installed.

    Raises:
        ValueError: `return_tensors` is invalid.
    """

    pad_token_id: int
    max_length: int | None = None
    pad_to_multiple_of: int | None = None
    return_tensors: str | None = None

    def __post_init__(self):
        check_kind(self.return_tensors)

    def __call__(self, examples: list[dict[str, Any]], return_tensors: str | None = None) -> dict[str, Any]:
        batch: dict[str, Any] = {}
        for prefix in ("", "KL_"):
            column = f"{prefix}completion_ids"
            if column in examples[0]:
                rows = [(row["prompt_ids"], row[column]) for row in examples]
                joined = _joined(rows, slice(self.max_length), self.pad_token_id, self.pad_to_multiple_of)
                batch |= {f"{prefix}{name}": values for name, values in joined.items()}
        batch |= _numbers(examples, ("ref_logps", "ref_KL_logps"))
        batch["label"] = np.asarray([row["label"] for row in examples])
        return as_kind(return_tensors or self.return_tensors, batch)


def _joined(
    rows: list[tuple[Sequence[int], Sequence[int]]], part: slice, pad_token_id: int, multiple: int | None
) -> dict[str, np.ndarray]:
    """Concatenate each (prompt, completion), keep the slice `part` of it, and pad; the mask marks completion tokens."""
    ids = [np.concatenate([prompt, answer])[part] for prompt, answer in rows]
    answers = [np.repeat([0, 1], [len(prompt), len(answer)])[part] for prompt, answer in rows]
    return {
        "input_ids": padded(ids, pad_token_id, multiple),
        "attention_mask": padded([np.ones(len(row)) for row in ids], 0, multiple),
        "completion_mask": padded(answers, 0, multiple),
    }


def _numbers(examples: list[dict[str, Any]], columns: tuple[str, ...]) -> dict[str, np.ndarray]:
    """The `columns` that the rows have, as float32 `[B]`."""
    return {name: np.asarray([row[name] for row in examples], np.float32) for name in columns if name in examples[0]}


@dataclass
class RewardDataCollator:
    """TRL's collator of RewardTrainer: pads rows with `chosen_ids`, `rejected_ids` and, optionally, `margin`.

    Returns `input_ids` and `attention_mask`, int64 `[2P, T]`: the P chosen texts, then the P rejected ones; and
    `margin`, float32 `[P]`, if the rows have it.

    Args:
        pad_token_id: the id that rows are padded with, on the right.
        pad_to_multiple_of: T is rounded up to a multiple of it.
        return_tensors: "pt" for torch tensors, "np" for NumPy arrays; None: "pt" if torch is installed.

    Raises:
        ValueError: `return_tensors` is invalid.
    """

    pad_token_id: int
    pad_to_multiple_of: int | None = None
    return_tensors: str | None = None

    def __post_init__(self):
        check_kind(self.return_tensors)

    def __call__(self, examples: list[dict[str, Any]], return_tensors: str | None = None) -> dict[str, Any]:
        rows = [example[f"{side}_ids"] for side in ("chosen", "rejected") for example in examples]
        batch = {
            "input_ids": padded(rows, self.pad_token_id, self.pad_to_multiple_of),
            "attention_mask": padded([np.ones(len(ids)) for ids in rows], 0, self.pad_to_multiple_of),
        }
        if "margin" in examples[0]:
            batch["margin"] = np.asarray([example["margin"] for example in examples], np.float32)
        return as_kind(return_tensors or self.return_tensors, batch)


@dataclass
class DataCollatorForLanguageModeling:
    """TRL's collator of SFTTrainer: pads rows with `input_ids` and, optionally, `labels` and `seq_lengths`.

    Returns `input_ids`, `labels` (default: the ids; padded with -100) and `attention_mask`, int64 `[B, T]`. The
    `seq_lengths` of a packed row are the lengths of its documents in tokens.

    Args:
        pad_token_id: the id that rows are padded with, on the right.
        padding_free: concatenate all rows (B = 1). Instead of the mask, return `position_ids`, which restart at 0 in
            each document; `cu_seq_lens_q` and `cu_seq_lens_k`, int32, the boundaries of the documents; `max_length_q`
            and `max_length_k`, the length of the longest document; and `seq_idx`, int32 `[1, T]`, the document of each
            token. The first token of a document has the label -100.
        return_position_ids: return `position_ids` in addition to the mask.
        pad_to_multiple_of: T is rounded up to a multiple of it.
        return_tensors: "pt" for torch tensors, "np" for NumPy arrays; None: "pt" if torch is installed.

    Raises:
        ValueError: `return_tensors` is invalid.
    """

    pad_token_id: int
    padding_free: bool = False
    return_position_ids: bool = False
    pad_to_multiple_of: int | None = None
    return_tensors: str | None = None

    def __post_init__(self):
        check_kind(self.return_tensors)

    def __call__(self, examples: list[dict[str, Any]], return_tensors: str | None = None) -> dict[str, Any]:
        ids = [example["input_ids"] for example in examples]
        labels = [example.get("labels", example["input_ids"]) for example in examples]
        packed = "seq_lengths" in examples[0]
        places = [_positions(example["seq_lengths"] if packed else [len(example["input_ids"])]) for example in examples]
        if self.padding_free:
            ids, labels, places = ([np.concatenate(rows)] for rows in (ids, labels, places))
        multiple = self.pad_to_multiple_of
        batch = {"input_ids": padded(ids, self.pad_token_id, multiple), "labels": padded(labels, IGNORED, multiple)}
        if self.padding_free or self.return_position_ids:
            batch["position_ids"] = padded(places, 0, multiple)
        if self.padding_free:
            batch["labels"][batch["position_ids"] == 0] = IGNORED
            batch |= _documents(batch["position_ids"][0])
        else:
            batch["attention_mask"] = padded([np.ones(len(row)) for row in ids], 0, multiple)
        return as_kind(return_tensors or self.return_tensors, batch)

    @staticmethod
    def get_position_ids_from_packed_seq_lengths(batch_seq_lengths: list[list[int]]) -> list[Any]:
        """The position ids of each packed row, `[T]`, restarting at 0 in each document; tensors if torch is
        installed."""
        return as_kind(None, [_positions(lengths) for lengths in batch_seq_lengths])


# TRL's collators for rows with images, for trainers and for scripts that build their own batches


_OF_TOKENS = ("input_ids", "token_type_ids", "mm_token_type_ids")  # what processors return for each token


class VisionCollator(abc.ABC):
    """The base of TRL's collators for rows with images. Passed as `data_collator`, its options replace those of the
    trainer's arguments; the trainer builds its batches itself. Called, a collator returns what the processor returns
    for the images, with `input_ids` and `attention_mask` `[B, T]` and, if the processor has them, `token_type_ids` and
    `mm_token_type_ids`.

    Attributes:
        processor: the model's transformers processor.
        max_length: maximum number of tokens of a text; the end is truncated. None: no truncation.
        pad_to_multiple_of: rows are padded to a multiple of this many tokens.
        return_tensors: "pt" for torch tensors, "np" for NumPy arrays; None: "pt" if torch is installed.
    """

    processor: Any
    max_length: int | None
    pad_to_multiple_of: int | None
    return_tensors: str | None

    def __post_init__(self):
        check_kind(self.return_tensors)
        if "tokenizer" not in vars(self.processor):
            raise TypeError(
                f"processor is a {type(self.processor).__qualname__}: wanted a processor with a tokenizer, from "
                "AutoProcessor.from_pretrained."
            )

    def __call__(self, examples: list[dict[str, Any]], return_tensors: str | None = None) -> Any:
        from transformers import BatchFeature

        rows = [row | {"images": [row["image"]]} if "image" in row else row for row in examples]
        return BatchFeature(as_kind(return_tensors or self.return_tensors, self._batch(rows)))

    @abc.abstractmethod
    def _batch(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """The batch of rows whose images are in `images`, as NumPy arrays."""

    def _rendered(self, rows: list[dict[str, Any]], answers: tuple[str, ...]) -> dict[str, list[str]]:
        """The texts of the prompts and of the columns `answers`."""
        if self.pad_to_multiple_of is not None:
            raise NotImplementedError(
                "Padding to a multiple of a value is not yet implemented for vision-language modeling and "
                f"prompt-completion data, got pad_to_multiple_of={self.pad_to_multiple_of}. Leave it out."
            )
        columns = ("prompt", *answers)
        if isinstance(rows[0]["prompt"], list):
            rows = [self._continued(row, answers) for row in rows]
        return {name: [row[name] for row in rows] for name in columns}

    def _continued(self, row: dict[str, Any], answers: tuple[str, ...]) -> dict[str, str]:
        """The prompt's messages as text, and the text of each answer after them."""
        prompt = prepare_multimodal_messages(row["prompt"], row["images"])
        render = partial(apply_chat_template, self.processor, tokenize=False, **row.get("chat_template_kwargs", {}))
        whole = {name: render(prompt + prepare_multimodal_messages(row[name])) for name in answers}
        start = os.path.commonprefix([render(prompt, **prompt_options(prompt)), *whole.values()])
        return {"prompt": start} | {name: text[len(start) :] for name, text in whole.items()}

    def _encoded(self, texts: list[str], images: list[list] | None = None) -> tuple[dict, dict]:
        """What the processor returns for each token, as rows without padding, and what it returns for the images."""
        kwargs = {} if images is None or not any(images) else {"images": images}  # processors refuse no images at all
        encoded = self.processor(text=texts, padding=True, return_tensors="np", add_special_tokens=False, **kwargs)
        real = encoded.pop("attention_mask") == 1
        rows = {
            name: [row[mask] for row, mask in zip(encoded.pop(name), real, strict=True)]
            for name in _OF_TOKENS
            if name in encoded
        }
        return rows, dict(encoded)

    def _concatenated(self, prompts: dict[str, list], answers: dict[str, list]) -> dict[str, np.ndarray]:
        """Prompts and answers of `_encoded` as padded rows; the mask marks the tokens of answers."""
        part, count = slice(self.max_length), len(answers["input_ids"])
        pad = self.processor.tokenizer.pad_token_id
        pairs = list(zip(prompts["input_ids"], answers["input_ids"], strict=True))
        batch = _joined(pairs, part, self.processor.tokenizer.eos_token_id if pad is None else pad, None)
        for name in prompts.keys() - {"input_ids"}:
            # As in TRL, tokens of answers have no type of their own in mm_token_type_ids.
            types = answers[name] if name == "token_type_ids" else [np.zeros_like(ids) for ids in answers["input_ids"]]
            rows = [np.concatenate([prompts[name][row], types[row]])[part] for row in range(count)]
            batch[name] = padded(rows, 0, None)
        return batch


@dataclass
class DataCollatorForVisionLanguageModeling(VisionCollator):
    """TRL's collator of SFTTrainer for rows with images. Its batches also have `labels`, which are -100 at padding.

    Args:
        processor, max_length, pad_to_multiple_of, return_tensors: as in `VisionCollator`.
        completion_only_loss: whether prompts are excluded from the labels.
        dataset_text_field: the text column.
        assistant_only_loss: whether only tokens that the chat template marks as the assistant's have labels.
        chat_template: replaces the tokenizer's chat template for `messages`; None keeps it.
    """

    processor: Any
    max_length: int | None = None
    completion_only_loss: bool = False
    pad_to_multiple_of: int | None = None
    dataset_text_field: str = "text"
    assistant_only_loss: bool = False
    chat_template: str | None = None
    return_tensors: str | None = None

    def _batch(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        if self.assistant_only_loss and "messages" not in rows[0]:
            raise ValueError(
                "The `assistant_only_loss` argument is only supported for conversational language modeling datasets."
            )
        if "messages" in rows[0] or self.dataset_text_field in rows[0]:
            if self.completion_only_loss:
                raise ValueError("The `completion_only_loss` argument is not supported for language modeling datasets.")
            batch = self._whole(rows)
            excluded = batch.pop("assistant_masks") == 0 if self.assistant_only_loss else False
        elif "prompt" in rows[0] and "completion" in rows[0]:
            texts = self._rendered(rows, ("completion",))
            prompts, images = self._encoded(texts["prompt"], [row["images"] for row in rows])
            batch = images | self._concatenated(prompts, self._encoded(texts["completion"])[0])
            answers = batch.pop("completion_mask")
            excluded = answers == 0 if self.completion_only_loss else False
        else:
            raise KeyError(f"Unexpected input keys in examples: {list(rows[0].keys())}.")
        batch["labels"] = np.where((batch["attention_mask"] == 0) | excluded, IGNORED, batch["input_ids"])
        return batch

    def _whole(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """The batch of rows with `messages` or with texts, without labels."""
        options = {
            "padding": True, "padding_side": "right", "pad_to_multiple_of": self.pad_to_multiple_of,
            "truncation": self.max_length is not None, "max_length": self.max_length, "add_special_tokens": False,
        }  # fmt: skip
        if "messages" in rows[0]:
            encoded = self.processor.apply_chat_template(
                [prepare_multimodal_messages(row["messages"], row["images"]) for row in rows],
                chat_template=self.chat_template, tokenize=True, return_dict=True, return_tensors="np",
                return_assistant_tokens_mask=self.assistant_only_loss, processor_kwargs=options,
            )  # fmt: skip
        else:
            images = [row["images"] for row in rows]
            kwargs = {"images": images} if any(images) else {}
            texts = [row[self.dataset_text_field] for row in rows]
            encoded = self.processor(text=texts, return_tensors="np", **options, **kwargs)
        return dict(encoded)


@dataclass
class DataCollatorForVisionPreference(VisionCollator):
    """TRL's collator of DPOTrainer for rows with images, with the arguments of `VisionCollator`. Its batches have the
    chosen texts, then the rejected ones, each with the images of its prompt, and `completion_mask`."""

    processor: Any
    max_length: int | None = None
    pad_to_multiple_of: int | None = None
    return_tensors: str | None = None

    def _batch(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        texts = self._rendered(rows, ("chosen", "rejected"))
        prompts, images = self._encoded(2 * texts["prompt"], 2 * [row["images"] for row in rows])
        return images | self._concatenated(prompts, self._encoded(texts["chosen"] + texts["rejected"])[0])


@dataclass
class DataCollatorForVisionUnpairedPreference(VisionCollator):
    """TRL's collator of KTOTrainer for rows with images. Its batches also have `completion_mask` and `label`, and, for
    each prompt with the previous row's answer, `KL_input_ids` and so on.

    Args:
        processor, max_length, pad_to_multiple_of, return_tensors: as in `VisionCollator`.
        calculate_kl: whether each answer is also paired with another row's prompt to estimate the KL divergence; must
            match the loss type.
    """

    processor: Any
    max_length: int | None = None
    calculate_kl: bool = True
    pad_to_multiple_of: int | None = None
    return_tensors: str | None = None

    def _batch(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        texts = self._rendered(rows, ("completion",))
        prompts, images = self._encoded(texts["prompt"], [row["images"] for row in rows])
        answers, _ = self._encoded(texts["completion"])
        batch = images | self._concatenated(prompts, answers)
        if self.calculate_kl:
            others = {name: values[-1:] + values[:-1] for name, values in answers.items()}
            batch |= {f"KL_{name}": values for name, values in self._concatenated(prompts, others).items()}
        return batch | {"label": np.asarray([row["label"] for row in rows])}


def check_kind(return_tensors: str | None) -> None:
    if return_tensors not in ("np", "pt", None):
        raise ValueError(f"return_tensors must be 'np', or 'pt' if torch is installed, got {return_tensors!r}.")


def as_kind(return_tensors: str | None, batch: Any) -> Any:
    """The batch as torch tensors ("pt") or NumPy arrays ("np"); None: tensors if torch is installed."""
    tensors = torch_bridge.available() if return_tensors is None else return_tensors == "pt"
    return torch_bridge.as_tensors(batch) if tensors else batch


def padded(rows: list[Sequence[int]], value: int, multiple: int | None) -> np.ndarray:
    """Rows as one array, int64 `[B, T]`, right-padded with `value`."""
    length = -(-max(map(len, rows)) // (multiple or 1)) * (multiple or 1)
    array = np.full((len(rows), length), value, np.int64)
    for row, values in zip(array, rows, strict=True):
        row[: len(values)] = values
    return array


def _positions(lengths: Sequence[int]) -> np.ndarray:
    """The positions of tokens in documents of these lengths, `[T]`."""
    return np.concatenate([np.arange(length) for length in lengths])


def _documents(position_ids: np.ndarray) -> dict[str, Any]:
    """The document boundaries and indices of a row with these position ids `[T]`. Each padding token counts as a
    document, as in TRL."""
    ends = np.append(np.flatnonzero(position_ids == 0), len(position_ids)).astype(np.int32)
    lengths = np.diff(ends)
    of_tokens = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)[None]
    longest = int(lengths.max())
    return {
        "cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest,
        "seq_idx": of_tokens,
    }  # fmt: skip


# What a trainer accepts as data_collator. It makes its batches itself, and only reads a collator's options.


NO_COLLATOR = (
    "trl_jax calls user-defined collate functions only in SFTTrainer, for rows of text. Leave data_collator out and "
    "train on the columns directly (`messages`, or `prompt` and `completion`, with `images` if there are any): the "
    "trainer applies the chat template and the processor, and the config determines which tokens have labels."
)
_LEGACY, _TRANSFORMERS = "trl_jax.legacy.collators", "transformers.data.data_collator"


@dataclass(frozen=True)
class AcceptedCollators:
    """The collators that a trainer accepts as `data_collator`.

    texts: the class for rows of text; only its `pad_to_multiple_of` is used. None without such a class.
    images: the class for rows with images, whose options are used.
    older: names of classes of early TRL, and "DataCollatorForSeq2Seq" for transformers'.
    calls_others: whether a script's own collator is accepted, and called.
    """

    texts: type | None = None
    images: type[VisionCollator] | None = None
    older: tuple[str, ...] = ()
    calls_others: bool = False

    @property
    def classes(self) -> tuple[type, ...]:
        return tuple(kind for kind in (self.texts, self.images) if kind is not None)

    @property
    def later(self) -> AcceptedCollators:
        """Those that may also be set on a trainer, whose rows are prepared."""
        return AcceptedCollators(self.texts, older=tuple({*self.older} & {"DataCollatorForSeq2Seq"}))

    def calls(self, collator: Any) -> bool:
        """Whether it is a script's own collator, which the trainer calls: neither one of TRL's nor transformers' for
        masked language models."""
        masks = type(collator).__module__ == _TRANSFORMERS and vars(collator).get("mlm", False)
        supported = type(collator) in self.classes or is_older_collator(collator, self.older)
        return self.calls_others and callable(collator) and not supported and not masks

    def check(self, collator: Any) -> None:
        """Raise ValueError for a collator that the trainer neither reads nor calls."""
        if self.calls(collator) or type(collator) in self.classes:
            return
        if is_older_collator(collator, self.older):
            if type(collator).__module__ == _TRANSFORMERS:
                _check_seq2seq(collator)
            return
        name = type(collator).__qualname__
        if isinstance(collator, FunctionType | MethodType | partial):
            raise ValueError(f"data_collator is a {name}. {NO_COLLATOR}")
        raise ValueError(
            f"data_collator={type(collator).__module__}.{name}(...) is not in this release of trl_jax. "
            f"{self._instead_of(collator)}"
        )

    def _instead_of(self, collator: Any) -> str:
        """What a script may pass instead of a collator that is refused."""
        kind = type(collator)
        instead = f", or pass a {self.classes[0].__name__}, whose pad_to_multiple_of is taken" if self.classes else ""
        usual = f"Leave it out{instead}: rows are padded as TRL's own collator does."
        if kind.__module__ != _TRANSFORMERS or kind.__name__ != "DataCollatorForLanguageModeling" or not self.classes:
            return usual
        if collator.mlm:
            return f"{usual} A causal language model is not trained with mlm=True."
        return (
            f"{usual} TRL 1.16 cannot pad rows of different lengths with it either, because it does not pad the labels "
            "that SFTTrainer prepares. To leave tokens out of the loss, set their labels to -100 in a column 'labels'."
        )

    def default(self, args: Any, pad_token_id: int) -> Any:
        """TRL's collator with these arguments, for scripts that call it."""
        names = {field.name for field in fields(self.texts)}
        options = {name: value for name, value in vars(args).items() if name in names}
        if options["pad_to_multiple_of"] == "auto":
            options["pad_to_multiple_of"] = None
        return self.texts(pad_token_id=pad_token_id, **options)


def is_older_collator(collator: Any, names: tuple[str, ...]) -> bool:
    """Whether it is one of these collators of early TRL, or transformers' DataCollatorForSeq2Seq if it is among them.
    By name, because only scripts that use one import them."""
    kind = type(collator)
    home = _TRANSFORMERS if kind.__name__ == "DataCollatorForSeq2Seq" else _LEGACY
    return kind.__module__ == home and kind.__name__ in names


def _check_seq2seq(collator: Any) -> None:
    """Raise ValueError if transformers' DataCollatorForSeq2Seq would give other batches than TRL's own collator, apart
    from padding on the right, or none."""
    tokenizer = collator.tokenizer
    settings = (
        ("label_pad_token_id", collator.label_pad_token_id, (IGNORED,)),
        ("padding", collator.padding, (True, "longest", "max_length")),
        ("return_tensors", collator.return_tensors, ("pt",)),
        ("tokenizer.padding_side", tokenizer.padding_side, ("right",)),
    )
    for name, value, allowed in settings:
        if value not in allowed:
            raise ValueError(
                f"DataCollatorForSeq2Seq has {name}={value!r}, which is not in this release of trl_jax. Set it to "
                f"{' or '.join(map(repr, allowed))}, or leave data_collator out."
            )
    if tokenizer.pad_token_id is None:
        raise ValueError(
            "Asking to pad but the tokenizer does not have a padding token. Set tokenizer.pad_token, such as "
            "tokenizer.pad_token = tokenizer.eos_token, or leave data_collator out."
        )


def check_lengths(collator: Any, args: Any) -> None:
    """Raise ValueError if a collator would truncate texts differently from the arguments."""
    for name in ("max_length", "truncation_mode"):
        if name in vars(collator) and vars(collator)[name] != vars(args)[name]:
            raise ValueError(
                f"data_collator has {name}={vars(collator)[name]!r}, the arguments {name}={vars(args)[name]!r}: rows "
                "are cut once, when they are prepared. Write the same in both, or leave the collator out."
            )


def check_rows_of(collator: Any, *, images: bool) -> None:
    """Raise ValueError if a collator is for rows with images, and the training rows have no `images`."""
    if isinstance(collator, VisionCollator) and not images:
        raise ValueError(
            f"data_collator is a {type(collator).__name__}, which is for rows with images, but train_dataset has no "
            "images. Leave it out."
        )


def one_processor(processor: Any, processing_class: Any) -> Any:
    """The processor of a vision collator, which is also the trainer's `processing_class`.

    Raises:
        ValueError: a different `processing_class` was passed.
    """
    if processing_class is None or processing_class is processor or processing_class is processor.tokenizer:
        return processor
    raise ValueError(
        "data_collator has a different processor than processing_class. A run has one tokenizer and one image "
        "processor: pass the same to both."
    )
