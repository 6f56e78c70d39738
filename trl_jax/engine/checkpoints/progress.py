"""Saves and restores how far a run has come, so that the rest of a resumed run is the same."""

from __future__ import annotations

import json
import random
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import SafetensorError, safe_open

from trl_jax.core.files.tensors_file import Pieces, in_order, write_tensors
from trl_jax.core.printable import brief
from trl_jax.engine.checkpoints.manifest import BrokenCheckpoint
from trl_jax.mesh.arrays import owned, pieces, placed

# In a folder of their own: readers of a model take every *.safetensors next to its config for weights.
TENSORS, FACTS = "training_state/arrays.safetensors", "training_state/facts.json"
PIECE = 256 * 2**20


@dataclass
class Progress:
    """The state of a run between two steps.

    Attributes:
        epoch: counted from 0.
        epoch_over: whether this epoch's closing events have been fired.
        examples: number of this epoch's examples that have been trained on: the place in the data, whatever the batch
            size.
        micro_batches: the same counted in micro-batches.
        rows_digest: digest of those examples where rows are streamed; None for a table, whose rows are known
            beforehand.
        stop_training, stop_epoch: whether callbacks asked for it.
        loss_sum: sum of the losses of all steps that were reported.
        learning_rate: of the last step.
        evaluated_last: whether an evaluation came after the last step.
        evaluation_due, save_due: whether an evaluation was broken off, which the next run begins with, and whether a
            checkpoint was asked for after it.
        unreported: the metrics of the steps since the last report.
    """

    epoch: int = 0
    epoch_over: bool = False
    examples: int = 0
    micro_batches: int = 0
    rows_digest: int | None = None
    stop_training: bool = False
    stop_epoch: bool = False
    loss_sum: float = 0.0
    learning_rate: float = 0.0
    evaluated_last: bool = False
    evaluation_due: bool = False
    save_due: bool = False
    unreported: list[dict[str, Any]] = field(default_factory=list)


def named_leaves(tree: Any, prefix: str) -> dict[str, Any]:
    """"<prefix>/<place in the tree>" -> leaf."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {f"{prefix}/{jax.tree_util.keystr(path, simple=True, separator='/')}": leaf for path, leaf in leaves}


def progress_json(progress: Progress, facts: dict[str, Any]) -> str:
    """The progress but for its arrays, the state of the global random generators, and the caller's own facts."""
    kept = {name: value for name, value in asdict(progress).items() if name != "unreported"}
    return json.dumps({"progress": kept, "random": _random_state(), **facts}, indent=2) + "\n"


def write_progress(
    folder: Path, steps: list[dict[str, Any]], trees: dict[str, Any], text: str, *, writes: bool = True
) -> None:
    """Write two files, one of arrays and one of the rest; neither needs pickle to be read.

    At most PIECE bytes of arrays on devices are on the host at a time, or one row of a larger array.

    Args:
        steps: the metrics of the steps that no log line has yet.
        trees: name -> pytree of arrays (optimizer state, weights that the model's files round).
        text: of `progress_json`.
        writes: False in processes that only help to gather the arrays, which one of them writes.
    """
    arrays = {name: leaf for prefix, tree in trees.items() for name, leaf in named_leaves(tree, prefix).items()}
    arrays |= _metrics_of(steps)
    read = {name: Pieces(array.shape, array.dtype, partial(pieces, array, PIECE)) for name, array in arrays.items()}
    if not writes:
        for name in in_order(read):
            deque(read[name].read(), maxlen=0)
        return
    (folder / TENSORS).parent.mkdir()
    write_tensors(folder / TENSORS, read)
    (folder / FACTS).write_text(text, encoding="utf-8")


def _metrics_of(steps: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """The metrics of all steps, stacked by name; by step, where some are of a run in which steps had others."""
    if len({tuple((name, np.shape(value)) for name, value in sorted(step.items())) for step in steps}) > 1:
        each = ((f"metrics_of/{at}/{name}", value) for at, step in enumerate(steps) for name, value in step.items())
        return {name: np.asarray(value) for name, value in each}
    return {f"metrics/{name}": np.stack([step[name] for step in steps]) for name in (steps[0] if steps else {})}


class SavedProgress:
    """The files of `write_progress`.

    Raises:
        BrokenCheckpoint: a file is missing or damaged.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        for name in (FACTS, TENSORS):
            if not (folder / name).is_file():
                raise BrokenCheckpoint(
                    f"{folder} holds no {name}, so training cannot go on from it. Pass the folder as model= to "
                    "start from its weights."
                )
        try:
            self.facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
            self.tensors = safe_open(folder / TENSORS, framework="numpy")
            self._names = list(self.tensors.keys())
            kept = {name: self.facts["progress"][name] for name in _FIELDS}
            self.progress = Progress(**kept, unreported=self._unreported())
        except (ValueError, KeyError, TypeError, RecursionError, SafetensorError) as error:
            raise BrokenCheckpoint(f"{folder}: {FACTS} or {TENSORS} is damaged: {brief(error, 300)}.") from error
        self._check_numbers()
        self._check_random_state()

    def _check_numbers(self) -> None:
        for name in ("epoch", "examples", "micro_batches"):
            value = getattr(self.progress, name)
            if type(value) is not int or value < 0:
                raise BrokenCheckpoint(
                    f"{self.folder / FACTS}: {name} is {brief(value)}, wanted a whole number of at least 0. "
                    "Resume from another checkpoint."
                )

    def _check_random_state(self) -> None:
        try:
            self._set_random_state(random.Random().setstate, np.random.RandomState().set_state)
        except (ValueError, KeyError, IndexError, TypeError, OverflowError) as error:
            text = brief(error, 300)
            raise BrokenCheckpoint(f"{self.folder / FACTS}: random is no state of the generators: {text}.") from error

    def _unreported(self) -> list[dict[str, np.ndarray]]:
        stacks = {name: self.tensors.get_tensor(f"metrics/{name}") for name in self.names("metrics")}
        count = len(next(iter(stacks.values()), ()))
        steps: dict[int, dict[str, np.ndarray]] = {
            step: {name: stack[step] for name, stack in stacks.items()} for step in range(count)
        }
        for name in self.names("metrics_of"):
            at, _, metric = name.partition("/")
            steps.setdefault(int(at), {})[metric] = self.tensors.get_tensor(f"metrics_of/{name}")
        return [steps[at] for at in sorted(steps)]

    def names(self, prefix: str) -> list[str]:
        return [name.removeprefix(f"{prefix}/") for name in self._names if name.startswith(f"{prefix}/")]

    def tree(self, prefix: str, like: Any, places: Any = None) -> Any:
        """The arrays saved under `prefix`, as a pytree like `like`.

        Args:
            places: a tree of their shardings; without it, they go to JAX's default device.

        Raises:
            ValueError: other arrays were saved: of another optimizer, or another model.
        """
        wanted = named_leaves(like, prefix)
        found = {f"{prefix}/{name}" for name in self.names(prefix)}
        wrong = sorted(found ^ set(wanted)) or [
            name for name, leaf in wanted.items() if tuple(self.tensors.get_slice(name).get_shape()) != leaf.shape
        ]
        if wrong:
            raise ValueError(
                f"{self.folder / TENSORS} is of another run: {wrong[0]} and {len(wrong) - 1} more arrays are not the "
                "same here. Resume with the model and the optimizer it was saved with."
            )
        if places is not None:
            saved = jax.tree.unflatten(jax.tree.structure(like), [_Saved(self.tensors, name) for name in wanted])
            return jax.tree.map(placed, saved, places)
        leaves = [owned(self.tensors.get_tensor(name)) for name in wanted]
        return jax.tree.unflatten(jax.tree.structure(like), leaves)

    def restore_random_state(self) -> None:
        """Python's and NumPy's global generators, which callbacks and metrics may draw from."""
        self._set_random_state(random.setstate, np.random.set_state)

    def _set_random_state(self, python: Callable[[tuple], None], numpy: Callable[[tuple], None]) -> None:
        version, words, gauss = self.facts["random"]["python"]
        python((version, tuple(words), gauss))
        name, keys, *rest = self.facts["random"]["numpy"]
        numpy((name, np.asarray(keys, np.uint32), *rest))


class _Saved:
    """An array on the disk; indexing it reads a part."""

    def __init__(self, tensors: Any, name: str):
        self._tensors, self._name = tensors, name
        self.shape = tuple(tensors.get_slice(name).get_shape())

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        return self._tensors.get_slice(self._name)[index] if index else self._tensors.get_tensor(self._name)


_FIELDS = [f.name for f in fields(Progress) if f.name != "unreported"]


def _random_state() -> dict[str, Any]:
    name, keys, *rest = np.random.get_state()
    return {"python": random.getstate(), "numpy": [name, keys.tolist(), *rest]}
