"""Many prompts, so many at a time: tokens that do not depend on which are computed together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from trl_jax.core.torch_random import TorchGenerator
from trl_jax.generation.noise import random_key
from trl_jax.generation.options import Text
from trl_jax.generation.request import Completed, Request
from trl_jax.hub.generating.complete import KeyedDrawing, check_generates, request_of, run, run_queue, text_of
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
    """Completes prompts, so many at a time, those of like length together. Where all completions of a prompt have ended
    the next one takes its place; with stop strings or a time limit, which the host looks at, a batch ends as a whole.

    Args:
        prompts: token ids of all of them: the longest decides how much room for new tokens `max_length` leaves.
        stream: the generator whose next two words are the key that tokens are drawn with.
        batch_size: completions that are computed at once. tokenizer: for stop strings.
        window: how many prompts in a row are sorted by length; None: all of them.
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
        window: int | None = None,
    ):
        check_generates(model)
        _check_prompts(prompts, model.vocab_size)
        self._model, self._settings, self._dtype, self._tokenizer = model, settings, dtype, tokenizer
        self._prompts = [np.asarray(ids, np.int32) for ids in prompts]
        self._text: Text = text_of(model, settings, max(map(len, prompts)))
        before, behind = processors_of(settings, self._text)
        self._processors = (*before.values(), *behind.values())
        self._key = random_key(stream) if settings.config.do_sample else None
        self._size, self._window = max(1, batch_size // settings.completions), window or len(prompts)  # prompts

    def __call__(self, done: Callable[[list[Completion]], None], first: int = 0) -> None:
        """Complete the prompts from this number on; `done` gets completions as they end."""
        numbers = np.concatenate([
            start + np.argsort([-len(ids) for ids in self._prompts[start : start + self._window]], kind="stable")
            for start in range(first, len(self._prompts), self._window)
        ])  # fmt: skip
        if not criteria_of(self._settings.config, self._tokenizer):
            request, drawing, taken = self._asked(numbers, done)
            run_queue(self._model, request, drawing, taken, slots=self._size, dtype=self._dtype)
        else:
            self.in_batches(numbers, done)

    def in_batches(self, numbers: np.ndarray, done: Callable[[list[Completion]], None]) -> None:
        """Complete the prompts of these numbers, each batch until its last completion has ended."""
        for start in range(0, len(numbers), self._size):
            request, drawing, taken = self._asked(numbers[start : start + self._size], done)
            completions = run(self._model, request, drawing, dtype=self._dtype, watch=self._watch(request.prompts))
            taken(completions.rows())

    def _asked(
        self, numbers: np.ndarray, done: Callable[[list[Completion]], None]
    ) -> tuple[Request, KeyedDrawing | None, Callable[[Sequence[Completed]], None]]:
        """The request of the prompts of these numbers, how its tokens are drawn, and what takes its completions."""
        group = self._settings.completions
        rows = (numbers[:, None] * group + np.arange(group)).reshape(-1)
        prompts = [self._prompts[number] for number in numbers]
        request = replace(request_of(self._settings, self._text, prompts, group, self._processors), logps=True)

        def taken(completed: Sequence[Completed]) -> None:
            done([
                Completion(int(rows[one.row]), prompts[one.row // group].tolist(), one.tokens.tolist(),
                           one.logps.tolist())
                for one in completed
            ])  # fmt: skip

        return request, None if self._key is None else KeyedDrawing(self._key, rows), taken

    def _watch(self, prompts: list[np.ndarray]) -> StepWatch | None:
        criteria = criteria_of(self._settings.config, self._tokenizer)
        padded = Prompts(left_padded(prompts, self._settings.pad), prompts)
        room = padded.width + self._text.max_length - self._text.prompt_length
        return StepWatch(padded, self._settings.completions, room, criteria=criteria) if criteria else None


def collected(batches: Batches, total: int, *, progress_bar: bool) -> list[Completion]:
    """All completions by their number; as many as are there when a Ctrl-C comes, unless there is none."""
    done: dict[int, Completion] = {}
    with tqdm(unit=" tokens", disable=not progress_bar) as bar:

        def take(completions: list[Completion]) -> None:
            done.update({one.number: one for one in completions})
            bar.update(sum(len(one.generated_tokens) for one in completions))

        try:
            batches(take)
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
