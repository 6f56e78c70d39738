"""RewardConfig."""

from dataclasses import dataclass, field

from trl_jax.config import base
from trl_jax.config.base import BaseConfig
from trl_jax.config.tables import REWARD


@dataclass(repr=False)
class RewardConfig(BaseConfig):
    """The arguments of RewardTrainer, in TRL's names, defaults and positional order; our own come last.

    Besides the fields of TrainingArguments and of BaseConfig (batch_layout, remat_policy, mesh_shape and others):

        chat_template_path: .jinja or .j2 file with the chat template to use, or folder or Hub name of the tokenizer
            to take it from.
        disable_dropout: train without dropout.
        dataset_num_proc: processes that tokenise.
        eos_token: token that ends a text; None means the tokenizer's own.
        max_length: longest text in tokens; a pair with a longer one is left out. None keeps all.
        pad_to_multiple_of: row lengths in tokens are rounded up to a multiple of it. "auto" rounds up to a short
            ladder of lengths (32 tokens apart, from 256 on four an octave), so that few shapes compile; None keeps
            each batch's longest. Losses and scores do not depend on it.
        center_rewards_coefficient: weight of the mean squared sum of a pair's two scores
            (Eisenstein et al. 2023, https://huggingface.co/papers/2312.09244, equation 2); 0.01 is usual.
        activation_offloading: the inputs of layers, which "nothing_saveable" keeps all the same, wait in the host's
            memory; it takes the place of remat_policy.
        pad_token: deprecated; set it on the tokenizer.
        eval_report: adds to each evaluation `eval_ece` (how far the model's certainty is from its accuracy), with a
            column of subsets `eval_accuracy_<subset>` and their mean `eval_accuracy_of_subsets`, and the picture
            `eval_margins.svg` in output_dir. Not in TRL.
        eval_subset_column: names the subset of a pair. Not in TRL.
    """

    argument_table = REWARD
    _argument_group_name = "training"

    learning_rate: float = field(default=1e-4, metadata={"help": "Peak learning rate of AdamW."})

    chat_template_path: str | None = base.chat_template_path()
    disable_dropout: bool = base.disable_dropout()

    dataset_num_proc: int | None = base.dataset_num_proc()
    eos_token: str | None = base.eos_token()
    max_length: int | None = field(
        default=1024,
        metadata={"help": "Longest text in tokens; a pair with a longer one is left out. None keeps all."},
    )
    pad_to_multiple_of: int | str | None = base.pad_to_multiple_of("Losses and scores")

    center_rewards_coefficient: float | None = field(
        default=None,
        metadata={"help": "Weight of the term that draws scores to a mean of zero; 0.01 is usual."},
    )
    activation_offloading: bool = base.activation_offloading()

    pad_token: str | None = base.pad_token()
    # Not in TRL, and never by position.
    eval_report: bool = field(
        default=False,
        kw_only=True,
        metadata={
            "help": "Besides TRL's metrics, evaluate the accuracy of each subset and the calibration error, and draw "
            "the margins into output_dir."
        },
    )
    eval_subset_column: str = field(
        default="subset", kw_only=True, metadata={"help": "Column that names a pair's subset, for eval_report."}
    )
