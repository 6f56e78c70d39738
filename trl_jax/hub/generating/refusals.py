"""Arguments of transformers' `generate` that this release does not have, each with what to do instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trl_jax.core.secrets import shown

_BEAMS = (
    "there are no beams. Sample with do_sample=True and num_return_sequences, and rank the answers by their logprobs."
)
_ASSISTED = "there is no assisted decoding, which gives the same text sooner. Leave it out."
_CONSTRAINED = "there are no beams, which it needs. Pass a logits_processor or prefix_allowed_tokens_fn of your own."
_GUIDANCE = "there is no guidance, which runs the model twice. Leave it out."
_INNER = "a step keeps none of the model's inner values. Take them from transformers' own model."
_KEPT = "keys and values are kept as they are computed, on the device. Leave it out."

# Field of GenerationConfig -> the values that ask for nothing, and what is said of others.
_FIELDS: dict[str, tuple[tuple[Any, ...], str]] = {
    "num_beams": ((None, 1), _BEAMS),
    "num_beam_groups": ((None, 1), _BEAMS),
    "diversity_penalty": ((None, 0.0), _BEAMS),
    "constraints": ((None,), _CONSTRAINED),
    "force_words_ids": ((None,), _CONSTRAINED),
    "dola_layers": ((None,), "there is no DoLa decoding. Leave it out."),
    "penalty_alpha": ((None, 0, 0.0), "there is no contrastive search. Sample with top_p and a repetition_penalty."),
    "use_mtp": ((None, False), _ASSISTED),
    "prompt_lookup_num_tokens": ((None,), _ASSISTED),
    "assistant_early_exit": ((None,), _ASSISTED),
    "guidance_scale": ((None, 1), _GUIDANCE),
    "watermarking_config": ((None,), "there are no watermarks. Pass a logits_processor that makes one."),
    "token_healing": ((None, False), "prompts are not healed. Cut the last token off the prompt yourself."),
    "output_attentions": ((None, False), _INNER),
    "output_hidden_states": ((None, False), _INNER),
    "cache_config": ((None,), _KEPT),
}
_CACHES = (None, "dynamic", "static", "hybrid", "sliding_window", "hybrid_chunked", "hybrid_chunked_static")

# Argument of `generate` -> what is said of any value but None.
_ARGUMENTS = {
    "assistant_model": _ASSISTED,
    "assistant_tokenizer": _ASSISTED,
    "negative_prompt_ids": _GUIDANCE,
    "negative_prompt_attention_mask": _GUIDANCE,
    "custom_generate": "transformers' decoding loops are torch's. Leave it out.",
    "inputs_embeds": "prompts are token ids. Pass input_ids.",
    "position_ids": "positions are counted from each row's first token on. Leave it out.",
    "past_key_values": "each call begins with its prompts. Pass whole input_ids.",
    "cache": "each call begins with its prompts. Pass whole input_ids.",
}


def refuse_fields(config: Any) -> None:
    """Raises ValueError where a GenerationConfig asks for something that is not there."""
    values = vars(config)
    asked = {name: why for name, (idle, why) in _FIELDS.items() if values.get(name) not in idle}
    if values["cache_implementation"] == "paged":
        asked["cache_implementation"] = "call generate_batch, which is what transformers does then."
    elif values["cache_implementation"] not in _CACHES:
        asked["cache_implementation"] = _KEPT
    _refuse(asked, values)


def refuse_arguments(arguments: Mapping[str, Any]) -> None:
    """Raises ValueError where one of these was passed."""
    _refuse({name: why for name, why in _ARGUMENTS.items() if arguments.get(name) is not None}, arguments)


def _refuse(asked: dict[str, str], values: Mapping[str, Any]) -> None:
    for name, why in asked.items():
        raise ValueError(f"generate: {shown(name, values[name])} is not in this release of trl_jax: {why}")
