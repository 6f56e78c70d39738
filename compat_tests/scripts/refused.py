"""A DatasetDict passed where a single split is required: an error, and its exit status."""

import sys

from datasets import load_dataset
from trl import RewardConfig, RewardTrainer

model, data, out = sys.argv[1:]
RewardTrainer(model, RewardConfig(out, use_cpu=True, bf16=False), train_dataset=load_dataset("json", data_files=data))
