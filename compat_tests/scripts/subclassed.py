"""A trainer subclass that wraps log, evaluate, save_model and train as users do."""

import sys

from datasets import load_dataset
from trl.trainer.reward_config import RewardConfig
from trl.trainer.reward_trainer import RewardTrainer

model, data, out = sys.argv[1:]


class Mine(RewardTrainer):
    def __init__(self, *args, note="", **kwargs):
        super().__init__(*args, **kwargs)
        self.note, self.logged = note, 0

    def log(self, logs, *args, **kwargs):
        self.logged += 1
        super().log({**logs, "note": 1.0}, *args, **kwargs)

    def evaluate(self, *args, **kwargs):
        metrics = super().evaluate(*args, **kwargs)
        print("evaluated", self.note, "eval_loss" in metrics)
        return metrics

    def save_model(self, output_dir=None, _internal_call=False):
        print("saving", _internal_call)
        super().save_model(output_dir, _internal_call)


rows = load_dataset("json", data_files=data, split="train")
args = RewardConfig(
    out, per_device_train_batch_size=4, max_steps=2, logging_steps=1, bf16=False, use_cpu=True, report_to="none",
    save_strategy="steps", save_steps=2, eval_strategy="steps", eval_steps=2,
)  # fmt: skip
trainer = Mine(model, args, train_dataset=rows, eval_dataset=rows.select(range(4)), note="here")
trainer.train()
print("logged", trainer.logged)
trainer.save_model(out)
trainer.save_state()
