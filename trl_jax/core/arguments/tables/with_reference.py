"""How the fields are handled that the configs of trainers with a reference share: DPOConfig and KTOConfig."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trl_jax.core.arguments import rules
from trl_jax.core.arguments.table import Handling, fields
from trl_jax.core.arguments.tables.base import BASE, COMMON
from trl_jax.core.arguments.values import show


def _synced(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    if value and values["precompute_ref_log_probs"]:
        return (
            "You cannot use `sync_ref_model=True` together with `precompute_ref_log_probs=True`: log-probabilities "
            "computed before training are those of a reference that stays as it is. Leave one of the two out."
        )
    return None


def mixup_alpha(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    if isinstance(value, int | float) and 0 <= value <= 1:
        return None
    return f"{show(name, value)}: wanted the policy's share of the new reference, from 0.0 to 1.0."


WITH_REFERENCE: dict[str, Handling] = {
    **BASE,
    **{name: line for name, line in COMMON.items() if name not in ("eos_token", "pad_token")},
    **fields("label_smoothing_factor", "warned", "preference losses have no labels of tokens to smooth."),
    **fields("router_aux_loss_coef", "native", rule=rules.number(0, optional=True, most=rules.MOST_FLOAT32)),
    **fields("max_prompt_length", "native", rule=rules.whole(1, optional=True)),
    **fields("precompute_ref_log_probs", "native"),
    **fields("precompute_ref_batch_size", "native", rule=rules.whole(1, optional=True, most=rules.MOST_EXAMPLES)),
    **fields("sync_ref_model", "native", rule=_synced),
    **fields("ref_model_mixup_alpha", "native", rule=mixup_alpha),
    **fields("ref_model_sync_steps", "native", rule=rules.whole(1)),
    **fields("beta", "native", rule=rules.number(1e-9, most=rules.MOST_FLOAT32)),
}
