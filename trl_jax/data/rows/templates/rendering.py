"""Render chat templates within the limits of `limits`.

jinja2's sandbox lets us look at operators, calls, filters and the growing text. What it computes without asking (loops,
slices, comparisons, `~`) gets a filter of ours around its values before a template is compiled.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers.utils import chat_template_utils

from trl_jax.data.rows.templates import limits

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
        limits.check(size)
    return "".join(found)


def _bounded(name: str, function: Callable) -> Callable:
    """A filter that counts what it is given, and refuses to make too much of it."""
    before = int("jinja_pass_arg" in dir(function))  # an argument of jinja2's own comes first

    @functools.wraps(function)
    def bounded(*args: Any, **options: Any) -> Any:
        own, value, given = args[:before], args[before], args[before + 1 :]
        value = limits.counted(value) if name in _BY_ITEM else limits.read(limits.items(value))
        limits.check_growth(name, value, given, options)
        return function(*own, value, *given, **options)

    return bounded


class _Filters(dict):
    """Filters by name; each that is set becomes a bounded one."""

    def __setitem__(self, name: str, function: Callable) -> None:
        super().__setitem__(name, _bounded(name, function))


def _compared(test: Callable) -> Callable:
    return lambda *values: test(*map(limits.read, values))


class _Bounded(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%"})
    concat = staticmethod(_joined)

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options, finalize=limits.read)
        found, self.filters = self.filters, _Filters()
        for name, function in found.items():
            self.filters[name] = function
        dict.update(self.filters, {_COUNTED: limits.counted, _READ: limits.read})
        self.tests = self.tests | {name: _compared(self.tests[name]) for name in _COMPARING}
        del self.globals["lipsum"]  # makes as much text as it is asked for

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        limits.check_operands(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, function: Any, *args: Any, **options: Any) -> Any:
        method = vars(function).get("__wrapped__", function) if isinstance(function, types.FunctionType) else function
        limits.count(limits.CALL + sum(map(limits.shallow, args)))
        if isinstance(method, types.BuiltinMethodType) and not isinstance(method.__self__, types.ModuleType):
            args = tuple(map(limits.items, args))
            limits.count(limits.shallow(method.__self__))
            limits.check_growth(method.__name__, method.__self__, args, options)
        elif isinstance(method, types.FunctionType) and args:
            limits.check_growth(method.__name__, args[0], args[1:], options)
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
    return isinstance(node, nodes.Const) or isinstance(node, nodes.List | nodes.Tuple) and all(
        map(_is_constant, node.items)
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
    limits.begin()
    try:
        yield
    finally:
        chat_template_utils._compile_jinja_template = theirs
        limits.end()
