"""Tools: functions that the model calls between the turns of a completion."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import trl

from compat_tests.tiny import tiny_tokenizer
from trl_jax.data.chat import PartsTokenizer
from trl_jax.data.chat_templates import response_template
from trl_jax.rollout.rollout import EncodedTexts
from trl_jax.rollout.tools import Environments, ToolCaller, Tools, tools_of
from trl_jax.training.policy_generator import PolicyGenerator, Sampling

# Turns are delimited by <|im_start|> and <|im_end|>; tool calls are JSON, or tags with parameters.
TURN = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content }}"
    "{%- for call in m.tool_calls or [] %}{{- '<tool_call>' + CALL + '</tool_call>' }}{%- endfor %}"
    "{{- '<|im_end|>\\n' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
JSON = """'{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson + '}'"""
TAGS = (
    "'<function=' + call.function.name + '>' }}{%- for k, v in (call.function.arguments or {}).items() %}"
    "{{- '<parameter=' + k + '>' + v | string + '</parameter>' }}{%- endfor %}{{- '</function>'"
)
FORMS = {"json": TURN.replace("CALL", JSON), "tags": TURN.replace("CALL", TAGS)}
CALLS = {
    "json": '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>',
    "tags": "<tool_call><function=add><parameter=a>1</parameter><parameter=b>2</parameter></function></tool_call>",
}
END = "<|im_end|>"


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: one.
        b: the other.
    """
    return a + b


async def echo(word: str) -> str:
    """Say a word again.

    Args:
        word: what is said.
    """
    await asyncio.sleep(0)
    if word == "bad":
        raise RuntimeError("not that")
    return word


def draw(what: str) -> list:
    """Draw a picture.

    Args:
        what: is drawn.
    """
    return [{"type": "text", "text": what}, {"type": "image", "image": what}]


def tokenizer_of(form):
    made = tiny_tokenizer(eos=END)
    made.chat_template = FORMS[form]
    return made


def tools(form="json", **limits):
    limits = {"most_turns": None, "longest": 200, "positions": None, "vocab_size": 10_000} | limits
    return tools_of([add, echo], None, tokenizer_of(form), {}, **limits)


def call(name, **arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


class Model:
    """A fake model that replies to every prompt, in every turn, with the first text."""

    def __init__(self, tokenizer, *texts):
        self.tokenizer, self.texts, self.asked = tokenizer, list(texts), []

    def __call__(self, texts, rooms):
        assert texts.images is None and min(rooms) > 0
        self.asked.append([self.tokenizer.decode(own) for own in texts.ids])
        return [np.asarray(self.tokenizer(self.texts[0])["input_ids"], np.int32) for _ in texts.ids], None


def completed(made, first, *later):
    words, asked = made.tokenizer, [{"role": "user", "content": "?"}]
    prompt = words.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
    model = Model(words, *later)
    written = made.run_turns(EncodedTexts([prompt]), [np.asarray(words(first)["input_ids"], np.int32)], model)
    return written, model


@pytest.mark.parametrize("form", FORMS)
def test_a_call_is_answered_and_the_model_goes_on(form):
    made, _ = tools(form)
    written, model = completed(made, CALLS[form] + END, "Three." + END)
    text = f"{CALLS[form]}{END}\n<|im_start|>tool\n3{END}\n<|im_start|>assistant\nThree.{END}"
    assert made.tokenizer.decode(written.completion_ids[0]) == text
    by_tool = [made.tokenizer.decode([token]) for token in written.completion_ids[0][~written.by_model[0]]]
    assert "".join(by_tool) == f"\n<|im_start|>tool\n3{END}\n<|im_start|>assistant\n"
    assert model.asked == [[f"<|im_start|>user\n?{END}\n<|im_start|>assistant\n" + text.removesuffix(f"Three.{END}")]]
    first, answer, last = written.messages[0]
    assert first == {"role": "assistant", "content": "", "tool_calls": [call("add", a=1, b=2)]}
    assert answer == {"role": "tool", "name": "add", "content": "3"} and last["content"] == "Three."
    assert written.metrics == {"tools/call_frequency": 1.0, "tools/failure_frequency": 0.0}
    assert made.calls.take_counts() == (0, 0)  # counters are reset for the next completions


def test_an_answer_with_an_image_ends_the_run():
    made, _ = tools()
    drawing = '<tool_call>{"name": "draw", "arguments": {"what": "cat"}}</tool_call>' + END
    words = r"^The answer of the tool 'draw': .*'image': 'cat'.*rows with images are not supported yet"
    with pytest.raises(ValueError, match=words):
        completed(dataclasses.replace(made, functions={"draw": draw}), drawing, "There." + END)


def test_an_answer_with_a_token_that_the_model_does_not_embed():
    made, _ = tools()
    made = dataclasses.replace(made, vocab_size=made.tokenizer.convert_tokens_to_ids(END))
    with pytest.raises(ValueError, match=r"^The answer of 'add', position 0: token id \d+ is outside the model's voc"):
        completed(made, CALLS["json"] + END, "Three." + END)


@pytest.mark.parametrize("limits", [{"longest": 60}, {"positions": 75}, {"most_turns": 0}])
def test_an_answer_without_room_ends_the_completion_at_its_call(limits):
    written, model = completed(tools(**limits)[0], CALLS["json"] + END, "Three." + END)
    assert not model.asked and len(written.messages[0]) == 1 and written.by_model[0].all()


def test_a_turn_ends_where_the_completion_must():
    made, _ = tools(longest=150)
    whole, _ = completed(tools()[0], CALLS["json"] + END, "Three." * 20)
    written, _ = completed(made, CALLS["json"] + END, "Three." * 20)
    np.testing.assert_array_equal(written.completion_ids[0], whole.completion_ids[0][:150])
    assert len(written.by_model[0]) == 150


def test_turns_are_counted():
    written, model = completed(tools(most_turns=3, longest=10_000)[0], CALLS["json"] + END, CALLS["json"] + END)
    assert len(model.asked) == 3 and [message["role"] for message in written.messages[0]].count("tool") == 3
    assert written.metrics["tools/call_frequency"] == 3.0


def test_what_goes_wrong_is_an_answer():
    """Errors become tool messages. Answers of async functions come last, as in TRL."""
    calls, functions = ToolCaller(), {"add": add, "echo": echo}
    other = {"type": "web", "name": "search"}
    asked = [call("echo", word="so"), call("add", a=1), call("none"), call("echo", word="bad"), other]
    answers = calls.run(asked, functions)
    assert [message["name"] for message in answers] == ["add", "none", "search", "echo", "echo"]
    assert "missing 1 required positional argument" in answers[0]["content"]
    wanted = ["Tool none not found.", "Unsupported tool call type: web"]
    assert [message["content"] for message in answers[1:3]] == [str({"error": text}) for text in wanted]
    assert [message["content"] for message in answers[3:]] == ["so", str({"error": "not that"})]
    assert calls.take_counts() == (5, 4)


def test_prompts_name_the_functions():
    made, options = tools()
    assert options == {"tools": [add, echo]} and isinstance(made, Tools)


def test_a_template_that_depends_on_what_follows_is_exchanged():
    """For example Qwen3's, which drops the reasoning of all turns except the last."""
    words = tokenizer_of("json")
    words.chat_template = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text()
    limits = {"most_turns": None, "longest": 9, "positions": None, "vocab_size": 10_000}
    made, options = tools_of([add], None, words, {"x": 1}, **limits)
    assert options["x"] == made.template_options["x"] == 1
    assert options["chat_template"] == made.template_options["chat_template"] != words.chat_template


def bare(a):
    return a


@pytest.mark.parametrize(("functions", "template", "error", "text"), [
    (["add"], "json", TypeError, "^tools must be functions, got 'add'"),
    ([bare], "json", TypeError, "^tools: bare cannot be described to the model: .*Annotate its arguments"),
    ([add, add], "json", ValueError, "^tools has two functions 'add'"),
    ([add], "{{ messages[0].content }}", ValueError, "^The provided chat template does not support tool calling"),
])  # fmt: skip
def test_what_cannot_be_called_is_refused(functions, template, error, text):
    words = tokenizer_of("json")
    words.chat_template = FORMS.get(template, template)
    with pytest.raises(error, match=text):
        tools_of(functions, None, words, {}, most_turns=None, longest=9, positions=None, vocab_size=10_000)


def test_another_form_of_calls_says_what_to_set():
    words = tokenizer_of("json")
    words.chat_template = FORMS["json"].replace("tool_call>", "call>")
    with pytest.raises(ValueError, match="Set tokenizer.response_template, from which"):
        response_template(words)


def test_what_the_reset_of_an_environment_raises_is_named():
    class Shop:
        def reset(self, prompt):
            raise KeyError("stock")

    with pytest.raises(KeyError, match="stock") as error:
        Environments(Shop).reset([{"prompt": [{"role": "user", "content": "Buy."}]}])
    assert error.value.__notes__[0].startswith("Raised by reset() of the environment 'Shop' for 1 ")


def test_answers_without_images_are_tokenized_as_by_a_processor():
    """This template renders parts and strings differently."""
    from transformers import LlavaProcessor
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    tokenizer = tiny_tokenizer(eos=END, bos="<s>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokenizer.chat_template = FORMS["json"].replace(
        "+ m.content }}",
        "}}{%- if m.content is string %}{{- 'text: ' + m.content }}{%- else %}"
        "{%- for part in m.content %}{{- part.text }}{%- endfor %}{%- endif %}",
    )
    processor = LlavaProcessor(CLIPImageProcessorPil(), tokenizer, chat_template=tokenizer.chat_template)
    trainer = SimpleNamespace(
        processing_class=processor, _tokenizer=tokenizer, _is_vlm=True, chat_template=None, chat_template_kwargs={}
    )
    theirs = trl.GRPOTrainer._get_tool_suffix_ids(trainer, [{"role": "tool", "name": "add", "content": "3"}])
    tokenizer.response_template = response_template(tokenizer)
    made, _ = tools_of([add], None, tokenizer, {}, most_turns=None, longest=200, positions=None, vocab_size=10_000)
    made = dataclasses.replace(made, chat_tokenizer=PartsTokenizer(tokenizer))
    written, _ = completed(made, CALLS["json"] + END, "Three." + END)
    assert written.completion_ids[0][~written.by_model[0]].tolist() == theirs


def test_a_run_tokenizes_answers_as_its_prompts():
    made, options = tools()
    reader = PartsTokenizer(made.tokenizer)
    sampling = Sampling(options, None, {}, (), parses_messages=True, tools=made)
    writer = PolicyGenerator(SimpleNamespace(chat_tokenizer=reader), sampling, [None], None, alone=False)
    assert writer._sampling.tools.chat_tokenizer is reader and writer._sampling.tools.calls is made.calls
