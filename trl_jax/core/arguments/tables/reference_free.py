"""How each field of ORPOConfig and of CPOConfig is handled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trl_jax.core.arguments import rules
from trl_jax.core.arguments.table import Handling, fields
from trl_jax.core.arguments.tables.base import BASE, COMMON

LOSSES = ("sigmoid", "hinge", "ipo", "simpo", "alphapo")


def _loss_type(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    if value == "kto_pair":
        return "Support for kto_pair has been removed in CPOTrainer. Please use KTOTrainer."
    return None if value in LOSSES else f"Unknown loss type: {value}. Should be one of {list(LOSSES)}"


def _unsmoothed(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    if values["loss_type"] not in ("hinge", "ipo"):
        return None
    return f"label_smoothing={value} has no effect with loss_type={values['loss_type']!r}. Set it to 0.0."


REFERENCE_FREE: dict[str, Handling] = {
    **BASE,
    **{name: line for name, line in COMMON.items() if name not in ("eos_token", "pad_token", "activation_offloading")},
    **fields("label_names", "warned", "preference pairs have no column of labels."),
    **fields("label_smoothing_factor", "warned", "preference losses have no labels of tokens to smooth."),
    **fields("max_prompt_length", "native", rule=rules.whole(1, optional=True)),
}
ORPO: dict[str, Handling] = {
    **REFERENCE_FREE,
    **fields("beta", "native", rule=rules.number(1e-9, most=rules.MOST_FLOAT32)),
}
CPO: dict[str, Handling] = {
    **ORPO,
    **fields("loss_type", "native", rule=_loss_type),
    **fields("label_smoothing", "native", rule=rules.number(0, most=1.0), note=_unsmoothed),
    **fields("cpo_alpha", "native", rule=rules.number(0, most=rules.MOST_FLOAT32)),
    **fields("simpo_gamma", "native", rule=rules.number(-rules.MOST_FLOAT32, most=rules.MOST_FLOAT32)),
    **fields("alpha", "native", rule=rules.number(-rules.MOST_FLOAT32, most=rules.MOST_FLOAT32)),
}
