"""Chat templates and tools: whether a template shows a tool's call and answer, and does not rewrite what is before."""

from __future__ import annotations

from typing import Any

from jinja2 import TemplateError

from trl_jax.data.rows.multimodal import prepare_multimodal_messages
from trl_jax.data.rows.templates.rendering import apply_chat_template
from trl_jax.data.rows.templates.training import has_generation_markers, training_template

# What a template may leave out of a tool's call and answer: words that stand in no template.
_TOOL, _ARGUMENT, _VALUE, _ANSWER = "called_by_name_7f3a", "with_argument_5c1e", "of_this_value_9b2d", "gives_that_4e8f"


def supports_tool_calling(processing_class: Any) -> bool:
    """Whether the chat template shows a tool's call, its arguments and the tool's answer; many leave out one of them.

    Some templates want arguments as a dict, some as JSON.
    """
    if processing_class.chat_template is None:
        return False
    try:
        text = _tool_talk(processing_class, {_ARGUMENT: _VALUE})
    except TemplateError:
        return False
    except TypeError:
        try:
            text = _tool_talk(processing_class, f'{{"{_ARGUMENT}": "{_VALUE}"}}')
        except TemplateError:
            return False
    return all(word in text for word in (_TOOL, _ARGUMENT, _VALUE, _ANSWER))


def _tool_talk(processing_class: Any, arguments: dict | str) -> str:
    talk = _messages(processing_class, _TOOL, arguments, _ANSWER, None)
    return apply_chat_template(processing_class, talk, tokenize=False)


def _messages(processing_class: Any, tool: str, arguments: dict | str, answer: str, images: list | None) -> list:
    """A question, the call of a tool, and what it answers; in parts where the processor reads images too."""
    call = {"type": "function", "function": {"name": tool, "arguments": arguments}}
    talk = [
        {"role": "user", "content": "Ask."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": tool, "content": answer},
    ]
    return prepare_multimodal_messages(talk, images) if _reads_images(processing_class) else talk


def _reads_images(processing_class: Any) -> bool:
    from transformers import ProcessorMixin

    return isinstance(processing_class, ProcessorMixin)


def is_chat_template_prefix_preserving(processing_class: Any) -> bool:
    """Whether the messages before a tool's answer are rendered the same without it."""
    try:
        return _keeps_prefix(processing_class, {})
    except TypeError:  # templates that want arguments as JSON
        return _keeps_prefix(processing_class, "{}")


def _keeps_prefix(processing_class: Any, arguments: dict | str) -> bool:
    seen = _reads_images(processing_class)
    talk = _messages(processing_class, "tool", arguments, "answer", [_image()] if seen else None)
    how = {"tokenize": True, "return_dict": False}
    before = apply_chat_template(processing_class, talk[:2], **how)
    whole = apply_chat_template(processing_class, talk, add_generation_prompt=True, **how)
    before, whole = (before[0], whole[0]) if seen else (before, whole)
    return whole[: len(before)] == before


def _image() -> Any:
    from PIL import Image

    return Image.new("RGB", (8, 8))


def template_for_training(processing_class: Any) -> str | None:
    """None where the template marks what the assistant says and, if it knows tools, renders what is before a tool's
    answer as without it; else one that does.

    Raises:
        ValueError: there is no such template.
    """
    template = processing_class.chat_template
    text = template["default"] if isinstance(template, dict) else template
    kept = not supports_tool_calling(processing_class) or is_chat_template_prefix_preserving(processing_class)
    return None if kept and has_generation_markers(text) else training_template(text)
