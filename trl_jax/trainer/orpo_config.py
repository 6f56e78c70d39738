"""ORPOConfig, and what it shares with CPOConfig."""

from dataclasses import dataclass, field

from trl_jax.config import base
from trl_jax.config.base import BaseConfig
from trl_jax.config.tables import ORPO, REFERENCE_FREE

# ----------------------------------------------------------------------------------------------------
# The base of the configs of trainers on preference pairs without a reference.


@dataclass(repr=False)
class ReferenceFreeConfig(BaseConfig):
    """The arguments of trainers on preference pairs without a reference, in TRL's names and defaults.

    Besides the fields of TrainingArguments and of BaseConfig (batch_layout, remat_policy, mesh_shape and others):

        max_length: longest prompt and answer together, in tokens; what is beyond is cut off. None cuts nothing.
        disable_dropout: trains without dropout.
        dataset_num_proc: processes that tokenise.
        pad_to_multiple_of: row lengths in tokens are rounded up to a multiple of it. "auto" rounds up to a short
            ladder of lengths (32 tokens apart, from 256 on four an octave), so that few shapes compile; None keeps
            each batch's longest. Losses do not depend on it.
        max_prompt_length: deprecated; the number of a prompt's last tokens that stay where it is too long with an
            answer. None: all.
        chat_template_path: .jinja or .j2 file with the chat template to use, or folder or Hub name of the tokenizer
            that has it; its new tokens come, too.
    """

    argument_table = REFERENCE_FREE
    _argument_group_name = "training"

    learning_rate: float = field(default=1e-6, metadata={"help": "Peak learning rate of AdamW."})

    max_length: int | None = base.max_length_with_answer()
    disable_dropout: bool = base.disable_dropout()
    dataset_num_proc: int | None = base.dataset_num_proc()
    pad_to_multiple_of: int | str | None = base.pad_to_multiple_of()
    max_prompt_length: int | None = base.max_prompt_length()
    chat_template_path: str | None = base.chat_template_path(kw_only=True)

    def __post_init__(self):
        base.warn_of_prompt_length(self.max_prompt_length, self._frames_to_caller())
        super().__post_init__()


# ----------------------------------------------------------------------------------------------------
# ORPOConfig: the arguments of odds ratio preference optimisation.


@dataclass(repr=False)
class ORPOConfig(ReferenceFreeConfig):
    """The arguments of ORPOTrainer, in TRL's names and defaults; our own come last.

    Besides the fields of `trainer.shared.reference_free_config.ReferenceFreeConfig`, which both have:

        beta: the factor of the odds ratio beside the negative log-likelihood, lambda in the paper.
    """

    argument_table = ORPO

    beta: float = field(default=0.1, metadata={"help": "Factor of the odds ratio beside the negative log-likelihood."})
