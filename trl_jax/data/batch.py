"""Examples, extras and batches: what layouts produce and losses consume. Pure NumPy.

Dimensions: R rows, T tokens per row, E examples, X texts (E times the number of texts per example), N reads, M
micro-batches.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from trl_jax.core.outputs import Images, Packed, VirtualTokens
from trl_jax.data.images import ImagePatches

IGNORED = -100  # label of a token that is not a target, as in transformers


# Batches


class Batch(NamedTuple):
    """The input of one forward pass: E examples with X texts, as R rows of T tokens.

    A row holds one text (padded layout) or several texts end to end (packed layout). Texts are ordered like the
    outputs: the first text of every example, then the second of every example.

    tokens, positions: int32 `[R, T]`; positions are `[R, T, A]` in steps with images if the model's positions have A
        axes (multimodal RoPE).
    reads: int32 `[N]`, flat positions (row * T + column) whose outputs are needed. With a score head, one per text
        (N = X). With a language modeling head, the positions that predict a target, followed by padding.
    targets: int32 `[N]`, the id that each read predicts, -1 for padding. None with a score head.
    text: int32 `[N]`, the text of each read, X for padding. None with a score head.
    pass_weight: float32 `[E]`, weight of each example in a mean over passes (on all devices) of each pass's mean over
        its examples. None unless each micro-batch is a pass.
    router_token_count: int16 `[R, T]`, how many of the first `Example.num_primary_texts` texts a token belongs to. This
        is its weight in the statistics of MoE routers: 0 for padding, 2 for a token shared by two texts. Only the
        first `Example.num_routed` tokens of a text count.
    first_labels: int32 `[R]`, the label of the first token of each padded row, -100 for documents. No token predicts
        it, but scripts see it in `labels`, as in TRL. None in other layouts.
    lengths: int32 `[X]`, tokens per text; in padded rows of documents `[R]`, tokens per row.
    weight: float32 `[E]`, weight of each example in the step's loss; 0 for slots without an example.
    micro_batch: bool `[M, E]`, the micro-batch of the step that an example belongs to; metrics are summed over each.
    extras: float32 numbers that the loss needs, by name: `extras.example` `[E]`, `extras.text` `[X]`, `extras.read`
        `[N]`.
    packed: attention ranges of packed rows; None in the padded layout.
    images: the images of the pass, as one shard; None in steps without images.
    completions: the completions as rows, for a user-defined loss; None without one.

    In a step, every array has a leading axis of passes, which run sequentially.
    """

    tokens: np.ndarray
    positions: np.ndarray
    reads: np.ndarray
    lengths: np.ndarray
    weight: np.ndarray
    micro_batch: np.ndarray
    extras: Extras
    packed: Packed | None = None
    targets: np.ndarray | None = None
    text: np.ndarray | None = None
    pass_weight: np.ndarray | None = None
    router_token_count: np.ndarray | None = None
    first_labels: np.ndarray | None = None
    images: Images | None = None
    completions: CompletionRows | None = None

    def write_example(self, index: tuple[int, ...], slot: int, example: Example, weight: float) -> None:
        """Write an example's weight and its example and text extras into a slot of the pass at `index`."""
        self.weight[index][slot] = weight
        self.extras.write_example(index, slot, self.weight.shape[-1], example.extras)

    def write_reads(
        self, index: tuple[int, ...], start: int, slot: int, example: Example, number: int, places: np.ndarray
    ) -> int:
        """Write the reads of one text that predict targets, starting at read `start`. Returns the end.

        Args:
            index: index of the pass.
            slot: slot of the example.
            number: index of the text within the example.
            places: flat positions of the reads within the pass, `[n]`.
        """
        end, targets = start + len(places), example.targets(number)[1]
        self.reads[index][start:end], self.targets[index][start:end] = places, targets
        self.text[index][start:end] = number * self.weight.shape[-1] + slot
        self.extras.write_reads(index, start, len(places), number, example.extras)
        return end


def without_virtual(batch: Batch, count: int) -> Batch:
    """Remove the `count` virtual tokens at the start of each padded row `[R, T]`. None of them may be read."""
    length = batch.tokens.shape[1]
    row, place = batch.reads // length, batch.reads % length
    return batch._replace(
        tokens=batch.tokens[:, count:],
        positions=batch.positions[:, : length - count],
        reads=row * (length - count) + (place - count).clip(0),
        lengths=(batch.lengths - count).clip(0),
        router_token_count=batch.router_token_count[:, count:],
    )


def empty_extras(like: Example, *leading: int, examples: int, reads: int) -> Extras:
    """Zero-filled extras for passes `[*leading]` of E `examples` and N `reads`, with the names in `like.extras`.

    Raises:
        ValueError: the example has extras per read but no labels.
    """
    if like.extras.read and not like.labels:
        raise ValueError(
            f"extras.read[{next(iter(like.extras.read))!r}] has one number per target, but the example has no labels "
            "and therefore no targets. Put numbers that belong to a whole text in extras.text."
        )
    return like.extras.zeros(*leading, examples=examples, texts=len(like.texts) * examples, reads=reads)


def read_places(example: Example, text: int, pad_token_id: int) -> np.ndarray:
    """Positions of a text whose outputs are needed, `[n]`: those that predict a target, or, without labels, the one
    that transformers' classifiers read."""
    if example.labels:
        return example.targets(text)[0]
    return np.asarray([last_real_token(example.texts[text], pad_token_id)])


def last_real_token(ids: Sequence[int], pad_token_id: int) -> int:
    """The position at which transformers' classifiers read a text: the rightmost id that is not the pad id, else 0.

    This looks at ids, not at the attention mask: if pad and EOS are the same token, a final EOS is skipped.
    """
    real = np.flatnonzero(np.asarray(ids) != pad_token_id)
    return int(real[-1]) if len(real) else 0


def padded_length(longest: int, pad_to_multiple_of: int | str | None) -> int:
    """The row length for a batch whose longest row has `longest` tokens.

    Each distinct length is compiled once. "auto" limits their number: it rounds up to a multiple of 32, and above 256
    to one of four lengths per power of two; right padding does not change the results of real tokens. A number rounds
    up to a multiple of it; None does not round.
    """
    if pad_to_multiple_of is None:
        return longest
    if pad_to_multiple_of == "auto":
        octave = 1 << (longest - 1).bit_length() >> 1
        step = max(32, octave // 4)
    else:
        step = int(pad_to_multiple_of)
    return -(-longest // step) * step


class CompletionRows(NamedTuple):
    """The E completions of a pass in TRL's layout, for a user-defined loss. In a step, arrays have leading axes of
    passes and shards.

    prompt_ids, prompt_mask: int32 `[E, P]`, left-padded.
    completion_ids, completion_mask: int32 `[E, C]`, right-padded; the mask is 1 for tokens in the loss.
    read: int32 `[E, C]`, the read that predicts each token; N for masked tokens.
    numbers: float32 `[1]` each, by name: `generated_tokens`, `micro_batches` (of the step), `global_step`, `epoch`, and
        `prompt_width` and `completion_width`, the values of P and C in TRL.
    extras: `[E]` or `[E, C]`, by name: numbers that a script added to the completions.
    """

    prompt_ids: np.ndarray
    prompt_mask: np.ndarray
    completion_ids: np.ndarray
    completion_mask: np.ndarray
    read: np.ndarray
    numbers: dict[str, np.ndarray]
    extras: dict[str, np.ndarray]


# Extras


class Extras(NamedTuple):
    """Numbers that a loss needs in addition to the model's outputs, by name: per example, per text and per read.

    In an example, `example` has one number per name, `text` one per text, and `read` (with a language modeling head)
    one per target of each text, in the order of `Example.targets`. All examples of a task have the same names. In a
    batch they are float32 `[E]`, `[X]` and `[N]`, ordered like `Batch.weight`, the outputs and `Batch.reads`; 0 for
    padding.
    """

    example: Mapping[str, Any] = {}
    text: Mapping[str, Any] = {}
    read: Mapping[str, Any] = {}

    def zeros(self, *leading: int, examples: int, texts: int, reads: int) -> Extras:
        """Zeros `[*leading, E]`, `[*leading, X]` and `[*leading, N]` under the same names."""
        sizes = (examples, texts, reads)
        return Extras(
            *(
                {name: np.zeros((*leading, size), np.float32) for name in names}
                for names, size in zip(self, sizes, strict=True)
            )
        )

    def write_example(self, index: tuple[int, ...], slot: int, examples: int, example_extras: Extras) -> None:
        """Write an example's numbers per example and per text into a pass.

        Args:
            index: index of the pass.
            slot: slot of the example among the pass's E `examples`.
            example_extras: the example's extras.
        """
        for name, values in self.example.items():
            values[index][slot] = example_extras.example[name]
        for name, values in self.text.items():
            values[index][slot::examples] = example_extras.text[name]

    def write_reads(self, index: tuple[int, ...], start: int, count: int, text: int, example_extras: Extras) -> None:
        """Write the numbers of the `count` reads of one text, starting at read `start` of a pass.

        Raises:
            ValueError: the number of values is not `count`.
        """
        for name, values in self.read.items():
            numbers = example_extras.read[name][text]
            if len(numbers) != count:
                raise ValueError(
                    f"extras.read[{name!r}] has {len(numbers)} numbers for text {text}, which has {count} targets. "
                    "Pass one number per target, in the order of Example.targets."
                )
            values[index][start : start + count] = numbers


# Examples


class Context(NamedTuple):
    """A prefix of an example's only text, identical in all examples of a micro-batch with the same key.

    tokens: length of the prefix.
    """

    key: Hashable
    tokens: int


class Example(NamedTuple):
    """One prepared row, the input of layouts.

    texts: token ids of each text that the model reads; all examples of a task have the same number of texts.
    extras: numbers that the loss needs in addition to the outputs.
    labels: for each text, transformers' labels: the id to predict at each token from the tokens before it, or -100.
        Empty with a score head.
    documents: token counts of the documents that the only text consists of; documents do not attend to each other.
        Empty for a single document.
    num_primary_texts: token metrics only include this many first texts; None includes all.
    weight: weight in the step's loss (a weighted sum), above 0; None: the layout chooses it.
    context: the prefix that it shares with other examples, which the shared layout computes once; None: none.
    virtual: number of virtual tokens at the start of each text, or document.
    images: the images of all its texts. Examples with the same context have the same images.
    features: for each text, int32 `[T]`: the index, among the features of all `images`, of the one that replaces each
        token's embedding; -1 for text. Empty without images.
    positions: for each text, int32 `[T, A]`, if there are images and the model's positions have several axes.
    """

    texts: tuple[Sequence[int], ...]
    extras: Extras = Extras()
    labels: tuple[Sequence[int], ...] = ()
    documents: Sequence[int] = ()
    num_primary_texts: int | None = None
    weight: float | None = None
    context: Context | None = None
    virtual: int = 0
    images: tuple[ImagePatches, ...] = ()
    features: tuple[np.ndarray, ...] = ()
    positions: tuple[np.ndarray, ...] = ()

    @property
    def longest(self) -> int:
        """Number of tokens of the longest text."""
        return max(map(len, self.texts))

    def spans_of(self, ids: Sequence[int]) -> list[tuple[int, int]]:
        """(start, end) of each document of a text; of the whole text `ids` if it has no documents."""
        ends = np.cumsum([0, *(self.documents or [len(ids)])]).tolist()
        return list(itertools.pairwise(ends))

    @property
    def longest_document(self) -> int:
        """Number of tokens of the longest document, or of the longest text if there are no documents."""
        return max(self.documents, default=self.longest)

    @property
    def num_targets(self) -> int:
        """Number of targets in all texts."""
        return sum(len(self.targets(text)[0]) for text in range(len(self.labels)))

    @property
    def num_routed(self) -> int | None:
        """How many tokens, from the start of each text, count in the statistics of MoE routers; None counts all.

        A completion without targets, such as a truncated one with `mask_truncated_completions`, does not count: TRL
        masks it in the attention mask, too.
        """
        return None if self.context is None or self.num_targets else self.context.tokens

    @property
    def num_counted_targets(self) -> int:
        """The number of targets that a step's loss is divided by.

        Excludes the first token of a text, which is a target only because virtual tokens precede it: transformers
        counts targets before PEFT adds these.
        """
        first = sum(int((self.targets(text)[0] == self.virtual - 1).sum()) for text in range(len(self.labels)))
        return self.num_targets - first

    def targets(self, text: int) -> tuple[np.ndarray, np.ndarray]:
        """The positions of a text that predict a target, and the targets: `[n]` each.

        The first token of a document is never a target, regardless of its label.
        """
        labels = np.array(self.labels[text], np.int64)
        labels[np.cumsum([0, *self.documents[:-1]])] = IGNORED
        indices = np.flatnonzero(labels != IGNORED)
        return indices - 1, labels[indices]

    @property
    def tokens(self) -> int:
        """Number of tokens in all texts."""
        return sum(map(len, self.texts))

    @property
    def lengths(self) -> list[int]:
        """Number of tokens of each text, without virtual ones."""
        return [len(ids) - self.virtual * max(1, len(self.documents)) for ids in self.texts]

    def with_virtual_tokens(self, virtual: VirtualTokens, *, predicted: bool) -> Example:
        """Prepend virtual tokens to each text, or document.

        Args:
            predicted: whether the first real token of a text may become a target; the first of a document never does.
        """
        if not virtual.count:
            return self
        predicted = predicted and virtual.read and not self.documents
        texts = tuple(_prepend(virtual.ids, ids, self.spans_of(ids)) for ids in self.texts)
        labels = []
        for text_labels in self.labels:
            text_labels, spans = np.array(text_labels, np.int64), self.spans_of(text_labels)
            if not predicted:
                text_labels[[start for start, _ in spans]] = IGNORED
            labels.append(_prepend(np.full(virtual.count, IGNORED), text_labels, spans))
        documents = [tokens + virtual.count for tokens in self.documents]
        context = self.context and self.context._replace(tokens=self.context.tokens + virtual.count)
        changes = {"documents": documents, "context": context, "virtual": virtual.count}
        return self._replace(texts=texts, labels=tuple(labels), **changes)

    def positions_of(self, text: int, start: int, end: int, axes: int | None) -> np.ndarray:
        """Positions of the tokens `start` to `end` of a text: `[n]` if `axes` is None, else `[n, axes]`."""
        if self.positions and axes is not None:
            return self.positions[text][start:end]
        indices = np.arange(end - start, dtype=np.int32)
        return indices if axes is None else np.repeat(indices[:, None], axes, axis=1)


def _prepend(prefix: np.ndarray, ids: Sequence[int], spans: Sequence[tuple[int, int]]) -> np.ndarray:
    """Concatenate the spans of `ids`, each preceded by `prefix`."""
    ids = np.asarray(ids)
    return np.concatenate([part for start, end in spans for part in (prefix, ids[start:end])])


class Columns(NamedTuple):
    """The columns of a prepared dataset that a step uses.

    texts: columns of token ids, one for each text of an example, in the order of the outputs.
    numbers: columns of numbers.
    labels: columns of labels, one for each text, for a language modeling head.
    documents: column with the token counts of the documents of the only text; may be missing from a dataset.
    optional: columns among `numbers` that may be missing from a dataset.
    num_primary_texts: see `Example`.
    prompts: column of prompts, in online training only.
    raw: columns of rows with images, from which examples are built during training; empty without images.
    """

    texts: tuple[str, ...]
    numbers: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    documents: str | None = None
    optional: tuple[str, ...] = ()
    num_primary_texts: int | None = None
    prompts: str | None = None
    raw: tuple[str, ...] = ()

    @property
    def all(self) -> tuple[str, ...]:
        """All column names, texts first."""
        return self.raw or (*self.texts, *self.labels, *self.numbers, *([self.documents] if self.documents else []))

    def example(self, row: Mapping[str, Any]) -> Example:
        """Build an example from these columns of a row."""
        texts = tuple(row[name] for name in self.texts)
        labels = tuple(row[name] for name in self.labels)
        documents = row.get(self.documents, ()) if self.documents else ()
        numbers = {name: row[name] for name in self.numbers if name in row}
        return Example(texts, Extras(numbers), labels, documents, self.num_primary_texts)


def rows_of(columns: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """The rows of a batch that `datasets` returns as columns."""
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


class LossBatch(NamedTuple):
    """The fields of a `Batch` that a loss over per-text numbers needs, without the per-read fields.

    num_examples: number of real examples; the rest of the E are padding.
    divisor: the divisor of the mean loss: the number of examples, or of targets.
    pass_weight: `[E]`, weight of each example in a mean over the examples.
    """

    weight: Any
    extras: Extras
    num_examples: int
    micro_batch: Any = None
    divisor: float = 1.0
    pass_weight: Any = None


def loss_batch(examples: Sequence[Example], size: int, *, per_token: bool = False) -> LossBatch:
    """Build a `LossBatch` of these examples, padded to `size`. The loss is a mean unless examples have weights.

    Args:
        per_token: average over targets instead of over examples.
    """
    count = len(examples)
    divisor = max(1, sum(example.num_targets for example in examples)) if per_token else count
    weight, pass_weight = np.zeros((2, size), np.float32)
    weight[:count], pass_weight[:count] = [weight_of(example, 1 / divisor) for example in examples], 1 / count
    like = examples[0]
    extras = like.extras._replace(read={}).zeros(examples=size, texts=len(like.texts) * size, reads=0)
    for slot, example in enumerate(examples):
        extras.write_example((), slot, size, example.extras)
    return LossBatch(weight, extras, count, divisor=divisor, pass_weight=pass_weight)


def weight_of(example: Example, weight: float) -> float:
    """The weight of an example in the loss: its own, else `weight`.

    Raises:
        ValueError: its own is not above 0; a weight of 0 marks padding.
    """
    if example.weight is None:
        return weight
    if not example.weight > 0:
        raise ValueError(f"An example has weight {example.weight}; it must be above 0. Leave the example out instead.")
    return example.weight


def of_examples(outputs: Any, texts: int, num_examples: int) -> Any:
    """Drop the outputs of padding examples from `[X, ...]`.

    The result has the first texts of all real examples, then their second texts, and so on.
    """
    by_text = outputs.reshape(texts, -1, *outputs.shape[1:])
    return by_text[:, :num_examples].reshape(-1, *outputs.shape[1:])
