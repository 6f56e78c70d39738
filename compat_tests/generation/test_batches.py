"""Many prompts in batches, and text: the same completions with any batching."""

from __future__ import annotations

import numpy as np
import pytest

import trl_jax
from compat_tests.effort import THOROUGH, only_thorough
from compat_tests.models import causal
from compat_tests.tiny import tiny_tokenizer
from trl_jax.hub.auto import AutoModelForCausalLM

FIELDS = {"do_sample": True, "temperature": 1.3, "top_k": 50, "max_new_tokens": 20, "eos_token_id": [50, 60, 70]}
LONGEST = 60 if THOROUGH else 30
TALK = [{"role": "user", "content": "How do I bake the bread?"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = causal.build(tmp_path_factory.mktemp("qwen3"), "qwen3", tie=False, num_hidden_layers=1)
    return AutoModelForCausalLM.from_pretrained(folder)


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer(chat_template=True)


def prompts() -> list[list[int]]:
    random = np.random.default_rng(0)
    return [random.integers(5, 100, length).tolist() for length in (3, 12, 7, 1, 5, 9, 30)]


@only_thorough
def test_completions_do_not_depend_on_the_batch(model):
    options = {"seed": 4, "num_return_sequences": 2, "repetition_penalty": 1.2, "min_length": 35}
    together = model.generate_batch(prompts(), **FIELDS, **options)
    assert list(together) == [f"req_{number}" for number in range(14)]
    for size in (1, 6) if THOROUGH else (6,):  # test_refilling has each prompt alone
        apart = model.generate_batch(prompts(), batch_size=size, **FIELDS, **options)
        assert apart.keys() == together.keys()
        for one in apart.values():
            other = together[one.request_id]
            assert one.generated_tokens == other.generated_tokens and one.prompt_ids == prompts()[one.number // 2]
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=2e-5)
    again = model.generate_batch(prompts(), **(FIELDS | options | {"seed": 5}))
    assert [one.generated_tokens for one in again.values()] != [one.generated_tokens for one in together.values()]
    assert len({tuple(one.generated_tokens) for one in together.values()}) == 14


@only_thorough
def test_likeliest_tokens_are_those_of_generate(model):
    done = model.generate_batch(prompts(), batch_size=3, max_new_tokens=9, eos_token_id=50)
    rows = model.generate(prompts(), max_new_tokens=9, pad_token_id=0, eos_token_id=50)
    for one, row in zip(done.values(), rows, strict=True):
        new = one.generated_tokens
        assert row[30 : 30 + len(new)].tolist() == new and (len(new) == 9 or new[-1] == 50)
        assert len(one.logprobs) == len(new)


def test_calls_in_a_row_differ_and_repeat_by_seed(model):
    def once():
        return [one.generated_tokens for one in model.generate_batch(prompts()[:2], **FIELDS).values()]

    trl_jax.set_seed(1)
    first = [once(), once()]
    trl_jax.set_seed(1)
    assert first == [once(), once()] and first[0] != first[1]


def test_an_interrupt_gives_back_the_completions_that_are_there(model, monkeypatch, caplog):
    from trl_jax.generation import generator

    inner, left = generator.refilled, [2]

    def interrupted(*given, **options):
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        return inner(*given, **options)

    monkeypatch.setattr(generator, "refilled", interrupted)
    done = model.generate_batch(prompts(), batch_size=2, max_new_tokens=3)
    assert list(done) == ["req_1", "req_5", "req_6"]
    assert "Interrupted: returning the 3 of 7 completions that are finished." in caplog.text
    monkeypatch.setattr(generator, "prefill", interrupted)
    with pytest.raises(KeyboardInterrupt):
        model.generate_batch(prompts(), batch_size=2, max_new_tokens=3)


def test_many_lengths_compile_few_programs(model):
    """At most one per padded length of prompts and of completions, which are roughly powers of two."""
    from trl_jax.generation.decode import first_tokens, next_tokens, prefill

    programs = prefill, first_tokens, next_tokens
    before, random = [program._cache_size() for program in programs], np.random.default_rng(0)
    for _ in range(20):
        length, new = random.integers(1, LONGEST), random.integers(2, LONGEST)
        ids = random.integers(5, 60, (2, length))
        model.generate(ids, max_new_tokens=int(new), pad_token_id=0, eos_token_id=None)
    prompts, firsts, steps = (program._cache_size() - count for program, count in zip(programs, before, strict=True))
    assert prompts <= 4 and firsts <= 4 and steps <= 8


def test_strings_end_texts(model, tokenizer):
    options = {"seed": 4, "batch_size": 4} | FIELDS | {"temperature": 3.0, "top_k": 0, "max_new_tokens": 40}
    free = model.generate_batch(prompts(), **options)
    stopped = model.generate_batch(prompts(), stop_strings=["e"], tokenizer=tokenizer, **options)
    for one, other in zip(free.values(), stopped.values(), strict=True):
        has = ["e" in tokenizer.decode([id_]) for id_ in one.generated_tokens]
        end = has.index(True) + 1 if True in has else len(has)
        assert other.generated_tokens == one.generated_tokens[:end]
    assert any(len(free[name].generated_tokens) > len(stopped[name].generated_tokens) for name in free)


def test_text_and_conversations(model, tokenizer):
    ids = tokenizer("Tell me")["input_ids"]
    talk = tokenizer(f"user: {TALK[0]['content']}{tokenizer.eos_token}\nassistant:", add_special_tokens=False)[
        "input_ids"
    ]
    options = {"max_new_tokens": 6, "eos_token_id": None}
    done = model.generate_batch([ids, talk], **options)
    expected = [tokenizer.decode(one.generated_tokens, skip_special_tokens=True) for one in done.values()]
    assert model.generate_text(["Tell me", TALK], tokenizer, **options) == expected
    grouped = model.generate_text(["Tell me"], tokenizer, num_return_sequences=3, seed=1, **FIELDS)
    assert [len(texts) for texts in grouped] == [3]
    assert model.generate_batch([]) == {} and model.generate_text([], tokenizer) == []


def test_an_answer_that_was_begun_is_gone_on_with(model, tokenizer, monkeypatch):
    seen = []
    monkeypatch.setattr(type(model), "generate_batch", lambda self, ids, **_: seen.extend(ids) or {})
    model.generate_text([[*TALK, {"role": "assistant", "content": "First"}]], tokenizer)
    assert tokenizer.decode(seen[0]).endswith("assistant: First")


def test_the_tokenizers_ids_count_where_the_model_has_none(model, tokenizer, monkeypatch):
    seen = []
    monkeypatch.setattr(type(model), "generate_batch", lambda self, ids, **options: seen.append(options) or {})
    monkeypatch.setattr(model.generation_config, "eos_token_id", None)
    model.generate_text(["a"], tokenizer)
    assert seen[0]["eos_token_id"] == tokenizer.eos_token_id and "pad_token_id" not in seen[0]
    model.generate_text(["a"], tokenizer, eos_token_id=9)
    assert seen[1]["eos_token_id"] == 9


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "Prompt 0 must be a string, or messages such as .* got \\[\\]"),
        ([{"content": "x"}], "must be a string, or messages"),
        ([{"role": "user", "content": [{"type": "image"}]}], "^The prompt: .*rows with images are not supported yet"),
        (TALK, "the tokenizer has no chat template. Pass text, or set"),
    ],
)
def test_prompts_of_another_form(model, prompt, message):
    with pytest.raises(ValueError, match=message):
        model.generate_text([prompt], tiny_tokenizer())


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"inputs": [[3], []]}, "Prompt 1 has 0 tokens. A prompt needs at least one"),
        ({"inputs": [[3], [9999]]}, "Prompt 1 has 1 tokens. .* from 0 to"),
        ({"persistent_manager": True}, r"`model_kwargs` are not used by the model: \['persistent_manager'\]"),
        ({"num_beams": 2}, "there is no beam search"),
        ({"max_length": 30}, "Input length of input_ids is 30"),
    ],
)
def test_errors(model, wrong, message):
    with pytest.raises(ValueError, match=message):
        model.generate_batch(**({"inputs": prompts(), "max_new_tokens": None} | wrong))
