"""Prints the table in docs/ of all sequence classifiers of transformers: python -m compat_tests.readme_table"""

from __future__ import annotations

from collections.abc import Iterable

from compat_tests.exported import configs
from compat_tests.exported.test_training import CASES as EXPORTED_CURVES
from compat_tests.models import encoders
from compat_tests.models.families import BODY_ONLY
from compat_tests.parity.cases import FAMILY_CASES as DECODER_CURVES
from compat_tests.parity.test_encoder_curves import CASES as ENCODER_CURVES
from trl_jax.hub.families import families
from trl_jax.hub.model_types import REFUSED
from trl_jax.hub.vision import vision_families

_SAME = "transformers' scores and gradients, byte-identical export"
_CURVE = f"TRL's loss curve, {_SAME}"
_READ = "logits and gradients of the full transformers model, byte-identical export"
_SEEN = f"{_READ}; [details](vision.md#models)"
_SEEING = {name for name, family in families().items() if family.carried is not None}


def lines() -> list[str]:
    """The rows of the table: model types, engine, what the tests compare."""
    native, exported = set(families()), set(configs.TYPES) - set(families())
    curves = {"llama", "qwen2", "qwen3", "gemma3", *DECODER_CURVES, *ENCODER_CURVES}
    decoders = native - set(encoders.FAMILIES) - _SEEING
    rows = [
        (curves & decoders, "native", _CURVE),
        (decoders - curves - BODY_ONLY, "native", _SAME),
        (BODY_ONLY, "native; transformers has no classifier for them, so it loads only the base model", _SAME),
        (set(vision_families()), "native, on text and on rows with images", _SEEN),
        (_SEEING - set(vision_families()), "native, text part only; other towers are saved unchanged", _READ),
        (curves & set(encoders.FAMILIES), "native", _CURVE),
        (set(encoders.FAMILIES) - curves, "native", _SAME),
        (set(EXPORTED_CURVES), "exported", "TRL's loss curve, transformers' scores and gradients"),
        (exported & set(configs.SOME) - set(EXPORTED_CURVES), "exported", "transformers' scores and gradients"),
        (exported - set(configs.SOME), "exported", "the same, with `python -m benchmarks.exported_sweep`"),
    ]
    for reason in dict.fromkeys(reason for reason, _ in REFUSED.values()):
        refused = {f"{name} ({nearest})" for name, (why, nearest) in REFUSED.items() if why == reason}
        rows.append((refused, "refused (nearest type that works)", reason))
    return [f"| {_listed(types)} | {backend} | {tested} |" for types, backend, tested in rows]


def _listed(types: Iterable[str]) -> str:
    return ", ".join(sorted(types))


if __name__ == "__main__":
    print(*lines(), sep="\n")
