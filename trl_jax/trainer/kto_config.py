"""KTOConfig."""

from dataclasses import dataclass, field

from trl_jax.config import base
from trl_jax.config.base import BaseConfig
from trl_jax.config.tables import KTO, KTO_LOSSES


@dataclass(repr=False)
class KTOConfig(BaseConfig):
    """The arguments of KTOTrainer, in TRL's names, defaults and positional order; our own come last.

    Besides the fields of TrainingArguments and of BaseConfig (batch_layout, remat_policy, mesh_shape and others):

        train_sampling_strategy: "sequential" unless set; loss_type="kto" takes no other.
        router_aux_loss_coef: weight of the load-balancing loss of mixtures of experts; None takes the model's own, 0.0
            leaves it out.
        disable_dropout: trains without dropout.
        dataset_num_proc: processes that tokenise.
        max_length: longest prompt and answer together, in tokens; what is beyond is cut off. None cuts nothing.
        pad_to_multiple_of: row lengths in tokens are rounded up to a multiple of it. "auto" rounds up to a short
            ladder of lengths (32 tokens apart, from 256 on four an octave), so that few shapes compile; None keeps
            each batch's longest. Losses do not depend on it.
        precompute_ref_log_probs: compute the reference's log-probabilities once, before training, and drop it. They
            are kept on the disk for other runs.
        precompute_ref_batch_size: rows of a batch then; None takes those of training or evaluation.
        loss_type: "kto" or "apo_zero_unpaired"; `trl_jax.losses.kto` has their formulas.
        beta: how strongly the policy is held near the reference.
        desirable_weight, undesirable_weight: the factor of the losses of either kind.
        activation_offloading: the inputs of layers, which "nothing_saveable" keeps all the same, wait in the host's
            memory; it takes the place of remat_policy.
        sync_ref_model: move the reference towards the policy every `ref_model_sync_steps` steps (TR-DPO,
            https://huggingface.co/papers/2404.09656, equation 3), to `ref_model_mixup_alpha` times the policy and the
            rest the reference. Checkpoints then have the reference, too.
        ref_model_mixup_alpha: the policy's share, from 0.0 to 1.0.
        ref_model_sync_steps: steps between two moves.
        max_prompt_length: deprecated; the number of a prompt's last tokens that stay where it has more than
            `max_length` with its answer. None: all.
        chat_template_path: .jinja or .j2 file with the chat template to use, or folder or Hub name of the tokenizer
            that has it; its new tokens come, too.
    """

    argument_table = KTO
    _argument_group_name = "training"

    learning_rate: float = field(default=1e-6, metadata={"help": "Peak learning rate of AdamW."})
    train_sampling_strategy: str = field(
        default="sequential",
        metadata={
            "help": "Order of rows; loss_type='kto' takes 'sequential' alone.",
            "choices": ["random", "sequential", "group_by_length"],
        },
    )

    router_aux_loss_coef: float | None = base.router_aux_loss_coef()
    disable_dropout: bool = base.disable_dropout()

    dataset_num_proc: int | None = base.dataset_num_proc()
    max_length: int | None = base.max_length_with_answer()
    pad_to_multiple_of: int | str | None = base.pad_to_multiple_of()
    precompute_ref_log_probs: bool = base.precompute_ref_log_probs()
    precompute_ref_batch_size: int | None = base.precompute_ref_batch_size("Rows")

    loss_type: str = field(default="kto", metadata={"help": "The loss.", "choices": list(KTO_LOSSES)})
    beta: float = field(default=0.1, metadata={"help": "How strongly the policy is held near the reference."})
    desirable_weight: float = field(default=1.0, metadata={"help": "Factor of the losses of desirable answers."})
    undesirable_weight: float = field(default=1.0, metadata={"help": "Factor of the losses of undesirable answers."})
    activation_offloading: bool = base.activation_offloading()
    sync_ref_model: bool = base.sync_ref_model()
    ref_model_mixup_alpha: float = base.ref_model_mixup_alpha()
    ref_model_sync_steps: int = base.ref_model_sync_steps()

    max_prompt_length: int | None = base.max_prompt_length()
    chat_template_path: str | None = base.chat_template_path(kw_only=True)

    def __post_init__(self):
        base.warn_of_prompt_length(self.max_prompt_length, self._frames_to_caller())
        super().__post_init__()
