"""2024: everything that a script for a launcher contains, on one device."""

import sys

import torch
from datasets import load_dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from trl import ModelConfig, RewardConfig, RewardTrainer, get_peft_config, get_quantization_config

name, data, out = sys.argv[1:]
model_config = ModelConfig(model_name_or_path=name, attn_implementation="eager")
assert get_quantization_config(model_config) is None and get_peft_config(model_config) is None
tokenizer = AutoTokenizer.from_pretrained(name, use_fast=True)
model = AutoModelForSequenceClassification.from_pretrained(
    name, num_labels=1, trust_remote_code=False, attn_implementation="eager", revision="main"
)
args = RewardConfig(
    output_dir=out, per_device_train_batch_size=4, max_steps=3, learning_rate=1e-3, logging_steps=1, bf16=False,
    use_cpu=True, report_to="none", save_strategy="no", optim="paged_adamw_32bit", ddp_find_unused_parameters=False,
    gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False}, save_on_each_node=True,
    dataloader_pin_memory=False, dataloader_num_workers=0, include_tokens_per_second=False,
    logging_first_step=True, overwrite_output_dir=True,
)  # fmt: skip
rows = load_dataset("json", data_files=data, split="train").shuffle(seed=5)
trainer = RewardTrainer(model=model, args=args, processing_class=tokenizer, train_dataset=rows)
trainer.train()
torch.cuda.empty_cache()
if trainer.accelerator.is_main_process:
    trainer.save_model(out)
    trainer.save_state()
    tokenizer.save_pretrained(out)
