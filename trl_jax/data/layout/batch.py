"""A batch: what one pass through the model is computed on. Pure NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from trl_jax.core.packed import Packed
from trl_jax.data.example import Example
from trl_jax.data.extras import Extras


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
