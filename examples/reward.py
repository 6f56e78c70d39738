"""A reward-modelling script as one writes it for TRL. Only the import differs.

python examples/reward.py MODEL PAIRS.jsonl OUTPUT_DIR
"""

import sys

from datasets import load_dataset

from trl_jax import RewardConfig, RewardTrainer


def main(model: str, pairs: str, output_dir: str) -> None:
    dataset = load_dataset("json", data_files=pairs, split="train").train_test_split(test_size=0.1, seed=0)
    args = RewardConfig(
        output_dir=output_dir,
        num_train_epochs=1,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=1e-4,
        lr_scheduler_type="cosine",
        warmup_steps=0.1,
        eval_strategy="epoch",
        save_strategy="no",
        logging_steps=5,
        report_to="none",
        use_cpu=True,  # leave these two out where there is a GPU or a TPU
        bf16=False,
    )
    trainer = RewardTrainer(model=model, args=args, train_dataset=dataset["train"], eval_dataset=dataset["test"])
    trainer.train()
    trainer.save_model(output_dir)
    trainer.state.save_to_json(f"{output_dir}/trainer_state.json")


if __name__ == "__main__":
    main(*sys.argv[1:])
