"""Completions of prompts in online training.

    who completes                  if                                       where
    the policy in this process     neither a server nor a rollout_func      _by_policy
    servers                        servers and no rollout_func              _by_servers; `begin` does not wait for them
    a script's rollout_func        there is one                             _by_script, which may call `complete_once`

With tools, a completion has several turns: a tool answers the first one, and the same policy or servers continue the
text (`Tools.run_turns`).

Several processes either complete all prompts together, or each completes its own part (`alone`). In the latter case
each needs a different number of turns, so those that servers generate come in rounds, in which all processes take part
(`in_rounds`).
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any

import jax
import numpy as np

from trl_jax.core.text import brief
from trl_jax.core.torch_random import TorchGenerator
from trl_jax.data import prompts as prompt_rows
from trl_jax.data.checks import check_no_media, token_ids
from trl_jax.data.image_rows import pictures_in
from trl_jax.data.images import TextImages
from trl_jax.generation.generator import Limit, device_bytes
from trl_jax.generation.reuse import TurnCache
from trl_jax.hub.generate import complete
from trl_jax.hub.pretrained import PreTrainedModel
from trl_jax.hub.vision.processor import open_picture
from trl_jax.mesh.processes import of_each_process, several
from trl_jax.rollout.rewards import RewardFunctions, raised_by
from trl_jax.rollout.rollout import EncodedTexts, GeneratedCompletions, Ids, all_by_model
from trl_jax.rollout.server import data_url
from trl_jax.rollout.tools import Tools, call_rollout_func
from trl_jax.rollout.user_methods import UserMethods
from trl_jax.training.devices import device_memory_limit, local_memory_limit, run_device
from trl_jax.training.logging import GenerationProgress, ProgressLine, tell_first
from trl_jax.training.rollout_processes import (
    Further,
    in_rounds,
    joined,
    local_copy,
    local_part,
    local_rank,
    write_local_part,
)
from trl_jax.training.server import Completions, ServerPolicy
from trl_jax.training.state import Setup


@dataclass(frozen=True)
class Sampling:
    """How the policy completes prompts.

    template_options: further arguments of the chat template.
    max_prompt_length: number of last tokens of a prompt to keep; None keeps all.
    options: fields of a GenerationConfig; `eos_token_id`, or each of several, ends a completion.
    extra_ends: EOS ids of the tokenizer and the model, which end a completion even if `options` has others.
    parses_messages: whether to parse completions of conversations, if the tokenizer can.
    tools: that the model may call; None without tools.
    """

    template_options: dict[str, Any]
    max_prompt_length: int | None
    options: dict[str, Any]
    extra_ends: Sequence[int]
    parses_messages: bool
    tools: Tools | None = None

    @property
    def ends(self) -> list[int]:
        """The ids that end a completion."""
        ids = self.options["eos_token_id"]
        return [*([ids] if isinstance(ids, int) else ids), *self.extra_ends]


class PolicyWriter:
    """Completes prompts with the run's current model, with servers, or with a user-defined `rollout_func`.

    Args:
        streams: random streams, one per rank. This process samples with the first of its ranks if `alone`, else with
            the first of all.
        alone: whether this process completes only its own prompts, on one device, instead of all prompts together with
            the other processes.
        rollout_func: maps prompts to completions, as `call_rollout_func` takes it; None: the policy completes them.
        server: the servers that complete prompts; None: this process does. With a rollout_func, they only get weights.
        user_methods: a script's override of `_tokenize_prompts`, among others; None without any.
        rewards: their arrays share the devices with the completions; None without any.
    """

    def __init__(
        self,
        setup: Setup,
        sampling: Sampling,
        streams: Sequence[TorchGenerator],
        line: ProgressLine,
        *,
        alone: bool,
        rollout_func: Callable[[list], Mapping[str, Any]] | None = None,
        server: ServerPolicy | None = None,
        user_methods: UserMethods | None = None,
        rewards: RewardFunctions | None = None,
    ):
        tools = sampling.tools and replace(sampling.tools, chat_tokenizer=setup.chat_tokenizer)
        self._sampling = replace(sampling, tools=tools)
        self._setup, self._streams, self._line = setup, streams, line
        self._stream = streams[local_rank(len(streams)) if alone else 0]
        self._alone, self._copy = alone, None
        self._rollout_func, self._server, self._rewards = rollout_func, server, rewards
        self._user_methods = user_methods
        self._next_round: Further | None = None  # inside a `rollout_func`: completes texts in rounds
        self._turns: TurnCache | None = None  # inside a `rollout_func`: of the last texts that it had completed

    def prompts(self, rows: Sequence[dict[str, Any]]) -> list:
        if self._setup.encoder is not None:
            return prompt_rows.prompts_with_images(rows)
        return [row["prompt"] for row in rows]

    @contextlib.contextmanager
    def _prepared(self, prompts: list) -> Iterator[None]:
        """A context in which processes complete parts of these prompts on their own. All must enter it together: it
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

    def write(self, prompts: list, group: int) -> GeneratedCompletions:
        if not self._alone:
            return self._write(prompts, group)
        with self._prepared(prompts):
            return write_local_part(self._write, prompts, group, self._streams)

    def _write(self, prompts: list, group: int) -> GeneratedCompletions | None:
        """One completion per prompt; None without prompts, if other processes have some."""
        if not prompts:
            return None if self._server is None else in_rounds(self._complete_round, lambda next_round: None)
        self._check(prompts[::group])
        if self._rollout_func is not None:
            return self.checked(self._by_script(prompts))
        if self._server is not None:
            return self.checked(self._by_servers(prompts, group, GenerationProgress(self._line, len(prompts)))())
        return self.checked(self._by_policy(prompts, group))

    def checked(self, made: GeneratedCompletions) -> GeneratedCompletions:
        encoder = self._setup.encoder
        if encoder is not None and has_stray_images(made, encoder.image_token_id):
            raise ValueError(
                f"A completion has the image token {encoder.image_token!r}, but no image belongs to it. Leave "
                "suppress_tokens out of generation_kwargs, and image tokens out of the completions of a rollout_func."
            )
        return made if made.images is None else replace(made, images=with_features(self._setup, made.images))

    def _check(self, prompts: list) -> None:
        for prompt in prompts:
            check_no_media(prompt, f"The prompt {brief(prompt)}", images=self._setup.encoder is not None)
        if self._sampling.tools is not None and not prompt_rows.is_conversation(prompts[0]):
            raise ValueError(
                f"tools= answer in messages, and a prompt is the text {brief(prompts[0])}. Make prompts of messages, "
                'as in [{"role": "user", "content": "..."}].'
            )

    def _by_script(self, prompts: list) -> GeneratedCompletions:
        setup = self._setup
        if self._server is not None and not self._alone:
            self._server.refresh(self.prompt_ids(prompts[:1])[0])

        def run(next_round: Further | None) -> GeneratedCompletions:
            self._next_round, self._turns = next_round, TurnCache()
            try:
                with raised_by("rollout_func", prompts):
                    return call_rollout_func(self._rollout_func, prompts, setup.vocab_size)
            finally:
                self._next_round = self._turns = None

        completions = in_rounds(self._complete_round, run) if self._alone and self._server is not None else run(None)
        if completions.sampling_logps is None and "sampling_logps" in setup.task.logps:
            raise ValueError(
                "rollout_func returned logprobs=None, but use_vllm=True with vllm_importance_sampling_correction, and "
                "off_policy_mask_threshold, compare the sampler's log-probabilities with the policy's. Return them, "
                "or set vllm_importance_sampling_correction=False and leave off_policy_mask_threshold out."
            )
        if setup.encoder is None:
            return completions
        return replace(completions, images=prompt_rows.placed_images(prompts, completions.prompt_ids, setup.encoder))

    def _by_policy(self, prompts: list, group: int) -> GeneratedCompletions:
        tools = self._sampling.tools
        texts = self._checked(prompts)
        turns = None if tools is None else TurnCache()
        completions = self.complete(texts.ids, texts.equal_runs(group), texts.images, turns)
        if tools is None:
            return GeneratedCompletions(texts.ids, completions, all_by_model(completions), images=texts.images)

        def next_turn(texts: EncodedTexts, rooms: Sequence[int]) -> tuple[list[np.ndarray], None]:
            del rooms
            images = None if texts.images is None else list(with_features(self._setup, texts.images))
            return self.complete(texts.ids, 1, images, turns), None

        return tools.run_turns(texts, completions, next_turn)

    def _by_servers(
        self, prompts: list, group: int, progress: GenerationProgress | None = None
    ) -> Callable[[], GeneratedCompletions]:
        """Start completing prompts; the returned function waits for the completions."""
        tools = self._sampling.tools
        if several() and tools is not None:  # each process has the environments and tools of its own part
            part = local_part(len(prompts))
            local_texts, texts = self._encoded_parts(prompts, part)
        else:
            part, texts = slice(None), self._with_urls(prompts)
            local_texts = texts
        completions = self._request(texts, texts.equal_runs(group), progress)

        def written() -> GeneratedCompletions:
            first = completions()
            if tools is None:
                by_model = all_by_model(first.completions)
                more = {"sampling_logps": first.logps, "images": local_texts.images, "seconds": first.seconds}
                return GeneratedCompletions(local_texts.ids, first.completions, by_model, **more)
            seconds = Counter(first.seconds)

            def next_turn(texts: EncodedTexts, rooms: Sequence[int]) -> tuple[list[np.ndarray], list[np.ndarray]]:
                tokens = [np.zeros(0, np.int32)] * len(texts.ids)
                logps = [np.zeros(0, np.float32)] * len(texts.ids)
                active = [place for place, room in enumerate(rooms) if room]  # the others end with a tool's answer
                if not active:
                    return tokens, logps
                turn = self._request(texts.at(active), 1, most=[rooms[place] for place in active])()
                seconds.update(turn.seconds)
                for place, *of_text in zip(active, turn.completions, turn.logps, strict=True):
                    tokens[place], logps[place] = of_text
                return tokens, logps

            def run(next_round: Further) -> GeneratedCompletions:
                return tools.run_turns(local_texts, first.completions[part], next_round, first.logps[part], _url_of)

            done = in_rounds(next_turn, run)
            done = joined(of_each_process(lambda: done)) if several() else done
            return replace(done, seconds=dict(seconds))

        return written

    def _request(
        self,
        texts: EncodedTexts,
        group: int,
        progress: GenerationProgress | None = None,
        most: Sequence[int] | None = None,
    ) -> Callable[[], Completions]:
        """Have the servers complete texts; each run of `group` texts is equal. See `ServerPolicy.begin`."""
        urls = None if texts.urls is None else texts.urls[::group]
        return self._server.begin(texts.ids[::group], group, progress, most=most, images=urls)

    def begin(self, prompts: list, group: int) -> Callable[[], GeneratedCompletions]:
        """Like `write`, but returns while the servers generate: the returned function waits for them."""
        self._check(prompts[::group])
        return self._by_servers(prompts, group)

    def prompt_ids(self, prompts: list) -> list[list[int]]:
        return self.encoded(prompts).ids

    def _with_urls(self, prompts: list) -> EncodedTexts:
        """Encoded prompts, with their images as data URLs if the run has images."""
        if not prompts:
            return EncodedTexts([]) if self._setup.encoder is None else EncodedTexts([], [], [])
        texts = self._checked(prompts)
        if texts.images is None:
            return texts
        urls: list[list[str]] = []
        for number, prompt in enumerate(prompts):  # equal prompts of a group are adjacent
            alike = number > 0 and texts.images[number].key == texts.images[number - 1].key
            urls.append(urls[-1] if alike else list(map(_url_of, pictures_in(prompt))))
        return texts._replace(urls=urls)

    def _encoded_parts(self, prompts: list, part: slice) -> tuple[EncodedTexts, EncodedTexts]:
        """The prompts of this process's `part`, and the prompts of all processes, with images as data URLs only.
        All processes must call this together."""
        local_texts = EncodedTexts([])

        def encoded() -> tuple[list[list[int]], list[list[str]] | None]:
            nonlocal local_texts
            local_texts = self._with_urls(prompts[part])
            return local_texts.ids, local_texts.urls

        ids, urls = zip(*of_each_process(encoded), strict=True)
        urls = None if local_texts.urls is None else list(chain.from_iterable(urls))
        return local_texts, EncodedTexts(list(chain.from_iterable(ids)), urls=urls)

    def _checked(self, prompts: list) -> EncodedTexts:
        """Prompts, encoded by the script's `_tokenize_prompts` if it has one.

        Raises:
            ValueError: a token id is not in the vocabulary.
        """
        of_script = self._user_methods
        texts = self.encoded(prompts) if of_script is None else of_script.tokenize_prompts(prompts, self.encoded)
        for prompt, ids in zip(prompts, texts.ids, strict=True):
            token_ids(ids, self._setup.vocab_size, f"The prompt {brief(prompt)}")
        return texts

    def encoded(self, prompts: list) -> EncodedTexts:
        """The token ids of prompts, and their images if the run has any."""
        options, tools = self._sampling.template_options, self._sampling.tools
        if tools is None or tools.functions_by_completion is None:
            return self._rendered(prompts, options)
        texts = [
            self._rendered([prompt], options | {"tools": list(functions.values()) or None})
            for prompt, functions in zip(prompts, tools.functions_by_completion, strict=True)
        ]
        images = None if self._setup.encoder is None else [text.images[0] for text in texts]
        return EncodedTexts([text.ids[0] for text in texts], images)

    def _rendered(self, prompts: list, template_options: dict[str, Any]) -> EncodedTexts:
        options = {"template_options": template_options, "max_prompt_length": self._sampling.max_prompt_length}
        if self._setup.encoder is not None:
            ids, images = prompt_rows.encoded_prompts(prompts, self._setup.encoder, **options)
            return EncodedTexts(ids, list(with_features(self._setup, images)))
        return EncodedTexts(prompt_rows.prompt_ids(prompts, self._setup.chat_tokenizer, **options))

    def complete(
        self,
        prompt_ids: Ids,
        group: int,
        images: list[TextImages] | None = None,
        turns: TurnCache | None = None,
    ) -> list[np.ndarray]:
        setup = self._setup
        tell_first(setup.progress.printed, "generation")
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
        return [up_to_end(tokens, self._sampling.extra_ends) for tokens in every]

    def _limit(self, model: PreTrainedModel) -> Limit:
        """How many completions of a model to generate at once. In auto mode, this depends only on the arrays that the
        run holds, so it is reproducible."""
        setup = self._setup
        scorers = None if self._rewards is None else self._rewards.arrays
        copy = (model.params, model.frozen) if self._alone else None
        held = device_bytes((setup.arrays, setup.progress.optimizer_state, scorers, copy))
        return Limit(setup.args.max_completions_per_device, max(self._room - held, 0) if self._room else None)

    @cached_property
    def _room(self) -> int:
        """Bytes of a device that generation may use, together with all arrays of the run; 0 if unknown."""
        device = run_device(self._setup.args)
        return local_memory_limit(device) if self._alone else device_memory_limit(device)

    def complete_once(self, ids: Ids, group: int) -> tuple[list[np.ndarray], list[np.ndarray] | None]:
        """Complete each text once. Up to `group` consecutive texts may be equal. Also returns the servers'
        log-probabilities of the new tokens; None if this process generates."""
        checked = [token_ids(text, self._setup.vocab_size, f"prompt_ids[{place}]") for place, text in enumerate(ids)]
        texts = EncodedTexts([text.tolist() for text in checked])
        if self._next_round is not None:
            return self._next_round(texts, [group] * len(checked))
        group = texts.equal_runs(group)
        if self._server is None:
            return self.complete(texts.ids, group, None, self._turns), None
        turn = self._request(texts, group, GenerationProgress(self._line, len(checked)))()
        return turn.completions, turn.logps

    def _complete_round(self, texts: EncodedTexts, groups: Sequence[int]) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Complete each text of all processes once. Runs of equal texts (`groups` long) become a single request."""
        turn = self._request(texts, texts.equal_runs(math.gcd(*groups)))()
        return turn.completions, turn.logps

    def decoded(self, ids: Ids) -> list[str]:
        return self._setup.processing_class.batch_decode(ids, skip_special_tokens=True)

    def completions(self, prompts: list, prompt_ids: Ids, completion_ids: Ids) -> list:
        context_ids = prompt_ids if self._sampling.parses_messages else None
        return prompt_rows.completion_texts(prompts, completion_ids, self._setup.processing_class, context_ids)


def with_features(setup: Setup, images: Sequence[TextImages | None]) -> Sequence[TextImages | None]:
    """The images of texts with their features, if features are cached."""
    computed = all(image.features for text in images if text is not None for image in text.images)
    if computed or setup.features is None:
        return images
    return setup.features.filled_texts(images, setup.model, setup.reference)


def _url_of(picture: Any) -> str:
    return data_url(open_picture(picture))


def up_to_end(tokens: np.ndarray, ends: Sequence[int]) -> np.ndarray:
    """The tokens up to the first of `ends`, including it; all of them if there is none."""
    places = np.flatnonzero(np.isin(tokens, ends))
    return tokens[: places[0] + 1] if len(places) else tokens


def has_stray_images(made: GeneratedCompletions, image_token: int) -> bool:
    """Whether a completion has an image token without an image."""
    seen = [None] * len(made.completion_ids) if made.images is None else made.images
    for prompt, completion, images in zip(made.prompt_ids, made.completion_ids, seen, strict=True):
        placed = np.zeros(len(completion), bool)
        if images is not None:
            after_prompt = images.features[len(prompt) :] != -1
            placed[: len(after_prompt)] = after_prompt
        if ((np.asarray(completion) == image_token) & ~placed).any():
            return True
    return False
