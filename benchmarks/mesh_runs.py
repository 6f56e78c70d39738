"""The runs that `meshes` compares: on meshes of simulated devices, on one device, and of TRL with an equal batch."""

from __future__ import annotations

import contextlib
import importlib
import sys
import tempfile
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.gaps import beyond, gaps

PAIRS = 8  # pairs per step, for all meshes
LACKING = 3  # pairs that the last step of a ragged epoch lacks; ranks fill it up from the start of the epoch
FACTS = {"gemma2": {"sliding_window": 7}, "qwen2": {"head": "causal", "tie": True}}
# transformers' gemma2 needs eager attention for logit soft-capping.
CONFIG = {"gemma2": {"model_init_kwargs": {"attn_implementation": "eager", "dtype": "float32"}}}


def words(mesh: str) -> tuple[dict, int]:
    """The trainer arguments for a mesh, and its number of shards; "zero1:8" is DeepSpeed's stage 1 on 8 devices."""
    if mesh.startswith("zero"):
        return {"deepspeed": {"zero_optimization": {"stage": int(mesh[4])}}}, 8
    sizes = dict(part.split(":") for part in mesh.split(","))
    return {"mesh_shape": mesh}, int(sizes.get("data", 1)) * int(sizes.get("fsdp", 1))


def run(folder, rows, mesh: str, layout: str, accumulation: int = 1, scores: bool = True, **config):
    """Train; with `scores`, also evaluate and predict at the end."""
    from compat_tests import tiny
    from compat_tests.parity.reference import run_ours

    evaluation = {"eval_rows": tiny.preference_rows(21, seed=9), "predict_rows": tiny.preference_rows(11, seed=8)}
    arguments, shards = words(mesh)
    with tempfile.TemporaryDirectory() as out, contextlib.redirect_stdout(sys.stderr):  # transformers prints each log
        return run_ours(
            folder,
            rows,
            out,
            **(evaluation if scores else {}),
            per_device_train_batch_size=PAIRS // shards // accumulation,
            per_device_eval_batch_size=PAIRS // shards,
            gradient_accumulation_steps=accumulation,
            batch_layout=layout,
            logging_strategy="steps",
            **arguments,
            **config,
        )


@dataclass
class Side:
    """A model's runs without a mesh, on one device and of TRL; each is run once and cached."""

    model: str
    folder: Path
    rows: list[dict]
    cache: dict = field(default_factory=dict)

    def config(self, way: str) -> dict:
        in_order = {"train_sampling_strategy": "sequential"} if way in ("ragged", "refilled") else {}
        return CONFIG.get(self.model, {}) | in_order

    def rows_of(self, way: str) -> list[dict]:
        """A "refilled" epoch ends with the pairs with which ranks fill up a "ragged" one."""
        last = {"refilled": self.rows[:LACKING], "ragged": []}.get(way, self.rows[-LACKING:])
        return self.rows[:-LACKING] + last

    def alone(self, layout: str, way: str):
        if (layout, way) not in self.cache:
            config = self.config(way) | _adapter("trl_jax", way)
            self.cache[layout, way] = run(self.folder, self.rows_of(way), "data:1", layout, _passes(way), **config)
        return self.cache[layout, way]

    def trls(self, way: str):
        from compat_tests.parity.reference import run_trl

        if way not in self.cache:
            sizes = {"per_device_train_batch_size": PAIRS // _passes(way), "gradient_accumulation_steps": _passes(way)}
            config = self.config(way) | _adapter("peft", way) | sizes
            with tempfile.TemporaryDirectory() as out, contextlib.redirect_stdout(sys.stderr):
                self.cache[way] = run_trl(self.folder, self.rows_of(way), out, **config)
        return self.cache[way]

    def row(self, mesh: str, layout: str, way: str) -> dict[str, dict[str, float]]:
        """The gaps between a run on a mesh and the runs on one device and of TRL."""
        config = self.config(way) | _adapter("trl_jax", way)
        ours = run(self.folder, self.rows_of(way), mesh, layout, _passes(way), **config)
        if way == "ragged" and words(mesh)[1] > 1:
            way = "refilled"
        references = {"one device": self.alone(layout, way), "TRL": self.trls(way)}
        gaps_of = {name: gaps(ours, reference) for name, reference in references.items()}
        return {
            name: gap | beyond(gap, ours, references[name], partial(self.first_gradients, way))
            for name, gap in gaps_of.items()
        }

    def first_gradients(self, way: str) -> dict[str, np.ndarray]:
        """The gradients of the first step, computed with TRL in float64 as the update of SGD with learning rate 1."""
        from compat_tests.parity.reference import read_weights, run_trl

        if way == "lora":  # the base has no gradients
            return {}
        if (way, "exact") not in self.cache:
            step = {"optim": "sgd", "learning_rate": 1.0, "lr_scheduler_type": "constant", "max_steps": 1}
            config = self.config(way) | step | {"per_device_train_batch_size": PAIRS}
            with tempfile.TemporaryDirectory() as out, contextlib.redirect_stdout(sys.stderr):
                trained = run_trl(self.folder, self.rows_of(way), out, double=True, **config).weights
            initial = read_weights(self.folder)
            self.cache[way, "exact"] = {name: initial[name] - trained[name] for name in initial if name in trained}
        return self.cache[way, "exact"]


def _passes(way: str) -> int:
    return 2 if way == "accumulated" else 1


def _adapter(package: str, way: str) -> dict:
    if way != "lora":
        return {}
    lora_config = importlib.import_module(package).LoraConfig
    return {"peft_config": lora_config(r=4, target_modules="all-linear", task_type="SEQ_CLS")}
