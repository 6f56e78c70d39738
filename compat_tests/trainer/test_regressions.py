"""Regression tests for habits of real scripts that once failed."""

import json

import numpy as np
import pytest

import trl_jax
from compat_tests.trainer.trainers import FACTS, make, stream, table


@pytest.fixture(scope="session")
def folder(checkpoint):
    return checkpoint(**FACTS)


def test_metrics_of_numpy_types_survive_a_checkpoint(folder, tmp_path):
    def compute_metrics(prediction):
        return {"spread": prediction.predictions.std(), "first": prediction.predictions[0, 0]}

    config = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2, "max_steps": 2}
    trainer = make(trl_jax, folder, tmp_path, config=config, eval_dataset=table(8), compute_metrics=compute_metrics)
    trainer.train()
    history = json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text())["log_history"]
    assert [entry["eval_spread"] for entry in history if "eval_spread" in entry][0] > 0


def test_a_pad_token_beyond_the_embedding_is_refused(folder, tmp_path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    tokenizer.add_tokens([f"<new{i}>" for i in range(size - len(tokenizer))])
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    with pytest.raises(ValueError, match=rf"'\[PAD\]' has id {size}, but the model has .* for ids 0 to {size - 1}"):
        make(trl_jax, folder, tmp_path, processing_class=tokenizer)


def test_overriding_the_loss_changes_the_run(folder, tmp_path):
    class Doubled(trl_jax.RewardTrainer):
        def loss(self, params, batch, key, **how):
            value, metrics = super().loss(params, batch, key, **how)
            return 2 * value, metrics

    plain = make(trl_jax, folder, tmp_path / "plain", config={"max_steps": 1})
    doubled = Doubled(str(folder), plain.args, train_dataset=table(16))
    plain.train()
    doubled.train()
    assert doubled.state.log_history[0]["loss"] == pytest.approx(2 * plain.state.log_history[0]["loss"], rel=1e-6)


def test_drop_last_drops_no_row_of_an_evaluation(folder, tmp_path):
    config = {"dataloader_drop_last": True, "per_device_eval_batch_size": 4}
    trainer = make(trl_jax, folder, tmp_path, config=config)
    assert trainer.predict(table(3)).predictions.shape == (6, 1)
    assert trainer.predict(table(6)).predictions.shape == (12, 1)


def test_an_older_run_in_the_folder_never_costs_the_new_checkpoint(folder, tmp_path):
    for step in (400, 500):
        (tmp_path / f"checkpoint-{step}").mkdir()
    config = {"save_strategy": "steps", "save_steps": 1, "max_steps": 3, "save_total_limit": 2}
    make(trl_jax, folder, tmp_path, config=config).train()
    assert (tmp_path / "checkpoint-3" / "model.safetensors").is_file()
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == [f"checkpoint-{n}" for n in (2, 3, 400, 500)]


def test_a_stream_of_nothing_but_long_rows_is_an_error(folder, tmp_path):
    trainer = make(trl_jax, folder, tmp_path, train=stream(8), config={"max_steps": 2, "max_length": 1})
    with pytest.raises(ValueError, match="yielded no batch.*max_length"):
        trainer.train()


def test_a_stream_without_an_end_is_refused_at_construction(folder, tmp_path):
    with pytest.raises(ValueError, match="max_steps must be set"):
        make(trl_jax, folder, tmp_path, train=stream(8), config={"max_steps": -1})


def test_the_best_metric_must_belong_to_a_set(folder, tmp_path):
    config = {"eval_strategy": "steps", "save_strategy": "best", "metric_for_best_model": "loss"}
    with pytest.raises(ValueError, match=r"names none of the evaluation sets \(easy\).*'eval_easy_loss'"):
        make(trl_jax, folder, tmp_path, config=config, eval_dataset={"easy": table(4)})


def test_evaluating_at_the_start_needs_a_set(folder, tmp_path):
    with pytest.raises(ValueError, match="eval_on_start=True needs an eval_dataset"):
        make(trl_jax, folder, tmp_path, config={"eval_on_start": True})


def test_an_unknown_evaluation_set(folder, tmp_path):
    trainer = make(trl_jax, folder, tmp_path, eval_dataset={"easy": table(4)})
    with pytest.raises(ValueError, match="no evaluation set 'hard': the trainer's eval_dataset has easy"):
        trainer.evaluate("hard")


def test_written_arguments_keep_special_tokens_and_name_dtypes(folder, tmp_path):
    config = {"eos_token": "</s>", "model_init_kwargs": {"torch_dtype": np.dtype("float32"), "token": "hf_secret"}}
    make(trl_jax, folder, tmp_path, config=config).save_model(str(tmp_path / "final"))
    written = json.loads((tmp_path / "final" / "training_args.json").read_text())
    assert written["eos_token"] == "</s>"
    assert written["model_init_kwargs"] == {"torch_dtype": "float32", "token": "<TOKEN>"}


def test_torch_dtype_takes_effect_as_dtype(folder, tmp_path):
    """TRL adds dtype="float32", which wins."""
    trainer = make(trl_jax, folder, tmp_path, config={"model_init_kwargs": {"torch_dtype": "bfloat16"}})
    assert str(trainer.model.dtype) == "torch.bfloat16"


def test_a_path_is_as_good_as_its_name(folder, tmp_path):
    args = trl_jax.RewardConfig(str(tmp_path), report_to="none", use_cpu=True)
    assert trl_jax.RewardTrainer(folder, args, train_dataset=table(4)).model.name_or_path == str(folder)


def test_a_gradient_norm_below_zero_bounds_nothing(folder, tmp_path):
    found = []
    for most in (-1.0, 0.0, 0.01):
        config = {"max_steps": 2, "max_grad_norm": most, "optim": "sgd", "learning_rate": 0.01}
        trainer = make(trl_jax, folder, tmp_path / str(most), config=config)
        trainer.train()
        found.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert found[0] == found[1] != found[2]
