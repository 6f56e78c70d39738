"""Trains once under a config, with TRL or with us: only the imported package differs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

# Plain float32 on the CPU, logging every step. A single padded width avoids compilations; a separate test shows that
# this padding does not change the numbers.
BASE = {
    "use_cpu": True,
    "bf16": False,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
    "logging_steps": 1,
    "learning_rate": 5e-4,
    "num_train_epochs": 1,
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 4,
    "pad_to_multiple_of": 64,
}


@dataclass(frozen=True)
class Run:
    """The result of a run: its log history, the saved folder and its tensors, evaluation metrics, predictions, other
    facts.

    A recorded run (see `golden`) has no folder, and a `Sketch` instead of each tensor.
    """

    logs: list[dict]
    folder: Path | None
    weights: dict[str, np.ndarray]
    evaluate_metrics: dict | None = None
    predictions: np.ndarray | None = None
    facts: dict | None = None


def run_trl(model_folder, rows, out, *, double=False, **keywords) -> Run:
    """Train with TRL, in float64 if `double`; keywords are those of `_run` and of the config."""
    import torch
    import trl

    torch.set_num_threads(1)
    keywords.pop("batch_layout", None)  # TRL has only one layout
    if double:
        keywords["model"] = in_float64(model_folder, keywords.get("seed", 42))
    return _run(trl, model_folder, rows, out, **keywords)


def in_float64(folder, seed):
    """The torch model that TRL would load, with the same head drawn from `seed`, converted to float64."""
    from transformers import AutoModelForSequenceClassification, set_seed

    set_seed(seed)
    return AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype="float32").double()


def run_ours(model_folder, rows, out, **keywords) -> Run:
    """Train with trl_jax; see `run_trl`."""
    import trl_jax

    return _run(trl_jax, model_folder, rows, out, **keywords)


def _run(
    package, model_folder, rows, out, *, trainer="Reward", model=None, eval_rows=None, predict_rows=None,
    peft_config=None, **config,
) -> Run:  # fmt: skip
    """Train `model`, or that of the folder, on `rows`, evaluate on `eval_rows` and predict `predict_rows` if given, and
    save under `out`.

    trainer: "Reward", "SFT" or "DPO".
    """
    from datasets import Dataset

    config_class, trainer_class = getattr(package, f"{trainer}Config"), getattr(package, f"{trainer}Trainer")
    args = config_class(output_dir=str(out), **(BASE | config))
    trainer = trainer_class(
        model=str(model_folder) if model is None else model,
        args=args,
        train_dataset=Dataset.from_list(rows),
        eval_dataset=None if eval_rows is None else Dataset.from_list(eval_rows),
        **({} if peft_config is None else {"peft_config": peft_config}),
    )
    trainer.train()
    logs = list(trainer.state.log_history)
    metrics = None if eval_rows is None else trainer.evaluate()
    predictions = None
    if predict_rows is not None:
        # TRL's evaluate prepares raw rows, its predict does not.
        predictions = np.asarray(trainer.predict(tokenised(model_folder, predict_rows)).predictions)
    folder = Path(out) / "final"
    trainer.save_model(str(folder))
    return Run(logs, folder, read_weights(folder), metrics, predictions)


def tokenised(model_folder, rows):
    """Text rows as a dataset with chosen_ids and rejected_ids; each text ends in EOS."""
    from datasets import Dataset
    from transformers import AutoTokenizer

    words = AutoTokenizer.from_pretrained(model_folder)
    return Dataset.from_list(
        [
            {f"{side}_ids": words(row[side] + words.eos_token)["input_ids"] for side in ("chosen", "rejected")}
            for row in rows
        ]
    )


def read_weights(folder) -> dict[str, np.ndarray]:
    """Every tensor of a checkpoint folder by its name on disk, from all shards."""
    from safetensors.numpy import load_file

    tensors = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        tensors |= load_file(file)
    if not tensors:
        raise FileNotFoundError(f"{folder} holds no .safetensors file; was save_model called?")
    return tensors


def true_scores(folder, pairs) -> tuple[np.ndarray, np.ndarray]:
    """Chosen and rejected scores [N] of tokenized pairs, computed with transformers one text at a time, without
    padding."""
    import torch
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()

    def score(ids):
        with torch.no_grad():
            return model(input_ids=torch.tensor([ids])).logits.item()

    sides = ([score(ids) for ids in pairs[f"{side}_ids"]] for side in ("chosen", "rejected"))
    return tuple(np.array(side) for side in sides)


def spied_completions(monkeypatch) -> list[list[list[int]]]:
    """A list to which the token ids of our trainers' completions are appended, one item per micro-batch."""
    from trl_jax.training.data import Completer

    written, complete = [], Completer.__call__

    def spied(*given):
        found = complete(*given)
        written.append([ids.tolist() for ids in found])
        return found

    monkeypatch.setattr(Completer, "__call__", spied)
    return written
