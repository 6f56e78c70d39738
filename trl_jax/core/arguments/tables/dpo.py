"""How each field of DPOConfig is handled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trl_jax.core.arguments import rules
from trl_jax.core.arguments.table import Handling, fields
from trl_jax.core.arguments.tables.base import COMMON
from trl_jax.core.arguments.tables.with_reference import WITH_REFERENCE
from trl_jax.core.arguments.values import show

LOSSES = (
    "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired",
    "apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm",
)  # fmt: skip
DIVERGENCES = ("reverse_kl", "forward_kl", "js_divergence", "alpha_divergence")
_OF_ANY_DIVERGENCE = {"sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop", "sft"}
_WITHOUT_WEIGHTS = {"aot", "aot_unpaired"}


def losses_of(loss_type: Any) -> list[Any]:
    """The names in `loss_type`, of which a script may write a single one, or a tuple."""
    return [loss_type] if isinstance(loss_type, str) else list(loss_type)


def _losses(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    if not isinstance(value, list | tuple | str) or not value:
        return f"{show(name, value)}: wanted the names of losses, as in loss_type=['sigmoid']."
    value = losses_of(value)
    for loss in value:
        if loss not in LOSSES:
            return f"Unknown loss type: {loss}. Should be one of {list(LOSSES)}"
    if "exo_pair" in value and not 0 < values["label_smoothing"] < 1:
        return (
            "Label smoothing must be greater than 0.0 when using 'exo_pair' loss, and below 1. The paper recommends a "
            "value of 1e-3."
        )
    if "robust" in value and values["label_smoothing"] == 0.5:
        return "loss_type='robust' divides by 1 - 2 * label_smoothing, and label_smoothing is 0.5. Lower it."
    return None


def _losses_note(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    if "robust" in losses_of(value) and values["label_smoothing"] > 0.5:
        return (
            "The `label_smoothing` parameter should lie in [0.0, 0.5) for the 'robust' loss. You provided "
            f"{values['label_smoothing']}."
        )
    return None


def _weights(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    if value is None:
        return None
    if not isinstance(value, list | tuple) or not all(isinstance(weight, int | float) for weight in value):
        return f"{show(name, value)}: wanted a list of numbers, one for each of loss_type."
    if len(value) != (count := len(losses_of(values["loss_type"]))):
        return (
            "`loss_weights` must have the same length as `loss_type` when combining multiple losses. Got "
            f"{len(value)} weights for {count} loss types."
        )
    return None


def _divergence(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    if value not in DIVERGENCES:
        return f"Unknown f_divergence_type: {value}. Should be one of {list(DIVERGENCES)}"
    if value != "reverse_kl" and not set(losses_of(values["loss_type"])) <= _OF_ANY_DIVERGENCE:
        return (
            f"`f_divergence_type={value!r}` is only supported for the following loss types: "
            f"{sorted(_OF_ANY_DIVERGENCE)}. You provided {losses_of(values['loss_type'])}."
        )
    return None


def _weighting(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    if value and _WITHOUT_WEIGHTS & set(losses_of(values["loss_type"])):
        return (
            "WPO-style weighting is not implemented for 'aot' or 'aot_unpaired' because they sort the pairs of a "
            "batch. Leave use_weighting out."
        )
    return None


def _truncation(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    if value in ("keep_start", "keep_end"):
        return None
    return f"Unsupported truncation mode: {value}, expected 'keep_start' or 'keep_end'"


DPO: dict[str, Handling] = {
    **WITH_REFERENCE,
    "pad_token": COMMON["pad_token"],
    **fields("label_names", "warned", "preference pairs have no column of labels."),
    **fields("label_smoothing_factor", "warned", "preference losses have label_smoothing."),
    # Rows
    **fields("truncation_mode", "native", rule=_truncation),
    **fields("padding_free", "warned", "it is temporarily unavailable in TRL; batch_layout='packed' has no padding."),
    # The loss
    **fields("loss_type", "native", rule=_losses, note=_losses_note),
    **fields("loss_weights", "native", rule=_weights),
    **fields("discopop_tau", "native", rule=rules.number(1e-9, most=rules.MOST_FLOAT32)),
    **fields("ld_alpha", "native", rule=rules.number(0, optional=True, most=1.0)),
    **fields("label_smoothing", "native", rule=rules.number(0, most=1.0)),
    **fields("f_divergence_type", "native", rule=_divergence),
    **fields("f_alpha_divergence_coef", "native", rule=rules.number(-rules.MOST_FLOAT32, most=rules.MOST_FLOAT32)),
    **fields("use_weighting", "native", rule=_weighting),
}  # fmt: skip
