"""The reward functions against TRL's, on many completions. Those that compare formulas need math_verify."""

from __future__ import annotations

import importlib.util
import pickle
import random
import sys
import threading

import pytest

from trl_jax import rewards

VERIFIES = importlib.util.find_spec("math_verify") is not None
needs_math_verify = pytest.mark.skipif(not VERIFIES, reason="math_verify is not installed")
NAMES = ["accuracy_reward", "get_cosine_scaled_reward", "get_repetition_penalty_reward", "get_soft_overlong_punishment",
         "reasoning_accuracy_reward", "think_format_reward"]  # fmt: skip


@pytest.fixture(scope="module")
def theirs():
    return pytest.importorskip("trl.rewards")


def talks(texts):
    return [[{"role": "assistant", "content": text}] for text in texts]


def texts(pieces, count=300):
    draw = random.Random(0)
    return ["".join(draw.choices(pieces, k=draw.randrange(6))) for _ in range(count)]


def test_all_of_trls_names_are_there(theirs):
    assert (
        sorted(rewards.__all__)
        == sorted(NAMES)
        == sorted(name for names in theirs._import_structure.values() for name in names)
    )


def test_thinking_first_and_once(theirs):
    made = talks(texts(["<think>", "</think>", "a", "\n", " ", "<Think>"]))
    found = rewards.think_format_reward(completions=made, prompts=[""] * len(made))
    assert found == theirs.think_format_reward(made) and 0 < sum(found) < len(found)


IDS = [[1, 2, 3, 4], [5, 5, 5, 5, 5], [1], [], [1, 2, 1, 2, 1, 2], [7] * 90, [7] * 130]
IDS += [random.Random(seed).choices(range(4), k=seed) for seed in range(70, 110)]


@pytest.mark.parametrize(("name", "how"), [
    ("get_repetition_penalty_reward", ()), ("get_repetition_penalty_reward", (2, -0.5)),
    ("get_repetition_penalty_reward", (1, 0)), ("get_soft_overlong_punishment", (100, 20)),
    ("get_soft_overlong_punishment", (90, 0)), ("get_soft_overlong_punishment", (100, 100)),
])  # fmt: skip
def test_rewards_of_tokens(theirs, name, how):
    mine, wanted = getattr(rewards, name)(*how), getattr(theirs, name)(*how)
    assert mine(completion_ids=IDS, completions=[]) == wanted(IDS) and mine.__name__ == wanted.__name__
    assert pickle.loads(pickle.dumps(mine)) == mine


def test_a_penalty_that_rewards():
    with pytest.raises(ValueError, match="max_penalty=1 is above 0"):
        rewards.get_repetition_penalty_reward(max_penalty=1)


FORMULAS = [r"\frac{1}{3}", "$x = 2$", r"\boxed{4}", r"\boxed{\sqrt{2}}", "0.5", r"$\frac12$", "nothing",
            "", r"\boxed{", "$$(1, 2)$$", r"\boxed{x^2 + 2x + 1}", r"\boxed{(x+1)^2}", "1,000",
            r"\boxed{1000}"]  # fmt: skip
ANSWERS = [f"{start} {formula}{end}" for formula in FORMULAS
           for start, end in (("It is", ""), ("<think>\\boxed{9}</think> so", "."), ("<think>7", ""))]  # fmt: skip


def cases():
    made = [(answer, solution) for answer in ANSWERS for solution in FORMULAS]
    return talks(answer for answer, _ in made), [solution for _, solution in made]


class Told(dict):
    def __call__(self, column, values):
        self[column] = values


@needs_math_verify
@pytest.mark.parametrize(("name", "how"), [
    ("accuracy_reward", {}), ("reasoning_accuracy_reward", {}),
    ("reasoning_accuracy_reward", {"reasoning_delimiters": ["so", "is", "</think>"]}),
])  # fmt: skip
def test_answers_are_compared_as_trl_does(theirs, name, how):
    (completions, solution), mine, wanted = cases(), Told(), Told()
    found = getattr(rewards, name)(completions=completions, solution=solution, log_extra=mine, **how, prompts=[])
    assert found == getattr(theirs, name)(completions, solution, log_extra=wanted, **how)
    assert list(mine.items()) == list(wanted.items()) and set(found) == {0.0, 1.0, None}


@needs_math_verify
def test_the_cosine_is_trls(theirs):
    completions, solution = cases()
    ids = [[1] * (number % 23) for number in range(len(solution))]
    mine, wanted = rewards.get_cosine_scaled_reward(20, -2.0), theirs.get_cosine_scaled_reward(20, -2.0)
    assert mine(completions=completions, solution=solution, completion_ids=ids) == wanted(completions, solution, ids)
    assert mine.__name__ == wanted.__name__ and pickle.loads(pickle.dumps(mine)) == mine


def test_the_cosine_by_hand(monkeypatch):
    monkeypatch.setattr("trl_jax.rewards.accuracy_reward", lambda completions, solution: completions)
    scaled = rewards.get_cosine_scaled_reward(100)
    ids = [[1] * length for length in (0, 50, 100, 0, 50, 100, 200, 5)]
    found = scaled(completions=[1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, None], solution=[], completion_ids=ids)
    assert found == pytest.approx([1.0, 0.75, 0.5, -1.0, -0.75, -0.5, -0.5, None])


@needs_math_verify
def test_in_a_thread_there_is_no_clock():
    found = []
    thread = threading.Thread(target=lambda: found.extend(rewards.accuracy_reward(talks([r"\boxed{4}"]), ["4"])))
    thread.start()
    thread.join()
    assert found == [1.0]


@pytest.mark.parametrize("name", ["accuracy_reward", "reasoning_accuracy_reward"])
def test_without_the_package(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ImportError, match=f"^Please install the `math_verify` package to use {name}: pip "):
        getattr(rewards, name)(talks(["a"]), ["a"])


def test_completions_that_are_texts():
    with pytest.raises(TypeError, match="^think_format_reward needs conversational completions, .* a list of messages"):
        rewards.think_format_reward(["<think>a</think>"])
