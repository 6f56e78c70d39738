"""The `Engine` for vLLM servers.

Text prompts are completed by `/v1/completions`. For prompts with images, `/v1/chat/completions/render` processes the
images, and the result is sent to `/inference/v1/generate` with the token ids. Weights are loaded from a folder with the
endpoints of vLLM's development mode (see `Vllm.load`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
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
    ServerSilent,
    StaleWeights,
    Transport,
    port_of,
)

_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # values that --max-lora-rank accepts


class Vllm:
    """An `Engine` of vLLM servers."""

    def __init__(self, urls: Sequence[str], needs: Requirements, limits: Limits):
        self.transport = Transport(urls, limits, "vLLM", self.command)
        self.takes_adapters, self.context_length = False, None  # known after `ready`
        self._needs = needs
        self._models = [needs.model] * len(urls)  # each server's name for the base model
        self._adapter: str | None = None  # name of the current adapter

    def command(self, url: str) -> str:
        command = (
            f"VLLM_SERVER_DEV_MODE=1 vllm serve {self._needs.model} --port {port_of(url)} "
            "--logprobs-mode processed_logprobs"
        )
        if not self.takes_adapters:
            return command
        rank = next(rank for rank in _RANKS if rank >= min(self._needs.adapter_rank, _RANKS[-1]))
        return f"VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 {command} --enable-lora --max-lora-rank {rank}"

    # Startup checks

    def ready(self, cards: Sequence[Mapping[str, Any]]) -> None:
        transport, needs = self.transport, self._needs
        for index, (url, card) in enumerate(zip(transport.urls, cards, strict=True)):
            self._models[index] = card["id"]
            longest = card.get("max_model_len")
            self.context_length = min(filter(None, (longest, self.context_length)), default=None)
            if longest is not None and longest < needs.max_tokens:
                raise ServerError(
                    f"The vLLM server at {url} has --max-model-len {longest}, but a prompt with its completion may "
                    f"have {needs.max_tokens} tokens. Start it with: {self.command(url)} --max-model-len "
                    f"{needs.max_tokens}"
                )
        ranks = []
        for path in ("/server_info?config_format=json", "/weight_info"):
            for url, reply in zip(transport.urls, transport.request_all("GET", path, missing_ok=True), strict=True):
                if reply is None:
                    raise transport.unusable(
                        url,
                        f"has no {path.partition('?')[0]}, which vLLM 0.32 and later have in development mode "
                        "(VLLM_SERVER_DEV_MODE=1)",
                    )
                if path.startswith("/server_info"):
                    self._check_logprobs_mode(url, reply)
                    ranks.append((reply["vllm_config"].get("lora_config") or {}).get("max_lora_rank"))
        transport.request_all("POST", "/resume")  # a run that was killed while it loaded weights leaves a server paused
        self.takes_adapters = needs.adapter_rank is not None and all(ranks)
        if self.takes_adapters and min(ranks) < needs.adapter_rank:
            url = transport.urls[ranks.index(min(ranks))]
            raise transport.unusable(
                url, f"has --max-lora-rank {min(ranks)}, and the adapter that is trained {needs.adapter_rank}"
            )
        body = {"prompt": [needs.vocab_size - 1], "max_tokens": 1}
        for url, model, reply in zip(transport.urls, self._models, self._completed(body), strict=True):
            if isinstance(reply, str):
                raise transport.unusable(
                    url, f"serves {model!r}, which does not take the token id {needs.vocab_size - 1} ({reply})"
                )

    def _check_logprobs_mode(self, url: str, info: Mapping[str, Any]) -> None:
        mode = info["vllm_config"]["model_config"]["logprobs_mode"]
        if self._needs.processed_logps and mode != "processed_logprobs":
            raise self.transport.unusable(
                url,
                f"runs with --logprobs-mode {mode}, whose log-probabilities ignore temperature and filters and bias "
                "the importance sampling correction (vllm_importance_sampling_correction=False does without it)",
            )

    def _model_of(self, server: int) -> str:
        """The `model` of requests to a server: the current adapter's name, or the base model's."""
        return self._models[server] if self._adapter is None else self._adapter

    def _completed(self, body: Mapping[str, Any]) -> list[dict[str, Any] | str]:
        """The replies of all servers to a request for completions; the text of the refusal where one refuses."""
        bodies = [body | {"model": self._model_of(server)} for server in range(len(self.transport.urls))]
        return self.transport.post_all("/v1/completions", bodies)

    # Completions

    def parameters(self, options: SamplingOptions) -> dict[str, Any]:
        parameters = {
            "max_tokens": options.max_tokens,
            "temperature": options.temperature,
            "top_p": 1.0 if options.top_p is None else options.top_p,
            "top_k": 0 if options.top_k is None else max(options.top_k, 0),
            "min_p": 0.0 if options.min_p is None else options.min_p,
            "repetition_penalty": 1.0 if options.repetition_penalty is None else options.repetition_penalty,
            "stop_token_ids": list(options.eos_token_ids),
        }
        strings = options.generation_kwargs.get("stop_strings")
        parameters |= {name: value for name, value in options.generation_kwargs.items() if name != "stop_strings"}
        if strings is not None:
            parameters |= {"stop": strings, "include_stop_str_in_output": True}
        if options.suppressed_ids:
            suppressed = {str(token): -100.0 for token in options.suppressed_ids}
            parameters["logit_bias"] = {**parameters.get("logit_bias", {}), **suppressed}
        return parameters if options.regex is None else parameters | {"structured_outputs": {"regex": options.regex}}

    async def complete(
        self, client: httpx2.AsyncClient, server: int, prompt: Prompt, parameters: Mapping[str, Any]
    ) -> Sampled:
        transport, url = self.transport, self.transport.urls[server]
        body = dict(parameters) | {
            "prompt": prompt.ids, "n": prompt.group, "seed": prompt.seed, "logprobs": 0, "return_token_ids": True,
            "model": self._model_of(server),
        }  # fmt: skip
        if prompt.max_tokens is not None:
            body["max_tokens"] = min(prompt.max_tokens, body["max_tokens"])
        path = "/inference/v1/generate" if prompt.images else "/v1/completions"
        body = await self._with_images(client, url, body, prompt.images) if prompt.images else body
        reply = await transport.answer(client, url, "POST", path, body, within=transport.limits.request)
        if reply.status_code == 404 and self._adapter is not None:
            raise StaleWeights(f"{url} has no adapter {self._adapter!r}")
        return self._read(url, transport.accepted(url, reply), prompt.group)

    async def _with_images(
        self, client: httpx2.AsyncClient, url: str, body: Mapping[str, Any], images: Sequence[str]
    ) -> dict[str, Any]:
        """Convert a request of `/v1/completions` and the prompt's images to a request of `/inference/v1/generate`.

        Raises:
            ServerError: the server cannot process images, or the number of tokens per image differs from the prompt's.
        """
        body = {name: value for name, value in body.items() if name != "return_token_ids"}
        ids, model = body.pop("prompt"), body.pop("model")
        parts = [{"type": "image_url", "image_url": {"url": image}} for image in images]
        request = {"model": model, "messages": [{"role": "user", "content": parts}], "max_tokens": 1}
        reply = await self.transport.answer(client, url, "POST", "/v1/chat/completions/render", request)
        if reply.status_code == 404:
            raise ServerError(
                f"The vLLM server at {url} has no /v1/chat/completions/render, which prompts with images need. Start "
                f"it with: {self.command(url)} --enable-scale-out"
            )
        features = dict(self.transport.accepted(url, reply)["features"] or {})
        placeholders = features.get("mm_placeholders", {}).get("image")
        if placeholders is None:
            raise self.transport.unusable(url, "found no images in a prompt with images")
        lengths = [placeholder["length"] for placeholder in placeholders]
        image_placeholders = _image_placeholders(ids, self._needs.image_token, lengths)
        if image_placeholders is None:
            raise ServerError(
                f"The vLLM server at {url} has images of {lengths} tokens, and the prompt of "
                f"{_run_lengths(ids, self._needs.image_token)}: it processes them otherwise, or this model's images "
                "are not one run of image tokens each, which is not in this release of trl_jax. Set use_vllm=False."
            )
        features["mm_placeholders"] = {**features["mm_placeholders"], "image": image_placeholders}
        sampling_params = body | {"output_kind": 2}  # FINAL_ONLY: one reply when all completions are finished
        return {"model": model, "token_ids": ids, "features": features, "sampling_params": sampling_params}

    def _read(self, url: str, reply: Mapping[str, Any], group: int) -> Sampled:
        choices = sorted(reply["choices"], key=lambda choice: choice["index"])
        if len(choices) != group or any(choice.get("token_ids") is None for choice in choices):
            raise self.transport.unusable(
                url, f"returned {brief(reply['choices'])} for {group} completions with their token ids"
            )
        completions, logps = [], []
        for choice in choices:
            if choice.get("finish_reason") == "abort":
                raise ServerError(f"The vLLM server at {url} aborted a completion: another run may have paused it.")
            completions.append(token_ids(choice["token_ids"], self._needs.vocab_size, f"A completion of {url}"))
            logprobs = choice["logprobs"]
            if logprobs is None:
                raise self.transport.unusable(url, "returned a completion without log-probabilities")
            if "content" in logprobs:  # from /inference/v1/generate
                logprobs = [entry["logprob"] for entry in logprobs["content"]]
            else:
                logprobs = logprobs["token_logprobs"]
            logps.append(self.transport.logps(url, logprobs, completions[-1]))
        return Sampled(completions, logps, 0.0)

    def score(self, ids: Sequence[int]) -> list[np.ndarray]:
        body = {"prompt": list(map(int, ids)), "max_tokens": 1, "prompt_logprobs": 0}
        scores = []
        for url, reply in zip(self.transport.urls, self._completed(body), strict=True):
            if isinstance(reply, str):
                raise self.transport.unusable(url, f"refused to score a text ({reply})")
            entries = reply["choices"][0]["prompt_logprobs"][1:]
            logprobs = [entry[str(int(token))]["logprob"] for entry, token in zip(entries, ids[1:], strict=True)]
            scores.append(np.asarray(logprobs, np.float32))
        return scores

    # Weights

    def load(self, folder: str, version: str) -> None:
        request_all, adapter = self.transport.request_all, self._adapter
        try:
            request_all("POST", "/pause?mode=wait")
            body = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
            doing, within = f"load the weights in {folder}", self.transport.limits.load
            request_all("POST", "/collective_rpc", body, doing=doing, within=within)
            request_all("POST", "/reset_prefix_cache")
            request_all("POST", "/update_weight_version", {"new_version": version})
        except ServerSilent:
            raise
        except ServerError:
            request_all("POST", "/resume")
            raise
        request_all("POST", "/resume")
        if adapter is not None:
            request_all("POST", "/v1/unload_lora_adapter", {"lora_name": adapter}, missing_ok=True)
        self._adapter = None

    def load_adapter(self, folder: str, version: str) -> None:
        request_all, previous = self.transport.request_all, self._adapter
        doing, within = f"load the adapter in {folder}", self.transport.limits.load
        # A request that is sent again after a lost reply finds its own adapter. (`load_inplace` would accept it, but
        # then the server reads the folder in every step of its engine.)
        options = {"missing_ok": True, "refused_ok": "has already been loaded", "doing": doing, "within": within}
        replies = request_all("POST", "/v1/load_lora_adapter", {"lora_name": version, "lora_path": folder}, **options)
        for url, reply in zip(self.transport.urls, replies, strict=True):
            if reply is None:
                raise self.transport.unusable(
                    url, f"could not {doing}: it does not see the folder, or lacks VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
                )
        self._adapter = version
        if previous is not None:
            request_all("POST", "/v1/unload_lora_adapter", {"lora_name": previous}, missing_ok=True)

    def versions(self) -> list[str]:
        return [reply["weight_version"] for reply in self.transport.request_all("GET", "/weight_info")]


def _image_placeholders(ids: Sequence[int], token: int, lengths: Sequence[int]) -> list[dict[str, int]] | None:
    """Offset and length of each image, whose `lengths` are the numbers of consecutive occurrences of `token`; None if
    the text does not have such images."""
    positions, placeholders = [index for index, token_id in enumerate(ids) if token_id == token], []
    for length in lengths:
        run, positions = positions[:length], positions[length:]
        if len(run) != length or run[-1] - run[0] != length - 1:
            return None
        placeholders.append({"offset": run[0], "length": length})
    return None if positions else placeholders


def _run_lengths(ids: Sequence[int], token: int) -> list[int]:
    """The length of each run of consecutive occurrences of `token`."""
    return [len(list(run)) for token_id, run in groupby(ids) if token_id == token]
