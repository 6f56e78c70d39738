"""Torch and PEFT models that a user passes: read and check them, and copy the trained weights back.

Their weights are read from files that transformers saves, so anything that a script changed beyond weights and config
would be lost. Such models are refused.
"""

from __future__ import annotations

import copy
import inspect
import logging
import re
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import save_file

from trl_jax.hub.auto import Checkpoint, find_checkpoint
from trl_jax.hub.backend import Backend
from trl_jax.hub.heads import HeadName
from trl_jax.hub.peft_backend import AdaptedBackend
from trl_jax.hub.peft_config import ENCODER, LoraConfig, already_initialized, positions_left, read_adapter_config
from trl_jax.hub.quantization import BitsAndBytesConfig, as_quantization
from trl_jax.hub.torch_bridge import adapted, dtype_name, function_name, peft_available
from trl_jax.models.adapters import PREFIX

# Copying weights from torch models and back


logger = logging.getLogger(__name__)

ADAPTER_FOLDER = "adapter"


def is_torch_model(value: Any) -> bool:
    """Whether `value` is a torch module, without importing torch. `isinstance` also holds for our models, which have
    transformers' or PEFT's `__class__`."""
    return "torch" in sys.modules and issubclass(type(value), sys.modules["torch"].nn.Module)


@contextmanager
def as_folder(model: Any, head: HeadName, *, dropout: bool = True) -> Iterator[Path]:
    """Save the model as transformers does, in a temporary folder that exists within the context.

    Args:
        dropout: whether its dropout must match its config, because it will be trained with it.

    Raises:
        TypeError, ValueError: `model` is not a transformers model with this head, or is quantized by a library
            other than bitsandbytes.
    """
    base = model.get_base_model() if is_adapted(model) else model
    _check(base, head)
    if base is model:
        _check_no_adapter(model)
    if head == "score" and not dropout:
        unwrap_head(base)
    check_unaltered(model, base, plain=base is model and not _in_few_bits(base), dropout=dropout)
    quantization_of(base)
    with tempfile.TemporaryDirectory(prefix="trl-jax-") as folder:
        if base is model:
            _save(base, base.state_dict(), folder)
        else:
            _save_adapted(model, base, Path(folder))
        yield Path(folder)


@contextmanager
def as_checkpoint(model: Any, head: HeadName, *, dropout: bool = True) -> Iterator[Checkpoint]:
    """The model as a checkpoint that can be loaded within the context, including an adapter if it has one; arguments as
    in `as_folder`."""
    name = name_of(model)
    with as_folder(model, head, dropout=dropout) as folder, _errors_naming(name, folder):
        checkpoint = replace(find_checkpoint(str(folder), head=head, dtype="auto"), name=name)
        base = model.get_base_model() if is_adapted(model) else model
        checkpoint = _with_untrained_row(checkpoint, base)
        if is_adapted(model):
            adapter = folder / ADAPTER_FOLDER
            config = read_adapter_config(adapter)
            config = already_initialized(config) if isinstance(config, LoraConfig) else config
            positions = positions_left(checkpoint.max_positions, config)
            checkpoint = replace(checkpoint, adapter=adapter, lora=config, max_positions=positions)
        yield replace(checkpoint, quantization=quantization_of(base))


def _with_untrained_row(checkpoint: Checkpoint, base: Any) -> Checkpoint:
    """Freeze the row of the padding index that the embedding was created with: torch does not know about a pad token
    that user code sets in the config later."""
    if checkpoint.native is None:
        return checkpoint
    import torch

    tables = (module for module in base.get_input_embeddings().modules() if isinstance(module, torch.nn.Embedding))
    arch = replace(checkpoint.native.arch, padding_idx=next(tables).padding_idx)
    return replace(checkpoint, native=replace(checkpoint.native, arch=arch), max_positions=arch.max_positions)


def name_of(model: Any) -> str:
    """The folder or repository that a torch model was loaded from, or its class if there is none."""
    return getattr(getattr(model, "config", None), "_name_or_path", "") or type(model).__name__


@contextmanager
def _errors_naming(name: str, folder: Path) -> Iterator[None]:
    """Make errors about the temporary folder name the model instead, since the folder is gone when they are read."""
    try:
        yield
    except (TypeError, ValueError, FileNotFoundError) as error:
        told = str(error).replace(str(folder), name)
        if told == str(error):
            raise
        kind = next(kind for kind in (TypeError, ValueError, FileNotFoundError) if isinstance(error, kind))
        raise kind(told).with_traceback(error.__traceback__) from error.__cause__


def _check_no_adapter(model: Any) -> None:
    """Raise ValueError for a base model whose layers contain an adapter; the PeftModel is needed instead."""
    if "peft_config" in vars(model):
        raise ValueError(
            f"model is a {type(model).__qualname__} whose layers already contain a PEFT adapter. Pass the PeftModel, "
            "the trainer.model that trained it, or a folder that it was saved to."
        )


def is_adapted(model: Any) -> bool:
    """Whether `model` is a PeftModel, which has an adapter."""
    return type(model).__module__.startswith("peft.")


def _save_adapted(model: Any, base: Any, folder: Path) -> None:
    """Save the base model without PEFT's modules, and the adapter in a subfolder."""
    name = _adapter_name(model)
    state = {key: value for key, value in base.state_dict().items() if not _of_adapter(key, name)}
    _save(base, state, folder)
    model.save_pretrained(folder / ADAPTER_FOLDER, selected_adapters=[name])
    inner = folder / ADAPTER_FOLDER / name
    if inner.is_dir():  # PEFT uses a subfolder if the adapter's name is not its default
        for path in inner.iterdir():
            path.rename(folder / ADAPTER_FOLDER / path.name)
    _save_encoder(model, name, folder / ADAPTER_FOLDER)


def _adapter_name(model: Any) -> str:
    """The name of a PeftModel's adapter.

    Raises:
        ValueError: there are several.
    """
    names = list(model.peft_config)
    if len(names) > 1:
        raise ValueError(
            f"model is a PeftModel with {len(names)} adapters: {', '.join(names)}. Models with one adapter are "
            "supported: remove the others with model.delete_adapter(name)."
        )
    return names[0]


def _save_encoder(model: Any, name: str, folder: Path) -> None:
    """Save the network that makes the vectors of virtual tokens, if there is one, because PEFT does not."""
    config = model.peft_config[name]
    if config.is_prompt_learning and not config.inference_mode:
        arrays = {key: value.float().numpy() for key, value in model.prompt_encoder[name].state_dict().items()}
        if len(arrays) > 1:
            save_file(arrays, folder / ENCODER)


def _save(base: Any, state: dict[str, Any], folder: Path | str) -> None:
    """Save a model with this state, whose keys may be PEFT's; quantized weights are saved as floats."""
    few = _in_few_bits(base)
    inside = tuple(f"{name}." for name in few)
    state = {key: value for key, value in state.items() if not key.startswith(inside) or key.endswith(".bias")}
    plain = {_without_peft(key): value for key, value in (state | _floats(few)).items()}
    if not few:
        base.save_pretrained(folder, state_dict=plain)
        return
    import torch

    config = copy.deepcopy(base.config)
    del config.quantization_config
    with torch.device("meta"):
        twin = type(base)(config)
    twin.load_state_dict(plain, strict=False, assign=True)
    twin.tie_weights()
    twin.save_pretrained(folder)


def _without_peft(key: str) -> str:
    return key.replace(".token_adapter.base_layer", "").replace(".base_layer", "").replace(".original_module", "")


def _in_few_bits(base: Any) -> dict[str, Any]:
    """The modules whose weights bitsandbytes quantized to 4 or 8 bits."""
    kinds = ("Params4bit", "Int8Params")
    weights = {name: module.weight for name, module in base.named_modules() if "weight" in vars(module)["_parameters"]}
    return {name: base.get_submodule(name) for name, weight in weights.items() if type(weight).__name__ in kinds}


def _floats(modules: dict[str, Any]) -> dict[str, Any]:
    from transformers.integrations.bitsandbytes import dequantize_bnb_weight

    states = {name: vars(module).get("state") for name, module in modules.items()}
    return {f"{name}.weight": dequantize_bnb_weight(module.weight, states[name]) for name, module in modules.items()}


def quantization_of(base: Any) -> BitsAndBytesConfig | None:
    """How a model's weights were quantized when it was loaded; None if they were not. Double quantization is turned
    off, because quantizing the scales again would change them.

    Raises:
        ValueError: the weights were quantized by a library other than bitsandbytes.
    """
    if "quantization_config" not in base.config.to_dict():
        return None
    config = base.config.quantization_config
    if type(config).__name__ != "BitsAndBytesConfig":
        raise ValueError(
            f"model is a {type(base).__qualname__} quantized with a {type(config).__qualname__}. Use a "
            "BitsAndBytesConfig, or load the model without quantization_config."
        )
    return replace(as_quantization(config), bnb_4bit_use_double_quant=False)


def _of_adapter(key: str, name: str) -> bool:
    return ".lora_" in key or ".trainable_tokens_" in key or f".modules_to_save.{name}." in key


def _check(model: Any, head: HeadName) -> None:
    from transformers import PreTrainedModel

    kind = f"{type(model).__module__}.{type(model).__qualname__}"
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model must be a transformers model, a checkpoint folder or a Hub name, got a {kind}.")
    if not type(model).__module__.startswith("transformers."):
        raise TypeError(
            f"model is a {kind}, whose own code would not run, because JAX computes transformers' models here. Pass "
            "one of transformers' own classes, and implement the difference in compute_loss."
        )
    if head == "lm":
        if not _is_causal(model):
            raise TypeError(
                f"model is a {kind}, which has no causal language model head. Load it with AutoModelForCausalLM, or "
                "pass its name."
            )
        return
    if model.config.num_labels != 1:
        raise ValueError(
            f"model is a {kind} with {model.config.num_labels} labels, but reward models require `num_labels=1`. Load "
            "it with num_labels=1, or pass its name."
        )


def _is_causal(model: Any) -> bool:
    from transformers.models.auto import modeling_auto

    mappings = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    return any(type(model).__name__ in names.values() for names in mappings)


def frozen_names(model: Any) -> list[str]:
    """Names of parameters with requires_grad=False. Empty for a PeftModel, whose base model PEFT has frozen, and for a
    quantized model, which needs an adapter anyway."""
    if is_adapted(model) or _in_few_bits(model):
        return []
    return [name for name, parameter in model.named_parameters() if not parameter.requires_grad]


def check_adapter_flags(model: Any, trained: Mapping[str, bool]) -> None:
    """Compare `requires_grad` in a PeftModel with what trains here.

    Args:
        trained: whether a parameter trains, by name.

    Raises:
        ValueError: a script has set the flag of some parameters by hand.
    """
    adapter = _adapter_name(model)
    named = {re.sub(rf"\.{re.escape(adapter)}(?=\.|$)", ".default", name): flag for name, flag in _flags(model).items()}
    flags = {name: flag for name, flag in named.items() if name in trained}
    if not any(flag for name, flag in flags.items() if ".default" in name):
        logger.warning(
            "The adapter of model was loaded without is_trainable=True, so TRL would train nothing. It is trained here."
        )
        return
    for name, flag in flags.items():
        if flag != trained[name]:
            raise ValueError(
                f"model: {name} has requires_grad={flag}, which was set by hand: the adapter's config says "
                f"{trained[name]}, and here it decides what is trained. Use target_modules, layers_to_transform and "
                "modules_to_save of LoraConfig."
            )


def resize(model: Any, rows: int) -> None:
    """Resize the vocabulary of a torch model, including its head; new rows are the mean of the old ones."""
    import torch

    before = model.get_input_embeddings().num_embeddings
    if is_adapted(model) or before == rows:
        return
    model.resize_token_embeddings(rows, mean_resizing=False)
    tables = [model.get_input_embeddings(), model.get_output_embeddings()]
    with torch.no_grad():
        for table in tables if rows > before else []:
            if table is not None:
                table.weight[before:] = table.weight[:before].mean(0)


def copy_back_to_torch(backend: Backend, params: dict, config: Any, model: Any) -> None:
    """Copy the parameters back to the torch model they came from, in its dtypes and on its devices."""
    import torch

    if isinstance(backend, AdaptedBackend):
        _copy_back_adapter(backend, params, model)
        return
    state = model.state_dict()
    values = dict(backend.on_disk(params))
    if not values.keys() <= state.keys():  # transformers has some tensors in a different form than its files
        values = _as_loaded(backend, params, config, type(model))
    with torch.no_grad():
        for name, value in values.items():
            state[name].copy_(value if isinstance(value, torch.Tensor) else torch.tensor(value))


def _copy_back_adapter(backend: AdaptedBackend, params: dict, model: Any) -> None:
    """Copy an adapter to a PeftModel, or inject it into the layers of a base model, as PEFT does."""
    import torch

    if backend.virtual.count:
        if is_adapted(model):  # for a base model there is nothing to do, as they are not part of it
            arrays = {path.removeprefix(PREFIX): torch.tensor(np.asarray(array)) for path, array in params.items()}
            model.prompt_encoder[next(iter(model.peft_config))].load_state_dict(arrays)
        return
    carried = backend.plan.carried  # unchanged in the torch model
    state = {name: torch.tensor(value) for name, value in backend.on_disk(params) if name not in carried}
    if not is_adapted(model):
        if not peft_available():
            logger.warning(
                "The torch model was not changed. The adapter is in trainer.model and in saved checkpoints; with PEFT "
                "installed, it would also be added to the torch model."
            )
            return
        if "peft_config" not in vars(model):
            adapted(model, backend.saved_config)
        state = {name.removeprefix("base_model.model."): value for name, value in state.items()}
    from peft import set_peft_model_state_dict

    set_peft_model_state_dict(model, state, adapter_name=next(iter(model.peft_config)))


def _as_loaded(backend: Backend, params: dict, config: Any, kind: type) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="trl-jax-") as folder:
        backend.save(Path(folder), params, config)
        return kind.from_pretrained(folder).state_dict()


def as_pefts(config: Any) -> Any:
    """Convert our LoraConfig to PEFT's; other configs are returned unchanged."""
    if not isinstance(config, LoraConfig):
        return config
    from peft import LoraConfig as Theirs

    accepted, usual = inspect.signature(Theirs).parameters, vars(LoraConfig())
    return Theirs(**{name: value for name, value in vars(config).items() if name in accepted and value != usual[name]})


# Torch models that a script keeps using after a run has copied their weights


_SAMPLES = 4096  # values of each parameter that are compared


class TorchOriginal:
    """Detects changes that a script makes to the torch model it passed, after the run has copied the weights."""

    def __init__(self, model: Any):
        self._model = weakref.ref(model)
        self.mark()

    def mark(self, *, flags: bool = True) -> None:
        """Record the current values of the model, and if `flags` its `requires_grad`, as those that the run has."""
        model = self._model()
        if model is None:
            return
        self._values, self._dtype = _marks(model), _dtype_of(model)
        if flags:
            self._flags = _flags(model)

    def changed_dtype(self) -> str | None:
        """The dtype to which the model was cast since `mark`; None if it was not."""
        model = self._model()
        dtype = self._dtype if model is None else _dtype_of(model)
        return None if dtype == self._dtype else dtype

    def changed(self, *, ignore_casts: bool = False) -> str | None:
        """The name of a parameter that was changed, added or removed since `mark`; None if there is none.

        Args:
            ignore_casts: whether a parameter of another dtype than before counts as unchanged.
        """
        model = self._model()
        if model is None:
            return None
        values = _marks(model)
        for name in [*values, *self._values]:
            now, before = values.get(name), self._values.get(name)
            cast = None not in (now, before) and now.dtype != before.dtype
            if now != before and not (cast and ignore_casts):
                return name
        return None

    def same_parameters(self) -> bool:
        """Whether the model still has the same parameters with the same shapes."""
        shapes = {name: tuple(parameter.shape) for name, parameter in self._model().named_parameters()}
        return shapes == {name: mark.shape for name, mark in self._values.items()}

    def changed_flags(self) -> dict[str, bool]:
        """The parameters whose `requires_grad` was changed since `mark`, with the new value."""
        model = self._model()
        flags = {} if model is None else _flags(model)
        return {name: flag for name, flag in flags.items() if self._flags.get(name) != flag}


def originals(models: Mapping[str, Any], policy: Any) -> dict[str, TorchOriginal]:
    """The torch models among these arguments, by name. Only weak references to them are kept.

    Args:
        policy: the torch model that is trained, if it is one. Models that share parameters with it are left out.
    """
    trained = {id(parameter) for parameter in policy.parameters()} if is_torch_model(policy) else set()
    return {
        name: TorchOriginal(model)
        for name, model in models.items()
        if is_torch_model(model) and trained.isdisjoint(map(id, model.parameters()))
    }


def check_originals(known: Mapping[str, TorchOriginal], *, trains: bool) -> None:
    """Notice changes that a script made to these torch models, whose weights a run copies only once. A cast is none.

    Args:
        trains: whether the run is about to train. If not, changes only cause a warning.

    Raises:
        ValueError: one was changed.
    """
    for name, original in known.items():
        if parameter := original.changed(ignore_casts=True):
            told = (
                f"{name}: its {parameter} was changed after the trainer was made. This has no effect, because the "
                "trainer has a copy of its weights. Change it before the trainer is made, or make a new trainer."
            )
            if trains:
                raise ValueError(told)
            logger.warning(told)


def _dtype_of(model: Any) -> str | None:
    """The dtype of the model's first floating-point parameter."""
    floats = (parameter for parameter in model.parameters() if parameter.is_floating_point())
    return next((dtype_name(parameter.dtype) for parameter in floats), None)


def _flags(model: Any) -> dict[str, bool]:
    return {name: parameter.requires_grad for name, parameter in model.named_parameters()}


class _Mark(NamedTuple):
    """A fingerprint of a parameter, which changes if it is modified in place, through `data`, or replaced, but not if
    it is moved to another device."""

    shape: tuple[int, ...]
    dtype: str
    version: int
    total: str


def _marks(model: Any) -> dict[str, _Mark]:
    return {name: _mark(parameter) for name, parameter in model.named_parameters()}


def _mark(parameter: Any) -> _Mark:
    version, total = 0 if parameter.is_inference() else parameter._version, ""
    if not parameter.is_meta:
        values = parameter.detach().reshape(-1)
        # On the CPU, because devices add in another order, and Apple's have no float64.
        total = values[:: max(1, len(values) // _SAMPLES)].cpu().double().sum().item().hex()
    return _Mark(tuple(parameter.shape), str(parameter.dtype), version, total)


class _Refresh:
    """A hook that calls `refresh` before a torch model is read. Copies and pickles of the model do not have it."""

    def __init__(self, refresh: Callable[[], None], *, of_copies: bool):
        self._refresh, self._of_copies = refresh, of_copies

    def __call__(self, *_: Any) -> None:
        self._refresh()

    def __reduce__(self) -> tuple:
        if self._of_copies:
            self._refresh()  # copy.deepcopy takes a module's hooks first, then its submodules with their parameters
        return _no_hook, ()


def _no_hook() -> Callable:
    return _do_nothing


def _do_nothing(*_: Any) -> None:
    """The hook of a copy."""


@contextmanager
def refreshed(model: Any, refresh: Callable[[], None], *, of_copies: bool) -> Iterator[None]:
    """A context in which `refresh` is called before the model computes, generates or is saved.

    Args:
        of_copies: whether to call it before the model is copied, too; `refresh` must not add modules then.
    """
    from transformers import PreTrainedModel

    hook = _Refresh(refresh, of_copies=of_copies)
    with ExitStack() as hooks:
        for module in model.modules():
            if module is model or isinstance(module, PreTrainedModel):
                hooks.callback(module.register_forward_pre_hook(hook).remove)
                hooks.callback(module.register_state_dict_pre_hook(hook).remove)
        yield


# Detecting torch models that differ from their config and weights, which is all that JAX uses


# Functions of these libraries, when patched onto a module, do not change what it computes.
_KNOWN = ("transformers", "accelerate", "peft", "trl", "torch", "liger_kernel", "trl_jax")
# Hooks in scripts, by their names in PEFT's and transformers' documentation; they only enable gradients.
_HARMLESS = ("make_inputs_require_grad", "make_inputs_require_grads")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_NEAR = 0.02  # relative tolerance, so that a buffer cast to 16 bits counts as unchanged


def unwrap_head(base: Any) -> None:
    """Replace a score head that a script wrapped with dropout by its linear layer, if dropout is disabled. They compute
    the same, but transformers reads `score.weight` and not `score.1.weight`."""
    import torch

    for name, module in list(base.named_children()):
        if type(module) is not torch.nn.Sequential:
            continue
        layers = [part for part in module if type(part) not in (torch.nn.Dropout, torch.nn.Identity)]
        if len(layers) == 1 and type(layers[0]) is torch.nn.Linear:
            setattr(base, name, layers[0])
            logger.warning(
                "model.%s is a linear layer wrapped with dropout, which disable_dropout=True turns off. The wrapper "
                "was removed, and the layer is saved as %s.weight.", name, name,
            )  # fmt: skip


def check_unaltered(model: Any, base: Any, *, plain: bool, dropout: bool = True) -> None:
    """Raise ValueError for a model that computes or trains differently than its config and weights say.

    Args:
        base: the model without a PEFT adapter.
        plain: whether its modules are transformers' own: no adapter and no quantized weights.
        dropout: whether dropout must match the config, too.
    """
    check_functions(model)
    layers = _adapter_layers(model, dropout) if base is not model else ()
    change = next(chain(_tied(base), layers, _modules(base, dropout) if plain else ()), None)
    if change is not None:
        raise _altered(base, change)


def check_functions(model: Any) -> None:
    """Raise ValueError for a model with hooks, or another `forward`, of a script."""
    change = next(chain(_functions(model), _gradient_hooks(model)), None)
    if change is not None:
        raise _altered(model.get_base_model() if is_adapted(model) else model, change)


def _altered(base: Any, change: str) -> ValueError:
    return ValueError(
        f"model is a {type(base).__qualname__} that was modified after it was created: {change}. JAX would ignore "
        "this, because it only uses the model's config and weights. Set it in the config that the model or its adapter "
        "is made with, or undo it."
    )


def _functions(model: Any) -> Iterator[str]:
    for name, module in model.named_modules():
        attributes = vars(module)
        if "forward" in attributes and "_hf_hook" not in attributes and not _is_known(attributes["forward"]):
            yield f"{name}.forward was replaced by the script"
        for kind in _HOOKS:
            for hook in attributes[kind].values():
                if not _is_known(hook):
                    yield f"{name} has a hook set by the script, {function_name(hook)}"


def _gradient_hooks(model: Any) -> Iterator[str]:
    for name, parameter in model.named_parameters():
        if name.startswith("prompt_encoder."):
            continue  # PEFT has its own hooks here
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            yield f"the gradient of {name} has a hook"


def _tied(base: Any) -> Iterator[str]:
    head, table = base.get_output_embeddings(), base.get_input_embeddings()
    # As in transformers, the config of the whole model decides, also for a vision-language model.
    if head is not None and head.weight is table.weight and not base.config.tie_word_embeddings:
        yield "its head and embedding are tied, but its config has tie_word_embeddings=False"


def _adapter_layers(model: Any, dropout: bool) -> Iterator[str]:
    """Descriptions of LoRA layers of a PeftModel that do not match its config."""
    name = _adapter_name(model)
    config = model.peft_config[name]
    if config.peft_type != LoraConfig.kind:
        return
    alike = not config.alpha_pattern and not config.rank_pattern
    expected = config.lora_alpha / (config.r**0.5 if config.use_rslora else config.r)
    for path, layer in model.named_modules():
        scales = vars(layer).get("scaling")
        if not isinstance(scales, dict) or name not in scales:  # attention has a number
            continue
        if layer.merged_adapters:
            yield f"the adapter of {path} is merged"
        if layer._disable_adapters:
            yield f"the adapter of {path} is disabled"
        if alike and abs(scales[name] - expected) > 1e-6 * abs(expected):
            yield f"the adapter of {path} is scaled by {scales[name]}, but by {expected} according to its config"
        drops = vars(layer.lora_dropout[name]).get("p", 0.0)
        if dropout and drops != config.lora_dropout:
            yield f"the adapter of {path} has a dropout of {drops}, but {config.lora_dropout} according to its config"


def _modules(base: Any, dropout: bool) -> Iterator[str]:
    """Modules and constants that differ from those of a model built from its config on torch's meta device."""
    import torch

    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        twin = dict(type(base)(copy.deepcopy(base.config)).named_modules())
    for name, module in base.named_modules():
        if name not in twin:
            continue  # if it has weights, their shapes do not match and are reported elsewhere
        if type(module) is not type(twin[name]):
            expected = type(twin[name]).__qualname__
            yield f"{name} is a {type(module).__qualname__}, but a {expected} according to its config"
            continue
        for key, value in vars(twin[name]).items():
            drops = isinstance(module, torch.nn.Dropout) or "dropout" in key
            if type(value) is float and vars(module).get(key) != value and (dropout or not drops):
                yield f"{name}.{key} is {vars(module).get(key)}, but {value} according to its config"
        yield from _buffers(name, module)


def _buffers(name: str, module: Any) -> Iterator[str]:
    """For a module that is built from a config alone, its non-persistent buffers that have changed since."""
    import torch

    keys = [key for key in module._non_persistent_buffers_set if vars(module)["_buffers"][key] is not None]
    if not keys or "config" not in vars(module) or _needs_more_than_a_config(type(module)):
        return
    if any(word in str(vars(module).get("rope_type")) for word in ("dynamic", "longrope")):
        return  # these depend on the longest text so far
    with torch.random.fork_rng(devices=[]):
        twin = type(module)(copy.deepcopy(module.config))
    for key in keys:
        ours, theirs = (dict(m.named_buffers(recurse=False))[key].float().cpu() for m in (module, twin))
        if ours.shape != theirs.shape or not torch.allclose(ours, theirs, rtol=_NEAR, atol=0.0):
            yield f"{name}.{key} differs from the values that its config determines"


def _needs_more_than_a_config(kind: type) -> bool:
    arguments = list(inspect.signature(kind.__init__).parameters.values())[1:]
    named = [argument for argument in arguments if argument.kind is argument.POSITIONAL_OR_KEYWORD]
    return [argument.name for argument in named if argument.default is argument.empty] != ["config"]


def _is_known(function: Any) -> bool:
    if isinstance(function, partial):
        function = function.func
    return str(function.__module__).partition(".")[0] in _KNOWN or function_name(function) in _HARMLESS
