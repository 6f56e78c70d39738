"""Text in, text out: prompts as strings or conversations, completions as strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trl_jax.core.printable import brief
from trl_jax.data.rows.chat import rendered
from trl_jax.data.rows.checks import check_no_media


def encoded_prompt(
    prompt: str | Sequence[dict[str, Any]], tokenizer: Any, where: str = "The prompt", **template_kwargs: Any
) -> list[int]:
    """Token ids of a text as the tokenizer begins one, or of a conversation in its chat template.

    A conversation is left open for an answer; one that ends with the assistant's message is gone on with.

    Args:
        where: names the prompt in errors.

    Raises:
        ValueError: neither of them, a conversation and no chat template, one that makes too much, or one with images.
    """
    if isinstance(prompt, str):
        return list(tokenizer(prompt)["input_ids"])
    messages = prompt if isinstance(prompt, Sequence) else ()
    if not messages or not all(isinstance(message, dict) and "role" in message for message in messages):
        raise ValueError(
            f"{where} is {brief(prompt)}: wanted a string, or messages as in [{{'role': 'user', 'content': 'Hi'}}]."
        )
    check_no_media(list(messages), "The prompt")
    if tokenizer.chat_template is None:
        raise ValueError(
            f"{where} is a conversation, but the tokenizer has no chat template. Pass text, or set "
            "tokenizer.chat_template."
        )
    continues = prompt[-1]["role"] == "assistant"
    text = rendered(
        tokenizer, list(prompt), where, tokenize=False, add_generation_prompt=not continues,
        continue_final_message=continues, **template_kwargs,
    )  # fmt: skip
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def ids_of_tokenizer(model: Any, tokenizer: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """Fields with the tokenizer's EOS and pad ids where neither they nor the model's generation_config have one."""
    own = vars(model.generation_config)
    eos = tokenizer.eos_token_id
    pad = eos if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    known = {"eos_token_id": eos, "pad_token_id": pad}
    return {name: id_ for name, id_ in known.items() if own[name] is None and id_ is not None} | fields


def decoded(ids: Sequence[int], tokenizer: Any) -> str:
    """The text of new tokens, without special ones."""
    return tokenizer.decode(ids, skip_special_tokens=True)
