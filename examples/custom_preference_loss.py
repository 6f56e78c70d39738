"""A custom preference loss for language models: DPO-Positive. `python examples/custom_preference_loss.py [folder]`

DPO may lower the probability of a chosen answer, as long as the rejected one's falls faster. DPO-Positive (Smaug,
https://huggingface.co/papers/2402.13228) penalizes that.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

import jax
import jax.numpy as jnp
import tiny_model
from datasets import Dataset

from trl_jax import ReferenceConfig, ReferenceTrainer
from trl_jax.tasks import Batch, LossBatch, PairTask, weighted_loss


@dataclass(frozen=True)
class DpoPositiveTask(PairTask):
    """DPO with a penalty on chosen answers that the reference finds more likely."""

    beta: float = 0.1
    penalty: float = 5.0

    def loss(self, outputs: dict[str, jax.Array], batch: Batch | LossBatch) -> tuple[jax.Array, dict[str, jax.Array]]:
        chosen, rejected = self.answers(outputs, batch)
        margin = chosen.log_ratio - rejected.log_ratio
        lost = jax.nn.relu(-chosen.log_ratio)
        losses = -jax.nn.log_sigmoid(self.beta * (margin - self.penalty * lost))
        numbers = {
            "rewards/chosen": self.beta * chosen.log_ratio,
            "rewards/accuracies": jnp.where(margin > 0, 1.0, 0.0),
            "rewards/margins": self.beta * margin,
            "lost": lost,
        }
        return weighted_loss(losses, batch, numbers)


@dataclass
class DpoPositiveConfig(ReferenceConfig):
    beta: float = field(default=0.1, metadata={"help": "KL penalty strength."})
    penalty: float = field(default=5.0, metadata={"help": "Weight of what chosen answers lose."})


class DpoPositiveTrainer(ReferenceTrainer):
    """Trains a language model with DPO-Positive."""

    _name, _tag_names = "DPO-Positive", ["dpo-positive"]
    config_class = DpoPositiveConfig

    def make_task(self) -> DpoPositiveTask:
        args = self.args
        return DpoPositiveTask(max_length=args.max_length, beta=args.beta, penalty=args.penalty)


GOOD, BAD = [" gladly", " certainly", " of course", " with pleasure"], [" no", " never", " go away", " not now"]


def pairs() -> list[dict[str, str]]:
    prompts = [f"Could you {verb} it?" for verb in ("open", "close", "fix", "read")]
    return [{"prompt": prompt, "chosen": yes, "rejected": no} for prompt in prompts for yes in GOOD for no in BAD]


def main(folder: Path) -> None:
    rows = pairs()
    data = Dataset.from_list(rows).train_test_split(test_size=8, seed=0)
    model = tiny_model.build(folder / "start", ("".join(row.values()) for row in rows), vocab_size=300)
    args = DpoPositiveConfig(
        str(folder), num_train_epochs=4, learning_rate=1e-3, bf16=False, save_strategy="no", report_to="none"
    )
    trainer = DpoPositiveTrainer(str(model), args=args, train_dataset=data["train"], eval_dataset=data["test"])
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    trainer.save_model()
    after = trainer.evaluate()
    print(
        f"Loss on unseen pairs: {before:.3f}, after training {after['eval_loss']:.3f}; "
        f"{after['eval_rewards/accuracies']:.0%} are ranked right."
    )


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "out"))
