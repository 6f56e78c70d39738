"""Copy and patch chat templates: the functions of `trl.chat_template_utils` that scripts import."""

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
    """Copy the chat template, the added tokens and the EOS token of another tokenizer into `tokenizer`.

    As in TRL, the embedding is resized to one row per token, padded with tokens `<extra_id_0>` and so on; spare rows of
    the checkpoint are removed. If the model cannot be resized, its spare rows are filled with such tokens instead.

    Args:
        model: a model loaded by a trl_jax auto class, or a torch model; its config gets the EOS token's id.
        tokenizer: modified in place.
        source_tokenizer_path: folder or Hub name.
        resize_to_multiple_of: the number of rows is rounded up to a multiple of this; None: no rounding.

    Returns:
        The model, the tokenizer, and the ids of the tokens that were added.

    Raises:
        ValueError: the model cannot be resized and has fewer spare rows than new tokens.
    """
    if is_torch_model(model):
        rows, multiple = model.get_input_embeddings().num_embeddings, resize_to_multiple_of or 1
        added = clone_into(tokenizer, source_tokenizer_path, rows=rows, multiple=multiple)
        resize(model, len(tokenizer.get_vocab()))
        _set_eos(model, tokenizer)
        return model, tokenizer, added
    rows = model.vocab_size
    multiple = (resize_to_multiple_of or 1) if model.can_resize else 0
    added = clone_into(tokenizer, source_tokenizer_path, rows=rows, multiple=multiple)
    model.resize_token_embeddings(len(tokenizer.get_vocab()) if model.can_resize else rows)
    _set_eos(model, tokenizer)
    return model, tokenizer, added


def _set_eos(model: Any, tokenizer: Any) -> None:
    model.config.get_text_config().eos_token_id = tokenizer.eos_token_id
    if model.can_generate() and model.generation_config is not None:  # torch classifiers have no generation_config
        model.generation_config.eos_token_id = tokenizer.eos_token_id


_CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def setup_chat_format(
    model: Any, tokenizer: Any, format: str | None = "chatml", resize_to_multiple_of: int | None = None
) -> tuple[Any, Any]:
    """Set up a base model and its tokenizer for ChatML, like the function of early TRL releases.

    `<|im_start|>` becomes the BOS token and `<|im_end|>` the EOS and pad token; both get embedding rows. torch
    initializes those of a torch model; in other models they are the mean of the existing rows.

    Args:
        model, tokenizer: modified in place.
        resize_to_multiple_of: the number of rows is rounded up to a multiple of this.

    Raises:
        ValueError: the tokenizer already has a chat template, or `format` is not "chatml".
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
    """Set the `response_template` that matches a tokenizer's chat template, so that its `parse_response` finds tool
    calls. For a processor it is set on its tokenizer. Returns the same object.

    Raises:
        ValueError: the template's format of tool calls is not recognized.
    """
    tokenizer = vars(processing_class).get("tokenizer", processing_class)
    tokenizer.response_template = response_template(processing_class)
    return processing_class


def get_training_chat_template(processing_class: Any = None, tokenizer: Any = None) -> str | None:
    """A training-compatible version of the chat template, or None if the template already is.

    Compatible means that it marks assistant content with `{% generation %}` and, if it supports tools, that it is
    prefix-preserving. The replacement is TRL's own if trl is installed and knows the template, else a derived one.

    Raises:
        ValueError: no such template can be found or derived.
    """
    if tokenizer is not None:
        if processing_class is not None:
            raise TypeError("Pass only processing_class: tokenizer is its former name.")
        warnings.warn("get_training_chat_template: tokenizer= is now processing_class=.", FutureWarning, stacklevel=2)
        processing_class = tokenizer
    if processing_class is None:
        raise TypeError("get_training_chat_template() missing 1 required argument: 'processing_class'")
    return template_for_training(processing_class)
