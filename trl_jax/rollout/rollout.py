"""Online training: from prompts to completions, rewards and training rows."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from trl_jax.core.outputs import NONE, VirtualTokens
from trl_jax.core.torch_random import GeneratorState, TorchGenerator
from trl_jax.data.batch import IGNORED, Context, Example, Extras
from trl_jax.data.packed import by_shard
from trl_jax.losses.advantages import Advantages
from trl_jax.losses.policy_gradient import next_entropy_coef
from trl_jax.rollout.completions_log import CompletionsLog
from trl_jax.rollout.samplers import Sampler
from trl_jax.tasks.policy import Cycle, PolicyTask, RolloutTask

# ----------------------------------------------------------------------------------------------------
# The steps of a run that makes its rows itself: which prompts are completed when, and what a step gets of them.


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


# ----------------------------------------------------------------------------------------------------
# Prompts -> completions, and what is learned from them.


Row = dict[str, Any]


class Writer(Protocol):
    """Text in and out of the policy."""

    def write(self, prompts: list, group: int) -> Written:
        """A completion of each prompt, of which `group` that are alike stand side by side."""

    def completions(self, prompts: list, prompt_ids: Ids, completion_ids: Ids) -> list:
        """Completions as reward functions see them: texts, or messages where the prompts are."""

    def decoded(self, ids: Ids) -> list[str]:
        """Texts without special tokens."""


@dataclass
class Rollout:
    """Writes completions with the policy as it is, and has them judged.

    writer: the policy, with its tokenizer.
    judge: says how good completions are; None where each is learned from alike.
    ends: ids that a completion which was not broken off ends with.
    drops_truncated: nothing is learned from completions that were broken off.
    saw_tokens: told how many tokens were read and written in training; gives those of the whole run.
    table: shows and writes completions with their rewards; None does not.
    tell: says to whoever looks on what is being done.
    begin: rows -> rows with what completions need that act in environments.
    """

    writer: Writer
    judge: Judge | None
    ends: frozenset[int]
    drops_truncated: bool
    saw_tokens: Callable[[int], int]
    table: CompletionsLog | None = None
    tell: Callable[[str], None] = lambda text: None
    begin: Callable[[Sequence[Row]], Sequence[Row]] = lambda rows: rows
    collected: dict[str, Collected] = field(default_factory=lambda: {"train": Collected(), "eval": Collected()})

    def make(self, rows: Sequence[dict[str, Any]], group: int, mode: str) -> Experience:
        """Complete the prompts of these rows, of which `group` that are alike stand side by side.

        Args:
            mode: "train" or "eval": where metrics are collected.
        """
        rows = self.begin(rows)
        metrics, prompts = self.collected[mode], [row["prompt"] for row in rows]
        next_thing = "training" if mode == "train" else "evaluating"
        made = self.writer.write(prompts, group)
        truncated = self._measured(made, mode, metrics)
        dropped = truncated & self.drops_truncated
        completion_mask = [own & (not out) for own, out in zip(made.by_model, dropped, strict=True)]
        ids, written = ([np.asarray(own, np.int32) for own in part] for part in (made.prompt_ids, made.completion_ids))
        if self.judge is None:
            self.tell(next_thing)
            if self.table is not None:
                self.table.add(mode, self.writer.decoded(ids), self.writer.decoded(written))
            return Experience([Completed(*row, 0.0) for row in zip(ids, written, completion_mask, strict=True)])
        texts = made.messages
        if texts is None:
            texts = self.writer.completions(prompts, made.prompt_ids, made.completion_ids)
        judged = self.judge(rows, prompts, texts, made, completion_mask, group, metrics)
        self.tell(f"{judged}, {next_thing}")
        advantages = judged.advantages.advantages
        if self.table is not None:
            self.table.add(mode, prompts, texts, judged.rewards, advantages, self.judge.rewards.extra())
        of_each = ids, written, completion_mask, advantages.tolist(), judged.old_logps, judged.ref_logps
        return Experience(list(map(Completed, *of_each)))

    def _measured(self, made: Written, mode: str, metrics: Collected) -> np.ndarray:
        """Which completions were broken off, bool `[B]`; their lengths and tokens become metrics."""
        lengths = [int(own.sum()) for own in made.by_model]
        truncated = np.asarray([int(own[-1]) not in self.ends for own in made.completion_ids])
        tokens = sum(map(len, made.prompt_ids)) + sum(lengths)
        metrics.set("num_tokens", float(self.saw_tokens(tokens if mode == "train" else 0)))
        metrics.add(length_metrics(lengths, truncated))
        metrics.add(iter(made.metrics.items()))
        return truncated

    def logged(self, mode: str, step: int) -> dict[str, float | None]:
        """The metrics since the last log, by TRL's names; and the table of completions is shown."""
        if self.table is not None:
            self.table.log(mode, step)
        return self.collected[mode].taken()


# ----------------------------------------------------------------------------------------------------
# Completions -> rewards -> advantages.


Logps = Sequence[np.ndarray]


class Rewards(Protocol):
    """Reward functions. `names` are those of the metrics."""

    names: Sequence[str]

    def __call__(self, rows: Sequence[dict], prompts: list, completions: list, completion_ids: list) -> np.ndarray:
        """The reward of each completion by each function, float32 `[B, F]`, NaN where one does not apply."""

    def metrics(self) -> dict[str, float]:
        """The metrics that functions have logged in the last call, sorted by name."""

    def extra(self) -> dict[str, list]:
        """The columns that functions have logged in the last call, sorted by name."""


class Judged(NamedTuple):
    """Of B completions.

    rewards: float32 `[B, F]`. advantages: as of `PolicyTask.advantages`.
    old_logps, ref_logps: log-probabilities of each completion's tokens under the policy that wrote it and under the
        reference; None of each where nobody needs them.
    """

    rewards: np.ndarray
    advantages: Advantages
    old_logps: Sequence[np.ndarray | None]
    ref_logps: Sequence[np.ndarray | None]

    def __str__(self) -> str:
        """For whoever looks on: the mean of the rewards that there are."""
        found = self.advantages.rewards[~np.isnan(self.advantages.rewards)]
        return f"reward {found.mean():.3g}" if len(found) else "reward unknown"


@dataclass
class Judge:
    """Asks the reward functions, and compares a prompt's completions by what they say.

    task: how rewards become advantages.
    logps: ("policy" or "reference", prompts, completions, completion_mask) -> log-probabilities of the completions'
        tokens under that model; float32 `[tokens]` of each.
    start: begins a call and returns a function that waits for what it gives: log-probabilities are computed while
        completions are judged. Reward functions stay in this thread, which some need for signals of their own.
    tell: says to whoever looks on what is being done.
    """

    task: PolicyTask
    rewards: Rewards
    logps: Callable[[str, Ids, Ids, Sequence[np.ndarray]], Logps]
    start: Callable[[Callable[[], Any]], Callable[[], Any]]
    tell: Callable[[str], None] = lambda text: None

    def __call__(
        self,
        rows: Sequence[dict[str, Any]],
        prompts: list,
        texts: list,
        made: Written,
        completion_mask: Sequence[np.ndarray],
        group: int,
        metrics: Collected,
    ) -> Judged:
        """Judge completions, of which `group` that are alike in their prompt stand side by side.

        Args:
            texts: the completions as reward functions see them; the other arguments are those of all of a rollout.
        """
        ids, written = made.prompt_ids, made.completion_ids
        passes = self.start(lambda: self._logps(ids, written, completion_mask))
        self.tell(f"rewards of {len(rows)} completions")
        rewards = self.rewards(made.with_columns(rows), prompts, texts, [own.tolist() for own in written])
        old, ref = passes()
        kl = _divergence(old, ref, completion_mask)
        if self.task.divergence_in_reward and self.task.beta:
            metrics.add(iter([("kl", float(kl.sum() / max(1, sum(own.sum() for own in completion_mask))))]))
        advantages = self.task.advantages(rewards, group, kl)
        metrics.add(reward_metrics(self.rewards.names, rewards, advantages))
        metrics.add(iter(self.rewards.metrics().items()))
        return Judged(rewards, advantages, old, ref)

    def _logps(self, ids: Ids, written: Ids, completion_mask: Sequence[np.ndarray]) -> tuple[Sequence, Sequence]:
        """Log-probabilities under the policy and under the reference; None for each completion, where nobody asks."""
        nothing = [None] * len(written)
        old = self.logps("policy", ids, written, completion_mask) if self.task.keeps_old_logps else nothing
        return old, self.logps("reference", ids, written, completion_mask) if self.task.beta else nothing


def _divergence(old: Logps, ref: Logps, completion_mask: Sequence[np.ndarray]) -> np.ndarray | None:
    """The sum of old - reference log-probabilities over each completion's tokens, float32 `[B]`."""
    if old[0] is None or ref[0] is None:
        return None
    return np.asarray([np.sum((a - b) * c) for a, b, c in zip(old, ref, completion_mask, strict=True)], np.float32)


# ----------------------------------------------------------------------------------------------------
# Completions as the examples of a step, with the numbers that the loss needs of them.


def example_of(
    prompt: Sequence[int],
    completion: Sequence[int],
    completion_mask: np.ndarray,
    numbers: Mapping[str, float] | None = None,
    of_tokens: Mapping[str, np.ndarray] | None = None,
) -> Example:
    """A prompt with its completion as one text, of which the tokens of the completion that count are predicted. Other
    completions of the prompt may share it.

    Args:
        completion_mask: bool, of each token of the completion.
        numbers: of the completion. of_tokens: of its tokens that count.
    """
    ids = np.concatenate([prompt, completion]).astype(np.int32)
    labels = np.full(len(ids), IGNORED, np.int32)
    labels[len(prompt) :][completion_mask] = np.asarray(completion)[completion_mask]
    extras = Extras(dict(numbers or {}), {}, {name: (values,) for name, values in (of_tokens or {}).items()})
    return Example((ids,), extras, (labels,), context=Context(ids[: len(prompt)].tobytes(), len(prompt)))


def step_examples(
    task: RolloutTask,
    parts: Sequence[Sequence[Completed]],
    generations: Sequence[Experience],
    part: float,
    ranks: int,
    numbers: Mapping[str, float],
    virtual: VirtualTokens = NONE,
) -> list[list[Example]]:
    """The examples of a step's micro-batches.

    Args:
        generations: the one that each micro-batch is cut from.
        part: micro-batches of the step / micro-batches of a generation.
        ranks: that a micro-batch is divided over.
        numbers: which all completions have alike.
        virtual: the tokens that stand before each text.
    """
    groups = []
    for rows, generation in zip(parts, generations, strict=True):
        lengths = np.asarray([row.num_tokens for row in rows], np.float32)
        completion_weight = np.full(len(rows), 1 / (len(parts) * len(rows)), np.float32)
        member = np.zeros((ranks, len(rows)), bool)
        for rank, own in enumerate(by_shard([range(len(rows))], ranks)):
            member[rank, own] = True
        tokens = generation.num_tokens
        weights = task.token_weights(lengths, completion_weight, member, generated_tokens=tokens, part=part)
        made = [_with_numbers(task, *row, numbers) for row in zip(rows, weights.tolist(), strict=True)]
        groups.append([example.behind(virtual, predicted=False) for example in made])
    return groups


def _with_numbers(task: RolloutTask, row: Completed, weight: float, numbers: Mapping[str, float]) -> Example:
    own, of_tokens = task.numbers(row)
    numbers = {**own, "token_weight": weight, **numbers}
    return example_of(row.prompt, row.completion, row.completion_mask, numbers, of_tokens)


# ----------------------------------------------------------------------------------------------------
# The coefficient of the entropy bonus, fixed or adapted after each step.


@dataclass
class EntropyBonus:
    """coef: of the next step. target: an entropy in nats; the coefficient acts where that of the last step is at most
    this, and is then raised by `delta`, else lowered, within `least` and `most`. None: it is fixed."""

    coef: float
    target: float | None = None
    delta: float = 0.005
    least: float = 0.0
    most: float = 1.0
    entropy: float = math.inf  # of the last step
    logged: list[float] = field(default_factory=list)  # after each step since the last log
    _metrics: dict[str, Any] | None = None

    def next(self) -> float:
        """The coefficient of the step that comes: 0 where an adaptive one rests."""
        self._adapt()
        return self.coef if self.target is None or self.entropy <= self.target else 0.0

    @property
    def now(self) -> float:
        """The coefficient, after all steps so far."""
        self._adapt()
        return self.coef

    def stepped(self, metrics: dict[str, Any]) -> None:
        self._metrics = metrics

    def _adapt(self) -> None:
        """Fetch what the last step measured, only now that it is needed."""
        if self._metrics is None:
            return
        total, tokens = (np.asarray(self._metrics[f"bonus_{name}"], np.float64).sum() for name in ("entropy", "tokens"))
        self._metrics, self.entropy = None, float(total / max(tokens, 1))
        if self.target is not None:
            bounds = {"delta": self.delta, "least": self.least, "most": self.most}
            self.coef = next_entropy_coef(self.coef, self.entropy, target=self.target, **bounds)
        self.logged.append(self.coef)

    def taken(self) -> list[float]:
        """The coefficients after the steps since the last call."""
        self._adapt()
        logged, self.logged = self.logged, []
        return logged

    def state(self) -> dict[str, Any]:
        """For `restore`, as JSON has it."""
        self._adapt()
        return {"coef": self.coef, "entropy": None if math.isinf(self.entropy) else self.entropy, "logged": self.logged}

    def restore(self, state: dict[str, Any]) -> None:
        entropy = state["entropy"]
        self.coef, self.entropy, self.logged = state["coef"], math.inf if entropy is None else entropy, state["logged"]


# ----------------------------------------------------------------------------------------------------
# Completions with their advantages, as a run trains on them and checkpoints keep them.


class Completed(NamedTuple):
    """A prompt with one completion.

    prompt, completion: token ids, int32.
    completion_mask: bool, for each token of the completion whether it is learned from.
    advantage: how much better its reward is than that of the prompt's other completions.
    old_logps, ref_logps: float32, log-probabilities of the completion's tokens under the policy that wrote it and under
        the reference; None where nobody needs them.
    """

    prompt: np.ndarray
    completion: np.ndarray
    completion_mask: np.ndarray
    advantage: float
    old_logps: np.ndarray | None = None
    ref_logps: np.ndarray | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens that are learned from."""
        return int(self.completion_mask.sum())


_SAVED_AS = {"completion_mask": "counted"}  # as earlier checkpoints call it


@dataclass(frozen=True)
class Experience:
    """The completions of one generation, in the order in which they are trained on; micro-batches are cut from it."""

    rows: Sequence[Completed]

    @property
    def num_tokens(self) -> int:
        """Tokens of all completions that are learned from."""
        return sum(row.num_tokens for row in self.rows)

    @property
    def logps(self) -> frozenset[str]:
        """Which log-probabilities the completions come with, by the names of their fields."""
        first = self.rows[0]._asdict()
        return frozenset(name for name in ("old_logps", "ref_logps") if first[name] is not None)

    def ordered(self, order: Iterable[int]) -> Experience:
        """The same completions in another order."""
        return Experience([self.rows[place] for place in order])

    def part(self, number: int, parts: int, ranks: int) -> list[Completed]:
        """The completions of one of `parts` micro-batches: of each of `ranks` equal runs of rows, its part."""
        of_rank = len(self.rows) // ranks
        size = of_rank // parts
        starts = (rank * of_rank + number * size for rank in range(ranks))
        return [row for start in starts for row in self.rows[start : start + size]]

    def arrays(self) -> dict[str, np.ndarray]:
        """The whole of it as a few flat arrays, by name."""
        rows = self.rows
        arrays = {"advantage": np.asarray([row.advantage for row in rows], np.float32)}
        for name in ("prompt", "completion"):
            arrays[f"{name}_length"] = np.asarray([len(row._asdict()[name]) for row in rows], np.int32)
        for name in ("prompt", "completion", "completion_mask", "old_logps", "ref_logps"):
            values = [row._asdict()[name] for row in rows]
            if values[0] is not None:
                arrays[_SAVED_AS.get(name, name)] = np.concatenate(values)
        return arrays

    @classmethod
    def of_arrays(cls, arrays: dict[str, np.ndarray]) -> Experience:
        """Back from `arrays`."""

        def split(name: str, of: str) -> list:
            saved = _SAVED_AS.get(name, name)
            if saved not in arrays:
                return [None] * len(arrays["advantage"])
            return np.split(arrays[saved], np.cumsum(arrays[f"{of}_length"])[:-1])

        columns = [split("prompt", "prompt"), split("completion", "completion"), split("completion_mask", "completion")]
        logps = [split(name, "completion") for name in ("old_logps", "ref_logps")]
        return cls([Completed(*row) for row in zip(*columns, arrays["advantage"].tolist(), *logps, strict=True)])


# ----------------------------------------------------------------------------------------------------
# Metrics of generations, in TRL's names and order: collected one by one, logged as means.


class Collected:
    """Numbers by name since the last log, in the order in which names came."""

    def __init__(self, values: dict[str, list[float]] | None = None):
        self.values: dict[str, list[float]] = {} if values is None else values

    def add(self, metrics: Iterator[tuple[str, float]]) -> None:
        for name, value in metrics:
            self.values.setdefault(name, []).append(value)

    def set(self, name: str, value: float) -> None:
        """A number of which the last one is logged."""
        self.values[name] = [value]

    def taken(self) -> dict[str, float | None]:
        """The means of the numbers that are not NaN, None without any; and begin anew."""
        values, self.values = self.values, {}
        real = {name: [value for value in found if not math.isnan(value)] for name, found in values.items()}
        return {name: sum(found) / len(found) if found else None for name, found in real.items()}


def length_metrics(lengths: Sequence[int], truncated: np.ndarray) -> Iterator[tuple[str, float]]:
    """Of completions with so many tokens each, and whether they were broken off, bool `[B]`."""
    lengths = np.asarray(lengths, np.float32)
    yield from _spread("completions", "length", lengths)
    yield "completions/clipped_ratio", float(np.mean(truncated, dtype=np.float32))
    ended = lengths[~truncated]
    yield from _spread("completions", "terminated_length", ended if len(ended) else np.zeros(1, np.float32))


def _spread(group: str, name: str, values: np.ndarray) -> Iterator[tuple[str, float]]:
    for kind, function in (("mean", np.mean), ("min", np.min), ("max", np.max)):
        yield f"{group}/{kind}_{name}", float(function(values))


def reward_metrics(names: Sequence[str], rewards: np.ndarray, advantages: Any) -> Iterator[tuple[str, float]]:
    """Of rewards float32 `[B, F]` of functions with these names, and the `Advantages` that came of them."""
    for name, values in zip(names, rewards.T, strict=True):
        yield f"rewards/{name}/mean", _mean(values)
        yield f"rewards/{name}/std", _std(values)
    yield "reward", _mean(advantages.rewards)
    yield "reward_std", _std(advantages.rewards)
    yield "frac_reward_zero_std", float(np.mean(advantages.zero_std, dtype=np.float32))


def _mean(values: np.ndarray) -> float:
    real = values[~np.isnan(values)]
    return float(real.mean()) if len(real) else math.nan


def _std(values: np.ndarray) -> float:
    """With n - 1; NaN of fewer than two numbers. As in TRL, an infinite number is infinitely far from the others."""
    real = values[~np.isnan(values)]
    if len(real) < 2:
        return math.nan
    with np.errstate(invalid="ignore"):
        squares = np.square(real - real.mean())
    squares = squares[~np.isnan(squares)]
    return float(np.sqrt(squares.mean() * (len(real) / (len(real) - 1)))) if len(squares) else math.nan


# ----------------------------------------------------------------------------------------------------
# Prompts with their completions, before these are judged.


Ids = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Written:
    """Prompts with their completions, B of them.

    prompt_ids, completion_ids: token ids; a completion has the token that ended it.
    by_model: bool, of each token of a completion whether the model wrote it; only those are learned from and counted.
    columns: for the reward functions, beside those of the rows: a list has the values of the rows, all else is of each.
    messages: of each completion, as reward functions see it; None: what its tokens say.
    metrics: of how they were written, by TRL's names.
    """

    prompt_ids: Sequence[Sequence[int]]
    completion_ids: Sequence[np.ndarray]
    by_model: Sequence[np.ndarray]
    columns: Mapping[str, Any] = field(default_factory=dict)
    messages: Sequence[list[dict[str, Any]]] | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)

    def with_columns(self, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """These rows with the columns. A list that is too short says nothing of the last rows, as in TRL."""
        return [{**row, **self._of(place)} for place, row in enumerate(rows)]

    def _of(self, place: int) -> dict[str, Any]:
        lists = {name: values for name, values in self.columns.items() if isinstance(values, list)}
        own = {name: values[place] for name, values in lists.items() if place < len(values)}
        return own | {name: value for name, value in self.columns.items() if name not in lists}


def all_written(completions: Sequence[np.ndarray]) -> list[np.ndarray]:
    """`by_model` of completions that the model wrote to the last token."""
    return [np.ones(len(own), bool) for own in completions]
