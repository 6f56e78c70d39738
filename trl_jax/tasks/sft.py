"""Supervised fine-tuning (SFT): train a language model to predict the tokens of texts, or only the labeled ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import jax
from datasets import Dataset, IterableDataset

from trl_jax.core.outputs import TokenOutputs
from trl_jax.data import checks, sft
from trl_jax.data.batch import Batch, Example
from trl_jax.data.image_rows import Encoder, SftImageRows
from trl_jax.losses.supervised import dynamic_fine_tuning, negative_log_likelihood
from trl_jax.tasks.language import TextTask


@dataclass(frozen=True)
class SftTask(TextTask):
    """TRL's supervised fine-tuning: an example is one text with labels for its tokens.

    loss_type: "nll" or "dft".
    label_smoothing_factor: of "nll".
    row_options: how rows become examples: further arguments of `data.sft.prepare`.
    eval_packing: whether evaluation sets are packed; None: like the training set.
    image_options: how rows with images become examples: `max_length`, and options that override `row_options`.
    padding_free: whether TRL would concatenate the texts of a micro-batch, as it does with packed documents.
    """

    loss_type: Literal["nll", "dft"] = "nll"
    label_smoothing_factor: float = 0.0
    row_options: Mapping[str, Any] = field(default_factory=dict)
    eval_packing: bool | None = None
    padding_free: bool = False
    image_options: Mapping[str, Any] = field(default_factory=dict)

    num_tokens_after: ClassVar[str] = "mean_token_accuracy"

    def prepare(
        self, dataset: Dataset | IterableDataset, tokenizer: Any, *, name: str, **limits: Any
    ) -> Dataset | IterableDataset:
        """Add `input_ids`, `labels` and, if texts are packed, `seq_lengths` to rows of every format that TRL supports.

        Rows to predict (name "test") are neither packed nor shuffled.
        """
        options = dict(self.row_options)
        if name == "test":
            options |= {"packing": False, "shuffle_dataset": False}
        elif name != "train" and self.eval_packing is not None:
            options["packing"] = self.eval_packing
        return sft.prepare(dataset, tokenizer, name=name, **limits, **options)

    def prepare_images(
        self, dataset: Dataset | IterableDataset, tokenizer: Any, *, name: str
    ) -> Dataset | IterableDataset:
        """Check that a dataset with images has the columns that the options need."""
        options = {**self.row_options, **self.image_options}
        if options.get("assistant_only_loss"):
            columns = dataset.column_names or next(iter(dataset.take(1)), {})
            if "messages" not in columns:
                raise ValueError(
                    "The `assistant_only_loss` argument is only supported for conversational language modeling "
                    f"datasets: {checks.argument(name)} has images and no column 'messages'."
                )
            if name == "train":
                sft.warn_of_stop_token(tokenizer, options.get("chat_template") or sft.marked_template(tokenizer))
        return dataset

    def image_example(self, row: dict[str, Any], encoder: Encoder, max_length: int | None) -> Example:
        """The text of a row with images; its tokens are labeled as in rows without images."""
        options = {"max_length": max_length, **self.row_options, **self.image_options}
        assistant_only = options.get("assistant_only_loss", False)
        chat_template = options.get("chat_template")
        if assistant_only and chat_template is None:
            chat_template = sft.marked_template(encoder.tokenizer)
        rows = SftImageRows(
            options.get("dataset_text_field", "text"),
            options.get("completion_only_loss"),
            chat_template,
            assistant_only,
            options.get("keeps_columns", False),
        )
        return rows.example(row, encoder, options["max_length"])

    def token_losses(self, outputs: TokenOutputs, batch: Batch) -> jax.Array:
        if self.loss_type == "dft":
            return dynamic_fine_tuning(outputs)
        return negative_log_likelihood(outputs, self.label_smoothing_factor)
