"""How completions are obtained: by the policy, by servers, or by a script's rollout_func."""

from __future__ import annotations

from types import SimpleNamespace

from trl_jax.training import policy_generator


def test_what_a_rollout_func_completes_with_ends_with_it(monkeypatch):
    seen = []

    def rollout_func(prompts, trainer=None):
        seen.append((writer._next_round, writer._turns))
        return {"prompt_ids": [[5]], "completion_ids": [[6]], "logprobs": None}

    monkeypatch.setattr(policy_generator, "in_rounds", lambda complete, run: run("in rounds"))
    writer = object.__new__(policy_generator.PolicyGenerator)
    writer._setup = SimpleNamespace(vocab_size=9, task=SimpleNamespace(logps=()), encoder=None)
    writer._server, writer._alone, writer._rollout_func = object(), True, rollout_func
    writer._generate_with_script(["a"])
    assert seen[0][0] == "in rounds" and seen[0][1] is not None
    assert writer._next_round is writer._turns is None
