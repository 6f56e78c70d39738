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
_EXACT = ("DFLASH", "DSPARK")  # speculative decoding that returns log-probabilities after filters
_UNKNOWN_ADAPTER = "has never been loaded"  # in the reply to a request with an adapter that the server does not have
_ABSENT = ("allowed_token_ids", "bad_words")
_STRUCTURES = {"regex": "regex", "json": "json_schema", "grammar": "ebnf", "structural_tag": "structural_tag"}
_INSTEAD = "Start a vLLM server, or set use_vllm=False."


class Sglang:
    """An `Engine` of SGLang servers."""

    def __init__(self, urls: Sequence[str], needs: Requirements, limits: Limits):
        # Not /health: it generates a token, which the server cannot do while it loads weights.
        self.transport = Transport(urls, limits, "SGLang", self.command, alive="/ping")
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
        infos = transport.each("GET", "/server_info", missing_ok=True)
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
        self._speculative = next((own for own in algorithms if own not in (None, *_EXACT)), None)
        fits = needs.adapter_rank is not None and needs.fused_adapter
        # SGLang does not load adapters into data-parallel replicas.
        self.takes_adapters = fits and all(info["enable_lora"] and info["dp_size"] == 1 for info in infos)
        for url, info in zip(transport.urls, infos, strict=True):
            most = info["max_lora_rank"]
            if self.takes_adapters and most is not None and most < needs.adapter_rank:
                raise transport.unusable(
                    url, f"has --max-lora-rank {most}, and the adapter that is trained {needs.adapter_rank}"
                )

    def _check_logprobs(self) -> None:
        """Check the size of the vocabulary, and that log-probabilities depend on the temperature.

        The last token id is passed as `token_ids_logprob` because an out-of-vocabulary id in a prompt would crash the
        server.
        """
        transport, last = self.transport, self._needs.vocab_size - 1
        text = list(range(4))  # more than token 0, whose embedding may be 0: all tokens would then be equally probable
        asked = {
            "input_ids": [text, text], "return_logprob": True, "top_logprobs_num": 1, "token_ids_logprob": [last],
            "sampling_params": [{"max_new_tokens": 1, "temperature": temperature} for temperature in (1.0, 2.0)],
        }  # fmt: skip
        for url, reply in zip(
            transport.urls, transport.post_each("/generate", [asked] * len(transport.urls)), strict=True
        ):
            if isinstance(reply, str):
                raise transport.unusable(url, f"does not take the token id {last} ({reply})")
            names = ("output_top_logprobs", "output_token_ids_logprobs")
            found = np.asarray([[one["meta_info"][name][0][0][0] for name in names] for one in reply], np.float64)
            if self._needs.processed_logps and np.all(np.abs(found[0] - found[1]) < 1e-4):
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
        others = {_NAMES.get(name, name): value for name, value in options.others.items()}
        if absent := [name for name in _ABSENT if name in others]:
            raise ValueError(f"generation_kwargs has {absent}, which SGLang does not have. Leave it out.")
        parameters = {
            "max_new_tokens": options.max_tokens,
            "temperature": options.temperature,
            "top_p": 1.0 if options.top_p is None else options.top_p,
            "top_k": -1 if options.top_k is None else options.top_k,
            "min_p": 0.0 if options.min_p is None else options.min_p,
            "repetition_penalty": 1.0 if options.repetition_penalty is None else options.repetition_penalty,
            "stop_token_ids": list(options.ends),
        }
        structure, strings = others.pop("structured_outputs", {}), others.pop("stop_strings", None)
        parameters |= others | ({} if strings is None else {"stop": strings, "no_stop_trim": True})
        parameters["top_k"] = parameters["top_k"] if parameters["top_k"] > 0 else -1
        parameters |= _structure(structure if options.regex is None else {"regex": options.regex})
        self._check_filters(parameters)
        if options.never:
            never = {str(token): -100.0 for token in options.never}
            parameters["logit_bias"] = {**parameters.get("logit_bias", {}), **never}
        if parameters["repetition_penalty"] != 1.0:
            logger.warning(
                "repetition_penalty=%s: SGLang penalizes the tokens of a completion, not those of its prompt, which "
                "vLLM and transformers penalize, too.",
                parameters["repetition_penalty"],
            )
        return parameters

    def _check_filters(self, parameters: Mapping[str, Any]) -> None:
        """Raise ValueError if log-probabilities would ignore a filter, or if a filter would crash the server."""
        top_k, most = parameters["top_k"], self._most_filtered
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
        if not self._needs.processed_logps or 0 < top_k < most:
            return
        filters = {name: parameters[name] for name, off in (("top_p", 1.0), ("min_p", 0.0)) if parameters[name] != off}
        if top_k > 0:
            filters["top_k"] = top_k
        if filters:
            raise ValueError(
                f"SGLang's log-probabilities take {', '.join(filters)} into account only with a top_k below "
                f"{most} (--sampling-mask-max-tokens), got {filters}, and bias the importance sampling correction. "
                "Set such a top_k, or vllm_importance_sampling_correction=False."
            )

    async def complete(
        self, client: httpx2.AsyncClient, place: int, prompt: Prompt, parameters: Mapping[str, Any]
    ) -> Sampled:
        transport, url = self.transport, self.transport.urls[place]
        own = dict(parameters)
        if prompt.most is not None:
            own["max_new_tokens"] = min(prompt.most, own["max_new_tokens"])
        filtered = self._needs.processed_logps and own["top_k"] > 0
        body = {  # a batch of copies instead of `n`, which would give all completions the same seed
            "input_ids": [prompt.ids] * prompt.group, "return_logprob": True, "return_sampling_mask": filtered,
            "sampling_params": [own | {"sampling_seed": prompt.seed + number} for number in range(prompt.group)],
        }  # fmt: skip
        if self._adapter is not None:
            body["lora_path"] = [self._adapter] * prompt.group
        if prompt.images:
            body |= self._with_images(url, prompt)
        reply = await transport.answer(client, url, "POST", "/generate", body, within=transport.limits.request)
        if reply.status_code == 400 and self._adapter is not None and _UNKNOWN_ADAPTER in reply.text:
            raise StaleWeights(f"{url} has no adapter {self._adapter!r}")
        found = self._accepted(url, reply, prompt)
        if len(found) != prompt.group:
            raise transport.unusable(url, f"returned {len(found)} completions for {prompt.group}")
        completions, logps = [], []
        for one in found:
            info = one["meta_info"]
            if info["finish_reason"]["type"] == "abort":
                raise ServerError(f"The SGLang server at {url} aborted a completion ({brief(info['finish_reason'])}).")
            if prompt.images and one["prompt_token_ids"] != prompt.ids:
                raise self._other_ids(url, one["prompt_token_ids"], prompt)
            completions.append(token_ids(one["output_ids"], self._needs.vocab_size, f"A completion of {url}"))
            # output_token_sampling_logprobs are normalized over the tokens that pass the filters, output_token_logprobs
            # over the whole vocabulary.
            values = (
                info["output_token_sampling_logprobs"] if filtered else [at[0] for at in info["output_token_logprobs"]]
            )
            logps.append(transport.logps(url, values, completions[-1]))
        return Sampled(completions, logps, 0.0)

    def _with_images(self, url: str, prompt: Prompt) -> dict[str, Any]:
        """The parts of a request for a prompt with images, whose image tokens the server writes itself.

        Raises:
            ServerError: the prompt does not have one run of image tokens for each image.
        """
        image = self._needs.image_token
        ids = [own for number, own in enumerate(prompt.ids) if own != image or prompt.ids[number - 1 : number] != [own]]
        if ids.count(image) != len(prompt.images):
            raise ServerError(
                f"A prompt has {_count(len(prompt.images), 'image')} and {_count(ids.count(image), 'run')} of image "
                f"tokens, and the SGLang server at {url} takes one run for each. {_INSTEAD}"
            )
        # Loading weights does not flush the server's cache of image features, which finds them by these hashes.
        hashes = [
            hashlib.blake2b(f"{self._version} {own}".encode(), digest_size=8).hexdigest() for own in prompt.images
        ]
        each = {"input_ids": ids, "image_data": list(prompt.images), "mm_hashes": hashes}
        return {name: [own] * prompt.group for name, own in each.items()} | {"return_prompt_token_ids": True}

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

    def _other_ids(self, url: str, read: Sequence[int], prompt: Prompt) -> ServerError:
        """The error for a prompt with images that the server read as other tokens."""
        image, given = self._needs.image_token, prompt.ids
        if read.count(image) != given.count(image):
            return ServerError(
                f"The SGLang server at {url} has {read.count(image)} image tokens for a prompt with "
                f"{_count(len(prompt.images), 'image')}, and the trainer {given.count(image)}: the server processes "
                f"images of this model in another way. {_INSTEAD}"
            )
        at = next(
            (at for at, pair in enumerate(zip(read, given, strict=False)) if pair[0] != pair[1]),
            min(len(read), len(given)),
        )
        return ServerError(
            f"The SGLang server at {url} tokenized the text of a prompt with images again, and it differs from token "
            f"{at} on: {brief(read[at : at + 5])}, and {brief(given[at : at + 5])} in the request. This changes "
            "completions of earlier turns. The server's log says why it does not keep the tokens "
            f"(SGLANG_MM_AVOID_RETOKENIZE). {_INSTEAD}"
        )

    def score(self, ids: Sequence[int]) -> list[np.ndarray]:
        body = {
            "input_ids": list(map(int, ids)), "sampling_params": {"max_new_tokens": 0}, "return_logprob": True,
            "logprob_start_len": 0, "lora_path": self._adapter,
        }  # fmt: skip
        scores = []
        transport = self.transport
        replies = transport.post_each("/generate", [body] * len(transport.urls))
        for url, reply in zip(transport.urls, replies, strict=True):
            if isinstance(reply, str):
                raise transport.unusable(url, f"refused to score a text ({reply})")
            found = [value for value, *_ in reply["meta_info"]["input_token_logprobs"][1:]]
            scores.append(self.transport.logps(url, found, np.asarray(ids[1:])))
        return scores

    # Weights

    def load(self, folder: str, version: str) -> None:
        body = {"model_path": folder, "load_format": "auto", "weight_version": version}
        doing, within = f"load the weights in {folder}", self.transport.limits.load
        self.transport.each("POST", "/update_weights_from_disk", body, doing=doing, within=within)
        self._unload(self._adapter)
        self._adapter, self._version = None, version

    def load_adapter(self, folder: str, version: str) -> None:
        transport, before = self.transport, self._adapter
        doing = f"load the adapter in {folder}"
        how = {"refused_ok": "error_message", "doing": doing, "within": transport.limits.load}
        replies = transport.each("POST", "/load_lora_adapter", {"lora_name": version, "lora_path": folder}, **how)
        for url, reply in zip(transport.urls, replies, strict=True):
            if (reply.get("loaded_adapters") or {}).get(version) != folder:
                raise transport.unusable(url, f"could not {doing} ({brief(reply.get('error_message', reply))})")
        self._adapter = version
        self._unload(before)

    def _unload(self, adapter: str | None) -> None:
        """Unload an adapter. A server that was restarted no longer has it, and refuses the request."""
        if adapter is not None:
            doing, within = f"unload the adapter {adapter}", self.transport.limits.load
            how = {"refused_ok": "does not exist", "doing": doing, "within": within}
            self.transport.each("POST", "/unload_lora_adapter", {"lora_name": adapter}, **how)

    def versions(self) -> list[str]:
        return [reply["weight_version"] for reply in self.transport.each("GET", "/model_info")]


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _structure(asked: Mapping[str, Any]) -> dict[str, str]:
    """Convert vLLM's `structured_outputs` to SGLang's sampling parameters.

    Raises:
        ValueError: SGLang has no equivalent.
    """
    if absent := [name for name in asked if name not in _STRUCTURES]:
        raise ValueError(
            f"structured_outputs in generation_kwargs has {absent}, which SGLang does not have. It has: "
            f"{', '.join(_STRUCTURES)}."
        )
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in asked.items()}
    return {_STRUCTURES[name]: text for name, text in texts.items()}
