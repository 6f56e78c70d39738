"""The functions that a caller of `generate` gives, and the values of each step that it asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from trl_jax.generation.options import Text
from trl_jax.generation.processors import Processor
from trl_jax.generation.request import Completions
from trl_jax.hub.generating.callables import Called, Failures, PrefixConstraint, Recorder, in_order, merged, on_host
from trl_jax.hub.generating.prompts import Prompts
from trl_jax.hub.generating.settings import Settings
from trl_jax.hub.generating.watching import StepWatch, criteria_of


@dataclass(frozen=True)
class GenerateOutput:
    """The result of `generate` with return_dict_in_generate=True; by attribute or by name.

    sequences: int64 `[rows, prompt + new]`.
    scores, logits: a tuple of float32 `[rows, V]`, one a step: processed, and as the model gave them; None where not
    asked for.
    logprobs: float32 `[rows, new]`, of each new token by the model's logits as they were; 0 behind a text's end.
    """

    sequences: Any
    scores: tuple | None
    logits: tuple | None
    logprobs: Any

    def __getitem__(self, name: str) -> Any:
        return vars(self)[name]


class Caller:
    """The functions of a caller, which change scores and end texts, and the values of each step that it wants."""

    def __init__(
        self,
        settings: Settings,
        prompts: Prompts,
        processors: Sequence[Callable],
        criteria: Sequence[Callable],
        prefix_allowed: Callable | None,
    ):
        self._settings, self._prompts, self._criteria = settings, prompts, criteria
        self._own, in_torch, self._failures = list(processors), prompts.in_torch, Failures()
        self._prefix = prefix_allowed and PrefixConstraint(prefix_allowed, settings.completions, in_torch)
        wanted = ("output_logits", "output_scores") if settings.config.return_dict_in_generate else ()
        self._recorders = {name: Recorder() for name in wanted if vars(settings.config)[name]}

    @contextmanager
    def processors(self, before: dict[str, Processor], behind: dict[str, Processor]) -> Iterator[tuple[Processor, ...]]:
        """All processors in their order, ours and the caller's."""
        functions = [Called(one, self._prompts.in_torch) for one in self._own]
        functions += [self._prefix] if self._prefix else []
        with on_host([*functions, *self._recorders.values()], self._failures) as called:
            own, rest = called[: len(self._own)], called[len(self._own) :]
            if self._prefix:
                before = in_order(before | {"prefix_allowed_tokens_fn": rest.pop(0)})
            keep = dict(zip(self._recorders, rest, strict=True))
            chain = [*merged(before, list(zip(self._own, own, strict=True))), *behind.values()]
            first = [keep["output_logits"]] if "output_logits" in keep else []
            last = [keep["output_scores"]] if "output_scores" in keep else []
            yield (*first, *chain, *last)

    def watch(self, text: Text, streamer: Any, tokenizer: Any) -> StepWatch | None:
        """None where nothing has to be looked at in each step."""
        criteria = [self._failures] if self._own or self._prefix else []
        criteria += criteria_of(self._settings.config, tokenizer)
        criteria += [Called(one, self._prompts.in_torch) for one in self._criteria]
        if not (criteria or streamer is not None or self._recorders):
            return None
        scores = self._recorders["output_scores"].steps if "output_scores" in self._recorders else None
        options = {"streamer": streamer, "criteria": criteria, "scores": scores}
        return StepWatch(self._prompts, self._settings.completions, text.max_length, **options)

    def result(self, completions: Completions) -> Any:
        """The sequences, or all that was asked for."""
        prompts = self._prompts
        sequences = prompts.sequences(completions.tokens, self._settings.completions)
        if not self._settings.config.return_dict_in_generate:
            return sequences
        kept = {name: tuple(map(prompts.back, recorder.steps)) for name, recorder in self._recorders.items()}
        logprobs = prompts.back(completions.logps)
        return GenerateOutput(sequences, kept.get("output_scores"), kept.get("output_logits"), logprobs)
