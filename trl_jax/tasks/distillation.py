"""On-policy distillation: a student learns a teacher's distributions, on completions of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np

from trl_jax.data.batch import Batch, LossBatch
from trl_jax.losses.supervised import of_texts, real_examples, summed
from trl_jax.nn.head import Distributions, divergences
from trl_jax.tasks.policy import RolloutTask
from trl_jax.tasks.task import joined

_SUMS = ("entropy", "targets")


@dataclass(frozen=True)
class DistillationTask(RolloutTask):
    """TRL's on-policy distillation (GKD, https://huggingface.co/papers/2306.13649). The run's reference is the teacher.

    beta: of the generalized Jensen-Shannon divergence, `nn.head.divergence.divergences`.
    """

    beta: float = 1.0

    axis: ClassVar[Literal["text"]] = "text"
    compared: ClassVar[tuple[str, ...]] = ()
    per_token: ClassVar[bool] = True
    by_micro_batch: ClassVar[bool] = False
    compares_distributions: ClassVar[bool] = True

    def of_pass(self, outputs: Distributions, batch: Batch) -> dict[str, jax.Array]:
        """Sums over the tokens of each completion that are learned from, `[X]`: of divergences, of the student's
        entropies, and their number."""
        found = divergences(*outputs, beta=self.beta, temperature=self.temperature)
        values = found._asdict() | {"targets": jnp.ones(len(batch.text))}
        return {name: of_texts(value, batch.text, len(batch.weight)) for name, value in values.items()}

    def loss(self, outputs: dict[str, jax.Array], batch: Batch | LossBatch) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The weighted sum of the divergences of tokens, and sums over the micro-batches."""
        real = real_examples(batch.weight, batch.micro_batch)
        sums = {name: summed(jax.lax.stop_gradient(outputs[name]), real) for name in _SUMS}
        return jnp.sum(batch.weight * outputs["divergence"]), sums | {"examples": summed(1.0, real)}

    def metrics(self, sums: Sequence[dict[str, np.ndarray]], split: str) -> dict[str, float | None]:
        """TRL's: the mean over micro-batches of the mean entropy of the student's predictions, in nats."""
        totals = joined(sums, dict.fromkeys((*_SUMS, "examples"), np.sum), count="examples")
        if not totals["examples"].size:
            return {}
        return {"entropy": float(np.mean(totals["entropy"] / np.maximum(totals["targets"], 1)))}
