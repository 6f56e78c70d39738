"""Tiny checkpoints of the encoder families in at least two variants each, rows, and transformers' results."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import numpy as np

SLIDE, FULL = "sliding_attention", "full_attention"
# Config values in addition to tiny.SHAPE, and those of tiny.SHAPE that a config does not have.
_DISENTANGLED = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
SHAPES = {
    "distilbert": {"hidden_dim": 96},
    "electra": {"embedding_size": 32},
    "deberta": _DISENTANGLED | {"position_biased_input": False, "max_relative_positions": 9},
    "deberta-v2": _DISENTANGLED
    | {"position_biased_input": False, "position_buckets": 8, "max_relative_positions": 20}
    | {"share_att_key": True, "norm_rel_ebd": "layer_norm"},
    "modernbert": {"local_attention": 6, "cls_token_id": None, "sep_token_id": None},
}
FAMILIES = tuple("bert roberta xlm-roberta camembert distilbert electra modernbert deberta deberta-v2".split())
ABSENT = dict.fromkeys(FAMILIES, ("num_key_value_heads",))
ABSENT["distilbert"] += ("intermediate_size",)

_ROPES = {
    SLIDE: {"rope_type": "linear", "rope_theta": 100.0, "factor": 2.0},
    FULL: {"rope_type": "default", "rope_theta": 900.0},
}
# old: keys of earlier configs, replacing those that transformers writes today.
VARIANTS = {
    "bert": {"plain": {}, "other": {"hidden_act": "gelu_new", "layer_norm_eps": 1e-2, "type_vocab_size": 1}},
    "roberta": {"plain": {}, "other_pad": {"pad_token_id": 7, "hidden_act": "relu", "type_vocab_size": 1}},
    "xlm-roberta": {"plain": {}, "other_pad": {"pad_token_id": 5, "layer_norm_eps": 1e-2}},
    "camembert": {"plain": {}, "other_pad": {"pad_token_id": 1, "num_hidden_layers": 1}},
    "distilbert": {"plain": {}, "other": {"activation": "relu", "n_layers": 2, "pad_token_id": None}},
    "electra": {"plain": {}, "unprojected": {"embedding_size": 64, "hidden_act": "relu"}},
    "modernbert": {
        "plain": {},
        "biases": {
            "norm_bias": True, "attention_bias": True, "mlp_bias": True, "classifier_bias": True,
            "classifier_pooling": "mean", "classifier_activation": "silu", "layer_types": [SLIDE, FULL, SLIDE],
            "rope_parameters": _ROPES,
        },
        "old": {"old": {"global_rope_theta": 900.0, "local_rope_theta": 90.0, "global_attn_every_n_layers": 2}},
    },
    "deberta": {
        "plain": {},
        "one_product": {"pos_att_type": ["c2p"], "type_vocab_size": 2, "position_biased_input": True},
        "text": {"old": {"pos_att_type": "p2c"}, "pos_att_type": ["p2c"], "max_relative_positions": -1},
    },
    "deberta-v2": {
        "plain": {},
        "own_maps": {
            "share_att_key": False, "position_buckets": -1, "norm_rel_ebd": "none", "max_relative_positions": 7,
        },
        "convolved": {"conv_kernel_size": 3, "conv_act": "gelu", "conv_groups": 2, "pos_att_type": ["p2c"]},
        "absolute": {
            "position_biased_input": True, "type_vocab_size": 2, "pos_att_type": ["c2p"], "conv_kernel_size": 5,
        },
    },
}  # fmt: skip
CASES = [(family, name) for family, variants in VARIANTS.items() for name in variants]
LENGTH = 40
_TODAYS = {"modernbert": ("rope_parameters", "layer_types"), "deberta": ("pos_att_type",)}


def build(folder: Path, family: str, name: str, **how) -> Path:
    """Build the checkpoint of a variant; `how` as in `tiny.tiny_model`."""
    from compat_tests.tiny import tiny_model

    facts = dict(VARIANTS[family][name])
    old = facts.pop("old", {})
    # The meaning of the old keys, so that transformers writes a config whose keys can be replaced.
    if family == "modernbert" and old:
        ropes = {FULL: old["global_rope_theta"], SLIDE: old["local_rope_theta"]}
        facts["rope_parameters"] = {kind: {"rope_type": "default", "rope_theta": ropes[kind]} for kind in ropes}
        facts["layer_types"] = [FULL, SLIDE, FULL]
    tiny_model(folder, family, **facts, **how)
    if old:
        config = json.loads((folder / "config.json").read_text())
        config = {key: value for key, value in config.items() if key not in _TODAYS[family]} | old
        (folder / "config.json").write_text(json.dumps(config))
    return folder


@cache
def rows() -> tuple[np.ndarray, np.ndarray]:
    """Ids and mask `[6, LENGTH]`; the pad is id 0.

    Full; padded; visible pads in the middle; a hidden one in the middle; padded to half; visible pads at the end.
    """
    ids = np.random.default_rng(0).integers(1, 512, (6, LENGTH))
    mask = np.ones_like(ids)
    ids[1, -9:], mask[1, -9:] = 0, 0
    ids[2, 12:15] = 0
    ids[3, 20], mask[3, 20] = 0, 0
    ids[4, LENGTH // 2 :], mask[4, LENGTH // 2 :] = 0, 0
    ids[5, -2:] = 0
    return ids, mask
