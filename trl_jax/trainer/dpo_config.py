"""DPOConfig."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from trl_jax.config import rules
from trl_jax.config.arguments import arg
from trl_jax.config.base import BaseConfig, inherited
from trl_jax.config.rules import must_be
from trl_jax.config.shared import shared, warn_about_keep_end, warn_about_prompt_length
from trl_jax.core.trainers import DIVERGENCES, DPO_LOSSES

_OF_ANY_DIVERGENCE = {"sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop", "sft"}
_WITHOUT_WEIGHTS = {"aot", "aot_unpaired"}


def losses_of(loss_type: str | Iterable[str]) -> list[str]:
    """The names in `loss_type`, which may be a single one."""
    return [loss_type] if isinstance(loss_type, str) else list(loss_type)


def _losses(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    if not isinstance(value, list | tuple | str) or not value:
        return must_be(name, "a list of losses, such as ['sigmoid']", value)
    value = losses_of(value)
    for loss in value:
        if loss not in DPO_LOSSES:
            return f"Unknown loss type: {loss}. Should be one of {list(DPO_LOSSES)}"
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
        return must_be(name, "a list of numbers, one for each loss of loss_type", value)
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


@dataclass(repr=False)
class DPOConfig(BaseConfig):
    """The arguments of DPOTrainer, in TRL's names, defaults and positional order; our own come last."""

    _argument_group_name = "training"

    learning_rate: float = inherited("learning_rate", default=1e-6, help="Peak learning rate.")
    label_names: list[str] | None = inherited(
        "label_names", how="warned", why="preference pairs have no column of labels."
    )
    label_smoothing_factor: float = inherited(
        "label_smoothing_factor", how="warned", why="preference losses have label_smoothing."
    )

    router_aux_loss_coef: float | None = shared("router_aux_loss_coef")
    disable_dropout: bool = shared("disable_dropout")

    dataset_num_proc: int | None = shared("dataset_num_proc")
    max_length: int | None = shared("max_length")
    truncation_mode: str = shared("truncation_mode")
    padding_free: bool = arg(
        False,
        help="Accepted without effect: batch_layout='packed' has no padding.",
        how="warned",
        why="it is temporarily unavailable in TRL; batch_layout='packed' has no padding.",
    )
    pad_to_multiple_of: int | str | None = shared("pad_to_multiple_of")
    precompute_ref_log_probs: bool = shared("precompute_ref_log_probs")
    precompute_ref_batch_size: int | None = shared(
        "precompute_ref_batch_size",
        help="Batch size for precompute_ref_log_probs, in pairs. Defaults to the training or evaluation batch size.",
    )

    loss_type: list[str] = arg(
        ["sigmoid"],
        help="One or more losses, which are added: 'sigmoid', 'hinge', 'ipo', 'exo_pair', 'nca_pair', "
        "'robust', 'bco_pair', 'sppo_hard', 'aot', 'aot_unpaired', 'apo_zero', 'apo_down', "
        "'discopop', 'sft', 'sigmoid_norm'. For the formulas, see trl_jax.losses.dpo.",
        rule=_losses,
        note=_losses_note,
    )
    loss_weights: list[float] | None = arg(
        None, help="Weight of each loss, such as 0.8 0.2 1.0. If unset, 1.0 each.", rule=_weights
    )
    ld_alpha: float | None = arg(
        None,
        help="Weight, from 0.0 to 1.0, of the tokens beyond the length of the shorter completion "
        "(LD-DPO). If unset, all tokens count equally.",
        rule=rules.number(0, optional=True, most=1.0),
    )
    f_divergence_type: str = arg(
        "reverse_kl",
        help="Divergence between policy and reference: 'reverse_kl', 'forward_kl', 'js_divergence' or "
        "'alpha_divergence' (f-DPO).",
        rule=_divergence,
    )
    f_alpha_divergence_coef: float = arg(
        0.5, help="Alpha of 'alpha_divergence'.", rule=rules.number(-rules.MOST_FLOAT32, most=rules.MOST_FLOAT32)
    )
    label_smoothing: float = arg(
        0.0,
        help="Probability that a preference label is flipped, for 'robust', 'exo_pair', 'aot' and 'aot_unpaired'.",
        rule=rules.number(0, most=1.0),
    )
    beta: float = arg(
        0.1,
        help="KL penalty strength (beta in the DPO paper): higher values keep the policy closer to the "
        "reference model. tau of 'ipo'.",
        rule=rules.number(1e-9, most=rules.MOST_FLOAT32),
    )
    use_weighting: bool = arg(False, help="Weight pairs by their likelihood under the policy (WPO).", rule=_weighting)
    discopop_tau: float = arg(0.05, help="Temperature of 'discopop'.", rule=rules.number(1e-9, most=rules.MOST_FLOAT32))
    activation_offloading: bool = shared("activation_offloading")
    sync_ref_model: bool = shared("sync_ref_model")
    ref_model_mixup_alpha: float = shared("ref_model_mixup_alpha")
    ref_model_sync_steps: int = shared("ref_model_sync_steps")

    pad_token: str | None = shared("pad_token")
    max_prompt_length: int | None = shared("max_prompt_length")
    chat_template_path: str | None = shared("chat_template_path", kw_only=True)

    def __post_init__(self):
        if isinstance(self.loss_type, str | tuple):
            self.loss_type = losses_of(self.loss_type)
        warn_about_keep_end(self.truncation_mode, self._frames_to_caller())
        warn_about_prompt_length(self.max_prompt_length, self._frames_to_caller())
        super().__post_init__()
