"""KTOTrainer: how it prepares rows, its references, evaluation and resuming, warnings and errors."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import numpy as np
import pytest
import transformers
from datasets import Dataset, IterableDataset

import trl_jax
from compat_tests.effort import only_thorough, thorough
from compat_tests.parity.kto_cases import CHAT, SMALL, kto_rows
from compat_tests.parity.reference import BASE
from compat_tests.parity.test_dpo_curve import assert_same
from trl_jax.training.reference import PREFIX

STEPS = {"max_steps": 3, "learning_rate": 1e-2, "beta": 0.3, "max_length": 64}
IDS = ("prompt_ids", "completion_ids", "KL_completion_ids", "label")


def table(n=16, **options):
    return Dataset.from_list(kto_rows(n, **options))


def make(package, model, out, config=None, **arguments):
    args = package.KTOConfig(str(out), **(BASE | STEPS | (config or {})))
    model = str(model) if isinstance(model, Path) else model
    return package.KTOTrainer(model, args=args, **{"train_dataset": table()} | arguments)


def trained(*given, **options):
    trainer = make(*given, **options)
    trainer.train()
    return trainer


def steps(trainer):
    return [entry for entry in trainer.state.log_history if "loss" in entry]


@pytest.fixture
def model(checkpoint):
    return checkpoint(**SMALL)


def test_fields_and_defaults_are_trls():
    trl = pytest.importorskip("trl")

    def facts(kind):
        found = [f for f in dataclasses.fields(kind) if f.init and not f.kw_only and f.name != "output_dir"]
        return [(f.name, f.default, f.default_factory) for f in found]

    assert facts(trl_jax.KTOConfig) == facts(trl.KTOConfig)


@pytest.mark.parametrize(
    ("rows", "config"),
    [
        ({"n": 9}, {"max_length": 14}),
        ({"n": 6, "kind": "text", "paired": True}, {"max_length": None}),
        thorough({"n": 1003, "kind": "chat_prompt", "paired": True}, {"per_device_train_batch_size": 3}),
        ({"n": 11, "kind": "chat_prompt", "paired": True}, {"per_device_train_batch_size": 3}),
        ({"n": 7, "kind": "chat_prompt"}, {"loss_type": "apo_zero_unpaired"}),
    ],
)
def test_prepared_rows_are_trls(checkpoint, tmp_path, rows, config):
    trl = pytest.importorskip("trl")
    folder, dataset = checkpoint(**CHAT), table(**rows).add_column("extra", list(range(rows["n"])))
    ours, theirs = (
        make(package, folder, tmp_path, config, train_dataset=dataset).train_dataset for package in (trl_jax, trl)
    )
    estimates = "loss_type" not in config
    for column in ("prompt_ids", "completion_ids", "label", "extra", *(["KL_completion_ids"] if estimates else [])):
        assert ours[column] == theirs[column]
    for row in ours:
        for side in ("", "KL_") if estimates else ("",):
            whole = row["prompt_ids"] + row[f"{side}completion_ids"]
            assert row[f"{side}completion_input_ids"] == whole[: config.get("max_length", 64)]
    assert estimates == ("KL_completion_ids" in ours.column_names)


def test_rows_that_are_tokenized_are_taken_as_they_are(model, tmp_path):
    prepared = make(trl_jax, model, tmp_path).train_dataset
    ids = prepared.select_columns(["prompt_ids", "completion_ids", "label"])
    found = make(trl_jax, model, tmp_path, train_dataset=ids).train_dataset
    assert found[:] == prepared.select_columns(found.column_names)[:] and "KL_completion_labels" in found.column_names
    again = make(trl_jax, model, tmp_path, {"max_length": 9}, train_dataset=prepared).train_dataset
    assert again["KL_completion_labels"] == [labels[:9] for labels in prepared["KL_completion_labels"]]


def test_processes_do_not_change_the_blocks(model, tmp_path):
    one, two = (
        make(trl_jax, model, tmp_path, {"dataset_num_proc": count}, train_dataset=table(7, kind="text", paired=True))
        for count in (None, 2)
    )
    assert one.train_dataset[:] == two.train_dataset[:]


@only_thorough
def test_a_stream_trains_as_its_table_does(model, tmp_path):
    rows = kto_rows(14)
    stream = IterableDataset.from_generator(lambda: iter(rows))
    streamed, read = (trained(trl_jax, model, tmp_path, train_dataset=data) for data in (stream, table(14)))
    assert steps(streamed) == [{**entry, "epoch": entry["step"] / 3} for entry in steps(read)]
    pairs = IterableDataset.from_generator(lambda: iter(kto_rows(4, "text", paired=True)))
    found = list(make(trl_jax, model, tmp_path, train_dataset=pairs).train_dataset)
    table_of_pairs = table(4, kind="text", paired=True)
    wanted = list(make(trl_jax, model, tmp_path, train_dataset=table_of_pairs).train_dataset)
    assert [{name: row[name] for name in IDS} for row in found] == [{name: row[name] for name in IDS} for row in wanted]


def test_the_collator_of_a_trainer_is_trls(model, tmp_path):
    trl = pytest.importorskip("trl")
    ours, theirs = (make(package, model, tmp_path, {"max_length": 14}) for package in (trl_jax, trl))
    found, wanted = (trainer.data_collator([theirs.train_dataset[at] for at in range(3)]) for trainer in (ours, theirs))
    assert list(found) == list(wanted)
    for name, values in wanted.items():
        assert found[name].tolist() == values.tolist()


# DPO's test always runs the other case.
@pytest.mark.parametrize("config", [thorough({}), {"precompute_ref_log_probs": True}])
def test_under_a_new_adapter_the_reference_is_the_model_without_it(model, tmp_path, config):
    trl, peft = pytest.importorskip("trl"), pytest.importorskip("peft")
    lora = {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "up_proj"], "task_type": "CAUSAL_LM"}
    ours = trained(trl_jax, model, tmp_path / "a", config, peft_config=trl_jax.LoraConfig(**lora))
    theirs = trained(trl, model, tmp_path / "b", config, peft_config=peft.LoraConfig(**lora))
    assert steps(theirs)[-1]["kl"] > 0
    for mine, wanted in zip(steps(ours), steps(theirs), strict=True):
        assert_same(mine, wanted)
    assert not [path for path in ours.parts.setup.frozen if path.startswith(PREFIX)]


def test_a_given_reference_is_trls(checkpoint, model, tmp_path):
    trl, transformers = pytest.importorskip("trl"), pytest.importorskip("transformers")
    other = checkpoint(**SMALL, seed=5)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(other, dtype="float32")
    ours, theirs = (
        trained(package, model, tmp_path / package.__name__, ref_model=reference)
        for package, reference in ((trl_jax, str(other)), (trl, loaded))
    )
    assert abs(steps(theirs)[0]["rewards/chosen"]) > 0.01
    for mine, wanted in zip(steps(ours), steps(theirs), strict=True):
        assert_same(mine, wanted)


@pytest.mark.parametrize("door", ["trl_jax", "transformers"])
def test_a_copy_of_the_model_is_the_reference_that_there_is_without_one(model, tmp_path, door):
    policy = pytest.importorskip(door).AutoModelForCausalLM.from_pretrained(str(model), dtype="float32")
    copied = trl_jax.create_reference_model(policy)
    given, none = (trained(trl_jax, policy, tmp_path, {"max_steps": 2}, ref_model=it) for it in (copied, None))
    assert steps(given)[0]["rewards/chosen"] == 0 != steps(given)[1]["rewards/chosen"]
    with pytest.raises(ValueError, match="num_shared_layers=1: a reference shares no layers"):
        trl_jax.create_reference_model(policy, num_shared_layers=1)
    assert steps(none)[0]["rewards/chosen"] == 0 and steps(none)[0]["logps/chosen"] != steps(given)[0]["logps/chosen"]


@only_thorough
def test_an_evaluation_is_of_the_set_and_not_of_its_batches(model, tmp_path):
    """TRL's margins average only batches that have both kinds, so they are not the difference of its mean rewards."""
    held_out = table(11, seed=3)
    small, large = (
        trained(trl_jax, model, tmp_path, {"per_device_eval_batch_size": size}).evaluate(held_out) for size in (2, 16)
    )
    for key in ("entropy", "logits/chosen", "rewards/rejected", "logps/chosen", "rewards/margins"):
        assert small[f"eval_{key}"] == pytest.approx(large[f"eval_{key}"], rel=1e-4)
    assert small["eval_rewards/margins"] == pytest.approx(small["eval_rewards/chosen"] - small["eval_rewards/rejected"])


def test_a_resumed_run_goes_on_to_the_bit(model, tmp_path):
    saved = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    whole = trained(trl_jax, model, tmp_path, saved)
    again = make(trl_jax, model, tmp_path, saved)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert steps(again) == steps(whole) and whole.args.train_sampling_strategy == "sequential"


def test_tokens_of_other_rows_answers_are_not_counted(model, tmp_path):
    counted = {"include_num_input_tokens_seen": "non_padding", "max_steps": 1}
    trainer = trained(trl_jax, model, tmp_path, counted)
    ids = trainer.train_dataset[:4]["completion_input_ids"]
    assert steps(trainer)[0]["num_tokens"] == trainer.state.num_input_tokens_seen == sum(map(len, ids))


@pytest.mark.parametrize(
    ("rows", "config", "words"),
    [
        ({"n": 5}, {"desirable_weight": 0.7}, ["The last row of train_dataset is the only row in its batch"]),
        ({"n": 4, "paired": True}, {}, ["a micro-batch holds only one kind"]),
        ({"n": 8, "share": 1.0}, {}, ["EITHER desirable_weight in [0.12, 0.17] or undesirable_weight in [6.02, 8.0]"]),
        ({"n": 4, "share": 1.0}, {"desirable_weight": 0.3}, []),
    ],
)
def test_what_it_warns_of(model, tmp_path, caplog, rows, config, words):
    make(trl_jax, model, tmp_path, config, train_dataset=table(**rows), eval_dataset=table(8))
    warned = (record for record in caplog.records if record.levelno >= logging.WARNING)
    told = [record.getMessage() for record in warned if record.name.startswith("trl_jax")]
    # Logged only once per process.
    told = [text for text in told if not text.startswith("The tokenized prompt is not a prefix")]
    assert len(told) == len(words) and all(part in text for part, text in zip(words, told, strict=True))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"train_sampling_strategy": "random"}, "Loss type `'kto'` estimates the KL divergence term and requires"),
        ({"per_device_train_batch_size": 1}, r"Actual \(not effective\) batch size must be > 1"),
        ({"loss_type": "nothing"}, "loss_type='nothing' .*supported: kto, apo_zero_unpaired"),
        ({"sync_ref_model": True, "precompute_ref_log_probs": True}, "together with `precompute_ref_log_probs=True`"),
        ({"desirable_weight": -1.0}, "desirable_weight must be a number of at least 0, got -1.0"),
    ],
)
def test_arguments_that_are_refused(model, tmp_path, config, words):
    with pytest.raises(ValueError, match=words):
        make(trl_jax, model, tmp_path, config)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"prompt": "a", "completion": "b"}], "must have the columns 'prompt', 'completion' and 'label', or 'chosen'"),
        (
            [{"prompt": "a", "completion": "b", "label": 2}],
            "Row 0 of train_dataset, column 'label': must be true for a desirable answer, false for any other, got 2",
        ),
        (
            [{"prompt": "a", "completion": "b", "label": None}],
            "column 'label': must be true for a desirable answer, false for any other, got None",
        ),
        ([{"prompt": "a", "completion": None, "label": True}], "Row 0 of train_dataset, column 'completion'"),
        ([{"prompt": "a", "chosen": "b", "rejected": 3}], "Row 1 of the unpaired train_dataset, column 'completion'"),
    ],
)
def test_rows_that_are_refused(model, tmp_path, rows, words):
    with pytest.raises(ValueError, match=words):
        make(trl_jax, model, tmp_path, train_dataset=Dataset.from_list(rows))


def test_arguments_of_earlier_releases(model, tmp_path):
    with pytest.warns(FutureWarning, match="desirable_weight is an argument of KTOConfig"):
        assert make(trl_jax, model, tmp_path, desirable_weight=0.3).args.desirable_weight == 0.3
    gone = {"max_completion_length": 9, "generate_during_eval": True, "truncation_mode": "keep_end"}
    for name, value in gone.items():
        with pytest.raises(TypeError, match=f"{name}={value!r}"):
            trl_jax.KTOConfig(str(tmp_path), use_cpu=True, **{name: value})
    with pytest.warns(FutureWarning, match="label_pad_token_id no longer has an effect"):
        trl_jax.KTOConfig(str(tmp_path), use_cpu=True, label_pad_token_id=-100)
    with pytest.raises(TypeError, match="model_adapter_name"):
        make(trl_jax, model, tmp_path, model_adapter_name="other")


def shares(found):
    """Metrics as user scripts write them: from the logits of every position and the token ids."""
    logits, ids = found.predictions[:, :-1], found.label_ids[:, 1:]
    real = ids > 0
    return {"right": float((np.argmax(logits, -1) == ids)[real].mean()), "targets": int(real.sum())}


@pytest.mark.filterwarnings("ignore::FutureWarning")
# DPO's test always runs the other case.
@pytest.mark.parametrize("config", [{}, thorough({"precompute_ref_log_probs": True})])
def test_compute_metrics_and_predict_give_what_trl_gives(config, model, checkpoint, tmp_path):
    """The reference is another model, so that rewards are not just rounding errors around 0."""
    trl, found, folder = pytest.importorskip("trl"), {}, checkpoint(**SMALL | {"seed": 5})
    config = config | {"pad_to_multiple_of": None, "per_device_eval_batch_size": 8}
    for package, models in ((trl_jax, trl_jax), (trl, transformers)):
        reference = models.AutoModelForCausalLM.from_pretrained(folder)
        trainer = make(package, model, tmp_path / package.__name__, config, ref_model=reference,
                       compute_metrics=shares, eval_dataset=table(8, seed=4))  # fmt: skip
        found[package] = trainer.evaluate(), trainer.predict(trainer.eval_dataset)
    (mine, ours), (other, theirs) = found[trl_jax], found[trl]
    assert_same(mine, other)
    assert mine["eval_targets"] == other["eval_targets"] > 0
    assert np.array_equal(ours.label_ids, theirs.label_ids) and ours.predictions.shape == theirs.predictions.shape
    real = theirs.label_ids > 0
    assert np.abs(ours.predictions[real] - theirs.predictions[real]).max() < 1e-4
    assert ours.metrics["test_loss"] == pytest.approx(theirs.metrics["test_loss"], abs=1e-5)


def test_max_prompt_length_keeps_the_end_of_prompts_of_long_texts(model, tmp_path):
    """As in the TRL releases that had it, whose truncation_mode was "keep_end"."""
    whole = make(trl_jax, model, tmp_path, {"max_length": None}).train_dataset
    lengths = [len(row["prompt_ids"]) + len(row["completion_ids"]) for row in whole]
    middle = sorted(lengths)[len(lengths) // 2]
    limits = {"max_length": middle, "max_prompt_length": 3}
    with pytest.warns(FutureWarning, match="max_prompt_length=3 is deprecated") as told:
        rows = make(trl_jax, model, tmp_path, limits).train_dataset
    assert len([one for one in told if "max_prompt_length" in str(one.message)]) == 1
    assert len(rows) == len(whole) and max(map(len, whole["prompt_ids"])) > 3
    for row, before, length in zip(rows, whole, lengths, strict=True):
        prompt = before["prompt_ids"] if length <= middle else before["prompt_ids"][-3:]
        assert row["prompt_ids"] == prompt
        assert row["completion_input_ids"] == (prompt + before["completion_ids"])[:middle]
        assert row["completion_labels"] == ([-100] * len(prompt) + before["completion_ids"])[:middle]
        assert row["KL_completion_input_ids"] == (prompt + before["KL_completion_ids"])[:middle]
    joined = [name for name in whole.column_names if name.endswith(("input_ids", "labels"))]
    texts = whole.select_columns([*joined, "label"])
    with pytest.warns(FutureWarning, match="max_prompt_length=3 is deprecated"):
        again = make(trl_jax, model, tmp_path, limits, train_dataset=texts).train_dataset
    for name in ("completion_input_ids", "completion_labels"):
        assert again[name][:] == rows[name][:]


def test_the_kl_of_an_evaluation_is_the_mean_of_its_batches_estimates(model, tmp_path):
    """Each batch's estimate is at least 0, as in the loss; the divergence of the whole set may be negative."""
    trl = pytest.importorskip("trl")
    config = {"per_device_eval_batch_size": 2, "max_steps": 1}
    rows = {"eval_dataset": table(12, seed=2)}
    ours, theirs = (trained(package, model, tmp_path, config, **rows) for package in (trl_jax, trl))
    found, wanted = ours.evaluate(), theirs.evaluate()
    for name in ("eval_loss", "eval_kl"):
        assert found[name] == pytest.approx(wanted[name], rel=1e-3)
    assert wanted["eval_kl"] > 0.1
