"""The runs of `digests` and their results: small training runs of every kind, using only public names."""

from __future__ import annotations

import hashlib
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from compat_tests.tiny import preference_rows, tiny_model

CLOCK = ("runtime", "per_second", "total_flos")  # suffixes of keys to ignore: they are not results
SAMPLES = 8  # number of elements kept per tensor
BASE = {
    "use_cpu": True, "bf16": False, "report_to": "none", "save_strategy": "no", "disable_tqdm": True,
    "logging_steps": 1, "learning_rate": 5e-4, "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4,
    "pad_to_multiple_of": 64, "max_steps": 6, "seed": 7,
}  # fmt: skip
# With 43 pairs, 4 per micro-batch and 3 micro-batches per step: an epoch's last step has 2, the last with 3 pairs.
RAGGED = {"gradient_accumulation_steps": 3, "max_steps": -1, "num_train_epochs": 2}
EVALUATED = {"eval_strategy": "steps", "eval_steps": 3, "eval_on_start": True}
SAVED = {"save_strategy": "steps", "save_steps": 3}
FOUR_BITS = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
ALL_LINEAR = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "SEQ_CLS"}
DROPPING = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.2)


@dataclass(frozen=True)
class Run:
    """A training run.

    Attributes:
        config: overrides BASE.
        facts, rows: arguments of `tiny_model` and `preference_rows`.
        adapter, quantized: arguments of LoraConfig and BitsAndBytesConfig, or None.
    """

    config: dict = field(default_factory=dict)
    model: str = "llama"
    facts: dict = field(default_factory=dict)
    rows: dict = field(default_factory=dict)
    adapter: dict | None = None
    quantized: dict | None = None
    kind: str = "plain"  # or "streamed", "own loss", "resumed"


def _mesh(shape: str, pairs: int, **config) -> Run:
    return Run({"mesh_shape": shape, "per_device_train_batch_size": pairs} | config, rows={"margin": True})


RUNS = {
    "shared": Run({"batch_layout": "shared"} | EVALUATED),
    "packed": Run({"batch_layout": "packed"}),
    "padded": Run({"batch_layout": "padded"}),
    "padded ladder": Run({"batch_layout": "padded", "pad_to_multiple_of": "auto"}),
    "ragged shared": Run(RAGGED | {"batch_layout": "shared"}, rows={"margin": True}),
    "ragged padded": Run(RAGGED | {"batch_layout": "padded", "center_rewards_coefficient": 0.1}),
    "margin": Run(rows={"margin": True}),
    "centered": Run({"center_rewards_coefficient": 0.1, "weight_decay": 0.3}),
    "cosine": Run({"lr_scheduler_type": "cosine", "warmup_steps": 2, "max_grad_norm": 0.3}),
    "chat": Run({}, "qwen3", {"tokenizer": {"chat_template": True}}, {"kind": "chat_prompt"}),
    "bfloat16": Run({"bf16": True}),
    "recomputed": Run({"remat_policy": "nothing_saveable"}),
    "causal": Run({}, "llama", {"head": "causal", "dtype": "bfloat16", "shards": True, "tie": True}),
    "bert packed": Run({"batch_layout": "packed"}, "bert"),
    "bert padded": Run({"batch_layout": "padded"}, "bert"),
    "deberta-v2": Run({}, "deberta-v2"),
    "qwen3_moe": Run({}, "qwen3_moe"),
    "gemma2": Run({}, "gemma2", {"sliding_window": 7, "attn_logit_softcapping": 1.5, "query_pre_attn_scalar": 40}),
    "gpt_neox": Run({}, "gpt_neox"),
    "lora": Run({"learning_rate": 2e-3}, adapter=ALL_LINEAR),
    "qlora": Run({"learning_rate": 2e-3}, adapter=ALL_LINEAR, quantized=FOUR_BITS),
    "dropout": Run({"disable_dropout": False}, "gpt2", DROPPING),
    "bert dropout": Run({"disable_dropout": False}, "bert"),
    "neftune": Run({"neftune_noise_alpha": 5.0}),
    "streamed": Run(kind="streamed"),
    "grouped": Run({"train_sampling_strategy": "group_by_length"}),
    "own loss": Run({"gradient_accumulation_steps": 2}, kind="own loss"),
    "adafactor": Run({"optim": "adafactor"}),
    "schedule_free": Run({"optim": "schedule_free_adamw", "lr_scheduler_type": "constant"} | EVALUATED),
    "resumed": Run(SAVED | {"gradient_accumulation_steps": 2}, kind="resumed"),
    "exported gpt_neo": Run({}, "gpt_neo", {"attention_types": [[["global", "local", "global"], 1]], "window_size": 8}),
    "mesh data": _mesh("data:8", 1),
    "mesh fsdp": _mesh("fsdp:8", 1, batch_layout="padded"),
    "mesh tensor": _mesh("fsdp:4,tensor:2", 1, gradient_accumulation_steps=2),
    "mesh sequence": _mesh("fsdp:2,sequence:4", 4, batch_layout="shared"),
}


def measured(name: str) -> dict:
    """The results of the run with this name, JSON serializable."""
    run = RUNS[name]
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_model(Path(folder) / "model", run.model, **run.facts)
        trainer = _trainer(run, model, Path(folder) / "out")
        trainer.train()
        if run.kind == "resumed":
            trainer = _trainer(run, model, Path(folder) / "out")
            trainer.train(resume_from_checkpoint=str(Path(folder) / "out" / "checkpoint-3"))
        logs = [_timeless(entry) for entry in trainer.state.log_history]
        evaluated = _timeless(trainer.evaluate(_table(13, run, seed=9)))
        predicted = np.asarray(trainer.predict(_table(11, run, seed=8)).predictions)
        trainer.save_model(str(Path(folder) / "saved"))
        tensors = {"predictions": predicted} | _weights(Path(folder) / "saved")
    return {
        "logs": [*logs, evaluated],
        "tensors": {name: _summary(tensor) for name, tensor in tensors.items()},
    }


def _trainer(run: Run, model: Path, out: Path):
    from datasets import Dataset, IterableDataset
    from transformers import PrinterCallback

    import trl_jax

    rows = preference_rows(43, **run.rows)
    trainer = (_user_loss() if run.kind == "own loss" else trl_jax.RewardTrainer)(
        model=str(model),
        args=trl_jax.RewardConfig(str(out), **(BASE | run.config)),
        train_dataset=(
            IterableDataset.from_generator(lambda: iter(rows)) if run.kind == "streamed" else Dataset.from_list(rows)
        ),
        eval_dataset=_table(13, run, seed=9),
        peft_config=run.adapter and trl_jax.LoraConfig(**run.adapter),
        quantization_config=run.quantized and trl_jax.BitsAndBytesConfig(**run.quantized),
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def _user_loss() -> type:
    import jax

    import trl_jax

    class Own(trl_jax.RewardTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            outputs = model(inputs["input_ids"], attention_mask=inputs["attention_mask"])
            chosen, rejected = outputs.logits[:, 0].reshape(2, -1)
            loss = -jax.nn.log_sigmoid(chosen - rejected - 0.5).mean()
            return (loss, outputs) if return_outputs else loss

    return Own


def _table(n: int, run: Run, seed: int):
    from datasets import Dataset

    return Dataset.from_list(preference_rows(n, seed=seed, **run.rows))


def _timeless(entry: dict) -> dict:
    return {key: value for key, value in entry.items() if not key.endswith(CLOCK)}


def _weights(folder: Path) -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def _summary(tensor: np.ndarray) -> dict:
    digest = hashlib.sha256(f"{tensor.dtype} {tensor.shape}".encode() + tensor.tobytes()).hexdigest()[:16]
    indices = np.linspace(0, tensor.size - 1, SAMPLES).astype(int)
    return {"sha256": digest, "samples": tensor.reshape(-1)[indices].astype(float).tolist()}
