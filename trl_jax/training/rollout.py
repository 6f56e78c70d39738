"""Online training: completions from the policy, their log-probabilities, and training steps."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain
from typing import Any

import jax
import numpy as np
from datasets import Dataset, IterableDataset

from trl_jax.core.text import brief
from trl_jax.core.torch_random import TorchGenerator
from trl_jax.data import prompts as prompt_rows
from trl_jax.data.batch import Batch
from trl_jax.data.checks import check_no_media, has_transform, token_ids
from trl_jax.data.image_rows import pictures_in
from trl_jax.data.images import TextImages
from trl_jax.data.loader import IndexedExample, StepBatch
from trl_jax.generation.generator import Limit, device_bytes
from trl_jax.generation.reuse import TurnCache
from trl_jax.hub.generate import complete, exact_draws, stop_rule
from trl_jax.hub.pretrained import PreTrainedModel
from trl_jax.hub.torch_objects import as_arrays
from trl_jax.hub.vision.processor import open_picture
from trl_jax.mesh.mesh import fetched
from trl_jax.mesh.processes import is_first, of_each_process, several
from trl_jax.rollout.completions_log import CompletionsLog
from trl_jax.rollout.rewards import RewardFunctions, raised_by
from trl_jax.rollout.rollout import (
    TRL_LOGPS,
    Experience,
    Ids,
    Judge,
    Logps,
    Rollout,
    ScoredCompletion,
    Written,
    all_written,
    example_of,
    step_examples,
)
from trl_jax.rollout.server import data_url
from trl_jax.rollout.steps import RepeatSampler, RolloutSteps, Sampler, StreamSampler
from trl_jax.rollout.tools import Seen, Tools, written_by
from trl_jax.tasks.policy import Cycle, EntropyBonus, RolloutTask
from trl_jax.tasks.task import by_micro_batch
from trl_jax.training import data
from trl_jax.training.devices import ShardedStep, device_memory_limit, local_memory_limit
from trl_jax.training.events import Events
from trl_jax.training.forward import Forward, PolicyEqualsReference
from trl_jax.training.logging import GenerationProgress, ProgressLine, tell_first
from trl_jax.training.mesh import run_device
from trl_jax.training.rollout_processes import (
    Further,
    RankRewards,
    Urls,
    begin_own,
    in_rounds,
    joined,
    local_copy,
    own_part,
    own_rank,
    write_own,
)
from trl_jax.training.server import ServerParts, ServerPolicy
from trl_jax.training.state import Setup

# The steps of online training: their source, and their arrays.


def rollout_steps(
    setup: Setup, parts: RolloutParts, forward: Forward, sharded_step: ShardedStep | None
) -> RolloutSteps:
    """Assemble the source of steps for online training."""
    args, tools = setup.args, parts.sampling.tools
    streams, line = [TorchGenerator(args.seed + rank) for rank in range(setup.shards)], ProgressLine(setup.events)
    seeds = None if parts.server is None else TorchGenerator(args.seed)
    alone = several() and _completes_alone(parts, args.compute_dtype)
    logps = CompletionLogps(setup, forward, sharded_step)
    rollout = Rollout(
        writer=PolicyWriter(setup, parts, streams, line, alone, seeds),
        judge=None if parts.rewards is None else _judge(setup, parts.rewards, logps, line),
        ends=frozenset({*parts.sampling.ends, setup.processing_class.pad_token_id}),
        drops_truncated=parts.drops_truncated,
        saw_tokens=partial(_count_tokens, setup.events),
        table=parts.table if is_first() else None,
        tell=line,
        stop=stop_rule(setup.model, parts.sampling.options, setup.processing_class),
        own=parts.own,
    )
    if tools is not None and tools.environments is not None:
        rollout.begin = partial(begin_own, tools.environments) if several() else tools.environments.begin
    if parts.own is not None:
        parts.own.rollout = rollout

    def make_sampler() -> Sampler:
        return _sampler(readable(setup, setup.train_dataset, "train"), setup.task.cycle, setup.args.seed, parts.shuffle)

    def measure(metrics: dict[str, np.ndarray]) -> dict[str, list[float]]:
        return by_micro_batch(setup.objective, metrics, "train")

    return RolloutSteps(
        rollout, setup.task.cycle, read_row=RowReader(setup, "train"), make_sampler=make_sampler,
        lay_out=StepMaker(setup), measure=measure, streams=streams, seeds=seeds, bonus=parts.bonus,
        needed_logps=setup.task.logps, num_steps_of_run=lambda: setup.state.max_steps,
        ahead=parts.server is not None and parts.server.ahead,
        sync_steps=1 if parts.server is None else parts.server.sync_steps,
    )  # fmt: skip


def _completes_alone(parts: RolloutParts, dtype: str) -> bool:
    """Whether each of several processes completes only its own prompts: always with a `rollout_func`. A server
    completes the prompts of all processes together. Without one, each process calls tools a different number of times.
    """
    if parts.rollout_func is not None:
        return True
    return parts.server is None and (parts.sampling.tools is not None or exact_draws(dtype))


def _judge(setup: Setup, rewards: RewardFunctions, logps: CompletionLogps, line: ProgressLine) -> Judge:
    if several():  # processes compute together, so their calls must have the same order
        return Judge(lambda: setup.task, RankRewards(rewards), logps, call_now, line)
    return Judge(lambda: setup.task, rewards, logps, call_in_thread, line)


def readable(setup: Setup, dataset: Dataset | IterableDataset, name: str) -> Dataset | IterableDataset:
    """The dataset; rows of a stream are checked as they are read."""
    if not isinstance(dataset, IterableDataset):
        return dataset
    return prompt_rows.checked_stream(dataset, name, setup.processing_class, images=setup.encoder is not None)


def _sampler(dataset: Dataset | IterableDataset, cycle: Cycle, seed: int, shuffle: bool) -> Sampler:
    sizes = {"chunk": cycle.prompts, "repeats": cycle.repeats}
    if isinstance(dataset, IterableDataset):
        return StreamSampler(dataset.shuffle(seed=seed) if shuffle else dataset, **sizes)
    return RepeatSampler(len(dataset), shuffle=shuffle, seed=seed, wraps=cycle.wraps, **sizes)


def call_in_thread(do: Callable[[], Any]) -> Callable[[], Any]:
    """Start a call in a thread. The returned function waits for it, and returns its result or raises its exception."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="trl_jax-logps")
    future = pool.submit(do)
    pool.shutdown(wait=False)
    return future.result


def call_now(do: Callable[[], Any]) -> Callable[[], Any]:
    """Make a call now, and return a function that returns its result; the interface of `call_in_thread`."""
    found = do()
    return lambda: found


class RowReader:
    """Reads rows, with all columns or only their prompts and images (see `args.keeps_columns`).

    Args:
        name: of the dataset in errors, "train" or "eval".
        dataset: None reads the current training set, because a script may replace it.
    """

    def __init__(self, setup: Setup, name: str, dataset: Dataset | IterableDataset | None = None):
        self._setup, self._dataset, self._name = setup, dataset, name
        self._last: tuple[Any, dict[str, Any]] = (None, {})

    def __call__(self, index: Any) -> dict[str, Any]:
        """Read a row.

        Args:
            index: index of the row; for a stream, the row itself.

        Raises:
            KeyError, ValueError: a transform returned a row that cannot be completed.
        """
        row = self._read(index)
        if self._setup.args.keeps_columns:
            return row
        return {name: row[name] for name in ("prompt", "image", "images") if name in row}

    def _read(self, index: Any) -> dict[str, Any]:
        setup = self._setup
        dataset = setup.train_dataset if self._dataset is None else self._dataset
        if isinstance(dataset, IterableDataset):
            return _copied(index)  # the completions of a prompt do not share it: reward functions may change it
        if has_transform(dataset):
            row = dataset[int(index)]
            prompt_rows.check_row(row, int(index), self._name, setup.processing_class, images=setup.encoder is not None)
            return row
        if setup.encoder is None:
            return dataset[int(index)]
        if self._last[0] != (id(dataset), index):  # the completions of a prompt decode its images only once
            self._last = (id(dataset), index), dataset[int(index)]
        return _copied(self._last[1])


def _copied(value: Any) -> Any:
    """Copy nested lists and dicts; other values, such as images, are shared."""
    if type(value) is list:
        return [_copied(entry) for entry in value]
    return {name: _copied(entry) for name, entry in value.items()} if type(value) is dict else value


def _count_tokens(events: Events, tokens: int) -> int:
    events.state.num_input_tokens_seen += tokens
    return events.state.num_input_tokens_seen


def shared_numbers(
    task: RolloutTask, entropy_coef: float | None, equals_reference: PolicyEqualsReference
) -> dict[str, float]:
    """The numbers that all completions of a step share. `entropy_coef` is None without an entropy bonus."""
    numbers = {} if entropy_coef is None else {"entropy_coef": entropy_coef}
    if task.diverges_in_loss:
        numbers["at_reference"] = float(equals_reference())
    return numbers


class StepMaker:
    """Converts micro-batches of completions to the arrays of a step."""

    def __init__(self, setup: Setup):
        self._setup, self._layout = setup, data.step_layout(setup, training=True)
        self._equals_reference = PolicyEqualsReference(setup)

    def __call__(
        self,
        micro_batches: list[list[ScoredCompletion]],
        generations: list[Experience],
        number: int,
        entropy_coef: float | None,
    ) -> StepBatch:
        setup, layout = self._setup, self._layout
        share = len(micro_batches) / setup.task.cycle.parts
        numbers = shared_numbers(setup.task, entropy_coef, self._equals_reference)
        with_images = [self._with_features(rows) for rows in micro_batches]
        groups = step_examples(setup.task, with_images, generations, share, layout.shards, numbers, setup.virtual)
        step = layout.step([[IndexedExample(example, 0) for example in group] for group in groups], number)
        if setup.script_loss is None:
            return step
        return step._replace(arrays=setup.script_loss.with_rows(step.arrays, micro_batches, generations))

    def _with_features(self, rows: list[ScoredCompletion]) -> list[ScoredCompletion]:
        """Add the features of their images to completions: checkpoints lack them."""
        images = _with_features(self._setup, [row.images for row in rows])
        return [row._replace(images=own) for row, own in zip(rows, images, strict=True)]


def _with_features(setup: Setup, images: Sequence[TextImages | None]) -> Sequence[TextImages | None]:
    """The images of texts with their features, if features are cached."""
    known = all(image.features for text in images if text is not None for image in text.images)
    if known or setup.features is None:
        return images
    return setup.features.filled_texts(images, setup.model, setup.reference)


# Completions of the policy.


class PolicyWriter:
    """Completes prompts with the run's current model, with servers, or with a user-defined `rollout_func`.

    Args:
        streams: random streams, one per rank. This process samples with the first of its ranks if `alone`, else with
            the first of all.
        alone: whether this process completes only its own prompts, on one device, instead of all prompts together with
            the other processes.
        seeds: stream of the seeds that servers get for prompts; None without servers.
    """

    def __init__(
        self,
        setup: Setup,
        parts: RolloutParts,
        streams: Sequence[TorchGenerator],
        line: ProgressLine,
        alone: bool,
        seeds: TorchGenerator | None = None,
    ):
        tools = parts.sampling.tools and replace(parts.sampling.tools, chat_tokenizer=setup.chat_tokenizer)
        self._sampling = replace(parts.sampling, tools=tools)
        self._setup, self._streams, self._line = setup, streams, line
        self._stream = streams[own_rank(len(streams)) if alone else 0]
        self._alone, self._copy = alone, None
        self._rollout_func, self._rewards, self._own = parts.rollout_func, parts.rewards, parts.own
        self._server = None if parts.server is None else ServerPolicy(setup, parts.server, seeds)
        self._further: Further | None = None  # inside a `rollout_func`: completes texts in rounds
        self._turns: TurnCache | None = None  # inside a `rollout_func`: of the last texts that it had completed

    def prompts(self, found: Sequence[dict[str, Any]]) -> list:
        return (
            [row["prompt"] for row in found] if self._setup.encoder is None else prompt_rows.prompts_with_images(found)
        )

    @contextlib.contextmanager
    def _prepared(self, prompts: list) -> Iterator[None]:
        """A context in which processes complete parts of these prompts alone. All processes must enter it together: it
        copies the model to each one's device, or sends it to a `rollout_func`'s servers. Inside, they wait for each
        other only in rounds (see `in_rounds`), because each calls tools a different number of times."""
        setup = self._setup
        if self._rollout_func is None:
            with setup.on_device():
                self._copy = local_copy(setup.model, jax.numpy.asarray)
        elif self._server is not None:
            self._server.refresh(self.prompt_ids(prompts[:1])[0])
        try:
            yield
        finally:
            self._copy = None

    def write(self, prompts: list, group: int) -> Written:
        if not self._alone:
            return self._write(prompts, group)
        with self._prepared(prompts):
            return write_own(self._write, prompts, group, self._streams)

    def _write(self, prompts: list, group: int) -> Written | None:
        """One completion per prompt; None without prompts, if other processes have some."""
        if not prompts:
            return None if self._server is None else in_rounds(self._complete_round, lambda further: None)
        self._check(prompts[::group])
        if self._rollout_func is not None:
            return self.checked(self._by_script(prompts))
        if self._server is not None:
            return self.checked(self._by_servers(prompts, group, GenerationProgress(self._line, len(prompts)))())
        return self.checked(self._by_policy(prompts, group))

    def checked(self, made: Written) -> Written:
        encoder = self._setup.encoder
        if encoder is not None and has_stray_images(made, encoder.image_token_id):
            raise ValueError(
                f"A completion has the image token {encoder.image_token!r}, but no image belongs to it. Leave "
                "suppress_tokens out of generation_kwargs, and image tokens out of the completions of a rollout_func."
            )
        return made if made.images is None else replace(made, images=_with_features(self._setup, made.images))

    def _check(self, prompts: list) -> None:
        for prompt in prompts:
            check_no_media(prompt, f"The prompt {brief(prompt)}", images=self._setup.encoder is not None)
        if self._sampling.tools is not None and not prompt_rows.is_conversation(prompts[0]):
            raise ValueError(
                f"tools= answer in messages, and a prompt is the text {brief(prompts[0])}. Make prompts of messages, "
                'as in [{"role": "user", "content": "..."}].'
            )

    def _by_script(self, prompts: list) -> Written:
        setup = self._setup
        if self._server is not None and not self._alone:
            self._server.refresh(self.prompt_ids(prompts[:1])[0])

        def run(further: Further | None) -> Written:
            self._further, self._turns = further, TurnCache()
            try:
                with raised_by("rollout_func", prompts):
                    return written_by(self._rollout_func, prompts, setup.vocab_size)
            finally:
                self._turns = None

        made = in_rounds(self._complete_round, run) if self._alone and self._server is not None else run(None)
        if made.sampling_logps is None and "sampling_logps" in setup.task.logps:
            raise ValueError(
                "rollout_func returned logprobs=None, but use_vllm=True with vllm_importance_sampling_correction, and "
                "off_policy_mask_threshold, compare the sampler's log-probabilities with the policy's. Return them, "
                "or set vllm_importance_sampling_correction=False and leave off_policy_mask_threshold out."
            )
        if setup.encoder is None:
            return made
        return replace(made, images=prompt_rows.placed_images(prompts, made.prompt_ids, setup.encoder))

    def _by_policy(self, prompts: list, group: int) -> Written:
        tools = self._sampling.tools
        ids, images = self._checked_ids(prompts)
        turns = None if tools is None else TurnCache()
        completions = self.complete(ids, _group_of(ids, group, _keys(images)), images, turns)
        if tools is None:
            return Written(ids, completions, all_written(completions), images=images)

        def further(texts: Ids, of_texts: list[Seen] | None, rooms: list[int]) -> tuple[list[np.ndarray], None]:
            del rooms
            seen = None if of_texts is None else list(_with_features(self._setup, [own.images for own in of_texts]))
            return self.complete(texts, 1, seen, turns), None

        return tools.completed(ids, completions, further, None if images is None else [Seen(own, ()) for own in images])

    def _by_servers(
        self, prompts: list, group: int, progress: GenerationProgress | None = None
    ) -> Callable[[], Written]:
        tools, part = self._sampling.tools, slice(None)
        if several() and tools is not None:  # each process has the environments and tools of its own part
            part = own_part(len(prompts))
            ids, images, urls = self._encoded_parts(prompts, part)
        else:
            ids, images, urls = self._encoded_part(prompts)
        group = _group_of(ids, group, urls)
        completions = self._server.begin(ids[::group], group, progress, images=None if urls is None else urls[::group])

        def written() -> Written:
            made = completions()
            if tools is None:
                by_model = all_written(made.completions)
                facts = {"sampling_logps": made.logps, "images": images, "seconds": made.seconds}
                return Written(ids, made.completions, by_model, **facts)
            seconds = Counter(made.seconds)

            def further(
                texts: Ids, of_texts: Urls | None, rooms: list[int]
            ) -> tuple[list[np.ndarray], list[np.ndarray]]:
                tokens, logps = [np.zeros(0, np.int32)] * len(texts), [np.zeros(0, np.float32)] * len(texts)
                asked = [place for place, room in enumerate(rooms) if room]  # the others end with a tool's answer
                if not asked:
                    return tokens, logps
                most, shown = [rooms[place] for place in asked], of_texts and [of_texts[place] for place in asked]
                found = self._server.begin([texts[place] for place in asked], 1, most=most, images=shown)()
                seconds.update(found.seconds)
                for place, *own in zip(asked, found.completions, found.logps, strict=True):
                    tokens[place], logps[place] = own
                return tokens, logps

            seen = None if images is None else list(map(Seen, images, urls[part]))
            done = in_rounds(further, lambda more: tools.completed(
                ids[part], made.completions[part],
                lambda texts, of_texts, rooms: more(texts, of_texts and [own.urls for own in of_texts], rooms),
                seen, made.logps[part], _url_of,
            ))  # fmt: skip
            done = joined(of_each_process(lambda: done)) if several() else done
            return replace(done, seconds=dict(seconds))

        return written

    def begin(self, prompts: list, group: int) -> Callable[[], Written]:
        """Like `write`, but returns while the servers generate: the returned function waits for them."""
        self._check(prompts[::group])
        return self._by_servers(prompts, group)

    def prompt_ids(self, prompts: list) -> list[list[int]]:
        return self.encoded(prompts)[0]

    def _encoded_part(self, prompts: list) -> tuple[list[list[int]], list[TextImages] | None, list[list[str]] | None]:
        """Token ids of prompts, their images if the run has any, and these as data URLs."""
        if self._setup.encoder is None:
            return self._checked_ids(prompts)[0] if prompts else [], None, None
        ids, images = self._checked_ids(prompts) if prompts else ([], [])
        urls: list[list[str]] = []
        for number, prompt in enumerate(prompts):  # equal prompts of a group are adjacent
            alike = number > 0 and images[number].key == images[number - 1].key
            urls.append(urls[-1] if alike else list(map(_url_of, pictures_in(prompt))))
        return ids, images, urls

    def _encoded_parts(
        self, prompts: list, part: slice
    ) -> tuple[list[list[int]], list[TextImages] | None, list[list[str]] | None]:
        """Like `_encoded_part` of all prompts, which each process calls for its own `part`. Returns the images of this
        part only."""
        images = None

        def encoded() -> tuple[list[list[int]], list[list[str]] | None]:
            nonlocal images
            ids, images, urls = self._encoded_part(prompts[part])
            return ids, urls

        ids, urls = zip(*of_each_process(encoded), strict=True)
        return list(chain.from_iterable(ids)), images, None if images is None else list(chain.from_iterable(urls))

    def _checked_ids(self, prompts: list) -> tuple[list[list[int]], list[TextImages] | None]:
        ids, images = self.encoded(prompts) if self._own is None else self._own.encoded(prompts)
        for prompt, own in zip(prompts, ids, strict=True):
            token_ids(own, self._setup.vocab_size, f"The prompt {brief(prompt)}")
        return ids, images

    def encoded(self, prompts: list) -> tuple[list[list[int]], list[TextImages] | None]:
        """The token ids of prompts, and their images if the run has any."""
        sampling = self._sampling
        own = None if sampling.tools is None else sampling.tools.of_each
        if own is None:
            return self._rendered(prompts, sampling.template_options)
        tools = [list(functions.values()) or None for functions in own]
        each = zip(prompts, tools, strict=True)
        found = [self._rendered([prompt], sampling.template_options | {"tools": some}) for prompt, some in each]
        ids, images = ([one for part in parts for one in part or ()] for parts in zip(*found, strict=True))
        return ids, images or None

    def _rendered(
        self, prompts: list, template_options: dict[str, Any]
    ) -> tuple[list[list[int]], list[TextImages] | None]:
        options = {"template_options": template_options, "max_prompt_length": self._sampling.max_prompt_length}
        if self._setup.encoder is not None:
            ids, images = prompt_rows.encoded_prompts(prompts, self._setup.encoder, **options)
            return ids, list(_with_features(self._setup, images))
        return prompt_rows.prompt_ids(prompts, self._setup.chat_tokenizer, **options), None

    def complete(
        self,
        prompt_ids: Ids,
        group: int,
        images: list[TextImages] | None = None,
        turns: TurnCache | None = None,
    ) -> list[np.ndarray]:
        setup = self._setup
        tell_first(setup.progress.told, "generation")
        with setup.on_device():
            model = self._copy if self._alone else setup.model
            out = complete(
                model, prompt_ids[::group], self._sampling.options, group=group, stream=self._stream,
                dtype=setup.args.compute_dtype, head_dtype="float32" if setup.args.cast_lm_head_to_fp32 else None,
                logps=False, images=None if images is None else images[::group],
                progress=GenerationProgress(self._line, len(prompt_ids)), limit=self._limit(model),
                tokenizer=setup.processing_class, turns=turns,
            )  # fmt: skip
        every = [tokens[:length] for tokens, length in zip(out.tokens, out.lengths, strict=True)]
        return [up_to_end(tokens, self._sampling.own_ends) for tokens in every]

    def _limit(self, model: PreTrainedModel) -> Limit:
        """How many completions of a model to generate at once. In auto mode, this depends only on the arrays that the
        run holds, so it is reproducible."""
        setup = self._setup
        scorers = None if self._rewards is None else self._rewards.arrays
        own = (model.params, model.frozen) if self._alone else None
        held = device_bytes((setup.arrays, setup.progress.optimizer_state, scorers, own))
        return Limit(setup.args.max_completions_per_device, max(self._room - held, 0) if self._room else None)

    @cached_property
    def _room(self) -> int:
        """Bytes of a device that generation may use, together with all arrays of the run; 0 if unknown."""
        device = run_device(self._setup.args)
        return local_memory_limit(device) if self._alone else device_memory_limit(device)

    def complete_once(self, ids: Ids, group: int) -> tuple[list[np.ndarray], list[np.ndarray] | None]:
        """Complete each text once. Up to `group` consecutive texts may be equal. Also returns the servers'
        log-probabilities of the new tokens; None if this process generates."""
        texts = [token_ids(own, self._setup.vocab_size, f"prompt_ids[{place}]") for place, own in enumerate(ids)]
        texts = [own.tolist() for own in texts]
        if self._further is not None:
            return self._further(texts, None, [group] * len(texts))
        group = _group_of(texts, group)
        if self._server is None:
            return self.complete(texts, group, None, self._turns), None
        made = self._server.begin(texts[::group], group, GenerationProgress(self._line, len(texts)))()
        return made.completions, made.logps

    def _complete_round(
        self, texts: Ids, images: None, groups: Sequence[int]
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Complete each text of all processes once. Runs of equal texts (`groups` long) become a single request."""
        del images
        group = _group_of(texts, math.gcd(*groups))
        made = self._server.begin(texts[::group], group)()
        return made.completions, made.logps

    def decoded(self, ids: Ids) -> list[str]:
        return self._setup.processing_class.batch_decode(ids, skip_special_tokens=True)

    def completions(self, prompts: list, prompt_ids: Ids, completion_ids: Ids) -> list:
        known = prompt_ids if self._sampling.parses_messages else None
        return prompt_rows.completion_texts(prompts, completion_ids, self._setup.processing_class, known)


def _url_of(picture: Any) -> str:
    return data_url(open_picture(picture))


def _keys(images: Sequence[TextImages] | None) -> list[bytes] | None:
    return None if images is None else [text.key for text in images]


def _group_of(ids: Ids, group: int, images: Sequence[Any] | None = None) -> int:
    """`group` if the prompts within each such group are equal, else 1: environments may give them different prompts.

    Args:
        images: something that is equal for equal images, for each prompt; None without images.
    """
    keys = ids if images is None else list(zip(ids, images, strict=True))
    alike = len(keys) % group == 0 and all(own == keys[place - place % group] for place, own in enumerate(keys))
    return group if alike else 1


def up_to_end(tokens: np.ndarray, ends: Sequence[int]) -> np.ndarray:
    """The tokens up to the first of `ends`, including it; all of them if there is none."""
    places = np.flatnonzero(np.isin(tokens, ends))
    return tokens[: places[0] + 1] if len(places) else tokens


def has_stray_images(made: Written, image_token: int) -> bool:
    """Whether a completion has an image token without an image."""
    seen = [None] * len(made.completion_ids) if made.images is None else made.images
    for prompt, completion, images in zip(made.prompt_ids, made.completion_ids, seen, strict=True):
        placed = np.zeros(len(completion), bool)
        if images is not None:
            own = images.features[len(prompt) :] != -1
            placed[: len(own)] = own
        if ((np.asarray(completion) == image_token) & ~placed).any():
            return True
    return False


# Log-probabilities of completions under the policy that generated them, and under the reference.


class CompletionLogps:
    """Log-probabilities of completion tokens under the policy or the reference, in passes laid out like a step's."""

    def __init__(self, setup: Setup, forward: Forward, sharded_step: ShardedStep | None):
        self._setup = setup
        functions = {"policy": forward.of_policy, "reference": forward.of_reference}
        self._of = {name: _compiled(of_pass, sharded_step) for name, of_pass in functions.items()}

    def __call__(self, model: str, made: Written, completion_mask: Sequence[np.ndarray]) -> Logps:
        setup = self._setup
        layout = replace(data.step_layout(setup, training=True), accumulation=1)
        virtual = setup.virtual if model == "policy" else setup.reference.backend.virtual
        rows = zip(made.prompt_ids, made.completion_ids, completion_mask, made.images_of_each, strict=True)
        examples = [example_of(*row, images=images).behind(virtual, predicted=False) for *row, images in rows]
        found = [np.zeros(len(own), np.float32) for own in made.completion_ids]
        with setup.on_device():
            for start in range(0, len(examples), layout.batch_size):
                part = list(enumerate(examples))[start : start + layout.batch_size]
                step = layout.step([[IndexedExample(example, number) for number, example in part]], 0)
                logps = fetched(self._of[model](setup.arrays, data.placed_pass(step.arrays, setup.sharding_plan)))
                for number, (own,) in step.of_reads(logps.reshape(step.arrays.reads.shape)).items():
                    found[number][completion_mask[number]] = own
        return found


def _compiled(of_pass: Callable, sharded_step: ShardedStep | None) -> Callable:
    """`(arrays, batch of one pass) -> log-probabilities of its reads, [shards, N]`."""

    def first(arrays: dict, batch: Batch) -> jax.Array:
        return of_pass(arrays, jax.tree.map(lambda leaf: leaf[0], batch))["logps"]

    if sharded_step is not None:
        return jax.jit(sharded_step.scores(first))
    return jax.jit(lambda arrays, batch: first(arrays, batch)[None])


# User-defined methods that completions go through, with TRL's arguments and results, as NumPy arrays and lists.


OWN_METHODS = "_generate_and_score_completions", "_generate", "_tokenize_prompts"


@dataclass
class OwnRollout:
    """Calls user-defined methods instead of ours, which they can call as `super()`.

    name: of the trainer's class.
    score, generate, tokenize: the user-defined methods in OWN_METHODS; None for those that are not overridden.
    grpo_form: whether results have GRPO's form, or RLOO's, which is shorter.
    keeps_extras: whether additional values per completion are kept for a user-defined loss.
    rollout: set when the run is assembled.
    """

    name: str
    score: Callable[[list[dict[str, Any]]], dict[str, Any]] | None
    generate: Callable[[list], tuple] | None
    tokenize: Callable[[list], tuple] | None
    grpo_form: bool
    keeps_extras: bool
    pad_token_id: int
    rollout: Rollout | None = None
    _now: tuple[int, str] | None = None
    _made: dict[str, Any] = field(default_factory=dict)

    # Called by the rollout.

    def scored(self, rows: Sequence[dict[str, Any]], group: int, mode: str) -> Experience:
        self._now = group, mode
        if self.score is None:
            return self.rollout.scored(rows, group, mode)
        outputs = self.score([dict(row) for row in rows])
        experience, given = self._taken("_generate_and_score_completions")
        return self._changed(experience, given, outputs)

    def written(self, prompts: list, group: int, mode: str) -> Written:
        if self.generate is None:
            return self.rollout.written(prompts, group, mode)
        outputs = self.generate(prompts)
        made, given = self._taken("_generate")
        if not isinstance(outputs, tuple) or len(outputs) != len(given):
            raise TypeError(
                f"{self.name}._generate returned {brief(outputs)}; expected a tuple of {len(given)}, as TRL's."
            )
        ids = [list(map(int, own)) for own in outputs[0]]
        written = [np.asarray(own, np.int32) for own in outputs[1]]
        if ids != given[0] and made.images is not None:
            raise ValueError(
                f"{self.name}._generate changed the ids of prompts with images, which belong to their places."
            )
        found = {"prompt_ids": ids, "completion_ids": written, "messages": outputs[3 if self.grpo_form else 2]}
        by_model, logps = all_written(written), None
        if self.grpo_form:
            if outputs[2] is not None:
                by_model = [np.asarray(own, bool) for own in outputs[2]]
            if outputs[4] is not None:
                logps = [np.asarray([np.nan if x is None else x for x in own], np.float32) for own in outputs[4]]
            found |= {"columns": outputs[5], "sampling_logps": logps}
        for number, own in enumerate(written):
            lengths = {len(own), len(by_model[number]), len(own if logps is None else logps[number])}
            if len(own) == 0 or len(lengths) > 1:
                raise ValueError(
                    f"{self.name}._generate returned completion {number} with {len(own)} tokens and a mask or logprobs "
                    f"of {sorted(lengths)}: each needs at least one token, and a number for each."
                )
        return replace(made, by_model=by_model, **found)

    def encoded(self, prompts: list) -> tuple[list[list[int]], list[TextImages] | None]:
        if self.tokenize is None:
            return self.rollout.writer.encoded(prompts)
        outputs = self.tokenize(prompts)
        (given, images), _ = self._taken("_tokenize_prompts")
        ids = [list(map(int, own)) for own in outputs[0]]
        if len(ids) != len(prompts) or (images is not None and ids != given):
            raise ValueError(
                f"{self.name}._tokenize_prompts returned {len(ids)} prompts for {len(prompts)}; expected one list of "
                "ids per prompt, and for prompts with images the ids that super() returned."
            )
        return ids, images

    # Called by `super()` in the script's methods.

    def default_score(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        group, mode = self._within("_generate_and_score_completions")
        experience = self.rollout.scored(inputs, group, mode)
        outputs = self._outputs(experience)
        self._made["_generate_and_score_completions"] = experience, dict(outputs)
        return outputs

    def default_generate(self, prompts: list) -> tuple:
        group, mode = self._within("_generate")
        made = self.rollout.written(prompts, group, mode)
        texts = made.messages
        if texts is None:
            texts = self.rollout.writer.completions(prompts, made.prompt_ids, made.completion_ids)
        ids, written = ([list(map(int, own)) for own in part] for part in (made.prompt_ids, made.completion_ids))
        outputs = ids, written, texts
        if self.grpo_form:
            alone = all(own.all() for own in made.by_model)
            mask = None if alone else [own.astype(int).tolist() for own in made.by_model]
            logps = None if made.sampling_logps is None else [own.tolist() for own in made.sampling_logps]
            outputs = ids, written, mask, texts, logps, dict(made.columns), None, []
        self._made["_generate"] = made, outputs
        return outputs

    def default_tokenize(self, prompts: list) -> tuple:
        self._within("_tokenize_prompts")
        ids, images = self.rollout.writer.encoded(prompts)
        self._made["_tokenize_prompts"] = (ids, images), None
        return [list(own) for own in ids], None, {}

    def _within(self, name: str) -> tuple[int, str]:
        if self._now is None:
            raise RuntimeError(f"{name} of {self.name} can only be called as super().{name}(...) from an override.")
        return self._now

    def _taken(self, name: str) -> tuple[Any, Any]:
        """The result of the method's `super()`."""
        if name not in self._made:
            raise RuntimeError(
                f"{self.name}.{name} did not call super().{name}(...), which generates the completions. Call it and "
                "change its result, or pass a rollout_func."
            )
        return self._made.pop(name)

    def _outputs(self, experience: Experience) -> dict[str, Any]:
        """TRL's outputs: prompts are left-padded, and per-token values of completions right-padded."""
        rows = experience.rows
        prompts = padded([row.prompt for row in rows], self.pad_token_id, left=True)
        outputs = {
            "prompt_ids": prompts,
            "prompt_mask": padded([np.ones_like(row.prompt) for row in rows], 0, left=True),
            "completion_ids": padded([row.completion for row in rows], self.pad_token_id),
            "completion_mask": padded([row.completion_mask.astype(np.int32) for row in rows], 0),
            "advantages": np.asarray([row.advantage for row in rows], np.float32),
        }
        if not self.grpo_form:
            old = [np.sum(row.old_logps[row.completion_mask], dtype=np.float32) for row in rows]
            return outputs | {"old_logps": np.asarray(old)}
        outputs["num_items_in_batch"] = np.int32(experience.num_tokens)
        there = {name: [row._asdict()[key] for row in rows] for name, key in TRL_LOGPS.items()}
        return outputs | {name: padded(values, 0.0) for name, values in there.items() if values[0] is not None}

    def _changed(self, experience: Experience, given: dict[str, Any], outputs: Any) -> Experience:
        """The completions with the script's changes to their outputs.

        Raises:
            TypeError: something that cannot be changed here.
        """
        where = f"{self.name}._generate_and_score_completions returned"
        if not isinstance(outputs, Mapping) or given.keys() - outputs.keys():
            missing = sorted(given.keys() - outputs.keys()) if isinstance(outputs, Mapping) else brief(outputs)
            raise TypeError(f"{where} outputs without {missing}; expected all outputs of super(), possibly changed.")
        found = {name: np.asarray(value) for name, value in as_arrays(outputs).items() if value is not None}
        free = {"advantages", "completion_mask", *((*TRL_LOGPS, "num_items_in_batch") if self.grpo_form else ())}
        for name in given.keys() - free:
            if not np.array_equal(found[name], given[name]):
                raise TypeError(f"{where} other {name} than super(): these are what was generated. Leave them.")
        mask, shape = found["completion_mask"].astype(bool), given["completion_mask"].shape
        if mask.shape != shape or (mask & ~given["completion_mask"].astype(bool)).any():
            raise TypeError(
                f"{where} a completion_mask with other tokens than super()'s: it may only leave tokens out."
            )
        changes: dict[str, Any] = {"completion_mask": mask, "advantage": self._advantages(found["advantages"], shape)}
        changes |= {TRL_LOGPS[name]: found[name].astype(np.float32) for name in TRL_LOGPS.keys() & given.keys()}
        extras = {name: values for name, values in found.items() if name not in given}
        if found["advantages"].ndim == 2:
            extras["advantages"] = found["advantages"]
        extras = self._checked(extras, shape) if self.keeps_extras else {}
        rows = []
        for number, row in enumerate(experience.rows):
            own = {name: values[number] for name, values in changes.items()}
            own = {
                name: values[: len(row.completion)] if np.ndim(values) else float(values)
                for name, values in own.items()
            }
            of_row = {name: values[number][..., : len(row.completion)] if values.ndim == 2 else values[number]
                      for name, values in extras.items()}  # fmt: skip
            rows.append(row._replace(**own, extras=of_row or None))
        return Experience(rows, float(found["num_items_in_batch"]) if self.grpo_form else None)

    def _advantages(self, values: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
        """The advantages of completions, float32 `[B]`; 0 if the script returned one for each token."""
        if values.shape == shape and self.keeps_extras:
            return np.zeros(shape[0], np.float32)
        if values.shape != shape[:1] or not np.isfinite(values).all():
            raise TypeError(
                f"{self.name}._generate_and_score_completions returned advantages {list(values.shape)}; expected "
                f"[{shape[0]}] finite numbers. Advantages of tokens need a _compute_loss of the script's own, too."
            )
        return values.astype(np.float32)

    def _checked(self, extras: dict[str, np.ndarray], shape: tuple[int, int]) -> dict[str, np.ndarray]:
        for name, values in extras.items():
            if values.shape not in (shape, shape[:1]) or values.dtype == object:
                raise TypeError(
                    f"{self.name}._generate_and_score_completions returned {name}, {list(values.shape)}; expected "
                    f"numbers of completions, [{shape[0]}], or of their tokens, {list(shape)}."
                )
        kinds = {"b": np.bool_, "i": np.int32, "u": np.int32}
        return {name: values.astype(kinds.get(values.dtype.kind, np.float32)) for name, values in extras.items()}


def padded(rows: Sequence[np.ndarray], filler: float, *, left: bool = False) -> np.ndarray:
    """Rows of numbers as an array, padded on one side."""
    longest = max(map(len, rows))
    found = np.full((len(rows), longest), filler, np.asarray(rows[0]).dtype)
    for out, row in zip(found, rows, strict=True):
        out[slice(longest - len(row), None) if left else slice(len(row))] = row
    return found


# The parts of a rollout that its trainer chooses.


@dataclass(frozen=True)
class Sampling:
    """How the policy completes prompts.

    template_options: further arguments of the chat template.
    max_prompt_length: number of last tokens of a prompt to keep; None keeps all.
    options: fields of a GenerationConfig; `eos_token_id`, or each of several, ends a completion.
    own_ends: EOS ids of the tokenizer and the model, which end a completion even if `options` has others.
    parses_messages: whether to parse completions of conversations, if the tokenizer can.
    tools: that the model may call; None without tools.
    """

    template_options: dict[str, Any]
    max_prompt_length: int | None
    options: dict[str, Any]
    own_ends: Sequence[int]
    parses_messages: bool
    tools: Tools | None = None

    @property
    def ends(self) -> list[int]:
        """The ids that end a completion."""
        ids = self.options["eos_token_id"]
        return [*([ids] if isinstance(ids, int) else ids), *self.own_ends]


@dataclass(frozen=True)
class RolloutParts:
    """The parts of a rollout that its trainer chooses.

    rewards: the reward functions; None if completions are not judged.
    shuffle: whether to shuffle the prompts in each epoch.
    bonus: the coefficient of the entropy bonus; None without one.
    rollout_func: prompts -> completions, as `written_by` takes it; None: the policy completes them.
    server: the servers that complete prompts; None: this process does. With a rollout_func, they only get weights.
    own: user-defined methods that completions go through; None without any.
    """

    sampling: Sampling
    rewards: RewardFunctions | None
    drops_truncated: bool
    shuffle: bool
    bonus: EntropyBonus | None
    table: CompletionsLog | None
    rollout_func: Callable[[list], Mapping[str, Any]] | None = None
    server: ServerParts | None = None
    own: OwnRollout | None = None
