"""Direct preference optimization (DPO): train a policy to prefer chosen completions, relative to a reference."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from datasets import Dataset, IterableDataset

from trl_jax.core.outputs import TokenOutputs
from trl_jax.data.batch import IGNORED, Batch, Columns, Example, LossBatch
from trl_jax.data.image_rows import Encoder, prompt_with_answers
from trl_jax.data.prompts import check_prompts, checked_stream
from trl_jax.losses.dpo import WHOLE_BATCH, PairLogps, PreferenceLoss, length_desensitised
from trl_jax.losses.supervised import of_texts, real_examples, summed
from trl_jax.tasks.language import REFERENCE_COLUMNS, PairTask
from trl_jax.tasks.task import aux_loss, joined, mean_metrics, weighted_loss

_AT_START = ("chosen_at_start", "rejected_at_start")
_TOKEN_SUMS = ("entropy", "targets", "logits", "correct")
_PAIR_SUMS = ("reward_chosen", "reward_rejected", "wins", "logps_chosen", "logps_rejected", "examples")


@dataclass(frozen=True)
class DpoTask(PairTask):
    """TRL's direct preference optimization: an example has two texts, whose completion tokens are labeled.

    objective: the loss of pairs, with its options.
    ld_alpha: weight of the tokens beyond the length of the pair's shorter completion (LD-DPO); None: 1.
    """

    objective: PreferenceLoss = field(default_factory=PreferenceLoss)
    ld_alpha: float | None = None

    num_tokens_after: ClassVar[str] = "entropy"

    @property
    def whole_micro_batches(self) -> bool:
        """Whether the objective includes a loss that depends on several pairs together."""
        return not WHOLE_BATCH.keys().isdisjoint(self.objective.names)

    def example(self, row: dict[str, Any]) -> Example:
        """Both texts of a row, their labels, the reference's log-probabilities if they are precomputed, and whether the
        first token of a text belongs to the completion (`_AT_START`)."""
        return self._at_start(self.columns.example(row))

    def image_example(self, row: dict[str, Any], encoder: Encoder, max_length: int | None) -> Example:
        """As `example`, for a row with images, which both completions share."""
        del max_length  # a collator may have its own; the task's applies
        return self._at_start(prompt_with_answers(row, ("chosen", "rejected"), encoder, self.max_length))

    @staticmethod
    def _at_start(example: Example) -> Example:
        at_start = {
            name: sum(label != IGNORED for label in labels[:1])
            for name, labels in zip(_AT_START, example.labels, strict=True)
        }
        numbers = {**example.extras.example, **at_start}
        return example._replace(extras=example.extras._replace(example=numbers))

    def token_stats(self, outputs: TokenOutputs, batch: Batch) -> dict[str, jax.Array]:
        """Sums over the targets of each text, `[X]`. `logps` is weighted by `ld_alpha`, `logps_sum` is not."""
        texts = 2 * len(batch.weight)
        ones = jnp.ones(len(batch.text))
        targets = of_texts(ones, batch.text, texts)
        fixed = jax.lax.stop_gradient(outputs)
        values = {
            "logps_sum": outputs.logps,
            "entropy": fixed.entropy,
            "correct": fixed.correct,
            "logits": fixed.mean_logits,
            "wpo_logps": fixed.logps - fixed.log_sum_sq_probs,
        }
        sums = {name: of_texts(value, batch.text, texts) for name, value in values.items()}
        logps = sums["logps_sum"]
        if self.ld_alpha is not None:
            tail = of_texts(outputs.logps * _is_beyond_shorter(batch.text, targets), batch.text, texts)
            logps = length_desensitised(logps - tail, tail, self.ld_alpha)
        return sums | {"logps": logps, "targets": targets}

    def loss(self, outputs: dict[str, jax.Array], batch: Batch | LossBatch) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The weighted sum of the losses of pairs, and sums over the micro-batches.

        Args:
            outputs: of `token_stats`; `ref_logps` of the reference are in it or, if precomputed, in the batch.
        """
        chosen, rejected = ({name: part[i] for name, part in _halves(outputs).items()} for i in range(2))
        if "ref_logps" not in outputs:
            chosen["ref_logps"], rejected["ref_logps"] = (batch.extras.example[name] for name in REFERENCE_COLUMNS)
        for side, name in zip((chosen, rejected), _AT_START, strict=True):
            side["tokens"] = side["targets"] + batch.extras.example[name]
        pairs = _pairs(chosen, rejected)
        real, rewards = real_examples(batch.weight, batch.micro_batch), [self.objective.beta * r for r in pairs.ratios]
        sums = {
            f"{name}_{side}": summed(part[name], real)
            for name in _TOKEN_SUMS
            for side, part in (("chosen", chosen), ("rejected", rejected))
        }
        sums |= {
            "reward_chosen": summed(rewards[0], real),
            "reward_rejected": summed(rewards[1], real),
            "wins": summed(rewards[0] > rewards[1], real),
            "logps_chosen": summed(pairs.chosen, real),
            "logps_rejected": summed(pairs.rejected, real),
            "examples": summed(1.0, real),
        }
        return self.objective(pairs, batch.weight), sums

    def metrics(self, sums: list[dict[str, np.ndarray]], split: str) -> dict[str, float]:
        """TRL's metrics: means over the micro-batches of their means; in an evaluation, means over the set.

        Entropy, logits and accuracy are means over tokens, the others over pairs.
        """
        names = [f"{name}_{side}" for name in _TOKEN_SUMS for side in ("chosen", "rejected")]
        totals = joined(sums, dict.fromkeys((*names, *_PAIR_SUMS), np.sum), count="examples")
        if not totals["examples"].size:
            return {}
        if split != "train":
            totals = {name: values.sum(keepdims=True) for name, values in totals.items()}

        def mean(total: np.ndarray, count: np.ndarray) -> float:
            return float(np.mean(total / np.maximum(count, 1)))

        tokens, pairs = totals["targets_chosen"] + totals["targets_rejected"], totals["examples"]
        by_token = {f"logits/{side}": mean(totals[f"logits_{side}"], totals[f"targets_{side}"]) for side in _SIDES}
        rewards = {f"rewards/{side}": mean(totals[f"reward_{side}"], pairs) for side in _SIDES}
        margins = totals["reward_chosen"] - totals["reward_rejected"]
        return {
            **aux_loss(sums),
            "entropy": mean(totals["entropy_chosen"] + totals["entropy_rejected"], tokens),
            **by_token,
            "mean_token_accuracy": mean(totals["correct_chosen"], totals["targets_chosen"]),
            **rewards,
            "rewards/accuracies": mean(totals["wins"], pairs),
            "rewards/margins": mean(margins, pairs),
            **{f"logps/{side}": mean(totals[f"logps_{side}"], pairs) for side in _SIDES},
        }


_SIDES = ("chosen", "rejected")


def _halves(outputs: dict[str, jax.Array]) -> dict[str, list[jax.Array]]:
    """Split each output `[2E]` into those of the chosen and the rejected completions, `[E]` each."""
    return {name: jnp.split(values, 2) for name, values in outputs.items()}


def _pairs(chosen: dict[str, jax.Array], rejected: dict[str, jax.Array]) -> PairLogps:
    wpo_weights = (jnp.exp(side["wpo_logps"] / jnp.maximum(side["targets"], 1)) for side in (chosen, rejected))
    return PairLogps(
        chosen["logps"],
        rejected["logps"],
        chosen["ref_logps"],
        rejected["ref_logps"],
        chosen["tokens"],
        rejected["tokens"],
        chosen["logps_sum"],
        next(wpo_weights) * next(wpo_weights),
        chosen["targets"],
    )


def _is_beyond_shorter(text: jax.Array, targets: jax.Array) -> jax.Array:
    """Which reads `[N]` are of tokens beyond the length of the pair's shorter completion.

    Args:
        text: `[N]`, the text of each read; the reads of a text are consecutive and in order.
        targets: `[2E]`, the number of reads of each text.
    """
    number = jnp.arange(len(text))
    start = jnp.full(len(targets) + 1, len(text)).at[text].min(number)
    shorter = jnp.tile(jnp.minimum(*jnp.split(targets, 2)), 2)
    return number - start[text] >= jnp.append(shorter, 0)[text]


# Online DPO: pairs of completions that the policy samples.

_ONLINE_METRICS = (
    "objective/kl", "objective/entropy", "objective/non_score_reward", "rewards/chosen", "rewards/rejected",
    "rewards/accuracies", "rewards/margins", "logps/chosen", "logps/rejected", "val/contain_eos_token", "beta",
    "objective/rlhf_reward", "objective/scores_margin", "objective/scores",
)  # fmt: skip


@dataclass(frozen=True)
class OnlineDpoTask(PairTask):
    """TRL's online DPO (https://huggingface.co/papers/2402.04792): rows are prompts; the better of two completions of a
    prompt is the chosen one.

    Pairs are made just before a step, with the numbers `beta`, `micro_batches` (of the step), `ended` (how many of the
    two completions ended with an EOS token) and, if completions have scores, `score_chosen` and `score_rejected`.

    loss_type: "sigmoid" or "ipo".
    accumulation: micro-batches of a full step. As in TRL, the gradients of micro-batches are summed.
    scored: whether completions have scores; a judge gives none.
    """

    loss_type: str = "sigmoid"
    accumulation: int = 1
    scored: bool = True

    columns: ClassVar[Columns] = Columns((), prompts="prompt")

    def prepare(
        self, dataset: Dataset | IterableDataset, tokenizer: Any, *, name: str, **limits: Any
    ) -> Dataset | IterableDataset:
        """Return the rows unchanged; prompts are tokenized when they are completed."""
        del limits
        check_prompts(dataset, name, tokenizer)
        is_stream = isinstance(dataset, IterableDataset)
        return checked_stream(dataset, name, tokenizer, images=False) if is_stream else dataset

    def example(self, row: dict[str, Any]) -> Example:
        raise TypeError("Rows of prompts cannot be made into examples before they have completions.")

    def loss(self, outputs: dict[str, jax.Array], batch: Batch | LossBatch) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The loss of pairs, whose value is TRL's mean over `accumulation` micro-batches, and sums for TRL's
        metrics."""
        numbers = batch.extras.example
        chosen, rejected = self.answers(outputs, batch)
        beta = jnp.where(batch.weight > 0, numbers["beta"], 1.0)  # padding has no beta, but its loss must be finite
        margin, kl = chosen.log_ratio - rejected.log_ratio, (chosen.log_ratio + rejected.log_ratio) / 2
        if self.loss_type == "sigmoid":
            losses = -jax.nn.log_sigmoid(beta * margin)
        else:
            losses = jnp.square(margin - 1 / (2 * beta))
        metrics = {
            "objective/kl": kl,
            "objective/entropy": -(chosen.logps + rejected.logps) / 2,
            "objective/non_score_reward": -beta * kl,
            "rewards/chosen": beta * chosen.log_ratio,
            "rewards/rejected": beta * rejected.log_ratio,
            "rewards/accuracies": margin > 0,
            "rewards/margins": beta * margin,
            "logps/chosen": chosen.logps,
            "logps/rejected": rejected.logps,
            "val/contain_eos_token": numbers["ended"] / 2,
            "beta": numbers["beta"],
        }
        if self.scored:
            scores = (numbers["score_chosen"] + numbers["score_rejected"]) / 2
            metrics["objective/rlhf_reward"] = scores - beta * kl
            metrics["objective/scores_margin"] = numbers["score_chosen"] - numbers["score_rejected"]
            metrics["objective/scores"] = scores
        mean, sums = weighted_loss(losses, batch, metrics)
        total = jnp.max(numbers["micro_batches"]) * mean
        without_value = total - jax.lax.stop_gradient(total)
        return total / self.accumulation + (1 - 1 / self.accumulation) * without_value, sums

    def metrics(self, sums: list[dict[str, np.ndarray]], split: str) -> dict[str, float]:
        """TRL's metrics: averaged within each micro-batch, then over micro-batches."""
        means = mean_metrics(sums, split)
        return {name: means[name] for name in _ONLINE_METRICS if name in means}
