"""PreTrainedModel: a loaded model with the methods of a transformers model.

A model is its arrays (`params`, and under an adapter `frozen`) and a `Backend`, which computes with them, saves them
and knows their names in PyTorch.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import re
import sys
import tempfile
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from trl_jax.core.files import write_whole
from trl_jax.core.outputs import reads_of_rows
from trl_jax.core.secrets import masked
from trl_jax.core.text import brief
from trl_jax.data.batch import IGNORED, last_real_token, padded_length
from trl_jax.hub.backend import Backend, frozen_size, trainable_masks
from trl_jax.hub.checkpoint import Source, resized_table, tables_of_tokens
from trl_jax.hub.generate import GenerationApi
from trl_jax.hub.modules import QUANTIZED, torch_order
from trl_jax.hub.parameters import (
    EmbeddingModule,
    ModuleApi,
    Parameter,
    Submodule,
    Weights,
    for_scripts,
    of_weights,
    owners,
)
from trl_jax.hub.peft import merged
from trl_jax.hub.peft_backend import AdaptedBackend
from trl_jax.hub.peft_config import AdapterConfig, LoraConfig, already_initialized
from trl_jax.hub.push import Publisher, Upload
from trl_jax.hub.torch_bridge import as_array, as_tensors, given_dtype, is_tensor, is_torch, torch_modules
from trl_jax.mesh.mesh import like
from trl_jax.models.model import merge

logger = logging.getLogger(__name__)

# Log-probabilities and entropies of tokens


def token_logps_and_entropies(
    model: PreTrainedModel,
    input_ids: Any,
    attention_mask: Any = None,
    temperature: float = 1.0,
    *,
    params: dict[str, jax.Array] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Compute log p(token | previous tokens) and the entropy of each predictive distribution, both in nats.

    The `[rows, T, vocabulary]` logits are never materialized. Both outputs are differentiable with respect to `params`,
    so you can write your own loss with `trl_jax.losses.policy_gradient` and `jax.grad`.

    Args:
        model: a causal language model.
        input_ids: int `[rows, T]`, padded on the right.
        attention_mask: `[rows, T]`, 0 for padding; None means no padding.
        temperature: divides the logits.
        params: used instead of `model.params`, with the same names and shapes.

    Returns:
        Two float32 arrays `[rows, T - 1]`, for all tokens except the first; zero for padding.

    Raises:
        ValueError: the model has no language model head, or rows have fewer than two tokens.
    """
    model = model.active
    if model.backend.head != "lm":
        raise ValueError(f"{model.name_or_path} has a {model.backend.head!r} head, but a language model is required.")
    ids = jnp.asarray(input_ids, jnp.int32)
    if ids.ndim != 2 or ids.shape[1] < 2:
        raise ValueError(f"input_ids must be [rows, T] with at least two tokens per row, got {list(ids.shape)}.")
    rows, length = ids.shape
    mask = jnp.ones(ids.shape, bool) if attention_mask is None else jnp.asarray(attention_mask).astype(bool)
    virtual = model.backend.virtual
    before = virtual.count
    whole = jnp.hstack([jnp.broadcast_to(virtual.ids, (rows, before)), ids])
    places = jnp.broadcast_to(jnp.arange(before + length, dtype=jnp.int32), whole.shape)
    real = (mask[:, :-1] & mask[:, 1:]).reshape(-1)
    order = jnp.argsort(~real, stable=True)  # positions without a target come last
    at = jnp.arange(rows)[:, None] * (before + length) + before + jnp.arange(length - 1)
    reads = at.reshape(-1)[order].astype(jnp.int32)
    targets = jnp.where(real, ids[:, 1:].reshape(-1), -1)[order]
    arrays = model.frozen | (model.params if params is None else params)
    lengths = before + mask.sum(axis=1, dtype=jnp.int32)
    options = {"targets": targets, "lengths": lengths, "temperature": temperature}
    outputs = merge(model.graph, arrays)(whole, places, reads, **options)
    back = jnp.argsort(order)
    return tuple(values[back].reshape(rows, length - 1) for values in (outputs.logps, outputs.entropy))


# generation_config.json


NAME = "generation_config.json"


def read_generation_config(folder: Path, config: Any) -> Any:
    """transformers' GenerationConfig from a folder, or one derived from `config` if there is none or it is invalid."""
    from transformers import GenerationConfig

    if (folder / NAME).is_file():
        try:
            return GenerationConfig.from_pretrained(folder)
        except (OSError, ValueError, TypeError) as error:
            logger.warning("%s cannot be read; using a config derived from config.json: %s", folder / NAME, error)
    return GenerationConfig.from_model_config(config)


def write_generation_config(config: Any, folder: Path) -> None:
    """Write the config unchecked: contradictory values are part of the checkpoint."""
    write_whole(folder / NAME, config.to_json_string(use_diff=True))


# Calling a model


class _Output:
    """The methods that all outputs of transformers have. Subclasses are also tuples."""

    loss, hidden_states, attentions = None, None, None

    def __getitem__(self, key: str | int) -> jax.Array:
        return self._asdict()[key] if isinstance(key, str) else tuple.__getitem__(self, key)

    def __contains__(self, key: object) -> bool:
        return key in self._fields

    def keys(self) -> Collection[str]:
        return self._asdict().keys()

    def items(self) -> Collection[tuple[str, jax.Array]]:
        return self._asdict().items()

    def get(self, key: str, default: Any = None) -> Any:
        return self._asdict().get(key, default)

    def to_tuple(self) -> tuple[jax.Array, ...]:
        return tuple(self)


class _Scores(NamedTuple):
    logits: jax.Array


class ScoreOutput(_Output, _Scores):
    """The output of a model call: `logits`, float32, available as attribute, key or first element.

    `[rows, 1]` for a score head, `[rows, T, V]` for a language model. T includes virtual tokens that have embeddings,
    as in PEFT.
    """


class _Losses(NamedTuple):
    loss: jax.Array
    logits: jax.Array


class LossOutput(_Output, _Losses):
    """The output of a language model that is called with `labels`: `loss`, then `logits` as in `ScoreOutput`."""

    loss = _Losses.loss


def _with_loss(logits: jax.Array, labels: Any) -> LossOutput:
    """The mean loss of the tokens whose label is not -100."""
    labels = np.asarray(labels)
    if logits.shape[-1] == 1 or labels.shape[0] != logits.shape[0] or labels.shape[1] > logits.shape[1]:
        raise ValueError(
            f"labels must be the ids that a language model predicts, as input_ids, got {list(labels.shape)} for logits "
            f"{list(logits.shape)}."
        )
    virtual = logits.shape[1] - labels.shape[1]
    targets = np.pad(labels, ((0, 0), (virtual, 0)), constant_values=IGNORED)[:, 1:]
    log_probs = jax.nn.log_softmax(logits[:, :-1])
    of_targets = jnp.take_along_axis(log_probs, np.maximum(targets, 0)[..., None], axis=-1)[..., 0]
    counts = targets != IGNORED
    return LossOutput(-jnp.sum(of_targets * counts) / counts.sum(), logits)


# Arguments of transformers' models that are accepted with these values.
_CALL_OPTIONS = dict.fromkeys(("return_dict", "use_cache"), (None, False, True)) | dict.fromkeys(
    ("output_hidden_states", "output_attentions", "output_router_logits", "past_key_values", "cache", "inputs_embeds"),
    (None, False),
)


def _rounded(arrays: dict[str, Any], dtype: str) -> dict[str, Any]:
    """The arrays with float32 ones rounded to a dtype, and raw bits as they are."""
    if dtype == "float32":
        return arrays
    return {
        path: array.astype(dtype).astype(jnp.float32) if array.dtype == jnp.float32 else array
        for path, array in arrays.items()
    }


def _is_without_effect(name: str, value: Any) -> bool:
    if name == "position_ids" and value is not None:
        positions = np.asarray(value)
        return bool((positions == np.arange(positions.shape[-1])).all())
    return value is None or isinstance(value, bool) and value in _CALL_OPTIONS.get(name, ())


def _call_error(model: str, others: dict[str, Any]) -> TypeError:
    unknown = sorted(name for name, value in others.items() if not _is_without_effect(name, value))
    return TypeError(
        f"{model}(...) computes logits from input_ids and attention_mask{', not from ' if unknown else ''}"
        f"{' and '.join(unknown)}. For hidden states, attentions or embeddings as inputs, save it with save_pretrained "
        "and load it with transformers."
    )


def score_rows(
    backend: Backend, arrays: dict[str, Any], pad: int | None, input_ids: Any, attention_mask: Any, token_type_ids: Any
) -> ScoreOutput:
    """Scores or logits of rows; `pad` is the config's pad_token_id, the rest is as in `PreTrainedModel.__call__`."""
    tokens = np.asarray(input_ids)
    _check(backend, pad, tokens)
    if not backend.traits.ignores_types and token_type_ids is not None and np.any(token_type_ids):
        raise ValueError("token_type_ids must be all 0 because single texts are scored. Leave it out.")
    mask = np.ones(tokens.shape, bool) if attention_mask is None else np.asarray(attention_mask).astype(bool)
    at = [last_real_token(row, pad) if pad is not None else len(row) - 1 for row in tokens]
    as_is = pad is None and backend.traits.infers_lengths
    extra = 0 if as_is else padded_length(tokens.shape[1], "auto") - tokens.shape[1]
    tokens = np.pad(tokens, ((0, 0), (0, extra)), constant_values=pad or 0).astype(np.int32)
    tokens = backend.virtual.before(tokens)
    mask = np.pad(np.pad(mask, ((0, 0), (0, extra))), ((0, 0), (backend.virtual.count, 0)), constant_values=True)
    with jax.default_matmul_precision("float32"):  # accelerators use lower precision by default
        reads = None if backend.head == "lm" else reads_of_rows(np.asarray(at, np.int32), tokens.shape[1])
        # Length-dependent ropes use the row length as passed, as in transformers.
        by_row = reads is None and not backend.traits.infers_lengths
        lengths = np.asarray([tokens.shape[1] - extra], np.int32) if by_row else None
        outputs = compiled_scores(backend.graph, pad, arrays, tokens, mask, reads, lengths)
    if backend.head == "score":
        return ScoreOutput(outputs[:, None])
    first = 0 if backend.virtual.read else backend.virtual.count
    return ScoreOutput(outputs.reshape(*tokens.shape, backend.traits.vocab_size)[:, first : tokens.shape[1] - extra])


def _check(backend: Backend, pad: int | None, tokens: np.ndarray) -> None:
    if tokens.ndim != 2 or tokens.dtype.kind not in "iu":
        raise ValueError(f"input_ids must be integers [rows, T], got {tokens.dtype} {list(tokens.shape)}.")
    if not tokens.shape[1]:
        raise ValueError(f"input_ids is {list(tokens.shape)}, but each row needs at least one token.")
    if len(tokens) > 1 and pad is None and backend.head == "score":
        raise ValueError(
            f"Cannot score {len(tokens)} rows without config.pad_token_id, which marks the end of each row. "
            "Set model.config.get_text_config().pad_token_id = tokenizer.pad_token_id."
        )
    longest, size = backend.traits.max_positions, backend.traits.vocab_size
    if longest is not None and tokens.shape[1] > longest:
        raise ValueError(
            f"input_ids has {tokens.shape[1]:,} tokens per row, but the model supports {longest:,}. Truncate them."
        )
    if tokens.size and not 0 <= tokens.min() <= tokens.max() < size:
        raise ValueError(f"input_ids must be between 0 and {size - 1}, got ids from {tokens.min()} to {tokens.max()}.")


@partial(jax.jit, static_argnums=(0, 1))
def compiled_scores(
    graph: nnx.GraphDef,
    pad: int | None,
    params: dict,
    tokens: jax.Array,
    mask: jax.Array,
    reads: jax.Array | None,
    lengths: jax.Array | None = None,
) -> jax.Array:
    """Scores `[N]` or logits `[N, V]` at `reads` `[N]` of rows `[R, T]`, or at all positions if `reads` is None.

    `pad` is static because an exported program depends on it. `lengths` is as in `Decoder.__call__`.
    """
    del pad
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    options = {} if lengths is None else {"lengths": lengths}
    return merge(graph, params)(tokens, positions, reads, valid=mask, **options)


# Methods of a transformers model that scripts use


_OUTPUT_EMBEDDINGS = re.compile(r"(?P<module>(^|.*\.)(lm_head|embed_out))\.(?!.*lora_).*weight$")


_NO_MODULES: tuple[tuple[Any, bool], dict[str, Any]] = (None, False), {}


class LoadedKeys(NamedTuple):
    """The result of `load_state_dict`, as in torch."""

    missing_keys: list[str]
    unexpected_keys: list[str]


class TransformersModelApi(ModuleApi):
    """What scripts do with a transformers model without computing: parameters and modules by name, state dicts, dtypes,
    and settings. `PreTrainedModel` adds what computes, saves, or depends on an adapter."""

    weights: Weights
    config: Any
    params, frozen, backend, frozen_names, read, at_gradients = map(
        of_weights, ("params", "frozen", "backend", "frozen_names", "read", "at_gradients")
    )
    model_tags: list[str] | None = None
    was_merged: bool = False  # by `merge_and_unload`, after which PEFT leaves all parameters frozen
    accepts_loss_kwargs: bool | None = None  # read by transformers' Trainer; None: as for the model type
    _parameters_by_name: dict[str, Parameter]
    _submodules: weakref.WeakValueDictionary[str, Submodule]
    # (the backend, whether torch was imported) when the modules were listed, and the modules by name.
    _known_modules: tuple[tuple[Any, bool], dict[str, Any]] = _NO_MODULES
    _module = ""
    _base: Any = None  # the model without its adapter, in `disable_adapter`

    def _named(self, names: Collection[str] | None = None) -> Iterator[tuple[str, Parameter]]:
        """Yield parameters and buffers: all, or those in `names`. There is one object for each."""
        for name, _ in self.weights.read_values(names, keep=True) if names is None or names else ():
            yield name, self._parameters_by_name.setdefault(name, Parameter(self.weights, name))

    def _set_weights(self, weights: Weights) -> None:
        """Set the weights of a new model, of which no parameters or modules exist yet."""
        self.weights, self._base = weights, None
        self._parameters_by_name, self._submodules = {}, weakref.WeakValueDictionary()

    def __copy__(self) -> Any:
        clone = object.__new__(type(self))
        vars(clone).update(vars(self))
        clone._set_weights(copy.copy(self.weights))
        return clone

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        clone = copy.copy(self)
        clone._known_modules = _NO_MODULES
        vars(clone).update(copy.deepcopy(vars(clone), memo))
        return clone

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"{self.name_or_path} cannot be pickled. Call model.save_pretrained(folder) and load the folder with "
            "from_pretrained, or save model.state_dict()."
        )

    def names(self) -> list[str]:
        """Names of all parameters, and of the buffers that are saved with them."""
        return self.weights.names()

    def is_trained(self, name: str) -> bool:
        """Whether `train()` updates a parameter."""
        return self.weights.is_trained(name)

    def set_trainable(self, *names: str, trainable: bool) -> None:
        """Freeze or unfreeze parameters for `train()`.

        Raises:
            ValueError: the model has an adapter, whose config decides what is trained.
        """
        self.weights.set_trainable(*names, trainable=trainable)

    def submodule(self, name: str) -> Any:
        """The parameter or buffer with this name, or the module whose parameters' names start with it. Raises
        AttributeError if none exists."""
        for candidate in self._names_for(name):
            candidate = self.backend.tied.get(candidate, candidate)
            if candidate in self.names():
                return next(parameter for _, parameter in self._named([candidate]))
            if self.weights.names_in(candidate):
                return self._module_named(candidate)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def _names_for(self, name: str) -> Iterator[str]:
        """A name, and the names under which PEFT's modules look it up if they do not have it themselves."""
        yield name
        if isinstance(self.backend, AdaptedBackend):
            owner, _, last = name.rpartition(".")
            if last in ("weight", "bias"):
                yield f"{owner}.base_layer.{last}"
            yield from (start + name.removeprefix("base_model.") for start in ("base_model.", "base_model.model."))

    def _module_named(self, name: str) -> Submodule:
        """The module with this name: the same object as long as a script holds it, so that `is` compares modules."""
        is_table = f"{name}.weight" == self.backend.token_table or _OUTPUT_EMBEDDINGS.match(f"{name}.weight")
        kind = EmbeddingModule if is_table else Submodule
        return self._submodules.setdefault(name, kind(self, name))

    def get_submodule(self, target: str) -> Any:
        """The module with this name; "" is the model itself. Raises AttributeError if there is none."""
        if not target:
            return self
        if target in self._torch_modules and not self.weights.names_in(target):  # it has no parameters
            return self._module_named(target)
        module = self.submodule(target)
        if isinstance(module, Parameter):
            raise AttributeError(f"{target!r} is not a module but a parameter")
        return module

    @property
    def base_model(self) -> Any:
        """The model without its head; with an adapter, PEFT's module that contains the whole model."""
        return self.submodule(self.backend.token_table.partition(".")[0])

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("forward", "loss_function"):
            raise AttributeError(
                f"Cannot set {name} of {self.name_or_path}: the model computes with JAX and never calls it. Override "
                "compute_loss of the trainer."
            )
        if (
            name not in vars(self)
            and not name.startswith("_")
            and not hasattr(type(self), name)
            and "weights" in vars(self)
            and self.weights.names_in(name)
        ):
            raise AttributeError(
                f"Cannot set {name} of {self.name_or_path}: the model computes with JAX modules, which would not "
                "change. Change the torch model before the trainer is made, or values in model.params."
            )
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or "weights" not in vars(self):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        try:
            return self.submodule(name)
        except AttributeError as error:
            return self._fact(name, error)

    @property
    def _whole(self) -> Any:
        return self

    @property
    def _modules(self) -> dict[str, Any]:
        """Read by accelerate's unwrap_model."""
        return dict(self.named_children())

    @property
    def _torch_modules(self) -> dict[str, Any]:
        """The names of all modules in order -> torch's modules without values if torch is imported; otherwise the names
        of modules with parameters -> None."""
        in_torch = "torch" in sys.modules
        if self._known_modules[0] != (self.backend, in_torch):
            if in_torch:
                adapter = self.backend.config if isinstance(self.backend, AdaptedBackend) else None
                adapter = already_initialized(adapter) if isinstance(adapter, LoraConfig) else adapter
                images = any(path.startswith("vision.") for path in self.backend.tensors)
                modules = torch_modules(self.config, self.backend.head, adapter, images=images)
            else:
                modules = dict.fromkeys(owners(self._names_with_quantized(), self.backend.tied))
            self._known_modules = (self.backend, in_torch), modules
        return self._known_modules[1]

    def _names_with_quantized(self) -> list[str]:
        """The names of all parameters, and of the quantized weights, which are none of them without an adapter."""
        layers = self.backend.layers
        if isinstance(self.backend, AdaptedBackend) or not any(kind in QUANTIZED for kind in layers.values()):
            return self.names()
        return torch_order((*(f"{layer}.weight" for layer in layers), *self.names()))

    def is_custom_code(self) -> bool:
        """Called by peft before it changes the modules."""
        raise TypeError(
            f"peft adds modules of torch, and {self.name_or_path} computes with JAX. Call trl_jax.get_peft_model, pass "
            "the config to the trainer as peft_config=LoraConfig(...), or load an adapter's folder with "
            "trl_jax.AutoPeftModelForCausalLM."
        )

    def get_parameter(self, name: str) -> Parameter:
        """The parameter with this name. Raises AttributeError if there is none."""
        for _, parameter in self._named([self.backend.tied.get(name, name)]):
            return parameter
        raise AttributeError(
            f"{self.name_or_path} has no parameter {name!r}; it has {', '.join(self.names()[:8])}, ..."
        )

    def _state(self, keep_vars: bool) -> dict[str, Any]:
        if keep_vars:
            state = dict(self._named())
        else:
            state = {name: for_scripts(values) for name, values in self.weights.read_values()}
            self.weights.forget_last_read()
        return state | {alias: state[name] for alias, name in self.backend.tied.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> LoadedKeys:
        """Set the values of parameters by their names, as in torch, also between two steps of `train()`.

        Args:
            state_dict: tensors or arrays.
            strict: whether `state_dict` must have all names of the model and no others.
            assign: has no effect.

        Raises:
            RuntimeError: names do not match with `strict`, or a shape differs.
            ValueError: the model is quantized, or a value of an adapter's base model differs.
        """
        names = {name: name for name, _ in self._named()} | dict(self.backend.tied)
        if isinstance(state_dict, Mapping):
            in_memory = self.backend.file_names
            state_dict = {in_memory.get(name, name): value for name, value in state_dict.items()}
        return self.load_values(self.name_or_path, names, state_dict, strict)

    def load_values(
        self, module: str, names: Mapping[str, str], state_dict: Mapping[str, Any], strict: bool
    ) -> LoadedKeys:
        """`load_state_dict` of a module. `names`: names in the module, in torch's order -> names in the model."""
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"Expected state_dict to be dict-like, got {type(state_dict)}.")
        missing = [name for name in names if name not in state_dict]
        unexpected = [name for name in state_dict if name not in names]
        new = {  # the last name of a tied parameter decides, as in torch
            ours: np.asarray(as_array(value.detach().cpu()) if is_torch(value) else value)
            for ours, value in ((ours, state_dict[name]) for name, ours in names.items() if name in state_dict)
        }
        shapes = {name: tuple(values.shape) for name, values in self._named(new)}
        errors = [
            f"size mismatch for {name}: copying a param with shape {list(value.shape)} from checkpoint, the shape in "
            f"current model is {list(shapes[name])}."
            for name, value in new.items()
            if value.shape != shapes[name]
        ]
        for kind, keys in (("Missing", missing), ("Unexpected", unexpected)) if strict else ():
            errors += [f"{kind} key(s) in state_dict: {', '.join(map(repr, keys))}."] if keys else []
        if errors:
            raise RuntimeError(f"Error(s) in loading state_dict for {module}:\n\t" + "\n\t".join(errors))
        fixed = {name for name in new if not self.backend.is_trained(name)}
        for name, values in self.weights.read_values(fixed) if fixed else ():
            value = new.pop(name)
            if not np.array_equal(value.astype(values.dtype), values):
                raise ValueError(
                    f"load_state_dict: {name} belongs to the base model, which does not train, and has other values. "
                    "Only weights of the adapter can be set: leave out the others, with strict=False."
                )
        changed = self.backend.with_values(self.weights.readable(self.params), new) if new else {}
        self.params = self.params | {path: like(self.params[path], values) for path, values in changed.items()}
        return LoadedKeys(missing, unexpected)

    def get_input_embeddings(self) -> Any:
        """The token embedding, with its `weight`, `num_embeddings` and `embedding_dim`."""
        return self._module_named(self.backend.token_table.removesuffix(".weight"))

    def get_output_embeddings(self) -> Any:
        """The language model head, with its `weight` `[vocabulary, hidden]`, which is the embedding's if they are tied;
        None for a score head.

        Raises:
            AttributeError: the head of an exported model has another name than usual.
        """
        if self.backend.head != "lm":
            return None
        matches = (_OUTPUT_EMBEDDINGS.match(name) for name in (*self.names(), *self.backend.tied))
        head = next((match["module"] for match in matches if match), None)
        if head is None:
            raise AttributeError(f"{self.name_or_path} has no lm_head or embed_out; get its parameters by name.")
        return self._module_named(head)

    @property
    def dtype(self) -> Any:
        """The dtype that weights are saved in (the base model's, with an adapter): a torch dtype if torch is imported,
        otherwise its name, such as "bfloat16"."""
        name = self.backend.main_dtype
        return vars(sys.modules["torch"])[name] if "torch" in sys.modules else name

    def get_memory_footprint(self, return_buffers: bool = True) -> int:
        """Size of all arrays of the model in bytes. `return_buffers` has no effect: no array counts as a torch
        buffer."""
        return sum(array.nbytes for array in self.arrays.values())

    def can_generate(self) -> bool:
        return self.backend.head == "lm" and self.backend.traits.causal

    def tie_weights(self) -> None:
        """Does nothing: tied weights are a single array."""

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: Any = None) -> None:
        """Does nothing: `gradient_checkpointing` in the trainer's arguments (on by default) decides."""

    def gradient_checkpointing_disable(self) -> None:
        """Does nothing, like `gradient_checkpointing_enable`."""

    def enable_input_require_grads(self) -> None:
        """Does nothing: gradients reach adapters without it."""

    def disable_input_require_grads(self) -> None:
        """Does nothing, like `enable_input_require_grads`."""

    def print_trainable_parameters(self) -> None:
        train, count = self.get_nb_trainable_parameters()
        print(f"trainable params: {train:,} || all params: {count:,} || trainable%: {100 * train / count:.4f}")

    def add_model_tags(self, tags: str | list[str]) -> None:
        """Add tags for the model card, without duplicates."""
        new = [tags] if isinstance(tags, str) else list(tags)
        self.model_tags = list(dict.fromkeys([*(self.model_tags or []), *new]))

    training: bool = False  # for user code that reads it; does not control dropout

    def train(self, mode: bool = True) -> Any:
        """Set `model.training`, which does not control dropout, and return the model."""
        self.training = mode
        return self

    @property
    def device(self) -> Any:
        """Device for the inputs, so that `.to(model.device)` works on a batch of torch tensors: torch's if torch is
        imported, otherwise "cpu"."""
        return sys.modules["torch"].device("cpu") if "torch" in sys.modules else "cpu"

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Round the weights to a dtype, if one is passed, and return the model.

        The weights are saved in this dtype from now on, but still train in float32. An adapter's weights are rounded
        and saved in float32. A device has no effect, because JAX decides where arrays are.

        Raises:
            ValueError: weights are not saved in this dtype.
        """
        for name in map(given_dtype, (*args, *kwargs.values())):
            if name is not None:
                self.backend.save_in(name)
                self.params = _rounded(self.params, name)
                if not set(QUANTIZED).intersection(self.backend.layers.values()):
                    self.frozen = _rounded(self.frozen, name)
        return self

    cpu = cuda = to


# PreTrainedModel


_PEFT_CLASSES = {"CAUSAL_LM": "PeftModelForCausalLM", "SEQ_CLS": "PeftModelForSequenceClassification"}

# Arguments of transformers' save_pretrained that are accepted with these values.
_WITHOUT_EFFECT = {
    "safe_serialization": (True,), "push_to_hub": (False,), "is_main_process": (True,), "state_dict": (None,),
    "variant": (None,), "token": (None,), "save_peft_format": (True,),
}  # fmt: skip


class PreTrainedModel(TransformersModelApi, GenerationApi):
    """A model with its weights.

    Attributes:
        params: flat dict of the trained arrays, float32, by dotted path.
        frozen: arrays that are not trained; empty unless the model has an adapter.
        frozen_names: names in transformers of parameters that `train()` does not update; see `set_trainable`.
        read: if several processes hold the arrays: reads one, a collective operation; None otherwise.
        config: transformers' config object of the checkpoint. Changes to it are saved, but do not affect computation,
            which is determined at loading time.
        backend: the code that computes, saves and loads the model.
        generation_config: transformers' object for a causal language model; None for other models.
        processor: the processor that was passed to the trainer, or a folder with a processor's files. The trainer saves
            either with the model.
    """

    def __init__(
        self,
        params: dict[str, jax.Array],
        backend: Backend,
        config: Any,
        folder: Path,
        name: str,
        frozen: dict[str, Any] | None = None,
        generation_config: Any = None,
    ):
        """`generation_config` is read from the folder if it is None."""
        self.config, self.folder, self.name_or_path, self.graph = config, folder, name, backend.graph
        if backend.head == "lm" and generation_config is None:
            generation_config = read_generation_config(folder, config)
        self.generation_config = generation_config
        self.processor: Any = folder
        self.writes = True  # whether this process does; see `read`
        self._set_weights(Weights(params, {} if frozen is None else frozen, backend))

    def __call__(
        self,
        input_ids: Any = None,
        attention_mask: Any | None = None,
        *,
        token_type_ids: Any | None = None,
        labels: Any | None = None,
        logits_to_keep: int = 0,
        **others: Any,
    ) -> ScoreOutput | LossOutput:
        """Compute scores or logits of token ids: JAX arrays, or torch tensors if `input_ids` is one.

        Args:
            input_ids: int `[rows, T]`, padded with the config's `pad_token_id` on either side.
            attention_mask: `[rows, T]`, 0 for tokens to mask out; None masks nothing.
            token_type_ids: all zeros, as tokenizers return them for single texts. Decoders ignore it.
            labels: int `[rows, T]`, the token ids, -100 for those without a loss; adds `loss` to the output of a
                language model.
            logits_to_keep: the number of last positions whose logits are returned; 0 means all.
            others: arguments of transformers' models with values that do not change the result.

        Raises:
            TypeError: `others` has other values.
            ValueError: rows are empty or too long, there are several rows but no `pad_token_id`, an id is outside the
                vocabulary, token_type_ids are not 0, or labels have another shape.
        """
        if input_ids is None or not all(_is_without_effect(name, value) for name, value in others.items()):
            raise _call_error(self.name_or_path, others)
        outputs = self._called(input_ids, attention_mask, token_type_ids)
        outputs = outputs if labels is None else _with_loss(outputs.logits, labels)
        if logits_to_keep and self.active.backend.head == "lm":
            outputs = outputs._replace(logits=outputs.logits[:, -logits_to_keep:])
        return type(outputs)(*as_tensors([np.asarray(value) for value in outputs])) if is_tensor(input_ids) else outputs

    forward = __call__

    def _called(self, input_ids: Any, attention_mask: Any, token_type_ids: Any) -> ScoreOutput:
        if self.weights.refusal is not None:
            raise self.weights.refusal.call()
        pad, active = self.config.get_text_config().pad_token_id, self.active
        return score_rows(active.backend, active.arrays, pad, input_ids, attention_mask, token_type_ids)

    @property
    def arrays(self) -> dict[str, Any]:
        """All arrays of the model, trained and frozen."""
        return self.weights.arrays

    @property
    def vocab_size(self) -> int:
        return self.backend.traits.vocab_size

    @property
    def can_resize(self) -> bool:
        return self.backend.can_resize

    @property
    def source(self) -> Source:
        """The checkpoint that a native model was loaded from."""
        return self.backend.source

    @property
    def max_positions(self) -> int | None:
        """Length of the longest supported text in tokens; None if there is no limit."""
        return self.backend.traits.max_positions

    @property
    def peft_config(self) -> dict[str, AdapterConfig]:
        """The adapter's config by its name, as on a PeftModel. Raises AttributeError if there is no adapter."""
        if not isinstance(self.backend, AdaptedBackend):
            raise AttributeError(f"{type(self).__name__} has no adapter and thus no peft_config")
        return {"default": self.backend.config}

    @property
    def active_adapters(self) -> list[str]:
        """The names in `peft_config`. Raises AttributeError if there is no adapter."""
        return list(self.peft_config)

    @property
    def active_adapter(self) -> str:
        return self.active_adapters[0]

    def set_adapter(self, adapter_name: str) -> None:
        """Does nothing, because a model has one adapter.

        Raises:
            ValueError: it has another name.
        """
        if adapter_name not in self.peft_config:
            raise ValueError(f"Adapter {adapter_name} not found: {self.name_or_path} has {self.active_adapters}.")

    @property
    def __class__(self) -> type:
        """transformers' class, or PEFT's if the model has an adapter, once it is imported, for `isinstance`."""
        adapted = "weights" in vars(self) and isinstance(self.backend, AdaptedBackend)
        name = _PEFT_CLASSES.get(self.backend.config.task_type, "PeftModel") if adapted else "PreTrainedModel"
        module = sys.modules.get("peft" if adapted else "transformers.modeling_utils")
        return type(self) if module is None else vars(module).get(name, type(self))

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """Number of parameters including the head, or of trained ones only."""
        counted = {
            path: array
            for path, array in (self.params if only_trainable else self.arrays).items()
            if not (exclude_embeddings and path.removesuffix(".codes") in self.backend.traits.embeddings)
            and path not in self.backend.buffers
        }
        masks = {path: mask for path, mask in self.trainable_masks.items() if path in counted} if only_trainable else {}
        sizes = (self.backend.size_of(path, array) for path, array in counted.items())
        extra = {} if only_trainable else self.backend.originals
        embeddings = self.backend.traits.embeddings if exclude_embeddings else ()
        copies = sum(size for path, size in extra.items() if path not in embeddings)
        return sum(sizes) - frozen_size(masks, counted) + copies

    def get_nb_trainable_parameters(self) -> tuple[int, int]:
        """Number of trained parameters and of all parameters, as PEFT counts them."""
        return self.num_parameters(only_trainable=True), self.num_parameters()

    @property
    def trainable_masks(self) -> dict[str, np.ndarray]:
        """Which layers are trained, for arrays that are partly or fully frozen; see `backend.trainable_masks`."""
        buffers = {path: np.zeros((), bool) for path in self.backend.buffers if path in self.params}
        if not self.frozen_names:
            return buffers
        return trainable_masks(self.frozen_names, self.backend.locations(self.params), self.params) | buffers

    def resize_token_embeddings(self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None) -> Any:
        """Resize the token embedding and the language model head to `new_num_tokens`, rounded up to a multiple.

        New rows are the mean of the old ones. Returns the same as `get_input_embeddings`.
        """
        rows = padded_length(self.vocab_size if new_num_tokens is None else new_num_tokens, pad_to_multiple_of)
        if rows != self.vocab_size:
            self.backend = self.backend.resized(rows)
            self.graph, tables = self.backend.graph, tables_of_tokens(self.params)
            self.params = self.params | {path: resized_table(self.params[path], rows) for path in tables}
            self.config.get_text_config().vocab_size = rows
            self.weights.forget_shapes()
        return self.get_input_embeddings()

    def with_params(self, params: dict[str, Any]) -> PreTrainedModel:
        """The same model with other parameter values."""
        clone = copy.copy(self)
        clone.params = params
        return clone

    def merge_and_unload(self) -> PreTrainedModel:
        """Merge the adapter into the weights and return a plain model; without an adapter, return the model itself.

        Raises:
            AttributeError: the adapter consists of virtual tokens, which cannot be merged.
        """
        if not isinstance(self.backend, AdaptedBackend):
            return self
        if self.backend.virtual.count:
            raise AttributeError(
                f"{self.name_or_path} has no merge_and_unload: virtual tokens precede the texts and cannot be merged "
                "into weights. Load the base model by its name, or keep the adapter."
            )
        arrays, backend = merged(self.backend, self.params, self.frozen)
        model = self._with(arrays, backend)
        model.was_merged = True
        return model

    @property
    def disable_adapter(self) -> Callable[[], contextlib.AbstractContextManager[None]]:
        """As on a PeftModel: within `with model.disable_adapter():`, calls and `generate` use the base model. Raises
        AttributeError if there is no adapter."""
        self.peft_config  # noqa: B018 - raises the error
        return self._without_adapter

    @contextlib.contextmanager
    def _without_adapter(self) -> Iterator[None]:
        if self.weights.refusal is not None and self.weights.refusal.base is not None:
            raise self.weights.refusal.base()
        replaced = self.params.keys() & self.backend.base.tensors.keys()
        if replaced:
            raise ValueError(
                f"disable_adapter: {', '.join(sorted(replaced)[:3])} of {self.name_or_path} is fully trained, as in "
                "modules_to_save, and its original values are not kept. Load the base model separately."
            )
        before, self._base = self._base, self.get_base_model()
        try:
            yield
        finally:
            self._base = before

    @property
    def active(self) -> PreTrainedModel:
        """The model that calls compute with: in `disable_adapter` the base model, otherwise this one."""
        return self if self._base is None else self._base

    def get_base_model(self) -> PreTrainedModel:
        """The model without its adapter, with the same arrays; without an adapter, the model itself."""
        if not isinstance(self.backend, AdaptedBackend):
            return self
        return self._with(self.frozen, self.backend.base)

    def _with(self, arrays: dict[str, Any], backend: Backend) -> PreTrainedModel:
        """A plain model with other arrays and another backend, but the attributes of this checkpoint."""
        model = PreTrainedModel(
            arrays, backend, self.config, self.folder, self.name_or_path, generation_config=self.generation_config
        )
        model.read, model.writes = self.read, self.writes
        model.accepts_loss_kwargs, model.processor = self.accepts_loss_kwargs, self.processor
        return model

    def save_pretrained(
        self, save_directory: str | Path, *, max_shard_size: int | str | None = None, **others: Any
    ) -> None:
        """Write config.json and safetensors that transformers can load.

        Names, shards and dtypes are those of the original checkpoint, and so are the config's keys, apart from changes
        made in `config`.

        Args:
            max_shard_size: most bytes per file, such as "5GB"; None keeps the checkpoint's shards.
            others: arguments of transformers' method, accepted if their values match what is done anyway.

        Raises:
            TypeError: an argument has another value.
        """
        if self._is_own_state(others.get("state_dict")):  # as accelerator.get_state_dict(model) returns
            del others["state_dict"]
        unsupported = {name for name, value in others.items() if value not in _WITHOUT_EFFECT.get(name, ())}
        if unsupported:
            listed = ", ".join(f"{name}={brief(masked(others[name], name))}" for name in sorted(unsupported))
            raise TypeError(
                f"save_pretrained: {listed} is not supported by this release of trl_jax. Leave it out. To push, call "
                "push_to_hub()."
            )
        folder = Path(save_directory)
        self.backend.save(folder if self.writes else None, self.readable, self.config, max_shard_size)
        if self.writes and self.generation_config is not None and not isinstance(self.backend, AdaptedBackend):
            write_generation_config(self.generation_config, folder)

    def _is_own_state(self, state: Any) -> bool:
        """Whether a script passes the model's own `state_dict()`, with the current values."""
        if not isinstance(state, dict) or state.keys() - self.backend.tied.keys() != {*self.names()}:
            return False
        return all(np.array_equal(state[name], values) for name, values in self.weights.read_values())

    def push_to_hub(
        self,
        repo_id: str,
        *,
        commit_message: str = "Upload model",
        private: bool | None = None,
        token: str | None = None,
        revision: str | None = None,
        max_shard_size: int | str | None = None,
    ) -> Any:
        """Upload what `save_pretrained` writes to a repository, which is created if needed, and return the commit.

        Raises:
            PermissionError, ConnectionError: the Hub denies access or cannot be reached.
        """
        publisher = Publisher(repo_id, token=token, private=private, revision=revision)
        publisher.open()  # before saving, so that an unreachable Hub fails fast
        with tempfile.TemporaryDirectory(prefix="trl-jax-") as folder:
            self.save_pretrained(folder, max_shard_size=max_shard_size)
            files = sorted(path.name for path in Path(folder).iterdir())
            return publisher.push([Upload(Path(folder), commit_message, files)])

    @property
    def readable(self) -> dict[str, Any]:
        """The parameters; reading one is a collective operation if several processes hold it."""
        return self.weights.readable(self.params)
