"""Steps with virtual tokens on two devices, in a separate process: python -m compat_tests.hub.peft.virtual_meshes"""

from __future__ import annotations

import sys

import jax
from datasets import Dataset

import trl_jax
from compat_tests.parity.marks import steps_of
from compat_tests.parity.reference import BASE
from compat_tests.tiny import text_rows

CONFIGS = {
    "drawn": trl_jax.PromptTuningConfig(num_virtual_tokens=5),
    "mlp": trl_jax.PromptEncoderConfig(num_virtual_tokens=5),
    "prefix": trl_jax.PrefixTuningConfig(num_virtual_tokens=5),
}


def losses(folder: str, out: str, name: str, mesh: str | None) -> list[float]:
    """The losses of three steps of four rows."""
    shared = mesh is not None and mesh.startswith(("data", "fsdp"))
    args = trl_jax.SFTConfig(
        out, **BASE | {"max_steps": 3, "learning_rate": 1e-2, "mesh_shape": mesh, "fsdp_config": {"min_num_params": 1}}
        | {"per_device_train_batch_size": 2 if shared else 4},
    )  # fmt: skip
    rows = Dataset.from_list(text_rows(16))
    trainer = trl_jax.SFTTrainer(folder, args=args, train_dataset=rows, peft_config=CONFIGS[name])
    trainer.train()
    assert mesh is None or trainer.sharding_plan.mesh.size == 2
    return [entry["loss"] for entry in steps_of(trainer.state.log_history)]


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 2)
    print("losses", *losses(*sys.argv[1:]))
