"""ReferenceConfig."""

from dataclasses import dataclass

from trl_jax.config.base import BaseConfig
from trl_jax.config.shared import shared


@dataclass(repr=False)
class ReferenceConfig(BaseConfig):
    """The arguments of every trainer with a reference model. Derive the config of your own trainer from it."""

    router_aux_loss_coef: float | None = shared("router_aux_loss_coef")
    disable_dropout: bool = shared("disable_dropout")
    dataset_num_proc: int | None = shared("dataset_num_proc")
    max_length: int | None = shared("max_length")
    truncation_mode: str = shared("truncation_mode")
    pad_to_multiple_of: int | str | None = shared("pad_to_multiple_of")
    precompute_ref_log_probs: bool = shared("precompute_ref_log_probs")
    precompute_ref_batch_size: int | None = shared("precompute_ref_batch_size")
    activation_offloading: bool = shared("activation_offloading")
    sync_ref_model: bool = shared("sync_ref_model")
    ref_model_mixup_alpha: float = shared("ref_model_mixup_alpha")
    ref_model_sync_steps: int = shared("ref_model_sync_steps")
    max_prompt_length: int | None = shared("max_prompt_length")
    chat_template_path: str | None = shared("chat_template_path", kw_only=True)
