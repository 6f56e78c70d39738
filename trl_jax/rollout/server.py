"""Completions by vLLM servers over HTTP: `use_vllm=True, vllm_mode="server"`.

Prompts go to `/v1/completions` as token ids; token ids and their log-probabilities come back. Each prompt is one
request for all of its completions and has its own seed, so that completions do not depend on how prompts are divided
over several servers. The images of a prompt are processed by `/v1/chat/completions/render`, and what that returns goes
to `/inference/v1/generate` with the token ids. Weights are loaded from a folder by the endpoints of vLLM's development
mode (`VllmServers.load`).
"""

from __future__ import annotations

import asyncio
import base64
import concurrent.futures
import io
import ipaddress
import logging
import math
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from threading import Thread
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx2
import numpy as np

from trl_jax.core.text import brief
from trl_jax.data.checks import token_ids

logger = logging.getLogger(__name__)

_AT_ONCE = 256  # requests in flight per server; vLLM queues what it cannot run
_SPEAKS_AFTER, _SPEAKS_EVERY = 5.0, 30.0  # seconds of waiting
_ANSWERS_WITHIN = 10.0  # seconds that a server may take to say that it is healthy
_BUSY = (502, 503, 504)
_RETRY_AFTER = 0.5  # seconds
_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # that --max-lora-rank takes

Progress = Callable[[int, int], None]


class ServerError(RuntimeError):
    """A server cannot be used, or no longer answers."""


class ServerSilent(ServerError):
    """A server did not answer for the whole timeout."""


class StaleWeights(Exception):
    """A server generated with other weights than the ones loaded last: it was restarted, or another run loaded some."""


class Sampled(NamedTuple):
    """Completions of prompts, with all completions of a prompt in a row.

    completions: token ids, int32 `[tokens]` each. logps: float32 `[tokens]` each, NaN where the server has none.
    seconds: that the servers took.
    """

    completions: list[np.ndarray]
    logps: list[np.ndarray]
    seconds: float


@dataclass(frozen=True)
class Limits:
    """How long servers may take, in seconds, and how much they are asked for at once.

    answer: how long requests to an unreachable server are retried.
    alive: how long `/health` may fail while the server generates; None means `answer`.
    request: timeout of a completion request, which is then retried as long as `answer` allows.
    load: timeout for loading weights.
    at_once: maximum number of completions in flight; None means 256 prompts per server.
    """

    answer: float
    alive: float | None = None
    request: float | None = None
    load: float | None = None
    at_once: int | None = None


@dataclass(frozen=True)
class Requirements:
    """What a run needs of a server.

    model: the name or folder that the server is started with. vocab_size: token ids are below it.
    max_tokens: of a prompt with its completion, as far as it is known beforehand.
    processed_logps: whether log-probabilities must be those after temperature and filters.
    image_token: the placeholder token of images in prompts; None if there are no images.
    adapter_rank: the largest rank of an adapter that can be loaded by itself; None if there is no such adapter.
    """

    model: str
    vocab_size: int
    max_tokens: int
    processed_logps: bool
    image_token: int | None = None
    adapter_rank: int | None = None


def is_local(url: str) -> bool:
    """Whether a server's URL is on this machine."""
    host = urlsplit(url).hostname or ""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return address.is_loopback or address.is_unspecified


def server_urls(base_url: str | None, host: str, port: int) -> list[str]:
    """The servers' URLs: the comma-separated ones in `base_url`, or the one made of `host` and `port`.

    Raises:
        ValueError: something in `base_url` is not an HTTP URL.
    """
    if base_url is None:
        return [f"http://{f'[{host}]' if ':' in host else host}:{port}"]
    urls = [url.strip().rstrip("/") for url in base_url.split(",") if url.strip()]
    wrong = [url for url in urls if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname]
    if wrong or not urls:
        raise ValueError(
            f"vllm_server_base_url must be URLs such as 'http://10.0.0.2:8000', separated by commas, got "
            f"{(wrong or [base_url])[0]!r}."
        )
    return urls


class VllmServers:
    """A client of one or several vLLM servers with the same model.

    Args:
        urls: prompts are divided over them in turn.
        requirements: what `check` expects, and what the command in errors starts.
        limits: after which a server that does not answer ends the run.
    """

    def __init__(self, urls: Sequence[str], requirements: Requirements, limits: Limits):
        self.urls, self._limits, self._needs = list(urls), limits, requirements
        self._models = [requirements.model] * len(self.urls)  # the names under which they are served
        self.version: str | None = None  # of the weights that were loaded last
        self.takes_adapters = False  # known after `check`
        self._adapter: str | None = None  # the name of the adapter that was loaded last
        self._spoke: dict[str, float] = {}  # when a wait for a server was reported last

    # At the start

    def check(self) -> None:
        """Wait until every server answers, and check that it can be used.

        Raises:
            ServerError: a server does not answer within the timeout, or it serves something else than the run needs,
                with the command that starts it right.
        """
        self._each("GET", "/health")
        replies = self._each("GET", "/v1/models")
        for place, (url, reply) in enumerate(zip(self.urls, replies, strict=True)):
            cards = [card for card in reply["data"] if card.get("parent") is None]
            self._models[place] = cards[0]["id"]
            longest, needed = cards[0].get("max_model_len"), self._needs.max_tokens
            if longest is not None and longest < needed:
                raise ServerError(
                    f"The vLLM server at {url} has --max-model-len {longest}, but a prompt with its completion may "
                    f"have {needed} tokens. Start it with: {self.command(url)} --max-model-len {needed}"
                )
        ranks = []
        for path in ("/server_info?config_format=json", "/weight_info"):
            for url, reply in zip(self.urls, self._each("GET", path, missing_ok=True), strict=True):
                if reply is None:
                    raise self._unusable(
                        url,
                        f"has no {path.partition('?')[0]}, which vLLM 0.32 and later have in development mode "
                        "(VLLM_SERVER_DEV_MODE=1)",
                    )
                if path.startswith("/server_info"):
                    self._check_logprobs_mode(url, reply)
                    ranks.append((reply["vllm_config"].get("lora_config") or {}).get("max_lora_rank"))
        self.takes_adapters = self._needs.adapter_rank is not None and all(ranks)
        if self.takes_adapters and min(ranks) < self._needs.adapter_rank:
            url = self.urls[ranks.index(min(ranks))]
            raise self._unusable(
                url, f"has --max-lora-rank {min(ranks)}, and the adapter that is trained {self._needs.adapter_rank}"
            )
        probe = {"prompt": [self._needs.vocab_size - 1], "max_tokens": 1}
        for url, model, own in zip(self.urls, self._models, self._probes(probe), strict=True):
            if isinstance(own, str):
                raise self._unusable(
                    url, f"serves {model!r}, which does not take the token id {self._needs.vocab_size - 1} ({own})"
                )

    def _check_logprobs_mode(self, url: str, info: Mapping[str, Any]) -> None:
        mode = info["vllm_config"]["model_config"]["logprobs_mode"]
        if self._needs.processed_logps and mode != "processed_logprobs":
            raise self._unusable(
                url,
                f"runs with --logprobs-mode {mode}, whose log-probabilities ignore temperature and filters and bias "
                "the importance sampling correction (vllm_importance_sampling_correction=False does without it)",
            )

    def _probes(self, body: dict[str, Any]) -> list[dict[str, Any] | str]:
        """The servers' replies to the same request, or the text of a refusal."""

        async def one(client: httpx2.AsyncClient, url: str, model: str) -> dict[str, Any] | str:
            reply = await self._answer(client, url, "POST", "/v1/completions", body | {"model": model})
            return reply.json() if reply.status_code == 200 else _message(reply)

        async def ask(client: httpx2.AsyncClient) -> list[dict[str, Any] | str]:
            servers = zip(self.urls, self._served(), strict=True)
            return await self._watched(client, [asyncio.create_task(one(client, *server)) for server in servers])

        return self._within_loop(ask)

    def _unusable(self, url: str, why: str) -> ServerError:
        return ServerError(f"The vLLM server at {url} {why}. Start it with: {self.command(url)}")

    def command(self, url: str) -> str:
        """The command that starts a server for this run."""
        command = (
            f"VLLM_SERVER_DEV_MODE=1 vllm serve {self._needs.model} --port {urlsplit(url).port or 80} "
            "--logprobs-mode processed_logprobs"
        )
        if not self.takes_adapters:
            return command
        rank = next(rank for rank in _RANKS if rank >= min(self._needs.adapter_rank, _RANKS[-1]))
        return f"VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 {command} --enable-lora --max-lora-rank {rank}"

    def _served(self) -> list[str]:
        """The names of what completes the prompts: the models, or the adapter on them."""
        return self._models if self._adapter is None else [self._adapter] * len(self.urls)

    # Completions

    def begin(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Mapping[str, Any],
        *,
        group: int,
        seeds: Sequence[int],
        progress: Progress | None = None,
        most: Sequence[int] | None = None,
        images: Sequence[Sequence[str]] | None = None,
    ) -> concurrent.futures.Future[Sampled]:
        """Have the servers complete each prompt `group` times while the caller goes on.

        Args:
            sampling: parameters of `/v1/completions`.
            seeds: one per prompt.
            progress: called with the number of completions so far, and of their tokens.
            most: lowers `max_tokens` of each prompt.
            images: of each prompt, as data URLs; None if there are none.

        Returns:
            A future of the completions, which raises ServerError if a server refuses a request or does not answer
            within the timeout, and StaleWeights if one lost the weights that were loaded.
        """
        jobs = [
            {"prompt": list(map(int, ids)), "n": group, "seed": int(seed), "logprobs": 0, "return_token_ids": True}
            for ids, seed in zip(prompts, seeds, strict=True)
        ]
        for job, room in zip(jobs, most or (), strict=most is not None):
            job["max_tokens"] = min(room, sampling["max_tokens"])

        async def ask(client: httpx2.AsyncClient) -> list[Sampled]:
            gates, done, at_once = [asyncio.Semaphore(_AT_ONCE) for _ in self.urls], [0, 0], self._limits.at_once
            gate = asyncio.Semaphore(len(jobs) if at_once is None else max(at_once // group, 1))

            async def one(number: int) -> Sampled:
                place = number % len(self.urls)
                url, body = self.urls[place], dict(sampling) | jobs[number] | {"model": self._served()[place]}
                seen = () if images is None else images[number]
                async with gate, gates[place]:
                    path = "/inference/v1/generate" if seen else "/v1/completions"
                    body = await self._with_images(client, url, body, seen) if seen else body
                    reply = await self._answer(client, url, "POST", path, body, within=self._limits.request)
                    if reply.status_code == 404 and self._adapter is not None:
                        raise StaleWeights(f"{url} has no adapter {self._adapter!r}")
                    reply = self._accepted(url, reply)
                found = self._read(url, reply, group)
                done[0], done[1] = done[0] + group, done[1] + sum(map(len, found.completions))
                if progress is not None:
                    progress(*done)
                return found

            tasks = [asyncio.create_task(one(number)) for number in range(len(jobs))]
            return await self._watched(client, tasks, alive=self._limits.alive)

        def complete() -> Sampled:
            began = time.monotonic()
            found = self._within_loop(ask)
            self._check_version()
            completions = [own for part in found for own in part.completions]
            return Sampled(completions, [own for part in found for own in part.logps], time.monotonic() - began)

        return _in_thread(complete)

    async def _with_images(
        self, client: httpx2.AsyncClient, url: str, body: Mapping[str, Any], images: Sequence[str]
    ) -> dict[str, Any]:
        """Convert a body of `/v1/completions` with the prompt's images to a body of `/inference/v1/generate`.

        Raises:
            ServerError: the server cannot process images, or counts their tokens differently.
        """
        body = {name: value for name, value in body.items() if name != "return_token_ids"}
        ids, model = body.pop("prompt"), body.pop("model")
        parts = [{"type": "image_url", "image_url": {"url": image}} for image in images]
        asked = {"model": model, "messages": [{"role": "user", "content": parts}], "max_tokens": 1}
        reply = await self._answer(client, url, "POST", "/v1/chat/completions/render", asked)
        if reply.status_code == 404:
            raise ServerError(
                f"The vLLM server at {url} has no /v1/chat/completions/render, which prompts with images need. Start "
                f"it with: {self.command(url)} --enable-scale-out"
            )
        features = dict(self._accepted(url, reply)["features"])
        places, given = _runs(ids, self._needs.image_token), features["mm_placeholders"]["image"]
        if [own["length"] for own in places] != [own["length"] for own in given]:
            raise ServerError(
                f"The vLLM server at {url} has images of {[own['length'] for own in given]} tokens, and the prompt "
                f"of {[own['length'] for own in places]}: it processes them otherwise, or this model's images are not "
                "one run of image tokens each, which is not in this release of trl_jax. Set use_vllm=False."
            )
        features["mm_placeholders"] = {**features["mm_placeholders"], "image": places}
        sampling = body | {"output_kind": 2}  # all completions at once, when the last one has ended
        return {"model": model, "token_ids": ids, "features": features, "sampling_params": sampling}

    def _read(self, url: str, reply: Mapping[str, Any], group: int) -> Sampled:
        choices = sorted(reply["choices"], key=lambda choice: choice["index"])
        if len(choices) != group or any(choice.get("token_ids") is None for choice in choices):
            raise self._unusable(
                url, f"returned {brief(reply['choices'])} for {group} completions with their token ids"
            )
        completions, logps = [], []
        for choice in choices:
            completions.append(token_ids(choice["token_ids"], self._needs.vocab_size, f"A completion of {url}"))
            found = choice["logprobs"]
            if "content" in found:  # of /inference/v1/generate
                found = [of_token["logprob"] for of_token in found["content"]]
            else:
                found = found["token_logprobs"]
            logps.append(np.asarray([np.nan if value is None else value for value in found], np.float32))
            if len(logps[-1]) != len(completions[-1]):
                raise self._unusable(
                    url, f"returned {len(logps[-1])} log-probabilities for {len(completions[-1])} tokens"
                )
        return Sampled(completions, logps, 0.0)

    def score(self, ids: Sequence[int]) -> list[np.ndarray]:
        """The log-probability of each token of a text but the first, at temperature 1, by every server: float32
        `[tokens - 1]` each."""
        body = {"prompt": list(map(int, ids)), "max_tokens": 1, "prompt_logprobs": 0}
        scores = []
        for url, reply in zip(self.urls, self._probes(body), strict=True):
            if isinstance(reply, str):
                raise self._unusable(url, f"refused to score a text ({reply})")
            given = reply["choices"][0]["prompt_logprobs"][1:]
            own = [at[str(int(token))]["logprob"] for at, token in zip(given, ids[1:], strict=True)]
            scores.append(np.asarray(own, np.float32))
        return scores

    # Weights

    def load(self, folder: str, version: str) -> None:
        """Load a checkpoint's weights into every server while it completes nothing, and name them `version`.

        Args:
            folder: as the servers see it.

        Raises:
            ServerError: a server cannot load them.
        """
        self._each("POST", "/pause?mode=wait")
        try:
            body = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
            doing, within = f"load the weights in {folder}", self._limits.load
            self._each("POST", "/collective_rpc", body, doing=doing, within=within)
            self._each("POST", "/reset_prefix_cache")
            self._each("POST", "/update_weight_version", {"new_version": version})
        except ServerSilent:
            raise
        except ServerError:
            self._each("POST", "/resume")
            raise
        self._each("POST", "/resume")
        self.version, self._adapter = version, None
        for url, found in zip(self.urls, self._versions(), strict=True):
            if found != version:
                raise self._unusable(url, f"has the weights {found!r} right after {version!r} were loaded")

    def load_adapter(self, folder: str, version: str) -> None:
        """Load a LoRA adapter into every server, and use it for all further completions.

        The previous adapter is unloaded, so no completions may be in progress.

        Args:
            folder: in PEFT's format, as the servers see it.

        Raises:
            ServerError: a server cannot load it.
        """
        doing, within, before = f"load the adapter in {folder}", self._limits.load, self._adapter
        body = {"lora_name": version, "lora_path": folder}
        replies = self._each("POST", "/v1/load_lora_adapter", body, missing_ok=True, doing=doing, within=within)
        for url, reply in zip(self.urls, replies, strict=True):
            if reply is None:
                raise self._unusable(
                    url, f"could not {doing}: it does not see the folder, or lacks VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
                )
        self._adapter = version
        if before is not None:
            self._each("POST", "/v1/unload_lora_adapter", {"lora_name": before}, missing_ok=True)

    def _versions(self) -> list[str]:
        return [reply["weight_version"] for reply in self._each("GET", "/weight_info")]

    def _check_version(self) -> None:
        if self.version is None:
            return
        for url, found in zip(self.urls, self._versions(), strict=True):
            if found != self.version:
                raise StaleWeights(f"{url} has the weights {found!r}, not {self.version!r}")

    # Requests

    def _each(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        missing_ok: bool = False,
        doing: str = "",
        within: float | None = None,
    ) -> list[Any]:
        """The replies of all servers, read as JSON if they are; None if one is missing, and `missing_ok`.

        Args:
            doing: what the request asks for, in errors.
            within: seconds for it; afterwards it is not sent again.
        """

        async def one(client: httpx2.AsyncClient, url: str) -> Any:
            try:
                reply = await asyncio.wait_for(self._answer(client, url, method, path, body), within)
            except TimeoutError as error:
                raise ServerError(
                    f"The vLLM server at {url} did not {doing} within {within:g} s (weight_sync_timeout)."
                ) from error
            if missing_ok and reply.status_code == 404:
                return None
            return self._accepted(url, reply, doing)

        async def ask(client: httpx2.AsyncClient) -> list[Any]:
            return await self._watched(client, [asyncio.create_task(one(client, url)) for url in self.urls])

        return self._within_loop(ask)

    def _accepted(self, url: str, reply: httpx2.Response, doing: str = "") -> Any:
        """A reply's JSON, or its text."""
        if reply.status_code != 200:
            path = reply.request.url.path
            what = f"could not {doing}" if doing else f"refused {path}"
            raise ServerError(f"The vLLM server at {url} {what} ({reply.status_code}): {_message(reply)}")
        return reply.json() if reply.headers.get("Content-Type", "").startswith("application/json") else reply.text

    async def _answer(
        self,
        client: httpx2.AsyncClient,
        url: str,
        method: str,
        path: str,
        body: Any = None,
        within: float | None = None,
    ) -> httpx2.Response:
        """The reply to a request, which is sent again until the timeout while the server cannot be reached or does not
        reply `within` so many seconds."""
        failed, timeout = None, self._limits.answer
        while True:
            try:
                reply = await asyncio.wait_for(client.request(method, url + path, json=body), within)
                if reply.status_code not in _BUSY:
                    return reply
                problem = f"HTTP {reply.status_code}"
            except httpx2.TransportError as error:
                problem = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            except TimeoutError:
                problem = f"no completions within request_timeout={within:g} s"
            now = time.monotonic()
            failed = now if failed is None else failed
            if now - failed > timeout:
                raise self._silent(url, problem, timeout, "vllm_server_timeout")
            if now - failed > _SPEAKS_AFTER and now - self._spoke.get(url, -math.inf) > _SPEAKS_EVERY:
                left, self._spoke[url] = timeout - (now - failed), now
                logger.warning("Waiting up to %.0f s more for the vLLM server at %s (%s).", left, url, problem)
            await asyncio.sleep(min(_RETRY_AFTER, timeout / 4))

    def _silent(self, url: str, problem: str, timeout: float, argument: str) -> ServerSilent:
        return ServerSilent(
            f"The vLLM server at {url} did not answer for {timeout:g} s ({argument}; {problem}). "
            f"Start it with: {self.command(url)}"
        )

    async def _watched(
        self, client: httpx2.AsyncClient, tasks: Sequence[asyncio.Task], alive: float | None = None
    ) -> list[Any]:
        """The results of all tasks. While they run, servers are asked whether they are alive, because a server that
        hangs keeps its connections open."""
        watch = asyncio.create_task(self._watch(client, alive))
        try:
            waiting = set(tasks)
            while waiting:
                done, _ = await asyncio.wait({*waiting, watch}, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()  # raises what it raised
                waiting -= done
            return [task.result() for task in tasks]
        finally:
            for task in (*tasks, watch):
                task.cancel()
            await asyncio.gather(*tasks, watch, return_exceptions=True)

    async def _watch(self, client: httpx2.AsyncClient, alive: float | None) -> None:
        """Raise ServerError once a server has not answered for `alive` seconds; None means the run's timeout."""
        seen = dict.fromkeys(self.urls, time.monotonic())
        timeout, argument = alive, "heartbeat_stale_after_s"
        if alive is None:
            timeout, argument = self._limits.answer, "vllm_server_timeout"
        every = min(_ANSWERS_WITHIN, max(timeout / 4, 0.05))
        while True:
            await asyncio.sleep(every)
            for url in self.urls:
                try:
                    await client.get(url + "/health", timeout=every)
                    seen[url] = time.monotonic()
                except httpx2.TransportError as error:
                    if time.monotonic() - seen[url] > timeout:
                        raise self._silent(url, type(error).__name__, timeout, argument) from error

    def _within_loop(self, ask: Callable[[httpx2.AsyncClient], Coroutine[Any, Any, Any]]) -> Any:
        """Run a coroutine in a thread with an event loop of its own: this thread may have one already (Jupyter)."""

        async def main() -> Any:
            limits = httpx2.Limits(max_connections=None, max_keepalive_connections=_AT_ONCE)
            timeout = httpx2.Timeout(None, connect=_ANSWERS_WITHIN)
            async with httpx2.AsyncClient(limits=limits, timeout=timeout, trust_env=False) as client:
                return await ask(client)

        return _in_thread(lambda: asyncio.run(main())).result()


def _runs(ids: Sequence[int], token: int) -> list[dict[str, int]]:
    """Where a token stands in a row: the offset and the length of each run."""
    found: list[dict[str, int]] = []
    for place, own in enumerate(ids):
        if own != token:
            continue
        if found and found[-1]["offset"] + found[-1]["length"] == place:
            found[-1]["length"] += 1
        else:
            found.append({"offset": place, "length": 1})
    return found


def data_url(picture: Any) -> str:
    """A PIL image as a data URL, without loss but for transparency."""
    buffer = io.BytesIO()
    picture.convert("RGB").save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _in_thread(do: Callable[[], Any]) -> concurrent.futures.Future:
    """Call `do` in a thread that does not keep the process from ending."""
    future: concurrent.futures.Future = concurrent.futures.Future()

    def work() -> None:
        try:
            future.set_result(do())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=work, name="trl_jax-server", daemon=True).start()
    return future


def _message(reply: httpx2.Response) -> str:
    """What a server says about a refused request, in short."""
    try:
        body = reply.json()
    except ValueError:
        return brief(reply.text)
    found = body.get("error", body.get("detail", body)) if isinstance(body, dict) else body
    return brief(found["message"] if isinstance(found, dict) and "message" in found else found)


# Parameters of a request


def sampling_parameters(
    *,
    max_tokens: int,
    temperature: float,
    top_p: float | None,
    top_k: int | None,
    min_p: float | None,
    repetition_penalty: float | None,
    ends: Sequence[int],
    regex: str | None,
    others: Mapping[str, Any],
) -> dict[str, Any]:
    """The parameters of `/v1/completions` for a run's arguments.

    All that a model's generation_config.json may change on the server are given.

    Args:
        ends: the token ids that end a completion.
        regex: what completions must match; it takes precedence over `structured_outputs` in `others`.
        others: vLLM's own parameters (`generation_kwargs`), which take precedence over the other arguments, and
            transformers' `stop_strings`.
    """
    parameters = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": 1.0 if top_p is None else top_p,
        "top_k": 0 if top_k is None else max(top_k, 0),
        "min_p": 0.0 if min_p is None else min_p,
        "repetition_penalty": 1.0 if repetition_penalty is None else repetition_penalty,
        "stop_token_ids": list(ends),
    }
    strings = others.get("stop_strings")
    parameters |= {name: value for name, value in others.items() if name != "stop_strings"}
    if strings is not None:
        parameters |= {"stop": strings, "include_stop_str_in_output": True}
    return parameters if regex is None else parameters | {"structured_outputs": {"regex": regex}}
