"""A loaded reward model as scripts know it: call it, read its config, save it."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from trl_jax.core.packed import reads_of_rows
from trl_jax.core.secrets import shown
from trl_jax.data.layout.batch import last_real_token, padded_length
from trl_jax.hub.backends import Backend, NativeBackend
from trl_jax.hub.checkpoint.loading import Source
from trl_jax.hub.checkpoint.resizing import resized_table, table_of_tokens
from trl_jax.hub.freezing import count, moving
from trl_jax.hub.peft.adapted import AdaptedBackend, merged
from trl_jax.hub.transformers_api import TransformersModelApi
from trl_jax.models.functional import merge

logger = logging.getLogger(__name__)



class ScoreOutput(NamedTuple):
    """What calling the model returns: `logits`, float32 `[rows, 1]`, by attribute, name or place."""

    logits: jax.Array

    def __getitem__(self, key: str | int) -> jax.Array:
        return self.logits if key == "logits" else tuple.__getitem__(self, key)


# Arguments of transformers' save_pretrained -> values that change nothing here: shards are those it came in.
_AS_IT_IS = {
    "safe_serialization": (True,), "push_to_hub": (False,), "is_main_process": (True,), "state_dict": (None,),
    "variant": (None,), "token": (None,), "save_peft_format": (True,), "max_shard_size": ("5GB", "50GB"),
}  # fmt: skip


class PreTrainedModel(TransformersModelApi):
    """A sequence classifier with one label. `params` is the flat dict of the arrays that train, float32, by dotted
    path; `frozen` those that do not: none, but beside an adapter.

    `config` is the transformers config object of the checkpoint; changing it changes what is saved only where
    `save_pretrained` says so. `engine` is what computes it.
    """

    def __init__(
        self,
        params: dict[str, jax.Array],
        backend: Backend,
        config: Any,
        folder: Path,
        name: str,
        frozen: dict[str, Any] | None = None,
    ):
        self.params, self.backend, self.config = params, backend, config
        self.frozen = {} if frozen is None else frozen
        self.folder, self.name_or_path = folder, name
        self.graph = backend.graph
        # Where several processes hold the parameters: how one is read, by all together, and whether this one writes.
        self.read: Callable[[jax.Array], Any] | None = None
        self.writes = True

    def __call__(
        self, input_ids: Any, attention_mask: Any | None = None, *, token_type_ids: Any | None = None
    ) -> ScoreOutput:
        """Score rows of token ids.

        Args:
            input_ids: int `[rows, T]`, padded with `config.pad_token_id` on either side.
            attention_mask: `[rows, T]`, 0 where a token is to be hidden; None hides nothing.
            token_type_ids: zeros, as tokenizers return them for a single text. Decoders do not look at it.

        Raises:
            ValueError: rows of no tokens or too many, several rows and no `pad_token_id`, an id outside the vocabulary,
                or another type than 0.
        """
        tokens = np.asarray(input_ids)
        self._check(tokens)
        if not self.backend.ignores_types and token_type_ids is not None and np.any(token_type_ids):
            raise ValueError("token_type_ids has other types than 0, but a reward model scores one text. Leave it out.")
        mask = np.ones(tokens.shape, bool) if attention_mask is None else np.asarray(attention_mask).astype(bool)
        pad = self.config.get_text_config().pad_token_id
        at = [last_real_token(row, pad) if pad is not None else len(row) - 1 for row in tokens]
        alone = pad is None and self.backend.infers_lengths
        extra = 0 if alone else padded_length(tokens.shape[1], "auto") - tokens.shape[1]
        tokens = np.pad(tokens, ((0, 0), (0, extra)), constant_values=pad or 0).astype(np.int32)
        mask = np.pad(mask, ((0, 0), (0, extra)))
        with jax.default_matmul_precision("float32"):  # accelerators would round to fewer digits
            reads = reads_of_rows(np.asarray(at, np.int32), tokens.shape[1])
            scores = _scores(self.graph, pad, self.arrays, tokens, mask, reads)
        return ScoreOutput(scores[:, None])

    def _check(self, tokens: np.ndarray) -> None:
        if tokens.ndim != 2 or tokens.dtype.kind not in "iu":
            raise ValueError(f"input_ids must be whole numbers [rows, T], got {tokens.dtype} {list(tokens.shape)}.")
        if not tokens.shape[1]:
            raise ValueError(f"input_ids is {list(tokens.shape)}: a row needs at least one token to be scored at.")
        if len(tokens) > 1 and self.config.get_text_config().pad_token_id is None:
            raise ValueError(
                f"{len(tokens)} rows cannot be scored without config.pad_token_id: it tells where each one ends. "
                "Set model.config.get_text_config().pad_token_id = tokenizer.pad_token_id."
            )
        most = self.max_positions
        if most is not None and tokens.shape[1] > most:
            raise ValueError(
                f"input_ids has {tokens.shape[1]:,} tokens a row, but the model has positions for {most:,}. Cut them."
            )
        size = self.vocab_size
        if tokens.size and not 0 <= tokens.min() <= tokens.max() < size:
            raise ValueError(
                f"input_ids run from {tokens.min()} to {tokens.max()}, the vocabulary from 0 to {size - 1}."
            )

    @property
    def arrays(self) -> dict[str, Any]:
        """All that the model is computed with."""
        return self.frozen | self.params

    @property
    def vocab_size(self) -> int:
        return self.backend.vocab_size

    @property
    def can_resize(self) -> bool:
        return self.backend.can_resize

    @property
    def source(self) -> Source:
        """What a checkpoint of the native engine was."""
        return self.backend.source

    @property
    def max_positions(self) -> int | None:
        """The length of the longest text that has positions; None where any has."""
        return self.backend.max_positions

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """How many numbers the model has, the head among them, or how many of them train."""
        counted = {
            path: array
            for path, array in (self.params if only_trainable else self.arrays).items()
            if not (exclude_embeddings and path.removesuffix(".codes") in self.backend.embeddings)
        }
        moves = {path: own for path, own in self.moving.items() if path in counted} if only_trainable else {}
        return sum(self.backend.size_of(path, array) for path, array in counted.items()) - count(moves, counted)

    @property
    def moving(self) -> dict[str, np.ndarray]:
        """What moves of the arrays of which something is `still`: see `hub.still`."""
        return moving(self.still, self.backend.places(self.params), self.params) if self.still else {}

    def resize_token_embeddings(self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None) -> Any:
        """Give the table of tokens `new_num_tokens` rows, rounded up to a multiple; new ones are the mean of the old.

        Returns what `get_input_embeddings` does.
        """
        rows = padded_length(self.vocab_size if new_num_tokens is None else new_num_tokens, pad_to_multiple_of)
        if rows != self.vocab_size:
            self.backend = self.backend.resized(rows)
            self.graph, path = self.backend.graph, table_of_tokens(self.params)
            self.params = self.params | {path: resized_table(self.params[path], rows)}
            self.config.get_text_config().vocab_size = rows
        return self.get_input_embeddings()

    def holding(self, params: dict[str, Any]) -> PreTrainedModel:
        """The same model with other numbers."""
        other = copy.copy(self)
        other.params = params
        return other

    def merge_and_unload(self) -> PreTrainedModel:
        """The plain model that computes the same without its adapter; itself, where it has none."""
        if not isinstance(self.backend, AdaptedBackend):
            return self
        arrays = merged(self.backend, self.params, self.frozen)
        backend = NativeBackend(self.backend.base.source)
        return PreTrainedModel(arrays, backend, self.config, self.folder, self.name_or_path)

    def save_pretrained(self, save_directory: str | Path, **others: Any) -> None:
        """Write config.json and safetensors that transformers loads: names, shards and dtypes of the checkpoint it
        came from, `pad_token_id` and `eos_token_id` of `config`.

        Args:
            others: transformers' own, as far as they ask for just that.

        Raises:
            TypeError: one that asks for something else.
        """
        asked = {name for name, value in others.items() if value not in _AS_IT_IS.get(name, ())}
        if asked:
            raise TypeError(
                f"save_pretrained: {', '.join(shown(name, others[name]) for name in sorted(asked))} is not in this "
                "release of trl_jax. Leave it out; to push, use trainer.push_to_hub()."
            )
        self.backend.save(Path(save_directory), self.readable, self.config, writes=self.writes)

    @property
    def readable(self) -> dict[str, Any]:
        """The parameters, as files are made of them."""
        return self.params if self.read is None else {path: self.read(array) for path, array in self.params.items()}


@partial(jax.jit, static_argnums=(0, 1))
def _scores(
    graph: nnx.GraphDef, pad: int | None, params: dict, tokens: jax.Array, mask: jax.Array, reads: jax.Array
) -> jax.Array:
    """`pad` is what an exported program was made with: another one is another program."""
    del pad
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    return merge(graph, params)(tokens, positions, reads, valid=mask)
