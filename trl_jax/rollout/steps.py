"""The steps of online training: which prompts each of them takes, when completions are generated, and what a checkpoint
keeps of both."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any, ClassVar, Protocol

import jax
import numpy as np
from datasets import IterableDataset

from trl_jax.core.torch_random import GeneratorState, TorchGenerator
from trl_jax.rollout.completions_log import MetricLog
from trl_jax.rollout.rollout import (
    Experience,
    GeneratedCompletions,
    Rollout,
    Row,
    ScoredCompletion,
    prefixed,
    under_prefix,
)
from trl_jax.rollout.server import ServerError
from trl_jax.tasks.policy import Cycle, EntropyBonus

logger = logging.getLogger(__name__)

BASE_SEED_WORDS = 2  # random words that torch's DataLoader draws per epoch to seed its workers
# Saved log-probabilities that differ from those that a resumed run needs -> the argument that was changed.
_REASONS = {
    "old_logps": "gradient_accumulation_steps, whose steps use up a generation or do not",
    "ref_logps": "beta, from or to 0",
    "sampling_logps": "vllm_importance_sampling_correction or off_policy_mask_threshold",
}


@dataclass
class RolloutSteps:
    """Iterates over the steps of an epoch, which `set_epoch` starts.

    Completions are generated with the current parameters. With `ahead`, the next generation starts before the steps of
    this one, so its policy is one generation older. The logged staleness counts updates of the servers' weights, which
    happen every `sync_steps` steps.

    read_row: maps what the sampler yields (an index, or a row of a stream) to a row of the dataset.
    make_sampler: creates the sampler of a run, which yields the prompts of each epoch.
    lay_out: (micro-batches of completions, the generation of each, step number, entropy coefficient) -> step batch.
    measure: (metrics of a step, as NumPy) -> the metrics of its loss by name, a list with one number per micro-batch.
    streams: torch random streams, one per rank. Completions are sampled with the first one.
    seeds: the random stream for the servers' seeds, which do not depend on the number of ranks; None without servers.
    bonus: the entropy coefficient of each step; None without an entropy bonus.
    needed_logps: which of "old_logps", "ref_logps" and "sampling_logps" the task needs.
    num_steps_of_run: returns the number of steps in the run; nothing is generated ahead for later steps.

    State:
        num_micro_batches: since the start of the run; determines when to generate.
        num_steps: since the start of the run.
        generation: the one that steps are taken from; None before the first.
        epoch: -1 before the first.
    """

    rollout: Rollout
    cycle: Cycle
    read_row: Callable[[Any], Row]
    make_sampler: Callable[[], Sampler]
    lay_out: Callable[[list[list[ScoredCompletion]], list[Experience], int, float | None], Any]
    measure: Callable[[dict[str, np.ndarray]], dict[str, list[float]]]
    streams: Sequence[TorchGenerator]
    seeds: TorchGenerator | None
    bonus: EntropyBonus | None
    needed_logps: frozenset[str]
    num_steps_of_run: Callable[[], int]
    ahead: bool = False
    sync_steps: int = 1

    recoverable: ClassVar[tuple[type[Exception], ...]] = (ServerError,)  # a later run can go on from the last step

    def __post_init__(self) -> None:
        self._losses_first, self._step_started_at = False, 0.0
        self.begin(lambda: None)

    def begin(
        self, begin_step: Callable[[], None], at_iterates: Callable[[], AbstractContextManager] = nullcontext
    ) -> None:
        """Discard the state of an earlier run, whose completions came from another policy, and read its dataset again.

        Args:
            begin_step: called before a step generates: callbacks may change what rewards depend on.
            at_iterates: a context in which the policy has the parameters at which the next gradient is taken (see
                `TrainStep.at_iterates`): it generates with these, as in TRL.
        """
        self.generation: Experience | None = None
        self._pending: PendingCompletions | None = None
        self.num_micro_batches, self.num_steps, self.epoch = 0, 0, -1
        self.sampler, self._begin_step, self._at_iterates = self.make_sampler(), begin_step, at_iterates

    @property
    def random_streams(self) -> list[TorchGenerator]:
        return [*self.streams, *([] if self.seeds is None else [self.seeds])]

    def begin_epoch_again(self, epoch: int) -> None:
        """Make the next `set_epoch(epoch)` restart that epoch with the current dataset and a new generation."""
        self.generation, self._pending, self.num_micro_batches, self.epoch = None, None, 0, epoch - 1
        self.sampler.begin(epoch)

    def set_epoch(self, epoch: int, skip: int = 0, skipped_digest: int | None = None) -> None:
        """Start an epoch. A restored epoch continues at its saved position, so `skip` is ignored."""
        del skip, skipped_digest
        if epoch == self.epoch:
            return
        self.epoch = epoch
        self.sampler.next_epoch()
        for stream in self.streams:
            stream.skip(BASE_SEED_WORDS)

    def __len__(self) -> int:
        """Steps per epoch; TypeError for a stream."""
        if self.sampler.num_chunks is None:
            raise TypeError("a stream of prompts has no length")
        return -(-self.sampler.num_chunks * self.cycle.repeats // self.cycle.accumulation)

    def __iter__(self) -> Iterator[Any]:
        while self.sampler.has_next:
            self._begin_step()
            yield self._step()

    def _step(self) -> Any:
        """The next step. If a server fails, the state from before the step is restored, so that it can be saved."""
        streams = self.random_streams
        sampler, metrics = self.sampler.state(), self._metrics.copied()
        stream_states = [stream.state() for stream in streams]
        generation, pending, num_micro_batches = self.generation, self._pending, self.num_micro_batches
        try:
            return self._next_batch()
        except ServerError:
            self.sampler.restore(sampler)
            for stream, state in zip(streams, stream_states, strict=True):
                stream.restore(state)
            self._metrics.restore(metrics)
            self.generation, self._pending, self.num_micro_batches = generation, pending, num_micro_batches
            raise

    def _next_batch(self) -> Any:
        """Lay out the micro-batches of one step (fewer at the end of an epoch), and generate when one is due."""
        self._step_started_at = time.monotonic()
        micro_batches, generations, self._losses_first = [], [], False
        is_first = not self._metrics.values  # since the last log
        while len(micro_batches) < self.cycle.accumulation and self.sampler.has_next:
            prompts = self.sampler.next()
            if self.num_micro_batches % self.cycle.repeats == 0 or self.generation is None:
                self.generation = self._generate(prompts)
                self._losses_first = self._losses_first or (is_first and bool(micro_batches))
            part = self.num_micro_batches % self.cycle.parts
            micro_batches.append(self.generation.part(part, self.cycle.parts, len(self.streams)))
            generations.append(self.generation)
            self.num_micro_batches += 1
        number, self.num_steps = self.num_steps, self.num_steps + 1
        return self.lay_out(micro_batches, generations, number, None if self.bonus is None else self.bonus.next())

    def pass_over(self, steps: int) -> int:
        """Skip the first `steps` steps of a run without generating; the next step starts a new generation.

        Returns how many of the skipped steps belong to the last epoch reached.
        """
        epoch_steps = 0
        for _ in range(steps):
            if not self.sampler.has_next:
                self.set_epoch(self.epoch + 1)
                epoch_steps = 0
            parts = 0
            while parts < self.cycle.accumulation and self.sampler.has_next:
                self.sampler.next()
                parts += 1
            self.num_micro_batches += parts
            self.num_steps, epoch_steps = self.num_steps + 1, epoch_steps + 1
        return epoch_steps

    def finish(self) -> None:
        """Wait for pending uploads at the end of a run."""
        if self.rollout.table is not None:
            self.rollout.table.finish()

    def stepped(self, metrics: dict[str, Any]) -> None:
        """Wait for a step to finish, as the next generation would do anyway, and add its metrics to those since the
        last log, in TRL's order."""
        metrics = jax.device_get(metrics)
        loss_metrics = self.measure(metrics)
        if self.bonus is not None:
            self.bonus.stepped(metrics)
            coef = {"entropy_coef": self.bonus.taken()}  # TRL records it during the last micro-batch
            if len(loss_metrics.get("policy_loss", ())) == 1:
                loss_metrics = {"policy_loss": loss_metrics.pop("policy_loss")} | coef | loss_metrics
            else:
                loss_metrics = loss_metrics | coef
        self._metrics.extend(loss_metrics, first=self._losses_first)
        self._metrics.extend({"step_time": [time.monotonic() - self._step_started_at]})

    @property
    def _metrics(self) -> MetricLog:
        return self.rollout.metrics["train"]

    def _generate(self, prompts: Sequence[Any]) -> Experience:
        """Generate completions for these prompts and shuffle them within each rank."""
        rows = self._rows_of(prompts)
        with self._at_iterates():
            generated_ahead = self._take_completions_ahead(prompts, rows) if self.ahead else None
            experience = self.rollout.generate_and_score(rows, self.cycle.group, "train", generated_ahead)
        size = len(rows) // len(self.streams)
        orders = [rank * size + stream.permutation(size) for rank, stream in enumerate(self.streams)]
        return experience.reordered(np.concatenate(orders).tolist())

    def _rows_of(self, prompts: Sequence[Any]) -> list[Row]:
        return [self.read_row(prompt) for prompt in prompts for _ in range(self.cycle.group)]

    def _take_completions_ahead(self, prompts: Sequence[Any], rows: Sequence[Row]) -> GeneratedCompletions:
        """Wait for the completions of these rows, which were started before the steps of the previous generation, or
        start them now if there was none. Then start the next generation's."""
        group = self.cycle.group
        pending, self._pending = self._pending, None
        if pending is None or not pending.is_for(prompts):  # a callback may have ended the epoch
            pending = PendingCompletions(self.rollout.start_generating(rows, group), self.num_steps)
        completions = pending.completions
        staleness = self.num_steps // self.sync_steps - pending.step // self.sync_steps
        self._metrics.extend({"sample/staleness_mean": [float(staleness)]})
        end = self.num_steps_of_run() * self.cycle.accumulation
        next_prompts = self.sampler.following() if self.num_micro_batches + self.cycle.repeats < end else None
        if next_prompts is not None:
            wait = self.rollout.start_generating(self._rows_of(next_prompts), group)
            self._pending = PendingCompletions(wait, self.num_steps, next_prompts)
        return completions

    def state(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """What a resumed run needs to continue bitwise identically: arrays and JSON values. Waits for servers."""
        arrays = {} if self.generation is None else prefixed("buffer", self.generation.arrays())
        pending = None if self._pending is None else self._pending.wait_or_none()
        if pending is not None:
            arrays |= prefixed("next", pending.completions.arrays())
        states = [stream.state() for stream in self.streams]
        arrays["streams"] = np.stack([state.key for state in states])
        seeds = None if self.seeds is None else self.seeds.state()
        arrays |= {} if seeds is None else {"seeds": seeds.key}
        if self.rollout.table is not None:
            arrays["table"] = self.rollout.table.state()
        arrays |= prefixed("sampler", self.sampler.state())
        values = {
            "num_micro_batches": self.num_micro_batches,
            "num_steps": self.num_steps,
            "epoch": self.epoch,
            "sizes": self._sizes(),
            "streams": [[state.used, state.position] for state in states],
            "seeds": None if seeds is None else [seeds.used, seeds.position],
            "metrics": self._metrics.copied(),
            "bonus": None if self.bonus is None else self.bonus.state(),
            "next": None if pending is None else pending.step,
        }
        return arrays, values

    def restore(
        self, arrays: dict[str, np.ndarray], values: dict[str, Any], unlogged: Sequence[dict[str, np.ndarray]] = ()
    ) -> bool:
        """Continue from a saved `state`.

        Args:
            unlogged: the metrics of each step since the last log.

        Returns:
            Whether arguments have changed, so that new generations are formed, starting with the first prompt that no
            finished generation has used. The position in the epoch is then counted from zero again.
        """
        states = zip(arrays["streams"], values["streams"], strict=True)
        for stream, (key, (used, position)) in zip(self.streams, states, strict=False):  # ranks may differ
            stream.restore(GeneratorState(key, used, position))
        if self.seeds is not None and values.get("seeds") is not None:
            self.seeds.restore(GeneratorState(arrays["seeds"], *values["seeds"]))
        if self.rollout.table is not None and "table" in arrays:
            self.rollout.table.restore(arrays["table"])
        self.num_steps = values["num_steps"]
        if self.bonus is not None and values["bonus"] is not None:
            self.bonus.restore(values["bonus"])
        self._metrics.restore(values["metrics"])
        if "generated" in values:  # a checkpoint of an earlier version, whose metrics leave out the losses
            for metrics in unlogged:
                with suppress(KeyError):  # sums of another loss, if arguments have changed
                    self._metrics.extend(self.measure(metrics))
        saved_completions = under_prefix("next", arrays)
        self._pending = None
        if saved_completions and self.ahead:
            self._pending = PendingCompletions(
                lambda: GeneratedCompletions.from_arrays(saved_completions), values["next"]
            )
        return self._restore_place(under_prefix("buffer", arrays), under_prefix("sampler", arrays), values)

    def _restore_place(self, buffer: dict, sampler: dict, values: dict[str, Any]) -> bool:
        sizes = self._sizes()
        saved = values.get("sizes", sizes)  # missing in earlier checkpoints
        self.epoch, self.num_micro_batches = values["epoch"], values["num_micro_batches"]
        self.generation = Experience.from_arrays(buffer) if buffer else None
        if ("order" in sampler) != ("order" in self.sampler.state()):  # a table then and a stream now, or vice versa
            self.begin_epoch_again(self.epoch)
            return True
        self.sampler.restore(sampler)
        changed = [f"{name} {saved[name]} -> {sizes[name]}" for name in sizes if saved[name] != sizes[name]]
        unfinished = self.num_micro_batches % (saved["steps_per_generation"] * saved["num_iterations"]) > 0
        restarts, reasons = bool(changed), changed
        if unfinished and self.generation is not None:
            changed_logps = self.needed_logps.symmetric_difference(self.generation.logps)
            reasons = changed + [_REASONS[name] for name in sorted(changed_logps)]
            # With `keeps_policy`, steps must start with a generation.
            restarts = restarts or (bool(changed_logps) and self.cycle.keeps_policy)
        if unfinished and reasons:
            self.generation = None
            logger.warning(
                "Resuming in the middle of a generation with changed arguments (%s): its completions are dropped and "
                "its prompts are completed again.",
                ", ".join(reasons),
            )
        if restarts:
            self.generation, self._pending, self.num_micro_batches = None, None, 0
            self.sampler.repeat_chunk()
        return restarts

    def _sizes(self) -> dict[str, int]:
        """The sizes that define generations and micro-batches, named after the arguments."""
        cycle = self.cycle
        return {
            "num_generations": cycle.group,
            "prompts of a generation": cycle.prompts,
            "steps_per_generation": cycle.parts,
            "num_iterations": cycle.iterations,
            "devices": len(self.streams),
        }

    @property
    def micro_batches_done(self) -> int:
        """The position in the epoch, in micro-batches of the current size."""
        done = self.sampler.num_done * self.cycle.repeats // self.cycle.prompts
        return done + self.num_micro_batches % self.cycle.repeats


@dataclass
class PendingCompletions:
    """Completions that servers are generating.

    wait: waits for them.
    step: the number of steps taken before they were started.
    prompts: the chunk of prompts, as the sampler returned it; None for the current one.
    """

    wait: Callable[[], GeneratedCompletions]
    step: int
    prompts: Sequence[Any] | None = None

    @cached_property
    def completions(self) -> GeneratedCompletions:
        """The completions, once the servers have generated them. If they fail, the next access waits again."""
        return self.wait()

    def is_for(self, prompts: Sequence[Any]) -> bool:
        """Whether these are the completions of `prompts`."""
        if self.prompts is None or self.prompts is prompts:
            return True
        return isinstance(prompts, np.ndarray) and np.array_equal(prompts, self.prompts)

    def wait_or_none(self) -> PendingCompletions | None:
        """Wait for the completions and return self; None if the servers failed."""
        try:
            _ = self.completions
        except ServerError:
            return None
        return self


# Prompt samplers, with the same order of prompts as TRL


class Sampler(Protocol):
    """Yields the prompts of each micro-batch, epoch by epoch."""

    num_chunks: int | None  # per epoch; None if unknown

    def begin(self, epoch: int = 0) -> None:
        """Rewind to just before this epoch."""

    def next_epoch(self) -> None: ...

    @property
    def has_next(self) -> bool:
        """Whether the epoch has another micro-batch."""

    def next(self) -> Any:
        """Advance to the next micro-batch and return its chunk of prompts, whether or not it starts a generation."""

    def following(self) -> Any | None:
        """Peek at the chunk after the current one without advancing; at the end of an epoch, at the first one of the
        next epoch. None at the end of a stream."""

    @property
    def num_done(self) -> int:
        """Number of prompts of this epoch whose chunks have been yielded all `repeats` times."""

    def repeat_chunk(self) -> None:
        """Restart the current chunk from its first micro-batch."""

    def state(self) -> dict[str, np.ndarray]:
        """Arrays for `restore`."""

    def restore(self, state: dict[str, np.ndarray]) -> None:
        """Continue from `state`. If its chunk size or number of repeats is different, continue after the prompts that
        were done."""


class RepeatSampler:
    """Chunks of prompts, each yielded `repeats` times in a row; an incomplete last chunk is dropped.

    All epochs draw from one random stream, epoch e using its e-th permutation, as in TRL's RepeatSampler.

    Args:
        rows: number of rows in the dataset.
        chunk: prompts per generation.
        repeats: micro-batches per generation.
        wraps: cycle through the dataset in order; each epoch starts after the last prompt of the previous one. Cannot
            be combined with `shuffle`.
    """

    def __init__(self, rows: int, *, chunk: int, repeats: int, shuffle: bool, seed: int, wraps: bool = False):
        self._rows, self._chunk, self._repeats = rows, chunk, repeats
        self._shuffle, self._seed, self._wraps = shuffle, seed, wraps
        self.num_chunks = max(rows // chunk, 1) if wraps else rows // chunk
        self.begin()

    def begin(self, epoch: int = 0) -> None:
        self._stream = TorchGenerator(self._seed)
        for _ in range(epoch):
            self.next_epoch()
        self._order, self._start, self._num_yielded = np.zeros(0, np.int64), 0, 0

    def next_epoch(self) -> None:
        if self._wraps:
            self._order = self._next_in_cycle(self.num_chunks * self._chunk)
        else:
            self._order = self._epoch_order(self._stream)
        self._start = self._num_yielded = 0

    def _epoch_order(self, stream: TorchGenerator) -> np.ndarray:
        """The order of an epoch, from the stream's current state."""
        return stream.permutation(self._rows) if self._shuffle else np.arange(self._rows)

    def _next_in_cycle(self, count: int) -> np.ndarray:
        """The indices of the next `count` prompts, wrapping around at the end of the dataset."""
        first = self._order[-1] + 1 if len(self._order) else 0
        return (first + np.arange(count)) % self._rows

    @property
    def has_next(self) -> bool:
        chunks = (len(self._order) - self._start) // self._chunk
        return self._num_yielded < chunks * self._repeats

    def next(self) -> np.ndarray:
        """Row indices of the next micro-batch's prompts, int64 `[chunk]`."""
        first = self.num_done
        self._num_yielded += 1
        return self._order[first : first + self._chunk]

    def following(self) -> np.ndarray | None:
        first = self._start + (max(self._num_yielded - 1, 0) // self._repeats + 1) * self._chunk
        if first + self._chunk <= len(self._order):
            return self._order[first : first + self._chunk]
        if self._wraps:
            return self._next_in_cycle(self._chunk)
        stream = TorchGenerator(self._seed)
        stream.restore(self._stream.state())
        return self._epoch_order(stream)[: self._chunk]

    @property
    def num_done(self) -> int:
        return self._start + self._num_yielded // self._repeats * self._chunk

    def repeat_chunk(self) -> None:
        self._start, self._num_yielded = self.num_done, 0

    def state(self) -> dict[str, np.ndarray]:
        state = self._stream.state()
        numbers = np.asarray([self._num_yielded, state.used, state.position], np.int64)
        sizes = np.asarray([self._chunk, self._repeats, self._start], np.int64)
        return {"order": self._order, "stream": state.key, "numbers": numbers, "sizes": sizes}

    def restore(self, state: dict[str, np.ndarray]) -> None:
        self._order, (num_yielded, used, position) = state["order"], state["numbers"].tolist()
        self._stream.restore(GeneratorState(state["stream"], used, position))
        sizes = self._chunk, self._repeats
        chunk, repeats, start = state["sizes"].tolist() if "sizes" in state else (*sizes, 0)  # earlier checkpoints
        if (chunk, repeats) == sizes:
            self._start, self._num_yielded = start, num_yielded
        else:
            self._start, self._num_yielded = start + num_yielded // repeats * chunk, 0


class StreamSampler:
    """`RepeatSampler` for a streaming dataset: yields rows instead of indices, in the order of the stream.

    Args:
        stream: read in its own order (shuffle it beforehand); `set_epoch` is called before each epoch, as in TRL.
        chunk, repeats: see `RepeatSampler`.
    """

    num_chunks = None

    def __init__(self, stream: IterableDataset, *, chunk: int, repeats: int):
        self._stream, self._size, self._repeats = stream, chunk, repeats
        self.begin()

    def begin(self, epoch: int = 0) -> None:
        self._epoch, self._start, self._chunks, self._num_yielded = epoch - 1, 0, 0, 0
        self._rows: Iterator[dict[str, Any]] = iter(())
        self._chunk: list[dict[str, Any]] = []
        self._following: list[dict[str, Any]] | None = None  # chunk that `following` has read ahead

    def next_epoch(self) -> None:
        """Raises ValueError if the epoch has fewer prompts than one chunk."""
        self._open(self._epoch + 1, 0)
        if not self.has_next:
            raise ValueError(
                f"train_dataset, a stream, must have at least the {self._size} prompts of a generation "
                f"(generation_batch_size / num_generations), got {len(self._chunk)}. Add prompts, or lower "
                "per_device_train_batch_size."
            )

    def _open(self, epoch: int, start: int, chunks: int = 0) -> None:
        """Start reading an epoch after its first `start` prompts and `chunks` chunks."""
        self._epoch, self._start, self._chunks, self._num_yielded, self._chunk = epoch, start, chunks, 0, []
        self._following = None
        self._stream.set_epoch(epoch)
        self._rows = islice(iter(self._stream), start + chunks * self._size, None)

    @property
    def has_next(self) -> bool:
        if self._epoch < 0:
            return False
        if not self._chunk or self._num_yielded == self._repeats:
            following, self._following = self._following, None
            self._chunk, self._num_yielded = list(islice(self._rows, self._size)) if following is None else following, 0
            self._chunks += 1
        return len(self._chunk) == self._size

    def next(self) -> list[dict[str, Any]]:
        """Return the current chunk of rows, which `has_next` has read. Call only if `has_next`."""
        self._num_yielded += 1
        return self._chunk

    def following(self) -> list[dict[str, Any]] | None:
        if self._following is None:
            self._following = list(islice(self._rows, self._size))
        return self._following if len(self._following) == self._size else None

    @property
    def num_done(self) -> int:
        return self._start + _num_complete(self._chunks, self._num_yielded, self._repeats) * self._size

    def repeat_chunk(self) -> None:
        self._open(self._epoch, self.num_done)

    def state(self) -> dict[str, np.ndarray]:
        # numbers: the epoch, the number of chunks read, and how often the last one was yielded
        numbers, sizes = [self._epoch, self._chunks, self._num_yielded], [self._size, self._repeats, self._start]
        return {"numbers": np.asarray(numbers, np.int64), "sizes": np.asarray(sizes, np.int64)}

    def restore(self, state: dict[str, np.ndarray]) -> None:
        epoch, chunks, num_yielded = state["numbers"].tolist()
        sizes = self._size, self._repeats
        size, repeats, start = state["sizes"].tolist() if "sizes" in state else (*sizes, 0)  # earlier checkpoints
        self.begin()
        if epoch < 0:
            return
        if (size, repeats) != sizes:
            self._open(epoch, start + _num_complete(chunks, num_yielded, repeats) * size)
            return
        self._open(epoch, start, max(chunks - 1, 0))
        if chunks:
            self._chunk, self._chunks = list(islice(self._rows, self._size)), chunks
        self._num_yielded = num_yielded


def _num_complete(chunks: int, num_yielded: int, repeats: int) -> int:
    """Number of chunks yielded all `repeats` times, if the last of `chunks` was yielded `num_yielded` times."""
    return chunks - (chunks > 0 and num_yielded < repeats)
