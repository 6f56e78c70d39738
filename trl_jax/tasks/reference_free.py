"""Preference tasks without a reference: ORPO and CPO."""

from __future__ import annotations

import abc
from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from datasets import Dataset, IterableDataset

from trl_jax.core.outputs import TokenOutputs
from trl_jax.data import preference
from trl_jax.data.batch import IGNORED, Batch, Columns, Example, LossBatch
from trl_jax.losses.reference_free import ContrastiveLoss, odds_ratio
from trl_jax.losses.supervised import of_texts, real_examples, summed
from trl_jax.tasks.task import Sums, TokenTask, joined

# ----------------------------------------------------------------------------------------------------
# Preference pairs without a reference: common base of ORPO and CPO


_SIDES = ("chosen", "rejected")
_SUMS = (
    *(f"{name}_{side}" for name in ("reward", "logps", "logits", "tokens") for side in _SIDES),
    "wins", "nll", "nll_tokens", "examples",
)  # fmt: skip


@dataclass(frozen=True)
class ReferenceFreeTask(TokenTask):
    """Pairs with the loss of `compared_answers` plus `nll_weight` times the mean negative log-likelihood of the chosen
    texts' targets in a micro-batch.

    max_length, max_prompt_length: truncation of a prompt with its completion, in every dataset.
    further: the additional numbers from `compared_answers` to log, in order.
    """

    max_length: int | None = None
    max_prompt_length: int | None = None

    further: ClassVar[tuple[str, ...]] = ()
    whole_micro_batches: ClassVar[bool] = True  # the negative log-likelihood is a mean over its tokens
    num_tokens_after: ClassVar[str] = "nll_loss"
    columns: ClassVar[Columns] = Columns(preference.TEXTS, labels=preference.LABELS)

    @property
    @abc.abstractmethod
    def of_mean_token(self) -> bool:
        """Whether a completion's log-probability is the mean over its tokens rather than the sum."""

    @property
    @abc.abstractmethod
    def nll_weight(self) -> float:
        """The coefficient of the negative log-likelihood."""

    @abc.abstractmethod
    def compared_answers(
        self, chosen: jax.Array, rejected: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array], Sums]:
        """The loss of each pair, the rewards of its completions, and the numbers named in `further`, all `[E]`, from
        the log-probabilities of the completions, `[E]` each."""

    def prepare(
        self,
        dataset: Dataset | IterableDataset,
        tokenizer: Any,
        *,
        max_length: int | None,
        num_proc: int | None,
        name: str,
    ) -> Dataset | IterableDataset:
        """Add the texts and labels of `columns`, and TRL's `prompt_input_ids`."""
        del max_length  # rows to predict are truncated like the others
        limits = {"max_length": self.max_length, "max_prompt_length": self.max_prompt_length}
        return preference.prepare_reference_free(dataset, tokenizer, num_proc=num_proc, name=name, **limits)

    def token_stats(self, outputs: TokenOutputs, batch: Batch) -> dict[str, jax.Array]:
        """Sums over the reads of each text, `[X]`: of its completion, and for `nll` of all its targets."""
        ones = jnp.ones(len(batch.text))
        in_answer = batch.extras.read.get("in_answer", ones)
        values = {
            "logps": outputs.logps * in_answer,
            "tokens": in_answer,
            "logits": jax.lax.stop_gradient(outputs.mean_logits) * in_answer,
            "nll": -outputs.logps,
            "nll_tokens": ones,
        }
        return {name: of_texts(value, batch.text, 2 * len(batch.weight)) for name, value in values.items()}

    def loss(self, outputs: dict[str, jax.Array], batch: Batch | LossBatch) -> tuple[jax.Array, Sums]:
        """The weighted sum of the losses of pairs, and sums over the micro-batches."""
        halves = {name: jnp.split(values, 2) for name, values in outputs.items()}
        is_real, real = batch.weight > 0, real_examples(batch.weight, batch.micro_batch)
        logps = []
        for sums, tokens in zip(halves["logps"], halves["tokens"], strict=True):
            means = sums / jnp.maximum(tokens, 1) if self.of_mean_token else sums
            logps.append(jnp.where(is_real, means, -1.0))  # padding: any value with finite log-odds
        losses, rewards, further = self.compared_answers(*logps)
        nll, nll_tokens = halves["nll"][0], halves["nll_tokens"][0]
        mean_nll = jnp.sum(jnp.where(is_real, nll, 0)) / jnp.maximum(1, jnp.sum(jnp.where(is_real, nll_tokens, 0)))
        numbers = {"wins": rewards[0] > rewards[1], "nll": nll, "nll_tokens": nll_tokens} | further
        for side, reward, logp, i in zip(_SIDES, rewards, logps, range(2), strict=True):
            numbers |= {f"reward_{side}": reward, f"logps_{side}": logp}
            numbers |= {f"logits_{side}": halves["logits"][i], f"tokens_{side}": halves["tokens"][i]}
        sums = {name: summed(values, real) for name, values in numbers.items()} | {"examples": summed(1.0, real)}
        return jnp.sum(batch.weight * (losses + self.nll_weight * mean_nll)), sums

    def metrics(self, sums: list[dict[str, np.ndarray]], split: str) -> dict[str, float]:
        """TRL's metrics: means over the micro-batches of their means; in an evaluation, means over the set.

        Logits are means over the tokens of completions, `nll_loss` over its own targets, the others over pairs.
        """
        totals = joined(sums, dict.fromkeys((*_SUMS, *self.further), np.sum), count="examples")
        if not totals["examples"].size:
            return {}
        if split != "train":
            totals = {name: values.sum(keepdims=True) for name, values in totals.items()}

        def mean(name: str, count: str = "examples") -> float:
            return float(np.mean(totals[name] / np.maximum(totals[count], 1)))

        return {
            **{f"rewards/{side}": mean(f"reward_{side}") for side in _SIDES},
            "rewards/accuracies": mean("wins"),
            "rewards/margins": mean("reward_chosen") - mean("reward_rejected"),
            **{f"logps/{side}": mean(f"logps_{side}") for side in _SIDES[::-1]},
            **{f"logits/{side}": mean(f"logits_{side}", f"tokens_{side}") for side in _SIDES[::-1]},
            "nll_loss": mean("nll", "nll_tokens") if self.nll_weight else 0.0,
            **{name: mean(name) for name in self.further},
        }


# ----------------------------------------------------------------------------------------------------
# Contrastive preference optimization: fine-tune on chosen completions, which must also beat the rejected ones


@dataclass(frozen=True)
class CpoTask(ReferenceFreeTask):
    """TRL's CPO (arXiv:2401.08417), SimPO and AlphaPO. The negative log-likelihood is of the chosen completions only.

    objective: the loss of pairs, with its options.
    nll_weight: coefficient of the negative log-likelihood (`cpo_alpha`).
    """

    objective: ContrastiveLoss = field(default_factory=ContrastiveLoss)
    nll_weight: float = 1.0

    @property
    def of_mean_token(self) -> bool:
        return self.objective.of_mean_token

    def compared_answers(
        self, chosen: jax.Array, rejected: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array], Sums]:
        """From the log-probabilities of completions; rewards are their scores times beta."""
        scores = self.objective.score(chosen), self.objective.score(rejected)
        rewards = tuple(self.objective.beta * jax.lax.stop_gradient(score) for score in scores)
        return self.objective(*scores), rewards, {}


# ----------------------------------------------------------------------------------------------------
# Odds ratio preference optimization: fine-tune on chosen texts, whose completions must also beat the rejected ones


@dataclass(frozen=True)
class OrpoTask(ReferenceFreeTask):
    """TRL's ORPO (arXiv:2403.07691). The negative log-likelihood includes prompts.

    beta: coefficient of the odds ratio loss, lambda in the paper.
    """

    beta: float = 0.1

    of_mean_token: ClassVar[bool] = True
    nll_weight: ClassVar[float] = 1.0
    further: ClassVar[tuple[str, ...]] = ("log_odds_ratio", "log_odds_chosen")

    def example(self, row: dict[str, Any]) -> Example:
        """Both texts of a row. Every token of the chosen text is a target; `in_answer` marks the completion tokens."""
        example = super().example(row)
        chosen, rejected = example.labels
        labeled = example._replace(labels=(list(example.texts[0]), rejected))
        in_answer = ([label != IGNORED for label in chosen[1:]], [1.0] * len(labeled.targets(1)[0]))
        return labeled._replace(extras=labeled.extras._replace(read={"in_answer": in_answer}))

    def compared_answers(
        self, chosen: jax.Array, rejected: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array], Sums]:
        """From the mean log-probabilities of completions; rewards are these times beta."""
        ratio, odds = odds_ratio(chosen, rejected)
        rewards = tuple(self.beta * jax.lax.stop_gradient(logps) for logps in (chosen, rejected))
        return -self.beta * ratio, rewards, {"log_odds_ratio": ratio, "log_odds_chosen": odds}
