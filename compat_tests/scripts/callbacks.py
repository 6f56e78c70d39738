"""User-defined callbacks with early stopping; the best checkpoint is loaded at the end."""

import sys

from datasets import load_dataset
from transformers import EarlyStoppingCallback, TrainerCallback
from trl import RewardConfig, RewardTrainer

model, data, out = sys.argv[1:]


class Seen(TrainerCallback):
    events = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.events.append(("log", state.global_step, "loss" in logs, sorted(set(kwargs) - {"eval_dataloader"})))

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        self.events.append(("evaluate", state.global_step, "eval_loss" in metrics))

    def on_save(self, args, state, control, **kwargs):
        self.events.append(("save", state.global_step))

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 4:
            control.should_training_stop = True


rows = load_dataset("json", data_files=data, split="train").train_test_split(test_size=6, seed=0)
args = RewardConfig(
    out, per_device_train_batch_size=4, num_train_epochs=5, learning_rate=2e-3, logging_steps=1, bf16=False,
    use_cpu=True, report_to="none", eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1,
    save_total_limit=2, load_best_model_at_end=True, metric_for_best_model="eval_loss", greater_is_better=False,
    disable_tqdm=True,
)  # fmt: skip
trainer = RewardTrainer(
    model, args, train_dataset=rows["train"], eval_dataset=rows["test"],
    callbacks=[Seen, EarlyStoppingCallback(early_stopping_patience=2)],
)  # fmt: skip
trainer.train()
for event in Seen.events:
    print("event", *event)
print("best", trainer.state.best_model_checkpoint.rpartition("/")[2], trainer.state.best_global_step)
trainer.save_model(out)
trainer.save_state()
