"""TRL's constructor and methods; unsupported arguments are refused by name before anything is loaded."""

from __future__ import annotations

import inspect

import pytest
from transformers import TrainerCallback

import trl_jax
from compat_tests.trainer.trainers import FACTS, make, stream, table


@pytest.fixture(scope="module")
def folder(checkpoint):
    return checkpoint(**FACTS)


def parameters(function):
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


def test_the_constructors_arguments_are_trls():
    trl = pytest.importorskip("trl")
    assert parameters(trl_jax.RewardTrainer.__init__) == parameters(trl.RewardTrainer.__init__)


@pytest.mark.parametrize(
    "method",
    [
        "train",
        "evaluate",
        "predict",
        "save_model",
        "log",
        "add_callback",
        "pop_callback",
        "remove_callback",
        "get_train_dataloader",
        "get_eval_dataloader",
        "get_test_dataloader",
        "is_world_process_zero",
        "is_local_process_zero",
        "get_learning_rates",
        "get_total_train_batch_size",
        "num_examples",
    ],
)
def test_a_methods_arguments_are_trls(method):
    trl = pytest.importorskip("trl")
    assert parameters(getattr(trl_jax.RewardTrainer, method)) == parameters(getattr(trl.RewardTrainer, method))


def test_what_is_not_built_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match=r"data_collator=builtins.*\(\.\.\.\) is not in this release.*Leave"):
        make(trl_jax, "no such folder", tmp_path, data_collator=len)


def test_a_peft_config_of_another_kind(tmp_path):
    with pytest.raises(
        TypeError, match="^peft_config must be trl_jax.LoraConfig, .*, from trl_jax or peft, got a dict."
    ):
        make(trl_jax, "no such folder", tmp_path, peft_config={"r": 8})


def test_optimizers_of_none_may_be_a_list(folder, tmp_path):
    trainer = make(trl_jax, folder, tmp_path, optimizers=[None, None], config={"max_steps": 1})
    assert trainer.train().global_step == 1


def test_a_model_that_is_neither_a_name_nor_ours(tmp_path):
    text = r"^model is a builtins.dict; this release of trl_jax takes a checkpoint's folder or Hub name"
    with pytest.raises(TypeError, match=text):
        make(trl_jax, {}, tmp_path)


def test_no_training_set(folder, tmp_path):
    with pytest.raises(ValueError, match="^`train_dataset` is required: pass a datasets.Dataset"):
        trl_jax.RewardTrainer(str(folder), trl_jax.RewardConfig(str(tmp_path)))


@pytest.mark.parametrize("strategy", ["steps", "epoch"])
def test_evaluating_without_a_set(folder, tmp_path, strategy):
    text = f"eval_strategy='{strategy}' needs an eval_dataset. Pass one, or set eval_strategy='no'."
    with pytest.raises(ValueError, match=f"^{text}"):
        make(trl_jax, folder, tmp_path, config={"eval_strategy": strategy, "eval_steps": 2})


def test_saving_the_best_of_nothing(folder, tmp_path):
    config = {"save_strategy": "best", "eval_strategy": "epoch"}
    with pytest.raises(ValueError, match="^save_strategy='best' requires metric_for_best_model, .*, got None"):
        make(trl_jax, folder, tmp_path, config=config, eval_dataset=table(4))


def test_what_setters_change_is_checked_too(folder, tmp_path):
    args = trl_jax.RewardConfig(str(tmp_path), use_cpu=True, report_to="none")
    args.set_optimizer(name="lomo")
    with pytest.raises(
        ValueError, match="optim='lomo' is not in this release of trl_jax; the closest supported optimizer is"
    ):
        trl_jax.RewardTrainer(str(folder), args, train_dataset=table(4))
    args.set_optimizer(name="adamw_torch")
    args.per_device_train_batch_size = 0
    with pytest.raises(ValueError, match="per_device_train_batch_size must be a whole number of at least 1, got 0"):
        trl_jax.RewardTrainer(str(folder), args, train_dataset=table(4))


def test_without_args_the_output_is_named_after_the_model(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer = trl_jax.RewardTrainer(str(folder), train_dataset=table(4))
    assert trainer.args.output_dir == f"{folder.name}-Reward" and (tmp_path / trainer.args.output_dir).is_dir()


def test_arguments_of_methods_that_mean_nothing_here(folder, tmp_path):
    trainer = make(trl_jax, folder, tmp_path, eval_dataset=table(4))
    with pytest.raises(ValueError, match="^trial=1 is not in this release of trl_jax. Leave it out."):
        trainer.train(trial=1)
    for method in (trainer.evaluate, lambda **how: trainer.predict(table(4), **how)):
        with pytest.raises(ValueError, match=r"^ignore_keys=\['x'\] is not in this release"):
            method(ignore_keys=["x"])


def test_the_cpu_is_used_when_asked_for(folder, tmp_path):
    trainer = make(trl_jax, folder, tmp_path, config={"use_cpu": True})
    devices = {device.platform for array in trainer.model.params.values() for device in array.devices()}
    assert devices == {"cpu"} and trainer.args.device.type == "cpu"


def test_callbacks_come_and_go(folder, tmp_path):
    class Mine(TrainerCallback):
        pass

    trainer = make(trl_jax, folder, tmp_path, callbacks=[Mine()])
    assert isinstance(trainer.pop_callback(Mine), Mine) and trainer.pop_callback(Mine) is None
    trainer.add_callback(Mine)
    trainer.remove_callback(Mine)
    assert not any(isinstance(callback, Mine) for callback in trainer.callback_handler.callbacks)


def test_the_callbacks_are_trls_in_trls_order(folder, tmp_path):
    trl = pytest.importorskip("trl")
    for quiet in (True, False):
        config = {"disable_tqdm": quiet}
        ours, theirs = (
            [type(c).__name__ for c in make(p, folder, tmp_path, config=config).callback_handler.callbacks]
            for p in (trl_jax, trl)
        )
        assert ours == theirs


def test_the_datasets_given_are_left_as_they_are(folder, tmp_path):
    train, test = table(8), {"a": table(4)}
    trainer = make(trl_jax, folder, tmp_path, train=train, eval_dataset=test)
    assert train.column_names == test["a"].column_names == ["chosen", "rejected"]
    assert "chosen_ids" in trainer.eval_dataset["a"].column_names


def test_methods_that_a_script_sets_on_its_trainer_are_called(folder, tmp_path):
    trainer = make(trl_jax, folder, tmp_path, train=table(8), config={"max_steps": 1})
    called = []
    for name in ("log", "create_optimizer", "get_train_dataloader"):
        method = getattr(trainer, name)
        setattr(trainer, name, lambda *a, name=name, method=method, **k: (called.append(name), method(*a, **k))[1])
    trainer.train()
    assert set(called) == {"log", "create_optimizer", "get_train_dataloader"}


def test_figures_that_scripts_ask_for(folder, tmp_path):
    trl, found = pytest.importorskip("trl"), {}
    config = {"gradient_accumulation_steps": 2, "max_steps": 1, "learning_rate": 3e-4, "lr_scheduler_type": "constant"}
    for package in (trl_jax, trl):
        trainer = make(package, folder, tmp_path / package.__name__, config=config, eval_dataset=table(5))
        with pytest.raises(ValueError, match="optimizer"):
            trainer.get_learning_rates()
        trainer.train()
        loaders = trainer.get_train_dataloader(), trainer.get_eval_dataloader(), range(3)
        found[package.__name__] = (
            trainer.get_learning_rates(), [trainer.num_examples(loader) for loader in loaders],
            trainer.get_total_train_batch_size(trainer.args),
        )  # fmt: skip
    assert found["trl_jax"] == found["trl"] == ([3e-4, 3e-4], [16, 5, 12], 8)
    streamed = make(trl_jax, folder, tmp_path / "streamed", train=stream(16), config={"max_steps": 1})
    with pytest.raises(TypeError, match="has no len"):  # as with TRL's
        streamed.num_examples(streamed.get_train_dataloader())
