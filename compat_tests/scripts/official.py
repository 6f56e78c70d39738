"""Like TRL's own script: flags and YAML into dataclasses, a mixture of datasets, a model by name."""

from trl import (
    DatasetMixtureConfig,
    ModelConfig,
    RewardConfig,
    RewardTrainer,
    ScriptArguments,
    TrlParser,
    get_dataset,
    get_peft_config,
    get_quantization_config,
)

if __name__ == "__main__":
    import sys

    model, data, out = sys.argv[1:]
    flags = f"--model_name_or_path {model} --output_dir {out} --use_cpu --bf16 false --max_length None --report_to none"
    parser = TrlParser((ScriptArguments, RewardConfig, ModelConfig, DatasetMixtureConfig))
    script_args, training_args, model_args, mixture = parser.parse_args_and_config(
        [*flags.split(), "--max_steps", "3", "--logging_steps", "1", "--save_strategy", "no"]
    )
    assert training_args.max_length is None
    mixture = DatasetMixtureConfig(datasets=[{"path": "json", "data_files": data, "columns": ["chosen", "rejected"]}])
    trainer = RewardTrainer(
        model=model_args.model_name_or_path,
        args=training_args,
        train_dataset=get_dataset(mixture)[script_args.dataset_train_split],
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
    )
    trainer.train()
    trainer.accelerator.print("trained")
    trainer.save_model(training_args.output_dir)
    trainer.save_state()
