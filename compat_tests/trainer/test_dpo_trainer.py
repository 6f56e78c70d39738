"""DPOTrainer: its four kinds of references, how it prepares rows, evaluates, saves and resumes, and its errors."""

from __future__ import annotations

import copy
import dataclasses
import math
import warnings
from functools import partial

import numpy as np
import pytest
import transformers
from datasets import Dataset, IterableDataset

import trl_jax
from compat_tests.effort import only_thorough, thorough
from compat_tests.parity.dpo_cases import CHAT, SMALL
from compat_tests.parity.marks import timeless
from compat_tests.parity.reference import BASE, read_weights
from compat_tests.parity.test_dpo_curve import assert_same
from compat_tests.tiny import preference_rows
from trl_jax.tasks.dpo import DpoTask
from trl_jax.trainer.collators import DataCollatorForPreference

STEPS = {"max_steps": 3, "learning_rate": 3e-3, "max_length": 64}


def table(n=16, kind="prompt", seed=0):
    return Dataset.from_list(preference_rows(n, kind, seed=seed))


def make(package, model, out, config=None, **arguments):
    args = package.DPOConfig(str(out), **(BASE | STEPS | (config or {})))
    arguments.setdefault("train_dataset", table())
    return package.DPOTrainer(str(model) if hasattr(model, "joinpath") else model, args=args, **arguments)


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
        return [
            (f.name, f.default_factory() if f.default is dataclasses.MISSING else f.default)
            for f in dataclasses.fields(kind)
            if f.init and not f.kw_only and (f.default is not dataclasses.MISSING or f.default_factory is not None)
        ]

    assert [fact for fact in facts(trl_jax.DPOConfig) if fact[0] != "output_dir"] == [
        fact for fact in facts(trl.DPOConfig) if fact[0] != "output_dir"
    ]


@pytest.mark.parametrize("kind", ["text", "prompt", "chat", "chat_prompt"])
@pytest.mark.parametrize("limit", [{}, {"max_length": 30}, {"max_length": None}])
def test_prepared_rows_are_trls(checkpoint, tmp_path, kind, limit):
    trl = pytest.importorskip("trl")
    folder = checkpoint(**CHAT)
    rows = table(12, kind)
    ours, theirs = (
        make(package, folder, tmp_path, limit, train_dataset=rows).train_dataset for package in (trl_jax, trl)
    )
    for column in ("prompt_ids", "chosen_ids", "rejected_ids"):
        assert ours[column] == theirs[column]
    for row in ours:
        assert row["chosen_input_ids"] == (row["prompt_ids"] + row["chosen_ids"])[: limit.get("max_length", 64)]


def test_a_given_reference_is_trls(checkpoint, model, tmp_path):
    trl = pytest.importorskip("trl")
    other = checkpoint(**SMALL, seed=5)
    from transformers import AutoModelForCausalLM

    theirs = trained(trl, model, tmp_path / "b", ref_model=AutoModelForCausalLM.from_pretrained(other, dtype="float32"))
    ours = trained(trl_jax, model, tmp_path / "a", ref_model=str(other))
    assert abs(steps(theirs)[0]["rewards/chosen"]) > 0.01
    for mine, wanted in zip(steps(ours), steps(theirs), strict=True):
        assert_same(mine, wanted)


@only_thorough
@pytest.mark.parametrize("config", [thorough({}), {"sync_ref_model": True, "ref_model_sync_steps": 2}])
def test_a_reference_keeps_the_dtype_that_it_has(checkpoint, model, tmp_path, config):
    """In 16 bits it needs half the memory, and computes in 16 bits, however it was passed."""
    trl = pytest.importorskip("trl")
    from transformers import AutoModelForCausalLM

    other, mark = checkpoint(**SMALL, seed=5, dtype="bfloat16"), 4e-3  # bfloat16 rounding; the shift is 0.06
    theirs = trained(trl, model, tmp_path / "b", config, ref_model=AutoModelForCausalLM.from_pretrained(other))
    doors = [str(other), AutoModelForCausalLM.from_pretrained(other)]
    for door in [*doors, trl_jax.AutoModelForCausalLM.from_pretrained(str(other))]:
        trainer = make(trl_jax, model, tmp_path / "a", config, ref_model=door)
        reference, policy = trainer.parts.setup.reference, trainer.model.arrays
        assert reference.dtype == "bfloat16"
        assert 2 * sum(array.nbytes for array in reference.arrays.values()) == sum(a.nbytes for a in policy.values())
        assert {array.dtype.name for array in trainer.ref_model.params.values()} == {"bfloat16"}
        if door is doors[0]:
            trainer.train()
            for mine, wanted in zip(steps(trainer), steps(theirs), strict=True):
                for name in ("loss", "rewards/margins"):
                    assert mine[name] == pytest.approx(wanted[name], abs=mark)


# KTO's test always runs the other case.
def test_biases_that_train_do_not_move_the_reference(checkpoint, tmp_path):
    """TRL's reference has the biases that the policy trains, unless its log-probabilities are computed before."""
    trl, peft = pytest.importorskip("trl"), pytest.importorskip("peft")
    folder = checkpoint(**SMALL, model_type="qwen2")

    def losses(package, kind, config):
        adapter = kind(r=4, target_modules=["q_proj", "v_proj"], bias="lora_only", task_type="CAUSAL_LM")
        run = trained(package, folder, tmp_path / package.__name__, {"max_steps": 2} | config, peft_config=adapter)
        return [entry["loss"] for entry in steps(run)]

    ours = losses(trl_jax, trl_jax.LoraConfig, {})
    assert ours == pytest.approx(losses(trl, peft.LoraConfig, {"precompute_ref_log_probs": True}), rel=1e-5)
    assert abs(ours[1] - losses(trl, peft.LoraConfig, {})[1]) > 1e-4


@pytest.mark.parametrize("config", [{}, thorough({"precompute_ref_log_probs": True})])
def test_under_a_new_adapter_the_reference_is_the_model_without_it(model, tmp_path, config):
    trl, peft = pytest.importorskip("trl"), pytest.importorskip("peft")
    lora = {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "up_proj"], "task_type": "CAUSAL_LM"}
    ours = trained(trl_jax, model, tmp_path / "a", config, peft_config=trl_jax.LoraConfig(**lora))
    theirs = trained(trl, model, tmp_path / "b", config, peft_config=peft.LoraConfig(**lora))
    assert steps(theirs)[-1]["rewards/chosen"] != 0
    for mine, wanted in zip(steps(ours), steps(theirs), strict=True):
        assert_same(mine, wanted)
    assert not [path for path in ours.parts.setup.frozen if path.startswith("reference.")]


def test_an_adapter_that_trains_further_is_compared_with_a_copy_of_it(model, tmp_path):
    lora = trl_jax.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    first = trained(trl_jax, model, tmp_path / "a", peft_config=lora)
    first.save_model(str(tmp_path / "adapter"))
    second = trained(trl_jax, tmp_path / "adapter", tmp_path / "b")
    assert steps(second)[0]["loss"] == pytest.approx(np.log(2), abs=1e-6)
    assert steps(second)[-1]["rewards/chosen"] != 0


def test_the_policy_in_memory_is_its_own_reference(model, tmp_path):
    policy = trl_jax.AutoModelForCausalLM.from_pretrained(str(model), dtype="float32")
    policy.params = {path: array * 1.01 for path, array in policy.params.items()}
    trainer = trained(trl_jax, policy, tmp_path)
    assert steps(trainer)[0]["loss"] == pytest.approx(np.log(2), abs=1e-6)
    with pytest.raises(ValueError, match="cannot be the same object"):
        make(trl_jax, policy, tmp_path, ref_model=policy)


def test_trls_collator_says_to_which_length_rows_are_padded(model, tmp_path):
    collator = DataCollatorForPreference(pad_token_id=0, max_length=64, pad_to_multiple_of=48)
    trainer = make(trl_jax, model, tmp_path, {"batch_layout": "padded"}, data_collator=collator)
    [batch, *_] = trainer.get_train_dataloader().steps
    assert batch.arrays.tokens.shape[-1] % 48 == 0
    with pytest.raises(ValueError, match="data_collator has max_length=None, the arguments max_length=64"):
        make(trl_jax, model, tmp_path, data_collator=DataCollatorForPreference(pad_token_id=0))
    with pytest.raises(ValueError, match="data_collator=.* is not in this release"):
        make(trl_jax, model, tmp_path, data_collator=print)


@only_thorough  # parity/test_dpo_curve.py compares both with TRL
def test_a_precomputed_reference_is_the_live_one(model, tmp_path):
    live, before = (
        trained(trl_jax, model, tmp_path / str(flag), {"precompute_ref_log_probs": flag, "batch_layout": "padded"})
        for flag in (False, True)
    )
    for one, other in zip(steps(live), steps(before), strict=True):
        assert_same(other, one)
    assert before.parts.setup.reference is None
    with pytest.raises(ValueError, match="Cannot compute reference log-probs for a dataset passed"):
        before.evaluate(table(4, seed=3))


def test_an_evaluation_is_trls_of_one_batch(model, tmp_path):
    """With several batches, TRL logs the mean of the batch means; we log the mean over the set."""
    trl = pytest.importorskip("trl")
    pairs, one_batch = {"eval_dataset": table(8, seed=4)}, {"per_device_eval_batch_size": 8}
    ours, theirs = (
        trained(package, model, tmp_path / package.__name__, one_batch, **pairs) for package in (trl_jax, trl)
    )
    assert_same(ours.evaluate(), theirs.evaluate())
    raw = table(8, seed=5)
    assert_same(ours.evaluate(raw), theirs.evaluate(raw))


def test_a_resumed_run_goes_on_to_the_bit_and_saves_no_reference(model, tmp_path):
    saved = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    whole = trained(trl_jax, model, tmp_path / "a", saved)
    again = make(trl_jax, model, tmp_path / "a", saved)
    again.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    assert steps(again) == steps(whole)
    names = read_weights(tmp_path / "a" / "checkpoint-2").keys()
    assert names == read_weights(model).keys()


def test_a_reference_that_follows_the_policy_is_resumed_to_the_bit(model, tmp_path):
    follows = {"sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.3}
    saved = {"save_strategy": "steps", "save_steps": 3, "max_steps": 5} | follows
    whole = trained(trl_jax, model, tmp_path / "a", saved)
    again = make(trl_jax, model, tmp_path / "a", saved)
    again.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-3"))
    assert steps(again) == steps(whole) != steps(trained(trl_jax, model, tmp_path / "b", {"max_steps": 5}))
    assert read_weights(tmp_path / "a" / "checkpoint-3").keys() == read_weights(model).keys()


@only_thorough
def test_the_reference_is_there_to_look_at(model, checkpoint, tmp_path):
    follows = {"sync_ref_model": True, "ref_model_sync_steps": 3, "ref_model_mixup_alpha": 1.0}
    trainer = make(trl_jax, model, tmp_path, follows)
    first = {name: np.asarray(values).copy() for name, values in trainer.ref_model.named_parameters()}
    trainer.train()
    policy = dict(trainer.model.named_parameters())
    for name, values in trainer.ref_model.named_parameters():  # it became the policy after the third step (alpha is 1)
        np.testing.assert_array_equal(values, policy[name])
        assert not np.array_equal(values, first[name])
    other = checkpoint(**SMALL | {"intermediate_size": 64})
    given = make(trl_jax, model, tmp_path, ref_model=str(other)).ref_model
    assert dict(given.named_parameters())["model.layers.0.mlp.up_proj.weight"].shape[0] == 64
    lora = trl_jax.LoraConfig(target_modules=["q_proj"])
    assert make(trl_jax, model, tmp_path, peft_config=lora).ref_model is None
    before = make(trl_jax, model, tmp_path, {"precompute_ref_log_probs": True})
    assert before.ref_model is None
    before.state.global_step = 1  # as if a step had been taken
    with pytest.raises(ValueError, match="Cannot compute reference log-probs for a dataset passed"):
        before.evaluate(table(4, seed=3))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_copy_of_the_reference_is_not_the_reference_of_the_run(model, tmp_path, copied):
    reference = make(trl_jax, model, tmp_path).ref_model
    before = {name: np.asarray(values) for name, values in reference.state_dict().items()}
    clone = copied(reference)
    clone.load_state_dict({name: 0 * values for name, values in before.items()})
    assert all(np.array_equal(values, before[name]) for name, values in reference.state_dict().items())
    assert not any(np.any(values) for values in clone.parameters())


@only_thorough
def test_a_reference_follows_the_iterates_of_a_schedule_free_optimizer(model, tmp_path):
    """TRL's callback reads the parameters at the end of a step, which are schedulefree's y, not the averages x."""
    follows = {"sync_ref_model": True, "ref_model_sync_steps": 3, "ref_model_mixup_alpha": 1.0}
    trainer = make(trl_jax, model, tmp_path, follows | {"optim": "schedule_free_sgd", "learning_rate": 0.3})
    trainer.train()
    slow, fast = trainer.model.params["lm_head.weight"], trainer.parts.setup.progress.optimizer_state[1].fast
    moved = dict(trainer.ref_model.named_parameters())["lm_head.weight"]
    np.testing.assert_allclose(moved, 0.9 * slow + 0.1 * fast["lm_head.weight"], atol=1e-6)
    assert np.abs(moved - slow).max() > 1e-4


def test_a_batch_of_trls_collator(model, tmp_path):
    trainer = make(trl_jax, model, tmp_path)
    batch = trainer.data_collator([trainer.train_dataset[0]], return_tensors="np")
    assert batch["input_ids"].shape == batch["completion_mask"].shape and len(batch["input_ids"]) == 2


def test_a_reference_that_cannot_follow(model, checkpoint, tmp_path):
    follows = {"sync_ref_model": True}
    with pytest.raises(NotImplementedError, match="`sync_ref_model=True` while using a PEFT model"):
        make(trl_jax, model, tmp_path, follows, peft_config=trl_jax.LoraConfig(target_modules=["q_proj"]))
    wider = checkpoint(**SMALL | {"intermediate_size": 64})
    with pytest.raises(ValueError, match="of ref_model is not a parameter of the model in the same shape"):
        make(trl_jax, model, tmp_path, follows, ref_model=str(wider))


def test_a_saved_folder_loads_in_transformers(model, tmp_path):
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    trainer = trained(trl_jax, model, tmp_path / "a")
    trainer.save_model(str(tmp_path / "out"))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    ids = torch.tensor([[5, 9, 11, 7]])
    with torch.no_grad():
        wanted = theirs(input_ids=ids).logits.numpy()
    np.testing.assert_allclose(np.asarray(trainer.model(ids.numpy()).logits), wanted, atol=2e-4)


def test_a_stream_trains(model, tmp_path):
    rows = preference_rows(16, "prompt")
    stream = IterableDataset.from_generator(lambda: iter(rows))
    assert len(steps(trained(trl_jax, model, tmp_path, train_dataset=stream))) == 3
    with pytest.raises(ValueError, match="not supported with IterableDataset"):
        make(trl_jax, model, tmp_path, {"precompute_ref_log_probs": True}, train_dataset=stream)


def test_tokenized_rows_are_taken_as_they_are(model, tmp_path):
    first = make(trl_jax, model, tmp_path).train_dataset
    ids = first.select_columns(["prompt_ids", "chosen_ids", "rejected_ids"])
    again = make(trl_jax, model, tmp_path, train_dataset=ids).train_dataset
    assert again["chosen_input_ids"] == first["chosen_input_ids"]
    assert again["rejected_labels"] == first["rejected_labels"]


@only_thorough
def test_rows_of_early_releases_are_only_cut(model, tmp_path):
    """They have ids and labels of both texts, as those releases prepared them; the rows of a plan are made up like
    this, too."""
    texts = {"chosen_input_ids": [5, 6, 7, 8], "rejected_input_ids": [5, 6, 9]}
    labels = {"chosen_labels": [-100, -100, 7, 8], "rejected_labels": [-100, -100, 9]}
    rows = Dataset.from_list([texts | labels] * 4)
    trainer = make(trl_jax, model, tmp_path, {"max_length": 3}, train_dataset=rows)
    assert trainer.train_dataset[0] == {name: ids[:3] for name, ids in (texts | labels).items()}
    trainer.train()
    words = "Row 0 of the prepared train_dataset, column 'chosen_labels': must have 4 labels, one for each id of"
    with pytest.raises(ValueError, match=words):
        wrong = Dataset.from_list([texts | labels | {"chosen_labels": [7]}])
        make(trl_jax, model, tmp_path, train_dataset=wrong)


def test_old_arguments_of_the_trainer(model, tmp_path):
    with pytest.warns(FutureWarning, match="beta is an argument of DPOConfig"):
        trainer = make(trl_jax, model, tmp_path, beta=0.3, max_length=33)
    assert (trainer.args.beta, trainer.args.max_length) == (0.3, 33)
    args = trl_jax.DPOConfig(str(tmp_path), **BASE | STEPS)
    with pytest.warns(FutureWarning, match="beta is an argument of DPOConfig"):
        trainer = trl_jax.DPOTrainer(str(model), None, args, beta=0.4, train_dataset=table())
    assert trainer.args.beta == 0.4
    with pytest.raises(TypeError, match="max_completion_length"):
        make(trl_jax, model, tmp_path, max_completion_length=10)


@pytest.mark.parametrize("config", [{}, {"truncation_mode": "keep_end"}, {"max_length": 12}])
def test_max_prompt_length_keeps_the_end_of_a_prompt(model, tmp_path, config):
    """As in the TRL releases that had it: then prompt and answer are truncated together."""
    whole = make(trl_jax, model, tmp_path, {"max_length": None}).train_dataset
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        args = trl_jax.DPOConfig(str(tmp_path), **BASE | STEPS | config, max_prompt_length=5)
        rows = trl_jax.DPOTrainer(str(model), args=args, train_dataset=table()).train_dataset
    told = [str(one.message) for one in told if "max_prompt_length" in str(one.message)]
    assert len(told) == 1 and told[0].startswith("max_prompt_length=5 is deprecated")
    part = slice(-64, None) if config.get("truncation_mode") else slice(config.get("max_length", 64))
    assert len(rows) == 16 and max(map(len, whole["prompt_ids"])) > 5
    for row, before in zip(rows, whole, strict=True):
        assert row["prompt_ids"] == before["prompt_ids"][-5:]
        for side in ("chosen", "rejected"):
            assert row[f"{side}_input_ids"] == (row["prompt_ids"] + before[f"{side}_ids"])[part]
            labels = [-100] * len(row["prompt_ids"]) + before[f"{side}_ids"]
            assert row[f"{side}_labels"] == labels[part]


def test_max_prompt_length_of_the_trainer_and_of_rows_that_are_joined(model, tmp_path):
    with pytest.warns(FutureWarning, match="max_prompt_length is an argument of DPOConfig now") as told:
        rows = make(trl_jax, model, tmp_path, max_prompt_length=5).train_dataset
    assert len([one for one in told if "max_prompt_length" in str(one.message)]) == 1
    names = DpoTask().columns.texts + DpoTask().columns.labels
    joined = make(trl_jax, model, tmp_path).train_dataset.select_columns(names)
    with pytest.warns(FutureWarning, match="max_prompt_length=5 is deprecated"):
        again = make(trl_jax, model, tmp_path, {"max_prompt_length": 5}, train_dataset=joined).train_dataset
    for name in names:
        assert again[name][:] == rows[name][:] != joined[name][:]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"sync_ref_model": True, "precompute_ref_log_probs": True}, "together with `precompute_ref_log_probs=True`"),
        ({"ref_model_mixup_alpha": 1.5}, "ref_model_mixup_alpha must be a number from 0.0 to 1.0, .*, got 1.5"),
        ({"ref_model_sync_steps": 0}, "ref_model_sync_steps must be a whole number of at least 1, got 0"),
        ({"loss_type": "nothing"}, "Unknown loss type: nothing. Should be one of"),
        ({"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0]}, "`loss_weights` must have the same length"),
        ({"f_divergence_type": "forward_kl", "loss_type": "bco_pair"}, "only supported for the following loss types"),
        ({"f_divergence_type": "other"}, "Unknown f_divergence_type: other"),
        ({"loss_type": "exo_pair"}, "Label smoothing must be greater than 0.0"),
        ({"loss_type": "aot", "use_weighting": True}, "WPO-style weighting is not implemented"),
        ({"ld_alpha": 1.5}, "ld_alpha"),
        ({"max_prompt_length": 0}, "max_prompt_length must be a whole number of at least 1 or None, got 0"),
    ],
)
def test_arguments_that_are_refused(tmp_path, config, words):
    with pytest.raises(ValueError, match=words):
        trl_jax.DPOConfig(str(tmp_path), use_cpu=True, **config)


def shares(found):
    """Metrics as user scripts write them: from the logits of every position and the token ids."""
    logits, ids = found.predictions[:, :-1], found.label_ids[:, 1:]
    real = ids > 0
    return {"right": float((np.argmax(logits, -1) == ids)[real].mean()), "targets": int(real.sum())}


@pytest.mark.filterwarnings("ignore::FutureWarning")
# KTO's test always runs the other case.
@pytest.mark.parametrize("config", [thorough({}), {"precompute_ref_log_probs": True}])
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


def test_a_precomputed_reference_of_the_trainers_own_rows_is_there_after_training(model, tmp_path):
    """TRL's `predict` takes prepared rows as they are; the model itself has moved away from the reference."""
    trl, found = pytest.importorskip("trl"), []
    for package in (trl_jax, trl):
        config = {"precompute_ref_log_probs": True, "max_steps": 2, "per_device_eval_batch_size": 4}
        trainer = trained(package, model, tmp_path / package.__name__, config, eval_dataset=table(4, seed=4))
        found.append(trainer.predict(trainer.eval_dataset).metrics["test_loss"])
    assert found[0] == pytest.approx(found[1], abs=1e-5) and abs(found[1] - math.log(2)) > 1e-3


def test_a_prediction_of_the_loss_only_has_no_logits(model, tmp_path):
    """Nor does it call `compute_metrics`."""
    trl, found = pytest.importorskip("trl"), []
    config = {"prediction_loss_only": True, "per_device_eval_batch_size": 4}
    for package in (trl_jax, trl):
        given = {"eval_dataset": table(4, seed=4), "compute_metrics": shares}
        trainer = make(package, model, tmp_path / package.__name__, config, **given)
        found.append(trainer.predict(trainer.eval_dataset))
    ours, theirs = found
    assert ours.predictions is theirs.predictions is None and ours.label_ids is theirs.label_ids is None
    assert timeless(ours.metrics) == pytest.approx(timeless(theirs.metrics), abs=1e-5)


@only_thorough
def test_an_evaluation_is_the_same_in_any_batches(model, tmp_path):
    sides = (make(trl_jax, model, tmp_path, {"per_device_eval_batch_size": size}) for size in (2, 6))
    one, other = (side.evaluate(table(6, seed=4)) for side in sides)
    for name in ("eval_loss", "eval_entropy", "eval_logits/chosen", "eval_mean_token_accuracy", "eval_logps/rejected"):
        assert one[name] == pytest.approx(other[name], rel=1e-5), name


HARMLESS = {
    "reference_free": False, "label_pad_token_id": -100, "padding_value": 0, "generate_during_eval": False,
    "ref_model_init_kwargs": None, "force_use_ref_model": False,
}  # fmt: skip


def test_arguments_of_earlier_years_pass_where_they_ask_for_nothing(model, tmp_path):
    """Both in the config and in the trainer; loss_type may be one name or a tuple of several."""
    with pytest.warns(FutureWarning, match="reference_free=False has no effect"):
        config = trl_jax.DPOConfig(str(tmp_path), loss_type=("sigmoid", "sft"), **BASE, **HARMLESS)
    assert config.loss_type == ["sigmoid", "sft"]
    with pytest.warns(FutureWarning, match="padding_value no longer has an effect"):
        one = make(trl_jax, model, tmp_path, loss_type="hinge", **HARMLESS)
    assert one.make_task().objective.names == ("hinge",)
    one.loss_types = ("hinge", "sft")
    assert one.make_task().objective.names == ("hinge", "sft")
    for where in (partial(trl_jax.DPOConfig, str(tmp_path)), partial(make, trl_jax, model, tmp_path)):
        with pytest.raises(TypeError, match="ref_model_init_kwargs=.*pass it as ref_model"):
            where(ref_model_init_kwargs={"dtype": "bfloat16"})
        with pytest.raises(TypeError, match="reference_free=True: leave it out"):
            where(reference_free=True)


def test_a_reference_that_is_not_there_is_called_by_its_argument(model, tmp_path):
    with pytest.raises(FileNotFoundError, match="ref_model='/no/such/folder': there is no such folder"):
        make(trl_jax, model, tmp_path, ref_model="/no/such/folder")


@only_thorough
def test_robust_beyond_a_half_warns_as_trl_and_trains_on_its_number(model, tmp_path):
    trl = pytest.importorskip("trl")
    config = {"loss_type": "robust", "label_smoothing": 0.7, "max_steps": 1}
    theirs = steps(trained(trl, model, tmp_path / "b", config))
    with pytest.warns(UserWarning, match=r"should lie in \[0.0, 0.5\) for the 'robust' loss. You provided 0.7"):
        ours = steps(trained(trl_jax, model, tmp_path / "a", config))
    for mine, wanted in zip(ours, theirs, strict=True):
        assert_same(mine, wanted)
    with pytest.raises(ValueError, match="divides by 1 - 2"):
        trl_jax.DPOConfig(str(tmp_path), use_cpu=True, loss_type="robust", label_smoothing=0.5)


def test_the_chat_template_of_a_path_is_that_of_the_rows(model, tmp_path):
    """Every config has it, because errors about conversations recommend it."""
    template = tmp_path / "own.jinja"
    template.write_text("{% for m in messages %}{{ m.role }}! {{ m.content }}{% endfor %}")
    config, rows = {"chat_template_path": str(template)}, table(4, "chat")
    trainer = make(trl_jax, model, tmp_path, config, train_dataset=rows)
    words = trainer.processing_class.decode(trainer.train_dataset[0]["chosen_input_ids"])
    assert words.startswith("user! ")
    for kind in (trl_jax.KTOConfig, trl_jax.GRPOConfig, trl_jax.RLOOConfig):
        args = kind(str(tmp_path), use_cpu=True, per_device_train_batch_size=8, **config)
        assert args.chat_template_path == str(template)
