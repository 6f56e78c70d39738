"""Online training with vLLM or SGLang servers: they get the policy's weights after each step, and complete the prompts.

With several training processes, only the first one talks to the servers. It shares the replies with the others.
"""

from __future__ import annotations

import itertools
import os
import secrets
import shutil
import time
import weakref
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

_KEPT = 2  # the current version and the previous one, which a server may still be reading
_MEMORY = Path("/dev/shm")
_NAME = "trl_jax-weights-"
_SCORED = 32  # tokens of the text that verifies the loaded weights
_CLOSE = 0.1  # nats per token; 16-bit computation stays far below
_ATTEMPTS = 3  # at a generation during which servers are restarted
_OWNERS = ("vllm", "sglang")  # of models, as /v1/models names them


def connect(urls: Sequence[str], needs: Requirements, limits: Limits) -> Servers:
    """Wait until every server answers, and check that it can be used.

    Raises:
        ServerError: a server does not answer within the timeout, or it serves something else than the run needs, with
            the command that starts it right.
    """

    def command(url: str) -> str:
        vllm, sglang = (_engine(owner)(urls, needs, limits).command(url) for owner in _OWNERS)
        return f"{vllm} (or, for SGLang: {sglang})"

    unknown = Transport(urls, limits, "vLLM or SGLang", command)
    unknown.each("GET", "/health")
    models = [reply["data"] for reply in unknown.each("GET", "/v1/models")]
    cards = [next(card for card in own if card.get("parent") is None) for own in models]
    owners = [card["owned_by"] for card in cards]
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
    """The engine whose servers name `owner` as the owner of their models."""
    if owner == "vllm":
        from trl_jax.rollout.vllm import Vllm

        return Vllm
    from trl_jax.rollout.sglang import Sglang

    return Sglang


@dataclass(frozen=True)
class ServerParts:
    """The servers of a run, as chosen by its trainer.

    sampling: parameters of requests.
    root: the folder for weights.
    ahead: whether the servers generate while the previous step trains.
    sync_steps: number of steps between two updates of the servers' weights.
    """

    servers: Servers
    sampling: Mapping[str, Any]
    root: Path
    ahead: bool = False
    sync_steps: int = 1


class Completions(NamedTuple):
    """Like `Sampled`, with the seconds spent on weights, generation and waiting, by the names they are logged under."""

    completions: list[np.ndarray]
    logps: list[np.ndarray]
    seconds: dict[str, float]


class ServerPolicy:
    """The policy on servers.

    Args:
        stream: the source of each prompt's seed.
    """

    def __init__(self, setup: Setup, parts: ServerParts, stream: TorchGenerator):
        self._setup, self._servers, self._sampling = setup, parts.servers, parts.sampling
        self._stream, self._sync_steps = stream, parts.sync_steps
        self._loaded: list[weakref.ref[jax.Array]] = []  # the arrays that the servers have loaded
        self._loaded_at = 0  # the step at which they were loaded
        self._has_base = False  # whether the servers have the base model, if they take adapters
        self._asked: list[Future[Sampled]] = []  # generations that may still be running
        self._folders = WeightFolders(parts.root, self._save)
        weakref.finalize(self, shutil.rmtree, self._folders.folder, ignore_errors=True)

    def refresh(self, text: Sequence[int]) -> None:
        """Load the current weights into the servers, unless they have them or the next update is not due.

        Args:
            text: token ids of a text that the servers and the policy score, to verify that they have the same weights.

        Raises:
            ServerError: a server does not load the weights, or its scores differ from the policy's.
        """
        arrays, step = list(self._setup.model.params.values()), self._setup.state.global_step
        if self._loaded and self._sync_steps > 1 and step // self._sync_steps == self._loaded_at // self._sync_steps:
            return
        if len(arrays) == len(self._loaded) and all(a is b() for a, b in zip(arrays, self._loaded, strict=True)):
            return
        wait(self._asked)  # running generations need the weights that the servers have now
        if self._servers.engine.takes_adapters:
            self._load_adapter()
        else:
            folder, version = self._folders.write()
            by_first(lambda: self._servers.load(folder, version))
        self._prove(text)
        self._loaded, self._loaded_at = list(map(weakref.ref, arrays)), step

    def begin(
        self,
        prompt_ids: Sequence[Sequence[int]],
        group: int,
        progress: Progress | None = None,
        most: Sequence[int] | None = None,
        images: Sequence[Sequence[str]] | None = None,
    ) -> Callable[[], Completions]:
        """Start to complete each prompt `group` times with the current weights.

        Args:
            most: maximum number of tokens in each prompt's completions; None uses the parameters of requests.
            images: of each prompt, as data URLs; None without images.

        Returns:
            A function that waits for the completions. If a server lost the weights meanwhile, all prompts are completed
            again with the then current weights. Raises ServerError if a server refuses, does not answer, or loses its
            weights repeatedly.
        """
        seeds = self._stream.words(len(prompt_ids)).tolist()

        def ask() -> tuple[Future[Sampled], float]:
            began = time.monotonic()
            self.refresh(prompt_ids[0])
            synced = time.monotonic() - began
            how = {"group": group, "seeds": seeds, "progress": progress, "most": most, "images": images}
            asked = self._servers.begin(prompt_ids, self._sampling, **how) if is_first() else Future()
            self._asked = [*(one for one in self._asked if not one.done()), asked] if is_first() else []
            return asked, synced

        asked, seconds = ask()

        def completions() -> Completions:
            nonlocal asked, seconds
            for attempt in range(_ATTEMPTS):
                if attempt:
                    asked, seconds = ask()
                began = time.monotonic()
                try:
                    found = by_first(asked.result)
                except StaleWeights as error:
                    self._loaded, self._has_base, lost = [], False, error
                    continue
                waited = time.monotonic() - began
                times = {"weight_sync": seconds, "generation": found.seconds, "rollout_wait": waited}
                return Completions(found.completions, found.logps, {f"perf/{name}_s": s for name, s in times.items()})
            raise ServerError(
                f"After {_ATTEMPTS} attempts, {lost}: another process loads weights, or the server keeps restarting. "
                "Use one server per run."
            ) from lost

        return completions

    def _save(self, folder: Path) -> None:
        self._setup.model.merge_and_unload().save_pretrained(folder)

    def _load_adapter(self) -> None:
        """Load the adapter, and before it the base model if the servers may have another one."""
        model = self._setup.model
        if not self._has_base:
            base = self._folders.write(model.get_base_model().save_pretrained)
            by_first(lambda: self._servers.load(*base))
            self._has_base = True
        adapter = self._folders.write(model.save_pretrained)
        by_first(lambda: self._servers.load_adapter(*adapter))

    def _prove(self, text: Sequence[int]) -> None:
        setup = self._setup
        length = min(_SCORED, setup.model.max_positions or _SCORED)
        image = None if setup.encoder is None else setup.encoder.image_token_id
        text = [token for token in text if token != image]
        ids = np.resize(np.asarray(text, np.int32), length)
        with setup.on_device():
            logps = jax.nn.log_softmax(setup.model(ids[None]).logits[0, :-1], axis=-1)
            own = np.asarray(fetched(logps))[np.arange(length - 1), ids[1:]]
        engine = self._servers.engine
        for url, found in zip(self._servers.urls, by_first(lambda: engine.score(ids)), strict=True):
            apart = float(np.mean(np.abs(found - own)))
            if not apart <= _CLOSE:
                raise ServerError(
                    f"The {engine.transport.name} server at {url} loaded the weights, but its log-probabilities of a "
                    f"text are {apart:.3g} nats per token from the policy's, wanted at most {_CLOSE}. Start it with "
                    f"the model that is trained, unquantized: {engine.command(url)}"
                )


def by_first(do: Callable[[], Any]) -> Any:
    """Call `do` in the first process only, and return its result in all processes.

    Raises:
        StaleWeights: `do` raised it.
        RuntimeError: in the other processes, if `do` raised something else.
    """
    if not several():
        return do()

    def attempted() -> tuple[Any, StaleWeights | None] | None:
        if not is_first():
            return None
        try:
            return do(), None
        except StaleWeights as error:
            return None, error

    value, error = of_each_process(attempted)[0]
    if error is not None:
        raise error
    return value


# Folders through which servers get weights


class WeightFolders:
    """Versions of a run's weights, in a folder of its own. Each version appears atomically.

    Args:
        root: parent of the run's folder.
        save: writes a checkpoint into a new folder. All processes call it together, and the first one writes.

    Attributes:
        folder: the run's own, which `close` removes.
    """

    def __init__(self, root: Path, save: Callable[[Path], None]):
        self._save, self._numbers = save, itertools.count(1)
        self._run = f"{_NAME}{os.getpid()}-{secrets.token_hex(4)}"
        self.folder = root / self._run
        if root == _MEMORY:
            _remove_orphans(root)
        self._kept: list[Path] = []

    def write(self, save: Callable[[Path], None] | None = None) -> tuple[str, str]:
        """Save the next version; returns its folder and a name that no other run uses.

        Args:
            save: writes something other than the run's weights.

        Raises:
            OSError: the folder cannot be written; the message names the argument to choose another one.
        """
        number = next(self._numbers)
        place, unfinished = self.folder / f"{number:06d}", self.folder / f"{number:06d}.unfinished"
        try:
            if is_first():
                unfinished.mkdir(parents=True)
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
            shutil.rmtree(self._kept.pop(0))
        return str(place.resolve()), f"{self._run}/{number}"

    def close(self) -> None:
        """Remove all versions."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self._kept.clear()


def adapter_rank(model: PreTrainedModel) -> int | None:
    """The largest rank of an adapter that vLLM computes as PEFT does; None if the model has no such adapter."""
    backend = model.backend
    if not isinstance(backend, LoraBackend):
        return None
    plan, config = backend.plan, backend.config
    changed = plan.full.layers or plan.full.tensors or plan.saved_tables or plan.carried or backend.base.formats
    kinds = config.use_dora or config.lora_bias or config.bias != "none"
    kinds |= config.init_lora_weights not in (True, False, "gaussian")  # others change the base model
    matrices = all(one.module.kind in ("linear", "conv1d") and not one.module.experts for one in plan.modules)
    return None if changed or kinds or not matrices else max(one.rank for one in plan.modules)


def _remove_orphans(root: Path) -> None:
    """Remove folders that killed processes of this machine left in shared memory."""
    for folder in root.glob(f"{_NAME}*"):
        process = folder.name.removeprefix(_NAME).partition("-")[0]
        if process.isdigit() and not Path("/proc", process).exists():
            shutil.rmtree(folder, ignore_errors=True)


def default_root(output_dir: str) -> Path:
    """Where weights for a server on this machine go: shared memory, or `output_dir` on systems without /dev/shm."""
    return _MEMORY if os.access(_MEMORY, os.W_OK) else Path(output_dir)
