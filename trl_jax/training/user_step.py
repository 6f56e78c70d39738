"""User-defined `training_step` and `_prepare_inputs`, and a batch's rows as scripts see them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from trl_jax.core.text import brief
from trl_jax.data.batch import IGNORED
from trl_jax.hub import torch_bridge
from trl_jax.training.data import seen_by_scripts
from trl_jax.training.reference import ReferenceInputs
from trl_jax.training.state import Setup


class CutRows:
    """A batch's rows, cut to the longest text as TRL pads them. (The step's rows are padded to a compiled shape.)

    shown: the arrays with their rows cut.
    """

    def __init__(self, inputs: dict[str, Any], setup: Setup):
        tokens, multiple = inputs["input_ids"], setup.pad_to_multiple_of
        self._length = tokens.shape[1]
        masks = [np.asarray(value) for name, value in inputs.items() if name.endswith("attention_mask")]
        longest = max(1, *(int(np.max(np.sum(mask, axis=1))) for mask in masks))
        multiple = multiple if isinstance(multiple, int) else 1
        self._cut = min(self._length, -(-longest // multiple) * multiple)
        self.shown = {name: self._cut_one(np.asarray(value)) for name, value in inputs.items()}
        fillers = {"input_ids": setup.processing_class.pad_token_id, "attention_mask": 0, "completion_mask": 0}
        self._fillers = fillers | {"labels": IGNORED}

    def padded(self, arrays: dict[str, Any]) -> dict[str, Any]:
        """Pad cut rows to the step's length again. Rows of another length or without attention mask are unchanged."""
        if "attention_mask" not in arrays or arrays["input_ids"].shape[1] != self._cut:
            return arrays
        missing = (0, 0), (0, self._length - self._cut)
        return {
            name: np.pad(value, missing, constant_values=self._fillers[own]) if own in self._fillers else value
            for name, value in arrays.items()
            for own in [name.removeprefix("KL_")]
        }

    def _cut_one(self, values: np.ndarray) -> np.ndarray:
        return values[:, : self._cut] if values.ndim == 2 and values.shape[1] == self._length else values


class UserStep:
    """Calls a user-defined `training_step` and `_prepare_inputs` around the computation of a micro-batch. They get the
    inputs of TRL's collator: tensors if torch is installed and the script does not use JAX, else NumPy arrays."""

    def __init__(self, setup: Callable[[], Setup], call: Callable, prepare: Callable, tensors: bool):
        """
        Args:
            call: `(compute, inputs, num_items_in_batch, last) -> loss`, the trainer's `training_step`, in which
                `super()` calls `compute(inputs) -> loss`. `last`: whether this is the step's last micro-batch.
            prepare: the trainer's `_prepare_inputs`.
            tensors: whether to pass torch tensors to the script's methods.
        """
        self._setup, self._call, self._prepare, self._tensors = setup, call, prepare, tensors

    def __call__(self, computed: Callable, inputs: dict[str, Any], num_items: Any, *, last: bool) -> tuple[tuple, Any]:
        """Run one micro-batch; see `UserLoss.stepped`.

        Raises:
            RuntimeError: the script's method did not call `super()` exactly once.
        """
        made, rows = [], self._rows(inputs)

        def compute(given: Any) -> Any:
            made.append(computed(self._taken(inputs, rows, given)))
            return self._as_given({"loss": np.asarray(made[0][0])})["loss"]

        count = None if num_items is None else self._as_given({"count": np.int64(num_items)})["count"]
        loss = self._call(compute, self._as_given(rows.shown), count, last)
        if len(made) != 1:
            raise RuntimeError(
                f"training_step called super().training_step(model, inputs, ...) {len(made)} times for a micro-batch; "
                "expected once: it computes the loss and its gradient."
            )
        return made[0], np.float32(torch_bridge.as_arrays(loss))

    def prepared(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """The inputs as `_prepare_inputs` changes them."""
        rows = self._rows(inputs)
        return self._taken(inputs, rows, self._prepare(self._as_given(rows.shown)))

    def _as_given(self, arrays: dict[str, Any]) -> dict[str, Any]:
        return torch_bridge.batch_tensors(arrays) if self._tensors else dict(arrays)

    def _rows(self, inputs: dict[str, Any]) -> CutRows:
        """The batch under TRL's names; for DPO and KTO without the reference log-probabilities."""
        arrays, setup = seen_by_scripts(inputs), self._setup()
        if setup.script_loss is not None:
            arrays = ReferenceInputs(setup.task, None, None).inputs(arrays, {})
        return CutRows(arrays, setup)

    def _taken(self, inputs: dict[str, Any], rows: CutRows, given: Any) -> dict[str, Any]:
        """The step's inputs with the script's changes: arrays replaced, left out or added.

        Raises:
            TypeError: a value is not numeric, or the loss uses a reference and anything was changed.
        """
        shown = rows.shown
        found = {name: np.asarray(value) for name, value in torch_bridge.as_arrays(dict(given)).items()}
        if other := sorted(name for name, value in found.items() if value.dtype.kind not in "biuf"):
            raise TypeError(
                f"inputs[{other[0]!r}] is {brief(given[other[0]])}; expected numbers: the loss is compiled."
            )
        if missing := sorted({"input_ids", "attention_mask", "labels"} & shown.keys() - found.keys()):
            raise TypeError(f"inputs are without {', '.join(missing)}, which the loss reads.")
        found = {name: value.astype(shown[name].dtype) if name in shown else value for name, value in found.items()}
        if self._setup().script_loss is None:
            return rows.padded(found) | {name: inputs[name] for name in inputs.keys() - seen_by_scripts(inputs).keys()}
        if found.keys() != shown.keys() or any(not np.array_equal(found[name], shown[name]) for name in shown):
            raise TypeError(
                "training_step changed inputs whose reference log-probabilities the step computes itself. Pass them to "
                "super().training_step as they are, or change the rows."
            )
        return inputs
