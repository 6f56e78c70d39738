"""How calls of tools are told from text, for tokenizers without a `response_template` of their own.

Forms are known by what a chat template makes of a call: Qwen's two, which many others have taken over.
"""

from __future__ import annotations

import re
from typing import Any

from trl_jax.data.rows.templates.rendering import apply_chat_template


def _chatml(tool_calls: dict[str, Any]) -> dict[str, Any]:
    """A template, in transformers' words, for turns between <|im_start|> and <|im_end|>."""
    repeated = {"close_pattern": r"</tool_call>\s*", "repeats": True}
    return {
        "defaults": {"role": "assistant"},
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "reasoning_content": {"open": "<think>", "close_pattern": r"</think>\s*", "content": "text"},
            "tool_calls": tool_calls | repeated,
            "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"},
        },
    }


# What the call of f(a="b") looks like -> how such calls are read.
_FORMS = {
    r'<tool_call>\s*\{"name": "f", "arguments": \{"a": "b"\}\}\s*</tool_call>': _chatml({
        "open": "<tool_call>",
        "content": "json",
        "transform": {"type": "function", "function": "{content}"},
    }),
    r"<tool_call>\s*<function=f>\s*<parameter=a>\s*b\s*</parameter>\s*</function>\s*</tool_call>": _chatml({
        "open_pattern": r"<tool_call>\s*<function=(?P<name>[^\n>]+)>",
        "content": "xml-inline",
        "content_args": {
            "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>",
            "value_parser": {"name": "text"},  # which the function's annotations say more of
        },
        "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
    }),
}  # fmt: skip
_TURN = r"<\|im_start\|>assistant\n.*{call}\s*<\|im_end\|>"


def response_template(tokenizer: Any) -> dict[str, Any]:
    """The `response_template` that goes with a tokenizer's chat template.

    Raises:
        ValueError: it writes calls of tools in another form.
    """
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": "b"}}}
    talk = [{"role": "user", "content": "-"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    text = apply_chat_template(tokenizer, talk, tokenize=False)
    for form, template in _FORMS.items():
        if re.search(_TURN.replace("{call}", form), text, re.DOTALL):
            return template
    raise ValueError(
        "The chat template writes calls of tools in a form that trl_jax does not know. Set "
        "tokenizer.response_template, which says how transformers' tokenizer.parse_response tells them from text; "
        "trl.chat_template_utils.add_response_schema(tokenizer) sets it for the templates that TRL knows."
    )
