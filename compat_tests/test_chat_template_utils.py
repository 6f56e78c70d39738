"""Utilities for chat templates against TRL's."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path

import pytest

from compat_tests.tiny import tiny_tokenizer
from trl_jax import chat_template_utils
from trl_jax.data.chat_templates import prepare_multimodal_messages

MARKED = (
    "{% for m in messages %}<{{ m['role'] }}>{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}"
    "{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
)
# Calls are rendered as JSON of a dict; as text; without arguments; and a template where the last tool response changes
# earlier text.
TOOLS = {
    "dict": "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}"
    "{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}",
    "text": "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}"
    "{{ '' + c.function.arguments }}{% endfor %}{% endfor %}",
    "nameless": "{% for m in messages %}{{ m.content }}{{ (m.tool_calls or [{}])[0].type }}{% endfor %}",
    "changing": "{{ messages | length }}{% for m in messages %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}{% endfor %}{% generation %}"
    "{% endgeneration %}",
    "strict": "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "{{ m.content }}{% endfor %}",
}


def of_trl():
    trl = importlib.util.find_spec("trl")
    folders = trl.submodule_search_locations if trl else []
    return sorted(file for place in folders for file in (Path(place) / "chat_templates").glob("*.jinja"))


def told(function, *given):
    try:
        return function(*given)
    except ValueError:
        return ValueError


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer(None, chat_template=True)


@pytest.mark.parametrize(
    "template", [None, MARKED, *TOOLS.values(), *of_trl()], ids=lambda t: t.stem if isinstance(t, Path) else None
)
def test_templates_are_judged_as_trl_judges_them(tokenizer, template):
    theirs = pytest.importorskip("trl.chat_template_utils")
    tokenizer.chat_template = template.read_text(encoding="utf-8") if isinstance(template, Path) else template
    assert chat_template_utils.supports_tool_calling(tokenizer) == theirs.supports_tool_calling(tokenizer)
    if template is None:
        return
    assert chat_template_utils.has_generation_markers(tokenizer.chat_template) == theirs.has_generation_markers(
        tokenizer.chat_template
    )
    if chat_template_utils.supports_tool_calling(tokenizer):
        kept = chat_template_utils.is_chat_template_prefix_preserving(tokenizer)
        assert kept == theirs.is_chat_template_prefix_preserving(tokenizer)
    wanted = told(theirs.get_training_chat_template, tokenizer)
    if wanted is not ValueError:  # for templates that TRL does not know, ours may be derived
        assert told(chat_template_utils.get_training_chat_template, tokenizer) == wanted


def test_without_a_replacement(tokenizer, monkeypatch):
    tokenizer.chat_template = TOOLS["dict"]
    assert chat_template_utils.supports_tool_calling(tokenizer)
    with pytest.raises(ValueError, match="not training-compatible .* patching is not supported for this template. Ed"):
        chat_template_utils.get_training_chat_template(tokenizer)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for file in of_trl():
        if file.stem == "qwen2_5":
            tokenizer.chat_template = file.read_text(encoding="utf-8")
            assert "{% generation %}" in chat_template_utils.get_training_chat_template(tokenizer)
    tokenizer.chat_template = MARKED
    with pytest.warns(FutureWarning, match="tokenizer= is now processing_class="):
        assert chat_template_utils.get_training_chat_template(tokenizer=tokenizer) is None
    with pytest.raises(TypeError, match="Pass only processing_class"):
        chat_template_utils.get_training_chat_template(tokenizer, tokenizer)
    with pytest.raises(TypeError, match="missing 1 required argument: 'processing_class'"):
        chat_template_utils.get_training_chat_template()


PLACE, TEXT = {"type": "image"}, {"type": "text", "text": "What?"}
TALKS = [
    [{"role": "system", "content": "Hm."}, {"role": "user", "content": "What?"}, {"role": "user", "content": "So?"}],
    [{"role": "user", "content": [PLACE, TEXT, PLACE]}, {"role": "assistant", "content": "That."}],
    [{"role": "user", "content": [PLACE, TEXT, PLACE | {"image": "held"}, PLACE]}],
    [{"role": "user", "content": [TEXT]}, {"role": "user", "content": "What?"}],
    [{"role": "user", "content": [PLACE] * 2}, {"role": "tool", "content": [PLACE]}, {"role": "assistant"}],
    [{"role": "user", "content": "What?"}, {"role": "assistant", "tool_calls": []}],
]  # fmt: skip


@pytest.mark.parametrize("talk", TALKS)
@pytest.mark.parametrize("images", [None, [], ["a", "b"], ["a"]])
def test_images_come_into_messages_as_in_trl(talk, images):
    theirs = pytest.importorskip("trl.data_utils").prepare_multimodal_messages
    before = copy.deepcopy(talk)
    assert told(prepare_multimodal_messages, talk, images) == told(theirs, copy.deepcopy(talk), images)
    assert talk == before


def test_messages_that_cannot_be_prepared():
    with pytest.raises(ValueError, match="Invalid role in message: judge. Expected system, user, assistant, tool."):
        prepare_multimodal_messages([{"role": "judge", "content": "x"}])
    with pytest.raises(ValueError, match=r"images provided \(1\) does not match number of image placeholders \(2\)."):
        prepare_multimodal_messages(TALKS[1], ["a"])
