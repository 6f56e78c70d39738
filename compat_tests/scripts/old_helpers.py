"""2024: conversations formatted with TRL's helpers before training, EOS as pad token, HfArgumentParser."""

import sys
from dataclasses import dataclass, field

from datasets import load_dataset
from transformers import AutoTokenizer, HfArgumentParser
from trl import RewardConfig, RewardTrainer
from trl.data_utils import maybe_apply_chat_template, maybe_extract_prompt


@dataclass
class Own:
    model: str = field(default="")
    data: str = field(default="")


name, data, out = sys.argv[1:]
flags = ["--model", name, "--data", data, "--output_dir", out, "--max_steps", "3", "--learning_rate", "1e-3"]
flags += ["--per_device_train_batch_size", "4", "--logging_steps", "1", "--bf16", "false", "--use_cpu", "--report_to"]
own, args = HfArgumentParser((Own, RewardConfig)).parse_args_into_dataclasses([*flags, "none", "--save_strategy", "no"])
tokenizer = AutoTokenizer.from_pretrained(own.model)
tokenizer.pad_token = tokenizer.eos_token


def talk(row):
    ask = [{"role": "user", "content": "Which?"}]
    return {side: [*ask, {"role": "assistant", "content": row[side]}] for side in ("chosen", "rejected")}


rows = load_dataset("json", data_files=own.data, split="train").map(talk)
rows = rows.map(maybe_extract_prompt).map(maybe_apply_chat_template, fn_kwargs={"processing_class": tokenizer})
print("columns", sorted(rows.column_names), rows[0]["prompt"])
trainer = RewardTrainer(model=own.model, args=args, processing_class=tokenizer, train_dataset=rows)
trainer.train()
trainer.save_model(out)
trainer.save_state()
