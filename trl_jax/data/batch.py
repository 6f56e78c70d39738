"""Examples, the extra numbers of a loss, and batches. Pure NumPy."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from trl_jax.core.outputs import Packed, VirtualTokens

# ----------------------------------------------------------------------------------------------------
# A batch: what one pass through the model is computed on. Pure NumPy.


class Batch(NamedTuple):
    """E examples with X texts in all, as R rows of T tokens: a row a text, or texts laid end to end in a packed row.

    Texts come in the order of the outputs: the first text of every example, then the second of every example.

    tokens, positions: int32 `[R, T]`.
    reads: int32 `[N]`, the places that outputs are wanted of, row * T + place in the row. Under a score head one of
        each text, N = X. Under a language model's head those that predict a target, then places that only fill the
        shape.
    targets: int32 `[N]`, the id that each read predicts, -1 of one that only fills the shape. None under a score head.
    text: int32 `[N]`, the text that each read belongs to, X of one that only fills the shape. None under a score head.
    pass_weight: float32 `[E]`, the share of each example in the mean over the step's passes, on all devices, of means
        over their examples. None where micro-batches do not have a pass each.
    router_token_count: int16 `[R, T]`, how many of the first `Example.num_primary_texts` texts each token belongs to:
        as often it is in the sums of experts' routers. 0 of a pad, 2 of one that two texts share.
    first_labels: int32 `[R]`, the label of the first token of each padded row, -100 of a document's. Nothing predicts
        it, and scripts see it in `labels`, as in TRL. None elsewhere.
    lengths: int32 `[X]`, tokens of each text; `[R]` of padded rows, of which documents have one each.
    weight: float32 `[E]`, the share of each example in the step's loss; 0 marks one that is not in this pass.
    micro_batch: bool `[M, E]`, which micro-batch of the step an example belongs to; metrics are summed over each.
    extras: float32, numbers that the loss needs by name: `extras.example` `[E]`, `extras.text` `[X]` and `extras.read`
        `[N]`.
    packed: what tokens see where texts lie end to end; None where each row is a text.

    In a step every array has a leading axis of passes, which are computed one after another.
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

    def enter(self, index: tuple[int, ...], slot: int, example: Example, weight: float) -> None:
        """Enter an example's weight, and the numbers of it and of its texts, into a slot of the pass at `index`."""
        self.weight[index][slot] = weight
        self.extras.enter(index, slot, self.weight.shape[-1], example.extras)

    def read(
        self, index: tuple[int, ...], start: int, slot: int, example: Example, number: int, places: np.ndarray
    ) -> int:
        """Enter the reads of an example's text that predict targets, from read `start` of a pass on. Returns their end.

        Args:
            index: of the pass.
            slot: of the example.
            number: of the text in it.
            places: of the reads, flat within the pass, `[n]`.
        """
        end, targets = start + len(places), example.targets(number)[1]
        self.reads[index][start:end], self.targets[index][start:end] = places, targets
        self.text[index][start:end] = number * self.weight.shape[-1] + slot
        self.extras.enter_reads(index, start, len(places), number, example.extras)
        return end


def without_virtual(batch: Batch, count: int) -> Batch:
    """A pass of padded rows `[R, T]` without the `count` virtual tokens that each begins with. No read is of one."""
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
    """Zeros for passes `[*leading]` of E `examples` and N `reads`, under the names of an example's extras.

    Raises:
        ValueError: it has numbers of reads, and no labels that say what is read.
    """
    if like.extras.read and not like.labels:
        raise ValueError(
            f"extras.read[{next(iter(like.extras.read))!r}] has no targets that it could belong to: the example has no "
            "labels. Numbers of texts are extras.text."
        )
    return like.extras.zeros(*leading, examples=examples, texts=len(like.texts) * examples, reads=reads)


def read_places(example: Example, text: int, pad_token_id: int) -> np.ndarray:
    """The places of a text that outputs are wanted of, `[n]`: those that predict a target; without labels the one that
    transformers' classifiers read."""
    if example.labels:
        return example.targets(text)[0]
    return np.asarray([last_real_token(example.texts[text], pad_token_id)])


def last_real_token(ids: Sequence[int], pad_token_id: int) -> int:
    """The place at which transformers' classifiers read a text: the rightmost id that is not the pad id, else 0.

    Ids, not the attention mask: where pad and EOS are the same token, a closing EOS is passed over.
    """
    real = np.flatnonzero(np.asarray(ids) != pad_token_id)
    return int(real[-1]) if len(real) else 0


def padded_length(longest: int, pad_to_multiple_of: int | str | None) -> int:
    """The row length for a batch whose longest row has `longest` tokens.

    Each length compiles once. "auto" rounds up to one of few lengths, 32 tokens apart and from 256 on four an octave,
    so that a run meets a handful of them; what a real token computes does not depend on the pads behind it. A number
    rounds up to its multiple; None takes the length as it is.
    """
    if pad_to_multiple_of is None:
        return longest
    if pad_to_multiple_of == "auto":
        octave = 1 << (longest - 1).bit_length() >> 1
        step = max(32, octave // 4)
    else:
        step = int(pad_to_multiple_of)
    return -(-longest // step) * step


# ----------------------------------------------------------------------------------------------------
# Numbers that a loss needs besides the model's outputs, by name, each on an axis of its own. Pure NumPy.


class Extras(NamedTuple):
    """Numbers of examples, of their texts, and of their reads.

    Of one example: `example` has a number by name, `text` one for each of its texts, and `read`, under a language
    model's head, for each of its texts one for each target, in the order of `Example.targets`. All examples of a task
    have the same names. Of a batch they are float32 `[E]`, `[X]` and `[N]`, in the order of `Batch.weight`, of the
    outputs, and of `Batch.reads`; zeros for what only fills the shape.
    """

    example: Mapping[str, Any] = {}
    text: Mapping[str, Any] = {}
    read: Mapping[str, Any] = {}

    def zeros(self, *leading: int, examples: int, texts: int, reads: int) -> Extras:
        """Zeros `[*leading, E]`, `[*leading, X]` and `[*leading, N]` under the names of this example's."""
        sizes = (examples, texts, reads)
        return Extras(
            *(
                {name: np.zeros((*leading, size), np.float32) for name in of}
                for of, size in zip(self, sizes, strict=True)
            )
        )

    def enter(self, index: tuple[int, ...], slot: int, examples: int, own: Extras) -> None:
        """Enter the numbers of an example, and of its texts, into those of a pass.

        Args:
            index: of the pass.
            slot: of the example among the pass's E `examples`.
            own: the example's.
        """
        for name, values in self.example.items():
            values[index][slot] = own.example[name]
        for name, values in self.text.items():
            values[index][slot::examples] = own.text[name]

    def enter_reads(self, index: tuple[int, ...], start: int, count: int, text: int, own: Extras) -> None:
        """Enter the numbers of the `count` reads of an example's text, from read `start` of a pass on.

        Raises:
            ValueError: there are more or fewer numbers than reads.
        """
        for name, values in self.read.items():
            numbers = own.read[name][text]
            if len(numbers) != count:
                raise ValueError(
                    f"extras.read[{name!r}] of text {text} has {len(numbers)} numbers, and the text has {count} "
                    "targets. Give it one for each, in the order of Example.targets."
                )
            values[index][start : start + count] = numbers


# ----------------------------------------------------------------------------------------------------
# Examples: the texts and numbers of one row of a prepared dataset. Pure NumPy.


IGNORED = -100  # a label that is no target, as in transformers


class Context(NamedTuple):
    """The beginning of an example's one text, alike in all examples of a micro-batch with the same key.

    tokens: how many ids it is.
    """

    key: Hashable
    tokens: int


class Example(NamedTuple):
    """One row, in the form that layouts read.

    texts: token ids of each text that the model reads; all examples of a task have the same number of texts.
    extras: numbers that the loss needs besides the outputs, by name: of the example, of its texts, of its reads.
    labels: of each text, under a language model's head: transformers' labels, for each of its tokens the id that is to
        be predicted there from the tokens before it, or -100. Empty under a score head.
    documents: the tokens of each document that the one text consists of; none sees another. Empty: it is one.
    num_primary_texts: how many texts, from the first, count as tokens that were trained on; None counts all.
    weight: of the example in the step's loss, which is a weighted sum, above 0; None leaves it to the layout.
    context: what it shares with others, which the shared layout computes once. None: nothing.
    virtual: how many tokens at the beginning of each text, or document, are virtual and no part of it.
    """

    texts: tuple[Sequence[int], ...]
    extras: Extras = Extras()
    labels: tuple[Sequence[int], ...] = ()
    documents: Sequence[int] = ()
    num_primary_texts: int | None = None
    weight: float | None = None
    context: Context | None = None
    virtual: int = 0

    @property
    def longest(self) -> int:
        """Number of tokens of the longest text."""
        return max(map(len, self.texts))

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Where each document of the one text begins and ends; of a text without documents, itself."""
        ends = np.cumsum([0, *(self.documents or [len(self.texts[0])])]).tolist()
        return list(itertools.pairwise(ends))

    @property
    def longest_document(self) -> int:
        """Number of tokens of the longest document, which is the longest text where texts consist of none."""
        return max(self.documents, default=self.longest)

    @property
    def num_targets(self) -> int:
        """Number of tokens that are to be predicted, of all texts together."""
        return sum(len(self.targets(text)[0]) for text in range(len(self.labels)))

    @property
    def num_counted_targets(self) -> int:
        """The number of targets that the loss of a step is divided by. The first token of a text, which is predicted
        where virtual ones stand before it, is none of them: transformers counts before PEFT puts these there."""
        first = sum(int((self.targets(text)[0] == self.virtual - 1).sum()) for text in range(len(self.labels)))
        return self.num_targets - first

    def targets(self, text: int) -> tuple[np.ndarray, np.ndarray]:
        """The places of a text that predict a target, in order, and these targets: `[n]` each.

        The first token of a document is predicted from nothing, whatever its label.
        """
        labels = np.array(self.labels[text], np.int64)
        labels[np.cumsum([0, *self.documents[:-1]])] = IGNORED
        at = np.flatnonzero(labels != IGNORED)
        return at - 1, labels[at]

    @property
    def tokens(self) -> int:
        """Number of tokens of all texts together."""
        return sum(map(len, self.texts))

    @property
    def lengths(self) -> list[int]:
        """The tokens of each text, without virtual ones."""
        return [len(ids) - self.virtual * max(1, len(self.documents)) for ids in self.texts]

    def behind(self, virtual: VirtualTokens, *, predicted: bool) -> Example:
        """The example with virtual tokens before each of its texts, or documents.

        Args:
            predicted: whether the first token of a text may be a target then; that of a document is none.
        """
        if not virtual.count:
            return self
        predicted = predicted and virtual.read and not self.documents
        texts = tuple(_each_behind(virtual.ids, ids, self._spans_of(ids)) for ids in self.texts)
        labels = []
        for own in self.labels:
            own = np.array(own, np.int64)
            own[[] if predicted else [start for start, _ in self._spans_of(own)]] = IGNORED
            labels.append(_each_behind(np.full(virtual.count, IGNORED), own, self._spans_of(own)))
        documents = [tokens + virtual.count for tokens in self.documents]
        context = self.context and self.context._replace(tokens=self.context.tokens + virtual.count)
        changes = {"documents": documents, "context": context, "virtual": virtual.count}
        return self._replace(texts=texts, labels=tuple(labels), **changes)

    def _spans_of(self, ids: Sequence[int]) -> list[tuple[int, int]]:
        return self.spans if self.documents else [(0, len(ids))]


def _each_behind(before: np.ndarray, ids: Sequence[int], spans: Sequence[tuple[int, int]]) -> np.ndarray:
    """`before` and a span of `ids`, then again and the next."""
    ids = np.asarray(ids)
    return np.concatenate([part for start, end in spans for part in (before, ids[start:end])])


class Columns(NamedTuple):
    """The columns of a prepared dataset that a step is computed from.

    texts: columns of token ids, one for each text of an example, in the order of the outputs.
    numbers: columns of numbers.
    labels: columns of labels, one for each text, under a language model's head.
    documents: the column of the tokens of each document of the one text; a dataset may lack it.
    optional: those of `numbers` that a dataset may lack.
    num_primary_texts: how many texts, from the first, count as tokens that were trained on; None counts all.
    prompts: the column of what a run completes, where examples are made of completions; None elsewhere.
    """

    texts: tuple[str, ...]
    numbers: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    documents: str | None = None
    optional: tuple[str, ...] = ()
    num_primary_texts: int | None = None
    prompts: str | None = None

    @property
    def all(self) -> tuple[str, ...]:
        """All names, texts first."""
        return (*self.texts, *self.labels, *self.numbers, *([self.documents] if self.documents else []))

    def example(self, row: Mapping[str, Any]) -> Example:
        """Make an example of these columns of a row."""
        texts = tuple(row[name] for name in self.texts)
        labels = tuple(row[name] for name in self.labels)
        documents = row.get(self.documents, ()) if self.documents else ()
        numbers = {name: row[name] for name in self.numbers if name in row}
        return Example(texts, Extras(numbers), labels, documents, self.num_primary_texts)


class LossBatch(NamedTuple):
    """The part of a batch that a loss of numbers of texts needs besides those; fields as in `Batch`, without what is of
    reads.

    num_examples: how many of the E examples are real; the others are padding.
    divisor: what the loss of this batch is a mean over: its examples, or its targets.
    pass_weight: `[E]`, the share of each example in a mean over the examples.
    """

    weight: Any
    extras: Extras
    num_examples: int
    micro_batch: Any = None
    divisor: float = 1.0
    pass_weight: Any = None


def loss_batch(examples: Sequence[Example], size: int, *, per_token: bool = False) -> LossBatch:
    """Make a batch of these examples, padded to `size` ones, whose loss is a mean unless they have weights.

    Args:
        per_token: a mean over their targets, otherwise over the examples.
    """
    count = len(examples)
    divisor = max(1, sum(example.num_targets for example in examples)) if per_token else count
    weight, pass_weight = np.zeros((2, size), np.float32)
    weight[:count], pass_weight[:count] = [weight_of(example, 1 / divisor) for example in examples], 1 / count
    like = examples[0]
    extras = like.extras._replace(read={}).zeros(examples=size, texts=len(like.texts) * size, reads=0)
    for slot, example in enumerate(examples):
        extras.enter((), slot, size, example.extras)
    return LossBatch(weight, extras, count, divisor=divisor, pass_weight=pass_weight)


def weight_of(example: Example, weight: float) -> float:
    """The weight of an example in the loss: its own, else `weight`.

    Raises:
        ValueError: its own is not above 0, which marks what only fills the shape.
    """
    if example.weight is None:
        return weight
    if not example.weight > 0:
        raise ValueError(f"An example's weight is {example.weight}: wanted is one above 0. Leave the example out.")
    return example.weight


def of_examples(outputs: Any, texts: int, num_examples: int) -> Any:
    """Drop the outputs of padding examples from `[X, ...]`.

    Those of the first text of each real example come first, then those of the second, and so on.
    """
    by_text = outputs.reshape(texts, -1, *outputs.shape[1:])
    return by_text[:, :num_examples].reshape(-1, *outputs.shape[1:])
