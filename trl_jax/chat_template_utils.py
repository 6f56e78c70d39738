"""Chat templates from one tokenizer to another: TRL's `trl.chat_template_utils`, as far as reward models need it."""

from __future__ import annotations

from typing import Any

from transformers import AddedToken, AutoTokenizer


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
    source = AutoTokenizer.from_pretrained(source_tokenizer_path)
    vocabulary = tokenizer.get_vocab()
    new = [token for token in source.added_tokens_decoder.values() if token.content not in vocabulary]
    if len(vocabulary) + len(new) > model.vocab_size:
        raise ValueError(
            f"{source_tokenizer_path} brings {len(new)} new tokens ({', '.join(token.content for token in new[:8])}), "
            f"but the model embeds {model.vocab_size} tokens and {len(vocabulary)} are taken. Resize the checkpoint's "
            "embedding with transformers' resize_token_embeddings first."
        )
    tokenizer.chat_template = source.get_chat_template()
    tokenizer.add_tokens(new)
    tokenizer.eos_token = source.eos_token
    model.config.eos_token_id = tokenizer.eos_token_id
    names = [token.content for token in new] + _fill(tokenizer, model.vocab_size)
    return model, tokenizer, tokenizer.convert_tokens_to_ids(names)


def _fill(tokenizer: Any, size: int) -> list[str]:
    """Name the rows that no token has; the names that were new."""
    added, number = [], 0
    while len(tokenizer.get_vocab()) < size:
        name = f"<extra_id_{number}>"
        if tokenizer.add_tokens(AddedToken(name)):
            added.append(name)
        number += 1
    return added
