"""2023: tokenizer= and max_length= on the trainer, TrainingArguments, evaluation_strategy, warmup_ratio, no_cuda."""

import sys

from datasets import load_dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer, TrainingArguments
from trl import RewardTrainer

name, data, out = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForSequenceClassification.from_pretrained(name, num_labels=1)
rows = load_dataset("json", data_files=data, split="train").train_test_split(test_size=4, seed=1)
args = TrainingArguments(
    output_dir=out, per_device_train_batch_size=4, max_steps=3, learning_rate=1e-3, logging_steps=1, warmup_ratio=0.5,
    evaluation_strategy="steps", eval_steps=3, save_strategy="no", no_cuda=True, report_to="none",
    overwrite_output_dir=True, tf32=True,
)  # fmt: skip
trainer = RewardTrainer(
    model=model, args=args, tokenizer=tokenizer, train_dataset=rows["train"], eval_dataset=rows["test"], max_length=64
)
trainer.train()
trainer.save_model(out)
trainer.save_state()
