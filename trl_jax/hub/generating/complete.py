"""Completions of prompts by a model: the settings of one generation, its random numbers, and its checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from trl_jax.core.torch_random import TorchGenerator
from trl_jax.generation import generator
from trl_jax.generation.noise import KeyedSource, NoiseSource, PrefetchedWords, chunk_steps, random_key
from trl_jax.generation.options import Text
from trl_jax.generation.processors import Processor
from trl_jax.generation.request import Completed, Completions, Progress, Request, Watch
from trl_jax.generation.weights import Weights
from trl_jax.hub.generating.settings import Settings, max_length, processors_of, resolve
from trl_jax.nn.platform import platform


class Drawing(Protocol):
    """How tokens are drawn."""

    def source(self, rows: int, vocabulary: int, steps: int, new: int) -> NoiseSource:
        """Random numbers for at most `new` steps of so many rows, in chunks of `steps`."""


@dataclass(frozen=True)
class ExactDrawing:
    """As transformers draws on a CPU, with torch's generator, which then stands behind the numbers that were used."""

    stream: TorchGenerator

    def steps(self, rows: int, vocabulary: int) -> int:
        """Of a chunk, whose words are made ahead of it."""
        return chunk_steps(rows, vocabulary, generator.STEPS)

    def source(self, rows: int, vocabulary: int, steps: int, new: int) -> NoiseSource:
        return PrefetchedWords(self.stream, rows=rows, vocabulary=vocabulary, steps=steps, max_steps=new)


@dataclass(frozen=True)
class KeyedDrawing:
    """By a key, the numbers of the rows and the positions of their tokens alone; rows are numbered from 0 on, where
    `numbers`, int `[R]`, does not say otherwise."""

    key: jax.Array
    numbers: np.ndarray | None = None

    def steps(self, rows: int, vocabulary: int) -> int:
        """Of a chunk: a step's numbers are made in it, whatever their count."""
        return generator.STEPS

    def source(self, rows: int, vocabulary: int, steps: int, new: int) -> NoiseSource:
        return KeyedSource(self.key, numbers=np.arange(rows) if self.numbers is None else self.numbers)


def exact_draws(dtype: Any) -> bool:
    """Whether this machine draws transformers' tokens: on a CPU, in float32."""
    return platform() == "cpu" and jnp.dtype(dtype) == jnp.float32 and jax.local_device_count() == 1


def computing_dtype(model: Any, dtype: Any) -> jnp.dtype:
    """The type that a generation computes in: as its caller says; else, on a CPU, float32, which is exact, and
    elsewhere the 16-bit type that the model is stored in, as transformers does."""
    if dtype is not None:
        return jnp.dtype(dtype)
    stored = jnp.dtype(model.backend.main_dtype)
    return stored if platform() != "cpu" and stored.itemsize == 2 else jnp.dtype(jnp.float32)


def complete(
    model: Any,
    prompt_ids: Sequence[Sequence[int]],
    options: Mapping[str, Any],
    *,
    group: int,
    stream: TorchGenerator,
    dtype: Any = jnp.float32,
    head_dtype: Any = None,
    logps: bool = True,
    progress: Progress | None = None,
) -> Completions:
    """Complete prompts, each `group` times, the completions of a prompt side by side.

    Args:
        model: a PreTrainedModel with a language model's head.
        options: fields of a GenerationConfig, `eos_token_id` and `pad_token_id` among them; where one is None, that of
            the model's generation_config counts.
        stream: the generator that tokens are drawn with; it goes on behind them.
        dtype: that the model computes in. head_dtype: its head; None: `dtype`.
        logps: whether log-probabilities are kept: of the model's own logits, divided by the temperature.
        progress: is told how far it is, as by `generation.generator.generate`.

    Raises:
        ValueError: options that are not in this release or out of their range, or no room for a token.
        RuntimeError: the model's logits are not finite.
    """
    from transformers import GenerationConfig

    check_generates(model)
    settings, _ = resolve(model, GenerationConfig(**options), {})
    prompts = [np.asarray(ids, np.int32) for ids in prompt_ids]
    text = text_of(model, settings, max(map(len, prompts)))
    before, behind = processors_of(settings, text)
    request = request_of(settings, text, prompts, group, (*before.values(), *behind.values()))
    temperature = settings.config.temperature if settings.config.do_sample else 1.0
    request = replace(request, temperature=temperature, logps=logps)
    drawing = drawing_of(settings, stream, dtype)
    return run(model, request, drawing, dtype=dtype, head_dtype=head_dtype, progress=progress)


def text_of(model: Any, settings: Settings, prompt_length: int) -> Text:
    """The lengths and ids of a generation.

    Raises:
        ValueError: no room for a token.
    """
    positions = model.config.get_text_config().to_dict().get("max_position_embeddings")
    return Text(settings.eos, prompt_length, max_length(settings, prompt_length, positions), model.vocab_size)


def request_of(
    settings: Settings, text: Text, prompts: list[np.ndarray], group: int, processors: tuple[Processor, ...]
) -> Request:
    """The request of `group` completions of each of these prompts, which are as wide as `text` says."""
    new = text.max_length - text.prompt_length
    return Request(prompts, group, settings.eos, settings.pad or 0, new, processors, width=text.prompt_length)


def drawing_of(settings: Settings, stream: TorchGenerator, dtype: Any) -> Drawing | None:
    """How tokens are drawn; None where the likeliest are taken."""
    if not settings.config.do_sample:
        return None
    return ExactDrawing(stream) if exact_draws(dtype) else KeyedDrawing(random_key(stream))


def run(
    model: Any, request: Request, drawing: Drawing | None, *, dtype: Any, head_dtype: Any = None,
    watch: Watch | None = None, progress: Progress | None = None,
) -> Completions:  # fmt: skip
    """Generate; the stream stands behind the steps that were taken, or where it was if that fails.

    Raises:
        ValueError: the model has no positions for the longest completion.
        RuntimeError: the model's logits are not finite.
    """
    _check_positions(model, request)
    request = replace(request, virtual=model.backend.virtual)
    weights = Weights.of(model.graph, model.arrays, dtype, head_dtype)
    steps = generator.STEPS if drawing is None else drawing.steps(request.rows, model.vocab_size)
    steps = steps if watch is None else 1
    options = {"vocabulary": model.vocab_size, "steps": steps, "new": request.max_new_tokens}
    source, used = None if drawing is None else drawing.source(request.rows, **options), 0
    try:
        with _precision(weights):
            completions = generator.generate(weights, request, source, steps=steps, watch=watch, progress=progress)
        used = completions.tokens.shape[1]
    finally:
        if source is not None:
            source.close(used)
    _check_drawn(completions.tokens)
    return completions


def run_queue(
    model: Any, request: Request, drawing: KeyedDrawing | None, done: Callable[[Sequence[Completed]], None], *,
    slots: int, dtype: Any,
) -> None:  # fmt: skip
    """Generate, `slots` prompts at a time; `done` gets completions as they end.

    Raises:
        ValueError, RuntimeError: as `run`.
    """
    _check_positions(model, request)
    request = replace(request, virtual=model.backend.virtual)
    weights = Weights.of(model.graph, model.arrays, dtype)
    options = {"vocabulary": model.vocab_size, "steps": generator.STEPS, "new": request.max_new_tokens}
    source = None if drawing is None else drawing.source(request.rows, **options)

    def checked(completed: Sequence[Completed]) -> None:
        for one in completed:
            _check_drawn(one.tokens)
        done(completed)

    with _precision(weights):
        generator.generate_queue(weights, request, source, checked, slots=slots)


def _precision(weights: Weights) -> Any:
    """Products as precise as the dtype that is computed in."""
    return jax.default_matmul_precision("float32" if weights.dtype == jnp.float32 else "default")


def _check_drawn(tokens: np.ndarray) -> None:
    if (tokens < 0).any():
        raise RuntimeError(
            "probability tensor contains either `inf`, `nan` or element < 0: the model's logits are not finite, or no "
            "token is left to be drawn."
        )


def check_generates(model: Any) -> None:
    """Raises ValueError where the model is no native decoder with a language model's head."""
    if model.backend.head != "lm" or not model.backend.causal:
        raise ValueError(
            f"{model.name_or_path} cannot generate: it runs on the {model.backend.name} backend and has a "
            f"{model.backend.head!r} head; wanted a native decoder with a language model's head. Load it with "
            "AutoModelForCausalLM, or generate with transformers."
        )


def _check_positions(model: Any, request: Request) -> None:
    longest = max(map(len, request.prompts)) + request.max_new_tokens
    if model.max_positions is not None and longest > model.max_positions:
        raise ValueError(
            f"The longest prompt and its new tokens are {longest} tokens, but {model.name_or_path} has positions for "
            f"{model.max_positions}. Lower max_new_tokens, or shorten the prompt."
        )
