"""Chat templates from one tokenizer to another: TRL's `trl.chat_template_utils`, as far as reward models need it."""

from __future__ import annotations

from typing import Any

from trl_jax.data.special_tokens import clone_into


def clone_chat_template(
    model: Any, tokenizer: Any, source_tokenizer_path: str, resize_to_multiple_of: int | None = 64
) -> tuple[Any, Any, list[int]]:
    """Give `tokenizer` the chat template, the added tokens and the EOS token of another.

    The embedding keeps its size: checkpoints have rows to spare, which the new tokens take. Those left over get names,
    `<extra_id_0>` and so on, as in TRL, so that tokenizer and model agree on their number.

    Args:
        model: what `AutoModelForSequenceClassification` loaded; its config gets the EOS token's id.
        tokenizer: changed in place.
        source_tokenizer_path: folder or Hub name.
        resize_to_multiple_of: of TRL's signature; nothing is resized.

    Returns:
        The model, the tokenizer, and the ids of the tokens that were added.

    Raises:
        ValueError: there are more new tokens than rows to spare.
    """
    added = clone_into(tokenizer, source_tokenizer_path, rows=model.vocab_size)
    model.config.eos_token_id = tokenizer.eos_token_id
    return model, tokenizer, added
