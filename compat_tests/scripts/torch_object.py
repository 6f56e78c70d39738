"""A torch model object, used after training: scored with torch and saved by its own method."""

import sys

import torch
from datasets import load_dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from trl import RewardConfig, RewardTrainer

name, data, out = sys.argv[1:]
how = {"torch_dtype": torch.float32, "device_map": "cpu"}
model = AutoModelForSequenceClassification.from_pretrained(name, num_labels=1, **how)
tokenizer = AutoTokenizer.from_pretrained(name)
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
model.config.pad_token_id = tokenizer.pad_token_id
model.config.use_cache = False
args = RewardConfig(
    out, per_device_train_batch_size=4, max_steps=3, learning_rate=1e-3, logging_steps=1, bf16=False, use_cpu=True,
    report_to=[], save_strategy="no", remove_unused_columns=False,
)  # fmt: skip
rows = load_dataset("json", data_files=data, split="train")
trainer = RewardTrainer(model=model, args=args, processing_class=tokenizer, train_dataset=rows)
trainer.train()
trainer.save_state()
model = trainer.accelerator.unwrap_model(model)
model.eval()
with torch.no_grad():
    score = model(**tokenizer("a good answer", return_tensors="pt")).logits.item()
print("score", round(score, 3))
model.save_pretrained(out)
tokenizer.save_pretrained(out)
