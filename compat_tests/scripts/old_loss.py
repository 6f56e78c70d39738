"""2023: a user-defined compute_loss over input_ids_chosen and input_ids_rejected."""

import sys

import jax
from datasets import load_dataset
from trl import RewardConfig, RewardTrainer

model, data, out = sys.argv[1:]


class Mine(RewardTrainer):
    def compute_loss(self, model, inputs, return_outputs=False):
        chosen = model(input_ids=inputs["input_ids_chosen"], attention_mask=inputs["attention_mask_chosen"])[0]
        rejected = model(input_ids=inputs["input_ids_rejected"], attention_mask=inputs["attention_mask_rejected"])[0]
        loss = -jax.nn.log_sigmoid(chosen - rejected - 0.5).mean()
        if return_outputs:
            return loss, {"rewards_chosen": chosen, "rewards_rejected": rejected}
        return loss


rows = load_dataset("json", data_files=data, split="train")
args = RewardConfig(
    out, per_device_train_batch_size=4, max_steps=3, learning_rate=1e-3, logging_steps=1, bf16=False, use_cpu=True,
    report_to="none", save_strategy="no",
)  # fmt: skip
trainer = Mine(model, args, train_dataset=rows)
trainer.train()
trainer.save_model(out)
trainer.save_state()
