"""A script's own `compute_loss`: the model that it calls, its batch as a dict, and errors that translate torch."""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trl_jax.core.packed import reads_of_rows
from trl_jax.data.example import Measured, of_examples
from trl_jax.data.layout.batch import Batch
from trl_jax.models.functional import merge
from trl_jax.run.forward import Forward
from trl_jax.run.state import RunState
from trl_jax.tasks.task import Task

# Pattern of torch code in a loss -> the same in JAX.
_IN_JAX = {
    r"(torch\.)?nn\.functional\.logsigmoid|F\.logsigmoid": "jax.nn.log_sigmoid",
    r"torch\.chunk\((.*?),\s*(?:chunks\s*=\s*)?(\d+)(,\s*dim\s*=\s*0)?\)": r"jnp.split(\1, \2)",
    r"(torch\.)?nn\.functional\.|F\.(?=[a-z])": "jax.nn.",
    r"torch\.sigmoid": "jax.nn.sigmoid",
    r"torch\.(softmax|log_softmax|relu|softplus)": r"jax.nn.\1",
    r"torch\.cat\(": "jnp.concatenate(",
    r"torch\.tensor\(": "jnp.asarray(",
    r"\bdim=": "axis=",
    r"\.unsqueeze\(-1\)": "[..., None]",
    r"torch\.": "jnp.",
}


_PACKAGE = Path(__file__).parents[2]

# Arguments of a call that change nothing: scripts pass on a whole batch, `model(**inputs)`.
_IGNORED = {"return_dict", "use_cache"}


def script_values(trainer: Any) -> tuple[tuple[str, Any], ...]:
    """The numbers and strings that a script set on its trainer, by name; a compiled loss contains their current
    values."""
    kinds = (bool, int, float, str)
    return tuple((name, value) for name, value in sorted(vars(trainer).items()) if type(value) in kinds)


class Outputs:
    """The result of calling the model: `logits`, float32 `[rows, 1]`, by attribute, key or index 0."""

    def __init__(self, logits: jax.Array):
        self.logits = logits

    def __getitem__(self, key: str | int) -> jax.Array:
        return {"logits": self.logits, 0: self.logits}[key]


class BoundModel:
    """The model with the parameters of this step, to be called on rows padded on the right.

    `outputs` are those of every call, in order. Other attributes are the trainer's model's.
    """

    def __init__(
        self,
        model: Any,
        params: dict,
        *,
        dtype: str,
        remat: bool | str = False,
        random_options: Callable[[int, jax.Array], dict[str, Any]] | None = None,
        ignored: frozenset[str] = frozenset(),
    ):
        """
        Args:
            random_options: `(number of the call, lengths of its rows) -> random options`; None for none.
            ignored: further names of a batch that a call may pass without effect.
        """
        self._model, self._params, self._random_options = model, params, random_options
        self._options = {"dtype": jnp.dtype(dtype), "remat": remat}
        self._ignored = _IGNORED | ignored
        self.config, self.outputs = model.config, []

    def __call__(self, input_ids: Any = None, attention_mask: Any = None, **others: Any) -> Outputs:
        """Score rows of token ids `[rows, T]`.

        Args:
            others: `return_dict`, `use_cache` and other entries of a batch, which have no effect.

        Raises:
            TypeError: an unknown argument.
        """
        if unknown := others.keys() - self._ignored:
            raise TypeError(f"model(...) takes input_ids and attention_mask, not {', '.join(sorted(unknown))}.")
        tokens = jnp.asarray(input_ids)
        places = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
        at = jnp.max(jnp.where(tokens != self.config.pad_token_id, places, 0), axis=1)
        options = dict(self._options)
        if self._random_options is not None:
            visible = jnp.ones(tokens.shape, int) if attention_mask is None else attention_mask
            options |= self._random_options(len(self.outputs), jnp.sum(visible, axis=1))
        model = merge(self._model.graph, self._params, options.get("dropout_key"))
        if model.needs_valid:
            options["valid"] = jnp.ones(tokens.shape, bool) if attention_mask is None else attention_mask.astype(bool)
        self.outputs.append(model(tokens, places, reads_of_rows(at, tokens.shape[1]), **options))
        return Outputs(self.outputs[-1][:, None])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class UserLoss:
    """Calls a script's own loss with the model and the batch in TRL's form, and computes the sums to log.

    values: returns the numbers and strings on the script's trainer; the loss is compiled again when they change.
    """

    def __init__(
        self, run: RunState, forward: Forward, compute_loss: Callable, values: Callable[[], tuple[tuple[str, Any], ...]]
    ):
        self._run, self._forward, self._compute_loss, self.values = run, forward, compute_loss, values

    def __call__(
        self, bound: BoundModel, inputs: dict[str, Any], state: dict[str, Any]
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The loss and the sums of a batch.

        Args:
            state: from `state()`; the script reads it as `self.state`.

        Raises:
            TypeError: the script called torch, or did not return a scalar.
        """
        with self._run.state_replaced(state), torch_explained():
            result = self._compute_loss(bound, {name: jnp.asarray(value) for name, value in inputs.items()})
        loss = result[0] if isinstance(result, tuple) else result
        if not isinstance(loss, jax.Array) or loss.shape != ():
            raise TypeError(
                f"compute_loss returned {_described(loss)}: wanted a JAX scalar, as in "
                "-jax.nn.log_sigmoid(model(**inputs).logits).mean()."
            )
        return loss.astype(jnp.float32), self.sums(bound, inputs)

    def state(self) -> dict[str, np.ndarray]:
        """The step and epoch, for a compiled loss that reads `self.state`."""
        state = self._run.state
        return {"global_step": np.int32(state.global_step), "epoch": np.float32(state.epoch or 0)}

    def bound(
        self, params: dict, inputs: dict, *, dtype: str, remat: bool | str = False, key: jax.Array | None = None
    ) -> BoundModel:
        """The model with these parameters, for one batch of `inputs`; in training, `key` is that of the batch."""

        def random_options(call: int, lengths: jax.Array) -> dict[str, Any]:
            return self._forward.random_options(jax.random.fold_in(key, call), lengths)

        return BoundModel(
            self._run.model,
            params,
            dtype=dtype,
            remat=remat,
            random_options=None if key is None else random_options,
            ignored=frozenset(inputs),
        )

    def sums(self, bound: BoundModel, inputs: dict[str, Any]) -> dict[str, jax.Array]:
        """The sums of the task's loss, where the calls cover each row of the batch once; otherwise sums without
        examples."""
        task, rows = self._run.task, len(inputs["input_ids"])
        outputs, texts = jnp.concatenate(bound.outputs) if bound.outputs else jnp.zeros(0), len(task.columns.texts)
        complete = len(outputs) == rows
        outputs, examples = (outputs, rows // texts) if complete else (jnp.zeros(texts), 1)
        weight = jnp.ones(examples) if complete else jnp.zeros(examples)
        extras = {
            name: inputs[name] if complete else jnp.zeros(examples) for name in task.columns.numbers if name in inputs
        }
        return task.loss(outputs, Measured(weight, extras, examples))[1]

    def inputs(self, arrays: Batch) -> list[dict[str, np.ndarray]]:
        """Each micro-batch of a step of padded rows, as `inputs_of`."""
        return inputs_of(arrays, self._run.task)


def inputs_of(arrays: Batch, task: Task) -> list[dict[str, np.ndarray]]:
    """Each micro-batch of a step of padded rows, without padding examples, in the form of `task.inputs`."""
    return [
        task.inputs(batch)
        for m in range(len(arrays.weight))
        if (batch := _real_rows(jax.tree.map(lambda leaf, m=m: leaf[m], arrays), len(task.columns.texts)))
    ]


def _real_rows(batch: Batch, texts: int) -> dict[str, np.ndarray]:
    examples = int(np.count_nonzero(batch.weight))
    if not examples:
        return {}
    tokens, lengths = (of_examples(array, texts, examples) for array in (batch.tokens, batch.lengths))
    mask = (np.arange(tokens.shape[1]) < lengths[:, None]).astype(np.int32)
    return {"input_ids": tokens, "attention_mask": mask} | {
        name: values[:examples] for name, values in batch.extras.items()
    }


def _described(value: Any) -> str:
    return f"an array {list(value.shape)}" if isinstance(value, jax.Array) else f"a {type(value).__qualname__}"


@contextlib.contextmanager
def torch_explained() -> Iterator[None]:
    """Explain errors of a loss: of torch about a JAX array, with the line translated to jax.numpy; of JAX about a value
    that does not exist while the loss is compiled, with the line and the way out."""
    try:
        yield
    except jax.errors.JAXTypeError as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _of_script(frame.filename)]
        raise TypeError(
            f"compute_loss is compiled once and has no values while it is: `{frames[-1].line if frames else error}`. "
            "Choose with jnp.where, bound with jnp.minimum; float(), .item(), if and self.log need values. "
            "self.state's global_step and epoch are such arrays, too; to count on a call of the model write "
            "model(...), not self.model(...). What is to be logged is for a callback or compute_metrics."
        ) from error
    except (TypeError, AttributeError, RuntimeError, ValueError) as error:
        frames = traceback.extract_tb(error.__traceback__)
        line = next((frame.line for frame in reversed(frames) if frame.line and "torch" in _called(frame.line)), None)
        if line is None:
            raise
        raise TypeError(
            f"compute_loss runs on JAX arrays, which torch cannot take: `{line}`. In JAX: `{in_jax(line)}`, with "
            "`import jax, jax.numpy as jnp`."
        ) from error


def _of_script(file: str) -> bool:
    return "site-packages" not in file and not Path(file).is_relative_to(_PACKAGE)


def _called(line: str) -> str:
    return line.replace("nn.functional", "torch").replace("F.", "torch.")


def in_jax(line: str) -> str:
    """Translate a line of torch to JAX, name by name."""
    for pattern, jax_name in _IN_JAX.items():
        line = re.sub(pattern, jax_name, line)
    return line
