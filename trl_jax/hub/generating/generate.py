"""transformers' `generate` of a native model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from trl_jax.core.seed import default_generator
from trl_jax.core.torch_random import TorchGenerator
from trl_jax.generation.generator import Completions
from trl_jax.generation.options import Text
from trl_jax.generation.processors import Processor
from trl_jax.hub.generating.callables import Called, Failures, PrefixConstraint, Recorder, in_order, merged, on_host
from trl_jax.hub.generating.complete import check_generates, drawing_of, request_of, run, text_of
from trl_jax.hub.generating.prompts import Prompts, read_prompts
from trl_jax.hub.generating.refusals import refuse_arguments
from trl_jax.hub.generating.settings import Settings, processors_of, resolve
from trl_jax.hub.generating.stop_strings import StopStrings
from trl_jax.hub.generating.watching import MaxTime, StepWatch


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


class GenerationApi:
    """transformers' `generate`, of a model with a language model's head. Needs `backend`, `config`,
    `generation_config`, `graph` and `arrays`."""

    generation_config: Any

    def generate(
        self,
        inputs: Any = None,
        generation_config: Any = None,
        logits_processor: Sequence[Callable] | None = None,
        stopping_criteria: Sequence[Callable] | None = None,
        prefix_allowed_tokens_fn: Callable | None = None,
        synced_gpus: bool | None = None,
        assistant_model: Any = None,
        streamer: Any = None,
        negative_prompt_ids: Any = None,
        negative_prompt_attention_mask: Any = None,
        custom_generate: Any = None,
        *,
        seed: int | None = None,
        dtype: Any = jnp.float32,
        **kwargs: Any,
    ) -> Any:
        """Complete prompts, with transformers' arguments and, on a CPU in float32, its tokens.

        Args:
            inputs: token ids `[rows, T]`, as lists, NumPy's, JAX's or torch's; or as `input_ids`, with an
                `attention_mask`, as in `generate(**tokenizer(...))`.
            generation_config: transformers' object; fields that are None come from the model's own.
            logits_processor, stopping_criteria, prefix_allowed_tokens_fn: functions of the caller, called on the host
                in each step with NumPy's arrays, or torch's tensors where they or the prompts are of that kind.
            synced_gpus: has no effect: all processes of a mesh run one program.
            streamer: gets the prompts and each step's tokens.
            seed: of the tokens that are drawn; None goes on with the process's stream, which `trl_jax.set_seed` seeds.
            dtype: that the model computes in.
            kwargs: fields of a GenerationConfig, and `tokenizer` for `stop_strings`.

        Returns int64 `[rows, T + new]`, torch's where the prompts are; with return_dict_in_generate=True a
        GenerateOutput.

        Raises:
            ValueError: an argument that is not in this release or out of its range.
            RuntimeError: the model's logits are not finite.
        """
        del synced_gpus
        check_generates(self)
        named = {
            "assistant_model": assistant_model, "negative_prompt_ids": negative_prompt_ids,
            "negative_prompt_attention_mask": negative_prompt_attention_mask, "custom_generate": custom_generate,
        }  # fmt: skip
        tokenizer = kwargs.pop("tokenizer", None)
        settings, others = resolve(self, generation_config, kwargs)
        refuse_arguments(named | others)
        prompts = read_prompts(*_inputs(inputs, others), settings, self.backend.vocab_size)
        text = text_of(self, settings, prompts.width)
        caller = _Caller(settings, prompts, logits_processor or (), stopping_criteria or (), prefix_allowed_tokens_fn)
        with caller.processors(*processors_of(settings, text)) as processors:
            watch = caller.watch(text, streamer, tokenizer)
            request = request_of(settings, text, *prompts.grouped(settings.completions), processors)
            request = replace(request, logps=bool(settings.config.return_dict_in_generate))
            stream = default_generator() if seed is None else TorchGenerator(seed)
            completions = run(self, request, drawing_of(settings, stream, dtype), dtype=dtype, watch=watch)
        if watch is not None:
            watch.end()
        return caller.result(completions)


def _inputs(inputs: Any, others: Mapping[str, Any]) -> tuple[Any, Any]:
    """input_ids and attention_mask.

    Raises:
        ValueError: ids are given twice, or there is something else.
    """
    ids = others.get("input_ids")
    if inputs is not None and ids is not None:
        raise ValueError(
            f"`inputs`: {inputs}` were passed alongside input_ids which is not allowed. Make sure to either pass "
            f"{inputs} or input_ids=..."
        )
    if np.any(others.get("token_type_ids")):
        raise ValueError("token_type_ids has other types than 0, but each row is a single text. Leave it out.")
    known = ("input_ids", "attention_mask", "token_type_ids", "trust_remote_code")
    unused = [name for name, value in others.items() if value is not None and name not in known]
    if unused:
        raise ValueError(
            f"The following `model_kwargs` are not used by the model: {unused} (note: typos in the generate arguments "
            "will also show up in this list)"
        )
    return inputs if ids is None else ids, others.get("attention_mask")


class _Caller:
    """What a caller gives beside numbers: functions that change scores, that end texts, and wishes for a step's own
    values."""

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
        config, criteria = self._settings.config, [self._failures] if self._own or self._prefix else []
        if config.max_time is not None:
            criteria.append(MaxTime(config.max_time))
        if config.stop_strings is not None:
            criteria.append(StopStrings(config.stop_strings, tokenizer))
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
