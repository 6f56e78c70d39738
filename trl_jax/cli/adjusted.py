"""Modules of torch and transformers that scripts import, adjusted when they are: to know old names of arguments, and
words of GPUs on a computer without one."""

from __future__ import annotations

import functools
import inspect
import os
import sys
import warnings
from collections.abc import Callable
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from trl_jax.cli.notes import watching_templates
from trl_jax.core.arguments.renamed import translated
from trl_jax.core.arguments.renamed_flags import modern_flags
from trl_jax.core.called_by_name import answer_by_name
from trl_jax.hub.torch import gpu_words


class Adjusting(Loader):
    """Loads a module of ADJUSTMENTS, and adjusts it."""

    def __init__(self, real: Loader):
        self._real = real

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._real.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__.loader = module.__loader__ = self._real  # as others will look for it
        self._real.exec_module(module)
        ADJUSTMENTS[module.__name__](module)


def _let_arguments_be_old(module: ModuleType) -> None:
    kind = module.TrainingArguments
    plain = kind.__init__
    known = inspect.signature(plain).parameters

    @functools.wraps(plain)
    def init(self, *args: Any, **kwargs: Any) -> None:
        kwargs, environment, notes = translated(kwargs, known)
        _tell(environment, notes)
        plain(self, *args, **kwargs)

    kind.__init__ = init


def _let_flags_be_old(module: ModuleType) -> None:
    kind = module.HfArgumentParser
    plain, plain_init = kind.parse_args_into_dataclasses, kind.__init__

    @functools.wraps(plain_init)
    def init(self, dataclass_types: Any = None, **options: Any) -> None:
        from trl_jax.scripts.utils import without_doubles  # which imports what is adjusted here

        kinds = [dataclass_types] if isinstance(dataclass_types, type) else dataclass_types or ()
        plain_init(self, without_doubles(kinds), **options)

    @functools.wraps(plain)
    def parse(self, args: list[str] | None = None, *others: Any, **options: Any) -> tuple:
        from trl_jax.scripts.utils import take_bare  # which imports what is adjusted here

        take_bare(self._actions)
        names = {action.dest for action in self._actions}
        flags, environment, notes = modern_flags(list(sys.argv[1:] if args is None else args), names)
        _tell(environment, notes)
        return plain(self, flags, *others, **options)

    kind.__init__, kind.parse_args_into_dataclasses = init, parse


def _tell(environment: dict[str, str], notes: list[str]) -> None:
    os.environ.update(environment)
    for note in notes:
        warnings.warn(note, FutureWarning, stacklevel=3)


def _arguments(module: ModuleType) -> None:
    gpu_words.answer_bf16(module)
    gpu_words.answer_tf32(module)
    _let_arguments_be_old(module)


def _tokenizers(module: ModuleType) -> None:
    _let_tokenizers_encode(module)
    kind = module.PreTrainedTokenizerBase
    kind.apply_chat_template = watching_templates(kind.apply_chat_template)


def _let_tokenizers_encode(module: ModuleType) -> None:
    """Give tokenizers `encode_plus` and `batch_encode_plus` again, which transformers 5 no longer has: to call the
    tokenizer was always the same."""

    def encode(self, text: Any, *args: Any, **options: Any) -> Any:
        return self(text, *args, **options)

    for name in ("encode_plus", "batch_encode_plus"):
        if name not in vars(module.PreTrainedTokenizerBase):
            setattr(module.PreTrainedTokenizerBase, name, encode)


def _take_our_adapters(module: ModuleType) -> None:
    """Let `peft.get_peft_model` take a LoraConfig of ours, as `trl.get_peft_config` returns it."""
    plain = module.get_peft_model

    @functools.wraps(plain)
    def get_peft_model(model: Any, peft_config: Any, *args: Any, **options: Any) -> Any:
        from trl_jax.hub.torch.objects import as_pefts  # and much with it

        return plain(model, as_pefts(peft_config), *args, **options)

    module.get_peft_model = get_peft_model
    if "get_peft_model" in vars(package := sys.modules.get("peft", module)):
        package.get_peft_model = get_peft_model


# A module's name -> what is done to it after it was imported.
ADJUSTMENTS: dict[str, Callable[[ModuleType], None]] = {
    "peft.mapping_func": _take_our_adapters,
    "torch": gpu_words.answer,
    "transformers.hf_argparser": _let_flags_be_old,
    "transformers.modeling_utils": lambda module: gpu_words.load_anywhere(module.PreTrainedModel),
    "transformers.models.auto.auto_factory": lambda module: gpu_words.load_anywhere(module._BaseAutoModelClass),
    "transformers.tokenization_utils_base": _tokenizers,
    "transformers.trainer": lambda module: answer_by_name(module.Trainer),
    "transformers.training_args": _arguments,
    "transformers.utils": gpu_words.answer_bf16,
}
