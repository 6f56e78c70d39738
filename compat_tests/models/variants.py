"""The config differences between checkpoints, each as a tiny checkpoint; rows; transformers' results."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from compat_tests.models import families
from compat_tests.tiny import buffers_of, tiny_model
from trl_jax.hub.families import families as native_families

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "factor": 3.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 8.0}
WINDOW = {"use_sliding_window": True, "sliding_window": 7}
TYPES = ["sliding_attention", "full_attention", "sliding_attention"]

EVERY_FAMILY = {
    "plain": {},
    "tied": {"tie": True, "head": "causal"},
    "wide_heads": {"head_dim": 24, "num_key_value_heads": 1},
    "other_facts": {"rms_norm_eps": 1e-2, "hidden_act": "gelu_pytorch_tanh", "num_key_value_heads": 4},
    "llama3": {"rope": LLAMA3, "theta": 500.0},
    "linear": {"rope": LINEAR, "theta": 200.0},
    "yarn": {"rope": YARN, "theta": 300.0},
    "old_llama3": {"rope": LLAMA3, "theta": 500.0, "old": "rope_type"},
    "old_linear": {"rope": LINEAR, "theta": 200.0, "old": "type"},
    "old_yarn": {"rope": YARN, "theta": 300.0, "old": "type"},
    "old_default": {"theta": 700.0, "old": "rope_type"},
}
WINDOWS = {
    "layer_types": {**WINDOW, "layer_types": TYPES},
    "max_window_layers": {**WINDOW, "max_window_layers": 1, "drop": ["layer_types"]},
    "long_window": {**WINDOW, "sliding_window": 90, "layer_types": TYPES, "length": 150},
}
OWN = {
    "llama": {
        "attention_bias": {"attention_bias": True},
        "mlp_bias": {"mlp_bias": True},
        "both_biases": {"attention_bias": True, "mlp_bias": True},
        "long": {"length": 150},
    },
    "qwen2": WINDOWS,
    "qwen3": {"attention_bias": {"attention_bias": True}, **WINDOWS},
}
COMMON = list(OWN)  # llama is tested in every variant, other families in some of them and in their own
CASES = [("llama", name) for name in EVERY_FAMILY] + [(family, name) for family, own in OWN.items() for name in own]
CASES += [(family, name) for family in ("qwen2", "qwen3") for name in ("plain", "tied", "yarn")]
CASES += [(family, name) for family, own in families.VARIANTS.items() for name in own]
LENGTH = 40


def variant(family: str, name: str) -> dict:
    return {**EVERY_FAMILY, **OWN[family]}[name] if family in OWN else families.VARIANTS[family][name]


def build(folder: Path, family: str, name: str) -> Path:
    """Build the checkpoint of a variant.

    rope, theta: rope parameters; old: write them in the older form with `rope_theta` and `rope_scaling`, whose type is
    under this key; drop: keys left out of config.json; the rest are arguments of `tiny_model`.
    """
    if family not in OWN:
        return _build_own(folder, family, dict(variant(family, name)))
    facts = dict(variant(family, name))
    rope, theta, old = facts.pop("rope", {}), facts.pop("theta", 10_000.0), facts.pop("old", None)
    drop, _ = facts.pop("drop", []), facts.pop("length", None)
    rope = {"rope_type": "default", "rope_theta": theta, **rope}
    tiny_model(folder, family, rope_parameters=rope, **facts)
    config = json.loads((folder / "config.json").read_text())
    if old is not None:
        del config["rope_parameters"]
        del rope["rope_theta"]
        kind = rope.pop("rope_type")
        config |= {"rope_theta": theta, "rope_scaling": {old: kind, **rope} if rope else None}
    config = {key: value for key, value in config.items() if key not in drop}
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return folder


def _build_own(folder: Path, family: str, facts: dict) -> Path:
    """old: the keys of an earlier config format, replacing `rope_parameters`."""
    old = facts.pop("old", None)
    if family not in families.OWN_ROPE and old is None:
        facts.setdefault("rope_parameters", dict(families.ROPE))
    tiny_model(folder, family, head="base" if family in families.BODY_ONLY else "classifier", **facts)
    if old is not None:
        config = json.loads((folder / "config.json").read_text())
        del config["rope_parameters"]
        (folder / "config.json").write_text(json.dumps(config | old))
    return folder


@cache
def rows(length: int = LENGTH) -> tuple[np.ndarray, np.ndarray]:
    """Ids and mask `[7, length]`; the pad is id 0.

    Full; right-padded; left-padded; visible pads and a hidden one in the middle; visible pads at the end; only pads.
    """
    ids = np.random.default_rng(0).integers(1, 512, (7, length))
    mask = np.ones_like(ids)
    ids[1, length - 9 :], mask[1, length - 9 :] = 0, 0
    ids[2, :11], mask[2, :11] = 0, 0
    ids[3, 12:15] = 0
    ids[4, 20], mask[4, 20] = 0, 0
    ids[5, -2:] = 0
    ids[6] = 0
    return ids, mask


def reference(folder: Path):
    """transformers' classifier in float32, in eval mode."""
    import torch
    import transformers

    torch.set_num_threads(1)
    if json.loads((folder / "config.json").read_text())["model_type"] in families.BODY_ONLY:
        return _body_with_our_head(folder).eval()
    kind = transformers.AutoModelForSequenceClassification
    return kind.from_pretrained(folder, num_labels=1, dtype=torch.float32).eval()


def _body_with_our_head(folder: Path):
    """transformers' trunk under a linear head that reads where its own classifiers would."""
    import torch
    import transformers
    from safetensors.torch import load_file

    class Classifier(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.body = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32)
            self.score = torch.nn.Parameter(load_file(folder / "model.safetensors")["score.weight"])

        def forward(self, input_ids, attention_mask):
            hidden = self.body(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
            places = torch.arange(input_ids.shape[1])
            at = torch.where(input_ids != self.body.config.pad_token_id, places, 0).max(dim=1).values
            logits = hidden[torch.arange(len(hidden)), at] @ self.score.T
            return SimpleNamespace(logits=logits)

    return Classifier()


def reference_gradients(model, folder: Path) -> dict[str, np.ndarray]:
    """The gradients of a backward pass in transformers' model, by the names on disk."""
    import torch
    from safetensors.numpy import load_file

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
        for _, buffer in buffers_of(model):
            buffer.zero_()
    bare = type(model).__name__ == "Classifier"
    (model.body if bare else model).save_pretrained(folder)
    found = load_file(folder / "model.safetensors")
    if not bare:
        return found
    prefix = native_families()[model.body.config.model_type].base_prefix
    return {prefix + name: values for name, values in found.items()} | {"score.weight": model.score.detach().numpy()}


def reference_logits(folder: Path, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
    import torch

    with torch.no_grad():
        return reference(folder)(input_ids=torch.tensor(ids), attention_mask=torch.tensor(mask)).logits.numpy()


def assert_close(found: np.ndarray, wanted: np.ndarray, mark: float, what: str = "scores") -> None:
    """Assert that no number is off by more than `mark` times the largest expected magnitude."""
    scale = np.abs(wanted).max()
    off = np.abs(np.asarray(found, np.float64) - wanted).max()
    assert off <= mark * scale, f"{what}: off by {off:.2e} where the scale is {scale:.2e}"
