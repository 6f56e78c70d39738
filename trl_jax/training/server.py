"""Online training with vLLM or SGLang servers: they complete the prompts, and get the new weights after each update.

With several training processes, only the first one talks to the servers. It broadcasts the replies to the others.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import logging
import math
import os
import secrets
import shutil
import socket
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from trl_jax.core.torch_random import TorchGenerator
from trl_jax.hub.peft_backend import LoraBackend
from trl_jax.hub.pretrained import PreTrainedModel
from trl_jax.mesh.mesh import fetched
from trl_jax.mesh.processes import is_first, of_each_process, several
from trl_jax.rollout.server import (
    Engine,
    Limits,
    Progress,
    Requirements,
    Sampled,
    ServerError,
    Servers,
    StaleWeights,
    Transport,
)  # fmt: skip
from trl_jax.training.state import Setup

logger = logging.getLogger(__name__)

_KEPT = 2  # the current version and the previous one, which a server may still be reading
_MEMORY = Path("/dev/shm")
_NAME = "trl_jax-weights-"
_SCORED = 32  # length in tokens of the text that verifies the loaded weights
_CLOSE = 0.1  # tolerance in nats per token, far above the rounding errors of 16-bit computation
_NOISE = 1e-3  # the same for changes of the distance, if the server computes as exactly as the policy
_FAR = 0.5  # before the first load: the server may have another model
_ATTEMPTS = 3  # attempts at a generation if servers lose their weights meanwhile
_OWNERS = ("vllm", "sglang")  # `owned_by` in /v1/models
_PROJECTIONS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def connect(urls: Sequence[str], needs: Requirements, limits: Limits) -> Servers:
    """Wait until every server is up, detect the engine, and check that the servers meet the run's requirements.

    Raises:
        ServerError: a server does not respond within the timeout or is unsuitable, or the engines differ. Unless they
            differ, the message has the command that starts a suitable server.
    """

    def command(url: str) -> str:
        vllm, sglang = (_engine(owner)(urls, needs, limits).command(url) for owner in _OWNERS)
        return f"{vllm} (or, for SGLang: {sglang})"

    unknown = Transport(urls, limits, "vLLM or SGLang", command)
    unknown.request_all("GET", "/health")
    models = [reply["data"] for reply in unknown.request_all("GET", "/v1/models")]
    cards = [next((card for card in served if card.get("parent") is None), {}) for served in models]
    owners = [card.get("owned_by") for card in cards]
    for url, owner in zip(urls, owners, strict=True):
        if owner not in _OWNERS:
            raise unknown.unusable(url, f"serves a model of {owner!r} (owned_by in /v1/models)")
        if owner != owners[0]:
            raise ServerError(
                f"The server at {urls[0]} is of {owners[0]}, and the one at {url} of {owner}, which give different "
                "completions for the same seed. Give the URLs of servers of one engine in vllm_server_base_url."
            )
    engine = _engine(owners[0])(urls, needs, limits)
    engine.ready(cards)
    return Servers(engine)


def _engine(owner: str) -> type[Engine]:
    """The `Engine` class for an `owned_by` of /v1/models."""
    if owner == "vllm":
        from trl_jax.rollout.vllm import Vllm

        return Vllm
    from trl_jax.rollout.sglang import Sglang

    return Sglang


@dataclass(frozen=True)
class ServerParts:
    """A trainer's configuration of generation on servers.

    sampling: the sampling parameters of requests (`Engine.parameters`).
    root: folder in which the weights are handed over.
    ahead: whether the servers generate the next completions while a step trains.
    sync_steps: number of steps between two updates of the servers' weights.
    """

    servers: Servers
    sampling: Mapping[str, Any]
    root: Path
    ahead: bool = False
    sync_steps: int = 1


class Completions(NamedTuple):
    """Like `Sampled`. `seconds` maps the logged metrics, such as perf/weight_sync_s, to seconds."""

    completions: list[np.ndarray]
    logps: list[np.ndarray]
    seconds: dict[str, float]


class ServerPolicy:
    """Generates with the current policy on servers, and keeps their weights up to date.

    Args:
        stream: the random generator of the prompts' seeds.
    """

    def __init__(self, setup: Setup, parts: ServerParts, stream: TorchGenerator):
        self._setup, self._servers, self._sampling = setup, parts.servers, parts.sampling
        self._stream, self._sync_steps = stream, parts.sync_steps
        self._loaded: list[weakref.ref[jax.Array]] = []  # the parameters that the servers have
        self._loaded_at = 0  # global step at which they were loaded
        self._has_base = False  # with adapters: whether the servers have the base model
        self._asked: list[Future[Sampled]] = []  # generations that may still be running
        self._proof = WeightProof(setup, parts.servers)
        self._folders = WeightFolders(parts.root, self._save)
        weakref.finalize(self, shutil.rmtree, self._folders.folder, ignore_errors=True)

    def refresh(self, text: Sequence[int]) -> None:
        """Load the current weights into the servers, unless they are up to date or the next sync is not due.

        Waits for running generations first.

        Args:
            text: token ids of a prompt. The servers and the policy score the first one of the run after each load, to
                verify that their weights match.

        Raises:
            ServerError: a server fails to load the weights, or its log-probabilities differ from the policy's or do not
                follow them.
        """
        arrays, step = list(self._setup.model.params.values()), self._setup.state.global_step
        if self._loaded and self._sync_steps > 1 and step // self._sync_steps == self._loaded_at // self._sync_steps:
            return
        if len(arrays) == len(self._loaded) and all(a is b() for a, b in zip(arrays, self._loaded, strict=True)):
            return
        wait(self._asked)  # running generations still use the previous weights
        self._proof.begin(text)
        if self._servers.engine.takes_adapters:
            self._load_adapter()
        else:
            folder, version = self._folders.write()
            by_first(lambda: self._servers.load(folder, version))
        self._proof.check()
        self._loaded, self._loaded_at = list(map(weakref.ref, arrays)), step

    def begin(
        self,
        prompt_ids: Sequence[Sequence[int]],
        group: int,
        progress: Progress | None = None,
        most: Sequence[int] | None = None,
        images: Sequence[Sequence[str]] | None = None,
    ) -> Callable[[], Completions]:
        """Sync the weights if due (`refresh`), then start completing each prompt `group` times.

        Args:
            progress: called in a background thread with the numbers of completions and of tokens generated so far.
            most: maximum number of tokens per completion for each prompt, in addition to the limit in the sampling
                parameters.
            images: data URLs for each prompt; None if no prompt has images.

        Returns:
            A function that waits for the completions. If a server lost its weights meanwhile, it loads the weights that
            are current by then and has all prompts completed again. It raises ServerError if a server refuses a
            request, does not respond, or loses its weights repeatedly.
        """
        seeds = self._stream.words(len(prompt_ids)).tolist()

        def ask() -> tuple[Future[Sampled], float]:
            began = time.monotonic()
            self.refresh(prompt_ids[0])
            synced = time.monotonic() - began
            how = {"group": group, "seeds": seeds, "progress": progress, "most": most, "images": images}
            future = self._servers.begin(prompt_ids, self._sampling, **how) if is_first() else Future()
            self._asked = [*(request for request in self._asked if not request.done()), future] if is_first() else []
            return future, synced

        pending, seconds = ask()

        def completions() -> Completions:
            nonlocal pending, seconds
            for attempt in range(_ATTEMPTS):
                if attempt:
                    pending, seconds = ask()
                began = time.monotonic()
                try:
                    reply = by_first(pending.result)
                except StaleWeights as error:
                    self._loaded, self._has_base, lost = [], False, error
                    continue
                waited = time.monotonic() - began
                times = {"weight_sync": seconds, "generation": reply.seconds, "rollout_wait": waited}
                return Completions(reply.completions, reply.logps, {f"perf/{name}_s": s for name, s in times.items()})
            raise ServerError(
                f"After {_ATTEMPTS} attempts, {lost}: another process loads weights, or the server keeps restarting. "
                "Use one server per run."
            ) from lost

        return completions

    def _save(self, folder: Path) -> None:
        self._setup.model.merge_and_unload().save_pretrained(folder)

    def _load_adapter(self) -> None:
        """Load the adapter; load the base model first if the servers may not have it."""
        model = self._setup.model
        if not self._has_base:
            base = self._folders.write(model.get_base_model().save_pretrained)
            by_first(lambda: self._servers.load(*base))
            self._has_base = True
        adapter = self._folders.write(model.save_pretrained)
        by_first(lambda: self._servers.load_adapter(*adapter))


class _Scores(NamedTuple):
    """Log-probabilities of the text under the policy, and the same of each server."""

    own: np.ndarray
    servers: list[np.ndarray]


class WeightProof:
    """Verifies that servers have the policy's weights, by the log-probabilities of one text after each load.

    They must be within `_CLOSE` of the policy's, and change as the policy's do since an earlier load. The tolerance of
    a change is 4 times the distance after the first load, which shows how the server rounds or quantizes, or half the
    change of the policy. A server that ignores the loads is therefore found out once the policy has moved further
    than the rounding errors, however small the steps are.
    """

    def __init__(self, setup: Setup, servers: Servers):
        self._setup, self._servers = setup, servers
        self._ids: np.ndarray | None = None  # the text
        self._tolerances: list[float] = []  # of each server's changes, in nats per token
        self._earlier: _Scores | None = None  # at the load since which changes are compared

    def begin(self, text: Sequence[int]) -> None:
        """Before a load: choose the text, if it is the first one. A new run warns of servers with other weights."""
        if self._ids is not None:
            return
        setup, engine = self._setup, self._servers.engine
        # The servers generate one token after the text.
        room = min(filter(None, (setup.model.max_positions, engine.context_length)), default=math.inf) - 1
        image = None if setup.encoder is None else setup.encoder.image_token_id
        text = [token for token in text if token != image]
        self._ids = np.resize(np.asarray(text, np.int32), int(min(_SCORED, max(room, 2))))
        if setup.state.global_step > 0:  # a server that was started for the rest of a run has the weights of its start
            return
        policy_logps, servers = self._scores()
        for url, logps in zip(self._servers.urls, servers, strict=True):
            delta = _distance(logps, policy_logps)
            if not delta <= _FAR and is_first():
                logger.warning(
                    "Before the first weights are loaded, the %s server at %s is %.3g nats per token from the policy "
                    "on a prompt, expected about 0: it has the weights of another run, or another model than %s. In "
                    "the latter case, start it with: %s",
                    engine.transport.name, url, delta, setup.model.name_or_path, engine.command(url),
                )  # fmt: skip

    def check(self) -> None:
        """After a load.

        Raises:
            ServerError: a server does not have the policy's weights.
        """
        engine, now = self._servers.engine, self._scores()
        name, distances = engine.transport.name, [_distance(logps, now.own) for logps in now.servers]
        for url, delta in zip(self._servers.urls, distances, strict=True):
            if not delta <= _CLOSE:
                raise ServerError(
                    f"The {name} server at {url} loaded the weights, but its log-probabilities of a text are "
                    f"{delta:.3g} nats per token from the policy's, wanted at most {_CLOSE}. Start it with the model "
                    f"that is trained, unquantized: {engine.command(url)}"
                )
        if self._earlier is None:
            self._tolerances, self._earlier = [max(4 * distance, _NOISE) for distance in distances], now
            return
        moved = _distance(now.own, self._earlier.own)
        for place, url in enumerate(self._servers.urls):
            change = now.servers[place] - self._earlier.servers[place]
            delta, most = _distance(change, now.own - self._earlier.own), max(self._tolerances[place], moved / 2)
            if not delta <= most:
                raise ServerError(
                    f"The {name} server at {url} says that it loaded the weights, but its log-probabilities do not "
                    f"follow the policy's: since an earlier load, the policy's score of a text changed by {moved:.3g} "
                    f"nats per token, and the server's by {np.mean(np.abs(change)):.3g}. The changes differ by "
                    f"{delta:.3g}, wanted at most {most:.3g}. Check in the server's log that it reads the folder "
                    "of each version (vllm_weights_dir), that no other run loads weights into it, and that no proxy in "
                    f"between answers for it. Then restart it: {engine.command(url)}"
                )
        if moved > 4 * max(self._tolerances):  # later loads are compared with this one, which has been verified
            self._earlier = now

    def _scores(self) -> _Scores:
        setup, ids, engine = self._setup, self._ids, self._servers.engine
        with setup.on_device():
            logps = jax.nn.log_softmax(setup.model(ids[None]).logits[0, :-1], axis=-1)
            policy_logps = np.asarray(fetched(logps))[np.arange(len(ids) - 1), ids[1:]]
        return _Scores(policy_logps, by_first(lambda: engine.score(ids)))


def _distance(a: np.ndarray, b: np.ndarray) -> float:
    """Nats per token."""
    return float(np.mean(np.abs(a - b)))


def by_first(do: Callable[[], Any]) -> Any:
    """Call `do` in the first process only, and broadcast its result to all processes.

    Raises:
        StaleWeights, ServerError: in all processes, if `do` raised it.
        RuntimeError: in the other processes, if `do` raised anything else.
    """
    if not several():
        return do()

    def attempted() -> tuple[Any, StaleWeights | ServerError | None] | None:
        if not is_first():
            return None
        try:
            return do(), None
        except (StaleWeights, ServerError) as error:
            return None, error

    value, error = of_each_process(attempted)[0]
    if error is not None:
        raise error
    return value


# Folders in which weights are handed over


class WeightFolders:
    """Writes numbered versions of a run's weights and keeps the last two. Each appears by an atomic rename.

    Args:
        root: parent of the run's folder.
        save: saves a checkpoint to a new folder. It is called in all processes, and only the first one writes.

    Attributes:
        folder: the run's folder, unique to it.
    """

    def __init__(self, root: Path, save: Callable[[Path], None]):
        self._save, self._numbers = save, itertools.count(1)
        self._run = f"{_NAME}{os.getpid()}-{_process_ids()}-{secrets.token_hex(4)}"
        self.folder = root / self._run
        if root == _MEMORY:
            _remove_orphans(root)
        self._kept: list[Path] = []

    def write(self, save: Callable[[Path], None] | None = None) -> tuple[str, str]:
        """Save the next version and return its folder and its label, which is unique across runs.

        Args:
            save: used instead of the constructor's `save`.

        Raises:
            OSError: writing failed. All versions are removed, and the message names the argument for another folder.
        """
        number = next(self._numbers)
        place, unfinished = self.folder / f"{number:06d}", self.folder / f"{number:06d}.unfinished"
        try:
            by_first(lambda: unfinished.mkdir(parents=True))
            (save or self._save)(unfinished)
            if is_first():
                os.replace(unfinished, place)
                self._kept.append(place)
        except OSError as error:
            self.close()
            raise OSError(
                error.errno,
                f"The weights for the server cannot be written ({error.strerror}). Set vllm_weights_dir to a "
                "folder with space for two copies of the model",
                str(place),
            ) from error
        while len(self._kept) > _KEPT:
            shutil.rmtree(self._kept.pop(0), ignore_errors=True)
        return str(place.resolve()), f"{self._run}/{number}"

    def close(self) -> None:
        """Remove the run's folder with all versions."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self._kept.clear()


def adapter_rank(model: PreTrainedModel) -> int | None:
    """The largest rank of the model's LoRA adapter; None without one, or if vLLM cannot run it unmerged."""
    backend = model.backend
    if not isinstance(backend, LoraBackend):
        return None
    plan, config = backend.plan, backend.config
    changed = plan.full.layers or plan.full.tensors or plan.saved_tables or plan.carried or backend.base.formats
    kinds = config.use_dora or config.lora_bias or config.bias != "none"
    kinds |= config.init_lora_weights not in (True, False, "gaussian")  # the others modify the base weights
    matrices = all(part.module.kind in ("linear", "conv1d") and not part.module.experts for part in plan.modules)
    return None if changed or kinds or not matrices else max(part.rank for part in plan.modules)


def fused_adapter(model: PreTrainedModel) -> bool:
    """Whether the model's LoRA adapter is like `Requirements.fused_adapter`."""
    backend = model.backend
    if not isinstance(backend, LoraBackend):
        return False
    config, layers = backend.config, defaultdict(set)
    for adapter in backend.plan.modules:
        for name, rank in zip(adapter.names, adapter.ranks, strict=True):
            if rank:
                module, _, leaf = name.rpartition(".")
                layers[module].add(leaf)
    keys = any("k_proj" in leaves for leaves in layers.values())
    together = all(
        leaves <= _PROJECTIONS
        and ("q_proj" in leaves) == ("v_proj" in leaves)
        and ("k_proj" in leaves) == (keys and "q_proj" in leaves)
        and ("gate_proj" in leaves or "up_proj" not in leaves)
        for leaves in layers.values()
    )
    return together and not (config.use_rslora or config.rank_pattern or config.alpha_pattern)


@functools.cache
def _process_ids() -> str:
    """Identifies the process ids of this machine: containers that share its memory may count their own."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):  # not Linux
        parts += [Path("/proc/sys/kernel/random/boot_id").read_text(), os.readlink("/proc/self/ns/pid")]
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=6).hexdigest()


def _remove_orphans(root: Path) -> None:
    """Remove weight folders whose process on this machine no longer exists, such as after a SIGKILL."""
    for folder in root.glob(f"{_NAME}*-{_process_ids()}-*"):
        process = folder.name.removeprefix(_NAME).partition("-")[0]
        if process.isdigit() and not Path("/proc", process).exists():
            shutil.rmtree(folder, ignore_errors=True)


def default_root(output_dir: str) -> Path:
    """The folder for weights if all servers are on this machine: /dev/shm if it is writable, else `output_dir`."""
    return _MEMORY if os.access(_MEMORY, os.W_OK) else Path(output_dir)
