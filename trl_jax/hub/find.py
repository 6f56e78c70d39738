"""Finds a checkpoint by name or folder, checks its config, and loads it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trl_jax.core.torch_random import TorchGenerator
from trl_jax.hub.checkpoint.resizing import resized_config, tables_of_tokens
from trl_jax.hub.checkpoint.sharded_reading import Placement
from trl_jax.hub.config.native import PASSED_OVER, NativeConfig, native_config, transformers_config, with_values
from trl_jax.hub.config.reader import read_config
from trl_jax.hub.exported.model_types import is_exported
from trl_jax.hub.exported.positions import max_positions
from trl_jax.hub.families import families
from trl_jax.hub.heads import HeadName, check_labels
from trl_jax.hub.load_arguments import checked_arguments, not_taken
from trl_jax.hub.native_backend import NativeBackend, heads_of, load_native, outline_native
from trl_jax.hub.network.fetch import ADAPTER, Repository, checkpoint_folder
from trl_jax.hub.peft.adapted import adapt, outline_adapted
from trl_jax.hub.peft.adapter_tensors import tokens_of
from trl_jax.hub.peft.configs import AdapterConfig, positions_beside, read_adapter_config
from trl_jax.hub.peft.lora_config import LoraConfig
from trl_jax.hub.peft.quantization import BitsAndBytesConfig, formats, halves
from trl_jax.hub.placing import check_heads
from trl_jax.hub.pretrained import PreTrainedModel
from trl_jax.mesh.sharding import ShardingPlan


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
            from trl_jax.hub.exported.backend import load_exported  # a package of its own, that few models need

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
