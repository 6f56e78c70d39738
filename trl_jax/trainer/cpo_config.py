"""CPOConfig: BaseConfig with the arguments of contrastive preference optimisation."""

from dataclasses import dataclass, field

from trl_jax.core.arguments.tables.reference_free import CPO, LOSSES
from trl_jax.run.arguments import text_fields
from trl_jax.run.arguments.base_config import BaseConfig


@dataclass(repr=False)
class CPOConfig(BaseConfig):
    """The arguments of CPOTrainer, in TRL's names and defaults; our own come last.

    Besides the fields of TrainingArguments and of BaseConfig (batch_layout, remat_policy, mesh_shape and others):

        max_length: longest prompt and answer together, in tokens; what is beyond is cut off. None cuts nothing.
        beta: the factor of the difference of two answers' scores; tau of "ipo".
        label_smoothing: the probability that a preference is the wrong way round, of "sigmoid" and "simpo".
        loss_type: "sigmoid", "hinge", "ipo", "simpo", or "alphapo", which is "simpo" with cpo_alpha=0.0;
            `trl_jax.losses.reference_free` has their formulas.
        disable_dropout: trains without dropout.
        cpo_alpha: the factor of the chosen answers' negative log-likelihood.
        simpo_gamma: the margin that "simpo" asks for.
        alpha: of AlphaPO's scores; 0.0 takes log-probabilities.
        dataset_num_proc: processes that tokenise.
        pad_to_multiple_of: row lengths in tokens are rounded up to a multiple of it. "auto" rounds up to a short
            ladder of lengths (32 tokens apart, from 256 on four an octave), so that few shapes compile; None keeps
            each batch's longest. Losses do not depend on it.
        max_prompt_length: deprecated; the number of a prompt's last tokens that stay where it is too long with an
            answer. None: all.
        chat_template_path: .jinja or .j2 file with the chat template to use, or folder or Hub name of the tokenizer
            that has it; its new tokens come, too.
    """

    argument_table = CPO
    _argument_group_name = "training"

    learning_rate: float = field(default=1e-6, metadata={"help": "Peak learning rate of AdamW."})

    max_length: int | None = text_fields.max_length_with_answer()
    beta: float = field(default=0.1, metadata={"help": "Factor of the difference of two answers' scores."})
    label_smoothing: float = field(
        default=0.0,
        metadata={"help": "Probability that a preference is the wrong way round, of 'sigmoid' and 'simpo'."},
    )
    loss_type: str = field(default="sigmoid", metadata={"help": "Loss of a pair.", "choices": list(LOSSES)})
    disable_dropout: bool = text_fields.disable_dropout()
    cpo_alpha: float = field(
        default=1.0, metadata={"help": "Factor of the chosen answers' negative log-likelihood."}
    )
    simpo_gamma: float = field(default=0.5, metadata={"help": "Margin that 'simpo' asks for."})
    alpha: float = field(
        default=0.0, metadata={"help": "Alpha of AlphaPO's scores; 0 takes log-probabilities."}
    )
    dataset_num_proc: int | None = text_fields.dataset_num_proc()

    pad_to_multiple_of: int | str | None = text_fields.pad_to_multiple_of()
    max_prompt_length: int | None = text_fields.max_prompt_length()
    chat_template_path: str | None = text_fields.chat_template_path(kw_only=True)

    def __post_init__(self):
        if self.loss_type == "alphapo":
            self.loss_type, self.cpo_alpha = "simpo", 0.0
        text_fields.warn_of_prompt_length(self.max_prompt_length, self._frames_to_caller())
        super().__post_init__()
