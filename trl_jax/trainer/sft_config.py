"""SFTConfig."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trl_jax.config import devices, rules
from trl_jax.config.arguments import arg
from trl_jax.config.base import BaseConfig, inherited
from trl_jax.config.rules import as_dict, show
from trl_jax.config.shared import shared, warn_about_keep_end
from trl_jax.core.trainers import SFT_LOSSES

_DATASET_KEY = "skip_prepare_dataset"
_PACKING = ("bfd", "bfd_split", "wrapped")
_OLDER_VALUES = {"loss_type": ("chunked_nll", "nll"), "packing_strategy": ("bfd-requeue", "bfd_split")}


def _loss_type(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    if value in SFT_LOSSES:
        return None
    return f"Invalid `loss_type` {value} passed. Supported values are 'nll' and 'dft'."


def _dataset_kwargs(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    """Warn about keys of earlier TRL releases."""
    others = [key for key in as_dict(name, value) if key != _DATASET_KEY]
    return f"{name} holds {others}, which have no effect: it takes {_DATASET_KEY} only." if others else None


def _smoothing_note(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    if values["loss_type"] != "dft":
        return None
    return f"{show(name, value)} has no effect with loss_type='dft', which has no smoothing. Leave one of them out."


def _checkpointing(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    """TRL's `selective` saves matmul outputs, like remat_policy="dots_with_no_batch_dims_saveable"."""
    if problem := rules.a_dict(name, value, values):
        return problem
    kwargs = as_dict(name, value)
    selective = kwargs.pop("selective", False)
    if not selective:
        return devices.checkpointing_kwargs(name, kwargs, values)
    if not (values["gradient_checkpointing"] or values["activation_checkpointing"]):
        return f"`{name}={{'selective': True}}` requires `gradient_checkpointing=True`."
    if kwargs.pop("use_reentrant", False):
        return (
            f"`{name}={{'selective': True}}` requires non-reentrant gradient checkpointing. Set `use_reentrant` to "
            "`False`, or leave it unset."
        )
    return devices.checkpointing_kwargs(name, kwargs, values)


@dataclass(repr=False)
class SFTConfig(BaseConfig):
    """The arguments of SFTTrainer, in TRL's names, defaults and positional order; our own come last."""

    _argument_group_name = "training"
    _VALID_DICT_FIELDS = BaseConfig._VALID_DICT_FIELDS + ["dataset_kwargs"]

    learning_rate: float = inherited("learning_rate", default=2e-5, help="Peak learning rate.")
    label_names: list[str] | None = inherited("label_names", how="warned", why="the column of labels is called labels.")
    label_smoothing_factor: float = inherited(
        "label_smoothing_factor", how="native", rule=rules.number(0, most=1.0), note=_smoothing_note
    )
    average_tokens_across_devices: bool = inherited("average_tokens_across_devices", how="native")
    activation_checkpointing_kwargs: dict[str, Any] | str | None = inherited(
        "activation_checkpointing_kwargs",
        help="As a dict or JSON: '{\"selective\": true}' saves matrix products, as "
        "remat_policy='dots_with_no_batch_dims_saveable' does. use_reentrant has no effect.",
        rule=_checkpointing,
    )
    gradient_checkpointing_kwargs: dict[str, Any] | str | None = inherited(
        "gradient_checkpointing_kwargs", rule=_checkpointing
    )

    router_aux_loss_coef: float | None = shared("router_aux_loss_coef")
    chat_template_path: str | None = shared("chat_template_path")

    dataset_text_field: str = arg(
        "text", help="Column that contains the text, for datasets of plain text.", rule=rules.text()
    )
    dataset_kwargs: dict[str, Any] | str | None = arg(
        None,
        help="Pass '{\"skip_prepare_dataset\": true}' if the rows are already tokenized and truncated.",
        rule=rules.a_dict,
        note=_dataset_kwargs,
    )
    dataset_num_proc: int | None = shared("dataset_num_proc")
    eos_token: str | None = shared("eos_token")
    max_length: int | None = shared(
        "max_length",
        help="Maximum length in tokens: longer texts are truncated, and packed rows have this length. "
        "None truncates nothing.",
    )
    truncation_mode: str = shared("truncation_mode")
    shuffle_dataset: bool = arg(False, help="Shuffle the prepared rows once, with seed, before packing.")
    packing: bool = arg(False, help="Pack several texts into each row of max_length tokens.")
    packing_strategy: str = arg(
        "bfd",
        help="How rows are packed: 'bfd' (best-fit decreasing) packs whole texts, truncated to "
        "max_length; 'bfd_split' splits longer texts instead; 'wrapped' concatenates all texts and "
        "cuts them anywhere.",
        choices=_PACKING,
        rule=rules.one_of(*_PACKING),
    )
    padding_free: bool = arg(
        False,
        help="Lay out the texts of a batch end to end instead of in padded rows, as batch_layout='packed' does.",
        how="mapped",
    )
    pad_to_multiple_of: int | str | None = shared("pad_to_multiple_of")
    eval_packing: bool | None = arg(None, help="Pack the evaluation datasets. If unset, the value of packing.")

    completion_only_loss: bool | None = arg(
        None, help="Compute the loss on completions only. If unset, true for rows with a prompt and a completion."
    )
    assistant_only_loss: bool = arg(False, help="Compute the loss only on what the assistant says in conversations.")
    loss_type: str = arg(
        "nll",
        help="'nll', the negative log-likelihood, or 'dft', dynamic fine-tuning "
        "(https://huggingface.co/papers/2508.05629).",
        choices=[*SFT_LOSSES, "chunked_nll"],
        rule=_loss_type,
    )
    activation_offloading: bool = shared("activation_offloading")

    pad_token: str | None = shared("pad_token")

    def __post_init__(self):
        caller = self._frames_to_caller()
        for name, (old, new) in _OLDER_VALUES.items():
            if vars(self)[name] == old:
                text = f"{name}={old!r} is deprecated: use {name}={new!r}, which is the same."
                warnings.warn(text, FutureWarning, stacklevel=caller)
                setattr(self, name, new)
        warn_about_keep_end(self.truncation_mode, caller)
        super().__post_init__()
        if self.padding_free and self.batch_layout == "auto":
            self.batch_layout = "packed"

    @property
    def remats(self) -> list[bool | str]:
        """As in BaseConfig; `selective` in activation_checkpointing_kwargs is `remat=False`, which saves matmul
        outputs."""
        kwargs = as_dict("activation_checkpointing_kwargs", self.activation_checkpointing_kwargs)
        return [False] if kwargs.get("selective") and not self.activation_offloading else super().remats
