"""SFTConfig."""

import warnings
from dataclasses import dataclass, field
from typing import Any

from trl_jax.config import base
from trl_jax.config.base import BaseConfig
from trl_jax.config.rules import as_dict
from trl_jax.config.tables import SFT


@dataclass(repr=False)
class SFTConfig(BaseConfig):
    """The arguments of SFTTrainer, in TRL's names, defaults and positional order; our own come last.

    Besides the fields of TrainingArguments and of BaseConfig (batch_layout, remat_policy, mesh_shape and others):

        router_aux_loss_coef: weight of the load-balancing loss of mixtures of experts; None takes the model's own, 0.0
            leaves it out.
        chat_template_path: .jinja or .j2 file with the chat template to use, or folder or Hub name of the tokenizer
            to take it from.
        dataset_text_field: the column of plain texts.
        dataset_kwargs: {"skip_prepare_dataset": True} for rows that are tokenised and truncated already.
        dataset_num_proc: processes that tokenise.
        eos_token: token that ends a text; None means the tokenizer's own.
        max_length: longest text in tokens; what is beyond is cut off. With packing, the length of a packed row. None
            cuts nothing.
        truncation_mode: "keep_start" cuts the end off, "keep_end" (deprecated) the beginning.
        shuffle_dataset: shuffles rows by `seed` once they are prepared, and before they are packed.
        packing: joins texts to rows of max_length tokens.
        packing_strategy: "bfd" fills each row with texts that fit, longest first, and cuts longer ones off; "bfd_split"
            cuts longer ones to pieces; "wrapped" lays texts end to end and cuts every max_length tokens.
        padding_free: texts of a batch end to end and not as padded rows, `batch_layout="packed"`.
        pad_to_multiple_of: row lengths in tokens are rounded up to a multiple of it. "auto" rounds up to a short
            ladder of lengths (32 tokens apart, from 256 on four an octave), so that few shapes compile; None keeps
            each batch's longest. Losses do not depend on it.
        eval_packing: packing of evaluation sets; None as `packing`.
        completion_only_loss: learn completions and not prompts; None does so where the rows have both.
        assistant_only_loss: learn what the assistant says in messages.
        loss_type: "nll", the negative log-likelihood; or "dft", dynamic fine-tuning
            (https://huggingface.co/papers/2508.05629, equation 9).
        activation_offloading: the inputs of layers, which "nothing_saveable" keeps all the same, wait in the host's
            memory; it takes the place of remat_policy.
        pad_token: deprecated; set it on the tokenizer.
    """

    argument_table = SFT
    _argument_group_name = "training"
    _VALID_DICT_FIELDS = BaseConfig._VALID_DICT_FIELDS + ["dataset_kwargs"]

    learning_rate: float = field(default=2e-5, metadata={"help": "Peak learning rate of AdamW."})

    router_aux_loss_coef: float | None = base.router_aux_loss_coef()
    chat_template_path: str | None = base.chat_template_path()

    dataset_text_field: str = field(default="text", metadata={"help": "Column of plain texts."})
    dataset_kwargs: dict[str, Any] | str | None = field(
        default=None,
        metadata={"help": "'{\"skip_prepare_dataset\": true}' for rows that are tokenised and truncated already."},
    )
    dataset_num_proc: int | None = base.dataset_num_proc()
    eos_token: str | None = base.eos_token()
    max_length: int | None = field(
        default=1024,
        metadata={"help": "Longest text in tokens, the rest is cut off; length of packed rows. None cuts nothing."},
    )
    truncation_mode: str = base.truncation_mode()
    shuffle_dataset: bool = field(default=False, metadata={"help": "Shuffle the prepared rows once, by seed."})
    packing: bool = field(default=False, metadata={"help": "Join texts to rows of max_length tokens."})
    packing_strategy: str = field(
        default="bfd",
        metadata={
            "help": "How rows are filled: 'bfd' with whole texts, longest first, cut to max_length; 'bfd_split' cuts "
            "longer ones to pieces; 'wrapped' lays all end to end and cuts anywhere.",
            "choices": ["bfd", "bfd_split", "wrapped"],
        },
    )
    padding_free: bool = field(
        default=False, metadata={"help": "Texts of a batch end to end, not as padded rows; batch_layout='packed'."}
    )
    pad_to_multiple_of: int | str | None = base.pad_to_multiple_of()
    eval_packing: bool | None = field(default=None, metadata={"help": "Packing of evaluation sets. Unset, as packing."})

    completion_only_loss: bool | None = field(
        default=None,
        metadata={"help": "Learn completions and not prompts. Unset, where rows have both."},
    )
    assistant_only_loss: bool = field(
        default=False, metadata={"help": "Learn only what the assistant says in messages."}
    )
    loss_type: str = field(
        default="nll",
        metadata={
            "help": "'nll', the negative log-likelihood, or 'dft', dynamic fine-tuning "
            "(https://huggingface.co/papers/2508.05629).",
            "choices": ["nll", "dft", "chunked_nll"],
        },
    )
    activation_offloading: bool = base.activation_offloading()

    pad_token: str | None = base.pad_token()

    def __post_init__(self):
        caller = self._frames_to_caller()
        for name, (old, new) in _OLDER_VALUES.items():
            if vars(self)[name] == old:
                text = f"{name}={old!r} is deprecated: use {name}={new!r}, which is the same."
                warnings.warn(text, FutureWarning, stacklevel=caller)
                setattr(self, name, new)
        base.warn_of_keep_end(self.truncation_mode, caller)
        super().__post_init__()
        if self.padding_free and self.batch_layout == "auto":
            self.batch_layout = "packed"

    @property
    def remats(self) -> list[bool | str]:
        """As of BaseConfig; `selective` among the arguments of checkpointing keeps the products of matrices."""
        kwargs = as_dict("activation_checkpointing_kwargs", self.activation_checkpointing_kwargs)
        return [False] if kwargs.get("selective") and not self.activation_offloading else super().remats


_OLDER_VALUES = {"loss_type": ("chunked_nll", "nll"), "packing_strategy": ("bfd-requeue", "bfd_split")}
