"""Cases of KTO that are compared with TRL: a checkpoint, rows and a config each."""

from __future__ import annotations

import random

from compat_tests.parity.cases import Case
from compat_tests.parity.dpo_cases import CHAT, SMALL
from compat_tests.tiny import preference_rows

# A learning rate so high that the policy leaves its reference and the KL divergence is not 0.
STEPS = {"max_steps": 6, "max_length": 64, "learning_rate": 1e-2, "beta": 0.3}
PROMPTS = {"n": 24, "kind": "prompt"}


def kto_rows(n: int, kind: str = "prompt", seed: int = 0, paired: bool = False, share: float = 0.7) -> list[dict]:
    """`n` rows of a prompt, an answer and a label, which is desirable for a `share` of them; or pairs."""
    rows, dice = preference_rows(n, kind, seed=seed), random.Random(seed)
    if paired:
        return rows
    kinds = [dice.random() < share for _ in rows]
    return [
        {"prompt": row["prompt"], "completion": row["chosen" if desirable else "rejected"], "label": desirable}
        for row, desirable in zip(rows, kinds, strict=True)
    ]


def case(rows=PROMPTS, model=SMALL, eval_rows=None, **config) -> Case:
    return Case(STEPS | config, rows, model, eval_rows)


CASES = {
    "shared": case(),
    "thirty_steps": case(max_steps=30, learning_rate=1e-3),
    "padded": case(batch_layout="padded"),
    "packed": case(batch_layout="packed"),
    # 4 micro-batches per epoch. The last one has a single row, so its KL completion is its own answer: steps of three
    # micro-batches, and of one.
    "accumulated": case(rows={"n": 13}, gradient_accumulation_steps=3, logging_steps=2, num_train_epochs=3),
    "apo": case(loss_type="apo_zero_unpaired", train_sampling_strategy="random", undesirable_weight=2.0),
    "weights": case(desirable_weight=0.5, undesirable_weight=1.2),
    # Micro-batches of only chosen answers, of both kinds, and of only rejected ones.
    "pairs": case(rows={"n": 6, "paired": True}, max_steps=3),
    "implicit_prompts": case(rows={"n": 8, "kind": "text", "paired": True}, max_steps=4),
    "conversations": case(rows={"n": 24, "kind": "chat_prompt"}, model=CHAT),
    "conversations_of_pairs": case(rows={"n": 8, "kind": "chat", "paired": True}, model=CHAT, max_steps=4),
    # Rows are dropped before completions are matched with other prompts for the KL term; those are truncated, too.
    "truncated": case(rows={"n": 30}, max_length=14),
    "precomputed": case(rows={"n": 14}, precompute_ref_log_probs=True, precompute_ref_batch_size=3),
    "evaluated": case(
        eval_rows={"n": 11, "seed": 9}, eval_strategy="steps", eval_steps=2, per_device_eval_batch_size=16
    ),
}
