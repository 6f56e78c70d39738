"""What a run logs by default: three lines before its first step, one at the end, one after saving."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest
import transformers
from transformers import TrainerCallback
from transformers.trainer_callback import ProgressCallback

import trl_jax
from compat_tests.trainer.trainers import FACTS, make, table
from trl_jax.training import logging as first_lines
from trl_jax.training.logging import CompilationUntimed


@pytest.fixture(scope="session")
def folder(checkpoint):
    return checkpoint(**FACTS)


@pytest.fixture
def told(caplog):
    """told() -> the lines that this module logged so far."""
    return lambda: [record.getMessage() for record in caplog.records if record.name == first_lines.__name__]


class Steps(TrainerCallback):
    def __init__(self, told):
        self.told, self.before = told, []

    def on_step_end(self, *args, **kwargs):
        self.before.append(len(self.told()))


def test_three_lines_come_before_the_first_step_and_one_after_the_last(folder, tmp_path, told):
    steps = Steps(told)
    trainer = make(trl_jax, folder, tmp_path, config={"max_steps": 2}, callbacks=[steps])
    trainer.train()
    model, layout, compilation, end = told()
    parameters = r"22\.\dk parameters, all of which train, computed in float32\."
    assert re.fullmatch(rf"Training on 1 x CPU: {folder.name} \(llama\) of {parameters}", model)
    assert layout.startswith("Layout shared: ") and "tokens of text; packed rows of" in layout
    shapes = len(trainer.loader(trainer.train_dataset, training=True).step_layout.buckets.lengths)
    assert compilation.startswith(f"Compiling the step for shape 1 of {shapes}, tokens ")
    assert compilation.endswith(f"programs are kept in {first_lines.jax.config.jax_compilation_cache_dir}.")
    assert first_lines._from_home(str(Path("~/a/b").expanduser())) == "~/a/b"
    left = r"the model is only in memory\. Next: trainer\.save_model\(\)\."
    assert re.fullmatch(r"Trained 2 steps in [\d.]+ s; " + left, end)
    assert steps.before == [3, 3]
    trainer.train()
    assert len(told()) == 5, "the three come once"


def test_checkpoints_adapters_and_folders_are_named(folder, tmp_path, told):
    how = {"max_steps": 1, "save_strategy": "steps", "save_steps": 1}
    trainer = make(trl_jax, folder, tmp_path, config=how, peft_config=trl_jax.LoraConfig(r=2))
    trainer.train()
    trainer.save_model(str(tmp_path / "final"))
    trainer.save_model(str(tmp_path / "hidden"), _internal_call=True)
    model, *_, end, saved = told()
    assert re.search(r"parameters, of which 256 train \(1\.10%\), computed", model)
    assert end.startswith("Trained 1 step in") and f"is {trainer.args.output_dir}/checkpoint-1. Next" in end
    assert saved == f"The model is in {tmp_path / 'final'}. Next: trl-jax score {tmp_path / 'final'} answers.jsonl"


class Own(trl_jax.RewardTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return model(inputs["input_ids"], inputs["attention_mask"]).logits.mean()


def test_a_loss_of_ones_own_has_its_layout_told(folder, tmp_path, told):
    Own(str(folder), make(trl_jax, folder, tmp_path, config={"max_steps": 1}).args, train_dataset=table(8)).train()
    assert told()[1] == "Layout padded: a user-defined loss receives whole rows."
    assert told()[2].startswith("Compiling the step for shape 1, tokens ")


def test_rows_that_a_run_writes_have_their_layout_told_with_its_reason(monkeypatch):
    said = []
    monkeypatch.setattr(first_lines, "tell", lambda told, kind, text: said.append(text))
    for layout, reason in (("padded", "packed attention does not support dropout"), ("shared", "")):
        first_lines.tell_layout(set(), layout, reason, user_loss=False)
    assert said == [
        "Layout padded: packed attention does not support dropout.",
        "Layout shared: texts end to end, without padding; a prompt that several texts share is computed once.",
    ]


def test_a_first_evaluation_says_that_it_compiles(folder, tmp_path, told):
    trainer = make(trl_jax, folder, tmp_path, config={"max_steps": 1})
    for _ in range(2):
        trainer.evaluate(table(4))
    assert told() == ["Compiling the evaluation: the first one takes longer than the others."]


def test_a_quieter_log_level_is_heard(folder, tmp_path, told):
    make(trl_jax, folder, tmp_path, config={"max_steps": 1, "log_level": "warning"}).train()
    assert told() == []
    first_lines.show_lines(logging.ERROR, asked=False)  # transformers' verbosity
    assert not first_lines.logger.isEnabledFor(logging.INFO)
    first_lines.show_lines(logging.WARNING, asked=False)
    assert first_lines.logger.isEnabledFor(logging.INFO)


def test_transformers_verbosity_hides_no_warnings_of_ours(folder, tmp_path):
    ours, before = logging.getLogger("trl_jax"), transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        for config, shown in (({}, True), ({"log_level": "error"}, False)):
            make(trl_jax, folder, tmp_path, config=config)
            assert ours.isEnabledFor(logging.WARNING) == shown
    finally:
        transformers.logging.set_verbosity(before)
        ours.setLevel(logging.NOTSET)


def test_only_the_first_process_speaks(folder, tmp_path, told, monkeypatch):
    monkeypatch.setattr(first_lines, "is_first", lambda: False)
    make(trl_jax, folder, tmp_path, config={"max_steps": 1}).train()
    assert told() == []


def test_the_bar_expects_no_compilation_of_the_steps_to_come(folder, tmp_path):
    trainer = make(trl_jax, folder, tmp_path, config={"disable_tqdm": False})
    bar = ProgressCallback()
    trainer.callback_handler.pop_callback(ProgressCallback)
    trainer.add_callback(bar)
    bar.on_train_begin(trainer.args, trainer.state, trainer.control)
    bar.training_bar._time = lambda: bar.training_bar.last_print_t + 100.0  # pretend that compiling took 100 seconds
    began = bar.training_bar.start_t
    compilation = CompilationUntimed(trainer._setup.events)
    compilation.done((1, 8))
    assert bar.training_bar.start_t == began + 100.0
    compilation.done((1, 8))
    assert bar.training_bar.start_t == began + 100.0
    bar.training_bar.close()
