"""A minimal task for tests: a per-token loss over branches (completions) of shared prompts, against a reference.

Also a trainer for it, rows, and the same loss in plain jnp from float64 logits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from datasets import Dataset

from trl_jax.config.base import BaseConfig
from trl_jax.data.batch import IGNORED, Columns, Context, Example, Extras
from trl_jax.hub.auto import AutoModelForCausalLM
from trl_jax.losses.supervised import at_reads, of_texts, real_examples, summed
from trl_jax.tasks.task import TokenTask, joined
from trl_jax.trainer.base_trainer import BaseTrainer
from trl_jax.training.reference import given

TEMPERATURE, KL, ENTROPY = 0.7, 0.1, 0.05
MODEL = {"head": "causal", "num_hidden_layers": 2}
BRANCHES = 3
MOST = 12  # maximum number of tokens of a branch


@dataclass(frozen=True)
class BranchesTask(TokenTask):
    """The clipped ratio to `old_logps` times the advantage, minus an entropy bonus, plus the KL divergence from the
    reference; an example has one text and its own weight."""

    head: ClassVar[Literal["lm"]] = "lm"
    axis: ClassVar[Literal["read"]] = "read"
    compared: ClassVar[tuple[str, ...]] = ("logps",)
    temperature: ClassVar[float] = TEMPERATURE
    per_token: ClassVar[bool] = False
    whole_micro_batches: ClassVar[bool] = True
    num_tokens_after: ClassVar[str] = "kl"
    columns: ClassVar[Columns] = Columns(
        ("input_ids",), ("weight", "advantage", "old_logps", "group", "prompt"), ("labels",)
    )

    def prepare(self, dataset: Dataset, tokenizer: Any, **limits: Any) -> Dataset:
        return dataset

    def example(self, row: dict[str, Any]) -> Example:
        extras = Extras({}, {"advantage": (row["advantage"],)}, {"old_logps": (row["old_logps"],)})
        context = Context(row["group"], row["prompt"])
        return Example((row["input_ids"],), extras, (row["labels"],), weight=row["weight"], context=context)

    def token_stats(self, outputs, batch) -> dict[str, jax.Array]:
        return {"logps": outputs.logps, "entropy": outputs.entropy}

    def loss(self, outputs: dict[str, jax.Array], batch) -> tuple[jax.Array, dict[str, jax.Array]]:
        advantages, weights = (at_reads(x, batch.text) for x in (batch.extras.text["advantage"], batch.weight))
        found = (outputs[name] for name in ("logps", "entropy", "ref_logps"))
        losses, kl = of_tokens(*found, batch.extras.read["old_logps"], advantages)
        real = real_examples(batch.weight, batch.micro_batch)
        of_examples = (of_texts(x, batch.text, len(batch.weight)) for x in (kl, jnp.ones(len(kl))))
        sums = {name: summed(x, real) for name, x in zip(("kl", "tokens"), of_examples, strict=True)}
        return jnp.sum(weights * losses), sums

    def metrics(self, sums: list[dict[str, np.ndarray]], split: str) -> dict[str, float]:
        found = joined(sums, {"kl": np.sum, "tokens": np.sum}, count="tokens")
        return {"kl": float(found["kl"].sum() / found["tokens"].sum())}

    def inputs(self, batch: dict[str, Any]) -> dict[str, Any]:
        return batch


def of_tokens(logps, entropy, ref_logps, old_logps, advantages):
    """The loss of each token, and its KL divergence."""
    ratio, apart = jnp.exp(logps - old_logps), ref_logps - logps
    kl = jnp.exp(apart) - apart - 1
    clipped = jnp.minimum(ratio * advantages, jnp.clip(ratio, 0.8, 1.2) * advantages)
    return KL * kl - clipped - ENTROPY * entropy, kl


@dataclass
class BranchesConfig(BaseConfig):
    max_length: int | None = field(default=None)
    disable_dropout: bool = field(default=True)
    reference: str = field(default="", metadata={"help": "The checkpoint of the reference model."})


class BranchesTrainer(BaseTrainer):
    _name, _tag_names = "Branches", ["branches"]
    config_class = BranchesConfig

    def make_task(self) -> BranchesTask:
        return BranchesTask()

    def _make_reference(self, args, task, policy):
        return given(AutoModelForCausalLM.from_pretrained(args.reference), policy.vocab_size, as_bits=False)


def trainer(policy, reference, folder, train: list[dict], kind=BranchesTrainer, **config) -> BranchesTrainer:
    """A trainer from two checkpoints; it evaluates on the training rows."""

    args = BranchesConfig(
        str(folder), use_cpu=True, bf16=False, report_to="none", save_strategy="no", disable_tqdm=True,
        logging_steps=1, optim="sgd", learning_rate=1e-3, max_steps=1, train_sampling_strategy="sequential",
        reference=str(reference), **config,
    )  # fmt: skip
    data = Dataset.from_list(train)
    return kind(str(policy), args, train_dataset=data, eval_dataset=data)


def rows(prompts: tuple[int, ...] = (9, 1, 14, 30)) -> list[dict]:
    """Three branches per prompt, of 1 to 12 tokens, for prompts of these lengths. The positions read for a branch
    include the last token of its prompt."""
    dice = np.random.default_rng(0)
    made = []
    for group, length in enumerate(prompts):
        prompt = dice.integers(5, 300, length).tolist()
        for branch in range(BRANCHES):
            own = dice.integers(5, 300, 1 + int(dice.integers(0, 12)) * (branch != 1)).tolist()
            made.append({
                "input_ids": prompt + own, "labels": [IGNORED] * length + own, "group": group, "prompt": length,
                "advantage": float(dice.normal()), "old_logps": dice.normal(-6, 0.3, len(own)).tolist(),
                "weight": 1 / (len(prompts) * BRANCHES * len(own)),
            })  # fmt: skip
    return made


def exact(policy, reference, rows: list[dict], weights: list[float]) -> tuple[float, float, dict[str, np.ndarray]]:
    """(loss, KL divergence per token, gradients by transformers' names), computed in float64 one row at a time: the
    model in torch, the loss in plain jnp."""
    import torch
    from transformers import AutoModelForCausalLM as Torch

    models = [Torch.from_pretrained(folder, dtype=torch.float64).eval() for folder in (policy, reference)]
    total = kl = tokens = 0.0
    for row, weight in zip(rows, weights, strict=True):
        ids = torch.tensor([row["input_ids"]])
        start = row["prompt"] - 1
        logits, compared = (model(ids).logits[0, start:-1] for model in models)
        with jax.enable_x64(True):
            arrays = (_filled(x.detach().numpy()) for x in (logits, compared))
            targets, old = (_filled(x) for x in (row["input_ids"][start + 1 :], row["old_logps"]))
            real = jnp.arange(MOST) < len(logits)
            (value, apart), gradient = _of_row(*arrays, targets, old, real, row["advantage"])
            assert gradient.dtype == jnp.float64
            total, kl, tokens = total + weight * float(value), kl + float(apart), tokens + len(logits)
            logits.backward(weight * torch.tensor(np.asarray(gradient)[: len(logits)]))
    return total, kl / tokens, {name: p.grad.numpy() for name, p in models[0].named_parameters()}


def _filled(values: Any) -> jax.Array:
    """Pads the rows to `MOST`, so that all texts use the same program."""
    values = np.asarray(values)
    return jnp.asarray(np.pad(values, [(0, MOST - len(values)), *[(0, 0)] * (values.ndim - 1)], mode="edge"))


@jax.jit
@partial(jax.value_and_grad, has_aux=True)
def _of_row(logits, compared, targets, old, real, advantage):
    log_p, ref = (jax.nn.log_softmax(x / TEMPERATURE) for x in (logits, compared))
    at, entropy = jnp.arange(MOST), -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)
    losses, kl = of_tokens(log_p[at, targets], entropy, ref[at, targets], old, advantage)
    return jnp.sum(losses * real), jnp.sum(kl * real)
