"""Find and load checkpoints: counterparts of transformers' and PEFT's auto classes.

`find_checkpoint` reads a checkpoint's config and returns a `Checkpoint`, which is complete before any weight is read.
Its `load`, `load_adapted` and `outline` make the model. The classes that scripts call, such as `AutoModelForCausalLM`,
are thin layers on top.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from trl_jax.config.devices import mesh_axis_sizes, parse_mesh_shape
from trl_jax.core.text import api_boundary
from trl_jax.core.torch_random import TorchGenerator
from trl_jax.hub.backend import Backend
from trl_jax.hub.checkpoint import ShardingRule, Source, resized_config, tables_of_tokens
from trl_jax.hub.config import (
    IGNORED_IF_UNKNOWN,
    NativeConfig,
    checked_arguments,
    checked_dtype,
    native_config,
    transformers_config,
    unknown_arguments_error,
    with_values,
)
from trl_jax.hub.config_reader import read_config
from trl_jax.hub.families import families
from trl_jax.hub.fetch import Repository, checkpoint_folder
from trl_jax.hub.generate import stream_of
from trl_jax.hub.heads import HeadName, check_labels
from trl_jax.hub.model_types import is_exported, max_positions
from trl_jax.hub.native_backend import NativeBackend, heads_of, load_native, outline_native
from trl_jax.hub.peft import adapt, outline_adapted
from trl_jax.hub.peft_adapters import tokens_of
from trl_jax.hub.peft_backend import AdaptedBackend
from trl_jax.hub.peft_config import CONFIG as ADAPTER
from trl_jax.hub.peft_config import AdapterConfig, LoraConfig, as_adapter_config, positions_left, read_adapter_config
from trl_jax.hub.pretrained import PreTrainedModel
from trl_jax.hub.quantization import BitsAndBytesConfig, as_quantization, formats, halves
from trl_jax.hub.tensor_map import make_tensor_map
from trl_jax.mesh.mesh import SEQUENCE, TENSOR, ShardingPlan, make_mesh

# transformers' auto classes


class AutoModelForSequenceClassification:
    """Load a model with a score head by name or folder, as transformers' class of the same name does."""

    @staticmethod
    @api_boundary
    def from_pretrained(
        pretrained_model_name_or_path: str | Path,
        *,
        num_labels: int = 1,
        dtype: Any = "auto",
        seed: int = 42,
        mesh_shape: str | Mapping[str, int] | None = None,
        **kwargs: Any,
    ) -> PreTrainedModel:
        """Load a checkpoint of a supported model_type: a classifier, a causal LM (its head is dropped) or a bare base.

        Args:
            pretrained_model_name_or_path: a folder, a repository on the Hub, or a GGUF file.
            num_labels: must be 1 (one score per text).
            dtype: "float32", "bfloat16", "float16" or "auto" (as stored). Weights are rounded to this dtype and saved
                in it; arrays and computation are float32.
            seed: initializes the score head if the checkpoint has none.
            mesh_shape: as in a trainer's config, for example "fsdp:8", to shard the model over all devices. None puts
                it on one device. A trainer reshards it according to its own arguments either way.
            kwargs: revision, subfolder, token, cache_dir, local_files_only and gguf_file work as in transformers.
                attn_implementation is accepted, but the backend picks its own kernels. trust_remote_code downloads
                `*.py` for the tokenizer, whose code AutoTokenizer may then run; model code never runs. device_map and
                similar arguments log a warning. quantization_config loads the weights in low precision, for a frozen
                base model under an adapter or for a reference model. config is a config object read from the same
                checkpoint; changes to it are saved. Anything else overrides a config value, as in transformers:
                rms_norm_eps=1e-5.

        Raises:
            ValueError, TypeError: an argument is invalid, or something is wrong with the checkpoint; the message
                names it.
        """
        kwargs |= {"num_labels": num_labels, "dtype": dtype, "mesh_shape": mesh_shape}
        return _from_pretrained(str(pretrained_model_name_or_path), "score", seed, **kwargs)

    @staticmethod
    def from_config(config: Any, *, seed: int = 42, dtype: Any = None) -> PreTrainedModel:
        """Like `AutoModelForCausalLM.from_config`, with a score head."""
        return new_model(config, "score", seed, dtype)


class AutoModelForCausalLM:
    """Load a causal language model by name or folder, as transformers' class of the same name does."""

    @staticmethod
    @api_boundary
    def from_pretrained(
        pretrained_model_name_or_path: str | Path,
        *,
        dtype: Any = "auto",
        seed: int = 42,
        mesh_shape: str | Mapping[str, int] | None = None,
        **kwargs: Any,
    ) -> PreTrainedModel:
        """Load a checkpoint of a supported model_type: a causal LM, or a classifier or bare base, for which a new
        language model head is initialized unless it is tied to the embedding.

        Args:
            pretrained_model_name_or_path: a folder, a repository on the Hub, or a GGUF file.
            dtype: as in `AutoModelForSequenceClassification.from_pretrained`.
            seed: initializes the head if the checkpoint has none.
            mesh_shape: as in `AutoModelForSequenceClassification.from_pretrained`; with a mesh, each device generates
                its own share of the completions.
            **kwargs: as in `AutoModelForSequenceClassification.from_pretrained`.

        Raises:
            ValueError, TypeError: an argument is invalid, or something is wrong with the checkpoint; the message
                names it.
        """
        kwargs |= {"dtype": dtype, "mesh_shape": mesh_shape}
        return _from_pretrained(str(pretrained_model_name_or_path), "lm", seed, text_class=True, **kwargs)

    @staticmethod
    def from_config(config: Any, *, seed: int = 42, dtype: Any = None) -> PreTrainedModel:
        """Build a model with new weights from a transformers config or a dict.

        The weights are drawn from `seed`; they differ from the ones torch would draw.

        Args:
            dtype: dtype that the weights are saved in, as in `from_pretrained`; None uses the config's.

        Raises:
            ValueError: the model_type, a key or a value is not supported; the message names it.
        """
        return new_model(config, "lm", seed, dtype)


class AutoModelForImageTextToText:
    """Load a vision-language model by name or folder, with its vision tower, as transformers' class of the same name
    does. `AutoModelForCausalLM` only loads its text model."""

    @staticmethod
    @api_boundary
    def from_pretrained(
        pretrained_model_name_or_path: str | Path, *, dtype: Any = "auto", seed: int = 42, **kwargs: Any
    ) -> PreTrainedModel:
        """Load a checkpoint of a model type for which images are supported (docs/pages/vision.md). Arguments are as in
        `AutoModelForCausalLM.from_pretrained`.

        Raises:
            ValueError, TypeError: an argument is invalid, or something is wrong with the checkpoint; the message
                names it.
        """
        return _from_pretrained(str(pretrained_model_name_or_path), "lm", seed, images=True, dtype=dtype, **kwargs)

    @staticmethod
    def from_config(config: Any, *, seed: int = 42, dtype: Any = None) -> PreTrainedModel:
        """Like `AutoModelForCausalLM.from_config`, with the vision tower."""
        return new_model(config, "lm", seed, dtype, images=True)


class _WholeModel(AutoModelForCausalLM):
    """Base of the classes named like transformers' ...ForConditionalGeneration. A trainer computes the vision tower if
    there are images."""

    @staticmethod
    @api_boundary
    def from_pretrained(pretrained_model_name_or_path: str | Path, *, seed: int = 42, **kwargs: Any) -> PreTrainedModel:
        """Like `AutoModelForCausalLM.from_pretrained`."""
        return _from_pretrained(str(pretrained_model_name_or_path), "lm", seed, **{"dtype": "auto", **kwargs})


def _from_pretrained(
    name: str,
    head: HeadName,
    seed: int | TorchGenerator,
    *,
    images: bool = False,
    text_class: bool = False,
    quantization_config: Any = None,
    config: Any = None,
    mesh_shape: str | Mapping[str, int] | None = None,
    **kwargs: Any,
) -> PreTrainedModel:
    """Load a checkpoint for user code.

    Args:
        images: whether to load the vision tower.
        text_class: whether AutoModelForCausalLM was called, for which transformers may have a class without vision.
    """
    plan = sharding_plan(mesh_shape)
    checkpoint = find_checkpoint(name, head=head, **kwargs)
    checkpoint = checkpoint.with_images() if images else checkpoint
    if config is not None:
        checkpoint = replace(checkpoint, config=_same_architecture(config, checkpoint))
    quantization = None if quantization_config is None else as_quantization(quantization_config)
    if quantization is not None:
        checkpoint = replace(checkpoint, quantization=quantization)
    model = checkpoint.load(seed, sharding_of=checkpoint.sharding_rule(plan), as_stored=quantization is not None)
    if text_class and checkpoint.native is not None and checkpoint.native.family.has_text_class:
        model.accepts_loss_kwargs = True
    return model


def _same_architecture(config: Any, checkpoint: Checkpoint) -> Any:
    """Return the `config` that was passed for a checkpoint, after checking that it has the same architecture.

    Raises:
        ValueError: the config would change how the checkpoint is computed.
    """
    native, values = checkpoint.native, json.loads(config.to_json_string(use_diff=False))
    keys = type(config)().to_dict().keys() | ({} if native is None else native.raw).keys()
    raw = {key: value for key, value in values.items() if key in keys}  # ignore keys that the script added
    if native is None or native_config(raw, native.path, checkpoint.head).arch != native.arch:
        raise ValueError(
            f"config={type(config).__qualname__} describes a different architecture than "
            f"{checkpoint.folder / 'config.json'}. Leave config out and set the values to be saved on model.config, or "
            "use from_config to create a model with new weights."
        )
    return config


def class_of_family(name: str) -> type:
    """Our class for a transformers class name such as LlamaForCausalLM. It has `from_pretrained`, and calling it with a
    config creates a model with new weights.

    Raises:
        AttributeError: no family has such a class.
    """
    prefix, ending = name.split("For", 1) if "For" in name else (name, "")
    auto = AutoModelForSequenceClassification if ending == "SequenceClassification" else AutoModelForCausalLM
    if prefix not in {family.class_prefix for family in families().values()}:
        raise AttributeError(
            f"module 'trl_jax' has no attribute {name!r}. {auto.__name__} loads every supported model type."
        )
    auto = _WholeModel if ending == "ConditionalGeneration" else auto
    return type(name, (auto,), {"__new__": lambda cls, config, **options: cls.from_config(config, **options)})


# PEFT's classes and functions: an adapter and its base model


class AutoPeftModelForCausalLM:
    """Load an adapter and its base language model, as PEFT's class of the same name does."""

    _base: type = AutoModelForCausalLM

    @classmethod
    @api_boundary
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | Path,
        adapter_name: str = "default",
        is_trainable: bool = False,
        **kwargs: Any,
    ) -> PreTrainedModel:
        """Load an adapter from a folder or repository onto its base model.

        `merge_and_unload()` on the result returns the plain model.

        Args:
            adapter_name: must be "default".
            is_trainable: whether the adapter's parameters have requires_grad=True. A trainer trains them either way.
            **kwargs: passed to `AutoModelForCausalLM.from_pretrained`.

        Raises:
            ValueError: no adapter was found, or adapter_name is not "default".
        """
        _check_name(adapter_name)
        model = cls._base.from_pretrained(pretrained_model_name_or_path, **kwargs)
        if not isinstance(model.backend, AdaptedBackend):
            raise ValueError(
                f"Can't find '{ADAPTER}' at '{model.name_or_path}', which holds a full model. Load it with "
                "AutoModelForCausalLM or AutoModelForSequenceClassification."
            )
        return model if is_trainable else _freeze_adapter(model)


class AutoPeftModelForSequenceClassification(AutoPeftModelForCausalLM):
    """Load an adapter and its base model with a score head, as PEFT's class of the same name does. Arguments are as in
    `AutoPeftModelForCausalLM.from_pretrained`."""

    _base = AutoModelForSequenceClassification


class _IfAdapted(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return type(instance) is PreTrainedModel and isinstance(instance.backend, AdaptedBackend)


class PeftModel(metaclass=_IfAdapted):
    """PEFT's class of the same name for scripts under `python -m trl_jax` if peft is not installed. Models with an
    adapter are instances of it."""

    @staticmethod
    @api_boundary
    def from_pretrained(
        model: PreTrainedModel,
        model_id: str | Path,
        adapter_name: str = "default",
        is_trainable: bool = False,
        **kwargs: Any,
    ) -> PreTrainedModel:
        """Load an adapter from a folder or repository onto a loaded model, which is not changed.

        Args:
            adapter_name, is_trainable: as in `AutoPeftModelForCausalLM.from_pretrained`.
            **kwargs: how to download the adapter: `revision`, `token` and the like.

        Raises:
            TypeError: `model` is not a model that trl_jax loaded.
            FileNotFoundError, ValueError: there is no such folder or adapter, or the adapter does not fit the model.
        """
        _check_name(adapter_name)
        if type(model) is not PreTrainedModel:
            raise TypeError(
                f"PeftModel.from_pretrained: model is a {type(model).__name__}. Without peft, adapters are only loaded "
                "onto models of trl_jax.AutoModelForCausalLM and its other classes. Load the adapter's folder with "
                "AutoPeftModelForCausalLM, or install peft."
            )
        arguments = checked_arguments(kwargs, None)
        if arguments.values:
            raise unknown_arguments_error(arguments.values, " when a model is loaded, not its adapter")
        folder, repository = checkpoint_folder(model_id, **arguments.fetch)
        if not (folder / ADAPTER).is_file():
            raise ValueError(f"Can't find '{ADAPTER}' at '{model_id}'.")
        lora = read_adapter_config(folder)
        if repository is not None:
            repository.fetch_adapter()
        adapted = with_adapter(model, lora, 0, folder)
        return adapted if is_trainable else _freeze_adapter(adapted)


def _freeze_adapter(model: PreTrainedModel) -> PreTrainedModel:
    model.frozen_names = frozenset(filter(model.is_trained, model.names()))
    return model


class _IfAdaptedForTask(_IfAdapted):
    def __instancecheck__(cls, instance: Any) -> bool:
        return super().__instancecheck__(instance) and instance.backend.config.task_type == cls._task


class PeftModelForCausalLM(PeftModel, metaclass=_IfAdaptedForTask):
    """`PeftModel` for adapters with task_type="CAUSAL_LM"."""

    _task = "CAUSAL_LM"


class PeftModelForSequenceClassification(PeftModel, metaclass=_IfAdaptedForTask):
    """`PeftModel` for adapters with task_type="SEQ_CLS"."""

    _task = "SEQ_CLS"


class _IfAdapterConfig(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, AdapterConfig)


class PeftConfig(metaclass=_IfAdapterConfig):
    """PEFT's class of the same name for scripts under `python -m trl_jax` if peft is not installed. All adapter configs
    are instances of it."""

    @staticmethod
    @api_boundary
    def from_pretrained(
        pretrained_model_name_or_path: str | Path,
        subfolder: str | None = None,
        *,
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | None = None,
        local_files_only: bool = False,
    ) -> AdapterConfig:
        """Read the adapter_config.json of a folder or repository, as a `LoraConfig` or the class for its type.

        Raises:
            ValueError: there is no adapter_config.json, or its type is not supported.
        """
        name, access = str(pretrained_model_name_or_path), {"token": token, "cache_dir": cache_dir}
        access |= {"revision": revision, "local_files_only": local_files_only}
        try:
            return read_adapter_config(checkpoint_folder(name, subfolder=subfolder or "", **access)[0])
        except FileNotFoundError as error:
            raise ValueError(f"Can't find '{ADAPTER}' at '{name}'. {error}") from error


@api_boundary
def get_peft_model(
    model: PreTrainedModel,
    peft_config: Any,
    adapter_name: str = "default",
    mixed: bool = False,
    autocast_adapter_dtype: bool = True,
    revision: str | None = None,
    low_cpu_mem_usage: bool = False,
) -> PreTrainedModel:
    """Put a new adapter on a loaded model, as PEFT's function of the same name does for torch models.

    The adapter's initial values are PEFT's after the same `set_seed`. Without a seed they are random, as in
    `model.generate`. Pass the result to a trainer, without `peft_config`.

    Args:
        model: what `from_pretrained` of an auto class returned. It is not changed; the result shares its arrays.
        peft_config: an adapter config of trl_jax or peft.
        adapter_name: must be "default".
        mixed: must be False.
        autocast_adapter_dtype: must be True unless the model is in float32: adapters are float32.
        revision: the base model's revision, saved in adapter_config.json.
        low_cpu_mem_usage: must be False, because True leaves the adapter without values.

    Raises:
        TypeError: `model` is not a model that trl_jax loaded, or `peft_config` is not an adapter config.
        ValueError: the model already has an adapter, the config does not fit it, or an argument is not supported.
    """
    _check_name(adapter_name)
    if type(model) is not PreTrainedModel:
        raise TypeError(
            f"get_peft_model: model is a {type(model).__module__}.{type(model).__qualname__}. trl_jax puts adapters on "
            "models that AutoModelForCausalLM and its other classes loaded; for a torch model, use "
            "peft.get_peft_model."
        )
    if isinstance(model.backend, AdaptedBackend):
        raise ValueError(
            f"get_peft_model: {model.name_or_path} has an adapter already. Train that one further, or pass "
            "model.merge_and_unload()."
        )
    float32 = model.source.dtype == "float32"
    for name, value, is_supported in (
        ("mixed", mixed, not mixed),
        ("autocast_adapter_dtype", autocast_adapter_dtype, autocast_adapter_dtype or float32),
        ("low_cpu_mem_usage", low_cpu_mem_usage, not low_cpu_mem_usage),
    ):
        if not is_supported:
            raise ValueError(f"get_peft_model: {name}={value} is not in this release of trl_jax. Leave it out.")
    config = replace(as_adapter_config(peft_config), base_model_name_or_path=model.name_or_path)
    if revision is not None:
        config = replace(config, revision=revision)
    return with_adapter(model, config, stream_of())


def _check_name(adapter_name: str) -> None:
    if adapter_name != "default":
        raise ValueError(
            f"adapter_name={adapter_name!r} is not supported by this release of trl_jax, where a model has a single "
            'adapter named "default". Leave adapter_name out.'
        )


# Checkpoints: find, check, load


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose config has been read and is supported, but whose weights have not been read yet.

    Attributes:
        repository: the Hub repository that holds the weights; None for a local folder.
        config: transformers' config object.
        head: the head that the model will have.
        dtype: "float32", "bfloat16", "float16" or "auto": the dtype that weights are rounded to and saved in.
        native: the parsed config.json; None if the model runs as a program exported from transformers.
        vocab_size, max_positions: as in PreTrainedModel. If `vocab_size` differs from the files, the model is resized
            before it gets an adapter.
        adapter, lora: folder and config of an adapter saved for this model.
        quantization: how frozen weights are quantized. The files of a quantized torch model hold its dequantized
            weights.
        generation: overrides fields of the model's generation config; names that it lacks are ignored.
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
    generation: dict[str, Any] = field(default_factory=dict)

    def with_images(self) -> Checkpoint:
        """The same checkpoint with its vision tower, which is otherwise left out.

        Raises:
            ValueError: the model has none, or images of its model type are not supported.
        """
        if "vision_config" not in self.config.to_dict():
            raise ValueError(f"{self.name}: model_type {self.config.model_type!r} has no vision tower.")
        if self.native is None:
            raise ValueError(f"{self.name}: images are not supported for model_type {self.config.model_type!r}.")
        return replace(self, native=self.native.with_images())

    @property
    def can_resize(self) -> bool:
        """Whether the token embedding of the loaded model can be resized."""
        return self.native is not None and self.adapter is None

    def load(
        self,
        seed: int | TorchGenerator,
        quantization: BitsAndBytesConfig | None = None,
        sharding_of: ShardingRule | None = None,
        *,
        as_stored: bool = False,
    ) -> PreTrainedModel:
        """Load the model. `seed` initializes the head if the checkpoint has none; `sharding_of` and `as_stored` are as
        in `checkpoint.load`, and `as_stored` only applies to native models.

        Raises:
            ValueError: quantization was requested for weights that are trained.
        """
        if self.adapter is not None:
            return self.load_adapted(self.lora, seed, self.adapter, quantization, sharding_of)
        _check_not_quantized(quantization)
        if not as_stored:  # the model may be trained
            _check_not_quantized(self.quantization)
        if self.repository is not None:
            self.repository.fetch_weights()
        if self.native is None:
            from trl_jax.exported.program import load_exported  # rarely needed, so imported on demand

            options = {"dtype": self.dtype, "seed": seed, "head": self.head, "config": self.config}
            return self._model(*load_exported(self.folder, **options))
        quantized = None if self.quantization is None else formats(self.quantization, None, self.native)
        options = {"seed": seed, "sharding_of": sharding_of, "as_stored": as_stored, "formats": quantized}
        params, backend = load_native(self.native, dtype=self.dtype, **options)
        return self._model(params, backend, self.config)

    def _model(self, params: dict[str, jax.Array], backend: Backend, config: Any) -> PreTrainedModel:
        model = PreTrainedModel(params, backend, config, self.folder, self.name)
        if model.generation_config is not None:
            names = vars(model.generation_config).keys() & self.generation.keys()
            vars(model.generation_config).update({name: self.generation[name] for name in names})
        return model

    def sharding_rule(self, plan: ShardingPlan | None) -> ShardingRule | None:
        """How `plan` shards the parameters; None means one device.

        Raises:
            ValueError: the model runs as an exported program, or the plan cannot split its attention heads.
        """
        if plan is None:
            return None
        if self.native is None:
            raise ValueError(
                f"{self.name}: model_type {self.config.model_type!r} runs as an exported program, which cannot be "
                "sharded outside of a trainer. Leave mesh_shape out."
            )
        check_heads(plan, heads_of(self.native), self.name)
        return plan.sharding_of

    def outline(
        self,
        lora: AdapterConfig | None = None,
        quantization: BitsAndBytesConfig | None = None,
        *,
        sharded: bool = False,
    ) -> PreTrainedModel:
        """The model with shapes instead of arrays, which is enough to compile it. Weights are not read or downloaded.

        Args:
            lora: config of a new adapter; None keeps the model as it is, including an adapter saved in its folder.
            sharded: whether arrays are sharded over several devices.

        Raises:
            ValueError: the model runs as an exported program, which cannot be built without its weights; also as in
                `load` and `load_adapted`.
        """
        if self.native is None:
            raise ValueError(
                f"{self.name}: model_type {self.config.model_type!r} runs as an exported program, which cannot be "
                "compiled from config.json without the weights. Plan with a native model type (llama, gpt2, bert) of "
                "the same width and number of layers."
            )
        adapter = self.lora if lora is None else lora
        if adapter is None:
            _check_not_quantized(quantization)
            shapes, backend = outline_native(self.native, dtype=self.dtype)
            return PreTrainedModel(shapes, backend, self.config, self.folder, self.name)
        options = self._frozen_options(adapter, quantization, sharded=sharded)
        shapes, backend = outline_native(self.native, dtype=self.dtype, **options)
        params, backend, frozen = outline_adapted(backend, shapes, adapter, self.adapter if lora is None else None)
        return PreTrainedModel(params, backend, self.config, self.folder, self.name, frozen)

    def _frozen_options(
        self, lora: AdapterConfig, quantization: BitsAndBytesConfig | None, *, sharded: bool
    ) -> dict[str, Any]:
        """Arguments of `load_native` for the frozen base weights under an adapter."""
        native, quantization = resized_config(self.native, self.vocab_size), quantization or self.quantization
        adapted = lora if isinstance(lora, LoraConfig) else None  # prompt tuning does not touch the weights
        quantized = None if quantization is None else formats(quantization, adapted, native)
        bits = () if sharded else halves(adapted, native)  # the sharding layout expects plain weights
        if self.vocab_size != self.native.arch.vocab_size:
            bits = set(bits).difference(tables_of_tokens(bits))
        return {"as_stored": True, "formats": quantized, "bits": bits}

    def load_adapted(
        self,
        lora: AdapterConfig,
        seed: int | TorchGenerator,
        adapter: Path | None = None,
        quantization: BitsAndBytesConfig | None = None,
        sharding_of: ShardingRule | None = None,
    ) -> PreTrainedModel:
        """The model with a new adapter, or with the one saved in the folder `adapter`. The base weights keep their
        stored dtype or are quantized.

        Raises:
            ValueError: the model runs as an exported program, or the adapter does not fit it.
        """
        if self.native is None:
            raise _no_adapters_error(self.name, self.config.model_type)
        if self.repository is not None:
            self.repository.fetch_weights()
        generator = seed if isinstance(seed, TorchGenerator) else TorchGenerator(seed)
        options = self._frozen_options(lora, quantization, sharded=sharding_of is not None)
        arrays, backend = load_native(self.native, dtype=self.dtype, seed=generator, sharding_of=sharding_of, **options)
        model = self._model(arrays, backend, self.config)
        if self.vocab_size != model.vocab_size:
            model.resize_token_embeddings(self.vocab_size)
        return with_adapter(model, lora, generator, adapter)


def find_checkpoint(name: str, *, head: HeadName = "score", dtype: Any = "auto", **kwargs: Any) -> Checkpoint:
    """Find a checkpoint locally or on the Hub; other arguments are as in `from_pretrained`."""
    if head == "score":
        check_labels(kwargs.pop("num_labels", 1))
    fetch, dtype, values = checked_arguments(kwargs, dtype)
    folder, repository = checkpoint_folder(name, **fetch)
    if (folder / ADAPTER).is_file() and not (folder / "config.json").is_file():
        return _find_adapted(folder, repository, head, dtype, fetch, values)
    raw, path = read_config(folder), folder / "config.json"
    exported = is_exported(raw, families(), path, head)
    if exported and (unknown := values.keys() - IGNORED_IF_UNKNOWN):
        raise unknown_arguments_error(
            unknown, " for other models; this one runs as an exported program, which has fixed values"
        )
    raw = with_values(raw, values, path, head)
    if exported:
        config = transformers_config(raw, path, head)
        size = config.get_text_config().vocab_size
        return Checkpoint(name, folder, repository, config, head, dtype, None, size, max_positions(config, head))
    native = native_config(raw, path, head)
    config, arch = transformers_config(raw, path, head), native.arch
    return Checkpoint(name, folder, repository, config, head, dtype, native, arch.vocab_size, arch.max_positions)


def _check_not_quantized(quantization: BitsAndBytesConfig | None) -> None:
    """Raise ValueError if trained weights would be quantized."""
    if quantization is not None:
        raise ValueError(
            "quantization_config requires an adapter because quantized weights cannot be trained. Also pass "
            "peft_config=LoraConfig(...), or leave quantization_config out."
        )


def _no_adapters_error(name: str, model_type: str) -> ValueError:
    return ValueError(
        f"{name}: models of type {model_type!r} run as exported programs, which do not support adapters in this "
        "release of trl_jax. Train the whole model, or use a native model type (llama, qwen2, bert)."
    )


def with_adapter(
    model: PreTrainedModel, lora: AdapterConfig, seed: int | TorchGenerator, adapter: Path | None = None
) -> PreTrainedModel:
    """A new model with a trainable adapter, either new or loaded from a folder. It shares the arrays of `model`, which
    is not changed."""
    if not isinstance(model.backend, NativeBackend):
        raise _no_adapters_error(model.name_or_path, model.config.model_type)
    lora = replace(lora, base_model_name_or_path=lora.base_model_name_or_path or model.name_or_path)
    params, backend, frozen = adapt(model.backend, model.arrays, lora, seed, adapter)
    adapted = PreTrainedModel(params, backend, model.config, model.folder, model.name_or_path, frozen)
    adapted.generation_config = model.generation_config
    adapted.accepts_loss_kwargs = model.accepts_loss_kwargs
    return adapted


def rows_on_disk(name: str, config: Any) -> int | None:
    """Vocabulary size in the local config.json of the named checkpoint; None if there is no such file.

    Args:
        config: transformers' config object of the checkpoint, which names the commit.
    """
    try:
        commit = vars(config).get("_commit_hash")  # missing if the config came from a folder
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
    """Find the base model of the adapter in a folder; `values` override values of the base model's config."""
    lora = read_adapter_config(folder)
    if repository is not None:
        repository.fetch_adapter()
    base, access = lora.base_model_name_or_path, ("token", "cache_dir", "local_files_only")
    options = {key: fetch[key] for key in access if key in fetch}
    options |= {"revision": lora.revision} if lora.revision else {}
    if not base:
        raise ValueError(f"{folder / ADAPTER} has no base_model_name_or_path. Set it to the name of the base model.")
    try:
        checkpoint = find_checkpoint(base, head=head, dtype=dtype, **options, **values)
    except (FileNotFoundError, ValueError) as error:
        raise ValueError(f"{folder / ADAPTER} is for base_model_name_or_path={base!r}. {error}") from error
    tokens = None if checkpoint.native is None else tokens_of(folder, checkpoint.native)
    positions = positions_left(checkpoint.max_positions, lora)
    vocab_size = tokens or checkpoint.vocab_size
    return replace(checkpoint, adapter=folder, lora=lora, vocab_size=vocab_size, max_positions=positions)


# New models from a config


def new_model(config: Any, head: HeadName, seed: int, dtype: Any = None, *, images: bool = False) -> PreTrainedModel:
    """Build a model with new weights from a transformers config object or a dict like config.json.

    Matrices and embeddings are drawn from a normal distribution with the config's `initializer_range`; norms start as
    the identity, biases at zero.

    Raises:
        ValueError: the model_type, a key or a value is not supported; the message names it.
    """
    raw = dict(config) if isinstance(config, dict) else json.loads(config.to_json_string(use_diff=False))
    path = Path("config.json")
    native = native_config(raw, path, head)
    native = native.with_images() if images else native
    params = _drawn(native, TorchGenerator(seed))
    dtype = checked_dtype(dtype or raw.get("dtype") or "float32")
    source = Source(native, {}, {}, dtype, make_tensor_map(params, native.names), {})
    config = transformers_config(raw, path, head)
    return PreTrainedModel(params, NativeBackend(source), config, path.parent, raw["model_type"])


def _drawn(config: NativeConfig, generator: TorchGenerator) -> dict[str, jax.Array]:
    params, arch = {}, config.arch
    for path, leaf in nnx.to_flat_state(nnx.split(nnx.eval_shape(config.model))[1]):
        name, axes = ".".join(map(str, path)), leaf.get_metadata()["axes"]
        if path[-1] == "A_log":  # of a gated delta net
            values = np.log(generator.uniform(leaf.size, 7.995) + np.float32(8.005))  # log of U(0.01, 16)
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
    """Whether the norm that owns this parameter scales by 1 + weight."""
    if path[-2] == "out_norm":  # of a gated delta net
        return False
    if path[0] == "vision":
        kinds = arch.vision.layers.norm, arch.vision.connector.norm
        return (kinds[path[1] == "connector"] or "").endswith("_one_plus")
    kind = arch.qk_norm_kind if path[-2] in ("q_norm", "k_norm") else arch.norm
    return kind.endswith("_one_plus")


# Sharding of models loaded outside of a trainer


def sharding_plan(mesh_shape: str | Mapping[str, int] | None) -> ShardingPlan | None:
    """The sharding plan for a mesh such as "data:2,fsdp:4" over all devices; None without a mesh.

    Raises:
        ValueError: the sizes do not match the number of devices, or the mesh has a sequence axis.
    """
    requested = parse_mesh_shape(mesh_shape)
    if requested is None:
        return None
    devices = jax.devices()
    sizes = mesh_axis_sizes(requested, len(devices), len({device.process_index for device in devices}))
    if sizes.get(SEQUENCE, 1) > 1:
        raise ValueError(
            f"mesh_shape must not have a sequence axis outside of training, because it splits the texts of a step, "
            f"got {mesh_shape!r}. Use data or fsdp for these devices."
        )
    return ShardingPlan(make_mesh(sizes))


def check_heads(plan: ShardingPlan, heads: Mapping[str, int] | None, name: str) -> None:
    """Raise ValueError if the tensor axis does not divide the model's attention heads; `heads` is None for an exported
    program."""
    size = plan.size(TENSOR)
    if size == 1:
        return
    if heads is None:
        raise ValueError(
            f"mesh: tensor={size} requires a native model, but {name} runs as an exported program. Use fsdp instead."
        )
    odd = {kind: count for kind, count in heads.items() if count % size}
    if odd:
        counts = " and ".join(f"{count} {kind}" for kind, count in odd.items())
        raise ValueError(
            f"mesh: tensor={size} does not divide the {counts} of {name}. Choose a divisor, and use fsdp for the "
            "rest of the devices."
        )
