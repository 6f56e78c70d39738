"""The steps of a run that makes its rows itself: which prompts are completed when, and what a step gets of them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from trl_jax.core.torch_random import GeneratorState, TorchGenerator
from trl_jax.rollout.entropy import EntropyBonus
from trl_jax.rollout.experience import Completed, Experience
from trl_jax.rollout.metrics import Collected
from trl_jax.rollout.rollout import Rollout
from trl_jax.rollout.sampler import Sampler
from trl_jax.tasks.rollout import Cycle

logger = logging.getLogger(__name__)

BASE_SEED_WORDS = 2  # that a pass of torch's loader over the data takes, for workers' seeds
# The argument by which completions come with log-probabilities.
_REASONS = {
    "old_logps": "gradient_accumulation_steps, whose steps use up a generation or do not",
    "ref_logps": "beta, from or to 0",
}


@dataclass
class RolloutSteps:
    """Iterates over the steps of an epoch, which `set_epoch` begins. Completions are written by the newest parameters:
    nothing may be made ahead of an update.

    rows: by what the sampler gives for it, its index or itself, a row of the dataset.
    sampler: the prompts of each epoch; `make_sampler` makes it anew for another run, of the rows as they are then.
    lay_out: (micro-batches of completions, the generation of each, number of the step, entropy coefficient) -> step
        batch.
    bonus: the coefficient of the entropy bonus of each step; None without one.
    logps: the log-probabilities that completions come with: "old_logps", "ref_logps".
    streams: torch's random numbers, one of each rank that micro-batches are divided over; the first is what completions
        are drawn with.
    num_micro_batches: since the beginning of the run, which decides when to generate.
    generated: when, of the first step since the last log: "before" its micro-batches, "within" or "after" it; None:
        there was no step.
    """

    rollout: Rollout
    cycle: Cycle
    rows: Callable[[Any], dict[str, Any]]
    sampler: Sampler
    lay_out: Callable[[list[list[Completed]], list[Experience], int, float | None], Any]
    streams: Sequence[TorchGenerator]
    bonus: EntropyBonus | None = None
    logps: frozenset[str] = frozenset()
    make_sampler: Callable[[], Sampler] | None = None
    num_micro_batches: int = 0
    num_steps: int = 0
    buffer: Experience | None = None
    epoch: int = -1  # none yet
    seconds: list[float] = field(default_factory=list)
    generated: str | None = None
    _begun_at: float = 0.0

    def begin(self) -> None:
        """Forget what an earlier run has left: its completions were another policy's."""
        self.buffer, self.num_micro_batches, self.num_steps, self.epoch = None, 0, 0, -1
        self.generated = None
        if self.make_sampler is not None:
            self.sampler = self.make_sampler()
        self.sampler.begin()

    def begin_epoch_again(self, epoch: int) -> None:
        """Let `set_epoch(epoch)` begin that epoch with the prompts that there are now, and its first step write."""
        self.buffer, self.num_micro_batches, self.epoch = None, 0, epoch - 1
        self.sampler.begin(epoch)

    def set_epoch(self, epoch: int, skip: int = 0, skipped_digest: int | None = None) -> None:
        """Begin an epoch; the one that was restored goes on where it was, so `skip` is known."""
        del skip, skipped_digest
        if epoch == self.epoch:
            return
        self.epoch = epoch
        self.sampler.next_epoch()
        for stream in self.streams:
            stream.skip(BASE_SEED_WORDS)

    def __len__(self) -> int:
        """Steps of an epoch; TypeError where the sampler reads a stream."""
        if self.sampler.num_chunks is None:
            raise TypeError("a stream of prompts has no length")
        return -(-self.sampler.num_chunks * self.cycle.repeats // self.cycle.accumulation)

    def __iter__(self) -> Iterator[Any]:
        while self.sampler.has_next:
            yield self._step()

    def _step(self) -> Any:
        """A step's batch: micro-batches until there are enough or the epoch is over."""
        self._begun_at = time.monotonic()
        parts, experiences, number, when = [], [], self.num_steps, None
        while len(parts) < self.cycle.accumulation and self.sampler.has_next:
            prompts = self.sampler.next()
            if self.num_micro_batches % self.cycle.repeats == 0 or self.buffer is None:
                self.buffer = self._generated(prompts)
                when = when or ("within" if parts else "before")
            part = self.num_micro_batches % self.cycle.parts
            parts.append(self.buffer.part(part, self.cycle.parts, len(self.streams)))
            experiences.append(self.buffer)
            self.num_micro_batches += 1
        self.num_steps += 1
        self.generated = self.generated or when or "after"
        return self.lay_out(parts, experiences, number, None if self.bonus is None else self.bonus.next())

    def pass_over(self, steps: int) -> int:
        """Go to behind so many steps from the beginning of a run, without their completions: the next step writes its
        own. Returns how many of these steps are of the epoch that is then under way, or over."""
        of_epoch = 0
        for _ in range(steps):
            if not self.sampler.has_next:
                self.set_epoch(self.epoch + 1)
                of_epoch = 0
            parts = 0
            while parts < self.cycle.accumulation and self.sampler.has_next:
                self.sampler.next()
                parts += 1
            self.num_micro_batches += parts
            self.num_steps, of_epoch = self.num_steps + 1, of_epoch + 1
        return of_epoch

    def finish(self) -> None:
        """At the end of a run, wait for what still leaves this machine."""
        if self.rollout.table is not None:
            self.rollout.table.finish()

    def stepped(self, metrics: dict[str, Any]) -> None:
        """Wait for a step to end, which the next one's completions would do, and take over what it measured."""
        jax.block_until_ready(metrics)
        self.seconds.append(time.monotonic() - self._begun_at)
        if self.bonus is not None:
            self.bonus.stepped(metrics)

    def logged(self, of_micro_batches: dict[str, Any], step: int) -> dict[str, Any]:
        """The metrics of the steps since the last log: those of generations, of micro-batches and of steps
        (coefficients of the entropy bonus, seconds), in the order in which they first came up, as in TRL."""
        of_generations = self.rollout.logged("train", step)
        found = {} if self.bonus is None else {"entropy_coef": self.bonus.taken()}
        found, self.seconds = found | {"step_time": self.seconds}, []
        of_steps = {name: sum(values) / len(values) for name, values in found.items() if values}
        if self.cycle.accumulation == 1 and "entropy_coef" in of_steps:  # came up amid a step's only micro-batch
            first, coef = {"policy_loss": of_micro_batches.pop("policy_loss")}, of_steps.pop("entropy_coef")
            of_micro_batches = first | {"entropy_coef": coef} | of_micro_batches
        when, self.generated = self.generated, None
        if when == "within":
            return of_micro_batches | of_generations | of_steps
        if when == "after":
            return of_micro_batches | of_steps | of_generations
        return of_generations | of_micro_batches | of_steps

    def _generated(self, prompts: Sequence[Any]) -> Experience:
        """Completions of these rows, shuffled within each rank."""
        rows = [self.rows(index) for index in prompts for _ in range(self.cycle.group)]
        experience = self.rollout.make(rows, self.cycle.group, "train")
        size = len(rows) // len(self.streams)
        order = [rank * size + stream.permutation(size) for rank, stream in enumerate(self.streams)]
        return experience.ordered(np.concatenate(order).tolist())

    # ---- checkpoints -------------------------------------------------------------------------------------------

    def state(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """All that a resumed run needs to go on to the bit: arrays by name, and numbers for JSON."""
        arrays = {} if self.buffer is None else {f"buffer/{name}": a for name, a in self.buffer.arrays().items()}
        states = [stream.state() for stream in self.streams]
        arrays["streams"] = np.stack([state.key for state in states])
        if self.rollout.table is not None:
            arrays["table"] = self.rollout.table.state()
        arrays |= {f"sampler/{name}": array for name, array in self.sampler.state().items()}
        facts = {
            "num_micro_batches": self.num_micro_batches,
            "num_steps": self.num_steps,
            "epoch": self.epoch,
            "sizes": self._sizes(),
            "streams": [[state.used, state.position] for state in states],
            "metrics": self.rollout.collected["train"].values,
            "bonus": None if self.bonus is None else self.bonus.state(),
            "generated": self.generated,
        }
        return arrays, facts

    def restore(self, arrays: dict[str, np.ndarray], facts: dict[str, Any]) -> bool:
        """Go on from where `state` was asked.

        Returns:
            Whether the place in the epoch is counted anew: arguments were changed, and prompts are divided into
            generations from the first one on that no finished generation has had.
        """
        states = zip(arrays["streams"], facts["streams"], strict=True)
        for stream, (key, (used, position)) in zip(self.streams, states, strict=False):  # other devices, other ranks
            stream.restore(GeneratorState(key, used, position))
        if self.rollout.table is not None and "table" in arrays:
            self.rollout.table.restore(arrays["table"])
        self.num_steps, self.generated = facts["num_steps"], facts["generated"]
        if self.bonus is not None and facts["bonus"] is not None:
            self.bonus.restore(facts["bonus"])
        self.rollout.collected["train"] = Collected(facts["metrics"])
        return self._restore_place(_under("buffer", arrays), _under("sampler", arrays), facts)

    def _restore_place(self, buffer: dict, sampler: dict, facts: dict[str, Any]) -> bool:
        now = self._sizes()
        then = facts.get("sizes", now)  # which earlier checkpoints lack
        self.epoch, self.num_micro_batches = facts["epoch"], facts["num_micro_batches"]
        self.buffer = Experience.of_arrays(buffer) if buffer else None
        if ("order" in sampler) != ("order" in self.sampler.state()):  # a table in the place of a stream, or reversed
            self.begin_epoch_again(self.epoch)
            return True
        self.sampler.restore(sampler)
        changed = [f"{name} {then[name]} -> {now[name]}" for name in now if then[name] != now[name]]
        unfinished = self.num_micro_batches % (then["steps_per_generation"] * then["num_iterations"]) > 0
        moved, reasons = bool(changed), changed
        if unfinished and self.buffer is not None:
            other = self.logps.symmetric_difference(self.buffer.logps)
            reasons = changed + [_REASONS[name] for name in sorted(other)]
            moved = moved or (bool(other) and self.cycle.keeps_policy)  # whose steps begin where generations do
        if unfinished and reasons:
            self.buffer = None
            logger.warning(
                "Resuming in the middle of a generation with other arguments (%s): its completions are dropped, and "
                "its prompts are completed again.",
                ", ".join(reasons),
            )
        if moved:
            self.buffer, self.num_micro_batches = None, 0
            self.sampler.repeat_chunk()
        return moved

    def _sizes(self) -> dict[str, int]:
        """The sizes by which completions are divided into generations and micro-batches, by the names of arguments."""
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
        """The place in the epoch, counted in micro-batches of these sizes."""
        done = self.sampler.num_done * self.cycle.repeats // self.cycle.prompts
        return done + self.num_micro_batches % self.cycle.repeats


def _under(prefix: str, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    start = f"{prefix}/"
    return {name.removeprefix(start): array for name, array in arrays.items() if name.startswith(start)}
