"""What a script's own `compute_loss` works with: a model to call, a batch as a dict, and jax.numpy."""

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
from trl_jax.losses.pairwise import pairwise_loss
from trl_jax.models.functional import merge

# Of torch, in a loss -> the same in JAX.
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


_PACKAGE = Path(__file__).parents[1]

# Arguments of a call that change nothing: scripts pass on a whole batch, `model(**inputs)`.
_UNREAD = {"return_dict", "use_cache", "margin"} | {
    f"{name}_{side}" for name in ("input_ids", "attention_mask") for side in ("chosen", "rejected")
}

# What a trainer of ours keeps of plain values. Those beside it are a script's.
OWN_VALUES = frozenset(
    "is_in_train _vocab_size _max_positions _tokens_seen _found_batch_size _fills _arguments _fingerprint".split()
)


def numbers_of(trainer: Any) -> tuple[tuple[str, Any], ...]:
    """The numbers and words that a script put on its trainer, by name: a compiled loss has them as they are now."""
    kinds = (bool, int, float, str)
    return tuple((k, v) for k, v in sorted(vars(trainer).items()) if type(v) in kinds and k not in OWN_VALUES)


def reached_by(state: Any) -> dict[str, np.ndarray]:
    """Where a run is, for a compiled loss that asks `self.state`."""
    return {"global_step": np.int32(state.global_step), "epoch": np.float32(state.epoch or 0)}


class Outputs:
    """What calling the model gives: `logits`, float32 `[rows, 1]`, by attribute, name or place."""

    def __init__(self, logits: jax.Array):
        self.logits = logits

    def __getitem__(self, key: str | int) -> jax.Array:
        return {"logits": self.logits, 0: self.logits}[key]


class BoundModel:
    """The model with the parameters of this step, to be called on rows padded on the right.

    `scores` are those of every call, in order. Other attributes are the trainer's model's. In training, `key` is that
    of the batch, and `chances` says what a call with a key of its own leaves to chance, given how long its rows are.
    """

    def __init__(
        self,
        model: Any,
        params: dict,
        *,
        dtype: str,
        remat: bool = False,
        key: jax.Array | None = None,
        chances: Callable[..., dict[str, Any]] | None = None,
    ):
        self._model, self._params, self._key, self._chances = model, params, key, chances
        self._how = {"dtype": jnp.dtype(dtype), "remat": remat}
        self.config, self.scores = model.config, []

    def __call__(self, input_ids: Any = None, attention_mask: Any = None, **others: Any) -> Outputs:
        """Score rows of token ids `[rows, T]`.

        Args:
            others: `return_dict`, `use_cache` and what else a batch has mean nothing here.

        Raises:
            TypeError: another argument than these.
        """
        if unknown := others.keys() - _UNREAD:
            raise TypeError(f"model(...) takes input_ids and attention_mask, not {', '.join(sorted(unknown))}.")
        tokens = jnp.asarray(input_ids)
        places = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
        at = jnp.max(jnp.where(tokens != self.config.pad_token_id, places, 0), axis=1)
        how = dict(self._how)
        if self._key is not None:
            shown = jnp.ones(tokens.shape, int) if attention_mask is None else attention_mask
            how |= self._chances(jax.random.fold_in(self._key, len(self.scores)), jnp.sum(shown, axis=1))
        scorer = merge(self._model.graph, self._params, how.get("dropout_key"))
        if scorer.needs_valid:
            how["valid"] = jnp.ones(tokens.shape, bool) if attention_mask is None else attention_mask.astype(bool)
        self.scores.append(scorer(tokens, places, reads_of_rows(at, tokens.shape[1]), **how))
        return Outputs(self.scores[-1][:, None])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def sums(self, pairs: int) -> dict[str, jax.Array]:
        """What `losses.pairwise` counts, where the calls scored each pair once; nothing otherwise."""
        scores = jnp.concatenate(self.scores) if self.scores else jnp.zeros(0)
        if len(scores) != 2 * pairs:
            scores, pairs = jnp.zeros(2), 0
        chosen, rejected = jnp.split(scores, 2)
        weight = jnp.ones(len(chosen)) if pairs else jnp.zeros(len(chosen))
        return pairwise_loss(chosen, rejected, weight=weight)[1]


def inputs_of(arrays: Any) -> list[dict[str, np.ndarray]]:
    """Each micro-batch of a step as scripts know it, without what only fills the shape.

    Beside `input_ids`, `attention_mask` and `margin` it has the names of early releases of TRL, `input_ids_chosen`
    and so on.
    """
    return [
        found for m in range(len(arrays.weight)) if (found := _inputs(jax.tree.map(lambda leaf, m=m: leaf[m], arrays)))
    ]


def _inputs(micro: Any) -> dict[str, np.ndarray]:
    pairs, size = int(np.count_nonzero(micro.weight)), len(micro.weight)
    rows = np.r_[0:pairs, size : size + pairs]
    if not pairs:
        return {}
    tokens = micro.tokens[rows]
    mask = (np.arange(tokens.shape[1]) < micro.lengths[rows, None]).astype(np.int32)
    found = {"input_ids": tokens, "attention_mask": mask}
    for name in ("input_ids", "attention_mask"):
        found[f"{name}_chosen"], found[f"{name}_rejected"] = np.split(found[name], 2)
    return found if micro.margin is None else found | {"margin": micro.margin[:pairs]}


def loss_of(trainer: Any, bound: BoundModel, inputs: dict[str, Any]) -> tuple[jax.Array, dict[str, jax.Array]]:
    """What the script's `compute_loss` gives, and the sums that are logged.

    Raises:
        TypeError: it called torch, or gave no number.
    """
    with torch_explained():
        found = trainer.compute_loss(bound, {name: jnp.asarray(value) for name, value in inputs.items()})
    loss = found[0] if isinstance(found, tuple) else found
    if not isinstance(loss, jax.Array) or loss.shape != ():
        raise TypeError(
            f"compute_loss returned {_described(loss)}: wanted a JAX scalar, as in "
            "-jax.nn.log_sigmoid(chosen - rejected).mean()."
        )
    return loss.astype(jnp.float32), bound.sums(len(inputs["input_ids"]) // 2)


def _described(value: Any) -> str:
    return f"an array {list(value.shape)}" if isinstance(value, jax.Array) else f"a {type(value).__qualname__}"


@contextlib.contextmanager
def torch_explained() -> Iterator[None]:
    """Turn what torch says to a JAX array into an error with the line as jax.numpy has it, and what JAX says to a
    value that is asked for while a loss is compiled into one that tells the line and the way out."""
    try:
        yield
    except jax.errors.JAXTypeError as error:
        own = [frame for frame in traceback.extract_tb(error.__traceback__) if _of_script(frame.filename)]
        raise TypeError(
            f"compute_loss is compiled once and has no values while it is: `{own[-1].line if own else error}`. Choose "
            "with jnp.where, bound with jnp.minimum; float(), .item(), if and self.log need values. self.state's "
            "global_step and epoch are such arrays, too; to count on a call of the model write model(...), not "
            "self.model(...). What is to be logged is for a callback or compute_metrics."
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
    """A line of torch, its names replaced by those of JAX."""
    for pattern, jax_name in _IN_JAX.items():
        line = re.sub(pattern, jax_name, line)
    return line
