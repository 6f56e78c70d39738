"""A complete run in an environment without torch, trl, peft and accelerate: python compat_tests/torch_free.py

Trains, evaluates, saves, loads and scores, both in this process and through the command line. Fails if any of the four
is installed or was imported.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

UNWANTED = ("torch", "trl", "peft", "accelerate")
EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def main() -> None:
    check("installed", [name for name in UNWANTED if importlib.util.find_spec(name)])
    sys.path.insert(0, str(EXAMPLES))
    with tempfile.TemporaryDirectory() as folder:
        final = train(Path(folder))
        score(final)
        from_a_config(Path(folder) / "made")
        train_on_images(Path(folder) / "images")
        from_the_shell(Path(folder))
        a_script(Path(folder))
    check("imported", [name for name in UNWANTED if name in sys.modules])
    print("Trained, evaluated, saved, loaded and scored without", ", ".join(UNWANTED) + ".")


def check(what: str, found: list[str]) -> None:
    if found:
        raise SystemExit(f"{what}: {', '.join(found)}. This check wants an environment without {', '.join(UNWANTED)}.")


def train(folder: Path) -> Path:
    import tiny_model
    from datasets import load_dataset

    from trl_jax.trainer.reward_config import RewardConfig
    from trl_jax.trainer.reward_trainer import RewardTrainer

    pairs = load_dataset("json", data_files=str(EXAMPLES / "data" / "preferences_train.jsonl"), split="train[:64]")
    start = tiny_model.build(folder / "start", [row["chosen"][0]["content"] for row in pairs])
    args = RewardConfig(
        str(folder / "run"), max_steps=6, logging_steps=2, eval_strategy="steps", eval_steps=3, save_steps=3,
        learning_rate=1e-3, load_best_model_at_end=True, report_to="none", disable_tqdm=True,
    )  # fmt: skip
    trainer = RewardTrainer(str(start), args, train_dataset=pairs, eval_dataset=pairs.select(range(16)))
    assert trainer.train().global_step == 6
    assert 0 <= trainer.evaluate()["eval_accuracy"] <= 1
    assert trainer.predict(pairs.select(range(5))).predictions.shape == (10, 1)
    assert (folder / "run" / "checkpoint-6" / "model.safetensors").is_file()
    go_on(folder, trainer, args, pairs)
    trainer.save_model(str(folder / "final"))
    return folder / "final"


def go_on(folder: Path, whole, args, pairs) -> None:
    """Resume from the checkpoint in the middle and reach the same weights."""
    import numpy as np

    from trl_jax.trainer.reward_trainer import RewardTrainer

    again = RewardTrainer(str(folder / "start"), args, train_dataset=pairs, eval_dataset=pairs.select(range(16)))
    assert again.train(str(folder / "run" / "checkpoint-3")).global_step == 6
    for path, array in whole.model.params.items():
        np.testing.assert_array_equal(again.model.params[path], array)


def from_a_config(folder: Path) -> None:
    """A model built from a config that has no `architectures`."""
    from transformers import AutoConfig

    from trl_jax.hub.auto import AutoModelForCausalLM

    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    config = AutoConfig.for_model("llama", **shape, num_attention_heads=2, num_key_value_heads=2)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    assert AutoModelForCausalLM.from_pretrained(folder).config.architectures == ["LlamaForCausalLM"]


def score(final: Path) -> None:
    from transformers import AutoTokenizer

    from trl_jax.hub.auto import AutoModelForSequenceClassification

    batch = AutoTokenizer.from_pretrained(final)(["Hello there.", "Go away."], padding=True, return_tensors="np")
    logits = AutoModelForSequenceClassification.from_pretrained(final)(**batch).logits
    assert logits.shape == (2, 1)


def train_on_images(folder: Path) -> None:
    """A step on rows with images, which needs Pillow; `.ci/run` installs it."""
    if importlib.util.find_spec("PIL") is None:
        print("Rows with images are left out: Pillow is not installed.")
        return
    import numpy as np
    import vision

    from trl_jax import SFTConfig, SFTTrainer

    rows = vision.rows(np.random.default_rng(0), 4)
    start = str(vision.build(folder / "start", 0))
    args = SFTConfig(
        str(folder / "run"), max_steps=1, max_length=None, bf16=False, save_strategy="no", report_to="none",
        disable_tqdm=True,
    )  # fmt: skip
    trainer = SFTTrainer(start, args, train_dataset=rows)
    assert np.isfinite(trainer.train().training_loss)
    assert any(path.startswith("vision.") for path in trainer.model.params)


def from_the_shell(folder: Path) -> None:
    command = [
        str(Path(sysconfig.get_path("scripts")) / "trl-jax"), "reward",
        "--model_name_or_path", str(folder / "start"),
        "--dataset_name", str(EXAMPLES / "data"),
        "--output_dir", str(folder / "shell"),
        "--max_steps", "2", "--max_length", "None", "--report_to", "none", "--logging_steps", "1",
    ]  # fmt: skip
    subprocess.run(command, check=True, cwd=folder)
    assert (folder / "shell" / "model.safetensors").is_file()


SCRIPT = """
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

model = AutoModelForCausalLM.from_pretrained("start", dtype=torch.float32).to("cuda")
model = get_peft_model(model, LoraConfig(r=2, task_type="CAUSAL_LM"))
args = SFTConfig("adapter", max_steps=1, report_to="none", bf16=torch.cuda.is_bf16_supported())
tokenizer = AutoTokenizer.from_pretrained("start")
trainer = SFTTrainer(model, args, train_dataset=Dataset.from_dict({"text": ["Hello there."] * 8}))
trainer.train()
trainer.save_model()
with torch.no_grad():
    print(model.generate(**tokenizer("Hello", return_tensors="pt").to("cuda"), max_new_tokens=2))
"""


def a_script(folder: Path) -> None:
    """A script that imports torch, peft and trl, and loads its model with transformers, on two devices."""
    (folder / "script.py").write_text(SCRIPT)
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    subprocess.run([sys.executable, "-m", "trl_jax", "script.py"], check=True, cwd=folder, env=env)
    assert (folder / "adapter" / "adapter_model.safetensors").is_file()


if __name__ == "__main__":
    main()
