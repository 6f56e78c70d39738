"""Completions by serving engines over HTTP: `use_vllm=True, vllm_mode="server"`.

`Servers` get the policy's weights and complete prompts. What an engine does in its own way is an `Engine`: vllm.py and
sglang.py. `Transport` sends requests to all servers, sends them again while a server cannot be reached, and watches the
servers meanwhile.

Prompts go out as token ids; token ids and their log-probabilities come back. Each prompt is one request for all of its
completions and has its own seed, so that completions do not depend on how prompts are divided over several servers.
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
from typing import Any, NamedTuple, Protocol
from urllib.parse import urlsplit

import httpx2
import numpy as np

from trl_jax.core.text import brief

logger = logging.getLogger(__name__)

_AT_ONCE = 256  # requests in flight per server, which queues what it cannot run
_SPEAKS_AFTER, _SPEAKS_EVERY = 5.0, 30.0  # seconds of waiting
_ANSWERS_WITHIN = 10.0  # seconds that a server may take to say that it is healthy
_BUSY = (502, 503, 504)
_RETRY_AFTER = 0.5  # seconds

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


@dataclass(frozen=True)
class SamplingOptions:
    """How completions are sampled, by a run's arguments.

    ends: the token ids that end a completion. regex: what completions must match.
    never: a token that is not sampled; None for none.
    others: the engine's own parameters (`generation_kwargs`), which take precedence over the other fields but `regex`,
        and transformers' `stop_strings`.
    """

    max_tokens: int
    temperature: float
    top_p: float | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    ends: Sequence[int]
    regex: str | None
    never: int | None
    others: Mapping[str, Any]


class Prompt(NamedTuple):
    """A prompt that a server completes `group` times.

    most: the most tokens of a completion, if that is less than the parameters of requests say; None if not.
    images: as data URLs.
    """

    ids: list[int]
    group: int
    seed: int
    most: int | None
    images: Sequence[str]


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


def data_url(picture: Any) -> str:
    """A PIL image as a data URL, without loss but for transparency."""
    buffer = io.BytesIO()
    picture.convert("RGB").save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


class Engine(Protocol):
    """What a serving engine does in its own way, for all servers of a run.

    Attributes:
        takes_adapters: whether `load_adapter` may be called; known after `ready`.
    """

    transport: Transport
    takes_adapters: bool

    def __init__(self, urls: Sequence[str], needs: Requirements, limits: Limits): ...

    def command(self, url: str) -> str:
        """The command that starts a server for this run."""

    def ready(self, cards: Sequence[Mapping[str, Any]]) -> None:
        """Check that every server fits the run.

        Args:
            cards: what `/v1/models` says about each server's model.

        Raises:
            ServerError: one does not, with the command that starts it right.
        """

    def parameters(self, options: SamplingOptions) -> dict[str, Any]:
        """The sampling parameters of requests; all that a model's own defaults may change on the server are given."""

    async def complete(
        self, client: httpx2.AsyncClient, place: int, prompt: Prompt, parameters: Mapping[str, Any]
    ) -> Sampled:
        """The completions of a prompt by the server at `urls[place]`."""

    def score(self, ids: Sequence[int]) -> list[np.ndarray]:
        """The log-probability of each token of a text but the first, at temperature 1, by every server: float32
        `[tokens - 1]` each."""

    def load(self, folder: str, version: str) -> None:
        """Have every server load a checkpoint while it completes nothing, and name the weights `version`."""

    def load_adapter(self, folder: str, version: str) -> None:
        """Have every server use an adapter in PEFT's format for all further completions, instead of the last one."""

    def versions(self) -> list[str]:
        """The name of each server's weights."""


class Servers:
    """Servers with the same model, which complete prompts with the weights that were loaded last.

    Attributes:
        version: of these weights; None before the first ones are loaded.
    """

    def __init__(self, engine: Engine):
        self.engine, self._transport = engine, engine.transport
        self.urls: list[str] = engine.transport.urls
        self.version: str | None = None

    def begin(
        self,
        prompts: Sequence[Sequence[int]],
        parameters: Mapping[str, Any],
        *,
        group: int,
        seeds: Sequence[int],
        progress: Progress | None = None,
        most: Sequence[int] | None = None,
        images: Sequence[Sequence[str]] | None = None,
    ) -> concurrent.futures.Future[Sampled]:
        """Have the servers complete each prompt `group` times while the caller goes on.

        Args:
            parameters: what the engine's `parameters` returned.
            seeds: one per prompt.
            progress: called with the number of completions so far, and of their tokens.
            most: the most tokens of each prompt's completions, where that is less than the parameters say.
            images: of each prompt, as data URLs; None if there are none.

        Returns:
            A future of the completions, which raises ServerError if a server refuses a request or does not answer
            within the timeout, and StaleWeights if one lost the weights that were loaded.
        """
        limits = self._transport.limits
        bounds = [None] * len(prompts) if most is None else most
        seen = [()] * len(prompts) if images is None else images
        jobs = [
            Prompt(list(map(int, ids)), group, int(seed), bound, pictures)
            for ids, seed, bound, pictures in zip(prompts, seeds, bounds, seen, strict=True)
        ]

        async def ask(client: httpx2.AsyncClient) -> list[Sampled]:
            gates, done, at_once = [asyncio.Semaphore(_AT_ONCE) for _ in self.urls], [0, 0], limits.at_once
            gate = asyncio.Semaphore(len(jobs) if at_once is None else max(at_once // group, 1))

            async def one(number: int) -> Sampled:
                place = number % len(self.urls)
                async with gate, gates[place]:
                    found = await self.engine.complete(client, place, jobs[number], parameters)
                done[0], done[1] = done[0] + group, done[1] + sum(map(len, found.completions))
                if progress is not None:
                    progress(*done)
                return found

            tasks = [asyncio.create_task(one(number)) for number in range(len(jobs))]
            return await self._transport.watched(client, tasks, alive=limits.alive)

        def complete() -> Sampled:
            began = time.monotonic()
            found = self._transport.run(ask)
            self._check_version()
            completions = [own for part in found for own in part.completions]
            return Sampled(completions, [own for part in found for own in part.logps], time.monotonic() - began)

        return _in_thread(complete)

    def load(self, folder: str, version: str) -> None:
        """Load a checkpoint's weights into every server while it completes nothing, and name them `version`.

        Args:
            folder: as the servers see it.

        Raises:
            ServerError: a server cannot load them.
        """
        self.engine.load(folder, version)
        self.version = version
        for url, found in zip(self.urls, self.engine.versions(), strict=True):
            if found != version:
                raise self._transport.unusable(url, f"has the weights {found!r} right after {version!r} were loaded")

    def load_adapter(self, folder: str, version: str) -> None:
        """Load a LoRA adapter into every server, and use it for all further completions.

        The previous adapter is unloaded, so no completions may be in progress.

        Args:
            folder: in PEFT's format, as the servers see it.

        Raises:
            ServerError: a server cannot load it.
        """
        self.engine.load_adapter(folder, version)

    def _check_version(self) -> None:
        if self.version is None:
            return
        for url, found in zip(self.urls, self.engine.versions(), strict=True):
            if found != self.version:
                raise StaleWeights(f"{url} has the weights {found!r}, not {self.version!r}")


# Requests


class Transport:
    """Requests to all servers of a run.

    Args:
        limits: after which a server that does not answer ends the run.
        name: the engine's, in errors.
        command: the one that starts the server at a URL, in errors.
        alive: the path that a server answers at any time.
    """

    def __init__(
        self, urls: Sequence[str], limits: Limits, name: str, command: Callable[[str], str], alive: str = "/health"
    ):
        self.urls, self.limits, self.name, self.command = list(urls), limits, name, command
        self._alive = alive
        self._spoke: dict[str, float] = {}  # when a wait for a server was reported last

    def each(
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
                reply = await asyncio.wait_for(self.answer(client, url, method, path, body), within)
            except TimeoutError as error:
                raise ServerError(
                    f"The {self.name} server at {url} did not {doing} within {within:g} s (weight_sync_timeout)."
                ) from error
            if missing_ok and reply.status_code == 404:
                return None
            return self.accepted(url, reply, doing)

        async def ask(client: httpx2.AsyncClient) -> list[Any]:
            return await self.watched(client, [asyncio.create_task(one(client, url)) for url in self.urls])

        return self.run(ask)

    def accepted(self, url: str, reply: httpx2.Response, doing: str = "") -> Any:
        """A reply's JSON, or its text."""
        if reply.status_code != 200:
            path = reply.request.url.path
            what = f"could not {doing}" if doing else f"refused {path}"
            raise ServerError(f"The {self.name} server at {url} {what} ({reply.status_code}): {message(reply)}")
        return reply.json() if reply.headers.get("Content-Type", "").startswith("application/json") else reply.text

    async def answer(
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
        failed, timeout = None, self.limits.answer
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
                logger.warning("Waiting up to %.0f s more for the %s server at %s (%s).", left, self.name, url, problem)
            await asyncio.sleep(min(_RETRY_AFTER, timeout / 4))

    def _silent(self, url: str, problem: str, timeout: float, argument: str) -> ServerSilent:
        return ServerSilent(
            f"The {self.name} server at {url} did not answer for {timeout:g} s ({argument}; {problem}). "
            f"Start it with: {self.command(url)}"
        )

    async def watched(
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
            timeout, argument = self.limits.answer, "vllm_server_timeout"
        every = min(_ANSWERS_WITHIN, max(timeout / 4, 0.05))
        while True:
            await asyncio.sleep(every)
            for url in self.urls:
                try:
                    await client.get(url + self._alive, timeout=every)
                    seen[url] = time.monotonic()
                except httpx2.TransportError as error:
                    if time.monotonic() - seen[url] > timeout:
                        raise self._silent(url, type(error).__name__, timeout, argument) from error

    def run(self, ask: Callable[[httpx2.AsyncClient], Coroutine[Any, Any, Any]]) -> Any:
        """Run a coroutine in a thread with an event loop of its own: this thread may have one already (Jupyter)."""

        async def main() -> Any:
            limits = httpx2.Limits(max_connections=None, max_keepalive_connections=_AT_ONCE)
            timeout = httpx2.Timeout(None, connect=_ANSWERS_WITHIN)
            async with httpx2.AsyncClient(limits=limits, timeout=timeout, trust_env=False) as client:
                return await ask(client)

        return _in_thread(lambda: asyncio.run(main())).result()

    def logps(self, url: str, found: Sequence[float | None], ids: np.ndarray) -> np.ndarray:
        """The log-probabilities of a completion's tokens.

        Raises:
            ServerError: there are more or fewer than tokens.
        """
        if len(found) != len(ids):
            raise self.unusable(url, f"returned {len(found)} log-probabilities for {len(ids)} tokens")
        return np.asarray([np.nan if value is None else value for value in found], np.float32)

    def unusable(self, url: str, why: str) -> ServerError:
        return ServerError(f"The {self.name} server at {url} {why}. Start it with: {self.command(url)}")


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


def message(reply: httpx2.Response) -> str:
    """What a server says about a refused request, in short."""
    try:
        body = reply.json()
    except ValueError:
        return brief(reply.text)
    found = body.get("error", body.get("detail", body)) if isinstance(body, dict) else body
    return brief(found["message"] if isinstance(found, dict) and "message" in found else found)
