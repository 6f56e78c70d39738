"""Memory for weights, moments and gradients, and communication, per device on meshes of simulated CPU devices.

    python -m benchmarks.division                        # a llama of 8 layers and width 512
    python -m benchmarks.division --meshes fsdp:2 fsdp:4 zero2:4 --width 1024

Weights and moments are measured as inputs of the step. Arguments and temporary memory ("beside them") come from XLA's
memory analysis of the compiled step, gradients from that of the same function without the optimizer. Communication is
read from the HLO: each collective is multiplied by how often it runs, in bytes of the larger of its input and output.
Texts are short, so that activations are negligible.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

MESHES = (
    "data:1", "data:8", "zero1:8", "zero2:8", "fsdp:2", "fsdp:4", "fsdp:8", "tensor:2", "fsdp:4,tensor:2",
    "sequence:8",
)  # fmt: skip
COLUMNS = ("weights", "moments", "gradients", "arguments", "beside them", "gathered", "reduced and scattered", "summed")
KINDS = {"all-gather": "gathered", "reduce-scatter": "reduced and scattered", "all-reduce": "summed"}


def row(folder: Path, mesh: str) -> dict[str, float]:
    """Bytes per device, by COLUMNS."""
    import jax
    import numpy as np

    from trl_jax.plan.hlo import cost

    trainer = _trainer(folder, mesh)
    [batch, *_] = trainer.get_train_dataloader().steps
    params, arrays = trainer.model.params, trainer.parts.train_step.placed(batch).arrays
    tx = trainer.parts.training.build_optimizer()
    state = trainer.parts.train_step.new_optimizer_state(tx)
    step = trainer.parts.train_step.compiled(tx, remat=True).lower(params, state, arrays, np.float32(0), None).compile()
    memory = step.memory_analysis()
    sizes = {"weights": _held(params), "moments": _held(state)}
    sizes["gradients"] = _gradients(trainer).lower(params, arrays).compile().memory_analysis().output_size_in_bytes
    sizes |= {"arguments": memory.argument_size_in_bytes, "beside them": memory.temp_size_in_bytes}
    sizes |= dict.fromkeys(KINDS.values(), 0)
    for collective in cost(step.as_text()).collectives:
        sizes[KINDS[collective.kind]] += collective.bytes
    jax.clear_caches()
    return sizes


def _trainer(folder: Path, mesh: str) -> Any:
    from datasets import Dataset

    from benchmarks.mesh_runs import words
    from trl_jax.trainer.reward_config import RewardConfig
    from trl_jax.trainer.reward_trainer import RewardTrainer

    arguments, shards = words(mesh)
    rows = [{"chosen_ids": [5, 6, 7, 1], "rejected_ids": [5, 8, 1]}] * 8
    config = {"use_cpu": True, "report_to": "none", "per_device_train_batch_size": 8 // shards, "bf16": False}
    args = RewardConfig(str(folder / "out"), **config, **arguments)
    return RewardTrainer(str(folder), args, train_dataset=Dataset.from_list(rows))


def _held(arrays: Any) -> int:
    import jax

    return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(arrays))


def _gradients(trainer: Any) -> Any:
    """A jitted function from parameters and a batch to the gradients, sharded as in the step."""
    from functools import partial

    import jax

    from trl_jax.training.update import _accumulate

    def loss(params, frozen, *micro):
        return trainer.loss(params, *micro, remat=True)

    if trainer.parts.train_step.sharded_step is None:
        gradients = partial(_accumulate, jax.value_and_grad(loss, has_aux=True))
        return jax.jit(lambda params, batch: gradients(params, {}, batch, None)[1])
    shapes = trainer.model.params
    shardings = trainer.sharding_plan.gradients(shapes)
    gradients = trainer.parts.train_step.sharded_step.gradients(_accumulate, loss)
    return jax.jit(
        lambda params, batch: gradients(params, {}, batch, None)[1],
        out_shardings={path: shardings[path] for path in shapes},
    )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--meshes", nargs="+", default=MESHES)
    options.add_argument("--layers", type=int, default=8)
    options.add_argument("--width", type=int, default=512, help="a multiple of 64")
    args = options.parse_args()
    os.environ.setdefault("TQDM_DISABLE", "1")
    from benchmarks import common
    from benchmarks.meshes import eight_devices
    from compat_tests import tiny

    eight_devices()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        common.build_llama(folder, layers=args.layers, width=args.width, vocab_size=8192)
        tiny.tiny_tokenizer(folder)
        print(f"| MB a device | {' | '.join(COLUMNS)} |\n|{' --- |' * (1 + len(COLUMNS))}")
        for mesh in args.meshes:
            sizes = row(folder, mesh)
            print(f"| {mesh} | {' | '.join(f'{sizes[name] / 1e6:.1f}' for name in COLUMNS)} |", flush=True)


if __name__ == "__main__":
    main()
