"""Tools and environments in complete runs against TRL: messages, tokens and each logged number."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import trl
from datasets import Dataset

import trl_jax
from compat_tests.effort import THOROUGH, only_thorough
from compat_tests.parity.dpo_cases import SMALL
from compat_tests.parity.reference import BASE
from compat_tests.parity.test_grpo_curve import assert_same
from compat_tests.rollout.stub_server import StubServer
from compat_tests.rollout.test_tools import CALLS, END, add, echo, tokenizer_of
from compat_tests.trainer.test_own_policy_loss import trls_loss
from trl_jax.data.chat_templates import response_template
from trl_jax.generation.reuse import TurnCache
from trl_jax.rollout import tools
from trl_jax.rollout.tools import Environments
from trl_jax.training.policy_generator import PolicyGenerator

FIRST = [  # turns that a two-layer model would not generate
    CALLS["json"] + END,
    "No." + END,
    '<tool_call>{"name": "echo", "arguments": {"word": "so"}}</tool_call>'
    '<tool_call>{"name": "none", "arguments": {}}</tool_call>' + END,
    "Well. " * 30 + CALLS["json"] + END,  # leaves no room for the answer
]
CONFIG = BASE | {
    "max_steps": 2, "learning_rate": 3e-3, "per_device_train_batch_size": 4, "num_generations": 4,
    "max_completion_length": 220, "pad_to_multiple_of": None,
}  # fmt: skip
ROWS = [{"prompt": [{"role": "user", "content": f"What is {i} and {i}?"}]} for i in range(6)]


class Shop:
    """Sells."""

    def reset(self, **row):
        self.bought, self.row = 0, row
        return " You have 3."

    def buy(self, what: str) -> str:
        """Buy a thing.

        Args:
            what: the thing.
        """
        self.bought += 1
        return f"one {what}"

    async def get_reward(self):
        return float(self.bought)


class Library:
    """Knows."""

    def reset(self, prompt, **row):
        self.asked = prompt[-1]["content"]

    def look(self) -> str:
        """Look around."""
        return self.asked


VISITS = [
    '<tool_call>{"name": "buy", "arguments": {"what": "pen"}}</tool_call>' + END,
    '<tool_call>{"name": "look", "arguments": {}}</tool_call>' + END,
    CALLS["json"] + END,
    "No." + END,
]


class Runs:
    """A run of either package; the first turn of each completion is scripted, later turns are sampled."""

    def __init__(self, folder, out, monkeypatch):
        self.folder, self.out, self.monkeypatch, self.seen = folder, out, monkeypatch, []
        self.texts, self.rows, self.options = FIRST, ROWS, {"tools": [add, echo]}
        self.config = {}

    def reward(self, prompts, completions, completion_ids, environments=(), **columns):
        ids = [list(map(int, own)) for own in completion_ids]
        kinds = [type(environment).__name__ for environment in environments] or [None] * len(ids)
        self.seen.append(list(zip(completions, ids, prompts, kinds, strict=True)))
        return [float(len(ids) % 7) for ids in completion_ids]

    def made(self, package, config=None, **options):
        args = package.GRPOConfig(str(self.out / package.__name__), **CONFIG | self.config | (config or {}))
        words = tokenizer_of("json")
        if package is trl:
            words.response_template = response_template(words)
        rows = None if self.rows is None else Dataset.from_list(self.rows)
        return package.GRPOTrainer(str(self.folder), self.reward, args, rows, processing_class=words, **options)

    def ours(self):
        trainer, first = self.made(trl_jax, **self.options), self.first()
        complete = PolicyGenerator.complete

        def given(writer, ids, group, *more):
            return [np.asarray(own, np.int32) for own in first] if group == 4 else complete(writer, ids, group, *more)

        self.monkeypatch.setattr(PolicyGenerator, "complete", given)
        return self.trained(trainer)

    def theirs(self):
        torch.set_num_threads(1)
        trainer, first, turns = self.made(trl, **self.options), self.first(), []
        generate = trainer._generate_single_turn

        def given(ids, *rest, **options):
            turns.append(options.get("num_generations"))
            return ([list(own) for own in first], None) if len(turns) % 2 else generate(ids, *rest, **options)

        trainer._generate_single_turn = given
        return self.trained(trainer)

    def first(self):
        words = tokenizer_of("json")
        return [words(text)["input_ids"] for text in self.texts]

    def trained(self, trainer):
        self.seen = []
        trainer.train()
        return self.seen, [entry for entry in trainer.state.log_history if "loss" in entry]


@pytest.fixture
def runs(checkpoint, tmp_path, monkeypatch):
    folder = checkpoint("qwen3", **{key: value for key, value in SMALL.items() if key != "model_type"})
    return Runs(folder, tmp_path, monkeypatch)


def test_a_run_is_trls(runs):
    (seen, logs), (wanted, numbers) = runs.ours(), runs.theirs()
    assert seen == wanted and [len(messages) for messages, *_ in seen[0]] == [3, 1, 4, 1]
    for own, other in zip(logs, numbers, strict=True):
        assert other["tools/call_frequency"] == 1.0 and other["tools/failure_frequency"] == 0.25
        assert_same(own, other, same_order=True)


@only_thorough
def test_a_run_with_the_loss_of_trl_in_torch_is_trls(runs, monkeypatch, tmp_path):
    """Tool responses are masked out in the user's loss."""
    own = {"_compute_loss": trls_loss(trl.GRPOTrainer, tmp_path)}
    monkeypatch.setattr(trl_jax, "GRPOTrainer", type("Own", (trl_jax.GRPOTrainer,), own))
    (seen, logs), (wanted, numbers) = runs.ours(), runs.theirs()
    assert seen == wanted
    for found, other in zip(logs, numbers, strict=True):
        for name in other.keys() - {"epoch", "step_time"}:
            assert found[name] == pytest.approx(other[name], rel=2e-4, abs=2e-4), name


def test_turns_reuse_the_cache(runs, monkeypatch):
    """The run equals one whose turns begin with the whole text. Every message is taken for a tool call."""
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    monkeypatch.setattr(tools, "parsed_message", lambda *given: message)
    config = {"max_steps": 1, "max_tool_calling_iterations": 2, "generation_kwargs": {"eos_token_id": list(range(40))}}
    begin, reused, found = TurnCache.begin, [], []

    def begun(turns, *given):
        reused.append(begin(turns, *given))
        return reused[-1]

    for each in (begun, lambda *given: None):
        monkeypatch.setattr(TurnCache, "begin", each)
        found.append(runs.trained(runs.made(trl_jax, config, tools=[add])))
    assert [turn is not None for turn in reused] == [False, True, True]
    (seen, [log]), (others, [other]) = found
    assert seen == others
    assert log["loss"] == pytest.approx(other["loss"], abs=1e-6)


def test_turns_of_a_rollout_func_reuse_the_cache(runs, monkeypatch):
    """The second turn of each generation continues the first; the next generation begins with a prefill."""
    begin, reused, found = TurnCache.begin, [], []

    def begun(turns, *given):
        reused.append(begin(turns, *given))
        return reused[-1]

    def rollout(prompts, trainer):
        ids = [trainer.processing_class.apply_chat_template(prompt, return_dict=False) for prompt in prompts]
        first, _ = trainer._generate_single_turn(ids, None, {}, 4)
        texts = [prompt + own + [7] for prompt, own in zip(ids, first, strict=True)]
        then, _ = trainer._generate_single_turn(texts, None, {}, 4)
        whole = [own + [7] + more for own, more in zip(first, then, strict=True)]
        return {"prompt_ids": ids, "completion_ids": whole, "logprobs": None}

    for each in (begun, lambda *given: None):
        monkeypatch.setattr(TurnCache, "begin", each)
        found.append(runs.trained(runs.made(trl_jax, {"max_completion_length": 20}, rollout_func=rollout)))
    assert [turn is not None for turn in reused] == [False, True] * 2
    (seen, logs), (others, other_logs) = found
    assert seen == others
    assert logs[-1]["loss"] == pytest.approx(other_logs[-1]["loss"], abs=1e-6)


def test_environments_are_trls(runs):
    """Two kinds, one of which computes its own reward; all completions of a group have one prompt, a generation may
    have two."""
    kinds = {"shop": Shop, "library": Library}
    runs.rows = [row | {"environment": list(kinds)[number % 2]} for number, row in enumerate(ROWS)]
    runs.texts, runs.options = VISITS, {"tools": [add], "environment_factory": kinds}
    (seen, logs), (wanted, numbers) = runs.ours(), runs.theirs()
    assert seen == wanted
    told = {kind: prompt[-1]["content"] for of_one in seen for _, _, prompt, kind in of_one}
    assert told["Shop"].endswith(" You have 3.") and "have" not in told["Library"]
    for own, other in zip(logs, numbers, strict=True):
        assert "rewards/Shop/mean" in other and other["tools/call_frequency"] == 0.75
        assert_same(own, other, same_order=True)


class Riddle:
    """Returns the prompt."""

    def reset(self, **row):
        self.row = row
        return f"Say a word ({', '.join(sorted(row))})."

    def look(self) -> str:
        """Look around."""
        return f"{len(self.row)} columns"


@pytest.mark.parametrize(
    "rows", [None, [{"environment": "riddle", "level": n} for n in range(8)]], ids=["none", "rows"]
)
def test_environments_return_prompts_as_in_trl(rows, runs):
    """Without a dataset, or with rows that have no prompt, which `reset` does not get then."""
    runs.rows, runs.texts = rows, [VISITS[1], "No." + END, VISITS[1], "Two." + END]
    runs.options = {"environment_factory": Riddle if rows is None else {"riddle": Riddle}}
    runs.config = {} if THOROUGH else {"max_steps": 1}  # later turns of another step compile their own shapes
    (seen, logs), (wanted, numbers) = runs.ours(), runs.theirs()
    assert seen == wanted
    told = {prompt[-1]["content"] for of_one in seen for _, _, prompt, _ in of_one}
    assert told == {f"Say a word ({'prompt' if rows is None else 'level'})."}
    for own, other in zip(logs, numbers, strict=True):
        assert_same(own, other, same_order=True)


def test_without_a_dataset_the_length_of_the_run_is_needed(runs):
    runs.rows = None
    with pytest.raises(ValueError, match="When training without a `train_dataset` .*, `max_steps` must be set"):
        runs.made(trl_jax, {"max_steps": -1}, environment_factory=Riddle)
    with pytest.raises(ValueError, match="requires a `train_dataset` with an `environment` column"):
        runs.made(trl_jax, environment_factory={"a": Riddle, "b": Shop})
    with pytest.raises(ValueError, match="`max_steps` must be set"):
        trl_jax.GRPOTrainer(str(runs.folder), runs.reward, environment_factory=Riddle)
    with pytest.raises(ValueError, match="`train_dataset` is required"):
        runs.made(trl_jax)


def test_turns_by_a_server_are_those_of_this_process(runs, monkeypatch):
    """Each turn is a request with the conversation so far; tools and environments run in this process."""
    kinds, turns, complete = {"shop": Shop, "library": Library}, {}, PolicyGenerator.complete
    runs.rows = [row | {"environment": list(kinds)[number % 2]} for number, row in enumerate(ROWS)]
    runs.texts, runs.options = VISITS, {"tools": [add], "environment_factory": kinds}
    runs.config = {} if THOROUGH else {"max_steps": 1}

    def recorded(writer, ids, group, *more):
        found = complete(writer, ids, group, *more)
        turns.update({tuple(text): tokens for text, tokens in zip(ids, found, strict=True)})
        return found

    monkeypatch.setattr(PolicyGenerator, "complete", recorded)
    seen, logs = runs.ours()
    stub = StubServer(runs.folder, max_model_len=2048)
    stub.replay = lambda ids, n: runs.first() if n == 4 else [turns[tuple(ids)]]
    config = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": stub.url}
    try:
        again, own = runs.trained(runs.made(trl_jax, config, **runs.options))
        with pytest.raises(ValueError, match="generate_ahead=True with environment_factory= would reset environments"):
            runs.made(trl_jax, config | {"generate_ahead": True}, **runs.options)
    finally:
        stub.stop()
    assert again == seen
    for found, wanted in zip(own, logs, strict=True):
        assert found["tools/call_frequency"] == 0.75 and found["perf/generation_s"] > 0
        assert found["sampling/sampling_logp_difference/max"] < 1e-5
        for name in ("loss", "grad_norm", "reward", "completions/mean_length"):
            assert found[name] == pytest.approx(wanted[name], abs=1e-5), name
    asked = [body for path, body in stub.seen if "stop_token_ids" in (body or {})]
    assert {body["max_tokens"] for body in asked if body["n"] == 4} == {220}
    assert all(0 < body["max_tokens"] < 220 for body in asked if body["n"] == 1) and len(asked) == 4 * len(logs)


@pytest.mark.parametrize(("rows", "factory", "text"), [
    (ROWS, {"shop": Shop}, "^Example has `environment=None`, which is not among .*: \\['shop'\\]"),
    (ROWS, Runs, "must define a callable `reset`"),
])  # fmt: skip
def test_environments_that_are_not_there(runs, rows, factory, text):
    runs.rows = rows
    given = (lambda: Runs(None, None, None)) if factory is Runs else factory
    with pytest.raises(ValueError, match=text):
        runs.made(trl_jax, environment_factory=given).train()


def test_a_later_row_of_an_environment_that_is_not_there(runs):
    runs.rows = [row | {"environment": "shop"} for row in ROWS]
    runs.rows[-1] = ROWS[-1] | {"environment": "market"}
    text = f"`environment='market'`, which is not among .*: \\['shop'\\]. Found in row {len(ROWS) - 1} of train_dataset"
    with pytest.raises(ValueError, match=text):
        runs.made(trl_jax, environment_factory={"shop": Shop})


class Gallery(Shop):
    """Shows a picture."""

    def reset(self, **row):
        return [{"type": "image", "image": "cat.png"}, {"type": "text", "text": "What is it?"}]


def test_an_environment_that_shows_an_image(runs):
    words = r"^reset\(\) of the environment Gallery: .*'cat.png'.*rows with images are not supported yet"
    with pytest.raises(ValueError, match=words):
        runs.made(trl_jax, environment_factory=Gallery).train()


def test_a_column_with_the_name_of_the_environments(runs):
    runs.rows = [row | {"environments": "theirs"} for row in ROWS]
    with pytest.raises(ValueError, match="^train_dataset has the column 'environments', but the trainer itself passes"):
        runs.made(trl_jax, environment_factory=Shop)
    with pytest.raises(ValueError, match="^A row has the column 'environments'"):
        Environments(Shop).reset(runs.rows)
    assert runs.made(trl_jax).train_dataset.column_names == ["prompt", "environments"]


def test_what_tools_do_not_go_with(runs):
    with pytest.raises(ValueError, match="^tools= together with a rollout_func"):
        runs.made(trl_jax, tools=[add], rollout_func=lambda prompts, trainer: {})
    trainer = runs.made(trl_jax, tools=[add])
    trainer.train_dataset = Dataset.from_list([{"prompt": "What?"}] * 6)
    with pytest.raises(ValueError, match="a prompt is the text 'What\\?'. Make prompts of messages"):
        trainer.train()
