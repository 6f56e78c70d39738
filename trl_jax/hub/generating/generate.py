"""transformers' `generate` of a native model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from trl_jax.core.seed import default_generator
from trl_jax.core.torch_random import TorchGenerator
from trl_jax.hub.generating.batches import Batches, Completion, collected
from trl_jax.hub.generating.caller import Caller
from trl_jax.hub.generating.complete import check_generates, computing_dtype, drawing_of, request_of, run, text_of
from trl_jax.hub.generating.prompts import read_prompts
from trl_jax.hub.generating.refusals import refuse_arguments
from trl_jax.hub.generating.settings import processors_of, resolve
from trl_jax.hub.generating.text import decoded, encoded_prompt, ids_of_tokenizer


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
        dtype: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Complete prompts, with transformers' arguments and, on a CPU in float32, its tokens.

        Args:
            inputs: token ids `[rows, T]`, as lists, NumPy's, JAX's or torch's; or as `input_ids`, with an
                `attention_mask`, as in `generate(**tokenizer(...))`.
            generation_config: transformers' object; fields that are None come from the model's own.
            logits_processor: functions of the caller that change scores, called on the host in each step with NumPy's
                arrays, or torch's tensors where they or the prompts are of that kind.
            stopping_criteria: likewise, functions that say which rows end.
            prefix_allowed_tokens_fn: likewise, a function of a prompt's number and a row that lists what may follow.
            synced_gpus: has no effect: all processes of a mesh run one program.
            streamer: gets the prompts and each step's tokens.
            seed: of the tokens that are drawn; None goes on with the process's stream, which `trl_jax.set_seed` seeds.
            dtype: that the model computes in. None: on a CPU float32; elsewhere the 16-bit type that it is stored in,
                if it is.
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
        tokenizer, dtype = kwargs.pop("tokenizer", None), computing_dtype(self, dtype)
        settings, others = resolve(self, generation_config, kwargs)
        refuse_arguments(named | others)
        prompts = read_prompts(*_inputs(inputs, others), settings, self.backend.vocab_size)
        text = text_of(self, settings, prompts.width)
        caller = Caller(settings, prompts, logits_processor or (), stopping_criteria or (), prefix_allowed_tokens_fn)
        with caller.processors(*processors_of(settings, text)) as processors:
            watch = caller.watch(text, streamer, tokenizer)
            request = request_of(settings, text, *prompts.grouped(settings.completions), processors)
            request = replace(request, logps=bool(settings.config.return_dict_in_generate))
            drawing = drawing_of(settings, _stream(seed), dtype)
            completions = run(self, request, drawing, dtype=dtype, watch=watch)
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
        """Complete any number of prompts, `batch_size` completions at a time: where those of a prompt have ended, the
        next one takes its place.

        A completion's tokens depend on the seed and its number alone, whatever `batch_size`, but are not those of
        `generate`.

        Args:
            inputs: token ids of each prompt, without padding.
            batch_size: completions that are computed at once.
            progress_bar: show how many tokens were drawn, and how many a second.
            generation_config: as in `generate`, like `seed`, `dtype` and `kwargs`.

        Returns a Completion by its request_id, "req_0", "req_1", ..., those of a prompt side by side. After a Ctrl-C
        these are as many as are there.
        """
        if not len(inputs):
            return {}
        tokenizer, dtype = kwargs.pop("tokenizer", None), computing_dtype(self, dtype)
        settings, others = resolve(self, generation_config, kwargs)
        _check_unused(others, ())
        options = {"batch_size": batch_size, "dtype": dtype, "tokenizer": tokenizer}
        batches = Batches(self, settings, inputs, stream=_stream(seed), **options)
        done = collected(batches, len(inputs) * settings.completions, progress_bar=progress_bar)
        return {one.request_id: one for one in done}

    def generate_text(
        self,
        prompts: Sequence[str | Sequence[dict[str, Any]]],
        tokenizer: Any,
        *,
        chat_template_kwargs: dict[str, Any] | None = None,
        **arguments: Any,
    ) -> list[Any]:
        """Complete texts or conversations: a string for each prompt, or a list of them with num_return_sequences.

        Args:
            tokenizer: the model's; its EOS and pad ids count where the model's generation_config has none.
            arguments: those of `generate_batch`.
        """
        options = chat_template_kwargs or {}
        ids = [encoded_prompt(prompt, tokenizer, f"Prompt {row}", **options) for row, prompt in enumerate(prompts)]
        arguments = ids_of_tokenizer(self, tokenizer, arguments)
        done = list(self.generate_batch(ids, tokenizer=tokenizer, **arguments).values())
        texts, group = [decoded(one.generated_tokens, tokenizer) for one in done], len(done) // max(1, len(ids))
        return texts if group <= 1 else [texts[start : start + group] for start in range(0, len(texts), group)]


def _stream(seed: int | None) -> TorchGenerator:
    return default_generator() if seed is None else TorchGenerator(seed)


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
    _check_unused(others, ("input_ids", "attention_mask", "token_type_ids", "trust_remote_code"))
    return inputs if ids is None else ids, others.get("attention_mask")


def _check_unused(others: Mapping[str, Any], known: tuple[str, ...]) -> None:
    unused = [name for name, value in others.items() if value is not None and name not in known]
    if unused:
        raise ValueError(
            f"The following `model_kwargs` are not used by the model: {unused} (note: typos in the generate arguments "
            "will also show up in this list)"
        )
