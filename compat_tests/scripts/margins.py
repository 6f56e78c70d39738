"""A margin column, centered rewards, accumulation, a cosine schedule with warmup."""

import sys

from datasets import load_dataset
from trl import RewardConfig, RewardTrainer

model, data, out = sys.argv[1:]
rows = load_dataset("json", data_files=data, split="train")
rows = rows.add_column("margin", [0.1 * (i % 5) for i in range(len(rows))])
args = RewardConfig(
    out, per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=4, learning_rate=1e-3,
    lr_scheduler_type="cosine_with_min_lr", lr_scheduler_kwargs={"min_lr_rate": 0.1}, warmup_steps=2, weight_decay=0.1,
    max_grad_norm=0.5, center_rewards_coefficient=0.01, logging_steps=1, bf16=False, use_cpu=True, report_to="none",
    save_strategy="no", optim="adafactor", include_num_input_tokens_seen="non_padding",
)  # fmt: skip
trainer = RewardTrainer(model, args, train_dataset=rows)
trainer.train()
trainer.save_model(out)
trainer.save_state()
