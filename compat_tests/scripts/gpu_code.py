"""2024: written for a single NVIDIA GPU, with all its device-specific code."""

import sys

import torch
from datasets import load_dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from trl import RewardConfig, RewardTrainer

name, data, out = sys.argv[1:]
assert torch.cuda.is_available(), "this script needs a GPU"
device = torch.device("cuda:0")
torch.cuda.set_device(0)
torch.cuda.manual_seed_all(5)
properties = torch.cuda.get_device_properties(0)
accumulation = 2 // torch.cuda.device_count()
newer = torch.cuda.get_device_capability()[0] >= 8 and torch.cuda.is_bf16_supported()
print("trained on", bool(properties.name), properties.total_memory / 1024**3 > 0, newer)
tokenizer = AutoTokenizer.from_pretrained(name)
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
model = AutoModelForSequenceClassification.from_pretrained(
    name, num_labels=1, attn_implementation="flash_attention_2", device_map={"": torch.cuda.current_device()}
)
model.config.pad_token_id = tokenizer.pad_token_id
model = model.to(device)
batch = tokenizer(["a good answer", "a bad one"], return_tensors="pt", padding=True).to("cuda")
with torch.no_grad():
    weight = torch.ones(2, 1, device="cuda").cuda(0, non_blocking=True)
    print("score", round((weight * model(**batch).logits).sum().item(), 3))
drawn = torch.rand(3, generator=torch.Generator("cuda").manual_seed(4), device="cuda")
torch.save(drawn, f"{out}.drawn")
with torch.device("cuda"):
    read = torch.load(f"{out}.drawn", map_location="cuda") + torch.zeros(3)
    print("spread", torch.load(f"{out}.drawn", {"cpu": "cuda"}).tolist(), read.pin_memory().tolist())
print("logged", isinstance(torch.default_generator, torch.Generator))
args = RewardConfig(
    out, per_device_train_batch_size=2, gradient_accumulation_steps=accumulation, max_steps=3, learning_rate=1e-3,
    logging_steps=1, bf16=False, report_to="none", save_strategy="no",
)  # fmt: skip
rows = load_dataset("json", data_files=data, split="train")
trainer = RewardTrainer(model=model, args=args, processing_class=tokenizer, train_dataset=rows)
trainer.train()
torch.cuda.synchronize()
used = round(torch.cuda.max_memory_reserved() / 1024**3, 3)
print("spread", used / properties.total_memory)
del batch
torch.cuda.empty_cache()
trainer.save_model(out)
trainer.save_state()
