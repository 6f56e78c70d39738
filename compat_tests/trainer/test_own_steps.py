"""Methods around a step that user scripts override, also run under TRL: training_step, _prepare_inputs,
_prepare_dataset, samplers, weight decay, logged numbers, and prediction steps in torch."""

from __future__ import annotations

import importlib

import optax
import pytest
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback

import trl_jax
from compat_tests.parity.reference import BASE
from compat_tests.tiny import preference_rows, text_rows
from compat_tests.trainer.trainers import FACTS, table

torch = pytest.importorskip("torch")
trl, peft = pytest.importorskip("trl"), pytest.importorskip("peft")
CAUSAL = FACTS | {"head": "causal"}
CONFIG = BASE | {
    "max_steps": 2,
    "pad_to_multiple_of": 4,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
}


def logged(trainer, name="loss"):
    return [log[name] for log in trainer.state.log_history if name in log]


def both(make, tmp_path):
    """Yields a trained trainer of TRL, then one of trl_jax."""
    for package in (trl, trl_jax):
        trainer = make(package, tmp_path / package.__name__)
        trainer.train()
        yield trainer


class Backwards:
    """A sampler in reverse order, which starts at another row in each epoch."""

    def __init__(self, rows):
        self.rows, self.epochs = rows, 0

    def __len__(self):
        return self.rows

    def __iter__(self):
        self.epochs += 1
        return iter((number + self.epochs) % self.rows for number in reversed(range(self.rows)))


def own_sft(package):
    class Own(package.SFTTrainer):
        seen = ()

        def training_step(self, model, inputs, num_items_in_batch=None):
            there = inputs["input_ids"].size(0), int((inputs["labels"] != -100).sum()), int(num_items_in_batch)
            loss = super().training_step(model, inputs, num_items_in_batch)
            self.seen += ((*there, round(float(loss.detach()), 4), self.accelerator.sync_gradients),)
            return loss * 2

        def _prepare_inputs(self, inputs):
            inputs = super()._prepare_inputs(inputs)
            labels = inputs["labels"].clone()
            labels[:, :3] = -100
            return {**inputs, "labels": labels}

        def _prepare_dataset(self, dataset, processing_class, args, packing, formatting_func, dataset_name):
            texts = processing_class(list(dataset["text"]), add_special_tokens=False)["input_ids"]
            return Dataset.from_list([{"input_ids": ids, "labels": [-100, *ids[1:]]} for ids in texts])

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            outputs = model(**inputs, num_items_in_batch=num_items_in_batch)
            self.shapes = (*getattr(self, "shapes", ()), tuple(outputs.logits.shape[:2]))
            loss = outputs.loss + 0.01 * torch.relu(outputs.logits[:, 0]).mean()
            return (loss, outputs) if return_outputs else loss

        def _get_train_sampler(self, *given):
            self.sampler = Backwards(len(self.train_dataset))
            return self.sampler

        def get_decay_parameter_names(self, model):
            return [name for name in super().get_decay_parameter_names(model) if "q_proj" not in name]

        def log(self, logs, start_time=None):
            self._metrics["train" if self.model.training else "eval"]["twice"].append(len(self.seen))
            self._metrics["train"]["num_tokens"] = [7.0]
            super().log(logs, start_time)

    return Own


def test_what_sft_scripts_do_around_a_step_is_as_in_trl(checkpoint, tmp_path):
    folder, rows = checkpoint(**CAUSAL), Dataset.from_list(text_rows(6))

    def make(package, out):
        args = package.SFTConfig(str(out), **CONFIG | {"weight_decay": 9.0, "num_train_epochs": 2, "max_steps": -1})
        return own_sft(package)(model=str(folder), args=args, train_dataset=rows)

    theirs, ours = both(make, tmp_path)
    assert ours.shapes[-6:] == theirs.shapes and len({length for _, length in ours.shapes}) > 1
    assert ours.seen == theirs.seen and len(ours.seen) == 6 and ours.sampler.epochs == theirs.sampler.epochs == 2
    assert [sync for *_, sync in ours.seen] == [False, True, True, False, True, True]
    for name in ("loss", "grad_norm", "twice", "num_tokens"):
        assert logged(ours, name) == pytest.approx(logged(theirs, name), abs=1e-5), name
    expected = theirs.model.state_dict()
    for name, values in ours.model.named_parameters():
        assert values == pytest.approx(expected[name].float().numpy(), abs=1e-4), name


def test_parameters_of_an_adapter_that_decay_have_pefts_names(checkpoint, tmp_path):
    folder, rows = checkpoint(**CAUSAL), Dataset.from_list(text_rows(6))

    def make(package, out):
        class Own(package.SFTTrainer):
            def get_decay_parameter_names(self, model):
                trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
                self.names = trained.intersection(super().get_decay_parameter_names(model))
                return [name for name in self.names if ".lora_A." not in name]

        args = package.SFTConfig(str(out), **CONFIG | {"weight_decay": 9.0})
        lora = (trl_jax if package is trl_jax else peft).LoraConfig(r=2, target_modules=["q_proj"])
        return Own(model=str(folder), args=args, train_dataset=rows, peft_config=lora)

    theirs, ours = both(make, tmp_path)
    assert ours.names == theirs.names and any(".lora_A." in name for name in ours.names)
    expected = dict(theirs.model.named_parameters())
    found = dict(ours.model.named_parameters())
    assert found.keys() == expected.keys()
    for name, values in found.items():
        assert values == pytest.approx(expected[name].detach().float().numpy(), abs=1e-4), name


def test_training_steps_of_dpo_see_the_batch_and_leave_it(checkpoint, tmp_path):
    folder, rows = checkpoint(**CAUSAL), Dataset.from_list(preference_rows(8, "prompt"))

    def make(package, out):
        class Own(package.DPOTrainer):
            seen = ()

            def _prepare_dataset(self, *given):
                return super()._prepare_dataset(*given).select(range(4))

            def training_step(self, model, inputs, num_items_in_batch=None):
                self.seen += tuple(inputs[name].tolist() for name in ("input_ids", "attention_mask", "completion_mask"))
                if self.spoils:
                    inputs["completion_mask"][:] = 1
                return super().training_step(model, inputs, num_items_in_batch)

        Own.spoils = False
        return Own(str(folder), args=package.DPOConfig(str(out), **CONFIG), train_dataset=rows)

    theirs, ours = both(make, tmp_path)
    assert ours.seen == theirs.seen and len(ours.seen) == 12 and len(ours.train_dataset) == 4
    assert logged(ours) == pytest.approx(logged(theirs), abs=1e-5)
    type(ours).spoils = True
    with pytest.raises(TypeError, match="training_step changed inputs whose reference log-probabilities"):
        ours.train()


def test_a_prediction_step_in_torch(checkpoint, tmp_path):
    folder = checkpoint(**FACTS)

    def make(package, out):
        class Own(package.RewardTrainer):
            def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
                scores = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])[0]
                chosen, rejected = torch.chunk(scores, 2)
                loss = -torch.nn.functional.logsigmoid(chosen - rejected - 1).mean()
                return (loss, {"logits": torch.cat([chosen, rejected], dim=1)}) if return_outputs else loss

            def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
                inputs = self._prepare_inputs(inputs)
                with torch.no_grad():
                    loss, outputs = self.compute_loss(model, inputs, return_outputs=True)
                return loss, outputs["logits"], torch.zeros(len(outputs["logits"]))

        def right(prediction):
            assert prediction.label_ids.shape == (6,)
            return {"right": float((prediction.predictions[:, 0] > prediction.predictions[:, 1]).mean())}

        args = package.RewardConfig(str(out), **CONFIG | {"per_device_eval_batch_size": 4})
        return Own(str(folder), args, train_dataset=table(8), eval_dataset=table(6, seed=1), compute_metrics=right)

    theirs, ours = both(make, tmp_path)
    found, expected = ours.evaluate(), theirs.evaluate()
    for name in ("eval_loss", "eval_right"):
        assert found[name] == pytest.approx(expected[name], abs=1e-5)


class Silent(trl_jax.RewardTrainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        return self.how(inputs)


class Sampled(trl_jax.RewardTrainer):
    def _get_train_sampler(self, dataset):
        return self.how(dataset)


BROKEN = [
    (Silent, lambda self, inputs: 0.0, RuntimeError, r"called super\(\).training_step\(model, inputs, ...\) 0 times"),
    (Silent, lambda self, inputs: trl_jax.RewardTrainer.training_step(self, None, inputs | {"note": ["a"]}), TypeError,
     r"inputs\['note'\] is \['a'\]; expected numbers"),
    (Sampled, lambda self, rows: [0, 1], ValueError, "gave 2 indices; expected one for each of the 8 rows"),
    (Sampled, lambda self, rows: [[0, 1], [2, 3]], TypeError, "expected indices of the 8 rows of train_dataset"),
]  # fmt: skip


def test_a_step_of_ones_own_gets_no_virtual_tokens(checkpoint, tmp_path):
    class Own(trl_jax.SFTTrainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            return super().training_step(model, inputs, num_items_in_batch)

    folder, rows = checkpoint(**CAUSAL), Dataset.from_list(text_rows(4))
    adapter = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(TypeError, match="An overridden training_step would receive logits for the text tokens only"):
        Own(str(folder), trl_jax.SFTConfig(str(tmp_path), **CONFIG), train_dataset=rows, peft_config=adapter)


@pytest.mark.parametrize(("kind", "how", "error", "words"), BROKEN)
def test_what_a_step_cannot_use_is_named(kind, how, error, words, checkpoint, tmp_path):
    trainer = kind(str(checkpoint(**FACTS)), trl_jax.RewardConfig(str(tmp_path), **CONFIG), train_dataset=table(8))
    kind.how = how
    with pytest.raises(error, match=words):
        trainer.train()


class Watching(TrainerCallback):
    seen = ()

    def on_step_begin(self, args, state, control, model, **others):
        model.scale = 1.0 + state.global_step

    def on_step_end(self, args, state, control, model, **others):
        self.seen += tuple(parameter.grad for parameter in model.parameters())

    def on_pre_optimizer_step(self, args, state, control, model, **others):
        if state.global_step == 2:
            [parameter.grad for parameter in model.parameters()]


def test_what_callbacks_read_and_set_on_the_model(checkpoint, tmp_path):
    class Own(trl_jax.RewardTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            loss, outputs = super().compute_loss(model, inputs, return_outputs=True)
            self._metrics["train"]["plain"].append(loss)
            loss = loss * getattr(model, "scale", 1.0)
            return (loss, outputs) if return_outputs else loss

    watching, args = Watching(), trl_jax.RewardConfig(str(tmp_path), **CONFIG | {"max_steps": 3})
    trainer = Own(str(checkpoint(**FACTS)), args, train_dataset=table(8), callbacks=[watching])
    with pytest.raises(AttributeError, match="embed_tokens.weight has no grad: gradients stay within the compiled"):
        trainer.train()
    assert watching.seen and set(watching.seen) == {None}  # gradients are None, as in torch after a step
    plain, found = logged(trainer, "plain"), logged(trainer)
    assert found == pytest.approx([plain[0], 2 * plain[1]], rel=1e-5)


def test_the_mode_of_the_model_at_each_event_is_trls(checkpoint, tmp_path):
    def modes(package):
        seen = []

        class Modes(TrainerCallback):
            def note(self, args, state, control, model=None, **others):
                seen.append((state.global_step, None if model is None else model.training))

            on_train_begin = on_step_begin = on_step_end = on_evaluate = on_log = on_epoch_end = on_train_end = note

        config = CONFIG | {"max_steps": 4, "eval_strategy": "steps", "eval_steps": 2, "logging_strategy": "epoch"}
        args = package.SFTConfig(str(tmp_path / package.__name__), **config)
        rows = Dataset.from_list(text_rows(8))
        data = {"train_dataset": rows, "eval_dataset": rows.select(range(2))}
        package.SFTTrainer(str(checkpoint(**CAUSAL)), args, **data, callbacks=[Modes()]).train()
        return seen

    assert modes(trl_jax) == modes(trl)


def test_torchs_random_sampler_is_seeded_as_by_accelerate(checkpoint, tmp_path):
    class Own(trl_jax.RewardTrainer):
        def _get_train_sampler(self, dataset):
            return torch.utils.data.RandomSampler(dataset) if self.own else super()._get_train_sampler(dataset)

    for own in (True, False):
        Own.own = own
        args = trl_jax.RewardConfig(str(tmp_path / str(own)), **CONFIG)
        trainer = Own(str(checkpoint(**FACTS)), args, train_dataset=table(8))
        batches = trainer.get_train_dataloader().steps
        for epoch in range(2):
            assert batches.sampler_order(epoch).tolist() == batches.order(epoch).tolist()
        assert batches.order(0).tolist() != batches.order(1).tolist()


def test_a_method_that_a_script_sets_on_our_class_is_its_own(checkpoint, tmp_path, monkeypatch):
    seen, step = [], trl_jax.RewardTrainer.training_step

    def training_step(self, model, inputs, *others):
        seen.append(len(inputs["input_ids"]))
        return step(self, model, inputs, *others)

    args = trl_jax.RewardConfig(str(tmp_path), **CONFIG)
    monkeypatch.setattr(trl_jax.RewardTrainer, "training_step", training_step)
    trl_jax.RewardTrainer(str(checkpoint(**FACTS)), args, train_dataset=table(8)).train()
    assert seen == [4] * 4
    monkeypatch.setattr(trl_jax.RewardTrainer, "evaluation_loop", training_step, raising=False)
    with pytest.raises(TypeError, match="RewardTrainer overrides evaluation_loop, which trl_jax never calls"):
        trl_jax.RewardTrainer(str(checkpoint(**FACTS)), args, train_dataset=table(8))


def own_loader(trainer):
    class Own(trainer):
        batch = CONFIG["per_device_train_batch_size"]

        def get_train_dataloader(self):
            rows = self.train_dataset
            weights, generator = torch.arange(1.0, 1 + len(rows)), torch.Generator().manual_seed(3)
            sampler = torch.utils.data.WeightedRandomSampler(weights, len(rows), generator=generator)
            return self.accelerator.prepare(
                torch.utils.data.DataLoader(rows, self.batch, sampler=sampler, collate_fn=self.data_collator)
            )

    return Own


def test_a_data_loader_of_torch_gives_rows_and_their_order(checkpoint, tmp_path):
    folder, rows = checkpoint(**CAUSAL), Dataset.from_list(text_rows(6))

    def make(package, out):
        args = package.SFTConfig(str(out), **CONFIG | {"num_train_epochs": 2, "max_steps": -1})
        return own_loader(package.SFTTrainer)(model=str(folder), args=args, train_dataset=rows)

    theirs, ours = both(make, tmp_path)
    assert len(logged(ours)) == 4 and logged(ours) == pytest.approx(logged(theirs), abs=1e-5)
    assert logged(ours, "num_tokens") == logged(theirs, "num_tokens")
    ours.batch = 3
    with pytest.raises(
        ValueError, match="DataLoader with batch_size=3; expected self.args.per_device_train_batch_size, 2"
    ):
        ours.train()


@pytest.mark.parametrize("name", ["ORPO", "GKD"])
def test_a_data_loader_without_a_collator(name, checkpoint, tmp_path):
    """Our ORPO and GKD trainers have no data_collator."""
    chat = {"tokenizer": {"chat_template": True}}
    folder, config = checkpoint(**CAUSAL, **chat), CONFIG | {"max_length": 48}
    config.pop("pad_to_multiple_of")
    rows, options = Dataset.from_list(preference_rows(6, "chat_prompt")), {}
    if name == "GKD":
        rows, config = Dataset.from_list(text_rows(6, "chat")), config | {"lmbda": 0.0, "beta": 0.3}
        options["teacher_model"] = str(checkpoint(**CAUSAL | {"num_hidden_layers": 2}, **chat))

    def make(package, out):
        module = importlib.import_module(f"{package.__name__}.experimental.{name.lower()}")
        args = getattr(module, f"{name}Config")(str(out), **config)
        trainer, tokenizer = own_loader(getattr(module, f"{name}Trainer")), AutoTokenizer.from_pretrained(folder)
        return trainer(model=str(folder), args=args, train_dataset=rows, processing_class=tokenizer, **options)

    theirs, ours = both(make, tmp_path)
    assert len(logged(ours)) == 2 and min(logged(theirs)) > 1e-3
    assert logged(ours) == pytest.approx(logged(theirs), rel=1e-4)


@pytest.mark.parametrize("count", [6, 5], ids=["full batches", "a short last batch"])
def test_a_data_loader_keeps_its_generator(count, checkpoint, tmp_path):
    """TRL's order, unless Accelerate prepares the loader; a resumed run continues the generator's stream."""
    folder, rows = checkpoint(**CAUSAL), Dataset.from_list(text_rows(count))

    def make(package, out):
        class Own(package.SFTTrainer):
            def get_train_dataloader(self):
                generator = torch.Generator().manual_seed(3)
                options = {"shuffle": True, "generator": generator, "collate_fn": self.data_collator}
                return torch.utils.data.DataLoader(self.train_dataset.remove_columns("text"), 2, **options)

        steps = {"num_train_epochs": 2, "max_steps": -1, "save_strategy": "steps", "save_steps": 3}
        return Own(model=str(folder), args=package.SFTConfig(str(out), **CONFIG | steps), train_dataset=rows)

    theirs, ours = both(make, tmp_path)
    assert len(logged(ours)) == 4 and logged(ours) == pytest.approx(logged(theirs), abs=1e-5)
    assert logged(ours, "num_tokens") == logged(theirs, "num_tokens")
    resumed = make(trl_jax, ours.args.output_dir)
    resumed.train(resume_from_checkpoint=f"{ours.args.output_dir}/checkpoint-3")
    assert logged(resumed) == logged(ours)


def test_rates_of_groups_are_optaxs(checkpoint, tmp_path):
    class Own(trl_jax.RewardTrainer):
        def create_optimizer(self):
            if self.in_torch:
                return torch.optim.Adagrad([{"params": list(self.model.parameters()), "lr": 1e-3}])
            rates = {"slow": optax.set_to_zero(), "fast": optax.adamw(1e-2)}
            return optax.multi_transform(rates, lambda params: {n: "fast" if "score" in n else "slow" for n in params})

    args = trl_jax.RewardConfig(str(tmp_path), **CONFIG)
    trainer = Own(str(checkpoint(**FACTS)), args, train_dataset=table(8))
    trainer.in_torch = True
    with pytest.raises(
        TypeError, match="a torch.optim.adagrad.Adagrad cannot update JAX arrays; pass an optax transformation"
    ):
        trainer.train()
    trainer.in_torch, before = False, {name: values.numpy() for name, values in trainer.model.named_parameters()}
    trainer.train()
    changed = {name for name, values in trainer.model.named_parameters() if abs(values - before[name]).max() > 0}
    assert changed == {"score.weight"}


@pytest.mark.parametrize("kind", ["DPO", "Reward"])
def test_a_log_of_a_script_finds_the_metrics_where_trl_has_them(kind, checkpoint, tmp_path):
    """They are not in `logs`, so a `log` that filters them passes the metrics on."""

    def make(package, out):
        class Own(getattr(package, f"{kind}Trainer")):
            def log(self, logs, start_time=None):
                seen.append((sorted(name for name in logs if "loss" in name), "rewards/margins" in logs))
                tokens = self._metrics["train" if self.model.training else "eval"].get("num_tokens", [0])
                first = sum(tokens) / len(tokens)
                super().log({name: logs[name] for name in logs if "loss" in name} | {"first": first}, start_time)

        seen = Own.seen = []
        args = getattr(package, f"{kind}Config")(str(out), **BASE | {"max_steps": 2})
        folder = str(checkpoint(**FACTS if kind == "Reward" else CAUSAL))
        return Own(folder, args=args, train_dataset=table(8, kind="prompt"), eval_dataset=table(2, kind="prompt"))

    theirs, ours = both(make, tmp_path)
    margin = "margin" if kind == "Reward" else "rewards/margins"
    found = [(trainer.evaluate(), trainer.seen) for trainer in (theirs, ours)]
    assert found[1][1] == found[0][1] and f"eval_{margin}" in found[1][0]
    for name in ("first", margin, f"eval_{margin}"):
        assert logged(ours, name) == pytest.approx(logged(theirs, name), abs=1e-4), name
    assert len(logged(ours, margin)) == 2 and not ours._metrics["train"]


def test_numbers_that_trl_jax_logs_itself_are_not_appended_to(checkpoint, tmp_path):
    args = trl_jax.RewardConfig(str(tmp_path), **CONFIG)
    trainer = trl_jax.RewardTrainer(str(checkpoint(**FACTS)), args, train_dataset=table(8))
    trainer._metrics["eval"]["margin"].append(1.0)
    with pytest.raises(ValueError, match=r"appended to _metrics\[mode\]\['margin'\] outside of its loss"):
        trainer.log({"eval_margin": 0.5})

    class Appending(trl_jax.RewardTrainer):
        def log(self, logs, start_time=None):
            self._metrics["train"]["margin"].append(1.0)
            super().log(logs, start_time)

    trainer = Appending(str(checkpoint(**FACTS)), args, train_dataset=table(8))
    with pytest.raises(ValueError, match=r"appended to _metrics\[mode\]\['margin'\] outside of its loss"):
        trainer.train()


class Probes(TrainerCallback):
    def on_step_end(self, args, state, control, **others):
        if state.global_step == 1:
            self.trainer.log({"probe": 1.0})


def test_a_log_between_two_logs_leaves_their_metrics(checkpoint, tmp_path):
    """TRL adds the metrics of the steps since the last log to it, so that the next log has them of one step only."""
    folder, found = str(checkpoint(**CAUSAL)), []

    def make(package, out):
        args = package.SFTConfig(str(out), **CONFIG | {"logging_steps": 2, "gradient_accumulation_steps": 1})
        probes = Probes()
        rows = Dataset.from_list(text_rows(8))
        probes.trainer = package.SFTTrainer(folder, args=args, train_dataset=rows, callbacks=[probes])
        return probes.trainer

    for trainer in both(make, tmp_path):
        probe, log = trainer.state.log_history[:2]
        found.append((probe.get("entropy"), log["entropy"], log["loss"]))
    (first, second, loss), ours = found
    assert ours[0] is None and ours[1] == pytest.approx((first + second) / 2, abs=1e-3)
    assert ours[2] == pytest.approx(loss, abs=1e-4)
