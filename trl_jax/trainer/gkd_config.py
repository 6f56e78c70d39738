"""GKDConfig."""

from dataclasses import dataclass
from typing import Any

from transformers.training_args import ParallelismConfig

from trl_jax.config import rules
from trl_jax.config.arguments import arg, redeclared
from trl_jax.config.generation import mesh_shape, online, parallelism_config
from trl_jax.trainer.sft_config import SFTConfig

_ROWS = "GKD reads conversations in the column 'messages', whose last message is the completion."
_WHOLE_ROWS = "rows of GKD are neither packed nor shuffled beforehand."
_LOSS = "GKD's loss is a divergence of distributions."


def _of_sft(name: str, why: str, how: str = "warned") -> Any:
    """An SFTConfig field that has no effect in GKD."""
    return redeclared(SFTConfig.__dataclass_fields__[name], SFTConfig.argument_table()[name], how=how, why=why)


@dataclass(repr=False)
class GKDConfig(SFTConfig):
    """The arguments of GKDTrainer, in TRL's names, defaults and positional order: those of SFTConfig come first."""

    _VALID_DICT_FIELDS = SFTConfig._VALID_DICT_FIELDS + ["teacher_model_init_kwargs"]

    parallelism_config: ParallelismConfig | None = parallelism_config("GKDTrainer")
    mesh_shape: str | None = mesh_shape("GKDTrainer")
    average_tokens_across_devices: bool = _of_sft(
        "average_tokens_across_devices", "a step is divided by its targets on all devices.", "refused"
    )
    router_aux_loss_coef: float | None = _of_sft("router_aux_loss_coef", "as in TRL, GKD does not balance experts.")
    label_smoothing_factor: float = _of_sft("label_smoothing_factor", _LOSS)
    loss_type: str = _of_sft("loss_type", _LOSS)
    dataset_text_field: str = _of_sft("dataset_text_field", _ROWS)
    dataset_kwargs: dict[str, Any] | str | None = _of_sft("dataset_kwargs", _ROWS)
    completion_only_loss: bool | None = _of_sft("completion_only_loss", _ROWS)
    assistant_only_loss: bool = _of_sft("assistant_only_loss", _ROWS)
    truncation_mode: str = _of_sft("truncation_mode", "GKD keeps the last max_length tokens of a conversation.")
    shuffle_dataset: bool = _of_sft("shuffle_dataset", _WHOLE_ROWS)
    packing: bool = _of_sft("packing", _WHOLE_ROWS, "refused")
    packing_strategy: str = _of_sft("packing_strategy", _WHOLE_ROWS)
    padding_free: bool = _of_sft("padding_free", "use batch_layout='packed', which gives the same numbers.", "refused")
    eval_packing: bool | None = _of_sft("eval_packing", _WHOLE_ROWS)

    temperature: float = online(
        "temperature", default=0.9, help="Sampling temperature. The loss compares distributions at temperature 1."
    )
    lmbda: float = arg(
        0.5,
        help="Share of micro-batches whose completions the student writes, from 0.0 (off-policy) to 1.0 (on-policy).",
        rule=rules.number(0, most=1.0),
    )
    beta: float = arg(
        0.5,
        help="Divergence between student and teacher: 0.0 is the forward KL, 1.0 the reverse KL, and "
        "values between them a generalized Jensen-Shannon divergence.",
        rule=rules.number(0, most=1.0),
    )
    max_new_tokens: int = arg(
        128, help="Maximum number of tokens of a completion that is generated.", rule=rules.whole(1)
    )
    teacher_model_name_or_path: str | None = arg(
        None,
        help="Accepted without effect: the teacher is GKDTrainer's argument teacher_model.",
        how="warned",
        why="as in TRL, GKDTrainer only reads its argument teacher_model.",
    )
    teacher_model_init_kwargs: dict[str, Any] | str | None = arg(
        None, help="Other arguments of from_pretrained for the teacher, as a dict or JSON.", rule=rules.a_dict
    )
    disable_dropout: bool = online("disable_dropout", default=True)
    seq_kd: bool = arg(
        False, help="The teacher writes the completions of the other micro-batches, instead of the dataset."
    )
