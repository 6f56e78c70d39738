"""GRPO runs whose completions come from a server, with tools, environments and a `rollout_func`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from compat_tests.mesh.tools import FIRST, Shop, add, conversations, words
from compat_tests.parity import reference


def replies(ids: list[int], n: int) -> list[list[int]] | None:
    """The server's replies to conversations: first turns call tools, second turns are derived from the text."""
    text = words().decode(ids)
    if "assistant" not in text:
        return None
    if text.count("assistant") == 1:
        return [words()(turn)["input_ids"] for turn in FIRST[int("You have 1" in text)]][:n]
    return [[ids[(own + place) % len(ids)] for place in range(own + 3)] for own in range(n)]


def twice(prompts: list, trainer: Any) -> dict:
    """A rollout_func that requests a second turn if the first one has an odd number of tokens."""
    ids = [trainer.processing_class.apply_chat_template(prompt, return_dict=False) for prompt in prompts]
    first, logps = trainer._generate_single_turn(ids, None, {}, 2)
    rows = [row for row, own in enumerate(first) if len(own) % 2]
    while rows:  # one at a time
        row = rows.pop()
        [more], [further] = trainer._generate_single_turn([ids[row] + first[row]], None, {}, 1)
        first[row], logps[row] = first[row] + more, logps[row] + further
    return {"prompt_ids": ids, "completion_ids": first, "logprobs": logps}


def called(ids: list[int], before: list[int], tokenizer: Any, tools: list | None = None) -> dict[str, Any]:
    """A stand-in for `parsed_message`: two of three messages call the last tool, whatever they say."""
    message, number = {"role": "assistant", "content": tokenizer.decode(ids)}, sum(ids)
    if number % 3 == 0:
        return message
    name = tools[-1].__name__
    if name == "draw":
        return message | {"tool_calls": [{"type": "function", "function": {"name": name, "arguments": {"number": 2}}}]}
    arguments = {"what": f"pen {number % 7}"} if name == "buy" else {"a": number % 5, "b": number % 7}
    return message | {"tool_calls": [{"type": "function", "function": {"name": name, "arguments": arguments}}]}


def run(kind: str, folder: str, out: str, peft_config: Any = None, **config: Any) -> reference.Run:
    """The Run's facts are what this process's reward function received, in order. The tools of kind "called" are called
    by `called`."""
    from datasets import Dataset

    import trl_jax

    if kind == "images":
        return with_images(folder, out, **config)
    if kind == "drawn":
        return with_drawn_images(folder, out, **config)

    seen: list = []

    def reward(completions, completion_ids, start, environments=None, **columns):
        seen.extend(zip(start, completions, [list(map(int, own)) for own in completion_ids], strict=True))
        bought = [own.bought for own in environments] if environments else [0] * len(start)
        return [len(ids) % 7 + count / 2 for ids, count in zip(completion_ids, bought, strict=True)]

    if kind == "called":
        from trl_jax.rollout import tools

        tools.parsed_message = called
    functions = {"tools": [add], "environment_factory": Shop}
    given = {"tools": functions, "called": functions, "function": {"rollout_func": twice}}[kind]
    config = reference.BASE | {"num_generations": 2, "max_completion_length": 120} | config
    rows = Dataset.from_list(conversations(4))
    args = trl_jax.GRPOConfig(out, **config)
    trainer = trl_jax.GRPOTrainer(
        folder, reward, args, rows, processing_class=words(), peft_config=peft_config, **given
    )
    trainer.train()
    final = Path(out) / "final"
    trainer.save_model(str(final))
    return reference.Run(trainer.state.log_history, final, reference.read_weights(final), None, facts=seen)


def with_images(folder: str, out: str, **config: Any) -> reference.Run:
    import trl_jax
    from compat_tests.trainer import test_image_rollouts as images

    made = images.trainer(trl_jax, "GRPO", folder, out, **config)
    made.train()
    final = Path(out) / "final"
    made.save_model(str(final))
    return reference.Run(made.state.log_history, final, reference.read_weights(final))


def with_drawn_images(folder: str, out: str, **config: Any) -> reference.Run:
    """Prompts with images, to which a tool answers with others; the facts are the ids of completions."""
    import trl_jax
    from compat_tests.trainer.test_image_rollouts import SAME, prompts
    from compat_tests.trainer.test_tool_images import draw
    from trl_jax.rollout import tools

    tools.parsed_message, seen = called, []

    def reward(completion_ids, **columns):
        seen.extend(list(map(int, ids)) for ids in completion_ids)
        return [len(ids) % 7 for ids in completion_ids]

    args = trl_jax.GRPOConfig(out, **SAME | config | {"max_tool_calling_iterations": 2})
    trainer = trl_jax.GRPOTrainer(folder, reward, args, prompts(), tools=[draw])
    trainer.train()
    final = Path(out) / "final"
    trainer.save_model(str(final))
    return reference.Run(trainer.state.log_history, final, reference.read_weights(final), None, facts=seen)
