"""Generation on inference servers over HTTP: `use_vllm=True, vllm_mode="server"`.

`Servers` loads the policy's weights into the servers and has them complete prompts. Everything specific to one
inference engine is behind the `Engine` protocol, implemented in vllm.py and sglang.py. `Transport` sends the requests,
retries them while a server is unreachable, and polls the servers' health until the replies arrive.

Requests contain token ids; replies contain token ids and log-probabilities. All completions of a prompt are one
request with its own seed, so that completions do not depend on how prompts are distributed over servers. (An engine
may ignore seeds: SGLang only uses them with --enable-deterministic-inference.)
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

_MAX_IN_FLIGHT = 256  # requests in flight per server; the server queues those that it cannot run yet
_WARN_AFTER, _WARN_INTERVAL = 5.0, 30.0  # seconds: until an unreachable server is logged, and between two logs
_CONNECT_TIMEOUT = 5.0  # seconds: the connect timeout, and the longest interval and timeout of health checks
_RETRIED_STATUSES = (502, 503, 504)
_RETRY_INTERVAL = 0.5  # seconds
_RESTART_TIMEOUT = 45.0  # default seconds to wait for a server that answered before: with a checkpoint, 60 s in all
_MIN_RETRIES = 3  # minimum number of times that a completion request is sent again after its timeout

Progress = Callable[[int, int], None]


class ServerError(RuntimeError):
    """A server is unusable for this run, or stopped responding."""


class ServerSilent(ServerError):
    """A server did not respond within the timeout."""


class StaleWeights(Exception):
    """A server no longer has the weights loaded last: it was restarted, or another run loaded its own."""


class Sampled(NamedTuple):
    """Completions in the order of their prompts; the completions of one prompt are consecutive.

    completions: token ids, int32 `[tokens]` each.
    logps: log-probabilities of these tokens, float32 `[tokens]` each; NaN for tokens without one.
    seconds: wall-clock time of the generation.
    """

    completions: list[np.ndarray]
    logps: list[np.ndarray]
    seconds: float


@dataclass(frozen=True)
class Limits:
    """Timeouts in seconds, and the maximum number of concurrent completions.

    answer: how long requests to a server that has not answered yet are retried.
    restart: how long requests to a server that answered before are retried; None means 45 s, or `answer` if that is
        less.
    alive: how long health checks may fail during generation; None means `answer` or `restart`, as for requests.
    request: timeout of one completion request, which is then sent again for up to `answer` seconds, at least three
        times; None for no timeout.
    load: timeout for loading weights; None for no timeout.
    at_once: maximum number of completions in flight on all servers together, rounded down to whole prompts (at least
        one); None for no limit. There are never more than 256 prompts in flight per server.
    """

    answer: float
    alive: float | None = None
    request: float | None = None
    load: float | None = None
    at_once: int | None = None
    restart: float | None = None


@dataclass(frozen=True)
class Requirements:
    """What a server must provide for this run.

    model: Hub name or folder of the model to serve.
    vocab_size: vocabulary size; the server must accept all token ids below it.
    max_tokens: the context length needed for a prompt and its completion, as far as it is known before training.
    processed_logps: whether log-probabilities must be computed after temperature and filters (top_k, top_p, min_p).
    image_token: the token id of image placeholders in prompts; None if there are no images.
    other_media: the token ids of the model's placeholders for videos and audio, which prompts do not have.
    adapter_rank: the largest LoRA rank of the policy; None if it has no adapter, or one that must be merged.
    fused_adapter: whether an engine that fuses projections, such as SGLang, computes the adapter correctly: all
        matrices have the config's rank and scale, and q_proj and v_proj (and k_proj, if used) are adapted together.
    """

    model: str
    vocab_size: int
    max_tokens: int
    processed_logps: bool
    image_token: int | None = None
    other_media: Sequence[int] = ()
    adapter_rank: int | None = None
    fused_adapter: bool = False


@dataclass(frozen=True)
class SamplingOptions:
    """The run's sampling arguments, independent of the engine.

    regex: a pattern that constrains completions, or None.
    suppressed_ids: token ids that must not be sampled.
    generation_kwargs: vLLM's sampling parameters by name, plus transformers' `stop_strings`. They override the other
        fields except `regex` and `suppressed_ids`.
    """

    max_tokens: int
    temperature: float
    top_p: float | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    eos_token_ids: Sequence[int]
    regex: str | None
    suppressed_ids: Sequence[int]
    generation_kwargs: Mapping[str, Any]


class Prompt(NamedTuple):
    """A prompt that a server completes `group` times.

    max_tokens: maximum per completion, in addition to the limit in the sampling parameters; None for none.
    images: data URLs.
    """

    ids: list[int]
    group: int
    seed: int
    max_tokens: int | None
    images: Sequence[str]


def is_local(url: str) -> bool:
    """Whether the host of a URL is this machine: localhost, or a loopback or unspecified address."""
    host = urlsplit(url).hostname or ""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return address.is_loopback or address.is_unspecified


def port_of(url: str) -> int:
    """The port of a URL, 443 or 80 if it names none."""
    parts = urlsplit(url)
    return parts.port or (443 if parts.scheme == "https" else 80)


def server_urls(base_url: str | None, host: str, port: int) -> list[str]:
    """The server URLs: split from the comma-separated `base_url` if given, else built from `host` and `port`.

    Raises:
        ValueError: `base_url` is empty or contains something that is not an HTTP URL.
    """
    if base_url is None:
        return [f"http://{f'[{host}]' if ':' in host else host}:{port}"]
    urls = [url.strip().rstrip("/") for url in base_url.split(",") if url.strip()]
    wrong = [url for url in urls if not _is_http(url)]
    if wrong or not urls:
        raise ValueError(
            f"vllm_server_base_url must be URLs such as 'http://10.0.0.2:8000', separated by commas, got "
            f"{(wrong or [base_url])[0]!r}."
        )
    return urls


def _is_http(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # brackets that do not match, or a port out of range
        return False


def data_url(picture: Any) -> str:
    """Encode a PIL image as a PNG data URL. This is lossless for RGB images; an alpha channel is dropped."""
    buffer = io.BytesIO()
    picture.convert("RGB").save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


class Engine(Protocol):
    """The engine-specific part of the protocol, for all servers of a run.

    Attributes:
        takes_adapters: whether `load_adapter` may be called. Only valid after `ready`.
        context_length: the servers' smallest context length in tokens; None if unknown. Only valid after `ready`.
    """

    transport: Transport
    takes_adapters: bool
    context_length: int | None

    def __init__(self, urls: Sequence[str], needs: Requirements, limits: Limits): ...

    def command(self, url: str) -> str:
        """The shell command that starts a suitable server at `url`, for error messages."""

    def ready(self, cards: Sequence[Mapping[str, Any]]) -> None:
        """Check that every server meets the run's `Requirements`.

        Args:
            cards: the entry of `/v1/models` for the base model of each server.

        Raises:
            ServerError: a server does not. The message has the command that starts a suitable one.
        """

    def parameters(self, options: SamplingOptions) -> dict[str, Any]:
        """Convert `options` to the engine's request parameters.

        Every parameter is set explicitly that the server would otherwise read from the model's generation config.
        """

    async def complete(
        self, client: httpx2.AsyncClient, server: int, prompt: Prompt, parameters: Mapping[str, Any]
    ) -> Sampled:
        """Complete a prompt on the server at `transport.urls[server]`."""

    def score(self, ids: Sequence[int]) -> list[np.ndarray]:
        """Have every server score a text: log-probabilities of `ids[1:]` at temperature 1, float32 `[tokens - 1]`
        for each server."""

    def load(self, folder: str, version: str) -> None:
        """Load a checkpoint into every server, between completions, and label the weights `version`."""

    def load_adapter(self, folder: str, version: str) -> None:
        """Load a PEFT adapter into every server under the name `version`, which only this run uses, and unload the
        previous one. All later completions use it. It may already be loaded, by a request whose reply was lost."""

    def versions(self) -> list[str]:
        """The current weight version (`load`) of each server."""


class Servers:
    """Servers of the same model. Prompts are distributed over them and completed with the weights loaded last.

    Attributes:
        version: label of these weights; None before the first `load`.
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
        """Start completing each prompt `group` times in a background thread.

        Args:
            parameters: the result of `engine.parameters`.
            seeds: one per prompt.
            progress: called in the background thread with the numbers of completions and of tokens generated so far.
            most: maximum number of tokens per completion for each prompt, in addition to the limit in `parameters`.
            images: data URLs for each prompt; None if no prompt has images.

        Returns:
            A future of the completions. It raises ServerError if a server refuses a request or does not respond within
            the timeout, and StaleWeights if a server lost the weights loaded last.
        """
        limits = self._transport.limits
        most = [None] * len(prompts) if most is None else most
        images = [()] * len(prompts) if images is None else images
        requests = [
            Prompt(list(map(int, ids)), group, int(seed), max_tokens, urls)
            for ids, seed, max_tokens, urls in zip(prompts, seeds, most, images, strict=True)
        ]

        async def complete_all(client: httpx2.AsyncClient) -> list[Sampled]:
            server_slots, at_once = [asyncio.Semaphore(_MAX_IN_FLIGHT) for _ in self.urls], limits.at_once
            slots = asyncio.Semaphore(len(requests) if at_once is None else max(at_once // group, 1))
            num_completions = num_tokens = 0

            async def complete_one(index: int) -> Sampled:
                nonlocal num_completions, num_tokens
                server = index % len(self.urls)
                async with slots, server_slots[server]:
                    sampled = await self.engine.complete(client, server, requests[index], parameters)
                num_completions, num_tokens = num_completions + group, num_tokens + sum(map(len, sampled.completions))
                if progress is not None:
                    progress(num_completions, num_tokens)
                return sampled

            tasks = [asyncio.create_task(complete_one(index)) for index in range(len(requests))]
            return await self._transport.watched(client, tasks, alive=limits.alive)

        def run() -> Sampled:
            began = time.monotonic()
            results = self._transport.run(complete_all)
            self._check_version()
            completions = [ids for sampled in results for ids in sampled.completions]
            logps = [row for sampled in results for row in sampled.logps]
            return Sampled(completions, logps, time.monotonic() - began)

        return _in_thread(run)

    def load(self, folder: str, version: str) -> None:
        """Load a checkpoint into every server, between completions, and label the weights `version`.

        Args:
            folder: the checkpoint's path on the servers' file system.

        Raises:
            ServerError: a server cannot load it.
        """
        self.engine.load(folder, version)
        self.version = version
        for url, loaded in zip(self.urls, self.engine.versions(), strict=True):
            if loaded != version:
                raise self._transport.unusable(url, f"has the weights {loaded!r} right after {version!r} were loaded")

    def load_adapter(self, folder: str, version: str) -> None:
        """Load a LoRA adapter into every server and use it for all later completions.

        The previous adapter is unloaded, so no completions may be in progress.

        Args:
            folder: path of the adapter, in PEFT's format, on the servers' file system.
            version: the adapter's name on the servers.

        Raises:
            ServerError: a server cannot load it.
        """
        self.engine.load_adapter(folder, version)

    def _check_version(self) -> None:
        if self.version is None:
            return
        for url, loaded in zip(self.urls, self.engine.versions(), strict=True):
            if loaded != self.version:
                raise StaleWeights(f"{url} has the weights {loaded!r}, not {self.version!r}")


# Requests


class Transport:
    """The HTTP client for all servers of a run, with retries and health checks.

    Args:
        name: the engine's name in error messages.
        command: returns the command that starts the server at a URL, for error messages.
        health: path of the health check. The server must answer it at any time, even while it loads weights.
    """

    def __init__(
        self, urls: Sequence[str], limits: Limits, name: str, command: Callable[[str], str], health: str = "/health"
    ):
        self.urls, self.limits, self.name, self.command = list(urls), limits, name, command
        self._health = health
        self._warned_at: dict[str, float] = {}  # URL -> time of the last warning
        self._answered: set[str] = set()  # the URLs of servers that have answered

    def request_all(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        missing_ok: bool = False,
        refused_ok: str | None = None,
        doing: str = "",
        within: float | None = None,
    ) -> list[Any]:
        """Send the same request to all servers and return their replies, as by `accepted`.

        Args:
            missing_ok: return None for servers that reply with 404.
            refused_ok: return the body of the reply also for servers that reply with 400 and this text.
            doing: what the request does ("load the weights"), for error messages.
            within: timeout in seconds, including retries; None for no timeout.

        Raises:
            ServerError: a server refuses the request, is unreachable for too long, or exceeds `within`.
        """

        async def send(client: httpx2.AsyncClient, url: str) -> Any:
            try:
                reply = await asyncio.wait_for(self.answer(client, url, method, path, body), within)
            except TimeoutError as error:
                raise ServerError(
                    f"The {self.name} server at {url} did not {doing} within {within:g} s (weight_sync_timeout)."
                ) from error
            if missing_ok and reply.status_code == 404:
                return None
            if refused_ok is not None and reply.status_code == 400 and refused_ok in reply.text:
                return _body(reply)
            return self.accepted(url, reply, doing)

        async def send_all(client: httpx2.AsyncClient) -> list[Any]:
            return await self.watched(client, [asyncio.create_task(send(client, url)) for url in self.urls])

        return self.run(send_all)

    def post_all(self, path: str, bodies: Sequence[Any]) -> list[Any]:
        """Post a body to each server. Returns their replies as JSON; the text of the refusal where one refuses."""

        async def post(client: httpx2.AsyncClient, url: str, body: Any) -> Any:
            reply = await self.answer(client, url, "POST", path, body)
            return reply.json() if reply.status_code == 200 else message(reply)

        async def send_all(client: httpx2.AsyncClient) -> list[Any]:
            servers = zip(self.urls, bodies, strict=True)
            return await self.watched(client, [asyncio.create_task(post(client, *server)) for server in servers])

        return self.run(send_all)

    def accepted(self, url: str, reply: httpx2.Response, doing: str = "") -> Any:
        """The body of a successful reply: parsed if it is JSON, else as text.

        Raises:
            ServerError: the status is not 200.
        """
        if reply.status_code != 200:
            path = reply.request.url.path
            what = f"could not {doing}" if doing else f"refused {path}"
            raise ServerError(f"The {self.name} server at {url} {what} ({reply.status_code}): {message(reply)}")
        return _body(reply)

    async def answer(
        self,
        client: httpx2.AsyncClient,
        url: str,
        method: str,
        path: str,
        body: Any = None,
        within: float | None = None,
    ) -> httpx2.Response:
        """Send a request and return the reply, whatever its status.

        The request is sent again, for up to `limits.answer` or `limits.restart` seconds, while the server is
        unreachable or replies with 502, 503 or 504, and for up to `limits.answer` seconds, but at least three times,
        while it does not reply within `within` seconds. It may therefore run more than once.

        Raises:
            ServerSilent: there is no reply by then.
        """
        failing_since, num_timeouts = None, 0
        while True:
            began = time.monotonic()
            try:
                reply = await asyncio.wait_for(client.request(method, url + path, json=body), within)
                if reply.status_code not in _RETRIED_STATUSES:
                    self._answered.add(url)
                    return reply
                problem, lost = f"HTTP {reply.status_code}", time.monotonic()
            except httpx2.TransportError as error:
                problem = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
                # A connection that breaks may have been open for longer than the timeout.
                lost = began if isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout) else time.monotonic()
            except TimeoutError:
                problem, num_timeouts = f"no completions within request_timeout={within:g} s", num_timeouts + 1
                if num_timeouts <= _MIN_RETRIES or num_timeouts * within <= self.limits.answer:
                    failing_since = None  # it was reachable
                    continue
                raise ServerSilent(
                    f"The {self.name} server at {url} did not answer for {num_timeouts * within:g} s (request_timeout; "
                    f"{problem}, {num_timeouts} times). Raise request_timeout, or lower max_completion_length or "
                    "max_inflight_tasks."
                ) from None
            now, failing_since = time.monotonic(), lost if failing_since is None else failing_since
            timeout, argument = self._outage_limit(url)
            if now - failing_since > timeout:
                raise self._silent_error(url, problem, timeout, argument)
            if now - failing_since > _WARN_AFTER and now - self._warned_at.get(url, -math.inf) > _WARN_INTERVAL:
                remaining, self._warned_at[url] = timeout - (now - failing_since), now
                text = "Waiting up to %.0f s more for the %s server at %s (%s)."
                logger.warning(text, remaining, self.name, url, problem)
            await asyncio.sleep(min(_RETRY_INTERVAL, timeout / 4))

    def _outage_limit(self, url: str) -> tuple[float, str]:
        """How many seconds a server may be unreachable, and the argument that sets them."""
        restart = self.limits.restart
        if url not in self._answered or (restart is None and self.limits.answer <= _RESTART_TIMEOUT):
            return self.limits.answer, "vllm_server_timeout"
        return _RESTART_TIMEOUT if restart is None else restart, "vllm_server_restart_timeout"

    def _silent_error(self, url: str, problem: str, timeout: float, argument: str) -> ServerSilent:
        hint = f"If it was restarting, raise {argument}. " if argument == "vllm_server_restart_timeout" else ""
        return ServerSilent(
            f"The {self.name} server at {url} did not answer for {timeout:g} s ({argument}; {problem}). {hint}"
            f"Start it with: {self.command(url)}"
        )

    async def watched(
        self, client: httpx2.AsyncClient, tasks: Sequence[asyncio.Task], alive: float | None = None
    ) -> list[Any]:
        """Wait for all tasks and return their results. The first error cancels the rest.

        Health checks run meanwhile, because a server that hangs keeps its connections open.
        """
        monitor = asyncio.create_task(self._monitor_health(client, alive))
        try:
            waiting = set(tasks)
            while waiting:
                done, _ = await asyncio.wait({*waiting, monitor}, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()  # re-raises the task's exception
                waiting -= done
            return [task.result() for task in tasks]
        finally:
            for task in (*tasks, monitor):
                task.cancel()
            await asyncio.gather(*tasks, monitor, return_exceptions=True)

    async def _monitor_health(self, client: httpx2.AsyncClient, alive: float | None) -> None:
        """Poll the servers' health forever. Any HTTP reply counts as healthy.

        Raises:
            ServerSilent: a server did not reply for `alive` seconds (None: `limits.answer` or `limits.restart`).
        """
        last_reply = dict.fromkeys(self.urls, time.monotonic())
        shortest_limit = alive or min(self._outage_limit(url)[0] for url in self.urls)
        interval = min(_CONNECT_TIMEOUT, max(shortest_limit / 15, 0.05))
        while True:
            await asyncio.sleep(interval)
            for url in self.urls:
                try:
                    await client.get(url + self._health, timeout=interval)
                    last_reply[url] = time.monotonic()
                except httpx2.TransportError as error:
                    timeout, argument = (alive, "heartbeat_stale_after_s") if alive else self._outage_limit(url)
                    if time.monotonic() - last_reply[url] > timeout:
                        raise self._silent_error(url, type(error).__name__, timeout, argument) from error

    def run(self, request: Callable[[httpx2.AsyncClient], Coroutine[Any, Any, Any]]) -> Any:
        """Run a coroutine to completion in a new thread: this thread may already run an event loop (Jupyter)."""

        async def main() -> Any:
            limits = httpx2.Limits(max_connections=None, max_keepalive_connections=_MAX_IN_FLIGHT)
            timeout = httpx2.Timeout(None, connect=_CONNECT_TIMEOUT)
            async with httpx2.AsyncClient(limits=limits, timeout=timeout, trust_env=False) as client:
                return await request(client)

        return _in_thread(lambda: asyncio.run(main())).result()

    def logps(self, url: str, values: Sequence[float | None], ids: np.ndarray) -> np.ndarray:
        """Convert log-probabilities to float32 `[tokens]`, with NaN for None.

        Raises:
            ServerError: their number differs from the number of tokens.
        """
        if len(values) != len(ids):
            raise self.unusable(url, f"returned {len(values)} log-probabilities for {len(ids)} tokens")
        return np.asarray([np.nan if value is None else value for value in values], np.float32)

    def unusable(self, url: str, why: str) -> ServerError:
        return ServerError(f"The {self.name} server at {url} {why}. Start it with: {self.command(url)}")


def _in_thread(call: Callable[[], Any]) -> concurrent.futures.Future:
    """Call a function in a daemon thread. (The threads of a ThreadPoolExecutor would delay the exit of the process.)"""
    future: concurrent.futures.Future = concurrent.futures.Future()

    def target() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=target, name="trl_jax-server", daemon=True).start()
    return future


def _body(reply: httpx2.Response) -> Any:
    return reply.json() if reply.headers.get("Content-Type", "").startswith("application/json") else reply.text


def message(reply: httpx2.Response) -> str:
    """The error message in the reply to a refused request, shortened."""
    try:
        body = reply.json()
    except ValueError:
        return brief(reply.text)
    names = ("error", "detail", "error_message")
    if isinstance(body, dict):
        body = next((body[name] for name in names if name in body), body)
    return brief(body["message"] if isinstance(body, dict) and "message" in body else body)
