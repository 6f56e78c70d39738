"""Find and load checkpoints: transformers' and PEFT's auto classes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from trl_jax.config.devices import of_mesh_shape, settled
from trl_jax.core.torch_random import TorchGenerator
from trl_jax.hub.checkpoint import Placement, Source, resized_config, tables_of_tokens
from trl_jax.hub.config import (
    PASSED_OVER,
    NativeConfig,
    checked_arguments,
    native_config,
    not_taken,
    transformers_config,
    with_values,
)
from trl_jax.hub.config_reader import read_config
from trl_jax.hub.families import families
from trl_jax.hub.fetch import Repository, checkpoint_folder
from trl_jax.hub.heads import HeadName, check_labels
from trl_jax.hub.model_types import is_exported, max_positions
from trl_jax.hub.native_backend import NativeBackend, heads_of, load_native, outline_native
from trl_jax.hub.peft import adapt, outline_adapted
from trl_jax.hub.peft_adapters import tokens_of
from trl_jax.hub.peft_backend import AdaptedBackend
from trl_jax.hub.peft_config import CONFIG as ADAPTER
from trl_jax.hub.peft_config import AdapterConfig, LoraConfig, positions_beside, read_adapter_config
from trl_jax.hub.pretrained import PreTrainedModel
from trl_jax.hub.quantization import BitsAndBytesConfig, as_quantization, formats, halves
from trl_jax.hub.tensor_map import make_tensor_map
from trl_jax.mesh.mesh import SEQUENCE, TENSOR, ShardingPlan, make_mesh

# ----------------------------------------------------------------------------------------------------
# PEFT's classes that load an adapter with its base model.


class AutoPeftModelForCausalLM:
    """Loads an adapter, and the language model that it names, as peft's class of that name does."""

    @staticmethod
    def from_pretrained(
        pretrained_model_name_or_path: str | Path,
        adapter_name: str = "default",
        is_trainable: bool = False,
        **kwargs: Any,
    ) -> PreTrainedModel:
        """Load the adapter of a folder or repository on its base model; `merge_and_unload()` gives the plain model.

        Args:
            adapter_name: "default". is_trainable: accepted; a trainer trains the adapter in either case.
            **kwargs: of `AutoModelForCausalLM.from_pretrained`.

        Raises:
            ValueError: there is no adapter, or another adapter_name.
        """
        _check_name(adapter_name)
        return _adapted(AutoModelForCausalLM.from_pretrained(pretrained_model_name_or_path, **kwargs))


class AutoPeftModelForSequenceClassification:
    """Loads an adapter, and the model with the score head that it names, as peft's class of that name does."""

    @staticmethod
    def from_pretrained(
        pretrained_model_name_or_path: str | Path,
        adapter_name: str = "default",
        is_trainable: bool = False,
        **kwargs: Any,
    ) -> PreTrainedModel:
        """As `AutoPeftModelForCausalLM.from_pretrained`."""
        _check_name(adapter_name)
        return _adapted(AutoModelForSequenceClassification.from_pretrained(pretrained_model_name_or_path, **kwargs))


def _check_name(adapter_name: str) -> None:
    if adapter_name != "default":
        raise ValueError(
            f"adapter_name={adapter_name!r} is not in this release of trl_jax: a model has one adapter. Leave it out."
        )


def _adapted(model: PreTrainedModel) -> PreTrainedModel:
    if not isinstance(model.backend, AdaptedBackend):
        raise ValueError(
            f"Can't find '{ADAPTER}' at '{model.name_or_path}': it is a whole model. Load it with AutoModelForCausalLM "
            "or AutoModelForSequenceClassification."
        )
    return model


# ----------------------------------------------------------------------------------------------------
# transformers' classes that load a model by name or folder.


class AutoModelForSequenceClassification:
    """Loads a model with the score head by name or folder, as transformers' class of that name does."""

    @staticmethod
    def from_pretrained(
        pretrained_model_name_or_path: str | Path,
        *,
        num_labels: int = 1,
        dtype: Any = "auto",
        seed: int = 42,
        mesh_shape: str | Mapping[str, int] | None = None,
        **kwargs: Any,
    ) -> PreTrainedModel:
        """Load a checkpoint of a supported model_type: classifier, causal LM (its head is dropped) or bare base.

        Args:
            pretrained_model_name_or_path: a folder, a repository on the Hub, or a GGUF file.
            num_labels: 1, which is one score a text.
            dtype: "float32", "bfloat16", "float16" or "auto" (as stored), which the weights are rounded to, and saved
                in. Arrays and computation are float32.
            seed: draws the score head where the checkpoint has none.
            mesh_shape: as of a trainer's config, "fsdp:8" say: the model lies in parts on all devices. None: on one; a
                trainer divides it by its own arguments in either case.
            kwargs: revision, subfolder, token, cache_dir, local_files_only, gguf_file as in transformers;
                attn_implementation is accepted (the backend picks its kernels); trust_remote_code fetches `*.py`
                for the tokenizer, whose own code AutoTokenizer may then run; a model's is never run; device_map and
                its like are warned of. quantization_config holds the weights in few bits, for an adapter that trains
                beside them or for a reference. config is one that was read from there: what is changed in it is saved.
                Others are values of the config, as in transformers: rms_norm_eps=1e-5, say.

        Raises:
            ValueError, TypeError: an argument or a checkpoint at fault, by name.
        """
        kwargs |= {"num_labels": num_labels, "dtype": dtype, "mesh_shape": mesh_shape}
        return _from_pretrained(str(pretrained_model_name_or_path), "score", seed, **kwargs)

    @staticmethod
    def from_config(config: Any, *, seed: int = 42, dtype: Any = None) -> PreTrainedModel:
        """As `AutoModelForCausalLM.from_config`, with the score head."""
        return new_model(config, "score", seed, dtype)


class AutoModelForCausalLM:
    """Loads a causal language model by name or folder, as transformers' class of that name does."""

    @staticmethod
    def from_pretrained(
        pretrained_model_name_or_path: str | Path,
        *,
        dtype: Any = "auto",
        seed: int = 42,
        mesh_shape: str | Mapping[str, int] | None = None,
        **kwargs: Any,
    ) -> PreTrainedModel:
        """Load a checkpoint of a supported model_type: a causal LM, or a classifier or bare base, whose head is then
        drawn unless it is tied to the embedding.

        Args:
            pretrained_model_name_or_path: a folder, a repository on the Hub, or a GGUF file.
            dtype: as in `AutoModelForSequenceClassification.from_pretrained`.
            **kwargs: likewise.
            seed: draws the head where the checkpoint has none.
            mesh_shape: likewise; each device then writes completions of its own.

        Raises:
            ValueError, TypeError: an argument or a checkpoint at fault, by name.
        """
        kwargs |= {"dtype": dtype, "mesh_shape": mesh_shape}
        return _from_pretrained(str(pretrained_model_name_or_path), "lm", seed, **kwargs)

    @staticmethod
    def from_config(config: Any, *, seed: int = 42, dtype: Any = None) -> PreTrainedModel:
        """Make a model of a config, of transformers or a dict, with new weights; `seed` draws them. They are not those
        that torch would draw.

        Args:
            dtype: what they are saved in, as in `from_pretrained`; None: as the config says.

        Raises:
            ValueError: a model_type, key or value that is not supported, by name.
        """
        return new_model(config, "lm", seed, dtype)


def _from_pretrained(
    name: str,
    head: HeadName,
    seed: int,
    *,
    quantization_config: Any = None,
    config: Any = None,
    mesh_shape: str | Mapping[str, int] | None = None,
    **kwargs: Any,
) -> PreTrainedModel:
    plan = sharding_plan(mesh_shape)
    checkpoint = find_checkpoint(name, head=head, **kwargs)
    if config is not None:
        checkpoint = replace(checkpoint, config=_same_architecture(config, checkpoint))
    few = None if quantization_config is None else as_quantization(quantization_config)
    if few is not None:
        checkpoint = replace(checkpoint, quantization=few)
    return checkpoint.load(seed, place=checkpoint.placement(plan), as_stored=few is not None)


def _same_architecture(config: Any, checkpoint: Checkpoint) -> Any:
    """Return a config of transformers' that a script passes beside a checkpoint.

    Raises:
        ValueError: it would have the checkpoint computed in another way.
    """
    native, given = checkpoint.native, json.loads(config.to_json_string(use_diff=False))
    known = type(config)().to_dict().keys() | ({} if native is None else native.raw).keys()
    raw = {key: value for key, value in given.items() if key in known}  # a script's own keys are no architecture
    if native is None or native_config(raw, native.path, checkpoint.head).arch != native.arch:
        raise ValueError(
            f"config={type(config).__qualname__}: it says another architecture than {checkpoint.folder / 'config.json'}"
            ", which is computed here. Leave config out, and write what shall be saved into model.config; for new "
            "weights, from_config takes it."
        )
    return config


def class_of_family(name: str) -> type:
    """The class of that name in transformers, LlamaForCausalLM, as one of ours: `from_pretrained`, and new weights of
    a config where it is called.

    Raises:
        AttributeError: there is no family with such a class.
    """
    prefix, ending = name.split("For", 1) if "For" in name else (name, "")
    auto = AutoModelForSequenceClassification if ending == "SequenceClassification" else AutoModelForCausalLM
    if prefix not in {family.class_prefix for family in families().values()}:
        raise AttributeError(
            f"module 'trl_jax' has no attribute {name!r}: {auto.__name__} loads every type of model that there is."
        )
    return type(name, (auto,), {"__new__": lambda cls, config, **options: cls.from_config(config, **options)})


# ----------------------------------------------------------------------------------------------------
# Finds a checkpoint by name or folder, checks its config, and loads it.


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose config has been read and can be computed; its weights have not been read.

    Attributes:
        repository: the one on the Hub that has the weights; None for a folder.
        config: transformers' object.
        head: the head that the model gets.
        dtype: "float32", "bfloat16", "float16" or "auto", which the weights are rounded to, and saved in.
        native: the meaning of its config.json; None where transformers' own model runs as an exported program.
        vocab_size, max_positions: as in PreTrainedModel. With another `vocab_size` than its files have, the model is
            resized before it gets an adapter.
        adapter, lora: the folder of an adapter on it, and that one's config.
        quantization: how a model that was loaded already held its weights, which are floats of few values in the files.
    """

    name: str
    folder: Path
    repository: Repository | None
    config: Any
    head: HeadName
    dtype: str
    native: NativeConfig | None
    vocab_size: int
    max_positions: int | None
    adapter: Path | None = None
    lora: AdapterConfig | None = None
    quantization: BitsAndBytesConfig | None = None

    @property
    def can_resize(self) -> bool:
        """Whether the loaded model can embed more tokens."""
        return self.native is not None and self.adapter is None

    def load(
        self,
        seed: int,
        quantization: BitsAndBytesConfig | None = None,
        place: Placement | None = None,
        *,
        as_stored: bool = False,
    ) -> PreTrainedModel:
        """The model; `seed` draws the head where the checkpoint has none; `place` and `as_stored` as in `loading.load`,
        the latter of native models.

        Raises:
            ValueError: weights that train whole are to be quantised.
        """
        if self.adapter is not None:
            return self.load_adapted(self.lora, seed, self.adapter, quantization, place)
        few = self.quantization if as_stored else None  # a model that does not train
        _check_not_quantized(quantization or (None if as_stored else self.quantization))
        if self.repository is not None:
            self.repository.fetch_weights()
        config = self.config
        if self.native is None:
            from trl_jax.exported.program import load_exported  # a package of its own, that few models need

            options = {"dtype": self.dtype, "seed": seed, "head": self.head, "config": config}
            params, backend, config = load_exported(self.folder, **options)
        else:
            quantized = None if few is None else formats(few, None, self.native)
            options = {"seed": seed, "place": place, "as_stored": as_stored, "formats": quantized}
            params, backend = load_native(self.native, dtype=self.dtype, **options)
        return PreTrainedModel(params, backend, config, self.folder, self.name)

    def placement(self, plan: ShardingPlan | None) -> Placement | None:
        """Where the parameters lie by a plan; None: on one device.

        Raises:
            ValueError: the model runs as an exported program, or its heads cannot be divided so.
        """
        if plan is None:
            return None
        if self.native is None:
            raise ValueError(
                f"{self.name}: model_type {self.config.model_type!r} runs as an exported program, which lies on one "
                "device where no trainer divides it. Leave mesh_shape out."
            )
        check_heads(plan, heads_of(self.native), self.name)
        return plan.place

    def outline(
        self, lora: AdapterConfig | None = None, quantization: BitsAndBytesConfig | None = None, *, parts: bool = False
    ) -> PreTrainedModel:
        """The model with shapes in the place of its arrays: enough to compile with. Weights are neither read nor
        fetched.

        Args:
            lora: a new adapter on it; None leaves it as it is, with the adapter in its folder, if there is one.
            parts: arrays lie in parts on several devices.

        Raises:
            ValueError: the model runs as an exported program, which is made from its weights; and as in `load` and
                `load_adapted`.
        """
        if self.native is None:
            raise ValueError(
                f"{self.name}: model_type {self.config.model_type!r} runs as an exported program, which is made from "
                "the weights: there is none to compile from config.json alone. Plan for a model of as many layers of "
                "that width of a native type: llama, gpt2, bert."
            )
        adapter = self.lora if lora is None else lora
        if adapter is None:
            _check_not_quantized(quantization)
            shapes, backend = outline_native(self.native, dtype=self.dtype)
            return PreTrainedModel(shapes, backend, self.config, self.folder, self.name)
        options = self._frozen_options(adapter, quantization, parts=parts)
        shapes, backend = outline_native(self.native, dtype=self.dtype, **options)
        params, backend, frozen = outline_adapted(backend, shapes, adapter, self.adapter if lora is None else None)
        return PreTrainedModel(params, backend, self.config, self.folder, self.name, frozen)

    def _frozen_options(
        self, lora: AdapterConfig, quantization: BitsAndBytesConfig | None, *, parts: bool
    ) -> dict[str, Any]:
        """The options of `load_native` for the frozen weights beside an adapter."""
        native, quantization = resized_config(self.native, self.vocab_size), quantization or self.quantization
        beside = lora if isinstance(lora, LoraConfig) else None  # virtual tokens leave all weights as they are
        quantized = None if quantization is None else formats(quantization, beside, native)
        bits = () if parts else halves(beside, native)  # the layout on several devices goes by the plain weights
        if self.vocab_size != self.native.arch.vocab_size:
            bits = set(bits).difference(tables_of_tokens(bits))
        return {"as_stored": True, "formats": quantized, "bits": bits}

    def load_adapted(
        self,
        lora: AdapterConfig,
        seed: int,
        adapter: Path | None = None,
        quantization: BitsAndBytesConfig | None = None,
        place: Placement | None = None,
    ) -> PreTrainedModel:
        """The model with a new adapter, or with the one in a folder; its own weights have the dtype they are stored in,
        or are quantised.

        Raises:
            ValueError: the model is an exported program, or the adapter does not go with it.
        """
        if self.native is None:
            raise _no_adapters(self.name, self.config.model_type)
        if self.repository is not None:
            self.repository.fetch_weights()
        generator, options = TorchGenerator(seed), self._frozen_options(lora, quantization, parts=place is not None)
        arrays, backend = load_native(self.native, dtype=self.dtype, seed=generator, place=place, **options)
        model = PreTrainedModel(arrays, backend, self.config, self.folder, self.name)
        if self.vocab_size != model.vocab_size:
            model.resize_token_embeddings(self.vocab_size)
        return with_adapter(model, lora, generator, adapter)


def find_checkpoint(name: str, *, head: HeadName = "score", dtype: Any = "auto", **kwargs: Any) -> Checkpoint:
    """Find a checkpoint, its weights on the Hub if need be; other arguments as in `from_pretrained`."""
    if head == "score":
        check_labels(kwargs.pop("num_labels", 1))
    fetch, dtype, values = checked_arguments(dict(kwargs), dtype)
    folder, repository = checkpoint_folder(name, **fetch)
    if (folder / ADAPTER).is_file() and not (folder / "config.json").is_file():
        return _find_adapted(folder, repository, head, dtype, fetch, values)
    raw, path = read_config(folder), folder / "config.json"
    exported = is_exported(raw, families(), path, head)
    if exported and (unheard := values.keys() - PASSED_OVER):
        raise not_taken(unheard, " for other models: this one is exported as that says")
    raw = with_values(raw, values, path, head)
    if exported:
        config = transformers_config(raw, path, head)
        size = config.get_text_config().vocab_size
        return Checkpoint(name, folder, repository, config, head, dtype, None, size, max_positions(config, head))
    native = native_config(raw, path, head)
    config, arch = transformers_config(raw, path, head), native.arch
    return Checkpoint(name, folder, repository, config, head, dtype, native, arch.vocab_size, arch.max_positions)


def _check_not_quantized(quantization: BitsAndBytesConfig | None) -> None:
    """Raise ValueError where weights that train whole are to be quantised."""
    if quantization is not None:
        raise ValueError(
            "quantization_config is given, but no adapter: quantised weights do not train. Pass peft_config="
            "LoraConfig(...) beside it, or leave it out."
        )


def _no_adapters(name: str, model_type: str) -> ValueError:
    return ValueError(
        f"{name}: models of type {model_type!r} run as exported programs, which take no adapter in this release of "
        "trl_jax. Train the whole model, or an adapter of a native type: llama, qwen2, bert."
    )


def with_adapter(
    model: PreTrainedModel, lora: AdapterConfig, seed: int | TorchGenerator, adapter: Path | None = None
) -> PreTrainedModel:
    """A new model, with an adapter that trains: a new one, or the one in a folder. It shares the arrays of `model`,
    which stays as it is."""
    if not isinstance(model.backend, NativeBackend):
        raise _no_adapters(model.name_or_path, model.config.model_type)
    lora = replace(lora, base_model_name_or_path=lora.base_model_name_or_path or model.name_or_path)
    params, backend, frozen = adapt(model.backend, model.arrays, lora, seed, adapter)
    adapted = PreTrainedModel(params, backend, model.config, model.folder, model.name_or_path, frozen)
    adapted.generation_config = model.generation_config
    return adapted


def rows_on_disk(name: str, config: Any) -> int | None:
    """How many tokens the checkpoint of that name embeds, by its config.json on this machine; None without one.

    Args:
        config: transformers' object that was read of it, whose commit is asked for.
    """
    try:
        commit = vars(config).get("_commit_hash")  # which configs of folders lack
        folder, _ = checkpoint_folder(name, revision=commit, local_files_only=True)
        return transformers_config(read_config(folder), folder / "config.json", "lm").get_text_config().vocab_size
    except (FileNotFoundError, ConnectionError, ValueError):
        return None


def _find_adapted(
    folder: Path,
    repository: Repository | None,
    head: HeadName,
    dtype: str,
    fetch: dict[str, Any],
    values: dict[str, Any],
) -> Checkpoint:
    """An adapter's folder: the checkpoint is that of its base model, whose config has these `values`."""
    lora = read_adapter_config(folder)
    if repository is not None:
        repository.fetch_adapter()
    base, access = lora.base_model_name_or_path, ("token", "cache_dir", "local_files_only")
    options = {key: fetch[key] for key in access if key in fetch}
    options |= {"revision": lora.revision} if lora.revision else {}
    if not base:
        raise ValueError(f"{folder / ADAPTER} names no base_model_name_or_path: write there which model it is for.")
    try:
        checkpoint = find_checkpoint(base, head=head, dtype=dtype, **options, **values)
    except (FileNotFoundError, ValueError) as error:
        raise ValueError(f"{folder / ADAPTER} is for base_model_name_or_path={base!r}. {error}") from error
    tokens = None if checkpoint.native is None else tokens_of(folder, checkpoint.native)
    positions = positions_beside(checkpoint.max_positions, lora)
    vocab_size = tokens or checkpoint.vocab_size
    return replace(checkpoint, adapter=folder, lora=lora, vocab_size=vocab_size, max_positions=positions)


# ----------------------------------------------------------------------------------------------------
# A model of a config alone, with new weights.


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


# ----------------------------------------------------------------------------------------------------
# Where a model that no trainer has lies: on one device, or divided over those of a mesh.


def sharding_plan(mesh_shape: str | Mapping[str, int] | None) -> ShardingPlan | None:
    """The plan of a mesh such as "data:2,fsdp:4" of all devices; None without one.

    Raises:
        ValueError: the sizes do not fit the number of devices, or divide texts.
    """
    asked = of_mesh_shape(mesh_shape)
    if asked is None:
        return None
    devices = jax.devices()
    sizes = settled(asked, len(devices), len({device.process_index for device in devices}))
    if sizes.get(SEQUENCE, 1) > 1:
        raise ValueError(
            f"mesh_shape={mesh_shape!r}: the axis sequence divides the texts of a training step. Give these devices to "
            "data or fsdp."
        )
    return ShardingPlan(make_mesh(sizes))


def check_heads(plan: ShardingPlan, heads: Mapping[str, int] | None, name: str) -> None:
    """Raise ValueError where the tensor axis does not divide the heads of the model of this name; `heads` is None of an
    exported program."""
    size = plan.size(TENSOR)
    if size == 1:
        return
    if heads is None:
        raise ValueError(
            f"mesh: tensor {size} divides products by name, and {name} runs as an exported program. Divide it with "
            "fsdp instead."
        )
    odd = {kind: count for kind, count in heads.items() if count % size}
    if odd:
        shown = " and ".join(f"{count} {kind}" for kind, count in odd.items())
        raise ValueError(
            f"mesh: tensor {size} does not divide the {shown} of {name}. Choose a tensor size that does, and give the "
            "rest to fsdp."
        )
