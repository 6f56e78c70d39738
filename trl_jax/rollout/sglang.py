"""The `Engine` for SGLang servers.

`/generate` completes prompts and scores texts. `/update_weights_from_disk` loads weights from a folder: it waits for
running completions, blocks new ones meanwhile, and flushes the prefix cache.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import httpx2
import numpy as np

from trl_jax.core.text import brief
from trl_jax.data.checks import token_ids
from trl_jax.rollout.server import (
    Limits,
    Prompt,
    Requirements,
    Sampled,
    SamplingOptions,
    ServerError,
    StaleWeights,
    Transport,
    is_local,
    port_of,
)

logger = logging.getLogger(__name__)

# generation_kwargs use vLLM's names. vLLM's name -> SGLang's, where they differ:
_NAMES = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "include_stop_str_in_output": "no_stop_trim"}
_EXACT_SPECULATION = ("DFLASH", "DSPARK")  # speculative decoding that returns log-probabilities after filters
_UNKNOWN_ADAPTER = "has never been loaded"  # in the reply to a request with an adapter that the server does not have
_UNSUPPORTED = ("allowed_token_ids", "bad_words")
_STRUCTURES = {"regex": "regex", "json": "json_schema", "grammar": "ebnf", "structural_tag": "structural_tag"}
_ADVICE = "Start a vLLM server, or set use_vllm=False."


class Sglang:
    """An `Engine` of SGLang servers."""

    def __init__(self, urls: Sequence[str], needs: Requirements, limits: Limits):
        # Not /health: it generates a token, which the server cannot do while it loads weights.
        self.transport = Transport(urls, limits, "SGLang", self.command, health="/ping")
        self._needs = needs
        self.takes_adapters, self.context_length = False, None  # known after `ready`
        self._deterministic, self._most_filtered, self._speculative = False, 0, None  # known after `ready`
        self._adapter: str | None = None  # name of the current adapter
        self._version: str | None = None  # of the current weights

    def command(self, url: str) -> str:
        host = "" if is_local(url) else " --host 0.0.0.0"
        command = f"sglang serve --model-path {self._needs.model} --port {port_of(url)}{host}"
        if not self.takes_adapters:
            return command
        return f"{command} --enable-lora --max-lora-rank {self._needs.adapter_rank} --lora-target-modules all"

    # Startup checks

    def ready(self, cards: Sequence[Mapping[str, Any]]) -> None:
        transport, needs = self.transport, self._needs
        for url, card in zip(transport.urls, cards, strict=True):
            longest = card["max_model_len"]
            self.context_length = min(longest, self.context_length or longest)
            if longest < needs.max_tokens:
                raise ServerError(
                    f"The SGLang server at {url} has --context-length {longest}, but a prompt with its completion may "
                    f"have {needs.max_tokens} tokens. Start it with: {self.command(url)} --context-length "
                    f"{needs.max_tokens}"
                )
        infos = transport.request_all("GET", "/server_info", missing_ok=True)
        for url, info in zip(transport.urls, infos, strict=True):
            if info is None or "sampling_mask_max_tokens" not in info:
                raise transport.unusable(
                    url,
                    "has no /server_info like that of SGLang 0.5.23, which trl_jax uses: it is older, or SGLang-JAX",
                )
        self._deterministic = any(info["enable_deterministic_inference"] for info in infos)
        if not all(info["enable_deterministic_inference"] for info in infos):
            logger.warning(
                "SGLang ignores seeds unless it runs with --enable-deterministic-inference: a repeated run samples "
                "other completions."
            )
        self._most_filtered = min(info["sampling_mask_max_tokens"] for info in infos)
        self._check_server_arguments(infos)
        self._check_logprobs()

    def _check_server_arguments(self, infos: Sequence[Mapping[str, Any]]) -> None:
        transport, needs = self.transport, self._needs
        algorithms = [info["speculative_algorithm"] for info in infos]
        self._speculative = next((name for name in algorithms if name not in (None, *_EXACT_SPECULATION)), None)
        adapter_fits = needs.adapter_rank is not None and needs.fused_adapter
        # SGLang does not load adapters into data-parallel replicas.
        self.takes_adapters = adapter_fits and all(info["enable_lora"] and info["dp_size"] == 1 for info in infos)
        for url, info in zip(transport.urls, infos, strict=True):
            max_rank = info["max_lora_rank"]
            if self.takes_adapters and max_rank is not None and max_rank < needs.adapter_rank:
                raise transport.unusable(
                    url, f"has --max-lora-rank {max_rank}, and the adapter that is trained {needs.adapter_rank}"
                )

    def _check_logprobs(self) -> None:
        """Check the size of the vocabulary, and that log-probabilities depend on the temperature.

        The last token id is passed as `token_ids_logprob` because an out-of-vocabulary id in a prompt would crash the
        server.
        """
        transport, last_id = self.transport, self._needs.vocab_size - 1
        text = list(range(4))  # more than token 0, whose embedding may be 0: all tokens would then be equally probable
        request = {
            "input_ids": [text, text], "return_logprob": True, "top_logprobs_num": 1, "token_ids_logprob": [last_id],
            "sampling_params": [{"max_new_tokens": 1, "temperature": temperature} for temperature in (1.0, 2.0)],
        }  # fmt: skip
        for url, reply in zip(
            transport.urls, transport.post_all("/generate", [request] * len(transport.urls)), strict=True
        ):
            if isinstance(reply, str):
                raise transport.unusable(url, f"does not take the token id {last_id} ({reply})")
            names = ("output_top_logprobs", "output_token_ids_logprobs")
            infos = [completion["meta_info"] for completion in reply]
            logprobs = np.asarray([[info[name][0][0][0] for name in names] for info in infos], np.float64)
            if self._needs.processed_logps and np.all(np.abs(logprobs[0] - logprobs[1]) < 1e-4):
                raise self.transport.unusable(
                    url,
                    "runs with SGLANG_RETURN_ORIGINAL_LOGPROB=1, whose log-probabilities ignore temperature and bias "
                    "the importance sampling correction (vllm_importance_sampling_correction=False does without it)",
                )

    # Completions

    def parameters(self, options: SamplingOptions) -> dict[str, Any]:
        """See `Engine.parameters`.

        Raises:
            ValueError: SGLang lacks one of the parameters, would ignore it in log-probabilities, or would crash on it.
        """
        engine_kwargs = {_NAMES.get(name, name): value for name, value in options.generation_kwargs.items()}
        if absent := [name for name in _UNSUPPORTED if name in engine_kwargs]:
            raise ValueError(f"generation_kwargs has {absent}, which SGLang does not have. Leave it out.")
        parameters = {
            "max_new_tokens": options.max_tokens,
            "temperature": options.temperature,
            "top_p": 1.0 if options.top_p is None else options.top_p,
            "top_k": -1 if options.top_k is None else options.top_k,
            "min_p": 0.0 if options.min_p is None else options.min_p,
            "repetition_penalty": 1.0 if options.repetition_penalty is None else options.repetition_penalty,
            "stop_token_ids": list(options.eos_token_ids),
        }
        structured_outputs = engine_kwargs.pop("structured_outputs", {})
        strings = engine_kwargs.pop("stop_strings", None)
        parameters |= engine_kwargs | ({} if strings is None else {"stop": strings, "no_stop_trim": True})
        parameters["top_k"] = parameters["top_k"] if parameters["top_k"] > 0 else -1
        parameters |= _structure(structured_outputs if options.regex is None else {"regex": options.regex})
        self._check_filters(parameters)
        if options.suppressed_ids:
            suppressed = {str(token): -100.0 for token in options.suppressed_ids}
            parameters["logit_bias"] = {**parameters.get("logit_bias", {}), **suppressed}
        if parameters["repetition_penalty"] != 1.0:
            logger.warning(
                "repetition_penalty=%s: SGLang penalizes the tokens of a completion, not those of its prompt, which "
                "vLLM and transformers penalize, too.",
                parameters["repetition_penalty"],
            )
        return parameters

    def _check_filters(self, parameters: Mapping[str, Any]) -> None:
        """Raise ValueError if log-probabilities would ignore a filter, or if a filter would crash the server."""
        top_k, limit = parameters["top_k"], self._most_filtered
        if self._deterministic and parameters["min_p"] > 0:
            raise ValueError(
                f"min_p={parameters['min_p']} ends an SGLang server that runs with --enable-deterministic-inference. "
                "Start it without, or leave min_p out."
            )
        if self._needs.processed_logps and top_k > 0 and self._speculative is not None:
            raise ValueError(
                f"top_k={top_k}: an SGLang server that runs with --speculative-algorithm {self._speculative} does not "
                "return log-probabilities after filters, which the importance sampling correction needs. Start it "
                "without speculative decoding, leave top_k out, or set vllm_importance_sampling_correction=False."
            )
        if not self._needs.processed_logps or 0 < top_k < limit:
            return
        neutral = {"top_p": 1.0, "min_p": 0.0}
        filters = {name: parameters[name] for name, value in neutral.items() if parameters[name] != value}
        if top_k > 0:
            filters["top_k"] = top_k
        if filters:
            raise ValueError(
                f"SGLang's log-probabilities take {', '.join(filters)} into account only with a top_k below "
                f"{limit} (--sampling-mask-max-tokens), got {filters}, and bias the importance sampling correction. "
                "Set such a top_k, or vllm_importance_sampling_correction=False."
            )

    async def complete(
        self, client: httpx2.AsyncClient, server: int, prompt: Prompt, parameters: Mapping[str, Any]
    ) -> Sampled:
        transport, url = self.transport, self.transport.urls[server]
        sampling_params = dict(parameters)
        if prompt.max_tokens is not None:
            sampling_params["max_new_tokens"] = min(prompt.max_tokens, sampling_params["max_new_tokens"])
        filtered = self._needs.processed_logps and sampling_params["top_k"] > 0
        body = {  # a batch of copies instead of `n`, which would give all completions the same seed
            "input_ids": [prompt.ids] * prompt.group, "return_logprob": True, "return_sampling_mask": filtered,
            "sampling_params": [sampling_params | {"sampling_seed": prompt.seed + i} for i in range(prompt.group)],
        }  # fmt: skip
        if self._adapter is not None:
            body["lora_path"] = [self._adapter] * prompt.group
        if prompt.images:
            body |= self._with_images(url, prompt)
        reply = await transport.answer(client, url, "POST", "/generate", body, within=transport.limits.request)
        if reply.status_code == 400 and self._adapter is not None and _UNKNOWN_ADAPTER in reply.text:
            raise StaleWeights(f"{url} has no adapter {self._adapter!r}")
        outputs = self._accepted(url, reply, prompt)
        if len(outputs) != prompt.group:
            raise transport.unusable(url, f"returned {len(outputs)} completions for {prompt.group}")
        completions, logps = [], []
        for output in outputs:
            info = output["meta_info"]
            if info["finish_reason"]["type"] == "abort":
                raise ServerError(f"The SGLang server at {url} aborted a completion ({brief(info['finish_reason'])}).")
            if prompt.images and output["prompt_token_ids"] != prompt.ids:
                raise self._retokenized(url, output["prompt_token_ids"], prompt)
            completions.append(token_ids(output["output_ids"], self._needs.vocab_size, f"A completion of {url}"))
            # output_token_sampling_logprobs are normalized over the tokens that pass the filters, output_token_logprobs
            # over the whole vocabulary.
            if filtered:
                row_logps = info["output_token_sampling_logprobs"]
            else:
                row_logps = [logp for logp, *_ in info["output_token_logprobs"]]
            logps.append(transport.logps(url, row_logps, completions[-1]))
        return Sampled(completions, logps, 0.0)

    def _with_images(self, url: str, prompt: Prompt) -> dict[str, Any]:
        """The parts of a request for a prompt with images, whose image tokens the server writes itself.

        Raises:
            ServerError: the prompt does not have one run of image tokens for each image.
        """
        image_token = self._needs.image_token
        pairs = zip(prompt.ids, [None, *prompt.ids], strict=False)  # each token and the one before it
        ids = [token for token, previous in pairs if token != image_token or previous != image_token]
        if ids.count(image_token) != len(prompt.images):
            raise ServerError(
                f"A prompt has {_count(len(prompt.images), 'image')} and {_count(ids.count(image_token), 'run')} of "
                f"image tokens, and the SGLang server at {url} takes one run for each. {_ADVICE}"
            )
        # Loading weights does not flush the server's cache of image features, which finds them by these hashes.
        hashes = [
            hashlib.blake2b(f"{self._version} {image}".encode(), digest_size=8).hexdigest() for image in prompt.images
        ]
        body = {"input_ids": ids, "image_data": list(prompt.images), "mm_hashes": hashes}
        return {name: [value] * prompt.group for name, value in body.items()} | {"return_prompt_token_ids": True}

    def _accepted(self, url: str, reply: httpx2.Response, prompt: Prompt) -> Any:
        """Like `Transport.accepted`. In prompts with images, SGLang refuses placeholders without an image, a video or
        audio, which it looks for in the text."""
        try:
            return self.transport.accepted(url, reply)
        except ServerError as error:
            if not prompt.images or reply.status_code != 400:
                raise
            media = sorted({*self._needs.other_media} & {*prompt.ids})
            cause = "may have text that SGLang takes for another placeholder, such as a literal <image>"
            if media:
                cause = f"has the tokens {media}, placeholders of videos or audio"
            raise ServerError(
                f"{error} The prompt has {_count(len(prompt.images), 'image')} and {cause}. Remove it from prompts and "
                "answers of tools."
            ) from error

    def _retokenized(self, url: str, read: Sequence[int], prompt: Prompt) -> ServerError:
        """The error for a prompt with images that the server read as other tokens."""
        image, sent = self._needs.image_token, prompt.ids
        if read.count(image) != sent.count(image):
            return ServerError(
                f"The SGLang server at {url} has {read.count(image)} image tokens for a prompt with "
                f"{_count(len(prompt.images), 'image')}, and the trainer {sent.count(image)}: the server processes "
                f"images of this model in another way. {_ADVICE}"
            )
        first = next(
            (index for index, pair in enumerate(zip(read, sent, strict=False)) if pair[0] != pair[1]),
            min(len(read), len(sent)),
        )
        return ServerError(
            f"The SGLang server at {url} tokenized the text of a prompt with images again, and it differs from token "
            f"{first} on: {brief(read[first : first + 5])}, and {brief(sent[first : first + 5])} in the request. This "
            "changes completions of earlier turns. The server's log says why it does not keep the tokens "
            f"(SGLANG_MM_AVOID_RETOKENIZE). {_ADVICE}"
        )

    def score(self, ids: Sequence[int]) -> list[np.ndarray]:
        body = {
            "input_ids": list(map(int, ids)), "sampling_params": {"max_new_tokens": 0}, "return_logprob": True,
            "logprob_start_len": 0, "lora_path": self._adapter,
        }  # fmt: skip
        scores = []
        transport = self.transport
        replies = transport.post_all("/generate", [body] * len(transport.urls))
        for url, reply in zip(transport.urls, replies, strict=True):
            if isinstance(reply, str):
                raise transport.unusable(url, f"refused to score a text ({reply})")
            logprobs = [value for value, *_ in reply["meta_info"]["input_token_logprobs"][1:]]
            scores.append(self.transport.logps(url, logprobs, np.asarray(ids[1:])))
        return scores

    # Weights

    def load(self, folder: str, version: str) -> None:
        body = {"model_path": folder, "load_format": "auto", "weight_version": version}
        doing, within = f"load the weights in {folder}", self.transport.limits.load
        self.transport.request_all("POST", "/update_weights_from_disk", body, doing=doing, within=within)
        self._unload(self._adapter)
        self._adapter, self._version = None, version

    def load_adapter(self, folder: str, version: str) -> None:
        transport, previous = self.transport, self._adapter
        doing = f"load the adapter in {folder}"
        options = {"refused_ok": "error_message", "doing": doing, "within": transport.limits.load}
        body = {"lora_name": version, "lora_path": folder}
        replies = transport.request_all("POST", "/load_lora_adapter", body, **options)
        for url, reply in zip(transport.urls, replies, strict=True):
            if (reply.get("loaded_adapters") or {}).get(version) != folder:
                raise transport.unusable(url, f"could not {doing} ({brief(reply.get('error_message', reply))})")
        self._adapter = version
        self._unload(previous)

    def _unload(self, adapter: str | None) -> None:
        """Unload an adapter. A server that was restarted no longer has it, and refuses the request."""
        if adapter is not None:
            doing, within = f"unload the adapter {adapter}", self.transport.limits.load
            options = {"refused_ok": "does not exist", "doing": doing, "within": within}
            self.transport.request_all("POST", "/unload_lora_adapter", {"lora_name": adapter}, **options)

    def versions(self) -> list[str]:
        return [reply["weight_version"] for reply in self.transport.request_all("GET", "/model_info")]


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _structure(structured_outputs: Mapping[str, Any]) -> dict[str, str]:
    """Convert vLLM's `structured_outputs` to SGLang's sampling parameters.

    Raises:
        ValueError: SGLang has no equivalent.
    """
    if absent := [name for name in structured_outputs if name not in _STRUCTURES]:
        raise ValueError(
            f"structured_outputs in generation_kwargs has {absent}, which SGLang does not have. It has: "
            f"{', '.join(_STRUCTURES)}."
        )
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in structured_outputs.items()}
    return {_STRUCTURES[name]: text for name, text in texts.items()}
