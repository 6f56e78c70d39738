"""Make `import trl` find trl_jax, and patch torch, transformers and peft for scripts written for TRL.

Used by `python -m trl_jax` and `trl_jax.install`, never by `import trl_jax`.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib
import importlib.util
import inspect
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from trl_jax.cli import torch_for_scripts
from trl_jax.cli.main import watch_chat_template
from trl_jax.cli.transformers_patches import (
    accept_no_videos,
    encode_without_torch,
    for_scripts,
    import_without_models,
    load_pixtral_processor,
    load_without_videos,
    redirect_trainer_methods,
    seed_our_stream,
    use_our_models,
)
from trl_jax.config.renamed import translate_old_names
from trl_jax.core.trainers import EXPERIMENTAL, NEAR, TRAINERS, WHERE, check_not_experimental, placeholder

logger = logging.getLogger(__name__)

# TRL's module -> our modules that replace its names, in order of precedence. Other names come from the installed trl.
MODULES: dict[str, tuple[str, ...]] = {
    "trl": ("trl_jax",),
    "trl.chat_template_utils": ("trl_jax.chat_template_utils",),
    "trl.commands": (),
    "trl.commands.cli_utils": ("trl_jax.scripts.utils",),
    "trl.core": (),
    "trl.data_utils": ("trl_jax.data_utils",),
    "trl.env_utils": ("trl_jax.scripts.utils",),
    "trl.experimental": (),
    **{f"trl.experimental.{name}": (f"trl_jax.experimental.{name}",) for name in EXPERIMENTAL},
    **{
        f"trl.experimental.{name}.{name}_{part}": (f"trl_jax.trainer.{name}_{part}",)
        for name in EXPERIMENTAL
        for part in ("config", "trainer")
    },
    "trl.extras": (),
    "trl.extras.dataset_formatting": ("trl_jax.legacy.collators",),
    "trl.rewards": ("trl_jax.rewards",),
    "trl.scripts": ("trl_jax.scripts",),
    "trl.scripts.utils": ("trl_jax.scripts.utils",),
    "trl.trainer": ("trl_jax.trainer",),
    "trl.trainer.callbacks": ("trl_jax.trainer.callbacks",),
    "trl.trainer.model_config": ("trl_jax.trainer.model_config",),
    "trl.trainer.utils": ("trl_jax.trainer.utils", "trl_jax.legacy.collators", "trl_jax.trainer"),
    **{ours.replace("trl_jax", "trl"): (ours,) for ours in WHERE.values()},
}
_PACKAGES = (
    "trl", "trl.commands", "trl.experimental", "trl.extras", "trl.scripts", "trl.trainer",
    *(f"trl.experimental.{name}" for name in EXPERIMENTAL),
)  # fmt: skip
_PREFER_INSTALLED = {"add_response_schema"}  # ours knows fewer templates than the installed trl
_TRL_VERSION = "1.16.0"  # the release of TRL whose API trl_jax has
_IN_CHILDREN = Path(__file__).parent / "children"


def install() -> None:
    """Make `import trl` find trl_jax, in this process and in the Python processes that it starts.

    Call it in the first cell of a notebook; `python -m trl_jax` calls it for scripts.
    """
    if any(isinstance(finder, Front) for finder in sys.meta_path):
        return
    for name in [name for name in sys.modules if name.partition(".")[0] == "trl"]:
        del sys.modules[name]
    sys.meta_path.insert(0, Front())
    sys.meta_path.append(StandIns())
    torch_for_scripts.stand_in_for_torch()
    for name in ADJUSTMENTS.keys() & sys.modules.keys():  # imported before, for example in a notebook
        ADJUSTMENTS[name](sys.modules[name])
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if str(_IN_CHILDREN) not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(_IN_CHILDREN), *filter(None, paths)])


class Front(MetaPathFinder, Loader):
    """Finds the modules in `MODULES` and `ADJUSTMENTS`. All other modules come from the installed trl, if there is one.

    `paused` is True while the installed trl imports its own modules.
    """

    paused = False

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname in ADJUSTMENTS:
            spec = PathFinder.find_spec(fullname, path)
            if spec is not None:
                spec.loader = Adjusting(spec.loader)
            return spec
        if self.paused:
            return None
        if fullname in MODULES:
            spec = ModuleSpec(fullname, self, is_package=fullname in _PACKAGES)
            real = spec_of(fullname)
            if real is not None and fullname in _PACKAGES:
                spec.submodule_search_locations = list(real.submodule_search_locations)
            return spec
        if fullname.startswith("trl.experimental.") and spec_of(fullname) is not None:
            return ModuleSpec(fullname, TheirOwn())
        if fullname.startswith("trl.") and spec_of("trl") is None:
            raise ModuleNotFoundError(
                f"{fullname} is not part of trl_jax, and trl is not installed. trl_jax has {', '.join(MODULES)}.",
                name=fullname,
            )
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return FrontModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: names are imported on first use."""

    def get_resource_reader(self, fullname: str) -> Any:
        """For the files of the installed trl's packages, such as the template of a model card."""
        real = spec_of(fullname)
        return None if real is None else real.loader.get_resource_reader(fullname)


class TheirOwn(Loader):
    """Loads experimental modules of the installed trl with trl's own trainers as base classes, not ours: theirs
    override methods that ours never call."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        package = spec.name.split(".")[2]
        if f"trl.experimental.{package}" not in _THEIR_MODULES and package not in ("utils", "merge_model_callback"):
            logger.warning("trl.experimental.%s is the installed trl's: its trainers train with torch.", package)
        with _installed_trl():
            return importlib.import_module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: the module has been executed."""


_THEIR_MODULES: dict[str, ModuleType] = {}  # modules of the installed trl that import each other


@contextlib.contextmanager
def _installed_trl() -> Iterator[None]:
    """A context in which `import trl` finds the installed trl."""
    fronts = [finder for finder in sys.meta_path if isinstance(finder, Front)]
    ours = _pop_trl()
    sys.modules.update(_THEIR_MODULES)
    for finder in fronts:
        finder.paused = True
    try:
        yield
    finally:
        for finder in fronts:
            finder.paused = False
        _THEIR_MODULES.update(_pop_trl())
        sys.modules.update(ours)


def _pop_trl() -> dict[str, ModuleType]:
    """Remove all modules of trl from sys.modules."""
    return {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "trl"}


class FrontModule(ModuleType):
    """A module of trl: our names first, the rest from the installed trl."""

    def __getattr__(self, name: str) -> Any:
        if name == "__version__" and self.__name__ == "trl" and spec_of("trl") is None:
            return _TRL_VERSION
        from_installed = name.startswith("__") or (name in _PREFER_INSTALLED and spec_of("trl") is not None)
        value = _MISSING if from_installed else self._from_trl_jax(name)
        if value is _MISSING:
            value = self._from_installed_trl(name)
        vars(self)[name] = value
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        try:
            before = getattr(self, name)
        except (AttributeError, ImportError):  # a new name, or one whose module is not installed
            before = value
        super().__setattr__(name, value)
        if before is not value and not name.startswith("__") and not isinstance(value, ModuleType):  # set by imports
            logger.warning(
                "The script replaced %s.%s. This has no effect on the trainers of trl_jax, which do not call TRL's "
                "functions. To change what a trainer computes, override its methods in a subclass.",
                self.__name__, name,
            )  # fmt: skip

    def _from_trl_jax(self, name: str) -> Any:
        if (inner := f"{self.__name__}.{name}") in MODULES:
            return importlib.import_module(inner)
        for module in MODULES[self.__name__]:
            ours = importlib.import_module(module)
            # Excludes what our module itself imports.
            if name in public_names(ours):
                return getattr(ours, name)
        return _MISSING

    def _from_installed_trl(self, name: str) -> Any:
        """The name in the installed trl, or a placeholder for a name of TRL that trl_jax does not implement."""
        value = _MISSING if spec_of(self.__name__) is None else _installed_attribute(self.__name__, name)
        if value is _MISSING:  # a submodule that trl itself imported
            value = sys.modules.get(f"{self.__name__}.{name}", _MISSING)
        if value is not _MISSING:
            return value
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        check_not_experimental(name)
        if name in NEAR:
            return placeholder(name)
        names = sorted({n for m in MODULES[self.__name__] for n in public_names(importlib.import_module(m))})
        close = ", ".join(difflib.get_close_matches(name, names, n=3)) or "no similar name"
        note = "" if spec_of("trl") else ", and trl is not installed"
        raise ImportError(f"{self.__name__} has no {name} in trl_jax{note}. Closest: {close}.")


def _installed_attribute(fullname: str, name: str) -> Any:
    if fullname.startswith(_NEED_TRL_BASES):  # executed with our bases, they would raise
        if name.startswith("__"):
            return _MISSING
        with _installed_trl():
            return getattr(importlib.import_module(fullname), name, _MISSING)
    try:
        return getattr(_real(fullname), name)
    except AttributeError:
        return _MISSING


_MISSING = object()
# Modules of ours whose counterparts in trl derive from a trainer that we replace.
_NEED_TRL_BASES = tuple(f"trl.experimental.{name}" for name in EXPERIMENTAL if name not in TRAINERS)
_REAL: dict[str, ModuleType] = {}


def public_names(module: ModuleType) -> set[str]:
    """The public names of our module: its `__all__` or lazy names, else every class and function of this package."""
    if "__all__" in vars(module):
        return set(module.__all__)
    if "_WHERE" in vars(module):
        return set(module._WHERE)
    return {name for name, value in vars(module).items() if not name.startswith("_") and _is_from_trl_jax(value)}


def _is_from_trl_jax(value: Any) -> bool:
    return isinstance(value, type | _FUNCTION) and value.__module__.partition(".")[0] == "trl_jax"


_FUNCTION = type(install)


def spec_of(module: str) -> ModuleSpec | None:
    """The spec of a module, found without importing its parent packages; None if there is none."""
    parent, _, _ = module.rpartition(".")
    if not parent:
        return PathFinder.find_spec(module)
    above = spec_of(parent)
    if above is None or above.submodule_search_locations is None:
        return None
    return PathFinder.find_spec(module, above.submodule_search_locations)


def _real(fullname: str) -> ModuleType:
    """The module of the installed trl, kept out of sys.modules so that its own imports of trl find `Front`."""
    if fullname not in _REAL:
        spec = spec_of(fullname)
        module = importlib.util.module_from_spec(spec)
        front = sys.modules.get(fullname)
        sys.modules[fullname] = module
        try:
            spec.loader.exec_module(module)
            _REAL[fullname] = sys.modules[fullname]  # trl's packages replace themselves with lazy modules
        finally:
            if front is not None:
                sys.modules[fullname] = front
    return _REAL[fullname]


# Patches of torch, transformers and peft, applied when a script imports them: they translate old argument names, and
# answer GPU calls on a machine without one.


class Adjusting(Loader):
    """Loads a module of ADJUSTMENTS, then patches it."""

    def __init__(self, real: Loader):
        self._real = real

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._real.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__.loader = module.__loader__ = self._real  # importlib and inspect expect the real loader
        self._real.exec_module(module)
        ADJUSTMENTS[module.__name__](sys.modules[module.__name__])  # transformers' lazy modules replace themselves


def _accept_old_arguments(module: ModuleType) -> None:
    cls = module.TrainingArguments
    original = cls.__init__
    parameters = inspect.signature(original).parameters

    @functools.wraps(original)
    def init(self, *args: Any, **kwargs: Any) -> None:
        kwargs, environment, notes = translate_old_names(kwargs, parameters)
        _warn(environment, notes)
        original(self, *args, **kwargs)

    cls.__init__ = init


def _accept_old_flags(module: ModuleType) -> None:
    cls = module.HfArgumentParser
    original_parse, original_init = cls.parse_args_into_dataclasses, cls.__init__

    @functools.wraps(original_init)
    def init(self, dataclass_types: Any = None, **options: Any) -> None:
        from trl_jax.scripts.utils import drop_duplicate_fields  # imports the module that is patched here

        types = [dataclass_types] if isinstance(dataclass_types, type) else dataclass_types or ()
        original_init(self, drop_duplicate_fields(types), **options)

    @functools.wraps(original_parse)
    def parse(self, args: list[str] | None = None, *others: Any, **options: Any) -> tuple:
        from trl_jax.legacy.arguments import modern_flags
        from trl_jax.scripts.utils import allow_bare_booleans  # both import the module that is patched here

        allow_bare_booleans(self._actions)
        names = {action.dest for action in self._actions}
        flags, environment, notes = modern_flags(list(sys.argv[1:] if args is None else args), names)
        _warn(environment, notes)
        return original_parse(self, flags, *others, **options)

    cls.__init__, cls.parse_args_into_dataclasses = init, parse


def _warn(environment: dict[str, str], notes: list[str]) -> None:
    os.environ.update(environment)
    for note in notes:
        warnings.warn(note, FutureWarning, stacklevel=3)


def _patch_transformers(module: ModuleType) -> None:
    import_without_models()
    use_our_models(module)


def _patch_processors(module: ModuleType) -> None:
    accept_no_videos(module.ProcessorMixin)
    use_our_models(sys.modules["transformers"])  # its import executes transformers again, which replaces the module


def _patch_training_args(module: ModuleType) -> None:
    torch_for_scripts.patch_bf16(module)
    torch_for_scripts.patch_tf32(module)
    _accept_old_arguments(module)


def _patch_tokenizers(module: ModuleType) -> None:
    _restore_encode_plus(module)
    cls = module.PreTrainedTokenizerBase
    cls.apply_chat_template = watch_chat_template(cls.apply_chat_template)
    encode_without_torch(module)


def _restore_encode_plus(module: ModuleType) -> None:
    """Restore `encode_plus` and `batch_encode_plus`, which transformers 5 removed; both equal calling the tokenizer."""

    def encode(self, text: Any, *args: Any, **options: Any) -> Any:
        return self(text, *args, **options)

    for name in ("encode_plus", "batch_encode_plus"):
        if name not in vars(module.PreTrainedTokenizerBase):
            setattr(module.PreTrainedTokenizerBase, name, encode)


def _accept_our_adapters(module: ModuleType) -> None:
    """Make `peft.get_peft_model` accept our LoraConfig, which `trl.get_peft_config` returns."""
    original = module.get_peft_model

    @functools.wraps(original)
    def get_peft_model(model: Any, peft_config: Any, *args: Any, **options: Any) -> Any:
        from trl_jax.hub.torch_objects import as_pefts  # slow to import

        return original(model, as_pefts(peft_config), *args, **options)

    module.get_peft_model = get_peft_model
    if "get_peft_model" in vars(package := sys.modules.get("peft", module)):
        package.get_peft_model = get_peft_model


# Stand-ins for packages that a script imports but that are not installed

_STAND_INS = {
    "accelerate": ("PartialState", "Accelerator", "logging"),
    "accelerate.logging": ("get_logger",),
    "accelerate.utils": ("set_seed",),
    "bitsandbytes": ("nn",),
    "peft": (
        "LoraConfig", "TaskType", "PromptTuningConfig", "PromptTuningInit", "PromptEncoderConfig", "PrefixTuningConfig",
        "PromptEncoderReparameterizationType", "AutoPeftModelForCausalLM", "AutoPeftModelForSequenceClassification",
        "PeftConfig", "PeftModel", "PeftModelForCausalLM", "PeftModelForSequenceClassification", "get_peft_model",
        "prepare_model_for_kbit_training",
    ),
}  # fmt: skip
# Package -> advice for a script that needs more of it than its stand-in has.
ADVICE = {
    "accelerate": "trl_jax distributes a run itself: leave it out, or use PartialState or Accelerator for the rank.",
    "bitsandbytes": "trl_jax quantizes itself: pass quantization_config=BitsAndBytesConfig(...) of transformers, and "
    "optim='adamw_bnb_8bit' as an argument.",
    "peft": "trl_jax puts adapters on models itself: pass a LoraConfig as peft_config, instead of calling it.",
    "unsloth": "Unsloth replaces TRL's trainers and the code of models, and needs a GPU. Load the model with "
    "transformers, or pass its name, and pass a LoraConfig as peft_config.",
    "wandb": "Install it with pip install wandb, or leave it out and set report_to='none'.",
}


class StandIns(MetaPathFinder, Loader):
    """Finds stand-ins for peft, accelerate and bitsandbytes if they are not installed, only for imports by the script
    itself.

    Other packages, and a script that asks importlib, still find that they are not installed. Imports by the script of
    other missing modules of a package in `ADVICE` raise ModuleNotFoundError with that advice.
    """

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        package = fullname.partition(".")[0]
        if package not in ADVICE or not _imported_by_script():
            return None
        if fullname not in _STAND_INS:
            raise ModuleNotFoundError(f"No module named {fullname!r}. {ADVICE[package]}", name=fullname)
        _remember_missing()
        return ModuleSpec(fullname, self, is_package=fullname == "accelerate")

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: names are made on first use."""


def stands_in(module: str, name: str) -> bool:
    """Whether the stand-in for a missing package has this name; "" means the module itself."""
    if module.partition(".")[0] == "torch":
        return torch_for_scripts.has_name(f"{module}.{name}".rstrip("."))
    return module in _STAND_INS and (not name or name in _STAND_INS[module])


class _StandIn(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in _STAND_INS[self.__name__]:
            if name in _OF_ACCELERATE:
                return _OF_ACCELERATE[name]()
            if name == "prepare_model_for_kbit_training":
                return lambda model, *args, **options: model  # a trainer prepares the model by itself
            if name == "nn":
                return torch_for_scripts.quantized_layers()
            module = "trl_jax.hub.auto" if "peft" in name.lower() else "trl_jax.hub.peft_config"
            ours = getattr(importlib.import_module(module), name)
            return for_scripts(ours) if name.startswith("AutoPeft") else ours
        package = self.__name__.partition(".")[0]
        raise ImportError(f"{package} is not installed, and {name} is not in trl_jax. {ADVICE[package]}")


class _Rank:
    """The parts of accelerate's PartialState and Accelerator that are about ranks. JAX has one process per host."""

    device = "cpu"  # for tensors of the script; JAX chooses its own

    def __init__(self, *args: Any, **options: Any):
        pass

    @property
    def num_processes(self) -> int:
        import jax

        return jax.process_count() if jax.distributed.is_initialized() else 1

    @property
    def process_index(self) -> int:
        import jax

        return jax.process_index() if jax.distributed.is_initialized() else 0

    local_process_index = 0
    is_local_main_process = True

    @property
    def is_main_process(self) -> bool:
        return self.process_index == 0

    def wait_for_everyone(self) -> None:
        """Do nothing: trainers synchronize by themselves."""

    def print(self, *args: Any, **options: Any) -> None:
        if self.is_main_process:
            print(*args, **options)

    @contextlib.contextmanager
    def main_process_first(self) -> Iterator[None]:
        yield

    local_main_process_first = main_process_first

    def on_main_process(self, function: Callable) -> Callable:
        return function if self.is_main_process else lambda *args, **options: None

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"accelerate is not installed, and trl_jax's stand-in has no {name}. {ADVICE['accelerate']}"
        )


class _MainProcessLogger(logging.LoggerAdapter):
    """accelerate's logger: by default, only the main process logs."""

    def log(self, level: int, message: Any, *args: Any, **options: Any) -> None:
        main_process_only, in_order = options.pop("main_process_only", True), options.pop("in_order", False)
        if in_order or not main_process_only or _Rank().is_main_process:
            options["stacklevel"] = options.get("stacklevel", 1) + 1
            super().log(level, message, *args, **options)


def _get_logger(name: str, log_level: str | None = None) -> _MainProcessLogger:
    logger = logging.getLogger(name)
    if log_level is not None:
        logger.setLevel(log_level.upper())
    return _MainProcessLogger(logger, {})


# Name in accelerate -> a function that returns it.
_OF_ACCELERATE: dict[str, Callable[[], Any]] = {
    "PartialState": lambda: _Rank,
    "Accelerator": lambda: _Rank,
    "logging": lambda: _StandIn("accelerate.logging"),
    "get_logger": lambda: _get_logger,
    "set_seed": lambda: importlib.import_module("transformers").set_seed,
}


def _imported_by_script() -> bool:
    """Whether the import in progress is an import statement of the user's script, not a call of importlib."""
    frame = sys._getframe(2)
    while "importlib" in (file := frame.f_code.co_filename) or file == torch_for_scripts.__file__:
        if "importlib.util" in file or file.endswith("util.py") or frame.f_back is None:
            return False
        frame = frame.f_back
    return torch_for_scripts.is_script_file(file)


def _remember_missing() -> None:
    """Let transformers check now that these packages are missing; it caches the answers."""
    from transformers.utils import import_utils

    for name in ("is_peft_available", "is_accelerate_available", "is_bitsandbytes_available"):
        getattr(import_utils, name)()


def _quantize_without_torch(module: ModuleType) -> None:
    """Without torch, transformers' BitsAndBytesConfig cannot be created, so ours takes its place."""
    if importlib.util.find_spec("torch") is None:
        module.BitsAndBytesConfig = importlib.import_module("trl_jax.hub.quantization").BitsAndBytesConfig


class _DeepSpeedConfig:
    """Stands in for transformers' `HfDeepSpeedConfig`, which shards what `from_pretrained` loads."""

    def __init__(self, config_file_or_dict: Any):
        self.config = config_file_or_dict


def _shard_without_deepspeed(module: ModuleType) -> None:
    """Without deepspeed, transformers' config for it cannot be created. Only the argument `deepspeed` is read here."""
    if importlib.util.find_spec("deepspeed") is None:
        module.HfDeepSpeedConfig = _DeepSpeedConfig


# Module -> the patch applied after it is imported. Until the script imports a library, nothing here may import it:
# libraries read environment variables such as HF_HOME, which scripts set first, on import.
ADJUSTMENTS: dict[str, Callable[[ModuleType], None]] = {
    "peft.mapping_func": _accept_our_adapters,
    "torch": torch_for_scripts.patch_torch,
    "transformers": _patch_transformers,
    "transformers.hf_argparser": _accept_old_flags,
    "transformers.integrations.deepspeed": _shard_without_deepspeed,
    "transformers.modeling_utils": lambda module: torch_for_scripts.load_anywhere(module.PreTrainedModel),
    "transformers.models.auto.auto_factory": lambda module: torch_for_scripts.load_anywhere(module._BaseAutoModelClass),
    "transformers.models.auto.video_processing_auto": load_without_videos,
    "transformers.models.pixtral": load_pixtral_processor,
    "transformers.processing_utils": _patch_processors,
    "transformers.tokenization_utils_base": _patch_tokenizers,
    "transformers.trainer": lambda module: redirect_trainer_methods(module.Trainer),
    "transformers.trainer_utils": seed_our_stream,
    "transformers.training_args": _patch_training_args,
    "transformers.utils": torch_for_scripts.patch_bf16,
    "transformers.utils.quantization_config": _quantize_without_torch,
}
