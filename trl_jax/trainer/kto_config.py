"""KTOConfig."""

from dataclasses import dataclass

from trl_jax.config import rules
from trl_jax.config.arguments import arg
from trl_jax.config.base import SAMPLING_STRATEGIES, BaseConfig, inherited
from trl_jax.config.shared import shared, warn_about_prompt_length
from trl_jax.core.trainers import KTO_LOSSES


@dataclass(repr=False)
class KTOConfig(BaseConfig):
    """The arguments of KTOTrainer, in TRL's names, defaults and positional order; our own come last."""

    _argument_group_name = "training"

    learning_rate: float = inherited("learning_rate", default=1e-6, help="Peak learning rate.")
    train_sampling_strategy: str = inherited(
        "train_sampling_strategy",
        default="sequential",
        help="Order of the rows; loss_type='kto' requires 'sequential'.",
        choices=SAMPLING_STRATEGIES,
    )
    label_names: list[str] | None = inherited(
        "label_names", how="warned", why="the column that says which answers are desirable is called 'label'."
    )
    label_smoothing_factor: float = inherited(
        "label_smoothing_factor", how="warned", why="preference losses have no labels of tokens to smooth."
    )

    router_aux_loss_coef: float | None = shared("router_aux_loss_coef")
    disable_dropout: bool = shared("disable_dropout")

    dataset_num_proc: int | None = shared("dataset_num_proc")
    max_length: int | None = shared("max_length")
    pad_to_multiple_of: int | str | None = shared("pad_to_multiple_of")
    precompute_ref_log_probs: bool = shared("precompute_ref_log_probs")
    precompute_ref_batch_size: int | None = shared("precompute_ref_batch_size")

    loss_type: str = arg(
        "kto",
        help="The loss. For the formulas, see trl_jax.losses.kto.",
        choices=KTO_LOSSES,
        rule=rules.one_of(*KTO_LOSSES),
    )
    beta: float = arg(
        0.1,
        help="KL penalty strength: higher values keep the policy closer to the reference model.",
        rule=rules.number(1e-9, most=rules.MOST_FLOAT32),
    )
    desirable_weight: float = arg(
        1.0, help="Weight of the losses of desirable completions.", rule=rules.number(0, most=rules.MOST_FLOAT32)
    )
    undesirable_weight: float = arg(
        1.0, help="Weight of the losses of undesirable completions.", rule=rules.number(0, most=rules.MOST_FLOAT32)
    )
    activation_offloading: bool = shared("activation_offloading")
    sync_ref_model: bool = shared("sync_ref_model")
    ref_model_mixup_alpha: float = shared("ref_model_mixup_alpha")
    ref_model_sync_steps: int = shared("ref_model_sync_steps")

    max_prompt_length: int | None = shared("max_prompt_length")
    chat_template_path: str | None = shared("chat_template_path", kw_only=True)

    def __post_init__(self):
        warn_about_prompt_length(self.max_prompt_length, self._frames_to_caller())
        super().__post_init__()
