"""Puts virtual tokens before the texts of a native model: new ones, or those that a folder has."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trl_jax.core.torch_random import TorchGenerator
from trl_jax.hub.native_backend import NativeBackend
from trl_jax.hub.peft.virtual.backend import VirtualBackend
from trl_jax.hub.peft.virtual.config import ENCODER, PromptLearningConfig
from trl_jax.hub.peft.virtual.initial_values import initial
from trl_jax.hub.peft.virtual.plan import is_made, maker_of, place_of, settled, virtual_tokens
from trl_jax.mesh.arrays import fetched, owned
from trl_jax.models.virtual import PREFIX


def with_virtual(
    base: NativeBackend,
    arrays: dict[str, Any],
    config: PromptLearningConfig,
    generator: TorchGenerator,
    folder: Path | None,
) -> tuple[dict[str, jax.Array], VirtualBackend, dict[str, Any]]:
    """The arrays that train, the backend, and the frozen arrays; arguments as of `hub.peft.adapted.adapt`."""
    backend = virtual_backend(base, config, folder)
    if folder is not None:
        return backend.load(folder, 0), backend, arrays
    embedded = partial(_embedded, base, arrays)
    drawn = initial(backend.config, backend.maker, generator, embedded, base.vocab_size)
    return {PREFIX + name: owned(array) for name, array in drawn.items()}, backend, arrays


def virtual_backend(base: NativeBackend, config: PromptLearningConfig, folder: Path | None) -> VirtualBackend:
    """The backend with new virtual tokens, or with those that a folder has.

    Raises:
        ValueError: the config does not go with the model.
    """
    native = base.source.config
    if base.source.resized:
        raise ValueError(
            f"{type(config).__name__}: the model's vocabulary was resized to {base.vocab_size} tokens, and the folder "
            "of virtual tokens would lack the new rows. Save the resized model with save_pretrained, and pass its "
            "folder."
        )
    if folder is None and config.inference_mode:
        raise ValueError(f"{type(config).__name__}: inference_mode=True, and nothing would train. Leave it out.")
    config = settled(config, native)
    saved_alone = folder is not None and not (folder / ENCODER).is_file()
    trains = not (saved_alone and is_made(config))
    virtual, maker = virtual_tokens(config, native), maker_of(config, trains=trains)
    return VirtualBackend(base, config, virtual, maker, place_of(config, native), trains=trains)


def _embedded(base: NativeBackend, arrays: dict[str, Any], ids: np.ndarray) -> np.ndarray:
    """The model's embeddings of ids, float32."""
    arch, path = base.source.config.arch, "decoder.embed.weight"
    stored = path if path in arrays else f"{path}.codes"
    rows = base.floats(stored, jnp.take(arrays[stored], jnp.asarray(ids), axis=0)).astype(jnp.float32)
    return np.asarray(fetched(rows * arch.embedding_scale if arch.scale_in_table else rows))
