"""2023: the script itself tokenizes and pads, into input_ids_chosen and so on."""

import sys

from datasets import load_dataset
from transformers import AutoTokenizer
from trl import RewardConfig, RewardTrainer

name, data, out = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(name)


def tokenize(rows):
    new = {"input_ids_chosen": [], "attention_mask_chosen": [], "input_ids_rejected": [], "attention_mask_rejected": []}
    for chosen, rejected in zip(rows["chosen"], rows["rejected"], strict=True):
        for side, text in (("chosen", chosen), ("rejected", rejected)):
            found = tokenizer(text, truncation=True, padding="max_length", max_length=96)
            new[f"input_ids_{side}"].append(found["input_ids"])
            new[f"attention_mask_{side}"].append(found["attention_mask"])
    return new


rows = load_dataset("json", data_files=data, split="train")
rows = rows.map(tokenize, batched=True, remove_columns=rows.column_names)
args = RewardConfig(
    out, per_device_train_batch_size=4, max_steps=3, learning_rate=1e-3, logging_steps=1, bf16=False, use_cpu=True,
    report_to="none", save_strategy="no", remove_unused_columns=False, max_length=512, save_safetensors=True,
)  # fmt: skip
trainer = RewardTrainer(model=name, args=args, tokenizer=tokenizer, train_dataset=rows)
trainer.train()
trainer.save_model(out)
trainer.save_state()
