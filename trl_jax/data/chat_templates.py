"""Chat templates: tool support, training templates with `{% generation %}` markers, and rendering within limits."""

from __future__ import annotations

import copy
import functools
import importlib.util
import json
import os
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from jinja2 import Environment, TemplateError, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from transformers.utils import chat_template_utils

# Tool support

# Marker words that no template contains, to detect which parts of a tool call and its answer a template renders.
_TOOL, _ARGUMENT, _VALUE, _ANSWER = "called_by_name_7f3a", "with_argument_5c1e", "of_this_value_9b2d", "gives_that_4e8f"


def supports_tool_calling(processing_class: Any) -> bool:
    """Whether the chat template renders a tool call, its arguments and the tool's answer; many omit one of them.

    Some templates expect the arguments as a dict, some as JSON.
    """
    if processing_class.chat_template is None:
        return False
    try:
        text = _rendered_tool_call(processing_class, {_ARGUMENT: _VALUE})
    except TemplateError:
        return False
    except TypeError:
        try:
            text = _rendered_tool_call(processing_class, f'{{"{_ARGUMENT}": "{_VALUE}"}}')
        except TemplateError:
            return False
    return all(word in text for word in (_TOOL, _ARGUMENT, _VALUE, _ANSWER))


def _rendered_tool_call(processing_class: Any, arguments: dict | str) -> str:
    messages = _tool_messages(processing_class, _TOOL, arguments, _ANSWER, None)
    return apply_chat_template(processing_class, messages, tokenize=False)


def _tool_messages(processing_class: Any, tool: str, arguments: dict | str, answer: str, images: list | None) -> list:
    """A question, a tool call and the tool's answer; with content parts if the processor reads images."""
    call = {"type": "function", "function": {"name": tool, "arguments": arguments}}
    messages = [
        {"role": "user", "content": "Ask."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": tool, "content": answer},
    ]
    return prepare_multimodal_messages(messages, images) if _reads_images(processing_class) else messages


def _reads_images(processing_class: Any) -> bool:
    from transformers import ProcessorMixin

    return isinstance(processing_class, ProcessorMixin)


def is_chat_template_prefix_preserving(processing_class: Any) -> bool:
    """Whether the messages before a tool's answer are rendered the same with and without it."""
    try:
        return _keeps_prefix(processing_class, {})
    except TypeError:  # the template expects the arguments as JSON
        return _keeps_prefix(processing_class, "{}")


def _keeps_prefix(processing_class: Any, arguments: dict | str) -> bool:
    has_images = _reads_images(processing_class)
    messages = _tool_messages(processing_class, "tool", arguments, "answer", [_image()] if has_images else None)
    options = {"tokenize": True, "return_dict": False}
    prefix = apply_chat_template(processing_class, messages[:2], **options)
    text = apply_chat_template(processing_class, messages, add_generation_prompt=True, **options)
    prefix, text = (prefix[0], text[0]) if has_images else (prefix, text)
    return text[: len(prefix)] == prefix


def _image() -> Any:
    from PIL import Image

    return Image.new("RGB", (8, 8))


def template_for_training(processing_class: Any) -> str | None:
    """None if the template is training-compatible, else a template that is.

    Compatible means that it marks assistant content with `{% generation %}` and, if it supports tools, is
    prefix-preserving.

    Raises:
        ValueError: no such template can be found or derived.
    """
    template = processing_class.chat_template
    text = template["default"] if isinstance(template, dict) else template
    keeps_prefix = not supports_tool_calling(processing_class) or is_chat_template_prefix_preserving(processing_class)
    return None if keeps_prefix and has_generation_markers(text) else training_template(text)


# Training templates: TRL's if trl is installed, else derived from the template and verified on sample conversations

_THINK = "<think>"
# Marker words that no template contains, one set per speaker; tool arguments are the assistant's.
_ASKED, _TOLD, _RULE = "user_asks_{}_4c1d", "tool_tells_{}_9b2d", "system_rules_1e8f"
_SAID, _THOUGHT, _CALLED = "assistant_says_{}_7f3a", "assistant_thinks_{}_5c1e", "assistant_calls_3d2b"
_OTHER_WORDS = re.compile(r"(?:user_asks|tool_tells|system_rules)_\w+")
_OWN_WORDS = re.compile(r"assistant_(?:says|thinks|calls)_\w+")
_UNENDED = re.compile(rf"(?:{_OWN_WORDS.pattern})\s*\Z")  # no end-of-turn token, so the model would not learn to stop
_UNHEADED = re.compile(rf"\s*(?:{_OWN_WORDS.pattern})\s*\S")
_TOKENS = {f"{name}_token": f"\x02{name}\x03" for name in ("bos", "eos", "pad", "unk")}

# How turns before the last may be rendered, in the order tried: exactly as in the original; each like a last turn; or
# as in the original even though it renders a turn differently once the conversation continues.
_EARLIER = ("same", "like the last", "as rendered")

_PLAIN = ("user", "assistant")
_SAMPLES = (
    (*_PLAIN, *_PLAIN),
    ("system", *_PLAIN, *_PLAIN, "user"),
    ("user", "thinking", "user", "thinking"),
    ("user", "tagged", "user", "tagged"),
    ("user", "calling", "tool", "assistant", *_PLAIN),
)


def has_generation_markers(chat_template: str | dict[str, str]) -> bool:
    """Whether a template has `{% generation %}` markers; of several named templates, the "default" one."""
    text = chat_template["default"] if isinstance(chat_template, dict) else chat_template
    return re.search(r"\{%-?\s*generation\s*-?%\}", text) is not None


def training_template(chat_template: str | dict[str, str]) -> str:
    """A template that renders assistant turns like this one and marks them with `{% generation %}`.

    For templates that TRL knows, this is TRL's training template; some of these keep the reasoning that the original
    drops from earlier turns. For other templates it is derived (see `derived`) or edited (see `edited`).

    Raises:
        ValueError: none of these methods works.
    """
    text = chat_template["default"] if isinstance(chat_template, dict) else chat_template
    template = _trl_training_template(text) or derived(text) or edited(text)
    if template is None:
        raise ValueError(
            "The chat template is not training-compatible (missing prefix-preservation or `{% generation %}` markers) "
            "and patching is not supported for this template. Edit it by hand: wrap the assistant's content and its "
            "end-of-turn token in `{% generation %}` and `{% endgeneration %}`, and pass the file as "
            "chat_template_path. (If trl is installed, its training templates are used.)"
        )
    return template


def stop_token_is_trained(tokenizer: Any, chat_template: str | None) -> bool:
    """Whether the last marked token, ignoring whitespace, is an added token, i.e. the end-of-turn token.

    If `chat_template` is None, the tokenizer's own is used. False if the template cannot render a plain conversation,
    as in TRL.
    """
    messages = _conversation("str", "user", "assistant", "user")
    options = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
    try:
        encoded = apply_chat_template(tokenizer, messages, chat_template=chat_template, **options)
    except (TemplateError, TypeError, ValueError):
        return False
    trained = [token for token, bit in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if bit]
    last = next((token for token in reversed(trained) if tokenizer.decode([token]).strip()), None)
    return last in tokenizer.get_added_vocab().values()


def _trl_training_template(chat_template: str) -> str | None:
    """Find TRL's training template; its templates come as pairs `NAME.jinja` and `NAME_training.jinja`."""
    trl = importlib.util.find_spec("trl")
    locations = () if trl is None else trl.submodule_search_locations or ()
    for path in chain.from_iterable(Path(location, "chat_templates").glob("*.jinja") for location in locations):
        training_path = path.with_name(f"{path.stem}_training.jinja")
        if training_path.is_file() and path.read_text(encoding="utf-8") == chat_template:
            return training_path.read_text(encoding="utf-8")
    return None


def derived(chat_template: str) -> str | None:
    """Add `{% generation %}` markers to a template; None if it already has some or the result fails verification.

    On each sample conversation the result must render the same text, mark exactly what the assistant says, and be
    prefix-preserving. If a template drops reasoning from earlier turns, or only renders it in the last, every turn is
    rendered like the last one, which gives the same text for a single turn. If that fails, earlier turns may lose their
    reasoning or end differently, as in the original (Nemotron, gpt-oss); only the turns before a tool's answer must
    then be prefix-preserving.
    """
    if has_generation_markers(chat_template):
        return None
    try:
        kind = next(kind for kind in ("str", "parts") if _supports(chat_template, kind))
        header = _header(chat_template, kind)
        if header is None:
            return None
        for earlier in _EARLIER:
            candidate = marked(chat_template, header, as_last=earlier == "like the last")
            if all(_is_correct(chat_template, candidate, _conversation(kind, *roles), earlier) for roles in _SAMPLES):
                return candidate
    except Exception:  # templates may raise any exception; such a template cannot be marked
        return None
    return None


def _conversation(kind: str, *roles: str) -> list[dict[str, Any]]:
    """A conversation whose messages all have unique words; content is text (`kind` "str") or a list of parts."""
    return [_message(kind, role, index) for index, role in enumerate(roles)]


def _message(kind: str, role: str, index: int) -> dict[str, Any]:
    contents = {"user": _ASKED, "tool": _TOLD, "system": _RULE, "tagged": f"{_THINK}\n{_THOUGHT}\n</think>\n\n{_SAID}"}
    content: Any = contents.get(role, _SAID).format(*[index] * 2)
    if kind == "parts":
        content = [{"type": "text", "text": content}]
    message = {"role": role if role in ("user", "tool", "system") else "assistant", "content": content}
    if role == "thinking":
        message["reasoning_content"] = _THOUGHT.format(index)
    if role == "calling":
        call = {"name": "look", "arguments": {"at": _CALLED}}
        message["tool_calls"] = [{"type": "function", "function": call}]
    return message | ({"name": "look"} if role == "tool" else {})


def _supports(template: str, kind: str) -> bool:
    """Whether a template renders contents of this kind; some raise for texts, others for parts."""
    try:
        return _SAID.format(1) in _render(template, _conversation(kind, *_PLAIN))
    except (TemplateError, TypeError):
        return False


def _render(template: str, messages: list[dict[str, Any]], **options: Any) -> str:
    return render(template, messages, **_TOKENS, **options)[0]


def _header(template: str, kind: str) -> str | None:
    """The text that a template renders before the assistant's content; None if turns start in different ways.

    This is what the generation prompt adds, without an opening reasoning tag. If it occurs again inside a turn, the
    assistant generates it itself, and the header is empty. It is also empty without a generation prompt, if turns start
    with the content and end with more text (Mistral, Llama 2). If an expression renders the end of the header together
    with the content, the header stops before that expression, as in TRL's templates.
    """
    question = _render(template, _conversation(kind, "user"))
    with_prompt = _render(template, _conversation(kind, "user"), add_generation_prompt=True)
    start = len(os.path.commonprefix([question, with_prompt]))
    prompt, with_answer = with_prompt[start:], _render(template, _conversation(kind, *_PLAIN))
    header = prompt.split(_THINK)[0]
    if not prompt:
        return "" if _UNHEADED.match(with_answer, start) else None
    starts_content = with_answer.startswith(_THINK if _THINK in prompt else "", start + len(header))
    if question[start:] not in ("", _TOKENS["eos_token"]) or not header or not starts_content:
        return None
    if not with_answer.startswith(question[:start] + header):
        return None
    if _render(template, _conversation(kind, "user", "thinking"))[start:].count(header) > 1:
        return ""
    ends = [_content_start(template, _conversation(kind, "user", role)) - start for role in ("assistant", "calling")]
    return header[: min([end for end in ends if end > 0], default=len(header))]


def _content_start(template: str, messages: list[dict[str, Any]]) -> int:
    """Where in the text the first expression with assistant content starts; 0 if this cannot be determined."""
    try:
        parts = _render(separated(template), messages).split(SEPARATOR)
    except Exception:  # for example, the template does not support tools
        return 0
    offset = 0
    for part in parts:
        if _OWN_WORDS.search(part):
            return offset
        offset += len(part)
    return 0


def _is_correct(template: str, candidate: str, messages: list[dict[str, Any]], earlier: str) -> bool:
    """Whether a marked template is correct for a conversation, or the original does not support that conversation."""
    try:
        text = _render(template, messages)
    except Exception:  # templates may raise any exception for unsupported conversations
        return _SAMPLES[0] != tuple(message["role"] for message in messages)
    marked_text, spans = render(candidate, messages, spans=True, **_TOKENS)
    if earlier == "like the last":
        text = marked_text
    if earlier != "same" and _UNENDED.search("".join(marked_text[start:end] for start, end in spans)):
        return False
    edges = [0, *(edge for span in spans for edge in span), len(text)]
    outside = "".join(text[start:end] for start, end in list(pairwise(edges))[::2])
    inside = "".join(text[start:end] for start, end in spans)
    contents = [str(message["content"]) for message in messages if "tool_calls" not in message]
    expected = {word for content in contents for word in _OWN_WORDS.findall(content)}
    if earlier == "as rendered":
        last = set(_OWN_WORDS.findall(str(messages[-1]["content"])))
        expected = {word for word in expected if word in last or not word.startswith("assistant_thinks")}
        tools = [i for i, message in enumerate(messages) if message["role"] == "tool"]
        keeps_prefix = all(_keeps_start(candidate, messages[:i], messages[: i + 1]) for i in tools)
    else:
        ends = [i + 1 for i, message in enumerate(messages) if message["role"] == "assistant"]
        keeps_prefix = text.startswith(_render(template, messages[: ends[0]]).removesuffix(_TOKENS["eos_token"]))
        keeps_prefix = keeps_prefix and all(_keeps_start(candidate, messages[:end], messages) for end in ends)
    is_same = marked_text == text and keeps_prefix and expected <= set(_OWN_WORDS.findall(inside))
    return is_same and not _OWN_WORDS.search(outside) and not _OTHER_WORDS.search(inside)


def _keeps_start(template: str, start: list[dict[str, Any]], messages: list[dict[str, Any]]) -> bool:
    """Whether the rendered start of a conversation, without a final EOS token, is a prefix of the whole one."""
    return _render(template, messages).startswith(_render(template, start).removesuffix(_TOKENS["eos_token"]))


# Response templates, to parse tool calls with tokenizers that have none


_THINKING = "reasoning_content", {"open": "<think>", "close_pattern": r"</think>\s*"}


def _turn(
    start: str,
    end: str,
    calls: dict[str, Any] | None,
    *,
    thoughts: tuple[str, dict[str, str]] | None = _THINKING,
    opens: str | None = None,
) -> dict[str, Any]:
    """A transformers response template for one format of turns.

    Args:
        start: pattern at the start of the model's turn, part of the generation prompt.
        end: pattern that ends its content.
        calls: the field for tool calls, or None.
        thoughts: name and field for the model's reasoning, or None.
        opens: text that starts the content; None if content is everything that is in no other field.
    """
    content = {"close_pattern": end} if opens is None else {"open": opens, "close_pattern": end}
    fields = {} if thoughts is None else dict([thoughts])
    fields |= ({} if calls is None else {"tool_calls": {"repeats": True} | calls}) | {"content": content}
    fields = {name: {"content": "text"} | field for name, field in fields.items()}
    return {"defaults": {"role": "assistant"}, "start_anchor_pattern": start, "fields": fields}


def _call_field(open_pattern: str, close_pattern: str, content: str = "json", **content_args: Any) -> dict[str, Any]:
    """The field for tool calls, with the group `name` in `open_pattern` and the arguments as content."""
    field = {"open_pattern": open_pattern, "close_pattern": close_pattern, "content": content}
    field |= {"transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}}
    return field | ({"content_args": content_args} if content_args else {})


def _argument_in_brackets(depth: int) -> str:
    """Pattern of a Python literal: a quoted string, or a list or dict nested at most `depth` levels deep."""
    atom = inner = r"[^\[\]{}'\"]|'[^']*'|\"[^\"]*\""
    for _ in range(depth - 1):
        inner = rf"{atom}|[\[{{](?:{inner})*[\]}}]"
    return rf"'[^']*'|[\[{{](?:{inner})*[\]}}]"


_TEXT = {"name": "text"}  # the function's annotations determine the type later
_CHATML, _IM_END = r"<\|im_start\|>assistant\n", r"<\|im_end\|>\s*"
# For prompts that end with <think>: everything before </think>, if it occurs, is reasoning.
_OPEN_THINKING = "reasoning_content", {"open_pattern": r"(?=[\s\S]*?</think>)", "close_pattern": r"</think>\s*"}
_JSON_CALL = {
    "open": "<tool_call>", "close_pattern": r"</tool_call>\s*", "content": "json",
    "transform": {"type": "function", "function": "{content}"},
}  # fmt: skip
_XML_CALL = _call_field(
    r"<tool_call>\s*<function=(?P<name>[^\n>]+)>", r"</tool_call>\s*", "xml-inline", value_parser=_TEXT,
    tag_pattern=r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>",
)  # fmt: skip
_XML_FORM = r"<tool_call>\s*<function=f>\s*<parameter=a>\s*b\s*</parameter>\s*</function>\s*</tool_call>\s*<\|im_end\|>"
# Pattern of a rendered turn with the call f(a="b") -> response template that parses such turns.
_CALL_FORMATS = {
    # ChatML, calls as JSON
    rf'{_CHATML}.*<tool_call>\s*\{{"name": "f", "arguments": \{{"a": "b"\}}\}}\s*</tool_call>\s*<\|im_end\|>': _turn(
        _CHATML, _IM_END, _JSON_CALL
    ),
    # ChatML, calls as XML, the prompt ends with <think>
    rf"{_CHATML}<think></think>\s*{_XML_FORM}": _turn(
        _CHATML + r"<think>(?:\n|</think>)?", _IM_END, _XML_CALL, thoughts=_OPEN_THINKING
    ),
    # ChatML, calls as XML
    rf"{_CHATML}.*{_XML_FORM}": _turn(_CHATML, _IM_END, _XML_CALL),
    # ChatML, a list of calls in Python syntax
    rf"{_CHATML}<\|tool_call_start\|>\[f\(a='b'\)\]<\|tool_call_end\|>": _turn(
        _CHATML,
        _IM_END,
        _call_field(
            r"(?:<\|tool_call_start\|>\[|,\s*)(?P<name>\w+)\(", r"\)(?:\]<\|tool_call_end\|>)?\s*", "xml-inline",
            tag_pattern=rf"(?P<key>\w+)=(?P<value>{_argument_in_brackets(4)}|[^,)]*)",
            value_parser={"name": "json", "args": {"string_delims": [["'", "'"]], "allow_non_json": True}},
        ),
        thoughts=("thinking", _THINKING[1]),
    ),
    # Llama 3 headers, the whole turn is one call as JSON
    r'<\|end_header_id\|>\s*\{"name": "f", "parameters": \{"a": "b"\}\}<\|eot_id\|>': _turn(
        r"<\|start_header_id\|>assistant<\|end_header_id\|>\n\n",
        r"<\|eot_id\|>\s*",
        _call_field(r'\{"name":\s*"(?P<name>[^"]+)",\s*"parameters":\s*', r"\}<\|eot_id\|>\s*"),
        thoughts=None,
    ),
    # channels for reasoning, content and calls (gpt-oss)
    r'assistant to=functions\.f<\|channel\|>commentary json<\|message\|>\{"a": "b"\}<\|call\|>': _turn(
        r"<\|start\|>assistant",
        r"<\|return\|>\s*",
        _call_field(r"to=functions\.(?P<name>\S+?)<\|channel\|>commentary\s+json<\|message\|>", r"<\|call\|>\s*"),
        thoughts=("thinking", {"open": "<|channel|>analysis<|message|>", "close_pattern": r"<\|end\|>\s*"}),
        opens="<|channel|>final<|message|>",
    ),
    # calls with alternating keys and values (GLM)
    r"<\|assistant\|>.*<tool_call>f\s*<arg_key>a</arg_key>\s*<arg_value>b</arg_value>\s*</tool_call>": _turn(
        r"<\|assistant\|>",
        r"<\|user\|>\s*|$",
        _call_field(
            r"<tool_call>(?P<name>[^\s<]+)\n?", r"</tool_call>\s*", "xml-inline", value_parser=_TEXT,
            tag_pattern=r"<arg_key>(?P<key>[^<]+)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>",
        ),
    ),
    # calls as JSON with special quotation tokens (Gemma 4)
    r'<\|turn>model\n.*<\|tool_call>call:f\{a:<\|"\|>b<\|"\|>\}<tool_call\|>': _turn(
        r"(?:<\|turn>model\n|<tool_response\|>)",
        r"(?:<turn\|>|<\|tool_response>|<eos>)\s*|$",
        _call_field(
            r"<\|tool_call>call:(?P<name>\w+)", r"<tool_call\|>\s*",
            string_delims=[['<|"|>', '<|"|>']], unquoted_keys=True,
        ),
        thoughts=("reasoning_content", {"open": "<|channel>thought\n", "close_pattern": r"<channel\|>\s*"}),
    ),
}  # fmt: skip
# End of a generation prompt -> response template, for templates that do not render calls.
_THINKS = "<｜Assistant｜><think>\n"
_WITHOUT_CALLS = {_THINKS: _turn(_THINKS, r"<｜end▁of▁sentence｜>\s*|$", None, thoughts=_OPEN_THINKING)}


def response_template(tokenizer: Any) -> dict[str, Any]:
    """The `response_template` that matches a tokenizer's chat template.

    Raises:
        ValueError: its format of tool calls is not recognized.
    """
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": "b"}}}
    messages = [{"role": "user", "content": "-"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    text = apply_chat_template(tokenizer, messages, tokenize=False)
    for pattern, template in _CALL_FORMATS.items():
        if re.search(pattern, text, re.DOTALL):
            return copy.deepcopy(template)
    if not supports_tool_calling(tokenizer):
        prompt = apply_chat_template(tokenizer, messages[:1], tokenize=False, add_generation_prompt=True)
        for end, template in _WITHOUT_CALLS.items():
            if prompt.endswith(end):
                return copy.deepcopy(template)
    raise ValueError(
        "trl_jax does not recognize the format in which this chat template writes tool calls. Set "
        "tokenizer.response_template, from which transformers' tokenizer.parse_response learns to parse them."
    )


# Rendering within limits

_PIECES = 2**12  # number of pieces of text that are joined at a time
_COUNTED, _READ = "trl_jax_counted", "trl_jax_read"  # names of our own filters
_BY_ITEM = frozenset(  # filters whose cost does not depend on the size of the items
    "attr batch count d default first items last length list map reject rejectattr reverse select selectattr slice"
    .split()
)  # fmt: skip
_COMPARING = "eq equalto == ne != lt lessthan < le <= gt greaterthan > ge >= in".split()  # tests
_compile = chat_template_utils._compile_jinja_template.__wrapped__  # without transformers' cache


def _join(pieces: Iterable[str]) -> str:
    pieces, chunks, size = iter(pieces), [], 0
    while chunk := list(islice(pieces, _PIECES)):
        chunks.append("".join(chunk))
        size += len(chunks[-1])
        check(size)
    return "".join(chunks)


def _bounded(name: str, function: Callable) -> Callable:
    """Wrap a filter so that it counts the size of its input and refuses to produce too large an output."""
    num_context_args = int("jinja_pass_arg" in dir(function))  # jinja2 passes its own first argument

    @functools.wraps(function)
    def bounded(*args: Any, **options: Any) -> Any:
        context, value, rest = args[:num_context_args], args[num_context_args], args[num_context_args + 1 :]
        value = counted(value) if name in _BY_ITEM else read(items(value))
        check_growth(name, value, rest, options)
        return function(*context, value, *rest, **options)

    return bounded


class _Filters(dict):
    """Filters by name; `__setitem__` wraps each filter with `_bounded`."""

    def __setitem__(self, name: str, function: Callable) -> None:
        super().__setitem__(name, _bounded(name, function))


def _with_counted_values(test: Callable) -> Callable:
    return lambda *values: test(*map(read, values))


class _Bounded(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%"})
    concat = staticmethod(_join)

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options, finalize=read)
        filters, self.filters = self.filters, _Filters()
        for name, function in filters.items():
            self.filters[name] = function
        dict.update(self.filters, {_COUNTED: counted, _READ: read})
        self.tests = self.tests | {name: _with_counted_values(self.tests[name]) for name in _COMPARING}
        del self.globals["lipsum"]  # can produce any amount of text

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        check_operands(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, function: Any, *args: Any, **options: Any) -> Any:
        method = vars(function).get("__wrapped__", function) if isinstance(function, types.FunctionType) else function
        count(CALL + sum(map(shallow, args)))
        if isinstance(method, types.BuiltinMethodType) and not isinstance(method.__self__, types.ModuleType):
            args = tuple(map(items, args))
            count(shallow(method.__self__))
            check_growth(method.__name__, method.__self__, args, options)
        elif isinstance(method, types.FunctionType) and args:
            check_growth(method.__name__, args[0], args[1:], options)
        return super().call(context, function, *args, **options)

    def _generate(self, source: nodes.Template, *args: Any, **options: Any) -> str:
        for loop in list(source.find_all(nodes.For)):
            loop.iter = self._filtered(loop.iter, _COUNTED)
        for part in list(source.find_all(nodes.Getitem)):
            if isinstance(part.arg, nodes.Slice):
                part.node = self._filtered(part.node, _COUNTED)
        for text in list(source.find_all(nodes.Concat)):
            text.nodes = [self._filtered(node, _READ) for node in text.nodes]
        for comparison in list(source.find_all(nodes.Compare)):
            if not any(map(_is_constant, (comparison.expr, *(operand.expr for operand in comparison.ops)))):
                for node in (comparison, *comparison.ops):
                    node.expr = self._filtered(node.expr, _READ)
        return super()._generate(source, *args, **options)

    def _filtered(self, value: nodes.Expr, name: str) -> nodes.Filter:
        return nodes.Filter(value, name, [], [], None, None, lineno=value.lineno, environment=self)


def _is_constant(node: nodes.Expr) -> bool:
    """Whether comparing with this expression is cheap: a constant, or a list or tuple of constants."""
    return (
        isinstance(node, nodes.Const)
        or isinstance(node, nodes.List | nodes.Tuple)
        and all(map(_is_constant, node.items))
    )


@functools.lru_cache(128)
def _compiled(template: str) -> Any:
    """Compile a template with limits; transformers' own cache is bypassed."""
    chat_template_utils.ImmutableSandboxedEnvironment = _Bounded  # transformers looks it up while compiling
    try:
        return _compile(template)
    finally:
        chat_template_utils.ImmutableSandboxedEnvironment = ImmutableSandboxedEnvironment


def apply_chat_template(tokenizer: Any, messages: list[dict], **options: Any) -> Any:
    """Call `tokenizer.apply_chat_template(messages, **options)` with limits on size and work.

    All conversations in this package are rendered through this function; `chat.rendered` also names the row in errors.

    Raises:
        TooLarge: the template exceeds the limits.
    """
    with _limited():
        return tokenizer.apply_chat_template(messages, **options)


def render(
    template: str, messages: list[dict], *, spans: bool = False, **variables: Any
) -> tuple[str, list[tuple[int, int]]]:
    """Render messages with the same limits; with `spans`, also return the spans within `{% generation %}`."""
    with _limited():
        texts, all_spans = chat_template_utils.render_jinja_template(
            [messages], chat_template=template, return_assistant_tokens_mask=spans, **variables
        )
    return texts[0], all_spans[0] if spans else []


@contextmanager
def _limited() -> Iterator[None]:
    """Make transformers compile templates with limits."""
    original = chat_template_utils._compile_jinja_template
    chat_template_utils._compile_jinja_template = _compiled
    begin()
    try:
        yield
    finally:
        chat_template_utils._compile_jinja_template = original
        end()


# Messages with images

_ROLES = ("system", "user", "assistant", "tool")


def prepare_multimodal_messages(messages: list[dict[str, Any]], images: list | None = None) -> list[dict[str, Any]]:
    """TRL's function of the same name: convert message contents to lists of parts and fill image placeholders.

    Text becomes a text part; if the first user message is text, all images are inserted before it. A part
    `{"type": "image"}` without an image is a placeholder, except in a tool message.

    Raises:
        ValueError: a role is unknown, or the numbers of placeholders and images differ.
    """
    remaining, images = iter(images or ()), list(images or ())
    messages = _to_parts(messages, len(images))
    count = sum(_is_placeholder(part) for message in messages for part in _placeholder_parts(message))
    if count != len(images):
        raise ValueError(
            f"Number of images provided ({len(images)}) does not match number of image placeholders ({count})."
        )

    def fill(part: dict[str, Any]) -> dict[str, Any]:
        return {**part, "image": next(remaining)} if _is_placeholder(part) else part

    return [
        {**message, "content": [fill(part) for part in parts]} if (parts := _placeholder_parts(message)) else message
        for message in messages
    ]


def _to_parts(messages: list[dict[str, Any]], images: int) -> list[dict[str, Any]]:
    converted = []
    for message in messages:
        if message["role"] not in _ROLES:
            raise ValueError(f"Invalid role in message: {message['role']}. Expected {', '.join(_ROLES)}.")
        content = message.get("content")
        if isinstance(content, str):
            placeholders, text = [], {"type": "text", "text": content}
            if message["role"] == "user":
                placeholders, images = [{"type": "image"} for _ in range(images)], 0
            message = {**message, "content": [*placeholders, text]}
        converted.append(message)
    return converted


def _placeholder_parts(message: dict[str, Any]) -> list[dict[str, Any]]:
    return [] if message["role"] == "tool" else message.get("content") or []


def _is_placeholder(part: dict[str, Any]) -> bool:
    return part["type"] == "image" and "image" not in part


# Limits. Templates come from untrusted repositories, and a single line can use unbounded memory or time.

MAX_CHARACTERS = 2**27  # in a text, and items in a list
MAX_WORK = 2**29  # characters processed by all operations of one rendering
ITEM = 64  # cost in characters of a number, a list item or a loop iteration
CALL = 16 * ITEM  # cost of a call
_MAX_PIECES = 2**24  # pieces that a text may be split into
_MAX_BITS = 2**16  # bits of an int
_PADS = frozenset(
    "batch center expandtabs indent ljust rjust round slice to_bytes tojson wordwrap zfill".split()
)  # filters and methods whose output size is determined by an argument
_SPLITTERS = frozenset(("split", "rsplit", "splitlines", "list"))  # filters and methods that split a text
_left: ContextVar[int | None] = ContextVar("left", default=None)  # remaining work; None outside of a rendering


class TooLarge(jinja2.TemplateError):
    """A template produces a text, list or number that is too large, or does more than MAX_WORK."""


def begin() -> None:
    """Start counting for one rendering."""
    _left.set(MAX_WORK)


def end() -> None:
    """Stop counting."""
    _left.set(None)


def check(size: int, maximum: int | None = None) -> None:
    """Raise TooLarge if `size` exceeds `maximum`; None means MAX_CHARACTERS."""
    maximum = MAX_CHARACTERS if maximum is None else maximum
    if size > maximum:
        raise TooLarge(f"more than {maximum:,}")


def count(size: int) -> None:
    """Subtract the size of an operation from the remaining work."""
    remaining = _left.get()
    if remaining is not None:
        check(size, remaining)
        _left.set(remaining - size)


def shallow(value: Any) -> int:
    """Size of a value, not including the contents of its items; an iterator counts as one item."""
    if isinstance(value, str | bytes):
        return len(value)
    return ITEM * (1 + len(value)) if isinstance(value, list | tuple | dict | set | frozenset | range) else ITEM


def deep(value: Any) -> int:
    """Recursive size of a value, counting shared parts repeatedly; stops just above MAX_WORK."""
    size, stack = 0, [value]
    while stack and size <= MAX_WORK:
        item = stack.pop()
        size += ITEM
        if isinstance(item, str | bytes):
            size += len(item)
        elif isinstance(item, Mapping):
            stack += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple | set | frozenset):
            stack += item
        elif isinstance(item, Namespace):  # its attributes are the template's variables
            stack += object.__getattribute__(item, "__dict__").values()
    return size


def counted(values: Any) -> Any:
    """Count the work of looping over values: all at once, or one by one for an iterator."""
    if isinstance(values, Iterator):
        return _one_by_one(values)
    count(shallow(values))
    return values


def items(value: Any) -> Any:
    """Convert an iterator to a list, so that it has a size."""
    return list(_one_by_one(value)) if isinstance(value, Iterator) else value


def _one_by_one(values: Iterator) -> Iterator:
    for value in values:
        count(ITEM)
        yield value


def read(value: Any) -> Any:
    """Count the recursive size of a value that is compared or converted to text."""
    if isinstance(value, str):
        count(len(value))
    elif not isinstance(value, int | float | None):
        count(deep(value))
    return value


def check_operands(operator: str, left: Any, right: Any) -> None:
    """Raise TooLarge if the result of an operator would be too large."""
    sequences, are_ints = (str, bytes, list, tuple), isinstance(left, int) and isinstance(right, int)
    if operator == "+" and isinstance(left, sequences) and isinstance(right, sequences):
        check(len(left) + len(right))
        count(shallow(left) + shallow(right))
    elif operator == "*" and isinstance(left, sequences) and isinstance(right, int):
        check(len(left) * right)
        count(shallow(left) * max(right, 0))
    elif operator == "*" and isinstance(right, sequences) and isinstance(left, int):
        check_operands("*", right, left)
    elif operator == "*" and are_ints:
        check(left.bit_length() + right.bit_length(), _MAX_BITS)
    elif operator == "**" and are_ints:
        check(left.bit_length() * right, _MAX_BITS)
    elif operator == "%" and isinstance(left, str | bytes):
        check_growth("format", left, (right,), {})


def check_growth(name: str, value: Any, args: tuple, options: Mapping[str, Any]) -> None:
    """Raise TooLarge if the filter or method of this name would produce too large a result."""
    values = [*args, *options.values()]
    if name in ("format", "format_map", "strftime_now"):
        check(deep([value, *values]) + _widths(str(value), values))
    elif name in _PADS:
        check(deep(value) * max([_factor(argument) for argument in values], default=1))
    elif name == "replace" and len(values) > 1:
        text, old, new = map(str, (value, *values[:2]))
        check(len(text) + text.count(old) * len(new))
    elif name == "join":
        texts, separator = (values[0], value) if isinstance(value, str) and values else (value, [*values, ""][0])
        check(deep(texts) + shallow(texts) // ITEM * len(str(separator)))
    elif name == "translate" and isinstance(value, str):
        check(len(value) * deep(values) // ITEM)
    elif name in _SPLITTERS and isinstance(value, str):
        separator = values[0] if name.endswith("split") and values and isinstance(values[0], str) else ""
        check(value.count(separator) if separator else len(value) // 2, _MAX_PIECES)


def _factor(argument: Any) -> int:
    """The factor by which an argument can multiply the output: a width, or the length of a fill string."""
    return abs(argument) if isinstance(argument, int) else len(argument) if isinstance(argument, str) else 1


def _widths(text: str, arguments: Iterable[Any]) -> int:
    """Upper bound on the padding that a format string can add: the numbers in it, and numeric values if they are used
    as field widths (`*`, `{:{}}`)."""
    size = sum(int(number[:12]) for number in re.findall(r"\d+", text))
    if "*" in text or re.search(r"{[^{}]*{", text):
        nested = [arg.values() if isinstance(arg, Mapping) else arg for arg in arguments]
        values = [value for arg in nested for value in (arg if isinstance(arg, Iterable) else [arg])]
        size += max((abs(value) for value in values if isinstance(value, int)), default=0) * len(text)
    return size


# Hand-written edits for templates that `derived` cannot mark

_BEGIN, _FINISH = "{% generation %}", "{% endgeneration %}"
_CUT_THOUGHTS = "{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}"
# GLM has no end-of-turn token: the model generates the token that opens the next turn.
_GLM_NEXT = "{{ '<|system|>' if not loop.last and messages[loop.index0 + 1].role == 'system' else '<|user|>' }}"
_GLM_SPOKEN = "{% set spoken = loop.index0 > 0 and messages[loop.index0 - 1].role == 'assistant' %}"
_TURN_END = "{%- elif not (ns_tr_out.flag and not has_content and not next_nt.found) -%}\n            "


def _mark_if_model(expression: str) -> str:
    """The expression, marked if it is in the model's turn."""
    marked_expression = f"{_BEGIN}{expression}{_FINISH}"
    return f"{{%- if role == 'model' -%}}{marked_expression}{{%- else -%}}{expression}{{%- endif -%}}"


def _wrapped(first: str, last: str | None = None) -> tuple[tuple[str, str, int], ...]:
    """Edits that mark everything from `first` to `last`; None: the end is marked by another edit."""
    return ((first, _BEGIN + first, 1), *([] if last is None else [(last, last + _FINISH, 1)]))


def _deepseek(calls: str, answers: str, *more: tuple[str, str, int]) -> tuple[tuple[str, str, int], ...]:
    """Edits that mark assistant turns, with and without tool calls."""
    other_turns = f"{{%- if message['role'] == 'assistant' and {answers} %}}"
    marks = (other_turns, _BEGIN), ("{%- if message['role'] == 'tool' %}", "")
    ends = (("{%- endif %}" + tag, _FINISH + "{%- endif %}" + tag + begin, 1) for tag, begin in marks)
    return *_wrapped(calls), *ends, *more


# For each kind of template: (old text, new text, number of occurrences that is required)
_EDITS: tuple[tuple[tuple[str, str, int], ...], ...] = (
    # DeepSeek-R1's distilled models; reasoning of earlier turns is kept, as in TRL
    _deepseek("{%- for tool in message['tool_calls']%}", "message['content'] is not none", (_CUT_THOUGHTS, "", 1)),
    _deepseek(  # DeepSeek-V3; calls may now have their arguments as a dict
        "{%- for tool in message['tool_calls'] %}", "'tool_calls' not in message",
        ("tool['function']['arguments'] +", "(tool['function']['arguments'] | tojson) +", 3),
    ),
    (  # GLM-4.5
        ("{% for m in messages %}\n{%- if m.role == 'user' -%}<|user|>\n",
         f"{{% for m in messages %}}{_GLM_SPOKEN}{{%- if m.role == 'user' -%}}{{{{ '' if spoken else '<|user|>' }}}}"
         "{{ '\\n' }}", 1),
        ("{%- elif m.role == 'system' -%}\n<|system|>\n",
         "{%- elif m.role == 'system' -%}{{ '' if spoken else '<|system|>' }}{{ '\\n' }}", 1),
        *_wrapped("{%- if loop.index0 > ns.last_user_index and reasoning_content -%}"),
        ("</tool_call>{% endfor %}\n{% endif %}\n",
         f"</tool_call>{{% endfor %}}<|observation|>{{%- else -%}}{_GLM_NEXT}{{%- endif -%}}{_FINISH}", 1),
        ("{%- if loop.first or (messages[loop.index0 - 1].role != \"tool\") %}\n    {{- '<|observation|>' }}\n"
         "{%- endif %}\n", "", 1),
        ("<|observation|>{% for tr in m.content %}",
         "{{- '' if spoken else '<|observation|>' }}{% for tr in m.content %}", 1),
    ),
    (  # Templates that render tool answers within the model's turn (Gemma 4)
        *_wrapped("{{- '<|channel>thought\\n' +", "thinking_text + '\\n<channel|>' -}}"),
        *_wrapped("{{- '<|tool_call>call:' + function['name'] + '{' -}}", "{{- '}<tool_call|>' -}}"),
        ("{{- captured_content -}}", _mark_if_model("{{- captured_content -}}"), 1),
        (_TURN_END + "{{- '<turn|>\\n' -}}", _TURN_END + _mark_if_model("{{- '<turn|>\\n' -}}"), 1),
    ),
)  # fmt: skip


def edited(chat_template: str) -> str | None:
    """The template with the edits for its kind, with the same text and marks as TRL's; None if no kind matches."""
    for edits in _EDITS:
        result = chat_template.replace("\r\n", "\n")
        if all(result.count(old) == expected for old, _, expected in edits):
            for old, new, _ in edits:
                result = result.replace(old, new)
            return result
    return None


# Rewriting a template to add `{% generation %}` markers

SEPARATOR = "\x00"
_TURN = "turn_of_assistant"
# Tests whether a message is the last one, or comes after some index, usually the last user message's.
_PLACE = re.compile(r"\bloop\.last\b|\bloop\.index0?\s*>=?\s*\w+(?:\.\w+)?")
_END = (
    "{% if messages[-1]['role'] == 'assistant' %}{% generation %}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ eos_token }}{% endif %}"
)


class _Piece(NamedTuple):
    """The source of a tag, an expression or a text in a template. `words` are the tokens of a tag or an expression."""

    source: str
    tag: str = ""
    words: tuple[str, ...] = ()


def separated(template: str) -> str:
    """The template with `SEPARATOR` after each text and each expression."""
    separator = "{{ " + json.dumps(SEPARATOR) + " }}"
    return "".join(piece.source + separator * (not piece.tag) for piece in _pieces(template))


def marked(template: str, header: str, *, as_last: bool = False) -> str:
    """Put `{% generation %}` around each assistant turn except its header, and around an EOS token after the last turn.

    Args:
        header: the text that is rendered before the assistant's content.
        as_last: render every assistant turn like the last one of a conversation, so that the reasoning of earlier turns
            is kept.

    Raises:
        ValueError: a loop has no endfor.
    """
    pieces, parts, index = list(_pieces(template)), [], 0
    while index < len(pieces):
        piece = pieces[index]
        if piece.tag == "for" and piece.words[2] == "in":  # a loop with a single variable
            end = _end_of_body(pieces, index)
            body = pieces[index + 1 : end]
            assistant_body = [_as_last(piece) for piece in body] if as_last else body
            parts += [piece.source, _two_bodies(piece.words[1], assistant_body, body, header)]
            index = end
            continue
        parts.append(_END if parts and piece.words == ("eos_token",) else piece.source)
        index += 1
    return "".join(parts)


def _pieces(template: str) -> Iterator[_Piece]:
    """Split a template at its tags, dropping comments and the whitespace that tags trim."""
    environment, inside = Environment(trim_blocks=True, lstrip_blocks=True), []
    for _, kind, value in environment.lex(template):
        words = tuple(word for name, word in inside if name != "whitespace")
        source = " " + "".join(word for _, word in inside).strip() + " "
        if kind in ("block_begin", "variable_begin"):
            inside = []
        elif kind == "block_end":
            yield _Piece("{%" + source + "%}", words[0], words)
        elif kind == "variable_end":
            yield _Piece("{{" + source + "}}", words=words)
        elif kind == "data":
            yield _Piece("{{ " + json.dumps(value, ensure_ascii=False) + " }}")
        else:
            inside.append((kind, value))


def _end_of_body(pieces: list[_Piece], start: int) -> int:
    """Index of the tag that ends the body of the loop at `start`: its `endfor` or `else`."""
    opened = ["for"]
    for index in range(start + 1, len(pieces)):
        tag = pieces[index].tag
        if tag in ("if", "for"):
            opened.append(tag)
        elif tag in ("endif", "endfor"):
            opened.pop()
        if not opened or tag == "else" and opened == ["for"]:
            return index
    raise ValueError("a loop in the chat template has no endfor")


def _as_last(piece: _Piece) -> _Piece:
    """Replace the tests of the message's position in a tag with true, as for the last message."""
    if piece.tag not in ("if", "elif"):
        return piece
    return piece._replace(source=_PLACE.sub("true", piece.source))


def _two_bodies(message: str, assistant_body: list[_Piece], body: list[_Piece], header: str) -> str:
    """Combine a loop's body for assistant messages (`assistant_body`) with its body for all others.

    A break or continue within an assistant turn raises, because the captured text would be lost.
    """
    failure = "{{ raise_exception('the turn of the assistant ends within its loop') }}"
    collected = "".join(failure * (piece.tag in ("break", "continue")) + piece.source for piece in assistant_body)
    start = json.dumps(header, ensure_ascii=False)
    content, rest = f"{_TURN}[{len(header)}:]", ""
    if not header:  # trailing spaces belong to the first token of the next turn
        content, rest = f"{_TURN}.rstrip(' ')", f"{{{{ {_TURN}[({_TURN}.rstrip(' ') | length):] }}}}"
    return (
        f"{{% if {message} is mapping and {message}['role'] == 'assistant' %}}"
        f"{{% set {_TURN} %}}{collected}{{% endset %}}"
        f"{{% if {_TURN} and {_TURN}.startswith({start}) %}}{{{{ {start} }}}}"
        f"{{% generation %}}{{{{ {content} }}}}{{% endgeneration %}}{rest}"
        f"{{% elif {_TURN} %}}{{{{ raise_exception('a turn of the assistant has another header') }}}}{{% endif %}}"
        f"{{% else %}}{''.join(piece.source for piece in body)}{{% endif %}}"
    )
