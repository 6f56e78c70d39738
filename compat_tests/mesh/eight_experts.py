"""Mixtures of experts on meshes of simulated CPU devices: each device balances its own micro-batch, like TRL's
ranks."""

from __future__ import annotations

from functools import cache

import jax

jax.config.update("jax_num_cpu_devices", 8)

import numpy as np
import pytest
from datasets import Dataset

import trl_jax
from compat_tests.effort import THOROUGH, only_thorough, thorough
from compat_tests.parity.reference import BASE
from compat_tests.tiny import preference_rows, text_rows

SMALL = {"head": "causal", "num_hidden_layers": 1, "hidden_size": 32}
CONFIG = {"max_length": 64, "router_aux_loss_coef": 0.5, "num_train_epochs": 1, "learning_rate": 3e-3}
# Models with several kinds of layers: convolutions, states and attention, an MLP and experts; latent attention; heads
# of two widths, shared keys and per-layer embeddings; chunked attention and layers without positions.
FACTS = {
    "lfm2_moe": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "deepseek_v3": {"num_hidden_layers": 2},
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe", "full_attention"]},
    "falcon_h1": {},
    "gemma4_text": {
        "num_hidden_layers": 4, "num_kv_shared_layers": 2, "sliding_window": 7,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "llama4_text": {"num_hidden_layers": 2, "no_rope_layer_interval": 2, "interleave_moe_layer_step": 2},
}  # fmt: skip
MEASURED = {"SFT": ("loss", "grad_norm", "aux_loss", "eval_aux_loss")}
MEASURED["DPO"] = (*MEASURED["SFT"], "eval_loss")
ROWS = {"SFT": text_rows, "DPO": preference_rows}


@pytest.fixture(scope="module")
def run(checkpoint, tmp_path_factory):
    def measured(family: str, name: str, mesh: str, accumulation: int, layout: str) -> np.ndarray:
        config = {"mesh_shape": mesh, "gradient_accumulation_steps": accumulation, "batch_layout": layout}
        out = str(tmp_path_factory.mktemp("out"))
        config |= {"router_aux_loss_coef": None} if family in FACTS else {}
        args = getattr(trl_jax, f"{name}Config")(out, **BASE | CONFIG | config)
        train, evaluated = (Dataset.from_list(ROWS[name](n, "prompt", seed=n)) for n in (16, 8))
        trainer = getattr(trl_jax, f"{name}Trainer")(
            str(checkpoint(family, **SMALL | FACTS.get(family, {}))),
            args=args,
            train_dataset=train,
            eval_dataset=evaluated,
        )
        trainer.train()
        if THOROUGH or family not in FACTS:  # MEASURED has no evaluation results for those
            trainer.evaluate()
        return np.asarray([log[key] for key in MEASURED[name] for log in trainer.state.log_history if key in log])

    return measured


@pytest.fixture(scope="module")
def alone(run):
    """alone(family, trainer): on one device, whose two micro-batches per step equal one micro-batch on two devices."""
    return cache(lambda family, name: run(family, name, "data:1", 2, "padded"))


@pytest.mark.parametrize(
    ("family", "name", "mesh", "layout"),
    [
        thorough("qwen3_moe", "SFT", "fsdp:2", "padded"),
        thorough("qwen3_moe", "SFT", "fsdp:2,tensor:2", "packed"),
        thorough("qwen3_moe", "SFT", "data:2,sequence:2", "packed"),
        thorough("qwen3_moe", "DPO", "fsdp:2", "shared"),
        thorough("gpt_oss", "SFT", "fsdp:2,tensor:2", "packed"),
        thorough("gpt_oss", "SFT", "data:2,sequence:2", "packed"),
        thorough("gpt_oss", "DPO", "fsdp:2", "shared"),
        thorough("phimoe", "SFT", "fsdp:2,tensor:2", "packed"),
        thorough("phimoe", "SFT", "data:2,sequence:2", "packed"),
        thorough("phimoe", "DPO", "fsdp:2", "packed"),
    ],
)
def test_the_numbers_of_one_device(family, name, mesh, layout, run, alone):
    one_device = alone(family, name)
    assert len(one_device) == 3 * 2 + len(MEASURED[name]) - 3
    np.testing.assert_allclose(run(family, name, mesh, 1, layout), one_device, rtol=2e-4)


@pytest.mark.parametrize(
    ("family", "mesh"),
    [
        thorough("lfm2_moe", "fsdp:2,tensor:2"), thorough("nemotron_h", "fsdp:2,tensor:2"),
        thorough("falcon_h1", "fsdp:2,tensor:2"), thorough("deepseek_v3", "fsdp:2,tensor:2"),
        thorough("gemma4_text", "fsdp:2,tensor:2"), thorough("gemma4_text", "data:2,sequence:2"),
        thorough("llama4_text", "fsdp:2,tensor:2"), thorough("llama4_text", "data:2,sequence:2"),
    ],
)  # fmt: skip
def test_layers_of_several_kinds(family, mesh, run):
    """None of them logs a load-balancing loss."""
    meshes = (mesh, 1), ("data:1", 2)
    found, wanted = (run(family, "SFT", where, steps, "packed") for where, steps in meshes)
    np.testing.assert_allclose(found, wanted, rtol=2e-4)


@only_thorough
@pytest.mark.parametrize(("family", "mesh"), [("qwen3_moe", "tensor:2"), ("llama", "sequence:2")])
def test_sixteen_bits_are_summed(family, mesh, checkpoint, tmp_path):
    """TRL's default dtype. XLA's own 16-bit all-reduce crashes the process on CPUs."""
    losses = []
    for where in ("data:1", mesh):
        args = trl_jax.SFTConfig(str(tmp_path), **BASE | {"max_steps": 1, "bf16": True, "mesh_shape": where})
        rows = Dataset.from_list(text_rows(8))
        trainer = trl_jax.SFTTrainer(str(checkpoint(family, **SMALL)), args=args, train_dataset=rows)
        trainer.train()
        losses.append(trainer.state.log_history[0]["loss"])
    assert losses[1] == pytest.approx(losses[0], rel=2e-3) and losses[0] != 0
