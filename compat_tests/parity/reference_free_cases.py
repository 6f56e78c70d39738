"""Cases of ORPO and CPO that are compared with TRL: a checkpoint, rows and a config each."""

from __future__ import annotations

from compat_tests.parity.cases import Case
from compat_tests.parity.dpo_cases import CHAT, SMALL, case

BOS = SMALL | {"tokenizer": {"chat_template": True, "bos": "<s>"}}
FEW = {"max_steps": 3}
# The load-balancing loss is used only if the model's config asks for it.
EXPERTS = {"model_type": "qwen3_moe", "head": "causal", "num_hidden_layers": 1, "router_aux_loss_coef": 0.5}


def _evaluated(**config) -> Case:
    rows = {"n": 12, "kind": "prompt", "seed": 9}
    return case(eval_rows=rows, eval_strategy="steps", eval_steps=2, per_device_eval_batch_size=16, **config)


ORPO = {
    "default": case(),
    "padded": case(batch_layout="padded"),
    "packed": case(batch_layout="packed"),
    "implicit_prompts": case(rows={"n": 24}, beta=0.5),
    "conversations": case(rows={"n": 24, "kind": "chat"}, model=CHAT),
    "conversations_with_bos": case(rows={"n": 24, "kind": "chat_prompt"}, model=BOS, **FEW),
    "truncated": case(max_length=20),
    # 4 micro-batches per epoch, the last with one pair: steps of three micro-batches, and of one.
    "accumulated": case(rows={"n": 13, "kind": "prompt"}, gradient_accumulation_steps=3, logging_steps=2),
    "evaluated": _evaluated(),
    "experts": case(model=EXPERTS, **FEW),
}
CPO = {
    "default": case(),
    "packed": case(batch_layout="packed"),
    "smoothed": case(label_smoothing=0.1, cpo_alpha=0.5, **FEW),
    "hinge": case(loss_type="hinge", **FEW),
    "ipo": case(loss_type="ipo", **FEW),
    "simpo": case(loss_type="simpo", simpo_gamma=0.7, cpo_alpha=0.0, **FEW),
    "alphapo": case(loss_type="alphapo", alpha=0.25, **FEW),
    "conversations": case(rows={"n": 24, "kind": "chat"}, model=CHAT),
    "truncated": case(max_length=20, **FEW),
    "accumulated": case(rows={"n": 13, "kind": "prompt"}, gradient_accumulation_steps=3, logging_steps=2),
    "evaluated": _evaluated(loss_type="simpo"),
    "balanced_experts": case(model=EXPERTS | {"output_router_logits": True}, **FEW),
}
