"""User-defined losses, prediction steps, optimizers and dataloaders; torch models passed in get the trained weights
back."""

from __future__ import annotations

import copy
import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from datasets import Dataset
from transformers import TrainerCallback, TrainingArguments

import trl_jax
from compat_tests.effort import only_thorough, usual
from compat_tests.parity.reference import BASE, read_weights
from compat_tests.trainer.trainers import FACTS, make, stream, table
from trl_jax.training import metrics


@pytest.fixture(scope="session")
def folder(checkpoint):
    return checkpoint(**FACTS)


def config(**changed):
    return BASE | {"per_device_train_batch_size": 4, "max_steps": 3} | changed


def losses(trainer):
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


def untimed(log):
    return {name: value for name, value in log.items() if not name.endswith(("runtime", "per_second"))}


class Plain(trl_jax.RewardTrainer):
    """TRL's loss as a user would write it."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(inputs["input_ids"], attention_mask=inputs["attention_mask"], return_dict=True)
        chosen, rejected = jnp.split(outputs.logits[:, 0], 2)
        loss = -jax.nn.log_sigmoid(chosen - rejected).mean()
        return (loss, outputs) if return_outputs else loss


class OldStyle(trl_jax.RewardTrainer):
    """The same in the style of early releases: two calls, logits by key, no num_items_in_batch."""

    def compute_loss(self, model, inputs, return_outputs=False):
        sides = [
            model(input_ids=inputs[f"input_ids_{side}"], attention_mask=inputs[f"attention_mask_{side}"])["logits"]
            for side in ("chosen", "rejected")
        ]
        loss = -jax.nn.log_sigmoid(sides[0] - sides[1]).mean()
        return (loss, {"rewards_chosen": sides[0], "rewards_rejected": sides[1]}) if return_outputs else loss


@usual("Plain-2")
@pytest.mark.parametrize(("kind", "accumulation"), [(Plain, 2), (OldStyle, 1)])
def test_trls_own_loss_in_a_script_is_the_same_run(folder, tmp_path, kind, accumulation):
    """10 pairs with a batch size of 4: the last batch is short, and under accumulation it is a step of its own."""
    how = config(gradient_accumulation_steps=accumulation, max_steps=-1, num_train_epochs=1)
    rows, test = table(10), table(6, seed=1)
    runs = []
    for package, name in ((trl_jax.RewardTrainer, "plain"), (kind, "own")):
        args = trl_jax.RewardConfig(str(tmp_path / name), **how)
        trainer = package(str(folder), args, train_dataset=rows, eval_dataset=test)
        trainer.train()
        runs.append((trainer.state.log_history, trainer.evaluate(), trainer.predict(test).predictions))
    (plain, plain_eval, plain_scores), (own, own_eval, own_scores) = runs
    for wanted, found in zip([*plain, plain_eval], [*own, own_eval], strict=True):
        assert list(found) == list(wanted)
        assert untimed(found) == pytest.approx(untimed(wanted), rel=1e-4, abs=1e-5)
    np.testing.assert_allclose(own_scores, plain_scores, atol=1e-5)


def test_a_loss_with_a_margin_is_the_one_it_stands_for(folder, tmp_path):
    class Margin(trl_jax.RewardTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            outputs = model(inputs["input_ids"])
            chosen, rejected = jnp.split(outputs.logits[:, 0], 2)
            return -jax.nn.log_sigmoid(chosen - rejected - inputs["margin"]).mean()

    rows = table(8, margin=True)
    plain = make(trl_jax, folder, tmp_path / "plain", train=rows, config=config(max_steps=2))
    own = Margin(str(folder), trl_jax.RewardConfig(str(tmp_path / "own"), **config(max_steps=2)), train_dataset=rows)
    plain.train(), own.train()
    assert losses(own) == pytest.approx(losses(plain), abs=1e-6)


def test_a_loss_that_scores_nothing_in_pairs_is_logged_without_rewards(folder, tmp_path):
    class Half(trl_jax.RewardTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return model(inputs["input_ids_chosen"]).logits.mean()

    trainer = Half(str(folder), trl_jax.RewardConfig(str(tmp_path), **config(max_steps=1)), train_dataset=table(8))
    trainer.train()
    assert set(trainer.state.log_history[0]) == {"loss", "grad_norm", "learning_rate", "num_tokens", "epoch", "step"}


def test_a_comment_about_torch_does_not_make_a_line_torchs(folder, tmp_path, monkeypatch):
    def own(self, model, inputs, **how):
        logits = model(inputs["input_ids"]).logits
        return float(
            logits.mean()  # as in torch
        )

    monkeypatch.setattr("trl_jax.training.user_loss_errors.available", lambda: False)
    kind = type("Own", (trl_jax.RewardTrainer,), {"compute_loss": own})
    trainer = kind(str(folder), trl_jax.RewardConfig(str(tmp_path), **config()), train_dataset=table(8))
    with pytest.raises(TypeError, match=r"no concrete values: `return float\( logits.mean\(\) \)`"):
        trainer.train()


@pytest.mark.parametrize(
    ("own", "text"),
    [
        (
            lambda m, x: __import__("torch").sigmoid(m(x["input_ids"]).logits).mean(),
            "torch functions do not accept them",
        ),
        (lambda m, x: m(x["input_ids"]).logits, r"compute_loss returned an array \[8, 1\]; expected a JAX scalar"),
        (lambda m, x: 3.0, "compute_loss returned a float; expected a JAX scalar"),
        (lambda m, x: m(x["input_ids"], labels=1).logits.mean(), r"takes input_ids and attention_mask, not labels"),
    ],
)
def test_a_loss_that_cannot_be_says_what_to_write(folder, tmp_path, own, text, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setattr("trl_jax.training.user_loss_errors.available", lambda: False)
    loss = {"compute_loss": lambda self, model, inputs, **how: own(model, inputs)}
    kind = type("Own", (trl_jax.RewardTrainer,), loss)
    trainer = kind(str(folder), trl_jax.RewardConfig(str(tmp_path), **config()), train_dataset=table(8))
    with pytest.raises(TypeError, match=text):
        trainer.train()


def test_errors_name_the_function_that_was_passed(checkpoint, tmp_path):
    rows = Dataset.from_dict({"text": ["a word"] * 4})
    trainer = trl_jax.SFTTrainer(
        str(checkpoint(**FACTS, head="causal")), trl_jax.SFTConfig(str(tmp_path), **config()), train_dataset=rows,
        compute_loss_func=lambda outputs, labels, num_items_in_batch=None: 3.0,
    )  # fmt: skip
    with pytest.raises(TypeError, match="^compute_loss_func returned a float; expected a JAX scalar"):
        trainer.train()


@pytest.mark.parametrize(
    "read",
    [
        lambda model: sum(jnp.sum(values**2) for values in model.parameters()),
        lambda model: jnp.sum(model.score.weight**2),
        lambda model: jnp.sum(jnp.asarray(model.get_input_embeddings().weight) ** 2),
        lambda model: jnp.sum(model.state_dict()["score.weight"]),
    ],
)
def test_a_loss_cannot_read_parameters(folder, tmp_path, read):
    """A penalty on parameters would be added to the loss but not to its gradient."""
    loss = {"compute_loss": lambda self, model, inputs, **how: read(model)}
    kind = type("Own", (trl_jax.RewardTrainer,), loss)
    trainer = kind(str(folder), trl_jax.RewardConfig(str(tmp_path), **config()), train_dataset=table(8))
    with pytest.raises(TypeError, match=r"reads the model's parameters, .* set weight_decay, or return a chain from"):
        trainer.train()
    assert read(trainer.model) != 0.0  # allowed outside of a loss


def _cut(self, model, inputs, **how):
    from torch.nn import functional as F

    logits = model(inputs["input_ids"], inputs["attention_mask"]).logits
    return F.cross_entropy(
        logits,
        inputs["input_ids"][:, 0],
    )


def _in_words_of_torch(self, model, inputs, **how):
    logits = model(inputs["input_ids"], inputs["attention_mask"]).logits
    return logits.argmax(dim=-1).mean()


@pytest.mark.parametrize(
    ("own", "words"),
    [
        (_cut, r"`return F.cross_entropy\( logits, inputs\[.input_ids.\]\[:, 0\], \)`\. Write it with jax.numpy"),
        (_in_words_of_torch, r"`return logits.argmax\(dim=-1\).mean\(\)`\. Write it with jax.numpy"),
    ],
)
def test_the_line_is_the_scripts(folder, tmp_path, own, words, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setattr("trl_jax.training.user_loss_errors.available", lambda: False)
    kind = type("Own", (trl_jax.RewardTrainer,), {"compute_loss": own})
    trainer = kind(str(folder), trl_jax.RewardConfig(str(tmp_path), **config()), train_dataset=table(8))
    with pytest.raises(TypeError, match=words):
        trainer.train()


@only_thorough
def test_a_prediction_step_of_ones_own_decides_what_compute_metrics_sees(folder, tmp_path):
    class Own(trl_jax.RewardTrainer):
        def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
            loss, logits, _ = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
            chosen, rejected = jnp.split(logits[:, 0], 2)
            return loss, jnp.stack([chosen, rejected], axis=1), jnp.zeros(len(chosen), jnp.int32)

    args = trl_jax.RewardConfig(str(tmp_path), **config())
    from trl_jax.trainer.utils import compute_accuracy

    trainer = Own(str(folder), args, train_dataset=table(8), eval_dataset=table(6), compute_metrics=compute_accuracy)
    plain = trl_jax.RewardTrainer(str(folder), args, train_dataset=table(8), eval_dataset=table(6))
    own, wanted = trainer.evaluate(), plain.evaluate()
    assert own["eval_accuracy"] == wanted["eval_accuracy"]
    assert own["eval_loss"] == pytest.approx(wanted["eval_loss"], abs=1e-6)
    assert trainer.predict(table(6)).predictions.shape == (6, 2)


def test_compute_metrics_gets_what_the_arguments_ask_for(folder, tmp_path):
    seen = []

    def compute_metrics(found, compute_result=True):
        seen.append((found.predictions, found.inputs, found.losses, compute_result))
        return {"count": len(seen)}

    def evaluate(**how):
        seen.clear()
        args = config(per_device_eval_batch_size=4, **how)
        trainer = make(trl_jax, folder, tmp_path, config=args, eval_dataset=table(6), compute_metrics=compute_metrics)
        return trainer.evaluate()

    evaluate(include_for_metrics=["inputs", "loss"])
    [(predictions, inputs, row_losses, _)] = seen
    assert predictions.shape == (12, 1) and inputs.shape[0] == 12 and row_losses.shape == (6,)
    assert inputs.shape[1] == 64 and (inputs >= 0).all()  # padded as the collator does
    assert evaluate(batch_eval_metrics=True)["eval_count"] == 2
    assert [found[3] for found in seen] == [False, True] and [len(found[0]) for found in seen] == [8, 4]
    evaluate(eval_do_concat_batches=False)
    assert [part.shape for part in seen[0][0]] == [(8, 1), (4, 1)]
    with pytest.raises(ValueError, match="it takes no compute_result. Add the argument"):
        make(trl_jax, folder, tmp_path, config={"batch_eval_metrics": True}, compute_metrics=lambda found: {})


def torch_model(folder, **how):
    pytest.importorskip("torch")
    from transformers import AutoModelForSequenceClassification

    return AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, **how)


def test_a_torch_model_has_the_trained_weights_afterward(folder, tmp_path):
    model = torch_model(folder)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trainer = make(trl_jax, model, tmp_path / "object", config=config())
    plain = make(trl_jax, folder, tmp_path / "folder", config=config())
    trainer.train(), plain.train()
    assert losses(trainer) == pytest.approx(losses(plain), abs=1e-7)
    plain.save_model(str(tmp_path / "final"))
    wanted = read_weights(tmp_path / "final")
    for name, value in model.state_dict().items():
        np.testing.assert_array_equal(value.numpy(), wanted[name])
    assert any((before[name] != value).any() for name, value in model.state_dict().items())
    assert trainer.model.name_or_path == str(folder) and model.config.pad_token_id is not None


def test_a_torch_model_in_half_precision_stays_so(folder, tmp_path):
    torch = pytest.importorskip("torch")
    model = torch_model(folder, dtype=torch.bfloat16)
    make(trl_jax, model, tmp_path, config=config(learning_rate=1e-2)).train()
    assert {value.dtype for value in model.state_dict().values()} == {torch.bfloat16}


def test_torch_models_that_cannot_be_taken(folder, tmp_path):
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match="model must be a transformers model, .*, got a torch.nn.modules.linear.Linear"):
        make(trl_jax, torch.nn.Linear(1, 1), tmp_path)
    from transformers import AutoModelForSequenceClassification

    two = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2, ignore_mismatched_sizes=True)
    with pytest.raises(ValueError, match="with 2 labels, but reward models require `num_labels=1`"):
        make(trl_jax, two, tmp_path)


def test_arguments_by_their_old_names(folder, tmp_path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    given = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", max_steps=1, save_strategy="no", seed=7)
    with pytest.warns(FutureWarning) as seen:
        trainer = trl_jax.RewardTrainer(str(folder), given, train_dataset=table(8), tokenizer=tokenizer, max_length=40)
    told = [str(warning.message) for warning in seen]
    assert any(text.startswith("tokenizer is an old name") for text in told)
    assert any(text.startswith("max_length is an argument of RewardConfig now") for text in told)
    assert any(text.startswith("args is a TrainingArguments") for text in told)
    assert trainer.processing_class is trainer.tokenizer is tokenizer
    assert (trainer.args.max_length, trainer.args.seed, trainer.args.learning_rate) == (40, 7, 5e-5)
    assert not trainer.args.bf16
    with pytest.raises(TypeError, match="tokenizer and processing_class are the same argument"):
        make(trl_jax, folder, tmp_path, tokenizer=tokenizer, processing_class=tokenizer)
    with pytest.raises(TypeError, match="RewardTrainer has no argument 'eval_datset': did you mean eval_dataset?"):
        make(trl_jax, folder, tmp_path, eval_datset=table(4))


def test_columns_by_their_old_names(folder, tmp_path):
    rows = make(trl_jax, folder, tmp_path, config=config()).train_dataset
    old = rows.select_columns(["chosen_ids", "rejected_ids"])
    for name in ("chosen", "rejected"):
        old = old.rename_column(f"{name}_ids", f"input_ids_{name}")
        old = old.add_column(f"attention_mask_{name}", [[1] * len(ids) for ids in old[f"input_ids_{name}"]])
    with pytest.warns(FutureWarning, match="'input_ids_chosen' and 'input_ids_rejected' are now called"):
        trainer = make(trl_jax, folder, tmp_path, train=old, config=config())
    assert trainer.train_dataset["chosen_ids"][:] == rows["chosen_ids"][:]


class Noted(TrainerCallback):
    def on_train_begin(self, args, state, control, **how):
        self.seen = how


def test_callbacks_are_handed_what_transformers_hands_them(folder, tmp_path):
    noted = Noted()
    trainer = make(trl_jax, folder, tmp_path, config=config(), callbacks=[noted])
    trainer.train()
    seen = noted.seen
    assert seen["model"] is trainer.model and seen["processing_class"] is trainer.processing_class
    assert seen["lr_scheduler"].get_last_lr() == [0.0, 0.0]  # for the next step, as in TRL
    assert seen["optimizer"] is trainer.optimizer and len(seen["train_dataloader"]) == 4


def test_dataloaders_give_dicts(folder, tmp_path):
    trainer = make(trl_jax, folder, tmp_path, train=table(6, margin=True), eval_dataset=table(3))
    first, second = trainer.get_train_dataloader()
    assert first["input_ids"].shape[0] == 8 and second["input_ids"].shape[0] == 4 and second["margin"].shape == (2,)
    assert first["attention_mask"].sum() < first["attention_mask"].size
    [only] = trainer.get_eval_dataloader()
    assert only["input_ids"].shape[0] == 6 and "margin" not in only
    with pytest.raises(TypeError):
        len(make(trl_jax, folder, tmp_path, train=stream(8), config=config()).get_train_dataloader())


def test_a_dataloader_of_ones_own(folder, tmp_path):
    class First(trl_jax.RewardTrainer):
        def get_train_dataloader(self):
            return self.batches(self.train_dataset.select(range(4)), training=True)

    class Torchs(trl_jax.RewardTrainer):
        def get_train_dataloader(self):
            return [1, 2]

    args = trl_jax.RewardConfig(str(tmp_path), **config(max_steps=2))
    trainer = First(str(folder), args, train_dataset=table(8))
    trainer.train()
    plain = make(trl_jax, folder, tmp_path, train=table(8).select(range(4)), config=config(max_steps=2))
    plain.train()
    assert losses(trainer)[0] == losses(plain)[0]
    with pytest.raises(
        TypeError, match="get_train_dataloader returned a builtins.list; expected what the trainer's own"
    ):
        Torchs(str(folder), args, train_dataset=table(8)).train()


@only_thorough
def test_an_optimizer_of_optax_is_the_one_it_stands_for(folder, tmp_path):
    named = make(trl_jax, folder, tmp_path / "a", config=config())
    adamw = optax.adamw(5e-4, weight_decay=0.0)
    given = make(trl_jax, folder, tmp_path / "b", config=config(), optimizers=(adamw, None))
    factory = make(
        trl_jax, folder, tmp_path / "c", config=config(max_steps=1),
        optimizer_cls_and_kwargs=(optax.sgd, {"learning_rate": 0.0}),
    )  # fmt: skip
    before = factory.model.get_parameter("score.weight")
    factory.train()
    np.testing.assert_array_equal(factory.model.get_parameter("score.weight"), before)
    rates = lambda step: 5e-4 * (1 - step / 3)  # noqa: E731
    own = make(trl_jax, folder, tmp_path / "d", config=config(), optimizers=(optax.adamw(1.0, weight_decay=0.0), rates))
    for trainer in (named, given, own):
        trainer.train()
        assert losses(trainer) == pytest.approx(losses(named), abs=2e-5)
        assert [log["learning_rate"] for log in trainer.state.log_history[:3]] == pytest.approx(
            [5e-4, 5e-4 * 2 / 3, 5e-4 / 3]
        )


@only_thorough
def test_a_class_of_torchs_is_its_counterpart(folder, tmp_path):
    torch = pytest.importorskip("torch")
    how = config(optim="sgd", optim_args="momentum=0.5", learning_rate=0.1)
    named = make(trl_jax, folder, tmp_path / "a", config=how)
    given = make(
        trl_jax, folder, tmp_path / "b", config=config(),
        optimizer_cls_and_kwargs=(torch.optim.SGD, {"lr": 0.1, "momentum": 0.5}),
    )  # fmt: skip
    named.train(), given.train()
    assert losses(given) == losses(named)
    wanted = {
        (torch.optim.LBFGS, (("lr", 1.0),)): "torch.optim.lbfgs.LBFGS is not supported; supported optimizers of torch",
        (torch.optim.AdamW, (("weight_decay", 0.3),)): "weight_decay=0.3, but the trainer groups parameters by",
        (torch.optim.AdamW, (("decay", 0.3),)): "AdamW does not take decay here.",
        (dict, ()): "optimizers: a builtins.dict cannot update JAX arrays; pass an optax transformation",
    }
    for (kind, kwargs), text in wanted.items():
        with pytest.raises((ValueError, TypeError), match=text):
            make(trl_jax, folder, tmp_path, config=config(), optimizer_cls_and_kwargs=(kind, dict(kwargs)))
    torchs = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.raises(TypeError, match="a torch.optim.sgd.SGD cannot update JAX arrays"):
        make(trl_jax, folder, tmp_path, optimizers=(torchs, None))


def test_create_optimizer_may_give_any_transformation(folder, tmp_path):
    class Own(trl_jax.RewardTrainer):
        def create_optimizer(self):
            return optax.adamw(5e-4, weight_decay=0.0)

    named = make(trl_jax, folder, tmp_path / "a", config=config())
    own = Own(str(folder), trl_jax.RewardConfig(str(tmp_path / "b"), **config()), train_dataset=table(16))
    named.train(), own.train()
    assert losses(own) == pytest.approx(losses(named), abs=2e-5)


def test_a_plateau_lowers_the_rate_and_survives_a_checkpoint(folder, tmp_path):
    how = config(
        lr_scheduler_type="reduce_lr_on_plateau", lr_scheduler_kwargs={"patience": 0, "factor": 0.5, "threshold": 0.9},
        eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=3, max_steps=6, eval_on_start=True,
    )  # fmt: skip
    whole = make(trl_jax, folder, tmp_path, config=how, eval_dataset=table(4))
    whole.train()
    # The scheduler ignores the evaluation at the start, also of a resumed run: transformers passes skip_scheduler=True.
    rates = [log["learning_rate"] for log in whole.state.log_history if "learning_rate" in log]
    assert rates == pytest.approx([5e-4, 5e-4, 2.5e-4, 1.25e-4, 6.25e-5, 3.125e-5])
    again = make(trl_jax, folder, tmp_path, config=how, eval_dataset=table(4))
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert [log["learning_rate"] for log in again.state.log_history if "learning_rate" in log] == rates
    evaluated = [log["step"] for log in again.state.log_history if "eval_loss" in log]
    assert evaluated == [0, 1, 2, 3, 3, 4, 5, 6]


def test_rows_of_like_length_come_together(folder, tmp_path):
    trainer = make(trl_jax, folder, tmp_path, train=table(64), config=config(train_sampling_strategy="group_by_length"))
    spans = [np.ptp(batch["attention_mask"].sum(1).reshape(2, -1).max(0)) for batch in trainer.get_train_dataloader()]
    plain = make(trl_jax, folder, tmp_path, train=table(64), config=config())
    mixed = [np.ptp(batch["attention_mask"].sum(1).reshape(2, -1).max(0)) for batch in plain.get_train_dataloader()]
    assert np.mean(spans) < np.mean(mixed) / 2
    trainer.train()


def test_tokens_are_counted_as_asked(folder, tmp_path):
    seen = {}
    for kind in ("all", "non_padding", "no"):
        trainer = make(trl_jax, folder, tmp_path, config=config(include_num_input_tokens_seen=kind, max_steps=2))
        trainer.train()
        *steps, last = trainer.state.log_history
        seen[kind] = last.get("num_input_tokens_seen")
        assert all(("train_tokens_per_second" in step) == (kind != "no") for step in steps)
        assert "train_tokens_per_second" not in last  # as in transformers
        if kind != "no":
            speed = steps[-1]["train_tokens_per_second"]
            assert speed * steps[-1]["train_runtime"] == pytest.approx(seen[kind], rel=2e-2)
    assert seen["no"] is None and seen["non_padding"] == trainer.state.log_history[1]["num_tokens"] < seen["all"]


def test_memory_is_told_where_it_is_asked_for(folder, tmp_path):
    found = make(trl_jax, folder, tmp_path, config=config(skip_memory_metrics=False, max_steps=1)).train().metrics
    assert found["train_mem_cpu_peak"] > 2**20


def test_memory_that_the_system_does_not_count_is_not_told(monkeypatch):
    monkeypatch.setattr(metrics, "resource", None)
    args = SimpleNamespace(skip_memory_metrics=False, use_cpu=True, jax_devices=jax.devices)
    assert "train_mem_cpu_peak" not in metrics.memory("train", args)


def test_metrics_are_printed_and_written_as_transformers_does(folder, tmp_path, capsys):
    from transformers.trainer_pt_utils import log_metrics, metrics_format

    trainer = make(trl_jax, folder, tmp_path, config=config())
    metrics = {"train_runtime": 3725.5678, "train_loss": 0.123456, "total_flos": 5e12, "epoch": 1, "a_mem_b": 5 << 20}
    trainer.log_metrics("train", metrics)
    ours = capsys.readouterr().out
    trainer.metrics_format = lambda given: metrics_format(given)
    log_metrics(trainer, "train", copy.copy(metrics))
    assert ours == capsys.readouterr().out
    trainer.save_metrics("train", {"a": 1})
    trainer.save_metrics("eval", {"b": 2})
    trainer.save_state()
    assert json.loads((tmp_path / "all_results.json").read_text()) == {"a": 1, "b": 2}
    assert json.loads((tmp_path / "eval_results.json").read_text()) == {"b": 2}
    assert (tmp_path / "trainer_state.json").is_file()


def test_what_scripts_reach_into(folder, tmp_path, capsys):
    trainer = make(trl_jax, folder, tmp_path, config=config())
    accelerator, model = trainer.accelerator, trainer.model
    assert accelerator.unwrap_model(model) is model is trainer.model_wrapped and accelerator.is_main_process
    assert accelerator.log({"loss": 1.0}, step=1) is None  # as in TRL, where no tracker of accelerate is started
    accelerator.print("said")
    accelerator.wait_for_everyone()
    assert capsys.readouterr().out == "said\n"
    with pytest.raises(AttributeError, match="accelerator has no backward: gradients are taken inside"):
        accelerator.backward(1)
    before = {name: value.clone() for name, value in model.named_parameters()}
    trainer.train()
    assert set(before) == set(read_weights(folder)) and before["score.weight"].shape == (1, 32)
    assert all((model.get_parameter(name) != value).any() for name, value in before.items() if value.numel() > 1)
    assert sum(value.numel() for value in model.parameters()) == model.num_parameters()
    assert model.eval() is model.train() is model.merge_and_unload() is model
    assert model.get_input_embeddings().num_embeddings == model.vocab_size
    model.add_model_tags(["a", "a"])
    model.add_model_tags("b")
    assert model.model_tags == ["trl", "reward-trainer", "trl_jax", "a", "b"]
    with pytest.raises(AttributeError, match="has no parameter 'x'"):
        model.get_parameter("x")
    model.print_trainable_parameters()
    assert "trainable%: 100" in capsys.readouterr().out
    with pytest.raises(TypeError, match="hyperparameter_search is not in this release of trl_jax."):
        trainer.hyperparameter_search(n_trials=2)
    trainer.end()


def test_a_loss_in_jax_appends_to_the_metrics(folder, tmp_path):
    class Logging(trl_jax.RewardTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            loss, outputs = super().compute_loss(model, inputs, return_outputs=True)
            self._metrics["train" if self.model.training else "eval"]["twice"].append(2 * jnp.asarray(loss))
            return (loss, outputs) if return_outputs else loss

    args = make(trl_jax, folder, tmp_path, config=config(gradient_accumulation_steps=2)).args
    trainer = Logging(str(folder), args=args, train_dataset=table(24), eval_dataset=table(8, seed=1))
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert len(logs) == 3 and all(log["twice"] == pytest.approx(2 * log["loss"], rel=1e-5) for log in logs)
    found = trainer.evaluate()
    assert found["eval_twice"] == pytest.approx(2 * found["eval_loss"], rel=1e-5)
