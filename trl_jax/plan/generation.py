"""Plan generation: synthetic completions for online training, and the two programs of a generation."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from datasets import Dataset

from trl_jax.config.base import BaseConfig
from trl_jax.data.batch import Example, padded_length
from trl_jax.data.loader import StepBatch
from trl_jax.generation.decode import (
    Decoding,
    SamplingInputs,
    Stops,
    grown_shapes,
    initial_state,
    next_tokens,
    prefill,
)
from trl_jax.generation.generator import FIRST_CAPACITY, STEPS, Lengths, Limit, cache_capacity, queue_of
from trl_jax.generation.noise import KeyedNoise, Noise, TorchNoise, chunk_steps
from trl_jax.generation.weights import (
    Weights,
    cast_matrices,
    decodes_by_layer,
    layer_shapes,
    part_of_group,
    shard_for_generation,
)
from trl_jax.hub.pretrained import PreTrainedModel
from trl_jax.nn.cache import Cache
from trl_jax.plan.chips import Topology
from trl_jax.plan.compile import Compiled, compile_program, device_bytes
from trl_jax.rollout.rollout import CompletionGenerator, EncodedTexts, GeneratedCompletions, Ids, Logps, all_by_model
from trl_jax.rollout.steps import RolloutSteps
from trl_jax.tasks.task import Task
from trl_jax.trainer.base_trainer import BaseTrainer
from trl_jax.trainer.online import RolloutTrainer
from trl_jax.training.setup import RunParts
from trl_jax.training.state import Setup

TOKEN = 0  # the token id of synthetic completions


# Rollouts with completions of the maximum length


class LongestCompletions:
    """Replaces the policy in a rollout: every completion has `tokens` tokens.

    Attributes:
        longest: length of the longest prompt so far, in tokens.
    """

    def __init__(self, policy: CompletionGenerator, encode: Callable[[list], EncodedTexts], tokens: int):
        """
        Args:
            policy: generates for the real rollout, whose prompts these are.
            encode: returns the token ids of prompts, and their images if the run has any.
        """
        self._policy, self._encode, self._tokens, self.longest = policy, encode, tokens, 0

    def prompts_of(self, rows: Sequence[dict[str, Any]]) -> list:
        return self._policy.prompts_of(rows)

    def generate(self, prompts: list, group: int) -> GeneratedCompletions:
        del group
        texts = self._encode(prompts)
        self.longest = max(self.longest, *map(len, texts.ids))
        completions = [np.full(self._tokens, TOKEN, np.int32) for _ in texts.ids]
        logps = [np.zeros(self._tokens, np.float32) for _ in texts.ids]  # of servers
        return GeneratedCompletions(
            texts.ids, completions, all_by_model(completions), images=texts.images, sampling_logps=logps
        )

    def completion_texts(self, prompts: list, prompt_ids: Ids, completion_ids: Ids) -> list:
        del prompt_ids, completion_ids
        return prompts


def extra_arguments(task: Task, args: BaseConfig, teacher: PreTrainedModel | None) -> dict[str, Any]:
    """The trainer's teacher, or reward functions that return 0, one per reward weight."""
    if teacher is not None or "teacher_model_name_or_path" in vars(args):
        return {"teacher_model": teacher}
    if task.columns.prompts is None:
        return {}

    def zero(completions: list, **columns: Any) -> list[float]:
        del columns
        return [0.0] * len(completions)

    return {"reward_funcs": [zero] * len(args.reward_weights or (1.0,))}


def longest_prompts(args: BaseConfig, count: int) -> Dataset:
    """Make `count` synthetic prompts. `use_longest_completions` expands each to `args.max_prompt_length` tokens.

    Raises:
        ValueError: max_prompt_length is None.
    """
    if args.max_prompt_length is None:
        raise ValueError(
            "max_prompt_length=None leaves the length of prompts open: pass --max_prompt_length, or --dataset_name to "
            "use real lengths."
        )
    return Dataset.from_dict({"prompt": list(map(str, range(count)))})


def use_longest_completions(trainer: BaseTrainer, *, synthetic: bool) -> LongestCompletions:
    """Make a trainer's rollout use synthetic completions instead of the policy's.

    Args:
        synthetic: whether the prompts are from `longest_prompts`.

    Returns:
        The rollout's new generator.
    """
    run = trainer.parts.setup
    source, args = trainer.parts.rollout_steps, run.args
    policy = source.rollout.generator
    encode = partial(_longest_ids, args.max_prompt_length) if synthetic else policy.encode
    generator = LongestCompletions(policy, encode, most_new_tokens(args))
    scorer = None if source.rollout.scorer is None else replace(source.rollout.scorer, logps=_no_logps)
    source.rollout = replace(source.rollout, generator=generator, scorer=scorer, table=None)
    return generator


def most_new_tokens(args: BaseConfig) -> int | None:
    """Maximum length of a completion, in tokens; None if the trainer samples none."""
    default = vars(args).get("max_completion_length") or vars(args).get("max_new_tokens")
    options = vars(args).get("generation_kwargs") or {}
    return options.get("max_new_tokens") or options.get("max_tokens") or default  # the latter with servers


def uses_servers(trainer: BaseTrainer) -> bool:
    """Whether servers generate the run's completions."""
    return isinstance(trainer, RolloutTrainer) and trainer._uses_server


# Completions that GKD and online DPO sample just before a step


def prompt_length(args: BaseConfig) -> int:
    """Tokens of a synthetic prompt, so that prompt and completion have max_length tokens; max_length if the trainer
    samples no completions.

    Raises:
        ValueError: a completion leaves no room for a prompt.
    """
    new_tokens = most_new_tokens(args) or 0
    length = args.max_length - new_tokens
    if length < 1:
        raise ValueError(
            f"max_length={args.max_length} leaves no room for a prompt before {new_tokens} new tokens: "
            "raise --max_length, or lower --max_new_tokens."
        )
    return length


class LongestSteps:
    """The steps of a trainer that samples completions just before each step. Every completion has the maximum length.

    Attributes:
        layout: of the rows.
        longest: length of the longest prompt so far, in tokens.
        group: number of texts completed for each row.
        models: the models that sample completions.
    """

    def __init__(self, steps: Iterable[StepBatch], layout: str, tokens: int, group: int, models: list[PreTrainedModel]):
        self._steps, self.layout, self._tokens, self.group, self.models = steps, layout, tokens, group, models
        self.longest = 0

    def __iter__(self) -> Iterator[StepBatch]:
        return iter(self._steps)

    def complete(self, model: Any, prompts: Sequence[Sequence[int]], dtype: str) -> list[np.ndarray]:
        """As `training.data.Completer`, without running the model."""
        del model, dtype
        self.longest = max(self.longest, *map(len, prompts))
        return [np.full(self._tokens, TOKEN, np.int32) for _ in prompts]

    def sizes(self, run: Setup) -> list[Size]:
        """The size of the generation for a micro-batch."""
        prompts = run.args.per_device_train_batch_size * run.shards * self.group
        return [Size.of(prompts, 1, self.longest, self._tokens)]


def longest_steps(trainer: BaseTrainer) -> LongestSteps | None:
    """The steps of a trainer that samples completions just before each step; None for other trainers."""
    from trl_jax.trainer.gkd_trainer import GKDTrainer, RewrittenSteps, completed, prompt_of
    from trl_jax.trainer.online_dpo_trainer import OnlineDPOTrainer

    args, tokens = trainer.args, most_new_tokens(trainer.args)
    if isinstance(trainer, OnlineDPOTrainer):
        steps = trainer.batches(trainer.train_dataset, training=True).steps
        longest = LongestSteps(steps, steps.loader.step_layout.layout, tokens, trainer.num_generations, [trainer.model])
        steps.pairs = replace(steps.pairs, complete=longest.complete, ends=frozenset())  # TOKEN may be an EOS id
        return longest
    if not isinstance(trainer, GKDTrainer):
        return None
    models = [trainer.model] * (args.lmbda > 0) + [trainer.teacher_model] * (args.seq_kd and args.lmbda < 1)
    if not models:
        return None

    def rewrite(examples: list[Example]) -> list[Example]:
        prompts = list(map(prompt_of, examples))
        new = map(completed, examples, prompts, longest.complete(None, prompts, args.compute_dtype))
        return [max(pair, key=lambda example: len(example.texts[0])) for pair in zip(examples, new, strict=True)]

    loader = trainer.loader(trainer.train_dataset, training=True)
    longest = LongestSteps(RewrittenSteps(loader, rewrite), loader.step_layout.layout, tokens, 1, models)
    return longest


def sizes(parts: RunParts, *, evaluates: bool) -> list[Size]:
    """The sizes of a training generation and, if the run evaluates, of an evaluation batch's generation."""
    run, task = parts.setup, parts.setup.task
    prompt_length = run.virtual.count + parts.rollout_steps.rollout.generator.longest
    groups = [(task.cycle.prompts, task.num_generations)]
    if evaluates:
        group = task.num_generations_eval
        groups.append((run.args.per_device_eval_batch_size * run.shards // group, group))
    return [Size.of(prompts, group, prompt_length, most_new_tokens(run.args)) for prompts, group in groups]


def start_first_epoch(source: RolloutSteps) -> RolloutSteps:
    """Start the steps of the first epoch."""
    source.begin(lambda: None)
    source.set_epoch(0)
    return source


def _longest_ids(length: int, prompts: list[str]) -> EncodedTexts:
    return EncodedTexts([[int(prompt)] * length for prompt in prompts])


def _no_logps(model: str, completions: GeneratedCompletions, completion_mask: Sequence[np.ndarray]) -> Logps:
    return [np.zeros(len(ids), np.float32) for ids in completions.completion_ids]


# Sizes


class Size(NamedTuple):
    """The size of a generation, or of the part that is generated at once.

    prompt_places, new_places: tokens per prompt and completion that the cache can hold.
    """

    prompts: int
    completions: int
    prompt_places: int
    new_places: int

    @classmethod
    def of(cls, prompts: int, group: int, prompt_length: int, new_tokens: int) -> Size:
        """The size for prompts and completions of at most these lengths, which are rounded up."""
        return cls(prompts, prompts * group, padded_length(prompt_length, "auto"), cache_capacity(new_tokens))

    def per_shard(self, shards: int) -> Size:
        """The size when split evenly over `shards` devices. If the completions of a prompt are split, each device has a
        copy of the prompt."""
        group = self.completions // self.prompts
        parts = part_of_group(self.prompts, group, shards)
        prompts = -(-self.prompts * parts // shards) * shards
        return self._replace(prompts=prompts, completions=prompts * (group // parts))

    def at_once(self, weights: Weights, limit: Limit) -> Size:
        """The size of the part that is generated at once, on all devices, within the limit of a device."""
        group, new = self.completions // self.prompts, self.new_places
        lengths = Lengths(self.prompt_places, new, self.prompt_places + new)
        queue = queue_of(weights, self.prompts, group, lengths, limit)
        if queue is None:
            return self
        return self._replace(prompts=queue.slots, completions=queue.slots * group // queue.parts)

    @property
    def tokens(self) -> int:
        """Tokens that the cache can hold."""
        return self.prompts * self.prompt_places + self.completions * self.new_places

    @classmethod
    def parse(cls, text: str) -> Size:
        """Parse "64x256+128": 64 prompts of 256 tokens, with a completion of 128 tokens each.

        Raises:
            ValueError: the text does not have that form.
        """
        match = re.fullmatch(r"(\d+)x(\d+)\+(\d+)", text)
        if match is None or 0 in map(int, match.groups()):
            raise ValueError(f"{text!r}: expected PROMPTSxTOKENS+NEW_TOKENS, such as 64x256+128.")
        prompts, length, new = map(int, match.groups())
        return cls.of(prompts, 1, length, new)


class Generation(NamedTuple):
    """The largest generation of a run.

    size: all of its completions.
    at_once: the part that is generated at once.
    cache: bytes of the full cache, per device; None if it was not compiled.
    copied: bytes per device of the largest array that is copied when the cache grows to its full size.
    compiled: figures of the program that needs more memory, prefill or decode; None if nothing was compiled.
    decode: figures of the decoding program; None if it was not compiled.
    other_bytes: bytes in device memory that are not arguments of these programs.
    evaluates: whether it belongs to an evaluation.
    """

    size: Size
    at_once: Size
    cache: int | None
    copied: int
    compiled: Compiled | None
    decode: Compiled | None
    other_bytes: int
    evaluates: bool

    @property
    def most(self) -> Compiled | None:
        """`compiled`, with the peak of growing the cache if that is larger."""
        if self.decode is None or self.decode.arguments is None:
            return self.compiled
        return self.compiled._replace(peak=max(self.compiled.peak, self.decode.arguments + self.copied))


def abstract_weights(graph: Any, arrays: dict[str, Any], dtype: str, head_dtype: str, topology: Topology) -> Weights:
    """`Weights.of`, for shapes with shardings on devices of this topology."""
    cast = cast_matrices(graph, arrays, jnp.dtype(dtype), jnp.dtype(head_dtype))
    arrays = arrays | {
        path: jax.ShapeDtypeStruct(arrays[path].shape, jnp.dtype(dtype), sharding=arrays[path].sharding)
        for path in cast
    }
    arrays, shards = shard_for_generation(arrays, None if topology.chip is None else int(topology.chip.memory))
    by_layer = decodes_by_layer(arrays, shards, topology.platform)
    layers = layer_shapes(graph, arrays) if by_layer else None
    shards = None if shards is None else replace(shards, by_layer=by_layer)
    return Weights(graph, arrays, layers, jnp.dtype(dtype), jnp.dtype(head_dtype), shards)


# Programs


class CompiledPrograms(NamedTuple):
    """Figures of the programs of a generation.

    most: of the program that needs more memory, prefill or decoding with a full cache; None if nothing was compiled.
    decode: of the latter; None if prefill does not fit.
    cache: bytes of the full cache per device; None if prefill does not fit.
    copied: bytes per device of the largest array that is copied when the cache grows to its full size.
    """

    most: Compiled | None
    decode: Compiled | None
    cache: int | None
    copied: int


class Programs:
    """The two programs of a generation. Trace and compile them within `trace.on_device`.

    Args:
        weights: shapes with shardings.
        vocabulary: number of token ids to sample from.
        exact: whether sampled tokens equal those of transformers.
    """

    def __init__(self, weights: Weights, size: Size, *, vocabulary: int, exact: bool):
        self._weights, self._vocabulary, self._exact = weights, vocabulary, exact
        self._size = size if weights.shards is None else size.per_shard(weights.num_shards)
        self._max_tokens = size.prompt_places + size.new_places

    def compiled(self, topology: Topology) -> CompiledPrograms:
        """Compile prefill and, if it fits, decoding with a full cache."""
        first, program = compile_program(self.prefill(), topology)
        if program is None:
            return CompiledPrograms(first, None, None, 0)
        cache = jax.tree.map(_with_sharding, program.out_info[1], program.output_shardings[1])
        full, half = (self._grown_state(cache, self._size.new_places // divisor) for divisor in (1, 2))
        leaves = zip(jax.tree.leaves(full.cache.parts), jax.tree.leaves(half.cache.parts), strict=True)
        copied = max((device_bytes(old) for new, old in leaves if new.shape != old.shape), default=0)
        step = compile_program(self.decode(full), topology)[0]
        larger = max(first, step, key=lambda program: program.peak)
        return CompiledPrograms(larger, step, device_bytes(full.cache.parts), copied)

    def prefill(self) -> jax.stages.Traced:
        """Trace the prefill."""
        size = self._size
        return prefill.trace(
            self._weights, _ints(size.prompts, size.prompt_places), _ints(size.prompts), _ints(),
            group=size.completions // size.prompts, capacity=min(size.new_places, FIRST_CAPACITY),
            max_tokens=self._max_tokens,
        )  # fmt: skip

    def decode(self, full: Decoding) -> jax.stages.Traced:
        """Trace decoding steps with a full cache."""
        size = self._size
        scalar, per_completion = _ints(), _ints(size.completions)
        prompts = _ints(size.completions, size.prompt_places)
        drawing = SamplingInputs((), prompts, scalar, per_completion, _struct((), np.float32))
        return next_tokens.trace(
            self._weights, full, Stops(_ints(1), scalar, scalar), self._noise(), drawing, scalar, scalar, scalar,
            max_tokens=self._max_tokens,
        )  # fmt: skip

    def _grown_state(self, cache: Cache, capacity: int) -> Decoding:
        """The decoding state with a cache of this capacity, sharded like `cache`, the output of prefill."""
        size, grown_capacity = self._size, max(capacity, min(self._size.new_places, FIRST_CAPACITY))
        alive, capacity = np.ones(size.completions, bool), min(size.new_places, FIRST_CAPACITY)
        begin = partial(initial_state, alive=alive, capacity=capacity, logps=False)
        state = grown_shapes(jax.eval_shape(begin, cache), capacity=grown_capacity)
        cache = jax.tree.map(lambda leaf, array: _with_sharding(leaf, array.sharding), state.cache, cache)
        return state._replace(cache=cache)

    def _noise(self) -> Noise:
        size, vocabulary = self._size, self._vocabulary
        if self._exact:
            steps = chunk_steps(size.completions, vocabulary, STEPS)
            return TorchNoise(_struct((steps, size.completions, vocabulary, 2), np.uint32))
        return KeyedNoise(jax.eval_shape(jax.random.key, 0), _ints(size.completions), _ints(size.completions))


def _struct(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _ints(*shape: int) -> jax.ShapeDtypeStruct:
    return _struct(shape, np.int32)


def _with_sharding(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
