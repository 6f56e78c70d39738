"""Many prompts, a batch at a time: tokens that do not depend on how they are batched."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from trl_jax.core.torch_random import TorchGenerator
from trl_jax.generation.noise import random_key
from trl_jax.generation.options import Text
from trl_jax.hub.generating.complete import KeyedDrawing, check_generates, request_of, run, text_of
from trl_jax.hub.generating.prompts import Prompts, left_padded
from trl_jax.hub.generating.settings import Settings, processors_of
from trl_jax.hub.generating.watching import StepWatch, criteria_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Completion:
    """One completion of a prompt, with transformers' names.

    number: among all of the call. generated_tokens: with the id that ends it, where one does. logprobs: of each, by the
    model's logits as they were.
    """

    number: int
    prompt_ids: list[int]
    generated_tokens: list[int]
    logprobs: list[float]

    @property
    def request_id(self) -> str:
        """ "req_0", "req_1", ..."""
        return f"req_{self.number}"


class Batches:
    """Completes prompts in batches, those of like length together.

    Args:
        prompts: token ids of all of them: the longest decides how much room for new tokens `max_length` leaves.
        stream: the generator whose next two words are the key that tokens are drawn with.
        batch_size: completions that are computed at once. tokenizer: for stop strings.
    """

    def __init__(
        self,
        model: Any,
        settings: Settings,
        prompts: Sequence[Sequence[int]],
        *,
        stream: TorchGenerator,
        batch_size: int,
        dtype: Any = jnp.float32,
        tokenizer: Any = None,
    ):
        check_generates(model)
        _check_prompts(prompts, model.vocab_size)
        self._model, self._settings, self._dtype, self._tokenizer = model, settings, dtype, tokenizer
        self._prompts = [np.asarray(ids, np.int32) for ids in prompts]
        self._text: Text = text_of(model, settings, max(map(len, prompts)))
        before, behind = processors_of(settings, self._text)
        self._processors = (*before.values(), *behind.values())
        self._key = random_key(stream) if settings.config.do_sample else None
        self._size = max(1, batch_size // settings.completions)  # prompts

    def __call__(self, numbers: Sequence[int] | None = None) -> Iterator[list[Completion]]:
        """The completions of each batch, in the order in which they are done: of all prompts, or those of these
        numbers."""
        numbers = np.asarray(range(len(self._prompts)) if numbers is None else numbers)
        numbers = numbers[np.argsort([-len(self._prompts[number]) for number in numbers], kind="stable")]
        for start in range(0, len(numbers), self._size):
            yield self._completed(numbers[start : start + self._size])

    def _completed(self, numbers: np.ndarray) -> list[Completion]:
        group = self._settings.completions
        rows = (numbers[:, None] * group + np.arange(group)).reshape(-1)
        prompts = [self._prompts[number] for number in numbers]
        request = replace(request_of(self._settings, self._text, prompts, group, self._processors), logps=True)
        drawing = None if self._key is None else KeyedDrawing(self._key, rows)
        done = run(self._model, request, drawing, dtype=self._dtype, watch=self._watch(prompts))
        return [
            Completion(int(row), self._prompts[row // group].tolist(), ids[:end].tolist(), logps[:end].tolist())
            for row, ids, logps, end in zip(rows, done.tokens, done.logps, done.lengths, strict=True)
        ]

    def _watch(self, prompts: list[np.ndarray]) -> StepWatch | None:
        criteria = criteria_of(self._settings.config, self._tokenizer)
        padded = Prompts(left_padded(prompts, self._settings.pad), prompts)
        room = padded.width + self._text.max_length - self._text.prompt_length
        return StepWatch(padded, self._settings.completions, room, criteria=criteria) if criteria else None


def collected(batches: Iterable[list[Completion]], total: int, *, progress_bar: bool) -> list[Completion]:
    """All completions by their number; as many as are there when a Ctrl-C comes, unless there is none."""
    done: dict[int, Completion] = {}
    with tqdm(unit=" tokens", disable=not progress_bar) as bar:
        try:
            for batch in batches:
                done |= {one.number: one for one in batch}
                bar.update(sum(len(one.generated_tokens) for one in batch))
        except KeyboardInterrupt:
            if not done:
                raise
            logger.warning("Interrupted: %d of %d completions are there, and are returned.", len(done), total)
    return [done[number] for number in sorted(done)]


def _check_prompts(prompts: Sequence[Sequence[int]], vocabulary: int) -> None:
    for number, ids in enumerate(prompts):
        if len(ids) == 0 or not 0 <= min(ids) <= max(ids) < vocabulary:
            raise ValueError(
                f"Prompt {number} has {len(ids)} tokens: wanted at least one, and ids of the vocabulary, from 0 to "
                f"{vocabulary - 1}."
            )
