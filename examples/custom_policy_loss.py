"""A custom policy gradient loss for online training: SPO. `python examples/custom_policy_loss.py [folder]`

PPO and GRPO clip the ratio of the new and the old policy, so tokens beyond the bounds have no gradient. Simple Policy
Optimization (https://huggingface.co/papers/2401.16025) instead pulls the ratio back with a quadratic penalty.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

import jax
import jax.numpy as jnp
import tiny_model
from datasets import Dataset

from trl_jax import OnlineConfig, OnlineTrainer
from trl_jax.losses import kl_k3
from trl_jax.tasks import Batch, OnlineTask, weighted_loss


@dataclass(frozen=True)
class SpoTask(OnlineTask):
    """SPO: the optimal ratio is 1 + `epsilon` or 1 - `epsilon`, by the advantage."""

    epsilon: float = 0.2

    def loss(self, outputs: dict[str, jax.Array], batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
        tokens = self.tokens(outputs, batch)
        ratio = jnp.exp(tokens.logps - tokens.old_logps)
        penalty = jnp.abs(tokens.advantages) / (2 * self.epsilon) * (ratio - 1) ** 2
        losses = penalty - ratio * tokens.advantages
        mean = tokens.places.mean  # over the tokens of each completion
        numbers = {"entropy": mean(tokens.entropies), "off_policy": mean(jnp.abs(ratio - 1))}
        if self.beta:
            kl = kl_k3(tokens.logps, tokens.ref_logps)
            losses += self.beta * kl
            numbers["kl"] = mean(kl)
        return weighted_loss(mean(losses), batch, numbers)


@dataclass
class SpoConfig(OnlineConfig):
    epsilon: float = field(default=0.2, metadata={"help": "Ratios this far from 1 are pulled back."})


class SpoTrainer(OnlineTrainer):
    """Trains a language model with SPO."""

    _name, _tag_names = "SPO", ["spo"]
    config_class = SpoConfig

    def make_task(self) -> SpoTask:
        return SpoTask(**self.task_options(), epsilon=self.args.epsilon)


def share_of_e(completions: list[str], **columns: list) -> list[float]:
    """The reward: the fraction of characters that are an "e"."""
    return [text.count("e") / max(1, len(text)) for text in completions]


def main(folder: Path) -> None:
    prompts = [f"Say {word}: " for word in ("one", "two", "three", "four", "five", "six", "seven", "eight")]
    model = tiny_model.build(folder / "start", prompts, vocab_size=270)
    args = SpoConfig(
        str(folder),
        max_steps=40,
        learning_rate=1e-2,
        num_generations=8,
        num_iterations=2,
        per_device_train_batch_size=32,
        max_completion_length=8,
        logging_steps=1,
        bf16=False,
        save_strategy="no",
        report_to="none",
    )
    data = Dataset.from_dict({"prompt": prompts})
    trainer = SpoTrainer(str(model), share_of_e, args=args, train_dataset=data)
    trainer.train()
    trainer.save_model()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    print(f"Mean reward: {rewards[0]:.3f} at first, {rewards[-1]:.3f} at last.")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "out"))
