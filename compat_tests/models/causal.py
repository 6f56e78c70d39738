"""Tiny causal language models of each family, tied and untied, and transformers' results."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from compat_tests.models import families, variants
from compat_tests.tiny import tiny_model

# Differences from the classifiers' variants; some only concern the head.
FACTS = {
    "cohere": {"logit_scale": 0.4},
    "cohere2": {"sliding_window": 7, "logit_scale": 3.0},
    "phimoe": {"router_jitter_noise": 0.2, "attention_bias": True, "lm_head_bias": True},
    "gemma2": {"sliding_window": 7, "attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0},
    "gemma3_text": {
        "sliding_window": 7,
        "rope_parameters": families.BOTH_ROPES,
        "layer_types": families.TYPES,
        "final_logit_softcapping": 3.0,
    },
}
NORMED_SUMS = {"do_layer_norm_before": False, "word_embed_proj_dim": 48}  # as in opt-350m
DECODERS = sorted({*variants.COMMON, *families.VARIANTS})


def build(folder: Path, family: str, *, tie: bool, **facts) -> Path:
    own = FACTS.get(family, families.VARIANTS.get(family, {"plain": {}})["plain"])
    if family not in families.OWN_ROPE:
        own = {"rope_parameters": dict(families.ROPE)} | own
    return tiny_model(folder, family, head="causal", tie=tie, **(own | facts))


def rows() -> tuple[np.ndarray, np.ndarray]:
    """Ids and mask `[6, T]`: the classifiers' rows that have visible tokens."""
    ids, mask = variants.rows()
    return ids[:6], mask[:6]


def reads_and_targets(ids: np.ndarray, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Flat indices of visible tokens followed by a visible token, and the ids of the latter; the last two are
    padding."""
    both = (mask[:, :-1] * mask[:, 1:]).astype(bool)
    row, place = np.nonzero(both)
    targets = ids[row, place + 1]
    reads = row * ids.shape[1] + place
    return np.append(reads, [0, 0]).astype(np.int32), np.append(targets, [-1, -1]).astype(np.int32)


def reference(folder: Path, dtype: str = "float32"):
    """transformers' model, in float32 by default."""
    import torch
    import transformers

    torch.set_num_threads(1)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def forward(model, ids: np.ndarray, mask: np.ndarray):
    """Logits of a torch model."""
    import torch

    return model(input_ids=torch.tensor(ids), attention_mask=torch.tensor(mask), use_cache=False).logits
