"""TRL's callbacks: the moving average of the weights over steps, completions during training, and others."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from datasets import Dataset

import trl_jax
from compat_tests import pages
from compat_tests.pages import FOLDER
from compat_tests.parity.dpo_cases import SMALL
from compat_tests.parity.grpo_cases import prompt_rows
from compat_tests.parity.reference import BASE, read_weights
from trl_jax.hub.peft_config import LoraConfig
from trl_jax.trainer.callbacks import BEMACallback, LogCompletionsCallback
from trl_jax.trainer.sft_config import SFTConfig
from trl_jax.trainer.sft_trainer import SFTTrainer
from trl_jax.training import callbacks

CONFIG = {"max_steps": 7, "save_strategy": "steps", "save_steps": 1, "learning_rate": 3e-3, "pad_to_multiple_of": None}
AVERAGE = {"update_freq": 2, "update_after": 1, "ema_power": 0.4, "bias_power": 0.3, "lag": 3, "multiplier": 0.5}


@pytest.fixture
def make(checkpoint, tmp_path):
    def made(rows=None, **given):
        config = given.pop("config", {})
        args = SFTConfig(str(tmp_path / given.pop("out", "out")), **BASE | CONFIG | config)
        rows = rows or [{"text": row["prompt"]} for row in prompt_rows(20)]
        return SFTTrainer(str(checkpoint(**SMALL)), args, train_dataset=Dataset.from_list(rows), **given)

    return made


def expected(folders) -> dict[str, np.ndarray]:
    """The average by the paper's formula, in float64, from the weights saved after each step."""
    steps = {step: read_weights(folder) for step, folder in folders.items()}
    begin = average = {name: array.astype(float) for name, array in steps[AVERAGE["update_after"]].items()}
    for step in (3, 5, 7):
        age = AVERAGE["lag"] + AVERAGE["multiplier"] * step
        beta, alpha = age ** -AVERAGE["ema_power"], age ** -AVERAGE["bias_power"]
        average = {name: (1 - beta) * average[name] + beta * now for name, now in steps[step].items()}
        corrected = {name: average[name] + alpha * (now - begin[name]) for name, now in steps[step].items()}
    return corrected


def test_the_average_is_that_of_the_papers_formula(make):
    trainer = make(callbacks=[BEMACallback(**AVERAGE)])
    trainer.train()
    out = trainer.args.output_dir
    wanted = expected({step: f"{out}/checkpoint-{step}" for step in range(1, 8)})
    found, last = read_weights(f"{out}/bema"), read_weights(f"{out}/checkpoint-7")
    assert found.keys() == wanted.keys() == last.keys()
    for name, array in found.items():
        np.testing.assert_allclose(array, wanted[name], rtol=1e-5, atol=1e-6)
    assert max(np.abs(found[name] - last[name]).max() for name in found) > 1e-3


def test_the_run_is_as_without_and_an_adapter_is_averaged_alone(make):
    config = {"max_steps": 2, "save_strategy": "no"}
    plain, averaged = make(config=config), make(config=config, callbacks=[BEMACallback(update_freq=1)])
    lora = LoraConfig(r=2, target_modules=["q_proj"])
    adapted = make(config=config, callbacks=[BEMACallback(update_freq=1)], peft_config=lora, out="adapted")
    for trainer in (plain, averaged, adapted):
        trainer.train()
    losses = [[log["loss"] for log in one.state.log_history if "loss" in log] for one in (plain, averaged)]
    assert losses[0] == losses[1]
    names = read_weights(f"{adapted.args.output_dir}/bema")
    assert names and all(".lora_" in name for name in names)


def test_prompts_are_completed_and_given_to_trackers(make, monkeypatch):
    given = []
    monkeypatch.setattr("trl_jax.trainer.callbacks.trackers", lambda names: [given.append])
    comet = SimpleNamespace(log_table=lambda **table: given.append(table))
    monkeypatch.setitem(sys.modules, "comet_ml", SimpleNamespace(get_running_experiment=lambda: comet))
    rows = [{"prompt": row["prompt"], "completion": " Yes."} for row in prompt_rows(8)]
    config = {"max_steps": 4, "save_strategy": "no", "eval_strategy": "steps", "eval_steps": 2}
    trainer = make(rows, config=config, eval_dataset=Dataset.from_list(rows))
    trainer.add_callback(LogCompletionsCallback(trainer, num_prompts=5))
    monkeypatch.setattr(trainer.args, "report_to", ["comet_ml"])
    monkeypatch.setattr(trainer.model.generation_config, "max_new_tokens", 6)
    trainer.train()
    tables = [table for table in given if not isinstance(table, dict)]
    assert [len(table) for table in tables] == [5, 10] and len(given) == 4
    last = tables[-1]
    assert list(last.columns) == ["step", "prompt", "completion"] and list(last["step"]) == ["2"] * 5 + ["4"] * 5
    assert list(last["prompt"][:5]) == [row["prompt"] for row in rows[:5]]
    ids = trainer.processing_class([rows[0]["prompt"]], return_tensors="np")
    again = trainer.model.generate(**ids)[0, ids["input_ids"].shape[1] :]
    assert last["completion"].iloc[5] == trainer.processing_class.decode(again, skip_special_tokens=True)
    with pytest.raises(ValueError, match="Trainer must have an evaluation dataset"):
        LogCompletionsCallback(make())


def test_a_run_stops_after_its_minutes_and_resumes(make, tmp_path, caplog, capsys):
    """Also logs metrics as JSON lines, and prints completions to the terminal if there is no tracker."""
    rows = [{"prompt": row["prompt"], "completion": " Yes."} for row in prompt_rows(8)]
    config = {"max_steps": 3, "save_strategy": "no", "log_json": str(tmp_path / "logs" / "run.jsonl"),
              "logging_steps": 1}  # fmt: skip

    def trainer_of(**given):
        return make(rows, config=config | given, eval_dataset=Dataset.from_list(rows))

    first = trainer_of(max_minutes=0)
    first.train()
    assert first.state.global_step == 1 and "Stopping at step 1: max_minutes=0 have passed." in caplog.text
    second = trainer_of(save_minutes=0)
    second.add_callback(LogCompletionsCallback(second, num_prompts=5, freq=3))
    second.model.generation_config.max_new_tokens = 4
    second.train(resume_from_checkpoint=True)
    assert sorted(path.name for path in (tmp_path / "out").glob("checkpoint-*")) == [
        "checkpoint-1", "checkpoint-2", "checkpoint-3",
    ]  # fmt: skip
    lines = [json.loads(line) for line in (tmp_path / "logs" / "run.jsonl").read_text().splitlines()]
    losses = {line["step"]: line["loss"] for line in lines if "loss" in line}
    assert losses == {entry["step"]: entry["loss"] for entry in second.state.log_history if "loss" in entry}
    assert list(losses) == [1, 2, 3] and lines[0]["time"] < lines[-1]["time"]
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step 3: ")]
    assert len(shown) == 2 and f"{rows[0]['prompt']!r} -> " in shown[0]


def test_the_first_process_decides_for_all_and_is_asked_seldom(monkeypatch):
    """Steps of a second each, on a process whose own clock is an hour ahead after the start."""
    now, asked = [0.0], []

    def from_first(data: bytes) -> bytes:
        ending, _, number = np.frombuffer(data, np.int64).tolist()
        assert ending  # by this process's own clock
        asked.append(state.global_step)
        return np.asarray([state.global_step > 70, state.global_step > 40, number], np.int64).tobytes()

    monkeypatch.setattr(callbacks, "several", lambda: True)
    monkeypatch.setattr(callbacks, "from_first", from_first)
    monkeypatch.setattr(callbacks.time, "monotonic", lambda: now[0])
    clock, state = trl_jax.TimeLimitCallback(10.0, 5.0), SimpleNamespace(global_step=0)
    clock.on_train_begin(None, state, None)
    saves = []
    for step in range(1, 100):
        now[0], state.global_step = 3600.0 + step, step
        control = SimpleNamespace(should_save=False, should_training_stop=False)
        clock.on_step_end(None, state, control)
        if control.should_save:
            saves.append(step)
            clock.on_save(None, state, control)
        if control.should_training_stop:
            break
    assert asked == [1, 2, 12, 22, 32, 42, 52, 62, 72] and saves == [42, 52, 62, 72] and step == 72


def test_a_number_that_json_lacks_is_null(tmp_path):
    state = SimpleNamespace(is_world_process_zero=True, global_step=2)
    logs = {"loss": float("nan"), "own": np.float32("inf"), "array": jnp.float32(2), "epoch": 0.5, "note": "a"}
    callbacks.JsonLines(str(tmp_path / "log.jsonl")).on_log(None, state, None, logs)
    line = json.loads((tmp_path / "log.jsonl").read_text(), parse_constant=pytest.fail)
    assert line.pop("time") > 0
    assert line == {"step": 2, "loss": None, "own": None, "array": 2.0, "epoch": 0.5, "note": "a"}


def test_a_tokenizer_is_given_how_its_calls_are_read():
    from compat_tests.rollout.test_tools import CALLS, tokenizer_of

    tokenizer = tokenizer_of("json")
    tokenizer.response_template = None
    assert trl_jax.add_response_schema(tokenizer) is tokenizer
    found = tokenizer.parse_response(CALLS["json"], prefix="<|im_start|>assistant\n")
    assert found["tool_calls"][0]["function"]["name"] == "add"


def test_a_time_limit_needs_a_number():
    with pytest.raises(ValueError, match="TimeLimitCallback needs max_minutes, save_minutes, or both"):
        trl_jax.TimeLimitCallback()


def test_histograms_of_the_weights_as_documented(make, monkeypatch):
    [code] = [
        one.code for one in pages.blocks(FOLDER / "getting-started.md", "python") if "WeightHistograms" in one.code
    ]
    logged = []
    fake = SimpleNamespace(
        Histogram=lambda values: np.array(values), log=lambda values, commit: logged.append((values, commit))
    )
    monkeypatch.setitem(sys.modules, "wandb", fake)
    trainer = make(config={"max_steps": 2, "logging_steps": 1, "save_strategy": "no"})
    before = {name: np.asarray(array) for name, array in trainer.model.params.items()}
    exec(code, {"trainer": trainer})
    trainer.train()
    names = list(before)
    assert [name for values, _ in logged for name in values] == [f"weights/{name}" for name in names] * 3
    assert not any(commit for _, commit in logged)
    found = {name: values for each, _ in logged[-len(names) :] for name, values in each.items()}
    for name, array in trainer.model.params.items():
        np.testing.assert_array_equal(found[f"weights/{name}"], array)
    assert any((found[f"weights/{name}"] != array).any() for name, array in before.items())


def test_a_torch_model_is_averaged_as_by_trl(checkpoint, tmp_path):
    """In transformers' Trainer, and in trainers of the installed trl."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    theirs = pytest.importorskip("trl.trainer.callbacks").BEMACallback
    folder = checkpoint(head="causal", num_hidden_layers=1)

    def averaged(kind, out):
        model, callback = transformers.AutoModelForCausalLM.from_pretrained(folder), kind(**AVERAGE)
        args, noise = SimpleNamespace(output_dir=str(out)), torch.Generator().manual_seed(0)
        callback.on_train_begin(args, None, None, model=model)
        for step in range(1, 8):
            for weights in model.parameters():
                weights.data += torch.randn(weights.shape, generator=noise)
            callback.on_step_end(args, SimpleNamespace(global_step=step), None, model=model)
        callback.on_train_end(args, SimpleNamespace(is_world_process_zero=True), None, model=model)
        return read_weights(out / "bema")

    class Uncorrected(BEMACallback):
        def _bema_alpha(self, step):
            return 0.0

    ours, wanted = averaged(BEMACallback, tmp_path / "ours"), averaged(theirs, tmp_path / "theirs")
    assert ours.keys() == wanted.keys()
    for name, array in ours.items():
        np.testing.assert_allclose(array, wanted[name], rtol=1e-4, atol=1e-5)
    uncorrected = averaged(Uncorrected, tmp_path / "uncorrected")
    assert max(np.abs(uncorrected[name] - ours[name]).max() for name in ours) > 0.1
