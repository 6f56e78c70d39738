"""Adapter runs of TRL with PEFT and of trl_jax: the config of each case, and what a run saves."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from datasets import Dataset

from compat_tests.models import encoders
from compat_tests.parity.reference import BASE, read_weights
from compat_tests.tiny import preference_rows, tiny_model

RATE = {"learning_rate": 2e-3, "weight_decay": 0.1, "center_rewards_coefficient": 0.05, "max_steps": 30}
ALL = {"target_modules": "all-linear"}
# Model type -> LoraConfig beyond r, alpha and task type; each covers something else.
CASES = {
    "llama": {
        "target_modules": ["q_proj", "v_proj", "o_proj", "gate_proj"],
        "use_rslora": True,
        "rank_pattern": {"layers.1.self_attn.q_proj": 7, "o_proj": 2},
        "alpha_pattern": {"gate_proj": 32},
        "layers_to_transform": [1, 2],
        "modules_to_save": ["layers.1.mlp.down_proj", "norm"],
    },
    "qwen2": {"bias": "lora_only", "lora_bias": True, "init_lora_weights": False},
    "phi3": ALL | {"use_dora": True},
    "gpt2": {"target_modules": ["c_attn", "c_proj", "wte"], "init_lora_weights": "gaussian"},
    "qwen3": {"target_modules": ["q_proj", "down_proj"], "init_lora_weights": "pissa", "rank_pattern": {"q_proj": 3}},
    "bert": ALL | {"modules_to_save": ["pooler.dense"]},
    "qwen3_moe": ALL,
    "deepseek_v3": ALL,
    "gpt_oss": {
        "target_modules": ["q_proj", "o_proj"],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        "bias": "all",
    },
    "mixtral": {
        "target_modules": ["v_proj"],
        "target_parameters": ["experts.down_proj", "layers.1.mlp.experts.gate_up_proj", "o_proj.weight"],
        "rank_pattern": {"layers.2.mlp.experts.down_proj": 2},
        "init_lora_weights": "gaussian",
        "use_rslora": True,
    },
    "phimoe": {
        "target_modules": ["k_proj", "o_proj"],
        "target_parameters": ["experts.gate_up_proj", "experts.down_proj", "router.weight"],
    },
}


@dataclass(frozen=True)
class Adapted:
    logs: list[dict]
    folder: Path
    weights: dict[str, np.ndarray]
    config: dict
    trainer: object


def checkpoint(model_type: str, folder: Path) -> Path:
    if model_type == "bert":
        folder.mkdir(parents=True)
        encoders.build(folder, "bert", "plain", head="masked")
        return folder
    return tiny_model(folder, model_type, head="causal")


def train(package, lora, model, out, *, rows: int = 120, **config) -> Adapted:
    """Train once; `lora` is (the package's LoraConfig class, its arguments)."""
    kind, arguments = lora
    args = package.RewardConfig(str(out), **(BASE | RATE | config))
    trainer = package.RewardTrainer(
        model=str(model),
        args=args,
        train_dataset=Dataset.from_list(preference_rows(rows, seed=3)),
        peft_config=kind(r=4, lora_alpha=8, task_type="SEQ_CLS", **copy.deepcopy(arguments)),
    )
    trainer.train()
    folder = Path(out) / "final"
    trainer.save_model(str(folder))
    told = json.loads((folder / "adapter_config.json").read_text())
    return Adapted(list(trainer.state.log_history), folder, read_weights(folder), told, trainer)
