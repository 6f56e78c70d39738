"""DPOConfig."""

from dataclasses import dataclass, field

from trl_jax.config import base
from trl_jax.config.base import BaseConfig
from trl_jax.config.tables import DPO, losses_of


@dataclass(repr=False)
class DPOConfig(BaseConfig):
    """The arguments of DPOTrainer, in TRL's names, defaults and positional order; our own come last.

    Besides the fields of TrainingArguments and of BaseConfig (batch_layout, remat_policy, mesh_shape and others):

        router_aux_loss_coef: weight of the load-balancing loss of mixtures of experts; None takes the model's own, 0.0
            leaves it out.
        disable_dropout: trains without dropout.
        dataset_num_proc: processes that tokenise.
        max_length: longest prompt and answer together, in tokens; what is beyond is cut off. None cuts nothing.
        truncation_mode: "keep_start" cuts the end off, "keep_end" (deprecated) the beginning.
        padding_free: without effect; `batch_layout` has layouts without padding.
        pad_to_multiple_of: row lengths in tokens are rounded up to a multiple of it. "auto" rounds up to a short
            ladder of lengths (32 tokens apart, from 256 on four an octave), so that few shapes compile; None keeps
            each batch's longest. Losses do not depend on it.
        precompute_ref_log_probs: compute the reference's log-probabilities once, before training, and drop it. They
            are kept on the disk for other runs.
        precompute_ref_batch_size: pairs of a batch then; None takes those of training or evaluation. Another size gives
            the same numbers but for rounding (1e-4 of sums over an answer's tokens).
        loss_type: one or more of "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair",
            "sppo_hard", "aot", "aot_unpaired", "apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm";
            `trl_jax.losses.dpo` has their formulas.
        loss_weights: the factor of each loss; None means 1.0 for all.
        ld_alpha: what tokens beyond the length of the shorter answer count, from 0.0 to 1.0 (LD-DPO); None: as others.
        f_divergence_type: "reverse_kl", "forward_kl", "js_divergence" or "alpha_divergence" (f-DPO).
        f_alpha_divergence_coef: alpha of "alpha_divergence".
        label_smoothing: the probability that a preference is the wrong way round, of "robust", "exo_pair", "aot" and
            "aot_unpaired".
        beta: how strongly the policy is held near the reference; tau of "ipo".
        use_weighting: weights each pair by how likely the policy is to write it (WPO).
        discopop_tau: temperature of "discopop".
        activation_offloading: the inputs of layers, which "nothing_saveable" keeps all the same, wait in the host's
            memory; it takes the place of remat_policy.
        sync_ref_model: move the reference towards the policy every `ref_model_sync_steps` steps (TR-DPO,
            https://huggingface.co/papers/2404.09656, equation 3), to `ref_model_mixup_alpha` times the policy and the
            rest the reference. Checkpoints then have the reference, too.
        ref_model_mixup_alpha: the policy's share, from 0.0 to 1.0.
        ref_model_sync_steps: steps between two moves.
        pad_token: deprecated; set it on the tokenizer.
        max_prompt_length: deprecated; the number of a prompt's last tokens that stay, before prompt and answer are cut
            to `max_length`. None: all.
        chat_template_path: .jinja or .j2 file with the chat template to use, or folder or Hub name of the tokenizer
            that has it; its new tokens come, too.
    """

    argument_table = DPO
    _argument_group_name = "training"

    learning_rate: float = field(default=1e-6, metadata={"help": "Peak learning rate of AdamW."})

    router_aux_loss_coef: float | None = base.router_aux_loss_coef()
    disable_dropout: bool = base.disable_dropout()

    dataset_num_proc: int | None = base.dataset_num_proc()
    max_length: int | None = base.max_length_with_answer()
    truncation_mode: str = base.truncation_mode()
    padding_free: bool = field(
        default=False, metadata={"help": "Accepted without effect; batch_layout has layouts without padding."}
    )
    pad_to_multiple_of: int | str | None = base.pad_to_multiple_of()
    precompute_ref_log_probs: bool = base.precompute_ref_log_probs()
    precompute_ref_batch_size: int | None = base.precompute_ref_batch_size("Pairs")

    loss_type: list[str] = field(
        default_factory=lambda: ["sigmoid"],
        metadata={
            "help": "One or more losses, which are added: 'sigmoid', 'hinge', 'ipo', 'exo_pair', 'nca_pair', 'robust', "
            "'bco_pair', 'sppo_hard', 'aot', 'aot_unpaired', 'apo_zero', 'apo_down', 'discopop', 'sft', "
            "'sigmoid_norm'."
        },
    )
    loss_weights: list[float] | None = field(
        default=None, metadata={"help": "Factor of each loss, as in 0.8 0.2 1.0. Unset, 1.0."}
    )
    ld_alpha: float | None = field(
        default=None,
        metadata={
            "help": "What tokens beyond the length of the shorter answer count (LD-DPO), from 0.0 to 1.0. Unset, as "
            "the others."
        },
    )
    f_divergence_type: str = field(
        default="reverse_kl",
        metadata={
            "help": "Divergence between policy and reference: 'reverse_kl', 'forward_kl', 'js_divergence' or "
            "'alpha_divergence' (f-DPO)."
        },
    )
    f_alpha_divergence_coef: float = field(default=0.5, metadata={"help": "Alpha of 'alpha_divergence'."})
    label_smoothing: float = field(
        default=0.0,
        metadata={
            "help": "Probability that a preference is the wrong way round, of 'robust', 'exo_pair', 'aot' and "
            "'aot_unpaired'."
        },
    )
    beta: float = field(
        default=0.1, metadata={"help": "How strongly the policy is held near the reference; tau of 'ipo'."}
    )
    use_weighting: bool = field(
        default=False, metadata={"help": "Weight pairs by how likely the policy is to write them (WPO)."}
    )
    discopop_tau: float = field(default=0.05, metadata={"help": "Temperature of 'discopop'."})
    activation_offloading: bool = base.activation_offloading()
    sync_ref_model: bool = base.sync_ref_model()
    ref_model_mixup_alpha: float = base.ref_model_mixup_alpha()
    ref_model_sync_steps: int = base.ref_model_sync_steps()

    pad_token: str | None = base.pad_token()
    max_prompt_length: int | None = base.max_prompt_length()
    chat_template_path: str | None = base.chat_template_path(kw_only=True)

    def __post_init__(self):
        if isinstance(self.loss_type, str | tuple):
            self.loss_type = losses_of(self.loss_type)
        base.warn_of_keep_end(self.truncation_mode, self._frames_to_caller())
        base.warn_of_prompt_length(self.max_prompt_length, self._frames_to_caller())
        super().__post_init__()
