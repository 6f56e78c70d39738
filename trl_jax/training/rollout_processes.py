"""Rollouts of several processes: each completes and judges its own part of the prompts, and all train on the whole.

The parts are those of TRL's ranks: equal, consecutive runs of the rows, each with its own random stream.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import jax
import numpy as np

from trl_jax.core.torch_random import GeneratorState, TorchGenerator
from trl_jax.hub.pretrained import PreTrainedModel
from trl_jax.mesh.mesh import fetched
from trl_jax.mesh.processes import of_each_process, several
from trl_jax.rollout.rewards import RewardFunctions
from trl_jax.rollout.rollout import EncodedTexts, GeneratedCompletions
from trl_jax.rollout.tools import Environments


def local_rank(ranks: int) -> int:
    """The first of the ranks whose rows this process completes."""
    return jax.process_index() * (ranks // jax.process_count())


def local_part(rows: int) -> slice:
    """The slice of rows that this process completes. If they do not divide evenly, the last processes get fewer."""
    size = -(-rows // jax.process_count())
    return slice(jax.process_index() * size, (jax.process_index() + 1) * size)


def generate_local_part(
    generate: Callable[[list, int], GeneratedCompletions | None],
    prompts: list,
    group: int,
    streams: Sequence[TorchGenerator],
) -> GeneratedCompletions:
    """Complete this process's part of the prompts, and gather the completions of the other processes.

    Args:
        generate: completes prompts, with a number of equal ones in a row, from the stream of `local_rank`; None without
            prompts.
        streams: of all ranks; those that processes have used are set to their new state everywhere.
    """
    local_prompts, stream = prompts[local_part(len(prompts))], streams[local_rank(len(streams))]

    def do() -> tuple[GeneratedCompletions | None, GeneratorState]:
        # A group of completions may be split over two ranks.
        completions = generate(local_prompts, math.gcd(group, len(local_prompts)))
        return completions, stream.state()

    gathered = of_each_process(do)
    for process, (_, state) in enumerate(gathered):
        streams[process * (len(streams) // len(gathered))].restore(state)
    return joined([part for part, _ in gathered if part is not None])


def joined(parts: Sequence[GeneratedCompletions]) -> GeneratedCompletions:
    """Concatenate the parts. A column that is not a list is taken from the first part."""
    ids, written, by_model = (
        list(chain.from_iterable(lists))
        for lists in zip(*((part.prompt_ids, part.completion_ids, part.by_model) for part in parts), strict=True)
    )
    columns = {
        name: list(chain.from_iterable(part.columns[name] for part in parts)) if isinstance(value, list) else value
        for name, value in parts[0].columns.items()
    }
    logps = [part.sampling_logps for part in parts]
    sampling = None if any(part is None for part in logps) else list(chain.from_iterable(logps))
    images = None if parts[0].images is None else list(chain.from_iterable(part.images for part in parts))
    calls = [part.calls for part in parts if part.calls is not None]
    return GeneratedCompletions(
        ids, written, by_model, columns,
        messages=None if parts[0].messages is None else list(chain.from_iterable(part.messages for part in parts)),
        calls=tuple(map(sum, zip(*calls, strict=True))) if calls else None, sampling_logps=sampling, images=images,
    )  # fmt: skip


# (texts, the maximum number of tokens for each) -> their next tokens, and the log-probabilities of these.
Further = Callable[[EncodedTexts, Sequence[int]], tuple[list[np.ndarray], list[np.ndarray]]]


def in_rounds(complete: Further, run: Callable[[Further], Any]) -> Any:
    """Call `run` with a function that completes texts of this process; processes complete texts together.

    Each call of that function is a round, in which every process takes part. A process whose `run` has finished takes
    part without texts until all have finished.

    Args:
        complete: called in all processes with the texts of all of them, whose images are data URLs only.

    Returns:
        The result of `run`.

    Raises:
        RuntimeError: `run` raised in another process.
    """
    if not several():
        return run(complete)
    ended = False  # by an exception that all processes see

    def round_of(do: Callable[[], tuple | None]) -> tuple[list, list] | None:
        nonlocal ended
        ended = True
        parts = of_each_process(do)
        here = [part for part in parts if part is not None]
        if here:
            ids, urls, rooms = zip(*here, strict=True)
            urls = None if urls[0] is None else list(chain.from_iterable(urls))
            texts = EncodedTexts(list(chain.from_iterable(ids)), urls=urls)
            tokens, logps = complete(texts, list(chain.from_iterable(rooms)))
        ended = False
        if not here:
            return None
        start = sum(len(part[0]) for part in parts[: jax.process_index()] if part is not None)
        return tokens[start:], logps[start:]

    def further(texts: EncodedTexts, rooms: Sequence[int]) -> tuple[list[np.ndarray], list[np.ndarray]]:
        tokens, logps = round_of(lambda: (list(texts.ids), texts.urls, list(rooms)))
        return tokens[: len(texts.ids)], logps[: len(texts.ids)]

    def outcome() -> None:
        if error is not None:
            raise error

    result = error = None
    try:
        result = run(further)
    except Exception as raised:  # re-raised in the round below, once the other processes know
        if ended:
            raise
        error = raised
    while round_of(outcome) is not None:
        pass
    return result


def begin_local_part(environments: Environments, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Reset the environments, and return the rows with the prompts from all processes. Each process resets those of its
    own part, and only these rows get the column `environments`."""
    local, begun = local_part(len(rows)), []

    def do() -> list:
        begun.extend(environments.reset(rows[local]))
        return [row["prompt"] for row in begun]

    prompts = chain.from_iterable(of_each_process(do))
    new_rows = [row | {"prompt": prompt} for row, prompt in zip(rows, prompts, strict=True)]
    new_rows[local] = begun
    return new_rows


@dataclass
class RankRewards:
    """Calls reward functions with this process's rows only, as TRL does; returns the rewards of all processes.

    Metrics that the functions log are averaged over the calls of all processes. A column that a process did not log is
    None there.
    """

    inner: RewardFunctions
    _sums: dict[str, tuple[float, int]] = field(default_factory=dict)
    _columns: dict[str, list] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        return self.inner.names

    @property
    def columns(self) -> list[str]:
        return self.inner.columns

    @property
    def current_weights(self) -> np.ndarray:
        return self.inner.current_weights

    def __call__(
        self, rows: Sequence[Mapping[str, Any]], prompts: list, completions: list, completion_ids: list[list[int]]
    ) -> np.ndarray:
        """Like `RewardFunctions`, for the rows of all processes; float32 `[B, F]`."""
        local = local_part(len(rows))
        parts = [part[local] for part in (rows, prompts, completions, completion_ids)]

        def do() -> tuple[np.ndarray, dict, dict, int]:
            if not parts[0]:
                return np.zeros((0, len(self.names)), np.float32), {}, {}, 0
            return self.inner(*parts), self.inner.sums(), self.inner.extra(), len(parts[0])

        gathered = of_each_process(do)
        names = sorted({name for _, sums, _, _ in gathered for name in sums})
        self._sums = {name: _added([sums[name] for _, sums, _, _ in gathered if name in sums]) for name in names}
        columns = sorted({name for _, _, extra, _ in gathered for name in extra})
        self._columns = {name: [value for _, _, extra, size in gathered for value in extra.get(name, [None] * size)]
                         for name in columns}  # fmt: skip
        return np.concatenate([rewards for rewards, *_ in gathered])

    def metrics(self) -> dict[str, float]:
        return {name: total / count for name, (total, count) in self._sums.items()}

    def extra(self) -> dict[str, list]:
        return self._columns


def _added(sums: Sequence[tuple[float, int]]) -> tuple[float, int]:
    return float(np.sum([total for total, _ in sums], dtype=np.float32)), sum(count for _, count in sums)


def local_copy(model: PreTrainedModel, place: Callable[[np.ndarray], jax.Array]) -> PreTrainedModel:
    """Copy the model, with all of its arrays, to this process's device. All processes must call this together."""
    local = model.with_params({path: place(fetched(array)) for path, array in model.params.items()})
    local.frozen = {path: place(fetched(array)) for path, array in model.frozen.items()}
    return local
