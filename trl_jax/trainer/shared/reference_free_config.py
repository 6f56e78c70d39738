"""The base of the configs of trainers on preference pairs without a reference."""

from dataclasses import dataclass, field

from trl_jax.core.arguments.tables.reference_free import REFERENCE_FREE
from trl_jax.run.arguments import text_fields
from trl_jax.run.arguments.base_config import BaseConfig


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

    max_length: int | None = text_fields.max_length_with_answer()
    disable_dropout: bool = text_fields.disable_dropout()
    dataset_num_proc: int | None = text_fields.dataset_num_proc()
    pad_to_multiple_of: int | str | None = text_fields.pad_to_multiple_of()
    max_prompt_length: int | None = text_fields.max_prompt_length()
    chat_template_path: str | None = text_fields.chat_template_path(kw_only=True)

    def __post_init__(self):
        text_fields.warn_of_prompt_length(self.max_prompt_length, self._frames_to_caller())
        super().__post_init__()
