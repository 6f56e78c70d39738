"""Changes of transformers that `python -m trl_jax` makes before a script imports it. `import trl_jax` changes nothing.

Methods of transformers' Trainer that a script calls by name, as in `transformers.Trainer.evaluate(self, ...)`, call
our trainer's method if `self` is our trainer. transformers' callbacks, trackers and configs are imported without its
models: otherwise, only to recognize one, they import PEFT, torch's distributed tensors and everything else that a torch
model needs, which is half of a script's import time. Without torch, transformers' model classes are trl_jax's.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any, ClassVar

from trl_jax.cli.torch_for_scripts import translate_bit_flags

# ---- Methods of transformers' Trainer, called by name

_REDIRECTED = "_answers_for_trl_jax"


def redirect_trainer_methods(cls: type) -> None:
    """Patch the methods of transformers' Trainer, `cls`, to call our trainer's method if `self` is our trainer.

    Other trainers, including TRL's, are not affected.
    """
    if _REDIRECTED in vars(cls):
        return
    for name, method in list(vars(cls).items()):
        if inspect.isfunction(method) and not name.startswith("__"):
            setattr(cls, name, _redirect(name, method))
    setattr(cls, _REDIRECTED, True)


def _redirect(name: str, original: Callable) -> Callable:
    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        ours = [cls for cls in type(self).__mro__ if cls.__module__.partition(".")[0] == "trl_jax"]
        if not ours:
            return original(self, *args, **kwargs)
        override = next((vars(cls)[name] for cls in ours if name in vars(cls)), None)
        if override is None:
            raise TypeError(refusal(name, type(self)))
        return override(self, *args, **kwargs)

    return method


def refusal(name: str, cls: type) -> str:
    """The error message for a call of a method of transformers' Trainer that our trainer class `cls` does not have."""
    default = "Leave it out, or call a method that the trainer has."
    advice = cls._traits.refused.never_called.get(name, default)
    return f"transformers.Trainer.{name} was called with a {cls.__name__}; trainers of trl_jax have none. {advice}"


# ---- transformers' callbacks without its models

_ACTIVATIONS = "transformers.activations"  # imported by every config class
_SHARDED = (  # modules of torch for sharded tensors that it imports
    "torch.distributed.tensor", "torch.distributed.tensor._utils", "torch.distributed.tensor.placement_types",
    "torch.distributed.fsdp", "torch.distributed._composable.fsdp",
)  # fmt: skip


class _Elsewhere(type):
    """Stands in for the class `name` of `module`. There are no instances until the module is imported; calling it or
    accessing an attribute imports the module."""

    def __new__(cls, module: str, name: str):
        return super().__new__(cls, name, (), {"__module__": module})

    def __init__(cls, module: str, name: str):
        super().__init__(name, (), {})

    def __instancecheck__(cls, value: Any) -> bool:
        module = sys.modules.get(cls.__module__)
        return module is not None and isinstance(value, vars(module)[cls.__name__])

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls._real(), name)

    def __call__(cls, *args: Any, **options: Any) -> Any:
        return cls._real()(*args, **options)

    def _real(cls) -> Any:
        return getattr(import_module(cls.__module__), cls.__name__)


class _Absent(ModuleType):
    """Stands in for a module; all of its names are imported on demand."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Elsewhere(self.__name__, name)


def import_without_models() -> None:
    """Import transformers.trainer_utils, its trackers and what its configs need, unless they or the modules to avoid
    are already imported."""
    utils = import_module("transformers.utils")
    if not {_ACTIVATIONS, *_SHARDED} & sys.modules.keys() and utils.is_torch_distributed_available():
        _import_activations()
    imports_peft = "transformers.trainer_utils" not in sys.modules and utils.is_peft_available()
    # PEFT imports transformers, so it may have been imported in part.
    if imports_peft and "PeftModel" not in vars(sys.modules.get("peft", utils)):
        _import_trainer_utils(utils)
    trackers = "transformers.integrations.integration_utils"
    if not {trackers, "transformers.modeling_utils"} & sys.modules.keys() and utils.is_torch_available():
        _import_trackers(trackers)


def _import_trainer_utils(utils: Any) -> None:
    is_available, utils.is_peft_available = utils.is_peft_available, lambda: False
    try:
        module = import_module("transformers.trainer_utils")
    finally:
        utils.is_peft_available = is_available
    module.is_peft_available = is_available
    module.PeftMixedModel, module.PeftModel = (_Elsewhere("peft", name) for name in ("PeftMixedModel", "PeftModel"))


def _import_trackers(name: str) -> None:
    transformers = import_module("transformers")
    transformers.PreTrainedModel = _Elsewhere("transformers.modeling_utils", "PreTrainedModel")
    try:
        import_module(name)
    finally:
        del transformers.PreTrainedModel


def _import_activations() -> None:
    """Import it with stand-ins for modules of torch. If another release of transformers needs the real ones, it is
    imported normally later."""
    loaded = set(sys.modules)
    sys.modules.update({name: _Absent(name) for name in _SHARDED})
    try:
        import_module(_ACTIVATIONS)
    except Exception:  # transformers' own errors will be raised again by the normal import
        for name in sys.modules.keys() - loaded:
            if name.startswith("transformers."):
                del sys.modules[name]
    finally:
        for name in _SHARDED:
            del sys.modules[name]


# ---- Processors of models that take videos, too


class NoVideos:
    """Stands in for a video processor, which needs torchvision: its settings are saved as read, and it refuses
    videos."""

    model_input_names: ClassVar[list[str]] = []
    _auto_class = None

    def __init__(self, settings: dict[str, Any]):
        self.settings = settings

    def __getattr__(self, name: str) -> Any:
        settings = vars(self).get("settings", {})
        if name not in settings:
            raise AttributeError(f"the stand-in for a video processor has no {name}")
        return settings[name]

    def __call__(self, *videos: Any, **options: Any) -> Any:
        raise ImportError(
            "Videos are processed by transformers with torchvision, which is not installed. Leave them out: trl_jax "
            "trains on texts and images."
        )


def load_without_videos(module: ModuleType) -> None:
    """Without torchvision, let AutoProcessor load processors of models that also take videos."""
    if importlib.util.find_spec("torchvision") is None:

        def from_pretrained(name: Any, *arguments: Any, **options: Any) -> NoVideos:
            accepted = inspect.signature(module.get_video_processor_config).parameters.keys() & options.keys()
            return NoVideos(module.get_video_processor_config(name, **{key: options[key] for key in accepted}))

        module.AutoVideoProcessor.from_pretrained = staticmethod(from_pretrained)


def load_pixtral_processor(module: ModuleType) -> None:
    """Without torchvision, let `transformers.models.pixtral`, `module`, have the processor of mistral3.

    transformers hides the class, but its module needs only a function of the image processor's torchvision version,
    which the Pillow version has, too.
    """
    if importlib.util.find_spec("torchvision") is None and importlib.util.find_spec("PIL") is not None:
        name = f"{module.__name__}.image_processing_pixtral"
        sys.modules[name] = import_module(f"{module.__name__}.image_processing_pil_pixtral")
        try:
            module.PixtralProcessor = import_module(f"{module.__name__}.processing_pixtral").PixtralProcessor
        finally:
            del sys.modules[name]


def accept_no_videos(processor_mixin: type) -> None:
    """Let processors be created and saved with a `NoVideos`."""
    original_check, original_to_dict = processor_mixin.check_argument_for_proper_class, processor_mixin.to_dict

    @functools.wraps(original_check)
    def check(self: Any, argument_name: str, argument: Any) -> Any:
        return NoVideos if isinstance(argument, NoVideos) else original_check(self, argument_name, argument)

    @functools.wraps(original_to_dict)
    def to_dict(self: Any) -> dict[str, Any]:
        attributes = original_to_dict(self)
        absent = {name: value.settings for name, value in attributes.items() if isinstance(value, NoVideos)}
        others = {name: value for name, value in attributes.items() if name not in absent}
        return others | {name: settings for name, settings in absent.items() if settings}

    processor_mixin.check_argument_for_proper_class, processor_mixin.to_dict = check, to_dict


# ---- transformers without torch


def use_our_models(transformers: ModuleType) -> None:
    """Replace transformers' model classes by trl_jax's if torch is not installed, for supported model types."""
    if importlib.util.find_spec("torch") is not None or "_has_our_models" in vars(type(transformers)):
        return

    class WithOurModels(type(transformers)):
        _has_our_models = True

        def __getattr__(self, name: str) -> Any:
            if name == "pipeline":
                return _no_pipeline
            ours = _our_class(name) if name.endswith(_MODEL_CLASSES) else None
            return super().__getattr__(name) if ours is None else ours

    transformers.__class__ = WithOurModels


_MODEL_CLASSES = ("ForCausalLM", "ForConditionalGeneration", "ForSequenceClassification", "ForImageTextToText",
                  "PreTrainedModel")  # fmt: skip


def needs_torch(name: str) -> bool:
    """Whether scripts cannot use this name of transformers without torch. Only for machines without it."""
    try:
        found = getattr(import_module("transformers"), name)
    except AttributeError:  # a name that this release of transformers lacks
        return False
    is_placeholder = type(found).__name__ == "DummyObject" and not (name.endswith(_MODEL_CLASSES) and _our_class(name))
    return name == "pipeline" or is_placeholder


def _no_pipeline(*args: Any, **options: Any) -> None:
    """transformers' `pipeline`, which fails with a NameError without torch."""
    raise ImportError(
        "transformers.pipeline needs torch, which is not installed. Call model.generate_text(prompts, tokenizer), or "
        "model.generate, or install torch."
    )


@functools.cache
def _our_class(name: str) -> type | None:
    """Our class for one of transformers; None if there is none."""
    from trl_jax.hub import auto, pretrained

    if name == "PreTrainedModel":
        return pretrained.PreTrainedModel
    try:
        ours = vars(auto).get(name) or auto.class_of_family(name)
    except AttributeError:
        return None
    return for_scripts(ours)


def for_scripts(cls: type) -> type:
    """A subclass of one of our auto classes whose `from_pretrained` suits scripts written for torch.

    A missing head is drawn from the process-wide stream, as by transformers from torch's. Weights, which torch would
    keep on the host, are sharded over the devices of a single process: one device may be too small for them.
    `load_in_4bit` is accepted.
    """
    from trl_jax.core.torch_random import default_generator

    @functools.wraps(cls.from_pretrained)
    def from_pretrained(*args: Any, **kwargs: Any) -> Any:
        options = {"seed": default_generator()} | translate_bit_flags(kwargs)
        if _several_devices_here():
            options.setdefault("mesh_shape", "fsdp:-1")
        return cls.from_pretrained(*args, **options)

    return type(cls.__name__, (cls,), {"from_pretrained": staticmethod(from_pretrained)})


def _several_devices_here() -> bool:
    """Whether this is the only process, and has several devices. Joins other processes, which cannot join once JAX has
    started."""
    import jax

    from trl_jax.config.base import BaseConfig
    from trl_jax.mesh import processes

    timeout = BaseConfig.__dataclass_fields__["initialization_timeout"].default
    processes.join(None, None, None, timeout)
    return not processes.several() and jax.device_count() > 1


def seed_our_stream(module: ModuleType) -> None:
    """Without torch, make transformers' `set_seed` also seed the stream that trl_jax draws from instead of torch's."""
    if importlib.util.find_spec("torch") is None:
        original = module.set_seed

        @functools.wraps(original)
        def set_seed(seed: int, deterministic: bool = False) -> None:
            from trl_jax.core.torch_random import default_generator

            original(seed, deterministic)
            default_generator().manual_seed(seed)

        module.set_seed = set_seed


def encode_without_torch(module: ModuleType) -> None:
    """Without torch, make `return_tensors="pt"` of tokenizers return arrays with torch's methods, and `.to(device)` of
    what they return do nothing."""
    if importlib.util.find_spec("torch") is not None:
        return
    cls = module.BatchEncoding
    original = cls.convert_to_tensors

    @functools.wraps(original)
    def convert_to_tensors(self: Any, tensor_type: Any = None, prepend_batch_axis: bool = False) -> Any:
        if tensor_type != "pt":  # also true of transformers' TensorType, a str
            return original(self, tensor_type, prepend_batch_axis)
        import numpy as np

        from trl_jax.hub.torch_bridge import as_tensors

        original(self, "np", prepend_batch_axis)
        arrays = {name: np.asarray(value) for name, value in self.data.items()}
        if ragged := [name for name, array in arrays.items() if array.dtype == object]:
            raise ValueError(
                "Unable to create tensor, you should probably activate truncation and/or padding with 'padding=True' "
                "'truncation=True' to have batched tensors with the same length. Perhaps your features "
                f"(`{ragged[0]}` in this case) have different lengths."
            )
        self.data = as_tensors(arrays)
        return self

    cls.convert_to_tensors, cls.to = convert_to_tensors, lambda self, *args, **options: self
