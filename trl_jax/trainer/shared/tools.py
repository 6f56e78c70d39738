"""The functions and environments that a script lets its model act by: checked, and with how the tokenizer tells calls
from text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trl_jax.data.rows.templates.response_templates import response_template
from trl_jax.data.rows.templates.tool_calls import (
    is_chat_template_prefix_preserving,
    supports_tool_calling,
    template_for_training,
)
from trl_jax.engine.devices.processes import several
from trl_jax.rollout.environments import Environments, methods_of
from trl_jax.rollout.tools import Tools


def tools_of(
    functions: Sequence[Callable],
    environments: Environments | None,
    tokenizer: Any,
    template_options: Mapping[str, Any],
    *,
    most_turns: int | None,
    longest: int,
    positions: int | None,
    vocab_size: int,
) -> tuple[Tools, dict[str, Any]]:
    """The tools of a run, and the further arguments of the chat template with which prompts are rendered.

    Args:
        environments: whose methods are tools, too; None: there are none.
        tokenizer: gets a `response_template`, if it has none.
        most_turns, longest, positions, vocab_size: as of `Tools`.

    Raises:
        TypeError: a tool is no function, or lacks the annotations and the docstring that say what it takes.
        ValueError: two tools have one name; several processes; a chat template that shows no calls or answers, or
            writes calls in a form that is not known.
    """
    found = _checked(functions)
    for environment in () if environments is None else environments.probes:
        _checked([*functions, *methods_of(environment)])
    if several():
        raise ValueError(
            "tools= and environment_factory= with several processes are not in this release of trl_jax. Start a "
            "single one."
        )
    if not supports_tool_calling(tokenizer):
        raise ValueError(
            "The provided chat template does not support tool calling. The template must be able to render a full "
            "tool-calling conversation (user -> assistant with tool_calls -> tool)."
        )
    if vars(tokenizer).get("response_template") is None:
        tokenizer.response_template = response_template(tokenizer)
    options = dict(template_options)
    if not is_chat_template_prefix_preserving(tokenizer):
        options["chat_template"] = template_for_training(tokenizer)
    tools = Tools(found, environments, tokenizer, options, most_turns, longest, positions, vocab_size)
    return tools, options if environments is not None else options | {"tools": list(found.values())}


def _checked(functions: Sequence[Callable]) -> dict[str, Callable]:
    from transformers.utils import get_json_schema

    found: dict[str, Callable] = {}
    for function in functions:
        if not callable(function):
            raise TypeError(f"tools has {function!r}, wanted functions.")
        try:
            name = get_json_schema(function)["function"]["name"]
        except Exception as error:  # transformers has classes of its own for what is missing
            name = getattr(function, "__name__", type(function).__name__)
            raise TypeError(
                f"tools: of {name} the model would not know how to call it: {error}. Annotate its arguments, and "
                "describe each under Args: in its docstring."
            ) from error
        if name in found:
            raise ValueError(f"tools has two functions {name!r}, and the model calls them by name. Rename one.")
        found[name] = function
    return found
