"""Response templates, which parse tool calls, are derived from how a chat template renders one."""

from __future__ import annotations

from pathlib import Path

import pytest
from jinja2 import TemplateError

from compat_tests.tiny import tiny_tokenizer
from trl_jax.data.chat_templates import response_template


def call(name, arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


USER = {"role": "user", "content": "-"}
ANSWERS = [
    {"content": "Hi there"},
    {"content": "", "tool_calls": [call("get", {"x": "b", "n": 3, "deep": {"y": [1, {"z": "w"}]}})]},
    {"content": "So", "tool_calls": [call("get", {"x": "7, (8)"}), call("ping", {})]},
    {"content": "Yes", "reasoning_content": "Hm", "thinking": "Hm"},
]
TRLS = (
    "deepseek_r1_distill gemma4 gemma4_v2 gemma4_v5 glm4moe gptoss lfm2_v2 lfm2_2_5_vl llama3_1 llama3_2 "
    "nemotron_3_5_lightning nemotron_3_nano nemotron_3_super nemotron_3_ultra qwen2_5 qwen3 qwen3_5_nothink "
    "qwen3_5_think qwen3_8 qwen3_instruct_2507 qwen3_vl"
).split()


def get(x: str, n: int, deep: dict):
    """Gets.

    Args:
        x: a text
        n: a number
        deep: a mapping
    """


def responses(tokenizer):
    """Possible responses after a prompt: (prompt, response), complete and truncated."""
    prompt = tokenizer.apply_chat_template([USER], tokenize=False, add_generation_prompt=True)
    for answer in ANSWERS:
        try:
            text = tokenizer.apply_chat_template([USER, {"role": "assistant", **answer}], tokenize=False)
        except TemplateError:  # only one call per turn
            continue
        start = prompt if text.startswith(prompt) else prompt.removesuffix("<think>\n").removesuffix("\n")
        if text.startswith(start):
            said = text.removeprefix(start)
            yield from ((prompt, said), (prompt, said[: len(said) // 2]))


def message(tokenizer, said, **how):
    """The parsed message; None if the JSON of a call is truncated."""
    try:
        return tokenizer.parse_response(said, **how)
    except ValueError:
        return None


@pytest.mark.parametrize("name", TRLS)
def test_calls_are_parsed_as_by_trls_templates(name):
    trls = pytest.importorskip("trl.chat_template_utils")
    tokenizer = tiny_tokenizer(bos="<s>")
    folder = Path(trls.__file__).parent / "chat_templates"
    tokenizer.chat_template = (folder / f"{name}.jinja").read_text(encoding="utf-8")
    ours = response_template(tokenizer)
    trls.add_response_schema(tokenizer)
    found = calls = 0
    for prompt, said in responses(tokenizer):
        for tools in (None, [get]):
            parsed = message(tokenizer, said, schema=ours, prefix=prompt, tools=tools)
            assert parsed == message(tokenizer, said, prefix=prompt, tools=tools), said
            found, calls = found + 1, calls + len((parsed or {}).get("tool_calls", ()))
    assert found >= 8 and (calls >= 2 or name.startswith("deepseek"))


def test_each_tokenizer_gets_a_template_of_its_own():
    template = "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    template += "{% for call in message.tool_calls %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    template += "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    tokenizer = tiny_tokenizer(chat_template=template)
    response_template(tokenizer)["fields"].clear()
    said = 'So<tool_call>{"name": "get", "arguments": {"x": "b"}}</tool_call><|im_end|>'
    parsed = tokenizer.parse_response(said, schema=response_template(tokenizer), prefix="<|im_start|>assistant\n")
    assert parsed == {"role": "assistant", "content": "So", "tool_calls": [call("get", {"x": "b"})]}
