"""A loaded reward model as scripts know it: call it, read its config, save it."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from trl_jax.core.torch_random import TorchGenerator
from trl_jax.data.layout import padded_length, scored_token
from trl_jax.hub.adapted import AdaptedEngine, adapt, merged
from trl_jax.hub.config import read_config
from trl_jax.hub.engines import Engine, NativeEngine, load_exported, load_native
from trl_jax.hub.facade import Habits
from trl_jax.hub.families import families, read_arch
from trl_jax.hub.fetch import ADAPTER, Repository, checkpoint_folder
from trl_jax.hub.loading import Source, outline
from trl_jax.hub.long_tail import is_exported
from trl_jax.hub.lora_config import LoraConfig, read_lora_config
from trl_jax.hub.parts import Place
from trl_jax.hub.quantizing import BitsAndBytesConfig, formats
from trl_jax.hub.resizing import resized_table, table_of_tokens
from trl_jax.hub.torch_bridge import most_tokens
from trl_jax.models.functional import merge

logger = logging.getLogger(__name__)

_DTYPES = ("float32", "bfloat16", "float16", "auto")
_PLACEMENT = ("device_map", "low_cpu_mem_usage", "max_memory", "offload_folder")
_ATTENTION = (None, "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")
_FETCH = ("revision", "subfolder", "token", "cache_dir", "local_files_only", "gguf_file")


class ScoreOutput(NamedTuple):
    """What calling the model returns: `logits`, float32 `[rows, 1]`, by attribute, name or place."""

    logits: jax.Array

    def __getitem__(self, key: str | int) -> jax.Array:
        return self.logits if key == "logits" else tuple.__getitem__(self, key)


class PreTrainedModel(Habits):
    """A sequence classifier with one label. `params` is the flat dict of the arrays that train, float32, by dotted
    path; `frozen` those that do not: none, but beside an adapter.

    `config` is the transformers config object of the checkpoint; changing it changes what is saved only where
    `save_pretrained` says so. `engine` is what computes it.
    """

    def __init__(
        self,
        params: dict[str, jax.Array],
        engine: Engine,
        config: Any,
        folder: Path,
        name: str,
        frozen: dict[str, Any] | None = None,
    ):
        self.params, self.engine, self.config = params, engine, config
        self.frozen = {} if frozen is None else frozen
        self.folder, self.name_or_path = folder, name
        self.graph = engine.graph
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
        if not self.engine.ignores_types and token_type_ids is not None and np.any(token_type_ids):
            raise ValueError("token_type_ids has other types than 0, but a reward model scores one text. Leave it out.")
        mask = np.ones(tokens.shape, bool) if attention_mask is None else np.asarray(attention_mask).astype(bool)
        pad = self.config.get_text_config().pad_token_id
        at = [scored_token(row, pad) if pad is not None else len(row) - 1 for row in tokens]
        alone = pad is None and self.engine.finds_end
        extra = 0 if alone else padded_length(tokens.shape[1], "auto") - tokens.shape[1]
        tokens = np.pad(tokens, ((0, 0), (0, extra)), constant_values=pad or 0).astype(np.int32)
        mask = np.pad(mask, ((0, 0), (0, extra)))
        with jax.default_matmul_precision("float32"):  # accelerators would round to fewer digits
            scores = _scores(self.graph, pad, self.arrays, tokens, mask, np.asarray(at, np.int32))
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
        most = self.most_tokens
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
        return self.engine.vocab_size

    @property
    def grows(self) -> bool:
        return self.engine.grows

    @property
    def source(self) -> Source:
        """What a checkpoint of the native engine was."""
        return self.engine.source

    @property
    def most_tokens(self) -> int | None:
        """The length of the longest text that has positions; None where any has."""
        return self.engine.most_tokens

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """How many numbers the model has, the head among them, or how many of them train."""
        return sum(
            self.engine.size_of(path, array)
            for path, array in (self.params if only_trainable else self.arrays).items()
            if not (exclude_embeddings and path in self.engine.embeddings)
        )

    def resize_token_embeddings(self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None) -> Any:
        """Give the table of tokens `new_num_tokens` rows, rounded up to a multiple; new ones are the mean of the old.

        Returns what `get_input_embeddings` does.
        """
        rows = padded_length(self.vocab_size if new_num_tokens is None else new_num_tokens, pad_to_multiple_of)
        if rows != self.vocab_size:
            self.engine = self.engine.resized(rows)
            self.graph, path = self.engine.graph, table_of_tokens(self.params)
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
        if not isinstance(self.engine, AdaptedEngine):
            return self
        arrays = merged(self.engine, self.params, self.frozen)
        engine = NativeEngine(self.engine.base.source)
        return PreTrainedModel(arrays, engine, self.config, self.folder, self.name_or_path)

    def save_pretrained(self, save_directory: str | Path) -> None:
        """Write config.json and safetensors that transformers loads: names, shards and dtypes of the checkpoint it
        came from, `pad_token_id` and `eos_token_id` of `config`."""
        self.engine.save(Path(save_directory), self.readable, self.config, writes=self.writes)

    @property
    def readable(self) -> dict[str, Any]:
        """The parameters, as files are made of them."""
        return self.params if self.read is None else {path: self.read(array) for path, array in self.params.items()}


@partial(jax.jit, static_argnums=(0, 1))
def _scores(
    graph: nnx.GraphDef, pad: int | None, params: dict, tokens: jax.Array, mask: jax.Array, at: jax.Array
) -> jax.Array:
    """`pad` is what an exported program was made with: another one is another program."""
    del pad
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    return merge(graph, params)(tokens, positions, at=at, valid=mask)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose config has been read and found computable, its weights not yet.

    `repository` is the one on the Hub that still has them, None for a folder. `config` is
    transformers' object. `dtype` is "float32", "bfloat16", "float16" or "auto": what the weights are rounded to, and
    saved in. `most_tokens` is as in PreTrainedModel. `exported`: the model is transformers' own, run as an exported
    program. `adapter` is the folder of an adapter on it, `lora` that one's config.
    """

    name: str
    folder: Path
    repository: Repository | None
    config: Any
    dtype: str
    vocab_size: int
    most_tokens: int | None
    exported: bool
    adapter: Path | None = None
    lora: LoraConfig | None = None

    @property
    def grows(self) -> bool:
        """Whether what is loaded can embed more tokens."""
        return not self.exported and self.adapter is None

    def load(
        self, seed: int, quantization: BitsAndBytesConfig | None = None, place: Place | None = None
    ) -> PreTrainedModel:
        """The model; `seed` draws the score head where the checkpoint has none; `place` as in `loading.load`.

        Raises:
            ValueError: weights that train whole are to be quantised.
        """
        if self.adapter is not None:
            return self.load_adapted(self.lora, seed, self.adapter, quantization, place)
        if quantization is not None:
            raise ValueError(
                "quantization_config is given, but no adapter: quantised weights do not train. Pass peft_config="
                "LoraConfig(...) beside it, or leave it out."
            )
        if self.repository is not None:
            self.repository.fetch_weights()
        config = self.config
        if self.exported:
            params, engine, config = load_exported(self.folder, dtype=self.dtype, seed=seed)
        else:
            params, engine = load_native(self.folder, dtype=self.dtype, seed=seed, place=place)
        return PreTrainedModel(params, engine, config, self.folder, self.name)

    def outline(self) -> PreTrainedModel:
        """The model with shapes in the place of its arrays: enough to compile with. Weights are neither read nor
        fetched.

        Raises:
            ValueError: the model runs as an exported program, which is made from its weights, or is an adapter.
        """
        if self.exported:
            raise ValueError(
                f"{self.name}: model_type {self.config.model_type!r} runs as an exported program, which is made from "
                "the weights: there is none to compile from config.json alone. Models of our own engine have one."
            )
        if self.adapter is not None:
            raise ValueError(
                f"{self.name} is an adapter: a run with one is not planned. Plan for its base,"
                f" {self.folder}, which needs more."
            )
        shapes, source = outline(self.folder, dtype=self.dtype)
        return PreTrainedModel(shapes, NativeEngine(source), self.config, self.folder, self.name)

    def load_adapted(
        self,
        config: LoraConfig,
        seed: int,
        adapter: Path | None = None,
        quantization: BitsAndBytesConfig | None = None,
        place: Place | None = None,
    ) -> PreTrainedModel:
        """The model with a new adapter, or with the one in a folder; its own weights have the dtype they are stored in,
        or are quantised.

        Raises:
            ValueError: the model is an exported program, or the adapter does not go with it.
        """
        if self.exported:
            raise no_adapters(self.name, self.config.model_type)
        if self.repository is not None:
            self.repository.fetch_weights()
        generator = TorchGenerator(seed)
        family, arch = read_arch(read_config(self.folder), self.folder / "config.json")
        held = None if quantization is None else formats(quantization, config, family, arch)
        arrays, engine = load_native(
            self.folder, dtype=self.dtype, seed=generator, as_stored=True, formats=held, place=place
        )
        model = PreTrainedModel(arrays, engine, self.config, self.folder, self.name)
        return with_adapter(model, config, generator, adapter)


def find_checkpoint(name: str, *, num_labels: int = 1, dtype: Any = "auto", **kwargs: Any) -> Checkpoint:
    """Where a checkpoint is, its weights still on the Hub if need be; arguments as in `from_pretrained`."""
    if num_labels != 1:
        raise ValueError(f"num_labels is {num_labels}, but a reward model has one score a sequence: num_labels=1.")
    fetch, dtype = _checked(dict(kwargs), dtype)
    folder, repository = checkpoint_folder(name, **fetch)
    if (folder / ADAPTER).is_file() and not (folder / "config.json").is_file():
        return _find_adapted(folder, repository, dtype, fetch)
    raw = read_config(folder)
    if is_exported(raw, families(), folder / "config.json"):
        config = _config(folder)
        size = config.get_text_config().vocab_size
        return Checkpoint(name, folder, repository, config, dtype, size, most_tokens(config), True)
    _, arch = read_arch(raw, folder / "config.json")
    return Checkpoint(name, folder, repository, _config(folder), dtype, arch.vocab_size, arch.most_tokens, False)


def no_adapters(name: str, model_type: str) -> ValueError:
    return ValueError(
        f"{name}: models of type {model_type!r} run as exported programs, which take no adapter in this release of "
        "trl_jax. Train the whole model, or an adapter of a native type: llama, qwen2, bert."
    )


def with_adapter(
    model: PreTrainedModel, config: LoraConfig, seed: int | TorchGenerator, adapter: Path | None = None
) -> PreTrainedModel:
    """A model of its own beside which an adapter trains; it shares the arrays of `model`, which stays as it is."""
    if not isinstance(model.engine, NativeEngine):
        raise no_adapters(model.name_or_path, model.config.model_type)
    base = config.base_model_name_or_path or model.name_or_path
    config = replace(config, base_model_name_or_path=base)
    params, engine, frozen = adapt(model.engine, model.arrays, config, seed, adapter)
    return PreTrainedModel(params, engine, model.config, model.folder, model.name_or_path, frozen)


def _find_adapted(folder: Path, repository: Repository | None, dtype: str, fetch: dict[str, Any]) -> Checkpoint:
    """An adapter's folder: the checkpoint is that of its base model."""
    lora = read_lora_config(folder)
    if repository is not None:
        repository.fetch_adapter()
    base, access = lora.base_model_name_or_path, ("token", "cache_dir", "local_files_only")
    given = {key: fetch[key] for key in access if key in fetch} | ({"revision": lora.revision} if lora.revision else {})
    if not base:
        raise ValueError(f"{folder / ADAPTER} names no base_model_name_or_path: write there which model it is for.")
    try:
        checkpoint = find_checkpoint(base, dtype=dtype, **given)
    except (FileNotFoundError, ValueError) as error:
        raise ValueError(f"{folder / ADAPTER} is for base_model_name_or_path={base!r}. {error}") from error
    return replace(checkpoint, adapter=folder, lora=lora)


class AutoModelForSequenceClassification:
    """Loads a reward model by name or folder, as transformers' class of that name does."""

    @staticmethod
    def from_pretrained(
        pretrained_model_name_or_path: str | Path, *, num_labels: int = 1, dtype: Any = "auto", seed: int = 42, **kwargs
    ) -> PreTrainedModel:
        """Load a checkpoint of a supported model_type: classifier, causal LM (its head is dropped) or bare base.

        Args:
            pretrained_model_name_or_path: a folder, a repository on the Hub, or a GGUF file.
            num_labels: 1; a reward model has one score a sequence.
            dtype: "float32", "bfloat16", "float16" or "auto" (as stored): what the weights are rounded to, and saved
                in. Arrays and computation are float32.
            seed: draws the score head where the checkpoint has none.
            kwargs: revision, subfolder, token, cache_dir, local_files_only, gguf_file as in transformers;
                attn_implementation is accepted (kernels are chosen by the backend); trust_remote_code fetches `*.py`
                for the tokenizer, model code is never run; device_map and its like are warned of.

        Raises:
            ValueError, TypeError: an argument or a checkpoint at fault, by name.
        """
        name = str(pretrained_model_name_or_path)
        return find_checkpoint(name, num_labels=num_labels, dtype=dtype, **kwargs).load(seed)


def _checked(kwargs: dict[str, Any], dtype: Any) -> tuple[dict[str, Any], str]:
    """The arguments that say where to fetch from, and the dtype's name; every other one is judged by name."""
    dtype = kwargs.pop("torch_dtype", dtype)
    dtype = str(dtype).removeprefix("torch.") if dtype is not None else "auto"
    if dtype not in _DTYPES:
        raise ValueError(f"dtype is {dtype!r}, wanted one of {', '.join(_DTYPES)}.")
    attention = kwargs.pop("attn_implementation", None)
    if attention not in _ATTENTION:
        raise ValueError(f"attn_implementation is {attention!r}, wanted one of {', '.join(map(str, _ATTENTION))}.")
    for key in _PLACEMENT:
        if kwargs.pop(key, None) is not None:
            logger.warning("%s has no effect in trl_jax: arrays go to JAX's default device.", key)
    code = bool(kwargs.pop("trust_remote_code", False))
    if code:
        logger.warning("trust_remote_code has no effect on models: trl_jax never runs a repository's code.")
    fetch = {key: kwargs.pop(key) for key in _FETCH if key in kwargs}
    if kwargs:
        raise TypeError(
            f"from_pretrained (model_init_kwargs) does not take {', '.join(sorted(kwargs))}. It takes num_labels, "
            f"dtype, attn_implementation, {', '.join(_FETCH)}."
        )
    given = {key: value for key, value in fetch.items() if value is not None}
    return given | {"code": code}, dtype


def _config(folder: Path) -> Any:
    """transformers' config object: what tokenizers, trackers and scripts ask `model.config` for."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, num_labels=1)
    except Exception as error:  # its classes check their keys with errors of many types, none of which names the file
        raise ValueError(f"{folder / 'config.json'}: transformers refuses it: {error}. Correct that key.") from error
    config.use_cache = False
    return config
