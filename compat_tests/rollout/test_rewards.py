"""Reward functions of every kind, compared with TRL's `_calculate_rewards`, and the errors for bad ones."""

from __future__ import annotations

import asyncio
import copy
import functools
import itertools
import logging
import threading
import time
import traceback
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest

from trl_jax.config.rules import show
from trl_jax.rollout.rewards import RewardModel, callable_name, numbered, reward_columns, reward_functions

PROMPTS = ["a", "a", "b", "b"]
COMPLETIONS = ["x", "yy", "", "zzzz"]
IDS = [[1], [2, 2], [3], [4, 4, 4, 4]]
ROWS = [{"prompt": prompt, "completion": "?", "completion_ids": 0, "solution": n, "note": str(n)}
        for n, prompt in enumerate(PROMPTS)]  # fmt: skip
STATE = SimpleNamespace(global_step=7)


def lengths(completions, **kwargs):
    return [len(text) for text in completions]


async def later(completions, **kwargs):
    await asyncio.sleep(0.01)
    return [float(len(text)) * 10 for text in completions]


class Object:
    def __call__(self, completion_ids, **kwargs):
        return [sum(ids) if len(ids) > 1 else None for ids in completion_ids]


class AsyncObject:
    async def __call__(self, solution, **kwargs):
        return np.asarray(solution, np.float64)


def scaled(completions, factor, **kwargs):
    return np.asarray(lengths(completions)) * factor


def told(prompts, completions, completion_ids, solution, note, trainer_state, log_extra, log_metric):
    assert (prompts, completions, completion_ids) == (PROMPTS, COMPLETIONS, IDS)
    assert (solution, note, trainer_state.global_step) == ([0, 1, 2, 3], ["0", "1", "2", "3"], 7)
    log_extra("z", list(note))
    for text in completions:
        log_extra("length", [len(text)])
    log_metric("b", 1)
    log_metric("b", 2.0)
    log_metric("a", 5)
    return [None] * 4


def made(*functions, **options):
    return reward_functions(list(functions), trainer_state=lambda: STATE, **options)


def call(*functions, rows=ROWS, **options):
    return made(*functions, **options)(rows, PROMPTS, COMPLETIONS, IDS)


ALL = [lengths, later, Object(), functools.partial(scaled, factor=0.5), AsyncObject(), functools.partial(later), told]


def of_trl(functions, monkeypatch):
    """TRL's rewards, computed on a stub with the trainer attributes that `_calculate_rewards` reads."""
    from trl import GRPOTrainer
    from trl.trainer import grpo_trainer

    monkeypatch.setattr(grpo_trainer, "gather", lambda tensor: tensor)
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    stub = SimpleNamespace(
        accelerator=SimpleNamespace(device="cpu", is_main_process=False), reward_funcs=functions, state=STATE,
        environments=None, reward_processing_classes=[None] * len(functions), async_loop=loop,
        args=SimpleNamespace(report_to=[]),
        reward_func_names=[callable_name(function) for function in functions],
        _pending_extra_logs=defaultdict(list), _pending_metrics=defaultdict(list))  # fmt: skip
    stub._log_completion_extra = functools.partial(GRPOTrainer._log_completion_extra, stub)
    stub._log_metric = functools.partial(GRPOTrainer._log_metric, stub)
    rewards = GRPOTrainer._calculate_rewards.__wrapped__(stub, ROWS, PROMPTS, COMPLETIONS, IDS)
    return rewards.numpy(), stub


def test_rewards_are_trls(monkeypatch):
    pytest.importorskip("trl")
    ours = made(*ALL)
    found = ours(ROWS, PROMPTS, COMPLETIONS, IDS)
    wanted, stub = of_trl(list(ALL), monkeypatch)
    assert found.dtype == np.float32 and np.array_equal(found, wanted, equal_nan=True)
    assert ours.extra() == stub._pending_extra_logs and list(ours.extra()) == ["length", "z"]
    assert list(ours.metrics().items()) == [("a", 5.0), ("b", 1.5)] and dict(stub._pending_metrics) == {
        "a": [5], "b": [1, 2.0]}  # fmt: skip
    ours.functions = ours.functions[:1]
    ours(ROWS, PROMPTS, COMPLETIONS, IDS)
    assert ours.metrics() == ours.extra() == {}  # nothing from the previous call


def test_names_are_trls_and_each_is_different():
    utils = pytest.importorskip("trl.trainer.utils")
    for function in ALL:
        assert callable_name(function) == utils.get_callable_name(function)
    assert made(*ALL).names == ["lengths", "later", "Object", "scaled", "AsyncObject", "later_2", "told"]
    assert numbered(["a", "a_2", "a", "b", "a"]) == ["a", "a_2", "a_3", "b", "a_4"]
    assert made(lambda **kwargs: [], lambda **kwargs: []).names == ["<lambda>", "<lambda>_2"]


def test_one_function_needs_no_list_and_a_list_stays_as_it_is():
    functions = [lengths]
    assert reward_functions(lengths, trainer_state=lambda: STATE).names == ["lengths"]
    reward_functions(functions, trainer_state=lambda: STATE)
    assert functions == [lengths]


def test_asynchronous_ones_run_together_and_after_the_others():
    order = []

    async def waits(completions, **kwargs):
        order.append("begun")
        await asyncio.sleep(0.2)
        order.append("done")
        return [0.0] * 4

    def plain(completions, **kwargs):
        order.append("plain")
        return [1.0] * 4

    start = time.monotonic()
    assert call(waits, plain, waits, waits)[0].tolist() == [0, 1, 0, 0]
    assert order == ["plain", "begun", "begun", "begun", "done", "done", "done"] and time.monotonic() - start < 0.5


def test_the_loop_is_the_same_in_every_call():
    loops = []

    async def seen(completions, **kwargs):
        loops.append(asyncio.get_running_loop())
        return [0.0] * 4

    rewards = made(seen)
    for _ in range(2):
        rewards(ROWS, PROMPTS, COMPLETIONS, IDS)
    assert loops[0] is loops[1]

    async def within():  # as in a notebook, whose thread already runs an event loop
        return rewards(ROWS, PROMPTS, COMPLETIONS, IDS)

    assert asyncio.run(within()).shape == (4, 1)


def test_one_that_takes_too_long():
    ended = []

    async def slow(completions, **kwargs):
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("cancelled")

    with pytest.raises(TimeoutError, match=r"^The reward function 'slow' took longer than reward_timeout=0.1 sec"):
        call(slow, later, timeout=0.1)
    assert ended == ["cancelled"]


def test_one_that_blocks_the_event_loop_is_named_and_the_next_call_goes_on():
    times = iter([3.0, 0.0])

    async def blocks(completions, **kwargs):
        time.sleep(next(times))
        return [0.0] * 4

    start, rewards = time.monotonic(), made(later, blocks, timeout=0.1)
    with pytest.raises(TimeoutError, match=r"^The reward function 'blocks' took longer than reward_timeout=0.1 sec"):
        rewards(ROWS, PROMPTS, COMPLETIONS, IDS)
    assert time.monotonic() - start < 2.9
    assert rewards(ROWS, PROMPTS, COMPLETIONS, IDS)[:, 1].tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("other", ["none", "one that fails"])
def test_one_that_swallows_its_cancellation_is_left(other):
    free = threading.Event()

    async def stays(completions, **kwargs):
        while not free.is_set():
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                continue
        return [0.0] * 4

    start = time.monotonic()
    if other == "none":
        with pytest.raises(TimeoutError, match=r"^The reward function 'stays' took longer than reward_timeout=0.1 sec"):
            call(stays, later, timeout=0.1)
    else:
        with pytest.raises(ZeroDivisionError):
            call(stays, fails_later, timeout=60)
    assert time.monotonic() - start < 5
    free.set()


def test_a_timeout_of_its_own_stays_its_own():
    async def gives_up(completions, **kwargs):
        raise TimeoutError("the server")

    with pytest.raises(TimeoutError, match="^the server$"):
        call(gives_up, timeout=30)


def fails(completions, **kwargs):
    return [1 / len(text) for text in completions]


async def fails_later(completions, **kwargs):
    return fails(completions)


@pytest.mark.parametrize("function", [fails, fails_later])
def test_an_exception_keeps_its_kind_and_says_where(function):
    async def waits(completions, **kwargs):
        await asyncio.sleep(60)

    with pytest.raises(ZeroDivisionError) as error:
        call(waits, function) if function is fails_later else call(function, waits)
    text = "".join(traceback.format_exception(error.value))
    assert f"Raised by the reward function '{function.__name__}' for 4 completions, the first with" in text
    assert "prompt='a'" in text and "train(resume_from_checkpoint=True)" in text


@pytest.mark.parametrize(("returned", "kind", "text"), [
    ([1.0, 2.0], ValueError, "The reward function 'bad' returned 2 rewards, but 4 were expected (one per "
     "prompt-completion pair). Make sure the reward function returns exactly one reward per completion."),
    (None, TypeError, "The reward function 'bad' must return a list of 4 rewards (numbers or None), got rewards=None."),
    (0.5, TypeError, "The reward function 'bad' must return a list of 4 rewards (numbers or None), got rewards=0.5."),
    (["1.0", 1, 2, 3], TypeError,
     "The rewards of the reward function 'bad' must be numbers or None, got rewards=['1.0', 1, 2, 3]."),
    (["a", 1, 2, 3], TypeError,
     "The rewards of the reward function 'bad' must be numbers or None, got rewards=['a', 1, 2, 3]."),
    ({0: 1.0}, TypeError,
     "The reward function 'bad' must return a list of 4 rewards (numbers or None), got rewards={0: 1.0}."),
    ({7}, TypeError, "The reward function 'bad' must return a list of 4 rewards (numbers or None), got rewards={7}."),
    (b"abcd", TypeError,
     "The reward function 'bad' must return a list of 4 rewards (numbers or None), got rewards=b'abcd'."),
    (itertools.count(), ValueError, "The reward function 'bad' returned more than 4 rewards, but 4 were expected (one "
     "per prompt-completion pair). Make sure the reward function returns exactly one reward per completion."),
    ([0.0, float("-inf"), 0.0, 0.0], ValueError, "The rewards of the reward function 'bad' must be finite in float32, "
     "or None where it does not apply, got -inf for completion 1."),
    ([0.0, 0.0, 1e39, 0.0], ValueError, "The rewards of the reward function 'bad' must be finite in float32, or None "
     "where it does not apply, got 1e+39 for completion 2."),
    ([10**309, 0, 0, 0], TypeError, "The rewards of the reward function 'bad' must be numbers or None, got "
     f"{show('rewards', [10**309, 0, 0, 0])}."),
])  # fmt: skip
@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_is_no_reward(returned, kind, text, asynchronous):
    async def bad_later(**kwargs):
        return returned

    def bad(**kwargs):
        return returned

    bad_later.__name__ = "bad"
    with pytest.raises(kind) as error:
        call(bad_later if asynchronous else bad)
    assert str(error.value) == text


def test_a_generator_of_rewards_is_read_and_its_errors_are_its_own():
    assert call(lambda completions, **kwargs: (len(text) for text in completions))[:, 0].tolist() == [1, 2, 0, 4]
    with pytest.raises(TypeError, match="^unsupported operand"):
        call(lambda completions, **kwargs: (text + 1 if isinstance(text, int) else None + 1 for text in completions))


def test_functions_share_their_lists_as_in_trl(monkeypatch):
    """The next functions see what a function changes in a message or in a column, async ones too."""
    pytest.importorskip("trl")
    found = []
    for trl in (True, False):
        seen, given = [], ([[{"role": "user", "content": "a"}] for _ in range(4)], [["x"] for _ in range(4)])
        completions = [[{"role": "assistant", "content": text}] for text in ("one", "two", "three", "four")]
        rows = [{"prompt": prompt, "tags": tags, "answer": "a"} for prompt, tags in zip(*given, strict=True)]

        def changes(prompts, completions, completion_ids, tags, answer, **kwargs):
            prompts[0][0]["content"] = "b"
            for number, (message,) in enumerate(completions):
                message["content"], answer[number] = message["content"].upper()[:3], number
            tags[1].append("y")
            completion_ids[2] = [7]
            return [0.0] * 4

        def sees(prompts, completions, completion_ids, tags, answer, seen=seen, **kwargs):
            seen.append(copy.deepcopy((prompts, completions, completion_ids, tags, answer)))
            return [float(message["content"] == "TWO") for (message,) in completions]

        async def sees_later(**kwargs):
            return sees(**kwargs)

        ids, prompts = [list(own) for own in IDS], [row["prompt"] for row in rows]
        if trl:
            for name, value in {"ROWS": rows, "PROMPTS": prompts, "COMPLETIONS": completions, "IDS": ids}.items():
                monkeypatch.setitem(globals(), name, value)
            rewards, _ = of_trl([changes, sees, sees_later], monkeypatch)
        else:
            rewards = made(changes, sees, sees_later)(rows, prompts, completions, ids)
        assert completions[3][0]["content"] == "FOU" and len(seen) == 2
        found.append((rewards.tolist(), seen))
    assert found[0] == found[1]


def test_the_error_of_a_function_that_clears_its_lists():
    def clears(prompts, **kwargs):
        prompts.clear()
        raise ValueError("of the script")

    with pytest.raises(ValueError, match="of the script") as raised:
        made(clears)(ROWS, list(PROMPTS), COMPLETIONS, IDS)
    assert "Raised by the reward function 'clears' for 4 completions" in raised.value.__notes__[0]


def test_functions_that_pop_from_their_lists():
    """The next functions get full lists."""

    def pops(prompts, completions, note, **kwargs):
        return [float(len(completions.pop(0) + prompts.pop(0) + note.pop(0))) for _ in PROMPTS]

    async def pops_later(**kwargs):
        return pops(**kwargs)

    def of_next(prompts, completions, note, **kwargs):
        assert (prompts, completions, note) == (PROMPTS, COMPLETIONS, [row["note"] for row in ROWS])
        return [None] * 4

    prompts, completions = list(PROMPTS), list(COMPLETIONS)
    found = made(pops, of_next, pops_later)(ROWS, prompts, completions, IDS)
    np.testing.assert_array_equal(found.T, [[3, 4, 2, 6], [np.nan] * 4, [3, 4, 2, 6]])
    assert (prompts, completions) == (PROMPTS, COMPLETIONS)  # for the completions table


def test_entries_that_a_function_replaced_stay_when_the_next_one_pops():
    def replaces(completions, **kwargs):
        completions[0] = "new"
        return [None] * 4

    def pops(completions, **kwargs):
        return [float(len(completions.pop(0))) for _ in PROMPTS]

    def method(rows, prompts, completions, ids):
        prompts.clear()
        return rewards.calculate(rows, list(PROMPTS), completions, ids)

    rewards, completions, prompts = made(replaces, pops), list(COMPLETIONS), list(PROMPTS)
    rewards.override = method
    assert rewards(ROWS, prompts, completions, IDS)[0, 1] == 3
    assert (prompts, completions) == (PROMPTS, ["new", *COMPLETIONS[1:]])


@pytest.mark.parametrize("value", [None, 1.0, np.array(1.0), "ab"])
def test_weights_and_names_that_are_no_sequence(value):
    rewards = made(lengths, later)
    for put, text in ((rewards.set_weights, "reward_weights"), (rewards.set_names, "reward_func_names")):
        with pytest.raises(TypeError, match=f"{text} must be a sequence with one .* per reward function, got"):
            put(value)


def test_a_metric_that_is_no_number():
    def wrong(completions, log_metric, **kwargs):
        log_metric("share", "much")
        return [0.0] * 4

    with pytest.raises(
        TypeError, match=r"^The value of log_metric\('share', value\) must be a number, got value='much'."
    ):
        call(wrong)


def test_a_reward_model_that_gives_no_number():
    class Judge(RewardModel):
        name = "judge"

        def __call__(self, prompts, completions):
            return np.asarray([1.0, np.nan, 1.0, 1.0], np.float32)

    with pytest.raises(
        ValueError, match="^The scores of the reward model 'judge' must be finite, got nan for completion 1."
    ):
        call(Judge(None, None))


def test_a_column_of_another_length(caplog):
    def wrong(completions, log_extra, **kwargs):
        log_extra("note", ["a"])
        log_extra("right", list("abcd"))
        return [0.0] * 4

    rewards = made(wrong)
    rewards(ROWS, PROMPTS, COMPLETIONS, IDS)
    assert not caplog.records and rewards.extra() == {"right": list("abcd")}
    assert "log_extra('note', values) got 1 values for 4 completions, so the column is left out" in caplog.text


GIVEN = ("prompts", "completions", "trainer_state", "log_extra", "log_metric")


@pytest.mark.parametrize("name", GIVEN)
def test_a_column_does_not_take_the_place_of_what_functions_are_given(name):
    words = f"A row has the column '{name}', .* would get multiple values for keyword argument '{name}'. Rename it"
    with pytest.raises(ValueError, match=words):
        call(lengths, rows=[row | {name: "theirs"} for row in ROWS])


def test_what_is_logged_under_a_name_of_the_trainers_own_is_kept_apart(caplog):
    def step(completions, log_extra, log_metric, **columns):
        for name in ("step", "prompt", "completion", "advantage", "step_2", "note"):
            log_extra(name, [name] * 4)
        for name in ("reward", "kl", "rewards/step/mean", "mine"):
            log_metric(name, 5.0)
        return lengths(completions)

    rewards = made(step, metrics_of_run=("kl",))
    for _ in range(2):
        rewards(ROWS, PROMPTS, COMPLETIONS, IDS)
    columns = {"step_3": "step", "prompt_2": "prompt", "completion_2": "completion", "advantage_2": "advantage"}
    columns |= {"step_2_2": "step_2", "note": "note"}  # step_2 is the column of the function's rewards
    assert reward_columns(rewards.names) == ["step_2"]
    assert rewards.extra() == {name: [value] * 4 for name, value in sorted(columns.items())}
    assert rewards.metrics() == {"reward_2": 5.0, "kl_2": 5.0, "rewards/step/mean_2": 5.0, "mine": 5.0}
    told = [one for one in caplog.messages if "the trainer logs" in one]
    assert len(told) == len(set(told)) == 8
    assert "log_metric('kl', ...): the trainer logs 'kl' itself, so this is logged as 'kl_2'." in told


def test_a_completion_without_any_reward_is_warned_of(caplog):
    def some(completions, **kwargs):
        return [1.0, 2.0, None, None]

    def others(completions, **kwargs):
        return [None, 2.0, None, 3.0]

    with caplog.at_level(logging.WARNING):
        call(some, others)
    [record] = caplog.records
    assert record.message.startswith("All reward functions returned None for the following kwargs:\n{'completion_ids'")
    assert "'solution': 2, 'note': '2', 'prompt': 'b', 'completion': ''}" in record.message
    assert record.message.endswith("Please ensure that at least one reward function returns a valid reward.")


@pytest.mark.parametrize(("given", "options", "kind", "text"), [
    ([], {}, ValueError, "No reward source provided. Pass `reward_funcs`, or an `environment_factory` whose "
     "environment defines a `get_reward` method."),
    (None, {}, ValueError, "No reward source provided. Pass"),
    ([lengths], {"weights": [1.0, 2.0]}, ValueError,
     "Number of reward weights (2) must match number of reward functions (1)"),
    ([lengths, later], {"processing_classes": [None]}, ValueError,
     "The number of reward processing classes (1) must match the number of reward functions (2)."),
    ([3], {}, TypeError, "reward_funcs must be functions, or reward models by name or object, got a int."),
])  # fmt: skip
def test_what_is_passed_is_checked(given, options, kind, text):
    with pytest.raises(kind) as error:
        reward_functions(given, trainer_state=lambda: STATE, **options)
    assert str(error.value).startswith(text)


def by_place(a, b):
    """Names its parameters as for calls by position."""


def of_completions(completions):
    """Has no **kwargs."""


def of_answers(completions, answer, **kwargs):
    """Needs a column of the dataset."""


def all_by_name(prompts, completions, completion_ids, trainer_state, log_extra, log_metric):
    """Names all arguments except dataset columns, without **kwargs."""


def of_position(completions, /, **kwargs):
    """Has a positional-only parameter, which cannot be passed by name."""


class Judge:
    def __call__(self, prompts, completions):
        """A callable object."""


@functools.wraps(of_completions)
def wrapper(**kwargs):
    return of_completions(kwargs["completions"])


@pytest.mark.parametrize(("function", "columns", "text"), [
    (by_place, ["answer"], "by_place(a, b) needs a, b, and train_dataset has the columns "
     "answer. Reward functions are called by name, with prompts, completions, completion_ids, the columns"),
    (by_place, None, "by_place(a, b) does not take prompts, completions, completion_ids, trainer_state"),
    (of_completions, None, "of_completions(completions) does not take prompts, completion_ids, trainer_state, "),
    (functools.partial(by_place, 1), None, "by_place(b) does not take prompts"),
    (of_answers, ["prompt", "solution"], "of_answers(completions, answer, **kwargs) needs answer, and"),
    (all_by_name, ["prompt", "answer"], "all_by_name(prompts, completions, completion_ids, trainer_state, log_extra, "
     "log_metric) does not take answer. Reward functions"),
    (of_position, None, "of_position(completions, /, **kwargs) takes completions by position only. Reward functions"),
    (Judge(), None, "Judge(prompts, completions) does not take completion_ids"),
])  # fmt: skip
def test_a_function_that_cannot_be_called_is_named_with_its_signature(function, columns, text):
    with pytest.raises(TypeError) as error:
        reward_functions([lengths, function], trainer_state=lambda: STATE, columns=columns)
    assert str(error.value).startswith(f"The reward function {text}")
    assert str(error.value).endswith(f"write def {callable_name(function)}(prompts, completions, **kwargs).")


@pytest.mark.parametrize(("function", "columns"), [
    (of_answers, ["prompt", "answer"]), (of_answers, None), (all_by_name, ["prompt"]), (wrapper, ["answer"]),
    (dict, None),
])  # fmt: skip
def test_a_function_that_can_be_called_is_taken(function, columns):
    assert reward_functions(function, trainer_state=lambda: STATE, columns=columns).functions == [function]
