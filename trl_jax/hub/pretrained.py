"""A loaded model as scripts know it: call it, read its config, save it."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from trl_jax.core.secrets import shown
from trl_jax.data.layout.batch import padded_length
from trl_jax.hub.backend import Backend
from trl_jax.hub.checkpoint.loading import Source
from trl_jax.hub.checkpoint.resizing import resized_table, tables_of_tokens
from trl_jax.hub.freezing import frozen_size, trainable_masks
from trl_jax.hub.generating.generate import GenerationApi
from trl_jax.hub.generation_config import read_generation_config, write_generation_config
from trl_jax.hub.network.push import Publisher, Upload
from trl_jax.hub.peft.backend import AdaptedBackend
from trl_jax.hub.peft.configs import AdapterConfig
from trl_jax.hub.peft.merging import merged
from trl_jax.hub.scoring import ScoreOutput, score_rows
from trl_jax.hub.transformers_api import TransformersModelApi

# Arguments of transformers' save_pretrained -> values without effect here: shards are those the checkpoint came in.
_WITHOUT_EFFECT = {
    "safe_serialization": (True,), "push_to_hub": (False,), "is_main_process": (True,), "state_dict": (None,),
    "variant": (None,), "token": (None,), "save_peft_format": (True,), "max_shard_size": ("5GB", "50GB"),
}  # fmt: skip


class PreTrainedModel(TransformersModelApi, GenerationApi):
    """A model with its weights.

    Attributes:
        params: the flat dict of the arrays that train, float32, by dotted path.
        frozen: the arrays that do not train: none, but beside an adapter.
        config: the transformers config object of the checkpoint; what is changed in it is saved. How the model computes
            was read before.
        backend: the code that computes it.
        generation_config: transformers' object, of a causal language model; None of others.
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
        self.generation_config = read_generation_config(folder, config) if backend.head == "lm" else None
        # Where several processes hold the parameters: reads one, by all together; and whether this process writes.
        self.read: Callable[[jax.Array], Any] | None = None
        self.writes = True

    def __call__(
        self, input_ids: Any, attention_mask: Any | None = None, *, token_type_ids: Any | None = None
    ) -> ScoreOutput:
        """Compute rows of token ids.

        Args:
            input_ids: int `[rows, T]`, padded with `config.pad_token_id` on either side.
            attention_mask: `[rows, T]`, 0 where a token is to be hidden; None hides nothing.
            token_type_ids: zeros, as tokenizers return them for a single text. Decoders do not look at it.

        Raises:
            ValueError: rows of no tokens or too many, several rows and no `pad_token_id`, an id outside the vocabulary,
                or another type than 0.
        """
        pad = self.config.get_text_config().pad_token_id
        return score_rows(self.backend, self.arrays, pad, input_ids, attention_mask, token_type_ids)

    @property
    def arrays(self) -> dict[str, Any]:
        """All arrays that the model is computed with."""
        return self.frozen | self.params

    @property
    def vocab_size(self) -> int:
        return self.backend.vocab_size

    @property
    def can_resize(self) -> bool:
        return self.backend.can_resize

    @property
    def source(self) -> Source:
        """The checkpoint that a native model was loaded from."""
        return self.backend.source

    @property
    def max_positions(self) -> int | None:
        """The length of the longest text that has positions; None where any has."""
        return self.backend.max_positions

    @property
    def peft_config(self) -> dict[str, AdapterConfig]:
        """The config of the adapter by its name, as a PeftModel has it. Raises AttributeError where there is none."""
        if not isinstance(self.backend, AdaptedBackend):
            raise AttributeError(f"{type(self).__name__} has no adapter, so no peft_config")
        return {"default": self.backend.config}

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """Count the numbers of the model, the head among them, or those that train."""
        counted = {
            path: array
            for path, array in (self.params if only_trainable else self.arrays).items()
            if not (exclude_embeddings and path.removesuffix(".codes") in self.backend.embeddings)
            and path not in self.backend.buffers
        }
        masks = {path: mask for path, mask in self.trainable_masks.items() if path in counted} if only_trainable else {}
        sizes = (self.backend.size_of(path, array) for path, array in counted.items())
        return sum(sizes) - frozen_size(masks, counted)

    @property
    def trainable_masks(self) -> dict[str, np.ndarray]:
        """Of arrays that are frozen in part or whole, the layers that train: see `freezing.trainable_masks`."""
        buffers = {path: np.zeros((), bool) for path in self.backend.buffers if path in self.params}
        if not self.frozen_names:
            return buffers
        return trainable_masks(self.frozen_names, self.backend.locations(self.params), self.params) | buffers

    def resize_token_embeddings(self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None) -> Any:
        """Give the table of tokens, and a language model's head, `new_num_tokens` rows, rounded up to a multiple; the
        new ones are the mean of the old.

        Returns what `get_input_embeddings` does.
        """
        rows = padded_length(self.vocab_size if new_num_tokens is None else new_num_tokens, pad_to_multiple_of)
        if rows != self.vocab_size:
            self.backend = self.backend.resized(rows)
            self.graph, tables = self.backend.graph, tables_of_tokens(self.params)
            self.params = self.params | {path: resized_table(self.params[path], rows) for path in tables}
            self.config.get_text_config().vocab_size = rows
        return self.get_input_embeddings()

    def with_params(self, params: dict[str, Any]) -> PreTrainedModel:
        """The same model with other numbers."""
        other = copy.copy(self)
        other.params = params
        return other

    def merge_and_unload(self) -> PreTrainedModel:
        """The plain model that computes the same without its adapter; itself, where it has none.

        Raises:
            AttributeError: its adapter are virtual tokens, which are no part of any weight.
        """
        if not isinstance(self.backend, AdaptedBackend):
            return self
        if self.backend.virtual.count:
            raise AttributeError(
                f"{self.name_or_path} has no merge_and_unload: virtual tokens stand before the texts and merge into no "
                "weight. Load the base model by its name, or keep the adapter."
            )
        arrays, backend = merged(self.backend, self.params, self.frozen)
        model = PreTrainedModel(arrays, backend, self.config, self.folder, self.name_or_path)
        model.generation_config = self.generation_config
        return model

    def save_pretrained(self, save_directory: str | Path, **others: Any) -> None:
        """Write config.json and safetensors that transformers loads: names, shards and dtypes of the checkpoint it
        came from, and its keys with what was changed in `config`.

        Args:
            others: transformers' own, as far as they ask for just that.

        Raises:
            TypeError: one that asks for something else.
        """
        asked = {name for name, value in others.items() if value not in _WITHOUT_EFFECT.get(name, ())}
        if asked:
            raise TypeError(
                f"save_pretrained: {', '.join(shown(name, others[name]) for name in sorted(asked))} is not in this "
                "release of trl_jax. Leave it out; to push, use push_to_hub()."
            )
        folder = Path(save_directory)
        self.backend.save(folder, self.readable, self.config, writes=self.writes)
        if self.writes and self.generation_config is not None and not isinstance(self.backend, AdaptedBackend):
            write_generation_config(self.generation_config, folder)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        commit_message: str = "Upload model",
        private: bool | None = None,
        token: str | None = None,
        revision: str | None = None,
    ) -> Any:
        """Upload what `save_pretrained` writes to a repository, made where there is none. Returns the commit.

        Raises:
            PermissionError, ConnectionError: the Hub refuses it, or cannot be reached.
        """
        publisher = Publisher(repo_id, token=token, private=private, revision=revision)
        publisher.open()  # first: a Hub that does not answer costs no saving
        with tempfile.TemporaryDirectory(prefix="trl-jax-") as folder:
            self.save_pretrained(folder)
            files = sorted(path.name for path in Path(folder).iterdir())
            return publisher.push([Upload(Path(folder), commit_message, files)])

    @property
    def readable(self) -> dict[str, Any]:
        """The parameters, each read by all processes together where several hold them."""
        return self.params if self.read is None else {path: self.read(array) for path, array in self.params.items()}
