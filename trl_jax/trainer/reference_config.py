"""ReferenceConfig."""

from dataclasses import dataclass

from trl_jax.config import base
from trl_jax.config.base import BaseConfig
from trl_jax.config.tables import REFERENCE


@dataclass(repr=False)
class ReferenceConfig(BaseConfig):
    """The arguments of every trainer with a reference model. Derive the config of your own trainer from it.

    Besides the fields of TrainingArguments and of BaseConfig (batch_layout, remat_policy, mesh_shape and others):

        router_aux_loss_coef: weight of the load-balancing loss of mixtures of experts; None takes the model's own, 0.0
            leaves it out.
        disable_dropout: train without dropout.
        dataset_num_proc: processes that tokenize the dataset.
        max_length: longest prompt and answer together, in tokens; None cuts nothing.
        truncation_mode: "keep_start" cuts the end off, "keep_end" the beginning.
        max_prompt_length: only so many of a prompt's last tokens are kept; None keeps all.
        pad_to_multiple_of: round row lengths up to a multiple of it. "auto" rounds up to few lengths, so that few
            shapes compile. Losses do not depend on it.
        precompute_ref_log_probs: compute the reference's log-probabilities once, before training, and drop the
            reference.
        precompute_ref_batch_size: batch size of that; None takes that of training or evaluation.
        activation_offloading: keep the inputs of layers in the host's memory.
        sync_ref_model: move the reference towards the policy every `ref_model_sync_steps` steps (TR-DPO), to
            `ref_model_mixup_alpha` times the policy and the rest the reference.
        chat_template_path: .jinja or .j2 file with the chat template, or folder or Hub name of a tokenizer that has it.
    """

    argument_table = REFERENCE

    router_aux_loss_coef: float | None = base.router_aux_loss_coef()
    disable_dropout: bool = base.disable_dropout()
    dataset_num_proc: int | None = base.dataset_num_proc()
    max_length: int | None = base.max_length_with_answer()
    truncation_mode: str = base.truncation_mode()
    pad_to_multiple_of: int | str | None = base.pad_to_multiple_of()
    precompute_ref_log_probs: bool = base.precompute_ref_log_probs()
    precompute_ref_batch_size: int | None = base.precompute_ref_batch_size("Examples")
    activation_offloading: bool = base.activation_offloading()
    sync_ref_model: bool = base.sync_ref_model()
    ref_model_mixup_alpha: float = base.ref_model_mixup_alpha()
    ref_model_sync_steps: int = base.ref_model_sync_steps()
    max_prompt_length: int | None = base.max_prompt_length()
    chat_template_path: str | None = base.chat_template_path(kw_only=True)
