"""How each field of SFTConfig is handled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trl_jax.core.arguments import device_rules, rules
from trl_jax.core.arguments.table import Handling, fields
from trl_jax.core.arguments.tables.base import BASE, COMMON
from trl_jax.core.arguments.values import as_dict, show

_DATASET_KEY = "skip_prepare_dataset"


def _loss_type(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    if value in ("nll", "dft"):
        return None
    return f"Invalid `loss_type` {value} passed. Supported values are 'nll' and 'dft'."


def _truncation(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    if value in ("keep_start", "keep_end"):
        return None
    return f"Unsupported truncation mode: {value}, expected 'keep_start' or 'keep_end'"


def _dataset_kwargs(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    """Warns of keys that earlier releases of TRL had."""
    others = [key for key in as_dict(name, value) if key != _DATASET_KEY]
    return f"{name} holds {others}, which have no effect: it takes {_DATASET_KEY} only." if others else None


def _smoothing_note(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    if values["loss_type"] != "dft":
        return None
    return f"{show(name, value)} has no effect with loss_type='dft', which has no smoothing. Leave one of them out."


def _checkpointing(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    """TRL's `selective` keeps the products of matrices, as remat_policy="dots_with_no_batch_dims_saveable" does."""
    if problem := rules.a_dict(name, value, values):
        return problem
    kwargs = as_dict(name, value)
    selective = kwargs.pop("selective", False)
    if not selective:
        return device_rules.checkpointing_kwargs(name, kwargs, values)
    if not (values["gradient_checkpointing"] or values["activation_checkpointing"]):
        return f"`{name}={{'selective': True}}` requires `gradient_checkpointing=True`."
    if kwargs.pop("use_reentrant", False):
        return (
            f"`{name}={{'selective': True}}` requires non-reentrant gradient checkpointing. Set `use_reentrant` to "
            "`False`, or leave it unset."
        )
    return device_rules.checkpointing_kwargs(name, kwargs, values)


SFT: dict[str, Handling] = {
    **BASE,
    **{name: line for name, line in COMMON.items() if name != "disable_dropout"},
    **fields("label_smoothing_factor", "native", rule=rules.number(0, most=1.0), note=_smoothing_note),
    **fields("label_names", "warned", "the column of labels is called labels."),
    **fields("average_tokens_across_devices", "native"),
    **fields("activation_checkpointing_kwargs gradient_checkpointing_kwargs", "mapped", rule=_checkpointing),
    **fields("router_aux_loss_coef", "native", rule=rules.number(0, optional=True, most=rules.MOST_FLOAT32)),
    # Rows
    **fields("dataset_text_field shuffle_dataset completion_only_loss assistant_only_loss", "native"),
    **fields("dataset_kwargs", "native", rule=rules.a_dict, note=_dataset_kwargs),
    **fields("truncation_mode", "native", rule=_truncation),
    **fields("packing eval_packing", "native"),
    **fields("packing_strategy", "native", rule=rules.one_of("bfd", "bfd_split", "wrapped")),
    **fields("padding_free", "mapped"),
    # The loss
    **fields("loss_type", "native", rule=_loss_type),
}  # fmt: skip
