"""The backend of transformers' own models: exported with torch once a kind of shape, and run on JAX."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from trl_jax.hub.backend import Backend
from trl_jax.hub.checkpoint.sharded_reading import Placement
from trl_jax.hub.exported.model import TorchModel
from trl_jax.hub.heads import HeadName
from trl_jax.mesh.arrays import owned
from trl_jax.models.exported import ExportedLm, ExportedScorer

_MODELS = {"score": ExportedScorer, "lm": ExportedLm}


class ExportedBackend(Backend):
    """Runs the programs that a torch model is exported to."""

    log_level, infers_lengths, ignores_types = logging.WARNING, True, False
    takes_packed, drops_out, takes_noise, batch_invariant, causal, heads = False, True, False, False, False, None
    window, has_routers = None, False
    can_resize = saves_in_background = False  # torch's own module saves, and programs are exported from it

    def __init__(self, model: TorchModel):
        self.head = model.head
        self._model, self.dtypes, self.embeddings = model, model.dtypes, model.embeddings
        self.name = f"exported (model_type {model.config.model_type!r}, transformers' code by way of torch.export)"
        self.vocab_size, self.max_positions = model.config.get_text_config().vocab_size, model.max_positions
        self.tensors = {name: name for name in model.shapes}
        self.graph, _ = nnx.split(nnx.eval_shape(lambda: _MODELS[model.head](model.shapes, model)))

    @property
    def undecayed(self) -> frozenset[str]:
        return self._model.undecayed

    def save(self, folder: Path, params: dict[str, jax.Array], config: Any, *, writes: bool = True) -> None:
        del config  # transformers writes the one it has
        whole = {name: np.asarray(params[name]) for name in self.tensors}
        if writes:
            self._model.save(folder, whole)

    def load(self, folder: Path, seed: int, place: Placement | None = None) -> dict[str, jax.Array]:
        return _take_params(TorchModel(folder, dtype="auto", seed=seed, head=self.head))

    def resized(self, rows: int) -> Backend:
        raise ValueError(
            f"This model runs on the {self.name} backend and embeds {self.vocab_size} tokens, wanted {rows}. Resize "
            "the checkpoint with transformers' resize_token_embeddings and load it again."
        )

    def on_disk(self, params: dict[str, jax.Array]) -> Iterator[tuple[str, np.ndarray]]:
        return ((name, np.asarray(array)) for name, array in params.items())


def load_exported(
    folder: Path, *, dtype: str, seed: int, head: HeadName, config: Any = None
) -> tuple[dict[str, jax.Array], ExportedBackend, Any]:
    """The parameters, the backend, and the config object that decides what is exported and saved; arguments as in
    TorchModel."""
    model = TorchModel(folder, dtype=dtype, seed=seed, head=head, config=config)
    return _take_params(model), ExportedBackend(model), model.config


def _take_params(model: TorchModel) -> dict[str, jax.Array]:
    """float32 arrays of our own; torch's memory is freed one by one."""
    return {name: jax.block_until_ready(owned(values)) for name, values in model.take()}
