"""The backend of native model types, which are those with a family."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from trl_jax.core.files import WEIGHT_DTYPES
from trl_jax.core.torch_random import TorchParamLayout
from trl_jax.hub.backend import Backend, Locations, Traits, fixed_values_error
from trl_jax.hub.checkpoint import ShardingRule, Source, entries_of, load, outline, read_tensor, resized_source, save
from trl_jax.hub.config import NativeConfig, changes, read_native_config
from trl_jax.hub.heads import LM_HEAD
from trl_jax.hub.modules import QUANTIZED, current_name, in_order, modules_of, parameter_names, torch_tensor_map
from trl_jax.hub.tensor_map import Kernel, TensorEntry
from trl_jax.models.adapters import module_at
from trl_jax.models.decoder import narrowest_window
from trl_jax.models.model import abstract, logical_axes
from trl_jax.nn.layers import Norm
from trl_jax.nn.linear import HALVES, TABLES, EncodedWeight, Format, dequantized

# Untying the language model head from the embedding


def untied(backend: NativeBackend, arrays: dict[str, Any]) -> tuple[NativeBackend, dict[str, Any]]:
    """The backend and the arrays of a tied model after giving its head a copy of the embedding."""
    source = backend.source
    [table] = [entry for entry in source.tensor_map if entry.path.split(".")[1:] == ["embed", "weight"]]
    head = TensorEntry(LM_HEAD, source.config.family.language_heads[0])
    dtypes, formats = dict(source.dtypes), dict(backend.formats)
    if table.tensor in dtypes:
        dtypes[head.tensor] = dtypes[table.tensor]
    if table.path in formats:
        formats[head.path] = formats[table.path]
    copies = {head.path + leaf: arrays.get(table.path + leaf) for leaf in ("", ".codes")}
    config, tensor_map = source.config.untied(), [*source.tensor_map, head]
    backend = NativeBackend(replace(source, config=config, tensor_map=tensor_map, dtypes=dtypes), formats)
    return backend, arrays | {path: array for path, array in copies.items() if array is not None}


# NativeBackend


_BUFFERS = (
    ".correction_bias", ".activation.beta", ".activation.eps", ".layer_scalar", ".input_min", ".input_max",
    ".output_min", ".output_max", ".connector.shift", ".connector.scale",
)  # fmt: skip


class NativeBackend(Backend):
    """Our own decoder or encoder. `source` is the checkpoint that it was loaded from, and `formats` says which weights
    are quantized or stored as bits."""

    name, log_level, undecayed, saves_in_background, can_resize = "native", logging.INFO, frozenset(), True, True

    def __init__(self, source: Source, formats: dict[str, Format] | None = None):
        self.source, self.dtypes, self.formats = source, source.dtypes, formats or {}
        self.head = source.config.head.kind
        self.graph = abstract(self.make)[0] if self.formats else source.config.abstract[0]
        self.tensors = {entry.path: entry.tensor for entry in source.tensor_map}
        self.buffers = frozenset(path for path in self.tensors if path.endswith(_BUFFERS))
        self.traits = _traits(source.config, self.tensors)

    @property
    def decays_by_name(self) -> frozenset[str]:
        """The RMS norms: transformers recognizes LayerNorms by their class, but these only by their names."""
        model = nnx.eval_shape(self.source.config.model)
        norms = {path: module_at(model, path.rpartition(".")[0]) for path in self.tensors}
        return frozenset(path for path, norm in norms.items() if isinstance(norm, Norm) and not norm.kind.centered)

    @property
    def axes(self) -> Mapping[str, tuple[str, ...]]:
        return logical_axes(self.make)

    def make(self) -> nnx.Module:
        """A new module; use it under `abstract` to avoid allocating its parameters."""
        model = self.source.config.model()
        for path, form in self.formats.items():
            owner, _, name = path.rpartition(".")
            module = module_at(model, owner)
            weight = vars(module)[name]
            setattr(module, name, EncodedWeight(form, weight.shape[:-2], weight.get_metadata()["axes"]))
        return model

    def torch_param_layout(self) -> TorchParamLayout:
        # parameters of experts that transformers fuses into one tensor, although they are separate on disk
        experts = {path: path.rpartition(".")[0] for path in self.tensors if path.endswith(("mlp.gate", "mlp.up"))}
        tensor_map = self.source.tensor_map
        # runs of layers share the name on disk
        slices = [entry for entry in tensor_map if entry.tensor_slice is not None]
        joined = {entry.path: f"{entry.tensor} from layer {entry.first}" for entry in slices} | experts
        # a convolution is [channels, 1, width], and biases of experts are [experts, outputs]
        axes = {path: -3 for path in self.tensors if path.endswith("_convolution")}
        axes |= {path: -1 for path in self.tensors if path.endswith(("mlp.gate_bias", "mlp.up_bias"))}
        kernels = {entry.path: entry.tensor_slice.kernel for entry in slices if isinstance(entry.tensor_slice, Kernel)}
        return TorchParamLayout(frozenset(entry.path for entry in tensor_map if entry.stacked), joined, axes, kernels)

    def locations(self, params: dict[str, jax.Array]) -> Locations:
        locations: Locations = {}
        for entry in self._in_torch:
            if entry.path in params:  # quantized weights have no array with this name
                for name, index in entry.tensors(params[entry.path].shape):
                    locations.setdefault(name, []).append((entry.path, index))
        return {name: locations[name] for name in self._names if name in locations}

    @cached_property
    def layers(self) -> Mapping[str, str]:
        forms = {path: form.kind for path, form in self.formats.items() if form.kind in QUANTIZED}
        heads = {name.removesuffix(".weight"): "linear" for name in self.tied}
        places = in_order(modules_of(self.source.config))
        return {name: forms.get(f"{module.parts[0][0]}.weight", module.kind) for name, module, _ in places} | heads

    def size_of(self, path: str, array: jax.Array) -> int:
        weight, _, leaf = path.rpartition(".")
        if weight not in self.formats:
            return array.size
        return array.size * (2 if self.formats[weight].kind in TABLES else 1) if leaf == "codes" else 0

    def floats(self, path: str, array: jax.Array) -> jax.Array:
        form = self.formats.get(path.removesuffix(".codes"))
        halves = form is not None and form.kind in HALVES
        return jax.lax.bitcast_convert_type(array, jnp.dtype(form.kind)) if halves else array

    @property
    def main_dtype(self) -> str:
        return self.source.dtype

    def save_in(self, dtype: str) -> None:
        if dtype not in WEIGHT_DTYPES:
            raise ValueError(
                f"model.to({dtype}): weights are saved in {', '.join(WEIGHT_DTYPES)}. Choose one of these."
            )
        self.source = replace(self.source, dtype=dtype, dtypes=dict.fromkeys(self.source.dtypes, dtype))
        self.dtypes = self.source.dtypes

    def weight(self, arrays: dict[str, jax.Array], path: str) -> jax.Array:
        if path not in self.formats:
            return jnp.asarray(arrays[path], jnp.float32)
        form = self.formats[path]
        leaves = {name: arrays[f"{path}.{name}"] for name in form.leaves()}
        unpack = partial(dequantized, form)
        stacked = form.kind not in HALVES and leaves["codes"].ndim > len(form.leaves()["codes"][0])
        return jax.vmap(unpack)(leaves) if stacked else unpack(leaves)

    def replaced(self, arrays: dict[str, jax.Array], path: str, values: np.ndarray) -> dict[str, jax.Array]:
        """Replace the values of the array at a path, keeping its sharding and format, or a wider format if `values`
        have one.

        Raises:
            ValueError: the array is quantized.
        """
        form = self.formats.get(path)
        if form is not None and form.kind not in HALVES:
            raise ValueError(
                f"LoraConfig: init_lora_weights='pissa' modifies {path}, which is quantized to {form.kind}. Leave "
                "quantization_config out, or use init_lora_weights=True."
            )
        name = path if form is None else f"{path}.codes"
        kind = jnp.promote_types(arrays[path].dtype, values.dtype) if form is None else jnp.dtype(form.kind)
        stored = values.astype(kind) if form is None else values.astype(kind).view(np.uint16)
        return {name: jax.device_put(stored, arrays[name].sharding)}

    def weights(self, arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """All arrays in float32, dequantized."""
        plain = {path: array for path, array in arrays.items() if path.rpartition(".")[0] not in self.formats}
        return {path: self.weight(arrays, path) for path in (*plain, *self.formats)}

    def as_stored(self, arrays: dict[str, jax.Array], bits: Collection[str]) -> tuple[dict[str, Any], NativeBackend]:
        """All arrays in the dtypes that they are saved in, and the backend for them. Quantized weights stay unchanged.

        Args:
            bits: paths of arrays to keep as raw bits, if they are 16-bit.
        """
        forms = dict(self.formats)
        held = {path: array for path, array in arrays.items() if path.rpartition(".")[0] in forms}
        for entry in self.source.tensor_map:
            path = entry.path
            if path in self.formats:
                continue
            array = arrays[path]
            tensor, _ = entry.tensors(array.shape)[0]
            kind = jnp.dtype(self.source.dtypes.get(tensor, self.source.dtype))
            array = _of(array, lambda values, kind=kind: values.astype(kind))
            if path in bits and kind.name in HALVES:
                forms[path] = Format(kind.name, array.shape[-2:])
                path = f"{path}.codes"
                array = _of(array, lambda values: jax.lax.bitcast_convert_type(values, jnp.uint16))
            held[path] = array
        return held, NativeBackend(self.source, forms)

    def without_bits(self, arrays: dict[str, jax.Array]) -> tuple[dict[str, jax.Array], NativeBackend]:
        """Convert arrays stored as bits to floats; return all arrays and the backend for them."""
        few = {path: form for path, form in self.formats.items() if form.kind not in HALVES}
        bits = {f"{path}.codes": path for path in self.formats.keys() - few.keys()}
        floats = {bits.get(path, path): self.floats(path, array) for path, array in arrays.items()}
        return floats, NativeBackend(self.source, few)

    def save(
        self, folder: Path | None, params: dict[str, jax.Array], config: Any, max_shard_size: int | str | None = None
    ) -> None:
        source = self.source.config
        changed = {} if folder is None else changes(config, source.raw, source.path, self.head)
        params = self.weights(params) if self.formats else params
        save(folder, params, self.source, changed=changed, max_shard_size=max_shard_size)

    def load(self, folder: Path, seed: int, sharding_of: ShardingRule | None = None) -> dict[str, jax.Array]:
        config = read_native_config(folder, self.head)
        if self.source.config.vision_arch is not None:
            config = config.with_images()
        return load(config, dtype="auto", seed=seed, sharding_of=sharding_of)[0]

    def resized(self, rows: int) -> NativeBackend:
        return NativeBackend(resized_source(self.source, rows), self.formats)

    def on_disk(self, params: dict[str, jax.Array]) -> Iterator[tuple[str, np.ndarray]]:
        params = self.weights(params) if self.formats else params
        for tensor, entries in entries_of(params, self.source.tensor_map).items():
            yield tensor, read_tensor(params, entries)

    @cached_property
    def _in_torch(self) -> list[TensorEntry]:
        return torch_tensor_map(self.source.config)

    @cached_property
    def token_table(self) -> str:
        return next(entry.tensor for entry in self._in_torch if entry.path.split(".")[1:] == ["embed", "weight"])

    @cached_property
    def tied(self) -> Mapping[str, str]:
        return {f"{self.language_head}.weight": self.token_table} if self.source.config.is_tied else {}

    @property
    def language_head(self) -> str:
        """The name in PyTorch of the language model head."""
        family = self.source.config.family
        return current_name(family.lm_head.names[0][1], family)

    @cached_property
    def _names(self) -> list[str]:
        """The names of all parameters and buffers in torch's order."""
        return parameter_names(self.source.config)

    def named(
        self, arrays: dict[str, jax.Array], names: Collection[str] | None = None
    ) -> Iterator[tuple[str, np.ndarray]]:
        entries = entries_of(self.source.config.abstract[1], self._in_torch)
        names = [name for name in self._names if names is None or name in names]
        if self.formats:
            paths = {entry.path for name in names for entry, _ in entries[name]}
            arrays = {path: self.weight(arrays, path) for path in paths}
        for name in names:
            yield name, read_tensor(arrays, entries[name])

    def with_values(self, arrays: Mapping[str, Any], values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        if self.formats:
            raise fixed_values_error("Load the folder that has them with from_pretrained")
        changed: dict[str, np.ndarray] = {}
        for entry in self._in_torch:
            for name, index in entry.tensors(arrays[entry.path].shape):
                if name in values:
                    array = changed.setdefault(entry.path, np.array(arrays[entry.path]))
                    array[index] = entry.take(values[name])
        return changed


def _of(array: jax.Array | jax.ShapeDtypeStruct, do: Callable) -> jax.Array | jax.ShapeDtypeStruct:
    """Apply `do` to an array, or to its shape."""
    return jax.eval_shape(do, array) if isinstance(array, jax.ShapeDtypeStruct) else do(array)


def _traits(config: NativeConfig, paths: Collection[str]) -> Traits:
    arch, causal = config.arch, not config.head.model.needs_valid
    routed = causal and arch.experts is not None
    return Traits(
        vocab_size=arch.vocab_size,
        max_positions=arch.max_positions,
        embeddings=frozenset(path for path in paths if path.endswith("embed.weight")),
        causal=causal,
        window=narrowest_window((*arch.windows, *((arch.chunks or ()) if causal else ()))),
        batch_invariant=not causal,  # some decoder ropes depend on the longest text of a batch
        ignores_types=causal,
        takes_packed=causal or arch.takes_packed,
        takes_stripes=causal and not (arch.short_convolution or arch.gated_delta or arch.state_space),
        takes_noise=True,
        drops_out=arch.drops_out,
        has_routers=routed,
        draws_experts=routed and arch.experts.sparse_mixer is not None,
        heads=heads_of(config),
    )


def heads_of(config: NativeConfig) -> dict[str, int]:
    """Number of attention heads of each kind, as in `Traits.heads`."""
    arch, causal = config.arch, not config.head.model.needs_valid
    return {"heads": arch.num_heads} | ({"key heads": arch.num_key_heads} if causal else {})


def load_native(
    config: NativeConfig, *, formats: dict[str, Format] | None = None, **options: Any
) -> tuple[dict[str, jax.Array], NativeBackend]:
    """The parameters and their backend; arguments are as in `checkpoint.load`."""
    params, source = load(config, formats=formats, **options)
    return params, NativeBackend(source, _with_bits(params, source, formats))


def outline_native(
    config: NativeConfig, *, dtype: str, formats: dict[str, Format] | None = None, **options: Any
) -> tuple[dict[str, jax.ShapeDtypeStruct], NativeBackend]:
    """Shapes of the parameters, and the backend, from config.json alone; `options` as in `checkpoint.outline`."""
    shapes, source = outline(config, dtype=dtype, formats=formats, **options)
    return shapes, NativeBackend(source, _with_bits(shapes, source, formats))


def _with_bits(params: Mapping[str, Any], source: Source, formats: dict[str, Format] | None) -> dict[str, Format]:
    """`formats` extended by arrays that hold the bits of 16-bit floats."""
    every = dict(formats or {})
    for entry in source.tensor_map:
        codes = params.get(f"{entry.path}.codes")
        if codes is not None and entry.path not in every:
            tensor, _ = entry.tensors(codes.shape)[0]
            every[entry.path] = Format(source.dtypes.get(tensor, source.dtype), codes.shape[-2:])
    return every
