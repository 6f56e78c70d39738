"""A model passed by name, with metrics logged and saved."""

import sys

from datasets import load_dataset
from trl import RewardConfig, RewardTrainer

model, data, out = sys.argv[1:]
rows = load_dataset("json", data_files=data, split="train").train_test_split(test_size=6, seed=0)
args = RewardConfig(
    output_dir=out, per_device_train_batch_size=4, num_train_epochs=1, logging_steps=1, learning_rate=5e-4, bf16=False,
    use_cpu=True, report_to="none", eval_strategy="steps", eval_steps=2, save_strategy="no", seed=3,
)  # fmt: skip
trainer = RewardTrainer(model=model, args=args, train_dataset=rows["train"], eval_dataset=rows["test"])
result = trainer.train()
trainer.log_metrics("train", {"train_loss": result.training_loss})
trainer.save_metrics("train", {"train_loss": result.training_loss})
metrics = trainer.evaluate()
print("eval", sorted(metrics))
trainer.save_metrics("eval", {"eval_loss": metrics["eval_loss"]})
trainer.save_model(out)
trainer.save_state()
