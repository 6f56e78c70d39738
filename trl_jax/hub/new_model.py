"""A model of a config alone, with new weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from trl_jax.core.torch_random import TorchGenerator
from trl_jax.hub.checkpoint.loading import Source
from trl_jax.hub.checkpoint.tensor_map import make_tensor_map
from trl_jax.hub.config.native import NativeConfig, native_config, transformers_config
from trl_jax.hub.heads import HeadName
from trl_jax.hub.load_arguments import checked_arguments
from trl_jax.hub.native_backend import NativeBackend
from trl_jax.hub.pretrained import PreTrainedModel


def new_model(config: Any, head: HeadName, seed: int, dtype: Any = None) -> PreTrainedModel:
    """The model of transformers' config object, or of a dict like config.json: matrices and tables are normal with the
    config's `initializer_range`, norms and biases change nothing. It is saved in `dtype`, or in the config's.

    Raises:
        ValueError: a model_type, key or value that is not supported, by name.
    """
    raw = dict(config) if isinstance(config, dict) else json.loads(config.to_json_string(use_diff=False))
    path = Path("config.json")
    native = native_config(raw, path, head)
    params = _drawn(native, TorchGenerator(seed))
    dtype = checked_arguments({}, dtype or raw.get("dtype") or "float32")[1]
    source = Source(native, {}, {}, dtype, make_tensor_map(params, native.names), {})
    made = transformers_config(raw, path, head)
    return PreTrainedModel(params, NativeBackend(source), made, path.parent, raw["model_type"])


def _drawn(config: NativeConfig, generator: TorchGenerator) -> dict[str, jax.Array]:
    params, arch = {}, config.arch
    for path, leaf in nnx.to_flat_state(nnx.split(nnx.eval_shape(config.model))[1]):
        name, axes = ".".join(map(str, path)), leaf.get_metadata()["axes"]
        if path[-1] == "A_log":  # of a gated delta net
            values = np.log(generator.uniform(leaf.size, 7.995) + np.float32(8.005))  # of numbers between 0.01 and 16
            params[name] = jnp.asarray(values.reshape(leaf.shape), jnp.float32)
        elif path[-1] == "dt_bias":
            params[name] = jnp.ones(leaf.shape, jnp.float32)
        elif path[-1] == "bias":
            params[name] = jnp.zeros(leaf.shape, jnp.float32)
        elif "norm" in axes:
            params[name] = jnp.full(leaf.shape, 0.0 if _one_plus(arch, path) else 1.0, jnp.float32)
        else:
            values = generator.normal(leaf.size, arch.initializer_range).reshape(leaf.shape)
            params[name] = jnp.asarray(values, jnp.float32)
        if path[-2:] == ("embed", "weight") and arch.padding_idx is not None:
            params[name] = params[name].at[arch.padding_idx].set(0)
    return params


def _one_plus(arch: Any, path: tuple) -> bool:
    """Whether the norm that has this parameter scales by 1 + it."""
    if path[-2] == "out_norm":  # of a gated delta net
        return False
    kind = arch.qk_norm_kind if path[-2] in ("q_norm", "k_norm") else arch.norm
    return kind.endswith("_one_plus")
