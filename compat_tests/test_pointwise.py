"""A user-defined task with a thin trainer, examples/pointwise.py, supports everything a run offers without other
changes."""

from __future__ import annotations

import ast
import logging
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset, DatasetDict, IterableDataset
from safetensors.numpy import load_file
from transformers import TrainerCallback

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples"))

import jax.numpy as jnp  # noqa: E402
import pointwise  # noqa: E402
from pointwise import PointwiseConfig, PointwiseTask, PointwiseTrainer  # noqa: E402

import trl_jax  # noqa: E402
import trl_jax.tasks  # noqa: E402
from compat_tests import tiny  # noqa: E402
from compat_tests.effort import only_thorough, thorough  # noqa: E402
from compat_tests.parity.reference import BASE  # noqa: E402
from compat_tests.trainer.trainers import FACTS  # noqa: E402

EXAMPLE = ROOT / "examples" / "pointwise.py"
CLOCK = ("runtime", "per_second")
COUNT = 22  # micro-batches of 4, 4 | 4, 4 | 4, 2: the last step is ragged
CONFIG = {key: value for key, value in BASE.items() if key != "pad_to_multiple_of"} | {"gradient_accumulation_steps": 2}


def rated(n: int = COUNT, seed: int = 0) -> list[dict]:
    """Answers of 4 to about 40 tokens; good ones have ratings near 1, bad ones near -1."""
    pairs = tiny.preference_rows(n, "prompt", seed=seed)
    sides = [("chosen", 1.0), ("rejected", -1.0)]
    return [
        {"prompt": pair["prompt"], "completion": pair[sides[i % 2][0]], "rating": sides[i % 2][1] + i % 3 / 10}
        for i, pair in enumerate(pairs)
    ]


def table(n: int = COUNT, seed: int = 0) -> Dataset:
    return Dataset.from_list(rated(n, seed))


def stream(rows: list[dict]) -> IterableDataset:
    return IterableDataset.from_generator(lambda: iter(rows))


FORMS = pytest.mark.parametrize("form", [Dataset.from_list, stream], ids=["table", "stream"])


@pytest.fixture(scope="module")
def folder(checkpoint):
    return str(checkpoint(**FACTS))


@pytest.fixture
def make(folder, tmp_path):
    def make(out="out", *, rows=None, kind=PointwiseTrainer, config=None, **arguments):
        args = PointwiseConfig(str(tmp_path / out), **CONFIG | (config or {}))
        return kind(folder, args, train_dataset=table() if rows is None else rows, **arguments)

    return make


def trained(trainer, resume=None):
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def logs(trainer) -> list[dict]:
    """The log history without timings."""
    return [{k: v for k, v in log.items() if not k.endswith(CLOCK)} for log in trainer.state.log_history]


def losses(trainer) -> list[float]:
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


def errors(trainer, rows: Dataset) -> np.ndarray:
    """Score minus rating of each row: [rows]."""
    return trainer.predict(rows).predictions[:, 0] - np.asarray(rows["rating"])


# It logs, also at a ragged end of an epoch.


def test_it_logs_the_loss_and_its_metrics(make):
    trainer = make(config={"learning_rate": 0.0, "train_sampling_strategy": "sequential"})
    off = errors(trainer, table())
    trained(trainer)
    steps = [log for log in trainer.state.log_history if "loss" in log]
    assert all({"grad_norm", "learning_rate", "num_tokens", "mse", "mae"} <= log.keys() for log in steps)
    micro = [off[start : start + 4] for start in range(0, COUNT, 4)]
    for log, pair in zip(steps, (micro[:2], micro[2:4], micro[4:]), strict=True):
        assert log["loss"] == pytest.approx(np.mean([np.mean(part**2) for part in pair]), abs=1e-5)
        assert log["mse"] == pytest.approx(np.mean(np.concatenate(pair) ** 2), abs=1e-5)
        assert log["mae"] == pytest.approx(np.mean(np.abs(np.concatenate(pair))), abs=1e-5)
    assert abs(steps[2]["loss"] - steps[2]["mse"]) > 1e-4  # TRL's mean of means against the mean over rows


def test_it_learns(make):
    found = losses(trained(make(config={"num_train_epochs": 8, "learning_rate": 5e-3})))
    assert found[-1] < found[0] / 4


# It evaluates and predicts.


def test_it_evaluates_one_set_or_several(make):
    trainer = make(eval_dataset={"one": table(7, seed=1), "two": table(5, seed=2)})
    off = errors(trainer, table(7, seed=1))
    found = trainer.evaluate()
    assert found["eval_one_loss"] == pytest.approx(np.mean(off**2), abs=1e-5)
    assert found["eval_one_mse"] == pytest.approx(np.mean(off**2), abs=1e-5)
    assert found["eval_one_mae"] == pytest.approx(np.mean(np.abs(off)), abs=1e-5)
    alone = trainer.evaluate(table(5, seed=2))
    assert found["eval_two_mse"] == pytest.approx(alone["eval_mse"], abs=1e-6) and "eval_one_mse" not in alone


def test_it_predicts_every_row_in_order(make):
    trainer = make()
    one_by_one = [trainer.predict(table().select([i])).predictions[0, 0] for i in (0, 9, COUNT - 1)]
    found = trainer.predict(table()).predictions
    assert found.shape == (COUNT, 1)
    assert found[[0, 9, COUNT - 1], 0] == pytest.approx(one_by_one, abs=1e-5)
    short = make("short", config={"max_length": 20})
    assert len(short.train_dataset) < COUNT and len(short.predict(table()).predictions) == COUNT


# It supports compute_metrics, and a user-defined compute_loss.


def test_it_answers_to_compute_metrics(make):
    def worst(found):
        assert found.label_ids == ()
        return {"highest": found.predictions.max(), "rows": len(found.predictions)}

    trainer = make(eval_dataset=table(7, seed=1), compute_metrics=worst)
    found = trainer.evaluate()
    scores = trainer.predict(table(7, seed=1)).predictions
    assert found["eval_rows"] == 7 and found["eval_highest"] == pytest.approx(scores.max(), abs=1e-6)


class UserCompletionsLoss(PointwiseTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        loss = jnp.mean((outputs.logits[:, 0] - inputs["rating"]) ** 2)
        return (loss, outputs) if return_outputs else loss


class TasksLoss(PointwiseTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return super().compute_loss(model, inputs, return_outputs)


@pytest.mark.parametrize("kind", [UserCompletionsLoss, thorough(TasksLoss)])
def test_it_answers_to_a_scripts_own_loss(make, kind):
    ours, theirs = (
        trained(make(k.__name__, kind=k, eval_dataset=table(7), config={"eval_strategy": "epoch"}))
        for k in (PointwiseTrainer, kind)
    )
    for wanted, found in zip(logs(ours), logs(theirs), strict=True):
        assert found == pytest.approx(wanted, abs=1e-5)  # includes mse and mae


# It saves checkpoints, and resumes bitwise after SIGKILL.

SAVES = {"save_strategy": "steps", "save_steps": 2, "num_train_epochs": 3, "eval_strategy": "epoch"}


class Dies(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 5:
            os.kill(os.getpid(), signal.SIGKILL)


class Stops(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == 5


@pytest.mark.parametrize("killed", [False, thorough(True)])
def test_it_resumes_to_the_bit(killed, make, folder, tmp_path):
    """After a stop, or in another process after SIGKILL; faults/ tests the parts of all trainers."""
    whole = trained(make("whole", config=SAVES, eval_dataset=table(5, seed=1)))
    whole.save_model()
    if killed:
        assert elsewhere("die", folder, tmp_path / "again").returncode == -signal.SIGKILL
    else:
        trained(make("again", config=SAVES, eval_dataset=table(5, seed=1), callbacks=[Stops()]))
    left = {path.name for path in (tmp_path / "again").glob("checkpoint-*")}
    assert left and left <= {"checkpoint-2", "checkpoint-4"}
    again = trained(make("again", config=SAVES, eval_dataset=table(5, seed=1)), resume=True)
    again.save_model()
    assert logs(again) == logs(whole)
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "again")]
    assert weights[0] == weights[1]


def elsewhere(what: str, *arguments: object) -> subprocess.CompletedProcess:
    """Run the main block of this file in another process."""
    command = [sys.executable, "-m", "compat_tests.light", "compat_tests.test_pointwise", what, *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)


# It packs, and trains on several devices.


@only_thorough
@pytest.mark.parametrize("layout", [thorough("packed"), thorough("shared"), "auto"])
def test_it_packs(make, layout, caplog):
    with caplog.at_level(logging.INFO, "trl_jax"):
        padded, packed = (
            trained(make(name, config={"batch_layout": name, "log_level": "info"}, eval_dataset=table(7)))
            for name in ("padded", layout)
        )
    kinds = [text.split()[1].strip(":.") for text in caplog.messages if text.startswith("Layout ")]
    assert kinds == ["padded", "shared" if layout == "auto" else layout]
    assert losses(packed) == pytest.approx(losses(padded), abs=1e-5)
    assert packed.evaluate()["eval_mse"] == pytest.approx(padded.evaluate()["eval_mse"], abs=1e-5)


@only_thorough
def test_it_trains_on_several_devices(make, folder, tmp_path):
    ours = trained(make(config={"per_device_train_batch_size": 2} | TWO))
    run = elsewhere("fsdp", folder, tmp_path / "two")
    assert run.returncode == 0, run.stderr[-3000:]
    [shown] = re.findall(r"^losses (.+)$", run.stdout, flags=re.M)
    assert [float(one) for one in shown.split()] == pytest.approx(losses(ours), abs=1e-5)


TWO = {"gradient_accumulation_steps": 2, "max_steps": 5}  # steps of 4 rows; 5 of them are an epoch except for two rows


# It is exported for transformers, and trains with an adapter.


def test_transformers_scores_what_it_saved_the_same(make, tmp_path):
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    trainer = trained(make())
    trainer.save_model()
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert scores(model, AutoTokenizer.from_pretrained(tmp_path / "out")) == pytest.approx(
        trainer.predict(table(5)).predictions[:, 0], abs=1e-5
    )


@only_thorough
def test_an_adapter_trains(make, folder, tmp_path):
    from peft import AutoPeftModelForSequenceClassification
    from transformers import AutoTokenizer

    trainer = make(peft_config=trl_jax.LoraConfig(r=4, target_modules="all-linear"), config={"num_train_epochs": 4})
    base = {path: np.array(array) for path, array in trainer.model.frozen.items()}
    found = losses(trained(trainer))
    assert found[-1] < found[0]
    for path, array in base.items():
        np.testing.assert_array_equal(array, trainer.model.frozen[path], err_msg=path)
    trainer.save_model()
    assert set(load_file(tmp_path / "out" / "adapter_model.safetensors"))
    model = AutoPeftModelForSequenceClassification.from_pretrained(tmp_path / "out", num_labels=1)
    assert scores(model, AutoTokenizer.from_pretrained(folder)) == pytest.approx(
        trainer.predict(table(5)).predictions[:, 0], abs=1e-5
    )


def scores(model, tokenizer) -> list[float]:
    """The torch model's scores of the first five rows."""
    texts = [row["prompt"] + row["completion"] + tokenizer.eos_token for row in rated(5)]
    return [model(**tokenizer(text, return_tensors="pt")).logits.item() for text in texts]


# Rows: from a table or a stream, ended with EOS, not too long, with the required columns.


def test_a_stream_trains_as_a_table(make):
    config = {"max_steps": 3, "train_sampling_strategy": "sequential"}
    assert losses(trained(make("stream", rows=stream(rated()), config=config))) == losses(trained(make(config=config)))


@FORMS
def test_texts_end_with_eos_and_are_prepared_once(make, form):
    trainer = make(rows=form([*rated(4), rated(1)[0] | {"completion": "done</s>"}]), config={"max_steps": 1})
    rows = list(trainer.train_dataset)
    end = trainer.processing_class.eos_token_id
    assert all(row["input_ids"][-1] == end and row["input_ids"].count(end) == 1 for row in rows)
    assert [row["completion"] for row in rows][:4] == [row["completion"] for row in rated(4)]
    ids_alone = form([{"input_ids": row["input_ids"], "rating": row["rating"]} for row in rows])
    again = trainer.prepare_dataset(ids_alone, "train")
    assert [row["input_ids"] for row in again] == [row["input_ids"] for row in rows]


@FORMS
def test_rows_that_are_too_long_are_left_out_with_a_warning(make, form, caplog):
    trainer = make(rows=form(rated()), config={"max_length": 20, "max_steps": 1})
    kept = [len(row["input_ids"]) for row in trainer.train_dataset]
    every = [len(row["input_ids"]) for row in trainer.prepare_dataset(table(), "train", bounded=False)]
    assert kept == [tokens for tokens in every if tokens <= 20] and 0 < len(kept) < COUNT
    said = f"removed {COUNT - len(kept)} of {COUNT} rows of train_dataset" if form is not stream else "removes row "
    assert f"max_length=20 {said}" in caplog.text


def test_no_row_is_left(make):
    with pytest.raises(ValueError, match="max_length=2 removes all 22 rows of train_dataset: the shortest row has "):
        make(config={"max_length": 2})


def without(column: str) -> dict:
    return {name: value for name, value in rated(1)[0].items() if name != column}


BAD = [
    (
        without("rating"),
        "train_dataset must have the columns ['prompt', 'completion', 'rating'], got ['prompt', 'compl",
    ),
    (without("prompt"), "got ['completion', 'rating']: ['prompt'] are missing."),
    (
        rated(1)[0] | {"rating": "good"},
        "Row 0 of train_dataset, column 'rating': must be a finite number, got 'good' (str)",
    ),
    (rated(1)[0] | {"rating": None}, "Row 0 of train_dataset, column 'rating': must be a finite number, got None"),
    (
        rated(1)[0] | {"rating": float("inf")},
        "Row 0 of train_dataset, column 'rating': must be a finite number, got inf (float)",
    ),
    (rated(1)[0] | {"completion": None}, "Row 0 of train_dataset, column 'completion': must be a string, got None"),
    (rated(1)[0] | {"prompt": [1]}, "Row 0 of train_dataset, column 'prompt': must be a string, got [1] (list)"),
]


@FORMS
@pytest.mark.parametrize(("row", "text"), BAD, ids=lambda part: part[-40:] if isinstance(part, str) else "")
def test_bad_rows_are_refused_by_name(make, form, row, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        list(make(rows=form([row]), config={"max_steps": 1}).train_dataset)


def test_a_row_of_a_stream_that_lacks_what_the_first_has(make):
    rows = stream([rated(1)[0], without("rating")])
    with pytest.raises(ValueError, match=re.escape("Row 1 of train_dataset lacks the columns ['rating'], which the")):
        list(make(rows=rows, config={"max_steps": 1}).train_dataset)


@FORMS
def test_a_number_that_is_optional_may_be_missing_and_is_checked_where_it_is_not(make, form):
    class Optional(PointwiseTask):
        columns = PointwiseTask.columns._replace(optional=("rating",))

    class OptionalTrainer(PointwiseTrainer):
        def make_task(self):
            return Optional()

    rows = list(make(kind=OptionalTrainer, rows=form([without("rating")]), config={"max_steps": 1}).train_dataset)
    assert rows[0]["input_ids"] and "rating" not in rows[0]
    with pytest.raises(ValueError, match=re.escape("column 'rating': must be a finite number, got 'good' (str)")):
        row = rated(1)[0] | {"rating": "good"}
        list(make(kind=OptionalTrainer, rows=form([row]), config={"max_steps": 1}).train_dataset)


@pytest.mark.parametrize(
    ("rows", "error", "text"),
    [
        (DatasetDict(train=table(2)), TypeError, "train_dataset must be a Dataset or IterableDataset"),
        (table(2).select([]), ValueError, "train_dataset is empty"),
        (stream([]), ValueError, "train_dataset is empty"),
    ],
)
def test_what_is_no_dataset_is_refused(make, rows, error, text):
    with pytest.raises(error, match=text):
        make(rows=rows, config={"max_steps": 1})


# Its arguments and its card.


def test_arguments_of_its_own_config_are_checked(tmp_path):
    with pytest.raises(ValueError, match="^max_length must be a whole number of at least 1 or None, got 0"):
        PointwiseConfig(str(tmp_path), max_length=0)
    with pytest.raises(ValueError, match="^batch_layout='mixed'"):
        PointwiseConfig(str(tmp_path), batch_layout="mixed")


def test_without_args_it_makes_its_own_config(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer = PointwiseTrainer(folder, train_dataset=table(4))
    assert type(trainer.args) is PointwiseConfig
    assert trainer.args.output_dir == f"{Path(folder).name}-Pointwise" and trainer.args.max_length == 1024


def test_what_it_has_no_use_for_is_refused(make, folder, tmp_path):
    with pytest.raises(TypeError, match="expected a PointwiseConfig"):
        PointwiseTrainer(folder, trl_jax.RewardConfig(str(tmp_path)), train_dataset=table(4))
    with pytest.raises(ValueError, match="data_collator="):
        make(data_collator=dict)


def test_its_card_names_it_and_no_other_trainer(make, tmp_path):
    make().create_model_card()
    card = (tmp_path / "out" / "README.md").read_text()
    assert "- pointwise\n" in card and "reward-trainer" not in card


# The example is short, uses only public names, and shows that it learns.


def test_the_example_is_short():
    assert len(EXAMPLE.read_text().splitlines()) <= 90


def test_the_example_imports_public_names():
    tree = ast.parse(EXAMPLE.read_text())
    found = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and "trl_jax" in node.module]
    public = {"trl_jax": trl_jax.__all__, "trl_jax.tasks": trl_jax.tasks.__all__}
    assert len(found) == 2 and all({name.name for name in node.names} <= {*public[node.module]} for node in found)
    plain = {name.name.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    assert "trl_jax" not in plain
    private = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr.startswith("_")}
    assert not private


@only_thorough
def test_the_example_learns(tmp_path, capsys):
    pointwise.main(tmp_path)
    shown = re.search(r"held-out rows: (\S+), after training (\S+)\.$", capsys.readouterr().out)
    before, after = map(float, shown.groups())
    assert before > 0.5 and after < before / 4


def die(folder: str, out: str) -> None:
    args = PointwiseConfig(out, **CONFIG | SAVES)
    PointwiseTrainer(folder, args, train_dataset=table(), eval_dataset=table(5, seed=1), callbacks=[Dies()]).train()


def fsdp(folder: str, out: str) -> None:
    import jax

    jax.config.update("jax_num_cpu_devices", 2)
    config = {"per_device_train_batch_size": 1, "mesh_shape": "fsdp:2", "fsdp_config": {"min_num_params": 1}}
    trainer = PointwiseTrainer(folder, PointwiseConfig(out, **CONFIG | TWO | config), train_dataset=table())
    trainer.train()
    parts = [array for array in trainer.model.params.values() if array.addressable_shards[0].data.size < array.size]
    assert parts and trainer.sharding_plan.shards == 2
    print("losses", *losses(trainer))


if __name__ == "__main__":
    {"die": die, "fsdp": fsdp}[sys.argv[1]](*sys.argv[2:])
