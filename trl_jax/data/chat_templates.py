"""Chat templates: rendering within limits, templates for training, and how tool calls are written."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from jinja2 import Environment, TemplateError, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from transformers.utils import chat_template_utils

# ----------------------------------------------------------------------------------------------------
# Chat templates and tools: whether a template shows a tool's call and answer, and does not rewrite what is before.


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


# ----------------------------------------------------------------------------------------------------
# Chat templates that mark what the assistant says: TRL's where trl is installed, else derived and tried on talks.


_THINK = "<think>"
# Words that stand in no template, by who says them; an argument of a tool is the assistant's.
_ASKED, _TOLD, _RULE = "user_asks_{}_4c1d", "tool_tells_{}_9b2d", "system_rules_1e8f"
_SAID, _THOUGHT, _CALLED = "assistant_says_{}_7f3a", "assistant_thinks_{}_5c1e", "assistant_calls_3d2b"
_OTHERS = re.compile(r"(?:user_asks|tool_tells|system_rules)_\w+")
_OWN = re.compile(r"assistant_(?:says|thinks|calls)_\w+")
_UNENDED = re.compile(rf"(?:{_OWN.pattern})\s*\Z")  # the assistant would not learn to stop
_TOKENS = {f"{name}_token": f"\x02{name}\x03" for name in ("bos", "eos", "pad", "unk")}


_PLAIN = ("user", "assistant")
_TALKS = (
    (*_PLAIN, *_PLAIN),
    ("system", *_PLAIN, *_PLAIN, "user"),
    ("user", "thinking", "user", "thinking"),
    ("user", "tagged", "user", "tagged"),
    ("user", "calling", "tool", "assistant", *_PLAIN),
)


def has_generation_markers(chat_template: str | dict[str, str]) -> bool:
    """Whether a template marks what the assistant says; of several by name, the one called "default"."""
    text = chat_template["default"] if isinstance(chat_template, dict) else chat_template
    return re.search(r"\{%-?\s*generation\s*-?%\}", text) is not None


def training_template(chat_template: str | dict[str, str]) -> str:
    """A template that renders an assistant's turn as this one, and marks what the assistant says.

    TRL has one beside each template that it knows, and some of them keep thoughts that the template itself leaves out
    of earlier turns. Others are derived by `derived`.

    Raises:
        ValueError: TRL has none, or is not installed, and none can be derived.
    """
    text = chat_template["default"] if isinstance(chat_template, dict) else chat_template
    found = _of_trl(text) or derived(text)
    if found is None:
        raise ValueError(
            "The chat template is not training-compatible (missing prefix-preservation or `{% generation %}` markers) "
            "and patching is not supported for this template. Edit it by hand: wrap the assistant's content and its "
            "end-of-turn token in `{% generation %}` and `{% endgeneration %}`, and pass the file as "
            "chat_template_path. (If trl is installed, its training templates are used.)"
        )
    return found


def stop_token_is_trained(tokenizer: Any, chat_template: str | None) -> bool:
    """Whether the last token that a template marks, but for whitespace, is an added one, which ends the turn.

    None is the tokenizer's own template. One that takes no plain talk is taken to leave the token out, as in TRL.
    """
    talk = _talk("str", "user", "assistant", "user")
    options = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
    try:
        found = apply_chat_template(tokenizer, talk, chat_template=chat_template, **options)
    except (TemplateError, TypeError, ValueError):
        return False
    said = [token for token, own in zip(found["input_ids"], found["assistant_masks"], strict=True) if own]
    last = next((token for token in reversed(said) if tokenizer.decode([token]).strip()), None)
    return last in tokenizer.get_added_vocab().values()


def _of_trl(chat_template: str) -> str | None:
    """TRL has a template for training beside each that it knows: `NAME.jinja` and `NAME_training.jinja`."""
    trl = importlib.util.find_spec("trl")
    folders = [] if trl is None else [Path(place) / "chat_templates" for place in trl.submodule_search_locations or ()]
    for known in (file for folder in folders for file in folder.glob("*.jinja")):
        better = known.with_name(f"{known.stem}_training.jinja")
        if better.is_file() and known.read_text(encoding="utf-8") == chat_template:
            return better.read_text(encoding="utf-8")
    return None


def derived(chat_template: str) -> str | None:
    """The template with what the assistant says marked; None unless it is unmarked and stands the test of a few talks.

    In each of them it must render the same text, mark all that the assistant says and nothing that others do, and
    render the beginning of a talk in the same way when the talk goes on. Of a template that leaves thoughts out of
    earlier turns, or puts them into the last one alone, every turn is rendered as the last: the same text where there
    is one turn.
    """
    if has_generation_markers(chat_template):
        return None
    try:
        kind = next(kind for kind in ("str", "parts") if _SAID.format(1) in _text(chat_template, _talk(kind, *_PLAIN)))
        header = _header(chat_template, kind)
        if header is None:
            return None
        tried = ((marked(chat_template, header, as_last=as_last), as_last) for as_last in (False, True))
        return next((found for found, as_last in tried if _stands(chat_template, found, kind, as_last)), None)
    except Exception:  # a template may raise anything, and then it is none that we know how to mark
        return None


def _talk(kind: str, *roles: str) -> list[dict[str, Any]]:
    """A talk in which every message has words of its own; content is a text, or a list of parts."""
    return [_message(kind, role, number) for number, role in enumerate(roles)]


def _message(kind: str, role: str, number: int) -> dict[str, Any]:
    contents = {"user": _ASKED, "tool": _TOLD, "system": _RULE, "tagged": f"{_THINK}\n{_THOUGHT}\n</think>\n\n{_SAID}"}
    content: Any = contents.get(role, _SAID).format(*[number] * 2)
    if kind == "parts":
        content = [{"type": "text", "text": content}]
    message = {"role": role if role in ("user", "tool", "system") else "assistant", "content": content}
    if role == "thinking":
        message["reasoning_content"] = _THOUGHT.format(number)
    if role == "calling":
        call = {"name": "look", "arguments": {"at": _CALLED}}
        message["tool_calls"] = [{"type": "function", "function": call}]
    return message | ({"name": "look"} if role == "tool" else {})


def _text(template: str, talk: list[dict[str, Any]], **options: Any) -> str:
    return render(template, talk, **_TOKENS, **options)[0]


def _header(template: str, kind: str) -> str | None:
    """The text that a template renders before the assistant says something; None where turns begin in several ways.

    It is what the generation prompt adds, without the tag that opens a thought. Where a turn has it again in its
    middle, the assistant writes it itself, and it is no header. Where an expression writes its end along with what the
    assistant says, only what is before that expression is the header: so TRL's templates have it.
    """
    asked = _text(template, _talk(kind, "user"))
    prompted = _text(template, _talk(kind, "user"), add_generation_prompt=True)
    start = len(os.path.commonprefix([asked, prompted]))
    prompt, answered = prompted[start:], _text(template, _talk(kind, *_PLAIN))
    header = prompt.split(_THINK)[0]
    same = answered.startswith(_THINK if _THINK in prompt else "", start + len(header))
    if asked[start:] not in ("", _TOKENS["eos_token"]) or not header or not same:
        return None
    if not answered.startswith(asked[:start] + header):
        return None
    if _text(template, _talk(kind, "user", "thinking"))[start:].count(header) > 1:
        return ""
    ends = [_content_starts(template, _talk(kind, "user", role)) - start for role in ("assistant", "calling")]
    return header[: min([end for end in ends if end > 0], default=len(header))]


def _content_starts(template: str, talk: list[dict[str, Any]]) -> int:
    """The place in the text where the expression starts that writes what the assistant says first; 0: it cannot be
    said."""
    try:
        parts = _text(separated(template), talk).split(SEPARATOR)
    except Exception:  # no tools in this template
        return 0
    before = 0
    for part in parts:
        if _OWN.search(part):
            return before
        before += len(part)
    return 0


def _stands(template: str, found: str, kind: str, as_last: bool) -> bool:
    return all(_stands_in(template, found, _talk(kind, *roles), as_last) for roles in _TALKS)


def _stands_in(template: str, found: str, talk: list[dict[str, Any]], as_last: bool) -> bool:
    """Whether a marked template is right in a talk, or the template itself takes no such talk."""
    try:
        text = _text(template, talk)
    except Exception:  # a template may raise anything where it takes no such talk
        return _TALKS[0] != tuple(message["role"] for message in talk)
    other, spans = render(found, talk, spans=True, **_TOKENS)
    if as_last:  # earlier turns may differ
        text = other
        if _UNENDED.search("".join(text[start:end] for start, end in spans)):
            return False
    edges = [0, *(edge for span in spans for edge in span), len(text)]
    outside = "".join(text[start:end] for start, end in list(pairwise(edges))[::2])
    inside = "".join(text[start:end] for start, end in spans)
    said = {word for message in talk if "tool_calls" not in message for word in _OWN.findall(str(message["content"]))}
    ends = [i + 1 for i, message in enumerate(talk) if message["role"] == "assistant"]
    begun = [_text(template, talk[: ends[0]]), *(_text(found, talk[:end]) for end in ends)]
    goes_on = all(text.startswith(start.removesuffix(_TOKENS["eos_token"])) for start in begun)
    right = other == text and goes_on and said <= set(_OWN.findall(inside))
    return right and not _OWN.search(outside) and not _OTHERS.search(inside)


# ----------------------------------------------------------------------------------------------------
# How calls of tools are told from text, for tokenizers without a `response_template` of their own.


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
_ASSISTANT_TURN = r"<\|im_start\|>assistant\n.*{call}\s*<\|im_end\|>"


def response_template(tokenizer: Any) -> dict[str, Any]:
    """The `response_template` that goes with a tokenizer's chat template.

    Raises:
        ValueError: it writes calls of tools in another form.
    """
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": "b"}}}
    talk = [{"role": "user", "content": "-"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    text = apply_chat_template(tokenizer, talk, tokenize=False)
    for form, template in _FORMS.items():
        if re.search(_ASSISTANT_TURN.replace("{call}", form), text, re.DOTALL):
            return template
    raise ValueError(
        "trl_jax does not recognize the format in which this chat template writes tool calls. Set "
        "tokenizer.response_template, from which transformers' tokenizer.parse_response learns to parse them; "
        "trl.chat_template_utils.add_response_schema(tokenizer) sets it for the templates that TRL knows."
    )


# ----------------------------------------------------------------------------------------------------
# Render chat templates within the limits of `limits`.


_PIECES = 2**12  # of text, joined at once
_COUNTED, _READ = "trl_jax_counted", "trl_jax_read"  # our filters
_BY_ITEM = frozenset(  # filters that do not look into items
    "attr batch count d default first items last length list map reject rejectattr reverse select selectattr slice"
    .split()
)  # fmt: skip
_COMPARING = "eq equalto == ne != lt lessthan < le <= gt greaterthan > ge >= in".split()  # tests
_compile = chat_template_utils._compile_jinja_template.__wrapped__  # without transformers' cache


def _joined(pieces: Iterable[str]) -> str:
    pieces, found, size = iter(pieces), [], 0
    while some := list(islice(pieces, _PIECES)):
        found.append("".join(some))
        size += len(found[-1])
        check(size)
    return "".join(found)


def _bounded(name: str, function: Callable) -> Callable:
    """A filter that counts what it is given, and refuses to make too much of it."""
    before = int("jinja_pass_arg" in dir(function))  # an argument of jinja2's own comes first

    @functools.wraps(function)
    def bounded(*args: Any, **options: Any) -> Any:
        own, value, given = args[:before], args[before], args[before + 1 :]
        value = counted(value) if name in _BY_ITEM else read(items(value))
        check_growth(name, value, given, options)
        return function(*own, value, *given, **options)

    return bounded


class _Filters(dict):
    """Filters by name; each that is set becomes a bounded one."""

    def __setitem__(self, name: str, function: Callable) -> None:
        super().__setitem__(name, _bounded(name, function))


def _compared(test: Callable) -> Callable:
    return lambda *values: test(*map(read, values))


class _Bounded(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%"})
    concat = staticmethod(_joined)

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options, finalize=read)
        found, self.filters = self.filters, _Filters()
        for name, function in found.items():
            self.filters[name] = function
        dict.update(self.filters, {_COUNTED: counted, _READ: read})
        self.tests = self.tests | {name: _compared(self.tests[name]) for name in _COMPARING}
        del self.globals["lipsum"]  # makes as much text as it is asked for

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
            text.nodes = [self._filtered(one, _READ) for one in text.nodes]
        for comparison in list(source.find_all(nodes.Compare)):
            if not any(map(_is_constant, (comparison.expr, *(other.expr for other in comparison.ops)))):
                for one in (comparison, *comparison.ops):
                    one.expr = self._filtered(one.expr, _READ)
        return super()._generate(source, *args, **options)

    def _filtered(self, value: nodes.Expr, name: str) -> nodes.Filter:
        return nodes.Filter(value, name, [], [], None, None, lineno=value.lineno, environment=self)


def _is_constant(node: nodes.Expr) -> bool:
    """Whether comparing with it is as good as free."""
    return (
        isinstance(node, nodes.Const)
        or isinstance(node, nodes.List | nodes.Tuple)
        and all(map(_is_constant, node.items))
    )


@functools.lru_cache(128)
def _compiled(template: str) -> Any:
    """The template with limits, whether or not transformers has compiled the same without."""
    chat_template_utils.ImmutableSandboxedEnvironment = _Bounded  # looked up while it compiles
    try:
        return _compile(template)
    finally:
        chat_template_utils.ImmutableSandboxedEnvironment = ImmutableSandboxedEnvironment


def apply_chat_template(tokenizer: Any, messages: list[dict], **options: Any) -> Any:
    """Call `tokenizer.apply_chat_template(messages, **options)` with limits of size and work.

    The package renders conversations through this function alone; `chat.rendered` also names the row in errors.

    Raises:
        TooLarge: the template makes or does more than the limits.
    """
    with _limited():
        return tokenizer.apply_chat_template(messages, **options)


def render(
    template: str, messages: list[dict], *, spans: bool = False, **variables: Any
) -> tuple[str, list[tuple[int, int]]]:
    """The text of messages, with the same limits and, if asked for, its spans within `{% generation %}`."""
    with _limited():
        texts, found = chat_template_utils.render_jinja_template(
            [messages], chat_template=template, return_assistant_tokens_mask=spans, **variables
        )
    return texts[0], found[0] if spans else []


@contextmanager
def _limited() -> Iterator[None]:
    """A context in which transformers compiles templates with limits."""
    theirs = chat_template_utils._compile_jinja_template
    chat_template_utils._compile_jinja_template = _compiled
    begin()
    try:
        yield
    finally:
        chat_template_utils._compile_jinja_template = theirs
        end()


# ----------------------------------------------------------------------------------------------------
# Messages with images: TRL's `prepare_multimodal_messages`.


_ROLES = ("system", "user", "assistant", "tool")


def prepare_multimodal_messages(messages: list[dict[str, Any]], images: list | None = None) -> list[dict[str, Any]]:
    """Turn the content of messages into lists of parts, and put `images` at their placeholders.

    Text becomes a part of its own; where the first message of the user is text, all images go before it. A part
    `{"type": "image"}` without an image is a placeholder, except in a tool's message.

    Raises:
        ValueError: an unknown role, or another number of placeholders than of images.
    """
    waiting, images = iter(images or ()), list(images or ())
    messages = _in_parts(messages, len(images))
    places = sum(_is_place(part) for message in messages for part in _parts_with_places(message))
    if places != len(images):
        raise ValueError(
            f"Number of images provided ({len(images)}) does not match number of image placeholders ({places})."
        )

    def filled(part: dict[str, Any]) -> dict[str, Any]:
        return {**part, "image": next(waiting)} if _is_place(part) else part

    return [
        {**message, "content": [filled(part) for part in parts]} if (parts := _parts_with_places(message)) else message
        for message in messages
    ]


def _in_parts(messages: list[dict[str, Any]], images: int) -> list[dict[str, Any]]:
    converted = []
    for message in messages:
        if message["role"] not in _ROLES:
            raise ValueError(f"Invalid role in message: {message['role']}. Expected {', '.join(_ROLES)}.")
        content = message.get("content")
        if isinstance(content, str):
            before, text = [], {"type": "text", "text": content}
            if message["role"] == "user":
                before, images = [{"type": "image"} for _ in range(images)], 0
            message = {**message, "content": [*before, text]}
        converted.append(message)
    return converted


def _parts_with_places(message: dict[str, Any]) -> list[dict[str, Any]]:
    return [] if message["role"] == "tool" else message.get("content") or []


def _is_place(part: dict[str, Any]) -> bool:
    return part["type"] == "image" and "image" not in part


# ----------------------------------------------------------------------------------------------------
# Limits of what a chat template may make and do: templates come from anyone, and one line can ask for all there is.


MAX_CHARACTERS = 2**27  # of a text, and items of a list
MAX_WORK = 2**29  # characters that the operations of one rendering read
ITEM = 64  # characters: a number, an item of a list or a step of a loop counts like so many
CALL = 16 * ITEM  # so does one call
_MAX_PIECES = 2**24  # into which a text is taken apart
_MAX_BITS = 2**16  # of a whole number
_PADS = frozenset(
    "batch center expandtabs indent ljust rjust round slice to_bytes tojson wordwrap zfill".split()
)  # filters and methods that repeat something as often as an argument says
_APART = frozenset(("split", "rsplit", "splitlines", "list"))  # that make a list of a text
_left: ContextVar[int | None] = ContextVar("left", default=None)  # of MAX_WORK; None while nothing is rendered


class TooLarge(jinja2.TemplateError):
    """A template makes a text, a list or a number that is too large, or does more than MAX_WORK."""


def begin() -> None:
    """Count anew: a rendering begins."""
    _left.set(MAX_WORK)


def end() -> None:
    """Count no more: what is compiled from now on belongs to no rendering."""
    _left.set(None)


def check(size: int, maximum: int | None = None) -> None:
    """Raise TooLarge for a size of more than `maximum`, MAX_CHARACTERS if None."""
    maximum = MAX_CHARACTERS if maximum is None else maximum
    if size > maximum:
        raise TooLarge(f"more than {maximum:,}")


def count(size: int) -> None:
    """Take the size of an operation from what is left of MAX_WORK."""
    left = _left.get()
    if left is not None:
        check(size, left)
        _left.set(left - size)


def shallow(value: Any) -> int:
    """The size of a value of which nothing but the items is looked at; of an iterator, which has none, that of one."""
    if isinstance(value, str | bytes):
        return len(value)
    return ITEM * (1 + len(value)) if isinstance(value, list | tuple | dict | set | frozenset | range) else ITEM


def deep(value: Any) -> int:
    """The size of all that is in a value, what is there many times as often; at most a little above MAX_WORK."""
    size, waiting = 0, [value]
    while waiting and size <= MAX_WORK:
        one = waiting.pop()
        size += ITEM
        if isinstance(one, str | bytes):
            size += len(one)
        elif isinstance(one, Mapping):
            waiting += [*one.keys(), *one.values()]
        elif isinstance(one, list | tuple | set | frozenset):
            waiting += one
        elif isinstance(one, Namespace):  # whose own attributes are the template's
            waiting += object.__getattribute__(one, "__dict__").values()
    return size


def counted(values: Any) -> Any:
    """The values of a loop, counted at once, or one by one where they are an iterator's."""
    if isinstance(values, Iterator):
        return _one_by_one(values)
    count(shallow(values))
    return values


def items(value: Any) -> Any:
    """The values of a filter, those of an iterator as a list, so that they have a size."""
    return list(_one_by_one(value)) if isinstance(value, Iterator) else value


def _one_by_one(values: Iterator) -> Iterator:
    for value in values:
        count(ITEM)
        yield value


def read(value: Any) -> Any:
    """A value that becomes text or is compared, counted with all that is in it."""
    if isinstance(value, str):
        count(len(value))
    elif not isinstance(value, int | float | None):
        count(deep(value))
    return value


def check_operands(operator: str, left: Any, right: Any) -> None:
    """Raise TooLarge where the result of an operator would be."""
    sequences, whole = (str, bytes, list, tuple), isinstance(left, int) and isinstance(right, int)
    if operator == "+" and isinstance(left, sequences) and isinstance(right, sequences):
        check(len(left) + len(right))
        count(shallow(left) + shallow(right))
    elif operator == "*" and isinstance(left, sequences) and isinstance(right, int):
        check(len(left) * right)
        count(shallow(left) * max(right, 0))
    elif operator == "*" and isinstance(right, sequences) and isinstance(left, int):
        check_operands("*", right, left)
    elif operator == "*" and whole:
        check(left.bit_length() + right.bit_length(), _MAX_BITS)
    elif operator == "**" and whole:
        check(left.bit_length() * right, _MAX_BITS)
    elif operator == "%" and isinstance(left, str | bytes):
        check_growth("format", left, (right,), {})


def check_growth(name: str, value: Any, args: tuple, options: Mapping[str, Any]) -> None:
    """Raise TooLarge where a filter or a method of this name would make too much of a value."""
    given = [*args, *options.values()]
    if name in ("format", "format_map", "strftime_now"):
        check(deep([value, *given]) + _widths(str(value), given))
    elif name in _PADS:
        check(deep(value) * max([_number(one) for one in given], default=1))
    elif name == "replace" and len(given) > 1:
        text, old, new = map(str, (value, *given[:2]))
        check(len(text) + text.count(old) * len(new))
    elif name == "join":
        texts, between = (given[0], value) if isinstance(value, str) and given else (value, [*given, ""][0])
        check(deep(texts) + shallow(texts) // ITEM * len(str(between)))
    elif name == "translate" and isinstance(value, str):
        check(len(value) * deep(given) // ITEM)
    elif name in _APART and isinstance(value, str):
        by = given[0] if name.endswith("split") and given and isinstance(given[0], str) else ""
        check(value.count(by) if by else len(value) // 2, _MAX_PIECES)


def _number(given: Any) -> int:
    """How often an argument may have something repeated: a width, or the characters of a filling."""
    return abs(given) if isinstance(given, int) else len(given) if isinstance(given, str) else 1


def _widths(text: str, given: Iterable[Any]) -> int:
    """How many characters the fields of a format may be padded with: the numbers in it, and for fields that ask for
    them (`*`, `{:{}}`) those among its values."""
    size = sum(int(number[:12]) for number in re.findall(r"\d+", text))
    if "*" in text or re.search(r"{[^{}]*{", text):
        nested = [one.values() if isinstance(one, Mapping) else one for one in given]
        values = [two for one in nested for two in (one if isinstance(one, Iterable) else [one])]
        size += max((abs(one) for one in values if isinstance(one, int)), default=0) * len(text)
    return size


# ----------------------------------------------------------------------------------------------------
# Rewrite a chat template so that it marks what the assistant says with `{% generation %}`, as transformers wants it.


SEPARATOR = "\x00"
_TURN = "turn_of_assistant"
# Whether the message is the last, or stands behind a place that was found before: the last question, mostly.
_PLACE = re.compile(r"\bloop\.last\b|\bloop\.index0?\s*>=?\s*\w+(?:\.\w+)?")
_END = (
    "{% if messages[-1]['role'] == 'assistant' %}{% generation %}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ eos_token }}{% endif %}"
)


class _Piece(NamedTuple):
    """A tag, an expression or a text of a template, as source. words: of a tag or an expression; of a text none."""

    source: str
    tag: str = ""
    words: tuple[str, ...] = ()


def separated(template: str) -> str:
    """The template with `SEPARATOR` behind each text and each expression that it renders."""
    behind = "{{ " + json.dumps(SEPARATOR) + " }}"
    return "".join(piece.source + behind * (not piece.tag) for piece in _pieces(template))


def marked(template: str, header: str, *, as_last: bool = False) -> str:
    """The template with `{% generation %}` around all of an assistant's turn but its header.

    So is the EOS token that ends a conversation behind the last turn.

    Args:
        header: what is rendered before the assistant says something.
        as_last: each turn of the assistant is rendered as the last of its conversation is: thoughts of earlier turns
            stay where the template leaves them out.

    Raises:
        ValueError: a loop does not end.
    """
    found, parts, at = list(_pieces(template)), [], 0
    while at < len(found):
        piece = found[at]
        if piece.tag == "for" and piece.words[2] == "in":  # over one variable
            end = _end_of_body(found, at)
            body = found[at + 1 : end]
            own = [_as_last(one) for one in body] if as_last else body
            parts += [piece.source, _two_bodies(piece.words[1], own, body, header)]
            at = end
            continue
        parts.append(_END if parts and piece.words == ("eos_token",) else piece.source)
        at += 1
    return "".join(parts)


def _pieces(template: str) -> Iterator[_Piece]:
    """Split a template at its tags; whitespace that they trim is gone, and so are comments."""
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


def _end_of_body(found: list[_Piece], start: int) -> int:
    """The place of the tag that ends the body of the loop which starts at a place: its `endfor` or its `else`."""
    opened = ["for"]
    for at in range(start + 1, len(found)):
        tag = found[at].tag
        if tag in ("if", "for"):
            opened.append(tag)
        elif tag in ("endif", "endfor"):
            opened.pop()
        if not opened or tag == "else" and opened == ["for"]:
            return at
    raise ValueError("a loop in the chat template has no endfor")


def _as_last(piece: _Piece) -> _Piece:
    """A tag whose conditions on the message's place in the conversation are those of the last message."""
    if piece.tag not in ("if", "elif"):
        return piece
    return piece._replace(source=_PLACE.sub("true", piece.source))


def _two_bodies(message: str, own: list[_Piece], body: list[_Piece], header: str) -> str:
    """A loop's body for what the assistant says, its `own`, and for all else; one that leaves early would lose what it
    said."""
    leaves = "{{ raise_exception('the turn of the assistant ends within its loop') }}"
    collected = "".join(leaves * (piece.tag in ("break", "continue")) + piece.source for piece in own)
    start = json.dumps(header, ensure_ascii=False)
    return (
        f"{{% if {message} is mapping and {message}['role'] == 'assistant' %}}"
        f"{{% set {_TURN} %}}{collected}{{% endset %}}"
        f"{{% if {_TURN} and {_TURN}.startswith({start}) %}}{{{{ {start} }}}}"
        f"{{% generation %}}{{{{ {_TURN}[{len(header)}:] }}}}{{% endgeneration %}}"
        f"{{% elif {_TURN} %}}{{{{ raise_exception('a turn of the assistant has another header') }}}}{{% endif %}}"
        f"{{% else %}}{''.join(piece.source for piece in body)}{{% endif %}}"
    )
