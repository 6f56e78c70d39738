"""`generate` and its variants: transformers' arguments, batching and results.

The arguments become `Settings` and `Prompts`, and these a `Request`, which `run` computes. A `Drawing` provides the
random numbers. Trainers use `complete`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from trl_jax.core.torch_random import TorchGenerator, default_generator
from trl_jax.data.images import TextImages
from trl_jax.generation import generator
from trl_jax.generation.beams import Beams, search
from trl_jax.generation.generator import (
    NO_LIMIT,
    Completed,
    Completions,
    Lengths,
    Limit,
    Progress,
    Request,
    StopRule,
    Watch,
    cache_fits,
    queue_of,
    turn_fits,
)
from trl_jax.generation.noise import (
    KeyedSource,
    NoiseSource,
    PrefetchedWords,
    QueueSource,
    RowWords,
    chunk_steps,
    random_key,
)
from trl_jax.generation.reuse import UNEVEN, TurnCache, can_keep
from trl_jax.generation.sampling import Processor, Text
from trl_jax.generation.weights import Weights
from trl_jax.hub.generation_hooks import StepWatch, UserFunctions, criteria_of
from trl_jax.hub.generation_inputs import (
    Prompts,
    Settings,
    StopStrings,
    decoded,
    encoded_prompt,
    ids_of_tokenizer,
    left_padded,
    max_length,
    processors_of,
    read_prompts,
    refuse_arguments,
    refuse_with_beams,
    resolve,
)
from trl_jax.hub.torch_state import follow_torch_seed
from trl_jax.hub.vision.processor import images_of_rows, prompt_tokenizer, split_images
from trl_jax.mesh.mesh import platform

logger = logging.getLogger(__name__)

# Methods of a model


class GenerationApi:
    """A mixin with transformers' `generate` for models with a language model head. It needs `active`, `backend`,
    `config`, `generation_config`, `graph` and `arrays`."""

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
        dtype: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Complete prompts. Takes transformers' arguments and, on a CPU in float32, samples the same tokens.

        Args:
            inputs: token ids `[rows, T]` as lists or as NumPy, JAX or torch arrays. Alternatively pass `input_ids` and
                `attention_mask`, as in `generate(**tokenizer(...))`.
            generation_config: transformers' object; fields that are None come from the model's own.
            logits_processor: user functions that modify scores. They are called on the host in each step, with NumPy
                arrays, or with torch tensors if they are transformers' processors or the prompts are tensors.
            stopping_criteria: user functions, called in the same way, that decide which rows end.
            prefix_allowed_tokens_fn: user function, called in the same way, that lists the allowed next tokens given
                the index of a prompt and its row.
            synced_gpus: has no effect, because all processes of a mesh run the same program.
            streamer: receives the prompts and the tokens of each step.
            seed: for sampling; None continues the process's random stream, which `trl_jax.set_seed` seeds.
            dtype: dtype of the computation. None uses float32 on a CPU, otherwise the stored 16-bit type, if any.
            kwargs: fields of a GenerationConfig, and `tokenizer` for `stop_strings`. For a model loaded with
                `AutoModelForImageTextToText`, also what its processor returns for images (`pixel_values`,
                `image_grid_thw`, ...).

        Returns:
            int64 `[rows, T + new]`, as a torch tensor if the prompts are one; a GenerateOutput with
            return_dict_in_generate=True.

        Raises:
            ValueError: an argument is not supported in this release or out of range.
            RuntimeError: the model's logits are not finite.
        """
        del synced_gpus
        check_generates(self)
        named = {
            "assistant_model": assistant_model, "negative_prompt_ids": negative_prompt_ids,
            "negative_prompt_attention_mask": negative_prompt_attention_mask, "custom_generate": custom_generate,
        }  # fmt: skip
        tokenizer, dtype = kwargs.pop("tokenizer", None), computing_dtype(self, dtype)
        settings, others = resolve(self, generation_config, kwargs)
        refuse_arguments(named | others)
        arrays, others = split_images(self, others)
        prompts = read_prompts(
            *_inputs(inputs, others, seeing=arrays is not None), settings, self.backend.traits.vocab_size
        )
        images = None if arrays is None else images_of_rows(self, prompts.rows, arrays)
        functions = {
            "logits_processor": logits_processor, "stopping_criteria": stopping_criteria,
            "prefix_allowed_tokens_fn": prefix_allowed_tokens_fn, "streamer": streamer,
        }  # fmt: skip
        if settings.beams is not None:
            refuse_with_beams(settings.beams.count, [name for name, function in functions.items() if function])
        caller = UserFunctions(
            settings, prompts, logits_processor or (), stopping_criteria or (), prefix_allowed_tokens_fn
        )
        return self._complete(settings, prompts, images, caller, streamer, tokenizer, stream_of(seed), dtype)

    def _complete(
        self,
        settings: Settings,
        prompts: Prompts,
        images: Sequence[Any] | None,
        caller: UserFunctions,
        streamer: Any,
        tokenizer: Any,
        stream: TorchGenerator,
        dtype: Any,
    ) -> Any:
        """Complete the prompts; returns the result of `generate`. `images` has one entry per row."""
        text, beams = text_of(self, settings, prompts.width), settings.beams
        repeats = prompts.repeats(images) if beams is None else 1  # with beams, each row has its own search
        with caller.processors(*processors_of(settings, text)) as processors:
            watch = caller.watch(text, streamer, tokenizer)
            group = repeats * (settings.completions if beams is None else 1)
            request = request_of(settings, text, prompts.rows[::repeats], group, processors)
            logps = bool(settings.config.return_dict_in_generate)
            request = replace(request, logps=logps, images=None if images is None else images[::repeats])
            drawing = drawing_of(settings, stream, dtype)
            completions = run(self.active, request, drawing, dtype=dtype, watch=watch, beams=beams)
        if watch is not None:
            watch.end()
        return caller.result(completions)

    def generate_batch(
        self,
        inputs: Sequence[Sequence[int]],
        generation_config: Any = None,
        *,
        seed: int | None = None,
        batch_size: int = 64,
        progress_bar: bool = False,
        dtype: Any = None,
        **kwargs: Any,
    ) -> dict[str, Completion]:
        """Complete any number of prompts, `batch_size` completions at a time. When all completions of a prompt have
        ended, the next prompt takes its place.

        The tokens of a completion only depend on the seed and its number, not on `batch_size`, but they differ from
        those of `generate`.

        Args:
            inputs: token ids of each prompt, without padding.
            batch_size: number of completions computed together.
            progress_bar: show the number of generated tokens, and tokens per second.
            generation_config, seed, dtype, kwargs: as in `generate`; image inputs are those of all prompts together.

        Returns:
            Completions by request_id ("req_0", "req_1", ...); completions of the same prompt are adjacent. After
            Ctrl-C, the completions finished so far.
        """
        if not len(inputs):
            return {}
        tokenizer, dtype = kwargs.pop("tokenizer", None), computing_dtype(self, dtype)
        settings, others = resolve(self, generation_config, kwargs)
        arrays, others = split_images(self, others)
        _check_unused(others, ())
        options = {"batch_size": batch_size, "dtype": dtype, "tokenizer": tokenizer}
        if arrays is not None:
            rows = [np.asarray(ids, np.int32) for ids in inputs]
            options["images"] = images_of_rows(self, rows, arrays).__getitem__
        batches = Batches(self, settings, inputs, stream=stream_of(seed), **options)
        done = collected(batches, len(inputs) * settings.completions, progress_bar=progress_bar)
        return {completion.request_id: completion for completion in done}

    def generate_text(
        self,
        prompts: Sequence[str | Sequence[dict[str, Any]]],
        tokenizer: Any,
        *,
        chat_template_kwargs: dict[str, Any] | None = None,
        **arguments: Any,
    ) -> list[Any]:
        """Complete texts or conversations. Returns a string per prompt, or a list of them with num_return_sequences.

        Args:
            tokenizer: the model's; its EOS and pad ids are used if the model's generation_config has none.
            arguments: as in `generate_batch`.
        """
        options, reader = chat_template_kwargs or {}, prompt_tokenizer(tokenizer, self.folder)
        ids = [encoded_prompt(prompt, reader, f"Prompt {row}", **options) for row, prompt in enumerate(prompts)]
        arguments = ids_of_tokenizer(self, tokenizer, arguments)
        done = list(self.generate_batch(ids, tokenizer=tokenizer, **arguments).values())
        texts = [decoded(completion.generated_tokens, tokenizer) for completion in done]
        group = len(done) // max(1, len(ids))
        return texts if group <= 1 else [texts[start : start + group] for start in range(0, len(texts), group)]


def stream_of(seed: int | None = None) -> TorchGenerator:
    """The stream of a seed; without one, the process-wide stream, which follows torch's seed."""
    if seed is not None:
        return TorchGenerator(seed)
    stream = default_generator()
    follow_torch_seed(stream)
    return stream


def _inputs(inputs: Any, others: Mapping[str, Any], *, seeing: bool) -> tuple[Any, Any]:
    """Return input_ids and attention_mask.

    Args:
        seeing: whether images are passed, whose tokens have their own token type.

    Raises:
        ValueError: ids are given twice, or there are unknown arguments.
    """
    ids = others.get("input_ids")
    if inputs is not None and ids is not None:
        raise ValueError(
            f"`inputs`: {inputs}` were passed alongside input_ids which is not allowed. Make sure to either pass "
            f"{inputs} or input_ids=..."
        )
    if not seeing and np.any(others.get("token_type_ids")):
        raise ValueError("token_type_ids must be all 0 because each row is a single text. Leave it out.")
    allowed = ("input_ids", "attention_mask", "token_type_ids", "trust_remote_code")
    _check_unused(others, (*allowed, "mm_token_type_ids") if seeing else allowed)
    return inputs if ids is None else ids, others.get("attention_mask")


def _check_unused(others: Mapping[str, Any], allowed: tuple[str, ...]) -> None:
    unused = [name for name, value in others.items() if value is not None and name not in allowed]
    if unused:
        raise ValueError(
            f"The following `model_kwargs` are not used by the model: {unused} (note: typos in the generate arguments "
            "will also show up in this list)"
        )


# Batched generation, where tokens do not depend on which completions are computed together


@dataclass(frozen=True)
class Completion:
    """One completion of a prompt, with transformers' names.

    number: index among all completions of the call.
    generated_tokens: includes the id that ends the text, if any.
    logprobs: log-probability of each token under the model's unprocessed logits.
    """

    number: int
    prompt_ids: list[int]
    generated_tokens: list[int]
    logprobs: list[float]

    @property
    def request_id(self) -> str:
        """The request id: "req_0", "req_1", ..."""
        return f"req_{self.number}"


class Batches:
    """Completes prompts in batches of similar length.

    When all completions of a prompt have ended, the next prompt takes its place. With stop strings or a time limit,
    which are checked on the host, a batch ends as a whole.

    Args:
        prompts: token ids of all prompts; the longest one determines how many new tokens `max_length` leaves.
        stream: generator whose next two words become the sampling key.
        batch_size: number of completions computed together.
        tokenizer: for stop strings.
        window: number of consecutive prompts to sort by length; None sorts all.
        images: returns the images of a prompt, given its number; called when the prompt's window starts. None for text
            only.
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
        images: Callable[[int], TextImages] | None = None,
    ):
        check_generates(model)
        if settings.beams is not None:
            raise ValueError(
                f"generate: num_beams={settings.beams.count} is not in this release of trl_jax: there is no beam "
                "search in batches of any size. Call model.generate, or sample with do_sample=True."
            )
        _check_prompts(prompts, model.vocab_size)
        self._model, self._settings, self._dtype, self._tokenizer = model, settings, dtype, tokenizer
        self._images = images
        self._prompts = [np.asarray(ids, np.int32) for ids in prompts]
        self._text: Text = text_of(model, settings, max(map(len, prompts)))
        before, behind = processors_of(settings, self._text)
        self._processors = (*before.values(), *behind.values())
        self._key = random_key(stream) if settings.config.do_sample else None
        self._size, self._window = max(1, batch_size // settings.completions), window or len(prompts)  # in prompts

    def __call__(self, done: Callable[[list[Completion]], None], first: int = 0) -> None:
        """Complete the prompts from number `first` on; `done` receives completions as they end."""
        numbers = np.concatenate([
            start + np.argsort([-len(ids) for ids in self._prompts[start : start + self._window]], kind="stable")
            for start in range(first, len(self._prompts), self._window)
        ])  # fmt: skip
        if not criteria_of(self._settings.config, self._tokenizer):
            at_once = len(numbers) if self._images is None else self._window  # images take memory while they wait
            for start in range(0, len(numbers), at_once):
                request, drawing, taken = self._asked(numbers[start : start + at_once], done)
                run_queue(self._model.active, request, drawing, taken, slots=self._size, dtype=self._dtype)
        else:
            self.in_batches(numbers, done)

    def in_batches(self, numbers: np.ndarray, done: Callable[[list[Completion]], None]) -> None:
        """Complete the prompts with these numbers, running each batch until its last completion has ended."""
        for start in range(0, len(numbers), self._size):
            request, drawing, taken = self._asked(numbers[start : start + self._size], done)
            completions = run(
                self._model.active, request, drawing, dtype=self._dtype, watch=self._watch(request.prompts)
            )
            taken(completions.rows())

    def _asked(
        self, numbers: np.ndarray, done: Callable[[list[Completion]], None]
    ) -> tuple[Request, KeyedDrawing | None, Callable[[Sequence[Completed]], None]]:
        """The request for the prompts with these numbers, how to draw tokens, and a callback for completed rows."""
        group = self._settings.completions
        rows = (numbers[:, None] * group + np.arange(group)).reshape(-1)
        prompts = [self._prompts[number] for number in numbers]
        images = None if self._images is None else list(map(self._images, numbers.tolist()))
        request = request_of(self._settings, self._text, prompts, group, self._processors)
        request = replace(request, logps=True, images=images)

        def taken(completed: Sequence[Completed]) -> None:
            done([
                Completion(int(rows[ended.row]), prompts[ended.row // group].tolist(), ended.tokens.tolist(),
                           ended.logps.tolist())
                for ended in completed
            ])  # fmt: skip

        return request, None if self._key is None else KeyedDrawing(self._key, rows), taken

    def _watch(self, prompts: list[np.ndarray]) -> StepWatch | None:
        criteria = criteria_of(self._settings.config, self._tokenizer)
        padded = Prompts(left_padded(prompts, self._settings.pad), prompts)
        room = padded.width + self._text.max_length - self._text.prompt_length
        return StepWatch(padded, self._settings.completions, room, criteria=criteria) if criteria else None


def collected(batches: Batches, total: int, *, progress_bar: bool) -> list[Completion]:
    """All completions in order. On Ctrl-C, those finished so far, or KeyboardInterrupt if there are none."""
    done: dict[int, Completion] = {}
    with tqdm(unit=" tokens", disable=not progress_bar) as bar:

        def take(completions: list[Completion]) -> None:
            done.update({completion.number: completion for completion in completions})
            bar.update(sum(len(completion.generated_tokens) for completion in completions))

        try:
            batches(take)
        except KeyboardInterrupt:
            if not done:
                raise
            logger.warning("Interrupted: returning the %d of %d completions that are finished.", len(done), total)
    return [done[number] for number in sorted(done)]


def _check_prompts(prompts: Sequence[Sequence[int]], vocabulary: int) -> None:
    for number, ids in enumerate(prompts):
        if len(ids) == 0 or not 0 <= min(ids) <= max(ids) < vocabulary:
            raise ValueError(
                f"Prompt {number} has {len(ids)} tokens. A prompt needs at least one token, and ids from 0 to "
                f"{vocabulary - 1}."
            )


# A single generation: settings, random numbers and checks


class Drawing(Protocol):
    """How tokens are sampled."""

    def steps(self, rows: int, vocabulary: int) -> int:
        """Number of steps per chunk, for `rows` rows at once."""

    def source(self, rows: int, vocabulary: int, steps: int, new: int) -> NoiseSource:
        """Random numbers for up to `new` steps of `rows` rows, in chunks of `steps` steps."""

    def queue_source(self, rows: int, vocabulary: int, steps: int, new: int) -> QueueSource:
        """The same numbers, for rows that are not all generated at once."""


@dataclass(frozen=True)
class ExactDrawing:
    """Sample as transformers does on a CPU with torch's generator, which is advanced by the numbers used."""

    stream: TorchGenerator

    def steps(self, rows: int, vocabulary: int) -> int:
        """Number of steps per chunk; random words are generated one chunk ahead."""
        return chunk_steps(rows, vocabulary, generator.STEPS)

    def source(self, rows: int, vocabulary: int, steps: int, new: int) -> NoiseSource:
        return PrefetchedWords(self.stream, rows=rows, vocabulary=vocabulary, steps=steps, max_steps=new)

    def queue_source(self, rows: int, vocabulary: int, steps: int, new: int) -> RowWords:
        return RowWords(self.stream, rows=rows, vocabulary=vocabulary, steps=steps, max_steps=new)


@dataclass(frozen=True)
class KeyedDrawing:
    """Sample from random numbers that only depend on a key, the number of the row, and the position of the token. Rows
    are numbered from 0 unless `numbers`, int `[R]`, is given."""

    key: jax.Array
    numbers: np.ndarray | None = None

    def steps(self, rows: int, vocabulary: int) -> int:
        """Number of steps per chunk. Random numbers are computed within each step, so any number works."""
        return generator.STEPS

    def source(self, rows: int, vocabulary: int, steps: int, new: int) -> KeyedSource:
        return KeyedSource(self.key, numbers=np.arange(rows) if self.numbers is None else self.numbers)

    queue_source = source


def exact_draws(dtype: Any) -> bool:
    """Whether sampling reproduces transformers' tokens: in float32 on a single CPU device."""
    return platform() == "cpu" and jnp.dtype(dtype) == jnp.float32 and jax.local_device_count() == 1


def computing_dtype(model: Any, dtype: Any) -> jnp.dtype:
    """The dtype to compute a generation in: the one requested; otherwise float32 on a CPU, for exact results, and the
    model's stored 16-bit type elsewhere, as in transformers."""
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
    images: list[TextImages] | None = None,
    progress: Progress | None = None,
    limit: Limit = NO_LIMIT,
    tokenizer: Any = None,
    turns: TurnCache | None = None,
) -> Completions:
    """Complete each prompt `group` times; completions of the same prompt are adjacent.

    Args:
        model: a PreTrainedModel with a language model head.
        options: fields of a GenerationConfig, including `eos_token_id` and `pad_token_id`. Fields that are None come
            from the model's generation_config.
        stream: generator for sampling; it is advanced by the numbers used.
        dtype: dtype of the computation.
        head_dtype: dtype of the head's computation; None means `dtype`.
        logps: whether to return log-probabilities under the model's logits divided by the temperature.
        images: the images of each prompt; None if no prompt has any.
        progress: callback as in `generation.generator.generate`.
        limit: how many completions may be computed at once; the others wait. It does not change the tokens.
        tokenizer: for `stop_strings`.
        turns: the cache of the last turn if the prompts are the next turns of conversations, which is replaced by the
            cache of this turn; None without further turns.

    Raises:
        ValueError: options are not supported in this release or out of range, there is no room for a new token, or
            there are stop strings but no tokenizer.
        RuntimeError: the model's logits are not finite.
    """
    settings = check_completes(model, options)
    prompts = [np.asarray(ids, np.int32) for ids in prompt_ids]
    text = text_of(model, settings, max(map(len, prompts)))
    before, behind = processors_of(settings, text)
    request = request_of(settings, text, prompts, group, (*before.values(), *behind.values()))
    temperature = settings.config.temperature if settings.config.do_sample else 1.0
    request = replace(request, temperature=temperature, logps=logps, images=images)
    if settings.config.stop_strings is not None:
        request = replace(request, stop=StopStrings(settings.config.stop_strings, tokenizer).end_of)
    drawing = drawing_of(settings, stream, dtype)
    options = {"dtype": dtype, "head_dtype": head_dtype, "progress": progress, "limit": limit, "turns": turns}
    return run(model, request, drawing, beams=settings.beams, **options)


# Field of a generation_config that `complete` does not support -> its values without effect, and why.
_NOT_COMPLETED = {
    "max_time": (None, "Completions would depend on the speed of the machine."),
    "num_return_sequences": (1, "The trainer sets the number of completions of a prompt."),
}


def check_completes(model: Any, options: Mapping[str, Any]) -> Settings:
    """The settings of `complete` with these options; raises the ValueErrors that do not depend on prompts."""
    from transformers import GenerationConfig

    check_generates(model)
    settings, _ = resolve(model, GenerationConfig(**options), {})
    for name, (idle, why) in _NOT_COMPLETED.items():
        value = vars(settings.config)[name]
        if value != idle:
            raise ValueError(
                f"The generation_config of {model.name_or_path} has {name}={value!r}, which is not in this release of "
                f"trl_jax for online training. {why} Remove it from generation_config.json, or load the model, set "
                f"model.generation_config.{name} = {idle} and pass the model."
            )
    return settings


def stop_rule(model: Any, options: Mapping[str, Any], tokenizer: Any) -> StopRule | None:
    """What ends a completion besides EOS ids, for the `options` of `complete`; None without stop strings."""
    strings = options.get("stop_strings") or model.generation_config.stop_strings
    return StopStrings(strings, tokenizer).end_of if strings else None


def text_of(model: Any, settings: Settings, prompt_length: int) -> Text:
    """The lengths and token ids of a generation.

    Raises:
        ValueError: there is no room for a new token.
    """
    positions = model.config.get_text_config().to_dict().get("max_position_embeddings")
    return Text(settings.eos, prompt_length, max_length(settings, prompt_length, positions), model.vocab_size)


def request_of(
    settings: Settings, text: Text, prompts: list[np.ndarray], group: int, processors: tuple[Processor, ...]
) -> Request:
    """The request for `group` completions of each prompt, padded to the width in `text`."""
    new = text.max_length - text.prompt_length
    return Request(prompts, group, settings.eos, settings.pad or 0, new, processors, width=text.prompt_length)


def drawing_of(settings: Settings, stream: TorchGenerator, dtype: Any) -> Drawing | None:
    """How to sample tokens; None for greedy decoding."""
    if not settings.config.do_sample:
        return None
    return ExactDrawing(stream) if exact_draws(dtype) else KeyedDrawing(random_key(stream))


def run(
    model: Any, request: Request, drawing: Drawing | None, *, dtype: Any, head_dtype: Any = None,
    watch: Watch | None = None, progress: Progress | None = None, limit: Limit = NO_LIMIT, beams: Beams | None = None,
    turns: TurnCache | None = None,
) -> Completions:  # fmt: skip
    """Generate. The stream is advanced by the steps taken, or left unchanged if generation fails.

    Args:
        limit: cannot be combined with a `watch`, which sees all completions at once.
        beams: settings of a beam search, which runs all rows at once and without a `watch`; None for no beam search.
        turns: see `complete`. It is used if all completions are generated at once.

    Raises:
        ValueError: the model does not support the length of the longest completion, or the beam search is not possible.
        RuntimeError: the model's logits are not finite.
    """
    _check_positions(model, request)
    request = replace(request, virtual=model.backend.virtual)
    weights = Weights.of(model.graph, model.arrays, dtype, head_dtype)
    limit = limit.after_copies(weights, model.arrays)
    if beams is not None:
        return _searched(model, weights, request, drawing, beams, limit, progress)
    # A watch identifies rows by their index in the batch, so it sees all of them at once.
    how = request.group, Lengths.of(request), limit
    if turns is not None and turns.later:  # any number of texts may have another turn
        padded = replace(request, varies=True)
        request = padded if queue_of(weights, padded.slots, *how) is None else request
    queue = None if watch else queue_of(weights, request.slots, *how)
    if turns is not None:
        _prepare_turn(turns, weights, request, limit, at_once=queue is None)
    at_once = request.rows if queue is None else queue.slots * request.group // queue.parts
    steps = generator.STEPS if drawing is None else drawing.steps(at_once, model.vocab_size)
    steps = steps if watch is None else 1
    options = {"vocabulary": model.vocab_size, "steps": steps, "new": request.max_new_tokens}
    source = None
    if drawing is not None:
        source = (drawing.source if queue is None else drawing.queue_source)(request.rows, **options)

    def generated() -> tuple[Completions, int]:
        if queue is None:
            options = {"steps": steps, "watch": watch, "progress": progress, "turns": turns}
            completions = generator.generate(weights, request, source, **options)
        else:
            done: list[Completed] = []
            options = {"slots": queue.slots, "steps": steps, "progress": progress}
            generator.generate_queue(weights, request.in_parts(queue.parts), source, done.extend, **options)
            completions = Completions.of(done, request.pad)
        return completions, completions.tokens.shape[1]

    return _sampled(weights, source, generated)


def _sampled(
    weights: Weights, source: NoiseSource | QueueSource | None, generate: Callable[[], tuple[Completions, int]]
) -> Completions:
    """The completions that `generate` returns along with the number of steps taken. These advance the source's stream,
    which is left unchanged if `generate` fails."""
    used = 0
    try:
        with _precision(weights):
            completions, used = generate()
    finally:
        if source is not None:
            source.close(used)
    _check_drawn(completions.tokens)
    return completions


def _prepare_turn(turns: TurnCache, weights: Weights, request: Request, limit: Limit, *, at_once: bool) -> None:
    """Decide whether this turn reuses the cache of the last one, and whether its own is kept.

    Args:
        at_once: whether all completions are generated at once.
    """
    uneven = UNEVEN if turns.later and weights.shards is not None else 1
    size = request.slots * uneven, request.group, Lengths.of(request), limit
    if not at_once or not cache_fits(weights, *size, held=turns.device_bytes):
        turns.forget()
    can = at_once and can_keep(weights, stopped=request.stop is not None)
    turns.later, turns.keeps = True, can and turn_fits(weights, *size)


def _searched(
    model: Any,
    weights: Weights,
    request: Request,
    drawing: Drawing | None,
    beams: Beams,
    limit: Limit,
    progress: Progress | None,
) -> Completions:
    """`run` with beams.

    Raises:
        ValueError: the beams do not fit into the limit, or as in `beams.search`.
    """
    if queue_of(weights, len(request.prompts), request.group * beams.count, Lengths.of(request), limit) is not None:
        raise ValueError(
            f"generate: {request.rows} completions with num_beams={beams.count} are searched for at once, and do not "
            "fit into the memory or the number of completions at once that was set. Complete fewer at a time, or lower "
            "num_beams."
        )
    candidates, source = beams.count * model.vocab_size, None
    steps = generator.STEPS if drawing is None else drawing.steps(request.rows, candidates)
    if drawing is not None:
        source = drawing.source(request.rows, vocabulary=candidates, steps=steps, new=request.max_new_tokens)
    return _sampled(weights, source, lambda: search(weights, request, beams, source, steps=steps, progress=progress))


def run_queue(
    model: Any, request: Request, drawing: KeyedDrawing | None, done: Callable[[Sequence[Completed]], None], *,
    slots: int, dtype: Any,
) -> None:  # fmt: skip
    """Generate `slots` prompts at a time; `done` receives completions as they end.

    Raises:
        ValueError, RuntimeError: as in `run`.
    """
    _check_positions(model, request)
    request = replace(request, virtual=model.backend.virtual)
    weights = Weights.of(model.graph, model.arrays, dtype)
    options = {"vocabulary": model.vocab_size, "steps": generator.STEPS, "new": request.max_new_tokens}
    source = None if drawing is None else drawing.source(request.rows, **options)

    def checked(completed: Sequence[Completed]) -> None:
        for row in completed:
            _check_drawn(row.tokens)
        done(completed)

    with _precision(weights):
        generator.generate_queue(weights, request, source, checked, slots=slots)


def _precision(weights: Weights) -> Any:
    """Matmul precision that matches the dtype of the computation."""
    return jax.default_matmul_precision("float32" if weights.dtype == jnp.float32 else "default")


def _check_drawn(tokens: np.ndarray) -> None:
    if (tokens < 0).any():
        raise RuntimeError(
            "probability tensor contains either `inf`, `nan` or element < 0: the model's logits are not finite, or all "
            "tokens are masked out."
        )


def check_generates(model: Any) -> None:
    """Raise ValueError unless the model is a native decoder with a language model head."""
    if model.backend.head != "lm" or not model.backend.traits.causal:
        raise ValueError(
            f"{model.name_or_path} cannot generate: it runs on the {model.backend.name} backend with a "
            f"{model.backend.head!r} head, but generation requires a native decoder with a language model head. Load "
            "it with AutoModelForCausalLM, or generate with transformers."
        )


def _check_positions(model: Any, request: Request) -> None:
    longest = max(map(len, request.prompts)) + request.max_new_tokens
    if model.max_positions is not None and longest > model.max_positions:
        raise ValueError(
            f"The longest prompt with its new tokens has {longest} tokens, but {model.name_or_path} supports "
            f"{model.max_positions}. Lower max_new_tokens, or shorten the prompt."
        )
