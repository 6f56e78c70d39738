"""Torch models in which a script has changed more than weights and config: JAX computes by these alone."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Iterator
from functools import partial
from typing import Any

logger = logging.getLogger(__name__)

# Whose functions, put on a module, leave what it computes as it is.
_KNOWN = ("transformers", "accelerate", "peft", "trl", "torch", "liger_kernel")
# Of scripts, by the names that peft's and transformers' documents give them; they only ask for gradients.
_HARMLESS = ("make_inputs_require_grad", "make_inputs_require_grads")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_NEAR = 0.02  # relative: a buffer that was cast to sixteen bits is the same


def unwrap_head(base: Any) -> None:
    """Let a score head be its linear layer again where a script has put dropout around it, in a model whose dropout
    does not count: they compute the same, and `score.weight` is what transformers reads, `score.1.weight` is not."""
    import torch

    for name, module in list(base.named_children()):
        if type(module) is not torch.nn.Sequential:
            continue
        layers = [part for part in module if type(part) not in (torch.nn.Dropout, torch.nn.Identity)]
        if len(layers) == 1 and type(layers[0]) is torch.nn.Linear:
            setattr(base, name, layers[0])
            logger.warning(
                "model.%s has dropout around its linear layer, which disable_dropout=True leaves out: it is that layer "
                "now, and saved as %s.weight.", name, name,
            )  # fmt: skip


def check_unaltered(model: Any, base: Any, *, plain: bool, dropout: bool = True) -> None:
    """Raise ValueError for a model that would compute, or train, otherwise than one of its config with its weights.

    Args:
        base: the model without an adapter of peft's.
        plain: whether its modules are those of transformers: it has no adapter, and no weights in few bits.
        dropout: whether its dropout counts.
    """
    found = [*_functions(model), *_gradient_hooks(model), *_tied(base)]
    if plain:
        found += _modules(base, dropout)
    if found:
        raise ValueError(
            f"model is a {type(base).__qualname__} that was changed after it was made: {found[0]}. JAX computes what "
            "its config says, with its weights, and would pass this over. Say it in the config that the model is "
            "loaded with, or leave it out."
        )


def _functions(model: Any) -> Iterator[str]:
    for name, module in model.named_modules():
        own = vars(module)
        if "forward" in own and "_hf_hook" not in own and not _is_known(own["forward"]):
            yield f"{name}.forward is a function of the script's"
        for kind in _HOOKS:
            for hook in own[kind].values():
                if not _is_known(hook):
                    yield f"{name} has a hook of the script's, {_name_of(hook)}"


def _gradient_hooks(model: Any) -> Iterator[str]:
    for name, parameter in model.named_parameters():
        if name.startswith("prompt_encoder."):
            continue  # where peft has hooks of its own
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            yield f"the gradient of {name} has a hook"


def _tied(base: Any) -> Iterator[str]:
    head, table = base.get_output_embeddings(), base.get_input_embeddings()
    if head is not None and head.weight is table.weight and not base.config.get_text_config().tie_word_embeddings:
        yield "its head and its embedding are one, and its config has tie_word_embeddings=False"


def _modules(base: Any, dropout: bool) -> Iterator[str]:
    """Modules and constants that another model of its config has otherwise; that one has no numbers, nor memory."""
    import torch

    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        twin = dict(type(base)(copy.deepcopy(base.config)).named_modules())
    for name, module in base.named_modules():
        if name not in twin:
            continue  # whose weights, if it has any, do not fit
        if type(module) is not type(twin[name]):
            yield f"{name} is a {type(module).__qualname__}, and by its config a {type(twin[name]).__qualname__}"
            continue
        for key, value in vars(twin[name]).items():
            drops = isinstance(module, torch.nn.Dropout) or "dropout" in key
            if type(value) is float and vars(module).get(key) != value and (dropout or not drops):
                yield f"{name}.{key} is {vars(module).get(key)}, and by its config {value}"
        yield from _buffers(name, module)


def _buffers(name: str, module: Any) -> Iterator[str]:
    """Of a module that is made of a config alone, those of its buffers that are not saved and are others by now."""
    import torch

    wanted = [key for key in module._non_persistent_buffers_set if vars(module)["_buffers"][key] is not None]
    if not wanted or "config" not in vars(module) or _needs_more_than_a_config(type(module)):
        return
    if any(word in str(vars(module).get("rope_type")) for word in ("dynamic", "longrope")):
        return  # which follow the longest text
    with torch.random.fork_rng(devices=[]):
        made = type(module)(copy.deepcopy(module.config))
    for key in wanted:
        ours, theirs = (dict(one.named_buffers(recurse=False))[key].float().cpu() for one in (module, made))
        if ours.shape != theirs.shape or not torch.allclose(ours, theirs, rtol=_NEAR, atol=0.0):
            yield f"{name}.{key} has other numbers than by its config"


def _needs_more_than_a_config(kind: type) -> bool:
    parameters = list(inspect.signature(kind.__init__).parameters.values())[1:]
    needed = [one.name for one in parameters if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD]
    return needed != ["config"]


def _is_known(function: Any) -> bool:
    if isinstance(function, partial):
        function = function.func
    return str(function.__module__).partition(".")[0] in _KNOWN or _name_of(function) in _HARMLESS


def _name_of(function: Any) -> str:
    return function.__name__ if "__name__" in dir(function) else type(function).__qualname__
