"""Chat templates that need too much memory or time raise an error that names the row; other templates render as
before."""

from __future__ import annotations

import time
import tracemalloc

import pytest
from datasets import IterableDataset
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers.utils import chat_template_utils

from compat_tests.effort import THOROUGH, usual
from compat_tests.tiny import tiny_tokenizer
from trl_jax.data import chat_templates
from trl_jax.data.reward import prepare

CHAT = [{"role": "user", "content": "hi"}]
ROW = {"chosen": CHAT, "rejected": CHAT}


def ready(tokenizer, row=None):
    rows = IterableDataset.from_generator(lambda: iter([row or ROW]))
    return list(prepare(rows, tokenizer, max_length=None, num_proc=None, name="train"))


def with_template(template):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def repeated(statement, times=60):
    return f"{{% set x = namespace(n=10, s='aaaa', l=[0]) %}}{{% for i in range({times}) %}}{statement}{{% endfor %}}"


TOO_MUCH = {
    "product": "{{ 'a' * 10**10 }}",
    "product_of_a_list": "{{ ([0] * 10**9) | length }}",
    "the_other_way": "{{ 10**10 * messages[0].role }}",
    "power": "{{ 10 ** (10 ** 10) }}",
    "square": repeated("{% set x.n = x.n * x.n %}"),
    "sum": repeated("{% set x.s = x.s + x.s %}"),
    "pieces": "{% for i in range(99999) %}{% for j in range(99999) %}{{ messages[0].content }}{% endfor %}{% endfor %}",
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}" + "a" * 999 + "{% endfor %}{% endfor %}",
    "concatenation": repeated("{% set x.s = x.s ~ x.s %}"),
    "join": "{{ range(99999) | join('x' * 99999) }}",
    "join_of_a_map": "{{ range(99999) | map('string') | join('x' * 99999) }}",
    "method_join": "{{ ('x' * 99999).join(['a'] * 99999) }}",
    "replace": "{{ ('a' * 99999) | replace('a', 'b' * 99999) }}",
    "method_replace": "{{ ('a' * 99999).replace('', 'b' * 99999) }}",
    "center": "{{ 'a' | center(10**10) }}",
    "ljust": "{{ messages[0].content.ljust(10**10) }}",
    "zfill": "{{ '1'.zfill(10**10) }}",
    "expandtabs": "{{ ('\t' * 999).expandtabs(10**8) }}",
    "indent": "{{ ('a\n' * 99999) | indent(99999) }}",
    "indent_by_text": "{{ ('a\n' * 99999) | indent('x' * 99999) }}",
    "batch": "{{ [1] | batch(10**10, 0) | list | length }}",
    "slice": "{{ [1] | slice(10**10) | list | length }}",
    "wordwrap": "{{ ('a ' * 99999) | wordwrap(1, wrapstring='x' * 99999) }}",
    "tojson": "{{ ([0] * 99999) | tojson(indent=99999) }}",
    "to_bytes": "{{ (1).to_bytes(10**10, 'big') | length }}",
    "round": "{{ 1.5 | round(10**9, 'floor') }}",
    "percent": "{{ '%10000000000d' % 1 }}",
    "percent_star": "{{ '%*d' % (10**10, 1) }}",
    "format_filter": "{{ '%10000000000d' | format(1) }}",
    "format": "{{ '{:>10000000000}'.format(1) }}",
    "format_nested": "{{ '{:>{}}'.format(1, 10**10) }}",
    "format_map": "{{ '{:>{w}}'.format_map({'w': 10**10}) }}",
    "format_of_an_attribute": "{{ ('{:>10000000000}' | attr('format'))(1) }}",
    "strftime": "{{ strftime_now('%10000000000d') }}",
    "translate": "{{ ('a' * 99999).translate({97: 'x' * 99999}) }}",
    "map": "{{ ['a'] | map('center', 10**10) | list }}",
    "filter_block": "{% filter center(10**10) %}a{% endfilter %}",
    "lists_in_lists": repeated("{% set x.l = [x.l, x.l] %}") + "{{ x.l }}",
    "lists_as_json": repeated("{% set x.l = [x.l, x.l] %}") + "{{ x.l | tojson | length }}",
    "lists_in_text": repeated("{% set x.l = [x.l, x.l] %}") + "{{ ('' ~ x.l) | length }}",
    "lists_in_format": repeated("{% set x.l = [x.l, x.l] %}") + "{{ ('%s' % x.l) | length }}",
    "lists_compared": repeated("{% set x.l = [x.l, x.l] %}{% set x.n = [x.n, x.n] %}")
    + "{% set x.m = x.l %}" + repeated("{% set x.l = [x.l, x.l] %}") + "{{ x.l == x.n }}",
    "namespace": repeated("{% set x.l = [x.l, x.l] %}") + "{{ x }}",
    "steps": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "steps_left_out": "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
    "steps_of_filters": "{% for i in range(99999) %}{% set a = range(99999) | map('string') | list %}{% endfor %}",
    "calls": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "recursive_loop": "{% for i in range(9999) recursive %}{{ loop(range(9999)) if loop.depth < 9 }}{% endfor %}",
    "slices": "{% set l = [0] * 999999 %}{% for i in range(99999) %}{% set m = l[1:] %}{% endfor %}",
    "split": "{{ ('a ' * 2**24 * 3).split() | length }}",
}  # fmt: skip


@usual(
    "product", "product_of_a_list", "the_other_way", "power", "square", "sum", "pieces", "loops", "concatenation",
    "join", "join_of_a_map", "method_join", "replace", "method_replace", "center", "ljust", "zfill", "expandtabs",
    "indent", "indent_by_text", "batch", "slice", "wordwrap", "tojson", "to_bytes", "round", "percent",
    "percent_star", "format_filter", "format", "format_nested", "format_map", "format_of_an_attribute", "strftime",
    "translate", "map", "filter_block", "lists_as_json", "namespace", "steps", "steps_left_out", "steps_of_filters",
    "calls", "recursive_loop", "slices", "split",
)  # fmt: skip
@pytest.mark.parametrize("kind", TOO_MUCH)
def test_a_template_that_asks_for_all_memory_or_time(kind, monkeypatch):
    if kind != "split":
        monkeypatch.setattr(chat_templates, "MAX_CHARACTERS", 10**6)  # lower limits: the real ones would need gigabytes
        monkeypatch.setattr(chat_templates, "MAX_WORK", 10**7 if THOROUGH else 10**6)
    tokenizer = with_template(TOO_MUCH[kind])
    ready(with_template("{{ messages[0].content }}"))  # do imports first
    tracemalloc.start()
    start = time.process_time()
    with pytest.raises(ValueError, match="Row 0 of train_dataset: the tokenizer's chat template produces .* too large"):
        ready(tokenizer)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < (500e6 if kind == "split" else 50e6) and time.process_time() - start < 30


def test_the_limits_are_counted_for_each_rendering(monkeypatch):
    monkeypatch.setattr(chat_templates, "MAX_WORK", 10**5)
    tokenizer = with_template("{% for i in range(700) %}{% endfor %}{{ messages[0].content }}")
    rows = [ROW] * 9
    dataset = IterableDataset.from_generator(lambda: iter(rows))
    assert len(list(prepare(dataset, tokenizer, max_length=None, num_proc=None, name="train"))) == 9


def test_a_template_that_transformers_has_compiled_before_is_limited_here(monkeypatch):
    tokenizer = with_template("{{ 'a' | center(2000000) }}")
    assert len(tokenizer.apply_chat_template(CHAT, tokenize=False)) == 2_000_000
    monkeypatch.setattr(chat_templates, "MAX_CHARACTERS", 10**6)
    with pytest.raises(ValueError, match="too large"):
        ready(tokenizer)
    assert len(tokenizer.apply_chat_template(CHAT, tokenize=False)) == 2_000_000  # the user's own calls are not limited


AS_BEFORE = [
    "{{ '=' * 20 + '-' * 3 }}{{ 2 ** 10 * 3 }}{% for i in range(9999) %}{{ '' }}{% endfor %}",
    "{% generation %}{% for m in messages %}{{ m.content ~ 1.5 * 2 }}{% if loop.last %}{% break %}{% endif %}"
    "{% endfor %}{% endgeneration %}",
    "{{ [1] + [2] }}{{ messages[0] | tojson }}{{ messages | tojson(indent=4) }}",
    "{{ messages | map(attribute='content') | join(', ') }}{{ messages | length }}{{ messages[1:] | list }}",
    "{% for m in messages | selectattr('role', 'equalto', 'user') %}{{ loop.index }}/{{ loop.length }}{% endfor %}",
    "{% for m in messages | selectattr('role', 'eq', 'user') %}{{ loop.last }}"
    "{{ loop.previtem is defined }}{% endfor %}",
    "{% for k, v in messages[0].items() %}{{ k ~ '=' ~ v }}{% else %}none{% endfor %}{{ messages[0] | dictsort }}",
    "{{ messages[0].content.split('h')[-1].strip().title() | upper }}{{ 'a-b'.replace('-', '+') | replace('a', 'c') }}",
    "{{ '%s is %5.1f' % ('x', 2) }}{{ '%s' | format('y') }}{{ '{:>4}|{}'.format(1, messages[0].role) }}",
    "{{ messages == messages }}{{ 'hi' in messages[0].content }}{{ messages[0] in messages }}{{ 1 < 2 < 3 }}",
    "{% macro f(m) %}<{{ m.role }}>{{ caller() if caller }}{% endmacro %}{{ f(messages[0]) }}"
    "{% call f(messages[0]) %}in{% endcall %}",
    "{% set ns = namespace(n=0, text='') %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "{% for i in [1, [2, [3]]] recursive %}{{ loop(i) if i is iterable else i }}{% endfor %}{{ missing }}{{ none }}",
    "{{ messages | string | length }}{{ 'a b c' | wordcount }}{{ [3, 1] | sort | first }}"
    "{{ 'abc' | list | reverse | join }}",
    "{{ ('x\n' * 3) | indent(2) | trim }}{{ [1, 2, 3] | batch(2, 0) | list }}{{ 7 % 4 }}"
    "{{ 2.567 | round(1) }}{{ [1, 2] | sum }}",
    "{{ (messages | map(attribute='role') | unique | list)[::-1] }}{{ 'a' | center(9) }}{{ 'abc'[1:] }}"
    "{{ '1' | int + 1 }}",
    "{% filter upper %}x{{ messages[0].content }}{% endfilter %}{% set b %}y{{ 1 }}{% endset %}{{ b }}{{ dict(a=1) }}",
    "{% set x = messages[0].tools | default([]) %}{% if x is not none and x is sequence %}"
    "{{ x | length > 0 }}{% endif %}",
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(AS_BEFORE)))
def test_what_templates_do_otherwise_is_as_it_was(number):
    tokenizer = with_template(AS_BEFORE[number] + "{{ '.' }}")
    row = {"chosen": CHAT, "rejected": [*CHAT, {"role": "assistant", "content": "dear me é"}]}
    [found] = ready(tokenizer, row)
    for side in ("chosen", "rejected"):
        text = tokenizer.apply_chat_template(row[side], tokenize=False)
        assert tokenizer.decode(found[f"{side}_ids"]) == text and len(text) > 1


def test_a_long_conversation_is_rendered():
    messages = [{"role": "user" if i % 2 == 0 else "assistant", "content": "word " * 40} for i in range(4000)]
    template = (
        "{% set ns = namespace(last=0) %}{% for m in messages[::-1] %}{% if m.role == 'user' and not ns.last %}"
        "{% set ns.last = messages | length - loop.index %}{% endif %}{% endfor %}"
        "{% for m in messages %}{{ '<|' + m.role + '|>\n' ~ m.content.split('</think>')[-1].lstrip('\n') | trim }}"
        "{% if loop.index0 == ns.last or loop.index0 % 2 == 1 %}{{ eos_token }}{% endif %}{% endfor %}"
    )
    tokenizer = with_template(template)
    [found] = ready(tokenizer, {"chosen": messages, "rejected": CHAT})
    assert tokenizer.decode(found["chosen_ids"]) == tokenizer.apply_chat_template(messages, tokenize=False)


def test_transformers_renders_as_before():
    compiles = chat_template_utils._compile_jinja_template
    ready(tiny_tokenizer(chat_template=True))
    assert chat_template_utils.ImmutableSandboxedEnvironment is ImmutableSandboxedEnvironment
    assert chat_template_utils._compile_jinja_template is compiles
