"""Chat templates that mark the assistant's text: derived ones against TRL's, which are read if trl is installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from compat_tests.tiny import tiny_tokenizer
from trl_jax.data import chat_templates
from trl_jax.data.chat_templates import marked, render

TOKENS = {"bos_token": "<bos>", "eos_token": "<eos>"}
TOOLS = [{"type": "function", "function": {"name": "clock", "description": "the time", "parameters": {}}}]
# Templates whose training version is an edited one: TRL's renders another text, or a tool answers in the assistant's
# turn.
EDITED = {"deepseek_r1_distill", "deepseekv3", "diffusion_gemma", "glm4moe"}
# Templates that drop the thoughts of earlier turns: derived, like TRL's training versions, to render every turn like
# the last one.
AS_LAST = {"qwen3", "qwen3_5_nothink", "qwen3_5_think", "qwen3_6"}


def twins():
    trl = importlib.util.find_spec("trl")
    folders = [Path(place) / "chat_templates" for place in (trl.submodule_search_locations if trl else [])]
    return {file.stem.removesuffix("_training"): file for f in folders for file in sorted(f.glob("*_training.jinja"))}


def say(role, content, **more):
    return {"role": role, "content": content, **more}


def called(arguments):
    return [{"type": "function", "function": {"name": "clock", "arguments": arguments}}]


TALKS = {
    "one": [say("user", "When?"), say("assistant", "Now.")],
    "open": [say("user", "When?"), say("assistant", " Now. "), say("user", "So?")],
    "two": [say("user", "When?"), say("assistant", "Now."), say("user", "Why?"), say("assistant", "Because\n\nso.")],
    "system": [say("system", "Be kind."), say("user", "When?"), say("assistant", "Now.")],
    "tagged": [say("user", "When?"), say("assistant", "<think>\nHm.\n</think>\n\nNow."), say("user", "So?")],
    "thought": [say("user", "When?"), say("assistant", "Now.", reasoning_content="Hm."), say("user", "So?")],
    "call": [say("user", "When?"), say("assistant", "", tool_calls=called({"at": "noon"}))],
    "tool": [
        say("user", "When?"),
        say("assistant", "Wait.", tool_calls=called({"at": "noon"})),
        say("tool", "12", name="clock"),
        say("assistant", "Noon."),
        say("user", "So?"),
        say("assistant", "Eat."),
    ],
}
TALKS |= {
    f"{name}_parts": [m | {"content": [{"type": "text", "text": m["content"]}]} for m in talk]
    for name, talk in TALKS.items()
}


def told(template, talk, **options):
    """Text and spans, or None if the template raises."""
    tools = TOOLS if any(message["role"] == "tool" for message in talk) else None
    try:
        text, spans = render(template, talk, tools=tools, **TOKENS, **options)
    except Exception:
        return None
    return text, [mark for mark in range(len(text)) if any(start <= mark < end for start, end in spans)]


@pytest.mark.parametrize("name", twins())
def test_a_derived_template_is_trls(name):
    """For every conversation that the template accepts, the text and the marked spans are the same."""
    file = twins()[name]
    plain = file.with_name(f"{name}.jinja").read_text(encoding="utf-8")
    found, wanted = chat_templates.derived(plain), file.read_text(encoding="utf-8")
    assert (found is None) == (name in EDITED) == (chat_templates.edited(plain) is not None)
    if found is None:
        assert chat_templates.training_template(plain) == wanted
        return
    seen = 0
    for talk in TALKS.values():
        mine = told(found, talk, spans=True)
        text = told(plain, talk)
        assert (mine is None) == (text is None)
        assert mine is None or mine[0] == text[0] or name in AS_LAST
        if mine is not None:
            assert mine == told(wanted, talk, spans=True)
            seen += bool(mine[1])
    assert seen >= 4


def asked_again(content, **more):
    return [say("user", "When?"), say("assistant", content, **more), say("tool", "12", name="clock")]


MORE_TALKS = [
    asked_again("Wait.", tool_calls=called({"at": "noon"}) * 2) + [say("tool", "13", name="clock")],
    asked_again(None, tool_calls=called('{"at": 1}') * 2) + [say("assistant", "Noon.")],
    asked_again("", tool_calls=called({})) + [say("system", "Be brief."), say("assistant", "Noon.")],
    [say("user", "When?"), say("assistant", "Now."), say("system", "Be brief."), say("user", "So?")],
    [say("system", "Be kind."), say("system", "Be brief."), say("user", "When?"), say("assistant", "Now.")],
    [say("user", "When?"), say("assistant", "Now."), say("assistant", "Or then."), say("tool", "12", name="clock")],
    [say("tool", "12", name="clock"), say("tool", [{"output": "13"}]), say("assistant", "Now.")],
    asked_again("<think>Hm.</think>Wait.", tool_calls=called({"at": [1, {"b": "c"}]})),
]


@pytest.mark.parametrize("name", sorted(EDITED & twins().keys()))
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_an_edited_template_is_trls(name, newline, monkeypatch):
    """The same text and spans, with and without a generation prompt; it raises if the original raises."""
    file, seen = twins()[name], 0
    plain = file.with_name(f"{name}.jinja").read_text(encoding="utf-8")
    wanted = file.read_text(encoding="utf-8")
    monkeypatch.setattr(chat_templates, "_trl_training_template", lambda text: None)
    found = chat_templates.training_template(plain.replace("\n", newline))
    assert chat_templates.has_generation_markers(found) and chat_templates.edited(found) is None
    for talk in (*TALKS.values(), *MORE_TALKS):
        for more in ({}, {"add_generation_prompt": True}, {"enable_thinking": False}):
            mine = told(found, talk, spans=True, **more)
            assert mine == told(wanted, talk, spans=True, **more)
            seen += bool(mine and mine[1])
    assert seen >= 24


CHATML = (
    "{%- for m in messages %}\n    {{- '<|im_start|>' + m.role }}\n{% if m.content %}{{ m.content }}{% endif %}"
    "<|im_end|>\n{% endfor %}\n{%- if add_generation_prompt %}\n    {{- '<|im_start|>assistant\n' }}\n{%- endif %}"
)


def test_an_unknown_template_is_marked_too():
    found = chat_templates.training_template(CHATML)
    text, marks = told(found, TALKS["two"], spans=True)
    assert text == told(CHATML, TALKS["two"])[0]
    assert "".join(text[mark] for mark in marks) == "Now.<|im_end|>\nBecause\n\nso.<|im_end|>\n"


@pytest.mark.parametrize("space", ["", " "])
def test_a_template_without_a_generation_prompt_is_marked(space):
    template = (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
        "{% elif m.role == 'assistant' %}{{ ' ' + m.content + eos_token + '" + space + "' }}{% else %}"
        "{{ raise_exception('Only user and assistant') }}{% endif %}{% endfor %}"
    )
    found = chat_templates.training_template(template)
    text, marks = told(found, TALKS["two"], spans=True)
    assert text == told(template, TALKS["two"])[0]
    assert "".join(text[mark] for mark in marks) == " Now.<eos> Because\n\nso.<eos>"


@pytest.mark.parametrize(
    "template",
    {
        "no turns": "{{ messages | tojson }}",
        "no prompt": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
        "by number": "{% for i in range(messages | length) %}{{ messages[i].role }}: {{ messages[i].content }}\n"
        "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}",
        "forgets": "{% for m in messages %}{{ m.role }}: {% if loop.last or m.role == 'user' %}{{ m.content }}"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}",
        "leaves": "{% for m in messages %}{{ m.role }}: {{ m.content }}{% if loop.last %}{% break %}{% endif %}\n"
        "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}",
        "drops": "{% for m in messages %}{{ m.role }}: {{ m.content.split('</think>')[-1] }}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}",
        "quotes": "{% for m in messages %}{{ m.role }}: {{ m.content }}{% if not loop.first %} after "
        "{{ messages[0].content }}{% endif %}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}",
        "broken": "{% for m in messages %}",
    }.items(),
    ids=lambda item: item[0],
)
def test_a_template_that_cannot_be_marked_is_refused(template):
    with pytest.raises(ValueError, match=r"is not training-compatible \(missing prefix-preservation or `{%"):
        chat_templates.training_template(template[1])


def test_a_loop_that_is_left_early_says_so():
    found = marked("{% for m in messages %}{{ m.role }}{% break %}{% endfor %}", "assistant")
    with pytest.raises(Exception, match="ends within its loop"):
        render(found, TALKS["two"][1:], **TOKENS)


@pytest.mark.parametrize(("end", "wanted"), [("{{ eos_token }}", True), ("{{ m.content }}", False)])
def test_whether_the_stop_token_is_trained(end, wanted):
    tokenizer = tiny_tokenizer(chat_template=True)
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        + end
        + "{% endgeneration %}{% else %}{{ m.content }}{% endif %}\n{% endfor %}"
    )
    assert chat_templates.stop_token_is_trained(tokenizer, None) is wanted
