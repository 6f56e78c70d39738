"""Chat templates from one tokenizer to another: TRL's `trl.chat_template_utils`, as far as trainers need it."""

from __future__ import annotations

import warnings
from typing import Any

from trl_jax.data.chat import clone_into
from trl_jax.data.chat_templates import has_generation_markers as has_generation_markers
from trl_jax.data.chat_templates import is_chat_template_prefix_preserving as is_chat_template_prefix_preserving
from trl_jax.data.chat_templates import response_template, template_for_training
from trl_jax.data.chat_templates import supports_tool_calling as supports_tool_calling
from trl_jax.hub.torch_objects import is_torch_model, resize


def clone_chat_template(
    model: Any, tokenizer: Any, source_tokenizer_path: str, resize_to_multiple_of: int | None = 64
) -> tuple[Any, Any, list[int]]:
    """Give `tokenizer` the chat template, the added tokens and the EOS token of another.

    As in TRL, the embedding then has a row for each token, which are filled up with `<extra_id_0>` and so on: rows that
    a checkpoint had to spare go. Those of a model that cannot be resized are filled up instead.

    Args:
        model: what one of our auto classes loaded, or a torch model; its config gets the EOS token's id.
        tokenizer: changed in place.
        source_tokenizer_path: folder or Hub name.
        resize_to_multiple_of: to which the number of rows is rounded up; None leaves it at that of the tokens.

    Returns:
        The model, the tokenizer, and the ids of the tokens that were added.

    Raises:
        ValueError: there are more new tokens than rows to spare, in a model that cannot grow.
    """
    if is_torch_model(model):
        rows, multiple = model.get_input_embeddings().num_embeddings, resize_to_multiple_of or 1
        added = clone_into(tokenizer, source_tokenizer_path, rows=rows, multiple=multiple)
        resize(model, len(tokenizer.get_vocab()))
        for config in (model.config, model.generation_config):
            if config is not None:
                config.eos_token_id = tokenizer.eos_token_id
        return model, tokenizer, added
    rows = model.vocab_size
    multiple = (resize_to_multiple_of or 1) if model.can_resize else 0
    added = clone_into(tokenizer, source_tokenizer_path, rows=rows, multiple=multiple)
    model.resize_token_embeddings(len(tokenizer.get_vocab()) if model.can_resize else rows)
    model.config.eos_token_id = tokenizer.eos_token_id
    return model, tokenizer, added


_CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def setup_chat_format(
    model: Any, tokenizer: Any, format: str | None = "chatml", resize_to_multiple_of: int | None = None
) -> tuple[Any, Any]:
    """Give a base model and its tokenizer the format ChatML, as TRL's function of early releases did.

    `<|im_start|>` becomes the BOS token, `<|im_end|>` EOS and pad token; they get rows in the embedding. Those of a
    torch model are as torch draws them, of others the mean of the rows.

    Args:
        model, tokenizer: changed in place. resize_to_multiple_of: to which the number of rows is rounded up.

    Raises:
        ValueError: the tokenizer has a chat template already, or another format is asked for.
    """
    if tokenizer.chat_template is not None:
        raise ValueError(
            "Chat template is already added to the tokenizer. If you want to overwrite it, please set it to None."
        )
    if format != "chatml":
        raise ValueError(f"Format {format!r} not available. Please use one of ['chatml'].")
    begin, end = "<|im_start|>", "<|im_end|>"
    tokenizer.add_special_tokens({"bos_token": begin, "eos_token": end, "pad_token": end})
    tokenizer.chat_template = _CHATML
    model.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=resize_to_multiple_of)
    for config in (model.config, model.generation_config):
        if config is not None:
            config.bos_token_id, config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
            config.pad_token_id = tokenizer.pad_token_id
    return model, tokenizer


def add_response_schema(processing_class: Any) -> Any:
    """Give a tokenizer the `response_template` that goes with its chat template, by which its `parse_response` tells
    calls of tools from text; of a processor, its tokenizer gets it. Returns the same object.

    Raises:
        ValueError: the template writes calls in a form that is not known.
    """
    tokenizer = vars(processing_class).get("tokenizer", processing_class)
    tokenizer.response_template = response_template(processing_class)
    return processing_class


def get_training_chat_template(processing_class: Any = None, tokenizer: Any = None) -> str | None:
    """None where the template marks what the assistant says and, if it knows tools, renders what is before a tool's
    answer as without it. Else one that does: TRL's own, where trl is installed and knows the template, or one that
    is derived.

    Raises:
        ValueError: there is no such template.
    """
    if tokenizer is not None:
        if processing_class is not None:
            raise TypeError("Pass only processing_class: tokenizer is what it was called before.")
        warnings.warn("get_training_chat_template: tokenizer= is now processing_class=.", FutureWarning, stacklevel=2)
        processing_class = tokenizer
    if processing_class is None:
        raise TypeError("get_training_chat_template() misses its argument: 'processing_class'")
    return template_for_training(processing_class)
