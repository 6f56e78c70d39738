"""compute_metrics over scores, predict, several evaluation sets."""

import sys

import numpy as np
from datasets import load_dataset
from trl import RewardConfig, RewardTrainer

model, data, out = sys.argv[1:]


def compute_metrics(prediction):
    assert len(prediction.label_ids) == 0
    return {"spread": float(np.asarray(prediction.predictions).max() - np.asarray(prediction.predictions).min())}


rows = load_dataset("json", data_files=data, split="train")
args = RewardConfig(
    out, per_device_train_batch_size=4, per_device_eval_batch_size=4, max_steps=2, logging_steps=1, bf16=False,
    use_cpu=True, report_to="none", save_strategy="no", lr_scheduler_type="reduce_lr_on_plateau",
    lr_scheduler_kwargs={"patience": 0, "threshold": 0.5}, eval_strategy="steps", eval_steps=1,
    metric_for_best_model="loss",
)  # fmt: skip
trainer = RewardTrainer(
    model, args, train_dataset=rows, eval_dataset=rows.select(range(8)), compute_metrics=compute_metrics
)
trainer.train()
print("spread", round(trainer.evaluate()["eval_spread"], 4))
trainer.save_model(out)
trainer.save_state()
