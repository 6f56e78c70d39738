"""Base classes of language model objectives on a dataset: `PairTask` and `TextTask`. Derive your own from them."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from datasets import Dataset, IterableDataset

from trl_jax.core.outputs import TokenOutputs
from trl_jax.data import preference, sft
from trl_jax.data.batch import Batch, Columns, LossBatch
from trl_jax.losses.supervised import of_texts
from trl_jax.tasks.task import Sums, TokenTask, aux_loss, joined, weighted_loss

REFERENCE_COLUMNS = ("ref_chosen_logps", "ref_rejected_logps")
TEXT_SUMS = ("targets", "entropy", "correct")


class Answers(NamedTuple):
    """The chosen or the rejected completions of E pairs, float32 `[E]` each.

    logps: log-probability of each completion under the policy, summed over its tokens.
    tokens: number of tokens in that sum; 0 for padding examples.
    ref_logps: the same log-probability under the reference; None if the task trains without a reference.
    """

    logps: jax.Array
    tokens: jax.Array
    ref_logps: jax.Array | None

    @property
    def log_ratio(self) -> jax.Array:
        """log(policy / reference) of each completion.

        Raises:
            ValueError: the task trains without a reference.
        """
        if self.ref_logps is None:
            raise ValueError(
                "log_ratio needs a reference, and this task compares nothing with one (compared = ()). Set "
                'compared = ("logps",), or use logps.'
            )
        return self.logps - self.ref_logps


@dataclass(frozen=True)
class PairTask(TokenTask):
    """An objective on pairs of a chosen and a rejected completion of a prompt. A subclass implements `loss`, from
    `answers` to `weighted_loss`.

    The policy is compared with a reference model; set `compared = ()` to train without one.

    max_length: prompt and completion are truncated to this many tokens; None: no truncation.
    truncation_mode: "keep_start" or "keep_end".
    max_prompt_length: number of last tokens to keep of a prompt; None: all.
    """

    max_length: int | None = None
    truncation_mode: str = "keep_start"
    max_prompt_length: int | None = None

    compared: ClassVar[tuple[str, ...]] = ("logps",)

    @property
    def columns(self) -> Columns:
        numbers = REFERENCE_COLUMNS if self.compared else ()
        return Columns(preference.TEXTS, numbers=numbers, labels=preference.LABELS, optional=numbers)

    def prepare(
        self,
        dataset: Dataset | IterableDataset,
        tokenizer: Any,
        *,
        max_length: int | None,
        num_proc: int | None,
        name: str,
    ) -> Dataset | IterableDataset:
        """Add TRL's `prompt_ids`, `chosen_ids` and `rejected_ids`, and the texts and labels of `columns`."""
        del max_length  # rows to predict are truncated like the others
        limits = {"max_length": self.max_length, "keep_end": self.truncation_mode == "keep_end"}
        limits |= {"max_prompt_length": self.max_prompt_length}
        return preference.prepare_dpo(dataset, tokenizer, num_proc=num_proc, name=name, **limits)

    def token_stats(self, outputs: TokenOutputs, batch: Batch) -> dict[str, jax.Array]:
        """`logps` and `tokens` of each completion, `[2E]`: the chosen completions, then the rejected ones."""
        values = {"logps": outputs.logps, "tokens": jnp.ones(len(batch.text))}
        return {name: of_texts(value, batch.text, 2 * len(batch.weight)) for name, value in values.items()}

    def answers(self, outputs: dict[str, jax.Array], batch: Batch | LossBatch) -> tuple[Answers, Answers]:
        """The chosen and the rejected completions; arguments as in `loss`."""
        logps, tokens = jnp.split(outputs["logps"], 2), jnp.split(outputs["tokens"], 2)
        if not self.compared:
            ref_logps = (None, None)
        elif "ref_logps" in outputs:
            ref_logps = jnp.split(outputs["ref_logps"], 2)
        else:  # precompute_ref_log_probs
            ref_logps = tuple(batch.extras.example[name] for name in REFERENCE_COLUMNS)
        chosen, rejected = map(Answers, logps, tokens, ref_logps)
        return chosen, rejected


@dataclass(frozen=True)
class TextTask(TokenTask):
    """An objective on the tokens of single texts. A subclass implements `token_losses`.

    Rows are as in `SFTTrainer`: `text`, `messages`, `prompt` with `completion`, or `input_ids`. All targets have equal
    weight in the loss of a step.
    """

    per_token: ClassVar[bool] = True
    predicts_first: ClassVar[bool] = True
    columns: ClassVar[Columns] = Columns(("input_ids",), labels=("labels",), documents="seq_lengths")

    @abc.abstractmethod
    def token_losses(self, outputs: TokenOutputs, batch: Batch) -> jax.Array:
        """The loss of each target, `[N]`.

        Args:
            outputs: of the model, `[N]` each: `logps`, `entropy` etc.
        """

    def prepare(
        self, dataset: Dataset | IterableDataset, tokenizer: Any, *, name: str, **limits: Any
    ) -> Dataset | IterableDataset:
        """Add `input_ids` and `labels`."""
        return sft.prepare(dataset, tokenizer, name=name, **limits)

    def token_stats(self, outputs: TokenOutputs, batch: Batch) -> dict[str, jax.Array]:
        """Sums over the targets of each text, `[X]`: of their losses and entropies, and the numbers of correct
        predictions and of targets."""
        values = {
            "loss": self.token_losses(outputs, batch),
            "entropy": jax.lax.stop_gradient(outputs.entropy),
            "correct": outputs.correct,
            "targets": jnp.ones(len(batch.text)),
        }
        return {name: of_texts(value, batch.text, len(batch.weight)) for name, value in values.items()}

    def loss(self, outputs: dict[str, jax.Array], batch: Batch | LossBatch) -> tuple[jax.Array, Sums]:
        """The weighted sum of the losses of targets, and sums over the micro-batches."""
        return weighted_loss(outputs["loss"], batch, {name: outputs[name] for name in TEXT_SUMS})

    def metrics(self, sums: list[dict[str, np.ndarray]], split: str) -> dict[str, float]:
        """TRL's metrics: the mean entropy of predictions, in nats, and the fraction of correctly predicted targets.

        In training, the mean over micro-batches of their means, as in TRL, with 0 for a micro-batch without targets. In
        an evaluation, the mean over all targets of the set.
        """
        totals = joined(sums, dict.fromkeys((*TEXT_SUMS, "examples"), np.sum), count="examples")
        if not totals["examples"].size:
            return {}
        if split != "train":
            totals = {name: values.sum(keepdims=True) for name, values in totals.items()}
        targets = np.maximum(totals["targets"], 1)
        return {
            "entropy": float(np.mean(totals["entropy"] / targets)),
            "mean_token_accuracy": float(np.mean(totals["correct"] / targets)),
            **aux_loss(sums),
        }
