"""RewardConfig: transformers' TrainingArguments with TRL's defaults and the arguments of reward training."""

import warnings
from dataclasses import dataclass, field, fields
from typing import Any

from transformers import TrainingArguments

from trl_jax.core.argument_rules import as_pad_multiple
from trl_jax.trainer.base_config import BaseConfig


@dataclass(repr=False)
class RewardConfig(BaseConfig):
    """Everything RewardTrainer is told by its user, in TRL's names, defaults and positional order; our own come last.

    Beside TrainingArguments' own fields:

        model_init_kwargs: how to load a model given by name (dict, or JSON in a string).
        trust_remote_code: lets a tokenizer's repository run its own code; a model's own code is never run.
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
        batch_layout: how the pairs of a step lie in memory; the numbers do not depend on it. "padded" gives each text a
            row as long as the longest, "packed" lays texts end to end, "shared" does so with what both answers of a
            pair begin with only once. "auto" takes the quickest that is exact for the model.
        remat_policy: what `gradient_checkpointing` keeps of the forward pass, by the name of one of
            jax.checkpoint_policies; the numbers do not depend on it. "nothing_saveable" computes whole layers twice,
            "dots_with_no_batch_dims_saveable" keeps their matrix products, as gradient_checkpointing=False does; "auto"
            keeps those where the compiled step then fits into the device's memory (on a CPU: into half of the host's).
            With a `compute_loss` of a script's own, "auto" keeps nothing. Not in TRL.
        activation_offloading: what "nothing_saveable" keeps all the same, the input of each layer, waits in the host's
            memory; it takes the place of remat_policy.
        pad_token: deprecated; set it on the tokenizer.
        eval_report: adds to each evaluation `eval_ece` (how far the model's certainty is from its accuracy), with a
            column of subsets `eval_accuracy_<subset>` and their mean `eval_accuracy_of_subsets`, and the picture
            `eval_margins.svg` in output_dir. Not in TRL.
        eval_subset_column: names the subset of a pair. Not in TRL.
        mesh_shape: how several devices are used, as "data:2,fsdp:4,tensor:2"; -1 is what is left. It beats `fsdp`,
            `deepspeed` and `parallelism_config`. None and none of those: pairs are divided over all devices.
            `per_device_train_batch_size` counts for each of data x fsdp. Not in TRL.
        coordinator_address, num_processes, process_id: of a run with a process on each of several hosts; what is None
            is taken from JAX_COORDINATOR_ADDRESS and so on, from SLURM, Open MPI or Cloud TPU. Not in TRL.
    """

    _argument_group_name = "training"
    _VALID_DICT_FIELDS = BaseConfig._VALID_DICT_FIELDS + ["model_init_kwargs"]

    learning_rate: float = field(default=1e-4, metadata={"help": "Peak learning rate of AdamW."})

    model_init_kwargs: dict[str, Any] | str | None = field(
        default=None,
        metadata={"help": "How to load a model given by name, as a dict or JSON: revision, dtype, ..."},
    )
    trust_remote_code: bool = field(
        default=False,
        metadata={"help": "Let a tokenizer's repository run its own code. A model's code is never run."},
    )
    chat_template_path: str | None = field(
        default=None, metadata={"help": "File with the chat template to use, or a tokenizer that has it."}
    )
    disable_dropout: bool = field(default=True, metadata={"help": "Train without dropout."})

    dataset_num_proc: int | None = field(
        default=None, metadata={"help": "Processes that tokenise the dataset."}
    )
    eos_token: str | None = field(
        default=None, metadata={"help": "Token that ends a text. Unset, the tokenizer's own."}
    )
    max_length: int | None = field(
        default=1024,
        metadata={"help": "Longest text in tokens; a pair with a longer one is left out. None keeps all."},
    )
    pad_to_multiple_of: int | str | None = field(
        default="auto",
        metadata={
            "help": "Round row lengths up to a multiple of it. 'auto' rounds up to a short ladder of lengths (32 "
            "tokens apart, from 256 on four an octave), so that few shapes compile; None rounds nothing. Losses and "
            "scores do not depend on it."
        },
    )

    center_rewards_coefficient: float | None = field(
        default=None,
        metadata={"help": "Weight of the term that draws scores to a mean of zero; 0.01 is usual."},
    )
    activation_offloading: bool = field(
        default=False,
        metadata={"help": "Keep what gradient checkpointing keeps, each layer's input, in the host's memory."},
    )

    pad_token: str | None = field(
        default=None, metadata={"help": "Deprecated: set it on the tokenizer instead."}
    )
    # Ours: behind all of TRL's, and never by position.
    eval_report: bool = field(
        default=False,
        kw_only=True,
        metadata={
            "help": "Beside TRL's metrics, evaluate the accuracy of each subset and the calibration error, and draw "
            "the margins into output_dir."
        },
    )
    eval_subset_column: str = field(
        default="subset", kw_only=True, metadata={"help": "Column that names a pair's subset, for eval_report."}
    )

    batch_layout: str = field(
        default="auto",
        kw_only=True,
        metadata={
            "help": "How the pairs of a step lie in memory: 'padded' rows; 'packed' end to end; 'shared', packed with "
            "what both answers begin with only once; 'auto', the quickest that is exact. The numbers are the same."
        },
    )

    remat_policy: str = field(
        default="auto",
        kw_only=True,
        metadata={
            "help": "What gradient_checkpointing=True keeps of the forward pass, by JAX's names: 'nothing_saveable'; "
            "'dots_with_no_batch_dims_saveable', the matrix products; 'auto', the products where they fit into "
            "memory. The numbers are the same."
        },
    )

    mesh_shape: str | None = field(
        default=None,
        kw_only=True,
        metadata={
            "help": "How several devices are used, as 'data:2,fsdp:4,tensor:2'; unset, pairs are divided over all."
        },
    )

    coordinator_address: str | None = field(
        default=None,
        kw_only=True,
        metadata={"help": "'host:port' of the first of several processes, where no scheduler tells it."},
    )
    num_processes: int | None = field(
        default=None, kw_only=True, metadata={"help": "How many processes the run has, with coordinator_address."}
    )
    process_id: int | None = field(
        default=None, kw_only=True, metadata={"help": "Which of them this is, from 0, with coordinator_address."}
    )

    @property
    def remats(self) -> list[bool | str]:
        """Whether layers are computed twice in the step, as `models.stack` takes it: of several the first that fits."""
        if self.activation_offloading:
            return ["offloaded"]
        if not self.gradient_checkpointing or self.remat_policy == "dots_with_no_batch_dims_saveable":
            return [False]
        return [True] if self.remat_policy == "nothing_saveable" else [False, True]

    def __post_init__(self):
        super().__post_init__()
        self.pad_to_multiple_of = as_pad_multiple("pad_to_multiple_of", self.pad_to_multiple_of)
        if self.pad_token is not None:
            warnings.warn(
                f"pad_token={self.pad_token!r} is deprecated: set tokenizer.pad_token and pass the tokenizer"
                " to the trainer as processing_class.",
                FutureWarning,
                stacklevel=self._frames_to_caller(),
            )


def as_reward_config(args: TrainingArguments) -> RewardConfig:
    """A RewardConfig as it is; plain TrainingArguments, which scripts for early releases of TRL pass, as one.

    Raises:
        TypeError: it is neither.
    """
    if isinstance(args, RewardConfig):
        return args
    if not isinstance(args, TrainingArguments):
        raise TypeError(f"args is a {type(args).__module__}.{type(args).__qualname__}: wanted a RewardConfig.")
    warnings.warn(
        "args is a TrainingArguments: its values were taken over, with RewardConfig's defaults for the rest. Pass a "
        "RewardConfig.",
        FutureWarning,
        stacklevel=4,
    )
    known = {f.name for f in fields(RewardConfig) if f.init}
    return RewardConfig(**{f.name: getattr(args, f.name) for f in fields(args) if f.name in known and f.init})
